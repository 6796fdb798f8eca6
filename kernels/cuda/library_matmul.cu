// Linear by cuBLASLt, which is loaded at run time: a program that never multiplies on a GPU neither waits for it nor needs it.
//
// The library counts columns first, so that our row-major y[rows,out] is its matrix [out,rows]:
//   F  y[rows,out] = x w^T    D = op(A) op(B), m = out, n = rows, k = in     A = w transposed, B = x
//   I  dx[rows,in] = dy w                      m = in,  n = rows, k = out    A = w,            B = dy
//   W  dw[out,in] = dy^T x                     m = in,  n = out,  k = rows   A = x,            B = dy transposed
#include <cublasLt.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <array>
#include <map>
#include <string>
#include <vector>

#include "kernels/cuda/elementwise.h"
#include "kernels/cuda/launches.h"

namespace shardlab::gpu::SHARDLAB_GPU_VARIANT {
namespace {

/// The functions that are used, by name.
struct Library {
  decltype(&::cublasLtCreate) create = nullptr;
  decltype(&::cublasLtDestroy) destroy = nullptr;
  decltype(&::cublasLtGetVersion) version = nullptr;
  decltype(&::cublasLtGetStatusString) status_text = nullptr;
  decltype(&::cublasLtMatmul) matmul = nullptr;
  decltype(&::cublasLtMatmulAlgoGetHeuristic) heuristic = nullptr;
  decltype(&::cublasLtMatmulDescCreate) create_product = nullptr;
  decltype(&::cublasLtMatmulDescDestroy) destroy_product = nullptr;
  decltype(&::cublasLtMatmulDescSetAttribute) set_product = nullptr;
  decltype(&::cublasLtMatrixLayoutCreate) create_layout = nullptr;
  decltype(&::cublasLtMatrixLayoutDestroy) destroy_layout = nullptr;
  decltype(&::cublasLtMatmulPreferenceCreate) create_preference = nullptr;
  decltype(&::cublasLtMatmulPreferenceDestroy) destroy_preference = nullptr;
  decltype(&::cublasLtMatmulPreferenceSetAttribute) set_preference = nullptr;

  /// Empty when all were found, else what was not.
  std::string load() {
    const std::string name = "libcublasLt.so." + std::to_string(CUBLAS_VER_MAJOR);
    // Never closed: the library does not bear it.
    void* handle = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) return dlerror();
    const auto find = [&](auto& function, const char* symbol) {
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(handle, symbol));
      return function != nullptr;
    };
    const bool all = find(create, "cublasLtCreate") && find(destroy, "cublasLtDestroy") && find(version, "cublasLtGetVersion") &&
                     find(status_text, "cublasLtGetStatusString") && find(matmul, "cublasLtMatmul") &&
                     find(heuristic, "cublasLtMatmulAlgoGetHeuristic") && find(create_product, "cublasLtMatmulDescCreate") &&
                     find(destroy_product, "cublasLtMatmulDescDestroy") && find(set_product, "cublasLtMatmulDescSetAttribute") &&
                     find(create_layout, "cublasLtMatrixLayoutCreate") && find(destroy_layout, "cublasLtMatrixLayoutDestroy") &&
                     find(create_preference, "cublasLtMatmulPreferenceCreate") &&
                     find(destroy_preference, "cublasLtMatmulPreferenceDestroy") &&
                     find(set_preference, "cublasLtMatmulPreferenceSetAttribute");
    return all ? "" : name + " lacks a function of cublasLt.h";
  }
};

cudaDataType_t type_of(DType t) {
  switch (t) {
    case DType::f32: return CUDA_R_32F;
    case DType::bf16: return CUDA_R_16BF;
    case DType::f16: return CUDA_R_16F;
    default: kernels::argument_refused("linear: f32, bf16 or f16", static_cast<int64_t>(t));
  }
}

/// One product in the library's terms: extents, transpositions, operands.
struct Call {
  const char* name;
  int64_t m, n, k;
  bool transposed_a, transposed_b;
  Input a, b;
  Output d;
  const void* bias = nullptr;  ///< of d's type, one a row of D
  bool accumulate = false;
};

/// What an algorithm depends on.
struct Key {
  int64_t m, n, k;
  bool transposed_a, transposed_b, bias, accumulate;
  DType factors, result;
  int align_a, align_b, align_d;
  int64_t workspace;
  auto operator<=>(const Key&) const = default;
};

/// The largest power of two up to 256 that divides an address.
int alignment(const void* p) {
  int bytes = 256;
  while (reinterpret_cast<uintptr_t>(p) % static_cast<uintptr_t>(bytes) != 0) bytes /= 2;
  return bytes;
}

