// The kernels of a fake device: a launch queues the host's emulation of the kernel on a FakeStream.
#pragma once

#include "kernels/cuda/kernels.h"

namespace shardlab::testing {

/// The emulated table behind queues. A Stream's handle points to a FakeStream.
const gpu::Kernels& queued_kernels();

}  // namespace shardlab::testing
