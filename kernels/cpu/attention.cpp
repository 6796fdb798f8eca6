// Causal attention, one (sequence, kv head) at a time. Forward works on four query rows at a time: a block of scores is [4, keys],
// never [queries, keys]. Backward works on up to 32 rows and 64 keys at a time: the rows share what each product reads of the keys
// while it lies in the nearest cache, and the sums of dk and dv stay in registers over all rows.
//
// Scores put lanes along the keys (K transposed once a head), outputs and gradients along the head's depth. Of each leaf of keys a row
// uses a run: up to itself, from where its document begins on, or its window. What the runs of four rows have in common is done together,
// the rest of each row alone, so that no masked term is ever added. Leaves that no row sees cost nothing. Of packed documents rows that
// are worked on together are of one document.
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

/// Leaves of a sum over keys or queries, at most: 16 in canonical mode, else the parts of the sequence.
inline constexpr int kMostLeaves = 512;
inline constexpr int64_t kMostDepth = 1024;

/// Keys that backward works on at a time, at most: a bit of a word for each.
inline constexpr int64_t kTileKeys = 64;
/// Groups of query rows that backward works on at a time, at most.
inline constexpr int kMostGroups = 8;
inline constexpr int kMostRows = kMostGroups * kQueryRows;

/// Queries and keys of an attention, wherever they lie. Offsets count floats.
struct View {
  int64_t sequences, queries, keys;
  int heads, kv_heads;
  int64_t depth, tokens, first_query, first_key;
  TokenOrder order;
  bool canonical;
  const int32_t* positions;     ///< of the sequence's tokens in their documents, or null
  int64_t q_stride, q_group;    ///< from one token's row to the next; from one kv head's queries to the next's
  int64_t kv_stride, kv_group;  ///< likewise of keys; a value follows its key
  int64_t values;               ///< depth of values, and of outputs
  int64_t window;               ///< positions that a query sees, itself the last; 0: all
  int per_group() const { return heads / kv_heads; }
  int64_t padded_keys() const { return padded_to_lanes(keys); }
  int64_t padded_depth() const { return padded_to_lanes(depth); }
  int64_t out_width() const { return heads * values; }
  int64_t query_at(int head) const { return head / per_group() * q_group + head % per_group() * depth; }
  float scale() const { return 1.0f / __builtin_sqrtf(static_cast<float>(depth)); }
  int64_t position(int64_t query) const { return order.position(first_query + query, tokens); }
  /// The position in the text at which the document of a query begins.
  int64_t document(int64_t sequence, int64_t query) const {
    return positions == nullptr ? 0 : position(query) - positions[sequence * tokens + first_query + query];
  }
  /// The first position that a query sees, of a document that begins at `document`.
  int64_t first_seen(int64_t document, int64_t query) const {
    const int64_t hidden = window == 0 ? -1 : position(query) - window;  // the last position behind the window
    return hidden < document ? document : hidden + 1;
  }
};

View view_of(const AttentionShape& s) {
  const int64_t group = s.group_width();
  return {s.sequences, s.tokens,    s.tokens,    s.heads,       s.kv_heads, s.head_dim,    s.tokens, 0,          0,
          s.order,     s.canonical, s.positions, s.qkv_width(), group,      s.qkv_width(), group,    s.values(), s.window};
}
View view_of(const AttentionBlockShape& s) {
  return {s.sequences,  s.queries,
          s.keys,       s.heads,
          s.kv_heads,   s.head_dim,
          s.tokens,     s.first_query,
          s.first_key,  s.order,
          s.canonical,  s.positions,
          s.q_width(),  int64_t{s.heads / s.kv_heads} * s.head_dim,
          s.kv_width(), int64_t{s.head_dim} + s.values(),
          s.values(),   s.window};
}

/// Leaves of the places [first, first + extent), as offsets from `first`. None crosses a part of the order, so that positions
/// ascend within each.
struct Leaves {
  int count = 0;
  int64_t begin[kMostLeaves + 1];

  Leaves(const View& v, int64_t first, int64_t extent) {
    for (int64_t at = first; at < first + extent;) {
      const int64_t run = v.order.run_end(at, v.tokens), end = run < first + extent ? run : first + extent;
      const PartLeaves part({at, v.tokens}, end - at);
      const int pieces = v.canonical ? part.count() : 1;
      expect(count + pieces <= kMostLeaves, "attention: a sequence has at most 512 parts", count + pieces);
      for (int i = 0; i < pieces; ++i) begin[count++] = at - first + (v.canonical ? part.begin(i) : 0);
      at = end;
    }
    begin[count] = extent;
  }
};

/// The keys [first, end) that each row uses of a run of keys; first = end where it uses none.
struct Spans {
  int32_t first[kQueryRows], end[kQueryRows];
  int32_t keys(int row) const { return end[row] - first[row]; }
  /// The keys [common_begin, common_end) that all of `rows` rows use.
  int64_t common_begin(int rows) const {
    int32_t begin = first[0];
    for (int r = 1; r < rows; ++r) begin = first[r] > begin ? first[r] : begin;
    return begin;
  }
  int64_t common_end(int rows) const {
    int32_t to = end[0];
    for (int r = 1; r < rows; ++r) to = end[r] < to ? end[r] : to;
    return to;
  }
};

/// Of each leaf, where the keys begin that some of the rows see, which of them from there on each row sees, and where the last one
/// ends that some row sees. Rows that are not there are as the last one.
struct Seen {
  int64_t begin[kMostLeaves];  ///< as an offset from the first key
  Spans keys[kMostLeaves];     ///< from `begin` on
  int32_t most[kMostLeaves];

