// Attention by cuDNN: what it is asked, that this is attention, who falls back on what, and what the real library says without a
// device.
#include <fmt/format.h>

#include <cmath>
#include <memory>
#include <set>

#include "kernels/cuda/library_attention.h"
#include "kernels/cuda/number.h"
#include "plan/base/philox.h"
#include "plan/device_scratch.h"
#include "plan/memory.h"
#include "tests/cuda_runtime/fake_cudnn.h"
#include "tests/cuda_runtime/rig.h"
#include "tests/namespaces.h"
#include "tests/runtime/rig.h"
#include "tests/strategies/cases.h"
#include "tests/test.h"

#if __has_include(<cudnn.h>) && __has_include(<cuda_runtime.h>)
#define SHARDLAB_TEST_CUDNN_HEADER 1
#include <cudnn.h>
#endif

namespace shardlab::testing {

namespace {

using gpu::AttentionShape;
using Numbers = std::vector<uint16_t>;

uint16_t bits_of_value(float x, DType t) {
  using namespace gpu::emulated;
  return t == DType::bf16 ? rounded<bf16>(x).bits : rounded<f16>(x).bits;
}
float value_of_bits(uint16_t b, DType t) {
  using namespace gpu::emulated;
  return t == DType::bf16 ? value_of(bf16{b}) : value_of(f16{b});
}

Numbers random_numbers(int64_t n, DType t, uint32_t tensor) {
  Numbers out(static_cast<size_t>(n));
  for (size_t i = 0; i < out.size(); ++i)
    out[i] = bits_of_value(static_cast<float>(random_bits({5, RandomUse::kInitialise, tensor, 0}, i)) / 4294967296.0f * 2 - 1, t);
  return out;
}

class ThrowingLaunchCheck final : public gpu::LaunchCheck {
 public:
  void failed(std::string_view kernel, std::string_view library, int code, std::string_view text) override {
    throw WorldError(fmt::format("{} {} {} {}", kernel, library, code, text), "");
  }
};

/// One op forward and back; arrays begin poisoned.
struct Attended {
  Numbers o, dqkv;
  std::vector<float> lse;
};

Attended attended(gpu::LibraryAttention* library, const AttentionShape& s, DType t) {
  const int64_t tokens = s.sequences * s.tokens;
  Numbers qkv = random_numbers(tokens * s.qkv_width(), t, 1), dout = random_numbers(tokens * s.out_width(), t, 2);
  Attended a{Numbers(dout.size(), 0xffff), Numbers(qkv.size(), 0xffff),
             std::vector<float>(static_cast<size_t>(s.sequences * s.heads * s.tokens), NAN)};
  ThrowingLaunchCheck check;
  const gpu::Stream stream{nullptr, &check};
  gpu::AttentionForward f{s, {qkv.data(), t}, {a.o.data(), t}, a.lse.data()};
  gpu::AttentionInput i{s, {dout.data(), t}, {a.o.data(), t}, a.lse.data(), {qkv.data(), t}, {a.dqkv.data(), t}, {}};
  const int64_t bytes = library != nullptr ? gpu::LibraryAttention::scratch_bytes(s, true) : gpu::scratch_bytes(i);
  std::vector<std::byte> lent(static_cast<size_t>(bytes + kScratchAlignment), std::byte{0xff});
  void* at = lent.data();
  size_t room = lent.size();
  REQUIRE(std::align(kScratchAlignment, static_cast<size_t>(bytes), at, room) != nullptr);
  i.scratch = {at, bytes};
  if (library != nullptr) {
    library->forward(f, i.scratch, stream);
    library->input(i, i.scratch, stream);
  } else {
    gpu::emulated_kernels().attention_forward(f, stream);
    gpu::emulated_kernels().attention_input(i, stream);
  }
  return a;
}

double furthest(const Numbers& a, const Numbers& b, DType t) {
  REQUIRE(a.size() == b.size());
  double most = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    const double x = value_of_bits(a[i], t), y = value_of_bits(b[i], t);
    REQUIRE(std::isfinite(x));
    most = std::max(most, std::abs(x - y));
  }
  return most;
}

// Each head its own key; groups of one and of several; one key for all. Tokens that fill no tile, several sequences.
const AttentionShape kShapes[] = {{2, 7, 3, 3, 8}, {2, 9, 4, 2, 16}, {1, 12, 4, 2, 8}, {3, 5, 4, 1, 8}, {1, 33, 1, 1, 64}};

}  // namespace

