#include "plan/device_scratch.h"

#include <algorithm>
#include <vector>

#include "plan/base/tree.h"
#include "plan/expert_places.h"
#include "plan/named_kernels.h"
#include "plan/type.h"

namespace shardlab {
namespace {

/// What a kernel of its own writes in one launch, with room to align it.
int64_t lent(int64_t bytes) {
  return bytes == 0 ? 0 : (bytes + kScratchAlignment - 1) / kScratchAlignment * kScratchAlignment + kScratchAlignment;
}

struct DeviceOperands {
  const Segment& segment;
  const Op& op;
  const Mesh& mesh;
  const DeviceKernels& kernels;

  const Type& read(size_t i) const { return segment.slots[op.reads[i].index()].type; }
  const Type& write(size_t i) const { return segment.slots[op.writes[i].index()].type; }
};

/// Sums that a sum over the tokens of an activation begins with: of each sequence those leaves that the shard meets, on the rank
/// that meets most. A shard that holds no whole number of leaves may clip one at either end.
int64_t token_leaves(const Type& activation, const Mesh& mesh, SumOver over = SumOver::kAll) {
  const Shape& held = activation.shape;
  if (held.rank < 3) return kContractionLeaves;
  const int64_t all = logical_shape(activation, mesh)[1], most = kContractionLeaves;
  if (all == 0) return 0;
  const int64_t shards = all / std::max<int64_t>(1, held[1]);
  const int64_t leaves = held[1] * shards == all && most % shards == 0 ? most / shards : (most * held[1] + all - 1) / all + 1;
  return (over == SumOver::kTokens ? 1 : held[0]) * std::min(leaves, most);  // sequences apart: one after another
}

int64_t bias_scratch(const Type& gradient, const Mesh& mesh, SumOver over = SumOver::kAll) {
  return lent(4 * token_leaves(gradient, mesh, over) * gradient.shape.last());
}

int64_t scratch_of(const Norm& w, const DeviceOperands& o) {
  if (w.phase != Phase::kW) return 0;
  if (w.over == SumOver::kSequences) return bias_scratch(o.read(0), o.mesh);
  return lent(4 * token_leaves(o.read(1), o.mesh, w.over) * (w.rms ? 1 : 2) * o.read(1).shape.last());
}

/// Sums of each head by leaf, and of each gamma by leaf.
int64_t scratch_of(const HeadNorm& w, const DeviceOperands& o) {
  if (w.phase != Phase::kW) return 0;
  if (w.over == SumOver::kSequences) return bias_scratch(o.read(0), o.mesh);
  return lent(4 * token_leaves(o.read(1), o.mesh) * (int64_t{w.heads} + w.kv_heads + 2) * w.head_dim);
}

/// Tokens of each sequence that chose each expert, where the loss for even use is of whole sequences.
int64_t scratch_of(const Route& w, const DeviceOperands& o) {
  if (w.phase == Phase::kF || w.balance == 0 || w.is_of_part()) return 0;
  return lent(4 * o.read(2).shape[0] * o.read(1).shape.last());
}

/// The row of each choice i32[b,s,k]; and, by expert, where its rows begin, and its rows in each span of 32 tokens.
int64_t places_scratch(const Type& choice, int64_t experts) {
  const int64_t tokens = choice.shape[0] * choice.shape[1], spans = (tokens + 31) / 32;
  return lent(4 * (tokens * choice.shape[2] + experts * (1 + spans)));
}
int64_t scratch_of(const Dispatch& w, const DeviceOperands& o) { return places_scratch(o.read(1), w.experts); }
int64_t scratch_of(const Combine& w, const DeviceOperands& o) {
  return places_scratch(o.read(w.phase == Phase::kF ? 2 : 3), w.experts);
}

/// Where the rows of each source and expert begin, and their tiles.
int64_t group_scratch(const Type& counts, int64_t sources) { return lent(2 * 8 * (sources * counts.shape[2] + 1)); }
int64_t scratch_of(const GroupedLinear& w, const DeviceOperands& o) { return group_scratch(o.read(2), w.sources); }
int64_t scratch_of(const Activation& w, const DeviceOperands& o) {
  return w.counted ? group_scratch(o.read(o.op.reads.size() - 1), 1) : 0;
}

int64_t scratch_of(const Linear& w, const DeviceOperands& o) {
  const int64_t product = o.kernels.canonical ? 0 : lent(kLibraryWorkspace);
  return w.phase == Phase::kW && w.bias ? std::max(product, bias_scratch(o.read(1), o.mesh)) : product;
}

int64_t scratch_of(const Residual& w, const DeviceOperands& o) {
  return w.phase == Phase::kW ? bias_scratch(o.read(0), o.mesh, w.over) : 0;
}

int64_t scratch_of(const Attention& w, const DeviceOperands& o) {
  const bool backward = w.phase == Phase::kI;
  const Type& out = backward ? o.read(0) : o.write(0);
  const int64_t own = backward ? lent(4 * out.shape[0] * out.shape[1] * w.heads) : 0;
  if (!o.kernels.cudnn || bits_of(out.dtype) != 16 || w.packed || w.window > 0 || value_dim_of(w) != w.head_dim) return own;
  const AttentionCalls c(out.shape[0], out.shape[1], w.heads, w.kv_heads, w.head_dim);
  const int64_t parts = backward ? lent(c.dq_bytes()) + lent(c.row_sum_bytes()) : 0;
  return std::max(own, parts + lent(c.library_bytes(backward)));
}

int64_t scratch_of(const AttentionBlock& w, const DeviceOperands& o) {
  if (w.phase == Phase::kF) return 0;
  const Shape& q = o.read(3).shape;
  return lent(4 * q[0] * q[1] * w.heads);
}

int64_t scratch_of(const CrossEntropy& w, const DeviceOperands& o) {
  using Part = CrossEntropy::Part;
  return w.part == Part::kMax || w.part == Part::kSum ? 0 : lent(4 * rows_of(o.read(0)));
}

int64_t scratch_of(const SumScalars&, const DeviceOperands& o) {
  int64_t elements = 0;
  for (size_t i = 0; i < o.op.reads.size(); ++i) elements += o.read(i).shape.elements();
  return lent(4 * elements);
}

/// Spans of elements that a block each looks at, over all reads.
int64_t spans(const DeviceOperands& o) {
  constexpr int64_t kSpan = 8192;
  int64_t spans = 0;
  for (size_t i = 0; i < o.op.reads.size(); ++i) spans += (o.read(i).shape.elements() + kSpan - 1) / kSpan;
  return spans;
}

int64_t scratch_of(const SquaredNorm&, const DeviceOperands& o) { return lent(8 * spans(o)); }

/// Kernels by name (plan/named_kernels.h).
int64_t scratch_of(const Kernel& w, const DeviceOperands& o) {
  const NamedKernel* row = find_kernel(w.name);
  switch (row == nullptr ? KernelDeviceScratch::kNone : row->device_scratch) {
    case KernelDeviceScratch::kNone: return 0;
    case KernelDeviceScratch::kSearch: return lent(4 * (2 + spans(o)));
    case KernelDeviceScratch::kSelection: return lent(kScratchAlignment + 64 * spans(o));
    case KernelDeviceScratch::kBasis: return lent(8 * o.read(0).shape.elements());
    case KernelDeviceScratch::kCounter: return lent(4);
  }
  return 0;
}

template <class Other>
int64_t scratch_of(const Other&, const DeviceOperands&) {
  return 0;
}

}  // namespace

DeviceKernels device_kernels(const Case& config) {
  return {config.canonical, !config.canonical && config.attention != AttentionBy::kOwn};
}

int64_t device_scratch_bytes(const Segment& segment, const Op& op, const Mesh& mesh, const DeviceKernels& kernels) {
  return std::visit([&](const auto& w) { return scratch_of(w, DeviceOperands{segment, op, mesh, kernels}); }, op.work);
}

void add_device_workspaces(Plan& plan, const DeviceKernels& kernels) {
  std::vector<bool> lends(plan.streams.size());  // by stream: whether its workspace is the device's
  for (const Segment& segment : plan.segments)
    for (const Step& step : segment.steps)
      if (const Op* op = std::get_if<Op>(&step); op != nullptr && !works_on_host(segment, *op))
        lends[op->stream.index()] = lends[op->stream.index()] || device_scratch_bytes(segment, *op, plan.mesh, kernels) > 0;
  add_workspaces(plan, [&](const Segment& segment, const Op& op) {
    if (!works_on_host(segment, op)) return device_scratch_bytes(segment, op, plan.mesh, kernels);
    return lends[op.stream.index()] ? 0 : scratch_bytes(segment, op, kernels.canonical);
  });
  for (Role& role : plan.roles)
    if (const int64_t elements = expert_places_elements(plan, role); elements > 0)
      add_workspace(plan, role, kExpertPlaces, DType::i32, elements, Space::kDevice);
}

}  // namespace shardlab
