// The differences from the timeline op by op; the rest is the same to rounding:
//   - a message between two stages is slowed by each of its devices as if the other let it pass: it has arrived when both are
//     through with it. Where other single ops slow it, at either end, both ends are brought together at every change (`couple`).
//     Two effects are then left out: the rhythm of the stretches' ops, and that a message slowed at one end asks for less at the
//     other;
//   - a stretch that waits for its host and shares the device at once is taken to share it for its own time, and then to wait.
#include "simulator/interpreter/segments/run.h"

#include <algorithm>
#include <span>
#include <utility>

#include "plan/base/check.h"
#include "simulator/interpreter/segments/progress.h"

namespace shardlab::simulator::segments {
namespace {

/// Events that happen together may differ in the last bits of their times (simulator/interpreter/timeline.cpp).
constexpr double kTogether = 1e-12;

enum class Doing : uint8_t {
  kReady,
  kBlocked,   ///< a dependency is not over
  kStarting,  ///< they are; being woken, or not launched
  kArrived,   ///< at a meeting that others have to come to, or of which another stream stands for all
  kGather,    ///< stands for a meeting of which everybody's arrival is known
  kRun,
  kDone,
};

struct Stream {
  const Entry* entries = nullptr;
  Ran* ran = nullptr;
  int32_t size = 0;
  int32_t next = 0;
  int32_t device = 0;
  Doing doing = Doing::kReady;
  Wait missing;  ///< of kBlocked: what it waits for
};

struct Device {
  Device(Prices& prices, std::vector<Moment>& moments) : progress(prices, moments) {}
  Progress progress;
  int32_t first = 0, streams = 0;
  const Wait* waits = nullptr;  ///< of its entries
  double launched = 0;          ///< the stretch does not end before
  int32_t next = 0;             ///< the stream of its next event
  bool touched = false, changed = false;
};

struct Gathering {
  int32_t arrived = 0;
  int32_t mover = -1;
  double first = kNever, last = 0;
};

class Run {
 public:
  Run(const Condensed& text, Prices& prices, Times& times) : text_(text), prices_(prices), times_(times) {
    times_.events = 0;
    times_.ends.assign(text.stages.size(), 0);
    times_.stages.resize(text.stages.size());
    times_.moments.resize(text.stages.size());
    gatherings_.resize(text.parties.size());
    int32_t first = 0;
    for (const int32_t parties : text.parties) first_party_.push_back(std::exchange(first, first + parties));
    parties_.resize(static_cast<size_t>(first), -1);
    for (size_t s = 0; s < text.stages.size(); ++s) add_stage(static_cast<int32_t>(s));
    due_.assign(streams_.size(), kNever);
    device_due_.assign(devices_.size(), kNever);
  }

  void run() {
    for (size_t s = 0; s < streams_.size(); ++s) ready_.push_back(static_cast<int32_t>(s));
    settle();
    for (;;) {
      size_t next = 0;
      for (size_t d = 1; d < device_due_.size(); ++d)
        if (device_due_[d] < device_due_[next]) next = d;
      if (device_due_[next] == kNever) break;
      if (device_due_[next] > now_ + kTogether) now_ = device_due_[next];
      ++times_.events;
      event(devices_[next].next);
      settle();
    }
    for (const Stream& s : streams_)
      SHARDLAB_CHECK(s.doing == Doing::kDone, "a stream of stage {} is stuck at entry {} of {}; `verify` must come before",
                     s.device, s.next, s.size);
  }

 private:
  void add_stage(int32_t stage) {
    const StageEntries& entries = text_.stages[static_cast<size_t>(stage)];
    auto& ran = times_.stages[static_cast<size_t>(stage)];
    ran.resize(entries.streams.size());
    auto& moments = times_.moments[static_cast<size_t>(stage)];
    moments.clear();
    Device& device = devices_.emplace_back(prices_, moments);
    device.first = static_cast<int32_t>(streams_.size());
    device.streams = static_cast<int32_t>(entries.streams.size());
    device.waits = entries.waits.data();
    for (size_t s = 0; s < entries.streams.size(); ++s) {
      ran[s].resize(entries.streams[s].size());
      streams_.push_back({.entries = entries.streams[s].data(),
                          .ran = ran[s].data(),
                          .size = static_cast<int32_t>(entries.streams[s].size()),
                          .device = stage});
    }
  }

  Stream& stream(int32_t s) { return streams_[static_cast<size_t>(s)]; }
  Device& device(int32_t d) { return devices_[static_cast<size_t>(d)]; }
  Device& device_of(const Stream& s) { return device(s.device); }
  double& due(int32_t s) { return due_[static_cast<size_t>(s)]; }
  static const Entry& entry(const Stream& s) { return s.entries[s.next]; }
  static Ran& ran(const Stream& s) { return s.ran[s.next]; }

