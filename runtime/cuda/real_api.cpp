// Forwards to the CUDA runtime. Compiled where the toolkit is.
#include <cuda_runtime.h>
#include <fmt/format.h>

#include "runtime/cuda/api.h"

namespace shardlab::runtime::cuda {

namespace {

cudaStream_t native(StreamHandle s) { return static_cast<cudaStream_t>(s.value); }
cudaEvent_t native(EventHandle e) { return static_cast<cudaEvent_t>(e.value); }
size_t size(int64_t bytes) { return static_cast<size_t>(bytes); }

static_assert(kOutOfMemory == cudaErrorMemoryAllocation && kInsufficientDriver == cudaErrorInsufficientDriver &&
              kNoDevice == cudaErrorNoDevice && kNotReady == cudaErrorNotReady);

class RealApi final : public Api {
 public:
  std::string describe(Status status) override {
    const auto error = static_cast<cudaError_t>(status);
    return fmt::format("{}: {}", cudaGetErrorName(error), cudaGetErrorString(error));
  }
  Status driver_version(int* version) override { return cudaDriverGetVersion(version); }
  Status runtime_version(int* version) override { return cudaRuntimeGetVersion(version); }
  Status device_count(int* count) override { return cudaGetDeviceCount(count); }
  Status properties(int device, Properties* out) override {
    cudaDeviceProp p{};
    const cudaError_t status = cudaGetDeviceProperties(&p, device);
    if (status != cudaSuccess) return status;
    *out = {p.name, p.major, p.minor, p.multiProcessorCount, static_cast<int64_t>(p.totalGlobalMem), p.l2CacheSize};
    return kSuccess;
  }
  Status pci_bus_id(int device, std::string* id) override {
    char text[32] = {};
    const cudaError_t status = cudaDeviceGetPCIBusId(text, sizeof text, device);
    *id = text;
    return status;
  }
  Status set_device(int device) override { return cudaSetDevice(device); }
  Status memory(int64_t* free, int64_t* total) override {
    size_t f = 0, t = 0;
    const cudaError_t status = cudaMemGetInfo(&f, &t);
    *free = static_cast<int64_t>(f);
    *total = static_cast<int64_t>(t);
    return status;
  }
  Status synchronise_device() override { return cudaDeviceSynchronize(); }
  Status last_error() override { return cudaGetLastError(); }

  Status allocate(void** at, int64_t bytes) override { return cudaMalloc(at, size(bytes)); }
  Status release(void* at) override { return cudaFree(at); }
  Status allocate_host(void** at, int64_t bytes) override { return cudaMallocHost(at, size(bytes)); }
  Status release_host(void* at) override { return cudaFreeHost(at); }
  Status fill(void* at, uint8_t value, int64_t bytes, StreamHandle stream) override {
    return cudaMemsetAsync(at, value, size(bytes), native(stream));
  }
  Status copy(void* to, const void* from, int64_t bytes, StreamHandle stream) override {
    return cudaMemcpyAsync(to, from, size(bytes), cudaMemcpyDefault, native(stream));
  }

  Status create_stream(StreamHandle* stream) override {
    cudaStream_t made = nullptr;
    const cudaError_t status = cudaStreamCreateWithFlags(&made, cudaStreamNonBlocking);
    stream->value = made;
    return status;
  }
  Status destroy_stream(StreamHandle stream) override { return cudaStreamDestroy(native(stream)); }
  Status synchronise_stream(StreamHandle stream) override { return cudaStreamSynchronize(native(stream)); }
  Status query_stream(StreamHandle stream) override { return cudaStreamQuery(native(stream)); }
  Status wait_event(StreamHandle stream, EventHandle event) override {
    return cudaStreamWaitEvent(native(stream), native(event), 0);
  }

  Status create_event(EventHandle* event, bool timed) override {
    cudaEvent_t made = nullptr;
    const cudaError_t status = cudaEventCreateWithFlags(&made, timed ? cudaEventDefault : cudaEventDisableTiming);
    event->value = made;
    return status;
  }
  Status destroy_event(EventHandle event) override { return cudaEventDestroy(native(event)); }
  Status record_event(EventHandle event, StreamHandle stream) override { return cudaEventRecord(native(event), native(stream)); }
  Status query_event(EventHandle event) override { return cudaEventQuery(native(event)); }
  Status milliseconds(float* out, EventHandle from, EventHandle to) override {
    return cudaEventElapsedTime(out, native(from), native(to));
  }
};

}  // namespace

const gpu::Kernels* built_kernels() { return &gpu::cuda_kernels(); }

Result<std::unique_ptr<Api>> real_api() { return std::unique_ptr<Api>(std::make_unique<RealApi>()); }

}  // namespace shardlab::runtime::cuda