/// y[rows,width] = y + bias, where the library cannot add a bias of its type.
struct AddedBias {
  Output y;
  Input bias;
  int64_t width;
  template <int N>
  SHARDLAB_DEVICE void at(int64_t i) const {
    put(y, i, values_at<N>(Input(y), i) + values_at<N>(bias, i % width));
  }
};

class LibraryMatmul final : public Matmul {
 public:
  LibraryMatmul(const Library& library, cublasLtHandle_t handle, bool tf32) : lt_(library), handle_(handle), tf32_(tf32) {
    const size_t version = lt_.version();
    name_ = "cublasLt " + std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
            std::to_string(version % 100);
  }
  LibraryMatmul(const LibraryMatmul&) = delete;
  LibraryMatmul& operator=(const LibraryMatmul&) = delete;
  ~LibraryMatmul() override {
    for (auto& [key, plan] : plans_) release(plan);
    lt_.destroy(handle_);
  }

  void forward(const LinearForward& a, Stream s) override {
    expect_type(a.w.dtype, a.x.dtype, false, "linear: x and w are of one type");
    expect_type(a.y.dtype, a.x.dtype, true, "linear: y is f32 or of x's type");
    const bool fused = a.bias.data != nullptr && a.bias.dtype == a.y.dtype;
    multiply({.name = "linear_forward",
              .m = a.out,
              .n = a.rows,
              .k = a.in,
              .transposed_a = true,
              .transposed_b = false,
              .a = a.w,
              .b = a.x,
              .d = a.y,
              .bias = fused ? a.bias.data : nullptr},
             a.scratch, s);
    if (a.bias.data == nullptr || fused) return;
    const bool wide = aligned({a.y.data, a.bias.data}) && a.out % 4 == 0;
    elementwise<4>("linear_bias", AddedBias{a.y, a.bias, a.out}, a.rows * a.out, wide, s);
  }
  void input(const LinearInput& a, Stream s) override {
    expect_type(a.w.dtype, a.dy.dtype, false, "linear: dy and w are of one type");
    expect_type(a.dx.dtype, a.dy.dtype, true, "linear: dx is f32 or of dy's type");
    multiply({.name = "linear_input",
              .m = a.in,
              .n = a.rows,
              .k = a.out,
              .transposed_a = false,
              .transposed_b = false,
              .a = a.w,
              .b = a.dy,
              .d = a.dx},
             a.scratch, s);
  }
  void weight(const LinearWeight& a, Stream s) override {
    expect_type(a.dy.dtype, a.x.dtype, false, "linear: x and dy are of one type");
    expect_type(a.dw.dtype, a.x.dtype, true, "linear: dw is f32 or of x's type");
    multiply({.name = "linear_weight",
              .m = a.in,
              .n = a.out,
              .k = a.tokens.rows(),
              .transposed_a = false,
              .transposed_b = true,
              .a = a.x,
              .b = a.dy,
              .d = a.dw,
              .accumulate = a.accumulate},
             a.scratch, s);
  }
  std::string_view name() const override { return name_; }

 private:
  struct Plan {
    cublasLtMatmulDesc_t product = nullptr;
    cublasLtMatrixLayout_t a = nullptr, b = nullptr, d = nullptr;
    cublasLtMatmulAlgo_t algorithm{};
    cublasStatus_t status = CUBLAS_STATUS_SUCCESS;  ///< of the first step that failed
  };

  void multiply(const Call& c, const Scratch& scratch, Stream s) {
    if (c.m == 0 || c.n == 0) return;
    Plan& plan = plan_for(c, scratch.bytes);
    if (plan.status != CUBLAS_STATUS_SUCCESS) return report(c, plan.status, s);
    cublasStatus_t status = CUBLAS_STATUS_SUCCESS;
    if (c.bias != nullptr) status = lt_.set_product(plan.product, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &c.bias, sizeof c.bias);
    const float one = 1.0f, old = c.accumulate ? 1.0f : 0.0f;
    if (status == CUBLAS_STATUS_SUCCESS)
      status = lt_.matmul(handle_, plan.product, &one, c.a.data, plan.a, c.b.data, plan.b, &old, c.d.data, plan.d, c.d.data, plan.d,
                          &plan.algorithm, scratch.data, static_cast<size_t>(scratch.bytes), static_cast<cudaStream_t>(s.handle));
    report(c, status, s);
  }

  void report(const Call& c, cublasStatus_t status, Stream s) const {
    if (status != CUBLAS_STATUS_SUCCESS) s.check->failed(c.name, "cublasLt", status, lt_.status_text(status));
  }

