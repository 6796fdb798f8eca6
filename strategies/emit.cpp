// The last step of lowering: timetables become programs of calls, allocations and frees over buffers.
//
// Activations of micro-batches in flight come from pools: a buffer that backward has freed serves a later micro-batch, so a role
// has as many buffers as micro-batches are in flight at once, not as many as there are micro-batches.
#include <algorithm>
#include <array>
#include <climits>
#include <map>
#include <string>
#include <utility>

#include "plan/device_scratch.h"
#include "plan/work.h"
#include "strategies/draft.h"
#include "strategies/expert_overlap.h"
#include "strategies/offload_activations.h"

namespace shardlab::strategies {
namespace {

/// Copies of a backward segment's gradient ops that add to the old value: `accumulate` set, the old value read last. A copy of what ranks have
/// added up becomes an addition.
Segment accumulating(const DraftSegment& backward) {
  Segment segment = backward.segment;
  segment.name += ".accumulate";
  for (Step& step : segment.steps) {
    Op* op = std::get_if<Op>(&step);
    const bool copies = op != nullptr && std::holds_alternative<Copy>(op->work);
    if (op == nullptr || (phase_of(op->work) != Phase::kW && !copies)) continue;
    const auto is_gradient = [&](SlotId w) { return backward.uses[w.index()].use == Use::kGradient; };
    if (std::ranges::none_of(op->writes, is_gradient)) continue;  // a summand that the ranks have yet to add up
    if (copies) {
      op->work = Add{};
      op->reads.insert(op->reads.begin(), op->writes[0]);
      continue;
    }
    const bool adds_already = std::visit(
        [](auto& work) {
          if constexpr (requires { work.accumulate; }) return std::exchange(work.accumulate, true);
          return false;
        },
        op->work);
    if (adds_already) continue;
    op->reads.insert(op->reads.end(), op->writes.begin(), op->writes.end());
  }
  return segment;
}

/// The piece of each op of a backward segment that is cut in gradients of the input (0) and of the parameters (1). An op of neither
/// phase, a collective say, goes with what it reads where that is the second piece's, and with those that read its result where
/// all of them are.
std::vector<size_t> pieces_by_phase(const Segment& segment) {
  const size_t n = segment.steps.size();
  const auto op = [&](size_t i) -> const Op& { return std::get<Op>(segment.steps[i]); };
  std::vector<size_t> piece(n);
  for (size_t i = 0; i < n; ++i) {
    piece[i] = phase_of(op(i).work) == Phase::kW ? 1 : 0;
    if (phase_of(op(i).work) != Phase::kNone) continue;
    for (size_t j = 0; j < i; ++j)
      if (piece[j] == 1 && meet(segment, op(j).writes, op(i).reads)) piece[i] = 1;
  }
  for (size_t i = n; i-- > 0;) {
    if (piece[i] == 1 || !std::holds_alternative<Collective>(op(i).work)) continue;
    bool any = false, all = true;
    for (size_t j = i + 1; j < n; ++j)
      if (meet(segment, op(i).writes, op(j).reads)) any = true, all = all && piece[j] == 1;
    if (any && all &&
        std::ranges::all_of(op(i).writes, [&](SlotId w) { return segment.slots[w.index()].kind == SlotKind::kLocal; }))
      piece[i] = 1;
  }
  return piece;
}

/// What an event of a unit calls: a segment of its template, or a piece of one. Registered in the plan when it is first called, forward
/// and backward of a template one after the other.
class UnitSegments {
 public:
  explicit UnitSegments(Draft& draft) : draft_(draft) {
    for (const StageDraft& stage : draft.stages)
      for (const Event& e : stage.events) {
        if (!e.computes()) continue;
        calls_[static_cast<size_t>(e.kind)] = true;
        if (e.makes_gradients() && !e.first) accumulates_ = true;
      }
    for (const UnitTemplate& unit : draft.templates) {
      Forms& forms = forms_.emplace_back();
      const SegmentRole forward = draft.training ? SegmentRole::kForward : SegmentRole::kForwardOnly;
      forms[Kind::kForward] = {pieces_of(unit.forward), forward};
      std::vector<DraftSegment> pieces;
      if (calls(Kind::kInput)) {
        const std::string& name = unit.backward.segment.name;  // "layer.B"
        const std::string stem = name.substr(0, name.size() - 1);
        const std::vector<size_t> piece = pieces_by_phase(unit.backward.segment);
        pieces = cut(unit.backward, {stem + "I", stem + "W"}, [&piece, i = size_t{0}](const Op&) mutable { return piece[i++]; });
        forms[Kind::kInput] = {pieces_of(pieces[0]), SegmentRole::kBackward};
        forms[Kind::kWeight] = {pieces_of(pieces[1]), SegmentRole::kBackward};
      }
      forms[Kind::kBackward] = {pieces_of(unit.backward), SegmentRole::kBackward};
      for (const Kind kind : {Kind::kForward, Kind::kBackward, Kind::kInput, Kind::kWeight})
        if (calls(kind)) enter(forms[kind]);
    }
  }

