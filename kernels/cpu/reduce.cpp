// Sums of buffers.
#include "kernels/cpu/sums.h"
#include "kernels/cpu/variant.h"

namespace shardlab::kernels::SHARDLAB_VARIANT {

void add(const Add& a) {
  for_vectors(a.n, [&](int64_t i, int m) { store_some(a.c + i, load_some(a.a + i, m) + load_some(a.b + i, m), m); });
}

void maximum(const Add& a) {
  for_vectors(a.n, [&](int64_t i, int m) { store_some(a.c + i, larger(load_some(a.a + i, m), load_some(a.b + i, m)), m); });
}

void fill(float* x, int64_t n, float value) {
  const Floats v = floats(value);
  for_vectors(n, [=](int64_t i, int m) { store_some(x + i, v, m); });
}

void tree_combine(const TreeCombine& a) {
  expect(a.count >= 1, "tree_combine: at least one part", a.count);
  // Each element is read from every part before it is written, so out may be one of them.
  for_vectors(a.n, [&](int64_t i, int m) {
    TreeCounter<Floats, 32> sum;
    for (int part = 0; part < a.count; ++part) sum.push(load_some(a.parts[part] + i, m));
    store_some(a.out + i, sum.total(), m);
  });
}

void sum_scalars(const SumScalars& a) {
  TreeCounter<float, 64> sum;
  int64_t pushed = 0;
  for (int part = 0; part < a.count; ++part)
    for (int64_t i = 0; i < a.sizes[part]; ++i, ++pushed) sum.push(a.parts[part][i]);
  const float factor = static_cast<float>(static_cast<double>(a.factor_num) / static_cast<double>(a.factor_den));
  *a.total = (pushed == 0 ? 0.0f : sum.total()) * factor;
}

double squared_norm(const float* x, int64_t n) {
  double sum[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    for (int j = 0; j < kLanes; ++j) sum[j] += static_cast<double>(x[i + j]) * static_cast<double>(x[i + j]);
  for (int j = 0; i < n; ++i, ++j) sum[j] += static_cast<double>(x[i]) * static_cast<double>(x[i]);
  for (int width = kLanes / 2; width >= 1; width /= 2)
    for (int j = 0; j < width; ++j) sum[j] = sum[2 * j] + sum[2 * j + 1];
  return sum[0];
}

}  // namespace shardlab::kernels::SHARDLAB_VARIANT
