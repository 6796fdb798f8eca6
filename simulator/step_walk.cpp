#include "simulator/step_walk.h"

#include <algorithm>
#include <limits>
#include <optional>

#include "plan/base/check.h"

namespace shardlab::forms {
namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();
/// Shares that exceed what there is by less are rounding, and so are seconds that are left.
constexpr double kRounding = 1e-9, kTogether = 1e-12;
/// However many collectives hold multiprocessors, a device leaves kernels some.
constexpr double kLeastUnits = 0.1;
constexpr size_t kMessages = kStageStreams;    ///< the first stream of messages, of which there is one each way
constexpr size_t kMostAtOnce = kMessages + 3;  ///< a kernel, and what is on the other streams

/// Speeds of tasks that run at once on one device: DeviceSharing's rule (simulator/resources.h), which has many devices.
void share_out(std::span<const Task* const> tasks, std::span<double> speeds) {
  std::array<double, kResources> left, asked{};
  left.fill(1);
  for (const Task* t : tasks) {
    left[static_cast<size_t>(Resource::kUnits)] -= t->held_units;
    for (size_t r = 0; r < kResources; ++r) asked[r] += t->share[r];
  }
  double& units = left[static_cast<size_t>(Resource::kUnits)];
  units = std::max(kLeastUnits, units);
  std::fill(speeds.begin(), speeds.end(), 1.0);
  std::array<bool, kMostAtOnce> settled{};
  for (;;) {
    size_t scarcest = kResources;
    double level = 1;
    for (size_t r = 0; r < kResources; ++r)
      if (asked[r] > kRounding && left[r] / asked[r] < level - kRounding) level = left[r] / asked[r], scarcest = r;
    if (scarcest == kResources) return;
    for (size_t i = 0; i < tasks.size(); ++i) {
      if (settled[i] || tasks[i]->share[scarcest] <= 0) continue;
      settled[i] = true;
      speeds[i] = level;
      for (size_t r = 0; r < kResources; ++r) {
        left[r] = std::max(0.0, left[r] - level * tasks[i]->share[r]);
        asked[r] -= tasks[i]->share[r];
      }
    }
  }
}

/// When a stream that has been free since `idle` starts what is ready at `ready`: it is woken where it had to wait.
double woken(double idle, double ready, double wake_s) { return idle >= ready ? idle : ready + std::min(wake_s, ready - idle); }

/// Messages from one stage to a neighbour, in order. Each side has a stream of its own for them. A message is under way on the
/// device that sends it, as if the other side had been there and waited; where that came later, it arrives later by as much.
class Edge {
 public:
  void leave(double begin, double end) { sent_.push_back({begin, end}); }
  void receive(double ready, double launched) { received_.push_back({ready, launched}); }
  bool awaited(size_t number) const { return number < received_.size(); }
  /// When message `number` has arrived; nothing while one side has not been there.
  std::optional<double> end(size_t number, double wake_s) {
    while (ends_.size() <= number && ends_.size() < std::min(sent_.size(), received_.size())) {
      const size_t i = ends_.size();
      const double before = i > 0 ? ends_.back() : 0;
      const double receiver = std::max(woken(before, received_[i].ready, wake_s), received_[i].launched);
      const double sender = sent_[i].begin - wake_s;
      const double begin = std::max(sender, receiver) + std::min(wake_s, std::abs(sender - receiver));
      ends_.push_back(sent_[i].end + begin - sent_[i].begin);
    }
    if (number >= ends_.size()) return std::nullopt;
    return ends_[number];
  }

 private:
  struct Sent {
    double begin, end;
  };
  struct Received {
    double ready, launched;
  };
  std::vector<Sent> sent_;
  std::vector<Received> received_;
  std::vector<double> ends_;
};

/// A collective of the control streams of several stages.
struct Meeting {
  int there = 0;
  double first = kNever, last = 0;
};

struct Shared {
  std::vector<Edge> edges;
  std::vector<Meeting> meetings;
};

class StageWalk {
 public:
  StageWalk(const StageText& text, const WalkCosts& costs, Shared& shared) : text_(text), costs_(costs), shared_(shared) {
    for (const Event& e : text.events)
      if (e.kind == Event::Kind::kAsync) first_message_ = std::max(first_message_, static_cast<size_t>(e.number) + 1);
  }

