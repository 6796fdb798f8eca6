// Arguments of Megatron-LM core_v0.15.3 as settings of a case. Arguments were read in the sources that interop/megatron.cpp names.
#include <fmt/format.h>

#include <algorithm>
#include <set>

#include "interop/settings.h"
#include "interop/shell_words.h"
#include "plan/base/nearest.h"
#include "plan/base/values.h"

namespace shardlab::interop {

namespace {

/// A layout with its repetitions written out, those of brackets or those of single signs: "Et|(tt|)*2L" as "Et|tt|tt|L"; nothing where it
/// is longer than any pipeline, or a count or a bracket is missing.
std::optional<std::string> repeated(std::string_view text, bool brackets) {
  constexpr size_t kLongest = 65536;
  std::string out;
  for (size_t i = 0; i < text.size(); ++i) {
    std::string part(1, text[i]);
    if (brackets && text[i] == '(') {
      const size_t end = text.find(')', i);
      if (end == std::string_view::npos) return std::nullopt;
      part = text.substr(i + 1, end - i - 1);
      i = end;
    }
    int64_t times = 1;
    if ((!brackets || text[i] == ')') && i + 1 < text.size() && text[i + 1] == '*') {
      const size_t end = std::min(text.find_first_not_of("0123456789", i + 2), text.size());
      const auto n = parse_count(text.substr(i + 2, end - i - 2));
      if (!n || *n < 1 || *n > 16384) return std::nullopt;
      times = *n;
      i = end - 1;
    }
    for (int64_t n = 0; n < times; ++n)
      if ((out += part).size() > kLongest) return std::nullopt;
  }
  return out;
}

/// The layers of each part of "Ettt|tttt|tL": 3, 4, 1; nothing where there is more in it.
/// Source: megatron/core/transformer/pipeline_parallel_layer_layout.py, parse_str_to_list.
std::optional<std::vector<int64_t>> layers_of_layout(std::string_view written) {
  const auto unbracketed = repeated(written, true);
  const auto text = unbracketed ? repeated(*unbracketed, false) : std::nullopt;
  if (!text) return std::nullopt;
  std::vector<int64_t> layers{0};
  bool head = false;
  for (size_t i = 0; i < text->size(); ++i) {
    const char c = (*text)[i];
    if (c == '|') {
      layers.push_back(0);
    } else if (c == 'E') {
      if (layers.size() != 1 || layers[0] != 0) return std::nullopt;
    } else if (c == 'L') {
      head = true;
      if (text->find('|', i) != std::string::npos) return std::nullopt;
    } else if (c == 't') {
      ++layers.back();
    } else if (c != ',') {
      return std::nullopt;
    }
  }
  if (!head || layers.size() > 16384) return std::nullopt;
  return layers;
}

/// A list of Python's as --moe-layer-freq takes it: "[0,1]*24", "([0]*3+[1]*58)". Nothing where the text is none, or longer than any model.
/// Source: megatron/training/arguments.py, moe_freq_type.
class Pattern {
 public:
  static std::optional<std::vector<int>> of(std::string_view text) {
    Pattern pattern(text);
    auto list = pattern.sum(0);
    if (!list || pattern.at_ != text.size()) return std::nullopt;
    return list;
  }

 private:
  using List = std::optional<std::vector<int>>;
  static constexpr size_t kLongest = 16384;
  static constexpr int kDeepest = 16;

  explicit Pattern(std::string_view text) : text_(text) {}
  bool take(char c) {
    while (at_ < text_.size() && text_[at_] == ' ') ++at_;
    if (at_ >= text_.size() || text_[at_] != c) return false;
    ++at_;
    return true;
  }
  std::optional<int64_t> number() {
    while (at_ < text_.size() && text_[at_] == ' ') ++at_;
    const size_t end = std::min(text_.find_first_not_of("0123456789", at_), text_.size());
    const auto n = parse_count(text_.substr(at_, end - at_));
    at_ = end;
    return n;
  }
  List sum(int depth) {
    List all = repetition(depth);
    while (all && take('+')) {
      const List more = repetition(depth);
      if (!more || all->size() + more->size() > kLongest) return std::nullopt;
      all->insert(all->end(), more->begin(), more->end());
    }
    return all;
  }
  List repetition(int depth) {
    List one = depth < kDeepest ? part(depth) : std::nullopt;
    while (one && take('*')) {
      const auto times = number();
      if (!times || *times < 1 || static_cast<size_t>(*times) > kLongest / std::max<size_t>(one->size(), 1)) return std::nullopt;
      const std::vector<int> once = *one;
      for (int64_t n = 1; n < *times; ++n) one->insert(one->end(), once.begin(), once.end());
    }
    return one;
  }
  List part(int depth) {
    if (take('(')) {
      List inner = sum(depth + 1);
      return inner && take(')') ? inner : std::nullopt;
    }
    if (!take('[')) return std::nullopt;
    std::vector<int> list;
    do {
      const auto n = number();
      if (!n || *n > 1 || list.size() >= kLongest) return std::nullopt;
      list.push_back(static_cast<int>(*n));
    } while (take(','));
    return take(']') ? List(list) : std::nullopt;
  }

