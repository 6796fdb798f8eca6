// Attention of a part of a sequence to a part, on the fp32 units, for operands of any type; and of a whole sequence where its sums
// have leaves, its tokens an order of their own, its queries a window, or its values another width than its keys.
//
// The keys of a block lie in leaves within which positions ascend (docs/canonical-order.md). Of each leaf a block of threads visits
// the tiles that its queries see, online. In canonical mode a leaf gives a part of the softmax, or of a gradient, and the
// parts are combined by the fixed tree; else one sum runs on over all leaves. Of packed documents a query sees none that lie before its
// own, and with a window none behind which the window begins; tiles of which no query sees a key are passed over.
#include <cmath>

#include "kernels/cuda/elementwise.h"
#include "kernels/cuda/fp32_tiles.h"
#include "kernels/cuda/launches.h"
#include "kernels/cuda/sums.h"

namespace shardlab::gpu::SHARDLAB_GPU_VARIANT {
namespace {

/// Queries and keys, wherever they lie. Offsets and strides count elements.
struct View {
  AttentionBlockShape s;
  Input q, kv;
  int64_t q_stride, q_group;              ///< from row to row; from one kv head's queries to the next's
  int64_t kv_first, kv_stride, kv_group;  ///< of keys; a value follows its key
  int64_t out_stride;                     ///< of o and dout

  SHARDLAB_DEVICE int per_group() const { return s.heads / s.kv_heads; }
  SHARDLAB_DEVICE int64_t query_at(int64_t sequence, int64_t head) const {
    return sequence * s.queries * q_stride + head / per_group() * q_group + head % per_group() * s.head_dim;
  }
  SHARDLAB_DEVICE int64_t key_at(int64_t sequence, int64_t group) const {
    return kv_first + sequence * s.keys * kv_stride + group * kv_group;
  }
  SHARDLAB_DEVICE int64_t out_at(int64_t sequence, int64_t head) const {
    return sequence * s.queries * out_stride + head * s.values();
  }
  /// Row of lse, sums and dots.
  SHARDLAB_DEVICE int64_t row_at(int64_t sequence, int64_t head) const { return (sequence * s.heads + head) * s.queries; }
  SHARDLAB_DEVICE int64_t query_position(int64_t i) const { return s.order.position(s.first_query + i, s.tokens); }
  SHARDLAB_DEVICE int64_t key_position(int64_t j) const { return s.order.position(s.first_key + j, s.tokens); }
  /// The first position that query i sees: where its document begins, or its window where that begins later.
  SHARDLAB_DEVICE int64_t first_seen(int64_t sequence, int64_t i) const {
    const int64_t at = query_position(i);
    const int64_t document = s.positions == nullptr ? 0 : at - s.positions[sequence * s.tokens + s.first_query + i];
    return s.window > 0 && at - s.window >= document ? at - s.window + 1 : document;
  }
  SHARDLAB_DEVICE float scale() const { return 1.0f / ::sqrtf(static_cast<float>(s.head_dim)); }
};

/// What the rows of a thread see: the keys at the positions [from, to]; a row that is no query sees none. And the first and the last
/// position that some query of the tile sees.
template <class Tiles>
struct Sight {
  int64_t from[Tiles::kRows], to[Tiles::kRows];
  int64_t first, last = -1;