  bool done() const { return next_ == text_.events.size(); }
  double now() const { return now_; }
  const Seconds8& spent() const { return spent_; }
  double hidden() const { return hidden_; }

  /// When the first of the messages under way would have left, if nothing else used its links; never, without any.
  double first_message() const {
    double first = kNever;
    for (const Queue& q : queues_)
      if (!q.empty() && static_cast<size_t>(q.waiting[q.head]) >= first_message_)
        first = std::min(first, std::max(q.start, now_) + asyncs_[static_cast<size_t>(q.waiting[q.head])].left);
    return first;
  }
  /// Nobody can go on before it has left.
  void send_first_message() {
    const double begin = now_;
    for (const size_t left = left_; left_ == left;) progress_once(kNever, nullptr, nullptr);
    at(Spent::kPipeline) += now_ - begin;
  }

  /// Goes on to the first event that another stage has to come to first. Whether it came any further.
  bool go_on() {
    const size_t from = next_;
    while (next_ < text_.events.size() && issue(text_.events[next_])) ++next_;
    if (next_ == text_.events.size() && running_ > 0) run_dry();
    return next_ != from;
  }

 private:
  struct Async {
    const Task* task = nullptr;
    double ready = 0, launched = 0;
    double left = 0;
    double end = -1;
    size_t edge = 0;  ///< of a message
    std::array<int32_t, 3> after{-1, -1, -1};
  };
  struct Queue {
    std::vector<int32_t> waiting;
    size_t head = 0;
    double idle = 0;   ///< since when
    double start = 0;  ///< of the one at its head
    bool empty() const { return head == waiting.size(); }
  };

  bool issue(const Event& e) {
    switch (e.kind) {
      case Event::Kind::kWork: work(text_.blocks[static_cast<size_t>(e.index)], e.times); return true;
      case Event::Kind::kAsync: begin_async(e); return true;
      case Event::Kind::kLaunched: launches_ += e.times; return true;
      case Event::Kind::kAwait: await(static_cast<size_t>(e.number)); return true;
      case Event::Kind::kSend: send(static_cast<size_t>(e.edge)); return true;
      case Event::Kind::kReceive:
        shared_.edges[static_cast<size_t>(e.edge)].receive(now_, costs_.launch_s * static_cast<double>(++launches_));
        return true;
      case Event::Kind::kArrived:
      case Event::Kind::kSent: {
        const auto end = shared_.edges[static_cast<size_t>(e.edge)].end(static_cast<size_t>(e.number), costs_.wake_s);
        if (!end) return false;
        if (*end > now_) wait_until(woken(now_, *end, costs_.wake_s), Spent::kPipeline);
        return true;
      }
      case Event::Kind::kMeet: return meet(e);
    }
    return true;
  }

  bool meet(const Event& e) {
    Meeting& m = shared_.meetings[static_cast<size_t>(e.number)];
    if (!met_) {
      met_ = true;
      launch();
      ++m.there;
      m.first = std::min(m.first, now_), m.last = std::max(m.last, now_);
    }
    if (m.there < e.times) return false;
    const Task& task = text_.tasks[static_cast<size_t>(e.index)];
    wait_until(m.last + std::min(costs_.wake_s, m.last - m.first), Spent::kPipeline);
    wait_until(now_ + task.seconds, task.spent);
    met_ = false;
    return true;
  }

  void work(const Block& b, int times) {
    if (running_ == 0) {
      const double n = times, first = costs_.launch_s * static_cast<double>(launches_) + b.launched;
      const double repeated = std::max((n - 1) * b.alone, (n - 1) * costs_.launch_s * static_cast<double>(b.tasks.size()));
      const double end = std::max(now_ + n * b.alone, first + repeated);
      for (size_t s = 0; s < kSpents; ++s) spent_[s] += n * b.spent[s];
      at(Spent::kLaunch) += std::max(0.0, end - now_ - n * b.alone);
      now_ = end;
      launches_ += times * static_cast<int64_t>(b.tasks.size());
      return;
    }
    for (int i = 0; i < times; ++i)
      for (const Task& t : b.tasks) run(t);
  }

  /// The host launches the next op.
  void launch() {
    const double launched = costs_.launch_s * static_cast<double>(++launches_);
    if (launched > now_) wait_until(launched, Spent::kLaunch);
  }

