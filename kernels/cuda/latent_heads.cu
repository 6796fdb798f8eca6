// Rows of q, k and v of latent attention, put together and taken apart: in fp32 the CPU's bits. A thread an element of what is written.
#include "kernels/cuda/elementwise.h"
#include "kernels/cuda/launches.h"
#include "kernels/cuda/sums.h"

namespace shardlab::gpu::SHARDLAB_GPU_VARIANT {
namespace {

/// Cosines and sines of a row: [rope/2, 2]. A position outside of the table takes the nearest.
SHARDLAB_DEVICE const float* angles(const LatentHeads& a, int64_t row) {
  int64_t at = row % a.tokens;
  if (a.positions != nullptr) at = a.positions[row / a.tokens * a.positions_stride + at];
  at = at < 0 ? 0 : at >= a.table_rows ? a.table_rows - 1 : at;
  return a.table + at * a.rope;
}

/// Element r of `x`, [rope], turned by the row's angles: forward by +1, backward by -1.
template <class T>
SHARDLAB_DEVICE float turned(const T* x, const float* angle, int64_t r, int64_t rope, float way) {
  const int64_t pairs = rope / 2, i = r % pairs;
  const float c = angle[2 * i], s = way * angle[2 * i + 1], first = value_of(x[i]), second = value_of(x[pairs + i]);
  return r < pairs ? first * c - second * s : second * c + first * s;
}

template <class T>
struct LatentForward {
  LatentHeads a;
  template <int N>
  SHARDLAB_DEVICE void at(int64_t n) const {
    static_assert(N == 1);
    const int64_t depth = a.depth(), group = 2 * depth + a.value_dim, of_kv = int64_t{a.nope} + a.value_dim;
    const int64_t row = n / a.qkv_width(), head = n % a.qkv_width() / group, e = n % group;
    const T* query = static_cast<const T*>(a.q.data) + row * a.q_width() + head * depth;
    const T* pair = static_cast<const T*>(a.kv.data) + row * a.kv_width() + head * of_kv;
    T& to = static_cast<T*>(a.qkv.data)[n];
    if (e < a.nope)
      to = query[e];
    else if (e < depth)
      to = rounded<T>(turned(query + a.nope, angles(a, row), e - a.nope, a.rope, 1.0f));
    else if (e < depth + a.nope)
      to = pair[e - depth];
    else if (e < 2 * depth)
      to =
          rounded<T>(turned(static_cast<const T*>(a.k_rope.data) + row * a.rope, angles(a, row), e - depth - a.nope, a.rope, 1.0f));
    else
      to = pair[a.nope + e - 2 * depth];
  }
};

template <class T>
struct LatentBackward {
  LatentHeads a;
  template <int N>
  SHARDLAB_DEVICE void at(int64_t n) const {
    static_assert(N == 1);
    const int64_t depth = a.depth(), group = 2 * depth + a.value_dim, of_kv = int64_t{a.nope} + a.value_dim;
    const int64_t width = a.q_width() + a.kv_width() + a.rope, row = n / width;
    int64_t e = n % width;
    const T* from = static_cast<const T*>(a.qkv.data) + row * a.qkv_width();
    if (e < a.q_width()) {
      const T* query = from + e / depth * group;
      T& to = static_cast<T*>(a.q.data)[row * a.q_width() + e];
      e = e % depth;
      to = e < a.nope ? query[e] : rounded<T>(turned(query + a.nope, angles(a, row), e - a.nope, a.rope, -1.0f));
      return;
    }
    e -= a.q_width();
    if (e < a.kv_width()) {
      const T* key = from + e / of_kv * group + depth;
      T& to = static_cast<T*>(a.kv.data)[row * a.kv_width() + e];
      e = e % of_kv;
      to = e < a.nope ? key[e] : key[a.rope + e];  // behind the key's rotated elements
      return;
    }
    e -= a.kv_width();
    TreeCounter<float, kSequenceLevels> tree;
    for (int64_t head = 0; head < a.heads; ++head)
      tree.push(turned(from + head * group + depth + a.nope, angles(a, row), e, a.rope, -1.0f));
    static_cast<T*>(a.k_rope.data)[row * a.rope + e] = rounded<T>(tree.total(0.0f));
  }
};

}  // namespace

void latent_heads(const LatentHeads& a, Stream s) {
  expect(a.heads >= 1 && a.nope >= 1 && a.value_dim >= 1, "latent heads: heads and their widths are positive; heads", a.heads);
  expect(a.rope >= 2 && a.rope % 2 == 0, "latent heads: rotation takes pairs; rope", a.rope);
  expect_present(a.table, "latent heads: there is a table of angles");
  for (const Output& part : {a.q, a.kv, a.k_rope})
    expect_type(part.dtype, a.qkv.dtype, false, "latent heads: all arrays are of one type");
  const int64_t rows = a.sequences * a.tokens;
  with_type(a.qkv.dtype, "latent heads: qkv is f32, bf16 or f16", [&]<class T>(Named<T>) {
    if (a.back)
      elementwise<1>("latent_heads_input", LatentBackward<T>{a}, rows * (a.q_width() + a.kv_width() + a.rope), false, s);
    else
      elementwise<1>("latent_heads", LatentForward<T>{a}, rows * a.qkv_width(), false, s);
  });
}

}  // namespace shardlab::gpu::SHARDLAB_GPU_VARIANT
