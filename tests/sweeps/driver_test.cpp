// The driver with fakes: order, resume, failures that cost one case, interruption, exit codes, jobs.
#include "sweeps/driver.h"

#include <filesystem>
#include <map>
#include <mutex>
#include <thread>

#include "plan/base/world_error.h"
#include "tests/namespaces.h"
#include "tests/test.h"

using namespace shardlab;
using namespace shardlab::testing;

namespace {

class FakeClock : public Clock {
 public:
  double now() const override { return time; }
  double time = 100;
};

class FakeRunner : public CaseRunner {
 public:
  CaseOutcome run(const sweeps::Point& point, Mode) override {
    const Case& config = point.config;
    const std::lock_guard lock(mutex);
    ran.push_back(config.name);
    if (clock) clock->time += 2;
    if (interrupt && config.name == interrupt_at) interrupt->store(true);
    if (broken == config.name) throw WorldError("rank 1 died", "look at its log");
    if (blocked == config.name)
      throw std::filesystem::filesystem_error("cannot make it", std::make_error_code(std::errc::no_space_on_device));
    CaseOutcome outcome;
    outcome.config = config;
    outcome.status = statuses.contains(config.name) ? statuses[config.name] : Status::kOk;
    if (predicted_bytes > 0) {
      outcome.predicted.emplace();
      outcome.predicted->arena_bytes = predicted_bytes;
    }
    return outcome;
  }
  std::mutex mutex;
  std::vector<std::string> ran;
  std::map<std::string, Status> statuses;
  std::string broken, blocked, interrupt_at;
  std::atomic<bool>* interrupt = nullptr;
  FakeClock* clock = nullptr;
  int64_t predicted_bytes = 0;
};

class FakeSink : public ResultSink {
 public:
  std::optional<CaseOutcome> recorded(std::string_view case_id, std::string_view version) const override {
    const auto it = known.find(std::string(case_id) + "/" + std::string(version));
    if (it == known.end()) return std::nullopt;
    return it->second;
  }
  void append(const CaseOutcome& outcome) override {
    if (appended.size() == full_after) throw WorldError("the disk is full", "free some space");
    appended.push_back(outcome);
  }
  /// A stored outcome; one that is ok was predicted, and measured if `measured` is set.
  void know(const Point& point, const std::string& version, Status status, bool measured = false) {
    CaseOutcome& outcome = known[point.id + "/" + version];
    outcome.status = status;
    if (status != Status::kOk) return;
    outcome.predicted.emplace().step_s = 3;
    if (measured) outcome.measured.emplace().step_s = 4;
  }
  std::map<std::string, CaseOutcome> known;
  std::vector<CaseOutcome> appended;
  size_t full_after = static_cast<size_t>(-1);
};

class FakeProgress : public ProgressSink {
 public:
  void started(const Point& point, const Progress&) override { started_names.push_back(point.name); }
  void finished(const CaseOutcome&, const Progress& p) override { seen.push_back(p); }
  std::vector<std::string> started_names;
  std::vector<Progress> seen;
};

std::vector<Point> points_named(const std::vector<std::string>& names) {
  std::vector<Point> points;
  for (const std::string& name : names) {
    Point p;
    p.name = name;
    p.id = "id-" + name;
    p.config.name = name;
    p.config.machine.device.memory_bytes = 1000;
    points.push_back(p);
  }
  return points;
}

struct Stage {
  FakeRunner runner;
  FakeSink sink;
  FakeProgress progress;
  FakeClock clock;
  DriveOptions options{Mode::kBoth, false, "v1", 1, nullptr};

  Result<DriveSummary> drive(const std::vector<Point>& points) {
    runner.clock = &clock;
    return sweeps::drive(points, runner, sink, progress, clock, options);
  }
};

std::vector<std::string> ids_of(const FakeSink& sink) {
  std::vector<std::string> ids;
  for (const CaseOutcome& o : sink.appended) ids.push_back(o.case_id);
  return ids;
}

using Names = std::vector<std::string>;

}  // namespace

TEST_CASE("points run in order, each saved before the next, with progress") {
  Stage s;
  const auto summary = s.drive(points_named({"a", "b", "c"}));
  REQUIRE(summary.ok());
  CHECK(summary->exit == ExitCode::kDone);
  CHECK_FALSE(summary->interrupted);
  CHECK(s.runner.ran == Names{"a", "b", "c"});
  CHECK(ids_of(s.sink) == Names{"id-a", "id-b", "id-c"});
  CHECK(s.progress.started_names == Names{"a", "b", "c"});
  REQUIRE(s.progress.seen.size() == 3);
  CHECK(s.progress.seen[0].done == 1);
  CHECK(s.progress.seen[0].total == 3);
  CHECK(s.progress.seen[0].elapsed_s == 2.0);
  CHECK(s.progress.seen[0].remaining_s == 4.0);
  CHECK(s.progress.seen[2].remaining_s == 0.0);
  CHECK(summary->progress.ok == 3);
}