  /// Starts whatever can start at this moment, and looks up what ends next on the devices that changed.
  void settle() {
    while (!ready_.empty()) {
      const int32_t s = ready_.back();
      ready_.pop_back();
      step(s);
    }
    const size_t touched =
        touched_.size();  // the end of a meeting may be the next event of another device, which is looked up then
    for (size_t i = 0; i < touched; ++i)
      if (device(touched_[i]).changed) project(device(touched_[i]));
    for (const int32_t d : touched_) look(d);
    touched_.clear();
  }

  /// The next event of a device is to be looked up; where its progress changes, that first.
  void touch(int32_t d) {
    if (std::exchange(device(d).touched, true)) return;
    touched_.push_back(d);
  }
  void change(int32_t d) {
    touch(d);
    device(d).changed = true;
  }

  void look(int32_t index) {
    Device& d = device(index);
    d.touched = d.changed = false;
    d.next = d.first;
    for (int32_t s = d.first + 1; s < d.first + d.streams; ++s)
      if (due(s) < due(d.next)) d.next = s;
    device_due_[static_cast<size_t>(index)] = due(d.next);
  }

  /// Whether the dependencies of the next entry are over; else which is not.
  bool dependencies_over(Stream& s) {
    const Device& d = device_of(s);
    const Entry& e = entry(s);
    for (const Wait* w = d.waits + e.first_wait; w != d.waits + e.first_wait + e.waits; ++w)
      if (stream(d.first + w->stream).next < w->count) {
        s.missing = *w;
        return false;
      }
    return true;
  }

  /// Takes a stream on to its next entry, if that can start.
  void step(int32_t index) {
    Stream& s = stream(index);
    if (s.doing != Doing::kReady && s.doing != Doing::kBlocked) return;
    if (s.next == s.size) {
      s.doing = Doing::kDone;
      return;
    }
    Ran& r = ran(s);
    if (s.doing == Doing::kReady) r.blocked = -1;
    if (!dependencies_over(s)) {
      if (s.doing == Doing::kReady) r.blocked = now_;
      s.doing = Doing::kBlocked;
      return;
    }
    if (r.blocked >= now_) r.blocked = -1;
    r.ready = r.blocked < 0 ? now_ : now_ + std::min(prices_.wake(), now_ - r.blocked);
    const Entry& e = entry(s);
    const bool launches = e.stretch >= 0 || e.op >= 0;
    r.begin = r.moving = launches ? std::max(r.ready, prices_.dispatch() * (e.launches + 1)) : r.ready;
    s.doing = Doing::kReady;
    if (e.meeting >= 0) return arrive(index, r.begin);
    if (r.begin > now_) return wait_until(index, Doing::kStarting, r.begin);
    begin(index);
  }

  void wait_until(int32_t index, Doing doing, double when) {
    stream(index).doing = doing;
    due(index) = when;
    touch(stream(index).device);
  }

  void event(int32_t index) {
    Stream& s = stream(index);
    due(index) = kNever;
    touch(s.device);
    switch (s.doing) {
      case Doing::kStarting: return begin(index);
      case Doing::kGather: return move(index);
      case Doing::kRun: return finish(index);
      default: SHARDLAB_CHECK(false, "an event of a stream of stage {} in state {}", s.device, static_cast<int>(s.doing));
    }
  }

  /// Every dependency is over, the stream awake, the op launched.
  void begin(int32_t index) {
    Stream& s = stream(index);
    const Entry& e = entry(s);
    if (e.stretch >= 0) return begin_stretch(s, e);
    if (e.op < 0 || prices_.of(e.op).seconds <= 0) return complete(index);
    begin_op(index, prices_.of(e.op).seconds, prices_.of(e.op).kind);
  }

  void begin_stretch(Stream& s, const Entry& e) {
    Device& d = device_of(s);
    d.progress.account(now_);
    d.progress.begin(e.stretch);
    d.launched = prices_.dispatch() * e.launches + prices_.stretch(e.stretch).launched;
    s.doing = Doing::kRun;
    change(s.device);
  }

  void begin_op(int32_t index, double seconds, int32_t kind) {
    Stream& s = stream(index);
    Device& d = device_of(s);
    d.progress.account(now_);
    couple(d);
    d.progress.enter(index, seconds, kind);
    s.doing = Doing::kRun;
    change(s.device);
  }

  std::span<int32_t> parties(int32_t meeting) {
    const size_t m = static_cast<size_t>(meeting);
    return {parties_.data() + first_party_[m], static_cast<size_t>(text_.parties[m])};
  }

