#include "tests/numerics/reference/ops.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "tests/numerics/reference/functions.h"
#include "tests/numerics/reference/order.h"

namespace shardlab::reference {
namespace {

template <class T>
T at(const Tensor<T>& x, int64_t i) {
  return x[static_cast<size_t>(i)];
}

template <class T>
Tensor<T> zeros(int64_t n) {
  return Tensor<T>(static_cast<size_t>(n), T(0));
}

}  // namespace

template <class T>
Tensor<T> linear(const Tensor<T>& x, const Tensor<T>& w, const Tensor<T>* bias, int64_t s, int64_t in, int64_t out) {
  Tensor<T> columns = zeros<T>(in * out);
  for (int64_t o = 0; o < out; ++o)
    for (int64_t k = 0; k < in; ++k) columns[static_cast<size_t>(k * out + o)] = at(w, o * in + k);
  const Leaves leaves = leaves_of(in);
  Tensor<T> y;
  for (int64_t t = 0; t < s; ++t) {
    const auto sums = contract<T>(
        leaves, out, [&](int64_t k) { return at(x, t * in + k); },
        [&](int64_t k) { return &columns[static_cast<size_t>(k * out)]; });
    for (int64_t o = 0; o < out; ++o) y.push_back(bias ? at(sums, o) + at(*bias, o) : at(sums, o));
  }
  return y;
}

template <class T>
Tensor<T> linear_input(const Tensor<T>& dy, const Tensor<T>& w, int64_t s, int64_t in, int64_t out) {
  const Leaves leaves = leaves_of(out);
  Tensor<T> dx;
  for (int64_t t = 0; t < s; ++t) {
    const auto sums = contract<T>(
        leaves, in, [&](int64_t o) { return at(dy, t * out + o); }, [&](int64_t o) { return &w[static_cast<size_t>(o * in)]; });
    dx.insert(dx.end(), sums.begin(), sums.end());
  }
  return dx;
}

template <class T>
Tensor<T> linear_weight(const Tensor<T>& x, const Tensor<T>& dy, int64_t s, int64_t in, int64_t out) {
  const Leaves leaves = leaves_of(s);
  Tensor<T> dw;
  for (int64_t o = 0; o < out; ++o) {
    const auto sums = contract<T>(
        leaves, in, [&](int64_t t) { return at(dy, t * out + o); }, [&](int64_t t) { return &x[static_cast<size_t>(t * in)]; });
    dw.insert(dw.end(), sums.begin(), sums.end());
  }
  return dw;
}

template <class T>
Tensor<T> bias_gradient(const Tensor<T>& dy, int64_t s, int64_t n) {
  Tensor<T> db;
  for (int64_t i = 0; i < n; ++i) db.push_back(token_tree<T>(s, [&](int64_t t) { return at(dy, t * n + i); }));
  return db;
}

template <class T>
Normed<T> norm(const Tensor<T>& x, const Tensor<T>& gamma, const Tensor<T>* beta, float epsilon, int64_t s, int64_t h) {
  Normed<T> n;
  for (int64_t t = 0; t < s; ++t) {
    const auto value = [&](int64_t i) { return at(x, t * h + i); };
    const T mean = beta ? lanes<T>(h, value) / T(h) : T(0);
    const T variance = lanes<T>(h,
                                [&](int64_t i) {
                                  const T c = value(i) - mean;
                                  return c * c;
                                }) /
                       T(h);
    const T inverse = T(1) / std::sqrt(variance + T(epsilon));
    for (int64_t i = 0; i < h; ++i) {
      const T y = ((value(i) - mean) * inverse) * at(gamma, i);
      n.y.push_back(beta ? y + at(*beta, i) : y);
    }
    n.mean.push_back(mean);
    n.inverse.push_back(inverse);
  }
  return n;
}

template <class T>
Tensor<T> norm_input(const Tensor<T>& dy, const Tensor<T>& x, const Tensor<T>& gamma, const Normed<T>& saved, bool centred,
                     int64_t s, int64_t h) {
  Tensor<T> dx;
  for (int64_t t = 0; t < s; ++t) {
    const T mean = at(saved.mean, t), inverse = at(saved.inverse, t);
    const auto g = [&](int64_t i) { return at(dy, t * h + i) * at(gamma, i); };
    const auto xhat = [&](int64_t i) { return (at(x, t * h + i) - mean) * inverse; };
    const T a = centred ? lanes<T>(h, g) / T(h) : T(0);
    const T c = lanes<T>(h, [&](int64_t i) { return g(i) * xhat(i); }) / T(h);
    for (int64_t i = 0; i < h; ++i) dx.push_back(((centred ? g(i) - a : g(i)) - xhat(i) * c) * inverse);
  }
  return dx;
}

template <class T>
Tensor<T> norm_weight(const Tensor<T>& dy, const Tensor<T>& x, const Normed<T>& saved, int64_t s, int64_t h) {
  Tensor<T> dgamma;
  for (int64_t i = 0; i < h; ++i)
    dgamma.push_back(token_tree<T>(
        s, [&](int64_t t) { return at(dy, t * h + i) * ((at(x, t * h + i) - at(saved.mean, t)) * at(saved.inverse, t)); }));
  return dgamma;
}

namespace {

/// Where the heads of q, or of k, begin in a token's row.
std::vector<int64_t> rows_of_heads(const Heads& heads, bool keys) {
  std::vector<int64_t> rows;
  for (int64_t i = 0; i < (keys ? heads.kv_heads : heads.heads); ++i) rows.push_back(keys ? heads.key(i) : heads.query(i));
  return rows;
}

template <class T>
Tensor<T> one_head(const Tensor<T>& qkv, const Heads& heads, int64_t token, int64_t row) {
  const auto begin = qkv.begin() + token * heads.width() + row;
  return Tensor<T>(begin, begin + heads.dim);
}

}  // namespace

template <class T>
Tensor<T> norm_heads(const Tensor<T>& qkv, const Heads& heads, const Tensor<T>& gamma_q, const Tensor<T>& gamma_k, float epsilon,
                     int64_t s) {
  Tensor<T> y = qkv;
  for (int64_t t = 0; t < s; ++t)
    for (const bool keys : {false, true})
      for (const int64_t row : rows_of_heads(heads, keys)) {
        const Normed<T> n = norm<T>(one_head(qkv, heads, t, row), keys ? gamma_k : gamma_q, nullptr, epsilon, 1, heads.dim);
        std::copy(n.y.begin(), n.y.end(), y.begin() + t * heads.width() + row);
      }
  return y;
}

template <class T>
HeadGradients<T> norm_heads_back(const Tensor<T>& dy, const Tensor<T>& qkv, const Heads& heads, const Tensor<T>& gamma_q,
                                 const Tensor<T>& gamma_k, float epsilon, int64_t s) {
  HeadGradients<T> g;
  g.dqkv = dy;
  for (const bool keys : {false, true}) {
    const Tensor<T>& gamma = keys ? gamma_k : gamma_q;
    const std::vector<int64_t> rows = rows_of_heads(heads, keys);
    std::vector<std::vector<T>> inverse(static_cast<size_t>(s));
    for (int64_t t = 0; t < s; ++t)
      for (const int64_t row : rows) {
        const Tensor<T> x = one_head(qkv, heads, t, row);
        const Normed<T> n = norm<T>(x, gamma, nullptr, epsilon, 1, heads.dim);
        const Tensor<T> dx = norm_input(one_head(dy, heads, t, row), x, gamma, n, false, 1, heads.dim);
        std::copy(dx.begin(), dx.end(), g.dqkv.begin() + t * heads.width() + row);
        inverse[static_cast<size_t>(t)].push_back(n.inverse[0]);
      }
    for (int64_t i = 0; i < heads.dim; ++i)
      (keys ? g.gamma_k : g.gamma_q).push_back(tree<T>(16, [&](int64_t leaf) {
        return tree<T>(static_cast<int64_t>(rows.size()), [&](int64_t head) {
          T sum = 0;
          for (int64_t t = leaf_begin(s, static_cast<int>(leaf)); t < leaf_begin(s, static_cast<int>(leaf) + 1); ++t) {
            const int64_t place = t * heads.width() + rows[static_cast<size_t>(head)] + i;
            sum += at(dy, place) * (at(qkv, place) * inverse[static_cast<size_t>(t)][static_cast<size_t>(head)]);
          }
          return sum;
        });
      }));
  }
  return g;
}

Text::Text(const TokenOrder& o, const std::vector<int64_t>& positions) : order(o) {
  const auto s = static_cast<int64_t>(positions.size());
  std::vector<int64_t> number;  // of the document, by position in the text
  for (const int64_t p : positions) number.push_back(number.empty() ? 0 : number.back() + (p == 0 ? 1 : 0));
  for (int64_t place = 0; place < s; ++place) {
    const auto at = static_cast<size_t>(order.position(place, s));
    document.push_back(number[at]);
    within.push_back(positions[at]);
  }
}

template <class T>
void rope(Tensor<T>& qkv, const Heads& heads, float theta, int sign, int64_t s, const Text& text) {
  const int64_t half = heads.dim / 2;
  const auto rotate = [&](int64_t token, int64_t row) {
    T* x = &qkv[static_cast<size_t>(token * heads.width() + row)];
    for (int64_t i = 0; i < half; ++i) {
      const double angle = static_cast<double>(text.position(token, s)) *
                           std::pow(double{theta}, -2.0 * static_cast<double>(i) / static_cast<double>(heads.dim));
      const T c = static_cast<T>(std::cos(angle)), sine = static_cast<T>(std::sin(angle)) * T(sign);
      const T a = x[i], b = x[i + half];
      x[i] = a * c - b * sine;
      x[i + half] = b * c + a * sine;
    }
  };
  for (int64_t t = 0; t < s; ++t) {
    for (int64_t head = 0; head < heads.heads; ++head) rotate(t, heads.query(head));
    for (int64_t group = 0; group < heads.kv_heads; ++group) rotate(t, heads.key(group));
  }
}

namespace {

/// chain over the head's dim of row `a` of x at token i with row `b` of y at token j.
template <class T>
T dot(const Tensor<T>& x, int64_t a, const Tensor<T>& y, int64_t b, int64_t dim) {
  return chain<T>(
      0, dim, [&](int64_t k) { return at(x, a + k); }, [&](int64_t k) { return at(y, b + k); });
}

template <class T>
T score_factor(const Heads& heads) {
  return T(1) / std::sqrt(T(heads.dim));
}

}  // namespace

namespace {

/// A part of a softmax, for one query: the largest score, the sum of exponentials, and the weighted values of each element.
template <class T>
struct Part {
  bool any = false;
  T max = 0, sum = 0;
  std::vector<T> o;
};

template <class T>
Part<T> merge(const Part<T>& a, const Part<T>& b) {
  if (!a.any) return b;
  if (!b.any) return a;
  Part<T> c;
  c.any = true;
  c.max = a.max > b.max ? a.max : b.max;
  const T left = exponential(a.max - c.max), right = exponential(b.max - c.max);
  c.sum = a.sum * left + b.sum * right;
  for (size_t i = 0; i < a.o.size(); ++i) c.o.push_back(a.o[i] * left + b.o[i] * right);
  return c;
}

/// By place of a sequence: the keys that its query sees, and the queries that see its key.
struct Pairs {
  std::vector<Leaves> keys, queries;

