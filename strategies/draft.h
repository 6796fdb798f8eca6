// What the passes of `lower` rewrite: a training step on its way to a plan.
//
// The model is a chain of UNITS: the embedding, each layer, the head. A unit kind has two segments, forward and backward,
// written once (build_step.cpp). A STAGE holds consecutive units, the buffers of their state, and a timetable of EVENTS:
// forward and backward of a unit for a micro-batch, and whatever the strategies add between them. Early passes rewrite segments
// (tensor parallel, recompute), later ones timetables (pipeline, accumulation, data parallel, ZeRO); `emit` turns the result into a
// plan. Lifetimes of what a unit makes follow from uses. Of the rest a strategy says how long it lives: for the whole step
// (`StageDraft::whole_step`), or from one event of the timetable to another (kAlloc and kFree).
#pragma once

#include <array>
#include <functional>
#include <iterator>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "plan/case.h"
#include "plan/plan.h"

namespace shardlab::strategies {

/// kDense: a layer with the feed-forward of a dense model, where other layers are mixtures of experts. kLocal: a layer that attends within
/// a window, where other layers attend to all before. kLocalDense: a layer that is both. A layer of a model whose layers are alike is of
/// kind kLayer.
enum class UnitKind : uint8_t { kEmbed, kLayer, kHead, kDense, kLocal, kLocalDense };
inline constexpr std::string_view kUnitNames[] = {"embed", "layer", "head", "dense", "local", "local_dense"};
inline constexpr size_t kUnitKinds = std::size(kUnitNames);
inline bool is_layer(UnitKind kind) { return kind != UnitKind::kEmbed && kind != UnitKind::kHead; }
inline std::string_view name_of(UnitKind kind) { return kUnitNames[static_cast<size_t>(kind)]; }
/// The kind of layer `layer` of a model.
UnitKind layer_kind(const Model& model, int64_t layer);

/// The kind of buffer that a slot of a unit's segment is bound to.
enum class Use : uint8_t {
  kLocal,          ///< the segment's own
  kParameter,      ///< a parameter of the unit
  kGradient,       ///< where that parameter's gradient accumulates
  kActivationIn,   ///< the unit's input, which the previous unit's forward made
  kActivationOut,  ///< the unit's output: the next unit's input
  kSaved,          ///< made by forward, consumed by backward of the same micro-batch
  kGradientIn,     ///< gradient of the unit's output
  kGradientOut,    ///< gradient of the unit's input: the previous unit's kGradientIn
  kLoss,           ///< the micro-batch's losses by sequence
  kNamed,          ///< a buffer of the stage: `StageDraft::named`, by unit and slot ("layers.3.loss_scale"), or by the slot's name
  kCarried,        ///< made by one piece of a segment that was cut, read by a later one of the same micro-batch
  kView,           ///< a view of another slot
};

/// Whether a slot of a unit holds rows of experts, or counts them: [groups of experts, rows or parts of tokens, ..]. Their names, or those
/// of the values that they are gradients of, begin with "rows.".
inline bool is_rows_of_experts(const Slot& slot) {
  std::string_view name = slot.name;
  if (name.starts_with("d.")) name.remove_prefix(2);
  return name.starts_with("rows.");
}

struct SlotUse {
  Use use = Use::kLocal;
  int parameter = -1;    ///< index into the unit kind's parameters, for kParameter and kGradient
  bool earlier = false;  ///< of a segment that was cut: an earlier piece has its storage ...
  bool later = false;    ///< ... and a later one still needs it
};

/// An op of `strategy`, with all else as it is by default.
Op make_op(Work work, std::vector<SlotId> reads, std::vector<SlotId> writes, std::string label, std::string_view strategy,
           StreamId stream = StreamId(0));

/// A segment with the meaning of its slots, and the small language in which passes write ops.
struct DraftSegment {
  Segment segment;
  std::vector<SlotUse> uses;  ///< by slot

  SlotId add(std::string name, Type type, Use use, BufferClass cls, int parameter = -1);
  /// A view of all of `base` under a new type: what an operation in place makes of it.
  SlotId add_view(std::string name, SlotId base, Type type);
  /// The slot called `name`; a bug if there is none.
  SlotId find(std::string_view name) const;
  std::optional<SlotId> find_if(std::string_view name) const;
  Slot& slot(SlotId id) { return segment.slots[id.index()]; }
  const Slot& slot(SlotId id) const { return segment.slots[id.index()]; }

