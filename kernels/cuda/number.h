// Element types on the device and on the host: bf16 and f16 as their bits, rounded to nearest even.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

// What a device function is: nvcc's, or a plain inline function of the host.
#ifdef __CUDACC__
#define SHARDLAB_DEVICE __device__ __forceinline__
#define SHARDLAB_GPU_VARIANT cuda
#else
#define SHARDLAB_DEVICE inline
#define SHARDLAB_GPU_VARIANT emulated
#endif

namespace shardlab::gpu::SHARDLAB_GPU_VARIANT {

struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};

#ifdef __CUDACC__
SHARDLAB_DEVICE uint32_t bits_of(float x) { return __float_as_uint(x); }
SHARDLAB_DEVICE float float_of(uint32_t b) { return __uint_as_float(b); }
#else
inline uint32_t bits_of(float x) {
  uint32_t b;
  std::memcpy(&b, &x, 4);
  return b;
}
inline float float_of(uint32_t b) {
  float x;
  std::memcpy(&x, &b, 4);
  return x;
}
/// Host forms of the conversions; the device has instructions for them.
inline uint16_t bf16_bits(float x) {
  const uint32_t b = bits_of(x);
  if (x != x) return 0x7fff;  // as cvt.rn.bf16.f32 gives it
  return static_cast<uint16_t>((b + 0x7fff + ((b >> 16) & 1)) >> 16);
}
inline uint16_t f16_bits(float x) {
  if (x != x) return 0x7fff;
  const uint32_t sign = bits_of(x) >> 16 & 0x8000;
  const float size = std::fabs(x);
  if (size >= 65520.0f) return static_cast<uint16_t>(sign | 0x7c00);  // halfway above the largest rounds to infinity
  if (size < 6.103515625e-05f)                                        // subnormal: a multiple of 2^-24
    return static_cast<uint16_t>(sign | static_cast<uint32_t>(std::nearbyint(size * 16777216.0f)));
  const uint32_t b = bits_of(size);
  return static_cast<uint16_t>(sign | ((b + 0xfff + ((b >> 13) & 1) - (112u << 23)) >> 13));
}
inline float f16_value(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16, exponent = h >> 10 & 31, mantissa = h & 1023;
  if (exponent == 31) return float_of(sign | 0x7f800000 | mantissa << 13);
  if (exponent == 0) return float_of(sign | bits_of(static_cast<float>(mantissa) * 5.9604644775390625e-08f));
  return float_of(sign | (exponent + 112) << 23 | mantissa << 13);
}
#endif

/// The fp32 (or, of f64 and integers, own) value that arithmetic works on.
SHARDLAB_DEVICE float value_of(float x) { return x; }
SHARDLAB_DEVICE double value_of(double x) { return x; }
SHARDLAB_DEVICE int32_t value_of(int32_t x) { return x; }
SHARDLAB_DEVICE int64_t value_of(int64_t x) { return x; }
SHARDLAB_DEVICE float value_of(bf16 x) {
#ifdef __CUDACC__
  return __uint_as_float(static_cast<uint32_t>(x.bits) << 16);
#else
  return float_of(static_cast<uint32_t>(x.bits) << 16);
#endif
}
SHARDLAB_DEVICE float value_of(f16 x) {
#ifdef __CUDACC__
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
#else
  return f16_value(x.bits);
#endif
}

/// x rounded to T.
template <class T, class From>
SHARDLAB_DEVICE T rounded(From x) {
  return static_cast<T>(x);
}
template <>
SHARDLAB_DEVICE bf16 rounded<bf16, float>(float x) {
#ifdef __CUDACC__
  bf16 y;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
  return y;
#else
  return {bf16_bits(x)};
#endif
}
template <>
SHARDLAB_DEVICE f16 rounded<f16, float>(float x) {
#ifdef __CUDACC__
  f16 y;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
  return y;
#else
  return {f16_bits(x)};
#endif
}
template <>
SHARDLAB_DEVICE bf16 rounded<bf16, double>(double x) {
  return rounded<bf16>(static_cast<float>(x));
}
template <>
SHARDLAB_DEVICE f16 rounded<f16, double>(double x) {
  return rounded<f16>(static_cast<float>(x));
}

/// Two neighbours packed into a register, `low` at the lower address.
template <class T>
SHARDLAB_DEVICE uint32_t packed(float low, float high) {
  return static_cast<uint32_t>(rounded<T>(low).bits) | static_cast<uint32_t>(rounded<T>(high).bits) << 16;
}

/// 2^x, -inf gives +0. The device's approximation is within 2 ulp.
SHARDLAB_DEVICE float power_of_two(float x) {
#ifdef __CUDACC__
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return std::exp2(x);
#endif
}

}  // namespace shardlab::gpu::SHARDLAB_GPU_VARIANT