  Pairs(int64_t s, const Text& text) {
    for (int64_t place = 0; place < s; ++place) {
      keys.push_back(leaves_of(s, [&](int64_t j) { return text.sees(place, j, s); }));
      queries.push_back(leaves_of(s, [&](int64_t i) { return text.sees(i, place, s); }));
    }
  }
};

}  // namespace

template <class T>
Attended<T> attention(const Tensor<T>& qkv, const Heads& heads, int64_t s, const Text& text) {
  const int64_t width = heads.width(), d = heads.dim, values = heads.of_value();
  const Pairs pairs(s, text);
  Attended<T> out{zeros<T>(s * heads.heads * values), {}};
  for (int64_t head = 0; head < heads.heads; ++head) {
    const int64_t group = head / heads.per_group(), q = heads.query(head), k = heads.key(group), v = heads.value(group);
    for (int64_t i = 0; i < s; ++i) {
      const auto leaf = [&](int64_t number) {
        const std::vector<int64_t>& keys = pairs.keys[static_cast<size_t>(i)][static_cast<size_t>(number)];
        Part<T> part;
        std::vector<T> p;
        for (const int64_t j : keys) p.push_back(dot(qkv, i * width + q, qkv, j * width + k, d) * score_factor<T>(heads));
        if (p.empty()) return part;
        part.any = true;
        part.max = *std::max_element(p.begin(), p.end());
        for (T& x : p) x = exponential(x - part.max);
        const auto n = static_cast<int64_t>(p.size());
        part.sum = lanes<T>(n, [&](int64_t j) { return at(p, j); });
        part.o.resize(static_cast<size_t>(values));
        for (int64_t j = 0; j < n; ++j)
          link_chains(at(p, j), &qkv[static_cast<size_t>(keys[static_cast<size_t>(j)] * width + v)], values, part.o.data());
        return part;
      };
      const Part<T> all = tree_sum(0, 16, leaf, merge<T>);
      const T inverse = T(1) / all.sum;
      for (int64_t c = 0; c < values; ++c)
        out.o[static_cast<size_t>((i * heads.heads + head) * values + c)] = all.o[static_cast<size_t>(c)] * inverse;
      out.lse.push_back(all.max + logarithm(all.sum));
    }
  }
  return out;
}

template <class T>
Tensor<T> attention_input(const Tensor<T>& dout, const Attended<T>& saved, const Tensor<T>& qkv, const Heads& heads, int64_t s,
                          const Text& text) {
  const int64_t width = heads.width(), d = heads.dim, values = heads.of_value();
  const T factor = score_factor<T>(heads);
  Tensor<T> dqkv = zeros<T>(s * width);
  // p and ds of every pair.
  Tensor<T> p = zeros<T>(heads.heads * s * s), ds = p;
  const auto pair = [&](int64_t head, int64_t i, int64_t j) { return (head * s + i) * s + j; };
  for (int64_t head = 0; head < heads.heads; ++head) {
    const int64_t group = head / heads.per_group(), q = heads.query(head), k = heads.key(group), v = heads.value(group);
    for (int64_t i = 0; i < s; ++i) {
      const int64_t row = (i * heads.heads + head) * values;
      const T correction = lanes<T>(values, [&](int64_t c) { return at(dout, row + c) * at(saved.o, row + c); });
      for (int64_t j = 0; j < s; ++j) {
        if (!text.sees(i, j, s)) continue;
        const T score = dot(qkv, i * width + q, qkv, j * width + k, d) * factor;
        const T weight = exponential(score - at(saved.lse, head * s + i));
        p[static_cast<size_t>(pair(head, i, j))] = weight;
        ds[static_cast<size_t>(pair(head, i, j))] = (weight * (dot(dout, row, qkv, j * width + v, values) - correction)) * factor;
      }
    }
  }
  const auto put = [&](const std::vector<T>& sums, int64_t token, int64_t row) {
    std::copy(sums.begin(), sums.end(), dqkv.begin() + token * width + row);
  };
  const Pairs pairs(s, text);
  for (int64_t head = 0; head < heads.heads; ++head)
    for (int64_t i = 0; i < s; ++i)
      put(contract<T>(
              pairs.keys[static_cast<size_t>(i)], d, [&](int64_t j) { return at(ds, pair(head, i, j)); },
              [&](int64_t j) { return &qkv[static_cast<size_t>(j * width + heads.key(head / heads.per_group()))]; }, true),
          i, heads.query(head));
  // The gradient of the key or the value of token j: `weight` of each pair times the row `other` of the query.
  const auto of_key = [&](int64_t group, int64_t j, int64_t n, const auto& weight, const auto& other) {
    std::vector<std::vector<T>> sums;
    for (int64_t head = group * heads.per_group(); head < (group + 1) * heads.per_group(); ++head)
      sums.push_back(contract<T>(
          pairs.queries[static_cast<size_t>(j)], n, [&](int64_t i) { return at(weight, pair(head, i, j)); },
          [&](int64_t i) { return other(head, i); }, true));
    std::vector<T> joined;
    for (size_t c = 0; c < static_cast<size_t>(n); ++c)
      joined.push_back(tree<T>(heads.per_group(), [&](int64_t member) { return sums[static_cast<size_t>(member)][c]; }));
    return joined;
  };
  for (int64_t group = 0; group < heads.kv_heads; ++group)
    for (int64_t j = 0; j < s; ++j) {
      put(of_key(group, j, d, ds,
                 [&](int64_t head, int64_t i) { return &qkv[static_cast<size_t>(i * width + heads.query(head))]; }),
          j, heads.key(group));
      put(of_key(group, j, values, p,
                 [&](int64_t head, int64_t i) { return &dout[static_cast<size_t>((i * heads.heads + head) * values)]; }),
          j, heads.value(group));
    }
  return dqkv;
}

template <class T>
Tensor<T> embedding_weight(const int32_t* ids, const Tensor<T>& dx, int64_t s, int64_t h, int64_t vocab) {
  Tensor<T> dtable = zeros<T>(16 * vocab * h);
  const Leaves leaves = leaves_of(s);
  for (int64_t leaf = 0; leaf < 16; ++leaf)
    for (const int64_t t : leaves[static_cast<size_t>(leaf)])
      for (int64_t i = 0; i < h; ++i) dtable[static_cast<size_t>((leaf * vocab + ids[t]) * h + i)] += at(dx, t * h + i);
  join(dtable, vocab * h);
  return dtable;
}

template <class T>
Tensor<T> activation(const Tensor<T>& u, bool swiglu) {
  Tensor<T> a;
  if (swiglu) {
    for (size_t i = 0; i < u.size(); i += 2) a.push_back((u[i] / (T(1) + exponential(-u[i]))) * u[i + 1]);
  } else {
    for (const T x : u) a.push_back((T(0.5) * x) * (T(1) + gelu_tanh(x)));
  }
  return a;
}

template <class T>
Tensor<T> activation_input(const Tensor<T>& da, const Tensor<T>& u, bool swiglu) {
  Tensor<T> du;
  for (size_t i = 0; i < da.size(); ++i) {
    if (swiglu) {
      const auto [gate, up] = swiglu_derivative(da[i], u[2 * i], u[2 * i + 1]);
      du.push_back(gate);
      du.push_back(up);
    } else {
      du.push_back(gelu_derivative(da[i], u[i]));
    }
  }
  return du;
}

template <class T>
void dropout(Tensor<T>& z, float p, const RandomKey& key, uint64_t first) {
  const double threshold = double{p} * 4294967296.0;
  const T scale = T(1) / (T(1) - T(p));
  for (size_t i = 0; i < z.size(); ++i) z[i] = random_bits(key, first + i) >= threshold ? z[i] * scale : T(0);
}

template <class T>
Entropy<T> cross_entropy(const Tensor<T>& logits, const int32_t* targets, int64_t tokens, int64_t s, int64_t vocab, int64_t words) {
  Entropy<T> out;
  Tensor<T> nll;
  for (int64_t t = 0; t < s; ++t) {
    const auto x = [&](int64_t v) { return at(logits, t * vocab + v); };
    T max = x(0);
    for (int64_t v = 1; v < words; ++v) max = std::max(max, x(v));
    const T sum = tree<T>(16, [&](int64_t leaf) {
      const int64_t begin = std::min(words, leaf_begin(vocab, static_cast<int>(leaf)));
      const int64_t end = std::min(words, leaf_begin(vocab, static_cast<int>(leaf) + 1));
      return lanes<T>(end - begin, [&](int64_t v) { return exponential(x(begin + v) - max); });
    });
    nll.push_back((logarithm(sum) + max) - x(targets[t]));
    const T inverse = T(1) / sum, share = T(1) / T(tokens);
    for (int64_t v = 0; v < vocab; ++v) {
      if (v >= words) {
        out.dlogits.push_back(T(0));
        continue;
      }
      const T p = exponential(x(v) - max) * inverse;
      out.dlogits.push_back((p - T(v == targets[t] ? 1 : 0)) * share);
    }
  }
  out.nll = token_tree<T>(s, [&](int64_t t) { return at(nll, t); });
  return out;
}

template <class T>
void sgd(Tensor<T>& w, const Tensor<T>& g, float lr, float decay) {
  for (size_t i = 0; i < w.size(); ++i) w[i] = w[i] - T(lr) * (decay != 0 ? g[i] + T(decay) * w[i] : g[i]);
}

template <class T>
void adamw(Tensor<T>& w, Tensor<T>& m, Tensor<T>& v, const Tensor<T>& g, int64_t step, const AdamWRecipe& r) {
  const double exponent = static_cast<double>(step + 1);
  const T c1 = T(1 - std::pow(double{r.beta1}, exponent)), c2 = T(1 - std::pow(double{r.beta2}, exponent));
  const T lr = T(r.lr), beta1 = T(r.beta1), beta2 = T(r.beta2), decay = T(r.decay);
  for (size_t i = 0; i < w.size(); ++i) {
    m[i] = beta1 * m[i] + (T(1) - beta1) * g[i];
    v[i] = beta2 * v[i] + ((T(1) - beta2) * g[i]) * g[i];
    const T u = (m[i] / c1) / (std::sqrt(v[i] / c2) + T(r.epsilon));
    const T moved = w[i] - lr * u;
    w[i] = decay != 0 ? moved - (lr * decay) * w[i] : moved;
  }
}

template <class T>
void lion(Tensor<T>& w, Tensor<T>& m, const Tensor<T>& g, const LionRecipe& r) {
  const T lr = T(r.lr), beta1 = T(r.beta1), beta2 = T(r.beta2), decay = T(r.decay);
  for (size_t i = 0; i < w.size(); ++i) {
    const T blend = beta1 * m[i] + (T(1) - beta1) * g[i];
    const T direction = blend > 0 ? T(1) : blend < 0 ? T(-1) : blend;
    const T moved = w[i] - lr * direction;
    w[i] = decay != 0 ? moved - (lr * decay) * w[i] : moved;
    m[i] = beta2 * m[i] + (T(1) - beta2) * g[i];
  }
}

std::vector<float> moment_numbers(bool has_sign) {
  std::vector<float> numbers{0, 1};
  for (int decade = 0; decade < 7; ++decade) {
    const int parts = has_sign ? 1 << decade : 2 << decade;
    const double top = std::array{1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0}[static_cast<size_t>(decade)];
    for (int part = 0; part < parts; ++part) {
      const auto number = static_cast<float>(top * (0.1 + 0.9 * ((part + 0.5) / parts)));
      numbers.push_back(number);
      if (has_sign) numbers.push_back(-number);
    }
  }
  std::sort(numbers.begin(), numbers.end());
  return numbers;
}

template <class T>
std::vector<T> stored_in_8_bits(const std::vector<T>& block, bool has_sign) {
  const std::vector<float> numbers = moment_numbers(has_sign);
  T most = 0;
  for (const T x : block) most = std::max(most, std::abs(x));
  std::vector<T> stored;
  for (const T x : block) {
    size_t code = 0;
    if (most > 0)
      while (code < 255 && T(0.5f * (numbers[code] + numbers[code + 1])) < x / most) ++code;
    stored.push_back(T(numbers[code]) * most);
  }
  return stored;
}

#define SHARDLAB_REFERENCE_OPS(T)                                                                                                 \
  template Tensor<T> linear(const Tensor<T>&, const Tensor<T>&, const Tensor<T>*, int64_t, int64_t, int64_t);                     \
  template Tensor<T> linear_input(const Tensor<T>&, const Tensor<T>&, int64_t, int64_t, int64_t);                                 \
  template Tensor<T> linear_weight(const Tensor<T>&, const Tensor<T>&, int64_t, int64_t, int64_t);                                \
  template Tensor<T> bias_gradient(const Tensor<T>&, int64_t, int64_t);                                                           \
  template Normed<T> norm(const Tensor<T>&, const Tensor<T>&, const Tensor<T>*, float, int64_t, int64_t);                         \
  template Tensor<T> norm_input(const Tensor<T>&, const Tensor<T>&, const Tensor<T>&, const Normed<T>&, bool, int64_t, int64_t);  \
  template Tensor<T> norm_weight(const Tensor<T>&, const Tensor<T>&, const Normed<T>&, int64_t, int64_t);                         \
  template Tensor<T> norm_heads(const Tensor<T>&, const Heads&, const Tensor<T>&, const Tensor<T>&, float, int64_t);              \
  template HeadGradients<T> norm_heads_back(const Tensor<T>&, const Tensor<T>&, const Heads&, const Tensor<T>&, const Tensor<T>&, \
                                            float, int64_t);                                                                      \
  template void rope(Tensor<T>&, const Heads&, float, int, int64_t, const Text&);                                                 \
  template Attended<T> attention(const Tensor<T>&, const Heads&, int64_t, const Text&);                                           \
  template Tensor<T> attention_input(const Tensor<T>&, const Attended<T>&, const Tensor<T>&, const Heads&, int64_t, const Text&); \
  template Tensor<T> embedding_weight(const int32_t*, const Tensor<T>&, int64_t, int64_t, int64_t);                               \
  template Tensor<T> activation(const Tensor<T>&, bool);                                                                          \
  template Tensor<T> activation_input(const Tensor<T>&, const Tensor<T>&, bool);                                                  \
  template void dropout(Tensor<T>&, float, const RandomKey&, uint64_t);                                                           \
  template Entropy<T> cross_entropy(const Tensor<T>&, const int32_t*, int64_t, int64_t, int64_t, int64_t);                        \
  template void sgd(Tensor<T>&, const Tensor<T>&, float, float);                                                                  \
  template void adamw(Tensor<T>&, Tensor<T>&, Tensor<T>&, const Tensor<T>&, int64_t, const AdamWRecipe&);                         \
  template void lion(Tensor<T>&, Tensor<T>&, const Tensor<T>&, const LionRecipe&);                                                \
  template std::vector<T> stored_in_8_bits(const std::vector<T>&, bool);
SHARDLAB_REFERENCE_OPS(float)
SHARDLAB_REFERENCE_OPS(double)

}  // namespace shardlab::reference
