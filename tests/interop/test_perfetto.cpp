// Traces in Perfetto's form, read back by the rules of its trace_processor: packets by time, slices by a stack a track.
#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <tuple>

#include "interop/perfetto.h"
#include "tests/interop/traces.h"
#include "tests/test.h"

namespace shardlab::testing {
namespace {

struct PerfettoSlice {
  std::string name, category;
  int64_t begin = 0, end = 0;
  size_t depth = 0;
  std::map<std::string, int64_t> arguments;
};

struct PerfettoTrack {
  std::string name;
  int64_t process = 0, thread = 0;
  uint64_t parent = 0;
  bool counts_bytes = false;
  std::vector<PerfettoSlice> slices;                 ///< in order of their end
  std::vector<std::pair<int64_t, int64_t>> counter;  ///< time and value
};

struct PerfettoRead {
  std::map<uint64_t, PerfettoTrack> tracks;
  std::map<int64_t, std::string> processes;
  size_t pieces = 0;  ///< in which the file came
};

using Names = std::map<uint64_t, std::string>;

void intern(const std::vector<WireField>& fields, int number, Names& names) {
  for (const WireField& f : fields) {
    if (f.number != number) continue;
    const auto entry = wire_fields(f.bytes);
    const uint64_t iid = only_field(entry, 1).value;
    CHECK(iid > 0);
    CHECK(names.emplace(iid, std::string(only_field(entry, 2).bytes)).second);  // a number means one text
  }
}

void read_track(const std::vector<WireField>& d, PerfettoRead& read) {
  const uint64_t uuid = only_field(d, 1).value;
  REQUIRE(uuid > 0);
  REQUIRE(!read.tracks.contains(uuid));
  PerfettoTrack& track = read.tracks[uuid];
  track.name = only_field(d, 2).bytes, track.parent = only_field(d, 5).value;
  if (const auto process = wire_fields(only_field(d, 3).bytes); !process.empty()) {
    track.process = static_cast<int64_t>(only_field(process, 1).value);
    CHECK(read.processes.emplace(track.process, std::string(only_field(process, 6).bytes)).second);
  }
  if (const auto thread = wire_fields(only_field(d, 4).bytes); !thread.empty()) {
    track.process = static_cast<int64_t>(only_field(thread, 1).value),
    track.thread = static_cast<int64_t>(only_field(thread, 2).value);
    track.name = only_field(thread, 5).bytes;
  }
  track.counts_bytes = only_field(wire_fields(only_field(d, 8).bytes), 3).value == 3;
}

PerfettoRead read_perfetto(const TracedPlan& t) {
  PerfettoRead read;
  std::string file;
  interop::write_perfetto(t.plan, t.programs, t.arenas, t.trace, [&](std::string_view bytes) { file += bytes, ++read.pieces; });
  struct Event {
    int64_t at;
    std::vector<WireField> fields;
  };
  std::vector<Event> events;
  Names categories, names, arguments;
  bool begun = false;
  for (const WireField& packet : wire_fields(file)) {
    REQUIRE(packet.number == 1);
    const auto p = wire_fields(packet.bytes);
    CHECK(only_field(p, 10).value == 1);
    // What is interned counts from the packet on that says so.
    const uint64_t flags = only_field(p, 13).value;
    if (flags == 1) begun = true;
    const auto news = wire_fields(only_field(p, 12).bytes);
    intern(news, 1, categories), intern(news, 2, names), intern(news, 3, arguments);
    if (const auto d = wire_fields(only_field(p, 60).bytes); !d.empty()) read_track(d, read);
    if (const auto e = wire_fields(only_field(p, 11).bytes); !e.empty()) {
      REQUIRE(begun);
      REQUIRE(flags == 2);
      REQUIRE(read.tracks.contains(only_field(e, 11).value));
      events.push_back({static_cast<int64_t>(only_field(p, 8).value), e});
    }
  }
  std::ranges::stable_sort(events, {}, &Event::at);
  std::map<uint64_t, std::vector<PerfettoSlice>> open;
  for (const Event& e : events) {
    const uint64_t uuid = only_field(e.fields, 11).value, type = only_field(e.fields, 9).value;
    PerfettoTrack& track = read.tracks[uuid];
    auto& stack = open[uuid];
    if (type == 4) {
      track.counter.emplace_back(e.at, static_cast<int64_t>(only_field(e.fields, 30).value));
    } else if (type == 1) {
      PerfettoSlice slice{
          names.at(only_field(e.fields, 10).value), categories.at(only_field(e.fields, 3).value), e.at, 0, stack.size(), {}};
      for (const WireField& f : e.fields)
        if (f.number == 4) {
          const auto a = wire_fields(f.bytes);
          CHECK(slice.arguments.emplace(arguments.at(only_field(a, 1).value), static_cast<int64_t>(only_field(a, 4).value)).second);
        }
      stack.push_back(std::move(slice));
    } else {
      REQUIRE(type == 2);
      REQUIRE(!stack.empty());
      stack.back().end = e.at;
      track.slices.push_back(std::move(stack.back()));
      stack.pop_back();
    }
  }
  for (const auto& [uuid, stack] : open) CHECK(stack.empty());
  return read;
}

int64_t to_ns(double seconds) { return std::llround(1e9 * seconds); }

/// Begin of the second step.
double second_step(const Trace& trace) {
  double end = 0;
  for (int rank = 0; rank < trace.world_size; ++rank) end = std::max(end, trace.step_interval[static_cast<size_t>(rank)][1]);
  return end;
}

TEST_CASE("Perfetto has every op of a trace at its time, on the stream of its rank, with the wait for peers within it") {
  const TracedPlan t = golden_trace("dp2-tp2-pp2-zero1-tied");
  const PerfettoRead read = read_perfetto(t);
  const double second = second_step(t.trace);
  // (process, stream, begin, end, instruction, step)
  std::multiset<std::tuple<int64_t, std::string, int64_t, int64_t, int64_t, int64_t>> ops, expected, waits, expected_waits;
  std::multiset<std::tuple<int64_t, std::string, int64_t, int64_t>> peers, expected_peers;
  for (const auto& [uuid, track] : read.tracks) {
    if (track.thread == 0) continue;
    CHECK(read.processes.at(track.process) == fmt::format("rank {}", track.process - 1));
    CHECK(track.thread > t.trace.world_size + 1);  // no process has this number
    for (const PerfettoSlice& s : track.slices) {
      if (s.depth == 1) {
        CHECK(s.name == "wait for peers");
        peers.emplace(track.process, track.name, s.begin, s.end);
        continue;
      }
      REQUIRE(s.depth == 0);
      (s.category == "wait" ? waits : ops)
          .emplace(track.process, track.name, s.begin, s.end, s.arguments.at("instruction"), s.arguments.at("step"));
      const Program& program = t.programs[static_cast<size_t>(t.plan.mesh.role_of(static_cast<int>(track.process - 1)))];
      const Instruction& i = program.instructions[static_cast<size_t>(s.arguments.at("instruction"))];
      if (s.category == "wait") continue;
      CHECK(s.name == fmt::format("{} {}", kind_of(i.op->work), i.op->label));
      CHECK(s.arguments.contains("layer") == (i.layer >= 0));
      if (i.layer >= 0) CHECK(s.arguments.at("layer") == i.layer);
      if (i.micro_batch >= 0) CHECK(s.arguments.at("micro_batch") == i.micro_batch);
      if (s.category == "communication") CHECK(s.arguments.at("sent_bytes") == 64 * i.id);
    }
  }
  for (const TraceEvent& e : t.trace.events) {
    const double start = e.step == 0 ? 0 : second;
    const std::string& stream = t.trace.streams[static_cast<size_t>(e.stream)];
    (e.kind == TraceEvent::Kind::kWait ? expected_waits : expected)
        .emplace(e.rank + 1, stream, to_ns(start + e.begin), to_ns(start + e.end), e.instruction, e.step);
    if (e.peer_wait > 0) expected_peers.emplace(e.rank + 1, stream, to_ns(start + e.begin), to_ns(start + e.begin + e.peer_wait));
  }
  CHECK(expected.size() > 500);
  CHECK(ops == expected);
  CHECK(expected_waits.size() > 10);
  CHECK(waits == expected_waits);
  CHECK(expected_peers.size() > 10);
  CHECK(peers == expected_peers);
}

TEST_CASE("Perfetto's counter of a rank's memory reaches the plan's peak, and its steps last as long as the trace's") {
  for (const char* name : {"pipeline-1f1b", "offload-activations"}) {
    const TracedPlan t = golden_trace(name);
    const PerfettoRead read = read_perfetto(t);
    int counters = 0, steps = 0;
    for (const auto& [uuid, track] : read.tracks) {
      if (track.counts_bytes) {
        const int rank = static_cast<int>(read.tracks.at(track.parent).process) - 1, role = t.plan.mesh.role_of(rank);
        const MemoryPeak peak = memory_peak(t.plan, role)[static_cast<size_t>(Space::kDevice)];
        int64_t most = 0;
        for (const auto& [at, value] : track.counter) most = std::max(most, value);
        INFO(name << " rank " << rank);
        CHECK(track.name == "device memory");
        CHECK(most == peak.peak_bytes);
        CHECK(track.counter.front() == std::pair<int64_t, int64_t>{0, peak.persistent_bytes});
        CHECK(track.counter.back().second == peak.persistent_bytes);
        ++counters;
      } else if (track.thread == 0) {
        const int rank = static_cast<int>(track.process) - 1;
        REQUIRE(track.slices.size() == 2);
        for (int step = 0; step < 2; ++step) {
          const PerfettoSlice& s = track.slices[static_cast<size_t>(step)];
          const double start = step == 0 ? 0 : second_step(t.trace);
          CHECK(s.name == fmt::format("step {}", step));
          CHECK(s.begin == to_ns(start));
          CHECK(s.end == to_ns(start + t.trace.step_interval[static_cast<size_t>(step * t.trace.world_size + rank)][1]));
          ++steps;
        }
      }
    }
    CHECK(counters == t.trace.world_size);
    CHECK(steps == 2 * t.trace.world_size);
  }
}

TEST_CASE("Perfetto: what overlaps on a stream goes to another thread of its name, and details lie below") {
  TracedPlan t = golden_trace("pipeline-1f1b");
  // The last op of rank 0 on stream 0 begins before the one before it ends.
  std::vector<TraceEvent*> compute;
  for (TraceEvent& e : t.trace.events)
    if (e.rank == 0 && e.step == 1 && e.stream == 0 && e.kind == TraceEvent::Kind::kOp) compute.push_back(&e);
  REQUIRE(compute.size() > 2);
  TraceEvent& last = *compute.back();
  last.begin = compute[compute.size() - 2]->begin + 0.5e-6;
  t.trace.detail_lanes = {"kernels"}, t.trace.detail_names = {"gemm"};
  t.trace.details = {{0, 3, 0, 0, 0, 1e-6, 3e-6, 7}, {0, 3, 0, 0, 0, 2e-6, 4e-6, 8}, {-1, -1, 1, 0, 0, 1e-6, 2e-6, 0}};
  const PerfettoRead read = read_perfetto(t);
  std::map<std::string, size_t> threads;  // of rank 0: slices by thread
  for (const auto& [uuid, track] : read.tracks)
    if (track.thread != 0 && track.process == 1) threads[track.name] = track.slices.size();
  CHECK(threads.at("compute (2)") == 1);
  CHECK(threads.at("kernels") == 1);
  CHECK(threads.at("kernels (2)") == 1);
  CHECK(read.processes.at(t.trace.world_size + 1) == "no rank");
  for (const auto& [uuid, track] : read.tracks)
    if (track.process == t.trace.world_size + 1 && track.thread != 0) {
      REQUIRE(track.slices.size() == 1);
      CHECK(track.slices[0].begin == to_ns(second_step(t.trace) + 1e-6));
      CHECK(track.slices[0].arguments.at("bytes") == 0);
    }
}

TEST_CASE("a large trace comes in pieces") {
  const TracedPlan t = golden_trace("dp2-tp2-pp2-zero1-tied");
  TracedPlan many = golden_trace("dp2-tp2-pp2-zero1-tied");
  many.trace.steps = 40;
  many.trace.events.clear(), many.trace.step_interval.clear();
  for (int step = 0; step < 40; ++step)
    for (int rank = 0; rank < t.trace.world_size; ++rank)
      many.trace.step_interval.push_back(t.trace.step_interval[static_cast<size_t>(rank)]);
  for (int rank = 0; rank < t.trace.world_size; ++rank)
    for (int step = 0; step < 40; ++step)
      for (TraceEvent e : t.trace.events)
        if (e.rank == rank && e.step == 0) e.step = step, many.trace.events.push_back(e);
  size_t pieces = 0, largest = 0;
  interop::write_perfetto(many.plan, many.programs, many.arenas, many.trace,
                          [&](std::string_view bytes) { ++pieces, largest = std::max(largest, bytes.size()); });
  CHECK(pieces > 2);
  CHECK(largest < (1 << 18) + 4096);
}

}  // namespace
}  // namespace shardlab::testing
