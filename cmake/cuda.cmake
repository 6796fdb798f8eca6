# Finds the CUDA toolkit and chooses architectures. Sets SHARDLAB_WITH_CUDA.
#
# By default machine code for compute capability 8.0 and 9.0 (with Hopper's own instructions), and PTX of 8.0 for everything newer. The
# preset `test` compiles for 9.0 alone. Other choices: -DCMAKE_CUDA_ARCHITECTURES=...
if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
  set(CMAKE_CUDA_ARCHITECTURES "80;90a-real" CACHE STRING "CUDA architectures")
endif()
# The toolkit's usual place, which is not always in PATH.
find_program(SHARDLAB_NVCC nvcc HINTS ENV CUDACXX ENV CUDA_HOME PATHS /usr/local/cuda PATH_SUFFIXES bin)
if(SHARDLAB_NVCC AND NOT DEFINED CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX})
  set(CMAKE_CUDA_COMPILER ${SHARDLAB_NVCC} CACHE FILEPATH "CUDA compiler")
endif()
include(CheckLanguage)
check_language(CUDA)
if(CMAKE_CUDA_COMPILER)
  enable_language(CUDA)
  # CMake 3.25.1 does not know that nvcc has C++20 (12.0 and later).
  if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)
    set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)
    set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION -std=c++20)
  endif()
  set(CMAKE_CUDA_STANDARD 20)
  find_package(CUDAToolkit REQUIRED)
  set(CMAKE_CUDA_COMPILER_LAUNCHER ${SHARDLAB_CCACHE})
  # Kernels that no device runs here are compiled in half of the time (attention_block.cu: 5.7 s in place of 27.6).
  option(SHARDLAB_CUDA_FAST_COMPILE "Compile kernels quickly rather than for speed, where nvcc can (13.0 and later)" OFF)
  if(SHARDLAB_CUDA_FAST_COMPILE AND CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 13.0)
    string(APPEND CMAKE_CUDA_FLAGS " --Ofast-compile=max")
  endif()
  set(SHARDLAB_WITH_CUDA ON)
  message(STATUS "CUDA ${CMAKE_CUDA_COMPILER_VERSION} for ${CMAKE_CUDA_ARCHITECTURES}")
elseif(SHARDLAB_CUDA STREQUAL "ON")
  message(FATAL_ERROR "SHARDLAB_CUDA is ON and there is no nvcc: install the CUDA toolkit (12.4 or later), put nvcc in PATH, or configure with -DSHARDLAB_CUDA=AUTO")
else()
  message(STATUS "no CUDA toolkit: GPU kernels are built for the host only")
endif()
