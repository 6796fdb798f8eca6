#include "kernels/outer_step.h"

namespace shardlab::kernels {

void outer_step(const OuterStep& a) {
  if (a.velocity == nullptr) {
    for (int64_t i = 0; i < a.n; ++i) a.value[i] = a.start[i] - a.learning_rate * (a.share * a.delta[i]);
    return;
  }
  for (int64_t i = 0; i < a.n; ++i) {
    const float g = a.share * a.delta[i];
    a.velocity[i] = a.momentum * a.velocity[i] + g;
    a.value[i] = a.start[i] - a.learning_rate * (g + a.momentum * a.velocity[i]);
  }
}

}  // namespace shardlab::kernels
