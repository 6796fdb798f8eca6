// Gradient accumulation: one optimizer step over several micro-batches. The first overwrites the gradients, the others add to them.
//
// In canonical mode floating-point addition has one order: micro-batches are leaves of a binary tree (docs/canonical-order.md).
// Then every micro-batch writes a copy of its own and copies are added pairwise as a binary counter carries: at most floor(log2 m)
// + 1 copies live at once, all planned.
//
// The tree over micro-batches stands above that over the parts of a sequence: under context parallelism each micro-batch's gradients
// are then summed over the ranks of "cp" before they are added up. An expert's gradient is a sum over a micro-batch of all ranks that
// share experts: so where ranks with other sequences share them the ranks share out every micro-batch, and sum the other gradients of
// each over all data ranks.
//
// Shapes   gradients as the parameters
// Adds     no communication: reduction over data-parallel ranks happens once a step, after the last micro-batch; canonical with cp
//          or ep: per micro-batch an all-reduce of every gradient over cp, or over the data ranks
// Memory   none; in canonical mode floor(log2 m) further copies of the gradients
// Refuses  nothing; canonical with dp > 1 wants a power of two
// Paper    Ott et al., "Scaling Neural Machine Translation" (2018)
#include "strategies/accumulation.h"

#include <algorithm>
#include <bit>
#include <functional>
#include <map>
#include <utility>

#include "strategies/state.h"

namespace shardlab::strategies {
namespace {

constexpr std::string_view kAccumulationName = "accumulation";

/// Adds the gradients of one copy to another, for every parameter of a unit; and sums those of a copy over parts of sequences.
class CopyAdder {
 public:
  CopyAdder(Draft& draft, StageDraft& stage) : draft_(draft), stage_(stage), early_(early_axes(draft)) {}

  bool sums_parts() const { return !early_.empty(); }

  /// Sums a copy over the ranks that have other parts of the micro-batch.
  Event sum_parts(int unit, int micro_batch, int index) {
    std::vector<BufferId> binding;
    for (int p = 0; p < static_cast<int>(draft_.of_unit(unit).parameters.size()); ++p) {
      if (draft_.plan.mesh.size(summed_over(unit, p)) == 1) continue;
      binding.push_back(copy(index, unit, p));
      binding.push_back(summed(index, unit, p));
    }
    const Unit& u = draft_.units[static_cast<size_t>(unit)];
    return call_event(bind(sum_segment(u.kind, unit), std::move(binding), u.layer, micro_batch), unit, micro_batch);
  }

  Event add(int unit, int micro_batch, int to, int from) {
    const int parameters = static_cast<int>(draft_.of_unit(unit).parameters.size());
    const Unit& u = draft_.units[static_cast<size_t>(unit)];
    std::vector<BufferId> binding;
    for (int p = 0; p < parameters; ++p) {
      binding.push_back(summed(to, unit, p));
      binding.push_back(summed(from, unit, p));
    }
    Event event;
    event.unit = unit;
    event.micro_batch = micro_batch;
    event.call = bind(segment(u.kind, unit), std::move(binding), u.layer, micro_batch);
    return event;
  }

 private:
  /// Copy 0 is the gradient itself; further ones are made when they are first needed.
  BufferId copy(int index, int unit, int parameter) {
    if (index == 0) return stage_.at(unit, parameter).gradient;
    auto& copies = stage_.gradient_copies;
    while (static_cast<int>(copies.size()) < index) {
      auto& units = copies.emplace_back();
      for (const int u : stage_.units) {
        auto& ids = units.emplace_back();
        for (int p = 0; p < static_cast<int>(draft_.of_unit(u).parameters.size()); ++p) {
          Buffer b = stage_.role.buffers[stage_.at(u, p).gradient.index()];
          b.name = state_name(draft_, u, p) + ".grad.copy" + std::to_string(copies.size());
          ids.push_back(add_buffer(stage_, std::move(b)));
          stage_.whole_step.push_back(ids.back());
        }
      }
    }
    return copies[static_cast<size_t>(index - 1)][stage_.index_of(unit)][static_cast<size_t>(parameter)];
  }

  /// The same storage as a sum over the parts of the micro-batch.
  BufferId summed(int index, int unit, int parameter) {
    const BufferId part = copy(index, unit, parameter);
    if (partial_axes(stage_.role.buffers[part.index()].type, early_).empty()) return part;
    BufferId& known = summed_[part.value];
    if (known) return known;
    Buffer whole = stage_.role.buffers[part.index()];
    whole.name += ".parts";
    whole.type = summed_type(std::move(whole.type));
    if (!whole.view) whole.view = View{part.value, 0, {}};
    known = add_buffer(stage_, std::move(whole));
    if (index == 0) stage_.at(unit, parameter).reduced = known;
    return known;
  }

