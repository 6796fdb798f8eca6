// SGD and AdamW, elementwise, in place.
#include <cmath>

#include "kernels/cuda/elementwise.h"
#include "kernels/cuda/launches.h"

namespace shardlab::gpu::SHARDLAB_GPU_VARIANT {
namespace {

struct SgdStep {
  Input grad;
  Output param;
  float rate, decay;
  template <int N>
  SHARDLAB_DEVICE void at(int64_t i) const {
    const Values<N> g = values_at<N>(grad, i);
    Values<N> w = values_at<N>(param, i);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const float full = decay != 0 ? g.at[j] + decay * w.at[j] : g.at[j];
      w.at[j] = w.at[j] - rate * full;
    }
    put(param, i, w);
  }
};

struct AdamWStep {
  Input grad;
  Output param;
  float* m;
  float* v;
  float beta1, other1, c1, beta2, other2, c2, rate, decay, epsilon;
  template <int N>
  SHARDLAB_DEVICE void at(int64_t i) const {
    const Values<N> g = values_at<N>(grad, i);
    Values<N> w = values_at<N>(param, i), first = values_at<N>(m + i), second = values_at<N>(v + i);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      first.at[j] = beta1 * first.at[j] + other1 * g.at[j];
      second.at[j] = beta2 * second.at[j] + (other2 * g.at[j]) * g.at[j];
      const float u = (first.at[j] / c1) / (::sqrtf(second.at[j] / c2) + epsilon);
      const float next = w.at[j] - rate * u;
      w.at[j] = decay != 0 ? next - decay * w.at[j] : next;
    }
    put(m + i, first);
    put(v + i, second);
    put(param, i, w);
  }
};

void check(DType grad, DType param) {
  expect(is_activation_type(grad), "optimizer: gradients are f32, bf16 or f16", static_cast<int64_t>(grad));
  expect(is_activation_type(param), "optimizer: parameters are f32, bf16 or f16", static_cast<int64_t>(param));
}

}  // namespace

void sgd(const Sgd& a, Stream s) {
  check(a.grad.dtype, a.param.dtype);
  elementwise<4>("sgd", SgdStep{a.grad, a.param, a.learning_rate, a.weight_decay}, a.n, aligned({a.grad.data, a.param.data}), s);
}

void adamw(const AdamW& a, Stream s) {
  check(a.grad.dtype, a.param.dtype);
  const auto correction = [&](float beta) {
    return static_cast<float>(1.0 - std::pow(static_cast<double>(beta), static_cast<double>(a.step + 1)));
  };
  const AdamWStep step{.grad = a.grad,
                       .param = a.param,
                       .m = a.m,
                       .v = a.v,
                       .beta1 = a.beta1,
                       .other1 = 1.0f - a.beta1,
                       .c1 = correction(a.beta1),
                       .beta2 = a.beta2,
                       .other2 = 1.0f - a.beta2,
                       .c2 = correction(a.beta2),
                       .rate = a.learning_rate,
                       .decay = a.weight_decay == 0 ? 0.0f : a.learning_rate * a.weight_decay,
                       .epsilon = a.epsilon};
  elementwise<4>("adamw", step, a.n, aligned({a.grad.data, a.param.data, a.m, a.v}), s);
}

}  // namespace shardlab::gpu::SHARDLAB_GPU_VARIANT
