#include "runtime/reduction.h"

#include <algorithm>
#include <vector>

#include "plan/base/check.h"
#include "plan/base/tree.h"

namespace shardlab {

namespace {

/// The vector kernels are fp32's; metrics and counts come in the other types and are a few elements long.
template <class T>
void combine_as(ReduceOp reduce, void* own, const void* theirs, int64_t n) {
  T* a = static_cast<T*>(own);
  const T* b = static_cast<const T*>(theirs);
  for (int64_t i = 0; i < n; ++i) a[i] = reduce == ReduceOp::kSum ? a[i] + b[i] : std::max(a[i], b[i]);
}

template <class T>
void tree_combine_as(ReduceOp reduce, std::span<const void* const> parts, void* out, int64_t n) {
  const auto join = [&](T a, T b) { return reduce == ReduceOp::kSum ? a + b : std::max(a, b); };
  for (int64_t i = 0; i < n; ++i) {
    const auto leaf = [&](int64_t p) { return static_cast<const T*>(parts[static_cast<size_t>(p)])[i]; };
    static_cast<T*>(out)[i] = tree_sum(0, static_cast<int64_t>(parts.size()), leaf, join);
  }
}

}  // namespace

bool reducible(DType dtype) { return dtype == DType::f32 || dtype == DType::f64 || dtype == DType::i32 || dtype == DType::i64; }

void combine(const Kernels& kernels, DType dtype, ReduceOp reduce, void* own, const void* theirs, int64_t n) {
  switch (dtype) {
    case DType::f32: {
      const kernels::Add add{static_cast<const float*>(own), static_cast<const float*>(theirs), static_cast<float*>(own), n};
      return reduce == ReduceOp::kSum ? kernels.add(add) : kernels.maximum(add);
    }
    case DType::f64: return combine_as<double>(reduce, own, theirs, n);
    case DType::i32: return combine_as<int32_t>(reduce, own, theirs, n);
    case DType::i64: return combine_as<int64_t>(reduce, own, theirs, n);
    default: SHARDLAB_CHECK(false, "{} is not reduced", name_of(dtype));
  }
}

void tree_combine(const Kernels& kernels, DType dtype, ReduceOp reduce, std::span<const void* const> parts, void* out, int64_t n) {
  if (dtype == DType::f32 && reduce == ReduceOp::kSum) {
    std::vector<const float*> leaves;
    for (const void* p : parts) leaves.push_back(static_cast<const float*>(p));
    return kernels.tree_combine({leaves.data(), static_cast<int>(leaves.size()), static_cast<float*>(out), n});
  }
  switch (dtype) {
    case DType::f32: return tree_combine_as<float>(reduce, parts, out, n);
    case DType::f64: return tree_combine_as<double>(reduce, parts, out, n);
    case DType::i32: return tree_combine_as<int32_t>(reduce, parts, out, n);
    case DType::i64: return tree_combine_as<int64_t>(reduce, parts, out, n);
    default: SHARDLAB_CHECK(false, "{} is not reduced", name_of(dtype));
  }
}

}  // namespace shardlab
