// Why nothing ran: every idle moment of a rank is put down to the op that ended it.
#include <algorithm>

#include "plan/trace_internal.h"

namespace shardlab {
namespace {

/// When the op really ran: its last peer had arrived.
double run_begin(const TraceEvent& e) { return std::min(e.end, e.begin + e.peer_wait); }

/// Splits `gap`, which `next` ended, into `idle`'s parts.
void attribute(const Interval& gap, const TraceEvent& next, bool communicates, const Intervals& own_waits, IdleBreakdown& idle) {
  const double arrived = std::clamp(next.begin, gap[0], gap[1]);
  idle.peer_s += gap[1] - arrived;
  Intervals rest;
  if (arrived > gap[0]) rest.push_back({gap[0], arrived});
  idle.dependency_s += common(rest, own_waits);
  rest = without(rest, own_waits);
  if (next.queued < 0) {
    idle.other_s += length(rest);
    return;
  }
  const Intervals before_launch{{gap[0], std::max(gap[0], next.begin - next.queued)}};
  const double host = common(rest, before_launch);
  idle.host_s += host;
  (communicates ? idle.peer_s : idle.latency_s) += length(rest) - host;
}

}  // namespace

IdleBreakdown idle_by_cause(const Plan& plan, const std::vector<Program>& programs, const Trace& trace, int rank, int step) {
  const Interval bounds = step_bounds(trace, rank, step);
  const Program& program = programs[role_of(plan.mesh, rank)];
  std::vector<const TraceEvent*> ops, waits;
  Intervals busy;
  for (const TraceEvent& e : events_of(trace, rank)) {
    if (e.step != step) continue;
    if (e.kind == TraceEvent::Kind::kWait) {
      waits.push_back(&e);
    } else {
      ops.push_back(&e);
      busy.push_back({run_begin(e), e.end});
    }
  }
  std::ranges::stable_sort(ops, {}, [](const TraceEvent* e) { return run_begin(*e); });

  IdleBreakdown idle;
  size_t next = 0;
  for (const Interval& gap : without({bounds}, unite(std::move(busy), bounds))) {
    idle.idle_s += gap[1] - gap[0];
    while (next < ops.size() && (run_begin(*ops[next]) < gap[1] || ops[next]->end <= gap[1])) ++next;
    if (next == ops.size() || gap[1] == bounds[1]) {
      idle.tail_s += gap[1] - gap[0];
      continue;
    }
    const TraceEvent& op = *ops[next];
    Intervals own_waits;
    for (const TraceEvent* w : waits)
      if (w->instruction == op.instruction) own_waits.push_back({w->begin, w->end});
    attribute(gap, op, is_communication(instruction_of(program, op)), unite(std::move(own_waits), bounds), idle);
  }
  return idle;
}

std::vector<std::string> unexplained(const TraceAccounting& a) {
  std::vector<std::string> sentences;
  const auto say = [&](int64_t count, std::string sentence) {
    if (count > 0) sentences.push_back(std::move(sentence));
  };
  say(a.dropped, fmt::format("the tracer dropped {} records: trace fewer steps", a.dropped));
  say(a.lost - a.dropped,
      fmt::format("{} of {} launches have no record, and only {} records were dropped", a.lost, a.launches, a.dropped));
  say(a.unreadable, fmt::format("{} buffers of records could not be read to their end", a.unreadable));
  say(a.zero_timestamp, fmt::format("{} of {} records have lost their times", a.zero_timestamp, a.device_records));
  say(a.unclaimed, fmt::format("{} of {} records belong to no op", a.unclaimed, a.device_records));
  say(a.ops_untimed, fmt::format("{} of {} ops have no time of the device", a.ops_untimed, a.ops));
  return sentences;
}

}  // namespace shardlab
