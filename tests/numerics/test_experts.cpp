// Mixtures of experts against the separately written single-rank reference, which knows no rows, no counts and no permutation.
//
// Canonical mode: losses and parameters after 5 steps have the reference's bits, under every layout that is not refused. Fast mode: the
// error against the fp64 reference is at most 1.5 times that of one rank. Plans with a wrong route, count or weight are refused.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <string>
#include <vector>

#include "plan/base/tree.h"
#include "plan/memory.h"
#include "plan/row_levels.h"
#include "plan/verify.h"
#include "plan/wire.h"
#include "plan/work.h"
#include "strategies/lower.h"
#include "sweeps/models.h"
#include "tests/deal.h"
#include "tests/namespaces.h"
#include "tests/numerics/against_reference.h"
#include "tests/numerics/matrix.h"
#include "tests/numerics/running.h"
#include "tests/numerics/sized_cases.h"
#include "tests/numerics/train_case.h"
#include "tests/test.h"

namespace shardlab::testing::of_experts {
namespace {

Model mixture(const Experts& experts) {
  Model m;
  m.name = "mixture";
  m.family = Family::kLlama;
  m.layers = 2;
  m.hidden = 32;
  m.heads = 4;
  m.kv_heads = 2;
  m.head_dim = 8;
  m.ffn = 40;
  m.vocab = 64;
  m.max_positions = 24;
  m.init_deviation = 0.15f;
  m.experts = experts;
  return m;
}

constexpr Experts kSoftmax{.count = 8, .top_k = 2, .ffn = 20, .balance = 0.05f, .z_loss = 0.01f};
constexpr Experts kSigmoid{.count = 6, .top_k = 3, .ffn = 12, .sigmoid = true, .factor = 2.5f, .balance = 0.1f};
/// Experts are chosen by score plus a bias that moves far enough in a few steps to change choices.
constexpr Experts kBiased{.count = 8, .top_k = 2, .ffn = 20, .z_loss = 0.01f, .bias_update_rate = 0.02f};
constexpr Experts kBiasedGroups{.count = 8,
                                .top_k = 3,
                                .ffn = 12,
                                .sigmoid = true,
                                .factor = 2.5f,
                                .balance = 0.01f,
                                .shared = 1,
                                .dense_layers = 1,
                                .groups = 4,
                                .groups_chosen = 2,
                                .bias_update_rate = 0.05f};
constexpr Experts kSwitch{.count = 8, .top_k = 1, .ffn = 20, .normalise = false};
constexpr Experts with_capacity(Experts experts, float factor) {
  experts.capacity_factor = factor;
  return experts;
}
/// Experts that have room for about the even share alone, so that a part of the rows is dropped.
constexpr Experts kFull = with_capacity(kSoftmax, 1), kFullSwitch = with_capacity(kSwitch, 1.25f),
                  kFullGroups = with_capacity(kBiasedGroups, 0.75f);

Subject subject_of(const Experts& experts, Optimizer optimizer, float dropout = 0, float clip_norm = 0) {
  Train t;
  t.seq_len = 20;
  t.dropout = dropout;
  t.clip_norm = clip_norm;
  t.seed = 11;
  t.optimizer = optimizer;
  t.learning_rate.peak = optimizer == Optimizer::kSgd ? 1.0f : 0.01f;
  t.weight_decay = 0.1f;
  return {fmt::format("mixture of {} {}", experts.count, name_of(optimizer)), mixture(experts), t, 8};
}

/// Layers of two kinds, norms of heads, and what else surrounds routed experts. Of three layers the last, or the second, has them.
Subject layered(bool sigmoid, Optimizer optimizer, float dropout = 0, float clip_norm = 0) {
  Experts e = sigmoid ? kSigmoid : kSoftmax;
  e.count = 8, e.groups = 4, e.groups_chosen = 2;
  e.shared = sigmoid ? 2 : 1;
  if (sigmoid)
    e.dense_layers = 2;
  else
    e.every = 2;
  Subject subject = subject_of(e, optimizer, dropout, clip_norm);
  subject.name = fmt::format("layered {}", sigmoid ? "sigmoid" : "softmax");
  subject.model.layers = 3;
  subject.model.qk_norm = true;
  return subject;
}

/// Shared experts behind a gate, and biases of q, k and v, as Qwen2-MoE has them.
Subject gated(bool sigmoid, Optimizer optimizer, float dropout = 0, float clip_norm = 0) {
  Subject subject = layered(sigmoid, optimizer, dropout, clip_norm);
  subject.name = fmt::format("gated {}", sigmoid ? "sigmoid" : "softmax");
  subject.model.layers = 2;
  subject.model.experts.dense_layers = 0, subject.model.experts.every = 1;
  subject.model.experts.shared_gate = true;
  subject.model.qk_norm = false, subject.model.qkv_biases = true;
  subject.train.seq_len = 24;
  return subject;
}

/// A config.json of Qwen2-MoE: the keys of Qwen1.5-MoE-A2.7B, and small sizes.
Model small_qwen2_moe() {
  const auto model = sweeps::parse_model(
      R"({"architectures": ["Qwen2MoeForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1, "decoder_sparse_step": 1, "eos_token_id": 2,
          "hidden_act": "silu", "hidden_size": 32, "initializer_range": 0.15, "intermediate_size": 48, "max_position_embeddings": 24,
          "max_window_layers": 2, "model_type": "qwen2_moe", "moe_intermediate_size": 12, "norm_topk_prob": false, "num_attention_heads": 4,
          "num_experts": 8, "num_experts_per_tok": 2, "num_hidden_layers": 2, "num_key_value_heads": 2, "output_router_logits": false,
          "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 48,
          "sliding_window": 32768, "tie_word_embeddings": false, "torch_dtype": "bfloat16", "use_cache": true, "use_sliding_window": false,
          "vocab_size": 64})",
      "qwen2-moe");
  SHARDLAB_CHECK(model.ok(), "{}", to_string(model.error()));
  return *model;
}

/// A config.json of Qwen3-MoE: the keys of Qwen3-30B-A3B, and small sizes.
Model small_qwen3_moe() {
  const auto model = sweeps::parse_model(
      R"({"architectures": ["Qwen3MoeForCausalLM"], "attention_bias": false, "attention_dropout": 0.0, "bos_token_id": 1, "decoder_sparse_step": 2,
          "eos_token_id": 2, "head_dim": 8, "hidden_act": "silu", "hidden_size": 32, "initializer_range": 0.15, "intermediate_size": 40,
          "max_position_embeddings": 24, "max_window_layers": 4, "mlp_only_layers": [0, 1], "model_type": "qwen3_moe",
          "moe_intermediate_size": 12, "norm_topk_prob": true, "num_attention_heads": 4, "num_experts": 8, "num_experts_per_tok": 2,
          "num_hidden_layers": 4, "num_key_value_heads": 2, "output_router_logits": false, "rms_norm_eps": 1e-06, "rope_scaling": null,
          "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001, "sliding_window": null, "tie_word_embeddings": true,
          "torch_dtype": "bfloat16", "use_cache": true, "use_sliding_window": false, "vocab_size": 64})",
      "qwen3-moe");
  SHARDLAB_CHECK(model.ok(), "{}", to_string(model.error()));
  return *model;
}

}  // namespace

TEST_CASE("experts, canonical: one rank, data parallel, ZeRO, stages and micro-batches train to the bits of the reference") {
  constexpr Sizes kSizes[] = {{},
                              {.accumulation = 2},
                              {.dp = 2, .accumulation = 2},
                              {.dp = 4, .zero = 1},
                              {.dp = 2, .zero = 2, .accumulation = 2},
                              {.dp = 2, .zero = 3, .accumulation = 2},
                              {.dp = 2, .pp = 2, .accumulation = 4}};
  for (const Subject& subject : {subject_of(kSoftmax, Optimizer::kSgd), subject_of(kSigmoid, Optimizer::kAdamW, 0.25f, 0.5f),
                                 subject_of(kSwitch, Optimizer::kSgd)}) {
    std::vector<Case> cases;
    for (const Sizes& sizes : kSizes) cases.push_back(case_of(subject, sizes, true));
    cases.push_back(case_of(subject, {.pp = 2, .accumulation = 4, .schedule = Schedule::kZbH1}, true));
    train_all(subject, cases);
  }
}

TEST_CASE("experts, canonical: what is made again or waits elsewhere leaves the bits") {
  const Subject subject = subject_of(kSoftmax, Optimizer::kAdamW);
  std::vector<Case> cases;
  for (const Recompute recompute : {Recompute::kFull, Recompute::kSelective}) {
    cases.push_back(case_of(subject, {.dp = 2, .accumulation = 2}, true));
    cases.back().layout.recompute = recompute;
  }
  cases[1].layout.recompute_options.modules = "mlp.act mlp.norm";
  cases.push_back(cases[0]);
  cases.back().layout.offload.activations = cases.back().layout.offload.optimizer = OffloadTo::kCpu;
  train_all(subject, cases);
}

TEST_CASE("expert parallel, canonical: shared among ranks, experts train to the bits of the reference") {
  constexpr Sizes kSizes[] = {{.dp = 2, .ep = 2},
                              {.dp = 4, .ep = 2},
                              {.dp = 2, .ep = 2, .accumulation = 2},
                              {.dp = 4, .ep = 2, .accumulation = 2},
                              {.dp = 4, .ep = 2, .zero = 1},
                              {.dp = 2, .ep = 2, .zero = 1},
                              {.dp = 4, .ep = 2, .zero = 3, .accumulation = 2},
                              {.dp = 2, .ep = 2, .zero = 3},
                              {.dp = 4, .ep = 2, .zero = 2, .accumulation = 2},
                              {.dp = 2, .ep = 2, .pp = 2, .accumulation = 4}};
  for (const Subject& subject : {subject_of(kSoftmax, Optimizer::kSgd), subject_of(kSigmoid, Optimizer::kAdamW, 0.25f, 0.5f),
                                 subject_of(kSwitch, Optimizer::kAdamW)}) {
    std::vector<Case> cases;
    for (const Sizes& sizes : kSizes) cases.push_back(case_of(subject, sizes, true));
    if (subject.model.experts.count == 8) cases.push_back(case_of(subject, {.dp = 4, .ep = 4, .zero = 2, .accumulation = 2}, true));
    cases.push_back(cases[0]);
    cases.back().layout.recompute = Recompute::kFull;
    cases.push_back(cases[1]);
    cases.back().layout.offload.activations = OffloadTo::kCpu;
    cases.push_back(cases[4]);
    cases.back().layout.bucket_bytes = 8192;
    train_all(subject, cases);
  }
}

TEST_CASE(
    "layers of two kinds, shared experts, groups and norms of heads, canonical: every layout trains to the bits of the reference") {
  constexpr Sizes kSizes[] = {{},
                              {.dp = 2, .accumulation = 2},
                              {.dp = 4, .zero = 1},
                              {.dp = 2, .zero = 2, .accumulation = 2},
                              {.dp = 2, .zero = 3, .accumulation = 2},
                              {.pp = 3, .accumulation = 4},
                              {.dp = 2, .ep = 2, .accumulation = 2},
                              {.dp = 4, .ep = 2, .zero = 3, .accumulation = 2},
                              {.dp = 4, .ep = 4, .zero = 2, .accumulation = 2},
                              {.dp = 2, .ep = 2, .pp = 2, .accumulation = 4}};
  for (const Subject& subject : {layered(false, Optimizer::kSgd), layered(true, Optimizer::kAdamW, 0.25f, 0.5f)}) {
    std::vector<Case> cases;
    for (const Sizes& sizes : kSizes) cases.push_back(case_of(subject, sizes, true));
    cases.push_back(case_of(subject, {.pp = 2, .accumulation = 4, .schedule = Schedule::kZbH1}, true));
    for (const Recompute recompute : {Recompute::kFull, Recompute::kSelective, Recompute::kByLayer}) {
      cases.push_back(case_of(subject, {.dp = 2, .ep = 2, .accumulation = 2}, true));
      cases.back().layout.recompute = recompute;
    }
    cases.back().layout.recompute_options.layers = "1*full 1*attn.core+mlp.act@cpu 1*full@cpu";
    cases.push_back(cases[1]);
    cases.back().layout.recompute = Recompute::kFull;
    cases.back().layout.recompute_options.every = 2;
    cases.push_back(cases[2]);
    cases.back().layout.bucket_bytes = 8192;
    train_all(subject, cases);
  }
}

TEST_CASE(
    "exchanges beside compute, canonical: within a layer, and beside another micro-batch, layouts train to the bits of the "
    "reference") {
  using enum Schedule;
  const Schedule kEager = *schedule_named("eager-1f1b");
  const Sizes kSizes[] = {{.dp = 2, .ep = 2, .accumulation = 2},
                          {.dp = 2, .ep = 2, .accumulation = 4},
                          {.dp = 4, .ep = 2, .zero = 1},
                          {.dp = 4, .ep = 2, .zero = 2, .accumulation = 2},
                          {.dp = 4, .ep = 2, .zero = 3, .accumulation = 2},
                          {.dp = 2, .ep = 2, .pp = 2, .accumulation = 4, .schedule = kEager},
                          {.dp = 2, .ep = 2, .pp = 2, .accumulation = 4, .schedule = kZbH2},
                          {.dp = 2, .ep = 2, .pp = 2, .accumulation = 4, .schedule = kEager, .tp = 2, .sequence_parallel = true},
                          {.dp = 2, .ep = 4, .zero = 2, .accumulation = 4, .cp = 2}};
  Experts more = kSoftmax;
  more.shared = 1;
  Subject local = subject_of(more, Optimizer::kSgd);
  local.model.window = {.tokens = 7, .global_every = 2};
  for (Subject subject : {subject_of(kSoftmax, Optimizer::kSgd), subject_of(more, Optimizer::kAdamW, 0.25f, 0.5f), local,
                          layered(true, Optimizer::kAdamW)}) {
    subject.train.seq_len = 24;
    std::vector<Case> cases;
    int braided = 0;
    for (const ExpertOverlap overlap : {ExpertOverlap::kLayer, ExpertOverlap::kMicroBatches})
      for (const Recompute recompute : {Recompute::kNone, Recompute::kFull, Recompute::kSelective})
        for (const Sizes& sizes : kSizes) {
          if (sizes.pp > 1 && subject.model.layers % 2 != 0) continue;
          if (recompute == Recompute::kSelective && sizes.zero == 1) continue;
          Case c = case_of(subject, sizes, true);
          c.layout.expert_overlap = overlap;
          c.layout.recompute = recompute;
          if (recompute == Recompute::kSelective) c.layout.recompute_options.modules = "attn.norm mlp.act";
          if (overlap == ExpertOverlap::kMicroBatches && (sizes.zero == 3 || c.train.grad_accumulation < 2)) {
            REQUIRE_FALSE(check(c).ok());
            continue;
          }
          braided += overlap == ExpertOverlap::kMicroBatches;
          cases.push_back(std::move(c));
        }
    REQUIRE(braided >= 10);
    train_all(subject, cases);
  }
}

namespace {

/// The case with its ranks on two nodes, rows of experts by node or from rank to rank.
Case on_two_nodes(Case config, AlgorithmChoice choice) {
  config.machine.local = true, config.machine.nodes = 2;
  config.layout.collective_algorithm = choice;
  config.name += fmt::format(" {}", name_of(choice));
  return config;
}

/// Exchanges of rows of a plan that go by node.
int exchanges_by_node(const Plan& plan) {
  int found = 0;
  for (const Segment& segment : plan.segments)
    for (const Step& step : segment.steps)
      if (const Op* op = std::get_if<Op>(&step)) found += row_levels(segment, *op).has_value();
  return found;
}

/// Exchanges of a plan in which a token crosses to a node once.
int exchanges_of_tokens(const Plan& plan) {
  int found = 0;
  for (const Segment& segment : plan.segments)
    for (const Step& step : segment.steps)
      if (const Op* op = std::get_if<Op>(&step)) found += crosses_once(*op);
  return found;
}

/// The canonical plan of the case with its exchanges of rows by node.
Plan by_node_of(const Case& config, int per_node) {
  auto plan = lower(config);
  SHARDLAB_CHECK(plan.ok(), "{}", to_string(plan.error()));
  for (Segment& segment : plan->segments)
    for (size_t i = 0; i < segment.steps.size(); ++i)
      if (Op* op = std::get_if<Op>(&segment.steps[i]); op != nullptr && moves_packed_rows(*op)) {
        auto& c = std::get<Collective>(op->work);
        c.algorithm = Algorithm::kHierarchical, c.per_node = per_node;
        cross_once(segment, config.model.experts, *op);
        free_behind(segment, i);
      }
  add_workspaces(*plan, config.canonical);
  return std::move(*plan);
}

}  // namespace

