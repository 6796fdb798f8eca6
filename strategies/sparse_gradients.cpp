// A few elements of the gradient on the wire, with error feedback: the largest (top-k), or some drawn by chance (random-k).
//
// top-k: each rank sends the k largest elements of m = gradient + error, with their indices. Ranks choose differently, so nothing
// can be added on the way: values and indices are gathered, and what travels grows with N. random-k: all ranks draw the same k
// elements (the draw is keyed by seed, step and bucket), so that only values travel, and are reduced. What was not sent of m stays
// as the error: m with zeros where something was sent, exactly.
//
// Buckets are those of data parallelism, k a share of each, at least one element. Values of all buckets take turns in one buffer;
// indices have one a bucket.
//
// Shapes   bucket[n]; values, indices [N, k] (top-k) or [k] (random-k)
// Adds     top-k: all-gather of values and indices, 8 k (N-1) bytes sent by each rank; random-k: all-reduce of values, 8 k (N-1)/N
// Memory   errors 4 bytes an element; values of the largest bucket, indices of each: 4 N k (top-k) or 4 k bytes each
// Refuses  dp = 1; zero above 0; gradients narrower than fp32; a checkpoint of another layout; buckets of 2^31 elements, which an
//          index cannot number
// Paper    Stich et al., "Sparsified SGD with Memory" (2018); Lin et al., "Deep Gradient Compression" (2018)
#include <algorithm>
#include <cmath>

#include "strategies/compression.h"
#include "strategies/data_parallel.h"

namespace shardlab::strategies {
namespace {

constexpr std::string_view kSparseGradientsName = "sparse-gradients";

class SparseGradients {
 public:
  SparseGradients(Draft& draft, StageDraft& stage)
      : draft_(draft),
        stage_(stage),
        top_(draft.config.layout.compression.kind == CompressionKind::kTopK),
        ranks_(draft.plan.mesh.size("dp")) {}

  void run() {
    fill_buckets(draft_, stage_, {.bytes = draft_.config.layout.bucket_bytes});
    if (stage_.buckets.empty()) return;
    int64_t most = 0;
    for (Bucket& bucket : stage_.buckets) {
      declare_reduced(draft_, stage_, bucket);
      most = std::max(most, selected(bucket));
    }
    values_ = add_message(stage_, "values",
                          message_type(draft_, type_of(stage_.buckets.front().gradient), DType::f32, {(top_ ? ranks_ : 1) * most},
                                       Placement::local(), Micro::kNone));
    when_complete(draft_, stage_, [&](Bucket& bucket) { return top_ ? send_largest(bucket) : send_some(bucket); });
  }

 private:
  const Type& type_of(BufferId id) const { return stage_.role.buffers[id.index()].type; }
  Type message(const Bucket& bucket, DType dtype, Shape shape, Placement place, Micro micro) const {
    return message_type(draft_, type_of(bucket.gradient), dtype, shape, place, micro);
  }
  int64_t selected(const Bucket& bucket) const {
    const double share = draft_.config.layout.compression.k * static_cast<double>(bucket.elements);
    return std::clamp<int64_t>(static_cast<int64_t>(std::ceil(share)), 1, bucket.elements);
  }

  /// m = gradient + error, in the storage of the error; what is not sent of it is the next error.
  struct Rest {
    SlotId m, error, sum;
  };
  Rest feed_back(Compressing& ops, const Bucket& bucket) {
    const Type whole = type_of(bucket.gradient);
    const SlotId gradient = ops.bound("gradient", bucket.gradient);
    Rest rest;
    rest.sum = ops.bound("sum", bucket.reduced);
    rest.error = ops.bound("error", add_error(stage_, bucket.name + ".error", whole));
    rest.m = ops.view("m", rest.error, whole);
    ops.kernel("add", {gradient, rest.error}, {rest.m}, "feedback");
    return rest;
  }

  Event send_largest(const Bucket& bucket) {
    const int64_t k = selected(bucket);
    Compressing ops(draft_, stage_, "top." + signature(draft_, stage_, bucket), kSparseGradientsName);
    const Rest rest = feed_back(ops, bucket);
    const Shape all{ranks_, k}, row{1, k};
    const Type values = message(bucket, DType::f32, all, Placement::replicate(), Micro::kSum);
    const Type indices = message(bucket, DType::i32, all, Placement::replicate(), Micro::kNone);
    const SlotId all_values = ops.bound("values", add_message_view(stage_, bucket.name + ".values", values, values_));
    const SlotId all_indices = ops.bound("indices", add_message(stage_, bucket.name + ".indices", indices));
    const SlotId mine =
        ops.view("values.mine", all_values, message(bucket, DType::f32, row, Placement::shard(0), Micro::kSum), true);
    const SlotId where =
        ops.view("indices.mine", all_indices, message(bucket, DType::i32, row, Placement::shard(0), Micro::kNone), true);
    ops.kernel("top_k", {rest.m}, {mine, where}, "select");
    ops.kernel("zero_selected", {rest.m, where}, {rest.error}, "error");
    ops.collective(CollectiveKind::kAllGather, mine, all_values, "gather");
    ops.collective(CollectiveKind::kAllGather, where, all_indices, "gather.indices");
    ops.kernel("scatter", {all_values, all_indices}, {rest.sum}, "sum");
    return ops.event(bucket.last_unit);
  }

  /// The label is the draw's key: buckets of one size have segments of their own.
  Event send_some(const Bucket& bucket) {
    const int64_t k = selected(bucket);
    Compressing ops(draft_, stage_, "random." + bucket.name + "." + signature(draft_, stage_, bucket), kSparseGradientsName);
    const Rest rest = feed_back(ops, bucket);
    const Type part = message(bucket, DType::f32, {k}, Placement::partial(), Micro::kSum);
    const Type indices = message(bucket, DType::i32, {k}, Placement::replicate(), Micro::kNone);
    const SlotId mine = ops.bound("values.mine", add_message_view(stage_, bucket.name + ".values", part, values_));
    const SlotId all = ops.view("values", mine, message(bucket, DType::f32, {k}, Placement::replicate(), Micro::kSum));
    const SlotId where = ops.bound("indices", add_message(stage_, bucket.name + ".indices", indices));
    ops.kernel("random_k", {rest.m}, {mine, where}, "select." + bucket.name);
    ops.kernel("zero_selected", {rest.m, where}, {rest.error}, "error");
    ops.collective(CollectiveKind::kAllReduce, mine, all, "reduce");
    ops.kernel("scatter", {all, where}, {rest.sum}, "sum");
    return ops.event(bucket.last_unit);
  }

  Draft& draft_;
  StageDraft& stage_;
  bool top_;
  int ranks_;
  BufferId values_;  ///< of whichever bucket is on its way
};

}  // namespace

void sparse_gradients(Draft& draft) {
  for (StageDraft& stage : draft.stages) SparseGradients(draft, stage).run();
}

}  // namespace shardlab::strategies
