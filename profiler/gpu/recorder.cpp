#include "profiler/gpu/recorder.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cmath>
#include <iterator>
#include <limits>
#include <mutex>
#include <optional>
#include <set>
#include <utility>

#include "profiler/gpu/assemble.h"
#include "profiler/gpu/clock.h"
#include "profiler/gpu/gpu_recorder.h"

namespace shardlab::profiler {

namespace {

class SteadyClock final : public Clock {
 public:
  double now() const override { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }
};

class Recording final : public GpuRecorder {
 public:
  Recording(int world_size, const GpuRecorderOptions& options, OpenedSource opened)
      : world_size_(world_size),
        clock_(options.clock != nullptr ? *options.clock : steady_),
        source_(std::move(opened.source)),
        status_(std::move(opened.status)),
        lanes_(static_cast<size_t>(world_size)) {
    if (source_) first_pairs_ = pairs();
  }

  DeviceTimeSource source() const override { return source_ ? DeviceTimeSource::kCupti : DeviceTimeSource::kEvents; }
  const LibraryStatus& status() const override { return status_; }
  bool wants_events() const override { return source_ == nullptr; }
  const ActivityLog* log() const override { return log_ ? &*log_ : nullptr; }

  void set_on(bool on) override {
    if (on == on_) return;
    if (source_) source_->set_on(on);
    on_ = on;
  }

  // ---- the host's side

  void record(const TraceEvent& event) override {
    if (!on_ || event.sent_bytes == 0 || event.kind != TraceEvent::Kind::kOp) return;
    Lane& lane = lane_of(event.rank);
    const std::lock_guard lock(lane.mutex);
    lane.sent.push_back({{event.step, event.rank, event.instruction}, event.sent_bytes});
  }

  void record_step(int32_t number, int32_t rank, double begin, double end) override {
    if (!on_) return;
    const std::lock_guard lock(steps_mutex_);
    step_of(number).interval[static_cast<size_t>(rank)] = {begin, end};
  }

  // ---- the device's side

  void begin_step(int32_t number, double now, double error_s) override {
    if (!on_) return;
    const std::lock_guard lock(steps_mutex_);
    HostSide::Step& step = step_of(number);
    step.begin = now;
    step.reference_error_s = error_s;
  }

  void begin_op(const OpKey& op, double now) override {
    if (!on_) return;
    if (source_) source_->push(op_id(op));
    Lane& lane = lane_of(op.rank);
    const std::lock_guard lock(lane.mutex);
    lane.launches.push_back({op, now});
  }

  void end_op(const OpKey&) override {
    if (on_ && source_) source_->pop();
  }

  void begin_aside(const OpKey& op) override {
    if (on_ && source_) source_->push(op_id(op));
  }

  void op_carried(const OpKey& op, const OpKey& by, double now) override {
    if (!on_) return;
    Lane& lane = lane_of(op.rank);
    const std::lock_guard lock(lane.mutex);
    lane.carried.push_back({op, by, now});
  }

  void op_timed(const OpKey& op, double begin_ms, double end_ms) override {
    if (!on_) return;
    Lane& lane = lane_of(op.rank);
    const std::lock_guard lock(lane.mutex);
    lane.timed.push_back({op, 1e-3 * begin_ms, 1e-3 * end_ms});  // after the step's begin, which `take` adds
  }

  Trace take(const Plan& plan, const std::vector<Program>& programs) override {
    const double overhead = overhead_of_an_op();
    HostSide host = take_host_side();
    Trace trace;
    if (source_) {
      log_ = source_->drain();
      const std::vector<ClockPair> last = pairs();
      const ClockAlignment alignment(first_pairs_, last);
      first_pairs_ = last;
      Correlated correlated = correlate(plan, programs, host, *log_, alignment);
      std::ranges::copy(timed_, std::back_inserter(correlated.ops));  // what the host did itself
      trace = assemble(plan, programs, host, correlated.ops, std::move(correlated.accounting));
      trace.producer = "cupti";
      trace.detail_lanes = std::move(correlated.lanes);
      trace.detail_names = std::move(correlated.names);
      trace.details = std::move(correlated.details);
    } else {
      trace = assemble(plan, programs, host, timed_, events_accounting(host));
      trace.producer = "cuda-events";
    }
    trace.recorder_overhead_s = overhead;
    timed_.clear();
    return trace;
  }

 private:
  /// The records of one rank's threads. They meet seldom: a lock is cheap.
  struct alignas(64) Lane {
    std::mutex mutex;
    std::vector<HostSide::Launch> launches;
    std::vector<HostSide::Carried> carried;
    std::vector<HostSide::Sent> sent;
    std::vector<OpInterval> timed;
  };
  Lane& lane_of(int rank) {
    SHARDLAB_CHECK(rank >= 0 && rank < world_size_, "the recorder of {} ranks was given rank {}", world_size_, rank);
    return lanes_[static_cast<size_t>(rank)];
  }

