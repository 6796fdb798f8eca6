// Every kernel against the reference's operation, bit for bit: both were written from docs/canonical-order.md, apart from one
// another.
#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdlib>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "kernels/kernels.h"
#include "tests/namespaces.h"
#include "tests/numerics/reference/functions.h"
#include "tests/numerics/reference/ops.h"
#include "tests/numerics/reference/order.h"
#include "tests/test.h"

namespace shardlab::testing::of_orders {
namespace {

using Values = reference::Tensor<float>;

Values normal(int64_t n, uint32_t name, double deviation = 1.0) {
  Values v;
  for (int64_t i = 0; i < n; ++i)
    v.push_back(reference::initial_normal({11, RandomUse::kInitialise, name, 0}, static_cast<uint64_t>(i), deviation));
  return v;
}

/// Room for a result, full of what no result is.
Values poisoned(int64_t n) { return Values(static_cast<size_t>(n), std::nanf("")); }

/// Where two tensors differ in a bit.
std::string difference(const Values& reference, const Values& kernel) {
  if (reference.size() != kernel.size()) return fmt::format("{} elements, not {}", kernel.size(), reference.size());
  for (size_t i = 0; i < reference.size(); ++i)
    if (std::bit_cast<uint32_t>(reference[i]) != std::bit_cast<uint32_t>(kernel[i]))
      return fmt::format("element {}: kernel {:.9g}, reference {:.9g}", i, kernel[i], reference[i]);
  return "";
}
#define REQUIRE_SAME(reference, kernel) REQUIRE(difference(reference, kernel) == "")

/// Sequence `i` of a batch whose sequences have `n` elements.
Values part(const Values& v, int64_t i, int64_t n) { return Values(v.begin() + i * n, v.begin() + (i + 1) * n); }
void append(Values& to, const Values& from) { to.insert(to.end(), from.begin(), from.end()); }

/// tree over the sequences' contributions.
template <class Contribution>
Values tree_of(int64_t sequences, const Contribution& contribution) {
  return tree_sum(0, sequences, contribution, [](Values a, const Values& b) {
    for (size_t i = 0; i < a.size(); ++i) a[i] += b[i];
    return a;
  });
}

/// Kernels that run here, each in turn.
template <class Test>
void each_variant(const Test& test) {
  for (const kernels::Kernels* k : kernels::all_variants()) {
    if (!kernels::runs_here(*k)) continue;
    INFO(k->name);
    test(*k);
  }
}

/// Scratch of a kernel call, aligned as kernels ask.
class Scratch {
 public:
  explicit Scratch(int64_t bytes) : memory_(std::aligned_alloc(64, static_cast<size_t>(bytes / 64 + 1) * 64)) {}
  void* memory() const { return memory_.get(); }

