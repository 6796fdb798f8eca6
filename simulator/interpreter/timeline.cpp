#include "simulator/interpreter/timeline.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <deque>
#include <limits>
#include <map>
#include <optional>
#include <queue>
#include <tuple>
#include <unordered_map>

#include "plan/base/check.h"
#include "plan/base/philox.h"
#include "plan/cores.h"
#include "plan/runnable.h"
#include "simulator/interpreter/peers.h"
#include "simulator/interpreter/resources.h"
#include "simulator/interpreter/routes.h"
#include "simulator/interpreter/stepped_meeting.h"

namespace shardlab::simulator {
namespace {

/// Events that happen together may differ in the last bits of their times: a thousandth of a nanosecond is together.
constexpr double kTogether = 1e-12;
/// Of `PlacedCostModel::unsteadiness`: the farthest draw of a core (sqrt(12) deviations below) still takes some time.
constexpr double kMostUnsteady = 0.25;

/// The state of a stream. In brackets: the event that ends it.
enum class Doing : uint8_t {
  kReady,        ///< between instructions
  kStarts,       ///< the step has begun, and a stream on a local machine comes to its first instruction (a task)
  kPaused,       ///< between instructions, its core given to another (a task)
  kBlocked,      ///< a dependency has not completed (its completion)
  kWaking,       ///< it has, and the stream is being woken, or waits for a core (a task or a timer)
  kLaunch,       ///< dispatch: core time on a local machine, else the host's launch (a task or a timer)
  kArrived,      ///< at a meeting on devices, peers missing (the last of them)
  kGather,       ///< all there, those who blocked are being woken (a timer)
  kRun,          ///< the op's own work; of a meeting on a local machine, reading in one of its steps (a task)
  kAwaitsOffer,  ///< in a step of a meeting on a local machine (who offers what it reads)
  kTurnsToRead,  ///< that is there; the stream is being woken, or waits for a core (a task)
  kAwaitsTaken,  ///< in such a step, having read (who reads what it offers)
  kTurnsToGoOn,  ///< likewise (a task)
  kYields,       ///< before such a step, its core given to another (a task)
  kAside,        ///< at a drive, which takes no core of a local machine (a timer)
  kStepsBack,    ///< it is through, and the stream wants a core again (a task)
  kDone,
};

struct Stream {
  int rank = 0;  ///< index among the simulated ranks
  int stream = 0;
  const std::vector<int32_t>* list = nullptr;
  size_t next = 0;
  Doing phase = Doing::kReady;
  double since = 0;      ///< begin of a phase that waits
  double begin = 0;      ///< of the op
  double moving = 0;     ///< of a communication op on devices: when every peer was there
  double peer_wait = 0;  ///< of one on a local machine
  double owed = 0;       ///< of core time, before the phase's own: being woken, or taking over a core
  double remaining = 0;  ///< fraction of the phase's core work left
  int64_t timer = -1;    ///< number of the one that ends the phase; earlier ones are void
  double taking = 0;     ///< when the last of those who read what it offers began
  bool shares = false;   ///< its op is a task of `sharing_`
  bool paused = false;   ///< has come by the pause before its next instruction
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

/// Costs of ops, asked of the cost model once: calls of a segment cost the same, and so does a message between the same ranks.
class Costs {
 public:
  struct OnDevice {
    double seconds = -1;  ///< alone
    Demand demand;
  };

  Costs(const Plan& plan, const PlacedCostModel& model, const SimulatedRanks& simulated, int levels)
      : plan_(plan),
        model_(model),
        simulated_(simulated),
        levels_(static_cast<size_t>(levels)),
        by_stage_(model.differs_by_stage()) {}

