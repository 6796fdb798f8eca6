// trace summary, convert and compare: where the time of each rank's step went, traces for other programs' viewers, and profiles of PyTorch
// beside them.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <functional>
#include <memory>
#include <utility>

#include "cases/pipeline.h"
#include "cases/recorded_case.h"
#include "cli/common.h"
#include "cli/namespaces.h"
#include "cli/one_point.h"
#include "cli/run_directory.h"
#include "cli/verbs.h"
#include "interop/chakra.h"
#include "interop/kineto.h"
#include "interop/kineto_reader.h"
#include "interop/memory_snapshot.h"
#include "interop/perfetto.h"
#include "plan/base/files.h"
#include "plan/base/pending_file.h"
#include "plan/base/world_error.h"
#include "plan/memory.h"
#include "plan/step_parts.h"
#include "plan/trace_steps.h"
#include "profiler/trace_file.h"
#include "reports/format.h"

namespace shardlab::cli {
namespace {

struct TraceFlags {
  PointWords point;
  std::string of, format, to, out;
  std::vector<std::string> profiles;
};

/// A trace and what it is of.
struct Traced {
  std::unique_ptr<const Plan> plan;
  std::vector<Program> programs;
  Trace trace;
  std::string source;  ///< for messages
  /// Of a measured case, as the run has it: steps, and the median of their times.
  int samples = 0;
  double step_s = 0;
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
      return Traced{std::move(recorded.plan),
                    std::move(recorded.programs),
                    std::move(measured ? *recorded.measured : *recorded.predicted),
                    measured ? "measured" : "predicted",
                    measured && of_case.measured ? of_case.measured->samples : 0,
                    measured && of_case.measured ? of_case.measured->step_s : 0};
    if (of == "measured" && !of_case.measured)
      return Error{ExitCode::kUsage,
                   fmt::format("{} was not measured, only predicted", flags.point.file),
                   "leave --of out, or run the sweep with --mode both or measure",
                   {}};
    if (of == "measured" || !recorded.problems.empty())
      return Error{ExitCode::kUsage,
                   fmt::format("the run kept no {} trace of {}", of.empty() ? "readable" : of, flags.point.file),
                   "keep traces with `shardlab run --traces all`, or `measured`",
                   {}};
    auto now = simulated(flags);
    if (now.ok()) fmt::print(stderr, "the run kept no trace of this case: simulated now\n");
    return now;
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
  double bubble_s = 0;  ///< of the pipeline, whatever else runs meanwhile: `Breakdown::bubble_fraction` in seconds
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
    sum.bubble_s += part * b.bubble_fraction * b.wall_s;
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

/// What the columns of parts mean, of those that `any` has.
void print_legend(const std::function<bool(double StepParts::*)>& any) {
  constexpr std::pair<double StepParts::*, std::string_view> kMeanings[] = {
      {&StepParts::update_s, "update: optimizer, clipping, casts"},
      {&StepParts::tensor_s, "tensor: exposed communication of tensor parallelism"},
      {&StepParts::context_s, "context: exposed communication of context parallelism"},
      {&StepParts::expert_s, "expert: exposed communication of expert parallelism"},
      {&StepParts::data_s, "data: exposed communication of gradients and weights"},
      {&StepParts::pipeline_s, "pipeline: exposed messages between stages"},
      {&StepParts::bubble_s, "idle bubble: the part of the pipeline's bubble in which nothing runs and no message is on its way"},
      {&StepParts::wait_s, "wait: for a peer or another stream"},
      {&StepParts::launch_s, "launch: the device waits for the host"},
      {&StepParts::unplanned_s, "unplanned: in no op and no wait"}};
  std::string text;
  for (const auto& [part, meaning] : kMeanings)
    if (any(part)) text += (text.empty() ? "" : "; ") + std::string(meaning);
  if (!text.empty()) fmt::print("\n{}\n", wrapped(text, terminal_width(), 2));
}

struct Tables {
  Table parts, overlap, idle;
};

Tables summary_tables(const Traced& t, bool people) {
  Tables tables;
  const std::vector<TableColumn> head{{"rank"}, {"stage"}, {"step_s", Unit::kSeconds, "step"}};
  for (Table* table : {&tables.parts, &tables.overlap, &tables.idle}) table->columns = head;
  for (const StepPartField& field : kStepParts)
    tables.parts.columns.push_back({fmt::format("{}_s", field.name), Unit::kSeconds,
                                    std::string(field.seconds == &StepParts::bubble_s ? "idle bubble" : field.name)});
  for (const TableColumn& column : {TableColumn{"busy_compute_s", Unit::kSeconds, "compute and update"},
                                    {"busy_comm_s", Unit::kSeconds, "communication"},
                                    {"exposed_comm_s", Unit::kSeconds, "exposed"},
                                    {"comm_overlap", Unit::kFraction, "overlapped"},
                                    {"busy_copy_s", Unit::kSeconds, "copies"},
                                    {"exposed_copy_s", Unit::kSeconds, "exposed copies"},
                                    {"pipeline_bubble_s", Unit::kSeconds, "bubble"}})
    tables.overlap.columns.push_back(column);
  for (const auto& [name, heading] : {std::pair{"idle_s", "idle"},
                                      {"idle_peer_s", "waits for a peer"},
                                      {"idle_dependency_s", "for another stream"},
                                      {"idle_host_s", "for the host"},
                                      {"idle_latency_s", "for the device to begin"},
                                      {"idle_tail_s", "after the last op"},
                                      {"idle_other_s", "between ops"}})
    tables.idle.columns.push_back({name, Unit::kSeconds, heading});
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
                                   seconds_or_nothing(b.copy_s, people), seconds_or_nothing(b.exposed_copy_s, people),
                                   seconds_or_nothing(s.bubble_s, people)});
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
  const int steps = t->trace.steps * t->plan->period;
  fmt::print("{} of {} ranks, {}, {}", ranks, t->trace.world_size, t->source,
             steps == 1 ? "one step" : fmt::format("mean of {} steps", steps));
  if (t->samples > steps) fmt::print(" of {}; the median of all, which `report` has, is {}", t->samples, seconds_text(t->step_s));
  fmt::print("\n\nWhere the step went: the parts add up to it\n\n");
  print(without_empty_columns(tables.parts), *format);
  const auto any = [&](double StepParts::*part) {
    const size_t column =
        3 + static_cast<size_t>(std::ranges::find(kStepParts, part, &StepPartField::seconds) - kStepParts.begin());
    return std::ranges::any_of(tables.parts.rows,
                               [&](const auto& row) { return !std::holds_alternative<std::monostate>(row[column]); });
  };
  print_legend(any);
  fmt::print("\nOverlap: communication with and without compute beside it, waits for peers included\n\n");
  print(without_empty_columns(tables.overlap), *format);
  if (any(&StepParts::bubble_s))
    fmt::print("\nbubble: compute waits for another stage, whatever else runs meanwhile; `explain` has the same figure\n");
  fmt::print("\nWhy nothing ran\n\n");
  print(without_empty_columns(tables.idle), *format);
  for (const std::string& line : unexplained(t->trace.accounting)) fmt::print("\n{}\n", line);
  if (t->trace.dropped > 0) fmt::print("\n{} events were dropped while this was recorded\n", t->trace.dropped);
  return ExitCode::kDone;
}

// ---- convert ----------------------------------------------------------------------------------------------------------------

/// A form of traces: a name for `--as`, and how it is written.
struct TraceForm {
  std::string_view name, out;
  void (*write)(const Traced& traced, const std::string& out);
};

std::vector<ArenaLayout> arenas_of(const Traced& t) {
  std::vector<ArenaLayout> arenas;
  for (const Program& program : t.programs) arenas.push_back(place_arena(*t.plan, program));
  return arenas;
}

void write_chrome(const Traced& t, const std::string& out) {
  write_chrome_trace(out, *t.plan, t.programs, t.trace);
  fmt::print("{}\n", out);
}

void write_perfetto_file(const Traced& t, const std::string& out) {
  PendingFile file(out);
  interop::write_perfetto(*t.plan, t.programs, arenas_of(t), t.trace, [&](std::string_view bytes) { file.write(bytes); });
  file.place();
  fmt::print("{}\n", out);
}

/// A file in a folder that is made where it is not there.
void write_in(const std::string& folder, const std::string& name, std::string_view bytes) {
  std::filesystem::create_directories(folder);
  const std::string path = (std::filesystem::path(folder) / name).string();
  write_output(path, bytes);
  fmt::print("{}\n", path);
}

void write_kineto(const Traced& t, const std::string& out) {
  for (const int rank : interop::traced_ranks(t.trace))
    write_in(out, fmt::format("rank-{}.json", rank), interop::to_kineto_json(*t.plan, t.programs, t.trace, rank));
}

void write_memory(const Traced& t, const std::string& out) {
  const std::vector<ArenaLayout> arenas = arenas_of(t);
  for (const int rank : interop::traced_ranks(t.trace)) {
    const auto role = static_cast<size_t>(t.plan->mesh.role_of(rank));
    write_in(out, fmt::format("rank-{}.pickle", rank),
             interop::to_memory_snapshot(*t.plan, t.programs[role], arenas[role], t.trace, rank));
  }
}

/// A file for every rank: one that the trace does not have does what a rank of its role does.
void write_chakra(const Traced& t, const std::string& out) {
  const std::vector<interop::ChakraGroup> groups = interop::chakra_groups(*t.plan);
  const std::vector<int> ranks = interop::traced_ranks(t.trace);
  const int step = median_step(t.trace);
  for (int rank = 0; rank < t.plan->mesh.world_size(); ++rank) {
    const int role = t.plan->mesh.role_of(rank);
    auto like = std::ranges::find(ranks, rank);
    if (like == ranks.end()) like = std::ranges::find(ranks, role, [&](int r) { return t.plan->mesh.role_of(r); });
    if (like == ranks.end())
      throw WorldError(fmt::format("the trace has no rank of stage {}", role), "simulate the step: trace convert CASE.yaml");
    write_in(out, fmt::format("step.{}.et", rank),
             interop::to_chakra(*t.plan, t.programs[static_cast<size_t>(role)], groups, t.trace, rank, *like, step));
  }
  write_in(out, "comm-groups.json", interop::chakra_groups_json(groups));
}

constexpr std::array<TraceForm, 5> kTraceForms = {{{"chrome", "trace.json.gz", write_chrome},
                                                   {"perfetto", "trace.perfetto-trace", write_perfetto_file},
                                                   {"kineto", "trace-kineto", write_kineto},
                                                   {"memory", "trace-memory", write_memory},
                                                   {"chakra", "trace-chakra", write_chakra}}};

Result<ExitCode> convert(const TraceFlags& flags) {
  const auto* const form = std::ranges::find(kTraceForms, flags.to, &TraceForm::name);
  if (form == kTraceForms.end())
    return Error{ExitCode::kUsage,
                 fmt::format("--as {} is no form of traces", flags.to),
                 "use chrome, perfetto, kineto, memory or chakra",
                 {}};
  const auto t = traced(flags);
  if (!t.ok()) return t.error();
  if (const size_t ranks = interop::traced_ranks(t->trace).size(); static_cast<int>(ranks) < t->trace.world_size)
    fmt::print(stderr, "{} of {} ranks are simulated, one for all that do the same\n", ranks, t->trace.world_size);
  form->write(*t, flags.out.empty() ? std::string(form->out) : flags.out);
  return ExitCode::kDone;
}

// ---- compare ----------------------------------------------------------------------------------------------------------------

/// Bytes of a profile: some minutes of a large model.
constexpr int64_t kLargestProfile = int64_t{4} << 30;

/// The rank of ours that a profile is held against: its own, or where the trace lacks it one of the same stage.
Result<int> rank_like(const Traced& t, const interop::DeviceRecords& records, const std::string& path) {
  if (records.world_size > 0 && records.world_size != t.trace.world_size)
    return refusal(fmt::format("{} is of {} ranks, and the case has {}", path, records.world_size, t.trace.world_size),
                   "compare it with the case that was run");
  const std::vector<int> ranks = interop::traced_ranks(t.trace);
  if (records.rank < 0) return ranks.front();
  if (records.rank >= t.trace.world_size)
    return refusal(fmt::format("{} is of rank {}, and the case has {}", path, records.rank, t.trace.world_size),
                   "compare it with the case that was run");
  const int role = t.plan->mesh.role_of(records.rank);
  auto like = std::ranges::find(ranks, records.rank);
  if (like == ranks.end()) like = std::ranges::find(ranks, role, [&](int r) { return t.plan->mesh.role_of(r); });
  if (like == ranks.end())
    return refusal(fmt::format("the trace has no rank of stage {}", role), "simulate the case: name its case.yaml");
  return *like;
}

Result<ExitCode> compare_profiles(const TraceFlags& flags) {
  const auto format = parse_format(flags.format);
  if (!format.ok()) return format.error();
  const auto t = traced(flags);
  if (!t.ok()) return t.error();
  const bool people = *format == TableFormat::kTable;
  Table table{{{"rank"},
               {"part"},
               {"ours_s", Unit::kSeconds, t->source == "measured" ? "measured here" : "predicted"},
               {"profile_s", Unit::kSeconds, "profile"},
               {"difference_pct", Unit::kPercent, "difference"}},
              {}};
  for (const std::string& path : flags.profiles) {
    const auto text = read_file_within(path, kLargestProfile);
    if (!text.ok()) return text.error();
    const auto records = interop::parse_kineto(*text, path);
    if (!records.ok()) return records.error();
    const auto like = rank_like(*t, *records, path);
    if (!like.ok()) return like.error();
    const interop::BusySeconds theirs = busy_seconds(*records),
                               ours = busy_seconds(interop::records_of(*t->plan, t->programs, t->trace, *like));
    const auto add = [&](std::string_view part, double here, double there) {
      if (here == 0 && there == 0) return;
      table.rows.push_back({records->rank >= 0 ? Value(int64_t{records->rank}) : Value(), std::string(part),
                            seconds_or_nothing(here, people), seconds_or_nothing(there, people),
                            there > 0 ? Value(100 * (here - there) / there) : Value()});
    };
    add("step", ours.step, theirs.step);
    for (size_t c = 0; c < interop::kKernelClasses; ++c)
      add(name_of(static_cast<interop::KernelClass>(c)), ours.by_class[c], theirs.by_class[c]);
    add("communication", ours.communication, theirs.communication);
    add("exposed communication", ours.exposed, theirs.exposed);
    add("idle", ours.idle, theirs.idle);
  }
  print(table, *format);
  return ExitCode::kDone;
}

}  // namespace

