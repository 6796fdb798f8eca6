// Low-precision storage: what turns fp32 into narrower elements and back, one table a processor variant, as kernels.h has them.
//
// All variants give the same bits. Kernels that compute on narrow operands (kernels/mixed.h) are put together from these and from
// the fp32 kernels.
//
// Formats. bf16: 8 exponent bits, 7 of mantissa. f16: IEEE 754 binary16. f8e4m3: bias 7, largest 448, no infinity, NaN is
// S.1111.111. f8e5m2: bias 15, largest 57344, infinities and NaNs as in IEEE. Source: Micikevicius et al. 2022, "FP8 Formats for
// Deep Learning"; OCP 8-bit Floating Point Specification 1.0.
#pragma once

#include <cstdint>

#include "plan/base/dtype.h"
#include "plan/base/philox.h"

namespace shardlab::kernels {

struct Kernels;

/// to[n] = from[n], exactly. dtype: f32, bf16, f16, f8e4m3 or f8e5m2. `to` must not overlap `from` unless f32. Bytes: n (4 + size).
struct Widen {
  const void* from = nullptr;
  DType dtype = DType::f32;
  int64_t n = 0;
  float* to = nullptr;
};

/// to[n] = from[n] rounded to nearest, ties to even, once. Too large for bf16 and f16: infinity. Too large for fp8, infinity
/// included: the largest value with its sign (so whoever must notice infinities looks at fp32). NaN: the format's quiet NaN with
/// its sign. Subnormals are kept. `to` must not overlap `from` unless f32. Bytes: n (4 + size).
struct Narrow {
  const float* from = nullptr;
  int64_t n = 0;
  DType dtype = DType::f32;
  void* to = nullptr;
};

/// As Narrow, but to one of the two neighbours by chance: to the one further from 0 where fraction + random_bits(key, element + i)
/// / 2^32 >= 1, fraction being the distance to the neighbour nearer 0 over the gap: its probability is the fraction to 2^-32.
/// Representable values stay; the largest are as in Narrow (for bf16 and f16 the next neighbour is infinity).
/// Source: Gupta et al. 2015, "Deep Learning with Limited Numerical Precision".
struct NarrowStochastic {
  const float* from = nullptr;
  int64_t n = 0;
  DType dtype = DType::bf16;
  void* to = nullptr;
  RandomKey key;
  uint64_t element = 0;  ///< logical element of from[0]
};

/// to[n] = from[n] / scale (fp32 division) rounded to nearest even and held to [-127, 127] (8 bits) or [-7, 7] (4 bits); NaN and,
/// with scale 0, everything becomes 0. 4 bits: two a byte, the even element in the low half; a last odd one leaves the high half 0.
struct QuantiseInt {
  const float* from = nullptr;
  int64_t n = 0;
  float scale = 1;
  int bits = 8;
  void* to = nullptr;
};

/// to[n] = from[n] * scale. `from` as QuantiseInt leaves it, from an even element on.
struct DequantiseInt {
  const void* from = nullptr;
  int64_t n = 0;
  float scale = 1;
  int bits = 8;
  float* to = nullptr;
};

/// y[n] = x[n] * factor; y may be x. Bytes: 8n.
struct Scale {
  const float* x = nullptr;
  int64_t n = 0;
  float factor = 1;
  float* y = nullptr;
};

/// c[n] = a[n] - factor * b[n], product and difference rounded; c may be a or b. Bytes: 12n.
struct SubtractScaled {
  const float* a = nullptr;
  const float* b = nullptr;
  int64_t n = 0;
  float factor = 1;
  float* c = nullptr;
};

/// Bit i % 8 of byte i / 8 is 1 where from[i] is negative (-0 and negative NaNs too). to[(n + 7) / 8]; bits past n are 0.
struct PackSigns {
  const float* from = nullptr;
  int64_t n = 0;
  uint8_t* to = nullptr;
};

/// to[n] = -scale where bit first + i is 1, else scale.
struct ExpandSigns {
  const uint8_t* from = nullptr;
  int64_t first = 0;
  int64_t n = 0;
  float scale = 1;
  float* to = nullptr;
};

/// to[n] = random_bits(key, element + i).
struct RandomWords {
  RandomKey key;
  uint64_t element = 0;
  int64_t n = 0;
  uint32_t* to = nullptr;
};

/// Whether Widen and Narrow know the type.
constexpr bool is_float_storage(DType t) {
  return t == DType::f32 || t == DType::bf16 || t == DType::f16 || t == DType::f8e4m3 || t == DType::f8e5m2;
}

/// The largest finite value: 448 for f8e4m3. For is_float_storage types.
double largest_value(DType t);

/// The storage kernels of one variant.
struct StorageKernels {
  void (*widen)(const Widen&);
  void (*narrow)(const Narrow&);
  void (*narrow_stochastic)(const NarrowStochastic&);
  void (*quantise_int)(const QuantiseInt&);
  void (*dequantise_int)(const DequantiseInt&);
  void (*scale)(const Scale&);
  void (*subtract_scaled)(const SubtractScaled&);
  void (*pack_signs)(const PackSigns&);
  void (*expand_signs)(const ExpandSigns&);
  void (*random_words)(const RandomWords&);
  /// Largest |x[i]|, +0 for n = 0; NaN if any is: exact, so no order matters.
  float (*amax)(const float* x, int64_t n);
  /// Sum of |x[i]| in fp64, in the order of Kernels::squared_norm.
  double (*absolute_sum)(const float* x, int64_t n);
};

/// The storage kernels of the variant that `k` belongs to.
const StorageKernels& storage_kernels(const Kernels& k);

}  // namespace shardlab::kernels
