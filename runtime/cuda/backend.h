// The back end of one rank on a GPU: binds each op to a kernel of kernels/cuda, whose launch goes to the op's stream.
#pragma once

#include <set>
#include <string>

#include "kernels/cuda/cudnn_api.h"
#include "runtime/backend.h"
#include "runtime/cuda/node.h"

namespace shardlab::runtime::cuda {

struct CudaOptions {
  bool canonical = false;  ///< the fixed-order product instead of the library's, own attention: bitwise equal across layouts
  bool tf32 = false;       ///< fp32 products of the library may round their factors to tf32
  AttentionBy attention = AttentionBy::kOwn;
  gpu::CudnnApi* cudnn = nullptr;  ///< of kCudnn and kAuto; must outlive the back ends
  std::string no_cudnn;            ///< why there is none, where there is none
  /// Told while ops are bound, by the one thread that does: "attention by cuDNN 9.19.0", "attention by own kernels (head_dim 70 is
  /// no multiple of 8)". May be null.
  std::set<std::string>* notes = nullptr;
};

/// Back ends on the devices of `node`, which must outlive them.
///
/// Element types: activations f32, bf16 or f16, one type an op; parameters, their gradients f32 or that type; optimizer moments,
/// statistics and losses f32; token ids i32. Anything else is refused when the op is bound.
///
/// Ops whose operands are all in host memory (offloaded state and its updates) run on the host, by the CPU's kernels, on the thread
/// of their stream, once the device has come so far. Kernels that read or write host memory beside the device's reach it as it is:
/// it is pinned.
///
/// Scratch is the plan's: "workspace.<stream>", as `device_scratch_bytes` sizes it; an op whose stream has less is refused. Beside
/// the arena there are, in host memory, a pinned block for each batch that is loaded, and in device memory what libraries keep for
/// themselves (handles, modules, communicators), which shows as unplanned memory, item by item (memory_account.h).
BackendFactory cuda_backend(Node& node, const CudaOptions& options);

}  // namespace shardlab::runtime::cuda
