// How a moment is told without the ops in between: while nothing begins or ends on a device, its stretch runs along its profile
// (beside.h), and so do the ops beside it. Whenever something does begin or end, the place of the stretch and what is left of each
// op beside it are worked out (`account`), the change is made, and the next ends are looked up (`project`).
//
// What differs from the timeline op by op, where each of these is exact:
//   - a message between two stages is slowed by each of the two devices as if the other did not slow it, and has arrived when both
//     are through with it;
//   - a stretch that waits for its host and shares the device at once is taken to share it for its own time, and then to wait.
#include "simulator/segments/run.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <span>
#include <utility>

#include "plan/base/check.h"

namespace shardlab::segments {
namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();
/// Events that happen together may differ in the last bits of their times (simulator/timeline.cpp).
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
  Wait missing;             ///< of kBlocked: what it waits for
  int32_t kind = 0;         ///< of the single op that runs
  size_t member = 0;        ///< its position in the device's set
  double left = 0;          ///< of it, seconds alone, at the device's `at`
  double through = kNever;  ///< when the device will be through with it
  double due = kNever;      ///< its next event
};

/// Where in a run of repeated pieces a stretch is: the repetition, the op, the part of the op that is done.
struct Place {
  double times = 0;
  size_t op = 0;
  double part = 0;
};

struct Device {
  int32_t first = 0, streams = 0;
  const Wait* waits = nullptr;                ///< of its entries
  std::array<int32_t, kMaxStreams> beside{};  ///< streams with a single op that runs
  int32_t besides = 0;
  int32_t set = 0;  ///< of their kinds
  const Stretch* stretch = nullptr;
  size_t run = 0;    ///< of the stretch's repeated pieces; their number: it has worked
  double along = 0;  ///< seconds along that run, beside `along_set`
  int32_t along_set = 0;
  double launched = 0;  ///< the stretch does not end before
  double at = 0;        ///< what is said of progress is said of this moment
  double due = kNever;
  int32_t due_stream = 0;
  bool touched = false, changed = false;
};

struct Gathering {
  int32_t arrived = 0;
  double first = kNever, last = 0;
  int32_t mover = -1;
};

class Run {
 public:
  Run(const Condensed& text, Prices& prices, Times& times) : text_(text), prices_(prices), times_(times) {
    times_.events = 0;
    times_.ends.assign(text.stages.size(), 0);
    times_.stages.resize(text.stages.size());
    gatherings_.resize(text.parties.size());
    int32_t first = 0;
    for (const int32_t parties : text.parties) first_party_.push_back(std::exchange(first, first + parties));
    parties_.resize(static_cast<size_t>(first), -1);
    for (size_t s = 0; s < text.stages.size(); ++s) add_stage(static_cast<int32_t>(s));
  }

