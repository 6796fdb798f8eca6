// The threads of one session and everything they wait for.
//
// Every wait of the runtime, for another stream or for a peer, goes through `Task::wait`. That makes four things true in one
// place: each wait has a time-out; each waiter can be named when something hangs; one failure releases everybody; and the
// threads can be driven one at a time by a seeded scheduler under a virtual clock.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "plan/base/world_error.h"
#include "plan/interfaces.h"
#include "runtime/counter.h"

namespace shardlab::runtime {

class Crew;

inline constexpr double kNever = std::numeric_limits<double>::infinity();  ///< a deadline that does not come

/// What a task waits for, as messages name it.
struct WaitCause {
  enum class Kind : uint8_t {
    kNothing,  ///< runs
    kStart,    ///< for the next step
    kStream,   ///< for stream `peer` of its own rank to have completed `amount` instructions
    kMessage,  ///< for rank `peer` to offer its part
    kTaken,    ///< for rank `peer` to have read what was offered to it
    kTurn,     ///< for the calls of its rank that come before instruction `amount`
    kCore,     ///< for a core, of which there are fewer than tasks
  } kind = Kind::kNothing;
  int32_t peer = -1;
  int64_t amount = 0;
};

/// What a task is at, for whoever wants to know: another thread, or another process that shares the memory in which it lies.
class TaskSeat {
 public:
  /// Of a task of this process.
  TaskSeat(int rank, int stream);

  int rank() const { return rank_; }
  int stream() const { return stream_; }
  /// Instruction::id of what the task works at; -1 between steps.
  int32_t instruction() const { return static_cast<int32_t>(place()); }
  /// The same with the number of moves: what tells a task that goes on from one that does not.
  uint64_t place() const { return place_.load(std::memory_order_relaxed); }
  WaitCause cause() const;
  bool finished() const { return finished_.load(std::memory_order_acquire); }
  int32_t process() const { return process_; }                                ///< the operating system's number
  int32_t thread() const { return thread_.load(std::memory_order_relaxed); }  ///< the operating system's number, once it runs

 private:
  friend class Task;
  friend class Crew;
  const int32_t rank_, stream_, process_;
  std::atomic<int32_t> thread_{0};
  std::atomic<uint64_t> place_{UINT32_MAX};  ///< moves and instruction, packed
  std::atomic<uint64_t> cause_{0};           ///< kind and peer, packed
  std::atomic<int64_t> amount_{0};
  std::atomic<bool> finished_{false};
};

/// Thrown through a task's stack when the session has failed elsewhere; never leaves the task's thread.
struct Released {};

/// One thread of a session: stream `stream` of rank `rank`.
class Task {
 public:
  Task(Crew& crew, TaskSeat& seat, int index) : crew_(crew), seat_(seat), index_(index) {}

  int rank() const { return seat_.rank(); }
  int stream() const { return seat_.stream(); }
  double now() const;

  /// Returns once `counter` has reached `target`. Throws Released when the session has failed, which a wait that lasts longer
  /// than the time-out makes it do.
  void wait(Counter& counter, uint64_t target, const WaitCause& cause) {
    if (counter.value() < target) [[unlikely]]
      wait_slowly(counter, target, cause);
  }

  /// A point at which the scheduler may let another task run, and at which a session that failed elsewhere ends: throws Released
  /// then.
  void pause() {
    if (pause_wanted()) [[unlikely]]
      pause_slowly();
  }

  /// Calls what keeps the thread waiting for something that is no counter (a drive): another task may have its core meanwhile.
  /// Throws Released like `pause`.
  template <class Call>
  void aside(const Call& call);

  /// Instruction::id of what the task works at, for messages; -1 between steps.
  void set_instruction(int32_t id) {
    seat_.place_.store(static_cast<uint64_t>(++moves_) << 32 | static_cast<uint32_t>(id), std::memory_order_relaxed);
  }
  int32_t instruction() const { return seat_.instruction(); }
  WaitCause cause() const { return seat_.cause(); }
  bool finished() const { return seat_.finished(); }

 private:
  friend class Crew;
  friend class ThreadScheduler;
  friend class SeededScheduler;
  friend class CoreScheduler;
  void wait_slowly(Counter& counter, uint64_t target, const WaitCause& cause);
  void pause_slowly();
  bool pause_wanted() const;
  bool failed() const;
  void set_cause(const WaitCause& cause);

