#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "plan/keys.h"
#include "reports/columns.h"
#include "reports/selection.h"
#include "reports/summary.h"
#include "tests/namespaces.h"
#include "tests/reports/sample.h"
#include "tests/test.h"

using namespace shardlab;
using namespace shardlab::testing;

namespace {

/// `small_outcome` under another name, with another measured step.
CaseOutcome variant(const std::string& name, double measured_step_s, int dp = 1) {
  CaseOutcome o = small_outcome();
  o.case_id = name;
  o.config.name = name;
  o.config.layout.dp = dp;
  o.measured->step_s = measured_step_s;
  return o;
}

}  // namespace

TEST_CASE("what a transport does not count is no measurement, and is not called exact") {
  std::vector<CaseOutcome> cases{variant("counted", 0.096), variant("not counted", 0.08)};
  cases[1].measured->wire_bytes.reset();
  const Summary s = summarise(cases);
  CHECK(s.all.wire_cases == 1);
  CHECK(s.all.wire_exact == 1);
  bool said = false;
  for (const Statement& statement : statements(cases, s))
    said = said ||
           statement.text ==
               "Peak memory was predicted exactly, 0 bytes off, in all 2 cases; wire bytes in the 1 whose transport counts them.";
  CHECK(said);
}

TEST_CASE("a second run that no step made is no miss of the predicted peak, and one that was made may be") {
  std::vector<CaseOutcome> cases{variant("all", 0.096), variant("bounded", 0.08)};
  CaseOutcome& bounded = cases[1];
  bounded.config.layout.ep = 4, bounded.config.layout.expert_bound = 1.5f;
  bounded.predicted->peak_bytes += 1000;
  const auto said = [&] {
    for (const Statement& statement : statements(cases, summarise(cases)))
      if (statement.text.starts_with("Peak memory was ")) return statement.text;
    return std::string();
  };
  CHECK(summarise(cases).all.peak_exact == 1);
  CHECK(said() ==
        "Peak memory was predicted exactly, 0 bytes off, in all 1 case; wire bytes in the 2 whose transport counts them. In 1 "
        "further case no step ran "
        "again, and the second run may decide the predicted peak.");
  bounded.measured->expert_reruns = 1;
  CHECK(said() == "Peak memory was exact in 1 of 2 cases (largest miss 1000 B), wire bytes in 2 of 2 (largest miss 0 B).");
  // More than was predicted is a miss, whichever run it was.
  bounded.measured->expert_reruns = 0;
  bounded.measured->peak_bytes = bounded.predicted->peak_bytes + 8;
  CHECK(said() == "Peak memory was exact in 1 of 2 cases (largest miss 8 B), wire bytes in 2 of 2 (largest miss 0 B).");
}

TEST_CASE("fastest, smallest and accuracy of three cases") {
  std::vector<CaseOutcome> cases{variant("a", 0.096), variant("b", 0.08), variant("c", 0.12, 2)};
  cases[2].measured->peak_bytes = 40'000'000;
  const Summary s = summarise(cases);
  CHECK(s.by_measurement);
  CHECK(s.fastest == 1);
  CHECK(s.smallest == 2);
  CHECK(s.all.cases == 3);
  CHECK(s.all.median_abs_pct == Approx(12.5));  // errors: -6.25, +12.5, -25 percent
  CHECK(s.all.worst_abs_pct == Approx(25));
  CHECK(s.all.worst_case == 2);
  CHECK(s.all.within_10 == 1);
  CHECK(s.all.peak_exact == 2);
  CHECK(s.all.peak_largest_miss == 10'000'000);
  CHECK(s.all.wire_exact == 3);
  CHECK(s.all.wire_cases == 3);
  REQUIRE(s.by_world_size.size() == 2);
  CHECK(s.by_world_size[0].first == 1);
  CHECK(s.by_world_size[0].second.cases == 2);
  CHECK(s.by_world_size[0].second.median_abs_pct == Approx(9.375));
  CHECK(s.by_world_size[1].second.median_abs_pct == Approx(25));
}

