// run SWEEP.yaml: expands a sweep and runs its cases, saving every result as it comes.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cctype>
#include <condition_variable>
#include <cstdio>
#include <deque>
#include <exception>
#include <filesystem>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <span>
#include <thread>
#include <tuple>
#include <utility>

#include "answers/words.h"
#include "cases/analytic_case.h"
#include "cases/case_process.h"
#include "cases/environment.h"
#include "cases/execution.h"
#include "cases/interrupt.h"
#include "cases/job_place.h"
#include "cases/pipeline.h"
#include "cases/point_search.h"
#include "cases/seats.h"
#include "cli/case_rows.h"
#include "cli/claims.h"
#include "cli/common.h"
#include "cli/namespaces.h"
#include "cli/progress.h"
#include "cli/shipped.h"
#include "cli/verbs.h"
#include "plan/base/check.h"
#include "plan/base/files.h"
#include "plan/base/utf8.h"
#include "plan/base/values.h"
#include "plan/base/world_error.h"
#include "plan/keys.h"
#include "plan/reasons.h"
#include "reports/columns.h"
#include "reports/format.h"
#include "reports/selection.h"
#include "reports/store.h"
#include "reports/summary.h"
#include "runtime/crew.h"
#include "runtime/dataset.h"
#include "sweeps/resolution.h"
#include "sweeps/search.h"
#include "sweeps/traces.h"

namespace shardlab::cli {
namespace {

struct RunFlags {
  ProcessShare share;
  Restarts restarts;
  JobPlaceFlags placement;
  std::string sweep, mode, resolution, out, machine_file, format, backend, transport, replay, traces, shard;
  std::vector<std::string> set;
  bool dry_run = false, resume = false;
  int jobs = 1;
};

/// Keeps outcomes in the run directory.
class DirectorySink final : public ResultSink {
 public:
  explicit DirectorySink(RunDirectory& directory) : directory_(directory) {}
  std::optional<CaseOutcome> recorded(std::string_view id, std::string_view version) const override {
    return directory_.store().recorded(id, version);
  }
  void append(const CaseOutcome& outcome) override { directory_.append(outcome); }