  void look(const View& v, const Leaves& leaves, int64_t sequence, int64_t first, int rows) {
    const auto up_to = [&](int leaf, int64_t position) {
      const int64_t from = leaves.begin[leaf], to = leaves.begin[leaf + 1];
      return from == to ? 0 : v.order.seen(v.first_key + from, v.first_key + to, position, v.tokens);
    };
    const int64_t document = v.document(sequence, first);
    int64_t from[kQueryRows], position[kQueryRows];
    for (int r = 0; r < rows; ++r) from[r] = v.first_seen(document, first + r), position[r] = v.position(first + r);
    for (int i = 0; i < leaves.count; ++i) {
      int64_t left[kQueryRows], right[kQueryRows], least = leaves.begin[i + 1];
      for (int r = 0; r < rows; ++r) {
        left[r] = from[r] == 0 ? 0 : up_to(i, from[r] - 1);
        right[r] = up_to(i, position[r]);
        if (left[r] < right[r] && leaves.begin[i] + left[r] < least) least = leaves.begin[i] + left[r];
      }
      begin[i] = least;
      most[i] = 0;
      for (int r = 0; r < kQueryRows; ++r) {
        const int at = r < rows ? r : rows - 1;
        const bool any = left[at] < right[at];
        keys[i].first[r] = any ? static_cast<int32_t>(leaves.begin[i] + left[at] - least) : 0;
        keys[i].end[r] = any ? static_cast<int32_t>(leaves.begin[i] + right[at] - least) : 0;
        most[i] = keys[i].end[r] > most[i] ? keys[i].end[r] : most[i];
      }
    }
  }
};

typedef float Quad __attribute__((vector_size(16)));
typedef int32_t QuadPlaces __attribute__((vector_size(16)));

/// to[j][i] = from[i][j] of a square of four.
SHARDLAB_INLINE void transpose_square(const float* from, int64_t from_stride, float* to, int64_t to_stride) {
  Quad row[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) std::memcpy(&row[i], from + i * from_stride, sizeof(Quad));
  const QuadPlaces low = {0, 4, 1, 5}, high = {2, 6, 3, 7}, lower = {0, 1, 4, 5}, upper = {2, 3, 6, 7};
  const Quad a = __builtin_shuffle(row[0], row[1], low), b = __builtin_shuffle(row[2], row[3], low);
  const Quad c = __builtin_shuffle(row[0], row[1], high), d = __builtin_shuffle(row[2], row[3], high);
  const Quad column[4] = {__builtin_shuffle(a, b, lower), __builtin_shuffle(a, b, upper), __builtin_shuffle(c, d, lower),
                          __builtin_shuffle(c, d, upper)};
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) std::memcpy(to + j * to_stride, &column[j], sizeof(Quad));
}

/// Asks for `count` rows before their use.
SHARDLAB_INLINE void fetch_rows(const float* rows, int64_t stride, int64_t count, int64_t depth) {
  for (int64_t t = 0; t < count; ++t)
    for (int64_t d = 0; d < depth; d += 16) __builtin_prefetch(rows + t * stride + d);
}

/// to[d][t] = rows[t][d], padded with +0 along t.
void transpose(const float* rows, const View& v, int64_t depth, float* to) {
  const int64_t padded = v.padded_keys(), whole = v.keys / kLanes * kLanes, squares = depth / 4 * 4;
  for (int64_t t = 0; t < whole; t += kLanes) {
    if (t + kLanes < whole) fetch_rows(rows + (t + kLanes) * v.kv_stride, v.kv_stride, kLanes, depth);
    for (int64_t d = 0; d < squares; d += 4)
#pragma GCC unroll 4
      for (int64_t i = 0; i < kLanes; i += 4)
        transpose_square(rows + (t + i) * v.kv_stride + d, v.kv_stride, to + d * padded + t + i, padded);
  }
  for (int64_t d = 0; d < depth; ++d) {
    for (int64_t t = d < squares ? whole : 0; t < v.keys; ++t) to[d * padded + t] = rows[t * v.kv_stride + d];
    for (int64_t t = v.keys; t < padded; ++t) to[d * padded + t] = 0;
  }
}
/// to[t][d] = rows[t][d], padded with +0 along d.
void copy_rows(const float* rows, int64_t stride, int64_t count, int64_t depth, float* to) {
  const int64_t padded = padded_to_lanes(depth);
  for (int64_t t = 0; t < count; ++t) {
    for (int64_t d = 0; d < depth; ++d) to[t * padded + d] = rows[t * stride + d];
    for (int64_t d = depth; d < padded; ++d) to[t * padded + d] = 0;
  }
}

/// Sizes that the loops over scratch need.
struct Head {
  int64_t depth, padded_tokens, padded_depth;
  int64_t row;  ///< from one row of scores to the next
};

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
    for (int j = 0; j < V; ++j) store(out + r * h.row + j * kLanes, sum[r][j]);
}

/// Products of four rows with the keys (or values) [begin, end), and of those around them that make the vectors whole.
void dots(const float* const* rows, const float* transposed, int64_t begin, int64_t end, const Head& h, float* out) {
  int64_t key = begin / kLanes * kLanes;
  end = padded_to_lanes(end);
  for (; key + kVectors * kLanes <= end; key += kVectors * kLanes) dot_strip<kVectors>(rows, transposed + key, h, out + key);
  if constexpr (kVectors == 4) {
    // What is left in one strip: a single vector has too few sums to keep the processor busy.
    if (key + 3 * kLanes == end) return dot_strip<3>(rows, transposed + key, h, out + key);
    if (key + 2 * kLanes == end) return dot_strip<2>(rows, transposed + key, h, out + key);
  }
  for (; key < end; key += kLanes) dot_strip<1>(rows, transposed + key, h, out + key);
}

