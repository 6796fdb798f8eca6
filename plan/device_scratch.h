// What the kernels of a GPU and its libraries need beside operands, so that it stands in the plan and falls into its peak.
#pragma once

#include "plan/base/attention_calls.h"
#include "plan/case.h"
#include "plan/work.h"

namespace shardlab {

/// Which kernels a GPU is asked to run, as far as it decides what they need.
struct DeviceKernels {
  bool canonical = false;  ///< own fixed-order products, which need nothing
  bool cudnn = false;      ///< cuDNN may be asked for the attention of 2-byte elements
};
DeviceKernels device_kernels(const Case& config);

/// Alignment in bytes of the scratch address that a kernel gets. A buffer's own address is aligned to kAlignment only.
inline constexpr int64_t kScratchAlignment = 256;

/// Bytes that `op` may use beside its operands on a GPU.
///
/// Formula, in fp32 for b sequences of s tokens: norm W 2 (rms 1) and a bias's W 1 times b leaves width; attention I, whole or in blocks, b s heads;
///   cross-entropy with losses b s; a sum of scalars its elements; a squared norm 8 bytes for each span of 8192 elements of a
///   part, a largest size 4 bytes a span and 8 more, a selection 64 a span and 256 more; an orthonormal basis 8 bytes an element;
///   1-bit Adam's step 4 bytes; and so
///   that the address can be aligned, kScratchAlignment more. leaves: 16, or those that a shard of the tokens meets. A product of
///   the library, and cuDNN's attention: `kLibraryWorkspace`, `AttentionCalls`. Everything else works in place.
/// Units: bytes.
/// Source: kernels/cuda/geometry.cpp, to which tests hold it.
int64_t device_scratch_bytes(const Segment& segment, const Op& op, const Mesh& mesh, const DeviceKernels& kernels);

/// `add_workspaces` for a GPU. An op that the host works on gets scratch in host memory, or none if an op of its stream needs scratch on the device.
void add_device_workspaces(Plan& plan, const DeviceKernels& kernels);

}  // namespace shardlab
