// Multi-head latent attention against the separately written single-rank reference, dense and beside mixtures of experts as DeepSeek-V2 and
// DeepSeek-V3 have them. Memory measured is memory planned in every training here (tests/numerics/running.cpp).
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "plan/memory.h"
#include "plan/wire.h"
#include "sweeps/models.h"
#include "tests/namespaces.h"
#include "tests/numerics/against_reference.h"
#include "tests/numerics/matrix.h"
#include "tests/numerics/running.h"
#include "tests/numerics/sized_cases.h"
#include "tests/numerics/train_case.h"
#include "tests/test.h"

namespace shardlab::testing::of_latent {
namespace {

/// Heads of v are narrower than those of q and k (`compressed`), or wider. No width is a multiple of 16.
Subject subject_of(bool compressed, Optimizer optimizer, float dropout = 0, float clip_norm = 0) {
  Model m;
  m.name = "latent";
  m.family = Family::kLlama;
  m.layers = 2;
  m.hidden = 32;
  m.heads = m.kv_heads = 4;
  m.latent = {.q_rank = compressed ? 20 : 0, .kv_rank = 12, .nope = 6, .rope = 4, .v = compressed ? 7 : 18};
  m.head_dim = 10;
  m.ffn = 40;
  m.vocab = 64;
  m.max_positions = 48;
  m.init_deviation = 0.15f;
  Train t;
  t.seq_len = 24;
  t.dropout = dropout;
  t.clip_norm = clip_norm;
  t.seed = 11;
  t.optimizer = optimizer;
  t.learning_rate.peak = optimizer == Optimizer::kSgd ? 1.0f : 0.01f;
  t.weight_decay = 0.1f;
  return {fmt::format("latent {} {}", compressed ? "compressed" : "plain q", name_of(optimizer)), m, t, 8};
}

/// A config.json with the keys of DeepSeek-V3's, and small sizes.
constexpr const char* kSmallV3 =
    R"({"architectures": ["DeepseekV3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0, "aux_loss_alpha": 0.001,
        "bos_token_id": 0, "eos_token_id": 1, "ep_size": 1, "first_k_dense_replace": 1, "hidden_act": "silu", "hidden_size": 32,
        "initializer_range": 0.15, "intermediate_size": 40, "kv_lora_rank": 12, "max_position_embeddings": 48,
        "model_type": "deepseek_v3", "moe_intermediate_size": 12, "moe_layer_freq": 1, "n_group": 4, "n_routed_experts": 8,
        "n_shared_experts": 1, "norm_topk_prob": true, "num_attention_heads": 4, "num_experts_per_tok": 3, "num_hidden_layers": 2,
        "num_key_value_heads": 4, "num_nextn_predict_layers": 1, "pretraining_tp": 1, "q_lora_rank": 20, "qk_nope_head_dim": 6,
        "qk_rope_head_dim": 4, "rms_norm_eps": 1e-06, "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0,
        "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096, "type": "yarn"}, "rope_theta": 10000,
        "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "seq_aux": true, "tie_word_embeddings": false, "topk_group": 2,
        "topk_method": "noaux_tc", "torch_dtype": "bfloat16", "use_cache": true, "v_head_dim": 8, "vocab_size": 64})";

/// ... and of DeepSeek-V2-Lite's.
constexpr const char* kSmallV2 =
    R"({"architectures": ["DeepseekV2ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0, "aux_loss_alpha": 0.001,
        "bos_token_id": 0, "eos_token_id": 1, "first_k_dense_replace": 1, "hidden_act": "silu", "hidden_size": 32,
        "initializer_range": 0.15, "intermediate_size": 40, "kv_lora_rank": 12, "max_position_embeddings": 48,
        "model_type": "deepseek_v2", "moe_intermediate_size": 12, "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 8,
        "n_shared_experts": 2, "norm_topk_prob": false, "num_attention_heads": 4, "num_experts_per_tok": 2, "num_hidden_layers": 2,
        "num_key_value_heads": 4, "pretraining_tp": 1, "q_lora_rank": null, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4,
        "rms_norm_eps": 1e-06, "rope_scaling": {"type": "yarn", "factor": 40}, "rope_theta": 10000, "routed_scaling_factor": 1.0,
        "scoring_func": "softmax", "seq_aux": true, "tie_word_embeddings": false, "topk_group": 1, "topk_method": "greedy",
        "torch_dtype": "bfloat16", "use_cache": true, "v_head_dim": 8, "vocab_size": 64})";

