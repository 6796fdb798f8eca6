#include "profiler/gpu/assemble.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <tuple>
#include <unordered_map>

#include "plan/base/check.h"

namespace shardlab::profiler {

namespace {

size_t role_of(const Mesh& mesh, int rank) { return static_cast<size_t>(mesh.role_of(rank)); }

struct OpHash {
  size_t operator()(const OpKey& key) const { return std::hash<uint64_t>()(op_id(key)); }
};
template <class Value>
using ByOp = std::unordered_map<OpKey, Value, OpHash>;

/// Index of a step among those kept, -1 where it was not.
int kept(const HostSide& host, int32_t number) {
  const auto found = std::ranges::lower_bound(host.steps, number, {}, &HostSide::Step::number);
  return found != host.steps.end() && found->number == number ? static_cast<int>(found - host.steps.begin()) : -1;
}

/// The event of an op, in its step's time.
TraceEvent event_of(const Program& program, const HostSide::Step& step, int index, const OpKey& op, double begin, double end) {
  TraceEvent event;
  event.rank = op.rank;
  event.instruction = op.instruction;
  event.stream = program.instructions[static_cast<size_t>(op.instruction)].stream;
  event.step = index;
  event.begin = begin - step.begin;
  event.end = end - step.begin;
  return event;
}

/// One event for every op begun or carried that the device timed, in order of (rank, step, begin).
std::vector<TraceEvent> op_events(const Plan& plan, const std::vector<Program>& programs, const HostSide& host,
                                  const std::vector<OpInterval>& ops, TraceAccounting& accounting) {
  ByOp<const OpInterval*> timed;
  for (const OpInterval& op : ops) timed[op.op] = &op;
  ByOp<int64_t> sent;
  for (const HostSide::Sent& s : host.sent) sent[s.op] += s.bytes;
  std::vector<TraceEvent> events;
  const auto add = [&](const OpKey& op, const OpKey& by, double launched) {
    const int step = kept(host, op.step);
    if (step < 0) return;
    ++accounting.ops;
    const auto found = timed.find(by);
    if (found == timed.end()) {
      ++accounting.ops_untimed;
      return;
    }
    TraceEvent event = event_of(programs[role_of(plan.mesh, op.rank)], host.steps[static_cast<size_t>(step)], step, op,
                                found->second->begin, found->second->end);
    // Launched after it began: the clocks' error.
    event.queued = std::max(0.0, found->second->begin - launched);
    if (const auto bytes = sent.find(op); bytes != sent.end()) event.sent_bytes = bytes->second;
    events.push_back(event);
  };
  for (const HostSide::Launch& launch : host.launches) add(launch.op, launch.op, launch.time);
  for (const HostSide::Carried& carried : host.carried) add(carried.op, carried.by, carried.time);
  std::ranges::stable_sort(events, {}, [](const TraceEvent& e) { return std::tuple(e.rank, e.step, e.begin); });
  return events;
}

}  // namespace

void derive_waits(const Program& program, const std::vector<TraceEvent>& events, double step_begin, std::vector<TraceEvent>& out) {
  // By stream and position in it: when every op up to there had ended.
  std::vector<std::vector<double>> ended(program.streams.size());
  for (size_t s = 0; s < ended.size(); ++s) ended[s].assign(program.streams[s].size(), step_begin);
  const auto at = [&](const TraceEvent& e) -> const Instruction& {
    return program.instructions[static_cast<size_t>(e.instruction)];
  };
  for (const TraceEvent& e : events) {
    double& end = ended[static_cast<size_t>(e.stream)][static_cast<size_t>(at(e).sequence)];
    end = std::max(end, e.end);
  }
  for (auto& stream : ended)
    for (size_t i = 1; i < stream.size(); ++i) stream[i] = std::max(stream[i], stream[i - 1]);

  for (const TraceEvent& e : events) {
    const Instruction& instruction = at(e);
    const double free = instruction.sequence == 0
                            ? step_begin
                            : ended[static_cast<size_t>(e.stream)][static_cast<size_t>(instruction.sequence) - 1];
    double ready = free;
    for (const Wait& w : program.waits_of(instruction))
      if (w.count > 0) ready = std::max(ready, ended[static_cast<size_t>(w.stream)][static_cast<size_t>(w.count) - 1]);
    TraceEvent wait = e;
    wait.kind = TraceEvent::Kind::kWait;
    wait.begin = free;
    wait.end = std::min(ready, e.begin);
    wait.peer_wait = 0;
    wait.sent_bytes = 0;
    wait.queued = -1;
    if (wait.end > wait.begin) out.push_back(wait);
  }
}

namespace {

/// The identity of a meeting, which pairs an op with its peers' ops: the step, the communicator and who meets there. For a
/// collective `from` and `to` both are the first rank of the group.
using Meeting = std::tuple<int32_t, int32_t, int, int>;  // step, comm, from, to

int peer_of(const Mesh& mesh, const Comm& comm, int rank, int hop, bool cyclic) {
  const std::vector<int> group = group_of(mesh, comm, rank);
  const int size = static_cast<int>(group.size());
  int index = static_cast<int>(std::ranges::find(group, rank) - group.begin()) + hop;
  if (cyclic) index = ((index % size) + size) % size;
  return index >= 0 && index < size ? group[static_cast<size_t>(index)] : -1;
}

/// Where the op of `event` meets its peers.
Meeting meeting_of(const Plan& plan, const Op& op, const TraceEvent& e) {
  const auto comm = [&](CommId id) -> const Comm& { return plan.comms[id.index()]; };
  if (const auto* w = std::get_if<Collective>(&op.work)) {
    const int first = group_of(plan.mesh, comm(w->comm), e.rank).front();
    return {e.step, w->comm.value, first, first};
  }
  if (const auto* w = std::get_if<Send>(&op.work))
    return {e.step, w->comm.value, e.rank, peer_of(plan.mesh, comm(w->comm), e.rank, w->hop, w->cyclic)};
  const Recv& w = std::get<Recv>(op.work);
  return {e.step, w.comm.value, peer_of(plan.mesh, comm(w.comm), e.rank, w.hop, w.cyclic), e.rank};
}

}  // namespace

void set_peer_waits(const Plan& plan, const std::vector<Program>& programs, Trace& trace) {
  // Of each meeting, by rank, the ops in issue order: the k-th of every rank belong together.
  std::map<Meeting, std::map<int, std::vector<TraceEvent*>>> meetings;
  for (TraceEvent& e : trace.events) {
    const Op* op = programs[role_of(plan.mesh, e.rank)].instructions[static_cast<size_t>(e.instruction)].op;
    if (e.kind != TraceEvent::Kind::kOp || op == nullptr) continue;
    if (!std::holds_alternative<Collective>(op->work) && !std::holds_alternative<Send>(op->work) &&
        !std::holds_alternative<Recv>(op->work))
      continue;
    meetings[meeting_of(plan, *op, e)][e.rank].push_back(&e);
  }
  for (auto& [meeting, by_rank] : meetings) {
    size_t count = by_rank.begin()->second.size();
    bool complete = by_rank.size() > 1;
    for (auto& [rank, ops] : by_rank) {
      std::ranges::sort(ops, {}, [](const TraceEvent* e) { return e->instruction; });
      complete = complete && ops.size() == count;
    }
    if (!complete) continue;  // an op of some rank has no time: who waited for whom is not known
    for (size_t k = 0; k < count; ++k) {
      double last = -HUGE_VAL;
      for (const auto& [rank, ops] : by_rank) last = std::max(last, ops[k]->begin);
      for (const auto& [rank, ops] : by_rank)
        ops[k]->peer_wait = std::clamp(last - ops[k]->begin, 0.0, ops[k]->end - ops[k]->begin);
    }
  }
}

Trace assemble(const Plan& plan, const std::vector<Program>& programs, const HostSide& host, const std::vector<OpInterval>& ops,
               TraceAccounting accounting) {
  Trace trace;
  trace.world_size = host.world_size;
  trace.steps = static_cast<int>(host.steps.size());
  trace.streams = plan.streams;
  for (const HostSide::Step& step : host.steps) {
    SHARDLAB_CHECK(static_cast<int>(step.interval.size()) == host.world_size, "step {} has the intervals of {} ranks of {}",
                   step.number, step.interval.size(), host.world_size);
    trace.step_interval.insert(trace.step_interval.end(), step.interval.begin(), step.interval.end());
  }
  trace.events = op_events(plan, programs, host, ops, accounting);
  for (const TraceEvent& e : trace.events) {
    double& end =
        trace.step_interval[static_cast<size_t>(e.step) * static_cast<size_t>(host.world_size) + static_cast<size_t>(e.rank)][1];
    end = std::max(end, e.end);
  }
  set_peer_waits(plan, programs, trace);

  std::vector<TraceEvent> waits;
  for (size_t first = 0; first < trace.events.size();) {
    size_t last = first;
    const auto same = [&](const TraceEvent& e) { return e.rank == trace.events[first].rank && e.step == trace.events[first].step; };
    while (last < trace.events.size() && same(trace.events[last])) ++last;
    const std::vector<TraceEvent> group(trace.events.begin() + static_cast<std::ptrdiff_t>(first),
                                        trace.events.begin() + static_cast<std::ptrdiff_t>(last));
    const size_t row =
        static_cast<size_t>(group[0].step) * static_cast<size_t>(host.world_size) + static_cast<size_t>(group[0].rank);
    derive_waits(programs[role_of(plan.mesh, group[0].rank)], group, trace.step_interval[row][0], waits);
    first = last;
  }
  trace.events.insert(trace.events.end(), waits.begin(), waits.end());
  std::ranges::stable_sort(trace.events, {}, [](const TraceEvent& e) { return std::tuple(e.rank, e.step, e.begin); });
  trace.dropped = accounting.dropped;
  trace.accounting = std::move(accounting);
  return trace;
}

}  // namespace shardlab::profiler
