// Scratch bytes of each kernel: the sum of its pieces, each rounded up to 64 bytes.
#include "kernels/attention.h"
#include "kernels/cpu/panels.h"
#include "kernels/embedding.h"
#include "kernels/linear.h"

namespace shardlab::kernels {
namespace {

int64_t floats_of_bytes(int64_t n) { return (n * static_cast<int64_t>(sizeof(float)) + 63) / 64 * 64; }

int64_t canonical_product_bytes(int64_t extent) {
  return floats_of_bytes(extent * kMostTileRows) + floats_of_bytes(extent * block_columns(extent));
}

}  // namespace

int64_t linear_scratch_bytes(const LinearForward& a) { return a.canonical ? canonical_product_bytes(a.in) : 0; }
int64_t linear_scratch_bytes(const LinearInput& a) { return a.canonical ? canonical_product_bytes(a.out) : 0; }
int64_t linear_scratch_bytes(const LinearWeight& a) { return a.canonical ? canonical_product_bytes(a.tokens.rows()) : 0; }

int64_t attention_scratch_bytes(const AttentionForward& a) {
  const int64_t tokens = padded_to_lanes(a.shape.tokens), depth = padded_to_lanes(a.shape.head_dim);
  // Keys transposed, values, four rows of scores.
  return floats_of_bytes(a.shape.head_dim * tokens) + floats_of_bytes(a.shape.tokens * depth) +
         floats_of_bytes(kQueryRows * tokens);
}

int64_t attention_scratch_bytes(const AttentionInput& a) {
  const int64_t tokens = padded_to_lanes(a.shape.tokens), depth = padded_to_lanes(a.shape.head_dim);
  // Keys and values transposed; keys, and the gradients of keys and values; four rows each of p and ds, of q and do.
  return 2 * floats_of_bytes(a.shape.head_dim * tokens) + 3 * floats_of_bytes(a.shape.tokens * depth) +
         2 * floats_of_bytes(kQueryRows * tokens) + 2 * floats_of_bytes(kQueryRows * depth);
}

int64_t embed_scratch_bytes(const EmbedWeight& a) { return 2 * ((a.sequences * a.tokens * 8 + 63) / 64 * 64); }

}  // namespace shardlab::kernels
