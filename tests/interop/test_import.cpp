// Imports: the way back, foreign files as people have them, and files that are wrong.
#include <fmt/format.h>

#include <map>
#include <set>

#include "interop/frameworks.h"
#include "interop/said.h"
#include "interop/toml.h"
#include "plan/keys.h"
#include "sweeps/models.h"
#include "sweeps/resolution.h"
#include "sweeps/sweep.h"
#include "tests/interop/cases.h"
#include "tests/namespaces.h"
#include "tests/test.h"

namespace shardlab::testing {
namespace {

using interop::import_file;
using interop::Imported;

Imported imported(std::string_view text, std::string_view framework, int64_t devices = 0) {
  const auto i = import_file(text, "file", framework, devices);
  INFO((i.ok() ? std::string() : to_string(i.error())));
  REQUIRE(i.ok());
  return *i;
}

std::string refused(std::string_view text, std::string_view framework, int64_t devices = 0) {
  const auto i = import_file(text, "file", framework, devices);
  REQUIRE_FALSE(i.ok());
  return to_string(i.error());
}

std::string value(const Imported& i, std::string_view path) {
  for (const auto& [p, v] : i.settings)
    if (p == path) return v;
  return "";
}

/// The file of an export that holds the settings.
std::string settings_file(const Case& c, std::string_view framework) {
  const auto e = interop::export_case(c, framework);
  INFO((e.ok() ? std::string() : to_string(e.error())));
  REQUIRE(e.ok());
  return e->files.front().text;
}

/// Keys that a framework's file cannot hold, or holds otherwise, and that are therefore not compared.
bool is_elsewhere(std::string_view path, std::string_view framework, const Case& c) {
  if (interop::is_inert(path, c)) return true;
  static const std::set<std::string_view> of_script = {
      "train.seq_len", "train.global_batch_tokens", "train.seed",       "train.dropout",
      "layout.pp",     "layout.schedule",           "layout.recompute", "layout.stage_layers"};
  if (framework == "deepspeed" && (of_script.contains(path) || path.starts_with("model."))) return true;
  static const std::set<std::string_view> own_choice = {"layout.fsdp.prefetch", "layout.bucket_bytes", "train.guard.nonfinite"};
  if (own_choice.contains(path)) return path != "layout.bucket_bytes" || !interop::asks_for_buckets(c);
  if (path == "model.init_deviation") return framework == "torchtitan";
  if (path == "train.dropout") return framework == "torchtitan";
  return path == "layout.stage_layers" && c.layout.pp == 1;
}

void require_round_trip(const Case& c, std::string_view framework) {
  const Imported back = imported(settings_file(c, framework), framework, c.layout.world_size());
  Case again;
  again.machine = c.machine;
  for (const auto& [path, text] : back.settings) {
    const CaseKey* key = find_key(path);
    INFO(path << "=" << text);
    REQUIRE(key != nullptr);
    REQUIRE(has_form(*key, text));
    REQUIRE(key->set(again, text));
  }
  for (const CaseKey& key : case_keys()) {
    if (key.get == nullptr || is_elsewhere(key.path, framework, c)) continue;
    INFO(framework << " " << key.path << "\n" << settings_file(c, framework));
    CHECK(key.get(again) == key.get(c));
  }
}

const std::string kWsd = "train: {learning_rate: {peak: 1e-3, kind: wsd, warmup_steps: 10, total_steps: 1000, decay_steps: 250}}\n";

TEST_CASE("what is exported reads back as the case") {
  for (const char* more :
       {"tp: 4\npp: 2\nvpp: 4\nschedule: interleaved\nsequence_parallel: true\nzero: 1\nrecompute: selective\nmicro_batch: "
        "1\nbucket_bytes: 64Mi\n",
        "tp: 8\nsequence_parallel: true\nzero: 0\nrecompute: full\nmicro_batch: 2\noverlap: false\n", "zero: 3\nmicro_batch: 1\n",
        "zero: 2\nmicro_batch: 1\ncp: 2\n",
        "zero: 1\nhybrid_shard: 4\nmicro_batch: 1\nreduce_dtype: bf16\naccumulate_dtype: bf16\n",
        "pp: 4\nschedule: 1f1b\nstage_layers: '9,9,9,5'\nmicro_batch: 1\n",
        "precision: fp8\nfp8_scaling: block\nzero: 1\noffload: {optimizer: cpu}\nmicro_batch: 1\n",
        "precision: fp16\nloss_scale: 1024\nmicro_batch: 1\noptimizer: sgd\n", "model.qkv_biases: true\nmicro_batch: 1\n",
        "model.qk_norm: true\nmicro_batch: 1\n",
        "precision: fp16\nloss_scale_start: 4096\nloss_scale_interval: 500\nmicro_batch: 1\nclip_norm: 1\ndropout: 0.1\n"}) {
    std::string text = more;
    const bool precise = text.find("precision:") != std::string::npos;
    const std::string head =
        "profile: megatron\nmodel: llama-3.1-8b\nmachine: {preset: hgx-h100-ndr, nodes: 2}\nseq_len: 8192\nglobal_batch_tokens: "
        "1Mi\n";
    require_round_trip(point_of(head + (precise ? "" : "precision: bf16\n") + text), "megatron");
  }
  for (const char* kind : {"cp_kind: zigzag\ncp: 2\n", "cp_kind: all-gather\ncp: 2\n", "cp_kind: ulysses\ncp: 2\n",
                           "cp_kind: usp\ncp: 4\ncp_ulysses: 2\n"})
    require_round_trip(llama("megatron", "zero: 1\nmicro_batch: 1\n" + std::string(kind)), "megatron");
  require_round_trip(point_of("profile: megatron\nmodel: gpt2\nmachine: h100\nseq_len: 1Ki\nglobal_batch_tokens: "
                              "64Ki\nmicro_batch: 4\nprecision: bf16\nmodel.vocab: 50304\n" +
                              kWsd),
                     "megatron");

  for (const char* more :
       {"zero: 0\nmicro_batch: 1\n", "zero: 1\nmicro_batch: 2\nbucket_bytes: 64Mi\n",
        "zero: 2\noffload: {optimizer: cpu}\nmicro_batch: 1\noverlap: false\n",
        "zero: 3\nhybrid_shard: 8\noffload: {optimizer: nvme, parameters: cpu}\nmicro_batch: 1\nrecompute: full\n",
        "tp: 4\nzero: 1\nmicro_batch: 1\nclip_norm: 1\n", "zero: 1\nmicro_batch: 1\noptimizer: lion\nweight_decay: 0.5\n",
        "zero: 0\nmicro_batch: 1\ntrain: {learning_rate: {peak: 1e-3, kind: cosine, warmup_steps: 10, total_steps: 1000, floor: "
        "1e-4}}\n",
        "zero: 0\nmicro_batch: 1\ntrain: {learning_rate: {peak: 1e-3, kind: linear, warmup_steps: 10, total_steps: 1000}}\n",
        "zero: 0\nmicro_batch: 1\ntrain: {learning_rate: {peak: 1e-3, warmup_steps: 10}, weight_decay: 0.1, beta2: 0.99}\n"})
    require_round_trip(llama("deepspeed", more), "deepspeed");

  for (const char* more : {"tp: 2\npp: 2\nschedule: 1f1b\nsequence_parallel: true\nzero: 3\nrecompute: full\nmicro_batch: 1\n",
                           "zero: 3\nhybrid_shard: 8\nrecompute: selective\nmicro_batch: 2\n",
                           "zero: 0\nmicro_batch: 1\nrecompute: full\nrecompute_options: {every: 2}\nclip_norm: 0.5\n",
                           "pp: 4\nvpp: 2\nschedule: interleaved\nzero: 0\nmicro_batch: 1\n",
                           "pp: 4\nschedule: 1f1b\nstage_layers: '9,9,9,5'\nzero: 0\nmicro_batch: 1\n",
                           "cp: 2\nzero: 3\nfsdp: {reshard: false}\nmicro_batch: 1\noffload: {optimizer: cpu, parameters: cpu}\n",
                           "zero: 3\nmicro_batch: 1\ntrain: {learning_rate: {peak: 1e-3, kind: wsd, warmup_steps: 10, total_steps: "
                           "1000, decay_steps: 250, floor: 1e-4}}\n"})
    require_round_trip(llama("torchtitan", more), "torchtitan");
}

/// A small mixture that says much of what a router has.
const std::string kMixture =
    "model: {inline: {family: llama, layers: 4, hidden: 64, heads: 4, kv_heads: 2, vocab: 256, ffn: 128, experts: 16, top_k: 4, "
    "moe_ffn: "
    "32, ";

TEST_CASE("mixtures of experts and latent attention that are exported read back as the case") {
  const std::string head = "machine: {preset: hgx-h100-ndr, nodes: 2}\nseq_len: 512\nglobal_batch_tokens: 64Ki\nprecision: bf16\n";
  for (const auto& [model, layout] :
       {std::pair{"balance_loss: 0.01, z_loss: 0.001}}\n", "ep: 8\nzero: 1\n"},
        {"normalise_weights: false, capacity_factor: 1.25}}\n", "ep: 4\ntp: 2\nsequence_parallel: true\n"},
        {"router: sigmoid, router_factor: 2.5, shared_experts: 2, dense_layers: 1, router_groups: 4, router_groups_chosen: 2, "
         "bias_update_rate: 0.001}}\n",
         "ep: 16\ntp: 2\nexpert_tp: 1\nsequence_parallel: true\nzero: 1\n"},
        {"moe_every: 2, norm_epsilon: 1e-6, kv_heads: 4, q_lora_rank: 24, kv_lora_rank: 16, qk_nope_head_dim: 16, "
         "qk_rope_head_dim: 8, "
         "v_head_dim: 16}}\n",
         "ep: 2\nzero: 1\n"}}) {
    std::string inline_model = kMixture + model;
    if (inline_model.find("kv_heads: 4") != std::string::npos) inline_model.replace(inline_model.find("kv_heads: 2, "), 13, "");
    require_round_trip(point_of("profile: megatron\n" + head + inline_model + layout), "megatron");
  }
  const std::string ranks =
      "profile: torchtitan\nmachine: {preset: hgx-h100-ndr, nodes: 4}\nseq_len: 4096\nglobal_batch_tokens: "
      "1Mi\nprecision: bf16\nmicro_batch: 1\nzero: 3\nmodel: {inline: {family: llama, ";
  for (const char* more :
       {"layers: 48, hidden: 2048, heads: 32, kv_heads: 4, head_dim: 128, ffn: 6144, vocab: 151936, qk_norm: true, norm_epsilon: "
        "1e-6, "
        "rope_theta: 1000000, experts: 128, top_k: 8, moe_ffn: 768}}\nep: 8\n",
        "layers: 27, hidden: 2048, heads: 16, ffn: 10944, vocab: 102400, kv_lora_rank: 512, qk_nope_head_dim: 128, "
        "qk_rope_head_dim: 64, "
        "v_head_dim: 128, experts: 64, top_k: 6, moe_ffn: 1408, normalise_weights: false, shared_experts: 2, dense_layers: 1, "
        "bias_update_rate: 0.001}}\ntp: 2\nsequence_parallel: true\nep: 8\nexpert_tp: 1\n"})
    require_round_trip(point_of(ranks + more), "torchtitan");
  require_round_trip(point_of("profile: deepspeed\nmodel: mixtral-8x7b\nmachine: {preset: hgx-h100-ndr, nodes: 2}\nseq_len: 4096\n"
                              "global_batch_tokens: 1Mi\nprecision: bf16\nmicro_batch: 1\nzero: 2\nep: 8\n"),
                     "deepspeed");
}

TEST_CASE("a case file is made of what was read, and loads") {
  const Case c = llama("megatron", "tp: 4\npp: 2\nschedule: 1f1b\nsequence_parallel: true\nzero: 1\nmicro_batch: 1\ndropout: 0\n");
  const Imported back = imported(settings_file(c, "megatron"), "megatron", 16);
  const Case again = point_of(interop::case_text(back, "profile: megatron\nmachine: {preset: hgx-h100-ndr, nodes: 2}\n"));
  REQUIRE(again.layout == c.layout);
  REQUIRE(again.train.micro_batch == c.train.micro_batch);
  REQUIRE(again.sequences_per_step() == c.sequences_per_step());
  REQUIRE(again.model.ffn == c.model.ffn);
}

TEST_CASE("the model's config.json reads back as the model") {
  for (const char* name : {"llama-3.1-8b", "gpt2", "tiny-llama", "tiny-gpt"}) {
    const auto model = sweeps::load_model(name);
    REQUIRE(model.ok());
    const auto again = sweeps::parse_model(interop::hugging_face_config(*model), model->name);
    INFO((again.ok() ? std::string() : to_string(again.error())));
    REQUIRE(again.ok());
    REQUIRE(*again == *model);
  }
}

TEST_CASE("a launch script with variables, arrays, comments and continued lines is read") {
  const Imported i = imported(R"(#!/bin/bash
GPUS_PER_NODE=8
NUM_NODES=4
TP=2   # tensor parallel
MODEL_ARGS=(
    --num-layers 96
    --hidden-size 12288 --num-attention-heads 96   # the 175B shape
    --attention-backend auto
    --seq-length 2048 --max-position-embeddings 2048
)
torchrun --nproc_per_node $GPUS_PER_NODE --nnodes ${NUM_NODES} pretrain_gpt.py ${MODEL_ARGS[@]} \
    --tensor-model-parallel-size "$TP" --pipeline-model-parallel-size=8 --num-layers-per-virtual-pipeline-stage 3 \
    --micro-batch-size 1 --global-batch-size 1536 --vocab-size 51200 --make-vocab-size-divisible-by 128 \
    --fp16 --lr 6.0e-5 --min-lr 6.0e-6 --lr-decay-style cosine --train-iters 500000 --use-distributed-optimizer --recompute-activations
)",
                              "megatron");
  REQUIRE(value(i, "layout.tp") == "2");
  REQUIRE(value(i, "layout.pp") == "8");
  REQUIRE(value(i, "layout.vpp") == "4");
  REQUIRE(value(i, "layout.schedule") == "interleaved");
  REQUIRE(value(i, "layout.dp") == "2");
  REQUIRE(value(i, "layout.zero") == "1");
  REQUIRE(value(i, "layout.recompute") == "selective");
  REQUIRE(value(i, "train.grad_accumulation") == "768");
  REQUIRE(value(i, "train.precision") == "fp16");
  REQUIRE(value(i, "train.clip_norm") == "1");  // Megatron-LM's default
  REQUIRE(value(i, "model.ffn") == "49152");
  REQUIRE(value(i, "train.learning_rate.total_steps") == "500000");
  REQUIRE(i.unread == std::vector<std::string>{"--attention-backend auto"});
}

/// Megatron-LM's Mixtral 8x7B, as a launch script says it.
constexpr std::string_view kMixtralScript = R"(#!/bin/bash
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS_PER_NODE=8
NNODES=${SLURM_NNODES:-"2"}
MODEL_ARGS=(
    --use-mcore-models --disable-bias-linear --seq-length 4096 --max-position-embeddings 32768
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
    --init-method-std 0.01 --attention-dropout 0.0 --hidden-dropout 0.0 --normalization RMSNorm
    --position-embedding-type rope --swiglu --untie-embeddings-and-output-weights
    --group-query-attention --num-query-groups 8 --no-masked-softmax-fusion --rotary-base 1000000
)
MOE_ARGS=(
    --num-experts 8 --moe-router-topk 2 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2
    --moe-grouped-gemm --moe-token-dispatcher-type alltoall --overlap-param-gather --overlap-grad-reduce
)
TRAINING_ARGS=(--micro-batch-size 1 --global-batch-size 256 --lr 1e-4 --train-iters 500000 --lr-decay-iters 320000
    --lr-decay-style cosine --min-lr 1.0e-5 --weight-decay 0.1 --lr-warmup-iters 500 --clip-grad 1.0 --bf16)
torchrun --nproc_per_node $GPUS_PER_NODE --nnodes 2 pretrain_gpt.py ${MODEL_ARGS[@]} ${MOE_ARGS[@]} ${TRAINING_ARGS[@]} \
    --vocab-size 32000 --tensor-model-parallel-size 1 --pipeline-model-parallel-size 2 --expert-model-parallel-size 8 \
    --use-distributed-optimizer --sequence-parallel
)";