TEST_CASE("expert parallel by node: rows that pass other ranks train to the bits of rows from rank to rank") {
  const Subject subject = subject_of(kSoftmax, Optimizer::kAdamW, 0.1f, 0.5f);
  Subject capacity = subject_of(kFull, Optimizer::kSgd), layers = layered(true, Optimizer::kAdamW), bf16 = subject, fp16 = subject,
          fp8 = subject;
  capacity.train.seq_len = layers.train.seq_len = 24;
  bf16.train.precision = Precision::kBf16, fp16.train.precision = Precision::kFp16, fp8.train.precision = Precision::kFp8;
  fp8.train.fp8_scaling = Fp8Scaling::kBlock;
  fp16.model.experts.balance = fp16.model.experts.z_loss = 0;  // losses of routers are refused beside fp16
  struct Kind {
    const Subject* of;
    Sizes sizes;
    int exchanges = 4;  // there and back, in forward and backward
    int of_tokens = 2;  // of those that go the rows are copies of tokens, or products with weights
    Recompute recompute = Recompute::kNone;
    ExpertOverlap overlap = ExpertOverlap::kNone;
  };
  const Kind kinds[] = {{&subject, {.dp = 4, .ep = 4, .accumulation = 2}},
                        {&subject, {.dp = 8, .ep = 8, .zero = 1}},
                        {&subject, {.dp = 4, .ep = 4, .zero = 3, .tp = 2}},
                        {&capacity, {.dp = 4, .ep = 4, .accumulation = 2}},
                        {&bf16, {.dp = 4, .ep = 4, .accumulation = 2}},
                        {&fp16, {.dp = 4, .ep = 4}},
                        // Scales travel ahead of rows, and rounded gradients are no products of rounded factors.
                        {&fp8, {.dp = 4, .ep = 4}, 6},
                        {&subject, {.dp = 4, .ep = 4, .accumulation = 2}, 6, 3, Recompute::kFull},
                        {&capacity, {.dp = 4, .ep = 4, .accumulation = 2}, 4, 2, Recompute::kNone, ExpertOverlap::kLayer},
                        {&layers, {.dp = 2, .ep = 4, .accumulation = 4, .cp = 2}}};
  for (const Kind& kind : kinds) {
    Case config = case_of(*kind.of, kind.sizes, true);
    config.layout.recompute = kind.recompute, config.layout.expert_overlap = kind.overlap;
    Plan plan = by_node_of(config, 2);
    INFO(config.name << " " << name_of(config.train.precision));
    REQUIRE(verify(plan).ok());
    CHECK(exchanges_by_node(plan) == kind.exchanges);
    CHECK(exchanges_of_tokens(plan) == kind.of_tokens);
    Running direct(config), by_node(config, std::move(plan));
    for (int64_t step = 0; step < 3; ++step) CHECK(*direct.session->step(step).loss == *by_node.session->step(step).loss);
    const auto states = direct.session->states();
    REQUIRE(states.ok());
    REQUIRE(!states->empty());
    for (const StateName& name : *states)
      CHECK(same_bits(direct.session->state(name)->values, by_node.session->state(name)->values));
  }
}

TEST_CASE(
    "expert parallel by node: memory is the plan's to the byte, with as many rows staged as the nodes' ranks of one place have") {
  for (const auto& [factor, bound] : {std::pair(0.0f, 0.0f), {1.0f, 0.0f}, {0.0f, 2.0f}}) {
    Subject subject = subject_of(with_capacity(kSoftmax, factor), Optimizer::kSgd);
    subject.train.seq_len = 24, subject.model.hidden = 64;
    Case base = case_of(subject, {.dp = 4, .ep = 4, .accumulation = 1}, false);
    base.layout.expert_bound = bound;  // less room with the experts, and none in what is staged
    const Case config = on_two_nodes(base, AlgorithmChoice::kHierarchical);
    INFO(config.name << " capacity " << factor << " bound " << bound);
    Running run(config);
    REQUIRE(std::isfinite(*run.session->step(0).loss));
    for (int rank = 0; rank < 4; ++rank)
      CHECK(run.session->ledger(rank).peak(Space::kDevice) ==
            memory_peak(*run.placed.plan, 0)[static_cast<size_t>(Space::kDevice)].peak_bytes);
    // Two sequences of 24 tokens, two rows each; under the capacity at most 2 x 6 rows of a sequence go to a rank's two experts.
    const int64_t rows = factor > 0 ? 2 * 2 * 12 : 2 * 24 * 2, head = 64;
    int64_t staged = 0;
    for (const Segment& segment : run.placed.plan->segments)
      for (const Step& step : segment.steps)
        if (const Op* op = std::get_if<Op>(&step)) staged = std::max(staged, row_stage_bytes(segment, *op));
    // What is told of the 96 rows at home, and heard of the rows of both ranks of the place, with their weights.
    const int64_t lists = (8 * (96 + 2 * rows) + 63) / 64 * 64;
    CHECK(staged == head + lists + 2 * rows * 64 * 4);
    const Role& role = run.placed.plan->roles[0];
    const auto workspace =
        std::ranges::find_if(role.buffers, [](const Buffer& b) { return b.kind == BufferClass::kWorkspace && b.type.bytes() > 0; });
    REQUIRE(workspace != role.buffers.end());
    CHECK(workspace->type.bytes() >= staged);
  }
}

TEST_CASE("experts placed out of order, canonical: under every placement layouts train to the bits of the reference") {
  constexpr Sizes kSizes[] = {{.dp = 2, .ep = 2},
                              {.dp = 4, .ep = 2, .accumulation = 2},
                              {.dp = 4, .ep = 4, .zero = 1},
                              {.dp = 4, .ep = 2, .zero = 2, .accumulation = 2},
                              {.dp = 4, .ep = 2, .zero = 3, .accumulation = 2},
                              {.dp = 4, .ep = 4, .zero = 3},
                              {.dp = 2, .ep = 2, .pp = 2, .accumulation = 4},
                              {.dp = 2, .ep = 2, .accumulation = 2, .tp = 2, .sequence_parallel = true},
                              {.dp = 2, .ep = 4, .zero = 2, .accumulation = 4, .cp = 2}};
  constexpr std::string_view kPlacements[] = {"0:7,6,5,4,3,2,1,0 1:1,0,2,3,4,5,6,7", "1:3,0,6,5,2,7,4,1"};
  for (Subject subject : {subject_of(kSoftmax, Optimizer::kSgd), subject_of(kBiasedGroups, Optimizer::kAdamW, 0.25f, 0.5f),
                          subject_of(kFull, Optimizer::kAdamW)}) {
    subject.train.seq_len = 24;
    std::vector<Case> cases;
    for (const Sizes& sizes : kSizes)
      for (const std::string_view placement : kPlacements) {
        if (subject.model.experts.dense_layers > 0 && placement != kPlacements[1]) continue;  // layer 0 has no experts
        cases.push_back(case_of(subject, sizes, true));
        cases.back().layout.expert_placement = placement;
      }
    for (const size_t i : {size_t{0}, size_t{3}}) {
      cases.push_back(cases[i]);
      cases.back().layout.recompute = Recompute::kFull;
      cases.push_back(cases[i]);
      cases.back().layout.expert_overlap = ExpertOverlap::kLayer;
    }
    train_all(subject, cases);
  }
}

TEST_CASE("experts beside context parallelism, canonical: parts of sequences train to the bits of the reference") {
  using enum ContextKind;
  constexpr Sizes kSizes[] = {{.accumulation = 4, .cp = 2},
                              {.dp = 2, .accumulation = 2, .cp = 2, .kind = kAllGather},
                              {.dp = 2, .zero = 3, .accumulation = 2, .cp = 2, .kind = kUlysses},
                              {.pp = 2, .accumulation = 4, .cp = 2, .kind = kStriped},
                              {.accumulation = 4, .cp = 4, .kind = kUsp},
                              // The parts of a sequence share the experts ...
                              {.ep = 2, .accumulation = 4, .cp = 2, .kind = kZigzag},
                              {.dp = 2, .ep = 2, .accumulation = 2, .cp = 2},
                              {.dp = 2, .ep = 2, .zero = 2, .accumulation = 2, .cp = 2},
                              {.dp = 4, .ep = 2, .zero = 1, .cp = 2},
                              {.ep = 4, .accumulation = 4, .cp = 4, .kind = kUsp},
                              // ... and so do those of several.
                              {.dp = 2, .ep = 4, .accumulation = 2, .cp = 2, .kind = kAllGather},
                              {.dp = 4, .ep = 4, .cp = 2},
                              {.dp = 4, .ep = 4, .zero = 3, .cp = 2, .kind = kUlysses},
                              {.dp = 2, .ep = 4, .pp = 2, .zero = 2, .accumulation = 2, .cp = 2}};
  Experts sigmoid = kSigmoid;
  sigmoid.count = 8;
  for (Subject subject : {subject_of(kSoftmax, Optimizer::kSgd), subject_of(sigmoid, Optimizer::kAdamW, 0.25f, 0.5f),
                          layered(false, Optimizer::kAdamW), layered(true, Optimizer::kSgd, 0.25f)}) {
    subject.train.seq_len = 24;
    subject.sequences = 4;
    std::vector<Case> cases;
    for (const Sizes& sizes : kSizes)
      if (sizes.pp == 1 || subject.model.layers == 2) cases.push_back(case_of(subject, sizes, true));
    for (const size_t i : {size_t{1}, size_t{10}}) {
      cases.push_back(cases[i]);
      cases.back().layout.recompute = Recompute::kFull;
    }
    train_all(subject, cases);
  }
}

TEST_CASE("experts beside tensor parallelism, canonical: slices of experts train to the bits of the reference") {
  constexpr Sizes kSizes[] = {{.tp = 2},
                              {.accumulation = 2, .tp = 2, .sequence_parallel = true},
                              {.dp = 2, .accumulation = 2, .tp = 2},
                              {.dp = 2, .zero = 2, .accumulation = 2, .tp = 2, .sequence_parallel = true},
                              {.dp = 2, .zero = 3, .tp = 2},
                              {.dp = 2, .ep = 2, .accumulation = 2, .tp = 2},
                              {.dp = 2, .ep = 2, .zero = 1, .tp = 2, .sequence_parallel = true},
                              {.dp = 4, .ep = 2, .zero = 3, .accumulation = 2, .tp = 2, .sequence_parallel = true},
                              {.dp = 4, .ep = 2, .tp = 2},
                              {.dp = 2, .ep = 2, .pp = 2, .accumulation = 4, .tp = 2, .sequence_parallel = true},
                              // Parts of sequences too.
                              {.accumulation = 8, .cp = 2, .tp = 2, .sequence_parallel = true},
                              {.dp = 2, .ep = 2, .accumulation = 4, .cp = 2, .tp = 2},
                              {.dp = 2, .ep = 4, .zero = 2, .accumulation = 4, .cp = 2, .tp = 2, .sequence_parallel = true}};
  Experts sigmoid = kSigmoid;
  sigmoid.count = 8;
  for (Subject subject : {subject_of(kSoftmax, Optimizer::kSgd), subject_of(sigmoid, Optimizer::kAdamW, 0.25f, 0.5f),
                          layered(false, Optimizer::kAdamW), layered(true, Optimizer::kSgd, 0.25f)}) {
    subject.train.seq_len = 24;
    std::vector<Case> cases;
    for (const Sizes& sizes : kSizes)
      if (sizes.pp == 1 || subject.model.layers == 2) cases.push_back(case_of(subject, sizes, true));
    for (const size_t i : {size_t{0}, size_t{5}, size_t{7}}) {
      cases.push_back(cases[i]);
      cases.back().layout.recompute = Recompute::kFull;
    }
    for (const size_t i : {size_t{1}, size_t{8}}) {
      cases.push_back(cases[i]);
      cases.back().layout.recompute = Recompute::kSelective;
      cases.back().layout.recompute_options.modules = "attn.norm attn.core mlp.norm mlp.act";
    }
    train_all(subject, cases);
  }
}

TEST_CASE(
    "whole experts beside tensor parallelism, canonical: ranks of tp share them, and they train to the bits of the reference") {
  constexpr Sizes kSizes[] = {{.ep = 2, .accumulation = 8, .tp = 2},
                              {.dp = 2, .ep = 2, .accumulation = 4, .tp = 2},
                              {.dp = 2, .ep = 4, .accumulation = 4, .tp = 2},
                              {.dp = 2, .ep = 8, .zero = 2, .accumulation = 4, .tp = 4},
                              {.dp = 2, .ep = 2, .zero = 3, .accumulation = 4, .tp = 2},
                              {.dp = 4, .ep = 4, .zero = 3, .accumulation = 2, .tp = 2},
                              {.dp = 8, .ep = 4, .zero = 1, .tp = 2},
                              {.ep = 2, .pp = 2, .accumulation = 8, .schedule = Schedule::kZbH1, .tp = 2},
                              {.dp = 2, .ep = 4, .pp = 2, .accumulation = 4, .tp = 2},
                              // Parts of sequences too.
                              {.ep = 4, .zero = 2, .accumulation = 8, .cp = 2, .tp = 2},
                              {.dp = 2, .ep = 8, .accumulation = 4, .cp = 2, .kind = ContextKind::kZigzag, .tp = 2},
                              {.ep = 8, .accumulation = 8, .cp = 4, .kind = ContextKind::kUsp, .tp = 2}};
  Experts sigmoid = kSigmoid;
  sigmoid.count = 8;
  for (Subject subject :
       {subject_of(kSoftmax, Optimizer::kSgd), subject_of(sigmoid, Optimizer::kAdamW, 0.25f, 0.5f),
        subject_of(kBiased, Optimizer::kSgd), layered(false, Optimizer::kAdamW), gated(true, Optimizer::kAdamW, 0.25f, 0.5f)}) {
    subject.train.seq_len = 24;
    std::vector<Case> cases;
    for (const Sizes& sizes : kSizes)
      if (sizes.pp == 1 || subject.model.layers == 2) cases.push_back(case_of(subject, with_whole_experts(sizes), true));
    for (const size_t i : {size_t{0}, size_t{2}, size_t{5}}) {
      cases.push_back(cases[i]);
      cases.back().layout.recompute = Recompute::kFull;
    }
    cases.push_back(cases[1]);
    cases.back().layout.recompute = Recompute::kSelective;
    cases.back().layout.recompute_options.modules = "attn.norm attn.core mlp.norm mlp.act";
    for (const ExpertOverlap overlap : {ExpertOverlap::kLayer, ExpertOverlap::kMicroBatches}) {
      cases.push_back(cases[2]);
      cases.back().layout.expert_overlap = overlap;
    }
    cases.push_back(cases[2]);
    cases.back().layout.expert_placement =
        subject.model.is_mixture(0) ? "0:7,2,4,1,0,6,3,5" : fmt::format("{}:7,2,4,1,0,6,3,5", subject.model.layers - 1);
    train_all(subject, cases);
  }
}

TEST_CASE(
    "slices of experts over some ranks of tp, canonical: groups of them share the experts, and they train to the bits of the "
    "reference") {
  constexpr Sizes kSizes[] = {{.ep = 2, .accumulation = 8, .tp = 4},
                              {.dp = 2, .ep = 2, .accumulation = 4, .tp = 4},
                              {.dp = 2, .ep = 4, .accumulation = 4, .tp = 4},
                              {.dp = 2, .ep = 4, .zero = 2, .accumulation = 4, .tp = 4},
                              {.dp = 2, .ep = 2, .zero = 3, .accumulation = 4, .tp = 4},
                              {.dp = 8, .ep = 4, .zero = 1, .tp = 4},
                              {.ep = 2, .pp = 2, .accumulation = 8, .schedule = Schedule::kZbH1, .tp = 4},
                              // Parts of sequences too.
                              {.ep = 4, .zero = 2, .accumulation = 8, .cp = 2, .tp = 4},
                              {.dp = 2, .ep = 8, .accumulation = 4, .cp = 2, .kind = ContextKind::kZigzag, .tp = 4}};
  for (Subject subject : {subject_of(kSoftmax, Optimizer::kSgd), subject_of(kFullGroups, Optimizer::kAdamW, 0.25f, 0.5f),
                          layered(false, Optimizer::kAdamW), gated(true, Optimizer::kAdamW, 0.25f, 0.5f)}) {
    subject.train.seq_len = 24;
    subject.sequences = 8;
    subject.model.qk_norm = false;  // whose kv heads tp divides
    std::vector<Case> cases;
    for (const Sizes& sizes : kSizes)
      if (sizes.pp == 1 || subject.model.layers == 2) cases.push_back(case_of(subject, with_expert_slices(sizes, 2), true));
    for (const ExpertOverlap overlap : {ExpertOverlap::kLayer, ExpertOverlap::kMicroBatches}) {
      cases.push_back(cases[2]);
      cases.back().layout.expert_overlap = overlap;
      cases.back().layout.recompute = Recompute::kFull;
    }
    train_all(subject, cases);
  }
}

