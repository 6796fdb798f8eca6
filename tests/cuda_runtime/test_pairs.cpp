// Every pair of choices of which docs/compatibility.md says that it goes on `backend: cuda` is trained there, on the fake runtime:
// with the bits of the CPU back end where the GPU's kernels keep them (fp32, canonical order), near its losses where they round
// otherwise.
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <filesystem>

#include "cli/pairs.h"
#include "kernels/kernels.h"
#include "runtime/checkpoint.h"
#include "runtime/thread_transport.h"
#include "strategies/lower.h"
#include "tests/cuda_runtime/rig.h"
#include "tests/deal.h"
#include "tests/laws/equal.h"
#include "tests/namespaces.h"
#include "tests/strategies/cases.h"
#include "tests/test.h"

namespace shardlab::testing {
namespace {

constexpr int kSteps = 4;

/// The distance of losses, relative, within which a GPU that rounds to 16 bits in an order of its own is near the CPU.
constexpr double kNear = 1e-3;

/// As small as the pair allows, in canonical order where it can be.
Case small(Case c) {
  c.train.seq_len = 16;
  c.train.global_batch_tokens = c.sequences_per_step() * c.train.seq_len;
  c.checkpoint = {};
  c.canonical = true;
  if (!check(c).ok()) c.canonical = false;
  REQUIRE(check(c).ok());
  if (c.train.post_validation > 0) c.train.post_validation = kSteps;  // whole periods
  return c;
}

Case on_cpu(Case c) {
  c.backend = BackendKind::kCpu;
  c.transport = TransportKind::kThreads;
  return c;
}

/// Whether two runs have the same losses and parameters, bit for bit.
bool same(const Run& a, const Run& b) {
  if (a.losses != b.losses || a.parameters.size() != b.parameters.size()) return false;
  return std::ranges::all_of(a.parameters, [&](const auto& p) { return same_bits(p.second, b.parameters.at(p.first)); });
}

}  // namespace

TEST_CASE("every yes of backend cuda is trained on the fake runtime, as the CPU trains it") {
  int trained = 0, bits = 0;
  uint64_t number = 0;
  double farthest = 0;
  std::string farthest_pair;
  for (const LegalPair& pair : legal_pairs()) {
    if (pair.config.transport != TransportKind::kOneGpu || number++ % dealt(1, 4) != 0) continue;
    const Case c = small(pair.config);
    INFO(pair.first << " with " << pair.second);
    CHECK(difference_from_replay(plan_of(c)) == "");
    const Run cpu = train_on_cpu(on_cpu(c), {.steps = kSteps});
    const Behind behind = c.train.precision == Precision::kFp32 ? Behind::kHost : Behind::kEmulated;
    const Run device = train_on_fake(c, {.steps = kSteps, .seed = static_cast<uint64_t>(1 + trained), .kernels = behind});
    ++trained;
    CHECK(device.sent_bytes == cpu.sent_bytes);
    CHECK(device.peaks == device.planned);
    CHECK(device.skipped == cpu.skipped);
    REQUIRE(device.losses.size() == cpu.losses.size());
    REQUIRE(device.losses.size() == kSteps);
    CHECK(cpu.losses.front() != cpu.losses.back());
    if (c.canonical && c.train.precision == Precision::kFp32) {
      CHECK(same(device, cpu));
      ++bits;
    }
    for (size_t step = 0; step < device.losses.size(); ++step) {
      const double apart = std::abs(device.losses[step] / cpu.losses[step] - 1);
      INFO("loss of step " << step << ": " << device.losses[step] << ", CPU " << cpu.losses[step]);
      CHECK(apart < kNear);
      if (apart > farthest) farthest = apart, farthest_pair = pair.first;
    }
  }
  fmt::print("{} pairs trained on the fake GPU, {} with the bits of the CPU; the farthest by {:.2g} of the loss: {}\n", trained,
             bits, farthest, farthest_pair);
  CHECK(trained >= (thorough() ? 43 : 10));
  CHECK(bits >= (thorough() ? 38 : 9));
}

TEST_CASE("periods that stand and periods that are taken back are the CPU's on the fake runtime") {
  const auto legal = legal_pairs();
  const auto pair = std::ranges::find_if(legal, [](const LegalPair& p) {
    return p.config.transport == TransportKind::kOneGpu && p.config.train.post_validation > 0 && p.config.layout.zero == 0;
  });
  REQUIRE(pair != legal.end());
  for (const float clip_norm : {1e6f, 1e-3f})
    for (const Schedule schedule : {Schedule::k1F1B, Schedule::kZbH2}) {
      Case c = small(pair->config);
      c.canonical = true;
      c.layout.schedule = schedule;
      c.train.clip_norm = clip_norm;
      c.train.guard.nonfinite = GuardAction::kSkip;
      c.train.post_validation = kSteps / 2;
      INFO(name_of(schedule) << " clip_norm " << clip_norm);
      const Run cpu = train_on_cpu(on_cpu(c), {.steps = kSteps});
      const Run device = train_on_fake(c, {.steps = kSteps, .seed = 7});
      CHECK(same(device, cpu));
      CHECK(device.peaks == device.planned);
      // The period that was taken back begins again with the parameters that it began with.
      const Run none = train_on_cpu(on_cpu(c), {.steps = 0});
      CHECK((device.parameters == none.parameters) == (clip_norm < 1));
    }
}

TEST_CASE("what check lets through on a GPU the back end binds: a sample of the table, put there") {
  const uint64_t shares = dealt(3, 36);
  uint64_t number = 0;
  int bound = 0, refused = 0;
  for (const LegalPair& pair : legal_pairs()) {
    if (number++ % shares != 0) continue;
    Case c = pair.config;
    c.train.seq_len = 16;
    c.train.global_batch_tokens = c.sequences_per_step() * c.train.seq_len;
    c.backend = BackendKind::kCuda;
    c.transport = TransportKind::kOneGpu;
    if (!check(c).ok()) {
      ++refused;
      continue;
    }
    INFO(pair.first << " with " << pair.second);
    auto plan = lower(c, {.after = {}, .verify = false});
    REQUIRE(plan.ok());
    const PlacedPlan placed = place(std::move(*plan));
    FakeApi api(1);
    const FakeRun run(placed, api, {}, {.canonical = c.canonical});
    INFO((run.session.ok() ? "" : to_string(run.session.error())));
    REQUIRE(run.session.ok());
    ++bound;
  }
  fmt::print("{} pairs bound on a GPU, {} refused by check\n", bound, refused);
  CHECK(static_cast<uint64_t>(bound) * shares > 1000);
}

TEST_CASE("every schedule of the learning rate moves the device's parameters as the CPU's") {
  using Kind = LearningRate::Kind;
  std::vector<std::vector<double>> seen;
  for (const LearningRate& rate :
       {LearningRate{.kind = Kind::kConstant, .peak = 0.5f},
        LearningRate{.kind = Kind::kCosine, .peak = 0.5f, .warmup_steps = 1, .total_steps = 6, .floor = 0.1f},
        LearningRate{.kind = Kind::kLinear, .peak = 0.5f, .warmup_steps = 2, .total_steps = 5},
        LearningRate{.kind = Kind::kWsd, .peak = 0.5f, .total_steps = 6, .decay_steps = 3}}) {
    INFO(name_of(rate.kind));
    Case c = training_subject(Family::kLlama);
    c.train.learning_rate = rate;
    c.train.global_batch_tokens = c.sequences_per_step() * c.train.seq_len;
    const Run cpu = train_on_cpu(c, {.steps = 6}), device = train_on_fake(c, {.steps = 6});
    REQUIRE(same(device, cpu));
    for (const auto& other : seen) REQUIRE(device.losses != other);
    seen.push_back(device.losses);
  }
}

TEST_CASE("a checkpoint that the device saves goes on there and on the CPU, with the bits of a run that was not cut") {
  const std::string folder = std::filesystem::temp_directory_path() / ("shardlab-cuda-checkpoint-" + std::to_string(getpid()));
  for (const int zero : {1, 2, 3}) {
    Case c = training_subject(Family::kLlama);
    c.train.optimizer = Optimizer::kAdamW;
    c.train.learning_rate.peak = 0.01f;
    c.layout.dp = 2;
    c.layout.zero = zero;
    c.train.global_batch_tokens = c.sequences_per_step() * c.train.seq_len;
    const Run whole = train_on_cpu(c, {.steps = 4});
    RunOptions options;
    options.seed = c.train.seed;
    options.learning_rate = c.train.learning_rate;
    const PlacedPlan there = lowered(c);
    const auto finish = [&](Session& session) {
      auto saved = Checkpoint::open(folder);
      REQUIRE(saved.ok());
      REQUIRE(saved->steps() == 2);
      const auto restored = saved->restore(c, session);
      INFO((restored.ok() ? "" : to_string(restored.error())));
      REQUIRE(restored.ok());
      for (int step = 2; step < 4; ++step)
        REQUIRE(static_cast<double>(*session.step(step).loss) == whole.losses[static_cast<size_t>(step)]);
      for (const auto& [name, values] : whole.parameters) REQUIRE(same_bits(session.parameter(name)->values, values));
    };
    {
      FakeApi api(3);
      FakeRun first(there, api, options, {.canonical = true});
      REQUIRE(first.session.ok());
      (*first.session)->initialise_parameters();
      REQUIRE(prepare_checkpoints(**first.session, folder).ok());
      for (int step = 0; step < 2; ++step) (*first.session)->step(step);
      REQUIRE(save_checkpoint(**first.session, c, 2, folder).ok());
    }
    {
      FakeApi api(4);
      FakeRun second(there, api, options, {.canonical = true});
      REQUIRE(second.session.ok());
      finish(**second.session);
    }
    auto plan = lower(on_cpu(c));
    REQUIRE(plan.ok());
    const PlacedPlan here = place(std::move(*plan));
    const kernels::Kernels& own = kernels::kernels_for_this_processor();
    ThreadTransport transport(own);
    const Tokens64 tokens;
    auto session = Session::create(here, options, transport, cpu_backend(own, {.canonical = true}), &tokens);
    REQUIRE(session.ok());
    finish(**session);
    std::filesystem::remove_all(folder);
  }
}

}  // namespace shardlab::testing
