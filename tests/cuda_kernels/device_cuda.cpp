// The first GPU. Without a driver or a device the program says so before its first test and ends with code 77, which CTest counts
// as skipped.
#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstdlib>

#include "plan/base/check.h"
#include "tests/cuda_kernels/device.h"
#include "tests/namespaces.h"

namespace shardlab::testing {
namespace {

void check(cudaError_t error, const char* call) { SHARDLAB_CHECK(error == cudaSuccess, "{}: {}", call, cudaGetErrorString(error)); }

class Gpu final : public Device, gpu::LaunchCheck {
 public:
  const gpu::Kernels& kernels() const override { return gpu::cuda_kernels(); }
  gpu::Stream stream() override { return {nullptr, this}; }
  void reverse(bool) override {}
  void* allocate(int64_t bytes) override {
    void* p = nullptr;
    check(cudaMalloc(&p, static_cast<size_t>(bytes)), "cudaMalloc");
    return p;
  }
  void release(void* p) override { check(cudaFree(p), "cudaFree"); }
  void copy_in(void* to, const void* from, int64_t bytes) override {
    check(cudaMemcpy(to, from, static_cast<size_t>(bytes), cudaMemcpyHostToDevice), "cudaMemcpy to the device");
  }
  void copy_out(void* to, const void* from, int64_t bytes) override {
    check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    check(cudaMemcpy(to, from, static_cast<size_t>(bytes), cudaMemcpyDeviceToHost), "cudaMemcpy from the device");
  }
  void failed(std::string_view kernel, std::string_view library, int code, std::string_view text) override {
    SHARDLAB_CHECK(false, "{}: {} error {}: {}", kernel, library, code, text);
  }
};

[[maybe_unused]] const bool kPresent = [] {
  int driver = 0, count = 0;
  cudaDriverGetVersion(&driver);
  if (driver != 0 && cudaGetDeviceCount(&count) == cudaSuccess && count > 0) return true;
  std::fprintf(stderr, "skipped: %s\n", driver == 0 ? "no CUDA driver on this machine" : "no CUDA device");
  std::_Exit(77);
}();

}  // namespace

Device& device() {
  static Gpu gpu;
  return gpu;
}

}  // namespace shardlab::testing
