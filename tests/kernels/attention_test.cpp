#include "kernels/elementary.h"
#include "plan/base/documents.h"
#include "tests/kernels/support.h"
#include "tests/namespaces.h"

namespace shardlab::testing::of_attention {
namespace {

using kernels::AttentionShape;

const AttentionShape kShapes[] = {{1, 1, 1, 1, 1},   {1, 3, 2, 1, 3},  {2, 4, 1, 1, 16}, {2, 17, 4, 2, 6},
                                  {1, 19, 3, 3, 17}, {1, 33, 2, 2, 8}, {1, 6, 6, 2, 70}};

int64_t query_at(const AttentionShape& s, int head) {
  const int q = s.heads / s.kv_heads;
  return int64_t{head / q * (q + 2) + head % q} * s.head_dim;
}
int64_t key_at(const AttentionShape& s, int head) {
  const int q = s.heads / s.kv_heads;
  return int64_t{head / q * (q + 2) + q} * s.head_dim;
}

/// The first key that query i sees, of a sequence that lies in the order of its text.
int64_t first_key(const AttentionShape& s, int64_t i) { return s.window == 0 ? 0 : std::max<int64_t>(0, i - s.window + 1); }

/// o, then lse, in fp64: the definition, one row of scores at a time.
Doubles forward64(const Doubles& qkv, const AttentionShape& s) {
  Doubles o(s.sequences * s.tokens * s.out_width()), lse;
  for (int64_t b = 0; b < s.sequences; ++b)
    for (int head = 0; head < s.heads; ++head)
      for (int64_t i = 0; i < s.tokens; ++i) {
        const double* q = qkv.data() + (b * s.tokens + i) * s.qkv_width() + query_at(s, head);
        Doubles p(first_key(s, i), 0);
        double sum = 0;
        for (int64_t j = first_key(s, i); j <= i; ++j) {
          const double* k = qkv.data() + (b * s.tokens + j) * s.qkv_width() + key_at(s, head);
          double score = 0;
          for (int d = 0; d < s.head_dim; ++d) score += q[d] * k[d];
          p.push_back(std::exp(score / std::sqrt(static_cast<double>(s.head_dim))));
          sum += p.back();
        }
        lse.push_back(std::log(sum));
        for (int64_t j = 0; j <= i; ++j)
          for (int d = 0; d < s.head_dim; ++d)
            o[(b * s.tokens + i) * s.out_width() + head * s.head_dim + d] +=
                p[j] / sum * qkv[(b * s.tokens + j) * s.qkv_width() + key_at(s, head) + s.head_dim + d];
      }
  o.insert(o.end(), lse.begin(), lse.end());
  return o;
}

/// o, then lse.
Floats forward(const kernels::Kernels& k, const Floats& qkv, const AttentionShape& s) {
  Floats o = poisoned(s.sequences * s.tokens * s.out_width()), lse = poisoned(s.sequences * s.heads * s.tokens);
  kernels::AttentionForward a{.shape = s, .qkv = qkv.data(), .o = o.data(), .lse = lse.data()};
  Scratch scratch(attention_scratch_bytes(a));
  a.scratch = scratch.data();
  k.attention_forward(a);
  REQUIRE(scratch.intact());
  return joined({o, lse});
}
Floats backward(const kernels::Kernels& k, const Floats& qkv, const Floats& dout, const AttentionShape& s) {
  const Floats saved = forward(k, qkv, s);
  Floats dqkv = poisoned(static_cast<int64_t>(qkv.size()));
  kernels::AttentionInput a{.shape = s,
                            .dout = dout.data(),
                            .o = saved.data(),
                            .lse = saved.data() + s.sequences * s.tokens * s.out_width(),
                            .qkv = qkv.data(),
                            .dqkv = dqkv.data()};
  Scratch scratch(attention_scratch_bytes(a));
  a.scratch = scratch.data();
  k.attention_input(a);
  REQUIRE(scratch.intact());
  return dqkv;
}

/// Windows of one token, of fewer and of more than are worked on together, and of as many as there are.
std::vector<std::pair<AttentionShape, int64_t>> shapes_and_windows() {
  std::vector<std::pair<AttentionShape, int64_t>> all;
  for (const AttentionShape& s : kShapes)
    for (const int64_t window : {0, 1, 3, 6, 17})
      if (window <= s.tokens) all.emplace_back(s, window);
  return all;
}

}  // namespace

TEST_CASE("attention: F equals fp64, I equals finite differences, on every variant, with a window and without") {
  for (const auto& [shape, window] : shapes_and_windows()) {
    AttentionShape s = shape;
    s.window = window;
    INFO("sequences " << s.sequences << " tokens " << s.tokens << " heads " << s.heads << " kv_heads " << s.kv_heads << " head_dim "
                      << s.head_dim << " window " << s.window);
    const int64_t n = s.sequences * s.tokens * s.qkv_width(), out = s.sequences * s.tokens * s.out_width();
    const Floats qkv = random_floats(n, 1, 2.0f), dout = random_floats(out, 2);
    const auto f = [&](const Doubles& at) { return part_of(forward64(at, s), 0, out); };
    REQUIRE(difference(on_every_variant([&](const kernels::Kernels& k) { return forward(k, qkv, s); }), forward64(wide(qkv), s),
                       kTolerance) == "");
    const Doubles want = numeric_gradient(f, wide(qkv), wide(dout));
    REQUIRE(difference(on_every_variant([&](const kernels::Kernels& k) { return backward(k, qkv, dout, s); }), want, kTolerance) ==
            "");
  }
}

namespace {

/// dqkv of fast mode by docs/canonical-order.md, in scalar loops, from the o and lse that were saved.
Floats backward_by_chains(const Floats& qkv, const Floats& dout, const Floats& saved, const AttentionShape& s) {
  Floats dqkv(qkv.size(), 0.0f);
  const int64_t d = s.head_dim, width = s.qkv_width(), out = s.out_width();
  const float scale = 1.0f / std::sqrt(static_cast<float>(d));
  for (int64_t b = 0; b < s.sequences; ++b)
    for (int head = 0; head < s.heads; ++head)
      for (int64_t i = 0; i < s.tokens; ++i) {
        const int64_t row = (b * s.tokens + i) * width + query_at(s, head), at = (b * s.tokens + i) * out + head * d;
        const float lse = saved[static_cast<size_t>(s.sequences * s.tokens * out + (b * s.heads + head) * s.tokens + i)];
        float lane[16] = {};
        for (int64_t e = 0; e < d; ++e) lane[e % 16] += dout[at + e] * saved[at + e];
        for (int w = 8; w > 0; w /= 2)
          for (int j = 0; j < w; ++j) lane[j] = lane[2 * j] + lane[2 * j + 1];
        for (int64_t j = first_key(s, i); j <= i; ++j) {
          const int64_t key = (b * s.tokens + j) * width + key_at(s, head), value = key + d;
          float score = 0, dp = 0;
          for (int64_t e = 0; e < d; ++e) score = std::fma(qkv[row + e], qkv[key + e], score);
          for (int64_t e = 0; e < d; ++e) dp = std::fma(dout[at + e], qkv[value + e], dp);
          const float p = elementary::exp(score * scale - lse), ds = (p * (dp - lane[0])) * scale;
          for (int64_t e = 0; e < d; ++e) {
            dqkv[row + e] = std::fma(ds, qkv[key + e], dqkv[row + e]);
            dqkv[key + e] = std::fma(ds, qkv[row + e], dqkv[key + e]);
            dqkv[value + e] = std::fma(p, dout[at + e], dqkv[value + e]);
          }
        }
      }
  return dqkv;
}

}  // namespace

// As many tokens as several blocks of rows and tiles of keys have, with every remainder; heads whose vectors are whole, and others.
TEST_CASE("attention: over many blocks of rows and keys F equals fp64 and I has the bits of its chains, on every variant") {
  for (const AttentionShape& shape : {AttentionShape{1, 187, 1, 1, 16}, {1, 130, 4, 2, 32}, {1, 270, 1, 1, 48}, {1, 77, 2, 2, 10}})
    for (const int64_t window : {0, 70}) {
      AttentionShape s = shape;
      s.window = window;
      INFO("tokens " << s.tokens << " head_dim " << s.head_dim << " window " << s.window);
      const Floats qkv = random_floats(s.tokens * s.qkv_width(), 1, 2.0f), dout = random_floats(s.tokens * s.out_width(), 2);
      const Floats saved = on_every_variant([&](const kernels::Kernels& k) { return forward(k, qkv, s); });
      REQUIRE(difference(saved, forward64(wide(qkv), s), kTolerance) == "");
      const Floats want = backward_by_chains(qkv, dout, saved, s);
      const Floats got = on_every_variant([&](const kernels::Kernels& k) { return backward(k, qkv, dout, s); });
      for (size_t i = 0; i < want.size(); ++i)
        if (got[i] != want[i]) FAIL("element " << i << ": " << got[i] << ", not " << want[i]);
    }
}

TEST_CASE("attention: scores far from 0 neither overflow nor lose the sum") {
  const AttentionShape s{1, 40, 1, 1, 8};
  const Floats qkv = random_floats(s.tokens * s.qkv_width(), 3, 60.0f);
  const Floats got = on_every_variant([&](const kernels::Kernels& k) { return forward(k, qkv, s); });
  Doubles want = forward64(wide(qkv), s);  // fp64 holds e^(60 * 60 * 8 / 2.8) only where scores stay below 709
  for (size_t i = 0; i < got.size(); ++i) REQUIRE(std::isfinite(got[i]));
  for (int64_t i = 0; i < s.tokens * s.head_dim; ++i)
    if (std::isfinite(want[i])) REQUIRE(std::abs(got[i] - want[i]) < 1e-2 * 60);
}

TEST_CASE("attention: a head's and a sequence's bits do not depend on which others are computed with it") {
  const AttentionShape s{2, 21, 4, 2, 10};
  const Floats qkv = random_floats(s.sequences * s.tokens * s.qkv_width(), 4),
               dout = random_floats(s.sequences * s.tokens * s.out_width(), 5);
  const AttentionShape half{2, 21, 2, 1, 10};
  for (const kernels::Kernels* k : variants_here()) {
    const Floats all = forward(*k, qkv, s), dall = backward(*k, qkv, dout, s);
    for (int rank = 0; rank < 2; ++rank) {
      const Floats mine = columns_of(qkv, s.qkv_width(), rank * half.qkv_width(), (rank + 1) * half.qkv_width());
      const Floats dmine = columns_of(dout, s.out_width(), rank * half.out_width(), (rank + 1) * half.out_width());
      const int64_t out = s.sequences * s.tokens * s.out_width(), half_out = out / 2;
      REQUIRE(bit_difference(
                  part_of(forward(*k, mine, half), 0, half_out),
                  columns_of(part_of(all, 0, out), s.out_width(), rank * half.out_width(), (rank + 1) * half.out_width())) == "");
      REQUIRE(bit_difference(backward(*k, mine, dmine, half),
                             columns_of(dall, s.qkv_width(), rank * half.qkv_width(), (rank + 1) * half.qkv_width())) == "");
    }
    const AttentionShape one{1, 21, 4, 2, 10};
    const int64_t n = s.tokens * s.qkv_width(), out = s.tokens * s.out_width();
    REQUIRE(bit_difference(backward(*k, part_of(qkv, n, 2 * n), part_of(dout, out, 2 * out), one), part_of(dall, n, 2 * n)) == "");
  }
}

namespace {

/// Lengths of documents that fill sequences of 23 tokens.
const std::vector<std::vector<int64_t>> kDocuments = {{23}, {1, 22}, {5, 1, 1, 9, 7}, {16, 7}, {8, 15}};

/// Positions in documents, by position in the text.
std::vector<int32_t> positions_of(const std::vector<int64_t>& documents) {
  std::vector<int32_t> positions;
  for (const int64_t n : documents)
    for (int64_t i = 0; i < n; ++i) positions.push_back(static_cast<int32_t>(i));
  return positions;
}

}  // namespace

TEST_CASE("attention of packed documents: in fast mode the bits of each document as a sequence of its own") {
  for (const auto& first : kDocuments)
    for (const auto& second : {kDocuments[2], kDocuments[0]}) {
      AttentionShape s{2, 23, 4, 2, 10};
      std::vector<int32_t> positions = positions_of(first), others = positions_of(second);
      positions.insert(positions.end(), others.begin(), others.end());
      s.positions = positions.data();
      const Floats qkv = random_floats(s.sequences * s.tokens * s.qkv_width(), 4, 2.0f),
                   dout = random_floats(s.sequences * s.tokens * s.out_width(), 5);
      for (const kernels::Kernels* k : variants_here()) {
        const Floats all = forward(*k, qkv, s), gradients = backward(*k, qkv, dout, s);
        const int64_t out = s.sequences * s.tokens * s.out_width();
        for (int64_t b = 0; b < s.sequences; ++b)
          for (int64_t at = 0; const int64_t n : b == 0 ? first : second) {
            const AttentionShape one{1, n, s.heads, s.kv_heads, s.head_dim};
            const int64_t row = b * s.tokens + at;
            const auto rows = [&](const Floats& x, int64_t width) { return part_of(x, row * width, (row + n) * width); };
            const Floats own = rows(qkv, s.qkv_width()), alone = forward(*k, own, one);
            REQUIRE(bit_difference(part_of(alone, 0, n * s.out_width()), rows(part_of(all, 0, out), s.out_width())) == "");
            for (int head = 0; head < s.heads; ++head) {
              const int64_t lse = out + (b * s.heads + head) * s.tokens + at, own_lse = n * s.out_width() + head * n;
              REQUIRE(bit_difference(part_of(alone, own_lse, own_lse + n), part_of(all, lse, lse + n)) == "");
            }
            REQUIRE(bit_difference(backward(*k, own, rows(dout, s.out_width()), one), rows(gradients, s.qkv_width())) == "");
            at += n;
          }
      }
    }
}

TEST_CASE("attention: with a window as wide as the sequence every bit is as without") {
  for (const bool canonical : {false, true})
    for (AttentionShape s : kShapes) {
      s.canonical = canonical;
      const Floats qkv = random_floats(s.sequences * s.tokens * s.qkv_width(), 4, 2.0f),
                   dout = random_floats(s.sequences * s.tokens * s.out_width(), 5);
      AttentionShape wide = s, one_less = s;
      wide.window = s.tokens, one_less.window = s.tokens - 1;
      for (const kernels::Kernels* k : variants_here()) {
        REQUIRE(bit_difference(forward(*k, qkv, wide), forward(*k, qkv, s)) == "");
        REQUIRE(bit_difference(backward(*k, qkv, dout, wide), backward(*k, qkv, dout, s)) == "");
        if (s.tokens > 1) REQUIRE(bit_difference(forward(*k, qkv, one_less), forward(*k, qkv, s)) != "");
      }
    }
}

TEST_CASE("attention: a query sees as many keys of its document and window as are counted one by one, in every order and block") {
  using Kind = TokenOrder::Kind;
  const int64_t tokens = 32;
  const std::vector<int32_t> text = positions_of({5, 1, 11, 9, 6});
  for (const int64_t window : {0, 1, 2, 5, 9, 32})
    for (const bool canonical : {false, true})
      for (const int parts : {1, 2, 4})
        for (const Kind kind : {Kind::kContiguous, Kind::kZigzag, Kind::kStriped}) {
          const TokenOrder order{kind, kind == Kind::kContiguous ? 1 : parts};
          std::vector<int32_t> positions;
          for (int64_t place = 0; place < tokens; ++place)
            positions.push_back(text[static_cast<size_t>(order.position(place, tokens))]);
          const int64_t n = tokens / parts;
          for (int64_t query = 0; query < parts; ++query)
            for (int64_t key = 0; key < parts; ++key) {
              const kernels::AttentionBlockShape s{
                  1, n, n, 1, 1, 4, tokens, query * n, key * n, order, canonical, positions.data(), 0, window};
              // Scores of 0: the sum of exponentials counts the keys.
              const Floats q(static_cast<size_t>(n * 4)), kv(static_cast<size_t>(n * 8));
              Floats o = poisoned(n * 4), sums = poisoned(2 * n);
              kernels::AttentionBlockForward a{.shape = s, .q = q.data(), .kv = kv.data(), .o = o.data(), .sums = sums.data()};
              Scratch scratch(attention_scratch_bytes(a));
              a.scratch = scratch.data();
              kernels::kernels_for_this_processor().attention_block_forward(a);
              int64_t all = 0;
              for (int64_t i = 0; i < n; ++i) {
                int64_t seen = 0;
                const int64_t p = order.position(query * n + i, tokens),
                              document = p - positions[static_cast<size_t>(query * n + i)];
                const int64_t from = window == 0 ? document : std::max(document, p - window + 1);
                for (int64_t j = 0; j < n; ++j) {
                  const int64_t other = order.position(key * n + j, tokens);
                  seen += from <= other && other <= p;
                }
                REQUIRE(sums[static_cast<size_t>(2 * i + 1)] == static_cast<float>(seen));
                all += seen;
              }
              REQUIRE(seen_pairs(order, positions, query * n, n, key * n, n, window) == all);
            }
        }
}

}  // namespace shardlab::testing::of_attention
