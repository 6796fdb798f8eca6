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

namespace {

int64_t forward_bytes(int64_t keys, int64_t depth, int64_t values) {
  // Keys transposed, values, four rows of scores.
  return floats_of_bytes(depth * padded_to_lanes(keys)) + floats_of_bytes(keys * padded_to_lanes(values)) +
         floats_of_bytes(kQueryRows * padded_to_lanes(keys));
}

int64_t backward_bytes(int64_t keys, int64_t depth, int64_t values, bool canonical, int heads_of_group) {
  const int64_t row = padded_to_lanes(keys), padded = padded_to_lanes(depth), padded_values = padded_to_lanes(values);
  const int64_t entries = key_gradient_entries(canonical, heads_of_group);
  // Keys and values transposed; keys; p and ds of a block, as large as four whole rows; four rows of q and do; sums of dk and dv.
  return floats_of_bytes(depth * row) + floats_of_bytes(values * row) + floats_of_bytes(keys * padded) +
         2 * floats_of_bytes(kQueryRows * row) + floats_of_bytes(kQueryRows * padded) +
         floats_of_bytes(kQueryRows * padded_values) + floats_of_bytes(entries * keys * padded) +
         floats_of_bytes(entries * keys * padded_values);
}

}  // namespace

int64_t attention_scratch_bytes(const AttentionForward& a) {
  return forward_bytes(a.shape.tokens, a.shape.head_dim, a.shape.values());
}
int64_t attention_scratch_bytes(const AttentionInput& a) {
  return backward_bytes(a.shape.tokens, a.shape.head_dim, a.shape.values(), a.shape.canonical, a.shape.heads / a.shape.kv_heads);
}
int64_t attention_scratch_bytes(const AttentionBlockForward& a) {
  return forward_bytes(a.shape.keys, a.shape.head_dim, a.shape.values());
}
int64_t attention_scratch_bytes(const AttentionBlockInput& a) {
  return backward_bytes(a.shape.keys, a.shape.head_dim, a.shape.values(), a.shape.canonical, a.shape.heads / a.shape.kv_heads);
}

int64_t embed_scratch_bytes(const EmbedWeight& a) { return 2 * ((a.sequences * a.tokens * 8 + 63) / 64 * 64); }

}  // namespace shardlab::kernels
