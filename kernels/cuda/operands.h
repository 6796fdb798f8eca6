// Device arrays as arguments of kernels.
#pragma once

#include <cstdint>

#include "plan/base/dtype.h"

namespace shardlab::gpu {

/// A device array that is read, and one that is written. Their extents follow from the launch's.
struct Input {
  const void* data = nullptr;
  DType dtype = DType::f32;
};
struct Output {
  void* data = nullptr;
  DType dtype = DType::f32;
  constexpr operator Input() const { return {data, dtype}; }
};

/// Scratch lent for one launch, aligned to 256: at least `*_scratch_bytes(args)` bytes.
struct Scratch {
  void* data = nullptr;
  int64_t bytes = 0;
};

}  // namespace shardlab::gpu
