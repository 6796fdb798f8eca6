#include "runtime/core_scheduler.h"

#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "plan/base/check.h"
#include "runtime/futex.h"
#include "runtime/spin.h"

namespace shardlab {
namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();

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

CoreScheduler::CoreScheduler(const Clock& clock, std::vector<int> processors) : clock_(clock) {
  SHARDLAB_CHECK(!processors.empty(), "tasks without a core");
  for (const int p : processors) {
    cores_.push_back(std::make_unique<Core>());
    cores_.back()->processor = p;
    cores_.back()->idle = true;
  }
  for (int c = static_cast<int>(processors.size()) - 1; c >= 0; --c) idle_.push_back(c);
  // So that two programs do not begin on the same one.
  std::ranges::rotate(idle_, idle_.begin() + getpid() % static_cast<int>(idle_.size()));
}

void CoreScheduler::add(Task& task) {
  SHARDLAB_CHECK(entries_.size() == static_cast<size_t>(task.index_), "a scheduler of cores has one crew, from its first task on");
  entries_.push_back(std::make_unique<Entry>());
  entries_.back()->task = &task;
}

CoreScheduler::Entry& CoreScheduler::entry_of(const Task& task) { return *entries_[static_cast<size_t>(task.index_)]; }

bool CoreScheduler::comes_first(const Entry& e) { return e.task->stream() != 0; }

// ---- under the lock

CoreScheduler::Handover CoreScheduler::grant(Entry& e, int core) {
  const bool bind = e.last_core != core;
  e.core = e.last_core = core;
  if (!std::exchange(e.goes_on, false)) e.turn_begin = clock_.now();
  return {&e, bind};
}

/// Gives `e` an idle core, its own if that is idle. False: there is none.
bool CoreScheduler::grant_idle(Entry& e, Handover& handover) {
  if (idle_.empty()) return false;
  auto found = std::ranges::find(idle_, e.last_core);
  if (found == idle_.end()) found = idle_.end() - 1;
  const int core = *found;
  idle_.erase(found);
  cores_[static_cast<size_t>(core)]->idle.store(false, std::memory_order_relaxed);
  handover = grant(e, core);
  return true;
}

void CoreScheduler::note_queued() {
  first_wants_.store(!first_.empty(), std::memory_order_relaxed);
  want_pauses(!first_.empty() || !control_.empty());
}

void CoreScheduler::queue(Entry& e, bool in_front) {
  std::deque<Entry*>& of = comes_first(e) ? first_ : control_;
  if (in_front)
    of.push_front(&e);
  else
    of.push_back(&e);
}

CoreScheduler::Entry* CoreScheduler::next_for(int core) {
  std::deque<Entry*>& from = first_.empty() ? control_ : first_;
  if (from.empty()) return nullptr;
  auto chosen = from.begin();
  if (first_.empty()) {
    const auto had_it = std::ranges::find_if(from, [&](const Entry* e) { return e->last_core == core; });
    if (had_it != from.end()) chosen = had_it;
  }
  Entry* const e = *chosen;
  from.erase(chosen);
  return e;
}

/// Takes the core of `e` away, for the next or for nobody.
CoreScheduler::Handover CoreScheduler::give_up(Entry& e) {
  const int core = e.core;
  if (core < 0) return {};
  e.core = -1;
  e.turn.store(kNone, std::memory_order_relaxed);
  if (Entry* const next = next_for(core)) {
    note_queued();
    return grant(*next, core);
  }
  idle_.push_back(core);
  cores_[static_cast<size_t>(core)]->idle.store(true, std::memory_order_relaxed);
  return {};
}

/// `e` waits for its counter no longer, whatever that has reached.
void CoreScheduler::forget(Entry& e) {
  std::erase(first_, &e);
  std::erase(control_, &e);
  note_queued();
  if (e.counter == nullptr) return;
  const auto found = waiting_.find(e.counter);
  std::erase(found->second, &e);
  if (found->second.empty()) {
    e.counter->tell_nobody();
    waiting_.erase(found);
  }
  e.counter = nullptr;
}

// ---- outside of it

/// Lets the thread of a task that was given a core know.
void CoreScheduler::carry_out(const Handover& handover) {
  if (handover.to == nullptr) return;
  Entry& e = *handover.to;
  if (handover.bind) bind_thread(e.thread, cores_[static_cast<size_t>(e.last_core)]->processor);
  if (e.turn.exchange(kGranted, std::memory_order_acq_rel) == kAsleep) futex_wake(e.turn, 1);
}

/// Returns when the task has a core. It watches for as long as `watched_core`, the one that it gave up, is idle; none: -1.
Waited CoreScheduler::await_turn(Entry& e, int watched_core, double deadline) {
  if (watched_core >= 0) {
    const std::atomic<bool>& idle = cores_[static_cast<size_t>(watched_core)]->idle;
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
    if (e.core >= 0) continue;  // given one at this moment
    // What it waited for has come, or is just being told: only a core is missing.
    if (!failed && (e.counter == nullptr || e.counter->value() >= e.target)) continue;
    forget(e);
    return failed ? Waited::kReleased : Waited::kTimedOut;
  }
}

void CoreScheduler::take_core(Entry& e) {
  Handover own;
  {
    const std::lock_guard lock(mutex_);
    e.turn.store(kNone, std::memory_order_relaxed);
    if (!grant_idle(e, own)) {
      queue(e);
      note_queued();
    }
  }
  if (own.to != nullptr) return carry_out(own);
  await_turn(e, -1, kNever);
}

// ---- what tasks call

void CoreScheduler::enter(Task& task) {
  Entry& e = entry_of(task);
  e.thread = static_cast<int32_t>(syscall(SYS_gettid));
  take_core(e);
}

void CoreScheduler::leave(Task& task) { step_aside(task); }

void CoreScheduler::step_aside(Task& task) {
  Handover next;
  {
    const std::lock_guard lock(mutex_);
    next = give_up(entry_of(task));
  }
  carry_out(next);
}

void CoreScheduler::step_back(Task& task) { take_core(entry_of(task)); }

Waited CoreScheduler::block(Task& task, Counter& counter, uint64_t target, double deadline) {
  Entry& e = entry_of(task);
  Handover next;
  int core = -1;
  {
    const std::lock_guard lock(mutex_);
    if (failed_ || e.core < 0) return Waited::kReleased;  // without a core: released from another wait
    e.counter = &counter;
    e.target = target;
    waiting_[&counter].push_back(&e);
    if (counter.tell(target, *this)) {
      forget(e);
      return Waited::kReached;
    }
    core = e.core;
    next = give_up(e);
  }
  carry_out(next);
  return await_turn(e, next.to == nullptr ? core : -1, deadline);
}

void CoreScheduler::pause(Task& task) {
  Entry& e = entry_of(task);
  if (comes_first(e)) return;
  const bool over = clock_.now() - e.turn_begin >= kTurn_s;
  if (!over && !first_wants_.load(std::memory_order_relaxed)) return;
  Handover next;
  {
    const std::lock_guard lock(mutex_);
    if (failed_ || e.core < 0) return;
    const bool ends = over && !control_.empty();
    if (!ends && first_.empty()) return;
    const int core = e.core;
    e.core = -1;
    e.turn.store(kNone, std::memory_order_relaxed);
    if (!first_.empty()) {
      e.goes_on = !ends;
      if (!ends) queue(e, true);
      next = grant(*next_for(core), core);
    } else {
      Entry& oldest = *control_.front();
      control_.pop_front();
      next = grant(oldest, core);
    }
    if (ends) queue(e);
    note_queued();
  }
  carry_out(next);
  await_turn(e, -1, kNever);
}

void CoreScheduler::reached(Counter& counter) {
  std::vector<Handover> handovers;
  {
    const std::lock_guard lock(mutex_);
    const auto found = waiting_.find(&counter);
    if (found == waiting_.end()) return;
    std::vector<Entry*>& waiters = found->second;
    do {
      const uint64_t value = counter.value();
      for (const bool first : {true, false})
        std::erase_if(waiters, [&](Entry* e) {
          if (e->target > value || comes_first(*e) != first) return false;
          e->counter = nullptr;
          if (Handover handover; grant_idle(*e, handover))
            handovers.push_back(handover);
          else
            queue(*e);
          return true;
        });
      if (waiters.empty()) {
        counter.tell_nobody();
        waiting_.erase(found);
        break;
      }
    } while (counter.tell(std::ranges::min(waiters, {}, &Entry::target)->target, *this));
    note_queued();
  }
  // The thread that tells may not be of the crew, and lose its processor to the task that it wakes there.
  const int here = handovers.size() > 1 ? sched_getcpu() : -1;
  std::ranges::stable_partition(handovers,
                                [&](const Handover& h) { return cores_[static_cast<size_t>(h.to->last_core)]->processor != here; });
  for (const Handover& h : handovers) carry_out(h);
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

}  // namespace shardlab
