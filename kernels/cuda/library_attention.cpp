#include "kernels/cuda/library_attention.h"

#include <fmt/format.h>

#include "kernels/checks.h"
#include "plan/base/check.h"

namespace shardlab::gpu {

using namespace cudnn;

namespace {

/// One descriptor in the making; keeps the first status that is no success.
class Description {
 public:
  Description(CudnnApi& api, Kind kind) : api_(api) {
    CudnnDescriptor made = nullptr;
    status_ = api.create_descriptor(static_cast<int>(kind), &made);
    descriptor_ = OwnedDescriptor(api, made);
  }
  Description& set(Name name, Form form, int64_t count, const void* elements) {
    if (status_ == 0)
      status_ = api_.set_attribute(descriptor_.get(), static_cast<int>(name), static_cast<int>(form), count, elements);
    return *this;
  }
  template <class Enum>
  Description& word(Name name, Form form, Enum value) {
    const int number = static_cast<int>(value);
    return set(name, form, 1, &number);
  }
  Description& integer(Name name, int64_t value) { return set(name, Form::kInt64, 1, &value); }
  Description& flag(Name name, bool value) { return set(name, Form::kBool, 1, &value); }
  Description& link(Name name, const OwnedDescriptor& to) {
    const CudnnDescriptor descriptor = to.get();
    return set(name, Form::kDescriptor, 1, &descriptor);
  }
  Description& finalize() {
    if (status_ == 0) status_ = api_.finalize(descriptor_.get());
    return *this;
  }
  CudnnStatus status() const { return status_; }
  /// The finished descriptor is put to `into`; the status.
  CudnnStatus into(OwnedDescriptor& into) {
    finalize();
    if (status_ == 0) into = std::move(descriptor_);
    return status_;
  }

