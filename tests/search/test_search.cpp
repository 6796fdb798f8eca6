// What a search dismisses it dismisses rightly: on random small spaces its answer is that of estimating every point.
#include <algorithm>
#include <random>
#include <set>

#include "simulator/estimator/memory/answer.h"
#include "simulator/estimator/search/replayed.h"
#include "simulator/estimator/search/search.h"
#include "strategies/lower.h"
#include "tests/analytic/studies.h"
#include "tests/test.h"

namespace shardlab::simulator::search {
namespace {

using analytic::Estimator;
using analytic::Recompute;
using analytic::testing::gpt_175b;
using analytic::testing::llama_8b;
using analytic::testing::machine;
using analytic::testing::mixtral_8x7b;
using analytic::testing::profile;

std::vector<Study> studies_on(const analytic::ModelShape& shape, std::string_view name, const std::vector<int32_t>& devices) {
  std::vector<Study> studies;
  for (const int32_t d : devices) {
    auto prepared = prepare(shape, machine((d + 7) / 8), profile(name));
    REQUIRE(prepared.ok());
    studies.push_back({d, *prepared});
  }
  return studies;
}

/// Every fitting point, by plain loops over all values of all axes.
std::vector<Candidate> every_fitting_point(const std::vector<Study>& studies, const Space& space, int64_t capacity) {
  std::vector<Candidate> all;
  for (const Study& study : studies) {
    Estimator estimator(study.prepared);
    const int64_t layers = study.prepared.shape().layers;
    const auto each = [&](const Point& cut) {
      for (const State& state : states_of(space, cut, 8))
        for (const Order& order : orders_of(space, layers, cut.pp)) {
          const Point p = with(with(cut, state), order);
          const analytic::Estimate e = estimator(p);
          if (e.legal() && (capacity == 0 || e.memory.device() <= capacity)) all.push_back({p, e});
        }
    };
    for_each_cut(space, study.prepared.shape(), study.devices, each, [](const Point&) {});
  }
  return all;
}

using Figures = std::set<std::tuple<double, int64_t, double>>;

Figures undominated(const std::vector<Candidate>& all) {
  Figures figures, front;
  for (const Candidate& c : all) figures.insert({c.seconds(), c.bytes(), c.device_seconds()});
  for (const auto& [s, b, d] : figures) {
    const bool beaten = std::any_of(figures.begin(), figures.end(), [&, s = s, b = b, d = d](const auto& o) {
      const auto& [os, ob, od] = o;
      return os <= s && ob <= b && od <= d && (os < s || ob < b || od < d);
    });
    if (!beaten) front.insert({s, b, d});
  }
  return front;
}

class Dealer {
 public:
  explicit Dealer(unsigned seed) : random_(seed) {}
  template <class T>
  T of(std::initializer_list<T> v) {
    return v.begin()[random_() % v.size()];
  }
  Space space() {
    Space s{.devices = of<std::vector<int32_t>>({{8}, {16}, {12}, {4, 8}, {8, 16, 24}}),
            .seq_len = of<int64_t>({1024, 4096}),
            .sequences = of<int64_t>({8, 16, 24, 48})};
    s.tp = of<std::vector<int32_t>>({{1, 2, 4}, {2, 8}, {1}});
    s.cp = of<std::vector<int32_t>>({{1}, {1, 2}});
    s.zero = of<std::vector<int32_t>>({{}, {0, 1}, {1, 3}});
    s.micro_batch = of<std::vector<int32_t>>({{1, 2}, {1}, {2, 4}});
    s.recompute = of<std::vector<Recompute>>({{}, {{0}}, {{Recompute::kSelective}, {Recompute::kLayer}}});
    s.offload = of<std::vector<Offload>>({{{}}, {{}, {.optimizer = Medium::kCpu}}, {{}, {.activations = Medium::kCpu}}});
    s.sequence_parallel = of<std::vector<uint8_t>>({{0}, {1}, {0, 1}});
    s.precision = of({Precision::kBf16, Precision::kBf16, Precision::kFp32});
    s.bucket_bytes = of<std::vector<int64_t>>({{}, {}, {1 << 20, 200 << 20}});
    s.collective_algorithm = of<std::vector<AlgorithmChoice>>(
        {{}, {}, {AlgorithmChoice::kRing, AlgorithmChoice::kAuto}, {AlgorithmChoice::kHalvingDoubling}});
    return s;
  }
  unsigned operator()() { return random_(); }

