#include "kernels/cuda/library_matmul.h"

#include <fmt/format.h>

#include <array>
#include <map>
#include <utility>

#include "kernels/checks.h"
#include "kernels/cuda/cublaslt_api.h"

namespace shardlab::gpu {

using namespace cublaslt;

namespace {

DataType type_of(DType t) {
  switch (t) {
    case DType::f32: return DataType::kF32;
    case DType::bf16: return DataType::kBF16;
    case DType::f16: return DataType::kF16;
    default: kernels::argument_refused("linear: f32, bf16 or f16", static_cast<int64_t>(t));
  }
}

/// Factors are of one type, the result of it or of f32.
void expect_types(DType a, DType b, DType d, const char* rule) {
  kernels::expect(a == b && (d == a || d == DType::f32), rule, static_cast<int64_t>(d));
}

/// One product in the library's terms: extents, transpositions, operands.
struct Product {
  const char* name;
  int64_t m, n, k;
  bool transposed_a, transposed_b;
  Input a, b;
  Output d;
  const void* bias = nullptr;  ///< of d's type, one a row of D
  bool accumulate = false;
};

/// The largest power of two up to 256 that divides an address.
uint32_t alignment(const void* p) {
  uint32_t bytes = 256;
  while (reinterpret_cast<uintptr_t>(p) % bytes != 0) bytes /= 2;
  return bytes;
}

/// The properties of a product on which the choice of an algorithm depends.
struct Key {
  int64_t m, n, k;
  bool transposed_a, transposed_b, accumulate;
  DType factors, result;
  uint32_t align_a, align_b, align_d, align_bias;  ///< of no bias: 0
  int64_t workspace;
  auto operator<=>(const Key&) const = default;
};

Key key_of(const Product& p, int64_t workspace) {
  return {p.m,
          p.n,
          p.k,
          p.transposed_a,
          p.transposed_b,
          p.accumulate,
          p.a.dtype,
          p.d.dtype,
          alignment(p.a.data),
          alignment(p.b.data),
          alignment(p.d.data),
          p.bias != nullptr ? alignment(p.bias) : 0,
          workspace};
}

/// "64x128 += 64x32 transposed * 32x128, bf16 to f32, with bias, arrays aligned to 256, 16 and 2 bytes, 33554432
/// bytes of workspace".
std::string describe(const Key& k) {
  const auto factor = [](int64_t rows, int64_t columns, bool turned) {
    return turned ? fmt::format("{}x{} transposed", columns, rows) : fmt::format("{}x{}", rows, columns);
  };
  return fmt::format("{}x{} {} {} * {}, {} to {}{}, arrays aligned to {}, {} and {} bytes, {} bytes of workspace", k.m, k.n,
                     k.accumulate ? "+=" : "=", factor(k.m, k.k, k.transposed_a), factor(k.k, k.n, k.transposed_b),
                     name_of(k.factors), name_of(k.result), k.align_bias > 0 ? ", with bias" : "", k.align_a, k.align_b, k.align_d,
                     k.workspace);
}

class LibraryMatmul final : public Matmul {
 public:
  LibraryMatmul(std::shared_ptr<CublasLtApi> library, CublasLtHandle handle, bool tf32, AddBias add_bias)
      : library_(std::move(library)),
        handle_(handle),
        tf32_(tf32),
        add_bias_(add_bias),
        name_("cublasLt " + cublaslt_version_text(library_->version())) {}
  LibraryMatmul(const LibraryMatmul&) = delete;
  LibraryMatmul& operator=(const LibraryMatmul&) = delete;
  ~LibraryMatmul() override {
    for (const auto& [key, plan] : plans_) release(plan);
    library_->destroy(handle_);
  }

  void forward(const LinearForward& a, Stream s) override {
    expect_types(a.x.dtype, a.w.dtype, a.y.dtype, "linear: x and w are of one type, y of it or f32");
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
    if (a.bias.data != nullptr && !fused) add_bias_(a.y, a.bias, a.rows, a.out, s);
  }
  void input(const LinearInput& a, Stream s) override {
    expect_types(a.dy.dtype, a.w.dtype, a.dx.dtype, "linear: dy and w are of one type, dx of it or f32");
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
    expect_types(a.x.dtype, a.dy.dtype, a.dw.dtype, "linear: x and dy are of one type, dw of it or f32");
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
    CublasLtDescriptor product = nullptr, a = nullptr, b = nullptr, d = nullptr;
    CublasLtAlgorithm algorithm;
    CublasStatus status = 0;  ///< of the first step that failed
  };

  void multiply(const Product& p, const Scratch& scratch, Stream s) {
    if (p.m == 0 || p.n == 0) return;
    const Key key = key_of(p, scratch.bytes);
    const auto [at, fresh] = plans_.try_emplace(key);
    Plan& plan = at->second;
    if (fresh) plan.status = make(p, key, plan);
    CublasStatus status = plan.status;
    if (status == 0 && p.bias != nullptr) status = library_->set(plan.product, ProductName::kBias, &p.bias, sizeof p.bias);
    CublasLtCall call = call_of(plan);
    call.a.data = p.a.data, call.b.data = p.b.data, call.data = p.d.data;
    call.beta = p.accumulate ? 1.0f : 0.0f;
    call.workspace = scratch.data, call.workspace_bytes = scratch.bytes;
    if (status == 0) status = library_->multiply(handle_, call, s.handle);
    if (status != 0) report(p, key, status, s);
  }

