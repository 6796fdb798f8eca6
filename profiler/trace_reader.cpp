#include "profiler/trace_reader.h"

#include <fmt/format.h>
#include <zlib.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <stdexcept>
#include <tuple>
#include <unordered_map>

#include "plan/base/limits.h"
#include "profiler/json_integer.h"

namespace shardlab::profiler {
namespace {

using nlohmann::json;

void read_accounting(const json& from, TraceAccounting& a) {
  from.at("clock").get_to(a.clock);
  from.at("clock_error_s").get_to(a.clock_error_s);
  const std::pair<const char*, int64_t TraceAccounting::*> counts[] = {{"launches", &TraceAccounting::launches},
                                                                       {"recorded", &TraceAccounting::recorded},
                                                                       {"lost", &TraceAccounting::lost},
                                                                       {"dropped", &TraceAccounting::dropped},
                                                                       {"unreadable", &TraceAccounting::unreadable},
                                                                       {"device_records", &TraceAccounting::device_records},
                                                                       {"timed", &TraceAccounting::timed},
                                                                       {"zero_timestamp", &TraceAccounting::zero_timestamp},
                                                                       {"out_of_range", &TraceAccounting::out_of_range},
                                                                       {"unclaimed", &TraceAccounting::unclaimed},
                                                                       {"ops", &TraceAccounting::ops},
                                                                       {"ops_untimed", &TraceAccounting::ops_untimed}};
  for (const auto& [key, member] : counts) a.*member = json_integer<int64_t>(from.at(key));
}

/// A trace of more could not be shown.
constexpr int64_t kMostEvents = 1 << 27;

/// Bytes of a file, packed or not, or of a stream.
class Bytes {
 public:
  explicit Bytes(const std::string& path) : file_(gzopen(path.c_str(), "rb")) {}
  explicit Bytes(std::istream& stream) : stream_(&stream) {}
  ~Bytes() {
    if (file_ != nullptr) gzclose(file_);
  }
  Bytes(const Bytes&) = delete;
  Bytes& operator=(const Bytes&) = delete;
  bool opened() const { return file_ != nullptr || stream_ != nullptr; }

  /// Bytes that there were; 0 at the end; -1 where they cannot be read: see `damage`.
  int read(std::vector<char>& into) {
    if (stream_ != nullptr) return static_cast<int>(stream_->read(into.data(), static_cast<std::streamsize>(into.size())).gcount());
    const int count = gzread(file_, into.data(), static_cast<unsigned>(into.size()));
    int code = Z_OK;
    if (count < 0) return damage_ = fmt::format("the file cannot be unpacked ({})", gzerror(file_, &code)), -1;
    if (count > 0) return count;
    // A packed file that ends before its end reads as much as there is, and then says so.
    gzerror(file_, &code);
    if (code == Z_BUF_ERROR) return damage_ = "the packed file is cut off here", -1;
    return 0;
  }
  const std::string& damage() const { return damage_; }

 private:
  gzFile file_ = nullptr;
  std::istream* stream_ = nullptr;
  std::string damage_;
};

class Lines {
 public:
  explicit Lines(Bytes& bytes) : bytes_(bytes), chunk_(1 << 18) {}

  /// False at the end of the file, or where it is damaged: see `damage`.
  bool next(std::string& line) {
    line.clear();
    for (;;) {
      const auto end = std::find(at_, end_, '\n');
      line.append(at_, end);
      if (end != end_) return at_ = end + 1, true;
      if (static_cast<int64_t>(line.size()) > limits::kTraceLineBytes)
        return damage_ = fmt::format("this line has more than {} bytes", limits::kTraceLineBytes), false;
      const int count = bytes_.read(chunk_);
      at_ = chunk_.data(), end_ = at_ + std::max(count, 0);
      if (count < 0) return damage_ = bytes_.damage(), false;
      if (count == 0) return !line.empty();
    }
  }
  const std::string& damage() const { return damage_; }

