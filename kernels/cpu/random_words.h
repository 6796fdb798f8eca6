// Philox4x32-10 on sixteen blocks at once, which is 64 elements.
#pragma once

#include "kernels/cpu/vector.h"
#include "plan/base/philox.h"

namespace shardlab::kernels::SHARDLAB_VARIANT {

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
SHARDLAB_INLINE void random_block(const RandomKey& key, uint64_t block, uint32_t* words) {
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

/// Calls body(i, words, n) for runs of n <= 64 consecutive elements, words[j] = random_bits(key, element + i + j).
template <class Body>
SHARDLAB_INLINE void for_random_words(const RandomKey& key, uint64_t element, int64_t n, const Body& body) {
  uint32_t words[kWords];
  for (int64_t done = 0; done < n;) {
    const uint64_t at = element + static_cast<uint64_t>(done);
    const int skip = static_cast<int>(at % 4);
    const int64_t here = n - done < kWords - skip ? n - done : kWords - skip;
    random_block(key, at / 4, words);
    body(done, words + skip, here);
    done += here;
  }
}

}  // namespace shardlab::kernels::SHARDLAB_VARIANT
