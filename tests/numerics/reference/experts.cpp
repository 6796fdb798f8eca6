#include "tests/numerics/reference/experts.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <numeric>

#include "tests/numerics/reference/functions.h"
#include "tests/numerics/reference/order.h"

namespace shardlab::reference {
namespace {

template <class T>
const T& at(const Tensor<T>& x, int64_t i) {
  return x[static_cast<size_t>(i)];
}
template <class T>
Tensor<T> slice(const Tensor<T>& x, int64_t begin, int64_t n) {
  return Tensor<T>(x.begin() + begin, x.begin() + begin + n);
}

/// e^(logit - max) of one token, and the maximum.
template <class T>
struct Exponentials {
  Tensor<T> e;
  T max = 0;
  T sum() const {
    return lanes<T>(static_cast<int64_t>(e.size()), [&](int64_t i) { return at(e, i); });
  }
};
template <class T>
Exponentials<T> exponentials(const Tensor<T>& logits) {
  Exponentials<T> r;
  r.max = *std::max_element(logits.begin(), logits.end());
  for (const T l : logits) r.e.push_back(exponential(l - r.max));
  return r;
}

/// Scores of one token's experts.
template <class T>
Tensor<T> scores(const Tensor<T>& logits, bool sigmoid) {
  Tensor<T> p;
  if (sigmoid) {
    for (const T l : logits) p.push_back(T(1) / (T(1) + exponential(-l)));
    return p;
  }
  const Exponentials<T> r = exponentials(logits);
  const T inverse = T(1) / r.sum();
  for (const T e : r.e) p.push_back(e * inverse);
  return p;
}

/// Sum of the scores of a token's own experts, in their order.
template <class T>
T own_sum(const Tensor<T>& p, const std::vector<int64_t>& chosen) {
  T sum = 0;
  for (const int64_t e : chosen) sum = sum + at(p, e);
  return sum + T(1e-20f);
}

std::vector<int64_t> largest(int64_t n, int64_t k, const auto& value) {
  std::vector<int64_t> order(static_cast<size_t>(n));
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return value(a) > value(b); });
  order.resize(static_cast<size_t>(k));
  std::sort(order.begin(), order.end());
  return order;
}

/// Which experts a token may go to: those of the groups with the largest scores, of sigmoids the largest sums of two.
template <class T>
std::vector<int64_t> allowed(const Tensor<T>& p, const Experts& e) {
  const int64_t each = e.count / e.groups;
  Tensor<T> best;
  for (int64_t g = 0; g < e.groups; ++g) {
    Tensor<T> group = slice(p, g * each, each);
    std::sort(group.begin(), group.end(), std::greater<T>());
    best.push_back(e.sigmoid && each > 1 ? group[0] + group[1] : group[0]);
  }
  std::vector<int64_t> experts;
  for (const int64_t g : largest(e.groups, e.groups_chosen, [&](int64_t i) { return at(best, i); }))
    for (int64_t i = 0; i < each; ++i) experts.push_back(g * each + i);
  return experts;
}

/// By expert: derivative of the loss for even use by the mean score, over the tokens of the step.
template <class T>
Tensor<T> uneven(const Mixed<T>& m, const Experts& e, int64_t s, int64_t tokens) {
  Tensor<T> c;
  for (int64_t i = 0; i < e.count; ++i) {
    int64_t n = 0;
    for (const auto& chosen : m.chosen) n += std::count(chosen.begin(), chosen.end(), i);
    c.push_back((T(e.balance) * ((T(e.count) * T(n)) / T(e.top_k * s))) * (T(1) / T(tokens)));
  }
  return c;
}

/// Which choices the experts have room for: of the tokens that chose an expert the first few of the text, by docs/experts.md.
std::vector<std::vector<bool>> with_room(const std::vector<std::vector<int64_t>>& chosen, const Experts& e, int64_t s,
                                         const TokenOrder& order) {
  const double share = static_cast<double>(e.top_k * s) / static_cast<double>(e.count);
  const auto room = static_cast<int64_t>(std::ceil(static_cast<double>(e.capacity_factor) * share));
  std::vector<std::vector<bool>> taken;
  for (int64_t t = 0; t < s; ++t) {
    taken.emplace_back();
    for (const int64_t expert : chosen[static_cast<size_t>(t)]) {
      int64_t before = 0;
      for (int64_t i = 0; i < s; ++i)
        if (order.position(i, s) < order.position(t, s)) {
          const auto& other = chosen[static_cast<size_t>(i)];
          before += std::count(other.begin(), other.end(), expert);
        }
      taken.back().push_back(e.capacity_factor == 0 || before < room);
    }
  }
  return taken;
}