 private:
  CudnnApi& api_;
  OwnedDescriptor descriptor_;
  CudnnStatus status_ = 0;
};

/// Number of tensor i in a variant pack; 0 is left free.
int64_t id_of(size_t tensor) { return static_cast<int64_t>(tensor) + 1; }

CudnnStatus describe_tensor(CudnnApi& api, const GraphTensor& t, size_t number, OwnedDescriptor& out) {
  constexpr int64_t kAlignment = 16;  // of head_dim a multiple of 8 elements
  return Description(api, Kind::kTensor)
      .word(Name::kTensorType, Form::kDataType, t.type)
      .set(Name::kTensorExtents, Form::kInt64, 4, t.extents.data())
      .set(Name::kTensorStrides, Form::kInt64, 4, t.strides.data())
      .integer(Name::kTensorId, id_of(number))
      .integer(Name::kTensorAlignment, kAlignment)
      .flag(Name::kTensorVirtual, t.place == Place::kVirtual)
      .flag(Name::kTensorByValue, t.place == Place::kScalar)
      .into(out);
}

/// Describes the computation of an operation; a reshape has none.
CudnnStatus describe_mode(CudnnApi& api, const GraphOp& op, OwnedDescriptor& out) {
  switch (op.kind) {
    case GraphOp::Kind::kProduct:
      return Description(api, Kind::kMatmul).word(Name::kMatmulPrecision, Form::kDataType, op.precision).into(out);
    case GraphOp::Kind::kReduction:
      return Description(api, Kind::kReduction)
          .word(Name::kReductionPrecision, Form::kDataType, op.precision)
          .word(Name::kReductionOperator, Form::kReduction, op.reduce)
          .into(out);
    case GraphOp::Kind::kPointwise: {
      Description d(api, Kind::kPointwise);
      d.word(Name::kPointwiseMode, Form::kPointwiseMode, op.mode).word(Name::kPointwisePrecision, Form::kDataType, op.precision);
      if (op.axis >= 0) d.integer(Name::kPointwiseAxis, op.axis);
      return d.into(out);
    }
    case GraphOp::Kind::kReshape: break;
  }
  return 0;
}

CudnnStatus describe_op(CudnnApi& api, const GraphOp& op, const std::vector<OwnedDescriptor>& tensors, const OwnedDescriptor& mode,
                        OwnedDescriptor& out) {
  const auto input = [&](size_t i) -> const OwnedDescriptor& { return tensors[static_cast<size_t>(op.inputs[i])]; };
  const OwnedDescriptor& y = tensors[static_cast<size_t>(op.output)];
  switch (op.kind) {
    case GraphOp::Kind::kProduct:
      return Description(api, Kind::kMatmulOp)
          .link(Name::kMatmulA, input(0))
          .link(Name::kMatmulB, input(1))
          .link(Name::kMatmulC, y)
          .link(Name::kMatmulDescriptor, mode)
          .into(out);
    case GraphOp::Kind::kReduction:
      return Description(api, Kind::kReductionOp)
          .link(Name::kReductionDescriptor, mode)
          .link(Name::kReductionX, input(0))
          .link(Name::kReductionY, y)
          .into(out);
    case GraphOp::Kind::kReshape:
      return Description(api, Kind::kReshapeOp).link(Name::kReshapeX, input(0)).link(Name::kReshapeY, y).into(out);
    case GraphOp::Kind::kPointwise: break;
  }
  Description d(api, Kind::kPointwiseOp);
  d.link(Name::kPointwiseDescriptor, mode).link(Name::kPointwiseX, input(0)).link(Name::kPointwiseY, y);
  if (op.inputs[1] >= 0) d.link(Name::kPointwiseB, input(1));
  if (op.inputs[2] >= 0) d.link(Name::kPointwiseT, input(2));
  return d.into(out);
}

Error refused(CudnnApi& api, std::string_view what, CudnnStatus status) {
  return {ExitCode::kUsage, fmt::format("cuDNN {}: {}: {}", cudnn_version_text(api.version()), what, api.describe(status)),
          "use attention: own, or auto", ""};
}

constexpr int64_t kLine = 256;
int64_t in_lines(int64_t bytes) { return (bytes + kLine - 1) / kLine * kLine; }

}  // namespace

namespace cudnn {

Result<DescribedGraph> describe(CudnnApi& api, const Graph& graph) {
  DescribedGraph made;
  for (size_t i = 0; i < graph.tensors.size(); ++i)
    if (const CudnnStatus status = describe_tensor(api, graph.tensors[i], i, made.tensors.emplace_back()); status != 0)
      return refused(api, fmt::format("tensor {}", graph.tensors[i].name), status);
  for (const GraphOp& op : graph.ops) {
    const std::string& result = graph.tensors[static_cast<size_t>(op.output)].name;
    if (const CudnnStatus status = describe_mode(api, op, made.modes.emplace_back()); status != 0)
      return refused(api, fmt::format("the operation that makes {}", result), status);
    if (const CudnnStatus status = describe_op(api, op, made.tensors, made.modes.back(), made.ops.emplace_back()); status != 0)
      return refused(api, fmt::format("the operation that makes {}", result), status);
  }
  return made;
}

}  // namespace cudnn

Result<std::unique_ptr<LibraryAttention>> LibraryAttention::create(CudnnApi& api) {
  CudnnHandle handle = nullptr;
  const CudnnStatus status = api.create(&handle);
  if (status != 0)
    return Error{ExitCode::kEnvironment,
                 fmt::format("cuDNN {} does not start: {}", cudnn_version_text(api.version()), api.describe(status)),
                 "use attention: own, or a cuDNN that fits the driver", ""};
  return std::unique_ptr<LibraryAttention>(new LibraryAttention(api, handle));
}

LibraryAttention::~LibraryAttention() {
  plans_.clear();
  api_.destroy(handle_);
}

std::string LibraryAttention::name() const { return "cuDNN " + cudnn_version_text(api_.version()); }

int64_t LibraryAttention::scratch_bytes(const AttentionShape& shape, bool backward) {
  const AttentionCalls calls = calls_of(shape);
  return (backward ? in_lines(calls.dq_bytes()) + in_lines(calls.row_sum_bytes()) : 0) + in_lines(calls.library_bytes(backward));
}

Result<void> LibraryAttention::prepare(const AttentionShape& shape, DType type, bool backward) {
  const Key key = key_of(shape, type, backward);
  if (plans_.count(key) > 0) return {};
  const std::string why = refusal(shape, type, backward, api_.version());
  if (!why.empty()) return Error{ExitCode::kUsage, why, "use attention: own, or auto", ""};
  Plan plan;
  plan.graph = backward ? backward_graph(shape, type, api_.version()) : forward_graph(shape, type, api_.version());
  auto described = describe(api_, plan.graph);
  if (!described.ok()) return described.error();
  plan.described = std::move(described).value();
  SHARDLAB_TRY(choose(plan, calls_of(shape).library_bytes(backward)));
  plans_.emplace(key, std::move(plan));
  return {};
}

/// Takes the first of cuDNN's proposals, the best first, that can be carried out in so much workspace.
Result<void> LibraryAttention::choose(Plan& plan, int64_t most_workspace) {
  std::vector<CudnnDescriptor> ops;
  for (const OwnedDescriptor& op : plan.described.ops) ops.push_back(op.get());
  CudnnStatus status = Description(api_, Kind::kOperationGraph)
                           .set(Name::kGraphHandle, Form::kHandle, 1, &handle_)
                           .set(Name::kGraphOps, Form::kDescriptor, static_cast<int64_t>(ops.size()), ops.data())
                           .into(plan.whole);
  if (status != 0) return refused(api_, "the graph", status);
  OwnedDescriptor heuristic;
  status = Description(api_, Kind::kHeuristic)
               .link(Name::kHeuristicGraph, plan.whole)
               .word(Name::kHeuristicMode, Form::kHeuristicMode, kHeuristicModeA)
               .into(heuristic);
  int64_t found = 0;
  const auto results = [&](int64_t requested, void* into) {
    if (status == 0)
      status = api_.get_attribute(heuristic.get(), static_cast<int>(Name::kHeuristicResults), static_cast<int>(Form::kDescriptor),
                                  requested, &found, into);
  };
  results(0, nullptr);
  std::vector<OwnedDescriptor> engines;
  std::vector<CudnnDescriptor> handles;
  for (int64_t i = 0; i < found && status == 0; ++i) {
    CudnnDescriptor engine = nullptr;
    status = api_.create_descriptor(static_cast<int>(Kind::kEngineConfig), &engine);
    engines.emplace_back(api_, engine);
    handles.push_back(engine);
  }
  if (found > 0) results(static_cast<int64_t>(handles.size()), handles.data());
  if (status != 0) return refused(api_, "its engines for the graph", status);

  std::string tried;
  for (size_t i = 0; i < std::min(engines.size(), static_cast<size_t>(found)); ++i) {
    OwnedDescriptor candidate;
    int64_t workspace = 0, count = 0;
    status = Description(api_, Kind::kExecutionPlan)
                 .set(Name::kPlanHandle, Form::kHandle, 1, &handle_)
                 .link(Name::kPlanEngineConfig, engines[i])
                 .into(candidate);
    if (status == 0)
      status = api_.get_attribute(candidate.get(), static_cast<int>(Name::kPlanWorkspace), static_cast<int>(Form::kInt64), 1,
                                  &count, &workspace);
    if (status == 0 && workspace <= most_workspace) {
      plan.engine = std::move(engines[i]);
      plan.plan = std::move(candidate);
      plan.workspace = workspace;
      return {};
    }
    tried += fmt::format("{}{}", tried.empty() ? "" : "; ",
                         status != 0 ? api_.describe(status)
                                     : fmt::format("{} bytes of workspace, of which {} are planned", workspace, most_workspace));
  }
  return Error{ExitCode::kUsage,
               fmt::format("cuDNN {} has no engine for it ({})", cudnn_version_text(api_.version()),
                           tried.empty() ? "none proposed" : tried),
               "use attention: own, or auto", ""};
}

void LibraryAttention::forward(const AttentionForward& a, const Scratch& scratch, Stream s) {
  run("attention_forward", key_of(a.shape, a.qkv.dtype, false), a.shape, {.qkv = a.qkv.data, .o = a.o.data, .lse = a.lse}, scratch,
      s);
}

void LibraryAttention::input(const AttentionInput& a, const Scratch& scratch, Stream s) {
  run("attention_input", key_of(a.shape, a.qkv.dtype, true), a.shape,
      {.qkv = a.qkv.data, .o = a.o.data, .lse = a.lse, .dout = a.dout.data, .dqkv = a.dqkv.data}, scratch, s);
}

void LibraryAttention::run(const char* name, const Key& key, const AttentionShape& shape, Arrays arrays, const Scratch& scratch,
                           Stream s) {
  const auto found = plans_.find(key);
  SHARDLAB_CHECK(found != plans_.end(), "{} of {} tokens was not prepared", name, shape.tokens);
  kernels::expect(scratch.bytes >= scratch_bytes(shape, key.backward), "attention: scratch is large enough", scratch.bytes);
  const AttentionCalls calls = calls_of(shape);
  arrays.query_sum = static_cast<std::byte*>(scratch.data);
  arrays.row_sum = arrays.query_sum + (key.backward ? in_lines(calls.dq_bytes()) : 0);
  arrays.workspace = arrays.row_sum + (key.backward ? in_lines(calls.row_sum_bytes()) : 0);
  CudnnStatus status = stream_ == s.handle ? 0 : api_.set_stream(handle_, s.handle);
  if (status == 0) stream_ = s.handle;
  for (int64_t call = 0; call < calls.calls && status == 0; ++call) status = execute(found->second, shape, arrays, call);
  if (status != 0) s.check->failed(name, "cuDNN", status, api_.describe(status));
}

CudnnStatus LibraryAttention::execute(const Plan& plan, const AttentionShape& shape, const Arrays& arrays, int64_t call) {
  const auto at = [&](const GraphTensor& t) -> void* {
    const int64_t offset = offset_of(t.place, shape, call);
    const auto element = [&](const void* base, int64_t bytes) {
      return const_cast<std::byte*>(static_cast<const std::byte*>(base)) + offset * bytes;
    };
    switch (t.place) {
      case Place::kVirtual: return nullptr;
      case Place::kScalar: return const_cast<float*>(&t.scalar);
      case Place::kQuery:
      case Place::kKey:
      case Place::kValue: return element(arrays.qkv, arrays.element);
      case Place::kOut: return element(arrays.o, arrays.element);
      case Place::kOutGradient: return element(arrays.dout, arrays.element);
      case Place::kLse: return element(arrays.lse, 4);
      case Place::kQueryGradient:
      case Place::kKeyGradient:
      case Place::kValueGradient: return element(arrays.dqkv, arrays.element);
      case Place::kQuerySum: return arrays.query_sum;
      case Place::kRowSum: return arrays.row_sum;
    }
    return nullptr;
  };
  std::vector<int64_t> ids;
  std::vector<void*> pointers;
  for (size_t i = 0; i < plan.graph.tensors.size(); ++i)
    if (void* p = at(plan.graph.tensors[i])) {
      ids.push_back(id_of(i));
      pointers.push_back(p);
    }
  void* workspace = arrays.workspace;
  OwnedDescriptor pack;
  const CudnnStatus status = Description(api_, Kind::kVariantPack)
                                 .set(Name::kPackPointers, Form::kPointer, static_cast<int64_t>(pointers.size()), pointers.data())
                                 .set(Name::kPackIds, Form::kInt64, static_cast<int64_t>(ids.size()), ids.data())
                                 .set(Name::kPackWorkspace, Form::kPointer, 1, &workspace)
                                 .into(pack);
  return status != 0 ? status : api_.execute(handle_, plan.plan.get(), pack.get());
}

}  // namespace shardlab::gpu