 private:
  struct Free {
    void operator()(void* p) const { std::free(p); }
  };
  std::unique_ptr<void, Free> memory_;
};

struct Size {
  int64_t sequences, tokens, in, out;
};
const std::vector<Size> kSizes{{1, 1, 1, 1}, {1, 5, 7, 3}, {3, 17, 33, 20}, {4, 24, 48, 112}, {2, 40, 130, 65}};

}  // namespace

TEST_CASE("linear: F, I, W and the bias's gradient") {
  each_variant([](const kernels::Kernels& k) {
    for (const auto& [b, s, in, out] : kSizes) {
      INFO(fmt::format("b{} s{} in{} out{}", b, s, in, out));
      const Values x = normal(b * s * in, 1), w = normal(out * in, 2), bias = normal(out, 3), dy = normal(b * s * out, 4);
      Values y = poisoned(b * s * out), dx = poisoned(b * s * in), dw = poisoned(out * in), dbias = poisoned(out);
      kernels::LinearForward f{x.data(), w.data(), bias.data(), y.data(), b * s, in, out, {}, true, nullptr};
      kernels::LinearInput i{dy.data(), w.data(), dx.data(), b * s, in, out, {}, true, nullptr};
      kernels::LinearWeight g{x.data(), dy.data(), dw.data(), dbias.data(), {b, s, {}}, in, out, false, true, nullptr};
      const Scratch f_scratch(linear_scratch_bytes(f)), i_scratch(linear_scratch_bytes(i)), g_scratch(linear_scratch_bytes(g));
      f.scratch = f_scratch.memory(), i.scratch = i_scratch.memory(), g.scratch = g_scratch.memory();
      k.linear_forward(f);
      k.linear_input(i);
      k.linear_weight(g);
      REQUIRE_SAME(reference::linear(x, w, &bias, b * s, in, out), y);
      REQUIRE_SAME(reference::linear_input(dy, w, b * s, in, out), dx);
      REQUIRE_SAME(
          tree_of(b, [&, s = s, in = in, out = out](
                         int64_t n) { return reference::linear_weight(part(x, n, s * in), part(dy, n, s * out), s, in, out); }),
          dw);
      REQUIRE_SAME(tree_of(b, [&, s = s, out = out](int64_t n) { return reference::bias_gradient(part(dy, n, s * out), s, out); }),
                   dbias);
    }
  });
}

TEST_CASE("norm: F, I and W of LayerNorm and RMSNorm") {
  each_variant([](const kernels::Kernels& k) {
    for (const auto& [b, s, h, unused] : kSizes)
      for (const bool rms : {false, true}) {
        INFO(fmt::format("b{} s{} h{} rms {}", b, s, h, rms));
        const int64_t columns = rms ? 1 : 2;
        const Values x = normal(b * s * h, 1), gamma = normal(h, 2), beta = normal(h, 3), dy = normal(b * s * h, 4),
                     residual = normal(b * s * h, 5);
        Values y = poisoned(b * s * h), stats = poisoned(b * s * columns), dx = poisoned(b * s * h), dgamma = poisoned(h),
               dbeta = poisoned(h);
        k.norm_forward({x.data(), gamma.data(), rms ? nullptr : beta.data(), y.data(), stats.data(), b * s, h, 1e-5f, rms});
        k.norm_input({dy.data(), x.data(), gamma.data(), stats.data(), residual.data(), dx.data(), b * s, h, rms});
        k.norm_weight({dy.data(), x.data(), stats.data(), dgamma.data(), rms ? nullptr : dbeta.data(), {b, s, {}}, h, rms, false});

        const auto want = reference::norm(x, gamma, rms ? nullptr : &beta, 1e-5f, b * s, h);
        REQUIRE_SAME(want.y, y);
        Values want_stats;
        for (size_t t = 0; t < want.mean.size(); ++t) {
          if (!rms) want_stats.push_back(want.mean[t]);
          want_stats.push_back(want.inverse[t]);
        }
        REQUIRE_SAME(want_stats, stats);
        Values want_dx = reference::norm_input(dy, x, gamma, want, !rms, b * s, h);
        for (size_t i = 0; i < want_dx.size(); ++i) want_dx[i] = residual[i] + want_dx[i];
        REQUIRE_SAME(want_dx, dx);
        REQUIRE_SAME(tree_of(b,
                             [&](int64_t n) {
                               const reference::Normed<float> one{{}, part(want.mean, n, s), part(want.inverse, n, s)};
                               return reference::norm_weight(part(dy, n, s * h), part(x, n, s * h), one, s, h);
                             }),
                     dgamma);
        if (!rms) REQUIRE_SAME(tree_of(b, [&](int64_t n) { return reference::bias_gradient(part(dy, n, s * h), s, h); }), dbeta);
      }
  });
}

TEST_CASE("rope and attention, grouped queries included") {
  each_variant([](const kernels::Kernels& k) {
    for (const reference::Heads heads :
         {reference::Heads{1, 1, 2}, {4, 4, 8}, {8, 4, 6}, {6, 2, 16}, {3, 1, 34}, {2, 2, 6, 4}, {4, 2, 8, 18}})
      for (const int64_t s : {1, 5, 24, 37}) {
        const int64_t b = 2, width = heads.width(), inner = heads.heads * heads.of_value();
        INFO(fmt::format("heads {} kv {} dim {} values {} s {}", heads.heads, heads.kv_heads, heads.dim, heads.of_value(), s));
        const Values qkv = normal(b * s * width, 1), dout = normal(b * s * inner, 2);
        const int q = static_cast<int>(heads.heads), kv = static_cast<int>(heads.kv_heads), d = static_cast<int>(heads.dim),
                  v = static_cast<int>(heads.values);
        for (const bool backward : {false, true}) {
          if (v != 0) break;  // rotated rows have values of one width
          Values turned = qkv, want;
          k.rope({turned.data(), b, s, q, kv, d, 0, 10000.0f, backward, nullptr});
          for (int64_t n = 0; n < b; ++n) {
            Values one = part(qkv, n, s * width);
            reference::rope(one, heads, 10000.0f, backward ? -1 : 1, s);
            append(want, one);
          }
          REQUIRE_SAME(want, turned);
        }
        Values o = poisoned(b * s * inner), lse = poisoned(b * heads.heads * s), dqkv = poisoned(b * s * width);
        const kernels::AttentionShape shape{b, s, q, kv, d, {}, true, nullptr, v};
        kernels::AttentionForward f{shape, qkv.data(), o.data(), lse.data(), nullptr};
        const Scratch f_scratch(attention_scratch_bytes(f));
        f.scratch = f_scratch.memory();
        k.attention_forward(f);
        kernels::AttentionInput i{shape, dout.data(), o.data(), lse.data(), qkv.data(), dqkv.data(), nullptr};
        const Scratch i_scratch(attention_scratch_bytes(i));
        i.scratch = i_scratch.memory();
        k.attention_input(i);
        Values want_o, want_lse, want_dqkv;
        for (int64_t n = 0; n < b; ++n) {
          const Values one = part(qkv, n, s * width);
          const auto want = reference::attention(one, heads, s);
          append(want_o, want.o);
          append(want_lse, want.lse);
          append(want_dqkv, reference::attention_input(part(dout, n, s * inner), want, one, heads, s));
        }
        REQUIRE_SAME(want_o, o);
        REQUIRE_SAME(want_lse, lse);
        REQUIRE_SAME(want_dqkv, dqkv);
      }
  });
}

namespace {

/// A sequence of tokens in an order, its queries and its packed keys and values.
struct Sequence {
  reference::Heads heads;
  int64_t s;
  TokenOrder order;
  Values qkv, dout;
  int64_t window = 0;
  reference::Text text() const {
    reference::Text text(order);
    text.window = window;
    return text;
  }
  int64_t q_width() const { return heads.heads * heads.dim; }
  int64_t o_width() const { return heads.heads * heads.of_value(); }
  int64_t kv_width() const { return heads.kv_heads * (heads.dim + heads.of_value()); }
  Values queries() const {
    Values q;
    for (int64_t t = 0; t < s; ++t)
      for (int64_t head = 0; head < heads.heads; ++head)
        for (int64_t c = 0; c < heads.dim; ++c) q.push_back(qkv[static_cast<size_t>(t * heads.width() + heads.query(head) + c)]);
    return q;
  }
  Values keys() const {
    Values kv;
    for (int64_t t = 0; t < s; ++t)
      for (int64_t group = 0; group < heads.kv_heads; ++group)
        for (int64_t c = 0; c < heads.dim + heads.of_value(); ++c)
          kv.push_back(qkv[static_cast<size_t>(t * heads.width() + heads.key(group) + c)]);
    return kv;
  }
  kernels::AttentionBlockShape block(int64_t parts, int64_t query, int64_t key, bool canonical) const {
    const int64_t n = s / parts;
    return {1,
            n,
            key < 0 ? s : n,
            static_cast<int>(heads.heads),
            static_cast<int>(heads.kv_heads),
            static_cast<int>(heads.dim),
            s,
            query * n,
            key < 0 ? 0 : key * n,
            order,
            canonical,
            nullptr,
            static_cast<int>(heads.values),
            window};
  }
};

Sequence sequence(reference::Heads heads, int64_t s, TokenOrder order) {
  return {heads, s, order, normal(s * heads.width(), 1), normal(s * heads.heads * heads.of_value(), 2)};
}

/// The orders that `parts` ranks may hold a sequence in.
std::vector<TokenOrder> orders(int parts) {
  using Kind = TokenOrder::Kind;
  return {{}, {Kind::kZigzag, parts}, {Kind::kStriped, parts}};
}

/// o, lse and dqkv, in the layout of the whole, from blocks on `parts` ranks.
struct Blocks {
  Values o, lse, dq, dkv;
};

template <class Args>
void run(void (*kernel)(const Args&), Args args) {
  const Scratch scratch(attention_scratch_bytes(args));
  args.scratch = scratch.memory();
  kernel(args);
}

/// Canonical: partial results of every block, merged.
Blocks merged(const kernels::Kernels& k, const Sequence& x, int64_t parts) {
  const int64_t n = x.s / parts, d = x.heads.dim, heads = x.heads.heads, width = x.q_width(), o_width = x.o_width();
  const Values q = x.queries(), kv = x.keys();
  Blocks out{poisoned(x.s * o_width), poisoned(heads * x.s), {}, {}};
  std::vector<std::vector<Values>> dkv_parts(static_cast<size_t>(parts));  // of each rank's keys, by the queries of each rank
  const int q_heads = static_cast<int>(heads), kv_heads = static_cast<int>(x.heads.kv_heads),
            values = static_cast<int>(x.heads.of_value());
  for (int64_t rank = 0; rank < parts; ++rank) {
    const Values mine = part(q, rank, n * width), dout = part(x.dout, rank, n * o_width);
    std::vector<Values> o, sums;
    kernels::AttentionMergeForward merge{1, n, q_heads, values, static_cast<int>(parts)};
    for (int64_t block = 0; block < parts; ++block) {
      const Values keys = part(kv, block, n * x.kv_width());
      o.push_back(poisoned(n * o_width));
      sums.push_back(poisoned(2 * heads * n));
      run(k.attention_block_forward, kernels::AttentionBlockForward{x.block(parts, rank, block, true), mine.data(), keys.data(),
                                                                    o.back().data(), nullptr, sums.back().data()});
    }
    for (size_t i = 0; i < o.size(); ++i) merge.part_o[i] = o[i].data(), merge.part_sums[i] = sums[i].data();
    Values lse = poisoned(heads * n);
    merge.o = out.o.data() + rank * n * o_width;
    merge.lse = lse.data();
    k.attention_merge_forward(merge);
    for (int64_t head = 0; head < heads; ++head)
      for (int64_t t = 0; t < n; ++t)
        out.lse[static_cast<size_t>(head * x.s + rank * n + t)] = lse[static_cast<size_t>(head * n + t)];
    std::vector<Values> dq;
    for (int64_t block = 0; block < parts; ++block) {
      const Values keys = part(kv, block, n * x.kv_width());
      dq.push_back(poisoned(n * width));
      auto& dkv = dkv_parts[static_cast<size_t>(block)].emplace_back(poisoned(n * heads * (d + x.heads.of_value())));
      run(k.attention_block_input,
          kernels::AttentionBlockInput{x.block(parts, rank, block, true), dout.data(), merge.o, lse.data(), mine.data(),
                                       keys.data(), dq.back().data(), dkv.data(), false, false, true});
    }
    Values sum = poisoned(n * width);
    kernels::AttentionMergeInput m{n, q_heads, q_heads, d, static_cast<int>(parts)};
    for (size_t i = 0; i < dq.size(); ++i) m.part[i] = dq[i].data();
    m.y = sum.data();
    k.attention_merge_input(m);
    append(out.dq, sum);
  }
  for (const auto& from : dkv_parts) {
    Values sum = poisoned(n * x.kv_width());
    kernels::AttentionMergeInput m{n, q_heads, kv_heads, d + x.heads.of_value(), static_cast<int>(parts)};
    for (size_t i = 0; i < from.size(); ++i) m.part[i] = from[i].data();
    m.y = sum.data();
    k.attention_merge_input(m);
    append(out.dkv, sum);
  }
  return out;
}

/// Fast: running results, blocks in the order in which a ring brings them; or all keys at once.
Blocks running(const kernels::Kernels& k, const Sequence& x, int64_t parts, bool whole) {
  const int64_t n = x.s / parts, heads = x.heads.heads, width = x.q_width(), o_width = x.o_width(), kv_width = x.kv_width();
  const Values q = x.queries(), kv = x.keys();
  Blocks out{poisoned(x.s * o_width), poisoned(heads * x.s), {}, Values(kv.size(), 0.0f)};
  for (int64_t rank = 0; rank < parts; ++rank) {
    const Values mine = part(q, rank, n * width), dout = part(x.dout, rank, n * o_width);
    Values lse = poisoned(heads * n), dq = poisoned(n * width);
    float* o = out.o.data() + rank * n * o_width;
    const auto keys_of = [&](int64_t turn) { return whole ? int64_t{-1} : (rank - turn + parts) % parts; };
    for (int64_t turn = 0; turn < (whole ? 1 : parts); ++turn) {
      const int64_t block = keys_of(turn);
      const Values keys = whole ? kv : part(kv, block, n * kv_width);
      run(k.attention_block_forward, kernels::AttentionBlockForward{x.block(parts, rank, block, false), mine.data(), keys.data(), o,
                                                                    lse.data(), nullptr, turn > 0});
    }
    for (int64_t turn = 0; turn < (whole ? 1 : parts); ++turn) {
      const int64_t block = keys_of(turn);
      const Values keys = whole ? kv : part(kv, block, n * kv_width);
      run(k.attention_block_input,
          kernels::AttentionBlockInput{x.block(parts, rank, block, false), dout.data(), o, lse.data(), mine.data(), keys.data(),
                                       dq.data(), out.dkv.data() + (whole ? 0 : block * n * kv_width), turn > 0, true, false});
    }
    append(out.dq, dq);
    for (int64_t head = 0; head < heads; ++head)
      for (int64_t t = 0; t < n; ++t)
        out.lse[static_cast<size_t>(head * x.s + rank * n + t)] = lse[static_cast<size_t>(head * n + t)];
  }
  return out;
}

/// The reference's dqkv taken apart.
Values queries_of(const Sequence& x, const Values& dqkv) { return Sequence{x.heads, x.s, x.order, dqkv, {}}.queries(); }
Values keys_of(const Sequence& x, const Values& dqkv) { return Sequence{x.heads, x.s, x.order, dqkv, {}}.keys(); }

/// The largest difference, relative to the largest element.
double error(const Values& got, const reference::Tensor<double>& want) {
  double largest = 0, most = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    largest = std::max(largest, std::abs(want[i]));
    most = std::max(most, std::abs(want[i] - static_cast<double>(got[i])));
    if (std::isnan(got[i])) return 1;
  }
  return most / largest;
}
reference::Tensor<double> wide(const Values& v) { return {v.begin(), v.end()}; }

}  // namespace

