// RMSNorm over each head of q and of k, in the order of docs/canonical-order.md throughout: in fp32 the CPU's bits.
//
// F and I: half a warp has a head. W, three launches: a thread has an element of a head in a leaf of a sequence, a chain over its tokens;
// then an element of a gamma in a leaf, the tree over the heads; then an element of a gamma, the tree over leaves and sequences.
#include <cmath>

#include "kernels/cuda/launch.h"
#include "kernels/cuda/launches.h"
#include "kernels/cuda/sums.h"
#include "kernels/cuda/vectors.h"

namespace shardlab::gpu::SHARDLAB_GPU_VARIANT {
namespace {

/// The head of this half of a warp.
struct HeadRow {
  bool inside;      ///< there is such a head
  bool normed;      ///< it is one of q or of k
  bool key;         ///< of k
  int64_t at;       ///< its first element
  int64_t stat;     ///< its statistic
  int64_t element;  ///< the first of this thread's

  SHARDLAB_DEVICE HeadRow(const Thread& t, const HeadNormShape& s) {
    const int64_t row = t.block_x() * geometry::kHalfWarpRows + t.index() / kLanes, each = s.queries() + 2;
    const int64_t group = row / each, head = row % each;
    inside = group < s.tokens.rows() * s.kv_heads;
    normed = inside && head <= s.queries();
    key = head == s.queries();
    at = row * s.head_dim;
    stat = group * (each - 1) + head;
    element = t.index() % kLanes;
  }
};

template <class T>
struct HeadNormForwardRows {
  static constexpr int kThreads = geometry::kHalfWarpThreads;
  using Args = HeadNormForward;

  SHARDLAB_DEVICE static void run(const Thread& t, const Args& a) {
    const int64_t d = a.shape.head_dim;
    const HeadRow row(t, a.shape);
    const T* x = static_cast<const T*>(a.qkv.data) + row.at;
    float square = 0;
    if (row.normed)
#pragma unroll 4
      for (int64_t i = row.element; i < d; i += kLanes) square = square + value_of(x[i]) * value_of(x[i]);
    const float inverse = 1.0f / sqrtf(lanes_sum(t, square) / static_cast<float>(d) + a.epsilon);
    if (!row.inside) return;
    T* y = static_cast<T*>(a.y.data) + row.at;
    const Input& gamma = row.key ? a.gamma_k : a.gamma_q;
    for (int64_t i = row.element; i < d; i += kLanes)
      y[i] = row.normed ? rounded<T>((value_of(x[i]) * inverse) * values_at<1>(gamma, i).at[0]) : x[i];
    if (row.normed && row.element == 0) a.stats[row.stat] = inverse;
  }
};

template <class T>
struct HeadNormInputRows {
  static constexpr int kThreads = geometry::kHalfWarpThreads;
  using Args = HeadNormInput;

  SHARDLAB_DEVICE static void run(const Thread& t, const Args& a) {
    const int64_t d = a.shape.head_dim;
    const HeadRow row(t, a.shape);
    const T *dy = static_cast<const T*>(a.dy.data) + row.at, *x = static_cast<const T*>(a.qkv.data) + row.at;
    const Input& gamma = row.key ? a.gamma_k : a.gamma_q;
    const float inverse = row.normed ? a.stats[row.stat] : 0.0f;
    float along = 0;
    if (row.normed)
      for (int64_t i = row.element; i < d; i += kLanes)
        along = along + (value_of(dy[i]) * values_at<1>(gamma, i).at[0]) * (value_of(x[i]) * inverse);
    const float mean = lanes_sum(t, along) / static_cast<float>(d);
    if (!row.inside) return;
    T* dx = static_cast<T*>(a.dqkv.data) + row.at;
    for (int64_t i = row.element; i < d; i += kLanes) {
      if (!row.normed) {
        dx[i] = dy[i];
        continue;
      }
      const float g = value_of(dy[i]) * values_at<1>(gamma, i).at[0];
      dx[i] = rounded<T>((g - (value_of(x[i]) * inverse) * mean) * inverse);
    }
  }
};

struct WeightArgs {
  HeadNormWeight a;
  int leaves;
  float* heads;  ///< [sequences, leaves, heads + kv_heads, head_dim], by kv head its query heads and its key
  float* sums;   ///< [sequences, leaves, 2, head_dim], of q and of k
};

template <class T>
struct HeadNormLeaves {
  static constexpr int kThreads = geometry::kHeadNormThreads;
  using Args = WeightArgs;