 private:
  Bytes& bytes_;
  std::vector<char> chunk_;
  const char *at_ = nullptr, *end_ = nullptr;
  std::string damage_;
};

struct Header {
  int64_t events = -1;  ///< -1: an older file, which does not say
};

Header read_header(const json& line, RecordedTrace& recorded) {
  Trace& trace = recorded.trace;
  trace.producer = line.at("producer").get<std::string>();
  recorded.plan = line.value("plan", "");
  trace.world_size = json_integer<int>(line.at("world_size"));
  trace.steps = json_integer<int>(line.at("steps"));
  const int64_t intervals = int64_t{trace.world_size} * trace.steps;
  if (trace.world_size < 1 || trace.steps < 0 || intervals > limits::kTraceIntervals)
    throw std::out_of_range(
        fmt::format("{} ranks and {} steps, where a trace has 1 or more ranks and at most {} of both multiplied", trace.world_size,
                    trace.steps, limits::kTraceIntervals));
  trace.streams = line.at("streams").get<std::vector<std::string>>();
  trace.dropped = json_integer<int64_t>(line.at("dropped"));
  trace.recorder_overhead_s = line.at("recorder_overhead_s").get<double>();
  if (line.contains("accounting")) read_accounting(line.at("accounting"), trace.accounting);
  return {line.contains("events") ? json_integer<int64_t>(line.at("events")) : -1};
}

class Reader {
 public:
  RecordedTrace recorded;
  Header header;

  void read_line(const json& line) {
    Trace& trace = recorded.trace;
    if (trace.step_interval.empty())
      trace.step_interval.resize(static_cast<size_t>(trace.world_size) * static_cast<size_t>(trace.steps));
    const int rank = json_integer<int>(line.at("rank")), step = json_integer<int>(line.at("step"));
    if (rank < 0 || rank >= trace.world_size || step < 0 || step >= trace.steps)
      throw std::out_of_range(
          fmt::format("rank {} and step {} of a trace of {} ranks and {} steps", rank, step, trace.world_size, trace.steps));
    const double begin = line.at("begin").get<double>(), end = line.at("end").get<double>();
    if (!line.contains("kind")) {
      trace.step_interval[static_cast<size_t>(step) * static_cast<size_t>(trace.world_size) + static_cast<size_t>(rank)] = {begin,
                                                                                                                            end};
      return;
    }
    read_event(line, rank, step, begin, end);
  }

 private:
  void read_event(const json& line, int rank, int step, double begin, double end) {
    Trace& trace = recorded.trace;
    TraceEvent event;
    event.kind = line.at("kind").get<std::string>() == "wait" ? TraceEvent::Kind::kWait : TraceEvent::Kind::kOp;
    event.rank = rank;
    event.instruction = json_integer<int32_t>(line.at("instruction"));
    if (event.instruction < 0) throw std::out_of_range(fmt::format("instruction {}", event.instruction));
    const auto stream = std::ranges::find(trace.streams, line.at("stream").get<std::string>());
    if (stream == trace.streams.end()) throw std::out_of_range("the trace has no such stream: " + line.at("stream").dump());
    event.stream = static_cast<int32_t>(stream - trace.streams.begin());
    event.step = step;
    event.begin = begin;
    event.end = end;
    event.peer_wait = line.at("peer_wait").get<double>();
    event.sent_bytes = json_integer<int64_t>(line.at("sent_bytes"));
    event.queued = line.value("queued", -1.0);
    const int64_t most = header.events < 0 ? kMostEvents : std::min(header.events, kMostEvents);
    if (static_cast<int64_t>(trace.events.size()) == most)
      throw std::out_of_range(fmt::format("the trace has more than {} events", most));
    trace.events.push_back(event);
    const auto [op, fresh] = numbers_.try_emplace(line.at("op").get<std::string>(), static_cast<int32_t>(recorded.ops.size()));
    if (fresh) recorded.ops.push_back(op->first);
    recorded.op_of_event.push_back(op->second);
  }

