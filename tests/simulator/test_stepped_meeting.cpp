// Meetings on a local machine: who may go on when.

#include "simulator/interpreter/stepped_meeting.h"
#include "tests/namespaces.h"
#include "tests/test.h"

namespace shardlab::testing {
namespace {

Op collective(Algorithm algorithm) {
  Op op;
  op.work = Collective{CollectiveKind::kAllReduce, ReduceOp::kSum, CommId(0), algorithm};
  return op;
}

}  // namespace

TEST_CASE("a message is offered, read and taken") {
  Op send;
  send.work = Send{};
  const MeetingSchedule schedule = schedule_of(send, 2);
  SteppedMeeting met(schedule);
  met.join(1, 7);
  CHECK(met.stream_of(0) == -1);
  CHECK(met.stream_of(1) == 7);
  met.offer(1);
  CHECK(met.reads(1));
  CHECK_FALSE(met.may_read(1));
  met.join(0, 3);
  met.offer(0);
  CHECK_FALSE(met.reads(0));
  met.end_read(0);
  CHECK_FALSE(met.taken(0));
  CHECK(met.may_read(1));
  met.begin_read(1, 2.5);
  CHECK(met.taking_since(0) == 2.5);
  met.end_read(1);
  CHECK(met.taken(0));
  CHECK(met.taken(1));  // offers nothing
  met.next_step(1);
  CHECK(met.done(1));
  CHECK_FALSE(met.all_done());
  met.next_step(0);
  CHECK(met.all_done());
}

TEST_CASE("in a ring each waits for the one before it, and for the one after it to have read") {
  const MeetingSchedule schedule = schedule_of(collective(Algorithm::kRing), 3);
  SteppedMeeting met(schedule);
  met.offer(0);
  CHECK(met.may_read(1));
  CHECK_FALSE(met.may_read(0));  // from 2
  met.offer(1);
  met.offer(2);
  CHECK(met.may_read(0));
  met.end_read(0);
  CHECK(met.taken(2));
  CHECK_FALSE(met.taken(0));  // 1 has not read yet
  met.end_read(2);
  met.next_step(2);  // taken, and on to its second step
  met.offer(2);
  met.end_read(1);
  CHECK(met.taken(0));
  met.next_step(0);
  met.offer(0);
  CHECK(met.may_read(0));        // 2 is in the same step
  CHECK_FALSE(met.may_read(2));  // 1 is a step behind
  CHECK_FALSE(met.done(0));
}

TEST_CASE("directly, everybody waits for all others") {
  const MeetingSchedule schedule = schedule_of(collective(Algorithm::kDirect), 3);
  CHECK(schedule[0].size() == 2);
  SteppedMeeting met(schedule);
  met.offer(0);
  met.offer(1);
  CHECK_FALSE(met.may_read(0));
  met.offer(2);
  for (int m = 0; m < 3; ++m) CHECK(met.may_read(m));
  met.begin_read(1, 4);
  met.begin_read(2, 3);
  CHECK(met.taking_since(0) == 4);
  met.end_read(1);
  CHECK_FALSE(met.taken(0));
  met.end_read(2);
  CHECK(met.taken(0));
  CHECK_FALSE(met.taken(1));  // 0 has not read
}

}  // namespace shardlab::testing
