// accelerate v1.14.0: the configuration of `accelerate launch`. Keys were read in commands/config/config_args.py, commands/launch.py and
// utils/dataclasses.py of that version. What accelerate hands to DeepSpeed stands in a DeepSpeed file beside it.
#include <fmt/format.h>

#include "interop/said.h"

namespace shardlab::interop {

namespace {

/// FSDP2, with tensor and context parallelism beside it, or plain data parallelism.
std::string native_section(Account& account) {
  const Case& c = account.of();
  const Layout& l = c.layout;
  account.say({"layout.dp", "layout.tp", "layout.cp", "layout.zero", "layout.hybrid_shard", "layout.fsdp.", "layout.offload",
               "layout.recompute", "layout.recompute_options.every", "layout.overlap", "layout.bucket_bytes",
               "layout.sequence_parallel", "train.precision", "train.reduce_dtype", "train.accumulate_dtype"});
  const bool sharded = l.zero == 3 && l.dp > 1;
  std::string text = fmt::format("distributed_type: {}\n", sharded || l.tp > 1 || l.cp > 1 ? "FSDP" : "MULTI_GPU");
  account.require(l.recompute == Recompute::kNone || (l.recompute == Recompute::kFull && l.recompute_options.every == 1),
                  "layout.recompute", "whole layers are recomputed, every one: take none or full");
  if (sharded || l.tp > 1 || l.cp > 1) {
    account.require(l.fsdp.unit == 1, "layout.fsdp.unit", "FSDP wraps layer by layer: set fsdp.unit=1");
    account.require(l.fsdp.prefetch == 1 || !sharded, "layout.fsdp.prefetch", "FSDP2 gathers one layer ahead: set fsdp.prefetch=1");
    const bool host = l.offload.parameters == OffloadTo::kCpu && l.offload.optimizer == OffloadTo::kCpu &&
                      l.offload.activations == OffloadTo::kNone;
    account.require(host || l.offload.optimizer == OffloadTo::kNone, "layout.offload",
                    "FSDP offloads parameters and optimizer together: {optimizer: cpu, parameters: cpu}");
    account.require(host || l.offload.parameters == OffloadTo::kNone, "layout.offload",
                    "FSDP offloads parameters and optimizer together: {optimizer: cpu, parameters: cpu}");
    account.require(l.offload.activations == OffloadTo::kNone, "layout.offload", "activations stay on the device");
    text += fmt::format(
        "fsdp_config:\n  fsdp_activation_checkpointing: {}\n  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n  "
        "fsdp_cpu_ram_efficient_loading: false\n"
        "  fsdp_offload_params: {}\n  fsdp_reshard_after_forward: {}\n  fsdp_state_dict_type: SHARDED_STATE_DICT\n  "
        "fsdp_transformer_layer_cls_to_wrap: {}\n  fsdp_version: 2\n",
        l.recompute == Recompute::kFull, host, l.fsdp.reshard, c.model.is_llama() ? "LlamaDecoderLayer" : "GPT2Block");
    text += fmt::format(
        "parallelism_config:\n  parallelism_config_cp_size: {}\n  parallelism_config_dp_replicate_size: {}\n  "
        "parallelism_config_dp_shard_size: {}\n"
        "  parallelism_config_tp_size: {}\n",
        l.cp, sharded ? l.replicas() : l.dp, sharded ? l.shard_ranks() : 1, l.tp);
    account.require(l.tp == 1 || c.model.is_llama(), "layout.tp", "transformers has a tensor-parallel plan of llama, not of gpt");
  } else {
    account.by_script("layout.recompute", "model.gradient_checkpointing_enable()");
    account.require(!l.offload.any(), "layout.offload", "offload goes with FSDP (zero=3) or DeepSpeed (zero 1 and 2)");
  }
  account.require(l.overlap || l.dp == 1, "layout.overlap", "PyTorch always overlaps: set overlap=true");
  account.require(!asks_for_buckets(c) || sharded, "layout.bucket_bytes",
                  "buckets are DistributedDataParallel's: bucket_cap_mb in the training script; set bucket_bytes=0");
  account.require(!(l.tp > 1 && l.sequence_parallel), "layout.sequence_parallel",
                  "transformers' plans keep activations whole: set sequence_parallel=false");
  const Precision p = c.train.precision;
  account.require(p == Precision::kFp32 || p == Precision::kBf16 || p == Precision::kFp16, "train.precision",
                  "exported are fp32, bf16 and fp16");
  account.require(c.train.reduce_dtype.empty() && c.train.accumulate_dtype.empty(), "train.reduce_dtype",
                  "mixed_precision keeps gradients in fp32: set reduce_dtype and accumulate_dtype to fp32");
  account.by_script("train.loss_scale", "torch.amp.GradScaler");
  account.by_script("train.loss_scale_start", "torch.amp.GradScaler(init_scale=...)");
  account.by_script("train.loss_scale_interval", "torch.amp.GradScaler(growth_interval=...)");
  for (const auto& [path, how] : {std::pair{"train.micro_batch", "batch size of the data loader"},
                                  {"train.grad_accumulation", "Accelerator(gradient_accumulation_steps=...)"},
                                  {"train.optimizer", "the optimizer"},
                                  {"train.learning_rate.peak", "the optimizer"},
                                  {"train.learning_rate.kind", "the scheduler"},
                                  {"train.learning_rate.warmup_steps", "the scheduler"},
                                  {"train.learning_rate.total_steps", "the scheduler"},
                                  {"train.learning_rate.decay_steps", "the scheduler"},
                                  {"train.learning_rate.floor", "the scheduler"},
                                  {"train.weight_decay", "the optimizer"},
                                  {"train.beta1", "the optimizer"},
                                  {"train.beta2", "the optimizer"},
                                  {"train.epsilon", "the optimizer"},
                                  {"train.clip_norm", "accelerator.clip_grad_norm_"},
                                  {"train.seq_len", "sequences of the data loader"},
                                  {"train.dropout", "in the model's config.json"},
                                  {"train.seed", "accelerate.utils.set_seed"},
                                  {"data.text", "the training script's data"},
                                  {"data.tokens", "the training script's data"}})
    account.by_script(path, how);
  account.say({"train.global_batch_tokens", "model."});
  return text + fmt::format("mixed_precision: {}\n", p == Precision::kFp32 ? "'no'" : p == Precision::kBf16 ? "bf16" : "fp16");
}

}  // namespace

void write_accelerate(Account& account, const ExportOptions& options, std::vector<File>& files) {
  const Case& c = account.of();
  const Layout& l = c.layout;
  const Placement placement = placement_of(c);
  std::string text = stamp(account, options) + "compute_environment: LOCAL_MACHINE\n";
  const bool by_deepspeed = l.zero == 1 || l.zero == 2;
  account.require(l.pp == 1, "layout.pp", "accelerate has no pipeline: set pp=1");
  account.require(l.ep == 1, "layout.ep", "accelerate's files share no experts: set ep=1, or export to deepspeed");
  if (by_deepspeed) {
    files.push_back({"ds_config.json", deepspeed_json(account)});
    text += "deepspeed_config:\n  deepspeed_config_file: ds_config.json\n  zero3_init_flag: false\ndistributed_type: DEEPSPEED\n";
    account.note(
        "zero 1 and 2 are DeepSpeed's there: `pip install deepspeed` beside accelerate. Start it in the folder of ds_config.json.");
  } else {
    text += native_section(account);
  }
  text += fmt::format("num_machines: {}\nnum_processes: {}\nmain_training_function: main\nrdzv_backend: {}\nsame_network: true\n",
                      placement.nodes, l.world_size(), placement.nodes > 1 ? "c10d" : "static");
  files.insert(files.begin(), {"accelerate.yaml", std::move(text)});
  files.push_back({"model/config.json", hugging_face_config(c.model)});
  account.note("train.py is yours: it makes the model of model/config.json and calls accelerator.prepare.");
  const std::string script = options.entry_point.empty() ? "train.py" : options.entry_point;
  std::string launch =
      "#!/bin/bash\n" + stamp(account, options) + "set -e\nhere=$(cd \"$(dirname \"$0\")\" && pwd)\ncd \"$here\"\n";
  launch +=
      "exec accelerate launch --config_file \"$here/accelerate.yaml\" \\\n  --machine_rank \"${NODE_RANK:-0}\" --main_process_ip "
      "\"${MASTER_ADDR:-localhost}\" "
      "--main_process_port \"${MASTER_PORT:-29500}\" \\\n  " +
      script + " --model_config \"$here/model/config.json\" \"$@\"\n";
  files.push_back({"launch.sh", std::move(launch), true});
}

}  // namespace shardlab::interop
