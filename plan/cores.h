// Which streams get a core of a machine where there are more streams than cores. The executor hands cores on by these rules
// (runtime/core_scheduler.h), and the timeline follows them (simulator/interpreter/timeline.h).
#pragma once

#include <cstddef>
#include <deque>
#include <vector>

namespace shardlab {

/// The rules:
///   - A stream has one core while it works, and keeps it until it waits for something else.
///   - A core goes to streams beside the control stream first (messages, collectives, copies, updates on the host: others wait for
///     them), oldest first; then to control streams, to the oldest that had this core last, else to the oldest.
///   - A stream that could work gets an idle core at once: the one that it had, else one that nobody has had, else any.
///   - A control stream hands its core over between two ops, or two steps of a collective, when a stream of the first kind wants
///     one: then it is the next of its kind and goes on with its turn. Its turn over, it hands over to the oldest control stream
///     that wants a core.
class Cores {
 public:
  /// A stream was given a core.
  struct Grant {
    int stream = 0;
    int core = 0;
    bool moved = false;     ///< the stream had another core last, or none yet
    bool watched = false;   ///< no other stream has had this core since this stream had it, or since the beginning
    double idle_s = 0;      ///< time for which no stream had the core; 0: another stream handed it over
    double turn_begin = 0;  ///< when the stream's turn began
  };

  /// `turn_s`: seconds that a control stream keeps a core that another control stream wants. It finishes its op first, and it
  /// yields to streams of the first kind earlier.
  Cores(int cores, double turn_s);

  /// Announces a stream. Streams are numbered from 0. `first`: the stream is of the first kind, beside the control streams.
  void add(bool first);

  /// `stream`, which has none, wants a core.
  void want(int stream, double now);
  /// `stream` waits for something else than a core. Nothing where it has none.
  void give_up(int stream, double now);
  /// `stream` is between two ops: true where it hands its core over, and waits for one.
  bool pause(int stream, double now);
  /// `stream`, which may wait for a core, no longer wants one.
  void forget(int stream);

  bool has(int stream) const { return core_of(stream) >= 0; }
  /// -1: none.
  int core_of(int stream) const { return streams_[static_cast<size_t>(stream)].core; }
  int count() const { return static_cast<int>(cores_.size()); }
  int busy() const { return count() - static_cast<int>(idle_.size()); }
  /// The stream that has `core`; -1: nobody.
  int holder(int core) const { return cores_[static_cast<size_t>(core)].holder; }
  /// Whether a stream of the first kind waits for a core, and whether any stream does.
  bool first_waits() const { return !first_.empty(); }
  bool any_waits() const { return !first_.empty() || !control_.empty(); }
  /// The grants since the last call, in order.
  std::vector<Grant> take_grants();

 private:
  struct Stream {
    bool first = false;
    bool goes_on = false;  ///< with its turn, once it has a core again
    int core = -1, last_core = -1;
    double turn_begin = 0;
  };
  struct Core {
    int holder = -1, last_holder = -1;
    double idle_since = 0;
  };

  Stream& at(int stream) { return streams_[static_cast<size_t>(stream)]; }
  std::deque<int>& queue_of(int stream) { return at(stream).first ? first_ : control_; }
  int next_for(int core);
  void grant(int stream, int core, double idle_s, double now);

  const double turn_s_;
  std::vector<Stream> streams_;
  std::vector<Core> cores_;
  std::vector<int> idle_;            ///< cores, the last to become so at the end
  std::deque<int> first_, control_;  ///< streams that wait for a core
  std::vector<Grant> grants_;
};

}  // namespace shardlab
