#include "kernels/cuda/geometry.h"

#include <algorithm>

#include "kernels/checks.h"

namespace shardlab::gpu {

std::string_view refusal(const Geometry& g) {
  if (g.threads < 32 || g.threads % 32 != 0) return "threads of a block are a multiple of 32";
  if (g.threads > kMostThreads) return "over 1024 threads a block";
  if (g.x > kMostBlocksX) return "over 2^31 - 1 blocks along x";
  if (g.y > kMostBlocksYZ || g.z > kMostBlocksYZ) return "over 65535 blocks along y or z";
  if (g.shared > kMostShared) return "over 163 KiB of shared memory a block";
  return {};
}

namespace geometry {

Geometry elementwise(int64_t n, int vector) {
  return {.x = divided_up(divided_up(n, vector), kElementwiseThreads), .threads = kElementwiseThreads};
}

RowTeam row_team(int64_t width, int vector) {
  const int64_t vectors = divided_up(width, vector);
  if (vectors <= 32 * kRowVectors) return {32, kWarpRows};
  return {static_cast<int>(std::min<int64_t>(kMostRowThreads, rounded_up(divided_up(vectors, kRowVectors), 32))), 1};
}

Geometry rows(int64_t rows, int64_t width, int vector) {
  const RowTeam team = row_team(width, vector);
  // Two rounds of sums, of at most two floats a warp each.
  return {.x = divided_up(rows, team.rows), .threads = team.threads * team.rows, .shared = 2 * 32 * 4};
}

Geometry token_leaves(int64_t sequences, int leaves, int64_t width, int vector, int outputs) {
  return {.x = divided_up(width, int64_t{kTokenColumns} * vector),
          .y = leaves,
          .z = sequences,
          .threads = kTokenThreads,
          .shared = int64_t{kTokenThreads} * vector * outputs * 4};
}

Geometry token_total(int64_t width) {
  return {.x = divided_up(width, kTokenColumns), .threads = kTokenThreads, .shared = int64_t{kTokenThreads} * 4};
}

Geometry half_warps(int64_t rows) { return {.x = divided_up(rows, kHalfWarpRows), .threads = kHalfWarpThreads}; }

Geometry head_norm_leaves(const HeadNormWeight& a, int leaves) {
  return {.x = divided_up(a.shape.stats_width() * a.shape.head_dim, kHeadNormThreads),
          .y = leaves,
          .z = a.shape.tokens.sequences,
          .threads = kHeadNormThreads};
}
Geometry head_norm_trees(const HeadNormWeight& a, int leaves) {
  return {.x = divided_up(2 * int64_t{a.shape.head_dim}, kHeadNormThreads),
          .y = leaves,
          .z = a.shape.tokens.sequences,
          .threads = kHeadNormThreads};
}
Geometry head_norm_totals(const HeadNormWeight& a) {
  return {.x = divided_up(2 * int64_t{a.shape.head_dim}, kHeadNormThreads),
          .z = a.apart > 0 ? a.shape.tokens.sequences : 1,
          .threads = kHeadNormThreads};
}

Geometry expert_counts(int64_t experts, int64_t segments) {
  return {.x = divided_up(experts, 32), .y = segments, .threads = 32 * kCountWarps, .shared = int64_t{32} * kCountWarps * 4};
}
Geometry expert_sums(int64_t experts) { return {.threads = 32 * kCountWarps, .shared = experts * 4}; }

Geometry fit_rows() { return {.threads = kFitThreads, .shared = kFitThreads * 8}; }

Geometry route(int64_t rows, int64_t experts) {
  return {.x = divided_up(rows, kRouteRows), .threads = kRouteThreads, .shared = kRouteRows * experts * 4 * 4};
}

Geometry group_rows() { return {.threads = kTileThreads}; }
Geometry grouped_product(const RowCounts& rows, int64_t columns) {
  Geometry g = fixed_product(rows.capacity, columns);
  g.y += rows.sources * rows.experts;
  return g;
}
Geometry grouped_weight(int64_t experts, int64_t rows, int64_t columns) {
  Geometry g = fixed_product(rows, columns);
  g.z = experts;
  return g;
}
int64_t group_table_bytes(const RowCounts& rows) { return 2 * 8 * (rows.sources * rows.experts + 1); }

VocabularyRow cross_entropy(int64_t rows, int64_t vocab, int leaves, int element_bytes) {
  constexpr int64_t kRounds = 2 * 32 * 4;
  const int64_t row_bytes = rounded_up(vocab * element_bytes, 16);
  const bool cached = kRounds + row_bytes <= kMostShared;
  return {{.x = rows, .threads = 32 * leaves, .shared = kRounds + (cached ? row_bytes : 0)}, cached};
}

Geometry sequence_losses(int64_t sequences, int leaves) { return {.x = sequences, .threads = 32 * leaves, .shared = 32 * 4}; }

Geometry fixed_product(int64_t rows, int64_t columns) {
  return {.x = divided_up(columns, kTile),
          .y = divided_up(rows, kTile),
          .threads = kTileThreads,
          .shared = 2 * kTileDepth * (kTile + 1) * 4};
}

Geometry embed_weight(int64_t tokens, int64_t width, int vector) {
  return {.x = tokens, .y = divided_up(width, int64_t{kEmbedThreads} * vector), .threads = kEmbedThreads};
}

Geometry squared_norm(int64_t n) {
  return {.x = divided_up(n, kNormSpan), .threads = kNormThreads, .shared = kNormThreads / 32 * 8};
}

AttentionTiles attention_tiles(int head_dim, bool tensor_cores) {
  AttentionTiles t;
  t.depth = head_dim <= 64 ? 64 : head_dim <= 128 ? 128 : 256;
  if (tensor_cores) {
    if (t.depth == 256) {
      t.keys = 32;
      t.halves = 2;
    }
    return t;
  }
  // fp32: all operands of a step are in shared memory at once.
  const int tile = t.depth == 64 ? 64 : t.depth == 128 ? 32 : 16;
  t.queries = t.keys = t.held_keys = t.step_queries = tile;
  return t;
}

namespace {

/// Bytes of a tile of fp32 rows of `depth` and one float more, and of tensor-core rows of `depth` 2-byte elements and
/// 16 bytes more.
int64_t fp32_tile(int64_t rows, int64_t depth) { return 4 * rows * (depth + 1); }
int64_t tensor_tile(int64_t rows, int64_t depth) { return 2 * rows * (depth + 8); }
constexpr int kTensorThreads = 128, kFp32Threads = 256;

}  // namespace

// Shared memory: the block's own tiles, and two steps' of the others where they are fetched ahead.

Geometry attention_forward(const AttentionShape& s, bool tensor_cores) {
  const AttentionTiles t = attention_tiles(s.head_dim, tensor_cores);
  return {.x = divided_up(s.tokens, t.queries),
          .y = s.heads,
          .z = s.sequences,
          .threads = tensor_cores ? kTensorThreads : kFp32Threads,
          .shared = tensor_cores ? tensor_tile(t.queries, t.depth) + 4 * tensor_tile(t.keys, t.depth)
                                 : 3 * fp32_tile(t.queries, t.depth) + fp32_tile(t.queries, t.keys)};
}

Geometry attention_query_gradient(const AttentionShape& s, bool tensor_cores) {
  const AttentionTiles t = attention_tiles(s.head_dim, tensor_cores);
  Geometry g = attention_forward(s, tensor_cores);
  g.shared += tensor_cores ? tensor_tile(t.queries, t.depth) : fp32_tile(t.queries, t.depth);
  return g;
}

Geometry attention_key_gradient(const AttentionShape& s, bool tensor_cores) {
  const AttentionTiles t = attention_tiles(s.head_dim, tensor_cores);
  return {.x = divided_up(s.tokens, t.held_keys),
          .y = int64_t{s.kv_heads} * t.halves,
          .z = s.sequences,
          .threads = tensor_cores ? kTensorThreads : kFp32Threads,
          .shared = tensor_cores ? 2 * tensor_tile(t.held_keys, t.depth) + 4 * tensor_tile(t.step_queries, t.depth)
                                 : 4 * fp32_tile(t.held_keys, t.depth) + 2 * fp32_tile(t.held_keys, t.step_queries)};
}

Geometry attention_dots(const AttentionShape& s) {
  constexpr int kRows = 4;
  return {.x = divided_up(s.tokens, kRows), .y = s.heads, .z = s.sequences, .threads = 32 * kRows};
}

namespace {

/// As many queries, keys and heads as the block has, of which only the tiles are asked: they hold keys and values.
AttentionShape as_whole(const AttentionBlockShape& s, int64_t tokens) {
  return {s.sequences, tokens, s.heads, s.kv_heads, s.widest()};
}

}  // namespace

Geometry attention_block_forward(const AttentionBlockShape& s) { return attention_forward(as_whole(s, s.queries), false); }
Geometry attention_block_query_gradient(const AttentionBlockShape& s) {
  return attention_query_gradient(as_whole(s, s.queries), false);
}
Geometry attention_block_key_gradient(const AttentionBlockShape& s, bool by_head) {
  Geometry g = attention_key_gradient(as_whole(s, s.keys), false);
  if (by_head) g.y = s.heads;
  return g;
}
Geometry attention_block_dots(const AttentionBlockShape& s) { return attention_dots(as_whole(s, s.queries)); }

}  // namespace geometry

namespace {

int64_t leaves_of(const Tokens& t) { return kernels::PartLeaves(t.part, t.tokens).count(); }
int64_t in_lines(int64_t bytes) { return rounded_up(bytes, 256); }

}  // namespace

int64_t scratch_bytes(const NormWeight& a) {
  return in_lines(a.tokens.sequences * leaves_of(a.tokens) * (a.rms ? 1 : 2) * a.width * 4);
}
/// A row of each normed head and leaf; and, where leaves do not stay apart, of each gamma and leaf.
int64_t scratch_bytes(const HeadNormWeight& a) {
  const HeadNormShape& s = a.shape;
  return in_lines(s.tokens.sequences * leaves_of(s.tokens) * (s.stats_width() + 2) * s.head_dim * 4);
}
namespace {

/// Places of rows, where experts' rows begin, and counts by span of tokens.
int64_t places_bytes(int64_t tokens, int64_t top_k, int64_t experts) {
  return in_lines(4 * (tokens * top_k + experts + divided_up(tokens, geometry::kSpanTokens) * experts));
}

}  // namespace

int64_t scratch_bytes(const RouteInput& a) {
  return a.shape.balance != 0 && a.load == nullptr ? in_lines(a.shape.sequences * a.shape.experts * 4) : 0;
}
int64_t scratch_bytes(const Dispatch& a) { return places_bytes(a.tokens, a.top_k, a.experts); }
int64_t scratch_bytes(const CombineForward& a) { return places_bytes(a.tokens, a.top_k, a.experts); }
int64_t scratch_bytes(const CombineInput& a) { return places_bytes(a.tokens, a.top_k, a.experts); }
int64_t scratch_bytes(const GroupedLinear& a) { return in_lines(geometry::group_table_bytes(a.rows)); }
int64_t scratch_bytes(const GroupedLinearWeight& a) { return in_lines(geometry::group_table_bytes(a.rows)); }
int64_t scratch_bytes(const GroupedActivation& a) { return in_lines(geometry::group_table_bytes(a.rows)); }

int64_t scratch_bytes(const BiasWeight& a) { return in_lines(a.tokens.sequences * leaves_of(a.tokens) * a.width * 4); }
int64_t scratch_bytes(const AttentionInput& a) { return in_lines(a.shape.sequences * a.shape.tokens * a.shape.heads * 4); }
int64_t scratch_bytes(const AttentionBlockInput& a) { return in_lines(a.shape.sequences * a.shape.queries * a.shape.heads * 4); }
int64_t scratch_bytes(const CrossEntropy& a) { return in_lines(a.tokens.rows() * 4); }
int64_t scratch_bytes(const SumScalars& a) {
  int64_t n = 0;
  for (int p = 0; p < a.parts.count; ++p) n += a.parts.sizes[p];
  return in_lines(n * 4);
}
int64_t scratch_bytes(const SquaredNorm& a) {
  int64_t blocks = 0;
  for (int p = 0; p < a.parts.count; ++p) blocks += geometry::squared_norm(a.parts.sizes[p]).x;
  return in_lines(blocks * 8);
}

int64_t scratch_bytes(const Amax& a) {
  int64_t blocks = 0;
  for (int p = 0; p < a.count; ++p) blocks += geometry::squared_norm(a.sizes[p]).x;
  return in_lines((2 + blocks) * 4);
}
int64_t scratch_bytes(const Select& a) { return 256 + in_lines(divided_up(a.n, geometry::kNormSpan) * 16 * 4); }
int64_t scratch_bytes(const Orthogonalise& a) { return in_lines(a.rows * a.columns * 8); }

std::string_view attention_refusal(const AttentionShape& s) {
  if (s.kv_heads < 1 || s.heads < 1 || s.heads % s.kv_heads != 0) return "attention on a GPU: kv_heads divides heads";
  if (s.head_dim < 2 || s.head_dim % 2 != 0) return "attention on a GPU: head_dim is even";
  if (s.head_dim > 256) return "attention on a GPU: head_dim is at most 256";
  if (s.values() > 256) return "attention on a GPU: a value has at most 256 elements";
  if (s.sequences > kMostBlocksYZ || s.heads > kMostBlocksYZ) return "attention on a GPU: at most 65535 sequences and heads";
  return {};
}

std::string_view attention_refusal(const AttentionBlockShape& s) {
  return attention_refusal(AttentionShape{
      .sequences = s.sequences, .heads = s.heads, .kv_heads = s.kv_heads, .head_dim = s.head_dim, .value_dim = s.value_dim});
}

}  // namespace shardlab::gpu
