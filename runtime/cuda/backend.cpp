#include "runtime/cuda/backend.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>

#include "kernels/cuda/library_attention.h"
#include "kernels/rope.h"
#include "plan/base/check.h"
#include "plan/base/world_error.h"
#include "plan/device_scratch.h"
#include "plan/optimizers.h"
#include "plan/work.h"
#include "runtime/cuda/named.h"
#include "runtime/operands.h"
#include "runtime/own_part.h"
#include "runtime/positions.h"

namespace shardlab::runtime::cuda {

namespace {

using gpu::Input;
using gpu::Output;
using kernels::Tokens;

/// The libraries shared by the ops of one stream, which never overlap.
struct StreamLibraries {
  bool multiplies = false;  ///< some op wants the library's product
  std::unique_ptr<gpu::Matmul> matmul;
  std::unique_ptr<gpu::LibraryAttention> attention;
  std::string no_attention;  ///< why cuDNN did not start
};

class CudaBackend final : public Backend {
 public:
  CudaBackend(Node& node, int rank, const CudaOptions& options)
      : k_(node.kernels()),
        device_(node.rank(rank)),
        options_(options),
        check_(node.api()),
        host_(cpu_backend(kernels::kernels_for_this_processor(), {.canonical = options.canonical})(rank)) {}

  std::string_view name() const override { return "cuda"; }
  bool has_storage() const override { return true; }
  Result<Launch> bind(const BoundOp& op) override;
  void enter_thread(int stream) override;
  Accelerator* device() override { return &device_; }

 private:
  Launch bind_work(const BoundOp& op, const LoadBatch& w);
  Launch bind_work(const BoundOp& op, const Embed& w);
  Launch bind_work(const BoundOp& op, const Positions& w);
  Launch bind_packed(const BoundOp& op, const Positions& w);
  Launch bind_work(const BoundOp& op, const Norm& w);
  Launch bind_work(const BoundOp& op, const HeadNorm& w);
  Launch bind_work(const BoundOp& op, const Linear& w);
  Launch bind_work(const BoundOp& op, const Rope& w);
  Launch bind_work(const BoundOp& op, const LatentHeads& w);
  Launch bind_work(const BoundOp& op, const Regroup& w);
  Launch bind_work(const BoundOp& op, const Strips& w);
  Result<Launch> bind_attention(const BoundOp& op, const Attention& w);
  Result<Launch> bind_block(const BoundOp& op, const AttentionBlock& w);
  Launch bind_work(const BoundOp& op, const SplitHeads& w);
  Launch bind_work(const BoundOp& op, const AttentionMerge& w);
  Launch bind_work(const BoundOp& op, const Route& w);
  Launch bind_work(const BoundOp& op, const ChooseExperts& w);
  Launch bind_work(const BoundOp& op, const ExpertLoad& w);
  Launch bind_work(const BoundOp& op, const Dispatch& w);
  Launch bind_work(const BoundOp& op, const Combine& w);
  Launch bind_work(const BoundOp& op, const Gate& w);
  Launch bind_work(const BoundOp& op, const GroupedLinear& w);
  Launch bind_work(const BoundOp& op, const Activation& w);
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
  Launch bind_work(const BoundOp& op, const AdamW8bit& w);
  Launch bind_work(const BoundOp& op, const Copy& w);
  /// Kernels are refused before; collectives and messages are the transport's.
  template <class Other>
  Launch bind_work(const BoundOp& op, const Other&) {
    SHARDLAB_CHECK(false, "`{}` is not for a back end", describe(*op.plan, *op.instruction));
  }

  gpu::Stream stream(int s) { return {device_.stream(s).value, &check_}; }
  /// The stream's workspace: its address aligned, `check_workspace` has seen that it is large enough.
  static gpu::Scratch lent(const BoundOp& op) {
    void* at = op.workspace.data();
    size_t bytes = op.workspace.size();
    if (at == nullptr || std::align(kScratchAlignment, 0, at, bytes) == nullptr) return {};
    return {at, static_cast<int64_t>(bytes)};
  }
  /// A launch of `kernel` on the op's stream.
  template <class Args>
  Launch launch(const BoundOp& op, void (*kernel)(const Args&, gpu::Stream), const Args& args) {
    return [this, kernel, args, s = op.instruction->stream](const StepState&) { kernel(args, stream(s)); };
  }
  /// The same with scratch of the stream's.
  template <class Args>
  Launch launch_with_scratch(const BoundOp& op, void (*kernel)(const Args&, gpu::Stream), Args args) {
    args.scratch = lent(op);
    return launch(op, kernel, args);
  }
  template <class Args, class Move>
  Launch by_sequence(const BoundOp& op, void (*kernel)(const Args&, gpu::Stream), Args args, Move move);
  Launch sum_sequences(const BoundOp& op, bool accumulate);
  /// Tables of a layer's placement in device memory; null where its experts lie in order.
  struct Places {
    const int32_t* of_experts = nullptr;  ///< the place of each expert
    const int32_t* experts = nullptr;     ///< the expert at each place
  };
  Places want_places(const BoundOp& op);
  RopeRows want_rope_table(const BoundOp& op, const Type& qkv, int width, float theta);
  /// A matrix product: by the library's method or, in canonical mode and with factors of two types, by the fixed-order kernel.
  template <class Args>
  Launch product(const BoundOp& op, void (*kernel)(const Args&, gpu::Stream), void (gpu::Matmul::*method)(const Args&, gpu::Stream),
                 Args args) {
    const bool mixed = op.reads[0].type->dtype != op.reads[1].type->dtype;
    if (options_.canonical || mixed) return launch(op, kernel, args);
    StreamLibraries& shared = libraries_[op.instruction->stream];
    shared.multiplies = true;
    args.scratch = lent(op);
    return [this, method, args, &shared, s = op.instruction->stream](const StepState&) {
      ((*shared.matmul).*method)(args, stream(s));
    };
  }
  Result<Launch> bind_on_host(const BoundOp& op);
  Result<Launch> bind_kernel(const BoundOp& op, const Kernel& w);
  Result<void> prepare_cudnn(StreamLibraries& shared, const gpu::AttentionShape& shape, DType type, bool backward);
  void note(std::string text) const {
    if (options_.notes != nullptr) options_.notes->insert(std::move(text));
  }

