// Energy, clocks and throttling, from a table of NVML calls of the test's own.
#include <atomic>
#include <chrono>
#include <cstdio>
#include <thread>

#include "profiler/gpu/usage.h"
#include "tests/namespaces.h"
#include "tests/profiler_gpu/hand_made.h"
#include "tests/test.h"

namespace shardlab::testing::of_usage {

namespace {

/// What the fake device tells. NVML's calls have no user data, so there is one.
struct FakeGpu {
  int init = 0, shutdowns = 0;
  unsigned long long energy_mj = 5'000'000, reasons = 0;
  unsigned sm_mhz = 1980, power_mw = 650'000, celsius = 55;
  int energy_result = 0;
};
FakeGpu gpu;
std::atomic<int> energy_reads{0};

NvmlCalls fake_calls() {
  gpu = {};
  using Device = NvmlCalls::Device;
  NvmlCalls c;
  c.init = [] { return gpu.init; };
  c.shutdown = [] { return ++gpu.shutdowns, 0; };
  c.error_string = [](int) { return "Words"; };
  c.device_count = [](unsigned* n) { return *n = 1, 0; };
  c.device_by_index = [](unsigned i, Device* d) { return *d = &gpu, i == 0 ? 0 : 2; };
  c.device_by_pci_bus_id = [](const char* id, Device* d) { return *d = &gpu, std::string(id) == "0000:17:00.0" ? 0 : 6; };
  c.name = [](Device, char* name, unsigned bytes) { return std::snprintf(name, bytes, "NVIDIA Fake"), 0; };
  c.total_energy = [](Device, unsigned long long* mj) { return *mj = gpu.energy_mj, ++energy_reads, gpu.energy_result; };
  c.clock = [](Device, int type, unsigned* mhz) { return *mhz = type == 1 ? gpu.sm_mhz : 2619, 0; };
  c.max_clock = [](Device, int, unsigned* mhz) { return *mhz = 1980, 0; };
  c.throttle_reasons = [](Device, unsigned long long* bits) { return *bits = gpu.reasons, 0; };
  c.power = [](Device, unsigned* mw) { return *mw = gpu.power_mw, 0; };
  c.power_limit = [](Device, unsigned* mw) { return *mw = 700'000, 0; };
  c.memory = [](Device, NvmlCalls::Memory* m) { return *m = {1000, 400, 600}, gpu.energy_result; };
  c.temperature = [](Device, int, unsigned* t) { return *t = gpu.celsius, 0; };
  return c;
}

}  // namespace

TEST_CASE("NVML's states have a message and a remedy", "[profiler_gpu]") {
  const std::pair<int, LibraryState> rows[] = {
      {9, LibraryState::kNoDriver}, {4, LibraryState::kNoPrivilege}, {18, LibraryState::kFailed}, {999, LibraryState::kFailed}};
  for (const auto& [code, state] : rows) {
    const NvmlCalls calls = fake_calls();
    gpu.init = code;
    LibraryStatus status;
    CHECK(Nvml::open_on(calls, status) == nullptr);
    CHECK(status.state == state);
    CHECK(contains(status.message, "nvmlInit says Words ("));
    CHECK_FALSE(status.remedy.empty());
    CHECK(gpu.shutdowns == 0);
  }
  LibraryStatus status;
  CHECK(Nvml::open_on({}, status) == nullptr);
  CHECK(status.state == LibraryState::kAbsent);
  const auto nvml = Nvml::open_on(fake_calls(), status);
  REQUIRE(nvml != nullptr);
  CHECK(status.ok());
  CHECK(status.message == "1 device");
}

TEST_CASE("devices are found by bus id, as CUDA names them", "[profiler_gpu]") {
  LibraryStatus status;
  auto nvml = Nvml::open_on(fake_calls(), status);
  REQUIRE(nvml->device("0000:17:00.0").ok());
  CHECK(nvml->device("0000:17:00.0")->facts().name == "NVIDIA Fake");
  CHECK(nvml->device(0u)->facts().power_limit_w == Approx(700));
  CHECK(contains(to_string(nvml->device("0000:18:00.0").error()), "NVML has no device at 0000:18:00.0: Words (6)"));
  CHECK(nvml->device(1u).error().code == ExitCode::kEnvironment);
  nvml.reset();
  CHECK(gpu.shutdowns == 1);
}

TEST_CASE("a run's energy is the difference of the counter, its clocks and throttling a summary", "[profiler_gpu]") {
  LibraryStatus status;
  const auto nvml = Nvml::open_on(fake_calls(), status);
  const auto device = nvml->device(0u);
  SetClock clock;
  clock.time = 50;
  UsageSampler sampler(*device, clock, 0);
  for (int i = 1; i <= 3; ++i) {
    clock.time += 1;
    gpu.energy_mj += 600'000;
    gpu.sm_mhz = 1980 - 100 * static_cast<unsigned>(i);
    gpu.reasons = i >= 2 ? 0x4 | 0x1 : 0x0;
    sampler.sample();
  }
  clock.time += 1;
  gpu.energy_mj += 600'000;
  gpu.power_mw = 700'000;
  const DeviceUsage usage = sampler.stop();
  CHECK(usage.samples == 5);
  CHECK(usage.seconds == 4);
  CHECK(usage.energy_j.value() == Approx(2400));
  CHECK(usage.energy_error_j.value() == Approx(60));  // 0.1 s at 600 W
  CHECK(usage.sm_clock_mhz->low == 1680);
  CHECK(usage.sm_clock_mhz->median == 1780);
  CHECK(usage.sm_clock_mhz->high == 1980);
  CHECK(usage.power_w->high == 700);
  CHECK(usage.memory_clock_mhz->median == 2619);
  CHECK(usage.temperature_c->high == 55);
  REQUIRE(usage.throttled.size() == 1);  // idle does not slow anything
  CHECK(usage.throttled[0].reason == "power cap");
  CHECK(usage.throttled[0].share == Approx(0.6));
  REQUIRE(usage.warnings().size() == 1);
  CHECK(usage.warnings()[0] == "power cap in 60 % of 5 samples: the clock was 1780 (median) of 1980 MHz");
}

TEST_CASE("energy that the counter cannot tell is missing, not zero", "[profiler_gpu]") {
  LibraryStatus status;
  const auto nvml = Nvml::open_on(fake_calls(), status);
  const auto device = nvml->device(0u);
  SetClock clock;
  const auto run = [&](long long change, double seconds) {
    UsageSampler sampler(*device, clock, 0);
    gpu.energy_mj += static_cast<unsigned long long>(change);
    clock.time += seconds;
    return sampler.stop();
  };
  CHECK_FALSE(run(0, 5).energy_j);      // stood still
  CHECK_FALSE(run(-1000, 5).energy_j);  // the driver was loaded again
  gpu.energy_result = 3;                // not supported
  CHECK_FALSE(run(1000, 5).energy_j);
  gpu.energy_result = 0;
  const DeviceUsage brief = run(100'000, 0.2);
  CHECK(brief.energy_j.value() == Approx(100));
  REQUIRE(brief.warnings().size() == 1);
  CHECK(brief.warnings()[0] == "the energy of 0.20 s may be off by 50 %: measure more steps");
  CHECK_FALSE(summarise({}, {}).energy_j);
}

TEST_CASE("a device that tells nothing yields an empty summary", "[profiler_gpu]") {
  NvmlCalls calls = fake_calls();
  calls.total_energy = nullptr;
  calls.clock = nullptr;
  calls.throttle_reasons = nullptr;
  calls.power = nullptr;
  calls.temperature = nullptr;
  LibraryStatus status;
  const auto nvml = Nvml::open_on(calls, status);
  SetClock clock;
  const DeviceUsage usage = UsageSampler(*nvml->device(0u), clock, 0).stop();
  CHECK(usage.samples == 2);
  CHECK_FALSE(usage.energy_j);
  CHECK_FALSE(usage.sm_clock_mhz);
  CHECK(usage.throttled.empty());
  CHECK(usage.warnings().empty());
}

TEST_CASE("the sampler's thread reads on its own and ends with it", "[profiler_gpu]") {
  LibraryStatus status;
  const auto nvml = Nvml::open_on(fake_calls(), status);
  struct Steady final : Clock {
    double now() const override {
      return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
    }
  } clock;
  UsageSampler sampler(*nvml->device(0u), clock, 1e-3);
  const int before = energy_reads;
  while (energy_reads < before + 4) std::this_thread::yield();
  CHECK(sampler.stop().samples >= 5);
  { const UsageSampler unstopped(*nvml->device(0u), clock, 1e-3); }
}

TEST_CASE("memory in use is what NVML tells, or not known", "[profiler_gpu]") {
  NvmlCalls calls = fake_calls();
  LibraryStatus status;
  const auto nvml = Nvml::open_on(calls, status);
  CHECK(nvml->device(0u)->used_bytes() == 600);
  gpu.energy_result = 3;  // not supported
  CHECK_FALSE(nvml->device(0u)->used_bytes());
  calls = fake_calls();
  calls.memory = nullptr;
  const auto older = Nvml::open_on(calls, status);
  CHECK_FALSE(older->device(0u)->used_bytes());
}

TEST_CASE("the reasons for throttling are one bit each", "[profiler_gpu]") {
  uint64_t all = 0;
  for (const ThrottleReason& reason : throttle_reasons()) {
    CHECK((all & reason.bit) == 0);
    all |= reason.bit;
  }
  CHECK(all == 0x1ff);
}

}  // namespace shardlab::testing::of_usage
