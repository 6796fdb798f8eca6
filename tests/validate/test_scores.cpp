// The scores of the published sets, held by the ratchet: simulator/published/scores.csv.
#include <cstdlib>
#include <fstream>
#include <sstream>

#include "simulator/validate/interval.h"
#include "simulator/validate/predictor.h"
#include "simulator/validate/ratchet.h"
#include "tests/test.h"
#include "tests/validate/support.h"

namespace shardlab::validation {
namespace {

const std::string kScores = std::string(SHARDLAB_SOURCE_DIR) + "/simulator/published/scores.csv";

std::string slurp(const std::string& path) {
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

TEST_CASE("no figure of a published set worsens without a reason") {
  const std::vector<RowTable> tables = testing::published_tables();
  std::vector<ScoredRow> rows = predict_rows(tables, analytic_predictor());
  std::vector<Figure> now;
  // Of a single set the intervals cover what they do; what must hold is the coverage of all rows.
  for (const Score& score : score_groups(rows))
    for (Figure& figure : figures_of(score)) now.push_back(std::move(figure));
  add_intervals(rows, Intervals(residuals_of(rows)));
  for (Figure& figure : figures_of(score_all(rows, "all"))) now.push_back(std::move(figure));

  auto recorded = read_scores(slurp(kScores), kScores);
  const bool fresh = !std::ifstream(kScores).good();
  if (!fresh) {
    INFO((recorded.ok() ? std::string() : to_string(recorded.error())));
    REQUIRE(recorded.ok());
  }
  if (const char* update = std::getenv("SHARDLAB_UPDATE_GOLDEN"); update != nullptr && std::string(update) == "1")
    std::ofstream(kScores) << write_scores(update_scores(fresh ? std::vector<Recorded>{} : *recorded, now));
  recorded = read_scores(slurp(kScores), kScores);
  REQUIRE(recorded.ok());
  for (const std::string& wrong : compare_scores(*recorded, now))
    FAIL_CHECK(wrong << "\n  where that is right, SHARDLAB_UPDATE_GOLDEN=1 and a reason in " << kScores);
}

}  // namespace
}  // namespace shardlab::validation