  std::string_view text_;
  size_t at_ = 0;
};

/// The layers with experts as a case says them.
struct MixtureLayers {
  int64_t dense_layers = 0, every = 1;
};

/// `dense_layers` and `moe_every` that give exactly these layers experts (1); nothing where there are none.
std::optional<MixtureLayers> mixture_layers(const std::vector<int>& pattern) {
  const auto layers = static_cast<int64_t>(pattern.size()), first = std::ranges::find(pattern, 1) - pattern.begin();
  for (int64_t every = 1; first < layers && every <= first + 1; ++every) {
    bool same = true;
    for (int64_t i = 0; i < layers && same; ++i)
      same = (pattern[static_cast<size_t>(i)] == 1) == (i >= first && (i + 1) % every == 0);
    if (same) return MixtureLayers{.dense_layers = first + 1 == every ? 0 : first, .every = every};
  }
  return std::nullopt;
}

class Megatron {
 public:
  Megatron(std::string_view text, int64_t devices) : options_(options_of(shell_words(text))), devices_(devices) {}

  Result<Imported> read(const std::string& name) {
    if (!has("num-layers") && !has("tensor-model-parallel-size") && !has("micro-batch-size")) return none_given(name);
    read_model();
    read_layout();
    read_training();
    for (const auto& [option, values] : options_)
      if (!read_.contains(option))
        out_.unread(fmt::format("--{}{}", option, values.empty() ? "" : fmt::format(" {}", fmt::join(values, " "))));
    return out_.finish(name, "megatron");
  }

 private:
  /// The file has none of the arguments that every launch of Megatron-LM has one of.
  Error none_given(const std::string& name) const {
    const std::vector<std::string> wanted = {"num-layers", "tensor-model-parallel-size", "micro-batch-size"};
    std::string slip;
    for (const auto& [option, values] : options_)
      if (const std::string close = nearest(option, wanted); !close.empty() && slip.empty())
        slip = fmt::format("; `--{}` is unknown, did you mean `--{}`?", option, close);
    return {ExitCode::kUsage, fmt::format("none of --{} is given{}", fmt::join(wanted, ", --"), slip),
            "a launch script of Megatron-LM, or the arguments of pretrain_gpt.py alone, is expected", name};
  }
  bool has(std::string_view option) {
    read_.emplace(option);
    return options_.contains(option);
  }
  std::string text(std::string_view option, std::string_view otherwise = "") {
    read_.emplace(option);
    const auto found = options_.find(option);
    if (found == options_.end()) return std::string(otherwise);
    // Further words are the launcher's own argument, the training script.
    if (found->second.empty() || found->second[0].find('$') != std::string::npos) {
      out_.problem(
          fmt::format("--{}", option),
          found->second.empty() ? "has no value" : fmt::format("`{}` is not one value that stands in the file", found->second[0]));
      return std::string(otherwise);
    }
    return found->second[0];
  }
  int64_t number(std::string_view option, int64_t otherwise, int64_t least = 1) {
    const std::string value = text(option);
    return value.empty() ? otherwise : whole(out_, fmt::format("--{}", option), value, least);
  }
  void copy(std::string_view option, std::string_view path) {
    if (has(option)) out_.set(path, text(option));
  }
  void refuse(std::string_view option, std::string why) {
    if (has(option)) out_.problem(fmt::format("--{}", option), std::move(why));
  }

