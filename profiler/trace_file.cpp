#include "profiler/trace_file.h"

#include <fmt/format.h>
#include <zlib.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <iterator>
#include <utility>

#include "plan/base/hash.h"
#include "plan/base/world_error.h"
#include "plan/text.h"

namespace shardlab {

namespace {

/// A file that replaces `path` when it is closed whole, and is gone otherwise. Packed where the path ends in ".gz".
class TraceFile {
 public:
  explicit TraceFile(std::string path) : path_(std::move(path)), temporary_(path_ + ".part") {
    // "T" writes as it is. Level 4: half the time of the default level, for a few percent more bytes.
    file_ = gzopen(temporary_.c_str(), path_.ends_with(".gz") ? "wb4" : "wbT");
    if (file_ == nullptr) throw refusal();
  }
  ~TraceFile() {
    if (file_ == nullptr) return;
    gzclose(file_);
    std::remove(temporary_.c_str());
  }
  TraceFile(const TraceFile&) = delete;
  TraceFile& operator=(const TraceFile&) = delete;

  template <class... Args>
  void print(fmt::format_string<Args...> format, Args&&... args) {
    fmt::format_to(std::back_inserter(waiting_), format, std::forward<Args>(args)...);
    if (waiting_.size() >= kChunk) flush();
  }
  void write(std::string_view text) {
    for (; !text.empty(); text.remove_prefix(std::min(text.size(), kChunk))) {
      waiting_.append(text.substr(0, kChunk));
      flush();
    }
  }
  /// Bytes of the file, packed.
  int64_t close() {
    flush();
    const int closed = gzclose(std::exchange(file_, nullptr));
    std::error_code failure;
    const auto bytes = std::filesystem::file_size(temporary_, failure);
    if (closed != Z_OK || failure || std::rename(temporary_.c_str(), path_.c_str()) != 0) {
      const WorldError error = refusal();
      std::remove(temporary_.c_str());
      throw error;
    }
    return static_cast<int64_t>(bytes);
  }

 private:
  static constexpr size_t kChunk = 1 << 18;
  void flush() {
    const auto count = static_cast<unsigned>(waiting_.size());
    if (count > 0 && gzwrite(file_, waiting_.data(), count) != static_cast<int>(count)) throw refusal();
    waiting_.clear();
  }
  WorldError refusal() const {
    return WorldError(fmt::format("{} cannot be written: {}", path_, std::strerror(errno)), "check the folder and the free space");
  }

  std::string path_, temporary_;
  gzFile file_ = nullptr;
  fmt::memory_buffer waiting_;
};

/// A JSON string literal.
std::string json_string(std::string_view text) {
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
      json_string(a.clock), a.clock_error_s, a.launches, a.recorded, a.lost, a.dropped, a.unreadable, a.device_records, a.timed,
      a.zero_timestamp, a.out_of_range, a.unclaimed, a.ops, a.ops_untimed);
}

size_t role_of(const Plan& plan, int rank) { return static_cast<size_t>(plan.mesh.role_of(rank)); }

}  // namespace

std::string plan_digest(std::string_view text) { return fmt::format("{:016x}", hash_text(text)); }

int64_t write_chrome_trace(const std::string& path, const Plan& plan, const std::vector<Program>& programs, const Trace& trace) {
  TraceFile file(path);
  file.write(to_chrome_json(plan, programs, trace));
  return file.close();
}

int64_t write_trace_lines(const std::string& path, const Plan& plan, const std::vector<Program>& programs, const Trace& trace) {
  TraceFile file(path);
  std::vector<std::string> streams;
  for (const std::string& s : trace.streams) streams.push_back(json_string(s));
  file.print(
      "{{\"version\":{},\"producer\":{},\"plan\":\"{}\",\"world_size\":{},\"steps\":{},\"events\":{},\"streams\":[{}],\"dropped\":{"
      "},"
      "\"recorder_overhead_s\":{}{}}}\n",
      kTraceVersion, json_string(trace.producer), plan_digest(shardlab::print(plan)), trace.world_size, trace.steps,
      trace.events.size(), fmt::join(streams, ","), trace.dropped, trace.recorder_overhead_s, accounting_field(trace.accounting));
  for (size_t i = 0; i < trace.step_interval.size(); ++i) {
    const size_t world = static_cast<size_t>(trace.world_size);
    file.print("{{\"step\":{},\"rank\":{},\"begin\":{},\"end\":{}}}\n", i / world, i % world, trace.step_interval[i][0],
               trace.step_interval[i][1]);
  }
  for (const TraceEvent& e : trace.events) {
    const Instruction& instruction = programs[role_of(plan, e.rank)].instructions[static_cast<size_t>(e.instruction)];
    file.print(
        "{{\"kind\":\"{}\",\"rank\":{},\"instruction\":{},\"op\":{},\"stream\":{},\"step\":{},\"begin\":{},\"end\":{},"
        "\"peer_wait\":{},"
        "\"sent_bytes\":{}{}}}\n",
        e.kind == TraceEvent::Kind::kOp ? "op" : "wait", e.rank, e.instruction, json_string(describe(plan, instruction)),
        json_string(trace.streams[static_cast<size_t>(e.stream)]), e.step, e.begin, e.end, e.peer_wait, e.sent_bytes,
        e.queued >= 0 ? fmt::format(",\"queued\":{}", e.queued) : "");
  }
  return file.close();
}

}  // namespace shardlab
