// Tier E3: workers that train apart have the bits of their emulation in one process; an inner step is what one rank alone would do;
// and a period of one step that averages is plain data parallelism but for rounding.
#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <string>
#include <vector>

#include "kernels/kernels.h"
#include "plan/memory.h"
#include "plan/wire.h"
#include "runtime/backend.h"
#include "runtime/session.h"
#include "runtime/thread_transport.h"
#include "strategies/lower.h"
#include "tests/namespaces.h"
#include "tests/numerics/matrix.h"
#include "tests/numerics/reference/order.h"
#include "tests/numerics/reference/trainer.h"
#include "tests/numerics/running.h"
#include "tests/test.h"

namespace shardlab::testing::of_diloco {
namespace {

using testing::Running;
using testing::same_bits;
using testing::tokens_of;

constexpr int kPeriods = 3;

/// A subject of the matrix with sequences of 16 tokens, so that the mean over a worker's targets and that over all differ by a
/// power of two.
Case base_case(const std::string& subject, int dp, int accumulation) {
  for (const testing::Subject& s : testing::subjects()) {
    if (s.name != subject) continue;
    Case c;
    c.layout.dp = dp;
    c.layout.overlap = accumulation == 1;
    c.canonical = true;
    c.train.grad_accumulation = accumulation;
    c = testing::rows_of(s, std::span(&c, 1)).at(0);
    c.train.seq_len = 16;
    c.train.grad_norm = false;
    if (c.train.learning_rate.total_steps > 0) c.train.learning_rate.total_steps = 12;
    c.train.global_batch_tokens = c.sequences_per_step() * 16;
    return c;
  }
  FAIL("no subject " << subject);
  return {};
}

/// Workers in a loop: trainers of their own, and the outer step over them.
class Workers {
 public:
  explicit Workers(const Case& config) : config_(config) {
    const int64_t share = config.sequences_per_step() / config.layout.dp;
    for (int worker = 0; worker < config.layout.dp; ++worker) workers_.emplace_back(config.model, config.train, share);
    for (const auto& value : workers_.front().values()) velocity_.emplace_back(value.size());
  }

  /// One inner step of every worker; the mean of their losses before it.
  float step(std::span<const int32_t> tokens) {
    const size_t rows = tokens.size() / workers_.size();
    std::vector<float> losses;
    for (size_t w = 0; w < workers_.size(); ++w) losses.push_back(workers_[w].step(tokens.subspan(w * rows, rows)));
    return over_workers([&](size_t w) { return losses[w]; }) / static_cast<float>(workers_.size());
  }

  /// Everybody goes on from where the outer optimizer stands.
  void outer(const reference::Tensors<float>& start) {
    const Diloco& d = config_.layout.diloco;
    const float share = 1.0f / static_cast<float>(workers_.size());
    for (size_t p = 0; p < start.size(); ++p)
      for (size_t i = 0; i < start[p].size(); ++i) {
        const float g = share * over_workers([&](size_t w) { return start[p][i] - workers_[w].values()[p][i]; });
        float move = g;
        if (d.momentum != 0) {
          velocity_[p][i] = d.momentum * velocity_[p][i] + g;
          move = g + d.momentum * velocity_[p][i];
        }
        const float value = start[p][i] - d.learning_rate * move;
        for (auto& worker : workers_) worker.values()[p][i] = value;
      }
  }

  const reference::Trainer<float>& worker(size_t w) const { return workers_[w]; }

 private:
  template <class Read>
  float over_workers(const Read& read) const {
    return reference::tree<float>(static_cast<int64_t>(workers_.size()), [&](int64_t w) { return read(static_cast<size_t>(w)); });
  }