  void run(const Task& task) {
    launch();
    const double begin = now_;
    if (running_ == 0)
      now_ += task.seconds;
    else
      progress(kNever, &task);
    at(task.spent) += task.seconds;
    at(Spent::kData) += now_ - begin - task.seconds;  // what others took of the device
  }

  void begin_async(const Event& e) {
    const double launched = costs_.launch_s * static_cast<double>(e.ahead == 0 ? ++launches_ : launches_ + e.ahead);
    const size_t stream = static_cast<size_t>(e.stream), number = static_cast<size_t>(e.number);
    if (queues_.size() <= stream) queues_.resize(stream + 1);
    if (asyncs_.size() <= number) asyncs_.resize(number + 1);
    Queue& q = queues_[stream];
    const Task& task = text_.tasks[static_cast<size_t>(e.index)];
    asyncs_[number] = {.task = &task, .ready = now_, .launched = launched, .left = task.seconds, .after = e.after};
    q.waiting.push_back(e.number);
    ++running_;
    if (q.waiting.size() - q.head == 1) take_head(q);
  }

  /// When what a stream has next may start: never, before all that it comes after are over. The receiver of a message is woken when
  /// its sender is there.
  void take_head(Queue& q) {
    const Async& a = asyncs_[static_cast<size_t>(q.waiting[q.head])];
    const bool message = static_cast<size_t>(q.waiting[q.head]) >= first_message_;
    double ready = a.ready;
    for (const int32_t number : a.after) {
      if (number < 0) continue;
      SHARDLAB_CHECK(static_cast<size_t>(number) < asyncs_.size(), "a task comes after one that has not been issued");
      const double end = asyncs_[static_cast<size_t>(number)].end;
      ready = end < 0 ? kNever : std::max(ready, end);
    }
    q.start = ready == kNever ? kNever : std::max(woken(q.idle, ready, costs_.wake_s), a.launched) + (message ? costs_.wake_s : 0);
  }

  /// Messages have streams of their own behind those of collectives, one each way, and numbers behind the others.
  void send(size_t edge) {
    const size_t stream = kMessages + edge % 2, number = std::max(first_message_, asyncs_.size());
    if (queues_.size() <= stream) queues_.resize(stream + 1);
    asyncs_.resize(number + 1);
    const double launched = costs_.launch_s * static_cast<double>(++launches_);
    asyncs_[number] = {
        .task = &costs_.messages[edge], .ready = now_, .launched = launched, .left = costs_.messages[edge].seconds, .edge = edge};
    Queue& q = queues_[stream];
    q.waiting.push_back(static_cast<int32_t>(number));
    ++running_;
    if (q.waiting.size() - q.head == 1) take_head(q);
  }

  void await(size_t number) {
    const Async& a = asyncs_[number];
    if (a.end >= 0 && a.end <= now_) return;
    const double begin = now_;
    while (a.end < 0) progress_once(kNever, nullptr, nullptr);
    at(Spent::kData) += now_ - begin;
    wait_until(woken(begin, a.end, costs_.wake_s), Spent::kData);
  }

  void run_dry() {
    const double begin = now_;
    while (running_ > 0) progress_once(kNever, nullptr, nullptr);
    at(Spent::kData) += now_ - begin;
  }

  void wait_until(double when, Spent spent) {
    if (when <= now_) return;
    at(spent) += when - now_;
    if (running_ > 0) progress(when, nullptr);
    now_ = when;
  }

  /// Until `when`, or until the kernel is over.
  void progress(double when, const Task* kernel) {
    double left = kernel ? kernel->seconds : 0;
    while (kernel ? left > 0 : now_ < when && running_ > 0) {
      const double begin = now_;
      progress_once(when, kernel, &left);
      if (kernel) hidden_ += beside_ ? now_ - begin : 0;
    }
  }

