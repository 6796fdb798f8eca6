#include "plan/keys.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>

#include "plan/base/values.h"
#include "plan/routing.h"

namespace shardlab {

namespace {

// ---- setters and getters: `text` has the key's form already -------------------------------------------------------------------

int to_int(const std::string& text) { return static_cast<int>(parse_count(text).value()); }
int64_t to_count(const std::string& text) { return parse_count(text).value(); }
float to_float(const std::string& text) { return static_cast<float>(parse_number(text).value()); }
std::string from(int64_t value) { return to_text(value); }
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

/// A word of plan/routing.h.
bool set_routing(Case& c, const std::string& text) {
  if (text.empty() || !routing_named(text)) return false;
  c.data.routing = text == "balanced" ? "" : text;
  return true;
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

constexpr auto kNeutralAll = +[](Case&, const std::string& t) { return t == "all"; };
constexpr auto kNeutralZero = +[](Case&, const std::string& t) { return to_count(t) == 0; };
constexpr auto kNeutralSixteen = +[](Case&, const std::string& t) { return to_count(t) == 16; };

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

/// A name, or a table of slots with ";" between its rows. A table that does not hold is refused by the check of the case, which
/// names the cell.
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
  return text.find_first_of(",;") != std::string::npos || from_csv(l.schedule_table, "schedule").ok();
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

/// Beyond these a value is a slip, or would overflow or exhaust something. Products of sizes are checked by `check(const Case&)`.
constexpr double kRanks = 1 << 20, kSize = (int64_t{1} << 31) - 1, kExact = 9007199254740992.0, kRate = 1e21;

// clang-format off
constexpr std::array kKeys = std::to_array<CaseKey>({
    CaseKey{"name", "", Form::kText, "", "", FIELD_TEXT(name),
            "what reports call the case"},

    CaseKey{"model.name", "", Form::kText, "", "", FIELD_TEXT(model.name),
            "what reports call the model"},
    CaseKey{"model.family", "", Form::kWord, "gpt llama", "", FIELD_NAMED(model.family, Family::kGpt, Family::kLlama),
            "the transformer that is trained"},
    CaseKey{"model.layers", "", Form::kCount, "", "", FIELD_COUNT(model.layers),
            "transformer layers"}
        .from(1).up_to(16384),
    CaseKey{"model.hidden", "", Form::kCount, "", "", FIELD_COUNT(model.hidden),
            "width of the residual stream"}
        .from(1).up_to(kSize),
    CaseKey{"model.heads", "", Form::kCount, "", "", FIELD_COUNT(model.heads),
            "attention heads"}
        .from(1).up_to(kSize),
    CaseKey{"model.kv_heads", "", Form::kCount, "", "", FIELD_COUNT(model.kv_heads),
            "heads of keys and values"}
        .from(1).up_to(kSize),
    CaseKey{"model.head_dim", "", Form::kCount, "", "", FIELD_COUNT(model.head_dim),
            "width of a head"}
        .from(1).up_to(kSize),
    CaseKey{"model.ffn", "", Form::kCount, "", "", FIELD_COUNT(model.ffn),
            "inner width of the feed-forward"}
        .from(1).up_to(kSize),
    CaseKey{"model.vocab", "", Form::kCount, "", "", FIELD_COUNT(model.vocab),
            "tokens of the vocabulary"}
        .from(1).up_to(kSize),
    CaseKey{"model.vocab_multiple", "", Form::kCount, "", "", FIELD_COUNT(model.vocab_multiple),
            "rows of the tables of tokens are padded to a multiple of this; no softmax sees the rows beyond vocab"}
        .from(1).up_to(kSize),
    CaseKey{"model.max_positions", "", Form::kCount, "", "", FIELD_COUNT(model.max_positions),
            "positions of the learned embedding; 0: none"}
        .from(0).up_to(kSize),
    CaseKey{"model.tied_embeddings", "", Form::kBool, "", "", FIELD_BOOL(model.tied_embeddings),
            "the head multiplies by the embedding table"},
    CaseKey{"model.qkv_biases", "", Form::kBool, "", "", FIELD_BOOL(model.qkv_biases),
            "biases of q, k and v, in llama"},
    CaseKey{"model.qk_norm", "", Form::kBool, "", "", FIELD_BOOL(model.qk_norm),
            "a norm over each head of q and of k"},
    CaseKey{"model.kv_lora_rank", "", Form::kCount, "", "", FIELD_COUNT(model.latent.kv_rank),
            "width of the vector that keys and values are made from (latent attention, llama); 0: none"}
        .from(0).up_to(kSize),
    CaseKey{"model.q_lora_rank", "", Form::kCount, "", "", FIELD_COUNT(model.latent.q_rank),
            "width of the vector that q is made from, of latent attention; 0: from the token itself"}
        .from(0).up_to(kSize),
    CaseKey{"model.qk_nope_head_dim", "", Form::kCount, "", "", FIELD_COUNT(model.latent.nope),
            "elements of a head of q and k that are not rotated, of latent attention"}
        .from(0).up_to(kSize),
    CaseKey{"model.qk_rope_head_dim", "", Form::kCount, "", "", FIELD_COUNT(model.latent.rope),
            "elements of a head of q and k that are rotated, of latent attention; those of k are one for all heads"}
        .from(0).up_to(kSize),
    CaseKey{"model.v_head_dim", "", Form::kCount, "", "", FIELD_COUNT(model.latent.v),
            "width of a head of v, of latent attention"}
        .from(0).up_to(kSize),
    CaseKey{"model.window", "", Form::kCount, "", "", FIELD_COUNT(model.window.tokens),
            "keys that a token sees at most in local layers, itself among them; 0: every layer attends to all before"}
        .from(0).up_to(kSize),
    CaseKey{"model.global_layers", "", Form::kCount, "", "", FIELD_COUNT(model.window.global_layers),
            "first layers without the window"}
        .from(0).up_to(16384),
    CaseKey{"model.global_every", "", Form::kCount, "", "", FIELD_COUNT(model.window.global_every),
            "of the layers behind those every so many-th is without the window; 0: none"}
        .from(0).up_to(16384),
    CaseKey{"model.local_rope_theta", "", Form::kNumber, "", "", FIELD_FLOAT(model.window.rope_theta),
            "base of the rotary embedding in layers with the window; 0: model.rope_theta"}
        .from(0).up_to(1e12),
    CaseKey{"model.norm_epsilon", "", Form::kNumber, "", "", FIELD_FLOAT(model.norm_epsilon),
            "added to the variance in norms"}
        .above(0).up_to(1),
    CaseKey{"model.rope_theta", "", Form::kNumber, "", "", FIELD_FLOAT(model.rope_theta),
            "base of the rotary embedding"}
        .above(0).up_to(1e12),
    CaseKey{"model.init_deviation", "", Form::kNumber, "", "", FIELD_FLOAT(model.init_deviation),
            "standard deviation of the initial weights"}
        .above(0).up_to(100),
    CaseKey{"model.mlp", "", Form::kWord, "gelu swiglu", "gelu in gpt, swiglu in llama",
     [](Case& c, const std::string& t) { return t == (c.model.is_llama() ? "swiglu" : "gelu"); }, nullptr,
            "activation of the feed-forward"},
    CaseKey{"model.norm", "", Form::kWord, "layer rms", "layer in gpt, rms in llama",
     [](Case& c, const std::string& t) { return t == (c.model.is_llama() ? "rms" : "layer"); }, nullptr,
            "kind of norm"},
    CaseKey{"model.experts", "", Form::kCount, "", "",
     [](Case& c, const std::string& t) { c.model.experts.count = to_count(t) <= 1 ? 0 : to_count(t); return true; },
     [](const Case& c) { return from(c.model.experts.count); },
            "experts of a layer; 0 or 1: dense"}
        .from(0).up_to(kSize),
    CaseKey{"model.top_k", "", Form::kCount, "", "",
     [](Case& c, const std::string& t) { c.model.experts.top_k = c.model.is_mixture() || to_count(t) > 1 ? to_count(t) : 0; return true; },
     [](const Case& c) { return from(c.model.experts.top_k); },
            "experts of a token"}
        .from(0).up_to(kSize),
    CaseKey{"model.moe_ffn", "", Form::kCount, "", "", FIELD_COUNT(model.experts.ffn),
            "inner width of an expert"}
        .from(0).up_to(kSize),
    CaseKey{"model.router", "", Form::kWord, "softmax sigmoid", "",
     [](Case& c, const std::string& t) { c.model.experts.sigmoid = t == "sigmoid"; return t == "sigmoid" || t == "softmax"; },
     [](const Case& c) { return std::string(c.model.experts.sigmoid ? "sigmoid" : "softmax"); },
            "scores of a token's experts"},
    CaseKey{"model.normalise_weights", "", Form::kBool, "", "", FIELD_BOOL(model.experts.normalise),
            "weights of a token's experts are divided by their sum"},
    CaseKey{"model.router_factor", "", Form::kNumber, "", "", FIELD_FLOAT(model.experts.factor),
            "times the weights of experts"}
        .above(0).up_to(100),
    CaseKey{"model.balance_loss", "", Form::kNumber, "", "", FIELD_FLOAT(model.experts.balance),
            "coefficient of the loss for even use of experts, by sequence"}
        .from(0).up_to(100),
    CaseKey{"model.z_loss", "", Form::kNumber, "", "", FIELD_FLOAT(model.experts.z_loss),
            "coefficient of the loss for small logits of routers"}
        .from(0).up_to(100),
    CaseKey{"model.shared_experts", "", Form::kCount, "", "", FIELD_COUNT(model.experts.shared),
            "experts that every token passes, as one feed-forward"}
        .from(0).up_to(kSize),
    CaseKey{"model.shared_gate", "", Form::kBool, "", "", FIELD_BOOL(model.experts.shared_gate),
            "what shared experts make of a token is gated by a sigmoid"},
    CaseKey{"model.dense_layers", "", Form::kCount, "", "", FIELD_COUNT(model.experts.dense_layers),
            "first layers without experts"}
        .from(0).up_to(16384),
    CaseKey{"model.moe_every", "", Form::kCount, "", "", FIELD_COUNT(model.experts.every),
            "of the other layers every so many-th has experts"}
        .from(1).up_to(16384),
    CaseKey{"model.router_groups", "", Form::kCount, "", "", FIELD_COUNT(model.experts.groups),
            "groups that experts are in"}
        .from(1).up_to(65536),
    CaseKey{"model.router_groups_chosen", "", Form::kCount, "", "", FIELD_COUNT(model.experts.groups_chosen),
            "groups that a token's experts are in"}
        .from(1).up_to(65536),
    CaseKey{"model.bias_update_rate", "", Form::kNumber, "", "", FIELD_FLOAT(model.experts.bias_update_rate),
            "step by which biases of the choice of experts follow the load; 0: no biases"}
        .from(0).up_to(1),
    CaseKey{"model.capacity_factor", "", Form::kNumber, "", "", FIELD_FLOAT(model.experts.capacity_factor),
            "an expert takes so many times its even share of the rows of each sequence, and drops the others; 0: takes all"}
        .from(0).up_to(65536),

    CaseKey{"machine.id", "", Form::kText, "", "", FIELD_TEXT(machine.id),
            "what reports call the machine"},
    CaseKey{"machine.nodes", "", Form::kInteger, "", "", FIELD_INT(machine.nodes),
            "nodes"}
        .from(1).up_to(kRanks),
    CaseKey{"machine.devices_per_node", "", Form::kInteger, "", "", FIELD_INT(machine.devices_per_node),
            "devices of a node"}
        .from(1).up_to(1024),
    CaseKey{"machine.cores", "", Form::kInteger, "", "", FIELD_INT(machine.cores),
            "cores of a local machine; 0: as found"}
        .from(0).up_to(65536),
    CaseKey{"machine.inter_bandwidth", "", Form::kNumber, "", kRates,
     [](Case& c, const std::string& t) { return set_machine_rate(c, c.machine.inter_bytes_per_s, "inter_bandwidth", t); },
     [](const Case& c) { return to_text(c.machine.inter_bytes_per_s); },
            "bytes a second of a node to the others"}
        .from(0).up_to(kRate),
    CaseKey{"machine.device.memory", "", Form::kCount, "", "",
     [](Case& c, const std::string& t) { c.machine.device.memory_bytes = to_count(t); c.machine.device.provenance.erase("memory"); return true; },
     [](const Case& c) { return from(c.machine.device.memory_bytes); },
            "bytes of a device"}
        .from(0).up_to(9e18),
    CaseKey{"machine.device.memory_bandwidth", "", Form::kNumber, "", kRates,
     [](Case& c, const std::string& t) { return set_machine_rate(c, c.machine.device.memory_bytes_per_s, "memory_bandwidth", t); },
     [](const Case& c) { return to_text(c.machine.device.memory_bytes_per_s); },
            "bytes a second of device memory"}
        .from(0).up_to(kRate),
    CaseKey{"machine.device.link_bandwidth", "", Form::kNumber, "", kRates,
     [](Case& c, const std::string& t) { return set_machine_rate(c, c.machine.device.link_bytes_per_s, "link_bandwidth", t); },
     [](const Case& c) { return to_text(c.machine.device.link_bytes_per_s); },
            "bytes a second of a device to the others of its node"}
        .from(0).up_to(kRate),
    CaseKey{"machine.device.power_w", "", Form::kNumber, "", kRates,
     [](Case& c, const std::string& t) { return set_machine_rate(c, c.machine.device.power_w, "power_w", t); },
     [](const Case& c) { return to_text(c.machine.device.power_w); },
            "watts of a device"}
        .from(0).up_to(1e9),
    CaseKey{"machine.device.peak_flops.fp32", "", Form::kNumber, "", kRates, [](Case& c, const std::string& t) { return set_peak(c, "fp32", t); }, nullptr,
            "dense fp32 flops a second of a device"}
        .from(0).up_to(kRate),
    CaseKey{"machine.device.peak_flops.bf16", "", Form::kNumber, "", kRates, [](Case& c, const std::string& t) { return set_peak(c, "bf16", t); }, nullptr,
            "dense bf16 flops a second of a device"}
        .from(0).up_to(kRate),
    CaseKey{"machine.device.peak_flops.fp16", "", Form::kNumber, "", kRates, [](Case& c, const std::string& t) { return set_peak(c, "fp16", t); }, nullptr,
            "dense fp16 flops a second of a device"}
        .from(0).up_to(kRate),
    CaseKey{"machine.device.peak_flops.fp8", "", Form::kNumber, "", kRates, [](Case& c, const std::string& t) { return set_peak(c, "fp8", t); }, nullptr,
            "dense fp8 flops a second of a device"}
        .from(0).up_to(kRate),
    CaseKey{"machine.device.peak_flops.fp4", "", Form::kNumber, "", kRates, [](Case& c, const std::string& t) { return set_peak(c, "fp4", t); }, nullptr,
            "dense fp4 flops a second of a device"}
        .from(0).up_to(kRate),

    CaseKey{"profile", "", Form::kWord,
     "shardlab deepspeed deepspeed-2021 llm-foundry llm.c llmq megatron megatron-2021 megatron-2022 megatron-2026 megatron-bridge megatron-deepspeed "
     "megatron-deepspeed-vtrain megatron-functional megatron-functional-local megatron-functional-plain megatron-nemo-2023 megatron-zero-bubble nanotron torchtitan "
     "torchtitan-2024 torchtitan-2025 torchtitan-2025-compiled torchtitan-2025-rowwise torchtitan-compiled torchtitan-rowwise", "", FIELD_TEXT(profile),
            "framework whose run is predicted"},

    CaseKey{"data.text", "", Form::kPath, "", "", FIELD_TEXT(data.text),
            "text that is trained on, byte by byte"}
        .estimated(),
    CaseKey{"data.tokens", "", Form::kPath, "", "", FIELD_TEXT(data.tokens),
            "file of uint16 tokens that is trained on"}
        .estimated(),
    CaseKey{"data.packed", "packed", Form::kBool, "", "", FIELD_BOOL(data.packed),
            "a sequence is several documents: attention stays within one, and positions begin anew"},
    CaseKey{"data.document_end", "", Form::kInteger, "", "", FIELD_INT(data.document_end),
            "id of the token that ends a document of data.tokens; -1: none"}
        .from(-1).up_to(65535),
    CaseKey{"data.document_tokens", "", Form::kCount, "", "", FIELD_COUNT(data.document_tokens),
            "tokens expected of a packed document, by which attention is predicted; 0: as if each sequence were one"}
        .from(0).up_to(1 << 27),
    CaseKey{"data.routing", "routing", Form::kAny, "balanced", "balanced, zipf:S with an exponent S, or forced:E for the first E experts", set_routing,
            [](const Case& c) { return c.data.routing.empty() ? std::string("balanced") : c.data.routing; },
            "how tokens choose experts in predictions: evenly, by Zipf's law, or the first few alone (a run's routers choose for themselves)"}
        .text(R"(^(zipf|forced):[0-9])").flag().estimated(),
    CaseKey{"data.routes", "", Form::kPath, "", "", FIELD_TEXT(data.routes),
            "routes.txt of a measured case, whose choice of experts predictions take"}
        .estimated(),

    CaseKey{"layout.dp", "dp", Form::kInteger, "", "", FIELD_INT(layout.dp),
            "data-parallel ranks"}
        .from(1).up_to(kRanks)
        .axis().estimated(),
    CaseKey{"layout.tp", "tp", Form::kInteger, "", "", FIELD_INT(layout.tp),
            "tensor-parallel ranks"}
        .from(1).up_to(kRanks)
        .axis().estimated(),
    CaseKey{"layout.pp", "pp", Form::kInteger, "", "", FIELD_INT(layout.pp),
            "pipeline stages"}
        .from(1).up_to(kRanks)
        .axis().estimated(),
    CaseKey{"layout.vpp", "vpp", Form::kInteger, "", "", FIELD_INT(layout.vpp),
            "virtual stages a rank"}
        .from(1).up_to(kRanks)
        .axis().estimated(),
    CaseKey{"layout.cp", "cp", Form::kInteger, "", "", FIELD_INT(layout.cp),
            "context-parallel ranks"}
        .from(1).up_to(kRanks)
        .axis().estimated(),
    CaseKey{"layout.ep", "ep", Form::kInteger, "", "", FIELD_INT(layout.ep),
            "expert-parallel ranks"}
        .from(1).up_to(kRanks)
        .axis().estimated(),
    CaseKey{"layout.expert_tp", "expert_tp", Form::kInteger, "", "", FIELD_INT(layout.expert_tp),
            "tensor-parallel ranks that cut each expert: tp, or a divisor of it (1: experts are whole), whose groups divide tokens and share experts; 0: tp"}
        .from(0).up_to(kRanks)
        .axis().estimated(),
    CaseKey{"layout.zero", "zero", Form::kWord, "0 1 2 3", "", FIELD_INT(layout.zero),
            "ZeRO stage"}
        .axis().estimated(),
    CaseKey{"layout.schedule", "schedule", Form::kAny,
     "auto",
     "a schedule's name (1f1b, interleaved, zb-h1, ...: docs/pipelines.md has all), a .csv file with one row for each stage (cells such as 0F0), or its rows in one line with ; between them", set_schedule, get_schedule,
            "order of the pipeline's micro-batches"}
        .text(R"(\.csv$|[0-9]F[0-9])").axis().estimated(),
    CaseKey{"layout.stage_layers", "stage_layers", Form::kText, "", "", FIELD_TEXT(layout.stage_layers),
            "layers of each part of the model, as 3,4,4,1, balanced (by predicted time) or measured (by the trace of the run that is resumed); empty: as even as can be"},
    CaseKey{"layout.sequence_parallel", "sequence_parallel", Form::kBool, "", "", FIELD_BOOL(layout.sequence_parallel),
            "activations sharded along the sequence over tp"}
        .axis().estimated(),
    CaseKey{"layout.tensor_overlap", "tensor_overlap", Form::kBool, "", "", FIELD_BOOL(layout.tensor_overlap),
            "matrix products in strips of the sequence, each beside the messages of another (collective matmul, async tensor parallel)"}
        .flag().estimated(),
    CaseKey{"layout.expert_overlap", "expert_overlap", Form::kWord, "none layer micro-batches", "",
            FIELD_NAMED(layout.expert_overlap, ExpertOverlap::kNone, ExpertOverlap::kLayer, ExpertOverlap::kMicroBatches),
            "what is computed beside the exchanges of experts: nothing, what is left of the layer, or that and another micro-batch"}
        .flag(),
    CaseKey{"layout.expert_bound", "expert_bound", Form::kNumber, "", "", FIELD_FLOAT(layout.expert_bound),
            "room for rows of experts on a rank, in even shares; a step in which a rank gets more runs again, one sequence at a time; 0: room for the worst case, no step runs again"}
        .from(0).up_to(kRanks)
        .flag(),
    CaseKey{"layout.expert_placement", "expert_placement", Form::kText, "", "", FIELD_TEXT(layout.expert_placement),
            "which ranks have which experts: balanced (by data.routing or data.routes), measured (by the rows of the run that is resumed), or layer by layer as 1:2,0,3,1 2:1,3,0,2; empty: contiguous"}
        .flag().estimated(),
    CaseKey{"layout.recompute", "recompute", Form::kAny, "none selective full false", "none, selective, full, a list of sub-layers, or runs of layers such as 3*full 5*none", set_recompute, get_recompute,
            "what backward computes again"}
        .text(R"([0-9]\*)").axis().estimated(),
    CaseKey{"layout.recompute_options.every", "recompute_options.every", Form::kInteger, "", "", FIELD_INT(layout.recompute_options.every),
            "layers from one that is computed again to the next"}
        .from(1).up_to(16384).estimated(),
    CaseKey{"layout.recompute_options.budget_bytes", "recompute_options.budget_bytes", Form::kCount, "", "", FIELD_COUNT(layout.recompute_options.budget_bytes),
            "device bytes within which recompute is chosen layer by layer; 0: not chosen"}
        .from(0).up_to(9e18).estimated(),
    CaseKey{"layout.loss_chunks", "loss_chunks", Form::kInteger, "", "", FIELD_INT(layout.loss_chunks),
            "pieces of a micro-batch that go through head and loss one after another, so that their logits are never whole"}
        .from(1).up_to(1 << 20).flag().estimated(),
    CaseKey{"layout.offload", "offload", Form::kMap, "none", "none, or a map such as {optimizer: cpu} with keys of: activations optimizer parameters, and values of: none cpu nvme", set_offload, get_offload,
            "what lives outside device memory"}
        .axis().estimated(),
    CaseKey{"layout.delayed_update", "delayed_update", Form::kBool, "", "", FIELD_BOOL(layout.offload.delayed_update),
            "the host updates with the gradients of the step before"}
        .estimated(),
    CaseKey{"layout.overlap", "overlap", Form::kBool, "", "", FIELD_BOOL(layout.overlap),
            "gradients are reduced while backward goes on"}
        .estimated(),
    CaseKey{"layout.bucket_bytes", "bucket_bytes", Form::kCount, "", "", FIELD_COUNT(layout.bucket_bytes),
            "gradients reduced together; 0: tensor by tensor"}
        .axis().estimated(),
    CaseKey{"layout.collective_algorithm", "collective_algorithm", Form::kWord, "auto ring halving-doubling direct tree hierarchical",
     "auto, ring, halving-doubling, direct, tree or hierarchical",
     FIELD_NAMED(layout.collective_algorithm, AlgorithmChoice::kAuto, AlgorithmChoice::kRing, AlgorithmChoice::kHalvingDoubling, AlgorithmChoice::kDirect, AlgorithmChoice::kTree, AlgorithmChoice::kHierarchical),
            "how collectives move bytes"}
        .axis().estimated(),
    CaseKey{"layout.fsdp", "fsdp", Form::kWord, "none", "", kNeutralNone, nullptr,
            "how ZeRO-3 gathers parameters"}
        .estimated(),
    CaseKey{"layout.fsdp.unit", "fsdp.unit", Form::kInteger, "", "", FIELD_INT(layout.fsdp.unit),
            "layers that are gathered together"}
        .from(1).up_to(16384).estimated(),
    CaseKey{"layout.fsdp.prefetch", "fsdp.prefetch", Form::kInteger, "", "", FIELD_INT(layout.fsdp.prefetch),
            "units gathered ahead of the one that computes"}
        .from(0).up_to(16384).estimated(),
    CaseKey{"layout.fsdp.reshard", "fsdp.reshard", Form::kBool, "", "", FIELD_BOOL(layout.fsdp.reshard),
            "backward gathers again what forward gathered"}
        .estimated(),
    CaseKey{"layout.hybrid_shard", "hybrid_shard", Form::kInteger, "", "", FIELD_INT(layout.hybrid_shard),
            "ranks that share one set of shards under ZeRO; 0: all"}
        .from(0).up_to(kRanks)
        .axis().estimated(),
    CaseKey{"layout.zero_plus_plus", "zero_plus_plus", Form::kWord, "none", "", kNeutralNone, nullptr,
            "quantised communication of ZeRO-3"},
    CaseKey{"layout.zero_plus_plus.weights", "zero_plus_plus.weights", Form::kBool, "", "", FIELD_BOOL(layout.zero_plus_plus.weights),
            "weights are gathered in 8 bits"},
    CaseKey{"layout.zero_plus_plus.secondary", "zero_plus_plus.secondary", Form::kInteger, "", "", FIELD_INT(layout.zero_plus_plus.secondary),
            "ranks that share a second copy for backward's gathers; 0: none"}
        .from(0).up_to(kRanks),
    CaseKey{"layout.zero_plus_plus.gradients", "zero_plus_plus.gradients", Form::kBool, "", "", FIELD_BOOL(layout.zero_plus_plus.gradients),
            "gradients are scattered in 4 bits"},
    CaseKey{"layout.parameter_server", "parameter_server", Form::kWord, "none", "", kNeutralNone, nullptr,
            "servers of parameters"},
    CaseKey{"layout.parameter_server.servers", "parameter_server.servers", Form::kInteger, "", "", FIELD_INT(layout.parameter_server.servers),
            "ranks that serve parameters; 0: none"}
        .from(0).up_to(kRanks),
    CaseKey{"layout.parameter_server.staleness", "parameter_server.staleness", Form::kWord, "sync 0 1 2 3 4 8 16", "",
     [](Case& c, const std::string& t) { c.layout.parameter_server.staleness = t == "sync" ? -1 : to_int(t); return true; },
     [](const Case& c) { const int s = c.layout.parameter_server.staleness; return s < 0 ? std::string("sync") : from(int64_t{s}); },
            "steps that a worker may be ahead of the others"},
    CaseKey{"layout.compression.kind", "compression.kind compression layout.compression", Form::kWord, "none bf16 int8 top-k random-k powersgd one-bit-adam", "",
     FIELD_NAMED(layout.compression.kind, CompressionKind::kNone, CompressionKind::kBf16, CompressionKind::kInt8, CompressionKind::kTopK,
                 CompressionKind::kRandomK, CompressionKind::kPowerSgd, CompressionKind::kOneBitAdam),
            "what gradients look like on the wire"}
        .estimated(),
    CaseKey{"layout.compression.rank", "compression.rank", Form::kInteger, "", "", FIELD_INT(layout.compression.rank),
            "rank of PowerSGD"}
        .from(1).up_to(kSize).estimated(),
    CaseKey{"layout.compression.k", "compression.k", Form::kNumber, "", "",
     [](Case& c, const std::string& t) { c.layout.compression.k = parse_number(t).value(); return true; },
     [](const Case& c) { return to_text(c.layout.compression.k); },
            "share of the elements that top-k and random-k send"}
        .above(0).up_to(1).estimated(),
    CaseKey{"layout.compression.bits", "compression.bits", Form::kInteger, "", "", FIELD_INT(layout.compression.bits),
            "bits of int8: 8 or 4"}
        .from(1).up_to(8).estimated(),
    CaseKey{"layout.compression.warmup", "compression.warmup", Form::kInteger, "", "", FIELD_INT(layout.compression.warmup),
            "steps of plain Adam before 1-bit Adam freezes the variance"}
        .from(0).up_to(1'000'000).estimated(),
    CaseKey{"layout.diloco.steps", "diloco.steps diloco layout.diloco", Form::kInteger, "", "", FIELD_INT(layout.diloco.steps),
            "steps that workers train apart; 0: none"}
        .from(0).up_to(1'000'000),
    CaseKey{"layout.diloco.learning_rate", "diloco.learning_rate", Form::kNumber, "", "", FIELD_FLOAT(layout.diloco.learning_rate),
            "of the outer step"}
        .from(0).up_to(1e6),
    CaseKey{"layout.diloco.momentum", "diloco.momentum", Form::kNumber, "", "", FIELD_FLOAT(layout.diloco.momentum),
            "Nesterov momentum of the outer step"}
        .from(0).below(1),
    CaseKey{"layout.cp_kind", "cp_kind", Form::kWord, "none ring zigzag striped all-gather ulysses usp", "", FIELD_NAMED(layout.cp_kind, ContextKind::kNone, ContextKind::kRing, ContextKind::kZigzag, ContextKind::kStriped, ContextKind::kAllGather, ContextKind::kUlysses, ContextKind::kUsp),
            "kind of context parallelism"}
        .axis().estimated(),

    CaseKey{"layout.cp_ulysses", "cp_ulysses", Form::kInteger, "", "", FIELD_INT(layout.cp_ulysses),
            "of cp_kind: usp, the ranks of cp that exchange heads; the rings pass through the others"}
        .from(0).up_to(1 << 20).flag(),
    CaseKey{"train.seq_len", "seq_len", Form::kCount, "", "", FIELD_COUNT(train.seq_len),
            "tokens of a sequence"}
        .from(1).up_to(1 << 30)
        .flag().estimated(),
    CaseKey{"train.global_batch_tokens", "global_batch_tokens", Form::kCount, "", "", FIELD_COUNT(train.global_batch_tokens),
            "tokens of a step over all ranks"}
        .from(1).up_to(kExact)
        .flag().estimated(),
    CaseKey{"train.micro_batch", "micro_batch", Form::kCount, "", "", FIELD_COUNT(train.micro_batch),
            "sequences of a micro-batch on one rank"}
        .from(1).up_to(1 << 30)
        .axis().estimated(),
    CaseKey{"train.grad_accumulation", "grad_accumulation", Form::kCount, "", "", FIELD_COUNT(train.grad_accumulation),
            "micro-batches of a step on one rank"}
        .from(1).up_to(1 << 20)
        .axis().estimated(),
    CaseKey{"train.precision", "precision", Form::kWord, "fp32 bf16 fp16 fp8 fp4", "", FIELD_NAMED(train.precision, Precision::kFp32, Precision::kBf16, Precision::kFp16, Precision::kFp8, Precision::kFp4),
            "element type of the matrix products"}
        .axis().estimated(),
    CaseKey{"train.lora_rank", "lora_rank", Form::kCount, "", "0", kNeutralZero, nullptr,
            "rank of adapters that are trained beside frozen projections (LoRA), 0 for none"}
        .from(0).up_to(1 << 16).flag().estimated(),
    CaseKey{"train.lora_targets", "lora_targets", Form::kText, "", "all", kNeutralAll, nullptr,
            "projections with an adapter, of q k v o gate up down; attention, mlp and all name several"}
        .flag().estimated(),
    CaseKey{"train.frozen", "frozen", Form::kText, "", "none", kNeutralNone, nullptr,
            "modules whose weights are not trained (under LoRA all), of embedding head attention mlp experts router norms"}
        .flag().estimated(),
    CaseKey{"train.frozen_bits", "frozen_bits", Form::kInteger, "", "16", kNeutralSixteen, nullptr,
            "bits of a frozen weight: 16, 8, or 4 (NormalFloat, as QLoRA has it)"}
        .from(4).up_to(16).flag().estimated(),
    CaseKey{"train.reduce_dtype", "reduce_dtype", Form::kWord, "fp32 bf16 fp16", "", FIELD_DTYPE(train.reduce_dtype),
            "element type of gradients on the wire"}
        .estimated(),
    CaseKey{"train.accumulate_dtype", "accumulate_dtype", Form::kWord, "fp32 bf16 fp16", "", FIELD_DTYPE(train.accumulate_dtype),
            "element type of gradients summed over micro-batches"}
        .estimated(),
    CaseKey{"train.loss_scale", "loss_scale", Form::kAny, "dynamic", "dynamic, or a number", set_loss_scale, get_loss_scale,
            "of fp16: fixed, or dynamic"}
        .from(1).up_to(16777216).estimated(),
    CaseKey{"train.loss_scale_start", "loss_scale_start", Form::kNumber, "", "", FIELD_FLOAT(train.loss_scale_start),
            "where a dynamic scale begins"}
        .from(1).up_to(16777216).estimated(),
    CaseKey{"train.loss_scale_interval", "loss_scale_interval", Form::kCount, "", "", FIELD_COUNT(train.loss_scale_interval),
            "applied steps in a row after which a dynamic scale doubles"}
        .from(1).up_to(16777216).estimated(),
    CaseKey{"train.guard.nonfinite", "guard.nonfinite", Form::kWord, "none stop skip", "", FIELD_NAMED(train.guard.nonfinite, GuardAction::kNone, GuardAction::kStop, GuardAction::kSkip),
            "what becomes of a step whose gradient is infinite or no number"}
        .estimated(),
    CaseKey{"train.guard.spike", "guard.spike", Form::kWord, "none stop skip", "", FIELD_NAMED(train.guard.spike, GuardAction::kNone, GuardAction::kStop, GuardAction::kSkip),
            "what becomes of a step whose loss or gradient norm is far above its mean"}
        .estimated(),
    CaseKey{"train.guard.loss_factor", "guard.loss_factor", Form::kNumber, "", "", FIELD_FLOAT(train.guard.loss_factor),
            "times the mean beyond which a loss is a spike; 0: losses are not judged"}
        .from(0).up_to(1e30).estimated(),
    CaseKey{"train.guard.norm_factor", "guard.norm_factor", Form::kNumber, "", "", FIELD_FLOAT(train.guard.norm_factor),
            "times the mean beyond which a gradient norm is a spike; 0: not judged"}
        .from(0).up_to(1e30).estimated(),
    CaseKey{"train.guard.window", "guard.window", Form::kCount, "", "", FIELD_COUNT(train.guard.window),
            "steps that the running mean remembers"}
        .from(1).up_to(16777216).estimated(),
    CaseKey{"train.fp8_scaling", "fp8_scaling", Form::kWord, "current delayed block", "", FIELD_NAMED(train.fp8_scaling, Fp8Scaling::kCurrent, Fp8Scaling::kDelayed, Fp8Scaling::kBlock),
            "what an fp8 scale is taken from"}
        .estimated(),
    CaseKey{"train.optimizer", "optimizer", Form::kWord, "adamw sgd lion adamw8bit", "", FIELD_NAMED(train.optimizer, Optimizer::kAdamW, Optimizer::kSgd, Optimizer::kLion, Optimizer::kAdamW8bit),
            "the optimizer: what it keeps and computes is in docs/optimizers.md"}
        .flag().estimated(),
    CaseKey{"train.learning_rate.peak", "learning_rate train.learning_rate", Form::kNumber, "", "", FIELD_FLOAT(train.learning_rate.peak),
            "learning rate at its peak"}
        .from(0).up_to(1e6).estimated(),
    CaseKey{"train.learning_rate.kind", "", Form::kWord, "constant cosine linear wsd", "",
     FIELD_NAMED(train.learning_rate.kind, LearningRate::Kind::kConstant, LearningRate::Kind::kCosine, LearningRate::Kind::kLinear, LearningRate::Kind::kWsd),
            "course of the learning rate"}
        .estimated(),
    CaseKey{"train.learning_rate.warmup_steps", "", Form::kCount, "", "", FIELD_COUNT(train.learning_rate.warmup_steps),
            "steps in which it rises from 0"}
        .from(0).up_to(kExact).estimated(),
    CaseKey{"train.learning_rate.total_steps", "", Form::kCount, "", "", FIELD_COUNT(train.learning_rate.total_steps),
            "steps of its whole course"}
        .from(0).up_to(kExact).estimated(),
    CaseKey{"train.learning_rate.decay_steps", "", Form::kCount, "", "", FIELD_COUNT(train.learning_rate.decay_steps),
            "of wsd: the last steps, in which it falls"}
        .from(0).up_to(kExact).estimated(),
    CaseKey{"train.learning_rate.floor", "", Form::kNumber, "", "", FIELD_FLOAT(train.learning_rate.floor),
            "where it ends"}
        .from(0).up_to(1e6).estimated(),
    CaseKey{"train.weight_decay", "weight_decay", Form::kNumber, "", "", FIELD_FLOAT(train.weight_decay),
            "share of a parameter that a step takes away, times the learning rate; matrices only"}
        .from(0).up_to(1e6).estimated(),
    CaseKey{"train.beta1", "beta1", Form::kNumber, "", "", FIELD_FLOAT(train.beta1),
            "decay of the first moment; of lion: its share of what a step goes by"}
        .from(0).below(1).estimated(),
    CaseKey{"train.beta2", "beta2", Form::kNumber, "", "", FIELD_FLOAT(train.beta2),
            "decay of the second moment; of lion: of its moment. Without a value 0.95, of lion 0.99"}
        .from(0).below(1).estimated(),
    CaseKey{"train.epsilon", "epsilon", Form::kNumber, "", "", FIELD_FLOAT(train.epsilon),
            "added to Adam's denominator"}
        .above(0).up_to(1).estimated(),
    CaseKey{"train.clip_norm", "clip_norm", Form::kNumber, "", "", FIELD_FLOAT(train.clip_norm),
            "bound on the gradient norm; 0: none"}
        .from(0).up_to(1e30).estimated(),
    CaseKey{"train.ema_decay", "ema_decay", Form::kNumber, "", "", FIELD_FLOAT(train.ema_decay),
            "decay a step of a running average of the weights, kept beside them; 0: none"}
        .from(0).below(1),
    CaseKey{"train.post_validation", "post_validation", Form::kCount, "", "", FIELD_COUNT(train.post_validation),
            "steps that pipeline stages make before they learn whether one was to be clipped or skipped, and if so make them again; 0: none"}
        .from(0).up_to(4096),
    CaseKey{"train.dropout", "dropout", Form::kNumber, "", "", FIELD_FLOAT(train.dropout),
            "probability of dropping an element"}
        .from(0).below(1).estimated(),
    CaseKey{"train.grad_norm", "grad_norm", Form::kBool, "", "", FIELD_BOOL(train.grad_norm),
            "the norm of the gradient is recorded each step"}
        .estimated(),
    CaseKey{"train.seed", "seed", Form::kCount, "", "", FIELD_COUNT(train.seed),
            "of every random number"}
        .estimated(),

    CaseKey{"execution.backend", "backend", Form::kWord, "cpu cuda dry", "", FIELD_NAMED(backend, BackendKind::kCpu, BackendKind::kCuda, BackendKind::kDry),
            "what runs the ops"},
    CaseKey{"execution.transport", "transport", Form::kWord, "threads processes tcp gloo mpi nccl one-gpu", "threads, processes, tcp, gloo or mpi, or, with backend: cuda, one-gpu or nccl", FIELD_NAMED(transport, TransportKind::kThreads, TransportKind::kProcesses, TransportKind::kTcp, TransportKind::kGloo, TransportKind::kMpi, TransportKind::kOneGpu, TransportKind::kNccl),
            "what moves the bytes between ranks"},
    CaseKey{"execution.threads_per_rank", "threads_per_rank", Form::kInteger, "", "", FIELD_INT(threads_per_rank),
            "threads of one rank's kernels"}
        .from(1).up_to(1024),
    CaseKey{"execution.canonical", "canonical", Form::kBool, "", "", FIELD_BOOL(canonical),
            "sums in the canonical order: bitwise equal across layouts"},
    CaseKey{"execution.attention", "attention", Form::kWord, "auto own cudnn", "", FIELD_NAMED(attention, AttentionBy::kAuto, AttentionBy::kOwn, AttentionBy::kCudnn),
            "whose attention a GPU runs: its own, cuDNN, or cuDNN where it takes the shape"},
    CaseKey{"execution.tf32", "tf32", Form::kBool, "", "", FIELD_BOOL(tf32),
            "fp32 products of the GPU's library may round their factors to tf32"},

    CaseKey{"measure.warmup", "", Form::kCount, "", "", FIELD_COUNT(measure.warmup),
            "steps before the measured ones"}
        .from(0).up_to(1'000'000),
    CaseKey{"measure.steps", "", Form::kCount, "", "", FIELD_COUNT(measure.steps),
            "measured steps"}
        .from(1).up_to(1'000'000),
    CaseKey{"measure.repeat", "", Form::kCount, "", "", FIELD_COUNT(measure.repeat),
            "runs of the case"}
        .from(1).up_to(1'000'000),
    CaseKey{"measure.timeout", "", Form::kDuration, "", "",
     [](Case& c, const std::string& t) { c.measure.timeout_s = parse_duration(t).value(); return true; }, [](const Case& c) { return to_text(c.measure.timeout_s); },
            "seconds after which a case is given up"}
        .above(0).up_to(1e8),
    CaseKey{"measure.validate_sequences", "", Form::kCount, "", "", FIELD_COUNT(measure.validate_sequences),
            "sequences of validation text scored after training; 0: none"}
        .from(0).up_to(1e9),

    CaseKey{"checkpoint.save_every", "", Form::kCount, "", "", FIELD_COUNT(checkpoint.save_every),
            "steps from one save to the next; 0: none"}
        .from(0).up_to(1e9),
    CaseKey{"checkpoint.folder", "", Form::kPath, "", "", FIELD_TEXT(checkpoint.folder),
            "where training is saved; empty: in the case's folder"},
    CaseKey{"checkpoint.resume", "", Form::kPath, "", "", FIELD_TEXT(checkpoint.resume),
            "a saved training that the run begins from"},
});
// clang-format on

/// What a key of form kMap takes: a word for each of its parts.
struct KeyParts {
  std::string_view path, parts, words;
};
constexpr KeyParts kParts[] = {{"layout.offload", "activations optimizer parameters", "none cpu nvme"}};

/// What is below a bound is so in single precision too, as cases keep it: 0.99999999 would be 1.
bool in_range(const Range& range, double value) {
  return (range.above ? value > range.least : value >= range.least) &&
         (range.below ? static_cast<float>(value) < range.most : value <= range.most);
}

/// 1073741824 is "1Gi"; a bound that a person can read is written in digits.
std::string bound_text(double v) {
  constexpr std::pair<double, const char*> kBinary[] = {
      {double{int64_t{1} << 40}, "Ti"}, {double{1 << 30}, "Gi"}, {double{1 << 20}, "Mi"}};
  if (v == 0x1p63) return fmt::format("{}", std::numeric_limits<int64_t>::max());
  for (const auto& [unit, suffix] : kBinary)
    if (v >= 1e7 && v <= kExact && std::fmod(v, unit) == 0) return fmt::format("{:.0f}{}", v / unit, suffix);
  if (v < 1e7) return to_text(v);
  if (v < kExact && std::fmod(v, 1e6) != 0) return fmt::format("{:.0f}", v);
  std::string text = fmt::format("{:g}", v);  // "1e+09" is written 1e9
  if (const size_t e = text.find("e+"); e != std::string::npos) text.erase(e + 1, text[e + 2] == '0' ? 2 : 1);
  return text;
}

std::string range_text(const Range& range) {
  return fmt::format("{} {} {} {}", range.above ? "above" : "from", bound_text(range.least), range.below ? "to below" : "to",
                     bound_text(range.most));
}

/// ", for example 8, 64k or 1Mi": those of the texts that are in the range.
std::string examples_in(const Range& range, std::initializer_list<const char*> texts) {
  std::vector<std::string> good;
  for (const char* text : texts)
    if (in_range(range, parse_number(text).value())) good.emplace_back(text);
  if (good.empty()) return "";
  std::string list = good.front();
  for (size_t i = 1; i < good.size(); ++i) list += (i + 1 < good.size() ? ", " : " or ") + good[i];
  return ", for example " + list;
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
  static const auto sections = [] {
    std::set<std::string, std::less<>> all;
    const auto add = [&](std::string_view word) {
      for (size_t dot = word.find('.'); dot != std::string_view::npos; dot = word.find('.', dot + 1))
        all.emplace(word.substr(0, dot));
    };
    for (const CaseKey& key : kKeys) {
      add(key.path);
      for_each_word(key.aliases, add);
    }
    return all;
  }();
  return sections.contains(path);
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

Range range_of(const CaseKey& key) {
  if (key.range.most >= key.range.least) return key.range;
  switch (key.form) {
    case Form::kInteger: return {0, static_cast<double>(std::numeric_limits<int>::max())};
    case Form::kCount: return {0, static_cast<double>(std::numeric_limits<int64_t>::max())};
    default: return {0, static_cast<double>(std::numeric_limits<float>::max())};
  }
}

std::string expected(const CaseKey& key) {
  switch (key.form) {
    case Form::kInteger:
    case Form::kCount:
      return fmt::format("a whole number {}{}", range_text(range_of(key)), examples_in(range_of(key), {"8", "64k", "1Mi"}));
    case Form::kNumber:
      return fmt::format("a number {}{}", range_text(range_of(key)), examples_in(range_of(key), {"0.1", "1e-3", "16k"}));
    case Form::kBool: return "true or false";
    case Form::kWord:
      if (is_section(key.path))  // what it is instead has keys of its own
        return fmt::format("{}, or keys of its own: {}", key.words, fmt::join(keys_under(key.path), " "));
      return fmt::format("one of: {}", key.words);
    case Form::kText: return "a text";
    case Form::kPath: return "a path";
    case Form::kDuration: return "a duration above 0 and up to 1e8 s, for example 90s, 5m or 2h";
    case Form::kMap:
    case Form::kAny: return std::string(key.holds);
  }
  return "?";
}

namespace {

/// `text` is written as values of the form are, whatever the key's range; a number's value is `number`.
bool is_written_as(const CaseKey& key, const std::string& text, std::optional<double>& number) {
  switch (key.form) {
    case Form::kInteger:
    case Form::kCount:
      if (const auto n = parse_count(text)) number = static_cast<double>(*n);
      return number.has_value();
    case Form::kNumber: return (number = parse_number(text)).has_value();
    case Form::kBool: return parse_bool(text).has_value();
    case Form::kWord: return has_word(key.words, text);
    case Form::kMap:
    case Form::kAny: {  // what the key itself takes, whatever the case
      Case any;
      return key.set(any, text);
    }
    case Form::kText: return true;
    case Form::kPath: return !text.empty();
    case Form::kDuration: return (number = parse_duration(text)).has_value();
  }
  return false;
}

}  // namespace

bool has_form(const CaseKey& key, const std::string& text) {
  std::optional<double> number;
  return is_written_as(key, text, number) && (!number || in_range(range_of(key), *number));
}

bool restore(const CaseKey& key, Case& c, const std::string& text) {
  std::optional<double> number;
  if (key.form == Form::kPath && text.empty()) return key.set(c, text);  // a path that the case does not have
  if (!is_written_as(key, text, number)) return false;
  if (key.form == Form::kInteger && std::abs(*number) > std::numeric_limits<int>::max()) return false;
  return key.set(c, text);
}

}  // namespace shardlab
