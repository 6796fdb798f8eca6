// Pipelines train to the reference's bits: every schedule, stages 2 to 4, micro-batches fewer than stages and no multiple of them, alone
// and with what changes events, buffers and sums. Losses and parameters after 5 steps, SGD at learning rate 1 and AdamW.
#include <fmt/format.h>

#include <map>
#include <string>

#include "plan/base/hash.h"
#include "plan/pipeline_case.h"
#include "tests/deal.h"
#include "tests/namespaces.h"
#include "tests/numerics/against_reference.h"
#include "tests/schedules.h"
#include "tests/test.h"

namespace shardlab::testing::of_pipelines {
namespace {

/// Every named schedule, and a table.
std::vector<Schedule> piped() {
  std::vector<Schedule> all = pipeline_schedules();
  all.push_back(Schedule::kTable);
  return all;
}

/// Nine layers, which no number of parts here divides evenly.
std::vector<Subject> deep_subjects() {
  std::vector<Subject> list;
  for (Subject& s : subjects()) {
    if (s.train.precision != Precision::kFp32 || s.sequences != 8 ||
        !(s.name.starts_with("gpt tied ") || s.name.starts_with("llama tied")))
      continue;
    s.model.layers = 9;
    s.model.init_deviation = 0.08f;
    list.push_back(std::move(s));
  }
  return list;
}

/// What goes with a pipeline in a row.
struct Also {
  const char* name;
  void (*set)(Case&);
};
constexpr Also kAlso[] = {
    {"", [](Case&) {}},
    {"recompute", [](Case& c) { c.layout.recompute = Recompute::kFull; }},
    {"selective", [](Case& c) { c.layout.recompute = Recompute::kSelective; }},
    {"zero 1", [](Case& c) { c.layout.dp = 2, c.layout.zero = 1; }},
    {"zero 2", [](Case& c) { c.layout.dp = 2, c.layout.zero = 2; }},
    {"zero 3", [](Case& c) { c.layout.dp = 2, c.layout.zero = 3; }},
    {"zero 3, overlap, kept",
     [](Case& c) {
       c.layout.dp = 2, c.layout.zero = 3, c.layout.overlap = true, c.layout.fsdp = {2, 2, false};
     }},
    {"overlap", [](Case& c) { c.layout.dp = 2, c.layout.overlap = true, c.layout.bucket_bytes = 20000; }},
    {"offload activations", [](Case& c) { c.layout.offload.activations = OffloadTo::kCpu, c.layout.overlap = true; }},
    {"offload optimizer", [](Case& c) { c.layout.offload.optimizer = OffloadTo::kCpu; }},
    {"tp", [](Case& c) { c.layout.tp = 2; }},
};

/// A table of no known order: parts dealt out in a V and then in turn, micro-batches from the last to the first.
std::string strange_table(int stages, int micro_batches) {
  PipelineSchedule s;
  s.placement = PartPlacement::kListed;
  s.stages = stages;
  s.parts = 2 * stages - 1;
  s.micro_batches = micro_batches;
  for (int part = 0; part < s.parts; ++part) s.listed.push_back(part < stages ? stages - 1 - part : part - stages);
  s.order.resize(static_cast<size_t>(stages));
  for (int j = micro_batches - 1; j >= 0; --j)
    for (int part = 0; part < s.parts; ++part)
      s.order[static_cast<size_t>(s.listed[static_cast<size_t>(part)])].push_back({SlotWork::kF, part, j});
  for (int j = micro_batches - 1; j >= 0; --j)
    for (int part = s.parts - 1; part >= 0; --part) {
      auto& order = s.order[static_cast<size_t>(s.listed[static_cast<size_t>(part)])];
      if (part % 2 == 0)
        order.push_back({SlotWork::kB, part, j});
      else
        order.push_back({SlotWork::kI, part, j}), order.push_back({SlotWork::kW, part, j});
    }
  return to_csv(s);
}

TEST_CASE("every pipeline schedule trains to the reference's bits") {
  const uint64_t ordinary = dealt(12, 80), mirrored = dealt(2, 16);  // parts of the product for each subject
  const std::vector<Schedule> schedules = piped();
  std::map<std::string, int> by_schedule, by_also;
  int failed = 0, refused = 0;
  for (const Subject& subject : deep_subjects()) {
    std::vector<Case> layouts;
    for (const Schedule schedule : schedules)
      for (const int stages : {2, 3, 4})
        for (const int m : {1, 2, 4, 8})
          for (const int v : {2, 3})
            for (const Also& also : kAlso) {
              if (v > 2 && (!is_looped(schedule) || stages > 3)) continue;
              Case c;
              c.canonical = true;
              c.layout.overlap = false;
              c.layout.pp = stages;
              c.layout.schedule = schedule;
              c.layout.vpp = is_looped(schedule) ? v : 1;
              if (schedule == Schedule::kTable) c.layout.schedule_table = strange_table(stages, m);
              c.train.grad_accumulation = m;
              also.set(c);
              const std::string name = fmt::format("{} pp{} v{} m{} {}", name_of(schedule), stages, c.layout.vpp, m, also.name);
              const uint64_t shares = is_mirrored(schedule) ? mirrored : ordinary;  // its stages and micro-batches are fewer
              if (c.layout.world_size() > 8 || mix(hash_text(subject.name + name)) % shares != 0) continue;
              const auto rows = rows_of(subject, std::span(&c, 1));
              if (rows.empty()) {
                ++refused;
                continue;
              }
              Case& row = layouts.emplace_back(rows.front());
              row.name = name;
              ++by_schedule[std::string(name_of(schedule))];
              ++by_also[also.name];
            }
    const auto expected = expect<float>(subject);
    for (const Case& config : layouts) {
      const auto trained = train_case(config, RandomText(config.model.vocab), kSteps);
      const std::string difference = trained ? differences(config, expected, *trained) : to_string(trained.error());
      INFO(subject.name << ": " << config.name << "\n" << difference);
      failed += !difference.empty();
      if (failed < 10) CHECK(difference.empty());
    }
  }
  int rows = 0;
  for (const auto& [name, count] : by_schedule) rows += count;
  fmt::print("Pipelines bitwise equal to the single-rank reference after 5 steps: {} rows, {} refused by check\n", rows, refused);
  for (const auto& [name, count] : by_schedule) fmt::print("  {:<16}{:>5}\n", name, count);
  for (const auto& [name, count] : by_also) fmt::print("  with {:<24}{:>5}\n", name.empty() ? "nothing else" : name, count);
  REQUIRE(failed == 0);
  REQUIRE(by_schedule.size() == schedules.size());
  REQUIRE(by_also.size() == std::size(kAlso));
}

}  // namespace
}  // namespace shardlab::testing::of_pipelines
