// Rule 1, form: ids exist, views lie inside their base, bindings are exact, operands fit the op. What every later rule relies on.
#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <string_view>
#include <unordered_map>
#include <unordered_set>

#include "plan/base/hash.h"
#include "plan/limits.h"
#include "plan/named_kernels.h"
#include "plan/verify_internal.h"

namespace shardlab::verifying {

std::string op_name(const Segment& segment, const Op& op, const Call& call) {
  std::string text;
  if (call.layer >= 0) text += fmt::format("layers.{} ", call.layer);
  if (call.micro_batch >= 0) text += fmt::format("m{} ", call.micro_batch);
  return text + op_name(segment, op);
}

std::string placement_name(Placement p) {
  switch (p.kind) {
    case Place::kReplicate: return "replicate";
    case Place::kShard: return fmt::format("shard({})", p.dim);
    case Place::kPartial: return "partial";
    case Place::kLocal: return "local";
  }
  return "?";
}

std::string scale_name(const Scale& s) {
  std::string text = s.factor.den == 1 ? fmt::format("{}", s.factor.num) : fmt::format("{}/{}", s.factor.num, s.factor.den);
  if (!s.denominator.empty()) text += "/" + s.denominator;
  return text;
}

std::string_view name_of(Micro micro) {
  switch (micro) {
    case Micro::kNone: return "none";
    case Micro::kSlice: return "slice";
    case Micro::kSum: return "sum";
  }
  return "?";
}

std::vector<SlotId> reads_with_predicate(const Op& op) {
  std::vector<SlotId> reads = op.reads;
  if (op.when) reads.push_back(op.when);
  return reads;
}

size_t TypeTable::Hash::operator()(const Type& t) const {
  uint64_t h =
      mix(static_cast<uint64_t>(t.dtype) | static_cast<uint64_t>(t.micro) << 8 | static_cast<uint64_t>(t.shape.rank) << 16);
  for (int i = 0; i < t.shape.rank; ++i) h = mix(h ^ static_cast<uint64_t>(t.shape[i]));
  uint64_t places = 0;
  for (const Placement& p : t.place) places = places * 61 + static_cast<uint64_t>(p.kind) * 7 + static_cast<uint64_t>(p.dim);
  h = mix(h ^ places);
  h = mix(h ^ static_cast<uint64_t>(t.scale.factor.num) ^ static_cast<uint64_t>(t.scale.factor.den) << 32);
  return t.scale.denominator.empty() ? h : hash_text(t.scale.denominator, h);
}

namespace {

template <class Table>
Window follow(const Table& table, int32_t index) {
  Window w{index, 0, table[static_cast<size_t>(index)].type.shape.elements(), {}};
  while (const auto& view = table[static_cast<size_t>(w.root)].view) {
    w.begin += view->offset;
    w.shard = w.shard | view->shard_axes;
    w.root = view->base;
  }
  return w;
}

}  // namespace

Window window_of(const Segment& segment, SlotId slot) { return follow(segment.slots, slot.value); }
Window window_of(const Role& role, BufferId buffer) { return follow(role.buffers, buffer.value); }

bool overlap(const Mesh& mesh, const Window& a, const Window& b) {
  return a.root == b.root && a.begin < b.begin + b.length * mesh.size(b.shard) && b.begin < a.begin + a.length * mesh.size(a.shard);
}

int peer_of(const Plan& plan, int role, const Comm& comm, int hop, bool cyclic) {
  if (!joins_roles(plan, comm)) return cyclic ? role : -1;
  const std::vector<int>* group = group_at(comm, role);
  const int size = group != nullptr ? static_cast<int>(group->size()) : static_cast<int>(plan.roles.size());
  int at = hop + (group != nullptr ? static_cast<int>(std::ranges::find(*group, role) - group->begin()) : role);
  if (cyclic) at = ((at % size) + size) % size;
  if (at < 0 || at >= size) return -1;
  return group != nullptr ? (*group)[static_cast<size_t>(at)] : at;
}

int line_of(const Plan& plan, const Comm& comm, int hop) {
  if (joins_roles(plan, comm)) return 0;
  const int n = group_size(plan.mesh, comm);
  return (hop % n + n) % n;
}

int order_of(const Op& op) {
  if (const auto* c = std::get_if<Collective>(&op.work)) return 2 * c->comm.value;
  if (const auto* s = std::get_if<Send>(&op.work)) return 2 * s->comm.value;
  if (const auto* r = std::get_if<Recv>(&op.work)) return 2 * r->comm.value + (r->cyclic ? 1 : 0);
  return -1;
}

std::optional<int> role_axis(const Plan& plan) {
  if (plan.roles.size() == 1) return std::nullopt;
  return plan.mesh.find(kPipelineAxis);
}

std::string axes_text(const Plan& plan, AxisSet axes) {
  std::string text;
  for (size_t a = 0; a < plan.mesh.axes.size(); ++a)
    if (axes.contains(static_cast<int>(a))) text += (text.empty() ? "" : ", ") + plan.mesh.axes[a].name;
  return text;
}

bool joins_roles(const Plan& plan, const Comm& comm) {
  const auto axis = role_axis(plan);
  return axis && comm.axes.contains(*axis);
}

namespace {

class FormChecker {
 public:
  FormChecker(const Plan& plan, Report& report) : plan_(plan), report_(report), types_(plan.mesh) {}