  SHARDLAB_DEVICE static void run(const Thread& t, const Args& args) {
    const HeadNormWeight& a = args.a;
    const HeadNormShape& s = a.shape;
    const int64_t d = s.head_dim, each = s.queries() + 1, column = t.block_x() * kThreads + t.index();
    if (column >= s.stats_width() * d) return;
    const int64_t stat = column / d, at = (stat / each * (each + 1) + stat % each) * d + column % d;
    const int64_t width = s.kv_heads * (each + 1) * d, first = t.block_z() * s.tokens.tokens;
    const kernels::PartLeaves leaves(s.tokens.part, s.tokens.tokens);
    const int leaf = static_cast<int>(t.block_y());
    const T *dy = static_cast<const T*>(a.dy.data), *x = static_cast<const T*>(a.qkv.data);
    float sum = 0;
#pragma unroll 4
    for (int64_t row = first + leaves.begin(leaf); row < first + leaves.begin(leaf + 1); ++row)
      sum = sum + value_of(dy[row * width + at]) * (value_of(x[row * width + at]) * a.stats[row * s.stats_width() + stat]);
    args.heads[(t.block_z() * args.leaves + leaf) * s.stats_width() * d + column] = sum;
  }
};

struct HeadNormTrees {
  static constexpr int kThreads = geometry::kHeadNormThreads;
  using Args = WeightArgs;

  SHARDLAB_DEVICE static void run(const Thread& t, const Args& args) {
    const HeadNormShape& s = args.a.shape;
    const int64_t d = s.head_dim, each = s.queries(), column = t.block_x() * kThreads + t.index();
    if (column >= 2 * d) return;
    const bool keys = column >= d;
    const int64_t i = column % d, at = t.block_z() * args.leaves + t.block_y();
    const float* heads = args.heads + at * s.stats_width() * d;
    TreeCounter<float, kSequenceLevels> tree;
    for (int64_t group = 0; group < s.kv_heads; ++group) {
      const int64_t first = group * (each + 1);
      for (int64_t h = keys ? each : 0; h < (keys ? each + 1 : each); ++h) tree.push(heads[(first + h) * d + i]);
    }
    const float sum = tree.total(0.0f);
    if (args.a.apart > 1)
      put<1>(keys ? args.a.dgamma_k : args.a.dgamma_q, at * d + i, Values<1>{{sum}});
    else
      args.sums[at * 2 * d + column] = sum;
  }
};

struct HeadNormTotals {
  static constexpr int kThreads = geometry::kHeadNormThreads;
  using Args = WeightArgs;

