#include <algorithm>

#include "reports/columns.h"
#include "reports/explain.h"
#include "tests/namespaces.h"
#include "tests/reports/sample.h"
#include "tests/test.h"

using namespace shardlab;
using namespace shardlab::testing;

TEST_CASE("the op table: greatest first, residuals, shares of all ops") {
  const Table t = op_table(small_outcome());
  REQUIRE(t.rows.size() == 3);
  const auto at = [&](size_t row, const char* name) {
    for (size_t c = 0; c < t.columns.size(); ++c)
      if (t.columns[c].name == name) return t.rows[row][c];
    FAIL("no column " << name);
    return Value();
  };
  CHECK(std::get<std::string>(at(0, "op")) == "layer.F mlp.up");
  CHECK(std::get<std::string>(at(1, "op")) == "update adamw");
  CHECK(std::get<double>(at(0, "residual_s")) == 0.06 - 0.05);
  CHECK(std::get<double>(at(0, "residual_pct")) == Approx(20));
  CHECK(std::get<double>(at(0, "share")) == 0.06 / (0.06 + 0.01 + 0.027));
  CHECK(std::get<double>(at(0, "flops_per_s")) == 3e8 / 0.06);
  CHECK(op_table(small_outcome(), 2).rows.size() == 2);
}

TEST_CASE("shares add up: those of the ops of all stages, and those of the parts of a step") {
  for (const CaseOutcome& o : sweep_outcomes()) {
    const Table t = op_table(o);
    const auto column = static_cast<size_t>(std::ranges::find(t.columns, "share", &TableColumn::name) - t.columns.begin());
    double shares = 0;
    for (const auto& row : t.rows) shares += std::get<double>(row[column]);
    if (!t.rows.empty()) CHECK(shares == Approx(1));
    int tenths = 0;
    for (const StepPart& part : step_parts(o)) tenths += part.tenths;
    CHECK(tenths == (o.predicted || o.measured ? 1000 : 0));
  }
  // Of a closed form: no idle time by cause, so that bubble and communication are parts of their own.
  CaseOutcome o = small_outcome();
  o.measured.reset();
  o.predicted->step_s = 3, o.predicted->compute_s = 1, o.predicted->exposed_comm_s = 1, o.predicted->bubble_fraction = 1.0 / 6;
  o.predicted->exposed_copy_s = 0, o.predicted->idle = {};
  std::vector<int> tenths;
  for (const StepPart& part : step_parts(o)) tenths.push_back(part.tenths);
  CHECK(tenths == std::vector<int>{333, 333, 0, 167, 167});
  // Of a timeline: what waits is idle, and communication only what is on its way.
  o.predicted->exposed_comm_s = 1.5, o.predicted->idle.idle_s = 1.5, o.predicted->idle.peer_s = 1;
  const std::vector<StepPart> parts = step_parts(o);
  CHECK(parts[StepPart::kCommunication].seconds == 0.5);
  CHECK(parts[StepPart::kBubble].seconds == 0);
  CHECK(parts[StepPart::kIdle].seconds == 1.5);
}

TEST_CASE("what is tried against communication is against what most of it is") {
  CaseOutcome o = small_outcome();
  o.measured.reset();
  o.predicted->step_s = 2, o.predicted->compute_s = 1, o.predicted->exposed_comm_s = 1, o.predicted->idle = {};
  o.config.layout.dp = 4, o.config.layout.tp = 1, o.config.layout.ep = 4, o.config.layout.overlap = true;
  const auto tried = [&](double rows_s, double gradients_s) {
    o.ops = {{.label = "layer.F moe.go", .kind = "all_to_all", .predicted_s = rows_s},
             {.label = "reduce.64 gradients", .kind = "all_reduce", .predicted_s = gradients_s}};
    std::string all;
    for (const std::string& sentence : reasons(o)) all += sentence + "\n";
    return all;
  };
  CHECK(tried(3, 1).find("try expert_overlap: layer, or a smaller ep") != std::string::npos);
  CHECK(tried(1, 3).find("Less communication of gradients") != std::string::npos);
  o.config.layout.expert_overlap = ExpertOverlap::kLayer;
  CHECK(tried(3, 1).find("try an ep below 4") != std::string::npos);
}

