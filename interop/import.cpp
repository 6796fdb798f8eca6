// Files of frameworks read as settings of a case.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>

#include "interop/frameworks.h"
#include "interop/toml.h"
#include "interop/torchtitan.h"
#include "plan/base/json_depth.h"
#include "plan/base/json_fault.h"
#include "plan/base/limits.h"
#include "plan/base/nearest.h"
#include "plan/base/values.h"

namespace shardlab::interop {

namespace {

/// A file of settings longer than this is none: the longest that ship with the frameworks have 20 KiB.
constexpr size_t kFileBytes = size_t{1} << 20;
/// A word of a script with its variables filled in: longer ones are left as they are.
constexpr size_t kWordBytes = 4096;
/// Sizes beyond this are slips, and would overflow where they are multiplied.
constexpr int64_t kMost = int64_t{1} << 40;

/// What becomes of the keys of one file.
class Settings {
 public:
  void set(std::string_view path, std::string value) {
    const auto found = std::ranges::find(out_.settings, path, [](const auto& s) { return std::string_view(s.first); });
    if (found != out_.settings.end())
      found->second = std::move(value);
    else
      out_.settings.emplace_back(path, std::move(value));
  }
  void set(std::string_view path, int64_t value) { set(path, fmt::to_string(value)); }
  void set(std::string_view path, const char* value) { set(path, std::string(value)); }
  void set(std::string_view path, bool value) { set(path, std::string(value ? "true" : "false")); }
  std::optional<std::string> get(std::string_view path) const {
    const auto found = std::ranges::find(out_.settings, path, [](const auto& s) { return std::string_view(s.first); });
    return found == out_.settings.end() ? std::nullopt : std::optional(found->second);
  }
  int64_t count(std::string_view path, int64_t otherwise) const {
    const auto text = get(path);
    return text ? parse_count(*text).value_or(otherwise) : otherwise;
  }
  void problem(std::string_view key, std::string why) {
    std::string text = fmt::format("{}: {}", key, why);
    if (std::ranges::find(problems_, text) == problems_.end()) problems_.push_back(std::move(text));  // a setting may be read twice
  }
  void unread(std::string text) { out_.unread.push_back(std::move(text)); }
  Result<Imported> finish(const std::string& name, std::string_view framework) {
    out_.profile = std::string(framework);
    if (problems_.empty()) return std::move(out_);
    if (problems_.size() > limits::kProblems) problems_.resize(limits::kProblems);
    const bool one = problems_.size() == 1;
    return Error{ExitCode::kUsage,
                 fmt::format("{} {} wrong, missing or not supported:\n    {}", problems_.size(),
                             one ? "setting is" : "settings are", fmt::join(problems_, "\n    ")),
                 one ? "correct or add it; a wrong one that does not matter to you may be removed from a copy of the file"
                     : "correct or add them; wrong ones that do not matter to you may be removed from a copy of the file",
                 name};
  }

