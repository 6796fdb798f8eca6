#include "simulator/interpreter/case_plan.h"

#include <algorithm>
#include <cmath>
#include <string_view>
#include <utility>

#include "plan/base/check.h"
#include "plan/period.h"
#include "plan/stage_memory.h"
#include "plan/techniques.h"
#include "plan/wire.h"
#include "simulator/interpreter/predict.h"
#include "simulator/interpreter/routes.h"
#include "simulator/interpreter/segments/segments.h"

namespace shardlab::simulator {
namespace {

/// Micro-batches after which the steady phase of a case's schedule does the same again: with the same buffers, and the messages of
/// its stages in the same order. 0 where it never does: what holds every micro-batch, tables, and gradients that are a binary
/// counter.
int period_of(const Case& c) {
  const Schedule schedule = c.layout.schedule;
  if (c.canonical || !is_named(schedule) || schedule == Schedule::kAfab || schedule == Schedule::kBreadthFirst) return 0;
  return schedule == Schedule::kInterleaved ? c.layout.pp : is_mirrored(schedule) ? 2 : 1;
}

/// Micro-batches that fill the pipeline of a case: one a stage, or as many as its first stage holds where those are more; two a
/// stage and those that drain where parts take turns or two gradients are told apart.
int64_t fill_of(const Case& c, int period) {
  const int p = c.layout.pp;
  if (p == 1) return 1;
  if (period > 1 || splits_backward(c.layout.schedule)) return 3 * p;
  const PipelineSchedule schedule = make_schedule({c.layout.schedule, p, c.layout.vpp, 3 * p});
  return std::max<int64_t>(p, std::llround(most_held(schedule, 0)));
}

/// Micro-batches of the shorter plan: the pipeline is full, its steady phase has begun, and it drains.
int64_t few_of(const Case& c, int period) {
  const int64_t few = fill_of(c, period) + 4;
  return few + (c.train.grad_accumulation - few) % period;
}

using Stages = std::vector<std::array<MemoryPeak, kSpaces>>;

Stages peaks_of(const Plan& plan) {
  Stages stages;
  for (size_t role = 0; role < plan.roles.size(); ++role) stages.push_back(memory_peak(plan, static_cast<int>(role)));
  return stages;
}

Case with_micro_batches(Case config, int64_t micro_batches) {
  config.train.grad_accumulation = micro_batches;
  config.train.global_batch_tokens = 0;
  return config;
}

/// Calls `use` with each pair of classes of both, and whether the class may grow with the number of micro-batches.
template <class Use>
void for_each_class(MemoryPeak& a, const MemoryPeak& b, const Use& use) {
  for (size_t c = 0; c < kBufferClasses; ++c)
    for (const auto part : {&MemoryPeak::at_peak, &MemoryPeak::peak_by_class})
      use((a.*part).bytes[c], (b.*part).bytes[c], c == static_cast<size_t>(BufferClass::kMetric));
}

/// Adds `times` times what a period more adds. False where something grows that does not live for the whole step.
bool extend(Stages& stages, const Stages& longer, int64_t times) {
  bool same = true;
  for (size_t s = 0; s < stages.size(); ++s)
    for (size_t space = 0; space < kSpaces; ++space) {
      MemoryPeak& peak = stages[s][space];
      const MemoryPeak& next = longer[s][space];
      for_each_class(peak, next, [&](int64_t& bytes, int64_t more, bool grows) {
        same = same && (grows || bytes == more);
        bytes += times * (more - bytes);
      });
      peak.peak_bytes += times * (next.peak_bytes - peak.peak_bytes);
      peak.persistent_bytes += times * (next.persistent_bytes - peak.persistent_bytes);
    }
  return same;
}

}  // namespace

Result<CasePlan> CasePlan::of(const Case& config, const Lower& lower) {
  auto first = of_one_run(config, lower);
  if (!first.ok() || !bounds_experts(config)) return first;
  auto second = of_one_run(second_run_of(config), lower);
  if (!second.ok()) return second.error();
  for (size_t stage = 0; stage < first->stages_.size(); ++stage)
    for (size_t space = 0; space < kSpaces; ++space) {
      MemoryPeak& peak = first->stages_[stage][space];
      const MemoryPeak& again = second->stages_[stage][space];
      if (space == static_cast<size_t>(Space::kDevice)) first->second_decides_.push_back(again.peak_bytes > peak.peak_bytes);
      if (again.peak_bytes > peak.peak_bytes) peak = again;
    }
  first->second_ = std::make_shared<const CasePlan>(std::move(*second));
  return first;
}

const Plan& CasePlan::plan_at_peak(int stage) const {
  return second_ != nullptr && second_decides_[static_cast<size_t>(stage)] ? second_->plan_ : plan_;
}

Result<CasePlan> CasePlan::of_one_run(const Case& config, const Lower& lower) {
  CasePlan out;
  out.lower_ = lower;
  const int64_t micro_batches = config.train.grad_accumulation;
  const int period = period_of(config);
  const int64_t few = period > 0 ? few_of(config, period) : micro_batches;
  if (micro_batches > 2 * few + period) {
    auto shorter = lower(with_micro_batches(config, few)), longer = lower(with_micro_batches(config, few + period));
    if (shorter.ok() && longer.ok()) {
      const int64_t more = (micro_batches - few) / period;
      out.stages_ = peaks_of(*shorter);
      if (extend(out.stages_, peaks_of(*longer), more)) {
        out.wire_ = total_wire_bytes(*shorter);
        for (const auto& [comm, bytes] : total_wire_bytes(*longer)) {
          int64_t& sent = out.wire_[comm];
          sent += more * (bytes - sent);
        }
        out.plan_ = std::move(*shorter), out.shortened_ = true;
        return out;
      }
    }
  }
  auto whole = lower(config);
  if (!whole.ok()) return whole.error();
  out.plan_ = std::move(*whole);
  out.stages_ = peaks_of(out.plan_);
  out.wire_ = total_wire_bytes(out.plan_);
  return out;
}

int64_t CasePlan::wire_of_step() const {
  int64_t sent = 0;
  for (const auto& [comm, bytes] : wire_) sent += bytes;
  return bytes_of_step(plan_, sent);
}

Prediction CasePlan::bytes() const {
  Prediction p;
  for (const auto& peaks : stages_) add_peaks(peaks, p);
  p.wire_bytes = wire_of_step();
  return p;
}

Prediction CasePlan::predict(const Case& config, const PlacedCostModel& costs, const Routing& routing) const {
  Prediction p = bytes();
  if (config.machine.is_mixed())
    p.stages = memory_by_stage(
        config, [&](int stage) { return stages_[static_cast<size_t>(stage)][static_cast<size_t>(Space::kDevice)].peak_bytes; });
  add_routing(config, routing, p);
  const double fullest = p.expert_rank_imbalance.value_or(1);
  const RoutedCosts routed(costs, fullest, fullest);
  const auto time = [&](const Plan& plan) {
    SegmentTimeline timeline(plan, compute_on(config.machine));
    add_segment_times(plan, timeline, config.machine, routed, p);
    add_provenance(config, plan, costs, p);
  };
  if (!shortened_) {
    time(plan_);
    return p;
  }
  const auto whole = lower_(config);
  SHARDLAB_CHECK(whole.ok(), "{}", to_string(whole.error()));
  time(*whole);
  return p;
}

// ---- what is live at a peak -----------------------------------------------------------------------------------------------------

namespace {

/// "qkv" of "layers.3.qkv@1", and whether it is of a layer.
std::pair<std::string, bool> name_of_buffer(std::string_view name) {
  name = name.substr(0, name.find('@'));
  const bool layer = name.starts_with("layers.");
  if (layer) name.remove_prefix(std::min(name.size(), name.find('.', 7) + 1));
  for (const std::string_view end : {"embed.", "head."})
    if (name.starts_with(end)) name.remove_prefix(end.size());
  return {std::string(name), layer};
}

/// The live bytes of the device, by class and name, while a program is read.
class Held {
 public:
  void change(BufferClass cls, std::string_view name, int64_t bytes) { add(cls, name_of_buffer(name), bytes); }
  void persistent(BufferClass cls, int64_t bytes) { add(cls, {"", false}, bytes); }
  std::vector<HeldTensor> list() const {
    std::vector<HeldTensor> held;
    for (const auto& [key, bytes] : bytes_)
      if (bytes != 0) held.push_back({std::get<0>(key), std::get<1>(key), std::get<2>(key), bytes});
    return held;
  }