TEST_CASE("the order of predictions is Kendall's tau-b, and spread is told beside the errors") {
  const auto of = [](const std::vector<std::pair<double, double>>& steps) {
    std::vector<CaseOutcome> cases;
    for (const auto& [predicted, measured] : steps) {
      cases.push_back(variant(fmt::format("case {}", cases.size()), measured));
      cases.back().predicted->step_s = predicted;
      cases.back().measured->step_spread = 0.01 * static_cast<double>(cases.size());
    }
    return cases;
  };
  // One of ten pairs the wrong way round.
  const std::vector<CaseOutcome> one_wrong = of({{1, 1}, {5, 4}, {2, 2}, {4, 5}, {3, 3}});
  const Summary s = summarise(one_wrong);
  REQUIRE(s.all.order);
  CHECK(*s.all.order == Approx(0.8));
  CHECK(s.all.median_spread == Approx(0.03));
  std::string said;
  for (const Statement& statement : statements(one_wrong, s))
    if (statement.text.starts_with("Step time was predicted")) said = statement.text;
  CHECK(
      said.ends_with(" The order of the cases by step time has a Kendall's tau of 0.80. A case's own measured steps spread by 3.0 "
                     "% in the median (p90 - p10)."));
  // 7 pairs alike, 1 equal on one side, 2 on the other: 7 / sqrt(9 8).
  CHECK(*summarise(of({{2, 2}, {4, 3}, {1, 1}, {3, 3}, {1, 2}})).all.order == Approx(7 / std::sqrt(72.0)));
  // A pair that is equal on both sides: of 10 pairs 8 are against each other, 1 is equal twice, and 1 on the one side alone.
  CHECK(*summarise(of({{1, 4}, {1, 4}, {2, 3}, {3, 2}, {4, 2}})).all.order == Approx(-8 / std::sqrt(9 * 8.0)));
  CHECK_FALSE(summarise(of({{1, 1}, {1, 2}, {1, 3}, {1, 4}, {1, 5}})).all.order);
  CHECK_FALSE(summarise(of({{1, 1}, {2, 2}, {3, 3}, {4, 4}})).all.order);
}

TEST_CASE("without measurements the predictions decide; failed cases never win") {
  std::vector<CaseOutcome> cases{variant("a", 0.1), variant("b", 0.1)};
  for (CaseOutcome& o : cases) o.measured.reset();
  cases[1].predicted->step_s = 0.01;
  cases[1].status = Status::kOom;
  const Summary s = summarise(cases);
  CHECK_FALSE(s.by_measurement);
  CHECK(s.fastest == 0);
  CHECK(s.all.cases == 0);
  CHECK(s.by_status[static_cast<size_t>(Status::kOom)] == 1);
}

TEST_CASE("losses are compared within a model, batch, optimizer and seed, whatever the layout") {
  std::vector<CaseOutcome> cases{variant("a", 0.1), variant("b", 0.1, 2), variant("c", 0.1)};
  cases[1].measured->losses = {5.5, 4.25, 3.625, 3.0};  // shorter, and 0.125 apart at step 2
  cases[2].config.train.seed = 2;
  const Summary s = summarise(cases);
  REQUIRE(s.losses.size() == 2);
  CHECK(s.losses[0].cases == std::vector<int>{0, 1});
  CHECK(s.losses[0].largest_deviation == 0.125);
  CHECK(s.losses[0].at_step == 2);
  CHECK(s.losses[0].steps == 4);
  CHECK(s.losses[0].unigram == 3.25);
  CHECK(s.losses[1].cases == std::vector<int>{2});
  CHECK(s.losses[1].largest_deviation == 0);
}

