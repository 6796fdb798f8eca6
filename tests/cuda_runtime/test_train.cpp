// Whole cases on the CUDA back end: every foundation strategy, on a device that runs its streams in any order that the events
// allow.
#include <cmath>
#include <cstring>

#include "tests/cuda_runtime/rig.h"
#include "tests/strategies/cases.h"
#include "tests/test.h"

namespace shardlab::testing {

namespace {

/// The layouts of eight sequences that `subject` can be trained with, the single rank first.
std::vector<std::pair<std::string, Case>> layouts(const Case& subject) {
  std::vector<std::pair<std::string, Case>> all;
  const auto add = [&](const std::string& name, const auto& change) {
    Case c = subject;
    change(c);
    if (c.model.tied_embeddings && c.layout.pp > 1) c.train.grad_norm = false;  // the table's norm would count twice
    const int64_t per_rank = 8 / c.layout.dp;
    c.train.micro_batch = per_rank / c.train.grad_accumulation;
    c.train.global_batch_tokens = c.train.seq_len * 8;
    all.emplace_back(name, c);
  };
  add("single", [](Case&) {});
  add("accumulate 4", [](Case& c) { c.train.grad_accumulation = 4; });
  add("recompute", [](Case& c) { c.layout.recompute = Recompute::kFull; });
  add("dp2 overlap", [](Case& c) { c.layout.dp = 2, c.layout.bucket_bytes = 16384; });
  add("dp2 zero1 overlap", [](Case& c) { c.layout.dp = 2, c.layout.zero = 1, c.layout.bucket_bytes = 16384; });
  add("dp4 zero1", [](Case& c) { c.layout.dp = 4, c.layout.zero = 1; });
  add("tp2", [](Case& c) { c.layout.tp = 2; });
  add("pp2 afab", [](Case& c) { c = with_pipeline(c, 2, Schedule::kAfab, 2); });
  add("pp2 1f1b", [](Case& c) { c = with_pipeline(c, 2, Schedule::k1F1B, 4); });
  add("dp2 tp2 pp2 zero1", [](Case& c) {
    c = with_pipeline(c, 2, Schedule::k1F1B, 2);
    c.layout.dp = c.layout.tp = 2;
    c.layout.zero = 1;
    c.layout.bucket_bytes = 32768;
  });
  return all;
}

Case subject(Family family) {
  Case c = tiny_case(family);
  c.canonical = true;
  c.train.optimizer = Optimizer::kSgd;
  c.train.learning_rate.peak = 1;
  c.train.grad_norm = true;
  if (family == Family::kGpt) {
    c.model.tied_embeddings = true;
    c.train.dropout = 0.1f;
  }
  return c;
}

double worst(const std::vector<float>& a, const std::vector<float>& b) {
  REQUIRE(a.size() == b.size());
  double most = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    REQUIRE(std::isfinite(a[i]));
    most = std::max(most, std::abs(static_cast<double>(a[i]) - b[i]));
  }
  return most;
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

}  // namespace

TEST_CASE("every layout on the device gives the CPU's bits, in whatever order the device runs what is not ordered") {
  for (const Family family : {Family::kGpt, Family::kLlama})
    for (const auto& [name, config] : layouts(subject(family))) {
      const Run cpu = train_on_cpu(config, {.steps = 3});
      REQUIRE(cpu.losses[2] != cpu.losses[0]);
      for (const uint64_t seed : {1, 2, 3}) {
        INFO(name_of(family) << " " << name << " order " << seed);
        const Run run = train_on_fake(config, {.steps = 3, .seed = seed});
        REQUIRE(run.losses == cpu.losses);
        REQUIRE(run.norms == cpu.norms);
        for (const auto& [parameter, values] : cpu.parameters) {
          INFO(parameter);
          REQUIRE(same_bits(run.parameters.at(parameter), values));
        }
        // Memory and wire bytes are laws of the plan, whoever runs it.
        REQUIRE(run.sent_bytes == cpu.sent_bytes);
        REQUIRE(run.peaks == cpu.peaks);
        // The host is not held up by the device within a step.
        REQUIRE(run.most_pending > 50);
      }
    }
}

TEST_CASE("a device that takes no notice of events gives other results") {
  // The check of the test above: it must see what is missing.
  Case c = subject(Family::kLlama);
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
  for (const Family family : {Family::kGpt, Family::kLlama}) {
    Case single = subject(family);
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
