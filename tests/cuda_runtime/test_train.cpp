// Whole cases on the CUDA back end: every foundation strategy, on a device that runs its streams in any order that the events
// allow.
#include <cmath>
#include <cstring>

#include "tests/cuda_runtime/rig.h"
#include "tests/namespaces.h"
#include "tests/strategies/cases.h"
#include "tests/test.h"

namespace shardlab::testing {

TEST_CASE("every layout on the device gives the CPU's bits, in whatever order the device runs what is not ordered") {
  for (const Family family : {Family::kGpt, Family::kLlama})
    for (const auto& [name, config] : training_layouts(training_subject(family))) {
      const Run cpu = train_on_cpu(config, {.steps = 3});
      REQUIRE(cpu.losses[2] != cpu.losses[0]);
      for (const uint64_t seed : {1, 2}) {
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

}  // namespace shardlab::testing
