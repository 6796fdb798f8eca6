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
  return std::get<double>(rate) * model_flops_per_token(o.config.model, o.config.train.seq_len) / 1e12;
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

struct Column {
  std::string_view name;
  Value (*get)(Outcome);
};

constexpr std::array kColumns{
    Column{"job_id", [](Outcome) { return nothing(); }},
    Column{"name", [](Outcome o) { return Value(o.config.name); }},
    Column{"nodes",
           [](Outcome o) {
             const int64_t of_node = std::max(1, o.config.machine.devices_per_node);
             return Value((o.config.layout.world_size() + of_node - 1) / of_node);
           }},
    Column{"seq_len", [](Outcome o) { return Value(int64_t{o.config.train.seq_len}); }},
    Column{"mbs", [](Outcome o) { return Value(int64_t{o.config.train.micro_batch}); }},
    Column{"batch_accum", [](Outcome o) { return Value(int64_t{o.config.train.grad_accumulation}); }},
    Column{"gbs", [](Outcome o) { return Value(o.config.train.global_batch_tokens / o.config.train.seq_len); }},
    Column{"mTFLOPs", model_tflops},
    Column{"hTFLOPs", hardware_tflops},
    Column{"tok/s/gpu", tokens_per_gpu},
    Column{"Mem Alloc (GB)", allocated},
    Column{"Mem Res (GB)", [](Outcome) { return nothing(); }},
    Column{"dp", [](Outcome o) { return Value(int64_t{o.config.layout.dp}); }},
    Column{"pp", [](Outcome o) { return Value(int64_t{o.config.layout.pp}); }},
    Column{"tp", [](Outcome o) { return Value(int64_t{o.config.layout.tp}); }},
    Column{"cp", [](Outcome o) { return Value(int64_t{o.config.layout.cp}); }},
    Column{"ep", [](Outcome o) { return Value(int64_t{o.config.layout.ep}); }},
    Column{"pp_engine", engine},
    Column{"tp_mode", tp_mode},
    Column{"tp_async_comm", [](Outcome) { return nothing(); }},
    Column{"recompute_layer", [](Outcome o) { return truth(o.config.layout.recompute != Recompute::kNone); }},
    Column{"hidden_size", [](Outcome o) { return Value(o.config.model.hidden); }},
    Column{"hidden_act", [](Outcome o) { return Value(std::string(o.config.model.is_llama() ? "silu" : "gelu")); }},
    Column{"num_layers", [](Outcome o) { return Value(o.config.model.layers); }},
    Column{"num_heads", [](Outcome o) { return Value(o.config.model.heads); }},
    Column{"num_kv_heads", [](Outcome o) { return Value(o.config.model.kv_heads); }},
    Column{"max_pos", [](Outcome o) { return o.config.model.max_positions > 0 ? Value(o.config.model.max_positions) : nothing(); }},
    Column{"vocab_size", [](Outcome o) { return Value(o.config.model.vocab); }},
    Column{"tie_word_embeddings", [](Outcome o) { return truth(o.config.model.tied_embeddings); }},
    Column{"dtype", dtype},
    Column{"zero_stage", [](Outcome o) { return Value(int64_t{o.config.layout.zero}); }},
    Column{"ddp_bucket_cap_mb",
           [](Outcome o) { return o.config.layout.bucket_bytes > 0 ? Value(o.config.layout.bucket_bytes >> 20) : nothing(); }},
    Column{"accumulate_grad_in_fp32", [](Outcome o) { return truth(element_types(o.config).gradient == DType::f32); }},
    Column{"Total Params", [](Outcome o) { return o.parameters > 0 ? Value(o.parameters) : nothing(); }},
    Column{"Local Params", [](Outcome) { return nothing(); }}};

}  // namespace

Table nanotron_table(std::span<const CaseOutcome> cases) {
  Table table;
  for (const Column& c : kColumns) table.columns.push_back({std::string(c.name)});
  for (const CaseOutcome& o : cases) {
    auto& row = table.rows.emplace_back();
    for (const Column& c : kColumns) row.push_back(c.get(o));
  }
  return table;
}

}  // namespace shardlab::reports
