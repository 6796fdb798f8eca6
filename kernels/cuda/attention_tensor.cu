// Attention of bf16 and f16 on the tensor cores: mma.m16n8k16 with fp32 sums, tiles fetched asynchronously while the last ones are
// worked on. Four warps a block, 16 rows each; scores and their gradients never leave the registers.
#include <cmath>

#include "kernels/cuda/attention.h"
#include "kernels/cuda/launches.h"
#include "kernels/cuda/tensor_tiles.h"

namespace shardlab::gpu::SHARDLAB_GPU_VARIANT {
namespace {

constexpr int kWarps = 4, kWarpRows = 16, kRows = kWarps * kWarpRows;

/// Over the four lanes that share a row.
SHARDLAB_DEVICE float row_max(const Thread& t, float x) {
#pragma unroll
  for (int mask = 2; mask >= 1; mask /= 2) {
    const float other = t.shuffle_xor(x, mask);
    x = other > x ? other : x;
  }
  return x;
}
SHARDLAB_DEVICE float row_sum(const Thread& t, float x) {
#pragma unroll
  for (int mask = 2; mask >= 1; mask /= 2) x = x + t.shuffle_xor(x, mask);
  return x;
}
/// The row and the column of a lane's element e of block 0.
SHARDLAB_DEVICE int element_row(const Thread& t, int e) { return t.lane() / 4 + e / 2 * 8; }
SHARDLAB_DEVICE int element_column(const Thread& t, int e) { return t.lane() % 4 * 2 + e % 2; }

/// vectors: rows of a head are aligned and whole multiples of 16 bytes.
struct ForwardArgs {
  AttentionForward a;
  bool vectors;
};
struct GradientArgs {
  AttentionInput a;
  bool vectors;
};

template <class T, int kDepth>
struct TensorForward {
  static constexpr int kThreads = kWarps * kWarp, kKeys = kDepth == 256 ? 32 : 64;
  static constexpr int kStride = kTileStride<kDepth>, kTile = kKeys * kStride;  ///< elements
  static constexpr int64_t kShared = sizeof(T) * (kRows * kStride + 4 * kTile);
  static constexpr int kScores = kKeys / 8, kOut = kDepth / 8;
  using Args = ForwardArgs;

  SHARDLAB_DEVICE static void run(const Thread& t, const Args& args) {
    const AttentionShape& s = args.a.shape;
    T* queries = reinterpret_cast<T*>(t.shared());
    T* steps = queries + kRows * kStride;  // keys and values of two steps
    const int64_t first = (t.blocks_x() - 1 - t.block_x()) * kRows, head = t.block_y(), sequence = t.block_z();
    const Head h = head_of(s, head);
    const T* qkv = static_cast<const T*>(args.a.qkv.data) + sequence * s.tokens * h.stride;
    const auto fetch_step = [&](int64_t step) {
      T* keys = steps + step % 2 * 2 * kTile;
      fetch_tile<T, kKeys, kDepth>(t, qkv + h.key, h.stride, step * kKeys, s.tokens, s.head_dim, args.vectors, keys);
      fetch_tile<T, kKeys, kDepth>(t, qkv + h.value, h.stride, step * kKeys, s.tokens, s.head_dim, args.vectors, keys + kTile);
    };
    fetch_tile<T, kRows, kDepth>(t, qkv + h.query, h.stride, first, s.tokens, s.head_dim, args.vectors, queries);
    fetch_step(0);
    t.commit_copies();

    const T* mine = queries + t.warp() * kWarpRows * kStride;
    const int64_t row = first + t.warp() * kWarpRows, seen = first + kRows < s.tokens ? first + kRows : s.tokens;
    const int64_t count = (seen + kKeys - 1) / kKeys;
    Sums<kOut> out{};
    float most[2] = {-INFINITY, -INFINITY}, sum[2] = {0, 0};
    for (int64_t step = 0; step < count; ++step) {
      if (step + 1 < count) fetch_step(step + 1);
      t.commit_copies();
      t.template wait_copies<1>();
      t.barrier();
      const T* keys = steps + step % 2 * 2 * kTile;
      Sums<kScores> x{};
      add_row_products<T, kDepth>(t, mine, keys, x);
      soften(t, row - step * kKeys, score_scale(s) * kLog2E, x, most, sum, out);
      add_weighted_rows<T, kStride>(t, x, keys + kTile, out);
      t.barrier();
    }
    finish(t, args, s, sequence, head, row, most, sum, out, queries + t.warp() * kWarpRows * kStride);
  }

