#include "profiler/gpu/cupti_source.h"

#include <fmt/format.h>

#include <array>
#include <cstdlib>
#include <mutex>
#include <utility>
#include <vector>

#include "plan/base/world_error.h"
#include "profiler/gpu/cupti_decode.h"
#include "profiler/gpu/driver.h"

namespace shardlab::profiler {

namespace {

constexpr size_t kBufferBytes = size_t{4} << 20;
constexpr size_t kAlignment = 8;

/// Without these there is no trace.
constexpr std::array kNeeded{CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL,
                             CUPTI_ACTIVITY_KIND_MEMCPY,
                             CUPTI_ACTIVITY_KIND_MEMCPY2,
                             CUPTI_ACTIVITY_KIND_MEMSET,
                             CUPTI_ACTIVITY_KIND_RUNTIME,
                             CUPTI_ACTIVITY_KIND_DRIVER,
                             CUPTI_ACTIVITY_KIND_EXTERNAL_CORRELATION};
/// Without these it has less detail.
constexpr std::array kWelcome{CUPTI_ACTIVITY_KIND_SYNCHRONIZATION, CUPTI_ACTIVITY_KIND_OVERHEAD};

/// Calls made all the time that launch nothing: their records would only cost.
constexpr std::array kNoisyRuntime{
    CUPTI_RUNTIME_TRACE_CBID_cudaGetDevice_v3020,          CUPTI_RUNTIME_TRACE_CBID_cudaSetDevice_v3020,
    CUPTI_RUNTIME_TRACE_CBID_cudaGetLastError_v3020,       CUPTI_RUNTIME_TRACE_CBID_cudaPeekAtLastError_v3020,
    CUPTI_RUNTIME_TRACE_CBID_cudaEventQuery_v3020,         CUPTI_RUNTIME_TRACE_CBID_cudaEventRecord_v3020,
    CUPTI_RUNTIME_TRACE_CBID_cudaStreamWaitEvent_v3020,    CUPTI_RUNTIME_TRACE_CBID_cudaStreamQuery_v3020,
    CUPTI_RUNTIME_TRACE_CBID_cudaDeviceGetAttribute_v5000, CUPTI_RUNTIME_TRACE_CBID_cudaFuncSetAttribute_v9000};
constexpr std::array kNoisyDriver{CUPTI_DRIVER_TRACE_CBID_cuCtxGetCurrent,
                                  CUPTI_DRIVER_TRACE_CBID_cuCtxSetCurrent,
                                  CUPTI_DRIVER_TRACE_CBID_cuCtxGetDevice,
                                  CUPTI_DRIVER_TRACE_CBID_cuEventQuery,
                                  CUPTI_DRIVER_TRACE_CBID_cuEventRecord,
                                  CUPTI_DRIVER_TRACE_CBID_cuStreamWaitEvent,
                                  CUPTI_DRIVER_TRACE_CBID_cuDevicePrimaryCtxGetState,
                                  CUPTI_DRIVER_TRACE_CBID_cuKernelGetAttribute};

class CuptiSource;

/// CUPTI calls back without saying for whom, and serves one client of a process: here is that client. The lock is held while a
/// buffer is read, so that the source cannot go away meanwhile; never around a call that may itself wait for CUPTI.
struct Client {
  std::mutex mutex;
  CuptiSource* source = nullptr;
};
Client& client() {
  static Client the_client;
  return the_client;
}

class CuptiSource final : public ActivitySource {
 public:
  CuptiSource(const CuptiCalls& calls, int64_t max_records) : calls_(calls), max_records_(max_records) {}

  /// Takes CUPTI for this source, or says why it cannot be had.
  LibraryStatus open() {
    {
      const std::lock_guard lock(client().mutex);
      if (client().source != nullptr)
        return {LibraryState::kOtherSubscriber, "another recorder of this process uses CUPTI", "end the other recorder first"};
      client().source = this;
      taken_ = true;
    }
    if (auto s = check(calls_.subscribe(&subscriber_, &CuptiSource::on_call, this), "cuptiSubscribe"); !s.ok()) return s;
    subscribed_ = true;
    if (auto s =
            check(calls_.register_callbacks(&CuptiSource::on_request, &CuptiSource::on_complete), "cuptiActivityRegisterCallbacks");
        !s.ok())
      return s;
    if (auto s = enable_all(); !s.ok()) return s;
    disable_all();
    static_cast<void>(calls_.enable(CUPTI_ACTIVITY_KIND_MEMORY2));  // rare, and of use from the first allocation on
    uint32_t version = 0;
    calls_.get_version(&version);
    return {LibraryState::kOk, fmt::format("CUPTI {}.{}", version / 10000, version % 10000 / 100), ""};
  }

  ~CuptiSource() override {
    if (subscribed_) {
      disable_all();
      calls_.disable(CUPTI_ACTIVITY_KIND_MEMORY2);
      calls_.flush_all(CUPTI_ACTIVITY_FLAG_FLUSH_FORCED);
      detach();
    }
    if (!taken_) return;
    const std::lock_guard lock(client().mutex);
    client().source = nullptr;
  }

  void set_on(bool on) override {
    if (!on) return disable_all();
    if (const LibraryStatus s = enable_all(); !s.ok()) throw WorldError(s.message, s.remedy);
  }

