// Packed documents against the separately written single-rank reference, which tells documents apart by their numbers.
//
// Canonical mode: losses and parameters after 5 steps have the reference's bits, under every layout. Documents that are packed together
// have the losses of sequences of their own.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <string>
#include <vector>

#include "plan/base/documents.h"
#include "plan/base/philox.h"
#include "plan/verify.h"
#include "plan/work.h"
#include "strategies/lower.h"
#include "tests/namespaces.h"
#include "tests/numerics/against_reference.h"
#include "tests/numerics/matrix.h"
#include "tests/numerics/train_case.h"
#include "tests/test.h"

namespace shardlab::testing::of_packed {
namespace {

Result<Trained> train(const Case& config) { return train_case(config, RandomText(config.model.vocab), kSteps); }

struct Sizes {
  ContextKind kind = ContextKind::kNone;
  int cp = 1, dp = 1, tp = 1, pp = 1, zero = 0, accumulation = 1, heads = 0;
  bool sequence_parallel = false;
  Recompute recompute = Recompute::kNone;
  Schedule schedule = Schedule::k1F1B;
};

Case packed_case(const Subject& subject, const Sizes& sizes, bool canonical) {
  Case c;
  c.canonical = canonical;
  c.model = subject.model;
  c.train = subject.train;
  c.data.packed = true;
  Layout& l = c.layout;
  l.cp = sizes.cp, l.dp = sizes.dp, l.tp = sizes.tp, l.pp = sizes.pp, l.zero = sizes.zero;
  l.cp_kind = sizes.kind;
  l.cp_ulysses = sizes.heads;
  l.sequence_parallel = sizes.sequence_parallel;
  l.recompute = sizes.recompute;
  if (sizes.pp > 1) l.schedule = sizes.schedule;
  c.train.grad_accumulation = sizes.accumulation;
  c.train.micro_batch = subject.sequences / (sizes.accumulation * sizes.dp);
  c.name = fmt::format("{} packed {} cp{} dp{} tp{}{} pp{} zero{} ga{} {}", subject.name, name_of(sizes.kind), sizes.cp, sizes.dp,
                       sizes.tp, sizes.sequence_parallel ? " sequence-parallel" : "", sizes.pp, sizes.zero, sizes.accumulation,
                       name_of(sizes.recompute));
  return c;
}

/// Trains every case and compares it with the reference over the case's order of tokens.
void train_all(const Subject& subject, const std::vector<Case>& cases) {
  std::map<std::string, Expected<float>> known;
  for (const Case& config : cases) {
    INFO(config.name);
    const auto plan = lower(config);
    INFO((plan ? "" : to_string(plan.error())));
    CHECK(plan.ok());
    if (!plan.ok()) continue;
    const TokenOrder order = plan->token_order;
    const auto [expected, fresh] = known.try_emplace(fmt::format("{} {}", static_cast<int>(order.kind), order.parts));
    if (fresh) expected->second = expect<float>(subject, order, true);
    const auto trained = train(config);
    const std::string difference = trained ? differences(config, expected->second, *trained) : to_string(trained.error());
    INFO(difference);
    CHECK(difference.empty());
  }
}

constexpr const char* kSubjects[] = {"gpt tied sgd", "llama adamw", "llama tied dropout clipped sgd"};

}  // namespace

TEST_CASE("packed documents, canonical: one rank trains to the bits of the reference, and not to those of whole sequences") {
  for (const char* name : kSubjects) {
    const Subject subject = subject_named(name);
    train_all(subject, {packed_case(subject, {}, true), packed_case(subject, {.accumulation = 2}, true),
                        packed_case(subject, {.recompute = Recompute::kFull}, true),
                        packed_case(subject, {.recompute = Recompute::kSelective}, true)});
    const auto trained = train(packed_case(subject, {}, true));
    REQUIRE(trained.ok());
    CHECK_FALSE(differences(packed_case(subject, {}, true), expect<float>(subject), *trained).empty());
  }
}

TEST_CASE("packed documents, canonical: data, tensor, sequence and pipeline parallelism train to the bits of one rank") {
  constexpr Sizes kSizes[] = {{.dp = 2, .accumulation = 2},
                              {.tp = 2},
                              {.tp = 2, .sequence_parallel = true},
                              {.dp = 2, .tp = 2, .zero = 2, .accumulation = 2, .sequence_parallel = true},
                              {.pp = 2, .accumulation = 4},
                              {.pp = 2, .accumulation = 4, .schedule = Schedule::kZbH1},
                              {.dp = 2, .tp = 2, .pp = 2, .zero = 3, .accumulation = 2, .recompute = Recompute::kFull},
                              {.dp = 4, .zero = 1}};
  for (const char* name : kSubjects) {
    Subject subject = subject_named(name);
    std::vector<Case> cases;
    for (const Sizes& sizes : kSizes) cases.push_back(packed_case(subject, sizes, true));
    train_all(subject, cases);
  }
}

TEST_CASE(
    "packed documents, canonical: every kind of context parallelism trains to the bits of one rank with the same order of tokens") {
  using enum ContextKind;
  std::vector<Sizes> sizes;
  for (const ContextKind kind : {kAllGather, kRing, kZigzag, kStriped, kUlysses}) {
    sizes.push_back({.kind = kind, .cp = 2, .accumulation = 2});
    sizes.push_back({.kind = kind, .cp = 4, .dp = 2});
    sizes.push_back({.kind = kind, .cp = 2, .dp = 2, .tp = 2, .zero = 2, .sequence_parallel = true, .recompute = Recompute::kFull});
  }
  for (const char* name : kSubjects) {
    Subject subject = subject_named(name);
    subject.sequences = 2;
    std::vector<Case> cases;
    for (const Sizes& s : sizes) cases.push_back(packed_case(subject, s, true));
    train_all(subject, cases);
    subject.train.seq_len = 16;
    train_all(subject, {packed_case(subject, {.kind = kUsp, .cp = 4, .accumulation = 2, .heads = 2}, true),
                        packed_case(subject, {.kind = kUsp, .cp = 4, .pp = 2, .accumulation = 2, .heads = 2}, true)});
  }
}

TEST_CASE("packed documents, fast and in 16 bits: no further from fp64 than 1.5 times one rank") {
  using enum ContextKind;
  const Subject subject = subject_named("llama sgd");
  const auto expected = expect<double>(subject, {}, true);
  for (const Precision precision : {Precision::kFp32, Precision::kBf16}) {
    const auto error = [&](const Sizes& sizes) {
      Case c = packed_case(subject, sizes, false);
      c.train.precision = precision;
      INFO(c.name);
      const auto trained = train(c);
      INFO((trained ? "" : to_string(trained.error())));
      REQUIRE(trained.ok());
      return error_of(expected, *trained);
    };
    const double bound = 1.5 * error({}) + 1e-6;
    CHECK(error({.tp = 2, .sequence_parallel = true}) <= bound);
    for (const ContextKind kind : {kAllGather, kRing, kZigzag, kStriped, kUlysses})
      CHECK(error({.kind = kind, .cp = 4, .accumulation = 2}) <= bound);
  }
}

namespace {

/// Two documents, of `first` tokens and the rest, as one packed sequence or as sequences of their own.
class TwoDocuments final : public BatchSource {
 public:
  TwoDocuments(int64_t first, int64_t both, int64_t vocab) : first_(first), both_(both), vocab_(vocab) {}
  /// The whole of a document; which, is told by its length, and where they are equally long by the number of the sequence.
  void sequence(int64_t number, std::span<int32_t> out) const override {
    const auto n = static_cast<int64_t>(out.size()) - 1;
    const bool second = first_ * 2 == both_ ? number % 2 == 1 : n != first_;
    for (int64_t i = 0; i <= n; ++i) out[static_cast<size_t>(i)] = token(second, i);
  }
  void packed(int64_t, const PackedSequence& out) const override {
    for (int64_t i = 0; i < both_; ++i) {
      const bool second = i >= first_;
      const int64_t at = second ? i - first_ : i;
      out.tokens[static_cast<size_t>(i)] = token(second, at);
      out.targets[static_cast<size_t>(i)] = token(second, at + 1);
      out.positions[static_cast<size_t>(i)] = static_cast<int32_t>(at);
    }
  }