 private:
  RunDirectory& directory_;
};

/// Options for loading the sweep: what `--mode` says decides what the file must hold.
Result<LoadOptions> sweep_options(const RunFlags& flags) {
  std::vector<std::string> set = flags.set;
  if (!flags.backend.empty()) set.push_back("backend=" + flags.backend);
  if (!flags.transport.empty())
    set.push_back("transport=" + flags.transport);
  else if (flags.backend == "cuda")
    set.push_back("transport=one-gpu");
  LoadOptions options = load_options(flags.machine_file, set);
  if (flags.mode.empty()) return options;
  options.mode = mode_named(flags.mode);
  if (options.mode) return options;
  return Error{ExitCode::kUsage, fmt::format("--mode {} is unknown", flags.mode), "use simulate, measure or both", {}};
}

/// Predicted seconds of every runnable case, by lowering and simulating it.
double expected_seconds(const Expansion& expansion) {
  double seconds = 0;
  for (const Point& point : expansion.points) {
    if (point.refusal) continue;
    const auto chosen = decide(point.config);
    if (!chosen.ok()) continue;
    const auto placed = prepare(*chosen);
    if (!placed.ok()) continue;
    const auto predicted = predict_case(*chosen, *placed);
    const Measure& m = point.config.measure;
    if (predicted.ok()) seconds += predicted->figures.step_s * static_cast<double>(m.warmup + m.steps * m.repeat);
  }
  return seconds;
}

/// What predicts the sweep: the flag, or the file. Only the timeline predicts what can be laid beside a measurement.
Result<Resolution> resolution_for(const RunFlags& flags, const Sweep& sweep, Mode mode) {
  const auto named = resolution_named(flags.resolution);
  if (!flags.resolution.empty() && !named)
    return Error{
        ExitCode::kUsage, fmt::format("--resolution {} is unknown", flags.resolution), "use timeline, segments or analytic", {}};
  const Resolution resolution = named.value_or(resolution_of(sweep));
  if (resolution == Resolution::kTimeline || mode == Mode::kSimulate) return resolution;
  return Error{ExitCode::kUsage,
               fmt::format("mode {} at the {} resolution, which has no {}", name_of(mode), name_of(resolution),
                           resolution == Resolution::kAnalytic ? "plan to measure" : "trace to compare a measurement with"),
               "use --mode simulate, or --resolution timeline",
               {}};
}

/// Which cases keep their traces: the flag, or the file.
Result<Traces> traces_for(const RunFlags& flags, const Sweep& sweep) {
  if (flags.traces.empty()) return traces_of(sweep);
  if (const auto named = traces_named(flags.traces)) return *named;
  return Error{ExitCode::kUsage, fmt::format("--traces {} is unknown", flags.traces), "use none, measured or all", {}};
}

/// Says what the traces of these points take on disk. They are much the largest of a run's files.
void announce_traces(std::span<const Point> points, const std::string& out) {
  int64_t files = 0, bytes = 0;
  for (const Point& point : points) {
    const CaseFiles of_case{out + "/" + point.id};
    for (const std::string& trace : {of_case.predicted(), of_case.measured(), of_case.chrome()}) {
      std::error_code failure;
      const auto size = std::filesystem::file_size(trace, failure);
      if (!failure) ++files, bytes += static_cast<int64_t>(size);
    }
  }
  if (files > 0)
    fmt::print(stderr, "traces: {} files, {}, in {}/*/; --traces none leaves them out\n", files, bytes_text(bytes), out);
}

/// A directory holds one sweep, which --resume goes on with. A run that ended before its first case left nothing to go on with.
Result<void> check_directory(const RunFlags& flags, const std::string& out, const RunDirectory& directory, const Sweep& sweep) {
  if (directory.size() == 0) return {};
  if (!flags.resume)
    return Error{ExitCode::kUsage,
                 fmt::format("{} already holds results", out),
                 fmt::format("go on with --resume, which keeps what is there and runs the rest; begin again with another --out; "
                             "`shardlab report {}` shows what is there",
                             shell_word(out)),
                 {}};
  const auto runs = directory.store().runs();
  if (runs.empty() || runs.back().sweep == sweep.name()) return {};
  return Error{ExitCode::kUsage,
               fmt::format("{} holds results of the sweep `{}`, and this one is `{}`", out, runs.back().sweep, sweep.name()),
               "name another --out", sweep.file()};
}

/// The ids of the sweep's points where the directory holds others beside the `done` ones, of an earlier text of the sweep; else
/// none.
std::set<std::string> ids_beside_others(const Sweep& sweep, Resolution resolution, bool afresh, int64_t done,
                                        const RunDirectory& directory) {
  std::set<std::string> ids;
  if (afresh || (resolution == Resolution::kAnalytic && directory.size() <= done)) return ids;  // every one of them was saved
  (void)expand_each(sweep, resolution, [&](const Point& point) { return ids.insert(point.id), true; });
  int64_t others = 0;
  directory.for_each([&](const CaseOutcome& outcome) { others += ids.contains(outcome.case_id) ? 0 : 1; });
  if (others == 0) return {};
  fmt::print(stderr, "{} of the directory's results are of points that this sweep no longer has: they stay in results.csv\n",
             others);
  return ids;
}

/// Opens every data set that the sweep trains on: what no case could read, or validate on, is refused before anything runs.
Result<void> check_data(const Expansion& expansion, Mode mode) {
  if (mode == Mode::kSimulate) return {};
  // And the sequences of its validation split.
  std::map<std::tuple<std::string, std::string, bool, int64_t, int64_t, int64_t>, int64_t> opened;
  for (const Point& point : expansion.points) {
    const Case& c = point.config;
    if (point.refusal) continue;
    const auto [known, first] = opened.emplace(
        std::tuple(c.data.text, c.data.tokens, c.data.packed, c.data.document_end, c.train.seq_len, c.model.vocab), 0);
    if (first) {
      const auto data = open_dataset(c.data, {c.train.seq_len, c.model.vocab, kValidationFraction, c.train.seed});
      if (!data.ok()) return data.error();
      known->second = data->validation_sequences();
    }
    SHARDLAB_TRY(check_validation(c, known->second));
  }
  return {};
}

/// Refuses before anything runs what no case of the sweep could be measured on.
Result<void> check_backends(const Expansion& expansion, Mode mode) {
  if (mode == Mode::kSimulate) return {};
  for (const Point& point : expansion.points)
    if (!point.refusal) SHARDLAB_TRY(check_backend(point.config.backend));
  return {};
}

/// Refuses the same sweep as each of several processes that a launcher has started: over mpi they are meant to be one job.
Result<void> check_job(const Expansion& expansion, Mode mode) {
  const auto over_mpi = [](const Point& point) { return !point.refusal && point.config.transport == TransportKind::kMpi; };
  if (mode == Mode::kSimulate || std::ranges::none_of(expansion.points, over_mpi)) return {};
  const auto placement = find_job_place({}, process_environment());
  if (!placement.ok()) return placement.error();
  if (!*placement || (*placement)->world_size == 1) return {};
  return refusal(fmt::format("this is {}, and every one of them would run the whole sweep over mpi", to_string(**placement)),
                 "add --transport mpi, so that they are one job, or start `shardlab launch -n N run ...` without the launcher");
}

/// Refuses before anything runs what cannot be predicted: a local machine whose speed nobody measured.
Result<void> check_speed_known(const Expansion& expansion, Mode mode, const Search& search) {
  const bool first = estimates_first(search);
  if (mode == Mode::kMeasure && !first) return {};
  const std::string who = first ? fmt::format("search {}, which estimates first,", name_of(search.kind))
                                : fmt::format("mode {}, which predicts,", name_of(mode));
  for (const Point& point : expansion.points)
    if (!point.refusal) SHARDLAB_TRY(check_calibrated(point.config.machine, who));
  return {};
}

/// Refuses two cases that would save in one folder.
Result<void> check_checkpoint_folders(const Expansion& expansion) {
  std::set<std::string> folders;
  for (const Point& point : expansion.points) {
    const Checkpointing& c = point.config.checkpoint;
    if (point.refusal || c.folder.empty() || folders.insert(c.folder).second) continue;
    return Error{ExitCode::kUsage,
                 fmt::format("two cases save their checkpoints in {}", c.folder),
                 "leave checkpoint.folder out: each case then has a folder of its own in the run directory",
                 {}};
  }
  return {};
}

/// Of more cases than a person reads, those predicted to be fastest.
std::vector<CaseOutcome> fastest(const std::vector<CaseOutcome>& outcomes, size_t most) {
  std::vector<CaseOutcome> some;
  std::vector<std::pair<double, size_t>> order;
  for (size_t i = 0; i < outcomes.size(); ++i)
    if (outcomes[i].status == Status::kOk && outcomes[i].predicted) order.emplace_back(outcomes[i].predicted->step_s, i);
  std::ranges::sort(order);
  for (size_t i = 0; i < std::min(most, order.size()); ++i) some.push_back(outcomes[order[i].second]);
  return some;
}

/// Names of cases that the claims speak of: CASE.COLUMN.
std::set<std::string> named_in(const std::vector<Claim>& claims) {
  std::set<std::string> names;
  for (const Claim& claim : claims) {
    std::string word;
    for (const char c : claim.check + " ") {
      if (std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_' || c == '-') {
        word += c;
        continue;
      }
      if (c == '.' && !word.empty()) names.insert(word);
      word.clear();
    }
  }
  return names;
}

constexpr size_t kReadable = 2000, kShown = 20;

/// For other programs: every case, a few at a time.
void print_every_case(const RunDirectory& directory, const std::function<bool(const CaseOutcome&)>& wanted, TableFormat format) {
  std::vector<CaseOutcome> all;
  bool begun = false;
  const auto flush = [&] {
    std::string text = print_table(case_table(all, summary_columns()), format);
    if (begun) text = text.substr(print_table(case_table({}, summary_columns()), format).size());
    fmt::print("{}", text);
    begun = true;
    all.clear();
  };
  directory.for_each([&](const CaseOutcome& outcome) {
    if (!wanted(outcome)) return;
    all.push_back(outcome);
    all.back().ops.clear();
    if (format == TableFormat::kCsv && all.size() == kReadable) flush();
  });
  if (!begun || !all.empty()) flush();
}

/// What a person is shown of a run, however many cases it has.
struct Digest {
  explicit Digest(const std::vector<Claim>& claims) : selector(kReadable, named_in(claims)) {}
  void add(const CaseOutcome& outcome) {
    selector.add(outcome);
    count_refused(outcome, refused);
  }
  Selector selector;
  Reasons refused;
};

/// What the sweep leaves open and cases therefore have by default, by the keys that say otherwise; empty where nothing is.
std::string assumed_text(const Sweep& sweep, std::span<const CaseOutcome> cases) {
  constexpr std::string_view kAsked[] = {"train.seq_len",   "train.micro_batch",  "train.grad_accumulation",
                                         "train.precision", "train.optimizer",    "layout.schedule",
                                         "profile",         "execution.attention"};
  std::string text;
  for (const std::string_view path : kAsked) {
    const CaseKey* key = find_key(path);
    SHARDLAB_CHECK(key != nullptr, "no key has the path {}", path);
    if (says(sweep, path) || (path == "train.grad_accumulation" && says(sweep, "train.global_batch_tokens"))) continue;
    std::set<std::string> values;
    for (const CaseOutcome& o : cases)
      if (o.status != Status::kRefused && (path != "layout.schedule" || o.config.layout.pp > 1)) values.insert(key->get(o.config));
    values.erase("auto");  // nothing is assumed: the case decides
    if (!values.empty()) text += fmt::format("{}{}={}", text.empty() ? "" : " ", key->word(), fmt::join(values, " or "));
  }
  return text.empty()
             ? text
             : fmt::format("assumed, as the sweep does not say: {}; otherwise: the key in the file, or --set KEY=VALUE", text);
}

void print_results(Digest& digest, const Sweep& sweep) {
  const std::vector<Claim>& claims = sweep.claims();
  const Selection selection = digest.selector.take();
  if (!selection.complete()) {
    print_rows(fastest(selection.cases, kShown));
    fmt::print("\nthe fastest of {} cases\n\n", selection.total);
    print_reasons(digest.refused);
  } else {
    print_cases(selection.cases);
  }
  fmt::print("\n");
  print_statements(verdicts(claims, selection.cases));
  print_statements(statements(selection.cases, summarise(selection.cases, selection.left_out)));
  std::fflush(stdout);  // both may go to one file
  if (const std::string assumed = assumed_text(sweep, selection.cases); !assumed.empty())
    fmt::print(stderr, "\n{}\n", wrapped(assumed, terminal_width(), 2));
}

Result<DriveSummary> drive_cases(std::span<const Point> points, RunDirectory& directory, const std::string& out,
                                 const Invocation& invocation, const RunFlags& flags, Resolution resolution, Traces traces,
                                 const DriveOptions& options, Seats* seats) {
  ProcessCaseRunner runner(out, invocation.program, interrupt::asked(), flags.replay, resolution, traces, flags.share, seats,
                           flags.restarts);
  DirectorySink sink(directory);
  ProgressPrinter progress(stderr_is_terminal());
  const SteadyClock clock;
  auto summary = drive(points, runner, sink, progress, clock, options);
  progress.end();
  return summary;
}

/// Progress of one part of many, told as that of the whole. What is finished goes into the digest, where there is one.
class PartProgress final : public ProgressSink {
 public:
  PartProgress(ProgressSink& whole, const Clock& clock, int64_t total, Digest* digest)
      : whole_(whole), clock_(clock), begin_(clock.now()), digest_(digest) {
    before_.total = total;
  }
  void started(const Point& point, const Progress& part) override { whole_.started(point, sum(part)); }
  void finished(const CaseOutcome& outcome, const Progress& part) override {
    if (digest_ != nullptr) digest_->add(outcome);
    whole_.finished(outcome, sum(part));
  }
  void end_part(const Progress& part) { before_ = sum(part); }
  const Progress& done() const { return before_; }

