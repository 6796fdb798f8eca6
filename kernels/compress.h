// Gradient compression: a few elements, signs, or a low-rank basis in place of a tensor. What is not sent stays behind as an
// error that is added to the next gradient; sent + error equals what was to be sent, exactly for selected elements, and
// rounded for others.
#pragma once

#include "kernels/mixed.h"

namespace shardlab::kernels {

/// The k elements of x[n] of the largest size, ties to the smaller index, NaNs first. indices ascending, all different, below n;
/// values[i] = x[indices[i]]. k <= n < 2^31. Four passes over x, no scratch of its size. Source: Lin et al. 2018, "Deep Gradient
/// Compression"; Stich et al. 2018, "Sparsified SGD with Memory".
struct TopK {
  Stored x;
  int64_t n = 0, k = 0;
  float* values = nullptr;
  int32_t* indices = nullptr;
};
void top_k(const MixedKernels& kernels, const TopK& a, Scratch& scratch);

/// k elements of x[n] drawn without return, all subsets equally likely: those with the smallest random_bits(key, element + i), ties
/// to the smaller index. Who has the same key draws the same ones, so that only values need to be reduced. Otherwise as TopK.
struct RandomK {
  Stored x;
  int64_t n = 0, k = 0;
  RandomKey key;
  uint64_t element = 0;  ///< logical element of x[0]
  float* values = nullptr;
  int32_t* indices = nullptr;
};
void random_k(const MixedKernels& kernels, const RandomK& a, Scratch& scratch);

/// y[n] = `tree` over `parts` of the vector that holds values[part, i] at indices[part, i] and +0 elsewhere, rounded to y's type.
/// Each part's indices are ascending and below n. A -0 that was selected alone comes out as +0 where parts > 1.
struct Scatter {
  int64_t parts = 1, k = 0, n = 0;
  const float* values = nullptr;
  const int32_t* indices = nullptr;
  Stored y;
};
void scatter(const MixedKernels& kernels, const Scatter& a, Scratch& scratch);

/// x[indices[i]] = +0: the error that selection leaves. x is f32.
struct ZeroSelected {
  float* x = nullptr;
  int64_t k = 0;
  const int32_t* indices = nullptr;
};
void zero_selected(const ZeroSelected& a);

/// A row-major matrix. Each row is cut in `blocks` equal parts (the last may be shorter), with a scale each.
struct SignShape {
  int64_t rows = 1, columns = 0, blocks = 1;
  int64_t block() const { return (columns + blocks - 1) / blocks; }
  int64_t row_bytes() const { return (columns + 7) / 8; }
};

/// scales[rows, blocks] = mean size of the block's elements, summed in fp64 and rounded: of all multiples of the signs it is the
/// nearest to the block. signs[rows, row_bytes]: 1 where negative. Source: Seide et al. 2014; Karimireddy et al. 2019, "Error
/// Feedback Fixes SignSGD"; Tang et al. 2021, "1-bit Adam" (whose published code scales by the root mean square instead).
struct SignCompress {
  SignShape shape;
  Stored x;
  uint8_t* signs = nullptr;
  float* scales = nullptr;
};
void sign_compress(const MixedKernels& kernels, const SignCompress& a, Scratch& scratch);

/// y = +scale or -scale, rounded to y's type.
struct SignExpand {
  SignShape shape;
  const uint8_t* signs = nullptr;
  const float* scales = nullptr;
  Stored y;
};
void sign_expand(const MixedKernels& kernels, const SignExpand& a, Scratch& scratch);

/// y[columns] = `tree` over the rows of +scale or -scale, in fp32, rounded to y's type once.
struct SignExpandSum {
  SignShape shape;
  const uint8_t* signs = nullptr;
  const float* scales = nullptr;
  Stored y;
};
void sign_expand_sum(const MixedKernels& kernels, const SignExpandSum& a, Scratch& scratch);

/// An orthonormal basis of the columns of p[rows, columns] (row-major), to q: Gram-Schmidt from the left, each column twice, in
/// fp64 in row order, rounded at the end. A column that the ones before it span (its rest is below 1e-6 of it) is replaced by the
/// first unit vector that they do not span, so that no direction dies for good when the basis is kept for the next step; columns
/// beyond `rows` become 0. Source: Vogels et al. 2019, "PowerSGD", algorithm 1.
struct Orthogonalise {
  int64_t rows = 0, columns = 0;
  const float* p = nullptr;
  float* q = nullptr;  ///< may be p
};
void orthogonalise(const Orthogonalise& a, Scratch& scratch);

/// error[n] = m[n] - share * approximation[n]: the part of this rank's summand m that compression lost. `share` is this rank's
/// share of the approximation of the sum.
struct SubtractShare {
  Stored m, approximation, error;
  int64_t n = 0;
  float share = 1;
};
void subtract_share(const MixedKernels& kernels, const SubtractShare& a, Scratch& scratch);

}  // namespace shardlab::kernels