TEST_CASE("attention: a sequence in any order, and cut in blocks over 1 to 16 ranks, has the bits of the reference") {
  each_variant([](const kernels::Kernels& k) {
    for (const reference::Heads heads : {reference::Heads{4, 2, 6}, {3, 1, 17}, {2, 2, 10, 7}})
      for (const int parts : {1, 2, 4, 8, 16})
        for (const TokenOrder& order : orders(parts))
          for (const auto& [s, window] : {std::pair<int64_t, int64_t>{32, 0}, {96, 0}, {32, 7}, {96, 25}, {32, 1}}) {
            if (s == 96 && (parts == 2 || parts == 8)) continue;
            INFO(fmt::format("heads {} kv {} dim {} s {} window {} parts {} order {}", heads.heads, heads.kv_heads, heads.dim, s,
                             window, parts, static_cast<int>(order.kind)));
            Sequence x = sequence(heads, s, order);
            x.window = window;
            const auto want = reference::attention(x.qkv, heads, s, x.text());
            const Values want_dqkv = reference::attention_input(x.dout, want, x.qkv, heads, s, x.text());
            const kernels::AttentionShape shape{1,
                                                s,
                                                static_cast<int>(heads.heads),
                                                static_cast<int>(heads.kv_heads),
                                                static_cast<int>(heads.dim),
                                                order,
                                                true,
                                                nullptr,
                                                static_cast<int>(heads.values),
                                                window};
            Values o = poisoned(s * x.o_width()), lse = poisoned(heads.heads * s), dqkv = poisoned(s * heads.width());
            run(k.attention_forward, kernels::AttentionForward{shape, x.qkv.data(), o.data(), lse.data()});
            run(k.attention_input, kernels::AttentionInput{shape, x.dout.data(), o.data(), lse.data(), x.qkv.data(), dqkv.data()});
            REQUIRE_SAME(want.o, o);
            REQUIRE_SAME(want.lse, lse);
            REQUIRE_SAME(want_dqkv, dqkv);
            const Blocks blocks = merged(k, x, parts);
            REQUIRE_SAME(want.o, blocks.o);
            REQUIRE_SAME(want.lse, blocks.lse);
            REQUIRE_SAME(queries_of(x, want_dqkv), blocks.dq);
            REQUIRE_SAME(keys_of(x, want_dqkv), blocks.dkv);
          }
  });
}

