#include "simulator/step_walk.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <queue>
#include <tuple>
#include <utility>
#include <vector>

#include "plan/base/check.h"

namespace shardlab::simulator::forms {
namespace {

/// Times that differ by less are one.
constexpr double kTogether = 1e-12;

/// When a stream that has been free since `idle` starts what is ready at `ready`: it is woken where it had to wait.
double woken(double idle, double ready, double wake_s) { return idle >= ready ? idle : ready + std::min(wake_s, ready - idle); }

/// What has a timer, or runs on devices: a control stream, another stream, an edge, a meeting.
struct Runner {
  enum class Doing : uint8_t {
    kIdle,
    kBlocked,    ///< of a control stream: until something else ends
    kWaking,     ///< it has
    kLaunching,  ///< of a control stream: the host has yet to launch its task
    kJumping,    ///< of a control stream: over a block that has the device for itself
    kStarting,   ///< of the others: when all are there and awake
    kRunning
  } doing = Doing::kIdle;
  int64_t timer = -1;   ///< number of the one that ends this; earlier ones are void
  bool shares = false;  ///< it runs on devices
};
using Doing = Runner::Doing;

struct Async {
  const Task* task = nullptr;
  double ready = 0, launched = 0;
  double end = -1;
  std::array<int32_t, 3> after{-1, -1, -1};
};

struct Queue {
  std::vector<int32_t> waiting;
  size_t head = 0;
  double idle = 0;  ///< since when
  bool empty() const { return head == waiting.size(); }
};

/// Where a stage is in its text.
struct Stage {
  const StageText* text = nullptr;
  size_t next = 0;
  size_t task = 0;  ///< of a block
  int repeated = 0;
  int64_t launches = 0;
  double since = 0;  ///< of what the control stream is doing
  double control_end = 0, end = 0;
  Seconds8 spent{};
  std::vector<Async> asyncs;
  std::array<Queue, kStageStreams> queues;
  int pending = 0;  ///< asyncs and messages that have been issued and are not over
  // Seconds in which a kernel has something else beside it.
  bool kernel = false;
  int others = 0;
  double touched = 0, hidden = 0;

  double& at(Spent s) { return spent[static_cast<size_t>(s)]; }
};

/// Messages from one stage to a neighbour, in order. Each side has a stream of its own for them.
struct Edge {
  struct Posted {
    double ready, launched;
  };
  std::vector<Posted> sent, received;
  std::vector<double> ends;
};

/// A collective of the control streams of several stages.
struct Meeting {
  std::vector<size_t> there;
  double first = 0;
  const Task* task = nullptr;
};

class Walk {
 public:
  Walk(std::span<const StageText> texts, const WalkCosts& costs)
      : costs_(costs), stages_(texts.size()), edges_(costs.messages.size()), meetings_(meetings_in(texts)) {
    for (size_t s = 0; s < texts.size(); ++s) {
      stages_[s].text = &texts[s];
      size_t asyncs = 0;
      for (const Event& e : texts[s].events) asyncs += e.kind == Event::Kind::kAsync ? 1 : 0;
      stages_[s].asyncs.resize(asyncs);
    }
    first_edge_ = stages_.size() * kRunners, first_meeting_ = first_edge_ + edges_.size();
    runners_.resize(first_meeting_ + meetings_.size());
    sharing_ = DeviceSharing(static_cast<int>(stages_.size()), static_cast<int>(runners_.size()));
  }

  Walked run() {
    for (size_t s = 0; s < stages_.size(); ++s) go_on(s);
    while (!timers_.empty()) {
      const auto [when, number, runner] = timers_.top();
      timers_.pop();
      if (runners_[runner].timer != number) continue;
      if (when > now_ + kTogether) now_ = when;
      if (std::exchange(runners_[runner].shares, false)) {
        sharing_.finish(static_cast<int>(runner), now_);
        reset_timers();
      }
      over(runner);
    }
    return result();
  }

 private:
  static constexpr size_t kRunners = 1 + kStageStreams;  ///< of a stage: its control stream, and others

  static size_t meetings_in(std::span<const StageText> texts) {
    int32_t n = 0;
    for (const StageText& s : texts)
      for (const Event& e : s.events)
        if (e.kind == Event::Kind::kMeet) n = std::max(n, e.number + 1);
    return static_cast<size_t>(n);
  }