TEST_CASE("biases of routers, canonical: every layout chooses experts as the reference does, and trains to its bits") {
  constexpr Sizes kSizes[] = {{},
                              {.accumulation = 4},
                              {.dp = 2, .accumulation = 2},
                              {.dp = 4, .zero = 1},
                              {.dp = 2, .zero = 3, .accumulation = 2},
                              {.dp = 2, .ep = 2, .accumulation = 2},
                              {.dp = 4, .ep = 2, .zero = 2, .accumulation = 2},
                              {.accumulation = 2, .tp = 2, .sequence_parallel = true},
                              {.dp = 2, .ep = 2, .accumulation = 4, .cp = 2, .tp = 2},
                              {.dp = 2, .ep = 4, .zero = 2, .accumulation = 4, .cp = 2, .tp = 2, .sequence_parallel = true},
                              {.pp = 2, .accumulation = 4, .schedule = Schedule::kZbH1},
                              {.dp = 2, .ep = 2, .pp = 2, .accumulation = 4}};
  for (Subject subject : {subject_of(kBiased, Optimizer::kSgd), subject_of(kBiasedGroups, Optimizer::kAdamW, 0.25f, 0.5f)}) {
    subject.train.seq_len = 24;
    std::vector<Case> cases;
    for (const Sizes& sizes : kSizes) cases.push_back(case_of(subject, sizes, true));
    for (const size_t i : {size_t{2}, size_t{5}, size_t{8}}) {
      cases.push_back(cases[i]);
      cases.back().layout.recompute = Recompute::kFull;
    }
    train_all(subject, cases);
    Subject still = subject;  // or nothing above would show that biases do anything
    still.model.experts.bias_update_rate = 0;
    CHECK(expect<float>(still).losses != expect<float>(subject).losses);
  }
}

TEST_CASE("biases of routers move by the loads of their own step where updates are delayed, from the first step on") {
  const Case now = case_of(subject_of(kBiased, Optimizer::kAdamW), {.dp = 2, .accumulation = 2}, true);
  Case delayed = now;
  delayed.layout.offload.optimizer = OffloadTo::kCpu;
  delayed.layout.offload.delayed_update = true;
  // The first step runs the same weights, and routers choose alike; only then do weights differ.
  Running one(now), other(delayed);
  one.session->step(0), other.session->step(0);
  for (int layer = 0; layer < 2; ++layer) {
    const std::string name = fmt::format("router_bias.layers.{}", layer);
    const std::vector<float> biases = one.session->gather_buffer(name).value().values;
    CHECK(std::ranges::count(biases, 0.0f) < static_cast<int64_t>(biases.size()));
    CHECK(other.session->gather_buffer(name).value().values == biases);
  }
}

TEST_CASE("norms of heads beside tensor parallelism, canonical: a dense model's heads train to the bits of the reference") {
  Subject subject = subject_of({}, Optimizer::kSgd);
  subject.name = "dense with norms of heads";
  subject.model.qk_norm = true;
  subject.model.heads = 8, subject.model.kv_heads = 4, subject.model.head_dim = 4;
  subject.train.seq_len = 24;
  train_all(subject,
            {case_of(subject, {.tp = 2}, true), case_of(subject, {.accumulation = 2, .tp = 4, .sequence_parallel = true}, true),
             case_of(subject, {.dp = 2, .zero = 3, .accumulation = 2, .tp = 2}, true),
             case_of(subject, {.pp = 2, .accumulation = 4, .schedule = Schedule::kZbH1, .tp = 2}, true),
             case_of(subject, {.accumulation = 8, .cp = 2, .tp = 2}, true),
             case_of(subject, {.accumulation = 8, .cp = 4, .tp = 2, .sequence_parallel = true}, true)});
}

TEST_CASE("a config.json of Qwen3-MoE is read and trains to the bits of the reference") {
  Subject subject = subject_of(kSoftmax, Optimizer::kAdamW, 0, 1.0f);
  subject.model = small_qwen3_moe();
  REQUIRE(subject.model.mixture_layers() == 1);
  train_all(subject, {case_of(subject, {}, true), case_of(subject, {.dp = 4, .ep = 2, .zero = 1}, true),
                      case_of(subject, {.dp = 2, .ep = 2, .pp = 2, .accumulation = 4}, true)});
}

TEST_CASE("gated shared experts and biases of q, k and v, canonical: every layout trains to the bits of the reference") {
  constexpr Sizes kSizes[] = {{},
                              {.dp = 2, .zero = 3, .accumulation = 2},
                              {.dp = 4, .ep = 2, .zero = 1},
                              {.dp = 2, .ep = 2, .accumulation = 4, .cp = 2},
                              {.tp = 2},
                              {.accumulation = 2, .tp = 2, .sequence_parallel = true},
                              {.accumulation = 2, .tp = 4, .sequence_parallel = true},
                              {.dp = 2, .ep = 2, .zero = 1, .tp = 2, .sequence_parallel = true},
                              {.dp = 2, .ep = 4, .zero = 2, .accumulation = 4, .cp = 2, .tp = 2, .sequence_parallel = true},
                              {.pp = 2, .accumulation = 4, .schedule = Schedule::kZbH1},
                              {.dp = 2, .ep = 2, .pp = 2, .accumulation = 4, .tp = 2}};
  for (const Subject& subject : {gated(false, Optimizer::kSgd), gated(true, Optimizer::kAdamW, 0.25f, 0.5f)}) {
    std::vector<Case> cases;
    for (const Sizes& sizes : kSizes) cases.push_back(case_of(subject, sizes, true));
    for (const size_t i : {size_t{2}, size_t{7}}) {
      cases.push_back(cases[i]);
      cases.back().layout.recompute = Recompute::kFull;
    }
    cases.push_back(cases[5]);
    cases.back().layout.recompute = Recompute::kSelective;
    cases.back().layout.recompute_options.modules = "attn.norm attn.core mlp.norm mlp.act";
    train_all(subject, cases);
    Subject open = subject;  // or nothing above would show that the gate does anything
    open.model.experts.shared_gate = false;
    CHECK(expect<float>(open).losses != expect<float>(subject).losses);
  }
}

TEST_CASE("biases of q, k and v of a dense model, canonical: slices, kv heads on several ranks too, have the reference's bits") {
  Subject subject = subject_of({}, Optimizer::kAdamW);
  subject.name = "dense with biases of q, k and v";
  subject.model.qkv_biases = true;
  subject.train.seq_len = 24;
  train_all(subject, {case_of(subject, {}, true), case_of(subject, {.dp = 2, .zero = 3, .accumulation = 2, .tp = 2}, true),
                      case_of(subject, {.accumulation = 2, .tp = 4, .sequence_parallel = true}, true),
                      case_of(subject, {.pp = 2, .accumulation = 8, .cp = 2, .tp = 2}, true)});
}

TEST_CASE("a config.json of Qwen2-MoE is read and trains to the bits of the reference") {
  Subject subject = subject_of(kSoftmax, Optimizer::kAdamW, 0, 1.0f);
  subject.model = small_qwen2_moe();
  REQUIRE(subject.model.experts.shared == 4);
  train_all(subject, {case_of(subject, {}, true), case_of(subject, {.dp = 4, .ep = 2, .zero = 1}, true),
                      case_of(subject, {.dp = 2, .ep = 2, .pp = 2, .accumulation = 4}, true)});
}

TEST_CASE("experts of a capacity, canonical: rows are dropped by sequence, and every layout trains to the bits of the reference") {
  constexpr Sizes kSizes[] = {{},
                              {.accumulation = 2},
                              {.dp = 2, .accumulation = 4},
                              {.dp = 4, .zero = 1},
                              {.dp = 2, .zero = 3, .accumulation = 2},
                              {.dp = 2, .ep = 2},
                              {.dp = 4, .ep = 2, .zero = 1},
                              {.dp = 4, .ep = 4, .zero = 2, .accumulation = 2},
                              {.dp = 4, .ep = 2, .zero = 3, .accumulation = 2},
                              {.tp = 2},
                              {.accumulation = 2, .tp = 4, .sequence_parallel = true},
                              {.dp = 2, .ep = 2, .zero = 2, .accumulation = 2, .tp = 2, .sequence_parallel = true},
                              {.dp = 2, .ep = 2, .pp = 2, .accumulation = 4},
                              {.pp = 2, .accumulation = 4, .schedule = Schedule::kZbH1}};
  for (Subject subject : {subject_of(kFull, Optimizer::kSgd), subject_of(kFullSwitch, Optimizer::kAdamW),
                          subject_of(kFullGroups, Optimizer::kAdamW, 0.25f, 0.5f)}) {
    subject.train.seq_len = 24;
    std::vector<Case> cases;
    for (const Sizes& sizes : kSizes) cases.push_back(case_of(subject, sizes, true));
    for (const Recompute recompute : {Recompute::kFull, Recompute::kSelective}) {
      cases.push_back(case_of(subject, {.dp = 2, .ep = 2, .accumulation = 2}, true));
      cases.back().layout.recompute = recompute;
    }
    cases.back().layout.recompute_options.modules = "mlp.act mlp.norm";
    cases.push_back(cases[5]);
    cases.back().layout.offload.activations = OffloadTo::kCpu;
    train_all(subject, cases);
  }
}

TEST_CASE(
    "experts of a capacity beside parts of sequences, on ranks of cp and whole on ranks of tp, canonical: the parts share its room "
    "in the "
    "order of the text, and train to the bits of the reference") {
  using enum ContextKind;
  const Schedule kEager = *schedule_named("eager-1f1b");
  const Sizes kSizes[] = {{.accumulation = 8, .cp = 2},
                          {.accumulation = 8, .cp = 4, .kind = kZigzag},
                          {.dp = 2, .accumulation = 4, .cp = 2, .kind = kStriped},
                          {.dp = 2, .zero = 3, .accumulation = 4, .cp = 2, .kind = kUlysses},
                          {.dp = 8, .zero = 1, .cp = 2, .kind = kAllGather},
                          {.accumulation = 8, .cp = 4, .kind = kUsp},
                          {.accumulation = 8, .cp = 2, .kind = kStriped, .tp = 2, .sequence_parallel = true},
                          {.pp = 2, .accumulation = 8, .cp = 2, .kind = kZigzag},
                          {.ep = 2, .accumulation = 8, .cp = 2, .kind = kZigzag},
                          {.ep = 4, .accumulation = 8, .cp = 4, .kind = kUsp},
                          {.dp = 2, .ep = 2, .zero = 2, .accumulation = 4, .cp = 2, .kind = kStriped},
                          {.dp = 2, .ep = 4, .accumulation = 4, .cp = 2, .kind = kAllGather},
                          {.dp = 2, .ep = 4, .zero = 3, .accumulation = 4, .cp = 2},
                          {.dp = 2, .ep = 4, .accumulation = 4, .cp = 2, .kind = kZigzag, .tp = 2},
                          {.dp = 2, .ep = 2, .pp = 2, .accumulation = 4, .schedule = kEager, .cp = 2, .kind = kStriped},
                          with_whole_experts({.ep = 2, .accumulation = 8, .tp = 2}),
                          with_whole_experts({.dp = 2, .ep = 4, .zero = 2, .accumulation = 4, .tp = 4}),
                          with_whole_experts({.dp = 2, .ep = 2, .zero = 3, .accumulation = 4, .tp = 2}),
                          with_whole_experts({.dp = 8, .ep = 4, .zero = 1, .tp = 2}),
                          with_whole_experts({.ep = 4, .accumulation = 8, .cp = 2, .kind = kZigzag, .tp = 2}),
                          with_whole_experts({.dp = 2, .ep = 8, .accumulation = 4, .cp = 2, .kind = kStriped, .tp = 2}),
                          with_whole_experts({.ep = 8, .accumulation = 8, .cp = 4, .kind = kUsp, .tp = 2}),
                          with_whole_experts({.ep = 2, .pp = 2, .accumulation = 8, .schedule = kEager, .tp = 2})};
  constexpr size_t kBraided[] = {10, 11, 14, 16, 20};
  for (Subject subject : {subject_of(kFull, Optimizer::kSgd), subject_of(kFullSwitch, Optimizer::kAdamW),
                          subject_of(kFullGroups, Optimizer::kAdamW, 0.25f, 0.5f)}) {
    subject.train.seq_len = 24;
    subject.sequences = 8;
    std::vector<Case> cases;
    for (const Sizes& sizes : kSizes) cases.push_back(case_of(subject, sizes, true));
    for (const size_t i : kBraided)
      for (const ExpertOverlap overlap : {ExpertOverlap::kLayer, ExpertOverlap::kMicroBatches}) {
        cases.push_back(cases[i]);
        cases.back().layout.expert_overlap = overlap;
        if (i != 14) cases.back().layout.recompute = Recompute::kFull;
      }
    for (const Recompute recompute : {Recompute::kFull, Recompute::kSelective}) {
      cases.push_back(cases[3]);
      cases.back().layout.recompute = recompute;
    }
    cases.back().layout.recompute_options.modules = "mlp.act mlp.norm";
    train_all(subject, cases);
  }
}

TEST_CASE("experts of a capacity beside parts of sequences: peaks, wire bytes and drops are those that are known before the run") {
  Subject subject = subject_of(kFull, Optimizer::kSgd);
  subject.train.seq_len = 24;
  subject.sequences = 8;
  constexpr int64_t kTopK = 2;
  std::optional<int64_t> dropped;
  for (const Sizes& sizes : {Sizes{.accumulation = 8},
                             {.accumulation = 8, .cp = 2},
                             {.accumulation = 8, .cp = 4, .kind = ContextKind::kZigzag},
                             {.dp = 2, .accumulation = 4, .cp = 2, .kind = ContextKind::kStriped, .tp = 2},
                             {.ep = 4, .accumulation = 8, .cp = 4, .kind = ContextKind::kUsp},
                             {.dp = 2, .ep = 4, .accumulation = 4, .cp = 2, .kind = ContextKind::kAllGather},
                             with_whole_experts({.dp = 2, .ep = 4, .accumulation = 4, .tp = 2}),
                             with_whole_experts({.ep = 4, .accumulation = 8, .cp = 2, .kind = ContextKind::kZigzag, .tp = 2})})
    for (const Recompute recompute : {Recompute::kNone, Recompute::kFull}) {
      Case config = case_of(subject, sizes, true);
      config.layout.recompute = recompute;
      INFO(config.name << " recompute " << name_of(recompute));
      Running run(config);
      const StepResult result = run.session->step(0);
      REQUIRE(std::isfinite(*result.loss));
      const int64_t now = drops_of(result.experts).dropped;
      CHECK(dropped.value_or(now) == now);
      dropped = now;
      // Each rank sends what its part of each sequence chose, 4 bytes a choice, to the others: once forward, and once where forward runs again.
      const int parts = config.layout.routed_parts();
      const int64_t tokens = subject.train.seq_len * subject.sequences / (sizes.dp * parts);
      int gathers = 0;
      const int64_t choices = (recompute == Recompute::kFull ? 2 : 1) * subject.model.layers * tokens * kTopK;
      const Plan& plan = *run.placed.plan;
      for (int rank = 0; rank < plan.mesh.world_size(); ++rank) {
        CHECK(run.session->ledger(rank).peak(Space::kDevice) ==
              memory_peak(plan, plan.mesh.role_of(rank))[static_cast<size_t>(Space::kDevice)].peak_bytes);
        for (size_t c = 0; c < plan.comms.size(); ++c) {
          if (!plan.comms[c].name.ends_with(".chosen")) continue;
          gathers += rank == 0;
          CHECK(run.session->sent_by_comm(rank)[c] == 4 * choices * (parts - 1));
          CHECK(wire_bytes(plan, plan.mesh.coordinates(rank))[plan.comms[c].name] == 4 * choices * (parts - 1));
        }
      }
      CHECK(gathers == (parts > 1));
    }
  CHECK(*dropped > 0);
}

TEST_CASE("rows with experts beside parts of sequences: the ranks that have them share its room") {
  Subject subject = subject_of(kFull, Optimizer::kSgd);
  subject.train.seq_len = 24;
  subject.sequences = 8;
  const int64_t s = 24, k = 2, h = subject.model.hidden, f = 20;
  for (const Sizes& sizes : {Sizes{.dp = 2, .accumulation = 2, .cp = 2},
                             {.dp = 2, .ep = 2, .accumulation = 2, .cp = 2},
                             {.dp = 2, .ep = 4, .accumulation = 2, .cp = 2},
                             {.ep = 4, .accumulation = 2, .cp = 4},
                             {.dp = 2, .ep = 8, .accumulation = 2, .cp = 4},
                             with_whole_experts({.dp = 2, .ep = 4, .accumulation = 2, .tp = 2}),
                             with_whole_experts({.dp = 2, .ep = 8, .accumulation = 2, .cp = 2, .tp = 2})})
    for (const float factor : {0.25f, 1.0f, 1.25f, 4.0f}) {
      Case config = case_of(subject, sizes, false);
      config.model.experts.capacity_factor = factor;
      INFO(config.name << " " << factor);
      const int ep = sizes.ep, parts = config.layout.routed_parts();
      const auto plan = lower(config);
      REQUIRE(plan.ok());
      const int64_t b = config.train.micro_batch, e = 8 / ep, c = config.model.experts.capacity(s);
      const int64_t own = b * std::min(s / parts * k, 8 * c), groups = (own + ep - 1) / ep * ep;
      const int64_t come = ep == 1 ? own : ep / parts * b * std::min(s * std::min(k, e), e * c);
      int64_t elements = 0;
      for (const Segment& segment : plan->segments)
        for (const Slot& slot : segment.slots)
          if (segment.name == "layer.F" && slot.cls == BufferClass::kActivation && slot.name.starts_with("rows.") &&
              slot.type.dtype == DType::f32)
            elements += slot.type.shape.elements();
      CHECK(elements == (h + 3 * f) * come + h * groups);
      // Of even routes: the share of the rank's tokens in what a sequence lets in.
      for (const Segment& segment : plan->segments)
        for (const Step& step : segment.steps)
          if (const Op* op = std::get_if<Op>(&step); op != nullptr && std::holds_alternative<GroupedLinear>(op->work))
            CHECK(std::get<GroupedLinear>(op->work).rows == b * std::min(s * k, 8 * c) / parts);
    }
}