 private:
  Progress sum(const Progress& part) const {
    Progress p = before_;
    for (int64_t Progress::*count : {&Progress::done, &Progress::skipped, &Progress::ok, &Progress::refused, &Progress::oom,
                                     &Progress::timeout, &Progress::failed})
      p.*count += part.*count;
    p.elapsed_s = clock_.now() - begin_;
    p.remaining_s.reset();
    if (p.done > 0) p.remaining_s = p.elapsed_s / static_cast<double>(p.done) * static_cast<double>(p.total - p.done);
    return p;
  }

  ProgressSink& whole_;
  const Clock& clock_;
  double begin_;
  Digest* digest_;
  Progress before_;
};

/// Parts of a sweep's points, made on a thread of its own, a few ahead of who takes them.
class PointParts {
 public:
  explicit PointParts(const Sweep& sweep) : maker_([this, &sweep] { make(sweep); }) {}
  ~PointParts() {
    {
      const std::lock_guard lock(mutex_);
      stopped_ = true;
    }
    changed_.notify_all();
    maker_.join();
  }
  PointParts(const PointParts&) = delete;
  PointParts& operator=(const PointParts&) = delete;

  /// The next part; empty after the last. The error is an expression that cannot be evaluated.
  Result<std::vector<Point>> next() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return !made_.empty() || ended_; });
    if (made_.empty()) {
      if (thrown_) std::rethrow_exception(thrown_);
      if (failure_) return *failure_;
      return std::vector<Point>();
    }
    std::vector<Point> part = std::move(made_.front());
    made_.pop_front();
    changed_.notify_all();
    return part;
  }

 private:
  static constexpr size_t kPart = 256, kAhead = 3;

  void make(const Sweep& sweep) {
    std::vector<Point> part;
    try {
      const auto expanded = expand_each(sweep, Resolution::kAnalytic, [&](Point&& point) {
        if (part.empty()) part.reserve(kPart);
        part.push_back(std::move(point));
        return part.size() < kPart || hand_over(std::exchange(part, {}));
      });
      if (!part.empty() && expanded.ok()) hand_over(std::move(part));
      const std::lock_guard lock(mutex_);
      if (!expanded.ok()) failure_ = expanded.error();
      ended_ = true;
    } catch (...) {
      const std::lock_guard lock(mutex_);
      thrown_ = std::current_exception();
      ended_ = true;
    }
    changed_.notify_all();
  }

  bool hand_over(std::vector<Point> part) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return stopped_ || made_.size() < kAhead; });
    if (stopped_) return false;
    made_.push_back(std::move(part));
    changed_.notify_all();
    return true;
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::vector<Point>> made_;
  std::optional<Error> failure_;
  std::exception_ptr thrown_;
  bool ended_ = false;    ///< nothing more is made
  bool stopped_ = false;  ///< nobody will take any more
  std::thread maker_;
};

