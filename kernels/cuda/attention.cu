// Attention on the fp32 units, and what all types share.
#include "kernels/cuda/attention.h"

#include <cmath>

#include "kernels/cuda/fp32_tiles.h"
#include "kernels/cuda/launches.h"
#include "kernels/cuda/sums.h"
#include "kernels/cuda/vectors.h"

namespace shardlab::gpu::SHARDLAB_GPU_VARIANT {
namespace {

template <int kDepth, int kTile>
struct Fp32Forward {
  using Tiles = Fp32Tiles<kDepth, kTile>;
  static constexpr int kThreads = Tiles::kThreads, kRows = Tiles::kRows, kColumns = Tiles::kColumns;
  static constexpr int64_t kShared = 4 * (3 * Tiles::kOperand + Tiles::kScores);
  using Args = AttentionForward;

  SHARDLAB_DEVICE static void run(const Thread& t, const Args& a) {
    const AttentionShape& s = a.shape;
    float* queries = reinterpret_cast<float*>(t.shared());
    float *keys = queries + Tiles::kOperand, *values = keys + Tiles::kOperand, *scores = values + Tiles::kOperand;
    // The last queries see the most keys: their blocks begin first.
    const int64_t tile = t.blocks_x() - 1 - t.block_x(), first = tile * kTile, head = t.block_y(), sequence = t.block_z();
    const Head h = head_of(s, head);
    const float* qkv = static_cast<const float*>(a.qkv.data) + sequence * s.tokens * h.stride;
    Tiles::fetch(t, qkv + h.query, h.stride, first, s.tokens, s.head_dim, queries);
    typename Tiles::Result out = {};
    float most[kRows], sum[kRows] = {};
    for (float& m : most) m = -INFINITY;
    for (int64_t key = 0; key <= first; key += kTile) {
      t.barrier();
      Tiles::fetch(t, qkv + h.key, h.stride, key, s.tokens, s.head_dim, keys);
      Tiles::fetch(t, qkv + h.value, h.stride, key, s.tokens, s.head_dim, values);
      t.barrier();
      typename Tiles::Scores x;
      Tiles::dots(t, queries, keys, x);
      soften(t, first - key, score_scale(s), x, most, sum, out);
      Tiles::share(t, x, scores);
      Tiles::add_weighted(t, scores, values, out);
    }
    float inverse[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const float total = Tiles::row_sum(t, sum[i]);
      inverse[i] = 1.0f / total;
      const int64_t query = first + Tiles::row(t, i);
      if (t.index() % kSide == 0 && query < s.tokens)
        a.lse[(sequence * s.heads + head) * s.tokens + query] = most[i] + ::logf(total);
    }
    Tiles::write(t, out, inverse, static_cast<float*>(a.o.data) + sequence * s.tokens * s.out_width() + head * s.head_dim,
                 s.out_width(), first, s);
  }

 private:
  /// Scores become exp(score - most); what was summed under a smaller maximum is scaled down. ahead: the first query less the first
  /// key; key 0 is seen by all, so that `most` is finite from the first tile on.
  SHARDLAB_DEVICE static void soften(const Thread& t, int64_t ahead, float scale, typename Tiles::Scores& x, float (&most)[kRows],
                                     float (&sum)[kRows], typename Tiles::Result& out) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      float largest = most[i];
#pragma unroll
      for (int j = 0; j < kRows; ++j) {
        x[i][j] = Tiles::column(t, j) > ahead + Tiles::row(t, i) ? -INFINITY : x[i][j] * scale;
        largest = x[i][j] > largest ? x[i][j] : largest;
      }
      largest = Tiles::row_max(t, largest);
      const float shrink = ::expf(most[i] - largest);
      most[i] = largest;
      sum[i] = sum[i] * shrink;
#pragma unroll
      for (int j = 0; j < kRows; ++j) {
        x[i][j] = ::expf(x[i][j] - largest);
        sum[i] = sum[i] + x[i][j];
      }
#pragma unroll
      for (int c = 0; c < kColumns; ++c) out[i][c] = out[i][c] * shrink;
    }
  }
};

template <int kDepth, int kTile>
struct Fp32QueryGradient {
  using Tiles = Fp32Tiles<kDepth, kTile>;
  static constexpr int kThreads = Tiles::kThreads, kRows = Tiles::kRows;
  static constexpr int64_t kShared = 4 * (4 * Tiles::kOperand + Tiles::kScores);
  using Args = AttentionInput;