  Case config_;
  std::vector<reference::Trainer<float>> workers_;
  reference::Tensors<float> velocity_;
};

/// Local SGD and DiLoCo, inner SGD and AdamW under the subjects' schedules of the learning rate.
std::vector<Case> rows() {
  std::vector<Case> all;
  for (const Diloco& diloco : {Diloco{.steps = 3}, Diloco{.steps = 2, .learning_rate = 0.7f, .momentum = 0.9f}, Diloco{.steps = 1}})
    for (const char* subject : {"llama sgd", "llama adamw", "gpt tied clipped, 16 sequences sgd", "gpt tied adamw"}) {
      const bool two = std::string_view(subject).ends_with("sgd");
      Case c = base_case(subject, two ? 2 : 4, two ? 2 : 1);
      if (two) c.train.learning_rate.peak = 0.25f;
      c.layout.diloco = diloco;
      c.name = fmt::format("diloco {} lr {} momentum {} {}", diloco.steps, diloco.learning_rate, diloco.momentum, c.name);
      const auto checked = check(c);
      INFO(c.name << (checked.ok() ? "" : to_string(checked.error())));
      REQUIRE(checked.ok());
      all.push_back(std::move(c));
    }
  return all;
}

TEST_CASE("workers that train apart have the bits of their emulation, inner losses included") {
  for (const Case& config : rows()) {
    INFO(config.name);
    const int inner = config.layout.diloco.steps;
    Running run(config);
    Workers workers(config);
    float first = 0, last = 0;
    for (int period = 0; period < kPeriods; ++period) {
      const StepResult result = run.session->step(int64_t{period} * inner);
      REQUIRE(result.losses.size() == static_cast<size_t>(inner));
      const reference::Tensors<float> start = workers.worker(0).values();
      for (int i = 0; i < inner; ++i) {
        const float expected = workers.step(tokens_of(config, int64_t{period} * inner + i));
        INFO("period " << period << ", inner step " << i);
        REQUIRE(std::isfinite(expected));
        REQUIRE(static_cast<float>(*result.losses[static_cast<size_t>(i)]) == expected);
        (period == 0 && i == 0 ? first : last) = expected;
      }
      if (inner > 1) REQUIRE_FALSE(workers.worker(0).values() == workers.worker(1).values());  // they were apart
      workers.outer(start);
      for (const ModelParameter& p : parameters_of(config.model)) {
        INFO(p.name << " after period " << period);
        const auto value = run.session->parameter(p.name);  // refused where two workers differ in a bit
        REQUIRE(value.ok());
        REQUIRE(same_bits(value->values, workers.worker(0).value(p.name)));
      }
    }
    REQUIRE(first != last);
    run.require_counts();
  }
}

// Not the same bits: the worker's update rounds start - lr g before it is taken from start again, while plain data parallelism sums
// g.
TEST_CASE("a period of one step that averages is plain data parallelism under SGD, but for the rounding of parameters") {
  Case plain = base_case("llama sgd", 4, 1);
  plain.train.learning_rate = {.peak = 0.25f};
  Case averaged = plain;
  averaged.layout.diloco = {.steps = 1};
  Running sums(plain), means(averaged);
  Workers workers(averaged);
  const reference::Tensors<float> start = workers.worker(0).values();
  CHECK(*sums.session->step(0).loss == *means.session->step(0).loss);  // the same sequences, the same parameters
  workers.step(tokens_of(averaged, 0));
  constexpr double kHalfUlp = 1.0 / (1 << 24);
  double largest = 0;
  for (size_t p = 0; p < start.size(); ++p) {
    const std::string& name = workers.worker(0).parameters()[p].name;
    const auto a = sums.session->parameter(name), b = means.session->parameter(name);
    REQUIRE((a.ok() && b.ok()));
    for (size_t i = 0; i < start[p].size(); ++i) {
      // Each worker's update, its difference from the start and the mean of those round once; so do the two last updates.
      double size = std::abs(double{start[p][i]});
      for (size_t w = 0; w < 4; ++w) size = std::max(size, std::abs(double{workers.worker(w).values()[p][i]}));
      const double off = std::abs(double{a->values[i]} - double{b->values[i]});
      INFO(name << " element " << i);
      REQUIRE(off <= 6 * kHalfUlp * 2 * size);
      largest = std::max(largest, off / size);
    }
  }
  CHECK(largest < 1e-6);
}

TEST_CASE("under the other axes workers agree when a period ends, and memory and wire are as planned") {
  struct Way {
    const char* name;
    void (*set)(Case&);
  };
  const Way ways[] = {
      {"gpt tied sgd", [](Case& c) { c.layout.tp = 2; }},
      {"gpt tied adamw", [](Case& c) { c.layout.pp = 2, c.layout.schedule = Schedule::k1F1B; }},
      {"llama sgd", [](Case& c) { c.layout.tp = 2, c.layout.pp = 2, c.layout.schedule = Schedule::kAfab; }},
      {"llama tied dropout clipped adamw", [](Case& c) { c.layout.recompute = Recompute::kFull; }},
      {"gpt untied dropout sgd", [](Case& c) { c.layout.offload.activations = OffloadTo::kCpu; }},
      {"gpt tied bf16 clipped adamw", [](Case& c) { c.layout.tp = 2; }},
      {"llama bf16 sgd", [](Case& c) { c.layout.recompute = Recompute::kSelective; }},
      {"llama adamw", [](Case& c) { c.canonical = false, c.layout.collective_algorithm = AlgorithmChoice::kRing; }},
  };
  for (const Way& way : ways) {
    Case c = base_case(way.name, 2, 2);
    way.set(c);
    c.train.guard = {};
    c.layout.diloco = {.steps = 2, .learning_rate = 0.7f, .momentum = 0.9f};
    INFO(way.name);
    Case plain = c;
    plain.layout.diloco = {};
    Running run(c), together(plain);
    const double first = *together.session->step(0).loss;
    for (int period = 0; period < 2; ++period) {
      const StepResult result = run.session->step(int64_t{period} * 2);
      for (const auto& loss : result.losses) REQUIRE(std::isfinite(*loss));
      // The same sequences, parameters and dropout masks as data parallelism has in its first step.
      if (period == 0) CHECK(static_cast<float>(*result.losses[0]) == static_cast<float>(first));
    }
    for (const ModelParameter& p : parameters_of(c.model)) {
      INFO(p.name);
      const auto value = run.session->parameter(p.name);
      INFO((value.ok() ? "" : to_string(value.error())));
      REQUIRE(value.ok());
      CHECK(std::ranges::all_of(value->values, [](float x) { return std::isfinite(x); }));
    }
    run.require_counts();
  }
}

}  // namespace
}  // namespace shardlab::testing::of_diloco
