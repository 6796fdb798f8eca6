// Periods that may be taken back, their folds replayed: the grid's pipelines, each with a period and something to judge; and what the
// copy of the state takes.
#include <string>

#include "plan/memory.h"
#include "plan/wire.h"
#include "tests/deal.h"
#include "tests/laws/equal.h"
#include "tests/laws/grid.h"
#include "tests/laws/refusals.h"
#include "tests/namespaces.h"
#include "tests/test.h"

namespace shardlab::testing {
namespace {

std::vector<Case> validated() {
  std::vector<Case> all;
  for (Case c : testing::legal_cases()) {
    if (c.layout.pp == 1) continue;
    const size_t i = all.size();
    c.train.post_validation = 2 + static_cast<int64_t>(i % 2);
    c.train.clip_norm = i % 3 == 0 ? 0 : 1;
    if (i % 3 != 1) c.train.guard.nonfinite = GuardAction::kSkip;
    if (i / 3 % 3 == 1) c.train.precision = Precision::kBf16;
    c.name += " validated every " + std::to_string(c.train.post_validation);
    if (!check(c).ok()) c.layout.collective_algorithm = AlgorithmChoice::kRing;  // three stages add no norms by halving
    if (check(c).ok()) all.push_back(std::move(c));
  }
  return all;
}

Case in_step(Case c) {
  c.train.post_validation = 0;
  return c;
}

}  // namespace

TEST_CASE("post-validation: peak, classes and wire bytes of the plan equal its replay") {
  const std::vector<Case> cases = validated();
  CHECK(cases.size() > 200);
  for (size_t i = 0; i < cases.size(); i += dealt(5, 19)) testing::require_equal(cases[i], i % 2 == 0);
}

TEST_CASE("post-validation: parameters, copies in fp32 and moments are there twice, and a step sends what it sent") {
  const std::vector<Case> cases = validated();
  for (size_t i = 0; i < cases.size(); i += dealt(7, 25)) {
    const Case& c = cases[i];
    INFO(c.name);
    const Plan later = plan_of(c), meeting = plan_of(in_step(c));
    for (int role = 0; role < static_cast<int>(later.roles.size()); ++role) {
      const auto at_peak = memory_peak(later, role)[static_cast<size_t>(Space::kDevice)],
                 was = memory_peak(meeting, role)[static_cast<size_t>(Space::kDevice)];
      for (const BufferClass kind : {BufferClass::kParameter, BufferClass::kMaster, BufferClass::kMoment})
        CHECK(at_peak.peak_by_class.bytes[static_cast<size_t>(kind)] == 2 * was.peak_by_class.bytes[static_cast<size_t>(kind)]);
    }
    const auto wire = total_wire_bytes(later);
    for (const auto& [comm, bytes] : total_wire_bytes(meeting)) {
      INFO(comm);
      CHECK(wire.at(comm) == c.train.post_validation * bytes);
    }
  }
}

TEST_CASE("post-validation: refused where it has no meaning, with what to do instead") {
  Case c = validated()[1];
  c.train.guard.nonfinite = GuardAction::kNone;
  c.train.clip_norm = 1;
  Refusals r(c);
  r.c.layout.pp = 1, r.c.layout.schedule = Schedule::kNone;
  r.refused("there is no other stage to wait for");
  r.c.train.clip_norm = 0;
  r.refused("no stage waits for another before its update");
  r.c.train.guard.spike = GuardAction::kSkip;
  r.refused("which are not yet valid");
  r.c.train.precision = Precision::kFp16;
  r.refused("goes by the overflows of those before it");
  r.c.train.post_validation = 1;
  r.refused("one step alone waits for its own norm");
  r.c.train.post_validation = 1'000'000;
  r.refused("use 2 to 4096");
  r.c.train.post_validation = 3, r.c.checkpoint.save_every = 10;
  r.refused("set checkpoint.save_every to 12");
  r.c.layout.offload.optimizer = OffloadTo::kCpu;
  r.refused("with offload.optimizer=cpu");
}

}  // namespace shardlab::testing
