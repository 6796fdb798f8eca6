// A collective or message on a local machine, step by step: who may go on when, as the executor's transport
// has it (runtime/thread_transport.h).
#pragma once

#include <cstddef>
#include <vector>

#include "plan/collective_steps.h"
#include "plan/plan.h"

namespace shardlab::simulator {

/// The steps of each member, by index in the group; in a message 0 is the sender and 1 the receiver.
using MeetingSchedule = std::vector<std::vector<CollectiveStep>>;

/// The schedule of a collective, send or receive among `size` ranks.
MeetingSchedule schedule_of(const Op& op, int size);

/// A meeting step by step. In every step a member offers its message, reads the messages that others offer it, and goes on to its
/// next step once its own readers are done.
class SteppedMeeting {
 public:
  /// `schedule` must outlive the meeting.
  explicit SteppedMeeting(const MeetingSchedule& schedule);

  /// `member` has come, and works in `stream`.
  void join(int member, int stream) { at(member).stream = stream; }
  /// -1: has not come.
  int stream_of(int member) const { return at(member).stream; }
  int size() const { return static_cast<int>(members_.size()); }

  /// Has `member` done all its steps?
  bool done(int member) const { return at(member).step == schedule_[static_cast<size_t>(member)].size(); }
  bool all_done() const;
  void offer(int member) { at(member).offered = at(member).step + 1; }
  /// Does its step read at all?
  bool reads(int member) const { return step_of(member).receive_from != -1; }
  /// Whether every member from which `member` reads has offered.
  bool may_read(int member) const;
  void begin_read(int member, double now) { at(member).read_begin = now; }
  void end_read(int member) { at(member).read = at(member).step + 1; }
  /// Whether every reader of `member` has read.
  bool taken(int member) const;
  /// When the last of these readers began to read.
  double taking_since(int member) const;
  void next_step(int member) { ++at(member).step; }

 private:
  struct Member {
    int stream = -1;
    size_t step = 0;
    size_t offered = 0, read = 0;  ///< steps
    double read_begin = 0;         ///< in the last step that it read in
  };
  Member& at(int member) { return members_[static_cast<size_t>(member)]; }
  const Member& at(int member) const { return members_[static_cast<size_t>(member)]; }
  const CollectiveStep& step_of(int member) const { return schedule_[static_cast<size_t>(member)][at(member).step]; }
  /// Calls `visit` for the members that a step names: none, one, or all but `member`.
  template <class Visit>
  void each(int named, int member, const Visit& visit) const;

  const MeetingSchedule& schedule_;
  std::vector<Member> members_;
};

}  // namespace shardlab::simulator
