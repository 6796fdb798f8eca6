// Attention within a window, in all layers and in some of them, against the separately written single-rank reference. Memory measured is
// memory planned in every training here (tests/numerics/running.cpp).
#include <fmt/format.h>

#include <cmath>
#include <functional>
#include <map>
#include <string>
#include <variant>
#include <vector>

#include "plan/verify.h"
#include "plan/wire.h"
#include "plan/work.h"
#include "strategies/lower.h"
#include "sweeps/models.h"
#include "tests/namespaces.h"
#include "tests/numerics/against_reference.h"
#include "tests/numerics/matrix.h"
#include "tests/numerics/running.h"
#include "tests/numerics/sized_cases.h"
#include "tests/numerics/train_case.h"
#include "tests/test.h"

namespace shardlab::testing::of_windows {
namespace {

/// Windows that end within leaves and within parts of sequences; three patterns, and a rotary base of their own.
constexpr SlidingWindow kAll{.tokens = 7};
constexpr SlidingWindow kPattern{.tokens = 5, .global_every = 3, .rope_theta = 100};
constexpr SlidingWindow kLate{.tokens = 9, .global_layers = 1};

Subject subject_of(Family family, const SlidingWindow& window, Optimizer optimizer, float dropout = 0, float clip_norm = 0) {
  Model m;
  m.name = "windows";
  m.family = family;
  m.layers = 4;
  m.hidden = 32;
  m.heads = 4;
  m.kv_heads = family == Family::kLlama ? 2 : 4;
  m.head_dim = 6;
  m.ffn = 40;
  m.vocab = 64;
  m.max_positions = 48;
  m.init_deviation = 0.15f;
  m.window = window;
  Train t;
  t.seq_len = 32;
  t.dropout = dropout;
  t.clip_norm = clip_norm;
  t.seed = 13;
  t.optimizer = optimizer;
  t.learning_rate.peak = optimizer == Optimizer::kSgd ? 1.0f : 0.01f;
  t.weight_decay = 0.1f;
  return {fmt::format("window {} of {} layers", window.tokens, m.local_layers()), m, t, 8};
}

std::vector<Subject> all_subjects() {
  return {subject_of(Family::kLlama, kPattern, Optimizer::kSgd), subject_of(Family::kGpt, kAll, Optimizer::kAdamW, 0.25f, 0.5f),
          subject_of(Family::kLlama, kLate, Optimizer::kAdamW, 0, 0.5f)};
}

/// Every training has its bits, and a window tells: without it the losses are others.
void check_that_windows_tell(const Subject& subject) {
  Subject whole = subject;
  whole.model.window = {};
  const auto trained = train(case_of(subject, {}, true));
  REQUIRE(trained.ok());
  CHECK_FALSE(differences(case_of(subject, {}, true), expect<float>(whole), *trained).empty());
}

std::string refused(const Case& c) {
  const auto legal = check(c);
  return legal.ok() ? std::string("accepted") : legal.error().message + " | " + legal.error().hint;
}

/// Flops of the attention cores of a plan's segments on one rank, forward, by the name of the segment.
std::map<std::string, int64_t> attention_flops(const Plan& plan) {
  std::map<std::string, int64_t> flops;
  for (const Segment& segment : plan.segments)
    for (const Step& step : segment.steps)
      if (const Op* op = std::get_if<Op>(&step); op != nullptr && std::holds_alternative<Attention>(op->work))
        flops[segment.name] += work_of(segment, *op, plan.mesh).flops.value;
  return flops;
}

}  // namespace

TEST_CASE("windows, canonical: one rank, data parallel, ZeRO, stages and micro-batches train to the bits of the reference") {
  constexpr Sizes kSizes[] = {{},
                              {.accumulation = 2},
                              {.dp = 2, .accumulation = 2},
                              {.dp = 4, .zero = 1},
                              {.dp = 2, .zero = 2, .accumulation = 2},
                              {.dp = 2, .zero = 3, .accumulation = 2},
                              {.dp = 2, .pp = 2, .accumulation = 4},
                              {.pp = 4, .accumulation = 4, .schedule = Schedule::kZbH1}};
  for (const Subject& subject : all_subjects()) {
    std::vector<Case> cases;
    for (const Sizes& sizes : kSizes) cases.push_back(case_of(subject, sizes, true));
    train_all(subject, cases);
    check_that_windows_tell(subject);
  }
}

TEST_CASE("windows, canonical: what is made again or waits elsewhere leaves the bits") {
  const Subject subject = subject_of(Family::kLlama, kPattern, Optimizer::kAdamW);
  std::vector<Case> cases;
  for (const Recompute recompute : {Recompute::kFull, Recompute::kSelective}) {
    cases.push_back(case_of(subject, {.dp = 2, .accumulation = 2}, true));
    cases.back().layout.recompute = recompute;
  }
  cases[1].layout.recompute_options.modules = "attn.norm attn.core mlp.act";
  cases.push_back(cases[0]);
  cases.back().layout.offload.activations = cases.back().layout.offload.optimizer = OffloadTo::kCpu;
  cases.push_back(cases[0]);
  cases.back().layout.recompute_options.every = 2;
  cases.push_back(case_of(subject, {.dp = 2, .zero = 3}, true));
  cases.back().layout.recompute = Recompute::kByLayer;
  cases.back().layout.recompute_options.layers = "1*full@cpu 1*attn.core 2*none";
  train_all(subject, cases);
}

TEST_CASE("windows beside tensor and sequence parallelism, canonical: slices of heads train to the bits of the reference") {
  constexpr Sizes kSizes[] = {{.tp = 2},
                              {.accumulation = 2, .tp = 4},
                              {.accumulation = 2, .tp = 2, .sequence_parallel = true},
                              {.dp = 2, .zero = 3, .accumulation = 2, .tp = 2, .sequence_parallel = true},
                              {.pp = 2, .accumulation = 4, .schedule = Schedule::kZbH1, .tp = 2}};
  for (const Subject& subject : all_subjects()) {
    std::vector<Case> cases;
    for (const Sizes& sizes : kSizes) cases.push_back(case_of(subject, sizes, true));
    cases.push_back(cases[2]);
    cases.back().layout.tensor_overlap = true;
    train_all(subject, cases);
  }
}

TEST_CASE("windows beside context parallelism, canonical: parts of sequences of every kind train to the bits of the reference") {
  using enum ContextKind;
  constexpr Sizes kSizes[] = {{.accumulation = 4, .cp = 2},
                              {.accumulation = 4, .cp = 8},  // parts of four tokens: some blocks are behind every window
                              {.dp = 2, .accumulation = 2, .cp = 2, .kind = kAllGather},
                              {.dp = 2, .zero = 3, .accumulation = 2, .cp = 2, .kind = kUlysses},
                              {.pp = 2, .accumulation = 4, .cp = 4, .kind = kStriped},
                              {.accumulation = 4, .cp = 4, .kind = kZigzag},
                              {.accumulation = 4, .cp = 4, .kind = kUsp},
                              {.accumulation = 4, .cp = 2, .tp = 2, .sequence_parallel = true}};
  for (Subject subject : all_subjects()) {
    subject.sequences = 4;
    std::vector<Case> cases;
    for (const Sizes& sizes : kSizes) cases.push_back(case_of(subject, sizes, true));
    for (const size_t i : {size_t{0}, size_t{2}}) {
      cases.push_back(cases[i]);
      cases.back().layout.recompute = Recompute::kFull;
    }
    train_all(subject, cases);
  }
}

TEST_CASE("windows, canonical: packed documents, latent attention and mixtures of experts train to the bits of the reference") {
  using enum ContextKind;
  Subject packed = subject_of(Family::kLlama, kPattern, Optimizer::kSgd);
  packed.name += " packed", packed.sequences = 4;
  for (const Sizes& sizes : {Sizes{.dp = 2, .accumulation = 2, .tp = 2},
                             {.accumulation = 4, .cp = 4, .kind = kZigzag},
                             {.dp = 2, .accumulation = 2, .cp = 2, .kind = kAllGather},
                             {.accumulation = 4, .cp = 2, .kind = kUlysses}}) {
    Case c = case_of(packed, sizes, true);
    c.data.packed = true;
    INFO(c.name);
    const auto plan = lower(c);
    REQUIRE(plan.ok());
    const auto trained = train(c);
    REQUIRE(trained.ok());
    CHECK(differences(c, expect<float>(packed, plan->token_order, true), *trained) == "");
  }
  Subject latent = subject_of(Family::kLlama, kPattern, Optimizer::kAdamW);
  latent.name += " latent";
  latent.model.kv_heads = 4;
  latent.model.latent = {.q_rank = 20, .kv_rank = 12, .nope = 6, .rope = 4, .v = 7};
  latent.model.head_dim = 10;
  train_all(latent,
            {case_of(latent, {.dp = 2}, true), case_of(latent, {.accumulation = 2, .tp = 2, .sequence_parallel = true}, true),
             case_of(latent, {.accumulation = 8, .cp = 2}, true)});
  // Layers of all four kinds: with experts and without, with a window and without.
  Subject mixed = subject_of(Family::kLlama, {.tokens = 5, .global_every = 2}, Optimizer::kSgd);
  mixed.name += " experts";
  mixed.model.experts = {.count = 4,
                         .top_k = 2,
                         .ffn = 12,
                         .sigmoid = true,
                         .balance = 0.1f,
                         .shared = 1,
                         .dense_layers = 2,
                         .bias_update_rate = 0.01f};
  train_all(mixed, {case_of(mixed, {}, true), case_of(mixed, {.dp = 4, .ep = 2, .zero = 1}, true),
                    case_of(mixed, {.dp = 2, .ep = 2, .pp = 2, .accumulation = 4}, true),
                    case_of(mixed, {.dp = 2, .ep = 4, .accumulation = 4, .cp = 2, .tp = 2}, true)});
}

TEST_CASE("windows, fast and in bf16: no layout is further from fp64 than 1.5 times one rank") {
  const Subject subject = subject_of(Family::kLlama, kPattern, Optimizer::kSgd);
  const auto expected = expect<double>(subject);
  for (const Precision precision : {Precision::kFp32, Precision::kBf16}) {
    const auto narrow = [&](const Sizes& sizes) {
      Case c = case_of(subject, sizes, false);
      c.train.precision = precision;
      return c;
    };
    const auto one_rank = train(narrow({}));
    REQUIRE(one_rank.ok());
    const double error = error_of(expected, *one_rank);
    CHECK(error < (precision == Precision::kFp32 ? 1e-4 : 0.3));
    for (const Sizes& sizes : {Sizes{.dp = 2, .zero = 3},
                               {.accumulation = 2, .tp = 2, .sequence_parallel = true},
                               {.accumulation = 2, .cp = 4},
                               {.accumulation = 2, .cp = 4, .kind = ContextKind::kZigzag},
                               {.accumulation = 2, .cp = 2, .kind = ContextKind::kAllGather},
                               {.accumulation = 2, .cp = 2, .kind = ContextKind::kUlysses}}) {
      const Case config = narrow(sizes);
      INFO(config.name);
      const auto trained = train(config);
      REQUIRE(trained.ok());
      CHECK(error_of(expected, *trained) <= 1.5 * error + 1e-6);
    }
  }
}

TEST_CASE("windows change no byte: memory and wire are those of the plan without, and those measured") {
  constexpr Sizes kSizes[] = {{.dp = 2, .zero = 3, .accumulation = 2},
                              {.accumulation = 8, .cp = 4},
                              {.pp = 2, .accumulation = 8, .cp = 2, .kind = ContextKind::kUlysses}};
  for (const bool canonical : {true, false})
    for (const Sizes& sizes : kSizes) {
      const Case config = case_of(subject_of(Family::kLlama, kAll, Optimizer::kAdamW), sizes, canonical);
      Running run(config);
      INFO(config.name);
      REQUIRE(std::isfinite(*run.session->step(0).loss));
      run.require_counts();
      Case whole = config;
      whole.model.window = {};
      const auto plan = lower(whole);
      REQUIRE(plan.ok());
      const Plan& windowed = *run.placed.plan;
      for (int rank = 0; rank < windowed.mesh.world_size(); ++rank)
        CHECK(wire_bytes(windowed, windowed.mesh.coordinates(rank)) == wire_bytes(*plan, plan->mesh.coordinates(rank)));
    }
}

TEST_CASE("windows: attention does the work of the band, in the layers that have one") {
  Case c = case_of(subject_of(Family::kLlama, kPattern, Optimizer::kSgd), {}, false);
  const auto plan = lower(c);
  REQUIRE(plan.ok());
  const auto flops = attention_flops(*plan);
  // b sequences, a heads of d elements: 4 d + 5 a pair forward, 10 d + 6 backward and 2 an output.
  const int64_t rows = 8 * 4, band = 5 * 32 - 5 * 4 / 2, triangle = 32 * 33 / 2, outputs = 2 * 8 * 32 * 24;
  CHECK(flops.at("local.F") == rows * band * (4 * 6 + 5));
  CHECK(flops.at("layer.F") == rows * triangle * (4 * 6 + 5));
  CHECK(flops.at("local.B") == rows * band * (10 * 6 + 6) + outputs);
  CHECK(flops.at("layer.B") == rows * triangle * (10 * 6 + 6) + outputs);
  // MFU: 6 flops a multiply-add pair of elements of q, k and of v, by the keys that a token sees on average.
  const Model m = c.model;
  Model whole = m;
  whole.window = {};
  CHECK(m.local_layers() == 3);
  CHECK(mean_keys(32, 0) == 16);
  CHECK(mean_keys(32, 5) == 5 - 25.0 / 64);
  CHECK(mean_keys(32, 32) == 16);
  CHECK(model_flops_per_token(whole, 32) - model_flops_per_token(m, 32) == 6.0 * 4 * 12 * 3 * (16 - (5 - 25.0 / 64)));
}

namespace {

/// Config.json files with the keys of published ones, and small sizes.
constexpr const char* kMistral =
    R"({"architectures": ["MistralForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 32,
        "initializer_range": 0.15, "intermediate_size": 40, "max_position_embeddings": 128, "model_type": "mistral",
        "num_attention_heads": 4, "num_hidden_layers": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-05, "rope_theta": 10000.0,
        "sliding_window": 8, "tie_word_embeddings": false, "torch_dtype": "bfloat16", "use_cache": true, "vocab_size": 64})";