 private:
  std::mt19937 random_;
};

analytic::ModelShape small(analytic::ModelShape shape, int64_t layers) {
  shape.layers = layers;
  return shape;
}

TEST_CASE("bounds never dismiss the best nor a point of the front") {
  Dealer deal(11);
  int64_t bounded = 0, fitting = 0, searches = 0, varied = 0;
  for (int i = 0; i < 60; ++i) {
    const Space space = deal.space();
    const analytic::ModelShape shape = deal.of({small(llama_8b(), 12), small(gpt_175b(), 8), small(mixtral_8x7b(), 6)});
    const auto studies =
        studies_on(shape, deal.of<std::string_view>({"megatron", "torchtitan", "deepspeed", "shardlab"}), space.devices);
    Options options{.objective = static_cast<Objective>(deal() % 3), .top = deal.of({1, 3, 10})};
    options.capacity_bytes = deal.of<int64_t>({0, 24'000'000'000, 80'000'000'000});
    std::vector<Candidate> all = every_fitting_point(studies, space, options.capacity_bytes);
    std::sort(all.begin(), all.end(), [&](const Candidate& a, const Candidate& b) { return better(options.objective, a, b); });
    const Found found = search(studies, space, options);
    INFO("search " << i << " for " << name_of(options.objective) << ", " << all.size() << " layouts fit");
    for (const Candidate& c : all) varied += c.point.bucket_bytes >= 0 || c.point.algorithm != AlgorithmChoice::kAuto;
    REQUIRE(found.best.size() == std::min(all.size(), static_cast<size_t>(options.top)));
    for (size_t k = 0; k < found.best.size(); ++k) {
      REQUIRE(found.best[k].point == all[k].point);
      REQUIRE(found.best[k].estimate.parts == all[k].estimate.parts);
    }
    Figures front;
    for (const Candidate& c : found.front) front.insert({c.seconds(), c.bytes(), c.device_seconds()});
    REQUIRE(front == undominated(all));
    REQUIRE(found.front.size() == front.size());
    bounded += found.counts.bounded, fitting += static_cast<int64_t>(all.size()), ++searches;
  }
  CHECK(bounded > 10'000);
  CHECK(fitting > 10'000);
  CHECK(varied > 3'000);
}

TEST_CASE("every point is accounted for once") {
  Dealer deal(5);
  for (int i = 0; i < 12; ++i) {
    const Space space = deal.space();
    const auto studies = studies_on(small(llama_8b(), 12), "megatron", space.devices);
    for (const bool prune : {true, false}) {
      Options options{.objective = static_cast<Objective>(i % 3), .top = 5, .capacity_bytes = 40'000'000'000, .prune = prune};
      const Found found = search(studies, space, options);
      const Counts& n = found.counts;
      REQUIRE(n.points == n.refused + n.evaluated + n.bounded);
      if (!prune) REQUIRE(n.bounded == 0);
      int64_t lost = 0;
      for (const Loser& l : found.losers) {
        lost += l.points;
        REQUIRE(l.points > 0);
        REQUIRE(!l.reason().empty());
        if (l.loss == Loss::kIllegal) {
          // The example is of the class that it stands for.
          bool shown = false;
          for (const Study& s : studies) shown = shown || refusal_of(s.prepared, l.nearest) == l.refusal;
          REQUIRE(shown);
        }
        if (l.loss == Loss::kTooLarge) REQUIRE(l.bytes > options.capacity_bytes);
        if (l.loss == Loss::kSlower && options.objective == Objective::kTime) REQUIRE(l.seconds >= found.best.back().seconds());
      }
      REQUIRE(lost + static_cast<int64_t>(found.best.size()) == n.points);
    }
  }
}

TEST_CASE("a smaller budget of memory never makes the best faster") {
  const Space space{.devices = {16}, .seq_len = 4096, .sequences = 64};
  const auto studies = studies_on(llama_8b(), "megatron", space.devices);
  double before = 0;
  for (const int64_t capacity : {0LL, 80'000'000'000LL, 40'000'000'000LL, 24'000'000'000LL, 16'000'000'000LL}) {
    const Found found = search(studies, space, {.top = 1, .capacity_bytes = capacity});
    if (found.best.empty()) break;
    CHECK(found.best[0].seconds() >= before);
    before = found.best[0].seconds();
    if (capacity > 0) CHECK(found.best[0].bytes() <= capacity);
  }
  CHECK(before > 0);
}

TEST_CASE("where nothing fits, the least excess is shown") {
  const Space space{.devices = {8}, .seq_len = 2048, .sequences = 8};
  const auto studies = studies_on(gpt_175b(), "megatron", space.devices);
  const Found found = search(studies, space, {.capacity_bytes = 10'000'000'000});
  CHECK(found.best.empty());
  CHECK(found.front.empty());
  const auto at = std::find_if(found.losers.begin(), found.losers.end(), [](const Loser& l) { return l.loss == Loss::kTooLarge; });
  REQUIRE(at != found.losers.end());
  CHECK(at->bytes > 10'000'000'000);
  CHECK(at->nearest.world_size() == 8);
}

TEST_CASE("where nothing is found, the nearest layout is estimated in full: the fastest that fits, or the smallest") {
  const Space space{.devices = {16}, .seq_len = 4096, .sequences = 64};
  const auto studies = studies_on(llama_8b(), "megatron", space.devices);
  const Options open{.top = 1, .capacity_bytes = 40'000'000'000};
  const Candidate fastest = rank(studies, space, open).found.best.at(0);
  Options hurried = open;
  hurried.most_s = 0.5 * fastest.seconds();
  const Found late = rank(studies, space, hurried).found;
  CHECK(late.best.empty());
  REQUIRE(late.nearest);
  CHECK(late.nearest_loss == Loss::kLate);
  CHECK(late.nearest->point == fastest.point);
  CHECK(late.nearest->seconds() == fastest.seconds());
  const Candidate smallest = rank(studies, space, {.objective = Objective::kMemory, .top = 1}).found.best.at(0);
  for (const double most_s : {0.0, 0.5 * fastest.seconds()}) {
    const Found large = rank(studies, space, {.capacity_bytes = 1'000'000'000, .most_s = most_s}).found;
    CHECK(large.best.empty());
    REQUIRE(large.nearest);
    CHECK(large.nearest_loss == Loss::kTooLarge);
    CHECK(large.nearest->point == smallest.point);
    CHECK(large.nearest->bytes() == smallest.bytes());
  }
  CHECK_FALSE(rank(studies, space, open).found.nearest);
}

TEST_CASE("what fits by less than predictions are off is ranked below what fits, and accounted for") {
  const Space space{.devices = {16}, .seq_len = 4096, .sequences = 64};
  const auto studies = studies_on(llama_8b(), "megatron", space.devices);
  const int64_t capacity = 40'000'000'000;
  const Options bare{.top = 8, .capacity_bytes = capacity}, careful{.top = 8, .capacity_bytes = capacity, .reserved_error = 0.1},
      margin{.top = 8, .capacity_bytes = capacity, .margin_bytes = 4'000'000'000};
  const Found all = search(studies, space, bare), sure = search(studies, space, careful), free = search(studies, space, margin);
  CHECK(all.tight.empty());
  REQUIRE(!sure.tight.empty());
  for (const Candidate& c : sure.best) {
    CHECK(static_cast<double>(c.estimate.memory.reserved()) * 1.1 < static_cast<double>(capacity));
    CHECK(verdict_of(c.estimate.memory, careful) == whatif::Verdict::kFits);
  }
  for (const Candidate& c : sure.tight) CHECK(verdict_of(c.estimate.memory, careful) == whatif::Verdict::kTight);
  for (const Candidate& c : free.best) CHECK(c.bytes() + 4'000'000'000 <= capacity);
  // The best of both lists together is the best of what is predicted to fit.
  const double first = std::min(sure.best[0].seconds(), sure.tight[0].seconds());
  CHECK(first == all.best[0].seconds());
  for (const Found* found : {&sure, &free}) {
    int64_t lost = 0;
    for (const Loser& l : found->losers) lost += l.points;
    CHECK(lost + static_cast<int64_t>(found->best.size()) == found->counts.points);
  }
}

TEST_CASE("what takes longer than it may is lost as that") {
  const Space space{.devices = {16}, .seq_len = 4096, .sequences = 64};
  const auto studies = studies_on(llama_8b(), "megatron", space.devices);
  const double best = search(studies, space, {.top = 1}).best[0].seconds();
  const Found few = search(studies, space, {.top = 1000, .most_s = 1.1 * best});
  REQUIRE(!few.best.empty());
  for (const Candidate& c : few.best) CHECK(c.seconds() <= 1.1 * best);
  CHECK(std::ranges::any_of(few.losers, [](const Loser& l) { return l.loss == Loss::kLate; }));
  CHECK(search(studies, space, {.most_s = 0.5 * best}).best.empty());
}

TEST_CASE("a long ranking is the short one and what follows it, each layout replayed once") {
  const Space space{.devices = {16}, .seq_len = 4096, .sequences = 64};
  const auto studies = studies_on(llama_8b(), "megatron", space.devices);
  Options options{.top = 5, .capacity_bytes = 40'000'000'000, .reserved_error = 0.1};
  const Ranked few = rank(studies, space, options);
  options.top = 60;
  const Ranked many = rank(studies, space, options);
  REQUIRE(few.found.best.size() == 5);
  REQUIRE(many.found.best.size() == 60);
  for (size_t i = 0; i < 5; ++i) CHECK(few.found.best[i].point == many.found.best[i].point);
  for (size_t i = 1; i < 60; ++i) {
    const auto verdict = [&](size_t k) { return verdict_of(many.found.best[k].estimate.memory, options); };
    CHECK((verdict(i - 1) == whatif::Verdict::kFits || verdict(i) == whatif::Verdict::kTight));
    if (verdict(i) == verdict(i - 1)) CHECK(many.found.best[i - 1].seconds() <= many.found.best[i].seconds());
  }
}

class StopAfter final : public Watcher {
 public:
  explicit StopAfter(int calls) : left_(calls) {}
  bool going(const Counts& counts, std::span<const Candidate> best) override {
    evaluated = counts.evaluated, had_answer = !best.empty();
    return best.empty() || --left_ > 0;  // some way beyond the first answer
  }
  int64_t evaluated = 0;
  bool had_answer = false;

 private:
  int left_;
};

TEST_CASE("a search that is stopped has an answer already") {
  const Space space{.devices = {64}, .seq_len = 2048, .sequences = 64};
  const auto studies = studies_on(gpt_175b(), "megatron", space.devices);
  StopAfter watcher(2);
  const Options options{.capacity_bytes = 80'000'000'000, .prune = false};
  const Found found = search(studies, space, options, &watcher);
  CHECK(found.stopped);
  CHECK(watcher.had_answer);
  CHECK(!found.best.empty());
  CHECK(found.counts.cuts_done < found.counts.cuts);
  CHECK(found.counts.evaluated < found.counts.points);
}

TEST_CASE("what is said of layouts that shardlab runs is their plans', and what their plans do not fit is not listed") {
  const Lower lower = [](const Case& c) { return strategies::lower(c, {.after = {}, .verify = false}); };
  // With its abilities, as users ask: every layout that is listed is one that runs.
  const auto prepared = prepare(small(llama_8b(), 16), machine(1), *analytic::profile_named("shardlab"));
  REQUIRE(prepared.ok());
  const std::vector<Study> studies{{8, *prepared}};
  const Space space{.devices = {8}, .seq_len = 4096, .sequences = 32};
  Estimator estimator(studies[0].prepared);
  const auto planned = [&](const Point& p) {
    const Case* config = estimator.executed(p);
    REQUIRE(config != nullptr);
    return CasePlan::of(*config, lower)->bytes();
  };
  const int64_t context = static_cast<int64_t>(studies[0].prepared.profile().memory.context);
  for (const Objective objective : {Objective::kTime, Objective::kMemory}) {
    const int64_t capacity = 40'000'000'000;
    const Ranked ranked = rank(studies, space, {.objective = objective, .top = 12, .capacity_bytes = capacity, .lower = lower});
    REQUIRE(ranked.found.best.size() == 12);
    REQUIRE(!ranked.found.front.empty());
    for (const std::vector<Candidate>* list : {&ranked.found.best, &ranked.found.front})
      for (const Candidate& c : *list) {
        const Prediction bytes = planned(c.point);
        REQUIRE(c.bytes() == bytes.peak_bytes + context);
        REQUIRE(c.estimate.wire_total() == static_cast<double>(bytes.wire_bytes));
        REQUIRE(c.bytes() <= capacity);
      }
    for (size_t i = 1; i < 12; ++i) REQUIRE(!better(objective, ranked.found.best[i], ranked.found.best[i - 1]));
    for (const Candidate& c : ranked.misfits) REQUIRE(planned(c.point).peak_bytes + context > capacity);
  }
}

TEST_CASE("every schedule of shardlab's executor is proposed, with the bytes of its plans") {
  const Lower lower = [](const Case& c) { return strategies::lower(c, {.after = {}, .verify = false}); };
  const auto prepared = prepare(small(llama_8b(), 16), machine(1), *analytic::profile_named("shardlab"));
  REQUIRE(prepared.ok());
  const std::vector<Study> studies{{8, *prepared}};
  Estimator estimator(studies[0].prepared);
  const int64_t context = static_cast<int64_t>(studies[0].prepared.profile().memory.context);
  for (int number = 1; number <= static_cast<int>(Schedule::kDualPipeV); ++number) {
    const Schedule schedule = Schedule(number);
    INFO(name_of(schedule));
    // Whether the executor runs it is asked of the case alone.
    Case config;
    config.model = {.name = "tiny", .family = Family::kLlama, .layers = 16, .hidden = 64, .heads = 8, .kv_heads = 4, .head_dim = 8};
    config.model.ffn = 128, config.model.vocab = 64, config.machine = machine(1);
    config.layout.pp = 2, config.layout.schedule = schedule, config.layout.vpp = is_looped(schedule) ? 2 : 1;
    config.train.seq_len = 32, config.train.grad_accumulation = 4;
    const Space space{.can = studies[0].prepared.profile().can, .devices = {8}, .seq_len = 4096, .sequences = 64, .pp = {2, 4}};
    bool proposed = false;
    for (const Order& order : orders_of(space, 16, 2)) proposed = proposed || order.schedule == schedule;
    const auto runs = check(config);
    INFO((runs.ok() ? "" : to_string(runs.error())));
    REQUIRE(proposed == runs.ok());
    if (!proposed) continue;
    Space only = space;
    only.schedule = {schedule};
    const Ranked ranked = rank(studies, only, {.top = 4, .lower = lower});
    REQUIRE(ranked.found.best.size() == 4);
    for (const Candidate& c : ranked.found.best) {
      REQUIRE(c.point.schedule == schedule);
      const Prediction bytes = CasePlan::of(*estimator.executed(c.point), lower)->bytes();
      REQUIRE(c.bytes() == bytes.peak_bytes + context);
      REQUIRE(c.estimate.wire_total() == static_cast<double>(bytes.wire_bytes));
    }
  }
}

TEST_CASE("shardlab's parts of sequences and of experts are proposed, with the bytes of their plans") {
  const Lower lower = [](const Case& c) { return strategies::lower(c, {.after = {}, .verify = false}); };
  const auto held = [&](const analytic::ModelShape& shape, Space space) {
    const auto prepared = prepare(shape, machine(1), *analytic::profile_named("shardlab"));
    REQUIRE(prepared.ok());
    const std::vector<Study> studies{{8, *prepared}};
    Estimator estimator(studies[0].prepared);
    space.can = prepared->profile().can, space.slices_experts = true;
    const Ranked ranked = rank(studies, space, {.top = 4, .lower = lower});
    REQUIRE(ranked.found.best.size() == 4);
    for (const Candidate& c : ranked.found.best) {
      const Prediction bytes = CasePlan::of(*estimator.executed(c.point), lower)->bytes();
      REQUIRE(c.bytes() == bytes.peak_bytes + static_cast<int64_t>(prepared->profile().memory.context));
      REQUIRE(c.estimate.wire_total() == static_cast<double>(bytes.wire_bytes));
    }
    return ranked.found.best.front();
  };
  const Space sequences{.devices = {8}, .seq_len = 4096, .sequences = 16};
  for (const analytic::CpKind kind : {analytic::CpKind::kRing, analytic::CpKind::kZigzag, analytic::CpKind::kStriped,
                                      analytic::CpKind::kAllGather, analytic::CpKind::kUlysses}) {
    Space space = sequences;
    space.cp = {4}, space.cp_kind = {kind};
    const Candidate best = held(small(llama_8b(), 16), space);
    CHECK(best.point.cp_kind == kind);
    CHECK(best.estimate.wire[static_cast<size_t>(analytic::WireUse::kContext)] > 0);
  }
  Space space = sequences;
  space.ep = {4}, space.precision = Precision::kFp32;
  CHECK(held(small(mixtral_8x7b(), 16), space).estimate.wire[static_cast<size_t>(analytic::WireUse::kExpert)] > 0);
  // Beside tp experts are slices or whole: what a point says is what is lowered.
  space.tp = {2}, space.sequence_parallel = {1};
  for (const int32_t slices : {2, 1}) {
    space.expert_tp = {slices};
    const Candidate best = held(small(mixtral_8x7b(), 16), space);
    CHECK(best.point.expert_tp == slices);
    CHECK(best.point.ep == 4);
  }
}

TEST_CASE("experts that no ranks share are cut by tp, as a layout that does not say expert_tp has them") {
  const auto prepared = prepare(small(mixtral_8x7b(), 16), machine(1), *analytic::profile_named("megatron"));
  REQUIRE(prepared.ok());
  const std::vector<Study> studies{{8, *prepared}};
  Space space{.devices = {8}, .seq_len = 4096, .sequences = 16};
  space.can = prepared->profile().can, space.tp = {4};
  for (const int32_t ep : {1, 2}) {
    space.ep = {ep};
    const Ranked ranked = rank(studies, space, {.top = 8});
    REQUIRE_FALSE(ranked.found.best.empty());
    for (const Candidate& c : ranked.found.best) CHECK(c.point.expert_tp == (ep == 1 ? 4 : 1));
  }
}

TEST_CASE("the estimate of shardlab's memory has room for the rows that experts may get, and of its wire what slices gather") {
  const Lower lower = [](const Case& c) { return strategies::lower(c, {.after = {}, .verify = false}); };
  struct Layout {
    int ep = 1, tp = 1, cp = 1, expert_tp = 1;
    double capacity = 0;
  };
  for (const Layout& l : {Layout{.ep = 8},
                          {.ep = 8, .capacity = 1.25},
                          {.ep = 4, .tp = 2, .expert_tp = 2},
                          {.ep = 8, .tp = 2},
                          {.ep = 8, .tp = 2, .capacity = 1.25},
                          {.ep = 4, .tp = 4, .expert_tp = 2},
                          {.ep = 4, .tp = 4, .expert_tp = 2, .capacity = 2},
                          {.ep = 4, .cp = 2},
                          {.ep = 4, .cp = 2, .capacity = 1}}) {
    analytic::ModelShape shape = small(mixtral_8x7b(), 16);
    shape.experts = 16, shape.top_k = 4, shape.capacity_factor = l.capacity;
    const auto prepared = prepare(shape, machine(1), *analytic::profile_named("shardlab"));
    REQUIRE(prepared.ok());
    Estimator estimator(*prepared);
    analytic::Point p{.dp = 8 / l.tp / l.cp, .tp = l.tp, .cp = l.cp, .ep = l.ep, .expert_tp = l.expert_tp};
    p.sequence_parallel = l.tp > 1, p.precision = Precision::kFp32, p.seq_len = 4096, p.micro_batch = 2, p.grad_accumulation = 2;
    const Case* executed = estimator.executed(p);
    REQUIRE(executed != nullptr);
    const double planned = static_cast<double>(CasePlan::of(*executed, lower)->bytes().peak_bytes),
                 estimated = static_cast<double>(estimator(p).memory.device());
    INFO("ep " << l.ep << " tp " << l.tp << " cp " << l.cp << " capacity " << l.capacity << ": " << estimated / planned);
    CHECK(std::abs(estimated / planned - 1) < 0.01);
    // What crosses for experts and slices, whichever of its ranks it is counted under.
    const analytic::Estimate said = estimator(p);
    analytic::Estimate told = said;
    analytic::tell_bytes(*analytic::profile_named("shardlab"), *CasePlan::of(*executed, lower), told);
    const auto crosses = [](const analytic::Estimate& e) {
      return e.wire[static_cast<size_t>(analytic::WireUse::kTensor)] + e.wire[static_cast<size_t>(analytic::WireUse::kExpert)];
    };
    CHECK(std::abs(crosses(said) / crosses(told) - 1) < 0.01);
  }
}

TEST_CASE("layouts of a model have what no shape says of it") {
  Case config;
  config.model = {.name = "tiny", .family = Family::kLlama, .layers = 4, .hidden = 64, .heads = 8, .kv_heads = 4, .head_dim = 8};
  config.model.ffn = 128, config.model.vocab = 64;
  config.model.experts = {.count = 4,
                          .top_k = 2,
                          .ffn = 64,
                          .sigmoid = true,
                          .balance = 0.01f,
                          .every = 2,
                          .bias_update_rate = 0.001f,
                          .capacity_factor = 1.25f};
  config.machine = machine(1);
  const auto prepared = analytic::prepare(config);
  REQUIRE(prepared.ok());
  Estimator estimator(*prepared);
  const Case* executed =
      estimator.executed({.dp = 2, .precision = Precision::kFp32, .micro_batch = 1, .grad_accumulation = 2, .seq_len = 32});
  REQUIRE(executed != nullptr);
  CHECK(executed->model == config.model);
}

TEST_CASE("ranked layouts have the bytes that `memory` tells of them, and what then does not fit is taken out") {
  const std::vector<Study> studies = studies_on(llama_8b(), "megatron", {8});
  Space space{.devices = {8}, .seq_len = 4096, .sequences = 16};
  Found found = search(studies, space, {.top = 40});
  REQUIRE(found.best.size() == 40);
  const std::vector<Candidate> estimated = found.best;
  REQUIRE(replay_allocations(found.best, studies, 0).empty());
  Estimator estimator(studies[0].prepared);
  int moved = 0;
  for (size_t i = 0; i < 40; ++i) {
    const whatif::Answer told = whatif::analytic_answer(studies[0].prepared, estimator, found.best[i].point, 0);
    REQUIRE(found.best[i].bytes() == told.worst().device());
    REQUIRE(found.best[i].estimate.worst_stage == told.worst().stage);
    moved += found.best[i].bytes() != estimated[i].bytes();
  }
  REQUIRE(moved > 0);
  int64_t least = INT64_MAX, most = 0;
  for (const Candidate& c : found.best) least = std::min(least, c.bytes()), most = std::max(most, c.bytes());
  REQUIRE(least < most);
  std::vector<Candidate> kept = estimated;
  const std::vector<Candidate> misfits = replay_allocations(kept, studies, (least + most) / 2);
  REQUIRE(!misfits.empty());
  REQUIRE(kept.size() + misfits.size() == 40);
  for (const Candidate& c : misfits) REQUIRE(c.bytes() > (least + most) / 2);
  for (const Candidate& c : kept) REQUIRE(c.bytes() <= (least + most) / 2);
}

}  // namespace
}  // namespace shardlab::simulator::search