TEST_CASE("attention: running blocks meet fp64, in any order, on any number of ranks, with ranks whose blocks are wholly masked") {
  each_variant([](const kernels::Kernels& k) {
    for (const reference::Heads heads : {reference::Heads{4, 2, 6}, {2, 2, 33}, {2, 2, 12, 20}})
      for (const int parts : {1, 2, 3, 4, 6})
        for (const TokenOrder& order : orders(parts)) {
          const int64_t s = 36;
          if (s % order.granule() != 0) continue;
          for (const int64_t window : {0, 5, 19}) {
            INFO(fmt::format("heads {} kv {} dim {} window {} parts {} order {}", heads.heads, heads.kv_heads, heads.dim, window,
                             parts, static_cast<int>(order.kind)));
            Sequence x = sequence(heads, s, order);
            x.window = window;
            const auto want = reference::attention(wide(x.qkv), heads, s, x.text());
            const auto dqkv = reference::attention_input(wide(x.dout), want, wide(x.qkv), heads, s, x.text());
            const auto apart = [&](bool keys) {  // of a tensor in fp64, through indices
              reference::Tensor<double> out;
              for (int64_t t = 0; t < s; ++t)
                for (int64_t h = 0; h < (keys ? heads.kv_heads : heads.heads); ++h)
                  for (int64_t c = 0; c < heads.dim + (keys ? heads.of_value() : 0); ++c)
                    out.push_back(dqkv[static_cast<size_t>(t * heads.width() + (keys ? heads.key(h) : heads.query(h)) + c)]);
              return out;
            };
            for (const bool whole : {false, true}) {
              const Blocks got = running(k, x, parts, whole);
              REQUIRE(error(got.o, want.o) < 1e-5);
              REQUIRE(error(got.lse, want.lse) < 1e-5);
              REQUIRE(error(got.dq, apart(false)) < 1e-5);
              REQUIRE(error(got.dkv, apart(true)) < 1e-5);
            }
          }
        }
  });
}

