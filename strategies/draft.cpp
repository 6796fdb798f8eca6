#include "strategies/draft.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

namespace shardlab::strategies {

SlotId DraftSegment::add(std::string name, Type type, Use use, BufferClass cls, int parameter) {
  SHARDLAB_CHECK(!find_if(name), "segment {} has two slots called {}", segment.name, name);
  Slot slot;
  slot.name = std::move(name);
  slot.type = std::move(type);
  slot.cls = cls;
  slot.kind = use == Use::kLocal ? SlotKind::kLocal : SlotKind::kBound;
  segment.slots.push_back(std::move(slot));
  uses.push_back({use, parameter});
  return SlotId(static_cast<int32_t>(segment.slots.size()) - 1);
}

SlotId DraftSegment::add_view(std::string name, SlotId base, Type type) {
  const SlotId root = slot(base).view ? SlotId(slot(base).view->base) : base;
  const BufferClass cls = slot(root).cls;
  const SlotId id = add(std::move(name), std::move(type), Use::kView, cls);
  slot(id).kind = slot(root).kind;
  slot(id).view = View{root.value, 0, {}};
  return id;
}

std::optional<SlotId> DraftSegment::find_if(std::string_view name) const {
  for (size_t i = 0; i < segment.slots.size(); ++i)
    if (segment.slots[i].name == name) return SlotId(static_cast<int32_t>(i));
  return std::nullopt;
}

SlotId DraftSegment::find(std::string_view name) const {
  const auto found = find_if(name);
  SHARDLAB_CHECK(found.has_value(), "segment {} has no slot called {}", segment.name, name);
  return *found;
}

Op make_op(Work work, std::vector<SlotId> reads, std::vector<SlotId> writes, std::string label, std::string_view strategy,
           StreamId stream) {
  Op op;
  op.work = std::move(work);
  op.reads = std::move(reads);
  op.writes = std::move(writes);
  op.label = std::move(label);
  op.stream = stream;
  op.strategy = strategy;
  return op;
}

void DraftSegment::op(Work work, std::vector<SlotId> reads, std::vector<SlotId> writes, std::string label,
                      std::string_view strategy) {
  segment.steps.emplace_back(make_op(std::move(work), std::move(reads), std::move(writes), std::move(label), strategy));
}

size_t StageDraft::index_of(int unit) const {
  const auto found = std::ranges::lower_bound(units, unit);
  SHARDLAB_CHECK(found != units.end() && *found == unit, "stage {} does not hold unit {}", role.stage, unit);
  return static_cast<size_t>(found - units.begin());
}

bool StageDraft::holds(int unit) const { return std::ranges::binary_search(units, unit); }

bool StageDraft::begins_part(int unit) const { return std::ranges::find(parts, unit, &PartDraft::first_unit) != parts.end(); }

UnitKind layer_kind(const Model& model, int64_t layer) {
  const bool dense = model.is_mixture() && !model.is_mixture(layer);
  const bool local = model.is_local(layer) && model.local_layers() < model.layers;
  return dense ? (local ? UnitKind::kLocalDense : UnitKind::kDense) : local ? UnitKind::kLocal : UnitKind::kLayer;
}

std::vector<UnitKind> Draft::layer_kinds() const {
  std::vector<UnitKind> kinds;
  for (const UnitKind kind : {UnitKind::kLayer, UnitKind::kDense, UnitKind::kLocal, UnitKind::kLocalDense})
    if (std::ranges::find(units, kind, &Unit::kind) != units.end()) kinds.push_back(kind);
  return kinds;
}

std::vector<UnitKind> Draft::mixture_kinds() const {
  std::vector<UnitKind> kinds = layer_kinds();
  std::erase_if(kinds, [&](UnitKind kind) { return !is_mixture(kind); });
  return kinds;
}

StageDraft& Draft::embedding_stage() {
  return *std::ranges::find_if(stages, [](const StageDraft& stage) { return stage.holds(0); });
}

StageDraft& Draft::head_stage() {
  return *std::ranges::find_if(stages, [&](const StageDraft& stage) { return stage.holds(unit_count() - 1); });
}

StreamId Draft::stream(std::string_view name) {
  const auto found = std::ranges::find(plan.streams, name);
  if (found != plan.streams.end()) return StreamId(static_cast<int32_t>(found - plan.streams.begin()));
  plan.streams.emplace_back(name);
  return StreamId(static_cast<int32_t>(plan.streams.size()) - 1);
}

CommId Draft::comm(std::string_view name, AxisSet axes, Groups groups) {
  const auto found = std::ranges::find(plan.comms, name, &Comm::name);
  if (found != plan.comms.end()) {
    SHARDLAB_CHECK(found->axes == axes && found->groups == groups, "communicator {} is asked for with other axes or groups", name);
    return CommId(static_cast<int32_t>(found - plan.comms.begin()));
  }
  plan.comms.push_back({std::string(name), axes, std::move(groups)});
  return CommId(static_cast<int32_t>(plan.comms.size()) - 1);
}

SegmentId Draft::register_segment(Segment segment) {
  const auto taken = [&](const std::string& name) {
    return std::ranges::any_of(plan.segments, [&](const Segment& s) { return s.name == name; });
  };
  const std::string name = segment.name;
  for (int n = 2; taken(segment.name); ++n) segment.name = fmt::format("{}.{}", name, n);  // the text of a plan calls by name
  plan.segments.push_back(std::move(segment));
  return SegmentId(static_cast<int32_t>(plan.segments.size()) - 1);
}

Algorithm Draft::algorithm() const {
  if (config.canonical) return Algorithm::kDirect;
  switch (config.layout.collective_algorithm) {
    case AlgorithmChoice::kHalvingDoubling: return Algorithm::kHalvingDoubling;
    case AlgorithmChoice::kDirect: return Algorithm::kDirect;
    case AlgorithmChoice::kTree: return Algorithm::kTree;
    case AlgorithmChoice::kHierarchical: return Algorithm::kHierarchical;
    case AlgorithmChoice::kAuto:
    case AlgorithmChoice::kRing: return Algorithm::kRing;
  }
  return Algorithm::kRing;
}

void Insertions::apply(std::vector<Event>& events) {
  std::vector<Event> all;
  const auto put = [&](Lists& lists, size_t index) {
    const auto found = lists.find(index);
    if (found == lists.end()) return;
    for (Event& e : found->second) all.push_back(std::move(e));
  };
  for (size_t i = 0; i < events.size(); ++i) {
    put(before_, i);
    all.push_back(std::move(events[i]));
    put(released_, i);
    put(after_, i);
  }
  events = std::move(all);
}

BufferId add_buffer(StageDraft& stage, Buffer buffer) {
  stage.role.buffers.push_back(std::move(buffer));
  return BufferId(static_cast<int32_t>(stage.role.buffers.size()) - 1);
}

Type placed(Type type, int axis, Placement placement) {
  type.place[static_cast<size_t>(axis)] = placement;
  return type;
}

Type placed(Type type, AxisSet axes, Placement placement) {
  for (int axis = 0; axis < kMaxAxes; ++axis)
    if (axes.contains(axis)) type = placed(std::move(type), axis, placement);
  return type;
}

AxisSet sequence_axes(const Mesh& mesh) {
  AxisSet axes = AxisSet::of(mesh.axis("dp"));
  if (const auto ep = mesh.find("ep"); ep && mesh.size("dp") == 1) return AxisSet::of(*ep);
  for (const std::string_view inner : {"node", "ep"})
    if (const auto axis = mesh.find(inner)) axes = axes | AxisSet::of(*axis);
  return axes;
}

AxisSet context_axes(const Mesh& mesh) {
  const AxisSet cp = AxisSet::of(mesh.axis("cp"));
  const auto heads = mesh.find(kHeadsAxis);
  return heads ? cp | AxisSet::of(*heads) : cp;
}

AxisSet tensor_axes(const Mesh& mesh) {
  const AxisSet tp = AxisSet::of(mesh.axis("tp"));
  const auto slices = mesh.find(kSlicesAxis);
  return slices ? tp | AxisSet::of(*slices) : tp;
}

AxisSet slice_axes(const Draft& draft) {
  if (const auto slices = draft.plan.mesh.find(kSlicesAxis)) return AxisSet::of(*slices);
  return draft.config.layout.folds_experts() ? AxisSet{} : AxisSet::of(draft.plan.mesh.axis("tp"));
}

AxisSet routed_axes(const Draft& draft) {
  const Layout& l = draft.config.layout;
  const AxisSet cp = l.cp > 1 ? context_axes(draft.plan.mesh) : AxisSet{};
  return l.folds_experts() ? cp | AxisSet::of(draft.plan.mesh.axis("tp")) : cp;
}

int64_t even_rows_of_experts(const Case& c) {
  const Experts& e = c.model.experts;
  return c.train.micro_batch * e.most_rows(c.train.seq_len, e.count) / c.layout.routed_parts();
}

AxisSet expert_axes(const Draft& draft) {
  const Layout& l = draft.config.layout;
  if (l.ep == 1) return {};
  const auto ep = draft.plan.mesh.find("ep");
  const AxisSet over_dp = ep ? AxisSet::of(*ep) : AxisSet{};
  return l.cp > 1 ? over_dp | context_axes(draft.plan.mesh) : over_dp;
}

AxisSet data_axes(const Mesh& mesh) {
  const AxisSet cp = context_axes(mesh);
  if (mesh.size(cp) == 1) return sequence_axes(mesh);
  return mesh.size(sequence_axes(mesh)) == 1 ? cp : sequence_axes(mesh) | cp;
}

AxisSet axes_of(const Mesh& mesh, std::string_view name) {
  if (name == "dp") return data_axes(mesh);
  if (name == "tp") return tensor_axes(mesh);
  return name == "sequences" ? sequence_axes(mesh) : AxisSet::of(mesh.axis(name));
}

Call bind(SegmentId segment, std::vector<BufferId> binding, int layer, int micro_batch) {
  Call call;
  call.segment = segment;
  call.layer = layer;
  call.micro_batch = micro_batch;
  call.binding = std::move(binding);
  return call;
}

Segment one_op_segment(std::string name, const StageDraft& stage, const std::vector<BufferId>& buffers, Op op,
                       const std::vector<int>& reads, const std::vector<int>& writes) {
  Segment segment;
  segment.name = std::move(name);
  for (size_t i = 0; i < buffers.size(); ++i) {
    const Buffer& buffer = stage.role.buffers[buffers[i].index()];
    Slot slot;
    constexpr size_t kLetters = 26;
    slot.name = i < kLetters ? std::string(1, static_cast<char>('a' + i)) : "a" + std::to_string(i);
    slot.type = buffer.type;
    slot.cls = buffer.kind;
    slot.space = buffer.space;
    slot.kind = SlotKind::kBound;
    segment.slots.push_back(std::move(slot));
  }
  for (const int r : reads) op.reads.emplace_back(r);
  for (const int w : writes) op.writes.emplace_back(w);
  segment.steps.emplace_back(std::move(op));
  return segment;
}

SlotId root_of(const Segment& segment, SlotId slot) {
  const auto& view = segment.slots[slot.index()].view;
  return view ? SlotId(view->base) : slot;
}

bool meet(const Segment& segment, const std::vector<SlotId>& a, const std::vector<SlotId>& b) {
  return std::ranges::any_of(
      a, [&](SlotId x) { return std::ranges::any_of(b, [&](SlotId y) { return root_of(segment, x) == root_of(segment, y); }); });
}

bool independent(const Segment& segment, const Op& a, const Op& b) {
  return !meet(segment, a.writes, b.reads) && !meet(segment, a.reads, b.writes) && !meet(segment, a.writes, b.writes);
}

namespace {

/// A collective that runs beside the compute stream.
bool is_beside(const Op& op) { return op.stream != StreamId(0) && std::holds_alternative<Collective>(op.work); }

/// The first op of the compute stream that reads what op `i` writes; -1 where none does.
int first_reader(const Segment& segment, size_t i) {
  const Op& made = std::get<Op>(segment.steps[i]);
  for (size_t k = i + 1; k < segment.steps.size(); ++k) {
    const Op& op = std::get<Op>(segment.steps[k]);
    if (op.stream == StreamId(0) && meet(segment, op.reads, made.writes)) return static_cast<int>(k);
  }
  return -1;
}

}  // namespace

bool allocates(const SlotUse& slot, SegmentRole role) {
  const Use use = slot.use;
  if (slot.earlier) return false;
  if (use == Use::kLocal || use == Use::kCarried) return true;
  return role == SegmentRole::kBackward ? use == Use::kGradientOut : use == Use::kSaved || use == Use::kActivationOut;
}

bool frees(const SlotUse& slot, SegmentRole role) {
  const Use use = slot.use;
  if (slot.later) return false;
  if (use == Use::kLocal || use == Use::kCarried) return true;
  switch (role) {
    case SegmentRole::kForward: return false;
    case SegmentRole::kForwardOnly: return use == Use::kSaved || use == Use::kActivationIn;
    case SegmentRole::kBackward: return use == Use::kSaved || use == Use::kGradientIn || use == Use::kActivationIn;
  }
  return false;
}

void place_lifetimes(DraftSegment& draft, SegmentRole role) {
  Segment& segment = draft.segment;
  std::erase_if(segment.steps, [](const Step& s) { return !std::holds_alternative<Op>(s); });
  const size_t slots = segment.slots.size();
  std::vector<int> first(slots, -1), last(slots, -1);
  for (size_t i = 0; i < segment.steps.size(); ++i) {
    const Op& op = std::get<Op>(segment.steps[i]);
    for (const auto* operands : {&op.reads, &op.writes})
      for (const SlotId slot : *operands) {
        const size_t root = root_of(segment, slot).index();
        if (first[root] < 0) first[root] = static_cast<int>(i);
        last[root] = static_cast<int>(i);
      }
  }
  // A free makes the compute stream wait for all that touch the storage. What a collective of another stream touches last is given up
  // where the compute stream waits for that collective in any case.
  for (size_t i = 0; i < segment.steps.size(); ++i) {
    const Op& op = std::get<Op>(segment.steps[i]);
    if (!is_beside(op)) continue;
    const int waits = first_reader(segment, i);
    for (const SlotId slot : op.reads)
      if (int& end = last[root_of(segment, slot).index()]; end == static_cast<int>(i)) end = std::max(end, waits);
  }
  std::vector<Step> steps;
  for (size_t i = 0; i < segment.steps.size(); ++i) {
    for (size_t s = 0; s < slots; ++s)
      if (first[s] == static_cast<int>(i) && allocates(draft.uses[s], role))
        steps.emplace_back(AllocSlot{SlotId(static_cast<int32_t>(s))});
    steps.push_back(std::move(segment.steps[i]));
    for (size_t s = 0; s < slots; ++s)
      if (last[s] == static_cast<int>(i) && frees(draft.uses[s], role))
        steps.emplace_back(FreeSlot{SlotId(static_cast<int32_t>(s))});
  }
  // What backward consumes without reading it (an input that only recompute needed, say) is given back first.
  for (size_t s = 0; s < slots; ++s)
    if (first[s] < 0 && !segment.slots[s].view && frees(draft.uses[s], role) && draft.uses[s].use != Use::kLocal)
      steps.insert(steps.begin(), FreeSlot{SlotId(static_cast<int32_t>(s))});
  segment.steps = std::move(steps);
}

namespace {

/// The pieces that touch each slot of a segment, by the slot that owns its storage; none: -1.
struct Touch {
  int first = -1, last = -1;
};

std::vector<Touch> touches_of(const DraftSegment& whole, size_t pieces, const std::vector<size_t>& piece) {
  std::vector<Touch> all(whole.uses.size());
  for (size_t i = 0; i < whole.segment.steps.size(); ++i) {
    const Op& op = std::get<Op>(whole.segment.steps[i]);
    const int p = static_cast<int>(piece[i]);
    SHARDLAB_CHECK(piece[i] < pieces, "op {} of {} is in piece {} of {}", op.label, whole.segment.name, p, pieces);
    for (const auto* operands : {&op.reads, &op.writes})
      for (const SlotId slot : *operands) {
        Touch& touch = all[root_of(whole.segment, slot).index()];
        touch.first = touch.first < 0 ? p : std::min(touch.first, p);
        touch.last = std::max(touch.last, p);
      }
  }
  // What a collective of another stream reads stays until the piece that waits for the collective.
  for (size_t i = 0; i < whole.segment.steps.size(); ++i) {
    const Op& op = std::get<Op>(whole.segment.steps[i]);
    const int waits = is_beside(op) ? first_reader(whole.segment, i) : -1;
    if (waits < 0) continue;
    for (const SlotId slot : op.reads) {
      Touch& touch = all[root_of(whole.segment, slot).index()];
      touch.last = std::max(touch.last, static_cast<int>(piece[static_cast<size_t>(waits)]));
    }
  }
  // What no op touches and the segment still consumes is the first piece's to give up.
  for (Touch& touch : all)
    if (touch.first < 0) touch = {0, 0};
  return all;
}

/// Ops keep their order within a piece; between pieces only what changes nothing that a later piece reads may come before it.
void check_order(const DraftSegment& whole, const std::vector<size_t>& piece) {
  const auto& steps = whole.segment.steps;
  for (size_t i = 0; i < steps.size(); ++i)
    for (size_t j = i + 1; j < steps.size(); ++j) {
      if (piece[i] <= piece[j]) continue;  // j moves to before i
      const Op &a = std::get<Op>(steps[i]), &b = std::get<Op>(steps[j]);
      SHARDLAB_CHECK(independent(whole.segment, a, b), "{}: {} cannot come before {}", whole.segment.name, b.label, a.label);
    }
}

}  // namespace

std::vector<DraftSegment> cut(const DraftSegment& whole, const std::vector<std::string>& names,
                              const std::function<size_t(const Op&)>& piece_of) {
  std::vector<size_t> piece;
  for (const Step& step : whole.segment.steps) piece.push_back(piece_of(std::get<Op>(step)));
  const std::vector<Touch> touches = touches_of(whole, names.size(), piece);
  check_order(whole, piece);
  std::vector<DraftSegment> pieces(names.size());
  for (size_t p = 0; p < pieces.size(); ++p) {
    DraftSegment& to = pieces[p];
    to.segment.name = names[p];
    std::vector<SlotId> moved(whole.uses.size());
    const auto move = [&](size_t s) {
      if (moved[s]) return;
      Slot slot = whole.segment.slots[s];
      SlotUse use = whole.uses[s];
      const Touch touch = touches[root_of(whole.segment, SlotId(static_cast<int32_t>(s))).index()];
      const bool crosses = touch.first != touch.last;
      if (use.use == Use::kLocal && crosses) {
        use.use = Use::kCarried;
        slot.cls = BufferClass::kActivation;
      }
      if (crosses) slot.kind = SlotKind::kBound;
      use.earlier = use.earlier || static_cast<int>(p) > touch.first;  // the whole may be a piece itself
      use.later = use.later || static_cast<int>(p) < touch.last;
      if (slot.view) slot.view->base = moved[static_cast<size_t>(slot.view->base)].value;
      to.segment.slots.push_back(std::move(slot));
      to.uses.push_back(use);
      moved[s] = SlotId(static_cast<int32_t>(to.uses.size()) - 1);
    };
    // Slots in the order of the whole, those of which another is a view before it.
    std::vector<bool> wanted(whole.uses.size());
    for (size_t i = 0; i < piece.size(); ++i) {
      if (piece[i] != p) continue;
      const Op& op = std::get<Op>(whole.segment.steps[i]);
      for (const auto* operands : {&op.reads, &op.writes})
        for (const SlotId slot : *operands) wanted[slot.index()] = wanted[root_of(whole.segment, slot).index()] = true;
    }
    for (size_t s = 0; s < wanted.size(); ++s)
      if (wanted[s] || (!whole.segment.slots[s].view && touches[s].last == static_cast<int>(p))) move(s);
    for (size_t i = 0; i < piece.size(); ++i) {
      if (piece[i] != p) continue;
      Op op = std::get<Op>(whole.segment.steps[i]);
      for (auto* operands : {&op.reads, &op.writes})
        for (SlotId& slot : *operands) slot = moved[slot.index()];
      to.segment.steps.emplace_back(std::move(op));
    }
  }
  return pieces;
}

}  // namespace shardlab::strategies
