#include "kernels/latent_heads.h"

#include <algorithm>
#include <functional>

#include "kernels/checks.h"
#include "kernels/window.h"
#include "plan/base/tree.h"

namespace shardlab::kernels {
namespace {

void check(const LatentHeads& a) {
  expect(a.heads >= 1 && a.nope >= 1 && a.values >= 1, "latent_heads: heads and their widths are positive; heads", a.heads);
  expect(a.rope >= 2 && a.rope % 2 == 0, "latent_heads: rotation takes pairs; rope", a.rope);
  expect(a.table != nullptr, "latent_heads: there is a table of angles; rows", a.rows);
}

/// Cosines and sines of a row: [rope/2, 2].
const float* angles(const LatentHeads& a, int64_t row) {
  return a.table + (a.positions == nullptr ? row : a.positions[row]) * a.rope;
}

/// The pair (i, i + rope/2) turned by an angle: forward by +1, backward by -1.
struct Pair {
  float first, second;
};
Pair turned(const float* x, const float* angle, int i, int pairs, float way) {
  const float c = angle[2 * i], s = way * angle[2 * i + 1], first = x[i], second = x[pairs + i];
  return {first * c - second * s, second * c + first * s};
}
void rotate(const LatentHeads& a, const float* from, const float* angle, float way, float* to) {
  const int pairs = a.rope / 2;
  for (int i = 0; i < pairs; ++i) {
    const Pair y = turned(from, angle, i, pairs, way);
    to[i] = y.first;
    to[pairs + i] = y.second;
  }
}

}  // namespace

void latent_heads_forward(const LatentHeads& a, const float* q, const float* kv, const float* k_rope, float* qkv) {
  check(a);
  const int64_t depth = a.depth(), of_kv = int64_t{a.nope} + a.values, group = 2 * depth + a.values;
  for (int64_t row = 0; row < a.rows; ++row) {
    const float* angle = angles(a, row);
    float* const first = qkv + row * a.qkv_width();
    rotate(a, k_rope + row * a.rope, angle, 1, first + depth + a.nope);  // the key of the first head; the others get copies
    for (int64_t head = 0; head < a.heads; ++head) {
      const float *query = q + row * a.q_width() + head * depth, *key = kv + row * a.kv_width() + head * of_kv;
      float* to = first + head * group;
      std::copy_n(query, a.nope, to);
      rotate(a, query + a.nope, angle, 1, to + a.nope);
      std::copy_n(key, a.nope, to + depth);
      if (head > 0) std::copy_n(first + depth + a.nope, a.rope, to + depth + a.nope);
      std::copy_n(key + a.nope, a.values, to + 2 * depth);
    }
  }
}

void latent_heads_input(const LatentHeads& a, const float* dqkv, float* dq, float* dkv, float* dk_rope) {
  check(a);
  const int64_t depth = a.depth(), of_kv = int64_t{a.nope} + a.values, group = 2 * depth + a.values;
  const int pairs = a.rope / 2;
  for (int64_t row = 0; row < a.rows; ++row) {
    const float *angle = angles(a, row), *const first = dqkv + row * a.qkv_width();
    for (int64_t head = 0; head < a.heads; ++head) {
      const float* from = first + head * group;
      float *query = dq + row * a.q_width() + head * depth, *key = dkv + row * a.kv_width() + head * of_kv;
      std::copy_n(from, a.nope, query);
      rotate(a, from + a.nope, angle, -1, query + a.nope);
      std::copy_n(from + depth, a.nope, key);
      std::copy_n(from + 2 * depth, a.values, key + a.nope);
    }
    for (int i = 0; i < pairs; ++i) {
      TreeSum<float, std::plus<>> low, high;
      for (int64_t head = 0; head < a.heads; ++head) {
        const Pair y = turned(first + head * group + depth + a.nope, angle, i, pairs, -1);
        low.push(y.first);
        high.push(y.second);
      }
      dk_rope[row * a.rope + i] = low.total(0.0f);
      dk_rope[row * a.rope + pairs + i] = high.total(0.0f);
    }
  }
}

void MixedKernels::latent_heads(const MixedLatentHeads& a, Scratch& scratch) const {
  LatentHeads one = a.heads;
  const int64_t block = rows_per_block(one.qkv_width());
  Window q(s_, a.q, block * one.q_width(), scratch), kv(s_, a.kv, block * one.kv_width(), scratch),
      k_rope(s_, a.k_rope, block * one.rope, scratch), qkv(s_, a.qkv, block * one.qkv_width(), scratch);
  if (scratch.counting()) return;
  const auto run = [&](int64_t at, int64_t rows) {
    one.rows = rows;
    const auto read = [&](Window& w, int64_t width) { return w.read(at * width, rows * width); };
    const auto place = [&](Window& w, int64_t width) { return w.place(at * width, rows * width); };
    if (!a.back) {
      latent_heads_forward(one, read(q, one.q_width()), read(kv, one.kv_width()), read(k_rope, one.rope),
                           place(qkv, one.qkv_width()));
      qkv.write();
      return;
    }
    latent_heads_input(one, read(qkv, one.qkv_width()), place(q, one.q_width()), place(kv, one.kv_width()),
                       place(k_rope, one.rope));
    for (Window* w : {&q, &kv, &k_rope}) w->write();
  };
  for (int64_t b = 0; b < a.sequences; ++b)
    for_blocks(a.heads.rows, block, [&](int64_t first, int64_t rows) {
      if (a.heads.positions == nullptr)
        one.table = a.heads.table + first * one.rope;
      else
        one.positions = a.heads.positions + b * a.positions_stride + first;
      run(b * a.heads.rows + first, rows);
    });
}

}  // namespace shardlab::kernels