TEST_CASE("packed documents: losses of their own, and where their length is not known no MFU and a word of the prediction") {
  std::vector<CaseOutcome> cases{variant("a", 0.1), variant("b", 0.1, 2)};
  CHECK(summarise(cases).losses.size() == 1);
  const auto said = [&] {
    const std::vector<Statement> all = statements(cases, summarise(cases));
    return std::ranges::any_of(
        all, [](const Statement& s) { return s.text.find("as if each sequence were one document") != std::string::npos; });
  };
  CHECK_FALSE(said());
  cases[1].config.train.precision = Precision::kFp32;
  cases[1].config.machine.device.peak_flops["fp32"] = 1e12;
  const std::optional<double> whole = mfu(cases[1], 0.1);
  REQUIRE(whole);
  cases[1].config.data.packed = true;
  CHECK(summarise(cases).losses.size() == 2);
  CHECK(said());
  CHECK_FALSE(mfu(cases[1], 0.1));
  cases[1].config.data.document_tokens = cases[1].config.train.seq_len / 4;
  CHECK_FALSE(said());
  const std::optional<double> packed = mfu(cases[1], 0.1);
  REQUIRE(packed);
  CHECK(*packed < *whole);
}

TEST_CASE("the time to a loss is told in order of time, with those that did not reach it") {
  std::vector<CaseOutcome> cases{variant("slow", 0.1), variant("lossy", 0.05), variant("fast", 0.04)};
  for (CaseOutcome& o : cases) {
    o.loss_target.loss = 2.5;
    o.loss_target.mean_of = 2;
    o.measured->losses = {5, 3, 2, 2};
  }
  cases[1].measured->losses = {5, 4, 3, 3};
  const auto said = [&] {
    std::vector<std::string> found;
    for (const Statement& s : statements(cases, summarise(cases)))
      if (s.text.starts_with("Time to a loss")) found.push_back(s.text);
    return found;
  };
  CHECK(said() == std::vector<std::string>{
                      "Time to a loss of 2.5 (mean of 2 steps): fast (1 rank) after 120.0 ms and 12.29 k tokens, 3 steps; "
                      "slow (1 rank) after 300.0 ms and 12.29 k tokens, 3 steps; lossy (1 rank) not in 4 steps."});
  for (CaseOutcome& o : cases) o.loss_target.loss = 0;
  CHECK(said().empty());
}

TEST_CASE("a loss that is not finite is bad news") {
  std::vector<CaseOutcome> cases{variant("a", 0.1)};
  cases[0].measured->losses[3] = HUGE_VAL;
  const auto all = statements(cases, summarise(cases));
  const bool said = std::any_of(all.begin(), all.end(), [](const Statement& s) {
    return s.mood == Statement::Mood::kBad && s.text.find("not finite") != std::string::npos;
  });
  CHECK(said);
}

TEST_CASE("no cases, and no case that ran") {
  CHECK(statements({}, summarise({})).front().text == "There are no cases.");
  std::vector<CaseOutcome> cases{variant("a", 0.1)};
  cases[0].status = Status::kRefused;
  cases[0].predicted.reset();
  cases[0].measured.reset();
  CHECK(statements(cases, summarise(cases)).front().text == "No case ran: the table gives the reason of each.");
}

TEST_CASE("the answer of the sample sweep") {
  const std::vector<CaseOutcome> cases = sweep_outcomes();
  constexpr const char* kMoods[] = {"answer", "good", "note", "bad"};
  std::string text;
  for (const Statement& s : statements(cases, summarise(cases)))
    text += std::string(kMoods[static_cast<size_t>(s.mood)]) + ": " + s.text + "\n";
  REQUIRE_GOLDEN("reports/statements.txt", text);
}

