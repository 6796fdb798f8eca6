#include "kernels/cuda/cublaslt_api.h"

#include <dlfcn.h>
#include <fmt/format.h>

namespace shardlab::gpu {
namespace {

/// The functions that are used, with the types of cublasLt.h in which enumerations are int and handles are void*.
struct Functions {
  size_t (*version)() = nullptr;
  const char* (*text)(int) = nullptr;
  int (*create)(void**) = nullptr;
  int (*destroy)(void*) = nullptr;
  int (*create_product)(void**, int, int) = nullptr;
  int (*destroy_product)(void*) = nullptr;
  int (*set_product)(void*, int, const void*, size_t) = nullptr;
  int (*create_layout)(void**, int, uint64_t, uint64_t, int64_t) = nullptr;
  int (*destroy_layout)(void*) = nullptr;
  int (*create_preference)(void**) = nullptr;
  int (*destroy_preference)(void*) = nullptr;
  int (*set_preference)(void*, int, const void*, size_t) = nullptr;
  int (*heuristic)(void*, void*, void*, void*, void*, void*, void*, int, CublasLtProposal*, int*) = nullptr;
  int (*multiply)(void*, void*, const void*, const void*, void*, const void*, void*, const void*, const void*, void*, void*, void*,
                  const CublasLtAlgorithm*, void*, size_t, void*) = nullptr;

  /// The name of the first that the library lacks, or empty.
  std::string load(void* library) {
    std::string missing;
    const auto find = [&](auto& function, const char* symbol) {
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, symbol));
      if (function == nullptr && missing.empty()) missing = symbol;
    };
    find(version, "cublasLtGetVersion");
    find(text, "cublasLtGetStatusName");
    find(create, "cublasLtCreate");
    find(destroy, "cublasLtDestroy");
    find(create_product, "cublasLtMatmulDescCreate");
    find(destroy_product, "cublasLtMatmulDescDestroy");
    find(set_product, "cublasLtMatmulDescSetAttribute");
    find(create_layout, "cublasLtMatrixLayoutCreate");
    find(destroy_layout, "cublasLtMatrixLayoutDestroy");
    find(create_preference, "cublasLtMatmulPreferenceCreate");
    find(destroy_preference, "cublasLtMatmulPreferenceDestroy");
    find(set_preference, "cublasLtMatmulPreferenceSetAttribute");
    find(heuristic, "cublasLtMatmulAlgoGetHeuristic");
    find(multiply, "cublasLtMatmul");
    return missing;
  }
};

class RealCublasLt final : public CublasLtApi {
 public:
  explicit RealCublasLt(const Functions& functions) : f_(functions) {}
  int64_t version() override { return static_cast<int64_t>(f_.version()); }
  std::string describe(CublasStatus status) override { return f_.text(status); }
  CublasStatus create(CublasLtHandle* handle) override { return f_.create(handle); }
  CublasStatus destroy(CublasLtHandle handle) override { return f_.destroy(handle); }
  CublasStatus create_product(CublasLtDescriptor* product, cublaslt::Compute compute) override {
    return f_.create_product(product, static_cast<int>(compute), static_cast<int>(cublaslt::DataType::kF32));
  }
  CublasStatus destroy_product(CublasLtDescriptor product) override { return f_.destroy_product(product); }
  CublasStatus set(CublasLtDescriptor product, cublaslt::ProductName name, const void* value, size_t bytes) override {
    return f_.set_product(product, static_cast<int>(name), value, bytes);
  }
  CublasStatus create_layout(CublasLtDescriptor* layout, cublaslt::DataType type, int64_t rows, int64_t columns,
                             int64_t leading) override {
    return f_.create_layout(layout, static_cast<int>(type), static_cast<uint64_t>(rows), static_cast<uint64_t>(columns), leading);
  }
  CublasStatus destroy_layout(CublasLtDescriptor layout) override { return f_.destroy_layout(layout); }
  CublasStatus create_preference(CublasLtDescriptor* preference) override { return f_.create_preference(preference); }
  CublasStatus destroy_preference(CublasLtDescriptor preference) override { return f_.destroy_preference(preference); }
  CublasStatus set(CublasLtDescriptor preference, cublaslt::PreferenceName name, const void* value, size_t bytes) override {
    return f_.set_preference(preference, static_cast<int>(name), value, bytes);
  }
  CublasStatus propose(CublasLtHandle handle, const CublasLtCall& c, CublasLtDescriptor preference, int requested,
                       CublasLtProposal* proposals, int* found) override {
    return f_.heuristic(handle, c.product, c.a.layout, c.b.layout, c.d, c.d, preference, requested, proposals, found);
  }
  CublasStatus multiply(CublasLtHandle handle, const CublasLtCall& c, void* stream) override {
    return f_.multiply(handle, c.product, &c.alpha, c.a.data, c.a.layout, c.b.data, c.b.layout, &c.beta, c.data, c.d, c.data, c.d,
                       &c.algorithm, c.workspace, static_cast<size_t>(c.workspace_bytes), stream);
  }

 private:
  const Functions f_;
};

}  // namespace

std::string cublaslt_version_text(int64_t version) {
  return fmt::format("{}.{}.{}", version / 10000, version / 100 % 100, version % 100);
}

Result<std::unique_ptr<CublasLtApi>> real_cublaslt() {
  constexpr const char* kRemedy =
      "install cuBLAS 13 or 12 (libcublasLt.so.13, .12) where the loader finds it; canonical: true multiplies without";
  for (const char* name : {"libcublasLt.so.13", "libcublasLt.so.12"}) {
    // Never closed: the library does not bear it.
    void* library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) continue;
    Functions functions;
    const std::string missing = functions.load(library);
    if (!missing.empty()) return Error{ExitCode::kEnvironment, fmt::format("{} lacks {}", name, missing), kRemedy, ""};
    return std::unique_ptr<CublasLtApi>(std::make_unique<RealCublasLt>(functions));
  }
  return Error{ExitCode::kEnvironment, "libcublasLt.so.13 was not found", kRemedy, ""};
}

}  // namespace shardlab::gpu
