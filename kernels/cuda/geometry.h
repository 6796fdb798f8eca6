// Launch geometry of every kernel, as functions of extents: plain host code, so that it is tested without a device. The same
// numbers are what the kernels' index arithmetic assumes.
#pragma once

#include <cstdint>

#include "kernels/cuda/kernels.h"

namespace shardlab::gpu {

/// Blocks along three axes, threads a block (a multiple of 32, one axis), bytes of dynamic shared memory a block.
struct Geometry {
  int64_t x = 1, y = 1, z = 1;
  int threads = 32;
  int64_t shared = 0;
  constexpr int64_t blocks() const { return x * y * z; }
};

/// Limits that hold on every device from compute capability 8.0 on.
inline constexpr int64_t kMostBlocksX = (int64_t{1} << 31) - 1, kMostBlocksYZ = 65535;
inline constexpr int kMostThreads = 1024;
inline constexpr int64_t kMostShared = 163 * 1024;

constexpr int64_t divided_up(int64_t n, int64_t by) { return (n + by - 1) / by; }
constexpr int64_t rounded_up(int64_t n, int64_t to) { return divided_up(n, to) * to; }

/// Why no device takes it ("163841 bytes of shared memory"), or empty.
std::string_view refusal(const Geometry& g);

namespace geometry {

/// Elementwise: a thread for each vector of `vector` elements, and one for the rest.
inline constexpr int kElementwiseThreads = 256;
Geometry elementwise(int64_t n, int vector);

/// Rows: a team of threads a row, so wide that a thread holds at most kRowVectors vectors of the row in registers (wider rows are
/// read again). Narrow rows share a block: four teams of one warp.
inline constexpr int kRowVectors = 4;
inline constexpr int kWarpRows = 4;
inline constexpr int kMostRowThreads = 512;  ///< more would leave a thread fewer registers than it needs
struct RowTeam {
  int threads = 32;  ///< of one row
  int rows = 1;      ///< of one block; more than one only where a team is a warp
};
RowTeam row_team(int64_t width, int vector);
Geometry rows(int64_t rows, int64_t width, int vector);

/// Sums over tokens, first launch: a block sums one leaf of one sequence over a strip of columns; its kTokenRows rows of threads
/// take every kTokenRows-th token. `outputs` sums at once. Second launch: the same strips, a row of threads a sequence.
inline constexpr int kTokenRows = 8, kTokenThreads = 256, kTokenColumns = kTokenThreads / kTokenRows;
Geometry token_leaves(int64_t sequences, int leaves, int64_t width, int vector, int outputs);
Geometry token_total(int64_t width);

/// Rows of which each is half a warp's.
inline constexpr int kHalfWarpThreads = 256, kHalfWarpRows = kHalfWarpThreads / 16;
Geometry half_warps(int64_t rows);
/// HeadNorm W: a thread for each normed element of a token and leaf of a sequence; for each element of the two gammas and leaf; for each element,
/// in the `z`-th sequence where sums of sequences stay apart.
inline constexpr int kHeadNormThreads = 128;
Geometry head_norm_leaves(const HeadNormWeight& a, int leaves);
Geometry head_norm_trees(const HeadNormWeight& a, int leaves);
Geometry head_norm_totals(const HeadNormWeight& a);

/// Mixtures of experts. Counts of choices: a lane for each of 32 experts, warps that share the tokens of a segment. Rows are counted in spans of
/// tokens, whose sums one block makes.
inline constexpr int64_t kMostExperts = 1024, kSpanTokens = 32;
inline constexpr int kCountWarps = 8;
Geometry expert_counts(int64_t experts, int64_t segments);
Geometry expert_sums(int64_t experts);
/// Counts that are cut off: one block.
inline constexpr int kFitThreads = 256;
Geometry fit_rows();
/// Routers: half a warp a token, with four numbers an expert in shared memory.
inline constexpr int kRouteThreads = 128, kRouteRows = kRouteThreads / 16;
Geometry route(int64_t rows, int64_t experts);
/// Grouped products: tiles of as many rows as there is room for, and one more for each source and expert, whose last tile may be in part
/// empty; a tile of each expert's gradient. Before either, one block says where rows begin.
Geometry group_rows();
Geometry grouped_product(const RowCounts& rows, int64_t columns);
Geometry grouped_weight(int64_t experts, int64_t rows, int64_t columns);
int64_t group_table_bytes(const RowCounts& rows);

/// Cross-entropy: a warp for each leaf of the vocabulary held; the row is kept in shared memory where it fits.
struct VocabularyRow {
  Geometry geometry;
  bool cached = false;
};
VocabularyRow cross_entropy(int64_t rows, int64_t vocab, int leaves, int element_bytes);
/// Sum of a row's losses over each sequence: a warp for each leaf of its tokens.
Geometry sequence_losses(int64_t sequences, int leaves);

/// The fixed-order product: tiles of C, kTile x kTile.
inline constexpr int kTile = 64, kTileDepth = 16, kTileThreads = 256;
Geometry fixed_product(int64_t rows, int64_t columns);

/// Embedding W: a block for each token and strip of columns.
inline constexpr int kEmbedThreads = 128;
Geometry embed_weight(int64_t tokens, int64_t width, int vector);

/// Squared norm: blocks of one part; each leaves one number.
inline constexpr int kNormThreads = 256;
inline constexpr int64_t kNormSpan = 32 * kNormThreads;  ///< elements a block
Geometry squared_norm(int64_t n);

/// Attention. Tiles of queries and keys by head_dim padded to 64, 128 or 256; tensor-core kernels (2-byte elements)
/// and fp32 kernels.
struct AttentionTiles {
  int depth = 64;         ///< head_dim padded
  int queries = 64;       ///< forward and dq: rows of a block
  int keys = 64;          ///< forward and dq: keys a step
  int held_keys = 64;     ///< dk, dv: rows of a block
  int step_queries = 32;  ///< dk, dv: queries a step
  int halves = 1;         ///< dk, dv: strips of depth, a block each
};
AttentionTiles attention_tiles(int head_dim, bool tensor_cores);
Geometry attention_forward(const AttentionShape& s, bool tensor_cores);
Geometry attention_query_gradient(const AttentionShape& s, bool tensor_cores);
Geometry attention_key_gradient(const AttentionShape& s, bool tensor_cores);
/// D_i = do_i . o_i: a warp a row.
Geometry attention_dots(const AttentionShape& s);
/// Blocks of a sequence, fp32: a block of threads for a tile of queries and a head; of keys and a kv head, or `by_head` a head.
Geometry attention_block_forward(const AttentionBlockShape& s);
Geometry attention_block_query_gradient(const AttentionBlockShape& s);
Geometry attention_block_key_gradient(const AttentionBlockShape& s, bool by_head);
Geometry attention_block_dots(const AttentionBlockShape& s);

}  // namespace geometry

}  // namespace shardlab::gpu
