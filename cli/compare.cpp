// compare A B: two runs, case by case, with a verdict on each change, an exit code for CI and a page.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <map>
#include <memory>
#include <numeric>
#include <set>

#include "cli/common.h"
#include "cli/namespaces.h"
#include "cli/page_cases.h"
#include "cli/run_directory.h"
#include "cli/verbs.h"
#include "reports/compare.h"
#include "reports/format.h"
#include "reports/html.h"

namespace shardlab::cli {
namespace {

struct CompareFlags {
  std::string a, b, format, html;
  std::vector<std::string> metrics, thresholds;
  bool all = false;
};

/// Pairs whose settings differ and whose differences are spelled out.
constexpr size_t kSpelledOut = 8;
/// Op kinds of the table of one pair.
constexpr size_t kMostKinds = 12;
/// Pairs of a page; of more, those that changed most.
constexpr size_t kPagePairs = 5'000;

/// One side of the comparison.
struct Side {
  std::string directory, chosen;  ///< `chosen`: the case that was named, or empty
  RunMetadata run;
  std::vector<CaseFigures> cases;
};

Result<Side> read_side(const std::string& where, std::span<const Metric> metrics) {
  Side side;
  std::tie(side.directory, side.chosen) = split_case(where);
  const auto store = open_store(side.directory);
  if (!store.ok()) return store.error();
  if (auto runs = store->runs(); !runs.empty()) side.run = std::move(runs.back());
  store->for_each([&](const CaseOutcome& outcome) { side.cases.push_back(figures_of(outcome, metrics)); });
  return side;
}

/// Leaves the one case of that name. The error lists the cases that there are.
Result<void> keep_only(Side& side, const std::string& name) {
  NamedCases<CaseFigures> named(name);
  for (const CaseFigures& c : side.cases) named.offer(c.case_id, c.name, c);
  std::vector<CaseFigures>& found = named.found();
  if (found.size() != 1) {
    std::string names;
    for (const CaseFigures& c : found.empty() ? side.cases : found) names += fmt::format("\n  {}  {}", c.case_id, c.name);
    return Error{ExitCode::kUsage,
                 fmt::format("`{}` names {} cases of {}", name, found.size(), side.directory),
                 "take one by its id:" + names,
                 {}};
  }
  side.cases = std::move(found);
  return {};
}

/// The two sides, and what their programs and machines do not share, for figures that depend on them: sentences.
std::vector<std::string> sides_say(const Side& a, const Side& b) {
  std::vector<std::string> says;
  const auto line = [&](std::string_view name, const Side& s) {
    says.push_back(fmt::format("{}: {}{}, {}", name, s.directory, s.chosen.empty() ? "" : "/" + s.chosen,
                               s.run.program_version.empty() ? "nothing is known of its program"
                                                             : fmt::format("shardlab {}, {}", s.run.program_version, s.run.date)));
  };
  line("A", a);
  line("B", b);
  std::string differ;
  const auto compare = [&](std::string_view what, const std::string& left, const std::string& right) {
    if (left != right && !left.empty() && !right.empty())
      differ += fmt::format("{}{} {} and {}", differ.empty() ? "" : "; ", what, left, right);
  };
  compare("processor", a.run.processor, b.run.processor);
  compare("cores", fmt::to_string(a.run.cores), fmt::to_string(b.run.cores));
  compare("host", a.run.host, b.run.host);
  compare("compiler", a.run.compiler, b.run.compiler);
  if (!differ.empty()) says.push_back(fmt::format("Measured times are of different machines or builds: {}.", differ));
  if (a.run.calibration_id != b.run.calibration_id && !a.run.calibration_id.empty() && !b.run.calibration_id.empty())
    says.push_back(
        fmt::format("Predicted times are of different calibrations: {} and {}.", a.run.calibration_id, b.run.calibration_id));
  return says;
}

/// "27 cases compared, 2 only in B".
std::string pairing_says(const Pairing& pairing) {
  std::string says = fmt::format("{} case{} compared", pairing.pairs.size(), pairing.pairs.size() == 1 ? "" : "s");
  if (!pairing.only_a.empty()) says += fmt::format(", {} only in A", pairing.only_a.size());
  if (!pairing.only_b.empty()) says += fmt::format(", {} only in B", pairing.only_b.size());
  return says;
}

std::string no_longer_ok(const CaseFigures& c) {
  return fmt::format("no longer ok: {}: {}, {}", c.title, name_of(c.status), c.reason);
}

struct Row {
  size_t pair = 0;  ///< of `Pairing::pairs`
  const CaseFigures* a = nullptr;
  const CaseFigures* b = nullptr;
  const Metric* metric = nullptr;
  Change change;
};

std::string value_text(const Change& change, double value) {
  // Bytes that differ and would read the same are given in full.
  if (change.unit == Unit::kBytes && change.a != change.b &&
      bytes_text(std::llround(change.a)) == bytes_text(std::llround(change.b)))
    return fmt::format("{} B", std::llround(value));
  const bool whole = value == std::floor(value) && std::abs(value) < 9e15;
  return human_text(whole && (change.unit == Unit::kBytes || change.unit == Unit::kCount || change.unit == Unit::kNone)
                        ? Value(static_cast<int64_t>(value))
                        : Value(value),
                    change.unit);
}

/// The change in percent; for people nothing where there is none, and a small one with a digit that is not 0.
Value change_cell(const Change& c, bool for_people) {
  if (!std::isfinite(c.relative())) return {};
  const double percent = 100 * c.relative();
  if (!for_people) return percent;
  if (c.verdict == Verdict::kSame) return {};
  return std::abs(percent) < 0.005 ? Value(fmt::format("{:+.1g} %", percent)) : Value(signed_percent_text(percent));
}

/// In people's tables figures have their units; in the others they are bare numbers.
Table table_of(const std::vector<Row>& rows, bool for_people) {
  Table table;
  table.columns = {{"case", Unit::kNone, "", true},
                   {"metric"},
                   {"a", Unit::kNone, "A"},
                   {"b", Unit::kNone, "B"},
                   {.name = "change_pct", .heading = "change", .right = true},
                   {.name = "noise_pct", .heading = "noise +-", .right = true},
                   {"verdict"}};
  table.columns[2].right = table.columns[3].right = true;
  if (!for_people) table.columns.insert(table.columns.begin(), TableColumn{"case_id"});
  for (const Row& row : rows) {
    const Change& c = row.change;
    const double scale = std::abs(c.a);
    std::vector<Value> cells{row.b->title, std::string(c.column)};
    if (for_people) {
      cells.emplace_back(value_text(c, c.a));
      cells.emplace_back(value_text(c, c.b));
    } else {
      cells.insert(cells.begin(), row.b->case_id);
      cells.emplace_back(c.a);
      cells.emplace_back(c.b);
    }
    cells.push_back(change_cell(c, for_people));
    if (c.noise <= 0 || scale <= 0)
      cells.emplace_back();
    else
      cells.push_back(for_people ? Value(percent_text(c.noise / scale)) : Value(100 * c.noise / scale));
    cells.emplace_back(std::string(name_of(c.verdict)));
    table.rows.push_back(std::move(cells));
  }
  return table;
}

/// "step_s: 2 worse, 1 better, 20 noise; median change +0.4 % (95 %: -0.1 % to +0.9 %)".
Statement metric_says(const Metric& metric, const std::vector<Row>& rows) {
  std::map<Verdict, int> counts;
  std::vector<double> changes;
  for (const Row& row : rows) {
    if (row.metric != &metric) continue;
    ++counts[row.change.verdict];
    if (std::isfinite(row.change.relative())) changes.push_back(row.change.relative());
  }
  if (counts.empty()) return {Statement::Mood::kNote, metric.name + ": no case has it on both sides"};
  std::string parts;
  for (const auto& [verdict, words] :
       std::initializer_list<std::pair<Verdict, const char*>>{{Verdict::kWorse, "worse"},
                                                              {Verdict::kBetter, "better"},
                                                              {Verdict::kChanged, "changed"},
                                                              {Verdict::kUnsure, "differ, of figures without a recorded spread"},
                                                              {Verdict::kNoise, "noise"},
                                                              {Verdict::kSame, "same"}})
    if (counts.contains(verdict)) parts += fmt::format("{}{} {}", parts.empty() ? "" : ", ", counts[verdict], words);
  std::string says = fmt::format("{}: {}", metric.name, parts);
  if (const MedianChange median = median_change(changes);
      changes.size() > 1 && counts[Verdict::kSame] != static_cast<int>(changes.size())) {
    says += fmt::format("; median change {}", signed_percent_text(100 * median.median));
    if (median.interval)
      says += fmt::format(" (95 %: {} to {})", signed_percent_text(100 * median.interval->first),
                          signed_percent_text(100 * median.interval->second));
  }
  const bool worse = counts.contains(Verdict::kWorse), better = counts.contains(Verdict::kBetter);
  return {worse ? Statement::Mood::kBad : better ? Statement::Mood::kGood : Statement::Mood::kNote, says};
}

/// The whole outcomes with these ids.
std::map<std::string, CaseOutcome> outcomes_with(const std::string& directory, const std::set<std::string>& ids) {
  std::map<std::string, CaseOutcome> found;
  if (ids.empty()) return found;
  const auto store = open_store(directory);
  if (!store.ok()) return found;
  store->for_each([&](CaseOutcome outcome) {
    if (ids.contains(outcome.case_id)) found.emplace(outcome.case_id, std::move(outcome));
  });
  return found;
}

/// Seconds of each kind of op on either side, where the two differ most.
void print_kinds(const CaseOutcome& a, const CaseOutcome& b) {
  if (a.ops.empty() || b.ops.empty()) return;
  const bool measured = a.measured.has_value() && b.measured.has_value();
  std::map<std::string, std::pair<double, double>> kinds;
  for (const OpComparison& op : a.ops) kinds[op.kind].first += measured ? op.measured_s : op.predicted_s;
  for (const OpComparison& op : b.ops) kinds[op.kind].second += measured ? op.measured_s : op.predicted_s;
  std::vector<std::pair<std::string, std::pair<double, double>>> rows(kinds.begin(), kinds.end());
  std::ranges::stable_sort(rows, std::greater{}, [](const auto& r) { return std::abs(r.second.second - r.second.first); });
  Table table;
  table.columns = {{"kind"}, {"a_s", Unit::kSeconds, "A"}, {"b_s", Unit::kSeconds, "B"}, {"difference_s", Unit::kSeconds, "B - A"}};
  size_t changed = 0;
  for (const auto& [kind, s] : rows) {
    if (std::abs(s.second - s.first) <= 1e-6 * std::max(s.first, s.second)) continue;  // alike but for the rounding of sums
    ++changed;
    if (table.rows.size() < kMostKinds) table.rows.push_back({kind, s.first, s.second, s.second - s.first});
  }
  if (table.rows.empty()) return;
  fmt::print("\nSeconds by kind of op, {}, one rank of each stage:\n", measured ? "measured" : "predicted");
  print(table, TableFormat::kTable);
  if (changed > table.rows.size()) fmt::print("the {} kinds that changed most, of {} that changed\n", table.rows.size(), changed);
  if (kinds.size() > changed) fmt::print("unchanged: {} kinds\n", kinds.size() - changed);
}

/// The settings in which pairs differ; of a single pair the op kinds too.
void print_settings(const Side& a, const Side& b, const Pairing& pairing) {
  std::vector<Pairing::Pair> differ;
  for (const Pairing::Pair& pair : pairing.pairs)
    if (pair.by_name) differ.push_back(pair);
  const bool single = pairing.pairs.size() == 1;
  if (differ.size() > kSpelledOut) {
    fmt::print("\n{} cases of one name have different settings; these are the first:\n", differ.size());
    differ.resize(kSpelledOut);
  } else if (!differ.empty()) {
    fmt::print("\nDifferent settings:\n");
  }
  std::set<std::string> ids_a, ids_b;
  for (const Pairing::Pair& pair : single ? pairing.pairs : differ)
    ids_a.insert(a.cases[pair.a].case_id), ids_b.insert(b.cases[pair.b].case_id);
  const auto left = outcomes_with(a.directory, ids_a), right = outcomes_with(b.directory, ids_b);
  const auto both = [&](const Pairing::Pair& pair, const auto& use) {
    const auto l = left.find(a.cases[pair.a].case_id), r = right.find(b.cases[pair.b].case_id);
    if (l != left.end() && r != right.end()) use(l->second, r->second);
  };
  for (const Pairing::Pair& pair : differ)
    both(pair, [&](const CaseOutcome& l, const CaseOutcome& r) {
      const auto keys = differing_keys(l.config, r.config);
      fmt::print("  {}: {}\n", r.config.name.empty() ? r.case_id : r.config.name,
                 keys.empty() ? "the machine's constants" : fmt::format("{}", fmt::join(keys, ", ")));
    });
  if (single) both(pairing.pairs.front(), print_kinds);
}

/// Both runs, pair by pair, as one page.
Result<void> write_page(const std::string& file, const Side& a, const Side& b, const Pairing& pairing,
                        std::span<const Metric> metrics, const std::vector<Row>& rows,
                        const std::vector<const CaseFigures*>& broken) {
  Report report;
  report.kind = Report::Kind::kComparison;
  const auto folder = [](const Side& s) {
    const auto path = std::filesystem::absolute(s.directory).lexically_normal();
    return (path.has_filename() ? path : path.parent_path()).filename().string() + (s.chosen.empty() ? "" : "/" + s.chosen);
  };
  report.title = fmt::format("{} against {}", folder(b), folder(a));
  report.metadata = b.run;
  report.verdicts.push_back({Statement::Mood::kAnswer, pairing_says(pairing) + "."});
  for (const Metric& metric : metrics) report.verdicts.push_back(metric_says(metric, rows));
  for (const CaseFigures* c : broken) report.verdicts.push_back({Statement::Mood::kBad, no_longer_ok(*c)});
  for (const std::string& says : sides_say(a, b)) report.notes.push_back({Statement::Mood::kNote, says});

  std::vector<double> moved(pairing.pairs.size(), 0);
  for (const Row& row : rows) moved[row.pair] = std::max(moved[row.pair], std::abs(row.change.relative()));
  std::vector<size_t> shown(pairing.pairs.size());
  std::iota(shown.begin(), shown.end(), size_t{0});
  if (shown.size() > kPagePairs) {
    std::ranges::stable_sort(shown, std::greater{}, [&](size_t i) { return moved[i]; });
    shown.resize(kPagePairs);
    std::ranges::sort(shown);
    report.notes.push_back(
        {Statement::Mood::kNote,
         fmt::format("Shown are the {} of {} pairs that changed most; --format csv has all.", kPagePairs, pairing.pairs.size())});
  }
  std::set<std::string> ids_a, ids_b;
  for (const size_t i : shown) {
    ids_a.insert(a.cases[pairing.pairs[i].a].case_id);
    ids_b.insert(b.cases[pairing.pairs[i].b].case_id);
  }
  auto left = outcomes_with(a.directory, ids_a), right = outcomes_with(b.directory, ids_b);
  ExtraColumn side{
      .name = "run", .heading = "run", .help = "A: the run before; B: the run after", .values = {}, .is_setting = true};
  std::map<size_t, size_t> first;  // of a pair, the number of its case of A; that of B follows
  const auto add = [&](CaseOutcome outcome, std::string_view name) {
    outcome.config.name = fmt::format("{}: {}", name, outcome.config.name.empty() ? outcome.case_id : outcome.config.name);
    side.values.emplace_back(std::string(name));
    report.cases.push_back(std::move(outcome));
  };
  for (const size_t i : shown) {
    const auto l = left.find(a.cases[pairing.pairs[i].a].case_id), r = right.find(b.cases[pairing.pairs[i].b].case_id);
    if (l == left.end() || r == right.end()) continue;  // a run that goes on wrote it anew
    first[i] = report.cases.size();
    add(l->second, "A");
    add(r->second, "B");
  }
  report.extra.push_back(std::move(side));
  for (const Row& row : rows)
    if (const auto found = first.find(row.pair); found != first.end())
      report.changes.push_back({found->second, found->second + 1, row.metric->name, row.change});
  add_yaml(report);
  write_output(file, render_html(report));
  fmt::print(stderr, "wrote {}\n", file);
  return {};
}

/// A case that ended well in A and otherwise in B.
bool broke(const CaseFigures& a, const CaseFigures& b) { return a.status == Status::kOk && b.status != Status::kOk; }

Result<ExitCode> compare(const CompareFlags& flags) {
  const auto format = parse_format(flags.format);
  if (!format.ok()) return format.error();
  std::vector<Metric> metrics;
  std::vector<Threshold> thresholds;
  const auto add_metric = [&](const Metric& metric) {
    if (std::ranges::find(metrics, metric.name, &Metric::name) == metrics.end()) metrics.push_back(metric);
  };
  std::vector<std::string> names = flags.metrics;
  if (names.empty()) names.assign(default_metrics().begin(), default_metrics().end());
  for (const std::string& name : names) {
    auto metric = metric_named(name);
    if (!metric.ok()) return metric.error();
    add_metric(*metric);
  }
  for (const std::string& text : flags.thresholds) {
    auto threshold = parse_threshold(text);
    if (!threshold.ok()) return threshold.error();
    add_metric(threshold->metric);
    thresholds.push_back(std::move(*threshold));
  }
  auto a = read_side(flags.a, metrics);
  if (!a.ok()) return a.error();
  auto b = read_side(flags.b, metrics);
  if (!b.ok()) return b.error();
  if (!a->chosen.empty()) SHARDLAB_TRY(keep_only(*a, a->chosen));
  if (!b->chosen.empty()) SHARDLAB_TRY(keep_only(*b, b->chosen));

  Pairing pairing;
  if (!a->chosen.empty() && !b->chosen.empty())
    pairing.pairs.push_back({0, 0, a->cases[0].case_id != b->cases[0].case_id});
  else
    pairing = pair_up(a->cases, b->cases);
  if (!a->chosen.empty() || !b->chosen.empty()) pairing.only_a.clear(), pairing.only_b.clear();
  if (pairing.pairs.empty())
    return Error{ExitCode::kUsage,
                 fmt::format("{} and {} have no case in common, by id or by name", flags.a, flags.b),
                 "compare runs of one sweep, or name one case of each: shardlab compare A/CASE B/CASE",
                 {}};

  std::vector<Row> rows;
  std::vector<std::string> crossings;
  std::vector<const CaseFigures*> broken;
  for (const Pairing::Pair& pair : pairing.pairs) {
    const CaseFigures &left = a->cases[pair.a], &right = b->cases[pair.b];
    if (broke(left, right)) broken.push_back(&right);
    for (size_t i = 0; i < metrics.size(); ++i) {
      const auto change = change_of(metrics[i], i, left, right);
      if (!change) continue;
      rows.push_back({static_cast<size_t>(&pair - pairing.pairs.data()), &left, &right, &metrics[i], *change});
      for (const Threshold& t : thresholds)
        if (t.metric.name == metrics[i].name && t.crossed(*change))
          crossings.push_back(fmt::format(
              "{}: {} {} -> {}{}: crosses {}", right.title, change->column, value_text(*change, change->a),
              value_text(*change, change->b),
              std::isfinite(change->relative()) ? fmt::format(" ({})", signed_percent_text(100 * change->relative())) : "",
              t.text));
    }
  }
  if (!thresholds.empty()) {  // a figure that is gone is no figure within bounds
    for (const CaseFigures* c : broken)
      crossings.push_back(fmt::format("{}: ok -> {}: {}", c->title, name_of(c->status), c->reason));
    for (const size_t i : pairing.only_a)
      if (a->cases[i].status == Status::kOk) crossings.push_back(fmt::format("{}: in A, and not in B", a->cases[i].title));
    for (const Threshold& t : thresholds)
      if (std::ranges::none_of(rows, [&](const Row& row) { return row.metric->name == t.metric.name; }))
        crossings.push_back(fmt::format("no case has {} on both sides, which --fail-if {} bounds", t.metric.name, t.text));
  }

  if (*format != TableFormat::kTable) {
    print(table_of(rows, *format == TableFormat::kMarkdown), *format);
  } else {
    for (const std::string& says : sides_say(*a, *b)) fmt::print("{}\n", says);
    fmt::print("{}\n", pairing_says(pairing));
    for (const CaseFigures* c : broken) fmt::print("{}\n", no_longer_ok(*c));
    for (const Metric& metric : metrics) fmt::print("{}\n", metric_says(metric, rows).text);
    std::vector<Row> shown;
    for (const Row& row : rows)
      if (flags.all || pairing.pairs.size() == 1 || (row.change.verdict != Verdict::kSame && row.change.verdict != Verdict::kNoise))
        shown.push_back(row);
    std::ranges::stable_sort(shown, std::greater{}, [](const Row& row) { return std::abs(row.change.relative()); });
    if (!shown.empty()) {
      fmt::print("\n");
      print(table_of(shown, true), *format);
      const auto too_noisy = [](const Row& row) { return row.change.noise > std::abs(row.change.a) && row.change.a != 0; };
      if (std::ranges::any_of(shown, too_noisy))
        fmt::print("\nA noise above 100 % tells no change from none: measure more steps (measure.steps, measure.repeat).\n");
    }
    if (shown.size() < rows.size())
      fmt::print("\n{} figures are the same or differ by noise alone; --all shows them\n", rows.size() - shown.size());
    print_settings(*a, *b, pairing);
  }
  if (!flags.html.empty()) SHARDLAB_TRY(write_page(flags.html, *a, *b, pairing, metrics, rows, broken));
  for (const std::string& crossing : crossings) fmt::print(stderr, "{}\n", crossing);
  return crossings.empty() ? ExitCode::kDone : ExitCode::kThresholdCrossed;
}

}  // namespace

void add_compare(CLI::App& app, Action& action, const Invocation&) {
  auto* verb = app.add_subcommand("compare", "two runs, case by case: change, noise and verdict");
  auto flags = std::make_shared<CompareFlags>();
  verb->add_option("a", flags->a, "the run before: a run directory, or DIRECTORY/CASE")->required();
  verb->add_option("b", flags->b, "the run after, by another commit or with other settings")->required();
  verb->add_option("--metric", flags->metrics,
                   "figures to compare, as results.csv names them, or without measured_ and predicted_; step_s, peak_bytes, "
                   "wire_bytes and loss_last by default")
      ->delimiter(',');
  verb->add_option("--fail-if", flags->thresholds,
                   "METRIC:CHANGE, as step_s:+5%; exit code 5 where a case changed by more, and beyond noise; may be repeated");
  verb->add_option("--html", flags->html, "write the comparison as one self-contained page to this file");
  verb->add_flag("--all", flags->all, "show what is the same or noise too");
  add_format(*verb, flags->format);
  verb->footer(
      "A measured time is uncertain by the spread of its steps; a change within three standard errors is noise. Predictions, "
      "bytes and losses are exact; times, rates and losses that read the same in four digits are called the same. --fail-if goes "
      "by the exact figures, and a case that was ok and no longer is crosses its bound too.");
  verb->callback([&action, flags] { action = [flags] { return compare(*flags); }; });
}

}  // namespace shardlab::cli
