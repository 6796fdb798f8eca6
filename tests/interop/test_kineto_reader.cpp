// Traces of PyTorch's profiler read as seconds by class, and ours held to the same reading.
#include <nlohmann/json.hpp>

#include "interop/kineto.h"
#include "interop/kineto_reader.h"
#include "tests/interop/traces.h"
#include "tests/test.h"

namespace shardlab::testing {
namespace {

using interop::KernelClass;
using interop::parse_kineto;

/// As PyTorch 2 writes it: microseconds with fractions, host events between, one device.
constexpr const char* kProfile = R"profile({
  "schemaVersion": 1,
  "deviceProperties": [{"id": 0, "name": "NVIDIA H100"}],
  "distributedInfo": {"backend": "nccl", "rank": 3, "world_size": 8},
  "traceEvents": [
    {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 0.5, "dur": 900.0,
     "args": {"External id": 1}},
    {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#1", "pid": 1, "tid": 1, "ts": 0, "dur": 50},
    {"ph": "X", "cat": "gpu_user_annotation", "name": "ProfilerStep#1", "pid": 0, "tid": 7, "ts": 100.0, "dur": 100.0},
    {"ph": "X", "cat": "gpu_user_annotation", "name": "ProfilerStep#2", "pid": 0, "tid": 7, "ts": 200.0, "dur": 100.0},
    {"ph": "X", "cat": "kernel", "name": "sm90_xmma_gemm_bf16bf16", "pid": 0, "tid": 7, "ts": 110.0, "dur": 40.0,
     "args": {"device": 0, "stream": 7}},
    {"ph": "X", "cat": "kernel", "name": "void at::native::elementwise_kernel<4>(int)", "pid": 0, "tid": 7, "ts": 150.0, "dur": 10.5,
     "args": {"device": 0, "stream": 7}},
    {"ph": "X", "cat": "kernel", "name": "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevComm*)", "pid": 0, "tid": 20,
     "ts": 130.0, "dur": 50.0, "args": {"device": 0, "stream": 20, "Collective name": "allreduce"}},
    {"ph": "X", "cat": "kernel", "name": "ncclDevKernel_SendRecv(ncclDevComm*)", "pid": 0, "tid": 24, "ts": 190.0, "dur": 20.0,
     "args": {"device": 0, "stream": 24}},
    {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy DtoH (Device -> Pinned)", "pid": 0, "tid": 7, "ts": 250.0, "dur": 10.0,
     "args": {"device": 0, "stream": 7}},
    {"ph": "X", "cat": "gpu_memset", "name": "Memset (Device)", "pid": 0, "tid": 7, "ts": 265.0, "dur": 5.0,
     "args": {"device": 0, "stream": 7}},
    {"ph": "f", "id": 1, "cat": "ac2g", "name": "ac2g", "pid": 0, "tid": 7, "ts": 110.0, "bp": "e"},
    {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "ts": 0, "args": {"name": "python"}}
  ]
})profile";

double of(const interop::BusySeconds& busy, KernelClass c) { return busy.by_class[static_cast<size_t>(c)]; }

TEST_CASE("a profile of PyTorch is its device's seconds a step, by class") {
  const auto records = parse_kineto(kProfile, "rank3.json");
  REQUIRE(records.ok());
  CHECK(records->rank == 3);
  CHECK(records->world_size == 8);
  CHECK(records->steps ==
        std::vector<std::array<double, 2>>{{0, 1e-6 * 100}, {1e-6 * 100, 1e-6 * 200}});  // the device's, not the host's
  CHECK(records->intervals.size() == 6);
  const interop::BusySeconds busy = interop::busy_seconds(*records);
  // Means of two steps.
  CHECK(busy.step == Approx(100e-6));
  CHECK(of(busy, KernelClass::kCompute) == Approx(0.5 * 50.5e-6));
  CHECK(of(busy, KernelClass::kAllReduce) == Approx(0.5 * 50e-6));
  CHECK(of(busy, KernelClass::kMessages) == Approx(0.5 * 20e-6));  // 10 us of each step
  CHECK(of(busy, KernelClass::kCopy) == Approx(0.5 * 15e-6));
  CHECK(busy.communication == Approx(0.5 * 70e-6));
  CHECK(busy.exposed == Approx(0.5 * (70 - 30.5) * 1e-6));
  CHECK(busy.idle == Approx(0.5 * ((100 - 70 - 10) + (100 - 10 - 15)) * 1e-6));
}

TEST_CASE("what is no profile of one device is refused in words") {
  const auto refused = [](const std::string& text) {
    const auto records = parse_kineto(text, "p.json");
    REQUIRE(!records.ok());
    CHECK(!records.error().hint.empty());
    return records.error().message;
  };
  CHECK(refused("{") == "p.json is no trace of PyTorch's profiler");
  CHECK(refused("[]") == "p.json is no trace of PyTorch's profiler");
  CHECK(refused(R"({"traceEvents": []})") == "p.json has no records of a device");
  CHECK(refused(R"({"traceEvents": [{"ph": "X", "cat": "kernel", "name": "a", "ts": 1}]})") ==
        "p.json has an event without a time");
  CHECK(refused(R"({"traceEvents": [{"ph": "X", "cat": "kernel", "name": "a", "ts": 1, "dur": 1, "args": {"device": 0}},
                                    {"ph": "X", "cat": "kernel", "name": "a", "ts": 1, "dur": 1, "args": {"device": 1}}]})") ==
        "p.json has records of 2 devices");
}

TEST_CASE("a trace of ours written for HolisticTraceAnalysis and read again has the seconds that it has itself") {
  for (const char* name : {"dp2-tp2-pp2-zero1-tied", "offload-activations", "context-parallel-zigzag"}) {
    const TracedPlan t = golden_trace(name);
    for (const int rank : interop::traced_ranks(t.trace)) {
      INFO(name << " rank " << rank);
      const auto read = parse_kineto(interop::to_kineto_json(t.plan, t.programs, t.trace, rank), "ours.json");
      REQUIRE(read.ok());
      CHECK(read->rank == rank);
      CHECK(read->world_size == t.trace.world_size);
      auto own = interop::records_of(t.plan, t.programs, t.trace, rank);
      own.steps = read->steps;  // there a step is as long as the longest rank's
      const interop::BusySeconds there = interop::busy_seconds(*read), here = interop::busy_seconds(own);
      // The file rounds to microseconds, which every time of these traces is.
      for (size_t c = 0; c < interop::kKernelClasses; ++c) CHECK(there.by_class[c] == Approx(here.by_class[c]).margin(1e-12));
      CHECK(there.exposed == Approx(here.exposed).margin(1e-12));
      CHECK(there.idle == Approx(here.idle).margin(1e-12));
      CHECK(of(there, KernelClass::kCompute) > 0);
    }
  }
}

}  // namespace
}  // namespace shardlab::testing
