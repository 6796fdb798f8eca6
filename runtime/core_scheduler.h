// Tasks that outnumber the cores: as many run as there are cores, and a core is handed from one task to the next.
//
// The operating system, left to itself, lets a core idle while tasks wait for another core, takes tens of microseconds to wake a
// task, and takes a task off its core in the middle of an op. Here a task keeps its core until it waits. A task that makes another
// task able to run gives it an idle core or puts it in a queue. A task that waits hands its core over itself. So no core idles
// while a task can run, a meeting of many ranks on few cores costs one switch of threads a step, and the order of tasks follows
// rules that the simulator knows (plan/cores.h).
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "plan/cores.h"
#include "runtime/crew.h"

namespace shardlab::runtime {

/// Numbers of the processors that this process may use, as the operating system counts them; at least one.
std::vector<int> usable_processors();

/// Each core is a processor. `Cores` decides who has which; its rules for streams hold for tasks here. The thread of a task is
/// bound to its processor. A task that finds no taker for its core watches for a moment for the thing that it waits for, before it
/// sleeps. A limit: another program on one of the processors slows the task that is bound to it, whatever the other tasks do.
class CoreScheduler final : public Scheduler, private CounterListener {
 public:
  /// The longest that a control stream keeps a core which another one wants, but for the op that it is in: a step is shorter than
  /// this or nearly so, and workers that run apart, which may never wait, take turns.
  static constexpr double kTurn_s = 3e-3;

  /// `clock` measures time-outs and turns and must outlive the scheduler.
  CoreScheduler(const Clock& clock, std::vector<int> processors);

  const Clock& clock() const override { return clock_; }
  void add(Task& task) override;
  void enter(Task& task) override;
  void leave(Task& task) override;
  Waited block(Task& task, Counter& counter, uint64_t target, double deadline) override;
  void pause(Task& task) override;
  void step_aside(Task& task) override;
  void step_back(Task& task) override;
  void drive(Crew& crew, Counter& done, uint64_t target) override;
  void release(Crew& crew) override;

 private:
  enum Turn : uint32_t { kNone, kAsleep, kGranted };
  struct Entry {
    Task* task = nullptr;
    int32_t thread = 0;                 ///< the operating system's number
    double turn_begin = 0;              ///< Cores::Grant::turn_begin of its last
    std::atomic<uint32_t> turn{kNone};  ///< a futex: what ends the wait for a core
    Counter* counter = nullptr;         ///< the counter that the task waits for; none: it waits only for a core, or for nothing
    uint64_t target = 0;
  };
  struct Processor {
    int number = 0;
    std::atomic<bool> idle{true};
  };
  using Grants = std::vector<Cores::Grant>;

  void reached(Counter& counter) override;

  Entry& entry_of(const Task& task);
  bool comes_first(int index) const { return entries_[static_cast<size_t>(index)]->task->stream() != 0; }
  Grants note_grants();
  void forget(int index);
  Grants give_up(Task& task);
  void carry_out(const Cores::Grant& grant);
  Waited await_turn(Entry& e, int watched_core, double deadline);
  void take_core(Task& task);

  const Clock& clock_;
  std::vector<std::unique_ptr<Processor>> processors_;  ///< by core
  std::vector<std::unique_ptr<Entry>> entries_;         ///< by task index in the crew
  std::atomic<bool> first_wants_{false};                ///< Cores::first_waits
  alignas(64) std::mutex mutex_;  ///< guards what follows, and in entries what is neither atomic nor the thread's
  Cores cores_;                   ///< of tasks, by index
  std::unordered_map<Counter*, std::vector<int>> waiting_;  ///< task indices
  bool failed_ = false;
};

}  // namespace shardlab::runtime
