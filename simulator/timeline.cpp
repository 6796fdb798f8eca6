#include "simulator/timeline.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <map>
#include <optional>
#include <queue>
#include <tuple>
#include <unordered_map>

#include "plan/base/check.h"
#include "plan/runnable.h"
#include "simulator/peers.h"
#include "simulator/resources.h"

namespace shardlab {
namespace {

/// Events that happen together may differ in the last bits of their times: a thousandth of a nanosecond is together.
constexpr double kTogether = 1e-12;

/// What a stream is doing. In brackets: what ends it.
enum class Doing : uint8_t {
  kReady,    ///< between instructions
  kBlocked,  ///< a dependency has not completed (its completion)
  kWaking,   ///< it has, and the stream is being woken (a timer)
  kLaunch,   ///< dispatch: core time on a local machine, else the host's launch (a task or a timer)
  kArrived,  ///< at a meeting, peers missing (the last of them)
  kGather,   ///< all there, those who blocked are being woken (a timer)
  kSteps,    ///< asleep between the steps of a communication, where streams outnumber the cores (a timer)
  kRun,      ///< the op's own work (a task; of a sender: its receiver's end)
  kDone,
};

struct Stream {
  int rank = 0;  ///< index among the simulated ranks
  int stream = 0;
  const std::vector<int32_t>* list = nullptr;
  size_t next = 0;
  Doing phase = Doing::kReady;
  double since = 0;      ///< begin of the phase kBlocked
  double begin = 0;      ///< of the op
  double moving = 0;     ///< of a communication op: when every peer was there
  double remaining = 0;  ///< fraction of the phase's core work left
  int64_t timer = -1;    ///< number of the one that ends the phase; earlier ones are void
  bool shares = false;   ///< its op is a task of `sharing_`
};

struct Rank {
  int rank = 0;
  const Program* program = nullptr;
  int role = 0;
  std::vector<Meeting> meetings;
  std::vector<int32_t> completed;      ///< instructions by stream
  std::vector<int32_t> launch_number;  ///< by instruction: how many ops the host launches up to and with it
  int first_stream = 0;                ///< index of its stream 0 in the list of all
  std::vector<TraceEvent> events;      ///< by end
  double end = 0;
};

/// What an op costs, asked of the cost model once: calls of a segment cost the same, and so does a message between the same ranks.
class Costs {
 public:
  struct OnDevice {
    double seconds = -1;  ///< alone
    Demand demand;
  };

  Costs(const Plan& plan, const PlacedCostModel& model, const SimulatedRanks& simulated, int levels)
      : plan_(plan), model_(model), simulated_(simulated), levels_(static_cast<size_t>(levels)) {}

  /// Seconds by number of busy cores.
  double of(const Instruction& i, int rank, int busy_cores) {
    const size_t level = std::min(static_cast<size_t>(busy_cores), levels_) - 1;
    std::vector<double>& known = by_cores_[key(i, rank)];
    if (known.empty()) known.resize(levels_, -1.0);
    if (known[level] < 0) {
      const int busy = static_cast<int>(level) + 1;
      known[level] = communicates(i) ? slowest(i, rank, busy) : model_.compute(plan_, i, busy).value;
    }
    return known[level];
  }

  /// How much longer a communication takes where streams outnumber the cores, for the slowest whom the rank stands for.
  double asleep(const Instruction& i, int rank) {
    const auto [known, is_new] = asleep_.try_emplace(key(i, rank), 0);
    if (is_new)
      for (const std::vector<int>& ranks : who_meet(plan_, *i.op, simulated_, rank))
        known->second = std::max(known->second, model_.asleep_among(plan_, i, ranks).value);
    return known->second;
  }

  const OnDevice& on_device(const Instruction& i, int rank) {
    OnDevice& known = on_devices_[key(i, rank)];
    if (known.seconds >= 0) return known;
    if (communicates(i)) {
      const Communication communication = communication_of(plan_, i, who_meet(plan_, *i.op, simulated_, rank));
      const PlacedCostModel::Slowest slowest = model_.slowest_of(plan_, i, communication);
      known = {slowest.seconds.value, slowest.demand};
    } else {
      const Seconds alone = model_.compute(plan_, i, 1);
      known = {alone.value, model_.demand(plan_, i, {}, alone)};
    }
    return known;
  }