Subject deepseek(const char* config, Optimizer optimizer, float dropout = 0) {
  const auto model = sweeps::parse_model(config, "deepseek");
  SHARDLAB_CHECK(model.ok(), "{}", to_string(model.error()));
  Subject subject = subject_of(true, optimizer, dropout, 0.5f);
  subject.model = *model;
  subject.model.init_deviation = 0.15f;
  subject.name = model->latent.q_rank > 0 ? "deepseek v3" : "deepseek v2";
  return subject;
}

std::string refused(const Case& c) {
  const auto legal = check(c);
  return legal.ok() ? std::string("accepted") : legal.error().message + " | " + legal.error().hint;
}

}  // namespace

TEST_CASE(
    "latent attention, canonical: one rank, data parallel, ZeRO, stages and micro-batches train to the bits of the reference") {
  constexpr Sizes kSizes[] = {{},
                              {.accumulation = 2},
                              {.dp = 2, .accumulation = 2},
                              {.dp = 4, .zero = 1},
                              {.dp = 2, .zero = 2, .accumulation = 2},
                              {.dp = 2, .zero = 3, .accumulation = 2},
                              {.dp = 2, .pp = 2, .accumulation = 4},
                              {.pp = 2, .accumulation = 4, .schedule = Schedule::kZbH1}};
  for (const Subject& subject : {subject_of(true, Optimizer::kSgd), subject_of(false, Optimizer::kAdamW, 0.25f, 0.5f)}) {
    std::vector<Case> cases;
    for (const Sizes& sizes : kSizes) cases.push_back(case_of(subject, sizes, true));
    train_all(subject, cases);
  }
}

TEST_CASE("latent attention, canonical: what is made again or waits elsewhere leaves the bits") {
  const Subject subject = subject_of(true, Optimizer::kAdamW);
  std::vector<Case> cases;
  for (const Recompute recompute : {Recompute::kFull, Recompute::kSelective}) {
    cases.push_back(case_of(subject, {.dp = 2, .accumulation = 2}, true));
    cases.back().layout.recompute = recompute;
  }
  cases[1].layout.recompute_options.modules = "attn.norm attn.core mlp.act";
  cases.push_back(cases[0]);
  cases.back().layout.offload.activations = cases.back().layout.offload.optimizer = OffloadTo::kCpu;
  train_all(subject, cases);
}

TEST_CASE(
    "latent attention beside tensor and sequence parallelism, canonical: slices of heads train to the bits of the reference") {
  constexpr Sizes kSizes[] = {{.tp = 2},
                              {.accumulation = 2, .tp = 4},
                              {.accumulation = 2, .tp = 2, .sequence_parallel = true},
                              {.dp = 2, .zero = 3, .accumulation = 2, .tp = 2, .sequence_parallel = true},
                              {.dp = 2, .zero = 1, .tp = 4, .sequence_parallel = true},
                              {.pp = 2, .accumulation = 4, .schedule = Schedule::kZbH1, .tp = 2}};
  for (const Subject& subject : {subject_of(true, Optimizer::kSgd, 0.25f), subject_of(false, Optimizer::kAdamW, 0, 0.5f)}) {
    std::vector<Case> cases;
    for (const Sizes& sizes : kSizes) cases.push_back(case_of(subject, sizes, true));
    for (const size_t i : {size_t{0}, size_t{2}}) {
      cases.push_back(cases[i]);
      cases.back().layout.recompute = Recompute::kFull;
    }
    cases.push_back(cases[2]);
    cases.back().layout.recompute = Recompute::kSelective;
    cases.back().layout.recompute_options.modules = "attn.norm attn.core mlp.norm mlp.act";
    train_all(subject, cases);
  }
}

