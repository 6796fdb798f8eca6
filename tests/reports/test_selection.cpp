// Of more cases than a person looks at, the fastest, the smallest and the named stay, as if all had been kept and sorted.
#include "reports/selection.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <random>

#include "tests/namespaces.h"
#include "tests/test.h"

namespace shardlab::testing {
namespace {

CaseOutcome outcome_of(int number, double step_s, int64_t peak, Status status) {
  CaseOutcome o;
  o.case_id = std::to_string(number);
  o.config.name = "case " + o.case_id;
  o.config.train.global_batch_tokens = 1000;
  o.status = status;
  if (status == Status::kRefused) return o;
  o.predicted.emplace();
  o.predicted->step_s = step_s, o.predicted->peak_bytes = peak;
  return o;
}

TEST_CASE("a selection of many cases is that of sorting them all") {
  std::mt19937 random(3);
  for (int round = 0; round < 20; ++round) {
    constexpr size_t kMost = 20;
    std::vector<CaseOutcome> all;
    for (int i = 0; i < 1500; ++i) {
      const Status status = random() % 3 == 0 ? Status::kRefused : Status::kOk;
      all.push_back(
          outcome_of(i, 1 + static_cast<double>(random() % 500), 1000 + static_cast<int64_t>(random() % 100'000), status));
    }
    Selector selector(kMost, {"case 700"});
    for (const CaseOutcome& o : all) selector.add(o);
    const Selection found = selector.take();
    CHECK(found.total == 1500);

    std::vector<const CaseOutcome*> ok;
    for (const CaseOutcome& o : all)
      if (o.status == Status::kOk) ok.push_back(&o);
    const auto* smallest = *std::ranges::min_element(ok, {}, [](const CaseOutcome* o) { return o->predicted->peak_bytes; });
    std::ranges::stable_sort(ok, {}, [](const CaseOutcome* o) { return o->predicted->step_s; });
    const auto kept = [&](const std::string& id) {
      return std::ranges::any_of(found.cases, [&](const CaseOutcome& o) { return o.case_id == id; });
    };
    CHECK(kept(smallest->case_id));
    CHECK(kept("700"));
    for (size_t i = 0; i < kMost; ++i) CHECK(kept(ok[i]->case_id));
    CHECK(found.cases.size() <= kMost + 2);
    int64_t left_out = 0;
    for (const int64_t n : found.left_out) left_out += n;
    CHECK(left_out + static_cast<int64_t>(found.cases.size()) == found.total);
    CHECK(std::ranges::is_sorted(found.cases, {}, [](const CaseOutcome& o) { return std::stoi(o.case_id); }));
  }
}

TEST_CASE("a selection of many cases has the fastest and the smallest of each model") {
  std::mt19937 random(5);
  constexpr size_t kMost = 20;
  Selector selector(kMost);
  std::map<std::string, std::pair<std::pair<double, int>, std::pair<int64_t, int>>> best;  // the least step and peak of each model
  for (int i = 0; i < 3000; ++i) {
    const int model = i % 7;
    CaseOutcome o = outcome_of(i, (1 + static_cast<double>(random() % 100'000)) * (1 + 1000 * model),
                               (1 + static_cast<int64_t>(random() % 100'000)) * (1 + 1000 * model), Status::kOk);
    o.config.model.name = "model " + std::to_string(model);
    auto [found, fresh] = best.try_emplace(o.config.model.name, std::pair{HUGE_VAL, 0}, std::pair{INT64_MAX, 0});
    found->second.first = std::min(found->second.first, {o.predicted->step_s, i});
    found->second.second = std::min(found->second.second, {o.predicted->peak_bytes, i});
    selector.add(o);
  }
  const Selection found = selector.take();
  CHECK(found.cases.size() <= kMost + best.size());
  for (const auto& [model, of] : best)
    for (const int wanted : {of.first.second, of.second.second}) {
      INFO(model << ", case " << wanted);
      CHECK(std::ranges::count(found.cases, std::to_string(wanted), &CaseOutcome::case_id) == 1);
    }
}

}  // namespace
}  // namespace shardlab::testing
