// CUPTI and NVML on a real device. Skipped visibly without one; needs the driver only, no toolkit: the kernel is PTX.
#include <array>
#include <chrono>
#include <cstdint>

#include "plan/text.h"
#include "profiler/gpu/activity.h"
#include "profiler/gpu/driver.h"
#include "profiler/gpu/recorder.h"
#include "profiler/gpu/usage.h"
#include "tests/namespaces.h"
#include "tests/test.h"

namespace shardlab::testing {

namespace {

constexpr const char* kPtx = R"(
.version 7.0
.target sm_75
.address_size 64
.visible .entry touch(.param .u64 target)
{
  .reg .b32 %r<2>;
  .reg .b64 %rd<3>;
  ld.param.u64 %rd1, [target];
  cvta.to.global.u64 %rd2, %rd1;
  mov.u32 %r1, 7;
  st.global.u32 [%rd2], %r1;
  ret;
}
)";

constexpr const char* kPlan = R"(shardlab plan 1
name device
mesh dp=1
streams compute
segment s
  bound %x activation f32[16]
  copy fill (%x) -> (%x)
  copy touch (%x) -> (%x)
  copy fetch (%x) -> (%x)
role 0
  %x activation f32[16] persistent
  call s (x=%x)
)";

class SteadyClock final : public Clock {
 public:
  double now() const override { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }
};

/// A buffer, a stream and a kernel of the first device, through the driver's own calls.
class Device {
 public:
  Device() : library_(std::array{"libcuda.so.1"}) {
    int device = 0;
    void *context = nullptr, *module = nullptr;
    call("cuInit", 0u);
    call("cuDeviceGet", &device, 0);
    call("cuDevicePrimaryCtxRetain", &context, device);
    call("cuCtxSetCurrent", context);
    call("cuStreamCreate", &stream_, 0u);
    call("cuModuleLoadData", &module, static_cast<const void*>(kPtx));
    call("cuModuleGetFunction", &kernel_, module, static_cast<const char*>("touch"));
    call("cuMemAlloc_v2", &memory_, kBytes);
  }
  void fill() { call("cuMemsetD32Async", memory_, 1u, kBytes / 4, stream_); }
  void touch() {
    void* arguments[] = {&memory_};
    call("cuLaunchKernel", kernel_, 1u, 1u, 1u, 1u, 1u, 1u, 0u, stream_, static_cast<void**>(arguments),
         static_cast<void**>(nullptr));
  }
  void fetch() { call("cuMemcpyDtoHAsync_v2", static_cast<void*>(&fetched_), memory_, sizeof fetched_, stream_); }
  void synchronise() { call("cuStreamSynchronize", stream_); }
  uint32_t fetched() const { return fetched_; }
  /// Another allocation, given back.
  void allocate_and_free(size_t bytes) {
    unsigned long long memory = 0;
    call("cuMemAlloc_v2", &memory, bytes);
    call("cuMemFree_v2", memory);
  }

 private:
  template <class... Arguments>
  void call(const char* name, Arguments... arguments) {
    int (*function)(Arguments...) = nullptr;
    INFO(name);
    REQUIRE(library_.find(name, function));
    REQUIRE(function(arguments...) == 0);
  }

  static constexpr size_t kBytes = size_t{256} << 20;
  SharedLibrary library_;
  void *stream_ = nullptr, *kernel_ = nullptr;
  unsigned long long memory_ = 0;
  uint32_t fetched_ = 0;
};

/// Whether there is a device; says what is missing otherwise.
bool have_device() {
  const LibraryStatus status = driver_status(load_driver());
  if (!status.ok()) WARN("skipped: " << status.message);
  return status.ok();
}

}  // namespace

