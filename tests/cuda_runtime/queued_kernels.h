// The kernels of a fake device: a launch queues the kernel on a FakeStream, and the kernel is one that runs on the host.
#pragma once

#include "kernels/cuda/kernels.h"
#include "tests/namespaces.h"

namespace shardlab::testing {

/// What stands behind the queues.
enum class Behind : uint8_t {
  kHost,      ///< the CPU's kernels (host_kernels.h): fast, and the CPU's bits
  kEmulated,  ///< the GPU's own sources, emulated
};
/// A Stream's handle points to a FakeStream.
const gpu::Kernels& queued_kernels(Behind behind);

}  // namespace shardlab::testing
