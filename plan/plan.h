// The plan: who computes what, where and in which order, for one period (one optimizer step).
//
// Two levels keep it small. A SEGMENT is the op list of one layer kind and phase, written once over named slots. A ROLE
// (all ranks of one pipeline stage) has buffers and a PROGRAM: calls of segments with slots bound to buffers, and the
// allocations and frees between them. Ranks are never named: a plan for 16,384 ranks is as small as its roles.
//
// Issue order is the order of the program with segments expanded. Each op runs on a stream, in issue order there; ops of
// different streams are ordered only by derived edges (plan/program.h). Stream 0, "compute", is the control stream: alloc
// and free happen on it in issue order, and a free waits for every earlier use of the buffer. Live bytes are thus a function of
// the text alone.
#pragma once

#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "plan/base/token_order.h"
#include "plan/expert_placement.h"
#include "plan/model.h"
#include "plan/op.h"

namespace shardlab {

inline constexpr int kPlanVersion = 1;

/// Streams a plan may name.
inline constexpr int kMaxStreams = 32;

/// The kind of a slot: it says who allocates the storage.
enum class SlotKind : uint8_t {
  kBound,  ///< bound by every call to a buffer of the role
  kLocal,  ///< the segment's own: must be allocated and freed in its body
};

/// A formal operand. Bound slots must be given a buffer of exactly this type, class and space.
/// A slot that is a view names its base slot; its buffer is derived from the base's and is not bound.
struct Slot {
  std::string name;
  Type type;
  BufferClass cls = BufferClass::kTemporary;
  Space space = Space::kDevice;
  SlotKind kind = SlotKind::kLocal;
  std::optional<View> view;
  SlotId count;  ///< scalar that says how many rows are used, or none
};

struct AllocSlot {
  SlotId slot;
};
struct FreeSlot {
  SlotId slot;
};
using Step = std::variant<Op, AllocSlot, FreeSlot>;

/// The ops of one layer kind and phase, in issue order.
struct Segment {
  std::string name;  ///< "layer.F", "layer.B", "head.F"
  std::vector<Slot> slots;
  std::vector<Step> steps;
};

/// One instance of a segment. `binding[i]` is the buffer of slot i for bound slots that are no views, none otherwise.
struct Call {
  SegmentId segment;
  int layer = -1;        ///< index in the model of the layer it works for, or -1
  int micro_batch = -1;  ///< or -1
  std::vector<BufferId> binding;
};
struct Alloc {
  BufferId buffer;
};
struct Free {
  BufferId buffer;
};
using Item = std::variant<Call, Alloc, Free>;

/// All ranks at one coordinate of the pipeline axis share one role.
struct Role {
  int stage = 0;
  std::vector<Buffer> buffers;
  std::vector<Item> program;
};

/// How a parameter starts. Values are drawn per logical element.
enum class Initial : uint8_t { kZeros, kOnes, kNormal };

/// One parameter of the model, by its stable name. Its type is the type of its buffer on one rank.
struct Parameter {
  std::string name;  ///< "layers.3.attn.wqkv"
  Type type;
  /// Stages that hold the parameter, ascending: one stage, the two stages that use a tied embedding, or a stage and its
  /// mirror image (DualPipe).
  std::vector<int> stages{0};
  Initial initial = Initial::kNormal;
  float deviation = 0.02f;  ///< of kNormal
  bool decay = true;        ///< takes weight decay: matrices do, norms and biases do not
  uint32_t tensor = 0;      ///< its number in random keys: the same on every layout
};

struct Plan {
  std::string name;
  Mesh mesh;
  int micro_batches = 1;
  int64_t sequences_per_micro_batch = 1;  ///< on one rank
  /// Which sequences of a step a rank's micro-batch takes. Of the axes that share the sequences out, those in `together` come after
  /// the micro-batch: rank (o, i), o along the other axes and i along these, takes in micro-batch j the b sequences from
  /// ((o m + j) n + i) b on. Empty: what one rank adds up is contiguous. With an axis in it each micro-batch is contiguous over
  /// that axis, and may be reduced there by itself in the order of a tree over sequences.
  AxisSet together;
  TokenOrder token_order;                         ///< of every sequence, as it lies in tokens, activations and their gradients
  std::vector<ExpertPlacement> expert_placement;  ///< of layers whose experts do not lie in order, ascending
  std::vector<std::string> streams;               ///< [0] is "compute"
  std::vector<Comm> comms;
  std::vector<Parameter> parameters;
  std::vector<Segment> segments;
  std::vector<Role> roles;              ///< by coordinate on the pipeline axis
  std::vector<std::string> strategies;  ///< the passes applied, in order
  int period = 1;                       ///< optimizer steps that the program spans
};

}  // namespace shardlab
