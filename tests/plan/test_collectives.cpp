#include "plan/collective_steps.h"
#include "plan/row_levels.h"

#include <fmt/format.h>

#include <bit>

#include "plan/base/philox.h"
#include "plan/base/tree.h"
#include "plan/node_reach.h"
#include "tests/namespaces.h"
#include "tests/test.h"

namespace shardlab::testing {
namespace {

using Values = std::vector<float>;
using Action = CollectiveStep::Action;

constexpr std::array kKinds{CollectiveKind::kAllReduce, CollectiveKind::kReduceScatter, CollectiveKind::kAllGather,
                            CollectiveKind::kBroadcast, CollectiveKind::kAllToAll};
constexpr std::array kAlgorithmsTested{Algorithm::kRing, Algorithm::kHalvingDoubling, Algorithm::kDirect};

/// An algorithm, and how many ranks of the group a node has where it asks.
struct Way {
  Algorithm algorithm;
  int per_node = 1;
};

/// Every way for a group of `size`: hierarchical with each number of ranks a node that divides it.
std::vector<Way> ways(int size) {
  std::vector<Way> all{{Algorithm::kRing}, {Algorithm::kDirect}, {Algorithm::kTree}};
  if (std::has_single_bit(static_cast<unsigned>(size))) all.push_back({Algorithm::kHalvingDoubling});
  for (int per_node = 1; per_node <= size; ++per_node)
    if (size % per_node == 0) all.push_back({Algorithm::kHierarchical, per_node});
  return all;
}

/// Every rank's buffer, and a second one for all_to_all, with the steps of one collective carried out on them. Messages are taken
/// when the sender begins a step, as the header says.
class Group {
 public:
  Group(CollectiveKind kind, const Way& way, int size, int64_t elements, int root, std::vector<Values> start)
      : size_(size), elements_(elements), src_(start), own_(std::move(start)) {
    in_place_ = kind != CollectiveKind::kAllToAll || is_staged(kind, way.algorithm);
    for (int r = 0; r < size; ++r) steps_.push_back(collective_steps(kind, way.algorithm, size, r, root, way.per_node));
  }

  std::vector<Values> run() {
    for (const auto& s : steps_) REQUIRE(s.size() == steps_[0].size());
    for (size_t k = 0; k < steps_[0].size(); ++k) step(k);
    return own_;
  }
  int64_t sent(int rank) const { return sent_[static_cast<size_t>(rank)]; }

 private:
  Values part(const Values& v, int p) const {
    return Values(v.begin() + part_begin(elements_, size_, p), v.begin() + part_begin(elements_, size_, p + 1));
  }

  void step(size_t k) {
    // messages_[from][to]: parts in the order sent
    std::vector<std::vector<std::vector<Values>>> messages(static_cast<size_t>(size_),
                                                           std::vector<std::vector<Values>>(static_cast<size_t>(size_)));
    const std::vector<Values> before = own_;
    for (int from = 0; from < size_; ++from) {
      const CollectiveStep& s = steps_[static_cast<size_t>(from)][k];
      const Values& source = in_place_ ? before[static_cast<size_t>(from)] : src_[static_cast<size_t>(from)];
      for (int to = 0; to < size_; ++to) {
        if (to == from || (s.send_to != to && s.send_to != -2)) continue;
        for (const int p : s.send_parts) {
          if (s.send_to == -2 && s.scatter && p != to) continue;
          messages[static_cast<size_t>(from)][static_cast<size_t>(to)].push_back(part(source, p));
          sent_[static_cast<size_t>(from)] +=
              static_cast<int64_t>(messages[static_cast<size_t>(from)][static_cast<size_t>(to)].back().size());
        }
      }
    }
    for (int to = 0; to < size_; ++to) receive(to, steps_[static_cast<size_t>(to)][k], before[static_cast<size_t>(to)], messages);
  }