  void read_model() {
    if (number("mtp-num-layers", 0, 0) > 0) out_.problem("--mtp-num-layers", "layers that predict further tokens are not imported");
    if (!has("num-layers")) return;
    const bool llama = has("swiglu");
    const int64_t layers = number("num-layers", 1), hidden = number("hidden-size", 1), heads = number("num-attention-heads", 1);
    out_.set("model.family", llama ? "llama" : "gpt");
    out_.set("model.layers", layers);
    out_.set("model.hidden", hidden);
    out_.set("model.heads", heads);
    out_.set("model.kv_heads", has("group-query-attention") ? number("num-query-groups", 1) : heads);
    if (hidden % std::max<int64_t>(heads, 1) != 0 && !has("kv-channels"))
      out_.problem("--num-attention-heads", fmt::format("{} does not divide {}", heads, hidden));
    out_.set("model.head_dim", number("kv-channels", hidden / std::max<int64_t>(heads, 1)));
    // Of gated feed-forwards Megatron-LM's default is two thirds of four times the width, in multiples of 64.
    out_.set("model.ffn", number("ffn-hidden-size", llama ? static_cast<int64_t>(4 * hidden * 2 / 3) / 64 * 64 : 4 * hidden));
    const int64_t tp = number("tensor-model-parallel-size", 1),
                  multiple = number("make-vocab-size-divisible-by", 128) * std::min<int64_t>(tp, 4096);
    const int64_t tokens = number("vocab-size", 0) + (text("tokenizer-type") == "NullTokenizer" ? 1 : 0);
    if (has("padded-vocab-size"))
      out_.set("model.vocab", number("padded-vocab-size", 1));
    else if (has("vocab-size"))
      out_.set("model.vocab", (tokens + multiple - 1) / multiple * multiple);
    else
      out_.problem("--vocab-size", "missing; Megatron-LM takes it from the tokenizer's file, which is not read here: add it");
    out_.set("model.max_positions", number("max-position-embeddings", number("seq-length", 1)));
    has("max-position-embeddings");
    out_.set("model.tied_embeddings", !has("untie-embeddings-and-output-weights"));
    copy("norm-epsilon", "model.norm_epsilon");
    copy("rotary-base", "model.rope_theta");
    copy("init-method-std", "model.init_deviation");
    const std::string positions = text("position-embedding-type", "learned_absolute"), norm = text("normalization", "LayerNorm");
    if (positions != (llama ? "rope" : "learned_absolute"))
      out_.problem("--position-embedding-type",
                   fmt::format("`{}` goes with no family of models here: rope with --swiglu, learned_absolute without", positions));
    if (norm != (llama ? "RMSNorm" : "LayerNorm"))
      out_.problem("--normalization",
                   fmt::format("`{}` goes with no family of models here: RMSNorm with --swiglu, LayerNorm without", norm));
    if (has("disable-bias-linear") != llama)
      out_.problem("--disable-bias-linear", "llama has no biases but those of --add-qkv-bias, gpt has them all");
    if (has("add-qkv-bias") && llama) out_.set("model.qkv_biases", true);
    const bool latent = has("multi-latent-attention");
    if (latent) read_latent(llama);
    if (has("qk-layernorm") && !latent) {
      if (llama)
        out_.set("model.qk_norm", true);
      else
        out_.problem("--qk-layernorm", "gpt has no norms over heads of q and k: remove it, or take a llama (--swiglu)");
    }
    if (const int64_t experts = number("num-experts", 0, 0); experts > 1) read_experts(experts, layers, llama);
  }

  /// --multi-latent-attention. Source: megatron/core/transformer/multi_latent_attention.py, MLASelfAttention; of the norms
  /// megatron/core/models/gpt/gpt_layer_specs.py; defaults from megatron/training/arguments.py, _add_mla_args.
  void read_latent(bool llama) {
    if (!llama) out_.problem("--multi-latent-attention", "gpt has no latent attention: take a llama (--swiglu)");
    const int64_t nope = number("qk-head-dim", 128), rope = number("qk-pos-emb-head-dim", 64), heads = out_.count("model.heads", 1);
    out_.set("model.kv_lora_rank", number("kv-lora-rank", 32));
    out_.set("model.q_lora_rank", number("q-lora-rank", 0, 0));
    out_.set("model.qk_nope_head_dim", nope);
    out_.set("model.qk_rope_head_dim", rope);
    out_.set("model.v_head_dim", number("v-head-dim", 128));
    out_.set("model.head_dim", nope + rope);
    out_.set("model.kv_heads", heads);  // --num-query-groups and --kv-channels have no part in it
    if (!has("qk-layernorm"))
      out_.problem("--multi-latent-attention", "compressed vectors are normalised here: add --qk-layernorm, which does so there");
    if (has("add-qkv-bias")) out_.problem("--add-qkv-bias", "latent attention has no biases here");
    if (const auto epsilon = parse_number(text("norm-epsilon", "1e-5")); epsilon && static_cast<float>(*epsilon) != 1e-6f)
      out_.differs("--norm-epsilon", "compressed vectors are normalised with it there, and with 1e-6 here");
    const std::string type = text("rope-type", "yarn"), factor = text("rotary-scaling-factor", "1.0");
    has("mscale"), has("mscale-all-dim");
    if (type == "yarn" && parse_number(factor).value_or(0) != 1)
      out_.differs("--rotary-scaling-factor",
                   fmt::format("YaRN scales frequencies and attention by {}; nothing is scaled here", factor));
  }