 private:
  Imported out_;
  std::vector<std::string> problems_;
};

/// A whole number that is not below `least` and no slip; otherwise a problem and `least`.
int64_t whole(Settings& out, std::string_view key, const std::string& text, int64_t least = 0) {
  const auto n = parse_count(text);
  if (n && *n >= least && *n <= kMost) return *n;
  out.problem(key, n && *n > kMost ? fmt::format("{} is beyond 2^40", text)
                                   : fmt::format("`{}` is not a whole number of {} or more", text, least));
  return least;
}

/// A product that stays a number: beyond `kMost` it is kMost + 1.
int64_t product(int64_t a, int64_t b) { return a <= kMost / std::max<int64_t>(b, 1) ? a * b : kMost + 1; }

/// Batch, ranks and accumulation: what two of them say of the third. `sequences` of a step over all ranks, which `key` says; 0: not
/// said.
void set_batch(Settings& out, std::string_view key, int64_t sequences, int64_t dp, int64_t accumulation) {
  const int64_t micro_batch = std::max<int64_t>(out.count("train.micro_batch", 1), 1), seq_len = out.count("train.seq_len", 0);
  if (dp == 0 && sequences > 0 && accumulation > 0 && sequences % product(micro_batch, accumulation) == 0)
    dp = sequences / product(micro_batch, accumulation);
  if (dp > 0) out.set("layout.dp", dp);
  const int64_t together = product(micro_batch, std::max<int64_t>(dp, 1));
  if (sequences == 0 && dp > 0 && accumulation > 0 && product(together, accumulation) <= kMost) sequences = together * accumulation;
  if (dp > 0 && sequences > 0) {
    if (sequences % together != 0)
      return out.problem(key, fmt::format("{} is not a multiple of micro-batch {} * {} data-parallel ranks = {}", sequences,
                                          micro_batch, dp, together));
    accumulation = sequences / together;
  }
  if (accumulation > 0) out.set("train.grad_accumulation", accumulation);
  if (sequences > 0 && seq_len > 0 && product(sequences, seq_len) <= kMost)
    out.set("train.global_batch_tokens", sequences * seq_len);
}

// ---- Megatron-LM ------------------------------------------------------------------------------------------------------------

/// Words of a shell script as far as arguments need it: quotes, continued lines, comments, `NAME=value` and `$NAME`.
std::vector<std::string> shell_words(std::string_view text) {
  std::vector<std::string> words;
  std::map<std::string, std::string> variables;
  std::string word;
  bool in_word = false;
  char quote = 0;
  const auto value_of = [&](const std::string& w) {  // one pass: a value that names another variable stays as it is
    std::string out;
    for (size_t i = 0; i < w.size(); ++i) {
      if (w[i] != '$') {
        out += w[i];
        continue;
      }
      const bool braces = i + 1 < w.size() && w[i + 1] == '{';
      size_t end = i + (braces ? 2 : 1);
      const size_t begin = end;
      while (end < w.size() && (std::isalnum(static_cast<unsigned char>(w[end])) || w[end] == '_')) ++end;
      const auto found = variables.find(w.substr(begin, end - begin));
      const bool closed = !braces || (end < w.size() && w[end] == '}');
      if (found == variables.end() || !closed) {
        out += w[i];
        continue;
      }
      out += found->second;
      i = end - (braces ? 0 : 1);
      if (out.size() > kWordBytes) return w;  // values that name each other grow without end
    }
    return out;
  };
  const auto end_word = [&] {
    if (!in_word) return;
    in_word = false;
    while (word.starts_with('(')) word.erase(0, 1);
    while (word.ends_with(')') && word.find('(') == std::string::npos) word.pop_back();
    const size_t equals = word.find('=');
    const bool assigns = equals != std::string::npos && equals > 0 && std::ranges::all_of(word.substr(0, equals), [](char c) {
                           return std::isalnum(static_cast<unsigned char>(c)) || c == '_';
                         });
    if (assigns)
      variables.insert_or_assign(word.substr(0, equals), value_of(word.substr(equals + 1)));
    else if (!word.empty())
      words.push_back(value_of(word));
    word.clear();
  };
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (quote != 0) {
      if (c == quote)
        quote = 0;
      else
        word += c;
    } else if (c == '\'' || c == '"') {
      quote = c;
      in_word = true;
    } else if (c == '\\' && i + 1 < text.size() && (text[i + 1] == '\n' || text[i + 1] == '\r')) {
      end_word();
      ++i;
    } else if (c == '#' && !in_word) {
      while (i < text.size() && text[i] != '\n') ++i;
    } else if (c == ' ' || c == '\t' || c == '\n' || c == '\r' || c == ';') {
      end_word();
    } else {
      word += c;
      in_word = true;
    }
  }
  end_word();
  return words;
}

using Options = std::map<std::string, std::vector<std::string>, std::less<>>;

Options options_of(const std::vector<std::string>& words) {
  Options options;
  for (size_t i = 0; i < words.size(); ++i) {
    if (!words[i].starts_with("--") || words[i].size() == 2) continue;
    std::string name = words[i].substr(2);
    std::vector<std::string> values;
    if (const size_t equals = name.find('='); equals != std::string::npos) {
      values.push_back(name.substr(equals + 1));
      name.resize(equals);
    } else {
      while (i + 1 < words.size() && !words[i + 1].starts_with("--")) values.push_back(words[++i]);
    }
    options.insert_or_assign(std::move(name), std::move(values));  // the last one counts, as argparse has it
  }
  return options;
}

/// "Ettt|tttt|tL" as "3,4,1"; nothing where there is more in it.
std::optional<std::string> layers_of_layout(std::string_view text) {
  std::vector<int64_t> layers{0};
  bool head = false;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] == ',') continue;
    if (text[i] == '|') {
      layers.push_back(0);
    } else if (text[i] == 'E') {
      if (layers.size() != 1 || layers[0] != 0) return std::nullopt;
    } else if (text[i] == 'L') {
      head = true;
      if (text.find('|', i) != std::string_view::npos) return std::nullopt;
    } else if (text[i] == 't') {
      int64_t times = 1;
      if (i + 1 < text.size() && text[i + 1] == '*') {
        size_t end = i + 2;
        while (end < text.size() && text[end] >= '0' && text[end] <= '9') ++end;
        const auto n = parse_count(text.substr(i + 2, end - i - 2));
        if (!n || *n < 1 || *n > 16384) return std::nullopt;
        times = *n;
        i = end - 1;
      }
      layers.back() += times;
    } else {
      return std::nullopt;
    }
  }
  if (!head || layers.size() > 16384) return std::nullopt;
  return fmt::format("{}", fmt::join(layers, ","));
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
    refuse("num-experts", "mixtures of experts are not imported");
    refuse("multi-latent-attention", "latent attention is not imported");
    refuse("mtp-num-layers", "layers that predict further tokens are not imported");
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
    if (has("qk-layernorm")) {
      if (llama)
        out_.set("model.qk_norm", true);
      else
        out_.problem("--qk-layernorm", "gpt has no norms over heads of q and k: remove it, or take a llama (--swiglu)");
    }
  }

  void read_layout() {
    const int64_t tp = number("tensor-model-parallel-size", 1), pp = number("pipeline-model-parallel-size", 1),
                  cp = number("context-parallel-size", 1);
    out_.set("layout.tp", tp);
    out_.set("layout.pp", pp);
    out_.set("layout.cp", cp);
    read_context(cp);
    if (number("expert-model-parallel-size", 1) > 1)
      out_.problem("--expert-model-parallel-size", "mixtures of experts are not imported");
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
        out_.set("layout.stage_layers", *layers);
      else
        out_.problem("--pipeline-model-parallel-layout",
                     "only E, t, t*N and L in one run of stages are read, the embedding first and the loss last");
    }
    refuse("decoder-first-pipeline-num-layers", "say it as --pipeline-model-parallel-layout");
    refuse("decoder-last-pipeline-num-layers", "say it as --pipeline-model-parallel-layout");
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
    if (const auto modules = options_.find("recompute-modules");
        modules != options_.end() && modules->second != std::vector<std::string>{"core_attn"})
      out_.problem("--recompute-modules", "only core_attn is read");
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

