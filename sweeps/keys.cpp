#include "sweeps/keys.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <utility>

#include "sweeps/values.h"

namespace shardlab {

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
    {"layout.schedule", "schedule", Form::kWord,
     "none afab 1f1b interleaved breadth-first zb-h1 zb-h2 zb-v v-half v-min dualpipe dualpipe-v", "none, afab or 1f1b",
     FIELD_NAMED(layout.schedule, Schedule::kNone, Schedule::kAfab, Schedule::k1F1B)},
    {"layout.sequence_parallel", "sequence_parallel", Form::kBool, "", "", FIELD_BOOL(layout.sequence_parallel)},
    {"layout.recompute", "recompute", Form::kAny, "none selective full", "none or full",
     FIELD_NAMED(layout.recompute, Recompute::kNone, Recompute::kFull)},
    {"layout.offload", "offload", Form::kAny, "none", "none", kNeutralNone, nullptr},
    {"layout.overlap", "overlap", Form::kBool, "", "", FIELD_BOOL(layout.overlap)},
    {"layout.bucket_bytes", "bucket_bytes", Form::kCount, "", "", FIELD_COUNT(layout.bucket_bytes)},
    {"layout.collective_algorithm", "collective_algorithm", Form::kWord, "auto ring halving-doubling direct tree hierarchical",
     "auto, ring, halving-doubling or direct",
     FIELD_NAMED(layout.collective_algorithm, AlgorithmChoice::kAuto, AlgorithmChoice::kRing, AlgorithmChoice::kHalvingDoubling, AlgorithmChoice::kDirect)},
    {"layout.fsdp", "fsdp", Form::kAny, "none", "none", kNeutralNone, nullptr},
    {"layout.hybrid_shard", "hybrid_shard", Form::kAny, "none", "none", kNeutralNone, nullptr},
    {"layout.zero_plus_plus", "zero_plus_plus", Form::kAny, "none", "none", kNeutralNone, nullptr},
    {"layout.parameter_server", "parameter_server", Form::kAny, "none", "none", kNeutralNone, nullptr},
    {"layout.compression", "compression", Form::kAny, "none", "none", kNeutralNone, nullptr},
    {"layout.diloco", "diloco", Form::kAny, "none", "none", kNeutralNone, nullptr},
    {"layout.cp_kind", "cp_kind", Form::kWord, "none ring zigzag striped all-gather ulysses usp", "none", kNeutralNone, nullptr},

    {"train.seq_len", "seq_len", Form::kCount, "", "", FIELD_COUNT(train.seq_len)},
    {"train.global_batch_tokens", "global_batch_tokens", Form::kCount, "", "", FIELD_COUNT(train.global_batch_tokens)},
    {"train.micro_batch", "micro_batch", Form::kCount, "", "", FIELD_COUNT(train.micro_batch)},
    {"train.grad_accumulation", "grad_accumulation", Form::kCount, "", "", FIELD_COUNT(train.grad_accumulation)},
    {"train.precision", "precision", Form::kWord, "fp32 bf16 fp16 fp8 fp4", "", FIELD_TEXT(train.precision)},
    {"train.reduce_dtype", "reduce_dtype", Form::kWord, "fp32 bf16 fp16", "fp32", [](Case&, const std::string& t) { return t == "fp32"; }, nullptr},
    {"train.accumulate_dtype", "accumulate_dtype", Form::kWord, "fp32 bf16 fp16", "fp32", [](Case&, const std::string& t) { return t == "fp32"; }, nullptr},
    {"train.optimizer", "optimizer", Form::kWord, "adamw sgd", "", FIELD_NAMED(train.optimizer, Optimizer::kAdamW, Optimizer::kSgd)},
    {"train.learning_rate.peak", "learning_rate train.learning_rate", Form::kNumber, "", "", FIELD_FLOAT(train.learning_rate.peak)},
    {"train.learning_rate.kind", "", Form::kWord, "constant cosine", "",
     [](Case& c, const std::string& t) { c.train.learning_rate.kind = t == "cosine" ? LearningRate::Kind::kCosine : LearningRate::Kind::kConstant; return true; },
     [](const Case& c) { return std::string(c.train.learning_rate.kind == LearningRate::Kind::kCosine ? "cosine" : "constant"); }},
    {"train.learning_rate.warmup_steps", "", Form::kCount, "", "", FIELD_COUNT(train.learning_rate.warmup_steps)},
    {"train.learning_rate.total_steps", "", Form::kCount, "", "", FIELD_COUNT(train.learning_rate.total_steps)},
    {"train.learning_rate.floor", "", Form::kNumber, "", "", FIELD_FLOAT(train.learning_rate.floor)},
    {"train.weight_decay", "weight_decay", Form::kNumber, "", "", FIELD_FLOAT(train.weight_decay)},
    {"train.beta1", "beta1", Form::kNumber, "", "", FIELD_FLOAT(train.beta1)},
    {"train.beta2", "beta2", Form::kNumber, "", "", FIELD_FLOAT(train.beta2)},
    {"train.epsilon", "epsilon", Form::kNumber, "", "", FIELD_FLOAT(train.epsilon)},
    {"train.clip_norm", "clip_norm", Form::kNumber, "", "0 (off)", [](Case&, const std::string& t) { return parse_number(t).value() == 0; }, nullptr},
    {"train.dropout", "dropout", Form::kNumber, "", "", FIELD_FLOAT(train.dropout)},
    {"train.grad_norm", "grad_norm", Form::kBool, "", "", FIELD_BOOL(train.grad_norm)},
    {"train.seed", "seed", Form::kCount, "", "", FIELD_COUNT(train.seed)},

