// SGD and AdamW, elementwise, in place.
#include <cmath>

#include "kernels/cuda/elementwise.h"
#include "kernels/cuda/launches.h"

namespace shardlab::gpu::SHARDLAB_GPU_VARIANT {
namespace {

/// N elements of a gradient, times the number that other kernels left, if there is one.
template <int N>
SHARDLAB_DEVICE Values<N> gradient_at(const Input& grad, const float* factor, int64_t i) {
  Values<N> g = values_at<N>(grad, i);
  if (factor != nullptr) {
    const float f = *factor;
#pragma unroll
    for (float& x : g.at) x = x * f;
  }
  return g;
}

struct SgdStep {
  Input grad;
  Output param;
  float rate, decay;
  const float* factor;
  template <int N>
  SHARDLAB_DEVICE void at(int64_t i) const {
    const Values<N> g = gradient_at<N>(grad, factor, i);
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
  const float* factor;
  template <int N>
  SHARDLAB_DEVICE void at(int64_t i) const {
    const Values<N> g = gradient_at<N>(grad, factor, i);
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

/// A momentum that ranks send, of which this rank's summand is made.
struct Folded {
  gpu::FoldMomentum a;
  template <int N>
  SHARDLAB_DEVICE void at(int64_t i) const {
    const float beta = *a.beta1, other = 1.0f - beta;
    Values<N> g = values_at<N>(a.gradient + i);
    if (a.m != nullptr) {
      const Values<N> m = values_at<N>(a.m + i);
#pragma unroll
      for (int j = 0; j < N; ++j) g.at[j] = beta * (a.share * m.at[j]) + other * g.at[j];
    } else {
#pragma unroll
      for (int j = 0; j < N; ++j) g.at[j] = other * g.at[j];
    }
    put(a.momentum + i, g);
  }
};

struct FrozenStep {
  gpu::FrozenAdam a;
  template <int N>
  SHARDLAB_DEVICE void at(int64_t i) const {
    Values<N> x{};
    if (a.v != nullptr) {
      const float bias = *a.bias, correction = *a.correction, epsilon = *a.epsilon;
      x = values_at<N>(a.x + i);
      const Values<N> v = values_at<N>(a.v + i);
      Values<N> m;
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const float deviation = ::sqrtf(v.at[j] / correction);
        const bool scaled = deviation > epsilon;
        m.at[j] = scaled ? x.at[j] : 0.0f;
        x.at[j] = scaled ? (m.at[j] / bias) / (deviation + epsilon) : 0.0f;
      }
      put(a.m + i, m);
    }
    put(a.x + i, x);
  }
};

struct Outer {
  gpu::OuterStep a;
  template <int N>
  SHARDLAB_DEVICE void at(int64_t i) const {
    const float share = *a.share, rate = *a.learning_rate;
    Values<N> g = values_at<N>(a.delta + i);
    const Values<N> start = values_at<N>(a.start + i);
    if (a.velocity != nullptr) {
      const float momentum = *a.momentum;
      Values<N> velocity = values_at<N>(a.velocity + i);
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const float mean = share * g.at[j];
        velocity.at[j] = momentum * velocity.at[j] + mean;
        g.at[j] = start.at[j] - rate * (mean + momentum * velocity.at[j]);
      }
      put(a.velocity + i, velocity);
    } else {
#pragma unroll
      for (int j = 0; j < N; ++j) g.at[j] = start.at[j] - rate * (share * g.at[j]);
    }
    put(a.value + i, g);
  }
};

void check(DType grad, DType param) {
  expect(is_activation_type(grad), "optimizer: gradients are f32, bf16 or f16", static_cast<int64_t>(grad));
  expect(is_activation_type(param), "optimizer: parameters are f32, bf16 or f16", static_cast<int64_t>(param));
}

}  // namespace

void sgd(const Sgd& a, Stream s) {
  check(a.grad.dtype, a.param.dtype);
  elementwise<4>("sgd", SgdStep{a.grad, a.param, a.learning_rate, a.weight_decay, a.factor}, a.n,
                 aligned({a.grad.data, a.param.data}), s);
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
                       .epsilon = a.epsilon,
                       .factor = a.factor};
  elementwise<4>("adamw", step, a.n, aligned({a.grad.data, a.param.data, a.m, a.v}), s);
}

void fold_momentum(const FoldMomentum& a, Stream s) {
  elementwise<4>("fold_momentum", Folded{a}, a.n, aligned({a.gradient, a.momentum, a.m}), s);
}

void frozen_adam(const FrozenAdam& a, Stream s) { elementwise<4>("frozen_adam", FrozenStep{a}, a.n, aligned({a.x, a.m, a.v}), s); }

void outer_step(const OuterStep& a, Stream s) {
  elementwise<4>("outer_step", Outer{a}, a.n, aligned({a.delta, a.start, a.velocity, a.value}), s);
}

}  // namespace shardlab::gpu::SHARDLAB_GPU_VARIANT