/// Makes, estimates and saves the points of a sweep a part at a time, so that a million take the memory of a few thousand.
Result<DriveSummary> drive_analytic(const Sweep& sweep, const ExpansionCounts& counts, RunDirectory& directory, Digest* digest,
                                    const DriveOptions& options) {
  AnalyticCaseRunner runner;
  BatchSink sink(directory, options.program_version);
  SparseProgress told;
  const SteadyClock clock;
  PartProgress progress(told, clock, counts.points, digest);
  DriveSummary whole;
  whole.exit = ExitCode::kNo;
  PointParts parts(sweep);
  while (!whole.interrupted) {
    const auto part = parts.next();
    if (part.ok() && part->empty()) break;
    const auto summary = part.ok() ? drive(*part, runner, sink, progress, clock, options) : Result<DriveSummary>(part.error());
    if (!summary.ok()) {
      sink.flush();
      return summary.error();
    }
    progress.end_part(summary->progress);
    whole.interrupted = summary->interrupted;
    // Failures outweigh cases that are ok, and these what could not run.
    if (summary->interrupted || summary->exit == ExitCode::kSomeFailed || whole.exit == ExitCode::kNo) {
      if (whole.exit != ExitCode::kSomeFailed || summary->interrupted) whole.exit = summary->exit;
    }
  }
  sink.flush();
  whole.progress = progress.done();
  return whole;
}

