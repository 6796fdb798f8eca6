#include "profiler/trace_reader.h"

#include <fmt/format.h>

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>
#include <stdexcept>

#include "plan/base/limits.h"

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
  for (const auto& [key, member] : counts) from.at(key).get_to(a.*member);
}

void read_header(const json& line, Trace& trace) {
  trace.producer = line.at("producer").get<std::string>();
  trace.world_size = line.at("world_size").get<int>();
  trace.steps = line.at("steps").get<int>();
  trace.streams = line.at("streams").get<std::vector<std::string>>();
  trace.dropped = line.at("dropped").get<int64_t>();
  trace.recorder_overhead_s = line.at("recorder_overhead_s").get<double>();
  if (line.contains("accounting")) read_accounting(line.at("accounting"), trace.accounting);
  const int64_t intervals = int64_t{trace.world_size} * trace.steps;
  if (trace.world_size < 1 || trace.steps < 0 || intervals > limits::kTraceIntervals)
    throw std::out_of_range(
        fmt::format("{} ranks and {} steps, where a trace has 1 or more ranks and at most {} of both multiplied", trace.world_size,
                    trace.steps, limits::kTraceIntervals));
  trace.step_interval.resize(static_cast<size_t>(trace.world_size) * static_cast<size_t>(trace.steps));
}

void read_line(const json& line, Trace& trace) {
  const int rank = line.at("rank").get<int>(), step = line.at("step").get<int>();
  if (rank < 0 || rank >= trace.world_size || step < 0 || step >= trace.steps)
    throw std::out_of_range(
        fmt::format("rank {} and step {} of a trace of {} ranks and {} steps", rank, step, trace.world_size, trace.steps));
  const double begin = line.at("begin").get<double>(), end = line.at("end").get<double>();
  if (!line.contains("kind")) {
    trace.step_interval.at(static_cast<size_t>(step) * static_cast<size_t>(trace.world_size) + static_cast<size_t>(rank)) = {begin,
                                                                                                                             end};
    return;
  }
  TraceEvent event;
  event.kind = line.at("kind").get<std::string>() == "wait" ? TraceEvent::Kind::kWait : TraceEvent::Kind::kOp;
  event.rank = rank;
  event.instruction = line.at("instruction").get<int32_t>();
  if (event.instruction < 0) throw std::out_of_range(fmt::format("instruction {}", event.instruction));
  const auto stream = std::ranges::find(trace.streams, line.at("stream").get<std::string>());
  if (stream == trace.streams.end()) throw std::out_of_range("the trace has no such stream: " + line.at("stream").dump());
  event.stream = static_cast<int32_t>(stream - trace.streams.begin());
  event.step = step;
  event.begin = begin;
  event.end = end;
  event.peer_wait = line.at("peer_wait").get<double>();
  event.sent_bytes = line.at("sent_bytes").get<int64_t>();
  event.queued = line.value("queued", -1.0);
  trace.events.push_back(event);
}

/// The next line; of one that is too long as much as shows it.
bool next_line(std::istream& lines, std::string& text) {
  constexpr int kEnd = std::char_traits<char>::eof();
  text.clear();
  int c = kEnd;
  while ((c = lines.rdbuf()->sbumpc()) != kEnd && c != '\n') {
    text += static_cast<char>(c);
    if (static_cast<int64_t>(text.size()) > limits::kTraceLineBytes) return true;
  }
  return c != kEnd || !text.empty();
}

}  // namespace

Result<Trace> read_trace_lines(const std::string& path) {
  std::ifstream file(path);
  if (!file) return Error{ExitCode::kUsage, "there is no trace", "run the case again to record one", path};
  return read_trace_lines(file, path);
}

Result<Trace> read_trace_lines(std::istream& lines, const std::string& path) {
  Trace trace;
  int number = 0;
  for (std::string text; next_line(lines, text);) {
    ++number;
    const auto broken = [&](std::string why) {
      return Error{ExitCode::kUsage, std::move(why), "the file is damaged: run the case again", fmt::format("{}:{}", path, number)};
    };
    if (static_cast<int64_t>(text.size()) > limits::kTraceLineBytes)
      return broken(fmt::format("this line has more than {} bytes", limits::kTraceLineBytes));
    const json line = json::parse(text, nullptr, false);
    if (line.is_discarded()) return broken("this line is no JSON");
    try {
      if (number == 1) {
        if (line.at("version").get<int>() > kTraceVersion) return broken("the trace is of a newer version of shardlab");
        read_header(line, trace);
      } else {
        read_line(line, trace);
      }
    } catch (const std::exception& error) { return broken(error.what()); }
  }
  if (number == 0) return Error{ExitCode::kUsage, "the trace is empty", "run the case again", path};
  return trace;
}

}  // namespace shardlab::profiler
