// Named kernels of optimizers that the core does not know.
#include <array>
#include <span>
#include <vector>

#include "kernels/experts.h"
#include "kernels/one_bit_adam.h"
#include "kernels/outer_step.h"
#include "runtime/named_binding.h"

namespace shardlab::runtime::named {
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

// ---- 1-bit Adam

/// Moments of parameters that lie one after another in a flat operand: fp32, and no more of them than it has elements.
void check_pieces(Operands& check, const Tensor& flat, std::span<const Tensor> moments) {
  int64_t elements = 0;
  for (const Tensor& t : moments) {
    check.type(t, DType::f32);
    elements += elements_of(t);
  }
  check.that(elements <= elements_of(flat), "has moments of more elements than it has");
}

Result<ScratchLaunch> bind_fold_momentum(const BoundOp& op, const BindTools&) {
  Operands check = Operands(op).that(op.reads.size() >= 3 && op.writes.size() == 1, "takes (gradient, beta1, m...) -> (momentum)");
  if (!check.good()) return check.refusal();
  const std::span<const Tensor> moments = std::span(op.reads).subspan(2);
  const Tensor &gradient = op.reads[0], &momentum = op.writes[0];
  check.type(gradient, DType::f32).type(momentum, DType::f32).same_size(gradient, momentum).number(op.reads[1]);
  check_pieces(check, gradient, moments);
  if (!check.good()) return check.refusal();
  std::vector<kernels::MomentPiece> pieces;
  for (const Tensor& m : moments) pieces.push_back({m.as<float>(), nullptr, elements_of(m)});
  const kernels::FoldMomentum args{.gradient = gradient.as<const float>(),
                                   .momentum = momentum.as<float>(),
                                   .n = elements_of(gradient),
                                   .share = share_of(op, gradient, moments.front())};
  return plain([args, pieces = std::move(pieces), beta1 = op.reads[1].as<const float>()] {
    kernels::FoldMomentum now = args;
    now.pieces = pieces;
    now.beta1 = *beta1;
    kernels::fold_momentum(now);
  });
}

Result<ScratchLaunch> bind_frozen_adam(const BoundOp& op, const BindTools&) {
  constexpr const char* kTakes = "takes (momentum, beta1, correction, epsilon, v...) -> (direction, m...)";
  Operands check = Operands(op).that(op.reads.size() >= 5 && op.writes.size() == op.reads.size() - 3, kTakes);
  if (!check.good()) return check.refusal();
  const std::span<const Tensor> second = std::span(op.reads).subspan(4), first = std::span(op.writes).subspan(1);
  const Tensor& x = op.writes[0];
  check.type(x, DType::f32).in_place(x, op.reads[0]).same_size(x, op.reads[0]);
  for (size_t i = 1; i < 4; ++i) check.number(op.reads[i]);
  check_pieces(check, x, first);
  check_pieces(check, x, second);
  for (size_t i = 0; i < first.size(); ++i) check.same_size(first[i], second[i]);
  if (!check.good()) return check.refusal();
  std::vector<kernels::MomentPiece> pieces;
  for (size_t i = 0; i < first.size(); ++i)
    pieces.push_back({first[i].as<float>(), second[i].as<const float>(), elements_of(first[i])});
  const kernels::FrozenAdam args{.x = x.as<float>(), .n = elements_of(x)};
  const std::array numbers{op.reads[1].as<const float>(), op.reads[2].as<const float>(), op.reads[3].as<const float>()};
  return ScratchLaunch{0, [args, pieces = std::move(pieces), numbers](const StepState& state, void*) {
                         kernels::FrozenAdam now = args;
                         now.pieces = pieces;
                         now.beta1 = *numbers[0];
                         now.correction = *numbers[1];
                         now.epsilon = *numbers[2];
                         now.step = state.applied;
                         kernels::frozen_adam(now);
                       }};
}

// ---- biases of routers

Result<ScratchLaunch> bind_update_router_bias(const BoundOp& op, const BindTools&) {
  Operands check = Operands(op).count(3, 1);
  if (check.good())
    check.type(op.reads[0], DType::f32)
        .type(op.reads[1], DType::f32)
        .same_size(op.reads[0], op.reads[1])
        .in_place(op.writes[0], op.reads[1])
        .number(op.reads[2]);
  if (!check.good()) return check.refusal();
  const kernels::UpdateRouterBias args{
      .load = op.reads[0].as<const float>(), .bias = op.writes[0].as<float>(), .experts = elements_of(op.writes[0])};
  return plain([args, rate = op.reads[2].as<const float>()] {
    kernels::UpdateRouterBias now = args;
    now.rate = *rate;
    kernels::update_router_bias(now);
  });
}

Result<ScratchLaunch> bind_fit_rows(const BoundOp& op, const BindTools&) {
  Operands check = Operands(op).count(3, 2);
  if (check.good())
    check.type(op.reads[1], DType::i32)
        .type(op.writes[0], DType::i32)
        .same_size(op.reads[1], op.writes[0])
        .number(op.reads[2], DType::i32)
        .in_place(op.writes[1], op.reads[2]);
  if (!check.good()) return check.refusal();
  const auto n = static_cast<size_t>(elements_of(op.writes[0]));
  const std::span counts(op.reads[1].as<const int32_t>(), n);
  const std::span fitted(op.writes[0].as<int32_t>(), n);
  return plain([counts, fitted, room = rows_of(*op.reads[0].type), overflow = op.writes[1].as<int32_t>()] {
    if (kernels::fit_rows(counts, room, fitted)) *overflow = 1;
  });
}

constexpr std::array kOptimizers{
    KernelBinder{"fit_rows", bind_fit_rows},       KernelBinder{"update_router_bias", bind_update_router_bias},
    KernelBinder{"outer_step", bind_outer_step},   KernelBinder{"fold_momentum", bind_fold_momentum},
    KernelBinder{"frozen_adam", bind_frozen_adam},
};

}  // namespace

std::span<const KernelBinder> optimizer_kernels() { return kOptimizers; }

}  // namespace shardlab::runtime::named