  /// The stream will be at its meeting from `when` on. The receiver's op stands for a message, the first's for a collective.
  void arrive(int32_t index, double when) {
    Stream& s = stream(index);
    s.doing = Doing::kArrived;
    const Entry& e = entry(s);
    Gathering& g = gatherings_[static_cast<size_t>(e.meeting)];
    parties(e.meeting)[static_cast<size_t>(g.arrived++)] = index;
    if (!e.sender && (g.mover < 0 || when < g.first)) g.mover = index;
    g.first = std::min(g.first, when), g.last = std::max(g.last, when);
    if (g.arrived < text_.parties[static_cast<size_t>(e.meeting)]) return;
    wait_until(g.mover, Doing::kGather, g.last + std::min(prices_.wake(), g.last - g.first));
  }

  void move(int32_t mover) {
    const Entry& m = entry(stream(mover));
    const double seconds = prices_.of(m.op).seconds;
    for (const int32_t p : parties(m.meeting)) {
      Stream& s = stream(p);
      ran(s).moving = now_;
      if (seconds <= 0)
        complete(p);
      else
        begin_op(p, seconds, prices_.kind_within(entry(s).op, seconds));
    }
  }

  void finish(int32_t index) {
    Stream& s = stream(index);
    const Entry& e = entry(s);
    if (e.stretch >= 0) return finish_stretch(index);
    if (e.meeting < 0) return finish_op(index);
    for (const int32_t p : parties(e.meeting)) finish_op(p);
  }

  void finish_stretch(int32_t index) {
    Stream& s = stream(index);
    Progress& progress = device_of(s).progress;
    progress.account(now_);
    progress.end();
    change(s.device);
    complete(index);
  }

  void finish_op(int32_t index) {
    Stream& s = stream(index);
    Device& d = device_of(s);
    d.progress.account(now_);
    couple(d, index);
    d.progress.leave(index);
    due(index) = kNever;
    change(s.device);
    complete(index);
  }

  void complete(int32_t index) {
    Stream& s = stream(index);
    const Entry& e = entry(s);
    ran(s).end = now_;
    double& end = times_.ends[static_cast<size_t>(s.device)];
    end = std::max(end, now_);
    ++s.next;
    s.doing = Doing::kReady;
    ready_.push_back(index);
    if (!e.awaited) return;
    const Device& d = device_of(s);
    for (int32_t other = d.first; other < d.first + d.streams; ++other) {
      const Stream& o = stream(other);
      if (o.doing == Doing::kBlocked && d.first + o.missing.stream == index && o.missing.count <= s.next) ready_.push_back(other);
    }
  }

  /// Messages of a device that other single ops slow, here or at their other ends, have come as far as the slower of their devices
  /// let them. `without` is over.
  void couple(Device& d, int32_t without = -1) {
    for (const Member& m : d.progress.members()) {
      if (m.stream == without) continue;
      const int32_t meeting = entry(stream(m.stream)).meeting;
      if (meeting < 0) continue;
      const std::span<const int32_t> all = parties(meeting);
      if (m.speed >= 1 && std::ranges::none_of(all, [&](int32_t p) { return member(p).speed < 1; })) continue;
      double left = 0;
      for (const int32_t p : all) {
        device_of(stream(p)).progress.account(now_);
        left = std::max(left, member(p).left);
      }
      for (const int32_t p : all) {
        member(p).left = left;
        change(stream(p).device);
      }
    }
  }
  Member& member(int32_t party) { return device_of(stream(party)).progress.member(party); }

  void project(Device& d) {
    d.progress.account(now_);
    d.progress.project();
    if (d.progress.has_stretch()) due(d.first) = std::max(d.progress.worked(), d.launched);
    for (const Member& m : d.progress.members()) {
      const int32_t meeting = entry(stream(m.stream)).meeting;
      if (meeting < 0)
        due(m.stream) = m.through;
      else
        set_end(meeting);
    }
  }

  void set_end(int32_t meeting) {
    double end = 0;
    for (const int32_t p : parties(meeting)) end = std::max(end, member(p).through);
    const int32_t mover = gatherings_[static_cast<size_t>(meeting)].mover;
    due(mover) = end;
    touch(stream(mover).device);
  }

  const Condensed& text_;
  Prices& prices_;
  Times& times_;
  std::vector<Stream> streams_;
  std::vector<Device> devices_;
  std::vector<Gathering> gatherings_;
  std::vector<int32_t> first_party_, parties_;  ///< streams, by meeting
  std::vector<int32_t> ready_;                  ///< streams to look at before time goes on
  std::vector<int32_t> touched_;                ///< devices likewise
  std::vector<double> due_;                     ///< by stream: its next event
  std::vector<double> device_due_;              ///< by device: the first of those
  double now_ = 0;
};

}  // namespace

void run(const Condensed& text, Prices& prices, Times& times) { Run(text, prices, times).run(); }

}  // namespace shardlab::simulator::segments