  void receive(int to, const CollectiveStep& s, const Values& before,
               const std::vector<std::vector<std::vector<Values>>>& messages) {
    std::vector<std::vector<Values>> in;
    for (int from = 0; from < size_; ++from) in.push_back(messages[static_cast<size_t>(from)][static_cast<size_t>(to)]);
    for (int from = 0; from < size_; ++from) {
      const bool expected = from != to && (s.receive_from == from || s.receive_from == -2);
      REQUIRE(in[static_cast<size_t>(from)].empty() == !expected);
    }
    if (s.receive_from == -1) return;
    if (s.action == Action::kTreeReduce) {
      REQUIRE(s.receive_parts == std::vector<int>{to});
      const int64_t begin = part_begin(elements_, size_, to), end = part_begin(elements_, size_, to + 1);
      for (int64_t e = begin; e < end; ++e)
        own_[static_cast<size_t>(to)][static_cast<size_t>(e)] = tree_sum(
            0, size_,
            [&](int64_t r) {
              return r == to ? before[static_cast<size_t>(e)] : in[static_cast<size_t>(r)].at(0)[static_cast<size_t>(e - begin)];
            },
            [](float a, float b) { return a + b; });
      return;
    }
    for (size_t i = 0; i < s.receive_parts.size(); ++i) {
      const int p = s.receive_parts[i];
      const Values& message =
          s.receive_from == -2 ? in[static_cast<size_t>(p)].at(0) : in[static_cast<size_t>(s.receive_from)].at(i);
      const int64_t begin = part_begin(elements_, size_, p);
      REQUIRE(static_cast<int64_t>(message.size()) == part_begin(elements_, size_, p + 1) - begin);
      for (size_t e = 0; e < message.size(); ++e) {
        float& mine = own_[static_cast<size_t>(to)][static_cast<size_t>(begin) + e];
        mine = s.action == Action::kReduce ? mine + message[e] : message[e];
      }
    }
  }