/// V vectors of sums over the keys that row r of kQueryRows uses: weights[r][key] * matrix[key][d], keys ascending; with `more` from
/// what out holds on.
template <int V>
SHARDLAB_INLINE void weighted_strip(const float* weights, const float* matrix, const Spans& keys, const Head& h, bool more,
                                    float* out) {
  Floats sum[kQueryRows][V];
#pragma GCC unroll 4
  for (int r = 0; r < kQueryRows; ++r)
#pragma GCC unroll 4
    for (int j = 0; j < V; ++j) sum[r][j] = more ? load(out + r * h.padded_depth + j * kLanes) : zeros();
  const int64_t begin = keys.common_begin(kQueryRows), end = keys.common_end(kQueryRows);
  const auto alone = [&](int r, int64_t from, int64_t to) __attribute__((always_inline)) {
    for (int64_t key = from; key < to; ++key)
#pragma GCC unroll 4
      for (int j = 0; j < V; ++j)
        sum[r][j] = fma(floats(weights[r * h.row + key]), load(matrix + key * h.padded_depth + j * kLanes), sum[r][j]);
  };
#pragma GCC unroll 4
  for (int r = 0; r < kQueryRows; ++r) alone(r, keys.first[r], begin < keys.end[r] ? begin : keys.end[r]);
  for (int64_t key = begin; key < end; ++key) {
    Floats v[V];
#pragma GCC unroll 4
    for (int j = 0; j < V; ++j) v[j] = load(matrix + key * h.padded_depth + j * kLanes);
#pragma GCC unroll 4
    for (int r = 0; r < kQueryRows; ++r) {
      const Floats w = floats(weights[r * h.row + key]);
#pragma GCC unroll 4
      for (int j = 0; j < V; ++j) sum[r][j] = fma(w, v[j], sum[r][j]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < kQueryRows; ++r) alone(r, begin < end ? end : begin, keys.end[r]);
#pragma GCC unroll 4
  for (int r = 0; r < kQueryRows; ++r)
#pragma GCC unroll 4
    for (int j = 0; j < V; ++j) store(out + r * h.padded_depth + j * kLanes, sum[r][j]);
}

/// out[r][d] = sum over the keys that row r uses of weights[r][key] * matrix[key][d]; out is [kQueryRows, padded_depth]. With `more`
/// the sum goes on from what out holds.
void weighted_rows(const float* weights, const float* matrix, const Spans& keys, const Head& h, bool more, float* out) {
  int64_t d = 0;
  for (; d + kVectors * kLanes <= h.padded_depth; d += kVectors * kLanes)
    weighted_strip<kVectors>(weights, matrix + d, keys, h, more, out + d);
  for (; d < h.padded_depth; d += kLanes) weighted_strip<1>(weights, matrix + d, keys, h, more, out + d);
}

/// Rows of queries or of dout, with vectors of the depth readable: row r lies at first + r * stride.
struct Rows {
  const float* first;
  int64_t stride;
  int count;
};

/// Which keys of a tile each row sees, key k as bit k.
struct SeenBits {
  uint64_t row[kMostRows];
  uint64_t some, all;  ///< keys that some row sees, that every row sees
};

/// The keys [from, to) of a tile as bits.
SHARDLAB_INLINE uint64_t bits_between(int64_t from, int64_t to) {
  return to - from >= kTileKeys ? ~uint64_t{0} : ((uint64_t{1} << (to - from)) - 1) << from;
}

/// K keys from `key` on, V vectors: matrix[key][d] = fma(weights[r][key], row_r[d], matrix[key][d]), r ascending, for the rows r that
/// see the key.
template <int K, int V>
SHARDLAB_INLINE void scatter_strip(const float* weights, const Rows& rows, const SeenBits& seen, int64_t key, const Head& h,
                                   float* matrix) {
  constexpr uint64_t kWhole = (uint64_t{1} << K) - 1;
  Floats sum[K][V];
#pragma GCC unroll 4
  for (int k = 0; k < K; ++k)
#pragma GCC unroll 4
    for (int j = 0; j < V; ++j) sum[k][j] = load(matrix + k * h.padded_depth + j * kLanes);
  const auto add_row = [&](int r, uint64_t used) __attribute__((always_inline)) {
    Floats row[V];
#pragma GCC unroll 4
    for (int j = 0; j < V; ++j) row[j] = load(rows.first + r * rows.stride + j * kLanes);
#pragma GCC unroll 4
    for (int k = 0; k < K; ++k) {
      if ((used >> k & 1) == 0) continue;
      const Floats w = floats(weights[r * h.row + key + k]);
#pragma GCC unroll 4
      for (int j = 0; j < V; ++j) sum[k][j] = fma(w, row[j], sum[k][j]);
    }
  };
  if ((seen.all >> key & kWhole) == kWhole) {
    for (int r = 0; r < rows.count; ++r) add_row(r, kWhole);
  } else {
    for (int r = 0; r < rows.count; ++r) {
      const uint64_t used = seen.row[r] >> key & kWhole;
      if (used == kWhole)
        add_row(r, kWhole);
      else if (used != 0)
        add_row(r, used);
    }
  }
#pragma GCC unroll 4
  for (int k = 0; k < K; ++k)
#pragma GCC unroll 4
    for (int j = 0; j < V; ++j) store(matrix + k * h.padded_depth + j * kLanes, sum[k][j]);
}

template <int K>
SHARDLAB_INLINE void scatter_keys(const float* weights, const Rows& rows, const SeenBits& seen, int64_t key, const Head& h,
                                  float* matrix) {
  int64_t d = 0;
  for (; d + kVectors * kLanes <= h.padded_depth; d += kVectors * kLanes)
    scatter_strip<K, kVectors>(weights, {rows.first + d, rows.stride, rows.count}, seen, key, h, matrix + d);
  for (; d < h.padded_depth; d += kLanes)
    scatter_strip<K, 1>(weights, {rows.first + d, rows.stride, rows.count}, seen, key, h, matrix + d);
}

/// matrix[key][d] += sum over the rows that see the key of weights[r][key] * row_r[d], rows ascending, for the `keys` keys of a tile.
void scatter_rows(const float* weights, const Rows& rows, const SeenBits& seen, int64_t keys, const Head& h, float* matrix) {
  int64_t key = 0;
  for (; key + 4 <= keys; key += 4)
    if ((seen.some >> key & 15) != 0) scatter_keys<4>(weights, rows, seen, key, h, matrix + key * h.padded_depth);
  for (; key < keys; ++key)
    if ((seen.some >> key & 1) != 0) scatter_keys<1>(weights, rows, seen, key, h, matrix + key * h.padded_depth);
}

/// -1 in the first n lanes, else 0.
SHARDLAB_INLINE Ints lanes_before(int n) {
  static constexpr int32_t kPlaces[kLanes] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  Ints r;
  for (int i = 0; i < kPieces; ++i) {
    std::memcpy(&r.piece[i], kPlaces + i * kPieceLanes, sizeof(IntPiece));
    r.piece[i] = r.piece[i] < n;
  }
  return r;
}

/// Scores of a row, which sees a key, become exponentials; gives the largest score and their sum.
void softmax_row(float* scores, int64_t keys, float scale, float& max, float& sum) {
  const Floats factor = floats(scale), least = floats(-__builtin_inff());
  Floats most = least;
  for_vectors(keys, [&](int64_t j, int n) {
    const Floats s = load_some(scores + j, n) * factor;
    store_some(scores + j, s, n);
    most = larger(most, n == kLanes ? s : select(lanes_before(n), s, least));
  });
  float v[kLanes];
  store(v, most);
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) v[i] = v[i] > v[i + width] ? v[i] : v[i + width];
  max = v[0];
  const Floats top = floats(max);
  sum = lanes(keys, [=](int64_t i, int n) {
    const Floats p = exp_formula(load_some(scores + i, n) - top);
    store_some(scores + i, p, n);
    return p;
  });
}

void check(const View& v) {
  expect(v.kv_heads >= 1 && v.heads % v.kv_heads == 0, "attention: kv_heads divides heads; this is heads", v.heads);
  expect(v.depth >= 1 && v.depth <= kMostDepth, "attention: head_dim is positive and at most 1024", v.depth);
  expect(v.values >= 1 && v.values <= kMostDepth, "attention: value_dim is positive and at most 1024", v.values);
  expect(v.tokens % v.order.granule() == 0, "attention: the order's parts divide the tokens; this is tokens", v.tokens);
  expect(!v.canonical || v.order.parts == 1 || kContractionLeaves % v.order.parts == 0,
         "attention: in canonical mode the order's parts divide 16", v.order.parts);
}

/// Pointers to `rows` rows from `first` on, the last one repeated to make four.
SHARDLAB_INLINE void row_pointers(const float* base, int64_t stride, int64_t first, int rows, const float** to) {
  for (int r = 0; r < kQueryRows; ++r) to[r] = base + (first + (r < rows ? r : rows - 1)) * stride;
}

/// Rows from `first` on that are worked on together: of one document.
SHARDLAB_INLINE int rows_from(const View& v, int64_t sequence, int64_t first, int64_t end) {
  const int most = static_cast<int>(end - first < kQueryRows ? end - first : kQueryRows);
  int rows = 1;
  while (rows < most && v.document(sequence, first + rows) == v.document(sequence, first)) ++rows;
  return rows;
}

/// Calls body(begin, end) for the runs of keys that hold what some row sees. Leaves that are seen to their end join the next.
template <class Body>
SHARDLAB_INLINE void for_seen(const Leaves& leaves, const Seen& seen, const Body& body) {
  for (int i = 0; i < leaves.count;) {
    const int64_t begin = seen.begin[i];
    int64_t end = begin + seen.most[i];
    for (++i; i < leaves.count && seen.begin[i] == end && seen.most[i] > 0; ++i) end += seen.most[i];
    if (end > begin) body(begin, end);
  }
}

/// Parts of the softmax of four rows: m, l and o as docs/canonical-order.md has them. A row without a key has m = -inf, l = 0, o = 0.
struct Softmax {
  float m[kQueryRows], l[kQueryRows];
  float* o;  ///< [kQueryRows, padded_depth]
};

/// left = merge(left, right).
void merge(Softmax& left, const Softmax& right, int64_t padded_depth) {
  float power[kLanes] = {}, m[kQueryRows];
  for (int r = 0; r < kQueryRows; ++r) {
    m[r] = right.m[r] > left.m[r] ? right.m[r] : left.m[r];
    if (left.l[r] == 0 || right.l[r] == 0) continue;
    power[2 * r] = left.m[r] - m[r];
    power[2 * r + 1] = right.m[r] - m[r];
  }
  float e[kLanes];
  store(e, exp_formula(load(power)));
  for (int r = 0; r < kQueryRows; ++r) {
    float *to = left.o + r * padded_depth, *from = right.o + r * padded_depth;
    if (right.l[r] == 0) continue;
    if (left.l[r] == 0) {
      std::memcpy(to, from, sizeof(float) * static_cast<size_t>(padded_depth));
      left.m[r] = right.m[r];
      left.l[r] = right.l[r];
      continue;
    }
    left.m[r] = m[r];
    left.l[r] = left.l[r] * e[2 * r] + right.l[r] * e[2 * r + 1];
    const Floats a = floats(e[2 * r]), b = floats(e[2 * r + 1]);
    for (int64_t d = 0; d < padded_depth; d += kLanes) store(to + d, load(to + d) * a + load(from + d) * b);
  }
}

/// Partial softmaxes, and sums of dq, of four rows that are held at once.
inline constexpr int kRowEntries = 6;

/// The sums of one block of rows over leaves: by the tree, or in fast mode one after another.
class RowSums {
 public:
  explicit RowSums(bool canonical) : canonical_(canonical) {}
  template <class Join>
  SHARDLAB_INLINE int push(int leaf, const Join& join) {
    if (canonical_) return tree_.push(static_cast<uint32_t>(leaf), join);
    if (size_ == 2) join(0);
    return size_ == 0 ? size_++ : (size_ = 2, 1);
  }
  template <class Join>
  SHARDLAB_INLINE bool finish(const Join& join) {
    if (canonical_) return tree_.finish(join);
    if (size_ == 2) join(0);
    return size_ > 0;
  }

 private:
  bool canonical_;
  int size_ = 0;
  TreeStack tree_;
};

/// Where a forward pass leaves its result. Offsets as of q; lse and sums are [sequences, heads, queries].
struct ForwardResult {
  float *o, *lse, *sums;
  bool carry;
};

void write_row(const ForwardResult& to, const float* from, float m, float l, int64_t depth, int64_t out, int64_t row) {
  float* o = to.o + out;
  if (to.sums != nullptr) {
    std::memcpy(o, from, sizeof(float) * static_cast<size_t>(depth));
    to.sums[2 * row] = m;
    to.sums[2 * row + 1] = l;
    return;
  }
  if (l == 0) {
    if (to.carry) return;
    std::memset(o, 0, sizeof(float) * static_cast<size_t>(depth));
    to.lse[row] = -__builtin_inff();
    return;
  }
  const float lse = m + log_formula(l), old = to.carry ? to.lse[row] : -__builtin_inff();
  const Floats inverse = floats(1.0f / l);
  if (old == -__builtin_inff()) {
    for_vectors(depth, [=](int64_t d, int n) { store_some(o + d, load(from + d) * inverse, n); });
    to.lse[row] = lse;
    return;
  }
  const float most = old > lse ? old : lse, e1 = exp_formula(old - most), e2 = exp_formula(lse - most), sum = e1 + e2;
  const Floats a = floats(e1 / sum), b = floats(e2 / sum);
  for_vectors(depth, [=](int64_t d, int n) { store_some(o + d, load_some(o + d, n) * a + (load(from + d) * inverse) * b, n); });
  to.lse[row] = most + log_formula(sum);
}

void forward(const View& v, const float* q, const float* kv, const ForwardResult& to, void* scratch) {
  check(v);
  const Head h{v.depth, v.padded_keys(), v.padded_depth(), v.padded_keys()};
  const Head of_values{v.values, v.padded_keys(), padded_to_lanes(v.values), v.padded_keys()};
  float* keys = take<float>(scratch, v.depth * h.padded_tokens);
  float* values = take<float>(scratch, v.keys * of_values.padded_depth);
  float* scores = take<float>(scratch, kQueryRows * h.padded_tokens);
  const Leaves leaves(v, v.first_key, v.keys);
  Seen seen;
  alignas(64) float sums[kRowEntries * kQueryRows * kMostDepth];
  Softmax stack[kRowEntries];
  for (int i = 0; i < kRowEntries; ++i) stack[i].o = sums + i * kQueryRows * of_values.padded_depth;
  const auto join = [&](int i) { merge(stack[i], stack[i + 1], of_values.padded_depth); };
  for (int64_t b = 0; b < v.sequences; ++b)
    for (int group = 0; group < v.kv_heads; ++group) {
      const float* key = kv + b * v.keys * v.kv_stride + group * v.kv_group;
      transpose(key, v, v.depth, keys);
      copy_rows(key + v.depth, v.kv_stride, v.keys, v.values, values);
      for (int head = group * v.per_group(); head < (group + 1) * v.per_group(); ++head)
        for (int64_t first = 0; first < v.queries;) {
          const int rows = rows_from(v, b, first, v.queries);
          const float* query[kQueryRows];
          row_pointers(q + b * v.queries * v.q_stride + v.query_at(head), v.q_stride, first, rows, query);
          seen.look(v, leaves, b, first, rows);
          for_seen(leaves, seen, [&](int64_t begin, int64_t end) { dots(query, keys, begin, end, h, scores); });
          RowSums tree(v.canonical);
          for (int leaf = 0; leaf < leaves.count; ++leaf) {
            if (seen.most[leaf] == 0) continue;
            Softmax& part = stack[tree.push(leaf, join)];
            const int64_t begin = seen.begin[leaf];
            for (int r = 0; r < kQueryRows; ++r) {
              part.m[r] = -__builtin_inff();
              part.l[r] = 0;
              if (const Spans& keys_of = seen.keys[leaf]; r < rows && keys_of.keys(r) > 0)
                softmax_row(scores + r * h.padded_tokens + begin + keys_of.first[r], keys_of.keys(r), v.scale(), part.m[r],
                            part.l[r]);
            }
            weighted_rows(scores + begin, values + begin * of_values.padded_depth, seen.keys[leaf], of_values, false, part.o);
          }
          const bool any = tree.finish(join);
          if (!any) std::memset(stack[0].o, 0, sizeof(float) * static_cast<size_t>(kQueryRows * of_values.padded_depth));
          for (int r = 0; r < rows; ++r)
            write_row(to, stack[0].o + r * of_values.padded_depth, any ? stack[0].m[r] : -__builtin_inff(),
                      any ? stack[0].l[r] : 0.0f, v.values, (b * v.queries + first + r) * v.out_width() + head * v.values,
                      (b * v.heads + head) * v.queries + first + r);
          first += rows;
        }
    }
}

/// Operands of a backward pass. dq has rows of `q_stride` as q, dkv of `dkv_stride`.
struct Backward {
  const float *dout, *o, *lse, *q, *kv;
  float *dq, *dkv;
  bool carry, carry_kv, by_head;
  int64_t dkv_stride;
};

/// Up to four query rows, of one document, in a block of rows.
struct RowGroup {
  int first, rows;  ///< in the block
  Seen seen;
  RowSums tree{false};
  float* sums;   ///< kRowEntries of dq's
  float* entry;  ///< that of the leaf of keys at hand
};

/// The scratch arrays of the backward pass of one kv head. `dkeys` is a stack of entries of keys * padded_depth, `dvalues` of as many
/// of padded values. p and ds are of a block of rows and a tile of keys.
struct BackwardScratch {
  float *keys_transposed, *values_transposed, *keys, *p, *ds, *queries, *douts, *dkeys, *dvalues;
  RowGroup* groups;
  int most_groups;  ///< where 1, queries and dout of the rows are copied, and padded
};

/// to = x, or added to what is there.
SHARDLAB_INLINE void put_row(float* to, const float* from, int64_t depth, bool add) {
  if (!add) {
    std::memcpy(to, from, sizeof(float) * static_cast<size_t>(depth));
    return;
  }
  for_vectors(depth, [=](int64_t d, int n) { store_some(to + d, load_some(to + d, n) + load_some(from + d, n), n); });
}
/// x += y over n floats, a multiple of 16; with y null "plus +0".
void add_to(float* x, const float* y, int64_t n) {
  for (int64_t i = 0; i < n; i += kLanes) store(x + i, load(x + i) + (y == nullptr ? zeros() : load(y + i)));
}

/// The keys of a leaf that each row of four uses, of those of a tile [tile, end), from its begin on.
SHARDLAB_INLINE Spans in_tile(const Seen& seen, int leaf, int64_t tile, int64_t end) {
  const auto place = [&](int64_t key) { return static_cast<int32_t>((key < tile ? tile : key > end ? end : key) - tile); };
  Spans keys;
  for (int r = 0; r < kQueryRows; ++r) {
    keys.first[r] = place(seen.begin[leaf] + seen.keys[leaf].first[r]);
    keys.end[r] = place(seen.begin[leaf] + seen.keys[leaf].end[r]);
  }
  return keys;
}

/// The keys of `tile`, from its begin on, that the rows of a group see.
SHARDLAB_INLINE uint64_t look_at_tile(const RowGroup& group, const Leaves& leaves, int leaf, int64_t tile, int64_t end,
                                      uint64_t* rows) {
  uint64_t some = 0;
  for (int r = 0; r < group.rows; ++r) rows[r] = 0;
  for (; leaf < leaves.count && leaves.begin[leaf] < end; ++leaf)
    for (int r = 0; r < group.rows; ++r) {
      int64_t from = group.seen.begin[leaf] + group.seen.keys[leaf].first[r],
              to = group.seen.begin[leaf] + group.seen.keys[leaf].end[r];
      from = from > tile ? from : tile;
      to = to < end ? to : end;
      if (from < to) rows[r] |= bits_between(from - tile, to - tile);
    }
  for (int r = 0; r < group.rows; ++r) some |= rows[r];
  return some;
}

/// The block of query rows that begins at `first`: dq, and the block's terms of dk and dv. Gives how many rows it has.
int backward_rows(const View& v, const Backward& a, const Head& h, const Head& of_values, const BackwardScratch& x,
                  const Leaves& leaves, int64_t b, int head, int64_t first, int64_t end, float* dkeys, float* dvalues) {
  int count = 0, all_rows = 0;
  for (; count < x.most_groups && first + all_rows < end; ++count) {
    RowGroup& group = x.groups[count];
    group.first = all_rows;
    group.rows = rows_from(v, b, first + all_rows, end);
    group.seen.look(v, leaves, b, first + all_rows, group.rows);
    group.tree = RowSums(v.canonical);
    all_rows += group.rows;
  }
  const int64_t at = v.query_at(head), out_width = v.out_width();
  const int64_t out_at = (b * v.queries + first) * out_width + head * v.values;
  const float *o = a.o + out_at, *lse = a.lse + (b * v.heads + head) * v.queries + first;
  Rows queries{a.q + (b * v.queries + first) * v.q_stride + at, v.q_stride, all_rows}, douts{a.dout + out_at, out_width, all_rows};
  if (x.most_groups == 1) {
    copy_rows(queries.first, queries.stride, all_rows, v.depth, x.queries);
    copy_rows(douts.first, douts.stride, all_rows, v.values, x.douts);
    queries = {x.queries, h.padded_depth, all_rows};
    douts = {x.douts, of_values.padded_depth, all_rows};
  }
  const int64_t behind = first + all_rows + all_rows <= end ? all_rows : 0;  // rows of the next block
  fetch_rows(o + all_rows * out_width, out_width, behind, v.values);
  fetch_rows(a.dout + out_at + all_rows * out_width, out_width, behind, v.values);
  fetch_rows(a.q + (b * v.queries + first + all_rows) * v.q_stride + at, v.q_stride, behind, v.depth);
  float delta[kMostRows];
  for (int r = 0; r < all_rows; ++r)
    delta[r] = lanes(v.values, [&](int64_t d, int n) {
      return load_some(douts.first + r * douts.stride + d, n) * load_some(o + r * out_width + d, n);
    });
  const Floats scale = floats(v.scale());
  const int64_t entry = kQueryRows * h.padded_depth;
  int first_leaf = 0;
  for (int64_t tile = 0; tile < v.keys; tile += h.row) {
    const int64_t tile_end = tile + h.row < v.keys ? tile + h.row : v.keys;
    while (first_leaf < leaves.count && leaves.begin[first_leaf + 1] <= tile) ++first_leaf;
    SeenBits seen;
    seen.some = 0;
    seen.all = ~uint64_t{0};
    for (int g = 0; g < count; ++g) {
      const RowGroup& group = x.groups[g];
      uint64_t* of_rows = seen.row + group.first;
      const uint64_t some = look_at_tile(group, leaves, first_leaf, tile, tile_end, of_rows);
      for (int r = 0; r < group.rows; ++r) seen.all &= of_rows[r];
      seen.some |= some;
      if (some == 0) continue;
      const int64_t begin = __builtin_ctzll(some), to = kTileKeys - __builtin_clzll(some);
      const float* rows[kQueryRows];
      row_pointers(queries.first, queries.stride, group.first, group.rows, rows);
      dots(rows, x.keys_transposed + tile, begin, to, h, x.p + group.first * h.row);
      row_pointers(douts.first, douts.stride, group.first, group.rows, rows);
      dots(rows, x.values_transposed + tile, begin, to, of_values, x.ds + group.first * h.row);
      for (int r = group.first; r < group.first + group.rows; ++r) {
        const Floats log_sum = floats(lse[r]), of_row = floats(delta[r]);
        for (int64_t j = begin / kLanes * kLanes; j < to; j += kLanes) {
          // Whole vectors: nothing reads what a row does not see.
          float *p = x.p + r * h.row + j, *ds = x.ds + r * h.row + j;
          const Floats weight = exp_formula(load(p) * scale - log_sum);
          store(p, weight);
          store(ds, (weight * (load(ds) - of_row)) * scale);
        }
      }
    }
    if (seen.some == 0) continue;
    scatter_rows(x.ds, queries, seen, tile_end - tile, h, dkeys + tile * h.padded_depth);
    scatter_rows(x.p, douts, seen, tile_end - tile, of_values, dvalues + tile * of_values.padded_depth);
    for (int g = 0; g < count; ++g) {
      RowGroup& group = x.groups[g];
      const auto join = [&](int i) { add_to(group.sums + i * entry, group.sums + (i + 1) * entry, entry); };
      for (int leaf = first_leaf; leaf < leaves.count && leaves.begin[leaf] < tile_end; ++leaf) {
        const int64_t begin = group.seen.begin[leaf], to = begin + group.seen.most[leaf];
        if (begin == to || begin >= tile_end || to <= tile) continue;
        if (begin >= tile) group.entry = group.sums + group.tree.push(leaf, join) * entry;
        weighted_rows(x.ds + group.first * h.row, x.keys + tile * h.padded_depth, in_tile(group.seen, leaf, tile, tile_end), h,
                      begin < tile, group.entry);
        if (v.canonical && to <= tile_end) add_to(group.entry, nullptr, entry);
      }
    }
  }
  float* dq = a.dq + (b * v.queries + first) * v.q_stride + at;
  for (int g = 0; g < count; ++g) {
    RowGroup& group = x.groups[g];
    const auto join = [&](int i) { add_to(group.sums + i * entry, group.sums + (i + 1) * entry, entry); };
    if (!group.tree.finish(join)) std::memset(group.sums, 0, sizeof(float) * static_cast<size_t>(entry));
    for (int r = 0; r < group.rows; ++r)
      put_row(dq + (group.first + r) * v.q_stride, group.sums + r * h.padded_depth, v.depth, a.carry);
  }
  return all_rows;
}

/// Groups of rows in a block: p and ds of a block fit in the scratch of four whole rows each, sums of dq in the stack of backward. Only
/// rows whose vectors are whole can be read where they lie.
int groups_of_block(const View& v, int64_t tile) {
  if (v.depth % kLanes != 0 || v.values % kLanes != 0) return 1;
  const int64_t by_scores = v.padded_keys() / tile, by_sums = kMostDepth / v.padded_depth();
  const int64_t fits = by_scores < by_sums ? by_scores : by_sums;
  return static_cast<int>(fits < kMostGroups ? fits : kMostGroups);
}

void backward(const View& v, const Backward& a, void* scratch) {
  check(v);
  expect(!a.by_head || v.canonical, "attention: gradients by query head are for canonical mode", a.by_head);
  const int64_t tile = v.padded_keys() < kTileKeys ? v.padded_keys() : kTileKeys;
  const Head h{v.depth, v.padded_keys(), v.padded_depth(), tile};
  const Head of_values{v.values, v.padded_keys(), padded_to_lanes(v.values), tile};
  const int64_t matrix = v.keys * h.padded_depth, value_matrix = v.keys * of_values.padded_depth;
  const int entries = key_gradient_entries(v.canonical, v.per_group());
  BackwardScratch x;
  x.keys_transposed = take<float>(scratch, v.depth * h.padded_tokens);
  x.values_transposed = take<float>(scratch, v.values * h.padded_tokens);
  x.keys = take<float>(scratch, matrix);
  for (float** part : {&x.p, &x.ds}) *part = take<float>(scratch, kQueryRows * h.padded_tokens);
  x.queries = take<float>(scratch, kQueryRows * h.padded_depth);
  x.douts = take<float>(scratch, kQueryRows * of_values.padded_depth);
  alignas(64) float sums[kRowEntries * kQueryRows * kMostDepth];
  RowGroup groups[kMostGroups];
  x.groups = groups;
  x.most_groups = groups_of_block(v, tile);
  for (int g = 0; g < x.most_groups; ++g) groups[g].sums = sums + g * kRowEntries * kQueryRows * h.padded_depth;
  x.dkeys = take<float>(scratch, entries * matrix);
  x.dvalues = take<float>(scratch, entries * value_matrix);
  const Leaves leaves(v, v.first_key, v.keys), queries(v, v.first_query, v.queries);
  const auto join = [&](int i) {
    add_to(x.dkeys + i * matrix, x.dkeys + (i + 1) * matrix, matrix);
    add_to(x.dvalues + i * value_matrix, x.dvalues + (i + 1) * value_matrix, value_matrix);
  };
  const auto clear = [&](int i) {
    std::memset(x.dkeys + i * matrix, 0, sizeof(float) * static_cast<size_t>(matrix));
    std::memset(x.dvalues + i * value_matrix, 0, sizeof(float) * static_cast<size_t>(value_matrix));
  };
  const auto put = [&](int64_t b, int64_t column) {
    for (int64_t t = 0; t < v.keys; ++t) {
      float* row = a.dkv + (b * v.keys + t) * a.dkv_stride + column;
      put_row(row, x.dkeys + t * h.padded_depth, v.depth, a.carry_kv);
      put_row(row + v.depth, x.dvalues + t * of_values.padded_depth, v.values, a.carry_kv);
    }
  };
  for (int64_t b = 0; b < v.sequences; ++b)
    for (int group = 0; group < v.kv_heads; ++group) {
      const float* key = a.kv + b * v.keys * v.kv_stride + group * v.kv_group;
      transpose(key, v, v.depth, x.keys_transposed);
      transpose(key + v.depth, v, v.values, x.values_transposed);
      copy_rows(key, v.kv_stride, v.keys, v.depth, x.keys);
      TreeStack tree;
      if (!v.canonical) clear(0);
      for (int head = 0; head < v.per_group(); ++head) {
        const int all = group * v.per_group() + head;
        for (int leaf = 0; leaf < (v.canonical ? queries.count : 1); ++leaf) {
          const int64_t begin = v.canonical ? queries.begin[leaf] : 0, end = v.canonical ? queries.begin[leaf + 1] : v.queries;
          if (begin == end) continue;
          const int at = v.canonical ? tree.push(static_cast<uint32_t>(head * kContractionLeaves + leaf), join) : 0;
          if (v.canonical) clear(at);
          for (int64_t first = begin; first < end;)
            first += backward_rows(v, a, h, of_values, x, leaves, b, all, first, end, x.dkeys + at * matrix,
                                   x.dvalues + at * value_matrix);
          if (v.canonical) add_to(x.dkeys + at * matrix, nullptr, matrix);
          if (v.canonical) add_to(x.dvalues + at * value_matrix, nullptr, value_matrix);
        }
        if (!a.by_head) continue;
        if (!tree.finish(join)) clear(0);
        put(b, all * (v.depth + v.values));
      }
      if (a.by_head) continue;
      if (v.canonical && !tree.finish(join)) clear(0);
      put(b, group * (a.dkv_stride / v.kv_heads));
    }
}

}  // namespace