  void op(Work work, std::vector<SlotId> reads, std::vector<SlotId> writes, std::string label, std::string_view strategy = "step");
};

/// One parameter of a unit kind: its suffix under the unit's name and what every unit of the kind shares.
struct UnitParameter {
  std::string name;  ///< "attn.wqkv"; for the embedding and head the whole name
  Type type;         ///< of the value on one rank
  ModelParameter::Kind kind = ModelParameter::Kind::kMatrix;
  bool residual_projection = false;
};

struct UnitTemplate {
  std::vector<UnitParameter> parameters;
  DraftSegment forward;
  DraftSegment backward;
};

/// A unit of the model: its kind, its layer, and its parameters in the plan.
struct Unit {
  UnitKind kind = UnitKind::kLayer;
  int layer = -1;
  size_t form = static_cast<size_t>(kind);  ///< which of the draft's templates: that of its kind, or a variant of it
  std::vector<ParameterId> parameters;      ///< by index in the template; a tied head names the embedding's table
};

/// The buffers of one parameter of one unit on a stage.
struct ParameterState {
  BufferId value;
  BufferId gradient;                      ///< accumulates this rank's micro-batches
  BufferId reduced;                       ///< what the optimizer reads: `gradient` until a pass reduces it
  std::vector<BufferId> optimizer_state;  ///< where a strategy has declared what an update keeps of it; else empty
  bool merged = false;  ///< its gradient has been added to the other copy of a tied weight: neither reduced nor updated by itself
};

/// One entry of a stage's timetable.
struct Event {
  enum class Kind : uint8_t {
    kForward,
    kBackward,  ///< gradients of the unit's input and of its parameters ...
    kInput,     ///< ... of its input alone ...
    kWeight,    ///< ... of its parameters alone, from what kInput left
    kReceive,
    kSend,
    kCall,
    kAlloc,
    kFree,
    kPark,     ///< what forward left for backward is copied to host memory, or through it to NVMe ...
    kVacate,   ///< ... its device storage is given up ...
    kRead,     ///< ... it comes from NVMe to host memory ...
    kFetch,    ///< ... and back to the device, ahead of backward ...
    kUnstage,  ///< ... what it took of host memory on its way, out or in, is given up ...
    kForget,   ///< ... and the storage in which it waited
  } kind = Kind::kCall;
  int unit = -1;
  int micro_batch = -1;
  bool gradients = false;  ///< of kReceive and kSend: backward traffic
  bool first = false;      ///< of kBackward and kWeight: overwrites the gradients rather than accumulating into them
  int storage = 0;         ///< of kBackward and kWeight: which copy of the gradients it writes (canonical accumulation)
  Call call;               ///< of kCall: fully bound
  int slot = 0;  ///< of what computes: the slot of the schedule that it belongs to; of kSend: that with which the copy is given up
  BufferId buffer;  ///< of kAlloc and kFree
  int braid =
      -1;  ///< of what computes: the event with the same number, of another micro-batch, runs piece by piece in turn with this one

  bool computes() const { return kind <= Kind::kWeight; }
  /// Whether the event makes the gradient of the unit's input, from values that forward left.
  bool goes_back() const { return kind == Kind::kBackward || kind == Kind::kInput; }
  /// Whether the event makes the gradients of the unit's parameters.
  bool makes_gradients() const { return kind == Kind::kBackward || kind == Kind::kWeight; }
};

inline Event alloc_event(BufferId buffer) { return {.kind = Event::Kind::kAlloc, .buffer = buffer}; }
inline Event free_event(BufferId buffer) { return {.kind = Event::Kind::kFree, .buffer = buffer}; }
inline Event call_event(Call call, int unit = -1, int micro_batch = -1) {
  return {.kind = Event::Kind::kCall, .unit = unit, .micro_batch = micro_batch, .call = std::move(call)};
}

/// Events to insert into a timetable, by index of an existing event. The order around that event is: events put before it; the
/// event; events released after it; events put after it. Within each of these, the order of the calls.
class Insertions {
 public:
  void before(size_t index, Event event) { at(before_, index).push_back(std::move(event)); }
  void release_after(size_t index, Event event) { at(released_, index).push_back(std::move(event)); }
  void after(size_t index, Event event) { at(after_, index).push_back(std::move(event)); }
  void apply(std::vector<Event>& events);