  SHARDLAB_DEVICE Sight(const Thread& t, const View& v, int64_t sequence, int64_t query, int tile) : first(v.s.tokens) {
    for (int i = 0; i < Tiles::kRows; ++i) {
      const int64_t q = query + Tiles::row(t, i);
      from[i] = q < v.s.queries ? v.first_seen(sequence, q) : 0;
      to[i] = q < v.s.queries ? v.query_position(q) : -1;
    }
    for (int64_t q = query; q < query + tile && q < v.s.queries; ++q) {
      last = v.query_position(q) > last ? v.query_position(q) : last;
      first = v.first_seen(sequence, q) < first ? v.first_seen(sequence, q) : first;
    }
  }
  /// Whether what the queries of the tile see begins behind the keys before the place `end`, up to which positions ascend.
  SHARDLAB_DEVICE bool passes_over(const View& v, int64_t end) const { return v.key_position(end - 1) < first; }
};

/// Calls body(begin, end) for the leaves of the places [first, first + extent), as offsets from `first`; in fast mode for each run of
/// ascending positions.
template <class Body>
SHARDLAB_DEVICE void for_leaves(const AttentionBlockShape& s, int64_t first, int64_t extent, const Body& body) {
  for (int64_t at = first; at < first + extent;) {
    const int64_t run = s.order.run_end(at, s.tokens), end = run < first + extent ? run : first + extent;
    if (s.canonical) {
      const kernels::PartLeaves part({at, s.tokens}, end - at);
      for (int i = 0; i < part.count(); ++i) body(at - first + part.begin(i), at - first + part.begin(i + 1));
    } else {
      body(at - first, end - first);
    }
    at = end;
  }
}

constexpr int kLevels = 5;      ///< of a tree over 16 leaves
constexpr int kHeadLevels = 9;  ///< of a tree over the query heads of a group, fewer than 512

/// Parts of a softmax, of a thread's rows; `sum` is the whole row's.
template <class Tiles>
struct Softmax {
  float most[Tiles::kRows], sum[Tiles::kRows];
  typename Tiles::Result out;

  SHARDLAB_DEVICE void clear() {
#pragma unroll
    for (int i = 0; i < Tiles::kRows; ++i) {
      most[i] = -INFINITY;
      sum[i] = 0;
#pragma unroll
      for (int c = 0; c < Tiles::kColumns; ++c) out[i][c] = 0;
    }
  }
  friend SHARDLAB_DEVICE Softmax operator+(const Softmax& a, const Softmax& b) {
    Softmax r;
#pragma unroll
    for (int i = 0; i < Tiles::kRows; ++i) {
      const float m = b.most[i] > a.most[i] ? b.most[i] : a.most[i];
      // A part without a key leaves the other as it is: its factor is 1.
      const float e1 = m == -INFINITY ? 0.0f : ::expf(a.most[i] - m), e2 = m == -INFINITY ? 0.0f : ::expf(b.most[i] - m);
      r.most[i] = m;
      r.sum[i] = a.sum[i] * e1 + b.sum[i] * e2;
#pragma unroll
      for (int c = 0; c < Tiles::kColumns; ++c) r.out[i][c] = a.out[i][c] * e1 + b.out[i][c] * e2;
    }
    return r;
  }
};

/// A thread's results, added element by element.
template <class Tiles, int kMatrices>
struct Sums {
  typename Tiles::Result at[kMatrices];

  SHARDLAB_DEVICE void clear() {
#pragma unroll
    for (int m = 0; m < kMatrices; ++m)
#pragma unroll
      for (int i = 0; i < Tiles::kRows; ++i)
#pragma unroll
        for (int c = 0; c < Tiles::kColumns; ++c) at[m][i][c] = 0;
  }
  /// "Plus +0": no sum is -0.
  SHARDLAB_DEVICE void settle() {
#pragma unroll
    for (int m = 0; m < kMatrices; ++m)
#pragma unroll
      for (int i = 0; i < Tiles::kRows; ++i)
#pragma unroll
        for (int c = 0; c < Tiles::kColumns; ++c) at[m][i][c] = at[m][i][c] + 0.0f;
  }
  friend SHARDLAB_DEVICE Sums operator+(const Sums& a, const Sums& b) {
    Sums r;
#pragma unroll
    for (int m = 0; m < kMatrices; ++m)
#pragma unroll
      for (int i = 0; i < Tiles::kRows; ++i)
#pragma unroll
        for (int c = 0; c < Tiles::kColumns; ++c) r.at[m][i][c] = a.at[m][i][c] + b.at[m][i][c];
    return r;
  }
};

/// Results of a thread, to an array of any type; row 0 begins at element `at`.
template <class Tiles>
SHARDLAB_DEVICE void write(const Thread& t, const typename Tiles::Result& x, const Output& to, int64_t at, int64_t stride,
                           int64_t first, int64_t end, int width, bool add) {
#pragma unroll
  for (int i = 0; i < Tiles::kRows; ++i)
#pragma unroll
    for (int c = 0; c < Tiles::kColumns; ++c) {
      if (first + Tiles::row(t, i) >= end || Tiles::column(t, c) >= width) continue;
      const int64_t e = at + (first + Tiles::row(t, i)) * stride + Tiles::column(t, c);
      put<1>(to, e, Values<1>{{add ? values_at<1>(Input(to), e).at[0] + x[i][c] : x[i][c]}});
    }
}

struct ForwardArgs {
  View v;
  Output o;
  float *lse, *sums;
  bool carry;
};

template <int kDepth, int kTile>
struct BlockForward {
  using Tiles = Fp32Tiles<kDepth, kTile>;
  using Part = Softmax<Tiles>;
  static constexpr int kThreads = Tiles::kThreads, kRows = Tiles::kRows, kColumns = Tiles::kColumns;
  static constexpr int64_t kShared = 4 * (3 * Tiles::kOperand + Tiles::kScores);
  using Args = ForwardArgs;