void attention_forward(const AttentionForward& a) {
  const int64_t queries = int64_t{a.shape.heads / a.shape.kv_heads} * a.shape.head_dim;
  forward(view_of(a.shape), a.qkv, a.qkv + queries, {a.o, a.lse, nullptr, false}, a.scratch);
}

void attention_input(const AttentionInput& a) {
  const int64_t queries = int64_t{a.shape.heads / a.shape.kv_heads} * a.shape.head_dim;
  backward(view_of(a.shape),
           {a.dout, a.o, a.lse, a.qkv, a.qkv + queries, a.dqkv, a.dqkv + queries, false, false, false, a.shape.qkv_width()},
           a.scratch);
}

void attention_block_forward(const AttentionBlockForward& a) {
  expect((a.lse == nullptr) != (a.sums == nullptr), "attention: a block gives lse, or sums", a.sums != nullptr);
  forward(view_of(a.shape), a.q, a.kv, {a.o, a.lse, a.sums, a.carry}, a.scratch);
}

void attention_block_input(const AttentionBlockInput& a) {
  backward(view_of(a.shape),
           {a.dout, a.o, a.lse, a.q, a.kv, a.dq, a.dkv, a.carry, a.carry_kv, a.by_head,
            a.by_head ? a.shape.by_head_width() : a.shape.kv_width()},
           a.scratch);
}