TEST_CASE("the graphs that cuDNN is asked for") {
  const AttentionShape every{2, 64, 4, 4, 64}, grouped{2, 64, 8, 2, 64};
  std::string text;
  for (const AttentionShape& s : {every, grouped}) {
    const AttentionCalls calls = gpu::cudnn::calls_of(s);
    text +=
        fmt::format("== {} sequences of {} tokens, {} heads, {} of keys: {} calls, backward {} + {} + {} bytes\n", s.sequences,
                    s.tokens, s.heads, s.kv_heads, calls.calls, calls.dq_bytes(), calls.row_sum_bytes(), calls.library_bytes(true));
    text += "-- forward\n" + to_text(gpu::cudnn::forward_graph(s, DType::bf16, 91900));
    text += "-- backward\n" + to_text(gpu::cudnn::backward_graph(s, DType::bf16, 91900));
  }
  REQUIRE_GOLDEN("cuda/attention_graphs.txt", text);
}

TEST_CASE("what cuDNN is told, attribute by attribute") {
  FakeCudnn cudnn;
  {
    auto library = gpu::LibraryAttention::create(cudnn);
    REQUIRE(library.ok());
    REQUIRE((*library)->prepare({2, 64, 8, 2, 64}, DType::f16, false).ok());
    REQUIRE((*library)->prepare({2, 64, 8, 2, 64}, DType::f16, false).ok());  // known: nothing is described again
    REQUIRE((*library)->name() == "cuDNN 9.19.0");
  }
  REQUIRE_GOLDEN("cuda/cudnn_descriptors.txt", cudnn.log);
  REQUIRE(cudnn.live_descriptors() == 0);
  REQUIRE(cudnn.live_handles() == 0);
}

TEST_CASE("the graphs are causal attention: carried out one by one they give what our own kernels give") {
#ifdef __SANITIZE_THREAD__
  WARN("skipped: the thread sanitizer cannot follow the fibers that the emulation runs kernels on");
  return;
#endif
  for (const DType t : {DType::bf16, DType::f16})
    for (const AttentionShape& s : kShapes) {
      INFO(name_of(t) << " sequences " << s.sequences << " tokens " << s.tokens << " heads " << s.heads << " kv_heads "
                      << s.kv_heads);
      FakeCudnn cudnn;
      auto library = gpu::LibraryAttention::create(cudnn);
      REQUIRE((*library)->prepare(s, t, false).ok());
      REQUIRE((*library)->prepare(s, t, true).ok());
      const Attended theirs = attended(library->get(), s, t), ours = attended(nullptr, s, t);
      const double step = t == DType::bf16 ? 1.0 / 256 : 1.0 / 2048;
      REQUIRE(furthest(theirs.o, ours.o, t) < 2 * step);
      for (size_t i = 0; i < ours.lse.size(); ++i) REQUIRE(theirs.lse[i] == Approx(ours.lse[i]).epsilon(1e-5).margin(1e-5));
      REQUIRE(furthest(theirs.dqkv, ours.dqkv, t) < 8 * step);
      // One call where heads have one stride, else one a sequence.
      const bool grouped = s.kv_heads != 1 && s.kv_heads != s.heads;
      REQUIRE(cudnn.executed == 2 * (grouped ? s.sequences : 1));
    }
}

TEST_CASE("what stands for minus infinity is what the version wants") {
  const AttentionShape s{1, 12, 2, 1, 8};
  REQUIRE(contains(to_text(gpu::cudnn::forward_graph(s, DType::bf16, 90800)), "never f32[1,1,1,1] = -3.4028235e+38"));
  REQUIRE(contains(to_text(gpu::cudnn::forward_graph(s, DType::bf16, 91900)), "never f32[1,1,1,1] = -inf"));
}