TEST_CASE("linear and embedding: gradients of a sequence cut over ranks are subtrees of the whole's") {
  each_variant([](const kernels::Kernels& k) {
    const int64_t b = 2, s = 48, in = 21, out = 19, vocab = 7;
    const Values x = normal(b * s * in, 1), dy = normal(b * s * out, 2);
    std::vector<int32_t> ids;
    for (int64_t i = 0; i < b * s; ++i)
      ids.push_back(static_cast<int32_t>(random_bits({1, RandomUse::kShuffle, 0, 0}, static_cast<uint64_t>(i)) % vocab));
    const auto rows = [&](const auto& v, int64_t n, int64_t begin, int64_t count, int64_t width) {
      return std::vector(v.begin() + (n * s + begin) * width, v.begin() + (n * s + begin + count) * width);
    };
    for (int64_t n = 0; n < b; ++n)
      for (const int64_t parts : {1, 2, 4, 8, 16}) {
        INFO("parts " << parts);
        const int64_t length = s / parts;
        const auto weight = [&](int64_t rank) {
          const Values mine = rows(x, n, rank * length, length, in), dmine = rows(dy, n, rank * length, length, out);
          Values dw = poisoned(out * in);
          kernels::LinearWeight g{mine.data(), dmine.data(), dw.data(), nullptr, {1, length, {rank * length, s}},
                                  in,          out,          false,     true,    nullptr};
          const Scratch scratch(linear_scratch_bytes(g));
          g.scratch = scratch.memory();
          k.linear_weight(g);
          return dw;
        };
        const auto embedding = [&](int64_t rank) {
          const Values dmine = rows(dy, n, rank * length, length, out);
          const std::vector<int32_t> some = rows(ids, n, rank * length, length, 1);
          Values table = poisoned(vocab * out);
          kernels::EmbedWeight w{some.data(), dmine.data(), table.data(),      1, length, out, 0, vocab,
                                 false,       nullptr,      {rank * length, s}};
          const Scratch scratch(embed_scratch_bytes(w));
          w.scratch = scratch.memory();
          k.embed_weight(w);
          return table;
        };
        REQUIRE_SAME(reference::linear_weight(rows(x, n, 0, s, in), rows(dy, n, 0, s, out), s, in, out), tree_of(parts, weight));
        REQUIRE_SAME(reference::embedding_weight(ids.data() + n * s, rows(dy, n, 0, s, out), s, out, vocab),
                     tree_of(parts, embedding));
      }
  });
}