// ---- DeepSpeed --------------------------------------------------------------------------------------------------------------

using Tree = nlohmann::json;

/// A value as text: numbers as they are written, strings without quotes.
std::string json_text(const Tree& value) { return value.is_string() ? value.get<std::string>() : value.dump(); }

class DeepSpeed {
 public:
  DeepSpeed(const Tree& root, int64_t devices) : root_(root), devices_(devices) {}

  Result<Imported> read(const std::string& name) {
    read_precision();
    read_zero();
    const int64_t tp = integer("tensor_parallel.autotp_size", 1);
    out_.set("layout.tp", tp);
    read_optimizer();
    copy("gradient_clipping", "train.clip_norm");
    if (devices_ % std::max<int64_t>(tp, 1) != 0)
      out_.problem("tensor_parallel.autotp_size", fmt::format("{} does not divide {} devices", tp, devices_));
    read_batch(devices_ / std::max<int64_t>(tp, 1));
    note_unread(root_, "");
    return out_.finish(name, "deepspeed");
  }

 private:
  /// The value at a path with dots, or null; "auto", which transformers fills in, counts as not there.
  const Tree* find(const std::string& path) {
    read_.insert(path);
    const Tree* at = &root_;
    for (size_t begin = 0; begin <= path.size();) {
      const size_t dot = std::min(path.find('.', begin), path.size());
      if (!at->is_object()) return nullptr;
      const auto found = at->find(path.substr(begin, dot - begin));
      if (found == at->end()) return nullptr;
      at = &*found;
      begin = dot + 1;
    }
    if (at->is_null()) return nullptr;
    if (at->is_string() && at->get_ref<const std::string&>() == "auto") {
      out_.unread(fmt::format("{}: auto, which the training script fills in", path));
      return nullptr;
    }
    return at;
  }
  int64_t integer(const std::string& path, int64_t otherwise) {
    const Tree* value = find(path);
    if (value == nullptr) return otherwise;
    if (value->is_number_float() && std::abs(value->get<double>()) < 1e15 &&
        value->get<double>() == std::floor(value->get<double>()))
      return whole(out_, path, fmt::to_string(static_cast<int64_t>(value->get<double>())));  // 5e8
    return whole(out_, path, json_text(*value));
  }
  bool flag(const std::string& path, bool otherwise) {
    const Tree* value = find(path);
    if (value == nullptr) return otherwise;
    if (!value->is_boolean()) out_.problem(path, fmt::format("`{}` is neither true nor false", json_text(*value)));
    return value->is_boolean() && value->get<bool>();
  }
  void copy(const std::string& path, std::string_view to) {
    if (const Tree* value = find(path)) {
      if (value->is_number())
        out_.set(to, value->dump());
      else
        out_.problem(path, fmt::format("`{}` is not a number", json_text(*value)));
    }
  }

  /// train_batch_size = train_micro_batch_size_per_gpu * gradient_accumulation_steps * dp, as DeepSpeed has it
  /// (`_set_batch_related_parameters` of runtime/config.py): what is not said follows from the others. `dp` 0: not known.
  void read_batch(int64_t dp) {
    const std::string all = "train_batch_size", each = "train_micro_batch_size_per_gpu", times = "gradient_accumulation_steps";
    const int64_t sequences = integer(all, 0), said_micro = integer(each, 0), said_times = integer(times, 0);
    const int64_t ranks = std::max<int64_t>(dp, 1);
    int64_t micro_batch = said_micro, accumulation = said_times;
    if (accumulation == 0 && (sequences == 0 || micro_batch == 0)) accumulation = 1;
    if (micro_batch == 0) micro_batch = sequences > 0 && dp > 0 ? sequences / product(ranks, accumulation) : 1;
    if (accumulation == 0 && dp > 0) accumulation = sequences / product(micro_batch, ranks);
    // Without the number of ranks, it is what the others leave.
    const int64_t together = product(product(micro_batch, accumulation), ranks);
    const bool fits = sequences == 0 || (dp > 0 ? together == sequences : together == 0 || sequences % together == 0);
    if (!fits) {
      std::string factors;
      int64_t least = 1;
      const auto add = [&](int64_t n, const std::string& what) {
        factors += fmt::format("{}{}", factors.empty() ? "" : " * ", what);
        least = product(least, n);
      };
      if (said_micro > 0) add(said_micro, fmt::format("{} {}", each, said_micro));
      if (said_times > 0) add(said_times, fmt::format("{} {}", times, said_times));
      if (dp > 0) add(dp, fmt::format("{} data-parallel {}", dp, dp == 1 ? "rank" : "ranks"));
      return out_.problem(all, fmt::format("{} is not {}{} = {}", sequences,
                                           said_micro > 0 && said_times > 0 && dp > 0 ? "" : "a multiple of ", factors, least));
    }
    out_.set("train.micro_batch", micro_batch);
    set_batch(out_, all, sequences, dp, accumulation);
  }

