// Tier E3: training with compressed gradients has the bits of its emulation in one process, errors included; nothing is lost on the
// way; and where nothing is left out it is plain data parallelism.
#include <fmt/format.h>

#include <string>
#include <vector>

#include "tests/namespaces.h"
#include "tests/numerics/emulation.h"
#include "tests/numerics/running.h"
#include "tests/numerics/train_case.h"
#include "tests/test.h"

namespace shardlab::testing::of_compression {
namespace {

using testing::base_case;
using testing::EmulatedBucket;
using testing::Emulation;
using testing::Running;
using testing::same_bits;
using testing::tokens_of;

constexpr int kSteps = 3;

constexpr Compression kKinds[] = {
    {.kind = CompressionKind::kBf16},
    {.kind = CompressionKind::kInt8},
    {.kind = CompressionKind::kInt8, .bits = 4},
    {.kind = CompressionKind::kTopK, .k = 0.05},
    {.kind = CompressionKind::kRandomK, .k = 0.2},
    {.kind = CompressionKind::kPowerSgd, .rank = 3},
};

/// Every technique twice: on two ranks with SGD, a bucket a parameter, accumulated; on four with AdamW, larger buckets, overlapped.
std::vector<Case> rows() {
  std::vector<Case> all;
  for (const Compression& kind : kKinds)
    for (const bool four : {false, true}) {
      Case c = four ? base_case("llama adamw", 4, 1) : base_case("llama sgd", 2, 2);
      c.layout.compression = kind;
      c.layout.overlap = four;
      c.layout.bucket_bytes = four ? 20000 : 0;
      if (!four) c.train.learning_rate.peak = 0.25f;  // what is owed comes late, and adds up
      c.name = fmt::format("{} bits {} {}", name_of(kind.kind), kind.bits, c.name);
      REQUIRE(check(c).ok());
      all.push_back(std::move(c));
    }
  for (const Compression& kind : std::span(kKinds).first(3))  // bf16, 8 and 4 bits: scattered to shards
    for (const int zero : {1, 2}) {
      Case c = zero == 1 ? base_case("llama adamw", 4, 1) : base_case("llama sgd", 2, 4);
      c.layout.compression = kind;
      c.layout.zero = zero;
      c.layout.overlap = zero == 1;
      c.layout.bucket_bytes = zero == 1 ? 20000 : 0;
      if (zero == 2) c.train.learning_rate.peak = 0.25f;
      c.name = fmt::format("{} bits {} zero {} {}", name_of(kind.kind), kind.bits, zero, c.name);
      INFO((check(c).ok() ? "" : to_string(check(c).error())));
      REQUIRE(check(c).ok());
      all.push_back(std::move(c));
    }
  return all;
}

TEST_CASE("compressed training has the bits of its emulation, errors included, and loses nothing") {
  for (const Case& config : rows()) {
    INFO(config.name);
    Running run(config);
    Emulation emulation(config);
    std::vector<float> losses;
    for (int step = 0; step < kSteps; ++step) {
      const float expected = emulation.step(tokens_of(config, step));
      const StepResult result = run.session->step(step);
      REQUIRE(std::isfinite(expected));
      REQUIRE(static_cast<float>(*result.loss) == expected);
      losses.push_back(expected);
      for (size_t b = 0; b < emulation.buckets().size(); ++b)
        for (int rank = 0; rank < config.layout.dp; ++rank) {
          const EmulatedBucket& bucket = emulation.buckets()[b];
          const std::string name = fmt::format("bucket{}.error", b);
          INFO("step " << step << " rank " << rank << " " << name);
          const bool plain = config.layout.compression.kind == CompressionKind::kPowerSgd && bucket.basis.empty();
          if (plain) continue;
          if (!bucket.basis.empty())
            REQUIRE(same_bits(*run.session->read_buffer(rank, fmt::format("bucket{}.basis", b)), bucket.basis));
          REQUIRE(same_bits(*run.session->read_buffer(rank, name), bucket.errors[static_cast<size_t>(rank)]));
          if (!bucket.of_slices.empty())
            REQUIRE(same_bits(*run.session->read_buffer(rank, name + ".slice"), bucket.of_slices[static_cast<size_t>(rank)]));
        }
    }
    REQUIRE(emulation.conserved());
    REQUIRE(emulation.largest_loss() < 1e-6);  // PowerSGD's, to rounding; nothing else loses anything
    REQUIRE(losses.front() != losses.back());
    for (const ModelParameter& p : parameters_of(config.model)) {
      INFO(p.name);
      REQUIRE(same_bits(run.session->parameter(p.name)->values, emulation.trainer().value(p.name)));
    }
    run.require_counts();
  }
}

TEST_CASE("all elements sent is plain data parallelism, bit for bit") {
  for (const CompressionKind kind : {CompressionKind::kTopK, CompressionKind::kRandomK})
    for (const char* subject : {"llama sgd", "llama adamw"}) {
      Case plain = base_case(subject, 4, 1);
      Case all = plain;
      all.layout.compression = {.kind = kind, .k = 1.0};
      const testing::RandomText text(plain.model.vocab);
      const auto expected = testing::train_case(plain, text, kSteps), have = testing::train_case(all, text, kSteps);
      REQUIRE(expected.ok());
      REQUIRE(have.ok());
      CHECK(same_bits(expected->losses, have->losses));
      for (const auto& [name, values] : expected->parameters) {
        INFO(name);
        CHECK(std::ranges::equal(values, have->parameters.at(name)));  // a gradient of -0 may come as +0
      }
    }
}

TEST_CASE("under the other axes: replicas agree, and memory and wire are as planned") {
  size_t number = 0;
  for (const Compression& kind : kKinds)
    for (const int pp : {1, 2}) {  // on two stages the table is tied across them
      const bool low_rank = kind.kind == CompressionKind::kPowerSgd;
      if (low_rank && pp == 2) continue;
      Case c;
      for (const testing::Subject& s : testing::subjects())
        if (s.name == (number % 2 == 0 ? "gpt tied bf16 clipped adamw" : "llama tied dropout clipped adamw")) {
          c.layout.dp = 2;
          c.layout.tp = low_rank ? 1 : 2;
          c.layout.pp = pp;
          c.layout.schedule = pp == 1 ? Schedule::kNone : Schedule::k1F1B;
          c.layout.zero = !low_rank && kind.kind != CompressionKind::kTopK && kind.kind != CompressionKind::kRandomK
                              ? static_cast<int>(number % 3)
                              : 0;
          c.layout.bucket_bytes = 8192;
          c.train.grad_accumulation = 2;
          c = testing::rows_of(s, std::span(&c, 1)).at(0);
        }
      c.layout.compression = kind;
      c.name += fmt::format(" {} bits {}", name_of(kind.kind), kind.bits);
      INFO(c.name);
      ++number;
      Running run(c);
      for (int step = 0; step < kSteps; ++step) REQUIRE(std::isfinite(*run.session->step(step).loss));
      for (const ModelParameter& p : parameters_of(c.model)) {
        INFO(p.name);
        const auto value = run.session->parameter(p.name);  // refused where two replicas differ in a bit
        REQUIRE(value.ok());
        CHECK(std::ranges::all_of(value->values, [](float x) { return std::isfinite(x); }));
      }
      run.require_counts();
    }
}

TEST_CASE("PowerSGD at full rank is plain data parallelism but for rounding") {
  Case plain = base_case("llama sgd", 2, 1);
  Case full = plain;
  full.layout.compression = {.kind = CompressionKind::kPowerSgd, .rank = 1 << 20};
  const testing::RandomText text(plain.model.vocab);
  const auto expected = testing::train_case(plain, text, kSteps), have = testing::train_case(full, text, kSteps);
  REQUIRE(expected.ok());
  REQUIRE(have.ok());
  for (int step = 0; step < kSteps; ++step)
    CHECK(have->losses[static_cast<size_t>(step)] == Approx(expected->losses[static_cast<size_t>(step)]).epsilon(1e-4));
  double error = 0, size = 0;
  for (const auto& [name, values] : expected->parameters)
    for (size_t i = 0; i < values.size(); ++i) {
      const double d = double{values[i]} - double{have->parameters.at(name)[i]};
      error += d * d;
      size += double{values[i]} * double{values[i]};
    }
  CHECK(std::sqrt(error / size) < 1e-4);
  CHECK(error > 0);  // the factors were multiplied
}

}  // namespace
}  // namespace shardlab::testing::of_compression