  void push(uint64_t id) override { calls_.push(CUPTI_EXTERNAL_CORRELATION_KIND_CUSTOM0, id); }
  void pop() override {
    uint64_t id = 0;
    calls_.pop(CUPTI_EXTERNAL_CORRELATION_KIND_CUSTOM0, &id);
  }

  int64_t now_ns() override {
    uint64_t now = 0;
    calls_.get_timestamp(&now);
    return static_cast<int64_t>(now);
  }

  ActivityLog drain() override {
    // Completed records first; with the device idle that is all of them. What CUPTI still holds as incomplete comes
    // with the second.
    for (const uint32_t flag : {uint32_t{0}, static_cast<uint32_t>(CUPTI_ACTIVITY_FLAG_FLUSH_FORCED)})
      if (const LibraryStatus s = check(calls_.flush_all(flag), "cuptiActivityFlushAll"); !s.ok())
        throw WorldError(s.message, s.remedy);
    const std::lock_guard lock(client().mutex);
    return std::exchange(log_, {});
  }

 private:
  LibraryStatus check(CUptiResult result, const char* what) const { return cupti_result_status(calls_, result, what); }

  LibraryStatus enable_all() {
    for (const CUpti_ActivityKind kind : kNeeded) {
      const LibraryStatus s = check(calls_.enable(kind), "cuptiActivityEnable");
      if (!s.ok()) return disable_all(), s;
    }
    for (const CUpti_ActivityKind kind : kWelcome) static_cast<void>(calls_.enable(kind));
    for (const auto cbid : kNoisyRuntime) calls_.enable_runtime_api(cbid, 0);
    for (const auto cbid : kNoisyDriver) calls_.enable_driver_api(cbid, 0);
    return {LibraryState::kOk, "", ""};
  }

  void disable_all() {
    for (const CUpti_ActivityKind kind : kNeeded) calls_.disable(kind);
    for (const CUpti_ActivityKind kind : kWelcome) calls_.disable(kind);
  }

  /// Ends CUPTI's presence in the process: left attached it slows every later launch. NVIDIA advises to do that as a call of the
  /// driver returns (cuptiFinalize), so one is made; where no callback comes of it, afterwards.
  void detach() {
    detaching_ = calls_.context_synchronize != nullptr &&
                 calls_.enable_callback(1, subscriber_, CUPTI_CB_DOMAIN_DRIVER_API, CUPTI_DRIVER_TRACE_CBID_cuCtxSynchronize) ==
                     CUPTI_SUCCESS;
    if (detaching_) calls_.context_synchronize();
    if (std::exchange(detached_, true)) return;
    calls_.unsubscribe(subscriber_);
    calls_.finalize();
  }

  static void CUPTIAPI on_call(void* self, CUpti_CallbackDomain, CUpti_CallbackId, const void* data) {
    auto& source = *static_cast<CuptiSource*>(self);
    const auto& call = *static_cast<const CUpti_CallbackData*>(data);
    if (!source.detaching_ || source.detached_ || call.callbackSite != CUPTI_API_EXIT) return;
    source.detached_ = true;
    source.calls_.finalize();
  }

  static void CUPTIAPI on_request(uint8_t** buffer, size_t* bytes, size_t* max_records) {
    *buffer = static_cast<uint8_t*>(std::aligned_alloc(kAlignment, kBufferBytes));
    *bytes = *buffer != nullptr ? kBufferBytes : 0;
    *max_records = 0;  // as many as fit
  }

  static void CUPTIAPI on_complete(CUcontext context, uint32_t stream, uint8_t* buffer, size_t, size_t valid_bytes) {
    decltype(CuptiCalls::get_dropped) get_dropped = nullptr;
    {
      const std::lock_guard lock(client().mutex);
      if (CuptiSource* source = client().source; source != nullptr) {
        if (buffer != nullptr) decode_cupti_buffer(source->calls_, buffer, valid_bytes, source->max_records_, source->log_);
        get_dropped = source->calls_.get_dropped;
      }
    }
    std::free(buffer);
    if (get_dropped != nullptr) add_dropped(context, stream, get_dropped);
  }

  /// Not under the lock while CUPTI is asked: it takes its own in there.
  static void add_dropped(CUcontext context, uint32_t stream, decltype(CuptiCalls::get_dropped) get_dropped) {
    size_t dropped = 0;
    if (get_dropped(context, stream, &dropped) != CUPTI_SUCCESS || dropped == 0) return;
    const std::lock_guard lock(client().mutex);
    if (client().source != nullptr) client().source->log_.dropped += static_cast<int64_t>(dropped);
  }

  const CuptiCalls calls_;
  const int64_t max_records_;
  CUpti_SubscriberHandle subscriber_ = nullptr;
  bool taken_ = false, subscribed_ = false, detaching_ = false, detached_ = false;
  ActivityLog log_;  ///< under the client's lock
};

}  // namespace

OpenedSource open_cupti_on(const CuptiCalls& calls, int64_t max_records) {
  auto source = std::make_unique<CuptiSource>(calls, max_records);
  LibraryStatus status = source->open();
  if (!status.ok()) source.reset();
  return {std::move(source), std::move(status)};
}

OpenedSource open_cupti(int64_t max_records) {
  if (LibraryStatus driver = driver_status(load_driver()); !driver.ok()) return {nullptr, std::move(driver)};
  LoadedCupti loaded = load_cupti();
  if (!loaded.status.ok()) return {nullptr, std::move(loaded.status)};
  return open_cupti_on(loaded.calls, max_records);
}

}  // namespace shardlab::profiler
