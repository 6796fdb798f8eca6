// Sweeps at the segments resolution: the figures of the timeline, no trace.
#include <fmt/format.h>

#include <cstdlib>
#include <filesystem>
#include <map>
#include <string>

#include "reports/table.h"
#include "tests/cli/program.h"
#include "tests/namespaces.h"
#include "tests/test.h"

namespace shardlab::testing {
namespace {

using testing::Output;
using testing::Scratch;
using testing::shardlab_program;
using testing::slurp;

/// Rows of results.csv by name and column.
std::map<std::string, std::map<std::string, std::string>> rows_of(const std::string& directory) {
  const auto table = parse_csv(slurp(directory + "/results.csv"));
  std::map<std::string, std::map<std::string, std::string>> rows;
  for (size_t r = 1; r < table.size(); ++r) {
    std::map<std::string, std::string> row;
    for (size_t c = 0; c < table[0].size(); ++c) row[table[0][c]] = table[r][c];
    rows[row["name"]] = row;
  }
  return rows;
}

double number(const std::map<std::string, std::string>& row, const char* column) {
  return std::strtod(row.at(column).c_str(), nullptr);
}

}  // namespace

TEST_CASE("the segments resolution says what the timeline says, and leaves no trace") {
  const Scratch scratch;
  const std::string sweep = scratch.write("both.yaml",
                                          "version: 1\nname: both\nmodel: tiny-llama\nmachine: {preset: hgx-h100-ndr, nodes: 1}\n"
                                          "mode: simulate\nresolution: segments\n"
                                          "train: {seq_len: 128, global_batch_tokens: 8Ki}\naxes:\n  tp: [1, 2]\n  pp: [1, 2]\n  "
                                          "zero: [0, 1, 2, 3]\n");
  REQUIRE(shardlab_program(scratch, "run " + sweep + " --resolution timeline --traces all --out " + (scratch / "timeline")).code ==
          0);
  REQUIRE(shardlab_program(scratch, "run " + sweep + " --traces all --out " + (scratch / "segments")).code == 0);
  const auto timeline = rows_of(scratch / "timeline"), segments = rows_of(scratch / "segments");
  REQUIRE(timeline.size() == 16);
  REQUIRE(segments.size() == 16);
  for (const auto& [name, row] : timeline) {
    INFO(name);
    const auto& other = segments.at(name);
    for (const char* column : {"case_id", "status", "predicted_peak_bytes", "predicted_wire_bytes"})
      CHECK(row.at(column) == other.at(column));
    CHECK(number(row, "predicted_step_s") > 0);
    CHECK(number(other, "predicted_step_s") == Approx(number(row, "predicted_step_s")).epsilon(1e-3));
    CHECK(number(other, "predicted_compute_s") == Approx(number(row, "predicted_compute_s")).epsilon(1e-2));
    CHECK(row.at("program_version") != other.at("program_version"));
    const std::string file = row.at("case_id") + "/predicted.trace.jsonl.gz";
    CHECK(std::filesystem::exists(scratch / "timeline/" + file));
    CHECK_FALSE(std::filesystem::exists(scratch / "segments/" + file));
    CHECK(std::filesystem::exists(scratch / "segments/" + row.at("case_id") + "/plan.txt"));
  }
}

TEST_CASE("the segments resolution refuses what it cannot predict or compare") {
  const Scratch scratch;
  const std::string sweep = scratch.write("s.yaml", "model: tiny-llama\nmachine: hgx-h100-ndr\ndata: {text: s.yaml}\n");
  const Output measure = shardlab_program(scratch, "run " + sweep + " --mode both --resolution segments");
  CHECK(measure.code == 2);
  CHECK(measure.err.find("no trace to compare a measurement with") != std::string::npos);

  const std::string local = scratch.write("local.yaml", "model: tiny-llama\nmachine: {local: true}\nmode: simulate\n");
  const Output shared =
      shardlab_program(scratch, fmt::format("run {} --resolution segments --machine-file {}/tests/cli/calibrated.yaml --out {}",
                                            local, testing::source_dir(), scratch / "local"));
  CHECK(shared.code == 3);  // no case could run
  const auto rows = rows_of(scratch / "local");
  REQUIRE(rows.size() == 1);
  CHECK(rows.begin()->second.at("status") == "refused");
  CHECK(rows.begin()->second.at("reason").find("--resolution timeline") != std::string::npos);
}

}  // namespace shardlab::testing
