// Post-validation trains to the bits of the run in which all stages meet before each update: where no period is taken back, where all
// are, and where some are.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "plan/base/hash.h"
#include "tests/deal.h"
#include "tests/namespaces.h"
#include "tests/numerics/matrix.h"
#include "tests/numerics/train_case.h"
#include "tests/test.h"

namespace shardlab::testing::of_post_validation {
namespace {

constexpr int kPeriod = 2, kSteps = 6;
constexpr float kNeverClips = 1e6f, kAlwaysClips = 1e-3f;

Case piped(std::string_view subject, Schedule schedule, int stages, int64_t micro_batches, float clip_norm) {
  Subject s = subject_named(subject);
  s.model.layers = 9;  // which no number of parts here divides evenly
  s.train.clip_norm = clip_norm;
  Case c;
  c.model = s.model;
  c.train = s.train;
  c.canonical = true;
  c.layout.pp = stages;
  c.layout.schedule = schedule;
  c.layout.vpp = is_looped(schedule) ? 2 : 1;
  c.train.grad_accumulation = micro_batches;
  c.train.micro_batch = s.sequences / micro_batches;
  c.train.global_batch_tokens = s.sequences * s.train.seq_len;
  c.train.post_validation = kPeriod;
  return c;
}

Case in_step(Case c) {
  c.train.post_validation = 0;
  return c;
}

Trained train(const Case& c) {
  auto trained = train_case(c, RandomText(c.model.vocab), kSteps);
  INFO((trained ? std::string() : to_string(trained.error())));
  REQUIRE(trained.ok());
  return std::move(*trained);
}

bool equal_bits(const Trained& a, const Trained& b) {
  return a.losses == b.losses && a.parameters == b.parameters && a.validation_loss == b.validation_loss;
}

/// What goes with a pipeline in a row.
struct Also {
  const char* name;
  void (*set)(Case&);
};
void halve(Case& c) {
  c.layout.dp = 2;
  if (c.train.micro_batch > 1)
    c.train.micro_batch /= 2;
  else
    c.train.grad_accumulation /= 2;
}
constexpr Also kAlso[] = {
    {"nothing", [](Case&) {}},
    {"dp 2, buckets", [](Case& c) { halve(c), c.layout.bucket_bytes = 20000; }},
    {"zero 1", [](Case& c) { halve(c), c.layout.zero = 1; }},
    {"zero 2", [](Case& c) { halve(c), c.layout.zero = 2; }},
    {"zero 3", [](Case& c) { halve(c), c.layout.zero = 3; }},
    {"zero 3, kept",
     [](Case& c) {
       halve(c), c.layout.zero = 3, c.layout.fsdp = {2, 2, false};
     }},
    {"tp 2", [](Case& c) { c.layout.tp = 2; }},
    {"recompute", [](Case& c) { c.layout.recompute = Recompute::kFull; }},
    {"offload activations", [](Case& c) { c.layout.offload.activations = OffloadTo::kCpu; }},
    {"guard", [](Case& c) { c.train.guard.nonfinite = GuardAction::kSkip; }},
    {"guard alone", [](Case& c) { c.train.clip_norm = 0, c.train.guard.nonfinite = GuardAction::kSkip; }},
    {"norm", [](Case& c) { c.train.grad_norm = true; }},
    {"bf16", [](Case& c) { c.train.precision = Precision::kBf16; }},
};

}  // namespace

TEST_CASE("steps that nobody takes back have the bits of steps in which all stages meet") {
  int rows = 0;
  for (const char* subject : {"gpt tied sgd", "llama adamw"})
    for (const Schedule schedule : {Schedule::k1F1B, Schedule::kZbH2, Schedule::kZbV, Schedule::kInterleaved, Schedule::kDualPipe})
      for (const int stages : {2, 3, 4})
        for (const Also& also : kAlso) {
          const std::string name = fmt::format("{}, {} pp {} with {}", subject, name_of(schedule), stages, also.name);
          if (mix(hash_text(name)) % dealt(1, 32) != 0) continue;
          Case c = piped(subject, schedule, stages, 4, kNeverClips);
          also.set(c);
          const auto checked = check(c);
          if (schedule == Schedule::kDualPipe && !checked.ok()) continue;  // of three stages
          INFO(name << (checked.ok() ? "" : "\n" + to_string(checked.error())));
          REQUIRE(checked.ok());
          const Trained later = train(c), meeting = train(in_step(c));
          CHECK(std::ranges::none_of(later.rolled_back, [](bool b) { return b; }));
          CHECK(later.rolled_back.size() == kSteps / kPeriod);
          CHECK(equal_bits(later, meeting));
          ++rows;
        }
  fmt::print("{} runs without a roll-back have the bits of their synchronous runs\n", rows);
}

TEST_CASE("where every step is clipped every period is taken back, and the bits are those of the clipped run") {
  for (const char* subject : {"gpt tied sgd", "llama adamw"})
    for (const Schedule schedule : {Schedule::k1F1B, Schedule::kZbH2, Schedule::kZbV})
      for (const Also& also : kAlso) {
        Case c = piped(subject, schedule, 2, 4, kAlwaysClips);
        also.set(c);
        const std::string name = fmt::format("{}, {} with {}", subject, name_of(schedule), also.name);
        if (c.train.clip_norm == 0 || mix(hash_text(name)) % dealt(1, 18) != 0) continue;
        INFO(name);
        const Trained later = train(c), meeting = train(in_step(c));
        CHECK(std::ranges::all_of(later.rolled_back, [](bool b) { return b; }));
        CHECK(equal_bits(later, meeting));
        Case unclipped = in_step(c);
        unclipped.train.clip_norm = 0;
        CHECK_FALSE(equal_bits(meeting, train(unclipped)));
      }
}

TEST_CASE("some periods are taken back and others are not: the bits are those of the clipped run") {
  for (const Schedule schedule : {Schedule::k1F1B, Schedule::kZbH2, Schedule::kZbV}) {
    Case c = piped("llama adamw", schedule, 2, 4, kNeverClips);
    Case observed = in_step(c);
    observed.train.grad_norm = true;
    std::vector<double> norms;
    for (const double squared : train(observed).squared_norms) norms.push_back(std::sqrt(squared));
    REQUIRE(norms.size() == kSteps);
    std::ranges::sort(norms);
    int mixed = 0;
    for (size_t i = 0; i + 1 < norms.size(); ++i) {
      c.train.clip_norm = static_cast<float>((norms[i] + norms[i + 1]) / 2);
      INFO(name_of(schedule) << " clip_norm " << c.train.clip_norm);
      const Trained later = train(c);
      const auto taken_back = std::ranges::count(later.rolled_back, true);
      mixed += taken_back > 0 && taken_back < std::ssize(later.rolled_back) ? 1 : 0;
      CHECK(equal_bits(later, train(in_step(c))));
    }
    CHECK(mixed > 0);
  }
}

}  // namespace shardlab::testing::of_post_validation