TEST_CASE("the algorithm of each collective is said with its origin, and what the others would take") {
  CaseOutcome o = small_outcome();
  PricedCollective c{"layer.B gradients",
                     "all_reduce",
                     "dp.grads",
                     16,
                     2,
                     4 << 20,
                     24,
                     Algorithm::kHierarchical,
                     {{Algorithm::kHierarchical, 1e-3}, {Algorithm::kRing, 2e-3}}};
  const auto said = [&] { return collective_reasons({&c, 1}, o.config).front(); };
  const std::string head = "layer.B gradients, all_reduce of 4.000 MiB among 16 ranks on 2 nodes (dp.grads), 24 times a step: ";
  CHECK(said() == head + "hierarchical (least predicted time), 1.000 ms; ring 2.000 ms.");
  // Not the least, so that the choice was not open.
  c.prices = {{Algorithm::kRing, 2e-3}, {Algorithm::kHierarchical, 3e-3}};
  CHECK(said() == head + "hierarchical (its strategy needs it), 3.000 ms; ring 2.000 ms.");
  c.prices = {}, c.nodes = 1, c.runs = 1;
  CHECK(
      said() ==
      "layer.B gradients, all_reduce of 4.000 MiB among 16 ranks (dp.grads), once a step: hierarchical (rule by kind and ranks).");
  o.config.layout.collective_algorithm = AlgorithmChoice::kHierarchical;
  CHECK(origin_of(c, o.config) == "asked for");
  o.config.layout.collective_algorithm = AlgorithmChoice::kRing;
  CHECK(origin_of(c, o.config) == "its strategy needs it");
  o.config.canonical = true;
  CHECK(origin_of(c, o.config) == "canonical order");
  const std::vector<PricedCollective> many(11, c);
  const std::vector<std::string> lines = collective_reasons(many, o.config);
  REQUIRE(lines.size() == 9);
  CHECK(lines.back() == "3 more collectives are not shown.");
  const std::string text = explain(o, {0, 0, many});
  CHECK(text.find("\nAlgorithms of collectives") != std::string::npos);
  CHECK(explain(o, {0, 0}).find("Algorithms of collectives") == std::string::npos);
}

TEST_CASE("explanations of the sample sweep") {
  const std::vector<CaseOutcome> cases = sweep_outcomes();
  std::string text;
  for (const size_t i : {size_t{0}, size_t{5}, size_t{9}, size_t{15}, size_t{16}}) text += explain(cases[i], {6, 140}) + "\n";
  REQUIRE_GOLDEN("reports/explain.txt", text);
}

TEST_CASE("memory that no plan has is told apart where the devices' was, the most first") {
  CaseOutcome o = small_outcome();
  const auto said = [&] {
    const std::vector<std::string> all = reasons(o);
    return std::ranges::count_if(all, [](const std::string& s) { return s.starts_with("Memory that no plan has"); });
  };
  CHECK(said() == 0);
  o.measured->unplanned_memory_bytes = (int64_t{500} << 20) + (2 << 20);
  o.measured->unplanned_memory = {{"rounding of allocations", 2 << 20}, {"context", int64_t{500} << 20}};
  const std::vector<std::string> all = reasons(o);
  CHECK(std::ranges::find(all, "Memory that no plan has, 502.0 MiB: 500.0 MiB context, 2.000 MiB rounding of allocations.") !=
        all.end());
}