/// Rows that go beyond what a person reads are counted first and made when they are asked for; of fewer points all are kept.
struct Points {
  Expansion kept;  ///< at the timeline's and segments' resolutions
  ExpansionCounts counts;
  Reasons refusals;
  std::string calibration_id;
};

enum class Needed : uint8_t { kOne, kCounts, kAll };

/// kOne: the first point tells what the rest has; the counts are then the most that there can be.
Result<Points> points_of(const Sweep& sweep, Resolution resolution, Needed needed) {
  Points points;
  auto counts = expand_each(sweep, resolution, [&](Point point) {
    if (point.refusal) points.refusals.add(reason_of(*point.refusal), point.name);
    if (point.config.machine.calibration) points.calibration_id = point.config.machine.calibration->id;
    if (needed == Needed::kAll) points.kept.points.push_back(std::move(point));
    return needed != Needed::kOne;
  });
  if (!counts.ok()) return counts.error();
  points.counts = *counts;
  if (needed == Needed::kOne) points.counts.points = counts->combinations + counts->included;
  const Search& search = search_of(sweep);
  if (needed == Needed::kOne && search.kind == SearchKind::kRandom)
    points.counts.points = std::min(counts->combinations, search.count) + counts->included;
  return points;
}

/// One of `of` parts of a sweep's points, which take them in turn; from 1.
struct Shard {
  int number = 1, of = 1;
};

Result<Shard> shard_for(const RunFlags& flags, Resolution resolution) {
  constexpr int64_t kMost = 1 << 20;
  if (flags.shard.empty()) return Shard();
  const size_t slash = flags.shard.find('/');
  const auto number = parse_count(flags.shard.substr(0, slash));
  const auto of = slash == std::string::npos ? std::nullopt : parse_count(flags.shard.substr(slash + 1));
  if (!number || !of || *of < 1 || *of > kMost || *number < 1 || *number > *of)
    return refusal(fmt::format("--shard {} is not a part of a sweep", flags.shard),
                   "use 1/4 for the first of four parts, 4/4 for the last");
  if (resolution == Resolution::kAnalytic)
    return refusal("--shard at the analytic resolution, at which one process has all points soon", "leave it out");
  return Shard{static_cast<int>(*number), static_cast<int>(*of)};
}

/// Leaves the points of the shard.
void keep_shard(Points& points, const Shard& shard) {
  if (shard.of == 1) return;
  std::vector<Point> kept;
  points.refusals = {};
  points.counts.refused = 0;
  for (size_t i = static_cast<size_t>(shard.number - 1); i < points.kept.points.size(); i += static_cast<size_t>(shard.of)) {
    Point& point = points.kept.points[i];
    if (point.refusal) points.refusals.add(reason_of(*point.refusal), point.name), ++points.counts.refused;
    kept.push_back(std::move(point));
  }
  points.counts.points = static_cast<int64_t>(kept.size());
  points.kept.points = std::move(kept);
}

