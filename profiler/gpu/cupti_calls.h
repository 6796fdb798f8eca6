// The calls of CUPTI that the recorder makes, as a table: loaded at run time, or a test's own. Only for builds with CUPTI's headers
// (SHARDLAB_HAS_CUPTI); nothing outside the CUPTI source and its tests includes this.
#pragma once

#include <cupti.h>

#include "plan/base/result.h"
#include "profiler/gpu/library.h"

namespace shardlab::profiler {

struct CuptiCalls {
  decltype(&::cuptiGetVersion) get_version = nullptr;
  decltype(&::cuptiGetTimestamp) get_timestamp = nullptr;
  decltype(&::cuptiGetResultString) get_result_string = nullptr;
  decltype(&::cuptiGetCallbackName) get_callback_name = nullptr;
  decltype(&::cuptiSubscribe) subscribe = nullptr;
  decltype(&::cuptiUnsubscribe) unsubscribe = nullptr;
  decltype(&::cuptiEnableCallback) enable_callback = nullptr;
  decltype(&::cuptiActivityRegisterCallbacks) register_callbacks = nullptr;
  decltype(&::cuptiActivityEnable) enable = nullptr;
  decltype(&::cuptiActivityDisable) disable = nullptr;
  decltype(&::cuptiActivityEnableRuntimeApi) enable_runtime_api = nullptr;
  decltype(&::cuptiActivityEnableDriverApi) enable_driver_api = nullptr;
  decltype(&::cuptiActivityFlushAll) flush_all = nullptr;
  decltype(&::cuptiActivityGetNextRecord) get_next_record = nullptr;
  decltype(&::cuptiActivityGetNumDroppedRecords) get_dropped = nullptr;
  decltype(&::cuptiActivityPushExternalCorrelationId) push = nullptr;
  decltype(&::cuptiActivityPopExternalCorrelationId) pop = nullptr;
  decltype(&::cuptiFinalize) finalize = nullptr;
  int (*context_synchronize)() = nullptr;  ///< cuCtxSynchronize of the driver; null where there is none
};

/// A table with its state; complete where the state is ok.
struct LoadedCupti {
  CuptiCalls calls;
  LibraryStatus status;
};

/// libcupti of the headers' major version, and at least their minor one: records grow at their ends from version to version. The
/// library is never closed.
LoadedCupti load_cupti();

/// The status that a result code of CUPTI stands for; `what` names the call.
LibraryStatus cupti_result_status(const CuptiCalls& calls, CUptiResult result, const char* what);

}  // namespace shardlab::profiler
