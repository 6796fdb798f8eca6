# Writes OUTPUT, a header that says which commit SOURCE stands at; leaves it alone when it says so already, so that nothing is rebuilt.
# Run at every build: a commit that was looked up when the build folder was configured would be that of the past.
execute_process(COMMAND git -C ${SOURCE} describe --always --dirty --abbrev=12 OUTPUT_VARIABLE commit OUTPUT_STRIP_TRAILING_WHITESPACE
                ERROR_QUIET)
set(text "#define SHARDLAB_COMMIT \"${commit}\"\n")
set(old "")
if(EXISTS ${OUTPUT})
  file(READ ${OUTPUT} old)
endif()
if(NOT old STREQUAL text)
  file(WRITE ${OUTPUT} "${text}")
endif()