TEST_CASE(
    "expert parallel with the optimizer on the host, canonical: each rank updates its own experts there, to the bits of the "
    "reference") {
  const Sizes kSizes[] = {{.dp = 2, .ep = 2, .accumulation = 2},
                          {.dp = 4, .ep = 2},
                          {.dp = 4, .ep = 2, .zero = 1},
                          {.dp = 4, .ep = 4, .zero = 2, .accumulation = 2},
                          {.dp = 4, .ep = 2, .zero = 3, .accumulation = 2},
                          {.dp = 4, .ep = 4, .zero = 3},
                          {.dp = 2, .ep = 2, .pp = 2, .accumulation = 4},
                          {.dp = 2, .ep = 2, .zero = 2, .accumulation = 2, .tp = 2, .sequence_parallel = true},
                          {.dp = 2, .ep = 4, .accumulation = 4, .cp = 2, .kind = ContextKind::kStriped}};
  for (Subject subject : {subject_of(kSoftmax, Optimizer::kAdamW, 0, 0.5f), subject_of(kFull, Optimizer::kSgd)}) {
    subject.train.seq_len = 24;
    std::vector<Case> cases;
    for (const OffloadTo to : {OffloadTo::kCpu, OffloadTo::kNvme})
      for (const Sizes& sizes : kSizes) {
        cases.push_back(case_of(subject, sizes, true));
        Layout& l = cases.back().layout;
        l.offload.optimizer = to;
        if (sizes.accumulation == 2 && sizes.zero != 3) l.expert_overlap = ExpertOverlap::kMicroBatches;
        if (sizes.zero == 1) l.recompute = Recompute::kFull, l.bucket_bytes = 8192;
        if (sizes.zero == 2) l.offload.activations = to, l.expert_overlap = ExpertOverlap::kLayer;
        if (sizes.zero == 3) l.offload.parameters = to;
      }
    train_all(subject, cases);
  }
}

TEST_CASE(
    "expert parallel with the optimizer on the host: device and host hold what is known before the run, moments of own experts "
    "alone") {
  Subject subject = subject_of(kSoftmax, Optimizer::kAdamW);
  for (const Sizes& sizes : {Sizes{.dp = 2, .ep = 2, .accumulation = 2},
                             {.dp = 4, .ep = 2, .zero = 1, .accumulation = 2},
                             {.dp = 4, .ep = 4, .zero = 3, .accumulation = 2}}) {
    Case config = case_of(subject, sizes, false);
    config.layout.offload.optimizer = OffloadTo::kCpu;
    INFO(config.name);
    Running run(config);
    REQUIRE(std::isfinite(*run.session->step(0).loss));
    for (int rank = 0; rank < sizes.dp; ++rank)
      for (const Space space : {Space::kDevice, Space::kHost})
        CHECK(run.session->ledger(rank).peak(space) == memory_peak(*run.placed.plan, 0)[static_cast<size_t>(space)].peak_bytes);
    // A copy and two moments of each parameter that the rank updates: the experts' elements by n, under ZeRO by all of dp, and all others by
    // dp under ZeRO. What a bucket is padded by comes on top.
    const Model& m = config.model;
    const int64_t experts = m.layers * m.experts.count * 3 * m.experts.ffn * m.hidden, all = parameter_count(m);
    const int64_t own = sizes.zero > 0 ? all / sizes.dp : all - experts + experts / sizes.ep;
    int64_t states = 0;
    for (const Buffer& b : run.placed.plan->roles[0].buffers)
      if (b.persistent && b.space == Space::kHost && !b.view && b.type.dtype == DType::f32) states += b.type.shape.elements();
    CHECK(states >= 3 * own);
    CHECK(states <= 3 * own + 3 * own / 50);
  }
}

TEST_CASE("DualPipe with shared experts, canonical: braided or not, both halves train to the bits of the reference") {
  const Schedule kDualPipe = *schedule_named("dualpipe");
  const Sizes kSizes[] = {{.dp = 2, .ep = 2, .pp = 2, .accumulation = 4, .schedule = kDualPipe},
                          {.dp = 4, .ep = 2, .pp = 2, .accumulation = 2, .schedule = kDualPipe},
                          {.dp = 2, .ep = 2, .pp = 4, .accumulation = 4, .schedule = kDualPipe},
                          {.dp = 2, .ep = 2, .pp = 2, .zero = 2, .accumulation = 4, .schedule = kDualPipe},
                          {.dp = 2, .ep = 2, .pp = 2, .accumulation = 4, .schedule = kDualPipe, .tp = 2, .sequence_parallel = true},
                          {.ep = 2, .pp = 2, .accumulation = 8, .schedule = kDualPipe, .cp = 2, .kind = ContextKind::kZigzag},
                          {.dp = 2, .ep = 2, .pp = 2, .accumulation = 4, .schedule = kDualPipe, .cp = 2}};
  for (Subject subject : {subject_of(kSoftmax, Optimizer::kAdamW, 0.25f, 0.5f), subject_of(kBiasedGroups, Optimizer::kSgd),
                          subject_of(kFull, Optimizer::kAdamW)}) {
    subject.train.seq_len = 24;
    subject.model.layers = 4;
    std::vector<Case> cases;
    for (const Sizes& sizes : kSizes)
      for (const ExpertOverlap overlap : {ExpertOverlap::kNone, ExpertOverlap::kLayer, ExpertOverlap::kMicroBatches}) {
        cases.push_back(case_of(subject, sizes, true));
        cases.back().layout.expert_overlap = overlap;
        if (overlap == ExpertOverlap::kMicroBatches && !check(cases.back()).ok())
          cases.pop_back();
        else if (overlap == ExpertOverlap::kMicroBatches && sizes.zero == 2)
          cases.back().layout.recompute = Recompute::kFull;
      }
    train_all(subject, cases);
  }
}

TEST_CASE("experts of a capacity, fast: no layout is further from fp64 than 1.5 times one rank") {
  Subject subject = subject_of(kFull, Optimizer::kSgd);
  subject.train.seq_len = 24;
  const auto expected = expect<double>(subject);
  const auto one_rank = train(case_of(subject, {}, false));
  REQUIRE(one_rank.ok());
  const double bound = 1.5 * error_of(expected, *one_rank) + 1e-6;
  for (const Sizes& sizes : {Sizes{.dp = 2, .accumulation = 2},
                             {.dp = 4, .ep = 2, .zero = 1, .accumulation = 2},
                             {.tp = 2},
                             {.dp = 2, .ep = 2, .accumulation = 2, .tp = 2, .sequence_parallel = true}}) {
    INFO(sizes.dp << " " << sizes.ep << " " << sizes.tp);
    const auto trained = train(case_of(subject, sizes, false));
    REQUIRE(trained.ok());
    CHECK(error_of(expected, *trained) <= bound);
  }
}

TEST_CASE("experts of a capacity that holds every row have the bits of experts without one") {
  Subject all = subject_of(kSoftmax, Optimizer::kAdamW);
  all.train.seq_len = 24;
  Subject roomy = all;
  roomy.model.experts.capacity_factor = 4;  // 8 experts of 2 a token: the room of every token
  for (const Sizes& sizes : {Sizes{}, Sizes{.dp = 4, .ep = 2, .accumulation = 2}})
    for (const bool canonical : {false, true}) {
      const auto without = train(case_of(all, sizes, canonical)), with = train(case_of(roomy, sizes, canonical));
      REQUIRE(without.ok());
      REQUIRE(with.ok());
      CHECK(with->losses == without->losses);
      CHECK(with->parameters == without->parameters);
    }
}

TEST_CASE("a capacity is the even share of a sequence's rows times the factor, rounded up, and no more than its tokens") {
  Experts e{.count = 8, .top_k = 2, .ffn = 4};
  CHECK(e.capacity(24) == 24);  // none is dropped
  CHECK(e.most_rows(24, 4) == 48);
  e.capacity_factor = 1;
  CHECK(e.capacity(24) == 6);
  CHECK(e.capacity(25) == 7);
  CHECK(e.most_rows(24, 8) == 48);
  CHECK(e.most_rows(24, 4) == 24);
  CHECK(e.most_rows(24, 1) == 6);
  e.capacity_factor = 1.1f;  // 1.1 has no exact float: 1.1 * 40 / 4 is 11
  CHECK(e.capacity(40) == 11);
  e.capacity_factor = 1.25f;
  CHECK(e.capacity(24) == 8);
  e.capacity_factor = 0.5f;
  CHECK(e.most_rows(24, 8) == 24);
  e.capacity_factor = 100;
  CHECK(e.capacity(24) == 24);
  CHECK(e.most_rows(24, 1) == 24);
  e.capacity_factor = 1e-3f;
  CHECK(e.capacity(24) == 1);
}

TEST_CASE("rows with experts take what the capacity lets come: n b min(s k', e C) of them, for any number of ranks") {
  Subject subject = subject_of(kFull, Optimizer::kSgd);
  subject.train.seq_len = 24;
  const int64_t k = 2, s = 24, h = subject.model.hidden, f = 20;
  // Elements of rows of a layer that wait for backward, and the peak.
  const auto kept = [&](const Case& c) {
    const auto plan = lower(c);
    REQUIRE(plan.ok());
    int64_t elements = 0;
    for (const Segment& segment : plan->segments)
      for (const Slot& slot : segment.slots)
        if (segment.name == "layer.F" && slot.cls == BufferClass::kActivation && slot.name.starts_with("rows.") &&
            slot.type.dtype == DType::f32)
          elements += slot.type.shape.elements();
    return std::pair(elements, memory_peak(*plan, 0)[static_cast<size_t>(Space::kDevice)].peak_bytes);
  };
  for (const int n : {1, 2, 4})
    for (const float factor : {1.0f, 1.25f, 0.5f, 4.0f}) {
      const int64_t b = subject.sequences / 4, e = 8 / n, c = std::min<int64_t>(s, static_cast<int64_t>(std::ceil(factor * 6)));
      const int64_t all = n * b * s * k, room = n * b * std::min(s * std::min(k, e), e * c);
      Case with = case_of(subject, {.dp = 4, .ep = n}, false), without = with;
      with.model.experts.capacity_factor = factor, without.model.experts.capacity_factor = 0;
      INFO(n << " " << factor);
      const auto [rows, peak] = kept(with);
      const auto [rows_of_all, peak_of_all] = kept(without);
      // Rows that came, [h], up and activated, [2 f] and [f]; and what came home, of b s k rows those that a capacity takes.
      CHECK(rows_of_all == (h + 3 * f) * all + h * b * s * k);
      CHECK(rows == (h + 3 * f) * room + h * b * std::min(s * k, 8 * c));
      if (room < all) CHECK(peak < peak_of_all);
      if (room == all) CHECK(peak - peak_of_all <= 64);  // the router's own scratch
    }
}

TEST_CASE("rows that experts have no room for are counted, the same under every layout and whatever runs again") {
  Subject subject = subject_of(kFull, Optimizer::kSgd);
  subject.model.experts.bias_update_rate = 0.02f;
  subject.train.seq_len = 24;
  const int64_t chosen = subject.sequences * subject.train.seq_len * subject.model.experts.top_k, room = 6 * subject.sequences;
  std::vector<Case> cases;
  for (const Sizes& sizes : {Sizes{},
                             {.accumulation = 4},
                             {.dp = 2, .ep = 2, .accumulation = 2},
                             {.dp = 4, .ep = 4, .zero = 2, .accumulation = 2},
                             {.dp = 4, .ep = 2, .zero = 2, .tp = 2, .sequence_parallel = true},
                             {.pp = 2, .accumulation = 4, .schedule = Schedule::kZbH1}})
    cases.push_back(case_of(subject, sizes, true));
  cases.push_back(cases[2]);
  cases.back().layout.recompute = Recompute::kFull;
  std::vector<std::vector<ExpertRows>> first;  // by step, of one rank
  for (const Case& config : cases) {
    INFO(config.name);
    Running run(config);
    for (int64_t step = 0; step < 3; ++step) {
      if (step == 2)  // all tokens choose experts 1 and 2, which take the first 6 of each sequence
        for (const char* layer : {"router_bias.layers.0", "router_bias.layers.1"}) {
          std::vector<float> bias(8, 0.0f);
          bias[1] = bias[2] = 100;
          REQUIRE(run.session->set_state({std::string(kRunState), layer}, {{8}, bias}).ok());
        }
      const StepResult result = run.session->step(step);
      REQUIRE(result.experts.size() == 2);
      if (&config == &cases[0]) first.push_back(result.experts);
      int64_t dropped = 0;
      for (size_t l = 0; l < 2; ++l) {
        const ExpertRows &layer = result.experts[l], &alone = first[static_cast<size_t>(step)][l];
        CHECK(layer.by_expert == alone.by_expert);
        CHECK(layer.dropped == alone.dropped);
        CHECK(layer.dropped > 0);
        CHECK(std::accumulate(layer.by_expert.begin(), layer.by_expert.end(), int64_t{0}) + layer.dropped == chosen);
        for (const int64_t rows : layer.by_expert) CHECK(rows <= room);
        if (step == 2) CHECK(layer.by_expert == std::vector<int64_t>{0, room, room, 0, 0, 0, 0, 0});
        dropped += layer.dropped;
      }
      const Drops drops = drops_of(result.experts);
      CHECK(drops.chosen == 2 * chosen);
      CHECK(drops.dropped == dropped);
      CHECK(drops.share() == static_cast<double>(dropped) / static_cast<double>(2 * chosen));
    }
  }
  Running all(case_of(subject_of(kSoftmax, Optimizer::kSgd), {.dp = 2, .ep = 2, .accumulation = 2}, true));
  CHECK(drops_of(all.session->step(0).experts).dropped == 0);
  CHECK(drops_of({}).share() == 0);
}

TEST_CASE("norms of heads of a dense model, canonical: parts of sequences too train to the bits of the reference") {
  Subject subject = subject_of({}, Optimizer::kSgd);
  subject.name = "dense with norms of heads";
  subject.model.qk_norm = true;
  subject.train.seq_len = 32;
  subject.model.max_positions = 32;
  std::vector<Case> cases{case_of(subject, {}, true), case_of(subject, {.dp = 2, .zero = 3, .accumulation = 2}, true)};
  for (const ContextKind kind : {ContextKind::kRing, ContextKind::kUlysses}) {
    cases.push_back(case_of(subject, {.dp = 2, .accumulation = 4}, true));
    cases.back().layout.cp = 2;
    cases.back().layout.cp_kind = kind;
    cases.back().name += fmt::format(" {}", name_of(kind));
  }
  train_all(subject, cases);
}

TEST_CASE("experts in 16 bits, canonical: every layout trains to the bits of one rank, near those of fp32") {
  const auto trained = [](const Case& c) {
    INFO(c.name);
    auto result = train(c);
    INFO((result.ok() ? "" : to_string(result.error())));
    REQUIRE(result.ok());
    return std::move(result).value();
  };
  constexpr Sizes kSizes[] = {{.dp = 2, .accumulation = 2},
                              {.dp = 4, .ep = 2, .zero = 1},
                              {.dp = 4, .ep = 4, .zero = 2, .accumulation = 2},
                              {.dp = 2, .ep = 2, .zero = 3, .accumulation = 2},
                              {.dp = 2, .ep = 2, .pp = 2, .accumulation = 4},
                              {.dp = 2, .ep = 2, .accumulation = 4, .cp = 2}};
  constexpr Experts kPlain{.count = 8, .top_k = 2, .ffn = 20};
  for (const Precision precision : {Precision::kBf16, Precision::kFp16})
    for (Subject subject : {precision == Precision::kBf16 ? subject_of(kSoftmax, Optimizer::kAdamW, 0.25f, 0.5f)
                                                          : subject_of(kPlain, Optimizer::kAdamW, 0.25f, 0.5f),
                            gated(true, Optimizer::kAdamW), subject_of(with_capacity(kPlain, 1), Optimizer::kAdamW),
                            layered(true, Optimizer::kAdamW)}) {
      subject.train.seq_len = 24;
      if (precision == Precision::kFp16) subject.model.experts.balance = subject.model.experts.z_loss = 0;
      const Trained wide = trained(case_of(subject, {}, true));
      subject.train.precision = precision;
      const Trained one = trained(case_of(subject, {}, true));
      CHECK(one.parameters != wide.parameters);
      CHECK(one.losses.back() == Approx(wide.losses.back()).epsilon(0.02));
      std::vector<Case> cases;
      for (const Sizes& sizes : kSizes)
        if (!subject.model.experts.drops() || sizes.cp == 1) cases.push_back(case_of(subject, sizes, true));
      cases.push_back(cases[1]);
      cases.back().layout.recompute = Recompute::kFull;
      cases.back().layout.offload.activations = OffloadTo::kCpu;
      cases.push_back(cases[0]);
      cases.back().layout.offload.optimizer = OffloadTo::kCpu;
      for (const Case& c : cases) {
        INFO(c.name << ' ' << name_of(precision));
        const Trained have = trained(c);
        CHECK(have.losses == one.losses);
        CHECK(have.parameters == one.parameters);
      }
    }
}