TEST_CASE("activations, residual and dropout") {
  each_variant([](const kernels::Kernels& k) {
    for (const int64_t n : {1, 16, 37, 200}) {
      INFO("n " << n);
      for (const bool swiglu : {false, true}) {
        const Values u = normal(swiglu ? 2 * n : n, 1, 3.0), da = normal(n, 2);
        Values a = poisoned(n), du = poisoned(static_cast<int64_t>(u.size()));
        k.activation_forward({u.data(), a.data(), n, swiglu});
        k.activation_input({da.data(), u.data(), du.data(), n, swiglu});
        REQUIRE_SAME(reference::activation(u, swiglu), a);
        REQUIRE_SAME(reference::activation_input(da, u, swiglu), du);
      }
      const Values x = normal(3 * n, 3), z = normal(3 * n, 4), bias = normal(n, 5);
      Values y = poisoned(3 * n), want(static_cast<size_t>(3 * n));
      k.residual_forward({x.data(), z.data(), bias.data(), y.data(), 3, n});
      for (size_t i = 0; i < want.size(); ++i) want[i] = x[i] + (z[i] + bias[i % static_cast<size_t>(n)]);
      REQUIRE_SAME(want, y);
      for (const float p : {0.0f, 0.1f, 0.25f, 0.5f, 0.9f}) {
        const RandomKey key{5, RandomUse::kDropout, 6, 3};
        Values dropped = x, kept = x;
        k.dropout({dropped.data(), 1, 3, n, 2, 0, 0, 0, 0, p, key});
        reference::dropout(kept, p, key, static_cast<uint64_t>(2 * 3 * n));
        REQUIRE_SAME(kept, dropped);
      }
    }
  });
}

