// Field numbers: protos/perfetto/trace of github.com/google/perfetto at v49 (trace_packet, track_event, interned_data).
#include "interop/perfetto.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <initializer_list>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "interop/held_buffers.h"
#include "interop/wire_format.h"
#include "plan/trace_internal.h"

namespace shardlab::interop {
namespace {

constexpr uint64_t kSequence = 1;   ///< packets of one sequence share what is interned
constexpr size_t kChunk = 1 << 18;  ///< bytes that are handed on at a time
constexpr std::array<std::string_view, 6> kArguments = {"step", "instruction", "layer", "micro_batch", "sent_bytes", "bytes"};
enum class Argument : uint8_t { kStep = 1, kInstruction, kLayer, kMicroBatch, kSentBytes, kBytes };  ///< iids of kArguments

enum class Phase : uint8_t { kBegin = 1, kEnd = 2, kCounter = 4 };  ///< TrackEvent.Type

int64_t nanoseconds(double seconds) { return std::llround(1e9 * seconds); }

/// Texts that are sent once and then named by number.
class Interned {
 public:
  explicit Interned(int field) : field_(field) {}
  /// The number of `text`; a new one is added to `news`.
  uint64_t of(const std::string& text, WireMessage& news) {
    const auto [at, is_new] = numbers_.try_emplace(text, numbers_.size() + 1);
    if (is_new) news.message(field_, WireMessage().number(1, at->second).text(2, text));
    return at->second;
  }

 private:
  const int field_;  ///< of InternedData
  std::unordered_map<std::string, uint64_t> numbers_;
};

/// What a slice is told with.
struct Told {
  std::string name, category;
  WireMessage arguments;  ///< fields of TrackEvent
};

WireMessage arguments(std::initializer_list<std::pair<Argument, int64_t>> values) {
  WireMessage fields;
  for (const auto& [key, value] : values) fields.message(4, WireMessage().number(1, static_cast<uint64_t>(key)).whole(4, value));
  return fields;
}

class PerfettoFile {
 public:
  PerfettoFile(const Plan& plan, const std::vector<Program>& programs, const std::vector<ArenaLayout>& arenas, const Trace& trace,
               const ByteSink& sink)
      : plan_(plan),
        programs_(programs),
        arenas_(arenas),
        trace_(trace),
        sink_(sink),
        starts_(step_starts(trace)),
        threads_(process_of(trace.world_size)) {
    WireMessage names;
    for (size_t i = 0; i < kArguments.size(); ++i) names.message(3, WireMessage().number(1, i + 1).text(2, kArguments[i]));
    put(WireMessage().number(13, 1).message(12, names));  // SEQ_INCREMENTAL_STATE_CLEARED
  }

  void write() {
    for (const int rank : traced_ranks(trace_)) add_rank(rank);
    add_details();
    sink_(waiting_);
  }

 private:
  /// A thread of a process, and when its last slice ends.
  struct Lane {
    uint64_t track = 0;
    int64_t end = 0;
  };

  void put(const WireMessage& packet) {
    waiting_ += WireMessage().message(1, WireMessage().number(10, kSequence).fields(packet)).bytes();
    if (waiting_.size() < kChunk) return;
    sink_(waiting_);
    waiting_.clear();
  }

  uint64_t add_track(const WireMessage& described) {
    const uint64_t track = ++tracks_;
    put(WireMessage().message(60, WireMessage().number(1, track).fields(described)));
    return track;
  }

  uint64_t add_process(int process, const std::string& name) {
    return add_track(WireMessage().message(3, WireMessage().whole(1, process).text(6, name)));
  }

  uint64_t add_thread(int process, const std::string& name) {
    return add_track(WireMessage().message(4, WireMessage().whole(1, process).whole(2, ++threads_).text(5, name)));
  }

  void event(int64_t at, uint64_t track, Phase phase, const WireMessage& more = {}, const WireMessage& news = {}) {
    WireMessage packet;
    packet.number(8, static_cast<uint64_t>(at)).number(13, 2);  // SEQ_NEEDS_INCREMENTAL_STATE
    if (!news.empty()) packet.message(12, news);
    packet.message(11, WireMessage().number(9, static_cast<uint64_t>(phase)).number(11, track).fields(more));
    put(packet);
  }

  void begin(int64_t at, uint64_t track, const Told& told) {
    WireMessage news, fields;
    fields.number(3, categories_.of(told.category, news)).number(10, names_.of(told.name, news)).fields(told.arguments);
    event(at, track, Phase::kBegin, fields, news);
  }

  /// The first lane that is free at `at`; `add` makes another.
  template <class Add>
  static Lane& free_lane(std::vector<Lane>& lanes, int64_t at, const Add& add) {
    const auto found = std::ranges::find_if(lanes, [&](const Lane& lane) { return lane.end <= at; });
    if (found != lanes.end()) return *found;
    lanes.push_back({add(lanes.size()), 0});
    return lanes.back();
  }

  static std::string numbered(const std::string& name, size_t before) {
    return before == 0 ? name : fmt::format("{} ({})", name, before + 1);
  }

  /// Process 0 is a computer's idle task: a rank is the process of the next number.
  static int process_of(int rank) { return rank + 1; }

