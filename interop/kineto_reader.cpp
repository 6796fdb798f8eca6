#include "interop/kineto_reader.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>

#include "interop/traced.h"
#include "plan/base/json_depth.h"
#include "plan/base/limits.h"
#include "plan/intervals.h"
#include "plan/trace_internal.h"

namespace shardlab::interop {
namespace {

using Json = nlohmann::json;

constexpr size_t kMostSteps = 10'000;

bool has(std::string_view text, std::string_view part) { return text.find(part) != std::string_view::npos; }

std::string lower(std::string text) {
  std::ranges::transform(text, text.begin(),
                         [](unsigned char c) { return static_cast<char>(c >= 'A' && c <= 'Z' ? c + 'a' - 'A' : c); });
  return text;
}

/// "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(...)", "Memcpy DtoH (Device -> Pinned)", "ampere_bf16_s16816gemm".
KernelClass class_of(const std::string& kernel, std::string_view category) {
  const std::string name = lower(kernel);
  if (category != "kernel" || name.starts_with("memcpy") || name.starts_with("memset")) return KernelClass::kCopy;
  if (!has(name, "nccl") && !has(name, "rccl")) return KernelClass::kCompute;
  if (has(name, "allreduce") || has(name, "all_reduce")) return KernelClass::kAllReduce;
  if (has(name, "allgather") || has(name, "all_gather")) return KernelClass::kAllGather;
  if (has(name, "reducescatter") || has(name, "reduce_scatter")) return KernelClass::kReduceScatter;
  if (has(name, "broadcast")) return KernelClass::kBroadcast;
  if (has(name, "sendrecv") || has(name, "all_to_all") || has(name, "alltoall") || has(name, "_send") || has(name, "_recv"))
    return KernelClass::kMessages;
  return KernelClass::kOtherCollective;
}

/// A number of a field; nothing where it is none.
std::optional<double> number(const Json& object, const char* key) {
  const auto at = object.find(key);
  if (at == object.end() || !at->is_number()) return std::nullopt;
  const double value = at->get<double>();
  return std::isfinite(value) ? std::optional(value) : std::nullopt;
}

std::string text(const Json& object, const char* key) {
  const auto at = object.find(key);
  return at != object.end() && at->is_string() ? at->get<std::string>() : "";
}

bool is_device(std::string_view category) { return category == "kernel" || category == "gpu_memcpy" || category == "gpu_memset"; }

/// Whether an event of the file is of use here; all others are dropped while the file is read, of which the most are the host's.
bool is_kept(const Json& event) {
  const std::string category = text(event, "cat");
  return is_device(category) || (category.ends_with("user_annotation") && text(event, "name").starts_with("ProfilerStep"));
}

class Reader {
 public:
  explicit Reader(const std::string& path) : path_(path) {}

  Result<DeviceRecords> read(std::string_view json) {
    // Depth 1 is the file, 2 the list of events, 3 an event: what an event holds goes with it.
    const auto filter = [](int depth, Json::parse_event_t at, Json& parsed) {
      return at != Json::parse_event_t::object_end || depth != 2 || !parsed.contains("ph") || is_kept(parsed);
    };
    const Json file = json_depth(json) > limits::kJsonDepth ? Json() : Json::parse(json, filter, /*allow_exceptions=*/false);
    if (!file.is_object() || !file.contains("traceEvents") || !file["traceEvents"].is_array())
      return refuse("is no trace of PyTorch's profiler", "give the JSON that torch.profiler's export_chrome_trace wrote, unpacked");
    if (const auto about = file.find("distributedInfo"); about != file.end() && about->is_object()) {
      records_.rank = static_cast<int>(std::clamp(number(*about, "rank").value_or(-1), -1.0, 1e9));
      records_.world_size = static_cast<int>(std::clamp(number(*about, "world_size").value_or(0), 0.0, 1e9));
    }
    for (const Json& event : file["traceEvents"])
      if (event.is_object()) SHARDLAB_TRY(add(event));
    if (records_.intervals.empty())
      return refuse("has no records of a device", "profile with ProfilerActivity.CUDA, on a machine whose CUPTI works");
    if (devices_.size() > 1)
      return refuse(fmt::format("has records of {} devices", devices_.size()),
                    "give the file of one rank: export_chrome_trace on each");
    finish();
    if (records_.steps.size() > kMostSteps)
      return refuse(fmt::format("has {} steps, more than {}", records_.steps.size(), kMostSteps),
                    "profile fewer: torch.profiler.schedule(active=...)");
    return std::move(records_);
  }

 private:
  Error refuse(const std::string& why, const char* hint) const { return refusal(fmt::format("{} {}", path_, why), hint); }

  Result<void> add(const Json& event) {
    if (text(event, "ph") != "X") return {};
    const auto at = number(event, "ts"), length = number(event, "dur");
    constexpr double kLatest = 1e18, kLongest = 1e15;  // microseconds, from 1970 on where PyTorch counts so
    if (!at || !length || *length < 0 || std::abs(*at) > kLatest || *length > kLongest)
      return refuse("has an event without a time", "export the trace again");
    const std::string category = text(event, "cat");
    if (!is_device(category)) {
      (category == "gpu_user_annotation" ? records_.steps : host_steps_).push_back({*at, *at + *length});
      return {};
    }
    if (const auto about = event.find("args"); about != event.end() && about->is_object())
      if (const auto device = number(*about, "device")) devices_.insert(*device);
    records_.intervals.push_back({class_of(text(event, "name"), category), *at, *at + *length});
    return {};
  }