TEST_CASE("Megatron-LM's Mixtral 8x7B is read with its experts, and loads") {
  const Imported i = imported(kMixtralScript, "megatron");
  const Case c = point_of(interop::case_text(i,
                                             "profile: megatron\nmode: simulate\nresolution: analytic\nmachine: {preset: "
                                             "hgx-h100-ndr, nodes: 2}\n"));
  const auto shipped = sweeps::load_model("mixtral-8x7b");
  REQUIRE(shipped.ok());
  Model model = c.model;
  model.name = shipped->name, model.max_positions = shipped->max_positions, model.init_deviation = shipped->init_deviation;
  Model expected = *shipped;
  expected.experts.balance = 0.01f, expected.norm_epsilon = model.norm_epsilon;
  REQUIRE(model == expected);
  REQUIRE(c.layout.ep == 8);
  REQUIRE(c.layout.dp == 8);
  REQUIRE(c.layout.expert_tp == 0);  // as tp
  REQUIRE(i.differs ==
          std::vector<std::string>{"--moe-router-load-balancing-type: aux_loss evens the experts out over a micro-batch "
                                   "there, and balance_loss over each sequence, as seq_aux_loss"});
}

/// DeepSeek-V3, as arguments for Megatron-LM say it.
constexpr std::string_view kDeepSeekArguments =
    "--num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 128 --kv-channels 128 --vocab-size 129280 "
    "--make-vocab-size-divisible-by 1 --seq-length 4096 --max-position-embeddings 4096 --normalization RMSNorm --norm-epsilon 1e-6 "
    "--swiglu --disable-bias-linear --untie-embeddings-and-output-weights --position-embedding-type rope --rotary-base 10000 "
    "--qk-layernorm --attention-dropout 0 --hidden-dropout 0 --multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 "
    "--qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128 --rotary-scaling-factor 40 --mscale 1.0 --mscale-all-dim 1.0 "
    "--num-experts 256 --moe-layer-freq ([0]*3+[1]*58) --moe-ffn-hidden-size 2048 --moe-shared-expert-intermediate-size 2048 "
    "--moe-router-load-balancing-type seq_aux_loss --moe-router-topk 8 --moe-router-pre-softmax --moe-grouped-gemm "
    "--moe-aux-loss-coeff 1e-4 --moe-router-group-topk 4 --moe-router-num-groups 8 --moe-router-topk-scaling-factor 2.5 "
    "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-bias-update-rate 1e-3 --moe-router-dtype "
    "fp32 "
    "--moe-permute-fusion --moe-token-dispatcher-type flex --moe-enable-deepep --tensor-model-parallel-size 1 "
    "--pipeline-model-parallel-size 16 --expert-model-parallel-size 64 --expert-tensor-parallel-size 1 --use-distributed-optimizer "
    "--micro-batch-size 1 --global-batch-size 8192 --bf16 --lr 1e-4 --lr-decay-style constant";