  Crew& crew_;
  TaskSeat& seat_;
  const int index_;     ///< in the crew
  uint32_t moves_ = 0;  ///< calls of `set_instruction`
  std::atomic<Counter*> sleeping_on_{nullptr};
};

/// How a wait ended.
enum class Waited : uint8_t { kReached, kTimedOut, kReleased };

/// Decides which tasks run.
class Scheduler {
 public:
  virtual ~Scheduler() = default;
  virtual const Clock& clock() const = 0;
  /// Might `pause` let another task run?
  bool wants_pauses() const { return wants_pauses_.load(std::memory_order_relaxed); }
  /// Announces a task before any thread is started.
  virtual void add(Task& task) = 0;
  /// Called by each task's thread before its first and after its last action.
  virtual void enter(Task& task) = 0;
  virtual void leave(Task& task) = 0;
  /// Blocks until the counter has reached the target, `deadline` (on the clock) has passed, or the crew has failed.
  virtual Waited block(Task& task, Counter& counter, uint64_t target, double deadline) = 0;
  virtual void pause(Task&) {}
  /// Around what a task's thread waits for outside the crew.
  virtual void step_aside(Task&) {}
  virtual void step_back(Task&) {}
  /// Called from outside the crew: lets the tasks run until `done` has reached `target`.
  virtual void drive(Crew& crew, Counter& done, uint64_t target) = 0;
  /// Wakes every blocked task after the crew has failed.
  virtual void release(Crew& crew) = 0;

 protected:
  void want_pauses(bool wanted) { wants_pauses_.store(wanted, std::memory_order_relaxed); }

 private:
  std::atomic<bool> wants_pauses_{false};
};

/// Monotonic time of this machine.
class SteadyClock final : public Clock {
 public:
  double now() const override;
};

/// The tasks run as the operating system lets them: a wait spins briefly, then sleeps.
class ThreadScheduler final : public Scheduler {
 public:
  /// `clock` measures time-outs and must outlive the scheduler. With more tasks than `cores` a wait sleeps at once, since
  /// spinning would take the core from the task that is waited for.
  ThreadScheduler(const Clock& clock, int tasks, int cores);

  const Clock& clock() const override { return clock_; }
  void add(Task&) override {}
  void enter(Task&) override {}
  void leave(Task&) override {}
  Waited block(Task& task, Counter& counter, uint64_t target, double deadline) override;
  void drive(Crew& crew, Counter& done, uint64_t target) override;
  void release(Crew& crew) override;

 private:
  const Clock& clock_;
  const int spins_;
};

/// One task runs at a time; at every wait and pause the next is drawn at random from those that can run. Equal seeds give equal
/// interleavings. The clock is virtual: it advances by a microsecond a decision and, when nothing can run, straight to the
/// earliest deadline, so that a deadlock is found without waiting.
class SeededScheduler final : public Scheduler {
 public:
  explicit SeededScheduler(uint64_t seed) : clock_(*this), seed_(seed) { want_pauses(true); }

  const Clock& clock() const override { return clock_; }
  void add(Task& task) override;
  void enter(Task& task) override;
  void leave(Task& task) override;
  Waited block(Task& task, Counter& counter, uint64_t target, double deadline) override;
  void pause(Task& task) override;
  void drive(Crew& crew, Counter& done, uint64_t target) override;
  void release(Crew& crew) override;

  /// Decisions taken so far.
  uint64_t decisions() const { return decisions_.load(); }

 private:
  class VirtualClock final : public Clock {
   public:
    explicit VirtualClock(SeededScheduler& owner) : owner_(owner) {}
    double now() const override { return owner_.now_.load(std::memory_order_relaxed); }

   private:
    SeededScheduler& owner_;
  };
  struct Entry {
    Task* task = nullptr;
    Counter* counter = nullptr;  ///< none: can run
    uint64_t target = 0;
    double deadline = 0;
    bool timed_out = false;
    std::condition_variable turn;
  };
  Entry& entry_of(Task& task);
  bool runnable(const Entry& e) const;
  Entry* choose();
  void pass_on();
  void take_turn(std::unique_lock<std::mutex>& lock, Entry& e);