  SHARDLAB_DEVICE static void run(const Thread& t, const Args& a) {
    const View& v = a.v;
    float* queries = reinterpret_cast<float*>(t.shared());
    float *keys = queries + Tiles::kOperand, *values = keys + Tiles::kOperand, *scores = values + Tiles::kOperand;
    const int64_t first = (t.blocks_x() - 1 - t.block_x()) * kTile, head = t.block_y(), sequence = t.block_z();
    Tiles::fetch(t, v.q, v.query_at(sequence, head), v.q_stride, first, v.s.queries, v.s.head_dim, queries);
    const Sight<Tiles> sight(t, v, sequence, first, kTile);
    const int64_t key_at = v.key_at(sequence, head / v.per_group());
    TreeCounter<Part, kLevels> tree;
    Part part;
    part.clear();
    for_leaves(v.s, v.s.first_key, v.s.keys, [&](int64_t begin, int64_t end) {
      for (int64_t key = begin; key < end && v.key_position(key) <= sight.last; key += kTile) {
        if (sight.passes_over(v, key + kTile < end ? key + kTile : end)) continue;
        t.barrier();
        Tiles::fetch(t, v.kv, key_at, v.kv_stride, key, end, v.s.head_dim, keys);
        Tiles::fetch(t, v.kv, key_at + v.s.head_dim, v.kv_stride, key, end, v.s.values(), values);
        t.barrier();
        typename Tiles::Scores x;
        Tiles::dots(t, queries, keys, x);
        soften(t, v, key, end, sight, x, part);
        Tiles::share(t, x, scores);
        Tiles::add_weighted(t, scores, values, part.out);
      }
      if (!v.s.canonical) return;
      tree.push(part);
      part.clear();
    });
    if (v.s.canonical) part = tree.total(part);
    finish(t, a, first, head, sequence, part);
  }

 private:
  SHARDLAB_DEVICE static void soften(const Thread& t, const View& v, int64_t key, int64_t end, const Sight<Tiles>& sight,
                                     typename Tiles::Scores& x, Part& part) {
    const float scale = v.scale();
    int64_t of_key[kRows];
#pragma unroll
    for (int j = 0; j < kRows; ++j) {
      const int64_t at = key + Tiles::column(t, j);
      of_key[j] = at < end ? v.key_position(at) : v.s.tokens;
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      float largest = part.most[i];
#pragma unroll
      for (int j = 0; j < kRows; ++j) {
        x[i][j] = sight.from[i] <= of_key[j] && of_key[j] <= sight.to[i] ? x[i][j] * scale : -INFINITY;
        largest = x[i][j] > largest ? x[i][j] : largest;
      }
      largest = Tiles::row_max(t, largest);
      const bool none = largest == -INFINITY;  // so far the row has seen no key
      const float shrink = none ? 1.0f : ::expf(part.most[i] - largest);
      float sum = 0;
#pragma unroll
      for (int j = 0; j < kRows; ++j) {
        x[i][j] = none ? 0.0f : ::expf(x[i][j] - largest);
        sum = sum + x[i][j];
      }
      part.most[i] = largest;
      part.sum[i] = part.sum[i] * shrink + Tiles::row_sum(t, sum);
#pragma unroll
      for (int c = 0; c < kColumns; ++c) part.out[i][c] = part.out[i][c] * shrink;
    }
  }