TEST_CASE("DeepSeek-V3's arguments for Megatron-LM are read with its router, its latent attention and its first layers") {
  const Imported i = imported(kDeepSeekArguments, "megatron", 1024);
  const Case c = point_of(interop::case_text(
      i, "profile: megatron\nmode: simulate\nresolution: analytic\nmachine: {preset: hgx-h100-ndr, nodes: 128}\n"));
  const auto shipped = sweeps::load_model("deepseek-v3");
  REQUIRE(shipped.ok());
  Model expected = *shipped;
  expected.name = c.model.name, expected.experts.balance = 1e-4f, expected.max_positions = c.model.max_positions;
  REQUIRE(c.model == expected);
  REQUIRE(c.layout.ep == 64);
  REQUIRE(c.layout.dp == 64);
  REQUIRE(i.differs ==
          std::vector<std::string>{"--rotary-scaling-factor: YaRN scales frequencies and attention by 40; nothing is scaled here"});
  REQUIRE(i.unread.empty());
}

TEST_CASE("settings of experts for Megatron-LM are set, refused by name, or said with what differs") {
  const std::string model =
      "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --vocab-size 256 --seq-length 128 --micro-batch-size 1 --swiglu "
      "--disable-bias-linear --normalization RMSNorm --position-embedding-type rope --moe-token-dispatcher-type alltoall "
      "--num-experts 16 --moe-ffn-hidden-size 32 ";
  const auto says = [&](const std::string& more, const char* path) { return value(imported(model + more, "megatron", 8), path); };
  const auto differs = [&](const std::string& more) {
    return fmt::format("{}", fmt::join(imported(model + more, "megatron", 8).differs, "\n"));
  };
  const auto why = [&](const std::string& more) { return refused(model + more, "megatron", 8); };
  REQUIRE(says("", "model.normalise_weights") == "true");  // a softmax of the chosen alone
  REQUIRE(says("--moe-router-pre-softmax", "model.normalise_weights") == "false");
  REQUIRE(says("--moe-router-score-function sigmoid --moe-router-topk 1", "model.normalise_weights") == "false");
  REQUIRE(says("--moe-router-score-function sigmoid", "model.normalise_weights") == "true");
  REQUIRE(says("--tensor-model-parallel-size 2 --expert-model-parallel-size 4", "layout.expert_tp").empty());  // as tp
  REQUIRE(says("--tensor-model-parallel-size 2 --expert-tensor-parallel-size 1 --expert-model-parallel-size 4",
               "layout.expert_tp") == "1");
  REQUIRE(says("--moe-layer-freq ([0]*2+[1]*2)", "model.dense_layers") == "2");
  REQUIRE(says("--moe-layer-freq '([0,1])*2'", "model.moe_every") == "2");
  REQUIRE(says("--moe-layer-freq [0,0,0,1]", "model.dense_layers") == "3");
  REQUIRE(says("--moe-layer-freq 1", "model.dense_layers").empty());
  REQUIRE(says("--moe-shared-expert-intermediate-size 64 --moe-shared-expert-gate", "model.shared_experts") == "2");
  REQUIRE(says("--moe-router-load-balancing-type seq_aux_loss none --moe-aux-loss-coeff 0.1 0.2", "model.balance_loss") == "0.1");
  REQUIRE(says("--moe-expert-capacity-factor -1", "model.capacity_factor").empty());
  REQUIRE(differs("--moe-expert-capacity-factor 1.25 --moe-pad-expert-input-to-capacity").find("drop the smallest weights") !=
          std::string::npos);
  REQUIRE(
      differs("--moe-router-num-groups 4 --moe-router-group-topk 2 --moe-router-topk 4").find("the sum of its 2 largest there") !=
      std::string::npos);
  REQUIRE(differs("--expert-model-parallel-size 2 --moe-token-dispatcher-type allgather").find("rows go to their experts") !=
          std::string::npos);
  for (const auto& [more, text] :
       {std::pair{"--moe-layer-freq 2",
                  "layers 1, 3, ... have experts there; of a case every moe_every-th layer has them: ([0]*1+[1])*2"},
        {"--moe-layer-freq ([0]*2+[1]*3)", "5 layers are listed, of 4"},
        {"--moe-layer-freq [1,0,0,0]", "a case has dense first layers"},
        {"--moe-layer-freq [0]*4", "a case has dense first layers"},
        {"--moe-layer-freq ((([1]*4", "neither a number nor a list"},
        {"--moe-router-load-balancing-type sinkhorn", "sinkhorn has no counterpart"},
        {"--moe-router-load-balancing-type aux_loss seq_aux_loss --moe-aux-loss-coeff 1 1", "one loss for even use"},
        {"--moe-shared-expert-intermediate-size 40", "40 is no multiple of an expert's width 32"},
        {"--moe-router-topk 1", "Megatron-LM asks for --moe-router-pre-softmax"},
        {"--moe-router-enable-expert-bias", "Megatron-LM asks for --moe-router-score-function sigmoid"},
        {"--moe-input-jitter-eps 0.1", "noise on the input of routers"},
        {"--multi-latent-attention", "add --qk-layernorm"},
        {"--mtp-num-layers 1", "predict further tokens"},
        {"--num-experts 0 --expert-model-parallel-size 2", "2 ranks share experts, and --num-experts says none"}}) {
    INFO(more << "\n" << why(more));
    CHECK(why(more).find(text) != std::string::npos);
  }
}

