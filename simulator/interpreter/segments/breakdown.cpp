// Where the step of one stage went: one walk over its streams, from one moment at which something changes to the next.
#include <algorithm>
#include <array>
#include <optional>
#include <tuple>
#include <utility>

#include "simulator/interpreter/segments/progress.h"
#include "simulator/interpreter/segments/segments.h"

namespace shardlab::simulator::segments {
namespace {

/// The communicators of a stretch, each with its part of what communicates while the stretch runs alone.
using CommParts = std::vector<std::pair<size_t, double>>;

/// What the stretches of one device did from one moment to a later one.
class Done {
 public:
  explicit Done(const std::vector<Moment>& moments) : moments_(moments) {}

  /// Seconds of each kind from the last call's `now`, or from the begin of the step, to `now`.
  std::array<double, kSpents> until(double now) {
    while (next_ < moments_.size() && moments_[next_].at <= now) ++next_;
    Moment done = next_ > 0 ? moments_[next_ - 1] : Moment{};
    if (next_ < moments_.size() && next_ > 0) {
      const Moment& then = moments_[next_];
      const double part = (now - done.at) / (then.at - done.at);
      for (size_t k = 0; k < kSpents; ++k) done.spent[k] += part * (then.spent[k] - done.spent[k]);
    }
    std::array<double, kSpents> spent{};
    for (size_t k = 0; k < kSpents; ++k) spent[k] = done.spent[k] - last_[k];
    last_ = done.spent;
    return spent;
  }

 private:
  const std::vector<Moment>& moments_;
  size_t next_ = 0;
  std::array<double, kSpents> last_{};
};

/// The phases of a stream's entry, in the order in which each entry has them.
enum class Phase : uint8_t { kFree, kBlocked, kHeldUp, kAtMeeting, kRuns };

struct Cursor {
  const std::vector<Entry>* entries = nullptr;
  const std::vector<Ran>* ran = nullptr;
  size_t next = 0;
  Phase phase = Phase::kFree;
  double until = 0;  ///< end of the phase
  const Entry& entry() const { return (*entries)[next]; }
  const Ran& at() const { return (*ran)[next]; }
};

class Walk {
 public:
  Walk(const Plan& plan, const Condensed& text, const Prices& prices, const Times& times, int stage)
      : text_(text),
        prices_(prices),
        entries_(text.stages[static_cast<size_t>(stage)]),
        ran_(times.stages[static_cast<size_t>(stage)]),
        done_(times.moments[static_cast<size_t>(stage)]),
        parts_(text.stretches.size()) {
    out_.seconds = out_.breakdown.wall_s = times.ends[static_cast<size_t>(stage)];
    out_.stage = stage;
    out_.exposed_by_comm_s.resize(plan.comms.size(), 0);
    for (size_t s = 0; s < entries_.streams.size(); ++s) {
      cursors_.push_back({&entries_.streams[s], &ran_[s], 0, Phase::kFree, 0});
      enter(cursors_.back());
    }
  }

  SegmentStep run() {
    double now = 0;
    while (now < out_.seconds) {
      double next = out_.seconds;
      for (const Cursor& c : cursors_) next = std::min(next, c.until);
      if (next > now) add(now, next);
      now = std::max(now, next);
      first_to_run_ = nullptr;
      for (Cursor& c : cursors_)
        while (c.until <= now) advance(c);
      if (first_to_run_ != nullptr) end_idleness(*first_to_run_);
    }
    Breakdown& b = out_.breakdown;
    b.unplanned_s = std::max(0.0, b.wall_s - covered_ - b.wait_s);
    b.bubble_fraction = b.wall_s > 0 ? bubble() / b.wall_s : 0;
    if (idle_since_ < kNever) out_.idle.tail_s += out_.seconds - idle_since_;
    return std::move(out_);
  }

 private:
  /// The first phase of a cursor's entry.
  static void enter(Cursor& c) {
    if (c.next == c.entries->size()) {
      c.phase = Phase::kFree;
      c.until = kNever;
      return;
    }
    const Ran& r = c.at();
    c.phase = Phase::kFree;
    c.until = r.blocked >= 0 ? r.blocked : r.ready;
  }

  void advance(Cursor& c) {
    const Ran& r = c.at();
    const bool works = c.entry().stretch >= 0 || c.entry().op >= 0;
    switch (c.phase) {
      case Phase::kFree: c.phase = Phase::kBlocked, c.until = r.ready; return;
      case Phase::kBlocked: c.phase = Phase::kHeldUp, c.until = works ? r.begin : r.end; return;
      case Phase::kHeldUp: c.phase = Phase::kAtMeeting, c.until = works ? r.moving : r.end; return;
      case Phase::kAtMeeting:
        c.phase = Phase::kRuns, c.until = r.end;
        if (works && r.end > r.moving) runs(c);
        return;
      case Phase::kRuns: ++c.next; return enter(c);
    }
  }

  /// Of the ops that begin to run together, the first by begin and by the order of launches.
  void runs(const Cursor& c) {
    const Ran& r = c.at();
    const int32_t launches = c.entry().launches;
    if (first_to_run_ != nullptr && std::tie(first_to_run_->begin, first_launches_) < std::tie(r.begin, launches)) return;
    first_to_run_ = &r;
    first_launches_ = launches;
  }

  /// Something runs again: `r` is what the rank was idle for.
  void end_idleness(const Ran& r) {
    if (idle_since_ == kNever) return;
    const double arrived = std::clamp(r.begin, idle_since_, r.moving);
    out_.idle.peer_s += r.moving - arrived;
    const double waited = r.blocked < 0 ? 0 : std::max(0.0, std::min(arrived, r.ready) - std::max(idle_since_, r.blocked));
    out_.idle.dependency_s += waited;
    out_.idle.other_s += arrived - idle_since_ - waited;
    idle_since_ = kNever;
  }

