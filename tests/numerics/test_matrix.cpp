// How equal is equal: every strategy of the catalogue, alone and composed, against the separately written single-rank reference.
//
// Canonical mode (tiers E0 and E1): losses and parameters after 5 steps have the reference's bits. Fast mode: their error against
// the fp64 reference is at most 1.5 times that of one rank in fast mode.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <map>
#include <string>
#include <vector>

#include "plan/base/hash.h"
#include "strategies/catalogue.h"
#include "tests/deal.h"
#include "tests/namespaces.h"
#include "tests/numerics/against_reference.h"
#include "tests/numerics/matrix.h"
#include "tests/numerics/train_case.h"
#include "tests/test.h"

namespace shardlab::testing::of_matrix {
namespace {

using testing::differences;
using testing::error_of;
using testing::expect;
using testing::kSteps;
using testing::Subject;
using testing::Trained;

Result<Trained> train(const Case& config) { return testing::train_case(config, testing::RandomText(config.model.vocab), kSteps); }

/// What was covered: rows by strategy and world size, how many failed, and the largest figure of merit.
class Coverage {
 public:
  void add(const Case& config, bool failed, double figure) {
    note("any", config, failed, figure);
    for (const Strategy& s : catalogue())
      if (s.applies(config)) note(std::string(s.name), config, failed, figure);
  }
  bool has(std::string_view strategy) const { return rows_.contains(std::string(strategy)); }
  size_t rows() const { return rows_.contains("any") ? static_cast<size_t>(rows_.at("any").count) : 0; }
  bool covers_uneven_ranks_and_threads() const {
    const auto any = rows_.find("any");
    return any != rows_.end() && any->second.by_ranks.contains(0) && any->second.threads > 0;
  }
  int failed() const { return rows_.contains("any") ? rows_.at("any").failed : 0; }
  /// The table; `figure` heads the last column.
  void print(std::string_view title, std::string_view figure) {
    fmt::print("{}\n  {:<24}{:>6}{:>8}{:>8}{:>8}{:>8}{:>8}{:>8}{:>10}{:>8}   {}\n", title, "strategy", "rows", "1 rank", "2", "4",
               "8", "16", "3, 6", "2 threads", "failed", figure);
    for (auto& [name, row] : rows_)
      fmt::print("  {:<24}{:>6}{:>8}{:>8}{:>8}{:>8}{:>8}{:>8}{:>10}{:>8}   {:.3g}\n", name, row.count, row.by_ranks[1],
                 row.by_ranks[2], row.by_ranks[4], row.by_ranks[8], row.by_ranks[16], row.by_ranks[0], row.threads, row.failed,
                 row.largest);
  }