 private:
  using Key = std::pair<const Op*, int>;
  struct Hash {
    size_t operator()(const Key& k) const { return std::hash<const void*>()(k.first) * 31 + static_cast<size_t>(k.second); }
  };
  /// Only communication costs differently from rank to rank.
  static Key key(const Instruction& i, int rank) { return {i.op, communicates(i) ? rank : -1}; }

  /// Of the meetings that a rank of a local machine stands for, the slowest.
  double slowest(const Instruction& i, int rank, int busy) {
    double worst = 0;
    for (const std::vector<int>& ranks : who_meet(plan_, *i.op, simulated_, rank))
      worst = std::max(worst, model_.communicate_among(plan_, i, ranks, busy).value);
    return worst;
  }

  const Plan& plan_;
  const PlacedCostModel& model_;
  const SimulatedRanks& simulated_;
  size_t levels_;
  std::unordered_map<Key, std::vector<double>, Hash> by_cores_;
  std::unordered_map<Key, double, Hash> asleep_;
  std::unordered_map<Key, OnDevice, Hash> on_devices_;
};

class Simulation {
 public:
  Simulation(const Plan& plan, const std::vector<Program>& programs, const Machine& machine, const PlacedCostModel& costs,
             const SimulateOptions& options)
      : plan_(plan),
        local_(machine.local),
        cores_(std::max(1, machine.cores)),
        dispatch_(costs.dispatch().value),
        wake_(costs.wake().value),
        simulated_(plan.mesh, machine.local || plan.mesh.world_size() <= options.max_individual_ranks),
        costs_(plan, costs, simulated_, machine.local ? std::max(1, machine.cores) : 1) {
    for (const int rank : simulated_.ranks()) add_rank(rank, programs);
    crowded_ = local_ && std::ranges::count_if(streams_, [](const Stream& s) { return !s.list->empty(); }) > cores_;
    sharing_.emplace(static_cast<int>(ranks_.size()), static_cast<int>(streams_.size()));
  }

  Trace run() {
    for (size_t s = 0; s < streams_.size(); ++s) dirty_.push_back(static_cast<int>(s));
    settle();
    while (!tasks_.empty() || !timers_.empty()) {
      advance_to_next_event();
      settle();
    }
    check_finished();
    return take_trace();
  }

 private:
  void add_rank(int rank, const std::vector<Program>& programs) {
    Rank r;
    r.rank = rank;
    r.role = simulated_.role_of(rank);
    r.program = &programs[static_cast<size_t>(r.role)];
    r.meetings = meetings_of(plan_, *r.program, simulated_, rank);
    r.completed.resize(r.program->streams.size(), 0);
    int32_t launched = 0;
    for (const Instruction& i : r.program->instructions)
      r.launch_number.push_back(i.kind == Instruction::Kind::kRun ? ++launched : launched);
    r.events.reserve(static_cast<size_t>(launched));
    r.first_stream = static_cast<int>(streams_.size());
    for (size_t s = 0; s < r.program->streams.size(); ++s) {
      Stream stream;
      stream.rank = static_cast<int>(ranks_.size());
      stream.stream = static_cast<int>(s);
      stream.list = &r.program->streams[s];
      streams_.push_back(stream);
    }
    ranks_.push_back(std::move(r));
  }

  Rank& rank_of(const Stream& s) { return ranks_[static_cast<size_t>(s.rank)]; }
  const Instruction& current(const Stream& s) { return rank_of(s).program->instructions[static_cast<size_t>((*s.list)[s.next])]; }
  const Meeting& meeting(const Stream& s) { return rank_of(s).meetings[static_cast<size_t>(current(s).id)]; }

  /// Starts whatever can start at this moment. Every completion may unblock other streams of its rank.
  void settle() {
    while (!dirty_.empty()) {
      const int s = dirty_.back();
      dirty_.pop_back();
      step(s);
    }
  }

  /// Takes stream `index` on from kReady or kBlocked, through instructions that take no time.
  void step(int index) {
    Stream& s = streams_[static_cast<size_t>(index)];
    while (s.phase == Doing::kReady || s.phase == Doing::kBlocked) {
      if (s.next == s.list->size()) {
        s.phase = Doing::kDone;
        return;
      }
      if (!dependencies_met(s)) {
        if (s.phase == Doing::kReady) s.since = now_;
        s.phase = Doing::kBlocked;
        return;
      }
      const double waited = s.phase == Doing::kBlocked ? now_ - s.since : 0;
      if (waited > 0 && wake_ > 0) {
        start_timer(index, Doing::kWaking, now_ + std::min(wake_, waited));
        return;
      }
      launch(index, waited > 0);
    }
  }

