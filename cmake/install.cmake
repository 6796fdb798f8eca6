# What `cmake --install` and CPack hand out: the program, what it names in its messages, and the libraries for other programs.
#
# PREFIX/share/shardlab has the names of the source tree: sweeps/, docs/, plan/README.md. The program finds it from its own place
# (cli/shipped.h).
include(CMakePackageConfigHelpers)

set(shipped ${CMAKE_INSTALL_DATADIR}/shardlab)
install(DIRECTORY sweeps/ DESTINATION ${shipped}/sweeps COMPONENT program FILES_MATCHING PATTERN "*.yaml" PATTERN "*.json" PATTERN "*.md")
install(DIRECTORY simulator/profiles/ DESTINATION ${shipped}/simulator/profiles COMPONENT program FILES_MATCHING PATTERN "*.yaml" PATTERN "*.md")
install(DIRECTORY docs/ DESTINATION ${shipped}/docs COMPONENT program FILES_MATCHING PATTERN "*.md" PATTERN "*.png")
foreach(folder plan kernels)
  install(FILES ${folder}/README.md DESTINATION ${shipped}/${folder} COMPONENT program)
endforeach()
install(FILES README.md CHANGELOG.md DESTINATION ${shipped} COMPONENT program)
install(FILES LICENSE DESTINATION ${CMAKE_INSTALL_DATADIR}/doc/shardlab RENAME copyright COMPONENT program)

foreach(folder plan strategies simulator sweeps answers)
  shardlab_install_headers(${folder})
endforeach()
# Of reports only what answers are made of.
install(FILES reports/format.h reports/table.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/shardlab/reports COMPONENT library)

set(package ${CMAKE_INSTALL_LIBDIR}/cmake/shardlab)
install(EXPORT shardlab NAMESPACE shardlab:: FILE shardlabTargets.cmake DESTINATION ${package} COMPONENT library)
configure_package_config_file(cmake/shardlabConfig.cmake.in ${CMAKE_CURRENT_BINARY_DIR}/shardlabConfig.cmake INSTALL_DESTINATION ${package})
write_basic_package_version_file(${CMAKE_CURRENT_BINARY_DIR}/shardlabConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/shardlabConfig.cmake ${CMAKE_CURRENT_BINARY_DIR}/shardlabConfigVersion.cmake DESTINATION ${package} COMPONENT library)

# `./dev deb`: shardlab, and libshardlab-dev for programs that link it.
set(CPACK_GENERATOR DEB)
set(CPACK_PACKAGE_NAME shardlab)
set(CPACK_PACKAGE_VENDOR shardlab)
set(CPACK_PACKAGE_CONTACT "the maintainers of shardlab <shardlab@localhost>")
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "${PROJECT_DESCRIPTION}")
set(CPACK_PACKAGING_INSTALL_PREFIX /usr)
set(CPACK_STRIP_FILES ON)
set(CPACK_DEB_COMPONENT_INSTALL ON)
set(CPACK_COMPONENTS_ALL program library)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
set(CPACK_DEBIAN_PACKAGE_SECTION science)
set(CPACK_DEBIAN_PROGRAM_PACKAGE_NAME shardlab)
set(CPACK_DEBIAN_LIBRARY_PACKAGE_NAME libshardlab-dev)
set(CPACK_DEBIAN_LIBRARY_PACKAGE_DEPENDS "shardlab (= ${PROJECT_VERSION}), libfmt-dev, libyaml-cpp-dev, nlohmann-json3-dev")
set(CPACK_DEBIAN_LIBRARY_PACKAGE_SECTION libdevel)
include(CPack)