TEST_CASE("layers of stages are read as Megatron-LM deals them out") {
  const std::string model =
      "--num-layers 14 --hidden-size 64 --num-attention-heads 4 --vocab-size 256 --seq-length 128 --micro-batch-size 1 "
      "--pipeline-model-parallel-size 4 ";
  const auto stages = [&](const std::string& more) {
    const Imported i = imported(model + more, "megatron", 4);
    return fmt::format("{} {} {}", value(i, "layout.schedule"), value(i, "layout.vpp"), value(i, "layout.stage_layers"));
  };
  REQUIRE(stages("--pipeline-model-parallel-layout 'Et*4|t*4|(t*3|)*1tttL'") == "1f1b  ");  // 4, 4, 3, 3: as even as can be
  REQUIRE(stages("--pipeline-model-parallel-layout 'Etttt|(tttt|)*2ttL'") == "1f1b  4,4,4,2");
  REQUIRE(stages("--pipeline-model-parallel-layout 'Et|(tt|)*6tL'") == "interleaved 2 1,2,2,2,2,2,2,1");
  REQUIRE(stages("--decoder-first-pipeline-num-layers 3 --decoder-last-pipeline-num-layers 3") == "1f1b  3,4,4,3");
  REQUIRE(refused(model + "--decoder-first-pipeline-num-layers 3", "megatron", 4).find("do not share the other layers evenly") !=
          std::string::npos);
  REQUIRE(refused(model + "--pipeline-model-parallel-layout 'Et|t|m|L'", "megatron", 4).find("only E, t, L") != std::string::npos);
}

