// Arguments of the kernels that plans ask for by name (kernels/README.md): numbers that decide about updates, quantisation,
// selections, low rank, moments. Each operand is f32, bf16 or f16 by itself unless it is a pointer. Numbers are read from device
// memory when the kernel runs: other kernels have left them there.
#pragma once

#include <array>
#include <cstdint>

#include "kernels/cuda/operands.h"
#include "plan/base/philox.h"

namespace shardlab::gpu {

// ---- numbers

/// One rule on single numbers, by one thread. Operands in the order of kernels/README.md; `wide`: the first is an
/// fp64 squared norm.
struct Numbers {
  enum class Rule : uint8_t {
    kAny,            ///< (i32 ...) -> i32
    kNot,            ///< (i32) -> i32
    kCount,          ///< -> i32, in place
    kStartScale,     ///< (first) -> scale, in place
    kAdjustScale,    ///< (bad i32[, interval]) -> scale[, good i32], in place
    kUnscaleFactor,  ///< (scale) -> factor
    kUnscaleNorm,    ///< (squared norm f64, factor) -> squared norm f64
    kClipFactor,     ///< (squared norm f64, most) -> factor
    kNotOne,         ///< (factor) -> 0 for exactly 1, else 1
    kJudgeSpike,     ///< (x, mean, seen i32, factor, window) -> bad i32
    kRunningMean,    ///< (x, window) -> mean, seen i32, in place
    kBiasCorrection  ///< (beta) -> 1 - beta^(step+1)
  };
  static constexpr int kMost = 32;
  Rule rule = Rule::kAny;
  std::array<const void*, kMost> in{};
  int count = 0;  ///< of `in`
  std::array<void*, 2> out{};
  bool wide = false;
  int64_t step = 0;
};

/// The largest size of all elements of all parts (NaN if any is), whether it is none (infinite or NaN), and the first part that has
/// such an element, counted from 1, or 0. What is null is not written.
struct Amax {
  const Input* parts = nullptr;    ///< on the host: read before the launch returns
  const int64_t* sizes = nullptr;  ///< elements of each
  int count = 0;
  float* amax = nullptr;
  int32_t* bad = nullptr;
  int32_t* where = nullptr;
  Scratch scratch;
};
int64_t scratch_bytes(const Amax& a);

// ---- one pass

/// y[n] = x[n] * factor[0]; y may be x.
struct Multiply {
  Input x;
  const float* factor = nullptr;
  Output y;
  int64_t n = 0;
};

/// error[n] = m[n] - share * approximation[n]; error may be m or approximation.
struct Subtract {
  Input m, approximation;
  Output error;
  int64_t n = 0;
  float share = 1;
};

// ---- codes with block scales

/// Rows of `columns` elements, each row cut in `blocks` with a scale each; of 4 bits a block has an even number of elements. 8
/// bits: i8; 4: two a byte, the even element low; 1: eight a byte, set where negative.
struct BlockShape {
  int64_t rows = 1, columns = 0, blocks = 1;
  int bits = 8;
  constexpr int64_t block() const {
    const int64_t even = (columns + blocks - 1) / blocks;
    return bits == 4 ? (even + 1) / 2 * 2 : even;
  }
  constexpr int64_t row_bytes() const { return (columns * bits + 7) / 8; }
};

/// x[rows,columns] -> codes[rows,row_bytes], scales[rows,blocks]: largest size / 127 (8 bits), / 7 (4), mean size (1). As
/// kernels/quantise.h and kernels/compress.h have it; the mean is summed in fp64 in an order of its own.
struct Quantise {
  BlockShape shape;
  Input x;
  void* codes = nullptr;
  float* scales = nullptr;
};
/// y[rows,columns] = code * scale.
struct Dequantise {
  BlockShape shape;
  const void* codes = nullptr;
  const float* scales = nullptr;
  Output y;
};
/// y[columns] = tree over the rows of code * scale, in fp32, rounded once. Fewer than 2^16 rows.
struct DequantiseSum {
  BlockShape shape;
  const void* codes = nullptr;
  const float* scales = nullptr;
  Output y;
};
/// y[columns] = tree over the rows of x[rows,columns], in fp32, rounded once. Fewer than 2^16 rows.
struct SumRows {
  Input x;
  Output y;
  int64_t rows = 1, columns = 0;
};
/// y[columns,rows,bytes] = x[rows,columns,bytes] with the leading dims in the other order; x and y apart.
struct SwapLeading {
  const void* x = nullptr;
  void* y = nullptr;
  int64_t rows = 0, columns = 0, bytes = 0;
};

// ---- selections

/// k elements of x[n], indices ascending: the largest by size, or those whose random words (random_bits(key, element)) are
/// smallest; ties to the smaller index. k <= n < 2^31. Source: kernels/compress.h, bit by bit.
struct Select {
  Input x;
  int64_t n = 0, k = 0;
  bool by_chance = false;
  RandomKey key;
  float* values = nullptr;
  int32_t* indices = nullptr;
  Scratch scratch;
};
int64_t scratch_bytes(const Select& a);

/// y[n] = tree over `parts` of the vector with values[part,i] at indices[part,i] (ascending) and +0 elsewhere. Fewer
/// than 2^16 parts.
struct Scatter {
  int64_t parts = 1, k = 0, n = 0;
  const float* values = nullptr;
  const int32_t* indices = nullptr;
  Output y;
};

/// error[n] = x[n], with +0 at the indices; error may be x.
struct ZeroSelected {
  const float* x = nullptr;
  float* error = nullptr;
  int64_t n = 0;
  const int32_t* indices = nullptr;
  int64_t k = 0;
};

// ---- low rank

/// An orthonormal basis of the columns of p[rows,columns]: kernels/compress.h, dot products in an order of their own. By one block.
struct Orthogonalise {
  int64_t rows = 0, columns = 0;
  const float* p = nullptr;
  float* q = nullptr;  ///< may be p
  Scratch scratch;
};
int64_t scratch_bytes(const Orthogonalise& a);

/// basis[rows,columns] of zeros becomes the first unit vectors, a row each.
struct StartBasis {
  float* basis = nullptr;
  int64_t rows = 0, columns = 0;
};

// ---- moments

/// momentum[n] = beta1 * (share * m[n]) + (1 - beta1) * gradient[n]; without m: (1 - beta1) * gradient[n]. momentum
/// may be gradient.
struct FoldMomentum {
  const float* gradient = nullptr;
  float* momentum = nullptr;
  const float* m = nullptr;
  int64_t n = 0;
  const float* beta1 = nullptr;
  float share = 1;
};

/// kernels/one_bit_adam.h, on one piece; without v: x[n] = 0. bias: 1 - beta1^(step+1).
struct FrozenAdam {
  float* x = nullptr;
  float* m = nullptr;
  const float* v = nullptr;
  int64_t n = 0;
  const float* bias = nullptr;
  const float* correction = nullptr;
  const float* epsilon = nullptr;
};

/// value[n] = start - learning_rate * (share * delta), with Nesterov's momentum where there is a velocity. value may be delta.
struct OuterStep {
  const float* delta = nullptr;
  const float* start = nullptr;
  float* velocity = nullptr;
  float* value = nullptr;
  int64_t n = 0;
  const float* share = nullptr;
  const float* learning_rate = nullptr;
  const float* momentum = nullptr;
};

}  // namespace shardlab::gpu
