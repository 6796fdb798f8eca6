// Named kernels of optimizers that the core does not know.
#include <array>

#include "kernels/outer_step.h"
#include "runtime/named_binding.h"

namespace shardlab::named {
namespace {

/// The numbers are read when it runs: other ops have filled them.
Result<ScratchLaunch> bind_outer_step(const BoundOp& op, const BindTools&) {
  const bool momentum = op.reads.size() == 6;
  Operands check = Operands(op).that((op.reads.size() == 4 && op.writes.size() == 1) || (momentum && op.writes.size() == 2),
                                     "takes (delta, start, share, learning_rate[, momentum, velocity]) -> (value[, velocity])");
  if (check.good()) {
    for (const Tensor* t : {&op.reads[0], &op.reads[1], &op.writes[0]}) check.type(*t, DType::f32).same_size(op.reads[0], *t);
    check.number(op.reads[2]).number(op.reads[3]);
  }
  if (check.good() && momentum)
    check.number(op.reads[4]).type(op.reads[5], DType::f32).same_size(op.reads[0], op.reads[5]).in_place(op.writes[1], op.reads[5]);
  if (!check.good()) return check.refusal();
  const kernels::OuterStep args{.delta = op.reads[0].as<const float>(),
                                .start = op.reads[1].as<const float>(),
                                .velocity = momentum ? op.writes[1].as<float>() : nullptr,
                                .value = op.writes[0].as<float>(),
                                .n = elements_of(op.writes[0])};
  const auto* factor = momentum ? op.reads[4].as<const float>() : nullptr;
  return plain([args, share = op.reads[2].as<const float>(), rate = op.reads[3].as<const float>(), factor] {
    kernels::OuterStep now = args;
    now.share = *share;
    now.learning_rate = *rate;
    if (factor != nullptr) now.momentum = *factor;
    kernels::outer_step(now);
  });
}

constexpr std::array kTable{
    NamedKernel{
        "outer_step",
        "(delta f32, start f32, share f32[1], learning_rate f32[1][, momentum f32[1], velocity f32]) -> value f32[, velocity]",
        bind_outer_step},
};

}  // namespace

std::span<const NamedKernel> optimizer_kernels() { return kTable; }

}  // namespace shardlab::named