TEST_CASE("shapes that cuDNN is not asked for, with the reason") {
  const auto why = [](AttentionShape s, DType t, bool backward = false, int64_t version = 91900) {
    return gpu::cudnn::refusal(s, t, backward, version);
  };
  REQUIRE(why({1, 64, 4, 4, 64}, DType::bf16) == "");
  REQUIRE(contains(why({1, 64, 4, 4, 64}, DType::f32), "f32 is not multiplied on its tensor cores"));
  REQUIRE(why({1, 64, 4, 4, 70}, DType::bf16) == "head_dim 70 is no multiple of 8");
  REQUIRE(contains(why({1, 64, 4, 4, 64}, DType::bf16, false, 90500), "older than 9.6"));
  REQUIRE(contains(why({1, 64, 4, 4, 64}, DType::bf16, false, 91001), "wrong results"));
  REQUIRE(why({1, 1, 4, 4, 64}, DType::bf16) == "");
  REQUIRE(contains(why({1, 1, 4, 4, 64}, DType::bf16, true), "single token"));
}

TEST_CASE("the first engine that can be carried out in what is planned is taken; else each is named with what it lacks") {
  const AttentionShape s{1, 64, 4, 4, 64};
  const auto refused = [&](std::vector<FakeCudnn::Engine> engines) {
    FakeCudnn cudnn;
    cudnn.engines = std::move(engines);
    std::string text;
    {
      auto library = gpu::LibraryAttention::create(cudnn);
      const auto prepared = (*library)->prepare(s, DType::bf16, false);
      if (!prepared.ok()) text = prepared.error().message;
    }
    REQUIRE(cudnn.live_descriptors() == 0);
    return text;
  };
  REQUIRE(refused({{kLibraryWorkspace, 0}}) == "");
  REQUIRE(refused({{0, 3002}, {0, 0}}) == "");
  REQUIRE(refused({}) == "cuDNN 9.19.0 has no engine for it (none proposed)");
  REQUIRE(refused({{0, 3002}, {kLibraryWorkspace + 1, 0}}) ==
          "cuDNN 9.19.0 has no engine for it (status 3002; 33554433 bytes of workspace, of which 33554432 are planned)");
  FakeCudnn cudnn;
  cudnn.graph_status = 3001;
  auto library = gpu::LibraryAttention::create(cudnn);
  REQUIRE((*library)->prepare(s, DType::bf16, true).error().message == "cuDNN 9.19.0: the graph: status 3001");
  cudnn.create_status = 1001;
  REQUIRE(gpu::LibraryAttention::create(cudnn).error().code == ExitCode::kEnvironment);
}

namespace {

/// Two steps of a bf16 model whose heads cuDNN takes, on the GPU's own kernels but for attention.
struct Trained {
  std::vector<double> losses;
  std::set<std::string> notes;
  std::string refusal;
  int64_t peak = 0, planned = 0;
};

Trained trained(FakeCudnn* cudnn, AttentionBy by, bool canonical = false) {
  Case c = tiny_case(Family::kLlama);
  c.train.precision = Precision::kBf16;
  c.train.seq_len = 8;
  c.train.micro_batch = 2;
  c.train.global_batch_tokens = 16;
  c.canonical = canonical;
  c.backend = BackendKind::kCuda;
  c.transport = TransportKind::kOneGpu;
  c.attention = by;
  const PlacedPlan placed = lowered(c);
  FakeApi api;
  Trained t;
  RunOptions options;
  options.poison = true;
  options.timeout_s = 120;
  {
    FakeRun fake(placed, api, options,
                 {.canonical = canonical,
                  .attention = by,
                  .cudnn = cudnn,
                  .no_cudnn = cudnn == nullptr ? "libcudnn.so.9 was not found" : "",
                  .notes = &t.notes},
                 Behind::kEmulated);
    if (!fake.session.ok()) {
      t.refusal = fake.session.error().message;
      return t;
    }
    (*fake.session)->initialise_parameters();
    for (int step = 0; step < 2; ++step) t.losses.push_back((*fake.session)->step(step).loss.value());
    t.peak = (*fake.session)->ledger(0).peak(Space::kDevice);
    t.planned = memory_peak(*placed.plan, 0)[static_cast<size_t>(Space::kDevice)].peak_bytes;
  }
  REQUIRE(api.live_streams() == 0);
  return t;
}

}  // namespace