  SHARDLAB_DEVICE static void finish(const Thread& t, const Args& a, int64_t first, int64_t head, int64_t sequence, Part& part) {
    const View& v = a.v;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int64_t query = first + Tiles::row(t, i), row = v.row_at(sequence, head) + query;
      const bool writes = t.index() % kSide == 0 && query < v.s.queries, none = part.sum[i] == 0;
      float old = 0, mine = 1;  // factors of what is there and of this block
      float lse = -INFINITY;
      if (a.sums == nullptr) {
        mine = none ? 0.0f : 1.0f / part.sum[i];
        lse = none ? -INFINITY : part.most[i] + ::logf(part.sum[i]);
        const float before = a.carry && query < v.s.queries ? a.lse[row] : -INFINITY;
        if (before != -INFINITY) {
          const float m = lse > before ? lse : before, e1 = ::expf(before - m), e2 = none ? 0.0f : ::expf(lse - m), sum = e1 + e2;
          old = e1 / sum;
          mine = mine * (e2 / sum);
          lse = m + ::logf(sum);
        }
      }
      const int64_t at = v.out_at(sequence, head) + query * v.out_stride;
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        if (query >= v.s.queries || Tiles::column(t, c) >= v.s.values()) continue;
        const int64_t e = at + Tiles::column(t, c);
        const float x = part.out[i][c] * mine;
        put<1>(a.o, e, Values<1>{{old != 0 ? values_at<1>(Input(a.o), e).at[0] * old + x : x}});
      }
      t.sync_warp();  // every thread of the row has read lse
      if (!writes) continue;
      if (a.sums == nullptr) {
        a.lse[row] = lse;
      } else {
        a.sums[2 * row] = part.most[i];
        a.sums[2 * row + 1] = part.sum[i];
      }
    }
  }
};

struct BackwardArgs {
  View v;
  Input dout, o;
  const float *lse, *dots;
  Output dq, dkv;
  bool carry, carry_kv, by_head;
  int64_t dkv_first, dkv_stride, dkv_group;  ///< of the gradient of a kv head's, or query head's, key
};

template <int kDepth, int kTile>
struct BlockQueryGradient {
  using Tiles = Fp32Tiles<kDepth, kTile>;
  using Part = Sums<Tiles, 1>;
  static constexpr int kThreads = Tiles::kThreads, kRows = Tiles::kRows;
  static constexpr int64_t kShared = 4 * (4 * Tiles::kOperand + Tiles::kScores);
  using Args = BackwardArgs;

  SHARDLAB_DEVICE static void run(const Thread& t, const Args& a) {
    const View& v = a.v;
    float* queries = reinterpret_cast<float*>(t.shared());
    float *douts = queries + Tiles::kOperand, *keys = douts + Tiles::kOperand, *values = keys + Tiles::kOperand;
    float* scores = values + Tiles::kOperand;
    const int64_t first = (t.blocks_x() - 1 - t.block_x()) * kTile, head = t.block_y(), sequence = t.block_z();
    Tiles::fetch(t, v.q, v.query_at(sequence, head), v.q_stride, first, v.s.queries, v.s.head_dim, queries);
    Tiles::fetch(t, a.dout, v.out_at(sequence, head), v.out_stride, first, v.s.queries, v.s.values(), douts);
    float lse[kRows], dot[kRows];
    const Sight<Tiles> sight(t, v, sequence, first, kTile);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int64_t query = first + Tiles::row(t, i), row = v.row_at(sequence, head) + query;
      const bool inside = query < v.s.queries;
      lse[i] = inside ? a.lse[row] : 0.0f;
      dot[i] = inside ? a.dots[row] : 0.0f;
    }
    const int64_t key_at = v.key_at(sequence, head / v.per_group());
    const float scale = v.scale();
    TreeCounter<Part, kLevels> tree;
    Part dq;
    dq.clear();
    for_leaves(v.s, v.s.first_key, v.s.keys, [&](int64_t begin, int64_t end) {
      for (int64_t key = begin; key < end && v.key_position(key) <= sight.last; key += kTile) {
        if (sight.passes_over(v, key + kTile < end ? key + kTile : end)) continue;
        t.barrier();
        Tiles::fetch(t, v.kv, key_at, v.kv_stride, key, end, v.s.head_dim, keys);
        Tiles::fetch(t, v.kv, key_at + v.s.head_dim, v.kv_stride, key, end, v.s.values(), values);
        t.barrier();
        typename Tiles::Scores x, dp;
        Tiles::dots(t, queries, keys, x);
        Tiles::dots(t, douts, values, dp);
#pragma unroll
        for (int j = 0; j < kRows; ++j) {
          const int64_t at = key + Tiles::column(t, j), of_key = at < end ? v.key_position(at) : v.s.tokens;
#pragma unroll
          for (int i = 0; i < kRows; ++i)
            x[i][j] = sight.from[i] <= of_key && of_key <= sight.to[i]
                          ? ::expf(x[i][j] * scale - lse[i]) * (dp[i][j] - dot[i]) * scale
                          : 0.0f;
        }
        Tiles::share(t, x, scores);
        Tiles::add_weighted(t, scores, keys, dq.at[0]);
      }
      if (!v.s.canonical) return;
      dq.settle();
      tree.push(dq);
      dq.clear();
    });
    if (v.s.canonical) dq = tree.total(dq);
    write<Tiles>(t, dq.at[0], a.dq, v.query_at(sequence, head), v.q_stride, first, v.s.queries, v.s.head_dim, a.carry);
  }
};

