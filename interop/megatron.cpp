// Megatron-LM core_v0.15.3: the arguments of pretrain_gpt.py. Every option was read in megatron/training/arguments.py of that version.
#include <fmt/format.h>

#include <cmath>

#include "interop/said.h"
#include "plan/pipeline_case.h"

namespace shardlab::interop {

namespace {

/// Options, one a line.
class Arguments {
 public:
  void flag(std::string_view name) { text_ += fmt::format("{}\n", name); }
  template <class T>
  void option(std::string_view name, const T& value) {
    text_ += fmt::format("{} {}\n", name, value);
  }
  std::string take() { return std::move(text_); }

 private:
  std::string text_;
};

/// Source: megatron/core/transformer/multi_latent_attention.py; rotary frequencies are plain, as here.
void add_latent(Account& account, Arguments& out) {
  const Model& m = account.of().model;
  out.flag("--multi-latent-attention");
  if (m.latent.q_rank > 0) out.option("--q-lora-rank", m.latent.q_rank);
  out.option("--kv-lora-rank", m.latent.kv_rank);
  out.option("--qk-head-dim", m.latent.nope);
  out.option("--qk-pos-emb-head-dim", m.latent.rope);
  out.option("--v-head-dim", m.latent.v);
  out.option("--rope-type", "rope");
  if (m.norm_epsilon != LatentAttention::kNormEpsilon)
    account.note("Compressed vectors are normalised with --norm-epsilon there, and with 1e-6 here.");
}

/// "([0]*3+[1]*58)": 1 for each layer with experts.
std::string layer_pattern(const Model& m) {
  std::string text;
  for (int64_t layer = 0; layer < m.layers;) {
    const bool mixture = m.is_mixture(layer);
    int64_t end = layer + 1;
    while (end < m.layers && m.is_mixture(end) == mixture) ++end;
    text += fmt::format("{}[{}]*{}", text.empty() ? "" : "+", mixture ? 1 : 0, end - layer);
    layer = end;
  }
  return fmt::format("'({})'", text);
}

/// The router and its experts. Source: megatron/core/transformer/moe/router.py and moe_utils.py.
void add_experts(Account& account, Arguments& out) {
  const Case& c = account.of();
  const Model& m = c.model;
  const Experts& e = m.experts;
  out.option("--num-experts", e.count);
  out.option("--moe-router-topk", e.top_k);
  out.option("--moe-ffn-hidden-size", e.ffn);
  out.option("--moe-layer-freq", layer_pattern(m));
  out.option("--moe-router-score-function", e.sigmoid ? "sigmoid" : "softmax");
  if (e.sigmoid)
    account.require(e.normalise == (e.top_k > 1), "model.normalise_weights",
                    "Megatron-LM divides weights of sigmoids by their sum where a token has several experts, and else never");
  else
    account.require(!e.normalise || e.top_k > 1, "model.normalise_weights",
                    "the softmax of one chosen expert is 1, which Megatron-LM refuses: set normalise_weights: false");
  if (!e.sigmoid && !e.normalise) out.flag("--moe-router-pre-softmax");
  if (e.factor != 1) out.option("--moe-router-topk-scaling-factor", e.factor);
  if (e.groups > 1) {
    account.require(e.groups == e.groups_chosen || e.top_k / e.groups_chosen == (e.sigmoid ? 2 : 1), "model.router_groups_chosen",
                    fmt::format("Megatron-LM scores a group by its top_k / router_groups_chosen largest: {} here, {} there",
                                e.sigmoid ? "2" : "1", e.top_k / e.groups_chosen));
    out.option("--moe-router-num-groups", e.groups);
    out.option("--moe-router-group-topk", e.groups_chosen);
  }
  out.option("--moe-router-load-balancing-type", e.balance > 0 ? "seq_aux_loss" : "none");
  if (e.balance > 0) out.option("--moe-aux-loss-coeff", e.balance);
  if (e.z_loss > 0) out.option("--moe-z-loss-coeff", e.z_loss);
  if (e.has_bias()) {
    account.require(e.sigmoid, "model.bias_update_rate", "biases of routers go with router: sigmoid there");
    out.flag("--moe-router-enable-expert-bias");
    out.option("--moe-router-bias-update-rate", e.bias_update_rate);
  }
  if (e.shared > 0) out.option("--moe-shared-expert-intermediate-size", e.shared * e.ffn);
  account.require(!e.shared_gate, "model.shared_gate", "Megatron-LM has no argument for a gate of shared experts in this version");
  if (e.drops()) {
    out.option("--moe-expert-capacity-factor", e.capacity_factor);
    out.option("--moe-token-drop-policy", "position");
    account.note("The tokens of a rank and micro-batch share the room of an expert there, and those of a sequence here.");
  }
  out.option("--moe-router-dtype", "fp32");
  out.flag("--moe-grouped-gemm");
  out.option("--moe-token-dispatcher-type", "alltoall");
  const Layout& l = c.layout;
  account.require(l.tp == 1 || l.sequence_parallel, "layout.sequence_parallel",
                  "experts with tp ask for --sequence-parallel there: set sequence_parallel=true");
  account.require(l.ep == 1 || c.train.precision != Precision::kFp16, "train.precision",
                  "Megatron-LM has no expert parallelism in fp16: set bf16");
}

void add_model(Account& account, Arguments& out) {
  const Model& m = account.of().model;
  const Train& t = account.of().train;
  account.say({"model."});
  out.option("--num-layers", m.layers);
  out.option("--hidden-size", m.hidden);
  out.option("--ffn-hidden-size", m.ffn);
  out.option("--num-attention-heads", m.heads);
  if (m.is_latent()) {
    add_latent(account, out);
  } else {
    out.option("--kv-channels", m.head_dim);
    if (m.kv_heads != m.heads) {
      out.flag("--group-query-attention");
      out.option("--num-query-groups", m.kv_heads);
    }
  }
  out.option("--max-position-embeddings", std::max(m.max_positions, t.seq_len));
  if (m.is_llama()) {
    account.require(m.rope_theta == std::floor(m.rope_theta), "model.rope_theta", "--rotary-base is a whole number");
    out.option("--position-embedding-type", "rope");
    out.option("--rotary-base", static_cast<int64_t>(m.rope_theta));
    out.option("--normalization", "RMSNorm");
    out.flag("--swiglu");
    out.flag("--disable-bias-linear");
    if (m.qkv_biases) out.flag("--add-qkv-bias");
    if (m.qk_norm || m.is_latent()) out.flag("--qk-layernorm");  // of the kind that --normalization names
  } else {
    out.option("--position-embedding-type", "learned_absolute");
    out.option("--normalization", "LayerNorm");
  }
  out.option("--norm-epsilon", m.norm_epsilon);
  if (!m.tied_embeddings) out.flag("--untie-embeddings-and-output-weights");
  out.option("--init-method-std", m.init_deviation);
  // The null tokenizer has one token more than it is told (its end of document), and the table is padded to a multiple of tp.
  account.require(m.vocab % account.of().layout.tp == 0, "model.vocab",
                  "Megatron-LM pads the vocabulary to a multiple of tp: pad model.vocab");
  out.option("--tokenizer-type", "NullTokenizer");
  out.option("--vocab-size", m.vocab - 1);
  out.option("--make-vocab-size-divisible-by", 1);
  if (m.is_mixture()) add_experts(account, out);
}

/// "Ettt|tttt|tL": layers of each stage, the embedding with the first and the loss with the last.
std::string pipeline_layout(const Case& c) {
  const std::vector<int> layers = layers_of_parts(c);
  std::string text = "E";
  for (size_t i = 0; i < layers.size(); ++i) text += (i > 0 ? "|" : "") + std::string(static_cast<size_t>(layers[i]), 't');
  return text + "L";
}

void add_pipeline(Account& account, Arguments& out) {
  const Case& c = account.of();
  const Layout& l = c.layout;
  account.say({"layout.pp", "layout.vpp", "layout.schedule", "layout.stage_layers"});
  out.option("--pipeline-model-parallel-size", l.pp);
  if (l.pp == 1) return;
  const bool interleaved = l.schedule == Schedule::kInterleaved;
  if (!interleaved && l.schedule != Schedule::k1F1B)
    return account.refuse("layout.schedule", "Megatron-LM has 1f1b and interleaved");
  if (!is_pipeline_decided(c)) return account.refuse("layout.stage_layers", "name the layers of each stage, as 3,4,4,1");
  const int parts = l.pp * (interleaved ? l.vpp : 1);
  if (l.stage_layers.empty() && c.model.layers % parts == 0) {
    if (interleaved) out.option("--num-virtual-stages-per-pipeline-rank", l.vpp);
  } else if (interleaved) {
    account.refuse("layout.stage_layers",
                   fmt::format("{} layers on {} interleaved parts: take a vpp that divides them", c.model.layers, parts));
  } else {
    out.option("--pipeline-model-parallel-layout", fmt::format("'{}'", pipeline_layout(c)));
  }
}

/// How the ranks of context parallelism attend. Sequences are dealt out in zigzag there, whatever the exchange
/// (megatron/core/utils.py, get_batch_on_this_cp_rank). Without a kind the framework has its own, p2p.
void add_context(Account& account, Arguments& out) {
  const Layout& l = account.of().layout;
  account.say({"layout.cp_kind"});
  if (l.cp_kind == ContextKind::kUsp) account.say({"layout.cp_ulysses"});
  out.option("--context-parallel-size", l.cp);
  switch (l.cp_kind) {
    case ContextKind::kNone: break;
    case ContextKind::kZigzag: out.option("--cp-comm-type", "p2p"); break;
    case ContextKind::kAllGather: out.option("--cp-comm-type", "all_gather"); break;
    case ContextKind::kUlysses: out.option("--cp-comm-type", "a2a"); break;
    case ContextKind::kUsp:
      out.option("--cp-comm-type", "a2a+p2p");
      out.option("--hierarchical-context-parallel-sizes", fmt::format("{} {}", l.head_ranks(), l.ring_ranks()));
      break;
    case ContextKind::kRing:
    case ContextKind::kStriped:
      account.refuse("layout.cp_kind", "Megatron-LM deals sequences out in zigzag: take zigzag, all-gather, ulysses or usp");
      break;
  }
}

/// Experts have a mesh of their own: ep * expert_tp ranks of dp * cp * tp share and cut them (megatron/core/parallel_state.py).
void add_expert_layout(Account& account, Arguments& out) {
  const Case& c = account.of();
  const Layout& l = c.layout;
  if (!c.model.is_mixture()) return account.require(l.ep == 1, "layout.ep", "the exported model has no experts");
  account.say({"layout.ep", "layout.expert_tp", "layout.expert_overlap"});
  out.option("--expert-model-parallel-size", l.ep);
  out.option("--expert-tensor-parallel-size", l.expert_slices());
  if (l.expert_overlap == ExpertOverlap::kLayer && c.model.experts.shared > 0)
    out.flag("--moe-shared-expert-overlap");
  else if (l.expert_overlap != ExpertOverlap::kNone)
    account.refuse("layout.expert_overlap",
                   "of the overlaps Megatron-LM's --moe-shared-expert-overlap is exported: layer, with shared experts");
}

void add_layout(Account& account, Arguments& out) {
  const Case& c = account.of();
  const Layout& l = c.layout;
  account.say({"layout.dp", "layout.tp", "layout.cp", "layout.sequence_parallel", "layout.tensor_overlap", "layout.zero",
               "layout.hybrid_shard", "layout.overlap", "layout.bucket_bytes", "layout.recompute", "layout.offload"});
  out.option("--tensor-model-parallel-size", l.tp);
  if (l.tp > 1 && l.sequence_parallel) out.flag("--sequence-parallel");
  if (l.tp > 1 && l.tensor_overlap) out.flag("--tp-comm-overlap");
  add_pipeline(account, out);
  add_context(account, out);
  add_expert_layout(account, out);
  const bool fsdp = l.zero >= 2;
  if (l.zero == 1) out.flag("--use-distributed-optimizer");
  if (fsdp) {
    account.require(l.pp == 1, "layout.zero", "Megatron-FSDP has no pipeline: take zero 1, or pp 1");
    out.flag("--use-megatron-fsdp");  // with what docs/source/api-guide/custom_fsdp.md sets beside it
    out.flag("--use-distributed-optimizer");
    out.flag("--no-gradient-accumulation-fusion");
    out.option("--data-parallel-sharding-strategy", l.zero == 2 ? "optim_grads" : "optim_grads_params");
    out.option("--ckpt-format", "fsdp_dtensor");
    if (l.zero == 3) {
      account.require(l.fsdp.unit == 1, "layout.fsdp.unit", "Megatron-FSDP gathers layer by layer: set fsdp.unit=1");
      account.require(l.fsdp.reshard, "layout.fsdp.reshard",
                      "parameters that stay after forward are zero=2 there: set fsdp.reshard=true");
      account.say({"layout.fsdp.prefetch"});  // the framework's own choice, of size and not of units
      account.note("Megatron-FSDP chooses by itself how far ahead it gathers; fsdp.prefetch says nothing there.");
    }
  }
  if (!is_inert("layout.hybrid_shard", c)) {
    account.require(l.zero == 1, "layout.hybrid_shard",
                    "copies of the shards go with zero=1 (--num-distributed-optimizer-instances)");
    out.option("--num-distributed-optimizer-instances", l.replicas());
  }
  if (l.overlap && l.dp > 1) {
    out.flag("--overlap-grad-reduce");
    if (l.zero > 0) out.flag("--overlap-param-gather");
  }
  if (asks_for_buckets(c)) {
    const int64_t width = c.train.reduce_dtype.empty() ? 4 : 2;
    account.require(!fsdp, "layout.bucket_bytes", "Megatron-FSDP reduces by layer: leave bucket_bytes at 0");
    out.option("--ddp-bucket-size", std::max<int64_t>(1, l.bucket_bytes / width));  // in parameters
  }
  switch (l.recompute) {
    case Recompute::kNone: break;
    case Recompute::kSelective:
      account.require(recomputes_attention_core(c), "layout.recompute", "by label only attn.core has a counterpart (core_attn)");
      out.option("--recompute-granularity", "selective");
      out.option("--recompute-modules", "core_attn");
      break;
    case Recompute::kFull:
      account.require(l.recompute_options.every == 1, "layout.recompute_options.every",
                      "Megatron-LM recomputes the first layers of a stage or all, not every k-th");
      out.option("--recompute-granularity", "full");
      out.option("--recompute-method", "uniform");
      out.option("--recompute-num-layers", 1);
      break;
    case Recompute::kByLayer:
      account.refuse("layout.recompute", "a choice for each layer cannot be said: take none, selective or full");
      break;
  }
  account.require(l.recompute_options.budget_bytes == 0, "layout.recompute_options.budget_bytes",
                  "recompute is chosen by a budget: name the choice");
  const bool host_optimizer = l.offload.optimizer == OffloadTo::kCpu;
  if (l.offload.optimizer == OffloadTo::kNvme || l.offload.parameters != OffloadTo::kNone ||
      l.offload.activations != OffloadTo::kNone)
    account.refuse("layout.offload", "of the three only optimizer: cpu is exported");
  if (host_optimizer) {
    account.require(l.zero == 1, "layout.zero", "--optimizer-cpu-offload goes with the distributed optimizer: set zero=1");
    out.flag("--optimizer-cpu-offload");
    out.option("--optimizer-offload-fraction", "1.0");
    out.flag("--use-precision-aware-optimizer");
  }
}

void add_precision(Account& account, Arguments& out) {
  const Train& t = account.of().train;
  account.say({"train.precision", "train.reduce_dtype", "train.accumulate_dtype", "train.loss_scale", "train.loss_scale_start",
               "train.loss_scale_interval", "train.fp8_scaling"});
  switch (t.precision) {
    case Precision::kFp32: break;
    case Precision::kBf16: out.flag("--bf16"); break;
    case Precision::kFp16: out.flag("--fp16"); break;
    case Precision::kFp8:
      out.flag("--bf16");
      out.option("--fp8-format", "hybrid");
      out.option("--fp8-recipe", t.fp8_scaling == Fp8Scaling::kDelayed ? "delayed"
                                 : t.fp8_scaling == Fp8Scaling::kBlock ? "blockwise"
                                                                       : "tensorwise");
      break;
    case Precision::kFp4: account.refuse("train.precision", "fp4 is not exported: take fp8 or bf16"); break;
  }
  if (t.precision == Precision::kFp16) {
    if (t.loss_scale > 0) {
      out.option("--loss-scale", t.loss_scale);
    } else {
      out.option("--initial-loss-scale", t.loss_scale_start);
      out.option("--loss-scale-window", t.loss_scale_interval);
    }
  }
  if (t.reduce_dtype == "bf16") {
    account.require(t.accumulate_dtype == "bf16", "train.accumulate_dtype",
                    "gradients are summed and reduced in one type there: set both");
    account.require(t.precision == Precision::kBf16 || t.precision == Precision::kFp8, "train.reduce_dtype",
                    "bf16 gradients go with bf16 products");
    out.flag("--grad-reduce-in-bf16");
  } else {
    account.require(t.reduce_dtype.empty(), "train.reduce_dtype", "gradients are reduced in fp32 or bf16");
    account.require(t.accumulate_dtype.empty(), "train.accumulate_dtype",
                    "gradients are summed and reduced in one type there: set both");
    if (t.precision != Precision::kFp32) out.flag("--accumulate-allreduce-grads-in-fp32");
  }
}

void add_training(Account& account, Arguments& out) {
  const Case& c = account.of();
  const Train& t = c.train;
  account.say({"train.seq_len", "train.micro_batch", "train.grad_accumulation", "train.global_batch_tokens", "train.optimizer",
               "train.learning_rate.", "train.weight_decay", "train.beta1", "train.beta2", "train.epsilon", "train.clip_norm",
               "train.dropout", "train.seed", "train.guard.nonfinite"});
  out.option("--seq-length", t.seq_len);
  out.option("--micro-batch-size", t.micro_batch);
  out.option("--global-batch-size", c.sequences_per_step());
  out.option("--train-iters", train_steps(c));
  add_precision(account, out);
  account.require(t.optimizer == Optimizer::kAdamW || t.optimizer == Optimizer::kSgd, "train.optimizer",
                  "Megatron-LM has adam and sgd");
  if (t.optimizer == Optimizer::kAdamW) {
    out.option("--optimizer", "adam");  // decoupled weight decay is its default
    out.option("--adam-beta1", t.beta1);
    out.option("--adam-beta2", t.beta2);
    out.option("--adam-eps", t.epsilon);
  } else {
    out.option("--optimizer", "sgd");
    out.option("--sgd-momentum", "0.0");
  }
  out.option("--weight-decay", t.weight_decay);
  const LearningRate& lr = t.learning_rate;
  using Kind = LearningRate::Kind;
  out.option("--lr", lr.peak);
  out.option("--lr-decay-style", lr.kind == Kind::kConstant ? "constant"
                                 : lr.kind == Kind::kCosine ? "cosine"
                                 : lr.kind == Kind::kLinear ? "linear"
                                                            : "WSD");
  out.option("--lr-warmup-iters", lr.warmup_steps);
  if (lr.kind != Kind::kConstant) {
    out.option("--lr-decay-iters", lr.total_steps);
    out.option("--min-lr", lr.floor);
  }
  if (lr.kind == Kind::kWsd) {
    out.option("--lr-wsd-decay-style", "linear");
    out.option("--lr-wsd-decay-iters", lr.decay_steps);
  }
  out.option("--clip-grad", t.clip_norm);  // 0: never
  out.option("--attention-dropout", t.dropout);
  out.option("--hidden-dropout", t.dropout);
  out.option("--seed", t.seed);
  account.require(t.guard.nonfinite != GuardAction::kSkip, "train.guard.nonfinite",
                  "Megatron-LM ends the run at such a gradient: set stop");
  if (t.guard.nonfinite == GuardAction::kNone && t.precision != Precision::kFp16) out.flag("--no-check-for-nan-in-loss-and-grad");
}

}  // namespace

void write_megatron(Account& account, const ExportOptions& options, std::vector<File>& files) {
  Arguments out;
  add_model(account, out);
  add_layout(account, out);
  add_training(account, out);
  for (const std::string_view data : {"data.text", "data.tokens"})
    account.by_script(data, "replace --mock-data in arguments.txt by --data-path, of data prepared with tools/preprocess_data.py");
  out.flag("--mock-data");
  files.push_back({"arguments.txt", stamp(account, options) + out.take()});
  // Tensor and context parallelism before Blackwell want one connection, Megatron-FSDP wants more.
  const bool fsdp = account.of().layout.zero >= 2;
  files.push_back(launch_script(account, options, "pretrain_gpt.py",
                                "$(grep -v '^#' \"$here/arguments.txt\" | tr '\\n' ' ' | tr -d \"'\")",
                                std::string("set -f  # words of arguments.txt are no patterns of file names\n") +
                                    (fsdp ? "unset CUDA_DEVICE_MAX_CONNECTIONS\n" : "export CUDA_DEVICE_MAX_CONNECTIONS=1\n")));
}

}  // namespace shardlab::interop
