// Two clocks brought together: exact offsets, drift, and errors that hold.
#include <cmath>

#include "profiler/gpu/clock.h"
#include "tests/namespaces.h"
#include "tests/profiler_gpu/hand_made.h"
#include "tests/test.h"

namespace shardlab::testing::of_clock {

namespace {

constexpr int64_t kEpoch = 1'763'700'000'000'000'000;  // a time of CLOCK_REALTIME: a double holds it to 256 ns only

/// The session's clock at `t` is t seconds; the tracer's kEpoch + t * rate seconds in ns. Reading takes 2 * half_width, the
/// tracer's reading lies at `skew` (-1 to 1) of it.
ClockPair pair_at(double t, double half_width, double skew, double rate = 1) {
  return {t - half_width, kEpoch + std::llround(1e9 * rate * (t + skew * half_width)), t + half_width};
}

}  // namespace

TEST_CASE("op ids hold keys of every size and are never 0", "[profiler_gpu]") {
  for (const OpKey key : {OpKey{0, 0, 0}, OpKey{1, 2, 3},
                          OpKey{(1 << kOpIdStepBits) - 1, (1 << kOpIdRankBits) - 2, (1 << kOpIdInstructionBits) - 1}}) {
    CHECK(op_id(key) != 0);
    CHECK(op_key(op_id(key)) == key);
  }
  CHECK(op_key(0).rank == -1);
}

TEST_CASE("a clock is placed to the nanosecond, far from its zero", "[profiler_gpu]") {
  std::vector<ClockPair> pairs;
  for (int i = 0; i < 11; ++i) pairs.push_back(pair_at(100 + 1e-6 * i, 50e-9, 0));
  const ClockAlignment clock(pairs, {});
  for (const double t : {100.0, 100.25, 103.5}) CHECK(std::abs(clock.seconds(kEpoch + std::llround(1e9 * t)) - t) < 2e-9);
  CHECK(clock.error_s() > 49e-9);
  CHECK(clock.error_s() < 55e-9);
}

TEST_CASE("slow readings do not count, and the stated error holds", "[profiler_gpu]") {
  std::vector<ClockPair> pairs;
  for (int i = 0; i < 101; ++i) {
    const double skew = -1 + 2 * ((i * 37) % 101) / 100.0;
    pairs.push_back(pair_at(5 + 1e-5 * i, i % 3 == 0 ? 40e-6 : 60e-9, skew));  // every third is interrupted
  }
  const ClockAlignment clock(pairs, {});
  CHECK(clock.error_s() < 130e-9);
  CHECK(std::abs(clock.seconds(kEpoch + 5'000'000'000) - 5) <= clock.error_s());
}

TEST_CASE("drift between two anchors is interpolated; a clock that was set is owned up to", "[profiler_gpu]") {
  const auto anchors = [](double t, double rate, double set) {
    std::vector<ClockPair> pairs;
    for (int i = 0; i < 9; ++i) {
      ClockPair p = pair_at(t + 1e-6 * i, 50e-9, 0, rate);
      p.tracer_ns += std::llround(1e9 * set);
      pairs.push_back(p);
    }
    return pairs;
  };
  const double rate = 1 + 40e-6;
  const ClockAlignment drifting(anchors(10, rate, 0), anchors(20, rate, 0));
  CHECK(std::abs(drifting.seconds(kEpoch + std::llround(1e9 * rate * 15)) - 15) < 5e-9);
  CHECK(drifting.error_s() < 60e-9);

  const ClockAlignment set(anchors(10, 1, 0), anchors(20, 1, 0.01));
  CHECK(set.error_s() > 0.0099);
}

TEST_CASE("pairs bracket the tracer's reading", "[profiler_gpu]") {
  struct Ticking final : Clock {
    double now() const override { return time += 1e-6; }
    mutable double time = 0;
  } session;
  int calls = 0;
  const auto pairs = read_clock_pairs(
      session, [&] { return ++calls; }, 5);
  REQUIRE(pairs.size() == 5);
  CHECK(calls == 6);  // the first is thrown away
  for (const ClockPair& p : pairs) CHECK(p.after > p.before);
}

}  // namespace shardlab::testing::of_clock
