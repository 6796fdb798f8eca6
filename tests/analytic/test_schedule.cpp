// Schedules against the tables of their papers.
#include "simulator/estimator/analytic/schedule.h"

#include "tests/test.h"

namespace shardlab::simulator::analytic {
namespace {

constexpr StageTimes kEven{.forward = 1, .input = 1, .weight = 1, .longest = 3, .sum = 24};  // 8 stages

TEST_CASE("micro-batches in flight") {
  CHECK(in_flight(Schedule::kNone, 1, 0, 9, 1) == 1);
  CHECK(in_flight(Schedule::kAfab, 4, 2, 9, 1) == 9);
  CHECK(in_flight(Schedule::k1F1B, 4, 0, 9, 1) == 4);
  CHECK(in_flight(Schedule::k1F1B, 4, 3, 9, 1) == 1);
  CHECK(in_flight(Schedule::k1F1B, 4, 0, 2, 1) == 2);
  // Narayanan et al. 2021: the first of p interleaved stages holds p (1 + (p - 1) / (p v)) stages' worth.
  CHECK(in_flight(Schedule::kInterleaved, 8, 0, 64, 3) == Approx(8 * (1 + 7.0 / (8 * 3))));
  // Qi et al. 2023, table 2: H1 as 1F1B, H2 2 p - 1; 2024, table 2: V-Half (p + 2) / 2, V-Min (p + 4) / 3, rounded down; ZB-V p.
  // A part takes a group of five micro-batches, not four, before the next part does.
  CHECK(in_flight(Schedule::kInterleaved, 4, 3, 10, 3, 5) == Approx(11.0 / 3));
  const Point grouped{.pp = 4, .vpp = 3, .schedule = Schedule::kInterleaved, .grad_accumulation = 10, .micro_batch_group = 5};
  CHECK(in_flight_of_part(grouped, 3, 0) == 5);
  CHECK(in_flight_of_part(grouped, 3, 1) == 5);
  CHECK(in_flight_of_part(grouped, 3, 2) == 1);
  CHECK(in_flight_of_part(grouped, 0, 0) == 7);  // 17 parts in flight: a round of fifteen, and two more
  CHECK(in_flight(Schedule::kZbH1, 8, 7, 64, 1) == 8);
  CHECK(in_flight(Schedule::kZbH2, 8, 0, 64, 1) == 15);
  CHECK(in_flight(Schedule::kZbV, 8, 3, 64, 1) == 8);
  CHECK(in_flight(Schedule::kVHalf, 8, 3, 64, 1) == 5);
  CHECK(in_flight(Schedule::kVMin, 9, 3, 64, 1) == 4);
  CHECK(in_flight(Schedule::kVMin, 8, 3, 64, 1) == 4);
  CHECK(in_flight(Schedule::kDualPipe, 8, 3, 64, 1) == 9);
}

TEST_CASE("bubbles of equal stages") {
  CHECK(bubble_s(Schedule::kNone, 1, 1, kEven) == 0);
  CHECK(bubble_s(Schedule::k1F1B, 8, 1, kEven) == 21);  // (p - 1)(F + B + W)
  CHECK(bubble_s(Schedule::kAfab, 8, 1, kEven) == 21);
  CHECK(bubble_s(Schedule::kInterleaved, 8, 3, kEven) == Approx(7));  // / v
  CHECK(bubble_s(Schedule::kZbH1, 8, 1, kEven) == 7);                 // (p - 1)(F + B - W)
  CHECK(bubble_s(Schedule::kZbH2, 8, 1, kEven) == 0);                 // (p - 1)(F + B - 2 W)
  CHECK(bubble_s(Schedule::kVHalf, 8, 1, kEven) == 10.5);
  CHECK(bubble_s(Schedule::kVMin, 8, 1, kEven) == 14);
  CHECK(bubble_s(Schedule::kDualPipe, 8, 1, kEven) == 6);  // (p / 2 - 1)(F&B + B - 3 W), F&B = 3, B = 2
}

TEST_CASE("no bubble is negative where weight gradients take longest") {
  const StageTimes heavy{.forward = 1, .input = 1, .weight = 5, .longest = 7, .sum = 28};
  for (int s = 1; s < 12; ++s) CHECK(bubble_s(static_cast<Schedule>(s), 4, 2, heavy) >= 0);
}

TEST_CASE("words of schedules go there and back") {
  for (int i = 0; i < 12; ++i) {
    Schedule s = Schedule::kNone;
    REQUIRE(read(name_of(static_cast<Schedule>(i)), &s));
    CHECK(static_cast<int>(s) == i);
  }
  Schedule s = Schedule::kVMin;
  CHECK(!read("2f2b", &s));
  CHECK(s == Schedule::kVMin);
}

}  // namespace
}  // namespace shardlab::simulator::analytic