  void read_precision() {
    const bool bf16 = flag("bf16.enabled", false) || flag("bfloat16.enabled", false), fp16 = flag("fp16.enabled", false);
    out_.set("train.precision", bf16 ? "bf16" : fp16 ? "fp16" : "fp32");
    if (fp16) {
      copy("fp16.loss_scale", "train.loss_scale");
      if (const auto scale = out_.get("train.loss_scale"); scale && parse_number(*scale) == 0.0)
        out_.set("train.loss_scale", "dynamic");
      const int64_t power = integer("fp16.initial_scale_power", 16);
      if (power > 24) out_.problem("fp16.initial_scale_power", "a scale begins at 2^24 at most");
      out_.set("train.loss_scale_start", int64_t{1} << std::clamp<int64_t>(power, 0, 24));
      out_.set("train.loss_scale_interval", integer("fp16.loss_scale_window", 1000));
    } else {
      for (const char* unused : {"fp16.loss_scale", "fp16.initial_scale_power", "fp16.loss_scale_window"}) read_.insert(unused);
    }
    for (const auto& [path, to] :
         {std::pair{"communication_data_type", "train.reduce_dtype"}, {"data_types.grad_accum_dtype", "train.accumulate_dtype"}})
      if (const Tree* type = find(path)) {
        const std::string word = json_text(*type);
        if (word != "fp32" && word != "bf16" && word != "fp16")
          out_.problem(path, fmt::format("`{}` is none of fp32, bf16, fp16", word));
        else
          out_.set(to, word);
      }
  }

  void read_zero() {
    const int64_t stage = integer("zero_optimization.stage", 0);
    if (stage > 3) out_.problem("zero_optimization.stage", fmt::format("{} is not a stage: 0, 1, 2 or 3", stage));
    out_.set("layout.zero", stage);
    const std::string z = "zero_optimization.";
    if (stage == 0) return;
    out_.set("layout.overlap", flag(z + "overlap_comm", stage == 3));
    if (const int64_t elements = integer(z + "reduce_bucket_size", 0); elements > 0)
      out_.set(
          "layout.bucket_bytes",
          elements * (out_.get("train.reduce_dtype").value_or("fp32") == "fp32" && out_.get("train.precision") == "fp32" ? 4 : 2));
    std::string offload;
    for (const auto& [section, part] : {std::pair{"offload_optimizer", "optimizer"}, {"offload_param", "parameters"}})
      if (const Tree* device = find(z + section + ".device"); device != nullptr && json_text(*device) != "none") {
        const std::string word = json_text(*device);
        if (word != "cpu" && word != "nvme") {
          out_.problem(z + section + ".device", fmt::format("`{}` is none of none, cpu, nvme", word));
          continue;
        }
        offload += fmt::format("{}{}: {}", offload.empty() ? "" : ", ", part, word);
      }
    if (const Tree* ratio = find(z + "offload_optimizer.ratio");
        ratio != nullptr && json_text(*ratio) != "1.0" && json_text(*ratio) != "1")
      out_.problem(z + "offload_optimizer.ratio", "an optimizer is on the host as a whole, or not at all");
    if (!offload.empty()) out_.set("layout.offload", "{" + offload + "}");
    if (flag(z + "zero_quantized_weights", false)) out_.set("layout.zero_plus_plus.weights", true);
    if (flag(z + "zero_quantized_gradients", false)) out_.set("layout.zero_plus_plus.gradients", true);
    if (const int64_t ranks = integer(z + "zero_hpz_partition_size", 1); ranks > 1)
      out_.set("layout.zero_plus_plus.secondary", ranks);
    if (const Tree* mics = find(z + "mics_shard_size"); mics != nullptr && mics->is_number_integer() && mics->get<int64_t>() > 0)
      out_.set("layout.hybrid_shard", whole(out_, z + "mics_shard_size", mics->dump()));
    for (const char* layout :
         {"contiguous_gradients", "reduce_scatter", "offload_optimizer.pin_memory", "offload_param.pin_memory",
          "offload_optimizer.nvme_path", "offload_param.nvme_path", "allgather_partitions", "allgather_bucket_size"})
      read_.insert(z + layout);  // how DeepSpeed lays its buffers out
    if (stage == 3) out_.unread(z + "stage3_*: how far ahead parameters are gathered is DeepSpeed's own choice");
  }

