// The CPU's kernels behind the table of the GPU's: fp32 only. With them a run on a fake device must give the CPU's bits, so that
// what differs is what the back end bound or the events ordered, and never a kernel.
#pragma once

#include "kernels/cuda/kernels.h"
#include "tests/namespaces.h"

namespace shardlab::testing {

/// A launch has ended when it returns; a Stream's handle is not looked at.
const gpu::Kernels& host_kernels();

}  // namespace shardlab::testing