TEST_CASE("the launch script of an export says its framework, its settings and its ranks") {
  for (const interop::Framework& f : interop::frameworks()) {
    const Case c = llama("shardlab", "zero: 0\nmicro_batch: 1\n");
    const auto e = interop::export_case(c, f.id);
    REQUIRE(e.ok());
    const auto script = std::ranges::find(e->files, "launch.sh", &interop::File::name);
    REQUIRE(script != e->files.end());
    const auto launch = interop::launch_of(script->text);
    REQUIRE(launch);
    REQUIRE(launch->framework == f.id);
    REQUIRE(std::ranges::find(e->files, launch->settings, &interop::File::name) != e->files.end());
    REQUIRE(launch->devices == (f.id == "accelerate" ? 0 : 16));
    REQUIRE_FALSE(interop::launch_of(e->files.front().text));  // the settings have the stamp too
  }
  REQUIRE_FALSE(interop::launch_of("#!/bin/bash\ntorchrun train.py\n"));
}

TEST_CASE("what no case can say is refused by name; what does not matter is listed") {
  const std::string model =
      "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --vocab-size 256 --seq-length 128 --micro-batch-size 1 ";
  REQUIRE(refused(model + "--recompute-granularity full --recompute-method block --recompute-num-layers 2", "megatron")
              .find("--recompute-method") != std::string::npos);
  REQUIRE(refused(model + "--tensor-model-parallel-size ${TP}", "megatron").find("is not one value that stands in the file") !=
          std::string::npos);
  REQUIRE(refused(model + "--tensor-model-parallel-size 4", "megatron", 6).find("6 devices are not a multiple") !=
          std::string::npos);
  REQUIRE(refused(model + "--tensor-model-parallel-size -3", "megatron").find("`-3` is not a whole number of 1 or more") !=
          std::string::npos);
  REQUIRE(refused("hello", "megatron")
              .starts_with("file: none of --num-layers, --tensor-model-parallel-size, --micro-batch-size is given"));
  REQUIRE(refused("--tensor-model-paralel-size 2", "megatron").find("did you mean `--tensor-model-parallel-size`?") !=
          std::string::npos);
  REQUIRE(refused(model + "--qk-layernorm", "megatron").find("--qk-layernorm: gpt has no norms") != std::string::npos);
  REQUIRE(refused(model + "--global-batch-size 3", "megatron", 2)
              .find("--global-batch-size: 3 is not a multiple of micro-batch 1 * 2 data-parallel ranks = 2") != std::string::npos);

  const Imported auto_values = imported(
      R"({"train_batch_size": "auto", "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "bf16": {"enabled": true},
    "zero_optimization": {"stage": 3, "reduce_bucket_size": 5e8, "stage3_max_live_parameters": 1e9}, "steps_per_print": 100, "optimizer": {"type": "AdamW", "params": {"lr": "auto"}}})",
      "deepspeed", 8);
  REQUIRE(value(auto_values, "layout.dp") == "8");
  REQUIRE(value(auto_values, "layout.zero") == "3");
  REQUIRE(value(auto_values, "layout.overlap") == "true");
  REQUIRE(value(auto_values, "layout.bucket_bytes") == "1000000000");
  REQUIRE(value(auto_values, "train.grad_accumulation") == "2");
  REQUIRE(std::ranges::count(auto_values.unread, "steps_per_print") == 1);
  REQUIRE(refused(R"({"optimizer": {"type": "Lamb"}})", "deepspeed").find("`Lamb` has no counterpart") != std::string::npos);
  REQUIRE(refused(R"({"zero_optimization": {"stage": 4}})", "deepspeed").find("4 is not a stage") != std::string::npos);
  REQUIRE(refused("[1]", "deepspeed").starts_with("file: the file is a list"));
  REQUIRE(refused("7", "deepspeed").starts_with("file: the file is the single value 7"));
  REQUIRE(refused(" \n", "deepspeed").starts_with("file: the file is empty"));
  REQUIRE(refused("{\"a\":\n // c\n \"\u00e9\", }", "deepspeed").starts_with("file:3:7: not JSON: "));
  REQUIRE(refused("{\"a\": 1", "deepspeed").starts_with("file:1:8: not JSON: unexpected end of input; expected '}'"));
  REQUIRE(refused("{\n\"a\": \"b\n}", "deepspeed")
              .starts_with("file:2:8: not JSON: the string is not closed before the end of its line"));
  REQUIRE(
      refused("{\"a\": \"b", "deepspeed").starts_with("file:1:9: not JSON: the string is not closed before the end of its line"));
  REQUIRE(refused("{\"a\": 1e999}", "deepspeed").starts_with("file: a number of the file is too large"));
  REQUIRE(refused(std::string(100000, '['), "deepspeed").starts_with("file: nested more than 64 levels deep"));
  for (const char* wrong : {R"({"zero_optimization": false})", R"({"bf16": 3, "fp16": []})", R"({"optimizer": {"type": 3}})",
                            R"({"train_batch_size": {}})", R"({"scheduler": {"type": null}})"})
    (void)import_file(wrong, "file", "deepspeed");  // refused or not, in words

  REQUIRE(refused("[model]\nname = \"llama4\"\nflavor = \"17bx16e\"\n", "torchtitan", 8).find("is not known here") !=
          std::string::npos);
  const Imported few =
      imported("[model]\nname = \"deepseek_v3\"\nflavor = \"16B\"\n[parallelism]\nexpert_parallel_degree = 8\n", "torchtitan", 8);
  REQUIRE(value(few, "layout.ep") == "8");
  REQUIRE(value(few, "model.kv_lora_rank") == "512");
  REQUIRE(few.differs.size() == 1);
  const Imported folded = imported(
      R"({"tensor_parallel": {"autotp_size": 2}, "expert_parallel": {"enabled": true, "autoep_size": 4, "use_grouped_mm": true}})",
      "deepspeed", 8);
  REQUIRE(value(folded, "layout.ep") == "4");
  REQUIRE(value(folded, "layout.expert_tp") == "1");
  REQUIRE(
      refused(R"({"expert_parallel": {"enabled": true, "top_k": 2}})", "deepspeed", 8).find("expert_parallel.top_k: 2 in place") !=
      std::string::npos);
  REQUIRE(refused("[model]\nflavor = \"8B\"\n", "torchtitan").find("name --devices") != std::string::npos);
  const Imported defaults = imported("[model]\nflavor = \"8B\"\n[metrics]\nlog_freq = 10\n", "torchtitan", 8);
  REQUIRE(value(defaults, "layout.zero") == "3");
  REQUIRE(value(defaults, "train.micro_batch") == "8");
  REQUIRE(value(defaults, "train.seq_len") == "2048");
  REQUIRE(value(defaults, "layout.recompute") == "full");  // of every second layer: torchtitan's default
  REQUIRE(value(defaults, "layout.recompute_options.every") == "2");
  REQUIRE(defaults.unread == std::vector<std::string>{"metrics.log_freq"});
  REQUIRE(refused("a", "jax").find("are not read") != std::string::npos);
  REQUIRE(refused(std::string(2 << 20, ' '), "megatron").find("more than") != std::string::npos);
}

