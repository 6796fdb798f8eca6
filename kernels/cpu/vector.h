// Sixteen fp32 lanes as the processor variant has them: one 512-bit register, two of 256 or four of 128. Every operation is lane by
// lane and correctly rounded, so all variants give the same bits.
//
// Everything here lives in the variant's own namespace. Nothing of the standard library may be left as an out-of-line
// inline function in a variant's object files: the linker keeps one copy of each, perhaps one that this processor cannot
// run (tests/kernels checks).
#pragma once

#ifndef SHARDLAB_VARIANT
#error "compile kernels/cpu with -DSHARDLAB_VARIANT=<namespace>"
#endif

#if defined(__AVX2__)
#include <immintrin.h>
#endif
#include <cmath>
#include <cstdint>
#include <cstring>

#define SHARDLAB_INLINE inline __attribute__((always_inline))

namespace shardlab::kernels::SHARDLAB_VARIANT {

inline constexpr int kLanes = 16;

#if defined(__AVX512F__)
inline constexpr int kPieces = 1;
#elif defined(__AVX2__)
inline constexpr int kPieces = 2;
#else
inline constexpr int kPieces = 4;
#endif
inline constexpr int kPieceLanes = kLanes / kPieces;

typedef float FloatPiece __attribute__((vector_size(4 * kPieceLanes)));
typedef int32_t IntPiece __attribute__((vector_size(4 * kPieceLanes)));
typedef uint32_t WordPiece __attribute__((vector_size(4 * kPieceLanes)));  // integers wrap around in this form

/// Sixteen 32-bit integers; also the result of comparisons (-1 true, 0 false).
struct Ints {
  IntPiece piece[kPieces];
};
/// Sixteen floats.
struct Floats {
  FloatPiece piece[kPieces];
};

#define SHARDLAB_EACH_PIECE for (int i = 0; i < kPieces; ++i)

SHARDLAB_INLINE Floats floats(float x) {
  Floats r;
  SHARDLAB_EACH_PIECE r.piece[i] = x - FloatPiece{};  // x - 0 is x, -0 included
  return r;
}
/// Sixteen times +0.
SHARDLAB_INLINE Floats zeros() {
  Floats r;
  SHARDLAB_EACH_PIECE r.piece[i] = FloatPiece{};
  return r;
}
SHARDLAB_INLINE Floats load(const float* p) {
  Floats r;
  // Piece by piece: a copy of the whole struct would keep it in memory.
  SHARDLAB_EACH_PIECE std::memcpy(&r.piece[i], p + i * kPieceLanes, sizeof(FloatPiece));
  return r;
}
SHARDLAB_INLINE void store(float* p, const Floats& x) {
  SHARDLAB_EACH_PIECE std::memcpy(p + i * kPieceLanes, &x.piece[i], sizeof(FloatPiece));
}

/// The first n (0 to 16) lanes from p, the others +0; memory past them is not touched.
SHARDLAB_INLINE Floats load_first(const float* p, int n) {
#if defined(__AVX512F__)
  Floats r;
  r.piece[0] = _mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << n) - 1), p);
  return r;
#else
  float lanes[kLanes] = {};
  for (int i = 0; i < n; ++i) lanes[i] = p[i];
  return load(lanes);
#endif
}
SHARDLAB_INLINE void store_first(float* p, const Floats& x, int n) {
#if defined(__AVX512F__)
  _mm512_mask_storeu_ps(p, static_cast<__mmask16>((1u << n) - 1), x.piece[0]);
#else
  float lanes[kLanes];
  store(lanes, x);
  for (int i = 0; i < n; ++i) p[i] = lanes[i];
#endif
}

SHARDLAB_INLINE Floats operator+(const Floats& a, const Floats& b) {
  Floats r;
  SHARDLAB_EACH_PIECE r.piece[i] = a.piece[i] + b.piece[i];
  return r;
}
SHARDLAB_INLINE Floats operator-(const Floats& a, const Floats& b) {
  Floats r;
  SHARDLAB_EACH_PIECE r.piece[i] = a.piece[i] - b.piece[i];
  return r;
}
SHARDLAB_INLINE Floats operator*(const Floats& a, const Floats& b) {
  Floats r;
  SHARDLAB_EACH_PIECE r.piece[i] = a.piece[i] * b.piece[i];
  return r;
}
SHARDLAB_INLINE Floats operator/(const Floats& a, const Floats& b) {
  Floats r;
  SHARDLAB_EACH_PIECE r.piece[i] = a.piece[i] / b.piece[i];
  return r;
}
SHARDLAB_INLINE Ints operator<(const Floats& a, const Floats& b) {
  Ints r;
  SHARDLAB_EACH_PIECE r.piece[i] = a.piece[i] < b.piece[i];
  return r;
}
SHARDLAB_INLINE Ints operator==(const Floats& a, const Floats& b) {
  Ints r;
  SHARDLAB_EACH_PIECE r.piece[i] = a.piece[i] == b.piece[i];
  return r;
}
SHARDLAB_INLINE Floats select(const Ints& condition, const Floats& a, const Floats& b) {
  Floats r;
  SHARDLAB_EACH_PIECE r.piece[i] = condition.piece[i] ? a.piece[i] : b.piece[i];
  return r;
}
/// a where b < a, else b.
SHARDLAB_INLINE Floats larger(const Floats& a, const Floats& b) { return select(b < a, a, b); }

