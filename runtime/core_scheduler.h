// Tasks that outnumber the cores: as many run as there are cores, and a core is handed from one task to the next.
//
// Left to itself the operating system lets a core idle while tasks wait for the other, wakes what it put to sleep after tens of
// microseconds, and takes a task off its core in the middle of an op. Here a task keeps its core until it waits; whoever makes
// another able to run either knows of an idle core for it or puts it in a queue; and a task that waits hands its core over itself.
// So no core idles while anything can run, a meeting of many ranks on few cores costs a switch of threads a step, and who runs when
// follows rules that the simulator knows (simulator/timeline.cpp).
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "runtime/crew.h"

namespace shardlab {

/// Numbers of the processors that this process may use, as the operating system counts them; at least one.
std::vector<int> usable_processors();

/// The rules:
///   - A task has one core while it runs, and is bound to it.
///   - A core goes to streams beside the control stream first (messages, collectives, copies, updates on the host: others wait for
///     them), oldest first; then to control streams, to the oldest that ran on this core last, else to the oldest.
///   - A task that could run again gets an idle core at once, the one that it had if that is idle.
///   - A control stream hands over between two ops, or two steps of a collective, when a stream of the first kind wants a core:
///   then
///     it is the next of its kind and goes on with its turn. Its turn over after `kTurn_s`, it hands over to the oldest control
///     stream that wants one.
///   - A task that finds nobody to take its core over watches for a moment for what it waits for before it sleeps.
/// A limit: other programs that use one of the processors slow the task that is bound to it, whatever the others do.
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
    int core = -1;                      ///< that it has, or was just given
    int last_core = -1;                 ///< that it had last; its thread is bound to it
    double turn_begin = 0;              ///< of a control stream: when it was given its core
    bool goes_on = false;               ///< with its turn, once it has a core again
    std::atomic<uint32_t> turn{kNone};  ///< a futex: what ends the wait for a core
    Counter* counter = nullptr;         ///< what it waits for; none: only for a core, or for nothing
    uint64_t target = 0;
  };
  struct Core {
    int processor = 0;
    std::atomic<bool> idle{false};
  };
  /// A core that was given to a task whose thread does not know it yet.
  struct Handover {
    Entry* to = nullptr;
    bool bind = false;  ///< its thread had another core
  };

  void reached(Counter& counter) override;

  Entry& entry_of(const Task& task);
  static bool comes_first(const Entry& e);
  Handover grant(Entry& e, int core);
  bool grant_idle(Entry& e, Handover& handover);
  void queue(Entry& e, bool in_front = false);
  Entry* next_for(int core);
  Handover give_up(Entry& e);
  void forget(Entry& e);
  void note_queued();
  void carry_out(const Handover& handover);
  Waited await_turn(Entry& e, int watched_core, double deadline);
  void take_core(Entry& e);

  const Clock& clock_;
  std::atomic<bool> first_wants_{false};  ///< a core: some stream of the first kind
  alignas(64) std::mutex mutex_;          ///< guards all below but what is atomic
  std::vector<std::unique_ptr<Core>> cores_;
  std::vector<int> idle_;                        ///< cores, the last to become so at the end
  std::vector<std::unique_ptr<Entry>> entries_;  ///< by task index in the crew
  std::deque<Entry*> first_, control_;           ///< that could run
  std::unordered_map<Counter*, std::vector<Entry*>> waiting_;
  bool failed_ = false;
};

}  // namespace shardlab