TEST_CASE("latent attention beside context parallelism, canonical: parts of sequences train to the bits of the reference") {
  using enum ContextKind;
  constexpr Sizes kSizes[] = {{.accumulation = 4, .cp = 2},
                              {.dp = 2, .accumulation = 2, .cp = 2, .kind = kAllGather},
                              {.dp = 2, .zero = 3, .accumulation = 2, .cp = 2, .kind = kUlysses},
                              {.pp = 2, .accumulation = 4, .cp = 2, .kind = kStriped},
                              {.accumulation = 4, .cp = 2, .kind = kZigzag},
                              {.accumulation = 4, .cp = 4, .kind = kUsp},
                              {.accumulation = 4, .cp = 2, .tp = 2},
                              {.accumulation = 4, .cp = 2, .kind = kUlysses, .tp = 2, .sequence_parallel = true}};
  for (Subject subject : {subject_of(true, Optimizer::kSgd), subject_of(false, Optimizer::kAdamW, 0.25f, 0.5f)}) {
    subject.sequences = 4;
    std::vector<Case> cases;
    for (const Sizes& sizes : kSizes) cases.push_back(case_of(subject, sizes, true));
    for (const size_t i : {size_t{0}, size_t{1}}) {
      cases.push_back(cases[i]);
      cases.back().layout.recompute = Recompute::kFull;
    }
    train_all(subject, cases);
  }
}

TEST_CASE("config.json files of DeepSeek-V3 and DeepSeek-V2-Lite are read, and train to the bits of the reference") {
  const Subject v3 = deepseek(kSmallV3, Optimizer::kAdamW), v2 = deepseek(kSmallV2, Optimizer::kSgd, 0.25f);
  const Experts &e3 = v3.model.experts, &e2 = v2.model.experts;
  CHECK(v3.model.latent == LatentAttention{.q_rank = 20, .kv_rank = 12, .nope = 6, .rope = 4, .v = 8});
  CHECK((e3.sigmoid && e3.normalise && e3.factor == 2.5f && e3.groups == 4 && e3.groups_chosen == 2 && e3.has_bias()));
  CHECK(v3.model.mixture_layers() == 1);
  CHECK(v2.model.latent == LatentAttention{.q_rank = 0, .kv_rank = 12, .nope = 6, .rope = 4, .v = 8});
  CHECK((!e2.sigmoid && !e2.normalise && e2.factor == 1 && e2.groups == 1 && !e2.has_bias() && e2.shared == 2));
  for (const Subject& subject : {v3, v2})
    train_all(subject, {case_of(subject, {}, true), case_of(subject, {.dp = 4, .ep = 2, .zero = 1}, true),
                        case_of(subject, {.dp = 2, .ep = 2, .pp = 2, .accumulation = 4}, true),
                        case_of(subject, {.dp = 2, .ep = 2, .zero = 1, .tp = 2, .sequence_parallel = true}, true),
                        case_of(subject, {.dp = 2, .ep = 4, .accumulation = 4, .cp = 2, .tp = 2}, true)});
}

TEST_CASE("latent attention, fast: no layout is further from fp64 than 1.5 times one rank") {
  for (const bool compressed : {true, false}) {
    const Subject subject = subject_of(compressed, Optimizer::kSgd);
    const auto expected = expect<double>(subject);
    const auto one_rank = train(case_of(subject, {}, false));
    REQUIRE(one_rank.ok());
    const double bound = 1.5 * error_of(expected, *one_rank) + 1e-6;
    for (const Sizes& sizes : {Sizes{.dp = 2, .accumulation = 2},
                               {.dp = 2, .zero = 3},
                               {.tp = 2},
                               {.accumulation = 2, .tp = 2, .sequence_parallel = true},
                               {.accumulation = 2, .cp = 2},
                               {.accumulation = 2, .cp = 2, .kind = ContextKind::kAllGather},
                               {.accumulation = 2, .cp = 2, .kind = ContextKind::kUlysses}}) {
      const Case config = case_of(subject, sizes, false);
      INFO(config.name);
      const auto trained = train(config);
      REQUIRE(trained.ok());
      CHECK(error_of(expected, *trained) <= bound);
    }
  }
}