  SHARDLAB_DEVICE static void run(const Thread& t, const Args& a) {
    const AttentionShape& s = a.shape;
    float* queries = reinterpret_cast<float*>(t.shared());
    float *douts = queries + Tiles::kOperand, *keys = douts + Tiles::kOperand, *values = keys + Tiles::kOperand;
    float* scores = values + Tiles::kOperand;
    const int64_t tile = t.blocks_x() - 1 - t.block_x(), first = tile * kTile, head = t.block_y(), sequence = t.block_z();
    const Head h = head_of(s, head);
    const float* qkv = static_cast<const float*>(a.qkv.data) + sequence * s.tokens * h.stride;
    const float* dout = static_cast<const float*>(a.dout.data) + sequence * s.tokens * s.out_width() + head * s.head_dim;
    Tiles::fetch(t, qkv + h.query, h.stride, first, s.tokens, s.head_dim, queries);
    Tiles::fetch(t, dout, s.out_width(), first, s.tokens, s.head_dim, douts);
    float lse[kRows], dot[kRows], one[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int64_t query = first + Tiles::row(t, i), at = (sequence * s.heads + head) * s.tokens + query;
      lse[i] = query < s.tokens ? a.lse[at] : 0.0f;
      dot[i] = query < s.tokens ? static_cast<const float*>(a.scratch.data)[at] : 0.0f;
      one[i] = 1.0f;
    }
    typename Tiles::Result dq = {};
    const float scale = score_scale(s);
    for (int64_t key = 0; key <= first; key += kTile) {
      t.barrier();
      Tiles::fetch(t, qkv + h.key, h.stride, key, s.tokens, s.head_dim, keys);
      Tiles::fetch(t, qkv + h.value, h.stride, key, s.tokens, s.head_dim, values);
      t.barrier();
      typename Tiles::Scores x, dp;
      Tiles::dots(t, queries, keys, x);
      Tiles::dots(t, douts, values, dp);
#pragma unroll
      for (int i = 0; i < kRows; ++i)
#pragma unroll
        for (int j = 0; j < kRows; ++j) {
          const bool seen = Tiles::column(t, j) <= first - key + Tiles::row(t, i);
          x[i][j] = seen ? ::expf(x[i][j] * scale - lse[i]) * (dp[i][j] - dot[i]) * scale : 0.0f;
        }
      Tiles::share(t, x, scores);
      Tiles::add_weighted(t, scores, keys, dq);
    }
    Tiles::write(t, dq, one, static_cast<float*>(a.dqkv.data) + sequence * s.tokens * h.stride + h.query, h.stride, first, s);
  }
};

template <int kDepth, int kTile>
struct Fp32KeyGradient {
  using Tiles = Fp32Tiles<kDepth, kTile>;
  static constexpr int kThreads = Tiles::kThreads, kRows = Tiles::kRows;
  static constexpr int64_t kShared = 4 * (4 * Tiles::kOperand + 2 * Tiles::kScores);
  using Args = AttentionInput;

  /// Rows are keys here, columns queries.
  SHARDLAB_DEVICE static void run(const Thread& t, const Args& a) {
    const AttentionShape& s = a.shape;
    float* keys = reinterpret_cast<float*>(t.shared());
    float *values = keys + Tiles::kOperand, *queries = values + Tiles::kOperand, *douts = queries + Tiles::kOperand;
    float *weights = douts + Tiles::kOperand, *slopes = weights + Tiles::kScores;
    const int64_t first = t.block_x() * kTile, group = t.block_y(), sequence = t.block_z(), per_group = s.heads / s.kv_heads;
    const Head kv = head_of(s, group * per_group);
    const float* qkv = static_cast<const float*>(a.qkv.data) + sequence * s.tokens * kv.stride;
    Tiles::fetch(t, qkv + kv.key, kv.stride, first, s.tokens, s.head_dim, keys);
    Tiles::fetch(t, qkv + kv.value, kv.stride, first, s.tokens, s.head_dim, values);
    typename Tiles::Result dk = {}, dv = {};
    float one[kRows];
    for (float& x : one) x = 1.0f;
    for (int64_t head = group * per_group; head < (group + 1) * per_group; ++head) {
      const float* dout = static_cast<const float*>(a.dout.data) + sequence * s.tokens * s.out_width() + head * s.head_dim;
      for (int64_t query = first; query < s.tokens; query += kTile) {
        t.barrier();
        Tiles::fetch(t, qkv + head_of(s, head).query, kv.stride, query, s.tokens, s.head_dim, queries);
        Tiles::fetch(t, dout, s.out_width(), query, s.tokens, s.head_dim, douts);
        t.barrier();
        typename Tiles::Scores p, ds;
        Tiles::dots(t, keys, queries, p);
        Tiles::dots(t, values, douts, ds);
        differentiate(t, a, (sequence * s.heads + head) * s.tokens, query, first, p, ds);
        Tiles::share(t, p, weights);
        Tiles::add_weighted(t, weights, douts, dv);
        Tiles::share(t, ds, slopes);
        Tiles::add_weighted(t, slopes, queries, dk);
      }
    }
    float* dqkv = static_cast<float*>(a.dqkv.data) + sequence * s.tokens * kv.stride;
    Tiles::write(t, dk, one, dqkv + kv.key, kv.stride, first, s);
    Tiles::write(t, dv, one, dqkv + kv.value, kv.stride, first, s);
  }

