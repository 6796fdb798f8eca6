// Dropout: Philox4x32-10 on sixteen blocks at once, which is 64 elements.
#include "kernels/cpu/sums.h"
#include "kernels/cpu/variant.h"

namespace shardlab::kernels::SHARDLAB_VARIANT {
namespace {

inline constexpr int kBlocks = 16;
inline constexpr int kWords = 4 * kBlocks;

/// The 64 random words of logical elements 4*block .. 4*block+63, as random_bits of plan/base/philox.h gives them one by one.
void random_words(const RandomKey& key, uint64_t block, uint32_t* words) {
  uint32_t x0[kBlocks], x1[kBlocks], x2[kBlocks], x3[kBlocks];
  for (int i = 0; i < kBlocks; ++i) {
    x0[i] = static_cast<uint32_t>(block + static_cast<uint64_t>(i));
    x1[i] = static_cast<uint32_t>((block + static_cast<uint64_t>(i)) >> 32);
    x2[i] = (static_cast<uint32_t>(key.use) << 24) | key.tensor;
    x3[i] = key.step;
  }
  uint32_t k0 = static_cast<uint32_t>(key.seed), k1 = static_cast<uint32_t>(key.seed >> 32);
  for (int round = 0; round < 10; ++round) {
    for (int i = 0; i < kBlocks; ++i) {
      const uint64_t p0 = uint64_t{0xD2511F53u} * x0[i];
      const uint64_t p1 = uint64_t{0xCD9E8D57u} * x2[i];
      x0[i] = static_cast<uint32_t>(p1 >> 32) ^ x1[i] ^ k0;
      x1[i] = static_cast<uint32_t>(p1);
      x2[i] = static_cast<uint32_t>(p0 >> 32) ^ x3[i] ^ k1;
      x3[i] = static_cast<uint32_t>(p0);
    }
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  for (int i = 0; i < kBlocks; ++i) {
    words[4 * i] = x0[i];
    words[4 * i + 1] = x1[i];
    words[4 * i + 2] = x2[i];
    words[4 * i + 3] = x3[i];
  }
}

/// A run of logically consecutive elements.
void drop_run(float* z, int64_t n, uint64_t element, uint64_t threshold, float scale, const RandomKey& key) {
  uint32_t words[kWords];
  int64_t done = 0;
  while (done < n) {
    const uint64_t block = (element + static_cast<uint64_t>(done)) / 4;
    const int skip = static_cast<int>((element + static_cast<uint64_t>(done)) % 4);
    const int64_t here = n - done < kWords - skip ? n - done : kWords - skip;
    random_words(key, block, words);
    for (int64_t i = 0; i < here; ++i) {
      const float kept = z[done + i] * scale;
      z[done + i] = words[skip + i] >= threshold ? kept : 0.0f;
    }
    done += here;
  }
}

}  // namespace

void dropout(const Dropout& a) {
  expect(a.p >= 0 && a.p < 1, "dropout: p is in [0, 1); this is p in millionths", static_cast<int64_t>(1e6 * static_cast<double>(a.p)));
  const double bound = static_cast<double>(a.p) * 4294967296.0;  // exact
  uint64_t threshold = static_cast<uint64_t>(bound);
  if (static_cast<double>(threshold) < bound) ++threshold;  // kept if bits >= bound
  const float scale = 1.0f / (1.0f - a.p);
  const int64_t tokens_total = a.tokens_total == 0 ? a.tokens : a.tokens_total;
  const int64_t width_total = a.width_total == 0 ? a.width : a.width_total;
  for (int64_t b = 0; b < a.sequences; ++b)
    for (int64_t t = 0; t < a.tokens; ++t) {
      const int64_t row = (a.sequence_begin + b) * tokens_total + a.token_begin + t;
      drop_run(a.z + (b * a.tokens + t) * a.width, a.width, static_cast<uint64_t>(row * width_total + a.width_begin), threshold, scale,
               a.key);
    }
}

}  // namespace shardlab::kernels::SHARDLAB_VARIANT