  std::vector<ClockPair> pairs() {
    return read_clock_pairs(clock_, [this] { return source_->now_ns(); });
  }

  /// With `steps_mutex_` held. Steps come in ascending order.
  HostSide::Step& step_of(int32_t number) {
    const auto found = std::ranges::lower_bound(steps_, number, {}, &HostSide::Step::number);
    if (found != steps_.end() && found->number == number) return *found;
    HostSide::Step fresh;
    fresh.number = number;
    fresh.begin = std::numeric_limits<double>::quiet_NaN();
    fresh.interval.resize(static_cast<size_t>(world_size_));
    return *steps_.insert(found, std::move(fresh));
  }

  HostSide take_host_side() {
    HostSide host;
    host.world_size = world_size_;
    host.steps = std::exchange(steps_, {});
    for (const HostSide::Step& step : host.steps)
      SHARDLAB_CHECK(!std::isnan(step.begin), "step {} was recorded but not begun: the back end calls DeviceTracer::begin_step",
                     step.number);
    const auto move_all = [](auto& from, auto& into) {
      into.insert(into.end(), from.begin(), from.end());
      from.clear();
    };
    for (Lane& lane : lanes_) {
      move_all(lane.launches, host.launches);
      move_all(lane.carried, host.carried);
      move_all(lane.sent, host.sent);
      for (OpInterval op : lane.timed) {
        const auto step = std::ranges::lower_bound(host.steps, op.op.step, {}, &HostSide::Step::number);
        if (step == host.steps.end() || step->number != op.op.step) continue;
        op.begin += step->begin;
        op.end += step->begin;
        timed_.push_back(op);
      }
      lane.timed.clear();
    }
    return host;
  }

  /// A pair of events counts as a record: what was begun must have been timed, what was timed begun.
  TraceAccounting events_accounting(const HostSide& host) const {
    // cudaEventElapsedTime resolves half a microsecond (its documentation).
    constexpr double kEventResolution = 0.5e-6;
    TraceAccounting a;
    a.clock = "CUDA events";
    for (const HostSide::Step& step : host.steps)
      a.clock_error_s = std::max(a.clock_error_s, step.reference_error_s + kEventResolution);
    std::set<OpKey> timed, begun;
    for (const OpInterval& op : timed_) timed.insert(op.op);
    for (const HostSide::Launch& launch : host.launches) {
      begun.insert(launch.op);
      ++a.launches;
      ++(timed.count(launch.op) != 0 ? a.recorded : a.lost);
    }
    for (const OpInterval& op : timed_) {
      ++a.device_records;
      ++(begun.count(op.op) != 0 ? a.timed : a.unclaimed);
    }
    return a;
  }

  /// Seconds that this recorder adds to the launch of an op: the median of batches, measured now. Nothing it does is kept.
  double overhead_of_an_op() {
    constexpr int kBatches = 9, kOps = 500;
    const bool was_on = on_.exchange(true);
    Lane& lane = lanes_[0];
    const size_t launches = lane.launches.size();
    std::array<double, kBatches> seconds{};
    for (double& batch : seconds) {
      const double begin = clock_.now();
      for (int i = 0; i < kOps; ++i) {
        const OpKey op{0, 0, i};
        begin_op(op, clock_.now());
        end_op(op);
      }
      batch = (clock_.now() - begin) / kOps;
      lane.launches.resize(launches);
    }
    on_ = was_on;
    std::ranges::sort(seconds);
    return seconds[kBatches / 2];
  }

  const int world_size_;
  const SteadyClock steady_;
  const Clock& clock_;
  const std::unique_ptr<ActivitySource> source_;
  const LibraryStatus status_;
  std::atomic<bool> on_ = false;
  std::vector<ClockPair> first_pairs_;
  std::mutex steps_mutex_;
  std::vector<HostSide::Step> steps_;
  std::vector<Lane> lanes_;
  std::vector<OpInterval> timed_;
  std::optional<ActivityLog> log_;
};

}  // namespace

std::unique_ptr<GpuRecorder> make_gpu_recorder(int world_size, const GpuRecorderOptions& options, OpenedSource opened) {
  return std::make_unique<Recording>(world_size, options, std::move(opened));
}

std::unique_ptr<GpuRecorder> GpuRecorder::create(int world_size, const GpuRecorderOptions& options) {
  if (options.source == DeviceTimeSource::kEvents)
    return make_gpu_recorder(world_size, options, {nullptr, {LibraryState::kOk, "CUDA events, as asked for", ""}});
  return make_gpu_recorder(world_size, options, open_cupti(options.max_records));
}

LibraryStatus cupti_status() { return open_cupti(0).status; }

}  // namespace shardlab::profiler
