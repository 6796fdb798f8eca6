#include "kernels/initialise.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <thread>
#include <vector>

#include "kernels/checks.h"

namespace shardlab::kernels {
namespace {

/// Both normal values of the pair that holds logical element `element`.
struct Pair {
  uint64_t index;
  double values[2];
};
Pair pair_of(const RandomKey& key, uint64_t element) {
  const uint64_t first = element / 2 * 2;
  const auto uniform = [&](uint64_t e) { return (random_bits(key, e) + 0.5) / 4294967296.0; };
  constexpr double kTwoPi = 6.283185307179586476925;
  const double r = std::sqrt(-2.0 * std::log(uniform(first))), angle = kTwoPi * uniform(first + 1);
  return {element / 2, {r * std::cos(angle), r * std::sin(angle)}};
}

/// A run of elements that are neighbours in the logical tensor too.
void fill_run(const RandomKey& key, uint64_t element, int64_t n, double deviation, float* to) {
  for (int64_t i = 0; i < n;) {
    const Pair pair = pair_of(key, element + static_cast<uint64_t>(i));
    for (; i < n && (element + static_cast<uint64_t>(i)) / 2 == pair.index; ++i)
      to[i] = static_cast<float>(deviation * pair.values[(element + static_cast<uint64_t>(i)) % 2]);
  }
}

constexpr size_t kMostDims = 8;

/// Rows [begin, end) of the block. A row runs along the last dim.
void fill_rows(const InitialiseNormal& a, int64_t begin, int64_t end) {
  const size_t dims = a.shape.size();
  const int64_t width = a.extent[dims - 1];
  std::array<int64_t, kMostDims> index{};
  int64_t rest = begin;
  for (size_t d = dims - 1; d-- > 0; rest /= a.extent[d]) index[d] = rest % a.extent[d];
  for (int64_t row = begin; row < end; ++row) {
    int64_t element = 0;
    for (size_t d = 0; d < dims; ++d) element = element * a.shape[d] + a.origin[d] + index[d];
    fill_run(a.key, static_cast<uint64_t>(element), width, a.deviation, a.values + row * width);
    for (size_t d = dims - 1; d-- > 0;) {
      if (++index[d] < a.extent[d]) break;
      index[d] = 0;
    }
  }
}

}  // namespace

void initialise_normal(const InitialiseNormal& a) {
  const size_t dims = a.shape.size();
  expect(dims >= 1 && dims <= kMostDims, "initialise: one to eight dims", static_cast<int64_t>(dims));
  expect(a.origin.size() == dims && a.extent.size() == dims, "initialise: shape, origin and extent have one length",
         static_cast<int64_t>(dims));
  int64_t rows = 1;
  for (size_t d = 0; d < dims; ++d) {
    expect(a.origin[d] >= 0 && a.extent[d] >= 0 && a.origin[d] + a.extent[d] <= a.shape[d],
           "initialise: a block lies in its tensor; this is the dim", static_cast<int64_t>(d));
    if (d + 1 < dims) rows *= a.extent[d];
  }
  constexpr int64_t kShared = 1 << 18;
  const int64_t threads = rows * a.extent[dims - 1] < kShared ? 1 : std::clamp<int64_t>(a.threads, 1, rows);
  std::vector<std::jthread> others;
  for (int64_t t = 1; t < threads; ++t)
    others.emplace_back([&a, begin = rows * t / threads, end = rows * (t + 1) / threads] { fill_rows(a, begin, end); });
  fill_rows(a, 0, rows / threads);
}

}  // namespace shardlab::kernels