  /// Seconds on a local machine by number of busy cores. For communication: seconds of a member's part in one step.
  double of(const Instruction& i, int rank, int busy_cores) {
    const size_t level = std::min(static_cast<size_t>(busy_cores), levels_) - 1;
    std::vector<double>& known = by_cores_[key(i, rank)];
    if (known.empty()) known.resize(levels_, -1.0);
    if (known[level] < 0) {
      const int busy = static_cast<int>(level) + 1;
      known[level] = communicates(i) ? step(i, rank) : model_.compute(plan_, i, busy).value;
    }
    return known[level];
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
  /// Communication costs differently from rank to rank, and compute from stage to stage where devices do.
  Key key(const Instruction& i, int rank) const { return {i.op, communicates(i) ? rank : by_stage_ ? i.role : -1}; }

  /// A rank of a local machine stands for itself, and is in one meeting.
  double step(const Instruction& i, int rank) {
    return model_.step_among(plan_, i, who_meet(plan_, *i.op, simulated_, rank).front()).value;
  }

  const Plan& plan_;
  const PlacedCostModel& model_;
  const SimulatedRanks& simulated_;
  size_t levels_;
  bool by_stage_;
  std::unordered_map<Key, std::vector<double>, Hash> by_cores_;
  std::unordered_map<Key, OnDevice, Hash> on_devices_;
};

class Simulation {
 public:
  Simulation(const Plan& plan, const std::vector<Program>& programs, const Machine& machine, const PlacedCostModel& costs,
             const SimulateOptions& options)
      : plan_(plan),
        local_(machine.runs_on_cores()),
        devices_(machine.local ? std::max(1, machine.cores) : 0),
        dispatch_(costs.dispatch().value),
        wake_(costs.wake().value),
        handover_(costs.handover().value),
        unsteadiness_(std::min(costs.unsteadiness(), kMostUnsteady)),
        routes_(options.routes),
        simulated_(plan.mesh, options.individually(plan.mesh, machine)),
        costs_(plan, costs, simulated_, local_ ? std::max(1, machine.cores) : 1) {
    for (const int rank : simulated_.ranks()) add_rank(rank, programs);
    if (local_) {
      cores_.emplace(std::max(1, machine.cores), costs.turn().value);
      for (const Stream& s : streams_) cores_->add(s.stream != 0);
    }
    sharing_.emplace(devices_ > 0 ? devices_ : static_cast<int>(ranks_.size()), static_cast<int>(streams_.size()));
  }

