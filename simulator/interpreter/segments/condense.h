// A plan with its control streams condensed: what nobody outside can tell apart is one entry.
//
// A STRETCH is a run of instructions of a control stream (stream 0) of which only the first waits for another stream, only the last
// is waited for, none meets another stage, and which the host launches one after the other. Nothing outside it can see, or change
// but by sharing the device, what happens inside. Stretches are short texts: PIECES (the ops of one call, or of the part of it that
// lies within the stretch) and how often each is repeated; equal ones are written once. Every other instruction is an entry of its
// own. A step of 8 stages, 12 layers each, and 64 micro-batches is 450,000 instructions, 3,600 entries, and some thirty stretches.
//
// Nothing here knows seconds: a plan is condensed once, and priced as often as one likes.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "plan/plan.h"
#include "plan/program.h"
#include "simulator/interpreter/cost_model.h"
#include "simulator/interpreter/peers.h"
#include "simulator/interpreter/segments/beside.h"

namespace shardlab::simulator::segments {

/// Whether a compute op of a segment has one price, or one on each stage (devices of several kinds).
enum class Compute : uint8_t { kAlike, kByStage };

/// An op that has a price of its own: one op of a segment, and where it communicates, or stages compute differently, one stage's.
struct AskedOp {
  Instruction example;  ///< its first instruction
  Spent spent = Spent::kCompute;
  CommId comm;                  ///< the communicator, if the entry communicates
  bool receives = false;        ///< it is a receive
  Communication communication;  ///< the kind of communication, if the entry communicates
  bool moves = true;            ///< false where its group is one rank: it does nothing
};

/// Ops that follow one another, as indices into `Condensed::ops`.
struct Piece {
  std::vector<int32_t> ops;
};

struct Repeated {
  int32_t piece = 0;
  int32_t times = 1;
  friend auto operator<=>(const Repeated&, const Repeated&) = default;
};

struct Stretch {
  std::vector<Repeated> pieces;
};

/// One instruction of a condensed stream. With neither stretch nor op it only waits (allocations and frees).
struct Entry {
  int32_t stretch = -1;
  int32_t op = -1;       ///< a single op beside the control stream, or that meets other stages
  int32_t meeting = -1;  ///< of such an op: index into `Condensed::parties`
  bool sender = false;   ///< of a message: the receiver moves it
  bool awaited = false;  ///< somebody waits for its end
  uint32_t first_wait = 0, waits = 0;
  int32_t launches = 0;  ///< ops that the host launches before its first
  friend bool operator==(const Entry&, const Entry&) = default;
};

/// One stage. `Wait::count` counts entries.
struct StageEntries {
  std::vector<std::vector<Entry>> streams;
  std::vector<Wait> waits;

  std::span<const Wait> waits_of(const Entry& e) const { return {waits.data() + e.first_wait, e.waits}; }
};

struct Condensed {
  std::vector<AskedOp> ops;
  std::vector<Piece> pieces;
  std::vector<Stretch> stretches;
  std::vector<int32_t> parties;  ///< by meeting of several stages: how many
  std::vector<StageEntries> stages;
  int64_t instructions = 0;

  int64_t entries() const;
};

/// Condenses the programs of a plan, one representative a stage. Instructions are copied; segments and ops of `plan`
/// are pointed to.
Condensed condense(const Plan& plan, std::span<const Program> programs, Compute compute = Compute::kAlike);
/// The same, expanding one role after the other.
Condensed condense(const Plan& plan, Compute compute = Compute::kAlike);

}  // namespace shardlab::simulator::segments
