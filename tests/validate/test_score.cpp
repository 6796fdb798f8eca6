#include "simulator/estimator/validate/score.h"
#include "tests/test.h"
#include "tests/validate/support.h"

namespace shardlab::simulator::validation {
namespace {

using testing::predicted;
using testing::table_of;

TEST_CASE("Spearman's rank correlation, ties and all") {
  const std::vector<double> up{1, 2, 3, 4}, down{9, 7, 5, 1}, flat{2, 2, 2, 2};
  CHECK(rank_correlation(up, up) == 1.0);
  CHECK(rank_correlation(up, down) == -1.0);
  CHECK_FALSE(rank_correlation(up, flat).has_value());
  CHECK_FALSE(rank_correlation(std::vector<double>{1}, std::vector<double>{1}).has_value());
  // Ranks 1 2.5 2.5 4 against 1 2 3 4: covariance 4.5 of variances 4.5 and 5.
  CHECK(*rank_correlation(std::vector<double>{1, 2, 2, 3}, up) == Approx(4.5 / std::sqrt(4.5 * 5)));
}

TEST_CASE("errors are of the predicted over the measured") {
  const std::vector<RowTable> tables{
      table_of("devices,micro_batch,measured_step_s,p_step", {"8,1,1,1.1", "8,1,2,1.6", "8,1,4,4", "8,1,,3", "8,1,1,", "0,1,1,1"})};
  const auto scores = score_groups(predicted(tables));
  REQUIRE(scores.size() == 1);
  const Score& s = scores[0];
  CHECK(s.group == "hand");
  CHECK(s.rows == 6);
  CHECK(s.refused == 2);
  CHECK(s.step.rows == 3);
  CHECK(s.step.bias == Approx((0.1 - 0.2 + 0.0) / 3));
  CHECK(s.step.mean_absolute == Approx(0.1));
  CHECK(s.step.median_absolute == Approx(0.1));
  CHECK(s.step.worst == Approx(-0.2));
  CHECK(s.step.worst_row == "hand:3");
}

TEST_CASE("layouts of one job are ranked, and the choice is priced") {
  // Two jobs of three layouts; in the first the prediction takes 2.2 s for the best of 2.0 s, in the second it is right.
  const std::vector<RowTable> tables{table_of("devices,tp,micro_batch,grad_accumulation,measured_step_s,p_step",
                                              {"8,1,1,8,2.0,2.6", "8,2,1,16,2.2,2.5", "8,4,1,32,3.0,4.0",  //
                                               "16,1,1,8,1,1", "16,2,1,16,2,3", "16,4,1,32,3,2.5", "32,1,1,8,1,1"})};
  const Score s = score_groups(predicted(tables))[0];
  CHECK(s.jobs == 2);
  REQUIRE(s.layout_rank.has_value());
  CHECK(*s.layout_rank == Approx((0.5 + 0.5) / 2));
  CHECK(*s.layout_loss == Approx((0.1 + 0.0) / 2));
}

TEST_CASE("memory is compared in the kind that was measured, never another") {
  const std::vector<RowTable> tables{
      table_of("devices,micro_batch,measured_bytes,measured_memory_kind,p_step,p_bytes,p_device",
               {"8,1,1000,live,1,1100,2000", "8,1,1000,reserved,1,900,2000", "8,1,1000,device,1,900,2000"})};
  const Score s = score_groups(predicted(tables))[0];
  CHECK(s.memory[0].bias == Approx(0.1));
  CHECK(s.memory[1].bias == Approx(-0.1));
  CHECK(s.memory[2].bias == Approx(1.0));
  CHECK(s.step.rows == 0);
}

TEST_CASE("verdicts on fit are counted both ways") {
  // The node has 80 GB.
  const std::vector<RowTable> tables{
      table_of("devices,micro_batch,measured_status,p_step,p_device",
               {"8,1,ok,1,79e9", "8,1,ok,1,70e9", "8,1,oom,1,79e9", "8,1,oom,1,81e9", "8,1,ok,1,81e9", "8,1,,1,1"})};
  const FitFigures f = score_groups(predicted(tables))[0].fit;
  CHECK(f.rows() == 5);
  CHECK(f.fits_right == 2);
  CHECK(f.fits_wrong == 1);
  CHECK(f.oom_right == 1);
  CHECK(f.oom_wrong == 1);
  CHECK(*f.precision_fits() == Approx(2.0 / 3));
  CHECK(*f.precision_oom() == Approx(0.5));
  CHECK(*f.accuracy() == Approx(0.6));
  CHECK_FALSE(FitFigures{}.accuracy().has_value());
}

TEST_CASE("groups are tables, or rows of equal fields") {
  const std::string header = "devices,micro_batch,tp,pp,measured_step_s,p_step";
  const std::vector<RowTable> tables{table_of(header, {"8,1,1,1,1,2", "8,1,2,1,1,3"}, "one"),
                                     table_of(header, {"8,1,1,1,1,4"}, "two")};
  const auto rows = predicted(tables);
  CHECK(score_groups(rows).size() == 2);
  const auto by_tp = score_groups(rows, std::vector<std::string>{"tp"});
  REQUIRE(by_tp.size() == 2);
  CHECK(by_tp[0].group == "1");
  CHECK(by_tp[0].step.bias == Approx(2));
  const auto by_both = score_groups(rows, std::vector<std::string>{"set", "tp"});
  REQUIRE(by_both.size() == 3);
  CHECK(by_both[1].group == "one tp=2");
  CHECK(score_all(rows, "all").step.rows == 3);
}

TEST_CASE("rows.csv carries every column through and adds what was predicted") {
  const std::vector<RowTable> tables{
      table_of("devices,micro_batch,who,measured_step_s,p_step,p_device,reason", {"8,1,\"a, b\",2,1,9e10,old", "8,0,c,2,1,1,old"})};
  const TextTable out = rows_table(predicted(tables));
  const auto cell = [&](size_t row, const std::string& column) {
    const auto at = std::find(out.columns.begin(), out.columns.end(), column);
    REQUIRE(at != out.columns.end());
    return out.rows[row][static_cast<size_t>(at - out.columns.begin())];
  };
  CHECK(out.columns.front() == "model");
  CHECK(std::count(out.columns.begin(), out.columns.end(), "reason") == 1);
  CHECK(cell(0, "who") == "a, b");
  CHECK(cell(0, "predicted_step_s") == "1");
  CHECK(cell(0, "predicted_device_bytes") == "90000000000");
  CHECK(cell(0, "predicted_fits") == "false");
  CHECK(cell(0, "status") == "ok");
  CHECK(cell(0, "reason").empty());
  CHECK(cell(0, "step_error_pct") == "-50.000");
  CHECK(cell(1, "status") == "refused");
  CHECK(cell(1, "predicted_step_s").empty());
  CHECK(cell(1, "reason") == "hand.csv:3:23: `micro_batch`: 0 is outside 1 to 16777216\n  check the unit, the sign and the digits");
}

TEST_CASE("rows of several tables say which") {
  const std::vector<RowTable> tables{table_of("devices,micro_batch,p_step,x", {"8,1,1,p"}, "one"),
                                     table_of("devices,micro_batch,p_step,y", {"8,1,1,q"}, "two")};
  const TextTable out = rows_table(predicted(tables));
  REQUIRE(out.rows.size() == 2);
  CHECK(out.columns[0] == "set");
  CHECK(out.rows[0][0] == "one");
  CHECK(out.rows[1][0] == "two");
  const size_t y = static_cast<size_t>(std::find(out.columns.begin(), out.columns.end(), "y") - out.columns.begin());
  CHECK(out.rows[0][y].empty());
  CHECK(out.rows[1][y] == "q");
}

}  // namespace
}  // namespace shardlab::simulator::validation
