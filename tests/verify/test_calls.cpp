// The exhaustive run over the golden plans: whatever one call is dropped, doubled or exchanged, `verify` refuses the plan, or the
// plan does what it did, or it stands in accepted-calls.txt with its reason.
#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>
#include <thread>

#include "plan/named_kernels.h"
#include "plan/text.h"
#include "plan/verify.h"
#include "tests/deal.h"
#include "tests/golden_plans.h"
#include "tests/namespaces.h"
#include "tests/test.h"
#include "tests/verify/call_mutations.h"
#include "tests/verify/good_plans.h"

namespace shardlab::testing {
namespace {

std::string text_of(const std::filesystem::path& path) {
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

std::vector<Plan> golden_plans() {
  std::vector<Plan> plans;
  for (const std::string& name : golden_plan_names()) {
    plans.push_back(parse_or_fail(golden_plan(name)));
    plans.back().name = name;
  }
  return plans;
}

/// The listed mutants, each with its reason, which stands on the lines before it that begin with `#`.
std::map<std::string, std::string> accepted_calls() {
  std::map<std::string, std::string> listed;
  std::istringstream lines(text_of(source_dir() + "/tests/verify/accepted-calls.txt"));
  std::string reason;
  bool told = false;
  for (std::string line; std::getline(lines, line);) {
    if (line.empty()) continue;
    if (line.starts_with("# ")) {
      reason = told ? reason + line.substr(1) : line.substr(2);
      told = true;
      continue;
    }
    told = false;
    listed[line] = reason;
  }
  return listed;
}

}  // namespace

TEST_CASE("calls: the effect of a program is what it leaves and sends, whatever the order of what does not meet") {
  const Plan plan = parse_or_fail(training_text());
  const uint64_t effect = effect_of(plan, 0);
  const auto& items = plan.roles[0].program;
  std::vector<size_t> calls;
  for (size_t i = 0; i < items.size(); ++i)
    if (std::holds_alternative<Call>(items[i])) calls.push_back(i);
  for (const size_t i : calls) {
    Plan without = plan;
    without.roles[0].program.erase(without.roles[0].program.begin() + static_cast<std::ptrdiff_t>(i));
    CHECK(effect_of(without, 0) != effect);
  }
  Plan exchanged = plan;  // the updates of two parameters
  std::swap(exchanged.roles[0].program[calls[calls.size() - 1]], exchanged.roles[0].program[calls[calls.size() - 2]]);
  CHECK(effect_of(exchanged, 0) == effect);
}

TEST_CASE("calls: dropped, doubled or exchanged in the golden plans, each is refused, equivalent, or listed with its reason") {
  const std::vector<Plan> plans = golden_plans();
  REQUIRE(plans.size() >= 46);
  const auto listed = accepted_calls();
  std::unordered_set<std::string> names;
  for (const auto& [name, reason] : listed) names.insert(name);
  const CallDeal deal{.one_of = dealt(1, 24), .always = names};
  std::vector<CallScore> scores(plans.size());
  constexpr size_t kThreads = 2;
  std::vector<std::thread> threads;
  for (size_t t = 0; t < kThreads; ++t)
    threads.emplace_back([&, t] {
      for (size_t i = t; i < plans.size(); i += kThreads) scores[i] = mutate_calls(plans[i], deal);
    });
  for (std::thread& thread : threads) thread.join();

  CallScore all;
  std::vector<std::string> survivors;
  for (const CallScore& score : scores) {
    all.dropped.add(score.dropped);
    all.doubled.add(score.doubled);
    all.exchanged.add(score.exchanged);
    survivors.insert(survivors.end(), score.survivors.begin(), score.survivors.end());
  }
  for (const auto& [name, tally] : {std::pair{"dropped", all.dropped}, {"doubled", all.doubled}, {"exchanged", all.exchanged}})
    fmt::print("{:<10} {:>6} mutants, {:>6} refused, {:>6} equivalent\n", name, tally.mutants, tally.refused, tally.equivalent);
  fmt::print("listed     {:>6}\n", listed.size());
  std::vector<std::string> unlisted, refused;
  for (const std::string& s : survivors)
    if (!listed.contains(s)) unlisted.push_back(s);
  for (const auto& [line, reason] : listed) {
    CHECK(!reason.empty());
    if (std::ranges::find(survivors, line) == survivors.end()) refused.push_back(line);
  }
  INFO("accepted by `verify`, with another effect, and not in tests/verify/accepted-calls.txt:\n"
       << fmt::format("{}", fmt::join(unlisted, "\n")));
  CHECK(unlisted.empty());
  INFO("listed in tests/verify/accepted-calls.txt, and refused or equivalent:\n" << fmt::format("{}", fmt::join(refused, "\n")));
  CHECK(refused.empty());
}

namespace {

/// Ops whose result `verify` believes, by the kernel's name and the strategy that put it there.
std::map<std::string, int> opaque_ops(const Plan& plan) {
  std::map<std::string, int> ops;
  for (const Segment& segment : plan.segments)
    for (const Step& step : segment.steps) {
      const Op* op = std::get_if<Op>(&step);
      const auto* kernel = op != nullptr ? std::get_if<Kernel>(&op->work) : nullptr;
      const bool believed = kernel != nullptr && is_believed(*kernel);
      if (!believed) continue;
      INFO(plan.name << ": " << op->label << " of " << op->strategy);
      CHECK(kernel->phase == Phase::kNone);  // the model's mathematics: each op has an equation
      ++ops[kernel->name];
    }
  return ops;
}

}  // namespace

TEST_CASE("opaque ops: none is of a model's mathematics, and their number in each lowered plan only falls") {
  std::map<std::string, int> allowed;
  std::istringstream lines(text_of(source_dir() + "/tests/golden/plan/opaque-ops.txt"));
  for (std::string plan, line; std::getline(lines, line);) {
    int ops = 0;
    if (std::istringstream(line) >> plan >> ops) allowed[plan] = ops;
  }
  std::string text;
  int total = 0;
  for (const Plan& plan : golden_plans()) {
    int ops = 0;
    std::string names;
    for (const auto& [name, n] : opaque_ops(plan)) {
      ops += n;
      names += fmt::format(" {}x{}", n, name);
    }
    total += ops;
    if (ops > 0) text += fmt::format("{} {}{}\n", plan.name, ops, names);
    INFO(plan.name << " has opaque ops that it had not:" << names << ". Give the kernel an equation in plan/verify_types.cpp");
    if (allowed.contains(plan.name)) CHECK(ops <= allowed.at(plan.name));
  }
  fmt::print("opaque ops in golden plans: {}\n", total);
  REQUIRE_GOLDEN("plan/opaque-ops.txt", text);
}

}  // namespace shardlab::testing
