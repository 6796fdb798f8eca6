#include "plan/trace.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <map>

#include "plan/trace_internal.h"

namespace shardlab {
namespace {

double median(std::vector<double>& values) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  const size_t half = values.size() / 2;
  return values.size() % 2 == 1 ? values[half] : 0.5 * (values[half - 1] + values[half]);
}

/// Seconds by role and instruction: summed over ranks, each the median over steps.
std::vector<std::vector<double>> seconds_by_instruction(const Plan& plan, const std::vector<Program>& programs,
                                                        const Trace& trace) {
  std::vector<std::vector<double>> sums(programs.size());
  std::vector<int> seen(programs.size(), 0), ranks(programs.size(), 0);
  for (size_t r = 0; r < programs.size(); ++r) sums[r].resize(programs[r].instructions.size());
  for (int rank = 0; rank < plan.mesh.world_size(); ++rank) ++ranks[role_of(plan.mesh, rank)];

  for (size_t first = 0; first < trace.events.size();) {
    const int rank = trace.events[first].rank;
    const size_t role = role_of(plan.mesh, rank);
    std::vector<std::vector<double>> samples(programs[role].instructions.size());
    size_t i = first;
    for (; i < trace.events.size() && trace.events[i].rank == rank; ++i) {
      const TraceEvent& e = trace.events[i];
      if (e.kind != TraceEvent::Kind::kOp) continue;
      instruction_of(programs[role], e);  // checks the index
      samples[static_cast<size_t>(e.instruction)].push_back(e.end - e.begin - e.peer_wait);
    }
    for (size_t k = 0; k < samples.size(); ++k) sums[role][k] += median(samples[k]);
    ++seen[role];
    first = i;
  }
  for (size_t r = 0; r < programs.size(); ++r)
    if (seen[r] > 0 && seen[r] < ranks[r])
      for (double& s : sums[r]) s *= static_cast<double>(ranks[r]) / seen[r];
  return sums;
}

std::string json_escaped(const std::string& text) {
  std::string out;
  for (const char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    if (static_cast<unsigned char>(c) < 0x20)
      out += fmt::format("\\u{:04x}", static_cast<unsigned>(c));
    else
      out += c;
  }
  return out;
}

/// Where each step begins when steps are laid end to end: events carry times from the start of their own step.
std::vector<double> step_starts(const Trace& trace) {
  std::vector<double> starts(static_cast<size_t>(trace.steps) + 1, 0.0);
  for (int step = 0; step < trace.steps; ++step) {
    double end = 0;
    for (int rank = 0; rank < trace.world_size; ++rank)
      end = std::max(end, trace.step_interval[static_cast<size_t>(step * trace.world_size + rank)][1]);
    starts[static_cast<size_t>(step) + 1] = starts[static_cast<size_t>(step)] + end;
  }
  return starts;
}

/// Begin and length of an interval as Chrome's microseconds. Both ends are rounded to a nanosecond, not the length: intervals that
/// touch then go on touching, where a viewer drops what overlaps.
struct Slice {
  double begin_us, length_us;
};
Slice slice_of(double begin, double end) {
  const auto nanoseconds = [](double seconds) { return std::round(1e9 * seconds); };
  return {nanoseconds(begin) / 1000, (nanoseconds(end) - nanoseconds(begin)) / 1000};
}

/// The separator before the next event of the list.
const char* comma(const std::string& out) { return out.back() == '[' ? "\n" : ",\n"; }

void name_track(std::string& out, int process, size_t thread, const std::string& name) {
  fmt::format_to(std::back_inserter(out),
                 "{}{{\"ph\":\"M\",\"name\":\"thread_name\",\"pid\":{},\"tid\":{},\"args\":{{\"name\":\"{}\"}}}}", comma(out),
                 process, thread, json_escaped(name));
}

/// Appends the details of every rank below its streams. Details of no rank come in a process of their own after the last rank. A
/// lane whose details overlap is laid over as many tracks as it takes.
void append_details(std::string& out, const Trace& trace, const std::vector<double>& starts) {
  struct Track {
    size_t thread;
    double end;
  };
  std::map<std::pair<int, int>, std::vector<Track>> tracks;  // by process and lane
  std::map<int, size_t> threads;                             // of each process, used so far
  std::vector<const TraceDetail*> order;
  for (const TraceDetail& d : trace.details) order.push_back(&d);
  const auto begin_of = [&](const TraceDetail* d) { return starts[static_cast<size_t>(d->step)] + d->begin; };
  std::ranges::stable_sort(order, {}, begin_of);
  for (const TraceDetail* d : order) {
    const int process = d->rank >= 0 ? d->rank : trace.world_size;
    const double begin = begin_of(d);
    auto& lane = tracks[{process, d->lane}];
    auto track = std::ranges::find_if(lane, [&](const Track& t) { return t.end <= begin; });
    if (track == lane.end()) {
      size_t& used = threads.try_emplace(process, trace.streams.size()).first->second;
      if (process == trace.world_size && used == trace.streams.size())
        fmt::format_to(std::back_inserter(out),
                       "{}{{\"ph\":\"M\",\"name\":\"process_name\",\"pid\":{},\"args\":{{\"name\":\"no rank\"}}}}", comma(out),
                       process);
      lane.push_back({used++, 0});
      track = std::prev(lane.end());
      name_track(out, process, track->thread, trace.detail_lanes[static_cast<size_t>(d->lane)]);
    }
    track->end = begin + (d->end - d->begin);
    const Slice slice = slice_of(begin, track->end);
    fmt::format_to(std::back_inserter(out),
                   "{}{{\"ph\":\"X\",\"name\":\"{}\",\"cat\":\"detail\",\"pid\":{},\"tid\":{},\"ts\":{:.3f},\"dur\":{:.3f},"
                   "\"args\":{{\"instruction\":{},\"step\":{},\"bytes\":{}}}}}",
                   comma(out), json_escaped(trace.detail_names[static_cast<size_t>(d->name)]), process, track->thread,
                   slice.begin_us, slice.length_us, d->instruction, d->step, d->bytes);
  }
}

}  // namespace

