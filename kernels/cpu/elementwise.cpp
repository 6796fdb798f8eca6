// Activations, residual, norms' little sisters: everything that is one pass over memory.
#include <algorithm>
#include <array>
#include <cstring>
#include <limits>

#include "kernels/cpu/formulas.h"
#include "kernels/cpu/sums.h"
#include "kernels/cpu/variant.h"
#include "plan/base/moment_codes.h"

namespace shardlab::kernels::SHARDLAB_VARIANT {

void exp(const float* x, int64_t n, float* y) {
  for_vectors(n, [=](int64_t i, int m) { store_some(y + i, exp_formula(load_some(x + i, m)), m); });
}
void log(const float* x, int64_t n, float* y) {
  for_vectors(n, [=](int64_t i, int m) { store_some(y + i, log_formula(load_some(x + i, m)), m); });
}
void tanh(const float* x, int64_t n, float* y) {
  for_vectors(n, [=](int64_t i, int m) { store_some(y + i, tanh_formula(load_some(x + i, m)), m); });
}

namespace {

/// Gate and up elements of 2m alternating ones.
SHARDLAB_INLINE void separate(const float* u, int m, Floats& gate, Floats& up) {
  float g[kLanes] = {}, v[kLanes] = {};
  for (int i = 0; i < m; ++i) {
    g[i] = u[2 * i];
    v[i] = u[2 * i + 1];
  }
  gate = load(g);
  up = load(v);
}

}  // namespace

void activation_forward(const ActivationForward& a) {
  if (!a.swiglu) {
    for_vectors(a.n, [&](int64_t i, int m) { store_some(a.a + i, gelu_formula(load_some(a.u + i, m)), m); });
    return;
  }
  for_vectors(a.n, [&](int64_t i, int m) {
    Floats gate, up;
    separate(a.u + 2 * i, m, gate, up);
    store_some(a.a + i, swiglu_formula(gate, up), m);
  });
}

void activation_input(const ActivationInput& a) {
  if (!a.swiglu) {
    for_vectors(a.n, [&](int64_t i, int m) {
      store_some(a.du + i, gelu_backward_formula(load_some(a.da + i, m), load_some(a.u + i, m)), m);
    });
    return;
  }
  for_vectors(a.n, [&](int64_t i, int m) {
    Floats g, v;
    separate(a.u + 2 * i, m, g, v);
    const Floats da = load_some(a.da + i, m), one = floats(1.0f);
    const Floats below = one + exp_formula(zeros() - g);
    const Floats q = one / below;
    float dg[kLanes], dv[kLanes];
    store(dg, (da * v) * (q * (one + g * (one - q))));
    store(dv, da * (g / below));
    for (int j = 0; j < m; ++j) {
      a.du[2 * (i + j)] = dg[j];
      a.du[2 * (i + j) + 1] = dv[j];
    }
  });
}

void residual_forward(const ResidualForward& a) {
  for (int64_t row = 0; row < a.rows; ++row) {
    const float* x = a.x + row * a.width;
    const float* z = a.z + row * a.width;
    float* y = a.y + row * a.width;
    if (a.bias == nullptr)
      for_vectors(a.width, [=](int64_t i, int m) { store_some(y + i, load_some(x + i, m) + load_some(z + i, m), m); });
    else
      for_vectors(a.width, [=, bias = a.bias](int64_t i, int m) {
        store_some(y + i, load_some(x + i, m) + (load_some(z + i, m) + load_some(bias + i, m)), m);
      });
  }
}

void bias_weight(const BiasWeight& a) {
  token_sums(a.tokens, a.width, a.accumulate, a.dbias,
             [&](int64_t row, int64_t column, int n) { return load_some(a.dy + row * a.width + column, n); });
}

void sgd(const Sgd& a) {
  const Floats rate = floats(a.learning_rate), decay = floats(a.weight_decay);
  for_vectors(a.n, [&](int64_t i, int m) {
    const Floats w = load_some(a.param + i, m);
    Floats g = load_some(a.grad + i, m);
    if (a.weight_decay != 0) g = g + decay * w;
    store_some(a.param + i, w - rate * g, m);
  });
}

void adamw(const AdamW& a) {
  const auto correction = [&](float beta) {
    return static_cast<float>(1.0 - ::pow(static_cast<double>(beta), static_cast<double>(a.step + 1)));
  };
  const Floats beta1 = floats(a.beta1), other1 = floats(1.0f - a.beta1), c1 = floats(correction(a.beta1));
  const Floats beta2 = floats(a.beta2), other2 = floats(1.0f - a.beta2), c2 = floats(correction(a.beta2));
  const Floats rate = floats(a.learning_rate), decay = floats(a.learning_rate * a.weight_decay), epsilon = floats(a.epsilon);
  for_vectors(a.n, [&](int64_t i, int n) {
    const Floats g = load_some(a.grad + i, n), w = load_some(a.param + i, n);
    const Floats m = beta1 * load_some(a.m + i, n) + other1 * g;
    const Floats v = beta2 * load_some(a.v + i, n) + (other2 * g) * g;
    store_some(a.m + i, m, n);
    store_some(a.v + i, v, n);
    const Floats u = (m / c1) / (square_root(v / c2) + epsilon);
    Floats next = w - rate * u;
    if (a.weight_decay != 0) next = next - decay * w;
    store_some(a.param + i, next, n);
  });
}

namespace {

/// The codes of one moment, and the thresholds between them.
struct MomentCoder {
  MomentCodes codes;
  std::array<float, 256> thresholds;  ///< the last is beyond every number
};

constexpr MomentCoder moment_coder(bool has_sign) {
  MomentCoder coder{moment_codes(has_sign), {}};
  for (size_t k = 0; k < 255; ++k) coder.thresholds[k] = moment_threshold(coder.codes, k);
  coder.thresholds[255] = std::numeric_limits<float>::infinity();
  return coder;
}

constexpr MomentCoder kFirstMoment = moment_coder(true), kSecondMoment = moment_coder(false);

void decode_moments(const MomentCoder& coder, const uint8_t* codes, float scale, int64_t n, float* values) {
  for (int64_t i = 0; i < n; ++i) values[i] = coder.codes[codes[i]] * scale;
}

/// The code is the number of thresholds below the quotient: 8 halvings. A block of zeros, and one with a NaN, has code 0 throughout, which
/// its scale makes 0 or NaN.
float encode_moments(const MomentCoder& coder, const float* values, int64_t n, uint8_t* codes) {
  const float scale = largest_size(values, n);
  if (!(scale > 0)) {
    std::memset(codes, 0, static_cast<size_t>(n));
    return scale;
  }
  for (int64_t i = 0; i < n; ++i) {
    const float x = values[i] / scale;
    uint32_t below = 0;
    for (uint32_t half = 128; half > 0; half /= 2) below += coder.thresholds[below + half - 1] < x ? half : 0;
    codes[i] = static_cast<uint8_t>(below);
  }
  return scale;
}

}  // namespace

void adamw8bit(const AdamW8bit& a) {
  float *const m = a.scratch, *const v = a.scratch + kMomentBlock;
  for (int64_t first = 0, block = 0; first < a.n; first += kMomentBlock, ++block) {
    const int64_t n = std::min(kMomentBlock, a.n - first);
    decode_moments(kFirstMoment, a.m + first, a.m_scale[block], n, m);
    decode_moments(kSecondMoment, a.v + first, a.v_scale[block], n, v);
    adamw({a.grad + first, a.param + first, m, v, n, a.step, a.learning_rate, a.beta1, a.beta2, a.epsilon, a.weight_decay});
    a.m_scale[block] = encode_moments(kFirstMoment, m, n, a.m + first);
    a.v_scale[block] = encode_moments(kSecondMoment, v, n, a.v + first);
  }
}

void lion(const Lion& a) {
  const Floats beta1 = floats(a.beta1), other1 = floats(1.0f - a.beta1), beta2 = floats(a.beta2), other2 = floats(1.0f - a.beta2);
  const Floats rate = floats(a.learning_rate), decay = floats(a.learning_rate * a.weight_decay);
  const Floats up = floats(1.0f), down = floats(-1.0f);
  for_vectors(a.n, [&](int64_t i, int n) {
    const Floats g = load_some(a.grad + i, n), w = load_some(a.param + i, n), m = load_some(a.m + i, n);
    const Floats blend = beta1 * m + other1 * g;
    const Floats sign = select(zeros() < blend, up, select(blend < zeros(), down, blend));
    store_some(a.m + i, beta2 * m + other2 * g, n);
    Floats next = w - rate * sign;
    if (a.weight_decay != 0) next = next - decay * w;
    store_some(a.param + i, next, n);
  });
}

}  // namespace shardlab::kernels::SHARDLAB_VARIANT