  bool dependencies_met(const Stream& s) {
    const Rank& r = rank_of(s);
    for (const Wait& w : r.program->waits_of(current(s)))
      if (r.completed[static_cast<size_t>(w.stream)] < w.count) return false;
    return true;
  }

  /// Every dependency is met and the stream is awake.
  void launch(int index, bool was_blocked) {
    Stream& s = streams_[static_cast<size_t>(index)];
    if (was_blocked) record(s, TraceEvent::Kind::kWait, s.since, 0, 0);
    if (current(s).kind != Instruction::Kind::kRun) return complete(index);
    if (local_) {
      if (dispatch_ > 0) return start_task(index, Doing::kLaunch);
    } else {
      const double launched = dispatch_ * rank_of(s).launch_number[static_cast<size_t>(current(s).id)];
      if (launched > now_) return start_timer(index, Doing::kLaunch, launched);
    }
    begin_op(index);
  }

  void begin_op(int index) {
    Stream& s = streams_[static_cast<size_t>(index)];
    s.begin = s.moving = now_;
    if (!communicates(current(s))) return start_task(index, Doing::kRun);
    const Meeting& m = meeting(s);
    if (!m.moves) return finish_op(index);
    if (m.parties == 1) return start_task(index, Doing::kRun);
    s.phase = Doing::kArrived;
    std::vector<int>& arrived = meetings_[m.key];
    arrived.push_back(index);
    if (static_cast<int>(arrived.size()) < m.parties) return;
    double waited = 0;
    for (const int a : arrived) waited = std::max(waited, now_ - streams_[static_cast<size_t>(a)].begin);
    const double delay = asleep(s) > 0 ? 0 : std::min(wake_, waited);  // being woken is part of what it sleeps
    if (local_) {
      for (const int a : arrived) start_timer(a, Doing::kGather, now_ + delay);
      return;
    }
    start_timer(mover(arrived), Doing::kGather, now_ + delay);
  }

  /// Whose task on devices stands for all who arrived: the receiver's, or the first's.
  int mover(const std::vector<int>& arrived) {
    for (const int a : arrived)
      if (!meeting(streams_[static_cast<size_t>(a)]).sender) return a;
    return arrived.front();
  }

  /// Everybody is there and awake: data moves. A sender has nothing to do but wait for its receiver. On devices the whole meeting
  /// is one task, as slow as its slowest member.
  void move(int index) {
    Stream& s = streams_[static_cast<size_t>(index)];
    s.moving = now_;
    if (local_ && meeting(s).sender) {
      s.phase = Doing::kRun;
      return;
    }
    if (!local_)
      for (const int a : meetings_[meeting(s).key]) {
        streams_[static_cast<size_t>(a)].moving = now_;
        streams_[static_cast<size_t>(a)].phase = Doing::kRun;
      }
    if (const double seconds = asleep(s); seconds > 0) return start_timer(index, Doing::kSteps, now_ + seconds);
    start_task(index, Doing::kRun);
  }

  /// Seconds for which the meeting of `s` sleeps between its steps.
  double asleep(const Stream& s) { return crowded_ ? costs_.asleep(current(s), rank_of(s).rank) : 0; }

  /// The op's work is done; for a receive, so is its sender's.
  void finish_op(int index) {
    Stream& s = streams_[static_cast<size_t>(index)];
    if (communicates(current(s)) && meeting(s).moves && meeting(s).parties > 1) {
      const auto met = meetings_.find(meeting(s).key);
      const std::vector<int> arrived = met->second;
      std::erase(met->second, index);
      if (!local_ || std::holds_alternative<Recv>(current(s).op->work)) {
        for (const int a : arrived)
          if (a != index) finish_alone(a);
        met->second.clear();
      }
      if (met->second.empty()) meetings_.erase(met);
    }
    finish_alone(index);
  }

  void finish_alone(int index) {
    Stream& s = streams_[static_cast<size_t>(index)];
    record(s, TraceEvent::Kind::kOp, s.begin, s.moving - s.begin, communicates(current(s)) ? meeting(s).sent_bytes : 0);
    complete(index);
  }

