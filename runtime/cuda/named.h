// The plan's `Kernel` ops on a GPU: names and operands are those of runtime/named_kernels.h.
#pragma once

#include <functional>
#include <string_view>
#include <vector>

#include "kernels/cuda/kernels.h"
#include "runtime/backend.h"

namespace shardlab::runtime::cuda {

inline gpu::Input input(const Tensor& t) { return {t.data, t.type->dtype}; }
inline gpu::Output output(const Tensor& t) { return {t.data, t.type->dtype}; }

/// Enqueues one op.
using Enqueue = std::function<void(const StepState&, gpu::Stream)>;

struct NamedTools {
  const gpu::Kernels& kernels;
  gpu::Scratch scratch;  ///< the stream's
};

/// Refuses names that no GPU has a kernel for, and operands that do not fit.
Result<Enqueue> bind_named(const BoundOp& op, const Kernel& kernel, const NamedTools& tools);

/// Every name that a GPU has a kernel for, in the order of the documentation.
std::vector<std::string_view> named_on_device();

}  // namespace shardlab::runtime::cuda
