// SGD, AdamW, with moments in fp32 and in 8 bits, and Lion, in place.
#include <algorithm>
#include <cmath>

#include "kernels/cuda/elementwise.h"
#include "kernels/cuda/launches.h"
#include "plan/base/moment_codes.h"

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

/// One element of AdamW in fp32.
struct AdamWRule {
  float beta1, other1, c1, beta2, other2, c2, rate, decay, epsilon;
  SHARDLAB_DEVICE void apply(float g, float& w, float& m, float& v) const {
    m = beta1 * m + other1 * g;
    v = beta2 * v + (other2 * g) * g;
    const float u = (m / c1) / (::sqrtf(v / c2) + epsilon);
    const float next = w - rate * u;
    w = decay != 0 ? next - decay * w : next;
  }
};

template <class A>
AdamWRule adamw_rule(const A& a) {
  const auto correction = [&](float beta) {
    return static_cast<float>(1.0 - std::pow(static_cast<double>(beta), static_cast<double>(a.step + 1)));
  };
  return {.beta1 = a.beta1,
          .other1 = 1.0f - a.beta1,
          .c1 = correction(a.beta1),
          .beta2 = a.beta2,
          .other2 = 1.0f - a.beta2,
          .c2 = correction(a.beta2),
          .rate = a.learning_rate,
          .decay = a.weight_decay == 0 ? 0.0f : a.learning_rate * a.weight_decay,
          .epsilon = a.epsilon};
}

struct AdamWStep {
  Input grad;
  Output param;
  float* m;
  float* v;
  AdamWRule rule;
  const float* factor;
  template <int N>
  SHARDLAB_DEVICE void at(int64_t i) const {
    const Values<N> g = gradient_at<N>(grad, factor, i);
    Values<N> w = values_at<N>(param, i), first = values_at<N>(m + i), second = values_at<N>(v + i);
#pragma unroll
    for (int j = 0; j < N; ++j) rule.apply(g.at[j], w.at[j], first.at[j], second.at[j]);
    put(m + i, first);
    put(v + i, second);
    put(param, i, w);
  }
};

/// A block of elements a block of threads: element t, t + kThreads and so on each.
struct AdamW8bitBlock {
  static constexpr int kThreads = 256, kEach = static_cast<int>(kMomentBlock) / kThreads;
  /// Shared memory: both tables of codes, and a largest size a warp.
  static constexpr int64_t kShared = static_cast<int64_t>(sizeof(float)) * (2 * 256 + 2 * kThreads / kWarp);
  struct Args {
    gpu::AdamW8bit a;
    AdamWRule rule;
    float first[256], second[256];  ///< the codes of both moments
  };

  SHARDLAB_DEVICE static void run(const Thread& t, const Args& args) {
    const gpu::AdamW8bit& a = args.a;
    float *const first = reinterpret_cast<float*>(t.shared()), *const second = first + 256;
    uint32_t* const sizes = reinterpret_cast<uint32_t*>(second + 256);
    first[t.index()] = args.first[t.index()];
    second[t.index()] = args.second[t.index()];
    t.barrier();
    const int64_t begin = t.block_x() * kMomentBlock;
    const float m_scale = a.m_scale[t.block_x()], v_scale = a.v_scale[t.block_x()];
    float m[kEach], v[kEach];
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const int64_t i = begin + j * kThreads + t.index();
      m[j] = v[j] = 0;
      if (i >= a.n) continue;
      const float g = gradient_at<1>(a.grad, a.factor, i).at[0];
      Values<1> w = values_at<1>(a.param, i);
      m[j] = first[a.m[i]] * m_scale;
      v[j] = second[a.v[i]] * v_scale;
      args.rule.apply(g, w.at[0], m[j], v[j]);
      put(a.param, i, w);
    }
    const float m_most = largest(t, m, sizes), v_most = largest(t, v, sizes + kThreads / kWarp);
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const int64_t i = begin + j * kThreads + t.index();
      if (i >= a.n) continue;
      a.m[i] = encoded(first, m[j], m_most);
      a.v[i] = encoded(second, v[j], v_most);
    }
    if (t.index() != 0) return;
    a.m_scale[t.block_x()] = m_most;
    a.v_scale[t.block_x()] = v_most;
  }

  /// The largest size of the block's elements, NaN if any is, in every thread. Sizes compare as their bits do.
  SHARDLAB_DEVICE static float largest(const Thread& t, const float (&x)[kEach], uint32_t* sizes) {
    uint32_t most = 0;
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const uint32_t size = bits_of(x[j]) & 0x7fffffffu;
      most = size > most ? size : most;
    }