 private:
  struct Row {
    int count = 0, failed = 0, threads = 0;
    std::map<int, int> by_ranks;
    double largest = 0;
  };
  void note(const std::string& name, const Case& config, bool failed, double figure) {
    Row& row = rows_[name];
    ++row.count;
    row.failed += failed;
    const int ranks = config.layout.world_size();
    ++row.by_ranks[std::has_single_bit(static_cast<unsigned>(ranks)) ? ranks : 0];
    row.threads += config.threads_per_rank > 1;
    row.largest = std::max(row.largest, figure);
  }
  std::map<std::string, Row> rows_;
};

/// Does some strategy of the row promise less than the reference's bits?
bool bitwise(const Case& config) {
  return std::none_of(catalogue().begin(), catalogue().end(),
                      [&](const Strategy& s) { return s.applies(config) && s.tier > Tier::kE1; });
}

/// The `share`-th of `shares` parts of the rows, dealt by the hash of the layout: subjects divide the product among them, each with
/// every value of every key.
std::vector<Case> deal(std::vector<Case> rows, uint64_t share, uint64_t shares) {
  std::erase_if(rows, [&](const Case& c) { return mix(hash_text(c.name)) % shares != share % shares; });
  return rows;
}

}  // namespace

TEST_CASE("the reference moves, stays finite and is not a fixed point for every subject") {
  for (const Subject& subject : testing::subjects()) {
    INFO(subject.name);
    const auto expected = expect<float>(subject);
    for (const float loss : expected.losses) REQUIRE(std::isfinite(loss));
    for (const auto& [name, values] : expected.parameters) {
      INFO(name);
      for (const float v : values) REQUIRE(std::isfinite(v));
      REQUIRE(values != expected.initial.at(name));
    }
    REQUIRE(expected.losses.front() != expected.losses.back());
  }
}

TEST_CASE("canonical mode: every layout trains to the reference's bits") {
  // The eight subjects of 8 sequences a step share the product so that each layout meets both optimizers, on different models. The
  // others add the batches that 8 sequences cannot be cut into.
  const uint64_t shares = dealt(30, 1440), others = dealt(1, 36);
  constexpr int kShown = 10;
  const auto layouts = testing::layouts(), composed = testing::composed_layouts();
  const uint64_t composed_shares = dealt(60, 10800);
  Coverage coverage;
  const auto train_rows = [&](const Subject& subject, const auto& expected, const std::vector<Case>& rows) {
    for (const Case& config : rows) {
      if (!bitwise(config)) continue;
      const auto trained = train(config);
      const std::string difference = trained ? differences(config, expected, *trained) : to_string(trained.error());
      coverage.add(config, !difference.empty(), 0);
      INFO(subject.name << ": " << config.name << ", " << config.threads_per_rank << " threads a rank\n" << difference);
      if (coverage.failed() <= kShown) CHECK(difference.empty());
    }
  };
  uint64_t number = 0;
  for (const Subject& subject : testing::subjects()) {
    if (subject.train.precision != Precision::kFp32) continue;  // rounds otherwise than the reference
    auto rows = testing::rows_of(subject, layouts);
    if (subject.sequences == 16) std::erase_if(rows, [](const Case& c) { return c.train.grad_accumulation * c.layout.dp != 16; });
    const auto expected = expect<float>(subject);
    rows = deal(std::move(rows), number / 2 + number % 2, subject.sequences == 8 ? shares : dealt(2, 96));
    for (Case& config : deal(testing::rows_of(subject, testing::selective_layouts()), number, 8 * others))
      rows.push_back(std::move(config));
    for (Case& config : deal(testing::rows_of(subject, testing::offload_layouts()), number, 8 * others))
      rows.push_back(std::move(config));
    for (Case& config : deal(testing::rows_of(subject, testing::served_layouts()), number, 24 * others))
      rows.push_back(std::move(config));
    for (Case& config : deal(testing::rows_of(subject, testing::validated_layouts()), number, others))
      rows.push_back(std::move(config));
    for (Case& config : deal(testing::rows_of(subject, testing::sequence_layouts()), number, 48 * others))
      rows.push_back(std::move(config));
    for (Case& config : deal(testing::rows_of(subject, testing::chunked_layouts()), number, 16 * others))
      rows.push_back(std::move(config));
    // Kinds that leave the order of tokens as it is; the others have tests of their own (test_context_parallel.cpp).
    for (Case& config :
         deal(testing::rows_of(subject, testing::context_layouts({ContextKind::kRing, ContextKind::kUlysses})), number, 8 * others))
      rows.push_back(std::move(config));
    for (Case& config : deal(testing::rows_of(subject, composed), number, composed_shares)) rows.push_back(std::move(config));
    train_rows(subject, expected, rows);
    ++number;
  }
  for (const Subject& subject : testing::mixture_subjects()) {
    auto rows = testing::rows_of(subject, testing::expert_layouts());
    for (Case& config : deal(testing::rows_of(subject, composed), number++, composed_shares / 12))
      if (config.layout.ep > 1) rows.push_back(std::move(config));
    train_rows(subject, expect<float>(subject), rows);
  }
  coverage.print("Bitwise equal to the single-rank reference after 5 steps (canonical mode)", "");
  REQUIRE(coverage.failed() == 0);
  for (const Strategy& s : catalogue()) {
    INFO("strategy `" << s.name << "` has no row in the matrix: give its key a value in tests/numerics/matrix.cpp");
    REQUIRE((s.tier > Tier::kE1 || coverage.has(s.name)));
  }
}

TEST_CASE("every schedule of the learning rate trains to the reference's bits, and goes on at its floor") {
  using Kind = LearningRate::Kind;
  constexpr float kPeak = 1.0f, kFloor = 0.125f;
  struct Row {
    Kind kind;
    std::array<float, kSteps> rates;  ///< written out by hand: one step of warm-up, the end of the schedule after step 3
  };
  constexpr float kHalf = 0.5625f;  // floor + (peak - floor) / 2
  constexpr std::array rows{
      Row{Kind::kConstant, {0.5f, kPeak, kPeak, kPeak, kPeak}}, Row{Kind::kCosine, {0.5f, kPeak, kPeak, kHalf, kFloor}},
      Row{Kind::kLinear, {0.5f, kPeak, kPeak, kHalf, kFloor}}, Row{Kind::kWsd, {0.5f, kPeak, kPeak, kPeak, kFloor}}};
  std::vector<Case> layouts(4);
  for (Case& c : layouts) c.canonical = true;
  layouts[1].layout.dp = 2, layouts[1].layout.zero = 1;
  layouts[2].layout.dp = 2, layouts[2].layout.zero = 3, layouts[2].train.grad_accumulation = 2;
  layouts[3].layout.pp = 2, layouts[3].layout.schedule = Schedule::k1F1B, layouts[3].train.grad_accumulation = 4;
  for (const Row& row : rows)
    for (Subject subject : testing::subjects()) {
      if (subject.name != "gpt tied sgd" && subject.name != "llama adamw") continue;
      const bool wsd = row.kind == Kind::kWsd;
      LearningRate& rate = subject.train.learning_rate;
      rate = {.kind = row.kind, .peak = kPeak, .warmup_steps = 2, .total_steps = 4, .decay_steps = wsd ? 1 : 0, .floor = kFloor};
      for (size_t step = 0; step < row.rates.size(); ++step) {
        INFO(name_of(row.kind) << " at step " << step);
        CHECK(learning_rate_at(rate, static_cast<int64_t>(step)) == Approx(row.rates[step]).epsilon(1e-6));
      }
      if (subject.train.optimizer == Optimizer::kAdamW) rate.peak = 0.01f, rate.floor = 0.00125f;
      const auto expected = expect<float>(subject);
      const auto cases = testing::rows_of(subject, layouts);
      REQUIRE(cases.size() == layouts.size());
      for (const Case& config : cases) {
        const auto trained = train(config);
        const std::string difference = trained ? differences(config, expected, *trained) : to_string(trained.error());
        INFO(subject.name << ", " << name_of(row.kind) << ": " << config.name << "\n" << difference);
        CHECK(difference.empty());
      }
    }
}

TEST_CASE("fast mode: no layout is further from fp64 than 1.5 times one rank") {
  const uint64_t shares = dealt(96, 2304), others = dealt(1, 15);
  constexpr double kFloor = 1e-6;  // of the distance moved: about what rounding the parameters alone costs
  constexpr std::array algorithms{AlgorithmChoice::kAuto, AlgorithmChoice::kRing, AlgorithmChoice::kHalvingDoubling,
                                  AlgorithmChoice::kDirect};
  const auto layouts = testing::layouts(), uneven = testing::uneven_layouts();
  Coverage coverage;
  uint64_t number = 0;
  std::vector<Subject> subjects = testing::subjects();
  const size_t even = subjects.size();
  for (Subject& s : testing::uneven_subjects()) subjects.push_back(std::move(s));
  for (Subject& s : testing::mixture_subjects()) subjects.push_back(std::move(s));
  for (Subject& subject : subjects) {
    if (subject.train.optimizer == Optimizer::kLion) {  // the sign of what is 0 but for rounding is as far off as any
      ++number;
      continue;
    }
    // With its usual epsilon AdamW gives a gradient that is 0 but for rounding a full step of random sign.
    subject.train.epsilon = 1e-4f;
    const bool is_even = number<even, mixture = subject.model.experts.count> 0;
    auto rows = testing::rows_of(subject, mixture ? testing::expert_layouts() : is_even ? layouts : uneven);
    const auto expected = expect<double>(subject);
    Case serial = rows.front();
    serial.canonical = false;
    if (mixture) serial.layout.overlap = false;
    REQUIRE(serial.layout == Layout{.overlap = false});
    const auto one_rank = train(serial);
    REQUIRE(one_rank.ok());
    const double bound = 1.5 * error_of(expected, *one_rank) + kFloor;
    rows = deal(std::move(rows), number++, mixture ? 1 : is_even ? shares : 6 * others);
    if (is_even)
      for (Case& config : deal(testing::rows_of(subject, testing::deep_layouts()), number, shares / 4))
        rows.push_back(std::move(config));
    if (is_even)
      for (Case& config : deal(testing::rows_of(subject, testing::selective_layouts()), number, 6 * others))
        rows.push_back(std::move(config));
    for (Case& config : deal(testing::rows_of(subject, testing::offload_layouts()), number, (is_even ? 16 : 3) * others))
      rows.push_back(std::move(config));
    for (Case& config : deal(testing::rows_of(subject, testing::served_layouts()), number, (is_even ? 64 : 8) * others))
      rows.push_back(std::move(config));
    for (Case& config : deal(testing::rows_of(subject, testing::validated_layouts()), number, others))
      rows.push_back(std::move(config));
    for (Case& config : deal(testing::rows_of(subject, testing::sequence_layouts()), number, (is_even ? 160 : 16) * others))
      rows.push_back(std::move(config));
    for (Case& config : deal(testing::rows_of(subject, testing::chunked_layouts()), number, (is_even ? 48 : 8) * others))
      rows.push_back(std::move(config));
    for (Case& config :
         deal(testing::rows_of(subject, testing::context_layouts({ContextKind::kAllGather, ContextKind::kRing, ContextKind::kZigzag,
                                                                  ContextKind::kStriped, ContextKind::kUlysses})),
              number, 16 * others))
      // Masks of dropout follow the order in which tokens lie: another order is another draw, and not another rounding. With the
      // same order on one rank the bits are equal (test_context_parallel.cpp).
      if (config.train.dropout == 0 || config.layout.cp_kind == ContextKind::kRing ||
          config.layout.cp_kind == ContextKind::kUlysses)
        rows.push_back(std::move(config));
    for (Case& config : rows) {
      config.canonical = false;
      if (coverage.rows() % 3 == 2) config.threads_per_rank = 2;
      config.layout.collective_algorithm = algorithms[coverage.rows() % algorithms.size()];
      // Halving-doubling wants powers of two, and what is scattered by tokens neither it nor a ring.
      for (const AlgorithmChoice other : {AlgorithmChoice::kRing, AlgorithmChoice::kAuto})
        if (!check(config).ok()) config.layout.collective_algorithm = other;
      const auto trained = train(config);
      INFO(subject.name << ": " << config.name << ", " << config.threads_per_rank << " threads a rank"
                        << (trained ? "" : "\n" + to_string(trained.error())));
      REQUIRE(trained.ok());
      const double error = error_of(expected, *trained);
      CHECK(error <= bound);
      coverage.add(config, error > bound, error / bound);
    }
  }
  CHECK(coverage.covers_uneven_ranks_and_threads());
  coverage.print("Error against the fp64 reference after 5 steps (fast mode)", "largest error / bound");
  for (const Strategy& s : catalogue()) {
    INFO("strategy `" << s.name << "` has no row in the matrix: give its key a value in tests/numerics/matrix.cpp");
    REQUIRE((s.tier > Tier::kE2 || coverage.has(s.name)));
  }
}

}  // namespace shardlab::testing::of_matrix