TEST_CASE("a tick stands for a promise that was kept: equal bits in canonical mode, and no bound where none is promised") {
  const auto said = [](const std::vector<CaseOutcome>& cases) {
    std::vector<std::pair<Statement::Mood, std::string>> all;
    for (const Statement& s : statements(cases, summarise(cases)))
      if (s.text.starts_with("Losses (")) all.emplace_back(s.mood, s.text.substr(s.text.find("): ") + 3));
    return all;
  };
  using Mood = Statement::Mood;
  using Said = std::vector<std::pair<Mood, std::string>>;
  std::vector<CaseOutcome> cases{variant("a", 0.1), variant("b", 0.1, 2), variant("c", 0.1, 4), variant("d", 0.1, 4)};
  for (CaseOutcome& o : cases) o.measured->losses = {5.5, 4.25, 3.5}, o.config.canonical = true;
  CHECK(said(cases) == Said{{Mood::kGood, "4 layouts in canonical mode are equal to the bit over 3 steps, as promised."}});
  cases[1].measured->losses[2] = 3.75;
  // A layout that keeps tokens in another order adds them in another order, and is held to those of its own.
  std::vector<CaseOutcome> reordered = cases;
  reordered[1].config.layout.cp = 2, reordered[1].config.layout.cp_kind = ContextKind::kZigzag;
  CHECK(said(reordered) == Said{{Mood::kGood, "3 layouts in canonical mode are equal to the bit over 3 steps, as promised."}});
  reordered[2].config.layout = reordered[1].config.layout;
  CHECK(said(reordered).back() ==
        std::pair(Mood::kBad,
                  std::string("2 layouts in canonical mode lie up to 0.25 apart, at step 2, where equal bits are promised.")));
  CHECK(said(cases) ==
        Said{{Mood::kBad, "4 layouts in canonical mode lie up to 0.25 apart, at step 2, where equal bits are promised."}});
  // What trains otherwise is held to none of the others.
  std::vector<CaseOutcome> clipped = cases;
  clipped[1].config.train.clip_norm = 1;
  CHECK(said(clipped).front() ==
        std::pair(Mood::kGood, std::string("3 layouts in canonical mode are equal to the bit over 3 steps, as promised.")));
  // Groups whose labels say the same are told apart by what sets them apart.
  std::vector<CaseOutcome> heavier = cases;
  heavier[1].config.train.weight_decay = 0.5f;
  const std::vector<LossGroup> groups = summarise(heavier).losses;
  REQUIRE(groups.size() == 2);
  CHECK(groups[0].label.ends_with(", train.weight_decay=" + find_key("train.weight_decay")->get(heavier[0].config)));
  CHECK(groups[1].label.ends_with(", train.weight_decay=0.5"));
  std::vector<CaseOutcome> resumed = cases;
  resumed[1].config.checkpoint.resume = "saved";
  CHECK(said(resumed).front() == said(clipped).front());
  cases[1].config.canonical = cases[2].config.canonical = false;
  cases[3].config.layout.compression.kind = CompressionKind::kTopK;
  cases[3].measured->losses[1] = 5.25;
  CHECK(
      said(cases) ==
      Said{{Mood::kNote,
            "2 layouts differ by at most 0.25 over 3 steps. They add in different orders, for which no bound is promised; with "
            "canonical: true the bits are equal."},
           {Mood::kNote,
            "1 layout of another method (compression, staleness, delayed or local updates): the largest difference from the other "
            "layouts is 1 over 3 steps. A method's own difference has no promised bound."}});
}