/// Counts, reasons and the expected time; nothing runs.
ExitCode dry_run(const Sweep& sweep, const Points& points, Mode mode, TableFormat format) {
  const Expansion& expansion = points.kept;
  const ExpansionCounts& counts = points.counts;
  if (format != TableFormat::kTable) {
    std::vector<CaseOutcome> rows;
    for (const Point& point : expansion.points) {
      CaseOutcome row;
      row.case_id = point.id;
      row.config = point.config;
      row.status = point.refusal ? Status::kRefused : Status::kOk;
      if (point.refusal) row.reason = reason_of(*point.refusal);
      rows.push_back(std::move(row));
    }
    constexpr std::string_view kColumns[] = {"case_id", "name", "status", "reason",   "model",       "world_size",       "dp",
                                             "tp",      "pp",   "zero",   "schedule", "micro_batch", "grad_accumulation"};
    print(case_table(rows, kColumns), format);
    return counts.runnable() > 0 ? ExitCode::kDone : ExitCode::kNo;
  }
  std::string parts;
  for (const auto& [number, words] : {std::pair{counts.combinations, counts.combinations == 1 ? "combination" : "combinations"},
                                      {counts.excluded, "excluded"},
                                      {counts.included, "listed under include"},
                                      {counts.duplicates, "left out, as they repeat another"}})
    if (number > 0) parts += fmt::format("{}{} {}", parts.empty() ? "" : ", ", number, words);
  fmt::print("{}: {}\n{} point{}: {} to run, {} refused\n", sweep.name(), parts.empty() ? "no combinations" : parts, counts.points,
             counts.points == 1 ? "" : "s", counts.runnable(), counts.refused);
  if (counts.runnable() > 0) fmt::print("some of those to run may still be refused, or not fit, once they are planned\n");
  if (const Search& search = search_of(sweep); estimates_first(search))
    fmt::print("search {}: all are estimated, at most {} run\n", name_of(search.kind),
               survivors(static_cast<size_t>(counts.runnable()), search.kind == SearchKind::kHalving ? search.keep : 1));
  print_reasons(points.refusals);
  const bool timed = std::ranges::all_of(expansion.points,
                                         [](const Point& p) { return p.refusal || check_calibrated(p.config.machine, "").ok(); });
  if (mode != Mode::kSimulate && counts.runnable() > 0 && !timed) {
    fmt::print("expected time: not known, as this machine is not calibrated (`shardlab calibrate`)\n");
  } else if (mode != Mode::kSimulate && counts.runnable() > 0) {
    const double training = expected_seconds(expansion);
    fmt::print("expected time: {} of training steps, and about {} to start the cases\n", seconds_text(training),
               seconds_text(0.3 * static_cast<double>(counts.runnable())));
  }
  return counts.runnable() > 0 ? ExitCode::kDone : ExitCode::kNo;
}