    {"execution.backend", "backend", Form::kWord, "cpu cuda dry", "", FIELD_TEXT(backend)},
    {"execution.transport", "transport", Form::kWord, "threads processes mpi gloo nccl one-gpu", "", FIELD_TEXT(transport)},
    {"execution.threads_per_rank", "threads_per_rank", Form::kInteger, "", "", FIELD_INT(threads_per_rank)},
    {"execution.canonical", "canonical", Form::kBool, "", "", FIELD_BOOL(canonical)},

    {"measure.warmup", "", Form::kCount, "", "", FIELD_COUNT(measure.warmup)},
    {"measure.steps", "", Form::kCount, "", "", FIELD_COUNT(measure.steps)},
    {"measure.repeat", "", Form::kCount, "", "", FIELD_COUNT(measure.repeat)},
    {"measure.timeout", "", Form::kDuration, "", "",
     [](Case& c, const std::string& t) { c.measure.timeout_s = parse_duration(t).value(); return true; }, [](const Case& c) { return to_text(c.measure.timeout_s); }},
    {"measure.validate_sequences", "", Form::kCount, "", "", FIELD_COUNT(measure.validate_sequences)},
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
    {"train.seq_len", {1, 1 << 30}},
    {"train.global_batch_tokens", {1, kExact}},
    {"train.micro_batch", {1, 1 << 30}},
    {"train.grad_accumulation", {1, 1 << 20}},
    {"train.learning_rate.peak", {0, 1e6}},
    {"train.learning_rate.warmup_steps", {0, kExact}},
    {"train.learning_rate.total_steps", {0, kExact}},
    {"train.learning_rate.floor", {0, 1e6}},
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
};

bool in_range(const Range& range, double value) {
  return (range.above ? value > range.least : value >= range.least) && (range.below ? value < range.most : value <= range.most);
}

std::string range_text(const Range& range) {
  const auto number = [](double v) { return v >= 1e7 ? fmt::format("{:.4g}", v) : to_text(v); };
  return fmt::format("{} {} {} {}", range.above ? "above" : "from", number(range.least), range.below ? "to below" : "to",
                     number(range.most));
}

/// Calls `use` with each word of a list separated by spaces.
template <class Use>
void for_each_word(std::string_view list, const Use& use) {
  while (!list.empty()) {
    const size_t end = std::min(list.find(' '), list.size());
    use(list.substr(0, end));
    list.remove_prefix(std::min(end + 1, list.size()));
  }
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
  for (const CaseKey& key : kKeys)
    if (key.path == word || has_word(key.aliases, word)) return &key;
  return nullptr;
}

bool is_section(std::string_view path) {
  const auto below = [&](const CaseKey& k) {
    return k.path.size() > path.size() && k.path.starts_with(path) && k.path[path.size()] == '.';
  };
  return !path.empty() && std::any_of(kKeys.begin(), kKeys.end(), below);
}

std::vector<std::string> keys_under(std::string_view section) {
  std::vector<std::string> words;
  const std::string prefix = section.empty() ? "" : std::string(section) + ".";
  for (const CaseKey& key : kKeys) {
    if (!key.path.starts_with(prefix)) continue;
    const std::string_view rest = key.path.substr(prefix.size());
    const size_t dot = rest.find('.');
    if (!section.empty() || dot == std::string_view::npos) add_once(words, rest.substr(0, dot));
    if (section.empty())
      for_each_word(key.aliases, [&](std::string_view w) {
        if (w.find('.') == std::string_view::npos) add_once(words, w);
      });
  }
  return words;
}

Vocabulary expression_vocabulary() {
  Vocabulary v;
  for (const CaseKey& key : kKeys) {
    if (key.get == nullptr) continue;
    add_once(v.keys, key.path);
    for_each_word(key.aliases, [&](std::string_view w) { add_once(v.keys, w); });
    for_each_word(key.words, [&](std::string_view w) { add_once(v.values, w); });
  }
  return v;
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
    case Form::kAny: return fmt::format("one of: {} (or a list or map)", key.words);
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
    case Form::kAny: return has_word(key.words, text) || text == "false" || text.starts_with('{') || text.starts_with('[');
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

}  // namespace shardlab