TEST_CASE("what moments in 8 bits do to a loss is said of their blocks, and never of the order of sums") {
  const auto said = [](const std::vector<CaseOutcome>& cases) {
    std::vector<std::string> all;
    for (const Statement& s : statements(cases, summarise(cases)))
      if (s.text.starts_with("Losses (")) {
        CHECK(s.mood != Statement::Mood::kBad);
        all.push_back(s.text.substr(s.text.find("): ") + 3));
      }
    return all;
  };
  const std::string blocks =
      "whose moments in 8 bits have other blocks, and so other scales: the largest difference from the other "
      "layouts is 0.5 over 3 steps, for which no bound is promised; docs/optimizers.md says what narrows it.";
  std::vector<CaseOutcome> cases{variant("a", 0.1), variant("b", 0.1, 2), variant("c", 0.1)};
  for (CaseOutcome& o : cases) {
    o.config.train.optimizer = Optimizer::kAdamW8bit, o.config.canonical = true;
    o.config.layout.tp = o.config.layout.pp = 1, o.config.layout.zero = 0;
    o.measured->losses = {5.5, 4.25, 3.5};
  }
  // Every rank updates whole parameters: the blocks of one rank, and so its bits.
  CHECK(said(cases) == std::vector<std::string>{"3 layouts in canonical mode are equal to the bit over 3 steps, as promised."});
  cases[2].measured->losses[2] = 4;
  const auto cuts = {+[](Layout& l) { l.tp = 2; }, +[](Layout& l) { l.ep = 2; }, +[](Layout& l) { l.zero = 1; },
                     +[](Layout& l) { l.parameter_server.servers = 1; }, +[](Layout& l) { l.offload.optimizer = OffloadTo::kCpu; }};
  for (const auto cut : cuts) {
    std::vector<CaseOutcome> other = cases;
    cut(other[2].config.layout);
    CHECK(said(other) == std::vector<std::string>{"2 layouts in canonical mode are equal to the bit over 3 steps, as promised.",
                                                  "1 layout " + blocks});
    // The same layout with moments in fp32 has the bits of the others, and breaks its promise.
    for (CaseOutcome& o : other) o.config.train.optimizer = Optimizer::kAdamW;
    CHECK(summarise(other).losses.front().spread[static_cast<size_t>(LossPromise::kExact)].largest == 0.5);
  }
  for (CaseOutcome& o : cases) o.config.canonical = false, o.config.layout.zero = 2;
  CHECK(said(cases) == std::vector<std::string>{"3 layouts " + blocks});
  // Another method is no part of what blocks make.
  cases.push_back(cases[0]);
  cases[3].config.layout.diloco.steps = 2, cases[3].measured->losses[0] = 6.5;
  CHECK(said(cases).front() == "3 layouts " + blocks);
}

TEST_CASE("no equal bits are promised to 16 bits in canonical mode") {
  std::vector<CaseOutcome> cases{variant("a", 0.1), variant("b", 0.1, 2)};
  for (CaseOutcome& o : cases) o.config.train.precision = Precision::kBf16, o.measured->losses = {5.5, 4.25};
  cases[1].measured->losses[1] = 4;
  bool found = false;
  for (const Statement& s : statements(cases, summarise(cases))) {
    CHECK(s.text.find("canonical") == std::string::npos);
    found |= s.text.ends_with(
        "2 layouts differ by at most 0.25 over 2 steps. They add and round in different orders, for which no bound is promised.");
  }
  CHECK(found);
}

TEST_CASE("of many cases the fastest, the smallest and those that claims name stand for all, which are counted") {
  Selector selector(10, {"case 3"});
  for (int i = 0; i < 1000; ++i) {
    CaseOutcome o = variant(fmt::format("case {}", i), 1.0 / (1 + (i * 37) % 1000));
    o.status = i % 4 == 0 ? Status::kRefused : Status::kOk;
    if (i == 5) o.measured->peak_bytes = 1;
    selector.add(std::move(o));
  }
  const Selection s = selector.take();
  CHECK(s.total == 1000);
  CHECK_FALSE(s.complete());
  std::vector<std::string> names;
  for (const CaseOutcome& o : s.cases) names.push_back(o.config.name);
  // 37 i = 999 mod 1000 at i = 27, then 26 less for each next: every fourth is refused.
  CHECK(names.size() == 12);
  for (const char* name : {"case 27", "case 3", "case 5"}) CHECK(std::ranges::count(names, name) == 1);
  const Summary summary = summarise(s.cases, s.left_out);
  CHECK(summary.total == 1000);
  CHECK(summary.by_status[static_cast<size_t>(Status::kOk)] == 750);
  CHECK(summary.by_status[static_cast<size_t>(Status::kRefused)] == 250);
  CHECK(s.cases[static_cast<size_t>(summary.fastest)].config.name == "case 27");
  CHECK(s.cases[static_cast<size_t>(summary.smallest)].config.name == "case 5");
}

