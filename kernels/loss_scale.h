// The kernels that mixed-precision training adds around the optimizer: infinities found, gradients unscaled, the loss scale
// moved, the clip factor. Source: Micikevicius et al. 2018, "Mixed Precision Training", section 3.2; Pascanu et al. 2013
// (clipping by global norm).
#pragma once

#include <span>

#include "kernels/mixed.h"

namespace shardlab::kernels {

/// *amax = the largest size, NaN if any is NaN. x[n].
struct Amax {
  Stored x;
  int64_t n = 0;
  float* amax = nullptr;
};
void amax(const MixedKernels& k, const Amax& a, Scratch& scratch);

/// y[n] = x[n] * factor in fp32, rounded to y's type. y may be x with the same type. Bytes: both sizes n.
struct Multiply {
  Stored x, y;
  int64_t n = 0;
  float factor = 1;
};
void multiply(const MixedKernels& k, const Multiply& a, Scratch& scratch);

/// The rule of dynamic loss scaling. After a step whose gradients held an infinity or NaN the scale is multiplied by `backoff` and
/// the count of good steps starts anew; after `interval` good steps in a row it is multiplied by `growth`. The scale stays in
/// [least, most]. With powers of two, scaling is exact.
struct LossScaleRule {
  float growth = 2, backoff = 0.5f;
  int64_t interval = 2000;
  float least = 1, most = 16777216;
};
struct LossScaleState {
  float scale = 65536;
  int32_t good_steps = 0;
};
LossScaleState next_loss_scale(const LossScaleRule& rule, LossScaleState state, bool found_inf);

/// min(1, max_norm / (sqrt(squared_norm) + 1e-6)), in fp64 and rounded; NaN for a NaN norm, 0 for an infinite one. `squared_norm`
/// sums over all gradients, each element once.
float clip_factor(double squared_norm, float max_norm);

}  // namespace shardlab::kernels
