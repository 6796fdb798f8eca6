// Schedules as grids: one row a stage, its slots against time. What papers say of each is held by formula.
#include <fmt/format.h>

#include <algorithm>
#include <map>

#include "plan/braids.h"
#include "plan/pipeline_schedule.h"
#include "tests/namespaces.h"
#include "tests/schedules.h"
#include "tests/test.h"

namespace shardlab::testing {
namespace {

const std::vector<Schedule> kNamed = pipeline_schedules();
const Schedule kEager = schedule_named("eager-1f1b").value();

PipelineSchedule make(Schedule schedule, int stages, int micro_batches, int virtual_stages = 2) {
  const PipelineShape shape{schedule, stages, is_looped(schedule) ? virtual_stages : 1, micro_batches};
  const auto ok = check(shape);
  INFO(name_of(schedule) << " p " << stages << ": " << (ok ? "" : ok.error().message));
  REQUIRE(ok.ok());
  return make_schedule(shape);
}

/// What a micro-batch of a whole stage takes.
struct Costs {
  int forward, input, weight;
  int all() const { return forward + input + weight; }
};

/// Parts of a stage that holds several take so much less. Times are in units that make each a whole number, so that sums are exact.
SlotCosts costs_of(const PipelineSchedule& s, const Costs& c) {
  const double parts = s.placement == PartPlacement::kMirrored ? 1 : s.parts / s.stages, unit = 12 / parts;
  return SlotCosts::uniform(s.parts, c.forward * unit, c.input * unit, c.weight * unit);
}
constexpr double kUnit = 12;

/// What a step takes beyond what a stage computes, or the time from a stage's first slot to its last, of the stage with the most. In
/// units of 1/kUnit.
double bubble(const PipelineSchedule& s, const Costs& c, bool of_stages = false) {
  const ScheduleTimes times = play(s, costs_of(s, c)).value();
  double longest = times.end;
  if (of_stages) {
    longest = 0;
    for (const auto& slots : times.slots) longest = std::max(longest, slots.back().end - slots.front().begin);
  }
  return longest - kUnit * s.micro_batches * c.all();
}

double most_held(const PipelineSchedule& s) {
  double most = 0;
  for (int stage = 0; stage < s.stages; ++stage) most = std::max(most, shardlab::most_held(s, stage));
  return most;
}

std::string grid(Schedule schedule, int stages, int micro_batches, int virtual_stages = 2) {
  const PipelineSchedule s = make(schedule, stages, micro_batches, virtual_stages);
  return "\n" + print_grid(s, SlotCosts::uniform(s.parts, 1, 1, 1));
}

TEST_CASE("schedules as their papers draw them") {
  REQUIRE(grid(Schedule::kAfab, 2, 3) == R"(
stage 0 0F0 0F1 0F2             0B0---- 0B1---- 0B2----
stage 1     1F0 1F1 1F2 1B0---- 1B1---- 1B2----
)");
  REQUIRE(grid(Schedule::k1F1B, 3, 4) == R"(
stage 0 0F0 0F1 0F2                 0B0---- 0F3 0B1----     0B2----     0B3----
stage 1     1F0 1F1         1B0---- 1F2 1B1---- 1F3 1B2----     1B3----
stage 2         2F0 2B0---- 2F1 2B1---- 2F2 2B2---- 2F3 2B3----
)");
  REQUIRE(grid(kEager, 3, 6) == R"(
stage 0 0F0 0F1 0F2 0F3 0F4         0B0---- 0F5 0B1----     0B2----     0B3----     0B4----     0B5----
stage 1     1F0 1F1 1F2     1B0---- 1F3 1B1---- 1F4 1B2---- 1F5 1B3----     1B4----     1B5----
stage 2         2F0 2B0---- 2F1 2B1---- 2F2 2B2---- 2F3 2B3---- 2F4 2B4---- 2F5 2B5----
)");
  REQUIRE(grid(Schedule::kInterleaved, 2, 2) == R"(
stage 0 0F0 0F1 2F0 2F1         2B0----     2B1---- 0B0---- 0B1----
stage 1     1F0 1F1 3F0 3B0---- 3F1 3B1---- 1B0---- 1B1----
)");
  REQUIRE(grid(Schedule::kZbH1, 3, 4) == R"(
stage 0 0F0 0F1 0F2         0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3
stage 1     1F0 1F1     1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3
stage 2         2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3
)");
  REQUIRE(grid(Schedule::kZbV, 2, 4) == R"(
stage 0 0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2 3I2 3W2 0I1 0W1 3F3 3I3 3W3 0I2 0W2 0I3 0W3
stage 1     1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1F3 1I1 1W1 2F3 2I2 2W2 1I2 2I3 1I3 1W2 2W3 1W3
)");
  REQUIRE(grid(Schedule::kDualPipe, 2, 4) == R"(
stage 0 0F0 1F2 0F1 1B2---- 1F3 0B0---- 1B3---- 0I1 0W1
stage 1 0F2 1F0 0F3 1B0---- 1F1 0B2---- 1B1---- 0I3 0W3
)");
}

TEST_CASE("every schedule computes each part for each micro-batch once, in an order that ends, whatever the micro-batches") {
  int schedules = 0;
  for (const Schedule schedule : kNamed)
    for (int stages = 2; stages <= 8; ++stages)
      for (int m = 1; m <= 3 * stages + 1; ++m)
        for (int v = 2; v <= (is_looped(schedule) ? 4 : 2); ++v) {
          if (schedule == Schedule::kDualPipe && stages % 2 != 0) continue;
          const PipelineSchedule s = make(schedule, stages, m, v);
          const auto ok = check(s);
          INFO(name_of(schedule) << " p " << stages << " m " << m << " v " << v << ": " << (ok ? "" : ok.error().message));
          REQUIRE(ok.ok());
          ++schedules;
          // Gradients of weights of a part are made in the order of micro-batches: sums over them then have one order.
          for (const auto& order : s.order) {
            std::map<int, int> next;
            for (const PipelineSlot& slot : order) {
              if (!slot.makes_gradients()) continue;
              const int first = s.stage_of(slot.part, 0) == static_cast<int>(&order - s.order.data()) ? 0 : s.downward();
              REQUIRE(slot.micro_batch == first + next[slot.part]++);
            }
          }
        }
  REQUIRE(schedules > 1500);
}

TEST_CASE("the bubble of a step is what the papers say, exactly") {
  for (const Costs& c : {Costs{1, 1, 1}, Costs{2, 2, 1}, Costs{1, 2, 1}})
    for (int p = 2; p <= 16; ++p)
      for (const int m : {p, 2 * p, 3 * p, 4 * p}) {
        const double rest = kUnit * (p - 1);
        INFO("p " << p << " m " << m << " F " << c.forward << " I " << c.input << " W " << c.weight);
        REQUIRE(bubble(make(Schedule::kAfab, p, m), c) == rest * c.all());
        REQUIRE(bubble(make(Schedule::k1F1B, p, m), c) == rest * c.all());
        REQUIRE(bubble(make(Schedule::kNaive, p, m), c) == m * rest * c.all());
        REQUIRE(bubble(make(kEager, p, m), c) == rest * c.all());
        for (const int v : {2, 3, 4}) {
          REQUIRE(bubble(make(Schedule::kInterleaved, p, m, v), c) * v == rest * c.all());
          REQUIRE(bubble(make(Schedule::kBreadthFirst, p, m, v), c) * v == rest * c.all());
        }
        REQUIRE(bubble(make(Schedule::kZbH1, p, m), c) == rest * (c.forward + c.input - c.weight));
        // Without a meeting of all stages before the update, a step of ZB-H2 and ZB-V begins on each stage where the last ended.
        if (m >= 2 * p - 1) REQUIRE(bubble(make(Schedule::kZbH2, p, m), c, true) == rest * (c.forward + c.input - 2 * c.weight));
        if (m >= 2 * p && c.forward == c.input && c.input == c.weight) REQUIRE(bubble(make(Schedule::kZbV, p, m), c, true) == 0);
        // DeepSeek counts a forward and a backward that overlap as one slot; one after the other, as here, they wait for less.
        if (p % 2 == 0 && m >= 2 * p)
          REQUIRE(bubble(make(Schedule::kDualPipe, p, m), c) <= kUnit * (p / 2 - 1) * (c.forward + 2 * c.input - c.weight));
      }
}

TEST_CASE("activations held are what the papers say, exactly") {
  for (int p = 2; p <= 16; ++p)
    for (const int m : {2 * p, 3 * p, 4 * p}) {
      INFO("p " << p << " m " << m);
      REQUIRE(most_held(make(Schedule::kNaive, p, m)) == 1);
      REQUIRE(most_held(make(Schedule::kAfab, p, m)) == m);
      REQUIRE(most_held(make(Schedule::kBreadthFirst, p, m)) == m);
      REQUIRE(most_held(make(Schedule::kZbH1, p, m)) == p);
      REQUIRE(most_held(make(Schedule::kZbH2, p, m)) == 2 * p - 1);
      REQUIRE(most_held(make(Schedule::kZbV, p, m)) == p);
      REQUIRE(most_held(make(Schedule::kVHalf, p, m)) == (p + 2) / 2);
      REQUIRE(most_held(make(Schedule::kVMin, p, m)) == (p + 4) / 3);
      REQUIRE(most_held(make(Schedule::kDualPipeV, p, m)) == p + 0.5);
      if (p % 2 == 0) REQUIRE(most_held(make(Schedule::kDualPipe, p, m)) == p + 1);
      for (int stage = 0; stage < p; ++stage) {
        REQUIRE(shardlab::most_held(make(Schedule::k1F1B, p, m), stage) == p - stage);
        REQUIRE(shardlab::most_held(make(kEager, p, m), stage) == 2 * (p - stage) - 1);
      }
      for (const int v : {2, 3, 4}) {
        const PipelineSchedule s = make(Schedule::kInterleaved, p, m, v);
        REQUIRE(std::abs(most_held(s) - (p + (p - 1.0) / v)) < 1e-9);
      }
    }
}

// A stage of 1f1b holds p - s micro-batches, and each is p - s slots and 2 (p - 1 - s) messages under way: it waits for the messages
// again and again. A stage of eager 1f1b holds 2 (p - s) - 1, enough for a message to take half as long as a slot.
TEST_CASE("eager 1F1B hides every message but those of the first micro-batch, as long as one takes at most half of F + B") {
  for (const Costs& c : {Costs{1, 1, 1}, Costs{2, 2, 1}, Costs{1, 2, 1}})
    for (int p = 2; p <= 16; ++p)
      for (const int m : {2 * p, 4 * p})
        for (const int share : {1, 2, 4}) {
          const auto with_messages = [&](Schedule schedule) {
            const PipelineSchedule s = make(schedule, p, m);
            SlotCosts costs = costs_of(s, c);
            costs.hop = kUnit * c.all() / 8 * share;
            return play(s, costs)->end - kUnit * c.all() * (m + p - 1) - 2 * (p - 1) * costs.hop;
          };
          INFO("p " << p << " m " << m << " a message is " << share << "/8 of F + B");
          REQUIRE(with_messages(kEager) == 0);
          REQUIRE(with_messages(Schedule::k1F1B) > 0);
        }
}

TEST_CASE("braids make no step longer than by a slot, and stand where forwards can wait for gradients") {
  const auto pairs = [](const Braids& braids) {
    int n = 0;
    for (const auto& row : braids.with_next) n += static_cast<int>(std::ranges::count(row, true));
    return n;
  };
  const auto made = [](std::string_view name, int p, int m) {
    const Schedule schedule = *schedule_named(name);
    return make_schedule({schedule, p, is_looped(schedule) ? 2 : 1, m});
  };
  for (int number = 0; number < named_schedules(); ++number)
    for (const int p : {2, 3, 4, 8})
      for (const int m : {2, 3, 4, 16}) {
        if (Schedule(number) == Schedule::kNone || is_mirrored(Schedule(number))) continue;
        const PipelineSchedule schedule = made(name_of(Schedule(number)), p, m);
        const Braids with = braided(schedule), without = unbraided(schedule);
        INFO(name_of(Schedule(number)) << ", " << p << " stages, " << m << " micro-batches");
        CHECK(with.times.end <= without.times.end + 1);
        CHECK_FALSE(without.any());
        for (size_t stage = 0; stage < schedule.order.size(); ++stage)
          for (size_t i = 0; i < schedule.order[stage].size(); ++i) {
            if (!with.with_next[stage][i]) continue;
            CHECK(schedule.order[stage][i].work == SlotWork::kF);
            CHECK(schedule.order[stage][i + 1].goes_back());
            CHECK(schedule.order[stage][i].micro_batch != schedule.order[stage][i + 1].micro_batch);
            CHECK(with.times.slots[stage][i].begin == with.times.slots[stage][i + 1].begin);
          }
      }
  struct Row {
    const char* schedule;
    int p, m, pairs;
    double end;
  };
  for (const Row& row : {Row{"afab", 4, 16, 1, 57}, Row{"1f1b", 4, 16, 0, 57}, Row{"zb-h1", 4, 16, 0, 51},
                         Row{"eager-1f1b", 4, 4, 2, 21}, Row{"eager-1f1b", 4, 16, 36, 57}, Row{"interleaved", 4, 16, 84, 105},
                         Row{"zb-h2", 4, 16, 36, 51}, Row{"zb-v", 2, 16, 40, 97}, Row{"dualpipe-v", 2, 16, 55, 98}}) {
    INFO(row.schedule << ", " << row.p << " stages, " << row.m << " micro-batches");
    const Braids braids = braided(made(row.schedule, row.p, row.m));
    CHECK(pairs(braids) == row.pairs);
    CHECK(braids.times.end == row.end);
  }
  // One stage, five micro-batches: each backward with the next forward.
  CHECK(pairs(braided(make_schedule({.micro_batches = 5}))) == 4);
}

TEST_CASE("V-Half and V-Min idle for about half and two thirds of 1F1B where slots take as long as each other") {
  for (int p = 4; p <= 16; p += 2) {
    const Costs c{1, 1, 1};
    const double plain = bubble(make(Schedule::k1F1B, p, 4 * p), c);
    REQUIRE(bubble(make(Schedule::kVHalf, p, 4 * p), c) < 0.70 * plain);
    REQUIRE(bubble(make(Schedule::kVMin, p, 4 * p), c) < 0.71 * plain);
  }
}

TEST_CASE("a list scheduler stays within the activations that it may hold, and idles less the more they are") {
  const SlotCosts costs = SlotCosts::uniform(8, 3, 4, 2, 1);
  double before = 1e9;
  for (const double held : {1.5, 2.0, 3.0, 4.0, 6.0}) {
    const PipelineSchedule s = list_schedule(PartPlacement::kFolded, 4, 2, 12, costs, held);
    REQUIRE(check(s).ok());
    REQUIRE(most_held(s) <= held);
    const double end = play(s, costs)->end;
    INFO("held " << held << " end " << end << " before " << before);
    REQUIRE(end <= before);
    before = end;
  }
  REQUIRE(before < play(make(Schedule::kVMin, 4, 12), costs)->end);
  const PipelineSchedule plain = list_schedule(PartPlacement::kLooped, 4, 1, 8, SlotCosts::uniform(4, 1, 1, 1), 4);
  REQUIRE(check(plain).ok());
  REQUIRE(play(plain, SlotCosts::uniform(4, 1, 1, 1))->end <=
          play(make(Schedule::k1F1B, 4, 8), SlotCosts::uniform(4, 1, 1, 1))->end);
}

TEST_CASE("a schedule is read back from its CSV as it was") {
  for (const Schedule schedule : kNamed)
    for (const int p : {2, 4, 6})
      for (const int m : {2, p, 2 * p + 1}) {
        const PipelineSchedule s = make(schedule, p, m);
        const auto again = from_csv(to_csv(s), "s.csv");
        INFO(name_of(schedule) << " p " << p << " m " << m << ": " << (again ? "" : to_string(again.error())));
        REQUIRE(again.ok());
        REQUIRE(again->order == s.order);
        REQUIRE(again->parts == s.parts);
        REQUIRE(again->micro_batches == s.micro_batches);
        for (int part = 0; part < s.parts; ++part)
          for (int j = 0; j < m; ++j) REQUIRE(again->stage_of(part, j) == s.stage_of(part, j));
      }
}

TEST_CASE("the first line of a table of slots may name its file, and lines are counted with it") {
  const auto named = from_csv("my.csv\n0F0,0B0\n1F0,1B0\n", "s.csv"), plain = from_csv("0F0,0B0\n1F0,1B0\n", "s.csv");
  REQUIRE((named.ok() && plain.ok()));
  REQUIRE(named->order == plain->order);
  REQUIRE(from_csv("my.csv\n0F0,0B0\n1F0,1X0\n", "s.csv").error().where == "s.csv:3:5");
}

std::string refused(std::string_view csv) {
  const auto read = from_csv(csv, "s.csv");
  REQUIRE_FALSE(read.ok());
  return read.error().where + ": " + read.error().message;
}

TEST_CASE("a CSV that is no schedule is refused with its cell") {
  // Parts may lie anywhere, and a stage may idle.
  const auto odd = from_csv("0F0,,2F0, ,2B0,0B0\n1F0,1I0,1W0\n", "s.csv");
  REQUIRE(odd.ok());
  REQUIRE(odd->stage_of(2, 0) == 0);

  REQUIRE(refused("") == "s.csv:1:1: the schedule is empty");
  REQUIRE(refused("0F0, 0X0\n") == "s.csv:1:6: `0X0` is not a cell of a schedule");
  REQUIRE(refused("0F0,0B0\n,\n") == "s.csv:2:1: the row of stage 1 has no cell");
  REQUIRE(refused("0F0,0B0\n0F1,0B1,1F0,1B0\n") == "s.csv:2:1: stage 1 has 0F1, but part 0 for micro-batch 1 is on stage 0");
  REQUIRE(refused("0F0,0I0\n1F0,1B0\n") == "s.csv:1:1: stage 0 has no W of part 0 for micro-batch 0");
  REQUIRE(refused("0F0,0W0\n1F0,1B0\n") == "s.csv:1:1: stage 0 has no I of part 0 for micro-batch 0");
  REQUIRE(refused("0F0\n1F0,1B0\n") == "s.csv:1:1: stage 0 has no backward pass of part 0 for micro-batch 0");
  REQUIRE(refused("0B0\n1F0,1B0\n") == "s.csv:1:1: stage 0 has no forward pass of part 0 for micro-batch 0");
  REQUIRE(refused("0F0,0B0,,0F0\n1F0,1B0\n") == "s.csv:1:10: stage 0 has 0F0 twice");
  REQUIRE(refused("0F0,0W0,0B0\n1F0,1B0\n") == "s.csv:1:9: stage 0 has both 0W0 and 0B0: a B is an I and a W in one");
  REQUIRE(refused("0F0,0W0,0I0\n1F0,1B0\n") == "s.csv:1:5: stage 0: 0W0 stands before 0I0, which it needs");
  REQUIRE(refused("0F0,0B0\n1B0,1F0\n") == "s.csv:2:1: stage 1: 1B0 stands before 1F0, which it needs");
  REQUIRE(refused("0F0,0B0,0F1,0B1\n1F1,1F0,1B0,1B1\n") ==
          "s.csv:1:5: stage 0: 0B0 waits forever for 1B0 of stage 1, which itself waits at 1F1");
  REQUIRE(refused("0F0,1B0,0B0,1F0\n") == "s.csv:1:5: stage 0: 1B0 stands before 1F0, which it needs");
  REQUIRE(refused("1F0,0F0,1B0,0B0\n") == "s.csv:1:1: stage 0: 1F0 waits forever for 0F0, which stands behind it");
  REQUIRE(refused("0F0,0B0\n2F0,2B0\n") == "s.csv:2:1: no stage has part 1, but stage 1 has part 2");
  REQUIRE(refused("0F0,0B0\n999999F999999,1B0\n").starts_with("s.csv:1:1: 4 cells are too few"));
}

TEST_CASE("what a schedule cannot have is refused") {
  const auto refusal = [](PipelineShape shape) { return check(shape).error().message; };
  REQUIRE(refusal({Schedule::k1F1B, 1, 1, 4}) == "schedule=1f1b with pp=1: there is no pipeline to be scheduled");
  REQUIRE(refusal({Schedule::kNone, 2, 1, 4}) == "schedule=none with pp=2: a pipeline needs a schedule");
  REQUIRE(refusal({Schedule::kInterleaved, 2, 1, 4}) ==
          "schedule=interleaved with vpp=1: it needs several virtual stages on each rank");
  REQUIRE(refusal({Schedule::kZbV, 2, 2, 4}) == "schedule=zb-v with vpp=2: it has two parts of the model on each rank by itself");
  REQUIRE(refusal({Schedule::kDualPipe, 3, 1, 4}) == "schedule=dualpipe with pp=3: each part lies on two stages, q and p - 1 - q");
}

}  // namespace
}  // namespace shardlab::testing