  /// The router and its experts. Source: megatron/core/transformer/moe/router.py and moe_utils.py (topk_routing_with_score_function,
  /// group_limited_topk, switch_load_balancing_loss_func); defaults from megatron/training/arguments.py, _add_moe_args.
  void read_experts(int64_t experts, int64_t layers, bool llama) {
    if (!llama) out_.problem("--num-experts", "experts are gated by SwiGLU here: add --swiglu");
    const int64_t chosen = number("moe-router-topk", 2);
    const int64_t width = number("moe-ffn-hidden-size", std::max<int64_t>(out_.count("model.ffn", 1), 1));
    out_.set("model.experts", experts);
    out_.set("model.top_k", chosen);
    out_.set("model.moe_ffn", width);
    read_mixture_layers(layers);
    read_scores(chosen);
    read_balance();
    if (const int64_t shared = number("moe-shared-expert-intermediate-size", 0, 0); shared > 0) {
      if (shared % width != 0)
        out_.problem(
            "--moe-shared-expert-intermediate-size",
            fmt::format("{} is no multiple of an expert's width {}: shared experts have whole widths here", shared, width));
      out_.set("model.shared_experts", shared / width);
      if (has("moe-shared-expert-gate")) out_.set("model.shared_gate", true);
    }
    if (has("moe-shared-expert-overlap"))
      out_.unread("--moe-shared-expert-overlap: the profile says what runs beside an exchange within a layer");
    read_capacity();
    refuse("moe-input-jitter-eps", "noise on the input of routers has no counterpart");
    refuse("moe-apply-probs-on-input", "weights multiply the outputs of experts here");
    refuse("moe-latent-size", "experts on narrower vectors have no counterpart");
    refuse("moe-extended-tp", "say it as --expert-tensor-parallel-size");
    refuse("moe-layer-recompute", "recompute of the layer of experts alone has no counterpart: recompute full, or core_attn");
    if (has("moe-router-force-load-balancing"))
      out_.differs("--moe-router-force-load-balancing", "predictions take even routes; in a run routers choose");
    for (const char* kernel :
         {"moe-grouped-gemm", "moe-use-legacy-grouped-gemm", "moe-permute-fusion", "moe-router-fusion", "moe-router-dtype",
          "moe-router-padding-for-fp8", "moe-enable-deepep", "moe-deepep-num-sms", "moe-per-layer-logging"})
      has(kernel);
  }

  void read_mixture_layers(int64_t layers) {
    const std::string said = text("moe-layer-freq", "1");
    std::optional<std::vector<int>> pattern = Pattern::of(said);
    const auto every = parse_count(said);
    constexpr int64_t kMostLayers = 16384;
    if (!pattern && every && *every >= 1 && layers <= kMostLayers) {
      pattern.emplace();
      for (int64_t i = 0; i < layers; ++i) pattern->push_back(i % *every == 0 ? 1 : 0);
    }
    if (!pattern)
      return out_.problem("--moe-layer-freq",
                          fmt::format("`{}` is neither a number nor a list of 0 and 1 as ([0]*3+[1]*58)", said));
    if (static_cast<int64_t>(pattern->size()) != layers)
      return out_.problem("--moe-layer-freq", fmt::format("{} layers are listed, of {}", pattern->size(), layers));
    const auto found = mixture_layers(*pattern);
    if (!found)
      return out_.problem("--moe-layer-freq",
                          every ? fmt::format("layers 1, {}, ... have experts there; of a case every moe_every-th layer has them: "
                                              "([0]*{}+[1])*{} has as many",
                                              *every + 1, *every - 1, layers / *every)
                                : std::string("a case has dense first layers, and then experts in every moe_every-th layer"));
    if (found->dense_layers > 0) out_.set("model.dense_layers", found->dense_layers);
    if (found->every > 1) out_.set("model.moe_every", found->every);
  }

  /// How the router scores experts, chooses `chosen` of them, and weighs them.
  void read_scores(int64_t chosen) {
    const std::string scores = text("moe-router-score-function", "softmax");
    if (scores != "softmax" && scores != "sigmoid")
      return out_.problem("--moe-router-score-function", fmt::format("`{}` has no counterpart: softmax or sigmoid", scores));
    const bool sigmoid = scores == "sigmoid", before = has("moe-router-pre-softmax");
    out_.set("model.router", scores);
    // A softmax of the chosen logits is the softmax of all, divided by the sum of the chosen. One sigmoid alone is not divided there.
    out_.set("model.normalise_weights", sigmoid ? chosen > 1 : !before);
    if (!sigmoid && !before && chosen == 1)
      out_.problem("--moe-router-topk",
                   "1 with a softmax of the chosen expert alone: Megatron-LM asks for --moe-router-pre-softmax");
    copy("moe-router-topk-scaling-factor", "model.router_factor");
    const std::string rate = text("moe-router-bias-update-rate", "1e-3");
    if (has("moe-router-enable-expert-bias")) {
      out_.set("model.bias_update_rate", rate);
      if (!sigmoid) out_.problem("--moe-router-enable-expert-bias", "Megatron-LM asks for --moe-router-score-function sigmoid");
    }
    const int64_t groups = number("moe-router-num-groups", 1), taken = number("moe-router-group-topk", 0, 0);
    if (taken == 0 || groups == 1) return;
    out_.set("model.router_groups", groups);
    out_.set("model.router_groups_chosen", taken);
    if (const int64_t summed = chosen / std::max<int64_t>(taken, 1); taken < groups && summed != (sigmoid ? 2 : 1))
      out_.differs("--moe-router-group-topk", fmt::format("the score of a group is the sum of its {} largest there, and {} here",
                                                          summed, sigmoid ? "of its 2 largest" : "its largest"));
  }