  void run() {
    check_plan();
    if (report_.count() > 0) return;
    for (const Segment& segment : plan_.segments) check_segment(segment);
    if (report_.count() > 0) return;
    for (const Segment& segment : plan_.segments) {
      formals_.emplace_back();
      for (const Slot& slot : segment.slots)
        formals_.back().push_back(slot.kind == SlotKind::kBound && !slot.view ? formal(slot.type, slot.cls, slot.space) : -1);
    }
    for (size_t r = 0; r < plan_.roles.size() && !report_.full(); ++r) check_role(static_cast<int>(r));
  }

 private:
  template <class... T>
  void fault(int role, std::string op, fmt::format_string<T...> format, T&&... values) {
    report_.add(Rule::kForm, role, std::move(op), fmt::format(format, std::forward<T>(values)...));
  }

  /// Type, class and space as one number: what a binding must match.
  int64_t formal(const Type& type, BufferClass cls, Space space) {
    return (static_cast<int64_t>(types_.exact(type)) << 8) | static_cast<int64_t>(cls) << 2 | static_cast<int64_t>(space);
  }

  void check_plan() {
    const auto axis = plan_.mesh.find(kPipelineAxis);
    const int stages = axis ? plan_.mesh.axes[static_cast<size_t>(*axis)].size : 1;
    if (plan_.mesh.axes.size() > kMaxAxes)
      return fault(-1, "", "the mesh has {} axes, more than {}", plan_.mesh.axes.size(), kMaxAxes);
    for (const MeshAxis& a : plan_.mesh.axes)
      if (a.size < 1) return fault(-1, "", "axis `{}` has size {}", a.name, a.size);
    if (!fits_limits(plan_.mesh)) return fault(-1, "", "the mesh has more than {} ranks", kMaxRanks);
    if (static_cast<int>(plan_.roles.size()) != stages)
      fault(-1, "", "{} roles for a pipeline axis of size {}: there must be one per coordinate", plan_.roles.size(), stages);
    if (plan_.streams.empty() || plan_.streams.size() > kMaxStreams)
      fault(-1, "", "{} streams: a plan has at least `compute` and at most {}", plan_.streams.size(), kMaxStreams);
    if (plan_.micro_batches < 1 || plan_.micro_batches > kMaxMicroBatches)
      fault(-1, "", "{} micro-batches: a plan has 1 to {}", plan_.micro_batches, kMaxMicroBatches);
    if (plan_.sequences_per_micro_batch < 1 || plan_.sequences_per_micro_batch > kMaxElements)
      fault(-1, "", "{} sequences a micro-batch: a plan has 1 to {}", plan_.sequences_per_micro_batch, kMaxElements);
    if (plan_.period < 1 || plan_.period > kMaxPeriod)
      fault(-1, "", "a period of {} steps: a plan has 1 to {}", plan_.period, kMaxPeriod);
    for (size_t r = 0; r < plan_.roles.size(); ++r)
      if (plan_.roles[r].stage != static_cast<int>(r))
        fault(static_cast<int>(r), "", "the role is said to be of stage {}: roles stand in order, one a stage, from 0",
              plan_.roles[r].stage);
    check_parameters();
    check_placements();
    check_names(plan_.comms, -1, "communicators");
    check_names(plan_.segments, -1, "segments");
    check_names(plan_.parameters, -1, "parameters");
    for (size_t i = 0; i < plan_.streams.size(); ++i)
      if (std::ranges::find(plan_.streams.begin(), plan_.streams.begin() + static_cast<std::ptrdiff_t>(i), plan_.streams[i]) !=
          plan_.streams.begin() + static_cast<std::ptrdiff_t>(i))
        fault(-1, "streams", "two are called {}", plan_.streams[i]);
    check_parameter_numbers();
    for (const Comm& c : plan_.comms) {
      if (c.axes.mask >> plan_.mesh.axes.size()) fault(-1, "", "communicator `{}` names an axis that the mesh lacks", c.name);
      check_groups(c);
    }
  }

