// Room for fewer rows of experts than may come: a plan that lets a step without room leave a trace, or does not notice one, is refused.
#include <algorithm>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "plan/verify.h"
#include "strategies/lower.h"
#include "tests/namespaces.h"
#include "tests/strategies/cases.h"
#include "tests/test.h"

namespace shardlab::testing {
namespace {

/// Two layers with experts, two micro-batches of two sequences; ranks have room for three of four sequences' rows.
Plan bounded_plan(int pp = 1) {
  Case c = tiny_case(Family::kLlama);
  c.model.experts = {.count = 4, .top_k = 2, .ffn = 8, .bias_update_rate = 0.001f};
  c.layout.dp = c.layout.ep = 2, c.layout.pp = pp;
  if (pp > 1) c.layout.schedule = Schedule::k1F1B;
  c.layout.expert_bound = 1.5f;
  c.train.seq_len = 8, c.train.micro_batch = 2, c.train.grad_accumulation = 2, c.train.global_batch_tokens = 64;
  c.train.ema_decay = 0.9f;
  auto plan = lower(c);
  INFO((plan.ok() ? "" : to_string(plan.error())));
  REQUIRE(plan.ok());
  return std::move(*plan);
}

Segment& segment(Plan& plan, std::string_view name) {
  const auto found = std::ranges::find(plan.segments, name, &Segment::name);
  INFO(name);
  REQUIRE(found != plan.segments.end());
  return *found;
}

SlotId slot(const Segment& s, std::string_view name) {
  const auto found = std::ranges::find(s.slots, name, &Slot::name);
  INFO(name);
  REQUIRE(found != s.slots.end());
  return SlotId(static_cast<int32_t>(found - s.slots.begin()));
}

Op& op(Segment& s, std::string_view label) {
  for (Step& step : s.steps)
    if (Op* found = std::get_if<Op>(&step); found != nullptr && found->label == label) return *found;
  FAIL("no op " << label);
  return std::get<Op>(s.steps.front());
}

/// Where the first role calls a segment, the n-th time.
size_t call_of(const Plan& plan, std::string_view name, int n = 0) {
  const std::vector<Item>& program = plan.roles[0].program;
  for (size_t i = 0; i < program.size(); ++i)
    if (const Call* call = std::get_if<Call>(&program[i]); call != nullptr && plan.segments[call->segment.index()].name == name)
      if (n-- == 0) return i;
  FAIL("no call of " << name);
  return 0;
}

void move_call(Plan& plan, size_t from, size_t to) {
  std::vector<Item>& program = plan.roles[0].program;
  const Item item = program[from];
  program.erase(program.begin() + static_cast<std::ptrdiff_t>(from));
  program.insert(program.begin() + static_cast<std::ptrdiff_t>(to), item);
}

/// What verify says first of the plan after a change.
std::string found(const std::function<void(Plan&)>& change, int pp = 1) {
  Plan plan = bounded_plan(pp);
  change(plan);
  const std::vector<Finding> findings = find_faults(plan);
  return findings.empty() ? "" : findings[0].message;
}

constexpr std::string_view kAll = "rows.counts.there", kFitted = "rows.counts.fit", kBegin = "experts.overflow.begin",
                           kReduced = "experts.overflow.dp";

void replace_read(Segment& s, Op& op, std::string_view from, std::string_view to) {
  std::ranges::replace(op.reads, slot(s, from), slot(s, to));
}

}  // namespace

TEST_CASE("room for some rows: experts go by counts that end where the room does, and exchanges by all counts") {
  CHECK(found([](Plan&) {}).empty());
  CHECK(found([](Plan& p) {
          Segment& s = segment(p, "layer.F");
          for (Step& step : s.steps)
            if (Op* o = std::get_if<Op>(&step); o != nullptr && o->label != "moe.fit") replace_read(s, *o, kFitted, kAll);
        }).starts_with("goes through %rows.in.there by %rows.counts.there: up to 64 rows come, and there is room for 48."));
  int judged = 0;
  for (const char* name : {"layer.F", "layer.B"}) {
    const Plan plan = bounded_plan();
    for (const Step& step : segment(const_cast<Plan&>(plan), name).steps) {
      const Op* o = std::get_if<Op>(&step);
      if (o == nullptr || o->label == "moe.fit") continue;
      const std::string label = o->label;
      const Phase phase = phase_of(o->work);
      const auto change = [&](std::string_view from, std::string_view to) {
        return found([&](Plan& p) {
          Segment& s = segment(p, name);
          for (Step& other : s.steps)
            if (Op* same = std::get_if<Op>(&other); same != nullptr && same->label == label && phase_of(same->work) == phase)
              replace_read(s, *same, from, to);
        });
      };
      const Segment& s = segment(const_cast<Plan&>(plan), name);
      const auto reads = [&](std::string_view what) { return std::ranges::find(o->reads, slot(s, what)) != o->reads.end(); };
      INFO(name << " " << label);
      if (reads(kFitted)) {
        CHECK(change(kFitted, kAll) != "");
        ++judged;
      } else if (reads(kAll)) {
        CHECK(change(kAll, kFitted) != "");
        ++judged;
      }
    }
  }
  CHECK(judged == 12);  // products and activations, three forward and five back; four exchanges
}

TEST_CASE("room for some rows: the rows that came are judged, by the counts of those that came") {
  CHECK(found([](Plan& p) {
          Segment& s = segment(p, "layer.F");
          op(s, "moe.fit").reads[1] = slot(s, "rows.counts");
        }).find("those that have come are one") != std::string::npos);
  CHECK(found([](Plan& p) {
          Segment& s = segment(p, "layer.F");
          op(s, "moe.fit").reads[0] = slot(s, "rows.u");
        }) == "reads %rows.u, which is not live: it was not allocated, or freed before this");
  CHECK(found([](Plan& p) {
          Segment& s = segment(p, "layer.F");
          std::erase_if(s.steps, [](const Step& step) {
            const Op* o = std::get_if<Op>(&step);
            return o != nullptr && o->label == "moe.fit";
          });
        }) == "reads %rows.counts.fit before it is written");
  // Room for less than the rows of one rank has no place for its message.
  CHECK(found([](Plan& p) {
          for (const char* name : {"layer.F", "layer.B"})
            for (Slot& s : segment(p, name).slots)
              if (s.type.shape.rank == 3 && s.type.shape[1] == 48) s.type.shape[1] = 31;
          for (Buffer& b : p.roles[0].buffers)
            if (b.type.shape.rank == 3 && b.type.shape[1] == 48) b.type.shape[1] = 31;
        }) == "rows=32 of %rows.in.there, which has 31");
}

TEST_CASE("room for some rows: the flag is begun once, knows of every layer and micro-batch, and is the word of all ranks") {
  CHECK(found([](Plan& p) {
          p.roles[0].program.erase(p.roles[0].program.begin() + static_cast<std::ptrdiff_t>(call_of(p, kBegin)));
        }).find("experts.overflow") != std::string::npos);
  CHECK(found([](Plan& p) { move_call(p, call_of(p, kBegin), call_of(p, "layer.F")); }) != "");
  // Begun anew behind the first layer, the flag forgets it.
  CHECK(found([](Plan& p) {
          const Item begin = p.roles[0].program[call_of(p, kBegin)];
          p.roles[0].program.insert(p.roles[0].program.begin() + static_cast<std::ptrdiff_t>(call_of(p, "layer.F", 1)), begin);
        }).find("before the last layer and micro-batch of the step have been judged: 3 of 4 have") != std::string::npos);
  CHECK(found([](Plan& p) {
          segment(p, kReduced).name = "early";
          move_call(p, call_of(p, "early"), call_of(p, "layer.F", 2));
        }) != "");
  CHECK(found([](Plan& p) { std::get<Collective>(op(segment(p, kReduced), kReduced).work).reduce = ReduceOp::kSum; }) != "");
  CHECK(found(
            [](Plan& p) {
              p.roles[0].program.erase(p.roles[0].program.begin() +
                                       static_cast<std::ptrdiff_t>(call_of(p, "experts.overflow.dp.pp")));
            },
            2) != "");
}

TEST_CASE("room for some rows: what is kept changes where the step has no overflow, and the run goes by the same word") {
  int updates = 0;
  const Plan plan = bounded_plan();
  for (const Segment& s : plan.segments)
    for (const Step& step : s.steps) {
      const Op* o = std::get_if<Op>(&step);
      if (o == nullptr || !o->when) continue;
      INFO(s.name);
      CHECK(found([&](Plan& p) { op(segment(p, s.name), o->label).when = SlotId(); }).find("it runs under no predicate") !=
            std::string::npos);
      ++updates;
    }
  CHECK(updates >= 3);  // weights with decay and without, averages, biases of routers
  CHECK(found([](Plan& p) {
          std::get<Kernel>(op(segment(p, "go"), "go").work).name = "any";
        }).find("which is not 0 in a step that has an overflow") != std::string::npos);
  CHECK(found([](Plan& p) { std::get<Kernel>(op(segment(p, "overflowed"), "overflowed").work).name = "not"; }) != "");
  CHECK(found([](Plan& p) {
          for (Buffer& b : p.roles[0].buffers)
            if (b.name == "overflowed") b.name = "noted";
        }) == "counts of rows are cut off, and no %overflowed says whether the step stands");
}

}  // namespace shardlab::testing
