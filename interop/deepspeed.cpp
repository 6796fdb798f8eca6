// DeepSpeed v0.19.5: a config.json. Keys were read in deepspeed/runtime (constants.py, config.py, precision_config.py, zero/config.py,
// zero/offload_config.py, lr_schedules.py, tensor_parallel/config.py) of that version.
#include <fmt/format.h>

#include <bit>
#include <cmath>
#include <nlohmann/json.hpp>

#include "interop/hugging_face.h"
#include "interop/said.h"
#include "plan/base/values.h"

namespace shardlab::interop {

namespace {

using Json = nlohmann::ordered_json;

/// A float as the shortest decimal that means it: 0.9 and not 0.8999999761581421.
Json number(float value) { return Json::parse(to_text(value)); }

Json zero_section(Account& account) {
  const Case& c = account.of();
  const Layout& l = c.layout;
  account.say(
      {"layout.zero", "layout.overlap", "layout.bucket_bytes", "layout.offload", "layout.hybrid_shard", "layout.zero_plus_plus."});
  Json zero{{"stage", l.zero}};
  if (l.zero == 0) {
    account.require(!asks_for_buckets(c), "layout.bucket_bytes",
                    "without ZeRO DeepSpeed reduces in pieces of one size of its own: leave it at 0");
    return zero;
  }
  if (l.dp > 1) zero["overlap_comm"] = l.overlap;
  zero["contiguous_gradients"] = true;
  zero["reduce_scatter"] = true;
  if (asks_for_buckets(c)) {
    const int64_t width = c.train.reduce_dtype.empty() && c.train.precision == Precision::kFp32 ? 4 : 2;
    zero["reduce_bucket_size"] = std::max<int64_t>(1, l.bucket_bytes / width);  // in elements
  }
  const auto device = [](OffloadTo where) { return Json{{"device", std::string(name_of(where))}, {"pin_memory", true}}; };
  for (const auto& [name, where] : {std::pair{"offload_optimizer", l.offload.optimizer}, {"offload_param", l.offload.parameters}}) {
    if (where == OffloadTo::kNone) continue;
    zero[name] = device(where);
    if (where == OffloadTo::kNvme) zero[name]["nvme_path"] = "/local_nvme";
  }
  if (l.offload.optimizer == OffloadTo::kNvme || l.offload.parameters != OffloadTo::kNone)
    account.require(l.zero == 3, "layout.offload", "parameters on the host, and anything on NVMe, go with zero=3");
  if (l.zero == 3) {
    account.require(l.fsdp.reshard, "layout.fsdp.reshard",
                    "DeepSpeed gives parameters up after use: set fsdp.reshard=true, or zero=2");
    account.require(l.fsdp.unit == 1, "layout.fsdp.unit", "DeepSpeed gathers module by module: set fsdp.unit=1");
    account.say({"layout.fsdp.prefetch"});
    account.note("DeepSpeed prefetches by elements (stage3_prefetch_bucket_size), not by units; its default is kept.");
    if (l.zero_plus_plus.weights) zero["zero_quantized_weights"] = true;
    if (l.zero_plus_plus.gradients) zero["zero_quantized_gradients"] = true;
    if (l.zero_plus_plus.secondary > 0) zero["zero_hpz_partition_size"] = l.zero_plus_plus.secondary;
  }
  if (!is_inert("layout.hybrid_shard", c)) {
    account.require(l.zero == 3, "layout.hybrid_shard", "copies of the shards are mics_shard_size, of zero=3");
    zero["mics_shard_size"] = l.hybrid_shard;
  }
  return zero;
}

/// Type and parameters of the optimizer: 1-bit Adam is one of its own there.
Json optimizer_section(Account& account) {
  const Case& c = account.of();
  const Train& t = c.train;
  account.say({"train.optimizer", "train.learning_rate.peak", "train.weight_decay", "train.beta1", "train.beta2", "train.epsilon",
               "layout.compression.kind", "layout.compression.warmup"});
  account.require(t.optimizer != Optimizer::kAdamW8bit, "train.optimizer",
                  "DeepSpeed has AdamW, SGD and Lion; moments in 8 bits are given by code");
  const CompressionKind kind = c.layout.compression.kind;
  Json parameters{{"lr", number(t.learning_rate.peak)}, {"weight_decay", number(t.weight_decay)}};
  if (t.optimizer == Optimizer::kSgd) return {{"type", "SGD"}, {"params", parameters}};
  parameters["betas"] = {number(t.beta1), number(t.beta2)};
  if (t.optimizer == Optimizer::kLion) return {{"type", "Lion"}, {"params", parameters}};
  parameters["eps"] = number(t.epsilon);
  if (kind == CompressionKind::kNone) return {{"type", "AdamW"}, {"params", parameters}};
  if (kind != CompressionKind::kOneBitAdam) {
    account.refuse("layout.compression.kind", "of the compressions DeepSpeed has one-bit-adam");
    return {};
  }
  account.require(c.layout.zero == 0, "layout.zero", "1-bit Adam goes with zero=0");
  parameters["freeze_step"] = c.layout.compression.warmup;
  return {{"type", "OneBitAdam"}, {"params", parameters}};
}

Json scheduler_section(Account& account) {
  const LearningRate& lr = account.of().train.learning_rate;
  account.say({"train.learning_rate.kind", "train.learning_rate.warmup_steps", "train.learning_rate.total_steps",
               "train.learning_rate.floor"});
  using Kind = LearningRate::Kind;
  if (lr.kind == Kind::kWsd) {
    account.refuse("train.learning_rate.kind", "DeepSpeed has constant, linear and cosine");
    return nullptr;
  }
  if (lr.kind == Kind::kConstant && lr.warmup_steps == 0) return nullptr;
  if (lr.warmup_steps == 0) {
    account.refuse("train.learning_rate.warmup_steps", "DeepSpeed's schedules warm up for at least one step: set warmup_steps=1");
    return nullptr;
  }
  Json parameters{{"warmup_num_steps", lr.warmup_steps}, {"warmup_type", "linear"}};
  if (lr.kind == Kind::kCosine) {
    parameters["total_num_steps"] = lr.total_steps;
    parameters["warmup_min_ratio"] = 0.0;
    parameters["cos_min_ratio"] = lr.peak > 0 ? number(lr.floor / lr.peak) : Json(0.0);
    return {{"type", "WarmupCosineLR"}, {"params", parameters}};
  }
  parameters["warmup_min_lr"] = 0.0;
  parameters["warmup_max_lr"] = number(lr.peak);
  if (lr.kind == Kind::kConstant) return {{"type", "WarmupLR"}, {"params", parameters}};
  account.require(lr.floor == 0, "train.learning_rate.floor", "WarmupDecayLR ends at 0: set learning_rate.floor=0");
  parameters["total_num_steps"] = lr.total_steps;
  return {{"type", "WarmupDecayLR"}, {"params", parameters}};
}

void add_precision(Account& account, Json& config) {
  const Train& t = account.of().train;
  account.say({"train.precision", "train.loss_scale", "train.loss_scale_start", "train.loss_scale_interval", "train.reduce_dtype",
               "train.accumulate_dtype"});
  const bool fp16 = t.precision == Precision::kFp16;
  account.require(t.precision == Precision::kFp32 || t.precision == Precision::kBf16 || fp16, "train.precision",
                  "DeepSpeed trains in fp32, bf16 or fp16");
  config["bf16"] = {{"enabled", t.precision == Precision::kBf16}};
  config["fp16"] = {{"enabled", fp16}};
  if (fp16) {
    config["fp16"]["loss_scale"] = number(t.loss_scale);
    if (t.loss_scale == 0) {
      const double power = std::log2(t.loss_scale_start);
      account.require(power == std::floor(power), "train.loss_scale_start", "DeepSpeed begins at a power of two");
      config["fp16"]["initial_scale_power"] = static_cast<int64_t>(power);
      config["fp16"]["loss_scale_window"] = t.loss_scale_interval;
    }
  }
  const auto type = [](const std::string& written) { return written.empty() ? std::string("fp32") : written; };
  config["communication_data_type"] = type(t.reduce_dtype);
  config["data_types"] = {{"grad_accum_dtype", type(t.accumulate_dtype)}};
}

/// AutoEP shares experts that transformers' model has. Source: deepspeed/module_inject/auto_ep_config.py, auto_ep_folding.py
/// (validate_folding_global), auto_ep_presets/registry.py.
void add_experts(Account& account, Json& config) {
  const Case& c = account.of();
  const Layout& l = c.layout;
  if (!c.model.is_mixture()) return;
  account.say({"layout.ep"});
  if (l.ep == 1) {
    account.require(l.tp == 1, "layout.tp", "AutoTP is not combined with experts without AutoEP here: set ep, or tp=1");
    return;
  }
  const auto type = hugging_face_type(c.model);
  const std::string preset = type.ok() ? *type : "";
  account.require(
      preset == "mixtral" || preset == "qwen3_moe" || preset == "deepseek_v2" || preset == "deepseek_v3", "layout.ep",
      fmt::format("AutoEP shares experts of mixtral, qwen3_moe, deepseek_v2 and deepseek_v3, not of {}: set ep=1", preset));
  account.require(l.pp == 1 || l.tp == 1, "layout.pp", "AutoEP with AutoTP has no pipeline: set pp=1");
  account.require(l.tp == 1 || l.expert_slices() == 1, "layout.expert_tp", "AutoEP does not cut experts: set expert_tp: 1");
  account.require(l.tp == 1 || l.zero < 3, "layout.zero", "AutoEP with AutoTP goes with zero 0, 1 and 2");
  account.require(l.tp == 1 || l.offload.optimizer == OffloadTo::kNone, "layout.offload",
                  "AutoEP with AutoTP offloads nothing: set offload.optimizer: none");
  account.require(!l.zero_plus_plus.gradients || l.zero < 3, "layout.zero_plus_plus.gradients",
                  "AutoEP under zero=3 does not quantise gradients");
  account.say({"layout.expert_tp"});
  config["expert_parallel"] = {
      {"enabled", true}, {"autoep_size", l.ep}, {"expert_tensor_parallel_size", 1}, {"preset_model", preset}};
}

}  // namespace

std::string deepspeed_json(Account& account) {
  const Case& c = account.of();
  const Layout& l = c.layout;
  const Train& t = c.train;
  account.say(
      {"layout.dp", "layout.tp", "train.micro_batch", "train.grad_accumulation", "train.global_batch_tokens", "train.clip_norm"});
  Json config;
  config["train_batch_size"] = c.sequences_per_step();
  config["train_micro_batch_size_per_gpu"] = t.micro_batch;
  config["gradient_accumulation_steps"] = t.grad_accumulation;
  config["gradient_clipping"] = number(t.clip_norm);  // 0: never
  add_precision(account, config);
  config["zero_optimization"] = zero_section(account);
  if (l.tp > 1) config["tensor_parallel"] = {{"autotp_size", l.tp}};
  config["optimizer"] = optimizer_section(account);
  if (const Json scheduler = scheduler_section(account); !scheduler.is_null()) config["scheduler"] = scheduler;
  if (l.zero > 0 && t.optimizer == Optimizer::kSgd) config["zero_allow_untested_optimizer"] = true;

  account.require(l.offload.activations == OffloadTo::kNone, "layout.offload",
                  "activations are checkpointed to the host by calls in the model's code");
  account.require(l.cp == 1, "layout.cp", "DeepSpeed shards sequences by calls in the model's code (Ulysses): set cp=1");
  add_experts(account, config);
  account.require(!(l.tp > 1 && l.sequence_parallel), "layout.sequence_parallel",
                  "AutoTP keeps activations whole: set sequence_parallel=false");
  if (l.pp > 1) {
    account.require(l.schedule == Schedule::k1F1B, "layout.schedule", "DeepSpeed's pipeline is 1f1b");
    account.require(l.zero < 2, "layout.zero", "DeepSpeed's pipeline goes with zero 0 and 1");
    account.require(l.tp == 1, "layout.tp", "AutoTP and the pipeline are not combined here: set tp=1 or pp=1");
  }
  account.by_script("layout.pp", "wrap the layers in PipelineModule(num_stages=pp)");
  account.say({"layout.schedule", "layout.sequence_parallel"});
  account.by_script("layout.stage_layers", "PipelineModule(partition_method=...)");
  account.require(l.recompute == Recompute::kNone || (l.recompute == Recompute::kFull && l.recompute_options.every == 1),
                  "layout.recompute", "DeepSpeed recomputes whole layers, every one: take none or full");
  account.by_script("layout.recompute", "model.gradient_checkpointing_enable()");
  account.say({"layout.recompute_options.every"});
  account.by_script("train.seq_len", "sequences of the data loader");
  account.by_script("train.dropout", "in the model's config.json");
  account.by_script("train.seed", "transformers.set_seed");
  account.by_script("data.text", "the training script's data");
  account.by_script("data.tokens", "the training script's data");
  account.say({"model."});  // model/config.json
  return config.dump(2) + "\n";
}

void write_deepspeed(Account& account, const ExportOptions& options, std::vector<File>& files) {
  files.push_back({"ds_config.json", deepspeed_json(account)});
  files.push_back({"model/config.json", hugging_face_config(account.of().model)});
  files.push_back(launch_script(account, options, "train.py",
                                "--deepspeed \"$here/ds_config.json\" --model_config \"$here/model/config.json\""));
  account.note(
      "train.py is yours: it makes the model of model/config.json and hands ds_config.json to deepspeed.initialize or to "
      "transformers' Trainer.");
}

}  // namespace shardlab::interop
