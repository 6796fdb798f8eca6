#include "profiler/trace_file.h"

#include <fmt/format.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <functional>
#include <iterator>

#include "plan/base/world_error.h"

namespace shardlab::profiler {

namespace {

/// Replaces `path` by what `write` writes, or leaves it as it was.
void replace_file(const std::string& path, const std::function<void(std::FILE*)>& write) {
  const std::string temporary = path + ".part";
  std::FILE* file = std::fopen(temporary.c_str(), "wb");
  const auto refuse = [&] {
    return WorldError(fmt::format("{} cannot be written: {}", path, std::strerror(errno)), "check the folder and the free space");
  };
  if (file == nullptr) throw refuse();
  write(file);
  const bool whole = std::fflush(file) == 0 && std::ferror(file) == 0;
  if (std::fclose(file) != 0 || !whole || std::rename(temporary.c_str(), path.c_str()) != 0) {
    const WorldError error = refuse();
    std::remove(temporary.c_str());
    throw error;
  }
}

/// A JSON string literal.
std::string quoted(std::string_view text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\')
      out += fmt::format("\\{}", c);
    else if (static_cast<unsigned char>(c) < 0x20)
      out += fmt::format("\\u{:04x}", static_cast<unsigned>(c));
    else
      out += c;
  }
  return out + "\"";
}

/// `,"accounting":{...}` of a device's trace; nothing of others.
std::string accounting_field(const TraceAccounting& a) {
  if (a.clock.empty()) return "";
  return fmt::format(
      ",\"accounting\":{{\"clock\":{},\"clock_error_s\":{},\"launches\":{},\"recorded\":{},\"lost\":{},\"dropped\":{},"
      "\"unreadable\":{},"
      "\"device_records\":{},\"timed\":{},\"zero_timestamp\":{},\"out_of_range\":{},\"unclaimed\":{},\"ops\":{},\"ops_untimed\":{}}"
      "}",
      quoted(a.clock), a.clock_error_s, a.launches, a.recorded, a.lost, a.dropped, a.unreadable, a.device_records, a.timed,
      a.zero_timestamp, a.out_of_range, a.unclaimed, a.ops, a.ops_untimed);
}

size_t role_of(const Plan& plan, int rank) { return static_cast<size_t>(plan.mesh.role_of(rank)); }

}  // namespace

void write_chrome_trace(const std::string& path, const Plan& plan, const std::vector<Program>& programs, const Trace& trace) {
  const std::string text = to_chrome_json(plan, programs, trace);
  replace_file(path, [&](std::FILE* file) { std::fwrite(text.data(), 1, text.size(), file); });
}

void write_trace_lines(const std::string& path, const Plan& plan, const std::vector<Program>& programs, const Trace& trace) {
  replace_file(path, [&](std::FILE* file) {
    std::vector<std::string> streams;
    for (const std::string& s : trace.streams) streams.push_back(quoted(s));
    fmt::print(file,
               "{{\"version\":{},\"producer\":{},\"world_size\":{},\"steps\":{},\"streams\":[{}],\"dropped\":{},\"recorder_"
               "overhead_s\":{}{}}}\n",
               kTraceVersion, quoted(trace.producer), trace.world_size, trace.steps, fmt::join(streams, ","), trace.dropped,
               trace.recorder_overhead_s, accounting_field(trace.accounting));
    for (size_t i = 0; i < trace.step_interval.size(); ++i) {
      const size_t world = static_cast<size_t>(trace.world_size);
      fmt::print(file, "{{\"step\":{},\"rank\":{},\"begin\":{},\"end\":{}}}\n", i / world, i % world, trace.step_interval[i][0],
                 trace.step_interval[i][1]);
    }
    for (const TraceEvent& e : trace.events) {
      const Instruction& instruction = programs[role_of(plan, e.rank)].instructions[static_cast<size_t>(e.instruction)];
      fmt::print(file,
                 "{{\"kind\":\"{}\",\"rank\":{},\"instruction\":{},\"op\":{},\"stream\":{},\"step\":{},\"begin\":{},\"end\":{},"
                 "\"peer_wait\":{},"
                 "\"sent_bytes\":{}{}}}\n",
                 e.kind == TraceEvent::Kind::kOp ? "op" : "wait", e.rank, e.instruction, quoted(describe(plan, instruction)),
                 quoted(trace.streams[static_cast<size_t>(e.stream)]), e.step, e.begin, e.end, e.peer_wait, e.sent_bytes,
                 e.queued >= 0 ? fmt::format(",\"queued\":{}", e.queued) : "");
    }
  });
}

}  // namespace shardlab::profiler
