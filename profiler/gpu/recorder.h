// Records what a GPU did, op by op: the measured trace of a CUDA run. One type for the records of CUPTI and for pairs
// of CUDA events.
//
//   auto recorder = GpuRecorder::create(placed.plan->mesh.world_size(), {});   // before CUDA is first used
//   RunOptions options{.recorder = recorder.get(), ...};                        // the host's side: launches, step intervals
//   backend options{.tracer = recorder.get()};                                  // the device's side (plan/device_tracer.h)
//   recorder->set_on(true); ... steps ... ; synchronise the device;
//   Trace trace = recorder->take(plan, programs);
//   say(recorder->status());                                                    // which source, and why not the better one
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "plan/device_tracer.h"
#include "plan/interfaces.h"
#include "plan/program.h"
#include "plan/trace.h"
#include "profiler/gpu/library.h"

namespace shardlab::profiler {

struct ActivityLog;

/// The source of the times of device work.
enum class DeviceTimeSource : uint8_t {
  kBest,    ///< CUPTI where its state is ok, else CUDA events
  kCupti,   ///< the driver's activity records
  kEvents,  ///< pairs of CUDA events that the back end records
};

struct GpuRecorderOptions {
  DeviceTimeSource source = DeviceTimeSource::kBest;
  int64_t max_records = 20'000'000;  ///< device records kept; further ones are counted as dropped
  const Clock* clock = nullptr;      ///< the session's; none: this machine's monotonic clock
};

/// The recorder of a run on GPUs. It is the session's `Recorder` (host events give launch times, sent bytes and step
/// intervals) and the back end's `DeviceTracer`. Both sides may be called from any thread; `set_on` and `take` between steps,
/// with the device idle.
class GpuRecorder : public Recorder, public DeviceTracer {
 public:
  /// Never fails. If CUPTI cannot be used, `status` says why and the back end is asked for events. If kCupti is asked for and is
  /// not ok, the recorder's status is not ok, and the caller decides. CUPTI serves one recorder of a process at a time.
  static std::unique_ptr<GpuRecorder> create(int world_size, const GpuRecorderOptions& options);

  /// The source in use: kCupti or kEvents.
  virtual DeviceTimeSource source() const = 0;
  /// The status of CUPTI; ok if it is the source.
  virtual const LibraryStatus& status() const = 0;

  /// Nothing is kept and CUPTI's activity kinds are disabled while off: warm-up steps. Off at first.
  virtual void set_on(bool on) = 0;

  /// The trace of the kept steps, `Trace::accounting` filled in; empties the recorder. An op's interval is the hull of its device
  /// work; waits are derived from the plan's edges. Throws WorldError if CUPTI fails to hand over its records.
  virtual Trace take(const Plan& plan, const std::vector<Program>& programs) = 0;

  /// The records that the last `take` was made from, to be kept or looked into (profiler/gpu/activity.h); null with CUDA events.
  virtual const ActivityLog* log() const = 0;
};

/// The abilities of CUPTI here, tried out: libraries, driver, version, subscription, rights. Leaves nothing enabled. For `doctor`.
LibraryStatus cupti_status();

}  // namespace shardlab::profiler