  /// A placement of a layer's experts is a permutation of as many as its weights have.
  void check_placements() {
    int before = -1;
    for (const ExpertPlacement& p : plan_.expert_placement) {
      if (p.layer <= before) fault(-1, "", "expert_placement of layer {} stands behind layer {}: layers ascend", p.layer, before);
      before = std::max(before, p.layer);
      int64_t count = -1;
      for (const Parameter& parameter : plan_.parameters) {
        if (layer_of_expert_weight(parameter.name) != p.layer || parameter.type.shape.rank == 0) continue;
        count = logical_shape(parameter.type, plan_.mesh)[0];
        if (const std::string why = placement_fault(p, count); !why.empty())
          fault(-1, "", "expert_placement of layer {}: {} ({})", p.layer, why, parameter.name);
      }
      if (count < 0) fault(-1, "", "expert_placement of layer {}, which has no experts", p.layer);
      if (p.places != place_experts(p.layer, p.experts).places)
        fault(-1, "", "expert_placement of layer {}: the places of experts are not those by which the experts are listed", p.layer);
    }
  }

  /// Routers write places of experts by the placement of their call's layer.
  void check_routes(int r, const Segment& segment, const Call& call) {
    if (call.layer >= 0 || plan_.expert_placement.empty()) return;
    for (const Step& step : segment.steps)
      if (const Op* op = std::get_if<Op>(&step);
          op != nullptr && (std::holds_alternative<Route>(op->work) || std::holds_alternative<ExpertLoad>(op->work) ||
                            std::holds_alternative<ChooseExperts>(op->work)))
        return fault(r, op_name(segment, *op), "goes by places of experts, and its call names no layer whose experts are placed");
  }

  /// What a call does with experts goes by the placement of its layer; so the weights that it is given lie by that placement.
  void check_placed_weights(int r, const Segment& segment, const Call& call, size_t slot, const Buffer& b) {
    if (call.layer < 0 || b.parameter < 0 || plan_.expert_placement.empty()) return;
    const auto layer = layer_of_expert_weight(plan_.parameters[static_cast<size_t>(b.parameter)].name);
    if (!layer || *layer == call.layer) return;
    const ExpertPlacement *of_weights = placement_of(plan_.expert_placement, *layer),
                          *of_call = placement_of(plan_.expert_placement, call.layer);
    const bool same = of_weights != nullptr && of_call != nullptr ? of_weights->experts == of_call->experts : of_weights == of_call;
    if (!same)
      fault(r, segment.name, "works for layer {} and %{} is given %{}: experts of layer {} are placed otherwise", call.layer,
            segment.slots[slot].name, b.name, *layer);
  }

