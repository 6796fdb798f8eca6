// Whole cases on the CUDA back end: every foundation strategy, on a device that runs its streams in any order that the events
// allow.
#include <fmt/format.h>

#include <cmath>
#include <cstring>

#include "kernels/cuda/geometry.h"
#include "plan/case.h"
#include "tests/cuda_runtime/rig.h"
#include "tests/deal.h"
#include "tests/namespaces.h"
#include "tests/strategies/cases.h"
#include "tests/test.h"

namespace shardlab::testing {

TEST_CASE("every layout on the device gives the CPU's bits, in whatever order the device runs what is not ordered") {
  for (const Family family : {Family::kGpt, Family::kLlama}) {
    if (kWatched && !thorough() && family == Family::kGpt) continue;
    for (const auto& [name, config] : training_layouts(training_subject(family))) {
      const Run cpu = train_on_cpu(config, {.steps = 3});
      REQUIRE(cpu.losses[2] != cpu.losses[0]);
      for (const uint64_t seed : {1, 2}) {
        if (kWatched && !thorough() && seed == 2) continue;
        INFO(name_of(family) << " " << name << " order " << seed);
        const Run run = train_on_fake(config, {.steps = 3, .seed = seed});
        REQUIRE(run.losses == cpu.losses);
        REQUIRE(run.norms == cpu.norms);
        for (const auto& [parameter, values] : cpu.parameters) {
          INFO(parameter);
          REQUIRE(same_bits(run.parameters.at(parameter), values));
        }
        // Memory and wire bytes are laws of the plan, whoever runs it; what its kernels need beside operands is in the plan.
        REQUIRE(run.sent_bytes == cpu.sent_bytes);
        REQUIRE(run.peaks == run.planned);
        REQUIRE(cpu.peaks == cpu.planned);
        // The host is not held up by the device within a step.
        REQUIRE(run.most_pending > 50);
      }
    }
  }
}

namespace {

/// Llama with norms of heads (Qwen3).
Case with_head_norms() {
  Case c = training_subject(Family::kLlama);
  c.model.qk_norm = true;
  return c;
}
/// Llama with latent attention, of which no width is a multiple of 16, and values are narrower than keys.
Case with_latent_attention() {
  Case c = training_subject(Family::kLlama);
  c.model.latent = {.q_rank = 20, .kv_rank = 12, .nope = 6, .rope = 4, .v = 7};
  c.model.kv_heads = c.model.heads;
  c.model.head_dim = 10;
  return c;
}

/// `layouts` of one subject on the fake device have the CPU's losses, norms, parameters, peaks and bytes.
/// Of a sample other subjects take other layouts, by `part`.
void train_as_on_cpu(const std::vector<std::pair<std::string, Case>>& layouts, uint64_t part) {
  uint64_t seed = 0;
  for (const auto& [name, config] : layouts) {
    if ((seed++ + part) % dealt(1, kWatched ? 12 : 4) != 0) continue;
    INFO(name << " order " << seed);
    const Run cpu = train_on_cpu(config, {.steps = 3}), run = train_on_fake(config, {.steps = 3, .seed = seed});
    REQUIRE(cpu.losses[2] != cpu.losses[0]);
    REQUIRE(run.losses == cpu.losses);
    REQUIRE(run.norms == cpu.norms);
    for (const auto& [parameter, values] : cpu.parameters) {
      INFO(parameter);
      REQUIRE(same_bits(run.parameters.at(parameter), values));
    }
    REQUIRE(run.sent_bytes == cpu.sent_bytes);
    REQUIRE(run.peaks == run.planned);
  }
}

/// One step on the GPU's own kernels, in fp32 within `bound` of the CPU's values; in bf16 a loss near the CPU's.
void train_emulated(Case c, double bound = 2e-5) {
#ifdef __SANITIZE_THREAD__
  WARN("skipped: the thread sanitizer cannot follow the fibers that the emulation runs kernels on");
  return;
#endif
  c.train.seq_len = 8;
  c.train.micro_batch = 2;
  c.train.global_batch_tokens = 16;
  const Run one = train_on_fake(c, {.steps = 1, .kernels = Behind::kEmulated}), cpu = train_on_cpu(c, {.steps = 1});
  REQUIRE(one.losses[0] == Approx(cpu.losses[0]).epsilon(1e-5));
  for (const auto& [name, values] : one.parameters) {
    INFO(name);
    REQUIRE(worst(values, cpu.parameters.at(name)) < bound);
  }
  c.train.precision = Precision::kBf16;
  for (const bool canonical : {true, false}) {
    c.canonical = canonical;
    const Run narrow = train_on_fake(c, {.steps = 2, .kernels = Behind::kEmulated}), there = train_on_cpu(c, {.steps = 2});
    for (size_t step = 0; step < 2; ++step) {
      INFO("bf16 canonical " << canonical << " step " << step);
      REQUIRE(narrow.losses[step] == Approx(there.losses[step]).epsilon(2e-3));
    }
  }
}

}  // namespace

TEST_CASE("norms of heads: every layout on the device has the CPU's bits, and the GPU's own kernels its values") {
  train_as_on_cpu(training_layouts(with_head_norms()), 0);
  train_emulated(with_head_norms());
}

TEST_CASE("latent attention: every layout on the device has the CPU's bits, and the GPU's own kernels its values") {
  train_as_on_cpu(training_layouts(with_latent_attention()), 1);
  train_emulated(with_latent_attention());
}

TEST_CASE("mixtures of experts: every layout without ep has the CPU's bits on the device, and the GPU's own kernels its values") {
  uint64_t part = 2;
  for (const auto& [name, subject] : mixtures()) {
    INFO(name);
    const std::vector<std::pair<std::string, Case>> layouts = training_layouts(subject);
    REQUIRE(std::ranges::all_of(layouts, [](const auto& layout) { return check(layout.second).ok(); }));
    train_as_on_cpu(layouts, part++);
    train_emulated(subject);
  }
}

TEST_CASE("a device that takes no notice of events gives other results") {
  // The check of the test above: it must see what is missing.
  Case c = training_subject(Family::kLlama);
  c.layout.dp = 2;
  c.layout.bucket_bytes = 16384;
  c.train.micro_batch = 4;
  c.train.global_batch_tokens = c.train.seq_len * 8;
  const Run whole = train_on_fake(c, {.steps = 2});
  int different = 0;
  for (uint64_t seed = 1; seed <= 4; ++seed) {
    const Run run = train_on_fake(c, {.steps = 2, .seed = seed, .forget_waits = true});
    different += run.losses != whole.losses || run.parameters != whole.parameters || !run.replicas_agree;
  }
  REQUIRE(different > 0);
}

TEST_CASE("the GPU's own kernels, emulated: two layouts give the bits of one rank, and the CPU's values") {
#ifdef __SANITIZE_THREAD__
  WARN("skipped: the thread sanitizer cannot follow the fibers that the emulation runs kernels on");
  return;
#endif
  for (const Family family : {Family::kGpt, Family::kLlama}) {
    Case single = training_subject(family);
    single.train.seq_len = 8;
    single.train.micro_batch = 2;
    single.train.global_batch_tokens = 16;
    const Run one = train_on_fake(single, {.steps = 1, .kernels = Behind::kEmulated});
    const Run cpu = train_on_cpu(single, {.steps = 1});
    REQUIRE(one.losses[0] == Approx(cpu.losses[0]).epsilon(1e-5));
    for (const auto& [name, values] : one.parameters) {
      INFO(name);
      REQUIRE(worst(values, cpu.parameters.at(name)) < 2e-5);
    }
    Case packed = single;
    packed.data.packed = true;
    const Run documents = train_on_fake(packed, {.steps = 1, .kernels = Behind::kEmulated});
    const Run documents_on_cpu = train_on_cpu(packed, {.steps = 1});
    REQUIRE(documents.losses[0] == Approx(documents_on_cpu.losses[0]).epsilon(1e-5));
    for (const auto& [name, values] : documents.parameters) {
      INFO("packed " << name);
      REQUIRE(worst(values, documents_on_cpu.parameters.at(name)) < 2e-5);
    }
    Case many = single;
    if (family == Family::kGpt) {
      many.layout.tp = 2;
    } else {
      many.layout.dp = 2;
      many.layout.zero = 1;
      many.layout.bucket_bytes = 16384;
      many.train.micro_batch = 1;
    }
    const Run several = train_on_fake(many, {.steps = 1, .seed = 2, .kernels = Behind::kEmulated});
    REQUIRE(several.losses == one.losses);
    for (const auto& [name, values] : one.parameters) {
      INFO(name);
      REQUIRE(same_bits(several.parameters.at(name), values));
    }
  }
}

TEST_CASE("the library's matmul and AdamW on the device train as the CPU does") {
  Case c = tiny_case(Family::kLlama);
  c.train.micro_batch = 4;
  c.layout.dp = 2;
  c.layout.bucket_bytes = 16384;
  c.train.learning_rate.peak = 1e-2f;
  const Run device = train_on_fake(c, {.steps = 3});
  const Run cpu = train_on_cpu(c, {.steps = 3});
  for (size_t step = 0; step < 3; ++step) REQUIRE(device.losses[step] == Approx(cpu.losses[step]).epsilon(1e-4));
}

TEST_CASE("a model that the GPU's kernels cannot take is refused by name, and the largest that they take is not") {
  const auto said = [](auto change) {
    Case c = training_subject(Family::kLlama);
    change(c);
    c.backend = BackendKind::kCuda;
    c.transport = TransportKind::kOneGpu;
    const Result<void> checked = check(c);
    return checked.ok() ? std::string() : checked.error().message;
  };
  const auto experts = [](int64_t count) {
    return [count](Case& c) { c.model.experts = {.count = static_cast<int>(count), .top_k = 2, .ffn = 16}; };
  };
  const int64_t most = gpu::geometry::kMostExperts;
  CHECK(said(experts(most)) == "");
  CHECK(said(experts(most + 1)).starts_with(fmt::format("model.experts={} with backend=cuda", most + 1)));
  CHECK(said([](Case& c) { c.model.head_dim = 256; }) == "");
  CHECK(said([](Case& c) { c.model.head_dim = 258; }) ==
        "head_dim=258 with backend=cuda: attention on a GPU takes even ones up to 256");
  CHECK(said([](Case& c) {
          c = training_subject(Family::kGpt);  // llama's heads are even, since they are rotated
          c.model.head_dim = 7;
        }).starts_with("head_dim=7 with backend=cuda"));
  const auto values = [](int v) {
    return [v](Case& c) {
      c = with_latent_attention();
      c.model.latent.v = v;
    };
  };
  CHECK(said(values(256)) == "");
  CHECK(said(values(257)).starts_with("v_head_dim=257 with backend=cuda"));
}

}  // namespace shardlab::testing
