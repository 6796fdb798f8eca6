#include "runtime/reduction.h"

#include <algorithm>
#include <array>
#include <vector>

#include "kernels/storage.h"
#include "plan/base/check.h"
#include "plan/base/tree.h"

namespace shardlab::runtime {

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

bool is_half(DType dtype) { return dtype == DType::bf16 || dtype == DType::f16; }

/// Elements of a block that is widened at a time.
constexpr int64_t kBlock = 1024;

const void* at(const void* p, int64_t element) { return static_cast<const char*>(p) + 2 * element; }

/// Two bytes an element: each of the two is widened, joined in fp32 and rounded, block by block.
void combine_halves(const kernels::Kernels& kernels, DType dtype, ReduceOp reduce, void* own, const void* theirs, int64_t n) {
  const kernels::StorageKernels& storage = kernels::storage_kernels(kernels);
  std::array<float, kBlock> a, b;
  for (int64_t i = 0; i < n; i += kBlock) {
    const int64_t m = std::min(kBlock, n - i);
    storage.widen({at(own, i), dtype, m, a.data()});
    storage.widen({at(theirs, i), dtype, m, b.data()});
    const kernels::Add add{a.data(), b.data(), a.data(), m};
    reduce == ReduceOp::kSum ? kernels.add(add) : kernels.maximum(add);
    storage.narrow({a.data(), m, dtype, const_cast<void*>(at(own, i))});
  }
}

/// The tree over the widened parts, rounded once.
void tree_combine_halves(const kernels::Kernels& kernels, DType dtype, ReduceOp reduce, std::span<const void* const> parts,
                         void* out, int64_t n) {
  const kernels::StorageKernels& storage = kernels::storage_kernels(kernels);
  std::vector<float> wide(parts.size() * kBlock);
  std::vector<const void*> leaves;
  for (size_t p = 0; p < parts.size(); ++p) leaves.push_back(wide.data() + p * kBlock);
  for (int64_t i = 0; i < n; i += kBlock) {
    const int64_t m = std::min(kBlock, n - i);
    for (size_t p = 0; p < parts.size(); ++p) storage.widen({at(parts[p], i), dtype, m, wide.data() + p * kBlock});
    tree_combine(kernels, DType::f32, reduce, leaves, wide.data(), m);
    storage.narrow({wide.data(), m, dtype, const_cast<void*>(at(out, i))});
  }
}

}  // namespace

bool reducible(DType dtype) {
  return dtype == DType::f32 || dtype == DType::f64 || dtype == DType::i32 || dtype == DType::i64 || is_half(dtype);
}

void combine(const kernels::Kernels& kernels, DType dtype, ReduceOp reduce, void* own, const void* theirs, int64_t n) {
  switch (dtype) {
    case DType::f32: {
      const kernels::Add add{static_cast<const float*>(own), static_cast<const float*>(theirs), static_cast<float*>(own), n};
      return reduce == ReduceOp::kSum ? kernels.add(add) : kernels.maximum(add);
    }
    case DType::f64: return combine_as<double>(reduce, own, theirs, n);
    case DType::i32: return combine_as<int32_t>(reduce, own, theirs, n);
    case DType::i64: return combine_as<int64_t>(reduce, own, theirs, n);
    case DType::bf16:
    case DType::f16: return combine_halves(kernels, dtype, reduce, own, theirs, n);
    default: SHARDLAB_CHECK(false, "{} is not reduced", name_of(dtype));
  }
}

void tree_combine(const kernels::Kernels& kernels, DType dtype, ReduceOp reduce, std::span<const void* const> parts, void* out,
                  int64_t n) {
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
    case DType::bf16:
    case DType::f16: return tree_combine_halves(kernels, dtype, reduce, parts, out, n);
    default: SHARDLAB_CHECK(false, "{} is not reduced", name_of(dtype));
  }
}

void weigh(const kernels::Kernels& kernels, DType dtype, float weight, void* row, int64_t n) {
  if (dtype == DType::f32) {
    float* x = static_cast<float*>(row);
    for (int64_t i = 0; i < n; ++i) x[i] = weight * x[i];
    return;
  }
  SHARDLAB_CHECK(is_half(dtype), "rows of {} are not weighed", name_of(dtype));
  const kernels::StorageKernels& storage = kernels::storage_kernels(kernels);
  std::array<float, kBlock> x;
  for (int64_t i = 0; i < n; i += kBlock) {
    const int64_t m = std::min(kBlock, n - i);
    storage.widen({at(row, i), dtype, m, x.data()});
    for (int64_t k = 0; k < m; ++k) x[static_cast<size_t>(k)] = weight * x[static_cast<size_t>(k)];
    storage.narrow({x.data(), m, dtype, const_cast<void*>(at(row, i))});
  }
}

}  // namespace shardlab::runtime