TEST_CASE("refused points stay, with their reason, and are not run") {
  Stage s;
  auto points = points_named({"a", "b"});
  points[0].refusal = Error{ExitCode::kUsage, "heads 12 is not divisible by tp=5", "choose tp among 1 2 3 4", {}};
  const auto summary = s.drive(points);
  REQUIRE(summary.ok());
  CHECK(summary->exit == ExitCode::kDone);
  CHECK(s.runner.ran == Names{"b"});
  REQUIRE(s.sink.appended.size() == 2);
  CHECK(s.sink.appended[0].status == Status::kRefused);
  CHECK(s.sink.appended[0].case_id == "id-a");
  CHECK(s.sink.appended[0].reason == "heads 12 is not divisible by tp=5; choose tp among 1 2 3 4");
  CHECK(s.progress.seen[1].refused == 1);
}

TEST_CASE("one broken case costs one row") {
  Stage s;
  s.runner.broken = "b";
  const auto summary = s.drive(points_named({"a", "b", "c"}));
  REQUIRE(summary.ok());
  CHECK(summary->exit == ExitCode::kSomeFailed);
  CHECK(s.runner.ran == Names{"a", "b", "c"});
  CHECK(s.sink.appended[1].status == Status::kFailed);
  CHECK(s.sink.appended[1].reason == "rank 1 died (look at its log)");
  CHECK(s.sink.appended[1].config.name == "b");
}

TEST_CASE("resume skips what this version finished") {
  Stage s;
  s.options.resume = true;
  const auto points = points_named({"ok", "refused", "oom", "failed", "timeout", "old", "new"});
  s.sink.know(points[0], "v1", Status::kOk);
  s.sink.know(points[1], "v1", Status::kRefused);
  s.sink.know(points[2], "v1", Status::kOom);
  s.sink.know(points[3], "v1", Status::kFailed);
  s.sink.know(points[4], "v1", Status::kTimeout);
  s.sink.know(points[5], "v0", Status::kOk);
  s.options.mode = Mode::kSimulate;
  const auto summary = s.drive(points);
  REQUIRE(summary.ok());
  // What the runner refused is asked again: the machine may have been calibrated since.
  CHECK(s.runner.ran == Names{"refused", "failed", "timeout", "old", "new"});
  CHECK(ids_of(s.sink) == Names{"id-refused", "id-failed", "id-timeout", "id-old", "id-new"});
  CHECK(summary->progress.skipped == 2);
  CHECK(summary->progress.done == 7);
  CHECK(summary->exit == ExitCode::kDone);
  // Without the flag everything runs again.
  s.options.resume = false;
  REQUIRE(s.drive(points).ok());
  CHECK(s.runner.ran.size() == 5 + 7);
}

TEST_CASE("resume runs again what lacks a half that the mode asks for, and keeps the other half") {
  const auto points = points_named({"predicted", "measured"});
  const auto ran_in = [&](Mode mode) {
    Stage s;
    s.options.resume = true;
    s.options.mode = mode;
    s.sink.know(points[0], "v1", Status::kOk);
    s.sink.know(points[1], "v1", Status::kOk, true);
    REQUIRE(s.drive(points).ok());
    for (const CaseOutcome& outcome : s.sink.appended) {
      REQUIRE(outcome.predicted);
      CHECK(outcome.predicted->step_s == 3);
    }
    return s.runner.ran;
  };
  CHECK(ran_in(Mode::kSimulate).empty());
  CHECK(ran_in(Mode::kMeasure) == Names{"predicted"});
  CHECK(ran_in(Mode::kBoth) == Names{"predicted"});
}

TEST_CASE("the exit code says what became of the sweep") {
  const auto exit_of = [](Status status, Mode mode, int64_t predicted_bytes = 0, bool with_good = false) {
    Stage s;
    s.options.mode = mode;
    s.runner.statuses["x"] = status;
    s.runner.predicted_bytes = predicted_bytes;
    return s.drive(points_named(with_good ? Names{"x", "good"} : Names{"x"}))->exit;
  };
  CHECK(exit_of(Status::kOk, Mode::kBoth) == ExitCode::kDone);
  CHECK(exit_of(Status::kFailed, Mode::kBoth, 0, true) == ExitCode::kSomeFailed);
  CHECK(exit_of(Status::kTimeout, Mode::kBoth, 0, true) == ExitCode::kSomeFailed);
  CHECK(exit_of(Status::kRefused, Mode::kBoth) == ExitCode::kNo);
  CHECK(exit_of(Status::kRefused, Mode::kBoth, 0, true) == ExitCode::kDone);
  // Over the budget by prediction: not runnable. Out of memory although it should have fitted: a failure.
  CHECK(exit_of(Status::kOom, Mode::kSimulate) == ExitCode::kNo);
  CHECK(exit_of(Status::kOom, Mode::kBoth, 2000) == ExitCode::kNo);
  CHECK(exit_of(Status::kOom, Mode::kBoth, 2000, true) == ExitCode::kDone);
  CHECK(exit_of(Status::kOom, Mode::kBoth, 500, true) == ExitCode::kSomeFailed);
  CHECK(exit_of(Status::kOom, Mode::kMeasure, 0, true) == ExitCode::kSomeFailed);
  Stage none;
  CHECK(none.drive({})->exit == ExitCode::kNo);
}