void add_trace(CLI::App& app, Action& action, const Invocation&) {
  auto* verb =
      app.add_subcommand("trace", "where each rank's step went, traces for other viewers, and profiles of PyTorch beside them");
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
  auto* made = verb->add_subcommand("convert", "the trace as other programs read it: one file of all ranks, or a file a rank");
  add_source(*made);
  made->add_option("--as", flags->to,
                   "perfetto or chrome (timelines), kineto (HolisticTraceAnalysis, TensorBoard), memory (PyTorch's memory_viz), "
                   "chakra (ASTRA-sim)")
      ->required();
  made->add_option(
      "-o,--out", flags->out,
      "file of perfetto and chrome, trace.perfetto-trace and trace.json.gz by default; folder of the others, trace-kineto, "
      "trace-memory and trace-chakra by default");
  made->callback([&action, flags] { action = [flags] { return convert(*flags); }; });
  auto* held =
      verb->add_subcommand("compare", "seconds of a step by what the device was busy with, beside those of PyTorch's profiler");
  add_source(*held);
  held->add_option("--with", flags->profiles, "JSON of torch.profiler (Kineto), a file a rank; may be repeated")->required();
  add_format(*held, flags->format);
  held->callback([&action, flags] { action = [flags] { return compare_profiles(*flags); }; });
  verb->footer("Of a case file, and of a case that kept no trace, the step is simulated.");
}

}  // namespace shardlab::cli
