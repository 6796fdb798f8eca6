# What a folder is to programs outside of this project: a static library of the CMake package `shardlab` with its headers, and a part of
# libshardlab_c.
#
#   shardlab_library(TARGET NAME [HEADERS_OF folder])
#
# Other programs link it as shardlab::NAME, and include its headers by the paths that they have here ("plan/case.h").
include(GNUInstallDirs)

function(shardlab_library target name)
  # A part of a shared library. Names stay within it, so that calls are as direct as in a program.
  set_target_properties(${target} PROPERTIES POSITION_INDEPENDENT_CODE ON CXX_VISIBILITY_PRESET hidden VISIBILITY_INLINES_HIDDEN ON EXPORT_NAME ${name})
  add_library(shardlab::${name} ALIAS ${target})
  install(TARGETS ${target} EXPORT shardlab ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT library)
endfunction()

# The headers of a folder, those of the folders in it included.
function(shardlab_install_headers folder)
  install(DIRECTORY ${PROJECT_SOURCE_DIR}/${folder} DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/shardlab COMPONENT library FILES_MATCHING PATTERN "*.h")
endfunction()
