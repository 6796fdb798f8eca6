#include "simulator/validate/interval.h"

#include <cmath>

#include "simulator/validate/score.h"
#include "tests/test.h"
#include "tests/validate/support.h"

namespace shardlab::validation {
namespace {

/// f of three sources: t with 2 degrees of freedom to the second order, 2.7618, over z, times sqrt(4/3).
constexpr double kWideningOfThree = 2.76179 / 1.64485 * 1.154701;

TEST_CASE("an interval comes from the errors of other sources only") {
  std::vector<Residual> residuals;
  for (const char* source : {"a", "b", "c"})
    for (int i = 0; i <= 100; ++i) residuals.push_back({source, (i - 50) / 500.0});
  residuals.push_back({"wild", 5});
  const Intervals intervals(residuals);
  const auto own = intervals.around(2, "wild");
  REQUIRE(own.has_value());
  CHECK(own->first == Approx(2 * std::exp(-0.09 * kWideningOfThree)).epsilon(1e-3));
  CHECK(own->second == Approx(2 * std::exp(0.09 * kWideningOfThree)).epsilon(1e-3));
  const auto other = intervals.around(2, "a");
  REQUIRE(other.has_value());
  CHECK(other->second > own->second);
}

TEST_CASE("every source weighs the same, whatever the number of its rows") {
  // A thousand rows at 0 weigh as much as one at 1: two thirds of the weight lie at 1, and so do the middle and the 95 % quantile.
  std::vector<Residual> residuals(1000, {"many", 0});
  residuals.push_back({"one", 1});
  residuals.push_back({"two", 1});
  const auto interval = Intervals(residuals).around(1, "other");
  REQUIRE(interval.has_value());
  CHECK(interval->first == Approx(std::exp(1 - kWideningOfThree)).epsilon(1e-3));
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
}  // namespace shardlab::validation
