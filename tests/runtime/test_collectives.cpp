// Every collective by every algorithm in groups of 1 to 8, bit for bit against one thread that adds in the stated order.
#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <numeric>
#include <optional>

#include "plan/base/philox.h"
#include "plan/base/tree.h"
#include "plan/collective_steps.h"
#include "tests/namespaces.h"
#include "tests/runtime/rig.h"
#include "tests/test.h"

namespace shardlab::testing {

namespace {

using Values = std::vector<float>;
using Inputs = std::vector<Values>;  ///< by group index

float join(ReduceOp reduce, float own, float theirs) { return reduce == ReduceOp::kSum ? own + theirs : std::max(own, theirs); }

/// What rank `owner` of a reduce-scatter has of element e, by the order of the algorithm as its documentation states it.
float reduced(const CollectiveCall& call, const Inputs& in, int owner, size_t e) {
  const Algorithm algorithm = call.algorithm;
  const ReduceOp reduce = call.reduce;
  const int g = static_cast<int>(in.size());
  const auto value = [&](int rank) { return in[static_cast<size_t>(rank % g)][e]; };
  if (algorithm == Algorithm::kDirect) {
    return tree_sum(
        int64_t{0}, int64_t{g}, [&](int64_t i) { return value(static_cast<int>(i)); },
        [&](float a, float b) { return join(reduce, a, b); });
  }
  if (algorithm == Algorithm::kRing) {  // from the rank after the owner once around
    float sum = value(owner + 1);
    for (int k = 2; k <= g; ++k) sum = join(reduce, value(owner + k), sum);
    return sum;
  }
  if (algorithm == Algorithm::kTree) {  // rank 0 adds its subtrees, the nearest first; so does each
    const std::function<float(int)> held = [&](int rank) {
      float sum = value(rank);
      for (int d = 1; rank % (2 * d) == 0 && d < g; d *= 2)
        if (rank + d < g) sum = join(reduce, sum, held(rank + d));
      return sum;
    };
    return held(0);
  }
  if (algorithm == Algorithm::kHierarchical) {  // once around each node, then once around the nodes
    const int per_node = call.per_node, nodes = g / per_node, place = owner % per_node;
    const auto of_node = [&](int node) {
      const auto at = [&](int k) { return value(node % nodes * per_node + (place + k) % per_node); };
      float sum = at(1);
      for (int k = 2; k <= per_node; ++k) sum = join(reduce, at(k), sum);
      return sum;
    };
    float sum = of_node(owner / per_node + 1);
    for (int k = 2; k <= nodes; ++k) sum = join(reduce, of_node(owner / per_node + k), sum);
    return sum;
  }
  // Halving: after the exchange at distance d a rank holds the sum over itself and the ranks that differ in the bits done.
  const std::function<float(int, int)> held = [&](int rank, int distance) -> float {
    if (distance == g) return value(rank);
    return join(reduce, held(rank, distance * 2), held(rank ^ distance, distance * 2));
  };
  return held(owner, 1);
}

/// The serial result on rank `index`; for a reduce_scatter its part alone.
Values expected(const CollectiveCall& call, const Inputs& in, int index) {
  const int g = static_cast<int>(in.size());
  const auto begin = [&](int part) { return static_cast<size_t>(part_begin(call.elements, g, part)); };
  Values out;
  for (int part = 0; part < g; ++part) {
    for (size_t e = begin(part); e < begin(part + 1); ++e) {
      switch (call.kind) {
        case CollectiveKind::kAllReduce: out.push_back(reduced(call, in, part, e)); break;
        case CollectiveKind::kReduceScatter:
          if (part == index) out.push_back(reduced(call, in, part, e));
          break;
        case CollectiveKind::kAllGather: out.push_back(in[static_cast<size_t>(part)][e]); break;
        case CollectiveKind::kBroadcast: out.push_back(in[static_cast<size_t>(call.root)][e]); break;
        case CollectiveKind::kAllToAll: out.push_back(in[static_cast<size_t>(part)][begin(index) + e - begin(part)]); break;
      }
    }
  }
  return out;
}

/// Runs one call on one rank, in place or with the result apart, and says what is wrong with it.
std::string fault_of(Communicator& comm, Task& task, CollectiveCall call, const Inputs& in, bool apart) {
  const int g = comm.size(), index = comm.index();
  Values source = in[static_cast<size_t>(index)], target(static_cast<size_t>(call.elements), -99.0f);
  const int64_t own = part_begin(call.elements, g, index), own_elements = part_begin(call.elements, g, index + 1) - own;
  size_t from = 0, size = static_cast<size_t>(call.elements);
  call.source = call.target = source.data();
  if (call.kind == CollectiveKind::kReduceScatter) {
    call.target = apart ? target.data() : source.data() + own;
    from = apart ? 0 : static_cast<size_t>(own);
    size = static_cast<size_t>(own_elements);
  } else if (call.kind == CollectiveKind::kAllGather) {
    call.source = source.data() + own;
    if (apart) call.target = target.data();
  } else if (call.kind == CollectiveKind::kAllToAll || apart) {
    call.target = target.data();
  }
  const Values before = source;
  const auto prepared = comm.prepare(call);
  if (!prepared.ok()) return prepared.error().message;
  const Moved moved = comm.collective(call, task);
  const Values& result = call.target == target.data() ? target : source;
  const Values got(result.begin() + static_cast<std::ptrdiff_t>(from), result.begin() + static_cast<std::ptrdiff_t>(from + size));
  if (!same_bits(got, expected(call, in, index))) return "differs from the serial result";
  if (&result == &target && !same_bits(source, before)) return "overwrote its source";
  const int64_t sent = 4 * sent_elements(call.kind, call.algorithm, call.elements, g, index, call.root, call.per_node);
  if (moved.sent_bytes != sent) return fmt::format("sent {} bytes, not {}", moved.sent_bytes, sent);
  if (moved.peer_wait_s < 0) return "waited a negative time";
  return "";
}

constexpr CollectiveKind kKinds[]{CollectiveKind::kAllReduce, CollectiveKind::kReduceScatter, CollectiveKind::kAllGather,
                                  CollectiveKind::kBroadcast, CollectiveKind::kAllToAll};
constexpr Algorithm kAlgorithms[]{Algorithm::kRing, Algorithm::kHalvingDoubling, Algorithm::kDirect, Algorithm::kTree,
                                  Algorithm::kHierarchical};

/// Every call that a group of `g` can make, with these many elements.
std::vector<CollectiveCall> calls_of(int g, const std::vector<int64_t>& counts) {
  std::vector<CollectiveCall> calls;
  for (const CollectiveKind kind : kKinds)
    for (const Algorithm algorithm : kAlgorithms)
      for (const ReduceOp reduce : {ReduceOp::kSum, ReduceOp::kMax})
        for (const int64_t count : counts) {
          const bool reduces = kind == CollectiveKind::kAllReduce || kind == CollectiveKind::kReduceScatter;
          if (reduce == ReduceOp::kMax && !reduces) continue;
          if (algorithm == Algorithm::kHalvingDoubling && !std::has_single_bit(static_cast<unsigned>(g))) continue;
          const int64_t elements = kind == CollectiveKind::kAllToAll ? count * g : count;
          const int root = kind == CollectiveKind::kBroadcast ? static_cast<int>(count % g) : 0;
          for (int per_node = 1; per_node <= (algorithm == Algorithm::kHierarchical ? g : 1); ++per_node)
            if (g % per_node == 0)
              calls.push_back({kind, reduce, algorithm, DType::f32, elements, root, nullptr, nullptr, 1, per_node});
        }
  return calls;
}

/// Two communicators over the same ranks, the second in reverse order, each busy with all calls at the same time.
void check_group(Scheduler& scheduler, int g, const std::vector<int64_t>& counts) {
  ThreadTransport transport(kernels::kernels_for_this_processor());
  const std::vector<CollectiveCall> calls = calls_of(g, counts);
  std::vector<std::string> faults(static_cast<size_t>(2 * g));
  run_tasks(scheduler, 60, g, 2, [&](Task& task) {
    std::vector<int> members;
    for (int r = 0; r < g; ++r) members.push_back(task.stream() == 0 ? r : g - 1 - r);
    const auto comm = transport.join(task.rank(), CommId(task.stream()), members);
    std::string& fault = faults[static_cast<size_t>(task.rank() * 2 + task.stream())];
    for (size_t c = 0; c < calls.size(); ++c) {
      Inputs in;
      for (int i = 0; i < g; ++i) in.push_back(noise(c, static_cast<uint32_t>(i * 2 + task.stream()), calls[c].elements));
      const bool can_be_apart = calls[c].kind != CollectiveKind::kReduceScatter || calls[c].algorithm == Algorithm::kDirect;
      for (const bool apart : {false, true}) {
        if (apart && !can_be_apart) continue;
        const std::string found = fault_of(*comm, task, calls[c], in, apart);
        if (!found.empty() && fault.empty())
          fault = fmt::format("kind {} algorithm {} elements {} apart {} of rank {}: {}", static_cast<int>(calls[c].kind),
                              static_cast<int>(calls[c].algorithm), calls[c].elements, apart, task.rank(), found);
      }
    }
  });
  for (const std::string& fault : faults) REQUIRE(fault == "");
}

}  // namespace

TEST_CASE("every collective equals its serial result", "[collectives]") {
  const SteadyClock clock;
  for (int g = 1; g <= 8; ++g) {
    ThreadScheduler scheduler(clock, 2 * g, 2);
    check_group(scheduler, g, {1, 3, 7, 64, 1001});
  }
}

TEST_CASE("collectives do not depend on who runs when", "[collectives][seeded]") {
  for (uint64_t seed = 1; seed <= 6; ++seed)
    for (const int g : {2, 3, 4}) {
      SeededScheduler scheduler(seed);
      check_group(scheduler, g, {1, 5});
    }
}

TEST_CASE("other element types are moved and reduced", "[collectives]") {
  const int g = 3;
  ThreadTransport transport(kernels::kernels_for_this_processor());
  std::vector<std::vector<double>> doubles(g);
  std::vector<std::vector<int64_t>> counts(g);
  std::vector<std::vector<uint8_t>> bytes(g);
  run_tasks(g, 1, [&](Task& task) {
    const size_t r = static_cast<size_t>(task.rank());
    const auto comm = transport.join(task.rank(), CommId(0), std::vector<int>{0, 1, 2});
    doubles[r] = {1e-17 * (task.rank() + 1), 1.0, -2.0};
    counts[r] = {task.rank() + 1, 1LL << 40};
    bytes[r].assign(7, static_cast<uint8_t>(task.rank()));
    const auto all_reduce = [&](DType dtype, ReduceOp reduce, auto& values) {
      CollectiveCall call{CollectiveKind::kAllReduce,          reduce, Algorithm::kRing, dtype,
                          static_cast<int64_t>(values.size()), 0,      values.data(),    values.data()};
      comm->collective(call, task);
    };
    all_reduce(DType::f64, ReduceOp::kSum, doubles[r]);
    all_reduce(DType::i64, ReduceOp::kMax, counts[r]);
    CollectiveCall broadcast{
        CollectiveKind::kBroadcast, ReduceOp::kSum, Algorithm::kRing, DType::u8, 7, 2, bytes[r].data(), bytes[r].data()};
    comm->collective(broadcast, task);
  });
  for (size_t r = 0; r < g; ++r) {
    REQUIRE(doubles[r] == std::vector<double>{(2e-17 + 3e-17) + 1e-17, 3.0, -6.0});
    REQUIRE(counts[r] == std::vector<int64_t>{3, 1LL << 40});
    REQUIRE(bytes[r] == std::vector<uint8_t>(7, 2));
  }
}

namespace {

/// The staging of exchanges by node among `g` ranks, `per_node` of them on a node; 0: from rank to rank, without.
struct ByNode {
  ByNode(int g, int per_node, int64_t most_rows, int64_t row_bytes) {
    if (per_node == 0) return;
    levels =
        RowLevels{.nodes = g / per_node, .per_node = per_node, .rows = most_rows, .most_rows = most_rows, .row_bytes = row_bytes};
    levels->once = levels->weighed = true;  // needs the most staging
    stage.resize(static_cast<size_t>(levels->stage_bytes()));
    levels->once = levels->weighed = false;
  }
  /// Makes `call` go to experts, or come back.
  void put(CollectiveCall& call, bool goes) {
    if (!levels) return;
    call.algorithm = Algorithm::kHierarchical, call.per_node = levels->per_node;
    levels->goes = goes;
    call.levels = levels, call.stage = stage;
  }
  std::optional<RowLevels> levels;
  std::vector<std::byte> stage;
};

/// The task's end of a communicator of ranks 0 to g-1.
auto join_all(ThreadTransport& transport, const Task& task, int g) {
  std::vector<int> members(static_cast<size_t>(g));
  std::iota(members.begin(), members.end(), 0);
  return transport.join(task.rank(), CommId(0), members);
}

/// Sends rows by `routes` random routes among `g` ranks and back, and holds rows and bytes to a fold over the counts.
void exchange_routes(int g, int per_node, uint32_t routes) {
  constexpr int64_t kWidth = 3, kParts = 2, kRows = 12;  // rows of a rank, each to some rank
  ThreadTransport transport(kernels::kernels_for_this_processor());
  std::vector<std::string> faults(static_cast<size_t>(g));
  run_tasks(g, 1, [&](Task& task) {
    const auto comm = join_all(transport, task, g);
    std::string& fault = faults[static_cast<size_t>(task.rank())];
    ByNode by_node(g, per_node, kRows, kWidth * 4);
    for (uint32_t route = 0; route < routes; ++route) {
      // to[i][r]: rows of rank i that go to rank r. Routes 0 and 1 send nothing and everything to the last rank.
      std::vector<std::vector<int32_t>> to;
      for (int i = 0; i < g; ++i) {
        std::vector<int32_t> counts(static_cast<size_t>(g * kParts), 0);
        for (int64_t row = 0; row < kRows && route > 0; ++row) {
          const uint32_t draw = random_bits({7, RandomUse::kShuffle, static_cast<uint32_t>(i), route}, static_cast<uint64_t>(row));
          ++counts[static_cast<size_t>(route == 1 ? g * kParts - 1 : draw % static_cast<uint32_t>(g * kParts))];
        }
        to.push_back(counts);
      }
      const auto rows = [&](int from, int at) {
        return to[static_cast<size_t>(from)][static_cast<size_t>(at * kParts)] +
               to[static_cast<size_t>(from)][static_cast<size_t>(at * kParts + 1)];
      };
      std::vector<int32_t> received;
      for (int i = 0; i < g; ++i)
        for (int64_t p = 0; p < kParts; ++p)
          received.push_back(to[static_cast<size_t>(i)][static_cast<size_t>(task.rank() * kParts + p)]);
      const Values home = noise(route, static_cast<uint32_t>(task.rank()), kRows * kWidth);
      Values away(static_cast<size_t>(g * kRows * kWidth), -99.0f), back(home.size(), -99.0f);
      CollectiveCall call{.kind = CollectiveKind::kAllToAll,
                          .elements = kRows * kWidth,
                          .source = home.data(),
                          .target = away.data(),
                          .sent = to[static_cast<size_t>(task.rank())].data(),
                          .received = received.data(),
                          .counts = kParts,
                          .row_bytes = kWidth * 4,
                          .source_room = kRows,
                          .room = g * kRows};
      by_node.put(call, true);
      const Moved went = comm->collective(call, task);
      Values expected;
      int64_t sent = 0;
      for (int i = 0; i < g; ++i) {
        const Values theirs = noise(route, static_cast<uint32_t>(i), kRows * kWidth);
        int64_t first = 0;
        for (int r = 0; r < task.rank(); ++r) first += rows(i, r);
        expected.insert(expected.end(), theirs.begin() + first * kWidth, theirs.begin() + (first + rows(i, task.rank())) * kWidth);
        if (!by_node.levels && i != task.rank()) sent += rows(task.rank(), i) * kWidth * 4;
      }
      // By node this rank sends its own rows for other nodes, and what it passes on within its own.
      if (by_node.levels) {
        const int node = task.rank() / per_node, place = task.rank() % per_node;
        sent = by_node.levels->count_bytes();
        for (int i = 0; i < g; ++i)
          for (int r = 0; r < g; ++r) {
            const bool crosses = i == task.rank() && r / per_node != node;
            const bool passes = i % per_node == place && r / per_node == node && r != task.rank();
            sent += (crosses + passes) * rows(i, r) * kWidth * 4;
          }
      }
      const size_t came = expected.size();
      expected.resize(away.size(), -99.0f);
      if (!same_bits(away, expected)) fault = fmt::format("route {} of {}: other rows came", route, g);
      if (went.sent_bytes != sent) fault = fmt::format("route {} of {}: sent {} bytes, not {}", route, g, went.sent_bytes, sent);
      std::swap(call.sent, call.received);
      call.source = away.data(), call.target = back.data(), call.source_room = g * kRows, call.room = kRows;
      by_node.put(call, false);
      const int64_t came_back = comm->collective(call, task).sent_bytes;
      // Back go the rows of this rank's experts for other places, and what it passes on to other nodes.
      int64_t passed = by_node.levels ? by_node.levels->count_bytes() : 0;
      for (int i = 0; i < g; ++i)
        for (int r = 0; r < g; ++r) {
          const int node = task.rank() / std::max(1, per_node), place = task.rank() % std::max(1, per_node);
          const bool leaves = r == task.rank() && (by_node.levels ? i % per_node != place : i != r);
          const bool passes = by_node.levels && i % per_node == place && i / per_node != node && r / per_node == node;
          passed += (leaves + passes) * rows(i, r) * kWidth * 4;
        }
      if (came_back != passed) fault = fmt::format("route {} of {}: sent {} bytes back, not {}", route, g, came_back, passed);
      Values returned = home;
      if (route == 0) returned.assign(home.size(), -99.0f);
      if (!same_bits(back, returned)) fault = fmt::format("route {} of {}: {} elements came, others returned", route, g, came);
    }
  });
  for (const std::string& fault : faults) REQUIRE(fault == "");
}

}  // namespace

TEST_CASE("packed rows go by counts and come back: 1,000 random routes, those to nobody and to one rank among them",
          "[collectives]") {
  for (const int g : {2, 3, 4}) exchange_routes(g, 0, 334);
}

TEST_CASE("packed rows by node: 1,000 random routes, those to nobody and to one rank among them, bring the rows of direct ones",
          "[collectives]") {
  for (const auto& [g, per_node] : {std::pair(4, 2), {6, 2}, {6, 3}, {8, 4}}) {
    INFO(g << " ranks, " << per_node << " on a node");
    exchange_routes(g, per_node, 250);
  }
}

namespace {

/// Sends copies of tokens, or tokens times weights, by `routes` random choices among `g` ranks, a token once to each node, and holds rows and bytes
/// to folds over the choices.
void send_tokens(int g, int per_node, bool weighed, uint32_t routes) {
  constexpr int64_t kWidth = 3, kTokens = 5, kExperts = 2, kChosen = 3, kRows = kTokens * kChosen, kBytes = kWidth * 4;
  const int64_t places = g * kExperts;
  ThreadTransport transport(kernels::kernels_for_this_processor());
  std::vector<std::string> faults(static_cast<size_t>(g));
  run_tasks(g, 1, [&](Task& task) {
    const auto comm = join_all(transport, task, g);
    const int rank = task.rank(), node = rank / per_node, place = rank % per_node;
    ByNode by_node(g, per_node, kRows, kBytes);
    // A rehearsal sends the bytes of an even route, there and back.
    for (const bool goes : {true, false}) {
      CollectiveCall rehearsal{.kind = CollectiveKind::kAllToAll};
      by_node.put(rehearsal, goes);
      rehearsal.levels->even_across = 7;
      rehearsal.levels->once = goes, rehearsal.levels->weighed = goes && weighed;
      if (comm->collective(rehearsal, task).sent_bytes != rehearsal.levels->even_bytes())
        faults[static_cast<size_t>(rank)] = "another rehearsal";
    }
    for (uint32_t route = 0; route < routes; ++route) {
      // choice[i][t, j]: places of three experts of token t of rank i, some of which drop its row. Route 0 drops all rows, route 1 chooses the last
      // three places for every token.
      std::vector<std::vector<int32_t>> choice(static_cast<size_t>(g));
      for (int i = 0; i < g; ++i)
        for (int64_t t = 0; t < kTokens; ++t)
          for (int64_t j = 0; j < kChosen; ++j) {
            const uint32_t draw =
                random_bits({8, RandomUse::kShuffle, static_cast<uint32_t>(i), route}, static_cast<uint64_t>(t * kChosen + j));
            auto& all = choice[static_cast<size_t>(i)];
            auto chosen = static_cast<int32_t>(route == 1 ? places - 1 - j : draw % static_cast<uint32_t>(places));
            const auto token = std::span(all).subspan(static_cast<size_t>(t * kChosen));
            while (std::ranges::any_of(token, [&](int32_t c) { return c == chosen || c == ~chosen; }))
              chosen = (chosen + 1) % static_cast<int32_t>(places);
            all.push_back(route == 0 || (route > 1 && draw >> 29 == 0) ? ~chosen : chosen);
          }
      const auto element = [&](int i, int64_t t, int64_t w) { return static_cast<float>(1000 * i + 10 * t + w) + 0.1f; };
      const auto weight = [&](int i, int64_t t, int64_t j) {
        return weighed ? 1 / static_cast<float>(3 + 7 * i + kChosen * t + j) : 1.0f;
      };
      // Rows of rank i for the experts from `first` to `last`: by expert, and then by token.
      const auto rows_for = [&](int i, int64_t first, int64_t last) {
        Values rows;
        for (int64_t e = first; e < last; ++e)
          for (int64_t t = 0; t < kTokens; ++t)
            for (int64_t j = 0; j < kChosen; ++j)
              if (choice[static_cast<size_t>(i)][static_cast<size_t>(t * kChosen + j)] == e)
                for (int64_t w = 0; w < kWidth; ++w) rows.push_back(weight(i, t, j) * element(i, t, w));
        return rows;
      };
      const auto count = [&](int i, int64_t first, int64_t last) { return std::ssize(rows_for(i, first, last)) / kWidth; };
      std::vector<int32_t> sent, received;
      for (int64_t e = 0; e < places; ++e) sent.push_back(static_cast<int32_t>(count(rank, e, e + 1)));
      Values expected, home = rows_for(rank, 0, places), away(static_cast<size_t>(g * kRows * kWidth), -99.0f);
      for (int i = 0; i < g; ++i) {
        for (int64_t e = 0; e < kExperts; ++e)
          received.push_back(static_cast<int32_t>(count(i, rank * kExperts + e, rank * kExperts + e + 1)));
        const Values theirs = rows_for(i, rank * kExperts, (rank + 1) * kExperts);
        expected.insert(expected.end(), theirs.begin(), theirs.end());
      }
      expected.resize(away.size(), -99.0f);
      home.resize(kRows * kWidth, -99.0f);
      CollectiveCall call{.kind = CollectiveKind::kAllToAll,
                          .elements = kRows * kWidth,
                          .source = home.data(),
                          .target = away.data(),
                          .sent = sent.data(),
                          .received = received.data(),
                          .counts = kExperts,
                          .row_bytes = kBytes,
                          .source_room = kRows,
                          .room = g * kRows};
      by_node.put(call, true);
      call.levels->once = true, call.levels->weighed = weighed;
      Values tokens, weights;
      for (int64_t t = 0; t < kTokens; ++t) {
        for (int64_t w = 0; w < kWidth; ++w) tokens.push_back(element(rank, t, w));
        for (int64_t j = 0; j < kChosen; ++j) weights.push_back(weight(rank, t, j));
      }
      if (weighed) call.tokens = tokens.data(), call.weights = weights.data();
      call.choice = choice[static_cast<size_t>(rank)], call.top_k = kChosen, call.experts = kExperts;
      const int64_t went = comm->collective(call, task).sent_bytes;
      // Across: this rank's tokens, each once for each other node that has experts of it, and for each row which one stands for it.
      int64_t cross = 0, listed = 0, passed = 0;
      for (int p = 0; p < g / per_node; ++p) {
        const int64_t first = int64_t{p} * per_node * kExperts, last = first + per_node * kExperts;
        if (p == node) continue;
        listed += count(rank, first, last);
        for (int64_t t = 0; t < kTokens; ++t)
          cross +=
              std::ranges::any_of(std::span(choice[static_cast<size_t>(rank)]).subspan(static_cast<size_t>(t * kChosen), kChosen),
                                  [&](int32_t c) { return c >= first && c < last; });
      }
      // Within: rows that ranks of this place have for other places of the node.
      for (int i = place; i < g; i += per_node)
        for (int q = node * per_node; q < (node + 1) * per_node; ++q)
          if (q != rank) passed += count(i, q * kExperts, (q + 1) * kExperts);
      const int64_t bytes = call.levels->count_bytes() + (weighed ? 8 : 4) * listed + (cross + passed) * kBytes;
      std::string& fault = faults[static_cast<size_t>(rank)];
      if (!same_bits(away, expected)) fault = fmt::format("route {} of {}: other rows came", route, g);
      if (went != bytes) fault = fmt::format("route {} of {}: sent {} bytes, not {}", route, g, went, bytes);
      if (route == 1 && node != g / per_node - 1 && per_node * kExperts >= kChosen && cross != kTokens)
        fault = fmt::format("{} of {} tokens cross", cross, kTokens);
    }
  });
  for (const std::string& fault : faults) REQUIRE(fault == "");
}

}  // namespace

TEST_CASE(
    "packed rows by node, a token once a node: 1,000 random choices bring the rows of direct exchanges, and send what the choices "
    "say",
    "[collectives]") {
  for (const auto& [g, per_node] : {std::pair(4, 2), {6, 2}, {6, 3}, {8, 4}}) {
    INFO(g << " ranks, " << per_node << " on a node");
    send_tokens(g, per_node, false, 250);
  }
}

TEST_CASE(
    "packed rows by node, a token and its weights once a node: 1,000 random choices bring the products that direct exchanges bring",
    "[collectives]") {
  for (const auto& [g, per_node] : {std::pair(4, 2), {6, 2}, {6, 3}, {8, 4}}) {
    INFO(g << " ranks, " << per_node << " on a node");
    send_tokens(g, per_node, true, 250);
  }
}

namespace {

/// Of each of `kRanks` ranks 4 rows, all to rank 1, which has room for 4 and more: a message that would reach beyond the end lies at the end.
template <int kRanks>
void overfill(int per_node) {
  constexpr int64_t kWidth = 3;
  constexpr int32_t kRows = 4;
  const int64_t elements = kRows * kWidth;
  for (int64_t room = kRows; room <= kRanks * kRows; ++room) {
    INFO(room);
    ThreadTransport transport(kernels::kernels_for_this_processor());
    std::vector<std::string> faults(kRanks);
    run_tasks(kRanks, 1, [&](Task& task) {
      std::vector<int> members(kRanks);
      std::iota(members.begin(), members.end(), 0);
      ByNode by_node(kRanks, per_node, kRows, kWidth * 4);
      const auto comm = transport.join(task.rank(), CommId(0), members);
      const bool takes = task.rank() == 1;
      std::string& fault = faults[static_cast<size_t>(task.rank())];
      const auto of = [&](int rank) { return noise(5, static_cast<uint32_t>(rank), elements); };
      const auto at = [&](int rank) { return std::min<int64_t>(rank * kRows, room - kRows) * kWidth; };
      std::vector<int32_t> sent(kRanks, 0);
      sent[1] = kRows;
      const std::vector<int32_t> received(kRanks, takes ? kRows : 0);
      const Values home = of(task.rank());
      Values away(static_cast<size_t>(room * kWidth), -99.0f), back(home.size(), -99.0f);
      CollectiveCall call{.kind = CollectiveKind::kAllToAll,
                          .elements = elements,
                          .source = home.data(),
                          .target = away.data(),
                          .sent = sent.data(),
                          .received = received.data(),
                          .counts = 1,
                          .row_bytes = kWidth * 4,
                          .source_room = kRows,
                          .room = room};
      by_node.put(call, true);
      const Moved went = comm->collective(call, task);
      if (!by_node.levels && went.sent_bytes != (takes ? 0 : elements * 4)) fault = fmt::format("sent {} bytes", went.sent_bytes);
      const auto lies = [&](int rank) {
        const Values theirs = of(rank);
        return std::equal(theirs.begin(), theirs.end(), away.begin() + at(rank));
      };
      // What has come in full, and no element that nobody has written.
      for (int rank = 0; takes && rank < kRanks; ++rank)
        if (room == kRanks * kRows && !lies(rank)) fault = fmt::format("the rows of rank {} are not there", rank);
      if (takes && std::ranges::find(away, -99.0f) != away.end()) fault = "a row is as it was";
      std::swap(call.sent, call.received);
      call.source = away.data(), call.target = back.data(), call.source_room = room, call.room = kRows;
      by_node.put(call, false);
      const Values before = away;
      comm->collective(call, task);
      if (room == kRanks * kRows && !same_bits(back, home)) fault = "other rows returned";
      if (std::ranges::find(back, -99.0f) != back.end()) fault = "fewer rows returned";
      if (!same_bits(before, away)) fault = "rows changed on their way back";
    });
    for (const std::string& fault : faults) REQUIRE(fault == "");
  }
}

}  // namespace

TEST_CASE("rows beyond the room lie on top of others, and every message has its true size", "[collectives]") {
  overfill<3>(0);
  overfill<4>(2);
  overfill<6>(3);
}

TEST_CASE("rows that go by node without a workspace are refused beforehand", "[collectives]") {
  ThreadTransport transport(kernels::kernels_for_this_processor());
  const std::vector<int> members{0, 1, 2, 3};
  CollectiveCall call{.kind = CollectiveKind::kAllToAll, .algorithm = Algorithm::kHierarchical, .elements = 48, .per_node = 2};
  call.row_bytes = 12, call.source_room = 4, call.room = 16;
  call.levels = RowLevels{.nodes = 2, .per_node = 2, .rows = 4, .most_rows = 4, .row_bytes = 12};
  const auto comm = transport.join(0, CommId(0), members);
  const auto refused = comm->prepare(call);
  REQUIRE(!refused.ok());
  CHECK(refused.error().message == "rows that go by node are staged in 192 bytes, and the stream's workspace has 0");
  std::vector<std::byte> stage(192);  // counts, and 2 x 4 rows of 12 bytes
  call.stage = stage;
  CHECK(comm->prepare(call).ok());
  call.room = int64_t{1} << 31;
  CHECK(!comm->prepare(call).ok());
}

TEST_CASE("a dim within others is gathered and scattered strip by strip", "[collectives]") {
  // x[3, 2g, 5] cut along its second dim: a part is 3 strips of 10 elements.
  constexpr int64_t kStrips = 3, kPart = 10;
  for (const int g : {1, 2, 3, 4})
    for (const Algorithm algorithm : kAlgorithms) {
      if (algorithm == Algorithm::kHalvingDoubling && !std::has_single_bit(static_cast<unsigned>(g))) continue;
      ThreadTransport transport(kernels::kernels_for_this_processor());
      const int64_t whole = kStrips * kPart * g;
      std::vector<std::string> faults(static_cast<size_t>(g));
      run_tasks(g, 1, [&](Task& task) {
        std::vector<int> members;
        for (int r = 0; r < g; ++r) members.push_back(r);
        const auto comm = transport.join(task.rank(), CommId(0), members);
        const auto at = [&](int64_t strip, int part, int64_t i) { return static_cast<size_t>((strip * g + part) * kPart + i); };
        const auto value = [&](int rank, size_t element) { return static_cast<float>(rank * 1000) + static_cast<float>(element); };
        std::string& fault = faults[static_cast<size_t>(task.rank())];
        Values part(static_cast<size_t>(kStrips * kPart)), all(static_cast<size_t>(whole), -1.0f);
        for (size_t i = 0; i < part.size(); ++i) part[i] = value(task.rank(), i);
        CollectiveCall gather{
            CollectiveKind::kAllGather, ReduceOp::kSum, algorithm, DType::f32, whole, 0, part.data(), all.data(), kStrips,
            g % 2 == 0 ? 2 : 1};
        if (const auto prepared = comm->prepare(gather); !prepared.ok()) throw WorldError(prepared.error().message);
        const Moved moved = comm->collective(gather, task);
        if (moved.sent_bytes != 4 * sent_elements(gather.kind, algorithm, whole, g, task.rank(), 0, gather.per_node))
          fault = "sent other bytes";
        for (int64_t strip = 0; strip < kStrips; ++strip)
          for (int p = 0; p < g; ++p)
            for (int64_t i = 0; i < kPart; ++i)
              if (all[at(strip, p, i)] != value(p, static_cast<size_t>(strip * kPart + i))) fault = "gathered other elements";
        if (algorithm != Algorithm::kDirect) return;  // the others scatter into a view of the source
        for (size_t i = 0; i < all.size(); ++i) all[i] = value(task.rank(), i);
        CollectiveCall scatter = gather;
        scatter.kind = CollectiveKind::kReduceScatter;
        scatter.source = all.data();
        scatter.target = part.data();
        comm->collective(scatter, task);
        for (int64_t strip = 0; strip < kStrips; ++strip)
          for (int64_t i = 0; i < kPart; ++i) {
            float sum = 0;
            for (int r = 0; r < g; ++r) sum += value(r, at(strip, task.rank(), i));
            if (part[static_cast<size_t>(strip * kPart + i)] != sum) fault = "scattered other elements";
          }
      });
      for (const std::string& fault : faults) CHECK(fault == "");
    }
}

TEST_CASE("what the transport cannot do is refused beforehand", "[collectives]") {
  ThreadTransport transport(kernels::kernels_for_this_processor());
  const auto comm = transport.join(0, CommId(0), std::vector<int>{0, 1, 2});
  float values[8] = {};
  const auto refusal = [&](CollectiveCall call) {
    const auto prepared = comm->prepare(call);
    return prepared.ok() ? std::string() : prepared.error().message;
  };
  REQUIRE(refusal({CollectiveKind::kAllReduce, ReduceOp::kSum, Algorithm::kRing, DType::f8e4m3, 6, 0, nullptr, nullptr}) ==
          "a collective reduces f8e4m3, which the transports of the CPU cannot");
  REQUIRE(refusal({CollectiveKind::kAllGather, ReduceOp::kSum, Algorithm::kHalvingDoubling, DType::f32, 6, 0, nullptr, nullptr}) ==
          "halving-doubling in a group of 3 ranks, which is no power of two");
  REQUIRE(refusal({CollectiveKind::kAllToAll, ReduceOp::kSum, Algorithm::kDirect, DType::f32, 7, 0, nullptr, nullptr}) ==
          "an all_to_all cuts 7 elements in 3 equal parts");
  REQUIRE(refusal({CollectiveKind::kReduceScatter, ReduceOp::kSum, Algorithm::kRing, DType::f32, 6, 0, values, values + 6}) ==
          "a reduce_scatter that is not direct keeps partial sums in its source, so its result must be a view of that");
  REQUIRE(refusal({CollectiveKind::kReduceScatter, ReduceOp::kSum, Algorithm::kDirect, DType::f32, 6, 0, values, values + 6}) ==
          "");
}

TEST_CASE("messages arrive in order, in both directions at once", "[p2p]") {
  const int n = 5;
  ThreadTransport transport(kernels::kernels_for_this_processor());
  std::vector<std::string> faults(static_cast<size_t>(2 * n));
  // Stream 0 of each rank sends around the ring on one communicator, stream 1 receives.
  run_tasks(n, 2, [&](Task& task) {
    std::vector<int> members{0, 1, 2, 3, 4};
    const auto comm = transport.join(task.rank(), CommId(0), members);
    for (int64_t i = 0; i < 100; ++i) {
      if (task.stream() == 0) {
        const Values out = noise(static_cast<uint64_t>(i), static_cast<uint32_t>(task.rank()), i % 17);
        const Moved moved = comm->send(out.data(), 4 * (i % 17), (task.rank() + 1) % n, task);
        if (moved.sent_bytes != 4 * (i % 17)) faults[static_cast<size_t>(task.rank() * 2)] = "miscounted";
      } else {
        const int from = (task.rank() + n - 1) % n;
        Values in(static_cast<size_t>(i % 17), -1.0f);
        comm->receive(in.data(), 4 * (i % 17), from, task);
        if (!same_bits(in, noise(static_cast<uint64_t>(i), static_cast<uint32_t>(from), i % 17)))
          faults[static_cast<size_t>(task.rank() * 2 + 1)] = fmt::format("message {} arrived damaged", i);
      }
    }
  });
  for (const std::string& fault : faults) REQUIRE(fault == "");
}

TEST_CASE("the wait for a peer is told from the moving", "[p2p][seeded]") {
  // Rank 1 comes a thousand decisions of a microsecond late: the sender's call lasts that long and all of it is waiting for the
  // peer, while the receiver finds the message on offer.
  SeededScheduler scheduler(1);
  ThreadTransport transport(kernels::kernels_for_this_processor());
  Moved sent, received;
  run_tasks(scheduler, 60, 2, 1, [&](Task& task) {
    const auto comm = transport.join(task.rank(), CommId(0), std::vector<int>{0, 1});
    float value = 7;
    if (task.rank() == 0) {
      sent = comm->send(&value, 4, 1, task);
    } else {
      for (int i = 0; i < 1000; ++i) task.pause();
      received = comm->receive(&value, 4, 0, task);
    }
  });
  REQUIRE(sent.sent_bytes == 4);
  REQUIRE(received.sent_bytes == 0);
  REQUIRE(sent.peer_wait_s > 0.00098);
  REQUIRE(sent.peer_wait_s < 0.00102);
  REQUIRE(received.peer_wait_s == 0.0);
}

}  // namespace shardlab::testing