/// A row of an expert: a token and which of its choices the expert is.
struct Row {
  int64_t token, choice;
};

/// The rows that one expert takes, by leaf of the sequence.
template <class T>
std::array<std::vector<Row>, 16> rows_by_leaf(const Mixed<T>& m, int64_t expert, int64_t s) {
  std::array<std::vector<Row>, 16> leaves;
  for (size_t leaf = 0; leaf < leaves.size(); ++leaf)
    for (int64_t t = leaf_begin(s, static_cast<int>(leaf)); t < leaf_begin(s, static_cast<int>(leaf) + 1); ++t) {
      const auto& chosen = m.chosen[static_cast<size_t>(t)];
      const auto found = std::find(chosen.begin(), chosen.end(), expert);
      if (found != chosen.end() && m.taken[static_cast<size_t>(t)][static_cast<size_t>(found - chosen.begin())])
        leaves[leaf].push_back({t, found - chosen.begin()});
    }
  return leaves;
}

/// The sum over the rows of one expert, leaf by leaf.
template <class T, class Left, class Right>
T by_leaf(const std::array<std::vector<Row>, 16>& leaves, const Left& left, const Right& right) {
  return tree<T>(16, [&](int64_t leaf) {
    T acc = 0;
    for (const Row& row : leaves[static_cast<size_t>(leaf)])
      acc = std::fma(left(row.token, row.choice), right(row.token, row.choice), acc);
    return acc;
  });
}

}  // namespace

template <class T>
Mixed<T> mix(const Tensor<T>& x, const ExpertWeights<T>& w, const Tensor<T>* bias, const Experts& e, int64_t s, int64_t h,
             const TokenOrder& order) {
  Mixed<T> m;
  m.logits = linear<T>(x, w.router, nullptr, s, h, e.count);
  for (int64_t t = 0; t < s; ++t) {
    const Tensor<T> logits = slice(m.logits, t * e.count, e.count), p = scores(logits, e.sigmoid);
    Tensor<T> by = p;  // what experts are chosen by. Without biases by logits: of equal scores logits may differ
    for (size_t i = 0; i < by.size() && bias != nullptr; ++i) by[i] = by[i] + (*bias)[i];
    const std::vector<int64_t> among = allowed(by, e);
    const Tensor<T>& values = bias == nullptr ? logits : by;
    std::vector<int64_t> chosen;
    for (const int64_t i :
         largest(static_cast<int64_t>(among.size()), e.top_k, [&](int64_t j) { return at(values, among[static_cast<size_t>(j)]); }))
      chosen.push_back(among[static_cast<size_t>(i)]);
    m.chosen.push_back(chosen);
  }
  m.taken = with_room(m.chosen, e, s, order);
  for (int64_t t = 0; t < s; ++t) {
    const Tensor<T> logits = slice(m.logits, t * e.count, e.count), p = scores(logits, e.sigmoid), token = slice(x, t * h, h);
    const std::vector<int64_t>& chosen = m.chosen[static_cast<size_t>(t)];
    const T sum = own_sum(p, chosen);
    Tensor<T> z;
    for (size_t j = 0; j < chosen.size(); ++j) {
      const int64_t expert = chosen[j];
      const T weight = e.normalise ? (at(p, expert) / sum) * T(e.factor) : at(p, expert) * T(e.factor);
      m.weights.push_back(weight);
      m.u.push_back(linear<T>(token, slice(w.up, expert * 2 * e.ffn * h, 2 * e.ffn * h), nullptr, 1, h, 2 * e.ffn));
      m.a.push_back(activation(m.u.back(), true));
      m.out.push_back(linear<T>(m.a.back(), slice(w.down, expert * h * e.ffn, h * e.ffn), nullptr, 1, e.ffn, h));
      for (int64_t i = 0; i < h && m.taken[static_cast<size_t>(t)][j]; ++i) {
        const T part = weight * at(m.out.back(), i);
        if (static_cast<int64_t>(z.size()) < h)
          z.push_back(part);
        else
          z[static_cast<size_t>(i)] = at(z, i) + part;
      }
    }
    z.resize(static_cast<size_t>(h), T(0));  // of a token that no expert took nothing but the residual is left
    m.z.insert(m.z.end(), z.begin(), z.end());
  }
  return m;
}

