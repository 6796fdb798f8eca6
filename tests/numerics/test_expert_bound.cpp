// A bound on rows of experts: a step in which more rows come to a rank than it has room for changes nothing, and runs again one sequence at a
// time. Canonical mode: losses and all state have the bits of the worst case, in which no step runs again.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "kernels/kernels.h"
#include "plan/memory.h"
#include "plan/pipeline_schedule.h"
#include "plan/placed_plan.h"
#include "plan/techniques.h"
#include "plan/verify.h"
#include "runtime/backend.h"
#include "runtime/made_again.h"
#include "strategies/lower.h"
#include "tests/namespaces.h"
#include "tests/numerics/matrix.h"
#include "tests/numerics/running.h"
#include "tests/numerics/sized_cases.h"
#include "tests/test.h"

namespace shardlab::testing::of_expert_bound {
namespace {

constexpr int64_t kExperts = 8;

/// A mixture whose routers have biases, by which tests force routes.
Subject biased_subject() {
  Subject subject = mixture_subjects().front();
  SHARDLAB_CHECK(subject.model.experts.count == kExperts && subject.model.experts.has_bias(), "{} has other experts", subject.name);
  subject.train.optimizer = Optimizer::kAdamW;
  subject.train.learning_rate.peak = 0.01f;
  return subject;
}

Case bounded(const Sizes& sizes, float bound, bool canonical = true) {
  Case c = case_of(biased_subject(), sizes, canonical);
  c.layout.expert_bound = bound;
  c.name += fmt::format(" bound {}", bound);
  return c;
}

/// A case with both of its plans in one arena a rank.
struct Bounded {
  explicit Bounded(const Case& config)
      : config(config),
        source(config.model.vocab),
        transport(kernels::kernels_for_this_processor()),
        second_transport(kernels::kernels_for_this_processor()) {
    const auto lowered = [&](Result<Plan> plan) {
      INFO(config.name << (plan.ok() ? "" : to_string(plan.error())));
      REQUIRE(plan.ok());
      return place(std::move(*plan));
    };
    placed = lowered(lower(config));
    again = lowered(lower_in_step(config));
    for (const PlacedPlan* plan : {&placed, &again})
      for (size_t role = 0; role < plan->arenas.size(); ++role) own_bytes.push_back(plan->arenas[role].bytes[0]);
    REQUIRE(share_arenas(placed, again).ok());
    session = session_of(placed, transport, nullptr);
    session->initialise_parameters();
  }

  std::unique_ptr<Session> session_of(const PlacedPlan& plan, ThreadTransport& by, const Session* beside) {
    RunOptions options;
    options.seed = config.train.seed;
    options.learning_rate = config.train.learning_rate;
    options.timeout_s = 60;
    options.poison = true;
    options.beside = beside;
    if (beside != nullptr) options.rows_together = static_cast<int>(config.train.micro_batch);
    auto made =
        Session::create(plan, options, by, cpu_backend(kernels::kernels_for_this_processor(), {config.canonical, 1}), &source);
    REQUIRE(made.ok());
    return std::move(*made);
  }

  JudgedPeriod step(int64_t number) {
    auto period = run_judged(*session, number, [this]() -> Result<Session*> {
      if (second == nullptr) second = session_of(again, second_transport, session.get());
      return second.get();
    });
    REQUIRE(period.ok());
    return std::move(*period);
  }