  SHARDLAB_DEVICE static void run(const Thread& t, const Args& args) {
    const HeadNormWeight& a = args.a;
    const int64_t d = a.shape.head_dim, column = t.block_x() * kThreads + t.index();
    if (column >= 2 * d) return;
    const bool apart = a.apart > 0;
    TreeCounter<float, kSequenceLevels> total;
    for (int64_t b = apart ? t.block_z() : 0; b < (apart ? t.block_z() + 1 : a.shape.tokens.sequences); ++b) {
      TreeCounter<float, kLeafLevels> sequence;
      for (int leaf = 0; leaf < args.leaves; ++leaf) sequence.push(args.sums[(b * args.leaves + leaf) * 2 * d + column]);
      total.push(sequence.total(0.0f));
    }
    const Output& out = column >= d ? a.dgamma_k : a.dgamma_q;
    const int64_t at = (apart ? t.block_z() * d : 0) + column % d;
    const float sum = total.total(0.0f);
    put<1>(out, at, Values<1>{{a.accumulate ? values_at<1>(Input(out), at).at[0] + sum : sum}});
  }
};

void check(const HeadNormShape& s) {
  expect(s.kv_heads >= 1 && s.heads % s.kv_heads == 0, "head norm: kv_heads divides heads; this is heads", s.heads);
  expect(s.head_dim >= 1, "head norm: a head has an element", s.head_dim);
}
int64_t head_rows(const HeadNormShape& s) { return s.tokens.rows() * s.kv_heads * (s.queries() + 2); }

}  // namespace

void head_norm_forward(const HeadNormForward& a, Stream s) {
  check(a.shape);
  expect_type(a.y.dtype, a.qkv.dtype, false, "head norm: qkv and y are of one type");
  for (const Input& gamma : {a.gamma_q, a.gamma_k})
    expect_type(gamma.dtype, a.qkv.dtype, true, "head norm: gammas are f32 or of qkv's type");
  with_type(a.qkv.dtype, "head norm: qkv is f32, bf16 or f16", [&]<class T>(Named<T>) {
    launch<HeadNormForwardRows<T>>("head_norm_forward", geometry::half_warps(head_rows(a.shape)), a, s);
  });
}

void head_norm_input(const HeadNormInput& a, Stream s) {
  check(a.shape);
  expect_type(a.qkv.dtype, a.dy.dtype, false, "head norm: dy and qkv are of one type");
  expect_type(a.dqkv.dtype, a.dy.dtype, false, "head norm: dy and dqkv are of one type");
  for (const Input& gamma : {a.gamma_q, a.gamma_k})
    expect_type(gamma.dtype, a.dy.dtype, true, "head norm: gammas are f32 or of dy's type");
  with_type(a.dy.dtype, "head norm: dy is f32, bf16 or f16", [&]<class T>(Named<T>) {
    launch<HeadNormInputRows<T>>("head_norm_input", geometry::half_warps(head_rows(a.shape)), a, s);
  });
}

void head_norm_weight(const HeadNormWeight& a, Stream s) {
  check(a.shape);
  const Tokens& tokens = a.shape.tokens;
  expect(tokens.sequences >= 1 && tokens.sequences <= kMostSequences, "head norm: 1 <= sequences < 32768", tokens.sequences);
  expect_type(a.qkv.dtype, a.dy.dtype, false, "head norm: dy and qkv are of one type");
  expect(a.scratch.bytes >= scratch_bytes(a), "head norm: scratch is large enough", a.scratch.bytes);
  const int leaves = kernels::PartLeaves(tokens.part, tokens.tokens).count();
  expect(a.apart <= 1 || a.apart == leaves, "head norm: a sum for each leaf that the tokens are of; leaves", leaves);
  expect(a.apart == 0 || !a.accumulate, "head norm: sums that stay apart do not accumulate; apart", a.apart);
  auto* heads = static_cast<float*>(a.scratch.data);
  const WeightArgs args{a, leaves, heads, heads + tokens.sequences * leaves * a.shape.stats_width() * a.shape.head_dim};
  with_type(a.dy.dtype, "head norm: dy is f32, bf16 or f16", [&]<class T>(Named<T>) {
    launch<HeadNormLeaves<T>>("head_norm_weight", geometry::head_norm_leaves(a, leaves), args, s);
  });
  launch<HeadNormTrees>("head_norm_weight", geometry::head_norm_trees(a, leaves), args, s);
  if (a.apart <= 1) launch<HeadNormTotals>("head_norm_weight", geometry::head_norm_totals(a), args, s);
}

}  // namespace shardlab::gpu::SHARDLAB_GPU_VARIANT