TEST_CASE("a case trains with cuDNN's attention as with our own; which it was is said, and the plan has room for it") {
#ifdef __SANITIZE_THREAD__
  WARN("skipped: the thread sanitizer cannot follow the fibers that the emulation runs kernels on");
  return;
#endif
  const Trained own = trained(nullptr, AttentionBy::kOwn);
  REQUIRE(own.losses.size() == 2);
  REQUIRE(own.notes == std::set<std::string>{"attention backward by own kernels", "attention forward by own kernels"});
  REQUIRE(own.peak == own.planned);

  FakeCudnn cudnn;
  const Trained theirs = trained(&cudnn, AttentionBy::kCudnn);
  REQUIRE(theirs.notes == std::set<std::string>{"attention backward by cuDNN 9.19.0", "attention forward by cuDNN 9.19.0"});
  REQUIRE(theirs.peak == theirs.planned);
  REQUIRE(theirs.peak > own.peak);
  REQUIRE(cudnn.executed > 0);
  REQUIRE(cudnn.live_descriptors() == 0);
  REQUIRE(cudnn.live_handles() == 0);
  for (size_t step = 0; step < 2; ++step) REQUIRE(theirs.losses[step] == Approx(own.losses[step]).epsilon(1e-2));

  // What auto falls back on is bit for bit what own does.
  const Trained without = trained(nullptr, AttentionBy::kAuto);
  REQUIRE(without.losses == own.losses);
  REQUIRE(without.notes.count("attention forward by own kernels (libcudnn.so.9 was not found)") == 1);
  FakeCudnn narrow;
  narrow.engines = {{0, 3002}};
  const Trained refused = trained(&narrow, AttentionBy::kAuto);
  REQUIRE(refused.losses == own.losses);
  REQUIRE(refused.notes.count("attention backward by own kernels (cuDNN 9.19.0 has no engine for it (status 3002))") == 1);
  FakeCudnn dead;
  dead.create_status = 1001;
  REQUIRE(trained(&dead, AttentionBy::kAuto).losses == own.losses);

  // Asked for by name it is refused.
  REQUIRE(contains(trained(&narrow, AttentionBy::kCudnn).refusal, "cannot run on cuDNN: cuDNN 9.19.0 has no engine for it"));
  FakeCudnn failing;
  failing.execute_status = 5000;
  REQUIRE(contains(world_error([&] { trained(&failing, AttentionBy::kAuto); }), "kernel attention_forward: cuDNN error 5000"));
}

