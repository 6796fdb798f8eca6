// Named kernels of mixed precision: casts, loss scaling, clipping.
#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <vector>

#include "kernels/loss_scale.h"
#include "runtime/named_binding.h"

namespace shardlab::runtime::named {
namespace {

using kernels::MixedKernels;
using kernels::Stored;

// ---- elementwise

Result<ScratchLaunch> bind_copy(const BoundOp& op, const BindTools& tools) {
  const Operands check = Operands(op).count(1, 1);
  if (!check.good()) return check.refusal();
  const Tensor &from = op.reads[0], &to = op.writes[0];
  const Operands checked = Operands(op).same_size(from, to).floating(from).floating(to);
  if (!checked.good()) return checked.refusal();
  const kernels::MixedCopy args{stored(from), stored(to), elements_of(to)};
  return counted_launch(tools.kernels, args,
                        [](const MixedKernels& k, const kernels::MixedCopy& a, kernels::Scratch& s) { k.copy(a, s); });
}

Result<ScratchLaunch> bind_add(const BoundOp& op, const BindTools& tools) {
  Operands check = Operands(op).count(2, 1);
  if (check.good())
    check.same_size(op.writes[0], op.reads[0])
        .same_size(op.writes[0], op.reads[1])
        .floating(op.reads[0])
        .floating(op.reads[1])
        .floating(op.writes[0]);
  if (!check.good()) return check.refusal();
  const kernels::MixedAdd args{stored(op.reads[0]), stored(op.reads[1]), stored(op.writes[0]), elements_of(op.writes[0])};
  return counted_launch(tools.kernels, args,
                        [](const MixedKernels& k, const kernels::MixedAdd& a, kernels::Scratch& s) { k.add(a, s); });
}

/// A Multiply whose factor is read when it runs.
struct FactorArgs {
  kernels::Multiply multiply;
  const float* factor;
};

Result<ScratchLaunch> bind_multiply(const BoundOp& op, const BindTools& tools) {
  Operands check = Operands(op).count(2, 1);
  if (check.good()) check.number(op.reads[1]).same_size(op.writes[0], op.reads[0]).floating(op.reads[0]).floating(op.writes[0]);
  if (!check.good()) return check.refusal();
  const FactorArgs args{{stored(op.reads[0]), stored(op.writes[0]), elements_of(op.writes[0])}, op.reads[1].as<const float>()};
  return counted_launch(
      tools.kernels, args, [](const MixedKernels& k, const FactorArgs& a, kernels::Scratch& s) { multiply(k, a.multiply, s); },
      [](FactorArgs& a, const StepState&) { a.multiply.factor = *a.factor; });
}

/// Rows of an operand with the logical element that each begins with.
struct RoundingArgs {
  Stored from, to;
  int64_t width;
  std::vector<uint64_t> elements;
  RandomKey key;
};

void round_rows(const MixedKernels& k, const RoundingArgs& a, kernels::Scratch& scratch) {
  constexpr int64_t kBlock = 4096;
  auto* block = scratch.take<float>(std::min(a.width, kBlock));
  if (scratch.counting()) return;
  for (size_t r = 0; r < a.elements.size(); ++r)
    for (int64_t column = 0; column < a.width; column += kBlock) {
      const int64_t first = static_cast<int64_t>(r) * a.width + column, n = std::min(kBlock, a.width - column);
      k.storage().widen({static_cast<const char*>(a.from.data) + bytes_of(a.from.dtype, first), a.from.dtype, n, block});
      k.storage().narrow_stochastic({block, n, a.to.dtype, static_cast<char*>(a.to.data) + bytes_of(a.to.dtype, first), a.key,
                                     a.elements[r] + static_cast<uint64_t>(column)});
    }
}

/// Row-major logical index of the first element of each row that a rank holds.
std::vector<uint64_t> logical_rows(const BoundOp& op, const Type& type) {
  const Shape whole = logical_shape(type, op.mesh()), origin = logical_origin(type, op.mesh(), op.at);
  const int64_t rows = type.shape.elements() / type.shape.last();
  std::vector<uint64_t> elements;
  for (int64_t row = 0; row < rows; ++row) {
    int64_t rest = row, element = origin[type.shape.rank - 1], stride = whole.last();
    for (int dim = type.shape.rank - 2; dim >= 0; --dim) {
      element += (origin[dim] + rest % type.shape[dim]) * stride;
      rest /= type.shape[dim];
      stride *= whole[dim];
    }
    elements.push_back(static_cast<uint64_t>(element));
  }
  return elements;
}

Result<ScratchLaunch> bind_cast_stochastic(const BoundOp& op, const BindTools& tools) {
  Operands check = Operands(op).count(1, 1);
  if (check.good())
    check.same_size(op.reads[0], op.writes[0])
        .floating(op.reads[0])
        .floating(op.writes[0])
        .that(op.writes[0].type->dtype != DType::f32, "rounds to f32, which needs no rounding");
  if (!check.good()) return check.refusal();
  const RoundingArgs args{stored(op.reads[0]), stored(op.writes[0]), op.writes[0].shape().last(),
                          logical_rows(op, *op.writes[0].type), key_of(op, RandomUse::kRounding)};
  return counted_launch(tools.kernels, args, round_rows,
                        [](RoundingArgs& a, const StepState& state) { a.key.step = static_cast<uint32_t>(state.step); });
}

// ---- infinities and the loss scale

struct AmaxArgs {
  std::vector<std::pair<Stored, int64_t>> parts;
  float* amax = nullptr;
  int32_t* bad = nullptr;
  int32_t* where = nullptr;  ///< the first part that is none, counted from 1, or 0
};

/// The largest size over all parts: itself, or whether it is none. One block of scratch serves all.
void find_amax(const MixedKernels& k, const AmaxArgs& a, kernels::Scratch& scratch) {
  float most = 0;
  int64_t block = 0;
  int32_t number = 0, first = 0;
  for (const auto& [x, n] : a.parts) {
    ++number;
    float here = 0;
    kernels::Scratch shared = scratch;
    kernels::amax(k, {x, n, &here}, shared);
    block = std::max(block, shared.used() - scratch.used());
    if (first == 0 && !std::isfinite(here)) first = number;
    if (std::isnan(here) || here > most) most = here;
    if (std::isnan(most)) break;
  }
  if (scratch.counting()) {
    scratch.take_bytes(block);
    return;
  }
  if (a.amax != nullptr) *a.amax = most;
  if (a.bad != nullptr) *a.bad = std::isfinite(most) ? 0 : 1;
  if (a.where != nullptr) *a.where = first;
}

Result<ScratchLaunch> bind_amax_of(const BoundOp& op, const BindTools& tools, DType result) {
  const bool tells_where = result == DType::i32 && op.writes.size() == 2;
  Operands check =
      Operands(op).that(!op.reads.empty() && (op.writes.size() == 1 || tells_where), "takes one read or more and one write");
  if (check.good()) check.number(op.writes[0], result);
  if (check.good() && tells_where) check.number(op.writes[1], result);
  for (const Tensor& t : op.reads) check.floating(t);
  if (!check.good()) return check.refusal();
  AmaxArgs args;
  for (const Tensor& t : op.reads) args.parts.emplace_back(stored(t), elements_of(t));
  (result == DType::f32 ? static_cast<void>(args.amax = op.writes[0].as<float>())
                        : static_cast<void>(args.bad = op.writes[0].as<int32_t>()));
  if (tells_where) args.where = op.writes[1].as<int32_t>();
  return counted_launch(tools.kernels, args, find_amax);
}
Result<ScratchLaunch> bind_amax(const BoundOp& op, const BindTools& tools) { return bind_amax_of(op, tools, DType::f32); }
Result<ScratchLaunch> bind_found_inf(const BoundOp& op, const BindTools& tools) { return bind_amax_of(op, tools, DType::i32); }

struct UnscaleArgs {
  kernels::Multiply multiply;
  const float* scale;
  AmaxArgs result;
};

Result<ScratchLaunch> bind_unscale(const BoundOp& op, const BindTools& tools) {
  Operands check = Operands(op).count(2, 2);
  if (check.good())
    check.number(op.reads[1])
        .number(op.writes[1], DType::i32)
        .same_size(op.reads[0], op.writes[0])
        .floating(op.reads[0])
        .floating(op.writes[0]);
  if (!check.good()) return check.refusal();
  const Stored to = stored(op.writes[0]);
  const int64_t n = elements_of(op.writes[0]);
  const UnscaleArgs args{
      {stored(op.reads[0]), to, n}, op.reads[1].as<const float>(), {{{to, n}}, nullptr, op.writes[1].as<int32_t>(), nullptr}};
  return counted_launch(
      tools.kernels, args,
      [](const MixedKernels& k, const UnscaleArgs& a, kernels::Scratch& s) {
        multiply(k, a.multiply, s);
        find_amax(k, a.result, s);
      },
      [](UnscaleArgs& a, const StepState&) { a.multiply.factor = 1.0f / *a.scale; });
}

Result<ScratchLaunch> bind_any(const BoundOp& op, const BindTools&) {
  Operands check = Operands(op).that(!op.reads.empty() && op.writes.size() == 1, "takes one read or more and one write");
  if (check.good()) check.number(op.writes[0], DType::i32);
  for (const Tensor& t : op.reads)
    if (check.good()) check.number(t, DType::i32);
  if (!check.good()) return check.refusal();
  std::vector<const int32_t*> flags;
  for (const Tensor& t : op.reads) flags.push_back(t.as<const int32_t>());
  return plain([flags, to = op.writes[0].as<int32_t>()] {
    *to = std::ranges::any_of(flags, [](const int32_t* flag) { return *flag != 0; }) ? 1 : 0;
  });
}

Result<ScratchLaunch> bind_not(const BoundOp& op, const BindTools&) {
  Operands check = Operands(op).count(1, 1);
  if (check.good()) check.number(op.reads[0], DType::i32).number(op.writes[0], DType::i32);
  if (!check.good()) return check.refusal();
  return plain([from = op.reads[0].as<const int32_t>(), to = op.writes[0].as<int32_t>()] { *to = *from == 0 ? 1 : 0; });
}

Result<ScratchLaunch> bind_adjust_scale(const BoundOp& op, const BindTools&) {
  const size_t reads = op.reads.size();
  Operands check = Operands(op).that(reads >= 2 && reads <= 4 && op.writes.size() == (reads == 2 ? 1 : 2),
                                     "takes (bad, scale) -> (scale), or (bad, scale, good[, interval]) -> (scale, good)");
  if (check.good()) check.number(op.reads[0], DType::i32).number(op.reads[1]).in_place(op.writes[0], op.reads[1]);
  if (check.good() && reads > 2) check.number(op.reads[2], DType::i32).in_place(op.writes[1], op.reads[2]);
  if (check.good() && reads > 3) check.number(op.reads[3]);
  if (!check.good()) return check.refusal();
  auto* scale = op.writes[0].as<float>();
  auto* good = reads > 2 ? op.writes[1].as<int32_t>() : nullptr;
  const auto* interval = reads > 3 ? op.reads[3].as<const float>() : nullptr;
  return plain([bad = op.reads[0].as<const int32_t>(), scale, good, interval] {
    kernels::LossScaleRule rule;
    if (interval != nullptr) rule.interval = static_cast<int64_t>(*interval);
    if (good == nullptr) rule.growth = 1;  // without a count of good steps it only backs off
    const auto next = kernels::next_loss_scale(rule, {*scale, good == nullptr ? 0 : *good}, *bad != 0);
    *scale = next.scale;
    if (good != nullptr) *good = next.good_steps;
  });
}

Result<ScratchLaunch> bind_start_scale(const BoundOp& op, const BindTools&) {
  Operands check = Operands(op).count(2, 1);
  if (check.good()) check.number(op.reads[0]).number(op.reads[1]).in_place(op.writes[0], op.reads[0]);
  if (!check.good()) return check.refusal();
  return plain([scale = op.writes[0].as<float>(), first = op.reads[1].as<const float>()] {
    if (*scale == 0) *scale = *first;  // persistent state begins at 0, which no scale is
  });
}

Result<ScratchLaunch> bind_clip_factor(const BoundOp& op, const BindTools&) {
  Operands check = Operands(op).count(2, 1);
  if (check.good()) check.number(op.reads[0], DType::f64).number(op.reads[1]).number(op.writes[0]);
  if (!check.good()) return check.refusal();
  return plain([norm2 = op.reads[0].as<const double>(), most = op.reads[1].as<const float>(), factor = op.writes[0].as<float>()] {
    *factor = kernels::clip_factor(*norm2, *most);
  });
}

Result<ScratchLaunch> bind_not_one(const BoundOp& op, const BindTools&) {
  Operands check = Operands(op).count(1, 1);
  if (check.good()) check.number(op.reads[0]).number(op.writes[0], DType::i32);
  if (!check.good()) return check.refusal();
  return plain([factor = op.reads[0].as<const float>(), to = op.writes[0].as<int32_t>()] { *to = *factor == 1.0f ? 0 : 1; });
}

Result<ScratchLaunch> bind_unscale_factor(const BoundOp& op, const BindTools&) {
  Operands check = Operands(op).count(1, 1);
  if (check.good()) check.number(op.reads[0]).number(op.writes[0]);
  if (!check.good()) return check.refusal();
  return plain([scale = op.reads[0].as<const float>(), factor = op.writes[0].as<float>()] { *factor = 1.0f / *scale; });
}

Result<ScratchLaunch> bind_unscale_norm(const BoundOp& op, const BindTools&) {
  Operands check = Operands(op).count(2, 1);
  if (check.good()) check.number(op.reads[0], DType::f64).number(op.reads[1]).number(op.writes[0], DType::f64);
  if (!check.good()) return check.refusal();
  return plain([norm2 = op.reads[0].as<const double>(), factor = op.reads[1].as<const float>(), to = op.writes[0].as<double>()] {
    *to = *norm2 * (static_cast<double>(*factor) * static_cast<double>(*factor));
  });
}

/// A loss, f32, or a norm by its square, f64.
std::function<double()> level_of(const Tensor& t) {
  if (t.type->dtype == DType::f64) return [x = t.as<const double>()] { return std::sqrt(*x); };
  return [x = t.as<const float>()] { return static_cast<double>(*x); };
}

Operands& level(Operands& check, const Tensor& t) { return check.number(t, t.type->dtype == DType::f64 ? DType::f64 : DType::f32); }

Result<ScratchLaunch> bind_judge_spike(const BoundOp& op, const BindTools&) {
  Operands check = Operands(op).count(5, 1);
  if (check.good())
    level(check, op.reads[0])
        .number(op.reads[1])
        .number(op.reads[2], DType::i32)
        .number(op.reads[3])
        .number(op.reads[4])
        .number(op.writes[0], DType::i32);
  if (!check.good()) return check.refusal();
  return plain([x = level_of(op.reads[0]), mean = op.reads[1].as<const float>(), seen = op.reads[2].as<const int32_t>(),
                factor = op.reads[3].as<const float>(), window = op.reads[4].as<const float>(), bad = op.writes[0].as<int32_t>()] {
    const bool judged = static_cast<float>(*seen) >= *window;
    *bad = judged && !(x() <= static_cast<double>(*factor) * static_cast<double>(*mean)) ? 1 : 0;
  });
}

Result<ScratchLaunch> bind_running_mean(const BoundOp& op, const BindTools&) {
  Operands check = Operands(op).count(4, 2);
  if (check.good())
    level(check, op.reads[0])
        .number(op.reads[1])
        .number(op.reads[2])
        .number(op.reads[3], DType::i32)
        .in_place(op.writes[0], op.reads[2])
        .in_place(op.writes[1], op.reads[3]);
  if (!check.good()) return check.refusal();
  return plain([x = level_of(op.reads[0]), window = op.reads[1].as<const float>(), mean = op.writes[0].as<float>(),
                seen = op.writes[1].as<int32_t>()] {
    *seen = std::min(*seen + 1, static_cast<int32_t>(*window));
    *mean += static_cast<float>((x() - static_cast<double>(*mean)) / static_cast<double>(*seen));
  });
}

Result<ScratchLaunch> bind_count(const BoundOp& op, const BindTools&) {
  Operands check = Operands(op).count(1, 1);
  if (check.good()) check.number(op.reads[0], DType::i32).in_place(op.writes[0], op.reads[0]);
  if (!check.good()) return check.refusal();
  return plain([n = op.writes[0].as<int32_t>()] { ++*n; });
}

constexpr std::array kPrecision{
    KernelBinder{"copy", bind_copy},
    KernelBinder{"add", bind_add},
    KernelBinder{"multiply", bind_multiply},
    KernelBinder{"cast_stochastic", bind_cast_stochastic},
    KernelBinder{"amax", bind_amax},
    KernelBinder{"found_inf", bind_found_inf},
    KernelBinder{"unscale", bind_unscale},
    KernelBinder{"any", bind_any},
    KernelBinder{"not", bind_not},
    KernelBinder{"start_scale", bind_start_scale},
    KernelBinder{"adjust_scale", bind_adjust_scale},
    KernelBinder{"unscale_factor", bind_unscale_factor},
    KernelBinder{"unscale_norm", bind_unscale_norm},
    KernelBinder{"judge_spike", bind_judge_spike},
    KernelBinder{"running_mean", bind_running_mean},
    KernelBinder{"count", bind_count},
    KernelBinder{"clip_factor", bind_clip_factor},
    KernelBinder{"not_one", bind_not_one},
};

}  // namespace

std::span<const KernelBinder> precision_kernels() { return kPrecision; }

}  // namespace shardlab::runtime::named
