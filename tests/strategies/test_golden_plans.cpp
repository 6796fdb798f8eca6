// Each strategy's plan of a tiny model as text. A change of lowering shows here, to be read.
#include "plan/text.h"
#include "plan/verify.h"
#include "strategies/catalogue.h"
#include "strategies/lower.h"
#include "strategies/warm_up.h"
#include "tests/golden_plans.h"
#include "tests/namespaces.h"
#include "tests/strategies/cases.h"
#include "tests/test.h"

#include <set>

namespace shardlab::testing {
namespace {

using testing::tiny_case;
using testing::with_pipeline;

struct Golden {
  std::string name;
  Case config;
};

std::vector<Golden> goldens() {
  std::vector<Golden> all;
  all.push_back({"single-gpt", tiny_case()});
  all.push_back({"single-llama", tiny_case(Family::kLlama)});
  Case dp = tiny_case(Family::kLlama);
  dp.layout.dp = 2;
  dp.layout.overlap = false;
  all.push_back({"data-parallel-naive", dp});
  dp.layout.overlap = true;
  dp.layout.bucket_bytes = 32768;
  all.push_back({"data-parallel-bucketed", dp});
  const Case bucketed = dp;
  Case averaged = dp;
  averaged.train.ema_decay = 0.999f;
  all.push_back({"weight-average", averaged});
  Case compressed = dp;
  compressed.layout.compression.kind = CompressionKind::kInt8;
  all.push_back({"quantised-gradients", compressed});
  compressed.layout.compression.kind = CompressionKind::kTopK;
  all.push_back({"sparse-gradients", compressed});
  compressed.layout.compression.kind = CompressionKind::kPowerSgd;
  all.push_back({"powersgd", compressed});
  Case one_bit = dp;
  one_bit.train.grad_norm = false;
  one_bit.layout.compression = {.kind = CompressionKind::kOneBitAdam, .warmup = 100};
  all.push_back({"one-bit-adam", one_bit});
  one_bit.layout.compression.warmup = kNeverFrozen;
  all.push_back({"one-bit-adam-warm-up", one_bit});
  Case served = dp;
  served.layout.parameter_server.servers = 2;
  all.push_back({"parameter-server", served});
  served.layout.parameter_server.staleness = 2;
  served.train.grad_norm = false;
  all.push_back({"parameter-server-stale", served});
  compressed.layout.compression.kind = CompressionKind::kInt8;
  compressed.layout.zero = 2;
  compressed.train.grad_accumulation = 2;
  all.push_back({"compressed-scatter", compressed});
  dp.layout.zero = 1;
  all.push_back({"zero-1", dp});
  dp.layout.zero = 2;
  dp.train.grad_accumulation = 2;
  all.push_back({"zero-2", dp});
  dp.layout.zero = 3;
  dp.layout.bucket_bytes = 0;
  dp.train.grad_accumulation = 1;
  all.push_back({"zero-3", dp});
  dp.layout.dp = 4;
  dp.layout.hybrid_shard = 2;
  all.push_back({"hybrid-shard", dp});
  Case tp = tiny_case();
  tp.layout.tp = 2;
  all.push_back({"tensor-parallel", tp});
  Case sequence = tp;
  sequence.layout.sequence_parallel = true;
  all.push_back({"sequence-parallel", sequence});
  sequence.model = tiny_case(Family::kLlama).model;
  sequence.layout.recompute = Recompute::kFull;
  all.push_back({"sequence-parallel-recompute", sequence});
  Case overlapped = tp;
  overlapped.layout.sequence_parallel = overlapped.layout.tensor_overlap = true;
  all.push_back({"tensor-overlap", overlapped});
  Case chunked = tiny_case(Family::kLlama);
  chunked.layout.loss_chunks = 2;
  chunked.train.grad_accumulation = 2;
  all.push_back({"chunked-loss", chunked});
  chunked.canonical = true;
  chunked.layout.tp = 2;
  all.push_back({"chunked-loss-canonical", chunked});
  Case context = tiny_case(Family::kLlama);
  context.layout.cp = 2;
  context.layout.cp_kind = ContextKind::kZigzag;
  all.push_back({"context-parallel-zigzag", context});
  context.canonical = true;
  context.train.grad_accumulation = 2;
  all.push_back({"context-parallel-canonical", context});
  context.canonical = false;
  context.layout.cp_kind = ContextKind::kAllGather;
  context.layout.dp = 2;
  context.layout.zero = 2;
  context.layout.recompute = Recompute::kFull;
  all.push_back({"context-parallel-all-gather", context});
  context = tiny_case(Family::kLlama);
  context.layout.cp = 4;  // of 2 kv heads: two copies of each
  context.layout.cp_kind = ContextKind::kUlysses;
  all.push_back({"context-parallel-ulysses", context});
  context.layout.cp_kind = ContextKind::kUsp;
  context.layout.cp_ulysses = 2;
  all.push_back({"context-parallel-usp", context});
  context.layout.cp = 2;
  context.layout.cp_ulysses = 0;
  context.layout.cp_kind = ContextKind::kZigzag;
  context.layout.tp = 2;
  context.layout.sequence_parallel = true;
  all.push_back({"context-and-sequence-parallel", context});
  Case packed = tiny_case();
  packed.data.packed = true;
  packed.data.document_tokens = 4;
  all.push_back({"packed-documents", packed});
  packed = tiny_case(Family::kLlama);
  packed.data.packed = true;
  packed.layout.cp = 2;
  packed.layout.cp_kind = ContextKind::kZigzag;
  all.push_back({"packed-documents-zigzag", packed});
  Case shared = tiny_case(Family::kLlama);
  shared.layout.tp = 4;  // of 2 kv heads: two ranks share each
  all.push_back({"tensor-parallel-shared-heads", shared});
  Case experts = tiny_case(Family::kLlama);
  experts.model.experts = {.count = 4, .top_k = 2, .ffn = 8, .balance = 0.01f};
  all.push_back({"experts", experts});
  experts.layout.dp = 4;
  experts.layout.ep = 2;
  experts.layout.zero = 1;
  experts.train.clip_norm = 1;
  all.push_back({"expert-parallel", experts});
  Case eight_bits = experts;
  eight_bits.train.precision = Precision::kFp8;
  eight_bits.train.fp8_scaling = Fp8Scaling::kBlock;
  all.push_back({"expert-parallel-fp8", eight_bits});
  Case placed = experts;
  placed.layout.expert_placement = "0:2,0,3,1 1:0,3,2,1";
  all.push_back({"expert-placement", placed});
  Case by_node = experts;
  by_node.machine.local = true;
  by_node.machine.nodes = 2;
  by_node.layout.ep = 4;
  by_node.layout.collective_algorithm = AlgorithmChoice::kHierarchical;
  all.push_back({"expert-parallel-by-node", by_node});
  Case bound = experts;
  bound.layout.zero = 0;
  bound.train.micro_batch = 2;
  bound.layout.expert_bound = 1.5f;
  all.push_back({"expert-bound", bound});
  experts.layout.zero = 0;
  experts.canonical = true;
  experts.train.grad_accumulation = 2;
  experts.layout.recompute = Recompute::kFull;
  all.push_back({"expert-parallel-canonical", experts});
  experts.model.experts.balance = 0;
  experts.model.experts.bias_update_rate = 0.001f;
  all.push_back({"router-bias", experts});
  experts.model.experts.balance = 0.01f;
  experts.model.experts.bias_update_rate = 0;
  experts.model.experts.capacity_factor = 1;
  all.push_back({"expert-capacity", experts});
  Case shared_room = experts;
  shared_room.layout.cp = 2;
  shared_room.layout.cp_kind = ContextKind::kZigzag;
  all.push_back({"expert-capacity-context-parallel", shared_room});
  Case layered = tiny_case(Family::kLlama);
  layered.model.qk_norm = true;
  layered.model.experts = {.count = 4, .top_k = 2, .ffn = 8, .sigmoid = true, .shared = 1, .dense_layers = 1, .groups = 2};
  layered.layout.dp = layered.layout.ep = 2;
  all.push_back({"experts-layered", layered});
  Case beside = layered;
  beside.train.grad_accumulation = 2;
  all.push_back({"expert-parallel-layered", beside});
  beside.layout.expert_overlap = ExpertOverlap::kLayer;
  all.push_back({"expert-overlap", beside});
  beside.layout.expert_overlap = ExpertOverlap::kMicroBatches;
  all.push_back({"expert-overlap-braided", beside});
  layered.layout.tp = 2;
  layered.layout.sequence_parallel = true;
  layered.model.experts.balance = 0.01f;
  all.push_back({"experts-sliced", layered});
  Case whole = layered;
  whole.layout.expert_tp = 1;
  all.push_back({"experts-whole", whole});
  Case gated = layered;
  gated.model.qk_norm = false, gated.model.qkv_biases = true;
  gated.model.experts.shared_gate = true;
  gated.layout.sequence_parallel = false;
  all.push_back({"experts-gated", gated});
  layered.layout.sequence_parallel = false;
  layered.layout.cp = 2;
  layered.layout.cp_kind = ContextKind::kRing;
  layered.layout.ep = 4;
  layered.canonical = true;
  layered.train.micro_batch = 1;
  all.push_back({"experts-sliced-canonical", layered});
  Case latent = tiny_case(Family::kLlama);
  latent.model.kv_heads = latent.model.heads;
  latent.model.latent = {.q_rank = 12, .kv_rank = 8, .nope = 6, .rope = 4, .v = 7};
  latent.model.head_dim = 10;
  all.push_back({"latent-attention", latent});
  latent.layout.tp = 2;
  latent.layout.sequence_parallel = true;
  all.push_back({"latent-attention-sliced", latent});
  latent.layout.tp = 1, latent.layout.sequence_parallel = false;
  latent.model.latent.q_rank = 0;
  latent.layout.cp = 2;
  latent.layout.cp_kind = ContextKind::kRing;
  latent.canonical = true;
  latent.train.micro_batch = 1;
  all.push_back({"latent-attention-ring-canonical", latent});
  Case window = tiny_case(Family::kLlama);
  window.model.window = {.tokens = 3, .global_every = 2, .rope_theta = 100};
  all.push_back({"sliding-window", window});
  window.layout.cp = 2;
  window.layout.cp_kind = ContextKind::kRing;
  window.canonical = true;
  window.train.micro_batch = 1;
  all.push_back({"sliding-window-ring-canonical", window});
  tp.train.precision = Precision::kFp8;
  all.push_back({"fp8", tp});
  tp.train.fp8_scaling = Fp8Scaling::kDelayed;
  all.push_back({"fp8-delayed", tp});
  Case blocks = tiny_case(Family::kLlama);
  blocks.train.precision = Precision::kFp8;
  blocks.train.fp8_scaling = Fp8Scaling::kBlock;
  blocks.layout.recompute = Recompute::kFull;
  all.push_back({"fp8-block", blocks});
  Case recompute = tiny_case(Family::kLlama);
  recompute.layout.recompute = Recompute::kFull;
  all.push_back({"full-recompute", recompute});
  recompute.layout.recompute = Recompute::kSelective;
  recompute.layout.recompute_options.modules = "attn.core mlp.act";
  all.push_back({"selective-recompute", recompute});
  Case accumulation = tiny_case(Family::kLlama);
  accumulation.train.grad_accumulation = 3;
  all.push_back({"accumulation", accumulation});
  accumulation.train.grad_accumulation = 4;
  accumulation.canonical = true;
  all.push_back({"accumulation-canonical", accumulation});
  all.push_back({"pipeline-afab", with_pipeline(tiny_case(Family::kLlama), 2, Schedule::kAfab, 2)});
  all.push_back({"pipeline-1f1b", with_pipeline(tiny_case(Family::kLlama), 2, Schedule::k1F1B, 3)});
  Case parts = with_pipeline(tiny_case(Family::kLlama), 2, Schedule::kInterleaved, 2);
  parts.model.layers = 4;
  parts.layout.vpp = 2;
  all.push_back({"pipeline-interleaved", parts});
  all.push_back({"pipeline-zb-h1", with_pipeline(tiny_case(Family::kLlama), 2, Schedule::kZbH1, 3)});
  parts.layout.vpp = 1;
  parts.layout.schedule = Schedule::kZbV;
  parts.model.tied_embeddings = true;
  all.push_back({"pipeline-zb-v", parts});
  Case tied = tiny_case();
  tied.model.tied_embeddings = true;
  all.push_back({"tied-embeddings-early", tied});
  all.push_back({"tied-embeddings", with_pipeline(tied, 2, Schedule::k1F1B, 2)});
  Case all_three = with_pipeline(tied, 2, Schedule::k1F1B, 2);
  all_three.layout.dp = 2;
  all_three.layout.tp = 2;
  all_three.layout.zero = 1;
  all_three.layout.bucket_bytes = 65536;
  all_three.train.grad_norm = false;
  all_three.train.dropout = 0.1f;
  all.push_back({"dp2-tp2-pp2-zero1-tied", all_three});
  Case clipped = with_pipeline(tied, 2, Schedule::kAfab, 1);
  clipped.layout.tp = 2;
  clipped.train.clip_norm = 1;
  all.push_back({"clip-norm", clipped});
  dp.layout.dp = 2;
  dp.layout.hybrid_shard = 0;
  dp.train.precision = Precision::kBf16;
  all.push_back({"mixed-precision", dp});
  Case parked = tiny_case();
  parked.layout.recompute = Recompute::kFull;
  parked.layout.offload.activations = OffloadTo::kCpu;
  all.push_back({"offload-activations", parked});
  Case away = dp;  // in 16 bits
  away.layout.zero = 1;
  away.layout.fsdp = {};
  away.layout.bucket_bytes = 32768;
  away.layout.offload.optimizer = OffloadTo::kCpu;
  all.push_back({"offload-optimizer", away});
  Case scaled = with_pipeline(tied, 2, Schedule::kAfab, 1);
  scaled.layout.tp = 2;
  scaled.train.clip_norm = 1;
  scaled.train.precision = Precision::kFp16;
  all.push_back({"loss-scale", scaled});
  Case guarded = with_pipeline(tied, 2, Schedule::kAfab, 1);
  guarded.train.guard = {.nonfinite = GuardAction::kStop, .spike = GuardAction::kSkip};
  all.push_back({"guard", guarded});
  Case second = tiny_case(Family::kLlama);
  second.layout.recompute = Recompute::kFull;
  second.layout.recompute_options.every = 2;
  all.push_back({"recompute-every-second", second});
  Case listed = tiny_case(Family::kLlama);
  listed.layout.recompute = Recompute::kByLayer;
  listed.layout.recompute_options.layers = "1*full@cpu 1*attn.core+mlp.act";
  all.push_back({"recompute-by-layer", listed});
  Case drive = tiny_case(Family::kLlama);
  drive.layout.bucket_bytes = 65536;
  drive.layout.offload.optimizer = OffloadTo::kNvme;
  all.push_back({"offload-optimizer-nvme", drive});
  Case apart = tiny_case(Family::kLlama);
  apart.layout.dp = 2;
  apart.layout.diloco = {.steps = 2, .learning_rate = 0.7f, .momentum = 0.9f};
  apart.train.grad_norm = false;
  all.push_back({"diloco", apart});
  Case validated = with_pipeline(tiny_case(Family::kLlama), 2, Schedule::kZbH2, 3);
  validated.train.grad_norm = false;
  validated.train.clip_norm = 1;
  validated.train.guard.nonfinite = GuardAction::kSkip;
  validated.train.post_validation = 2;
  all.push_back({"post-validation", validated});
  Case less = tiny_case(Family::kLlama);
  less.layout.dp = 4;
  less.layout.zero = 3;
  less.layout.zero_plus_plus.secondary = 2;
  all.push_back({"secondary-shard", less});
  less.layout.zero_plus_plus = {.weights = true, .secondary = 2, .gradients = true};
  all.push_back({"zero-plus-plus", less});
  Case clipped_away = tiny_case(Family::kLlama);
  clipped_away.layout.bucket_bytes = 65536;
  clipped_away.layout.offload.optimizer = OffloadTo::kCpu;
  clipped_away.train.clip_norm = 1;
  all.push_back({"offload-optimizer-clipped", clipped_away});
  Case late = clipped_away;
  late.layout.offload.delayed_update = true;
  all.push_back({"delayed-update", late});
  Case filed = tiny_case();
  filed.model.layers = 4;
  filed.layout.recompute = Recompute::kFull;
  filed.layout.offload.activations = OffloadTo::kNvme;
  all.push_back({"offload-activations-nvme", filed});
  Case streamed = tiny_case(Family::kLlama);
  streamed.layout.dp = 2;
  streamed.layout.zero = 3;
  streamed.layout.offload = {.optimizer = OffloadTo::kCpu, .parameters = OffloadTo::kCpu};
  streamed.train.precision = Precision::kBf16;
  all.push_back({"offload-parameters", streamed});
  Case layers = tiny_case(Family::kLlama);
  layers.layout.zero = 3;
  layers.layout.offload = {.optimizer = OffloadTo::kNvme, .parameters = OffloadTo::kNvme};
  all.push_back({"offload-parameters-nvme", layers});
  Case coded = bucketed;
  coded.train.optimizer = Optimizer::kLion;
  all.push_back({"lion", coded});
  coded.train.optimizer = Optimizer::kAdamW8bit;
  all.push_back({"moments-in-8-bits", coded});
  return all;
}

/// Plans that are kept whole, to begin reading with.
const std::vector<std::string> kWhole{"single-gpt", "single-llama", "data-parallel-bucketed", "tensor-parallel", "pipeline-1f1b"};

TEST_CASE("golden plans") {
  std::vector<NamedText> texts;
  for (const Golden& golden : goldens()) {
    INFO(golden.name);
    const auto plan = lower(golden.config);
    REQUIRE((plan.ok() ? "" : to_string(plan.error())) == "");
    texts.push_back({golden.name, print(*plan)});
  }
  REQUIRE(golden_plans_difference(texts, kWhole) == "");
  for (const NamedText& t : texts) REQUIRE(golden_plan(t.name) == t.text);
}

TEST_CASE("a text is told by how it differs from another, and given back by that") {
  const std::string base = "a\nsegment s\nx\nx\nx\ny\nx\nx\nx\nz\n";
  for (const std::string text : {"a\nsegment s\nx\nx\nx\ny\nx\nx\nx\nz\n", "a\nsegment s\nx\nx\nx\ny\nx\nx\nx\nx\nz\n",
                                 "segment s\nx\nx\nx\ny\nx\nnew\nx\nz\nend\n", "", "x\n", "b\nc\n"})
    CHECK(with_difference(base, text_difference(base, text)) == text);
  CHECK(text_difference(base, base) == "");
  CHECK(text_difference(base, "a\nsegment s\nx\nx\nx\ny\nx\nx\nx\nw\n") == "@@ segment s\n x\n x\n-z\n+w\n");
  CHECK(with_difference("other\n", "@@ segment s\n x\n-y\n+z\n") == "");
}

TEST_CASE("golden plans are read back as they were printed, and verify again") {
  for (const Golden& golden : goldens()) {
    INFO(golden.name);
    const auto plan = lower(golden.config);
    REQUIRE(plan.ok());
    const std::string text = print(*plan);
    const auto again = parse_plan(text);
    REQUIRE((again.ok() ? "" : to_string(again.error())) == "");
    REQUIRE(print(*again) == text);
    const auto proved = verify(*again);
    REQUIRE((proved.ok() ? "" : to_string(proved.error())) == "");
  }
}

TEST_CASE("every strategy of the catalogue stands in some golden plan") {
  std::set<std::string> seen;
  for (const Golden& golden : goldens()) {
    const auto plan = lower(golden.config);
    seen.insert(plan->strategies.begin(), plan->strategies.end());
  }
  for (const Strategy& s : catalogue()) {
    INFO(s.name);
    REQUIRE(seen.contains(std::string(s.name)));
  }
}

}  // namespace
}  // namespace shardlab::testing
