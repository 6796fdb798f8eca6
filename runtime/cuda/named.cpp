#include "runtime/cuda/named.h"

#include <algorithm>
#include <array>
#include <memory>

#include "runtime/named_binding.h"
#include "runtime/operands.h"

namespace shardlab::runtime::cuda {

namespace {

using gpu::Input;
using gpu::Output;
using named::elements_of;
using named::key_of;
using named::Matrix;
using named::matrix_of;
using named::share_of;

const float* number(const Tensor& t) { return t.as<const float>(); }

/// Checks of operands, with the types that GPUs compute on.
class Operands : public named::Operands {
 public:
  using named::Operands::Operands;
  Operands& computable(const Tensor& t) {
    that(gpu::is_activation_type(t.type->dtype),
         fmt::format("has an operand of {} where a GPU takes f32, bf16 or f16", name_of(t.type->dtype)));
    return *this;
  }
  Operands& computable(const std::vector<Tensor>& all) {
    for (const Tensor& t : all) computable(t);
    return *this;
  }
};

/// A launch of one of the table's kernels with arguments that stay.
template <class Args>
Enqueue launch(void (*kernel)(const Args&, gpu::Stream), const Args& args) {
  return [kernel, args](const StepState&, gpu::Stream s) { kernel(args, s); };
}

// ---- numbers

using Rule = gpu::Numbers::Rule;

Enqueue launch_numbers(const NamedTools& tools, Rule rule, const std::vector<const void*>& in, const std::vector<void*>& out,
                       bool wide = false) {
  gpu::Numbers args{.rule = rule, .count = static_cast<int>(in.size()), .wide = wide};
  std::ranges::copy(in, args.in.begin());
  std::ranges::copy(out, args.out.begin());
  return launch(tools.kernels.numbers, args);
}

Result<Enqueue> bind_any(const BoundOp& op, const NamedTools& tools) {
  Operands check(op);
  check.that(!op.reads.empty() && op.reads.size() <= gpu::Numbers::kMost && op.writes.size() == 1,
             "takes 1 to 32 reads and one write");
  if (check.good()) check.number(op.writes[0], DType::i32);
  std::vector<const void*> flags;
  for (const Tensor& t : op.reads) {
    check.number(t, DType::i32);
    flags.push_back(t.data);
  }
  if (!check.good()) return check.refusal();
  return launch_numbers(tools, Rule::kAny, flags, {op.writes[0].data});
}

Result<Enqueue> bind_not(const BoundOp& op, const NamedTools& tools) {
  Operands check(op);
  if (check.count(1, 1).good()) check.number(op.reads[0], DType::i32).number(op.writes[0], DType::i32);
  if (!check.good()) return check.refusal();
  return launch_numbers(tools, Rule::kNot, {op.reads[0].data}, {op.writes[0].data});
}

Result<Enqueue> bind_count(const BoundOp& op, const NamedTools& tools) {
  Operands check(op);
  if (check.count(1, 1).good()) check.number(op.reads[0], DType::i32).in_place(op.writes[0], op.reads[0]);
  if (!check.good()) return check.refusal();
  return launch_numbers(tools, Rule::kCount, {}, {op.writes[0].data});
}

Result<Enqueue> bind_start_scale(const BoundOp& op, const NamedTools& tools) {
  Operands check(op);
  if (check.count(2, 1).good()) check.number(op.reads[0]).number(op.reads[1]).in_place(op.writes[0], op.reads[0]);
  if (!check.good()) return check.refusal();
  return launch_numbers(tools, Rule::kStartScale, {op.reads[1].data}, {op.writes[0].data});
}

Result<Enqueue> bind_adjust_scale(const BoundOp& op, const NamedTools& tools) {
  const size_t reads = op.reads.size();
  Operands check(op);
  check.that(reads >= 2 && reads <= 4 && op.writes.size() == (reads == 2 ? 1 : 2),
             "takes (bad, scale) -> (scale), or (bad, scale, good[, interval]) -> (scale, good)");
  if (check.good()) check.number(op.reads[0], DType::i32).number(op.reads[1]).in_place(op.writes[0], op.reads[1]);
  if (check.good() && reads > 2) check.number(op.reads[2], DType::i32).in_place(op.writes[1], op.reads[2]);
  if (check.good() && reads > 3) check.number(op.reads[3]);
  if (!check.good()) return check.refusal();
  std::vector<const void*> in{op.reads[0].data};
  if (reads > 3) in.push_back(op.reads[3].data);
  std::vector<void*> out{op.writes[0].data};
  if (reads > 2) out.push_back(op.writes[1].data);
  return launch_numbers(tools, Rule::kAdjustScale, in, out);
}

Result<Enqueue> bind_unscale_factor(const BoundOp& op, const NamedTools& tools) {
  Operands check(op);
  if (check.count(1, 1).good()) check.number(op.reads[0]).number(op.writes[0]);
  if (!check.good()) return check.refusal();
  return launch_numbers(tools, Rule::kUnscaleFactor, {op.reads[0].data}, {op.writes[0].data});
}

Result<Enqueue> bind_unscale_norm(const BoundOp& op, const NamedTools& tools) {
  Operands check(op);
  if (check.count(2, 1).good()) check.number(op.reads[0], DType::f64).number(op.reads[1]).number(op.writes[0], DType::f64);
  if (!check.good()) return check.refusal();
  return launch_numbers(tools, Rule::kUnscaleNorm, {op.reads[0].data, op.reads[1].data}, {op.writes[0].data});
}

Result<Enqueue> bind_clip_factor(const BoundOp& op, const NamedTools& tools) {
  Operands check(op);
  if (check.count(2, 1).good()) check.number(op.reads[0], DType::f64).number(op.reads[1]).number(op.writes[0]);
  if (!check.good()) return check.refusal();
  return launch_numbers(tools, Rule::kClipFactor, {op.reads[0].data, op.reads[1].data}, {op.writes[0].data});
}

Result<Enqueue> bind_not_one(const BoundOp& op, const NamedTools& tools) {
  Operands check(op);
  if (check.count(1, 1).good()) check.number(op.reads[0]).number(op.writes[0], DType::i32);
  if (!check.good()) return check.refusal();
  return launch_numbers(tools, Rule::kNotOne, {op.reads[0].data}, {op.writes[0].data});
}

/// A loss, f32, or a norm by its square, f64.
bool is_wide(const Tensor& level) { return level.type->dtype == DType::f64; }

Result<Enqueue> bind_judge_spike(const BoundOp& op, const NamedTools& tools) {
  Operands check(op);
  if (check.count(5, 1).good())
    check.number(op.reads[0], is_wide(op.reads[0]) ? DType::f64 : DType::f32)
        .number(op.reads[1])
        .number(op.reads[2], DType::i32)
        .number(op.reads[3])
        .number(op.reads[4])
        .number(op.writes[0], DType::i32);
  if (!check.good()) return check.refusal();
  std::vector<const void*> in;
  for (const Tensor& t : op.reads) in.push_back(t.data);
  return launch_numbers(tools, Rule::kJudgeSpike, in, {op.writes[0].data}, is_wide(op.reads[0]));
}

Result<Enqueue> bind_running_mean(const BoundOp& op, const NamedTools& tools) {
  Operands check(op);
  if (check.count(4, 2).good())
    check.number(op.reads[0], is_wide(op.reads[0]) ? DType::f64 : DType::f32)
        .number(op.reads[1])
        .number(op.reads[2])
        .number(op.reads[3], DType::i32)
        .in_place(op.writes[0], op.reads[2])
        .in_place(op.writes[1], op.reads[3]);
  if (!check.good()) return check.refusal();
  return launch_numbers(tools, Rule::kRunningMean, {op.reads[0].data, op.reads[1].data}, {op.writes[0].data, op.writes[1].data},
                        is_wide(op.reads[0]));
}

// ---- the largest size

/// Arrays of one launch, kept by the launch that lends them.
struct Parts {
  std::vector<Input> arrays;
  std::vector<int64_t> sizes;
};

Result<Enqueue> bind_amax_of(const BoundOp& op, const NamedTools& tools, DType result) {
  const bool tells_where = result == DType::i32 && op.writes.size() == 2;
  Operands check(op);
  check.that(!op.reads.empty() && (op.writes.size() == 1 || tells_where), "takes one read or more and one write");
  if (check.good()) check.number(op.writes[0], result);
  if (check.good() && tells_where) check.number(op.writes[1], result);
  check.computable(op.reads);
  if (!check.good()) return check.refusal();
  auto parts = std::make_shared<Parts>();
  for (const Tensor& t : op.reads) {
    parts->arrays.push_back(input(t));
    parts->sizes.push_back(elements_of(t));
  }
  gpu::Amax args{.parts = parts->arrays.data(),
                 .sizes = parts->sizes.data(),
                 .count = static_cast<int>(parts->arrays.size()),
                 .scratch = tools.scratch};
  if (result == DType::f32)
    args.amax = op.writes[0].as<float>();
  else
    args.bad = op.writes[0].as<int32_t>();
  if (tells_where) args.where = op.writes[1].as<int32_t>();
  return Enqueue([kernel = tools.kernels.amax, args, parts](const StepState&, gpu::Stream s) { kernel(args, s); });
}
Result<Enqueue> bind_amax(const BoundOp& op, const NamedTools& tools) { return bind_amax_of(op, tools, DType::f32); }
Result<Enqueue> bind_found_inf(const BoundOp& op, const NamedTools& tools) { return bind_amax_of(op, tools, DType::i32); }

// ---- one pass

Result<Enqueue> bind_copy(const BoundOp& op, const NamedTools& tools) {
  Operands check(op);
  if (check.count(1, 1).good()) check.computable(op.reads).computable(op.writes).same_size(op.reads[0], op.writes[0]);
  if (!check.good()) return check.refusal();
  return launch(tools.kernels.cast, gpu::Cast{input(op.reads[0]), output(op.writes[0]), elements_of(op.writes[0])});
}

Result<Enqueue> bind_add(const BoundOp& op, const NamedTools& tools) {
  Operands check(op);
  if (check.count(2, 1).good())
    check.computable(op.reads).computable(op.writes).same_size(op.writes[0], op.reads[0]).same_size(op.writes[0], op.reads[1]);
  if (!check.good()) return check.refusal();
  return launch(tools.kernels.add,
                gpu::Add{input(op.reads[0]), input(op.reads[1]), output(op.writes[0]), elements_of(op.writes[0])});
}

Result<Enqueue> bind_multiply(const BoundOp& op, const NamedTools& tools) {
  Operands check(op);
  if (check.count(2, 1).good())
    check.computable(op.reads).computable(op.writes).number(op.reads[1]).same_size(op.writes[0], op.reads[0]);
  if (!check.good()) return check.refusal();
  return launch(tools.kernels.multiply,
                gpu::Multiply{input(op.reads[0]), number(op.reads[1]), output(op.writes[0]), elements_of(op.writes[0])});
}

Result<Enqueue> bind_subtract_of(const BoundOp& op, const NamedTools& tools, bool shared) {
  Operands check(op);
  if (check.count(2, 1).good())
    check.computable(op.reads).computable(op.writes).same_size(op.writes[0], op.reads[0]).same_size(op.writes[0], op.reads[1]);
  if (!check.good()) return check.refusal();
  return launch(tools.kernels.subtract,
                gpu::Subtract{input(op.reads[0]), input(op.reads[1]), output(op.writes[0]), elements_of(op.writes[0]),
                              shared ? share_of(op, op.reads[0], op.reads[1]) : 1});
}
Result<Enqueue> bind_subtract(const BoundOp& op, const NamedTools& tools) { return bind_subtract_of(op, tools, false); }
Result<Enqueue> bind_subtract_share(const BoundOp& op, const NamedTools& tools) { return bind_subtract_of(op, tools, true); }

// ---- codes with block scales

DType code_type(int bits) { return bits == 8 ? DType::i8 : DType::u8; }

/// A row of codes for each row of values, and a row of scales.
gpu::BlockShape block_shape(const Tensor& scales, int64_t rows, int64_t columns, int bits) {
  return {rows, columns, scales.shape().last(), bits};
}
void check_codes(Operands& check, const Tensor& values, const Tensor& codes, const Tensor& scales, const gpu::BlockShape& shape) {
  check.computable(values)
      .type(codes, code_type(shape.bits))
      .elements(codes, shape.rows * shape.row_bytes())
      .type(scales, DType::f32)
      .elements(scales, shape.rows * shape.blocks);
}

template <int kBits>
Result<Enqueue> bind_quantise(const BoundOp& op, const NamedTools& tools) {
  Operands check(op);
  if (!check.count(1, 2).good()) return check.refusal();
  const Tensor &x = op.reads[0], &codes = op.writes[0], &scales = op.writes[1];
  const Matrix m = matrix_of(x);
  const gpu::BlockShape shape = block_shape(scales, m.rows, m.columns, kBits);
  check_codes(check, x, codes, scales, shape);
  if (!check.good()) return check.refusal();
  return launch(tools.kernels.quantise, gpu::Quantise{shape, input(x), codes.data, scales.as<float>()});
}

template <int kBits>
Result<Enqueue> bind_dequantise(const BoundOp& op, const NamedTools& tools) {
  Operands check(op);
  if (!check.count(2, 1).good()) return check.refusal();
  const Tensor &codes = op.reads[0], &scales = op.reads[1], &y = op.writes[0];
  const Matrix m = matrix_of(y);
  const gpu::BlockShape shape = block_shape(scales, m.rows, m.columns, kBits);
  check_codes(check, y, codes, scales, shape);
  if (!check.good()) return check.refusal();
  return launch(tools.kernels.dequantise, gpu::Dequantise{shape, codes.data, number(scales), output(y)});
}

template <int kBits>
Result<Enqueue> bind_dequantise_sum(const BoundOp& op, const NamedTools& tools) {
  Operands check(op);
  if (!check.count(2, 1).good()) return check.refusal();
  const Tensor &codes = op.reads[0], &scales = op.reads[1], &y = op.writes[0];
  const gpu::BlockShape shape = block_shape(scales, matrix_of(scales).rows, elements_of(y), kBits);
  check_codes(check, y, codes, scales, shape);
  if (!check.good()) return check.refusal();
  return launch(tools.kernels.dequantise_sum, gpu::DequantiseSum{shape, codes.data, number(scales), output(y)});
}

Result<Enqueue> bind_sum_rows(const BoundOp& op, const NamedTools& tools) {
  Operands check(op);
  if (!check.count(1, 1).good()) return check.refusal();
  const int64_t rows = op.reads[0].shape()[0], columns = elements_of(op.writes[0]);
  check.computable(op.reads).computable(op.writes).elements(op.reads[0], rows * columns);
  if (!check.good()) return check.refusal();
  return launch(tools.kernels.sum_rows, gpu::SumRows{input(op.reads[0]), output(op.writes[0]), rows, columns});
}

Result<Enqueue> bind_swap_leading(const BoundOp& op, const NamedTools& tools) {
  Operands check(op);
  if (!check.count(1, 1).good()) return check.refusal();
  const Tensor &x = op.reads[0], &y = op.writes[0];
  check.same_size(x, y).type(y, x.type->dtype).that(y.shape().rank >= 2 && x.data != y.data, "makes two dims, in another place");
  if (!check.good()) return check.refusal();
  const int64_t rows = y.shape()[1], columns = y.shape()[0];
  return launch(tools.kernels.swap_leading, gpu::SwapLeading{x.data, y.data, rows, columns, x.type->bytes() / (rows * columns)});
}

// ---- selections

Result<Enqueue> bind_select(const BoundOp& op, const NamedTools& tools, bool by_chance) {
  Operands check(op);
  if (check.count(1, 2).good())
    check.computable(op.reads)
        .type(op.writes[0], DType::f32)
        .type(op.writes[1], DType::i32)
        .same_size(op.writes[0], op.writes[1])
        .that(elements_of(op.writes[0]) <= elements_of(op.reads[0]), "selects more elements than there are")
        .that(elements_of(op.reads[0]) < (int64_t{1} << 31), "selects of more than 2^31 elements, which an i32 cannot number");
  if (!check.good()) return check.refusal();
  gpu::Select args{.x = input(op.reads[0]),
                   .n = elements_of(op.reads[0]),
                   .k = elements_of(op.writes[0]),
                   .by_chance = by_chance,
                   .key = key_of(op, RandomUse::kShuffle),
                   .values = op.writes[0].as<float>(),
                   .indices = op.writes[1].as<int32_t>(),
                   .scratch = tools.scratch};
  return Enqueue([kernel = tools.kernels.select, args](const StepState& state, gpu::Stream s) mutable {
    args.key.step = static_cast<uint32_t>(state.step);
    kernel(args, s);
  });
}
Result<Enqueue> bind_top_k(const BoundOp& op, const NamedTools& tools) { return bind_select(op, tools, false); }
Result<Enqueue> bind_random_k(const BoundOp& op, const NamedTools& tools) { return bind_select(op, tools, true); }

Result<Enqueue> bind_scatter(const BoundOp& op, const NamedTools& tools) {
  Operands check(op);
  if (check.count(2, 1).good())
    check.computable(op.writes).type(op.reads[0], DType::f32).type(op.reads[1], DType::i32).same_size(op.reads[0], op.reads[1]);
  if (!check.good()) return check.refusal();
  const Matrix parts = matrix_of(op.reads[0]);
  return launch(tools.kernels.scatter, gpu::Scatter{parts.rows, parts.columns, elements_of(op.writes[0]), number(op.reads[0]),
                                                    op.reads[1].as<const int32_t>(), output(op.writes[0])});
}

Result<Enqueue> bind_zero_selected(const BoundOp& op, const NamedTools& tools) {
  Operands check(op);
  if (check.count(2, 1).good())
    check.type(op.reads[0], DType::f32)
        .type(op.reads[1], DType::i32)
        .type(op.writes[0], DType::f32)
        .same_size(op.reads[0], op.writes[0]);
  if (!check.good()) return check.refusal();
  return launch(tools.kernels.zero_selected,
                gpu::ZeroSelected{number(op.reads[0]), op.writes[0].as<float>(), elements_of(op.writes[0]),
                                  op.reads[1].as<const int32_t>(), elements_of(op.reads[1])});
}

// ---- low rank

Result<Enqueue> bind_project(const BoundOp& op, const NamedTools& tools) {
  Operands check(op);
  if (!check.count(2, 1).good()) return check.refusal();
  const Matrix m = matrix_of(op.reads[0]), basis = matrix_of(op.reads[1]), p = matrix_of(op.writes[0]);
  check.computable(op.reads).computable(op.writes).type(op.reads[1], op.reads[0].type->dtype);
  check.that(m.columns == basis.columns && p.rows == m.rows && p.columns == basis.rows,
             "has shapes other than m[r,c], basis[k,c] -> p[r,k]");
  if (!check.good()) return check.refusal();
  return launch(tools.kernels.linear_forward, gpu::LinearForward{.x = input(op.reads[0]),
                                                                 .w = input(op.reads[1]),
                                                                 .y = output(op.writes[0]),
                                                                 .rows = m.rows,
                                                                 .in = m.columns,
                                                                 .out = basis.rows,
                                                                 .in_part = part_of(op, *op.reads[1].type, 1)});
}

Result<Enqueue> bind_orthogonalise(const BoundOp& op, const NamedTools& tools) {
  Operands check(op);
  if (check.count(1, 1).good())
    check.type(op.reads[0], DType::f32).type(op.writes[0], DType::f32).same_size(op.reads[0], op.writes[0]);
  if (!check.good()) return check.refusal();
  const Matrix p = matrix_of(op.reads[0]);
  return launch(tools.kernels.orthogonalise,
                gpu::Orthogonalise{p.rows, p.columns, number(op.reads[0]), op.writes[0].as<float>(), tools.scratch});
}

Result<Enqueue> bind_start_basis(const BoundOp& op, const NamedTools& tools) {
  Operands check(op);
  if (check.count(1, 1).good()) check.type(op.reads[0], DType::f32).in_place(op.writes[0], op.reads[0]);
  if (!check.good()) return check.refusal();
  const Matrix m = matrix_of(op.writes[0]);
  return launch(tools.kernels.start_basis, gpu::StartBasis{op.writes[0].as<float>(), m.rows, m.columns});
}

// ---- moments

/// Moments of parameters that lie one after another in a flat operand: fp32, and no more of them than it has elements.
void check_pieces(Operands& check, const Tensor& flat, std::span<const Tensor> moments) {
  int64_t elements = 0;
  for (const Tensor& t : moments) {
    check.type(t, DType::f32);
    elements += elements_of(t);
  }
  check.that(elements <= elements_of(flat), "has moments of more elements than it has");
}

Result<Enqueue> bind_fold_momentum(const BoundOp& op, const NamedTools& tools) {
  Operands check(op);
  check.that(op.reads.size() >= 3 && op.writes.size() == 1, "takes (gradient, beta1, m...) -> (momentum)");
  if (!check.good()) return check.refusal();
  const std::span<const Tensor> moments = std::span(op.reads).subspan(2);
  const Tensor &gradient = op.reads[0], &momentum = op.writes[0];
  check.type(gradient, DType::f32).type(momentum, DType::f32).same_size(gradient, momentum).number(op.reads[1]);
  check_pieces(check, gradient, moments);
  if (!check.good()) return check.refusal();
  std::vector<gpu::FoldMomentum> pieces;
  int64_t at = 0;
  const auto add = [&](const float* m, int64_t n) {
    if (n > 0)
      pieces.push_back(
          {number(gradient) + at, momentum.as<float>() + at, m, n, number(op.reads[1]), share_of(op, gradient, moments[0])});
    at += n;
  };
  for (const Tensor& m : moments) add(number(m), elements_of(m));
  add(nullptr, elements_of(gradient) - at);  // elements beyond have no momentum yet
  return Enqueue([kernel = tools.kernels.fold_momentum, pieces](const StepState&, gpu::Stream s) {
    for (const gpu::FoldMomentum& piece : pieces) kernel(piece, s);
  });
}

Result<Enqueue> bind_frozen_adam(const BoundOp& op, const NamedTools& tools) {
  Operands check(op);
  check.that(op.reads.size() >= 5 && op.writes.size() == op.reads.size() - 3,
             "takes (momentum, beta1, correction, epsilon, v...) -> (direction, m...)");
  if (!check.good()) return check.refusal();
  const std::span<const Tensor> second = std::span(op.reads).subspan(4), first = std::span(op.writes).subspan(1);
  const Tensor& x = op.writes[0];
  check.type(x, DType::f32).in_place(x, op.reads[0]).same_size(x, op.reads[0]);
  for (size_t i = 1; i < 4; ++i) check.number(op.reads[i]);
  check_pieces(check, x, first);
  check_pieces(check, x, second);
  for (size_t i = 0; i < first.size(); ++i) check.same_size(first[i], second[i]);
  if (!check.good()) return check.refusal();
  gpu::Numbers bias{.rule = Rule::kBiasCorrection, .count = 1};
  bias.in[0] = op.reads[1].data;
  bias.out[0] = tools.scratch.data;
  std::vector<gpu::FrozenAdam> pieces;
  int64_t at = 0;
  const auto add = [&](float* m, const float* v, int64_t n) {
    if (n > 0)
      pieces.push_back(
          {x.as<float>() + at, m, v, n, static_cast<const float*>(tools.scratch.data), number(op.reads[2]), number(op.reads[3])});
    at += n;
  };
  for (size_t i = 0; i < first.size(); ++i) add(first[i].as<float>(), number(second[i]), elements_of(first[i]));
  add(nullptr, nullptr, elements_of(x) - at);
  return Enqueue([&k = tools.kernels, bias, pieces](const StepState& state, gpu::Stream s) mutable {
    bias.step = state.applied;
    k.numbers(bias, s);
    for (const gpu::FrozenAdam& piece : pieces) k.frozen_adam(piece, s);
  });
}

Result<Enqueue> bind_outer_step(const BoundOp& op, const NamedTools& tools) {
  const bool momentum = op.reads.size() == 6;
  Operands check(op);
  check.that((op.reads.size() == 4 && op.writes.size() == 1) || (momentum && op.writes.size() == 2),
             "takes (delta, start, share, learning_rate[, momentum, velocity]) -> (value[, velocity])");
  if (check.good()) {
    for (const Tensor* t : {&op.reads[0], &op.reads[1], &op.writes[0]}) check.type(*t, DType::f32).same_size(op.reads[0], *t);
    check.number(op.reads[2]).number(op.reads[3]);
  }
  if (check.good() && momentum)
    check.number(op.reads[4]).type(op.reads[5], DType::f32).same_size(op.reads[0], op.reads[5]).in_place(op.writes[1], op.reads[5]);
  if (!check.good()) return check.refusal();
  return launch(tools.kernels.outer_step, gpu::OuterStep{.delta = number(op.reads[0]),
                                                         .start = number(op.reads[1]),
                                                         .velocity = momentum ? op.writes[1].as<float>() : nullptr,
                                                         .value = op.writes[0].as<float>(),
                                                         .n = elements_of(op.writes[0]),
                                                         .share = number(op.reads[2]),
                                                         .learning_rate = number(op.reads[3]),
                                                         .momentum = momentum ? number(op.reads[4]) : nullptr});
}

Result<Enqueue> bind_update_router_bias(const BoundOp& op, const NamedTools& tools) {
  Operands check(op);
  if (check.count(3, 1).good())
    check.type(op.reads[0], DType::f32)
        .type(op.reads[1], DType::f32)
        .same_size(op.reads[0], op.reads[1])
        .in_place(op.writes[0], op.reads[1])
        .number(op.reads[2]);
  if (!check.good()) return check.refusal();
  return launch(tools.kernels.update_router_bias, gpu::UpdateRouterBias{op.reads[0].as<const float>(), op.writes[0].as<float>(),
                                                                        number(op.reads[2]), elements_of(op.writes[0])});
}

Result<Enqueue> bind_fit_rows(const BoundOp& op, const NamedTools& tools) {
  Operands check(op);
  if (check.count(3, 2).good())
    check.type(op.reads[1], DType::i32)
        .type(op.writes[0], DType::i32)
        .same_size(op.reads[1], op.writes[0])
        .number(op.reads[2], DType::i32)
        .in_place(op.writes[1], op.reads[2]);
  if (!check.good()) return check.refusal();
  return launch(tools.kernels.fit_rows, gpu::FitRows{.counts = op.reads[1].as<const int32_t>(),
                                                     .fitted = op.writes[0].as<int32_t>(),
                                                     .overflow = op.writes[1].as<int32_t>(),
                                                     .n = elements_of(op.writes[0]),
                                                     .room = rows_of(*op.reads[0].type)});
}

struct Binder {
  std::string_view name;
  Result<Enqueue> (*bind)(const BoundOp& op, const NamedTools& tools);
};

constexpr std::array kTable{
    Binder{"copy", bind_copy},
    Binder{"add", bind_add},
    Binder{"multiply", bind_multiply},
    Binder{"amax", bind_amax},
    Binder{"found_inf", bind_found_inf},
    Binder{"any", bind_any},
    Binder{"not", bind_not},
    Binder{"start_scale", bind_start_scale},
    Binder{"adjust_scale", bind_adjust_scale},
    Binder{"unscale_factor", bind_unscale_factor},
    Binder{"unscale_norm", bind_unscale_norm},
    Binder{"judge_spike", bind_judge_spike},
    Binder{"running_mean", bind_running_mean},
    Binder{"count", bind_count},
    Binder{"clip_factor", bind_clip_factor},
    Binder{"not_one", bind_not_one},
    Binder{"outer_step", bind_outer_step},
    Binder{"subtract", bind_subtract},
    Binder{"update_router_bias", bind_update_router_bias},
    Binder{"fit_rows", bind_fit_rows},
    Binder{"subtract_share", bind_subtract_share},
    Binder{"project", bind_project},
    Binder{"orthogonalise", bind_orthogonalise},
    Binder{"start_basis", bind_start_basis},
    Binder{"quantise_int8", bind_quantise<8>},
    Binder{"quantise_int4", bind_quantise<4>},
    Binder{"dequantise_int8", bind_dequantise<8>},
    Binder{"dequantise_int4", bind_dequantise<4>},
    Binder{"dequantise_sum_int8", bind_dequantise_sum<8>},
    Binder{"dequantise_sum_int4", bind_dequantise_sum<4>},
    Binder{"swap_leading", bind_swap_leading},
    Binder{"sum_rows", bind_sum_rows},
    Binder{"top_k", bind_top_k},
    Binder{"random_k", bind_random_k},
    Binder{"scatter", bind_scatter},
    Binder{"zero_selected", bind_zero_selected},
    Binder{"sign_compress", bind_quantise<1>},
    Binder{"sign_expand", bind_dequantise<1>},
    Binder{"sign_expand_sum", bind_dequantise_sum<1>},
    Binder{"fold_momentum", bind_fold_momentum},
    Binder{"frozen_adam", bind_frozen_adam},
};

}  // namespace

Result<Enqueue> bind_named(const BoundOp& op, const Kernel& kernel, const NamedTools& tools) {
  const auto found = std::ranges::find(kTable, kernel.name, &Binder::name);
  if (found == kTable.end())
    return Error{ExitCode::kUsage,
                 fmt::format("`{}` asks for the kernel `{}`, which the CUDA back end lacks", describe(*op.plan, *op.instruction),
                             kernel.name),
                 "predict the plan with mode: simulate, or leave the strategy out that adds it", ""};
  return found->bind(op, tools);
}

std::vector<std::string_view> named_on_device() {
  std::vector<std::string_view> names;
  for (const Binder& b : kTable) names.push_back(b.name);
  return names;
}

}  // namespace shardlab::runtime::cuda
