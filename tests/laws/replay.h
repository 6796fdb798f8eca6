// A plan read naively: instruction by instruction, rank by rank. The folds of plan/memory.h and plan/wire.h read segments once and
// multiply; here nothing is folded, and what collectives send is what the papers count.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "plan/case.h"
#include "plan/memory.h"
#include "plan/plan.h"
#include "tests/namespaces.h"

namespace shardlab::testing {

/// The first of: bytes by class at the peak in each space, peak, persistent bytes of each stage, wire bytes of each communicator, in
/// which the folds of the plan differ from its naive replay. Empty where they are equal.
///
/// Formula, wire, over the g ranks of a group, whatever the algorithm and however uneven the parts: an all-reduce of n bytes sends
///   2 (g - 1) n, a reduce-scatter or an all-gather (g - 1) n; a message its bytes.
/// Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations" (2009), section 3.
std::string difference_from_replay(const Plan& plan);

/// Bytes of a class that live on the device for the whole step: persistent, or allocated before the first call.
int64_t standing_bytes(const Plan& plan, int stage, BufferClass cls);

/// Activation bytes that the forward of one layer leaves, by slot; the layer's output, which is the next one's input, is "y".
std::map<std::string, int64_t> kept_by_layer(const Plan& plan);
/// Their sum.
int64_t kept_bytes_of_layer(const Plan& plan);

/// The highest peak of the device's memory over the stages of a case's plan, unverified.
int64_t peak_of_case(const Case& c);

}  // namespace shardlab::testing
