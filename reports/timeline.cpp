#include "reports/timeline.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <span>

#include "plan/trace_steps.h"
#include "plan/work.h"

namespace shardlab::reports {

namespace {

/// When the step began on its first rank; 0 for a trace whose times start with the step.
double origin_of(const Trace& trace, int step) {
  double begin = HUGE_VAL;
  for (const TraceEvent& e : trace.events)
    if (e.step == step) begin = std::min(begin, e.begin);
  for (int rank = 0; rank < trace.world_size; ++rank) {
    const size_t at = static_cast<size_t>(step) * static_cast<size_t>(trace.world_size) + static_cast<size_t>(rank);
    if (at < trace.step_interval.size() && trace.step_interval[at][1] > trace.step_interval[at][0])
      begin = std::min(begin, trace.step_interval[at][0]);
  }
  return begin == HUGE_VAL ? 0 : begin;
}

class Builder {
 public:
  Builder(const Plan& plan, const std::vector<Program>& programs, const TimelineOptions& options)
      : plan_(plan), programs_(programs), options_(options) {}

  Timeline build(const Trace* predicted, const Trace* measured) {
    if (measured != nullptr) {
      out_.measured_step = median_step(*measured);
      sort_events(*measured, out_.measured_step, measured_);
    }
    if (predicted != nullptr) {
      predicted_step_ = predicted->steps > 0 ? median_step(*predicted) : 0;
      sort_events(*predicted, predicted_step_, predicted_);
    }
    const std::vector<int> order = by_stage_first();
    const size_t stages = plan_.roles.size();
    const double until = end_of_room(std::span(order).first(std::min(stages, order.size())));
    int64_t shown = 0;
    for (size_t k = 0; k < order.size(); ++k) {
      const int rank = order[k];
      const auto* theirs = events_of(predicted_, representative(rank));
      const auto* ours = events_of(measured_, rank);
      const int64_t count = static_cast<int64_t>((theirs ? theirs->size() : 0) + (ours ? ours->size() : 0));
      const bool first_of_stage = k < stages;
      if (k >= static_cast<size_t>(options_.max_ranks) || (!first_of_stage && shown + count > options_.max_intervals)) {
        out_.left_out += count;
        continue;
      }
      shown += count;
      add_rank(rank, theirs, ours, first_of_stage ? until : HUGE_VAL);
      if (first_of_stage) add_pictures(rank, predicted, measured);
    }
    std::ranges::stable_sort(out_.lanes, {}, &TimelineLane::rank);
    return std::move(out_);
  }

 private:
  struct Event {
    TraceEvent event;
    double origin;
  };
  using Events = std::map<int, std::vector<Event>>;  ///< by rank

  static void sort_events(const Trace& trace, int step, Events& into) {
    const double origin = origin_of(trace, step);
    for (const TraceEvent& e : trace.events)
      if (e.step == step) into[e.rank].push_back({e, origin});
  }
  static const std::vector<Event>* events_of(const Events& events, int rank) {
    const auto found = events.find(rank);
    return found == events.end() ? nullptr : &found->second;
  }
  int role_of(int rank) const { return plan_.mesh.role_of(rank); }
  int stage_of(int rank) const { return plan_.roles[static_cast<size_t>(role_of(rank))].stage; }
  /// The rank whose predicted events stand for `rank`'s.
  int representative(int rank) const {
    if (predicted_.count(rank) != 0) return rank;
    for (const auto& [other, events] : predicted_)
      if (role_of(other) == role_of(rank)) return other;
    return rank;
  }

  /// Every rank, the first of each stage before all others.
  std::vector<int> by_stage_first() const {
    std::vector<int> first, rest;
    std::vector<bool> seen(plan_.roles.size(), false);
    for (int rank = 0; rank < plan_.mesh.world_size(); ++rank) {
      const auto role = static_cast<size_t>(role_of(rank));
      (seen[role] ? rest : first).push_back(rank);
      seen[role] = true;
    }
    first.insert(first.end(), rest.begin(), rest.end());
    return first;
  }

  /// When the interval of `ranks` that is one too many begins; never, where there is room for all.
  double end_of_room(std::span<const int> ranks) {
    std::vector<double> begins;
    for (const int rank : ranks)
      for (const auto* events : {events_of(predicted_, representative(rank)), events_of(measured_, rank)})
        if (events != nullptr)
          for (const auto& [e, origin] : *events) begins.push_back(e.begin - origin);
    if (static_cast<int64_t>(begins.size()) <= options_.max_intervals) return HUGE_VAL;
    const auto last = begins.begin() + static_cast<std::ptrdiff_t>(options_.max_intervals);
    std::nth_element(begins.begin(), last, begins.end());
    return out_.shown_s = *last;
  }

