#include "kernels/fp8.h"

#include <cmath>
#include <limits>

#include "kernels/window.h"

namespace shardlab::kernels {

float fp8_scale(float amax, DType target) {
  if (!std::isfinite(amax)) return std::numeric_limits<float>::quiet_NaN();
  if (amax == 0) return 1;
  const double largest = largest_value(target);
  int exponent = std::ilogb(amax) - std::ilogb(largest);
  if (static_cast<double>(amax) > std::ldexp(largest, exponent)) ++exponent;
  return std::ldexp(1.0f, std::clamp(exponent, -126, 126));
}

float fp8_delayed_scale(const Fp8History& a) {
  SHARDLAB_CHECK(a.n >= 1, "a history of {} steps", a.n);
  for (int64_t i = a.n - 1; i > 0; --i) a.history[i] = a.history[i - 1];
  a.history[0] = std::isfinite(a.amax) ? a.amax : 0.0f;
  return fp8_scale(*std::max_element(a.history, a.history + a.n), a.target);
}

namespace {

/// Calls body(first element, n, scale index) for the runs of each matrix that lie in one row and one block, none longer than a window.
template <class Body>
void for_runs(const Fp8Blocks& b, int64_t matrices, const Body& body) {
  for (int64_t row = 0; row < matrices * b.rows; ++row)
    for (int64_t block = 0; block < b.across(); ++block) {
      const int64_t begin = block * b.block_columns, end = std::min(b.columns, begin + b.block_columns);
      const int64_t down = row / b.rows * b.down() + row % b.rows / b.block_rows;
      for_blocks(end - begin, kBlockElements,
                 [&](int64_t first, int64_t n) { body(row * b.columns + begin + first, n, down * b.across() + block); });
    }
}

/// Largest of two sizes; NaN if either is.
float larger_size(float a, float b) { return std::isnan(a) || a > b ? a : b; }

}  // namespace

void fp8_find_scales(const MixedKernels& k, const Fp8FindScales& a, Scratch& scratch) {
  Window x(k.storage(), a.x, kBlockElements, scratch);
  if (scratch.counting()) return;
  const int64_t count = a.matrices * a.blocks.down() * a.blocks.across();
  std::fill_n(a.scales, count, 0.0f);
  for_runs(a.blocks, a.matrices, [&](int64_t first, int64_t n, int64_t scale) {
    a.scales[scale] = larger_size(a.scales[scale], k.storage().amax(x.read(first, n), n));
  });
  for (int64_t i = 0; i < count; ++i) a.scales[i] = fp8_scale(a.scales[i], a.target);
}

void fp8_quantise(const MixedKernels& k, const Fp8Quantise& a, Scratch& scratch) {
  Window x(k.storage(), a.x, kBlockElements, scratch), q(k.storage(), a.q, kBlockElements, scratch);
  if (scratch.counting()) return;
  for_runs(a.blocks, a.matrices, [&](int64_t first, int64_t n, int64_t scale) {
    k.storage().scale({x.read(first, n), n, 1.0f / a.scales[scale], q.place(first, n)});
    q.write();
  });
}

}  // namespace shardlab::kernels