template <int kDepth, int kTile>
struct BlockKeyGradient {
  using Tiles = Fp32Tiles<kDepth, kTile>;
  using Part = Sums<Tiles, 2>;
  static constexpr int kThreads = Tiles::kThreads, kRows = Tiles::kRows;
  static constexpr int64_t kShared = 4 * (4 * Tiles::kOperand + 2 * Tiles::kScores);
  using Args = BackwardArgs;

  /// Rows are keys here, columns queries.
  SHARDLAB_DEVICE static void run(const Thread& t, const Args& a) {
    const View& v = a.v;
    float* keys = reinterpret_cast<float*>(t.shared());
    float *values = keys + Tiles::kOperand, *queries = values + Tiles::kOperand, *douts = queries + Tiles::kOperand;
    float *weights = douts + Tiles::kOperand, *slopes = weights + Tiles::kScores;
    const int64_t first = t.block_x() * kTile, sequence = t.block_z();
    const int64_t group = a.by_head ? t.block_y() / v.per_group() : t.block_y();
    const int64_t begin_head = a.by_head ? t.block_y() : group * v.per_group();
    const int64_t end_head = a.by_head ? begin_head + 1 : begin_head + v.per_group();
    const int64_t key_at = v.key_at(sequence, group);
    Tiles::fetch(t, v.kv, key_at, v.kv_stride, first, v.s.keys, v.s.head_dim, keys);
    Tiles::fetch(t, v.kv, key_at + v.s.head_dim, v.kv_stride, first, v.s.keys, v.s.values(), values);
    int64_t position[kRows], least = v.s.tokens, most = -1;
    for (int i = 0; i < kRows; ++i) {
      const int64_t key = first + Tiles::row(t, i);
      position[i] = key < v.s.keys ? v.key_position(key) : v.s.tokens;
    }
    for (int64_t key = first; key < first + kTile && key < v.s.keys; ++key) {
      least = v.key_position(key) < least ? v.key_position(key) : least;
      most = v.key_position(key) > most ? v.key_position(key) : most;
    }
    TreeCounter<Part, kHeadLevels> heads;
    Part sum;
    sum.clear();
    for (int64_t head = begin_head; head < end_head; ++head) {
      TreeCounter<Part, kLevels> tree;
      for_leaves(v.s, v.s.first_query, v.s.queries, [&](int64_t begin, int64_t end) {
        for (int64_t query = begin; query < end; query += kTile) {
          const int64_t last = (query + kTile < end ? query + kTile : end) - 1;
          if (v.query_position(last) < least || v.first_seen(sequence, query) > most) continue;
          t.barrier();
          Tiles::fetch(t, v.q, v.query_at(sequence, head), v.q_stride, query, end, v.s.head_dim, queries);
          Tiles::fetch(t, a.dout, v.out_at(sequence, head), v.out_stride, query, end, v.s.values(), douts);
          t.barrier();
          typename Tiles::Scores p, ds;
          Tiles::dots(t, keys, queries, p);
          Tiles::dots(t, values, douts, ds);
          differentiate(t, a, sequence, v.row_at(sequence, head), query, end, position, p, ds);
          Tiles::share(t, p, weights);
          Tiles::add_weighted(t, weights, douts, sum.at[1]);
          Tiles::share(t, ds, slopes);
          Tiles::add_weighted(t, slopes, queries, sum.at[0]);
        }
        if (!v.s.canonical) return;
        sum.settle();
        tree.push(sum);
        sum.clear();
      });
      if (v.s.canonical) heads.push(tree.total(sum));
    }
    if (v.s.canonical) sum = heads.total(sum);
    const int64_t to = a.dkv_first + sequence * v.s.keys * a.dkv_stride + t.block_y() * a.dkv_group;
    write<Tiles>(t, sum.at[0], a.dkv, to, a.dkv_stride, first, v.s.keys, v.s.head_dim, a.carry_kv);
    write<Tiles>(t, sum.at[1], a.dkv, to + v.s.head_dim, a.dkv_stride, first, v.s.keys, v.s.values(), a.carry_kv);
  }