  void report(const Product& p, const Key& key, CublasStatus status, Stream s) const {
    std::string text = fmt::format("{} for {}", library_->describe(status), describe(key));
    if (status == kNotSupported) text += "; canonical: true multiplies by own kernels, which take every shape";
    s.check->failed(p.name, "cublasLt", status, text);
  }

  static CublasLtCall call_of(const Plan& plan) {
    CublasLtCall call;
    call.product = plan.product;
    call.a.layout = plan.a, call.b.layout = plan.b, call.d = plan.d;
    call.algorithm = plan.algorithm;
    return call;
  }

  /// Describes the product and asks the library for its best algorithm.
  CublasStatus make(const Product& p, const Key& key, Plan& plan) {
    CublasStatus status =
        library_->create_product(&plan.product, tf32_ && key.factors == DType::f32 ? Compute::kTf32 : Compute::kF32);
    const auto set = [&](ProductName name, const auto& value) {
      if (status == 0) status = library_->set(plan.product, name, &value, sizeof value);
    };
    /// Dense: a column of the library's matrix is a row of ours.
    const auto matrix = [&](CublasLtDescriptor& layout, DType type, int64_t rows, int64_t columns) {
      if (status == 0) status = library_->create_layout(&layout, type_of(type), rows, columns, rows);
    };
    set(ProductName::kTurnA, p.transposed_a ? Turn::kTransposed : Turn::kNone);
    set(ProductName::kTurnB, p.transposed_b ? Turn::kTransposed : Turn::kNone);
    if (p.bias != nullptr) {
      set(ProductName::kEpilogue, Epilogue::kBias);
      set(ProductName::kBiasType, type_of(p.d.dtype));
      set(ProductName::kBias, p.bias);
    }
    matrix(plan.a, p.a.dtype, p.transposed_a ? p.k : p.m, p.transposed_a ? p.m : p.k);
    matrix(plan.b, p.b.dtype, p.transposed_b ? p.n : p.k, p.transposed_b ? p.k : p.n);
    matrix(plan.d, p.d.dtype, p.m, p.n);
    return status == 0 ? choose(key, plan) : status;
  }

  /// Takes the first of the library's proposals that stands and keeps to the workspace.
  CublasStatus choose(const Key& key, Plan& plan) {
    constexpr int kMost = 4;
    CublasLtDescriptor preference = nullptr;
    CublasStatus status = library_->create_preference(&preference);
    const auto set = [&](PreferenceName name, const auto& value) {
      if (status == 0) status = library_->set(preference, name, &value, sizeof value);
    };
    set(PreferenceName::kMostWorkspace, static_cast<uint64_t>(key.workspace));
    set(PreferenceName::kAlignmentA, key.align_a);
    set(PreferenceName::kAlignmentB, key.align_b);
    set(PreferenceName::kAlignmentC, key.align_d);
    set(PreferenceName::kAlignmentD, key.align_d);
    std::array<CublasLtProposal, kMost> proposals{};
    int found = 0;
    if (status == 0) status = library_->propose(handle_, call_of(plan), preference, kMost, proposals.data(), &found);
    if (preference != nullptr) library_->destroy_preference(preference);
    if (status != 0) return status;
    for (int i = 0; i < found; ++i) {
      const CublasLtProposal& proposal = proposals[static_cast<size_t>(i)];
      if (proposal.status != 0 || proposal.workspace > static_cast<uint64_t>(key.workspace)) continue;
      plan.algorithm = proposal.algorithm;
      return 0;
    }
    return kNotSupported;
  }

  void release(const Plan& plan) {
    for (const CublasLtDescriptor layout : {plan.a, plan.b, plan.d})
      if (layout != nullptr) library_->destroy_layout(layout);
    if (plan.product != nullptr) library_->destroy_product(plan.product);
  }

  const std::shared_ptr<CublasLtApi> library_;
  const CublasLtHandle handle_;
  const bool tf32_;
  const AddBias add_bias_;
  const std::string name_;
  std::map<Key, Plan> plans_;
};

}  // namespace

std::unique_ptr<Matmul> library_matmul(std::shared_ptr<CublasLtApi> library, const MatmulOptions& options, AddBias add_bias,
                                       LaunchCheck& check) {
  CublasLtHandle handle = nullptr;
  if (const CublasStatus status = library->create(&handle); status != 0) {
    check.failed("matmul", "cublasLt", status, library->describe(status));
    return nullptr;
  }
  return std::make_unique<LibraryMatmul>(std::move(library), handle, options.tf32, add_bias);
}

std::unique_ptr<Matmul> library_matmul(const MatmulOptions& options, AddBias add_bias, LaunchCheck& check) {
  auto library = real_cublaslt();
  if (library.ok()) return library_matmul(std::shared_ptr<CublasLtApi>(std::move(*library)), options, add_bias, check);
  check.failed("matmul", "cublasLt", -1, fmt::format("{}: {}", library.error().message, library.error().hint));
  return nullptr;
}

}  // namespace shardlab::gpu