  Trace run() {
    if (local_)
      start_streams();
    else
      for (size_t s = 0; s < streams_.size(); ++s) dirty_.push_back(static_cast<int>(s));
    settle();
    while (!timers_.empty() || (local_ && cores_->busy() > 0)) {
      if (local_)
        advance_to_next_event();
      else
        advance_to_next_timer();
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
    if (local_) take_grants();
  }

  /// Every stream needs a core to find out what it waits for, those of the first kind before the others.
  void start_streams() {
    for (const bool first : {true, false})
      for (size_t s = 0; s < streams_.size(); ++s) {
        if ((streams_[s].stream != 0) != first) continue;
        if (streams_[s].list->empty())
          streams_[s].phase = Doing::kDone;
        else
          start_task(static_cast<int>(s), Doing::kStarts);
      }
  }

  /// Whoever was given a core first pays for the switch of threads, or for having been asleep. Whose own core was idle for less
  /// than waking takes was watching.
  void take_grants() {
    for (const Cores::Grant& g : cores_->take_grants()) {
      Stream& s = streams_[static_cast<size_t>(g.stream)];
      if (handover_ == 0 && s.phase == Doing::kWaking)  // nobody hands cores on: a device, or a calibration that knows none of that
        s.owed = std::min(wake_, now_ - s.since);
      else
        s.owed = g.idle_s > wake_ ? wake_ : g.watched ? 0 : handover_;
    }
  }

  /// Takes stream `index` on from kReady or kBlocked, through instructions that take no time.
  void step(int index) {
    Stream& s = streams_[static_cast<size_t>(index)];
    while (s.phase == Doing::kReady || s.phase == Doing::kBlocked) {
      if (s.next == s.list->size()) {
        s.phase = Doing::kDone;
        if (local_) cores_->give_up(index, now_);
        return;
      }
      if (local_ && !s.paused) {
        s.paused = true;
        if (cores_->pause(index, now_)) {
          s.phase = Doing::kPaused;
          return;
        }
      }
      if (!dependencies_met(s)) {
        if (s.phase == Doing::kReady) s.since = now_;
        s.phase = Doing::kBlocked;
        if (local_) cores_->give_up(index, now_);
        return;
      }
      const double waited = s.phase == Doing::kBlocked ? now_ - s.since : 0;
      if (waited > 0 && local_) return start_task(index, Doing::kWaking);
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
    if (local_) return start_task(index, Doing::kLaunch);
    const double launched = dispatch_ * rank_of(s).launch_number[static_cast<size_t>(current(s).id)];
    if (launched > now_) return start_timer(index, Doing::kLaunch, launched);
    begin_op(index);
  }

  void begin_op(int index) {
    Stream& s = streams_[static_cast<size_t>(index)];
    s.begin = s.moving = now_;
    if (local_ && uses_drive(*current(s).segment, *current(s).op)) {
      start_timer(index, Doing::kAside, now_ + costs_.of(current(s), rank_of(s).rank, cores_->busy()));
      return cores_->give_up(index, now_);
    }
    if (!communicates(current(s))) return start_task(index, Doing::kRun);
    const Meeting& m = meeting(s);
    s.peer_wait = 0;
    if (!m.moves) return finish_op(index);
    if (m.parties == 1) return start_task(index, Doing::kRun);
    if (local_) return join(index, m);
    s.phase = Doing::kArrived;
    std::vector<int>& arrived = meetings_[m.key];
    arrived.push_back(index);
    if (std::ssize(arrived) < m.parties) return;
    double waited = 0;
    for (const int a : arrived) waited = std::max(waited, now_ - streams_[static_cast<size_t>(a)].begin);
    start_timer(mover(arrived), Doing::kGather, now_ + std::min(wake_, waited));
  }

  // ---- meetings on a local machine

  void join(int index, const Meeting& m) {
    Stream& s = streams_[static_cast<size_t>(index)];
    const Op* op = current(s).op;
    auto schedule = schedules_.find(op);
    if (schedule == schedules_.end()) schedule = schedules_.emplace(op, schedule_of(*op, m.parties)).first;
    stepped_.try_emplace(m.key, schedule->second).first->second.join(m.member, index);
    begin_step(index);
  }

  SteppedMeeting& stepped(const Stream& s) { return stepped_.find(meeting(s).key)->second; }

  void begin_step(int index) {
    Stream& s = streams_[static_cast<size_t>(index)];
    SteppedMeeting& met = stepped(s);
    if (met.done(meeting(s).member)) {
      if (met.all_done()) stepped_.erase(meeting(s).key);
      return finish_alone(index);
    }
    if (cores_->pause(index, now_))
      s.phase = Doing::kYields;
    else
      offer(index);
  }

  void offer(int index) {
    Stream& s = streams_[static_cast<size_t>(index)];
    SteppedMeeting& met = stepped(s);
    const int member = meeting(s).member;
    met.offer(member);
    let_go_on(met, Doing::kAwaitsOffer);
    if (!met.reads(member)) return have_read(index);
    if (met.may_read(member)) return read(index);
    wait_in_step(index, Doing::kAwaitsOffer);
  }

  void read(int index) {
    Stream& s = streams_[static_cast<size_t>(index)];
    stepped(s).begin_read(meeting(s).member, now_);
    start_task(index, Doing::kRun);
  }

  void have_read(int index) {
    Stream& s = streams_[static_cast<size_t>(index)];
    SteppedMeeting& met = stepped(s);
    const int member = meeting(s).member;
    met.end_read(member);
    let_go_on(met, Doing::kAwaitsTaken);
    if (!met.taken(member)) return wait_in_step(index, Doing::kAwaitsTaken);
    next_step(index);
  }

  void wait_in_step(int index, Doing phase) {
    Stream& s = streams_[static_cast<size_t>(index)];
    s.phase = phase;
    s.since = now_;
    cores_->give_up(index, now_);
  }

  /// Members of a meeting that waited in `phase` and need not any longer want a core.
  void let_go_on(const SteppedMeeting& met, Doing phase) {
    for (int member = 0; member < met.size(); ++member) {
      const int index = met.stream_of(member);
      if (index < 0 || met.done(member) || streams_[static_cast<size_t>(index)].phase != phase) continue;
      const bool offer = phase == Doing::kAwaitsOffer;
      if (!(offer ? met.may_read(member) : met.taken(member))) continue;
      if (!offer) streams_[static_cast<size_t>(index)].taking = met.taking_since(member);  // before any reader goes on
      start_task(index, offer ? Doing::kTurnsToRead : Doing::kTurnsToGoOn);
    }
  }

  /// The time until a peer has read splits in two: the time before the peer began to read is waiting, the rest is
  /// the moving itself.
  void have_been_taken(int index) {
    Stream& s = streams_[static_cast<size_t>(index)];
    s.peer_wait += std::clamp(s.taking - s.since, 0.0, now_ - s.since);
    next_step(index);
  }

  void next_step(int index) {
    const Stream& s = streams_[static_cast<size_t>(index)];
    stepped(s).next_step(meeting(s).member);
    begin_step(index);
  }

  // ---- meetings on devices

  /// Whose task on devices stands for all who arrived: the receiver's, or the first's.
  int mover(const std::vector<int>& arrived) {
    for (const int a : arrived)
      if (!meeting(streams_[static_cast<size_t>(a)]).sender) return a;
    return arrived.front();
  }

  /// Everybody is there and awake: data moves. The whole meeting is one task, as slow as its slowest member.
  void move(int index) {
    for (const int a : meetings_[meeting(streams_[static_cast<size_t>(index)]).key]) {
      streams_[static_cast<size_t>(a)].moving = now_;
      streams_[static_cast<size_t>(a)].phase = Doing::kRun;
    }
    start_task(index, Doing::kRun);
  }

  /// The op's work is done; where others take part, for all at once, but for steps of a meeting on a local machine.
  void finish_op(int index) {
    Stream& s = streams_[static_cast<size_t>(index)];
    if (!communicates(current(s)) || !meeting(s).moves || meeting(s).parties == 1) return finish_alone(index);
    if (local_) return have_read(index);
    const auto met = meetings_.find(meeting(s).key);
    const std::vector<int> arrived = std::move(met->second);
    meetings_.erase(met);
    for (const int a : arrived)
      if (a != index) finish_alone(a);
    finish_alone(index);
  }

  void finish_alone(int index) {
    Stream& s = streams_[static_cast<size_t>(index)];
    const bool communicating = communicates(current(s));
    record(s, TraceEvent::Kind::kOp, s.begin,
           !communicating ? 0
           : local_       ? s.peer_wait
                          : s.moving - s.begin,
           communicating ? meeting(s).sent_bytes : 0);
    complete(index);
  }

  /// The instruction is over: whoever waits for it may go on.
  void complete(int index) {
    Stream& s = streams_[static_cast<size_t>(index)];
    Rank& r = rank_of(s);
    ++r.completed[static_cast<size_t>(s.stream)];
    ++s.next;
    s.phase = Doing::kReady;
    s.paused = false;
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
    if (!cores_->has(index)) cores_->want(index, now_);
  }

  /// Seconds of the stream's op over its seconds where routes of tokens are even.
  double share(const Stream& s) { return routes_ == nullptr ? 1 : routes_->share(current(s), rank_of(s).rank); }

  void start_on_devices(int index, Doing phase) {
    Stream& s = streams_[static_cast<size_t>(index)];
    const bool meets = communicates(current(s)) && meeting(s).parties > 1;
    double times = share(s);
    if (meets)
      for (const int a : meetings_[meeting(s).key]) times = std::max(times, share(streams_[static_cast<size_t>(a)]));
    const double seconds = times * costs_.on_device(current(s), rank_of(s).rank).seconds;
    if (seconds <= 0) return start_timer(index, phase, now_);
    s.phase = phase;
    s.shares = true;
    parts_.clear();
    demands_.clear();
    // Ranks that share a device take part in a meeting together: what it takes there was measured of all of them.
    const auto add = [&](const Stream& of) {
      const int device = devices_ > 0 ? of.rank % devices_ : of.rank;
      if (std::ranges::find(parts_, device, &DeviceSharing::Part::device) != parts_.end()) return;
      const Demand& demand = costs_.on_device(current(of), rank_of(of).rank).demand;
      parts_.push_back({device, times == 1 ? &demand : &demands_.emplace_back(scaled(demand, times))});
    };
    if (meets)
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

  /// Core time of the phase that a stream is in, while as many cores are busy as now.
  double core_seconds(const Stream& s) {
    if (s.phase == Doing::kLaunch) return dispatch_;
    if (s.phase != Doing::kRun) return 0;
    return share(s) * costs_.of(current(s), rank_of(s).rank, cores_->busy()) * core_slowness(s);
  }

  /// How many times as long as in the mean an op takes that computes, on this core and at this time. One rank waits for nobody: it has the mean.
  double core_slowness(const Stream& s) {
    if (unsteadiness_ == 0 || ranks_.size() == 1 || communicates(current(s))) return 1;
    const auto words = philox({static_cast<uint32_t>(current(s).id), static_cast<uint32_t>(rank_of(s).rank), 0, 0}, 0);
    // The sum of four uniform numbers: as good as normal here, and never far out.
    double sum = 0;
    for (const uint32_t word : words) sum += static_cast<double>(word) / 4294967295.0;
    return 1 + unsteadiness_ * (sum - 2) * std::sqrt(3.0);
  }

  /// On a local machine: moves the clock to the next end of a task or timer, and ends every one that is due.
  void advance_to_next_event() {
    struct Working {
      int index = 0;
      double seconds = 0, left = 0;
    };
    std::vector<Working> working;
    double dt = timers_.empty() ? std::numeric_limits<double>::infinity() : std::get<0>(timers_.top()) - now_;
    for (int core = 0; core < cores_->count(); ++core) {
      const int index = cores_->holder(core);
      if (index < 0) continue;
      const Stream& s = streams_[static_cast<size_t>(index)];
      const double seconds = core_seconds(s);
      working.push_back({index, seconds, s.owed + s.remaining * seconds});
      dt = std::min(dt, working.back().left);
    }
    now_ += dt;
    std::vector<int> finished;
    for (const Working& w : working) {
      Stream& s = streams_[static_cast<size_t>(w.index)];
      if (w.left <= dt + kTogether) {
        s.owed = 0;
        finished.push_back(w.index);
        continue;
      }
      const double before = std::min(s.owed, dt);
      s.owed -= before;
      if (dt > before) s.remaining -= (dt - before) / w.seconds;
    }
    while (!timers_.empty() && std::get<0>(timers_.top()) <= now_ + kTogether) {
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
      case Doing::kStarts:
      case Doing::kPaused: streams_[static_cast<size_t>(index)].phase = Doing::kReady; return step(index);
      case Doing::kWaking: return launch(index, true);
      case Doing::kLaunch: return begin_op(index);
      case Doing::kGather: return move(index);
      case Doing::kRun: return finish_op(index);
      case Doing::kYields: return offer(index);
      case Doing::kAside: return start_task(index, Doing::kStepsBack);
      case Doing::kStepsBack: return finish_alone(index);
      case Doing::kTurnsToRead:
        streams_[static_cast<size_t>(index)].peer_wait += now_ - streams_[static_cast<size_t>(index)].since;
        return read(index);
      case Doing::kTurnsToGoOn: return have_been_taken(index);
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
                             s.phase == Doing::kBlocked ? "waits for another stream" : "waits for its peers");
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
  const bool local_;   ///< ranks share cores
  const int devices_;  ///< that the ranks of a local machine share; 0: each has its own
  const double dispatch_, wake_, handover_, unsteadiness_;
  const Routes* routes_;
  SimulatedRanks simulated_;
  Costs costs_;
  std::vector<Rank> ranks_;
  std::vector<Stream> streams_;
  std::map<Meeting::Key, std::vector<int>> meetings_;         ///< on devices: streams that arrived
  std::map<Meeting::Key, SteppedMeeting> stepped_;            ///< on a local machine
  std::unordered_map<const Op*, MeetingSchedule> schedules_;  ///< of those
  std::vector<int> dirty_;                                    ///< streams to look at before time goes on
  std::optional<Cores> cores_;                                ///< of a local machine; its streams are numbered as `streams_`
  using Timer = std::tuple<double, int64_t, int>;             ///< when, order of creation, stream
  std::priority_queue<Timer, std::vector<Timer>, std::greater<>> timers_;
  int64_t timer_number_ = 0;
  double now_ = 0;
  std::optional<DeviceSharing> sharing_;  ///< of the ranks' devices; its tasks are numbered as `streams_`
  std::vector<DeviceSharing::Part> parts_;
  std::deque<Demand> demands_;  ///< of `parts_`, where routes change them
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

}  // namespace shardlab::simulator