  Walked result() const {
    Walked out;
    for (size_t s = 0; s < stages_.size(); ++s) {
      const Stage& stage = stages_[s];
      SHARDLAB_CHECK(stage.next == stage.text->events.size() && stage.pending == 0, "stage {} waits for what never comes", s);
      if (s > 0 && stage.end <= out.seconds) continue;
      out = {stage.end, static_cast<int>(s), stage.spent, stage.hidden};
      out.spent[static_cast<size_t>(Spent::kData)] += stage.end - stage.control_end;
    }
    return out;
  }

  // --- timers and devices

  void set_timer(size_t runner, Doing doing, double when) {
    runners_[runner].doing = doing;
    runners_[runner].timer = timer_number_++;
    timers_.emplace(std::max(when, now_), runners_[runner].timer, runner);
  }

  void run_on_devices(size_t runner, double seconds, std::span<const DeviceSharing::Part> parts) {
    if (seconds <= 0) return set_timer(runner, Doing::kRunning, now_);
    runners_[runner].doing = Doing::kRunning;
    runners_[runner].shares = true;
    sharing_.start(static_cast<int>(runner), seconds, parts, now_);
    reset_timers();
  }

  /// What shares a device with something that began or ended will end at another time.
  void reset_timers() {
    for (const int runner : sharing_.changed())
      if (runners_[static_cast<size_t>(runner)].shares)
        set_timer(static_cast<size_t>(runner), Doing::kRunning, sharing_.end_of(runner));
  }

  void over(size_t runner) {
    if (runner >= first_meeting_) return meeting_over(runner - first_meeting_);
    if (runner >= first_edge_) return message_over(runner - first_edge_);
    const size_t stage = runner / kRunners;
    if (runner % kRunners == 0)
      control_over(stage);
    else
      async_over(stage, runner % kRunners - 1);
  }

  /// Before what runs on a stage's device changes.
  void touch(Stage& s) {
    if (s.kernel && s.others > 0) s.hidden += now_ - s.touched;
    s.touched = now_;
  }
  void change_others(Stage& s, int by) {
    touch(s);
    s.others += by;
  }

  // --- the control stream

  Runner& control(size_t stage) { return runners_[stage * kRunners]; }
  /// When the host launches what is next in its order, or `ahead` beyond where the control stream is.
  double launch(Stage& s, int32_t ahead = 0) const {
    return costs_.launch_s * static_cast<double>(ahead == 0 ? ++s.launches : s.launches + ahead);
  }

  /// To the first event that takes time or waits.
  void go_on(size_t stage) {
    Stage& s = stages_[stage];
    for (; s.next < s.text->events.size(); ++s.next)
      if (!issue(stage, s.text->events[s.next])) return;
    s.control_end = now_;
    s.end = std::max(s.end, now_);
  }

  /// Whether the stream goes on at once.
  bool issue(size_t stage, const Event& e) {
    Stage& s = stages_[stage];
    switch (e.kind) {
      case Event::Kind::kWork: return work(stage, s.text->blocks[static_cast<size_t>(e.index)], e.times);
      case Event::Kind::kAsync: begin_async(stage, e); return true;
      case Event::Kind::kLaunched: s.launches += e.times; return true;
      case Event::Kind::kSend:
      case Event::Kind::kReceive: {
        Edge& edge = edges_[static_cast<size_t>(e.edge)];
        ++s.pending;
        const double launched = launch(s, e.ahead);
        (e.kind == Event::Kind::kSend ? edge.sent : edge.received).push_back({now_, launched});
        start_message(static_cast<size_t>(e.edge));
        return true;
      }
      case Event::Kind::kAwait:
      case Event::Kind::kArrived:
      case Event::Kind::kSent:
        if (has_come(s, e)) return true;
        s.since = now_;
        control(stage).doing = Doing::kBlocked;
        return false;
      case Event::Kind::kMeet: return meet(stage, e);
    }
    return true;
  }

  bool has_come(const Stage& s, const Event& e) const {
    if (e.kind == Event::Kind::kAwait) return s.asyncs[static_cast<size_t>(e.number)].end >= 0;
    return static_cast<size_t>(e.number) < edges_[static_cast<size_t>(e.edge)].ends.size();
  }

  /// Something of the stage is over.
  void notice(size_t stage) {
    Stage& s = stages_[stage];
    s.end = std::max(s.end, now_);
    if (control(stage).doing != Doing::kBlocked || !has_come(s, s.text->events[s.next])) return;
    set_timer(stage * kRunners, Doing::kWaking, now_ + std::min(costs_.wake_s, now_ - s.since));
  }

