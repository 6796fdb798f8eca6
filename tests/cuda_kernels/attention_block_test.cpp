// Attention of a sequence in parts: against the same kernels over the whole, bit for bit in canonical mode, and against fp64.
#include "tests/cuda_kernels/support.h"
#include "tests/deal.h"
#include "tests/namespaces.h"

namespace shardlab::testing::of_attention_block {
namespace {

using gpu::AttentionBlockShape;
using gpu::AttentionShape;
using Kind = TokenOrder::Kind;

/// What a pass over sequences is given.
struct Sequence {
  AttentionShape s;
  DType t;
  Floats qkv, dout;

  int64_t q_width() const { return int64_t{s.heads} * s.head_dim; }
  int64_t kv_width() const { return s.qkv_width() - q_width(); }
};

struct Result {
  Floats o, lse, dq, dkv;
};

/// qkv taken apart by the kernel under test, and put together again.
Result apart(const Sequence& x, const Floats& qkv, DType t) {
  const int64_t rows = x.s.sequences * x.s.tokens;
  const Array whole(qkv, t), q(Array::poison(rows * x.q_width()), t), kv(Array::poison(rows * x.kv_width()), t);
  table().split_heads({whole.out(), q.out(), kv.out(), rows, x.s.heads, x.s.kv_heads, x.s.head_dim, false, x.s.value_dim},
                      stream());
  const Array back(Array::poison(static_cast<int64_t>(qkv.size())), t);
  table().split_heads({back.out(), q.out(), kv.out(), rows, x.s.heads, x.s.kv_heads, x.s.head_dim, true, x.s.value_dim}, stream());
  REQUIRE(bit_difference(back.read(), whole.read()) == "");
  return {{}, {}, q.read(), kv.read()};
}

Result over_whole(const Sequence& x) {
  const AttentionShape& s = x.s;
  const Array in(x.qkv, x.t), o(Array::poison(s.sequences * s.tokens * s.out_width()), x.t);
  const Array lse(Array::poison(s.sequences * s.heads * s.tokens), DType::f32);
  table().attention_forward({s, in.in(), o.out(), lse.floats()}, stream());
  const Array d(x.dout, x.t), dqkv(Array::poison(static_cast<int64_t>(x.qkv.size())), x.t);
  gpu::AttentionInput a{s, d.in(), o.in(), lse.floats(), in.in(), dqkv.out(), {}};
  const Lent scratch(gpu::scratch_bytes(a));
  a.scratch = scratch;
  table().attention_input(a, stream());
  const Result gradients = apart(x, dqkv.read(), x.t);
  return {o.read(), lse.read(), gradients.dq, gradients.dkv};
}

/// Rows [part * n, (part + 1) * n) of each sequence.
Floats rows_of(const Floats& x, int64_t sequences, int64_t tokens, int64_t width, int64_t part, int64_t n) {
  Floats rows;
  for (int64_t b = 0; b < sequences; ++b) {
    const Floats one = part_of(x, (b * tokens + part * n) * width, (b * tokens + (part + 1) * n) * width);
    rows.insert(rows.end(), one.begin(), one.end());
  }
  return rows;
}
void put_rows(Floats& to, const Floats& from, int64_t sequences, int64_t tokens, int64_t width, int64_t part, int64_t n) {
  for (int64_t b = 0; b < sequences; ++b)
    std::copy_n(from.begin() + b * n * width, n * width, to.begin() + (b * tokens + part * n) * width);
}

AttentionBlockShape block(const AttentionShape& s, int64_t parts, int64_t query, int64_t key) {
  const int64_t n = s.tokens / parts;
  return {s.sequences, n,          key < 0 ? s.tokens : n, s.heads, s.kv_heads,  s.head_dim,
          s.tokens,    query * n,  key < 0 ? 0 : key * n,  s.order, s.canonical, s.positions,
          s.window,    s.value_dim};
}

/// Blocks over `parts` ranks, with the output of the whole as what backward saved. Canonical: merged. Else: running, in a ring's order;
/// `gathered`: all keys at once.
Result over_parts(const Sequence& x, int64_t parts, const Result& whole, bool gathered = false) {
  const AttentionShape& s = x.s;
  const int64_t n = s.tokens / parts, qw = x.q_width(), kw = x.kv_width(), ow = s.out_width(), b = s.sequences;
  const Result in = apart(x, x.qkv, x.t);
  const auto rows = [&](const Floats& v, int64_t width, int64_t part) { return rows_of(v, b, s.tokens, width, part, n); };
  Result out{poisoned(b * s.tokens * ow), poisoned(b * s.heads * s.tokens), poisoned(b * s.tokens * qw),
             poisoned(b * s.tokens * kw)};
  std::vector<std::vector<Floats>> of_keys(static_cast<size_t>(parts));
  std::vector<Floats> running(static_cast<size_t>(parts));
  for (int64_t rank = 0; rank < parts; ++rank) {
    const Array q(rows(in.dq, qw, rank), x.t), dout(rows(x.dout, ow, rank), x.t), saved(rows(whole.o, ow, rank), x.t);
    Floats lse_rows;
    for (int64_t row = 0; row < b * s.heads; ++row) {
      const Floats one = part_of(whole.lse, row * s.tokens + rank * n, row * s.tokens + (rank + 1) * n);
      lse_rows.insert(lse_rows.end(), one.begin(), one.end());
    }
    const Array saved_lse(lse_rows, DType::f32);
    std::vector<std::unique_ptr<Array>> o, sums, dq;
    const Array lse(Array::poison(b * s.heads * n), DType::f32);
    const auto f32 = [](int64_t size) { return std::make_unique<Array>(Array::poison(size), DType::f32); };
    for (int64_t turn = 0; turn < (gathered ? 1 : parts); ++turn) {
      const int64_t key = gathered ? -1 : s.canonical ? turn : (rank - turn + parts) % parts;
      const Array kv(gathered ? in.dkv : rows(in.dkv, kw, key), x.t);
      if (s.canonical || turn == 0)
        o.push_back(f32(b * n * ow)), sums.push_back(f32(2 * b * s.heads * n)), dq.push_back(f32(b * n * qw));
      table().attention_block_forward(
          {block(s, parts, rank, key), q.in(), kv.in(), o.back()->floats(), s.canonical ? nullptr : lse.floats(),
           s.canonical ? sums.back()->floats() : nullptr, !s.canonical && turn > 0},
          stream());
      const int64_t keys = gathered ? s.tokens : n, width = s.canonical ? qw + ow : kw;
      const size_t of = static_cast<size_t>(gathered ? 0 : key);
      const bool first = running[of].empty();
      const Array dkv(s.canonical || first ? Array::poison(b * keys * width) : running[of], DType::f32);
      gpu::AttentionBlockInput a{block(s, parts, rank, key), dout.in(),   saved.in(),
                                 saved_lse.floats(),         q.in(),      kv.in(),
                                 dq.back()->out(),           dkv.out(),   !s.canonical && turn > 0,
                                 !s.canonical && !first,     s.canonical, {}};
      const Lent scratch(gpu::scratch_bytes(a));
      a.scratch = scratch;
      table().attention_block_input(a, stream());
      if (s.canonical)
        of_keys[of].push_back(dkv.read());
      else
        running[of] = dkv.read();
    }
    Floats rank_lse, rank_o, rank_dq;
    if (s.canonical) {
      const Array all(Array::poison(b * n * ow), x.t), d(Array::poison(b * n * qw), x.t);
      gpu::AttentionMergeForward m{{b, n, s.heads, s.values(), static_cast<int>(parts)}, all.out()};
      gpu::AttentionMergeInput g{{b * n, s.heads, s.heads, s.head_dim, static_cast<int>(parts)}, d.out()};
      for (size_t i = 0; i < o.size(); ++i) {
        m.merge.part_o[i] = o[i]->floats(), m.merge.part_sums[i] = sums[i]->floats();
        g.merge.part[i] = dq[i]->floats();
      }
      m.merge.lse = lse.floats();
      table().attention_merge_forward(m, stream());
      table().attention_merge_input(g, stream());
      rank_o = all.read(), rank_dq = d.read();
    } else {
      rank_o = o[0]->read(), rank_dq = dq[0]->read();
    }
    rank_lse = lse.read();
    put_rows(out.o, rank_o, b, s.tokens, ow, rank, n);
    put_rows(out.dq, rank_dq, b, s.tokens, qw, rank, n);
    for (int64_t row = 0; row < b * s.heads; ++row)
      std::copy_n(rank_lse.begin() + row * n, n, out.lse.begin() + row * s.tokens + rank * n);
  }
  if (gathered) out.dkv = running[0];
  for (int64_t rank = 0; rank < parts && !gathered; ++rank) {
    Floats dkv = running[static_cast<size_t>(rank)];
    if (s.canonical) {
      const Array y(Array::poison(b * n * kw), x.t);
      std::vector<std::unique_ptr<Array>> from;
      gpu::AttentionMergeInput m{{b * n, s.heads, s.kv_heads, int64_t{s.head_dim} + s.values(), static_cast<int>(parts)}, y.out()};
      for (size_t i = 0; i < of_keys[static_cast<size_t>(rank)].size(); ++i) {
        from.push_back(std::make_unique<Array>(of_keys[static_cast<size_t>(rank)][i], DType::f32));
        m.merge.part[i] = from.back()->floats();
      }
      table().attention_merge_input(m, stream());
      dkv = y.read();
    }
    put_rows(out.dkv, dkv, b, s.tokens, kw, rank, n);
  }
  return out;
}

Sequence sequence(AttentionShape s, DType t) {
  return {s, t, as_stored(random_floats(s.sequences * s.tokens * s.qkv_width(), 1, 2.0f), t),
          as_stored(random_floats(s.sequences * s.tokens * s.out_width(), 2), t)};
}

std::string differs(const Result& a, const Result& b) {
  for (const auto& [x, y, name] :
       {std::tuple{&a.o, &b.o, "o"}, {&a.lse, &b.lse, "lse"}, {&a.dq, &b.dq, "dq"}, {&a.dkv, &b.dkv, "dkv"}})
    if (const std::string d = bit_difference(*x, *y); !d.empty()) return std::string(name) + ": " + d;
  return "";
}

/// Rows of [sequences, tokens, width] (lse: [rows, tokens], width 1) in the order of the text, or back.
Floats reordered(const Floats& x, const TokenOrder& order, int64_t tokens, int64_t width, bool back) {
  Floats y(x.size());
  const int64_t blocks = static_cast<int64_t>(x.size()) / (tokens * width);
  for (int64_t b = 0; b < blocks; ++b)
    for (int64_t place = 0; place < tokens; ++place) {
      const int64_t at = (b * tokens + place) * width, text = (b * tokens + order.position(place, tokens)) * width;
      std::copy_n(x.begin() + (back ? at : text), width, y.begin() + (back ? text : at));
    }
  return y;
}

Doubles wide_of(const Floats& x) { return {x.begin(), x.end()}; }

AttentionShape with_values(AttentionShape s, int values) {
  s.value_dim = values;
  return s;
}

/// The CPU's result, from the same values.
Result on_cpu(const Sequence& x, const std::vector<int32_t>& positions) {
  const AttentionShape& s = x.s;
  const kernels::AttentionShape shape{s.sequences, s.tokens, s.heads,     s.kv_heads,
                                      s.head_dim,  s.order,  s.canonical, positions.empty() ? nullptr : positions.data(),
                                      s.value_dim, s.window};
  Floats o = poisoned(s.sequences * s.tokens * s.out_width()), lse = poisoned(s.sequences * s.heads * s.tokens),
         dqkv = poisoned(static_cast<int64_t>(x.qkv.size()));
  kernels::AttentionForward f{shape, x.qkv.data(), o.data(), lse.data()};
  Scratch forward(attention_scratch_bytes(f));
  f.scratch = forward.data();
  const kernels::Kernels& k = kernels::kernels_for_this_processor();
  k.attention_forward(f);
  kernels::AttentionInput b{shape, x.dout.data(), o.data(), lse.data(), x.qkv.data(), dqkv.data()};
  Scratch backward(attention_scratch_bytes(b));
  b.scratch = backward.data();
  k.attention_input(b);
  const Result gradients = apart(x, dqkv, DType::f32);
  return {o, lse, gradients.dq, gradients.dkv};
}

}  // namespace

TEST_CASE("attention in parts: canonical bits do not depend on how queries and keys are cut, in any order of tokens") {
  uint64_t number = 0;
  for (const auto& [shape, parts] : {std::pair{AttentionShape{1, 16, 4, 2, 6}, 4},
                                     {AttentionShape{2, 32, 1, 1, 4}, 16},
                                     {AttentionShape{1, 32, 2, 1, 66}, 2},
                                     {AttentionShape{1, 32, 1, 1, 130}, 2},
                                     {with_values(AttentionShape{1, 16, 4, 2, 6}, 9), 4},
                                     {with_values(AttentionShape{1, 32, 2, 2, 10}, 7), 2}})
    for (const Kind kind : {Kind::kContiguous, Kind::kZigzag, Kind::kStriped}) {
      if (number++ % dealt(1, kWatched ? 4 : 2) != (kWatched && !thorough() ? 1 : 0))
        continue;  // every order, and every shape or nearly
      const TokenOrder order{kind, kind == Kind::kContiguous ? 1 : parts};
      INFO("heads " << shape.heads << " head_dim " << shape.head_dim << " parts " << parts << " order " << static_cast<int>(kind));
      AttentionShape s = shape;
      s.order = order;
      s.canonical = true;
      const Sequence x = sequence(s, DType::f32);
      Result whole;
      in_both_orders([&] {
        whole = over_whole(x);
        return joined({whole.o, whole.lse, whole.dq, whole.dkv});
      });
      REQUIRE(differs(over_parts(x, parts, whole), whole) == "");
      if (parts == 4) REQUIRE(differs(over_parts(x, 2, whole), whole) == "");
      // The order of the text, by the kernels for whole sequences.
      AttentionShape text = shape;
      const Sequence y{text, x.t, reordered(x.qkv, order, s.tokens, s.qkv_width(), true),
                       reordered(x.dout, order, s.tokens, s.out_width(), true)};
      const Result want = over_whole(y);
      REQUIRE(difference(reordered(whole.o, order, s.tokens, s.out_width(), true), wide_of(want.o), kTolerance) == "");
      REQUIRE(difference(reordered(whole.lse, order, s.tokens, 1, true), wide_of(want.lse), kTolerance) == "");
      REQUIRE(difference(reordered(whole.dq, order, s.tokens, x.q_width(), true), wide_of(want.dq), kTolerance) == "");
      REQUIRE(difference(reordered(whole.dkv, order, s.tokens, x.kv_width(), true), wide_of(want.dkv), kTolerance) == "");
    }
}

TEST_CASE("attention in parts: running blocks of every type meet the whole, and all keys at once do") {
  for (const DType t : kActivationTypes)
    for (const int parts : {3})
      for (const Kind kind : {Kind::kContiguous, Kind::kZigzag, Kind::kStriped}) {
        AttentionShape s{1, 24, 4, 2, 10};
        s.order = {kind, kind == Kind::kContiguous ? 1 : parts};
        INFO(name_of(t) << " parts " << parts << " order " << static_cast<int>(kind));
        const Sequence narrow = sequence(s, t), exact{s, DType::f32, narrow.qkv, narrow.dout};
        const Result want = over_whole(exact), saved = over_whole(narrow);
        for (const bool gathered : {false, true}) {
          const Result got = over_parts(narrow, parts, saved, gathered);
          const double bound = t == DType::f32 ? kTolerance : 3 * tolerance(t);
          REQUIRE(difference(got.o, wide_of(want.o), bound) == "");
          REQUIRE(difference(got.lse, wide_of(want.lse), kTolerance) == "");
          REQUIRE(difference(got.dq, wide_of(want.dq), bound) == "");
          REQUIRE(difference(got.dkv, wide_of(want.dkv), bound) == "");
        }
      }
}

TEST_CASE("attention in parts: running blocks whose values have another width meet the CPU's whole") {
  for (const auto& [shape, parts] :
       {std::pair{with_values(AttentionShape{2, 24, 4, 2, 10}, 7), 3}, {with_values(AttentionShape{1, 24, 2, 2, 6}, 66), 2}}) {
    const Sequence x = sequence(shape, DType::f32);
    const Result want = on_cpu(x, {}), whole = over_whole(x);
    for (const Result& got : {whole, over_parts(x, parts, whole), over_parts(x, parts, whole, true)}) {
      REQUIRE(difference(got.o, wide_of(want.o), kTolerance) == "");
      REQUIRE(difference(got.lse, wide_of(want.lse), kTolerance) == "");
      REQUIRE(difference(got.dq, wide_of(want.dq), kTolerance) == "");
      REQUIRE(difference(got.dkv, wide_of(want.dkv), kTolerance) == "");
    }
  }
}

namespace {

/// Places in documents of two sequences, in the order in which tokens lie.
std::vector<int32_t> documents_of(const AttentionShape& s) {
  std::vector<int32_t> positions;
  for (int64_t b = 0; b < s.sequences; ++b) {
    std::vector<int32_t> text;
    for (int64_t p = 0; p < s.tokens; ++p) {
      const bool begins = p == 0 || random_bits({17, RandomUse::kShuffle, 0, 0}, static_cast<uint64_t>(b * s.tokens + p)) % 7 == 0;
      text.push_back(begins ? 0 : text.back() + 1);
    }
    for (int64_t place = 0; place < s.tokens; ++place)
      positions.push_back(text[static_cast<size_t>(s.order.position(place, s.tokens))]);
  }
  return positions;
}

}  // namespace

TEST_CASE("attention of packed documents: the CPU's numbers, and in parts the bits of the whole, in any order of tokens") {
  for (const auto& [shape, parts] : {std::pair{AttentionShape{2, 32, 4, 2, 6}, 4}, {AttentionShape{1, 192, 2, 1, 16}, 2}})
    for (const Kind kind : {Kind::kContiguous, Kind::kZigzag, Kind::kStriped})
      for (const bool canonical : {true, false}) {
        // A sample has each order canonical for one of the shapes, and not so for the other.
        if (!thorough() && (static_cast<int>(kind) + (canonical ? 1 : 0) + (parts == 4 ? 1 : 0)) % 2 != 0) continue;
        if (kWatched && !thorough() && kind != (parts == 4 ? Kind::kZigzag : Kind::kContiguous)) continue;
        AttentionShape s = shape;
        s.order = {kind, kind == Kind::kContiguous ? 1 : parts};
        s.canonical = canonical;
        INFO("tokens " << s.tokens << " parts " << parts << " order " << static_cast<int>(kind) << " canonical " << canonical);
        const std::vector<int32_t> documents = documents_of(s);
        const Numbers<int32_t> there(documents);
        s.positions = there.data();
        const Sequence x = sequence(s, DType::f32);
        Result whole;
        in_both_orders([&] {
          whole = over_whole(x);
          return joined({whole.o, whole.lse, whole.dq, whole.dkv});
        });
        const Result want = on_cpu(x, documents);
        const auto meets = [&](const Result& got) {
          for (const auto& [a, b] : {std::pair{&got.o, &want.o}, {&got.lse, &want.lse}, {&got.dq, &want.dq}, {&got.dkv, &want.dkv}})
            if (const std::string d = difference(*a, wide_of(*b), kTolerance); !d.empty()) return d;
          return std::string();
        };
        REQUIRE(meets(whole) == "");
        const Result cut = over_parts(x, parts, whole);
        REQUIRE((canonical ? differs(cut, whole) : meets(cut)) == "");
        if (!canonical) REQUIRE(meets(over_parts(x, parts, whole, true)) == "");
      }
}

TEST_CASE(
    "attention within a window: the CPU's numbers, and in parts the bits of the whole, in any order of tokens, packed or not") {
  for (const auto& [shape, parts, window] :
       {std::tuple{AttentionShape{2, 32, 4, 2, 6}, 4, 5}, {AttentionShape{1, 192, 2, 1, 16}, 2, 70}})
    for (const Kind kind : {Kind::kContiguous, Kind::kZigzag, Kind::kStriped})
      for (const bool canonical : {true, false})
        for (const bool packed : {true, false}) {
          // A sample has each order canonical for one of the shapes, and not so for the other.
          const int number = static_cast<int>(kind) + (canonical ? 1 : 0) + (packed ? 1 : 0) + (parts == 4 ? 1 : 0);
          if (!thorough() && number % 2 != 0) continue;
          if (kWatched && !thorough() && kind != (parts == 4 ? Kind::kZigzag : Kind::kContiguous)) continue;
          AttentionShape s = shape;
          s.order = {kind, kind == Kind::kContiguous ? 1 : parts};
          s.canonical = canonical;
          s.window = window;
          INFO("tokens " << s.tokens << " parts " << parts << " order " << static_cast<int>(kind) << " canonical " << canonical
                         << " packed " << packed);
          const std::vector<int32_t> documents = packed ? documents_of(s) : std::vector<int32_t>{};
          const Numbers<int32_t> there(documents_of(s));
          s.positions = packed ? there.data() : nullptr;
          const Sequence x = sequence(s, DType::f32);
          Result whole;
          in_both_orders([&] {
            whole = over_whole(x);
            return joined({whole.o, whole.lse, whole.dq, whole.dkv});
          });
          const Result want = on_cpu(x, documents);
          const auto meets = [&](const Result& got) {
            for (const auto& [a, b] :
                 {std::pair{&got.o, &want.o}, {&got.lse, &want.lse}, {&got.dq, &want.dq}, {&got.dkv, &want.dkv}})
              if (const std::string d = difference(*a, wide_of(*b), kTolerance); !d.empty()) return d;
            return std::string();
          };
          REQUIRE(meets(whole) == "");
          const Result cut = over_parts(x, parts, whole);
          REQUIRE((canonical ? differs(cut, whole) : meets(cut)) == "");
          if (!canonical) REQUIRE(meets(over_parts(x, parts, whole, true)) == "");
        }
}

TEST_CASE("attention of packed documents in 16 bits: own kernels, no further from fp32 than their rounding") {
  for (const DType t : {DType::bf16, DType::f16}) {
    AttentionShape s{1, 96, 4, 2, 16};
    const std::vector<int32_t> documents = documents_of(s);
    const Numbers<int32_t> there(documents);
    s.positions = there.data();
    const Sequence narrow = sequence(s, t), exact{s, DType::f32, narrow.qkv, narrow.dout};
    const Result got = over_whole(narrow), want = on_cpu(exact, documents);
    REQUIRE(difference(got.o, wide_of(want.o), 3 * tolerance(t)) == "");
    REQUIRE(difference(got.dq, wide_of(want.dq), 3 * tolerance(t)) == "");
    REQUIRE(difference(got.dkv, wide_of(want.dkv), 3 * tolerance(t)) == "");
  }
}

}  // namespace shardlab::testing::of_attention_block