  void check_parameters() {
    const auto stages = static_cast<int>(plan_.roles.size());
    for (const Parameter& p : plan_.parameters) {
      check_type(p, p.type, -1, "parameters");
      const bool ascending = std::ranges::adjacent_find(p.stages, std::greater_equal{}) == p.stages.end();
      if (p.stages.empty() || !ascending || p.stages.front() < 0 || p.stages.back() >= stages)
        fault(-1, "parameters", "%{} is of stages {}, and the plan has stages 0 to {}, each to be named once and in order", p.name,
              fmt::join(p.stages, " "), stages - 1);
    }
  }

  /// Only stages are grouped: what they hold is a role's own, and rule 4 knows who gave what to a sum.
  void check_groups(const Comm& c) {
    if (c.groups.empty()) return;
    if (c.axes.size() != 1) return fault(-1, "", "communicator `{}` has groups, so it must have one axis", c.name);
    const size_t axis = static_cast<size_t>(std::countr_zero(c.axes.mask));
    const MeshAxis& a = plan_.mesh.axes[axis];
    if (a.size > 1 && a.name != kPipelineAxis)
      return fault(-1, "", "communicator `{}` has groups along `{}`: an axis in two, `{}=..` and another, says the same", c.name,
                   a.name, a.name);
    std::vector<int> seen(static_cast<size_t>(a.size));
    const int size = group_size(plan_.mesh, c);
    for (const std::vector<int>& group : c.groups) {
      if (static_cast<int>(group.size()) != size && group.size() != 1)
        fault(-1, "", "communicator `{}` has groups of {} and of {}: one size, but that a stage may stand alone", c.name,
              group.size(), size);
      for (const int at : group)
        if (at < 0 || at >= a.size || seen[static_cast<size_t>(at)]++ != 0)
          return fault(-1, "", "communicator `{}`: each of the {} coordinates along `{}` is in one group, and {} is not", c.name,
                       a.size, a.name, at);
    }
    if (const auto left = std::ranges::find(seen, 0); left != seen.end())
      fault(-1, "", "communicator `{}`: coordinate {} along `{}` is in no group", c.name, left - seen.begin(), a.name);
  }

  /// Two parameters of one number and one shape would start with equal values.
  void check_parameter_numbers() {
    std::unordered_map<uint32_t, std::string_view> holders;
    for (const Parameter& p : plan_.parameters)
      if (const auto [holder, fresh] = holders.try_emplace(p.tensor, p.name); !fresh)
        fault(-1, "", "parameters `{}` and `{}` are both tensor {}: they would be drawn from the same random numbers",
              holder->second, p.name, p.tensor);
  }

  /// Shard dims exist, extents are positive, axes are those of the mesh.
  template <class Owner>
  void check_type(const Owner& owner, const Type& type, int role, const std::string& where) {
    for (int d = 0; d < type.shape.rank; ++d)
      if (type.shape[d] < 1) return fault(role, where, "%{}: extent {} of dim {} is not positive", owner.name, type.shape[d], d);
    if (!fits_limits(type.shape)) return fault(role, where, "%{} has more than {} elements on one rank", owner.name, kMaxElements);
    const Rational& scale = type.scale.factor;
    if (scale.num < -kMaxScale || scale.num > kMaxScale || scale.den < 1 || scale.den > kMaxScale)
      fault(role, where, "%{} has scale {}: numerator and denominator are at most {}", owner.name, scale_name(type.scale),
            kMaxScale);
    for (size_t a = 0; a < kMaxAxes; ++a) {
      const Placement p = type.place[a];
      if (a >= plan_.mesh.axes.size() && p.kind != Place::kReplicate)
        fault(role, where, "%{}: placed along axis {} of {}", owner.name, a, plan_.mesh.axes.size());
      if (p.is_shard() && (p.dim < 0 || p.dim >= type.shape.rank))
        fault(role, where, "%{}: shard({}) along {}, but it has {} dims", owner.name, p.dim, plan_.mesh.axes[a].name,
              type.shape.rank);
    }
  }

