// Mixed storage: Linear and attention, a block of rows and columns at a time.
#include "kernels/library_product.h"
#include "kernels/window.h"

namespace shardlab::kernels {

namespace {

/// Rows of an activation, and rows or columns of a weight, in a block of Linear F and I. Both are re-widened once for each block of
/// the other: two conversions in 2 * 64 multiply-adds at the most.
constexpr int64_t kLinearRows = 128, kLinearColumns = 64;
/// Columns of dy and of x in a block of Linear W.
constexpr int64_t kWeightRows = 64, kWeightColumns = 128;

}  // namespace

void MixedKernels::linear_forward(const MixedLinearForward& a, Scratch& scratch) const {
  if (a.product != nullptr) {
    if (!scratch.counting()) a.product->run({a.x.data, a.w.data, a.bias.data, a.y.data});
    return;
  }
  const int64_t rows = std::min(a.rows, kLinearRows), columns = std::min(a.out, kLinearColumns);
  Window x(s_, a.x, rows * a.in, scratch), w(s_, a.w, columns * a.in, scratch), bias(s_, a.bias, columns, scratch);
  Panel y(s_, a.y, a.out, {rows, columns}, scratch);
  LinearForward args{.rows = rows, .in = a.in, .out = columns, .in_part = a.in_part, .canonical = a.canonical};
  args.scratch = scratch.take_bytes(linear_scratch_bytes(args));
  if (scratch.counting()) return;
  for_blocks(a.rows, kLinearRows, [&](int64_t row, int64_t count) {
    args.x = x.read(row * a.in, count * a.in);
    args.rows = count;
    for_blocks(a.out, kLinearColumns, [&](int64_t column, int64_t n) {
      args.w = w.read(column * a.in, n * a.in);
      args.bias = bias.read(column, n);
      args.y = y.place(row * a.out + column, {count, n});
      args.out = n;
      k_.linear_forward(args);
      y.write();
    });
  });
}

void MixedKernels::linear_input(const MixedLinearInput& a, Scratch& scratch) const {
  if (a.product != nullptr) {
    if (!scratch.counting()) a.product->run({a.dy.data, a.w.data, nullptr, a.dx.data});
    return;
  }
  const int64_t rows = std::min(a.rows, kLinearRows), columns = std::min(a.in, kLinearColumns);
  Window dy(s_, a.dy, rows * a.out, scratch);
  Panel w(s_, a.w, a.in, {a.out, columns}, scratch), dx(s_, a.dx, a.in, {rows, columns}, scratch);
  LinearInput args{.rows = rows, .in = columns, .out = a.out, .out_part = a.out_part, .canonical = a.canonical};
  args.scratch = scratch.take_bytes(linear_scratch_bytes(args));
  if (scratch.counting()) return;
  for_blocks(a.rows, kLinearRows, [&](int64_t row, int64_t count) {
    args.dy = dy.read(row * a.out, count * a.out);
    args.rows = count;
    for_blocks(a.in, kLinearColumns, [&](int64_t column, int64_t n) {
      args.w = w.read(column, {a.out, n});
      args.dx = dx.place(row * a.in + column, {count, n});
      args.in = n;
      k_.linear_input(args);
      dx.write();
    });
  });
}

void MixedKernels::linear_weight(const MixedLinearWeight& a, Scratch& scratch) const {
  const int64_t rows = a.tokens.rows();
  if (a.product != nullptr) {
    if (!scratch.counting()) a.product->run({a.dy.data, a.x.data, nullptr, a.dw.data});
    if (a.dbias.data != nullptr) bias_weight({a.dy, a.dbias, a.tokens, a.out, a.accumulate}, scratch);
    return;
  }
  const int64_t outs = std::min(a.out, kWeightRows), ins = std::min(a.in, kWeightColumns);
  Panel dy(s_, a.dy, a.out, {rows, outs}, scratch), x(s_, a.x, a.in, {rows, ins}, scratch);
  Panel dw(s_, a.dw, a.in, {outs, ins}, scratch);
  Window dbias(s_, a.dbias, outs, scratch);
  LinearWeight args{.tokens = a.tokens, .in = ins, .out = outs, .accumulate = a.accumulate, .canonical = a.canonical};
  args.scratch = scratch.take_bytes(linear_scratch_bytes(args));
  if (scratch.counting()) return;
  for_blocks(a.out, kWeightRows, [&](int64_t out, int64_t m) {
    args.dy = dy.read(out, {rows, m});
    args.out = m;
    for_blocks(a.in, kWeightColumns, [&](int64_t in, int64_t n) {
      args.x = x.read(in, {rows, n});
      args.in = n;
      args.dbias = in == 0 ? dbias.read(out, m) : nullptr;
      args.dw = a.accumulate ? dw.read(out * a.in + in, {m, n}) : dw.place(out * a.in + in, {m, n});
      k_.linear_weight(args);
      dw.write();
      if (in == 0) dbias.write();
    });
  });
}

namespace {

/// One kv head's group of query heads in one sequence: an attention of its own.
AttentionShape group_of(const AttentionShape& s) {
  return {1, s.tokens, s.heads / s.kv_heads, 1, s.head_dim, s.order, s.canonical, s.positions, s.value_dim, s.window};
}
/// The positions of one sequence's tokens in their documents, where there are documents.
const int32_t* positions_of(const int32_t* positions, int64_t tokens, int64_t sequence) {
  return positions == nullptr ? nullptr : positions + sequence * tokens;
}

/// First element of a group's columns.
struct GroupAt {
  int64_t qkv, out, lse;
};
GroupAt group_at(const AttentionShape& s, int64_t sequence, int group) {
  const AttentionShape one = group_of(s);
  return {sequence * s.tokens * s.qkv_width() + group * one.qkv_width(),
          sequence * s.tokens * s.out_width() + group * one.out_width(), (sequence * s.heads + group * one.heads) * s.tokens};
}

void check(const AttentionShape& s) {
  SHARDLAB_CHECK(s.kv_heads >= 1 && s.heads % s.kv_heads == 0, "attention of {} heads on {} kv heads", s.heads, s.kv_heads);
}

}  // namespace

void MixedKernels::attention_forward(const MixedAttentionForward& a, Scratch& scratch) const {
  check(a.shape);
  const AttentionShape one = group_of(a.shape);
  const Panel::Size in{one.tokens, one.qkv_width()}, out{one.tokens, one.out_width()};
  Panel qkv(s_, a.qkv, a.shape.qkv_width(), in, scratch), o(s_, a.o, a.shape.out_width(), out, scratch);
  AttentionForward args{.shape = one};
  args.scratch = scratch.take_bytes(attention_scratch_bytes(args));
  if (scratch.counting()) return;
  for (int64_t b = 0; b < a.shape.sequences; ++b)
    for (int group = 0; group < a.shape.kv_heads; ++group) {
      const GroupAt at = group_at(a.shape, b, group);
      args.qkv = qkv.read(at.qkv, in);
      args.o = o.place(at.out, out);
      args.lse = a.lse + at.lse;
      args.shape.positions = positions_of(a.shape.positions, a.shape.tokens, b);
      k_.attention_forward(args);
      o.write();
    }
}

void MixedKernels::attention_input(const MixedAttentionInput& a, Scratch& scratch) const {
  check(a.shape);
  const AttentionShape one = group_of(a.shape);
  const Panel::Size in{one.tokens, one.qkv_width()}, out{one.tokens, one.out_width()};
  Panel qkv(s_, a.qkv, a.shape.qkv_width(), in, scratch), dqkv(s_, a.dqkv, a.shape.qkv_width(), in, scratch);
  Panel o(s_, a.o, a.shape.out_width(), out, scratch), dout(s_, a.dout, a.shape.out_width(), out, scratch);
  AttentionInput args{.shape = one};
  args.scratch = scratch.take_bytes(attention_scratch_bytes(args));
  if (scratch.counting()) return;
  for (int64_t b = 0; b < a.shape.sequences; ++b)
    for (int group = 0; group < a.shape.kv_heads; ++group) {
      const GroupAt at = group_at(a.shape, b, group);
      args.dout = dout.read(at.out, out);
      args.o = o.read(at.out, out);
      args.qkv = qkv.read(at.qkv, in);
      args.dqkv = dqkv.place(at.qkv, in);
      args.lse = a.lse + at.lse;
      args.shape.positions = positions_of(a.shape.positions, a.shape.tokens, b);
      k_.attention_input(args);
      dqkv.write();
    }
}

void MixedKernels::split_heads(const MixedSplitHeads& a, Scratch& scratch) const {
  SHARDLAB_CHECK(a.kv_heads >= 1 && a.heads % a.kv_heads == 0, "attention of {} heads on {} kv heads", a.heads, a.kv_heads);
  const int64_t queries = int64_t{a.heads / a.kv_heads} * a.head_dim, keys = int64_t{a.head_dim} + a.value_dim;
  const auto at = [](const Stored& x, int64_t element) {
    return Stored{static_cast<char*>(x.data) + element * bytes_per_element(x.dtype), x.dtype, {}};
  };
  if (scratch.counting()) return copy({a.back ? a.q : a.qkv, a.back ? a.qkv : a.q, queries}, scratch);
  Scratch lent = scratch;
  const auto move = [&](const Stored& whole, const Stored& part, int64_t n) {
    scratch = lent;  // every run uses the same block
    copy(a.back ? MixedCopy{part, whole, n} : MixedCopy{whole, part, n}, scratch);
  };
  for (int64_t i = 0; i < a.rows * a.kv_heads; ++i) {
    move(at(a.qkv, i * (queries + keys)), at(a.q, i * queries), queries);
    move(at(a.qkv, i * (queries + keys) + queries), at(a.kv, i * keys), keys);
  }
}

namespace {

/// One kv head's group in one sequence of a block, and the first elements of its columns.
struct BlockGroup {
  AttentionBlockShape one;
  int64_t q, out, kv, by_head, rows;
};
BlockGroup group_of(const AttentionBlockShape& s, int64_t sequence, int group) {
  BlockGroup g{s, 0, 0, 0, 0, 0};
  g.one.sequences = 1;
  g.one.heads = s.heads / s.kv_heads;
  g.one.kv_heads = 1;
  g.one.positions = positions_of(s.positions, s.tokens, sequence);
  g.q = sequence * s.queries * s.q_width() + group * g.one.q_width();
  g.out = sequence * s.queries * s.out_width() + group * g.one.out_width();
  g.kv = sequence * s.keys * s.kv_width() + group * g.one.kv_width();
  g.by_head = sequence * s.keys * s.by_head_width() + group * g.one.by_head_width();
  g.rows = (sequence * s.heads + group * g.one.heads) * s.queries;
  return g;
}
void check(const AttentionBlockShape& s) {
  SHARDLAB_CHECK(s.kv_heads >= 1 && s.heads % s.kv_heads == 0, "attention of {} heads on {} kv heads", s.heads, s.kv_heads);
}

}  // namespace

void MixedKernels::attention_block_forward(const MixedAttentionBlockForward& a, Scratch& scratch) const {
  check(a.shape);
  const AttentionBlockShape one = group_of(a.shape, 0, 0).one;
  const Panel::Size rows{one.queries, one.q_width()}, out{one.queries, one.out_width()}, keys{one.keys, one.kv_width()};
  Panel q(s_, a.q, a.shape.q_width(), rows, scratch), kv(s_, a.kv, a.shape.kv_width(), keys, scratch);
  Panel o(s_, {a.o, DType::f32, {}}, a.shape.out_width(), out, scratch);
  AttentionBlockForward args{.shape = one, .carry = a.carry};
  args.scratch = scratch.take_bytes(attention_scratch_bytes(args));
  if (scratch.counting()) return;
  for (int64_t b = 0; b < a.shape.sequences; ++b)
    for (int group = 0; group < a.shape.kv_heads; ++group) {
      const BlockGroup g = group_of(a.shape, b, group);
      args.q = q.read(g.q, rows);
      args.kv = kv.read(g.kv, keys);
      args.o = a.carry ? o.read(g.out, out) : o.place(g.out, out);
      args.lse = a.lse == nullptr ? nullptr : a.lse + g.rows;
      args.sums = a.sums == nullptr ? nullptr : a.sums + 2 * g.rows;
      args.shape.positions = g.one.positions;
      k_.attention_block_forward(args);
      o.write();
    }
}

void MixedKernels::attention_block_input(const MixedAttentionBlockInput& a, Scratch& scratch) const {
  check(a.shape);
  const AttentionBlockShape one = group_of(a.shape, 0, 0).one;
  const int64_t width = a.shape.q_width();
  const Panel::Size rows{one.queries, one.q_width()}, out{one.queries, one.out_width()}, keys{one.keys, one.kv_width()};
  const Panel::Size gradient{one.keys, a.by_head ? one.by_head_width() : one.kv_width()};
  Panel q(s_, a.q, width, rows, scratch), dq(s_, a.dq, width, rows, scratch), o(s_, a.o, a.shape.out_width(), out, scratch);
  Panel dout(s_, a.dout, a.shape.out_width(), out, scratch), kv(s_, a.kv, a.shape.kv_width(), keys, scratch);
  Panel dkv(s_, a.dkv, a.by_head ? a.shape.by_head_width() : a.shape.kv_width(), gradient, scratch);
  AttentionBlockInput args{.shape = one, .carry = a.carry, .carry_kv = a.carry_kv, .by_head = a.by_head};
  args.scratch = scratch.take_bytes(attention_scratch_bytes(args));
  if (scratch.counting()) return;
  for (int64_t b = 0; b < a.shape.sequences; ++b)
    for (int group = 0; group < a.shape.kv_heads; ++group) {
      const BlockGroup g = group_of(a.shape, b, group);
      const int64_t at = a.by_head ? g.by_head : g.kv;
      args.dout = dout.read(g.out, out);
      args.o = o.read(g.out, out);
      args.q = q.read(g.q, rows);
      args.kv = kv.read(g.kv, keys);
      args.dq = a.carry ? dq.read(g.q, rows) : dq.place(g.q, rows);
      args.dkv = a.carry_kv ? dkv.read(at, gradient) : dkv.place(at, gradient);
      args.lse = a.lse + g.rows;
      args.shape.positions = g.one.positions;
      k_.attention_block_input(args);
      dq.write();
      dkv.write();
    }
}

void MixedKernels::attention_merge_forward(const MixedAttentionMergeForward& a, Scratch& scratch) const {
  AttentionMergeForward args = a.merge;
  args.sequences = 1;
  const int64_t width = int64_t{args.heads} * args.value_dim, rows = args.queries;
  Window o(s_, a.o, rows * width, scratch);
  if (scratch.counting()) return;
  for (int64_t b = 0; b < a.merge.sequences; ++b) {
    for (size_t i = 0; i < static_cast<size_t>(args.parts); ++i) {
      args.part_o[i] = a.merge.part_o[i] + b * rows * width;
      args.part_sums[i] = a.merge.part_sums[i] + 2 * b * args.heads * rows;
    }
    args.lse = a.merge.lse + b * args.heads * rows;
    args.o = o.place(b * rows * width, rows * width);
    k_.attention_merge_forward(args);
    o.write();
  }
}

void MixedKernels::attention_merge_input(const MixedAttentionMergeInput& a, Scratch& scratch) const {
  AttentionMergeInput args = a.merge;
  const int64_t in = args.heads * args.width, out = args.kv_heads * args.width, block = rows_per_block(out);
  Window y(s_, a.y, block * out, scratch);
  if (scratch.counting()) return;
  for_blocks(a.merge.rows, block, [&](int64_t first, int64_t n) {
    for (size_t i = 0; i < static_cast<size_t>(args.parts); ++i) args.part[i] = a.merge.part[i] + first * in;
    args.rows = n;
    args.y = y.place(first * out, n * out);
    k_.attention_merge_input(args);
    y.write();
  });
}

}  // namespace shardlab::kernels
