// CUPTI's own records, in buffers made by hand, and its states. Built where the build machine has CUPTI's headers; no driver is
// needed.
#include "tests/test.h"

#ifndef SHARDLAB_HAS_CUPTI

#include "profiler/gpu/activity_source.h"

TEST_CASE("SKIPPED: this build was made without CUPTI's headers; its records are not decoded", "[profiler_gpu]") {
  const shardlab::profiler::OpenedSource opened = shardlab::profiler::open_cupti(1);
  CHECK(opened.source == nullptr);
  CHECK_FALSE(opened.status.ok());
  CHECK_FALSE(opened.status.remedy.empty());
  WARN("skipped: no CUPTI headers of CUDA 13 or later");
}

#else

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <set>
#include <utility>

#include "plan/base/world_error.h"
#include "plan/device_tracer.h"
#include "profiler/gpu/cupti_decode.h"
#include "profiler/gpu/cupti_source.h"
#include "profiler/gpu/driver.h"
#include "tests/profiler_gpu/hand_made.h"

namespace shardlab::testing::of_cupti {

namespace {

/// Records packed back to back, as CUPTI leaves them.
class Buffer {
 public:
  template <class Record>
  void add(const Record& record) {
    static_assert(sizeof(Record) % 8 == 0);
    const size_t at = bytes_.size();
    bytes_.resize(at + sizeof(Record));
    std::memcpy(bytes_.data() + at, &record, sizeof(Record));
  }
  size_t size() const { return bytes_.size(); }
  /// A copy that CUPTI could have asked for: freed by whoever completes it.
  uint8_t* allocated() const {
    auto* copy = static_cast<uint8_t*>(std::aligned_alloc(8, std::max<size_t>(8, bytes_.size())));
    std::copy(bytes_.begin(), bytes_.end(), copy);
    return copy;
  }

