// What the texts of all stages come to in time.
//
// The walk goes from one beginning or end to the next, over the control streams of all stages, their other streams, and the
// messages between them. What runs at once on a device shares it (resources.h); a message runs on two. A block of kernels that has
// its device for itself, with nothing under way that could join it, is one formula: kernel j of it begins when the one before has
// ended and when the host has launched it, so that a block of n kernels that take d_0 .. d_(n-1) and whose first is launch number l
// + 1 ends at
//
//   max(now + sum d, max over j of (l + 1 + j) * launch + sum over k >= j of d_k),
//
// and a block that is repeated is the same formula again, because the second term is linear in the repetition.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "simulator/resources.h"

namespace shardlab::simulator::forms {

/// What seconds of a stage's control stream go to.
enum class Spent : uint8_t { kForward, kBackward, kRecompute, kUpdate, kLaunch, kTensor, kData, kPipeline };
inline constexpr size_t kSpents = 8;
using Seconds8 = std::array<double, kSpents>;

/// A kernel, a collective or a copy: seconds alone, and what it asks of the device.
struct Task {
  double seconds = 0;
  Demand demand = {};
  Spent spent = Spent::kForward;
};

/// Between two stages: what it asks of the device that sends, and of the one that receives.
struct Message {
  double seconds = 0;
  Demand leaves, arrives;
};

/// Tensors that a layer's forward may keep for its backward.
inline constexpr size_t kMostKept = 23;

constexpr std::array<int32_t, kMostKept> never_needed() {
  std::array<int32_t, kMostKept> all{};
  all.fill(std::numeric_limits<int32_t>::max());
  return all;
}

/// Tasks of the control stream that follow one another.
struct Block {
  std::vector<Task> tasks;
  void add(const Task& task) { tasks.push_back(task); }
  /// The next task reads a tensor that forward kept.
  void need(size_t tensor) { needed[tensor] = std::min(needed[tensor], static_cast<int32_t>(tasks.size())); }
  /// Of the tasks from `first` to before `last`: the sums below. `launch_s`: host seconds of one launch.
  Block part(size_t first, size_t last, double launch_s) const;
  /// Works out the sums below. `launch_s`: host seconds of one launch.
  void close(double launch_s);

  std::array<int32_t, 8> done{};  ///< of backward: after how many tasks each of the unit's gradients is complete
  std::array<int32_t, kMostKept> needed = never_needed();  ///< and before which task each tensor that forward kept is first read
  int32_t apart = 0;  ///< and how many come before the first that needs the gradient of its output

  double alone = 0;     ///< sum of the tasks
  double launched = 0;  ///< the second term of the formula, with the launches before the block left out
  Seconds8 spent{};     ///< the tasks' by kind
};

/// Streams of a stage beside its control stream and those of messages.
inline constexpr int32_t kStageStreams = 7;

/// What a stage does, in issue order.
struct Event {
  enum class Kind : uint8_t {
    kWork,      ///< `block`, `times`
    kAsync,     ///< task `index` on another stream, when the control stream is here and those in `after` are over; `number` is its
                ///< name
    kLaunched,  ///< `times` asyncs or messages that were named ahead of their place in the host's order have had it
    kAwait,     ///< the control stream waits for async number `number`
    kSend,      ///< a message of `edge` on a stream of its own, when the control stream is here
    kReceive,   ///< posts one
    kArrived,   ///< the control stream waits until message `number` of `edge` has arrived, ...
    kSent,      ///< ... or has left
    kMeet,      ///< a collective, task `index`, on the control streams of `times` stages; `number` is its name on all of them
  } kind = Kind::kWork;
  int32_t index = 0;   ///< of the block or task
  int32_t times = 1;   ///< of kWork
  int32_t stream = 0;  ///< of kAsync
  int32_t edge = 0;    ///< of messages: which directed pair of stages
  int32_t ahead = 0;   ///< of kAsync and kSend: its place in the host's order beyond where the walk is; 0: next
  int32_t number = 0;
  std::array<int32_t, 3> after{-1, -1, -1};  ///< of kAsync: numbers of others; -1 for none
};

/// The text of one stage.
struct StageText {
  std::vector<Block> blocks;
  std::vector<Task> tasks;
  std::vector<Event> events;
};

struct WalkCosts {
  double launch_s = 0, wake_s = 0;
  std::vector<Message> messages;  ///< by edge: 2 s from stage s to the next, 2 s + 1 back
};

struct Walked {
  double seconds = 0;   ///< of the step
  int longest = 0;      ///< the stage that ends last
  Seconds8 spent{};     ///< of that stage; adds up to `seconds`
  double hidden_s = 0;  ///< of its collectives on other streams, seconds beside the control stream's work
};
Walked walk(std::span<const StageText> stages, const WalkCosts& costs);

}  // namespace shardlab::simulator::forms