  Plan& plan_for(const Call& c, int64_t workspace) {
    const Key key{c.m,          c.n,       c.k,       c.transposed_a,      c.transposed_b,      c.bias != nullptr,
                  c.accumulate, c.a.dtype, c.d.dtype, alignment(c.a.data), alignment(c.b.data), alignment(c.d.data),
                  workspace};
    const auto [at, fresh] = plans_.try_emplace(key);
    if (fresh) at->second.status = make(c, key, at->second);
    return at->second;
  }

  /// Describes the product and asks the library for its best algorithm.
  cublasStatus_t make(const Call& c, const Key& key, Plan& plan) {
    const cublasComputeType_t compute = tf32_ && key.factors == DType::f32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F;
    cublasStatus_t status = lt_.create_product(&plan.product, compute, CUDA_R_32F);
    const auto then = [&](auto step) {
      if (status == CUBLAS_STATUS_SUCCESS) status = step();
    };
    const auto set = [&](cublasLtMatmulDescAttributes_t attribute, const auto& value) {
      then([&] { return lt_.set_product(plan.product, attribute, &value, sizeof value); });
    };
    const auto matrix = [&](cublasLtMatrixLayout_t& layout, DType type, int64_t rows, int64_t columns) {
      then([&] {
        return lt_.create_layout(&layout, type_of(type), static_cast<uint64_t>(rows), static_cast<uint64_t>(columns), rows);
      });
    };
    const cublasOperation_t turn_a = c.transposed_a ? CUBLAS_OP_T : CUBLAS_OP_N,
                            turn_b = c.transposed_b ? CUBLAS_OP_T : CUBLAS_OP_N;
    set(CUBLASLT_MATMUL_DESC_TRANSA, turn_a);
    set(CUBLASLT_MATMUL_DESC_TRANSB, turn_b);
    if (c.bias != nullptr) {
      const cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_BIAS;
      const cudaDataType_t type = type_of(c.d.dtype);
      set(CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue);
      set(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, type);
      set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, c.bias);
    }
    matrix(plan.a, c.a.dtype, c.transposed_a ? c.k : c.m, c.transposed_a ? c.m : c.k);
    matrix(plan.b, c.b.dtype, c.transposed_b ? c.n : c.k, c.transposed_b ? c.k : c.n);
    matrix(plan.d, c.d.dtype, c.m, c.n);
    then([&] { return choose(key, plan); });
    return status;
  }

  cublasStatus_t choose(const Key& key, Plan& plan) {
    cublasLtMatmulPreference_t preference = nullptr;
    cublasStatus_t status = lt_.create_preference(&preference);
    const auto set = [&](cublasLtMatmulPreferenceAttributes_t attribute, const auto& value) {
      if (status == CUBLAS_STATUS_SUCCESS) status = lt_.set_preference(preference, attribute, &value, sizeof value);
    };
    set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, static_cast<uint64_t>(key.workspace));
    set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, static_cast<uint32_t>(key.align_a));
    set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, static_cast<uint32_t>(key.align_b));
    set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, static_cast<uint32_t>(key.align_d));
    set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, static_cast<uint32_t>(key.align_d));
    cublasLtMatmulHeuristicResult_t best{};
    int found = 0;
    if (status == CUBLAS_STATUS_SUCCESS)
      status = lt_.heuristic(handle_, plan.product, plan.a, plan.b, plan.d, plan.d, preference, 1, &best, &found);
    if (status == CUBLAS_STATUS_SUCCESS && found == 0) status = CUBLAS_STATUS_NOT_SUPPORTED;
    if (preference != nullptr) lt_.destroy_preference(preference);
    plan.algorithm = best.algo;
    return status;
  }

  void release(const Plan& plan) {
    for (const cublasLtMatrixLayout_t layout : {plan.a, plan.b, plan.d})
      if (layout != nullptr) lt_.destroy_layout(layout);
    if (plan.product != nullptr) lt_.destroy_product(plan.product);
  }

  const Library lt_;
  const cublasLtHandle_t handle_;
  const bool tf32_;
  std::string name_;
  std::map<Key, Plan> plans_;
};

}  // namespace

std::unique_ptr<Matmul> matmul(const MatmulOptions& options, LaunchCheck& check) {
  Library library;
  const std::string missing = library.load();
  if (!missing.empty()) {
    check.failed("matmul", "cublasLt", -1, missing);
    return nullptr;
  }
  cublasLtHandle_t handle = nullptr;
  const cublasStatus_t status = library.create(&handle);
  if (status != CUBLAS_STATUS_SUCCESS) {
    check.failed("matmul", "cublasLt", status, library.status_text(status));
    return nullptr;
  }
  return std::make_unique<LibraryMatmul>(library, handle, options.tf32);
}

}  // namespace shardlab::gpu::SHARDLAB_GPU_VARIANT
