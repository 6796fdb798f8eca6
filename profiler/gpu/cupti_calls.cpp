#include "profiler/gpu/cupti_calls.h"

#include <fmt/format.h>

#include <array>

namespace shardlab::profiler {

namespace {

constexpr int kMajor = CUPTI_API_VERSION / 10000;

bool find_calls(const SharedLibrary& library, CuptiCalls& c) {
  const auto find = [&](const char* name, auto& call) { return library.find(name, call); };
  return find("cuptiGetVersion", c.get_version) && find("cuptiGetTimestamp", c.get_timestamp) &&
         find("cuptiGetResultString", c.get_result_string) && find("cuptiGetCallbackName", c.get_callback_name) &&
         find("cuptiSubscribe", c.subscribe) && find("cuptiUnsubscribe", c.unsubscribe) &&
         find("cuptiEnableCallback", c.enable_callback) && find("cuptiActivityRegisterCallbacks", c.register_callbacks) &&
         find("cuptiActivityEnable", c.enable) && find("cuptiActivityDisable", c.disable) &&
         find("cuptiActivityEnableRuntimeApi", c.enable_runtime_api) && find("cuptiActivityEnableDriverApi", c.enable_driver_api) &&
         find("cuptiActivityFlushAll", c.flush_all) && find("cuptiActivityGetNextRecord", c.get_next_record) &&
         find("cuptiActivityGetNumDroppedRecords", c.get_dropped) && find("cuptiActivityPushExternalCorrelationId", c.push) &&
         find("cuptiActivityPopExternalCorrelationId", c.pop) && find("cuptiFinalize", c.finalize);
}

}  // namespace

LoadedCupti load_cupti() {
  const std::string file = fmt::format("libcupti.so.{}", kMajor);
  SharedLibrary library(std::array{file, std::string(SHARDLAB_CUPTI_LIBRARY_DIR "/") + file, "/usr/local/cuda/lib64/" + file,
                                   "/usr/local/cuda/extras/CUPTI/lib64/" + file});
  LoadedCupti loaded;
  loaded.status = {LibraryState::kAbsent, fmt::format("{} is not installed", file),
                   fmt::format("install CUDA {}'s CUPTI, or add its folder to the loader's path (ldconfig)", kMajor)};
  if (!library.is_open()) return loaded;
  if (!find_calls(library, loaded.calls)) {
    loaded.status.message = fmt::format("{} lacks calls that this build makes", library.name());
    return loaded;
  }
  uint32_t version = 0;
  if (loaded.calls.get_version(&version) != CUPTI_SUCCESS || version < CUPTI_API_VERSION ||
      version / 10000 != static_cast<uint32_t>(kMajor)) {
    loaded.status.message = fmt::format("{} is version {}, this build needs {} or a later one of {}", library.name(), version,
                                        CUPTI_API_VERSION, kMajor);
    return loaded;
  }
  SharedLibrary driver(std::array{"libcuda.so.1"});
  driver.find("cuCtxSynchronize", loaded.calls.context_synchronize);
  driver.keep();
  library.keep();
  loaded.status = {LibraryState::kOk, fmt::format("CUPTI {}", version), ""};
  return loaded;
}

LibraryStatus cupti_result_status(const CuptiCalls& calls, CUptiResult result, const char* what) {
  const char* words = nullptr;
  if (calls.get_result_string == nullptr || calls.get_result_string(result, &words) != CUPTI_SUCCESS || words == nullptr)
    words = "?";
  const std::string message = fmt::format("{} says {} ({})", what, words, static_cast<int>(result));
  switch (static_cast<int>(result)) {
    case CUPTI_SUCCESS: return {LibraryState::kOk, "", ""};
    case CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED:
      return {LibraryState::kOtherSubscriber, message,
              "run without Nsight Systems, Nsight Compute, cuda-gdb, compute-sanitizer or another CUPTI tool; until then CUDA "
              "events time "
              "the ops"};
    case CUPTI_ERROR_INSUFFICIENT_PRIVILEGES:
    case CUPTI_ERROR_VIRTUALIZED_DEVICE_INSUFFICIENT_PRIVILEGES:
      return {LibraryState::kNoPrivilege, message,
              "run as root, or load the driver with NVreg_RestrictProfilingToAdminUsers=0; until then CUDA events time the ops"};
    case CUPTI_ERROR_NOT_SUPPORTED:
    case CUPTI_ERROR_VIRTUALIZED_DEVICE_NOT_SUPPORTED:
    case CUPTI_ERROR_CONFIDENTIAL_COMPUTING_NOT_SUPPORTED:
    case CUPTI_ERROR_CMP_DEVICE_NOT_SUPPORTED:
    case CUPTI_ERROR_MIG_DEVICE_NOT_SUPPORTED:
    case CUPTI_ERROR_SLI_DEVICE_NOT_SUPPORTED:
    case CUPTI_ERROR_WSL_DEVICE_NOT_SUPPORTED: return {LibraryState::kUnsupported, message, "CUDA events time the ops instead"};
    default:
      return {LibraryState::kFailed, message,
              "check that driver and CUPTI fit each other (nvidia-smi); CUDA events time the ops instead"};
  }
}

}  // namespace shardlab::profiler