  /// Whether the block is over already.
  bool work(size_t stage, const Block& b, int times) {
    Stage& s = stages_[stage];
    if (s.repeated == times || b.tasks.empty()) {
      s.repeated = 0;
      return true;
    }
    s.since = now_;
    if (s.task == 0 && s.pending == 0) {
      const double n = times - s.repeated, first = costs_.launch_s * static_cast<double>(s.launches) + b.launched;
      const double repeated = std::max((n - 1) * b.alone, (n - 1) * costs_.launch_s * static_cast<double>(b.tasks.size()));
      set_timer(stage * kRunners, Doing::kJumping, std::max(now_ + n * b.alone, first + repeated));
      return false;
    }
    const double launched = launch(s);
    if (launched > now_)
      set_timer(stage * kRunners, Doing::kLaunching, launched);
    else
      run_task(stage);
    return false;
  }

  const Task& task_of(const Stage& s) const {
    return s.text->blocks[static_cast<size_t>(s.text->events[s.next].index)].tasks[s.task];
  }

  void run_task(size_t stage) {
    Stage& s = stages_[stage];
    touch(s);
    s.kernel = true;
    s.since = now_;
    const Task& task = task_of(s);
    const DeviceSharing::Part part{static_cast<int>(stage), &task.demand};
    run_on_devices(stage * kRunners, task.seconds, {&part, 1});
  }

  void control_over(size_t stage) {
    Stage& s = stages_[stage];
    const Event& e = s.text->events[s.next];
    const double passed = now_ - s.since;
    switch (std::exchange(control(stage).doing, Doing::kIdle)) {
      case Doing::kWaking:
        s.at(e.kind == Event::Kind::kAwait ? Spent::kData : Spent::kPipeline) += passed;
        ++s.next;
        break;
      case Doing::kLaunching:
        s.at(Spent::kLaunch) += passed;
        if (e.kind == Event::Kind::kMeet) return arrive(stage, e);
        return run_task(stage);
      case Doing::kJumping: {
        const Block& b = s.text->blocks[static_cast<size_t>(e.index)];
        const int n = e.times - s.repeated;
        for (size_t i = 0; i < kSpents; ++i) s.spent[i] += n * b.spent[i];
        s.at(Spent::kLaunch) += passed - n * b.alone;
        s.launches += n * static_cast<int64_t>(b.tasks.size());
        s.repeated = e.times;
        break;
      }
      case Doing::kRunning: {
        touch(s);
        s.kernel = false;
        const Task& task = task_of(s);
        s.at(task.spent) += task.seconds;
        s.at(Spent::kData) += passed - task.seconds;  // what others took of the device
        if (++s.task == s.text->blocks[static_cast<size_t>(e.index)].tasks.size()) s.task = 0, ++s.repeated;
        break;
      }
      default: SHARDLAB_CHECK(false, "the control stream of stage {} was doing nothing", stage);
    }
    go_on(stage);
  }

  // --- other streams

  void begin_async(size_t stage, const Event& e) {
    Stage& s = stages_[stage];
    const double launched = launch(s, e.ahead);
    s.asyncs[static_cast<size_t>(e.number)] = {
        .task = &s.text->tasks[static_cast<size_t>(e.index)], .ready = now_, .launched = launched, .after = e.after};
    s.queues[static_cast<size_t>(e.stream)].waiting.push_back(e.number);
    ++s.pending;
    start_async(stage, static_cast<size_t>(e.stream));
  }

  /// What a stream has next starts when all that it comes after are over.
  void start_async(size_t stage, size_t stream) {
    Stage& s = stages_[stage];
    const Queue& q = s.queues[stream];
    const size_t runner = stage * kRunners + 1 + stream;
    if (q.empty() || runners_[runner].doing != Doing::kIdle) return;
    const Async& a = s.asyncs[static_cast<size_t>(q.waiting[q.head])];
    double ready = a.ready;
    for (const int32_t number : a.after) {
      if (number < 0) continue;
      const double end = s.asyncs[static_cast<size_t>(number)].end;
      if (end < 0) return;
      ready = std::max(ready, end);
    }
    set_timer(runner, Doing::kStarting, std::max(woken(q.idle, ready, costs_.wake_s), a.launched));
  }

  void async_over(size_t stage, size_t stream) {
    Stage& s = stages_[stage];
    Queue& q = s.queues[stream];
    const size_t runner = stage * kRunners + 1 + stream;
    Async& a = s.asyncs[static_cast<size_t>(q.waiting[q.head])];
    if (runners_[runner].doing == Doing::kStarting) {
      change_others(s, 1);
      const DeviceSharing::Part part{static_cast<int>(stage), &a.task->demand};
      return run_on_devices(runner, a.task->seconds, {&part, 1});
    }
    change_others(s, -1);
    runners_[runner].doing = Doing::kIdle;
    a.end = q.idle = now_;
    ++q.head;
    --s.pending;
    for (size_t other = 0; other < s.queues.size(); ++other) start_async(stage, other);
    notice(stage);
  }

