// `what-if` and `trace`: the step again with other prices, and where its time goes, as a user types it.
#include <fmt/format.h>

#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "reports/table.h"
#include "tests/cli/program.h"
#include "tests/namespaces.h"
#include "tests/test.h"

namespace shardlab::testing {
namespace {

const std::string kCase =
    "model: llama-3.2-1b\nmachine: {preset: hgx-h100-ndr, nodes: 1}\nseq_len: 1Ki\nglobal_batch_tokens: 8Ki\ndp: 2\ntp: 2\n";

double number(const Rows& rows, size_t row, const std::string& column) { return std::stod(cell(rows, row, column)); }

size_t row_of(const Rows& rows, const std::string& what) {
  for (size_t r = 1; r < rows.size(); ++r)
    if (cell(rows, r, "what") == what) return r;
  FAIL("no row " << what);
  return 0;
}

TEST_CASE("what-if without a change lists what each part would give if it were free, the most first") {
  const Scratch scratch;
  const std::string file = scratch.write("case.yaml", kCase);
  const Output o = shardlab_program(scratch, "what-if " + file + " --format csv");
  INFO(o.err);
  REQUIRE(o.code == 0);
  const Rows rows = parse_csv(o.out);
  const double now = number(rows, row_of(rows, "as it is"), "step_s");
  for (const char* word : {"compute", "communication", "launch", "linear", "all_reduce", "tensor-parallel"})
    CHECK(number(rows, row_of(rows, word), "step_s") < now);
  for (size_t r = 2; r + 1 < rows.size(); ++r) CHECK(number(rows, r, "saved_s") >= number(rows, r + 1, "saved_s"));
  // The answer is the simulator's: the first row is what `run` predicts.
  REQUIRE(shardlab_program(scratch, "run " + file + " --mode simulate --resolution segments --out " + (scratch / "run")).code == 0);
  CHECK(number(parse_csv(slurp(scratch / "run/results.csv")), 1, "predicted_step_s") == now);
}

TEST_CASE("what-if answers each change and all of them, of a file, a point of a sweep and a case of a run") {
  const Scratch scratch;
  const std::string file = scratch.write("case.yaml", kCase);
  const std::string changes = " --free all_reduce --hide communication --speed-up linear=2 --format csv";
  const Output o = shardlab_program(scratch, "what-if " + file + changes);
  INFO(o.err);
  REQUIRE(o.code == 0);
  const Rows rows = parse_csv(o.out);
  REQUIRE(rows.size() == 6);
  const double now = number(rows, 1, "step_s");
  CHECK(cell(rows, 2, "what") == "all_reduce free");
  CHECK(cell(rows, 3, "what") == "communication hidden");
  CHECK(cell(rows, 4, "what") == "linear 2x as fast");
  CHECK(cell(rows, 5, "what") == "all of these");
  for (size_t r = 2; r < 5; ++r) {
    CHECK(number(rows, r, "step_s") < now);
    CHECK(number(rows, 5, "step_s") <= number(rows, r, "step_s") * (1 + 1e-9));
    CHECK(number(rows, r, "saved_s") == Approx(now - number(rows, r, "step_s")));
  }
  // Ops that are only hidden still occupy their stream.
  const Rows freed = parse_csv(shardlab_program(scratch, "what-if " + file + " --free communication --format csv").out);
  CHECK(number(freed, 2, "step_s") <= number(rows, 3, "step_s"));
  CHECK(number(freed, 2, "exposed_comm_s") == 0);

  const std::string sweep = scratch.write("sweep.yaml", kCase + "axes: {zero: [0, 1]}\n");
  const Output several = shardlab_program(scratch, "what-if " + sweep);
  CHECK(several.code == 2);
  CHECK(several.err.find("has 2 points") != std::string::npos);
  CHECK(shardlab_program(scratch, "what-if " + sweep + " --case zero=1 --free linear").code == 0);
}

TEST_CASE("what-if refuses words that name nothing, with those that do") {
  const Scratch scratch;
  const std::string file = scratch.write("case.yaml", kCase);
  const auto refused = [&](const std::string& words) {
    const Output o = shardlab_program(scratch, "what-if " + file + " " + words);
    INFO(words << o.err);
    REQUIRE(o.code == 2);
    return o.err;
  };
  CHECK(refused("--free al_reduce").find("did you mean `all_reduce`?") != std::string::npos);
  CHECK(refused("--free al_reduce").find("tensor-parallel") != std::string::npos);
  CHECK(refused("--speed-up linear").find("WHAT=TIMES") != std::string::npos);
  CHECK(refused("--speed-up linear=0").find("--speed-up linear=0 does not say what by which factor above 0") != std::string::npos);
  CHECK(refused("--hide launch").find("nothing to hide it behind") != std::string::npos);
  CHECK(refused("--set tp=3 --free linear").find("3") != std::string::npos);
}

TEST_CASE("trace summary: parts that add up to the step, rank by rank, from records or simulated") {
  const Scratch scratch;
  const std::string file = scratch.write("case.yaml", kCase + "pp: 2\n");
  REQUIRE(shardlab_program(scratch, "run " + file + " --mode simulate --traces all --out " + (scratch / "run")).code == 0);
  const Output simulated = shardlab_program(scratch, "trace summary " + file + " --format csv");
  INFO(simulated.err);
  REQUIRE(simulated.code == 0);
  const Output recorded = shardlab_program(scratch, "trace summary " + (scratch / "run/case") + " --format csv");
  INFO(recorded.err);
  REQUIRE(recorded.code == 0);
  CHECK(recorded.out == simulated.out);
  const Rows rows = parse_csv(recorded.out);
  REQUIRE(rows.size() == 1 + 8);
  for (size_t r = 1; r < rows.size(); ++r) {
    double sum = 0;
    for (const char* part : {"compute", "recompute", "update", "tensor", "context", "expert", "data", "pipeline", "communication",
                             "copies", "bubble", "wait", "launch", "unplanned"})
      sum += number(rows, r, fmt::format("{}_s", part));
    CHECK(sum == Approx(number(rows, r, "step_s")));
    double idle = 0;
    for (const char* cause : {"peer", "dependency", "host", "latency", "tail", "other"})
      idle += number(rows, r, fmt::format("idle_{}_s", cause));
    CHECK(idle == Approx(number(rows, r, "idle_s")));
    CHECK(number(rows, r, "comm_overlap") >= 0);
    CHECK(number(rows, r, "comm_overlap") <= 1);
  }
  const Output page = shardlab_program(scratch, "trace summary " + (scratch / "run/case"));
  CHECK(page.out.find("8 of 8 ranks, predicted, one step\n") == 0);
  CHECK(page.out.find("Why nothing ran") != std::string::npos);
}

TEST_CASE("trace convert: all ranks in one file, or a file each") {
  const Scratch scratch;
  const std::string file = scratch.write("case.yaml", kCase);
  const Output chrome = shardlab_program(scratch, "trace convert " + file + " --as chrome -o " + (scratch / "t.json"));
  INFO(chrome.err);
  REQUIRE(chrome.code == 0);
  // On one track of a viewer no two slices overlap.
  std::map<std::pair<int, int>, std::vector<std::pair<double, double>>> tracks;
  const nlohmann::json trace = nlohmann::json::parse(slurp(scratch / "t.json"));
  for (const auto& e : trace["traceEvents"])
    if (e["ph"] == "X") tracks[{e["pid"], e["tid"]}].emplace_back(e["ts"], e["ts"].get<double>() + e["dur"].get<double>());
  std::set<int> ranks;
  for (auto& [track, slices] : tracks) {
    ranks.insert(track.first);
    std::ranges::sort(slices);
    for (size_t i = 1; i < slices.size(); ++i)
      CHECK(std::llround(1000 * slices[i].first) >= std::llround(1000 * slices[i - 1].second));
  }
  CHECK(ranks == std::set<int>{0, 1, 2, 3});

  const Output kineto = shardlab_program(scratch, "trace convert " + file + " --as kineto -o " + (scratch / "k"));
  INFO(kineto.err);
  REQUIRE(kineto.code == 0);
  for (const int rank : {0, 1, 2, 3})
    CHECK(nlohmann::json::parse(slurp(fmt::format("{}/rank-{}.json", scratch / "k", rank)))["distributedInfo"]["rank"] == rank);
  const Output perfetto =
      shardlab_program(scratch, "trace convert " + file + " --as perfetto -o " + (scratch / "t.perfetto-trace"));
  INFO(perfetto.err);
  REQUIRE(perfetto.code == 0);
  CHECK(slurp(scratch / "t.perfetto-trace").find("rank 3") != std::string::npos);
  const Output memory = shardlab_program(scratch, "trace convert " + file + " --as memory -o " + (scratch / "m"));
  INFO(memory.err);
  REQUIRE(memory.code == 0);
  const Output chakra = shardlab_program(scratch, "trace convert " + file + " --as chakra -o " + (scratch / "c"));
  INFO(chakra.err);
  REQUIRE(chakra.code == 0);
  CHECK(nlohmann::json::parse(slurp(scratch / "c/comm-groups.json")).contains("1"));
  for (const int rank : {0, 1, 2, 3}) {
    CHECK(slurp(fmt::format("{}/rank-{}.pickle", scratch / "m", rank)).ends_with("u."));
    CHECK(slurp(fmt::format("{}/step.{}.et", scratch / "c", rank)).find("0.0.4") == 3);
  }
  const Output none = shardlab_program(scratch, "trace convert " + file + " --as nsys");
  CHECK(none.code == 2);
  CHECK(none.err.find("use chrome, perfetto, kineto, memory or chakra") != std::string::npos);
  CHECK(shardlab_program(scratch, "trace summary " + file + " --of measured").code == 2);
}

TEST_CASE("trace compare: a case beside profiles, which are its own here") {
  const Scratch scratch;
  const std::string file = scratch.write("case.yaml", kCase);
  REQUIRE(shardlab_program(scratch, "trace convert " + file + " --as kineto -o " + (scratch / "k")).code == 0);
  const Output same = shardlab_program(scratch, fmt::format("trace compare {} --with {} --with {} --format csv", file,
                                                            scratch / "k/rank-0.json", scratch / "k/rank-3.json"));
  INFO(same.err);
  REQUIRE(same.code == 0);
  std::istringstream lines(same.out);
  std::string line;
  std::getline(lines, line);
  CHECK(line == "rank,part,ours_s,profile_s,difference_pct");
  std::set<std::string> ranks, parts;
  while (std::getline(lines, line)) {
    std::istringstream cells(line);
    std::string rank, part, ours, profile;
    std::getline(cells, rank, ','), std::getline(cells, part, ','), std::getline(cells, ours, ','),
        std::getline(cells, profile, ',');
    ranks.insert(rank), parts.insert(part);
    // A file of that form has whole microseconds: each stretch of kernels is off by one at most.
    if (part != "step") CHECK(std::stod(ours) == Approx(std::stod(profile)).margin(10e-6));
  }
  CHECK(ranks == std::set<std::string>{"0", "3"});
  CHECK(parts.contains("compute"));
  CHECK(parts.contains("exposed communication"));
  const Output other = shardlab_program(scratch, "trace compare " + file + " --with " + file);
  CHECK(other.code == 2);
  CHECK(other.err.find("is no trace of PyTorch's profiler") != std::string::npos);
}

}  // namespace
}  // namespace shardlab::testing