 private:
  int32_t token(bool second, int64_t at) const {
    const uint64_t element = static_cast<uint64_t>(second ? 1000 + at : at);
    return static_cast<int32_t>(random_bits({5, RandomUse::kShuffle, 0, 0}, element) % static_cast<uint64_t>(vocab_));
  }
  int64_t first_, both_, vocab_;
};

/// Losses of one step, and how far each parameter moved.
struct Step1 {
  double loss = 0;
  std::map<std::string, std::vector<double>> moved;
};

Step1 step_of(Case c, const Subject& subject, const BatchSource& source) {
  const auto trained = train_case(c, source, 1);
  INFO((trained ? "" : to_string(trained.error())));
  REQUIRE(trained.ok());
  Step1 step{trained->losses.at(0), {}};
  const auto initial = expect<float>(subject).initial;
  for (const auto& [name, values] : trained->parameters)
    for (size_t i = 0; i < values.size(); ++i) step.moved[name].push_back(double{values[i]} - double{initial.at(name)[i]});
  return step;
}

}  // namespace

TEST_CASE("packed documents have the losses and gradients of sequences of their own") {
  for (const char* name : {"gpt tied sgd", "llama sgd"}) {
    Subject subject = subject_named(name);
    subject.sequences = 1;
    subject.train.dropout = 0;
    subject.train.clip_norm = 0;
    const int64_t s = subject.train.seq_len;
    for (const int64_t first : {s / 2, s / 4, s - 1}) {
      INFO(name << " " << first << " of " << s);
      const TwoDocuments source(first, s, subject.model.vocab);
      const Step1 both = step_of(packed_case(subject, {}, true), subject, source);
      const auto alone = [&](int64_t tokens) {
        Subject one = subject;
        one.train.seq_len = tokens;
        Case c = packed_case(one, {}, true);
        c.data.packed = false;
        return step_of(c, subject, source);
      };
      // A loss is a mean over tokens, so that documents count by their lengths.
      Step1 a, b;
      double of_a = static_cast<double>(first) / static_cast<double>(s), of_b = 1 - of_a;
      if (2 * first == s) {
        Subject two = subject;
        two.train.seq_len = first, two.sequences = 2;
        Case c = packed_case(two, {}, true);
        c.data.packed = false;
        a = step_of(c, subject, source), of_a = 1;
        b = a, of_b = 0;
      } else {
        a = alone(first), b = alone(s - first);
      }
      CHECK(std::abs(both.loss - (a.loss * of_a + b.loss * of_b)) <= 1e-6 * both.loss);
      double error = 0, size = 0;
      for (const auto& [parameter, moved] : both.moved)
        for (size_t i = 0; i < moved.size(); ++i) {
          const double want = a.moved.at(parameter)[i] * of_a + b.moved.at(parameter)[i] * of_b;
          error += (moved[i] - want) * (moved[i] - want);
          size += want * want;
        }
      CHECK(size > 0);
      CHECK(error <= 1e-10 * size);  // of squares: 1e-5
    }
  }
}

namespace {

/// The n-th op of that kind in the plan, changed; false where there is none.
template <class W, class Change>
bool change_op(Plan& plan, size_t n, const Change& change) {
  for (Segment& segment : plan.segments)
    for (Step& step : segment.steps)
      if (Op* op = std::get_if<Op>(&step); op != nullptr && std::holds_alternative<W>(op->work) && n-- == 0) {
        change(segment, *op, std::get<W>(op->work));
        return true;
      }
  return false;
}

}  // namespace

TEST_CASE("an op that goes on over the end of a document in a packed plan is refused") {
  // Megatron-LM#5243: rotary positions of packed sequences under context parallelism were those of the first sequence, while attention
  // stayed within each.
  for (const Sizes& sizes : {Sizes{}, {.tp = 2, .sequence_parallel = true}, {.kind = ContextKind::kZigzag, .cp = 2}})
    for (const char* name : {"gpt tied sgd", "llama sgd"}) {
      const auto lowered = lower(packed_case(subject_named(name), sizes, false));
      REQUIRE(lowered.ok());
      const auto refuses = [&](const Plan& plan, std::string_view what) {
        INFO(name << ": " << what);
        CHECK_FALSE(verify(plan).ok());
      };
      const auto unpack = [](Segment&, Op& op, auto& w) {
        w.packed = false;
        op.reads.erase(op.reads.begin() + static_cast<std::ptrdiff_t>(op.reads.size() - 1));
      };
      int changed = 0;
      for (size_t n = 0; n < 2; ++n) {
        Plan rotated = *lowered, learned = *lowered, attends = *lowered, block = *lowered;
        if (change_op<Rope>(rotated, n, unpack)) ++changed, refuses(rotated, "rotary positions of the whole sequence");
        if (change_op<Positions>(learned, n, unpack)) ++changed, refuses(learned, "learned positions of the whole sequence");
        if (change_op<Attention>(attends, n, unpack)) ++changed, refuses(attends, "attention to the whole sequence");
        if (change_op<AttentionBlock>(block, n, unpack)) ++changed, refuses(block, "attention of a block to the whole sequence");
      }
      CHECK(changed == 4);
      Plan shifted = *lowered, tokens = *lowered;
      REQUIRE(change_op<LoadBatch>(shifted, 0, [](Segment&, Op&, LoadBatch& w) { w.packed = false; }));
      refuses(shifted, "tokens of a batch without documents");
      bool loads_tokens = false;
      for (size_t n = 0; n < 4 && !loads_tokens; ++n)
        change_op<LoadBatch>(tokens, n, [&](Segment&, Op&, LoadBatch& w) {
          if (w.positions) loads_tokens = true, w.positions = false;
        });
      REQUIRE(loads_tokens);
      refuses(tokens, "tokens for positions");
    }
}

}  // namespace shardlab::testing::of_packed