 private:
  /// Scores become 2^(factor * (score - most)) = exp(scale * (score - most)). ahead: the warp's first query less the
  /// step's first key.
  SHARDLAB_DEVICE static void soften(const Thread& t, int64_t ahead, float factor, Sums<kScores>& x, float (&most)[2],
                                     float (&sum)[2], Sums<kOut>& out) {
    if (ahead < kKeys - 1) {
#pragma unroll
      for (int block = 0; block < kScores; ++block)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          if (block * 8 + element_column(t, e) > ahead + element_row(t, e)) x.at[block][e] = -INFINITY;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float largest = most[half];
#pragma unroll
      for (int block = 0; block < kScores; ++block) {
        largest = x.at[block][2 * half] > largest ? x.at[block][2 * half] : largest;
        largest = x.at[block][2 * half + 1] > largest ? x.at[block][2 * half + 1] : largest;
      }
      largest = row_max(t, largest);
      const float shrink = power_of_two((most[half] - largest) * factor), offset = largest * factor;
      most[half] = largest;
      sum[half] = sum[half] * shrink;
#pragma unroll
      for (int block = 0; block < kScores; ++block)
#pragma unroll
        for (int e = 2 * half; e < 2 * half + 2; ++e) {
          x.at[block][e] = power_of_two(::fmaf(x.at[block][e], factor, -offset));
          sum[half] = sum[half] + x.at[block][e];
        }
#pragma unroll
      for (int block = 0; block < kOut; ++block) {
        out.at[block][2 * half] = out.at[block][2 * half] * shrink;
        out.at[block][2 * half + 1] = out.at[block][2 * half + 1] * shrink;
      }
    }
  }

  SHARDLAB_DEVICE static void finish(const Thread& t, const Args& args, const AttentionShape& s, int64_t sequence, int64_t head,
                                     int64_t row, const float (&most)[2], const float (&sum)[2], const Sums<kOut>& out,
                                     T* staging) {
    float inverse[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float total = row_sum(t, sum[half]);
      inverse[half] = 1.0f / total;
      const int64_t query = row + element_row(t, 2 * half);
      if (t.lane() % 4 == 0 && query < s.tokens)
        args.a.lse[(sequence * s.heads + head) * s.tokens + query] = most[half] * score_scale(s) + ::logf(total);
    }
    T* o = static_cast<T*>(args.a.o.data) + sequence * s.tokens * s.out_width() + head * s.head_dim;
    write_tile(t, out, inverse, staging, o, s.out_width(), row, s.tokens, s.head_dim, args.vectors);
  }
};

template <class T, int kDepth>
struct TensorQueryGradient {
  static constexpr int kThreads = kWarps * kWarp, kKeys = kDepth == 256 ? 32 : 64;
  static constexpr int kStride = kTileStride<kDepth>, kTile = kKeys * kStride;
  static constexpr int64_t kShared = sizeof(T) * (2 * kRows * kStride + 4 * kTile);
  static constexpr int kScores = kKeys / 8, kOut = kDepth / 8;
  using Args = GradientArgs;

  SHARDLAB_DEVICE static void run(const Thread& t, const Args& args) {
    const AttentionShape& s = args.a.shape;
    T* queries = reinterpret_cast<T*>(t.shared());
    T* douts = queries + kRows * kStride;
    T* steps = douts + kRows * kStride;
    const int64_t first = (t.blocks_x() - 1 - t.block_x()) * kRows, head = t.block_y(), sequence = t.block_z();
    const Head h = head_of(s, head);
    const T* qkv = static_cast<const T*>(args.a.qkv.data) + sequence * s.tokens * h.stride;
    const T* dout = static_cast<const T*>(args.a.dout.data) + sequence * s.tokens * s.out_width() + head * s.head_dim;
    const auto fetch_step = [&](int64_t step) {
      T* keys = steps + step % 2 * 2 * kTile;
      fetch_tile<T, kKeys, kDepth>(t, qkv + h.key, h.stride, step * kKeys, s.tokens, s.head_dim, args.vectors, keys);
      fetch_tile<T, kKeys, kDepth>(t, qkv + h.value, h.stride, step * kKeys, s.tokens, s.head_dim, args.vectors, keys + kTile);
    };
    fetch_tile<T, kRows, kDepth>(t, qkv + h.query, h.stride, first, s.tokens, s.head_dim, args.vectors, queries);
    fetch_tile<T, kRows, kDepth>(t, dout, s.out_width(), first, s.tokens, s.head_dim, args.vectors, douts);
    fetch_step(0);
    t.commit_copies();

    const int64_t row = first + t.warp() * kWarpRows, seen = first + kRows < s.tokens ? first + kRows : s.tokens;
    const int64_t count = (seen + kKeys - 1) / kKeys, saved = (sequence * s.heads + head) * s.tokens;
    const int mine = t.warp() * kWarpRows * kStride;
    const float scale = score_scale(s);
    float offset[2], dot[2];  // lse in powers of two, and D
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t query = row + element_row(t, 2 * half);
      offset[half] = query < s.tokens ? args.a.lse[saved + query] * kLog2E : 0.0f;
      dot[half] = query < s.tokens ? static_cast<const float*>(args.a.scratch.data)[saved + query] : 0.0f;
    }
    Sums<kOut> dq{};
    for (int64_t step = 0; step < count; ++step) {
      if (step + 1 < count) fetch_step(step + 1);
      t.commit_copies();
      t.template wait_copies<1>();
      t.barrier();
      const T* keys = steps + step % 2 * 2 * kTile;
      Sums<kScores> x{}, dp{};
      add_row_products<T, kDepth>(t, queries + mine, keys, x);
      add_row_products<T, kDepth>(t, douts + mine, keys + kTile, dp);
      const int64_t ahead = row - step * kKeys;
#pragma unroll
      for (int block = 0; block < kScores; ++block)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const bool visible = block * 8 + element_column(t, e) <= ahead + element_row(t, e);
          const float p = visible ? power_of_two(::fmaf(x.at[block][e], scale * kLog2E, -offset[e / 2])) : 0.0f;
          x.at[block][e] = p * (dp.at[block][e] - dot[e / 2]) * scale;
        }
      add_weighted_rows<T, kStride>(t, x, keys, dq);
      t.barrier();
    }
    const float one[2] = {1.0f, 1.0f};
    T* to = static_cast<T*>(args.a.dqkv.data) + sequence * s.tokens * h.stride + h.query;
    write_tile(t, dq, one, queries + mine, to, h.stride, row, s.tokens, s.head_dim, args.vectors);
  }
};

