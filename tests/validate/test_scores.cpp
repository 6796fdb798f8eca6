// The scores of the published sets, held by the ratchet: simulator/published/scores.csv.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <map>
#include <set>
#include <span>
#include <sstream>

#include "simulator/estimator/memory/answer.h"
#include "simulator/estimator/validate/interval.h"
#include "simulator/estimator/validate/predictor.h"
#include "simulator/estimator/validate/ratchet.h"
#include "tests/test.h"
#include "tests/validate/support.h"

namespace shardlab::simulator::validation {
namespace {

const std::string kScores = shardlab::testing::source_dir() + "/simulator/published/scores.csv";
const std::string kIntervals = shardlab::testing::source_dir() + "/simulator/published/intervals.csv";

std::string slurp(const std::string& path) {
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

/// The file of intervals says what the published rows teach. A scale may lie one step of its grid off: there processors round otherwise.
void check_learnt(std::span<const ScoredRow> rows) {
  const analytic::Learnt now = learn(rows);
  if (const char* update = std::getenv("SHARDLAB_UPDATE_GOLDEN"); update != nullptr && std::string(update) == "1")
    std::ofstream(kIntervals) << write_learnt(now);
  INFO("where that is right: shardlab validate --intervals " << kIntervals);
  const auto recorded = analytic::read_learnt(slurp(kIntervals));
  REQUIRE(recorded.ok());
  for (const auto& [was, is] : {std::pair{&recorded->step, &now.step}, {&recorded->memory, &now.memory}}) {
    CHECK(was->spread.multiplier == Approx(is->spread.multiplier).epsilon(0.1));
    for (size_t term = 0; term < analytic::kDoubtTerms; ++term) {
      INFO(name_of(static_cast<analytic::DoubtTerm>(term)));
      CHECK(was->spread.scales[term] == Approx(is->spread.scales[term]).epsilon(0.26).margin(0.011));
    }
    CHECK(was->seen.words() == is->seen.words());
  }
}

TEST_CASE("no figure of a published set worsens without a reason") {
  const std::vector<RowTable> tables = testing::published_tables();
  const std::set<std::string> untuned = testing::untuned_sets();
  std::vector<ScoredRow> rows = predict_rows(tables, analytic_predictor());
  check_learnt(rows);
  std::vector<Figure> now;
  add_intervals(rows, rows);
  for (const Score& score : score_groups(rows))
    for (Figure& figure : figures_of(score)) now.push_back(std::move(figure));
  const auto half =
      std::stable_partition(rows.begin(), rows.end(), [&](const ScoredRow& row) { return !untuned.contains(row.table->name); });
  const std::span<const ScoredRow> all(rows);
  const auto tuned = static_cast<size_t>(half - rows.begin());
  for (Figure& figure : figures_of(score_all(all.first(tuned), "all"))) now.push_back(std::move(figure));
  for (Figure& figure : figures_of(score_all(all.subspan(tuned), "untuned"))) now.push_back(std::move(figure));

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

TEST_CASE("the memory calculator states the errors that nine of ten tuned runs stay within") {
  const std::vector<RowTable> tables = testing::published_tables();
  const std::set<std::string> untuned = testing::untuned_sets();
  std::map<MemoryKind, std::vector<double>> errors;
  for (const ScoredRow& row : predict_rows(tables, analytic_predictor())) {
    const std::optional<double> ratio = row.memory_ratio();
    if (ratio && !untuned.contains(row.table->name)) errors[row.row().run->measured.kind].push_back(std::abs(*ratio - 1));
  }
  const auto ninth = [&](MemoryKind kind) {
    std::vector<double>& all = errors[kind];
    REQUIRE(all.size() >= 20);
    std::sort(all.begin(), all.end());
    return all[static_cast<size_t>(std::ceil(0.9 * static_cast<double>(all.size()))) - 1];
  };
  // Rounded up to whole percents, so that a small change of a prediction moves neither.
  CHECK(std::ceil(100 * ninth(MemoryKind::kLive)) == 100 * whatif::kLiveError);
  CHECK(std::ceil(100 * ninth(MemoryKind::kReserved)) == 100 * whatif::kReservedError);
}

/// Seconds of one layer of 22B in forward and backward, tensor parallelism of eight: what 48 layers take longer than 24, over 24.
double layer_of_22b(bool sequence_parallel, const std::string& recompute) {
  std::string csv =
      "profile,layers,hidden,heads,kv_heads,head_dim,ffn,vocab,tied_embeddings,mlp,norm,machine,devices,dp,tp,pp,sequence_parallel,"
      "recompute,precision,micro_batch,grad_accumulation,seq_len,overlap,attention\n";
  for (const int layers : {24, 48})
    csv += fmt::format(
        "megatron-2022,{},6144,64,64,96,24576,51200,true,gelu,layer,hgx-a100-hdr,8,1,8,1,{},{},fp16,4,1,2048,false,unfused\n",
        layers, sequence_parallel, recompute);
  const auto table = read_rows(csv, "layers", testing::published_resolver());
  REQUIRE(table.ok());
  double seconds = 0;
  const Predictor predict = analytic_predictor();
  for (const int row : {0, 1}) {
    const Prediction p = predict(table->rows[static_cast<size_t>(row)].run.value()).value();
    for (const auto& [part, s] : p.parts)
      if (part != "update" && part != "hidden") seconds += row == 0 ? -s : s;
  }
  return seconds / 24;
}

// A layer is no run: these five figures are in no score, and nothing was fitted to them.
TEST_CASE("a layer takes what Korthikanti et al. measured of one, however it recomputes") {
  struct Measured {
    bool sequence_parallel;
    const char* recompute;
    double milliseconds;
  };
  for (const auto& [sequence_parallel, recompute, milliseconds] : {Measured{false, "none", 19.6},
                                                                   {true, "none", 19.0},
                                                                   {false, "full", 27.2},
                                                                   {false, "selective", 20.9},
                                                                   {true, "selective", 20.3}}) {
    INFO(recompute << (sequence_parallel ? " with" : " without") << " sequence parallelism");
    CHECK(1e3 * layer_of_22b(sequence_parallel, recompute) == Approx(milliseconds).epsilon(0.02));
  }
}

}  // namespace
}  // namespace shardlab::simulator::validation