  /// Storage of a role, or of a segment's locals, taken together. Types have been checked.
  template <class Table, class Owns>
  void check_bytes(const Table& table, int role, const std::string& where, Owns owns) {
    int64_t bytes = 0;
    for (const auto& owner : table) {
      if (!owns(owner)) continue;
      bytes += owner.type.bytes();
      if (bytes > kMaxRoleBytes)
        return fault(role, where, "the storage up to %{} takes {} bytes on one rank, more than {}", owner.name, bytes,
                     kMaxRoleBytes);
    }
  }

  /// Views form no cycle, lie inside their base, and keep its element type and space.
  template <class Table>
  void check_views(const Table& table, int role, const std::string& where) {
    for (size_t i = 0; i < table.size(); ++i) {
      const auto& owner = table[i];
      if (!owner.view) continue;
      const View& v = *owner.view;
      if (v.base < 0 || static_cast<size_t>(v.base) >= table.size()) {
        fault(role, where, "%{} is a view of entry {}, which does not exist", owner.name, v.base);
        continue;
      }
      size_t depth = 0;
      for (const auto* at = &v; at != nullptr && depth <= table.size(); ++depth) {
        const auto& base = table[static_cast<size_t>(at->base)];
        at = base.view && base.view->base >= 0 && static_cast<size_t>(base.view->base) < table.size() ? &*base.view : nullptr;
      }
      if (depth > table.size()) {
        fault(role, where, "%{} is a view of itself", owner.name);
        continue;
      }
      const auto& base = table[static_cast<size_t>(v.base)];
      if (v.shard_axes.mask >> plan_.mesh.axes.size()) {
        fault(role, where, "%{} is a shard along an axis that the mesh lacks", owner.name);
        continue;
      }
      if (v.offset < 0 || v.offset > base.type.shape.elements()) {
        fault(role, where, "%{} begins at element {} of %{}, which has {}", owner.name, v.offset, base.name,
              base.type.shape.elements());
        continue;
      }
      const int64_t end = v.offset + owner.type.shape.elements() * plan_.mesh.size(v.shard_axes);
      if (end > base.type.shape.elements())
        fault(role, where, "%{} covers elements [{}, {}) of %{}, which has {}", owner.name, v.offset, end, base.name,
              base.type.shape.elements());
      if (owner.type.dtype != base.type.dtype)
        fault(role, where, "%{} is a {} view of %{}, which is {}", owner.name, shardlab::name_of(owner.type.dtype), base.name,
              shardlab::name_of(base.type.dtype));
      if (owner.space != base.space) fault(role, where, "%{} and its base %{} are in different spaces", owner.name, base.name);
      if (base.view && !base.view->shard_axes.empty() &&
          (v.offset != 0 || owner.type.shape.elements() != base.type.shape.elements()))
        fault(role, where, "%{} is a part of %{}, which is itself one rank's shard: take a view of the whole shard", owner.name,
              base.name);
    }
  }

  template <class Table>
  void check_names(const Table& table, int role, const std::string& where) {
    std::unordered_set<std::string_view> seen;
    for (const auto& entry : table)
      if (!seen.insert(entry.name).second) fault(role, where, "two entries are called %{}", entry.name);
  }

  bool slot_exists(const Segment& segment, SlotId slot) const { return slot.value >= 0 && slot.index() < segment.slots.size(); }