  void read_optimizer() {
    const Tree* type = find("optimizer.type");
    if (type == nullptr) return;
    std::string word = json_text(*type);
    std::ranges::transform(word, word.begin(), [](unsigned char c) { return std::tolower(c); });
    const std::string p = "optimizer.params.";
    if (word == "onebitadam") {
      out_.set("layout.compression.kind", "one-bit-adam");
      out_.set("layout.compression.warmup", integer(p + "freeze_step", 100000));
    } else if (word != "adam" && word != "adamw" && word != "sgd" && word != "lion") {
      return out_.problem("optimizer.type",
                          fmt::format("`{}` has no counterpart: AdamW, OneBitAdam, SGD or Lion", json_text(*type)));
    }
    if (word == "adam" && !flag(p + "adam_w_mode", true))
      out_.problem(p + "adam_w_mode", "Adam without decoupled weight decay has no counterpart");
    out_.set("train.optimizer", word == "sgd" || word == "lion" ? word : "adamw");
    copy(p + "lr", "train.learning_rate.peak");
    copy(p + "weight_decay", "train.weight_decay");
    if (word != "sgd" && word != "lion") copy(p + "eps", "train.epsilon");
    if (word == "sgd" && find(p + "momentum") != nullptr && json_text(*find(p + "momentum")) != "0")
      out_.problem(p + "momentum", "sgd has no momentum here");
    if (const Tree* betas = find(p + "betas"); betas != nullptr) {
      if (betas->is_array() && betas->size() == 2 && (*betas)[0].is_number() && (*betas)[1].is_number()) {
        out_.set("train.beta1", (*betas)[0].dump());
        out_.set("train.beta2", (*betas)[1].dump());
      } else {
        out_.problem(p + "betas", "two numbers are expected");
      }
    }
    read_scheduler();
  }

  void read_scheduler() {
    const Tree* type = find("scheduler.type");
    if (type == nullptr) return;
    const std::string word = json_text(*type), p = "scheduler.params.";
    if (word != "WarmupLR" && word != "WarmupDecayLR" && word != "WarmupCosineLR")
      return out_.problem("scheduler.type", fmt::format("`{}` has no counterpart", word));
    if (const Tree* kind = find(p + "warmup_type");
        (kind == nullptr || json_text(*kind) != "linear") && integer(p + "warmup_num_steps", 1000) > 1)
      out_.problem(p + "warmup_type", "the rate rises in a line here: set \"linear\"");
    out_.set("train.learning_rate.warmup_steps", integer(p + "warmup_num_steps", 1000));
    if (word != "WarmupCosineLR") copy(p + "warmup_max_lr", "train.learning_rate.peak");
    for (const char* low : {"warmup_min_lr", "warmup_min_ratio"})
      if (const Tree* least = find(p + low); least != nullptr && (!least->is_number() || least->get<double>() != 0))
        out_.problem(p + low, "the rate rises from 0 here");
    if (word == "WarmupLR") return;
    out_.set("train.learning_rate.kind", word == "WarmupCosineLR" ? "cosine" : "linear");
    out_.set("train.learning_rate.total_steps", integer(p + "total_num_steps", 0));
    if (word != "WarmupCosineLR") return;
    const Tree* ratio = find(p + "cos_min_ratio");
    const double share = ratio == nullptr ? 0.0001 : ratio->is_number() ? ratio->get<double>() : -1;
    if (!(share >= 0 && share <= 1)) return out_.problem(p + "cos_min_ratio", "a share of the rate is expected");
    if (const auto peak = parse_number(out_.get("train.learning_rate.peak").value_or("0.001")))
      out_.set("train.learning_rate.floor", to_text(static_cast<float>(*peak * share)));
  }

  /// Names every key that nothing above asked for.
  void note_unread(const Tree& at, const std::string& prefix) {
    for (const auto& [key, value] : at.items()) {
      const std::string path = prefix + key;
      if (value.is_object() && !value.empty())
        note_unread(value, path + ".");
      else if (!read_.contains(path))
        out_.unread(path);
    }
  }

  const Tree& root_;
  int64_t devices_ = 0;
  std::set<std::string> read_;
  Settings out_;
};

Result<Imported> import_deepspeed(std::string_view text, const std::string& name, int64_t devices) {
  const bool deep = json_depth(text) > limits::kJsonDepth;
  const Tree root =
      deep ? Tree(Tree::value_t::discarded) : Tree::parse(text, nullptr, /*allow_exceptions=*/false, /*ignore_comments=*/true);
  if (root.is_object()) return DeepSpeed(root, devices).read(name);
  const JsonFault fault = deep ? JsonFault{"", fmt::format("nested more than {} levels deep", limits::kJsonDepth)}
                               : json_fault(text, /*ignore_comments=*/true);
  return Error{ExitCode::kUsage, fault.message, "a JSON object, {...}, is expected: a configuration of DeepSpeed (ds_config.json)",
               name + fault.place};
}

// ---- torchtitan -------------------------------------------------------------------------------------------------------------

class Titan {
 public:
  Titan(std::vector<TomlEntry> entries, int64_t devices) : devices_(devices) {
    for (TomlEntry& entry : entries) entries_.insert_or_assign(entry.path, std::move(entry.value));
  }

