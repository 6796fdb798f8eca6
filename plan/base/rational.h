// Exact scales of gradients: a factor error is a type error, so it must not be a float.
#pragma once

#include <compare>
#include <cstdint>
#include <numeric>

#include "plan/base/check.h"

namespace shardlab {

/// num/den in lowest terms, den > 0.
struct Rational {
  int64_t num = 1;
  int64_t den = 1;

  constexpr Rational() = default;
  constexpr Rational(int64_t n, int64_t d = 1) : num(n), den(d) {
    SHARDLAB_CHECK(d != 0, "a rational with denominator 0");
    const int64_t g = std::gcd(n, d);
    if (g != 0) {
      num /= g;
      den /= g;
    }
    if (den < 0) {
      num = -num;
      den = -den;
    }
  }
  friend constexpr bool operator==(Rational, Rational) = default;
  friend constexpr Rational operator*(Rational a, Rational b) {
    const Rational x(a.num, b.den), y(b.num, a.den);  // cancel crosswise first: products stay small
    return {x.num * y.num, x.den * y.den};
  }
  friend constexpr Rational operator/(Rational a, Rational b) { return a * Rational(b.den, b.num); }
};

}  // namespace shardlab
