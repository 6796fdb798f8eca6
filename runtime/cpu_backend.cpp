// Binds ops to kernels. One function per op; each turns operand types into the kernel's argument struct once, and returns a
// launch that only calls the kernel. What a rank holds of a logical tensor follows from the operand's type and the rank's place.
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "kernels/experts.h"
#include "kernels/head_norm.h"
#include "kernels/kernels.h"
#include "kernels/regroup.h"
#include "plan/base/check.h"
#include "plan/work.h"
#include "runtime/backend.h"
#include "runtime/mixed_ops.h"
#include "runtime/named_kernels.h"
#include "runtime/operands.h"
#include "runtime/own_part.h"
#include "runtime/positions.h"
#include "runtime/reduction.h"

#ifdef _OPENMP
#include <omp.h>
#endif

namespace shardlab::runtime {

namespace {

const float* floats(const Tensor& t) { return t.as<const float>(); }
float* mutable_floats(const Tensor& t) { return t.as<float>(); }

class CpuBackend final : public Backend {
 public:
  CpuBackend(const kernels::Kernels& kernels, const CpuOptions& options) : k_(kernels), options_(options) {}

  std::string_view name() const override { return "cpu"; }
  bool has_storage() const override { return true; }
  Result<Launch> bind(const BoundOp& op) override;
  void enter_thread(int stream) override;
  int threads() const override { return options_.threads_per_rank; }

 private:
  Launch bind_work(const BoundOp& op, const LoadBatch& w);
  Launch bind_work(const BoundOp& op, const Embed& w);
  Launch bind_work(const BoundOp& op, const Positions& w);
  Launch bind_packed(const BoundOp& op, const Positions& w);
  Launch bind_work(const BoundOp& op, const Norm& w);
  Launch bind_work(const BoundOp& op, const Linear& w);
  Launch bind_work(const BoundOp& op, const Rope& w);
  Launch bind_work(const BoundOp& op, const HeadNorm& w);
  Launch bind_work(const BoundOp& op, const Attention& w);
  Launch bind_work(const BoundOp& op, const AttentionBlock& w);
  Launch bind_work(const BoundOp& op, const AttentionMerge& w);
  Launch bind_work(const BoundOp& op, const Regroup& w);
  Launch bind_work(const BoundOp& op, const Strips& w);
  Launch bind_work(const BoundOp& op, const Activation& w);
  Launch bind_work(const BoundOp& op, const Route& w);
  Launch bind_work(const BoundOp& op, const ChooseExperts& w);
  Launch bind_work(const BoundOp& op, const ExpertLoad& w);
  Launch bind_work(const BoundOp& op, const Dispatch& w);
  Launch bind_work(const BoundOp& op, const GroupedLinear& w);
  Launch bind_work(const BoundOp& op, const Combine& w);
  Launch bind_work(const BoundOp& op, const Gate& w);
  Launch bind_work(const BoundOp& op, const Residual& w);
  Launch bind_work(const BoundOp& op, const Dropout& w);
  Launch bind_work(const BoundOp& op, const CrossEntropy& w);
  Launch bind_work(const BoundOp& op, const Add& w);
  Launch bind_work(const BoundOp& op, const Fill& w);
  Launch bind_work(const BoundOp& op, const SumScalars& w);
  Launch bind_work(const BoundOp& op, const SquaredNorm& w);
  Launch bind_work(const BoundOp& op, const Sgd& w);
  Launch bind_work(const BoundOp& op, const AdamW& w);
  Launch bind_work(const BoundOp& op, const Lion& w);
  Launch bind_work(const BoundOp& op, const Copy& w);
  /// Kernels are bound by name; collectives and messages are the transport's.
  template <class Other>
  Launch bind_work(const BoundOp& op, const Other&) {
    SHARDLAB_CHECK(false, "`{}` is not for a back end", describe(*op.plan, *op.instruction));
  }

  /// A launch of `kernel` with `args`, which needs `bytes` of the stream's workspace: ops of a stream never overlap.
  template <class Args>
  static Launch with_scratch(const BoundOp& op, void (*kernel)(const Args&), Args args, int64_t bytes) {
    SHARDLAB_CHECK(bytes <= static_cast<int64_t>(op.workspace.size()), "`{}` needs {} bytes of scratch and its stream has {}",
                   describe(*op.plan, *op.instruction), bytes, op.workspace.size());
    args.scratch = op.workspace.data();
    return [kernel, args](const StepState&) { kernel(args); };
  }
  /// The same for a kernel that calls others of the table.
  template <class Args>
  Launch with_scratch(const BoundOp& op, void (*kernel)(const kernels::Kernels&, const Args&), Args args, int64_t bytes) const {
    SHARDLAB_CHECK(bytes <= static_cast<int64_t>(op.workspace.size()), "`{}` needs {} bytes of scratch and its stream has {}",
                   describe(*op.plan, *op.instruction), bytes, op.workspace.size());
    args.scratch = op.workspace.data();
    return [kernel, args, &k = k_](const StepState&) { kernel(k, args); };
  }
  /// A kernel that calls others of the table and needs no scratch.
  template <class Args>
  Launch with_table(void (*kernel)(const kernels::Kernels&, const Args&), const Args& args) const {
    return [kernel, args, &k = k_](const StepState&) { kernel(k, args); };
  }
  template <class Args, class Move>
  static Launch by_sequence(void (*kernel)(const Args&), Args args, kernels::Tokens tokens, Move move);
  Launch sum_sequences(const BoundOp& op, bool accumulate);
  /// A product of each sequence's strip; `move` takes the operands to the first row that is read and the first that is written.
  template <class Args, class Move>
  Launch in_strips(const BoundOp& op, const StripRows& strips, void (*kernel)(const Args&), const Args& args, Move move) {
    const int64_t scratch = kernels::linear_scratch_bytes(args);
    std::vector<Launch> each;
    for (int64_t b = 0; b < strips.sequences; ++b) {
      Args one = args;
      move(one, strips.read + b * strips.read_step, strips.written + b * strips.written_step);
      each.push_back(with_scratch(op, kernel, one, scratch));
    }
    if (each.size() == 1) return each[0];
    return [each = std::move(each)](const StepState& state) {
      for (const Launch& one : each) one(state);
    };
  }
  /// The tools of mixed ops and named kernels.
  BindTools tools() const { return {k_, options_}; }
  Result<Launch> lend_scratch(const BoundOp& op, Result<ScratchLaunch> bound);
  /// Has the rank's table of rotations filled before the first op.
  void want_rope_table(const BoundOp& op, int width, float theta);

