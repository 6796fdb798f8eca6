// Dropout.
#include "kernels/cpu/random_words.h"
#include "kernels/cpu/sums.h"
#include "kernels/cpu/variant.h"

namespace shardlab::kernels::SHARDLAB_VARIANT {
namespace {

/// A run of logically consecutive elements.
void drop_run(float* z, int64_t n, uint64_t element, uint32_t threshold, float scale, const RandomKey& key) {
  for_random_words(key, element, n, [=](int64_t done, const uint32_t* words, int64_t here) {
    float* to = z + done;
    for (int64_t i = 0; i < here; ++i) {
      const float kept = to[i] * scale;
      to[i] = words[i] >= threshold ? kept : 0.0f;
    }
  });
}

}  // namespace

void dropout(const Dropout& a) {
  expect(a.p >= 0 && a.p < 1, "dropout: p is in [0, 1); this is p in millionths",
         static_cast<int64_t>(1e6 * static_cast<double>(a.p)));
  const double bound = static_cast<double>(a.p) * 4294967296.0;  // exact
  uint32_t threshold = static_cast<uint32_t>(bound);             // below 2^32, since p is at most 1 - 2^-24
  if (static_cast<double>(threshold) < bound) ++threshold;       // kept if bits >= bound
  const float scale = 1.0f / (1.0f - a.p);
  const int64_t tokens_total = a.tokens_total == 0 ? a.tokens : a.tokens_total;
  const int64_t width_total = a.width_total == 0 ? a.width : a.width_total;
  for (int64_t b = 0; b < a.sequences; ++b)
    for (int64_t t = 0; t < a.tokens; ++t) {
      const int64_t row = (a.sequence_begin + b) * tokens_total + a.token_begin + t;
      drop_run(a.z + (b * a.tokens + t) * a.width, a.width, static_cast<uint64_t>(row * width_total + a.width_begin), threshold,
               scale, a.key);
    }
}

}  // namespace shardlab::kernels::SHARDLAB_VARIANT