 private:
  /// Products of keys and queries become p; products of values and output gradients become ds.
  SHARDLAB_DEVICE static void differentiate(const Thread& t, const Args& a, int64_t sequence, int64_t row, int64_t query,
                                            int64_t end, const int64_t (&position)[kRows], typename Tiles::Scores& p,
                                            typename Tiles::Scores& ds) {
    const float scale = a.v.scale();
#pragma unroll
    for (int j = 0; j < kRows; ++j) {
      const int64_t q = query + Tiles::column(t, j);
      const bool inside = q < end;
      const int64_t to = inside ? a.v.query_position(q) : -1, from = inside ? a.v.first_seen(sequence, q) : 0;
      const float lse = inside ? a.lse[row + q] : 0.0f, dot = inside ? a.dots[row + q] : 0.0f;
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const bool seen = from <= position[i] && position[i] <= to;
        p[i][j] = seen ? ::expf(p[i][j] * scale - lse) : 0.0f;
        ds[i][j] = seen ? p[i][j] * (ds[i][j] - dot) * scale : 0.0f;
      }
    }
  }
};

/// D_i = do_i . o_i -> [sequences, heads, queries]; a warp a row and head.
struct BlockDots {
  static constexpr int kThreads = 128;
  struct Args {
    View v;
    Input dout, o;
    float* dots;
  };
  SHARDLAB_DEVICE static void run(const Thread& t, const Args& a) {
    const int64_t query = t.block_x() * (kThreads / kWarp) + t.warp(), head = t.block_y(), sequence = t.block_z();
    if (query >= a.v.s.queries) return;
    const int64_t at = a.v.out_at(sequence, head) + query * a.v.out_stride;
    float sum = 0;
    for (int d = t.lane(); d < a.v.s.values(); d += kWarp)
      sum = ::fmaf(values_at<1>(a.dout, at + d).at[0], values_at<1>(a.o, at + d).at[0], sum);
    sum = warp_sum(t, sum);
    if (t.lane() == 0) a.dots[a.v.row_at(sequence, head) + query] = sum;
  }
};

void check(const View& v) {
  const std::string_view why = attention_refusal(v.s);
  expect(why.empty(), why.empty() ? "" : why.data(), v.s.head_dim);
  expect(v.s.tokens % v.s.order.granule() == 0, "attention: the order's parts divide the tokens", v.s.tokens);
  expect(!v.s.canonical || kContractionLeaves % v.s.order.parts == 0, "attention: in canonical mode the order's parts divide 16",
         v.s.order.parts);
  expect(v.s.heads / v.s.kv_heads < 1 << (kHeadLevels - 1), "attention: a kv head serves fewer than 256 heads", v.s.heads);
}

/// Launches Kernel<depth, tile> with the tile that attention_tiles names, wide enough for keys and values.
template <template <int, int> class Kernel, class Args>
void launch_tiles(const char* name, Geometry g, const Args& a, Stream s) {
  const int width = a.v.s.widest();
  const auto run = [&]<int kDepth, int kTile>(Kernel<kDepth, kTile>) {
    expect(geometry::attention_tiles(width, false).queries == kTile, "attention: the tile is the geometry's", kTile);
    expect(g.shared == Kernel<kDepth, kTile>::kShared, "attention: shared memory is the geometry's", g.shared);
    launch<Kernel<kDepth, kTile>>(name, g, a, s);
  };
  switch (geometry::attention_tiles(width, false).depth) {
    case 64: return run(Kernel<64, 64>{});
    case 128: return run(Kernel<128, 32>{});
    default: return run(Kernel<256, 16>{});
  }
}

