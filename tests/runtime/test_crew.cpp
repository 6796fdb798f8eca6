// Waiting: time-outs and failures release everybody, and a seeded scheduler repeats itself.
#include <fmt/format.h>

#include "tests/namespaces.h"
#include "tests/runtime/rig.h"
#include "tests/test.h"

namespace shardlab::testing {

namespace {

/// An all_reduce on ranks 0 to 3 to which rank 2 never comes.
void absent_rank(ThreadTransport& transport, Task& task) {
  if (task.rank() == 2) return;
  const auto comm = transport.join(task.rank(), CommId(0), std::vector<int>{0, 1, 2, 3});
  float values[8] = {};
  comm->collective({CollectiveKind::kAllReduce, ReduceOp::kSum, Algorithm::kDirect, DType::f32, 8, 0, values, values}, task);
}

}  // namespace

TEST_CASE("a deadlock times out under the virtual clock, and the message names who waits for whom", "[crew][seeded]") {
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    SeededScheduler scheduler(seed);
    ThreadTransport transport(kernels::kernels_for_this_processor());
    const std::string error =
        world_error([&] { run_tasks(scheduler, 5, 4, 1, [&](Task& task) { absent_rank(transport, task); }); });
    REQUIRE(contains(error, "has waited 5 s, which is the limit"));
    REQUIRE(contains(error, "rank 2: has ended"));
    REQUIRE(contains(error, "stream 0 waits for rank 2 to offer its part"));
    REQUIRE(scheduler.clock().now() >= 5);
    REQUIRE(scheduler.clock().now() < 5.1);
  }
}

TEST_CASE("free tasks time out by the injected clock", "[crew]") {
  ManualClock clock;
  ThreadScheduler scheduler(clock, 4, 2);
  ThreadTransport transport(kernels::kernels_for_this_processor());
  const std::string error = world_error([&] {
    run_tasks(scheduler, 5, 4, 1, [&](Task& task) {
      absent_rank(transport, task);
      // Rank 2 lets time pass until somebody has had enough, when `pause` releases it too.
      while (task.rank() == 2) {
        clock.set(clock.now() + 1);
        std::this_thread::yield();
        task.pause();
      }
    });
  });
  REQUIRE(contains(error, "which is the limit"));
  REQUIRE(contains(error, "waits for rank 2 to offer its part"));
}

TEST_CASE("one rank's failure releases all others", "[crew]") {
  for (int repeat = 0; repeat < 20; ++repeat) {
    ThreadTransport transport(kernels::kernels_for_this_processor());
    const std::string error = world_error([&] {
      run_tasks(8, 1, [&](Task& task) {
        if (task.rank() == 5) throw WorldError("the disk is full", "make room");
        const auto comm = transport.join(task.rank(), CommId(0), std::vector<int>{0, 1, 2, 3, 4, 5, 6, 7});
        float values[8] = {};
        comm->collective({CollectiveKind::kAllReduce, ReduceOp::kSum, Algorithm::kRing, DType::f32, 8, 0, values, values}, task);
      });
    });
    REQUIRE(error == "rank 5 failed at stream 0: the disk is full");
  }
}

TEST_CASE("a failure releases waiters at once, not at their time-out", "[crew][seeded]") {
  for (uint64_t seed = 1; seed <= 10; ++seed) {
    SeededScheduler scheduler(seed);
    ThreadTransport transport(kernels::kernels_for_this_processor());
    const std::string error = world_error([&] {
      run_tasks(scheduler, 5, 4, 1, [&](Task& task) {
        if (task.rank() == 2) throw WorldError("the disk is full");
        absent_rank(transport, task);
      });
    });
    REQUIRE(error == "rank 2 failed at stream 0: the disk is full");
    REQUIRE(scheduler.clock().now() < 1);
  }
}

TEST_CASE("equal seeds give equal interleavings, other seeds others", "[crew][seeded]") {
  const auto order = [](uint64_t seed) {
    SeededScheduler scheduler(seed);
    std::string seen;  // only one task runs at a time
    run_tasks(scheduler, 5, 3, 1, [&](Task& task) {
      for (int i = 0; i < 10; ++i) {
        seen += static_cast<char>('a' + task.rank());
        task.pause();
      }
    });
    return seen;
  };
  REQUIRE(order(1) == order(1));
  REQUIRE(order(1).size() == 30);
  int others = 0;
  for (uint64_t seed = 2; seed <= 10; ++seed) others += order(seed) != order(1);
  REQUIRE(others == 9);
}

TEST_CASE("a counter wakes those whose target is reached", "[crew]") {
  // Many waiters with different targets on one counter: each must return, and none before its target.
  Counter counter;
  std::atomic<int> early{0};
  run_tasks(9, 1, [&](Task& task) {
    if (task.rank() == 0) {
      for (int i = 0; i < 4000; ++i) counter.advance();
      return;
    }
    for (uint64_t target = static_cast<uint64_t>(task.rank()); target <= 4000; target += 7) {
      task.wait(counter, target, {WaitCause::Kind::kStream, 0, static_cast<int64_t>(target)});
      early += counter.value() < target;
    }
  });
  REQUIRE(early == 0);
}

}  // namespace shardlab::testing
