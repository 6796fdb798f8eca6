#include "kernels/cuda/cudnn_api.h"

#include <dlfcn.h>
#include <fmt/format.h>

#include <array>

namespace shardlab::gpu {
namespace {

/// The functions that are used, with the types of cudnn_graph.h in which enumerations are int.
struct Functions {
  size_t (*version)() = nullptr;
  const char* (*text)(int) = nullptr;
  int (*create)(void**) = nullptr;
  int (*destroy)(void*) = nullptr;
  int (*set_stream)(void*, void*) = nullptr;
  int (*create_descriptor)(int, void**) = nullptr;
  int (*destroy_descriptor)(void*) = nullptr;
  int (*set_attribute)(void*, int, int, int64_t, const void*) = nullptr;
  int (*get_attribute)(void*, int, int, int64_t, int64_t*, void*) = nullptr;
  int (*finalize)(void*) = nullptr;
  int (*execute)(void*, void*, void*) = nullptr;

  /// The name of the first that the library lacks, or empty.
  std::string load(void* library) {
    std::string missing;
    const auto find = [&](auto& function, const char* symbol) {
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, symbol));
      if (function == nullptr && missing.empty()) missing = symbol;
    };
    find(version, "cudnnGetVersion");
    find(text, "cudnnGetErrorString");
    find(create, "cudnnCreate");
    find(destroy, "cudnnDestroy");
    find(set_stream, "cudnnSetStream");
    find(create_descriptor, "cudnnBackendCreateDescriptor");
    find(destroy_descriptor, "cudnnBackendDestroyDescriptor");
    find(set_attribute, "cudnnBackendSetAttribute");
    find(get_attribute, "cudnnBackendGetAttribute");
    find(finalize, "cudnnBackendFinalize");
    find(execute, "cudnnBackendExecute");
    return missing;
  }
};

class RealCudnn final : public CudnnApi {
 public:
  explicit RealCudnn(const Functions& functions) : f_(functions) {}
  int64_t version() override { return static_cast<int64_t>(f_.version()); }
  std::string describe(CudnnStatus status) override { return fmt::format("{} ({})", f_.text(status), status); }
  CudnnStatus create(CudnnHandle* handle) override { return f_.create(handle); }
  CudnnStatus destroy(CudnnHandle handle) override { return f_.destroy(handle); }
  CudnnStatus set_stream(CudnnHandle handle, void* stream) override { return f_.set_stream(handle, stream); }
  CudnnStatus create_descriptor(int kind, CudnnDescriptor* d) override { return f_.create_descriptor(kind, d); }
  CudnnStatus destroy_descriptor(CudnnDescriptor d) override { return f_.destroy_descriptor(d); }
  CudnnStatus set_attribute(CudnnDescriptor d, int name, int type, int64_t count, const void* elements) override {
    return f_.set_attribute(d, name, type, count, elements);
  }
  CudnnStatus get_attribute(CudnnDescriptor d, int name, int type, int64_t requested, int64_t* count, void* elements) override {
    return f_.get_attribute(d, name, type, requested, count, elements);
  }
  CudnnStatus finalize(CudnnDescriptor d) override { return f_.finalize(d); }
  CudnnStatus execute(CudnnHandle handle, CudnnDescriptor plan, CudnnDescriptor pack) override {
    return f_.execute(handle, plan, pack);
  }

 private:
  const Functions f_;
};

}  // namespace

std::string cudnn_version_text(int64_t version) {
  return fmt::format("{}.{}.{}", version / 10000, version / 100 % 100, version % 100);
}

Result<std::unique_ptr<CudnnApi>> real_cudnn() {
  constexpr const char* kRemedy = "install cuDNN 9 (libcudnn.so.9) where the loader finds it; attention: own does without";
  // Never closed: the library does not bear it.
  void* library = dlopen("libcudnn.so.9", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return Error{ExitCode::kEnvironment, "libcudnn.so.9 was not found", kRemedy, ""};
  Functions functions;
  const std::string missing = functions.load(library);
  if (!missing.empty()) return Error{ExitCode::kEnvironment, fmt::format("libcudnn.so.9 lacks {}", missing), kRemedy, ""};
  return std::unique_ptr<CudnnApi>(std::make_unique<RealCudnn>(functions));
}

}  // namespace shardlab::gpu
