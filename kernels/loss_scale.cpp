#include "kernels/loss_scale.h"

#include <cmath>

#include "kernels/window.h"

namespace shardlab::kernels {

void amax(const MixedKernels& k, const Amax& a, Scratch& scratch) {
  Window x(k.storage(), a.x, kBlockElements, scratch);
  if (scratch.counting()) return;
  float most = 0;
  for_blocks(a.n, kBlockElements, [&](int64_t first, int64_t n) {
    const float here = k.storage().amax(x.read(first, n), n);
    if (std::isnan(here) || here > most) most = here;
  });
  *a.amax = most;
}

void multiply(const MixedKernels& k, const Multiply& a, Scratch& scratch) {
  Window x(k.storage(), a.x, kBlockElements, scratch), y(k.storage(), a.y, kBlockElements, scratch);
  if (scratch.counting()) return;
  for_blocks(a.n, kBlockElements, [&](int64_t first, int64_t n) {
    k.storage().scale({x.read(first, n), n, a.factor, y.place(first, n)});
    y.write();
  });
}

LossScaleState next_loss_scale(const LossScaleRule& rule, LossScaleState state, bool found_inf) {
  if (found_inf) return {std::clamp(state.scale * rule.backoff, rule.least, rule.most), 0};
  if (++state.good_steps < rule.interval) return state;
  return {std::clamp(state.scale * rule.growth, rule.least, rule.most), 0};
}

float clip_factor(double squared_norm, float max_norm) {
  const double factor = static_cast<double>(max_norm) / (std::sqrt(squared_norm) + 1e-6);
  return static_cast<float>(factor < 1 || std::isnan(factor) ? factor : 1.0);
}

}  // namespace shardlab::kernels
