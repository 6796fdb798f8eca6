// Activations, residual, norms' little sisters: everything that is one pass over memory.
#include "kernels/cpu/formulas.h"
#include "kernels/cpu/sums.h"
#include "kernels/cpu/variant.h"

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

}  // namespace shardlab::kernels::SHARDLAB_VARIANT