  Type summed_type(Type type) const {
    const AxisSet axes = partial_axes(type, early_);
    return placed(std::move(type), axes, Placement::replicate());
  }

  /// The axes over which a gradient is summed early. An expert has seen the rows of all ranks that share it: none are left where those are
  /// all data ranks.
  AxisSet summed_over(int unit, int parameter) { return partial_axes(gradient_type(draft_, unit, parameter), early_); }

  SegmentId sum_segment(UnitKind kind, int unit) {
    const std::string name = "parts." + std::string(name_of(kind));
    return draft_.cached(name, [&] {
      Segment s;
      s.name = name;
      const auto& parameters = draft_.of(kind).parameters;
      for (int p = 0; p < static_cast<int>(parameters.size()); ++p) {
        const AxisSet axes = summed_over(unit, p);
        if (draft_.plan.mesh.size(axes) == 1) continue;
        const std::string& parameter = parameters[static_cast<size_t>(p)].name;
        const int32_t first = static_cast<int32_t>(s.slots.size());
        for (const bool whole : {false, true}) {
          Slot slot;
          slot.name = parameter + (whole ? ".whole" : ".part");
          slot.type = gradient_type(draft_, unit, p);
          if (whole) slot.type = summed_type(std::move(slot.type));
          slot.cls = BufferClass::kGradient;
          slot.kind = SlotKind::kBound;
          s.slots.push_back(std::move(slot));
        }
        Op op;
        const bool parts = early_ == context_axes(draft_.plan.mesh);  // of sequences
        const CommId comm = parts ? draft_.comm("cp.grads", axes) : gradients_comm(draft_, axes);
        op.work = Collective{CollectiveKind::kAllReduce, ReduceOp::kSum, comm, draft_.algorithm()};
        op.reads = {SlotId(first)};
        op.writes = {SlotId(first + 1)};
        op.label = parameter;
        op.strategy = kAccumulationName;
        s.steps.emplace_back(std::move(op));
      }
      return s;
    });
  }

  SegmentId segment(UnitKind kind, int unit) {
    const std::string name = "add." + std::string(name_of(kind));
    return draft_.cached(name, [&] {
      Segment s;
      s.name = name;
      const auto& parameters = draft_.of(kind).parameters;
      for (int p = 0; p < static_cast<int>(parameters.size()); ++p) {
        const int32_t first = static_cast<int32_t>(s.slots.size());
        for (const char* side : {".left", ".right"}) {
          Slot slot;
          slot.name = parameters[static_cast<size_t>(p)].name + side;
          slot.type = summed_type(gradient_type(draft_, unit, p));
          slot.cls = BufferClass::kGradient;
          slot.kind = SlotKind::kBound;
          s.slots.push_back(std::move(slot));
        }
        Op op;
        op.work = Add{};
        op.reads = {SlotId(first), SlotId(first + 1)};
        op.writes = {SlotId(first)};
        op.label = parameters[static_cast<size_t>(p)].name;
        op.strategy = kAccumulationName;
        s.steps.emplace_back(std::move(op));
      }
      return s;
    });
  }

