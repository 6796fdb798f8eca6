#include "sweeps/keys.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <unordered_map>
#include <utility>

#include "sweeps/values.h"

namespace shardlab::sweeps {

namespace {

// ---- setters and getters: `text` has the key's form already -------------------------------------------------------------------

int to_int(const std::string& text) { return static_cast<int>(parse_count(text).value()); }
int64_t to_count(const std::string& text) { return parse_count(text).value(); }
float to_float(const std::string& text) { return static_cast<float>(parse_number(text).value()); }
std::string from(int64_t value) { return fmt::format("{}", value); }
std::string from(bool value) { return value ? "true" : "false"; }
std::string from(std::string_view value) { return std::string(value); }

/// Sets `field` to the enumerator whose name is `text`; false when none has it.
template <class E>
bool set_named(E& field, const std::string& text, std::initializer_list<E> enumerators) {
  for (const E e : enumerators)
    if (name_of(e) == text) {
      field = e;
      return true;
    }
  return false;
}

bool is_neutral(const std::string& text, std::initializer_list<std::string_view> neutral) {
  return std::find(neutral.begin(), neutral.end(), text) != neutral.end();
}

bool set_machine_rate(Case& c, double& field, std::string_view constant, const std::string& text) {
  if (c.machine.local) return false;  // a local machine is measured, not described
  field = parse_number(text).value();
  c.machine.device.provenance.erase(std::string(constant));  // no longer the preset's: given by whoever wrote the file
  return true;
}

bool set_peak(Case& c, const std::string& precision, const std::string& text) {
  if (c.machine.local) return false;
  c.machine.device.peak_flops[precision] = parse_number(text).value();
  c.machine.device.provenance.erase("peak_flops." + precision);
  return true;
}

constexpr auto kNeutralNone = +[](Case&, const std::string& t) { return is_neutral(t, {"none", "false"}); };

constexpr std::string_view kRates = "on a machine that is described, not local";

#define FIELD_INT(expression)         \
  [](Case& c, const std::string& t) { \
    c.expression = to_int(t);         \
    return true;                      \
  },                                  \
      [](const Case& c) { return from(int64_t{c.expression}); }
#define FIELD_COUNT(expression)                                      \
  [](Case& c, const std::string& t) {                                \
    c.expression = static_cast<decltype(c.expression)>(to_count(t)); \
    return true;                                                     \
  },                                                                 \
      [](const Case& c) { return from(static_cast<int64_t>(c.expression)); }
#define FIELD_FLOAT(expression)       \
  [](Case& c, const std::string& t) { \
    c.expression = to_float(t);       \
    return true;                      \
  },                                  \
      [](const Case& c) { return to_text(c.expression); }
#define FIELD_BOOL(expression)            \
  [](Case& c, const std::string& t) {     \
    c.expression = parse_bool(t).value(); \
    return true;                          \
  },                                      \
      [](const Case& c) { return from(c.expression); }
#define FIELD_TEXT(expression)        \
  [](Case& c, const std::string& t) { \
    c.expression = t;                 \
    return true;                      \
  },                                  \
      [](const Case& c) { return c.expression; }
#define FIELD_NAMED(expression, ...)                                                       \
  [](Case& c, const std::string& t) { return set_named(c.expression, t, {__VA_ARGS__}); }, \
      [](const Case& c) { return from(name_of(c.expression)); }

/// An empty dtype is fp32.
#define FIELD_DTYPE(expression)          \
  [](Case& c, const std::string& t) {    \
    c.expression = t == "fp32" ? "" : t; \
    return true;                         \
  },                                     \
      [](const Case& c) { return c.expression.empty() ? std::string("fp32") : c.expression; }
/// Calls `use` with each word of a list separated by spaces.
template <class Use>
void for_each_word(std::string_view list, const Use& use) {
  while (!list.empty()) {
    const size_t end = std::min(list.find(' '), list.size());
    use(list.substr(0, end));
    list.remove_prefix(std::min(end + 1, list.size()));
  }
}

/// Calls `use` with each entry of a flow list or map without nesting: "[a, b]", "{a: b, c: d}".
template <class Use>
void for_each_entry(std::string_view flow, const Use& use) {
  flow = flow.substr(1, flow.size() - 2);
  while (!flow.empty()) {
    const size_t end = std::min(flow.find(", "), flow.size());
    use(std::string(flow.substr(0, end)));
    flow.remove_prefix(std::min(end + 2, flow.size()));
  }
}

/// A name, or a table of slots with ";" between its rows.
bool set_schedule(Case& c, const std::string& text) {
  Layout& l = c.layout;
  l.schedule_table.clear();
  if (const auto named = schedule_named(text); named && *named != Schedule::kTable) {
    l.schedule = *named;
    return true;
  }
  l.schedule_table = text;
  std::ranges::replace(l.schedule_table, ';', '\n');
  l.schedule = Schedule::kTable;
  return from_csv(l.schedule_table, "schedule").ok();
}

std::string get_schedule(const Case& c) {
  if (c.layout.schedule != Schedule::kTable) return std::string(name_of(c.layout.schedule));
  std::string text = c.layout.schedule_table;
  while (!text.empty() && text.back() == '\n') text.pop_back();
  std::ranges::replace(text, '\n', ';');
  return text;
}

bool set_recompute(Case& c, const std::string& text) {
  Layout& l = c.layout;
  l.recompute_options.modules.clear();
  l.recompute_options.layers.clear();
  if (text.find('*') != std::string::npos) {
    l.recompute = Recompute::kByLayer;
    l.recompute_options.layers = text;
    return true;
  }
  if (text == "false") return l.recompute = Recompute::kNone, true;
  if (!text.starts_with('[')) return set_named(l.recompute, text, {Recompute::kNone, Recompute::kSelective, Recompute::kFull});
  l.recompute = Recompute::kSelective;
  for_each_entry(text, [&](const std::string& label) {
    l.recompute_options.modules += (l.recompute_options.modules.empty() ? "" : " ") + label;
  });
  return !l.recompute_options.modules.empty();
}

bool set_loss_scale(Case& c, const std::string& text) {
  if (text == "dynamic") return c.train.loss_scale = 0, true;
  const auto value = parse_number(text);
  if (!value || !(*value >= 1 && *value <= 16777216)) return false;
  c.train.loss_scale = static_cast<float>(*value);
  return true;
}

std::string get_loss_scale(const Case& c) {
  return c.train.loss_scale == 0 ? "dynamic" : to_text(static_cast<double>(c.train.loss_scale));
}

std::string get_recompute(const Case& c) {
  const std::string& modules = c.layout.recompute_options.modules;
  if (c.layout.recompute == Recompute::kByLayer) return c.layout.recompute_options.layers;
  if (modules.empty()) return std::string(name_of(c.layout.recompute));
  std::string list;
  for_each_word(modules, [&](std::string_view label) { list += (list.empty() ? "" : ", ") + std::string(label); });
  return "[" + list + "]";
}

bool set_offload(Case& c, const std::string& text) {
  Offload offload;
  offload.delayed_update = c.layout.offload.delayed_update;
  bool known = is_neutral(text, {"none", "false"}) || text.starts_with('{');
  if (text.starts_with('{'))
    for_each_entry(text, [&](const std::string& entry) {
      const size_t colon = std::min(entry.find(": "), entry.size());
      const std::string part = entry.substr(0, colon);
      OffloadTo* field = part == "activations"  ? &offload.activations
                         : part == "optimizer"  ? &offload.optimizer
                         : part == "parameters" ? &offload.parameters
                                                : nullptr;
      known = known && field != nullptr && colon < entry.size() &&
              set_named(*field, entry.substr(colon + 2), {OffloadTo::kNone, OffloadTo::kCpu, OffloadTo::kNvme});
    });
  if (known) c.layout.offload = offload;
  return known;
}

std::string get_offload(const Case& c) {
  const Offload& o = c.layout.offload;
  std::string map;
  for (const auto& [part, where] :
       {std::pair{"activations", o.activations}, {"optimizer", o.optimizer}, {"parameters", o.parameters}})
    if (where != OffloadTo::kNone) map += fmt::format("{}{}: {}", map.empty() ? "" : ", ", part, name_of(where));
  return map.empty() ? "none" : "{" + map + "}";
}

// clang-format off
constexpr std::array kKeys = std::to_array<CaseKey>({
    {"name", "", Form::kText, "", "", FIELD_TEXT(name)},

    {"model.name", "", Form::kText, "", "", FIELD_TEXT(model.name)},
    {"model.family", "", Form::kWord, "gpt llama", "", FIELD_NAMED(model.family, Family::kGpt, Family::kLlama)},
    {"model.layers", "", Form::kCount, "", "", FIELD_COUNT(model.layers)},
    {"model.hidden", "", Form::kCount, "", "", FIELD_COUNT(model.hidden)},
    {"model.heads", "", Form::kCount, "", "", FIELD_COUNT(model.heads)},
    {"model.kv_heads", "", Form::kCount, "", "", FIELD_COUNT(model.kv_heads)},
    {"model.head_dim", "", Form::kCount, "", "", FIELD_COUNT(model.head_dim)},
    {"model.ffn", "", Form::kCount, "", "", FIELD_COUNT(model.ffn)},
    {"model.vocab", "", Form::kCount, "", "", FIELD_COUNT(model.vocab)},
    {"model.max_positions", "", Form::kCount, "", "", FIELD_COUNT(model.max_positions)},
    {"model.tied_embeddings", "", Form::kBool, "", "", FIELD_BOOL(model.tied_embeddings)},
    {"model.norm_epsilon", "", Form::kNumber, "", "", FIELD_FLOAT(model.norm_epsilon)},
    {"model.rope_theta", "", Form::kNumber, "", "", FIELD_FLOAT(model.rope_theta)},
    {"model.init_deviation", "", Form::kNumber, "", "", FIELD_FLOAT(model.init_deviation)},
    {"model.mlp", "", Form::kWord, "gelu swiglu", "gelu in gpt, swiglu in llama",
     [](Case& c, const std::string& t) { return t == (c.model.is_llama() ? "swiglu" : "gelu"); }, nullptr},
    {"model.norm", "", Form::kWord, "layer rms", "layer in gpt, rms in llama",
     [](Case& c, const std::string& t) { return t == (c.model.is_llama() ? "rms" : "layer"); }, nullptr},
    {"model.experts", "", Form::kCount, "", "0 or 1 (dense)", [](Case&, const std::string& t) { return to_count(t) == 0 || to_count(t) == 1; }, nullptr},
    {"model.top_k", "", Form::kCount, "", "0 or 1 (dense)", [](Case&, const std::string& t) { return to_count(t) == 0 || to_count(t) == 1; }, nullptr},
    {"model.moe_ffn", "", Form::kCount, "", "0 (dense)", [](Case&, const std::string& t) { return to_count(t) == 0; }, nullptr},

    {"machine.id", "", Form::kText, "", "", FIELD_TEXT(machine.id)},
    {"machine.nodes", "", Form::kInteger, "", "", FIELD_INT(machine.nodes)},
    {"machine.devices_per_node", "", Form::kInteger, "", "", FIELD_INT(machine.devices_per_node)},
    {"machine.cores", "", Form::kInteger, "", "", FIELD_INT(machine.cores)},
    {"machine.inter_bandwidth", "", Form::kNumber, "", kRates,
     [](Case& c, const std::string& t) { return set_machine_rate(c, c.machine.inter_bytes_per_s, "inter_bandwidth", t); },
     [](const Case& c) { return to_text(c.machine.inter_bytes_per_s); }},
    {"machine.device.memory", "", Form::kCount, "", "",
     [](Case& c, const std::string& t) { c.machine.device.memory_bytes = to_count(t); c.machine.device.provenance.erase("memory"); return true; },
     [](const Case& c) { return from(c.machine.device.memory_bytes); }},
    {"machine.device.memory_bandwidth", "", Form::kNumber, "", kRates,
     [](Case& c, const std::string& t) { return set_machine_rate(c, c.machine.device.memory_bytes_per_s, "memory_bandwidth", t); },
     [](const Case& c) { return to_text(c.machine.device.memory_bytes_per_s); }},
    {"machine.device.link_bandwidth", "", Form::kNumber, "", kRates,
     [](Case& c, const std::string& t) { return set_machine_rate(c, c.machine.device.link_bytes_per_s, "link_bandwidth", t); },
     [](const Case& c) { return to_text(c.machine.device.link_bytes_per_s); }},
    {"machine.device.power_w", "", Form::kNumber, "", kRates,
     [](Case& c, const std::string& t) { return set_machine_rate(c, c.machine.device.power_w, "power_w", t); },
     [](const Case& c) { return to_text(c.machine.device.power_w); }},
    {"machine.device.peak_flops.fp32", "", Form::kNumber, "", kRates, [](Case& c, const std::string& t) { return set_peak(c, "fp32", t); }, nullptr},
    {"machine.device.peak_flops.bf16", "", Form::kNumber, "", kRates, [](Case& c, const std::string& t) { return set_peak(c, "bf16", t); }, nullptr},
    {"machine.device.peak_flops.fp16", "", Form::kNumber, "", kRates, [](Case& c, const std::string& t) { return set_peak(c, "fp16", t); }, nullptr},
    {"machine.device.peak_flops.fp8", "", Form::kNumber, "", kRates, [](Case& c, const std::string& t) { return set_peak(c, "fp8", t); }, nullptr},
    {"machine.device.peak_flops.fp4", "", Form::kNumber, "", kRates, [](Case& c, const std::string& t) { return set_peak(c, "fp4", t); }, nullptr},

    {"profile", "", Form::kText, "", "", FIELD_TEXT(profile)},

    {"data.text", "", Form::kPath, "", "", FIELD_TEXT(data.text)},
    {"data.tokens", "", Form::kPath, "", "", FIELD_TEXT(data.tokens)},

    {"layout.dp", "dp", Form::kInteger, "", "", FIELD_INT(layout.dp)},
    {"layout.tp", "tp", Form::kInteger, "", "", FIELD_INT(layout.tp)},
    {"layout.pp", "pp", Form::kInteger, "", "", FIELD_INT(layout.pp)},
    {"layout.vpp", "vpp", Form::kInteger, "", "", FIELD_INT(layout.vpp)},
    {"layout.cp", "cp", Form::kInteger, "", "", FIELD_INT(layout.cp)},
    {"layout.ep", "ep", Form::kInteger, "", "", FIELD_INT(layout.ep)},
    {"layout.zero", "zero", Form::kWord, "0 1 2 3", "", FIELD_INT(layout.zero)},
    {"layout.schedule", "schedule", Form::kAny,
     "auto",
     "a schedule's name, a .csv file of its slots (one row a stage, cells as 0F0), or these in one line, with ; between rows", set_schedule, get_schedule},
    {"layout.stage_layers", "stage_layers", Form::kText, "", "", FIELD_TEXT(layout.stage_layers)},
    {"layout.sequence_parallel", "sequence_parallel", Form::kBool, "", "", FIELD_BOOL(layout.sequence_parallel)},
    {"layout.recompute", "recompute", Form::kAny, "none selective full", "none, selective, full, a list of sub-layers, or runs of layers as 3*full 5*none", set_recompute, get_recompute},
    {"layout.recompute_options.every", "recompute_options.every", Form::kInteger, "", "", FIELD_INT(layout.recompute_options.every)},
    {"layout.recompute_options.budget_bytes", "recompute_options.budget_bytes", Form::kCount, "", "", FIELD_COUNT(layout.recompute_options.budget_bytes)},
    {"layout.offload", "offload", Form::kMap, "none", "none, or a map of activations, optimizer and parameters to cpu or nvme", set_offload, get_offload},
    {"layout.delayed_update", "delayed_update", Form::kBool, "", "", FIELD_BOOL(layout.offload.delayed_update)},
    {"layout.overlap", "overlap", Form::kBool, "", "", FIELD_BOOL(layout.overlap)},
    {"layout.bucket_bytes", "bucket_bytes", Form::kCount, "", "", FIELD_COUNT(layout.bucket_bytes)},
    {"layout.collective_algorithm", "collective_algorithm", Form::kWord, "auto ring halving-doubling direct tree hierarchical",
     "auto, ring, halving-doubling or direct",
     FIELD_NAMED(layout.collective_algorithm, AlgorithmChoice::kAuto, AlgorithmChoice::kRing, AlgorithmChoice::kHalvingDoubling, AlgorithmChoice::kDirect)},
    {"layout.fsdp", "fsdp", Form::kWord, "none", "", kNeutralNone, nullptr},
    {"layout.fsdp.unit", "fsdp.unit", Form::kInteger, "", "", FIELD_INT(layout.fsdp.unit)},
    {"layout.fsdp.prefetch", "fsdp.prefetch", Form::kInteger, "", "", FIELD_INT(layout.fsdp.prefetch)},
    {"layout.fsdp.reshard", "fsdp.reshard", Form::kBool, "", "", FIELD_BOOL(layout.fsdp.reshard)},
    {"layout.hybrid_shard", "hybrid_shard", Form::kInteger, "", "", FIELD_INT(layout.hybrid_shard)},
    {"layout.zero_plus_plus", "zero_plus_plus", Form::kWord, "none", "", kNeutralNone, nullptr},
    {"layout.zero_plus_plus.weights", "zero_plus_plus.weights", Form::kBool, "", "", FIELD_BOOL(layout.zero_plus_plus.weights)},
    {"layout.zero_plus_plus.secondary", "zero_plus_plus.secondary", Form::kInteger, "", "", FIELD_INT(layout.zero_plus_plus.secondary)},
    {"layout.zero_plus_plus.gradients", "zero_plus_plus.gradients", Form::kBool, "", "", FIELD_BOOL(layout.zero_plus_plus.gradients)},
    {"layout.parameter_server", "parameter_server", Form::kWord, "none", "", kNeutralNone, nullptr},
    {"layout.parameter_server.servers", "parameter_server.servers", Form::kInteger, "", "", FIELD_INT(layout.parameter_server.servers)},
    {"layout.parameter_server.staleness", "parameter_server.staleness", Form::kWord, "sync 0 1 2 3 4 8 16", "",
     [](Case& c, const std::string& t) { c.layout.parameter_server.staleness = t == "sync" ? -1 : to_int(t); return true; },
     [](const Case& c) { const int s = c.layout.parameter_server.staleness; return s < 0 ? std::string("sync") : from(int64_t{s}); }},
    {"layout.compression.kind", "compression.kind compression layout.compression", Form::kWord, "none bf16 int8 top-k random-k powersgd one-bit-adam", "",
     FIELD_NAMED(layout.compression.kind, CompressionKind::kNone, CompressionKind::kBf16, CompressionKind::kInt8, CompressionKind::kTopK,
                 CompressionKind::kRandomK, CompressionKind::kPowerSgd, CompressionKind::kOneBitAdam)},
    {"layout.compression.rank", "compression.rank", Form::kInteger, "", "", FIELD_INT(layout.compression.rank)},
    {"layout.compression.k", "compression.k", Form::kNumber, "", "",
     [](Case& c, const std::string& t) { c.layout.compression.k = parse_number(t).value(); return true; },
     [](const Case& c) { return to_text(c.layout.compression.k); }},
    {"layout.compression.bits", "compression.bits", Form::kInteger, "", "", FIELD_INT(layout.compression.bits)},
    {"layout.compression.warmup", "compression.warmup", Form::kInteger, "", "", FIELD_INT(layout.compression.warmup)},
    {"layout.diloco.steps", "diloco.steps diloco layout.diloco", Form::kInteger, "", "", FIELD_INT(layout.diloco.steps)},
    {"layout.diloco.learning_rate", "diloco.learning_rate", Form::kNumber, "", "", FIELD_FLOAT(layout.diloco.learning_rate)},
    {"layout.diloco.momentum", "diloco.momentum", Form::kNumber, "", "", FIELD_FLOAT(layout.diloco.momentum)},
    {"layout.cp_kind", "cp_kind", Form::kWord, "none ring zigzag striped all-gather ulysses usp", "none", kNeutralNone, nullptr},

    {"train.seq_len", "seq_len", Form::kCount, "", "", FIELD_COUNT(train.seq_len)},
    {"train.global_batch_tokens", "global_batch_tokens", Form::kCount, "", "", FIELD_COUNT(train.global_batch_tokens)},
    {"train.micro_batch", "micro_batch", Form::kCount, "", "", FIELD_COUNT(train.micro_batch)},
    {"train.grad_accumulation", "grad_accumulation", Form::kCount, "", "", FIELD_COUNT(train.grad_accumulation)},
    {"train.precision", "precision", Form::kWord, "fp32 bf16 fp16 fp8 fp4", "", FIELD_TEXT(train.precision)},
    {"train.reduce_dtype", "reduce_dtype", Form::kWord, "fp32 bf16 fp16", "", FIELD_DTYPE(train.reduce_dtype)},
    {"train.accumulate_dtype", "accumulate_dtype", Form::kWord, "fp32 bf16 fp16", "", FIELD_DTYPE(train.accumulate_dtype)},
    {"train.loss_scale", "loss_scale", Form::kAny, "dynamic", "dynamic, or a number", set_loss_scale, get_loss_scale},
    {"train.loss_scale_start", "loss_scale_start", Form::kNumber, "", "", FIELD_FLOAT(train.loss_scale_start)},
    {"train.loss_scale_interval", "loss_scale_interval", Form::kCount, "", "", FIELD_COUNT(train.loss_scale_interval)},
    {"train.guard.nonfinite", "guard.nonfinite", Form::kWord, "none stop skip", "", FIELD_NAMED(train.guard.nonfinite, GuardAction::kNone, GuardAction::kStop, GuardAction::kSkip)},
    {"train.guard.spike", "guard.spike", Form::kWord, "none stop skip", "", FIELD_NAMED(train.guard.spike, GuardAction::kNone, GuardAction::kStop, GuardAction::kSkip)},
    {"train.guard.loss_factor", "guard.loss_factor", Form::kNumber, "", "", FIELD_FLOAT(train.guard.loss_factor)},
    {"train.guard.norm_factor", "guard.norm_factor", Form::kNumber, "", "", FIELD_FLOAT(train.guard.norm_factor)},
    {"train.guard.window", "guard.window", Form::kCount, "", "", FIELD_COUNT(train.guard.window)},
    {"train.fp8_scaling", "fp8_scaling", Form::kWord, "current delayed block", "", FIELD_TEXT(train.fp8_scaling)},
    {"train.optimizer", "optimizer", Form::kWord, "adamw sgd", "", FIELD_NAMED(train.optimizer, Optimizer::kAdamW, Optimizer::kSgd)},
    {"train.learning_rate.peak", "learning_rate train.learning_rate", Form::kNumber, "", "", FIELD_FLOAT(train.learning_rate.peak)},
    {"train.learning_rate.kind", "", Form::kWord, "constant cosine linear wsd", "",
     FIELD_NAMED(train.learning_rate.kind, LearningRate::Kind::kConstant, LearningRate::Kind::kCosine, LearningRate::Kind::kLinear, LearningRate::Kind::kWsd)},
    {"train.learning_rate.warmup_steps", "", Form::kCount, "", "", FIELD_COUNT(train.learning_rate.warmup_steps)},
    {"train.learning_rate.total_steps", "", Form::kCount, "", "", FIELD_COUNT(train.learning_rate.total_steps)},
    {"train.learning_rate.decay_steps", "", Form::kCount, "", "", FIELD_COUNT(train.learning_rate.decay_steps)},
    {"train.learning_rate.floor", "", Form::kNumber, "", "", FIELD_FLOAT(train.learning_rate.floor)},
    {"train.weight_decay", "weight_decay", Form::kNumber, "", "", FIELD_FLOAT(train.weight_decay)},
    {"train.beta1", "beta1", Form::kNumber, "", "", FIELD_FLOAT(train.beta1)},
    {"train.beta2", "beta2", Form::kNumber, "", "", FIELD_FLOAT(train.beta2)},
    {"train.epsilon", "epsilon", Form::kNumber, "", "", FIELD_FLOAT(train.epsilon)},
    {"train.clip_norm", "clip_norm", Form::kNumber, "", "", FIELD_FLOAT(train.clip_norm)},
    {"train.dropout", "dropout", Form::kNumber, "", "", FIELD_FLOAT(train.dropout)},
    {"train.grad_norm", "grad_norm", Form::kBool, "", "", FIELD_BOOL(train.grad_norm)},
    {"train.seed", "seed", Form::kCount, "", "", FIELD_COUNT(train.seed)},

    {"execution.backend", "backend", Form::kWord, "cpu cuda dry", "", FIELD_TEXT(backend)},
    {"execution.transport", "transport", Form::kWord, "threads processes mpi gloo nccl one-gpu", "", FIELD_TEXT(transport)},
    {"execution.threads_per_rank", "threads_per_rank", Form::kInteger, "", "", FIELD_INT(threads_per_rank)},
    {"execution.canonical", "canonical", Form::kBool, "", "", FIELD_BOOL(canonical)},
    {"execution.attention", "attention", Form::kWord, "auto own cudnn", "", FIELD_TEXT(attention)},
    {"execution.tf32", "tf32", Form::kBool, "", "", FIELD_BOOL(tf32)},

    {"measure.warmup", "", Form::kCount, "", "", FIELD_COUNT(measure.warmup)},
    {"measure.steps", "", Form::kCount, "", "", FIELD_COUNT(measure.steps)},
    {"measure.repeat", "", Form::kCount, "", "", FIELD_COUNT(measure.repeat)},
    {"measure.timeout", "", Form::kDuration, "", "",
     [](Case& c, const std::string& t) { c.measure.timeout_s = parse_duration(t).value(); return true; }, [](const Case& c) { return to_text(c.measure.timeout_s); }},
    {"measure.validate_sequences", "", Form::kCount, "", "", FIELD_COUNT(measure.validate_sequences)},

    {"checkpoint.save_every", "", Form::kCount, "", "", FIELD_COUNT(checkpoint.save_every)},
    {"checkpoint.folder", "", Form::kPath, "", "", FIELD_TEXT(checkpoint.folder)},
    {"checkpoint.resume", "", Form::kPath, "", "", FIELD_TEXT(checkpoint.resume)},
});
// clang-format on

/// Beyond these a value is a slip, or would overflow or exhaust something. Products of sizes are checked by `check(const Case&)`.
constexpr double kRanks = 1 << 20, kSize = (int64_t{1} << 31) - 1, kExact = 9007199254740992.0, kRate = 1e21;
struct KeyRange {
  std::string_view path;
  Range range;
};
constexpr KeyRange kRanges[] = {
    {"model.layers", {1, 16384}},
    {"model.hidden", {1, kSize}},
    {"model.heads", {1, kSize}},
    {"model.kv_heads", {1, kSize}},
    {"model.head_dim", {1, kSize}},
    {"model.ffn", {1, kSize}},
    {"model.vocab", {1, kSize}},
    {"model.max_positions", {0, kSize}},
    {"model.norm_epsilon", {0, 1, true}},
    {"model.rope_theta", {0, 1e12, true}},
    {"model.init_deviation", {0, 100, true}},
    {"model.experts", {0, kSize}},
    {"model.top_k", {0, kSize}},
    {"model.moe_ffn", {0, kSize}},
    {"machine.nodes", {1, kRanks}},
    {"machine.devices_per_node", {1, 1024}},
    {"machine.cores", {0, 65536}},
    {"machine.inter_bandwidth", {0, kRate}},
    {"machine.device.memory", {0, 9e18}},
    {"machine.device.memory_bandwidth", {0, kRate}},
    {"machine.device.link_bandwidth", {0, kRate}},
    {"machine.device.power_w", {0, 1e9}},
    {"machine.device.peak_flops.fp32", {0, kRate}},
    {"machine.device.peak_flops.bf16", {0, kRate}},
    {"machine.device.peak_flops.fp16", {0, kRate}},
    {"machine.device.peak_flops.fp8", {0, kRate}},
    {"machine.device.peak_flops.fp4", {0, kRate}},
    {"layout.dp", {1, kRanks}},
    {"layout.tp", {1, kRanks}},
    {"layout.pp", {1, kRanks}},
    {"layout.vpp", {1, kRanks}},
    {"layout.cp", {1, kRanks}},
    {"layout.ep", {1, kRanks}},
    {"layout.recompute_options.every", {1, 16384}},
    {"layout.recompute_options.budget_bytes", {0, 9e18}},
    {"layout.fsdp.unit", {1, 16384}},
    {"layout.fsdp.prefetch", {0, 16384}},
    {"layout.hybrid_shard", {0, kRanks}},
    {"layout.zero_plus_plus.secondary", {0, kRanks}},
    {"layout.parameter_server.servers", {0, kRanks}},
    {"layout.compression.rank", {1, kSize}},
    {"layout.compression.k", {0, 1, true}},
    {"layout.compression.bits", {1, 8}},
    {"layout.compression.warmup", {0, 1'000'000}},
    {"layout.diloco.steps", {0, 1'000'000}},
    {"layout.diloco.learning_rate", {0, 1e6}},
    {"layout.diloco.momentum", {0, 1, false, true}},
    {"train.seq_len", {1, 1 << 30}},
    {"train.global_batch_tokens", {1, kExact}},
    {"train.micro_batch", {1, 1 << 30}},
    {"train.grad_accumulation", {1, 1 << 20}},
    {"train.learning_rate.peak", {0, 1e6}},
    {"train.learning_rate.warmup_steps", {0, kExact}},
    {"train.learning_rate.total_steps", {0, kExact}},
    {"train.learning_rate.decay_steps", {0, kExact}},
    {"train.learning_rate.floor", {0, 1e6}},
    {"train.loss_scale_start", {1, 16777216}},
    {"train.loss_scale_interval", {1, 16777216}},
    {"train.guard.loss_factor", {0, 1e30}},
    {"train.guard.norm_factor", {0, 1e30}},
    {"train.guard.window", {1, 16777216}},
    {"train.clip_norm", {0, 1e30}},
    {"train.weight_decay", {0, 1e6}},
    {"train.beta1", {0, 1, false, true}},
    {"train.beta2", {0, 1, false, true}},
    {"train.epsilon", {0, 1, true}},
    {"train.dropout", {0, 1, false, true}},
    {"execution.threads_per_rank", {1, 1024}},
    {"measure.warmup", {0, 1'000'000}},
    {"measure.steps", {1, 1'000'000}},
    {"measure.repeat", {1, 1'000'000}},
    {"measure.timeout", {0, 1e8, true}},
    {"measure.validate_sequences", {0, 1e9}},
    {"checkpoint.save_every", {0, 1e9}},
};

/// What a key of form kMap takes: a word for each of its parts.
struct KeyParts {
  std::string_view path, parts, words;
};
constexpr KeyParts kParts[] = {{"layout.offload", "activations optimizer parameters", "none cpu nvme"}};

bool in_range(const Range& range, double value) {
  return (range.above ? value > range.least : value >= range.least) && (range.below ? value < range.most : value <= range.most);
}

std::string range_text(const Range& range) {
  const auto number = [](double v) { return v >= 1e7 ? fmt::format("{:.4g}", v) : to_text(v); };
  return fmt::format("{} {} {} {}", range.above ? "above" : "from", number(range.least), range.below ? "to below" : "to",
                     number(range.most));
}

bool has_word(std::string_view list, std::string_view word) {
  bool found = false;
  for_each_word(list, [&](std::string_view w) { found = found || w == word; });
  return found;
}

void add_once(std::vector<std::string>& list, std::string_view word) {
  if (std::find(list.begin(), list.end(), word) == list.end()) list.emplace_back(word);
}

}  // namespace

std::span<const CaseKey> case_keys() { return kKeys; }

const CaseKey* find_key(std::string_view word) {
  static const auto by_word = [] {
    std::unordered_map<std::string_view, const CaseKey*> keys;
    for (const CaseKey& key : kKeys) {
      keys.emplace(key.path, &key);
      for_each_word(key.aliases, [&](std::string_view alias) { keys.emplace(alias, &key); });
    }
    return keys;
  }();
  const auto found = by_word.find(word);
  return found == by_word.end() ? nullptr : found->second;
}

bool is_section(std::string_view path) {
  const auto is_below = [&](std::string_view word) {
    return word.size() > path.size() && word.starts_with(path) && word[path.size()] == '.';
  };
  const auto below = [&](const CaseKey& k) {
    bool found = is_below(k.path);
    for_each_word(k.aliases, [&](std::string_view w) { found = found || is_below(w); });
    return found;
  };
  return !path.empty() && std::any_of(kKeys.begin(), kKeys.end(), below);
}

std::vector<std::string> keys_under(std::string_view section) {
  std::vector<std::string> words;
  const std::string prefix = section.empty() ? "" : std::string(section) + ".";
  const auto add_below = [&](std::string_view word) {  // a section may be a short form too: "fsdp" of "fsdp.unit"
    if (!word.starts_with(prefix)) return;
    const std::string_view rest = word.substr(prefix.size());
    const size_t dot = rest.find('.');
    if (!section.empty() || dot == std::string_view::npos) add_once(words, rest.substr(0, dot));
  };
  for (const CaseKey& key : kKeys) {
    add_below(key.path);
    for_each_word(key.aliases, add_below);
  }
  return words;
}

MapForm map_form(const CaseKey& key) {
  MapForm form;
  for (const KeyParts& k : kParts) {
    if (k.path != key.path) continue;
    for_each_word(k.parts, [&](std::string_view w) { form.parts.emplace_back(w); });
    for_each_word(k.words, [&](std::string_view w) { form.words.emplace_back(w); });
  }
  return form;
}

std::vector<std::string> words_of(const CaseKey& key) {
  std::vector<std::string> words;
  if (key.path == "layout.schedule")
    for (int i = 0; i < named_schedules(); ++i) words.emplace_back(name_of(static_cast<Schedule>(i)));
  for_each_word(key.words, [&](std::string_view w) { words.emplace_back(w); });
  return words;
}

const Vocabulary& expression_vocabulary() {
  static const Vocabulary vocabulary = [] {
    Vocabulary v;
    for (const CaseKey& key : kKeys) {
      if (key.get == nullptr) continue;
      add_once(v.keys, key.path);
      for_each_word(key.aliases, [&](std::string_view w) { add_once(v.keys, w); });
      for (const std::string& w : words_of(key)) add_once(v.values, w);
    }
    return v;
  }();
  return vocabulary;
}

Range range_of(const CaseKey& key) {
  for (const KeyRange& r : kRanges)
    if (r.path == key.path) return r.range;
  switch (key.form) {
    case Form::kInteger: return {0, static_cast<double>(std::numeric_limits<int>::max())};
    case Form::kCount: return {0, static_cast<double>(std::numeric_limits<int64_t>::max())};
    default: return {0, static_cast<double>(std::numeric_limits<float>::max())};
  }
}

std::string expected(const CaseKey& key) {
  switch (key.form) {
    case Form::kInteger:
    case Form::kCount: return fmt::format("a whole number {} (8, 64k, 1Mi)", range_text(range_of(key)));
    case Form::kNumber: return fmt::format("a number {} (0.1, 1e-3, 16k)", range_text(range_of(key)));
    case Form::kBool: return "true or false";
    case Form::kWord: return fmt::format("one of: {}", key.words);
    case Form::kText: return "a text";
    case Form::kPath: return "a path";
    case Form::kDuration: return "a duration above 0 and up to 1e8 s (90s, 5m, 2h)";
    case Form::kMap:
    case Form::kAny: return std::string(key.holds);
  }
  return "?";
}

bool has_form(const CaseKey& key, const std::string& text) {
  switch (key.form) {
    case Form::kInteger:
    case Form::kCount: {
      const auto n = parse_count(text);
      return n && in_range(range_of(key), static_cast<double>(*n));
    }
    case Form::kNumber: {
      const auto n = parse_number(text);
      return n && in_range(range_of(key), *n);
    }
    case Form::kBool: return parse_bool(text).has_value();
    case Form::kWord: return has_word(key.words, text);
    case Form::kMap:
    case Form::kAny: {  // what the key itself takes, whatever the case
      Case any;
      return key.set(any, text);
    }
    case Form::kText: return true;
    case Form::kPath: return !text.empty();
    case Form::kDuration: {
      const auto seconds = parse_duration(text);
      return seconds && in_range(range_of(key), *seconds);
    }
  }
  return false;
}

ExpressionValue expression_value(const CaseKey& key, const std::string& text) {
  if (key.form == Form::kDuration) return parse_duration(text).value();
  if (key.form == Form::kBool) return parse_bool(text).value();
  if (key.form == Form::kText || key.form == Form::kPath) return text;
  if (const auto number = parse_number(text)) return *number;
  return text;
}

}  // namespace shardlab::sweeps
