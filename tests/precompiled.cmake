# Headers of systems and packages that nearly every test includes, compiled once for each level of optimisation. Headers of this project
# are not among them: a change of one would compile every test anew.
#
# AUTO precompiles in a release build without a compiler cache: GCC writes a precompiled header with other bytes each time, so that a cache
# would find nothing. Sanitizers build a few tests, and `odr` wants each source's own view of the headers.
set(SHARDLAB_PRECOMPILED AUTO CACHE STRING "Precompiled headers of tests: AUTO, ON or OFF")
set_property(CACHE SHARDLAB_PRECOMPILED PROPERTY STRINGS AUTO ON OFF)
set(SHARDLAB_PRECOMPILES OFF)
if(SHARDLAB_PRECOMPILED STREQUAL "ON" OR (SHARDLAB_PRECOMPILED STREQUAL "AUTO" AND NOT CCACHE AND CMAKE_BUILD_TYPE STREQUAL "Release"))
  set(SHARDLAB_PRECOMPILES ON)
endif()

set(catch <catch2/catch.hpp>)
if(Catch2_VERSION VERSION_GREATER_EQUAL 3)
  set(catch <catch2/catch_all.hpp>)
endif()

# shardlab_test_code(TARGET LEVEL): the level, -O0 or -O1, in a build that optimises; and the precompiled headers of that level.
function(shardlab_test_code target level)
  target_compile_options(${target} PRIVATE $<$<CONFIG:Release,RelWithDebInfo>:${level}>)
  if(NOT SHARDLAB_PRECOMPILES)
    return()
  endif()
  set(first shardlab_precompiled${level})
  if(NOT TARGET ${first})
    file(CONFIGURE OUTPUT ${CMAKE_BINARY_DIR}/tests/${first}.cpp CONTENT "")
    add_library(${first} STATIC ${CMAKE_BINARY_DIR}/tests/${first}.cpp)
    target_compile_options(${first} PRIVATE $<$<CONFIG:Release,RelWithDebInfo>:${level}>)
    target_link_libraries(${first} PRIVATE shardlab_flags Catch2::Catch2)
    target_precompile_headers(${first} PRIVATE <algorithm> <array> <cmath> <cstdint> <filesystem> <fstream> <functional> <map> <memory> <numeric>
                              <optional> <set> <span> <sstream> <string> <variant> <vector> <fmt/format.h> ${catch})
  endif()
  target_precompile_headers(${target} REUSE_FROM ${first})
endfunction()