  struct Piece {
    DraftSegment segment;
    SegmentId first, again;  ///< overwriting gradients, and adding to them
  };
  struct Form {
    std::vector<Piece> pieces;  ///< one, but where micro-batches are braided
    SegmentRole role = SegmentRole::kForward;
  };
  const Form& form(const Event& e) const { return forms_[draft_.units[static_cast<size_t>(e.unit)].form].at(e.kind); }

 private:
  using Kind = Event::Kind;
  using Forms = std::map<Kind, Form>;

  bool calls(Kind kind) const { return calls_[static_cast<size_t>(kind)]; }

  std::vector<Piece> pieces_of(const DraftSegment& segment) const {
    std::vector<Piece> pieces;
    if (draft_.config.layout.expert_overlap != ExpertOverlap::kMicroBatches || segment.segment.steps.empty()) {
      pieces.push_back({segment, {}, {}});
      return pieces;
    }
    const std::vector<size_t> piece = pieces_by_exchange(segment.segment);
    std::vector<std::string> names{segment.segment.name};
    while (names.size() <= piece.back()) names.push_back(segment.segment.name + "." + std::to_string(names.size()));
    for (DraftSegment& part : cut(segment, names, [&piece, i = size_t{0}](const Op&) mutable { return piece[i++]; }))
      pieces.push_back({std::move(part), {}, {}});
    return pieces;
  }

  void enter(Form& form) {
    for (Piece& piece : form.pieces) {
      DraftSegment& segment = piece.segment;
      if (segment.segment.steps.empty()) continue;  // an embedding has no gradient of its input
      place_lifetimes(segment, form.role);
      piece.first = piece.again = draft_.register_segment(segment.segment);
      const bool gradients = std::ranges::any_of(segment.uses, [](const SlotUse& u) { return u.use == Use::kGradient; });
      if (accumulates_ && gradients) piece.again = draft_.register_segment(accumulating(segment));
    }
  }

  Draft& draft_;
  std::vector<Forms> forms_;  ///< by template
  std::array<bool, 4> calls_{};
  bool accumulates_ = false;  ///< whether some gradients are added in place to what an earlier event left
};

/// Buffers of one kind that tensors pass through, by unit and micro-batch.
struct Staging {
  std::vector<BufferId> free;
  std::map<std::pair<int, int>, BufferId> held;
  int made = 0;
};

/// Buffers of one kind that micro-batches take and give back.
struct Pool {
  std::vector<BufferId> free;
  std::vector<BufferId> by_micro_batch;
  int made = 0;
};

class StageEmitter {
 public:
  StageEmitter(Draft& draft, StageDraft& stage, const UnitSegments& segments) : draft_(draft), stage_(stage), segments_(segments) {
    const size_t units = static_cast<size_t>(draft.unit_count()) + 2;  // one beyond each end: messages
    inputs_.resize(units);
    gradients_.resize(units);
    saved_.resize(units);
    parked_.resize(units);
  }

  Role emit() {
    for (const BufferId id : stage_.whole_step) program().emplace_back(Alloc{id});
    for (size_t i = 0; i < stage_.events.size(); ++i) {
      if (stage_.events[i].braid < 0)
        issue(stage_.events[i]);
      else
        i = braid(i);
    }
    free_sent(INT_MAX);
    for (auto id = stage_.whole_step.rbegin(); id != stage_.whole_step.rend(); ++id) program().emplace_back(Free{*id});
    return std::move(stage_.role);
  }

 private:
  std::vector<Item>& program() { return stage_.role.program; }
  static size_t slot_of(int unit) { return static_cast<size_t>(unit + 1); }
  Pool& input_of(int unit) { return inputs_[slot_of(unit)]; }
  Pool& gradient_of(int unit) { return gradients_[slot_of(unit)]; }  ///< gradient of the unit's output

