// What the kernel tests share: random inputs, poisoned outputs, scratch with a guard, fp64 gradients, comparisons that name the
// element.
#pragma once

#include <fmt/core.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "kernels/elementary.h"
#include "kernels/kernels.h"
#include "tests/namespaces.h"
#include "tests/test.h"

namespace shardlab::testing {

using Floats = std::vector<float>;
using Doubles = std::vector<double>;

/// n values, roughly uniform in [-scale, scale], never 0, from a counter-based generator.
inline Floats random_floats(int64_t n, uint32_t seed, float scale = 1.0f) {
  Floats x(static_cast<size_t>(n));
  const RandomKey key{.seed = 77, .tensor = seed};
  for (size_t i = 0; i < x.size(); ++i) x[i] = scale * static_cast<float>((random_bits(key, i) + 0.5) / 2147483648.0 - 1.0);
  return x;
}
inline std::vector<int32_t> random_ids(int64_t n, uint32_t seed, int32_t vocab) {
  std::vector<int32_t> x(static_cast<size_t>(n));
  const RandomKey key{.seed = 78, .tensor = seed};
  for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<int32_t>(random_bits(key, i) % static_cast<uint32_t>(vocab));
  return x;
}
/// n NaNs: what an output holds before a kernel overwrites it.
inline Floats poisoned(int64_t n) { return Floats(static_cast<size_t>(n), std::numeric_limits<float>::quiet_NaN()); }
inline Doubles wide(const Floats& x) { return {x.begin(), x.end()}; }

/// Scratch of exactly `bytes` bytes, 64-byte aligned, NaN-filled, with a guard behind it.
class Scratch {
 public:
  explicit Scratch(int64_t bytes) : bytes_(static_cast<size_t>(bytes)), storage_((bytes_ + 2 * kGuard) / 64 + 1) {
    std::memset(storage_.data(), 0xff, storage_.size() * sizeof(Line));
  }
  void* data() { return storage_.data(); }
  /// Whether nothing was written behind the end.
  bool intact() const {
    const auto* p = reinterpret_cast<const unsigned char*>(storage_.data());
    for (size_t i = bytes_; i < bytes_ + kGuard; ++i)
      if (p[i] != 0xff) return false;
    return true;
  }

 private:
  static constexpr size_t kGuard = 64;
  struct alignas(64) Line {
    unsigned char bytes[64];
  };
  size_t bytes_;
  std::vector<Line> storage_;
};

/// Empty when got is within `tolerance` of want relative to want's largest element; else what differs.
inline std::string difference(const Floats& got, const Doubles& want, double tolerance) {
  if (got.size() != want.size()) return fmt::format("{} elements instead of {}", got.size(), want.size());
  double largest = 0;
  for (const double w : want) largest = std::max(largest, std::abs(w));
  for (size_t i = 0; i < want.size(); ++i)
    if (!(std::abs(got[i] - want[i]) <= tolerance * largest))
      return fmt::format("element {} is {} instead of {} (largest {})", i, got[i], want[i], largest);
  return largest > 0 ? "" : "every element is 0: nothing was compared";
}
/// Empty when the bits are equal.
inline std::string bit_difference(const Floats& got, const Floats& want) {
  if (got.size() != want.size()) return fmt::format("{} elements instead of {}", got.size(), want.size());
  for (size_t i = 0; i < want.size(); ++i) {
    if (std::isnan(want[i])) return fmt::format("element {} to compare with is NaN", i);
    if (std::memcmp(&got[i], &want[i], sizeof(float)) != 0)
      return fmt::format("element {} is {} instead of {}", i, got[i], want[i]);
  }
  return "";
}

/// The variants that this processor runs.
inline std::vector<const kernels::Kernels*> variants_here() {
  std::vector<const kernels::Kernels*> here;
  for (const kernels::Kernels* k : kernels::all_variants())
    if (kernels::runs_here(*k)) here.push_back(k);
  return here;
}

/// Runs `compute` on every variant, requires equal bits of all, and returns them.
inline Floats on_every_variant(const std::function<Floats(const kernels::Kernels&)>& compute) {
  Floats first;
  for (const kernels::Kernels* k : variants_here()) {
    INFO("variant " << k->name);
    const Floats result = compute(*k);
    if (first.empty()) first = result;
    REQUIRE(bit_difference(result, first) == "");
  }
  return first;
}

/// Concatenation, so that a kernel's several outputs are compared as one.
inline Floats joined(std::initializer_list<Floats> parts) {
  Floats all;
  for (const Floats& p : parts) all.insert(all.end(), p.begin(), p.end());
  return all;
}
/// Elements [begin, end).
template <class T>
std::vector<T> part_of(const std::vector<T>& x, int64_t begin, int64_t end) {
  return {x.begin() + begin, x.begin() + end};
}
/// Columns [begin, end) of x[.., width].
template <class T>
std::vector<T> columns_of(const std::vector<T>& x, int64_t width, int64_t begin, int64_t end) {
  std::vector<T> part;
  for (size_t row = 0; row < x.size() / static_cast<size_t>(width); ++row)
    part.insert(part.end(), x.begin() + static_cast<int64_t>(row) * width + begin,
                x.begin() + static_cast<int64_t>(row) * width + end);
  return part;
}

/// d(sum_i weight_i * f_i(x)) / dx by central differences in fp64.
inline Doubles numeric_gradient(const std::function<Doubles(const Doubles&)>& f, Doubles x, const Doubles& weight) {
  constexpr double kStep = 1e-5;
  const auto loss = [&](const Doubles& at) {
    const Doubles y = f(at);
    double sum = 0;
    for (size_t i = 0; i < y.size(); ++i) sum += weight[i] * y[i];
    return sum;
  };
  Doubles gradient(x.size());
  for (size_t i = 0; i < x.size(); ++i) {
    const double old = x[i];
    x[i] = old + kStep;
    const double up = loss(x);
    x[i] = old - kStep;
    const double down = loss(x);
    x[i] = old;
    gradient[i] = (up - down) / (2 * kStep);
  }
  return gradient;
}

/// tree over a list, by plan/base/tree.h's recursion.
inline float tree_of(const Floats& x) {
  return tree_sum(
      0, static_cast<int64_t>(x.size()), [&](int64_t i) { return x[static_cast<size_t>(i)]; },
      [](float a, float b) { return a + b; });
}
/// tree, elementwise, over equally long lists.
inline Floats tree_of(const std::vector<Floats>& parts) {
  Floats sum(parts[0].size());
  for (size_t i = 0; i < sum.size(); ++i) {
    Floats leaves;
    for (const Floats& p : parts) leaves.push_back(p[i]);
    sum[i] = tree_of(leaves);
  }
  return sum;
}

/// Kernels meet fp64 to this, relative to the largest element: a missing term is orders of magnitude away.
inline constexpr double kTolerance = 1e-5;

}  // namespace shardlab::testing