#ifdef SHARDLAB_TEST_CUDNN_HEADER
TEST_CASE("our numbers of cuDNN are those of its header") {
  using namespace gpu::cudnn;
  const auto same = [](auto ours, int theirs) { REQUIRE(static_cast<int>(ours) == theirs); };
  same(Kind::kPointwise, CUDNN_BACKEND_POINTWISE_DESCRIPTOR);
  same(Kind::kEngine, CUDNN_BACKEND_ENGINE_DESCRIPTOR);
  same(Kind::kEngineConfig, CUDNN_BACKEND_ENGINECFG_DESCRIPTOR);
  same(Kind::kHeuristic, CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR);
  same(Kind::kExecutionPlan, CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR);
  same(Kind::kPointwiseOp, CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR);
  same(Kind::kOperationGraph, CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR);
  same(Kind::kVariantPack, CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR);
  same(Kind::kTensor, CUDNN_BACKEND_TENSOR_DESCRIPTOR);
  same(Kind::kMatmul, CUDNN_BACKEND_MATMUL_DESCRIPTOR);
  same(Kind::kMatmulOp, CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR);
  same(Kind::kReduction, CUDNN_BACKEND_REDUCTION_DESCRIPTOR);
  same(Kind::kReductionOp, CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR);
  same(Kind::kReshapeOp, CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR);
  same(Name::kPointwiseMode, CUDNN_ATTR_POINTWISE_MODE);
  same(Name::kPointwisePrecision, CUDNN_ATTR_POINTWISE_MATH_PREC);
  same(Name::kPointwiseAxis, CUDNN_ATTR_POINTWISE_AXIS);
  same(Name::kHeuristicMode, CUDNN_ATTR_ENGINEHEUR_MODE);
  same(Name::kHeuristicGraph, CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH);
  same(Name::kHeuristicResults, CUDNN_ATTR_ENGINEHEUR_RESULTS);
  same(Name::kPlanEngineConfig, CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG);
  same(Name::kPlanWorkspace, CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE);
  same(Name::kPointwiseDescriptor, CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR);
  same(Name::kPointwiseX, CUDNN_ATTR_OPERATION_POINTWISE_XDESC);
  same(Name::kPointwiseB, CUDNN_ATTR_OPERATION_POINTWISE_BDESC);
  same(Name::kPointwiseY, CUDNN_ATTR_OPERATION_POINTWISE_YDESC);
  same(Name::kPointwiseT, CUDNN_ATTR_OPERATION_POINTWISE_TDESC);
  same(Name::kGraphOps, CUDNN_ATTR_OPERATIONGRAPH_OPS);
  same(Name::kTensorAlignment, CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT);
  same(Name::kTensorType, CUDNN_ATTR_TENSOR_DATA_TYPE);
  same(Name::kTensorExtents, CUDNN_ATTR_TENSOR_DIMENSIONS);
  same(Name::kTensorStrides, CUDNN_ATTR_TENSOR_STRIDES);
  same(Name::kTensorId, CUDNN_ATTR_TENSOR_UNIQUE_ID);
  same(Name::kTensorVirtual, CUDNN_ATTR_TENSOR_IS_VIRTUAL);
  same(Name::kTensorByValue, CUDNN_ATTR_TENSOR_IS_BY_VALUE);
  same(Name::kPackIds, CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS);
  same(Name::kPackPointers, CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS);
  same(Name::kPackWorkspace, CUDNN_ATTR_VARIANT_PACK_WORKSPACE);
  same(Name::kMatmulPrecision, CUDNN_ATTR_MATMUL_COMP_TYPE);
  same(Name::kMatmulA, CUDNN_ATTR_OPERATION_MATMUL_ADESC);
  same(Name::kMatmulB, CUDNN_ATTR_OPERATION_MATMUL_BDESC);
  same(Name::kMatmulC, CUDNN_ATTR_OPERATION_MATMUL_CDESC);
  same(Name::kMatmulDescriptor, CUDNN_ATTR_OPERATION_MATMUL_DESC);
  same(Name::kReductionOperator, CUDNN_ATTR_REDUCTION_OPERATOR);
  same(Name::kReductionPrecision, CUDNN_ATTR_REDUCTION_COMP_TYPE);
  same(Name::kReductionX, CUDNN_ATTR_OPERATION_REDUCTION_XDESC);
  same(Name::kReductionY, CUDNN_ATTR_OPERATION_REDUCTION_YDESC);
  same(Name::kReductionDescriptor, CUDNN_ATTR_OPERATION_REDUCTION_DESC);
  same(Name::kReshapeX, CUDNN_ATTR_OPERATION_RESHAPE_XDESC);
  same(Name::kReshapeY, CUDNN_ATTR_OPERATION_RESHAPE_YDESC);
  same(Form::kHandle, CUDNN_TYPE_HANDLE);
  same(Form::kDataType, CUDNN_TYPE_DATA_TYPE);
  same(Form::kBool, CUDNN_TYPE_BOOLEAN);
  same(Form::kInt64, CUDNN_TYPE_INT64);
  same(Form::kPointer, CUDNN_TYPE_VOID_PTR);
  same(Form::kHeuristicMode, CUDNN_TYPE_HEUR_MODE);
  same(Form::kPointwiseMode, CUDNN_TYPE_POINTWISE_MODE);
  same(Form::kDescriptor, CUDNN_TYPE_BACKEND_DESCRIPTOR);
  same(Form::kReduction, CUDNN_TYPE_REDUCTION_OPERATOR_TYPE);
  same(DataType::kF32, CUDNN_DATA_FLOAT);
  same(DataType::kF16, CUDNN_DATA_HALF);
  same(DataType::kI32, CUDNN_DATA_INT32);
  same(DataType::kBF16, CUDNN_DATA_BFLOAT16);
  same(DataType::kBool, CUDNN_DATA_BOOLEAN);
  same(Pointwise::kAdd, CUDNN_POINTWISE_ADD);
  same(Pointwise::kMul, CUDNN_POINTWISE_MUL);
  same(Pointwise::kDiv, CUDNN_POINTWISE_DIV);
  same(Pointwise::kSub, CUDNN_POINTWISE_SUB);
  same(Pointwise::kExp, CUDNN_POINTWISE_EXP);
  same(Pointwise::kLog, CUDNN_POINTWISE_LOG);
  same(Pointwise::kIdentity, CUDNN_POINTWISE_IDENTITY);
  same(Pointwise::kGreaterOrEqual, CUDNN_POINTWISE_CMP_GE);
  same(Pointwise::kIndex, CUDNN_POINTWISE_GEN_INDEX);
  same(Pointwise::kSelect, CUDNN_POINTWISE_BINARY_SELECT);
  same(Reduce::kAdd, CUDNN_REDUCE_TENSOR_ADD);
  same(Reduce::kMax, CUDNN_REDUCE_TENSOR_MAX);
  same(kHeuristicModeA, CUDNN_HEUR_MODE_A);
  same(kNotSupported, CUDNN_STATUS_NOT_SUPPORTED);
}
#endif