/// a * b + c rounded once.
SHARDLAB_INLINE Floats fma(const Floats& a, const Floats& b, const Floats& c) {
  Floats r;
#if defined(__AVX512F__)
  r.piece[0] = _mm512_fmadd_ps(a.piece[0], b.piece[0], c.piece[0]);
#elif defined(__AVX2__)
  SHARDLAB_EACH_PIECE r.piece[i] = _mm256_fmadd_ps(a.piece[i], b.piece[i], c.piece[i]);
#else
  SHARDLAB_EACH_PIECE for (int j = 0; j < kPieceLanes; ++j) r.piece[i][j] =
      __builtin_fmaf(a.piece[i][j], b.piece[i][j], c.piece[i][j]);
#endif
  return r;
}
SHARDLAB_INLINE Floats square_root(const Floats& a) {
  Floats r;
#if defined(__AVX512F__)
  r.piece[0] = _mm512_maskz_sqrt_ps(0xffff, a.piece[0]);  // GCC 12 warns about the form without a mask
#elif defined(__AVX2__)
  SHARDLAB_EACH_PIECE r.piece[i] = _mm256_sqrt_ps(a.piece[i]);
#else
  SHARDLAB_EACH_PIECE for (int j = 0; j < kPieceLanes; ++j) r.piece[i][j] = __builtin_sqrtf(a.piece[i][j]);
#endif
  return r;
}

SHARDLAB_INLINE Ints bits(const Floats& a) {
  Ints r;
  SHARDLAB_EACH_PIECE r.piece[i] = (IntPiece)a.piece[i];
  return r;
}
SHARDLAB_INLINE Floats from_bits(const Ints& a) {
  Floats r;
  SHARDLAB_EACH_PIECE r.piece[i] = (FloatPiece)a.piece[i];
  return r;
}
SHARDLAB_INLINE Ints plus(const Ints& a, int32_t b) {
  Ints r;
  SHARDLAB_EACH_PIECE r.piece[i] = (IntPiece)((WordPiece)a.piece[i] + static_cast<uint32_t>(b));
  return r;
}
SHARDLAB_INLINE Ints minus(const Ints& a, const Ints& b) {
  Ints r;
  SHARDLAB_EACH_PIECE r.piece[i] = (IntPiece)((WordPiece)a.piece[i] - (WordPiece)b.piece[i]);
  return r;
}
SHARDLAB_INLINE Ints both(const Ints& a, int32_t b) {
  Ints r;
  SHARDLAB_EACH_PIECE r.piece[i] = a.piece[i] & b;
  return r;
}
SHARDLAB_INLINE Ints either(const Ints& a, const Ints& b) {
  Ints r;
  SHARDLAB_EACH_PIECE r.piece[i] = a.piece[i] | b.piece[i];
  return r;
}
SHARDLAB_INLINE Ints shifted_left(const Ints& a, int n) {
  Ints r;
  SHARDLAB_EACH_PIECE r.piece[i] = (IntPiece)((WordPiece)a.piece[i] << static_cast<uint32_t>(n));
  return r;
}
/// Arithmetic.
SHARDLAB_INLINE Ints shifted_right(const Ints& a, int n) {
  Ints r;
  SHARDLAB_EACH_PIECE r.piece[i] = a.piece[i] >> n;
  return r;
}
SHARDLAB_INLINE Floats to_floats(const Ints& a) {
  Floats r;
  SHARDLAB_EACH_PIECE r.piece[i] = __builtin_convertvector(a.piece[i], FloatPiece);
  return r;
}

// The same vocabulary for one float, so that a formula is written once.
SHARDLAB_INLINE float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
SHARDLAB_INLINE float select(bool condition, float a, float b) { return condition ? a : b; }
SHARDLAB_INLINE int32_t bits(float a) {
  int32_t r;
  std::memcpy(&r, &a, sizeof r);
  return r;
}
SHARDLAB_INLINE float from_bits(int32_t a) {
  float r;
  std::memcpy(&r, &a, sizeof r);
  return r;
}
// Integers wrap around, as the vector instructions do (the bits of a NaN pass through here).
SHARDLAB_INLINE int32_t plus(int32_t a, int32_t b) {
  return static_cast<int32_t>(static_cast<uint32_t>(a) + static_cast<uint32_t>(b));
}
SHARDLAB_INLINE int32_t minus(int32_t a, int32_t b) {
  return static_cast<int32_t>(static_cast<uint32_t>(a) - static_cast<uint32_t>(b));
}
SHARDLAB_INLINE int32_t both(int32_t a, int32_t b) { return a & b; }
SHARDLAB_INLINE int32_t either(int32_t a, int32_t b) { return a | b; }
SHARDLAB_INLINE int32_t shifted_left(int32_t a, int n) { return static_cast<int32_t>(static_cast<uint32_t>(a) << n); }
SHARDLAB_INLINE int32_t shifted_right(int32_t a, int n) { return a >> n; }
SHARDLAB_INLINE float to_floats(int32_t a) { return static_cast<float>(a); }

/// A constant in T's form.
template <class T>
SHARDLAB_INLINE T constant(float x) {
  if constexpr (sizeof(T) == sizeof(float))
    return x;
  else
    return floats(x);
}

}  // namespace shardlab::kernels::SHARDLAB_VARIANT
