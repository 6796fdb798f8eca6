// report DIR and explain DIR[/CASE]: what a run directory says. explain CODE: what is to be said of a refusal.
#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <set>

#include "answers/search_space.h"
#include "cases/environment.h"
#include "cases/pipeline.h"
#include "cases/recorded_case.h"
#include "cli/case_rows.h"
#include "cli/claims.h"
#include "cli/common.h"
#include "cli/namespaces.h"
#include "cli/next_steps.h"
#include "cli/page_cases.h"
#include "cli/run_directory.h"
#include "cli/search_page.h"
#include "cli/serve.h"
#include "cli/shipped.h"
#include "cli/step_intervals.h"
#include "cli/verbs.h"
#include "plan/base/error_entries.h"
#include "plan/base/files.h"
#include "plan/base/pending_file.h"
#include "reports/columns.h"
#include "reports/explain.h"
#include "reports/format.h"
#include "reports/html.h"
#include "reports/nanotron.h"
#include "reports/selection.h"
#include "reports/store.h"
#include "reports/summary.h"
#include "simulator/interpreter/collective_choice.h"
#include "sweeps/machines.h"

namespace shardlab::cli {
namespace {

struct ReportFlags {
  std::string directory, html, csv, columns, markdown, title, format;
  bool serve = false;
  int port = 8917;
};

/// Cases of a page; of more, the fastest.
constexpr size_t kPageCases = 25'000;

/// What of the files of cases could not be read or joined with the plan that ran. One sentence where one reason holds for many
/// cases.
class Problems {
 public:
  void add(const CaseOutcome& outcome, const std::vector<std::string>& problems) {
    if (!problems.empty()) cases_.insert(outcome.case_id);
    for (const std::string& problem : problems) {
      const auto found = std::ranges::find(reasons_, problem, &Reason::text);
      Reason& reason = found != reasons_.end() ? *found : reasons_.emplace_back(Reason{problem, case_title(outcome.config), 0});
      ++reason.cases;
    }
  }
  const std::set<std::string>& cases() const { return cases_; }
  std::vector<Statement> statements() const {
    std::vector<Statement> all;
    for (const Reason& r : reasons_)
      all.push_back(
          {Statement::Mood::kBad, fmt::format("{}{}: {}. Its figures below are those that the run recorded.", r.first,
                                              r.cases > 1 ? fmt::format(" and {} more cases", r.cases - 1) : "", r.text)});
    return all;
  }