  /// The instruction is over: whoever waits for it may go on.
  void complete(int index) {
    Stream& s = streams_[static_cast<size_t>(index)];
    Rank& r = rank_of(s);
    ++r.completed[static_cast<size_t>(s.stream)];
    ++s.next;
    s.phase = Doing::kReady;
    r.end = std::max(r.end, now_);
    dirty_.push_back(index);
    for (size_t k = 0; k < r.completed.size(); ++k) {
      const int other = r.first_stream + static_cast<int>(k);
      if (streams_[static_cast<size_t>(other)].phase == Doing::kBlocked) dirty_.push_back(other);
    }
  }

  /// Core work on a local machine; elsewhere work on the devices of all who take part.
  void start_task(int index, Doing phase) {
    if (!local_) return start_on_devices(index, phase);
    Stream& s = streams_[static_cast<size_t>(index)];
    s.phase = phase;
    s.remaining = 1;
    tasks_.push_back(index);
  }

  void start_on_devices(int index, Doing phase) {
    Stream& s = streams_[static_cast<size_t>(index)];
    const double seconds = costs_.on_device(current(s), rank_of(s).rank).seconds;
    if (seconds <= 0) return start_timer(index, phase, now_);
    s.phase = phase;
    s.shares = true;
    parts_.clear();
    const auto add = [&](const Stream& of) {
      parts_.push_back({of.rank, &costs_.on_device(current(of), rank_of(of).rank).demand});
    };
    if (communicates(current(s)) && meeting(s).parties > 1)
      for (const int a : meetings_[meeting(s).key]) add(streams_[static_cast<size_t>(a)]);
    else
      add(s);
    sharing_->start(index, seconds, parts_, now_);
    reset_timers();
  }

  /// Tasks that share a device with one that began or ended will end at another time.
  void reset_timers() {
    for (const int task : sharing_->changed()) start_timer(task, streams_[static_cast<size_t>(task)].phase, sharing_->end_of(task));
  }

  void start_timer(int index, Doing phase, double when) {
    Stream& s = streams_[static_cast<size_t>(index)];
    s.phase = phase;
    s.timer = timer_number_++;
    timers_.push({when, s.timer, index});
  }

  /// Seconds until the task of stream `index` ends if as many tasks as now go on.
  double time_to_finish(int index) {
    const Stream& s = streams_[static_cast<size_t>(index)];
    const int ready = static_cast<int>(tasks_.size());
    const double share = std::min(1.0, static_cast<double>(cores_) / ready);
    const double alone = s.phase == Doing::kLaunch ? dispatch_ : costs_.of(current(s), rank_of(s).rank, std::min(ready, cores_));
    return s.remaining * alone / share;
  }

  /// Moves the clock to the next end of a task or timer, and ends every task and timer that is due.
  void advance_to_next_event() {
    if (!local_) return advance_to_next_timer();
    std::vector<double> left(tasks_.size());
    double dt = timers_.empty() ? std::numeric_limits<double>::infinity() : std::get<0>(timers_.top()) - now_;
    for (size_t t = 0; t < tasks_.size(); ++t) dt = std::min(dt, left[t] = time_to_finish(tasks_[t]));
    now_ += dt;

    const double together = dt + kTogether;
    std::vector<int> finished, going;
    for (size_t t = 0; t < tasks_.size(); ++t) {
      Stream& s = streams_[static_cast<size_t>(tasks_[t])];
      if (left[t] > together) s.remaining *= 1 - dt / left[t];
      (left[t] <= together ? finished : going).push_back(tasks_[t]);
    }
    tasks_ = std::move(going);
    while (!timers_.empty() && std::get<0>(timers_.top()) <= now_) {
      finished.push_back(std::get<2>(timers_.top()));
      timers_.pop();
    }
    for (const int index : finished) phase_over(index);
  }

  void advance_to_next_timer() {
    const auto [when, number, index] = timers_.top();
    timers_.pop();
    Stream& s = streams_[static_cast<size_t>(index)];
    if (s.timer != number) return;
    if (when > now_ + kTogether) now_ = when;
    if (s.shares) {
      s.shares = false;
      sharing_->finish(index, now_);
      reset_timers();
    }
    phase_over(index);
  }

