// Rows that experts of a capacity drop, by hand: which they are, and that nothing reads or writes a row that is not there. Routers and
// experts as a whole are tested against the reference (tests/numerics/test_experts.cpp).
#include "kernels/experts.h"

#include "tests/kernels/support.h"
#include "tests/namespaces.h"

namespace shardlab::testing::of_experts {
namespace {

using Ids = std::vector<int32_t>;

/// Logits of 2 sequences of 4 tokens, by which each token chooses the two experts that are named, the first with the larger weight.
Floats logits_for(const std::vector<std::pair<int, int>>& choices, int64_t experts) {
  Floats logits;
  for (const auto& [first, second] : choices)
    for (int e = 0; e < experts; ++e) logits.push_back(e == first ? 2.0f : e == second ? 1.0f : -1.0f);
  return logits;
}

constexpr int64_t kExperts = 4, kTopK = 2, kTokens = 4, kSequences = 2, kRows = kSequences * kTokens * kTopK;

struct Routed {
  Floats weights = poisoned(kRows);
  Ids choice = Ids(kRows, -99), counts = Ids(kSequences * kExperts, -99);
};

/// A part of the tokens a sequence, and the experts shared by two ranks.
Routed route(const Floats& logits, int64_t capacity) {
  Routed r;
  Scratch scratch(kernels::route_scratch_bytes(kExperts, capacity > 0));
  kernels::route_forward(
      kernels::kernels_for_this_processor(),
      {.shape = {.sequences = kSequences, .tokens = kTokens, .experts = kExperts, .top_k = kTopK, .normalise = true},
       .logits = logits.data(),
       .weights = r.weights.data(),
       .choice = r.choice.data(),
       .counts = r.counts.data(),
       .ranks = 2,
       .leaves = kSequences,
       .capacity = capacity,
       .scratch = scratch.data()});
  REQUIRE(scratch.intact());
  return r;
}

const std::vector<std::pair<int, int>> kChoices = {{0, 1}, {1, 0}, {2, 0}, {0, 3},   // expert 0 is full after two tokens
                                                   {3, 0}, {3, 1}, {3, 2}, {3, 2}};  // expert 3 is; expert 0 begins anew

}  // namespace

TEST_CASE("counts of rows are cut off where the room ends, in order, and it is said whether some are") {
  const std::vector<int32_t> counts{3, 0, 2, 4, 1};
  std::vector<int32_t> fitted(counts.size(), -1);
  const std::pair<int64_t, std::vector<int32_t>> cases[] = {{10, counts},         {11, counts},         {9, {3, 0, 2, 4, 0}},
                                                            {6, {3, 0, 2, 1, 0}}, {5, {3, 0, 2, 0, 0}}, {0, {0, 0, 0, 0, 0}}};
  for (const auto& [room, expected] : cases) {
    INFO(room);
    CHECK(kernels::fit_rows(counts, room, fitted) == (room < 10));
    CHECK(fitted == expected);
  }
  CHECK(!kernels::fit_rows(std::vector<int32_t>{0, 0, 0, 0, 0}, 0, fitted));
}

TEST_CASE("a capacity: the first tokens of each sequence that chose an expert have its rows, whatever their weights") {
  const Floats logits = logits_for(kChoices, kExperts);
  const Routed all = route(logits, 0), two = route(logits, 2);
  CHECK(all.choice == Ids{0, 1, 0, 1, 0, 2, 0, 3, 0, 3, 1, 3, 2, 3, 2, 3});
  // Token 2 chose expert 0 with its smaller weight, token 3 with its larger: both came too late. ~0 and ~3 stand for them.
  CHECK(two.choice == Ids{0, 1, 0, 1, ~0, 2, ~0, 3, 0, 3, 1, 3, 2, ~3, 2, ~3});
  CHECK(two.weights == all.weights);  // not divided again
  // By rank, then sequence: experts 0 and 1, then 2 and 3.
  CHECK(all.counts == Ids{4, 2, 1, 1, 1, 1, 2, 4});
  CHECK(two.counts == Ids{2, 2, 1, 1, 1, 1, 2, 2});
  CHECK(route(logits, kTokens).choice == all.choice);
  const Routed one = route(logits, 1);
  CHECK(one.choice == Ids{0, 1, ~0, ~1, ~0, 2, ~0, 3, 0, 3, 1, ~3, 2, ~3, ~2, ~3});
}

TEST_CASE("a capacity: parts of a sequence take the rows that the whole takes, in the order of the text, however parts are dealt") {
  constexpr int64_t kLength = 12, kCapacity = 3;
  using Kind = TokenOrder::Kind;
  Floats text;  // by position, of 2 sequences
  for (int64_t i = 0; i < kSequences * kLength; ++i)
    for (int64_t e = 0; e < kExperts; ++e) text.push_back(static_cast<float>((7 * i + 5 * e * e + i * e) % 11));
  const auto logits_of = [&](const TokenOrder& order, int64_t first, int64_t n) {
    Floats logits;
    for (int64_t q = 0; q < kSequences; ++q)
      for (int64_t t = first; t < first + n; ++t) {
        const auto* row = text.data() + (q * kLength + order.position(t, kLength)) * kExperts;
        logits.insert(logits.end(), row, row + kExperts);
      }
    return logits;
  };
  const auto run = [&](const Floats& logits, int64_t tokens, const kernels::ChosenByAll& all, bool rows) {
    const auto choices = static_cast<size_t>(kSequences * tokens * kTopK);
    Routed r{poisoned(static_cast<int64_t>(choices)), Ids(choices, -99), Ids(kSequences * kExperts, -99)};
    Scratch scratch(kernels::route_scratch_bytes(kExperts, rows));
    kernels::route_forward(
        kernels::kernels_for_this_processor(),
        {.shape = {.sequences = kSequences, .tokens = tokens, .experts = kExperts, .top_k = kTopK, .normalise = true},
         .logits = logits.data(),
         .weights = rows ? r.weights.data() : nullptr,
         .choice = r.choice.data(),
         .counts = rows ? r.counts.data() : nullptr,
         .ranks = 1,
         .leaves = kSequences,
         .capacity = rows ? kCapacity : 0,
         .chosen = all,
         .scratch = scratch.data()});
    REQUIRE(scratch.intact());
    return r;
  };
  const Routed whole = run(logits_of({}, 0, kLength), kLength, {}, true);
  REQUIRE(std::ranges::count_if(whole.choice, [](int32_t c) { return c < 0; }) >= 8);
  for (const auto& [order, parts] : {std::pair<TokenOrder, int64_t>{{}, 2},
                                     {{}, 3},
                                     {{Kind::kZigzag, 2}, 2},
                                     {{Kind::kZigzag, 3}, 3},
                                     {{Kind::kZigzag, 2}, 4},  // halves of the parts of a ring
                                     {{Kind::kStriped, 2}, 2},
                                     {{Kind::kStriped, 4}, 4}}) {
    INFO("order " << static_cast<int>(order.kind) << " parts " << parts);
    const int64_t tokens = kLength / parts;
    const Ids chosen = run(logits_of(order, 0, kLength), kLength, {}, false).choice;
    Ids counts(kSequences * kExperts, 0);
    for (int64_t part = 0; part < parts; ++part) {
      const Routed own = run(logits_of(order, part * tokens, tokens), tokens, {chosen.data(), kLength, part * tokens, order}, true);
      for (size_t i = 0; i < counts.size(); ++i) counts[i] += own.counts[i];
      for (int64_t q = 0; q < kSequences; ++q)
        for (int64_t t = 0; t < tokens; ++t)
          for (int64_t j = 0; j < kTopK; ++j) {
            const auto here = static_cast<size_t>((q * tokens + t) * kTopK + j);
            const auto there = static_cast<size_t>((q * kLength + order.position(part * tokens + t, kLength)) * kTopK + j);
            REQUIRE(own.choice[here] == whole.choice[there]);
            REQUIRE(own.weights[here] == whole.weights[there]);
          }
    }
    CHECK(counts == whole.counts);
  }
}

TEST_CASE("a capacity: loads are of all that was chosen") {
  const Floats logits = logits_for(kChoices, kExperts);
  const auto load = [&](int64_t capacity) {
    const Routed r = route(logits, capacity);
    Floats load = poisoned(kSequences * kExperts);
    kernels::expert_load({r.choice.data(), load.data(), kSequences, kTokens, kTopK, kExperts});
    return load;
  };
  CHECK(load(0) == Floats{4, 2, 1, 1, 1, 1, 2, 4});
  CHECK(load(1) == load(0));
}

TEST_CASE("a capacity: dropped rows are not there, and tokens without a row have zeroes") {
  const Routed r = route(logits_for(kChoices, kExperts), 1);
  constexpr int64_t kWidth = 3, kTaken = 8;  // of 16 rows, by expert and then by token
  const Ids tokens{0, 4, 0, 5, 2, 6, 3, 4};
  const int64_t bytes = kernels::places_scratch_bytes(kSequences * kTokens, kTopK, kExperts);
  const kernels::Dispatch dispatch{
      .choice = r.choice.data(), .tokens = kSequences * kTokens, .top_k = kTopK, .experts = kExperts, .width = kWidth};
  const Floats x = random_floats(kSequences * kTokens * kWidth, 1);
  Floats rows = poisoned(kTaken * kWidth + 1);  // and a guard
  {
    Scratch scratch(bytes);
    kernels::Dispatch a = dispatch;
    a.from = x.data(), a.to = rows.data(), a.scratch = scratch.data();
    kernels::dispatch(a);
    CHECK(scratch.intact());
  }
  for (int64_t i = 0; i < kTaken; ++i)
    for (int64_t d = 0; d < kWidth; ++d)
      CHECK(rows[static_cast<size_t>(i * kWidth + d)] == x[static_cast<size_t>(tokens[static_cast<size_t>(i)] * kWidth + d)]);
  CHECK(std::isnan(rows.back()));
  rows.pop_back();

  // Back: the sum of a token's rows. Tokens 1 and 7 have none.
  Floats dx = poisoned(kSequences * kTokens * kWidth), y = dx;
  {
    Scratch scratch(bytes);
    kernels::Dispatch a = dispatch;
    a.from = rows.data(), a.to = dx.data(), a.back = true, a.scratch = scratch.data();
    kernels::dispatch(a);
    kernels::combine_forward({.rows = rows.data(),
                              .weights = r.weights.data(),
                              .choice = r.choice.data(),
                              .y = y.data(),
                              .tokens = kSequences * kTokens,
                              .top_k = kTopK,
                              .experts = kExperts,
                              .width = kWidth,
                              .scratch = scratch.data()});
  }
  const Ids of_token{2, 0, 1, 1, 2, 1, 1, 0};  // rows
  for (size_t t = 0; t < of_token.size(); ++t) {
    float weight = 0;
    for (size_t j = 0; j < 2; ++j)
      if (r.choice[2 * t + j] >= 0) weight += r.weights[2 * t + j];
    for (size_t d = 0; d < kWidth; ++d) {
      CHECK(dx[t * kWidth + d] == static_cast<float>(of_token[t]) * x[t * kWidth + d]);
      CHECK(y[t * kWidth + d] == Approx(weight * x[t * kWidth + d]));
    }
  }

  // The gradient of a weight is of the row that was taken, or 0.
  const Floats dy = random_floats(kSequences * kTokens * kWidth, 2);
  Floats d_rows = poisoned(kTaken * kWidth + 1), d_weights = poisoned(kRows);
  Scratch scratch(bytes);
  kernels::combine_input({.dy = dy.data(),
                          .rows = rows.data(),
                          .weights = r.weights.data(),
                          .choice = r.choice.data(),
                          .drows = d_rows.data(),
                          .dweights = d_weights.data(),
                          .tokens = kSequences * kTokens,
                          .top_k = kTopK,
                          .experts = kExperts,
                          .width = kWidth,
                          .scratch = scratch.data()});
  CHECK(scratch.intact());
  for (size_t i = 0; i < kRows; ++i) {
    double dot = 0;
    for (size_t d = 0; d < kWidth; ++d)
      dot += static_cast<double>(dy[i / 2 * kWidth + d]) * static_cast<double>(x[i / 2 * kWidth + d]);
    CHECK(d_weights[i] == (r.choice[i] < 0 ? Approx(0.0) : Approx(dot).margin(1e-6)));
  }
  for (size_t i = 0; i < kTaken * kWidth; ++i) CHECK(std::isfinite(d_rows[i]));
  CHECK(std::isnan(d_rows.back()));
}

}  // namespace shardlab::testing::of_experts