TEST_CASE("the real library takes every tensor and operation of the graphs, without a device") {
  auto cudnn = gpu::real_cudnn();
  if (!cudnn.ok()) {
    WARN("skipped: " << cudnn.error().message);
    return;
  }
  const int64_t version = (*cudnn)->version();
  for (const AttentionShape& s :
       {AttentionShape{2, 64, 4, 4, 64}, AttentionShape{2, 128, 8, 2, 64}, AttentionShape{1, 50, 4, 1, 128}})
    for (const DType t : {DType::bf16, DType::f16})
      for (const bool backward : {false, true}) {
        const auto described = gpu::cudnn::describe(
            **cudnn, backward ? gpu::cudnn::backward_graph(s, t, version) : gpu::cudnn::forward_graph(s, t, version));
        INFO((described.ok() ? std::string() : to_string(described.error())));
        REQUIRE(described.ok());
        std::vector<gpu::CudnnDescriptor> ops;
        for (const auto& op : described->ops) ops.push_back(op.get());
        gpu::CudnnDescriptor graph = nullptr;
        using gpu::cudnn::Form, gpu::cudnn::Kind, gpu::cudnn::Name;
        REQUIRE((*cudnn)->create_descriptor(static_cast<int>(Kind::kOperationGraph), &graph) == 0);
        REQUIRE((*cudnn)->set_attribute(graph, static_cast<int>(Name::kGraphOps), static_cast<int>(Form::kDescriptor),
                                        static_cast<int64_t>(ops.size()), ops.data()) == 0);
        const gpu::CudnnStatus status = (*cudnn)->finalize(graph);
        INFO((*cudnn)->describe(status));
        REQUIRE(status == 0);
        (*cudnn)->destroy_descriptor(graph);
      }
  // It does look: a product whose factors do not fit is refused, by name.
  gpu::cudnn::Graph wrong = gpu::cudnn::forward_graph({1, 64, 2, 2, 32}, DType::bf16, version);
  std::swap(wrong.tensors[1].extents[2], wrong.tensors[1].extents[3]);
  const auto refused = gpu::cudnn::describe(**cudnn, wrong);
  REQUIRE_FALSE(refused.ok());
  REQUIRE(contains(refused.error().message, "the operation that makes dots: CUDNN_STATUS_"));
}

}  // namespace shardlab::testing