TEST_CASE("how unevenly rows of experts fell is said, by rank where ranks share them") {
  CaseOutcome o = small_outcome();
  const auto said = [&](std::string_view words) {
    const std::vector<std::string> all = reasons(o);
    return std::ranges::find(all, words) != all.end();
  };
  o.measured->expert_imbalance = 2.5, o.measured->expert_imbalance_last = 1.25;
  CHECK(said("The fullest expert of a layer had 2.50 times the mean of rows (1.25 times in the last step)."));
  o.measured->expert_rank_imbalance = 1.5, o.measured->expert_rank_imbalance_last = 1.125;
  CHECK(said(
      "The fullest expert of a layer had 2.50 times the mean of rows (1.25 times in the last step); of the ranks that share the "
      "experts the fullest had 1.50 times the mean (1.12 times), and the others wait for it in the exchange."));
  o.measured->expert_rank_imbalance_peak = 1.75;
  CHECK(said(
      "The fullest expert of a layer had 2.50 times the mean of rows (1.25 times in the last step); of the ranks that share the "
      "experts the fullest had 1.50 times the mean (1.12 times), and the others wait for it in the exchange; in one micro-batch of "
      "a layer a rank had up to 1.75 times its even share."));
  o.config.layout.ep = 4, o.config.layout.expert_bound = 1.25f;
  o.measured->expert_reruns = 2;
  o.measured->losses.resize(40);
  CHECK(said(
      "The fullest expert of a layer had 2.50 times the mean of rows (1.25 times in the last step); of the ranks that share the "
      "experts the fullest had 1.50 times the mean (1.12 times), and the others wait for it in the exchange; in one micro-batch of "
      "a layer a rank had up to 1.75 times its even share. 2 of 40 steps ran again, one sequence at a time: a rank had 1.75 "
      "times its even share of rows, and expert_bound is 1.25; expert_bound: 1.8 would have held every row of the measured "
      "steps."));
  o.measured->expert_reruns = 5;
  CHECK(
      rerun_text(o.config, *o.measured) ==
      "5 of 40 steps ran again, one sequence at a time: expert_bound=1.25 is too tight. A rank had up to 1.75 times its even share "
      "of rows; expert_bound: 1.8 would have held every row of the measured steps");
  // Ranks of another group had other sequences in the first run.
  o.config.layout.dp = 8, o.config.canonical = true;
  CHECK(rerun_text(o.config, *o.measured).ends_with("up to 1.75 times its even share of rows, or more; try 1.8"));
  o.config.layout.dp = 4;
  CHECK(rerun_text(o.config, *o.measured).ends_with("would have held every row of the measured steps"));
  o.measured->expert_reruns = 4;
  o.measured->expert_rank_imbalance_peak = 3.95;
  CHECK(rerun_text(o.config, *o.measured).ends_with("expert_bound is 1.25; expert_bound: 0 holds every row"));
  o.measured->expert_rank_imbalance_peak = 1.25;
  CHECK(rerun_text(o.config, *o.measured).ends_with("in the measured ones expert_bound=1.25 had room for every row"));
  o.measured->expert_reruns = 0;
  o.measured->expert_rank_imbalance.reset(), o.measured->expert_rank_imbalance_peak.reset();
  o.measured->expert_dropped = 0.125, o.measured->expert_dropped_last = 0.25;
  CHECK(
      said("The fullest expert of a layer had 2.50 times the mean of rows (1.25 times in the last step). Experts had no room for "
           "12.5 % of "
           "the rows that tokens chose (25.0 % in the last step)."));
}

TEST_CASE("a routing that the case names is said with what is predicted of it") {
  CaseOutcome o = small_outcome();
  const auto said = [&](std::string_view words) {
    const std::vector<std::string> all = reasons(o);
    return std::ranges::find(all, words) != all.end();
  };
  o.predicted->expert_imbalance = 3.5;
  CHECK_FALSE(said("By data.routing= the fullest expert of a layer has 3.50 times the mean of rows."));
  o.config.data.routing = "zipf:1";
  CHECK(said("By data.routing=zipf:1 the fullest expert of a layer has 3.50 times the mean of rows."));
  o.predicted->expert_rank_imbalance = 1.5, o.predicted->expert_exchange_bytes = 2 << 20;
  o.config.data.routing.clear(), o.config.data.routes = "routes.txt";
  CHECK(said(
      "By data.routes the fullest expert of a layer has 3.50 times the mean of rows, and the fullest of the ranks that share the "
      "experts 1.50 times; ranks send each other 2.000 MiB of rows a step."));
}

TEST_CASE("a case without figures says why, one without ops has no table") {
  CaseOutcome o = small_outcome();
  o.predicted.reset();
  o.measured.reset();
  o.ops.clear();
  o.status = Status::kFailed;
  o.reason = "rank 1 died";
  CHECK(reasons(o) == std::vector<std::string>{"The case did not run: rank 1 died."});
  CHECK(explain(o) == "one (1 rank): failed, rank 1 died\n\n- The case did not run: rank 1 died.\n");
}

TEST_CASE("what the calibration did not measure is said by name") {
  CaseOutcome o = small_outcome();
  o.predicted->extrapolated = true;
  const auto said = [&](const char* words) {
    const auto all = reasons(o);
    return std::any_of(all.begin(), all.end(), [&](const std::string& s) { return s.find(words) != std::string::npos; });
  };
  CHECK_FALSE(said("canonical"));
  o.config.threads_per_rank = 3;
  CHECK(said("one thread a rank, and this case has 3"));
  o.config.canonical = true;
  CHECK(said("canonical multiplies matrices in its own fixed order"));
}

TEST_CASE("more threads than cores is said") {
  CaseOutcome o = small_outcome();
  o.config.layout.dp = 4;
  const auto all = reasons(o);
  CHECK(std::any_of(all.begin(), all.end(),
                    [](const std::string& s) { return s.find("4 compute threads share 2 cores") != std::string::npos; }));
}
