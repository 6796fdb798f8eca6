// Which streams of a local machine have its cores: the rules by which the executor hands them on (runtime/core_scheduler.h).
#pragma once

#include <cstddef>
#include <deque>
#include <vector>

namespace shardlab {

/// Streams are numbered from 0 to `streams` - 1. One that wants to work has a core or waits for one in a queue.
class Cores {
 public:
  /// A stream was given a core.
  struct Grant {
    int stream = 0;
    double idle_s = 0;     ///< for as long nobody had the core; 0: another stream handed it over
    bool watched = false;  ///< the stream itself had it last, and has waited since; or nobody had it yet
  };

  /// `first[s]`: stream s goes before those of which this is not said. `turn_s`: as long a stream of the second kind keeps a core
  /// that another of its kind wants, but for the op that it is in and what it yields to the first kind.
  Cores(int cores, std::vector<bool> first, double turn_s);

  /// `stream`, which has none, wants a core.
  void want(int stream, double now);
  /// `stream` waits for something else than a core. Nothing where it has none.
  void give_up(int stream, double now);
  /// `stream` is between two ops: true where it hands its core over, and waits for one.
  bool pause(int stream, double now);

  bool has(int stream) const { return core_of_[static_cast<size_t>(stream)] >= 0; }
  /// Streams that have a core, by core; -1: nobody.
  const std::vector<int>& holders() const { return holders_; }
  int busy() const { return busy_; }
  /// Since the last call, in order.
  std::vector<Grant> take_grants();

 private:
  int next_for(size_t core);
  void grant(int stream, size_t core, double idle_s, double now);

  const std::vector<bool> first_;
  const double turn_s_;
  std::vector<int> holders_;
  std::vector<double> idle_since_;  ///< by core
  std::vector<double> turn_begin_;  ///< by stream
  std::vector<bool> goes_on_;       ///< streams that go on with their turn once they have a core again
  std::vector<size_t> idle_;        ///< cores, the last to become so at the end
  std::vector<int> core_of_, last_core_;
  std::vector<int> last_holder_;  ///< by core
  std::deque<int> queue_first_, queue_;
  std::vector<Grant> grants_;
  int busy_ = 0;
};

}  // namespace shardlab