#pragma unroll
    for (int mask = kWarp / 2; mask >= 1; mask /= 2) {
      const uint32_t other = t.shuffle_xor(most, mask);
      most = other > most ? other : most;
    }
    if (t.lane() == 0) sizes[t.warp()] = most;
    t.barrier();
    for (int w = 0; w < kThreads / kWarp; ++w) most = sizes[w] > most ? sizes[w] : most;
    return float_of(most > 0x7f800000u ? 0x7fc00000u : most);
  }

  /// The number of thresholds below x / scale; 0 where the scale is 0 or NaN.
  SHARDLAB_DEVICE static uint8_t encoded(const float* codes, float x, float scale) {
    if (!(scale > 0)) return 0;
    const float quotient = x / scale;
    uint32_t below = 0;
#pragma unroll
    for (uint32_t half = 128; half > 0; half /= 2) {
      const uint32_t k = below + half - 1;
      below += 0.5f * (codes[k] + codes[k + 1]) < quotient ? half : 0;
    }
    return static_cast<uint8_t>(below);
  }
};

struct LionStep {
  Input grad;
  Output param;
  float* m;
  float beta1, other1, beta2, other2, rate, decay;
  const float* factor;
  template <int N>
  SHARDLAB_DEVICE void at(int64_t i) const {
    const Values<N> g = gradient_at<N>(grad, factor, i);
    Values<N> w = values_at<N>(param, i), moment = values_at<N>(m + i);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const float blend = beta1 * moment.at[j] + other1 * g.at[j];
      const float sign = blend > 0 ? 1.0f : blend < 0 ? -1.0f : blend;
      moment.at[j] = beta2 * moment.at[j] + other2 * g.at[j];
      const float next = w.at[j] - rate * sign;
      w.at[j] = decay != 0 ? next - decay * w.at[j] : next;
    }
    put(m + i, moment);
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
  const AdamWStep step{.grad = a.grad, .param = a.param, .m = a.m, .v = a.v, .rule = adamw_rule(a), .factor = a.factor};
  elementwise<4>("adamw", step, a.n, aligned({a.grad.data, a.param.data, a.m, a.v}), s);
}

void adamw8bit(const AdamW8bit& a, Stream s) {
  check(a.grad.dtype, a.param.dtype);
  const Geometry blocks{.x = moment_blocks(a.n), .threads = AdamW8bitBlock::kThreads, .shared = AdamW8bitBlock::kShared};
  AdamW8bitBlock::Args args{a, adamw_rule(a), {}, {}};
  constexpr MomentCodes kFirst = moment_codes(true), kSecond = moment_codes(false);
  std::copy(kFirst.begin(), kFirst.end(), args.first);
  std::copy(kSecond.begin(), kSecond.end(), args.second);
  launch<AdamW8bitBlock>("adamw8bit", blocks, args, s);
}

void lion(const Lion& a, Stream s) {
  check(a.grad.dtype, a.param.dtype);
  const LionStep step{.grad = a.grad,
                      .param = a.param,
                      .m = a.m,
                      .beta1 = a.beta1,
                      .other1 = 1.0f - a.beta1,
                      .beta2 = a.beta2,
                      .other2 = 1.0f - a.beta2,
                      .rate = a.learning_rate,
                      .decay = a.weight_decay == 0 ? 0.0f : a.learning_rate * a.weight_decay,
                      .factor = a.factor};
  elementwise<4>("lion", step, a.n, aligned({a.grad.data, a.param.data, a.m}), s);
}

void fold_momentum(const FoldMomentum& a, Stream s) {
  elementwise<4>("fold_momentum", Folded{a}, a.n, aligned({a.gradient, a.momentum, a.m}), s);
}

void frozen_adam(const FrozenAdam& a, Stream s) { elementwise<4>("frozen_adam", FrozenStep{a}, a.n, aligned({a.x, a.m, a.v}), s); }

void outer_step(const OuterStep& a, Stream s) {
  elementwise<4>("outer_step", Outer{a}, a.n, aligned({a.delta, a.start, a.velocity, a.value}), s);
}

}  // namespace shardlab::gpu::SHARDLAB_GPU_VARIANT
