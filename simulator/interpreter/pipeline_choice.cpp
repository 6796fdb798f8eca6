#include "simulator/interpreter/pipeline_choice.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <map>
#include <optional>
#include <tuple>

#include "plan/base/check.h"
#include "plan/kinds.h"
#include "plan/pipeline_case.h"
#include "plan/program.h"
#include "plan/trace_internal.h"
#include "simulator/interpreter/cost_model.h"
#include "simulator/interpreter/mixed_costs.h"

namespace shardlab::simulator {
namespace {

/// Two layers on two stages under a schedule that tells gradients of inputs and of weights apart; of the layout only what shapes
/// ops.
Case probe_of(const Case& config) {
  Case probe = config;
  probe.layout = Layout{};
  probe.layout.tp = config.layout.tp;
  probe.layout.sequence_parallel = config.layout.sequence_parallel;
  probe.layout.pp = 2;
  probe.layout.schedule = Schedule::kZbH1;
  probe.layout.overlap = config.layout.overlap;
  probe.layout.collective_algorithm = config.layout.collective_algorithm;
  if (config.layout.recompute != Recompute::kByLayer) {
    probe.layout.recompute = config.layout.recompute;
    probe.layout.recompute_options.modules = config.layout.recompute_options.modules;
  }
  probe.model.layers = 2;
  probe.train.grad_accumulation = 1;
  probe.train.global_batch_tokens = 0;
  probe.train.reduce_dtype.clear();
  probe.train.accumulate_dtype.clear();
  probe.train.clip_norm = 0;
  probe.train.guard = {};
  probe.train.post_validation = 0;
  probe.checkpoint = {};
  return probe;
}

/// The least layers of a part: the embedding and the head can do without.
int least_layers(int part, int parts) { return part == 0 || part == parts - 1 ? 0 : 1; }

/// The sum that the seconds of an instruction belong to; null: to no unit ("update4", "send.fwd.even").
double* unit_of(const Instruction& i, MeasuredSeconds& seconds) {
  if (i.segment == nullptr || is_transfer(i)) return nullptr;
  if (i.layer >= 0) {
    seconds.layers.resize(std::max(seconds.layers.size(), static_cast<size_t>(i.layer) + 1));
    return &seconds.layers[static_cast<size_t>(i.layer)];
  }
  const std::string_view name = i.segment->name;  // "embed.F", "add.embed"
  const auto is = [&](const std::string& unit) { return name.starts_with(unit + ".") || name.ends_with("." + unit); };
  return is("embed") ? &seconds.embedding : is("head") ? &seconds.head : nullptr;
}

}  // namespace

Result<UnitSeconds> unit_seconds(const Case& config, const std::function<Result<Plan>(const Case&)>& lower,
                                 const PlacedCostModel& costs) {
  if (const Model& m = config.model; m.is_mixture() && m.mixture_layers() < m.layers)
    return refusal(fmt::format("stages are dealt evenly by time where layers are alike, and {} of {} have experts",
                               m.mixture_layers(), m.layers),
                   "name a schedule, and stage_layers where they are to be uneven");
  if (const Model& m = config.model; m.has_windows() && m.local_layers() < m.layers)
    return refusal(fmt::format("stages are dealt evenly by time where layers are alike, and {} of {} attend within a window",
                               m.local_layers(), m.layers),
                   "name a schedule, and stage_layers where they are to be uneven");
  const auto plan = lower(probe_of(config));
  if (!plan.ok()) return plan.error();
  std::map<std::string, double, std::less<>> by_segment;  // of one call
  double hop = 0;
  for (size_t role = 0; role < plan->roles.size(); ++role) {
    std::map<std::string, double, std::less<>> here;
    const Program program = expand_program(*plan, static_cast<int>(role));
    for (const Instruction& i : program.instructions) {
      if (i.kind != Instruction::Kind::kRun || i.segment == nullptr) continue;
      const bool message = std::holds_alternative<Send>(i.op->work) || std::holds_alternative<Recv>(i.op->work);
      const bool talks = message || std::holds_alternative<Collective>(i.op->work);
      const double seconds = (talks ? costs.communicate(*plan, i, 1) : costs.compute(*plan, i, 1)).value;
      if (message) hop = std::max(hop, seconds);
      here[i.segment->name] += seconds;
    }
    for (const auto& [name, seconds] : here) by_segment[name] = std::max(by_segment[name], seconds);
  }
  const auto unit = [&](const std::string& name) {
    const auto of = [&](const char* piece) {
      const auto found = by_segment.find(name + piece);
      return found == by_segment.end() ? 0.0 : found->second;
    };
    return SlotSeconds{of(".F"), of(".I"), of(".W")};
  };
  return UnitSeconds{unit("embed"), unit("layer"), unit("head"), hop};
}

namespace {

/// Sets each slot of `longest` to the longer of both.
void lengthen(SlotSeconds& longest, const SlotSeconds& other) {
  for (double SlotSeconds::*slot : {&SlotSeconds::forward, &SlotSeconds::input, &SlotSeconds::weight})
    longest.*slot = std::max(longest.*slot, other.*slot);
}

void lengthen(UnitSeconds& longest, const UnitSeconds& other) {
  for (SlotSeconds UnitSeconds::*unit : {&UnitSeconds::embedding, &UnitSeconds::layer, &UnitSeconds::head})
    lengthen(longest.*unit, other.*unit);
  longest.hop = std::max(longest.hop, other.hop);
}

}  // namespace

Result<std::vector<UnitSeconds>> stage_unit_seconds(const Case& config, const std::function<Result<Plan>(const Case&)>& lower) {
  const auto stages = static_cast<size_t>(config.layout.pp);
  const auto on = [&](const Machine& machine) -> Result<UnitSeconds> {
    const auto costs = cost_model_for(machine, config.train.precision, config.canonical);
    if (!costs.ok()) return costs.error();
    return unit_seconds(config, lower, **costs);
  };
  if (!config.machine.is_mixed()) {
    const auto seconds = on(config.machine);
    if (!seconds.ok()) return seconds.error();
    return std::vector<UnitSeconds>(stages, *seconds);
  }
  std::vector<UnitSeconds> kinds;
  for (const Machine& kind : config.machine.kinds) {
    const auto seconds = on(kind);
    if (!seconds.ok()) return seconds.error();
    kinds.push_back(*seconds);
  }
  // The stages of the probe are neighbours: with one device a node its messages take the links between nodes.
  Machine joint = between_kinds(config.machine);
  joint.nodes *= joint.devices_per_node, joint.devices_per_node = 1;
  const auto between = on(joint);
  if (!between.ok()) return between.error();
  double hop = between->hop;
  for (const UnitSeconds& kind : kinds) hop = std::max(hop, kind.hop);
  std::vector<UnitSeconds> all(stages);
  for (size_t stage = 0; stage < stages; ++stage) {
    const KindRange range = kinds_of_stage(config, static_cast<int>(stage));
    for (int kind = range.first; kind <= range.last; ++kind) lengthen(all[stage], kinds[static_cast<size_t>(kind)]);
    all[stage].hop = hop;
  }
  return all;
}

std::vector<UnitSeconds> part_unit_seconds(const PipelineSchedule& schedule, const std::vector<UnitSeconds>& by_stage) {
  std::vector<UnitSeconds> parts(static_cast<size_t>(schedule.parts));
  for (int part = 0; part < schedule.parts; ++part)
    for (int micro_batch = 0; micro_batch < schedule.micro_batches; ++micro_batch)
      lengthen(parts[static_cast<size_t>(part)], by_stage[static_cast<size_t>(schedule.stage_of(part, micro_batch))]);
  return parts;
}

std::vector<int> balanced_layers(int parts, int layers, const UnitSeconds& seconds) {
  return balanced_layers(layers, std::vector<UnitSeconds>(static_cast<size_t>(parts), seconds));
}

std::vector<int> balanced_layers(int layers, const std::vector<UnitSeconds>& seconds, const std::vector<int>& most) {
  const int parts = static_cast<int>(seconds.size());
  // Layers go one by one to the part with room that is then the shortest, the last of equals.
  std::vector<int> all(static_cast<size_t>(parts));
  int left = layers;
  for (int part = 0; part < parts; ++part) left -= all[static_cast<size_t>(part)] = least_layers(part, parts);
  const auto has_room = [&](size_t part) { return most.empty() || all[part] < most[part]; };
  const auto with_one_more = [&](size_t part) {
    const UnitSeconds& unit = seconds[part];
    return (part == 0 ? unit.embedding.all() : 0) + (part + 1 == all.size() ? unit.head.all() : 0) +
           (all[part] + 1) * unit.layer.all();
  };
  for (; left > 0; --left) {
    std::optional<size_t> best;
    for (size_t part = all.size(); part-- > 0;)
      if (has_room(part) && (!best || with_one_more(part) < with_one_more(*best))) best = part;
    SHARDLAB_CHECK(best.has_value(), "{} layers, and no part has room for {} of them", layers, left);
    ++all[*best];
  }
  return all;
}

Result<MeasuredSeconds> measured_seconds(const Plan& plan, const std::vector<Program>& programs, const Trace& trace) {
  const double ranks = static_cast<double>(plan.mesh.world_size()) / static_cast<double>(plan.roles.size());  // of each role
  MeasuredSeconds seconds;
  for (const JoinedOp& op : join(plan, programs, Trace{}, trace)) {
    const Instruction& i = programs[static_cast<size_t>(op.role)].instructions[static_cast<size_t>(op.instruction)];
    if (double* const sum = unit_of(i, seconds)) *sum += op.measured_s / ranks;
  }
  for (size_t layer = 0; layer < seconds.layers.size(); ++layer)
    if (seconds.layers[layer] <= 0)
      return refusal(fmt::format("the trace has no time of layer {}", layer),
                     "measure the run again, or set stage_layers: balanced");
  return seconds;
}

std::vector<int> balanced_layers(int parts, const MeasuredSeconds& seconds) {
  const size_t layers = seconds.layers.size();
  std::vector<double> until{0};  // seconds of the layers before a layer
  for (const double layer : seconds.layers) until.push_back(until.back() + layer);
  const auto part_seconds = [&](int part, size_t begin, size_t end) {
    return until[end] - until[begin] + (part == 0 ? seconds.embedding : 0) + (part == parts - 1 ? seconds.head : 0);
  };
  constexpr double kNever = std::numeric_limits<double>::infinity();
  // begins[part][end]: where `part` begins in the best deal of the layers before `end` to it and the parts before it, whose costs
  // `add` puts together.
  std::vector<std::vector<size_t>> begins;
  const auto deal = [&](const auto& add) {
    std::vector<double> best(layers + 1, kNever);
    best[0] = 0;
    begins.assign(static_cast<size_t>(parts), std::vector<size_t>(layers + 1));
    for (int part = 0; part < parts; ++part) {
      std::vector<double> next(layers + 1, kNever);
      for (size_t end = static_cast<size_t>(least_layers(part, parts)); end <= layers; ++end)
        for (size_t begin = 0; begin + static_cast<size_t>(least_layers(part, parts)) <= end; ++begin)
          if (const double cost = add(best[begin], part_seconds(part, begin, end)); cost < next[end])
            next[end] = cost, begins[static_cast<size_t>(part)][end] = begin;
      best = std::move(next);
    }
    return best[layers];
  };
  const double longest = deal([](double before, double part) { return std::max(before, part); });
  deal([&](double before, double part) { return part > longest ? kNever : before + part * part; });
  std::vector<int> all(static_cast<size_t>(parts));
  size_t end = layers;
  for (size_t part = all.size(); part-- > 0; end = begins[part][end]) all[part] = static_cast<int>(end - begins[part][end]);
  return all;
}

SlotCosts slot_costs(const std::vector<int>& layers, const UnitSeconds& seconds) {
  return slot_costs(layers, std::vector<UnitSeconds>(layers.size(), seconds));
}

SlotCosts slot_costs(const std::vector<int>& layers, const std::vector<UnitSeconds>& parts) {
  SlotCosts costs;
  for (size_t part = 0; part < layers.size(); ++part) {
    const UnitSeconds& seconds = parts[part];
    costs.hop = std::max(costs.hop, seconds.hop);
    const auto sum = [&](double SlotSeconds::*slot) {
      return layers[part] * seconds.layer.*slot + (part == 0 ? seconds.embedding.*slot : 0) +
             (part + 1 == layers.size() ? seconds.head.*slot : 0);
    };
    costs.forward.push_back(sum(&SlotSeconds::forward));
    costs.input.push_back(sum(&SlotSeconds::input));
    costs.weight.push_back(sum(&SlotSeconds::weight));
  }
  return costs;
}

std::vector<PipelineCandidate> pipeline_candidates(const Case& config, const UnitSeconds& seconds) {
  return pipeline_candidates(config, std::vector<UnitSeconds>(static_cast<size_t>(config.layout.pp), seconds));
}

std::vector<PipelineCandidate> pipeline_candidates(const Case& config, const std::vector<UnitSeconds>& by_stage) {
  const int p = config.layout.pp, layers = static_cast<int>(config.model.layers),
            m = static_cast<int>(config.train.grad_accumulation);
  std::vector<PipelineCandidate> all;
  const auto add = [&](PipelineSchedule schedule, Schedule named, int virtual_stages, std::vector<int> parts) {
    const auto times = play(schedule, slot_costs(parts, part_unit_seconds(schedule, by_stage)));
    if (!times.ok()) return;
    double held = 0;
    for (int stage = 0; stage < p; ++stage) held = std::max(held, most_held(schedule, stage));
    all.push_back({std::move(schedule), named, virtual_stages, std::move(parts), times->end, held});
  };
  for (int i = 0; i < named_schedules(); ++i) {
    const auto schedule = static_cast<Schedule>(i);
    if (schedule == Schedule::kNone || is_mirrored(schedule)) continue;
    for (int v = is_looped(schedule) ? 2 : 1; v <= (is_looped(schedule) ? std::min(4, layers / p) : 1); ++v) {
      const PipelineShape shape{schedule, p, v, m};
      if (!check(shape).ok() || parts_of(shape) > layers) continue;
      PipelineSchedule slots = make_schedule(shape);
      std::vector<int> dealt = balanced_layers(layers, part_unit_seconds(slots, by_stage));
      add(std::move(slots), schedule, v, std::move(dealt));
    }
  }
  for (const double share : {0.5, 1.0, 1.5, 2.0})
    for (const PartPlacement placement : {PartPlacement::kLooped, PartPlacement::kFolded}) {
      const int parts = placement == PartPlacement::kFolded ? 2 * p : p;
      const double held = share * p;
      if (p == 1 || parts > layers || held < (parts > p ? 1.5 : 1)) continue;
      PipelineSchedule placed;  // of no slots
      placed.placement = placement, placed.stages = p, placed.parts = parts, placed.micro_batches = m;
      const std::vector<UnitSeconds> seconds = part_unit_seconds(placed, by_stage);
      const std::vector<int> dealt = balanced_layers(layers, seconds);
      add(list_schedule(placement, p, 1, m, slot_costs(dealt, seconds), held), Schedule::kTable, 1, dealt);
    }
  std::ranges::stable_sort(all, {}, [](const PipelineCandidate& c) { return std::tuple(c.seconds, c.held); });
  return all;
}

}  // namespace shardlab::simulator
