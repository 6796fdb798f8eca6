#include "runtime/crew.h"

#include <fmt/format.h>
#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <fstream>
#include <iterator>
#include <map>
#include <set>

#include "plan/base/check.h"
#include "plan/base/hash.h"
#include "runtime/spin.h"

namespace shardlab::runtime {

namespace {

/// "0-4, 6": ranks in ascending order, runs joined.
std::string ranges(const std::vector<int>& ranks) {
  std::string text;
  for (size_t i = 0; i < ranks.size();) {
    size_t last = i;
    while (last + 1 < ranks.size() && ranks[last + 1] == ranks[last] + 1) ++last;
    if (!text.empty()) text += ", ";
    text += last == i ? fmt::format("{}", ranks[i]) : fmt::format("{}-{}", ranks[i], ranks[last]);
    i = last + 1;
  }
  return text;
}

std::string what_for(const WaitCause& cause) {
  switch (cause.kind) {
    case WaitCause::Kind::kNothing: return "is under way";
    case WaitCause::Kind::kStart: return "waits for the next step";
    case WaitCause::Kind::kStream: return fmt::format("waits for stream {} to complete {} instructions", cause.peer, cause.amount);
    case WaitCause::Kind::kMessage: return fmt::format("waits for rank {} to offer its part", cause.peer);
    case WaitCause::Kind::kTaken: return fmt::format("waits for rank {} to read what it was offered", cause.peer);
    case WaitCause::Kind::kTurn: return fmt::format("waits for its rank to issue what comes before op #{}", cause.amount);
    case WaitCause::Kind::kCore: return "waits for a core";
  }
  return "";
}

constexpr const char* kStopped = "its thread is stopped";

constexpr double kLook_s = 0.2;  ///< between two looks at what may stand still
constexpr const char* kGone = "its process has ended";

/// What the operating system says of a thread.
std::string state_of_thread(int32_t process, int32_t thread) {
  std::ifstream file(fmt::format("/proc/{}/task/{}/stat", process, thread));
  std::string text;
  std::getline(file, text);
  const size_t name = text.rfind(')');  // "12 (name) S ..."
  switch (name == std::string::npos || name + 2 >= text.size() ? '?' : text[name + 2]) {
    case 'R': return "its thread runs";
    case 'S': return "its thread sleeps";
    case 'D': return "its thread is in the kernel";
    case 'T':
    case 't': return kStopped;
    default: return "its thread is gone";
  }
}

uint64_t pack(const WaitCause& cause) { return static_cast<uint64_t>(cause.kind) << 32 | static_cast<uint32_t>(cause.peer); }

}  // namespace

TaskSeat::TaskSeat(int rank, int stream) : rank_(rank), stream_(stream), process_(static_cast<int32_t>(::getpid())) {}

WaitCause TaskSeat::cause() const {
  const uint64_t packed = cause_.load(std::memory_order_relaxed);
  return {static_cast<WaitCause::Kind>(packed >> 32), static_cast<int32_t>(packed), amount_.load(std::memory_order_relaxed)};
}

void Task::set_cause(const WaitCause& cause) {
  seat_.cause_.store(pack(cause), std::memory_order_relaxed);
  seat_.amount_.store(cause.amount, std::memory_order_relaxed);
}

void Task::wait_slowly(Counter& counter, uint64_t target, const WaitCause& cause) {
  set_cause(cause);
  const double begin = now();
  const double deadline = cause.kind == WaitCause::Kind::kStart ? kNever : begin + crew_.timeout_s();
  const Waited waited = crew_.scheduler().block(*this, counter, target, deadline);
  if (waited == Waited::kTimedOut)
    crew_.fail(fmt::format("rank {} has waited {:.3g} s, which is the limit\n{}", rank(), now() - begin, crew_.picture()),
               "raise the time-out (measure.timeout) if a step may really take so long");
  if (waited != Waited::kReached) throw Released{};
  set_cause({});
}

void Task::pause_slowly() {
  crew_.scheduler().pause(*this);
  if (failed()) throw Released{};
}

double SteadyClock::now() const {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// ---- tasks that run freely

ThreadScheduler::ThreadScheduler(const Clock& clock, int tasks, int cores) : clock_(clock), spins_(tasks <= cores ? kSpins : 0) {}

Waited ThreadScheduler::block(Task& task, Counter& counter, uint64_t target, double deadline) {
  for (int i = 0; i < spins_; ++i) {
    if (counter.value() >= target) return Waited::kReached;
    relax();
  }
  task.sleeping_on_.store(&counter, std::memory_order_seq_cst);
  Waited waited = Waited::kReached;
  while (counter.value() < target) {
    const double now = clock_.now();
    if (task.failed()) {
      waited = Waited::kReleased;
      break;
    }
    if (now >= deadline) {
      waited = Waited::kTimedOut;
      break;
    }
    counter.sleep_until(target, kSlice_s);
  }
  task.sleeping_on_.store(nullptr, std::memory_order_seq_cst);
  return waited;
}

void ThreadScheduler::drive(Crew& crew, Counter& done, uint64_t target) {
  while (done.value() < target && !crew.failed()) done.sleep_until(target, kSlice_s);
}

void ThreadScheduler::release(Crew& crew) {
  for (const auto& task : crew.tasks())
    if (Counter* counter = task->sleeping_on_.load(std::memory_order_seq_cst)) counter->wake_all();
}

// ---- tasks driven one at a time

namespace {
constexpr double kDecision_s = 1e-6;
}  // namespace

void SeededScheduler::add(Task& task) {
  const std::lock_guard lock(mutex_);
  SHARDLAB_CHECK(entries_.size() == static_cast<size_t>(task.index_), "a seeded scheduler drives one crew, from its first task on");
  entries_.push_back(std::make_unique<Entry>());
  entries_.back()->task = &task;
}

bool SeededScheduler::runnable(const Entry& e) const {
  return !e.task->finished() && (e.counter == nullptr || e.counter->value() >= e.target);
}

SeededScheduler::Entry* SeededScheduler::choose() {
  std::vector<Entry*> able;
  for (const auto& e : entries_)
    if (runnable(*e)) able.push_back(e.get());
  const uint64_t decision = decisions_.fetch_add(1);
  now_.store(now_.load() + kDecision_s);
  if (!able.empty()) return able[mix(seed_ ^ mix(decision)) % able.size()];
  if (done_ == nullptr || done_->value() >= done_target_) return nullptr;
  // Nothing can run and the driver's goal is not reached: whoever waits with the earliest deadline has timed out.
  Entry* first = nullptr;
  for (const auto& e : entries_)
    if (!e->task->finished() && e->deadline < kNever && (first == nullptr || e->deadline < first->deadline)) first = e.get();
  if (first == nullptr) return nullptr;
  now_.store(std::max(now_.load(), first->deadline));
  first->timed_out = true;
  return first;
}

void SeededScheduler::pass_on() {
  running_ = choose();
  if (running_ != nullptr) {
    running_->turn.notify_one();
  } else {
    driver_turn_.notify_one();
  }
}

void SeededScheduler::take_turn(std::unique_lock<std::mutex>& lock, Entry& e) {
  e.turn.wait(lock, [&] { return running_ == &e || released_; });
  e.counter = nullptr;
  e.deadline = kNever;
}

SeededScheduler::Entry& SeededScheduler::entry_of(Task& task) { return *entries_[static_cast<size_t>(task.index_)]; }

void SeededScheduler::enter(Task& task) {
  std::unique_lock lock(mutex_);
  take_turn(lock, entry_of(task));
}

void SeededScheduler::leave(Task&) {
  const std::lock_guard lock(mutex_);
  if (!released_) pass_on();
}

Waited SeededScheduler::block(Task& task, Counter& counter, uint64_t target, double deadline) {
  std::unique_lock lock(mutex_);
  if (released_) return Waited::kReleased;
  Entry& e = entry_of(task);
  e.counter = &counter;
  e.target = target;
  e.deadline = deadline;
  e.timed_out = false;
  pass_on();
  take_turn(lock, e);
  if (counter.value() >= target) return Waited::kReached;
  return released_ ? Waited::kReleased : Waited::kTimedOut;
}

void SeededScheduler::pause(Task& task) {
  std::unique_lock lock(mutex_);
  if (released_) return;
  pass_on();
  take_turn(lock, entry_of(task));
}

void SeededScheduler::drive(Crew& crew, Counter& done, uint64_t target) {
  std::unique_lock lock(mutex_);
  done_ = &done;
  done_target_ = target;
  pass_on();
  driver_turn_.wait(lock, [&] { return running_ == nullptr || crew.failed(); });
  done_ = nullptr;
}

void SeededScheduler::release(Crew&) {
  const std::lock_guard lock(mutex_);
  released_ = true;
  for (const auto& e : entries_) e->turn.notify_all();
  driver_turn_.notify_all();
}

// ---- the crew

Crew::Crew(Scheduler& scheduler, double timeout_s, std::function<std::string(const TaskSeat&)> describe)
    : scheduler_(scheduler), timeout_s_(timeout_s), describe_(std::move(describe)) {}

Crew::~Crew() { join(); }

Task& Crew::add(int rank, int stream) { return add(own_seats_.emplace_back(rank, stream)); }

void Crew::observe(std::span<const TaskSeat* const> seats) { seats_.insert(seats_.end(), seats.begin(), seats.end()); }

Task& Crew::add(TaskSeat& seat) {
  SHARDLAB_CHECK(threads_.empty() && seats_.size() == tasks_.size(), "tasks are added before the first is started or others seen");
  seats_.push_back(&seat);
  tasks_.push_back(std::make_unique<Task>(*this, seat, static_cast<int>(tasks_.size())));
  scheduler_.add(*tasks_.back());
  return *tasks_.back();
}

void Crew::start(const std::function<void(Task&)>& body) {
  threads_.reserve(tasks_.size());
  for (const auto& task : tasks_) {
    threads_.emplace_back([this, body, &task = *task] {
      task.seat_.thread_.store(static_cast<int32_t>(::gettid()), std::memory_order_relaxed);
      ::pthread_setname_np(::pthread_self(), fmt::format("rank {}.{}", task.rank(), task.stream()).substr(0, 15).c_str());
      scheduler_.enter(task);
      try {
        if (!failed()) body(task);
      } catch (const Released&) {
      } catch (const WorldError& e) {
        fail(fmt::format("rank {} failed at {}: {}", task.rank(), describe_(task.seat_), e.what()), e.hint());
      } catch (const std::exception& e) {
        fail(fmt::format("rank {} failed at {}: {}", task.rank(), describe_(task.seat_), e.what()));
      }
      task.seat_.finished_.store(true, std::memory_order_release);
      scheduler_.leave(task);
    });
  }
}

void Crew::join() {
  for (std::thread& t : threads_) t.join();
  threads_.clear();
}

void Crew::fail(const std::string& message, const std::string& hint) {
  {
    const std::lock_guard lock(mutex_);
    if (failed_.load()) return;
    message_ = message;
    hint_ = hint;
    failed_.store(true, std::memory_order_seq_cst);
  }
  scheduler_.release(*this);
}

void Crew::throw_if_failed() const {
  if (!failed()) return;
  const std::lock_guard lock(mutex_);
  throw WorldError(message_, hint_);
}

std::string Crew::situation_of(const TaskSeat& seat) const {
  return seat.finished() ? "has ended" : fmt::format("{} {}", describe_(seat), what_for(seat.cause()));
}

std::string Crew::situation() const {
  std::vector<const TaskSeat*> seats;
  for (const TaskSeat* seat : seats_)
    if (seat->cause().kind != WaitCause::Kind::kStart) seats.push_back(seat);
  return situation_of(seats, "\n");
}

std::string Crew::picture() const {
  if (seats_.size() == tasks_.size()) return situation();
  const std::vector<Place> before = places();
  std::this_thread::sleep_for(std::chrono::duration<double>(kLook_s));
  const std::string still = standstill(before);
  return still.empty() ? situation() : still;
}

std::vector<Crew::Place> Crew::places() const {
  std::vector<Place> places;
  for (const TaskSeat* seat : seats_) places.push_back({seat->place(), seat->cause()});
  return places;
}

std::string Crew::standstill(const std::vector<Place>& before, int32_t gone) const {
  using Kind = WaitCause::Kind;
  std::string text;
  std::vector<const TaskSeat*> others;
  std::set<int> named, done;
  bool moved = false;
  const auto thread_of = [&](const TaskSeat& seat) {
    return seat.process() == gone ? kGone : state_of_thread(seat.process(), seat.thread());
  };
  const auto is_unable = [&](const TaskSeat& seat) {
    const std::string thread = thread_of(seat);
    return thread == kStopped || thread == kGone;
  };
  // Where a thread is stopped or gone, that is the reason: others may stand in an op too, for a lock that it holds.
  const bool unable = std::ranges::any_of(seats_, [&](const TaskSeat* seat) { return !seat->finished() && is_unable(*seat); });
  for (size_t i = 0; i < seats_.size(); ++i) {
    const TaskSeat& seat = *seats_[i];
    if (seat.finished()) {
      done.insert(seat.rank());
      continue;
    }
    const Kind waits_for = seat.cause().kind;
    const bool here = seat.place() == before[i].place && waits_for == before[i].cause.kind;
    moved = moved || !here;
    // One may be stopped while it waits for what has come.
    const bool stands_still = here && (unable ? is_unable(seat) : waits_for == Kind::kNothing);
    if (stands_still)
      text +=
          fmt::format("{}rank {} stands still at {}, {}", text.empty() ? "" : "; ", seat.rank(), describe_(seat), thread_of(seat));
    else if (waits_for != Kind::kStart)
      others.push_back(&seat);
    (stands_still || waits_for != Kind::kStart ? named : done).insert(seat.rank());
  }
  if (text.empty() && (moved || others.empty())) return "";
  if (text.empty()) text = "every rank waits";
  if (!others.empty()) text += "; " + situation_of(others, "; ");
  // A rank with nothing of the step left to do waits in no op.
  std::vector<int> idle;
  std::ranges::set_difference(done, named, std::back_inserter(idle));
  if (!idle.empty())
    text += idle.size() == 1 ? fmt::format("; rank {}: has done its part of the step", idle.front())
                             : fmt::format("; ranks {}: have done their part of the step", ranges(idle));
  return text;
}

std::string Crew::awaited(int first, int count) const {
  using Kind = WaitCause::Kind;
  std::string text;
  std::vector<const TaskSeat*> others;
  for (const TaskSeat* seat : seats_) {
    if (seat->finished() || (seat->rank() >= first && seat->rank() < first + count)) continue;
    const WaitCause cause = seat->cause();
    const bool for_peer = cause.kind == Kind::kMessage || cause.kind == Kind::kTaken;
    if (for_peer && cause.peer >= first && cause.peer < first + count)
      text += fmt::format("{}rank {} is waited for by rank {} at {}", text.empty() ? "" : "; ", cause.peer, seat->rank(),
                          describe_(*seat));
    else if (cause.kind != Kind::kStart)
      others.push_back(seat);
  }
  if (!text.empty() && !others.empty()) text += "; " + situation_of(others, "; ");
  return text;
}

std::string Crew::situation_of(const std::vector<const TaskSeat*>& seats, std::string_view separator) const {
  std::map<std::string, std::vector<int>> by_text;
  for (const TaskSeat* seat : seats) by_text[situation_of(*seat)].push_back(seat->rank());
  std::string text;
  for (auto& [situation, ranks] : by_text) {
    std::ranges::sort(ranks);
    text +=
        fmt::format("{}{} {}: {}", text.empty() ? "" : separator, ranks.size() == 1 ? "rank" : "ranks", ranges(ranks), situation);
  }
  return text;
}

}  // namespace shardlab::runtime