  std::string unit_name(int unit) const {
    if (unit <= 0) return "embed";
    if (unit >= draft_.unit_count() - 1) return "head";
    return "layers." + std::to_string(draft_.units[static_cast<size_t>(unit)].layer);
  }

  BufferId take(Pool& pool, int micro_batch, const Slot& slot, int unit) {
    if (pool.by_micro_batch.empty()) pool.by_micro_batch.resize(static_cast<size_t>(draft_.micro_batches()));
    BufferId id;
    if (!pool.free.empty()) {
      id = pool.free.back();
      pool.free.pop_back();
    } else {
      Buffer buffer;
      buffer.name = unit_name(unit) + "." + slot.name + "@" + std::to_string(pool.made++);
      buffer.type = slot.type;
      buffer.kind = slot.cls;
      buffer.space = slot.space;
      id = add_buffer(stage_, std::move(buffer));
    }
    return pool.by_micro_batch[static_cast<size_t>(micro_batch)] = id;
  }
  BufferId held(const Pool& pool, int micro_batch) const { return pool.by_micro_batch[static_cast<size_t>(micro_batch)]; }
  void give_back(Pool& pool, int micro_batch) { pool.free.push_back(held(pool, micro_batch)); }

  void issue(Event& event) {
    switch (event.kind) {
      case Event::Kind::kForward:
      case Event::Kind::kBackward:
      case Event::Kind::kInput:
      case Event::Kind::kWeight: compute(event); break;
      case Event::Kind::kReceive: receive(event); break;
      case Event::Kind::kSend: send(event); break;
      case Event::Kind::kCall: program().emplace_back(std::move(event.call)); break;
      case Event::Kind::kAlloc: program().emplace_back(Alloc{event.buffer}); break;
      case Event::Kind::kFree: program().emplace_back(Free{event.buffer}); break;
      case Event::Kind::kPark:
      case Event::Kind::kVacate:
      case Event::Kind::kRead:
      case Event::Kind::kFetch:
      case Event::Kind::kUnstage:
      case Event::Kind::kForget: park(event); break;
    }
  }

  /// Takes what backward reads of forward to where it waits, and back. A call binds each tensor's places, one after the other.
  void park(const Event& event) {
    using Kind = Event::Kind;
    const DraftSegment& backward = draft_.of_unit(event.unit).backward;
    const bool nvme = draft_.config.layout.offload.activations == OffloadTo::kNvme;
    const int unit = event.unit, micro = event.micro_batch;
    std::vector<BufferId> binding;
    for (const SlotId id : parked_slots(backward)) {
      const Slot& slot = backward.slot(id);
      Pool& here = backward.uses[id.index()].use == Use::kActivationIn ? input_of(unit) : saved_pool(unit, slot.name);
      Pool& there = pool_named(parked_[slot_of(unit)], slot.name);
      switch (event.kind) {
        case Kind::kVacate: release(here, micro); continue;
        case Kind::kForget: release(there, micro); continue;
        case Kind::kUnstage: unstage(unit, micro, slot); continue;
        case Kind::kPark:
          if (nvme) stage(unit, micro, slot);
          program().emplace_back(Alloc{take(there, micro, nvme ? nvme_slot(slot) : host_slot(slot), unit)});
          break;
        case Kind::kRead: stage(unit, micro, slot); break;
        default: program().emplace_back(Alloc{take(here, micro, slot, unit)}); break;
      }
      if (event.kind != Kind::kRead) binding.push_back(held(here, micro));
      if (nvme) binding.push_back(staging_[slot.name].held.at({unit, micro}));
      if (!nvme || event.kind != Kind::kFetch) binding.push_back(held(there, micro));
    }
    if (binding.empty()) return;
    const SegmentId segment = parking_segment(draft_, unit, event.kind);
    program().emplace_back(bind(segment, std::move(binding), draft_.units[static_cast<size_t>(unit)].layer, micro));
  }

  void release(Pool& pool, int micro_batch) {
    program().emplace_back(Free{held(pool, micro_batch)});
    give_back(pool, micro_batch);
  }