namespace {

/// Experts whose matrices are no whole blocks of 128 in either dim: gate and up are 2 1/8 blocks high, rows 1 1/4 wide.
Subject in_blocks(Optimizer optimizer) {
  Subject subject = subject_of(Experts{.count = 4, .top_k = 2, .ffn = 136, .shared = 1, .shared_gate = true}, optimizer);
  subject.name = "mixture in blocks";
  subject.model.hidden = 160;
  subject.model.init_deviation = 0.05f;
  subject.train.seq_len = 16;
  return subject;
}

void to_fp8(Subject& subject) {
  subject.train.precision = Precision::kFp8;
  subject.train.fp8_scaling = Fp8Scaling::kBlock;
}

}  // namespace

TEST_CASE("experts in fp8, canonical: every layout trains to the bits of one rank, near those of bf16") {
  const auto trained = [](const Case& c) {
    INFO(c.name);
    auto result = train(c);
    INFO((result.ok() ? "" : to_string(result.error())));
    REQUIRE(result.ok());
    return std::move(result).value();
  };
  constexpr Sizes kSizes[] = {{.dp = 2, .accumulation = 2},
                              {.dp = 4, .ep = 2, .zero = 1},
                              {.dp = 4, .ep = 4, .zero = 2, .accumulation = 2},
                              {.dp = 2, .ep = 2, .zero = 3, .accumulation = 2},
                              {.dp = 2, .ep = 2, .pp = 2, .accumulation = 4}};
  uint64_t number = 0;
  for (Subject subject : {subject_of(kSoftmax, Optimizer::kAdamW, 0.25f, 0.5f), gated(true, Optimizer::kAdamW),
                          subject_of(with_capacity(kSoftmax, 1), Optimizer::kAdamW), layered(true, Optimizer::kAdamW),
                          in_blocks(Optimizer::kAdamW)}) {
    subject.train.precision = Precision::kBf16;
    const Trained wide = trained(case_of(subject, {}, true));
    to_fp8(subject);
    const Trained one = trained(case_of(subject, {}, true));
    CHECK(one.parameters != wide.parameters);
    CHECK(one.losses.back() == Approx(wide.losses.back()).epsilon(0.05));
    std::vector<Case> cases;
    for (const Sizes& sizes : kSizes) cases.push_back(case_of(subject, sizes, true));
    const auto also = [&](size_t like, const auto& change) {
      cases.push_back(cases[like]);
      change(cases.back());
    };
    also(1, [](Case& c) { c.layout.recompute = Recompute::kFull, c.layout.offload.activations = OffloadTo::kCpu; });
    also(0, [](Case& c) { c.layout.offload.optimizer = OffloadTo::kCpu; });
    also(3, [](Case& c) { c.layout.expert_overlap = ExpertOverlap::kLayer; });
    also(2, [](Case& c) { c.layout.expert_overlap = ExpertOverlap::kMicroBatches; });
    also(2, [](Case& c) {
      c.layout.recompute = Recompute::kSelective;
      c.layout.recompute_options.modules = "mlp.norm mlp.act";
    });
    for (const Case& c : cases) {
      if (number++ % dealt(1, 3) != 0) continue;  // ten layouts of a subject: each layout is met on some subject
      INFO(c.name);
      const Trained have = trained(c);
      CHECK(have.losses == one.losses);
      CHECK(have.parameters == one.parameters);
    }
  }
}

TEST_CASE("experts in fp8, canonical: slices of experts train to the same bits whatever shares them") {
  Subject subject = in_blocks(Optimizer::kAdamW);
  subject.model.hidden = 256;
  subject.model.heads = subject.model.kv_heads = 4;
  subject.model.head_dim = 64;
  subject.model.experts.ffn = 256;
  to_fp8(subject);
  for (const bool sequence : {false, true}) {
    const auto one = train(case_of(subject, {.tp = 2, .sequence_parallel = sequence}, true));
    INFO((one.ok() ? "" : to_string(one.error())));
    REQUIRE(one.ok());
    for (const Sizes& sizes : {Sizes{.dp = 2, .accumulation = 2, .tp = 2, .sequence_parallel = sequence},
                               {.dp = 2, .ep = 2, .zero = 1, .tp = 2, .sequence_parallel = sequence},
                               {.dp = 2, .ep = 2, .zero = 3, .tp = 2, .sequence_parallel = sequence}}) {
      Case c = case_of(subject, sizes, true);
      if (sizes.zero == 1) c.layout.recompute = Recompute::kFull;
      const auto have = train(c);
      INFO((have.ok() ? "" : to_string(have.error())));
      REQUIRE(have.ok());
      CHECK(have->losses == one->losses);
      CHECK(have->parameters == one->parameters);
    }
  }
}

TEST_CASE(
    "experts in fp8: rows go to experts in 1 byte an element and 4 a block, come back in 2, and are those that routers counted") {
  for (const float capacity : {0.0f, 1.0f})
    for (Subject subject : {in_blocks(Optimizer::kSgd), subject_of(kSoftmax, Optimizer::kSgd)}) {
      subject.model.experts.capacity_factor = capacity;
      subject.train.precision = Precision::kBf16;
      const Case wide = case_of(subject, {.dp = 2, .ep = 2, .accumulation = 2}, false);
      to_fp8(subject);
      const Case narrow = case_of(subject, {.dp = 2, .ep = 2, .accumulation = 2}, false);
      const int64_t hidden = subject.model.hidden, blocks = (hidden + 127) / 128;
      for (const Case& config : {wide, narrow}) {
        Running run(config);
        INFO(config.name << " capacity " << capacity);
        const StepResult result = run.session->step(0);
        REQUIRE(std::isfinite(*result.loss));
        const bool fp8 = config.train.precision == Precision::kFp8;
        // There and back, in forward and again in backward: two of the four are quantised.
        const int64_t row = fp8 ? 2 * (hidden + 4 * blocks) + 2 * 2 * hidden : 4 * 2 * hidden;
        int64_t moved = 0, sent = 0;
        for (const ExpertRows& layer : result.experts)
          for (size_t source = 0; source < 2; ++source)
            for (size_t e = 0; e < layer.by_expert.size(); ++e)
              if (e * 2 / layer.by_expert.size() != source) moved += layer.by_source[source][e];
        REQUIRE(moved > 0);
        for (int rank = 0; rank < 2; ++rank) {
          for (size_t c = 0; c < run.placed.plan->comms.size(); ++c)
            if (run.placed.plan->comms[c].name == "ep") sent += run.session->sent_by_comm(rank)[c];
          CHECK(run.session->ledger(rank).peak(Space::kDevice) ==
                memory_peak(*run.placed.plan, 0)[static_cast<size_t>(Space::kDevice)].peak_bytes);
        }
        const int64_t counts = int64_t{4} * 2 * config.model.layers * 2 * (config.model.experts.count / 2);  // i32, of each rank
        CHECK(sent == moved * row + counts);
      }
    }
}

TEST_CASE("norms of heads in 16 bits and fp8: a dense model trains to the bits of one rank") {
  Subject subject = subject_of(Experts{}, Optimizer::kAdamW);
  subject.model.qk_norm = true;
  subject.train.seq_len = 24;
  for (const Precision precision : {Precision::kBf16, Precision::kFp16, Precision::kFp8}) {
    subject.train.precision = precision;
    // Scales of blocks do not depend on how the batch is cut.
    if (precision == Precision::kFp8) subject.train.fp8_scaling = Fp8Scaling::kBlock;
    const auto one = train(case_of(subject, {}, true));
    INFO((one.ok() ? "" : to_string(one.error())));
    REQUIRE(one.ok());
    for (const Sizes& sizes : {Sizes{.dp = 2, .accumulation = 2}, {.dp = 4, .zero = 3}, {.dp = 2, .pp = 2, .accumulation = 4}}) {
      const auto have = train(case_of(subject, sizes, true));
      REQUIRE(have.ok());
      CHECK(have->losses == one->losses);
      CHECK(have->parameters == one->parameters);
    }
  }
}

TEST_CASE("experts in 16 bits, canonical: slices of experts train to the same bits whatever shares them") {
  for (const Precision precision : {Precision::kBf16, Precision::kFp16}) {
    Subject subject = subject_of(Experts{.count = 8, .top_k = 2, .ffn = 20}, Optimizer::kAdamW);
    subject.train.precision = precision;
    const auto one = train(case_of(subject, {.tp = 2, .sequence_parallel = true}, true));
    REQUIRE(one.ok());
    for (const Sizes& sizes : {Sizes{.dp = 2, .accumulation = 2, .tp = 2, .sequence_parallel = true},
                               {.dp = 2, .ep = 2, .zero = 1, .tp = 2, .sequence_parallel = true},
                               {.dp = 2, .ep = 2, .zero = 3, .tp = 2, .sequence_parallel = true}}) {
      const auto have = train(case_of(subject, sizes, true));
      REQUIRE(have.ok());
      CHECK(have->losses == one->losses);
      CHECK(have->parameters == one->parameters);
    }
  }
}

TEST_CASE("whole experts in 16 bits and fp8, canonical: they train to the same bits whatever shares them") {
  Subject wide = in_blocks(Optimizer::kAdamW);
  wide.model.hidden = 256, wide.model.heads = wide.model.kv_heads = 4, wide.model.head_dim = 64;
  wide.model.experts.count = 8, wide.model.experts.ffn = 128, wide.model.experts.shared = 2;
  for (const Precision precision : {Precision::kBf16, Precision::kFp16, Precision::kFp8}) {
    const bool fp8 = precision == Precision::kFp8;
    Subject subject = fp8 ? wide : subject_of(Experts{.count = 8, .top_k = 2, .ffn = 20, .shared = 1}, Optimizer::kAdamW);
    subject.train.precision = precision;
    if (fp8) to_fp8(subject);
    const auto one = train(case_of(subject, with_whole_experts({.ep = 2, .accumulation = 8, .tp = 2}), true));
    INFO((one.ok() ? "" : to_string(one.error())));
    REQUIRE(one.ok());
    for (const Sizes& sizes : {Sizes{.dp = 2, .ep = 2, .accumulation = 4, .tp = 2},
                               {.dp = 8, .ep = 4, .zero = 1, .tp = 2},
                               {.dp = 4, .ep = 8, .zero = 3, .accumulation = 2, .tp = 2}}) {
      const auto have = train(case_of(subject, with_whole_experts(sizes), true));
      INFO((have.ok() ? "" : to_string(have.error())));
      REQUIRE(have.ok());
      CHECK(have->losses == one->losses);
      CHECK(have->parameters == one->parameters);
    }
  }
}

TEST_CASE("experts, fast: no layout is further from fp64 than 1.5 times one rank") {
  const Subject subject = subject_of(kSoftmax, Optimizer::kSgd);
  const auto expected = expect<double>(subject);
  const auto one_rank = train(case_of(subject, {}, false));
  REQUIRE(one_rank.ok());
  const double bound = 1.5 * error_of(expected, *one_rank) + 1e-6;
  for (const Sizes& sizes : {Sizes{.dp = 2, .accumulation = 2},
                             {.dp = 4, .zero = 2},
                             {.dp = 4, .ep = 2, .zero = 1, .accumulation = 2},
                             {.dp = 2, .accumulation = 2, .cp = 2},
                             {.dp = 2, .ep = 2, .zero = 1, .accumulation = 2, .cp = 2},
                             {.dp = 4, .ep = 4, .cp = 2},
                             {.tp = 2},
                             {.dp = 2, .ep = 2, .accumulation = 2, .tp = 2, .sequence_parallel = true},
                             {.dp = 2, .zero = 3, .tp = 2},
                             with_whole_experts({.ep = 2, .tp = 2}),
                             with_whole_experts({.dp = 2, .ep = 4, .zero = 1, .accumulation = 2, .tp = 2}),
                             with_whole_experts({.dp = 2, .ep = 2, .zero = 3, .accumulation = 2, .tp = 2}),
                             with_whole_experts({.ep = 4, .accumulation = 2, .cp = 2, .tp = 2}),
                             with_expert_slices({.dp = 2, .ep = 4, .accumulation = 2, .tp = 4}, 2)}) {
    INFO(sizes.dp << " " << sizes.ep << " " << sizes.cp << " " << sizes.expert_tp);
    const auto trained = train(case_of(subject, sizes, false));
    REQUIRE(trained.ok());
    CHECK(error_of(expected, *trained) <= bound);
  }
}

TEST_CASE("gated shared experts, fast: no layout is further from fp64 than 1.5 times one rank") {
  const Subject subject = gated(false, Optimizer::kSgd);
  const auto expected = expect<double>(subject);
  const auto one_rank = train(case_of(subject, {}, false));
  REQUIRE(one_rank.ok());
  const double bound = 1.5 * error_of(expected, *one_rank) + 1e-6;
  for (const Sizes& sizes : {Sizes{.tp = 2},
                             {.accumulation = 2, .tp = 2, .sequence_parallel = true},
                             {.dp = 2, .ep = 2, .zero = 3, .tp = 2, .sequence_parallel = true},
                             {.dp = 2, .ep = 2, .accumulation = 2, .cp = 2, .tp = 2},
                             with_whole_experts({.ep = 2, .accumulation = 2, .tp = 2}),
                             with_whole_experts({.dp = 2, .ep = 4, .zero = 3, .tp = 2}),
                             with_expert_slices({.dp = 2, .ep = 2, .zero = 3, .tp = 4}, 2)}) {
    INFO(sizes.dp << " " << sizes.ep << " " << sizes.cp << " " << sizes.sequence_parallel << " " << sizes.expert_tp);
    const auto trained = train(case_of(subject, sizes, false));
    INFO((trained.ok() ? "" : to_string(trained.error())));
    REQUIRE(trained.ok());
    CHECK(error_of(expected, *trained) <= bound);
  }
}

TEST_CASE("rows of experts are counted as routers choose, under every layout and whatever runs again") {
  Subject subject = subject_of(kBiased, Optimizer::kSgd);
  subject.train.seq_len = 24;
  const int64_t rows = subject.sequences * subject.train.seq_len * subject.model.experts.top_k;
  std::vector<Case> cases;
  for (const Sizes& sizes : {Sizes{},
                             {.accumulation = 4},
                             {.dp = 2, .ep = 2, .accumulation = 2},
                             {.dp = 4, .ep = 2, .zero = 2, .accumulation = 2},
                             {.tp = 2},
                             {.dp = 2, .ep = 4, .zero = 2, .accumulation = 4, .cp = 2, .tp = 2, .sequence_parallel = true},
                             {.dp = 2, .accumulation = 4, .cp = 2},
                             {.pp = 2, .accumulation = 4, .schedule = Schedule::kZbH1},
                             with_whole_experts({.dp = 2, .ep = 2, .accumulation = 4, .tp = 2}),
                             with_whole_experts({.dp = 2, .ep = 8, .accumulation = 4, .cp = 2, .tp = 2}),
                             with_expert_slices({.dp = 2, .ep = 4, .accumulation = 4, .tp = 4}, 2)})
    cases.push_back(case_of(subject, sizes, true));
  cases.push_back(cases[2]);
  cases.back().layout.recompute = Recompute::kFull;
  std::vector<std::vector<ExpertRows>> first;  // by step, of one rank
  for (const Case& config : cases) {
    INFO(config.name);
    Running run(config);
    std::vector<std::vector<float>> biases(2, std::vector<float>(8, 0.0f));
    for (int64_t step = 0; step < 3; ++step) {
      const StepResult result = run.session->step(step);
      REQUIRE(result.experts.size() == 2);
      if (&config == &cases[0]) first.push_back(result.experts);
      const int share = config.layout.ep, sets = config.layout.dp * config.layout.routed_parts() / share;
      for (size_t l = 0; l < 2; ++l) {
        const ExpertRows& layer = result.experts[l];
        CHECK(layer.layer == static_cast<int>(l));
        CHECK(layer.by_expert == first[static_cast<size_t>(step)][l].by_expert);
        CHECK(std::accumulate(layer.by_expert.begin(), layer.by_expert.end(), int64_t{0}) == rows);
        REQUIRE(layer.by_rank.size() == static_cast<size_t>(share > 1 ? share * sets : 0));
        for (int i = 0; i < share && share > 1; ++i) {
          int64_t of_experts = 0, of_ranks = 0;
          for (int e = 0; e < 8 / share; ++e) of_experts += layer.by_expert[static_cast<size_t>(i * 8 / share + e)];
          for (int set = 0; set < sets; ++set) of_ranks += layer.by_rank[static_cast<size_t>(set * share + i)];
          CHECK(of_ranks == of_experts);
        }
        // Biases follow what the plan's own ops have counted.
        for (size_t e = 0; e < 8; ++e) {
          const int64_t above = 8 * layer.by_expert[e] - rows;
          biases[l][e] += above < 0 ? 0.02f : above > 0 ? -0.02f : 0.0f;
        }
        CHECK(run.session->gather_buffer(fmt::format("router_bias.layers.{}", l)).value().values == biases[l]);
      }
      const Imbalance all = imbalance_of(result.experts);
      CHECK(*all.by_expert > 1.0);
      CHECK(all.by_rank.has_value() == (share > 1));
      CHECK(all.peak.has_value() == (share > 1));
      if (share == 1) continue;
      // A rank's even share of a step's rows is that of each micro-batch times their number: the fullest micro-batch has no fewer.
      const int micro_batches = config.train.grad_accumulation;
      const double even = static_cast<double>(rows) / (share * sets);
      for (const ExpertRows& layer : result.experts) {
        const double whole_step = static_cast<double>(std::ranges::max(layer.by_rank)) / even;
        CHECK(layer.fullest >= whole_step);
        CHECK(layer.fullest <= std::min<double>(share, micro_batches * whole_step));
        if (micro_batches == 1) CHECK(layer.fullest == whole_step);
        CHECK(*all.peak >= layer.fullest);
      }
    }
  }
}

