#include "tests/kernels/support.h"
#include "tests/namespaces.h"

namespace shardlab::testing::of_embedding {
namespace {

struct Shape {
  int64_t sequences, tokens, width, vocab;
  int64_t rows() const { return sequences * tokens; }
};
const Shape kShapes[] = {{1, 1, 1, 1}, {2, 17, 17, 5}, {4, 9, 64, 300}, {3, 50, 20, 70000}};

Floats weight(const kernels::Kernels& k, const std::vector<int32_t>& ids, const Floats& dx, const Shape& s, int64_t begin, int64_t end,
              const Floats* old = nullptr) {
  Floats table = old != nullptr ? *old : poisoned((end - begin) * s.width);
  kernels::EmbedWeight a{.ids = ids.data(),
                         .dx = dx.data(),
                         .dtable = table.data(),
                         .sequences = s.sequences,
                         .tokens = s.tokens,
                         .width = s.width,
                         .row_begin = begin,
                         .table_rows = end - begin,
                         .accumulate = old != nullptr};
  Scratch scratch(embed_scratch_bytes(a));
  a.scratch = scratch.data();
  k.embed_weight(a);
  REQUIRE(scratch.intact());
  return table;
}

}  // namespace

TEST_CASE("embed: F copies rows, W is its transpose, whole or sharded over the vocabulary") {
  for (const Shape& s : kShapes) {
    INFO("sequences " << s.sequences << " tokens " << s.tokens << " width " << s.width << " vocab " << s.vocab);
    const auto ids = random_ids(s.rows(), 1, static_cast<int32_t>(s.vocab));
    const Floats table = random_floats(s.vocab * s.width, 2), dx = random_floats(s.rows() * s.width, 3);
    Floats want;
    Doubles dtable(s.vocab * s.width);
    for (int64_t r = 0; r < s.rows(); ++r)
      for (int64_t c = 0; c < s.width; ++c) {
        want.push_back(table[ids[r] * s.width + c]);
        dtable[ids[r] * s.width + c] += dx[r * s.width + c];
      }
    const auto forward = [&](const kernels::Kernels& k, int64_t begin, int64_t end) {
      const Floats mine = part_of(table, begin * s.width, end * s.width);
      Floats x = poisoned(s.rows() * s.width);
      k.embed_forward({.ids = ids.data(),
                       .table = mine.data(),
                       .x = x.data(),
                       .rows = s.rows(),
                       .width = s.width,
                       .row_begin = begin,
                       .table_rows = end - begin});
      return x;
    };
    REQUIRE(bit_difference(on_every_variant([&](const kernels::Kernels& k) { return forward(k, 0, s.vocab); }), want) == "");
    const Floats whole = on_every_variant([&](const kernels::Kernels& k) { return weight(k, ids, dx, s, 0, s.vocab); });
    REQUIRE(difference(whole, dtable, kTolerance) == "");
    if (s.vocab == 1) continue;
    const int64_t half = s.vocab / 2;
    const kernels::Kernels& k = kernels::kernels_for_this_processor();
    const Floats low = forward(k, 0, half), high = forward(k, half, s.vocab);
    for (size_t i = 0; i < want.size(); ++i) REQUIRE(low[i] + high[i] == want[i]);
    REQUIRE(bit_difference(joined({weight(k, ids, dx, s, 0, half), weight(k, ids, dx, s, half, s.vocab)}), whole) == "");
  }
}

TEST_CASE("embed: W of a batch is the tree over its sequences; accumulation adds") {
  const Shape s{4, 40, 19, 11}, one{1, 40, 19, 11};
  const auto ids = random_ids(s.rows(), 4, 9);  // rows 9 and 10 have no token
  const Floats dx = random_floats(s.rows() * s.width, 5), old = random_floats(s.vocab * s.width, 6);
  for (const kernels::Kernels* k : variants_here()) {
    const Floats whole = weight(*k, ids, dx, s, 0, s.vocab);
    std::vector<Floats> single;
    const int64_t n = s.tokens * s.width;
    for (int64_t b = 0; b < s.sequences; ++b)
      single.push_back(
          weight(*k, part_of(ids, b * s.tokens, (b + 1) * s.tokens), part_of(dx, b * n, (b + 1) * n), one, 0, s.vocab));
    REQUIRE(bit_difference(whole, tree_of(single)) == "");
    Floats want = old;
    for (size_t i = 0; i < want.size(); ++i) want[i] = want[i] + whole[i];
    REQUIRE(bit_difference(weight(*k, ids, dx, s, 0, s.vocab, &old), want) == "");
  }
}

TEST_CASE("positions: F adds the table to each sequence, W is the tree over sequences") {
  const int64_t sequences = 3, tokens = 5, width = 21, n = tokens * width;
  const Floats x = random_floats(sequences * n, 7), table = random_floats(n, 8);
  Floats want;
  for (int64_t i = 0; i < sequences * n; ++i) want.push_back(x[i] + table[i % n]);
  REQUIRE(
      bit_difference(
          on_every_variant([&](const kernels::Kernels& k) {
            Floats y = x;
            k.positions_forward(
                {.x = y.data(), .table = table.data(), .y = y.data(), .sequences = sequences, .tokens = tokens, .width = width});
            return y;
          }),
          want) == "");
  const auto weight = [&](bool accumulate) {
    return on_every_variant([&](const kernels::Kernels& k) {
      Floats d = accumulate ? table : poisoned(n);
      k.positions_weight(
          {.dx = x.data(), .dtable = d.data(), .sequences = sequences, .tokens = tokens, .width = width, .accumulate = accumulate});
      return d;
    });
  };
  Floats sum = tree_of({part_of(x, 0, n), part_of(x, n, 2 * n), part_of(x, 2 * n, 3 * n)});
  REQUIRE(bit_difference(weight(false), sum) == "");
  for (int64_t i = 0; i < n; ++i) sum[i] = table[i] + sum[i];
  REQUIRE(bit_difference(weight(true), sum) == "");
}

}  // namespace shardlab::testing::of_embedding
