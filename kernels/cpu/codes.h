// Narrow floating-point formats as integer formulas on pieces of vectors: the same instructions' results on every variant.
#pragma once

#include "kernels/cpu/vector.h"

namespace shardlab::kernels::SHARDLAB_VARIANT {

typedef uint16_t HalfPiece __attribute__((vector_size(2 * kPieceLanes)));
typedef uint8_t BytePiece __attribute__((vector_size(kPieceLanes)));

SHARDLAB_INLINE WordPiece words(uint32_t x) { return WordPiece{} + x; }
SHARDLAB_INLINE WordPiece pick(const IntPiece& condition, const WordPiece& a, const WordPiece& b) { return condition ? a : b; }

/// The differences between the formats. Codes are sign, exponent, mantissa from the top. kTop: code of infinity, or of NaN in a
/// format without infinity. kCap: fp32 bits of the largest value for formats that saturate, else 0.
struct Bf16 {
  using Piece = HalfPiece;
  using Code = uint16_t;
  static constexpr int kExponent = 8, kMantissa = 7;
  static constexpr uint32_t kInfinity = 0x7f80, kNan = 0x7fc0, kCap = 0;
};
struct F16 {
  using Piece = HalfPiece;
  using Code = uint16_t;
  static constexpr int kExponent = 5, kMantissa = 10;
  static constexpr uint32_t kInfinity = 0x7c00, kNan = 0x7e00, kCap = 0;
};
struct F8E5M2 {
  using Piece = BytePiece;
  using Code = uint8_t;
  static constexpr int kExponent = 5, kMantissa = 2;
  static constexpr uint32_t kInfinity = 0x7c, kNan = 0x7e, kCap = 0x47600000;  // 57344
};
struct F8E4M3 {
  using Piece = BytePiece;
  using Code = uint8_t;
  static constexpr int kExponent = 4, kMantissa = 3;
  static constexpr uint32_t kInfinity = 0, kNan = 0x7f, kCap = 0x43e00000;  // 448
};

template <class F>
inline constexpr int kBias = (1 << (F::kExponent - 1)) - 1;
/// Bits of the fp32 mantissa that the format lacks.
template <class F>
inline constexpr int kLost = 23 - F::kMantissa;
/// Exponent field, in fp32, of the smallest normal value.
template <class F>
inline constexpr uint32_t kNormal = 127 - kBias<F> + 1;
template <class F>
inline constexpr int kSignShift = 31 - F::kExponent - F::kMantissa;
inline constexpr uint32_t kSign = 0x80000000, kInfinity = 0x7f800000;

/// Codes of fp32 values, rounded to nearest even.
template <class F>
SHARDLAB_INLINE WordPiece encode(const FloatPiece& x) {
  const WordPiece all = (WordPiece)x, sign = all & kSign;
  WordPiece size = all ^ sign;
  const IntPiece nan = (IntPiece)size > (IntPiece)words(kInfinity);
  if constexpr (F::kCap != 0) size = pick((IntPiece)size > (IntPiece)words(F::kCap), words(F::kCap), size);
  const WordPiece odd = (size >> kLost<F>)&1u;
  WordPiece code = (size - ((kNormal<F> - 1) << 23) + ((1u << (kLost<F> - 1)) - 1) + odd) >> kLost<F>;
  if constexpr (kBias<F> != 127) {
    // Below the smallest normal value: adding a power of two whose last bit is the smallest subnormal rounds there.
    constexpr uint32_t kAlign = (kNormal<F> + kLost<F>) << 23;
    const FloatPiece aligned = (FloatPiece)size + (FloatPiece)words(kAlign);
    code = pick((IntPiece)size < (IntPiece)words(kNormal<F> << 23), (WordPiece)aligned - kAlign, code);
    if constexpr (F::kCap == 0) code = pick((IntPiece)code > (IntPiece)words(F::kInfinity), words(F::kInfinity), code);
  }
  return pick(nan, words(F::kNan), code) | (sign >> kSignShift<F>);
}

/// fp32 values of codes, exactly.
template <class F>
SHARDLAB_INLINE FloatPiece decode(const WordPiece& code) {
  const WordPiece sign = (code << kSignShift<F>)&kSign;
  const WordPiece size = code & ((1u << (F::kExponent + F::kMantissa)) - 1);
  WordPiece bits = size << kLost<F>;
  if constexpr (kBias<F> != 127) {
    const WordPiece normal = bits + ((kNormal<F> - 1) << 23);
    // A subnormal code with the exponent of the smallest normal value is that much too large.
    const FloatPiece low = (FloatPiece)(bits + (kNormal<F> << 23)) - (FloatPiece)words(kNormal<F> << 23);
    bits = pick((IntPiece)size < (IntPiece)words(1u << F::kMantissa), (WordPiece)low, normal);
    if constexpr (F::kInfinity != 0)
      bits = pick((IntPiece)size >= (IntPiece)words(F::kInfinity), (size << kLost<F>) | kInfinity, bits);
    else
      bits = pick((IntPiece)size == (IntPiece)words(F::kNan), words(0x7fc00000), bits);
  }
  return (FloatPiece)(bits | sign);
}

/// One value, rounded away from 0 where its fraction and the random word's, added, reach 1.
template <class F>
SHARDLAB_INLINE uint32_t encode_stochastic(float x, uint32_t random) {
  const uint32_t all = static_cast<uint32_t>(bits(x)), sign = (all & kSign) >> kSignShift<F>;
  uint32_t size = all & ~kSign;
  if (size > kInfinity) return F::kNan | sign;
  if constexpr (F::kCap != 0)
    size = size > F::kCap ? F::kCap : size;
  else if (size == kInfinity)
    return F::kInfinity | sign;
  const uint32_t field = size >> 23;
  const uint32_t exponent = field == 0 ? 1 : field;
  const uint64_t mantissa = (size & 0x7fffff) | (field == 0 ? 0u : 0x800000u);
  const bool normal = exponent >= kNormal<F>;
  const uint32_t shift = kLost<F> + (normal ? 0 : kNormal<F> - exponent);
  if (shift > 56) return sign;  // less than 2^-32 of the smallest value
  const uint64_t added = shift <= 32 ? random >> (32 - shift) : static_cast<uint64_t>(random) << (shift - 32);
  const uint64_t kept = (mantissa + added) >> shift;
  uint32_t code = static_cast<uint32_t>(kept) + (normal ? (exponent - kNormal<F>) << F::kMantissa : 0);
  if constexpr (F::kCap == 0) code = code > F::kInfinity ? F::kInfinity : code;
  return code | sign;
}

/// Sixteen codes of memory as words; the first n, the others 0.
template <class F>
SHARDLAB_INLINE void load_codes(const typename F::Code* from, int n, WordPiece* to) {
  typename F::Code lanes[kLanes] = {};
  std::memcpy(lanes, from, sizeof(typename F::Code) * static_cast<size_t>(n));
  SHARDLAB_EACH_PIECE {
    typename F::Piece piece;
    std::memcpy(&piece, lanes + i * kPieceLanes, sizeof piece);
    to[i] = __builtin_convertvector(piece, WordPiece);
  }
}
template <class F>
SHARDLAB_INLINE void store_codes(typename F::Code* to, int n, const WordPiece* codes) {
  typename F::Code lanes[kLanes];
  SHARDLAB_EACH_PIECE {
    const typename F::Piece piece = __builtin_convertvector(codes[i], typename F::Piece);
    std::memcpy(lanes + i * kPieceLanes, &piece, sizeof piece);
  }
  std::memcpy(to, lanes, sizeof(typename F::Code) * static_cast<size_t>(n));
}

}  // namespace shardlab::kernels::SHARDLAB_VARIANT