  void add_rank(int rank) {
    const uint64_t process = add_process(process_of(rank), fmt::format("rank {}", rank));
    for (int step = 0; step < trace_.steps; ++step) {
      const Interval bounds = step_bounds(trace_, rank, step);
      const double start = starts_[static_cast<size_t>(step)];
      begin(nanoseconds(start + bounds[0]), process, {fmt::format("step {}", step), "step", arguments({{Argument::kStep, step}})});
      event(nanoseconds(start + bounds[1]), process, Phase::kEnd);
    }
    add_memory(rank, process);
    std::vector<std::vector<Lane>> streams(trace_.streams.size());
    for (size_t s = 0; s < streams.size(); ++s) streams[s].push_back({add_thread(process_of(rank), trace_.streams[s]), 0});
    const Program& program = programs_[role_of(plan_.mesh, rank)];
    for (const TraceEvent& e : events_of(trace_, rank)) add_event(e, program, streams[static_cast<size_t>(e.stream)]);
  }

  void add_event(const TraceEvent& e, const Program& program, std::vector<Lane>& lanes) {
    const Instruction& i = instruction_of(program, e);
    const double start = starts_[static_cast<size_t>(e.step)];
    const int64_t from = nanoseconds(start + e.begin), to = nanoseconds(start + e.end);
    Lane& lane = free_lane(lanes, from, [&](size_t before) {
      return add_thread(process_of(e.rank), numbered(trace_.streams[static_cast<size_t>(e.stream)], before));
    });
    lane.end = to;
    if (e.kind == TraceEvent::Kind::kWait) {
      begin(from, lane.track,
            {fmt::format("wait: {}", op_name(i)), "wait",
             arguments({{Argument::kStep, e.step}, {Argument::kInstruction, e.instruction}})});
      event(to, lane.track, Phase::kEnd);
      return;
    }
    Told told{op_name(i),
              is_communication(i) ? "communication"
              : is_transfer(i)    ? "copy"
                                  : "compute",
              arguments({{Argument::kStep, e.step}, {Argument::kInstruction, e.instruction}})};
    if (i.layer >= 0) told.arguments.fields(arguments({{Argument::kLayer, i.layer}}));
    if (i.micro_batch >= 0) told.arguments.fields(arguments({{Argument::kMicroBatch, i.micro_batch}}));
    if (is_communication(i)) told.arguments.fields(arguments({{Argument::kSentBytes, e.sent_bytes}}));
    begin(from, lane.track, told);
    if (e.peer_wait > 0) {
      begin(from, lane.track, {"wait for peers", "wait", {}});
      event(std::min(to, nanoseconds(start + e.begin + e.peer_wait)), lane.track, Phase::kEnd);
    }
    event(to, lane.track, Phase::kEnd);
  }

  /// Live bytes of the rank, step by step.
  void add_memory(int rank, uint64_t process) {
    const size_t role = role_of(plan_.mesh, rank);
    constexpr uint64_t kBytesUnit = 3;  // CounterDescriptor.UNIT_SIZE_BYTES
    const uint64_t track =
        add_track(WireMessage().text(2, "device memory").number(5, process).message(8, WireMessage().number(3, kBytesUnit)));
    int64_t kept = 0;
    for (const HeldBuffer& b : persistent_buffers(plan_, programs_[role], arenas_[role])) kept += b.bytes;
    for (int step = 0; step < trace_.steps; ++step) {
      int64_t live = kept;
      const double start = starts_[static_cast<size_t>(step)];
      event(nanoseconds(start), track, Phase::kCounter, WireMessage().whole(30, live));
      for (const BufferChange& c : buffer_changes(plan_, programs_[role], arenas_[role], trace_, rank, step)) {
        live += c.freed ? -c.buffer.bytes : c.buffer.bytes;
        event(nanoseconds(start + c.at_s), track, Phase::kCounter, WireMessage().whole(30, live));
      }
    }
  }

  /// What a device's own records tell, in order of begin. Those of no rank have a process of their own.
  void add_details() {
    std::vector<const TraceDetail*> order;
    for (const TraceDetail& d : trace_.details) order.push_back(&d);
    const auto begin_of = [&](const TraceDetail* d) { return starts_[static_cast<size_t>(d->step)] + d->begin; };
    std::ranges::stable_sort(order, {}, begin_of);
    std::map<std::pair<int, int>, std::vector<Lane>> lanes;  // by process and lane
    const int nobody = process_of(trace_.world_size);
    bool has_nobody = false;
    for (const TraceDetail* d : order) {
      const int process = d->rank >= 0 ? process_of(d->rank) : nobody;
      if (process == nobody && !std::exchange(has_nobody, true)) add_process(nobody, "no rank");
      const int64_t from = nanoseconds(begin_of(d)), to = nanoseconds(begin_of(d) + (d->end - d->begin));
      Lane& lane = free_lane(lanes[{process, d->lane}], from, [&](size_t before) {
        return add_thread(process, numbered(trace_.detail_lanes[static_cast<size_t>(d->lane)], before));
      });
      lane.end = to;
      begin(from, lane.track,
            {trace_.detail_names[static_cast<size_t>(d->name)], "detail",
             arguments({{Argument::kStep, d->step}, {Argument::kInstruction, d->instruction}, {Argument::kBytes, d->bytes}})});
      event(to, lane.track, Phase::kEnd);
    }
  }

  const Plan& plan_;
  const std::vector<Program>& programs_;
  const std::vector<ArenaLayout>& arenas_;
  const Trace& trace_;
  const ByteSink& sink_;
  const std::vector<double> starts_;
  int threads_;  ///< numbers of threads go on behind those of processes: a thread with a process's number is its main thread
  std::string waiting_;
  uint64_t tracks_ = 0;
  Interned categories_{1}, names_{2};
};

}  // namespace

void write_perfetto(const Plan& plan, const std::vector<Program>& programs, const std::vector<ArenaLayout>& arenas,
                    const Trace& trace, const ByteSink& sink) {
  PerfettoFile(plan, programs, arenas, trace, sink).write();
}

}  // namespace shardlab::interop
