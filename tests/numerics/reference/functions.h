// Functions of one element. The fp32 elementary functions are the kernels' scalar forms, the one thing that the reference shares
// with them: bits of a polynomial cannot be had twice. In fp64 they are the library's.
#pragma once

#include <cmath>
#include <cstdint>
#include <numbers>
#include <utility>

#include "kernels/elementary.h"
#include "plan/base/philox.h"

namespace shardlab::reference {

inline float exponential(float x) { return elementary::exp(x); }
inline double exponential(double x) { return std::exp(x); }
inline float logarithm(float x) { return elementary::log(x); }
inline double logarithm(double x) { return std::log(x); }
inline float hyperbolic_tangent(float x) { return elementary::tanh(x); }
inline double hyperbolic_tangent(double x) { return std::tanh(x); }

/// sqrt(2 / pi) and the cubic term's factor, as GPT-2 rounds them.
inline constexpr double kGeluFactor = 0.7978845608, kGeluCubic = 0.044715;

/// tanh(sqrt(2 / pi) (u + 0.044715 u^3)).
template <class T>
T gelu_tanh(T u) {
  const T cube = (u * u) * u;
  return hyperbolic_tangent(T(kGeluFactor) * (u + T(kGeluCubic) * cube));
}

/// da * gelu'(u).
template <class T>
T gelu_derivative(T da, T u) {
  const T t = gelu_tanh(u);
  const T left = T(0.5) * (T(1) + t);
  const T slope = T(kGeluFactor) * (T(1) + T(3 * kGeluCubic) * (u * u));
  const T right = ((T(0.5) * u) * (T(1) - t * t)) * slope;
  return da * (left + right);
}

/// Gradients of gate and up of a = silu(gate) * up.
template <class T>
std::pair<T, T> swiglu_derivative(T da, T gate, T up) {
  const T e = exponential(-gate);
  const T q = T(1) / (T(1) + e);
  return {(da * up) * (q * (T(1) + gate * (T(1) - q))), da * (gate / (T(1) + e))};
}

/// Initial value of logical element `element`: Box-Muller in fp64 over pairs of elements, rounded to fp32.
inline float initial_normal(const RandomKey& key, uint64_t element, double deviation) {
  const uint64_t first = element & ~uint64_t{1};
  const double u1 = (random_bits(key, first) + 0.5) / 4294967296.0, u2 = (random_bits(key, first + 1) + 0.5) / 4294967296.0;
  const double radius = std::sqrt(-2.0 * std::log(u1)), angle = (2.0 * std::numbers::pi) * u2;
  return static_cast<float>(deviation * (radius * (element == first ? std::cos(angle) : std::sin(angle))));
}

}  // namespace shardlab::reference
