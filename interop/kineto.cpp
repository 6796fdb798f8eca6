#include "interop/kineto.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <nlohmann/json.hpp>

#include "plan/trace_internal.h"

namespace shardlab::interop {
namespace {

constexpr int kFirstStream = 7;  ///< of PyTorch's compute stream; 0 and below are no streams of a device to its readers
constexpr int kHostThread = 1;   ///< thread of the launches and of the steps, in the process of the host

int64_t microseconds(double seconds) { return std::llround(1e6 * seconds); }

std::string string_literal(std::string_view text) {
  return nlohmann::json(text).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

/// The same for every layer and micro-batch, so that readers add them up.
std::string kernel_name(const Instruction& i) {
  if (is_communication(i)) return "ncclKernel_" + op_name(i);
  if (is_transfer(i)) return fmt::format("{} ({})", copy_name(i), i.op->label);
  return op_name(i);
}

class KinetoFile {
 public:
  KinetoFile(const Plan& plan, const Program& program, const Trace& trace, int rank)
      : plan_(plan), program_(program), trace_(trace), rank_(rank) {
    out_ = fmt::format(
        "{{\"schemaVersion\":1,\"producer\":{},\"plan\":{},\"distributedInfo\":{{\"backend\":\"nccl\",\"rank\":{},"
        "\"world_size\":{}}},\n\"traceEvents\":[",
        string_literal(trace.producer), string_literal(plan.name), rank, trace.world_size);
  }

  std::string text() {
    name_process(rank_, fmt::format("device of rank {}", rank_));
    name_process(host(), fmt::format("host of rank {}", rank_));
    for (size_t s = 0; s < trace_.streams.size(); ++s)
      name_thread(rank_, kFirstStream + static_cast<int>(s), fmt::format("stream {} {}", kFirstStream + s, trace_.streams[s]));
    lay_out_steps();
    for (const TraceEvent& e : events_of(trace_, rank_))
      if (e.kind == TraceEvent::Kind::kOp) add(e);
    return out_ + "\n]}\n";
  }

 private:
  /// A process of its own, apart from those of all devices.
  int host() const { return trace_.world_size + rank_; }

  void begin_event() { out_ += out_.back() == '[' ? "\n" : ",\n"; }

  template <class... Args>
  void event(fmt::format_string<Args...> format, Args&&... args) {
    begin_event();
    fmt::format_to(std::back_inserter(out_), format, std::forward<Args>(args)...);
  }

  void name_process(int process, const std::string& name) {
    event("{{\"ph\":\"M\",\"name\":\"process_name\",\"pid\":{},\"tid\":0,\"ts\":0,\"args\":{{\"name\":{}}}}}", process,
          string_literal(name));
  }
  void name_thread(int process, int thread, const std::string& name) {
    event("{{\"ph\":\"M\",\"name\":\"thread_name\",\"pid\":{},\"tid\":{},\"ts\":0,\"args\":{{\"name\":{}}}}}", process, thread,
          string_literal(name));
  }

  /// Events carry times from the start of their own step: steps are laid end to end, each as long as its last rank takes.
  void lay_out_steps() {
    starts_ = step_starts(trace_);
    for (int step = 0; step < trace_.steps; ++step) {
      const int64_t begin = microseconds(starts_[static_cast<size_t>(step)]),
                    end = microseconds(starts_[static_cast<size_t>(step) + 1]);
      event("{{\"ph\":\"X\",\"cat\":\"user_annotation\",\"name\":\"ProfilerStep#{}\",\"pid\":{},\"tid\":{},\"ts\":{},\"dur\":{}}}",
            step, host(), kHostThread, begin, end - begin);
    }
  }

  void add(const TraceEvent& e) {
    const Instruction& i = instruction_of(program_, e);
    const double start = starts_[static_cast<size_t>(e.step)];
    const int64_t begin = microseconds(start + e.begin), end = microseconds(start + e.end);
    const int64_t launch =
        e.queued >= 0 ? std::min(begin, microseconds(start + std::max(0.0, e.begin - e.queued))) : microseconds(start);
    ++correlation_;
    event(
        "{{\"ph\":\"X\",\"cat\":\"cuda_runtime\",\"name\":\"cudaLaunchKernel\",\"pid\":{},\"tid\":{},\"ts\":{},\"dur\":0,"
        "\"args\":{{\"correlation\":{}}}}}",
        host(), kHostThread, launch, correlation_);
    event(
        "{{\"ph\":\"X\",\"cat\":\"{}\",\"name\":{},\"pid\":{},\"tid\":{},\"ts\":{},\"dur\":{},\"args\":{{\"device\":{},"
        "\"stream\":{},\"correlation\":{},\"op\":{},\"layer\":{},\"micro_batch\":{},\"peer_wait_us\":{:.3f},\"sent_bytes\":{}}}}}",
        is_transfer(i) ? "gpu_memcpy" : "kernel", string_literal(kernel_name(i)), rank_, kFirstStream + e.stream, begin,
        end - begin, rank_, kFirstStream + e.stream, correlation_, string_literal(describe(plan_, i)), i.layer, i.micro_batch,
        1e6 * e.peer_wait, e.sent_bytes);
  }

  const Plan& plan_;
  const Program& program_;
  const Trace& trace_;
  const int rank_;
  std::string out_;
  std::vector<double> starts_;
  int64_t correlation_ = 0;
};

}  // namespace

std::string to_kineto_json(const Plan& plan, const std::vector<Program>& programs, const Trace& trace, int rank) {
  return KinetoFile(plan, programs[role_of(plan.mesh, rank)], trace, rank).text();
}

}  // namespace shardlab::interop
