// Clipping and 16-bit training, a few layouts each: what the matrix tests over many, and what it cannot: layouts against one
// another where the reference rounds otherwise.
#include <bit>
#include <cmath>
#include <string>

#include "tests/namespaces.h"
#include "tests/numerics/matrix.h"
#include "tests/numerics/train_case.h"
#include "tests/test.h"

namespace shardlab::testing::of_precision {
namespace {

using testing::Subject;
using testing::Trained;

constexpr int kSteps = 3;

/// The first subject of this precision that is clipped or not, trained by SGD at lr 1.
Subject subject_of(Precision precision, bool clipped) {
  for (const Subject& s : testing::subjects())
    if (s.train.precision == precision && (s.train.clip_norm > 0) == clipped && s.sequences == 8) return s;
  FAIL("no such subject");
  return {};
}

struct Choice {
  int dp = 1, tp = 1, pp = 1, zero = 0;
  int64_t accumulation = 1;
  bool recompute = false;
};

Case case_of(const Subject& subject, const Choice& choice) {
  Case c;
  c.model = subject.model;
  c.train = subject.train;
  c.canonical = true;
  c.layout.dp = choice.dp;
  c.layout.tp = choice.tp;
  c.layout.pp = choice.pp;
  c.layout.schedule = choice.pp > 1 ? Schedule::k1F1B : Schedule::kNone;
  c.layout.zero = choice.zero;
  c.layout.recompute = choice.recompute ? Recompute::kFull : Recompute::kNone;
  c.train.grad_accumulation = choice.accumulation;
  c.train.micro_batch = subject.sequences / choice.dp / choice.accumulation;
  c.name = testing::layout_name(c);
  return c;
}

Trained train(const Case& c) {
  auto trained = testing::train_case(c, testing::RandomText(c.model.vocab), kSteps);
  INFO(c.name << (trained.ok() ? "" : "\n" + to_string(trained.error())));
  REQUIRE(trained.ok());
  return std::move(trained).value();
}

/// Where two runs first differ in a bit; empty when they are the same finite numbers.
std::string difference(const Trained& want, const Trained& have) {
  for (size_t i = 0; i < want.losses.size(); ++i)
    if (!std::isfinite(want.losses[i]) || std::bit_cast<uint32_t>(want.losses[i]) != std::bit_cast<uint32_t>(have.losses[i]))
      return "the loss of step " + std::to_string(i);
  for (const auto& [name, values] : want.parameters)
    for (size_t i = 0; i < values.size(); ++i)
      if (std::bit_cast<uint32_t>(values[i]) != std::bit_cast<uint32_t>(have.parameters.at(name)[i]))
        return name + "[" + std::to_string(i) + "]";
  return "";
}

/// Largest distance of a parameter.
double distance(const Trained& a, const Trained& b) {
  double most = 0;
  for (const auto& [name, values] : a.parameters)
    for (size_t i = 0; i < values.size(); ++i)
      most = std::max(most, std::abs(double{values[i]} - double{b.parameters.at(name)[i]}));
  return most;
}

TEST_CASE("clipping moves parameters to the same bits under every layout, and a bound that nothing meets changes none") {
  Subject subject = subject_of(Precision::kFp32, true);
  subject.train.dropout = 0;
  const Trained one = train(case_of(subject, {}));
  for (const Choice& choice : {Choice{.dp = 2}, Choice{.dp = 2, .tp = 2, .zero = 1}, Choice{.pp = 2, .accumulation = 2},
                               Choice{.dp = 2, .zero = 2, .accumulation = 2}, Choice{.dp = 4, .zero = 3, .recompute = true}}) {
    const Case c = case_of(subject, choice);
    INFO(c.name);
    CHECK(difference(one, train(c)) == "");
  }
  Case loose = case_of(subject, {.dp = 2, .zero = 1}), none = loose;
  loose.train.clip_norm = 1e6f;
  none.train.clip_norm = 0;
  const Trained unclipped = train(none);
  CHECK(difference(unclipped, train(loose)) == "");
  CHECK(distance(unclipped, one) > 0);
}

TEST_CASE("bf16 with fp32 gradients: data parallel, sharded, pipelined and recomputed, the bits of one rank") {
  for (const bool clipped : {true, false}) {
    const Subject subject = subject_of(Precision::kBf16, clipped);
    const Trained one = train(case_of(subject, {}));
    for (const Choice& choice :
         {Choice{.dp = 2}, Choice{.dp = 2, .zero = 1, .accumulation = 2}, Choice{.dp = 2, .zero = 2}, Choice{.dp = 4, .zero = 3},
          Choice{.pp = 2, .accumulation = 4, .recompute = true}, Choice{.dp = 2, .pp = 2, .zero = 1}}) {
      const Case c = case_of(subject, choice);
      INFO(c.name);
      CHECK(difference(one, train(c)) == "");
    }
  }
}

TEST_CASE("16 bits with head and loss in pieces that cut a sequence: the bits of the whole") {
  for (const Precision precision : {Precision::kBf16, Precision::kFp16}) {
    const Subject subject = subject_of(precision, true);
    const Trained whole = train(case_of(subject, {}));
    for (const Choice& choice : {Choice{}, Choice{.dp = 2, .accumulation = 2}}) {
      Case c = case_of(subject, choice);
      for (const int64_t pieces_of_a_sequence : {1, 2, 4}) {
        c.layout.loss_chunks = static_cast<int>(c.train.micro_batch * pieces_of_a_sequence);
        INFO(c.name << ", " << c.layout.loss_chunks << " pieces");
        CHECK(difference(whole, train(c)) == "");
      }
    }
  }
}

TEST_CASE("bf16 is near fp32, and not it") {
  for (const char* accumulate : {"fp32", "bf16"})
    for (const Choice& choice : {Choice{}, Choice{.dp = 2, .tp = 2, .zero = 1, .accumulation = 2}}) {
      Subject subject = subject_of(Precision::kBf16, true);
      subject.train.accumulate_dtype = accumulate;
      const Case narrow = case_of(subject, choice);
      subject.train.precision = Precision::kFp32;
      subject.train.accumulate_dtype = "";
      const Case wide = case_of(subject, choice);
      const Trained a = train(narrow), b = train(wide);
      INFO(narrow.name << " gradients " << accumulate);
      for (size_t i = 0; i < a.losses.size(); ++i) CHECK(std::abs(a.losses[i] - b.losses[i]) < 0.02f * b.losses[i]);
      CHECK(difference(b, a) != "");
    }
}

/// The subject of 8-bit factors that are scaled so.
Subject fp8_subject(Fp8Scaling scaling) {
  for (const Subject& s : testing::subjects())
    if (s.train.precision == Precision::kFp8 && s.train.fp8_scaling == scaling) return s;
  FAIL("no such subject");
  return {};
}

TEST_CASE("fp8: data parallel, sharded, pipelined, accumulated, recomputed, the bits of one rank") {
  for (const Fp8Scaling scaling : {Fp8Scaling::kCurrent, Fp8Scaling::kDelayed, Fp8Scaling::kBlock}) {
    const Subject subject = fp8_subject(scaling);
    for (const int64_t micro_batches : {1, 4}) {
      // A current scale is of a micro-batch: the same micro-batches have the same. Others do not depend on how the batch is cut.
      const bool cut_alike = scaling == Fp8Scaling::kCurrent;
      const Trained one = train(case_of(subject, {.accumulation = micro_batches}));
      for (const Choice& choice :
           {Choice{.dp = 4}, Choice{.dp = 2, .accumulation = 2}, Choice{.dp = 2, .zero = 1, .accumulation = 2},
            Choice{.dp = 4, .zero = 2}, Choice{.dp = 2, .zero = 3, .accumulation = 2},
            Choice{.pp = 2, .accumulation = 4, .recompute = true}, Choice{.dp = 2, .pp = 2, .zero = 1, .accumulation = 2},
            Choice{.recompute = true}}) {
        if (cut_alike && choice.dp * choice.accumulation != micro_batches) continue;
        const Case c = case_of(subject, choice);
        INFO(name_of(scaling) << " " << c.name);
        CHECK(difference(one, train(c)) == "");
      }
    }
  }
}

TEST_CASE("fp8: sub-layers made again are rounded as they were, whatever the scales") {
  for (const Fp8Scaling scaling : {Fp8Scaling::kCurrent, Fp8Scaling::kDelayed, Fp8Scaling::kBlock}) {
    const Subject subject = fp8_subject(scaling);
    Case c = case_of(subject, {.accumulation = 2});
    const Trained one = train(c);
    c.layout.recompute = Recompute::kSelective;
    for (const char* modules : {"", "attn.norm mlp.act", "attn.norm attn.core mlp.norm mlp.act"}) {
      c.layout.recompute_options.modules = modules;
      INFO(name_of(scaling) << " " << modules);
      CHECK(difference(one, train(c)) == "");
    }
  }
}

TEST_CASE("fp8 with state parked elsewhere and guards that find nothing: the same bits; with compressed gradients: near") {
  for (const Fp8Scaling scaling : {Fp8Scaling::kCurrent, Fp8Scaling::kDelayed, Fp8Scaling::kBlock}) {
    const Subject subject = fp8_subject(scaling);
    const Case plain = case_of(subject, {.dp = 2, .zero = 1, .accumulation = 2});
    const Trained one = train(plain);
    Case c = plain;
    INFO(name_of(scaling));
    c.layout.offload.activations = OffloadTo::kCpu;
    CHECK(difference(one, train(c)) == "");
    c = plain;
    c.train.guard = {.nonfinite = GuardAction::kSkip, .spike = GuardAction::kSkip, .loss_factor = 100, .norm_factor = 1000};
    CHECK(difference(one, train(c)) == "");
    if (c.train.clip_norm == 0) {
      c = plain;
      c.train.guard = {};
      c.layout.offload.optimizer = OffloadTo::kCpu;
      CHECK(difference(one, train(c)) == "");
    }
    c = plain;
    c.train.guard = {};
    c.layout.zero = 0;
    c.canonical = false;
    for (const CompressionKind kind : {CompressionKind::kInt8, CompressionKind::kTopK, CompressionKind::kPowerSgd}) {
      c.layout.compression.kind = kind;
      const Trained compressed = train(c);
      for (size_t i = 0; i < one.losses.size(); ++i) CHECK(std::abs(compressed.losses[i] - one.losses[i]) < 0.2f * one.losses[i]);
    }
  }
}

TEST_CASE("fp8 is near bf16, and not it") {
  for (const Fp8Scaling scaling : {Fp8Scaling::kCurrent, Fp8Scaling::kDelayed, Fp8Scaling::kBlock})
    for (const Choice& choice : {Choice{}, Choice{.dp = 2, .tp = 2, .zero = 1, .accumulation = 2}}) {
      if (choice.tp > 1 && scaling == Fp8Scaling::kBlock) continue;
      Subject subject = fp8_subject(scaling);
      const Case narrow = case_of(subject, choice);
      subject.train.precision = Precision::kBf16;
      subject.train.fp8_scaling = Train{}.fp8_scaling;
      const Case wide = case_of(subject, choice);
      const Trained a = train(narrow), b = train(wide);
      INFO(name_of(scaling) << " " << narrow.name);
      for (size_t i = 0; i < a.losses.size(); ++i) CHECK(std::abs(a.losses[i] - b.losses[i]) < 0.05f * b.losses[i]);
      CHECK(difference(b, a) != "");
    }
}

}  // namespace
}  // namespace shardlab::testing::of_precision
