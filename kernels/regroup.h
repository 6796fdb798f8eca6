// Rows cut in parts that ranks exchange, and rows put together of parts (Ulysses).
// Source: Jacobs et al. 2023, "DeepSpeed Ulysses"; copies of kv heads where there are fewer than ranks.
#pragma once

#include <cstdint>

#include "kernels/storage.h"

namespace shardlab::kernels {

/// Shapes: x[sequences,tokens,row], y[parts,tokens,sequences,width]; part i of every row is y[i]. x -> y, or y -> x with `join`.
/// copies 1: row = parts * width. copies k > 1: x is rows of kv_heads groups (queries, a key, a value of head_dim each), k parts a group;
/// a part has 1/k of the group's queries, its key and its value, and `join` adds the k copies of a key or value by the tree, in fp32,
/// rounded once. Bytes: x and y once. All elements are of `dtype`: any where nothing is added, else a float storage.
struct Regroup {
  const void* from = nullptr;
  void* to = nullptr;
  DType dtype = DType::f32;
  int64_t sequences = 1, tokens = 0, parts = 1, width = 0;
  bool join = false;
  int copies = 1;
  int64_t kv_heads = 0, head_dim = 0;
};

void regroup(const StorageKernels& storage, const Regroup& a);

}  // namespace shardlab::kernels