  // --- messages

  size_t sender_of(size_t edge) const { return edge / 2 + edge % 2; }
  size_t receiver_of(size_t edge) const { return edge / 2 + 1 - edge % 2; }

  /// Both sides come when they are awake and launched; who came first is woken.
  void start_message(size_t edge) {
    const Edge& e = edges_[edge];
    const size_t i = e.ends.size();
    if (runners_[first_edge_ + edge].doing != Doing::kIdle || i >= std::min(e.sent.size(), e.received.size())) return;
    const double idle = i > 0 ? e.ends.back() : 0;
    const auto comes = [&](const Edge::Posted& p) { return std::max(woken(idle, p.ready, costs_.wake_s), p.launched); };
    const double sender = comes(e.sent[i]), receiver = comes(e.received[i]);
    set_timer(first_edge_ + edge, Doing::kStarting,
              std::max(sender, receiver) + std::min(costs_.wake_s, std::abs(sender - receiver)));
  }

  void message_over(size_t edge) {
    const size_t from = sender_of(edge), to = receiver_of(edge);
    Runner& runner = runners_[first_edge_ + edge];
    if (runner.doing == Doing::kStarting) {
      for (const size_t stage : {from, to}) change_others(stages_[stage], 1);
      const Message& m = costs_.messages[edge];
      const std::array<DeviceSharing::Part, 2> parts{{{static_cast<int>(from), &m.leaves}, {static_cast<int>(to), &m.arrives}}};
      return run_on_devices(first_edge_ + edge, m.seconds, parts);
    }
    runner.doing = Doing::kIdle;
    edges_[edge].ends.push_back(now_);
    for (const size_t stage : {from, to}) {
      change_others(stages_[stage], -1);
      --stages_[stage].pending;
    }
    start_message(edge);
    for (const size_t stage : {from, to}) notice(stage);
  }

  // --- collectives of several stages

  bool meet(size_t stage, const Event& e) {
    Stage& s = stages_[stage];
    s.since = now_;
    const double launched = launch(s);
    if (launched > now_)
      set_timer(stage * kRunners, Doing::kLaunching, launched);
    else
      arrive(stage, e);
    return false;
  }

  void arrive(size_t stage, const Event& e) {
    Meeting& m = meetings_[static_cast<size_t>(e.number)];
    if (m.there.empty()) m.first = now_;
    m.there.push_back(stage);
    m.task = &stages_[stage].text->tasks[static_cast<size_t>(e.index)];
    stages_[stage].since = now_;
    if (static_cast<int>(m.there.size()) == e.times)
      set_timer(first_meeting_ + static_cast<size_t>(e.number), Doing::kStarting, now_ + std::min(costs_.wake_s, now_ - m.first));
  }

  void meeting_over(size_t number) {
    Meeting& m = meetings_[number];
    const size_t runner = first_meeting_ + number;
    if (runners_[runner].doing == Doing::kStarting) {
      std::vector<DeviceSharing::Part> parts;
      for (const size_t stage : m.there) {
        parts.push_back({static_cast<int>(stage), &m.task->demand});
        stages_[stage].at(Spent::kPipeline) += now_ - stages_[stage].since;
        stages_[stage].since = now_;
      }
      return run_on_devices(runner, m.task->seconds, parts);
    }
    for (const size_t stage : m.there) {
      stages_[stage].at(m.task->spent) += now_ - stages_[stage].since;
      ++stages_[stage].next;
      go_on(stage);
    }
  }

  const WalkCosts& costs_;
  std::vector<Stage> stages_;
  std::vector<Edge> edges_;
  std::vector<Meeting> meetings_;
  std::vector<Runner> runners_;  ///< of stages, of edges, of meetings
  size_t first_edge_ = 0, first_meeting_ = 0;
  DeviceSharing sharing_{0, 0};
  using Timer = std::tuple<double, int64_t, size_t>;  ///< when, order of creation, whose
  std::priority_queue<Timer, std::vector<Timer>, std::greater<>> timers_;
  int64_t timer_number_ = 0;
  double now_ = 0;
};

}  // namespace

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

Walked walk(std::span<const StageText> stages, const WalkCosts& costs) { return Walk(stages, costs).run(); }

}  // namespace shardlab::simulator::forms
