// Techniques: one row each says when a case uses it, what its settings must be, and what it cannot be combined with and why.
//
// `check(const Case&)` refuses what a row here refuses; the catalogue of strategies asks a row whether its pass runs; the tests of
// pairs and docs/compatibility.md deal the values of `choices`. To add a technique, add its row to plan/techniques.cpp.
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "plan/base/result.h"
#include "plan/case.h"

namespace shardlab {

/// A fact of a case that rows speak of: "zero=3", "guard".
struct Fact {
  bool (*holds)(const Case&);
  std::string (*text)(const Case&);
};

/// Why a technique and a fact do not go together, and what to set instead. A reason that begins with a comma or a space goes on
/// from the fact.
/// The refusal reads "TECHNIQUE with FACT: REASON", then "INSTEAD".
struct Apart {
  Fact from;
  std::string_view because;
  std::string_view instead;
};

/// A value of a key that turns a technique on, for the tests of pairs. `set` also sets what the value requires: a schedule needs stages.
struct Choice {
  std::string_view name;  ///< "zero: 1", as docs/compatibility.md prints it. Choices of one key exclude one another
  void (*set)(Case&);
};

/// One row.
struct Technique {
  std::string_view id;                           ///< the name of its pass in the catalogue of strategies, if it has one
  bool (*on)(const Case&);                       ///< whether the case uses it
  std::string (*text)(const Case&) = nullptr;    ///< how a refusal names it: "diloco.steps=4"
  std::span<const Apart> apart = {};             ///< what it cannot be combined with, in the order in which it is refused
  std::string_view or_else = {};                 ///< ends the advice of every row: "or diloco.steps: 0"
  Result<void> (*check)(const Case&) = nullptr;  ///< then its own settings: ranges, and whatever counts
  std::span<const Choice> choices = {};
};

/// Every technique, in the order in which `check` asks them.
std::span<const Technique> techniques();
/// The row of that id. A bug if there is none.
const Technique& technique(std::string_view id);

/// The first refusal of a technique that is on.
Result<void> check_techniques(const Case& c);

// Facts that passes ask for by name.

/// Whether parameters wait in host memory or on NVMe.
inline bool parks_parameters(const Case& c) { return c.layout.offload.parameters != OffloadTo::kNone; }
/// Whether workers may be steps apart: a parameter server with a staleness.
inline bool runs_apart(const Case& c) { return c.layout.parameter_server.staleness >= 0; }
/// Whether the two gradients of a tied table are added before they are reduced, as soon as both are whole. Otherwise they are added last.
bool tied_gradients_meet_early(const Case& c);
/// Whether updates are made before all stages know of each other's gradients.
inline bool validates_later(const Case& c) { return c.train.post_validation > 0; }
/// Whether a rank has room for fewer rows of experts than may come: a step in which more come is made again.
inline bool bounds_experts(const Case& c) { return c.layout.expert_bound > 0; }
/// The case of a step's second run (`bounds_experts`): the same sequences one at a time, with room for all rows of each.
Case second_run_of(Case c);
/// Whether b micro-batches of the second run have the rows of one micro-batch of the first run, b the sequences of a micro-batch of the first run:
/// the ranks that share experts then have the same sequences in both runs. Canonical mode deals each micro-batch out over all data ranks, so a
/// smaller group that shares experts has other sequences.
inline bool second_run_keeps_micro_batches(const Case& c) { return !c.canonical || c.layout.expert_shards_of_dp() == c.layout.dp; }
/// Whether a step may be given up: an overflow of the loss scale, or the guard.
inline bool may_skip(const Case& c) { return c.train.precision == Precision::kFp16 || c.train.guard.any(); }

}  // namespace shardlab
