// The elementary functions as formulas over T, one float or sixteen: one text, hence the same bits.
//
// No intermediate may differ between the two forms: only correctly rounded operations, explicit fma, and integer operations
// on the bits.
#pragma once

#include "kernels/cpu/vector.h"

namespace shardlab::kernels::SHARDLAB_VARIANT {

/// e^x = 2^n e^r with n = round(x log2 e), |r| <= ln 2 / 2. ln 2 is subtracted in two parts (Cody & Waite), e^r is a polynomial of
/// degree 7, and 2^n is applied as two factors, so that results may be subnormal.
template <class T>
SHARDLAB_INLINE T exp_formula(T x) {
  const T shifter = constant<T>(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const T low = constant<T>(-104.0f), high = constant<T>(89.0f);
  const T bounded = select(x < low, low, select(high < x, high, x));
  const T rounded = fma(bounded, constant<T>(1.44269504088896341f), shifter);
  const T n = rounded - shifter;
  T r = fma(n, constant<T>(-0.693359375f), bounded);
  r = fma(n, constant<T>(2.12194440e-4f), r);
  T p = constant<T>(1.0f / 5040.0f);
  p = fma(p, r, constant<T>(1.0f / 720.0f));
  p = fma(p, r, constant<T>(1.0f / 120.0f));
  p = fma(p, r, constant<T>(1.0f / 24.0f));
  p = fma(p, r, constant<T>(1.0f / 6.0f));
  p = fma(p, r, constant<T>(0.5f));
  p = fma(p, r, constant<T>(1.0f));
  p = fma(p, r, constant<T>(1.0f));
  const auto whole = minus(bits(rounded), bits(shifter));  // n as an integer: one ulp of the shifted value is 1
  const auto half = shifted_right(whole, 1);
  const T factor1 = from_bits(shifted_left(plus(half, 127), 23));
  const T factor2 = from_bits(shifted_left(plus(minus(whole, half), 127), 23));
  return (p * factor1) * factor2;
}

/// log x = e ln 2 + log m with m in [sqrt(1/2), sqrt 2); log m by the minimax polynomial of Cephes' logf (Moshier), in fma form.
template <class T>
SHARDLAB_INLINE T log_formula(T x) {
  const auto is_small = x < constant<T>(1.17549435e-38f);
  const T scaled = select(is_small, x * constant<T>(8388608.0f), x);  // subnormals: times 2^23
  // Exponent and mantissa such that m is in [sqrt(1/2), sqrt 2): shift the bits by those of sqrt(1/2).
  const auto shifted = plus(bits(scaled), -0x3f3504f3);
  const T exponent = to_floats(shifted_right(shifted, 23)) - select(is_small, constant<T>(23.0f), constant<T>(0.0f));
  const T f = from_bits(plus(both(shifted, 0x007fffff), 0x3f3504f3)) - constant<T>(1.0f);
  const T z = f * f;
  T p = constant<T>(7.0376836292e-2f);
  p = fma(p, f, constant<T>(-1.1514610310e-1f));
  p = fma(p, f, constant<T>(1.1676998740e-1f));
  p = fma(p, f, constant<T>(-1.2420140846e-1f));
  p = fma(p, f, constant<T>(1.4249322787e-1f));
  p = fma(p, f, constant<T>(-1.6668057665e-1f));
  p = fma(p, f, constant<T>(2.0000714765e-1f));
  p = fma(p, f, constant<T>(-2.4999993993e-1f));
  p = fma(p, f, constant<T>(3.3333331174e-1f));
  T y = (p * f) * z;
  y = fma(exponent, constant<T>(-2.12194440e-4f), y);
  y = fma(z, constant<T>(-0.5f), y);
  y = fma(exponent, constant<T>(0.693359375f), f + y);
  const T infinity = constant<T>(__builtin_inff());
  y = select(x == infinity, infinity, y);
  y = select(x == constant<T>(0.0f), constant<T>(-__builtin_inff()), y);
  const T nan = constant<T>(__builtin_nanf(""));
  return select(x < constant<T>(0.0f), nan, select(x == x, y, x));
}

/// tanh: an odd polynomial below 0.625 (Cephes' tanhf), else 1 - 2 / (e^(2|x|) + 1) with x's sign.
template <class T>
SHARDLAB_INLINE T tanh_formula(T x) {
  const auto sign = both(bits(x), static_cast<int32_t>(0x80000000));
  const T size = from_bits(both(bits(x), 0x7fffffff));
  const T z = x * x;
  T p = constant<T>(-5.70498872745e-3f);
  p = fma(p, z, constant<T>(2.06390887954e-2f));
  p = fma(p, z, constant<T>(-5.37397155531e-2f));
  p = fma(p, z, constant<T>(1.33314422036e-1f));
  p = fma(p, z, constant<T>(-3.33332819422e-1f));
  const T near = fma(p * z, x, x);
  const T e = exp_formula(size + size);
  const T far = constant<T>(1.0f) - constant<T>(2.0f) / (e + constant<T>(1.0f));
  return select(size < constant<T>(0.625f), near, from_bits(either(bits(far), sign)));
}

/// Inner value of GELU's tanh form: tanh(0.7978845608 * (u + 0.044715 u^3)).
template <class T>
SHARDLAB_INLINE T gelu_tanh(T u) {
  const T u3 = (u * u) * u;
  return tanh_formula(constant<T>(0.7978845608f) * (u + constant<T>(0.044715f) * u3));
}
template <class T>
SHARDLAB_INLINE T gelu_formula(T u) {
  return (constant<T>(0.5f) * u) * (constant<T>(1.0f) + gelu_tanh(u));
}
template <class T>
SHARDLAB_INLINE T gelu_backward_formula(T da, T u) {
  const T one = constant<T>(1.0f);
  const T half = constant<T>(0.5f);
  const T t = gelu_tanh(u);
  const T left = half * (one + t);
  const T slope = constant<T>(0.7978845608f) * (one + constant<T>(0.134145f) * (u * u));
  const T right = ((half * u) * (one - t * t)) * slope;
  return da * (left + right);
}

template <class T>
SHARDLAB_INLINE T swiglu_formula(T g, T v) {
  return (g / (constant<T>(1.0f) + exp_formula(constant<T>(0.0f) - g))) * v;
}

}  // namespace shardlab::kernels::SHARDLAB_VARIANT
