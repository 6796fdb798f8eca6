// The parts of 1-bit Adam that are not compression: a gradient is folded into the momentum, and the momentum becomes a step under a
// frozen variance. Source: Tang et al., "1-bit Adam" (2021), algorithm 1; both moments' bias is corrected as Adam does.
#pragma once

#include <cstdint>
#include <span>

namespace shardlab::kernels {

/// Consecutive elements of a flat buffer, and one parameter's moments of them.
struct MomentPiece {
  float* m = nullptr;
  const float* v = nullptr;
  int64_t n = 0;
};

/// momentum[i] = beta1 * (share * m[i]) + (1 - beta1) * gradient[i]: of a momentum that all ranks know, with this rank's summand of
/// the gradient, this rank's summand. Elements beyond the pieces have no momentum yet. momentum may be gradient. Every product and
/// sum is rounded to fp32. Flops: 4n. Bytes: 12n.
struct FoldMomentum {
  const float* gradient = nullptr;
  float* momentum = nullptr;
  int64_t n = 0;
  std::span<const MomentPiece> pieces;  ///< in the order in which they lie, from element 0; v is not read
  float beta1 = 0.9f;
  float share = 1;  ///< 1 / ranks
};
void fold_momentum(const FoldMomentum& a);

/// m[i] = x[i]; x[i] = (m[i] / (1 - beta1^(step+1))) / (sqrt(v[i] / correction) + epsilon): the direction of Adam's step, without
/// decay. Where sqrt(v[i] / correction) is not above epsilon the element had no gradient but for rounding when its variance froze:
/// a sign that it shares a scale with would move it by 1 / epsilon, so that m[i] and x[i] become 0. So does x beyond the pieces.
/// Flops: 5n. Bytes: 16n.
struct FrozenAdam {
  float* x = nullptr;  ///< the ranks' momentum, then the direction
  int64_t n = 0;
  std::span<const MomentPiece> pieces;  ///< as above; m is written
  float beta1 = 0.9f;
  float correction = 1;  ///< 1 - beta2^K, K the steps before v was frozen
  float epsilon = 1e-8f;
  int64_t step = 0;  ///< optimizer steps so far
};
void frozen_adam(const FrozenAdam& a);

}  // namespace shardlab::kernels
