// Cases of the offload tests, and the plan of one held to its replay.
#pragma once

#include <string>
#include <vector>

#include "plan/case.h"
#include "plan/plan.h"
#include "runtime/session.h"
#include "tests/namespaces.h"

namespace shardlab::testing {

/// A model of `layers` layers whose sizes no alignment divides, and one micro-batch of two sequences.
Case small_case(Family family, int64_t layers = 5);

/// dp, zero, tp, pp, accumulation: what offload is combined with.
struct Ranks {
  int dp = 1, zero = 0, tp = 1, pp = 1;
  Schedule schedule = Schedule::kNone;
  int64_t accumulation = 1;
};
void set(Case& c, const Ranks& ranks);

/// "gpt dp2 zero1 ga3 overlap offload optimizer=cpu": for messages.
std::string offload_line(const Case& c);

/// Verified; a refusal fails the test with its text.
Plan plan_of(const Case& c);

/// Peak and classes in every space, and wire bytes, folded and replayed (tests/laws/replay.h): fails where they differ.
void require_replayed(const Case& c);

/// Trains for three steps and holds the high-water marks of every rank and space, and the bytes sent, to the plan.
void require_measured_as_planned(const Case& c);

/// Trains both for `steps` steps: fails unless losses and parameters have the same bits, are finite and moved.
void require_same_bits(const Case& a, const Case& b, int steps = 4);

}  // namespace shardlab::testing