 private:
  struct Reason {
    std::string text, first;
    int cases = 0;
  };
  std::vector<Reason> reasons_;
  std::set<std::string> cases_;  ///< their ids
};

/// What a page says of the timelines that it does not show, and of those that the run did not leave.
void say_of_timelines(size_t cases, const std::vector<Timeline>& timelines, const std::string& kept,
                      std::vector<Statement>& notes) {
  const size_t shown = timelines.size(), anew = static_cast<size_t>(std::ranges::count(timelines, true, &Timeline::made_anew));
  const std::string how = "keep them with `shardlab run --traces all`";
  if (anew > 0)
    notes.push_back({Statement::Mood::kNote,
                     fmt::format("Timelines of {} of {} cases, simulated again for this page: the run kept no traces of them; {}.",
                                 anew, cases, how)});
  if (cases == 0 || shown == cases || (anew > 0 && shown == anew)) return;
  if (shown == 0)
    notes.push_back({Statement::Mood::kNote, kept == "none" ? fmt::format("No timelines: this run kept no traces; {}.", how)
                                                            : fmt::format("No timelines: no case has traces; {}.", how)});
  else
    notes.push_back({Statement::Mood::kNote, fmt::format("Timelines of {} of {} cases: a page holds at most {}, of cases that have "
                                                         "traces.",
                                                         shown, cases, kTimelines)});
}

/// "1.2 MB" of a file; of a pipe or a device, which has no size, what it is.
std::string size_text(const std::string& path) {
  std::error_code failure;
  const auto bytes = std::filesystem::file_size(path, failure);
  return failure ? std::string("not a file") : bytes_text(static_cast<int64_t>(bytes));
}

/// The price of a device-hour, where all cases are of one machine and its file lists one.
void add_price(Report& report) {
  if (report.cases.empty()) return;
  const std::string& machine = report.cases.front().config.machine.id;
  if (report.cases.front().config.machine.local) return;
  if (!std::ranges::all_of(report.cases, [&](const CaseOutcome& o) { return o.config.machine.id == machine; })) return;
  const auto price = sweeps::load_price(machine);
  if (!price.ok() || price->usd_per_hour <= 0) return;
  report.price_usd = price->usd_per_hour;
  report.price_note = price_note(0, *price);
}

Result<Report> build_report(const ReportFlags& flags, bool timelines) {
  const auto store = open_store(flags.directory);
  if (!store.ok()) return store.error();
  Report report;
  Selector selector(kPageCases);
  store->for_each([&](CaseOutcome outcome) { selector.add(std::move(outcome)); });
  Selection selection = selector.take();
  report.cases = std::move(selection.cases);
  report.left_out = selection.left_out;
  const bool complete = static_cast<int64_t>(report.cases.size()) == selection.total;
  report.title =
      flags.title.empty() ? std::filesystem::absolute(flags.directory).lexically_normal().filename().string() : flags.title;
  const auto runs = store->runs();
  if (!runs.empty()) report.metadata = runs.back();
  report.verdicts = verdicts(report.metadata.claims, report.cases);
  const std::string& kept = report.metadata.traces;
  Problems problems;
  size_t ran = 0;
  for (const CaseOutcome& outcome : report.cases) {
    if (outcome.status != Status::kOk) continue;
    ++ran;
    const CaseFiles files{case_folder(flags.directory, outcome)};
    if (!timelines || static_cast<int>(report.timelines.size()) >= kTimelines) {
      problems.add(outcome, recorded_problems(files, outcome, kept));
      continue;
    }
    const RecordedCase recorded = read_recorded(files, outcome, kept);
    problems.add(outcome, recorded.problems);
    if (add_recorded(recorded, outcome, report) && recorded.measured) report.metadata.dropped_events += recorded.measured->dropped;
    if (outcome.measured) report.metadata.recorder_overhead_s = outcome.measured->recorder_overhead_s;
  }
  report.notes = problems.statements();
  if (const std::string found = flags.directory + "/search.json"; is_there(found)) {
    std::ifstream file(found, std::ios::binary);
    SHARDLAB_TRY(add_search(nlohmann::ordered_json::parse(file, nullptr, /*allow_exceptions=*/false), report));
    timelines = false;  // layouts of a search have no plan
    add_price(report);
  }
  if (!complete)
    report.notes.push_back(
        {Statement::Mood::kNote,
         fmt::format("Shown are the {} fastest of {} cases and the smallest; results.csv has all.", kPageCases, selection.total)});
  if (timelines) {
    add_simulated(report, problems.cases());
    add_yaml(report);
    add_price(report);
    add_step_intervals(report);
    if (const int best = summarise(report.cases, report.left_out).fastest; best >= 0)
      report.next = next_steps(report.cases[static_cast<size_t>(best)], report.cases);
  }
  if (timelines) say_of_timelines(ran, report.timelines, kept, report.notes);
  return report;
}

/// Every case and every column: of more cases than a page shows, row by row.
Result<void> write_csv(const ReportFlags& flags, const Report& report) {
  if (!flags.columns.empty()) {
    const auto store = open_store(flags.directory);
    if (!store.ok()) return store.error();
    std::string text = print_csv(nanotron_table({}));
    const size_t header = text.size();
    store->for_each([&](const CaseOutcome& outcome) { text += print_csv(nanotron_table({&outcome, 1})).substr(header); });
    write_output(flags.csv, text);
    return {};
  }
  const bool complete = std::ranges::all_of(report.left_out, [](int64_t n) { return n == 0; });
  if (complete) {
    write_output(flags.csv, csv_of(report.cases));
    return {};
  }
  const auto store = open_store(flags.directory);
  if (!store.ok()) return store.error();
  write_results_csv(flags.csv, *store);
  return {};
}

/// Bytes and time of the files that a page is made from.
std::string revision_of(const std::string& directory) {
  std::string revision;
  for (const char* name : {"/results.sqlite", "/search.json"}) {
    std::error_code missing;
    const auto bytes = std::filesystem::file_size(directory + name, missing);
    const auto time = std::filesystem::last_write_time(directory + name, missing);
    if (!missing) revision += fmt::format("{}{}.{}", revision.empty() ? "" : "-", bytes, time.time_since_epoch().count());
  }
  return revision;
}

Result<ExitCode> serve_report(const ReportFlags& flags) {
  if (!flags.html.empty() || !flags.csv.empty() || !flags.markdown.empty())
    return refusal("--serve beside a file to write", "write files with another call of `report`");
  const Served served{.page = [&](const std::string& revision) -> Result<std::string> {
                        const auto built = build_report(flags, true);
                        if (!built.ok()) return built.error();
                        return render_html(*built, revision);
                      },
                      .revision = [&] { return revision_of(flags.directory); },
                      .live = [&] { return RunLock::is_taken(flags.directory); }};
  return serve(served, flags.port);
}

Result<ExitCode> report(const ReportFlags& flags) {
  const auto format = parse_format(flags.format);
  if (!format.ok()) return format.error();
  if (flags.serve) return serve_report(flags);
  if (!flags.columns.empty() && (flags.columns != "nanotron" || flags.csv.empty()))
    return Error{ExitCode::kUsage,
                 flags.csv.empty() ? std::string("--columns names the columns of a CSV file, and none is asked for")
                                   : fmt::format("--columns {} is no set of columns", flags.columns),
                 "use --csv FILE --columns nanotron, or leave out --columns for every column of shardlab's own",
                 {}};
  const auto built = build_report(flags, !flags.html.empty());
  if (!built.ok()) return built.error();
  const bool to_files = !flags.html.empty() || !flags.csv.empty() || !flags.markdown.empty();
  if (!flags.html.empty()) write_output(flags.html, render_html(*built));
  if (!flags.csv.empty()) SHARDLAB_TRY(write_csv(flags, *built));
  if (!flags.markdown.empty()) write_output(flags.markdown, render_markdown(*built));
  for (const std::string& file : {flags.html, flags.csv, flags.markdown})
    if (!file.empty()) fmt::print(stderr, "wrote {}, {}\n", file, size_text(file));
  if (to_files)
    for (const Statement& s : built->notes)
      if (s.mood == Statement::Mood::kBad) fmt::print(stderr, "warning: {}\n", s.text);
  if (to_files) return ExitCode::kDone;
  if (*format != TableFormat::kTable) {
    print(case_table(built->cases, summary_columns()), *format);
    return ExitCode::kDone;
  }
  print_cases(built->cases);
  if (!built->cases.empty()) fmt::print("\n");
  for (const auto* said : {&built->notes, &built->verdicts}) print_statements(*said);
  print_statements(statements(built->cases, summarise(built->cases, built->left_out)));
  return ExitCode::kDone;
}

struct ExplainFlags {
  std::string where, format;
  int rows = 20;
};

Result<const CaseOutcome*> find_case(const std::vector<CaseOutcome>& cases, const std::string& name) {
  NamedCases<const CaseOutcome*> named(name);
  for (const CaseOutcome& c : cases) named.offer(c.case_id, c.config.name, &c);
  const std::vector<const CaseOutcome*>& found = named.found();
  if (found.size() == 1) return found.front();
  if (found.size() > 1) {
    std::string ids;
    for (const CaseOutcome* c : found) ids += fmt::format("\n  {}  {}", c->case_id, c->config.name);
    return Error{ExitCode::kUsage, fmt::format("`{}` names {} cases", name, found.size()), "take one by its id:" + ids, {}};
  }
  std::string names;
  for (const CaseOutcome& c : cases) names += fmt::format("\n  {}  {}", c.case_id, c.config.name);
  return Error{ExitCode::kUsage, fmt::format("there is no case `{}`", name), "cases of this run:" + names, {}};
}

/// "E101": what a refusal names, in either case. A directory of such a name is ./E101; one of fewer or more digits, as e2, is itself.
bool is_error_code(std::string_view text) {
  const bool code = text.size() > 1 && (text.front() == 'E' || text.front() == 'e') &&
                    text.find_first_not_of("0123456789", 1) == std::string_view::npos;
  return code && (text.size() == 4 || !std::filesystem::exists(text));
}

Result<ExitCode> explain_error(std::string code, TableFormat format) {
  code.front() = 'E';
  const auto entry = entry_named(code);
  if (!entry.ok()) return entry.error();
  if (format == TableFormat::kTable)
    fmt::print("{}", with_shipped_paths(to_string(*entry)));
  else
    print({{{.name = "code"}, {.name = "title"}, {.name = "why"}, {.name = "next"}},
           {{std::string(entry->code), std::string(entry->title), std::string(entry->why), std::string(entry->next)}}},
          format);
  return ExitCode::kDone;
}

Result<ExitCode> explain_verb(const ExplainFlags& flags) {
  const auto format = parse_format(flags.format);
  if (!format.ok()) return format.error();
  if (is_error_code(flags.where)) return explain_error(flags.where, *format);
  const auto [directory, name] = split_case(flags.where);
  const auto store = open_store(directory);
  if (!store.ok()) return store.error();
  Selector selector(kPageCases);
  std::vector<CaseOutcome> named;
  store->for_each([&](CaseOutcome outcome) {
    if (!name.empty() && (outcome.case_id.starts_with(name) || outcome.config.name == name)) named.push_back(outcome);
    selector.add(std::move(outcome));
  });
  Selection selection = selector.take();
  const std::vector<CaseOutcome>& cases = named.empty() ? selection.cases : named;
  const CaseOutcome* chosen = nullptr;
  if (name.empty()) {
    const Summary summary = summarise(cases, selection.left_out);
    const bool prose = *format == TableFormat::kTable;     // other formats are for programs: the table of ops alone
    if (prose && summary.fastest < 0 && !cases.empty()) {  // nothing to explain but why
      print_cases(cases);
      fmt::print("\n");
    }
    if (prose) print_statements(statements(cases, summary));
    if (summary.fastest < 0) return ExitCode::kDone;
    chosen = &cases[static_cast<size_t>(summary.fastest)];
    if (prose) fmt::print("\nThe fastest case in detail; for another: shardlab explain {}/CASE\n\n", directory);
  } else {
    const auto found = find_case(cases, name);
    if (!found.ok()) return found.error();
    chosen = *found;
  }
  if (*format != TableFormat::kTable) {
    print(op_table(*chosen, flags.rows), *format);
    return ExitCode::kDone;
  }
  const auto runs = store->runs();
  const CaseFiles files{case_folder(directory, *chosen)};
  const std::vector<std::string> problems = read_recorded(files, *chosen, runs.empty() ? "" : runs.back().traces).problems;
  for (const std::string& problem : problems) fmt::print("{}. The figures here are those that the run recorded.\n\n", problem);
  std::vector<PricedCollective> collectives;
  const auto plan = problems.empty() ? recorded_plan(files) : std::nullopt;
  if (plan) collectives = priced_collectives(chosen->config, *plan);
  fmt::print("{}", explain(*chosen, {flags.rows, terminal_width(), collectives}));
  return ExitCode::kDone;
}

}  // namespace

void add_report(CLI::App& app, Action& action, const Invocation&) {
  auto* verb = app.add_subcommand("report", "prints what a run directory holds, or writes it as HTML, CSV or markdown");
  auto flags = std::make_shared<ReportFlags>();
  verb->add_option("directory", flags->directory, "the run directory")->required();
  verb->add_option("--html", flags->html, "write one self-contained page to this file");
  verb->add_option("--csv", flags->csv, "write every column to this file");
  verb->add_option("--columns", flags->columns, "of the CSV file: nanotron, the columns of its benchmark table under their names");
  verb->add_option("--markdown", flags->markdown, "write a summary to this file");
  verb->add_option("--title", flags->title, "title of the page; the directory's name by default");
  verb->add_flag("--serve", flags->serve, "show the page to browsers of this machine, and follow the run while it goes on");
  verb->add_option("--port", flags->port, "of --serve; 0: any that is free")->check(number_in(0, 65535))->default_val(8917);
  add_format(*verb, flags->format);
  verb->callback([&action, flags] { action = [flags] { return report(*flags); }; });
}

void add_explain(CLI::App& app, Action& action, const Invocation&) {
  auto* verb = app.add_subcommand("explain", "per op: work, predicted, measured, residual; and why a case is slow");
  auto flags = std::make_shared<ExplainFlags>();
  verb->add_option("where", flags->where, "DIR, DIR/CASE by id or name, or the code of a refusal, as E101")->required();
  verb->add_option("--rows", flags->rows, "rows of the op table, 0 for all")->default_val(20)->check(number_in(0, 1e9));
  add_format(*verb, flags->format);
  verb->callback([&action, flags] { action = [flags] { return explain_verb(*flags); }; });
}

}  // namespace shardlab::cli
