// torchtitan v0.2.2, the last version that is configured by TOML. Keys were read in torchtitan/config/job_config.py, the flavours in
// torchtitan/models/{llama3,qwen3,deepseek_v3}/__init__.py and model/args.py, the mixture in models/moe/moe.py, the deal of modules to stages in distributed/pipeline_parallel.py of that version.
#include "interop/torchtitan.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "interop/said.h"
#include "plan/base/values.h"
#include "plan/pipeline_case.h"

namespace shardlab::interop {

namespace {

/// Widths of feed-forwards follow from a multiplier in llama3, and are written out here.
Flavour llama3(std::string_view name, int64_t layers, int64_t hidden, int64_t heads, int64_t kv_heads, int64_t ffn, int64_t vocab,
               std::string_view assets) {
  Flavour f{.model = "llama3", .name = name, .shape = {}, .assets = assets};
  f.shape = {.family = Family::kLlama,
             .layers = layers,
             .hidden = hidden,
             .heads = heads,
             .kv_heads = kv_heads,
             .head_dim = hidden / heads,
             .ffn = ffn,
             .vocab = vocab,
             .norm_epsilon = 1e-5f,
             .rope_theta = 500000};
  return f;
}

/// qwen3 has no function that cuts it into stages. Biases of its routers stay 0: only build_optimizers_with_moe_load_balancing moves them.
Flavour qwen3(std::string_view name, int64_t layers, int64_t hidden, int64_t heads, int64_t kv_heads, int64_t ffn) {
  Flavour f{.model = "qwen3", .name = name, .shape = {}, .assets = "./assets/hf/Qwen3-0.6B", .has_pipeline = false};
  f.shape = {.family = Family::kLlama,
             .layers = layers,
             .hidden = hidden,
             .heads = heads,
             .kv_heads = kv_heads,
             .head_dim = 128,
             .ffn = ffn,
             .vocab = 151936,
             .qk_norm = true,
             .norm_epsilon = 1e-6f,
             .rope_theta = 1000000};
  return f;
}

Flavour tied(Flavour f) {
  f.shape.tied_embeddings = true;
  return f;
}

Flavour small(Flavour f) {
  f.shape.vocab = 2048;
  f.assets = "./tests/assets/tokenizer";
  return f;
}

Flavour mixed(Flavour f, int64_t experts, int64_t width, float theta = 1000000) {
  f.shape.experts = {.count = experts, .top_k = 8, .ffn = width};
  f.shape.rope_theta = theta;
  return f;
}

/// `moe_args.load_balance_coeff` of every flavour of deepseek_v3 is the step of its routers' biases. Their mean is taken away after each
/// step there, which changes no choice.
Flavour deepseek_v3(std::string_view name, int64_t layers, int64_t hidden, int64_t heads, int64_t ffn, int64_t vocab,
                    int64_t dense_layers, int64_t q_rank, Experts experts) {
  Flavour f{.model = "deepseek_v3", .name = name, .shape = {}, .assets = "./assets/hf/DeepSeek-V3.1-Base"};
  experts.dense_layers = dense_layers, experts.bias_update_rate = 1e-3f;
  f.shape = {.family = Family::kLlama,
             .layers = layers,
             .hidden = hidden,
             .heads = heads,
             .kv_heads = heads,
             .head_dim = 192,
             .ffn = ffn,
             .vocab = vocab,
             .norm_epsilon = 1e-5f,
             .rope_theta = 10000,
             .latent = {.q_rank = q_rank, .kv_rank = 512, .nope = 128, .rope = 64, .v = 128},
             .experts = experts};
  return f;
}

Flavour flex(Flavour f) {
  f.attends_by_flex = true;
  return f;
}

std::vector<Flavour> all_flavours() {
  constexpr std::string_view kTests = "./tests/assets/tokenizer";
  std::vector<Flavour> all{
      llama3("debugmodel", 6, 256, 16, 16, 768, 2048, kTests),
      llama3("8B", 32, 4096, 32, 8, 14336, 128256, "./assets/hf/Llama-3.1-8B"),
      llama3("70B", 80, 8192, 64, 8, 28672, 128256, "./assets/hf/Llama-3.1-70B"),
      llama3("405B", 126, 16384, 128, 8, 53248, 128256, "./assets/hf/Llama-3.1-405B"),
      small(tied(qwen3("debugmodel", 8, 256, 16, 8, 3072))),
      tied(qwen3("0.6B", 28, 1024, 16, 8, 3072)),
      tied(qwen3("1.7B", 28, 2048, 16, 8, 6144)),
      tied(qwen3("4B", 36, 2560, 32, 8, 9728)),
      qwen3("8B", 36, 4096, 32, 8, 12288),
      qwen3("14B", 40, 5120, 40, 8, 17408),
      qwen3("32B", 64, 5120, 64, 8, 25600),
      small(mixed(qwen3("debugmodel_moe", 8, 256, 16, 8, 3072), 64, 768)),
      mixed(qwen3("30B-A3B", 48, 2048, 32, 4, 6144), 128, 768),
      mixed(qwen3("235B-A22B", 94, 4096, 64, 4, 12288), 128, 1536, 5000000),
      small(deepseek_v3("debugmodel", 6, 256, 16, 1024, 2048, 1, 0,
                        {.count = 8, .top_k = 3, .ffn = 256, .normalise = false, .shared = 2})),
      flex(deepseek_v3("16B", 27, 2048, 16, 10944, 102400, 1, 0,
                       {.count = 64, .top_k = 6, .ffn = 1408, .normalise = false, .shared = 2})),
      flex(deepseek_v3(
          "236B", 60, 5120, 128, 12288, 102400, 1, 1536,
          {.count = 160, .top_k = 6, .ffn = 1536, .normalise = false, .factor = 16, .shared = 2, .groups = 8, .groups_chosen = 3})),
      flex(deepseek_v3(
          "671B", 61, 7168, 128, 18432, 129280, 3, 1536,
          {.count = 256, .top_k = 8, .ffn = 2048, .sigmoid = true, .factor = 2.5f, .shared = 1, .groups = 8, .groups_chosen = 4})),
  };
  return all;
}

/// PyTorch's names of schedules, in torch/distributed/pipelining/schedules.py get_schedule_class.
constexpr std::array kSchedules{
    ScheduleName{Schedule::kAfab, "GPipe"},
    ScheduleName{Schedule::k1F1B, "1F1B"},
    ScheduleName{Schedule::kInterleaved, "Interleaved1F1B"},
    ScheduleName{Schedule::kBreadthFirst, "LoopedBFS"},
    ScheduleName{Schedule::kZbV, "ZBVZeroBubble"},
    ScheduleName{Schedule::kDualPipeV, "DualPipeV"},
};

/// Tables and keys in the order in which they are written.
class Toml {
 public:
  void table(std::string_view name) { text_ += fmt::format("\n[{}]\n", name); }
  void key(std::string_view name, const std::string& value) { text_ += fmt::format("{} = \"{}\"\n", name, value); }
  void key(std::string_view name, const char* value) { key(name, std::string(value)); }
  void key(std::string_view name, std::string_view value) { key(name, std::string(value)); }
  void key(std::string_view name, bool value) { raw(name, value ? "true" : "false"); }
  void key(std::string_view name, int64_t value) { raw(name, fmt::to_string(value)); }
  void key(std::string_view name, int value) { key(name, int64_t{value}); }
  /// A TOML float has a point or an exponent.
  void key(std::string_view name, float value) {
    std::string text = to_text(value);
    if (text.find_first_of(".e") == std::string::npos) text += ".0";
    raw(name, text);
  }
  void raw(std::string_view name, std::string_view value) { text_ += fmt::format("{} = {}\n", name, value); }
  std::string take() { return std::move(text_); }

