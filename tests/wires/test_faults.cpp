// A rank's process is killed or stopped at a moment drawn from a seed: it is named with its op, the others with what they wait for,
// and everything ends.
#include <fmt/format.h>
#include <signal.h>
#include <sys/wait.h>

#include <chrono>
#include <string>
#include <thread>

#include "kernels/kernels.h"
#include "plan/base/hash.h"
#include "runtime/backend.h"
#include "strategies/lower.h"
#include "tests/deal.h"
#include "tests/namespaces.h"
#include "tests/numerics/matrix.h"
#include "tests/test.h"
#include "tests/wires/group.h"

namespace shardlab::testing {
namespace {

constexpr double kTimeout_s = 1;

Case small_case() {
  Case c;
  c.canonical = true;
  c.layout.dp = 2;
  c.layout.pp = 2;
  c.layout.schedule = Schedule::k1F1B;
  c.train.grad_accumulation = 2;
  c.layout.overlap = false;
  return rows_of(subjects().front(), std::span(&c, 1)).at(0);
}

/// Trains until something ends it.
std::string train_on(const Case& c, const std::string& wire, Control& control) {
  auto plan = lower(c);
  if (!plan.ok()) return plan.error().message;
  const PlacedPlan placed = place(std::move(*plan));
  const kernels::Kernels& kernels = kernels::kernels_for_this_processor();
  const RandomText source(c.model.vocab);
  const auto transport = wire_named(wire, kernels, placed, &control, kTimeout_s);
  RunOptions options;
  options.timeout_s = kTimeout_s;
  options.control = &control;
  auto session = Session::create(placed, options, *transport, cpu_backend(kernels, {c.canonical, 1}), &source);
  if (!session.ok()) return session.error().message;
  (*session)->initialise_parameters();
  for (int64_t step = 0;; ++step) (*session)->step(step);
}

}  // namespace

TEST_CASE("a process that is killed or stopped is named with its op, and the group ends") {
  const Case c = small_case();
  const int faults = static_cast<int>(dealt(200, 16));
  for (int seed = 0; seed < faults; ++seed) {
    const std::string wire = seed % 2 == 0 ? "processes" : "tcp";
    const bool stops = seed % 4 >= 2;
    const int victim = static_cast<int>(mix(static_cast<uint64_t>(seed)) % 4);
    INFO(wire << (stops ? ", process stopped: " : ", process killed: ") << victim << ", seed " << seed);
    const auto strike = [&](const std::vector<pid_t>& processes) {
      std::this_thread::sleep_for(std::chrono::microseconds(150000 + mix(static_cast<uint64_t>(seed) + 1000) % 100000));
      ::kill(processes[static_cast<size_t>(victim)], stops ? SIGSTOP : SIGKILL);
      if (!stops) return;
      // Whoever starts a group kills what does not end by itself: `run` does, and here the test.
      std::this_thread::sleep_for(std::chrono::duration<double>(kTimeout_s + 1.5));
      ::kill(processes[static_cast<size_t>(victim)], SIGKILL);
    };
    const GroupEnd end = run_group(
        4, [&](Control& control) { return train_on(c, wire, control); }, kTimeout_s, 60, strike);
    REQUIRE(end.failure);
    INFO(end.failure->message);
    const std::string named = fmt::format("rank {} stands still at stream ", victim);
    CHECK(end.failure->message.find(named) != std::string::npos);
    CHECK(end.failure->message.find(stops ? "its thread is stopped" : "its process has ended") != std::string::npos);
    for (int rank = 0; rank < 4; ++rank) {
      if (rank == victim) continue;
      INFO("rank " << rank);
      CHECK(end.failure->message.find(fmt::format("rank {} stands still", rank)) == std::string::npos);
      // Ended by itself, within the time-out and a little, with the same words.
      CHECK(WIFEXITED(end.statuses[static_cast<size_t>(rank)]));
      CHECK(end.texts[static_cast<size_t>(rank)].starts_with("failed: "));
      CHECK(end.texts[static_cast<size_t>(rank)].find(named) != std::string::npos);
    }
    CHECK(WIFSIGNALED(end.statuses[static_cast<size_t>(victim)]));
  }
}

}  // namespace shardlab::testing