TEST_CASE("the batch of a DeepSpeed file follows from two of its three settings, as DeepSpeed has it") {
  const auto file = [](int sequences, int micro_batch, int accumulation) {
    std::string text = "{\"steps_per_print\": 1";
    if (sequences > 0) text += fmt::format(", \"train_batch_size\": {}", sequences);
    if (micro_batch > 0) text += fmt::format(", \"train_micro_batch_size_per_gpu\": {}", micro_batch);
    if (accumulation > 0) text += fmt::format(", \"gradient_accumulation_steps\": {}", accumulation);
    return text + "}";
  };
  const auto read = [&](int sequences, int micro_batch, int accumulation, int64_t devices) {
    const Imported i = imported(file(sequences, micro_batch, accumulation), "deepspeed", devices);
    return fmt::format("{} * {} * {}", value(i, "train.micro_batch"), value(i, "train.grad_accumulation"), value(i, "layout.dp"));
  };
  REQUIRE(read(32, 2, 2, 8) == "2 * 2 * 8");
  REQUIRE(read(32, 2, 0, 8) == "2 * 2 * 8");
  REQUIRE(read(32, 0, 2, 8) == "2 * 2 * 8");
  REQUIRE(read(0, 2, 2, 8) == "2 * 2 * 8");
  REQUIRE(read(32, 0, 0, 8) == "4 * 1 * 8");
  REQUIRE(read(0, 2, 0, 8) == "2 * 1 * 8");
  REQUIRE(read(0, 0, 2, 8) == "1 * 2 * 8");
  REQUIRE(read(32, 2, 2, 0) == "2 * 2 * 8");
  const auto refusal = [&](int sequences, int micro_batch, int accumulation, int64_t devices) {
    const std::string text = refused(file(sequences, micro_batch, accumulation), "deepspeed", devices);
    const size_t begin = text.find("train_batch_size: ");
    return begin == std::string::npos ? text : text.substr(begin, text.find('\n', begin) - begin);
  };
  const std::string micro = "train_micro_batch_size_per_gpu ", times = "gradient_accumulation_steps ";
  REQUIRE(refusal(7, 2, 2, 8) == "train_batch_size: 7 is not " + micro + "2 * " + times + "2 * 8 data-parallel ranks = 32");
  // A multiple of micro-batch and ranks, which another accumulation would explain: not the one that the file states.
  REQUIRE(refusal(16, 2, 2, 8) == "train_batch_size: 16 is not " + micro + "2 * " + times + "2 * 8 data-parallel ranks = 32");
  REQUIRE(refusal(10, 4, 0, 2) == "train_batch_size: 10 is not a multiple of " + micro + "4 * 2 data-parallel ranks = 8");
  REQUIRE(refusal(10, 0, 4, 2) == "train_batch_size: 10 is not a multiple of " + times + "4 * 2 data-parallel ranks = 8");
  REQUIRE(refusal(7, 0, 0, 8) == "train_batch_size: 7 is not a multiple of 8 data-parallel ranks = 8");
  REQUIRE(refusal(7, 2, 2, 0) == "train_batch_size: 7 is not a multiple of " + micro + "2 * " + times + "2 = 4");
}