  const kernels::Kernels& k_;
  const CpuOptions options_;
  std::map<float*, std::function<void()>> fill_rope_tables_;  ///< by table; none without rotary ops
};

template <class Args>
Launch launch(void (*kernel)(const Args&), const Args& args) {
  return [kernel, args](const StepState&) { kernel(args); };
}

Result<void> check_types(const BoundOp& op) {
  const auto refuse = [&](const Type& type) -> Result<void> {
    return Error{ExitCode::kUsage,
                 fmt::format("`{}` has an operand of {}; the CPU back end computes in f32", describe(*op.plan, *op.instruction),
                             name_of(type.dtype)),
                 "convert it with a copy before", ""};
  };
  const Work& work = op.op().work;
  const bool wide = std::holds_alternative<SquaredNorm>(work) || std::holds_alternative<Add>(work);  // have fp64 forms
  const auto known = [&](DType t) { return t == DType::f32 || t == DType::i32 || (wide && t == DType::f64); };
  for (const Tensor& t : op.reads)
    if (!known(t.type->dtype)) return refuse(*t.type);
  for (const Tensor& t : op.writes)
    if (!known(t.type->dtype)) return refuse(*t.type);
  return {};
}

Result<Launch> CpuBackend::bind(const BoundOp& op) {
  if (const Kernel* kernel = std::get_if<Kernel>(&op.op().work)) return lend_scratch(op, bind_named(op, *kernel, tools()));
  if (const Rope* rope = std::get_if<Rope>(&op.op().work)) want_rope_table(op, rope->head_dim, rope->theta);
  if (const LatentHeads* latent = std::get_if<LatentHeads>(&op.op().work)) want_rope_table(op, latent->rope, latent->theta);
  if (const Regroup* regroup = std::get_if<Regroup>(&op.op().work)) return bind_work(op, *regroup);
  if (const Strips* strips = std::get_if<Strips>(&op.op().work)) return bind_work(op, *strips);
  if (is_mixed(op) || std::holds_alternative<SplitHeads>(op.op().work) || std::holds_alternative<LatentHeads>(op.op().work))
    return lend_scratch(op, bind_mixed(op, tools()));
  const bool copies = std::holds_alternative<Copy>(op.op().work);
  if (copies && op.reads[0].type->dtype != op.writes[0].type->dtype)
    return Error{ExitCode::kUsage,
                 fmt::format("`{}` converts {} to {}, which the CPU back end does not", describe(*op.plan, *op.instruction),
                             name_of(op.reads[0].type->dtype), name_of(op.writes[0].type->dtype)),
                 "copy between floating-point types, or to the same type", ""};
  if (!copies) SHARDLAB_TRY(check_types(op));
  return std::visit([&](const auto& work) { return bind_work(op, work); }, op.op().work);
}

Result<Launch> CpuBackend::lend_scratch(const BoundOp& op, Result<ScratchLaunch> bound) {
  if (!bound.ok()) return bound.error();
  ScratchLaunch launch = std::move(bound).value();
  void* scratch = op.workspace.data();
  std::shared_ptr<std::vector<std::byte>> own;
  if (launch.scratch_bytes > static_cast<int64_t>(op.workspace.size())) {
    SHARDLAB_CHECK(std::holds_alternative<Kernel>(op.op().work), "`{}` needs {} bytes of scratch and its stream has {}",
                   describe(*op.plan, *op.instruction), launch.scratch_bytes, op.workspace.size());
    // A plan cannot know scratch that a kernel by name wants beyond `scratch_bytes`: it is unplanned memory.
    size_t space = static_cast<size_t>(launch.scratch_bytes + kAlignment);
    own = std::make_shared<std::vector<std::byte>>(space);
    scratch = own->data();
    std::align(kAlignment, static_cast<size_t>(launch.scratch_bytes), scratch, space);
  }
  return Launch([run = std::move(launch.run), scratch, own](const StepState& state) mutable { run(state, scratch); });
}

void CpuBackend::want_rope_table(const BoundOp& op, int width, float theta) {
  const Type& qkv = *op.writes[0].type;
  SHARDLAB_CHECK(op.rope_table != nullptr, "`{}` has no table: the role lacks `rope.table`", describe(*op.plan, *op.instruction));
  fill_rope_tables_[op.rope_table] = [rows = rope_rows(op, qkv), width, theta, table = op.rope_table] {
    kernels::rope_table(rows.begin, rows.count, width, theta, table, rows.order, rows.total);
  };
}

void CpuBackend::enter_thread(int stream) {
#ifdef _OPENMP
  omp_set_num_threads(options_.threads_per_rank);
#endif
  if (stream != 0) return;
  for (const auto& [table, fill] : fill_rope_tables_) fill();
}

// ---- input and embeddings

Launch CpuBackend::bind_work(const BoundOp& op, const LoadBatch& w) {
  return [rows = BatchRows(op, w), to = op.writes[0].as<int32_t>()](const StepState& state) { rows.read(state.step, to); };
}

Launch CpuBackend::bind_work(const BoundOp& op, const Embed& w) {
  const Tensor& ids = op.reads[0];
  if (w.phase == Phase::kF) {
    const Type& table = *op.reads[1].type;
    return launch(k_.embed_forward, kernels::EmbedForward{.ids = ids.as<const int32_t>(),
                                                          .table = floats(op.reads[1]),
                                                          .x = mutable_floats(op.writes[0]),
                                                          .rows = ids.shape().elements(),
                                                          .width = table.shape[1],
                                                          .row_begin = part_of(op, table, 0).begin,
                                                          .table_rows = table.shape[0]});
  }
  const Type& table = *op.writes[0].type;
  if (w.accumulate) check_in_place(op, op.writes[0], op.reads[2]);
  const kernels::Tokens tokens = tokens_of(op, *op.reads[1].type);
  const kernels::EmbedWeight args{.ids = ids.as<const int32_t>(),
                                  .dx = floats(op.reads[1]),
                                  .dtable = mutable_floats(op.writes[0]),
                                  .sequences = tokens.sequences,
                                  .tokens = tokens.tokens,
                                  .width = table.shape[1],
                                  .row_begin = part_of(op, table, 0).begin,
                                  .table_rows = table.shape[0],
                                  .accumulate = w.accumulate,
                                  .part = tokens.part};
  return with_scratch(op, k_.embed_weight, args, kernels::embed_scratch_bytes(args));
}

/// A token takes the row of its position: where positions are consecutive, one call takes the rows of all.
Launch CpuBackend::bind_work(const BoundOp& op, const Positions& w) {
  if (w.packed) return bind_packed(op, w);
  const Type& x = *op.reads[0].type;
  const int64_t sequences = x.shape[0], tokens = x.shape[1], width = x.shape.last();
  if (w.phase == Phase::kF) {
    std::vector<kernels::PositionsForward> calls;
    for_positions(op, x, [&](int64_t first, int64_t n, int64_t position) {
      const bool whole = n == tokens;
      for (int64_t b = 0; b < (whole ? 1 : sequences); ++b) {
        const int64_t at = (b * tokens + first) * width;
        calls.push_back({floats(op.reads[0]) + at, floats(op.reads[1]) + position * width, mutable_floats(op.writes[0]) + at,
                         whole ? sequences : 1, n, width});
      }
    });
    return [kernel = k_.positions_forward, calls](const StepState&) {
      for (const auto& args : calls) kernel(args);
    };
  }
  if (w.accumulate) check_in_place(op, op.writes[0], op.reads[1]);
  std::vector<kernels::PositionsWeight> calls;
  for_positions(op, x, [&](int64_t first, int64_t n, int64_t position) {
    calls.push_back({floats(op.reads[0]) + first * width, mutable_floats(op.writes[0]) + position * width, sequences, n, width,
                     w.accumulate, tokens * width});
  });
  // Positions of which no token is here have a gradient of 0.
  const int64_t rows = op.writes[0].shape()[0];
  std::vector<std::pair<int64_t, int64_t>> gaps;  // first element, number
  std::vector<std::pair<int64_t, int64_t>> runs;
  for_positions(op, x, [&](int64_t, int64_t n, int64_t position) { runs.emplace_back(position, position + n); });
  std::ranges::sort(runs);
  int64_t at = 0;
  for (const auto& [begin, end] : runs) {
    if (begin > at) gaps.emplace_back(at * width, (begin - at) * width);
    at = end;
  }
  if (at < rows) gaps.emplace_back(at * width, (rows - at) * width);
  if (w.accumulate) gaps.clear();
  return [weight = k_.positions_weight, fill = k_.fill, calls, gaps, table = mutable_floats(op.writes[0])](const StepState&) {
    for (const auto& args : calls) weight(args);
    for (const auto& [first, n] : gaps) fill(table + first, n, 0.0f);
  };
}

/// Positions in documents are known when the batch is there. Backward a row of the table is a row of an embedding by positions.
Launch CpuBackend::bind_packed(const BoundOp& op, const Positions& w) {
  const auto [documents, width, rows] = packed_positions(op, w);
  const kernels::Tokens tokens = tokens_of(op, *op.reads[0].type);
  if (w.phase == Phase::kF)
    return [kernel = k_.positions_forward, documents = documents, tokens, width = width, rows = rows, x = floats(op.reads[0]),
            table = floats(op.reads[1]), y = mutable_floats(op.writes[0])](const StepState&) {
      for_document_runs(documents, tokens.sequences, tokens.tokens, rows, [&](int64_t first, int64_t n, int64_t position) {
        kernel({x + first * width, table + position * width, y + first * width, 1, n, width});
      });
    };
  if (w.accumulate) check_in_place(op, op.writes[0], op.reads[2]);
  kernels::EmbedWeight args{.dx = floats(op.reads[0]),
                            .dtable = mutable_floats(op.writes[0]),
                            .sequences = tokens.sequences,
                            .tokens = tokens.tokens,
                            .width = width,
                            .table_rows = rows,
                            .accumulate = w.accumulate,
                            .part = tokens.part};
  const int64_t ids = aligned(4 * tokens.rows()), bytes = ids + kernels::embed_scratch_bytes(args);
  SHARDLAB_CHECK(bytes <= static_cast<int64_t>(op.workspace.size()), "`{}` needs {} bytes of scratch and its stream has {}",
                 describe(*op.plan, *op.instruction), bytes, op.workspace.size());
  auto* const taken = reinterpret_cast<int32_t*>(op.workspace.data());
  args.ids = taken;
  args.scratch = op.workspace.data() + ids;
  return [kernel = k_.embed_weight, args, documents = documents, taken](const StepState&) {
    copy_positions(documents, args.sequences, args.tokens, taken);
    kernel(args);
  };
}

// ---- the layers

Launch CpuBackend::bind_work(const BoundOp& op, const Norm& w) {
  if (w.accumulate)
    for (size_t i = 0; i < op.writes.size(); ++i)
      check_in_place(op, op.writes[i], op.reads[op.reads.size() - op.writes.size() + i]);
  if (w.over == SumOver::kSequences) return sum_sequences(op, w.accumulate);
  const Type& x = *op.reads[w.phase == Phase::kF ? 0 : 1].type;
  const int64_t rows = rows_of(x), width = x.shape.last();
  switch (w.phase) {
    case Phase::kF:
      return launch(k_.norm_forward, kernels::NormForward{.x = floats(op.reads[0]),
                                                          .gamma = floats(op.reads[1]),
                                                          .beta = w.rms ? nullptr : floats(op.reads[2]),
                                                          .y = mutable_floats(op.writes[0]),
                                                          .stats = mutable_floats(op.writes[1]),
                                                          .rows = rows,
                                                          .width = width,
                                                          .epsilon = w.epsilon,
                                                          .rms = w.rms});
    case Phase::kI:
      return launch(k_.norm_input, kernels::NormInput{.dy = floats(op.reads[0]),
                                                      .x = floats(op.reads[1]),
                                                      .gamma = floats(op.reads[2]),
                                                      .stats = floats(op.reads[3]),
                                                      .residual = w.residual ? floats(op.reads[4]) : nullptr,
                                                      .dx = mutable_floats(op.writes[0]),
                                                      .rows = rows,
                                                      .width = width,
                                                      .rms = w.rms});
    default: break;
  }
  const kernels::NormWeight args{.dy = floats(op.reads[0]),
                                 .x = floats(op.reads[1]),
                                 .stats = floats(op.reads[2]),
                                 .dgamma = mutable_floats(op.writes[0]),
                                 .dbeta = w.rms ? nullptr : mutable_floats(op.writes[1]),
                                 .tokens = tokens_of(op, x),
                                 .width = width,
                                 .rms = w.rms,
                                 .accumulate = w.accumulate};
  if (w.over == SumOver::kAll) return launch(k_.norm_weight, args);
  return by_sequence(k_.norm_weight, args, args.tokens, [](kernels::NormWeight& a, int64_t sequence) {
    const int64_t row = sequence * a.tokens.tokens;
    a.dy += row * a.width;
    a.x += row * a.width;
    a.stats += row * (a.rms ? 1 : 2);
    a.dgamma += sequence * a.width;
    if (!a.rms) a.dbeta += sequence * a.width;
  });
}

/// A launch of the kernel for each sequence; `move` takes its operands to a sequence.
template <class Args, class Move>
Launch CpuBackend::by_sequence(void (*kernel)(const Args&), Args args, kernels::Tokens tokens, Move move) {
  args.tokens.sequences = 1;
  return [kernel, args, n = tokens.sequences, move](const StepState&) {
    for (int64_t i = 0; i < n; ++i) {
      Args one = args;
      move(one, i);
      kernel(one);
    }
  };
}

/// Each write is the sum over sequences of the read beside it: to a sum over tokens a sequence is one token.
Launch CpuBackend::sum_sequences(const BoundOp& op, bool accumulate) {
  std::vector<kernels::BiasWeight> sums;
  for (size_t i = 0; i < op.writes.size(); ++i)
    sums.push_back({floats(op.reads[i]), mutable_floats(op.writes[i]), tokens_of(op, *op.reads[i].type), op.reads[i].shape().last(),
                    accumulate});
  return [kernel = k_.bias_weight, sums](const StepState&) {
    for (const kernels::BiasWeight& sum : sums) kernel(sum);
  };
}

Launch CpuBackend::bind_work(const BoundOp& op, const Linear& w) {
  const bool canonical = options_.canonical;
  if (w.phase == Phase::kW) {
    const Type& x = *op.reads[0].type;
    const kernels::LinearWeight args{.x = floats(op.reads[0]),
                                     .dy = floats(op.reads[1]),
                                     .dw = mutable_floats(op.writes[0]),
                                     .dbias = w.bias ? mutable_floats(op.writes[1]) : nullptr,
                                     .tokens = tokens_of(op, x),
                                     .in = x.shape.last(),
                                     .out = op.reads[1].shape().last(),
                                     .accumulate = w.accumulate,
                                     .canonical = canonical};
    if (w.accumulate)
      for (size_t i = 0; i < op.writes.size(); ++i) check_in_place(op, op.writes[i], op.reads[2 + i]);
    return with_scratch(op, k_.linear_weight, args, kernels::linear_scratch_bytes(args));
  }
  const Tensor& weight = op.reads[1];
  const StripRows strips = strip_rows(op, w);
  const int64_t rows = strips.rows, out = weight.shape()[0], in = weight.shape()[1];
  if (w.carry) check_in_place(op, op.writes[0], op.reads.back());
  if (w.phase == Phase::kI) {
    const kernels::LinearInput args{.dy = floats(op.reads[0]),
                                    .w = floats(weight),
                                    .dx = mutable_floats(op.writes[0]),
                                    .rows = rows,
                                    .in = in,
                                    .out = out,
                                    .out_part = part_of(op, *weight.type, 0),
                                    .canonical = canonical};
    return in_strips(op, strips, k_.linear_input, args, [=](kernels::LinearInput& a, int64_t from, int64_t to) {
      a.dy += from * out;
      a.dx += to * in;
    });
  }
  const kernels::LinearForward args{.x = floats(op.reads[0]),
                                    .w = floats(weight),
                                    .bias = w.bias ? floats(op.reads[2]) : nullptr,
                                    .y = mutable_floats(op.writes[0]),
                                    .rows = rows,
                                    .in = in,
                                    .out = out,
                                    .in_part = part_of(op, *weight.type, 1),
                                    .canonical = canonical};
  return in_strips(op, strips, k_.linear_forward, args, [=](kernels::LinearForward& a, int64_t from, int64_t to) {
    a.x += from * in;
    a.y += to * out;
  });
}

/// Tables depend on the positions alone: all layers and both directions share one.
Launch CpuBackend::bind_work(const BoundOp& op, const Rope& w) {
  const Type& qkv = *op.writes[0].type;
  const kernels::Tokens tokens = tokens_of(op, qkv);
  const int64_t begin = part_of(op, qkv, 1).begin;
  const DocumentPositions documents = document_positions(op, qkv);
  check_in_place(op, op.writes[0], op.reads[0]);
  const kernels::Rope args{.qkv = mutable_floats(op.writes[0]),
                           .sequences = tokens.sequences,
                           .tokens = tokens.tokens,
                           .heads = w.heads,
                           .kv_heads = w.kv_heads,
                           .head_dim = w.head_dim,
                           .position_begin = begin,
                           .theta = w.theta,
                           .backward = w.phase == Phase::kI,
                           .table = op.rope_table,
                           .positions = documents.first,
                           .positions_stride = documents.stride};
  return launch(k_.rope, args);
}

Launch CpuBackend::bind_work(const BoundOp& op, const HeadNorm& w) {
  for (size_t i = 0; i < op.writes.size() && w.accumulate; ++i)
    check_in_place(op, op.writes[i], op.reads[op.reads.size() - op.writes.size() + i]);
  if (w.over == SumOver::kSequences) return sum_sequences(op, w.accumulate);
  const bool forward = w.phase == Phase::kF;
  const kernels::HeadNormShape shape{tokens_of(op, *op.reads[forward ? 0 : 1].type), w.heads, w.kv_heads, w.head_dim};
  if (forward)
    return with_table(kernels::head_norm_forward, kernels::HeadNormForward{.shape = shape,
                                                                           .qkv = floats(op.reads[0]),
                                                                           .gamma_q = floats(op.reads[1]),
                                                                           .gamma_k = floats(op.reads[2]),
                                                                           .y = mutable_floats(op.writes[0]),
                                                                           .stats = mutable_floats(op.writes[1]),
                                                                           .epsilon = w.epsilon});
  if (w.phase == Phase::kI)
    return with_table(kernels::head_norm_input, kernels::HeadNormInput{.shape = shape,
                                                                       .dy = floats(op.reads[0]),
                                                                       .qkv = floats(op.reads[1]),
                                                                       .gamma_q = floats(op.reads[2]),
                                                                       .gamma_k = floats(op.reads[3]),
                                                                       .stats = floats(op.reads[4]),
                                                                       .dqkv = mutable_floats(op.writes[0])});
  return with_scratch(op, kernels::head_norm_weight,
                      kernels::HeadNormWeight{.shape = shape,
                                              .dy = floats(op.reads[0]),
                                              .qkv = floats(op.reads[1]),
                                              .stats = floats(op.reads[2]),
                                              .dgamma_q = mutable_floats(op.writes[0]),
                                              .dgamma_k = mutable_floats(op.writes[1]),
                                              .accumulate = w.accumulate,
                                              .apart = w.over == SumOver::kTokens ? op.writes[0].shape()[1] : 0},
                      kernels::head_norm_scratch_bytes(shape));
}

Launch CpuBackend::bind_work(const BoundOp& op, const Attention& w) {
  const kernels::AttentionShape shape = attention_shape(op, w, options_.canonical);
  if (w.phase == Phase::kF) {
    const kernels::AttentionForward args{
        .shape = shape, .qkv = floats(op.reads[0]), .o = mutable_floats(op.writes[0]), .lse = mutable_floats(op.writes[1])};
    return with_scratch(op, k_.attention_forward, args, kernels::attention_scratch_bytes(args));
  }
  const kernels::AttentionInput args{.shape = shape,
                                     .dout = floats(op.reads[0]),
                                     .o = floats(op.reads[1]),
                                     .lse = floats(op.reads[2]),
                                     .qkv = floats(op.reads[3]),
                                     .dqkv = mutable_floats(op.writes[0])};
  return with_scratch(op, k_.attention_input, args, kernels::attention_scratch_bytes(args));
}

Launch CpuBackend::bind_work(const BoundOp& op, const AttentionBlock& w) {
  const kernels::AttentionBlockShape shape = block_shape(op, w, options_.canonical);
  if (w.phase == Phase::kF) {
    if (w.carry)
      for (const size_t i : {size_t{0}, size_t{1}}) check_in_place(op, op.writes[i], op.reads[2 + i]);
    const kernels::AttentionBlockForward args{.shape = shape,
                                              .q = floats(op.reads[0]),
                                              .kv = floats(op.reads[1]),
                                              .o = mutable_floats(op.writes[0]),
                                              .lse = w.partial ? nullptr : mutable_floats(op.writes[1]),
                                              .sums = w.partial ? mutable_floats(op.writes[1]) : nullptr,
                                              .carry = w.carry};
    return with_scratch(op, k_.attention_block_forward, args, kernels::attention_scratch_bytes(args));
  }
  if (w.carry) check_in_place(op, op.writes[0], op.reads[5]);
  if (w.carry_kv) check_in_place(op, op.writes[1], op.reads[w.carry ? 6 : 5]);
  const kernels::AttentionBlockInput args{.shape = shape,
                                          .dout = floats(op.reads[0]),
                                          .o = floats(op.reads[1]),
                                          .lse = floats(op.reads[2]),
                                          .q = floats(op.reads[3]),
                                          .kv = floats(op.reads[4]),
                                          .dq = mutable_floats(op.writes[0]),
                                          .dkv = mutable_floats(op.writes[1]),
                                          .carry = w.carry,
                                          .carry_kv = w.carry_kv,
                                          .by_head = w.partial};
  return with_scratch(op, k_.attention_block_input, args, kernels::attention_scratch_bytes(args));
}

Launch CpuBackend::bind_work(const BoundOp& op, const AttentionMerge& w) {
  const std::vector<size_t> order = merge_order(op, w);
  const Shape& y = op.writes[0].shape();
  if (w.phase == Phase::kF) {
    kernels::AttentionMergeForward args{y[0], y[1], w.heads, value_dim_of(w), static_cast<int>(order.size())};
    for (size_t i = 0; i < order.size(); ++i) {
      args.part_o[i] = floats(op.reads[2 * order[i]]);
      args.part_sums[i] = floats(op.reads[2 * order[i] + 1]);
    }
    args.o = mutable_floats(op.writes[0]);
    args.lse = mutable_floats(op.writes[1]);
    return launch(k_.attention_merge_forward, args);
  }
  kernels::AttentionMergeInput args{y[0] * y[1], w.heads, w.keys ? w.kv_heads : w.heads,
                                    w.head_dim + (w.keys ? value_dim_of(w) : int64_t{0}), static_cast<int>(order.size())};
  for (size_t i = 0; i < order.size(); ++i) args.part[i] = floats(op.reads[order[i]]);
  args.y = mutable_floats(op.writes[0]);
  return launch(k_.attention_merge_input, args);
}

/// Of any storage: strips are copied, or summands are added as a collective adds them.
Launch CpuBackend::bind_work(const BoundOp& op, const Strips& w) {
  std::vector<const void*> parts;
  for (const size_t i : strip_order(op, w)) parts.push_back(op.reads[i].data);
  const Type& y = *op.writes[0].type;
  void* const to = op.writes[0].data;
  if (w.sum)
    return [&k = k_, dtype = y.dtype, n = y.shape.elements(), parts, to](const StepState&) {
      tree_combine(k, dtype, ReduceOp::kSum, parts, to, n);
    };
  const auto bytes = static_cast<size_t>(op.reads[0].type->bytes() / y.shape[0]);  // of a strip
  return [parts, to, bytes, sequences = static_cast<size_t>(y.shape[0])](const StepState&) {
    for (size_t b = 0; b < sequences; ++b)
      for (size_t i = 0; i < parts.size(); ++i)
        std::memcpy(static_cast<std::byte*>(to) + (b * parts.size() + i) * bytes,
                    static_cast<const std::byte*>(parts[i]) + b * bytes, bytes);
  };
}

/// Of any storage: nothing is computed but sums of copies, in fp32.
Launch CpuBackend::bind_work(const BoundOp& op, const Regroup& w) {
  const Shape& parts = (w.join ? op.reads[0] : op.writes[0]).shape();
  const kernels::Regroup args{.from = op.reads[0].data,
                              .to = op.writes[0].data,
                              .dtype = op.writes[0].type->dtype,
                              .sequences = parts[2],
                              .tokens = parts[1],
                              .parts = parts[0],
                              .width = parts[3],
                              .join = w.join,
                              .copies = w.copies,
                              .kv_heads = w.kv_heads,
                              .head_dim = w.head_dim};
  return [&storage = kernels::storage_kernels(k_), args](const StepState&) { kernels::regroup(storage, args); };
}

Launch CpuBackend::bind_work(const BoundOp& op, const Route& w) {
  const bool forward = w.phase == Phase::kF;
  const Tensor &logits = op.reads[forward ? 0 : 1], &choice = forward ? op.writes[1] : op.reads[2];
  const kernels::RouteShape shape = route_shape(w, logits, choice);
  const ExpertPlacement* placement = placement_of(op.plan->expert_placement, op.instruction->layer);
  const int64_t bytes = kernels::route_scratch_bytes(shape.experts, forward && w.capacity > 0);
  if (forward)
    return with_scratch(op, kernels::route_forward,
                        kernels::RouteForward{.shape = shape,
                                              .logits = floats(logits),
                                              .bias = w.biased ? floats(op.reads[1]) : nullptr,
                                              .places = placement != nullptr ? placement->places.data() : nullptr,
                                              .weights = mutable_floats(op.writes[0]),
                                              .choice = choice.as<int32_t>(),
                                              .counts = op.writes[2].as<int32_t>(),
                                              .ranks = op.writes[2].shape()[0],
                                              .leaves = op.writes[2].shape()[1],
                                              .capacity = w.capacity,
                                              .chosen = chosen_by_all(op, w),
                                              .by_place = placement != nullptr ? placement->experts.data() : nullptr},
                        bytes);
  return with_scratch(op, kernels::route_input,
                      kernels::RouteInput{.shape = shape,
                                          .dweights = floats(op.reads[0]),
                                          .logits = floats(logits),
                                          .choice = choice.as<const int32_t>(),
                                          .by_place = placement != nullptr ? placement->experts.data() : nullptr,
                                          .load = w.reads_load() ? floats(op.reads[3]) : nullptr,
                                          .whole_tokens = w.sequence,
                                          .dlogits = mutable_floats(op.writes[0])},
                      bytes);
}

Launch CpuBackend::bind_work(const BoundOp& op, const ChooseExperts& w) {
  const ExpertPlacement* placement = placement_of(op.plan->expert_placement, op.instruction->layer);
  const kernels::RouteForward args{.shape = choose_shape(w, op.reads[0], op.writes[0]),
                                   .logits = floats(op.reads[0]),
                                   .bias = w.biased ? floats(op.reads[1]) : nullptr,
                                   .places = placement != nullptr ? placement->places.data() : nullptr,
                                   .choice = op.writes[0].as<int32_t>()};
  return with_scratch(op, kernels::route_forward, args, kernels::route_scratch_bytes(args.shape.experts));
}

Launch CpuBackend::bind_work(const BoundOp& op, const ExpertLoad& w) {
  const Shape& choice = op.reads[0].shape();
  const ExpertPlacement* placement = placement_of(op.plan->expert_placement, op.instruction->layer);
  return launch(kernels::expert_load, kernels::ExpertLoad{.choice = op.reads[0].as<const int32_t>(),
                                                          .load = mutable_floats(op.writes[0]),
                                                          .sequences = choice[0],
                                                          .tokens = choice[1],
                                                          .top_k = choice[2],
                                                          .experts = op.writes[0].shape().last(),
                                                          .accumulate = w.accumulate,
                                                          .by_place = placement != nullptr ? placement->experts.data() : nullptr});
}

Launch CpuBackend::bind_work(const BoundOp& op, const Dispatch& w) {
  const Shape& choice = op.reads[1].shape();
  const kernels::Dispatch args{.from = floats(op.reads[0]),
                               .to = mutable_floats(op.writes[0]),
                               .choice = op.reads[1].as<const int32_t>(),
                               .tokens = choice[0] * choice[1],
                               .top_k = choice[2],
                               .experts = w.experts,
                               .width = op.reads[0].shape().last(),
                               .back = w.phase == Phase::kI};
  return with_scratch(op, kernels::dispatch, args, kernels::places_scratch_bytes(args.tokens, args.top_k, args.experts));
}

Launch CpuBackend::bind_work(const BoundOp& op, const Combine& w) {
  const bool forward = w.phase == Phase::kF;
  const Tensor& choice = op.reads[forward ? 2 : 3];
  const Shape& c = choice.shape();
  const int64_t tokens = c[0] * c[1], width = op.reads[0].shape().last();
  const int64_t bytes = kernels::places_scratch_bytes(tokens, c[2], w.experts);
  if (forward)
    return with_scratch(op, kernels::combine_forward,
                        kernels::CombineForward{.rows = floats(op.reads[0]),
                                                .weights = floats(op.reads[1]),
                                                .choice = choice.as<const int32_t>(),
                                                .y = mutable_floats(op.writes[0]),
                                                .tokens = tokens,
                                                .top_k = c[2],
                                                .experts = w.experts,
                                                .width = width},
                        bytes);
  return with_scratch(op, kernels::combine_input,
                      kernels::CombineInput{.dy = floats(op.reads[0]),
                                            .rows = floats(op.reads[1]),
                                            .weights = floats(op.reads[2]),
                                            .choice = choice.as<const int32_t>(),
                                            .drows = mutable_floats(op.writes[0]),
                                            .dweights = mutable_floats(op.writes[1]),
                                            .tokens = tokens,
                                            .top_k = c[2],
                                            .experts = w.experts,
                                            .width = width},
                      bytes);
}

Launch CpuBackend::bind_work(const BoundOp& op, const Gate& w) {
  const Type& x = *op.reads[0].type;
  const int64_t tokens = rows_of(x), width = x.shape.last();
  if (w.phase == Phase::kF)
    return with_table(kernels::gate_forward, kernels::GateForward{.x = floats(op.reads[0]),
                                                                  .gate = floats(op.reads[1]),
                                                                  .y = mutable_floats(op.writes[0]),
                                                                  .tokens = tokens,
                                                                  .width = width});
  return with_table(kernels::gate_input, kernels::GateInput{.dy = floats(op.reads[0]),
                                                            .x = floats(op.reads[1]),
                                                            .gate = floats(op.reads[2]),
                                                            .dx = mutable_floats(op.writes[0]),
                                                            .dgate = mutable_floats(op.writes[1]),
                                                            .tokens = tokens,
                                                            .width = width});
}

Launch CpuBackend::bind_work(const BoundOp& op, const GroupedLinear& w) {
  const kernels::RowCounts rows = row_counts(op.reads[2], op.reads[0], w.sources);
  if (w.phase == Phase::kW) {
    if (w.accumulate) check_in_place(op, op.writes[0], op.reads[3]);
    const Shape& dw = op.writes[0].shape();
    const kernels::GroupedLinearWeight args{.rows = rows,
                                            .x = floats(op.reads[0]),
                                            .dy = floats(op.reads[1]),
                                            .dw = mutable_floats(op.writes[0]),
                                            .in = dw[2],
                                            .out = dw[1],
                                            .accumulate = w.accumulate,
                                            .canonical = options_.canonical};
    return with_scratch(op, kernels::grouped_linear_weight, args, kernels::grouped_scratch_bytes(args));
  }
  const Shape& weight = op.reads[1].shape();
  const kernels::GroupedLinear args{.rows = rows,
                                    .x = floats(op.reads[0]),
                                    .w = floats(op.reads[1]),
                                    .y = mutable_floats(op.writes[0]),
                                    .in = weight[2],
                                    .out = weight[1],
                                    .part = part_of(op, *op.reads[1].type, w.phase == Phase::kI ? 1 : 2),
                                    .back = w.phase == Phase::kI,
                                    .canonical = options_.canonical};
  return with_scratch(op, kernels::grouped_linear, args, kernels::grouped_scratch_bytes(args));
}

Launch CpuBackend::bind_work(const BoundOp& op, const Activation& w) {
  if (w.counted) {
    const bool forward = w.phase == Phase::kF;
    const kernels::GroupedActivation args{.rows = row_counts(op.reads.back(), op.reads[0], 1),
                                          .u = floats(op.reads[forward ? 0 : 1]),
                                          .da = forward ? nullptr : floats(op.reads[0]),
                                          .to = mutable_floats(op.writes[0]),
                                          .width = (forward ? op.writes[0] : op.reads[0]).shape().last(),
                                          .swiglu = w.swiglu};
    return [args, &k = k_](const StepState&) { kernels::grouped_activation(k, args); };
  }
  const int64_t n = (w.phase == Phase::kF ? op.writes[0] : op.reads[0]).shape().elements();
  if (w.phase == Phase::kF)
    return launch(k_.activation_forward,
                  kernels::ActivationForward{floats(op.reads[0]), mutable_floats(op.writes[0]), n, w.swiglu});
  return launch(k_.activation_input,
                kernels::ActivationInput{floats(op.reads[0]), floats(op.reads[1]), mutable_floats(op.writes[0]), n, w.swiglu});
}

Launch CpuBackend::bind_work(const BoundOp& op, const Residual& w) {
  const Type& x = *op.reads[0].type;
  const int64_t width = x.shape.last();
  if (w.phase == Phase::kF)
    return launch(k_.residual_forward, kernels::ResidualForward{.x = floats(op.reads[0]),
                                                                .z = floats(op.reads[1]),
                                                                .bias = w.bias ? floats(op.reads[2]) : nullptr,
                                                                .y = mutable_floats(op.writes[0]),
                                                                .rows = rows_of(x),
                                                                .width = width});
  if (w.accumulate) check_in_place(op, op.writes[0], op.reads[1]);
  const kernels::BiasWeight args{floats(op.reads[0]), mutable_floats(op.writes[0]), tokens_of(op, x), width, w.accumulate};
  if (w.over != SumOver::kTokens) return launch(k_.bias_weight, args);
  return by_sequence(k_.bias_weight, args, args.tokens, [](kernels::BiasWeight& a, int64_t sequence) {
    a.dy += sequence * a.tokens.tokens * a.width;
    a.dbias += sequence * a.width;
  });
}

Launch CpuBackend::bind_work(const BoundOp& op, const Dropout& w) {
  const Type& z = *op.writes[0].type;
  check_in_place(op, op.writes[0], op.reads[0]);
  const kernels::Part tokens = part_of(op, z, 1), width = part_of(op, z, 2);
  kernels::Dropout args{.z = mutable_floats(op.writes[0]),
                        .sequences = z.shape[0],
                        .tokens = z.shape[1],
                        .width = z.shape[2],
                        .sequence_begin = op.first_sequence(z),
                        .token_begin = tokens.begin,
                        .tokens_total = tokens.total,
                        .width_begin = width.begin,
                        .width_total = width.total,
                        .p = w.p,
                        .key = {op.seed, RandomUse::kDropout, dropout_tensor(op, w), 0}};
  return [kernel = k_.dropout, args](const StepState& state) mutable {
    args.key.step = static_cast<uint32_t>(state.step);
    kernel(args);
  };
}

// ---- the loss

Launch CpuBackend::bind_work(const BoundOp& op, const CrossEntropy& w) {
  using Part = CrossEntropy::Part;
  const Type& logits = *op.reads[0].type;
  kernels::CrossEntropy args{.logits = op.reads[0].as<float>(),
                             .tokens = tokens_of(op, logits),
                             .vocab = logits.shape.last(),
                             .vocab_part = part_of(op, logits, logits.shape.rank - 1),
                             .words = w.words,
                             .loss_tokens = w.tokens};
  if (w.part != Part::kMax) args.targets = op.reads[1].as<const int32_t>();
  const auto scaled = [&](void (*kernel)(const kernels::CrossEntropy&), size_t operands) -> Launch {
    if (op.reads.size() == operands) return launch(kernel, args);
    return [kernel, args, scale = floats(op.reads[operands])](const StepState&) mutable {
      args.loss_scale = *scale;
      kernel(args);
    };
  };
  switch (w.part) {
    case Part::kFused:
      args.nll = mutable_floats(op.writes[0]);
      check_in_place(op, op.writes[1], op.reads[0]);
      return scaled(k_.cross_entropy_fused, 2);
    case Part::kLossOnly: args.nll = mutable_floats(op.writes[0]); return launch(k_.cross_entropy_loss_only, args);
    case Part::kMax: args.max = mutable_floats(op.writes[0]); return launch(k_.cross_entropy_max, args);
    case Part::kSum:
      args.max = op.reads[2].as<float>();
      args.sums = mutable_floats(op.writes[0]);
      return launch(k_.cross_entropy_sum, args);
    case Part::kGrad: break;
  }
  args.max = op.reads[2].as<float>();
  args.sums = op.reads[3].as<float>();
  args.nll = mutable_floats(op.writes[0]);
  check_in_place(op, op.writes[1], op.reads[0]);
  return scaled(k_.cross_entropy_grad, 4);
}

// ---- sums and updates

Launch CpuBackend::bind_work(const BoundOp& op, const Add&) {
  const int64_t n = op.writes[0].shape().elements();
  if (op.writes[0].type->dtype == DType::f64)  // sums of squared norms, a few numbers
    return [a = op.reads[0].as<const double>(), b = op.reads[1].as<const double>(), c = op.writes[0].as<double>(),
            n](const StepState&) {
      for (int64_t i = 0; i < n; ++i) c[i] = a[i] + b[i];
    };
  return launch(k_.add, kernels::Add{floats(op.reads[0]), floats(op.reads[1]), mutable_floats(op.writes[0]), n});
}

Launch CpuBackend::bind_work(const BoundOp& op, const Fill& w) {
  return [kernel = k_.fill, x = mutable_floats(op.writes[0]), n = op.writes[0].shape().elements(),
          value = w.value](const StepState&) { kernel(x, n, value); };
}

Launch CpuBackend::bind_work(const BoundOp& op, const SumScalars& w) {
  std::vector<const float*> parts;
  std::vector<int64_t> sizes;
  for (const Tensor& t : op.reads) {
    parts.push_back(floats(t));
    sizes.push_back(t.shape().elements());
  }
  return [kernel = k_.sum_scalars, parts, sizes, factor = w.factor, total = mutable_floats(op.writes[0])](const StepState&) {
    kernel({parts.data(), sizes.data(), static_cast<int>(parts.size()), factor.num, factor.den, total});
  };
}

Launch CpuBackend::bind_work(const BoundOp& op, const SquaredNorm&) {
  std::vector<std::pair<const float*, int64_t>> parts;
  for (const Tensor& t : op.reads) parts.emplace_back(floats(t), t.shape().elements());
  SHARDLAB_CHECK(op.writes[0].type->dtype == DType::f64, "a squared norm is f64, not {}", name_of(op.writes[0].type->dtype));
  return [kernel = k_.squared_norm, parts, total = op.writes[0].as<double>()](const StepState&) {
    double sum = 0;
    for (const auto& [x, n] : parts) sum += kernel(x, n);
    *total = sum;
  };
}

Launch CpuBackend::bind_work(const BoundOp& op, const Sgd& w) {
  check_in_place(op, op.writes[0], op.reads[1]);
  kernels::Sgd args{floats(op.reads[0]), mutable_floats(op.writes[0]), op.writes[0].shape().elements(), 0, w.weight_decay};
  return [kernel = k_.sgd, args](const StepState& state) mutable {
    args.learning_rate = state.learning_rate;
    kernel(args);
  };
}

Launch CpuBackend::bind_work(const BoundOp& op, const AdamW& w) {
  for (size_t i = 0; i < 3; ++i) check_in_place(op, op.writes[i], op.reads[1 + i]);
  kernels::AdamW args{.grad = floats(op.reads[0]),
                      .param = mutable_floats(op.writes[0]),
                      .m = mutable_floats(op.writes[1]),
                      .v = mutable_floats(op.writes[2]),
                      .n = op.writes[0].shape().elements(),
                      .beta1 = w.beta1,
                      .beta2 = w.beta2,
                      .epsilon = w.epsilon,
                      .weight_decay = w.weight_decay};
  return [kernel = k_.adamw, args](const StepState& state) mutable {
    args.step = state.applied;
    args.learning_rate = state.learning_rate;
    kernel(args);
  };
}

Launch CpuBackend::bind_work(const BoundOp& op, const Lion& w) {
  for (size_t i = 0; i < 2; ++i) check_in_place(op, op.writes[i], op.reads[1 + i]);
  kernels::Lion args{.grad = floats(op.reads[0]),
                     .param = mutable_floats(op.writes[0]),
                     .m = mutable_floats(op.writes[1]),
                     .n = op.writes[0].shape().elements(),
                     .beta1 = w.beta1,
                     .beta2 = w.beta2,
                     .weight_decay = w.weight_decay};
  return [kernel = k_.lion, args](const StepState& state) mutable {
    args.learning_rate = state.learning_rate;
    kernel(args);
  };
}

/// The rank's part of what every rank has.
Launch copy_own_part(const BoundOp& op) {
  return [from = op.reads[0].as<const std::byte>(), to = op.writes[0].as<std::byte>(), pieces = own_pieces(op)](const StepState&) {
    for (const OwnPiece& piece : pieces) std::memcpy(to + piece.to, from + piece.from, piece.bytes);
  };
}

Launch CpuBackend::bind_work(const BoundOp& op, const Copy&) {
  if (op.reads[0].shape() != op.writes[0].shape()) return copy_own_part(op);
  return [from = op.reads[0].data, to = op.writes[0].data,
          bytes = static_cast<size_t>(op.writes[0].type->bytes())](const StepState&) { std::memmove(to, from, bytes); };
}

}  // namespace

BackendFactory cpu_backend(const kernels::Kernels& kernels, const CpuOptions& options) {
  return [&kernels, options](int) { return std::make_unique<CpuBackend>(kernels, options); };
}

}  // namespace shardlab::runtime