TEST_CASE("a real device's records account for every launch and keep to the host's clock", "[gpu]") {
  if (!have_device()) return;
  const LibraryStatus status = cupti_status();
  if (!status.ok()) {
    WARN("skipped: CUPTI is " << name_of(status.state) << ": " << status.message);
    return;
  }
  const auto parsed = parse_plan(kPlan);
  REQUIRE(parsed.ok());
  const std::vector<Program> programs{expand_program(*parsed, 0)};
  const SteadyClock clock;
  const auto recorder = GpuRecorder::create(1, {.source = DeviceTimeSource::kCupti, .clock = &clock});
  INFO(recorder->status().message);
  REQUIRE(recorder->source() == DeviceTimeSource::kCupti);
  Device device;
  constexpr int kWarmup = 2, kSteps = 50;
  struct Host {
    double begin, launched[3], end;
  };
  std::vector<Host> host(kSteps);
  for (int step = 0; step < kWarmup + kSteps; ++step) {
    if (step == kWarmup) recorder->set_on(true);
    Host unkept{}, &h = step < kWarmup ? unkept : host[static_cast<size_t>(step - kWarmup)];
    h.begin = clock.now();
    recorder->begin_step(step, h.begin, 0);
    const auto op = [&](int i, auto&& work) {
      h.launched[i] = clock.now();
      recorder->begin_op({step, 0, i}, h.launched[i]);
      work();
      recorder->end_op({step, 0, i});
    };
    op(0, [&] { device.fill(); });
    op(1, [&] { device.touch(), device.touch(); });
    op(2, [&] { device.fetch(); });
    device.synchronise();
    h.end = clock.now();
    recorder->record_step(step, 0, 0, h.end - h.begin);
  }
  device.allocate_and_free(size_t{32} << 20);
  CHECK(device.fetched() == 7);
  recorder->set_on(false);

  const Trace trace = recorder->take(*parsed, programs);
  const TraceAccounting& a = trace.accounting;
  for (const std::string& sentence : unexplained(a)) UNSCOPED_INFO(sentence);
  CHECK(unexplained(a).empty());
  CHECK(a.launches == 4 * kSteps);
  CHECK(a.recorded == a.launches);
  CHECK(a.timed == 4 * kSteps);
  CHECK(a.ops == 3 * kSteps);
  CHECK(a.clock_error_s > 0);
  CHECK(a.clock_error_s < 1e-3);

  // Causality: nothing begins before its launch nor ends after the host saw it end. CUPTI's own placing of the device's clock is
  // granted a tenth of a millisecond.
  const double slack = a.clock_error_s + 1e-4;
  int ops = 0;
  for (const TraceEvent& e : trace.events) {
    if (e.kind != TraceEvent::Kind::kOp) continue;
    const Host& h = host[static_cast<size_t>(e.step)];
    CHECK(h.begin + e.begin > h.launched[e.instruction] - slack);
    CHECK(h.begin + e.end < h.end + slack);
    CHECK(e.end > e.begin);
    ++ops;
  }
  CHECK(ops == 3 * kSteps);
  const IdleBreakdown idle = idle_by_cause(*parsed, programs, trace, 0, kSteps / 2);
  CHECK(idle.host_s + idle.latency_s + idle.tail_s == Approx(idle.idle_s));

  REQUIRE(recorder->log() != nullptr);
  const auto peak = peak_allocated(recorder->log()->allocations);
  CHECK(peak[static_cast<size_t>(AllocationRecord::Space::kDevice)] >= (int64_t{256 + 32} << 20));
  WARN("clock error " << 1e9 * a.clock_error_s << " ns, " << 1e9 * trace.recorder_overhead_s
                      << " ns an op of ours, first kernel queued " << 1e6 * trace.events[1].queued << " us");
}

TEST_CASE("CUPTI can be taken and left any number of times", "[gpu]") {
  if (!have_device() || !cupti_status().ok()) return;
  for (int i = 0; i < 3; ++i) CHECK(cupti_status().ok());
}

TEST_CASE("a real device's energy grows while it works", "[gpu]") {
  if (!have_device()) return;
  LibraryStatus status;
  const auto nvml = Nvml::open(status);
  if (nvml == nullptr) {
    WARN("skipped: NVML is " << name_of(status.state) << ": " << status.message);
    return;
  }
  const auto found = nvml->device(0u);
  REQUIRE(found.ok());
  const SteadyClock clock;
  Device device;
  UsageSampler sampler(*found, clock, 0.05);
  for (const double begin = clock.now(); clock.now() < begin + 2; device.synchronise())
    for (int i = 0; i < 100; ++i) device.fill();
  const DeviceUsage usage = sampler.stop();
  CHECK_FALSE(usage.facts.name.empty());
  CHECK(usage.samples > 5);
  if (!usage.energy_j) {
    WARN("skipped: " << usage.facts.name << " has no energy counter");
    return;
  }
  CHECK(*usage.energy_j > 0);
  REQUIRE(usage.power_w);
  CHECK(*usage.energy_j / usage.seconds < 2 * usage.power_w->high);
  WARN(usage.facts.name << ": " << *usage.energy_j / usage.seconds << " W, clock " << usage.sm_clock_mhz->median << " MHz");
}

}  // namespace shardlab::testing
