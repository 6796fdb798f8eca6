// The sums of docs/canonical-order.md, one value at a time.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>

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

/// A contraction over `extent`: 16 chains, joined by the tree.
template <class T, class A, class B>
T contract(int64_t extent, const A& a, const B& b) {
  return tree<T>(16, [&](int64_t leaf) {
    const int i = static_cast<int>(leaf);
    return chain<T>(leaf_begin(extent, i), leaf_begin(extent, i + 1), a, b);
  });
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
