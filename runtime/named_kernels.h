// The plan's `Kernel` ops: a table from a kernel's name to its binder. kernels/README.md lists every name with its operands.
#pragma once

#include <string_view>
#include <vector>

#include "plan/base/result.h"
#include "runtime/scratch_launch.h"

namespace shardlab::runtime {

/// One name. `operands` is its signature as the documentation gives it: "(x, factor f32[1]) -> y".
struct NamedKernel {
  std::string_view name;
  std::string_view operands;
  Result<ScratchLaunch> (*bind)(const BoundOp& op, const BindTools& tools);
};

/// Every name, in the order of the documentation.
std::vector<NamedKernel> named_kernels();

/// Refuses unknown names, and operands that do not fit the signature.
Result<ScratchLaunch> bind_named(const BoundOp& op, const Kernel& kernel, const BindTools& tools);

}  // namespace shardlab::runtime