TEST_CASE("an interruption ends after the case it falls into") {
  Stage s;
  std::atomic<bool> interrupted{false};
  s.options.interrupted = &interrupted;
  s.runner.interrupt = &interrupted;
  s.runner.interrupt_at = "b";
  const auto summary = s.drive(points_named({"a", "b", "c"}));
  REQUIRE(summary.ok());
  CHECK(summary->interrupted);
  CHECK(summary->exit == ExitCode::kInterrupted);
  CHECK(ids_of(s.sink) == Names{"id-a", "id-b"});
  CHECK(summary->progress.done == 2);
}

TEST_CASE("a case that we end is not stored as one that failed: --resume runs it again") {
  Stage s;
  std::atomic<bool> interrupted{false};
  s.options.interrupted = &interrupted;
  s.runner.interrupt = &interrupted;
  s.runner.interrupt_at = "b";
  s.runner.statuses["b"] = Status::kFailed;
  const auto summary = s.drive(points_named({"a", "b", "c"}));
  REQUIRE(summary.ok());
  CHECK(summary->exit == ExitCode::kInterrupted);
  CHECK(ids_of(s.sink) == Names{"id-a"});
}

TEST_CASE("an exception of the standard library costs its row and nothing else") {
  Stage s;
  s.runner.blocked = "b";
  const auto summary = s.drive(points_named({"a", "b", "c"}));
  REQUIRE(summary.ok());
  CHECK(summary->exit == ExitCode::kSomeFailed);
  REQUIRE(s.sink.appended.size() == 3);
  CHECK(s.sink.appended[1].status == Status::kFailed);
  CHECK(s.sink.appended[1].reason.find("No space left on device") != std::string::npos);
  CHECK(s.sink.appended[2].status == Status::kOk);
}

TEST_CASE("a sink that cannot keep results ends the sweep as a failure of the environment") {
  Stage s;
  s.sink.full_after = 1;
  const auto summary = s.drive(points_named({"a", "b", "c"}));
  REQUIRE_FALSE(summary.ok());
  CHECK(summary.error().code == ExitCode::kEnvironment);
  CHECK(summary.error().message == "the disk is full");
  CHECK(summary.error().hint == "free some space");
  CHECK(s.runner.ran == Names{"a", "b"});
}

TEST_CASE("several jobs give the outcomes of one, in its order") {
  Names names;
  for (int i = 0; i < 200; ++i) names.push_back("p" + std::to_string(i));
  auto points = points_named(names);
  for (size_t i = 0; i < points.size(); i += 7) points[i].refusal = Error{ExitCode::kUsage, "no", {}, {}};
  Stage one, many;
  one.options.mode = many.options.mode = Mode::kSimulate;
  many.options.jobs = 4;
  one.runner.broken = many.runner.broken = "p5";
  const auto a = one.drive(points), b = many.drive(points);
  REQUIRE(a.ok());
  REQUIRE(b.ok());
  CHECK(ids_of(one.sink) == ids_of(many.sink));
  CHECK(many.runner.ran.size() == one.runner.ran.size());
  CHECK(a->progress.ok == b->progress.ok);
  CHECK(b->progress.failed == 1);
  CHECK(a->exit == b->exit);
  // Interrupted with jobs: what began is finished, saved in order, and nothing else.
  Stage stopped;
  std::atomic<bool> interrupted{false};
  stopped.options = many.options;
  stopped.options.interrupted = &interrupted;
  stopped.runner.interrupt = &interrupted;
  stopped.runner.interrupt_at = "p20";
  const auto c = stopped.drive(points);
  REQUIRE(c.ok());
  CHECK(c->exit == ExitCode::kInterrupted);
  CHECK(stopped.sink.appended.size() < points.size());
  for (size_t i = 0; i < stopped.sink.appended.size(); ++i) CHECK(stopped.sink.appended[i].case_id == points[i].id);
  // A full disk with jobs ends cleanly too.
  Stage full;
  full.options = many.options;
  full.sink.full_after = 3;
  CHECK_FALSE(full.drive(points).ok());
}

TEST_CASE("options that contradict one another are refused") {
  Stage s;
  s.options.jobs = 0;
  CHECK(s.drive(points_named({"a"})).error().message == "jobs=0 is not positive");
  s.options.jobs = 2;
  CHECK(s.drive(points_named({"a"})).error().message == "jobs=2 with mode both: cases measured at once would disturb one another");
}