  /// One stretch of time in which every stream does one thing.
  void add(double from, double to) {
    const double dt = to - from;
    const auto [compute, comm, copy] = done_.until(to);  // seconds of the stretch that runs
    std::array<bool, kSpents> other{};                   // single ops
    bool moves = false, waits = false;
    const Cursor* exposed = nullptr;
    const CommParts* parts = nullptr;
    for (const Cursor& c : cursors_) {
      waits = waits || c.phase == Phase::kBlocked;
      if (c.phase < Phase::kAtMeeting || c.next == c.entries->size()) continue;
      const Entry& e = c.entry();
      if (e.stretch >= 0) {
        parts = &parts_of(e.stretch);
      } else if (e.op >= 0) {
        const Spent spent = text_.ops[static_cast<size_t>(e.op)].spent;
        other[static_cast<size_t>(spent)] = true;
        moves = moves || c.phase == Phase::kRuns;
        if (spent == Spent::kCommunication && (exposed == nullptr || (exposed->phase < c.phase))) exposed = &c;
      }
    }
    const auto [any_compute, any_comm, any_copy] = other;
    Breakdown& b = out_.breakdown;
    b.compute_s += any_compute ? dt : compute;
    b.comm_s += any_comm ? dt : comm;
    b.copy_s += any_copy ? dt : copy;
    if (!any_compute) {
      b.exposed_comm_s += any_comm ? dt - compute : comm;
      if (!any_comm) b.exposed_copy_s += any_copy ? dt - compute - comm : copy;
      if (parts != nullptr)
        for (const auto& [which, part] : *parts) out_.exposed_by_comm_s[which] += comm * part;
      if (any_comm) out_.exposed_by_comm_s[text_.ops[static_cast<size_t>(exposed->entry().op)].comm.index()] += dt - compute - comm;
    }
    const double held_up = std::max(0.0, dt - compute - comm - copy);  // by the host, where a stretch runs
    const double covered = any_compute || any_comm || any_copy ? dt : parts != nullptr ? dt - held_up : 0;
    covered_ += covered;
    if (waits) b.wait_s += dt - covered;
    idle(from, dt, moves, parts != nullptr, held_up);
  }

  void idle(double from, double dt, bool moves, bool stretch, double held_up) {
    if (moves) return;
    if (stretch) {
      out_.idle.idle_s += held_up;
      out_.idle.other_s += held_up;
      return;
    }
    out_.idle.idle_s += dt;
    idle_since_ = std::min(idle_since_, from);
  }

  /// Seconds for which the control stream waited for a message that had not been sent (`analyse`).
  double bubble() const {
    double seconds = 0;
    for (size_t n = 0; n < entries_.streams[0].size(); ++n) {
      const Entry& e = entries_.streams[0][n];
      const Ran& r = ran_[0][n];
      if (e.op >= 0 && text_.ops[static_cast<size_t>(e.op)].receives) seconds += r.moving - r.begin;
      if (r.blocked < 0) continue;
      const Ran* last = nullptr;
      bool receives = false;
      for (const Wait& w : entries_.waits_of(e)) {
        const size_t stream = static_cast<size_t>(w.stream), count = static_cast<size_t>(w.count);
        const Ran& awaited = ran_[stream][count - 1];
        if (last != nullptr && awaited.end <= last->end) continue;
        last = &awaited;
        const int32_t op = entries_.streams[stream][count - 1].op;
        receives = op >= 0 && text_.ops[static_cast<size_t>(op)].receives;
      }
      if (receives) seconds += std::max(0.0, std::min(r.ready, last->moving) - r.blocked);
    }
    return seconds;
  }

  const CommParts& parts_of(int32_t stretch) {
    std::optional<CommParts>& known = parts_[static_cast<size_t>(stretch)];
    if (known) return *known;
    CommParts& parts = known.emplace();
    double sum = 0;
    for (const Repeated& r : text_.stretches[static_cast<size_t>(stretch)].pieces)
      for (const int32_t op : text_.pieces[static_cast<size_t>(r.piece)].ops) {
        const AskedOp& asked = text_.ops[static_cast<size_t>(op)];
        if (asked.spent != Spent::kCommunication) continue;
        const double seconds = r.times * prices_.of(op).seconds;
        sum += seconds;
        add_comm(parts, asked.comm.index(), seconds);
      }
    for (auto& [which, part] : parts) part = sum > 0 ? part / sum : 0;
    return parts;
  }

  static void add_comm(CommParts& parts, size_t comm, double seconds) {
    for (auto& [which, sum] : parts)
      if (which == comm) {
        sum += seconds;
        return;
      }
    parts.emplace_back(comm, seconds);
  }

  const Condensed& text_;
  const Prices& prices_;
  const StageEntries& entries_;
  const std::vector<std::vector<Ran>>& ran_;
  Done done_;
  std::vector<std::optional<CommParts>> parts_;  ///< by stretch
  std::vector<Cursor> cursors_;
  SegmentStep out_;
  double covered_ = 0;
  double idle_since_ = kNever;
  const Ran* first_to_run_ = nullptr;  ///< of this moment
  int32_t first_launches_ = 0;
};

}  // namespace

SegmentStep break_down(const Plan& plan, const Condensed& text, const Prices& prices, const Times& times, int stage) {
  return Walk(plan, text, prices, times, stage).run();
}

}  // namespace shardlab::simulator::segments
