#include "simulator/interpreter/stepped_meeting.h"

#include <algorithm>

namespace shardlab::simulator {

MeetingSchedule schedule_of(const Op& op, int size) {
  if (const auto* c = std::get_if<Collective>(&op.work)) {
    MeetingSchedule schedule;
    for (int member = 0; member < size; ++member)
      schedule.push_back(collective_steps(c->kind, c->algorithm, size, member, c->root, c->per_node));
    return schedule;
  }
  CollectiveStep send, receive;
  send.send_to = 1;
  receive.receive_from = 0;
  return {{send}, {receive}};
}

SteppedMeeting::SteppedMeeting(const MeetingSchedule& schedule) : schedule_(schedule), members_(schedule.size()) {}

bool SteppedMeeting::all_done() const {
  for (int m = 0; m < size(); ++m)
    if (!done(m)) return false;
  return true;
}

template <class Visit>
void SteppedMeeting::each(int named, int member, const Visit& visit) const {
  constexpr int kEveryOther = -2;
  if (named >= 0) visit(at(named));
  if (named != kEveryOther) return;
  for (int m = 0; m < size(); ++m)
    if (m != member) visit(at(m));
}

bool SteppedMeeting::may_read(int member) const {
  bool all = true;
  each(step_of(member).receive_from, member, [&](const Member& m) { all = all && m.offered > at(member).step; });
  return all;
}

bool SteppedMeeting::taken(int member) const {
  bool all = true;
  each(step_of(member).send_to, member, [&](const Member& m) { all = all && m.read > at(member).step; });
  return all;
}

double SteppedMeeting::taking_since(int member) const {
  double last = 0;
  each(step_of(member).send_to, member, [&](const Member& m) { last = std::max(last, m.read_begin); });
  return last;
}

}  // namespace shardlab::simulator
