// A role's program with segments expanded: per-stream instruction lists with the edges that order them.
//
// Edges are derived from what ops read and write on shared storage (read after write, write after read, write after write), from
// allocations (which precede every use) and frees (which follow every use). Only edges that the streams' own order does not already
// imply are kept. Operations of one communicator run in issue order, whatever their streams are; a shard view counts as touching
// the shards of the whole group. An edge "wait for stream s to have completed n instructions" is a CUDA event or a counter.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "plan/plan.h"

namespace shardlab {

/// Storage of one operand on a rank: a byte range of an arena or, when it is a shard view, one that depends on the rank.
struct Operand {
  BufferId root;       ///< role buffer that owns the storage, or none for a segment local
  int32_t local = -1;  ///< index into Program::locals when it is a segment local
  int64_t offset = 0;  ///< bytes from the start of the owner, before the shard index
  int64_t bytes = 0;
  AxisSet shard_axes;        ///< the rank's index along these, times `shard_stride`, is added to the offset
  int64_t shard_stride = 0;  ///< bytes of one shard: `bytes`, unless the operand is a part of the shard
  const Type* type = nullptr;
};

/// A local of one call: storage of its own for the length of that call.
struct LocalBuffer {
  int32_t call = -1;  ///< index of the Call in Role::program
  SlotId slot;
  int64_t bytes = 0;  ///< aligned
  Space space = Space::kDevice;
  BufferClass cls = BufferClass::kTemporary;
};

/// `stream` must have completed at least `count` of its instructions.
struct Wait {
  int32_t stream = 0;
  int32_t count = 0;
};

struct Instruction {
  enum class Kind : uint8_t { kRun, kAlloc, kFree } kind = Kind::kRun;
  const Op* op = nullptr;            ///< of kRun
  const Segment* segment = nullptr;  ///< within a call
  int32_t id = -1;                   ///< position in issue order: with the rank, the key of every trace event
  int32_t call = -1;                 ///< index of the Call in Role::program, -1 outside
  int32_t layer = -1;
  int32_t micro_batch = -1;
  int32_t stream = 0;
  int32_t sequence = 0;        ///< position within its stream
  uint32_t first_operand = 0;  ///< into Program::operands: reads, then writes, then the predicate if any
  uint16_t reads = 0, writes = 0;
  bool predicate = false;
  BufferId buffer;     ///< of kAlloc and kFree: a role buffer ...
  int32_t local = -1;  ///< ... or a local
  int32_t role = -1;   ///< whose program it is in
  SlotId slot;         ///< of kAlloc and kFree within a segment
  uint32_t first_wait = 0;
  uint32_t waits = 0;
};

/// The expanded program of one role. Holds pointers into the plan, which must outlive it.
struct Program {
  int role = 0;
  std::vector<Instruction> instructions;      ///< in issue order
  std::vector<std::vector<int32_t>> streams;  ///< instruction ids by stream, in order
  std::vector<Operand> operands;
  std::vector<LocalBuffer> locals;
  std::vector<Wait> waits;

  std::span<const Operand> reads(const Instruction& i) const { return {operands.data() + i.first_operand, i.reads}; }
  std::span<const Operand> writes(const Instruction& i) const { return {operands.data() + i.first_operand + i.reads, i.writes}; }
  std::span<const Wait> waits_of(const Instruction& i) const { return {waits.data() + i.first_wait, i.waits}; }
};

/// Expands the program of role `role` and derives its edges. The plan should have passed `verify`; a malformed one is a bug.
Program expand_program(const Plan& plan, int role);

/// "layers.3 m2 layer.F attn.qkv linear.F", "layers.3 m2 layer.F alloc %qkv", "free %x0@m1": how messages name an instruction.
std::string describe(const Plan& plan, const Instruction& instruction);

}  // namespace shardlab
