// Named kernels of compression: integers with block scales, selections, signs, low rank, and the errors they leave.
#include <algorithm>
#include <array>
#include <cstring>

#include "kernels/compress.h"
#include "kernels/quantise.h"
#include "runtime/named_binding.h"

namespace shardlab::runtime::named {
namespace {

using kernels::MixedKernels;

/// A launch of a free function of kernels/.
template <class Args>
ScratchLaunch launch(const BindTools& tools, void (*kernel)(const MixedKernels&, const Args&, kernels::Scratch&),
                     const Args& args) {
  return counted_launch(tools.kernels, args, kernel);
}

// ---- errors

/// error = m - share * approximation.
ScratchLaunch subtract(const BoundOp& op, const BindTools& tools, float share) {
  return launch<kernels::SubtractShare>(
      tools, kernels::subtract_share,
      {stored(op.reads[0]), stored(op.reads[1]), stored(op.writes[0]), elements_of(op.writes[0]), share});
}

Operands check_subtract(const BoundOp& op) {
  Operands check = Operands(op).count(2, 1);
  if (check.good())
    check.same_size(op.writes[0], op.reads[0])
        .same_size(op.writes[0], op.reads[1])
        .floating(op.reads[0])
        .floating(op.reads[1])
        .floating(op.writes[0]);
  return check;
}

Result<ScratchLaunch> bind_subtract(const BoundOp& op, const BindTools& tools) {
  const Operands check = check_subtract(op);
  if (!check.good()) return check.refusal();
  return subtract(op, tools, 1);
}

/// The approximation is of the sum over the axes along which m is a summand and the approximation is not: each of those ranks takes
/// an equal share, so that the errors add up to what the sum lost.
Result<ScratchLaunch> bind_subtract_share(const BoundOp& op, const BindTools& tools) {
  const Operands check = check_subtract(op);
  if (!check.good()) return check.refusal();
  return subtract(op, tools, share_of(op, op.reads[0], op.reads[1]));
}

// ---- low rank

Result<ScratchLaunch> bind_project(const BoundOp& op, const BindTools& tools) {
  Operands check = Operands(op).count(2, 1);
  if (!check.good()) return check.refusal();
  const Matrix m = matrix_of(op.reads[0]), basis = matrix_of(op.reads[1]), p = matrix_of(op.writes[0]);
  check.floating(op.reads[0]).floating(op.reads[1]).floating(op.writes[0]);
  check.that(m.columns == basis.columns && p.rows == m.rows && p.columns == basis.rows,
             "has shapes other than m[r,c], basis[k,c] -> p[r,k]");
  if (!check.good()) return check.refusal();
  const kernels::MixedLinearForward args{.x = stored(op.reads[0]),
                                         .w = stored(op.reads[1]),
                                         .y = stored(op.writes[0]),
                                         .rows = m.rows,
                                         .in = m.columns,
                                         .out = basis.rows,
                                         .in_part = part_of(op, *op.reads[1].type, 1),
                                         .canonical = true};
  return counted_launch(tools.kernels, args, [](const MixedKernels& k, const kernels::MixedLinearForward& a, kernels::Scratch& s) {
    k.linear_forward(a, s);
  });
}

Result<ScratchLaunch> bind_orthogonalise(const BoundOp& op, const BindTools& tools) {
  Operands check = Operands(op).count(1, 1);
  if (check.good()) check.type(op.reads[0], DType::f32).type(op.writes[0], DType::f32).same_size(op.reads[0], op.writes[0]);
  if (!check.good()) return check.refusal();
  const Matrix p = matrix_of(op.reads[0]);
  const kernels::Orthogonalise args{p.rows, p.columns, op.reads[0].as<const float>(), op.writes[0].as<float>()};
  return counted_launch(tools.kernels, args,
                        [](const MixedKernels&, const kernels::Orthogonalise& a, kernels::Scratch& s) { orthogonalise(a, s); });
}

/// A basis of zeros becomes the first unit vectors, a row each.
struct StartBasis {
  float* basis;
  int64_t rows, columns;
};

Result<ScratchLaunch> bind_start_basis(const BoundOp& op, const BindTools& tools) {
  Operands check = Operands(op).count(1, 1);
  if (check.good())
    check.type(op.reads[0], DType::f32)
        .type(op.writes[0], DType::f32)
        .that(op.reads[0].data == op.writes[0].data && op.reads[0].shape() == op.writes[0].shape(), "is not in place");
  if (!check.good()) return check.refusal();
  const Matrix m = matrix_of(op.writes[0]);
  const StartBasis args{op.writes[0].as<float>(), m.rows, m.columns};
  return counted_launch(tools.kernels, args, [](const MixedKernels&, const StartBasis& a, kernels::Scratch& s) {
    if (s.counting() || std::any_of(a.basis, a.basis + a.rows * a.columns, [](float x) { return x != 0; })) return;
    for (int64_t i = 0; i < std::min(a.rows, a.columns); ++i) a.basis[i * a.columns + i] = 1;
  });
}

// ---- integers with block scales

/// The blocks into which its scales [.., blocks] cut x[.., columns].
kernels::BlockShape block_shape(const Tensor& scales, int64_t rows, int64_t columns, int bits) {
  return {rows, columns, scales.shape().last(), bits};
}

/// Quantised elements are i8, or u8 with two elements each.
Operands& check_codes(Operands& check, const Tensor& q, const Tensor& scales, const kernels::BlockShape& shape) {
  return check.type(q, shape.bits == 8 ? DType::i8 : DType::u8)
      .elements(q, shape.rows * shape.row_bytes())
      .type(scales, DType::f32)
      .elements(scales, shape.rows * shape.blocks);
}

template <int kBits>
Result<ScratchLaunch> bind_quantise(const BoundOp& op, const BindTools& tools) {
  Operands check = Operands(op).count(1, 2);
  if (!check.good()) return check.refusal();
  const Tensor &x = op.reads[0], &q = op.writes[0], &scales = op.writes[1];
  const Matrix m = matrix_of(x);
  const auto shape = block_shape(scales, m.rows, m.columns, kBits);
  if (!check_codes(check.floating(x), q, scales, shape).good()) return check.refusal();
  return launch<kernels::BlockQuantise>(tools, kernels::block_quantise, {shape, stored(x), q.data, scales.as<float>()});
}

template <int kBits>
Result<ScratchLaunch> bind_dequantise(const BoundOp& op, const BindTools& tools) {
  Operands check = Operands(op).count(2, 1);
  if (!check.good()) return check.refusal();
  const Tensor &q = op.reads[0], &scales = op.reads[1], &y = op.writes[0];
  const Matrix m = matrix_of(y);
  const auto shape = block_shape(scales, m.rows, m.columns, kBits);
  if (!check_codes(check.floating(y), q, scales, shape).good()) return check.refusal();
  return launch<kernels::BlockDequantise>(tools, kernels::block_dequantise, {shape, q.data, scales.as<const float>(), stored(y)});
}

template <int kBits>
Result<ScratchLaunch> bind_dequantise_sum(const BoundOp& op, const BindTools& tools) {
  Operands check = Operands(op).count(2, 1);
  if (!check.good()) return check.refusal();
  const Tensor &q = op.reads[0], &scales = op.reads[1], &y = op.writes[0];
  const auto shape = block_shape(scales, matrix_of(scales).rows, elements_of(y), kBits);
  if (!check_codes(check.floating(y), q, scales, shape).good()) return check.refusal();
  return launch<kernels::BlockDequantiseSum>(tools, kernels::block_dequantise_sum,
                                             {shape, q.data, scales.as<const float>(), stored(y)});
}

Result<ScratchLaunch> bind_sum_rows(const BoundOp& op, const BindTools& tools) {
  Operands check = Operands(op).count(1, 1);
  if (!check.good()) return check.refusal();
  const int64_t rows = op.reads[0].shape()[0], columns = elements_of(op.writes[0]);
  check.elements(op.reads[0], rows * columns).floating(op.reads[0]).floating(op.writes[0]);
  if (!check.good()) return check.refusal();
  return launch<kernels::SumRows>(tools, kernels::sum_rows, {stored(op.reads[0]), stored(op.writes[0]), rows, columns});
}

struct SwapLeading {
  const std::byte* x;
  std::byte* y;
  int64_t rows, columns, bytes;  ///< of x, and of one of its elements with all further dims
};

Result<ScratchLaunch> bind_swap_leading(const BoundOp& op, const BindTools& tools) {
  Operands check = Operands(op).count(1, 1);
  if (!check.good()) return check.refusal();
  const Tensor &x = op.reads[0], &y = op.writes[0];
  check.same_size(x, y).type(y, x.type->dtype).that(y.shape().rank >= 2 && x.data != y.data, "makes two dims, in another place");
  if (!check.good()) return check.refusal();
  const int64_t rows = y.shape()[1], columns = y.shape()[0];
  const SwapLeading args{static_cast<const std::byte*>(x.data), static_cast<std::byte*>(y.data), rows, columns,
                         x.type->bytes() / (rows * columns)};
  return counted_launch(tools.kernels, args, [](const MixedKernels&, const SwapLeading& a, kernels::Scratch& s) {
    if (s.counting()) return;
    for (int64_t i = 0; i < a.rows; ++i)
      for (int64_t j = 0; j < a.columns; ++j)
        std::memcpy(a.y + (j * a.rows + i) * a.bytes, a.x + (i * a.columns + j) * a.bytes, static_cast<size_t>(a.bytes));
  });
}

// ---- selections

Operands check_selection(const BoundOp& op) {
  Operands check = Operands(op).count(1, 2);
  if (check.good())
    check.floating(op.reads[0])
        .type(op.writes[0], DType::f32)
        .type(op.writes[1], DType::i32)
        .same_size(op.writes[0], op.writes[1])
        .that(elements_of(op.writes[0]) <= elements_of(op.reads[0]), "selects more elements than there are")
        .that(elements_of(op.reads[0]) < (int64_t{1} << 31), "selects of more than 2^31 elements, which an i32 cannot number");
  return check;
}

Result<ScratchLaunch> bind_top_k(const BoundOp& op, const BindTools& tools) {
  const Operands check = check_selection(op);
  if (!check.good()) return check.refusal();
  return launch<kernels::TopK>(tools, kernels::top_k,
                               {stored(op.reads[0]), elements_of(op.reads[0]), elements_of(op.writes[0]), op.writes[0].as<float>(),
                                op.writes[1].as<int32_t>()});
}

Result<ScratchLaunch> bind_random_k(const BoundOp& op, const BindTools& tools) {
  const Operands check = check_selection(op);
  if (!check.good()) return check.refusal();
  const kernels::RandomK args{.x = stored(op.reads[0]),
                              .n = elements_of(op.reads[0]),
                              .k = elements_of(op.writes[0]),
                              .key = key_of(op, RandomUse::kShuffle),
                              .values = op.writes[0].as<float>(),
                              .indices = op.writes[1].as<int32_t>()};
  return counted_launch(tools.kernels, args, kernels::random_k,
                        [](kernels::RandomK& a, const StepState& state) { a.key.step = static_cast<uint32_t>(state.step); });
}

Result<ScratchLaunch> bind_scatter(const BoundOp& op, const BindTools& tools) {
  Operands check = Operands(op).count(2, 1);
  if (check.good())
    check.type(op.reads[0], DType::f32).type(op.reads[1], DType::i32).same_size(op.reads[0], op.reads[1]).floating(op.writes[0]);
  if (!check.good()) return check.refusal();
  const Matrix parts = matrix_of(op.reads[0]);
  return launch<kernels::Scatter>(tools, kernels::scatter,
                                  {parts.rows, parts.columns, elements_of(op.writes[0]), op.reads[0].as<const float>(),
                                   op.reads[1].as<const int32_t>(), stored(op.writes[0])});
}

Result<ScratchLaunch> bind_zero_selected(const BoundOp& op, const BindTools& tools) {
  Operands check = Operands(op).count(2, 1);
  if (check.good())
    check.type(op.reads[0], DType::f32)
        .type(op.reads[1], DType::i32)
        .type(op.writes[0], DType::f32)
        .same_size(op.reads[0], op.writes[0]);
  if (!check.good()) return check.refusal();
  struct Args {
    kernels::MixedCopy copy;
    kernels::ZeroSelected zero;
  };
  const Tensor& to = op.writes[0];
  const Args args{{stored(op.reads[0]), stored(to), to.data == op.reads[0].data ? 0 : elements_of(to)},
                  {to.as<float>(), elements_of(op.reads[1]), op.reads[1].as<const int32_t>()}};
  return counted_launch(tools.kernels, args, [](const MixedKernels& k, const Args& a, kernels::Scratch& s) {
    k.copy(a.copy, s);
    if (!s.counting()) zero_selected(a.zero);
  });
}

// ---- signs

kernels::SignShape sign_shape(const Tensor& x, const Tensor& scales) {
  const Matrix m = matrix_of(x);
  return {m.rows, m.columns, scales.shape().last()};
}

Operands& check_signs(Operands& check, const Tensor& signs, const Tensor& scales, const kernels::SignShape& shape) {
  return check.type(signs, DType::u8)
      .elements(signs, shape.rows * shape.row_bytes())
      .type(scales, DType::f32)
      .elements(scales, shape.rows * shape.blocks);
}

Result<ScratchLaunch> bind_sign_compress(const BoundOp& op, const BindTools& tools) {
  Operands check = Operands(op).count(1, 2);
  if (!check.good()) return check.refusal();
  const auto shape = sign_shape(op.reads[0], op.writes[1]);
  if (!check_signs(check.floating(op.reads[0]), op.writes[0], op.writes[1], shape).good()) return check.refusal();
  return launch<kernels::SignCompress>(tools, kernels::sign_compress,
                                       {shape, stored(op.reads[0]), op.writes[0].as<uint8_t>(), op.writes[1].as<float>()});
}

Result<ScratchLaunch> bind_sign_expand(const BoundOp& op, const BindTools& tools) {
  Operands check = Operands(op).count(2, 1);
  if (!check.good()) return check.refusal();
  const auto shape = sign_shape(op.writes[0], op.reads[1]);
  if (!check_signs(check.floating(op.writes[0]), op.reads[0], op.reads[1], shape).good()) return check.refusal();
  return launch<kernels::SignExpand>(tools, kernels::sign_expand,
                                     {shape, op.reads[0].as<const uint8_t>(), op.reads[1].as<const float>(), stored(op.writes[0])});
}

Result<ScratchLaunch> bind_sign_expand_sum(const BoundOp& op, const BindTools& tools) {
  Operands check = Operands(op).count(2, 1);
  if (!check.good()) return check.refusal();
  const Tensor &signs = op.reads[0], &scales = op.reads[1], &y = op.writes[0];
  const kernels::SignShape shape{matrix_of(scales).rows, elements_of(y), scales.shape().last()};
  if (!check_signs(check.floating(y), signs, scales, shape).good()) return check.refusal();
  return launch<kernels::SignExpandSum>(tools, kernels::sign_expand_sum,
                                        {shape, signs.as<const uint8_t>(), scales.as<const float>(), stored(y)});
}

constexpr std::array kCompression{
    KernelBinder{"subtract", bind_subtract},
    KernelBinder{"subtract_share", bind_subtract_share},
    KernelBinder{"project", bind_project},
    KernelBinder{"orthogonalise", bind_orthogonalise},
    KernelBinder{"start_basis", bind_start_basis},
    KernelBinder{"quantise_int8", bind_quantise<8>},
    KernelBinder{"quantise_int4", bind_quantise<4>},
    KernelBinder{"dequantise_int8", bind_dequantise<8>},
    KernelBinder{"dequantise_int4", bind_dequantise<4>},
    KernelBinder{"dequantise_sum_int8", bind_dequantise_sum<8>},
    KernelBinder{"dequantise_sum_int4", bind_dequantise_sum<4>},
    KernelBinder{"swap_leading", bind_swap_leading},
    KernelBinder{"sum_rows", bind_sum_rows},
    KernelBinder{"top_k", bind_top_k},
    KernelBinder{"random_k", bind_random_k},
    KernelBinder{"scatter", bind_scatter},
    KernelBinder{"zero_selected", bind_zero_selected},
    KernelBinder{"sign_compress", bind_sign_compress},
    KernelBinder{"sign_expand", bind_sign_expand},
    KernelBinder{"sign_expand_sum", bind_sign_expand_sum},
};

}  // namespace

std::span<const KernelBinder> compression_kernels() { return kCompression; }

}  // namespace shardlab::runtime::named