TEST_CASE("latent attention in bf16: no layout is further from fp64 than 1.5 times one rank") {
  for (const bool compressed : {true, false}) {
    const Subject subject = subject_of(compressed, Optimizer::kAdamW);
    const auto expected = expect<double>(subject);
    const auto in_bf16 = [&](const Sizes& sizes) {
      Case c = case_of(subject, sizes, false);
      c.train.precision = Precision::kBf16;
      return c;
    };
    const auto one_rank = train(in_bf16({}));
    INFO((one_rank.ok() ? "" : to_string(one_rank.error())));
    REQUIRE(one_rank.ok());
    const double error = error_of(expected, *one_rank);
    CHECK(error < 0.2);
    for (const Sizes& sizes :
         {Sizes{.dp = 2, .zero = 1}, {.accumulation = 2, .tp = 2, .sequence_parallel = true}, {.accumulation = 2, .cp = 2}}) {
      const auto trained = train(in_bf16(sizes));
      INFO((trained.ok() ? "" : to_string(trained.error())));
      REQUIRE(trained.ok());
      CHECK(error_of(expected, *trained) <= 1.5 * error);
    }
  }
}

TEST_CASE("latent attention: wire bytes are the plan's to the byte under every layout") {
  constexpr Sizes kSizes[] = {{.dp = 2, .zero = 3, .accumulation = 2},
                              {.dp = 2, .zero = 1, .tp = 2},
                              {.dp = 2, .zero = 3, .tp = 2, .sequence_parallel = true},
                              {.accumulation = 8, .cp = 2, .tp = 2},
                              {.pp = 2, .accumulation = 8, .cp = 2, .kind = ContextKind::kUlysses}};
  for (const bool compressed : {true, false})
    for (const bool canonical : {true, false})
      for (const Sizes& sizes : kSizes) {
        const Case config = case_of(subject_of(compressed, Optimizer::kAdamW), sizes, canonical);
        Running run(config);
        INFO(config.name << (canonical ? " canonical" : ""));
        REQUIRE(std::isfinite(*run.session->step(0).loss));
        const Plan& plan = *run.placed.plan;
        for (int rank = 0; rank < plan.mesh.world_size(); ++rank) {
          const auto planned = wire_bytes(plan, plan.mesh.coordinates(rank));
          for (size_t c = 0; c < plan.comms.size(); ++c) {
            INFO("rank " << rank << " " << plan.comms[c].name);
            const auto sent = planned.find(plan.comms[c].name);  // none by the ranks of a stage that does not
            CHECK(run.session->sent_by_comm(rank)[c] == (sent == planned.end() ? 0 : sent->second));
          }
        }
      }
}

TEST_CASE("latent attention: what it lacks or cannot do is refused, and says what to set") {
  const Subject subject = subject_of(true, Optimizer::kSgd);
  const auto with = [&](const std::function<void(Case&)>& change, const Sizes& sizes = {}, bool canonical = false) {
    Case c = case_of(subject, sizes, canonical);
    change(c);
    return refused(c);
  };
  CHECK(with([](Case&) {}) == "accepted");
  CHECK(with([](Case& c) { c.model.latent.rope = 3; }) ==
        "model.qk_rope_head_dim=3 is odd: rotary embeddings turn pairs of elements | use an even model.qk_rope_head_dim");
  CHECK(with([](Case& c) { c.model.head_dim = 12; }) ==
        "model.head_dim=12 with qk_nope_head_dim 6 and qk_rope_head_dim 4: a head of q and k is both | set model.head_dim: 10, or "
        "leave it out");
  CHECK(with([](Case& c) {
          c.model.latent.v = 0;
        }).starts_with("model.v_head_dim=0: latent attention has kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim and v_head_dim"));
  CHECK(with([](Case& c) {
          c.model.kv_heads = 2;
        }).starts_with("model.kv_heads=2 of model.heads=4 with latent attention: every head has a key and a value"));
  CHECK(with([](Case& c) { c.model.qk_norm = true; }).starts_with("model.qk_norm=true with model.kv_lora_rank=12"));
  CHECK(with([](Case& c) { c.model.family = Family::kGpt; }).starts_with("model.kv_lora_rank=12 in the gpt family"));
  CHECK(with([](Case& c) { c.train.precision = Precision::kFp8; }).starts_with("model.kv_lora_rank=12 with precision=fp8"));
  CHECK(
      with([](Case& c) { c.layout.sequence_parallel = c.layout.tensor_overlap = true; }, {.tp = 2}).find("tensor_overlap: false") !=
      std::string::npos);
  CHECK(with([](Case& c) { c.model.heads = c.model.kv_heads = 6; }, {.tp = 2}, true)
            .starts_with("canonical with model.kv_lora_rank=12 and tp=2: 3 heads a rank"));
}

}  // namespace shardlab::testing::of_latent