TEST_CASE("rows of experts are counted step by step where a plan has several") {
  Subject subject = subject_of(kSoftmax, Optimizer::kSgd);
  subject.train.seq_len = 24, subject.train.learning_rate.peak = 0.1f;
  subject.train.clip_norm = 1e6f;  // of which nothing is taken back
  Case later = case_of(subject, {.dp = 2, .ep = 2, .pp = 2, .accumulation = 2, .schedule = Schedule::kZbH1}, true);
  later.train.post_validation = 3;
  Case meeting = later;
  meeting.train.post_validation = 0;
  Running whole(later), single(meeting);
  for (int64_t first = 0; first < 6; first += 3) {
    std::vector<ExpertRows> expected;
    for (int step = 0; step < 3; ++step)
      for (ExpertRows layer : single.session->step(first + step).experts) {
        layer.step = step;
        expected.push_back(std::move(layer));
      }
    REQUIRE(expected.size() == 6);
    CHECK(expected[0].by_expert != expected[2].by_expert);
    const StepResult result = whole.session->step(first);
    CHECK_FALSE(result.rolled_back);
    CHECK(result.experts == expected);
  }
}

TEST_CASE(
    "expert parallel: wire bytes are those of the rows that were counted, of a thousand routings, all to two experts among them") {
  Subject subject = subject_of(kBiased, Optimizer::kSgd);
  subject.train.seq_len = 24;
  subject.train.learning_rate.peak = 0.1f;
  int64_t routings = 0;
  for (const float factor : {0.0f, 1.0f})  // without a capacity, and with room for the even share
    for (const Sizes& sizes : {Sizes{.dp = 2, .ep = 2, .accumulation = 4},
                               {.dp = 4, .ep = 4, .accumulation = 2},
                               {.dp = 4, .ep = 2, .accumulation = 2},
                               {.dp = 2, .ep = 2, .accumulation = 2, .tp = 2},
                               with_whole_experts({.dp = 2, .ep = 4, .accumulation = 4, .tp = 2}),
                               with_expert_slices({.dp = 2, .ep = 4, .accumulation = 4, .tp = 4}, 2)})
      for (const bool canonical : {false, true}) {
        subject.model.experts.capacity_factor = factor;
        const Case config = case_of(subject, sizes, canonical);
        INFO(config.name << " capacity " << factor);
        Running run(config);
        const Layout& l = config.layout;
        const int64_t h = config.model.hidden, experts = config.model.experts.count, calls = 2 * config.train.grad_accumulation;
        const int64_t leaves = canonical ? config.train.micro_batch * kContractionLeaves / l.routed_parts() : 1;
        const int64_t copies = l.expert_slices();  // slices of experts, each with rows of its own
        // Each rank's counts of the experts of others; rows go out and come back, and their gradients do.
        const int64_t counts = calls * l.world_size() * 4 * leaves * experts / l.ep * (l.ep - 1);
        for (int64_t step = 0; step < 24; ++step) {
          if (step >= 20)  // experts without a row, on ranks without a row
            for (const char* layer : {"router_bias.layers.0", "router_bias.layers.1"}) {
              std::vector<float> bias(8, 0.0f);
              bias[static_cast<size_t>(step - 20)] = bias[static_cast<size_t>(step - 19)] = 100;
              REQUIRE(run.session->set_state({std::string(kRunState), layer}, {{8}, bias}).ok());
            }
          const StepResult result = run.session->step(step);
          int64_t moved = 0, sent = 0;
          for (const ExpertRows& layer : result.experts) {
            moved += layer.from_others;
            if (step >= 20) CHECK(std::ranges::count(layer.by_expert, 0) == 6);
          }
          for (int rank = 0; rank < l.world_size(); ++rank)
            for (size_t c = 0; c < run.placed.plan->comms.size(); ++c)
              if (run.placed.plan->comms[c].name == "ep") sent += run.session->sent_by_comm(rank)[c];
          CHECK(sent == 4 * 4 * h * moved * copies + counts);
          routings += calls * l.dp;
        }
      }
  CHECK(routings >= 2000);
}

TEST_CASE("an imbalance is the most over the mean, of layers the mean") {
  const std::vector<int64_t> even{5, 5, 5, 5}, one{0, 20, 0, 0}, none{0, 0};
  CHECK(imbalance(even) == 1.0);
  CHECK(imbalance(one) == 4.0);
  CHECK(!imbalance(none));
  const std::vector<ExpertRows> layers{{0, even, {10, 10}, 0}, {3, one, {20, 0}, 0}};
  CHECK(imbalance_of(layers).by_expert == 2.5);
  CHECK(imbalance_of(layers).by_rank == 1.5);
  CHECK(!imbalance_of({}).by_expert);
  CHECK(!imbalance_of({}).peak);
}

TEST_CASE("the fullest of a layer is one rank in one micro-batch, over what the tokens of a rank choose") {
  const Mesh mesh{{{"dp", 2}}};
  Type counts;
  counts.dtype = DType::i32;
  counts.shape = {1, 4, 2};  // two parts of each rank's tokens, two experts of a rank
  counts.place[0] = Placement::shard(0);
  const CountedLayer layer{.layer = 3, .counts = &counts, .sources = 2, .chosen = 16, .top_k = 1, .micro_batches = 2};
  REQUIRE(layer.numbers() == 7);
  // By rank and micro-batch: 10 and 20 rows of the first, 22 and 12 of the second.
  const std::vector<std::vector<std::vector<int32_t>>> rows{{{1, 2, 3, 0, 0, 2, 2, 0}, {5, 2, 3, 2, 1, 4, 2, 1}},
                                                            {{4, 2, 3, 1, 4, 3, 3, 2}, {1, 1, 1, 1, 4, 0, 4, 0}}};
  std::vector<std::vector<int64_t>> numbers;
  std::vector<RankRows> ranks;
  for (int rank = 0; rank < 2; ++rank) {
    numbers.emplace_back(layer.numbers());
    for (int m = 0; m < 2; ++m) add_rows(rows[static_cast<size_t>(rank)][static_cast<size_t>(m)].data(), layer, m, numbers.back());
  }
  for (int rank = 0; rank < 2; ++rank) ranks.push_back({mesh.coordinates(rank), layer, numbers[static_cast<size_t>(rank)]});
  const std::vector<ExpertRows> counted = expert_rows(mesh, ranks);
  REQUIRE(counted.size() == 1);
  CHECK(counted[0].by_rank == std::vector<int64_t>{30, 34});
  CHECK(counted[0].dropped == 0);
  CHECK(counted[0].fullest == 22.0 / 16);
  std::vector<ExpertRows> layers{counted[0], counted[0]};
  layers[1].fullest = 1.25;
  CHECK(imbalance_of(layers).peak == 22.0 / 16);
  // Both micro-batches as one, of 32 rows that the tokens of a rank choose.
  CountedLayer both = layer;
  both.together = 2;
  REQUIRE(both.numbers() == 6);
  for (size_t rank = 0; rank < 2; ++rank) {
    numbers[rank].assign(both.numbers(), 0);
    for (int m = 0; m < 2; ++m) add_rows(rows[rank][static_cast<size_t>(m)].data(), both, m, numbers[rank]);
    ranks[rank] = {mesh.coordinates(static_cast<int>(rank)), both, numbers[rank]};
  }
  CHECK(expert_rows(mesh, ranks)[0].fullest == 34.0 / 32);
}

TEST_CASE("experts: what cannot be shared or cut is refused, and says what to set") {
  const auto refused = [](const Case& c) {
    const auto legal = check(c);
    return legal.ok() ? std::string("accepted") : legal.error().message + " | " + legal.error().hint;
  };
  Subject subject = subject_of(kSoftmax, Optimizer::kSgd);
  subject.train.seq_len = 24;
  CHECK(refused(case_of(subject, {.dp = 2, .ep = 2, .cp = 4}, false)) ==
        "ep=2 with cp=4: ranks that have the parts of a sequence share the experts together | set ep to a multiple of cp: 4");
  subject.model.experts.capacity_factor = 1;
  subject.model.experts.capacity_factor = -1;
  CHECK(refused(case_of(subject, {.dp = 2}, false)) ==
        "model.capacity_factor=-1 | use 1 for the even share, 1.25 for a quarter more, or 0: experts take every row, and none is "
        "dropped");
  subject.model.experts.capacity_factor = 0;
  CHECK(refused(case_of(subject, {.dp = 2, .ep = 8, .cp = 2}, false)) ==
        "ep=8 with dp=2 and cp=2: experts are shared by groups of the dp*cp data ranks | set ep to a divisor of dp*cp, a multiple "
        "of cp");
  const auto whole = [&](const Sizes& sizes, bool canonical = false) {
    return refused(case_of(subject, with_whole_experts(sizes), canonical));
  };
  CHECK(whole({.dp = 2, .ep = 4, .tp = 2}) == "accepted");
  CHECK(whole({.tp = 2}) ==
        "expert_tp=1 with ep=1: every rank of tp would have all experts whole, and the same | set ep to a multiple of tp, so that "
        "ranks of tp share the experts, or expert_tp: 0");
  CHECK(
      refused(case_of(subject, {.ep = 2, .tp = 2, .expert_tp = 1}, false)) ==
      "expert_tp=1 with sequence_parallel=false: every rank of tp would route all tokens, and send each row as often as there are "
      "ranks | set sequence_parallel: true, so that a rank routes its own part of each sequence, or expert_tp: 0");
  CHECK(whole({.ep = 2, .tp = 4}) ==
        "ep=2 with tp=4 and expert_tp=1: ranks that have the parts of a sequence share the experts together | set ep to a multiple "
        "of tp: 4");
  CHECK(whole({.ep = 2, .cp = 2, .tp = 2}) ==
        "ep=2 with cp=2, tp=2 and expert_tp=1: ranks that have the parts of a sequence share the experts together | set ep to a "
        "multiple of cp*tp: 4");
  CHECK(whole({.dp = 2, .ep = 8, .tp = 2}) ==
        "ep=8 with dp=2 and tp=2 and expert_tp=1: experts are shared by groups of the dp*tp ranks with other tokens | set ep to a "
        "divisor of dp*tp, a multiple of tp");
  CHECK(
      refused(case_of(subject, with_expert_slices({.dp = 2, .ep = 2, .tp = 4}, 3), false)) ==
      "expert_tp=3 with tp=4: the ranks of tp are divided into groups that cut each expert | set expert_tp to a divisor of tp, or "
      "leave it out, which is 4");
  CHECK(refused(case_of(subject, with_expert_slices({.dp = 2, .ep = 1, .tp = 4}, 2), false))
            .starts_with("expert_tp=2 with ep=1: every rank of tp would have"));
  CHECK(refused(case_of(subject, with_expert_slices({.dp = 2, .ep = 2, .tp = 4}, 2), false)) == "accepted");
  CHECK(
      refused(case_of(subject, with_expert_slices({.dp = 2, .ep = 8, .tp = 4}, 2), false)) ==
      "ep=8 with dp=2 and tp=4 and expert_tp=2: experts are shared by groups of the dp*tp/expert_tp ranks with other tokens | set "
      "ep to a divisor of dp*tp/expert_tp, a multiple of tp/expert_tp");
  CHECK(refused(case_of(subject, {.dp = 2, .ep = 2, .tp = 2, .expert_tp = 2}, false)) == "accepted");
  CHECK(whole({.ep = 2, .accumulation = 4, .tp = 2}, true) ==
        "canonical with tp=2, expert_tp=1 and micro_batch=2 | the tree over sequences stands above that over parts of each: set "
        "micro_batch: 1 and raise grad_accumulation");
  Case dense = case_of(subject, {.tp = 2, .expert_tp = 1}, false);
  dense.model.experts = {};
  CHECK(refused(dense) == "expert_tp=1 of a model without experts | leave expert_tp out, or set model.experts");
  subject.train.precision = Precision::kFp16;
  CHECK(refused(case_of(subject, {.dp = 2}, false)) ==
        "model.experts=8 with precision=fp16 and balance_loss=0.05: the loss scale does not reach the router's own losses | use "
        "precision: bf16, or even the load with model.bias_update_rate and no such loss");
  subject.train.precision = Precision::kFp8;
  CHECK(refused(case_of(subject, {.dp = 2}, false)) ==
        "model.experts=8 with fp8_scaling=current: rows go to experts on other ranks, and the scale of a whole tensor is known to "
        "nobody "
        "before they have come | use fp8_scaling: block");
  subject.train.fp8_scaling = Fp8Scaling::kDelayed;
  CHECK(refused(case_of(subject, {.dp = 2}, false)).starts_with("model.experts=8 with fp8_scaling=delayed: rows go to experts"));
  subject.train.fp8_scaling = Fp8Scaling::kBlock;
  CHECK(refused(case_of(subject, {.dp = 2, .ep = 2}, false)) == "accepted");
  Subject wide = subject;
  wide.model.hidden = 256, wide.model.heads = wide.model.kv_heads = 4, wide.model.head_dim = 64;
  wide.model.experts.ffn = 384;
  CHECK(
      refused(case_of(wide, {.tp = 2}, false)) ==
      "fp8_scaling=block with tp=2: a rank's 192 of the 384 moe_ffn are no whole blocks of 128 | lower tp, or use precision: bf16");
  CHECK(refused(case_of(wide, with_whole_experts({.ep = 2, .tp = 2}), false)) == "accepted");
  wide.model.experts.ffn = 256;
  CHECK(refused(case_of(wide, {.tp = 2}, false)) == "accepted");  // no layer has the 40 columns of a dense feed-forward
  subject.train.fp8_scaling = Fp8Scaling::kCurrent;
  subject.train.precision = Precision::kFp32;
  subject.model.qk_norm = true;
  CHECK(refused(case_of(subject, {.tp = 4}, false)) ==
        "model.qk_norm=true with kv_heads 2 and tp=4: ranks that share a kv head would norm it apart | choose a tp that divides "
        "the kv "
        "heads");
  subject.model.heads = 12, subject.model.kv_heads = 6;
  CHECK(refused(case_of(subject, {.tp = 2}, true)).starts_with("canonical with model.qk_norm=true and tp=2: 6 heads a rank"));
  subject.model.experts.ffn = 13;
  CHECK(refused(case_of(subject, {.tp = 2}, false)).starts_with("moe_ffn 13 is not divisible by tp=2"));
}