TEST_CASE("TOML is read as it is defined, as far as it goes, and refused with its line") {
  const auto parsed = interop::parse_toml(
      "# c\na = 1_000 # c\n'q.r' = \"x\\\"y\"\n[t.u]\nb = [1, [2.5, 'z',],\n  # c\n  true]\nc.d = -3e2\ne = inf\n", "f");
  INFO((parsed.ok() ? std::string() : to_string(parsed.error())));
  REQUIRE(parsed.ok());
  std::map<std::string, interop::TomlValue> values;
  for (const interop::TomlEntry& e : *parsed) values[e.path] = e.value;
  REQUIRE(std::get<int64_t>(values["a"].value) == 1000);
  REQUIRE(std::get<std::string>(values["q.r"].value) == "x\"y");
  REQUIRE(std::get<interop::TomlValue::List>(values["t.u.b"].value).size() == 3);
  REQUIRE(std::get<double>(values["t.u.c.d"].value) == -300);
  REQUIRE(std::get<double>(values["t.u.e"].value) > 1e300);
  for (const char* bad : {"a", "a =", "a = 1 2", "a = [1", "a = \"x", "[t", "[[t]]", "a = {b = 1}", "a = 1\na = 2", "[t]\n[t]",
                          "a = \"\"\"x\"\"\"", "= 1", "a = 1e999", "a = x"}) {
    INFO(bad);
    const auto e = interop::parse_toml(bad, "f");
    REQUIRE_FALSE(e.ok());
    REQUIRE(e.error().where.starts_with("f:"));
  }
  const auto where = [](const char* bad) { return interop::parse_toml(bad, "f").error().where; };
  REQUIRE(where("[t\na = 1\n") == "f:1:3");
  REQUIRE(where("a = 1\n  b = 'x' c\n") == "f:2:11");
  REQUIRE(where("a = 1\n\n a = [\n2]\n") == "f:3:2");
  REQUIRE(where("\u00e4 = 1") == "f:1:1");
  REQUIRE(where("a = '\u00e4' x") == "f:1:9");
  REQUIRE_FALSE(interop::parse_toml("a = " + std::string(100000, '['), "f").ok());
}

}  // namespace
}  // namespace shardlab::testing
