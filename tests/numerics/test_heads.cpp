// The ends of the model against the separately written single-rank reference: head and loss in pieces, and tables of tokens whose rows are
// padded. Memory measured is memory planned in every training here (tests/numerics/running.cpp).
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "plan/memory.h"
#include "plan/wire.h"
#include "strategies/lower.h"
#include "tests/namespaces.h"
#include "tests/numerics/against_reference.h"
#include "tests/numerics/matrix.h"
#include "tests/numerics/train_case.h"
#include "tests/test.h"

namespace shardlab::testing::of_heads {
namespace {

Result<Trained> train(const Case& config) { return train_case(config, RandomText(config.model.vocab), kSteps); }

Case case_of(const Subject& subject, bool canonical, int dp = 1, int tp = 1, int64_t micro_batch = 1) {
  Case c;
  c.canonical = canonical;
  c.model = subject.model;
  c.train = subject.train;
  c.layout.dp = dp, c.layout.tp = tp;
  c.train.micro_batch = micro_batch;
  c.train.grad_accumulation = subject.sequences / (micro_batch * dp);
  c.name = fmt::format("{} dp{} tp{} b{}", subject.name, dp, tp, micro_batch);
  return c;
}

void check_bits(const Subject& subject, const std::vector<Case>& cases) {
  std::map<std::pair<int, int>, Expected<float>> known;  // by order of tokens
  for (const Case& config : cases) {
    INFO(config.name);
    REQUIRE((check(config).ok() ? "" : to_string(check(config).error())) == "");
    const auto plan = lower(config);
    REQUIRE(plan.ok());
    const TokenOrder order = plan->token_order;
    const auto [expected, fresh] = known.try_emplace({static_cast<int>(order.kind), order.parts});
    if (fresh) expected->second = expect<float>(subject, order);
    const auto trained = train(config);
    CHECK((trained ? differences(config, expected->second, *trained) : to_string(trained.error())) == "");
  }
}

/// The largest tensor of a plan that holds logits, in elements.
int64_t most_logits(const Plan& plan) {
  int64_t most = 0;
  for (const Segment& segment : plan.segments)
    for (const Slot& slot : segment.slots)
      if (slot.name.starts_with("logits")) most = std::max(most, slot.type.shape.elements());
  return most;
}

}  // namespace

TEST_CASE("head and loss in pieces, canonical: sequences, parts of them, under every schedule and cut, to the reference's bits") {
  for (const char* name : {"gpt tied sgd", "llama tied dropout clipped sgd"}) {
    Subject subject = subject_named(name);
    subject.sequences = 4;
    std::vector<Case> cases;
    const auto add = [&](Case c, int pieces) -> Case& {
      c.layout.loss_chunks = pieces;
      c.name += fmt::format(" in {}", pieces);
      return cases.emplace_back(std::move(c));
    };
    add(case_of(subject, true, 1, 1, 4), 2);
    add(case_of(subject, true, 1, 1, 4), 64);
    add(case_of(subject, true, 1, 1, 2), 2);
    add(case_of(subject, true, 2, 2, 2), 8).layout.sequence_parallel = true;
    add(case_of(subject, true, 1, 4, 1), 16);
    for (const Schedule schedule : {Schedule::k1F1B, Schedule::kZbH1, Schedule::kDualPipe}) {
      Case& c = add(case_of(subject, true, 1, 1, 1), 4);
      c.layout.pp = 2, c.layout.schedule = schedule;
      c.name += fmt::format(" {}", name_of(schedule));
    }
    for (const ContextKind kind : {ContextKind::kZigzag, ContextKind::kUlysses}) {
      Case& c = add(case_of(subject, true, 1, 2, 1), 8);
      c.layout.cp = 2, c.layout.cp_kind = kind, c.layout.sequence_parallel = true;
      c.name += fmt::format(" cp2 {}", name_of(kind));
    }
    Case& sharded = add(case_of(subject, true, 4, 1, 1), 4);
    sharded.layout.zero = 3, sharded.layout.offload.activations = OffloadTo::kCpu, sharded.layout.recompute = Recompute::kFull;
    check_bits(subject, cases);
  }
}

TEST_CASE("head and loss in pieces: logits are 1/k and do not wait for backward; nothing more is sent; the norm's output is kept") {
  const Subject subject = subject_named("llama sgd");
  for (const int64_t b : {1, 2, 4})
    for (const int k : {2, 4, 8})
      for (const int tp : {1, 2}) {
        Case whole = case_of(subject, false, 1, tp, b), pieces = whole;
        pieces.layout.loss_chunks = k;
        INFO(pieces.name << " in " << k);
        const auto a = lower(whole), p = lower(pieces);
        REQUIRE((a.ok() && p.ok()));
        CHECK(most_logits(*p) * k == most_logits(*a));
        CHECK(most_logits(*a) == b * subject.train.seq_len * subject.model.vocab / tp);
        CHECK(total_wire_bytes(*p) == total_wire_bytes(*a));
        const auto kept = [](const Plan& plan) {
          int64_t bytes = 0;
          for (const Segment& s : plan.segments)
            if (s.name == "head.F")
              for (const Slot& slot : s.slots)
                if (slot.kind == SlotKind::kBound && slot.cls == BufferClass::kActivation && !slot.view) bytes += slot.type.bytes();
          return bytes;
        };
        CHECK(kept(*a) - kept(*p) == 4 * most_logits(*a));
      }
}

TEST_CASE("at 32k tokens the head sets the peak of memory, and in pieces it does not") {
  Case c;
  c.name = "long";
  c.model = {.name = "long",
             .family = Family::kLlama,
             .layers = 2,
             .hidden = 64,
             .heads = 4,
             .kv_heads = 2,
             .head_dim = 16,
             .ffn = 192,
             .vocab = 4096,
             .max_positions = 32768};
  c.train.seq_len = 32768;
  c.train.global_batch_tokens = 32768;
  c.layout.recompute = Recompute::kFull;
  const auto peak_of = [](const Case& config) {
    const auto plan = lower(config);
    REQUIRE(plan.ok());
    return memory_peak(*plan, 0)[static_cast<size_t>(Space::kDevice)];
  };
  const MemoryPeak whole = peak_of(c);
  CHECK(whole.moment.find("head") != std::string::npos);
  c.layout.loss_chunks = 64;
  const MemoryPeak pieces = peak_of(c);
  INFO(whole.moment << ": " << whole.peak_bytes << ", " << pieces.moment << ": " << pieces.peak_bytes);
  CHECK(pieces.moment.find("layer") != std::string::npos);
  CHECK(whole.peak_bytes - pieces.peak_bytes > 4 * c.train.seq_len * c.model.vocab / 2);
}

TEST_CASE("padded tables of tokens, canonical: tp that does not divide the vocabulary trains to the reference's bits") {
  for (const char* name : {"gpt tied sgd", "llama adamw"})
    for (const auto& [vocab, multiple] : {std::pair<int64_t, int64_t>{61, 4}, {33, 64}, {61, 128}}) {
      Subject subject = subject_named(name);
      subject.sequences = 4;
      subject.model.vocab = vocab;
      Case refused = case_of(subject, true, 1, 4);
      REQUIRE(!check(refused).ok());
      CHECK(to_string(check(refused).error()).find("vocab_multiple: 128") != std::string::npos);
      subject.model.vocab_multiple = multiple;
      std::vector<Case> cases{case_of(subject, true), case_of(subject, true, 2, 2), case_of(subject, true, 1, 4, 2)};
      cases[1].layout.zero = 2;
      cases[2].layout.sequence_parallel = true, cases[2].layout.loss_chunks = 8;
      cases.push_back(case_of(subject, true, 1, 4));  // of 33 words in 64 rows the fourth rank has none
      cases.back().layout.pp = 2, cases.back().layout.schedule = Schedule::k1F1B;
      check_bits(subject, cases);
    }
}

TEST_CASE("padded rows of a table win no share of the softmax and have no gradient") {
  Subject subject = subject_named("llama sgd");
  subject.sequences = 4;
  subject.model.vocab = 61;
  const auto plain = train(case_of(subject, true));
  REQUIRE(plain.ok());
  subject.model.vocab_multiple = 64;
  const auto before = expect<float>(subject);
  for (const int tp : {1, 4}) {
    const auto padded = train(case_of(subject, true, 1, tp));
    REQUIRE(padded.ok());
    for (size_t step = 0; step < plain->losses.size(); ++step)
      CHECK(padded->losses[step] == Approx(plain->losses[step]).epsilon(1e-4));
    for (const char* table : {"embed.tokens", "head.weight"}) {
      const std::vector<float>& now = padded->parameters.at(table);
      const size_t words = static_cast<size_t>(61 * subject.model.hidden);
      REQUIRE(now.size() == static_cast<size_t>(64 * subject.model.hidden));
      CHECK(std::equal(now.begin() + static_cast<std::ptrdiff_t>(words), now.end(),
                       before.initial.at(table).begin() + static_cast<std::ptrdiff_t>(words)));
      CHECK(!std::equal(now.begin(), now.begin() + static_cast<std::ptrdiff_t>(words), before.initial.at(table).begin()));
    }
  }
}

}  // namespace shardlab::testing::of_heads
