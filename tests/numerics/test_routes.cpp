// Rows of experts that are drawn for a prediction, against the rows that ranks count.
#include "simulator/interpreter/routes.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <string>
#include <vector>

#include "plan/run_state.h"
#include "plan/wire.h"
#include "simulator/interpreter/predict.h"
#include "tests/namespaces.h"
#include "tests/numerics/running.h"
#include "tests/numerics/sized_cases.h"
#include "tests/test.h"

namespace shardlab::testing::of_routes {
namespace {

using namespace simulator;

Subject mixture(float capacity = 0) {
  Model m;
  m.name = "mixture";
  m.family = Family::kLlama;
  m.layers = 3;
  m.hidden = 32;
  m.heads = 4;
  m.kv_heads = 2;
  m.head_dim = 8;
  m.ffn = 40;
  m.vocab = 64;
  m.max_positions = 24;
  m.init_deviation = 0.15f;
  m.experts = {.count = 8, .top_k = 2, .ffn = 20, .dense_layers = 1, .bias_update_rate = 0.02f, .capacity_factor = capacity};
  Train t;
  t.seq_len = 24;
  t.seed = 11;
  t.optimizer = Optimizer::kSgd;
  t.learning_rate.peak = 0.1f;
  return {"mixture", m, t, 8};
}

const Sizes kSizes[] = {{.dp = 2, .accumulation = 2},
                        {.dp = 2, .ep = 2, .accumulation = 4},
                        {.dp = 4, .ep = 2, .accumulation = 2},
                        {.dp = 4, .ep = 4, .accumulation = 2},
                        {.dp = 2, .ep = 2, .accumulation = 2, .tp = 2},
                        {.dp = 2, .ep = 2, .pp = 2, .accumulation = 4},
                        {.dp = 2, .ep = 2, .pp = 2, .accumulation = 4, .schedule = *schedule_named("dualpipe")},
                        {.dp = 2, .ep = 4, .accumulation = 4, .cp = 2},
                        {.accumulation = 8, .cp = 4, .kind = ContextKind::kZigzag},
                        {.dp = 2, .ep = 2, .accumulation = 4, .cp = 2, .kind = ContextKind::kStriped},
                        with_whole_experts({.dp = 2, .ep = 4, .accumulation = 4, .tp = 2})};

Routes routes_of(const Running& run, const Case& config, const Routing& routing) {
  return Routes(*run.placed.plan, run.placed.programs, routing, config.model.experts, true);
}

int64_t total(const std::map<std::string, int64_t>& bytes) {
  int64_t sum = 0;
  for (const auto& [comm, n] : bytes) sum += n;
  return sum;
}

int64_t sent_by_all(const Running& run) {
  int64_t sent = 0;
  for (int rank = 0; rank < run.placed.plan->mesh.world_size(); ++rank)
    for (const int64_t bytes : run.session->sent_by_comm(rank)) sent += bytes;
  return sent;
}

int64_t predicted_bytes(const Running& run, const Routes& routes) {
  return total(total_wire_bytes(*run.placed.plan, PackedRows::kLeftOut)) + routes.exchange_bytes();
}

/// Ranks on two nodes, between which rows of experts go by node.
Case by_node(Case config) {
  config.machine.local = true, config.machine.nodes = 2;
  config.layout.collective_algorithm = AlgorithmChoice::kHierarchical;
  config.name += " by node";
  return config;
}

/// Rows by step: recorded routes do not say which micro-batch had most of them.
std::vector<ExpertRows> by_step(std::vector<ExpertRows> layers) {
  for (ExpertRows& layer : layers) layer.fullest = 0;
  return layers;
}

/// From the next step on every token goes to the first two experts.
void force(Running& run) {
  for (const char* layer : {"router_bias.layers.1", "router_bias.layers.2"}) {
    std::vector<float> bias(8, 0.0f);
    bias[0] = bias[1] = 100;
    REQUIRE(run.session->set_state({std::string(kRunState), layer}, {{8}, bias}).ok());
  }
}

}  // namespace

TEST_CASE("routes that a run recorded are drawn as they were: rows by expert, rank and source, and bytes on the wire") {
  for (const float capacity : {0.0f, 1.0f})
    for (const Sizes& sizes : kSizes)
      for (const auto& [canonical, fp8] : {std::pair(false, false), {true, false}, {false, true}}) {
        if (fp8 && (sizes.cp > 1 || sizes.tp > 1)) continue;  // refused
        if (is_mirrored(sizes.schedule)) continue;            // a file of routes does not say which of two stages had the rows
        Case config = case_of(mixture(capacity), sizes, canonical);
        if (fp8) config.train.precision = Precision::kFp8, config.train.fp8_scaling = Fp8Scaling::kBlock;
        INFO(config.name << (canonical ? " canonical" : "") << (fp8 ? " fp8" : "") << " capacity " << capacity);
        Running run(config);
        for (int64_t step = 0; step < 3; ++step) {
          if (step == 2) force(run);
          const StepResult result = run.session->step(step);
          REQUIRE(result.experts.size() == 2);
          const auto again = parse_routes(print_routes(result.experts), "routes");
          REQUIRE(again.ok());
          const Routes routes = routes_of(run, config, {.kind = Routing::Kind::kRecorded, .recorded = *again});
          CHECK(by_step(routes.layers()) == by_step(result.experts));
          CHECK(routes.exchanges() == (config.layout.ep > 1));
          CHECK(predicted_bytes(run, routes) == sent_by_all(run));
        }
      }
}

TEST_CASE(
    "rows by node: what is drawn of recorded and of forced routes is what ranks send, counts and rows that they pass on included") {
  for (const Sizes& sizes : {Sizes{.dp = 4, .ep = 4, .accumulation = 2},
                             {.dp = 2, .ep = 4, .accumulation = 4, .cp = 2},
                             {.dp = 4, .ep = 4, .accumulation = 2, .tp = 2},
                             with_whole_experts({.dp = 2, .ep = 4, .accumulation = 4, .tp = 2}),
                             {.dp = 8, .ep = 8}}) {
    const Case direct = case_of(mixture(), sizes, false), config = by_node(direct);
    INFO(config.name);
    Running run(config);
    for (int64_t step = 0; step < 3; ++step) {
      if (step == 2) force(run);
      const StepResult result = run.session->step(step);
      const auto again = parse_routes(print_routes(result.experts), "routes");
      REQUIRE(again.ok());
      const Routes routes = routes_of(run, config, {.kind = Routing::Kind::kRecorded, .recorded = *again});
      // Recorded routes do not say which rows are copies of one token: a token has its experts as their shares let it. Where every token has the
      // first two experts nothing is left open.
      const int64_t predicted = predicted_bytes(run, routes), sent = sent_by_all(run);
      if (step == 2)
        CHECK(predicted == sent);
      else
        CHECK(std::abs(static_cast<double>(predicted - sent)) < 0.05 * static_cast<double>(sent));
      // More than from rank to rank: rows that change node and place travel twice.
      Running other(direct);
      CHECK(routes.exchange_bytes() >
            routes_of(other, direct, {.kind = Routing::Kind::kRecorded, .recorded = *again}).exchange_bytes());
    }
  }
}

TEST_CASE("rows by node: even shares let as many tokens cross as the plan expects, in groups of experts too") {
  int64_t without = 0;
  for (const int64_t groups : {1, 4}) {
    INFO(groups << " groups");
    Subject subject = mixture();
    subject.model.experts.groups = groups, subject.model.experts.groups_chosen = 1;
    const Case config = by_node(case_of(subject, {.dp = 4, .ep = 4, .accumulation = 2}, false));
    const Running run(config);
    const int64_t drawn = routes_of(run, config, *routing_named("balanced")).exchange_bytes();
    const int64_t even =
        total(total_wire_bytes(*run.placed.plan)) - total(total_wire_bytes(*run.placed.plan, PackedRows::kLeftOut));
    CHECK(std::abs(static_cast<double>(drawn - even)) < 0.01 * static_cast<double>(even));
    if (groups == 1) without = even;
    CHECK((groups == 1 || even < without));
  }
}

TEST_CASE("routes of a batch of another size are drawn from their shares, under a capacity too") {
  for (const float capacity : {0.0f, 1.0f}) {
    INFO("capacity " << capacity);
    const Sizes sizes{.dp = 4, .ep = 4, .accumulation = 2};
    const Case recorded = case_of(mixture(capacity), sizes, false), longer = [&] {
      Subject subject = mixture(capacity);
      subject.model.max_positions = 4 * subject.model.max_positions, subject.train.seq_len *= 4;
      return case_of(subject, sizes, false);
    }();
    const auto rows_of = [](const Case& config, const Routing& routing) {
      const Running run(config);
      const Routes routes = routes_of(run, config, routing);
      return std::pair(by_step(routes.layers()), routes.exchange_bytes());
    };
    const auto [layers, bytes] = rows_of(recorded, *routing_named("zipf:1"));
    const Routing again{.kind = Routing::Kind::kRecorded, .recorded = layers};
    CHECK(rows_of(recorded, again) == std::pair(layers, bytes));
    const auto [four_times, moved] = rows_of(longer, again);
    REQUIRE(four_times.size() == layers.size());
    for (size_t i = 0; i < layers.size(); ++i) {
      const int64_t chosen = drops_of({&layers[i], 1}).chosen;
      CHECK(drops_of({&four_times[i], 1}).chosen == 4 * chosen);
      CHECK(std::accumulate(four_times[i].by_expert.begin(), four_times[i].by_expert.end(), int64_t{0}) > 2 * chosen);
    }
    CHECK(moved > 3 * bytes);
  }
}

TEST_CASE("experts placed out of order have the rows of contiguous ones on other ranks, and the bytes that are predicted") {
  for (const float capacity : {0.0f, 1.0f})
    for (const Sizes& sizes : kSizes) {
      if (sizes.ep == 1 || is_mirrored(sizes.schedule)) continue;
      const Case contiguous = case_of(mixture(capacity), sizes, true);
      Case config = contiguous;
      config.layout.expert_placement = "1:3,0,6,5,2,7,4,1 2:0,1,2,3,4,5,7,6";
      INFO(config.name << " capacity " << capacity);
      Running in_order(contiguous), run(config);
      for (int64_t step = 0; step < 3; ++step) {
        if (step == 2) force(in_order), force(run);
        const StepResult want = in_order.session->step(step), result = run.session->step(step);
        REQUIRE(result.experts.size() == 2);
        for (size_t layer = 0; layer < 2; ++layer) {
          const ExpertRows &have = result.experts[layer], &reference = want.experts[layer];
          CHECK(have.by_expert == reference.by_expert);
          CHECK(have.by_source == reference.by_source);
          CHECK(have.dropped == reference.dropped);
          CHECK(have.by_rank_contiguous == reference.by_rank);
          CHECK(reference.by_rank_contiguous.empty());
        }
        CHECK(imbalance_of(result.experts).by_rank_contiguous == imbalance_of(want.experts).by_rank);
        const Routing recorded{.kind = Routing::Kind::kRecorded, .recorded = want.experts};
        const Routes routes = routes_of(run, config, recorded);
        CHECK(by_step(routes.layers()) == by_step(result.experts));
        CHECK(predicted_bytes(run, routes) == sent_by_all(run));
        if (step < 2) continue;
        // All rows are of experts 0 and 1, which layer 1 has on the first and the last rank.
        const auto shared = [&](const ExpertRows& layer) { return imbalance(layer.by_rank).value(); };
        CHECK(shared(want.experts[0]) == config.layout.ep);
        CHECK(shared(result.experts[0]) == config.layout.ep / 2.0);
        CHECK(shared(result.experts[1]) == config.layout.ep);
      }
    }
}

TEST_CASE("a forced routing has the rows, the imbalance and the bytes of ranks whose routers are forced") {
  for (const float capacity : {0.0f, 1.0f})
    for (const Sizes& sizes : kSizes) {
      const Case config = case_of(mixture(capacity), sizes, false);
      INFO(config.name << " capacity " << capacity);
      Running run(config);
      force(run);
      const StepResult result = run.session->step(0);
      const Routes routes = routes_of(run, config, *routing_named("forced:2"));
      CHECK(by_step(routes.layers()) == by_step(result.experts));
      CHECK(predicted_bytes(run, routes) == sent_by_all(run));
      const Imbalance measured = imbalance_of(result.experts);
      CHECK(measured.by_expert == 4.0);  // two of eight experts have all rows
      CHECK(*measured.by_expert == expected_imbalance(*routing_named("forced:2"), config.model, 8));
      if (measured.by_rank)
        CHECK(*measured.by_rank == expected_imbalance(*routing_named("forced:2"), config.model, config.layout.ep));
    }
}

TEST_CASE("routes of one layout predict the imbalance of another within 10 %") {
  Running from(case_of(mixture(), {.dp = 2, .ep = 2, .accumulation = 2}, true));
  for (int64_t step = 0; step < 4; ++step) {
    const StepResult recorded = from.session->step(step);
    const Routing routing{.kind = Routing::Kind::kRecorded, .recorded = recorded.experts};
    for (const Sizes& sizes :
         {Sizes{.dp = 4, .ep = 4, .accumulation = 2}, {.dp = 2, .ep = 2, .accumulation = 4}, {.dp = 4, .ep = 2}}) {
      const Case config = case_of(mixture(), sizes, true);
      INFO(config.name << " step " << step);
      Running run(config);
      std::vector<ExpertRows> rows;
      for (int64_t s = 0; s <= step; ++s) rows = run.session->step(s).experts;
      const Routes routes = routes_of(run, config, routing);
      const Imbalance measured = imbalance_of(rows), predicted = imbalance_of(routes.layers());
      CHECK(*predicted.by_expert == Approx(*measured.by_expert).epsilon(0.1));
      CHECK(*predicted.by_rank == Approx(*measured.by_rank).epsilon(0.1));
      for (size_t layer = 0; layer < rows.size(); ++layer)
        for (size_t e = 0; e < 8; ++e)
          CHECK(static_cast<double>(routes.layers()[layer].by_expert[e]) ==
                Approx(static_cast<double>(rows[layer].by_expert[e]))
                    .epsilon(0.1)
                    .margin(config.layout.dp * config.train.grad_accumulation));
    }
  }
}

TEST_CASE("a draw has all rows of each micro-batch, and each expert's share of them to a row") {
  for (const char* name : {"zipf:0.7", "zipf:1.5", "forced:3", "forced:8"})
    for (const Sizes& sizes : kSizes) {
      const Case config = case_of(mixture(), sizes, false);
      INFO(config.name << " " << name);
      Running run(config);
      const Routing routing = *routing_named(name);
      const Routes routes = routes_of(run, config, routing);
      REQUIRE(routes.layers().size() == 2);
      const int64_t tokens = config.train.seq_len * config.sequences_per_step();
      const auto units = static_cast<double>(config.layout.data_ranks() * config.train.grad_accumulation);
      for (const ExpertRows& layer : routes.layers()) {
        CHECK(std::accumulate(layer.by_expert.begin(), layer.by_expert.end(), int64_t{0}) == 2 * tokens);
        CHECK(layer.dropped == 0);
        CHECK(layer.by_rank.empty() == (config.layout.ep == 1));
        // All rows that `ep` ranks' tokens choose are of the experts of one of them.
        if (std::string_view(name) == "forced:3" && config.layout.ep == 2) CHECK(layer.fullest == 2);
        if (config.layout.ep == 1) CHECK(layer.fullest == 0);
        for (const auto& source : layer.by_source)
          CHECK(std::accumulate(source.begin(), source.end(), int64_t{0}) == 2 * tokens / std::ssize(layer.by_source));
        const std::vector<double> shares = shares_of_experts(routing, config.model.experts, layer.layer);
        for (size_t e = 0; e < 8; ++e)
          CHECK(std::abs(static_cast<double>(layer.by_expert[e]) - shares[e] * static_cast<double>(tokens)) <= units);
      }
    }
}

TEST_CASE("rows over the room of an expert are dropped as they are drawn") {
  const Case config = case_of(mixture(1.0f), {.dp = 2, .ep = 2, .accumulation = 2}, false);
  Running run(config);
  const int64_t room = config.model.experts.capacity(config.train.seq_len) * config.sequences_per_step();
  const Routes routes = routes_of(run, config, *routing_named("zipf:2"));
  for (const ExpertRows& layer : routes.layers()) {
    CHECK(std::ranges::max(layer.by_expert) == room);
    CHECK(layer.dropped > 0);
    CHECK(std::accumulate(layer.by_expert.begin(), layer.by_expert.end(), layer.dropped) ==
          2 * config.train.seq_len * config.sequences_per_step());
  }
}

TEST_CASE("a step takes as long as its fullest ranks: ops of rows in proportion to their rows, others as before") {
  for (const bool local : {false, true}) {
    Case config = case_of(mixture(), {.dp = 4, .ep = 4, .accumulation = 2}, false);
    config.machine.local = local;
    config.machine.cores = 16;
    INFO((local ? "local" : "devices"));
    Running run(config);
    FixedCostModel costs;
    costs.otherwise = 0;
    costs.seconds["moe.up"] = 1;
    const auto step = [&](const Routing& routing) {
      return predict(config, *run.placed.plan, run.placed.programs, 0, costs, routing).figures;
    };
    // moe.up: forward, the gradient of its rows and that of its weights, of two layers and two micro-batches.
    const Prediction even = step({}), forced = step(*routing_named("forced:2"));
    CHECK(even.step_s == Approx(2 * 2 * 3));
    CHECK(even.expert_rank_imbalance == 1.0);
    CHECK(forced.step_s == Approx(4 * 2 * 2 * 3));  // the first of four ranks has all rows
    CHECK(forced.expert_rank_imbalance == 4.0);
    CHECK(forced.expert_imbalance == 4.0);
    CHECK(forced.expert_exchange_bytes == even.expert_exchange_bytes);  // three of four ranks send all that they have
    CHECK(forced.wire_bytes == even.wire_bytes);
    CHECK(forced.peak_bytes == even.peak_bytes);
    if (local) continue;
    CHECK(predict_by_segments(config, *run.placed.plan, run.placed.programs, 0, costs, *routing_named("forced:2")).step_s ==
          Approx(forced.step_s));
    // Another routing for each layer: ranks wait for the fullest of each.
    const Routing zipf = *routing_named("zipf:1");
    const Routes routes = routes_of(run, config, zipf);
    CHECK(step(zipf).step_s == Approx(2 * 2 * 3 * routes.fullest(RowUse::kWorks)));
    CHECK(step(zipf).expert_rank_imbalance == Approx(expected_imbalance(zipf, config.model, 4)).epsilon(0.05));
  }
}

}  // namespace shardlab::testing::of_routes
