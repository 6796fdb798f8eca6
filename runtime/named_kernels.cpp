#include "runtime/named_kernels.h"

#include <algorithm>
#include <vector>

#include "plan/base/hash.h"
#include "runtime/named_binding.h"

namespace shardlab::runtime {

namespace named {

RandomKey key_of(const BoundOp& op, RandomUse use) {
  // One segment may serve many parameters: their number tells them apart, and is the same on every layout.
  const uint64_t tensor = op.parameter < 0 ? 0 : 1 + op.plan->parameters[static_cast<size_t>(op.parameter)].tensor;
  const uint64_t hash = mix(mix(hash_text(op.op().label) + static_cast<uint64_t>(op.instruction->layer + 1)) + tensor);
  return {op.seed, use, static_cast<uint32_t>(hash & 0xffffff), 0};  // the key has 24 bits for the tensor
}

float share_of(const BoundOp& op, const Tensor& summand, const Tensor& whole) {
  int64_t ranks = 1;
  for (size_t axis = 0; axis < op.mesh().axes.size(); ++axis) {
    const auto kind = [&](const Tensor& t) { return t.type->place[axis].kind; };
    if (kind(summand) == Place::kPartial && kind(whole) != Place::kPartial)
      ranks *= op.mesh().size(AxisSet::of(static_cast<int>(axis)));
  }
  return 1.0f / static_cast<float>(ranks);
}

}  // namespace named

std::vector<KernelBinder> kernel_binders() {
  std::vector<KernelBinder> kernels;
  for (const auto part :
       {named::precision_kernels(), named::fp8_kernels(), named::compression_kernels(), named::optimizer_kernels()})
    kernels.insert(kernels.end(), part.begin(), part.end());
  return kernels;
}

Result<ScratchLaunch> bind_named(const BoundOp& op, const Kernel& kernel, const BindTools& tools) {
  const std::vector<KernelBinder> known = kernel_binders();
  const auto found = std::ranges::find(known, kernel.name, &KernelBinder::name);
  if (found == known.end())
    return Error{ExitCode::kUsage,
                 fmt::format("the CPU back end has no kernel called `{}`, which `{}` asks for", kernel.name,
                             describe(*op.plan, *op.instruction)),
                 "predict the plan with mode: simulate, or leave the strategy out that adds it", ""};
  return found->bind(op, tools);
}

}  // namespace shardlab::runtime