Result<ExitCode> run(const RunFlags& flags, const Invocation& invocation, Seats* seats) {
  const auto format = parse_format(flags.format);
  if (!format.ok()) return format.error();
  if (flags.mode != "simulate") SHARDLAB_TRY(check_backend(flags.backend == "cuda" ? BackendKind::kCuda : BackendKind::kCpu));
  const auto options = sweep_options(flags);
  if (!options.ok()) return options.error();
  if (is_there(flags.sweep + "/results.sqlite"))
    return Error{ExitCode::kUsage,
                 fmt::format("{} is the directory of a run, and `run` takes a sweep file", flags.sweep),
                 fmt::format("name the sweep file; `shardlab report {}` shows what ran", flags.sweep),
                 {}};
  const auto sweep = load_sweep(shipped_or_here(flags.sweep), *options);
  if (!sweep.ok()) return sweep.error();
  const Mode mode = options->mode.value_or(sweep->mode());
  const auto resolution = resolution_for(flags, *sweep, mode);
  if (!resolution.ok()) return resolution.error();
  const auto traces = traces_for(flags, *sweep);
  if (!traces.ok()) return traces.error();
  const bool analytic = *resolution == Resolution::kAnalytic;
  // Of analytic points there may be a million: those are made again, a part at a time, where they are needed. A dry run needs
  // points for the rows that it prints and for the time that measuring takes; else it counts.
  const bool rows = *format != TableFormat::kTable;
  // Expressions that cannot be evaluated at some point end the sweep before it begins.
  const auto shard = shard_for(flags, *resolution);
  if (!shard.ok()) return shard.error();
  const bool keep = flags.dry_run ? rows || mode != Mode::kSimulate || shard->of > 1 : !analytic;
  const Search& search = search_of(*sweep);
  const bool random = search.kind == SearchKind::kRandom;  // its points are those that differ
  const bool one = analytic && !flags.dry_run && (!has_rules(*sweep) || !random);
  auto points = points_of(*sweep, *resolution, keep ? Needed::kAll : one ? Needed::kOne : Needed::kCounts);
  if (!points.ok()) return points.error();
  if (one && has_rules(*sweep)) {
    const auto counts = check_rules(*sweep);
    if (!counts.ok()) return counts.error();
    points->counts = *counts;
  }
  SHARDLAB_TRY(check_search(search, sweep->file(), *resolution, shard->of > 1));
  keep_shard(*points, *shard);
  if (flags.dry_run) return dry_run(*sweep, *points, mode, *format);
  const Expansion& expansion = points->kept;

  const bool plain = sweep->name().find('/') == std::string::npos && !sweep->name().starts_with(".") &&
                     sweep->name().find_first_of("\n\t") == std::string::npos && visible(sweep->name()) == sweep->name();
  if (flags.out.empty() && !plain)
    return Error{ExitCode::kUsage, fmt::format("the sweep's name `{}` cannot be that of a run directory", sweep->name()),
                 "call it by a word without slashes and control characters, or name the directory with --out", sweep->file()};
  const std::string part = shard->of == 1 ? "" : fmt::format(".shard-{}-of-{}", shard->number, shard->of);
  const std::string out = flags.out.empty() ? "runs/" + sweep->name() + part : flags.out;
  SHARDLAB_TRY(check_backends(expansion, mode));
  if (seats == nullptr) SHARDLAB_TRY(check_job(expansion, mode));
  SHARDLAB_TRY(check_speed_known(expansion, mode, search));
  SHARDLAB_TRY(check_data(expansion, mode));
  SHARDLAB_TRY(check_checkpoint_folders(expansion));
  RunMetadata metadata = describe_environment(invocation.command());
  const std::string estimates_version = fmt::format("{} {}", metadata.program_version, name_of(Resolution::kAnalytic));
  // Rows of another resolution are asked again.
  if (*resolution != Resolution::kTimeline) metadata.program_version += fmt::format(" {}", name_of(*resolution));
  metadata.sweep = sweep->name();
  metadata.traces = name_of(*resolution == Resolution::kTimeline ? *traces : Traces::kNone);
  metadata.claims = sweep->claims();
  metadata.loss_target = sweep->loss_target();
  metadata.calibration_id = points->calibration_id;
  DriveOptions drive_options;
  drive_options.mode = mode;
  drive_options.resume = flags.resume;
  drive_options.program_version = metadata.program_version;
  drive_options.jobs = flags.jobs;
  drive_options.interrupted = &interrupt::asked();
  SHARDLAB_TRY(check(drive_options));
  auto lock = RunLock::take(out, metadata.command);
  if (!lock.ok()) return lock.error();
  auto directory = RunDirectory::open(std::move(*lock));
  if (!directory.ok()) return directory.error();
  SHARDLAB_TRY(check_directory(flags, out, *directory, *sweep));
  directory->begin(metadata);

  interrupt::ask_on_signal(invocation.command() + (flags.resume ? "" : " --resume"));
  // What is made here is not read back.
  Digest digest(sweep->claims());
  const bool afresh = analytic && directory->size() == 0;
  std::optional<PointSearch> chosen;
  if (estimates_first(search)) {
    auto begun = PointSearch::begin(search, expansion.points, *directory, {metadata.program_version, estimates_version});
    if (!begun.ok()) {
      directory->finish();
      return begun.error();
    }
    chosen.emplace(std::move(begun).value());
    drive_options.enough = chosen->enough();
  }
  const auto summary = analytic ? drive_analytic(*sweep, points->counts, *directory, afresh ? &digest : nullptr, drive_options)
                                : drive_cases(chosen ? chosen->points() : expansion.points, *directory, out, invocation, flags,
                                              *resolution, *traces, drive_options, seats);
  directory->finish();
  if (!summary.ok()) return summary.error();
  if (chosen && !summary->interrupted) fmt::print(stderr, "{}\n", chosen->conclusion());
  const auto ids = ids_beside_others(*sweep, *resolution, afresh, summary->progress.done, *directory);
  const auto of_sweep = [&](const CaseOutcome& outcome) { return ids.empty() || ids.contains(outcome.case_id); };
  if (*format != TableFormat::kTable) {
    print_every_case(*directory, of_sweep, *format);
  } else {
    if (!afresh)
      directory->for_each([&](const CaseOutcome& outcome) {
        if (of_sweep(outcome)) digest.add(outcome);
      });
    print_results(digest, *sweep);
  }
  std::fflush(stdout);  // both may go to one file
  fmt::print(stderr, "\nresults: {0}/results.csv, {0}/results.sqlite\n", out);
  if (*resolution == Resolution::kTimeline) announce_traces(expansion.points, out);
  if (summary->interrupted) interrupt::say_how_to_go_on();
  return summary->exit;
}

}  // namespace

