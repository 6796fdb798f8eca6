// Finds the op of every record of a device, and counts what has none.
#include <cxxabi.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <memory>
#include <tuple>
#include <unordered_map>
#include <unordered_set>

#include "profiler/gpu/assemble.h"

namespace shardlab::profiler {

namespace {

std::string demangled(const std::string& name) {
  int status = 0;
  const std::unique_ptr<char, decltype(&std::free)> text(abi::__cxa_demangle(name.c_str(), nullptr, nullptr, &status), &std::free);
  return status == 0 && text ? std::string(text.get()) : name;
}

class Correlation {
 public:
  Correlation(const Plan& plan, const std::vector<Program>& programs, const HostSide& host, const ActivityLog& log,
              const ClockAlignment& clock)
      : plan_(plan), programs_(programs), host_(host), log_(log), clock_(clock) {
    for (const ExternalLink& link : log.links) op_of_[link.correlation] = link.id;
    for (const HostSide::Step& step : host.steps) {
      double end = 0;
      for (const auto& interval : step.interval) end = std::max(end, interval[1]);
      ends_.push_back(step.begin + end);
    }
  }

  Correlated run() {
    TraceAccounting& a = out_.accounting;
    a.clock = "CUPTI";
    a.clock_error_s = clock_.error_s();
    a.dropped = log_.dropped;
    a.unreadable = log_.unreadable;
    count_launches();
    for (const DeviceWork& work : log_.work) place(work);
    for (const auto& [op, hull] : hulls_) out_.ops.push_back({op, hull[0], hull[1]});
    for (const SynchronisationRecord& s : log_.synchronisations) add_beside(s.begin_ns, s.end_ns, s.name, "synchronisation");
    for (const OverheadRecord& o : log_.overheads) add_beside(o.begin_ns, o.end_ns, o.name, "overhead of tracing and driver");
    out_.lanes = lanes_.all();
    out_.names = names_.all();
    return std::move(out_);
  }

 private:
  /// The kept step in which something began at `begin` of the session's clock, -1 before the first. The clock's error is granted.
  int step_of(double begin) const {
    const auto next = std::ranges::upper_bound(host_.steps, begin + clock_.error_s(), {}, &HostSide::Step::begin);
    return static_cast<int>(next - host_.steps.begin()) - 1;
  }
  /// The same, -1 too where [begin, end] does not lie within the step as the host saw it.
  int step_within(double begin, double end) const {
    const int step = step_of(begin);
    return step >= 0 && end <= ends_[static_cast<size_t>(step)] + clock_.error_s() ? step : -1;
  }

  /// The key of a record's op; none where no id was pushed or the plan has no such op.
  const OpKey* op_of(const DeviceWork& work) {
    const auto found = op_of_.find(work.correlation);
    if (found == op_of_.end()) return nullptr;
    key_ = op_key(found->second);
    if (key_.rank < 0 || key_.rank >= plan_.mesh.world_size()) return nullptr;
    const auto role = static_cast<size_t>(plan_.mesh.role_of(key_.rank));
    return static_cast<size_t>(key_.instruction) < programs_[role].instructions.size() ? &key_ : nullptr;
  }

  void place(const DeviceWork& work) {
    TraceAccounting& a = out_.accounting;
    ++a.device_records;
    if (!work.has_times()) {
      ++a.zero_timestamp;
      return;
    }
    const double begin = clock_.seconds(work.begin_ns), end = clock_.seconds(work.end_ns);
    const OpKey* op = op_of(work);
    const int step = op != nullptr ? step_of(begin) : step_within(begin, end);
    if (step < 0 || (op != nullptr && op->step != host_.steps[static_cast<size_t>(step)].number)) {
      ++a.out_of_range;
      return;
    }
    if (op != nullptr) {
      ++a.timed;
      auto& hull = hulls_.try_emplace(*op, std::array<double, 2>{begin, end}).first->second;
      hull = {std::min(hull[0], begin), std::max(hull[1], end)};
    } else {
      ++a.unclaimed;
    }
    TraceDetail detail;
    if (op != nullptr) detail.rank = op->rank, detail.instruction = op->instruction;
    add_detail(detail, step, begin, end, work.name, fmt::format("gpu {} stream {}", work.device, work.stream));
    out_.details.back().bytes = work.bytes;
  }

  void add_beside(int64_t begin_ns, int64_t end_ns, int32_t name, const char* lane) {
    const double begin = clock_.seconds(begin_ns), end = clock_.seconds(end_ns);
    const int step = step_within(begin, end);
    if (step >= 0) add_detail({}, step, begin, end, name, lane);
  }

  void add_detail(TraceDetail detail, int step, double begin, double end, int32_t name, const std::string& lane) {
    const double origin = host_.steps[static_cast<size_t>(step)].begin;
    detail.step = step;
    detail.lane = lanes_.number(lane);
    const auto [known, fresh] = shown_.try_emplace(name, 0);
    if (fresh) known->second = names_.number(demangled(log_.names.text(name)));
    detail.name = known->second;
    detail.begin = begin - origin;
    detail.end = end - origin;
    out_.details.push_back(detail);
  }

  void count_launches() {
    struct Launch {
      const HostCall* call;
      bool runtime;  // of the CUDA runtime, not of the driver
    };
    std::unordered_set<uint32_t> recorded;
    for (const DeviceWork& work : log_.work) recorded.insert(work.correlation);
    std::vector<Launch> launches;
    for (const HostCall& call : log_.calls)
      if (const std::string& name = log_.names.text(call.name); hands_work_over(name))
        launches.push_back({&call, name.starts_with("cuda")});
    std::ranges::stable_sort(
        launches, {}, [](const Launch& l) { return std::tuple(l.call->thread, l.call->begin_ns, -l.call->end_ns, !l.runtime); });
    for (size_t first = 0; first < launches.size();) {
      const Launch& outer = launches[first];
      bool found = recorded.count(outer.call->correlation) != 0;
      size_t i = first + 1;
      const auto within = [&](const Launch& l) {
        return outer.runtime && !l.runtime && l.call->thread == outer.call->thread && l.call->end_ns <= outer.call->end_ns;
      };
      for (; i < launches.size() && within(launches[i]); ++i) found = found || recorded.count(launches[i].call->correlation) != 0;
      ++out_.accounting.launches;
      ++(found ? out_.accounting.recorded : out_.accounting.lost);
      first = i;
    }
  }

  const Plan& plan_;
  const std::vector<Program>& programs_;
  const HostSide& host_;
  const ActivityLog& log_;
  const ClockAlignment& clock_;
  std::unordered_map<uint32_t, uint64_t> op_of_;  ///< by correlation
  std::vector<double> ends_;                      ///< of the steps, over ranks
  std::map<OpKey, std::array<double, 2>> hulls_;
  std::unordered_map<int32_t, int32_t> shown_;  ///< number in `names_` by number in the log
  NameTable lanes_, names_;
  OpKey key_;
  Correlated out_;
};

}  // namespace

Correlated correlate(const Plan& plan, const std::vector<Program>& programs, const HostSide& host, const ActivityLog& log,
                     const ClockAlignment& clock) {
  return Correlation(plan, programs, host, log, clock).run();
}

}  // namespace shardlab::profiler