 private:
  /// Products of keys and queries become p; products of values and output gradients become ds.
  SHARDLAB_DEVICE static void differentiate(const Thread& t, const Args& a, int64_t row, int64_t query, int64_t first,
                                            typename Tiles::Scores& p, typename Tiles::Scores& ds) {
    const float scale = score_scale(a.shape);
#pragma unroll
    for (int j = 0; j < kRows; ++j) {
      const int64_t q = query + Tiles::column(t, j);
      const bool inside = q < a.shape.tokens;
      const float lse = inside ? a.lse[row + q] : 0.0f, dot = inside ? static_cast<const float*>(a.scratch.data)[row + q] : 0.0f;
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const bool seen = inside && first + Tiles::row(t, i) <= q;
        p[i][j] = seen ? ::expf(p[i][j] * scale - lse) : 0.0f;
        ds[i][j] = p[i][j] * (ds[i][j] - dot) * scale;
      }
    }
  }
};

/// D_i = do_i . o_i -> [sequences, heads, tokens]; a warp a row and head.
template <class T>
struct OutputDots {
  static constexpr int kThreads = 128;
  struct Args {
    AttentionInput a;
    float* dots;
  };
  SHARDLAB_DEVICE static void run(const Thread& t, const Args& args) {
    const AttentionShape& s = args.a.shape;
    const int64_t token = t.block_x() * (kThreads / kWarp) + t.warp(), head = t.block_y(), sequence = t.block_z();
    if (token >= s.tokens) return;
    const int64_t at = (sequence * s.tokens + token) * s.out_width() + head * s.head_dim;
    const T *dout = static_cast<const T*>(args.a.dout.data) + at, *out = static_cast<const T*>(args.a.o.data) + at;
    float sum = 0;
    for (int d = t.lane(); d < s.head_dim; d += kWarp) sum = ::fmaf(value_of(dout[d]), value_of(out[d]), sum);
    sum = warp_sum(t, sum);
    if (t.lane() == 0) args.dots[(sequence * s.heads + head) * s.tokens + token] = sum;
  }
};

/// In canonical mode, where positions are not the order in memory, within documents or a window, and where values have a width of their own
/// attention is that of a block which is all of a sequence.
bool in_leaves(const AttentionShape& s) {
  return s.canonical || s.order.kind != TokenOrder::Kind::kContiguous || s.positions != nullptr || s.window > 0 ||
         s.values() != s.head_dim;
}

void check(const AttentionShape& s) {
  const std::string_view why = attention_refusal(s);
  expect(why.empty(), why.empty() ? "" : why.data(), s.head_dim);
}

/// Launches Kernel<depth, tile> with the tile that attention_tiles names.
template <template <int, int> class Kernel, class Args>
void launch_fp32(const char* name, Geometry g, const Args& a, Stream s) {
  const auto run = [&]<int kDepth, int kTile>(Kernel<kDepth, kTile>) {
    expect(geometry::attention_tiles(a.shape.head_dim, false).queries == kTile, "attention: the tile is the geometry's", kTile);
    expect(g.shared == Kernel<kDepth, kTile>::kShared, "attention: shared memory is the geometry's", g.shared);
    launch<Kernel<kDepth, kTile>>(name, g, a, s);
  };
  switch (geometry::attention_tiles(a.shape.head_dim, false).depth) {
    case 64: return run(Kernel<64, 64>{});
    case 128: return run(Kernel<128, 32>{});
    default: return run(Kernel<256, 16>{});
  }
}

}  // namespace

void attention_forward(const AttentionForward& a, Stream s) {
  check(a.shape);
  expect_type(a.o.dtype, a.qkv.dtype, false, "attention: qkv and o are of one type");
  if (in_leaves(a.shape)) return attention_forward_in_leaves(a, s);
  if (a.qkv.dtype != DType::f32) return attention_forward_tensor(a, s);
  launch_fp32<Fp32Forward>("attention_forward", geometry::attention_forward(a.shape, false), a, s);
}

void attention_input(const AttentionInput& a, Stream s) {
  check(a.shape);
  expect_type(a.dout.dtype, a.qkv.dtype, false, "attention: qkv and dout are of one type");
  expect_type(a.o.dtype, a.qkv.dtype, false, "attention: qkv and o are of one type");
  expect_type(a.dqkv.dtype, a.qkv.dtype, false, "attention: qkv and dqkv are of one type");
  expect(a.scratch.bytes >= scratch_bytes(a), "attention: scratch is large enough", a.scratch.bytes);
  if (in_leaves(a.shape)) return attention_input_in_leaves(a, s);
  with_type(a.qkv.dtype, "attention: qkv is f32, bf16 or f16", [&]<class T>(Named<T>) {
    launch<OutputDots<T>>("attention_dots", geometry::attention_dots(a.shape), {a, static_cast<float*>(a.scratch.data)}, s);
  });
  if (a.qkv.dtype != DType::f32) {
    attention_query_gradient_tensor(a, s);
    return attention_key_gradient_tensor(a, s);
  }
  launch_fp32<Fp32QueryGradient>("attention_query_gradient", geometry::attention_query_gradient(a.shape, false), a, s);
  launch_fp32<Fp32KeyGradient>("attention_key_gradient", geometry::attention_key_gradient(a.shape, false), a, s);
}

}  // namespace shardlab::gpu::SHARDLAB_GPU_VARIANT
