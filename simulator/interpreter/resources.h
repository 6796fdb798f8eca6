// What a device shares out among the ops that run on it at the same time, and how.
//
// An op's share of a resource is the part of its time alone in which it keeps the resource busy. While the shares of a resource add
// up to no more than there is, nobody notices anybody. Where more is asked, all who ask are slowed alike, as a queue that is served
// in order of arrival slows them: speeds s_i are the largest (the smallest of them first) with
//
//   s_i <= 1,   sum over i of s_i * share_ir <= capacity_r   for each resource r of each device.
//
// A collective's thread blocks stay on the multiprocessors that they hold, and kernels laid out for all of them wait for what is
// left: collectives lower the capacity of kUnits instead of sharing it (nccl#689), to half at most (`DeviceModel::held_beside`).
// The analytic estimate (`Beside` of analytic/time.cpp) has the same part for products whose blocks come and go; of those whose
// blocks stay it knows how long a product and a collective take, and a short collective costs it all of its time where it costs
// half here. Of memory: there a kernel beside a collective takes 1 / (1 - t) of its time alone and the collective 1 + t / 2, where
// t is the collective's share of the bandwidth and half of the kernels are bound by memory; here both take 1 + t while the kernel
// is bound by memory and nothing more while it is not: equal to first order in t.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

namespace shardlab::simulator {

/// The resources of one device. Links join the devices of a node, the network joins nodes.
enum class Resource : uint8_t {
  kUnits,    ///< multiprocessors
  kMemory,   ///< bandwidth of device memory
  kLinkOut,  ///< each way apart
  kLinkIn,
  kNetworkOut,
  kNetworkIn,
  kToDevice,  ///< copy engine from host memory
  kToHost,    ///< copy engine to host memory
};
inline constexpr int kResources = 8;

/// The work that one op asks of one device.
struct Demand {
  /// Seconds for which the op alone keeps each resource busy; at most as long as it takes alone.
  std::array<double, kResources> busy_s{};
  double held_units = 0;  ///< part of the multiprocessors that kernels go without while it runs

  double& of(Resource r) { return busy_s[static_cast<size_t>(r)]; }
  double of(Resource r) const { return busy_s[static_cast<size_t>(r)]; }
};

/// A task's part of each resource of one device while it runs at full speed.
struct Shares {
  std::array<double, kResources> of{};
  double held_units = 0;
  friend bool operator==(const Shares&, const Shares&) = default;
};
/// The shares of a task that takes `seconds` alone; `seconds` is above 0.
Shares shares_of(const Demand& demand, double seconds);

/// The rule above for tasks that are on one device and nowhere else: their speeds, at most 32 of them.
void share_device(std::span<const Shares* const> tasks, std::span<double> speeds);

/// The tasks that run on some devices, and the speed of each. A task may ask of several devices at once (a message, a collective):
/// it has one speed.
class DeviceSharing {
 public:
  struct Part {
    int device = 0;
    const Demand* demand = nullptr;
  };

  /// Tasks are numbered from 0 to `tasks` - 1 by the caller.
  DeviceSharing(int devices, int tasks);

  /// Task `task` begins at `now`; alone it takes `seconds`, more than 0.
  void start(int task, double seconds, std::span<const Part> parts, double now);
  /// The task is over.
  void finish(int task, double now);

  /// Tasks that will now end at another time than before the last `start` or `finish`; a started one is among them.
  std::span<const int> changed() const { return changed_; }
  double end_of(int task) const { return tasks_[static_cast<size_t>(task)].end; }

 private:
  struct Use {
    int resource = 0;  ///< device * kResources + Resource
    double share = 0;
  };
  struct Task {
    std::vector<Use> uses;
    std::vector<Use> holds;
    double left = 0;  ///< seconds alone at `since`
    double since = 0;
    double speed = 0;  ///< 0: not running
    double end = 0;
    uint64_t seen = 0;
    bool settled = false;
  };
  struct Pool {
    std::vector<int> users;
    double held = 0;
    uint64_t seen = 0;
    double left = 0, asked = 0;  ///< while speeds are worked out
  };

  double capacity(const Pool& pool) const;
  bool tight(const Pool& pool, int resource) const;
  double share_of(int task, int resource) const;
  void collect(std::span<const Use> uses);
  void share_out(double now);
  void settle(int task, double speed);
  void set_speed(int task, double speed, double now);

  std::vector<Pool> pools_;
  std::vector<Task> tasks_;
  uint64_t round_ = 0;
  std::vector<int> resources_in_, tasks_in_;  ///< those whose speeds depend on one another
  std::vector<double> speeds_;                ///< by position in `tasks_in_`
  std::vector<int> changed_;
};

}  // namespace shardlab::simulator