  Result<Imported> read(const std::string& name) {
    read_model();
    read_layout();
    read_training();
    for (const auto& [path, value] : entries_)
      if (!read_.contains(path)) out_.unread(path);
    return out_.finish(name, "torchtitan");
  }

 private:
  const TomlValue* find(std::string_view path) {
    read_.emplace(path);
    const auto found = entries_.find(path);
    return found == entries_.end() ? nullptr : &found->second;
  }
  std::string text(std::string_view path, std::string_view otherwise) {
    const TomlValue* value = find(path);
    if (value == nullptr) return std::string(otherwise);
    if (const auto* word = std::get_if<std::string>(&value->value)) return *word;
    if (const auto* number = std::get_if<int64_t>(&value->value)) return fmt::to_string(*number);
    if (const auto* real = std::get_if<double>(&value->value)) return to_text(*real);
    if (const auto* truth = std::get_if<bool>(&value->value)) return *truth ? "true" : "false";
    out_.problem(path, "a single value is expected");
    return std::string(otherwise);
  }
  int64_t integer(std::string_view path, int64_t otherwise, int64_t least = 0) {
    const std::string value = text(path, "");
    return value.empty() ? otherwise : whole(out_, path, value, least);
  }
  void copy(std::string_view path, std::string_view to) {
    if (find(path) != nullptr) out_.set(to, text(path, ""));
  }

  void read_model() {
    const std::string model = text("model.name", "llama3"), flavour = text("model.flavor", "debugmodel");
    const auto found = std::ranges::find(titan_flavours(), flavour, &Flavour::name);
    if (model != "llama3" || found == titan_flavours().end())
      return out_.problem("model.flavor",
                          fmt::format("`{}` of `{}` is not known here: debugmodel, 8B, 70B or 405B of llama3", flavour, model));
    out_.set("model.family", "llama");
    for (const auto& [path, value] : {std::pair{"model.layers", found->layers},
                                      {"model.hidden", found->hidden},
                                      {"model.heads", found->heads},
                                      {"model.kv_heads", found->kv_heads},
                                      {"model.head_dim", found->hidden / found->heads},
                                      {"model.ffn", found->ffn},
                                      {"model.vocab", found->vocab}})
      out_.set(path, value);
    out_.set("model.rope_theta", to_text(kTitanTheta));
    out_.set("model.norm_epsilon", to_text(kTitanEpsilon));
    out_.set("model.tied_embeddings", false);
    has_fp8_ = false;
    if (const TomlValue* converters = find("model.converters"))
      if (const auto* list = std::get_if<TomlValue::List>(&converters->value))
        for (const TomlValue& item : *list) {
          const auto* word = std::get_if<std::string>(&item.value);
          if (word != nullptr && (*word == "float8" || *word == "quantize.linear.float8"))
            has_fp8_ = true;
          else
            out_.problem("model.converters", fmt::format("`{}` has no counterpart", word != nullptr ? *word : "?"));
        }
  }

  void read_layout() {
    const std::string p = "parallelism.";
    const int64_t tp = integer(p + "tensor_parallel_degree", 1, 1), pp = integer(p + "pipeline_parallel_degree", 1, 1),
                  cp = integer(p + "context_parallel_degree", 1, 1);
    out_.set("layout.tp", tp);
    out_.set("layout.pp", pp);
    out_.set("layout.cp", cp);
    if (tp > 1) out_.set("layout.sequence_parallel", true);
    if (text(p + "enable_async_tensor_parallel", "false") == "true" && tp > 1) out_.set("layout.tensor_overlap", true);
    if (integer(p + "expert_parallel_degree", 1) > 1)
      out_.problem(p + "expert_parallel_degree", "mixtures of experts are not imported");
    const int64_t copies = integer(p + "data_parallel_replicate_degree", 1, 1);
    const std::string shards_text = text(p + "data_parallel_shard_degree", "-1");
    int64_t shards = 0;
    if (shards_text == "-1") {
      const int64_t others =
          tp < kMost / pp && tp * pp < kMost / cp && tp * pp * cp < kMost / copies ? tp * pp * cp * copies : kMost;
      if (devices_ == 0 || devices_ % others != 0)
        out_.problem(p + "data_parallel_shard_degree", devices_ == 0
                                                           ? "-1 is what the devices leave: name --devices"
                                                           : fmt::format("{} devices are not a multiple of {}", devices_, others));
      else
        shards = devices_ / others;
    } else {
      shards = whole(out_, p + "data_parallel_shard_degree", shards_text, 1);
    }
    dp_ = shards < kMost / copies ? copies * shards : 0;
    out_.set("layout.zero", int64_t{shards > 1 ? 3 : 0});
    if (shards > 1 && copies > 1) out_.set("layout.hybrid_shard", shards);
    const std::string reshard = text(p + "fsdp_reshard_after_forward", "default");
    if (shards > 1)
      out_.set("layout.fsdp.reshard", reshard == "always" || (reshard == "default" && pp == 1));  // default: not with a pipeline
    if (pp > 1) read_pipeline(pp);

    const std::string mode = text("activation_checkpoint.mode", "selective"),
                      option = text("activation_checkpoint.selective_ac_option", "2");
    if (mode == "full")
      out_.set("layout.recompute", "full");
    else if (mode == "selective" && option == "op")
      out_.set("layout.recompute", "selective");
    else if (mode == "selective")
      out_.set("layout.recompute", "full"),
          out_.set("layout.recompute_options.every", whole(out_, "activation_checkpoint.selective_ac_option", option, 1));
    else if (mode != "none")
      out_.problem("activation_checkpoint.mode", fmt::format("`{}` has no counterpart: none, selective or full", mode));
  }

