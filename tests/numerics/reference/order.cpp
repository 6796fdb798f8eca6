#include "tests/numerics/reference/order.h"

// A fused multiply-add is one rounding on every processor; where it is an instruction, several chains take one.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
#define SHARDLAB_CLONES __attribute__((target_clones("arch=x86-64-v3", "default")))
#else
#define SHARDLAB_CLONES
#endif

namespace shardlab::reference {

SHARDLAB_CLONES void link_chains(float a, const float* b, int64_t n, float* sums) {
  for (int64_t j = 0; j < n; ++j) sums[j] = std::fma(a, b[j], sums[j]);
}

SHARDLAB_CLONES void link_chains(double a, const double* b, int64_t n, double* sums) {
  for (int64_t j = 0; j < n; ++j) sums[j] = std::fma(a, b[j], sums[j]);
}

}  // namespace shardlab::reference