  std::unordered_map<std::string, int32_t> numbers_;  ///< into `recorded.ops`
};

Error missing(const std::string& path) {
  return Error{ExitCode::kUsage, "there is no trace", "run the case again to record one", path};
}

/// Reads line by line, the first alone or all.
Result<RecordedTrace> read(Bytes& bytes, const std::string& path, bool all) {
  Lines lines(bytes);
  Reader reader;
  int64_t number = 0;
  const auto broken = [&](std::string why) {
    return Error{ExitCode::kUsage, std::move(why), "the file is damaged: run the case again", fmt::format("{}:{}", path, number)};
  };
  for (std::string text; lines.next(text);) {
    ++number;
    const json line = json::parse(text, nullptr, false);
    if (line.is_discarded()) return broken("this line is no JSON");
    try {
      if (number == 1) {
        if (json_integer<int>(line.at("version")) > kTraceVersion) return broken("the trace is of a newer version of shardlab");
        reader.header = read_header(line, reader.recorded);
        if (!all) return std::move(reader.recorded);
      } else {
        reader.read_line(line);
      }
    } catch (const std::exception& error) { return broken(error.what()); }
  }
  if (!lines.damage().empty()) return broken(lines.damage());
  if (number == 0) return Error{ExitCode::kUsage, "the trace is empty", "run the case again", path};
  const auto events = static_cast<int64_t>(reader.recorded.trace.events.size());
  if (reader.header.events >= 0 && reader.header.events != events)
    return broken(fmt::format("the trace is cut off: it has {} of {} events", events, reader.header.events));
  return std::move(reader.recorded);
}

Result<RecordedTrace> read_file(const std::string& path, bool all) {
  std::error_code failure;
  if (!std::filesystem::is_regular_file(path, failure)) return missing(path);
  Bytes bytes(path);
  if (!bytes.opened()) return missing(path);
  return read(bytes, path, all);
}

/// Instructions of a program by their text, in order.
std::unordered_map<std::string, std::vector<int32_t>> by_text(const Plan& plan, const Program& program) {
  std::unordered_map<std::string, std::vector<int32_t>> instructions;
  for (const Instruction& i : program.instructions) instructions[describe(plan, i)].push_back(i.id);
  return instructions;
}

}  // namespace

Result<RecordedTrace> read_trace_lines(const std::string& path) { return read_file(path, true); }

Result<RecordedTrace> read_trace_lines(std::istream& lines, const std::string& path) {
  Bytes bytes(lines);
  return read(bytes, path, true);
}

Result<std::string> read_trace_plan(const std::string& path) {
  auto first = read_file(path, false);
  if (!first.ok()) return first.error();
  return first->plan;
}

JoinedTrace join_by_text(RecordedTrace recorded, const Plan& plan, const std::vector<Program>& programs) {
  Trace& trace = recorded.trace;
  const auto role_of = [&](const TraceEvent& e) -> int { return e.rank < plan.mesh.world_size() ? plan.mesh.role_of(e.rank) : -1; };
  // By role and text, the numbers that the trace has for it. A rank may lack events that its recorder dropped, so that the numbers
  // of all ranks of a role are taken together.
  std::map<std::pair<int, int32_t>, std::set<int32_t>> numbers;
  for (size_t i = 0; i < trace.events.size(); ++i)
    if (const int role = role_of(trace.events[i]); role >= 0)
      numbers[{role, recorded.op_of_event[i]}].insert(trace.events[i].instruction);

  std::map<std::tuple<int, int32_t, int32_t>, int32_t> now;  // role, text, number in the trace: number in the plan
  for (int role = 0; role < static_cast<int>(programs.size()); ++role) {
    const auto instructions = by_text(plan, programs[static_cast<size_t>(role)]);
    for (const auto& [key, theirs] : numbers) {
      if (key.first != role) continue;
      const auto found = instructions.find(recorded.ops[static_cast<size_t>(key.second)]);
      if (found == instructions.end()) continue;
      const std::vector<int32_t>& ours = found->second;
      const bool same = std::ranges::includes(ours, theirs);
      if (!same && ours.size() != theirs.size()) continue;
      size_t at = 0;
      for (const int32_t number : theirs) now[{role, key.second, number}] = same ? number : ours[at++];
    }
  }

  std::vector<int32_t> streams;
  for (const std::string& name : trace.streams) {
    const auto found = std::ranges::find(plan.streams, name);
    streams.push_back(found == plan.streams.end() ? -1 : static_cast<int32_t>(found - plan.streams.begin()));
  }
  JoinedTrace joined;
  std::set<int32_t> unknown;
  std::vector<TraceEvent> events;
  for (size_t i = 0; i < trace.events.size(); ++i) {
    TraceEvent e = trace.events[i];
    const int role = role_of(e);
    const auto found = now.find({role, recorded.op_of_event[i], e.instruction});
    if (found == now.end() || streams[static_cast<size_t>(e.stream)] < 0) {
      ++joined.left_out;
      unknown.insert(recorded.op_of_event[i]);
      continue;
    }
    e.instruction = found->second, e.stream = streams[static_cast<size_t>(e.stream)];
    events.push_back(e);
  }
  for (const int32_t op : unknown) joined.unknown.push_back(recorded.ops[static_cast<size_t>(op)]);
  trace.events = std::move(events);
  trace.streams = plan.streams;
  joined.trace = std::move(trace);
  return joined;
}

}  // namespace shardlab::profiler
