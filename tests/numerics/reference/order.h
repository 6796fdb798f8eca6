// The sums of docs/canonical-order.md, one value at a time.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <vector>

#include "plan/base/tree.h"

namespace shardlab::reference {

/// tree(leaf(0) ... leaf(n-1)), +0 for no leaves.
template <class T, class Leaf>
T tree(int64_t n, const Leaf& leaf) {
  if (n == 0) return T(0);
  return tree_sum(0, n, leaf, [](T a, T b) { return a + b; });
}

/// 16 running sums, joined by the tree.
template <class T, class Value>
T lanes(int64_t n, const Value& value) {
  std::array<T, 16> lane{};
  for (int64_t i = 0; i < n; ++i) lane[static_cast<size_t>(i % 16)] += value(i);
  return tree<T>(16, [&](int64_t j) { return lane[static_cast<size_t>(j)]; });
}

/// acc = fma(a(i), b(i), acc) from +0, i ascending over [begin, end).
template <class T, class A, class B>
T chain(int64_t begin, int64_t end, const A& a, const B& b) {
  T acc = 0;
  for (int64_t i = begin; i < end; ++i) acc = std::fma(a(i), b(i), acc);
  return acc;
}

/// sums[j] = fma(a, b[j], sums[j]) for each j of n: a link of n chains at once.
void link_chains(float a, const float* b, int64_t n, float* sums);
void link_chains(double a, const double* b, int64_t n, double* sums);

/// The numbers of an extent, dealt out to the 16 leaves of its tree.
using Leaves = std::array<std::vector<int64_t>, 16>;

/// Those of [0, extent) that are wanted.
template <class Wanted>
Leaves leaves_of(int64_t extent, const Wanted& wanted) {
  Leaves leaves;
  for (int leaf = 0; leaf < 16; ++leaf)
    for (int64_t k = leaf_begin(extent, leaf); k < leaf_begin(extent, leaf + 1); ++k)
      if (wanted(k)) leaves[static_cast<size_t>(leaf)].push_back(k);
  return leaves;
}
inline Leaves leaves_of(int64_t extent) {
  return leaves_of(extent, [](int64_t) { return true; });
}

/// Joins 16 rows of n sums by the tree: the result is the first row.
template <class T>
void join(std::vector<T>& rows, int64_t n) {
  for (int64_t width = 1; width < 16; width *= 2)
    for (int64_t left = 0; left < 16; left += 2 * width)
      for (int64_t j = 0; j < n; ++j)
        rows[static_cast<size_t>(left * n + j)] += rows[static_cast<size_t>((left + width) * n + j)];
  rows.resize(static_cast<size_t>(n));
}

/// `n` contractions with the same first factor: of a(k) and row(k)[j], for each j. Each is 16 chains, joined by the tree. `closed` adds
/// +0 to each chain, which makes a -0 a +0.
template <class T, class A, class Row>
std::vector<T> contract(const Leaves& leaves, int64_t n, const A& a, const Row& row, bool closed = false) {
  std::vector<T> sums(static_cast<size_t>(16 * n));
  for (size_t leaf = 0; leaf < 16; ++leaf)
    for (const int64_t k : leaves[leaf]) link_chains(a(k), row(k), n, &sums[leaf * static_cast<size_t>(n)]);
  if (closed)
    for (T& sum : sums) sum += T(0);
  join(sums, n);
  return sums;
}

/// A sum over the tokens of one sequence: 16 plain sums in token order, joined by the tree.
template <class T, class Value>
T token_tree(int64_t tokens, const Value& value) {
  return tree<T>(16, [&](int64_t leaf) {
    const int i = static_cast<int>(leaf);
    T sum = 0;
    for (int64_t t = leaf_begin(tokens, i); t < leaf_begin(tokens, i + 1); ++t) sum += value(t);
    return sum;
  });
}

}  // namespace shardlab::reference
