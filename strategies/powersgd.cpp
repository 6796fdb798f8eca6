// PowerSGD: the gradient of a matrix travels as two thin ones, the result of one step of subspace iteration, with error feedback.
//
// m = gradient + error, on every rank its own. P = m Q^T for the basis Q of the step before; P is summed over the ranks and its
// columns made orthonormal; Q = P^T m is summed; P Q is the approximation of the sum of all m, and Q the next basis (warm start).
// Both products are linear in m, so that the ranks' sums are those of the sum. Each rank keeps m less its share of P Q as the
// error. A basis that has never been used is the first unit vectors. Vectors travel plain, in the buckets of data parallelism.
//
// Shapes   m[R,C], Q[r,C], P[R,r]; r = min(rank, R, C), at which P Q is the sum itself but for rounding
// Adds     two all-reduces a matrix: 2 r (R + C) (N-1)/N elements sent by each rank, in place of 2 R C (N-1)/N
// Memory   errors 4 R C bytes a matrix and bases 4 r C; P twice and Q of the largest matrix
// Refuses  dp = 1; zero above 0; tp above 1, whose slices would be approximated apart; narrow gradients; another layout's
//          checkpoint
// Paper    Vogels et al., "PowerSGD" (2019), algorithms 1 and 2
#include <fmt/format.h>

#include <algorithm>

#include "strategies/compression.h"
#include "strategies/data_parallel.h"

namespace shardlab::strategies {
namespace {

constexpr std::string_view kPowersgdName = "powersgd";

class PowerSgd {
 public:
  PowerSgd(Draft& draft, StageDraft& stage) : draft_(draft), stage_(stage) {}

  void run() {
    fill_buckets(draft_, stage_, {.bytes = draft_.config.layout.bucket_bytes, .alone = [&](int unit, int p) {
                                    return type_of(stage_.at(unit, p).value).shape.rank == 2;
                                  }});
    for (Bucket& bucket : stage_.buckets) {
      declare_reduced(draft_, stage_, bucket);
      if (!is_matrix(bucket)) continue;
      const Shape shape = shape_of(bucket);
      const int64_t r = rank_of(shape);
      left_elements_ = std::max(left_elements_, shape[0] * r);
      right_elements_ = std::max(right_elements_, shape[1] * r);
    }
    if (left_elements_ > 0) declare_messages();
    const int last = draft_.micro_batches() - 1;
    when_complete(draft_, stage_, [&](Bucket& bucket) {
      if (is_matrix(bucket)) return approximate(bucket);
      return reduce_event(draft_, stage_, bucket, bucket.reduced, CollectiveKind::kAllReduce, last, kPowersgdName);
    });
  }

 private:
  const Type& type_of(BufferId id) const { return stage_.role.buffers[id.index()].type; }
  const ParameterState& state_of(const Bucket& bucket) const {
    return stage_.at(bucket.members.front().unit, bucket.members.front().parameter);
  }
  const Shape& shape_of(const Bucket& bucket) const { return type_of(state_of(bucket).gradient).shape; }
  bool is_matrix(const Bucket& bucket) const { return bucket.members.size() == 1 && shape_of(bucket).rank == 2; }
  int64_t rank_of(const Shape& shape) const {
    return std::min({int64_t{draft_.config.layout.compression.rank}, shape[0], shape[1]});
  }

  void declare_messages() {
    const Type gradient = type_of(stage_.buckets.front().gradient);  // no reference: buffers are added
    const auto message = [&](std::string name, int64_t elements) {
      return add_message(stage_, std::move(name),
                         message_type(draft_, gradient, DType::f32, {elements}, Placement::local(), Micro::kNone));
    };
    left_ = message("powersgd.p", left_elements_);
    orthonormal_ = message("powersgd.p.orthonormal", left_elements_);
    right_ = message("powersgd.q", right_elements_);
  }

  Event approximate(const Bucket& bucket) {
    const ParameterState& state = state_of(bucket);
    const Type whole = type_of(state.gradient);
    const int64_t rows = whole.shape[0], columns = whole.shape[1], r = rank_of(whole.shape);
    const auto type = [&](Shape shape, Placement place, Micro micro) {
      return message_type(draft_, whole, DType::f32, shape, place, micro);
    };
    const Type p_type = type({rows, r}, Placement::partial(), Micro::kNone),
               q_type = type({r, columns}, Placement::partial(), Micro::kSum);
    const Type p_sum = type({rows, r}, Placement::replicate(), Micro::kNone),
               q_sum = type({r, columns}, Placement::replicate(), Micro::kSum);

    Compressing ops(draft_, stage_, fmt::format("powersgd.{}x{}", rows, columns), kPowersgdName);
    const SlotId gradient = ops.bound("gradient", state.gradient), sum = ops.bound("sum", state.reduced);
    const SlotId error = ops.bound("error", add_error(stage_, bucket.name + ".error", whole));
    const SlotId basis =
        ops.bound("basis", add_error(stage_, bucket.name + ".basis", type({r, columns}, Placement::replicate(), Micro::kNone)));
    const SlotId m = ops.view("m", error, whole);
    const SlotId p = ops.bound("p", add_message_view(stage_, bucket.name + ".p", p_type, left_)),
                 p_all = ops.view("p.all", p, p_sum);
    const SlotId unit = ops.bound("p.orthonormal", add_message_view(stage_, bucket.name + ".p.orthonormal", p_sum, orthonormal_));
    const SlotId q = ops.bound("q", add_message_view(stage_, bucket.name + ".q", q_type, right_)),
                 q_all = ops.view("q.all", q, q_sum);

    ops.kernel("add", {gradient, error}, {m}, "feedback");
    ops.kernel("start_basis", {basis}, {basis}, "start");
    ops.kernel("project", {m, basis}, {p}, "left");
    ops.collective(CollectiveKind::kAllReduce, p, p_all, "left.sum");
    // Each column less its share of those before it, twice: a product and a difference an element.
    ops.kernel("orthogonalise", {p_all}, {unit}, "orthogonalise");
    ops.op(Linear{.phase = Phase::kW}, {m, unit}, {q}, "right");
    ops.collective(CollectiveKind::kAllReduce, q, q_all, "right.sum");
    ops.op(Linear{.phase = Phase::kI}, {unit, q_all}, {sum}, "product");
    ops.kernel("subtract_share", {m, sum}, {error}, "error");
    ops.kernel("copy", {q_all}, {basis}, "keep");
    return ops.event(bucket.last_unit);
  }

  Draft& draft_;
  StageDraft& stage_;
  int64_t left_elements_ = 0, right_elements_ = 0;  ///< of the largest P and Q
  BufferId left_, orthonormal_, right_;             ///< those of whichever matrix is on its way
};

}  // namespace

void powersgd(Draft& draft) {
  for (StageDraft& stage : draft.stages) PowerSgd(draft, stage).run();
}

}  // namespace shardlab::strategies
