// The host as a device. Arrays are allocated to the byte, so that the address sanitizer sees their ends.
#include <cstdlib>
#include <cstring>

#include "kernels/cuda/emulate/settings.h"
#include "plan/base/check.h"
#include "tests/cuda_kernels/device.h"
#include "tests/namespaces.h"

namespace shardlab::testing {
namespace {

class Host final : public Device, gpu::LaunchCheck {
 public:
  const gpu::Kernels& kernels() const override { return gpu::emulated_kernels(); }
  gpu::Stream stream() override { return {&settings_, this}; }
  void reverse(bool reversed) override { settings_.reversed = reversed; }
  void* allocate(int64_t bytes) override {
    void* p = nullptr;
    SHARDLAB_CHECK(posix_memalign(&p, 256, static_cast<size_t>(bytes)) == 0, "no memory for {} bytes", bytes);
    return p;
  }
  void release(void* p) override { std::free(p); }
  void copy_in(void* to, const void* from, int64_t bytes) override { copy(to, from, bytes); }
  void copy_out(void* to, const void* from, int64_t bytes) override { copy(to, from, bytes); }
  void failed(std::string_view kernel, std::string_view library, int code, std::string_view text) override {
    SHARDLAB_CHECK(false, "{}: {} error {}: {}", kernel, library, code, text);
  }

 private:
  static void copy(void* to, const void* from, int64_t bytes) {
    if (bytes != 0) std::memcpy(to, from, static_cast<size_t>(bytes));  // of an empty list there is no address
  }

  gpu::emulate::Settings settings_;
};

}  // namespace

Device& device() {
  static Host host;
  return host;
}

}  // namespace shardlab::testing