template <class T, int kDepth>
struct TensorKeyGradient {
  static constexpr int kThreads = kWarps * kWarp, kQueries = 32;
  static constexpr int kOutDepth = kDepth < 128 ? kDepth : 128;  ///< columns of dk and dv of one block
  static constexpr int kStride = kTileStride<kDepth>, kTile = kQueries * kStride;
  static constexpr int64_t kShared = sizeof(T) * (2 * kRows * kStride + 4 * kTile);
  static constexpr int kScores = kQueries / 8, kOut = kOutDepth / 8;
  using Args = GradientArgs;

  /// Rows are keys here, columns queries.
  SHARDLAB_DEVICE static void run(const Thread& t, const Args& args) {
    const AttentionShape& s = args.a.shape;
    constexpr int kHalves = kDepth / kOutDepth;
    T* keys = reinterpret_cast<T*>(t.shared());
    T* values = keys + kRows * kStride;
    T* steps = values + kRows * kStride;  // queries and output gradients of two steps
    const int64_t first = t.block_x() * kRows, group = t.block_y() / kHalves, sequence = t.block_z();
    const int strip = static_cast<int>(t.block_y() % kHalves) * kOutDepth;
    const int64_t per_group = s.heads / s.kv_heads, width = s.out_width();
    const Head kv = head_of(s, group * per_group);
    const T* qkv = static_cast<const T*>(args.a.qkv.data) + sequence * s.tokens * kv.stride;
    const T* douts = static_cast<const T*>(args.a.dout.data) + sequence * s.tokens * width;
    // Steps of all query heads of the group, one after the other; the queries before `first` see none of the keys.
    const int64_t per_head = (s.tokens - first + kQueries - 1) / kQueries, count = per_head * per_group;
    const auto head_at = [&](int64_t step) { return group * per_group + step / per_head; };
    const auto query_at = [&](int64_t step) { return first + step % per_head * kQueries; };
    const auto fetch_step = [&](int64_t step) {
      T* to = steps + step % 2 * 2 * kTile;
      fetch_tile<T, kQueries, kDepth>(t, qkv + head_of(s, head_at(step)).query, kv.stride, query_at(step), s.tokens, s.head_dim,
                                      args.vectors, to);
      fetch_tile<T, kQueries, kDepth>(t, douts + head_at(step) * s.head_dim, width, query_at(step), s.tokens, s.head_dim,
                                      args.vectors, to + kTile);
    };
    fetch_tile<T, kRows, kDepth>(t, qkv + kv.key, kv.stride, first, s.tokens, s.head_dim, args.vectors, keys);
    fetch_tile<T, kRows, kDepth>(t, qkv + kv.value, kv.stride, first, s.tokens, s.head_dim, args.vectors, values);
    fetch_step(0);
    t.commit_copies();

    const int64_t row = first + t.warp() * kWarpRows;
    const int mine = t.warp() * kWarpRows * kStride;
    Sums<kOut> dk{}, dv{};
    for (int64_t step = 0; step < count; ++step) {
      if (step + 1 < count) fetch_step(step + 1);
      t.commit_copies();
      t.template wait_copies<1>();
      t.barrier();
      const T* queries = steps + step % 2 * 2 * kTile;
      Sums<kScores> p{}, ds{};
      add_row_products<T, kDepth>(t, keys + mine, queries, p);
      add_row_products<T, kDepth>(t, values + mine, queries + kTile, ds);
      differentiate(t, args, (sequence * s.heads + head_at(step)) * s.tokens, query_at(step), row, p, ds);
      add_weighted_rows<T, kStride>(t, p, queries + kTile + strip, dv);
      add_weighted_rows<T, kStride>(t, ds, queries + strip, dk);
      t.barrier();
    }
    const float one[2] = {1.0f, 1.0f};
    T* to = static_cast<T*>(args.a.dqkv.data) + sequence * s.tokens * kv.stride + strip;
    write_tile(t, dk, one, keys + mine, to + kv.key, kv.stride, row, s.tokens, s.head_dim - strip, args.vectors);
    write_tile(t, dv, one, keys + mine, to + kv.value, kv.stride, row, s.tokens, s.head_dim - strip, args.vectors);
  }