TEST_CASE("of several models each has its own fastest case, and their losses have one sentence a promise") {
  std::vector<CaseOutcome> cases{variant("a", 0.1), variant("b", 0.05, 2), variant("c", 0.2), variant("d", 0.4, 2),
                                 variant("e", 0.3)};
  cases[2].config.model.name = cases[3].config.model.name = "larger";
  cases[4].config.model.name = "largest";
  cases[3].measured->peak_bytes = 40'000'000;
  for (CaseOutcome& o : cases) o.config.canonical = true;
  for (CaseOutcome& o : cases) o.measured->loss_unigram = o.measured->losses.back() + 1;
  cases[4].measured->loss_unigram = cases[4].measured->losses.back() - 1;
  const Summary s = summarise(cases);
  REQUIRE(s.by_model.size() == 3);
  CHECK(s.by_model[0].fastest == 1);
  CHECK(s.by_model[1].fastest == 2);
  CHECK(s.by_model[1].smallest == 3);
  CHECK(s.by_model[2].fastest == 4);
  CHECK(s.fastest == 1);
  CHECK(s.smallest == 3);
  std::string text;
  for (const Statement& statement : statements(cases, s)) text += statement.text + "\n";
  REQUIRE_GOLDEN("reports/statements_of_models.txt", text);
}

TEST_CASE("how unevenly rows of experts fell is said of a few cases, and of the others where to look") {
  std::vector<CaseOutcome> cases{variant("dense", 0.096)};
  for (const char* name : {"a", "b", "c", "d", "e"}) {
    cases.push_back(variant(name, 0.08));
    cases.back().measured->expert_imbalance = 2, cases.back().measured->expert_imbalance_last = 1.5;
  }
  cases[1].measured->expert_rank_imbalance = 1.25, cases[1].measured->expert_rank_imbalance_last = 1;
  cases[1].measured->expert_rank_imbalance_peak = 1.75;
  cases[1].measured->expert_reruns = 1;
  cases[2].measured->expert_dropped = 0.125, cases[2].measured->expert_dropped_last = 0;
  std::string said;
  for (const Statement& statement : statements(cases, summarise(cases)))
    if (statement.text.starts_with("Rows of a layer's fullest expert")) said = statement.text;
  INFO(said);
  CHECK(said.starts_with("Rows of a layer's fullest expert over the mean: a"));
  CHECK(said.find(" 2.00 (last step 1.50), by rank 1.25 (1.00), in a micro-batch up to 1.75, 1 step ran again; b") !=
        std::string::npos);
  CHECK(said.find(" 2.00 (last step 1.50), 12.5 % of rows dropped (0.0 %); c") != std::string::npos);
  CHECK(said.ends_with("; 1 more in the table."));
  CHECK(said.find("dense") == std::string::npos);
  // One step in ten is few, one more is not; a bound that holds the measured rows is none too tight.
  const auto warned = [&] {
    for (const Statement& statement : statements(cases, summarise(cases)))
      if (statement.text.starts_with("Steps take twice their time. ")) return statement.text;
    return std::string();
  };
  Measurement& m = *cases[1].measured;
  cases[1].config.layout.ep = 4, cases[1].config.layout.expert_bound = 1.5f;
  m.losses.resize(10);
  CHECK(warned().empty());
  m.expert_reruns = 2;
  CHECK(
      warned().ends_with(": 2 of 10 steps ran again, one sequence at a time: expert_bound=1.5 is too tight. A rank had up to 1.75 "
                         "times its even share "
                         "of rows; expert_bound: 1.8 would have held every row of the measured steps."));
  m.expert_rank_imbalance_peak = 1.5;
  CHECK(warned().empty());
}
