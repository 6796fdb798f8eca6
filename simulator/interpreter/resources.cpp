#include "simulator/interpreter/resources.h"

#include <algorithm>

#include "plan/base/check.h"

namespace shardlab::simulator {
namespace {

/// Shares that exceed what there is by less are rounding.
constexpr double kRounding = 1e-9;
/// However many collectives hold multiprocessors, a kernel laid out for all of them is done in two waves.
constexpr double kLeastUnits = 0.5;

}  // namespace

Shares shares_of(const Demand& demand, double seconds) {
  Shares s;
  s.held_units = std::max(0.0, demand.held_units);
  for (size_t r = 0; r < kResources; ++r)
    if (const double share = std::min(1.0, demand.busy_s[r] / seconds); share > kRounding) s.of[r] = share;
  return s;
}

void share_device(std::span<const Shares* const> tasks, std::span<double> speeds) {
  constexpr size_t kMost = 32;
  SHARDLAB_CHECK(tasks.size() <= kMost && speeds.size() >= tasks.size(), "{} tasks on a device", tasks.size());
  std::array<double, kResources> left, asked{};
  left.fill(1);
  for (const Shares* t : tasks) {
    left[static_cast<size_t>(Resource::kUnits)] -= t->held_units;
    for (size_t r = 0; r < kResources; ++r) asked[r] += t->of[r];
  }
  double& units = left[static_cast<size_t>(Resource::kUnits)];
  units = std::max(kLeastUnits, units);
  std::fill_n(speeds.begin(), tasks.size(), 1.0);
  bool any_tight = false;
  for (size_t r = 0; r < kResources; ++r) any_tight = any_tight || asked[r] > left[r] + kRounding;
  std::array<bool, kMost> settled{};
  while (any_tight) {
    size_t scarcest = kResources;
    double level = 1;
    for (size_t r = 0; r < kResources; ++r)
      if (asked[r] > kRounding && left[r] / asked[r] < level) level = left[r] / asked[r], scarcest = r;
    if (scarcest == kResources) return;
    for (size_t i = 0; i < tasks.size(); ++i) {
      if (settled[i] || tasks[i]->of[scarcest] == 0) continue;
      settled[i] = true;
      speeds[i] = level;
      for (size_t r = 0; r < kResources; ++r) {
        left[r] = std::max(0.0, left[r] - level * tasks[i]->of[r]);
        asked[r] -= tasks[i]->of[r];
      }
    }
  }
}

DeviceSharing::DeviceSharing(int devices, int tasks)
    : pools_(static_cast<size_t>(devices) * kResources), tasks_(static_cast<size_t>(tasks)) {}

double DeviceSharing::capacity(const Pool& pool) const { return std::max(kLeastUnits, 1 - pool.held); }

double DeviceSharing::share_of(int task, int resource) const {
  for (const Use& use : tasks_[static_cast<size_t>(task)].uses)
    if (use.resource == resource) return use.share;
  return 0;
}

bool DeviceSharing::tight(const Pool& pool, int resource) const {
  double asked = 0;
  for (const int user : pool.users) asked += share_of(user, resource);
  return asked > capacity(pool) + kRounding;
}

void DeviceSharing::start(int task, double seconds, std::span<const Part> parts, double now) {
  Task& t = tasks_[static_cast<size_t>(task)];
  SHARDLAB_CHECK(t.speed == 0 && seconds > 0, "task {} of {} s starts while it runs", task, seconds);
  t.uses.clear();
  t.holds.clear();
  for (const Part& part : parts) {
    const int first = part.device * kResources;
    for (int r = 0; r < kResources; ++r)
      if (const double share = std::min(1.0, part.demand->busy_s[static_cast<size_t>(r)] / seconds); share > kRounding)
        t.uses.push_back({first + r, share});
    if (part.demand->held_units > 0) t.holds.push_back({first + static_cast<int>(Resource::kUnits), part.demand->held_units});
  }
  for (const Use& use : t.uses) pools_[static_cast<size_t>(use.resource)].users.push_back(task);
  for (const Use& hold : t.holds) pools_[static_cast<size_t>(hold.resource)].held += hold.share;
  t.left = seconds;
  t.since = now;
  t.speed = 1;
  t.end = now + seconds;
  changed_.assign(1, task);
  collect(t.uses);
  collect(t.holds);
  share_out(now);
}

void DeviceSharing::finish(int task, double now) {
  Task& t = tasks_[static_cast<size_t>(task)];
  for (const Use& use : t.uses) std::erase(pools_[static_cast<size_t>(use.resource)].users, task);
  for (const Use& hold : t.holds) {
    double& held = pools_[static_cast<size_t>(hold.resource)].held;
    held = std::max(0.0, held - hold.share);
  }
  t.speed = 0;
  changed_.clear();
  collect(t.uses);
  collect(t.holds);
  share_out(now);
}

/// Adds resources to those whose users' speeds are to be worked out.
void DeviceSharing::collect(std::span<const Use> uses) {
  if (resources_in_.empty()) ++round_;
  for (const Use& use : uses) {
    Pool& pool = pools_[static_cast<size_t>(use.resource)];
    if (pool.seen == round_) continue;
    pool.seen = round_;
    resources_in_.push_back(use.resource);
  }
}

/// Works out the speeds of all whom the collected resources join, directly or through other resources that are asked for
/// too much of.
void DeviceSharing::share_out(double now) {
  bool any_tight = false;
  for (size_t i = 0; i < resources_in_.size(); ++i) {
    const int resource = resources_in_[i];
    Pool& pool = pools_[static_cast<size_t>(resource)];
    any_tight = any_tight || tight(pool, resource);
    pool.left = capacity(pool);
    pool.asked = 0;
    for (const int user : pool.users) {
      pool.asked += share_of(user, resource);
      Task& t = tasks_[static_cast<size_t>(user)];
      if (t.seen == round_) continue;
      t.seen = round_;
      t.settled = false;
      tasks_in_.push_back(user);
      for (const Use& use : t.uses)
        if (Pool& other = pools_[static_cast<size_t>(use.resource)]; other.seen != round_ && tight(other, use.resource)) {
          other.seen = round_;
          resources_in_.push_back(use.resource);
        }
    }
  }
  speeds_.assign(tasks_in_.size(), 1.0);
  while (any_tight) {
    int scarcest = -1;
    double level = 1;
    for (const int resource : resources_in_) {
      const Pool& pool = pools_[static_cast<size_t>(resource)];
      if (pool.asked > kRounding && pool.left / pool.asked < level) level = pool.left / pool.asked, scarcest = resource;
    }
    if (scarcest < 0) break;
    for (size_t i = 0; i < tasks_in_.size(); ++i) {
      if (tasks_[static_cast<size_t>(tasks_in_[i])].settled || share_of(tasks_in_[i], scarcest) == 0) continue;
      speeds_[i] = level;
      settle(tasks_in_[i], level);
    }
  }
  for (size_t i = 0; i < tasks_in_.size(); ++i) set_speed(tasks_in_[i], speeds_[i], now);
  resources_in_.clear();
  tasks_in_.clear();
}

/// The speed of `task` is known: what it takes of each resource is no longer there for others.
void DeviceSharing::settle(int task, double speed) {
  Task& t = tasks_[static_cast<size_t>(task)];
  t.settled = true;
  for (const Use& use : t.uses) {
    Pool& pool = pools_[static_cast<size_t>(use.resource)];
    if (pool.seen != round_) continue;
    pool.left = std::max(0.0, pool.left - speed * use.share);
    pool.asked -= use.share;
  }
}

void DeviceSharing::set_speed(int task, double speed, double now) {
  Task& t = tasks_[static_cast<size_t>(task)];
  if (t.speed == speed) return;
  t.left = std::max(0.0, t.left - (now - t.since) * t.speed);
  t.since = now;
  t.speed = speed;
  t.end = now + t.left / speed;
  if (std::find(changed_.begin(), changed_.end(), task) == changed_.end()) changed_.push_back(task);
}

}  // namespace shardlab::simulator