 private:
  using Lists = std::map<size_t, std::vector<Event>>;
  static std::vector<Event>& at(Lists& lists, size_t index) { return lists[index]; }
  Lists before_, released_, after_;
};

/// One optimizer op: a parameter, or the shard of a bucket.
struct Update {
  int unit = -1;  ///< of its gradient, or one of its bucket's
  BufferId gradient, value;
  std::vector<BufferId> state;  ///< what the optimizer keeps of it, in the order of its row (plan/optimizers.h)
  BufferId stored;              ///< what `value` is rounded into after the update, where it is a copy in fp32; else none
  bool decay = true;
  std::optional<Call> after;  ///< issued after every update (ZeRO-1 gathers the parameters)
};

/// Gradients that travel together: a flat buffer on a stage. The gradients of its parameters are views of the buffer.
struct Bucket {
  struct Member {
    int unit = 0, parameter = 0;
    int64_t offset = 0;
  };
  std::string name;
  std::vector<Member> members;
  int64_t elements = 0;  ///< padding included
  bool decay = true;
  bool tied = false;
  BufferId gradient;  ///< flat; none where nothing is trained
  BufferId padding;   ///< the tail of `gradient` beyond the members, or none
  BufferId reduced;   ///< flat, or this rank's shard
  int last_unit = 0;  ///< the unit whose backward completes it: the lowest
};

/// A part of the model on a stage: consecutive units.
struct PartDraft {
  int part = 0;
  int first_unit = 0, end_unit = 0;
};

struct StageDraft {
  Role role;
  std::vector<PartDraft> parts;                                     ///< in model order
  std::vector<int> units;                                           ///< of all parts, ascending
  std::vector<std::vector<ParameterState>> state;                   ///< [index_of(unit)][parameter]
  std::vector<std::vector<std::vector<BufferId>>> gradient_copies;  ///< [copy - 1][index_of(unit)][parameter]
  std::vector<BufferId> whole_step;                                 ///< allocated before the first event, freed after the last
  std::vector<BufferId> losses;                                     ///< by micro-batch, on the last stage
  std::vector<Event> events;
  std::vector<Bucket> buckets;
  std::vector<Update> updates;
  BufferId counted_elsewhere;   ///< the gradient of a tied table that another stage has too and counts in the norm, or none
  BufferId gradient_factor;     ///< f32[1] by which updates multiply gradients, or none
  BufferId unscale;             ///< f32[1] by which the loss scale is divided out of gradients, or none
  std::vector<BufferId> flags;  ///< i32[1], not 0 where the step must make no update, the same on every rank
  BufferId go;                  ///< i32[1], 0 where the step makes no update, or none: every step makes one
  std::map<std::string, BufferId, std::less<>> named;  ///< what slots of use kNamed are bound to

  /// The place of a unit that the stage holds among all that it holds.
  size_t index_of(int unit) const;
  ParameterState& at(int unit, int parameter) { return state[index_of(unit)][static_cast<size_t>(parameter)]; }
  const ParameterState& at(int unit, int parameter) const { return const_cast<StageDraft&>(*this).at(unit, parameter); }
  bool holds(int unit) const;
  /// Whether a unit is the first of a part.
  bool begins_part(int unit) const;
};

/// The whole draft. Passes are functions `void pass(Draft&)`. A pass need not check the case: `check(Case)` did.
struct Draft {
  Case config;
  Plan plan;  ///< mesh, comms, streams, parameters and registered segments grow here; roles come last
  /// By kind, empty where the model has no such unit; then variants of some (layers of which backward makes more again).
  std::vector<UnitTemplate> templates{kUnitKinds};
  std::vector<Unit> units;
  std::vector<StageDraft> stages;
  std::map<std::string, SegmentId> segment_cache;  ///< small segments by what they do
  bool training = true;

  UnitTemplate& of(UnitKind kind) { return templates[static_cast<size_t>(kind)]; }
  /// The kinds of layers that the model has; and those that are mixtures of experts.
  std::vector<UnitKind> layer_kinds() const;
  std::vector<UnitKind> mixture_kinds() const;
  bool is_mixture(UnitKind kind) const {
    return config.model.is_mixture() && (kind == UnitKind::kLayer || kind == UnitKind::kLocal);
  }
  UnitTemplate& of_unit(int unit) { return templates[units[static_cast<size_t>(unit)].form]; }
  const UnitTemplate& of_unit(int unit) const { return templates[units[static_cast<size_t>(unit)].form]; }
  int micro_batches() const { return static_cast<int>(config.train.grad_accumulation); }
  int unit_count() const { return static_cast<int>(units.size()); }
  /// The stage with the embedding, and that with the head, which knows the losses.
  StageDraft& embedding_stage();
  StageDraft& head_stage();