  const gpu::Kernels& k_;
  RankDevice& device_;
  const CudaOptions options_;
  ThrowingCheck check_;
  const std::unique_ptr<Backend> host_;                     ///< of ops whose operands are all in host memory
  std::vector<std::unique_ptr<std::byte[]>> host_scratch_;  ///< for such ops on streams whose workspace is the device's
  std::map<int, StreamLibraries> libraries_;                ///< by stream; addresses stay
  std::map<float*, std::vector<float>> rope_values_;        ///< of the role's tables, by table; none without Rope
  std::map<int32_t*, std::vector<int32_t>> place_values_;   ///< of layers whose experts do not lie in order, by table
};

// ---- what can be bound

Error refuse(const BoundOp& op, std::string_view why, std::string_view hint) {
  return {ExitCode::kUsage, fmt::format("`{}` {}", describe(*op.plan, *op.instruction), why), std::string(hint), ""};
}

bool is_float(DType t) { return gpu::is_activation_type(t); }

/// What lies `elements` further on.
Input past(Input a, int64_t elements) { return {static_cast<const std::byte*>(a.data) + bytes_of(a.dtype, elements), a.dtype}; }
Output past(Output a, int64_t elements) { return {static_cast<std::byte*>(a.data) + bytes_of(a.dtype, elements), a.dtype}; }

Launch one_after_another(std::vector<Launch> each) {
  return [each = std::move(each)](const StepState& state) {
    for (const Launch& one : each) one(state);
  };
}

/// Ops whose operands may be of fp64: sums of squared norms.
bool has_wide_form(const Work& work) {
  return std::holds_alternative<Add>(work) || std::holds_alternative<Fill>(work) || std::holds_alternative<SquaredNorm>(work);
}

/// The reads and writes that must have the op's one activation type: the first ones of each. The first read decides the type.
struct Uniform {
  size_t reads = 0, writes = 0;
};
Uniform uniform_operands(const Work& work) {
  return std::visit(Overload{
                        // Of a router the output's gradient is f32 whatever the type of tokens.
                        [](const Linear& w) {
                          return Uniform{w.phase == Phase::kF ? 2u : 0u, 0};
                        },
                        [](const Norm& w) {
                          if (w.over == SumOver::kSequences) return Uniform{1, 0};
                          return w.phase == Phase::kF ? Uniform{1, 1} : w.phase == Phase::kI ? Uniform{2, 1} : Uniform{2, 0};
                        },
                        [](const HeadNorm& w) {
                          if (w.over == SumOver::kSequences) return Uniform{1, 0};
                          return w.phase == Phase::kF ? Uniform{1, 1} : w.phase == Phase::kI ? Uniform{2, 1} : Uniform{2, 0};
                        },
                        [](const LatentHeads& w) {
                          return w.phase == Phase::kF ? Uniform{3, 1} : Uniform{1, 3};
                        },
                        [](const Attention& w) {
                          return w.phase == Phase::kF ? Uniform{1, 1} : Uniform{2, 1};
                        },
                        [](const Activation& w) {
                          return Uniform{w.phase == Phase::kF ? 1u : 2u, 1};
                        },
                        [](const Dispatch&) {
                          return Uniform{1, 1};
                        },
                        [](const Combine& w) {
                          return w.phase == Phase::kF ? Uniform{1, 1} : Uniform{2, 1};
                        },
                        [](const Gate& w) {
                          return Uniform{w.phase == Phase::kF ? 1u : 2u, 1};
                        },
                        [](const GroupedLinear&) {
                          return Uniform{2, 0};
                        },
                        [](const Residual& w) {
                          return w.phase == Phase::kF ? Uniform{2, 1} : Uniform{1, 0};
                        },
                        [](const Positions& w) {
                          return Uniform{1, w.phase == Phase::kF ? 1u : 0u};
                        },
                        [](const Dropout&) {
                          return Uniform{1, 1};
                        },
                        [](const Rope&) {
                          return Uniform{1, 1};
                        },
                        [](const Regroup&) {
                          return Uniform{1, 1};
                        },
                        [](const Strips&) {
                          return Uniform{2, 1};
                        },
                        [](const auto&) { return Uniform{}; },
                    },
                    work);
}

Result<void> check_types(const BoundOp& op) {
  const Work& work = op.op().work;
  const OptimizerRow* row = update_of(work);
  const bool coded = row != nullptr && has_blocks(*row);
  const auto known = [&](DType t) {
    return is_float(t) || t == DType::i32 || (t == DType::f64 && has_wide_form(work)) || (t == DType::u8 && coded);
  };
  for (const auto* operands : {&op.reads, &op.writes})
    for (const Tensor& t : *operands)
      if (!known(t.type->dtype))
        return refuse(op, fmt::format("has an operand of {}, for which there is no CUDA kernel", name_of(t.type->dtype)),
                      "set precision to fp32, bf16 or fp16");
  Uniform uniform = uniform_operands(work);
  const auto wide = [](const Tensor& t) { return t.type->dtype == DType::f64; };
  if (std::holds_alternative<Add>(work) && (std::ranges::any_of(op.reads, wide) || wide(op.writes[0]))) uniform = {2, 1};
  const auto differs = [&](const std::vector<Tensor>& operands, size_t n) {
    return std::any_of(operands.begin(), operands.begin() + static_cast<std::ptrdiff_t>(n),
                       [&](const Tensor& t) { return t.type->dtype != op.reads[0].type->dtype; });
  };
  if (differs(op.reads, uniform.reads) || differs(op.writes, uniform.writes))
    return refuse(op, "mixes element types where the CUDA kernels take one", "cast the operand in an op of its own");
  return {};
}

/// Factors are of one type, but that an output's gradient may be f32.
Result<void> check_factors(const BoundOp& op, const Linear& w) {
  if (w.phase == Phase::kF) return {};
  const size_t dy = w.phase == Phase::kI ? 0 : 1;
  const DType gradient = op.reads[dy].type->dtype, other = op.reads[1 - dy].type->dtype;
  if (gradient == other || gradient == DType::f32) return {};
  return refuse(op, "mixes element types where the CUDA kernels take one", "cast the operand in an op of its own");
}

Result<void> check_copy(const BoundOp& op) {
  const DType from = op.reads[0].type->dtype, to = op.writes[0].type->dtype;
  if (op.reads[0].shape() != op.writes[0].shape() && from != to)
    return refuse(op, "converts the rank's part of a tensor, for which there is no CUDA kernel",
                  "convert it with a copy of its own");
  const auto castable = [](DType t) { return is_float(t) || t == DType::f64; };
  if (from == to || (castable(from) && castable(to))) return {};
  return refuse(op, fmt::format("converts {} to {}, for which there is no CUDA kernel", name_of(from), name_of(to)),
                "convert between f32, bf16, f16 and f64");
}

Result<void> check_fill(const BoundOp& op, const Fill& w) {
  if (op.writes[0].type->dtype != DType::i32 || w.value == 0) return {};
  return refuse(op, fmt::format("fills i32 with {}, for which there is no CUDA kernel", w.value),
                "fill with 0, or a buffer of f32");
}

/// Plans lowered for another back end lend what that one's kernels need.
Result<void> check_workspace(const BoundOp& op, const CudaOptions& options) {
  const DeviceKernels kernels{options.canonical, options.attention != AttentionBy::kOwn};
  const int64_t needed = device_scratch_bytes(*op.instruction->segment, op.op(), op.mesh(), kernels);
  if (needed <= static_cast<int64_t>(op.workspace.size())) return {};
  return refuse(op, fmt::format("needs {} bytes of workspace on a GPU, and its stream has {}", needed, op.workspace.size()),
                "lower the case with backend: cuda");
}

Result<Launch> CudaBackend::bind(const BoundOp& op) {
  if (op.on_host) return bind_on_host(op);
  const Work& work = op.op().work;
  if (const Kernel* kernel = std::get_if<Kernel>(&work)) return bind_kernel(op, *kernel);
  if (std::holds_alternative<Copy>(work))
    SHARDLAB_TRY(check_copy(op));
  else
    SHARDLAB_TRY(check_types(op));
  if (const Linear* linear = std::get_if<Linear>(&work)) SHARDLAB_TRY(check_factors(op, *linear));
  if (const Fill* fill = std::get_if<Fill>(&work)) SHARDLAB_TRY(check_fill(op, *fill));
  SHARDLAB_TRY(check_workspace(op, options_));
  if (const Attention* a = std::get_if<Attention>(&work)) return bind_attention(op, *a);
  if (const AttentionBlock* a = std::get_if<AttentionBlock>(&work)) return bind_block(op, *a);
  return std::visit([&](const auto& w) { return bind_work(op, w); }, work);
}

/// Binds an op to the CPU's kernel, on the thread that issues: data in host memory stay there.
Result<Launch> CudaBackend::bind_on_host(const BoundOp& op) {
  BoundOp here = op;
  const auto needed = static_cast<size_t>(scratch_bytes(*op.instruction->segment, op.op(), options_.canonical));
  if (needed > op.workspace.size()) {
    host_scratch_.push_back(std::make_unique<std::byte[]>(needed + kAlignment));
    void* at = host_scratch_.back().get();
    size_t space = needed + kAlignment;
    here.workspace = {static_cast<std::byte*>(std::align(kAlignment, needed, at, space)), needed};
  }
  return host_->bind(here);
}

Result<Launch> CudaBackend::bind_kernel(const BoundOp& op, const Kernel& w) {
  SHARDLAB_TRY(check_workspace(op, options_));
  auto bound = bind_named(op, w, {k_, lent(op)});
  if (!bound.ok()) return bound.error();
  return Launch([this, enqueue = std::move(bound).value(), s = op.instruction->stream](const StepState& state) mutable {
    enqueue(state, stream(s));
  });
}

void CudaBackend::enter_thread(int stream) {
  if (stream == 0) {
    for (const auto& [table, values] : rope_values_)
      device_.copy(table, values.data(), static_cast<int64_t>(values.size() * sizeof(float)), 0);
    for (const auto& [table, values] : place_values_)
      device_.copy(table, values.data(), static_cast<int64_t>(values.size() * sizeof(int32_t)), 0);
    if (!rope_values_.empty() || !place_values_.empty()) device_.synchronise();
  }
  const auto found = libraries_.find(stream);
  if (found == libraries_.end() || !found->second.multiplies) return;
  const MemoryAccount::Taking taking(device_.account(), MemoryUse::kMatmul, device_.device());
  found->second.matmul = k_.matmul({.tf32 = options_.tf32}, check_);
  SHARDLAB_CHECK(found->second.matmul != nullptr, "the matrix library gave no handle and no reason");
}

// ---- input and embeddings

/// The host writes the batch to a pinned block of the op's own, which the device copies: the block is free again when
/// the step ends.
Launch CudaBackend::bind_work(const BoundOp& op, const LoadBatch& w) {
  const int64_t bytes = op.writes[0].type->bytes();
  auto* const staged = reinterpret_cast<int32_t*>(device_.reserve(Space::kHost, bytes));
  return
      [this, rows = BatchRows(op, w), data = op.writes[0].data, staged, bytes, s = op.instruction->stream](const StepState& state) {
        rows.read(state.step, staged);
        device_.copy(data, staged, bytes, s);
      };
}

Launch CudaBackend::bind_work(const BoundOp& op, const Embed& w) {
  const Tensor& ids = op.reads[0];
  if (w.phase == Phase::kF) {
    const Type& table = *op.reads[1].type;
    return launch(op, k_.embed_forward,
                  gpu::EmbedForward{.ids = ids.as<const int32_t>(),
                                    .table = input(op.reads[1]),
                                    .x = output(op.writes[0]),
                                    .rows = ids.shape().elements(),
                                    .width = table.shape[1],
                                    .row_begin = part_of(op, table, 0).begin,
                                    .table_rows = table.shape[0]});
  }
  const Type& table = *op.writes[0].type;
  if (w.accumulate) check_in_place(op, op.writes[0], op.reads[2]);
  const Tokens tokens = tokens_of(op, *op.reads[1].type);
  return launch(op, k_.embed_weight,
                gpu::EmbedWeight{.ids = ids.as<const int32_t>(),
                                 .dx = input(op.reads[1]),
                                 .dtable = output(op.writes[0]),
                                 .sequences = tokens.sequences,
                                 .tokens = tokens.tokens,
                                 .width = table.shape[1],
                                 .row_begin = part_of(op, table, 0).begin,
                                 .table_rows = table.shape[0],
                                 .accumulate = w.accumulate,
                                 .part = tokens.part});
}

/// A token takes the row of its position: where positions are consecutive, one launch takes the rows of all.
Launch CudaBackend::bind_work(const BoundOp& op, const Positions& w) {
  if (w.packed) return bind_packed(op, w);
  const Type& x = *op.reads[0].type;
  const int64_t sequences = x.shape[0], tokens = x.shape[1], width = x.shape.last();
  if (w.phase == Phase::kF) {
    std::vector<gpu::PositionsForward> calls;
    for_positions(op, x, [&](int64_t first, int64_t n, int64_t position) {
      const bool whole = n == tokens;
      for (int64_t b = 0; b < (whole ? 1 : sequences); ++b) {
        const int64_t from = (b * tokens + first) * width;
        calls.push_back({.x = past(input(op.reads[0]), from),
                         .table = past(input(op.reads[1]), position * width),
                         .y = past(output(op.writes[0]), from),
                         .sequences = whole ? sequences : 1,
                         .tokens = n,
                         .width = width});
      }
    });
    return [this, calls, s = op.instruction->stream](const StepState&) {
      for (const auto& args : calls) k_.positions_forward(args, stream(s));
    };
  }
  if (w.accumulate) check_in_place(op, op.writes[0], op.reads[1]);
  std::vector<gpu::PositionsWeight> calls;
  for_positions(op, x, [&](int64_t first, int64_t n, int64_t position) {
    calls.push_back({past(input(op.reads[0]), first * width), past(output(op.writes[0]), position * width), sequences, n, width,
                     w.accumulate, tokens * width});
  });
  // Positions of which no token is here have a gradient of 0.
  const int64_t used = tokens * width, all = op.writes[0].shape().elements();
  const bool in_front = calls.size() == 1 && calls[0].dtable.data == output(op.writes[0]).data;
  const gpu::Fill rest =
      in_front ? gpu::Fill{past(output(op.writes[0]), used), all - used, 0.0f} : gpu::Fill{output(op.writes[0]), all, 0.0f};
  return [this, calls, rest, fills = !w.accumulate && rest.n > 0, s = op.instruction->stream](const StepState&) {
    if (fills) k_.fill(rest, stream(s));
    for (const auto& args : calls) k_.positions_weight(args, stream(s));
  };
}

/// Backward a row of the table is a row of an embedding by positions.
Launch CudaBackend::bind_packed(const BoundOp& op, const Positions& w) {
  const auto [documents, width, rows] = packed_positions(op, w);
  const Tokens tokens = tokens_of(op, *op.reads[0].type);
  if (w.phase == Phase::kF)
    return launch(op, k_.positions_forward,
                  gpu::PositionsForward{.x = input(op.reads[0]),
                                        .table = input(op.reads[1]),
                                        .y = output(op.writes[0]),
                                        .sequences = tokens.sequences,
                                        .tokens = tokens.tokens,
                                        .width = width,
                                        .positions = documents.first,
                                        .positions_stride = documents.stride,
                                        .table_rows = rows});
  if (w.accumulate) check_in_place(op, op.writes[0], op.reads[2]);
  return launch(op, k_.embed_weight,
                gpu::EmbedWeight{.ids = documents.first,
                                 .dx = input(op.reads[0]),
                                 .dtable = output(op.writes[0]),
                                 .sequences = tokens.sequences,
                                 .tokens = tokens.tokens,
                                 .width = width,
                                 .table_rows = rows,
                                 .accumulate = w.accumulate,
                                 .part = tokens.part,
                                 .ids_stride = documents.stride});
}

// ---- the layers

Launch CudaBackend::bind_work(const BoundOp& op, const Norm& w) {
  if (w.accumulate)
    for (size_t i = 0; i < op.writes.size(); ++i)
      check_in_place(op, op.writes[i], op.reads[op.reads.size() - op.writes.size() + i]);
  if (w.over == SumOver::kSequences) return sum_sequences(op, w.accumulate);
  const Type& x = *op.reads[w.phase == Phase::kF ? 0 : 1].type;
  const int64_t rows = rows_of(x), width = x.shape.last();
  if (w.phase == Phase::kF)
    return launch(op, k_.norm_forward,
                  gpu::NormForward{.x = input(op.reads[0]),
                                   .gamma = input(op.reads[1]),
                                   .beta = w.rms ? Input{} : input(op.reads[2]),
                                   .y = output(op.writes[0]),
                                   .stats = op.writes[1].as<float>(),
                                   .rows = rows,
                                   .width = width,
                                   .epsilon = w.epsilon,
                                   .rms = w.rms});
  if (w.phase == Phase::kI)
    return launch(op, k_.norm_input,
                  gpu::NormInput{.dy = input(op.reads[0]),
                                 .x = input(op.reads[1]),
                                 .gamma = input(op.reads[2]),
                                 .stats = op.reads[3].as<const float>(),
                                 .residual = w.residual ? input(op.reads[4]) : Input{},
                                 .dx = output(op.writes[0]),
                                 .rows = rows,
                                 .width = width,
                                 .rms = w.rms});
  const gpu::NormWeight args{.dy = input(op.reads[0]),
                             .x = input(op.reads[1]),
                             .stats = op.reads[2].as<const float>(),
                             .dgamma = output(op.writes[0]),
                             .dbeta = w.rms ? Output{} : output(op.writes[1]),
                             .tokens = tokens_of(op, x),
                             .width = width,
                             .rms = w.rms,
                             .accumulate = w.accumulate};
  if (w.over == SumOver::kAll) return launch_with_scratch(op, k_.norm_weight, args);
  return by_sequence(op, k_.norm_weight, args, [](gpu::NormWeight& a, int64_t sequence) {
    const int64_t row = sequence * a.tokens.tokens;
    a.dy = past(a.dy, row * a.width);
    a.x = past(a.x, row * a.width);
    a.stats += row * (a.rms ? 1 : 2);
    a.dgamma = past(a.dgamma, sequence * a.width);
    if (!a.rms) a.dbeta = past(a.dbeta, sequence * a.width);
  });
}

Launch CudaBackend::bind_work(const BoundOp& op, const HeadNorm& w) {
  if (w.accumulate)
    for (size_t i = 0; i < op.writes.size(); ++i)
      check_in_place(op, op.writes[i], op.reads[op.reads.size() - op.writes.size() + i]);
  if (w.over == SumOver::kSequences) return sum_sequences(op, w.accumulate);
  const bool forward = w.phase == Phase::kF;
  const gpu::HeadNormShape shape{tokens_of(op, *op.reads[forward ? 0 : 1].type), w.heads, w.kv_heads, w.head_dim};
  if (forward)
    return launch(op, k_.head_norm_forward,
                  gpu::HeadNormForward{.shape = shape,
                                       .qkv = input(op.reads[0]),
                                       .gamma_q = input(op.reads[1]),
                                       .gamma_k = input(op.reads[2]),
                                       .y = output(op.writes[0]),
                                       .stats = op.writes[1].as<float>(),
                                       .epsilon = w.epsilon});
  if (w.phase == Phase::kI)
    return launch(op, k_.head_norm_input,
                  gpu::HeadNormInput{.shape = shape,
                                     .dy = input(op.reads[0]),
                                     .qkv = input(op.reads[1]),
                                     .gamma_q = input(op.reads[2]),
                                     .gamma_k = input(op.reads[3]),
                                     .stats = op.reads[4].as<const float>(),
                                     .dqkv = output(op.writes[0])});
  return launch_with_scratch(op, k_.head_norm_weight,
                             gpu::HeadNormWeight{.shape = shape,
                                                 .dy = input(op.reads[0]),
                                                 .qkv = input(op.reads[1]),
                                                 .stats = op.reads[2].as<const float>(),
                                                 .dgamma_q = output(op.writes[0]),
                                                 .dgamma_k = output(op.writes[1]),
                                                 .accumulate = w.accumulate,
                                                 .apart = w.over == SumOver::kTokens ? op.writes[0].shape()[1] : 0});
}

/// A launch of the kernel for each sequence, one after another in the stream's scratch; `move` takes its operands to a sequence.
template <class Args, class Move>
Launch CudaBackend::by_sequence(const BoundOp& op, void (*kernel)(const Args&, gpu::Stream), Args args, Move move) {
  const int64_t sequences = args.tokens.sequences;
  args.tokens.sequences = 1;
  std::vector<Launch> each;
  for (int64_t i = 0; i < sequences; ++i) {
    Args one = args;
    move(one, i);
    each.push_back(launch_with_scratch(op, kernel, one));
  }
  return one_after_another(std::move(each));
}

/// Each write is the sum over sequences of the read beside it: to a sum over tokens a sequence is one token.
Launch CudaBackend::sum_sequences(const BoundOp& op, bool accumulate) {
  std::vector<Launch> each;
  for (size_t i = 0; i < op.writes.size(); ++i)
    each.push_back(launch_with_scratch(op, k_.bias_weight,
                                       gpu::BiasWeight{.dy = input(op.reads[i]),
                                                       .dbias = output(op.writes[i]),
                                                       .tokens = tokens_of(op, *op.reads[i].type),
                                                       .width = op.reads[i].shape().last(),
                                                       .accumulate = accumulate}));
  return one_after_another(std::move(each));
}

Launch CudaBackend::bind_work(const BoundOp& op, const Linear& w) {
  if (w.phase == Phase::kW) {
    const Type& x = *op.reads[0].type;
    const Tokens tokens = tokens_of(op, x);
    const int64_t out = op.reads[1].shape().last();
    if (w.accumulate)
      for (size_t i = 0; i < op.writes.size(); ++i) check_in_place(op, op.writes[i], op.reads[2 + i]);
    Launch weight = product(op, k_.linear_weight, &gpu::Matmul::weight,
                            gpu::LinearWeight{.x = input(op.reads[0]),
                                              .dy = input(op.reads[1]),
                                              .dw = output(op.writes[0]),
                                              .tokens = tokens,
                                              .in = x.shape.last(),
                                              .out = out,
                                              .accumulate = w.accumulate});
    if (!w.bias) return weight;
    Launch bias = launch_with_scratch(
        op, k_.bias_weight,
        gpu::BiasWeight{
            .dy = input(op.reads[1]), .dbias = output(op.writes[1]), .tokens = tokens, .width = out, .accumulate = w.accumulate});
    return [weight, bias](const StepState& state) {
      weight(state);
      bias(state);
    };
  }
  const Tensor& weight = op.reads[1];
  const StripRows strips = strip_rows(op, w);
  const int64_t out = weight.shape()[0], in = weight.shape()[1];
  if (w.carry) check_in_place(op, op.writes[0], op.reads.back());
  std::vector<Launch> each;  // a product of each sequence's strip
  for (int64_t b = 0; b < strips.sequences; ++b) {
    const int64_t from = strips.read + b * strips.read_step, to = strips.written + b * strips.written_step;
    if (w.phase == Phase::kI)
      each.push_back(product(op, k_.linear_input, &gpu::Matmul::input,
                             gpu::LinearInput{.dy = past(input(op.reads[0]), from * out),
                                              .w = input(weight),
                                              .dx = past(output(op.writes[0]), to * in),
                                              .rows = strips.rows,
                                              .in = in,
                                              .out = out,
                                              .out_part = part_of(op, *weight.type, 0)}));
    else
      each.push_back(product(op, k_.linear_forward, &gpu::Matmul::forward,
                             gpu::LinearForward{.x = past(input(op.reads[0]), from * in),
                                                .w = input(weight),
                                                .bias = w.bias ? input(op.reads[2]) : Input{},
                                                .y = past(output(op.writes[0]), to * out),
                                                .rows = strips.rows,
                                                .in = in,
                                                .out = out,
                                                .in_part = part_of(op, *weight.type, 1)}));
  }
  return each.size() == 1 ? each[0] : one_after_another(std::move(each));
}

/// Strips are copied, or summands are added as a collective of ranks on one device adds them.
Launch CudaBackend::bind_work(const BoundOp& op, const Strips& w) {
  std::vector<const void*> parts;
  for (const size_t i : strip_order(op, w)) parts.push_back(op.reads[i].data);
  const Type& y = *op.writes[0].type;
  auto* const to = static_cast<std::byte*>(op.writes[0].data);
  if (w.sum)
    return [this, dtype = y.dtype, n = y.shape.elements(), parts, to = static_cast<void*>(to),
            s = op.instruction->stream](const StepState&) {
      k_.combine({.parts = parts.data(), .count = static_cast<int>(parts.size()), .outs = &to, .n = n, .dtype = dtype}, stream(s));
    };
  const int64_t bytes = op.reads[0].type->bytes() / y.shape[0];  // of a strip
  return [this, parts, to, bytes, sequences = y.shape[0], s = op.instruction->stream](const StepState&) {
    const auto n = static_cast<int64_t>(parts.size());
    for (int64_t b = 0; b < sequences; ++b)
      for (int64_t i = 0; i < n; ++i)
        device_.copy(to + (b * n + i) * bytes, static_cast<const std::byte*>(parts[static_cast<size_t>(i)]) + b * bytes, bytes, s);
  };
}

/// Has the role's table of rotations by heads of `width` filled before the first step, and gives its rows. It depends on the positions alone:
/// all layers and both directions share it.
RopeRows CudaBackend::want_rope_table(const BoundOp& op, const Type& qkv, int width, float theta) {
  SHARDLAB_CHECK(op.rope_table != nullptr, "`{}` has no table: the role lacks `rope.table`", describe(*op.plan, *op.instruction));
  const RopeRows rows = rope_rows(op, qkv);
  std::vector<float>& values = rope_values_[op.rope_table];
  values.resize(static_cast<size_t>(rows.count * width));
  kernels::rope_table(rows.begin, rows.count, width, theta, values.data(), rows.order, rows.total);
  return rows;
}

Launch CudaBackend::bind_work(const BoundOp& op, const Rope& w) {
  const Type& qkv = *op.writes[0].type;
  const Tokens tokens = tokens_of(op, qkv);
  check_in_place(op, op.writes[0], op.reads[0]);
  const RopeRows rows = want_rope_table(op, qkv, w.head_dim, w.theta);
  const DocumentPositions documents = document_positions(op, qkv);
  return launch(op, k_.rope,
                gpu::Rope{.qkv = output(op.writes[0]),
                          .sequences = tokens.sequences,
                          .tokens = tokens.tokens,
                          .heads = w.heads,
                          .kv_heads = w.kv_heads,
                          .head_dim = w.head_dim,
                          .backward = w.phase == Phase::kI,
                          .table = op.rope_table,
                          .positions = documents.first,
                          .positions_stride = documents.stride,
                          .table_rows = rows.count});
}

Launch CudaBackend::bind_work(const BoundOp& op, const LatentHeads& w) {
  const bool back = w.phase == Phase::kI;
  const auto &parts = back ? op.writes : op.reads, &whole = back ? op.reads : op.writes;
  const Type& qkv = *whole[0].type;
  const Tokens tokens = tokens_of(op, qkv);
  const RopeRows rows = want_rope_table(op, qkv, w.rope, w.theta);
  const DocumentPositions documents = document_positions(op, qkv);
  return launch(op, k_.latent_heads,
                gpu::LatentHeads{.q = output(parts[0]),
                                 .kv = output(parts[1]),
                                 .k_rope = output(parts[2]),
                                 .qkv = output(whole[0]),
                                 .sequences = tokens.sequences,
                                 .tokens = tokens.tokens,
                                 .heads = w.heads,
                                 .nope = w.nope,
                                 .rope = w.rope,
                                 .value_dim = w.v_dim,
                                 .back = back,
                                 .table = op.rope_table,
                                 .positions = documents.first,
                                 .positions_stride = documents.stride,
                                 .table_rows = rows.count});
}

Launch CudaBackend::bind_work(const BoundOp& op, const Regroup& w) {
  const Shape& parts = (w.join ? op.reads[0] : op.writes[0]).shape();
  return launch(op, k_.regroup,
                gpu::Regroup{.from = input(op.reads[0]),
                             .to = output(op.writes[0]),
                             .sequences = parts[2],
                             .tokens = parts[1],
                             .parts = parts[0],
                             .width = parts[3],
                             .join = w.join,
                             .copies = w.copies,
                             .head_dim = w.head_dim});
}

/// Own kernels, or cuDNN's where they were asked for or take the shape. Which it was is noted.
Result<Launch> CudaBackend::bind_attention(const BoundOp& op, const Attention& w) {
  const bool backward = w.phase == Phase::kI;
  const Type& out = *(backward ? op.reads[0] : op.writes[0]).type;
  const kernels::AttentionShape whole = attention_shape(op, w, options_.canonical);
  const gpu::AttentionShape shape{whole.sequences, whole.tokens, whole.heads,     whole.kv_heads, whole.head_dim,
                                  whole.canonical, whole.order,  whole.positions, whole.window,   whole.value_dim};
  gpu::LibraryAttention* library = nullptr;
  const bool reordered = shape.order.kind != TokenOrder::Kind::kContiguous;  // libraries mask by the place in memory
  const bool unequal = shape.values() != shape.head_dim;
  std::string reason = options_.canonical ? "canonical order"
                       : w.packed         ? "packed documents"
                       : w.window > 0     ? "a window"
                       : unequal          ? "values of another width"
                       : reordered        ? "order of tokens"
                                          : "";
  if (reordered && options_.attention == AttentionBy::kCudnn && !options_.canonical)
    return refuse(op, fmt::format("cannot run on cuDNN: tokens lie in {} parts, not in the order of the text", shape.order.parts),
                  "use attention: auto, or own");
  if (w.packed && options_.attention == AttentionBy::kCudnn && !options_.canonical)
    return refuse(op, "cannot run on cuDNN: its graphs here know no documents", "use attention: auto, or own");
  if (w.window > 0 && options_.attention == AttentionBy::kCudnn && !options_.canonical)
    return refuse(op, "cannot run on cuDNN: its graphs here know no windows", "use attention: auto, or own");
  if (unequal && options_.attention == AttentionBy::kCudnn && !options_.canonical)
    return refuse(op, "cannot run on cuDNN: its graphs here have one width of heads", "use attention: auto, or own");
  if (options_.attention != AttentionBy::kOwn && !options_.canonical && !reordered && !unequal && !w.packed && w.window == 0) {
    StreamLibraries& shared = libraries_[op.instruction->stream];
    const Result<void> prepared = prepare_cudnn(shared, shape, out.dtype, backward);
    if (!prepared.ok() && options_.attention == AttentionBy::kCudnn)
      return refuse(op, fmt::format("cannot run on cuDNN: {}", prepared.error().message), "use attention: auto, or own");
    if (prepared.ok()) library = shared.attention.get();
    if (!prepared.ok()) reason = prepared.error().message;
  }
  note(fmt::format("attention {} by {}", backward ? "backward" : "forward",
                   library != nullptr ? library->name() : "own kernels" + (reason.empty() ? "" : fmt::format(" ({})", reason))));
  if (const auto why = gpu::attention_refusal(shape); library == nullptr && !why.empty())
    return refuse(op, fmt::format("cannot run: {}", why), "choose a model with smaller heads");
  const gpu::Scratch scratch = lent(op);
  const int s = op.instruction->stream;
  if (backward) {
    const gpu::AttentionInput args{.shape = shape,
                                   .dout = input(op.reads[0]),
                                   .o = input(op.reads[1]),
                                   .lse = op.reads[2].as<const float>(),
                                   .qkv = input(op.reads[3]),
                                   .dqkv = output(op.writes[0]),
                                   .scratch = scratch};
    if (library == nullptr) return launch(op, k_.attention_input, args);
    return Launch([this, library, args, s](const StepState&) { library->input(args, args.scratch, stream(s)); });
  }
  const gpu::AttentionForward args{
      .shape = shape, .qkv = input(op.reads[0]), .o = output(op.writes[0]), .lse = op.writes[1].as<float>()};
  if (library == nullptr) return launch(op, k_.attention_forward, args);
  return Launch([this, library, args, scratch, s](const StepState&) { library->forward(args, scratch, stream(s)); });
}

/// The stream's handle, opened by the first op that asks; and its plan for the shape.
Launch CudaBackend::bind_work(const BoundOp& op, const SplitHeads& w) {
  const bool back = w.phase == Phase::kI;
  const Tensor &qkv = back ? op.writes[0] : op.reads[0], &q = back ? op.reads[0] : op.writes[0],
               &kv = back ? op.reads[1] : op.writes[1];
  return launch(
      op, k_.split_heads,
      gpu::SplitHeads{output(qkv), output(q), output(kv), rows_of(*qkv.type), w.heads, w.kv_heads, w.head_dim, back, w.v_dim});
}

Result<Launch> CudaBackend::bind_block(const BoundOp& op, const AttentionBlock& w) {
  const kernels::AttentionBlockShape b = block_shape(op, w, options_.canonical);
  const gpu::AttentionBlockShape shape{b.sequences,   b.queries,   b.keys,  b.heads,     b.kv_heads,  b.head_dim, b.tokens,
                                       b.first_query, b.first_key, b.order, b.canonical, b.positions, b.window,   b.value_dim};
  if (const auto why = gpu::attention_refusal(shape); !why.empty())
    return refuse(op, fmt::format("cannot run: {}", why), "choose a model with smaller heads");
  if (w.phase == Phase::kF) {
    if (w.carry)
      for (const size_t i : {size_t{0}, size_t{1}}) check_in_place(op, op.writes[i], op.reads[2 + i]);
    return launch(op, k_.attention_block_forward,
                  gpu::AttentionBlockForward{.shape = shape,
                                             .q = input(op.reads[0]),
                                             .kv = input(op.reads[1]),
                                             .o = op.writes[0].as<float>(),
                                             .lse = w.partial ? nullptr : op.writes[1].as<float>(),
                                             .sums = w.partial ? op.writes[1].as<float>() : nullptr,
                                             .carry = w.carry});
  }
  if (w.carry) check_in_place(op, op.writes[0], op.reads[5]);
  if (w.carry_kv) check_in_place(op, op.writes[1], op.reads[w.carry ? 6 : 5]);
  return launch(op, k_.attention_block_input,
                gpu::AttentionBlockInput{.shape = shape,
                                         .dout = input(op.reads[0]),
                                         .o = input(op.reads[1]),
                                         .lse = op.reads[2].as<const float>(),
                                         .q = input(op.reads[3]),
                                         .kv = input(op.reads[4]),
                                         .dq = output(op.writes[0]),
                                         .dkv = output(op.writes[1]),
                                         .carry = w.carry,
                                         .carry_kv = w.carry_kv,
                                         .by_head = w.partial,
                                         .scratch = lent(op)});
}

Launch CudaBackend::bind_work(const BoundOp& op, const AttentionMerge& w) {
  const std::vector<size_t> order = merge_order(op, w);
  const Shape& y = op.writes[0].shape();
  const int parts = static_cast<int>(order.size());
  if (w.phase == Phase::kF) {
    gpu::AttentionMergeForward args{{y[0], y[1], w.heads, value_dim_of(w), parts}, output(op.writes[0])};
    for (size_t i = 0; i < order.size(); ++i) {
      args.merge.part_o[i] = op.reads[2 * order[i]].as<const float>();
      args.merge.part_sums[i] = op.reads[2 * order[i] + 1].as<const float>();
    }
    args.merge.lse = op.writes[1].as<float>();
    return launch(op, k_.attention_merge_forward, args);
  }
  gpu::AttentionMergeInput args{
      {y[0] * y[1], w.heads, w.keys ? w.kv_heads : w.heads, w.head_dim + (w.keys ? value_dim_of(w) : int64_t{0}), parts},
      output(op.writes[0])};
  for (size_t i = 0; i < order.size(); ++i) args.merge.part[i] = op.reads[order[i]].as<const float>();
  return launch(op, k_.attention_merge_input, args);
}

Result<void> CudaBackend::prepare_cudnn(StreamLibraries& shared, const gpu::AttentionShape& shape, DType type, bool backward) {
  const auto none = [](std::string why) { return Error{ExitCode::kUsage, std::move(why), "", ""}; };
  if (options_.cudnn == nullptr) return none(options_.no_cudnn);
  device_.attach_thread();
  const MemoryAccount::Taking taking(device_.account(), MemoryUse::kCudnn, device_.device());
  if (shared.attention == nullptr && shared.no_attention.empty()) {
    auto made = gpu::LibraryAttention::create(*options_.cudnn);
    if (made.ok())
      shared.attention = std::move(made).value();
    else
      shared.no_attention = made.error().message;
  }
  if (shared.attention == nullptr) return none(shared.no_attention);
  return shared.attention->prepare(shape, type, backward);
}

// ---- mixtures of experts

/// Has the layer's table filled before the first step.
CudaBackend::Places CudaBackend::want_places(const BoundOp& op) {
  const ExpertPlacement* placement = placement_of(op.plan->expert_placement, op.instruction->layer);
  if (placement == nullptr) return {};
  SHARDLAB_CHECK(op.expert_places != nullptr, "`{}` has no table: the role lacks `expert.places`",
                 describe(*op.plan, *op.instruction));
  std::vector<int32_t>& values = place_values_[op.expert_places];
  values = placement->places;
  values.insert(values.end(), placement->experts.begin(), placement->experts.end());
  return {op.expert_places, op.expert_places + placement->places.size()};
}

Launch CudaBackend::bind_work(const BoundOp& op, const Route& w) {
  const bool forward = w.phase == Phase::kF;
  const Tensor &logits = op.reads[forward ? 0 : 1], &choice = forward ? op.writes[1] : op.reads[2];
  const kernels::RouteShape shape = route_shape(w, logits, choice);
  const Places placed = want_places(op);
  if (forward)
    return launch(op, k_.route_forward,
                  gpu::RouteForward{.shape = shape,
                                    .logits = logits.as<const float>(),
                                    .bias = w.biased ? op.reads[1].as<const float>() : nullptr,
                                    .places = placed.of_experts,
                                    .weights = op.writes[0].as<float>(),
                                    .choice = choice.as<int32_t>(),
                                    .counts = op.writes[2].as<int32_t>(),
                                    .ranks = op.writes[2].shape()[0],
                                    .leaves = op.writes[2].shape()[1],
                                    .capacity = w.capacity,
                                    .chosen = chosen_by_all(op, w),
                                    .by_place = placed.experts});
  return launch(op, k_.route_input,
                gpu::RouteInput{.shape = shape,
                                .dweights = op.reads[0].as<const float>(),
                                .logits = logits.as<const float>(),
                                .choice = choice.as<const int32_t>(),
                                .by_place = placed.experts,
                                .load = w.reads_load() ? op.reads[3].as<const float>() : nullptr,
                                .whole_tokens = w.sequence,
                                .dlogits = op.writes[0].as<float>(),
                                .scratch = lent(op).data});
}

Launch CudaBackend::bind_work(const BoundOp& op, const ChooseExperts& w) {
  return launch(op, k_.route_forward,
                gpu::RouteForward{.shape = choose_shape(w, op.reads[0], op.writes[0]),
                                  .logits = op.reads[0].as<const float>(),
                                  .bias = w.biased ? op.reads[1].as<const float>() : nullptr,
                                  .places = want_places(op).of_experts,
                                  .choice = op.writes[0].as<int32_t>()});
}

Launch CudaBackend::bind_work(const BoundOp& op, const ExpertLoad& w) {
  const Shape& choice = op.reads[0].shape();
  if (w.accumulate) check_in_place(op, op.writes[0], op.reads[1]);
  return launch(op, k_.expert_load,
                gpu::ExpertLoad{.choice = op.reads[0].as<const int32_t>(),
                                .load = op.writes[0].as<float>(),
                                .sequences = choice[0],
                                .tokens = choice[1],
                                .top_k = choice[2],
                                .experts = op.writes[0].shape().last(),
                                .accumulate = w.accumulate,
                                .by_place = want_places(op).experts});
}

Launch CudaBackend::bind_work(const BoundOp& op, const Dispatch& w) {
  const Shape& choice = op.reads[1].shape();
  return launch_with_scratch(op, k_.dispatch,
                             gpu::Dispatch{.from = input(op.reads[0]),
                                           .to = output(op.writes[0]),
                                           .choice = op.reads[1].as<const int32_t>(),
                                           .tokens = choice[0] * choice[1],
                                           .top_k = choice[2],
                                           .experts = w.experts,
                                           .width = op.reads[0].shape().last(),
                                           .back = w.phase == Phase::kI});
}

Launch CudaBackend::bind_work(const BoundOp& op, const Combine& w) {
  const bool forward = w.phase == Phase::kF;
  const Tensor& choice = op.reads[forward ? 2 : 3];
  const Shape& c = choice.shape();
  const int64_t tokens = c[0] * c[1], width = op.reads[0].shape().last();
  if (forward)
    return launch_with_scratch(op, k_.combine_forward,
                               gpu::CombineForward{.rows = input(op.reads[0]),
                                                   .weights = op.reads[1].as<const float>(),
                                                   .choice = choice.as<const int32_t>(),
                                                   .y = output(op.writes[0]),
                                                   .tokens = tokens,
                                                   .top_k = c[2],
                                                   .experts = w.experts,
                                                   .width = width});
  return launch_with_scratch(op, k_.combine_input,
                             gpu::CombineInput{.dy = input(op.reads[0]),
                                               .rows = input(op.reads[1]),
                                               .weights = op.reads[2].as<const float>(),
                                               .choice = choice.as<const int32_t>(),
                                               .drows = output(op.writes[0]),
                                               .dweights = op.writes[1].as<float>(),
                                               .tokens = tokens,
                                               .top_k = c[2],
                                               .experts = w.experts,
                                               .width = width});
}

Launch CudaBackend::bind_work(const BoundOp& op, const Gate& w) {
  const Type& x = *op.reads[0].type;
  const int64_t tokens = rows_of(x), width = x.shape.last();
  if (w.phase == Phase::kF)
    return launch(op, k_.gate_forward,
                  gpu::GateForward{input(op.reads[0]), input(op.reads[1]), output(op.writes[0]), tokens, width});
  return launch(op, k_.gate_input,
                gpu::GateInput{input(op.reads[0]), input(op.reads[1]), input(op.reads[2]), output(op.writes[0]),
                               output(op.writes[1]), tokens, width});
}

Launch CudaBackend::bind_work(const BoundOp& op, const GroupedLinear& w) {
  const kernels::RowCounts rows = row_counts(op.reads[2], op.reads[0], w.sources);
  if (w.phase == Phase::kW) {
    if (w.accumulate) check_in_place(op, op.writes[0], op.reads[3]);
    const Shape& dw = op.writes[0].shape();
    return launch_with_scratch(op, k_.grouped_linear_weight,
                               gpu::GroupedLinearWeight{.rows = rows,
                                                        .x = input(op.reads[0]),
                                                        .dy = input(op.reads[1]),
                                                        .dw = output(op.writes[0]),
                                                        .in = dw[2],
                                                        .out = dw[1],
                                                        .accumulate = w.accumulate});
  }
  const Shape& weight = op.reads[1].shape();
  const bool back = w.phase == Phase::kI;
  return launch_with_scratch(op, k_.grouped_linear,
                             gpu::GroupedLinear{.rows = rows,
                                                .x = input(op.reads[0]),
                                                .w = input(op.reads[1]),
                                                .y = output(op.writes[0]),
                                                .in = weight[2],
                                                .out = weight[1],
                                                .part = part_of(op, *op.reads[1].type, back ? 1 : 2),
                                                .back = back});
}

Launch CudaBackend::bind_work(const BoundOp& op, const Activation& w) {
  if (w.counted) {
    const bool forward = w.phase == Phase::kF;
    return launch_with_scratch(op, k_.grouped_activation,
                               gpu::GroupedActivation{.rows = row_counts(op.reads.back(), op.reads[0], 1),
                                                      .u = input(op.reads[forward ? 0 : 1]),
                                                      .da = forward ? Input{} : input(op.reads[0]),
                                                      .to = output(op.writes[0]),
                                                      .width = (forward ? op.writes[0] : op.reads[0]).shape().last(),
                                                      .swiglu = w.swiglu});
  }
  const int64_t n = (w.phase == Phase::kF ? op.writes[0] : op.reads[0]).shape().elements();
  if (w.phase == Phase::kF)
    return launch(op, k_.activation_forward, gpu::ActivationForward{input(op.reads[0]), output(op.writes[0]), n, w.swiglu});
  return launch(op, k_.activation_input,
                gpu::ActivationInput{input(op.reads[0]), input(op.reads[1]), output(op.writes[0]), n, w.swiglu});
}

Launch CudaBackend::bind_work(const BoundOp& op, const Residual& w) {
  const Type& x = *op.reads[0].type;
  const int64_t width = x.shape.last();
  if (w.phase == Phase::kF)
    return launch(op, k_.residual_forward,
                  gpu::ResidualForward{.x = input(op.reads[0]),
                                       .z = input(op.reads[1]),
                                       .bias = w.bias ? input(op.reads[2]) : Input{},
                                       .y = output(op.writes[0]),
                                       .rows = rows_of(x),
                                       .width = width});
  if (w.accumulate) check_in_place(op, op.writes[0], op.reads[1]);
  const gpu::BiasWeight args{.dy = input(op.reads[0]),
                             .dbias = output(op.writes[0]),
                             .tokens = tokens_of(op, x),
                             .width = width,
                             .accumulate = w.accumulate};
  if (w.over != SumOver::kTokens) return launch_with_scratch(op, k_.bias_weight, args);
  return by_sequence(op, k_.bias_weight, args, [](gpu::BiasWeight& a, int64_t sequence) {
    a.dy = past(a.dy, sequence * a.tokens.tokens * a.width);
    a.dbias = past(a.dbias, sequence * a.width);
  });
}

Launch CudaBackend::bind_work(const BoundOp& op, const Dropout& w) {
  const Type& z = *op.writes[0].type;
  check_in_place(op, op.writes[0], op.reads[0]);
  const kernels::Part tokens = part_of(op, z, 1), width = part_of(op, z, 2);
  gpu::Dropout args{.z = output(op.writes[0]),
                    .sequences = z.shape[0],
                    .tokens = z.shape[1],
                    .width = z.shape[2],
                    .sequence_begin = op.first_sequence(z),
                    .token_begin = tokens.begin,
                    .tokens_total = tokens.total,
                    .width_begin = width.begin,
                    .width_total = width.total,
                    .p = w.p,
                    .key = {op.seed, RandomUse::kDropout, dropout_tensor(op.instruction->layer, w.site), 0}};
  return [this, args, s = op.instruction->stream](const StepState& state) mutable {
    args.key.step = static_cast<uint32_t>(state.step);
    k_.dropout(args, stream(s));
  };
}

// ---- the loss

Launch CudaBackend::bind_work(const BoundOp& op, const CrossEntropy& w) {
  using Part = CrossEntropy::Part;
  const Type& logits = *op.reads[0].type;
  gpu::CrossEntropy args{.logits = output(op.reads[0]),
                         .tokens = tokens_of(op, logits),
                         .vocab = logits.shape.last(),
                         .vocab_part = part_of(op, logits, logits.shape.rank - 1),
                         .words = w.words,
                         .loss_tokens = w.tokens};
  if (w.part != Part::kMax) args.targets = op.reads[1].as<const int32_t>();
  if (const size_t scale = w.part == Part::kGrad ? 4 : 2;
      (w.part == Part::kFused || w.part == Part::kGrad) && op.reads.size() > scale)
    args.loss_scale = op.reads[scale].as<const float>();
  switch (w.part) {
    case Part::kFused:
      args.nll = op.writes[0].as<float>();
      check_in_place(op, op.writes[1], op.reads[0]);
      return launch_with_scratch(op, k_.cross_entropy_fused, args);
    case Part::kLossOnly: args.nll = op.writes[0].as<float>(); return launch_with_scratch(op, k_.cross_entropy_loss_only, args);
    case Part::kMax: args.max = op.writes[0].as<float>(); return launch(op, k_.cross_entropy_max, args);
    case Part::kSum:
      args.max = op.reads[2].as<float>();
      args.sums = op.writes[0].as<float>();
      return launch(op, k_.cross_entropy_sum, args);
    case Part::kGrad: break;
  }
  args.max = op.reads[2].as<float>();
  args.sums = op.reads[3].as<float>();
  args.nll = op.writes[0].as<float>();
  check_in_place(op, op.writes[1], op.reads[0]);
  return launch_with_scratch(op, k_.cross_entropy_grad, args);
}

// ---- sums and updates

Launch CudaBackend::bind_work(const BoundOp& op, const Add&) {
  return launch(op, k_.add,
                gpu::Add{input(op.reads[0]), input(op.reads[1]), output(op.writes[0]), op.writes[0].shape().elements()});
}

/// Whole numbers become 0, which is 0 in every byte.
Launch CudaBackend::bind_work(const BoundOp& op, const Fill& w) {
  if (op.writes[0].type->dtype == DType::i32)
    return [this, to = op.writes[0].data, bytes = op.writes[0].type->bytes(), s = op.instruction->stream](const StepState&) {
      device_.fill(to, 0, bytes, s);
    };
  return launch(op, k_.fill, gpu::Fill{output(op.writes[0]), op.writes[0].shape().elements(), w.value});
}

/// Addresses and sizes of the reads, kept by the launch that lends them to a kernel.
struct PartList {
  std::vector<const void*> data;
  std::vector<int64_t> sizes;
  explicit PartList(const std::vector<Tensor>& reads) {
    for (const Tensor& t : reads) {
      data.push_back(t.data);
      sizes.push_back(t.shape().elements());
    }
  }
  gpu::ArrayList list() const { return {data.data(), sizes.data(), static_cast<int>(data.size())}; }
};

Launch CudaBackend::bind_work(const BoundOp& op, const SumScalars& w) {
  const PartList parts(op.reads);
  gpu::SumScalars args{
      .parts = parts.list(), .factor_num = w.factor.num, .factor_den = w.factor.den, .total = op.writes[0].as<float>()};
  args.scratch = lent(op);
  return [this, parts, args, s = op.instruction->stream](const StepState&) mutable {
    args.parts = parts.list();
    k_.sum_scalars(args, stream(s));
  };
}

Launch CudaBackend::bind_work(const BoundOp& op, const SquaredNorm&) {
  SHARDLAB_CHECK(op.writes[0].type->dtype == DType::f64, "a squared norm is f64, not {}", name_of(op.writes[0].type->dtype));
  const PartList parts(op.reads);
  const DType dtype = op.reads.empty() ? DType::f32 : op.reads[0].type->dtype;
  gpu::SquaredNorm args{.parts = parts.list(), .dtype = dtype, .total = op.writes[0].as<double>()};
  args.scratch = lent(op);
  return [this, parts, args, s = op.instruction->stream](const StepState&) mutable {
    args.parts = parts.list();
    k_.squared_norm(args, stream(s));
  };
}

/// The factor by which an update multiplies its gradient: the operand behind the others, if there is one.
const float* factor_of(const BoundOp& op, size_t operands) {
  return op.reads.size() > operands ? op.reads[operands].as<const float>() : nullptr;
}

Launch CudaBackend::bind_work(const BoundOp& op, const Sgd& w) {
  check_in_place(op, op.writes[0], op.reads[1]);
  gpu::Sgd args{input(op.reads[0]), output(op.writes[0]), op.writes[0].shape().elements(), 0, w.weight_decay, factor_of(op, 2)};
  return [this, args, s = op.instruction->stream](const StepState& state) mutable {
    args.learning_rate = state.learning_rate;
    k_.sgd(args, stream(s));
  };
}

Launch CudaBackend::bind_work(const BoundOp& op, const AdamW& w) {
  for (size_t i = 0; i < 3; ++i) check_in_place(op, op.writes[i], op.reads[1 + i]);
  gpu::AdamW args{.grad = input(op.reads[0]),
                  .param = output(op.writes[0]),
                  .m = op.writes[1].as<float>(),
                  .v = op.writes[2].as<float>(),
                  .n = op.writes[0].shape().elements(),
                  .beta1 = w.beta1,
                  .beta2 = w.beta2,
                  .epsilon = w.epsilon,
                  .weight_decay = w.weight_decay,
                  .factor = factor_of(op, 4)};
  return [this, args, s = op.instruction->stream](const StepState& state) mutable {
    args.step = state.applied;
    args.learning_rate = state.learning_rate;
    k_.adamw(args, stream(s));
  };
}

Launch CudaBackend::bind_work(const BoundOp& op, const AdamW8bit& w) {
  for (size_t i = 0; i < 5; ++i) check_in_place(op, op.writes[i], op.reads[1 + i]);
  gpu::AdamW8bit args{.grad = input(op.reads[0]),
                      .param = output(op.writes[0]),
                      .m = op.writes[1].as<uint8_t>(),
                      .v = op.writes[2].as<uint8_t>(),
                      .m_scale = op.writes[3].as<float>(),
                      .v_scale = op.writes[4].as<float>(),
                      .n = op.writes[0].shape().elements(),
                      .beta1 = w.beta1,
                      .beta2 = w.beta2,
                      .epsilon = w.epsilon,
                      .weight_decay = w.weight_decay,
                      .factor = factor_of(op, 6)};
  return [this, args, s = op.instruction->stream](const StepState& state) mutable {
    args.step = state.applied;
    args.learning_rate = state.learning_rate;
    k_.adamw8bit(args, stream(s));
  };
}

Launch CudaBackend::bind_work(const BoundOp& op, const Lion& w) {
  for (size_t i = 0; i < 2; ++i) check_in_place(op, op.writes[i], op.reads[1 + i]);
  gpu::Lion args{.grad = input(op.reads[0]),
                 .param = output(op.writes[0]),
                 .m = op.writes[1].as<float>(),
                 .n = op.writes[0].shape().elements(),
                 .beta1 = w.beta1,
                 .beta2 = w.beta2,
                 .weight_decay = w.weight_decay,
                 .factor = factor_of(op, 3)};
  return [this, args, s = op.instruction->stream](const StepState& state) mutable {
    args.learning_rate = state.learning_rate;
    k_.lion(args, stream(s));
  };
}

Launch CudaBackend::bind_work(const BoundOp& op, const Copy&) {
  const Tensor &from = op.reads[0], &to = op.writes[0];
  if (from.shape() != to.shape())
    return [this, from = from.as<const std::byte>(), to = to.as<std::byte>(), pieces = own_pieces(op),
            s = op.instruction->stream](const StepState&) {
      for (const OwnPiece& piece : pieces) device_.copy(to + piece.to, from + piece.from, static_cast<int64_t>(piece.bytes), s);
    };
  if (from.type->dtype != to.type->dtype) return launch(op, k_.cast, gpu::Cast{input(from), output(to), to.shape().elements()});
  return [this, from = from.data, to = to.data, bytes = to.type->bytes(), s = op.instruction->stream](const StepState&) {
    device_.copy(to, from, bytes, s);
  };
}

}  // namespace

BackendFactory cuda_backend(Node& node, const CudaOptions& options) {
  return [&node, options](int rank) { return std::make_unique<CudaBackend>(node, rank, options); };
}

}  // namespace shardlab::runtime::cuda