TEST_CASE(
    "experts: memory is the plan's to the byte under every layout, and so are wire bytes, but for rows, which go as routes have "
    "it") {
  const Sizes kSizes[] = {{.dp = 2, .accumulation = 4, .cp = 2},
                          {.dp = 2, .ep = 4, .accumulation = 4, .cp = 2},
                          {.dp = 2, .ep = 2, .zero = 1, .tp = 2},
                          {.dp = 2, .ep = 2, .zero = 3, .tp = 2, .sequence_parallel = true},
                          {.dp = 2, .accumulation = 2, .tp = 2, .sequence_parallel = true},
                          with_whole_experts({.dp = 2, .ep = 2, .accumulation = 4, .tp = 2}),
                          with_whole_experts({.dp = 2, .ep = 8, .zero = 2, .accumulation = 4, .cp = 2, .tp = 2}),
                          with_expert_slices({.dp = 2, .ep = 4, .zero = 2, .accumulation = 4, .tp = 4}, 2)};
  Subject layers = layered(false, Optimizer::kAdamW, 0, 0.5f), one_gated = gated(false, Optimizer::kAdamW);
  layers.model.kv_heads = layers.model.heads;  // norms of heads: no two ranks share a kv head
  layers.train.seq_len = 24;
  one_gated.model.experts.every = 2;  // of one layer, as the count below
  Subject full = layers, narrow = one_gated, scaled = full;
  full.model.experts.capacity_factor = scaled.model.experts.capacity_factor = 1;
  narrow.train.precision = Precision::kBf16, scaled.train.precision = Precision::kFp16;
  scaled.model.experts.balance = scaled.model.experts.z_loss = 0;
  for (const auto& [subject, canonical] : {std::pair(layers, false),
                                           {layers, true},
                                           {one_gated, false},
                                           {one_gated, true},
                                           {full, false},
                                           {full, true},
                                           {narrow, false},
                                           {narrow, true},
                                           {scaled, false},
                                           {scaled, true}})
    for (const Sizes& sizes : kSizes) {
      const Case config = case_of(subject, sizes, canonical);
      Running run(config);
      INFO(config.name << (canonical ? " canonical" : ""));
      REQUIRE(std::isfinite(*run.session->step(0).loss));
      const Mesh& mesh = run.placed.plan->mesh;
      const int64_t rows =
          config.train.micro_batch * config.train.seq_len / config.layout.routed_parts() * config.model.experts.top_k;
      const int64_t counts = int64_t{4} * kContractionLeaves * config.train.micro_batch * config.model.experts.count;
      for (int rank = 0; rank < mesh.world_size(); ++rank) {
        CHECK(run.session->ledger(rank).peak(Space::kDevice) ==
              memory_peak(*run.placed.plan, 0)[static_cast<size_t>(Space::kDevice)].peak_bytes);
        const auto planned = wire_bytes(*run.placed.plan, mesh.coordinates(rank));
        for (size_t c = 0; c < run.placed.plan->comms.size(); ++c) {
          const std::string& name = run.placed.plan->comms[c].name;
          const int64_t sent = run.session->sent_by_comm(rank)[c];
          INFO("rank " << rank << " " << name);
          if (name != "ep") {
            CHECK(sent == planned.at(name));
            continue;
          }
          // Of one layer: its own rows go twice, and come back twice from ranks that have their experts, as others' do from here.
          const int64_t most = 2 * rows * (1 + config.layout.ep) * config.model.hidden * 4;
          CHECK(sent > 0);
          CHECK(sent <= config.train.grad_accumulation * (most + counts));
        }
      }
    }
}

namespace {

/// Changes the ops of that label and phase; false where there is none.
bool change(Plan& plan, std::string_view segment, std::string_view label, Phase phase,
            const std::function<void(Segment&, Op&)>& with) {
  bool any = false;
  for (Segment& s : plan.segments)
    for (Step& step : s.steps)
      if (Op* op = std::get_if<Op>(&step);
          op != nullptr && s.name == segment && op->label == label && phase_of(op->work) == phase) {
        with(s, *op);
        any = true;
      }
  return any;
}

SlotId slot(const Segment& s, std::string_view name) {
  for (size_t i = 0; i < s.slots.size(); ++i)
    if (s.slots[i].name == name) return SlotId(static_cast<int32_t>(i));
  SHARDLAB_CHECK(false, "{} has no slot {}", s.name, name);
}

std::string verdict(const Plan& plan) {
  const auto verdict = verify(plan);
  return verdict.ok() ? "accepted" : to_string(verdict.error());
}

struct Damage {
  std::string_view segment, label;
  Phase phase;
  std::function<void(Segment&, Op&)> with;
  std::string_view says;
};

void refuse_all(const Plan& good, const std::vector<Damage>& damages) {
  for (const Damage& damage : damages) {
    Plan plan = good;
    INFO(damage.segment << " " << damage.label << " " << damage.says);
    REQUIRE(change(plan, damage.segment, damage.label, damage.phase, damage.with));
    const std::string said = verdict(plan);
    INFO(said);
    CHECK(said != "accepted");
    CHECK(said.find(damage.says) != std::string::npos);
  }
}

}  // namespace

TEST_CASE("experts: a wrong route, count, weight or gradient is refused, and says what is wrong") {
  const auto lowered = lower(case_of(subject_of(kSoftmax, Optimizer::kSgd), {.dp = 2, .accumulation = 2}, true));
  REQUIRE(lowered.ok());
  REQUIRE(verdict(*lowered) == "accepted");
  const std::vector<Damage> damages{
      {"layer.F", "moe.combine", Phase::kF, [](Segment& s, Op& op) { op.reads[0] = slot(s, "rows.in"); }, "which no expert made"},
      {"layer.B", "moe.combine", Phase::kI, [](Segment& s, Op& op) { op.reads[1] = slot(s, "rows.in"); },
       "what the forward op of this label read"},
      {"layer.B", "moe.down", Phase::kW, [](Segment& s, Op& op) { op.reads[1] = slot(s, "d.rows.in"); }, ""},
      {"layer.B", "moe.up", Phase::kW, [](Segment&, Op& op) { op.reads[1] = op.reads[0]; }, ""},
      {"layer.F", "moe.route", Phase::kF, [](Segment&, Op& op) { std::get<Route>(op.work).normalise = false; }, "normalise"},
      {"layer.B", "moe.route", Phase::kI, [](Segment&, Op& op) { std::get<Route>(op.work).tokens *= 2; }, "tokens"},
      {"layer.F", "moe.dispatch", Phase::kF, [](Segment&, Op& op) { std::get<Dispatch>(op.work).experts = 4; }, "experts"},
      {"layer.B", "moe.norm.y", Phase::kNone, [](Segment&, Op& op) { op.reads[1] = op.reads[0]; }, "gradient"},
      {"layer.B", "moe.down", Phase::kI, [](Segment& s, Op& op) { op.reads[0] = slot(s, "rows.in"); }, "as a gradient"},
      {"layer.F", "moe.up", Phase::kF, [](Segment&, Op& op) { std::get<GroupedLinear>(op.work).sources = 3; }, "sources=3"},
  };
  refuse_all(*lowered, damages);
}

TEST_CASE("rows by node: wrong counts, and nodes that do not divide the group, are refused as from rank to rank") {
  const Case config =
      on_two_nodes(case_of(subject_of(kSoftmax, Optimizer::kSgd), {.dp = 4, .ep = 4}, false), AlgorithmChoice::kHierarchical);
  Case from_rank_to_rank = on_two_nodes(config, AlgorithmChoice::kDirect);
  from_rank_to_rank.name = config.name;
  const auto lowered = lower(config), direct = lower(from_rank_to_rank);
  REQUIRE(lowered.ok());
  REQUIRE(direct.ok());
  REQUIRE(verdict(*lowered) == "accepted");
  refuse_all(*lowered, {{"layer.F", "moe.go", Phase::kNone, [](Segment&, Op& op) { std::get<Collective>(op.work).per_node = 3; },
                         "per_node=3: rows go by node where each of the nodes has as many of the 4 ranks"}});
  const std::vector<Damage> damages{
      {"layer.F", "moe.go", Phase::kNone, [](Segment&, Op& op) { std::swap(op.reads[1], op.reads[2]); }, ""},
      {"layer.F", "moe.return", Phase::kNone, [](Segment&, Op& op) { std::swap(op.reads[1], op.reads[2]); }, ""},
      {"layer.F", "moe.go", Phase::kNone, [](Segment&, Op& op) { op.reads[2] = op.reads[1]; }, ""},
      {"layer.B", "moe.go.d", Phase::kNone, [](Segment&, Op& op) { op.reads[1] = op.reads[2]; }, ""},
      {"layer.F", "moe.go", Phase::kNone, [](Segment&, Op& op) { op.reads.resize(1); }, ""},
      {"layer.F", "moe.go", Phase::kNone, [](Segment&, Op& op) { std::get<Collective>(op.work).room = 1; }, ""}};
  for (const Damage& damage : damages) {
    std::string said[2];
    for (int i = 0; i < 2; ++i) {
      Plan plan = i == 0 ? *lowered : *direct;
      REQUIRE(change(plan, damage.segment, damage.label, damage.phase, damage.with));
      said[i] = verdict(plan);
    }
    INFO(damage.label << ": " << said[0]);
    CHECK(said[0] != "accepted");
    CHECK(said[0] == said[1]);
  }
}

namespace {

/// The plan with another capacity of its experts, and `room` for the rows that one rank sends another.
Plan with_capacity(Plan plan, int64_t capacity, int64_t room) {
  for (Segment& segment : plan.segments)
    for (Step& step : segment.steps)
      if (Op* op = std::get_if<Op>(&step))
        std::visit(
            [&](auto& w) {
              if constexpr (requires { w.capacity; }) w.capacity = capacity;
              if constexpr (requires { w.room; }) w.room = w.room > 0 ? room : 0;
            },
            op->work);
  return plan;
}

}  // namespace

TEST_CASE("a capacity that ops do not share, and a buffer that is smaller than its bound, are refused, and say what is wrong") {
  Subject subject = subject_of(kFull, Optimizer::kSgd);
  subject.train.seq_len = 24;
  const auto shared = lower(case_of(subject, {.dp = 2, .ep = 2, .accumulation = 2}, true)),
             alone = lower(case_of(subject, {.dp = 2}, false));
  subject.model.experts.capacity_factor = 0;
  const auto dropless = lower(case_of(subject, {.dp = 2, .ep = 2, .accumulation = 2}, true));
  REQUIRE(shared.ok());
  REQUIRE(alone.ok());
  REQUIRE(dropless.ok());
  for (const auto* plan : {&*shared, &*alone, &*dropless}) REQUIRE(verdict(*plan) == "accepted");
  const auto capacity = [](int64_t rows) {
    return [rows](Segment&, Op& op) {
      std::visit(
          [&](auto& w) {
            if constexpr (requires { w.capacity; }) w.capacity = rows;
          },
          op.work);
    };
  };
  const auto room = [](int64_t rows) { return [rows](Segment&, Op& op) { std::get<Collective>(op.work).room = rows; }; };
  const auto shrink = [](std::string_view name) {  // by a row
    return [name](Segment& s, Op&) { --s.slots[slot(s, name).index()].type.shape[1]; };
  };
  const auto everywhere = [](std::string_view like) {  // each buffer of rows with the experts, by a row
    return [like](Segment& s, Op&) {
      for (Slot& x : s.slots)
        if (x.name.find("rows.") != std::string::npos && x.type.dtype == DType::f32 &&
            (x.name.ends_with(like) || x.name.ends_with("rows.u") || x.name.ends_with("rows.a")))
          --x.type.shape[1];
    };
  };
  refuse_all(
      *shared,
      {// A router that drops where rows are laid out without drops, and the other way round.
       {"layer.F", "moe.route", Phase::kF, capacity(0), "both drop the same rows"},
       {"layer.F", "moe.route", Phase::kF, capacity(7), "both drop the same rows"},
       {"layer.F", "moe.dispatch", Phase::kF, capacity(0), "both drop the same rows"},
       {"layer.F", "moe.dispatch", Phase::kF, capacity(5), "both drop the same rows"},
       {"layer.F", "moe.combine", Phase::kF, capacity(0), "both drop the same rows"},
       {"layer.F", "moe.combine", Phase::kF, capacity(5), "both drop the same rows"},
       {"layer.B", "moe.route", Phase::kI, capacity(0), "capacity"},
       {"layer.B", "moe.dispatch", Phase::kI, capacity(5), "capacity"},
       {"layer.B", "moe.combine", Phase::kI, capacity(0), "capacity"},
       {"layer.F", "moe.route", Phase::kF, capacity(25), "up to 24 rows of a sequence"},
       {"layer.F", "moe.route", Phase::kF, capacity(-1), "up to 24 rows of a sequence"},
       {"layer.F", "moe.dispatch", Phase::kF, capacity(25), "up to 24 rows of a sequence"},
       // As many experts as the router has: the bound of rows follows from their number.
       {"layer.F", "moe.dispatch", Phase::kF, [](Segment&, Op& op) { std::get<Dispatch>(op.work).experts = 2; }, "chooses among 8"},
       {"layer.F", "moe.combine", Phase::kF, [](Segment&, Op& op) { std::get<Combine>(op.work).experts = 2; }, "chooses among 8"},
       // 2 sequences of which 4 experts take 6 rows each.
       {"layer.F", "moe.go", Phase::kNone, room(47), "room for 47 rows of each rank, and 2 sequences fill 48 with capacity=6"},
       {"layer.B", "moe.return.d", Phase::kNone, room(47), "2 sequences fill 48 with capacity=6"},
       {"layer.F", "moe.return", Phase::kNone, room(1), "2 sequences fill 48 with capacity=6"},
       {"layer.F", "moe.go", Phase::kNone, room(0),
        "has room for 96 of 192 rows, and no fit_rows of this layer and micro-batch says whether more have come"},
       {"layer.F", "moe.go", Phase::kNone, room(-1), "room=-1"},
       {"layer.F", "moe.go", Phase::kNone, room(97), "97 rows of each of 2 ranks may come, and there is room for 96"},
       {"layer.F", "moe.counts", Phase::kNone, room(1), "of an op that moves no counted rows"},
       {"layer.F", "moe.go", Phase::kNone, everywhere(".there"), "rows=96 of %rows.in.there, which has 95"},
       {"layer.F", "moe.dispatch", Phase::kF, shrink("rows.in"), "has 94 rows, and 2 sequences fill 96 with capacity=6"}});
  REQUIRE(verdict(with_capacity(*shared, 6, 48)) == "accepted");
  CHECK(verdict(with_capacity(*shared, 7, 56)).find("has room for 96 rows of all ranks, and up to 112 come with capacity=7") !=
        std::string::npos);
  refuse_all(*dropless, {{"layer.F", "moe.route", Phase::kF, capacity(6), "both drop the same rows"},
                         {"layer.F", "moe.dispatch", Phase::kF, capacity(6), "both drop the same rows"},
                         {"layer.F", "moe.go", Phase::kNone, room(48), "no router with a capacity chose the rows"},
                         {"layer.F", "moe.dispatch", Phase::kF, shrink("rows.in"), "tokens go to 2 experts each"}});
  refuse_all(*alone, {{"layer.F", "moe.dispatch", Phase::kF, shrink("rows.in"), ""},
                      {"layer.F", "moe.route", Phase::kF, capacity(3), "both drop the same rows"}});
}

TEST_CASE("biases of routers: a load of some ranks, micro-batches or another layer, and a bias that moves too early, are refused") {
  const auto lowered = lower(case_of(subject_of(kBiased, Optimizer::kSgd), {.dp = 2, .accumulation = 2}, true));
  REQUIRE(lowered.ok());
  REQUIRE(verdict(*lowered) == "accepted");
  refuse_all(
      *lowered,
      {{"layer.B", "moe.count", Phase::kNone, [](Segment& s, Op& op) { op.reads[0] = slot(s, "rows.counts"); }, ""},
       {"layer.B", "moe.count", Phase::kNone, [](Segment&, Op& op) { op.work = Copy{}, op.reads.erase(op.reads.begin()); }, ""},
       {"layer.F", "moe.route", Phase::kF, [](Segment&, Op& op) { std::get<Route>(op.work).biased = false, op.reads.pop_back(); },
        ""}});
  // Calls of the role: by the name of their segment.
  const auto calls = [](Plan& plan, std::string_view name) {
    std::vector<size_t> at;
    for (size_t i = 0; i < plan.roles[0].program.size(); ++i)
      if (const auto* call = std::get_if<Call>(&plan.roles[0].program[i]);
          call != nullptr && plan.segments[call->segment.index()].name.starts_with(name))
        at.push_back(i);
    return at;
  };
  const auto refused = [&](const std::function<void(Plan&, Role&)>& damage, std::string_view says) {
    Plan plan = *lowered;
    damage(plan, plan.roles[0]);
    const std::string said = verdict(plan);
    INFO(said);
    CHECK(said != "accepted");
    CHECK(said.find(says) != std::string::npos);
  };
  refused([&](Plan& plan,
              Role& role) { role.program.erase(role.program.begin() + static_cast<int64_t>(calls(plan, "router_load.all")[0])); },
          "but since %layers.0.router.load was written it holds");
  refused(
      [&](Plan& plan, Role& role) {  // the last update, before the last backward
        const size_t update = calls(plan, "router_bias.update").back(), backward = calls(plan, "layer.B").back();
        std::rotate(role.program.begin() + static_cast<int64_t>(backward), role.program.begin() + static_cast<int64_t>(update),
                    role.program.begin() + static_cast<int64_t>(update) + 1);
      },
      "");
  refused(
      [&](Plan& plan, Role& role) {  // each layer's bias by the other's load
        const auto at = calls(plan, "router_bias.update");
        std::swap(std::get<Call>(role.program[at[0]]).binding[0], std::get<Call>(role.program[at[1]]).binding[0]);
      },
      "which is not the load of layer");
}