  void phase_over(int index) {
    switch (streams_[static_cast<size_t>(index)].phase) {
      case Doing::kWaking: return launch(index, true);
      case Doing::kLaunch: return begin_op(index);
      case Doing::kGather: return move(index);
      case Doing::kSteps: return start_task(index, Doing::kRun);
      case Doing::kRun: return finish_op(index);
      default:
        SHARDLAB_CHECK(false, "a timer or task of stream {} ended in phase {}", index,
                       static_cast<int>(streams_[static_cast<size_t>(index)].phase));
    }
  }

  void record(const Stream& s, TraceEvent::Kind kind, double begin, double peer_wait, int64_t sent_bytes) {
    TraceEvent e;
    e.kind = kind;
    e.rank = rank_of(s).rank;
    e.instruction = current(s).id;
    e.stream = s.stream;
    e.begin = begin;
    e.end = now_;
    e.peer_wait = peer_wait;
    e.sent_bytes = sent_bytes;
    rank_of(s).events.push_back(e);
  }

  void check_finished() {
    std::string stuck;
    for (const Stream& s : streams_)
      if (s.phase != Doing::kDone)
        stuck += fmt::format("\n  rank {} stream {}: {} {}", rank_of(s).rank, s.stream, describe(plan_, current(s)),
                             s.phase == Doing::kArrived ? "waits for its peers" : "waits for another stream");
    SHARDLAB_CHECK(stuck.empty(), "plan `{}` deadlocks; `verify` must come before `simulate`:{}", plan_.name, stuck);
  }

  Trace take_trace() {
    Trace trace;
    trace.producer = "simulator";
    trace.world_size = plan_.mesh.world_size();
    trace.steps = 1;
    trace.streams = plan_.streams;
    size_t events = 0;
    for (const Rank& r : ranks_) events += r.events.size();
    trace.events.reserve(events);
    for (Rank& r : ranks_) {
      std::stable_sort(r.events.begin(), r.events.end(), [](const TraceEvent& a, const TraceEvent& b) {
        return std::tie(a.begin, a.instruction) < std::tie(b.begin, b.instruction);
      });
      trace.events.insert(trace.events.end(), r.events.begin(), r.events.end());
    }
    for (int rank = 0; rank < trace.world_size; ++rank)
      trace.step_interval.push_back({0, ranks_[static_cast<size_t>(simulated_.index_of(rank))].end});
    return trace;
  }

  const Plan& plan_;
  const bool local_;
  const int cores_;
  const double dispatch_, wake_;
  bool crowded_ = false;  ///< streams of a local machine outnumber its cores
  SimulatedRanks simulated_;
  Costs costs_;
  std::vector<Rank> ranks_;
  std::vector<Stream> streams_;
  std::map<Meeting::Key, std::vector<int>> meetings_;  ///< streams that arrived
  std::vector<int> dirty_;                             ///< streams to look at before time goes on
  std::vector<int> tasks_;                             ///< streams that use a core
  using Timer = std::tuple<double, int64_t, int>;      ///< when, order of creation, stream
  std::priority_queue<Timer, std::vector<Timer>, std::greater<>> timers_;
  int64_t timer_number_ = 0;
  double now_ = 0;
  std::optional<DeviceSharing> sharing_;  ///< of the ranks' devices; its tasks are numbered as `streams_`
  std::vector<DeviceSharing::Part> parts_;
};

}  // namespace

Trace simulate(const Plan& plan, const std::vector<Program>& programs, const Machine& machine, const PlacedCostModel& costs,
               const SimulateOptions& options) {
  SHARDLAB_CHECK(programs.size() == plan.roles.size(), "{} programs for {} roles", programs.size(), plan.roles.size());
  const Result<void> runnable = check_runnable(plan);
  SHARDLAB_CHECK(runnable.ok(), "{}", to_string(runnable.error()));
  return Simulation(plan, programs, machine, costs, options).run();
}

int longest_rank(const Trace& trace, int step) {
  int longest = 0;
  double wall = -1;
  for (int rank = 0; rank < trace.world_size; ++rank) {
    const auto& interval = trace.step_interval[static_cast<size_t>(step * trace.world_size + rank)];
    if (interval[1] - interval[0] > wall) {
      wall = interval[1] - interval[0];
      longest = rank;
    }
  }
  return longest;
}

double step_seconds(const Trace& trace, int step) {
  double end = 0;
  for (int rank = 0; rank < trace.world_size; ++rank)
    end = std::max(end, trace.step_interval[static_cast<size_t>(step * trace.world_size + rank)][1]);
  return end;
}

}  // namespace shardlab