void attention_merge_forward(const AttentionMergeForward& a) {
  expect(a.parts >= 1 && a.parts <= kMostParts, "attention: 1 to 16 parts are merged", a.parts);
  expect(a.value_dim >= 1 && a.value_dim <= kMostDepth, "attention: value_dim is positive and at most 1024", a.value_dim);
  const int64_t depth = a.value_dim, padded = padded_to_lanes(depth);
  alignas(64) float sums[6 * kMostDepth];
  Softmax stack[6];
  for (int i = 0; i < 6; ++i) stack[i].o = sums + i * padded;
  // One row at a time: the other three are empty.
  const auto join = [&](int i) { merge(stack[i], stack[i + 1], padded); };
  for (int64_t b = 0; b < a.sequences; ++b)
    for (int head = 0; head < a.heads; ++head)
      for (int64_t q = 0; q < a.queries; ++q) {
        const int64_t row = (b * a.heads + head) * a.queries + q, out = ((b * a.queries + q) * a.heads + head) * depth;
        TreeStack tree;
        for (int part = 0; part < a.parts; ++part) {
          Softmax& x = stack[tree.push(static_cast<uint32_t>(part), join)];
          for (int r = 0; r < kQueryRows; ++r) x.m[r] = -__builtin_inff(), x.l[r] = 0;
          x.m[0] = a.part_sums[static_cast<size_t>(part)][2 * row];
          x.l[0] = a.part_sums[static_cast<size_t>(part)][2 * row + 1];
          copy_rows(a.part_o[static_cast<size_t>(part)] + out, depth, 1, depth, x.o);
        }
        tree.finish(join);
        write_row({a.o, a.lse, nullptr, false}, stack[0].o, stack[0].m[0], stack[0].l[0], depth, out, row);
      }
}

void attention_merge_input(const AttentionMergeInput& a) {
  expect(a.parts >= 1 && a.parts <= kMostParts, "attention: 1 to 16 parts are merged", a.parts);
  expect(a.kv_heads >= 1 && a.heads % a.kv_heads == 0, "attention: kv_heads divides heads; this is heads", a.heads);
  const int queries = a.heads / a.kv_heads;
  for (int64_t row = 0; row < a.rows; ++row)
    for (int group = 0; group < a.kv_heads; ++group)
      for_vectors(a.width, [&](int64_t i, int n) {
        TreeCounter<Floats, kSequenceLevels> heads;
        for (int head = group * queries; head < (group + 1) * queries; ++head) {
          TreeCounter<Floats, kLeafLevels> parts;
          for (int part = 0; part < a.parts; ++part)
            parts.push(load_some(a.part[static_cast<size_t>(part)] + (row * a.heads + head) * a.width + i, n));
          heads.push(parts.total());
        }
        store_some(a.y + (row * a.kv_heads + group) * a.width + i, heads.total(), n);
      });
}

}  // namespace shardlab::kernels::SHARDLAB_VARIANT
