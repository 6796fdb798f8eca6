// Collective matmul against the separately written single-rank reference: canonical mode has its bits, whatever the strips.
#include <fmt/format.h>

#include <string>
#include <vector>

#include "plan/verify.h"
#include "strategies/lower.h"
#include "tests/namespaces.h"
#include "tests/numerics/against_reference.h"
#include "tests/numerics/matrix.h"
#include "tests/numerics/train_case.h"
#include "tests/test.h"

namespace shardlab::testing::of_tensor_overlap {
namespace {

struct Sizes {
  int tp = 2, dp = 1, pp = 1, cp = 1, zero = 0, accumulation = 1;
  Schedule schedule = Schedule::kNone;
  Recompute recompute = Recompute::kNone;
  int64_t kv_heads = 0;  ///< 0: as the subject has
};

Case case_of(const Subject& subject, const Sizes& sizes, bool canonical = true) {
  Case c;
  c.canonical = canonical;
  c.model = subject.model;
  c.train = subject.train;
  if (sizes.kv_heads > 0) c.model.kv_heads = sizes.kv_heads;
  c.layout.tp = sizes.tp, c.layout.dp = sizes.dp, c.layout.pp = sizes.pp, c.layout.cp = sizes.cp, c.layout.zero = sizes.zero;
  c.layout.sequence_parallel = c.layout.tensor_overlap = true;
  c.layout.cp_kind = sizes.cp > 1 ? ContextKind::kRing : ContextKind::kNone;
  c.layout.schedule = sizes.schedule;
  if (is_looped(sizes.schedule)) c.layout.vpp = 2;
  c.layout.recompute = sizes.recompute;
  c.train.grad_accumulation = sizes.accumulation;
  c.train.micro_batch = subject.sequences / (sizes.accumulation * sizes.dp);
  c.name = fmt::format("{} tp{} dp{} pp{} cp{} zero{} b{} kv{}", subject.name, sizes.tp, sizes.dp, sizes.pp, sizes.cp, sizes.zero,
                       c.train.micro_batch, c.model.kv_heads);
  return c;
}

}  // namespace

TEST_CASE("collective matmul, canonical: the bits of one rank, for any micro-batch, degree and mix") {
  constexpr Sizes kSizes[] = {
      {.tp = 2},
      {.tp = 4, .accumulation = 8},
      {.tp = 4, .accumulation = 2},
      {.tp = 2, .dp = 2, .accumulation = 2},
      {.tp = 2, .dp = 2, .zero = 3, .accumulation = 2},
      {.tp = 2, .pp = 2, .accumulation = 4, .schedule = Schedule::k1F1B},
      {.tp = 2, .pp = 2, .accumulation = 4, .schedule = Schedule::kZbH1},
      {.tp = 4, .accumulation = 2, .recompute = Recompute::kFull},
      {.tp = 2, .accumulation = 4, .recompute = Recompute::kSelective},
      {.tp = 2, .cp = 2, .accumulation = 8},
      {.tp = 2, .cp = 2, .accumulation = 8, .recompute = Recompute::kFull},
  };
  for (const char* name : {"gpt tied sgd", "llama adamw", "llama tied dropout clipped sgd"}) {
    const Subject subject = subject_named(name);
    const auto expected = expect<float>(subject);
    for (const Sizes& sizes : kSizes) {
      const Case config = case_of(subject, sizes);
      INFO(config.name);
      if (const auto legal = check(config); !legal) FAIL(to_string(legal.error()));
      const auto trained = train_case(config, RandomText(config.model.vocab), kSteps);
      const std::string difference = trained ? differences(config, expected, *trained) : to_string(trained.error());
      INFO(difference);
      CHECK(difference.empty());
    }
  }
}

TEST_CASE("collective matmul with a kv head on several ranks: the bits of one rank") {
  Subject subject = subject_named("llama sgd");
  for (const int64_t kv_heads : {1, 2})
    for (const Recompute recompute : {Recompute::kNone, Recompute::kFull}) {
      subject.model.kv_heads = kv_heads;
      const Case config = case_of(subject, {.tp = 4, .accumulation = 2, .recompute = recompute});
      INFO(config.name);
      const auto trained = train_case(config, RandomText(config.model.vocab), kSteps);
      const std::string difference = trained ? differences(config, expect<float>(subject), *trained) : to_string(trained.error());
      INFO(difference);
      CHECK(difference.empty());
    }
}

namespace {

/// The plan of a step of 4 ranks with a change of the n-th op of that kind in a segment; nothing where there is none.
template <class W, class Change>
std::string faults_of(Plan plan, std::string_view segment, size_t n, const Change& change) {
  for (Segment& s : plan.segments) {
    if (s.name != segment) continue;
    for (size_t i = 0; i < s.steps.size(); ++i) {
      Op* op = std::get_if<Op>(&s.steps[i]);
      W* w = op == nullptr ? nullptr : std::get_if<W>(&op->work);
      if constexpr (std::is_same_v<W, Linear>)
        if (w != nullptr && w->strips == 1) continue;
      if (w == nullptr || n-- != 0) continue;
      change(*op, *w);
      const auto verified = verify(plan);
      return verified.ok() ? "" : verified.error().message + verified.error().hint;
    }
  }
  FAIL("no such op in " << segment);
  return "";
}

}  // namespace

TEST_CASE("collective matmul with a wrong hop, turn, order, step or a strip that is missing is refused") {
  for (const bool canonical : {false, true}) {
    Subject subject = subject_named("llama sgd");
    subject.sequences = 2;
    const auto lowered = lower(case_of(subject, {.tp = 4}, canonical));
    REQUIRE(lowered.ok());
    for (const std::string_view segment : {"layer.F", "layer.B"}) {
      for (size_t n = 0; n < 12; ++n) {
        INFO(segment << " " << n);
        // Another rank's strip, said to be this turn's; the weight's product twice; a strip beside none.
        CHECK(faults_of<Linear>(*lowered, segment, n, [](Op&, Linear& w) { w.turn = w.turn == -1 ? -2 : -1; }) != "");
        CHECK(faults_of<Linear>(*lowered, segment, n, [](Op& op, Linear& w) {
                if (w.carry) op.reads.pop_back();
                w.carry = !w.carry;
                if (w.carry) op.reads.push_back(op.writes[0]);
              }) != "");
        CHECK(faults_of<Linear>(*lowered, segment, n, [](Op&, Linear& w) { w.strips = 2; }) != "");
        CHECK(faults_of<Send>(*lowered, segment, n, [](Op&, Send& w) { ++w.hop; }) != "");
      }
      // Both ends of a message agree on a wrong hop: the strip is another rank's.
      for (size_t n = 0; n < 12; ++n) {
        Plan plan = *lowered;
        for (Segment& s : plan.segments) {
          if (s.name != segment) continue;
          size_t sends = 0, receives = 0;
          for (Step& step : s.steps) {
            Op* op = std::get_if<Op>(&step);
            if (op == nullptr) continue;
            if (auto* w = std::get_if<Send>(&op->work); w != nullptr && sends++ == n) ++w->hop;
            if (auto* w = std::get_if<Recv>(&op->work); w != nullptr && receives++ == n) --w->hop;
          }
        }
        INFO(segment << " hop " << n);
        CHECK(!verify(plan).ok());
      }
      const size_t together = segment == "layer.F" ? 2 : 4;
      for (size_t n = 0; n < together; ++n) {
        INFO(segment << " strips " << n);
        CHECK(faults_of<Strips>(*lowered, segment, n, [](Op&, Strips& w) { w.step = -w.step; }) != "");
        CHECK(faults_of<Strips>(*lowered, segment, n, [](Op& op, Strips&) { std::swap(op.reads[1], op.reads[2]); }) != "");
        CHECK(faults_of<Strips>(*lowered, segment, n, [](Op& op, Strips&) { op.reads[1] = op.reads[2]; }) != "");
        CHECK(faults_of<Strips>(*lowered, segment, n, [](Op& op, Strips&) { op.reads.pop_back(); }) != "");
        CHECK(faults_of<Strips>(*lowered, segment, n, [](Op&, Strips& w) { w.sum = !w.sum; }) != "");
      }
    }
    // A product without its last strip: what follows reads a result that is not all there.
    for (const std::string_view segment : {"layer.F", "layer.B"}) {
      Plan plan = *lowered;
      int dropped = 0;
      for (Segment& s : plan.segments)
        if (s.name == segment)
          dropped += static_cast<int>(std::erase_if(s.steps, [](const Step& step) {
            const Op* op = std::get_if<Op>(&step);
            const auto* w = op == nullptr ? nullptr : std::get_if<Linear>(&op->work);
            return w != nullptr && w->carry && w->turn == -3;
          }));
      CHECK(dropped == 2);
      CHECK(!verify(plan).ok());
    }
  }
}

}  // namespace shardlab::testing::of_tensor_overlap