 private:
  std::vector<uint8_t> bytes_;
};

CUpti_ActivityKernel10 kernel(uint32_t correlation, uint64_t start, uint64_t end, const char* name) {
  CUpti_ActivityKernel10 r{};
  r.kind = CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL;
  r.start = start, r.end = end, r.correlationId = correlation, r.name = name;
  r.deviceId = 1, r.contextId = 2, r.streamId = 13;
  r.gridX = 4, r.gridY = 5, r.gridZ = 6, r.blockX = 128, r.blockY = 2, r.blockZ = 1;
  r.registersPerThread = 168, r.staticSharedMemory = 1024, r.dynamicSharedMemory = 4096;
  return r;
}

CUpti_ActivityAPI call(CUpti_ActivityKind kind, uint32_t cbid, uint32_t correlation, uint64_t start, uint64_t end) {
  CUpti_ActivityAPI r{};
  r.kind = kind, r.cbid = cbid, r.correlationId = correlation, r.start = start, r.end = end, r.threadId = 99;
  return r;
}

CUpti_ActivityExternalCorrelation link(uint32_t correlation, uint64_t id,
                                       CUpti_ExternalCorrelationKind kind = CUPTI_EXTERNAL_CORRELATION_KIND_CUSTOM0) {
  CUpti_ActivityExternalCorrelation r{};
  r.kind = CUPTI_ACTIVITY_KIND_EXTERNAL_CORRELATION, r.externalKind = kind, r.externalId = id, r.correlationId = correlation;
  return r;
}

/// One record of every kind that the recorder asks for, and one that it does not.
Buffer every_kind() {
  Buffer b;
  b.add(link(1, op_id({3, 0, 2})));
  b.add(link(1, 12345, CUPTI_EXTERNAL_CORRELATION_KIND_CUSTOM1));  // another library's
  b.add(call(CUPTI_ACTIVITY_KIND_RUNTIME, CUPTI_RUNTIME_TRACE_CBID_cudaLaunchKernel_v7000, 1, 100, 120));
  b.add(call(CUPTI_ACTIVITY_KIND_DRIVER, CUPTI_DRIVER_TRACE_CBID_cuLaunchKernelEx, 9, 101, 119));
  b.add(kernel(1, 1000, 2000, "_Z6kernelPf"));
  b.add(kernel(2, 0, 0, nullptr));
  CUpti_ActivityMemcpy6 copy{};
  copy.kind = CUPTI_ACTIVITY_KIND_MEMCPY, copy.copyKind = CUPTI_ACTIVITY_MEMCPY_KIND_DTOH, copy.bytes = 4096, copy.copyCount = 1;
  copy.start = 2000, copy.end = 2500, copy.correlationId = 3, copy.streamId = 14;
  b.add(copy);
  CUpti_ActivityMemcpyPtoP4 peer{};
  peer.kind = CUPTI_ACTIVITY_KIND_MEMCPY2, peer.copyKind = CUPTI_ACTIVITY_MEMCPY_KIND_PTOP, peer.bytes = 8192;
  peer.start = 2500, peer.end = 2600, peer.correlationId = 4;
  b.add(peer);
  CUpti_ActivityMemset4 fill{};
  fill.kind = CUPTI_ACTIVITY_KIND_MEMSET, fill.bytes = 64, fill.start = 2600, fill.end = 2610, fill.correlationId = 5;
  b.add(fill);
  CUpti_ActivityMemory4 memory{};
  memory.kind = CUPTI_ACTIVITY_KIND_MEMORY2, memory.memoryOperationType = CUPTI_ACTIVITY_MEMORY_OPERATION_TYPE_RELEASE;
  memory.memoryKind = CUPTI_ACTIVITY_MEMORY_KIND_PINNED, memory.address = 0x7f00'0000'0000, memory.bytes = 1 << 20,
  memory.timestamp = 2700;
  b.add(memory);
  CUpti_ActivitySynchronization2 wait{};
  wait.kind = CUPTI_ACTIVITY_KIND_SYNCHRONIZATION, wait.type = CUPTI_ACTIVITY_SYNCHRONIZATION_TYPE_CONTEXT_SYNCHRONIZE;
  wait.start = 2800, wait.end = 2900, wait.streamId = CUPTI_SYNCHRONIZATION_INVALID_VALUE;
  b.add(wait);
  CUpti_ActivityOverhead3 overhead{};
  overhead.kind = CUPTI_ACTIVITY_KIND_OVERHEAD, overhead.overheadKind = CUPTI_ACTIVITY_OVERHEAD_LAZY_FUNCTION_LOADING;
  overhead.start = 50, overhead.end = 90, overhead.overheadData = std::malloc(16);  // ours to free
  b.add(overhead);
  CUpti_ActivityContext3 context{};
  context.kind = CUPTI_ACTIVITY_KIND_CONTEXT;
  b.add(context);
  return b;
}

/// The library's calls where it is installed: its walk over buffers needs no driver.
std::optional<CuptiCalls> installed() {
  LoadedCupti loaded = load_cupti();
  if (loaded.status.ok()) return loaded.calls;
  WARN("skipped: " << loaded.status.message);
  return std::nullopt;
}

ActivityLog decode(const CuptiCalls& calls, const Buffer& buffer, size_t bytes, int64_t max_records = 1000) {
  ActivityLog log;
  uint8_t* copy = buffer.allocated();
  decode_cupti_buffer(calls, copy, bytes, max_records, log);
  std::memset(copy, 0xdb, buffer.size());  // whatever still points in there shows
  std::free(copy);
  return log;
}

}  // namespace

TEST_CASE("CUPTI's records of every kind come out as ours", "[profiler_gpu]") {
  const auto calls = installed();
  if (!calls) return;
  const Buffer buffer = every_kind();
  const ActivityLog log = decode(*calls, buffer, buffer.size());
  REQUIRE(log.work.size() == 5);
  const DeviceWork& k = log.work[0];
  CHECK(k.kind == DeviceWork::Kind::kKernel);
  CHECK(log.names.text(k.name) == "_Z6kernelPf");
  CHECK(k.begin_ns == 1000);
  CHECK(k.end_ns == 2000);
  CHECK(k.correlation == 1);
  CHECK(k.device == 1);
  CHECK(k.context == 2);
  CHECK(k.stream == 13);
  CHECK(k.grid == std::array<int32_t, 3>{4, 5, 6});
  CHECK(k.block == std::array<int32_t, 3>{128, 2, 1});
  CHECK(k.registers == 168);
  CHECK(k.shared_bytes == 5120);
  CHECK_FALSE(log.work[1].has_times());
  CHECK(log.names.text(log.work[1].name) == "kernel without a name");
  CHECK(log.work[2].kind == DeviceWork::Kind::kCopy);
  CHECK(log.names.text(log.work[2].name) == "copy device to host");
  CHECK(log.work[2].bytes == 4096);
  CHECK(log.names.text(log.work[3].name) == "copy peer to peer");
  CHECK(log.work[3].bytes == 8192);
  CHECK(log.work[4].kind == DeviceWork::Kind::kFill);
  CHECK(log.work[4].end_ns == 2610);
  REQUIRE(log.calls.size() == 2);
  CHECK(log.names.text(log.calls[0].name) == "cudaLaunchKernel_v7000");
  CHECK(log.names.text(log.calls[1].name) == "cuLaunchKernelEx");
  CHECK(log.calls[0].thread == 99);
  REQUIRE(log.links.size() == 1);
  CHECK(op_key(log.links[0].id) == OpKey{3, 0, 2});
  REQUIRE(log.allocations.size() == 1);
  CHECK(log.allocations[0].release);
  CHECK(log.allocations[0].space == AllocationRecord::Space::kPinned);
  CHECK(log.allocations[0].bytes == 1 << 20);
  REQUIRE(log.synchronisations.size() == 1);
  CHECK(log.names.text(log.synchronisations[0].name) == "context synchronize");
  CHECK(log.synchronisations[0].stream == SynchronisationRecord::kNoStream);
  REQUIRE(log.overheads.size() == 1);
  CHECK(log.names.text(log.overheads[0].name) == "lazy function loading");
  CHECK(log.unknown == 1);
  CHECK(log.dropped == 0);
  CHECK(log.unreadable == 0);
}

TEST_CASE("a buffer cut off within a record, or of rubbish, is counted and walked no further", "[profiler_gpu]") {
  const auto calls = installed();
  if (!calls) return;
  Buffer buffer;
  buffer.add(kernel(1, 10, 20, "a"));
  buffer.add(kernel(2, 20, 30, "b"));
  // CUPTI calls what is left of the second record the end of the buffer.
  CHECK(decode(*calls, buffer, sizeof(CUpti_ActivityKernel10) + 40).work.size() == 1);
  CuptiCalls refusing = *calls;
  refusing.get_next_record = [](uint8_t*, size_t, CUpti_Activity**) { return CUPTI_ERROR_INVALID_KIND; };
  CHECK(decode(refusing, buffer, buffer.size()).unreadable == 1);
  Buffer rubbish;
  rubbish.add(std::array<uint64_t, 8>{0xffff'ffff'ffff'ffff, 1, 2, 3, 4, 5, 6, 7});
  const ActivityLog none = decode(*calls, rubbish, rubbish.size());
  CHECK(none.records() == 0);
  CHECK(none.unreadable + none.unknown >= 1);
  CHECK(decode(*calls, buffer, 0).records() == 0);
}

TEST_CASE("records beyond the limit are dropped and counted", "[profiler_gpu]") {
  const auto calls = installed();
  if (!calls) return;
  Buffer buffer;
  for (uint32_t i = 0; i < 5; ++i) buffer.add(kernel(i + 1, 10, 20, "a"));
  const ActivityLog log = decode(*calls, buffer, buffer.size(), 2);
  CHECK(log.work.size() == 2);
  CHECK(log.dropped == 3);
}

// ---- the source, on calls of the test's own

namespace {

/// What the fake CUPTI was told and what it answers. CUPTI's calls have no user data, so there is one.
struct Fake {
  CUptiResult subscribe = CUPTI_SUCCESS, enable = CUPTI_SUCCESS, flush = CUPTI_SUCCESS;
  std::set<int> enabled;
  std::vector<uint64_t> pushed;
  int subscribed = 0, finalized = 0, finalized_in_callback = 0, unsubscribed = 0, flushes = 0;
  bool calls_back = true;  ///< does a callback come of cuCtxSynchronize?
  size_t dropped = 0;
  CUpti_CallbackFunc callback = nullptr;
  void* user = nullptr;
  CUpti_BuffersCallbackRequestFunc request = nullptr;
  CUpti_BuffersCallbackCompleteFunc complete = nullptr;
  std::vector<CUpti_ActivityKernel10> records;  ///< delivered by the next flush
  bool in_callback = false;
};
Fake fake;

/// Walks kernels only: what the real one does with them.
CUptiResult next_kernel(uint8_t* buffer, size_t bytes, CUpti_Activity** record) {
  uint8_t* next = *record == nullptr ? buffer : reinterpret_cast<uint8_t*>(*record) + sizeof(CUpti_ActivityKernel10);
  if (next + sizeof(CUpti_ActivityKernel10) > buffer + bytes) return CUPTI_ERROR_MAX_LIMIT_REACHED;
  *record = reinterpret_cast<CUpti_Activity*>(next);
  return CUPTI_SUCCESS;
}

CUptiResult flush(uint32_t) {
  ++fake.flushes;
  if (fake.flush != CUPTI_SUCCESS) return fake.flush;
  while (!fake.records.empty()) {
    uint8_t* buffer = nullptr;
    size_t bytes = 0, limit = 1;
    fake.request(&buffer, &bytes, &limit);
    REQUIRE(buffer != nullptr);
    REQUIRE(limit == 0);
    const size_t count = std::min(fake.records.size(), std::min<size_t>(bytes / sizeof(CUpti_ActivityKernel10), 3));
    std::memcpy(buffer, fake.records.data(), count * sizeof(CUpti_ActivityKernel10));
    fake.records.erase(fake.records.begin(), fake.records.begin() + static_cast<std::ptrdiff_t>(count));
    fake.complete(nullptr, 0, buffer, bytes, count * sizeof(CUpti_ActivityKernel10));
  }
  return CUPTI_SUCCESS;
}

CuptiCalls fake_calls() {
  fake = {};
  CuptiCalls c;
  c.get_version = [](uint32_t* v) { return *v = CUPTI_API_VERSION, CUPTI_SUCCESS; };
  c.get_timestamp = [](uint64_t* t) { return *t = 42, CUPTI_SUCCESS; };
  c.get_result_string = [](CUptiResult, const char** text) { return *text = "WORDS", CUPTI_SUCCESS; };
  c.get_callback_name = [](CUpti_CallbackDomain, uint32_t, const char** name) { return *name = "cudaLaunchKernel", CUPTI_SUCCESS; };
  c.subscribe = [](CUpti_SubscriberHandle*, CUpti_CallbackFunc callback, void* user) {
    if (fake.subscribe == CUPTI_SUCCESS) ++fake.subscribed, fake.callback = callback, fake.user = user;
    return fake.subscribe;
  };
  c.unsubscribe = [](CUpti_SubscriberHandle) { return ++fake.unsubscribed, CUPTI_SUCCESS; };
  c.enable_callback = [](uint32_t, CUpti_SubscriberHandle, CUpti_CallbackDomain, CUpti_CallbackId) { return CUPTI_SUCCESS; };
  c.register_callbacks = [](CUpti_BuffersCallbackRequestFunc request, CUpti_BuffersCallbackCompleteFunc complete) {
    return fake.request = request, fake.complete = complete, CUPTI_SUCCESS;
  };
  c.enable = [](CUpti_ActivityKind kind) {
    if (fake.enable == CUPTI_SUCCESS) fake.enabled.insert(kind);
    return fake.enable;
  };
  c.disable = [](CUpti_ActivityKind kind) { return fake.enabled.erase(kind), CUPTI_SUCCESS; };
  c.enable_runtime_api = [](CUpti_CallbackId, uint8_t) { return CUPTI_SUCCESS; };
  c.enable_driver_api = [](CUpti_CallbackId, uint8_t) { return CUPTI_SUCCESS; };
  c.flush_all = flush;
  c.get_next_record = next_kernel;
  c.get_dropped = [](CUcontext, uint32_t, size_t* n) { return *n = std::exchange(fake.dropped, 0), CUPTI_SUCCESS; };
  c.push = [](CUpti_ExternalCorrelationKind kind, uint64_t id) {
    REQUIRE(kind == CUPTI_EXTERNAL_CORRELATION_KIND_CUSTOM0);
    return fake.pushed.push_back(id), CUPTI_SUCCESS;
  };
  c.pop = [](CUpti_ExternalCorrelationKind, uint64_t* id) {
    return *id = fake.pushed.back(), fake.pushed.pop_back(), CUPTI_SUCCESS;
  };
  c.finalize = [] { return ++fake.finalized, fake.finalized_in_callback += fake.in_callback, CUPTI_SUCCESS; };
  c.context_synchronize = [] {
    if (!fake.calls_back) return 0;
    fake.in_callback = true;
    CUpti_CallbackData data{};
    for (const auto site : {CUPTI_API_ENTER, CUPTI_API_EXIT}) {
      data.callbackSite = site;
      fake.callback(fake.user, CUPTI_CB_DOMAIN_DRIVER_API, CUPTI_DRIVER_TRACE_CBID_cuCtxSynchronize, &data);
    }
    fake.in_callback = false;
    return 0;
  };
  return c;
}

}  // namespace

TEST_CASE("what CUPTI answers becomes a state with a remedy, and nothing is left behind", "[profiler_gpu]") {
  struct Row {
    CUptiResult subscribe, enable;
    LibraryState state;
    const char* remedy;
  };
  for (const Row& row :
       {Row{CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED, CUPTI_SUCCESS, LibraryState::kOtherSubscriber, "compute-sanitizer"},
        Row{CUPTI_ERROR_UNKNOWN, CUPTI_SUCCESS, LibraryState::kFailed, "nvidia-smi"},
        Row{CUPTI_SUCCESS, CUPTI_ERROR_INSUFFICIENT_PRIVILEGES, LibraryState::kNoPrivilege, "NVreg_RestrictProfilingToAdminUsers"},
        Row{CUPTI_SUCCESS, CUPTI_ERROR_VIRTUALIZED_DEVICE_INSUFFICIENT_PRIVILEGES, LibraryState::kNoPrivilege, "root"},
        Row{CUPTI_SUCCESS, CUPTI_ERROR_MIG_DEVICE_NOT_SUPPORTED, LibraryState::kUnsupported, "CUDA events"}}) {
    const CuptiCalls calls = fake_calls();
    fake.subscribe = row.subscribe;
    fake.enable = row.enable;
    const OpenedSource opened = open_cupti_on(calls, 100);
    CHECK(opened.source == nullptr);
    CHECK(opened.status.state == row.state);
    CHECK(contains(opened.status.message, "says WORDS"));
    CHECK(contains(opened.status.remedy, row.remedy));
    CHECK(fake.enabled.empty());
    CHECK(fake.finalized == fake.subscribed);
  }
}

TEST_CASE("the source records while on, hands over what was flushed, and takes itself away", "[profiler_gpu]") {
  for (const bool calls_back : {true, false}) {
    const CuptiCalls calls = fake_calls();
    fake.calls_back = calls_back;
    {
      const OpenedSource opened = open_cupti_on(calls, 100);
      REQUIRE(opened.status.ok());
      CHECK(contains(opened.status.message, "CUPTI 13."));
      CHECK(fake.enabled == std::set<int>{CUPTI_ACTIVITY_KIND_MEMORY2});  // from the beginning on
      opened.source->set_on(true);
      for (const int kind : {CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL, CUPTI_ACTIVITY_KIND_EXTERNAL_CORRELATION,
                             CUPTI_ACTIVITY_KIND_RUNTIME, CUPTI_ACTIVITY_KIND_DRIVER, CUPTI_ACTIVITY_KIND_OVERHEAD})
        CHECK(fake.enabled.count(kind) == 1);
      CHECK(fake.enabled.count(CUPTI_ACTIVITY_KIND_KERNEL) == 0);  // it would make kernels run one by one
      opened.source->push(7);
      CHECK(fake.pushed == std::vector<uint64_t>{7});
      opened.source->pop();
      CHECK(fake.pushed.empty());
      CHECK(opened.source->now_ns() == 42);

      const OpenedSource second = open_cupti_on(calls, 100);
      CHECK(second.source == nullptr);
      CHECK(second.status.state == LibraryState::kOtherSubscriber);

      for (uint32_t i = 1; i <= 7; ++i) fake.records.push_back(kernel(i, 10 * i, 10 * i + 5, "k"));
      fake.dropped = 4;
      const ActivityLog log = opened.source->drain();
      CHECK(log.work.size() == 7);
      CHECK(log.work[6].correlation == 7);
      CHECK(log.dropped == 4);
      CHECK(opened.source->drain().records() == 0);
      opened.source->set_on(false);
      CHECK(fake.enabled == std::set<int>{CUPTI_ACTIVITY_KIND_MEMORY2});

      fake.flush = CUPTI_ERROR_UNKNOWN;
      CHECK_THROWS_AS(opened.source->drain(), WorldError);
      fake.enable = CUPTI_ERROR_INSUFFICIENT_PRIVILEGES;
      CHECK_THROWS_AS(opened.source->set_on(true), WorldError);
    }
    CHECK(fake.enabled.empty());
    CHECK(fake.finalized == 1);
    CHECK(fake.finalized_in_callback == (calls_back ? 1 : 0));
    // A buffer that comes back after the end is freed and forgotten.
    uint8_t* late = nullptr;
    size_t bytes = 0, limit = 0;
    fake.request(&late, &bytes, &limit);
    fake.complete(nullptr, 0, late, bytes, 0);
    CHECK(open_cupti_on(fake_calls(), 100).status.ok());
  }
}

}  // namespace shardlab::testing::of_cupti

#endif

#include "profiler/gpu/driver.h"
#include "tests/namespaces.h"

namespace shardlab::testing::of_cupti {

TEST_CASE("without a driver or a device, the gate says which", "[profiler_gpu]") {
  CHECK(driver_status({}).state == LibraryState::kNoDriver);
  CHECK(driver_status({}).message == "there is no NVIDIA driver here (libcuda.so.1)");
  DriverCalls calls;
  calls.init = [](unsigned) { return 0; };
  calls.version = [](int* v) { return *v = 13020, 0; };
  calls.device_count = [](int* n) { return *n = 2, 0; };
  CHECK(driver_status(calls).ok());
  CHECK(driver_status(calls).message == "driver for CUDA 13.2, 2 devices");
  calls.device_count = [](int*) { return 35; };  // leaves the count as it was
  CHECK(driver_status(calls).message == "the NVIDIA driver knows no device");
  calls.version = [](int* v) { return *v = 0, 0; };
  CHECK(driver_status(calls).message == "the NVIDIA driver does not tell its version");
  calls.init = [](unsigned) { return 100; };
  CHECK(driver_status(calls).message == "the NVIDIA driver knows no device");
  calls.init = [](unsigned) { return 803; };
  CHECK(driver_status(calls).message == "the NVIDIA driver cannot be used: cuInit says 803");
  CHECK_FALSE(driver_status(calls).remedy.empty());
}

}  // namespace shardlab::testing::of_cupti