TEST_CASE("embedding, positions and their gradients") {
  each_variant([](const kernels::Kernels& k) {
    for (const auto& [b, s, h, vocab] : kSizes) {
      INFO(fmt::format("b{} s{} h{} V{}", b, s, h, vocab));
      std::vector<int32_t> ids;
      for (int64_t i = 0; i < b * s; ++i)
        ids.push_back(static_cast<int32_t>(random_bits({1, RandomUse::kShuffle, 0, 0}, static_cast<uint64_t>(i)) %
                                           static_cast<uint64_t>(vocab)));
      const Values dx = normal(b * s * h, 1);
      Values dtable = poisoned(vocab * h), dpositions = poisoned(s * h);
      kernels::EmbedWeight w{ids.data(), dx.data(), dtable.data(), b, s, h, 0, vocab, false, nullptr};
      const Scratch scratch(embed_scratch_bytes(w));
      w.scratch = scratch.memory();
      k.embed_weight(w);
      k.positions_weight({dx.data(), dpositions.data(), b, s, h, false});
      REQUIRE_SAME(
          tree_of(b, [&](int64_t n) { return reference::embedding_weight(ids.data() + n * s, part(dx, n, s * h), s, h, vocab); }),
          dtable);
      REQUIRE_SAME(tree_of(b, [&](int64_t n) { return part(dx, n, s * h); }), dpositions);
    }
  });
}

TEST_CASE("optimizers, with and without weight decay, over several steps") {
  each_variant([](const kernels::Kernels& k) {
    for (const float decay : {0.0f, 0.1f}) {
      const int64_t n = 77;
      Values w = normal(n, 1), want_w = w, sgd_w = w, want_sgd = w;
      Values m(w.size(), 0.0f), v = m, want_m = m, want_v = m;
      Values lion_w = w, want_lion = w, lion_m = m, want_lion_m = m;
      for (int64_t step = 0; step < 4; ++step) {
        INFO("step " << step << " decay " << decay);
        const Values g = normal(n, 2 + static_cast<uint32_t>(step), 0.1);
        k.sgd({g.data(), sgd_w.data(), n, 0.3f, decay});
        reference::sgd(want_sgd, g, 0.3f, decay);
        REQUIRE_SAME(want_sgd, sgd_w);
        k.adamw({g.data(), w.data(), m.data(), v.data(), n, step, 0.01f, 0.9f, 0.95f, 1e-8f, decay});
        reference::adamw(want_w, want_m, want_v, g, step, {0.01f, 0.9f, 0.95f, 1e-8f, decay});
        REQUIRE_SAME(want_w, w);
        REQUIRE_SAME(want_m, m);
        REQUIRE_SAME(want_v, v);
        k.lion({g.data(), lion_w.data(), lion_m.data(), n, 0.01f, 0.9f, 0.99f, decay});
        reference::lion(want_lion, want_lion_m, g, {0.01f, 0.9f, 0.99f, decay});
        REQUIRE_SAME(want_lion, lion_w);
        REQUIRE_SAME(want_lion_m, lion_m);
      }
    }
  });
}

