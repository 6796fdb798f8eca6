#include "kernels/one_bit_adam.h"

#include <algorithm>
#include <cmath>

namespace shardlab::kernels {

void fold_momentum(const FoldMomentum& a) {
  const float other = 1.0f - a.beta1;
  int64_t at = 0;
  for (const MomentPiece& piece : a.pieces) {
    const float* gradient = a.gradient + at;
    float* momentum = a.momentum + at;
    for (int64_t i = 0; i < piece.n; ++i) momentum[i] = a.beta1 * (a.share * piece.m[i]) + other * gradient[i];
    at += piece.n;
  }
  for (; at < a.n; ++at) a.momentum[at] = other * a.gradient[at];
}

void frozen_adam(const FrozenAdam& a) {
  const auto bias = static_cast<float>(1.0 - std::pow(double{a.beta1}, static_cast<double>(a.step + 1)));
  int64_t at = 0;
  for (const MomentPiece& piece : a.pieces) {
    float* x = a.x + at;
    for (int64_t i = 0; i < piece.n; ++i) {
      const float deviation = std::sqrt(piece.v[i] / a.correction);
      const bool scaled = deviation > a.epsilon;
      const float m = scaled ? x[i] : 0.0f;
      piece.m[i] = m;
      x[i] = scaled ? (m / bias) / (deviation + a.epsilon) : 0.0f;
    }
    at += piece.n;
  }
  std::fill(a.x + at, a.x + a.n, 0.0f);
}

}  // namespace shardlab::kernels
