// nanotron at commit 2411b022: a YAML file. Keys were read in src/nanotron/config (config.py, parallelism_config.py, models_config.py)
// of that commit, the learning rate in src/nanotron/helpers.py.
#include <fmt/format.h>

#include "interop/said.h"
#include "plan/base/values.h"
#include "plan/pipeline_case.h"

namespace shardlab::interop {

namespace {

/// A float as YAML reads one: 1e-05 without a point would be a string.
std::string yaml_number(float value) {
  std::string text = to_text(value);
  const size_t exponent = text.find('e');
  if (text.find('.') == std::string::npos) text.insert(exponent == std::string::npos ? text.size() : exponent, ".0");
  return text;
}

std::string nanotron_model(Account& account) {
  const Case& c = account.of();
  const Model& m = c.model;
  account.say({"model."});
  account.require(m.is_llama(), "model.family", "nanotron trains llama");
  account.require(m.head_dim * m.heads == m.hidden, "model.head_dim", "heads share the width there: hidden / heads");
  account.require(m.kv_heads >= c.layout.tp, "layout.tp",
                  fmt::format("nanotron wants at least one head of keys and values a rank, of {}", m.kv_heads));
  const char* dtype = c.train.precision == Precision::kFp32   ? "float32"
                      : c.train.precision == Precision::kFp16 ? "float16"
                                                              : "bfloat16";
  account.require(
      c.train.precision == Precision::kFp32 || c.train.precision == Precision::kBf16 || c.train.precision == Precision::kFp16,
      "train.precision", "nanotron trains in fp32, bf16 and fp16");
  // Buckets are in MiB of what is reduced.
  const int64_t mib = asks_for_buckets(c) ? c.layout.bucket_bytes >> 20 : 25;
  account.require(!asks_for_buckets(c) || c.layout.bucket_bytes % (1 << 20) == 0, "layout.bucket_bytes",
                  "ddp_bucket_cap_mb is in whole MiB");
  return fmt::format(
      "model:\n  ddp_bucket_cap_mb: {}\n  dtype: {}\n  init_method:\n    std: {}\n  make_vocab_size_divisible_by: 1\n  "
      "model_config:\n"
      "    hidden_act: silu\n    hidden_size: {}\n    initializer_range: {}\n    intermediate_size: {}\n    is_llama_config: true\n"
      "    max_position_embeddings: {}\n    num_attention_heads: {}\n    num_hidden_layers: {}\n    num_key_value_heads: {}\n    "
      "rms_norm_eps: {}\n"
      "    rope_interleaved: false\n    rope_theta: {}\n    tie_word_embeddings: {}\n    vocab_size: {}\n",
      mib, dtype, yaml_number(m.init_deviation), m.hidden, yaml_number(m.init_deviation), m.ffn,
      std::max(m.max_positions, c.train.seq_len), m.heads, m.layers, m.kv_heads, yaml_number(m.norm_epsilon),
      yaml_number(m.rope_theta), m.tied_embeddings, m.vocab);
}

std::string nanotron_optimizer(Account& account) {
  const Case& c = account.of();
  const Train& t = c.train;
  account.say({"train.optimizer", "train.learning_rate.", "train.beta1", "train.beta2", "train.epsilon", "train.weight_decay",
               "train.clip_norm", "train.accumulate_dtype", "train.reduce_dtype", "layout.zero"});
  const LearningRate& lr = t.learning_rate;
  using Kind = LearningRate::Kind;
  // Decay begins behind the warm-up, or for warm-up, stable, decay that many steps before the end. A constant rate decays to itself.
  const int64_t decay = lr.kind == Kind::kConstant ? 0 : lr.kind == Kind::kWsd ? lr.decay_steps : lr.total_steps - lr.warmup_steps;
  const int64_t begin = lr.kind == Kind::kWsd ? lr.total_steps - lr.decay_steps : lr.warmup_steps;
  std::string text = fmt::format(
      "optimizer:\n  accumulate_grad_in_fp32: {}\n  clip_grad: {}\n  learning_rate_scheduler:\n    learning_rate: {}\n    "
      "lr_decay_starting_step: {}\n"
      "    lr_decay_steps: {}\n    lr_decay_style: {}\n    lr_warmup_steps: {}\n    lr_warmup_style: linear\n    min_decay_lr: "
      "{}\n  optimizer_factory:\n",
      t.accumulate_dtype.empty(), t.clip_norm > 0 ? yaml_number(t.clip_norm) : "null", yaml_number(lr.peak), begin,
      std::max<int64_t>(decay, 1), lr.kind == Kind::kCosine ? "cosine" : "linear", lr.warmup_steps,
      yaml_number(lr.kind == Kind::kConstant ? lr.peak : lr.floor));
  account.require(t.accumulate_dtype == t.reduce_dtype, "train.reduce_dtype",
                  "gradients are summed and reduced in one type there: set both");
  account.require(t.optimizer == Optimizer::kAdamW || t.optimizer == Optimizer::kSgd, "train.optimizer",
                  "nanotron has adamW and sgd");
  if (t.optimizer == Optimizer::kAdamW)
    text +=
        fmt::format("    adam_beta1: {}\n    adam_beta2: {}\n    adam_eps: {}\n    name: adamW\n    torch_adam_is_fused: true\n",
                    yaml_number(t.beta1), yaml_number(t.beta2), yaml_number(t.epsilon));
  else
    text += "    name: sgd\n";
  account.require(c.layout.zero <= 1, "layout.zero", "nanotron has zero 0 and 1");
  return text + fmt::format("  weight_decay: {}\n  zero_stage: {}\n", yaml_number(t.weight_decay), c.layout.zero);
}

std::string nanotron_parallelism(Account& account) {
  const Layout& l = account.of().layout;
  account.say({"layout.dp", "layout.tp", "layout.pp", "layout.schedule", "layout.stage_layers", "layout.cp",
               "layout.sequence_parallel", "layout.recompute", "layout.recompute_options.every", "layout.overlap",
               "layout.bucket_bytes"});
  account.require(l.pp == 1 || l.schedule == Schedule::k1F1B || l.schedule == Schedule::kAfab, "layout.schedule",
                  "nanotron has afab and 1f1b");
  account.require(l.stage_layers.empty(), "layout.stage_layers",
                  "nanotron deals layers out by their cost itself: leave stage_layers out");
  account.require(l.cp == 1, "layout.cp", "context parallelism is of nanotron's Qwen2 models only: set cp=1");
  account.require(l.overlap || l.dp == 1, "layout.overlap", "nanotron always overlaps: set overlap=true");
  account.require(l.recompute == Recompute::kNone || (l.recompute == Recompute::kFull && l.recompute_options.every == 1),
                  "layout.recompute", "recompute_layer is of every whole layer: take none or full");
  if (l.pp > 1) account.note("nanotron deals layers out to stages by its own estimate of their cost.");
  return fmt::format(
      "parallelism:\n  context_parallel_size: 1\n  dp: {}\n  expert_parallel_size: 1\n  pp: {}\n  pp_engine: {}\n  "
      "recompute_layer: {}\n  tp: {}\n"
      "  tp_linear_async_communication: {}\n  tp_mode: {}\n",
      l.dp, l.pp, l.schedule == Schedule::kAfab ? "afab" : "1f1b", l.recompute == Recompute::kFull, l.tp,
      l.tp > 1 && l.sequence_parallel, l.tp > 1 && l.sequence_parallel ? "REDUCE_SCATTER" : "ALL_REDUCE");
}

}  // namespace

void write_nanotron(Account& account, const ExportOptions& options, std::vector<File>& files) {
  const Case& c = account.of();
  const Train& t = c.train;
  account.say({"train.seq_len", "train.micro_batch", "train.grad_accumulation", "train.global_batch_tokens", "train.precision",
               "train.seed"});
  const int64_t steps = train_steps(c);
  std::string text = stamp(account, options);
  text += fmt::format(
      "checkpoints:\n  checkpoint_interval: {0}\n  checkpoints_path: checkpoints\ndata_stages:\n- data:\n    dataset: null\n    "
      "num_loading_workers: 1\n"
      "    seed: {1}\n  name: train\n  start_training_step: 1\ngeneral:\n  project: shardlab\n  run: run\n  seed: {1}\n",
      steps, t.seed);
  text += nanotron_model(account);
  text += nanotron_optimizer(account);
  text += nanotron_parallelism(account);
  text += fmt::format(
      "tokenizer: null\ntokens:\n  batch_accumulation_per_replica: {}\n  micro_batch_size: {}\n  sequence_length: {}\n  "
      "train_steps: {}\n",
      t.grad_accumulation, t.micro_batch, t.seq_len, steps);
  for (const std::string_view data : {"data.text", "data.tokens"})
    account.by_script(data, "data_stages[].data.dataset, which is null: random tokens");
  files.push_back({"config.yaml", std::move(text)});
  files.push_back(launch_script(account, options, "run_train.py", "--config-file \"$here/config.yaml\"",
                                "export CUDA_DEVICE_MAX_CONNECTIONS=1\n"));
}

}  // namespace shardlab::interop