TEST_CASE("adamw on moments in 8 bits: the codes, blocks and scales of the reference, over several steps") {
  each_variant([](const kernels::Kernels& k) {
    for (const int64_t n : {1, 77, 2048, 5000}) {
      const auto size = static_cast<size_t>(n), blocks = (size + 2047) / 2048;
      Values w = normal(n, 1), want_w = w, want_m(size, 0.0f), want_v = want_m;
      std::vector<uint8_t> m(size), v(size);
      Values m_scale(blocks, 0.0f), v_scale = m_scale, scratch(4096);
      for (int64_t step = 0; step < 4; ++step) {
        INFO("n " << n << " step " << step);
        Values g = normal(n, 2 + static_cast<uint32_t>(step), 0.1);
        if (step == 2) std::fill(g.begin(), g.begin() + n / 2, 0.0f);
        k.adamw8bit({.grad = g.data(),
                     .param = w.data(),
                     .m = m.data(),
                     .v = v.data(),
                     .m_scale = m_scale.data(),
                     .v_scale = v_scale.data(),
                     .scratch = scratch.data(),
                     .n = n,
                     .step = step,
                     .learning_rate = 0.01f,
                     .weight_decay = 0.1f});
        reference::adamw(want_w, want_m, want_v, g, step, {0.01f, 0.9f, 0.95f, 1e-8f, 0.1f});
        for (size_t b = 0; b < blocks; ++b) {
          const auto first = static_cast<std::ptrdiff_t>(2048 * b), last = std::min<std::ptrdiff_t>(first + 2048, n);
          for (const auto& [moment, codes, scale, has_sign] :
               {std::tuple{&want_m, &m, m_scale[b], true}, {&want_v, &v, v_scale[b], false}}) {
            const Values block = reference::stored_in_8_bits(Values(moment->begin() + first, moment->begin() + last), has_sign);
            const std::vector<float> numbers = reference::moment_numbers(has_sign);
            for (std::ptrdiff_t i = first; i < last; ++i)
              REQUIRE(numbers[(*codes)[static_cast<size_t>(i)]] * scale == block[static_cast<size_t>(i - first)]);
            std::copy(block.begin(), block.end(), moment->begin() + first);
          }
        }
        REQUIRE_SAME(want_w, w);
      }
    }
  });
}

TEST_CASE("cross-entropy") {
  each_variant([](const kernels::Kernels& k) {
    for (const auto& [b, s, unused, vocab] : kSizes) {
      INFO(fmt::format("b{} s{} V{}", b, s, vocab));
      const Values logits = normal(b * s * vocab, 1, 4.0);
      std::vector<int32_t> targets;
      for (int64_t i = 0; i < b * s; ++i)
        targets.push_back(static_cast<int32_t>(random_bits({2, RandomUse::kShuffle, 0, 0}, static_cast<uint64_t>(i)) %
                                               static_cast<uint64_t>(vocab)));
      Values dlogits = logits, nll = poisoned(b), want_dlogits, want_nll;
      kernels::CrossEntropy c;
      c.logits = dlogits.data();
      c.targets = targets.data();
      c.nll = nll.data();
      c.tokens = {b, s, {}};
      c.vocab = vocab;
      c.loss_tokens = 3 * b * s;
      k.cross_entropy_fused(c);
      for (int64_t n = 0; n < b; ++n) {
        const auto want = reference::cross_entropy(part(logits, n, s * vocab), targets.data() + n * s, 3 * b * s, s, vocab, vocab);
        append(want_dlogits, want.dlogits);
        want_nll.push_back(want.nll);
      }
      REQUIRE_SAME(want_dlogits, dlogits);
      REQUIRE_SAME(want_nll, nll);
    }
  });
}

}  // namespace shardlab::testing::of_orders
