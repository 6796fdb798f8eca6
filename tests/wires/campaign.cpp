#include "tests/wires/campaign.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <sstream>

#include "cli/pairs.h"
#include "kernels/kernels.h"
#include "runtime/backend.h"
#include "strategies/lower.h"
#include "tests/numerics/matrix.h"
#include "tests/wires/group.h"
#include "tests/wires/sha256.h"

namespace shardlab::testing {

namespace {

constexpr int kSteps = 2;

}  // namespace

std::string train_case(const Case& c, const std::string& wire, Control* control) {
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
  Sha256 hash;
  for (const StateName& name : *states) {
    const auto value = (*session)->state(name);
    if (!value.ok()) return line + " " + value.error().message;
    hash.add(value->values.data(), value->values.size() * sizeof(float));
  }
  return line + " state " + hash.hex();
}

std::vector<Case> campaign_cases(int every) {
  std::vector<Case> cases;
  int legal = 0;
  for (LegalPair& pair : legal_pairs()) {
    Case& c = pair.config;
    if (c.backend != BackendKind::kCpu || c.layout.parameter_server.staleness >= 0 || c.layout.world_size() < 2) continue;
    if (++legal % every != 0) continue;
    c.name = pair.first + " with " + pair.second;
    c.canonical = true;
    c.train.seq_len = 16;
    c.train.global_batch_tokens = c.sequences_per_step() * c.train.seq_len;
    if (!check(c).ok()) c.canonical = false;
    cases.push_back(c);
  }
  return cases;
}

std::string train_cases(std::span<const Case> cases, const std::string& wire, int processes, Control* control) {
  std::string lines;
  for (const Case& c : cases)
    if (c.layout.world_size() % processes == 0) lines += train_case(c, wire, control) + "\n";
  return lines;
}

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

}  // namespace shardlab::testing