  void check_segment(const Segment& segment) {
    check_names(segment.slots, -1, segment.name);
    for (const Slot& slot : segment.slots) {
      check_type(slot, slot.type, -1, segment.name);
      if (slot.count && !slot_exists(segment, slot.count)) fault(-1, segment.name, "the count of %{} does not exist", slot.name);
    }
    if (report_.count() > 0) return;
    check_views(segment.slots, -1, segment.name);
    check_bytes(segment.slots, -1, segment.name, [](const Slot& s) { return s.kind == SlotKind::kLocal && !s.view; });
    if (report_.count() > 0) return;
    for (const Step& step : segment.steps) {
      if (const Op* op = std::get_if<Op>(&step)) {
        check_op(segment, *op);
        continue;
      }
      const bool alloc = std::holds_alternative<AllocSlot>(step);
      const SlotId slot = alloc ? std::get<AllocSlot>(step).slot : std::get<FreeSlot>(step).slot;
      if (!slot_exists(segment, slot))
        fault(-1, segment.name, "{} of slot {}, which does not exist", alloc ? "alloc" : "free", slot.value);
      else if (segment.slots[slot.index()].view)
        fault(-1, segment.name, "{} of %{}, which is a view: its base owns the storage", alloc ? "alloc" : "free",
              segment.slots[slot.index()].name);
    }
  }

  void check_op(const Segment& segment, const Op& op) {
    const std::string name = op_name(segment, op);
    for (const size_t operands : {op.reads.size(), op.writes.size()})
      if (static_cast<int64_t>(operands) > kMaxOperands)
        return fault(-1, name, "{} operands: an op has at most {} reads and as many writes", operands, kMaxOperands);
    for (const auto* list : {&op.reads, &op.writes})
      for (const SlotId slot : *list)
        if (!slot_exists(segment, slot))
          return fault(-1, name, "operand {} does not exist: the segment has {} slots", slot.value, segment.slots.size());
    if (!op.stream || op.stream.index() >= plan_.streams.size())
      return fault(-1, name, "stream {} does not exist", op.stream.value);
    if (op.when) {
      if (!slot_exists(segment, op.when)) return fault(-1, name, "its predicate does not exist");
      check_predicate(segment, op, name);
    } else if (restores(op)) {
      return fault(-1, name, "restores what was there before the period, and no predicate says when");
    }
    CommId comm;
    std::visit(
        [&](const auto& w) {
          if constexpr (requires { w.comm; }) comm = w.comm;
        },
        op.work);
    const bool communicates = std::visit(
        [](const auto& w) {
          return requires { w.comm; };
        },
        op.work);
    if (communicates && (comm.value < 0 || comm.index() >= plan_.comms.size()))
      return fault(-1, name, "communicator {} does not exist", comm.value);
    if (const std::string text = operand_fault(plan_, segment, op); !text.empty()) return fault(-1, name, "{}", text);
    if (const std::string text = work_fault(segment, op); !text.empty()) return fault(-1, name, "{}", text);
    if (std::holds_alternative<LoadBatch>(op.work)) {
      const int64_t rows = segment.slots[op.writes[0].index()].type.shape[0];
      if (rows != plan_.sequences_per_micro_batch)
        fault(-1, name, "loads {} sequences, and a micro-batch of the plan has {} on each rank", rows,
              plan_.sequences_per_micro_batch);
    }
  }

