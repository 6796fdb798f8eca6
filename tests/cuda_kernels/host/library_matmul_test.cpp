// Linear by cuBLASLt, on a library that carries out on the host what it is described: its numbers, what it is asked, who is told
// when it cannot.
#include "kernels/cuda/library_matmul.h"

#include <cstddef>
#include <set>

#include "kernels/cuda/launches.h"
#include "tests/cuda_kernels/linear_support.h"
#include "tests/cuda_runtime/fake_cublaslt.h"
#include "tests/namespaces.h"

#if __has_include(<cublasLt.h>)
#define SHARDLAB_TEST_CUBLASLT_HEADER 1
#include <cublasLt.h>
#endif

namespace shardlab::testing::of_library_matmul {
namespace {

/// What was told, in words.
class Told final : public gpu::LaunchCheck {
 public:
  void failed(std::string_view kernel, std::string_view library, int code, std::string_view text) override {
    said.push_back(fmt::format("{} {} {}: {}", kernel, library, code, text));
  }
  std::vector<std::string> said;
};

/// A Matmul on a fake library.
struct Rig {
  explicit Rig(bool tf32 = false) : matmul(gpu::library_matmul(fake, {.tf32 = tf32}, gpu::emulated::add_bias, told)) {}
  std::shared_ptr<FakeCublasLt> fake = std::make_shared<FakeCublasLt>();
  Told told;
  std::unique_ptr<gpu::Matmul> matmul;
};

std::vector<std::string> texts(const FakeCublasLt& fake) {
  std::vector<std::string> all;
  for (const FakeCublasLt::Product& p : fake.products) all.push_back(p.text());
  return all;
}

}  // namespace

TEST_CASE("cuBLASLt: what it is described is linear, forward and back, in every type, with bias and accumulation") {
  Rig rig;
  // An algorithm that spoils all the workspace that it was promised.
  rig.fake->algorithms = {{.workspace = 1 << 20}};
  for (const DType t : kActivationTypes)
    for (const DType result : {t, DType::f32}) equals_fp64({rig.matmul.get()}, t, result);
  REQUIRE(rig.told.said.empty());
  REQUIRE(rig.fake->faults.empty());
  REQUIRE(rig.matmul->name() == "cublasLt 13.1.0");
  std::set<std::string> kinds;
  for (const FakeCublasLt::Product& p : rig.fake->products) {
    REQUIRE(p.workspace == 1 << 20);
    kinds.insert(p.text().substr(p.text().find(' ')));
  }
  // Three ways by three types by two results, of which fp32's are one; forward also with a bias of the result's type (here fp32),
  // weights also added to.
  REQUIRE(kinds.size() == 5 * 5 - 2);
}

TEST_CASE("cuBLASLt: products in its terms, and a plan of each kept") {
  Rig rig;
  const LinearShape s{2, 5, 8, 3};
  const LinearInputs in = inputs(s, DType::bf16);
  for (int i = 0; i < 2; ++i) {
    forward({rig.matmul.get()}, in, s, DType::bf16, DType::f32, true);
    input_gradient({rig.matmul.get()}, in, s, DType::bf16, DType::bf16);
    const Floats old(static_cast<size_t>(s.out * s.in), 1.0f);
    weight_gradient({rig.matmul.get()}, in, s, DType::bf16, DType::f32, &old);
  }
  const std::vector<std::string> once{"3x10x8 TN bf16 f32 +bias", "8x10x3 NN bf16 bf16", "8x3x10 NT bf16 f32 +old"};
  std::vector<std::string> twice = once;
  twice.insert(twice.end(), once.begin(), once.end());
  REQUIRE(texts(*rig.fake) == twice);
  REQUIRE(rig.fake->proposed == 3);
  rig.matmul.reset();
  REQUIRE(rig.fake->live_descriptors() == 0);
  REQUIRE(rig.fake->live_handles() == 0);
}

TEST_CASE("cuBLASLt: a bias that is not of the result's type is added by a kernel of our own") {
  Rig rig;
  const LinearShape s{1, 6, 16, 8};
  const LinearInputs in = inputs(s, DType::bf16);
  const Floats without = forward({rig.matmul.get()}, in, s, DType::bf16, DType::bf16, false);
  const Floats with = forward({rig.matmul.get()}, in, s, DType::bf16, DType::bf16, true);  // the bias is fp32
  REQUIRE(texts(*rig.fake) == std::vector<std::string>(2, "8x6x16 TN bf16 bf16"));
  for (size_t i = 0; i < with.size(); ++i)
    REQUIRE(with[i] == as_stored(without[i] + in.bias[i % static_cast<size_t>(s.out)], DType::bf16));
}

TEST_CASE("cuBLASLt: tf32 is for fp32 factors, and where it was asked for") {
  const LinearShape s{1, 9, 40, 12};
  for (const bool tf32 : {false, true}) {
    Rig rig(tf32);
    for (const DType t : kActivationTypes) {
      forward({rig.matmul.get()}, inputs(s, t), s, t, t, false);
      REQUIRE(rig.fake->products.back().tf32 == (tf32 && t == DType::f32));
    }
    REQUIRE(rig.fake->faults.empty());
  }
}

TEST_CASE("cuBLASLt: arrays are as aligned as they were said to be, whatever plan was made before") {
  Rig rig;
  rig.fake->algorithms = {{.alignment = 16}, {.alignment = 2}};  // a fast one that needs 16 bytes, a slow one that does not
  const LinearShape s{1, 8, 16, 16};
  const LinearInputs in = inputs(s, DType::bf16);
  std::vector<size_t> taken;
  for (const int shift : {0, 1, 8, 0}) {
    const Array x(in.x, DType::bf16, shift), w(in.w, DType::bf16), y(Array::poison(s.rows() * s.out), DType::bf16);
    const Lent workspace(4096);
    rig.matmul->forward({.x = x.in(), .w = w.in(), .y = y.out(), .rows = s.rows(), .in = s.in, .out = s.out, .scratch = workspace},
                        stream());
    taken.push_back(rig.fake->products.back().algorithm);
  }
  REQUIRE(taken == std::vector<size_t>{0, 1, 0, 0});
  REQUIRE(rig.fake->faults.empty());
  REQUIRE(rig.told.said.empty());
}

TEST_CASE("cuBLASLt: a proposal that fails, or wants more workspace than the plan lends, is passed over") {
  Rig rig;
  const LinearShape s{1, 8, 16, 16};
  const LinearInputs in = inputs(s, DType::f16);
  rig.fake->algorithms = {{.workspace = 0, .status = gpu::cublaslt::kNotSupported}, {.workspace = 2 << 20}, {.workspace = 1 << 20}};
  for (const bool beyond : {false, true}) {
    rig.fake->beyond_workspace = beyond;
    rig.matmul = gpu::library_matmul(rig.fake, {}, gpu::emulated::add_bias, rig.told);
    forward({rig.matmul.get()}, in, s, DType::f16, DType::f16, false);
    REQUIRE(rig.fake->products.back().algorithm == 2);
  }
  REQUIRE(rig.told.said.empty());
}

TEST_CASE("cuBLASLt: where no algorithm is found, the shape, its types and the remedy are told, each time") {
  Rig rig;
  rig.fake->algorithms = {{.workspace = 4 << 20}};
  const LinearShape s{2, 5, 8, 3};
  const LinearInputs in = inputs(s, DType::bf16);
  const Array x(in.x, DType::bf16), dy(in.dy, DType::bf16, 1), dw(Array::poison(s.out * s.in), DType::f32);
  const Lent workspace(1 << 20);
  const gpu::LinearWeight args{.x = x.in(),
                               .dy = dy.in(),
                               .dw = dw.out(),
                               .tokens = {s.sequences, s.tokens, {}},
                               .in = s.in,
                               .out = s.out,
                               .accumulate = true,
                               .scratch = workspace};
  for (int i = 0; i < 2; ++i) rig.matmul->weight(args, {stream().handle, &rig.told});
  REQUIRE(rig.told.said.size() == 2);
  REQUIRE(rig.told.said[0] ==
          "linear_weight cublasLt 15: CUBLAS_STATUS_NOT_SUPPORTED for 8x3 += 8x10 * 3x10 transposed, bf16 to f32, arrays aligned "
          "to 256, 2 and 256 bytes, 1048576 bytes of workspace; canonical: true multiplies by own kernels, which take every shape");
  REQUIRE(rig.told.said[1] == rig.told.said[0]);
  REQUIRE(rig.fake->products.empty());
  // Other failures name the shape too, and no remedy that would not help.
  rig.fake->algorithms = {{}};
  rig.fake->multiply_status = gpu::cublaslt::kExecutionFailed;
  const Array dx(Array::poison(s.rows() * s.in), DType::bf16), w(in.w, DType::bf16);
  rig.matmul->input({.dy = dy.in(), .w = w.in(), .dx = dx.out(), .rows = s.rows(), .in = s.in, .out = s.out, .scratch = workspace},
                    {stream().handle, &rig.told});
  REQUIRE(rig.told.said[2].starts_with("linear_input cublasLt 13: CUBLAS_STATUS_EXECUTION_FAILED for 8x10 = 8x3 * 3x10, bf16 to "));
  REQUIRE(rig.told.said[2].find("canonical") == std::string::npos);
  rig.matmul.reset();
  REQUIRE(rig.fake->live_descriptors() == 0);  // also of plans that were made in part
}

TEST_CASE("cuBLASLt: no handle, no Matmul, and the reason") {
  Told told;
  auto fake = std::make_shared<FakeCublasLt>();
  fake->create_status = 1;
  REQUIRE(gpu::library_matmul(fake, {}, gpu::emulated::add_bias, told) == nullptr);
  REQUIRE(told.said == std::vector<std::string>{"matmul cublasLt 1: CUBLAS_STATUS 1"});
}

TEST_CASE("cuBLASLt: empty products ask for nothing") {
  Rig rig;
  const LinearInputs in = inputs({1, 1, 4, 4}, DType::f32);
  const Array x(in.x, DType::f32), w(in.w, DType::f32), y(Floats{}, DType::f32);
  rig.matmul->forward({.x = x.in(), .w = w.in(), .y = y.out(), .rows = 0, .in = 4, .out = 4}, stream());
  REQUIRE(rig.fake->proposed == 0);
}

#ifdef SHARDLAB_TEST_CUBLASLT_HEADER
TEST_CASE("cuBLASLt: our numbers and structs are its header's") {
  using namespace gpu::cublaslt;
  const auto same = [](auto ours, auto theirs) { REQUIRE(static_cast<int>(ours) == static_cast<int>(theirs)); };
  same(DataType::kF32, CUDA_R_32F);
  same(DataType::kF16, CUDA_R_16F);
  same(DataType::kBF16, CUDA_R_16BF);
  same(Compute::kF32, CUBLAS_COMPUTE_32F);
  same(Compute::kTf32, CUBLAS_COMPUTE_32F_FAST_TF32);
  same(Turn::kNone, CUBLAS_OP_N);
  same(Turn::kTransposed, CUBLAS_OP_T);
  same(Epilogue::kNone, CUBLASLT_EPILOGUE_DEFAULT);
  same(Epilogue::kBias, CUBLASLT_EPILOGUE_BIAS);
  same(ProductName::kTurnA, CUBLASLT_MATMUL_DESC_TRANSA);
  same(ProductName::kTurnB, CUBLASLT_MATMUL_DESC_TRANSB);
  same(ProductName::kEpilogue, CUBLASLT_MATMUL_DESC_EPILOGUE);
  same(ProductName::kBias, CUBLASLT_MATMUL_DESC_BIAS_POINTER);
  same(ProductName::kBiasType, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE);
  same(PreferenceName::kMostWorkspace, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES);
  same(PreferenceName::kAlignmentA, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES);
  same(PreferenceName::kAlignmentB, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES);
  same(PreferenceName::kAlignmentC, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES);
  same(PreferenceName::kAlignmentD, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES);
  same(kInvalidValue, CUBLAS_STATUS_INVALID_VALUE);
  same(kExecutionFailed, CUBLAS_STATUS_EXECUTION_FAILED);
  same(kNotSupported, CUBLAS_STATUS_NOT_SUPPORTED);
  REQUIRE(sizeof(gpu::CublasLtAlgorithm) == sizeof(cublasLtMatmulAlgo_t));
  REQUIRE(sizeof(gpu::CublasLtProposal) == sizeof(cublasLtMatmulHeuristicResult_t));
  REQUIRE(offsetof(gpu::CublasLtProposal, workspace) == offsetof(cublasLtMatmulHeuristicResult_t, workspaceSize));
  REQUIRE(offsetof(gpu::CublasLtProposal, status) == offsetof(cublasLtMatmulHeuristicResult_t, state));
  REQUIRE(offsetof(gpu::CublasLtProposal, waves) == offsetof(cublasLtMatmulHeuristicResult_t, wavesCount));
}
#endif

TEST_CASE("cuBLASLt: the real library takes the descriptions of a product, without a device") {
  auto opened = gpu::real_cublaslt();
  if (!opened.ok()) {
    WARN("skipped: " << opened.error().message);
    return;
  }
  gpu::CublasLtApi& library = **opened;
  using namespace gpu::cublaslt;
  REQUIRE(library.version() >= 120000);
  REQUIRE(library.describe(kNotSupported) == "CUBLAS_STATUS_NOT_SUPPORTED");
  gpu::CublasLtDescriptor product = nullptr, layout = nullptr, preference = nullptr;
  for (const Compute compute : {Compute::kF32, Compute::kTf32}) {
    REQUIRE(library.create_product(&product, compute) == 0);
    const Turn turn = Turn::kTransposed;
    const Epilogue epilogue = Epilogue::kBias;
    const DataType type = DataType::kBF16;
    const void* bias = &product;
    REQUIRE(library.set(product, ProductName::kTurnA, &turn, sizeof turn) == 0);
    REQUIRE(library.set(product, ProductName::kTurnB, &turn, sizeof turn) == 0);
    REQUIRE(library.set(product, ProductName::kEpilogue, &epilogue, sizeof epilogue) == 0);
    REQUIRE(library.set(product, ProductName::kBiasType, &type, sizeof type) == 0);
    REQUIRE(library.set(product, ProductName::kBias, &bias, sizeof bias) == 0);
    REQUIRE(library.set(product, ProductName::kTurnA, &turn, 1) == kInvalidValue);  // it does look
    REQUIRE(library.destroy_product(product) == 0);
  }
  for (const DataType type : {DataType::kF32, DataType::kF16, DataType::kBF16}) {
    REQUIRE(library.create_layout(&layout, type, 8, 10, 8) == 0);
    REQUIRE(library.destroy_layout(layout) == 0);
  }
  REQUIRE(library.create_preference(&preference) == 0);
  const uint64_t workspace = 32 << 20;
  const uint32_t alignment = 16;
  REQUIRE(library.set(preference, PreferenceName::kMostWorkspace, &workspace, sizeof workspace) == 0);
  for (const PreferenceName name :
       {PreferenceName::kAlignmentA, PreferenceName::kAlignmentB, PreferenceName::kAlignmentC, PreferenceName::kAlignmentD})
    REQUIRE(library.set(preference, name, &alignment, sizeof alignment) == 0);
  REQUIRE(library.destroy_preference(preference) == 0);
}

}  // namespace shardlab::testing::of_library_matmul
