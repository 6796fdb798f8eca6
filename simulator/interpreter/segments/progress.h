// One device from one moment to the next: a stretch of its control stream, and single ops of other streams beside it.
//
// While nothing begins or ends there, the stretch runs along its profiles (beside.h), and so do the ops beside it. Whenever
// something begins or ends, `account` works out the place of the stretch and the rest of each op, the change is made, and `project`
// looks up when they will end.
#pragma once

#include <array>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "simulator/interpreter/segments/prices.h"

namespace shardlab::simulator::segments {

inline constexpr double kNever = std::numeric_limits<double>::infinity();

/// What the stretches of a device have done until `at`: seconds of each kind. Where the host holds one up, none passes.
struct Moment {
  double at = 0;
  std::array<double, kSpents> spent{};
};

/// A single op that runs beside the control stream.
struct Member {
  int32_t stream = 0;
  int32_t kind = 0;
  size_t position = 0;      ///< in the device's set
  double speed = 1;         ///< while the control stream runs nothing
  double left = 0;          ///< seconds alone, at the device's moment
  double through = kNever;  ///< when the device will be through with it, if nothing changes
};

class Progress {
 public:
  /// Writes `moments` as it goes on: between two of them each kind of seconds passes evenly, as far as is looked at.
  Progress(Prices& prices, std::vector<Moment>& moments) : prices_(&prices), moments_(&moments), set_(&prices.beside().nobody()) {}

  std::span<Member> members() { return {members_.data(), static_cast<size_t>(size_)}; }
  Member& member(int32_t stream);

  /// Goes on to `now`.
  void account(double now);

  /// These change what runs: at a moment that was accounted for, and before `project`.
  void begin(int32_t stretch);
  /// Where the host was late, each kind passed evenly over the whole stretch, and so did the wait.
  void end();
  void enter(int32_t stream, double seconds, int32_t kind);
  void leave(int32_t stream);

  /// Looks up the ends: `worked`, and `through` of each member.
  void project();

  bool has_stretch() const { return !pieces_.empty(); }
  double worked() const { return worked_; }  ///< when the ops of the stretch will be done, or were

 private:
  /// The place of a stretch in a run of repeated pieces: the repetition, the op, the part of the op that is done.
  struct Place {
    double times = 0;
    size_t op = 0;
    double part = 0;
  };
  static Place place_at(const Profile& p, double times, double along, size_t row);
  static double along_at(const Profile& p, const Place& place, size_t row);

  const Profile& profile(size_t run) const { return *track_->profiles[run]; }
  double times(size_t run) const { return pieces_[run].times; }
  const Place& place();
  double go_along(double dt);
  void change_set(Beside::Set& set);
  double end_of(const Member& m);

  Prices* prices_;
  std::vector<Moment>* moments_;
  double at_ = 0;  ///< the moment that is accounted for
  std::array<Member, kMaxStreams> members_{};
  int32_t size_ = 0;
  Beside::Set* set_;

  int32_t stretch_ = -1;
  std::span<const Repeated> pieces_;  ///< of the stretch
  const Track* track_ = nullptr;      ///< beside `set_`
  size_t run_ = 0;                    ///< of the repeated pieces; their number: it has worked
  double along_ = 0;                  ///< seconds along that run
  Place place_;                       ///< the same, where `placed_`
  bool placed_ = false;
  double worked_ = 0;
  size_t begun_ = 0;                     ///< the moment at which the stretch began
  std::array<double, kSpents> spent_{};  ///< in all stretches so far
};

}  // namespace shardlab::simulator::segments
