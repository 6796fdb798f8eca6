// validate: predictions scored against measured runs, a user's or the published ones.
#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>

#include "cases/environment.h"
#include "cli/common.h"
#include "cli/namespaces.h"
#include "cli/run_tables.h"
#include "cli/verbs.h"
#include "plan/base/files.h"
#include "plan/base/pending_file.h"
#include "plan/base/world_error.h"
#include "reports/escape.h"
#include "reports/format.h"
#include "simulator/estimator/validate/interval.h"
#include "simulator/estimator/validate/own_runs.h"
#include "simulator/estimator/validate/predictor.h"
#include "simulator/estimator/validate/published.h"
#include "simulator/estimator/validate/score.h"

namespace shardlab::cli {
namespace {

using namespace validation;

struct ValidateFlags {
  std::vector<std::string> files, by;
  std::string out, format, intervals;
  bool self_calibrate = false;
};

Value percent(double fraction) { return 100 * fraction; }
Value percent(std::optional<double> fraction) { return fraction ? Value(100 * *fraction) : Value(); }
Value number(std::optional<double> value) { return value ? Value(*value) : Value(); }

Table score_table(std::span<const Score> scores) {
  Table table{{{"group"},
               {"rows"},
               {"refused"},
               {"step_rows", Unit::kNone, "timed"},
               {"bias_pct", Unit::kPercent, "bias"},
               {"mean_absolute_error_pct", Unit::kPercent, "mean |error|"},
               {"median_absolute_error_pct", Unit::kPercent, "median |error|"},
               {"worst_pct", Unit::kPercent, "worst"},
               {"worst_row"},
               {"rank_correlation", Unit::kNone, "rank"},
               {"jobs"},
               {"layout_rank_correlation", Unit::kNone, "rank in job"},
               {"layout_loss_pct", Unit::kPercent, "lost by choice"}},
              {}};
  for (size_t kind = 0; kind < kMemoryKinds; ++kind) {
    const std::string name(name_of(static_cast<MemoryKind>(kind)));
    table.columns.push_back({name + "_rows"});
    table.columns.push_back({name + "_bias_pct", Unit::kPercent, name + " bias"});
    table.columns.push_back({name + "_error_pct", Unit::kPercent, name + " |error|"});
  }
  for (const auto& [column, heading] : {std::pair{"fits_right", "said fits, ran"},
                                        {"fits_wrong", "said fits, did not run"},
                                        {"oom_right", "said not, did not run"},
                                        {"oom_wrong", "said not, ran"}})
    table.columns.push_back({column, Unit::kNone, heading});
  table.columns.push_back({"fits_precision_pct", Unit::kPercent, "says fits, right"});
  table.columns.push_back({"oom_precision_pct", Unit::kPercent, "says not, right"});
  table.columns.push_back({"covered_pct", Unit::kPercent, "in interval"});
  table.columns.push_back({"interval_pct", Unit::kPercent, "interval +-"});
  table.columns.push_back({"memory_covered_pct", Unit::kPercent, "memory in interval"});
  table.columns.push_back({"memory_interval_pct", Unit::kPercent, "memory interval +-"});
  for (const Score& s : scores) {
    const bool timed = s.step.rows > 0;
    const auto of_step = [&](double v) { return timed ? percent(v) : Value(); };
    std::vector<Value> row{s.group,
                           s.rows,
                           s.refused,
                           s.step.rows,
                           of_step(s.step.bias),
                           of_step(s.step.mean_absolute),
                           of_step(s.step.median_absolute),
                           of_step(s.step.worst),
                           timed ? Value(s.step.worst_row) : Value(),
                           number(s.rank),
                           s.jobs,
                           number(s.layout_rank),
                           percent(s.layout_loss)};
    for (const ErrorFigures& m : s.memory) {
      row.push_back(m.rows);
      row.push_back(m.rows > 0 ? percent(m.bias) : Value());
      row.push_back(m.rows > 0 ? percent(m.mean_absolute) : Value());
    }
    for (const int64_t count : {s.fit.fits_right, s.fit.fits_wrong, s.fit.oom_right, s.fit.oom_wrong}) row.emplace_back(count);
    row.push_back(percent(s.fit.precision_fits()));
    row.push_back(percent(s.fit.precision_oom()));
    for (const Score::Coverage& c : {s.step_interval, s.memory_interval}) {
      row.push_back(percent(c.share()));
      row.push_back(c.rows > 0 ? percent(c.width) : Value());
    }
    table.rows.push_back(std::move(row));
  }
  return table;
}

/// Columns in which no group has a value, or a count above 0, say nothing to people.
Table without_idle_columns(const Table& table) {
  Table kept;
  kept.rows.resize(table.rows.size());
  for (size_t c = 0; c < table.columns.size(); ++c) {
    bool said = false;
    for (const auto& row : table.rows) {
      const auto* count = std::get_if<int64_t>(&row[c]);
      said = said || (count ? *count != 0 : !std::holds_alternative<std::monostate>(row[c]));
    }
    if (!said) continue;
    kept.columns.push_back(table.columns[c]);
    for (size_t r = 0; r < table.rows.size(); ++r) kept.rows[r].push_back(table.rows[r][c]);
  }
  return kept;
}

std::string csv_text(const TextTable& table) {
  std::string text;
  const auto line = [&](const std::vector<std::string>& cells) {
    for (size_t i = 0; i < cells.size(); ++i) text += (i > 0 ? "," : "") + csv_field(cells[i]);
    text += "\n";
  };
  line(table.columns);
  for (const auto& row : table.rows) line(row);
  return text;
}

/// How many rows were refused and why, the commonest reasons first; rows.csv has them all.
void report_refusals(std::span<const ScoredRow> rows) {
  constexpr size_t kMostReasons = 10;
  struct Reason {
    int64_t rows = 0;
    std::string message, hint, first;  ///< where the first of the rows is
  };
  std::map<std::string, Reason> by_message;
  int64_t refused = 0;
  for (const ScoredRow& row : rows) {
    if (row.prediction.ok()) continue;
    ++refused;
    const Error& error = row.prediction.error();
    Reason& reason = by_message[error.message];
    if (reason.rows++ > 0) continue;
    reason.message = error.message, reason.hint = error.hint;
    reason.first = error.where.empty() ? fmt::format("{}:{}", row.table->file, row.row().line) : error.where;
  }
  if (refused == 0) return;
  std::vector<Reason> reasons;
  for (const auto& [message, reason] : by_message) reasons.push_back(reason);
  std::stable_sort(reasons.begin(), reasons.end(), [](const Reason& a, const Reason& b) { return a.rows > b.rows; });
  fmt::print(stderr, "{} of {} {} refused:\n", refused, rows.size(), rows.size() == 1 ? "row was" : "rows were");
  for (size_t i = 0; i < std::min(reasons.size(), kMostReasons); ++i) {
    const int64_t more = reasons[i].rows - 1;
    fmt::print(stderr, "  {}: {}{}\n", reasons[i].first, reasons[i].message,
               more == 0 ? "" : fmt::format(" (and in {} more {})", more, more == 1 ? "row" : "rows"));
    if (!reasons[i].hint.empty()) fmt::print(stderr, "      {}\n", reasons[i].hint);
  }
  if (reasons.size() > kMostReasons)
    fmt::print(stderr, "  and {} more reasons; --out DIR writes them all to rows.csv\n", reasons.size() - kMostReasons);
}

/// Percentages that have no sign, and what their tables have for people.
bool is_signed(const std::string& column) { return column.ends_with("bias_pct") || column == "worst_pct"; }

/// The scores as people read them: no idle columns, no sign on what has none, and whether somebody picked the layouts of a set.
Table for_people(const Table& scores, bool published) {
  Table table = without_idle_columns(scores);
  for (size_t c = 0; c < table.columns.size(); ++c) {
    if (table.columns[c].unit != Unit::kPercent || is_signed(table.columns[c].name)) continue;
    table.columns[c].right = true;
    for (auto& row : table.rows)
      if (const double* v = std::get_if<double>(&row[c])) row[c] = percent_text(*v / 100);
  }
  if (!published) return table;
  table.columns.insert(table.columns.begin() + 1, TableColumn{.name = "layouts"});
  for (auto& row : table.rows) {
    const std::string& group = std::get<std::string>(row[0]);
    const auto file = std::ranges::find(published_runs(), group, &PublishedFile::name);
    row.insert(row.begin() + 1, file == published_runs().end() ? Value() : Value(file->untuned ? "untuned" : "tuned"));
  }
  return table;
}

/// What a column of the scores means; those of one line have one meaning.
constexpr std::pair<std::string_view, std::string_view> kMeanings[] = {
    {"layouts", "mostly tuned by those who published them; untuned: of a sweep or a test, whose layouts nobody picked"},
    {"timed", "rows with a measured step time"},
    {"bias", "mean error of predicted step times, with its sign"},
    {"mean |error|", "the same without the sign"},
    {"worst", "the largest error of a step time"},
    {"rank", "rank correlation of predicted and measured step times"},
    {"jobs", "sets of rows that differ in their layout alone"},
    {"rank in job", "mean rank correlation within jobs"},
    {"lost by choice", "how much longer than the fastest layout of a job the one takes that is predicted to be fastest"},
    {"live bias", "mean error of the predicted live peak, with its sign"},
    {"reserved bias", "the same of what the allocator holds"},
    {"device bias", "the same of what the driver counts"},
    {"says fits, right", "share of the rows predicted to fit which did run"},
    {"says not, right", "share of the rows predicted not to fit which did not run"},
    {"in interval", "share of measured step times within the 90 % interval, which nothing of the row's source went into"},
    {"interval +-", "its mean half width"},
    {"memory in interval", "share of measured memory within its 90 % interval"}};

/// The meanings of the columns in `heading`, the first line of the table.
std::string legend(const Table& table, std::string_view heading) {
  std::string text;
  for (const auto& [column, meaning] : kMeanings) {
    const bool there = std::ranges::any_of(
        table.columns, [&, column = column](const TableColumn& c) { return (c.heading.empty() ? c.name : c.heading) == column; });
    if (there && fmt::format(" {} ", heading).find(fmt::format(" {} ", column)) != std::string::npos)
      text += fmt::format("{}{}: {}", text.empty() ? "" : ". ", column, meaning);
  }
  return text.empty() ? "" : "\n" + wrapped(text + ".", terminal_width()) + "\n";
}

Table self_calibration_table(std::span<const SelfCalibration> sets) {
  Table table{{{"set"},
               {"jobs"},
               {"rows"},
               {"before_pct", Unit::kPercent, "mean |error|"},
               {"after_pct", Unit::kPercent, "after"},
               {"worst_before_pct", Unit::kPercent, "worst"},
               {"worst_after_pct", Unit::kPercent, "after"}},
              {}};
  for (const SelfCalibration& s : sets)
    table.rows.push_back(
        {s.set, s.jobs, s.rows, percent(s.before), percent(s.after), percent(s.worst_before), percent(s.worst_after)});
  return table;
}

Result<ExitCode> validate(const ValidateFlags& flags) {
  const auto format = parse_format(flags.format);
  if (!format.ok()) return format.error();
  const auto published = published_tables();
  if (!published.ok()) return published.error();
  const auto given = flags.files.empty() ? Result<std::vector<RowTable>>(std::vector<RowTable>{}) : tables_of(flags.files);
  if (!given.ok()) return given.error();
  const Predictor predict = analytic_predictor();
  std::vector<ScoredRow> rows = predict_rows(flags.files.empty() ? *published : *given, predict);
  const bool any = std::ranges::any_of(rows, [](const ScoredRow& row) { return row.prediction.ok(); });
  // Intervals learn from the published rows alone, whoever's runs are predicted. Where every row is refused, no interval is asked for.
  if (any || !flags.intervals.empty()) {
    const std::vector<ScoredRow> known = flags.files.empty() ? rows : predict_rows(*published, predict);
    if (!flags.intervals.empty()) write_file_atomically(flags.intervals, analytic::write_learnt(learn(known)));
    add_intervals(rows, known);
  }

  report_refusals(rows);
  if (flags.self_calibrate) {
    print(self_calibration_table(self_calibrate(rows, analytic_predictor, analytic::published_learnt().step)), *format);
    return ExitCode::kDone;
  }
  std::vector<Score> scores = score_groups(rows, flags.by);
  if (scores.size() > 1) scores.push_back(score_all(rows, "all"));
  const Table table = score_table(scores);
  const bool people = *format == TableFormat::kTable || *format == TableFormat::kMarkdown;
  const Table shown = people ? for_people(table, flags.files.empty() && flags.by.empty()) : table;
  const std::string text = print_table(shown, *format, terminal_width());
  fmt::print("{}{}", text, *format == TableFormat::kTable ? legend(shown, text.substr(0, text.find('\n'))) : "");
  if (!flags.out.empty()) {
    std::error_code failure;
    std::filesystem::create_directories(flags.out, failure);
    if (failure) throw WorldError(fmt::format("cannot make {}: {}", flags.out, failure.message()), "name another --out");
    write_file_atomically(flags.out + "/rows.csv", csv_text(rows_table(rows)));
    write_file_atomically(flags.out + "/scores.csv", print_csv(table));
    fmt::print(stderr, "rows: {0}/rows.csv, scores: {0}/scores.csv\n", flags.out);
  }
  return any ? ExitCode::kDone : ExitCode::kNo;
}

}  // namespace

void add_validate(CLI::App& app, Action& action, const Invocation&) {
  auto* verb = app.add_subcommand("validate", "predictions scored against tables of measured runs");
  auto flags = std::make_shared<ValidateFlags>();
  verb->add_option("rows", flags->files, "CSV files, one measured run a row; without one, every published set that ships");
  verb->add_option("--out", flags->out, "a folder for rows.csv (each row with its prediction) and scores.csv");
  verb->add_option("--by", flags->by, "columns whose values make the groups (`set` is the file); a group a file by default")
      ->delimiter(',');
  verb->add_flag(
      "--self-calibrate", flags->self_calibrate,
      "print the errors before and after each job's machine was corrected by three of its own rows, which are not scored");
  verb->add_option(
      "--intervals", flags->intervals,
      "write the intervals derived from all published rows to this file (the program's own: simulator/published/intervals.csv)");
  add_format(*verb, flags->format);
  verb->callback([&action, flags] { action = [flags] { return validate(*flags); }; });
}

}  // namespace shardlab::cli
