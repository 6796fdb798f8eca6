// The plan held to the closed forms: zero bytes off, in every stage of every case of the grid. Neither side knows the other's code:
// the plan's figures are folds over its text, the closed forms know the configuration only.
#include "simulator/closed_form.h"

#include <map>
#include <set>
#include <string>

#include "plan/collective_steps.h"
#include "plan/memory.h"
#include "plan/wire.h"
#include "strategies/lower.h"
#include "tests/laws/grid.h"
#include "tests/namespaces.h"
#include "tests/test.h"

namespace shardlab::testing {
namespace {

using testing::legal_cases;

Plan plan_of(const Case& c) {
  auto plan = lower(c, {.after = {}, .verify = false});
  INFO(c.name);
  REQUIRE(plan.ok());
  return std::move(plan).value();
}

std::map<std::string, int64_t> wire_by_name(const ClosedForm& form) {
  std::map<std::string, int64_t> bytes;
  for (size_t i = 0; i < kChannels; ++i)
    if (form.wire[i] != 0) bytes.emplace(name_of(static_cast<Channel>(i)), form.wire[i]);
  return bytes;
}

/// Persistent bytes of one class of a role.
int64_t persistent_bytes(const Role& role, BufferClass cls) {
  int64_t bytes = 0;
  for (const Buffer& b : role.buffers)
    if (b.persistent && !b.view && b.kind == cls) bytes += aligned(b.type.bytes());
  return bytes;
}

/// Most micro-batches between the first unit's forward and its backward, counted in the program.
int64_t most_in_flight(const Plan& plan, const Role& role) {
  std::set<int> live;
  size_t most = 0;
  for (const Item& item : role.program) {
    const Call* call = std::get_if<Call>(&item);
    if (call == nullptr || call->layer < 0) continue;
    const std::string& name = plan.segments[call->segment.index()].name;
    if (name.starts_with("layer.F")) live.insert(call->micro_batch);
    most = std::max(most, live.size());
    if (name.starts_with("layer.B")) live.erase(call->micro_batch);
  }
  return static_cast<int64_t>(most);
}

TEST_CASE("the grid is legal and covers every choice") {
  const std::vector<Case> cases = legal_cases();
  CHECK(cases.size() == 8568);
  std::set<std::string> names;
  for (const Case& c : cases) {
    INFO(c.name);
    REQUIRE(check(c).ok());
    names.insert(c.name);
  }
  CHECK(names.size() == cases.size());
}

TEST_CASE("the norm is not added over a number of stages that halving-doubling cannot serve") {
  Case c;
  for (const Case& legal : legal_cases())
    if (legal.layout.pp == 3 && legal.layout.dp == 2 && legal.train.grad_norm && !legal.canonical) c = legal;
  REQUIRE(c.layout.pp == 3);
  c.layout.collective_algorithm = AlgorithmChoice::kRing;
  CHECK(check(c).ok());
  c.layout.collective_algorithm = AlgorithmChoice::kHalvingDoubling;
  const Result<void> refused = check(c);
  REQUIRE(!refused.ok());
  CHECK(refused.error().message.find("pp=3") != std::string::npos);
  c.train.grad_norm = false;
  CHECK(check(c).ok());
}

TEST_CASE("peak, classes and wire bytes of the plan equal the closed forms") {
  int64_t compared = 0;
  for (const Case& c : legal_cases()) {
    const Plan plan = plan_of(c);
    const ClosedForm form = closed_form(c);
    INFO(c.name);
    REQUIRE(form.stages.size() == plan.roles.size());
    for (size_t stage = 0; stage < plan.roles.size(); ++stage) {
      const StageForm& f = form.stages[stage];
      const auto peaks = memory_peak(plan, static_cast<int>(stage));
      const MemoryPeak& peak = peaks[static_cast<size_t>(Space::kDevice)];
      INFO("stage " << stage << ", the plan's peak at " << peak.moment << ", the formula's at " << name_of(f.moment));
      REQUIRE(f.peak == peak.peak_bytes);
      REQUIRE(f.at_peak.bytes == peak.at_peak.bytes);
      REQUIRE(f.persistent == peak.persistent_bytes);
      REQUIRE(f.host.at_peak.bytes == peaks[static_cast<size_t>(Space::kHost)].at_peak.bytes);
      REQUIRE(f.nvme.at_peak.bytes == peaks[static_cast<size_t>(Space::kNvme)].at_peak.bytes);
      REQUIRE(f.parameters == persistent_bytes(plan.roles[stage], BufferClass::kParameter));
      REQUIRE(f.moments == persistent_bytes(plan.roles[stage], BufferClass::kMoment));
      REQUIRE(f.in_flight == most_in_flight(plan, plan.roles[stage]));
      ++compared;
    }
    REQUIRE(wire_by_name(form) == total_wire_bytes(plan));
  }
  CHECK(compared == 23256);
}

TEST_CASE("every moment of the closed form is the peak of some stage of the grid") {
  std::set<std::string> seen, all;
  for (const Case& c : legal_cases())
    for (const StageForm& stage : closed_form(c).stages) seen.emplace(name_of(stage.moment));
  for (size_t i = 0; i < kPeakMoments; ++i) all.emplace(name_of(static_cast<Moment>(i)));
  CHECK(seen == all);
}

TEST_CASE("what a layer keeps, by kind, is what its forward leaves allocated") {
  for (const Case& c : legal_cases()) {
    if (c.layout.recompute == Recompute::kFull || c.layout.dp > 1 || c.layout.pp > 1) continue;
    INFO(c.name);
    const Plan plan = plan_of(c);
    std::map<std::string, int64_t> kept;
    for (const Segment& segment : plan.segments) {
      if (segment.name != "layer.F") continue;
      for (const Step& step : segment.steps) {
        const auto change = [&](SlotId id, int sign) {
          const Slot& slot = segment.slots[id.index()];
          kept[slot.name] += sign * aligned(slot.type.bytes());
        };
        if (const auto* a = std::get_if<AllocSlot>(&step)) change(a->slot, 1);
        if (const auto* f = std::get_if<FreeSlot>(&step)) change(f->slot, -1);
      }
    }
    std::erase_if(kept, [](const auto& entry) { return entry.second == 0; });
    const LayerActivations layer = closed_form(c).layer;
    CHECK(kept == std::map<std::string, int64_t>{{"attn.norm.y", layer.norms / 2},
                                                 {"attn.norm.stats", layer.statistics / 2},
                                                 {"qkv", layer.qkv},
                                                 {"o", layer.attention},
                                                 {"lse", layer.log_sum_exp},
                                                 {"x1", layer.residual},
                                                 {"mlp.norm.y", layer.norms / 2},
                                                 {"mlp.norm.stats", layer.statistics / 2},
                                                 {"u", layer.up},
                                                 {"a", layer.activated},
                                                 {"y", layer.input}});
  }
}

TEST_CASE("a group's wire bytes depend neither on the algorithm nor on how evenly it is cut") {
  for (const int size : {2, 3, 4, 5, 8})
    for (const int64_t elements : {1, 7, 64, 1001})
      for (const Algorithm algorithm : {Algorithm::kRing, Algorithm::kHalvingDoubling, Algorithm::kDirect}) {
        if (algorithm == Algorithm::kHalvingDoubling && (size & (size - 1)) != 0) continue;
        for (const auto& [kind, passes] :
             {std::pair{CollectiveKind::kAllReduce, 2}, {CollectiveKind::kReduceScatter, 1}, {CollectiveKind::kAllGather, 1}}) {
          int64_t sent = 0;
          for (int rank = 0; rank < size; ++rank) sent += sent_elements(kind, algorithm, elements, size, rank);
          CAPTURE(size, elements, static_cast<int>(algorithm), static_cast<int>(kind));
          CHECK(sent == passes * (size - 1) * elements);
        }
      }
}

}  // namespace
}  // namespace shardlab::testing