  /// The loss for even use of experts; the kinds of loss may be several, each with its coefficient.
  void read_balance() {
    copy("moe-z-loss-coeff", "model.z_loss");
    constexpr std::string_view kKinds[] = {"aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none"};
    std::vector<std::string> kinds{"aux_loss"}, coefficients{"0.0"};
    const auto read = [&](std::string_view option, std::vector<std::string>& values, const auto& is_value) {
      if (!has(option)) return;
      values = options_.find(option)->second;  // a script's name may follow the last option's words
      while (!values.empty() && !is_value(values.back())) values.pop_back();
      if (values.empty()) out_.problem(fmt::format("--{}", option), "has no value that is known here");
    };
    read("moe-router-load-balancing-type", kinds, [&](const std::string& w) { return std::ranges::count(kKinds, w) > 0; });
    read("moe-aux-loss-coeff", coefficients, [](const std::string& w) { return parse_number(w).has_value(); });
    if (std::ranges::count(kinds, "sinkhorn") > 0)
      return out_.problem("--moe-router-load-balancing-type", "sinkhorn has no counterpart: aux_loss, seq_aux_loss or none");
    if (kinds.size() > 1 && kinds.size() != coefficients.size())
      return out_.problem("--moe-aux-loss-coeff",
                          fmt::format("{} coefficients of {} kinds of loss", coefficients.size(), kinds.size()));
    std::string kind;
    for (size_t i = 0; i < kinds.size() && i < coefficients.size(); ++i) {
      if (kinds[i] == "none" || parse_number(coefficients[i]).value_or(0) == 0) continue;
      if (!kind.empty())
        return out_.problem("--moe-router-load-balancing-type", "one loss for even use of experts is said here, not several");
      kind = kinds[i];
      out_.set("model.balance_loss", coefficients[i]);
    }
    if (kind == "aux_loss" || kind == "global_aux_loss")
      out_.differs("--moe-router-load-balancing-type",
                   fmt::format("{} evens the experts out over {} there, and balance_loss over each sequence, as seq_aux_loss", kind,
                               kind == "aux_loss" ? "a micro-batch" : "the global batch"));
  }

  void read_capacity() {
    const std::string policy = text("moe-token-drop-policy", "probs");
    const bool pads = has("moe-pad-expert-input-to-capacity");
    const auto factor = parse_number(text("moe-expert-capacity-factor", "-1"));
    if (!factor) return out_.problem("--moe-expert-capacity-factor", "a number is expected");
    if (*factor < 0) return;  // no token is dropped
    out_.set("model.capacity_factor", text("moe-expert-capacity-factor"));
    out_.differs(
        "--moe-expert-capacity-factor",
        fmt::format("the tokens of a rank and micro-batch share an expert's room there and drop {}; here those of a sequence, and "
                    "the last ones are dropped",
                    policy == "probs" ? "the smallest weights" : "the last ones"));
    if (pads)
      out_.differs("--moe-pad-expert-input-to-capacity", "room that is left empty is sent and multiplied there, and not here");
  }