  VirtualClock clock_;
  const uint64_t seed_;
  std::atomic<double> now_{0};
  std::atomic<uint64_t> decisions_{0};
  std::mutex mutex_;
  std::vector<std::unique_ptr<Entry>> entries_;  ///< by task index in the crew
  Entry* running_ = nullptr;                     ///< none: the driver's turn
  const Counter* done_ = nullptr;                ///< what the driver waits for
  uint64_t done_target_ = 0;
  bool released_ = false;
  std::condition_variable driver_turn_;
};

/// The tasks of a session, and its failure.
class Crew {
 public:
  /// Waits longer than `timeout_s` fail the session. `describe` names what a task is at ("op #12 layer.F attn.qkv"); it is
  /// called with other tasks running.
  Crew(Scheduler& scheduler, double timeout_s, std::function<std::string(const TaskSeat&)> describe);
  ~Crew();
  Crew(const Crew&) = delete;

  /// Adds a task. All are added before the first is started.
  Task& add(int rank, int stream);
  /// The same with a seat elsewhere, which outlives the crew.
  Task& add(TaskSeat& seat);
  /// Tasks of other processes, which messages name too. Before the first task is started; the seats outlive the crew.
  void observe(std::span<const TaskSeat* const> seats);

  /// Starts a thread for every task, running `body`. What `body` throws fails the session.
  void start(const std::function<void(Task&)>& body);
  /// Waits for every thread to end.
  void join();

  /// Records the first failure and releases every waiter; later calls change nothing. Safe from any thread.
  void fail(const std::string& message, const std::string& hint = {});
  bool failed() const { return failed_.load(std::memory_order_acquire); }
  /// Throws the recorded failure, if there is one.
  void throw_if_failed() const;

  /// "rank 5 is at op #14 ...\nranks 0-4 wait for ...", one line for each distinct situation.
  std::string situation() const;

  /// The same, where others are observed with who stands still named first: a process that is stopped cannot say so itself, and
  /// whoever looks must look twice.
  std::string picture() const;

  /// What a task is at.
  struct Place {
    uint64_t place = 0;
    WaitCause cause;
  };
  std::vector<Place> places() const;
  /// "rank 1 stands still at op #12 ..., its thread is stopped; rank 0: op #13 ... waits for rank 1 to ...": the tasks that are
  /// where they were at `before` and wait for nothing, then what the others wait for. Empty where a task has moved on and none
  /// stands still. `gone`: a process that is known to have ended, by the operating system's number.
  std::string standstill(const std::vector<Place>& before, int32_t gone = 0) const;

  /// "rank 2 is waited for by rank 0 at stream compute op #12 ...; rank 1: ...": who here waits for the `count` ranks from `first` on, which
  /// nobody here can look at; then what the others here wait for. Empty where none waits for them.
  std::string awaited(int first, int count) const;

  Scheduler& scheduler() { return scheduler_; }
  const Clock& clock() const { return scheduler_.clock(); }
  double timeout_s() const { return timeout_s_; }
  std::span<const std::unique_ptr<Task>> tasks() const { return tasks_; }
  std::span<const TaskSeat* const> seats() const { return seats_; }

 private:
  std::string situation_of(const TaskSeat& seat) const;
  std::string situation_of(const std::vector<const TaskSeat*>& seats, std::string_view separator) const;

  Scheduler& scheduler_;
  const double timeout_s_;
  const std::function<std::string(const TaskSeat&)> describe_;
  std::deque<TaskSeat> own_seats_;      ///< of tasks that brought none
  std::vector<const TaskSeat*> seats_;  ///< of the tasks, then of those that are observed
  std::vector<std::unique_ptr<Task>> tasks_;
  std::vector<std::thread> threads_;
  std::atomic<bool> failed_{false};
  mutable std::mutex mutex_;  ///< guards the two below
  std::string message_, hint_;
};

inline double Task::now() const { return crew_.clock().now(); }
inline bool Task::failed() const { return crew_.failed(); }
inline bool Task::pause_wanted() const { return crew_.scheduler().wants_pauses() || failed(); }

template <class Call>
void Task::aside(const Call& call) {
  crew_.scheduler().step_aside(*this);
  call();  // what it throws ends the task, which needs no core for that
  crew_.scheduler().step_back(*this);
  if (failed()) throw Released{};
}

}  // namespace shardlab::runtime
