#include "tests/numerics/reference/latent.h"

#include <cmath>

#include "tests/numerics/reference/functions.h"
#include "tests/numerics/reference/order.h"

namespace shardlab::reference {
namespace {

/// Element `i` of a row of `rope` elements, turned by the angles of a position, whose base is theta; `sign` -1 turns back.
template <class T, class Row>
T turned(const Row& row, int64_t i, const Model& m, float theta, int64_t position, int sign) {
  const int64_t half = m.latent.rope / 2, pair = i % half;
  const double angle =
      static_cast<double>(position) * std::pow(double{theta}, -2.0 * static_cast<double>(pair) / static_cast<double>(2 * half));
  const T c = static_cast<T>(std::cos(angle)), sine = static_cast<T>(std::sin(angle)) * T(sign);
  const T a = row(pair), b = row(pair + half);
  return i < half ? a * c - b * sine : b * c + a * sine;
}

}  // namespace

template <class T>
Tensor<T> latent_heads(const Latents<T>& x, const Model& m, float theta, int64_t s, const Text& text) {
  const LatentAttention& l = m.latent;
  const auto at = [](const Tensor<T>& from, int64_t i) { return from[static_cast<size_t>(i)]; };
  Tensor<T> qkv;
  for (int64_t t = 0; t < s; ++t)
    for (int64_t head = 0; head < m.heads; ++head) {
      const int64_t query = (t * m.heads + head) * (l.nope + l.rope), key = (t * m.heads + head) * (l.nope + l.v);
      const auto rotated = [&](const Tensor<T>& from, int64_t first) {
        for (int64_t i = 0; i < l.rope; ++i)
          qkv.push_back(turned<T>([&](int64_t k) { return at(from, first + k); }, i, m, theta, text.position(t, s), 1));
      };
      for (int64_t i = 0; i < l.nope; ++i) qkv.push_back(at(x.q, query + i));
      rotated(x.q, query + l.nope);
      for (int64_t i = 0; i < l.nope; ++i) qkv.push_back(at(x.kv, key + i));
      rotated(x.k_rope, t * l.rope);
      for (int64_t i = 0; i < l.v; ++i) qkv.push_back(at(x.kv, key + l.nope + i));
    }
  return qkv;
}

template <class T>
Latents<T> latent_heads_back(const Tensor<T>& dqkv, const Model& m, float theta, int64_t s, const Text& text) {
  const LatentAttention& l = m.latent;
  const int64_t depth = l.nope + l.rope, group = 2 * depth + l.v;
  const auto at = [&](int64_t t, int64_t head, int64_t i) { return dqkv[static_cast<size_t>((t * m.heads + head) * group + i)]; };
  Latents<T> g;
  for (int64_t t = 0; t < s; ++t) {
    const auto back = [&](int64_t head, int64_t first, int64_t i) {
      return turned<T>([&](int64_t k) { return at(t, head, first + k); }, i, m, theta, text.position(t, s), -1);
    };
    for (int64_t head = 0; head < m.heads; ++head) {
      for (int64_t i = 0; i < l.nope; ++i) g.q.push_back(at(t, head, i));
      for (int64_t i = 0; i < l.rope; ++i) g.q.push_back(back(head, l.nope, i));
      for (int64_t i = 0; i < l.nope; ++i) g.kv.push_back(at(t, head, depth + i));
      for (int64_t i = 0; i < l.v; ++i) g.kv.push_back(at(t, head, 2 * depth + i));
    }
    for (int64_t i = 0; i < l.rope; ++i)
      g.k_rope.push_back(tree<T>(m.heads, [&](int64_t head) { return back(head, depth + l.nope, i); }));
  }
  return g;
}

template Tensor<float> latent_heads(const Latents<float>&, const Model&, float, int64_t, const Text&);
template Tensor<double> latent_heads(const Latents<double>&, const Model&, float, int64_t, const Text&);
template Latents<float> latent_heads_back(const Tensor<float>&, const Model&, float, int64_t, const Text&);
template Latents<double> latent_heads_back(const Tensor<double>&, const Model&, float, int64_t, const Text&);

}  // namespace shardlab::reference
