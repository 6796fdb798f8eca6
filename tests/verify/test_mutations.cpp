// The mutation score over hand-written plans and over what the strategies make.
#include <fmt/format.h>

#include <span>

#include "plan/text.h"
#include "strategies/lower.h"
#include "strategies/warm_up.h"
#include "tests/deal.h"
#include "tests/namespaces.h"
#include "tests/test.h"
#include "tests/verify/exam.h"
#include "tests/verify/good_plans.h"
#include "tests/verify/mutations.h"

namespace shardlab::testing {
namespace {

/// What a plan of the strategies is made of; everything else is alike.
struct Mix {
  const char* name;
  Family family = Family::kGpt;
  bool tied = true;
  int dp = 1, tp = 1, pp = 1;
  Schedule schedule = Schedule::kNone;
  int accumulation = 1;
  int zero = 0;
  int hybrid = 0;
  int64_t bucket_bytes = 0;
  bool recompute = false, selective = false, canonical = false, grad_norm = false;
  float dropout = 0;
  Optimizer optimizer = Optimizer::kAdamW;
  float clip_norm = 0;
  Precision precision = Precision::kFp32;
  int layers = 2;
  Offload offload;
  Compression compression = {};
  bool guarded = false;
  int every = 1;
  const char* by_layer = nullptr;
  bool served = false;
  int staleness = -1;
  Diloco diloco = {};
  Fp8Scaling fp8_scaling = Fp8Scaling::kCurrent;
  ZeroPlusPlus zero_plus_plus = {};
  bool sequence_parallel = false, tensor_overlap = false;
  int64_t micro_batch = 1;
  int cp = 1;
  ContextKind cp_kind = ContextKind::kNone;
  int64_t kv_heads = 2;
  int loss_chunks = 1;
  int cp_ulysses = 0;
  bool packed = false;
  Experts experts = {};
  ExpertOverlap expert_overlap = ExpertOverlap::kNone;
  float expert_bound = 0;
  int ep = 1;
  int expert_tp = 0;
  const char* expert_placement = "";
  int64_t post_validation = 0;
  bool qk_norm = false;
  float ema_decay = 0;
  bool qkv_biases = false;
  LatentAttention latent = {};
  SlidingWindow window = {};
};

Case case_of(const Mix& mix) {
  Case c;
  c.name = mix.name;
  c.model = {.name = "tiny",
             .family = mix.family,
             .layers = mix.layers,
             .hidden = 16,
             .heads = std::max<int64_t>(2, mix.tp),
             .kv_heads = mix.kv_heads,
             .head_dim = 8,
             .ffn = 32,
             .vocab = 32,
             .max_positions = 16,
             .tied_embeddings = mix.tied};
  c.layout.dp = mix.dp;
  c.layout.tp = mix.tp;
  c.layout.sequence_parallel = mix.sequence_parallel;
  c.layout.tensor_overlap = mix.tensor_overlap;
  c.layout.cp = mix.cp;
  c.layout.cp_kind = mix.cp_kind;
  c.layout.pp = mix.pp;
  c.layout.zero = mix.zero;
  c.layout.hybrid_shard = mix.hybrid;
  c.layout.schedule = mix.schedule;
  if (is_looped(mix.schedule)) c.layout.vpp = 2;
  c.layout.bucket_bytes = mix.bucket_bytes;
  c.layout.offload = mix.offload;
  c.layout.recompute = mix.recompute ? Recompute::kFull : mix.selective ? Recompute::kSelective : Recompute::kNone;
  if (mix.selective) c.layout.recompute_options.modules = "attn.norm attn.core mlp.norm mlp.act";
  c.train.seq_len = 8;
  c.train.micro_batch = mix.micro_batch;
  c.train.grad_accumulation = mix.accumulation;
  c.train.global_batch_tokens = 8 * mix.micro_batch * mix.accumulation * mix.dp;
  c.train.optimizer = mix.optimizer;
  c.train.grad_norm = mix.grad_norm;
  c.train.dropout = mix.dropout;
  c.train.clip_norm = mix.clip_norm;
  c.train.ema_decay = mix.ema_decay;
  c.train.precision = mix.precision;
  c.train.fp8_scaling = mix.fp8_scaling;
  c.layout.compression = mix.compression;
  c.canonical = mix.canonical;
  if (mix.guarded) c.train.guard.spike = GuardAction::kSkip;
  if (mix.guarded && c.train.precision != Precision::kFp16) c.train.guard.nonfinite = GuardAction::kStop;
  c.layout.recompute_options.every = mix.every;
  if (mix.by_layer != nullptr) c.layout.recompute = Recompute::kByLayer, c.layout.recompute_options.layers = mix.by_layer;
  if (mix.served) c.layout.parameter_server = {.servers = mix.dp, .staleness = mix.staleness};
  c.layout.diloco = mix.diloco;
  c.layout.zero_plus_plus = mix.zero_plus_plus;
  c.layout.loss_chunks = mix.loss_chunks;
  c.layout.cp_ulysses = mix.cp_ulysses;
  c.data.packed = mix.packed;
  c.model.experts = mix.experts;
  c.layout.expert_overlap = mix.expert_overlap;
  c.model.qk_norm = mix.qk_norm;
  c.model.qkv_biases = mix.qkv_biases;
  c.model.latent = mix.latent;
  c.model.window = mix.window;
  if (c.model.is_latent()) c.model.head_dim = mix.latent.nope + mix.latent.rope;
  c.layout.expert_bound = mix.expert_bound;
  c.layout.ep = mix.ep;
  c.layout.expert_tp = mix.expert_tp;
  c.layout.expert_placement = mix.expert_placement;
  c.train.post_validation = mix.post_validation;
  return c;
}

std::vector<Plan> lowered(std::span<const Mix> mixes) {
  std::vector<Plan> plans;
  for (const Mix& mix : mixes) {
    INFO(mix.name);
    auto plan = lower(case_of(mix));
    if (!plan.ok()) FAIL(to_string(plan.error()));
    plans.push_back(std::move(plan).value());
    plans.back().name = mix.name;
  }
  return plans;
}

std::vector<Plan> lowered_plans() {
  const Mix mixes[] = {
      {.name = "dp2", .dp = 2, .accumulation = 2},
      {.name = "dp2 bucketed", .dp = 2, .bucket_bytes = 4096},
      {.name = "dp2 zero1", .dp = 2, .accumulation = 2, .zero = 1, .bucket_bytes = 4096},
      {.name = "tp2 llama", .family = Family::kLlama, .tied = false, .tp = 2, .optimizer = Optimizer::kSgd},
      {.name = "tp2 sequence parallel", .tp = 2, .accumulation = 2, .sequence_parallel = true, .micro_batch = 2},
      {.name = "llama tp2 sequence parallel, recompute, zero2",
       .family = Family::kLlama,
       .tied = false,
       .dp = 2,
       .tp = 2,
       .zero = 2,
       .bucket_bytes = 4096,
       .recompute = true,
       .dropout = 0.1f,
       .sequence_parallel = true},
      {.name = "fp16 tp2 pp2 sequence parallel, clipped",
       .tp = 2,
       .pp = 2,
       .schedule = Schedule::k1F1B,
       .accumulation = 2,
       .clip_norm = 1,
       .precision = Precision::kFp16,
       .sequence_parallel = true},
      {.name = "pp2 1f1b tied", .pp = 2, .schedule = Schedule::k1F1B, .accumulation = 4},
      {.name = "pp2 afab untied", .tied = false, .pp = 2, .schedule = Schedule::kAfab, .accumulation = 2, .grad_norm = true},
      {.name = "dp2 tp2 pp2", .dp = 2, .tp = 2, .pp = 2, .schedule = Schedule::k1F1B, .accumulation = 2},
      {.name = "dp2 tp2 pp2 zero1 recompute",
       .dp = 2,
       .tp = 2,
       .pp = 2,
       .schedule = Schedule::k1F1B,
       .accumulation = 2,
       .zero = 1,
       .bucket_bytes = 8192,
       .recompute = true},
      {.name = "dp2 zero2", .dp = 2, .accumulation = 3, .zero = 2, .bucket_bytes = 4096},
      {.name = "dp2 zero3 norm", .tied = false, .dp = 2, .accumulation = 2, .zero = 3, .grad_norm = true},
      {.name = "dp4 hybrid zero3 tied", .dp = 4, .tp = 2, .zero = 3, .hybrid = 2, .recompute = true},
      {.name = "dp2 zero2 canonical pp2",
       .dp = 2,
       .pp = 2,
       .schedule = Schedule::k1F1B,
       .accumulation = 4,
       .zero = 2,
       .canonical = true},
      {.name = "tp2 selective", .tied = false, .tp = 2, .accumulation = 2, .selective = true},
      {.name = "gpt recompute dropout", .accumulation = 2, .recompute = true, .grad_norm = true, .dropout = 0.1f},
      {.name = "llama recompute dropout", .family = Family::kLlama, .tied = false, .tp = 2, .recompute = true, .dropout = 0.1f},
      {.name = "llama pp2 dropout",
       .family = Family::kLlama,
       .pp = 2,
       .schedule = Schedule::kAfab,
       .accumulation = 2,
       .dropout = 0.1f},
      {.name = "clipped dp2 tp2 pp2 tied", .dp = 2, .tp = 2, .pp = 2, .schedule = Schedule::k1F1B, .zero = 1, .clip_norm = 1},
      {.name = "bf16 dp2 tied", .dp = 2, .accumulation = 2, .bucket_bytes = 4096, .precision = Precision::kBf16},
      {.name = "bf16 dp2 zero1 clipped", .dp = 2, .accumulation = 2, .zero = 1, .clip_norm = 1, .precision = Precision::kBf16},
      {.name = "lion dp2 zero1", .dp = 2, .zero = 1, .optimizer = Optimizer::kLion},
      {.name = "adamw8bit tp2", .tp = 2, .optimizer = Optimizer::kAdamW8bit},
      {.name = "bf16 dp2 zero2 adamw8bit", .dp = 2, .zero = 2, .optimizer = Optimizer::kAdamW8bit, .precision = Precision::kBf16},
      {.name = "bf16 dp2 zero3 sgd", .dp = 2, .zero = 3, .optimizer = Optimizer::kSgd, .precision = Precision::kBf16},
      {.name = "activations offloaded", .accumulation = 2, .layers = 3, .offload = {.activations = OffloadTo::kCpu}},
      {.name = "activations offloaded, zero2",
       .tied = false,
       .dp = 2,
       .zero = 2,
       .recompute = true,
       .layers = 3,
       .offload = {.activations = OffloadTo::kCpu}},
      {.name = "optimizer offloaded", .accumulation = 2, .bucket_bytes = 4096, .offload = {.optimizer = OffloadTo::kCpu}},
      {.name = "optimizer offloaded, bf16 dp2 zero1",
       .tied = false,
       .dp = 2,
       .zero = 1,
       .bucket_bytes = 4096,
       .precision = Precision::kBf16,
       .offload = {.optimizer = OffloadTo::kCpu}},
      {.name = "layer by layer, zero1",
       .tied = false,
       .dp = 2,
       .zero = 1,
       .layers = 3,
       .by_layer = "1*full@cpu 1*attn.norm+mlp.act 1*none"},
      {.name = "averaged weights, bf16 dp2 zero1 pp2",
       .dp = 2,
       .pp = 2,
       .schedule = Schedule::k1F1B,
       .accumulation = 2,
       .zero = 1,
       .precision = Precision::kBf16,
       .guarded = true,
       .ema_decay = 0.9f},
      {.name = "int8 dp2 tp2",
       .dp = 2,
       .tp = 2,
       .accumulation = 2,
       .bucket_bytes = 4096,
       .compression = {.kind = CompressionKind::kInt8}},
      {.name = "bf16 on the wire dp4", .dp = 4, .compression = {.kind = CompressionKind::kBf16}},
      {.name = "top-k dp2 clipped",
       .dp = 2,
       .bucket_bytes = 4096,
       .clip_norm = 1,
       .compression = {.kind = CompressionKind::kTopK, .k = 0.1}},
      {.name = "powersgd dp2",
       .tied = false,
       .dp = 2,
       .accumulation = 2,
       .compression = {.kind = CompressionKind::kPowerSgd, .rank = 2}},
      {.name = "one-bit-adam dp2",
       .dp = 2,
       .accumulation = 2,
       .bucket_bytes = 4096,
       .compression = {.kind = CompressionKind::kOneBitAdam, .warmup = 3}},
      {.name = "one-bit-adam dp2 pp2 bf16",
       .tied = false,
       .dp = 2,
       .pp = 2,
       .schedule = Schedule::k1F1B,
       .accumulation = 2,
       .precision = Precision::kBf16,
       .compression = {.kind = CompressionKind::kOneBitAdam, .warmup = 3}},
      {.name = "one-bit-adam dp2 warming up",
       .dp = 2,
       .bucket_bytes = 4096,
       .compression = {.kind = CompressionKind::kOneBitAdam, .warmup = kNeverFrozen}},
      {.name = "random-k dp2 pp2",
       .tied = false,
       .dp = 2,
       .pp = 2,
       .schedule = Schedule::k1F1B,
       .compression = {.kind = CompressionKind::kRandomK, .k = 0.1}},
      {.name = "fp16 tp2 pp2 tied clipped",
       .tp = 2,
       .pp = 2,
       .schedule = Schedule::k1F1B,
       .accumulation = 2,
       .clip_norm = 1,
       .precision = Precision::kFp16},
      {.name = "fp16 dp2 zero2 guarded", .dp = 2, .accumulation = 2, .zero = 2, .precision = Precision::kFp16, .guarded = true},
      {.name = "guarded dp2 pp2", .dp = 2, .pp = 2, .schedule = Schedule::kAfab, .zero = 1, .guarded = true},
      {.name = "tp2 every second layer again", .tp = 2, .accumulation = 2, .recompute = true, .every = 2},
      {.name = "served dp2 tp2 clipped", .dp = 2, .tp = 2, .accumulation = 2, .bucket_bytes = 4096, .clip_norm = 1, .served = true},
      {.name = "served apart, bf16 dp2",
       .tied = false,
       .dp = 2,
       .bucket_bytes = 4096,
       .precision = Precision::kBf16,
       .served = true,
       .staleness = 1},
      {.name = "optimizer's states on nvme, dp2 zero2",
       .dp = 2,
       .accumulation = 2,
       .zero = 2,
       .bucket_bytes = 8192,
       .offload = {.optimizer = OffloadTo::kNvme}},
      {.name = "local sgd dp2 tp2",
       .tied = false,
       .dp = 2,
       .tp = 2,
       .optimizer = Optimizer::kSgd,
       .clip_norm = 1,
       .diloco = {.steps = 2}},
      {.name = "diloco bf16 dp2 pp2",
       .dp = 2,
       .pp = 2,
       .schedule = Schedule::k1F1B,
       .accumulation = 2,
       .precision = Precision::kBf16,
       .diloco = {.steps = 2, .learning_rate = 0.7f, .momentum = 0.9f}},
      {.name = "fp8 tp2 sequence parallel", .tp = 2, .precision = Precision::kFp8, .sequence_parallel = true},
      {.name = "fp8 dp2 tp2", .dp = 2, .tp = 2, .accumulation = 2, .precision = Precision::kFp8},
      {.name = "fp8 recompute", .family = Family::kLlama, .tied = false, .tp = 2, .recompute = true, .precision = Precision::kFp8},
      {.name = "fp8 delayed dp2 tp2 pp2",
       .tied = false,
       .dp = 2,
       .tp = 2,
       .pp = 2,
       .schedule = Schedule::k1F1B,
       .accumulation = 2,
       .precision = Precision::kFp8,
       .fp8_scaling = Fp8Scaling::kDelayed},
      {.name = "fp8 blocks zero3 selective",
       .family = Family::kLlama,
       .tied = false,
       .dp = 2,
       .zero = 3,
       .selective = true,
       .precision = Precision::kFp8,
       .fp8_scaling = Fp8Scaling::kBlock},
      {.name = "optimizer offloaded, clipped, dp2 zero1 tp2",
       .dp = 2,
       .tp = 2,
       .zero = 1,
       .bucket_bytes = 8192,
       .clip_norm = 1,
       .offload = {.optimizer = OffloadTo::kCpu}},
      {.name = "delayed update, bf16 dp2 zero1",
       .tied = false,
       .dp = 2,
       .accumulation = 2,
       .zero = 1,
       .bucket_bytes = 4096,
       .precision = Precision::kBf16,
       .offload = {.optimizer = OffloadTo::kCpu, .delayed_update = true}},
      {.name = "delayed update, clipped, dp2 tp2 pp2 tied",
       .dp = 2,
       .tp = 2,
       .pp = 2,
       .schedule = Schedule::k1F1B,
       .accumulation = 2,
       .bucket_bytes = 8192,
       .clip_norm = 1,
       .offload = {.optimizer = OffloadTo::kCpu, .delayed_update = true}},
      {.name = "activations on nvme", .recompute = true, .layers = 4, .offload = {.activations = OffloadTo::kNvme}},
      {.name = "parameters on the host, dp2",
       .dp = 2,
       .accumulation = 2,
       .zero = 3,
       .precision = Precision::kBf16,
       .offload = {.optimizer = OffloadTo::kCpu, .parameters = OffloadTo::kCpu}},
      {.name = "parameters and states on nvme",
       .tied = false,
       .accumulation = 2,
       .zero = 3,
       .offload = {.optimizer = OffloadTo::kNvme, .parameters = OffloadTo::kNvme}},
      {.name = "canonical accumulation", .dp = 2, .accumulation = 4, .canonical = true},
      {.name = "int8 dp2 zero2 tied pp2",
       .dp = 2,
       .pp = 2,
       .schedule = Schedule::k1F1B,
       .accumulation = 2,
       .zero = 2,
       .bucket_bytes = 4096,
       .compression = {.kind = CompressionKind::kInt8}},
      {.name = "zero++ weights and gradients tp2",
       .dp = 2,
       .tp = 2,
       .accumulation = 2,
       .zero = 3,
       .layers = 3,
       .zero_plus_plus = {.weights = true, .gradients = true}},
      {.name = "zero++ secondary shard",
       .tied = false,
       .dp = 4,
       .accumulation = 2,
       .zero = 3,
       .layers = 3,
       .zero_plus_plus = {.secondary = 2}},
      {.name = "zero++ pp2 tied bf16",
       .dp = 4,
       .pp = 2,
       .schedule = Schedule::k1F1B,
       .accumulation = 2,
       .zero = 3,
       .precision = Precision::kBf16,
       .layers = 5,
       .zero_plus_plus = {.weights = true, .secondary = 2, .gradients = true}},
  };
  return lowered(mixes);
}

/// Every schedule whose parts or pieces are more than a stage's forward and backward, alone and with what shards, remakes or parks.
std::vector<Plan> pipelined_plans() {
  constexpr Offload kParked{.activations = OffloadTo::kCpu};
  const Mix mixes[] = {
      {.name = "naive", .pp = 2, .schedule = Schedule::kNaive, .accumulation = 2},
      {.name = "interleaved, tied, clipped",
       .pp = 2,
       .schedule = Schedule::kInterleaved,
       .accumulation = 3,
       .clip_norm = 1,
       .layers = 4},
      {.name = "interleaved zero3 dp2",
       .tied = false,
       .dp = 2,
       .pp = 2,
       .schedule = Schedule::kInterleaved,
       .accumulation = 2,
       .zero = 3,
       .layers = 4},
      {.name = "breadth-first dp2",
       .dp = 2,
       .pp = 2,
       .schedule = Schedule::kBreadthFirst,
       .accumulation = 2,
       .bucket_bytes = 4096,
       .layers = 4},
      {.name = "zb-h2 post-validated zero1 dp2",
       .tied = false,
       .dp = 2,
       .pp = 2,
       .schedule = Schedule::kZbH2,
       .accumulation = 2,
       .zero = 1,
       .bucket_bytes = 4096,
       .clip_norm = 1,
       .post_validation = 2},
      {.name = "zb-h1, tied", .pp = 3, .schedule = Schedule::kZbH1, .accumulation = 4, .layers = 3},
      {.name = "zb-h1 zero2 dp2", .tied = false, .dp = 2, .pp = 2, .schedule = Schedule::kZbH1, .accumulation = 3, .zero = 2},
      {.name = "zb-h2 recompute",
       .family = Family::kLlama,
       .tied = false,
       .pp = 2,
       .schedule = Schedule::kZbH2,
       .accumulation = 4,
       .recompute = true},
      {.name = "zb-h2 canonical", .tied = false, .pp = 2, .schedule = Schedule::kZbH2, .accumulation = 4, .canonical = true},
      {.name = "zb-h1 tp2 sequence parallel",
       .family = Family::kLlama,
       .tied = false,
       .tp = 2,
       .pp = 2,
       .schedule = Schedule::kZbH1,
       .accumulation = 2,
       .sequence_parallel = true},
      {.name = "zb-v tp2, tied", .tp = 2, .pp = 2, .schedule = Schedule::kZbV, .accumulation = 2, .layers = 4},
      {.name = "zb-v zero1 bf16",
       .tied = false,
       .dp = 2,
       .pp = 2,
       .schedule = Schedule::kZbV,
       .accumulation = 2,
       .zero = 1,
       .precision = Precision::kBf16,
       .layers = 4},
      {.name = "v-half",
       .family = Family::kLlama,
       .tied = false,
       .pp = 2,
       .schedule = Schedule::kVHalf,
       .accumulation = 3,
       .layers = 4},
      {.name = "v-min parked",
       .tied = false,
       .pp = 2,
       .schedule = Schedule::kVMin,
       .accumulation = 2,
       .layers = 6,
       .offload = kParked},
      {.name = "dualpipe, tied, clipped", .pp = 2, .schedule = Schedule::kDualPipe, .accumulation = 4, .clip_norm = 1},
      {.name = "dualpipe zero1 dp2 fp16",
       .tied = false,
       .dp = 2,
       .pp = 2,
       .schedule = Schedule::kDualPipe,
       .accumulation = 2,
       .zero = 1,
       .precision = Precision::kFp16},
      {.name = "dualpipe zero3 dp2 tied guarded",
       .dp = 2,
       .pp = 4,
       .schedule = Schedule::kDualPipe,
       .accumulation = 2,
       .zero = 3,
       .layers = 4,
       .guarded = true},
      {.name = "dualpipe-v, tied", .pp = 2, .schedule = Schedule::kDualPipeV, .accumulation = 4, .layers = 4},
      {.name = "dualpipe-v fp16 norm",
       .tied = false,
       .pp = 2,
       .schedule = Schedule::kDualPipeV,
       .accumulation = 2,
       .grad_norm = true,
       .precision = Precision::kFp16,
       .layers = 4},
  };
  return lowered(mixes);
}

/// Sequences in parts, and tokens and heads of a tensor-parallel group's ranks that are cut otherwise.
std::vector<Plan> context_plans() {
  const Mix mixes[] = {
      {.name = "cp2 ring", .family = Family::kLlama, .tied = false, .cp = 2, .cp_kind = ContextKind::kRing},
      {.name = "cp4 ring, canonical", .tied = false, .canonical = true, .cp = 4, .cp_kind = ContextKind::kRing},
      {.name = "cp2 zigzag dp2 zero2 recompute, bf16",
       .family = Family::kLlama,
       .tied = false,
       .dp = 2,
       .zero = 2,
       .recompute = true,
       .precision = Precision::kBf16,
       .cp = 2,
       .cp_kind = ContextKind::kZigzag},
      {.name = "cp2 striped pp2",
       .pp = 2,
       .schedule = Schedule::k1F1B,
       .accumulation = 2,
       .cp = 2,
       .cp_kind = ContextKind::kStriped},
      {.name = "cp2 all-gather zero3 dp2",
       .tied = false,
       .dp = 2,
       .accumulation = 2,
       .zero = 3,
       .cp = 2,
       .cp_kind = ContextKind::kAllGather},
      {.name = "cp2 ulysses",
       .family = Family::kLlama,
       .accumulation = 2,
       .cp = 2,
       .cp_kind = ContextKind::kUlysses,
       .kv_heads = 1},
      {.name = "cp2 all-gather tp2 sequence parallel",
       .tied = false,
       .tp = 2,
       .sequence_parallel = true,
       .micro_batch = 2,
       .cp = 2,
       .cp_kind = ContextKind::kAllGather},
      {.name = "cp2 zigzag tp2 sequence parallel, canonical",
       .family = Family::kLlama,
       .tp = 2,
       .canonical = true,
       .sequence_parallel = true,
       .cp = 2,
       .cp_kind = ContextKind::kZigzag},
      {.name = "usp 2x2, recompute",
       .family = Family::kLlama,
       .tied = false,
       .recompute = true,
       .cp = 4,
       .cp_kind = ContextKind::kUsp,
       .cp_ulysses = 2},
      {.name = "usp 2x2, one kv head, canonical",
       .family = Family::kLlama,
       .canonical = true,
       .cp = 4,
       .cp_kind = ContextKind::kUsp,
       .kv_heads = 1,
       .cp_ulysses = 2},
      {.name = "tp2 one kv head", .family = Family::kLlama, .tied = false, .tp = 2, .accumulation = 2, .kv_heads = 1},
      {.name = "tp2 one kv head, sequence parallel, recompute",
       .family = Family::kLlama,
       .tp = 2,
       .recompute = true,
       .sequence_parallel = true,
       .kv_heads = 1},
  };
  return lowered(mixes);
}

/// Mixtures of experts, in 8 bits too, shared among ranks, beside parts of sequences and slices of experts; norms of heads.
std::vector<Plan> expert_plans() {
  constexpr Experts kPlain{.count = 4, .top_k = 2, .ffn = 8, .balance = 0.01f};
  constexpr Experts kShared{.count = 4, .top_k = 2, .ffn = 8, .sigmoid = true, .balance = 0.01f, .shared = 1, .dense_layers = 1};
  constexpr Experts kGated{.count = 4, .top_k = 2, .ffn = 8, .shared = 1, .shared_gate = true};
  constexpr Experts kBiased{.count = 4, .top_k = 2, .ffn = 8, .bias_update_rate = 0.001f};
  constexpr Experts kFull{.count = 4, .top_k = 2, .ffn = 8, .balance = 0.01f, .capacity_factor = 1};
  const Mix mixes[] = {
      {.name = "experts", .family = Family::kLlama, .tied = false, .experts = kPlain},
      {.name = "experts dp2 ep2, canonical",
       .family = Family::kLlama,
       .tied = false,
       .dp = 2,
       .accumulation = 2,
       .canonical = true,
       .experts = kPlain,
       .ep = 2},
      {.name = "experts dp2 ep2, placed out of order",
       .family = Family::kLlama,
       .tied = false,
       .dp = 2,
       .accumulation = 2,
       .experts = kBiased,
       .ep = 2,
       .expert_placement = "0:2,0,3,1 1:1,0,2,3"},
      {.name = "experts dp2 ep2, one layer of two placed out of order, recompute, micro-batches braided",
       .family = Family::kLlama,
       .tied = false,
       .dp = 2,
       .accumulation = 3,
       .recompute = true,
       .experts = kPlain,
       .expert_overlap = ExpertOverlap::kMicroBatches,
       .ep = 2,
       .expert_placement = "1:3,1,2,0"},
      {.name = "experts dp2 ep2 pp2, bounded, recompute",
       .family = Family::kLlama,
       .tied = false,
       .dp = 2,
       .pp = 2,
       .schedule = Schedule::k1F1B,
       .accumulation = 2,
       .recompute = true,
       .micro_batch = 2,
       .experts = kBiased,
       .expert_bound = 1.5f,
       .ep = 2,
       .ema_decay = 0.9f},
      {.name = "experts tp2 dp2 ep2, bounded, exchanges beside the layer",
       .family = Family::kLlama,
       .tied = false,
       .dp = 2,
       .tp = 2,
       .clip_norm = 1,
       .micro_batch = 2,
       .experts = kShared,
       .expert_overlap = ExpertOverlap::kLayer,
       .expert_bound = 1.25f,
       .ep = 2},
      {.name = "experts dp2 ep2 fp8, shared and gated, recompute",
       .family = Family::kLlama,
       .tied = false,
       .dp = 2,
       .accumulation = 2,
       .recompute = true,
       .precision = Precision::kFp8,
       .fp8_scaling = Fp8Scaling::kBlock,
       .experts = kGated,
       .ep = 2},
      {.name = "experts dp2 ep2 fp8, bounded, exchanges beside the layer",
       .family = Family::kLlama,
       .tied = false,
       .dp = 2,
       .precision = Precision::kFp8,
       .fp8_scaling = Fp8Scaling::kBlock,
       .micro_batch = 2,
       .experts = kShared,
       .expert_overlap = ExpertOverlap::kLayer,
       .expert_bound = 1.25f,
       .ep = 2},
      {.name = "experts dp2 ep4 cp2",
       .family = Family::kLlama,
       .tied = false,
       .dp = 2,
       .clip_norm = 1,
       .cp = 2,
       .cp_kind = ContextKind::kRing,
       .experts = kPlain,
       .ep = 4},
      {.name = "experts dp2 ep2, exchanges beside the layer",
       .family = Family::kLlama,
       .tied = false,
       .dp = 2,
       .experts = kShared,
       .expert_overlap = ExpertOverlap::kLayer,
       .ep = 2},
      {.name = "experts dp2 ep2, micro-batches braided",
       .family = Family::kLlama,
       .tied = false,
       .dp = 2,
       .accumulation = 3,
       .experts = kShared,
       .expert_overlap = ExpertOverlap::kMicroBatches,
       .ep = 2},
      {.name = "experts dp2 ep2 pp2, micro-batches braided, recompute",
       .family = Family::kLlama,
       .tied = false,
       .dp = 2,
       .pp = 2,
       .schedule = *schedule_named("eager-1f1b"),
       .accumulation = 3,
       .recompute = true,
       .experts = kPlain,
       .expert_overlap = ExpertOverlap::kMicroBatches,
       .ep = 2},
      {.name = "experts tp2 dp2 ep2 zero1, norms of heads",
       .family = Family::kLlama,
       .tied = false,
       .dp = 2,
       .tp = 2,
       .zero = 1,
       .clip_norm = 1,
       .experts = kShared,
       .ep = 2,
       .qk_norm = true},
      {.name = "experts tp2 sequence parallel, norms of heads, canonical",
       .family = Family::kLlama,
       .tied = false,
       .tp = 2,
       .canonical = true,
       .sequence_parallel = true,
       .experts = kShared,
       .qk_norm = true},
      {.name = "experts, shared and gated, biases of q, k and v, canonical",
       .family = Family::kLlama,
       .tied = false,
       .dp = 2,
       .canonical = true,
       .experts = kGated,
       .qkv_biases = true},
      {.name = "experts tp2 sequence parallel, shared and gated",
       .family = Family::kLlama,
       .tied = false,
       .tp = 2,
       .sequence_parallel = true,
       .experts = kGated,
       .qkv_biases = true},
      {.name = "experts dp2 ep2, biases of routers, recompute",
       .family = Family::kLlama,
       .tied = false,
       .dp = 2,
       .accumulation = 2,
       .recompute = true,
       .experts = kBiased,
       .ep = 2},
      {.name = "experts pp2, biases of routers",
       .family = Family::kLlama,
       .tied = false,
       .pp = 2,
       .schedule = Schedule::k1F1B,
       .accumulation = 2,
       .experts = kBiased},
      {.name = "experts tp2 dp2 ep2 sequence parallel",
       .family = Family::kLlama,
       .tied = false,
       .dp = 2,
       .tp = 2,
       .sequence_parallel = true,
       .experts = kShared,
       .ep = 2},
      {.name = "experts tp2 dp2 ep4, whole, shared and gated, biases of q, k and v",
       .family = Family::kLlama,
       .tied = false,
       .dp = 2,
       .tp = 2,
       .accumulation = 2,
       .sequence_parallel = true,
       .experts = kGated,
       .ep = 4,
       .expert_tp = 1,
       .qkv_biases = true},
      {.name = "experts of a capacity tp2 cp2 ep4, whole, zero2, canonical, recompute",
       .family = Family::kLlama,
       .tied = false,
       .tp = 2,
       .accumulation = 2,
       .zero = 2,
       .recompute = true,
       .canonical = true,
       .sequence_parallel = true,
       .cp = 2,
       .cp_kind = ContextKind::kRing,
       .experts = kFull,
       .ep = 4,
       .expert_tp = 1},
      {.name = "experts tp4 dp2 ep4, slices over two ranks, zero2, canonical",
       .family = Family::kLlama,
       .tied = false,
       .dp = 2,
       .tp = 4,
       .accumulation = 2,
       .zero = 2,
       .canonical = true,
       .sequence_parallel = true,
       .experts = kPlain,
       .ep = 4,
       .expert_tp = 2},
      {.name = "experts tp2 dp2 ep2, whole, bounded, exchanges beside the layer",
       .family = Family::kLlama,
       .tied = false,
       .dp = 2,
       .tp = 2,
       .accumulation = 2,
       .clip_norm = 1,
       .sequence_parallel = true,
       .micro_batch = 2,
       .experts = kBiased,
       .expert_overlap = ExpertOverlap::kLayer,
       .expert_bound = 1.5f,
       .ep = 2,
       .expert_tp = 1},
      {.name = "experts of a capacity, dp2", .family = Family::kLlama, .tied = false, .dp = 2, .accumulation = 2, .experts = kFull},
      {.name = "experts of a capacity, dp2 ep2, recompute, canonical",
       .family = Family::kLlama,
       .tied = false,
       .dp = 2,
       .accumulation = 2,
       .recompute = true,
       .canonical = true,
       .experts = kFull,
       .ep = 2},
      {.name = "experts of a capacity, cp2 dp2 ep2, recompute",
       .family = Family::kLlama,
       .tied = false,
       .dp = 2,
       .accumulation = 2,
       .recompute = true,
       .cp = 2,
       .cp_kind = ContextKind::kZigzag,
       .experts = kFull,
       .ep = 2},
      {.name = "experts of a capacity, tp2 dp2 ep2 sequence parallel",
       .family = Family::kLlama,
       .tied = false,
       .dp = 2,
       .tp = 2,
       .sequence_parallel = true,
       .experts = kFull,
       .ep = 2},
  };
  return lowered(mixes);
}

/// Latent attention, whole, cut by heads, by tokens and by parts of sequences.
std::vector<Plan> latent_plans() {
  constexpr LatentAttention kPlain{.kv_rank = 6, .nope = 4, .rope = 2, .v = 5};
  constexpr LatentAttention kCompressed{.q_rank = 10, .kv_rank = 6, .nope = 4, .rope = 2, .v = 8};
  constexpr Experts kShared{
      .count = 4, .top_k = 2, .ffn = 8, .sigmoid = true, .shared = 1, .dense_layers = 1, .bias_update_rate = 0.001f};
  const Mix mixes[] = {
      {.name = "latent dp2 zero3, q compressed, recompute",
       .family = Family::kLlama,
       .tied = false,
       .dp = 2,
       .accumulation = 2,
       .zero = 3,
       .recompute = true,
       .latent = kCompressed},
      {.name = "latent tp2, canonical", .family = Family::kLlama, .tied = false, .tp = 2, .canonical = true, .latent = kPlain},
      {.name = "latent tp2 sequence parallel, q compressed, selective",
       .family = Family::kLlama,
       .tied = false,
       .tp = 2,
       .accumulation = 2,
       .selective = true,
       .sequence_parallel = true,
       .latent = kCompressed},
      {.name = "latent tp2 sequence parallel, bf16",
       .family = Family::kLlama,
       .tied = false,
       .tp = 2,
       .precision = Precision::kBf16,
       .sequence_parallel = true,
       .latent = kPlain},
      {.name = "latent cp2 ring, canonical",
       .family = Family::kLlama,
       .tied = false,
       .canonical = true,
       .cp = 2,
       .cp_kind = ContextKind::kRing,
       .latent = kCompressed},
      {.name = "latent cp2 ulysses, packed",
       .family = Family::kLlama,
       .tied = false,
       .cp = 2,
       .cp_kind = ContextKind::kUlysses,
       .packed = true,
       .latent = kPlain},
      {.name = "latent pp2 zb-h1, experts",
       .family = Family::kLlama,
       .tied = false,
       .pp = 2,
       .schedule = Schedule::kZbH1,
       .accumulation = 2,
       .experts = kShared,
       .latent = kCompressed},
  };
  return lowered(mixes);
}

/// Attention within windows, in all layers and in some, whole and in every kind of parts of sequences.
std::vector<Plan> window_plans() {
  constexpr SlidingWindow kAll{.tokens = 5}, kSome{.tokens = 3, .global_every = 2};
  constexpr SlidingWindow kLate{.tokens = 3, .global_layers = 1, .rope_theta = 100};
  constexpr Experts kLateExperts{.count = 4, .top_k = 2, .ffn = 8, .dense_layers = 1};
  const Mix mixes[] = {
      {.name = "window dp2 zero3, recompute", .dp = 2, .accumulation = 2, .zero = 3, .recompute = true, .window = kAll},
      {.name = "window tp2 sequence parallel, selective, some layers",
       .family = Family::kLlama,
       .tied = false,
       .tp = 2,
       .selective = true,
       .sequence_parallel = true,
       .window = kSome},
      {.name = "window pp2, some layers, packed",
       .family = Family::kLlama,
       .tied = false,
       .pp = 2,
       .schedule = Schedule::k1F1B,
       .accumulation = 2,
       .packed = true,
       .window = kLate},
      {.name = "window cp2 ring, canonical", .canonical = true, .cp = 2, .cp_kind = ContextKind::kRing, .window = kAll},
      {.name = "window cp2 zigzag, some layers", .cp = 2, .cp_kind = ContextKind::kZigzag, .window = kSome},
      {.name = "window cp2 all-gather", .cp = 2, .cp_kind = ContextKind::kAllGather, .window = kAll},
      {.name = "window cp2 ulysses", .cp = 2, .cp_kind = ContextKind::kUlysses, .window = kSome},
      {.name = "window ep2, experts in some layers",
       .family = Family::kLlama,
       .tied = false,
       .dp = 2,
       .layers = 4,
       .experts = kLateExperts,
       .ep = 2,
       .window = kSome},
      {.name = "window tp2, bf16, strips",
       .tp = 2,
       .precision = Precision::kBf16,
       .sequence_parallel = true,
       .tensor_overlap = true,
       .window = kSome},
      {.name = "window fp8", .precision = Precision::kFp8, .window = kSome},
  };
  return lowered(mixes);
}

/// Head and loss in pieces.
std::vector<Plan> chunked_plans() {
  const Mix mixes[] = {
      {.name = "2 pieces of a sequence", .family = Family::kLlama, .tied = false, .accumulation = 2, .loss_chunks = 2},
      {.name = "4 pieces of 2 sequences, canonical", .tied = false, .canonical = true, .micro_batch = 2, .loss_chunks = 4},
      {.name = "a piece a sequence, tied, dp2 zero1", .dp = 2, .zero = 1, .micro_batch = 2, .loss_chunks = 2},
      {.name = "fp16 tp2 sequence parallel, clipped",
       .tied = false,
       .tp = 2,
       .clip_norm = 1,
       .precision = Precision::kFp16,
       .sequence_parallel = true,
       .loss_chunks = 2},
      {.name = "zb-h1 tp2",
       .family = Family::kLlama,
       .tied = false,
       .tp = 2,
       .pp = 2,
       .schedule = Schedule::kZbH1,
       .accumulation = 2,
       .loss_chunks = 2},
      {.name = "cp2 zigzag zero3 dp2",
       .tied = false,
       .dp = 2,
       .zero = 3,
       .cp = 2,
       .cp_kind = ContextKind::kZigzag,
       .loss_chunks = 2},
  };
  return lowered(mixes);
}

/// The number of mutants that were judged, one in `share`.
int require_full_score(const std::vector<Plan>& plans, uint64_t share = 1) {
  const auto tallies = mutate_all(plans, share);
  fmt::print("{}\n", score_table(tallies));
  for (const MutationTally& t : tallies) {
    INFO(t.kind);
    CHECK(t.survivors == std::vector<std::string>());
  }
  REQUIRE(score_percent(tallies) == 100);
  int mutants = 0;
  for (const MutationTally& t : tallies) mutants += t.mutants;
  return mutants;
}

}  // namespace

namespace {

/// The plan of a step under sequence parallelism with one change of its text: what is first found of it, or nothing.
std::string broken_sequence(std::string_view from, std::string_view to) {
  auto plan = lower(case_of({.name = "sequence", .tp = 2, .sequence_parallel = true, .micro_batch = 2}));
  if (!plan.ok()) FAIL(to_string(plan.error()));
  const auto findings = find_faults(parse_or_fail(replaced(print(*plan), from, to)));
  return findings.empty() ? "" : findings[0].message;
}

}  // namespace

TEST_CASE("sequence parallel: a norm's gradient that is not added up over ranks is refused") {
  const std::string reduced =
      "(%d.attn.norm.gamma.tokens, %d.attn.norm.beta.tokens) -> (%d.attn.norm.gamma, %d.attn.norm.beta) over=sequences";
  // What the ranks have not added up, read as it is, or as though it were whole (Megatron-LM #1446).
  CHECK(broken_sequence(reduced,
                        "(%d.attn.norm.gamma.tokens.part, %d.attn.norm.beta.tokens) -> (%d.attn.norm.gamma, %d.attn.norm.beta) "
                        "over=sequences")
            .starts_with("along tp: %d.attn.norm.gamma is declared replicate, but its reads make it partial"));
  CHECK(broken_sequence("  all_reduce attn.norm.gamma.all (%d.attn.norm.gamma.tokens.part) -> (%d.attn.norm.gamma.tokens) comm=tp "
                        "#sequence-parallel\n",
                        "")
            .starts_with("reads %d.attn.norm.gamma.tokens as"));
  // Sums over the tokens of another op, or of the other parameter.
  CHECK(broken_sequence("residual.W attn.residual (%d.attn.bo.tokens) -> (%d.attn.bo)",
                        "residual.W attn.residual (%d.mlp.bdown.tokens) -> (%d.attn.bo)") != "");
  CHECK(broken_sequence(reduced,
                        "(%d.attn.norm.beta.tokens, %d.attn.norm.gamma.tokens) -> (%d.attn.norm.gamma, %d.attn.norm.beta) "
                        "over=sequences")
            .find("adds up %d.attn.norm.beta.tokens over sequences") != std::string::npos);
  // The whole sum at once, of a rank's tokens.
  CHECK(broken_sequence("residual.W mlp.residual (%d.mlp.bdown.tokens) -> (%d.mlp.bdown) bias over=sequences",
                        "residual.W mlp.residual (%d.y) -> (%d.mlp.bdown) bias") != "");
}

TEST_CASE("sequence parallel: what is gathered or scattered otherwise is refused") {
  // A product of the wrong input, gathered as the right one would be.
  CHECK(broken_sequence("all_gather mlp.up.gather (%mlp.norm.y)", "all_gather mlp.up.gather (%x1)").find("mlp") !=
        std::string::npos);
  // Gathered before the norm has made it: the order of a layer's two gathers.
  CHECK(broken_sequence("all_gather attn.qkv.gather (%attn.norm.y) -> (%attn.norm.y.all)",
                        "all_gather attn.qkv.gather (%mlp.norm.y) -> (%attn.norm.y.all)") != "");
  // A sum that every rank takes whole is no rank's tokens.
  CHECK(broken_sequence("reduce_scatter mlp.g (%mlp.z.part) -> (%mlp.z)", "all_reduce mlp.g (%mlp.z.part) -> (%mlp.z)") != "");
  // A product of the rank's own tokens: partial sums over heads of different tokens.
  CHECK(broken_sequence("linear.F mlp.up (%mlp.norm.y.all,", "linear.F mlp.up (%mlp.norm.y,") != "");
}

TEST_CASE("mutations of hand-written plans are all found") {
  require_full_score({parse_or_fail(training_text()), parse_or_fail(zero1_text()), parse_or_fail(pipeline_text())});
}

TEST_CASE("mutations of the language exam are all found") {
  std::vector<Plan> plans;
  for (const std::string& subject : exam_subjects()) plans.push_back(parse_or_fail(exam_text(subject)));
  require_full_score(plans);
}

TEST_CASE("mutations of the strategies' plans are all found") { CHECK(require_full_score(lowered_plans(), dealt(1, 3)) > 10'000); }

TEST_CASE("mutations of plans of sequences in parts, and of kv heads that ranks share, are all found") {
  CHECK(require_full_score(context_plans(), dealt(1, 3)) > (thorough() ? 5'000 : 1'600));
}

TEST_CASE("mutations of plans of packed documents are all found") {
  const Mix mixes[] = {{.name = "packed dp2", .dp = 2, .accumulation = 2, .packed = true},
                       {.name = "packed llama tp2 sequence parallel, recompute",
                        .family = Family::kLlama,
                        .tied = false,
                        .tp = 2,
                        .accumulation = 2,
                        .recompute = true,
                        .sequence_parallel = true,
                        .packed = true},
                       {.name = "packed cp2 zigzag pp2",
                        .pp = 2,
                        .schedule = Schedule::k1F1B,
                        .accumulation = 2,
                        .cp = 2,
                        .cp_kind = ContextKind::kZigzag,
                        .packed = true},
                       {.name = "packed cp2 ulysses",
                        .family = Family::kLlama,
                        .tied = false,
                        .cp = 2,
                        .cp_kind = ContextKind::kUlysses,
                        .packed = true}};
  CHECK(require_full_score(lowered(mixes), dealt(1, 3)) > (thorough() ? 2'000 : 660));
}

TEST_CASE("mutations of plans of products in strips are all found") {
  const Mix mixes[] = {
      {.name = "tp2 in strips", .tp = 2, .accumulation = 2, .sequence_parallel = true, .tensor_overlap = true, .micro_batch = 2},
      {.name = "llama tp2 in strips, recompute, dp2 zero2",
       .family = Family::kLlama,
       .tied = false,
       .dp = 2,
       .tp = 2,
       .zero = 2,
       .recompute = true,
       .sequence_parallel = true,
       .tensor_overlap = true},
      {.name = "llama tp2 in strips, one kv head, canonical",
       .family = Family::kLlama,
       .tp = 2,
       .canonical = true,
       .sequence_parallel = true,
       .tensor_overlap = true,
       .kv_heads = 1},
      {.name = "tp2 in strips cp2 zigzag",
       .tied = false,
       .tp = 2,
       .sequence_parallel = true,
       .tensor_overlap = true,
       .cp = 2,
       .cp_kind = ContextKind::kZigzag},
      {.name = "tp2 in strips, zb-h1",
       .tied = false,
       .tp = 2,
       .pp = 2,
       .schedule = Schedule::kZbH1,
       .accumulation = 2,
       .sequence_parallel = true,
       .tensor_overlap = true}};
  CHECK(require_full_score(lowered(mixes), dealt(1, 3)) > (thorough() ? 3'500 : 1'150));
}

TEST_CASE("mutations of plans of experts are all found") {
  CHECK(require_full_score(expert_plans(), dealt(1, 3)) > (thorough() ? 3'000 : 1'000));
}

TEST_CASE("mutations of plans of latent attention are all found") {
  CHECK(require_full_score(latent_plans(), dealt(1, 3)) > (thorough() ? 2'000 : 660));
}

TEST_CASE("mutations of plans of attention within windows are all found") {
  CHECK(require_full_score(window_plans(), dealt(1, 3)) > (thorough() ? 2'000 : 660));
}

TEST_CASE("mutations of plans of head and loss in pieces are all found") {
  CHECK(require_full_score(chunked_plans(), dealt(1, 3)) > (thorough() ? 2'500 : 830));
}

namespace {

/// The plan of a head in two pieces with one change of its text: what is first found of it, or nothing.
std::string broken_chunks(std::string_view from, std::string_view to) {
  auto plan = lower(case_of({.name = "chunks", .tied = false, .loss_chunks = 2}));
  if (!plan.ok()) FAIL(to_string(plan.error()));
  const auto findings = find_faults(parse_or_fail(replaced(print(*plan), from, to)));
  return findings.empty() ? "" : findings[0].message;
}

}  // namespace

TEST_CASE("pieces of head and loss: one that is missing, judged by another's targets, or put in another's place is refused") {
  // Logits of the first half judged by the targets of the second.
  CHECK(broken_chunks("cross_entropy loss.0 (%logits.0, %targets.0)", "cross_entropy loss.0 (%logits.0, %targets.1)")
            .starts_with("judges %logits.0 by %targets.1: the logits are of the tokens from 0 on, the targets from 4 on"));
  // Gradients of the halves in each other's place: nothing is missing, and every value is used.
  const std::string swapped = "is not the gradient of";
  auto plan = lower(case_of({.name = "chunks", .tied = false, .loss_chunks = 2}));
  REQUIRE(plan.ok());
  std::string text = print(*plan);
  text = replaced(text, "-> (%d.final.norm.y.0) chunks=2", "-> (%d.final.norm.y.other) chunks=2");
  text = replaced(text, "-> (%d.final.norm.y.1) chunks=2", "-> (%d.final.norm.y.0) chunks=2");
  text = replaced(text, "-> (%d.final.norm.y.other) chunks=2", "-> (%d.final.norm.y.1) chunks=2");
  const auto findings = find_faults(parse_or_fail(text));
  REQUIRE(!findings.empty());
  CHECK(findings[0].message.find(swapped) != std::string::npos);
  // A half of the loss that the step's does not have.
  CHECK(broken_chunks("  add loss.sum.1.copy1 (%loss.of.0, %loss.of.0.copy1) -> (%loss.of.0) #chunked-loss\n", "")
            .find("loss that is 0 times in that of the step") != std::string::npos);
  // A head that says it has quarters.
  CHECK(broken_chunks("(%final.norm.y.0, %head.weight) -> (%logits.0) chunks=2",
                      "(%final.norm.y.0, %head.weight) -> (%logits.0) chunks=4")
            .starts_with("chunks=4: %final.norm.y.0 is no view"));
}

TEST_CASE("post-validation: what a period takes back it takes back as a whole, last, and from copies of how it began") {
  const Mix mix{.name = "validated", .tied = false, .pp = 2, .schedule = Schedule::k1F1B, .clip_norm = 1, .post_validation = 2};
  const Plan good = lowered(std::span(&mix, 1)).front();
  REQUIRE(find_faults(good).empty());
  const auto is = [&](const Item& item, std::string_view what) {
    const Call* call = std::get_if<Call>(&item);
    return call != nullptr && good.segments[call->segment.index()].name.starts_with(what);
  };
  const auto first = [&](std::vector<Item>& program, std::string_view what) {
    return std::ranges::find_if(program, [&](const Item& item) { return is(item, what); });
  };
  const auto broken = [&](auto damage) {
    Plan plan = good;
    damage(plan, plan.roles[0].program);
    const auto faults = find_faults(plan);
    return faults.empty() ? std::string() : faults.front().message;
  };
  // A parameter that stays as the steps have changed it.
  CHECK(broken([&](Plan&, auto& program) { program.erase(first(program, "restore")); }).find("takes other state back") !=
        std::string::npos);
  // One that goes back by a word of its own.
  CHECK(broken([&](Plan&, auto& program) {
          Call& call = std::get<Call>(*first(program, "restore"));
          const Call& judge = std::get<Call>(*first(program, "judge.first"));
          call.binding.back() = judge.binding.back();
        }) != "");
  // All goes back by whether the last step was clipped, while the run goes by whether any was.
  CHECK(broken([&](Plan& plan, auto&) {
          for (Role& role : plan.roles) {
            const BufferId clipped = std::get<Call>(*first(role.program, "judge.last")).binding.front();
            for (Item& item : role.program) {
              if (!is(item, "restore")) continue;
              Call& call = std::get<Call>(item);
              call.binding.back() = clipped;
              plan.segments[call.segment.index()].slots[2].cls = role.buffers[clipped.index()].kind;
            }
          }
        }).find("where the run makes steps again by %rolled_back") != std::string::npos);
  // A copy that is made after the first update.
  CHECK(broken([&](Plan&, auto& program) {
          const auto keep = first(program, "keep");
          const Item late = *keep;
          program.erase(keep);
          const auto restore = first(program, "restore");
          program.insert(restore, late);
        }) != "");
  // State that goes back before the last step has changed it.
  CHECK(broken([&](Plan&, auto& program) {
          const auto restore = first(program, "restore");
          const Item early = *restore;
          program.erase(restore);
          program.insert(first(program, "clip.norm"), early);
        }) != "");
  // The copy of another parameter of the same shape.
  CHECK(broken([&](Plan&, auto& program) {
          for (auto a = program.begin(); a != program.end(); ++a)
            for (auto b = std::next(a); b != program.end(); ++b)
              if (is(*a, "restore") && is(*b, "restore") && std::get<Call>(*a).segment == std::get<Call>(*b).segment)
                return std::swap(std::get<Call>(*a).binding[0], std::get<Call>(*b).binding[0]);
        }) != "");
  // A step whose norm is another step's.
  CHECK(broken([&](Plan&, auto& program) {
          const auto one = first(program, "clip.factor");
          const auto other = std::find_if(std::next(one), program.end(), [&](const Item& item) { return is(item, "clip.factor"); });
          std::get<Call>(*other).binding[0] = std::get<Call>(*one).binding[0];
        }) != "");
}

TEST_CASE("mutations of pipelines' plans are all found") { CHECK(require_full_score(pipelined_plans(), dealt(1, 3)) > 4'000); }

}  // namespace shardlab::testing