template <class T>
ExpertGradients<T> mix_back(const Tensor<T>& dz, const Tensor<T>& x, const Mixed<T>& m, const ExpertWeights<T>& w, const Experts& e,
                            int64_t s, int64_t h, int64_t tokens) {
  const int64_t k = e.top_k;
  std::vector<Tensor<T>> d_out, d_u;  // by token and choice
  Tensor<T> d_logits, dx;
  const Tensor<T> c = uneven(m, e, s, tokens);
  for (int64_t t = 0; t < s; ++t) {
    const Tensor<T> dy = slice(dz, t * h, h), logits = slice(m.logits, t * e.count, e.count), p = scores(logits, e.sigmoid);
    const auto& chosen = m.chosen[static_cast<size_t>(t)];
    Tensor<T> d_weights, dtoken;
    for (int64_t j = 0; j < k; ++j) {
      const auto row = static_cast<size_t>(t * k + j);
      const int64_t expert = chosen[static_cast<size_t>(j)];
      if (!m.taken[static_cast<size_t>(t)][static_cast<size_t>(j)]) {
        d_weights.push_back(T(0));
        d_out.emplace_back(), d_u.emplace_back();
        continue;
      }
      d_weights.push_back(lanes<T>(h, [&](int64_t i) { return at(dy, i) * at(m.out[row], i); }));
      Tensor<T> scaled;
      for (const T d : dy) scaled.push_back(m.weights[row] * d);
      const Tensor<T> d_a = linear_input<T>(scaled, slice(w.down, expert * h * e.ffn, h * e.ffn), 1, e.ffn, h);
      d_out.push_back(std::move(scaled));
      d_u.push_back(activation_input(d_a, m.u[row], true));
      const Tensor<T> d_row = linear_input<T>(d_u.back(), slice(w.up, expert * 2 * e.ffn * h, 2 * e.ffn * h), 1, h, 2 * e.ffn);
      if (dtoken.empty())
        dtoken = d_row;
      else
        for (size_t i = 0; i < d_row.size(); ++i) dtoken[i] = dtoken[i] + d_row[i];
    }
    dtoken.resize(static_cast<size_t>(h), T(0));
    dx.insert(dx.end(), dtoken.begin(), dtoken.end());

    // Scores, then logits.
    Tensor<T> dp(static_cast<size_t>(e.count), T(0));
    const T sum = own_sum(p, chosen);
    T along = 0;
    for (int64_t j = 0; j < k; ++j)
      along = along + at(d_weights, j) * ((at(p, chosen[static_cast<size_t>(j)]) / sum) * T(e.factor));
    for (int64_t j = 0; j < k; ++j)
      dp[static_cast<size_t>(chosen[static_cast<size_t>(j)])] =
          e.normalise ? (T(e.factor) * at(d_weights, j) - along) / sum : T(e.factor) * at(d_weights, j);
    if (e.balance != 0 && e.sigmoid) {
      const T all = lanes<T>(e.count, [&](int64_t i) { return at(p, i); });
      const T mean = lanes<T>(e.count, [&](int64_t i) { return at(c, i) * (at(p, i) / all); });
      for (int64_t i = 0; i < e.count; ++i) dp[static_cast<size_t>(i)] = at(dp, i) + (at(c, i) - mean) / all;
    } else if (e.balance != 0) {
      for (int64_t i = 0; i < e.count; ++i) dp[static_cast<size_t>(i)] = at(dp, i) + at(c, i);
    }
    const T mean = lanes<T>(e.count, [&](int64_t i) { return at(dp, i) * at(p, i); });
    const Exponentials<T> r = exponentials(logits);
    const T total = r.sum(), slope = ((T(2) * T(e.z_loss)) * (logarithm(total) + r.max)) * (T(1) / T(tokens)),
            inverse = T(1) / total;
    for (int64_t i = 0; i < e.count; ++i) {
      const T d = e.sigmoid ? at(dp, i) * (at(p, i) * (T(1) - at(p, i))) : at(p, i) * (at(dp, i) - mean);
      d_logits.push_back(e.z_loss == 0 ? d : d + slope * (at(r.e, i) * inverse));
    }
  }
  ExpertGradients<T> g;
  g.dx = std::move(dx);
  g.routed = linear_input<T>(d_logits, w.router, s, h, e.count);
  g.router = linear_weight<T>(x, d_logits, s, h, e.count);
  for (int64_t expert = 0; expert < e.count; ++expert) {
    const auto leaves = rows_by_leaf(m, expert, s);
    for (int64_t o = 0; o < 2 * e.ffn; ++o)
      for (int64_t i = 0; i < h; ++i)
        g.up.push_back(by_leaf<T>(
            leaves, [&](int64_t t, int64_t j) { return at(d_u[static_cast<size_t>(t * k + j)], o); },
            [&](int64_t t, int64_t) { return at(x, t * h + i); }));
    for (int64_t o = 0; o < h; ++o)
      for (int64_t i = 0; i < e.ffn; ++i)
        g.down.push_back(by_leaf<T>(
            leaves, [&](int64_t t, int64_t j) { return at(d_out[static_cast<size_t>(t * k + j)], o); },
            [&](int64_t t, int64_t j) { return at(m.a[static_cast<size_t>(t * k + j)], i); }));
  }
  return g;
}

