#include "reports/timeline.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <span>

#include "plan/trace_steps.h"
#include "reports/fold_calls.h"

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
      measured_origin_ = sort_events(*measured, out_.measured_step, measured_);
    }
    if (predicted != nullptr) {
      predicted_step_ = predicted->steps > 0 ? median_step(*predicted) : 0;
      predicted_origin_ = sort_events(*predicted, predicted_step_, predicted_);
    }
    const std::vector<int> order = by_stage_first();
    const std::span<const int> firsts = std::span(order).first(std::min(plan_.roles.size(), order.size()));
    if (measured != nullptr)
      add_intervals(order, firsts);
    else
      add_calls(order, firsts);
    for (const int rank : firsts) add_pictures(rank, predicted, measured);
    std::ranges::stable_sort(out_.lanes, {}, &TimelineLane::rank);
    return std::move(out_);
  }

 private:
  using List = std::vector<const TraceEvent*>;
  using Events = std::map<int, List>;  ///< by rank

  /// Returns when the step began.
  static double sort_events(const Trace& trace, int step, Events& into) {
    for (const TraceEvent& e : trace.events)
      if (e.step == step) into[e.rank].push_back(&e);
    return origin_of(trace, step);
  }
  static const List& events_of(const Events& events, int rank) {
    static const List kNone;
    const auto found = events.find(rank);
    return found == events.end() ? kNone : found->second;
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

  /// When the first begins for which there is no room, of `begins`; never, where there is room for all.
  double end_of_room(std::vector<double> begins, int64_t room) {
    if (static_cast<int64_t>(begins.size()) <= room) return HUGE_VAL;
    const auto last = begins.begin() + static_cast<std::ptrdiff_t>(room);
    std::nth_element(begins.begin(), last, begins.end());
    return out_.shown_s = *last;
  }

  // ---- A measured step ----------------------------------------------------------------------------------------------------

  void add_intervals(std::span<const int> order, std::span<const int> firsts) {
    std::vector<double> begins;
    for (const int rank : firsts) {
      for (const TraceEvent* e : events_of(predicted_, representative(rank))) begins.push_back(e->begin - predicted_origin_);
      for (const TraceEvent* e : events_of(measured_, rank)) begins.push_back(e->begin - measured_origin_);
    }
    const double until = end_of_room(std::move(begins), options_.max_intervals);
    int64_t shown = 0;
    for (size_t k = 0; k < order.size(); ++k) {
      const int rank = order[k];
      const List &theirs = events_of(predicted_, representative(rank)), &ours = events_of(measured_, rank);
      const auto count = static_cast<int64_t>(theirs.size() + ours.size());
      const bool first_of_stage = k < firsts.size();
      if (k >= static_cast<size_t>(options_.max_ranks) || (!first_of_stage && shown + count > options_.max_intervals)) {
        out_.left_out += count;
        continue;
      }
      shown += count;
      add_rank(rank, theirs, ours, first_of_stage ? until : HUGE_VAL);
    }
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

  void add_rank(int rank, const List& predicted, const List& measured, double until) {
    std::map<int, TimelineLane> lanes;
    const auto add = [&](const List& events, double origin, std::vector<TimelineInterval> TimelineLane::*side) {
      for (const TraceEvent* e : events) {
        if (e->begin - origin >= until) {
          ++out_.left_out;
          continue;
        }
        (lanes[e->stream].*side)
            .push_back({op_of(role_of(rank), e->instruction), e->begin - origin, e->end - origin, e->peer_wait,
                        e->kind == TraceEvent::Kind::kWait});
      }
    };
    add(measured, measured_origin_, &TimelineLane::measured);
    add(predicted, predicted_origin_, &TimelineLane::predicted);
    for (auto& [stream, lane] : lanes) {
      name_lane(rank, stream, lane);
      for (auto* side : {&lane.measured, &lane.predicted})
        std::stable_sort(side->begin(), side->end(),
                         [](const TimelineInterval& a, const TimelineInterval& b) { return a.begin_s < b.begin_s; });
      out_.lanes.push_back(std::move(lane));
    }
  }

  void name_lane(int rank, int stream, TimelineLane& lane) const {
    lane.rank = rank;
    lane.stage = stage_of(rank);
    lane.stream = static_cast<size_t>(stream) < plan_.streams.size() ? plan_.streams[static_cast<size_t>(stream)]
                                                                     : fmt::format("stream {}", stream);
  }

  /// Index in `ops` of an instruction of a role, -1 where the program has none.
  int32_t op_of(int role, int32_t instruction) {
    if (static_cast<size_t>(role) >= programs_.size() || instruction < 0) return -1;
    const Program& program = programs_[static_cast<size_t>(role)];
    if (static_cast<size_t>(instruction) >= program.instructions.size()) return -1;
    const auto [found, fresh] = numbers_.try_emplace({role, instruction}, static_cast<int32_t>(out_.ops.size()));
    if (!fresh) return found->second;
    const Instruction& i = program.instructions[static_cast<size_t>(instruction)];
    out_.ops.push_back(timeline_op(plan_, i, describe(plan_, i)));
    return found->second;
  }

  // ---- A step that was not measured ----------------------------------------------------------------------------------------

  /// Calls on the lanes of ranks that differ from one another. Ranks of one stage that do the same are lanes of the first of them.
  void add_calls(std::span<const int> order, std::span<const int> firsts) {
    CallFolder folder(plan_, out_.ops);
    std::vector<std::pair<int, int>> shown;  // a rank, and how many there are of it
    std::vector<int> left_out;
    for (const int rank : order) {
      const List& events = events_of(predicted_, representative(rank));
      const auto alike = std::ranges::find_if(shown, [&](const std::pair<int, int>& other) {
        return role_of(other.first) == role_of(rank) && are_alike(events_of(predicted_, representative(other.first)), events);
      });
      if (alike != shown.end())
        ++alike->second;
      else if (shown.size() < std::max(firsts.size(), static_cast<size_t>(options_.max_ranks)))
        shown.emplace_back(rank, 1);
      else
        left_out.push_back(rank);
    }
    int64_t room = options_.max_calls;
    for (const auto& [rank, ranks] : shown) {
      std::vector<TimelineLane> lanes = lanes_of(rank, ranks, folder);
      int64_t calls = 0;
      for (const TimelineLane& lane : lanes) calls += static_cast<int64_t>(lane.calls.size());
      const bool first_of_stage = std::ranges::find(firsts, rank) != firsts.end();
      if (!first_of_stage && calls > room) {
        for (int k = 0; k < ranks; ++k) left_out.push_back(rank);
        continue;
      }
      room -= calls;
      std::ranges::move(lanes, std::back_inserter(out_.lanes));
    }
    if (room < 0) leave_out_late_calls(folder);
    for (const int rank : left_out) out_.left_out += static_cast<int64_t>(events_of(predicted_, representative(rank)).size());
    out_.calls = folder.take(out_.lanes, options_.max_shape_ops);
  }

  std::vector<TimelineLane> lanes_of(int rank, int ranks, CallFolder& folder) {
    const Program& program = programs_[static_cast<size_t>(role_of(rank))];
    std::map<int, List> streams;
    for (const TraceEvent* e : events_of(predicted_, representative(rank))) streams[e->stream].push_back(e);
    std::vector<TimelineLane> lanes;
    for (auto& [stream, events] : streams) {
      std::ranges::stable_sort(events, {}, &TraceEvent::begin);
      TimelineLane& lane = lanes.emplace_back();
      name_lane(rank, stream, lane);
      lane.alike = ranks;
      lane.calls = folder.fold(program, events, predicted_origin_);
    }
    return lanes;
  }

  /// Of the first ranks of stages, which alone are shown where there is no room for all of their calls.
  void leave_out_late_calls(const CallFolder& folder) {
    std::vector<double> begins;
    for (const TimelineLane& lane : out_.lanes)
      for (const TimelineCall& call : lane.calls) begins.push_back(static_cast<double>(call.origin_ns) * 1e-9);
    const double until = end_of_room(std::move(begins), options_.max_calls);
    for (TimelineLane& lane : out_.lanes)
      std::erase_if(lane.calls, [&](const TimelineCall& call) {
        const bool late = static_cast<double>(call.origin_ns) * 1e-9 >= until;
        if (late) out_.left_out += folder.events_of(call);
        return late;
      });
  }

  const Plan& plan_;
  const std::vector<Program>& programs_;
  TimelineOptions options_;
  Events predicted_, measured_;
  double predicted_origin_ = 0, measured_origin_ = 0;
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
