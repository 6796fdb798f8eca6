#include "profiler/gpu/cupti_decode.h"

#include <fmt/format.h>

#include <cstdlib>

namespace shardlab::profiler {

// The layouts that this decoder was written for. Later versions append to them, which a walk by CUPTI itself takes care of.
static_assert(CUPTI_API_VERSION >= 130000, "the record layouts below are those of CUDA 13");
#if CUPTI_API_VERSION == 130001
static_assert(sizeof(CUpti_ActivityKernel10) == 216 && sizeof(CUpti_ActivityMemcpy6) == 96 &&
              sizeof(CUpti_ActivityMemcpyPtoP4) == 96 && sizeof(CUpti_ActivityMemset4) == 88 &&
              sizeof(CUpti_ActivityMemory4) == 128 && sizeof(CUpti_ActivityAPI) == 40 &&
              sizeof(CUpti_ActivityExternalCorrelation) == 24 && sizeof(CUpti_ActivitySynchronization2) == 56 &&
              sizeof(CUpti_ActivityOverhead3) == 56);
#endif

namespace {

const char* copy_name(int kind) {
  switch (kind) {
    case CUPTI_ACTIVITY_MEMCPY_KIND_HTOD: return "copy host to device";
    case CUPTI_ACTIVITY_MEMCPY_KIND_DTOH: return "copy device to host";
    case CUPTI_ACTIVITY_MEMCPY_KIND_DTOD: return "copy device to device";
    case CUPTI_ACTIVITY_MEMCPY_KIND_HTOH: return "copy host to host";
    case CUPTI_ACTIVITY_MEMCPY_KIND_PTOP: return "copy peer to peer";
    default: return "copy";
  }
}

const char* synchronisation_name(int type) {
  switch (type) {
    case CUPTI_ACTIVITY_SYNCHRONIZATION_TYPE_EVENT_SYNCHRONIZE: return "event synchronize";
    case CUPTI_ACTIVITY_SYNCHRONIZATION_TYPE_STREAM_WAIT_EVENT: return "stream wait event";
    case CUPTI_ACTIVITY_SYNCHRONIZATION_TYPE_STREAM_SYNCHRONIZE: return "stream synchronize";
    case CUPTI_ACTIVITY_SYNCHRONIZATION_TYPE_CONTEXT_SYNCHRONIZE: return "context synchronize";
    default: return "synchronize";
  }
}

const char* overhead_name(int kind) {
  switch (kind) {
    case CUPTI_ACTIVITY_OVERHEAD_DRIVER_COMPILER: return "driver compiler";
    case CUPTI_ACTIVITY_OVERHEAD_CUPTI_BUFFER_FLUSH: return "buffer flush";
    case CUPTI_ACTIVITY_OVERHEAD_CUPTI_INSTRUMENTATION: return "instrumentation";
    case CUPTI_ACTIVITY_OVERHEAD_CUPTI_RESOURCE: return "resource";
    case CUPTI_ACTIVITY_OVERHEAD_RUNTIME_TRIGGERED_MODULE_LOADING: return "module loading";
    case CUPTI_ACTIVITY_OVERHEAD_LAZY_FUNCTION_LOADING: return "lazy function loading";
    case CUPTI_ACTIVITY_OVERHEAD_COMMAND_BUFFER_FULL: return "command buffer full";
    case CUPTI_ACTIVITY_OVERHEAD_ACTIVITY_BUFFER_REQUEST: return "activity buffer request";
    case CUPTI_ACTIVITY_OVERHEAD_UVM_ACTIVITY_INIT: return "managed memory set-up";
    default: return "overhead";
  }
}

AllocationRecord::Space space_of(int kind) {
  switch (kind) {
    case CUPTI_ACTIVITY_MEMORY_KIND_DEVICE:
    case CUPTI_ACTIVITY_MEMORY_KIND_DEVICE_STATIC:
    case CUPTI_ACTIVITY_MEMORY_KIND_ARRAY: return AllocationRecord::Space::kDevice;
    case CUPTI_ACTIVITY_MEMORY_KIND_PINNED: return AllocationRecord::Space::kPinned;
    case CUPTI_ACTIVITY_MEMORY_KIND_MANAGED:
    case CUPTI_ACTIVITY_MEMORY_KIND_MANAGED_STATIC: return AllocationRecord::Space::kManaged;
    case CUPTI_ACTIVITY_MEMORY_KIND_PAGEABLE: return AllocationRecord::Space::kPageable;
    default: return AllocationRecord::Space::kOther;
  }
}

int64_t ns(uint64_t time) { return static_cast<int64_t>(time); }

/// The fields that kernels, copies and fills have in common, whatever the version of the record.
template <class Record>
DeviceWork work_of_record(const Record& r, DeviceWork::Kind kind) {
  DeviceWork work;
  work.kind = kind;
  work.begin_ns = ns(r.start);
  work.end_ns = ns(r.end);
  work.correlation = r.correlationId;
  work.device = r.deviceId;
  work.context = r.contextId;
  work.stream = r.streamId;
  return work;
}

template <class Record>
void add_copy(const Record& r, ActivityLog& log) {
  DeviceWork work = work_of_record(r, DeviceWork::Kind::kCopy);
  work.name = log.names.number(copy_name(r.copyKind));
  work.bytes = static_cast<int64_t>(r.bytes);
  log.work.push_back(work);
}

void add_kernel(const CUpti_ActivityKernel10& r, ActivityLog& log) {
  DeviceWork work = work_of_record(r, DeviceWork::Kind::kKernel);
  work.name = log.names.number(r.name != nullptr ? r.name : "kernel without a name");
  work.grid = {r.gridX, r.gridY, r.gridZ};
  work.block = {r.blockX, r.blockY, r.blockZ};
  work.registers = r.registersPerThread;
  work.shared_bytes = r.staticSharedMemory + r.dynamicSharedMemory;
  log.work.push_back(work);
}

void add_fill(const CUpti_ActivityMemset4& r, ActivityLog& log) {
  DeviceWork work = work_of_record(r, DeviceWork::Kind::kFill);
  work.name = log.names.number("fill");
  work.bytes = static_cast<int64_t>(r.bytes);
  log.work.push_back(work);
}

void add_call(const CuptiCalls& calls, const CUpti_ActivityAPI& r, ActivityLog& log) {
  const CUpti_CallbackDomain domain =
      r.kind == CUPTI_ACTIVITY_KIND_RUNTIME ? CUPTI_CB_DOMAIN_RUNTIME_API : CUPTI_CB_DOMAIN_DRIVER_API;
  const char* name = nullptr;
  const bool known = calls.get_callback_name(domain, r.cbid, &name) == CUPTI_SUCCESS && name != nullptr;
  const int32_t number = log.names.number(known ? name : fmt::format("call {}", r.cbid));
  log.calls.push_back({ns(r.start), ns(r.end), r.correlationId, r.threadId, number});
}

void add_allocation(const CUpti_ActivityMemory4& r, ActivityLog& log) {
  log.allocations.push_back({space_of(r.memoryKind), r.memoryOperationType == CUPTI_ACTIVITY_MEMORY_OPERATION_TYPE_RELEASE,
                             ns(r.timestamp), r.address, static_cast<int64_t>(r.bytes), r.deviceId});
}

void add_synchronisation(const CUpti_ActivitySynchronization2& r, ActivityLog& log) {
  static_assert(SynchronisationRecord::kNoStream == CUPTI_SYNCHRONIZATION_INVALID_VALUE);
  log.synchronisations.push_back(
      {ns(r.start), ns(r.end), r.correlationId, r.streamId, log.names.number(synchronisation_name(r.type))});
}

void add_overhead(const CUpti_ActivityOverhead3& r, ActivityLog& log) {
  log.overheads.push_back({ns(r.start), ns(r.end), log.names.number(overhead_name(r.overheadKind))});
  std::free(r.overheadData);  // the record's owner frees it (cupti_activity.h)
}

/// A record seen as what its kind says it is.
template <class Record>
const Record& as(const CUpti_Activity* record) {
  return *reinterpret_cast<const Record*>(record);
}

void add(const CuptiCalls& calls, const CUpti_Activity* record, ActivityLog& log) {
  switch (record->kind) {
    case CUPTI_ACTIVITY_KIND_KERNEL:
    case CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL: return add_kernel(as<CUpti_ActivityKernel10>(record), log);
    case CUPTI_ACTIVITY_KIND_MEMCPY: return add_copy(as<CUpti_ActivityMemcpy6>(record), log);
    case CUPTI_ACTIVITY_KIND_MEMCPY2: return add_copy(as<CUpti_ActivityMemcpyPtoP4>(record), log);
    case CUPTI_ACTIVITY_KIND_MEMSET: return add_fill(as<CUpti_ActivityMemset4>(record), log);
    case CUPTI_ACTIVITY_KIND_MEMORY2: return add_allocation(as<CUpti_ActivityMemory4>(record), log);
    case CUPTI_ACTIVITY_KIND_RUNTIME:
    case CUPTI_ACTIVITY_KIND_DRIVER: return add_call(calls, as<CUpti_ActivityAPI>(record), log);
    case CUPTI_ACTIVITY_KIND_SYNCHRONIZATION: return add_synchronisation(as<CUpti_ActivitySynchronization2>(record), log);
    case CUPTI_ACTIVITY_KIND_OVERHEAD: return add_overhead(as<CUpti_ActivityOverhead3>(record), log);
    case CUPTI_ACTIVITY_KIND_EXTERNAL_CORRELATION: {
      const auto& r = as<CUpti_ActivityExternalCorrelation>(record);
      if (r.externalKind == CUPTI_EXTERNAL_CORRELATION_KIND_CUSTOM0) log.links.push_back({r.correlationId, r.externalId});
      return;
    }
    default: ++log.unknown;
  }
}

}  // namespace

void decode_cupti_buffer(const CuptiCalls& calls, uint8_t* buffer, size_t valid_bytes, int64_t max_records, ActivityLog& log) {
  if (valid_bytes == 0) return;
  CUpti_Activity* record = nullptr;
  for (;;) {
    const CUptiResult result = calls.get_next_record(buffer, valid_bytes, &record);
    if (result == CUPTI_ERROR_MAX_LIMIT_REACHED) return;
    if (result != CUPTI_SUCCESS) {
      ++log.unreadable;
      return;
    }
    if (log.records() < max_records)
      add(calls, record, log);
    else
      ++log.dropped;
  }
}

}  // namespace shardlab::profiler