namespace {

/// As the first process of a job, or as one of the others. `launch` says which, or with transport mpi its launcher.
Result<ExitCode> run_in_job(RunFlags flags, const Invocation& invocation) {
  SHARDLAB_TRY(check_restarts(flags.restarts));
  // What mpirun starts with this transport is one job without further words.
  const bool mpi = flags.transport == name_of(TransportKind::kMpi);
  if (!mpi && !flags.placement.any()) return run(flags, invocation, nullptr);
  const auto placement = find_job_place(flags.placement, process_environment());
  if (!placement.ok()) return placement.error();
  if (!*placement || (!mpi && (*placement)->world_size == 1)) return run(flags, invocation, nullptr);
  if (flags.restarts.most > 0)
    return refusal("--restarts in a job of several processes, which its launcher starts and ends",
                   "let the launcher restart the job, with checkpoint.save_every and checkpoint.resume, or start the processes "
                   "here: launch -n N");
  if ((*placement)->rank > 0) return follow(**placement, invocation.program, kJoin_s);
  Seats seats(**placement, kJoin_s);
  flags.share.processes = seats.processes();
  return run(flags, invocation, &seats);
}

}  // namespace

void add_run(CLI::App& app, Action& action, const Invocation& invocation) {
  auto* verb = app.add_subcommand("run", "runs a sweep: predicts its cases, measures them, or both");
  auto flags = std::make_shared<RunFlags>();
  verb->add_option("sweep", flags->sweep, "the sweep file (sweeps/README.md is its reference)")->required();
  verb->add_option("--mode", flags->mode, "simulate, measure or both, instead of the file's");
  verb->add_option("--resolution", flags->resolution,
                   "timeline, segments (the same figures sooner, no trace) or analytic (no folders: many points, other "
                   "frameworks), instead of the file's");
  verb->add_option("--out", flags->out, "the run directory; runs/NAME by default");
  verb->add_option("--shard", flags->shard,
                   "I/N: every N-th point, from the I-th on, for one of N machines; `merge` puts the parts together");
  verb->add_option(
      "--traces", flags->traces,
      "which cases keep their traces, of which a report draws timelines: none, measured or all, instead of the file's; "
      "measured by default, so that simulated sweeps keep none");
  verb->add_option("--machine-file", flags->machine_file, "calibrated machine file that `machine: {local: true}` means");
  verb->add_option("--backend", flags->backend,
                   "cpu, cuda or dry (memory and wire bytes are counted, nothing is computed), instead of the file's; cuda with "
                   "transport one-gpu, or --transport");
  verb->add_option("--transport", flags->transport, "threads, processes, tcp, gloo, mpi, one-gpu or nccl, instead of the file's");
  verb->add_option(
          "--processes", flags->share.processes,
          "with transport processes, tcp, gloo or mpi: processes that a case's ranks are shared out to; one a rank by default")
      ->check(number_in(1, 4096));
  verb->add_option("--launcher", flags->share.launcher,
                   "with transport mpi: the command that starts a case's processes, `-n N` follows; mpirun by default");
  verb->add_option("--ranks-per-process", flags->share.ranks_per_process, "in place of --processes: ranks of each process")
      ->check(number_in(1, 4096));
  add_restart_flags(*verb, flags->restarts);
  add_job_place_flags(*verb, flags->placement, "");
  verb->add_option("--set", flags->set, "key=value instead of what the file says; may be repeated");
  verb->add_option("--replay", flags->replay,
                   "a run directory: parameter servers with a staleness repeat the arrivals that its cases logged");
  verb->add_flag("--dry-run", flags->dry_run,
                 "run nothing: print counts and reasons, and where cases are measured the expected time");
  verb->add_flag("--resume", flags->resume, "skip cases that the run directory already has");
  verb->add_option("--jobs", flags->jobs, "cases at once, with --mode simulate")->check(number_in(1, 1024));
  add_format(*verb, flags->format);
  verb->callback([&action, &invocation, flags] { action = [flags, &invocation] { return run_in_job(*flags, invocation); }; });
}

}  // namespace shardlab::cli
