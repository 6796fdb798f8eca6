// A device too small for the states: the model trains all the same, to the bits of the run that fits.
#include <algorithm>
#include <string>

#include "plan/memory.h"
#include "strategies/lower.h"
#include "tests/namespaces.h"
#include "tests/offload/cases.h"
#include "tests/test.h"

namespace shardlab::testing::of_budget {
namespace {

using namespace testing;

/// Twenty layers in 16 bits with fp32 copies and AdamW: 18 bytes a parameter.
Case deep_case() {
  Case c = small_case(Family::kGpt, 20);
  c.model.hidden = 64;
  c.model.head_dim = 16;
  c.model.ffn = 256;
  c.train.micro_batch = 1;
  c.train.precision = Precision::kBf16;
  return c;
}

/// Bytes of parameters, gradients, fp32 copies and moments on the device.
int64_t states_bytes(const Case& c) {
  const MemoryPeak peak = memory_peak(plan_of(c), 0)[static_cast<size_t>(Space::kDevice)];
  int64_t bytes = 0;
  for (const BufferClass cls : {BufferClass::kParameter, BufferClass::kGradient, BufferClass::kMaster, BufferClass::kMoment})
    bytes += peak.peak_by_class.bytes[static_cast<size_t>(cls)];
  return bytes;
}

int64_t device_arena(const Case& c) {
  int64_t bytes = 0;
  for (const ArenaLayout& a : place(plan_of(c)).arenas) bytes = std::max(bytes, a.bytes[static_cast<size_t>(Space::kDevice)]);
  return bytes;
}

/// `away`: how the case is laid out when something is outside the device; `times` its states are more than the device holds.
void require_times(
    int64_t times, Case c, const Offload& offload, void (*away)(Case&) = [](Case&) {}) {
  const Case roomy = c;
  c.machine.device.memory_bytes = states_bytes(c) / times;
  const LowerOptions held{.after = {}, .budget = true};
  const auto refused = lower(c, held);
  REQUIRE_FALSE(refused.ok());
  CHECK(refused.error().code == ExitCode::kNo);
  c.layout.offload = offload;
  away(c);
  REQUIRE(lower(c, held).ok());
  CHECK(device_arena(c) <= c.machine.device.memory_bytes);  // what is reserved, not only what is live
  require_same_bits(roomy, c);
  require_measured_as_planned(c);
}

}  // namespace

TEST_CASE("states of four times the device's memory: the optimizer on the host trains to the same bits") {
  require_times(4, deep_case(), {.optimizer = OffloadTo::kCpu});
  Case sliced = deep_case();
  set(sliced, {.dp = 2, .zero = 1});
  require_times(4, sliced, {.activations = OffloadTo::kCpu, .optimizer = OffloadTo::kCpu});
}

TEST_CASE("states of four times the device's memory: the optimizer's states on NVMe train to the same bits") {
  require_times(4, deep_case(), {.optimizer = OffloadTo::kNvme});
  Case sliced = deep_case();
  set(sliced, {.dp = 2, .zero = 1});
  require_times(4, sliced, {.activations = OffloadTo::kCpu, .optimizer = OffloadTo::kNvme});
}

TEST_CASE("states of ten times the device's memory, which not even the parameters fit: with those outside too, the same bits") {
  const auto streams = [](Case& c) { c.layout.zero = 3; };
  for (const OffloadTo where : {OffloadTo::kCpu, OffloadTo::kNvme}) {
    require_times(10, deep_case(), {.activations = where, .optimizer = where, .parameters = where}, streams);
    Case sliced = deep_case();
    set(sliced, {.dp = 2, .zero = 3});
    require_times(4, sliced, {.activations = where, .optimizer = where, .parameters = where});
  }
}

}  // namespace shardlab::testing::of_budget
