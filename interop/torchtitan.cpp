// torchtitan v0.2.2, the last version that is configured by TOML. Keys were read in torchtitan/config/job_config.py, the flavours in
// torchtitan/models/llama3/__init__.py, the deal of modules to stages in distributed/pipeline_parallel.py of that version.
#include "interop/torchtitan.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "interop/said.h"
#include "plan/base/values.h"
#include "plan/pipeline_case.h"

namespace shardlab::interop {

namespace {

/// Flavours of llama3. The width of the feed-forward follows there from a multiplier and is written out here.
constexpr std::array kFlavours{
    Flavour{"debugmodel", 6, 256, 16, 16, 768, 2048},
    Flavour{"8B", 32, 4096, 32, 8, 14336, 128256},
    Flavour{"70B", 80, 8192, 64, 8, 28672, 128256},
    Flavour{"405B", 126, 16384, 128, 8, 53248, 128256},
};

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

void add_model(Account& account, Toml& out) {
  const Model& m = account.of().model;
  account.say({"model."});
  const auto found = std::ranges::find_if(kFlavours, [&](const Flavour& f) {
    return m.is_llama() && f.layers == m.layers && f.hidden == m.hidden && m.head_dim * m.heads == m.hidden && f.heads == m.heads &&
           f.kv_heads == m.kv_heads && f.ffn == m.ffn && f.vocab == m.vocab;
  });
  if (found == kFlavours.end()) {
    account.refuse(
        "model.layers",
        fmt::format(
            "no flavour of llama3 has {} layers of {} with {} heads, {} of keys and values, {} inside, and {} tokens; there are "
            "debugmodel, 8B, 70B and 405B, others are Python code there",
            m.layers, m.hidden, m.heads, m.kv_heads, m.ffn, m.vocab));
    return;
  }
  account.require(!m.tied_embeddings, "model.tied_embeddings", "llama3 has a head of its own there");
  account.require(m.rope_theta == kTitanTheta, "model.rope_theta", fmt::format("the flavours have {}", kTitanTheta));
  account.require(m.norm_epsilon == kTitanEpsilon, "model.norm_epsilon", fmt::format("the flavours have {}", kTitanEpsilon));
  account.note("Initial weights are torchtitan's own: model.init_deviation says nothing there.");
  out.table("model");
  out.key("name", "llama3");
  out.key("flavor", found->name);
  out.key("hf_assets_path", "./assets/hf/Llama-3.1-8B");
  if (account.of().train.precision == Precision::kFp8) out.raw("converters", "[\"quantize.linear.float8\"]");
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

void add_layout(Account& account, Toml& out, std::vector<File>& files) {
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
  account.require(l.ep == 1, "layout.ep", "the exported model has no experts");
  account.require(!account.of().model.is_mixture(), "model.experts", "mixtures of experts are not exported");

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

std::span<const Flavour> titan_flavours() { return kFlavours; }
std::span<const ScheduleName> torch_schedules() { return kSchedules; }

void write_torchtitan(Account& account, const ExportOptions& options, std::vector<File>& files) {
  Toml out;
  std::vector<File> more;
  add_model(account, out);
  add_layout(account, out, more);
  add_training(account, out);
  files.push_back({"train.toml", stamp(account, options) + out.take()});
  files.insert(files.end(), more.begin(), more.end());
  files.push_back(launch_script(account, options, "-m torchtitan.train", "--job.config_file \"$here/train.toml\""));
}

}  // namespace shardlab::interop
