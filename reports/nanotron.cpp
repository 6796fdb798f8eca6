#include "reports/nanotron.h"

#include <fmt/format.h>

#include <array>
#include <string>
#include <string_view>

#include "plan/precision.h"
#include "reports/columns.h"

namespace shardlab::reports {
namespace {

using Outcome = const CaseOutcome&;

Value nothing() { return std::monostate{}; }

double seconds_of_step(Outcome o) {
  if (o.status != Status::kOk) return 0;
  return o.measured && o.measured->step_s > 0 ? o.measured->step_s : o.predicted ? o.predicted->step_s : 0;
}

Value tokens_per_gpu(Outcome o) {
  const double step = seconds_of_step(o);
  if (step <= 0) return nothing();
  return static_cast<double>(o.config.train.global_batch_tokens) / step / o.config.layout.world_size();
}

Value model_tflops(Outcome o) {
  const Value rate = tokens_per_gpu(o);
  // Of a model that no case can hold the case has the body alone.
  if (!std::holds_alternative<double>(rate) || o.parameters != parameter_count(o.config.model)) return nothing();
  const std::optional<double> flops = model_flops_per_token(o.config);
  return flops ? Value(std::get<double>(rate) * *flops / 1e12) : nothing();
}

/// What is recomputed counts too.
Value hardware_tflops(Outcome o) { return o.config.layout.recompute == Recompute::kNone ? model_tflops(o) : nothing(); }

Value gib(int64_t bytes) { return bytes > 0 ? Value(static_cast<double>(bytes) / (1 << 30)) : nothing(); }
Value allocated(Outcome o) {
  if (o.measured && o.measured->peak_bytes > 0) return gib(o.measured->peak_bytes);
  return o.predicted ? gib(o.predicted->peak_bytes) : nothing();
}

/// "True", as Python prints it.
Value truth(bool value) { return std::string(value ? "True" : "False"); }

Value engine(Outcome o) {
  switch (o.config.layout.schedule) {
    case Schedule::k1F1B: return std::string("OneForwardOneBackwardPipelineEngine");
    case Schedule::kAfab: return std::string("AllForwardAllBackwardPipelineEngine");
    default: return nothing();
  }
}

Value tp_mode(Outcome o) {
  return std::string(o.config.layout.sequence_parallel ? "TensorParallelLinearMode.REDUCE_SCATTER"
                                                       : "TensorParallelLinearMode.ALL_REDUCE");
}

Value dtype(Outcome o) {
  switch (element_types(o.config).compute) {
    case DType::bf16: return std::string("torch.bfloat16");
    case DType::f16: return std::string("torch.float16");
    case DType::f32: return std::string("torch.float32");
    default: return nothing();
  }
}

struct NanotronColumn {
  std::string_view name;
  Value (*get)(Outcome);
};

constexpr std::array kNanotronColumns{
    NanotronColumn{"job_id", [](Outcome) { return nothing(); }},
    NanotronColumn{"name", [](Outcome o) { return Value(o.config.name); }},
    NanotronColumn{"nodes",
                   [](Outcome o) {
                     const int64_t of_node = std::max(1, o.config.machine.devices_per_node);
                     return Value((o.config.layout.world_size() + of_node - 1) / of_node);
                   }},
    NanotronColumn{"seq_len", [](Outcome o) { return Value(int64_t{o.config.train.seq_len}); }},
    NanotronColumn{"mbs", [](Outcome o) { return Value(int64_t{o.config.train.micro_batch}); }},
    NanotronColumn{"batch_accum", [](Outcome o) { return Value(int64_t{o.config.train.grad_accumulation}); }},
    NanotronColumn{"gbs", [](Outcome o) { return Value(o.config.train.global_batch_tokens / o.config.train.seq_len); }},
    NanotronColumn{"mTFLOPs", model_tflops},
    NanotronColumn{"hTFLOPs", hardware_tflops},
    NanotronColumn{"tok/s/gpu", tokens_per_gpu},
    NanotronColumn{"Mem Alloc (GB)", allocated},
    NanotronColumn{"Mem Res (GB)", [](Outcome) { return nothing(); }},
    NanotronColumn{"dp", [](Outcome o) { return Value(int64_t{o.config.layout.dp}); }},
    NanotronColumn{"pp", [](Outcome o) { return Value(int64_t{o.config.layout.pp}); }},
    NanotronColumn{"tp", [](Outcome o) { return Value(int64_t{o.config.layout.tp}); }},
    NanotronColumn{"cp", [](Outcome o) { return Value(int64_t{o.config.layout.cp}); }},
    NanotronColumn{"ep", [](Outcome o) { return Value(int64_t{o.config.layout.ep}); }},
    NanotronColumn{"pp_engine", engine},
    NanotronColumn{"tp_mode", tp_mode},
    NanotronColumn{"tp_async_comm", [](Outcome) { return nothing(); }},
    NanotronColumn{"recompute_layer", [](Outcome o) { return truth(o.config.layout.recompute != Recompute::kNone); }},
    NanotronColumn{"hidden_size", [](Outcome o) { return Value(o.config.model.hidden); }},
    NanotronColumn{"hidden_act", [](Outcome o) { return Value(std::string(o.config.model.is_llama() ? "silu" : "gelu")); }},
    NanotronColumn{"num_layers", [](Outcome o) { return Value(o.config.model.layers); }},
    NanotronColumn{"num_heads", [](Outcome o) { return Value(o.config.model.heads); }},
    NanotronColumn{"num_kv_heads", [](Outcome o) { return Value(o.config.model.kv_heads); }},
    NanotronColumn{"max_pos",
                   [](Outcome o) { return o.config.model.max_positions > 0 ? Value(o.config.model.max_positions) : nothing(); }},
    NanotronColumn{"vocab_size", [](Outcome o) { return Value(o.config.model.vocab); }},
    NanotronColumn{"tie_word_embeddings", [](Outcome o) { return truth(o.config.model.tied_embeddings); }},
    NanotronColumn{"dtype", dtype},
    NanotronColumn{"zero_stage", [](Outcome o) { return Value(int64_t{o.config.layout.zero}); }},
    NanotronColumn{
        "ddp_bucket_cap_mb",
        [](Outcome o) { return o.config.layout.bucket_bytes > 0 ? Value(o.config.layout.bucket_bytes >> 20) : nothing(); }},
    NanotronColumn{"accumulate_grad_in_fp32", [](Outcome o) { return truth(element_types(o.config).gradient == DType::f32); }},
    NanotronColumn{"Total Params", [](Outcome o) { return o.parameters > 0 ? Value(o.parameters) : nothing(); }},
    NanotronColumn{"Local Params", [](Outcome) { return nothing(); }}};

}  // namespace

Table nanotron_table(std::span<const CaseOutcome> cases) {
  Table table;
  for (const NanotronColumn& c : kNanotronColumns) table.columns.push_back({std::string(c.name)});
  for (const CaseOutcome& o : cases) {
    auto& row = table.rows.emplace_back();
    for (const NanotronColumn& c : kNanotronColumns) row.push_back(c.get(o));
  }
  return table;
}

}  // namespace shardlab::reports
