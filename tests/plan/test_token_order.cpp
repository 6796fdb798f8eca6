// Where tokens lie, which keys a query sees there, and what attention over parts of a sequence costs each rank.
#include <fmt/format.h>

#include <algorithm>
#include <set>
#include <vector>

#include "plan/work.h"
#include "tests/namespaces.h"
#include "tests/plan/plans.h"
#include "tests/test.h"

namespace shardlab::testing {
namespace {

using Kind = TokenOrder::Kind;

std::vector<TokenOrder> orders(int parts) { return {{}, {Kind::kZigzag, parts}, {Kind::kStriped, parts}}; }

/// Pairs, counted one by one.
int64_t count_pairs(const TokenOrder& order, int64_t tokens, int64_t first_query, int64_t queries, int64_t first_key,
                    int64_t keys) {
  int64_t pairs = 0;
  for (int64_t q = first_query; q < first_query + queries; ++q)
    for (int64_t k = first_key; k < first_key + keys; ++k) pairs += order.position(k, tokens) <= order.position(q, tokens);
  return pairs;
}

/// Pairs that each of `parts` ranks has in a step, over all blocks of keys.
std::vector<int64_t> pairs_by_rank(const TokenOrder& order, int64_t tokens, int64_t parts) {
  std::vector<int64_t> pairs;
  const int64_t n = tokens / parts;
  for (int64_t rank = 0; rank < parts; ++rank) pairs.push_back(seen_pairs(order, tokens, rank * n, n, 0, tokens));
  return pairs;
}

}  // namespace

TEST_CASE("token order: a bijection whose positions ascend within a part") {
  for (const int parts : {1, 2, 3, 4, 8})
    for (const TokenOrder& order : orders(parts)) {
      const int64_t tokens = 6 * order.granule();
      INFO(fmt::format("parts {} order {}", parts, static_cast<int>(order.kind)));
      std::set<int64_t> positions;
      for (int64_t place = 0; place < tokens; ++place) {
        const int64_t position = order.position(place, tokens);
        positions.insert(position);
        REQUIRE(order.place(position, tokens) == place);
        const int64_t end = order.run_end(place, tokens);
        REQUIRE(end > place);
        if (place + 1 < end) REQUIRE(order.position(place + 1, tokens) > position);
        for (int64_t last = place + 1; last <= end; ++last)
          for (int64_t seer = 0; seer < tokens; ++seer)
            REQUIRE(order.seen(place, last, seer, tokens) ==
                    count_pairs(order, tokens, order.place(seer, tokens), 1, place, last - place));
      }
      REQUIRE(static_cast<int64_t>(positions.size()) == tokens);
      REQUIRE(*positions.begin() == 0);
      REQUIRE(*positions.rbegin() == tokens - 1);
    }
  REQUIRE(TokenOrder{Kind::kZigzag, 2}.position(0, 8) == 0);  // rank 0 holds chunks 0 and 3, rank 1 chunks 1 and 2
  REQUIRE(TokenOrder{Kind::kZigzag, 2}.position(2, 8) == 6);
  REQUIRE(TokenOrder{Kind::kZigzag, 2}.position(4, 8) == 2);
  REQUIRE(TokenOrder{Kind::kStriped, 2}.position(1, 8) == 2);
}

TEST_CASE("token order: pairs that are seen, counted one by one") {
  for (const int parts : {1, 2, 4})
    for (const TokenOrder& order : orders(parts)) {
      const int64_t tokens = 16;
      INFO(fmt::format("parts {} order {}", parts, static_cast<int>(order.kind)));
      for (int64_t query = 0; query < tokens; query += 3)
        for (int64_t queries = 0; query + queries <= tokens; queries += 2)
          for (int64_t key = 0; key < tokens; key += 3)
            for (int64_t keys = 0; key + keys <= tokens; keys += 2)
              REQUIRE(seen_pairs(order, tokens, query, queries, key, keys) ==
                      count_pairs(order, tokens, query, queries, key, keys));
      REQUIRE(seen_pairs(order, tokens, 0, tokens, 0, tokens) == tokens * (tokens + 1) / 2);
    }
}

// Of s tokens on c ranks, n = s/c each, the last of a contiguous order sees n(s - n) + n(n + 1)/2 pairs, and all see s(s + 1)/2.
TEST_CASE("token order: the most work of a rank over the mean is (n(2c - 1) + 1) / (nc + 1) contiguous, and 1 in zigzag") {
  for (const int64_t c : {2, 4, 8})
    for (const int64_t n : {2, 6, 32}) {
      INFO(fmt::format("c {} n {}", c, n));
      const int64_t all = n * c * (n * c + 1) / 2;
      const auto contiguous = pairs_by_rank({}, n * c, c);
      const int64_t most = *std::ranges::max_element(contiguous);
      REQUIRE(most * c * (n * c + 1) == all * (n * (2 * c - 1) + 1));
      const auto zigzag = pairs_by_rank({Kind::kZigzag, static_cast<int>(c)}, n * c, c);
      for (const int64_t pairs : zigzag) REQUIRE(pairs * c == all);
      const auto striped =
          pairs_by_rank({Kind::kStriped, static_cast<int>(c)}, n * c, c);  // rank r sees n pairs more than rank r - 1
      for (size_t r = 1; r < striped.size(); ++r) REQUIRE(striped[r] == striped[r - 1] + n);
    }
}

TEST_CASE("work of attention over parts: pairs that are seen, on every rank and in every turn") {
  for (const int parts : {1, 2, 4})
    for (const TokenOrder& order : orders(parts))
      for (int turn = 0; turn < parts; ++turn)
        for (const bool whole : {false, true}) {
          if (whole && turn != 0) continue;
          const int64_t n = 8, tokens = n * parts, keys = whole ? tokens : n;
          INFO(fmt::format("parts {} order {} turn {} whole {}", parts, static_cast<int>(order.kind), turn, whole));
          const std::string placed = whole ? "" : turn == 0 ? " cp:S1" : " cp:L";
          const Plan plan = parsed(fmt::format(
              "shardlab plan 1\nmesh cp={}\nstreams compute\nsegment s\n"
              "bound %q activation f32[3,{},12] cp:S1 micro:slice\nbound %kv activation f32[3,{},8]{} micro:slice\n"
              "bound %o activation f32[3,{},12] cp:S1 micro:slice\nbound %lse activation f32[3,3,{}] cp:S2 micro:slice\n"
              "bound %do activation f32[3,{},12] cp:S1 micro:slice\nbound %dq activation f32[3,{},12] cp:S1 micro:slice\n"
              "bound %dkv activation f32[3,{},8]{} micro:slice\n"
              "attention_block.F a (%q, %kv) -> (%o, %lse) heads=3 kv_heads=1 head_dim=4 turn=-{}\n"
              "attention_block.I a (%do, %o, %lse, %q, %kv) -> (%dq, %dkv) heads=3 kv_heads=1 head_dim=4 turn=-{}\n",
              parts, n, keys, placed, n, n, n, n, keys, whole ? " cp:P" : placed, turn, turn));
          const Segment& segment = plan.segments[0];
          const Op &forward = std::get<Op>(segment.steps[0]), &backward = std::get<Op>(segment.steps[1]);
          int64_t most = 0;
          for (int rank = 0; rank < parts; ++rank) {
            const Coordinates at{rank};
            const int64_t block = whole ? 0 : (rank - turn + parts) % parts * n;
            const int64_t pairs = count_pairs(order, tokens, rank * n, n, block, keys);
            most = std::max(most, pairs);
            REQUIRE(pairs_of_block(segment, forward, plan.mesh, order, &at) == pairs);
            const int64_t outputs = 3 * n * 12;  // a division each; in backward do . o
            REQUIRE(work_of(segment, forward, plan.mesh, order, &at).flops.value == 9 * pairs * (4 * 4 + 5) + outputs);
            REQUIRE(work_of(segment, backward, plan.mesh, order, &at).flops.value == 9 * pairs * (10 * 4 + 6) + 2 * outputs);
          }
          REQUIRE(pairs_of_block(segment, backward, plan.mesh, order) == most);
        }
}

}  // namespace shardlab::testing
