// How a GPU's attention library is called for one attention op, and the memory that it gets. The plan counts these bytes, the
// kernels use them.
#pragma once

#include <cstdint>

namespace shardlab {

/// Workspace bytes of the matrix library on every stream that multiplies, and of cuDNN beyond what `AttentionCalls` counts. Source:
/// the default of cuBLAS on compute capability 9.0 (its documentation, cublasSetWorkspace).
inline constexpr int64_t kLibraryWorkspace = int64_t{32} << 20;

/// How cuDNN is asked for one attention op. Heads of a row lie in groups: the query heads that share a key head, the key, the
/// value. A tensor of (batch, heads, tokens, head_dim) has one stride for its heads, so with several groups of several query heads
/// each call takes one sequence, whose groups are its batch.
struct AttentionCalls {
  int64_t calls = 1;
  int64_t batch = 0, heads = 0, kv_heads = 0;  ///< of each call
  int64_t tokens = 0, head_dim = 0;

  constexpr AttentionCalls(int64_t sequences, int64_t tokens, int64_t heads, int64_t kv_heads, int64_t head_dim)
      : batch(sequences), heads(heads), kv_heads(kv_heads), tokens(tokens), head_dim(head_dim) {
    if (kv_heads == 1 || kv_heads == heads) return;
    calls = sequences;
    batch = kv_heads;
    this->heads = heads / kv_heads;
    this->kv_heads = 1;
  }

  /// Bytes that backward keeps between its parts: dq[batch,heads,tokens,head_dim] in fp32, to which blocks add, and one sum a row.
  constexpr int64_t dq_bytes() const { return 4 * batch * heads * tokens * head_dim; }
  constexpr int64_t row_sum_bytes() const { return 4 * batch * heads * tokens; }
  /// Bytes that the library may use for itself: `kLibraryWorkspace`. In backward, where query heads share a key, also the gradients
  /// of keys and values of each query head (2-byte elements).
  constexpr int64_t library_bytes(bool backward) const {
    return kLibraryWorkspace + (backward && heads > kv_heads ? 2 * 2 * batch * heads * tokens * head_dim : 0);
  }
};

}  // namespace shardlab
