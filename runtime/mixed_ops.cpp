#include "runtime/mixed_ops.h"

#include <fmt/format.h>

#include <algorithm>

#include "kernels/fp8.h"
#include "kernels/library_product.h"
#include "plan/base/check.h"
#include "plan/optimizers.h"
#include "plan/precision.h"
#include "runtime/operands.h"
#include "runtime/positions.h"

#ifdef _OPENMP
#include <omp.h>
#endif

namespace shardlab::runtime {

namespace {

using kernels::LibraryProduct;
using kernels::MixedKernels;
using kernels::Stored;

bool is_narrow(DType t) { return t != DType::f32 && kernels::is_float_storage(t); }

/// One of MixedKernels' members as a launch.
template <class Args>
ScratchLaunch launch(const BindTools& tools, void (MixedKernels::*kernel)(const Args&, kernels::Scratch&) const, const Args& args) {
  return counted_launch(tools.kernels, args,
                        [kernel](const MixedKernels& k, const Args& a, kernels::Scratch& s) { (k.*kernel)(a, s); });
}

float* statistics(const Tensor& t) { return t.as<float>(); }

/// What lies `elements` further on.
Stored past(Stored s, int64_t elements) {
  s.data = static_cast<std::byte*>(s.data) + bytes_of(s.dtype, elements);
  return s;
}

/// A launch of the kernel for each sequence, all in one scratch; `move` takes its operands to a sequence.
template <class Args, class Move>
ScratchLaunch by_sequence(const BindTools& tools, void (MixedKernels::*kernel)(const Args&, kernels::Scratch&) const, Args args,
                          Move move) {
  const int64_t sequences = args.tokens.sequences;
  args.tokens.sequences = 1;
  return counted_launch(tools.kernels, args, [kernel, sequences, move](const MixedKernels& k, const Args& a, kernels::Scratch& s) {
    if (s.counting()) return (k.*kernel)(a, s);
    for (int64_t i = 0; i < sequences; ++i) {
      Args one = a;
      move(one, i);
      kernels::Scratch again = s;
      (k.*kernel)(one, again);
    }
  });
}

/// Each write is the sum over sequences of the read beside it: to a sum over tokens a sequence is one token.
ScratchLaunch sum_sequences(const BoundOp& op, bool accumulate, const BindTools& tools) {
  std::vector<kernels::MixedBiasWeight> sums;
  for (size_t i = 0; i < op.writes.size(); ++i)
    sums.push_back(
        {stored(op.reads[i]), stored(op.writes[i]), tokens_of(op, *op.reads[i].type), op.reads[i].shape().last(), accumulate});
  return counted_launch(tools.kernels, sums,
                        [](const MixedKernels& k, const std::vector<kernels::MixedBiasWeight>& all, kernels::Scratch& s) {
                          for (const kernels::MixedBiasWeight& sum : all) {
                            if (s.counting()) return k.bias_weight(sum, s);
                            kernels::Scratch again = s;
                            k.bias_weight(sum, again);
                          }
                        });
}

// ---- input and embeddings

ScratchLaunch bind_work(const BoundOp& op, const Embed& w, const BindTools& tools) {
  const Tensor& ids = op.reads[0];
  if (w.phase == Phase::kF) {
    const Type& table = *op.reads[1].type;
    return launch<kernels::MixedEmbedForward>(tools, &MixedKernels::embed_forward,
                                              {.ids = ids.as<const int32_t>(),
                                               .table = stored(op.reads[1]),
                                               .x = stored(op.writes[0]),
                                               .rows = ids.shape().elements(),
                                               .width = table.shape[1],
                                               .row_begin = part_of(op, table, 0).begin,
                                               .table_rows = table.shape[0]});
  }
  const Type& table = *op.writes[0].type;
  const kernels::Tokens tokens = tokens_of(op, *op.reads[1].type);
  return launch<kernels::MixedEmbedWeight>(tools, &MixedKernels::embed_weight,
                                           {.ids = ids.as<const int32_t>(),
                                            .dx = stored(op.reads[1]),
                                            .dtable = stored(op.writes[0]),
                                            .sequences = tokens.sequences,
                                            .tokens = tokens.tokens,
                                            .width = table.shape[1],
                                            .row_begin = part_of(op, table, 0).begin,
                                            .table_rows = table.shape[0],
                                            .accumulate = w.accumulate,
                                            .part = tokens.part});
}

/// Positions in documents are known when the batch is there. Backward a row of the table is a row of an embedding by positions.
ScratchLaunch bind_packed(const BoundOp& op, const Positions& w, const BindTools& tools) {
  const auto [documents, width, rows] = packed_positions(op, w);
  const kernels::Tokens tokens = tokens_of(op, *op.reads[0].type);
  if (w.phase == Phase::kF) {
    const kernels::MixedPositionsForward args{stored(op.reads[0]), stored(op.reads[1]), stored(op.writes[0]), 1, 1, width};
    return counted_launch(
        tools.kernels, args,
        [documents = documents, tokens, width = width, rows = rows](const MixedKernels& k, const auto& a, kernels::Scratch& s) {
          if (s.counting()) return k.positions_forward(a, s);
          for_document_runs(documents, tokens.sequences, tokens.tokens, rows, [&](int64_t first, int64_t n, int64_t position) {
            kernels::Scratch again = s;
            const int64_t at = first * width;
            k.positions_forward({past(a.x, at), past(a.table, position * width), past(a.y, at), 1, n, width}, again);
          });
        });
  }
  const kernels::MixedEmbedWeight args{.dx = stored(op.reads[0]),
                                       .dtable = stored(op.writes[0]),
                                       .sequences = tokens.sequences,
                                       .tokens = tokens.tokens,
                                       .width = width,
                                       .table_rows = rows,
                                       .accumulate = w.accumulate,
                                       .part = tokens.part};
  return counted_launch(tools.kernels, args, [documents = documents](const MixedKernels& k, const auto& a, kernels::Scratch& s) {
    kernels::MixedEmbedWeight one = a;
    auto* const ids = s.take<int32_t>(a.sequences * a.tokens);
    if (!s.counting()) copy_positions(documents, a.sequences, a.tokens, ids);
    one.ids = ids;
    k.embed_weight(one, s);
  });
}

/// A token takes the row of its position: where positions are consecutive, one call takes the rows of all.
ScratchLaunch bind_work(const BoundOp& op, const Positions& w, const BindTools& tools) {
  if (w.packed) return bind_packed(op, w, tools);
  const Type& x = *op.reads[0].type;
  const int64_t sequences = x.shape[0], tokens = x.shape[1], width = x.shape.last();
  const auto at = [](const Tensor& t, int64_t element) { return past(stored(t), element); };
  if (w.phase == Phase::kF) {
    std::vector<kernels::MixedPositionsForward> calls;
    for_positions(op, x, [&](int64_t first, int64_t n, int64_t position) {
      const bool whole = n == tokens;
      for (int64_t b = 0; b < (whole ? 1 : sequences); ++b) {
        const int64_t from = (b * tokens + first) * width;
        calls.push_back(
            {at(op.reads[0], from), at(op.reads[1], position * width), at(op.writes[0], from), whole ? sequences : 1, n, width});
      }
    });
    return counted_launch(tools.kernels, calls, [](const MixedKernels& k, const auto& all, kernels::Scratch& s) {
      const kernels::Scratch lent = s;
      for (const auto& args : all) {
        s = lent;  // every call uses the same block
        k.positions_forward(args, s);
      }
    });
  }
  struct Args {
    std::vector<kernels::MixedPositionsWeight> weight;
    kernels::MixedFill table;  ///< rows of positions of which no token is here have a gradient of 0
  };
  Args args{{}, {stored(op.writes[0]), w.accumulate ? 0 : op.writes[0].shape().elements(), 0.0f}};
  for_positions(op, x, [&](int64_t first, int64_t n, int64_t position) {
    args.weight.push_back(
        {at(op.reads[0], first * width), at(op.writes[0], position * width), sequences, n, width, w.accumulate, tokens * width});
  });
  return counted_launch(tools.kernels, args, [](const MixedKernels& k, const Args& a, kernels::Scratch& s) {
    const kernels::Scratch lent = s;
    k.fill(a.table, s);
    for (const auto& weight : a.weight) {
      s = lent;
      k.positions_weight(weight, s);
    }
  });
}

// ---- the layers

ScratchLaunch bind_work(const BoundOp& op, const Norm& w, const BindTools& tools) {
  if (w.over == SumOver::kSequences) return sum_sequences(op, w.accumulate, tools);
  const Type& x = *op.reads[w.phase == Phase::kF ? 0 : 1].type;
  const int64_t rows = rows_of(x), width = x.shape.last();
  const auto maybe = [](const std::vector<Tensor>& operands, size_t i, bool there) {
    return there ? stored(operands[i]) : Stored{};
  };
  if (w.phase == Phase::kF)
    return launch<kernels::MixedNormForward>(tools, &MixedKernels::norm_forward,
                                             {.x = stored(op.reads[0]),
                                              .gamma = stored(op.reads[1]),
                                              .beta = maybe(op.reads, 2, !w.rms),
                                              .y = stored(op.writes[0]),
                                              .stats = statistics(op.writes[1]),
                                              .rows = rows,
                                              .width = width,
                                              .epsilon = w.epsilon,
                                              .rms = w.rms});
  if (w.phase == Phase::kI)
    return launch<kernels::MixedNormInput>(tools, &MixedKernels::norm_input,
                                           {.dy = stored(op.reads[0]),
                                            .x = stored(op.reads[1]),
                                            .gamma = stored(op.reads[2]),
                                            .residual = maybe(op.reads, 4, w.residual),
                                            .dx = stored(op.writes[0]),
                                            .stats = statistics(op.reads[3]),
                                            .rows = rows,
                                            .width = width,
                                            .rms = w.rms});
  const kernels::MixedNormWeight args{.dy = stored(op.reads[0]),
                                      .x = stored(op.reads[1]),
                                      .dgamma = stored(op.writes[0]),
                                      .dbeta = maybe(op.writes, 1, !w.rms),
                                      .stats = statistics(op.reads[2]),
                                      .tokens = tokens_of(op, x),
                                      .width = width,
                                      .rms = w.rms,
                                      .accumulate = w.accumulate};
  if (w.over == SumOver::kAll) return launch(tools, &MixedKernels::norm_weight, args);
  return by_sequence(tools, &MixedKernels::norm_weight, args, [](kernels::MixedNormWeight& a, int64_t sequence) {
    const int64_t row = sequence * a.tokens.tokens;
    a.dy = past(a.dy, row * a.width);
    a.x = past(a.x, row * a.width);
    a.stats += row * (a.rms ? 1 : 2);
    a.dgamma = past(a.dgamma, sequence * a.width);
    if (!a.rms) a.dbeta = past(a.dbeta, sequence * a.width);
  });
}

/// The library's product where both factors are bf16, the result is one that it writes, and no fixed order is asked for. It plans
/// for the OpenMP threads that the op's thread will have.
std::shared_ptr<const LibraryProduct> library_product(const BindTools& tools, DType a, DType b, const LibraryProduct::Spec& spec) {
  const auto known = [](DType t) { return t == DType::bf16 || t == DType::f32; };
  if (tools.options.canonical || a != DType::bf16 || b != DType::bf16 || !known(spec.result)) return nullptr;
  if (spec.bias && !known(spec.bias_type)) return nullptr;
#ifdef _OPENMP
  const int before = omp_get_max_threads();
  omp_set_num_threads(tools.options.threads_per_rank);
#endif
  std::shared_ptr<const LibraryProduct> product = LibraryProduct::create(spec);
#ifdef _OPENMP
  omp_set_num_threads(before);
#endif
  return product;
}

/// A launch of a Linear that keeps its product alive.
template <class Args>
ScratchLaunch launch_linear(const BindTools& tools, void (MixedKernels::*kernel)(const Args&, kernels::Scratch&) const, Args args,
                            std::shared_ptr<const LibraryProduct> product) {
  args.product = product.get();
  return counted_launch(tools.kernels, args,
                        [kernel, product](const MixedKernels& k, const Args& a, kernels::Scratch& s) { (k.*kernel)(a, s); });
}

/// The same of each sequence's strip, all in one scratch; `move` takes the operands to the first row that is read and the first that is
/// written.
template <class Args, class Move>
ScratchLaunch launch_strips(const BindTools& tools, const StripRows& strips,
                            void (MixedKernels::*kernel)(const Args&, kernels::Scratch&) const, Args args,
                            std::shared_ptr<const LibraryProduct> product, Move move) {
  args.product = product.get();
  return counted_launch(tools.kernels, args,
                        [kernel, product, strips, move](const MixedKernels& k, const Args& a, kernels::Scratch& s) {
                          if (s.counting()) return (k.*kernel)(a, s);
                          for (int64_t b = 0; b < strips.sequences; ++b) {
                            Args one = a;
                            move(one, strips.read + b * strips.read_step, strips.written + b * strips.written_step);
                            kernels::Scratch again = s;
                            (k.*kernel)(one, again);
                          }
                        });
}

/// A factor of a product of rows of experts, whose scales lie behind the counts: those of rows, or of `weight` those of each expert's matrix.
Stored grouped_factor(const BoundOp& op, size_t i, bool weight) {
  const Tensor& x = op.reads[i];
  if (!has_scales(x.type->dtype)) return stored(x);
  const Shape& s = x.shape();
  const kernels::Fp8Blocks blocks = weight ? kernels::fp8_squares(s[1], s[2]) : kernels::fp8_rows(s[1], s[2]);
  return kernels::fp8_operand(x.data, x.type->dtype, blocks, op.reads[i + 3].as<const float>());
}

/// A factor and the scales that follow both factors.
Stored matrix_factor(const BoundOp& op, size_t i) {
  const Tensor& x = op.reads[i];
  if (!has_scales(x.type->dtype)) return stored(x);
  const Shape& scales = op.reads[i + 2].shape();
  const int64_t columns = x.shape().last(), rows = x.shape().elements() / columns;
  const bool one = scales.elements() == 1, by_row = scales.elements() / scales.last() == rows;
  const kernels::Fp8Blocks blocks = one      ? kernels::fp8_tensor(rows, columns)
                                    : by_row ? kernels::fp8_rows(rows, columns)
                                             : kernels::fp8_squares(rows, columns);
  return kernels::fp8_operand(x.data, x.type->dtype, blocks, op.reads[i + 2].as<const float>());
}

/// The weight gradient from factors of 8 bits. The gradient of a bias sums values that were not rounded to 8 bits.
ScratchLaunch bind_scaled_weight(const BoundOp& op, const BindTools& tools, const kernels::MixedLinearWeight& product) {
  struct Args {
    kernels::MixedLinearWeight product;
    kernels::MixedBiasWeight bias;
  };
  const kernels::MixedBiasWeight bias{stored(op.reads[4]), stored(op.writes[1]), product.tokens, product.out, product.accumulate};
  return counted_launch(tools.kernels, Args{product, bias}, [](const MixedKernels& k, const Args& a, kernels::Scratch& s) {
    k.linear_weight(a.product, s);
    k.bias_weight(a.bias, s);
  });
}

ScratchLaunch bind_linear_weight(const BoundOp& op, const Linear& w, const BindTools& tools) {
  const Tensor &x = op.reads[0], &dy = op.reads[1], &dw = op.writes[0];
  const bool scaled = has_scales(x.type->dtype);
  const kernels::MixedLinearWeight args{.x = matrix_factor(op, 0),
                                        .dy = matrix_factor(op, 1),
                                        .dw = stored(dw),
                                        .dbias = w.bias && !scaled ? stored(op.writes[1]) : Stored{},
                                        .tokens = tokens_of(op, *x.type),
                                        .in = x.shape().last(),
                                        .out = dy.shape().last(),
                                        .accumulate = w.accumulate,
                                        .canonical = tools.options.canonical};
  if (scaled && w.bias) return bind_scaled_weight(op, tools, args);
  auto product = library_product(tools, x.type->dtype, dy.type->dtype,
                                 {.rows = args.out,
                                  .columns = args.in,
                                  .depth = args.tokens.rows(),
                                  .a_transposed = true,
                                  .result = dw.type->dtype,
                                  .accumulate = w.accumulate});
  return launch_linear(tools, &MixedKernels::linear_weight, args, std::move(product));
}

ScratchLaunch bind_work(const BoundOp& op, const Linear& w, const BindTools& tools) {
  if (w.phase == Phase::kW) return bind_linear_weight(op, w, tools);
  const Tensor &x = op.reads[0], &weight = op.reads[1], &y = op.writes[0];
  const StripRows strips = strip_rows(op, w);
  const int64_t rows = strips.rows, out = weight.shape()[0], in = weight.shape()[1];
  const DType xt = x.type->dtype, wt = weight.type->dtype, yt = y.type->dtype;
  const bool canonical = tools.options.canonical;
  const size_t bias = has_scales(xt) ? 4 : 2;
  if (w.phase == Phase::kI)
    return launch_strips(tools, strips, &MixedKernels::linear_input,
                         kernels::MixedLinearInput{.dy = matrix_factor(op, 0),
                                                   .w = matrix_factor(op, 1),
                                                   .dx = stored(y),
                                                   .rows = rows,
                                                   .in = in,
                                                   .out = out,
                                                   .out_part = part_of(op, *weight.type, 0),
                                                   .canonical = canonical},
                         library_product(tools, xt, wt, {.rows = rows, .columns = in, .depth = out, .result = yt}),
                         [=](kernels::MixedLinearInput& a, int64_t from, int64_t to) {
                           a.dy = past(a.dy, from * out);
                           a.dx = past(a.dx, to * in);
                         });
  return launch_strips(tools, strips, &MixedKernels::linear_forward,
                       kernels::MixedLinearForward{.x = matrix_factor(op, 0),
                                                   .w = matrix_factor(op, 1),
                                                   .bias = w.bias ? stored(op.reads[bias]) : Stored{},
                                                   .y = stored(y),
                                                   .rows = rows,
                                                   .in = in,
                                                   .out = out,
                                                   .in_part = part_of(op, *weight.type, 1),
                                                   .canonical = canonical},
                       library_product(tools, xt, wt,
                                       {.rows = rows,
                                        .columns = out,
                                        .depth = in,
                                        .b_transposed = true,
                                        .result = yt,
                                        .bias = w.bias,
                                        .bias_type = w.bias ? op.reads[bias].type->dtype : DType::bf16}),
                       [=](kernels::MixedLinearForward& a, int64_t from, int64_t to) {
                         a.x = past(a.x, from * in);
                         a.y = past(a.y, to * out);
                       });
}

ScratchLaunch bind_work(const BoundOp& op, const Rope& w, const BindTools& tools) {
  const Type& qkv = *op.writes[0].type;
  const kernels::Tokens tokens = tokens_of(op, qkv);
  const int64_t begin = part_of(op, qkv, 1).begin;
  const DocumentPositions documents = document_positions(op, qkv);
  const kernels::MixedRope args{stored(op.writes[0]),
                                {.sequences = tokens.sequences,
                                 .tokens = tokens.tokens,
                                 .heads = w.heads,
                                 .kv_heads = w.kv_heads,
                                 .head_dim = w.head_dim,
                                 .position_begin = begin,
                                 .theta = w.theta,
                                 .backward = w.phase == Phase::kI,
                                 .table = op.rope_table,
                                 .positions = documents.first,
                                 .positions_stride = documents.stride}};
  return launch<kernels::MixedRope>(tools, &MixedKernels::rope, args);
}

ScratchLaunch bind_work(const BoundOp& op, const HeadNorm& w, const BindTools& tools) {
  if (w.over == SumOver::kSequences) return sum_sequences(op, w.accumulate, tools);
  const bool forward = w.phase == Phase::kF;
  const kernels::HeadNormShape shape{tokens_of(op, *op.reads[forward ? 0 : 1].type), w.heads, w.kv_heads, w.head_dim};
  if (forward)
    return launch<kernels::MixedHeadNormForward>(
        tools, &MixedKernels::head_norm_forward,
        {.qkv = stored(op.reads[0]),
         .gamma_q = stored(op.reads[1]),
         .gamma_k = stored(op.reads[2]),
         .y = stored(op.writes[0]),
         .norm = {.shape = shape, .stats = statistics(op.writes[1]), .epsilon = w.epsilon}});
  if (w.phase == Phase::kI)
    return launch<kernels::MixedHeadNormInput>(tools, &MixedKernels::head_norm_input,
                                               {.dy = stored(op.reads[0]),
                                                .qkv = stored(op.reads[1]),
                                                .gamma_q = stored(op.reads[2]),
                                                .gamma_k = stored(op.reads[3]),
                                                .dqkv = stored(op.writes[0]),
                                                .norm = {.shape = shape, .stats = statistics(op.reads[4])}});
  return launch<kernels::MixedHeadNormWeight>(tools, &MixedKernels::head_norm_weight,
                                              {.dy = stored(op.reads[0]),
                                               .qkv = stored(op.reads[1]),
                                               .dgamma_q = stored(op.writes[0]),
                                               .dgamma_k = stored(op.writes[1]),
                                               .norm = {.shape = shape,
                                                        .stats = statistics(op.reads[2]),
                                                        .accumulate = w.accumulate,
                                                        .apart = w.over == SumOver::kTokens ? op.writes[0].shape()[1] : 0}});
}

ScratchLaunch bind_work(const BoundOp& op, const LatentHeads& w, const BindTools& tools) {
  const bool back = w.phase == Phase::kI;
  const auto &rows = back ? op.writes : op.reads, &whole = back ? op.reads : op.writes;
  const Type& qkv = *whole[0].type;
  const kernels::Tokens tokens = tokens_of(op, qkv);
  const DocumentPositions documents = document_positions(op, qkv);
  return launch<kernels::MixedLatentHeads>(tools, &MixedKernels::latent_heads,
                                           {.q = stored(rows[0]),
                                            .kv = stored(rows[1]),
                                            .k_rope = stored(rows[2]),
                                            .qkv = stored(whole[0]),
                                            .heads = {.rows = tokens.tokens,
                                                      .heads = w.heads,
                                                      .nope = w.nope,
                                                      .rope = w.rope,
                                                      .values = w.v_dim,
                                                      .table = op.rope_table,
                                                      .positions = documents.first},
                                            .sequences = tokens.sequences,
                                            .positions_stride = documents.stride,
                                            .back = back});
}

ScratchLaunch bind_work(const BoundOp& op, const Attention& w, const BindTools& tools) {
  const kernels::AttentionShape shape = attention_shape(op, w, tools.options.canonical);
  if (w.phase == Phase::kF)
    return launch<kernels::MixedAttentionForward>(
        tools, &MixedKernels::attention_forward,
        {.shape = shape, .qkv = stored(op.reads[0]), .o = stored(op.writes[0]), .lse = statistics(op.writes[1])});
  return launch<kernels::MixedAttentionInput>(tools, &MixedKernels::attention_input,
                                              {.shape = shape,
                                               .dout = stored(op.reads[0]),
                                               .o = stored(op.reads[1]),
                                               .qkv = stored(op.reads[3]),
                                               .dqkv = stored(op.writes[0]),
                                               .lse = statistics(op.reads[2])});
}

ScratchLaunch bind_work(const BoundOp& op, const SplitHeads& w, const BindTools& tools) {
  const bool back = w.phase == Phase::kI;
  const Tensor &qkv = back ? op.writes[0] : op.reads[0], &q = back ? op.reads[0] : op.writes[0],
               &kv = back ? op.reads[1] : op.writes[1];
  return launch<kernels::MixedSplitHeads>(
      tools, &MixedKernels::split_heads,
      {stored(qkv), stored(q), stored(kv), rows_of(*qkv.type), w.heads, w.kv_heads, w.head_dim, value_dim_of(w), back});
}

ScratchLaunch bind_work(const BoundOp& op, const AttentionBlock& w, const BindTools& tools) {
  const kernels::AttentionBlockShape shape = block_shape(op, w, tools.options.canonical);
  if (w.phase == Phase::kF)
    return launch<kernels::MixedAttentionBlockForward>(tools, &MixedKernels::attention_block_forward,
                                                       {.shape = shape,
                                                        .q = stored(op.reads[0]),
                                                        .kv = stored(op.reads[1]),
                                                        .o = statistics(op.writes[0]),
                                                        .lse = w.partial ? nullptr : statistics(op.writes[1]),
                                                        .sums = w.partial ? statistics(op.writes[1]) : nullptr,
                                                        .carry = w.carry});
  return launch<kernels::MixedAttentionBlockInput>(tools, &MixedKernels::attention_block_input,
                                                   {.shape = shape,
                                                    .dout = stored(op.reads[0]),
                                                    .o = stored(op.reads[1]),
                                                    .q = stored(op.reads[3]),
                                                    .kv = stored(op.reads[4]),
                                                    .dq = stored(op.writes[0]),
                                                    .dkv = stored(op.writes[1]),
                                                    .lse = statistics(op.reads[2]),
                                                    .carry = w.carry,
                                                    .carry_kv = w.carry_kv,
                                                    .by_head = w.partial});
}

ScratchLaunch bind_work(const BoundOp& op, const AttentionMerge& w, const BindTools& tools) {
  const std::vector<size_t> order = merge_order(op, w);
  const Shape& y = op.writes[0].shape();
  const int parts = static_cast<int>(order.size());
  if (w.phase == Phase::kF) {
    kernels::MixedAttentionMergeForward args{{y[0], y[1], w.heads, value_dim_of(w), parts}, stored(op.writes[0])};
    for (size_t i = 0; i < order.size(); ++i) {
      args.merge.part_o[i] = statistics(op.reads[2 * order[i]]);
      args.merge.part_sums[i] = statistics(op.reads[2 * order[i] + 1]);
    }
    args.merge.lse = statistics(op.writes[1]);
    return launch<kernels::MixedAttentionMergeForward>(tools, &MixedKernels::attention_merge_forward, args);
  }
  kernels::MixedAttentionMergeInput args{
      {y[0] * y[1], w.heads, w.keys ? w.kv_heads : w.heads, w.head_dim + (w.keys ? value_dim_of(w) : int64_t{0}), parts},
      stored(op.writes[0])};
  for (size_t i = 0; i < order.size(); ++i) args.merge.part[i] = statistics(op.reads[order[i]]);
  return launch<kernels::MixedAttentionMergeInput>(tools, &MixedKernels::attention_merge_input, args);
}

ScratchLaunch bind_work(const BoundOp& op, const Dispatch& w, const BindTools& tools) {
  const Shape& choice = op.reads[1].shape();
  return launch<kernels::MixedDispatch>(tools, &MixedKernels::dispatch,
                                        {.from = stored(op.reads[0]),
                                         .to = stored(op.writes[0]),
                                         .dispatch = {.choice = op.reads[1].as<const int32_t>(),
                                                      .tokens = choice[0] * choice[1],
                                                      .top_k = choice[2],
                                                      .experts = w.experts,
                                                      .width = op.reads[0].shape().last(),
                                                      .back = w.phase == Phase::kI}});
}

ScratchLaunch bind_work(const BoundOp& op, const Combine& w, const BindTools& tools) {
  const bool forward = w.phase == Phase::kF;
  const Tensor& choice = op.reads[forward ? 2 : 3];
  const Shape& c = choice.shape();
  const int64_t tokens = c[0] * c[1], width = op.reads[0].shape().last();
  if (forward)
    return launch<kernels::MixedCombineForward>(tools, &MixedKernels::combine_forward,
                                                {.rows = stored(op.reads[0]),
                                                 .y = stored(op.writes[0]),
                                                 .combine = {.weights = statistics(op.reads[1]),
                                                             .choice = choice.as<const int32_t>(),
                                                             .tokens = tokens,
                                                             .top_k = c[2],
                                                             .experts = w.experts,
                                                             .width = width}});
  return launch<kernels::MixedCombineInput>(tools, &MixedKernels::combine_input,
                                            {.dy = stored(op.reads[0]),
                                             .rows = stored(op.reads[1]),
                                             .drows = stored(op.writes[0]),
                                             .combine = {.weights = statistics(op.reads[2]),
                                                         .choice = choice.as<const int32_t>(),
                                                         .dweights = statistics(op.writes[1]),
                                                         .tokens = tokens,
                                                         .top_k = c[2],
                                                         .experts = w.experts,
                                                         .width = width}});
}

ScratchLaunch bind_work(const BoundOp& op, const Gate& w, const BindTools& tools) {
  const Type& x = *op.reads[0].type;
  const int64_t tokens = rows_of(x), width = x.shape.last();
  if (w.phase == Phase::kF)
    return launch<kernels::MixedGateForward>(tools, &MixedKernels::gate_forward,
                                             {stored(op.reads[0]), stored(op.reads[1]), stored(op.writes[0]), tokens, width});
  return launch<kernels::MixedGateInput>(
      tools, &MixedKernels::gate_input,
      {stored(op.reads[0]), stored(op.reads[1]), stored(op.reads[2]), stored(op.writes[0]), stored(op.writes[1]), tokens, width});
}

ScratchLaunch bind_work(const BoundOp& op, const GroupedLinear& w, const BindTools& tools) {
  const kernels::RowCounts rows = row_counts(op.reads[2], op.reads[0], w.sources);
  if (w.phase == Phase::kW) {
    const Shape& dw = op.writes[0].shape();
    return launch<kernels::MixedGroupedLinearWeight>(
        tools, &MixedKernels::grouped_linear_weight,
        {.x = grouped_factor(op, 0, false),
         .dy = grouped_factor(op, 1, false),
         .dw = stored(op.writes[0]),
         .product = {.rows = rows, .in = dw[2], .out = dw[1], .accumulate = w.accumulate, .canonical = tools.options.canonical}});
  }
  const Shape& weight = op.reads[1].shape();
  const bool back = w.phase == Phase::kI;
  return launch<kernels::MixedGroupedLinear>(tools, &MixedKernels::grouped_linear,
                                             {.x = grouped_factor(op, 0, false),
                                              .w = grouped_factor(op, 1, true),
                                              .y = stored(op.writes[0]),
                                              .product = {.rows = rows,
                                                          .in = weight[2],
                                                          .out = weight[1],
                                                          .part = part_of(op, *op.reads[1].type, back ? 1 : 2),
                                                          .back = back,
                                                          .canonical = tools.options.canonical}});
}

ScratchLaunch bind_work(const BoundOp& op, const Activation& w, const BindTools& tools) {
  if (w.counted) {
    const bool forward = w.phase == Phase::kF;
    return launch<kernels::MixedGroupedActivation>(tools, &MixedKernels::grouped_activation,
                                                   {.u = stored(op.reads[forward ? 0 : 1]),
                                                    .da = forward ? Stored{} : stored(op.reads[0]),
                                                    .to = stored(op.writes[0]),
                                                    .rows = row_counts(op.reads.back(), op.reads[0], 1),
                                                    .width = (forward ? op.writes[0] : op.reads[0]).shape().last(),
                                                    .swiglu = w.swiglu});
  }
  if (w.phase == Phase::kF)
    return launch<kernels::MixedActivationForward>(
        tools, &MixedKernels::activation_forward,
        {stored(op.reads[0]), stored(op.writes[0]), op.writes[0].shape().elements(), w.swiglu});
  return launch<kernels::MixedActivationInput>(
      tools, &MixedKernels::activation_input,
      {stored(op.reads[0]), stored(op.reads[1]), stored(op.writes[0]), op.reads[0].shape().elements(), w.swiglu});
}

ScratchLaunch bind_work(const BoundOp& op, const Residual& w, const BindTools& tools) {
  const Type& x = *op.reads[0].type;
  const int64_t width = x.shape.last();
  if (w.phase == Phase::kF)
    return launch<kernels::MixedResidualForward>(tools, &MixedKernels::residual_forward,
                                                 {.x = stored(op.reads[0]),
                                                  .z = stored(op.reads[1]),
                                                  .bias = w.bias ? stored(op.reads[2]) : Stored{},
                                                  .y = stored(op.writes[0]),
                                                  .rows = rows_of(x),
                                                  .width = width});
  const kernels::MixedBiasWeight args{stored(op.reads[0]), stored(op.writes[0]), tokens_of(op, x), width, w.accumulate};
  if (w.over != SumOver::kTokens) return launch(tools, &MixedKernels::bias_weight, args);
  return by_sequence(tools, &MixedKernels::bias_weight, args, [](kernels::MixedBiasWeight& a, int64_t sequence) {
    a.dy = past(a.dy, sequence * a.tokens.tokens * a.width);
    a.dbias = past(a.dbias, sequence * a.width);
  });
}

ScratchLaunch bind_work(const BoundOp& op, const Dropout& w, const BindTools& tools) {
  const Type& z = *op.writes[0].type;
  const kernels::Part tokens = part_of(op, z, 1), width = part_of(op, z, 2);
  const kernels::MixedDropout args{stored(op.writes[0]),
                                   {.sequences = z.shape[0],
                                    .tokens = z.shape[1],
                                    .width = z.shape[2],
                                    .sequence_begin = op.first_sequence(z),
                                    .token_begin = tokens.begin,
                                    .tokens_total = tokens.total,
                                    .width_begin = width.begin,
                                    .width_total = width.total,
                                    .p = w.p,
                                    .key = {op.seed, RandomUse::kDropout, dropout_tensor(op, w), 0}}};
  return counted_launch(
      tools.kernels, args, [](const MixedKernels& k, const kernels::MixedDropout& a, kernels::Scratch& s) { k.dropout(a, s); },
      [](kernels::MixedDropout& a, const StepState& state) { a.dropout.key.step = static_cast<uint32_t>(state.step); });
}

ScratchLaunch bind_work(const BoundOp& op, const CrossEntropy& w, const BindTools& tools) {
  using Part = CrossEntropy::Part;
  using Form = kernels::MixedCrossEntropy::Form;
  const Type& logits = *op.reads[0].type;
  kernels::CrossEntropy loss{.tokens = tokens_of(op, logits),
                             .vocab = logits.shape.last(),
                             .vocab_part = part_of(op, logits, logits.shape.rank - 1),
                             .words = w.words,
                             .loss_tokens = w.tokens};
  if (w.part != Part::kMax) loss.targets = op.reads[1].as<const int32_t>();
  if (w.part == Part::kSum || w.part == Part::kGrad) loss.max = statistics(op.reads[2]);
  if (w.part == Part::kGrad) loss.sums = statistics(op.reads[3]);
  float* const written = statistics(op.writes[0]);
  (w.part == Part::kMax ? loss.max : w.part == Part::kSum ? loss.sums : loss.nll) = written;
  constexpr std::array<Form, 5> kForms{Form::kFused, Form::kLossOnly, Form::kMax, Form::kSum, Form::kGrad};
  const kernels::MixedCrossEntropy args{kForms[static_cast<size_t>(w.part)], stored(op.reads[0]), loss};
  const size_t operands = w.part == Part::kGrad ? 4 : 2;
  if (w.part == Part::kMax || op.reads.size() <= operands)
    return launch<kernels::MixedCrossEntropy>(tools, &MixedKernels::cross_entropy, args);
  return counted_launch(
      tools.kernels, args,
      [](const MixedKernels& k, const kernels::MixedCrossEntropy& a, kernels::Scratch& s) { k.cross_entropy(a, s); },
      [scale = statistics(op.reads[operands])](kernels::MixedCrossEntropy& a, const StepState&) { a.loss.loss_scale = *scale; });
}

// ---- sums and updates

ScratchLaunch bind_work(const BoundOp& op, const Add&, const BindTools& tools) {
  return launch<kernels::MixedAdd>(
      tools, &MixedKernels::add, {stored(op.reads[0]), stored(op.reads[1]), stored(op.writes[0]), op.writes[0].shape().elements()});
}

ScratchLaunch bind_work(const BoundOp& op, const Fill& w, const BindTools& tools) {
  return launch<kernels::MixedFill>(tools, &MixedKernels::fill, {stored(op.writes[0]), op.writes[0].shape().elements(), w.value});
}

ScratchLaunch bind_work(const BoundOp& op, const SquaredNorm&, const BindTools& tools) {
  struct Args {
    std::vector<std::pair<Stored, int64_t>> parts;
    double* total;
  };
  Args args{{}, op.writes[0].as<double>()};
  for (const Tensor& t : op.reads) args.parts.emplace_back(stored(t), t.shape().elements());
  return counted_launch(tools.kernels, args, [](const MixedKernels& k, const Args& a, kernels::Scratch& s) {
    double total = 0;
    int64_t most = 0;
    for (const auto& [x, n] : a.parts) {
      double part = 0;
      kernels::Scratch shared = s;  // one block serves all
      k.squared_norm({x, n, &part}, shared);
      most = std::max(most, shared.used() - s.used());
      total += part;
    }
    s.take_bytes(most);
    if (!s.counting()) *a.total = total;
  });
}

/// The factor of the gradient is read when the update runs; one that counts makes room for the scaled block.
template <class Args>
ScratchLaunch launch_update(const BindTools& tools, void (MixedKernels::*kernel)(const Args&, kernels::Scratch&) const, Args args,
                            const float* factor, void (*set)(Args&, const StepState&)) {
  if (factor != nullptr) args.factor = 0;
  return counted_launch(
      tools.kernels, args, [kernel](const MixedKernels& k, const Args& a, kernels::Scratch& s) { (k.*kernel)(a, s); },
      [factor, set](Args& a, const StepState& state) {
        if (factor != nullptr) a.factor = *factor;
        set(a, state);
      });
}

const float* factor_of(const BoundOp& op, size_t operands) {
  return op.reads.size() > operands ? op.reads[operands].as<const float>() : nullptr;
}

ScratchLaunch bind_work(const BoundOp& op, const Sgd& w, const BindTools& tools) {
  kernels::MixedSgd args;
  args.grad = stored(op.reads[0]);
  args.param = stored(op.writes[0]);
  args.sgd = {.n = op.writes[0].shape().elements(), .weight_decay = w.weight_decay};
  return launch_update<kernels::MixedSgd>(
      tools, &MixedKernels::sgd, args, factor_of(op, 2),
      [](kernels::MixedSgd& a, const StepState& state) { a.sgd.learning_rate = state.learning_rate; });
}

ScratchLaunch bind_work(const BoundOp& op, const AdamW& w, const BindTools& tools) {
  kernels::MixedAdamW args;
  args.grad = stored(op.reads[0]);
  args.param = stored(op.writes[0]);
  args.m = stored(op.writes[1]);
  args.v = stored(op.writes[2]);
  args.adamw = {.n = op.writes[0].shape().elements(),
                .beta1 = w.beta1,
                .beta2 = w.beta2,
                .epsilon = w.epsilon,
                .weight_decay = w.weight_decay};
  return launch_update<kernels::MixedAdamW>(tools, &MixedKernels::adamw, args, factor_of(op, 4),
                                            [](kernels::MixedAdamW& a, const StepState& state) {
                                              a.adamw.step = state.applied;
                                              a.adamw.learning_rate = state.learning_rate;
                                            });
}

ScratchLaunch bind_work(const BoundOp& op, const Lion& w, const BindTools& tools) {
  kernels::MixedLion args;
  args.grad = stored(op.reads[0]);
  args.param = stored(op.writes[0]);
  args.m = stored(op.writes[1]);
  args.lion = {.n = op.writes[0].shape().elements(), .beta1 = w.beta1, .beta2 = w.beta2, .weight_decay = w.weight_decay};
  return launch_update<kernels::MixedLion>(
      tools, &MixedKernels::lion, args, factor_of(op, 3),
      [](kernels::MixedLion& a, const StepState& state) { a.lion.learning_rate = state.learning_rate; });
}

ScratchLaunch bind_work(const BoundOp& op, const AdamW8bit& w, const BindTools& tools) {
  kernels::MixedAdamW8bit args;
  args.grad = stored(op.reads[0]);
  args.param = stored(op.writes[0]);
  args.m = op.writes[1].as<uint8_t>();
  args.v = op.writes[2].as<uint8_t>();
  args.m_scale = op.writes[3].as<float>();
  args.v_scale = op.writes[4].as<float>();
  args.adamw = {.n = op.writes[0].shape().elements(),
                .beta1 = w.beta1,
                .beta2 = w.beta2,
                .epsilon = w.epsilon,
                .weight_decay = w.weight_decay};
  return launch_update<kernels::MixedAdamW8bit>(tools, &MixedKernels::adamw8bit, args, factor_of(op, 6),
                                                [](kernels::MixedAdamW8bit& a, const StepState& state) {
                                                  a.adamw.step = state.applied;
                                                  a.adamw.learning_rate = state.learning_rate;
                                                });
}

ScratchLaunch bind_work(const BoundOp& op, const Copy&, const BindTools& tools) {
  return launch<kernels::MixedCopy>(tools, &MixedKernels::copy,
                                    {stored(op.reads[0]), stored(op.writes[0]), op.writes[0].shape().elements()});
}

template <class Other>
Result<ScratchLaunch> bind_work(const BoundOp& op, const Other&, const BindTools&) {
  return Error{ExitCode::kUsage, fmt::format("`{}` has no form on narrow storage", describe(*op.plan, *op.instruction)),
               "convert its operands to f32 with a copy before", ""};
}

// ---- which types go where

/// Operands with one type only: reads and writes by index, -1 ending each list.
struct FixedOperands {
  std::vector<size_t> reads, writes;
  DType type = DType::f32;
};

FixedOperands statistics_of(const Work& work) {
  if (const auto* w = std::get_if<Norm>(&work); w != nullptr && w->over != SumOver::kSequences)
    return w->phase == Phase::kF ? FixedOperands{{}, {1}} : w->phase == Phase::kI ? FixedOperands{{3}, {}} : FixedOperands{{2}, {}};
  if (const auto* w = std::get_if<HeadNorm>(&work); w != nullptr && w->over != SumOver::kSequences)
    return w->phase == Phase::kF ? FixedOperands{{}, {1}} : w->phase == Phase::kI ? FixedOperands{{4}, {}} : FixedOperands{{2}, {}};
  if (const auto* w = std::get_if<Attention>(&work)) return w->phase == Phase::kF ? FixedOperands{{}, {1}} : FixedOperands{{2}, {}};
  if (const auto* w = std::get_if<AttentionBlock>(&work))
    return w->phase == Phase::kF ? FixedOperands{{2, 3}, {0, 1}} : w->partial ? FixedOperands{{2}, {1}} : FixedOperands{{2}, {}};
  if (const auto* w = std::get_if<CrossEntropy>(&work))
    return w->part == CrossEntropy::Part::kGrad  ? FixedOperands{{2, 3, 4}, {0}}
           : w->part == CrossEntropy::Part::kMax ? FixedOperands{{}, {0}}
                                                 : FixedOperands{{2}, {0}};
  if (const auto* w = std::get_if<Combine>(&work)) return w->phase == Phase::kF ? FixedOperands{{1}, {}} : FixedOperands{{2}, {1}};
  if (std::holds_alternative<SquaredNorm>(work)) return {{}, {0}, DType::f64};
  if (const OptimizerRow* row = update_of(work)) return {{update_operands(*row)}, {}};
  return {};
}

/// Reads that hold token ids or targets, choices of experts, or counts of their rows.
std::vector<size_t> ids_of(const Work& work) {
  if (const auto* w = std::get_if<Combine>(&work)) return {w->phase == Phase::kF ? size_t{2} : size_t{3}};
  if (std::holds_alternative<Dispatch>(work)) return {1};
  if (std::holds_alternative<GroupedLinear>(work)) return {2};
  if (const auto* w = std::get_if<Activation>(&work); w != nullptr && w->counted)
    return {w->phase == Phase::kF ? size_t{1} : size_t{2}};
  if (std::holds_alternative<Embed>(work)) return {0};
  if (const auto* w = std::get_if<CrossEntropy>(&work); w != nullptr && w->part != CrossEntropy::Part::kMax) return {1};
  return {};
}

Result<void> check_mixed_types(const BoundOp& op) {
  const auto check = [&](const Tensor& t, bool good, std::string_view wanted) -> Result<void> {
    if (good) return {};
    return Error{ExitCode::kUsage,
                 fmt::format("`{}` has an operand of {} where the CPU back end takes {}", describe(*op.plan, *op.instruction),
                             name_of(t.type->dtype), wanted),
                 "give the buffer that type, or convert it with a copy before", ""};
  };
  const FixedOperands fixed = statistics_of(op.op().work);
  std::vector<size_t> ids = ids_of(op.op().work);
  if (const auto positions = positions_read(op.op())) ids.push_back(*positions);
  if (const OptimizerRow* row = update_of(op.op().work); row != nullptr && has_blocks(*row)) {  // whose state has types of its own
    for (size_t i = 0; i < row->state.size(); ++i)
      SHARDLAB_TRY(check(op.reads[2 + i], op.reads[2 + i].type->dtype == row->state[i].dtype, name_of(row->state[i].dtype)));
    for (const size_t i : {size_t{0}, size_t{1}})
      SHARDLAB_TRY(check(op.reads[i], kernels::is_float_storage(op.reads[i].type->dtype), "f32, bf16 or f16"));
    return {};
  }
  const auto check_one = [&](const Tensor& t, bool is_fixed, bool is_id) -> Result<void> {
    const DType type = t.type->dtype;
    if (is_id) return check(t, type == DType::i32, "i32");
    if (is_fixed) return check(t, type == fixed.type, name_of(fixed.type));
    return check(t, kernels::is_float_storage(type), "f32, bf16, f16, f8e4m3 or f8e5m2");
  };
  const auto has = [](const std::vector<size_t>& list, size_t i) { return std::ranges::find(list, i) != list.end(); };
  for (size_t i = 0; i < op.reads.size(); ++i) SHARDLAB_TRY(check_one(op.reads[i], has(fixed.reads, i), has(ids, i)));
  for (size_t i = 0; i < op.writes.size(); ++i) SHARDLAB_TRY(check_one(op.writes[i], has(fixed.writes, i), false));
  return {};
}

/// An op in place updates what it reads: the write must lie there, in the same type.
void check_in_place(const BoundOp& op) {
  const Work& work = op.op().work;
  const auto check = [&](size_t write, size_t read) {
    SHARDLAB_CHECK(op.writes[write].data == op.reads[read].data && op.writes[write].type->dtype == op.reads[read].type->dtype,
                   "`{}` writes beside what it should update in place", describe(*op.plan, *op.instruction));
  };
  // Accumulating ops have the old values as their last reads.
  const bool accumulates = std::visit(
      []<class W>(const W& w) {
        if constexpr (requires { w.accumulate; })
          return w.accumulate;
        else
          return false;
      },
      work);
  for (size_t i = 0; accumulates && i < op.writes.size(); ++i) check(i, op.reads.size() - op.writes.size() + i);
  if (std::holds_alternative<Rope>(work) || std::holds_alternative<Dropout>(work)) check(0, 0);
  if (const auto* w = std::get_if<Linear>(&work); w != nullptr && w->carry) check(0, op.reads.size() - 1);
  if (const auto* w = std::get_if<AttentionBlock>(&work); w != nullptr && w->phase == Phase::kI) {
    if (w->carry) check(0, 5);
    if (w->carry_kv) check(1, w->carry ? 6 : 5);
  } else if (w != nullptr && w->carry) {
    check(0, 2);
    check(1, 3);
  }
  if (const OptimizerRow* row = update_of(work))
    for (size_t i = 0; i <= row->state.size(); ++i) check(i, 1 + i);
  if (const auto* w = std::get_if<CrossEntropy>(&work))
    if (w->part == CrossEntropy::Part::kFused || w->part == CrossEntropy::Part::kGrad) check(1, 0);
}

}  // namespace

bool is_mixed(const BoundOp& op) {
  const auto narrow = [](const Tensor& t) { return is_narrow(t.type->dtype); };
  const Work& work = op.op().work;
  if (const OptimizerRow* row = update_of(work); row != nullptr && (has_blocks(*row) || op.reads.size() > update_operands(*row)))
    return true;
  if (std::holds_alternative<Copy>(work) && op.reads[0].type->dtype == op.writes[0].type->dtype) return false;
  return std::ranges::any_of(op.reads, narrow) || std::ranges::any_of(op.writes, narrow);
}

Result<ScratchLaunch> bind_mixed(const BoundOp& op, const BindTools& tools) {
  SHARDLAB_TRY(check_mixed_types(op));
  check_in_place(op);
  return std::visit([&](const auto& work) -> Result<ScratchLaunch> { return bind_work(op, work, tools); }, op.op().work);
}

}  // namespace shardlab::runtime
