# Compiles the sources of a target several at a time: most of what a source takes to compile is the headers that its neighbours include
# as well. A source that needs definitions of its own stays alone, and so do those that CMake writes.
#
#   shardlab_compile_together(TARGET [AT_A_TIME 16] [ALONE a.cpp ...])
#
# ALONE: sources that take so long by themselves that the other cores would wait for the rest of their part, or that name what others name.
# -DSHARDLAB_TOGETHER=OFF compiles every source by itself: shorter after a change of one source, and it shows which of them live on their
# neighbours' includes. CMake's own UNITY_BUILD names sources by absolute paths: no compiler cache then serves a second checkout.
option(SHARDLAB_TOGETHER "Compile sources several at a time" ON)

function(shardlab_compile_together target)
  cmake_parse_arguments(arg "" "AT_A_TIME" "ALONE" ${ARGN})
  if(NOT SHARDLAB_TOGETHER)
    return()
  endif()
  if(NOT arg_AT_A_TIME)
    set(arg_AT_A_TIME 16)
  endif()
  get_target_property(sources ${target} SOURCES)
  set(kept "")
  set(joined "")
  set(extension cpp)
  foreach(source ${sources})
    get_filename_component(path ${source} ABSOLUTE)
    file(RELATIVE_PATH name ${PROJECT_SOURCE_DIR} ${path})
    get_filename_component(file ${path} NAME)
    get_source_file_property(definitions ${path} COMPILE_DEFINITIONS)
    get_source_file_property(language ${path} LANGUAGE)
    if(name MATCHES "^(build|\\.\\.)/" OR NOT name MATCHES "\\.(cpp|cu)$" OR definitions OR file IN_LIST arg_ALONE)
      list(APPEND kept ${source})
    else()
      list(APPEND joined ${name})
      if(name MATCHES "\\.cu$" AND NOT language STREQUAL "CXX")
        set(extension cu)  # all sources of nvcc: a target has no others
      endif()
    endif()
  endforeach()
  list(LENGTH joined total)
  # Parts of equal length: 17 sources are 9 and 8, not 16 and 1.
  math(EXPR parts "(${total} + ${arg_AT_A_TIME} - 1) / ${arg_AT_A_TIME}")
  set(begin 0)
  set(number 0)
  while(begin LESS total)
    math(EXPR count "(${total} - ${begin} + ${parts} - ${number} - 1) / (${parts} - ${number})")
    list(SUBLIST joined ${begin} ${count} part)
    list(TRANSFORM part REPLACE "(.+)" "#include \"\\1\"")
    list(JOIN part "\n" text)
    set(file ${CMAKE_CURRENT_BINARY_DIR}/${target}_${number}.${extension})
    file(CONFIGURE OUTPUT ${file} CONTENT "${text}\n" @ONLY)
    list(APPEND kept ${file})
    math(EXPR begin "${begin} + ${count}")
    math(EXPR number "${number} + 1")
  endwhile()
  set_target_properties(${target} PROPERTIES SOURCES "${kept}")
  # GCC takes a source within another for a header, whose classes should hold nothing local.
  target_compile_options(${target} PRIVATE $<$<COMPILE_LANG_AND_ID:CXX,GNU>:-Wno-subobject-linkage>)
endfunction()

# Code whose time a user does not notice is compiled for build time. Its results are the same: no -O changes how floating-point numbers round.
function(shardlab_cold target)
  target_compile_options(${target} PRIVATE $<$<CONFIG:Release>:-O1>)
endfunction()