  void read_layout() {
    const int64_t tp = number("tensor-model-parallel-size", 1), pp = number("pipeline-model-parallel-size", 1),
                  cp = number("context-parallel-size", 1);
    out_.set("layout.tp", tp);
    out_.set("layout.pp", pp);
    out_.set("layout.cp", cp);
    read_context(cp);
    read_expert_layout(tp);
    if (has("sequence-parallel") && tp > 1) out_.set("layout.sequence_parallel", true);
    if (has("tp-comm-overlap") && tp > 1) out_.set("layout.tensor_overlap", true);
    if (pp > 1) out_.set("layout.schedule", "1f1b");
    int64_t vpp = number("num-virtual-stages-per-pipeline-rank", 1);
    if (has("num-layers-per-virtual-pipeline-stage")) {
      const int64_t each = number("num-layers-per-virtual-pipeline-stage", 1), layers = out_.count("model.layers", 0);
      if (layers == 0 || pp > kMost / std::max<int64_t>(each, 1) || layers % (pp * each) != 0)
        out_.problem("--num-layers-per-virtual-pipeline-stage", "the layers of a stage are not a multiple of it");
      else
        vpp = layers / (pp * each);
    }
    if (pp > 1 && vpp > 1) {
      out_.set("layout.schedule", "interleaved");
      out_.set("layout.vpp", vpp);
    }
    if (has("pipeline-model-parallel-layout")) {
      const auto layers = layers_of_layout(text("pipeline-model-parallel-layout"));
      if (layers)
        set_stage_layers(*layers, pp);
      else
        out_.problem("--pipeline-model-parallel-layout",
                     "only E, t, L, t*N and (...)*N are read, the embedding first and the loss last");
    }
    read_end_stages(pp, std::max<int64_t>(out_.count("layout.vpp", 1), 1));
    const int64_t per_node = number("nproc_per_node", number("nproc-per-node", 0, 0), 0), nodes = number("nnodes", 1);
    for (const char* launcher : {"node_rank", "master_addr", "master_port", "node-rank", "master-addr", "master-port"})
      has(launcher);
    const int64_t world = devices_ > 0 ? devices_ : std::min(per_node, kMost / std::max<int64_t>(nodes, 1)) * nodes;
    const int64_t model_ranks = tp < kMost / pp && tp * pp < kMost / cp ? tp * pp * cp : kMost;
    if (world % model_ranks != 0)
      out_.problem("--tensor-model-parallel-size",
                   fmt::format("{} devices are not a multiple of tp*pp*cp = {}", world, model_ranks));
    dp_ = world / model_ranks;

    int64_t zero = has("use-distributed-optimizer") ? 1 : 0;
    const std::string strategy = text("data-parallel-sharding-strategy", "no_shard");
    if (has("use-megatron-fsdp") || has("use-custom-fsdp"))
      zero = strategy == "optim_grads_params" ? 3 : strategy == "optim_grads" ? 2 : strategy == "optim" ? 1 : 0;
    if (has("use-torch-fsdp2")) zero = 3;
    out_.set("layout.zero", zero);
    if (has("torch-fsdp2-no-reshard-after-forward")) out_.set("layout.fsdp.reshard", false);
    if (const int64_t copies = number("num-distributed-optimizer-instances", 1); copies > 1) {
      if (dp_ == 0 || dp_ % copies != 0)
        out_.problem("--num-distributed-optimizer-instances", dp_ == 0 ? "the number of ranks is not known: name --devices"
                                                                       : fmt::format("{} does not divide dp = {}", copies, dp_));
      else
        out_.set("layout.hybrid_shard", dp_ / copies);
    }
    out_.set("layout.overlap", has("overlap-grad-reduce"));
    has("overlap-param-gather");
    if (has("ddp-bucket-size"))
      out_.set("layout.bucket_bytes", number("ddp-bucket-size", 1) * (has("grad-reduce-in-bf16") ? 2 : 4));
    read_recompute();
    if (has("optimizer-cpu-offload")) {
      if (parse_number(text("optimizer-offload-fraction", "1.0")).value_or(0) != 1)
        out_.problem("--optimizer-offload-fraction", "an optimizer is on the host as a whole, or not at all");
      out_.set("layout.offload", "{optimizer: cpu}");
    }
    has("use-precision-aware-optimizer"), has("ckpt-format"), has("optimizer-offload-fraction");
    refuse("cpu-offloading-num-layers", "activations of some layers on the host are not imported");
  }

  /// Ranks that share experts. Source: megatron/core/parallel_state.py, where expert groups have a mesh of their own;
  /// megatron/training/arguments.py: experts are cut by tp where nothing else is said.
  void read_expert_layout(int64_t tp) {
    const int64_t ep = number("expert-model-parallel-size", 1), slices = number("expert-tensor-parallel-size", tp);
    const std::string dispatcher = text("moe-token-dispatcher-type", "allgather");
    const bool mixture = number("num-experts", 0, 0) > 1;
    if (!mixture && ep > 1 && has("num-layers"))
      out_.problem("--expert-model-parallel-size", fmt::format("{} ranks share experts, and --num-experts says none", ep));
    if (!mixture && has("num-layers")) return;
    if (ep > 1) out_.set("layout.ep", ep);
    if (slices != tp) out_.set("layout.expert_tp", slices);
    if (ep > 1 && dispatcher == "allgather")
      out_.differs("--moe-token-dispatcher-type",
                   "allgather brings all tokens to all ranks; here rows go to their experts, as by alltoall");
    if (has("overlap-moe-expert-parallel-comm"))
      out_.unread("--overlap-moe-expert-parallel-comm: a case has no estimate of micro-batches beside each other's exchanges");
  }

