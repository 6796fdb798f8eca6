// The recorder as back end and session see it, over a source that a test fills, and over pairs of CUDA events.
#include "profiler/gpu/gpu_recorder.h"
#include "tests/namespaces.h"
#include "tests/profiler_gpu/hand_made.h"
#include "tests/test.h"

namespace shardlab::testing::of_recorder {

namespace {

constexpr int64_t kEpoch = 1'763'700'000'000'000'000;

/// What a session and a back end of one rank call in a step that begins at `now`.
void run_step(GpuRecorder& recorder, SetClock& clock, int32_t step, int ranks) {
  const double now = clock.time;
  recorder.begin_step(step, now, 2e-6);
  for (int rank = 0; rank < ranks; ++rank)
    for (int i = 0; i < 3; ++i) {
      recorder.begin_op({step, rank, i}, now + 1e-3 * i);
      recorder.end_op({step, rank, i});
      TraceEvent host;  // the host's own event of the launch
      host.rank = rank;
      host.instruction = i;
      host.step = step;
      host.sent_bytes = i == 1 ? 24 : 0;
      recorder.record(host);
      if (recorder.wants_events()) recorder.op_timed({step, rank, i}, 2.0 * i + 1, 2.0 * i + 2);
    }
  clock.time += 0.5;
  for (int rank = 0; rank < ranks; ++rank) recorder.record_step(step, rank, 0, 0.010);
}

}  // namespace

TEST_CASE("CUDA events give the same kind of trace, and say why there is no better one", "[profiler_gpu]") {
  const Expanded e = reduce_plan();
  SetClock clock;
  clock.time = 100;
  const auto recorder = make_gpu_recorder(2, {.clock = &clock}, {nullptr, {LibraryState::kNoDriver, "no driver", "install one"}});
  CHECK(recorder->source() == DeviceTimeSource::kEvents);
  CHECK(recorder->wants_events());
  CHECK(recorder->status().state == LibraryState::kNoDriver);
  run_step(*recorder, clock, 0, 2);  // off: warm-up
  recorder->set_on(true);
  run_step(*recorder, clock, 1, 2);
  run_step(*recorder, clock, 2, 2);
  recorder->set_on(false);
  run_step(*recorder, clock, 3, 2);
  const Trace t = recorder->take(*e.plan, e.programs);
  CHECK(t.producer == "cuda-events");
  CHECK(t.steps == 2);
  CHECK(recorder->log() == nullptr);
  CHECK(t.accounting.clock == "CUDA events");
  CHECK(t.accounting.clock_error_s == Approx(2.5e-6));
  CHECK(t.accounting.launches == 12);
  CHECK(t.accounting.recorded == 12);
  CHECK(t.accounting.ops == 12);
  CHECK(balanced(t.accounting));
  CHECK(unexplained(t.accounting).empty());
  int ops = 0;
  for (const TraceEvent& event : t.events) {
    if (event.kind != TraceEvent::Kind::kOp) continue;
    ++ops;
    CHECK(event.begin == Approx(1e-3 * (2.0 * event.instruction + 1)));
    CHECK(event.queued == Approx(1e-3 * (event.instruction + 1)));
    CHECK(event.sent_bytes == (event.instruction == 1 ? 24 : 0));
  }
  CHECK(ops == 12);
  CHECK(t.step_interval[0][1] == 0.010);
  CHECK(recorder->take(*e.plan, e.programs).events.empty());
}

TEST_CASE("a pair of events that the back end forgot, or made up, is counted", "[profiler_gpu]") {
  const Expanded e = reduce_plan();
  SetClock clock;
  const auto recorder = make_gpu_recorder(1, {.clock = &clock}, {nullptr, {}});
  recorder->set_on(true);
  recorder->begin_step(0, 0, 0);
  for (int i = 0; i < 3; ++i) recorder->begin_op({0, 0, i}, 0), recorder->end_op({0, 0, i});
  recorder->op_timed({0, 0, 0}, 0, 1);
  recorder->op_timed({0, 0, 2}, 1, 2);
  recorder->op_timed({0, 0, 7}, 1, 2);
  recorder->record_step(0, 0, 0, 1);
  const Trace t = recorder->take(*e.plan, e.programs);
  CHECK(t.accounting.launches == 3);
  CHECK(t.accounting.lost == 1);
  CHECK(t.accounting.unclaimed == 1);
  CHECK(t.accounting.ops_untimed == 1);
  CHECK(balanced(t.accounting));
  CHECK(unexplained(t.accounting).size() == 3);
}

TEST_CASE("with activity records, ids are pushed around launches and times come from the device's clock", "[profiler_gpu]") {
  const Expanded e = reduce_plan();
  SetClock clock;
  clock.time = 100;
  const auto told = std::make_shared<FakeSource::Told>();
  told->ns = kEpoch + 100'000'000'000;  // the tracer's clock: the session's plus kEpoch
  const auto recorder =
      make_gpu_recorder(2, {.clock = &clock}, {std::make_unique<FakeSource>(told), {LibraryState::kOk, "CUPTI", ""}});
  CHECK_FALSE(recorder->wants_events());
  CHECK(recorder->source() == DeviceTimeSource::kCupti);
  recorder->set_on(true);
  CHECK(told->on);
  run_step(*recorder, clock, 7, 2);
  recorder->set_on(false);
  CHECK_FALSE(told->on);
  REQUIRE(told->pushed.size() == 6);
  CHECK(op_key(told->pushed[4]) == OpKey{7, 1, 1});
  CHECK(told->depth == 0);

  LogWriter w{.origin_ns = kEpoch + 100'000'000'000};
  for (const int rank : {0, 1})
    for (int i = 0; i < 3; ++i) {
      const int64_t at = 1'000'000LL * i;
      w.kernel({7, rank, i}, "k", at, at + 500'000, at + 900'000);
    }
  told->log = w.log;
  told->ns += 500'000'000;  // as the session's clock
  const Trace t = recorder->take(*e.plan, e.programs);
  CHECK(t.producer == "cupti");
  CHECK(t.accounting.timed == 6);
  CHECK(unexplained(t.accounting).empty());
  CHECK(t.accounting.clock_error_s < 1e-9);
  CHECK(t.details.size() == 6);
  REQUIRE(recorder->log() != nullptr);
  CHECK(recorder->log()->work.size() == 6);
  for (const TraceEvent& event : t.events)
    if (event.kind == TraceEvent::Kind::kOp) {
      CHECK(event.begin == Approx(1e-3 * event.instruction + 0.5e-3).epsilon(1e-6));
      CHECK(event.queued == Approx(0.5e-3).epsilon(1e-4));
    }
}

TEST_CASE("a clock that was set spoils the take that it happened in, not those after it", "[profiler_gpu]") {
  const Expanded e = reduce_plan();
  SetClock clock;
  const auto told = std::make_shared<FakeSource::Told>();
  told->ns = kEpoch;
  const auto recorder =
      make_gpu_recorder(1, {.clock = &clock}, {std::make_unique<FakeSource>(told), {LibraryState::kOk, "CUPTI", ""}});
  clock.time += 1;
  told->ns += 1'010'000'000;  // 10 ms too many
  CHECK(recorder->take(*e.plan, e.programs).accounting.clock_error_s > 0.0099);
  clock.time += 1;
  told->ns += 1'000'000'000;
  CHECK(recorder->take(*e.plan, e.programs).accounting.clock_error_s < 1e-6);
}

TEST_CASE("without a driver the recorder falls back to events and says so", "[profiler_gpu]") {
  const LibraryStatus status = cupti_status();
  if (status.ok()) return;  // a machine with a GPU: tests/gpu has more to say
  CHECK_FALSE(status.message.empty());
  CHECK_FALSE(status.remedy.empty());
  const auto recorder = GpuRecorder::create(1, {});
  CHECK(recorder->source() == DeviceTimeSource::kEvents);
  CHECK(recorder->status().state == status.state);
  CHECK(GpuRecorder::create(1, {.source = DeviceTimeSource::kCupti})->status().state == status.state);
  CHECK(GpuRecorder::create(1, {.source = DeviceTimeSource::kEvents})->status().ok());
}

}  // namespace shardlab::testing::of_recorder
