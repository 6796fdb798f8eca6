// The choice within a byte budget against every assignment there is: no other fits in less time, whether time is the sum of prices
// or the timeline's; and what it says is the least is.
#include <algorithm>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "plan/base/hash.h"
#include "plan/memory.h"
#include "plan/program.h"
#include "simulator/interpreter/recompute_budget.h"
#include "simulator/interpreter/stage_peaks.h"
#include "simulator/interpreter/timeline.h"
#include "strategies/lower.h"
#include "tests/deal.h"
#include "tests/laws/replay.h"
#include "tests/namespaces.h"
#include "tests/offload/cases.h"
#include "tests/test.h"

namespace shardlab::testing {
namespace {

using namespace testing;

/// Prices that no sum of others equals by chance.
std::vector<PricedTreatment> some_prices(bool parking) {
  std::vector<PricedTreatment> list{
      {{}, 0}, {{.again = 0b0010}, 1.07}, {{.again = 0b1000}, 0.41}, {{.again = 0b1010}, 1.53}, {{.full = true}, 4.19}};
  if (parking) list.push_back({{.parked = true}, 2.71}), list.push_back({{.full = true, .parked = true}, 4.93});
  return list;
}

/// Calls `use` with every assignment of the treatments to `layers` layers, and the sum of their prices.
template <class Use>
void for_each_assignment(const std::vector<PricedTreatment>& priced, size_t layers, const Use& use) {
  std::vector<size_t> digits(layers, 0);
  std::vector<LayerTreatment> assigned(layers);
  for (;;) {
    double sum = 0;
    for (size_t i = 0; i < layers; ++i) assigned[i] = priced[digits[i]].treatment, sum += priced[digits[i]].seconds;
    use(assigned, sum);
    size_t i = 0;
    while (i < layers && ++digits[i] == priced.size()) digits[i++] = 0;
    if (i == layers) return;
  }
}

/// Every assignment of one stage: its seconds and its peak.
struct Outcome {
  double seconds;
  int64_t peak;
  std::string layers;
};
Result<Plan> unverified(const Case& c) { return lower(c, {.after = {}, .verify = false}); }

/// Peaks of a space by stage.
std::vector<int64_t> peaks_of(const Case& c, Space space = Space::kDevice) {
  const auto plan = unverified(c);
  REQUIRE(plan.ok());
  std::vector<int64_t> peaks;
  for (size_t role = 0; role < plan->roles.size(); ++role)
    peaks.push_back(memory_peak(*plan, static_cast<int>(role))[static_cast<size_t>(space)].peak_bytes);
  return peaks;
}

std::vector<Outcome> all_of_stage(const Case& c, int64_t stage, const std::vector<PricedTreatment>& priced) {
  const auto layers_of = [&](int64_t s) { return c.model.layers / c.layout.pp + (s < c.model.layers % c.layout.pp ? 1 : 0); };
  int64_t first = 0;
  for (int64_t before = 0; before < stage; ++before) first += layers_of(before);
  std::vector<Outcome> all;
  for_each_assignment(priced, static_cast<size_t>(layers_of(stage)), [&](const std::vector<LayerTreatment>& assigned, double sum) {
    std::vector<LayerTreatment> layers(static_cast<size_t>(c.model.layers));
    std::ranges::copy(assigned, layers.begin() + first);
    all.push_back({sum, peaks_of(decided(c, layers))[static_cast<size_t>(stage)], {}});
  });
  return all;
}

/// The choice at budgets from what is too small to what is more than enough, against all assignments.
void require_best(const Case& c, const std::vector<PricedTreatment>& priced) {
  INFO(offload_line(c));
  std::vector<std::vector<Outcome>> stages;
  int64_t least = 0, most = 0;
  for (int64_t stage = 0; stage < c.layout.pp; ++stage) {
    stages.push_back(all_of_stage(c, stage, priced));
    least = std::max(least, std::ranges::min(stages.back(), {}, &Outcome::peak).peak);
    most = std::max(most, std::ranges::max(stages.back(), {}, &Outcome::peak).peak);
  }
  constexpr int kBudgets = 8;
  for (int i = 0; i <= kBudgets; ++i) {
    const int64_t budget = least + (most - least) * i / kBudgets;
    double seconds = 0;
    for (const auto& all : stages) {
      double best = std::numeric_limits<double>::infinity();
      for (const Outcome& o : all)
        if (o.peak <= budget) best = std::min(best, o.seconds);
      seconds += best;
    }
    const auto choice = choose_within(c, {.device = budget}, priced, unverified);
    CAPTURE(i, budget);
    INFO((choice.ok() ? treatments_text(choice->layers) : to_string(choice.error())));
    REQUIRE(choice.ok());
    CHECK(choice->seconds == Approx(seconds).epsilon(1e-9));
    CHECK(choice->peak_bytes <= budget);
    CHECK(choice->peak_bytes == peak_of_case(decided(c, choice->layers)));
  }
  const auto refused = choose_within(c, {.device = least - 1}, priced, unverified);
  REQUIRE_FALSE(refused.ok());
  CHECK(refused.error().code == ExitCode::kNo);
  INFO(refused.error().message);
  CHECK(refused.error().message.find(std::to_string(least)) != std::string::npos);
}

/// Costs that differ by op: products are dear, copies take about as long as a product.
FixedCostModel costs() {
  FixedCostModel model;
  model.otherwise = 1e-3;
  const auto set_both = [&](const std::string& label, double seconds) {
    model.seconds[label] = model.seconds[label + ".again"] = seconds;
  };
  for (const char* product : {"attn.qkv", "attn.out", "mlp.up", "mlp.down"}) set_both(product, 5e-3);
  set_both("attn.core", 3.1e-3);
  set_both("mlp.act", 1.3e-3);
  return model;
}

/// A device with a copy engine each way.
Machine device() {
  Machine m;
  m.id = "one device a rank";
  m.device.memory_bytes = 1 << 30;
  m.device.memory_bytes_per_s = 1e12;
  m.device.peak_flops["fp32"] = 1e13;
  return m;
}

double step_of(const Case& c, const FixedCostModel& model) {
  const Plan plan = plan_of(c);
  return step_seconds(simulate(plan, {expand_program(plan, 0)}, c.machine, model));
}

}  // namespace

TEST_CASE("peaks folded from a plan a treatment are those of the plan of each assignment") {
  const std::vector<LayerTreatment> treatments = candidate_treatments(small_case(Family::kGpt, 7));
  uint64_t drawn = 1;
  const auto draw = [&](uint64_t n) { return ((drawn = drawn * 6364136223846793005u + 1442695040888963407u) >> 33) % n; };
  for (const Ranks& ranks :
       {Ranks{}, Ranks{.accumulation = 3}, Ranks{.dp = 2, .zero = 1}, Ranks{.dp = 2, .zero = 2, .accumulation = 4},
        Ranks{.dp = 2, .zero = 3, .tp = 2, .accumulation = 2}, Ranks{.pp = 2, .schedule = Schedule::k1F1B, .accumulation = 4},
        Ranks{.pp = 2, .schedule = Schedule::k1F1B, .accumulation = 19},
        Ranks{.pp = 3, .schedule = Schedule::kAfab, .accumulation = 3}})
    for (const Family family : {Family::kGpt, Family::kLlama})
      for (const bool overlap : {false, true}) {
        Case c = small_case(family, 7);
        set(c, ranks);
        c.layout.overlap = overlap;
        c.train.precision = family == Family::kGpt ? Precision::kFp32 : Precision::kBf16;
        c.train.dropout = overlap ? 0.1f : 0;
        INFO(offload_line(c));
        const auto peaks = StagePeaks::of(c, treatments, unverified);
        REQUIRE(peaks.ok());
        for (int i = 0; i < 25; ++i) {
          std::vector<size_t> numbers(7);
          std::vector<LayerTreatment> layers(7);
          for (size_t l = 0; l < 7; ++l) numbers[l] = draw(treatments.size()), layers[l] = treatments[numbers[l]];
          const Case assigned = decided(c, layers);
          INFO(treatments_text(layers));
          const auto device = peaks_of(assigned), host = peaks_of(assigned, Space::kHost);
          size_t first = 0;
          for (int64_t stage = 0; stage < c.layout.pp; ++stage) {
            const size_t count = peaks->layers(stage).size();
            const StagePeaks::Peak peak = peaks->peak(stage, std::span(numbers).subspan(first, count));
            REQUIRE(peak.device == device[static_cast<size_t>(stage)]);
            REQUIRE(peak.host == host[static_cast<size_t>(stage)]);
            first += count;
          }
        }
      }
}

TEST_CASE("no assignment fits in less time than the one that is chosen") {
  struct Shape {
    Ranks ranks;
    int64_t layers;
    bool overlap = true;
  };
  uint64_t number = 0;
  for (const Shape& s : {Shape{{}, 4}, Shape{{}, 4, false}, Shape{{.accumulation = 2}, 3},
                         Shape{{.pp = 2, .schedule = Schedule::k1F1B, .accumulation = 4}, 7},
                         Shape{{.pp = 2, .schedule = Schedule::kAfab, .accumulation = 3}, 6, false},
                         Shape{{.dp = 2, .zero = 3, .accumulation = 2}, 4}, Shape{{.dp = 2, .zero = 2, .tp = 2}, 4}})
    for (const bool parking : {false, true}) {
      if (mix(number++) % dealt(1, 3) != 0) continue;
      Case c = small_case(s.layers % 2 == 0 ? Family::kGpt : Family::kLlama, s.layers);
      set(c, s.ranks);
      c.layout.overlap = s.overlap;
      require_best(c, some_prices(parking));
    }
}

TEST_CASE("a period of several steps is chosen for as one of its steps, beside the copies of the state") {
  Case c = small_case(Family::kLlama, 5);
  set(c, {.pp = 2, .schedule = Schedule::k1F1B, .accumulation = 3});
  c.machine = device();
  c.train.clip_norm = 1, c.train.post_validation = 2;
  require_best(c, some_prices(true));
  Case in_step = c;
  in_step.train.post_validation = 0;
  const FixedCostModel model = costs();
  const std::vector<LayerTreatment> treatments{{}, {.again = 0b0010}, {.full = true}};
  const auto prices = price_treatments(c, treatments, unverified, model),
             same = price_treatments(in_step, treatments, unverified, model);
  INFO((prices.ok() ? "" : to_string(prices.error())));
  REQUIRE(prices.ok());
  REQUIRE(same.ok());
  for (size_t i = 0; i < treatments.size(); ++i) CHECK((*prices)[i].seconds == (*same)[i].seconds);
}

TEST_CASE("no assignment takes less time on the timeline than the one that is chosen") {
  const FixedCostModel model = costs();
  for (const bool overlap : {false, true}) {
    Case c = small_case(Family::kGpt, 4);
    c.machine = device();
    c.layout.overlap = overlap;
    const std::vector<LayerTreatment> treatments{{}, {.again = 0b1000}, {.again = 0b1010}, {.full = true}, {.parked = true}};
    const auto probe = [](const Case& p) { return lower(p, {.after = {}, .verify = false}); };
    const auto priced = price_treatments(c, treatments, probe, model);
    REQUIRE(priced.ok());
    std::vector<Outcome> all;
    for_each_assignment(*priced, 4, [&](const std::vector<LayerTreatment>& layers, double) {
      const Case assigned = decided(c, layers);
      all.push_back({step_of(assigned, model), peak_of_case(assigned), treatments_text(layers)});
    });
    const int64_t least = std::ranges::min(all, {}, &Outcome::peak).peak, most = std::ranges::max(all, {}, &Outcome::peak).peak;
    for (int i = 0; i <= 8; ++i) {
      const int64_t budget = least + (most - least) * i / 8;
      const auto choice = choose_within(c, {.device = budget}, *priced, unverified);
      REQUIRE(choice.ok());
      Outcome best{std::numeric_limits<double>::infinity(), 0, {}};
      for (const Outcome& o : all)
        if (o.peak <= budget && o.seconds < best.seconds) best = o;
      CAPTURE(overlap, i, budget, treatments_text(choice->layers), best.layers, best.peak);
      CHECK(step_of(decided(c, choice->layers), model) == Approx(best.seconds).epsilon(1e-9));
    }
  }
}

TEST_CASE("a price is what the ops that are made again take, and what of the copies nothing covers") {
  const FixedCostModel model = costs();
  Case c = small_case(Family::kGpt, 6);
  c.machine = device();
  const auto probe = [](const Case& p) { return lower(p, {.after = {}, .verify = false}); };
  const std::vector<LayerTreatment> treatments{{}, {.again = 0b1000}, {.again = 0b0010}, {.full = true}, {.parked = true}};
  const auto price = [&](bool overlap) {
    c.layout.overlap = overlap;
    const auto priced = price_treatments(c, treatments, probe, model);
    REQUIRE(priced.ok());
    std::vector<double> seconds;
    for (const PricedTreatment& p : *priced) seconds.push_back(p.seconds);
    return seconds;
  };
  const std::vector<double> hidden = price(true), bare = price(false);
  CHECK(hidden[0] == Approx(0).margin(1e-12));
  CHECK(hidden[1] == Approx(1.3e-3));
  CHECK(hidden[2] == Approx(3.1e-3));
  // All of forward but its last product and residual: three products, attention, two norms, a residual, the activation.
  CHECK(hidden[3] == Approx(3 * 5e-3 + 3.1e-3 + 1.3e-3 + 3e-3));
  CHECK(bare[3] == Approx(hidden[3]));
  // Eleven tensors out and in, a millisecond each, but those named as an op is: none is.
  CHECK(bare[4] == Approx(2 * 11 * 1e-3));
  CHECK(hidden[4] == Approx(0).margin(1e-12));  // a layer's forward takes 26 ms, its backward more
}

TEST_CASE("memory falls from keeping all to the least, and time never falls with it") {
  Case c = small_case(Family::kLlama, 24);
  set(c, {.pp = 2, .schedule = Schedule::k1F1B, .accumulation = 8});
  const int64_t all = peak_of_case(c);
  for (const bool parking : {false, true}) {
    double last = 0;
    for (int64_t budget = all;; budget -= all / 16) {
      const auto choice = choose_within(c, {.device = budget}, some_prices(parking), unverified);
      if (!choice.ok()) break;
      CAPTURE(parking, budget, choice->looked_at, treatments_text(choice->layers));
      CHECK(choice->peak_bytes <= budget);
      CHECK((parking || choice->proven));
      CHECK(choice->seconds >= last);
      last = choice->seconds;
    }
    CHECK(last > 0);
  }
}

TEST_CASE("no layer is parked beside what no parked layer goes with") {
  Case c = small_case(Family::kLlama, 4);
  c.model.experts.count = 4, c.model.experts.top_k = 2, c.model.experts.ffn = 64;
  c.layout.dp = c.layout.ep = 2;
  c.train.grad_accumulation = 4;
  const auto parks = [&] { return std::ranges::count(candidate_treatments(c), true, &LayerTreatment::parked); };
  CHECK(parks() == kSubLayerSets + 1);
  c.layout.expert_overlap = ExpertOverlap::kMicroBatches;
  CHECK(parks() == 0);
  CHECK(candidate_treatments(c).size() == kSubLayerSets + 1);
}

TEST_CASE("many treatments of prices that lie close are looked at for so long and no longer") {
  Case c = small_case(Family::kLlama, 24);
  std::vector<PricedTreatment> priced;
  double price = 0.1;
  for (const LayerTreatment& t : candidate_treatments(c)) priced.push_back({t, t == LayerTreatment{} ? 0 : price *= 1.13});
  const std::vector<LayerTreatment> full(24, {.full = true});
  const int64_t budget = (peak_of_case(c) + peak_of_case(decided(c, full))) / 2;
  const auto choice = choose_within(c, {.device = budget}, priced, unverified);
  REQUIRE(choice.ok());
  CHECK(choice->peak_bytes <= budget);
  CHECK(choice->looked_at <= kMostLookedAt + 34 * 34 * 6);
}

TEST_CASE("what host memory cannot hold is not parked") {
  Case c = small_case(Family::kGpt, 6);
  const std::vector<PricedTreatment> priced{{{}, 0}, {{.full = true}, 9}, {{.parked = true}, 1}};
  const std::vector<LayerTreatment> away(6, {.parked = true});
  const int64_t budget = peak_of_case(decided(c, away));
  const auto roomy = choose_within(c, {.device = budget}, priced, unverified);
  REQUIRE(roomy.ok());
  const int64_t parked = peaks_of(decided(c, roomy->layers), Space::kHost)[0];
  REQUIRE(parked > 0);
  const auto tight = choose_within(c, {.device = budget, .host = parked - 1}, priced, unverified);
  REQUIRE(tight.ok());
  CHECK(peaks_of(decided(c, tight->layers), Space::kHost)[0] < parked);
  CHECK(tight->seconds > roomy->seconds);
}

}  // namespace shardlab::testing
