// Causal attention, one (sequence, kv head) at a time, four query rows at a time: a block of scores is [4, tokens],
// never [tokens, tokens].
//
// Scores put lanes along the keys (K transposed once a head), outputs and gradients along the head's depth. Row i uses keys 0 .. i:
// what four rows have in common is done together, the rest of each row alone, so that no masked term is ever added.
#include "kernels/cpu/formulas.h"
#include "kernels/cpu/panels.h"
#include "kernels/cpu/sums.h"
#include "kernels/cpu/variant.h"

namespace shardlab::kernels::SHARDLAB_VARIANT {
namespace {

#if defined(__AVX512F__)
inline constexpr int kVectors = 4;  // registers: 4 rows x 4 vectors of sums
#else
inline constexpr int kVectors = 1;
#endif

/// One sequence's view of the fused activation for one kv head.
struct Head {
  int64_t tokens, depth, padded_tokens, padded_depth;
  int64_t stride;      ///< floats from one token's row to the next
  int64_t key, value;  ///< offset of this head's key and value in a row
  float scale;
};

Head head_of(const AttentionShape& s, int group) {
  const int64_t per_group = s.heads / s.kv_heads + 2;
  const int64_t first = group * per_group * s.head_dim;
  return {s.tokens,
          s.head_dim,
          padded_to_lanes(s.tokens),
          padded_to_lanes(s.head_dim),
          s.qkv_width(),
          first + (per_group - 2) * s.head_dim,
          first + (per_group - 1) * s.head_dim,
          1.0f / __builtin_sqrtf(static_cast<float>(s.head_dim))};
}
/// Offset of query head `head` (of all heads) in a row of qkv.
int64_t query_offset(const AttentionShape& s, int head) {
  const int64_t queries = s.heads / s.kv_heads;
  return ((head / queries) * (queries + 2) + head % queries) * s.head_dim;
}

/// to[d][t] = rows[t][d], padded with +0 along t.
void transpose(const float* rows, const Head& h, float* to) {
  for (int64_t d = 0; d < h.depth; ++d) {
    for (int64_t t = 0; t < h.tokens; ++t) to[d * h.padded_tokens + t] = rows[t * h.stride + d];
    for (int64_t t = h.tokens; t < h.padded_tokens; ++t) to[d * h.padded_tokens + t] = 0;
  }
}
/// to[t][d] = rows[t][d], padded with +0 along d.
void copy_rows(const float* rows, int64_t stride, int64_t count, const Head& h, float* to) {
  for (int64_t t = 0; t < count; ++t) {
    for (int64_t d = 0; d < h.depth; ++d) to[t * h.padded_depth + d] = rows[t * stride + d];
    for (int64_t d = h.depth; d < h.padded_depth; ++d) to[t * h.padded_depth + d] = 0;
  }
}

/// V vectors of out[r][key ...] = chain over d of rows[r][d] * transposed[d][key], for kQueryRows rows.
template <int V>
SHARDLAB_INLINE void dot_strip(const float* const* rows, const float* transposed, const Head& h, float* out) {
  Floats sum[kQueryRows][V];
#pragma GCC unroll 4
  for (int r = 0; r < kQueryRows; ++r)
#pragma GCC unroll 4
    for (int j = 0; j < V; ++j) sum[r][j] = zeros();
  for (int64_t d = 0; d < h.depth; ++d) {
    Floats key[V];
#pragma GCC unroll 4
    for (int j = 0; j < V; ++j) key[j] = load(transposed + d * h.padded_tokens + j * kLanes);
#pragma GCC unroll 4
    for (int r = 0; r < kQueryRows; ++r) {
      const Floats q = floats(rows[r][d]);
#pragma GCC unroll 4
      for (int j = 0; j < V; ++j) sum[r][j] = fma(q, key[j], sum[r][j]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < kQueryRows; ++r)
#pragma GCC unroll 4
    for (int j = 0; j < V; ++j) store(out + r * h.padded_tokens + j * kLanes, sum[r][j]);
}

/// Products of four rows with the keys (or values) 0 .. keys-1, rounded up to whole vectors.
void dots(const float* const* rows, const float* transposed, int64_t keys, const Head& h, float* out) {
  const int64_t end = padded_to_lanes(keys);
  int64_t key = 0;
  for (; key + kVectors * kLanes <= end; key += kVectors * kLanes) dot_strip<kVectors>(rows, transposed + key, h, out + key);
  for (; key < end; key += kLanes) dot_strip<1>(rows, transposed + key, h, out + key);
}

/// V vectors of sums over keys for kQueryRows rows: weights[r][key] * matrix[key][d], keys ascending. Row r has keys 0 ..
/// common + r.
template <int V>
SHARDLAB_INLINE void weighted_strip(const float* weights, const float* matrix, int64_t common, int rows, const Head& h,
                                    float* out) {
  Floats sum[kQueryRows][V];
#pragma GCC unroll 4
  for (int r = 0; r < kQueryRows; ++r)
#pragma GCC unroll 4
    for (int j = 0; j < V; ++j) sum[r][j] = zeros();
  for (int64_t key = 0; key <= common; ++key) {
    Floats v[V];
#pragma GCC unroll 4
    for (int j = 0; j < V; ++j) v[j] = load(matrix + key * h.padded_depth + j * kLanes);
#pragma GCC unroll 4
    for (int r = 0; r < kQueryRows; ++r) {
      const Floats w = floats(weights[r * h.padded_tokens + key]);
#pragma GCC unroll 4
      for (int j = 0; j < V; ++j) sum[r][j] = fma(w, v[j], sum[r][j]);
    }
  }
#pragma GCC unroll 4
  for (int r = 1; r < kQueryRows; ++r)
    for (int64_t key = common + 1; key <= common + r && r < rows; ++key)
#pragma GCC unroll 4
      for (int j = 0; j < V; ++j)
        sum[r][j] = fma(floats(weights[r * h.padded_tokens + key]), load(matrix + key * h.padded_depth + j * kLanes), sum[r][j]);
#pragma GCC unroll 4
  for (int r = 0; r < kQueryRows; ++r)
#pragma GCC unroll 4
    for (int j = 0; j < V; ++j) store(out + r * h.padded_depth + j * kLanes, sum[r][j]);
}

/// out[r][d] = sum over keys 0 .. first + r of weights[r][key] * matrix[key][d]; out is [kQueryRows, padded_depth].
void weighted_rows(const float* weights, const float* matrix, int64_t first, int rows, const Head& h, float* out) {
  int64_t d = 0;
  for (; d + kVectors * kLanes <= h.padded_depth; d += kVectors * kLanes)
    weighted_strip<kVectors>(weights, matrix + d, first, rows, h, out + d);
  for (; d < h.padded_depth; d += kLanes) weighted_strip<1>(weights, matrix + d, first, rows, h, out + d);
}

/// V vectors of matrix[key][d] = fma(weights[r][key], row_r[d], matrix[key][d]), r ascending, for the rows r that see the key.
template <int V>
SHARDLAB_INLINE void scatter_strip(const float* weights, const float* rows_of, int64_t first, int rows, const Head& h,
                                   float* matrix) {
  Floats row[kQueryRows][V];
#pragma GCC unroll 4
  for (int r = 0; r < kQueryRows; ++r)
#pragma GCC unroll 4
    for (int j = 0; j < V; ++j) row[r][j] = load(rows_of + r * h.padded_depth + j * kLanes);
  const int64_t common = rows == kQueryRows ? first + 1 : 0;  // keys that all four rows see
  for (int64_t key = 0; key < common; ++key)
#pragma GCC unroll 4
    for (int j = 0; j < V; ++j) {
      float* to = matrix + key * h.padded_depth + j * kLanes;
      Floats sum = load(to);
#pragma GCC unroll 4
      for (int r = 0; r < kQueryRows; ++r) sum = fma(floats(weights[r * h.padded_tokens + key]), row[r][j], sum);
      store(to, sum);
    }
  for (int64_t key = common; key < first + rows; ++key)
    for (int j = 0; j < V; ++j) {
      float* to = matrix + key * h.padded_depth + j * kLanes;
      Floats sum = load(to);
      for (int64_t r = key > first ? key - first : 0; r < rows; ++r)
        sum = fma(floats(weights[r * h.padded_tokens + key]), load(rows_of + r * h.padded_depth + j * kLanes), sum);
      store(to, sum);
    }
}

void scatter_rows(const float* weights, const float* rows_of, int64_t first, int rows, const Head& h, float* matrix) {
  int64_t d = 0;
  for (; d + kVectors * kLanes <= h.padded_depth; d += kVectors * kLanes)
    scatter_strip<kVectors>(weights, rows_of + d, first, rows, h, matrix + d);
  for (; d < h.padded_depth; d += kLanes) scatter_strip<1>(weights, rows_of + d, first, rows, h, matrix + d);
}

/// Scores of a row become exponentials; gives their sum and the row's log-sum-exp.
void softmax_row(float* scores, int64_t keys, float scale, float& sum, float& lse) {
  const Floats factor = floats(scale);
  float max = -__builtin_inff();
  Floats most = floats(max);
  int64_t j = 0;
  for (; j + kLanes <= keys; j += kLanes) {
    const Floats s = load(scores + j) * factor;
    store(scores + j, s);
    most = larger(most, s);
  }
  for (; j < keys; ++j) {
    scores[j] *= scale;
    max = scores[j] > max ? scores[j] : max;
  }
  float v[kLanes];
  store(v, most);
  for (int i = 0; i < kLanes; ++i) max = v[i] > max ? v[i] : max;
  const Floats top = floats(max);
  sum = lanes(keys, [=](int64_t i, int n) {
    const Floats p = exp_formula(load_some(scores + i, n) - top);
    store_some(scores + i, p, n);
    return p;
  });
  lse = max + log_formula(sum);
}

void check(const AttentionShape& s) {
  expect(s.kv_heads >= 1 && s.heads % s.kv_heads == 0, "attention: kv_heads divides heads; this is heads", s.heads);
  expect(s.head_dim >= 1, "attention: head_dim is positive", s.head_dim);
}

/// Pointers to `rows` rows from `first` on, the last one repeated to make four.
SHARDLAB_INLINE void row_pointers(const float* base, int64_t stride, int64_t first, int rows, const float** to) {
  for (int r = 0; r < kQueryRows; ++r) to[r] = base + (first + (r < rows ? r : rows - 1)) * stride;
}

SHARDLAB_INLINE int rows_from(int64_t first, int64_t tokens) {
  return static_cast<int>(tokens - first < kQueryRows ? tokens - first : kQueryRows);
}

}  // namespace

void attention_forward(const AttentionForward& a) {
  const AttentionShape& s = a.shape;
  check(s);
  void* scratch = a.scratch;
  float* keys = take<float>(scratch, s.head_dim * padded_to_lanes(s.tokens));
  float* values = take<float>(scratch, s.tokens * padded_to_lanes(s.head_dim));
  float* scores = take<float>(scratch, kQueryRows * padded_to_lanes(s.tokens));
  constexpr int64_t kMostDepth = 1024;
  expect(s.head_dim <= kMostDepth, "attention: head_dim is at most 1024", s.head_dim);
  float out[kQueryRows * kMostDepth];
  const int queries = s.heads / s.kv_heads;
  for (int64_t b = 0; b < s.sequences; ++b)
    for (int group = 0; group < s.kv_heads; ++group) {
      const Head h = head_of(s, group);
      const float* qkv = a.qkv + b * s.tokens * h.stride;
      transpose(qkv + h.key, h, keys);
      copy_rows(qkv + h.value, h.stride, s.tokens, h, values);
      for (int head = group * queries; head < (group + 1) * queries; ++head)
        for (int64_t first = 0; first < s.tokens; first += kQueryRows) {
          const int rows = rows_from(first, s.tokens);
          const float* query[kQueryRows];
          row_pointers(qkv + query_offset(s, head), h.stride, first, rows, query);
          dots(query, keys, first + rows, h, scores);
          float sum[kQueryRows];
          for (int r = 0; r < rows; ++r)
            softmax_row(scores + r * h.padded_tokens, first + r + 1, h.scale, sum[r],
                        a.lse[(b * s.heads + head) * s.tokens + first + r]);
          weighted_rows(scores, values, first, rows, h, out);
          for (int r = 0; r < rows; ++r) {
            const Floats inverse = floats(1.0f / sum[r]);
            float* to = a.o + (b * s.tokens + first + r) * s.out_width() + head * h.depth;
            for_vectors(h.depth, [=, from = out + r * h.padded_depth](int64_t d, int n) {
              store_some(to + d, load(from + d) * inverse, n);
            });
          }
        }
    }
}

namespace {

/// The scratch arrays of the backward pass of one kv head.
struct BackwardScratch {
  float *keys_transposed, *values_transposed, *keys, *dkeys, *dvalues, *p, *ds, *queries, *douts;
};

/// One block of query rows: dq, and the block's terms of dk and dv.
void backward_block(const AttentionInput& a, const Head& h, const BackwardScratch& x, int64_t b, int head, int64_t first) {
  const AttentionShape& s = a.shape;
  const int rows = rows_from(first, s.tokens);
  const int64_t at = query_offset(s, head), out_at = (b * s.tokens + first) * s.out_width() + head * h.depth;
  const float* lse = a.lse + (b * s.heads + head) * s.tokens + first;
  copy_rows(a.qkv + (b * s.tokens + first) * h.stride + at, h.stride, rows, h, x.queries);
  copy_rows(a.dout + out_at, s.out_width(), rows, h, x.douts);
  const float *query[kQueryRows], *dout[kQueryRows];
  row_pointers(x.queries, h.padded_depth, 0, rows, query);
  row_pointers(x.douts, h.padded_depth, 0, rows, dout);
  dots(query, x.keys_transposed, first + rows, h, x.p);
  dots(dout, x.values_transposed, first + rows, h, x.ds);
  const Floats scale = floats(h.scale);
  for (int r = 0; r < rows; ++r) {
    const float* o = a.o + out_at + r * s.out_width();
    const Floats delta = floats(lanes(h.depth, [&](int64_t d, int n) { return load_some(dout[r] + d, n) * load_some(o + d, n); }));
    const Floats log_sum = floats(lse[r]);
    float *p = x.p + r * h.padded_tokens, *ds = x.ds + r * h.padded_tokens;
    for_vectors(first + r + 1, [&](int64_t j, int) {  // whole vectors: the rows of scratch are padded
      const Floats weight = exp_formula(load(p + j) * scale - log_sum);
      store(p + j, weight);
      store(ds + j, (weight * (load(ds + j) - delta)) * scale);
    });
  }
  float* dq = a.dqkv + (b * s.tokens + first) * h.stride + at;
  scatter_rows(x.ds, x.queries, first, rows, h, x.dkeys);
  scatter_rows(x.p, x.douts, first, rows, h, x.dvalues);
  weighted_rows(x.ds, x.keys, first, rows, h, x.queries);  // the queries are not needed any more
  for (int r = 0; r < rows; ++r)
    std::memcpy(dq + r * h.stride, x.queries + r * h.padded_depth, sizeof(float) * static_cast<size_t>(h.depth));
}

}  // namespace

void attention_input(const AttentionInput& a) {
  const AttentionShape& s = a.shape;
  check(s);
  void* scratch = a.scratch;
  const int64_t padded_tokens = padded_to_lanes(s.tokens), padded_depth = padded_to_lanes(s.head_dim);
  BackwardScratch x;
  for (float** part : {&x.keys_transposed, &x.values_transposed}) *part = take<float>(scratch, s.head_dim * padded_tokens);
  for (float** part : {&x.keys, &x.dkeys, &x.dvalues}) *part = take<float>(scratch, s.tokens * padded_depth);
  for (float** part : {&x.p, &x.ds}) *part = take<float>(scratch, kQueryRows * padded_tokens);
  for (float** part : {&x.queries, &x.douts}) *part = take<float>(scratch, kQueryRows * padded_depth);
  const int queries = s.heads / s.kv_heads;
  const size_t depth_bytes = sizeof(float) * static_cast<size_t>(s.head_dim);
  for (int64_t b = 0; b < s.sequences; ++b)
    for (int group = 0; group < s.kv_heads; ++group) {
      const Head h = head_of(s, group);
      const float* qkv = a.qkv + b * s.tokens * h.stride;
      transpose(qkv + h.key, h, x.keys_transposed);
      transpose(qkv + h.value, h, x.values_transposed);
      copy_rows(qkv + h.key, h.stride, s.tokens, h, x.keys);
      std::memset(x.dkeys, 0, sizeof(float) * static_cast<size_t>(s.tokens * padded_depth));
      std::memset(x.dvalues, 0, sizeof(float) * static_cast<size_t>(s.tokens * padded_depth));
      for (int head = group * queries; head < (group + 1) * queries; ++head)
        for (int64_t first = 0; first < s.tokens; first += kQueryRows) backward_block(a, h, x, b, head, first);
      for (int64_t t = 0; t < s.tokens; ++t) {
        float* row = a.dqkv + (b * s.tokens + t) * h.stride;
        std::memcpy(row + h.key, x.dkeys + t * padded_depth, depth_bytes);
        std::memcpy(row + h.value, x.dvalues + t * padded_depth, depth_bytes);
      }
    }
}

}  // namespace shardlab::kernels::SHARDLAB_VARIANT