  void read_pipeline(int64_t pp) {
    const std::string p = "parallelism.", name = text(p + "pipeline_parallel_schedule", "1F1B");
    const auto schedule = std::ranges::find_if(torch_schedules(), [&](const ScheduleName& s) {
      return std::ranges::equal(s.torch, name, [](char a, char b) {
        return std::tolower(static_cast<unsigned char>(a)) == std::tolower(static_cast<unsigned char>(b));
      });
    });
    const std::string csv = text(p + "pipeline_parallel_schedule_csv", "");
    if (!csv.empty())
      out_.set("layout.schedule", csv);
    else if (schedule == torch_schedules().end())
      out_.problem(p + "pipeline_parallel_schedule", fmt::format("`{}` has no counterpart", name));
    else
      out_.set("layout.schedule", std::string(name_of(schedule->schedule)));
    micro_batch_ = integer(p + "pipeline_parallel_microbatch_size", 1, 1);
    const TomlValue* parts = find(p + "module_fqns_per_model_part");
    if (parts == nullptr) {
      const int64_t first = integer(p + "pipeline_parallel_first_stage_less_layers", 1),
                    last = integer(p + "pipeline_parallel_last_stage_less_layers", 1);
      if (first != 0 || last != 0)
        out_.unread(
            fmt::format("{}pipeline_parallel_first_stage_less_layers, _last_: {} and {} layers less on the ends; layers are dealt "
                        "out as evenly as can be",
                        p, first, last));
      find(p + "pipeline_parallel_layers_per_stage");
      return;
    }
    const auto* list = std::get_if<TomlValue::List>(&parts->value);
    std::vector<int64_t> layers;
    for (const TomlValue& part : list != nullptr ? *list : TomlValue::List{}) {
      const auto* modules = std::get_if<TomlValue::List>(&part.value);
      layers.push_back(0);
      for (const TomlValue& module : modules != nullptr ? *modules : TomlValue::List{})
        if (const auto* word = std::get_if<std::string>(&module.value); word != nullptr && word->starts_with("layers."))
          ++layers.back();
    }
    if (layers.empty() || layers.size() % static_cast<size_t>(pp) != 0)
      return out_.problem(p + "module_fqns_per_model_part", fmt::format("{} parts on {} stages", layers.size(), pp));
    const int64_t vpp = static_cast<int64_t>(layers.size()) / pp;
    if (schedule != torch_schedules().end() &&
        (schedule->schedule == Schedule::kInterleaved || schedule->schedule == Schedule::kBreadthFirst))
      out_.set("layout.vpp", vpp);
    // As even as can be, the first ones with what is left over: what a case has where nothing is said.
    int64_t total = 0;
    for (const int64_t n : layers) total += n;
    std::vector<int64_t> even;
    for (size_t i = 0; i < layers.size(); ++i)
      even.push_back(total / static_cast<int64_t>(layers.size()) +
                     (static_cast<int64_t>(i) < total % static_cast<int64_t>(layers.size()) ? 1 : 0));
    if (layers != even) out_.set("layout.stage_layers", fmt::format("{}", fmt::join(layers, ",")));
  }

  void read_training() {
    const std::string t = "training.";
    out_.set("train.seq_len", integer(t + "seq_len", 2048, 1));
    const int64_t local = integer(t + "local_batch_size", 8, 1), pp = out_.count("layout.pp", 1);
    const std::string global = text(t + "global_batch_size", "-1");
    out_.set("train.micro_batch", pp > 1 ? micro_batch_ : local);
    const int64_t sequences =
        global == "-1" ? (dp_ > 0 && local < kMost / dp_ ? local * dp_ : 0) : whole(out_, t + "global_batch_size", global, 1);
    set_batch(out_, t + "global_batch_size", sequences, dp_, 0);
    const std::string clip = text(t + "max_norm", "1.0");
    out_.set("train.clip_norm", clip == "inf" ? "0" : clip);
    if (text(t + "enable_cpu_offload", "false") == "true") out_.set("layout.offload", "{optimizer: cpu, parameters: cpu}");
    if (text(t + "dtype", "float32") != "float32")
      out_.problem(t + "dtype", "weights and moments in bf16 alone are not imported: float32");
    out_.set("train.precision", has_fp8_ ? "fp8" : text(t + "mixed_precision_param", "bfloat16") == "bfloat16" ? "bf16" : "fp32");
    find(t + "mixed_precision_reduce");
    const std::string optimizer = text("optimizer.name", "AdamW");
    if (optimizer != "AdamW") out_.problem("optimizer.name", fmt::format("`{}` has no counterpart: AdamW", optimizer));
    out_.set("train.learning_rate.peak", text("optimizer.lr", "8e-4"));
    out_.set("train.beta1", text("optimizer.beta1", "0.9"));
    out_.set("train.beta2", text("optimizer.beta2", "0.95"));
    out_.set("train.epsilon", text("optimizer.eps", "1e-8"));
    out_.set("train.weight_decay", text("optimizer.weight_decay", "0.1"));
    copy("debug.seed", "train.seed");
    read_rate();
  }