void run_backward(const BackwardArgs& a, float* dots, Stream s) {
  check(a.v);
  launch<BlockDots>("attention_block_dots", geometry::attention_block_dots(a.v.s), {a.v, a.dout, a.o, dots}, s);
  launch_tiles<BlockQueryGradient>("attention_block_query_gradient", geometry::attention_block_query_gradient(a.v.s), a, s);
  launch_tiles<BlockKeyGradient>("attention_block_key_gradient", geometry::attention_block_key_gradient(a.v.s, a.by_head), a, s);
}

View view_of(const AttentionBlockShape& s, const Input& q, const Input& kv) {
  const int64_t d = s.head_dim, pair = d + s.values(), queries = s.heads / s.kv_heads * d;
  return {s, q, kv, s.heads * d, queries, 0, s.kv_heads * pair, pair, int64_t{s.heads} * s.values()};
}
View view_of(const AttentionShape& s, const Input& qkv) {
  const int64_t d = s.head_dim, queries = s.heads / s.kv_heads * d, group = queries + d + s.values();
  return {{s.sequences, s.tokens, s.tokens, s.heads, s.kv_heads, s.head_dim, s.tokens, 0, 0, s.order, s.canonical, s.positions,
           s.window, s.value_dim},
          qkv,
          qkv,
          s.qkv_width(),
          group,
          queries,
          s.qkv_width(),
          group,
          s.out_width()};
}

struct SplitRows {
  SplitHeads a;
  template <int N>
  SHARDLAB_DEVICE void at(int64_t i) const {
    static_assert(N == 1);
    const int64_t pair = a.head_dim + a.value_dim, queries = a.heads / a.kv_heads * a.head_dim;
    const int64_t group = i / (queries + pair), e = i % (queries + pair);
    const Output& part = e < queries ? a.q : a.kv;
    const int64_t to = e < queries ? group * queries + e : group * pair + e - queries;
    if (a.back)
      put<1>(a.qkv, i, values_at<1>(Input(part), to));
    else
      put<1>(part, to, values_at<1>(Input(a.qkv), i));
  }
};

/// A part of the softmax of one element.
struct OnePart {
  float m, l, o;
  friend SHARDLAB_DEVICE OnePart operator+(const OnePart& a, const OnePart& b) {
    const float m = b.m > a.m ? b.m : a.m;
    if (m == -INFINITY) return a;
    const float e1 = ::expf(a.m - m), e2 = ::expf(b.m - m);
    return {m, a.l * e1 + b.l * e2, a.o * e1 + b.o * e2};
  }
};

struct MergedSoftmax {
  AttentionMergeForward a;
  template <int N>
  SHARDLAB_DEVICE void at(int64_t i) const {
    static_assert(N == 1);
    const kernels::AttentionMergeForward& m = a.merge;
    const int64_t d = i % m.value_dim, head = i / m.value_dim % m.heads, token = i / (int64_t{m.value_dim} * m.heads);
    const int64_t row = (token / m.queries * m.heads + head) * m.queries + token % m.queries;
    TreeCounter<OnePart, kLevels> tree;
    for (int p = 0; p < m.parts; ++p) {
      const float* sums = m.part_sums.data()[p] + 2 * row;
      tree.push({sums[0], sums[1], m.part_o.data()[p][i]});
    }
    const OnePart all = tree.total({-INFINITY, 0, 0});
    put<1>(a.o, i, Values<1>{{all.l == 0 ? 0.0f : all.o * (1.0f / all.l)}});
    if (d == 0) m.lse[row] = all.l == 0 ? -INFINITY : all.m + ::logf(all.l);
  }
};

