// what-if CASE: the step again, with ops that are free, hidden or faster: what an optimisation gives before anybody builds it.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>

#include "cases/pipeline.h"
#include "cli/common.h"
#include "cli/namespaces.h"
#include "cli/one_point.h"
#include "cli/verbs.h"
#include "plan/base/nearest.h"
#include "plan/base/values.h"
#include "plan/runnable.h"
#include "plan/stage_memory.h"
#include "plan/trace.h"
#include "reports/format.h"
#include "simulator/interpreter/repriced.h"
#include "simulator/interpreter/segments/segments.h"
#include "simulator/interpreter/timeline.h"

namespace shardlab::cli {
namespace {

struct WhatIfFlags {
  PointWords point;
  std::vector<std::string> free, hide, speed_up;
  std::string format;
  bool all = false;
};

struct PriceQuestion {
  std::string text;  ///< as the table has it
  std::string sort;  ///< what sort of word it is; empty where several are asked about
  std::vector<PriceChange> changes;
  double at_least_s = 0;  ///< of the step: ops that hide still occupy their stream
};

struct StepAnswer {
  double step_s = 0, compute_s = 0, exposed_comm_s = 0, exposed_copy_s = 0;
};

/// A plan that is priced again and again.
class PricedStep {
 public:
  PricedStep(const Case& config, const PlacedRun& placed, const PlacedCostModel& costs)
      : config_(config), placed_(placed), costs_(costs) {
    if (!config.machine.local) timeline_.emplace(*placed.plan, placed.programs, compute_on(config.machine));
  }

  StepAnswer at(const PriceQuestion& question) {
    const RepricedCostModel costs(costs_, *placed_.plan, question.changes);
    StepAnswer a;
    Breakdown parts;
    if (timeline_) {
      const SegmentStep step = timeline_->step(config_.machine, costs);
      a.step_s = step.seconds, parts = step.breakdown;
    } else {  // ranks share cores, which segments do not know
      const Trace trace = simulate(*placed_.plan, placed_.programs, config_.machine, costs);
      a.step_s = step_seconds(trace), parts = analyse(*placed_.plan, placed_.programs, trace, longest_rank(trace), 0);
    }
    const double period = placed_.plan->period;
    a.step_s = std::max(a.step_s, question.at_least_s) / period;
    a.compute_s = parts.compute_s / period;
    a.exposed_comm_s = parts.exposed_comm_s / period;
    a.exposed_copy_s = parts.exposed_copy_s / period;
    return a;
  }

  double occupied(std::string_view word) const { return occupied_by(*placed_.plan, placed_.programs, costs_, word); }
  const Plan& plan() const { return *placed_.plan; }