  /// Steps of the device in order; where it has none those of the host, and where nothing is marked one of all records. Times become
  /// seconds from the first of all.
  void finish() {
    if (records_.steps.empty()) records_.steps = host_steps_;
    std::ranges::sort(records_.steps);
    double first = records_.intervals.front().begin, last = records_.intervals.front().end;
    for (const DeviceInterval& i : records_.intervals) first = std::min(first, i.begin), last = std::max(last, i.end);
    if (records_.steps.empty()) records_.steps.push_back({first, last});
    const double base = std::min(first, records_.steps.front()[0]);
    for (auto& [begin, end] : records_.steps) begin = 1e-6 * (begin - base), end = 1e-6 * (end - base);
    for (DeviceInterval& i : records_.intervals) i.begin = 1e-6 * (i.begin - base), i.end = 1e-6 * (i.end - base);
  }

  const std::string path_;
  DeviceRecords records_;
  std::vector<std::array<double, 2>> host_steps_;
  std::set<double> devices_;
};

KernelClass class_of(const Instruction& i) {
  if (std::holds_alternative<Send>(i.op->work) || std::holds_alternative<Recv>(i.op->work)) return KernelClass::kMessages;
  if (const auto* c = std::get_if<Collective>(&i.op->work)) switch (c->kind) {
      case CollectiveKind::kAllReduce: return KernelClass::kAllReduce;
      case CollectiveKind::kAllGather: return KernelClass::kAllGather;
      case CollectiveKind::kReduceScatter: return KernelClass::kReduceScatter;
      case CollectiveKind::kBroadcast: return KernelClass::kBroadcast;
      case CollectiveKind::kAllToAll: return KernelClass::kMessages;
    }
  return is_transfer(i) ? KernelClass::kCopy : KernelClass::kCompute;
}

}  // namespace

std::string_view name_of(KernelClass c) {
  constexpr std::array<std::string_view, kKernelClasses> kNames = {"compute",   "all_reduce", "all_gather", "reduce_scatter",
                                                                   "broadcast", "messages",   "other",      "copies"};
  return kNames[static_cast<size_t>(c)];
}

Result<DeviceRecords> parse_kineto(std::string_view json, const std::string& path) { return Reader(path).read(json); }

DeviceRecords records_of(const Plan& plan, const std::vector<Program>& programs, const Trace& trace, int rank) {
  DeviceRecords records{rank, trace.world_size, {}, {}};
  const std::vector<double> starts = step_starts(trace);
  for (int step = 0; step < trace.steps; ++step) {
    const Interval bounds = step_bounds(trace, rank, step);
    const double start = starts[static_cast<size_t>(step)];
    records.steps.push_back({start + bounds[0], start + bounds[1]});
  }
  const Program& program = programs[role_of(plan.mesh, rank)];
  for (const TraceEvent& e : events_of(trace, rank)) {
    if (e.kind != TraceEvent::Kind::kOp) continue;
    const double start = starts[static_cast<size_t>(e.step)];
    records.intervals.push_back({class_of(instruction_of(program, e)), start + e.begin, start + e.end});
  }
  return records;
}

namespace {

/// The part of disjoint, ascending intervals that lies in `bounds`.
Intervals part_in(const Intervals& all, const Interval& bounds) {
  Intervals part;
  auto at = std::ranges::upper_bound(all, bounds[0], {}, [](const Interval& i) { return i[1]; });
  for (; at != all.end() && (*at)[0] < bounds[1]; ++at)
    part.push_back({std::max((*at)[0], bounds[0]), std::min((*at)[1], bounds[1])});
  return part;
}

}  // namespace

BusySeconds busy_seconds(const DeviceRecords& records) {
  constexpr Interval kEver{-std::numeric_limits<double>::infinity(), std::numeric_limits<double>::infinity()};
  std::array<Intervals, kKernelClasses> of;
  for (const DeviceInterval& i : records.intervals) of[static_cast<size_t>(i.kind)].push_back({i.begin, i.end});
  Intervals all, communication;
  for (size_t c = 0; c < kKernelClasses; ++c) {
    of[c] = unite(std::move(of[c]), kEver);
    all = joined(std::move(all), of[c]);
    if (c != static_cast<size_t>(KernelClass::kCompute) && c != static_cast<size_t>(KernelClass::kCopy))
      communication = joined(std::move(communication), of[c]);
  }
  all = unite(std::move(all), kEver), communication = unite(std::move(communication), kEver);
  const Intervals exposed = without(communication, of[static_cast<size_t>(KernelClass::kCompute)]);

  BusySeconds sum;
  const double share = 1.0 / static_cast<double>(std::max<size_t>(1, records.steps.size()));
  for (const Interval& step : records.steps) {
    const auto seconds = [&](const Intervals& of_step) { return share * length(part_in(of_step, step)); };
    for (size_t c = 0; c < kKernelClasses; ++c) sum.by_class[c] += seconds(of[c]);
    sum.step += share * (step[1] - step[0]);
    sum.communication += seconds(communication), sum.exposed += seconds(exposed);
    sum.idle += share * (step[1] - step[0]) - seconds(all);
  }
  return sum;
}

}  // namespace shardlab::interop
