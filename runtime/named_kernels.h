// The plan's `Kernel` ops on a CPU: a table from a kernel's name to its binder. plan/named_kernels.h has the operands of each name.
#pragma once

#include <string_view>
#include <vector>

#include "plan/base/result.h"
#include "runtime/scratch_launch.h"

namespace shardlab::runtime {

/// One name.
struct KernelBinder {
  std::string_view name;
  Result<ScratchLaunch> (*bind)(const BoundOp& op, const BindTools& tools);
};

/// Every name that the CPU back end binds.
std::vector<KernelBinder> kernel_binders();

/// Refuses unknown names, and operands that do not fit the signature.
Result<ScratchLaunch> bind_named(const BoundOp& op, const Kernel& kernel, const BindTools& tools);

}  // namespace shardlab::runtime
