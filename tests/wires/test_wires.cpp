// Plans of every strategy, trained by ranks in several processes: the bits, peaks and wire bytes are those of threads.
#include <fmt/format.h>

#include <bit>
#include <sstream>
#include <string>

#include "cli/pairs.h"
#include "kernels/kernels.h"
#include "plan/base/hash.h"
#include "runtime/backend.h"
#include "strategies/lower.h"
#include "tests/namespaces.h"
#include "tests/numerics/matrix.h"
#include "tests/test.h"
#include "tests/wires/group.h"

namespace shardlab::testing {
namespace {

constexpr int kSteps = 2;

/// What threads make of a case as every wire must: one line, everything exact.
std::string train(const Case& c, const std::string& wire, Control* control) {
  auto plan = lower(c);
  if (!plan.ok()) return "refused: " + plan.error().message;
  const PlacedPlan placed = place(std::move(*plan));
  const kernels::Kernels& kernels = kernels::kernels_for_this_processor();
  const RandomText source(c.model.vocab);
  const std::unique_ptr<Transport> transport = wire_named(wire, kernels, placed, control, 60);
  RunOptions options;
  options.seed = c.train.seed;
  options.learning_rate = c.train.learning_rate;
  options.timeout_s = 60;
  options.poison = true;
  options.control = control;
  options.nvme_directory = "/tmp";
  auto session = Session::create(placed, options, *transport, cpu_backend(kernels, {c.canonical, 1}), &source);
  if (!session.ok()) return "refused: " + session.error().message;
  (*session)->initialise_parameters();
  std::string line = c.name + ":";
  const int period = placed.plan->period;
  for (int step = 0; step < std::max(kSteps, period); step += period) {
    const StepResult result = (*session)->step(step);
    for (const auto& loss : result.losses) line += fmt::format(" {:016x}", std::bit_cast<uint64_t>(loss.value_or(-1)));
    line += fmt::format(" sent {}", result.sent_bytes);
  }
  for (int rank = 0; rank < placed.plan->mesh.world_size(); ++rank) {
    line += fmt::format(" rank {}", rank);
    for (const Space space : {Space::kDevice, Space::kHost, Space::kNvme})
      line += fmt::format(" {}/{}", (*session)->ledger(rank).peak(space), (*session)->arena_bytes(rank, space));
    for (const int64_t bytes : (*session)->sent_by_comm(rank)) line += fmt::format(" {}", bytes);
  }
  const auto states = (*session)->states();
  if (!states.ok()) return line + " " + states.error().message;
  uint64_t hash = hash_text({});
  for (const StateName& name : *states) {
    const auto value = (*session)->state(name);
    if (!value.ok()) return line + " " + value.error().message;
    hash = hash_text({reinterpret_cast<const char*>(value->values.data()), value->values.size() * sizeof(float)}, hash);
  }
  return line + fmt::format(" state {:016x}", hash);
}

/// A part of all pairs of strategies that go together, on the small model: each strategy stands in many.
std::vector<Case> sample() {
  std::vector<Case> cases;
  int legal = 0;
  for (LegalPair& pair : legal_pairs()) {
    Case& c = pair.config;
    if (c.backend != BackendKind::kCpu || c.layout.parameter_server.staleness >= 0 || c.layout.world_size() < 2) continue;
    if (++legal % 5 != 0) continue;
    c.name = pair.first + " with " + pair.second;
    c.canonical = true;
    c.train.seq_len = 16;
    c.train.global_batch_tokens = c.sequences_per_step() * c.train.seq_len;
    if (!check(c).ok()) c.canonical = false;
    cases.push_back(c);
  }
  return cases;
}

/// The lines of those cases that `processes` can share out.
std::string train_all(const std::vector<Case>& cases, const std::string& wire, int processes, Control* control) {
  std::string lines;
  for (const Case& c : cases)
    if (c.layout.world_size() % processes == 0) lines += train(c, wire, control) + "\n";
  return lines;
}

/// The first line in which two texts differ.
std::string first_difference(const std::string& want, const std::string& have) {
  std::istringstream a(want), b(have);
  std::string line, other;
  while (std::getline(a, line)) {
    std::getline(b, other);
    if (line != other) return "want " + line + "\nhave " + other;
    other.clear();
  }
  return want == have ? "" : "more lines than expected";
}

}  // namespace

TEST_CASE("every strategy trains over processes to the bits, peaks and bytes of threads") {
  const std::vector<Case> cases = sample();
  REQUIRE(cases.size() >= 60);
  // Both wires with as many processes as ranks, and with two ranks in each or more.
  for (const int processes : {2, 4}) {
    const GroupEnd threads = run_group(
        1, [&](Control&) { return train_all(cases, "threads", processes, nullptr); }, 60, 300);
    REQUIRE(threads.texts[0].find("refused") == std::string::npos);
    REQUIRE(threads.texts[0].find("state ") != std::string::npos);
    for (const std::string wire : {"processes", "tcp"}) {
      INFO(wire << " in " << processes << " processes");
      const GroupEnd end = run_group(
          processes, [&](Control& control) { return train_all(cases, wire, processes, &control); }, 60, 300);
      INFO((end.failure ? end.failure->message : ""));
      for (int p = 0; p < processes; ++p) {
        CHECK(end.statuses[static_cast<size_t>(p)] == 0);
        CHECK(first_difference(threads.texts[0], end.texts[static_cast<size_t>(p)]) == "");
      }
    }
  }
}

TEST_CASE("ranks that cannot be shared out evenly are refused by every process") {
  Case c = sample().front();
  c.layout = {};
  c.layout.dp = 2;
  for (const std::string wire : {"processes", "tcp"}) {
    const GroupEnd end = run_group(3, [&](Control& control) -> std::string {
      const auto ranks = local_ranks(c.layout.world_size(), &control);
      return ranks.ok() ? "went on" : ranks.error().message;
    });
    for (const std::string& text : end.texts) CHECK(text == "2 ranks in 3 processes, which cannot have as many each");
  }
}

}  // namespace shardlab::testing