 private:
  std::string text_;
};

/// Whether the two differ in nothing that a flavour fixes besides the settings that `add_model` names one by one.
bool has_sizes(const Model& m, const Flavour& f) {
  Model sizes = m;
  sizes.name.clear();
  sizes.max_positions = f.shape.max_positions, sizes.init_deviation = f.shape.init_deviation;
  sizes.tied_embeddings = f.shape.tied_embeddings, sizes.norm_epsilon = f.shape.norm_epsilon, sizes.rope_theta = f.shape.rope_theta;
  sizes.experts.bias_update_rate = f.shape.experts.bias_update_rate;
  sizes.experts.balance = sizes.experts.z_loss = sizes.experts.capacity_factor = 0;
  return sizes == f.shape;
}

/// The model, or nothing where torchtitan has no such flavour.
const Flavour* add_model(Account& account, Toml& out) {
  const Model& m = account.of().model;
  account.say({"model."});
  const auto all = titan_flavours();
  const auto found = std::ranges::find_if(all, [&](const Flavour& f) { return has_sizes(m, f); });
  if (found == all.end()) {
    account.refuse("model.layers",
                   fmt::format("no flavour has {} layers of {} with {} heads, {} of keys and values, {} inside, {} experts and {} "
                               "tokens, and all else as here; there are {}; others are Python code there",
                               m.layers, m.hidden, m.heads, m.kv_heads, m.ffn, m.experts.count, m.vocab, flavour_list()));
    return nullptr;
  }
  const Model& theirs = found->shape;
  const auto same = [&](auto ours, auto value, std::string_view key) {
    account.require(ours == value, key, fmt::format("{} {} has {}", found->model, found->name, value));
  };
  same(m.tied_embeddings, theirs.tied_embeddings, "model.tied_embeddings");
  same(m.rope_theta, theirs.rope_theta, "model.rope_theta");
  same(m.norm_epsilon, theirs.norm_epsilon, "model.norm_epsilon");
  same(m.experts.bias_update_rate, theirs.experts.bias_update_rate, "model.bias_update_rate");
  account.require(m.experts.balance == 0, "model.balance_loss", "torchtitan has no such loss: set model.balance_loss: 0");
  account.require(m.experts.z_loss == 0, "model.z_loss", "torchtitan has no such loss: set model.z_loss: 0");
  account.require(!m.experts.drops(), "model.capacity_factor", "torchtitan drops no rows: set model.capacity_factor: 0");
  account.note("Initial weights are torchtitan's own: model.init_deviation says nothing there.");
  if (m.is_latent() && account.of().train.seq_len > kTitanPlainTokens)
    account.note(fmt::format("Rotary frequencies are scaled beyond {} tokens there (YaRN), and not here.", kTitanPlainTokens));
  if (m.experts.groups > 1 && !m.experts.sigmoid)
    account.note("The score of a group of experts is the sum of its two largest there, and its largest here.");
  out.table("model");
  out.key("name", found->model);
  out.key("flavor", found->name);
  out.key("hf_assets_path", found->assets);
  if (account.of().train.precision == Precision::kFp8) out.raw("converters", "[\"quantize.linear.float8\"]");
  return &*found;
}

/// "[["tok_embeddings", "layers.0"], ["layers.1", "norm", "output"]]": the modules of each part.
std::string modules_of_parts(const Case& c) {
  std::string text = "[";
  const std::vector<int> layers = layers_of_parts(c);
  int layer = 0;
  for (size_t part = 0; part < layers.size(); ++part) {
    std::string modules = part == 0 ? "\"tok_embeddings\"" : "";
    const auto add = [&](const std::string& name) { modules += fmt::format("{}\"{}\"", modules.empty() ? "" : ", ", name); };
    for (int i = 0; i < layers[part]; ++i) add(fmt::format("layers.{}", layer++));
    if (part + 1 == layers.size()) add("norm"), add("output");
    text += fmt::format("{}\n  [{}]", part == 0 ? "" : ",", modules);
  }
  return text + "\n]";
}

void add_pipeline(Account& account, Toml& out, std::vector<File>& files) {
  const Case& c = account.of();
  const Layout& l = c.layout;
  account.say({"layout.pp", "layout.vpp", "layout.schedule", "layout.stage_layers"});
  out.key("pipeline_parallel_degree", l.pp);
  if (l.pp == 1) return;
  if (!is_pipeline_decided(c))
    return account.refuse("layout.schedule", "choose the schedule and the layers of each part: neither auto nor balanced");
  const auto name = std::ranges::find(kSchedules, l.schedule, &ScheduleName::schedule);
  if (l.schedule == Schedule::kTable) {
    out.key("pipeline_parallel_schedule", "PipelineScheduleMulti");
    out.key("pipeline_parallel_schedule_csv", "schedule.csv");
    files.push_back({"schedule.csv", to_csv(schedule_of(c))});
  } else if (name == kSchedules.end()) {
    return account.refuse(
        "layout.schedule",
        "torchtitan has afab, 1f1b, interleaved, breadth-first, zb-v and dualpipe-v; any other as a table (schedule: file.csv)");
  } else {
    out.key("pipeline_parallel_schedule", name->torch);
  }
  out.key("pipeline_parallel_microbatch_size", c.train.micro_batch);
  out.raw("module_fqns_per_model_part", modules_of_parts(c));
}

/// Experts are cut as tp cuts a feed-forward where no ranks share them (apply_moe_ep_tp of models/llama4/infra/parallelize.py).
void add_experts(Account& account, Toml& out) {
  const Case& c = account.of();
  const Layout& l = c.layout;
  if (!c.model.is_mixture()) return account.require(l.ep == 1, "layout.ep", "the exported model has no experts");
  account.say({"layout.ep", "layout.expert_tp"});
  out.key("expert_parallel_degree", l.ep);
  if (l.ep > 1) out.key("expert_tensor_parallel_degree", l.expert_slices());
}

void add_layout(Account& account, Toml& out, std::vector<File>& files, const Flavour* flavour) {
  const Case& c = account.of();
  const Layout& l = c.layout;
  account.say({"layout.dp", "layout.tp", "layout.cp", "layout.sequence_parallel", "layout.tensor_overlap", "layout.zero",
               "layout.hybrid_shard", "layout.overlap", "layout.bucket_bytes", "layout.fsdp."});
  out.table("parallelism");
  // With context parallelism torchtitan folds cp into the shards of FSDP by itself.
  const bool sharded = l.zero == 3 && l.dp > 1;
  out.key("data_parallel_replicate_degree", sharded ? l.replicas() : l.dp);
  out.key("data_parallel_shard_degree", sharded ? l.shard_ranks() : 1);
  account.require(
      l.zero == 0 || l.zero == 3 || l.dp == 1, "layout.zero",
      l.zero == 2 ? "FSDP that keeps parameters until backward is zero=3 with fsdp.reshard=false" : "torchtitan has zero 0 and 3");
  if (sharded) {
    out.key("fsdp_reshard_after_forward", l.fsdp.reshard ? "always" : "never");
    account.require(l.fsdp.unit == 1, "layout.fsdp.unit", "torchtitan shards layer by layer: set fsdp.unit=1");
    account.require(l.fsdp.prefetch == 1, "layout.fsdp.prefetch", "FSDP gathers one layer ahead: set fsdp.prefetch=1");
  }
  account.require(l.overlap || l.dp == 1, "layout.overlap", "torchtitan always overlaps: set overlap=true");
  account.require(!asks_for_buckets(c), "layout.bucket_bytes", "buckets have torchtitan's own size: set bucket_bytes=0");
  out.key("tensor_parallel_degree", l.tp);
  if (l.tp > 1 && l.tensor_overlap) out.key("enable_async_tensor_parallel", true);
  account.require(l.tp == 1 || l.sequence_parallel, "layout.sequence_parallel",
                  "tensor parallelism always shards the sequence there: set sequence_parallel=true");
  add_pipeline(account, out, files);
  out.key("context_parallel_degree", l.cp);
  if (flavour != nullptr) {
    account.require(flavour->has_pipeline || l.pp == 1, "layout.pp",
                    fmt::format("torchtitan has no pipeline of {}: set pp=1", flavour->model));
    account.require(
        !flavour->attends_by_flex || l.cp == 1, "layout.cp",
        fmt::format("{} {} attends by FlexAttention, which goes with no cp there: set cp=1", flavour->model, flavour->name));
  }
  add_experts(account, out);

  account.say({"layout.recompute", "layout.recompute_options."});
  out.table("activation_checkpoint");
  account.require(l.recompute_options.budget_bytes == 0, "layout.recompute_options.budget_bytes",
                  "recompute is chosen by a budget: name the choice");
  if (l.recompute == Recompute::kNone) {
    out.key("mode", "none");
  } else if (l.recompute == Recompute::kSelective) {
    account.require(l.recompute_options.modules.empty(), "layout.recompute",
                    "torchtitan chooses among ops, not sub-layers: set recompute=selective");
    out.key("mode", "selective");
    out.key("selective_ac_option", "op");
  } else if (l.recompute == Recompute::kFull && l.recompute_options.every > 1) {
    out.key("mode", "selective");  // of every k-th layer, the whole
    out.key("selective_ac_option", fmt::to_string(l.recompute_options.every));
  } else if (l.recompute == Recompute::kFull) {
    out.key("mode", "full");
  } else {
    account.refuse("layout.recompute", "a choice for each layer cannot be said: take none, selective or full");
  }
}

void add_training(Account& account, Toml& out) {
  const Case& c = account.of();
  const Layout& l = c.layout;
  const Train& t = c.train;
  account.say({"train.seq_len", "train.micro_batch", "train.grad_accumulation", "train.global_batch_tokens", "train.precision",
               "train.reduce_dtype", "train.accumulate_dtype", "train.fp8_scaling", "train.clip_norm", "layout.offload"});
  out.table("training");
  // A pipeline cuts the local batch into micro-batches; without one it is a micro-batch, and the rest is accumulated.
  out.key("local_batch_size", l.pp > 1 ? t.micro_batch * t.grad_accumulation : t.micro_batch);
  out.key("global_batch_size", c.sequences_per_step());
  out.key("seq_len", t.seq_len);
  out.key("steps", train_steps(c));
  if (t.clip_norm > 0)
    out.key("max_norm", t.clip_norm);
  else
    out.raw("max_norm", "inf");  // 0 would clip all
  const bool host = l.offload.parameters == OffloadTo::kCpu && l.offload.optimizer == OffloadTo::kCpu &&
                    l.offload.activations == OffloadTo::kNone;
  account.require(host || !(l.offload.optimizer != OffloadTo::kNone || l.offload.parameters != OffloadTo::kNone ||
                            l.offload.activations != OffloadTo::kNone),
                  "layout.offload", "FSDP offloads parameters and optimizer together: {optimizer: cpu, parameters: cpu}, or none");
  if (host) {
    account.require(l.zero == 3, "layout.offload", "offload is FSDP's: set zero=3");
    out.key("enable_cpu_offload", true);
  }
  account.require(t.precision == Precision::kFp32 || t.precision == Precision::kBf16 || t.precision == Precision::kFp8,
                  "train.precision", "torchtitan trains in fp32, bf16 and fp8");
  out.key("dtype", "float32");
  out.key("mixed_precision_param", t.precision == Precision::kFp32 ? "float32" : "bfloat16");
  out.key("mixed_precision_reduce", "float32");
  account.require(t.reduce_dtype.empty(), "train.reduce_dtype", "gradients are reduced in fp32: set reduce_dtype=fp32");
  account.require(t.accumulate_dtype.empty(), "train.accumulate_dtype", "gradients are summed in fp32: set accumulate_dtype=fp32");
  account.require(t.precision != Precision::kFp8 || t.fp8_scaling == Fp8Scaling::kCurrent, "train.fp8_scaling",
                  "Float8Linear takes its scales from the tensor: set fp8_scaling=current");

  account.say({"train.optimizer", "train.learning_rate.", "train.beta1", "train.beta2", "train.epsilon", "train.weight_decay"});
  account.require(t.optimizer == Optimizer::kAdamW, "train.optimizer", "torchtitan has Adam and AdamW");
  out.table("optimizer");
  out.key("name", "AdamW");
  const LearningRate& lr = t.learning_rate;
  out.key("lr", lr.peak);
  out.key("beta1", t.beta1);
  out.key("beta2", t.beta2);
  out.key("eps", t.epsilon);
  out.key("weight_decay", t.weight_decay);
  out.table("lr_scheduler");
  out.key("warmup_steps", lr.warmup_steps);
  using Kind = LearningRate::Kind;
  if (lr.kind == Kind::kConstant) {
    out.key("decay_ratio", 0.0f);
  } else {
    out.key("total_steps", lr.total_steps);
    if (lr.kind == Kind::kWsd && lr.total_steps > 0) {
      const double ratio = static_cast<double>(lr.decay_steps) / static_cast<double>(lr.total_steps);
      out.raw("decay_ratio", to_text(ratio).find('.') == std::string::npos ? to_text(ratio) + ".0" : to_text(ratio));
    }
    out.key("decay_type", lr.kind == Kind::kCosine ? "cosine" : "linear");
    out.key("min_lr_factor", lr.peak > 0 ? lr.floor / lr.peak : 0.0f);
  }
  account.say({"train.seed"});
  out.table("debug");
  out.key("seed", static_cast<int64_t>(t.seed));
  for (const std::string_view data : {"data.text", "data.tokens"})
    account.by_script(data, "training.dataset and training.dataset_path");
}

}  // namespace

std::span<const Flavour> titan_flavours() {
  static const std::vector<Flavour> all = all_flavours();
  return all;
}

std::string flavour_list() {
  std::string list;
  std::string_view model;
  for (const Flavour& f : titan_flavours()) {
    list += f.model == model ? " " : fmt::format("{}{}: ", list.empty() ? "" : "; ", f.model);
    list += f.name, model = f.model;
  }
  return list;
}

std::span<const ScheduleName> torch_schedules() { return kSchedules; }

void write_torchtitan(Account& account, const ExportOptions& options, std::vector<File>& files) {
  Toml out;
  std::vector<File> more;
  const Flavour* flavour = add_model(account, out);
  add_layout(account, out, more, flavour);
  add_training(account, out);
  files.push_back({"train.toml", stamp(account, options) + out.take()});
  files.insert(files.end(), more.begin(), more.end());
  files.push_back(launch_script(account, options, "-m torchtitan.train", "--job.config_file \"$here/train.toml\""));
}

}  // namespace shardlab::interop