constexpr const char* kQwen2 =
    R"({"architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "hidden_act": "silu", "hidden_size": 32,
        "initializer_range": 0.15, "intermediate_size": 40, "max_position_embeddings": 128, "max_window_layers": 1,
        "model_type": "qwen2", "num_attention_heads": 4, "num_hidden_layers": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0, "sliding_window": 8, "tie_word_embeddings": false, "use_sliding_window": true, "vocab_size": 64})";

}  // namespace

TEST_CASE("windows of config.json files of Mistral and Qwen2 are read, and train to the bits of the reference") {
  const auto mistral = sweeps::parse_model(kMistral, "mistral"), qwen2 = sweeps::parse_model(kQwen2, "qwen2");
  REQUIRE((mistral.ok() && qwen2.ok()));
  CHECK(mistral->window == SlidingWindow{.tokens = 8});
  CHECK(qwen2->window == SlidingWindow{.tokens = 8, .global_layers = 1});
  CHECK((mistral->max_positions == 128 && qwen2->max_positions == 128));
  for (const Model& model : {*mistral, *qwen2}) {
    Subject subject = subject_of(Family::kLlama, kAll, Optimizer::kSgd);
    subject.model = model;
    subject.name = model.name;
    train_all(subject, {case_of(subject, {}, true), case_of(subject, {.dp = 2, .zero = 1, .tp = 2}, true),
                        case_of(subject, {.pp = 2, .accumulation = 8, .cp = 2}, true)});
  }
}

