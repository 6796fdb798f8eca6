// LayerNorm and RMSNorm.
#include "kernels/cpu/sums.h"
#include "kernels/cpu/variant.h"

namespace shardlab::kernels::SHARDLAB_VARIANT {
namespace {

void forward_layer_row(const NormForward& a, const float* x, float* y, float* stats) {
  const float h = static_cast<float>(a.width);
  const float mean = lanes(a.width, [=](int64_t i, int n) { return load_some(x + i, n); }) / h;
  const Floats mean_v = floats(mean);
  const float variance = lanes(a.width,
                               [=](int64_t i, int n) {
                                 const Floats d = load_some(x + i, n) - mean_v;
                                 return d * d;
                               }) /
                         h;
  const float rstd = 1.0f / __builtin_sqrtf(variance + a.epsilon);
  const Floats rstd_v = floats(rstd);
  for_vectors(a.width, [&](int64_t i, int n) {
    const Floats xhat = (load_some(x + i, n) - mean_v) * rstd_v;
    store_some(y + i, xhat * load_some(a.gamma + i, n) + load_some(a.beta + i, n), n);
  });
  stats[0] = mean;
  stats[1] = rstd;
}

void forward_rms_row(const NormForward& a, const float* x, float* y, float* stats) {
  const float h = static_cast<float>(a.width);
  const float mean_square = lanes(a.width,
                                  [=](int64_t i, int n) {
                                    const Floats v = load_some(x + i, n);
                                    return v * v;
                                  }) /
                            h;
  const float r = 1.0f / __builtin_sqrtf(mean_square + a.epsilon);
  const Floats r_v = floats(r);
  for_vectors(a.width, [&](int64_t i, int n) { store_some(y + i, (load_some(x + i, n) * r_v) * load_some(a.gamma + i, n), n); });
  stats[0] = r;
}

/// The normalised input: (x - mean) * rstd, or x * r.
template <bool kRms>
SHARDLAB_INLINE Floats normalised(const Floats& x, const Floats& mean, const Floats& rstd) {
  if constexpr (kRms)
    return x * rstd;
  else
    return (x - mean) * rstd;
}

template <bool kRms>
void input_row(const NormInput& a, int64_t row) {
  const float* dy = a.dy + row * a.width;
  const float* x = a.x + row * a.width;
  const float* gamma = a.gamma;
  const float* residual = a.residual == nullptr ? nullptr : a.residual + row * a.width;
  float* dx = a.dx + row * a.width;
  const float h = static_cast<float>(a.width);
  const Floats mean = kRms ? zeros() : floats(a.stats[2 * row]);
  const Floats rstd = floats(kRms ? a.stats[row] : a.stats[2 * row + 1]);
  Floats mean_g = zeros();
  if constexpr (!kRms)
    mean_g = floats(lanes(a.width, [=](int64_t i, int n) { return load_some(dy + i, n) * load_some(gamma + i, n); }) / h);
  const Floats mean_gx = floats(lanes(a.width,
                                      [=](int64_t i, int n) {
                                        const Floats g = load_some(dy + i, n) * load_some(gamma + i, n);
                                        return g * normalised<kRms>(load_some(x + i, n), mean, rstd);
                                      }) /
                                h);
  for_vectors(a.width, [=](int64_t i, int n) {
    Floats g = load_some(dy + i, n) * load_some(gamma + i, n);
    const Floats xhat = normalised<kRms>(load_some(x + i, n), mean, rstd);
    if constexpr (!kRms) g = g - mean_g;
    Floats result = (g - xhat * mean_gx) * rstd;
    if (residual != nullptr) result = load_some(residual + i, n) + result;
    store_some(dx + i, result, n);
  });
}

}  // namespace

void norm_forward(const NormForward& a) {
  for (int64_t row = 0; row < a.rows; ++row) {
    if (a.rms)
      forward_rms_row(a, a.x + row * a.width, a.y + row * a.width, a.stats + row);
    else
      forward_layer_row(a, a.x + row * a.width, a.y + row * a.width, a.stats + 2 * row);
  }
}

void norm_input(const NormInput& a) {
  for (int64_t row = 0; row < a.rows; ++row) a.rms ? input_row<true>(a, row) : input_row<false>(a, row);
}

void norm_weight(const NormWeight& a) {
  const int64_t width = a.width;
  if (a.rms) {
    token_sums(a.tokens, width, a.accumulate, a.dgamma, [=](int64_t row, int64_t column, int n) {
      const int64_t at = row * width + column;
      return load_some(a.dy + at, n) * normalised<true>(load_some(a.x + at, n), zeros(), floats(a.stats[row]));
    });
    return;
  }
  token_sums(a.tokens, width, a.accumulate, a.dgamma, [=](int64_t row, int64_t column, int n) {
    const int64_t at = row * width + column;
    return load_some(a.dy + at, n) *
           normalised<false>(load_some(a.x + at, n), floats(a.stats[2 * row]), floats(a.stats[2 * row + 1]));
  });
  token_sums(a.tokens, width, a.accumulate, a.dbeta,
             [=](int64_t row, int64_t column, int n) { return load_some(a.dy + row * width + column, n); });
}

}  // namespace shardlab::kernels::SHARDLAB_VARIANT