  /// Layers of each part, but for the deal that a case has where nothing is said: as even as can be, the first parts with one more.
  void set_stage_layers(const std::vector<int64_t>& layers, int64_t pp) {
    const auto parts = static_cast<int64_t>(layers.size());
    if (pp > 1 && parts > pp && parts % pp == 0) {
      out_.set("layout.schedule", "interleaved");
      out_.set("layout.vpp", parts / pp);
    }
    int64_t total = 0, at = 0;
    for (const int64_t n : layers) total += n;
    const bool even = std::ranges::all_of(layers, [&](int64_t n) { return n == total / parts + (at++ < total % parts ? 1 : 0); });
    if (!even) out_.set("layout.stage_layers", fmt::format("{}", fmt::join(layers, ",")));
  }

  /// Stages at the ends with other numbers of layers than the others, which share the rest evenly.
  /// Source: megatron/core/transformer/transformer_block.py, get_num_layers_to_build.
  void read_end_stages(int64_t pp, int64_t vpp) {
    const int64_t first = number("decoder-first-pipeline-num-layers", 0), last = number("decoder-last-pipeline-num-layers", 0);
    const int64_t others = pp - (first > 0 ? 1 : 0) - (last > 0 ? 1 : 0), rest = out_.count("model.layers", 0) - first - last;
    if (pp == 1 || others == pp) return;
    if (pp > 16384 || vpp > 16384 / pp || first % vpp != 0 || last % vpp != 0 || rest < 0 ||
        (others == 0 ? rest != 0 : rest % (others * vpp) != 0))
      return out_.problem(first > 0 ? "--decoder-first-pipeline-num-layers" : "--decoder-last-pipeline-num-layers",
                          "the other stages do not share the other layers evenly");
    std::vector<int64_t> layers;
    for (int64_t part = 0; part < pp * vpp; ++part) {
      const int64_t stage = part % pp;
      layers.push_back((stage == 0 && first > 0       ? first
                        : stage == pp - 1 && last > 0 ? last
                                                      : rest / std::max<int64_t>(others, 1)) /
                       vpp);
    }
    set_stage_layers(layers, pp);
  }

  /// The exchange of context parallelism; what is not named is the framework's own, as in a case without cp_kind.
  void read_context(int64_t cp) {
    constexpr std::pair<std::string_view, const char*> kKinds[] = {
        {"p2p", "zigzag"}, {"all_gather", "all-gather"}, {"a2a", "ulysses"}, {"a2a+p2p", "usp"}};
    std::vector<std::string> types, sizes;  // a script's name may follow the last option's words
    if (has("cp-comm-type")) types = options_.at("cp-comm-type");
    if (has("hierarchical-context-parallel-sizes")) sizes = options_.at("hierarchical-context-parallel-sizes");
    if (types.empty() || cp == 1) return;
    const auto kind_of = [&](const std::string& word) {
      return std::ranges::find(kKinds, word, [](const auto& kind) { return kind.first; });
    };
    const auto* kind = kind_of(types[0]);
    if (kind == std::end(kKinds) || (types.size() > 1 && kind_of(types[1]) != std::end(kKinds)))
      return out_.problem("--cp-comm-type", "one kind for all layers is read: p2p, all_gather, a2a or a2a+p2p");
    out_.set("layout.cp_kind", kind->second);
    if (kind->first != "a2a+p2p") return;
    const auto heads = sizes.size() >= 2 ? parse_count(sizes[0]) : std::nullopt;
    if (!heads)
      return out_.problem("--hierarchical-context-parallel-sizes",
                          "two sizes are read: ranks that exchange heads, and ranks of the ring");
    out_.set("layout.cp_ulysses", *heads);
  }

  void read_recompute() {
    const std::string granularity = text("recompute-granularity", has("recompute-activations") ? "selective" : "none"),
                      method = text("recompute-method");
    const int64_t layers = number("recompute-num-layers", 1);
    if (granularity == "full" && method == "uniform" && layers == 1)
      out_.set("layout.recompute", "full");
    else if (granularity == "full")
      out_.problem("--recompute-method", "of full recompute only --recompute-method uniform --recompute-num-layers 1 is read");
    else if (granularity == "selective")
      out_.set("layout.recompute", "selective");
    has("recompute-modules");
    const auto modules = options_.find("recompute-modules");
    if (modules == options_.end() || granularity != "selective") return;
    bool core = false, activation = false;
    for (const std::string& module : modules->second) {
      core |= module == "core_attn", activation |= module == "moe_act";
      const bool known = module == "layernorm" || module == "mla_up_proj" || module == "mlp" || module == "moe" ||
                         module == "shared_experts" || module.starts_with("-");
      if (known) out_.problem("--recompute-modules", fmt::format("{} has no counterpart: core_attn or moe_act", module));
    }
    if (!core && !activation) return out_.problem("--recompute-modules", "only core_attn and moe_act are read");
    if (activation && out_.get("model.dense_layers"))
      out_.differs("--recompute-modules", "moe_act recomputes the activations of experts alone; here those of dense layers too");
    if (activation) out_.set("layout.recompute", core ? "[attn.core, mlp.act]" : "[mlp.act]");
  }