TEST_CASE("what surrounds experts: a wrong norm of heads, shared expert or group is refused, and says what is wrong") {
  const auto lowered = lower(case_of(layered(false, Optimizer::kSgd), {.dp = 2, .accumulation = 2}, true));
  REQUIRE(lowered.ok());
  REQUIRE(verdict(*lowered) == "accepted");
  const auto passed_on = [](Segment&, Op& op) {  // not normed
    op.work = Copy{};
    op.reads.resize(1), op.writes.resize(1);
  };
  refuse_all(
      *lowered,
      {{"dense.B", "attn.qk_norm", Phase::kI, [](Segment&, Op& op) { std::swap(op.reads[2], op.reads[3]); }, "what the forward op"},
       {"layer.B", "attn.qk_norm", Phase::kW, [](Segment&, Op& op) { std::swap(op.writes[0], op.writes[1]); }, "gradient"},
       {"layer.B", "attn.qk_norm", Phase::kW, [](Segment& s, Op& op) { op.reads[1] = slot(s, "d.qkv"); }, "what the forward op"},
       {"layer.B", "attn.qk_norm", Phase::kI, [](Segment& s, Op& op) { op.reads[0] = slot(s, "qkv.raw"); }, "as a gradient"},
       {"dense.B", "attn.qk_norm", Phase::kI, passed_on, "is not the gradient of what"},
       {"layer.F", "attn.qk_norm", Phase::kF, passed_on, "no forward op"},
       {"layer.F", "attn.qk_norm", Phase::kF, [](Segment&, Op& op) { std::get<HeadNorm>(op.work).kv_heads = 4; }, "heads=4"},
       {"layer.B", "attn.qk_norm", Phase::kI, [](Segment&, Op& op) { std::get<HeadNorm>(op.work).epsilon = 1; }, "epsilon"},
       {"layer.B", "moe.shared", Phase::kNone, [](Segment&, Op& op) { op.reads[1] = op.reads[0]; }, "gradient"},
       {"layer.B", "moe.shared.down", Phase::kW, [](Segment& s, Op& op) { op.reads[0] = slot(s, "rows.a"); }, ""},
       {"layer.F", "moe.route", Phase::kF, [](Segment&, Op& op) { std::get<Route>(op.work).groups_chosen = 1; }, "groups"},
       {"layer.F", "moe.route", Phase::kF, [](Segment&, Op& op) { std::get<Route>(op.work).groups = 3; }, "groups=3"}});
}

TEST_CASE("gated shared experts: a wrong gate, its sum left out or a gradient of another is refused, and says what is wrong") {
  const auto lowered = lower(case_of(gated(false, Optimizer::kSgd), {.dp = 2, .accumulation = 2}, true)),
             sliced = lower(case_of(gated(false, Optimizer::kSgd), {.dp = 2, .tp = 2}, false));
  REQUIRE(lowered.ok());
  REQUIRE(sliced.ok());
  REQUIRE(verdict(*lowered) == "accepted");
  REQUIRE(verdict(*sliced) == "accepted");
  refuse_all(
      *lowered,
      {{"layer.F", "moe.shared", Phase::kNone, [](Segment& s, Op& op) { op.reads[1] = slot(s, "shared.z"); }, ""},
       {"layer.B", "moe.shared.gated", Phase::kI, [](Segment& s, Op& op) { op.reads[1] = slot(s, "mlp.norm.y"); },
        "what the forward op"},
       {"layer.B", "moe.shared.down", Phase::kI, [](Segment& s, Op& op) { op.reads[0] = slot(s, "d.y"); }, ""},
       {"layer.B", "moe.shared.gate", Phase::kW, [](Segment& s, Op& op) { op.reads[0] = slot(s, "x1"); }, "what the forward op"},
       {"layer.B", "moe.norm.y.gated", Phase::kNone, [](Segment&, Op& op) { op.reads[1] = op.reads[0]; }, "gradient"},
       {"layer.F", "moe.shared.gated", Phase::kF, [](Segment& s, Op& op) { op.reads[1] = slot(s, "moe.logits"); },
        "a number a token"}});
  refuse_all(*sliced, {{"layer.B", "moe.shared.gate", Phase::kW,
                        [](Segment& s, Op& op) { op.reads[1] = slot(s, "d.shared.gate.part"); }, "tp"},
                       {"layer.B", "moe.shared.gate.f", Phase::kNone, [](Segment&, Op& op) { op.work = Copy{}; }, ""},
                       {"layer.F", "mlp.g", Phase::kNone, [](Segment&, Op& op) { op.work = Copy{}; }, ""}});
}

TEST_CASE(
    "experts beside parts of sequences: a load of a part, of no choice or of other sequences is refused, and says what is wrong") {
  const auto lowered = lower(case_of(subject_of(kSoftmax, Optimizer::kSgd), {.dp = 2, .ep = 4, .accumulation = 4, .cp = 2}, true));
  REQUIRE(lowered.ok());
  REQUIRE(verdict(*lowered) == "accepted");
  refuse_all(
      *lowered,
      {{"layer.B", "moe.route", Phase::kI, [](Segment& s, Op& op) { op.reads[3] = slot(s, "moe.load.part"); }, "unreduced sum"},
       {"layer.B", "moe.load", Phase::kNone, [](Segment& s, Op& op) { op.reads[0] = slot(s, "rows.counts"); }, ""},
       {"layer.B", "moe.route", Phase::kI, [](Segment&, Op& op) { std::get<Route>(op.work).sequence = 10; }, "sequence=10"},
       {"layer.B", "moe.route", Phase::kI, [](Segment&, Op& op) { std::get<Route>(op.work).sequence = 0, op.reads.pop_back(); },
        ""},
       {"layer.B", "moe.up", Phase::kW, [](Segment& s, Op& op) { op.reads[0] = slot(s, "d.rows.in.there"); }, ""}});
}

TEST_CASE(
    "a capacity beside parts of sequences: room that is dealt by a rank's own choices, or by none of this router, is refused, and "
    "says "
    "what is wrong") {
  Subject subject = subject_of(kFullGroups, Optimizer::kSgd);
  subject.model.experts.balance = 0;
  subject.train.seq_len = 24;
  for (const auto& [axis, sizes] : {std::pair<std::string_view, Sizes>{"cp", {.dp = 2, .ep = 4, .accumulation = 4, .cp = 2}},
                                    {"tp", with_whole_experts({.dp = 2, .ep = 4, .accumulation = 4, .tp = 2})}}) {
    const auto lowered = lower(case_of(subject, sizes, true));
    INFO((lowered ? "" : to_string(lowered.error())));
    REQUIRE(lowered.ok());
    REQUIRE(verdict(*lowered) == "accepted");
    refuse_all(
        *lowered,
        {// The rank's own choices in the place of those of all parts.
         {"layer.F", "moe.route", Phase::kF, [](Segment& s, Op& op) { op.reads[1] = slot(s, "moe.chosen"); },
          "%moe.chosen has extent 12 along dim 1, and what all parts of a sequence chose expects 24"},
         {"layer.F", "moe.route", Phase::kF,
          [](Segment& s, Op& op) { op.reads[1] = slot(s, "moe.chosen"), std::get<Route>(op.work).sequence = 12; }, "sequence=12"},
         {"layer.F", "moe.route", Phase::kF, [](Segment&, Op& op) { std::get<Route>(op.work).sequence = 0, op.reads.pop_back(); },
          "along " + std::string(axis) + ": %moe.logits is shard(1), and the op needs that dim whole"},
         {"layer.F", "moe.chosen.all", Phase::kNone, [](Segment&, Op& op) { op.work = Copy{}; }, ""},
         {"layer.F", "moe.chosen.all", Phase::kNone,
          [](Segment&, Op& op) { std::get<Collective>(op.work).kind = CollectiveKind::kBroadcast; }, ""},
         // Choices by another rule, or that no ChooseExperts made.
         {"layer.F", "moe.choose", Phase::kF, [](Segment&, Op& op) { std::get<ChooseExperts>(op.work).groups_chosen = 1; },
          "groups"},
         {"layer.F", "moe.choose", Phase::kF, [](Segment&, Op& op) { std::get<ChooseExperts>(op.work).groups = 2; },
          "as what all parts of a sequence chose by %moe.logits"},
         {"layer.F", "moe.choose", Phase::kF,
          [](Segment&, Op& op) {
            auto& w = std::get<ChooseExperts>(op.work);
            w.sigmoid = !w.sigmoid;
          },
          "as what all parts of a sequence chose by %moe.logits"},
         {"layer.F", "moe.choose", Phase::kF, [](Segment&, Op& op) { std::get<ChooseExperts>(op.work).phase = Phase::kI; }, ""},
         {"layer.F", "moe.chosen.all", Phase::kNone, [](Segment& s, Op& op) { op.reads[0] = slot(s, "moe.choice"); }, ""},
         // Room for the rows that come.
         {"layer.F", "moe.route", Phase::kF, [](Segment&, Op& op) { std::get<Route>(op.work).capacity = 25; },
          "up to 24 rows of a sequence"}});
  }
}

TEST_CASE("experts beside slices: a missing sum, a sum too many or another's tokens are refused, and say what is wrong") {
  Subject subject = layered(false, Optimizer::kSgd);
  subject.train.seq_len = 24;
  const Sizes slices{.dp = 2, .ep = 2, .tp = 2}, strips{.dp = 2, .ep = 2, .tp = 2, .sequence_parallel = true};
  const auto canonical = lower(case_of(subject, slices, true)), fast = lower(case_of(subject, strips, false));
  REQUIRE(canonical.ok());
  REQUIRE(fast.ok());
  refuse_all(
      *canonical,
      {{"layer.F", "moe.combine", Phase::kF, [](Segment& s, Op& op) { op.reads[0] = slot(s, "rows.out.part"); }, "partial"},
       {"layer.B", "moe.dispatch", Phase::kI, [](Segment& s, Op& op) { op.reads[0] = slot(s, "d.rows.in.part"); }, "partial"},
       {"layer.F", "moe.g", Phase::kNone, [](Segment& s, Op& op) { op.reads[0] = slot(s, "rows.out"); }, "already whole"},
       {"layer.B", "attn.qk_norm", Phase::kW,
        [](Segment& s, Op& op) {
          if (op.reads.size() == 2) op.reads[0] = slot(s, "d.attn.q_norm.gamma.tokens.part");
        },
        ""},
       {"layer.B", "attn.qk_norm.tokens", Phase::kW, [](Segment&, Op& op) { std::swap(op.writes[0], op.writes[1]); }, ""}});
  refuse_all(*fast, {{"layer.B", "moe.route", Phase::kI, [](Segment& s, Op& op) { op.reads[0] = slot(s, "d.moe.weights.part"); },
                      "unreduced sum"},
                     {"layer.B", "moe.router.own", Phase::kNone,
                      [](Segment& s, Op& op) { op.reads[0] = slot(s, "mlp.norm.y.all"); }, "forward value"},
                     {"layer.B", "moe.norm.y", Phase::kNone, [](Segment&, Op& op) { op.reads[1] = op.reads[0]; }, "gradient"},
                     {"layer.F", "moe.shared", Phase::kNone, [](Segment&, Op& op) { op.reads[1] = op.reads[0]; }, ""},
                     {"layer.F", "mlp.g", Phase::kNone, [](Segment&, Op& op) { op.work = Copy{}; }, ""}});
}

TEST_CASE("slices over some ranks of tp: a sum over too few ranks, over the wrong group and another group's tokens are refused") {
  Subject subject = layered(false, Optimizer::kSgd);
  subject.train.seq_len = 24, subject.sequences = 8, subject.model.qk_norm = false;
  const Sizes sizes = with_expert_slices({.dp = 2, .ep = 4, .accumulation = 4, .tp = 4}, 2);
  const auto fast = lower(case_of(subject, sizes, false)), canonical = lower(case_of(subject, sizes, true));
  REQUIRE(fast.ok());
  REQUIRE(canonical.ok());
  for (const auto* plan : {&*fast, &*canonical}) {
    const auto over = [&](std::string_view comm) {
      const auto at = std::ranges::find(plan->comms, comm, &Comm::name);
      SHARDLAB_CHECK(at != plan->comms.end(), "no communicator {}", comm);
      return [id = CommId(static_cast<int32_t>(at - plan->comms.begin()))](Segment&, Op& op) {
        std::get<Collective>(op.work).comm = id;
      };
    };
    refuse_all(*plan,
               {// A router's gradient of one group's tokens, or summed over the ranks that route alike.
                {"layer.B", "moe.router", Phase::kW, [](Segment& s, Op& op) { op.writes[0] = slot(s, "d.moe.router"); },
                 "it must be reduced before it is read as replicated"},
                {"layer.B", "moe.router.all", Phase::kNone, over("etp"), ""},
                {"layer.B", "moe.router.all", Phase::kNone, over("tp"), ""},
                {"layer.B", "moe.load.all", Phase::kNone, over("etp"), ""},
                // What slices make of rows is summed over the ranks that cut an expert, and over no others.
                {"layer.F", "moe.g", Phase::kNone, over("tp.groups"), ""},
                {"layer.F", "moe.g", Phase::kNone, over("tp"), ""},
                {"layer.B", "moe.f", Phase::kNone, over("tp.groups"), ""},
                // What shared experts make, over all.
                {"layer.F", "moe.shared.g", Phase::kNone, over("etp"), ""},
                {"layer.F", "moe.shared.g", Phase::kNone, over("tp.groups"), ""},
                {"layer.F", "moe.router.gather", Phase::kNone, over("tp"), ""},
                {"layer.F", "moe.router.gather", Phase::kNone, over("tp.groups"), ""},
                {"layer.F", "moe.router", Phase::kF, [](Segment& s, Op& op) { op.reads[0] = slot(s, "mlp.norm.y.all"); }, ""}});
    // An expert's gradient summed over groups, which have other experts.
    Plan summed = *plan;
    const auto groups = std::ranges::find(summed.comms, "tp.groups", &Comm::name);
    bool done = false;
    for (Segment& s : summed.segments)
      for (size_t i = 0; i < s.slots.size() && !done; ++i)
        if (s.slots[i].name == "d.moe.wup") {
          const SlotId gradient(static_cast<int32_t>(i));
          Op all;
          all.work = Collective{CollectiveKind::kAllReduce, ReduceOp::kSum,
                                CommId(static_cast<int32_t>(groups - summed.comms.begin())), Algorithm::kDirect};
          all.reads = all.writes = {gradient};
          all.label = "moe.up.all";
          s.steps.emplace_back(std::move(all));
          done = true;
        }
    REQUIRE(done);
    CHECK(verdict(summed) != "accepted");
  }
}

TEST_CASE("whole experts: a router's gradient of one rank's tokens, an expert's summed over tp and a load of a part are refused") {
  Subject subject = layered(false, Optimizer::kSgd);
  subject.train.seq_len = 24;
  const auto fast = lower(case_of(subject, with_whole_experts({.dp = 2, .ep = 4, .tp = 2}), false)),
             canonical = lower(case_of(subject, with_whole_experts({.dp = 2, .ep = 2, .accumulation = 4, .tp = 2}), true));
  REQUIRE(fast.ok());
  REQUIRE(canonical.ok());
  const auto sum_over_tp = [](Plan& plan, std::string_view gradient) {
    for (Segment& s : plan.segments)
      for (size_t i = 0; i < s.slots.size(); ++i)
        if (s.slots[i].name == gradient) return std::pair{&s, SlotId(static_cast<int32_t>(i))};
    SHARDLAB_CHECK(false, "no segment has {}", gradient);
  };
  for (const auto* plan : {&*fast, &*canonical}) {
    refuse_all(
        *plan,
        {{"layer.B", "moe.router", Phase::kW, [](Segment& s, Op& op) { op.writes[0] = slot(s, "d.moe.router"); },
          "it must be reduced before it is read as replicated"},
         {"layer.B", "moe.router.sum", Phase::kNone, [](Segment& s, Op& op) { op.reads[0] = slot(s, "d.moe.router.part"); }, "tp"},
         {"layer.B", "moe.router.all", Phase::kNone, [](Segment&, Op& op) { op.work = Copy{}; }, ""},
         {"layer.B", "moe.load.all", Phase::kNone, [](Segment&, Op& op) { op.work = Copy{}; }, ""},
         {"layer.B", "moe.route", Phase::kI, [](Segment& s, Op& op) { op.reads[3] = slot(s, "moe.load.part"); }, "unreduced sum"},
         {"layer.F", "moe.router", Phase::kF, [](Segment& s, Op& op) { op.reads[0] = slot(s, "mlp.norm.y.all"); }, ""},
         {"layer.F", "moe.combine", Phase::kF, [](Segment& s, Op& op) { op.reads[0] = slot(s, "rows.out.there"); }, ""}});
    // What an expert's rows add up to is summed over ranks of tp, which have other experts.
    Plan summed = *plan;
    auto [segment, gradient] = sum_over_tp(summed, "d.moe.wup");
    const auto tp = std::ranges::find(summed.comms, "tp", &Comm::name);
    REQUIRE(tp != summed.comms.end());
    Op all;
    all.work = Collective{CollectiveKind::kAllReduce, ReduceOp::kSum, CommId(static_cast<int32_t>(tp - summed.comms.begin())),
                          Algorithm::kDirect};
    all.reads = all.writes = {gradient};
    all.label = "moe.up.all";
    const auto made = std::ranges::find_if(segment->steps, [](const Step& step) {
      const Op* op = std::get_if<Op>(&step);
      return op != nullptr && op->label == "moe.up" && phase_of(op->work) == Phase::kW;
    });
    REQUIRE(made != segment->steps.end());
    segment->steps.insert(made + 1, all);
    const std::string said = verdict(summed);
    INFO(said);
    CHECK(said.find("along tp") != std::string::npos);
  }
}

}  // namespace shardlab::testing::of_experts
