// Adapters and frozen weights: what is counted, what has gradients and state, what is kept, and what a step saves.
#include "simulator/estimator/analytic/inside.h"
#include "tests/analytic/studies.h"
#include "tests/test.h"

namespace shardlab::simulator::analytic {
namespace {

using testing::llama_8b;
using testing::mixtral_8x7b;
using testing::study;

constexpr uint8_t kAttention = Trained::kQ | Trained::kK | Trained::kV | Trained::kO;
constexpr uint8_t kMlp = Trained::kGate | Trained::kUp | Trained::kDown;

ModelShape llama_2_7b() {
  return {.layers = 32,
          .hidden = 4096,
          .heads = 32,
          .kv_heads = 32,
          .head_dim = 128,
          .ffn = 11008,
          .vocab = 32000,
          .swiglu = true,
          .rms_norm = true};
}

ModelShape adapted(ModelShape shape, int64_t rank, uint8_t projections, int32_t bits = 16) {
  shape.trained = {.frozen = Trained::kAll, .adapted = projections, .rank = rank, .frozen_bits = bits};
  return shape;
}

ModelShape frozen(ModelShape shape, uint8_t modules) {
  shape.trained.frozen = modules;
  return shape;
}

TEST_CASE("adapters have as many elements as PEFT prints") {
  // `print_trainable_parameters` of Hugging Face PEFT, as its users report: 4,194,304 for Llama-2-7B with r = 8 beside q and v,
  // 19,988,480 beside all projections, 41,943,040 for Llama-3-8B with r = 16 beside all projections.
  CHECK(adapter_count(adapted(llama_2_7b(), 8, Trained::kQ | Trained::kV)) == 4'194'304);
  CHECK(adapter_count(adapted(llama_2_7b(), 8, kAttention | kMlp)) == 19'988'480);
  CHECK(adapter_count(adapted(llama_8b(), 16, kAttention | kMlp)) == 41'943'040);
  CHECK(trained_count(adapted(llama_8b(), 16, kAttention | kMlp)) == 41'943'040);
  CHECK(adapter_count(llama_8b()) == 0);
  CHECK(trained_count(llama_8b()) == parameter_count(llama_8b()));
}

TEST_CASE("a rank's adapters add up to the model's") {
  for (const ModelShape& shape : {adapted(llama_8b(), 16, kAttention | kMlp), adapted(mixtral_8x7b(), 8, kAttention | kMlp),
                                  adapted(mixtral_8x7b(), 8, kMlp)}) {
    const Prepared prepared = study(shape, "megatron", 1);
    const LayerKey key = layer_key(Point{.micro_batch = 1, .seq_len = 4096}, prepared.profile());
    const Block block = block_cost(prepared.inside().layers(), key);
    const auto of_layer = [](const LayerCost& c) { return c.adapters + c.expert_adapters; };
    CHECK((shape.layers - shape.moe_layers()) * of_layer(block.dense) + shape.moe_layers() * of_layer(block.moe) ==
          adapter_count(shape));
  }
}

TEST_CASE("of frozen weights only the bytes of the weights stay") {
  const double psi = 8'030'261'248.0, r = 41'943'040.0;
  const Point one{.micro_batch = 1, .grad_accumulation = 2, .seq_len = 4096};
  Estimator plain(study(adapted(llama_8b(), 16, kAttention | kMlp), "megatron", 8));
  const MemoryBytes m = plain.stage_memory(one, 0);
  CHECK(m[MemoryPart::kParameters] == Approx(2 * psi + 2 * r).epsilon(1e-9));
  CHECK(m[MemoryPart::kGradients] == Approx(4 * r).epsilon(1e-9));
  CHECK(m[MemoryPart::kMaster] == Approx(4 * r).epsilon(1e-9));
  CHECK(m[MemoryPart::kMoments] == Approx(8 * r).epsilon(1e-9));
  // Only ZeRO-3 cuts what is frozen.
  for (const int zero : {1, 2, 3}) {
    const Point point{.dp = 64, .zero = zero, .micro_batch = 1, .grad_accumulation = 2, .seq_len = 4096};
    const MemoryBytes cut = plain.stage_memory(point, 0);
    CHECK(cut[MemoryPart::kParameters] == Approx(zero == 3 ? (2 * psi + 2 * r) / 64 : 2 * psi + 2 * r).epsilon(1e-9));
    CHECK(cut[MemoryPart::kMoments] == Approx(8 * r / 64).epsilon(1e-9));
  }
  // QLoRA: 4.127 bits a weight of the layers; tables and the final norm stay in 16 bits.
  Estimator four(study(adapted(llama_8b(), 16, kAttention | kMlp, 4), "megatron", 8));
  const double ends = 2 * 128256.0 * 4096 + 4096;
  CHECK(four.stage_memory(one, 0)[MemoryPart::kParameters] == Approx((psi - ends) * 4.127 / 8 + 2 * ends + 2 * r).epsilon(1e-9));
}

TEST_CASE("inputs that only a frozen weight's gradient would read are not kept") {
  const Point point{.micro_batch = 1, .seq_len = 4096};
  const auto kept = [&](const ModelShape& shape, std::string_view name) {
    int64_t bytes = 0;
    for (const ActivationItem& item : activations_by_kind(study(shape, "megatron", 1), point))
      if (item.name == name) bytes += item.kept;
    return bytes;
  };
  const ModelShape all = llama_8b();
  const int64_t norm = kept(all, "norm output"), inner = kept(all, "activated");
  CHECK(norm == 2 * 2 * 4096 * 4096);
  CHECK(kept(adapted(all, 16, kAttention | kMlp), "norm output") == norm);
  CHECK(kept(adapted(all, 16, kAttention), "norm output") == norm / 2);
  CHECK(kept(adapted(all, 16, kAttention), "activated") == 0);
  CHECK(kept(adapted(all, 16, Trained::kDown), "activated") == inner);
  CHECK(kept(adapted(all, 16, Trained::kDown), "norm output") == 0);
  CHECK(kept(adapted(all, 16, Trained::kO), "attention") == kept(all, "attention"));  // fused attention reads it itself
  CHECK(kept(adapted(all, 16, kAttention), "adapters") == 4 * 16 * 2 * 4096);
  CHECK(kept(frozen(all, Trained::kFeedForward), "activated") == 0);
}

TEST_CASE("a frozen weight saves a third of its products, and adapters add theirs") {
  const int64_t tokens = 4096;
  const ModelShape all = llama_8b(), lora = adapted(all, 16, kAttention | kMlp);
  const double table = 128256.0 * 4096, weights = 8'030'261'248.0 - table;
  CHECK(model_flops_per_token(lora, tokens) ==
        Approx(model_flops_per_token(all, tokens) - 2 * weights + 6 * 41'943'040.0).epsilon(1e-12));
  const Point point{.micro_batch = 1, .grad_accumulation = 8, .seq_len = 4096};
  const auto estimate_of = [&](const ModelShape& shape) {
    const Estimate e = Estimator(study(shape, "megatron", 1))(point);
    REQUIRE(e.legal());
    return e;
  };
  const Estimate whole = estimate_of(all), adapters = estimate_of(lora), few = estimate_of(adapted(all, 16, Trained::kQ));
  const double ratio = adapters.step_s / whole.step_s;
  CHECK(ratio > 0.55);
  CHECK(ratio < 0.85);
  CHECK(few.step_s < adapters.step_s);
  CHECK(adapters.memory.live() < whole.memory.live() / 3);
  CHECK(estimate_of(frozen(all, Trained::kEmbedding | Trained::kHead)).step_s < whole.step_s);
}

TEST_CASE("frozen experts that no two ranks share are not gathered") {
  // Under ZeRO-3 ranks gather what they share; of 8 ranks with ep 8 each has an expert of its own.
  Estimator estimator(study(adapted(mixtral_8x7b(), 8, kAttention), "shardlab", 1));
  const auto gathering = [&](int ep) {
    const Estimate e = estimator({.dp = 8, .ep = ep, .zero = 3, .micro_batch = 1, .seq_len = 4096, .overlap = 0});
    REQUIRE(e.legal());
    return e.part(TimePart::kDataParallel);
  };
  CHECK(gathering(8) < gathering(1) / 16);  // a thirtieth of the weights is not of experts
}

TEST_CASE("bounds stay below estimates, and allocations add up, where weights are frozen") {
  for (const auto& [shape, profile] : {std::pair{adapted(llama_8b(), 16, kAttention | kMlp, 4), "megatron"},
                                       {adapted(llama_8b(), 64, kAttention), "torchtitan"},
                                       {adapted(mixtral_8x7b(), 8, kMlp), "megatron"},
                                       {frozen(llama_8b(), Trained::kEmbedding | Trained::kAttention), "nanotron"}}) {
    const Prepared prepared = study(shape, profile, 8);
    Estimator estimator(prepared);
    int legal = 0;
    for (const int tp : {1, 4})
      for (const int pp : {1, 4})
        for (const int zero : {0, 1, 3}) {
          const Point point{.dp = 2,
                            .tp = tp,
                            .pp = pp,
                            .zero = zero,
                            .schedule = pp > 1 ? Schedule::k1F1B : Schedule::kNone,
                            .micro_batch = 1,
                            .grad_accumulation = 8,
                            .seq_len = 4096};
          const Estimate e = estimator(point);
          if (!e.legal()) continue;
          ++legal;
          CAPTURE(profile, tp, pp, zero);
          CHECK(estimator.least_step_s(point) <= e.step_s);
          CHECK(estimator.least_device_bytes(point) <= static_cast<double>(e.memory.device()));
          for (int32_t stage = 0; stage < pp; ++stage) {
            int64_t live = 0, most = 0;
            for (const AllocationEvent& event : allocation_events(prepared, point, stage))
              live += event.bytes, most = std::max(most, live);
            if (most == 0) continue;  // an arena
            CHECK(static_cast<double>(most) ==
                  Approx(static_cast<double>(estimator.stage_memory(point, stage).live())).epsilon(0.03));
          }
        }
    CHECK(legal >= 6);
  }
}

}  // namespace
}  // namespace shardlab::simulator::analytic
