// Named kernels of fp8: scales, quantisation, and products of quantised factors.
#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>
#include <optional>

#include "kernels/fp8.h"
#include "kernels/quantise.h"
#include "runtime/named_binding.h"

namespace shardlab::runtime::named {
namespace {

using kernels::MixedKernels;
using kernels::Stored;

template <DType kTarget>
Result<ScratchLaunch> bind_fp8_scale(const BoundOp& op, const BindTools&) {
  Operands check = Operands(op).count(1, 1);
  if (check.good()) check.number(op.reads[0]).number(op.writes[0]);
  if (!check.good()) return check.refusal();
  return plain(
      [amax = op.reads[0].as<const float>(), scale = op.writes[0].as<float>()] { *scale = kernels::fp8_scale(*amax, kTarget); });
}

template <DType kTarget>
Result<ScratchLaunch> bind_fp8_delayed(const BoundOp& op, const BindTools&) {
  Operands check = Operands(op).count(2, 2);
  if (check.good())
    check.number(op.reads[0])
        .type(op.reads[1], DType::f32)
        .in_place(op.writes[0], op.reads[1])
        .same_size(op.reads[1], op.writes[0])
        .number(op.writes[1]);
  if (!check.good()) return check.refusal();
  return plain([amax = op.reads[0].as<const float>(), history = op.writes[0].as<float>(), n = elements_of(op.writes[0]),
                scale = op.writes[1].as<float>()] {
    *scale = kernels::fp8_delayed_scale({history, n, *amax, kTarget});
  });
}

/// A scale for each row of a history; the row's own largest size is of the steps that it remembers.
template <DType kTarget>
Result<ScratchLaunch> bind_fp8_scales(const BoundOp& op, const BindTools&) {
  Operands check = Operands(op).count(1, 1);
  if (check.good())
    check.type(op.reads[0], DType::f32).type(op.writes[0], DType::f32).elements(op.writes[0], matrix_of(op.reads[0]).rows);
  if (!check.good()) return check.refusal();
  return plain([history = op.reads[0].as<const float>(), scales = op.writes[0].as<float>(), m = matrix_of(op.reads[0])] {
    for (int64_t row = 0; row < m.rows; ++row) {
      const float* sizes = history + row * m.columns;
      scales[row] = kernels::fp8_scale(*std::max_element(sizes, sizes + m.columns), kTarget);
    }
  });
}

Result<ScratchLaunch> bind_fp8_remember(const BoundOp& op, const BindTools&) {
  Operands check = Operands(op).count(2, 1);
  if (check.good())
    check.type(op.reads[0], DType::f32)
        .type(op.reads[1], DType::f32)
        .elements(op.reads[0], matrix_of(op.reads[1]).rows)
        .in_place(op.writes[0], op.reads[1])
        .same_size(op.reads[1], op.writes[0]);
  if (!check.good()) return check.refusal();
  return plain([amax = op.reads[0].as<const float>(), history = op.writes[0].as<float>(), m = matrix_of(op.reads[1])] {
    for (int64_t row = 0; row < m.rows; ++row) {
      float* sizes = history + row * m.columns;
      std::copy_backward(sizes, sizes + m.columns - 1, sizes + m.columns);
      sizes[0] = std::isfinite(amax[row]) ? amax[row] : 0.0f;  // what overflowed says nothing of the next step
    }
  });
}

bool is_fp8(const Tensor& t) { return t.type->dtype == DType::f8e4m3 || t.type->dtype == DType::f8e5m2; }

/// The blocks that a matrix and its scales mean: one scale, a scale each 128 of a row, or one each 128 x 128.
std::optional<kernels::Fp8Blocks> blocks_of(const Tensor& x, const Tensor& scales) {
  const Matrix m = matrix_of(x), s = matrix_of(scales);
  if (elements_of(scales) == 1) return kernels::fp8_tensor(m.rows, m.columns);
  for (const auto& blocks : {kernels::fp8_rows(m.rows, m.columns), kernels::fp8_squares(m.rows, m.columns)})
    if (s.rows == blocks.down() && s.columns == blocks.across()) return blocks;
  return std::nullopt;
}

constexpr std::string_view kScales = "has scales that are neither one, nor one each 128 of a row, nor one each 128 x 128";

Result<ScratchLaunch> bind_fp8_quantise(const BoundOp& op, const BindTools& tools) {
  Operands check = Operands(op).count(2, 1);
  if (check.good())
    check.number(op.reads[1])
        .floating(op.reads[0])
        .same_size(op.reads[0], op.writes[0])
        .that(is_fp8(op.writes[0]), "writes something other than f8e4m3 or f8e5m2");
  if (!check.good()) return check.refusal();
  const Matrix m = matrix_of(op.writes[0]);
  const kernels::Fp8Quantise args{stored(op.reads[0]), stored(op.writes[0]), kernels::fp8_tensor(m.rows, m.columns),
                                  op.reads[1].as<const float>()};
  return counted_launch(tools.kernels, args,
                        [](const MixedKernels& k, const kernels::Fp8Quantise& a, kernels::Scratch& s) { fp8_quantise(k, a, s); });
}

/// A shard's blocks must be blocks of the whole: its first row and column are multiples of a block's. Of several matrices, [e,rows,columns],
/// each is cut by itself.
bool aligned_shard(const BoundOp& op, const Type& type, const kernels::Fp8Blocks& blocks, bool several) {
  const Shape origin = logical_origin(type, op.mesh(), op.at), whole = logical_shape(type, op.mesh());
  int64_t row = 0;
  for (int dim = several ? 1 : 0; dim + 1 < type.shape.rank; ++dim) row = row * whole[dim] + origin[dim];
  const auto fits = [](int64_t first, int64_t held, int64_t total, int64_t block) {
    return first % block == 0 && (held % block == 0 || first + held == total);
  };
  const int last = type.shape.rank - 1;
  return row % blocks.block_rows == 0 && fits(origin[last], type.shape[last], whole[last], blocks.block_columns);
}

/// Scales and values of blocks, of all rows or of those that counts add up to.
struct BlocksArgs {
  kernels::Fp8FindScales find;
  kernels::Fp8Quantise quantise;
  kernels::RowCounts rows;  ///< counts null: all rows
};

void quantise_blocks(const MixedKernels& k, const BlocksArgs& a, kernels::Scratch& s) {
  BlocksArgs of = a;
  if (a.rows.counts != nullptr && !s.counting()) {
    const int64_t there = std::accumulate(a.rows.counts, a.rows.counts + a.rows.leaves * a.rows.experts, int64_t{0});
    SHARDLAB_CHECK(there <= a.rows.capacity, "{} rows of experts are counted, and there is room for {}", there, a.rows.capacity);
    of.find.blocks.rows = of.quantise.blocks.rows = there;
  }
  fp8_find_scales(k, of.find, s);
  fp8_quantise(k, of.quantise, s);
}

template <int64_t kBlockRows>
Result<ScratchLaunch> bind_fp8_blocks(const BoundOp& op, const BindTools& tools) {
  const bool counted = std::get<Kernel>(op.op().work).counted;
  Operands check = Operands(op).count(counted ? 2 : 1, 2);
  if (!check.good()) return check.refusal();
  const Tensor &x = op.reads[0], &q = op.writes[0], &scales = op.writes[1];
  const bool several = kBlockRows > 1 && x.shape().rank == 3;  // weights of experts
  const int64_t matrices = several ? x.shape()[0] : 1;
  const Matrix m = matrix_of(x);
  const kernels::Fp8Blocks blocks{m.rows / matrices, m.columns, kBlockRows, 128};
  check.floating(x)
      .same_size(x, q)
      .type(scales, DType::f32)
      .elements(scales, matrices * blocks.down() * blocks.across())
      .that(matrix_of(q).columns == m.columns && matrix_of(scales).columns == blocks.across(),
            "has rows of different lengths, or scales that are not [rows of blocks, ceil(columns / 128)]")
      .that(is_fp8(q), "writes something other than f8e4m3 or f8e5m2")
      .that(aligned_shard(op, *x.type, blocks, several), "holds a shard whose blocks are not blocks of the whole");
  if (counted) check.type(op.reads[1], DType::i32).that(op.reads[1].shape().rank == 3, "has counts of rows that are not [n, l, e]");
  if (!check.good()) return check.refusal();
  BlocksArgs args{{stored(x), blocks, q.type->dtype, scales.as<float>(), matrices},
                  {stored(x), stored(q), blocks, scales.as<float>(), matrices},
                  {}};
  if (counted) {
    const Shape& counts = op.reads[1].shape();
    args.rows = {op.reads[1].as<const int32_t>(), counts[0] * counts[1], counts[2], 1, m.rows};
  }
  return counted_launch(tools.kernels, args, quantise_blocks);
}

Result<ScratchLaunch> bind_fp8_dequantise(const BoundOp& op, const BindTools& tools) {
  Operands check = Operands(op).count(2, 1);
  if (check.good())
    check.that(is_fp8(op.reads[0]), "reads something other than f8e4m3 or f8e5m2")
        .type(op.reads[1], DType::f32)
        .same_size(op.reads[0], op.writes[0])
        .floating(op.writes[0]);
  if (!check.good()) return check.refusal();
  const auto blocks = blocks_of(op.reads[0], op.reads[1]);
  if (!check.that(blocks.has_value(), kScales).good()) return check.refusal();
  const Stored q = fp8_operand(op.reads[0].data, op.reads[0].type->dtype, *blocks, op.reads[1].as<const float>());
  const kernels::SumRows args{q, stored(op.writes[0]), 1, elements_of(op.writes[0])};
  return counted_launch(tools.kernels, args,
                        [](const MixedKernels& k, const kernels::SumRows& a, kernels::Scratch& s) { sum_rows(k, a, s); });
}

/// The quantised matrix of reads i and its scales, i + 1.
Result<Stored> quantised(const BoundOp& op, size_t i) {
  Operands check(op);
  check.that(is_fp8(op.reads[i]), "reads something other than f8e4m3 or f8e5m2").type(op.reads[i + 1], DType::f32);
  const auto blocks = blocks_of(op.reads[i], op.reads[i + 1]);
  if (!check.that(blocks.has_value(), kScales).good()) return check.refusal();
  return fp8_operand(op.reads[i].data, op.reads[i].type->dtype, *blocks, op.reads[i + 1].as<const float>());
}

template <class Args>
ScratchLaunch launch(const BindTools& tools, void (MixedKernels::*kernel)(const Args&, kernels::Scratch&) const, const Args& args) {
  return counted_launch(tools.kernels, args,
                        [kernel](const MixedKernels& k, const Args& a, kernels::Scratch& s) { (k.*kernel)(a, s); });
}

Result<ScratchLaunch> bind_fp8_linear(const BoundOp& op, const BindTools& tools) {
  const Phase phase = phase_of(op.op().work);
  const bool bias = phase == Phase::kF && op.reads.size() == 5;
  Operands check = Operands(op).count(bias ? 5 : 4, 1).that(phase != Phase::kNone, "has no phase: F, I or W");
  if (check.good()) check.floating(op.writes[0]);
  if (check.good() && bias) check.floating(op.reads[4]);
  if (!check.good()) return check.refusal();
  auto left = quantised(op, 0), right = quantised(op, 2);
  if (!left.ok()) return left.error();
  if (!right.ok()) return right.error();
  const Matrix a = matrix_of(op.reads[0]), b = matrix_of(op.reads[2]), y = matrix_of(op.writes[0]);
  const bool canonical = tools.options.canonical;
  const Type& second = *op.reads[2].type;
  switch (phase) {
    case Phase::kF:
      check.that(a.columns == b.columns && y.rows == a.rows && y.columns == b.rows,
                 "has shapes other than x[.., in], w[out, in] -> y[.., out]");
      if (!check.good()) return check.refusal();
      return launch<kernels::MixedLinearForward>(tools, &MixedKernels::linear_forward,
                                                 {.x = *left,
                                                  .w = *right,
                                                  .bias = bias ? stored(op.reads[4]) : Stored{},
                                                  .y = stored(op.writes[0]),
                                                  .rows = a.rows,
                                                  .in = b.columns,
                                                  .out = b.rows,
                                                  .in_part = part_of(op, second, 1),
                                                  .canonical = canonical});
    case Phase::kI:
      check.that(a.columns == b.rows && y.rows == a.rows && y.columns == b.columns,
                 "has shapes other than dy[.., out], w[out, in] -> dx[.., in]");
      if (!check.good()) return check.refusal();
      return launch<kernels::MixedLinearInput>(tools, &MixedKernels::linear_input,
                                               {.dy = *left,
                                                .w = *right,
                                                .dx = stored(op.writes[0]),
                                                .rows = a.rows,
                                                .in = b.columns,
                                                .out = b.rows,
                                                .out_part = part_of(op, second, 0),
                                                .canonical = canonical});
    default: break;
  }
  check.that(a.rows == b.rows && y.rows == b.columns && y.columns == a.columns,
             "has shapes other than x[.., in], dy[.., out] -> dw[out, in]");
  if (!check.good()) return check.refusal();
  return launch<kernels::MixedLinearWeight>(tools, &MixedKernels::linear_weight,
                                            {.x = *left,
                                             .dy = *right,
                                             .dw = stored(op.writes[0]),
                                             .tokens = tokens_of(op, *op.reads[0].type),
                                             .in = a.columns,
                                             .out = b.columns,
                                             .canonical = canonical});
}

constexpr std::array kFp8{
    KernelBinder{"fp8_scale_e4m3", bind_fp8_scale<DType::f8e4m3>},
    KernelBinder{"fp8_scale_e5m2", bind_fp8_scale<DType::f8e5m2>},
    KernelBinder{"fp8_delayed_e4m3", bind_fp8_delayed<DType::f8e4m3>},
    KernelBinder{"fp8_delayed_e5m2", bind_fp8_delayed<DType::f8e5m2>},
    KernelBinder{"fp8_scales_e4m3", bind_fp8_scales<DType::f8e4m3>},
    KernelBinder{"fp8_scales_e5m2", bind_fp8_scales<DType::f8e5m2>},
    KernelBinder{"fp8_remember", bind_fp8_remember},
    KernelBinder{"fp8_quantise", bind_fp8_quantise},
    KernelBinder{"fp8_quantise_1x128", bind_fp8_blocks<1>},
    KernelBinder{"fp8_quantise_128x128", bind_fp8_blocks<128>},
    KernelBinder{"fp8_dequantise", bind_fp8_dequantise},
    KernelBinder{"fp8_linear", bind_fp8_linear},
};

}  // namespace

std::span<const KernelBinder> fp8_kernels() { return kFp8; }

}  // namespace shardlab::runtime::named
