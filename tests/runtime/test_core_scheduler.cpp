// Handing cores on: who runs when tasks outnumber the cores, and that nobody is forgotten.
#include <sched.h>

#include <latch>

#include "runtime/core_scheduler.h"
#include "tests/namespaces.h"
#include "tests/runtime/rig.h"
#include "tests/test.h"

namespace shardlab::testing {

namespace {

/// One core, or as many as the test may use.
std::vector<std::vector<int>> some_processors() {
  const std::vector<int> all = usable_processors();
  std::vector<std::vector<int>> some{{all.front()}};
  if (all.size() > 1) some.push_back(all);
  return some;
}

const WaitCause kStart{WaitCause::Kind::kStart};

/// Lets `others` tasks come to a wait before the one that conducts goes on, so that what follows has one order.
struct Meeting {
  Counter there, go;

  void come(Task& task) {
    there.advance();
    task.wait(go, 1, kStart);
  }
  /// Everybody waits when this returns, on one core.
  void gather(Task& task, uint64_t others) { task.wait(there, others, kStart); }
};

}  // namespace

TEST_CASE("the usable processors are those of the thread's affinity", "[cores]") {
  const std::vector<int> processors = usable_processors();
  cpu_set_t set;
  CPU_ZERO(&set);
  REQUIRE(sched_getaffinity(0, sizeof set, &set) == 0);
  REQUIRE(processors.size() == static_cast<size_t>(CPU_COUNT(&set)));
  for (const int p : processors) REQUIRE(CPU_ISSET(p, &set));
}

TEST_CASE("no more tasks run than there are cores, each on a processor of its own", "[cores]") {
  const SteadyClock clock;
  for (const std::vector<int>& processors : some_processors()) {
    CoreScheduler scheduler(clock, processors);
    std::atomic<int> running{0}, too_many{0}, elsewhere{0}, rounds{0};
    Counter turns;
    run_tasks(scheduler, 30, 6, 2, [&](Task& task) {
      for (uint64_t round = 1; round <= 50; ++round) {
        too_many += ++running > static_cast<int>(processors.size());
        elsewhere += std::ranges::find(processors, sched_getcpu()) == processors.end();
        ++rounds;
        --running;
        task.pause();
        turns.advance();
        task.wait(turns, 12 * round, kStart);  // everybody's round
      }
    });
    REQUIRE(too_many == 0);
    REQUIRE(elsewhere == 0);
    REQUIRE(rounds == 600);
  }
}

TEST_CASE("a counter makes those able to run whose target is reached", "[cores]") {
  const SteadyClock clock;
  for (const std::vector<int>& processors : some_processors()) {
    CoreScheduler scheduler(clock, processors);
    Counter counter;
    std::atomic<int> early{0};
    run_tasks(scheduler, 30, 9, 1, [&](Task& task) {
      if (task.rank() == 0) {
        for (int i = 0; i < 4000; ++i) {
          counter.advance();
          task.pause();
        }
        return;
      }
      for (uint64_t target = static_cast<uint64_t>(task.rank()); target <= 4000; target += 7) {
        task.wait(counter, target, {WaitCause::Kind::kStream, 0, static_cast<int64_t>(target)});
        early += counter.value() < target;
      }
    });
    REQUIRE(early == 0);
  }
}

TEST_CASE("collectives of more ranks than cores compute what they should", "[cores]") {
  const SteadyClock clock;
  for (const std::vector<int>& processors : some_processors())
    for (const Algorithm algorithm : {Algorithm::kRing, Algorithm::kHalvingDoubling, Algorithm::kDirect}) {
      CoreScheduler scheduler(clock, processors);
      ThreadTransport transport(kernels::kernels_for_this_processor());
      std::atomic<int> wrong{0};
      run_tasks(scheduler, 30, 8, 1, [&](Task& task) {
        const auto comm = transport.join(task.rank(), CommId(0), std::vector<int>{0, 1, 2, 3, 4, 5, 6, 7});
        for (int repeat = 0; repeat < 50; ++repeat) {
          float values[16];
          for (int i = 0; i < 16; ++i) values[i] = static_cast<float>(task.rank() * i + repeat);
          const CollectiveCall call{CollectiveKind::kAllReduce, ReduceOp::kSum, algorithm, DType::f32, 16, 0, values, values};
          comm->collective(call, task);
          for (int i = 0; i < 16; ++i) wrong += values[i] != static_cast<float>(28 * i + 8 * repeat);
        }
      });
      REQUIRE(wrong == 0);
    }
}

TEST_CASE("streams beside the control stream get a core first", "[cores]") {
  const ManualClock clock;  // no turn ends, however slow the machine is
  CoreScheduler scheduler(clock, {usable_processors().front()});
  Meeting meeting;
  std::string order;  // on one core only one task writes at a time
  run_tasks(scheduler, 30, 3, 2, [&](Task& task) {
    if (task.rank() == 0 && task.stream() == 0) {
      meeting.gather(task, 5);
      meeting.go.advance();
      task.pause();  // hands the core to the three streams of the first kind, and has it back before others of its own
      order += 'C';
      return;
    }
    meeting.come(task);
    order += task.stream() == 0 ? 'c' : 's';
  });
  REQUIRE(order == "sssCcc");
}

TEST_CASE("a control stream that never waits hands its core on after a turn", "[cores]") {
  ManualClock clock;
  CoreScheduler scheduler(clock, {usable_processors().front()});
  Meeting meeting;
  int paused = 0;
  bool other_ran = false;
  run_tasks(scheduler, 30, 2, 1, [&](Task& task) {
    if (task.rank() == 0) {
      meeting.come(task);
      other_ran = true;
      return;
    }
    meeting.gather(task, 1);
    meeting.go.advance();
    while (!other_ran) {
      clock.set(clock.now() + CoreScheduler::kTurn_s / 4);
      ++paused;
      task.pause();
    }
  });
  REQUIRE(paused == 4);
}

TEST_CASE("a task that waits for something outside the crew does so without a core", "[cores]") {
  const SteadyClock clock;
  CoreScheduler scheduler(clock, {usable_processors().front()});
  std::latch drive_done(1);
  int after = 0;
  run_tasks(scheduler, 30, 2, 1, [&](Task& task) {
    if (task.rank() == 0)
      task.aside([&] { drive_done.wait(); });
    else
      drive_done.count_down();
    ++after;  // with a core again: no race
  });
  REQUIRE(after == 2);
}

TEST_CASE("a failure releases tasks that wait for a counter, for a core and aside", "[cores]") {
  const SteadyClock clock;
  for (const std::vector<int>& processors : some_processors())
    for (int repeat = 0; repeat < 20; ++repeat) {
      CoreScheduler scheduler(clock, processors);
      Counter never;
      const std::string error = world_error([&] {
        run_tasks(scheduler, 30, 8, 1, [&](Task& task) {
          if (task.rank() == 5) throw WorldError("the disk is full", "make room");
          if (task.rank() % 2 == 0) task.wait(never, 1, {WaitCause::Kind::kStream, 0, 1});
          while (true) {
            task.aside([] {});
            task.pause();
          }
        });
      });
      REQUIRE(error == "rank 5 failed at stream 0: the disk is full");
    }
}

TEST_CASE("what fails aside fails the crew", "[cores]") {
  const SteadyClock clock;
  CoreScheduler scheduler(clock, {usable_processors().front()});
  const std::string error = world_error([&] {
    run_tasks(scheduler, 30, 3, 1, [&](Task& task) {
      if (task.rank() == 1) task.aside([] { throw WorldError("the drive is gone"); });
    });
  });
  REQUIRE(error == "rank 1 failed at stream 0: the drive is gone");
}

TEST_CASE("a wait on handed cores times out by the injected clock", "[cores]") {
  ManualClock clock;
  CoreScheduler scheduler(clock, usable_processors());
  Counter never;
  const std::string error = world_error([&] {
    run_tasks(scheduler, 5, 4, 1, [&](Task& task) {
      if (task.rank() != 2) task.wait(never, 1, {WaitCause::Kind::kStream, 0, 1});
      while (true) {
        clock.set(clock.now() + 1);
        std::this_thread::yield();
        task.pause();
      }
    });
  });
  REQUIRE(contains(error, "which is the limit"));
}

}  // namespace shardlab::testing
