#include "simulator/estimator/validate/interval.h"

#include <cmath>

#include "simulator/estimator/validate/score.h"
#include "tests/test.h"
#include "tests/validate/support.h"

namespace shardlab::simulator::validation {
namespace {

TEST_CASE("an interval comes from the errors of other sources only") {
  std::vector<Residual> residuals;
  for (const char* source : {"a", "b", "c"})
    for (int i = 0; i <= 100; ++i) residuals.push_back({source, (i - 50) / 500.0});
  residuals.push_back({"wild", 5});
  const Intervals intervals(residuals);
  const auto own = intervals.around(2, "wild");
  REQUIRE(own.has_value());
  CHECK(own->first == Approx(2 * std::exp(-0.09)));
  CHECK(own->second == Approx(2 * std::exp(0.09)));
  const auto other = intervals.around(2, "a");
  REQUIRE(other.has_value());
  CHECK(other->second > own->second);
}

TEST_CASE("a source weighs the square root of its rows") {
  // 100 rows at 0 weigh 10, two sources of one row at 1 weigh 2 together: a sixth of the whole lies at 1, so the 95 % quantile
  // does.
  std::vector<Residual> residuals(100, {"many", 0});
  residuals.push_back({"one", 1});
  residuals.push_back({"two", 1});
  const auto interval = Intervals(residuals).around(1, "other");
  REQUIRE(interval.has_value());
  CHECK(interval->first == 1);
  CHECK(interval->second == Approx(std::exp(1.0)));
}

TEST_CASE("fewer than three other sources give no interval") {
  const Intervals intervals({{"a", 0}, {"b", 0}, {"c", 0}});
  CHECK(intervals.around(1, "d").has_value());
  CHECK_FALSE(intervals.around(1, "a").has_value());
}

TEST_CASE("coverage counts measured times within the interval") {
  using testing::predicted;
  const std::string header = "devices,micro_batch,source,measured_step_s,p_step";
  const std::vector<RowTable> tables{
      testing::table_of(header, {"8,1,a,1.05,1", "8,1,b,0.95,1", "8,1,c,1.0,1", "8,1,d,1.5,1", "8,1,e,,1"})};
  auto rows = predicted(tables);
  const auto residuals = residuals_of(rows);
  REQUIRE(residuals.size() == 4);
  CHECK(residuals[3].log_ratio == Approx(std::log(1.5)));
  add_intervals(rows, Intervals(residuals));
  const Score s = score_all(rows, "all");
  CHECK(s.intervals == 4);
  CHECK(s.covered == 2);  // b and d lie beyond what the errors of the others span
  CHECK(rows[4].low_s.has_value());
}

}  // namespace
}  // namespace shardlab::simulator::validation