 private:
  const Case& config_;
  const PlacedRun& placed_;
  const PlacedCostModel& costs_;
  std::optional<SegmentTimeline> timeline_;
};

Error unknown_word(const std::string& word, const std::vector<PriceWord>& known) {
  std::vector<std::string> all;
  std::string listed;
  for (const PriceWord& w : known) {
    all.push_back(w.word);
    if (w.sort != PriceWord::Sort::kLabel && w.word.find('.') == std::string::npos) listed += (listed.empty() ? "" : ", ") + w.word;
  }
  const std::string close = nearest(word, all);
  return Error{
      ExitCode::kUsage,
      fmt::format("no op of this step is called `{}`{}", word,
                  close.empty() ? std::string() : fmt::format("; did you mean `{}`?", close)),
      fmt::format("take a class, a kind or a strategy ({}), or the label of an op as `shardlab plan CASE` prints it", listed),
      {}};
}

Result<void> check_word(const std::string& word, const std::vector<PriceWord>& known) {
  if (std::ranges::find(known, word, &PriceWord::word) == known.end()) return unknown_word(word, known);
  return {};
}

/// "linear=2": twice as fast.
Result<PriceChange> parse_speed_up(const std::string& text) {
  const size_t at = text.rfind('=');
  const auto times = at == std::string::npos ? std::nullopt : parse_number(text.substr(at + 1));
  if (!times || !(*times > 0) || at == 0)
    return Error{ExitCode::kUsage,
                 fmt::format("--speed-up {} does not say what by which factor above 0", text),
                 "WHAT=TIMES, as linear=2 for twice as fast and all_reduce=0.5 for half as fast",
                 {}};
  return PriceChange{text.substr(0, at), 1 / *times};
}

/// The changes that were asked for, each alone and, where there are several, all together.
Result<std::vector<PriceQuestion>> asked(const WhatIfFlags& flags, const PricedStep& step) {
  const std::vector<PriceWord> known = words_of_prices(step.plan());
  const auto sort_of = [&](const std::string& word) {
    const auto found = std::ranges::find(known, word, &PriceWord::word);
    return found == known.end() ? std::string() : std::string(name_of(found->sort));
  };
  std::vector<PriceQuestion> questions;
  for (const std::string& word : flags.free) {
    SHARDLAB_TRY(check_word(word, known));
    questions.push_back({fmt::format("{} free", word), sort_of(word), {{word, 0}}, 0});
  }
  for (const std::string& word : flags.hide) {
    SHARDLAB_TRY(check_word(word, known));
    if (word == "launch" || word == "compute")
      return Error{ExitCode::kUsage,
                   fmt::format("--hide {}: there is nothing to hide it behind", word),
                   fmt::format("--free {0}, or --speed-up {0}=2", word),
                   {}};
    questions.push_back({fmt::format("{} hidden", word), sort_of(word), {{word, 0}}, step.occupied(word)});
  }
  for (const std::string& text : flags.speed_up) {
    const auto change = parse_speed_up(text);
    if (!change.ok()) return change.error();
    SHARDLAB_TRY(check_word(change->what, known));
    questions.push_back(
        {fmt::format("{} {}x as fast", change->what, text.substr(text.rfind('=') + 1)), sort_of(change->what), {*change}, 0});
  }
  if (questions.size() < 2) return questions;
  PriceQuestion together{"all of these", "", {}, 0};
  for (const PriceQuestion& q : questions) {
    together.changes.insert(together.changes.end(), q.changes.begin(), q.changes.end());
    together.at_least_s = std::max(together.at_least_s, q.at_least_s);
  }
  questions.push_back(std::move(together));
  return questions;
}

/// Every class, kind and strategy of the step, free: no optimisation of it gives more.
std::vector<PriceQuestion> all_free(const Plan& plan, bool labels) {
  std::vector<PriceQuestion> questions;
  for (const PriceWord& w : words_of_prices(plan)) {
    const bool whole = w.word.find('.') == std::string::npos;
    if (labels ? w.sort == PriceWord::Sort::kLabel : w.sort != PriceWord::Sort::kLabel && whole)
      questions.push_back({w.word, std::string(name_of(w.sort)), {{w.word, 0}}, 0});
  }
  return questions;
}

constexpr size_t kSaved = 3;           ///< the column of what is saved
constexpr double kWorthARow = 0.5e-4;  ///< of the step: less prints as 0.00 %

Table table_of(const Case& config, const StepAnswer& now, const std::vector<PriceQuestion>& questions,
               const std::vector<StepAnswer>& answers) {
  Table table{{{"what"},
               {"sort", Unit::kNone, "is a"},
               {"step_s", Unit::kSeconds, "step"},
               {"saved_s", Unit::kSeconds, "saved"},
               {"change_pct", Unit::kPercent, "change"},
               {"tokens_per_s", Unit::kTokensPerSecond, "tokens/s"},
               {"compute_s", Unit::kSeconds, "compute"},
               {"exposed_comm_s", Unit::kSeconds, "exposed comm and waits"},
               {"exposed_copy_s", Unit::kSeconds, "exposed copies"}},
              {}};
  const auto settled = [](double seconds) { return std::abs(seconds) < 1e-12 ? 0.0 : seconds; };  // what a difference leaves of 0
  const auto add = [&](const std::string& what, const std::string& sort, const StepAnswer& a) {
    table.rows.push_back({what, sort, a.step_s, settled(now.step_s - a.step_s), 100 * (a.step_s / now.step_s - 1),
                          static_cast<double>(config.train.global_batch_tokens) / a.step_s, settled(a.compute_s),
                          settled(a.exposed_comm_s), settled(a.exposed_copy_s)});
  };
  add("as it is", "", now);
  for (size_t i = 0; i < questions.size(); ++i) add(questions[i].text, questions[i].sort, answers[i]);
  return table;
}

Result<ExitCode> what_if(const WhatIfFlags& flags) {
  const auto format = parse_format(flags.format);
  if (!format.ok()) return format.error();
  const auto point = point_of(flags.point, sweeps::Resolution::kTimeline);
  if (!point.ok()) return point.error();
  if (point->refusal) return *point->refusal;
  SHARDLAB_TRY(check_calibrated(point->config.machine, "what a change gives"));
  const auto config = decide(point->config);
  if (!config.ok()) return config.error();
  const auto placed = prepare(*config);
  if (!placed.ok()) return placed.error();
  SHARDLAB_TRY(check_runnable(*placed->plan));
  const auto costs = cost_model_for(*config);
  if (!costs.ok()) return costs.error();

  PricedStep step(*config, *placed, **costs);
  const StepAnswer now = step.at({});
  const bool open = flags.free.empty() && flags.hide.empty() && flags.speed_up.empty();
  auto questions = open ? Result<std::vector<PriceQuestion>>(all_free(step.plan(), flags.all)) : asked(flags, step);
  if (!questions.ok()) return questions.error();
  std::vector<StepAnswer> answers;
  for (const PriceQuestion& q : *questions) answers.push_back(step.at(q));
  Table table = table_of(*config, now, *questions, answers);
  if (open)
    std::stable_sort(table.rows.begin() + 1, table.rows.end(),
                     [](const auto& a, const auto& b) { return std::get<double>(a[kSaved]) > std::get<double>(b[kSaved]); });
  if (*format != TableFormat::kTable) {
    print(table, *format);
    return ExitCode::kDone;
  }
  std::string nothing;  // words that give nothing that the table could show
  if (open)
    std::erase_if(table.rows, [&](const auto& row) {
      if (&row == &table.rows.front() || std::abs(std::get<double>(row[kSaved])) >= kWorthARow * now.step_s) return false;
      nothing += (nothing.empty() ? "" : ", ") + std::get<std::string>(row[0]);
      return true;
    });
  table.rows.front()[kSaved] = table.rows.front()[kSaved + 1] = std::monostate{};
  for (auto& row : table.rows)
    if (row.back() == Value(0.0)) row.back() = std::monostate{};  // a column that is empty is left out
  if (open) fmt::print("What the step would take if this were free: no optimisation of it gives more.\n\n");
  if (config->machine.is_mixed())
    fmt::print("{}\n\n", stages_text(stage_memory(*config, *placed), [](int64_t bytes) { return bytes_text(bytes); }));
  print(without_empty_columns(table), *format);
  if (!nothing.empty()) fmt::print("\nLess than 0.01 % of the step: {}\n", nothing);
  if (open && !flags.all)
    fmt::print(
        "\nAn op counts under its class, its kind and its strategy, so rows overlap. The strategy `step` has the ops of the "
        "model,\n"
        "which no strategy added.\n");
  return ExitCode::kDone;
}

}  // namespace

void add_what_if(CLI::App& app, Action& action, const Invocation&) {
  auto* verb = app.add_subcommand("what-if", "the step with ops that are free, hidden or faster: does an optimisation pay?");
  auto flags = std::make_shared<WhatIfFlags>();
  add_point_words(*verb, flags->point);
  verb->add_option("--free", flags->free, "ops that take no time: a class, kind, strategy or label; may be repeated");
  verb->add_option("--hide", flags->hide, "ops that run beside everything else and hold up nothing; may be repeated");
  verb->add_option("--speed-up", flags->speed_up, "WHAT=TIMES, as linear=2 or launch=4; may be repeated");
  verb->add_flag("--ops", flags->all, "without the flags above: every label in place of classes, kinds and strategies");
  add_format(*verb, flags->format);
  verb->footer(
      "The plan is simulated again with the changed prices, so what an op hid before may now be exposed. Words: compute, "
      "communication, copies; launch, the host's time for every op; a kind, as linear, linear.W or all_reduce; a strategy, as "
      "`shardlab strategies` lists them; the label of an op as `shardlab plan` prints it, or its beginning, as attn.");
  verb->callback([&action, flags] { action = [flags] { return what_if(*flags); }; });
}

}  // namespace shardlab::cli
