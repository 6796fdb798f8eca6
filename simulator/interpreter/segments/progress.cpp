#include "simulator/interpreter/segments/progress.h"

#include <algorithm>
#include <cmath>

#include "plan/base/check.h"

namespace shardlab::simulator::segments {

Progress::Place Progress::place_at(const Profile& p, double times, double along, size_t row) {
  Place place;
  const std::span<const double> list = p.row(row);
  const double total = list[p.ops];
  if (total <= 0) return place;
  if (along >= total) place.times = std::min(std::floor(along / total), times - 1);
  const double y = along - place.times * total;
  const auto next = std::upper_bound(list.begin() + 1, list.end() - 1, y);
  place.op = static_cast<size_t>(next - list.begin()) - 1;
  const double length = list[place.op + 1] - list[place.op];
  place.part = length > 0 ? std::min(1.0, (y - list[place.op]) / length) : 0;
  return place;
}

double Progress::along_at(const Profile& p, const Place& place, size_t row) {
  const std::span<const double> list = p.row(row);
  return place.times * list[p.ops] + list[place.op] + place.part * (list[place.op + 1] - list[place.op]);
}

const Progress::Place& Progress::place() {
  if (!placed_) place_ = place_at(profile(run_), times(run_), along_, 0);
  placed_ = true;
  return place_;
}

Member& Progress::member(int32_t stream) {
  for (Member& m : members())
    if (m.stream == stream) return m;
  SHARDLAB_CHECK(false, "stream {} runs no op on this device", stream);
}

void Progress::account(double now) {
  double dt = now - at_;
  if (dt <= 0) return;
  at_ = now;
  const bool works = run_ < pieces_.size();
  while (run_ < pieces_.size() && dt > 0) dt -= go_along(dt);
  if (works) moments_->push_back({now - std::max(0.0, dt), spent_});
  if (dt <= 0) return;
  for (Member& m : members()) m.left -= dt * m.speed;
}

/// Goes at most `dt` on along the run that the stretch is in; returns how far.
double Progress::go_along(double dt) {
  const Profile& p = profile(run_);
  const double n = times(run_), rest = n * p.total(0) - along_;
  const bool whole = dt >= rest;
  const double gone = whole ? rest : dt;
  const Place from = place(), to = whole ? Place{n - 1, p.ops - 1, 1} : place_at(p, n, along_ + gone, 0);
  const auto passed = [&](size_t row) { return along_at(p, to, row) - along_at(p, from, row); };
  const double communication = passed(p.communication), copies = passed(p.communication + 1);
  spent_[static_cast<size_t>(Spent::kCompute)] += gone - communication - copies;
  spent_[static_cast<size_t>(Spent::kCommunication)] += communication;
  spent_[static_cast<size_t>(Spent::kCopy)] += copies;
  for (Member& m : members()) m.left -= passed(1 + m.position);
  place_ = to;
  along_ += gone;
  if (!whole) return gone;
  ++run_;
  along_ = 0;
  place_ = {};
  placed_ = true;
  return gone;
}

void Progress::begin(int32_t stretch) {
  stretch_ = stretch;
  pieces_ = prices_->pieces_of(stretch);
  track_ = &prices_->track(stretch, *set_);
  run_ = 0;
  along_ = 0;
  place_ = {};
  placed_ = true;
  worked_ = at_;
  begun_ = moments_->size();
  moments_->push_back({at_, spent_});
}

void Progress::end() {
  pieces_ = {};
  if (worked_ >= at_) return;
  moments_->resize(begun_ + 1);
  moments_->push_back({at_, spent_});
}

void Progress::enter(int32_t stream, double seconds, int32_t kind) {
  members_[static_cast<size_t>(size_++)] = {.stream = stream, .kind = kind, .left = seconds};
  change_set(prices_->beside().with(*set_, kind));
}

void Progress::leave(int32_t stream) {
  Member& m = member(stream);
  const int32_t kind = m.kind;
  m = members_[static_cast<size_t>(--size_)];
  change_set(prices_->beside().without(*set_, kind));
}

/// The place of the stretch stays, and is said in seconds beside the new set.
void Progress::change_set(Beside::Set& set) {
  set_ = &set;
  for (Member& m : members()) {
    m.position = set.position(m.kind);
    m.speed = set.alone[m.position];
  }
  if (pieces_.empty()) return;
  const bool inside = run_ < pieces_.size() && along_ > 0;
  if (inside) place();
  track_ = &prices_->track(stretch_, set);
  if (inside) along_ = along_at(profile(run_), place_, 0);
}

void Progress::project() {
  if (run_ < pieces_.size()) worked_ = at_ + track_->rest[run_] - along_;
  for (Member& m : members())
    if (m.left > 0 || m.through == kNever) m.through = std::max(at_, end_of(m));
}

double Progress::end_of(const Member& m) {
  const size_t row = 1 + m.position;
  double left = m.left, end = at_;
  for (size_t r = run_; r < pieces_.size(); ++r) {
    const Profile& p = profile(r);
    const bool inside = r == run_ && along_ > 0;
    const double from = inside ? along_ : 0, done = inside ? along_at(p, place(), row) : 0;
    const double rest = times(r) * p.total(row) - done;
    if (left < rest) return end + along_at(p, place_at(p, times(r), done + left, row), 0) - from;
    left -= rest;
    end += times(r) * p.total(0) - from;
  }
  return end + left / m.speed;
}

}  // namespace shardlab::simulator::segments
