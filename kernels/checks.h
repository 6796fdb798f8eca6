// Checks of kernel arguments. The message is put together in one place, outside of the processor variants.
#pragma once

#include <cstdint>

namespace shardlab::kernels {

/// Prints the kernel's rule that `value` breaks, and aborts: a bug of the caller.
[[noreturn]] void argument_refused(const char* rule, int64_t value);

/// Stops the program unless `holds`. rule: "attention: kv_heads divides heads".
inline __attribute__((always_inline)) void expect(bool holds, const char* rule, int64_t value) {
  if (!holds) [[unlikely]]
    argument_refused(rule, value);
}

}  // namespace shardlab::kernels