  /// Numbers that `work_of` and the expansion multiply. Operands have been checked.
  std::string work_fault(const Segment& segment, const Op& op) const {
    const auto extent = [&](SlotId s) { return static_cast<double>(segment.slots[s.index()].type.shape.elements()); };
    double flops = 0;
    if (std::holds_alternative<Linear>(op.work)) {  // two factors of a x b and b x c elements, and a result of a x c
      const SlotId result = op.writes[0];
      flops = 2 * std::sqrt(extent(op.reads[0]) * extent(op.reads[1]) * extent(result));
    } else if (const auto* w = std::get_if<Attention>(&op.work)) {  // five products of every query with half of the keys
      const SlotId out = w->phase == Phase::kI ? op.reads[0] : op.writes[0];
      const double wide = std::max(1.0, static_cast<double>(w->head_dim) / std::max(1, value_dim_of(*w)));
      flops = 8 * wide * extent(out) * static_cast<double>(segment.slots[out.index()].type.shape[1]);
    } else if (const auto* block = std::get_if<AttentionBlock>(&op.work)) {  // five products of every query with every key
      const bool back = block->phase == Phase::kI;
      const double wide = std::max(1.0, static_cast<double>(value_dim_of(*block)) / std::max(1, block->head_dim));
      flops = 10 * wide * extent(op.reads[back ? 3 : 0]) *
              static_cast<double>(segment.slots[op.reads[back ? 4 : 1].index()].type.shape[1]);
    } else if (const auto* g = std::get_if<GroupedLinear>(&op.work)) {  // every row, by the weight of one expert
      const Shape& weight = segment.slots[(g->phase == Phase::kW ? op.writes[0] : op.reads[1]).index()].type.shape;
      const Shape& rows = segment.slots[op.reads[0].index()].type.shape;
      flops = 2 * static_cast<double>(rows[1]) * static_cast<double>(weight[1]) * static_cast<double>(weight[2]);
    } else if (const auto* k = std::get_if<Kernel>(&op.work)) {
      flops = kernel_flops(segment, op, *k);
    }
    if (flops < 0 || flops > static_cast<double>(kMaxFlops))
      return fmt::format("{:.3g} floating-point operations: an op does at most {}", flops, kMaxFlops);
    const int hop = std::visit(
        [](const auto& w) {
          if constexpr (requires { w.hop; })
            return w.hop;
          else
            return 0;
        },
        op.work);
    if (hop < -kMaxRanks || hop > kMaxRanks) return fmt::format("a hop of {} ranks: at most {}", hop, kMaxRanks);
    return "";
  }

  /// A predicate that differs between ranks would let some of them enter a collective alone.
  void check_predicate(const Segment& segment, const Op& op, const std::string& name) {
    const Slot& slot = segment.slots[op.when.index()];
    if (slot.type.dtype != DType::i32 || slot.type.shape.elements() != 1)
      fault(-1, name, "its predicate %{} must be i32[1]", slot.name);
    for (size_t a = 0; a < plan_.mesh.axes.size(); ++a)
      if (plan_.mesh.axes[a].size > 1 && slot.type.place[a].kind != Place::kReplicate)
        fault(-1, name, "its predicate %{} is {} along {}: it must be replicated on every axis, or ranks would part ways",
              slot.name, placement_name(slot.type.place[a]), plan_.mesh.axes[a].name);
  }

  void check_role(int r) {
    const Role& role = plan_.roles[static_cast<size_t>(r)];
    const size_t before = report_.count();
    check_names(role.buffers, r, "");
    for (const Buffer& b : role.buffers) {
      check_type(b, b.type, r, "");
      if (b.parameter < -1 || b.parameter >= static_cast<int32_t>(plan_.parameters.size()))
        fault(r, "", "%{} belongs to parameter {}, which does not exist", b.name, b.parameter);
      if (b.packed_as < -1 || b.packed_as >= static_cast<int32_t>(role.buffers.size()))
        fault(r, "", "%{} is packed as buffer {}, which does not exist", b.name, b.packed_as);
      if (report_.full()) return;
    }
    if (report_.count() > before) return;
    check_views(role.buffers, r, "");
    check_bytes(role.buffers, r, "", [](const Buffer& b) { return !b.view; });
    if (report_.count() > before) return;
    std::vector<int64_t> actual(role.buffers.size());
    for (size_t i = 0; i < actual.size(); ++i)
      actual[i] = formal(role.buffers[i].type, role.buffers[i].kind, role.buffers[i].space);
    for (const Item& item : role.program) {
      if (const Call* call = std::get_if<Call>(&item)) {
        check_call(r, *call, actual);
        if (report_.full()) return;
        continue;
      }
      const bool alloc = std::holds_alternative<Alloc>(item);
      const BufferId b = alloc ? std::get<Alloc>(item).buffer : std::get<Free>(item).buffer;
      if (b.value < 0 || b.index() >= role.buffers.size())
        fault(r, "", "{} of buffer {}, which does not exist", alloc ? "alloc" : "free", b.value);
      else if (role.buffers[b.index()].view)
        fault(r, "", "{} of %{}, which is a view: its base owns the storage", alloc ? "alloc" : "free",
              role.buffers[b.index()].name);
    }
  }

