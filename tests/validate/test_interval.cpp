#include "simulator/estimator/validate/interval.h"

#include <algorithm>
#include <cmath>

#include "simulator/estimator/validate/score.h"
#include "tests/test.h"
#include "tests/validate/support.h"

namespace shardlab::simulator::validation {
namespace {

using analytic::Between;
using analytic::Doubt;
using analytic::DoubtTerm;

/// A run of which `share` is exchanged between tensor-parallel ranks and the rest computes.
Doubt doubt(double share, const std::string& framework = "framework a") {
  Doubt d;
  d[DoubtTerm::kCompute] = 1 - share, d[DoubtTerm::kExchange] = share;
  d.device = "device x", d.framework = framework, d.precision = "precision bf16 on x";
  d.ranks = 8, d.parameters = 1e9;
  return d;
}

/// Five sources whose errors grow with the exchange: up to 2 % without, up to 52 % where there is nothing else.
std::vector<Observation> taught() {
  std::vector<Observation> list;
  for (const char* source : {"a", "b", "c", "d", "e"})
    for (int i = 0; i <= 100; ++i)
      for (const double share : {0.0, 0.5, 1.0}) list.push_back({source, (i - 50) / 50.0 * (0.02 + 0.5 * share), doubt(share)});
  return list;
}

TEST_CASE("an interval is as wide as what a step consists of is doubtful") {
  Learner learner(taught());
  const auto width = [&](double share) { return learner.without({}).of(doubt(share)); };
  // Nine of ten errors lie below 0.9 of the largest; the multiplier widens to 0.95 of it.
  CHECK(width(1) == Approx(0.95 * 0.52).epsilon(0.15));
  CHECK(width(0) < 0.1);
  CHECK(width(0.5) > width(0));
  CHECK(width(1) > width(0.5));
}

TEST_CASE("nothing of a source goes into its own intervals") {
  std::vector<Observation> list = taught();
  Learner before(list);
  for (Observation& o : list)
    if (o.source == "e") o.log_ratio *= 20, o.doubt.framework = "framework e", o.doubt.ranks = 4096;
  Learner after(list);
  CHECK(before.without({"e"}).scales == after.without({"e"}).scales);
  CHECK(before.without({"e"}).multiplier == after.without({"e"}).multiplier);
  CHECK(after.without({}).of(doubt(1)) > after.without({"e"}).of(doubt(1)));
  // The words of the source itself are not familiar either.
  Doubt of_e = doubt(1, "framework e");
  after.seen().look_up(of_e, {"e"});
  CHECK(of_e[DoubtTerm::kFramework] == 1);
  after.seen().look_up(of_e);
  CHECK(of_e[DoubtTerm::kFramework] == 0);
}

TEST_CASE("what no scored run had widens an interval") {
  Learner learner(taught());
  const auto width = [&](Doubt d) {
    learner.seen().look_up(d);
    return learner.without({}).of(d);
  };
  const double familiar = width(doubt(0.1));
  CHECK(width(doubt(0.1, "framework z")) > familiar);
  Doubt large = doubt(0.1), small = doubt(0.1), unlike = doubt(0.1), unstated = doubt(0.1);
  large.ranks = 1024, small.parameters = 1e7, unlike.techniques = {"cp ring", "zero 3"}, unstated.unstated = 2;
  for (const Doubt& d : {large, small, unlike, unstated}) CHECK(width(d) > familiar);
  learner.seen().look_up(large);
  CHECK(large[DoubtTerm::kSize] == Approx(7));  // 8 to 1,024 ranks
  learner.seen().look_up(unlike);
  CHECK(unlike[DoubtTerm::kTechniques] == Approx(std::sqrt(2.0)));
}

TEST_CASE("a source counts once, however many rows it has") {
  std::vector<Observation> few = taught(), many = few;
  for (int i = 0; i < 20; ++i)
    for (const Observation& o : few)
      if (o.source == "a") many.push_back(o);
  Learner one(few), other(many);
  CHECK(one.without({}).scales == other.without({}).scales);
  CHECK(one.without({}).multiplier == Approx(other.without({}).multiplier));
}

TEST_CASE("fewer than three sources leave the scales where they were set") {
  std::vector<Observation> list{{"a", 0.3, doubt(1)}, {"b", 0.3, doubt(1)}};
  Learner learner(list), none({});
  CHECK(learner.without({}).scales == none.without({}).scales);
  CHECK(learner.without({}).multiplier == 1);
}

TEST_CASE("what one source alone shows is not learnt from") {
  const auto with_beyond = [](std::initializer_list<const char*> bearers) {
    std::vector<Observation> list = taught();
    for (Observation& o : list)
      if (std::ranges::find(bearers, o.source) != bearers.end()) o.doubt[DoubtTerm::kBeyond] = 0.5;
    return Learner(list).without({});
  };
  const double set = Learner({}).without({}).scales[static_cast<size_t>(DoubtTerm::kBeyond)];
  CHECK(set > 0);
  CHECK(with_beyond({"a"}).scales[static_cast<size_t>(DoubtTerm::kBeyond)] == set);
  CHECK(with_beyond({"a", "b"}).scales[static_cast<size_t>(DoubtTerm::kBeyond)] < set);
}

TEST_CASE("reserved bytes of a framework whose allocator nobody measured are doubtful, live ones are not") {
  std::vector<Observation> list = taught();
  for (Observation& o : list)
    if (o.source == "a") o.doubt.allocator = "allocator a";
  Learner learner(list);
  Doubt live = doubt(0.1), seen = doubt(0.1), unseen = doubt(0.1);
  seen.allocator = "allocator a", unseen.allocator = "allocator z";
  for (Doubt* d : {&live, &seen, &unseen}) learner.seen().look_up(*d);
  CHECK(live[DoubtTerm::kAllocator] == 0);
  CHECK(seen[DoubtTerm::kAllocator] == 0);
  CHECK(unseen[DoubtTerm::kAllocator] == 1);
  // A source's own rows do not make its allocator known to itself.
  learner.seen().look_up(seen, {"a"});
  CHECK(seen[DoubtTerm::kAllocator] == 1);
  CHECK(learner.without({}).of(unseen) > learner.without({}).of(live));
}

TEST_CASE("of two layouts of one study, only what they differ in may be off between them") {
  Learner learner(taught());
  const analytic::LearntFigure figure = learner.all();
  CHECK(spread_apart(figure, doubt(0.3), doubt(0.3)) == 0);
  const double apart = spread_apart(figure, doubt(0.3), doubt(0.5));
  CHECK(apart > 0);
  CHECK(apart < figure.spread_of(doubt(0.5)));
}

TEST_CASE("coverage counts measured times within the interval, and says how wide it is") {
  using testing::predicted;
  const std::string header = "devices,micro_batch,source,measured_step_s,p_step";
  const std::vector<RowTable> tables{
      testing::table_of(header, {"8,1,a,1.05,1", "8,1,b,0.95,1", "8,1,c,1.0,1", "8,1,d,1.5,1", "8,1,e,,1"})};
  auto rows = predicted(tables);
  for (ScoredRow& row : rows) row.step = Between::around(row.prediction->step_s, std::log(1.1));
  const Score s = score_all(rows, "all");
  CHECK(s.step_interval.rows == 4);
  CHECK(s.step_interval.covered == 3);  // d lies beyond
  CHECK(s.step_interval.width == Approx(0.1));
  CHECK(s.memory_interval.rows == 0);
  auto learnt = predicted(tables);
  add_intervals(learnt, learnt);
  CHECK(learnt[4].step.has_value());
}

TEST_CASE("what was learnt reads back as written, and a damaged line is refused") {
  Learner learner(taught());
  const std::string text = analytic::write_learnt({learner.all(), learner.all()});
  const auto read = analytic::read_learnt(text);
  REQUIRE(read.ok());
  CHECK(write_learnt(*read) == text);
  CHECK(read->step.seen.words().at("framework a").size() == 5);
  for (const char* wrong :
       {"step,scale,compute,nan", "step,scale,nothing,1", "steps,scale,compute,1", "step,word", "step,size,a,1"}) {
    const auto refused = analytic::read_learnt(text + wrong + "\n");
    REQUIRE_FALSE(refused.ok());
    CHECK(refused.error().message.find(wrong) != std::string::npos);
  }
}

}  // namespace
}  // namespace shardlab::simulator::validation