  const Case config;
  RandomText source;
  ThreadTransport transport, second_transport;
  PlacedPlan placed, again;
  std::vector<int64_t> own_bytes;  ///< of the arenas before they were shared: of the first plan by stage, then of the second
  std::unique_ptr<Session> session, second;
};

/// From the next step on every token of the layer goes to these experts; to none in particular where the list is empty.
void force(Session& session, int layer, const std::vector<int64_t>& experts) {
  std::vector<float> bias(kExperts, 0.0f);
  for (const int64_t e : experts) bias[static_cast<size_t>(e)] = 100;
  REQUIRE(session.set_state({std::string(kRunState), fmt::format("router_bias.layers.{}", layer)}, {{kExperts}, bias}).ok());
}

/// Everything that a run goes on from, by name.
std::vector<std::pair<StateName, std::vector<float>>> state_of(const Session& session) {
  std::vector<std::pair<StateName, std::vector<float>>> all;
  const auto names = session.states();
  REQUIRE(names.ok());
  for (const StateName& name : *names) all.emplace_back(name, session.state(name)->values);
  return all;
}

bool same_state(const Session& a, const Session& b) {
  const auto x = state_of(a), y = state_of(b);
  return std::ranges::equal(x, y, [](const auto& p, const auto& q) { return p.first == q.first && same_bits(p.second, q.second); });
}

/// Layouts in which ranks share experts, with the bound that natural routes of the subject stay below.
std::vector<Case> layouts() {
  std::vector<Case> cases{bounded({.dp = 2, .ep = 2, .accumulation = 2}, 1.9f),
                          bounded({.dp = 4, .ep = 2, .zero = 2}, 1.9f),
                          bounded({.dp = 2, .ep = 2, .zero = 3, .accumulation = 2}, 1.9f),
                          bounded({.dp = 4, .ep = 4, .zero = 2}, 3.5f),
                          bounded({.dp = 2, .ep = 2, .pp = 2, .accumulation = 2}, 1.9f),
                          bounded({.dp = 2, .ep = 2, .accumulation = 2, .tp = 2, .sequence_parallel = true}, 1.9f)};
  for (const ExpertOverlap overlap : {ExpertOverlap::kLayer, ExpertOverlap::kMicroBatches}) {
    cases.push_back(cases[0]);
    cases.back().layout.expert_overlap = overlap;
    cases.back().name += fmt::format(" overlap {}", name_of(overlap));
  }
  cases.push_back(cases[0]);
  cases.back().layout.recompute = Recompute::kFull;
  cases.back().name += " recompute";
  cases.push_back(cases[1]);
  cases.back().train.clip_norm = 0.1f, cases.back().train.ema_decay = 0.9f;
  cases.back().name += " clipped, averaged";
  for (const size_t like : {size_t{0}, size_t{2}, size_t{7}, size_t{8}}) {  // plain, ZeRO-3, braided, recompute
    cases.push_back(cases[like]);
    cases.back().train.precision = Precision::kFp8;
    cases.back().train.fp8_scaling = Fp8Scaling::kBlock;
    cases.back().name += " fp8";
  }
  return cases;
}

}  // namespace

TEST_CASE("expert bound: forced overflows have the bits of the worst case, and those steps alone run again") {
  for (const Case& config : layouts()) {
    INFO(config.name);
    Case all = config;
    all.layout.expert_bound = 0;
    Running worst(all);
    Bounded bounded(config);
    std::vector<int64_t> again;
    for (int64_t step = 0; step < 5; ++step) {
      const bool forced = step == 1 || step == 3;
      for (Session* session : {worst.session.get(), bounded.session.get()})
        for (const int layer : {0, 1}) force(*session, layer, forced ? std::vector<int64_t>{0, 1} : std::vector<int64_t>{});
      const StepResult want = worst.session->step(step);
      const JudgedPeriod have = bounded.step(step);
      CHECK(!want.overflowed);
      REQUIRE(have.counted().size() == 1);
      if (!have.again.empty()) again.push_back(step);
      CHECK(have.first.overflowed == forced);
      CHECK(!have.counted()[0].overflowed);
      REQUIRE(have.counted()[0].loss.has_value());
      CHECK(*have.counted()[0].loss == *want.loss);
      // Rows are counted as they came, in the run that had no room for some too; a step that stands has those of the worst case.
      REQUIRE(have.first.experts.size() == want.experts.size());
      for (size_t l = 0; l < want.experts.size(); ++l) CHECK(have.first.experts[l].by_rank == want.experts[l].by_rank);
      // The second run has the rows of each micro-batch of the first, where ranks that share experts have the same sequences.
      if (second_run_keeps_micro_batches(config))
        CHECK(*imbalance_of(have.counted()[0].experts).peak == *imbalance_of(want.experts).peak);
      if (forced) CHECK(*imbalance_of(have.first.experts).peak == config.layout.ep);
      if (!forced) CHECK(*imbalance_of(have.first.experts).peak == *imbalance_of(want.experts).peak);
    }
    CHECK(again == std::vector<int64_t>{1, 3});
    CHECK(same_state(*worst.session, *bounded.session));
  }
}

TEST_CASE("expert bound: a step without room changes nothing that is kept, whichever rank, group, stage and layer lacks it") {
  struct Lack {
    Sizes sizes;
    int layer;
    bool canonical = true;
  };
  for (const Lack& lack : {Lack{{.dp = 2, .ep = 2, .accumulation = 2}, 0},
                           {{.dp = 2, .ep = 2, .accumulation = 2}, 1},
                           {{.dp = 2, .ep = 2, .pp = 2, .accumulation = 2}, 0},
                           {{.dp = 2, .ep = 2, .pp = 2, .accumulation = 2}, 1},
                           {{.dp = 4, .ep = 2, .zero = 2}, 1},
                           {{.dp = 4, .ep = 2, .zero = 1}, 1, false},
                           {{.dp = 2, .ep = 2, .zero = 3, .accumulation = 2}, 0, false},
                           {{.dp = 2, .ep = 4, .accumulation = 2, .cp = 2}, 1, false},
                           {with_whole_experts({.dp = 2, .ep = 2, .zero = 1, .accumulation = 2, .tp = 2}), 0, false},
                           {with_whole_experts({.dp = 2, .ep = 4, .accumulation = 2, .tp = 2}), 1, false}})
    for (const std::vector<int64_t>& experts :
         {std::vector<int64_t>{0, 1}, {kExperts - 2, kExperts - 1}}) {  // of the first rank, of the last
      Case config = bounded(lack.sizes, lack.sizes.ep - 0.1f, lack.canonical);
      config.train.ema_decay = 0.9f;
      INFO(config.name << " layer " << lack.layer);
      Bounded run(config);
      CHECK(!run.session->step(0).overflowed);
      force(*run.session, lack.layer, experts);
      const auto before = state_of(*run.session);
      const StepResult wasted = run.session->step(1);
      CHECK(wasted.overflowed);
      const auto after = state_of(*run.session);
      REQUIRE(before.size() == after.size());
      for (size_t i = 0; i < before.size(); ++i) {
        INFO(before[i].first.parameter << " " << before[i].first.part);
        CHECK(same_bits(before[i].second, after[i].second));
      }
      for (const auto& loss : wasted.losses) CHECK(std::isfinite(loss.value_or(0)));
    }
}

TEST_CASE("expert bound: room for every row is none too little, and one row less is") {
  for (const Sizes& sizes :
       {Sizes{.dp = 2, .ep = 2, .accumulation = 2}, {.dp = 2, .ep = 2}, {.dp = 4, .ep = 2}, {.dp = 4, .ep = 4}}) {
    Case all = case_of(biased_subject(), sizes, true);
    const int64_t share = all.train.micro_batch * all.train.seq_len * all.model.experts.top_k;
    Running worst(all);
    for (int64_t step = 0; step < 3; ++step) {
      const StepResult want = worst.session->step(step);
      // The fullest rank of some layer, group and micro-batch alone has so many: the step runs again for its sake.
      const auto most = std::llround(*imbalance_of(want.experts).peak * static_cast<double>(share));
      INFO(all.name << " step " << step << ", " << most << " of " << share);
      REQUIRE(most > share);
      for (const int64_t room : {most, most - 1}) {
        Case config = all;
        // Half a row less, which is rounded up.
        config.layout.expert_bound = static_cast<float>((static_cast<double>(room) - 0.5) / static_cast<double>(share));
        Bounded run(config);
        for (const auto& [name, values] : state_of(*run.session)) REQUIRE(!values.empty());
        for (int64_t before = 0; before < step; ++before) run.step(before);
        const StepResult first = run.session->step(step);
        CHECK(first.overflowed == (room < most));
        CHECK(first.experts.size() == want.experts.size());
      }
    }
  }
  // Even routes fill one even share to the last row.
  Bounded even(bounded({.dp = 2, .ep = 2, .accumulation = 2}, 1));
  for (const int layer : {0, 1}) force(*even.session, layer, {0, kExperts - 1});
  const JudgedPeriod period = even.step(0);
  CHECK(!period.first.overflowed);
  CHECK(*imbalance_of(period.first.experts).peak == 1);
}

TEST_CASE("expert bound, fast: steps that run again train as far as others") {
  const Subject subject = biased_subject();
  const auto expected = expect<double>(subject);
  const auto one_rank = train(case_of(subject, {}, false));
  REQUIRE(one_rank.ok());
  const auto trained = train(bounded({.dp = 2, .ep = 2, .accumulation = 2}, 1.01f, false));
  REQUIRE(trained.ok());
  CHECK(std::ranges::count(trained->rolled_back, true) > 0);
  CHECK(error_of(expected, *trained) <= 1.5 * error_of(expected, *one_rank) + 1e-6);
}

TEST_CASE("expert bound: peaks are those of the plans to the byte, in one arena that is as large as the larger needs") {
  const Subject subject = biased_subject();
  const int64_t s = subject.train.seq_len, k = 2, h = subject.model.hidden, f = subject.model.experts.ffn;
  const auto device = [](const Plan& plan, int role) {
    return memory_peak(plan, role)[static_cast<size_t>(Space::kDevice)].peak_bytes;
  };
  for (const auto& [sizes, bound] :
       {std::pair{Sizes{.dp = 2, .ep = 2}, 1.25f}, {{.dp = 4, .ep = 4, .zero = 2}, 2.0f}, {{.dp = 2, .ep = 2}, 1.0f}}) {
    const Case config = bounded(sizes, bound);
    INFO(config.name);
    Bounded run(config);
    Case all = config;
    all.layout.expert_bound = 0;
    const Plan worst = *lower(all), first = *lower(config), second = *lower_in_step(config);
    const int64_t b = config.train.micro_batch, n = config.layout.ep;
    // Rows with the experts that backward wants: [h] as they came, [2 f] up and [f] activated.
    const auto rows = [&](const Plan& plan) {
      int64_t elements = 0;
      for (const Segment& segment : plan.segments)
        if (segment.name == "layer.F")
          for (const Slot& slot : segment.slots)
            for (const std::string_view name : {"rows.in.there", "rows.u", "rows.a"})
              if (slot.name == name) elements += slot.type.shape.elements();
      return elements;
    };
    CHECK(rows(worst) == (h + 3 * f) * n * b * s * k);
    CHECK(rows(first) ==
          (h + 3 * f) * static_cast<int64_t>(std::ceil(static_cast<double>(bound) * static_cast<double>(b * s * k))));
    CHECK(rows(second) == (h + 3 * f) * n * s * k);
    CHECK(device(first, 0) < device(worst, 0));
    for (const int layer : {0, 1}) force(*run.session, layer, {0, 1});
    REQUIRE(run.step(0).first.overflowed);
    for (int rank = 0; rank < config.layout.world_size(); ++rank) {
      CHECK(run.session->ledger(rank).peak(Space::kDevice) == device(first, 0));
      CHECK(run.second->ledger(rank).peak(Space::kDevice) == device(second, 0));
      CHECK(run.session->arena_bytes(rank, Space::kDevice) == *std::ranges::max_element(run.own_bytes));
      CHECK(run.second->arena_bytes(rank, Space::kDevice) == run.session->arena_bytes(rank, Space::kDevice));
    }
    CHECK(find_overlaps(*run.placed.plan, run.placed.programs[0], run.placed.arenas[0]).empty());
    CHECK(find_overlaps(*run.again.plan, run.again.programs[0], run.again.arenas[0]).empty());
  }
}

TEST_CASE("expert bound: plans that keep other state share no arena") {
  Case config = bounded({.dp = 2, .ep = 2}, 1.5f);
  PlacedPlan a = place(*lower(config));
  config.train.ema_decay = 0.9f;
  PlacedPlan b = place(*lower_in_step(config));
  const auto shared = share_arenas(a, b);
  REQUIRE(!shared.ok());
  CHECK(shared.error().message.find("do not keep the same from step to step") != std::string::npos);
}

TEST_CASE("expert bound: what saves nothing or cannot be is refused, and says what to set") {
  const Case good = bounded({.dp = 2, .ep = 2, .accumulation = 2}, 1.5f);
  REQUIRE(check(good).ok());
  const auto refused = [&](const char* message, const char* hint, auto change) {
    Case c = good;
    change(c);
    const auto checked = check(c);
    REQUIRE(!checked.ok());
    CHECK(checked.error().message.starts_with(message));
    CHECK(checked.error().hint == hint);
  };
  refused("expert_bound=1.5 with ep=1: a rank has the rows of its own tokens", "set ep, or expert_bound: 0",
          [](Case& c) { c.layout.ep = 1; });
  refused("expert_bound=1.5 with model.capacity_factor=1.25: the capacity bounds the rows",
          "set model.capacity_factor: 0, or expert_bound: 0", [](Case& c) { c.model.experts.capacity_factor = 1.25f; });
  refused("expert_bound=1.5 with delayed_update: an update that is made beside the step",
          "set delayed_update: false, or expert_bound: 0", [](Case& c) {
            c.layout.offload.optimizer = OffloadTo::kCpu, c.layout.offload.delayed_update = true;
            c.layout.overlap = true;
          });
  refused("expert_bound=0.5: even routes give each rank one share", "set expert_bound to 1 or more, below ep=2, or to 0",
          [](Case& c) { c.layout.expert_bound = 0.5f; });
  refused("expert_bound=2 with ep=2: a rank never gets more than ep even shares", "set expert_bound to 1 or more, below 2, or to 0",
          [](Case& c) { c.layout.expert_bound = 2; });
  refused("expert_bound=1.5 with micro_batch=1: a step that runs again takes one sequence at a time",
          "set micro_batch to 2 or more, or expert_bound: 0",
          [](Case& c) { c.train.grad_accumulation *= c.train.micro_batch, c.train.micro_batch = 1; });
  refused("expert_bound=1.5: the second run of a step, one sequence at a time: ", "set grad_accumulation: 2, or expert_bound: 0",
          [](Case& c) {
            c.layout.pp = 2, c.layout.schedule = Schedule::kTable;
            c.layout.schedule_table = to_csv(make_schedule({Schedule::k1F1B, 2, 1, 2}));
          });
}

}  // namespace shardlab::testing::of_expert_bound