TEST_CASE("windows: what no layer has or no model means is refused, and says what to set") {
  const auto with = [](const std::function<void(Model&)>& change) {
    Case c = case_of(subject_of(Family::kLlama, kPattern, Optimizer::kSgd), {}, false);
    change(c.model);
    return refused(c);
  };
  CHECK(with([](Model&) {}) == "accepted");
  CHECK(with([](Model& m) { m.window.tokens = 0; }) ==
        "model.window=0: a query sees from 1 to 2^31 - 1 keys in a local layer | set model.window, or leave model.global_layers, "
        "model.global_every and model.local_rope_theta out");
  CHECK(with([](Model& m) { m.window = {.tokens = 4, .global_layers = 4}; }) ==
        "model.global_layers=4 model.global_every=0 of model.layers=4: no layer has the window of 4 tokens | leave a layer for it, "
        "or "
        "set model.window: 0");
  CHECK(with([](Model& m) {
          m.window.global_every = 1;
        }).starts_with("model.global_layers=0 model.global_every=1 of model.layers=4"));
  CHECK(with([](Model& m) { m.window.rope_theta = -1; }).starts_with("model.local_rope_theta=-1 is negative"));
  CHECK(
      with([](Model& m) { m.family = Family::kGpt, m.kv_heads = 4; }).starts_with("model.local_rope_theta=100 in the gpt family"));
  Case budget = case_of(subject_of(Family::kLlama, kPattern, Optimizer::kSgd), {}, false);
  budget.layout.recompute_options.budget_bytes = 1 << 20;
  CHECK(refused(budget).find("3 of 4 layers with a window: layers are taken to be alike") != std::string::npos);
}

}  // namespace shardlab::testing::of_windows
