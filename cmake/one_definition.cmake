# Two definitions of one name are an error, wherever they are: the link step reads the link-time form of every source of the program. It
# merges their types and declarations and stops there (-flinker-output=rel), for it is in merging that GCC compares them.
if(NOT CMAKE_INTERPROCEDURAL_OPTIMIZATION)
  return()
endif()
set(objects "")
foreach(target shardlab_plan shardlab_kernels shardlab_kernels_gpu shardlab_strategies shardlab_runtime shardlab_profiler shardlab_interpreter
               shardlab_estimator shardlab_format shardlab_reports shardlab_sweeps shardlab_answers shardlab_interop shardlab_cases shardlab_cli shardlab)
  list(APPEND objects $<TARGET_OBJECTS:${target}>)
endforeach()
get_property(variants GLOBAL PROPERTY SHARDLAB_KERNEL_VARIANTS)
foreach(variant ${variants})
  list(APPEND objects $<TARGET_OBJECTS:shardlab_kernels_${variant}>)
endforeach()
set(merged ${CMAKE_CURRENT_BINARY_DIR}/one_definition.o)
add_custom_command(OUTPUT ${merged} DEPENDS ${objects} COMMAND_EXPAND_LISTS VERBATIM
                   COMMAND ${CMAKE_CXX_COMPILER} -O0 -flto=auto -nostdlib -r -flinker-output=rel -Werror=odr -Werror=lto-type-mismatch ${objects} -o ${merged})
add_custom_target(shardlab_one_definition DEPENDS ${merged})
