// Rotary positions.
#include "kernels/cpu/sums.h"
#include "kernels/cpu/variant.h"

namespace shardlab::kernels::SHARDLAB_VARIANT {
namespace {

inline constexpr int kMaxPairs = 512;

/// Rotates one head's row by the angles of its position.
SHARDLAB_INLINE void rotate(float* row, int pairs, const float* cosine, const float* sine) {
  for_vectors(pairs, [=](int64_t i, int n) {
    const Floats a = load_some(row + i, n), b = load_some(row + pairs + i, n);
    const Floats c = load_some(cosine + i, n), s = load_some(sine + i, n);
    store_some(row + i, a * c - b * s, n);
    store_some(row + pairs + i, b * c + a * s, n);
  });
}

}  // namespace

void rope(const Rope& a) {
  expect(a.head_dim > 0 && a.head_dim % 2 == 0 && a.head_dim <= 2 * kMaxPairs, "rope: head_dim is even and at most 1024",
         a.head_dim);
  expect(a.kv_heads > 0 && a.heads % a.kv_heads == 0, "rope: kv_heads divides heads", a.heads);
  const int pairs = a.head_dim / 2;
  const int rotated = a.heads / a.kv_heads + 1;  // of each kv head's rows: its queries and the key
  const int64_t width = int64_t{a.heads + 2 * a.kv_heads} * a.head_dim;
  float own[2 * kMaxPairs], cosine[kMaxPairs], sine[kMaxPairs];
  for (int64_t t = 0; t < a.tokens; ++t)
    for (int64_t b = 0; b < a.sequences; ++b) {
      const bool packed = a.positions != nullptr;
      if (packed || b == 0) {  // else all sequences have one position here
        const int64_t at = packed ? a.positions[b * a.positions_stride + t] : t;
        const float* table = a.table == nullptr ? own : a.table + at * a.head_dim;
        if (a.table == nullptr) rope_table(packed ? at : a.position_begin + t, 1, a.head_dim, a.theta, own);
        for (int i = 0; i < pairs; ++i) {
          cosine[i] = table[2 * i];
          sine[i] = a.backward ? -table[2 * i + 1] : table[2 * i + 1];
        }
      }
      for (int group = 0; group < a.kv_heads; ++group)
        for (int head = 0; head < rotated; ++head)
          rotate(a.qkv + (b * a.tokens + t) * width + (int64_t{group} * (rotated + 1) + head) * a.head_dim, pairs, cosine, sine);
    }
}

}  // namespace shardlab::kernels::SHARDLAB_VARIANT
