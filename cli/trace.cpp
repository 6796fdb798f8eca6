// trace summary and trace convert: where the time of each rank's step went, and traces for other programs' viewers.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <memory>

#include "cli/common.h"
#include "cli/namespaces.h"
#include "cli/one_point.h"
#include "cli/pipeline.h"
#include "cli/recorded_case.h"
#include "cli/run_directory.h"
#include "cli/verbs.h"
#include "interop/kineto.h"
#include "plan/base/pending_file.h"
#include "plan/step_parts.h"
#include "profiler/trace_file.h"
#include "reports/format.h"

namespace shardlab::cli {
namespace {

struct TraceFlags {
  PointWords point;
  std::string of, format, to, out;
};

/// A trace and what it is of.
struct Traced {
  std::unique_ptr<const Plan> plan;
  std::vector<Program> programs;
  Trace trace;
  std::string source;  ///< for messages
};

Result<Traced> simulated(const TraceFlags& flags) {
  const auto point = point_of(flags.point, sweeps::Resolution::kTimeline);
  if (!point.ok()) return point.error();
  if (point->refusal) return *point->refusal;
  SHARDLAB_TRY(check_calibrated(point->config.machine, "a simulated trace"));
  const auto config = decide(point->config);
  if (!config.ok()) return config.error();
  auto placed = prepare(*config);
  if (!placed.ok()) return placed.error();
  auto predicted = predict_case(*config, *placed);
  if (!predicted.ok()) return predicted.error();
  return Traced{std::move(placed->plan), std::move(placed->programs), std::move(predicted->trace), "simulated now"};
}

/// The trace that a case of a run left, the measured one before the predicted one; of a file, and of a case without traces, it is
/// simulated.
Result<Traced> traced(const TraceFlags& flags) {
  const std::string& of = flags.of;
  if (!of.empty() && of != "measured" && of != "predicted")
    return Error{ExitCode::kUsage, fmt::format("--of {} is no trace", of), "use measured or predicted", {}};
  const auto [directory, name] = split_case(flags.point.file);
  if (!name.empty()) {
    const auto file = case_file(flags.point.file);
    if (!file.ok()) return file.error();
    const CaseFiles files{std::filesystem::path(*file).parent_path().string()};
    const auto store = open_store(directory);
    if (!store.ok()) return store.error();
    CaseOutcome of_case;
    store->for_each([&](CaseOutcome outcome) {
      if (case_folder(directory, outcome) == files.directory) of_case = std::move(outcome);
    });
    const auto runs = store->runs();
    RecordedCase recorded = read_recorded(files, of_case, runs.empty() ? "" : runs.back().traces);
    for (const std::string& problem : recorded.problems) fmt::print(stderr, "{}\n", problem);
    const bool measured = recorded.measured && of != "predicted";
    if (measured || (recorded.predicted && of != "measured"))
      return Traced{std::move(recorded.plan), std::move(recorded.programs),
                    std::move(measured ? *recorded.measured : *recorded.predicted), measured ? "measured" : "predicted"};
    if (of == "measured" || !recorded.problems.empty())
      return Error{ExitCode::kUsage,
                   fmt::format("{} has no {} trace", flags.point.file, of.empty() ? "readable" : of),
                   "keep traces with `shardlab run --traces all`, or `measured`",
                   {}};
    fmt::print(stderr, "the run kept no trace of this case: simulated now\n");
    return simulated(flags);
  }
  if (of == "measured")
    return Error{ExitCode::kUsage,
                 fmt::format("{} is no case of a run, and nothing was measured", flags.point.file),
                 "name RUN/CASE of a run with --mode measure or both",
                 {}};
  return simulated(flags);
}

// ---- summary ----------------------------------------------------------------------------------------------------------------

/// Means over the steps of the trace, so that parts go on adding up.
struct RankSummary {
  StepParts parts;
  Breakdown breakdown;
  IdleBreakdown idle;
};

RankSummary summarise_rank(const Traced& t, int rank) {
  RankSummary sum;
  const double part = 1.0 / std::max(1, t.trace.steps * t.plan->period);
  for (int step = 0; step < t.trace.steps; ++step) {
    const StepParts parts = parts_of_step(*t.plan, t.programs, t.trace, rank, step);
    for (const StepPartField& field : kStepParts) sum.parts.*field.seconds += part * (parts.*field.seconds);
    const Breakdown b = analyse(*t.plan, t.programs, t.trace, rank, step);
    for (double Breakdown::*seconds : {&Breakdown::wall_s, &Breakdown::compute_s, &Breakdown::comm_s, &Breakdown::exposed_comm_s,
                                       &Breakdown::copy_s, &Breakdown::exposed_copy_s})
      sum.breakdown.*seconds += part * (b.*seconds);
    const IdleBreakdown idle = idle_by_cause(*t.plan, t.programs, t.trace, rank, step);
    for (double IdleBreakdown::*seconds :
         {&IdleBreakdown::idle_s, &IdleBreakdown::peer_s, &IdleBreakdown::dependency_s, &IdleBreakdown::host_s,
          &IdleBreakdown::latency_s, &IdleBreakdown::tail_s, &IdleBreakdown::other_s})
      sum.idle.*seconds += part * (idle.*seconds);
  }
  return sum;
}

/// Seconds, or nothing where a table for people would say 0.
Value seconds_or_nothing(double seconds, bool people) {
  if (people && seconds == 0) return std::monostate{};
  return seconds;
}

struct Tables {
  Table parts, overlap, idle;
};

Tables summary_tables(const Traced& t, bool people) {
  Tables tables;
  const std::vector<TableColumn> head{{"rank"}, {"stage"}, {"step_s", Unit::kSeconds, "step"}};
  for (Table* table : {&tables.parts, &tables.overlap, &tables.idle}) table->columns = head;
  for (const StepPartField& field : kStepParts)
    tables.parts.columns.push_back({fmt::format("{}_s", field.name), Unit::kSeconds, std::string(field.name)});
  for (const TableColumn& column : {TableColumn{"busy_compute_s", Unit::kSeconds, "compute"},
                                    {"busy_comm_s", Unit::kSeconds, "communication"},
                                    {"exposed_comm_s", Unit::kSeconds, "exposed"},
                                    {"comm_overlap", Unit::kFraction, "overlapped"},
                                    {"busy_copy_s", Unit::kSeconds, "copies"},
                                    {"exposed_copy_s", Unit::kSeconds, "exposed copies"}})
    tables.overlap.columns.push_back(column);
  for (const char* cause : {"idle", "peer", "dependency", "host", "latency", "tail", "other"})
    tables.idle.columns.push_back(
        {fmt::format("{}{}_s", cause == std::string_view("idle") ? "" : "idle_", cause), Unit::kSeconds, cause});
  for (const int rank : interop::traced_ranks(t.trace)) {
    const RankSummary s = summarise_rank(t, rank);
    const int64_t stage = t.plan->roles[static_cast<size_t>(t.plan->mesh.role_of(rank))].stage;
    const std::vector<Value> first{int64_t{rank}, stage, s.breakdown.wall_s};
    auto parts = first, overlap = first, idle = first;
    for (const StepPartField& field : kStepParts) parts.push_back(seconds_or_nothing(s.parts.*field.seconds, people));
    const Breakdown& b = s.breakdown;
    overlap.insert(overlap.end(), {seconds_or_nothing(b.compute_s, people), seconds_or_nothing(b.comm_s, people),
                                   seconds_or_nothing(b.exposed_comm_s, people),
                                   b.comm_s > 0 ? Value((b.comm_s - b.exposed_comm_s) / b.comm_s) : Value(std::monostate{}),
                                   seconds_or_nothing(b.copy_s, people), seconds_or_nothing(b.exposed_copy_s, people)});
    const IdleBreakdown& i = s.idle;
    for (const double seconds : {i.idle_s, i.peer_s, i.dependency_s, i.host_s, i.latency_s, i.tail_s, i.other_s})
      idle.push_back(seconds_or_nothing(seconds, people));
    tables.parts.rows.push_back(std::move(parts));
    tables.overlap.rows.push_back(std::move(overlap));
    tables.idle.rows.push_back(std::move(idle));
  }
  return tables;
}

/// The three tables side by side, for programs.
Table joined(const Tables& tables) {
  Table all = tables.parts;
  for (const Table* more : {&tables.overlap, &tables.idle}) {
    all.columns.insert(all.columns.end(), more->columns.begin() + 3, more->columns.end());
    for (size_t r = 0; r < all.rows.size(); ++r)
      all.rows[r].insert(all.rows[r].end(), more->rows[r].begin() + 3, more->rows[r].end());
  }
  return all;
}

Result<ExitCode> summary(const TraceFlags& flags) {
  const auto format = parse_format(flags.format);
  if (!format.ok()) return format.error();
  const auto t = traced(flags);
  if (!t.ok()) return t.error();
  const bool people = *format == TableFormat::kTable;
  const Tables tables = summary_tables(*t, people);
  if (!people) {
    print(joined(tables), *format);
    return ExitCode::kDone;
  }
  const size_t ranks = tables.parts.rows.size();
  fmt::print("{} of {} ranks, {}, mean of {} step{}\n\nWhere the step went: the parts add up to it\n\n", ranks, t->trace.world_size,
             t->source, t->trace.steps * t->plan->period, t->trace.steps * t->plan->period == 1 ? "" : "s");
  print(without_empty_columns(tables.parts), *format);
  fmt::print("\nOverlap: communication with and without compute beside it, waits for peers included\n\n");
  print(without_empty_columns(tables.overlap), *format);
  fmt::print("\nWhy nothing ran\n\n");
  print(without_empty_columns(tables.idle), *format);
  for (const std::string& line : unexplained(t->trace.accounting)) fmt::print("\n{}\n", line);
  if (t->trace.dropped > 0) fmt::print("\n{} events were dropped while this was recorded\n", t->trace.dropped);
  return ExitCode::kDone;
}

// ---- convert ----------------------------------------------------------------------------------------------------------------

Result<ExitCode> convert(const TraceFlags& flags) {
  if (flags.to != "chrome" && flags.to != "kineto")
    return Error{ExitCode::kUsage, fmt::format("--as {} is no form of traces", flags.to), "use chrome or kineto", {}};
  const auto t = traced(flags);
  if (!t.ok()) return t.error();
  const std::vector<int> ranks = interop::traced_ranks(t->trace);
  if (static_cast<int>(ranks.size()) < t->trace.world_size)
    fmt::print(stderr, "{} of {} ranks are simulated, one for all that do the same\n", ranks.size(), t->trace.world_size);
  if (flags.to == "chrome") {
    const std::string path = flags.out.empty() ? "trace.json.gz" : flags.out;
    write_chrome_trace(path, *t->plan, t->programs, t->trace);
    fmt::print("{}\n", path);
    return ExitCode::kDone;
  }
  const std::filesystem::path folder = flags.out.empty() ? "trace-kineto" : flags.out;
  std::filesystem::create_directories(folder);
  for (const int rank : ranks) {
    const std::string path = (folder / fmt::format("rank-{}.json", rank)).string();
    write_output(path, interop::to_kineto_json(*t->plan, t->programs, t->trace, rank));
    fmt::print("{}\n", path);
  }
  return ExitCode::kDone;
}

}  // namespace

void add_trace(CLI::App& app, Action& action, const Invocation&) {
  auto* verb = app.add_subcommand("trace", "where each rank's step went, and traces for other viewers");
  verb->require_subcommand(1);
  auto flags = std::make_shared<TraceFlags>();
  const auto add_source = [&](CLI::App& part) {
    add_point_words(part, flags->point);
    part.add_option("--of", flags->of, "measured or predicted; of a case that has both, measured");
  };
  auto* told = verb->add_subcommand("summary", "parts of the step, overlap and idle time by cause, rank by rank");
  add_source(*told);
  add_format(*told, flags->format);
  told->callback([&action, flags] { action = [flags] { return summary(*flags); }; });
  auto* made = verb->add_subcommand("convert", "one Chrome trace of all ranks, or a file a rank as PyTorch's profiler writes it");
  add_source(*made);
  made->add_option("--as", flags->to, "chrome (for Perfetto), or kineto (for HolisticTraceAnalysis and TensorBoard)")->required();
  made->add_option("-o,--out", flags->out, "file of chrome, trace.json.gz by default; folder of kineto, trace-kineto by default");
  made->callback([&action, flags] { action = [flags] { return convert(*flags); }; });
  verb->footer("Of a case file, and of a case that kept no trace, the step is simulated.");
}

}  // namespace shardlab::cli