  /// The row of the pipeline's grid and the live bytes of a stage's first rank.
  void add_pictures(int rank, const Trace* predicted, const Trace* measured) {
    TimelineRow row{rank, stage_of(rank), {}, {}};
    const auto slots = [&](const Trace* trace, int of_rank, int step) {
      std::vector<GridSlot> all;
      if (trace != nullptr) all = grid_slots(plan_, programs_, *trace, of_rank, step, origin_of(*trace, step));
      if (all.size() > options_.max_slots) all.resize(options_.max_slots);
      return all;
    };
    row.measured = slots(measured, rank, out_.measured_step);
    row.predicted = slots(predicted, representative(rank), predicted_step_);
    out_.rows.push_back(std::move(row));
    if (const Trace* trace = measured != nullptr ? measured : predicted) {
      const int step = trace == measured ? out_.measured_step : predicted_step_;
      LiveCurve curve =
          live_curve(plan_, programs_, *trace, trace == measured ? rank : representative(rank), step, origin_of(*trace, step));
      curve.rank = rank;
      out_.live.push_back(std::move(curve));
    }
  }

  void add_rank(int rank, const std::vector<Event>* predicted, const std::vector<Event>* measured, double until) {
    std::map<int, TimelineLane> lanes;
    const auto add = [&](const std::vector<Event>* events, std::vector<TimelineInterval> TimelineLane::*side) {
      if (events == nullptr) return;
      for (const auto& [e, origin] : *events) {
        if (e.begin - origin >= until) {
          ++out_.left_out;
          continue;
        }
        (lanes[e.stream].*side)
            .push_back({op_of(role_of(rank), e.instruction), e.begin - origin, e.end - origin, e.peer_wait,
                        e.kind == TraceEvent::Kind::kWait});
      }
    };
    add(measured, &TimelineLane::measured);
    add(predicted, &TimelineLane::predicted);
    for (auto& [stream, lane] : lanes) {
      lane.rank = rank;
      lane.stage = stage_of(rank);
      lane.stream = static_cast<size_t>(stream) < plan_.streams.size() ? plan_.streams[static_cast<size_t>(stream)]
                                                                       : fmt::format("stream {}", stream);
      for (auto* side : {&lane.measured, &lane.predicted})
        std::stable_sort(side->begin(), side->end(),
                         [](const TimelineInterval& a, const TimelineInterval& b) { return a.begin_s < b.begin_s; });
      out_.lanes.push_back(std::move(lane));
    }
  }

  /// Index in `ops` of an instruction of a role, -1 where the program has none.
  int32_t op_of(int role, int32_t instruction) {
    if (static_cast<size_t>(role) >= programs_.size() || instruction < 0) return -1;
    const Program& program = programs_[static_cast<size_t>(role)];
    if (static_cast<size_t>(instruction) >= program.instructions.size()) return -1;
    const auto [found, fresh] = numbers_.try_emplace({role, instruction}, static_cast<int32_t>(out_.ops.size()));
    if (!fresh) return found->second;
    const Instruction& i = program.instructions[static_cast<size_t>(instruction)];
    TimelineOp& op = out_.ops.emplace_back();
    op.label = describe(plan_, i);
    op.kind = i.kind == Instruction::Kind::kAlloc ? "alloc" : i.kind == Instruction::Kind::kFree ? "free" : "";
    if (i.op != nullptr && i.segment != nullptr) {
      const WorkAmount work = work_of(*i.segment, *i.op, plan_.mesh, plan_.token_order);
      constexpr std::string_view kPhases[] = {"", ".F", ".I", ".W"};
      op.kind = fmt::format("{}{}", kind_of(i.op->work), kPhases[static_cast<size_t>(phase_of(i.op->work))]);
      op.flops = static_cast<double>(work.flops.value);
      op.memory_bytes = static_cast<double>(work.memory.value);
      op.payload_bytes = static_cast<double>(work.payload.value);
    }
    return found->second;
  }

  const Plan& plan_;
  const std::vector<Program>& programs_;
  TimelineOptions options_;
  Events predicted_, measured_;
  int predicted_step_ = 0;
  std::map<std::pair<int, int32_t>, int32_t> numbers_;
  Timeline out_;
};

}  // namespace

Timeline make_timeline(const Plan& plan, const std::vector<Program>& programs, const Trace* predicted, const Trace* measured,
                       const TimelineOptions& options) {
  return Builder(plan, programs, options).build(predicted, measured);
}

}  // namespace shardlab::reports