Breakdown analyse(const Plan& plan, const std::vector<Program>& programs, const Trace& trace, int rank, int step) {
  const Program& program = programs[role_of(plan.mesh, rank)];
  const Interval bounds = step_bounds(trace, rank, step);
  const std::span<const TraceEvent> events = events_of(trace, rank);

  std::vector<const TraceEvent*> op_of(program.instructions.size(), nullptr);
  Intervals compute, comm, copies, waits, bubble;
  for (const TraceEvent& e : events) {
    if (e.step != step) continue;
    const Instruction& instruction = instruction_of(program, e);
    if (e.kind == TraceEvent::Kind::kWait) {
      waits.push_back({e.begin, e.end});
      continue;
    }
    op_of[static_cast<size_t>(e.instruction)] = &e;
    (is_communication(instruction) ? comm : is_transfer(instruction) ? copies : compute).push_back({e.begin, e.end});
    if (e.stream == 0 && is_receive(instruction)) bubble.push_back({e.begin, e.begin + e.peer_wait});
  }
  for (const TraceEvent& e : events)
    if (e.step == step && e.kind == TraceEvent::Kind::kWait && e.stream == 0)
      for (const Interval& i : bubble_of_wait(program, op_of, e)) bubble.push_back(i);

  compute = unite(std::move(compute), bounds);
  comm = unite(std::move(comm), bounds);
  copies = unite(std::move(copies), bounds);
  const Intervals covering = unite(joined(compute, comm), bounds), ops = unite(joined(covering, copies), bounds);
  waits = unite(std::move(waits), bounds);
  Breakdown b;
  b.wall_s = bounds[1] - bounds[0];
  b.compute_s = length(compute);
  b.comm_s = length(comm);
  b.exposed_comm_s = b.comm_s - common(comm, compute);
  b.copy_s = length(copies);
  b.exposed_copy_s = b.copy_s - common(copies, covering);
  b.wait_s = length(waits) - common(waits, ops);
  b.unplanned_s = b.wall_s - length(ops) - b.wait_s;
  b.bubble_fraction = b.wall_s > 0 ? length(unite(std::move(bubble), bounds)) / b.wall_s : 0;
  return b;
}

std::vector<JoinedOp> join(const Plan& plan, const std::vector<Program>& programs, const Trace& predicted, const Trace& measured) {
  const auto p = seconds_by_instruction(plan, programs, predicted), m = seconds_by_instruction(plan, programs, measured);
  std::vector<JoinedOp> rows;
  for (size_t role = 0; role < programs.size(); ++role)
    for (const Instruction& i : programs[role].instructions) {
      if (i.kind != Instruction::Kind::kRun) continue;
      const size_t k = static_cast<size_t>(i.id);
      rows.push_back({static_cast<int>(role), i.id, describe(plan, i), p[role][k], m[role][k]});
    }
  return rows;
}

std::string to_chrome_json(const Plan& plan, const std::vector<Program>& programs, const Trace& trace) {
  std::string out =
      fmt::format("{{\"otherData\":{{\"version\":{},\"producer\":\"{}\",\"plan\":\"{}\",\"dropped\":{}}},\"traceEvents\":[",
                  kTraceVersion, json_escaped(trace.producer), json_escaped(plan.name), trace.dropped);
  const std::vector<double> starts = step_starts(trace);
  int named_rank = -1;
  for (const TraceEvent& e : trace.events) {
    if (e.rank != named_rank) {
      named_rank = e.rank;
      fmt::format_to(std::back_inserter(out),
                     "{}{{\"ph\":\"M\",\"name\":\"process_name\",\"pid\":{},\"args\":{{\"name\":\"rank {}\"}}}}", comma(out),
                     e.rank, e.rank);
      for (size_t s = 0; s < trace.streams.size(); ++s) name_track(out, e.rank, s, trace.streams[s]);
    }
    const Instruction& i = instruction_of(programs[role_of(plan.mesh, e.rank)], e);
    const bool wait = e.kind == TraceEvent::Kind::kWait;
    const double start = starts[static_cast<size_t>(e.step)];
    const Slice slice = slice_of(start + e.begin, start + e.end);
    fmt::format_to(std::back_inserter(out),
                   "{}{{\"ph\":\"X\",\"name\":\"{}{}\",\"cat\":\"{}\",\"pid\":{},\"tid\":{},\"ts\":{:.3f},\"dur\":{:.3f},"
                   "\"args\":{{\"instruction\":{},\"step\":{},\"peer_wait_us\":{:.3f},\"sent_bytes\":{}",
                   comma(out), wait ? "wait: " : "", json_escaped(describe(plan, i)),
                   wait                  ? "wait"
                   : is_communication(i) ? "communication"
                   : is_transfer(i)      ? "copy"
                                         : "compute",
                   e.rank, e.stream, slice.begin_us, slice.length_us, e.instruction, e.step, 1e6 * e.peer_wait, e.sent_bytes);
    if (e.queued >= 0) fmt::format_to(std::back_inserter(out), ",\"queued_us\":{:.3f}", 1e6 * e.queued);
    out += "}}";
  }
  append_details(out, trace, starts);
  return out + "\n]}\n";
}

}  // namespace shardlab
