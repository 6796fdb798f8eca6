// What lowering refuses, and properties that every plan has.
#include <sys/time.h>

#include <set>

#include "plan/automatic.h"
#include "plan/braids.h"
#include "plan/collective_steps.h"
#include "plan/memory.h"
#include "plan/pipeline_case.h"
#include "plan/routing.h"
#include "plan/wire.h"
#include "strategies/catalogue.h"
#include "strategies/lower.h"
#include "tests/namespaces.h"
#include "tests/strategies/cases.h"
#include "tests/test.h"

namespace shardlab::testing {
namespace {

using testing::tiny_case;
using testing::with_pipeline;

std::string refusal(const Case& c) {
  const auto plan = lower(c);
  return plan.ok() ? "lowered" : plan.error().message;
}

/// The algorithms of the plan's collectives of one label.
std::set<Algorithm> algorithms_of(const Case& c, std::string_view label) {
  const auto plan = lower(c);
  REQUIRE(plan.ok());
  std::set<Algorithm> found;
  for (const Segment& segment : plan->segments)
    for (const Step& step : segment.steps)
      if (const Op* op = std::get_if<Op>(&step); op != nullptr && op->label == label)
        if (const auto* collective = std::get_if<Collective>(&op->work)) found.insert(collective->algorithm);
  return found;
}

TEST_CASE("collective_algorithm auto: halving-doubling in groups of a power of two above two, else a ring") {
  using Found = std::set<Algorithm>;
  Case c = tiny_case();
  c.layout.dp = 4;
  CHECK(algorithms_of(c, "gradients") == Found{Algorithm::kHalvingDoubling});
  c.layout.collective_algorithm = AlgorithmChoice::kRing;  // what is asked for stays
  CHECK(algorithms_of(c, "gradients") == Found{Algorithm::kRing});
  c.layout.collective_algorithm = AlgorithmChoice::kAuto;
  for (const int dp : {2, 3, 6}) {
    c.layout.dp = dp;
    CHECK(algorithms_of(c, "gradients") == Found{Algorithm::kRing});
  }
  c.layout.dp = 6;
  c.layout.tp = 4;  // each group by its own size
  CHECK(algorithms_of(c, "gradients") == Found{Algorithm::kRing});
  CHECK(algorithms_of(c, "g") == Found{Algorithm::kHalvingDoubling});
  c.layout.dp = 4;
  c.canonical = true;
  CHECK(algorithms_of(c, "gradients") == Found{Algorithm::kDirect});
}

TEST_CASE("what auto chooses sends what a ring sends, in fewer steps") {
  for (const CollectiveKind kind : {CollectiveKind::kAllReduce, CollectiveKind::kReduceScatter, CollectiveKind::kAllGather})
    for (const int ranks : {4, 8, 64, 256})
      for (const int64_t elements : {int64_t{1}, int64_t{1001}, int64_t{1} << 24}) {
        CAPTURE(static_cast<int>(kind), ranks, elements);
        const Algorithm chosen = automatic_algorithm(kind, ranks);
        CHECK(collective_steps(kind, chosen, ranks, 0).size() < collective_steps(kind, Algorithm::kRing, ranks, 0).size());
        int64_t sent = 0, by_ring = 0;
        for (int rank = 0; rank < ranks; ++rank) {
          sent += sent_elements(kind, chosen, elements, ranks, rank);
          by_ring += sent_elements(kind, Algorithm::kRing, elements, ranks, rank);
        }
        CHECK(sent == by_ring);
      }
  CHECK(automatic_algorithm(CollectiveKind::kAllToAll, 8) == Algorithm::kRing);  // by halving a part travels several times
}

TEST_CASE("illegal layouts are refused with their values") {
  Case c = tiny_case();
  c.layout.tp = 3;
  REQUIRE(refusal(c) == "heads 4 is not divisible by tp=3");
  c = tiny_case(Family::kLlama);
  c.model.heads = 12, c.model.kv_heads = 3;
  c.layout.tp = 2;
  REQUIRE(refusal(c) == "kv_heads 3 with tp=2: a rank takes whole kv heads, or several share one");
  c.model.kv_heads = 2;
  c.layout.tp = 4;
  REQUIRE(check(c).ok());
  c.canonical = true;
  REQUIRE(refusal(c) == "canonical with kv_heads 2 and tp=4: 3 query heads a rank for one of 2 copies of a kv head");
  REQUIRE(refusal(with_pipeline(tiny_case(), 3, Schedule::k1F1B, 1)) == "pp=3 stages for 2 layers: a stage would be empty");
  c = tiny_case();
  c.layout.schedule = Schedule::k1F1B;
  REQUIRE(refusal(c) == "schedule=1f1b with pp=1: there is no pipeline to be scheduled");
  c = tiny_case();
  c.layout.zero = 1;
  REQUIRE(refusal(c) == "zero=1 with dp=1: there is nothing to shard over");
  c.layout.zero = 3;
  c.layout.dp = 2;
  c.layout.bucket_bytes = 1000;
  REQUIRE(refusal(c) == "bucket_bytes=1000 with zero=3: what travels together is the unit");
  c.layout.bucket_bytes = 0;
  c.layout.zero = 2;
  c.layout.fsdp.prefetch = 2;
  REQUIRE(refusal(c) == "fsdp options with zero=2: only zero 3 gathers parameters");
  c = tiny_case();
  c.layout.dp = 3;
  c.layout.zero = 2;
  c.train.grad_accumulation = 2;
  c.canonical = true;
  REQUIRE(refusal(c) == "canonical with zero=2 and micro_batch*dp=3, no power of two");
  c = tiny_case();
  c.train.seq_len = 17;
  REQUIRE(refusal(c) == "seq_len=17 exceeds the model's max_positions=16");
  c = tiny_case();
  c.train.global_batch_tokens = 48;
  REQUIRE(refusal(c) == "global_batch_tokens=48 is not seq_len 16 * micro_batch 1 * grad_accumulation 1 * dp 1 = 16");
  c = tiny_case();
  c.canonical = true;
  c.train.micro_batch = 3;
  REQUIRE(refusal(c) == "canonical with micro_batch=3, no power of two");
  c = tiny_case();
  c.layout.tp = 0;
  REQUIRE(refusal(c) == "tp=0 is not positive");
}

TEST_CASE("braided micro-batches: every schedule has a plan without a deadlock, or none of its gradients comes early enough") {
  std::set<std::string> braided;
  for (int number = 0; number < named_schedules(); ++number)
    for (const int p : {2, 3, 4})
      for (const int m : {2, 3, 4, 8}) {
        Case c;
        c.model = {.name = "tiny",
                   .family = Family::kLlama,
                   .layers = 8,
                   .hidden = 16,
                   .heads = 2,
                   .kv_heads = 2,
                   .head_dim = 8,
                   .ffn = 32,
                   .vocab = 32,
                   .max_positions = 16};
        c.model.experts = {.count = 4, .top_k = 2, .ffn = 12};
        c.layout.schedule = Schedule(number);
        if (c.layout.schedule == Schedule::kNone || is_mirrored(c.layout.schedule)) continue;
        c.layout.dp = c.layout.ep = 2, c.layout.pp = p, c.layout.vpp = is_looped(c.layout.schedule) ? 2 : 1;
        c.layout.expert_overlap = ExpertOverlap::kMicroBatches;
        c.train.seq_len = 8, c.train.grad_accumulation = m, c.train.global_batch_tokens = 8 * m * 2;
        INFO(name_of(c.layout.schedule) << ", " << p << " stages, " << m << " micro-batches");
        REQUIRE(check_pipeline(c).ok());
        const auto plan = lower(c);
        INFO((plan.ok() ? "" : to_string(plan.error())));
        CHECK(plan.ok() == has_braids(c));
        if (plan.ok())
          braided.insert(std::string(name_of(c.layout.schedule)));
        else
          CHECK(plan.error().message.find("no stage has the gradients of one micro-batch") != std::string::npos);
      }
  CHECK(braided == std::set<std::string>{"afab", "breadth-first", "dualpipe-v", "eager-1f1b", "interleaved", "v-half", "v-min",
                                         "zb-h2", "zb-v"});
}

TEST_CASE("a budget below the peak is refused with the stage and the moment") {
  Case c = tiny_case();
  c.machine.device.memory_bytes = 1000;
  LowerOptions options;
  options.budget = true;
  const auto plan = lower(c, options);
  REQUIRE_FALSE(plan.ok());
  REQUIRE(plan.error().code == ExitCode::kNo);
}

TEST_CASE("a deep model is lowered in time that grows with its layers, its optimizer on the host too") {
  Case c = tiny_case();
  c.model.layers = 4096;
  c.layout.dp = 2;
  c.layout.bucket_bytes = 0;  // each parameter is a bucket and an update of its own
  c.layout.offload.optimizer = OffloadTo::kCpu;
  // Of processor time. The signal ends the test.
  const itimerval limit{.it_interval = {}, .it_value = {.tv_sec = 60, .tv_usec = 0}}, none{};
  setitimer(ITIMER_VIRTUAL, &limit, nullptr);
  const auto plan = lower(c);
  setitimer(ITIMER_VIRTUAL, &none, nullptr);
  REQUIRE(plan.ok());
  CHECK(plan->roles.size() == 1);
}

TEST_CASE("an unknown pass is refused with the list of passes") {
  LowerOptions options;
  options.after = "fusion";
  const auto plan = lower(tiny_case(), options);
  REQUIRE_FALSE(plan.ok());
  REQUIRE(plan.error().message == "there is no pass called `fusion`");
  REQUIRE(plan.error().hint.starts_with(
      "passes, in order: mixed-precision, tensor-parallel, whole-experts, sequence-parallel, tensor-overlap, context-parallel, "
      "expert-parallel, expert-bound, expert-overlap, fp8, scaled-loss, chunked-loss, full-recompute"));
}

TEST_CASE("leaving later passes out still gives a plan to look at") {
  Case c = tiny_case(Family::kLlama);
  c.layout.dp = 2;
  LowerOptions options;
  options.after = "state";
  const auto plan = lower(c, options);
  REQUIRE(plan.ok());
  REQUIRE(total_wire_bytes(*plan).count("dp.grads") == 0);
}

TEST_CASE("a plan whose routers follow their load and whose rows have a bound can be looked at after every pass") {
  Case c = tiny_case(Family::kLlama);
  c.model.experts = {.count = 4, .top_k = 2, .ffn = 8, .bias_update_rate = 0.001f};
  c.layout.dp = c.layout.ep = 2, c.layout.expert_bound = 1.5f;
  c.train.micro_batch = 2, c.train.global_batch_tokens = 64;
  for (const Strategy& strategy : catalogue()) {
    INFO(strategy.name);
    LowerOptions options;
    options.after = strategy.name;
    CHECK(lower(c, options).ok());
  }
}

TEST_CASE("ZeRO-1 sends what data parallel sends and keeps 1/N of the moments") {
  Case c = tiny_case(Family::kLlama);
  c.layout.dp = 2;
  const Plan plain = *lower(c);
  c.layout.zero = 1;
  const Plan sharded = *lower(c);
  REQUIRE(total_wire_bytes(plain).at("dp.grads") ==
          total_wire_bytes(sharded).at("dp.grads") + total_wire_bytes(sharded).at("dp.parameters"));
  const auto moments = [](const Plan& p) { return memory_peak(p, 0)[0].at_peak.bytes[static_cast<size_t>(BufferClass::kMoment)]; };
  REQUIRE(moments(plain) == 2 * moments(sharded));
}

TEST_CASE("a placement of experts that is asked for by a word is no plan's to choose") {
  Case c = tiny_case(Family::kLlama);
  c.model.experts = {.count = 4, .top_k = 2, .ffn = 8};
  c.layout.dp = c.layout.ep = 2;
  c.data.routing = "zipf:1";
  c.checkpoint.resume = "run";
  for (const std::string word : {"balanced", "measured"}) {
    c.layout.expert_placement = word;
    CHECK_FALSE(is_placement_decided(c));
    CHECK(refusal(c) == "expert_placement=" + word + " has not been decided: a plan knows no loads");
  }
  c.layout.expert_placement = "1:2,0,3,1";
  CHECK(is_placement_decided(c));
  CHECK(lower(c)->expert_placement == std::vector{place_experts(1, {2, 0, 3, 1})});
}

TEST_CASE("the validation plan has the training plan's parameters and no gradients") {
  Case c = with_pipeline(tiny_case(), 2, Schedule::k1F1B, 2);
  c.layout.dp = 2;
  const auto plan = lower_validation(c);
  REQUIRE((plan.ok() ? "" : to_string(plan.error())) == "");
  REQUIRE(plan->parameters.size() == lower(c)->parameters.size());
  for (const Role& role : plan->roles)
    for (const Buffer& b : role.buffers) REQUIRE(b.kind != BufferClass::kGradient);
}

}  // namespace
}  // namespace shardlab::testing