  int size_;
  int64_t elements_;
  bool in_place_;
  std::vector<Values> src_, own_;
  std::vector<std::vector<CollectiveStep>> steps_;
  std::vector<int64_t> sent_ = std::vector<int64_t>(16);
};

/// Small integers, whose sums are exact in every order, or floats, whose sums are not.
std::vector<Values> starting_values(int size, int64_t elements, bool integers) {
  std::vector<Values> start(static_cast<size_t>(size), Values(static_cast<size_t>(elements)));
  for (int r = 0; r < size; ++r)
    for (int64_t e = 0; e < elements; ++e) {
      const uint32_t bits = random_bits({7, RandomUse::kShuffle, static_cast<uint32_t>(r), 0}, static_cast<uint64_t>(e));
      start[static_cast<size_t>(r)][static_cast<size_t>(e)] =
          integers ? static_cast<float>(bits % 1000) : static_cast<float>(bits) * 1.1e-7f;
    }
  return start;
}

float sum_over(const std::vector<Values>& start, int64_t e) {
  return tree_sum(
      0, static_cast<int64_t>(start.size()), [&](int64_t r) { return start[static_cast<size_t>(r)][static_cast<size_t>(e)]; },
      [](float a, float b) { return a + b; });
}

int owner_of(int64_t elements, int size, int64_t e) {
  int p = 0;
  while (part_begin(elements, size, p + 1) <= e) ++p;
  return p;
}

/// What the definition of the collective says rank `rank` holds at element `e`; nothing where it says nothing.
std::optional<float> meant(CollectiveKind kind, const std::vector<Values>& start, int rank, int root, int64_t elements, int64_t e) {
  const int size = static_cast<int>(start.size());
  const int part = owner_of(elements, size, e);
  const auto at = [&](int r, int64_t element) { return start[static_cast<size_t>(r)][static_cast<size_t>(element)]; };
  switch (kind) {
    case CollectiveKind::kAllReduce: return sum_over(start, e);
    case CollectiveKind::kReduceScatter: return part == rank ? std::optional(sum_over(start, e)) : std::nullopt;
    case CollectiveKind::kAllGather: return at(part, e);
    case CollectiveKind::kBroadcast: return at(root, e);
    case CollectiveKind::kAllToAll: return at(part, e - part_begin(elements, size, part) + part_begin(elements, size, rank));
  }
  return std::nullopt;
}

bool applies(CollectiveKind kind, int size, int64_t elements) {
  return kind != CollectiveKind::kAllToAll || elements % size == 0;  // its parts must be equal
}

/// Received parts are those that their sender sends under the numbers that the receiver gives: who reads them where they lie must know.
bool said_places_are_true(CollectiveKind kind, const Way& way, int size, int rank) {
  const auto steps_of = [&](int r) { return collective_steps(kind, way.algorithm, size, r, 0, way.per_node); };
  const auto mine = steps_of(rank);
  for (size_t k = 0; k < mine.size(); ++k) {
    const CollectiveStep& step = mine[k];
    if (step.action == Action::kTreeReduce || step.receive_from == -1) continue;
    const std::vector<int>& named = step.their_parts.empty() ? step.receive_parts : step.their_parts;
    if (named.size() != step.receive_parts.size()) return false;
    if (step.receive_from >= 0 && steps_of(step.receive_from)[k].send_parts != named) return false;
    for (size_t i = 0; step.receive_from == -2 && i < named.size(); ++i)
      if (named[i] != (kind == CollectiveKind::kAllToAll ? rank : step.receive_parts[i])) return false;
  }
  return true;
}

TEST_CASE("the steps do what the collective means, on every group size, root and uneven cut") {
  int checked = 0, all_to_alls = 0;
  for (const CollectiveKind kind : kKinds)
    for (int size = 1; size <= 9; ++size)
      for (const Way& way : ways(size))
        for (const int64_t elements : {int64_t{0}, int64_t{1}, int64_t{5}, int64_t{8}, int64_t{72}, int64_t{77}, int64_t{5040}})
          for (int root = 0; root < (kind == CollectiveKind::kBroadcast ? size : 1); ++root) {
            if (!applies(kind, size, elements)) continue;
            const bool exact_order =
                way.algorithm == Algorithm::kDirect;  // sums in canonical tree order: floats must agree bit by bit
            const auto start = starting_values(size, elements, !exact_order);
            Group group(kind, way, size, elements, root, start);
            const auto end = group.run();
            bool right = true;
            for (int r = 0; r < size; ++r) {
              for (int64_t e = 0; e < elements; ++e) {
                const auto want = meant(kind, start, r, root, elements, e);
                right = right && (!want || *want == end[static_cast<size_t>(r)][static_cast<size_t>(e)]);
              }
              right = right && group.sent(r) == sent_elements(kind, way.algorithm, elements, size, r, root, way.per_node);
              right = right && said_places_are_true(kind, way, size, r);
            }
            INFO(fmt::format("kind {} algorithm {} of {} a node, size {} elements {} root {}", int(kind), int(way.algorithm),
                             way.per_node, size, elements, root));
            REQUIRE(right);
            ++checked;
            all_to_alls += kind == CollectiveKind::kAllToAll ? 1 : 0;
          }
  REQUIRE(all_to_alls > 200);
  // Ring, direct and tree have 9 sizes each, halving-doubling 4, hierarchical 1 + 2 + 2 + 3 + 2 + 4 + 2 + 4 + 3 = 23: 54. With
  // roots: 3 x 45 + 15 + 23 weighted by the size, 1 + 4 + 6 + 12 + 10 + 24 + 14 + 32 + 27 = 130. All_to_all: those that divide.
  REQUIRE(checked == 3 * 54 * 7 + (3 * 45 + 15 + 130) * 7 + all_to_alls);
}

TEST_CASE("each rank sends what the closed forms say where the parts are equal") {
  const int64_t n = 5040 * 16;
  for (int g = 2; g <= 9; ++g)
    for (int r = 0; r < g; ++r) {
      const int64_t share = n / g * (g - 1);
      for (const Algorithm a : kAlgorithmsTested) {
        if (a == Algorithm::kHalvingDoubling && !std::has_single_bit(static_cast<unsigned>(g))) continue;
        REQUIRE(sent_elements(CollectiveKind::kAllReduce, a, n, g, r) == 2 * share);
        REQUIRE(sent_elements(CollectiveKind::kReduceScatter, a, n, g, r) == share);
        REQUIRE(sent_elements(CollectiveKind::kAllGather, a, n, g, r) == share);
      }
      REQUIRE(sent_elements(CollectiveKind::kAllToAll, Algorithm::kRing, n, g, r) == share);
      REQUIRE(sent_elements(CollectiveKind::kAllToAll, Algorithm::kDirect, n, g, r) == share);
      REQUIRE(sent_elements(CollectiveKind::kBroadcast, Algorithm::kRing, n, g, r) == (r == g - 1 ? 0 : n));
      REQUIRE(sent_elements(CollectiveKind::kBroadcast, Algorithm::kDirect, n, g, r) == (r == 0 ? n * (g - 1) : 0));
      if (!std::has_single_bit(static_cast<unsigned>(g))) continue;
      REQUIRE(sent_elements(CollectiveKind::kAllToAll, Algorithm::kHalvingDoubling, n, g, r) ==
              n / 2 * std::countr_zero(static_cast<unsigned>(g)));
    }
}

TEST_CASE("uneven parts still add up: over all ranks an all-reduce sends 2n(g-1)") {
  for (const int64_t n : {1, 7, 77, 1001})
    for (int g = 2; g <= 9; ++g)
      for (const Algorithm a : kAlgorithmsTested) {
        if (a == Algorithm::kHalvingDoubling && !std::has_single_bit(static_cast<unsigned>(g))) continue;
        int64_t sum = 0;
        for (int r = 0; r < g; ++r) sum += sent_elements(CollectiveKind::kAllReduce, a, n, g, r);
        REQUIRE(sum == 2 * n * (g - 1));
      }
}

TEST_CASE("step counts") {
  REQUIRE(collective_steps(CollectiveKind::kAllReduce, Algorithm::kRing, 8, 3).size() == 14);
  REQUIRE(collective_steps(CollectiveKind::kAllReduce, Algorithm::kHalvingDoubling, 8, 3).size() == 6);
  REQUIRE(collective_steps(CollectiveKind::kAllReduce, Algorithm::kDirect, 8, 3).size() == 2);
  REQUIRE(collective_steps(CollectiveKind::kBroadcast, Algorithm::kRing, 8, 3).size() == 14);
  REQUIRE(collective_steps(CollectiveKind::kAllReduce, Algorithm::kRing, 1, 0).empty());
  // A stage that stands alone on a communicator whose other groups have four ranks a node.
  REQUIRE(collective_steps(CollectiveKind::kAllReduce, Algorithm::kHierarchical, 1, 0, 0, 4).empty());
  REQUIRE(sent_elements(CollectiveKind::kAllReduce, Algorithm::kHierarchical, 8, 1, 0, 0, 4) == 0);
  REQUIRE(collective_steps(CollectiveKind::kAllReduce, Algorithm::kTree, 8, 3).size() == 6);
  REQUIRE(collective_steps(CollectiveKind::kAllReduce, Algorithm::kTree, 9, 3).size() == 8);
  REQUIRE(collective_steps(CollectiveKind::kAllReduce, Algorithm::kHierarchical, 8, 3, 0, 4).size() == 2 * 3 + 2 * 1);
  REQUIRE(collective_steps(CollectiveKind::kAllToAll, Algorithm::kHierarchical, 12, 3, 0, 4).size() == 4 + 3);
}

TEST_CASE("two levels leave a node with a part in as many as it has ranks, and never more") {
  const int64_t n = 5040 * 16;
  for (const int nodes : {1, 2, 3, 4})
    for (const int per_node : {1, 2, 3, 4}) {
      const int g = nodes * per_node;
      for (const CollectiveKind kind : {CollectiveKind::kReduceScatter, CollectiveKind::kAllGather, CollectiveKind::kAllReduce}) {
        const int phases = kind == CollectiveKind::kAllReduce ? 2 : 1;
        const StepsInTurn turn = steps_in_turn(kind, Algorithm::kHierarchical, n, g, per_node);
        REQUIRE(turn.steps == phases * (per_node - 1 + nodes - 1));
        REQUIRE(turn.steps_across == phases * (nodes - 1));
        REQUIRE(turn.elements == phases * (n - n / g));
        REQUIRE(turn.elements_across == phases * (n / per_node - n / g));
        for (int r = 0; r < g; ++r) {
          int64_t across = 0;
          for (const CollectiveStep& step : collective_steps(kind, Algorithm::kHierarchical, g, r, 0, per_node))
            if (step.send_to / per_node != r / per_node) across += static_cast<int64_t>(step.send_parts.size()) * (n / g);
          REQUIRE(across == turn.elements_across);
        }
      }
      const StepsInTurn exchange = steps_in_turn(CollectiveKind::kAllToAll, Algorithm::kHierarchical, n, g, per_node);
      REQUIRE(exchange.elements == n - n / per_node + n - n / nodes);
      REQUIRE(exchange.elements_across == n - n / nodes);
    }
}

TEST_CASE("a tree has the whole buffer in every step") {
  for (int g = 2; g <= 9; ++g) {
    const StepsInTurn turn = steps_in_turn(CollectiveKind::kAllReduce, Algorithm::kTree, 720, g);
    const int rounds = std::bit_width(static_cast<unsigned>(g - 1));
    REQUIRE(turn.steps == 2 * rounds);
    REQUIRE(turn.elements == 2 * rounds * 720);
    REQUIRE(turn.steps_across == turn.steps);  // a rank a node
    int64_t sent = 0;
    for (int r = 0; r < g; ++r) sent += sent_elements(CollectiveKind::kAllReduce, Algorithm::kTree, 720, g, r);
    REQUIRE(sent == 2 * 720 * (g - 1));
  }
}

TEST_CASE("steps of trees and of halving-doubling go between nodes where some rank's peer is on another") {
  int across = 0, within = 0;
  for (const Algorithm algorithm : {Algorithm::kTree, Algorithm::kHalvingDoubling})
    for (int g = 2; g <= 24; ++g)
      for (int per_node = 1; per_node <= g; ++per_node)
        for (const CollectiveKind kind : kKinds) {
          if (g % per_node != 0 || (algorithm == Algorithm::kHalvingDoubling && !std::has_single_bit(static_cast<unsigned>(g))))
            continue;
          const int64_t n = 720720 * 16;  // 2 to 16, and 20, 21, 22, 24 divide it
          std::vector<std::vector<CollectiveStep>> of;
          for (int r = 0; r < g; ++r) of.push_back(collective_steps(kind, algorithm, g, r));
          StepsInTurn counted;
          for (size_t k = 0; k < of[0].size(); ++k) {
            bool crosses = false;
            size_t most = 0;
            for (int r = 0; r < g; ++r) {
              const CollectiveStep& step = of[static_cast<size_t>(r)][k];
              crosses = crosses || (step.send_to >= 0 && step.send_to / per_node != r / per_node);
              most = std::max(most, step.send_parts.size());
            }
            const int64_t elements = n / g * static_cast<int64_t>(most);
            counted.steps += 1, counted.elements += elements;
            if (crosses) counted.steps_across += 1, counted.elements_across += elements;
            (crosses ? across : within) += 1;
          }
          const StepsInTurn turn = steps_in_turn(kind, algorithm, n, g, per_node);
          INFO("algorithm " << static_cast<int>(algorithm) << ", kind " << static_cast<int>(kind) << ", " << g << " ranks, "
                            << per_node << " a node");
          REQUIRE(turn.steps == counted.steps);
          REQUIRE(turn.steps_across == counted.steps_across);
          if (n % g != 0) continue;  // parts are not alike
          REQUIRE(turn.elements == counted.elements);
          REQUIRE(turn.elements_across == counted.elements_across);
        }
  CHECK(across > 500);
  CHECK(within > 500);
}

TEST_CASE("rows by node: every row takes the hops that it needs, and N - 1 messages leave a rank for other nodes") {
  for (const int nodes : {2, 3, 4})
    for (const int per_node : {2, 4})
      for (const bool goes : {true, false}) {
        const RowLevels levels{nodes, per_node, goes, false, false, 4 * nodes * per_node, 5, 12, 4 * per_node * (nodes - 1)};
        INFO(nodes << " nodes of " << per_node << (goes ? ", going" : ", returning"));
        const int n = nodes * per_node;
        int64_t hops = 0;
        for (int from = 0; from < n; ++from)
          for (int to = 0; to < n; ++to) {
            CHECK(levels.hops(from, to) == levels.hops(to, from));
            hops += levels.hops(from, to);
          }
        // Of n rows each, one for every rank: (N-1) L of them cross, and N (L-1) change places.
        CHECK(hops == n * ((nodes - 1) * per_node + nodes * (per_node - 1)));
        CHECK(hops * 4 == n * sent_elements(CollectiveKind::kAllToAll, Algorithm::kHierarchical, 4 * n, n, 0, 0, per_node));
        CHECK(levels.steps_across() == (goes ? 2 : 1) * (nodes - 1));
        CHECK(levels.steps() - levels.steps_across() == (goes ? 1 : 2) * (per_node - 1));
        CHECK(levels.count_bytes() == (goes ? 4 * per_node * (nodes - 1) : 8 * nodes * (per_node - 1)));
        CHECK(levels.count_bytes_across() == (goes ? levels.count_bytes() : 0));
        CHECK(levels.stage_bytes() == (16 * n + 63) / 64 * 64 + (nodes * 60 + 63) / 64 * 64);
        CHECK(levels.even_bytes_across() == levels.count_bytes_across() + 12 * 4 * per_node * (nodes - 1));
        CHECK(levels.even_bytes() == levels.count_bytes() + 12 * sent_elements(CollectiveKind::kAllToAll, Algorithm::kHierarchical,
                                                                               4 * n, n, 0, 0, per_node));
        if (!goes) continue;
        // Of the rows 3 cross, each with what is told of the rows in whose place it does.
        RowLevels once = levels;
        once.once = true, once.even_across = 3;
        CHECK(once.steps_across() == 3 * (nodes - 1));
        CHECK(once.steps() - once.steps_across() == per_node - 1);
        CHECK(once.even_bytes_across() == levels.count_bytes() + 4 * 4 * per_node * (nodes - 1) + 3 * 12);
        CHECK(once.even_bytes_within() == levels.even_bytes_within());
        CHECK(once.stage_bytes() == levels.stage_bytes() + (4 * (4 * n + nodes * 5) + 63) / 64 * 64);
        CHECK(once.one_by_one().even_bytes() == levels.even_bytes());
        once.weighed = true;  // 4 bytes more for each
        CHECK(once.even_bytes_across() == levels.count_bytes() + 8 * 4 * per_node * (nodes - 1) + 3 * 12);
        CHECK(once.stage_bytes() == levels.stage_bytes() + (8 * (4 * n + nodes * 5) + 63) / 64 * 64);
      }
}

namespace {

/// The nodes of a token, as a mean over all choices of groups and experts: counted one by one.
double counted_chance(const Experts& e, int nodes) {
  int64_t choices = 0, reached = 0;
  const auto bits = [](int64_t mask) { return std::popcount(static_cast<uint64_t>(mask)); };
  const auto of_range = [](int64_t first, int64_t n) { return ((int64_t{1} << n) - 1) << first; };
  for (int64_t groups = 0; groups < int64_t{1} << e.groups; ++groups) {
    if (bits(groups) != e.groups_chosen) continue;
    int64_t eligible = 0;
    for (int64_t g = 0; g < e.groups; ++g)
      if (groups >> g & 1) eligible |= of_range(g * e.count / e.groups, e.count / e.groups);
    for (int64_t chosen = 0; chosen < int64_t{1} << e.count; ++chosen) {
      if (bits(chosen) != e.top_k || (chosen & ~eligible) != 0) continue;
      ++choices;
      for (int64_t node = 0; node < nodes; ++node) reached += (chosen & of_range(node * e.count / nodes, e.count / nodes)) != 0;
    }
  }
  return static_cast<double>(reached) / static_cast<double>(choices * nodes);
}

}  // namespace

TEST_CASE("the nodes that a token reaches: as counted over all choices, and within what groups and shares allow") {
  for (const int64_t k : {1, 2, 3, 4})
    for (const int nodes : {1, 2, 3, 4, 6})
      for (const auto& [groups, chosen] : {std::pair(1, 1), {2, 1}, {3, 1}, {3, 2}, {6, 3}, {4, 4}}) {
        const Experts e{.count = 12, .top_k = k, .groups = groups, .groups_chosen = chosen};
        if (e.count / groups * chosen < k) continue;
        INFO(k << " of 12 experts on " << nodes << " nodes, " << chosen << " of " << groups << " groups");
        CHECK(std::abs(even_chance_of_node(e, nodes) - counted_chance(e, nodes)) < 1e-12);
        if (groups > 1 && chosen < groups) continue;
        for (const double chance : chances_of_nodes(std::vector<double>(12, static_cast<double>(k) / 12), nodes))
          CHECK(std::abs(chance - even_chance_of_node(e, nodes)) < 1e-12);
      }
  // DeepSeek-V3: 8 of 256 experts, of 4 of 8 groups, each on a node: a token reaches 3.63 of the 4 nodes.
  const Experts v3{.count = 256, .top_k = 8, .groups = 8, .groups_chosen = 4};
  CHECK(std::abs(8 * even_chance_of_node(v3, 8) - 3.629) < 0.001);
  // Two experts have every token; the third is one of four.
  const std::vector<double> forced{1, 0.25, 0.25, 0, 1, 0.25, 0.25, 0};
  const std::vector<double> reached = chances_of_nodes(forced, 4);
  CHECK((reached[0] == 1 && reached[2] == 1));
  CHECK(std::abs(reached[1] - 0.25) < 1e-12);
  CHECK(std::abs(reached[3] - 0.25) < 1e-12);
  // Shares of one expert a token are the chances themselves.
  const std::vector<double> one{0.4, 0.3, 0.2, 0.1};
  double sum = 0;
  for (const double chance : chances_of_nodes(one, 2)) sum += chance;
  CHECK(std::abs(sum - 1) < 1e-12);
}

TEST_CASE("groups of a communicator on nodes") {
  Mesh mesh;
  mesh.axes = {{"pp", 2}, {"dp", 4}, {"cp", 1}, {"tp", 2}};
  const auto per_node = [&](AxisSet axes, int ranks) { return group_per_node(mesh, {"c", axes, {}}, ranks); };
  const AxisSet pp = AxisSet::of(0), dp = AxisSet::of(1), tp = AxisSet::of(3);
  CHECK(per_node(tp, 8) == 2);
  CHECK(per_node(dp, 8) == 4);
  CHECK(per_node(dp, 4) == 2);
  CHECK(per_node(dp, 2) == 1);
  CHECK(per_node(pp, 8) == 1);
  CHECK(per_node(pp, 16) == 2);
  CHECK(per_node(dp | tp, 4) == 4);
  CHECK(per_node(pp | tp, 8) == 2);
  CHECK(per_node(dp, 6) == 1);  // uneven
}

}  // namespace
}  // namespace shardlab::testing