  /// To the next change: somebody begins or ends.
  void progress_once(double when, const Task* kernel, double* left) {
    std::array<const Task*, kMostAtOnce> tasks;
    std::array<Queue*, kMostAtOnce> of;
    std::array<double, kMostAtOnce> speeds;
    size_t n = 0;
    double dt = when - now_;
    if (kernel) tasks[n] = kernel, of[n++] = nullptr;
    for (Queue& q : queues_) {
      if (q.empty()) continue;
      if (q.start > now_ + kTogether)
        dt = std::min(dt, q.start - now_);
      else if (n < kMostAtOnce)
        tasks[n] = asyncs_[static_cast<size_t>(q.waiting[q.head])].task, of[n++] = &q;
    }
    beside_ = kernel && n > 1;
    share_out({tasks.data(), n}, {speeds.data(), n});
    const auto left_of = [&](size_t i) -> double& {
      return of[i] ? asyncs_[static_cast<size_t>(of[i]->waiting[of[i]->head])].left : *left;
    };
    for (size_t i = 0; i < n; ++i) dt = std::min(dt, left_of(i) / speeds[i]);
    SHARDLAB_CHECK(dt < kNever, "a stage waits for what never comes");
    now_ += dt;
    for (size_t i = 0; i < n; ++i) {
      double& rest = left_of(i);
      rest -= dt * speeds[i];
      if (rest > kTogether) continue;
      rest = 0;
      if (of[i]) end_head(*of[i]);
    }
  }

  void end_head(Queue& q) {
    const size_t number = static_cast<size_t>(q.waiting[q.head++]);
    asyncs_[number].end = q.idle = now_;
    --running_;
    if (number >= first_message_) shared_.edges[asyncs_[number].edge].leave(q.start, now_), ++left_;
    for (Queue& other : queues_)
      if (!other.empty() && (&other == &q || other.start == kNever)) take_head(other);
  }

  double& at(Spent s) { return spent_[static_cast<size_t>(s)]; }

  const StageText& text_;
  const WalkCosts& costs_;
  Shared& shared_;
  size_t next_ = 0;
  double now_ = 0;
  int64_t launches_ = 0;
  Seconds8 spent_{};
  double hidden_ = 0;
  bool beside_ = false;  ///< the last progress had a kernel and a collective
  bool met_ = false;     ///< has come to the meeting that is next
  std::vector<Async> asyncs_;
  std::vector<Queue> queues_;
  int64_t running_ = 0;       ///< asyncs that have not ended
  size_t first_message_ = 0;  ///< number of the first that is a message
  size_t left_ = 0;           ///< messages that have left
};

}  // namespace

Task task_of(double seconds, const Demand& demand, Spent spent) {
  Task t{.seconds = seconds, .share = {}, .held_units = demand.held_units, .spent = spent};
  if (seconds <= 0) return t;
  for (size_t r = 0; r < kResources; ++r) {
    const double share = std::min(1.0, demand.busy_s[r] / seconds);
    t.share[r] = share > kRounding ? share : 0;
  }
  return t;
}

Block Block::part(size_t first, size_t last, double launch_s) const {
  Block b;
  b.tasks.assign(tasks.begin() + static_cast<std::ptrdiff_t>(first), tasks.begin() + static_cast<std::ptrdiff_t>(last));
  b.close(launch_s);
  return b;
}

void Block::close(double launch_s) {
  alone = launched = 0;
  spent = {};
  double after = 0;
  for (size_t i = tasks.size(); i-- > 0;) {
    after += tasks[i].seconds;
    launched = std::max(launched, launch_s * static_cast<double>(i + 1) + after);
    spent[static_cast<size_t>(tasks[i].spent)] += tasks[i].seconds;
  }
  alone = after;
}

Walked walk(std::span<const StageText> stages, const WalkCosts& costs) {
  Shared shared;
  shared.edges.resize(static_cast<size_t>(costs.edges));
  int32_t meetings = 0;
  for (const StageText& s : stages)
    for (const Event& e : s.events)
      if (e.kind == Event::Kind::kMeet) meetings = std::max(meetings, e.number + 1);
  shared.meetings.resize(static_cast<size_t>(meetings));
  std::vector<StageWalk> walks;
  walks.reserve(stages.size());
  for (const StageText& s : stages) walks.emplace_back(s, costs, shared);
  for (bool all = false; !all;) {
    all = true;
    bool any = false;
    for (StageWalk& w : walks) {
      if (!w.done()) any = w.go_on() || any;
      all = all && w.done();
    }
    if (any || all) continue;
    const auto next = std::ranges::min_element(walks, {}, &StageWalk::first_message);
    SHARDLAB_CHECK(next->first_message() < kNever, "the stages of a step wait for one another");
    next->send_first_message();
  }
  Walked out;
  for (size_t s = 0; s < walks.size(); ++s)
    if (s == 0 || walks[s].now() > out.seconds) out = {walks[s].now(), static_cast<int>(s), walks[s].spent(), walks[s].hidden()};
  return out;
}

}  // namespace shardlab::forms