 private:
  /// Products of keys and queries become p; products of values and output gradients become ds. saved: where the head's rows begin.
  SHARDLAB_DEVICE static void differentiate(const Thread& t, const Args& args, int64_t saved, int64_t query, int64_t row,
                                            Sums<kScores>& p, Sums<kScores>& ds) {
    const float scale = score_scale(args.a.shape);
#pragma unroll
    for (int block = 0; block < kScores; ++block)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int64_t q = query + block * 8 + element_column(t, c);
        const bool inside = q < args.a.shape.tokens;
        const float offset = inside ? args.a.lse[saved + q] * kLog2E : 0.0f;
        const float dot = inside ? static_cast<const float*>(args.a.scratch.data)[saved + q] : 0.0f;
#pragma unroll
        for (int e = c; e < 4; e += 2) {
          const bool visible = inside && row + element_row(t, e) <= q;
          const float weight = visible ? power_of_two(::fmaf(p.at[block][e], scale * kLog2E, -offset)) : 0.0f;
          p.at[block][e] = weight;
          ds.at[block][e] = weight * (ds.at[block][e] - dot) * scale;
        }
      }
  }
};

template <template <class, int> class Kernel, class Args>
void launch_tensor(const char* name, const Geometry& g, DType type, int head_dim, const Args& a, Stream s) {
  const auto run = [&]<class K>(Named<K>) {
    expect(g.shared == K::kShared, "attention: shared memory is the geometry's", g.shared);
    launch<K>(name, g, a, s);
  };
  const auto of_type = [&]<class T>(Named<T>) {
    switch (geometry::attention_tiles(head_dim, true).depth) {
      case 64: return run(Named<Kernel<T, 64>>{});
      case 128: return run(Named<Kernel<T, 128>>{});
      default: return run(Named<Kernel<T, 256>>{});
    }
  };
  type == DType::bf16 ? of_type(Named<bf16>{}) : of_type(Named<f16>{});
}

/// Whether rows of a head are aligned and whole multiples of 16 bytes.
bool in_vectors(const AttentionShape& s, std::initializer_list<const void*> arrays) {
  return s.head_dim % 8 == 0 && aligned(arrays);
}

}  // namespace

void attention_forward_tensor(const AttentionForward& a, Stream s) {
  const bool vectors = in_vectors(a.shape, {a.qkv.data, a.o.data});
  launch_tensor<TensorForward>("attention_forward", geometry::attention_forward(a.shape, true), a.qkv.dtype, a.shape.head_dim,
                               ForwardArgs{a, vectors}, s);
}

void attention_query_gradient_tensor(const AttentionInput& a, Stream s) {
  const GradientArgs args{a, in_vectors(a.shape, {a.qkv.data, a.dout.data, a.dqkv.data})};
  launch_tensor<TensorQueryGradient>("attention_query_gradient", geometry::attention_query_gradient(a.shape, true), a.qkv.dtype,
                                     a.shape.head_dim, args, s);
}

void attention_key_gradient_tensor(const AttentionInput& a, Stream s) {
  const GradientArgs args{a, in_vectors(a.shape, {a.qkv.data, a.dout.data, a.dqkv.data})};
  launch_tensor<TensorKeyGradient>("attention_key_gradient", geometry::attention_key_gradient(a.shape, true), a.qkv.dtype,
                                   a.shape.head_dim, args, s);
}

}  // namespace shardlab::gpu::SHARDLAB_GPU_VARIANT