  /// Host memory for a tensor that is on its way to NVMe or back. All layers share it: what one gives up the next takes.
  void stage(int unit, int micro_batch, const Slot& slot) {
    Staging& staging = staging_[slot.name];
    if (staging.free.empty()) {
      const Slot host = host_slot(slot);
      Buffer buffer;
      buffer.name = "staging." + slot.name + "@" + std::to_string(staging.made++);
      buffer.type = host.type;
      buffer.kind = host.cls;
      buffer.space = host.space;
      staging.free.push_back(add_buffer(stage_, std::move(buffer)));
    }
    const BufferId id = staging.free.back();
    staging.free.pop_back();
    staging.held[{unit, micro_batch}] = id;
    program().emplace_back(Alloc{id});
  }
  void unstage(int unit, int micro_batch, const Slot& slot) {
    Staging& staging = staging_[slot.name];
    const auto held = staging.held.find({unit, micro_batch});
    program().emplace_back(Free{held->second});
    staging.free.push_back(held->second);
    staging.held.erase(held);
  }

  void compute(const Event& event) {
    for (size_t piece = 0; piece < segments_.form(event).pieces.size(); ++piece) compute(event, piece);
  }

  void compute(const Event& event, size_t number) {
    if (event.slot != slot_) free_sent(slot_ = event.slot);
    const UnitSegments::Form& form = segments_.form(event);
    const UnitSegments::Piece& piece = form.pieces[number];
    const DraftSegment& segment = piece.segment;
    if (segment.segment.steps.empty()) return;
    std::vector<BufferId> binding(segment.uses.size());
    for (size_t s = 0; s < binding.size(); ++s) binding[s] = bound(event, segment, static_cast<int>(s), form.role);
    const Unit& unit = draft_.units[static_cast<size_t>(event.unit)];
    program().emplace_back(bind(event.first ? piece.first : piece.again, std::move(binding), unit.layer, event.micro_batch));
    for (size_t s = 0; s < segment.uses.size(); ++s)
      if (Pool* pool = pool_of(event.unit, segment, s); pool != nullptr && frees(segment.uses[s], form.role))
        give_back(*pool, event.micro_batch);
  }

  /// The event at `i` and its partner, piece by piece in turn. Of what passes have put between the two, what the partner needs comes first;
  /// storage that is given up and not taken again goes when both are done, so that neither waits for those who still read it. Returns the
  /// index of the partner.
  size_t braid(size_t i) {
    auto& events = stage_.events;
    size_t partner = i + 1;
    while (events[partner].braid != events[i].braid) ++partner;
    const auto is_last_use = [&](size_t k) {
      return events[k].kind == Event::Kind::kFree &&
             std::none_of(events.begin() + static_cast<std::ptrdiff_t>(k), events.begin() + static_cast<std::ptrdiff_t>(partner),
                          [&](const Event& e) { return e.kind == Event::Kind::kAlloc && e.buffer == events[k].buffer; });
    };
    std::vector<Event> later;
    for (size_t k = i + 1; k < partner; ++k) {
      const Event::Kind kind = events[k].kind;
      SHARDLAB_CHECK(kind == Event::Kind::kAlloc || kind == Event::Kind::kFree || kind == Event::Kind::kCall,
                     "stage {}: an event of kind {} within a braid", stage_.role.stage, static_cast<int>(kind));
      if (is_last_use(k))
        later.push_back(events[k]);
      else
        issue(events[k]);
    }
    const size_t pieces[] = {segments_.form(events[i]).pieces.size(), segments_.form(events[partner]).pieces.size()};
    for (size_t piece = 0; piece < std::max(pieces[0], pieces[1]); ++piece) {
      if (piece < pieces[0]) compute(events[i], piece);
      if (piece < pieces[1]) compute(events[partner], piece);
    }
    for (Event& event : later) issue(event);
    return partner;
  }

  /// The pool that a slot's storage comes from; none where it comes from elsewhere.
  Pool* pool_of(int unit, const DraftSegment& segment, size_t slot) {
    const std::string& name = segment.segment.slots[slot].name;
    switch (segment.uses[slot].use) {
      case Use::kActivationIn: return &input_of(unit);
      case Use::kActivationOut: return &input_of(unit + 1);
      case Use::kGradientIn: return &gradient_of(unit);
      case Use::kGradientOut: return &gradient_of(unit - 1);
      case Use::kCarried:
      case Use::kSaved: return &saved_pool(unit, name);
      default: return nullptr;
    }
  }