  Draft& draft_;
  StageDraft& stage_;
  const AxisSet early_;
  std::map<int32_t, BufferId> summed_;  ///< by copy
};

/// Rewrites a stage's timetable: every backward writes a copy of its own, followed by the additions that its carry asks for.
void count_in_binary(Draft& draft, StageDraft& stage) {
  std::map<int, std::vector<int>> order;  // by unit
  for (const Event& event : stage.events)
    if (event.makes_gradients()) order[event.unit].push_back(event.micro_batch);
  std::map<int, std::vector<Carry>> plan;
  for (const auto& [unit, micro_batches] : order) plan[unit] = carries(micro_batches, draft.micro_batches(), true);
  std::map<int, size_t> done;  // by unit
  CopyAdder adder(draft, stage);
  std::vector<Event> events;
  for (Event& event : stage.events) {
    const bool gradients = event.makes_gradients();
    const int unit = event.unit, micro = event.micro_batch;
    events.push_back(std::move(event));
    if (!gradients) continue;
    const Carry& carry = plan[unit][done[unit]++];
    events.back().first = true;
    events.back().storage = carry.written;
    if (adder.sums_parts()) events.push_back(adder.sum_parts(unit, micro, carry.written));
    for (const auto& [to, from] : carry.added) events.push_back(adder.add(unit, micro, to, from));
  }
  stage.events = std::move(events);
}

}  // namespace

namespace {

/// A subtree of the canonical sum over micro-batches that has been formed, and the copy that holds it.
struct Held {
  int begin = 0, end = 0, copy = 0;
};

/// Where the tree parts the leaves [begin, end): at the largest power of two below their number.
int middle(int begin, int end) { return begin + static_cast<int>(std::bit_floor(static_cast<unsigned>(end - begin - 1))); }

/// The range of the other half of a subtree: [begin, end) of m leaves is one half.
std::pair<int, int> sibling(int begin, int end, int m) {
  int low = 0, high = m;
  while (true) {
    const int cut = middle(low, high);
    if (begin == low && end == cut) return {cut, high};
    if (begin == cut && end == high) return {low, cut};
    (begin < cut ? high : low) = cut;
  }
}

}  // namespace

std::vector<Carry> carries(std::span<const int> order, int micro_batches, bool canonical) {
  std::vector<Carry> all;
  std::vector<Held> held;
  const auto at = [&](int begin, int end) {
    return std::ranges::find_if(held, [&](const Held& h) { return h.begin == begin && h.end == end; });
  };
  for (const int j : order) {
    const auto other = [&](const Held& h) {
      if (h.end - h.begin == micro_batches) return held.end();
      const auto [begin, end] = sibling(h.begin, h.end, micro_batches);
      return at(begin, end);
    };
    if (!canonical && !held.empty()) {
      all.push_back({1, {{0, 1}}});
      continue;
    }
    Held now{j, j + 1, 0};
    // The lowest copy that is free, behind those to which it is added at once.
    const bool last = j == order.back();
    int copy = 0;
    if (const auto beside = canonical ? other(now) : held.end(); beside != held.end()) copy = beside->copy + 1;
    if (last)
      for (const Held& h : held) copy = std::max(copy, h.copy + 1);
    while (std::ranges::find(held, copy, &Held::copy) != held.end()) ++copy;
    now.copy = copy;
    Carry carry{copy, {}};
    const auto add = [&](const Held& to) {
      carry.added.emplace_back(std::min(to.copy, now.copy), std::max(to.copy, now.copy));
      now = {std::min(to.begin, now.begin), std::max(to.end, now.end), std::min(to.copy, now.copy)};
    };
    for (auto found = other(now); found != held.end(); found = other(now)) {
      const Held to = *found;
      held.erase(found);
      add(to);
    }
    // Where only some of the micro-batches are summed here, the subtrees that they leave are added at the end.
    if (last) {
      std::ranges::sort(held, std::greater(), &Held::begin);
      for (const Held& to : std::exchange(held, {})) add(to);
    }
    held.push_back(now);
    all.push_back(std::move(carry));
  }
  return all;
}

AxisSet early_axes(const Draft& draft) {
  const Case& c = draft.config;
  if (!draft.training || !c.canonical || c.layout.zero >= 2 || draft.micro_batches() == 1) return {};
  if (c.layout.expert_shards_of_dp() > 1) return data_axes(draft.plan.mesh);
  return c.layout.cp > 1 ? context_axes(draft.plan.mesh) : AxisSet{};
}

AxisSet partial_axes(const Type& type, AxisSet among) {
  AxisSet axes;
  for (int axis = 0; axis < kMaxAxes; ++axis)
    if (among.contains(axis) && type.place[static_cast<size_t>(axis)].is_partial()) axes = axes | AxisSet::of(axis);
  return axes;
}

CommId gradients_comm(Draft& draft, AxisSet axes) {
  const AxisSet sharing = expert_axes(draft);
  const bool of_experts =
      !sharing.empty() && (axes.mask & sharing.mask) == 0 && early_axes(draft) != sharing;  // else of all, summed over these
  return draft.comm(of_experts ? "experts.grads" : "dp.grads", axes);
}

void accumulate(Draft& draft) {
  // Backward adds in place (`emit` sets the flag on every backward but the first), unless the order of the sum is fixed.
  // Where each micro-batch is scattered by itself, its slices are what is added up (shards.cpp).
  if (!draft.config.canonical || draft.config.layout.zero >= 2) return;
  for (StageDraft& stage : draft.stages) count_in_binary(draft, stage);
}

}  // namespace shardlab::strategies
