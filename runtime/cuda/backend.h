// The back end of one rank on a GPU: binds each op to a kernel of kernels/cuda, whose launch goes to the op's stream.
#pragma once

#include "runtime/backend.h"
#include "runtime/cuda/node.h"

namespace shardlab::cuda {

struct CudaOptions {
  bool canonical = false;  ///< the fixed-order product instead of the library's: bitwise equal across layouts
  bool tf32 = false;       ///< fp32 products of the library may round their factors to tf32
  /// Device memory lent to the library's matmul, per stream that has one; counted in scratch. 32 MiB is what cuBLAS uses on Hopper.
  int64_t workspace_bytes = int64_t{32} << 20;
};

/// Back ends on the devices of `node`, which must outlive them.
///
/// Element types: activations f32, bf16 or f16, one type an op; parameters, their gradients f32 or that type; optimizer moments,
/// statistics and losses f32; token ids i32. Anything else is refused when the op is bound.
///
/// Scratch beside the arena: one block a stream, as large as its most demanding op or the matmul's workspace (the plan's own
/// `workspace` buffers are sized for the CPU's kernels), and a pinned block for each batch that is loaded. `RankDevice::reserved`
/// counts both with the arena.
BackendFactory cuda_backend(Node& node, const CudaOptions& options);

}  // namespace shardlab::cuda