  void read_rate() {
    const int64_t steps = integer("training.steps", 10000), total = integer("lr_scheduler.total_steps", steps);
    out_.set("train.learning_rate.warmup_steps", integer("lr_scheduler.warmup_steps", 200));
    const std::string type = text("lr_scheduler.decay_type", "linear"), ratio = text("lr_scheduler.decay_ratio", ""),
                      floor = text("lr_scheduler.min_lr_factor", "0.0");
    const auto share = parse_number(ratio), low = parse_number(floor),
               peak = parse_number(out_.get("train.learning_rate.peak").value_or("0"));
    if (!ratio.empty() && share == 0.0) return;  // constant behind the warm-up
    if (type == "sqrt") return out_.problem("lr_scheduler.decay_type", "sqrt has no counterpart: linear or cosine");
    out_.set("train.learning_rate.total_steps", total);
    if (ratio.empty()) {
      out_.set("train.learning_rate.kind", type);
    } else if (share && *share > 0 && *share <= 1 && type == "linear") {
      out_.set("train.learning_rate.kind", "wsd");
      out_.set("train.learning_rate.decay_steps", static_cast<int64_t>(std::llround(static_cast<double>(total) * *share)));
    } else {
      return out_.problem("lr_scheduler.decay_ratio", "a share of the steps with a linear decay is expected");
    }
    if (low && peak && *low > 0)
      out_.set("train.learning_rate.floor", to_text(static_cast<float>(static_cast<float>(*low) * static_cast<float>(*peak))));
  }

  std::map<std::string, TomlValue, std::less<>> entries_;
  std::set<std::string, std::less<>> read_;
  int64_t devices_ = 0, dp_ = 0, micro_batch_ = 1;
  bool has_fp8_ = false;
  Settings out_;
};

/// Sections of a case file, and what stands in each: words, or further sections.
struct Section {
  std::string name;
  std::vector<std::pair<std::string, std::string>> values;
  std::vector<Section> sections;
};

Section& section_of(Section& root, std::string_view path) {
  Section* at = &root;
  while (!path.empty()) {
    const size_t dot = std::min(path.find('.'), path.size());
    const std::string name(path.substr(0, dot));
    auto found = std::ranges::find(at->sections, name, &Section::name);
    if (found == at->sections.end()) found = at->sections.insert(at->sections.end(), {.name = name, .values = {}, .sections = {}});
    at = &*found;
    path.remove_prefix(std::min(dot + 1, path.size()));
  }
  return *at;
}

void write(const Section& section, int indent, std::string& out) {
  const std::string blanks(static_cast<size_t>(indent), ' ');
  for (const auto& [key, value] : section.values) out += fmt::format("{}{}: {}\n", blanks, key, value);
  for (const Section& inner : section.sections) {
    out += fmt::format("{}{}:\n", blanks, inner.name);
    write(inner, indent + 2, out);
  }
}

}  // namespace

Result<Imported> import_file(std::string_view text, const std::string& name, std::string_view framework, int64_t devices) {
  if (text.size() > kFileBytes)
    return Error{ExitCode::kUsage,
                 fmt::format("{} has {} bytes, more than {}", name, text.size(), kFileBytes),
                 "name a file of settings",
                 {}};
  if (framework == "megatron") return Megatron(text, devices).read(name);
  if (framework == "deepspeed") return import_deepspeed(text, name, devices);
  if (framework == "torchtitan") {
    auto entries = parse_toml(text, name);
    if (!entries.ok()) return entries.error();
    return Titan(std::move(*entries), devices).read(name);
  }
  return Error{
      ExitCode::kUsage, fmt::format("files of `{}` are not read", framework), "expected one of: megatron deepspeed torchtitan", {}};
}

std::string case_text(const Imported& imported, const std::string& more) {
  Section root;
  for (const auto& [path, value] : imported.settings) {
    const size_t dot = path.rfind('.');
    const bool is_model = path.starts_with("model.");
    const std::string home = is_model ? "model.inline" : dot == std::string::npos ? "" : path.substr(0, dot);
    // Words of a foreign file may hold anything: quoted, but for plain ones and our own map.
    constexpr std::string_view kPlain = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.+-";
    const bool plain = path == "layout.offload" || (!value.empty() && value.find_first_not_of(kPlain) == std::string::npos);
    section_of(root, home)
        .values.emplace_back(dot == std::string::npos ? path : path.substr(dot + 1),
                             plain ? value : Tree(value).dump(-1, ' ', false, Tree::error_handler_t::replace));
  }
  std::string text = more;
  write(root, 0, text);
  return text;
}

}  // namespace shardlab::interop