  BufferId bound(const Event& event, const DraftSegment& segment, int s, SegmentRole role) {
    const SlotUse use = segment.uses[static_cast<size_t>(s)];
    const Slot& slot = segment.segment.slots[static_cast<size_t>(s)];
    const int unit = event.unit, micro = event.micro_batch;
    switch (use.use) {
      case Use::kLocal:
      case Use::kView: return {};
      case Use::kParameter: return stage_.at(unit, use.parameter).value;
      case Use::kGradient:
        return event.storage == 0 ? stage_.at(unit, use.parameter).gradient
                                  : stage_.gradient_copies[static_cast<size_t>(event.storage - 1)][stage_.index_of(unit)]
                                                          [static_cast<size_t>(use.parameter)];
      case Use::kActivationIn:
      case Use::kActivationOut:
      case Use::kSaved:
      case Use::kCarried:
      case Use::kGradientIn:
      case Use::kGradientOut: {
        Pool& pool = *pool_of(unit, segment, static_cast<size_t>(s));
        return allocates(use, role) ? take(pool, micro, slot, unit) : held(pool, micro);
      }
      case Use::kNamed: {
        const auto own = stage_.named.find(unit_name(unit) + "." + slot.name);
        if (own != stage_.named.end()) return own->second;
        const auto found = stage_.named.find(slot.name);
        SHARDLAB_CHECK(found != stage_.named.end(), "stage {} has no buffer for {}", stage_.role.stage, slot.name);
        return found->second;
      }
      case Use::kLoss: return stage_.losses[static_cast<size_t>(micro)];
    }
    return {};
  }

  /// Saved slots of a unit, by name in the order of its forward segment.
  Pool& saved_pool(int unit, const std::string& name) { return pool_named(saved_[slot_of(unit)], name); }

  using NamedPools = std::vector<std::pair<std::string, Pool>>;
  static Pool& pool_named(NamedPools& pools, const std::string& name) {
    const auto found = std::ranges::find(pools, name, &std::pair<std::string, Pool>::first);
    return found != pools.end() ? found->second : pools.emplace_back(name, Pool{}).second;
  }

  void receive(Event& event) {
    Pool& pool = event.gradients ? gradient_of(event.unit) : input_of(event.unit);
    const Segment& segment = draft_.plan.segments[event.call.segment.index()];
    // A gradient is named for the unit that made it, as in `bound`: the next one.
    const BufferId id = take(pool, event.micro_batch, segment.slots[0], event.gradients ? event.unit + 1 : event.unit);
    program().emplace_back(Alloc{id});
    event.call.binding = {id};
    event.call.micro_batch = event.micro_batch;
    program().emplace_back(std::move(event.call));
  }

  /// What is sent stays until a later slot begins (`Event::slot`), so that the control stream seldom waits for a message.
  void send(Event& event) {
    Pool& pool = event.gradients ? gradient_of(event.unit - 1) : input_of(event.unit + 1);
    event.call.binding = {held(pool, event.micro_batch)};
    event.call.micro_batch = event.micro_batch;
    program().emplace_back(std::move(event.call));
    sent_.push_back({&pool, held(pool, event.micro_batch), event.slot});
  }

  void free_sent(int slot) {
    std::erase_if(sent_, [&](const Sent& s) {
      if (slot < s.slot) return false;
      program().emplace_back(Free{s.buffer});
      s.pool->free.push_back(s.buffer);
      return true;
    });
  }

  struct Sent {
    Pool* pool;
    BufferId buffer;
    int slot;
  };

  Draft& draft_;
  StageDraft& stage_;
  const UnitSegments& segments_;
  std::vector<Pool> inputs_, gradients_;
  std::vector<NamedPools> saved_, parked_;
  std::map<std::string, Staging> staging_;  ///< by slot
  std::vector<Sent> sent_;
  int slot_ = -1;  ///< of the schedule
};

}  // namespace

Plan emit(Draft draft) {
  const UnitSegments segments(draft);
  for (StageDraft& stage : draft.stages) draft.plan.roles.push_back(StageEmitter(draft, stage, segments).emit());
  if (draft.config.backend == BackendKind::kCuda)
    add_device_workspaces(draft.plan, device_kernels(draft.config));
  else
    add_workspaces(draft.plan, draft.config.canonical);
  return std::move(draft.plan);
}

}  // namespace shardlab::strategies
