// How a back end reads an op's operands: what of a logical tensor a rank holds.
#pragma once

#include <algorithm>
#include <vector>

#include "kernels/attention.h"
#include "kernels/experts.h"
#include "kernels/leaves.h"
#include "plan/base/check.h"
#include "plan/work.h"
#include "runtime/backend.h"

namespace shardlab::runtime {

/// The part of a logical dim that a rank holds.
inline kernels::Part part_of(const BoundOp& op, const Type& type, int dim) {
  return {logical_origin(type, op.mesh(), op.at)[dim], logical_shape(type, op.mesh())[dim]};
}

/// Rows of an activation: [b,s,width], or [rows,width] as one sequence. Which of equal parts of a rank's tokens an op has makes no
/// difference to the extents of their leaves: the first stands for all.
inline kernels::Tokens tokens_of(const BoundOp& op, const Type& type) {
  const Shape& shape = type.shape;
  if (shape.rank >= 3) {
    const kernels::Part part = part_of(op, type, 1);
    const int64_t chunks = chunks_of(op.op().work);
    return {shape[0], shape[1], {part.begin * chunks, part.total * chunks}};
  }
  return {1, shape.elements() / shape.last(), {}};
}

/// Counts of the rows of experts that `rows` has room for.
inline kernels::RowCounts row_counts(const Tensor& counts, const Tensor& rows, int sources) {
  const Shape& c = counts.shape();
  return {counts.as<const int32_t>(), c[1], c[2], sources, rows.shape()[1]};
}

/// The router of an op with logits[b,s,experts] and choice[b,s,top_k].
inline kernels::RouteShape route_shape(const Route& w, const Tensor& logits, const Tensor& choice) {
  const Shape& c = choice.shape();
  return {.sequences = c[0],
          .tokens = c[1],
          .experts = logits.shape().last(),
          .top_k = c[2],
          .sigmoid = w.sigmoid,
          .normalise = w.normalise,
          .factor = w.factor,
          .balance = w.balance,
          .z_loss = w.z_loss,
          .groups = w.groups,
          .groups_chosen = w.groups_chosen,
          .step_tokens = w.tokens};
}

/// The router of an op that chooses experts, and does no more.
inline kernels::RouteShape choose_shape(const ChooseExperts& w, const Tensor& logits, const Tensor& chosen) {
  return route_shape(Route{.sigmoid = w.sigmoid, .groups = w.groups, .groups_chosen = w.groups_chosen}, logits, chosen);
}

/// What the tokens of all ranks with parts of a sequence chose, where a router deals the room of its experts by that.
inline kernels::ChosenByAll chosen_by_all(const BoundOp& op, const Route& w) {
  if (!w.reads_chosen()) return {};
  return {op.reads[w.biased ? 2 : 1].as<const int32_t>(), w.sequence, part_of(op, *op.reads[0].type, 1).begin,
          op.plan->token_order};
}

/// Runs of the tokens that a rank holds whose positions are consecutive. body(first, n, position of the first).
template <class Body>
void for_positions(const BoundOp& op, const Type& type, const Body& body) {
  const kernels::Part part = part_of(op, type, 1);
  const TokenOrder& order = op.plan->token_order;
  for (int64_t t = 0; t < type.shape[1];) {
    const int64_t position = order.position(part.begin + t, part.total);
    int64_t n = 1;
    while (t + n < type.shape[1] && order.position(part.begin + t + n, part.total) == position + n) ++n;
    body(t, n, position);
    t += n;
  }
}

/// Queries and keys of an AttentionBlock on this rank.
inline kernels::AttentionBlockShape block_shape(const BoundOp& op, const AttentionBlock& w, bool canonical) {
  const BlockParts p = block_parts(*op.instruction->segment, op.op(), op.mesh(), op.at);
  const auto positions = positions_read(op.op());
  return {op.reads[0].shape()[0],
          p.queries.tokens,
          p.keys.tokens,
          w.heads,
          w.kv_heads,
          w.head_dim,
          p.queries.total,
          p.queries.begin,
          p.keys.begin,
          op.plan->token_order,
          canonical,
          positions ? op.reads[*positions].as<const int32_t>() : nullptr,
          w.v_dim,
          w.window};
}

/// Whole sequences of an Attention on this rank.
inline kernels::AttentionShape attention_shape(const BoundOp& op, const Attention& w, bool canonical) {
  const Shape& out = (w.phase == Phase::kF ? op.writes[0] : op.reads[0]).shape();
  const auto positions = positions_read(op.op());
  return {out[0],     out[1],
          w.heads,    w.kv_heads,
          w.head_dim, op.plan->token_order,
          canonical,  positions ? op.reads[*positions].as<const int32_t>() : nullptr,
          w.v_dim,    w.window};
}

/// Rows of the table of rotations that a rank reads: of its tokens' places or, of packed documents, of every position of a sequence.
struct RopeRows {
  int64_t begin = 0, count = 0, total = 0;
  TokenOrder order;
};
inline RopeRows rope_rows(const BoundOp& op, const Type& qkv) {
  const kernels::Part part = part_of(op, qkv, 1);
  if (positions_read(op.op())) return {0, part.total, part.total, {}};
  return {part.begin, qkv.shape[1], part.total, op.plan->token_order};
}

/// The rank whose part operand 0 of an AttentionMerge is, and the operand of the rank at the beginning of the axis and of those after
/// it: operands in the order of the ranks.
inline std::vector<size_t> merge_order(const BoundOp& op, const AttentionMerge& w) {
  const size_t n = op.reads.size() / (w.phase == Phase::kF ? 2 : 1);
  int at = 0;
  for (size_t a = 0; a < op.mesh().axes.size(); ++a)
    if (n > 1 && op.mesh().axes[a].size > 1 && op.reads[0].type->place[a] == Placement::shard(1)) at = op.at[a];
  std::vector<size_t> order(n);
  const int size = static_cast<int>(n);
  for (int i = 0; i < size; ++i) order[static_cast<size_t>(((at + w.step * i) % size + size) % size)] = static_cast<size_t>(i);
  return order;
}

/// Rows of a product in strips: the strip of one rank in each sequence, or all rows at once.
struct StripRows {
  int64_t sequences = 1, rows = 0;
  int64_t read = 0, read_step = 0;        ///< the first row that is read, and as far as the next sequence's
  int64_t written = 0, written_step = 0;  ///< of the result
};
inline StripRows strip_rows(const BoundOp& op, const Linear& w) {
  const Shape &x = op.reads[0].shape(), &y = op.writes[0].shape();
  if (w.strips == 1) return {1, rows_of(*op.reads[0].type), 0, 0, 0, 0};
  const int axis = strip_axis(*op.instruction->segment, op.op(), op.mesh());
  SHARDLAB_CHECK(axis >= 0, "`{}` has strips along no axis", describe(*op.plan, *op.instruction));
  const int64_t rows = std::min(x[1], y[1]), n = w.strips, strip = ((op.at[static_cast<size_t>(axis)] + w.turn) % n + n) % n;
  return {x[0], rows, x[1] > rows ? strip * rows : 0, x[1], y[1] > rows ? strip * rows : 0, y[1]};
}

/// The operands of Strips in the order of the ranks.
inline std::vector<size_t> strip_order(const BoundOp& op, const Strips& w) {
  const int axis = strip_axis(*op.instruction->segment, op.op(), op.mesh());
  SHARDLAB_CHECK(axis >= 0, "`{}` has strips along no axis", describe(*op.plan, *op.instruction));
  std::vector<size_t> order(op.reads.size());
  const int n = static_cast<int>(order.size()), at = op.at[static_cast<size_t>(axis)];
  for (int i = 0; i < n; ++i) order[static_cast<size_t>(((at + w.step * i) % n + n) % n)] = static_cast<size_t>(i);
  return order;
}

/// The tensor number in the random keys of a dropout: four sites a layer; the embedding's, of layer -1, come first.
inline uint32_t dropout_tensor(int layer, int site) { return static_cast<uint32_t>((layer + 1) * 4 + site); }

/// An accumulating op adds to its write, so the write must lie where the old value lies.
inline void check_in_place(const BoundOp& op, const Tensor& write, const Tensor& old) {
  SHARDLAB_CHECK(write.data == old.data, "`{}` writes beside what it should update in place", describe(*op.plan, *op.instruction));
}

}  // namespace shardlab::runtime