  void read_training() {
    copy("seq-length", "train.seq_len");
    out_.set("train.micro_batch", number("micro-batch-size", 1));
    const int64_t sequences = number("global-batch-size", 0);
    const bool fp8 = has("fp8-format");
    out_.set("train.precision", fp8 ? "fp8" : has("bf16") ? "bf16" : has("fp16") ? "fp16" : "fp32");
    has("bf16"), has("accumulate-allreduce-grads-in-fp32");
    const std::string recipe = text("fp8-recipe", "delayed");
    if (fp8) {
      if (recipe == "mxfp8") out_.problem("--fp8-recipe", "mxfp8 has no counterpart: tensorwise, delayed or blockwise");
      out_.set("train.fp8_scaling", recipe == "tensorwise" ? "current" : recipe == "blockwise" ? "block" : "delayed");
    }
    if (has("grad-reduce-in-bf16")) out_.set("train.reduce_dtype", "bf16"), out_.set("train.accumulate_dtype", "bf16");
    copy("loss-scale", "train.loss_scale");
    copy("initial-loss-scale", "train.loss_scale_start");
    copy("loss-scale-window", "train.loss_scale_interval");
    const std::string optimizer = text("optimizer", "adam");
    if (optimizer == "sgd" && parse_number(text("sgd-momentum", "0.9")).value_or(1) != 0)
      out_.problem("--sgd-momentum", "sgd has no momentum here: set 0.0");
    if (optimizer != "adam" && optimizer != "sgd")
      out_.problem("--optimizer", fmt::format("`{}` has no counterpart: adam or sgd", optimizer));
    out_.set("train.optimizer", optimizer == "sgd" ? "sgd" : "adamw");
    copy("adam-beta1", "train.beta1");
    copy("adam-beta2", "train.beta2");
    copy("adam-eps", "train.epsilon");
    copy("weight-decay", "train.weight_decay");
    copy("clip-grad", "train.clip_norm");
    if (!has("clip-grad")) out_.set("train.clip_norm", "1");  // Megatron-LM's default
    copy("seed", "train.seed");
    const std::string attention = text("attention-dropout", "0.1"), hidden = text("hidden-dropout", "0.1");
    if (attention != hidden)
      out_.problem("--attention-dropout",
                   fmt::format("{} and --hidden-dropout {}: one probability is said here", attention, hidden));
    out_.set("train.dropout", hidden);
    read_rate();
    for (const char* neutral : {"no-check-for-nan-in-loss-and-grad", "mock-data", "no-gradient-accumulation-fusion"}) has(neutral);
    set_batch(out_, "--global-batch-size", sequences, dp_, 0);
  }

  void read_rate() {
    copy("lr", "train.learning_rate.peak");
    copy("lr-warmup-iters", "train.learning_rate.warmup_steps");
    const std::string style = text("lr-decay-style", "linear");
    const int64_t steps = number("lr-decay-iters", number("train-iters", 0, 0), 0);
    has("train-iters");
    if (style == "constant" || (style == "linear" && !has("lr"))) {
      has("min-lr"), has("lr-decay-iters");
      return;
    }
    if (style != "cosine" && style != "linear" && style != "WSD")
      return out_.problem("--lr-decay-style", fmt::format("`{}` has no counterpart", style));
    out_.set("train.learning_rate.kind", style == "WSD" ? std::string("wsd") : style);
    out_.set("train.learning_rate.total_steps", steps);
    copy("min-lr", "train.learning_rate.floor");
    if (style == "WSD") {
      if (text("lr-wsd-decay-style", "exponential") != "linear")
        out_.problem("--lr-wsd-decay-style", "only a linear decay is read");
      copy("lr-wsd-decay-iters", "train.learning_rate.decay_steps");
    }
  }

  Options options_;
  int64_t devices_ = 0, dp_ = 0;
  std::set<std::string, std::less<>> read_;
  Settings out_;
};

}  // namespace

Result<Imported> import_megatron(std::string_view text, const std::string& name, int64_t devices) {
  return Megatron(text, devices).read(name);
}

}  // namespace shardlab::interop