  void check_call(int r, const Call& call, const std::vector<int64_t>& actual) {
    const Role& role = plan_.roles[static_cast<size_t>(r)];
    if (call.segment.value < 0 || call.segment.index() >= plan_.segments.size())
      return fault(r, "", "a call of segment {}, which does not exist", call.segment.value);
    const Segment& segment = plan_.segments[call.segment.index()];
    if (call.micro_batch < -1 || call.micro_batch >= plan_.micro_batches)
      fault(r, segment.name, "micro-batch {} of a plan with {}", call.micro_batch, plan_.micro_batches);
    if (call.layer < -1 || call.layer >= kMaxLayers)
      fault(r, segment.name, "layer {}: a plan has layers 0 to {}", call.layer, kMaxLayers - 1);
    if (call.binding.size() != segment.slots.size())
      return fault(r, segment.name, "{} bindings for {} slots", call.binding.size(), segment.slots.size());
    check_routes(r, segment, call);
    const std::vector<int64_t>& formals = formals_[call.segment.index()];
    for (size_t i = 0; i < formals.size(); ++i) {
      const int32_t b = call.binding[i].value;
      if (formals[i] < 0) {
        if (b != BufferId::kNone)
          fault(r, segment.name, "%{} is bound to a buffer, but it is {}", segment.slots[i].name,
                segment.slots[i].view ? "a view" : "local");
        continue;
      }
      if (b < 0 || static_cast<size_t>(b) >= actual.size())
        fault(r, segment.name, "a call of the segment gives %{} no buffer", segment.slots[i].name);
      else if (actual[static_cast<size_t>(b)] != formals[i])
        report_binding(r, segment, segment.slots[i], role.buffers[static_cast<size_t>(b)]);
      else
        check_placed_weights(r, segment, call, i, role.buffers[static_cast<size_t>(b)]);
    }
  }

  void report_binding(int r, const Segment& segment, const Slot& slot, const Buffer& b) {
    const char* what = slot.cls != b.kind ? "class" : slot.space != b.space ? "space" : "type";
    fault(r, segment.name, "%{} is bound to %{}, whose {} differs{}", slot.name, b.name, what, type_difference(slot.type, b.type));
  }

  std::string type_difference(const Type& want, const Type& have) const {
    if (want.dtype != have.dtype)
      return fmt::format(": {} expected, {} found", shardlab::name_of(want.dtype), shardlab::name_of(have.dtype));
    if (want.shape != have.shape) return ": shapes are not equal";
    for (size_t a = 0; a < plan_.mesh.axes.size(); ++a)
      if (want.place[a] != have.place[a])
        return fmt::format(": {} along {} expected, {} found", placement_name(want.place[a]), plan_.mesh.axes[a].name,
                           placement_name(have.place[a]));
    if (want.scale != have.scale)
      return fmt::format(": scale {} expected, {} found", scale_name(want.scale), scale_name(have.scale));
    if (want.micro != have.micro)
      return fmt::format(": micro:{} expected, micro:{} found", name_of(want.micro), name_of(have.micro));
    return "";
  }

  const Plan& plan_;
  Report& report_;
  TypeTable types_;
  std::vector<std::vector<int64_t>> formals_;  ///< by segment and slot; -1 for slots that are not bound
};

}  // namespace

void check_form(const Plan& plan, Report& report) { FormChecker(plan, report).run(); }

}  // namespace shardlab::verifying