 private:
  void add(BufferClass cls, const std::pair<std::string, bool>& name, int64_t bytes) {
    bytes_[{cls, name.first, name.second}] += bytes;
  }
  std::map<std::tuple<BufferClass, std::string, bool>, int64_t> bytes_;
};

/// One change of the device's live bytes: a buffer, or a slot of a call that no buffer is bound to.
struct Change {
  int32_t buffer = -1;
  const Slot* slot = nullptr;
  int sign = 1;
};

/// Calls `use` with each change of the device's live bytes in a role's program, until it returns false.
template <class Use>
void for_each_change(const Plan& plan, const Role& role, const Use& use) {
  for (const Item& item : role.program) {
    if (const auto* a = std::get_if<Alloc>(&item)) {
      if (!use(Change{.buffer = a->buffer.value, .sign = 1})) return;
    } else if (const auto* f = std::get_if<Free>(&item)) {
      if (!use(Change{.buffer = f->buffer.value, .sign = -1})) return;
    } else {
      const Call& call = std::get<Call>(item);
      const Segment& segment = plan.segments[call.segment.index()];
      for (const Step& step : segment.steps) {
        const auto* a = std::get_if<AllocSlot>(&step);
        const auto* f = std::get_if<FreeSlot>(&step);
        if (a == nullptr && f == nullptr) continue;
        const SlotId id = a != nullptr ? a->slot : f->slot;
        const BufferId bound = id.index() < call.binding.size() ? call.binding[id.index()] : BufferId();
        if (!use(Change{.buffer = bound ? bound.value : -1, .slot = &segment.slots[id.index()], .sign = a != nullptr ? 1 : -1}))
          return;
      }
    }
  }
}

}  // namespace

std::vector<HeldTensor> held_at_peak(const Plan& plan, int stage) {
  const Role& role = plan.roles[static_cast<size_t>(stage)];
  const int64_t peak = memory_peak(plan, stage)[static_cast<size_t>(Space::kDevice)].peak_bytes;
  Held held;
  int64_t live = 0;
  std::vector<int32_t> bound(role.buffers.size(), 0);
  for (const Buffer& b : role.buffers)
    if (b.persistent && !b.view && b.space == Space::kDevice)
      held.persistent(b.kind, aligned(b.type.bytes())), live += aligned(b.type.bytes());
  const auto bytes_of = [&](const Change& c) {
    const Type& type = c.slot != nullptr ? c.slot->type : role.buffers[static_cast<size_t>(c.buffer)].type;
    const Space space = c.slot != nullptr ? c.slot->space : role.buffers[static_cast<size_t>(c.buffer)].space;
    return space == Space::kDevice ? aligned(type.bytes()) : 0;
  };
  // The walk ends at the first moment of the peak; locals are freed within their call, so that those live are of the last one.
  std::map<const Slot*, int64_t> locals;
  if (live < peak)
    for_each_change(plan, role, [&](const Change& c) {
      const int64_t bytes = bytes_of(c);
      live += c.sign * bytes;
      if (c.buffer >= 0 && bytes > 0)
        bound[static_cast<size_t>(c.buffer)] += c.sign;
      else
        locals[c.slot] += c.sign * bytes;
      return live < peak;
    });
  for (size_t i = 0; i < bound.size(); ++i)
    if (bound[i] > 0) held.change(role.buffers[i].kind, role.buffers[i].name, aligned(role.buffers[i].type.bytes()));
  for (const auto& [slot, bytes] : locals)
    if (bytes > 0) held.change(slot->cls, slot->name, bytes);
  return held.list();
}

}  // namespace shardlab::simulator
