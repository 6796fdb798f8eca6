#include "runtime/core_scheduler.h"

#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "plan/base/check.h"
#include "runtime/futex.h"
#include "runtime/spin.h"

namespace shardlab::runtime {
namespace {

void bind_thread(int32_t thread, int processor) {
  // Sized for the number: a machine may have more processors than a cpu_set_t.
  cpu_set_t* set = CPU_ALLOC(static_cast<size_t>(processor) + 1);
  const size_t bytes = CPU_ALLOC_SIZE(static_cast<size_t>(processor) + 1);
  CPU_ZERO_S(bytes, set);
  CPU_SET_S(static_cast<size_t>(processor), bytes, set);
  sched_setaffinity(thread, bytes, set);  // refused where the processor was taken away since: then it runs where it may
  CPU_FREE(set);
}

}  // namespace

std::vector<int> usable_processors() {
  std::vector<int> found;
  for (size_t most = 1024; most <= (1 << 20); most *= 2) {
    cpu_set_t* set = CPU_ALLOC(most);
    const size_t bytes = CPU_ALLOC_SIZE(most);
    const bool fits = sched_getaffinity(0, bytes, set) == 0;
    for (size_t p = 0; fits && p < most; ++p)
      if (CPU_ISSET_S(p, bytes, set)) found.push_back(static_cast<int>(p));
    CPU_FREE(set);
    if (fits) break;
  }
  return found.empty() ? std::vector<int>{0} : found;
}

CoreScheduler::CoreScheduler(const Clock& clock, std::vector<int> processors)
    : clock_(clock), cores_(static_cast<int>(processors.size()), kTurn_s) {
  // So that two programs do not begin on the same one.
  std::ranges::rotate(processors, processors.begin() + getpid() % std::ssize(processors));
  for (const int p : processors) {
    processors_.push_back(std::make_unique<Processor>());
    processors_.back()->number = p;
  }
}

void CoreScheduler::add(Task& task) {
  SHARDLAB_CHECK(entries_.size() == static_cast<size_t>(task.index_), "a scheduler of cores has one crew, from its first task on");
  entries_.push_back(std::make_unique<Entry>());
  entries_.back()->task = &task;
  cores_.add(comes_first(task.index_));
}

CoreScheduler::Entry& CoreScheduler::entry_of(const Task& task) { return *entries_[static_cast<size_t>(task.index_)]; }

// ---- under the lock

/// Takes the grants of the last calls of `cores_`, for `carry_out` once the lock is free.
CoreScheduler::Grants CoreScheduler::note_grants() {
  Grants grants = cores_.take_grants();
  for (const Cores::Grant& g : grants) {
    entries_[static_cast<size_t>(g.stream)]->turn_begin = g.turn_begin;
    processors_[static_cast<size_t>(g.core)]->idle.store(false, std::memory_order_relaxed);
  }
  first_wants_.store(cores_.first_waits(), std::memory_order_relaxed);
  want_pauses(cores_.any_waits());
  return grants;
}

/// The task waits for its counter no longer, whatever that has reached, nor for a core.
void CoreScheduler::forget(int index) {
  cores_.forget(index);
  Counter* const counter = std::exchange(entries_[static_cast<size_t>(index)]->counter, nullptr);
  if (counter == nullptr) return;
  const auto found = waiting_.find(counter);
  std::erase(found->second, index);
  if (!found->second.empty()) return;
  counter->tell_nobody();
  waiting_.erase(found);
}

/// Takes the task's core away, for the next or for nobody.
CoreScheduler::Grants CoreScheduler::give_up(Task& task) {
  const int core = cores_.core_of(task.index_);
  if (core < 0) return {};
  entry_of(task).turn.store(kNone, std::memory_order_relaxed);
  cores_.give_up(task.index_, clock_.now());
  if (cores_.holder(core) < 0) processors_[static_cast<size_t>(core)]->idle.store(true, std::memory_order_relaxed);
  return note_grants();
}

// ---- outside of it

/// Lets the thread of a task that was given a core know.
void CoreScheduler::carry_out(const Cores::Grant& grant) {
  Entry& e = *entries_[static_cast<size_t>(grant.stream)];
  if (grant.moved) bind_thread(e.thread, processors_[static_cast<size_t>(grant.core)]->number);
  if (e.turn.exchange(kGranted, std::memory_order_acq_rel) == kAsleep) futex_wake(e.turn, 1);
}

/// Returns when the task has a core. It watches for as long as `watched_core`, the one that it gave up, is idle; none: -1.
Waited CoreScheduler::await_turn(Entry& e, int watched_core, double deadline) {
  if (watched_core >= 0) {
    const std::atomic<bool>& idle = processors_[static_cast<size_t>(watched_core)]->idle;
    for (int i = 0; i < kSpins && idle.load(std::memory_order_relaxed); ++i) {
      if (e.turn.load(std::memory_order_acquire) == kGranted) return Waited::kReached;
      relax();
    }
  }
  uint32_t expected = kNone;
  if (!e.turn.compare_exchange_strong(expected, kAsleep, std::memory_order_acq_rel)) return Waited::kReached;
  while (true) {
    futex_wait(e.turn, kAsleep, kSlice_s);
    if (e.turn.load(std::memory_order_acquire) == kGranted) return Waited::kReached;
    const bool failed = e.task->failed();
    if (!failed && clock_.now() < deadline) continue;
    const std::lock_guard lock(mutex_);
    if (cores_.has(e.task->index_)) continue;  // given one at this moment
    // What it waited for has come, or is just being told: only a core is missing.
    if (!failed && (e.counter == nullptr || e.counter->value() >= e.target)) continue;
    forget(e.task->index_);
    note_grants();
    return failed ? Waited::kReleased : Waited::kTimedOut;
  }
}

void CoreScheduler::take_core(Task& task) {
  Entry& e = entry_of(task);
  Grants own;
  {
    const std::lock_guard lock(mutex_);
    e.turn.store(kNone, std::memory_order_relaxed);
    cores_.want(task.index_, clock_.now());
    own = note_grants();
  }
  if (own.empty()) {
    const WaitCause cause = task.cause();
    task.set_cause({WaitCause::Kind::kCore});
    await_turn(e, -1, kNever);
    task.set_cause(cause);
  } else {
    carry_out(own.front());
  }
}

// ---- what tasks call

void CoreScheduler::enter(Task& task) {
  entry_of(task).thread = static_cast<int32_t>(syscall(SYS_gettid));
  take_core(task);
}

void CoreScheduler::leave(Task& task) { step_aside(task); }

void CoreScheduler::step_aside(Task& task) {
  Grants next;
  {
    const std::lock_guard lock(mutex_);
    next = give_up(task);
  }
  for (const Cores::Grant& g : next) carry_out(g);
}

void CoreScheduler::step_back(Task& task) { take_core(task); }

Waited CoreScheduler::block(Task& task, Counter& counter, uint64_t target, double deadline) {
  Entry& e = entry_of(task);
  Grants next;
  int core = -1;
  {
    const std::lock_guard lock(mutex_);
    if (failed_ || !cores_.has(task.index_)) return Waited::kReleased;  // without a core: released from another wait
    e.counter = &counter;
    e.target = target;
    waiting_[&counter].push_back(task.index_);
    if (counter.tell(target, *this)) {
      forget(task.index_);
      return Waited::kReached;
    }
    core = cores_.core_of(task.index_);
    next = give_up(task);
  }
  for (const Cores::Grant& g : next) carry_out(g);
  return await_turn(e, next.empty() ? core : -1, deadline);
}

void CoreScheduler::pause(Task& task) {
  Entry& e = entry_of(task);
  if (comes_first(task.index_)) return;
  if (!first_wants_.load(std::memory_order_relaxed) && clock_.now() - e.turn_begin < kTurn_s) return;
  Grants next;
  {
    const std::lock_guard lock(mutex_);
    if (failed_ || !cores_.pause(task.index_, clock_.now())) return;
    e.turn.store(kNone, std::memory_order_relaxed);
    next = note_grants();
  }
  for (const Cores::Grant& g : next) carry_out(g);
  task.set_cause({WaitCause::Kind::kCore});
  await_turn(e, -1, kNever);
  task.set_cause({});
}

void CoreScheduler::reached(Counter& counter) {
  Grants grants;
  {
    const std::lock_guard lock(mutex_);
    const auto found = waiting_.find(&counter);
    if (found == waiting_.end()) return;
    std::vector<int>& waiters = found->second;
    const auto target_of = [&](int index) { return entries_[static_cast<size_t>(index)]->target; };
    const double now = clock_.now();
    do {
      const uint64_t value = counter.value();
      for (const bool first : {true, false})
        std::erase_if(waiters, [&](int index) {
          if (target_of(index) > value || comes_first(index) != first) return false;
          entries_[static_cast<size_t>(index)]->counter = nullptr;
          cores_.want(index, now);
          return true;
        });
      if (waiters.empty()) {
        counter.tell_nobody();
        waiting_.erase(found);
        break;
      }
    } while (counter.tell(target_of(std::ranges::min(waiters, {}, target_of)), *this));
    grants = note_grants();
  }
  // The thread that tells may not be of the crew, and lose its processor to the task that it wakes there.
  const int here = grants.size() > 1 ? sched_getcpu() : -1;
  std::ranges::stable_partition(grants,
                                [&](const Cores::Grant& g) { return processors_[static_cast<size_t>(g.core)]->number != here; });
  for (const Cores::Grant& g : grants) carry_out(g);
}

// ---- from outside the crew

void CoreScheduler::drive(Crew& crew, Counter& done, uint64_t target) {
  while (done.value() < target && !crew.failed()) done.sleep_until(target, kSlice_s);
}

void CoreScheduler::release(Crew&) {
  const std::lock_guard lock(mutex_);
  failed_ = true;
  for (const auto& e : entries_) futex_wake(e->turn, 1);
}

}  // namespace shardlab::runtime
