#include "profiler/trace_file.h"

#include <fmt/format.h>
#include <zlib.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "plan/base/check.h"
#include "plan/base/hash.h"
#include "plan/base/pending_file.h"
#include "plan/text.h"

namespace shardlab::profiler {

namespace {

/// A file that is whole or not there. Packed where the path ends in ".gz".
class TraceFile {
 public:
  explicit TraceFile(const std::string& path)
      : file_(path, {}, "check the folder and the free space, or run with --traces none"), packed_(path.ends_with(".gz")) {
    if (!packed_) return;
    // 15 and 16: the largest window, and the header of gzip. Level 4 takes half the time of the default, for a few percent more bytes.
    const int begun = deflateInit2(&zip_, 4, Z_DEFLATED, 15 + 16, 8, Z_DEFAULT_STRATEGY);
    SHARDLAB_CHECK(begun == Z_OK, "zlib refuses to begin: {}", begun);
    out_.resize(kChunk);
  }
  ~TraceFile() {
    if (packed_) deflateEnd(&zip_);
  }
  TraceFile(const TraceFile&) = delete;
  TraceFile& operator=(const TraceFile&) = delete;

  template <class... Args>
  void print(fmt::format_string<Args...> format, Args&&... args) {
    fmt::format_to(std::back_inserter(waiting_), format, std::forward<Args>(args)...);
    if (waiting_.size() >= kChunk) flush(false);
  }
  void write(std::string_view text) {
    for (; !text.empty(); text.remove_prefix(std::min(text.size(), kChunk))) {
      waiting_.append(text.substr(0, kChunk));
      flush(false);
    }
  }
  /// Bytes of the file.
  int64_t place() {
    flush(true);
    file_.place();
    return bytes_;
  }

 private:
  static constexpr size_t kChunk = 1 << 18;

  void put(std::string_view bytes) {
    file_.write(bytes);
    bytes_ += static_cast<int64_t>(bytes.size());
  }
  void flush(bool last) {
    if (!packed_) {
      put({waiting_.data(), waiting_.size()});
      return waiting_.clear();
    }
    zip_.next_in = reinterpret_cast<Bytef*>(waiting_.data());
    zip_.avail_in = static_cast<uInt>(waiting_.size());
    do {
      zip_.next_out = reinterpret_cast<Bytef*>(out_.data());
      zip_.avail_out = static_cast<uInt>(out_.size());
      deflate(&zip_, last ? Z_FINISH : Z_NO_FLUSH);
      put({out_.data(), out_.size() - zip_.avail_out});
    } while (zip_.avail_out == 0);
    waiting_.clear();
  }

  PendingFile file_;
  const bool packed_;
  z_stream zip_{};
  std::vector<char> out_;
  fmt::memory_buffer waiting_;
  int64_t bytes_ = 0;
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
  return file.place();
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
  return file.place();
}

}  // namespace shardlab::profiler