  /// The stream or communicator called so, made when it is new.
  StreamId stream(std::string_view name);
  CommId comm(std::string_view name, AxisSet axes, Groups groups = {});
  /// A registered segment for `key`, built by `build` the first time.
  template <class Build>
  SegmentId cached(const std::string& key, const Build& build) {
    if (const auto found = segment_cache.find(key); found != segment_cache.end()) return found->second;
    return segment_cache[key] = register_segment(build());
  }
  SegmentId register_segment(Segment segment);
  /// The algorithm of the case for groups over `axes`.
  Algorithm algorithm() const;
};

/// Rows that a rank's own tokens make in a micro-batch where routes are even: of a sequence that several ranks route parts of, an equal part.
int64_t even_rows_of_experts(const Case& c);

/// Adds a buffer to a stage and returns its id.
BufferId add_buffer(StageDraft& stage, Buffer buffer);
/// The same type with one axis placed otherwise, or several.
Type placed(Type type, int axis, Placement placement);
Type placed(Type type, AxisSet axes, Placement placement);
/// The axes along which ranks that share one set of shards have other sequences: "dp", and "node" where a secondary shard cuts them in
/// two, or "ep" where they share experts.
AxisSet sequence_axes(const Mesh& mesh);
/// Within a context-parallel group the ranks that exchange heads, where others pass keys around a ring (cp_kind: usp).
inline constexpr std::string_view kHeadsAxis = "ulysses";
/// The axes along which ranks have other parts of the same sequences: "cp", and within it `kHeadsAxis`.
AxisSet context_axes(const Mesh& mesh);
/// Within a tensor-parallel group the ranks that cut each expert, where fewer do than cut all else (expert_tp).
inline constexpr std::string_view kSlicesAxis = "etp";
/// The axes along which matrices are cut: "tp", and within it `kSlicesAxis`.
AxisSet tensor_axes(const Mesh& mesh);
/// Those along which each expert is cut. None where experts are whole.
AxisSet slice_axes(const Draft& draft);
/// The axes along which ranks have other tokens of the same sequences when these are routed: `context_axes`, and "tp" where its ranks have
/// other experts. None where ranks route whole sequences.
AxisSet routed_axes(const Draft& draft);
/// Of the axes along which gradients are summed those along which ranks share the experts of each layer: those of context parallelism, and
/// "ep" where more ranks do. None where every rank has all experts, or ranks of "tp" alone share them.
AxisSet expert_axes(const Draft& draft);
/// The axes along which ranks that share one set of shards have other tokens: `sequence_axes` and
/// `context_axes`. Gradients are summed over them.
AxisSet data_axes(const Mesh& mesh);
/// The axes along which scalars over `name` are reduced: `data_axes` for "dp", `sequence_axes` for "sequences", `tensor_axes` for "tp", else
/// the axis called `name`.
AxisSet axes_of(const Mesh& mesh, std::string_view name);
/// A call whose slots are bound to `binding` in order.
Call bind(SegmentId segment, std::vector<BufferId> binding, int layer = -1, int micro_batch = -1);
/// A segment of one op over bound slots: each buffer becomes one slot of its own type; `reads` and `writes` index `buffers`.
Segment one_op_segment(std::string name, const StageDraft& stage, const std::vector<BufferId>& buffers, Op op,
                       const std::vector<int>& reads, const std::vector<int>& writes);

/// The slot that owns the storage of `slot`: itself, or that which it is a view of.
SlotId root_of(const Segment& segment, SlotId slot);
/// Whether a slot of `a` and a slot of `b` share storage.
bool meet(const Segment& segment, const std::vector<SlotId>& a, const std::vector<SlotId>& b);
/// Whether two ops may change places: neither writes what the other reads or writes.
bool independent(const Segment& segment, const Op& a, const Op& b);

/// The role of a unit's segment; its allocations and frees follow from the role. `kForwardOnly` (validation) saves nothing.
enum class SegmentRole : uint8_t { kForward, kBackward, kForwardOnly };

/// Whether a segment of this role allocates, or frees, the storage of a slot of this use. A piece of one leaves that to the first, or
/// to the last, of the pieces that touch the slot.
bool allocates(const SlotUse& use, SegmentRole role);
bool frees(const SlotUse& use, SegmentRole role);

/// Inserts allocations before first writes and frees after last uses into a unit's segment.
void place_lifetimes(DraftSegment& segment, SegmentRole role);

/// A segment cut in pieces: each has the ops that `piece_of` gives it, 0 to pieces - 1, in the order in which they were. What crosses
/// from a piece to a later one is bound by both: the first allocates it, the last that touches it frees it.
std::vector<DraftSegment> cut(const DraftSegment& whole, const std::vector<std::string>& names,
                              const std::function<size_t(const Op&)>& piece_of);

/// Turns the finished draft into a plan.
Plan emit(Draft draft);

}  // namespace shardlab::strategies
