// The last step of lowering: timetables become programs of calls, allocations and frees over buffers.
//
// Activations of micro-batches in flight come from pools: a buffer that backward has freed serves a later micro-batch, so a role
// has as many buffers as micro-batches are in flight at once, not as many as there are micro-batches.
#include <algorithm>
#include <map>
#include <string>
#include <utility>

#include "plan/device_scratch.h"
#include "plan/work.h"
#include "strategies/draft.h"
#include "strategies/offload_activations.h"

namespace shardlab::strategies {
namespace {

/// Copies of a backward segment's gradient ops that add to the old value: `accumulate` set, the old value read last.
Segment accumulating(const DraftSegment& backward) {
  Segment segment = backward.segment;
  segment.name += ".accumulate";
  for (Step& step : segment.steps) {
    Op* op = std::get_if<Op>(&step);
    if (op == nullptr || phase_of(op->work) != Phase::kW) continue;
    std::visit(
        [](auto& work) {
          if constexpr (requires { work.accumulate; }) work.accumulate = true;
        },
        op->work);
    op->reads.insert(op->reads.end(), op->writes.begin(), op->writes.end());
  }
  return segment;
}

/// Does some backward add to the gradients that an earlier one left?
bool adds_in_place(const Draft& draft) {
  return std::ranges::any_of(draft.stages, [](const StageDraft& stage) {
    return std::ranges::any_of(stage.events, [](const Event& e) { return e.kind == Event::Kind::kBackward && !e.first; });
  });
}

void register_units(Draft& draft) {
  const bool accumulates = draft.training && adds_in_place(draft);
  for (UnitTemplate& unit : draft.templates) {
    place_lifetimes(unit.forward, draft.training ? SegmentRole::kForward : SegmentRole::kForwardOnly);
    unit.forward_id = draft.register_segment(unit.forward.segment);
    if (!draft.training) continue;
    place_lifetimes(unit.backward, SegmentRole::kBackward);
    unit.backward_first_id = draft.register_segment(unit.backward.segment);
    unit.backward_id = accumulates ? draft.register_segment(accumulating(unit.backward)) : *unit.backward_first_id;
  }
}

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
  StageEmitter(Draft& draft, StageDraft& stage) : draft_(draft), stage_(stage) {
    const size_t units = static_cast<size_t>(stage.end_unit - stage.first_unit) + 2;  // one beyond each end: messages
    inputs_.resize(units);
    gradients_.resize(units);
    saved_.resize(units);
    parked_.resize(units);
  }

  Role emit() {
    for (const BufferId id : stage_.whole_step) program().emplace_back(Alloc{id});
    for (Event& event : stage_.events) issue(event);
    free_sent(true);
    for (auto id = stage_.whole_step.rbegin(); id != stage_.whole_step.rend(); ++id) program().emplace_back(Free{*id});
    return std::move(stage_.role);
  }

 private:
  std::vector<Item>& program() { return stage_.role.program; }
  size_t slot_of(int unit) const { return static_cast<size_t>(unit - stage_.first_unit + 1); }
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
      case Event::Kind::kBackward: compute(event); break;
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
    const bool backward = event.kind == Event::Kind::kBackward;
    if (const std::pair now{backward, event.micro_batch}; now != slot_) {
      slot_ = now;
      ++slots_begun_;
      free_sent(false);
    }
    UnitTemplate& unit = draft_.of_unit(event.unit);
    const DraftSegment& segment = backward ? unit.backward : unit.forward;
    const SegmentId id = !backward ? *unit.forward_id : event.first ? *unit.backward_first_id : *unit.backward_id;
    std::vector<BufferId> binding(segment.uses.size());
    for (size_t s = 0; s < binding.size(); ++s) binding[s] = bound(event, segment, static_cast<int>(s), backward);
    program().emplace_back(bind(id, std::move(binding), draft_.units[static_cast<size_t>(event.unit)].layer, event.micro_batch));
    if (backward || !draft_.training) give_back_consumed(event, segment, backward);
  }

  BufferId bound(const Event& event, const DraftSegment& segment, int s, bool backward) {
    const SlotUse use = segment.uses[static_cast<size_t>(s)];
    const Slot& slot = segment.segment.slots[static_cast<size_t>(s)];
    const int unit = event.unit, micro = event.micro_batch;
    switch (use.use) {
      case Use::kLocal:
      case Use::kView: return {};
      case Use::kParameter: return stage_.at(unit, use.parameter).value;
      case Use::kGradient:
        return event.storage == 0
                   ? stage_.at(unit, use.parameter).gradient
                   : stage_.gradient_copies[static_cast<size_t>(event.storage - 1)][static_cast<size_t>(unit - stage_.first_unit)]
                                           [static_cast<size_t>(use.parameter)];
      case Use::kActivationIn: return held(input_of(unit), micro);
      case Use::kActivationOut: return take(input_of(unit + 1), micro, slot, unit);
      case Use::kSaved:
        return backward ? held(saved_pool(unit, slot.name), micro) : take(saved_pool(unit, slot.name), micro, slot, unit);
      case Use::kGradientIn: return held(gradient_of(unit), micro);
      case Use::kGradientOut: return take(gradient_of(unit - 1), micro, slot, unit);
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

  void give_back_consumed(const Event& event, const DraftSegment& segment, bool backward) {
    for (size_t s = 0; s < segment.uses.size(); ++s) {
      const Use use = segment.uses[s].use;
      if (use == Use::kActivationIn) give_back(input_of(event.unit), event.micro_batch);
      if (use == Use::kSaved) give_back(saved_pool(event.unit, segment.segment.slots[s].name), event.micro_batch);
      if (use == Use::kGradientIn && backward) give_back(gradient_of(event.unit), event.micro_batch);
    }
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

  /// What is sent stays until the compute slot after the next has begun, so that the control stream seldom waits for a message.
  void send(Event& event) {
    Pool& pool = event.gradients ? gradient_of(event.unit - 1) : input_of(event.unit + 1);
    event.call.binding = {held(pool, event.micro_batch)};
    event.call.micro_batch = event.micro_batch;
    program().emplace_back(std::move(event.call));
    sent_.push_back({&pool, event.micro_batch, slots_begun_});
  }

  void free_sent(bool all) {
    std::erase_if(sent_, [&](const Sent& s) {
      if (!all && slots_begun_ < s.slot + 2) return false;
      program().emplace_back(Free{held(*s.pool, s.micro_batch)});
      give_back(*s.pool, s.micro_batch);
      return true;
    });
  }

  struct Sent {
    Pool* pool;
    int micro_batch;
    int slot;
  };

  Draft& draft_;
  StageDraft& stage_;
  std::vector<Pool> inputs_, gradients_;
  std::vector<NamedPools> saved_, parked_;
  std::map<std::string, Staging> staging_;  ///< by slot
  std::vector<Sent> sent_;
  std::pair<bool, int> slot_{false, -1};
  int slots_begun_ = 0;
};

}  // namespace

Plan emit(Draft draft) {
  register_units(draft);
  for (StageDraft& stage : draft.stages) draft.plan.roles.push_back(StageEmitter(draft, stage).emit());
  if (draft.config.backend == "cuda")
    add_device_workspaces(draft.plan, device_kernels(draft.config));
  else
    add_workspaces(draft.plan, draft.config.canonical);
  return std::move(draft.plan);
}

}  // namespace shardlab::strategies
