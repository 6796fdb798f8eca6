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

TEST_CASE("in canonical mode every layout on the device gives the bits of one rank, and the CPU's values") {
  for (const Family family : {Family::kGpt, Family::kLlama}) {
    const Case base = subject(family);
    const auto all = layouts(base);
    const Run single = train_on_fake(all.front().second, {});
    const Run cpu = train_on_cpu(all.front().second, {});
    REQUIRE(single.losses[1] != single.losses[0]);
    for (size_t step = 0; step < single.losses.size(); ++step)
      REQUIRE(single.losses[step] == Approx(cpu.losses[step]).epsilon(1e-5));
    for (const auto& [name, values] : single.parameters) {
      INFO(name);
      REQUIRE(worst(values, cpu.parameters.at(name)) < 2e-5);
    }
    for (const auto& [name, config] : all) {
      for (const uint64_t seed : {1, 2, 3}) {
        INFO(name_of(family) << " " << name << " order " << seed);
        const Run run = train_on_fake(config, {.seed = seed});
        REQUIRE(run.losses == single.losses);
        for (const auto& [parameter, values] : single.parameters) {
          INFO(parameter);
          REQUIRE(same_bits(run.parameters.at(parameter), values));
        }
        if (seed > 1) continue;
        // Memory and wire bytes are laws of the plan, whoever runs it.
        const Run other = train_on_cpu(config, {.steps = 1});
        REQUIRE(run.sent_bytes == other.sent_bytes);
        REQUIRE(run.peaks == other.peaks);
        REQUIRE(run.norms[0] == Approx(other.norms[0]).epsilon(1e-5));
      }
    }
  }
}

TEST_CASE("the library's matmul, AdamW and a fused loss on the device") {
  Case c = tiny_case(Family::kLlama);
  c.train.micro_batch = 4;
  c.layout.dp = 2;
  c.layout.bucket_bytes = 16384;
  c.train.learning_rate.peak = 1e-2f;
  const Run device = train_on_fake(c, {.steps = 3});
  const Run cpu = train_on_cpu(c, {.steps = 3});
  for (size_t step = 0; step < 3; ++step) REQUIRE(device.losses[step] == Approx(cpu.losses[step]).epsilon(1e-4));
  REQUIRE(device.losses[2] < device.losses[0]);
  // The host is never held up by the device within a step.
  REQUIRE(device.most_pending > 50);
}

}  // namespace shardlab::testing
