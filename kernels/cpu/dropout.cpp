// Dropout: Philox4x32-10 on sixteen blocks at once, which is 64 elements.
#include "kernels/cpu/sums.h"
#include "kernels/cpu/variant.h"

namespace shardlab::kernels::SHARDLAB_VARIANT {
namespace {

inline constexpr int kBlocks = 16;
inline constexpr int kWords = 4 * kBlocks;

/// Lanes of 64 bits, one Philox block each: the low half holds a word, the high half is not looked at.
typedef uint64_t LongPiece __attribute__((vector_size(4 * kPieceLanes)));
inline constexpr int kLongLanes = kPieceLanes / 2;

/// Low half times low half, all 64 bits of it.
SHARDLAB_INLINE LongPiece multiply(const LongPiece& a, uint32_t b) {
  const LongPiece factor = LongPiece{} + b;
#if defined(__AVX512F__)
  return (LongPiece)_mm512_maskz_mul_epu32(0xff, (__m512i)a, (__m512i)factor);
#elif defined(__AVX2__)
  return (LongPiece)_mm256_mul_epu32((__m256i)a, (__m256i)factor);
#else
  return (a & 0xffffffffu) * factor;
#endif
}

/// The 64 random words of logical elements 4*block .. 4*block+63, as random_bits of plan/base/philox.h gives them one by one.
void random_words(const RandomKey& key, uint64_t block, uint32_t* words) {
  for (int set = 0; set < kBlocks; set += kLongLanes) {
    LongPiece counter;
    for (int i = 0; i < kLongLanes; ++i) counter[i] = block + static_cast<uint64_t>(set + i);
    LongPiece x0 = counter, x1 = counter >> 32;
    LongPiece x2 = LongPiece{} + ((static_cast<uint32_t>(key.use) << 24) | key.tensor), x3 = LongPiece{} + key.step;
    uint32_t k0 = static_cast<uint32_t>(key.seed), k1 = static_cast<uint32_t>(key.seed >> 32);
    for (int round = 0; round < 10; ++round) {
      const LongPiece p0 = multiply(x0, 0xD2511F53u), p1 = multiply(x2, 0xCD9E8D57u);
      x0 = (p1 >> 32) ^ x1 ^ k0;
      x1 = p1;
      x2 = (p0 >> 32) ^ x3 ^ k1;
      x3 = p0;
      k0 += 0x9E3779B9u;
      k1 += 0xBB67AE85u;
    }
    for (int i = 0; i < kLongLanes; ++i) {
      uint32_t* to = words + 4 * (set + i);
      to[0] = static_cast<uint32_t>(x0[i]);
      to[1] = static_cast<uint32_t>(x1[i]);
      to[2] = static_cast<uint32_t>(x2[i]);
      to[3] = static_cast<uint32_t>(x3[i]);
    }
  }
}

/// A run of logically consecutive elements.
void drop_run(float* z, int64_t n, uint64_t element, uint32_t threshold, float scale, const RandomKey& key) {
  uint32_t words[kWords];
  int64_t done = 0;
  while (done < n) {
    const uint64_t block = (element + static_cast<uint64_t>(done)) / 4;
    const int skip = static_cast<int>((element + static_cast<uint64_t>(done)) % 4);
    const int64_t here = n - done < kWords - skip ? n - done : kWords - skip;
    random_words(key, block, words);
    float* to = z + done;
    for (int64_t i = 0; i < here; ++i) {
      const float kept = to[i] * scale;
      to[i] = words[skip + i] >= threshold ? kept : 0.0f;
    }
    done += here;
  }
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