struct MergedSums {
  AttentionMergeInput a;
  template <int N>
  SHARDLAB_DEVICE void at(int64_t i) const {
    static_assert(N == 1);
    const kernels::AttentionMergeInput& m = a.merge;
    const int64_t e = i % m.width, group = i / m.width % m.kv_heads, row = i / (m.width * m.kv_heads);
    const int per_group = m.heads / m.kv_heads;
    TreeCounter<float, kHeadLevels> heads;
    for (int64_t head = group * per_group; head < (group + 1) * per_group; ++head) {
      TreeCounter<float, kLevels> parts;
      for (int p = 0; p < m.parts; ++p) parts.push(m.part.data()[p][(row * m.heads + head) * m.width + e]);
      heads.push(parts.total(0.0f));
    }
    put<1>(a.y, i, Values<1>{{heads.total(0.0f)}});
  }
};

}  // namespace

void attention_forward_in_leaves(const AttentionForward& a, Stream s) {
  const ForwardArgs args{view_of(a.shape, a.qkv), a.o, a.lse, nullptr, false};
  check(args.v);
  launch_tiles<BlockForward>("attention_forward_in_leaves", geometry::attention_block_forward(args.v.s), args, s);
}

void attention_input_in_leaves(const AttentionInput& a, Stream s) {
  const View v = view_of(a.shape, a.qkv);
  auto* dots = static_cast<float*>(a.scratch.data);
  run_backward({v, a.dout, a.o, a.lse, dots, a.dqkv, a.dqkv, false, false, false, v.kv_first, v.kv_stride, v.kv_group}, dots, s);
}

void attention_block_forward(const AttentionBlockForward& a, Stream s) {
  expect((a.lse == nullptr) != (a.sums == nullptr), "attention: a block gives lse, or sums", a.sums != nullptr);
  const ForwardArgs args{view_of(a.shape, a.q, a.kv), {a.o, DType::f32}, a.lse, a.sums, a.carry};
  check(args.v);
  launch_tiles<BlockForward>("attention_block_forward", geometry::attention_block_forward(a.shape), args, s);
}

void attention_block_input(const AttentionBlockInput& a, Stream s) {
  expect(!a.by_head || a.shape.canonical, "attention: gradients by query head are for canonical mode", a.by_head);
  expect(a.scratch.bytes >= scratch_bytes(a), "attention: scratch is large enough", a.scratch.bytes);
  const int64_t pair = int64_t{a.shape.head_dim} + a.shape.values();
  auto* dots = static_cast<float*>(a.scratch.data);
  run_backward({view_of(a.shape, a.q, a.kv), a.dout, a.o, a.lse, dots, a.dq, a.dkv, a.carry, a.carry_kv, a.by_head, 0,
                pair * (a.by_head ? a.shape.heads : a.shape.kv_heads), pair},
               dots, s);
}

void split_heads(const SplitHeads& a, Stream s) {
  expect(a.kv_heads >= 1 && a.heads % a.kv_heads == 0, "attention: kv_heads divides heads; this is heads", a.heads);
  SplitRows rows{a};
  if (a.value_dim == 0) rows.a.value_dim = a.head_dim;
  const int64_t width = int64_t{a.heads} * a.head_dim + int64_t{a.kv_heads} * (a.head_dim + rows.a.value_dim);
  elementwise<1>("split_heads", rows, a.rows * width, false, s);
}

void attention_merge_forward(const AttentionMergeForward& a, Stream s) {
  const kernels::AttentionMergeForward& m = a.merge;
  expect(m.parts >= 1 && m.parts <= kernels::kMostParts, "attention: 1 to 16 parts are merged", m.parts);
  elementwise<1>("attention_merge", MergedSoftmax{a}, m.sequences * m.queries * m.heads * m.value_dim, false, s);
}

void attention_merge_input(const AttentionMergeInput& a, Stream s) {
  const kernels::AttentionMergeInput& m = a.merge;
  expect(m.parts >= 1 && m.parts <= kernels::kMostParts, "attention: 1 to 16 parts are merged", m.parts);
  expect(m.kv_heads >= 1 && m.heads % m.kv_heads == 0, "attention: kv_heads divides heads; this is heads", m.heads);
  elementwise<1>("attention_merge_gradients", MergedSums{a}, m.rows * m.kv_heads * m.width, false, s);
}

}  // namespace shardlab::gpu::SHARDLAB_GPU_VARIANT