template <class T>
void follow_load(Tensor<T>& bias, const std::vector<int64_t>& load, T rate) {
  const int64_t all = std::accumulate(load.begin(), load.end(), int64_t{0}), experts = static_cast<int64_t>(load.size());
  for (size_t e = 0; e < load.size(); ++e) {
    const int64_t above = load[e] * experts - all;
    bias[e] = bias[e] + T(above < 0 ? 1 : above > 0 ? -1 : 0) * rate;
  }
}

template <class T>
Tensor<T> sigmoids(const Tensor<T>& logits) {
  return scores(logits, true);
}

template <class T>
Tensor<T> gated(const Tensor<T>& x, const Tensor<T>& p) {
  const size_t h = x.size() / p.size();
  Tensor<T> y;
  for (size_t i = 0; i < x.size(); ++i) y.push_back(p[i / h] * x[i]);
  return y;
}

template <class T>
Tensor<T> gate_back(const Tensor<T>& dz, const Tensor<T>& x, const Tensor<T>& p) {
  const auto h = static_cast<int64_t>(x.size() / p.size());
  Tensor<T> d;
  for (int64_t t = 0; t < static_cast<int64_t>(p.size()); ++t) {
    const T along = lanes<T>(h, [&](int64_t i) { return at(dz, t * h + i) * at(x, t * h + i); });
    d.push_back(along * (at(p, t) * (T(1) - at(p, t))));
  }
  return d;
}

template <class T>
T router_losses(const Mixed<T>& m, const Experts& e, int64_t s, int64_t tokens) {
  const Tensor<T> c = uneven(m, e, s, tokens);
  T loss = 0;
  for (int64_t t = 0; t < s; ++t) {
    const Tensor<T> logits = slice(m.logits, t * e.count, e.count), p = scores(logits, e.sigmoid);
    const T all = e.sigmoid ? lanes<T>(e.count, [&](int64_t i) { return at(p, i); }) : T(1);
    for (int64_t i = 0; i < e.count && e.balance != 0; ++i) loss += at(c, i) * (at(p, i) / all);
    const Exponentials<T> r = exponentials(logits);
    const T log_sum = logarithm(r.sum()) + r.max;
    loss += T(e.z_loss) * log_sum * log_sum / T(tokens);
  }
  return loss;
}

template Mixed<float> mix(const Tensor<float>&, const ExpertWeights<float>&, const Tensor<float>*, const Experts&, int64_t, int64_t,
                          const TokenOrder&);
template Mixed<double> mix(const Tensor<double>&, const ExpertWeights<double>&, const Tensor<double>*, const Experts&, int64_t,
                           int64_t, const TokenOrder&);
template ExpertGradients<float> mix_back(const Tensor<float>&, const Tensor<float>&, const Mixed<float>&,
                                         const ExpertWeights<float>&, const Experts&, int64_t, int64_t, int64_t);
template ExpertGradients<double> mix_back(const Tensor<double>&, const Tensor<double>&, const Mixed<double>&,
                                          const ExpertWeights<double>&, const Experts&, int64_t, int64_t, int64_t);
template void follow_load(Tensor<float>&, const std::vector<int64_t>&, float);
template void follow_load(Tensor<double>&, const std::vector<int64_t>&, double);
template Tensor<float> sigmoids(const Tensor<float>&);
template Tensor<double> sigmoids(const Tensor<double>&);
template Tensor<float> gated(const Tensor<float>&, const Tensor<float>&);
template Tensor<double> gated(const Tensor<double>&, const Tensor<double>&);
template Tensor<float> gate_back(const Tensor<float>&, const Tensor<float>&, const Tensor<float>&);
template Tensor<double> gate_back(const Tensor<double>&, const Tensor<double>&, const Tensor<double>&);
template float router_losses(const Mixed<float>&, const Experts&, int64_t, int64_t);
template double router_losses(const Mixed<double>&, const Experts&, int64_t, int64_t);

}  // namespace shardlab::reference