  void run() {
    for (size_t s = 0; s < streams_.size(); ++s) ready_.push_back(static_cast<int32_t>(s));
    settle();
    for (;;) {
      size_t next = 0;
      for (size_t d = 1; d < devices_.size(); ++d)
        if (devices_[d].due < devices_[next].due) next = d;
      const Device& device = devices_[next];
      if (device.due == kNever) break;
      if (device.due > now_ + kTogether) now_ = device.due;
      ++times_.events;
      event(device.due_stream);
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
    Device device;
    device.first = static_cast<int32_t>(streams_.size());
    device.streams = static_cast<int32_t>(entries.streams.size());
    device.waits = entries.waits.data();
    for (size_t s = 0; s < entries.streams.size(); ++s) {
      ran[s].resize(entries.streams[s].size());
      Stream stream;
      stream.entries = entries.streams[s].data();
      stream.ran = ran[s].data();
      stream.size = static_cast<int32_t>(entries.streams[s].size());
      stream.device = stage;
      streams_.push_back(stream);
    }
    devices_.push_back(device);
  }

  Stream& stream(int32_t s) { return streams_[static_cast<size_t>(s)]; }
  Device& device_of(const Stream& s) { return devices_[static_cast<size_t>(s.device)]; }
  static const Entry& entry(const Stream& s) { return s.entries[s.next]; }
  static Ran& ran(const Stream& s) { return s.ran[s.next]; }

  /// Starts whatever can start at this moment, and looks up what ends next on the devices that changed.
  void settle() {
    for (;;) {
      while (!ready_.empty()) {
        const int32_t s = ready_.back();
        ready_.pop_back();
        step(s);
      }
      if (touched_.empty()) return;
      const size_t touched =
          touched_.size();  // the end of a meeting may be the next event of another device, which is looked up then
      for (size_t i = 0; i < touched; ++i)
        if (Device& d = devices_[static_cast<size_t>(touched_[i])]; d.changed) project(d);
      for (const int32_t d : touched_) look(devices_[static_cast<size_t>(d)]);
      touched_.clear();
    }
  }

  /// Its next event is to be looked up; where its progress changes, that first.
  void touch(int32_t d) {
    Device& device = devices_[static_cast<size_t>(d)];
    if (device.touched) return;
    device.touched = true;
    touched_.push_back(d);
  }
  void change(int32_t d) {
    touch(d);
    devices_[static_cast<size_t>(d)].changed = true;
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
    Stream& s = stream(index);
    s.doing = doing;
    s.due = when;
    Device& d = device_of(s);
    if (when < d.due) d.due = when, d.due_stream = index;
  }

  /// A stream's event is over: its device's next one is another stream's.
  void look(Device& d) {
    d.due = kNever;
    d.touched = d.changed = false;
    for (int32_t s = d.first; s < d.first + d.streams; ++s)
      if (stream(s).due < d.due) d.due = stream(s).due, d.due_stream = s;
  }

  void event(int32_t index) {
    Stream& s = stream(index);
    s.due = kNever;
    device_of(s).due = kNever;
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
    if (e.stretch >= 0) return begin_stretch(index, e);
    if (e.op < 0 || prices_.of(e.op).seconds <= 0) return complete(index);
    begin_op(index, prices_.of(e.op).seconds, prices_.of(e.op).kind);
  }

  void begin_stretch(int32_t index, const Entry& e) {
    Stream& s = stream(index);
    Device& d = device_of(s);
    account(d);
    d.stretch = &text_.stretches[static_cast<size_t>(e.stretch)];
    d.run = 0;
    d.along = 0;
    d.along_set = d.set;
    ran(s).slowed_communication = ran(s).slowed_copies = 0;
    d.launched = prices_.dispatch() * e.launches + prices_.stretch(e.stretch).launched;
    s.doing = Doing::kRun;
    change(s.device);
  }

  void begin_op(int32_t index, double seconds, int32_t kind) {
    Stream& s = stream(index);
    Device& d = device_of(s);
    account(d);
    couple(d);
    s.doing = Doing::kRun;
    s.kind = kind;
    s.left = seconds;
    d.beside[static_cast<size_t>(d.besides++)] = index;
    enter(d, prices_.beside().with(d.set, kind));
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
    if (e.stretch >= 0) {
      Device& d = device_of(s);
      account(d);
      d.stretch = nullptr;
      return complete(index);
    }
    if (e.meeting < 0) return finish_op(index);
    for (const int32_t p : parties(e.meeting)) finish_op(p);
  }

  void finish_op(int32_t index) {
    Stream& s = stream(index);
    Device& d = device_of(s);
    account(d);
    const auto end = d.beside.begin() + d.besides;
    *std::find(d.beside.begin(), end, index) = d.beside[static_cast<size_t>(--d.besides)];
    couple(d);
    enter(d, prices_.beside().without(d.set, s.kind));
    s.due = s.through = kNever;
    complete(index);
  }

  /// From now on other ops run beside the control stream.
  void enter(Device& d, int32_t set) {
    d.set = set;
    for (int32_t b = 0; b < d.besides; ++b) {
      Stream& s = stream(d.beside[static_cast<size_t>(b)]);
      s.member = prices_.beside().position(set, s.kind);
    }
    change(stream(d.first).device);
  }

  void complete(int32_t index) {
    Stream& s = stream(index);
    Ran& r = ran(s);
    const Entry& e = entry(s);
    r.end = now_;
    if (e.stretch < 0) r.worked = now_;
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

  // --- progress on one device ----------------------------------------------------------------------------------------------

  const Profile& profile(const Device& d, int32_t set) { return prices_.profile(d.stretch->pieces[d.run].piece, set); }

  static Place place_at(const Profile& p, double times, double along, size_t row) {
    Place place;
    const std::span<const double> list = p.row(row);
    const double total = list[p.ops];
    if (total <= 0) return place;
    place.times = std::min(std::floor(along / total), times - 1);
    const double y = along - place.times * total;
    const auto next = std::upper_bound(list.begin() + 1, list.end() - 1, y);
    place.op = static_cast<size_t>(next - list.begin()) - 1;
    const double length = list[place.op + 1] - list[place.op];
    place.part = length > 0 ? std::min(1.0, (y - list[place.op]) / length) : 0;
    return place;
  }
  static double along_at(const Profile& p, const Place& place, size_t row) {
    const std::span<const double> list = p.row(row);
    return place.times * list[p.ops] + list[place.op] + place.part * (list[place.op + 1] - list[place.op]);
  }

  /// Says of this moment how far the stretch of a device is, and what is left of the ops beside it.
  void account(Device& d) {
    double dt = now_ - d.at;
    if (dt <= 0) return;
    d.at = now_;
    if (d.stretch != nullptr)
      while (d.run < d.stretch->pieces.size() && dt > 0) dt -= go_along(d, dt);
    if (dt <= 0) return;
    for (int32_t b = 0; b < d.besides; ++b) {
      Stream& s = stream(d.beside[static_cast<size_t>(b)]);
      if (s.left > 0) s.left -= dt * prices_.beside().speed(d.set, s.member);
    }
  }

  /// A message that other single ops slow, here or at its other end, has come as far as the slower of its devices let it.
  void couple(const Device& d) {
    for (int32_t b = 0; b < d.besides; ++b) {
      const Stream& s = stream(d.beside[static_cast<size_t>(b)]);
      if (s.doing != Doing::kRun || entry(s).meeting < 0) continue;
      const std::span<const int32_t> all = parties(entry(s).meeting);
      if (std::ranges::none_of(all, [&](int32_t p) { return slowed(stream(p)); })) continue;
      double left = 0;
      for (const int32_t p : all) {
        account(device_of(stream(p)));
        left = std::max(left, stream(p).left);
      }
      for (const int32_t p : all) {
        stream(p).left = left;
        change(stream(p).device);
      }
    }
  }

  bool slowed(const Stream& s) { return prices_.beside().speed(device_of(s).set, s.member) < 1; }

  /// Goes at most `dt` on along the run that a stretch is in; returns how far.
  double go_along(Device& d, double dt) {
    const double times = d.stretch->pieces[d.run].times;
    const Profile& p = profile(d, d.set);
    const double rest = times * p.total(0) - d.along, gone = std::min(dt, rest);
    const double to = d.along + gone;
    if (d.besides > 0) {
      const Place from_place = place_at(p, times, d.along, 0);
      const Place to_place = gone == rest ? Place{times - 1, p.ops - 1, 1} : place_at(p, times, to, 0);
      Ran& r = ran(stream(d.first));
      r.slowed_communication += along_at(p, to_place, p.slowed) - along_at(p, from_place, p.slowed);
      r.slowed_copies += along_at(p, to_place, p.slowed + 1) - along_at(p, from_place, p.slowed + 1);
      for (int32_t b = 0; b < d.besides; ++b) {
        Stream& s = stream(d.beside[static_cast<size_t>(b)]);
        const size_t row = 1 + s.member;
        s.left -= along_at(p, to_place, row) - along_at(p, from_place, row);
      }
    }
    d.along = to;
    if (gone == rest) ++d.run, d.along = 0;
    return gone;
  }

  /// When the stretch of a device and the ops beside it will end, if nothing else changes.
  void project(Device& d) {
    account(d);
    double worked = d.at;
    if (d.stretch != nullptr) {
      translate(d);
      for (size_t r = d.run; r < d.stretch->pieces.size(); ++r) {
        const Repeated& repeated = d.stretch->pieces[r];
        worked += repeated.times * prices_.profile(repeated.piece, d.set).total(0) - (r == d.run ? d.along : 0);
      }
      Stream& control = stream(d.first);
      if (d.run < d.stretch->pieces.size()) ran(control).worked = worked;
      control.due = std::max(ran(control).worked, d.launched);
    }
    for (int32_t b = 0; b < d.besides; ++b) {
      Stream& s = stream(d.beside[static_cast<size_t>(b)]);
      if (s.left > 0 || s.through == kNever) s.through = std::max(d.at, end_beside(d, s));
      const int32_t meeting = entry(s).meeting;
      if (meeting < 0)
        s.due = s.through;
      else
        set_end_of_meeting(meeting);
    }
  }

  void set_end_of_meeting(int32_t meeting) {
    double end = 0;
    for (const int32_t p : parties(meeting)) end = std::max(end, stream(p).through);
    const int32_t mover = gatherings_[static_cast<size_t>(meeting)].mover;
    stream(mover).due = end;
    touch(stream(mover).device);
  }

  /// Says the place of the stretch in seconds beside the set that there is now.
  void translate(Device& d) {
    if (d.along_set == d.set) return;
    if (d.run < d.stretch->pieces.size() && d.along > 0) {
      const Place place = place_at(profile(d, d.along_set), d.stretch->pieces[d.run].times, d.along, 0);
      d.along = along_at(profile(d, d.set), place, 0);
    }
    d.along_set = d.set;
  }

  double end_beside(const Device& d, const Stream& s) {
    const size_t member = s.member;
    double left = s.left, end = d.at;
    if (d.stretch != nullptr)
      for (size_t r = d.run; r < d.stretch->pieces.size(); ++r) {
        const Repeated& repeated = d.stretch->pieces[r];
        const Profile& p = prices_.profile(repeated.piece, d.set);
        const double times = repeated.times, from = r == d.run ? d.along : 0;
        const double done = from > 0 ? along_at(p, place_at(p, times, from, 0), 1 + member) : 0;
        const double rest = times * p.total(1 + member) - done;
        if (left < rest) return end + along_at(p, place_at(p, times, done + left, 1 + member), 0) - from;
        left -= rest;
        end += times * p.total(0) - from;
      }
    return end + left / prices_.beside().speed(d.set, member);
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
  double now_ = 0;
};

}  // namespace

void run(const Condensed& text, Prices& prices, Times& times) { Run(text, prices, times).run(); }

}  // namespace shardlab::segments
