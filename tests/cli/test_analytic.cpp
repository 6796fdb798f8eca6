// Sweeps at the analytic resolution: many points, other frameworks, the same bytes as the plans.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "cases/analytic_case.h"
#include "plan/keys.h"
#include "reports/table.h"
#include "simulator/estimator/analytic/analytic.h"
#include "sweeps/resolution.h"
#include "sweeps/sweep.h"
#include "tests/cli/program.h"
#include "tests/namespaces.h"
#include "tests/reports/page.h"
#include "tests/test.h"

namespace shardlab::testing {
namespace {

using testing::Output;
using testing::Scratch;
using testing::shardlab_program;
using testing::slurp;
namespace fs = std::filesystem;

using Row = std::map<std::string, std::string>;

/// Rows of results.csv by name.
std::map<std::string, Row> rows_of(const std::string& directory) {
  const auto table = parse_csv(slurp(directory + "/results.csv"));
  std::map<std::string, Row> rows;
  for (size_t r = 1; r < table.size(); ++r) {
    Row row;
    for (size_t c = 0; c < table[0].size(); ++c) row[table[0][c]] = table[r][c];
    rows[row["name"]] = row;
  }
  return rows;
}

/// Texts of which each key of layout and train takes some, beside its default.
std::vector<std::string> values_for(const CaseKey& key) {
  std::vector<std::string> values{"1", "2", "4", "0.5", "true", "false", "[mlp.act]", "2*full 2*none"};
  for (const std::string& word : words_of(key)) values.push_back(word);
  const MapForm map = map_form(key);
  for (const std::string& part : map.parts)
    for (const std::string& word : map.words) values.push_back(fmt::format("{{{}: {}}}", part, word));
  return values;
}

/// Whether a message names a key: by a word of its path.
bool names(const std::string& message, std::string_view path) {
  std::string word;
  for (const char c : std::string(path.substr(path.find('.') + 1)) + ".") {
    if (c != '.' && c != '_') {
      word += c;
      continue;
    }
    if (word.size() > 3 && message.find(word) != std::string::npos) return true;
    word.clear();
  }
  return false;
}

TEST_CASE("the analytic estimate takes over each key of layout and train, or refuses it by its name") {
  int taken = 0, refused = 0;
  for (const CaseKey& key : case_keys()) {
    if (key.get == nullptr || !(key.path.starts_with("layout.") || key.path.starts_with("train."))) continue;
    INFO(key.path);
    int tried = 0;
    for (const std::string& value : values_for(key)) {
      Case c;
      if (!has_form(key, value) || !key.set(c, value) || key.get(c) == key.get(Case())) continue;
      ++tried;
      const auto point = analytic::point_of(c);
      ++(point.ok() ? taken : refused);
      if (point.ok()) continue;
      INFO(value << ": " << point.error().message);
      CHECK(names(point.error().message, key.path));
      CHECK_FALSE(point.error().hint.empty());
    }
    CHECK(tried > 0);
  }
  CHECK(taken > 80);
  CHECK(refused > 10);
  // What only shardlab's executor has is not passed over under another's profile.
  for (const auto& [set, word] : std::vector<std::pair<void (*)(Case&), std::string>>{
           {[](Case& c) { c.canonical = true; }, "canonical"},
           {[](Case& c) { c.train.guard.nonfinite = GuardAction::kStop; }, "guard"}}) {
    Case c;
    set(c);
    CHECK(analytic::point_of(c).ok());
    c.profile = "megatron";
    CHECK(analytic::point_of(c).error().message == word + " is not estimated by the profile megatron");
  }
}

TEST_CASE("a sweep of another framework is predicted by closed forms, with no plan and no folder a case") {
  const Scratch scratch;
  const std::string sweep =
      scratch.write("many.yaml",
                    "version: 1\nname: many\nresolution: analytic\nmode: simulate\nprofile: megatron\n"
                    "model: llama-3.1-8b\nmachine: {preset: hgx-h100-ndr, nodes: 8}\n"
                    "train: {seq_len: 4096, global_batch_tokens: 4Mi, precision: bf16}\n"
                    "axes:\n  tp: [1, 2, 4, 8, 64]\n  pp: [1, 2, 4]\n  zero: [0, 1, 3]\n  micro_batch: [1, 2, 4]\n"
                    "  recompute: [none, selective, full]\n  sequence_parallel: [false, true]\n");
  const Output o = shardlab_program(scratch, "run " + sweep + " --out " + (scratch / "run"));
  INFO(o.err);
  REQUIRE(o.code == 0);
  const auto rows = rows_of(scratch / "run");
  CHECK(rows.size() == 810);
  std::map<std::string, int> statuses;
  for (const auto& [name, row] : rows) {
    ++statuses[row.at("status")];
    INFO(name);
    if (row.at("status") == "refused") {
      CHECK(!row.at("reason").empty());
      continue;
    }
    CHECK(std::stod(row.at("predicted_step_s")) > 0);
    CHECK(std::stod(row.at("predicted_compute_s")) < std::stod(row.at("predicted_step_s")));
    CHECK(std::stoll(row.at("predicted_peak_bytes")) > 0);
    CHECK(std::stoll(row.at("predicted_wire_bytes")) > 0);
    CHECK(std::stod(row.at("predicted_mfu")) < 1);
  }
  CHECK(statuses["ok"] > 100);
  CHECK(statuses["oom"] > 10);
  CHECK(statuses["refused"] > 100);  // 32 heads are not cut by 64
  CHECK(rows.at("tp=64 pp=1 zero=0 micro_batch=1 recompute=none sequence_parallel=false").at("reason").find("tp 64") !=
        std::string::npos);
  for (const auto& entry : fs::directory_iterator(scratch / "run")) CHECK(!entry.is_directory());
}

TEST_CASE("cases that differ in numbers without a price share one study, and no more studies are remembered than are said") {
  const Scratch scratch;
  const auto asked = [&](const std::string& axis) {
    const auto sweep = sweeps::load_sweep(
        scratch.write("sweep.yaml",
                      "model: tiny-gpt\nmachine: hgx-h100-ndr\nprofile: megatron\ntrain: {seq_len: 64, global_batch_tokens: 4096}\n"
                      "axes: {" +
                          axis + "}\n"));
    REQUIRE(sweep.ok());
    const auto expansion = sweeps::expand(*sweep, Resolution::kAnalytic);
    REQUIRE(expansion.ok());
    AnalyticCaseRunner runner;
    for (const sweeps::Point& point : expansion->points) CHECK(runner.run(point, Mode::kSimulate).status == Status::kOk);
    CHECK(expansion->points.size() == 100);
    return runner.studies();
  };
  CHECK(asked("seed: {range: [1, 100]}") == 1);
  CHECK(asked("model.layers: {range: [1, 100]}") == AnalyticCaseRunner::kMostStudies);
}

TEST_CASE("where shardlab runs the layout both resolutions say the same bytes") {
  const Scratch scratch;
  const std::string sweep = scratch.write("both.yaml",
                                          "version: 1\nname: both\nmodel: tiny-llama\nmachine: {preset: hgx-h100-ndr, nodes: 1}\n"
                                          "train: {seq_len: 128, global_batch_tokens: 8Ki}\naxes:\n  tp: [1, 2]\n  pp: [1, 2]\n  "
                                          "zero: [0, 1, 2, 3]\n  recompute: [none, full]\n");
  REQUIRE(shardlab_program(scratch, "run " + sweep + " --resolution timeline --out " + (scratch / "timeline")).code == 0);
  REQUIRE(shardlab_program(scratch, "run " + sweep + " --resolution analytic --out " + (scratch / "analytic")).code == 0);
  const auto timeline = rows_of(scratch / "timeline"), analytic = rows_of(scratch / "analytic");
  REQUIRE(timeline.size() == 32);
  REQUIRE(analytic.size() == 32);
  for (const auto& [name, row] : timeline) {
    INFO(name);
    CHECK(row.at("case_id") == analytic.at(name).at("case_id"));
    CHECK(row.at("predicted_peak_bytes") == analytic.at(name).at("predicted_peak_bytes"));
    CHECK(row.at("predicted_wire_bytes") == analytic.at(name).at("predicted_wire_bytes"));
  }
  CHECK(timeline.begin()->second.at("program_version") != analytic.begin()->second.at("program_version"));
}

TEST_CASE("what the analytic resolution cannot do is said before anything runs") {
  const Scratch scratch;
  const std::string sweep = scratch.write("s.yaml", "model: tiny-llama\nmachine: hgx-h100-ndr\n");
  const Output measure = shardlab_program(scratch, "run " + sweep + " --mode measure --resolution analytic");
  CHECK(measure.code == 2);
  CHECK(measure.err.find("`mode` is `measure`, but the machine hgx-h100-ndr is not this machine") != std::string::npos);
  const Output unknown = shardlab_program(scratch, "run " + sweep + " --resolution exact");
  CHECK(unknown.code == 2);
  CHECK(unknown.err.find("timeline, segments or analytic") != std::string::npos);
  const std::string bad = scratch.write("bad.yaml", "model: tiny-llama\nmachine: hgx-h100-ndr\nresolution: closed\n");
  const Output file = shardlab_program(scratch, "run " + bad);
  CHECK(file.code == 2);
  CHECK(file.err.find("bad.yaml:3:") != std::string::npos);
  CHECK(file.err.find("timeline segments analytic") != std::string::npos);
}

TEST_CASE("an expression that cannot be evaluated at some point ends an analytic sweep before it begins") {
  const Scratch scratch;
  const std::string head = "name: s\nresolution: analytic\nmodel: gpt2\nmachine: hgx-h100-ndr\naxes: {tp: [1, 2, 4]}\n";
  for (const std::string& rule : {std::string("constraints: [{expr: \"8 / (tp - 4) < 9\"}]\n"),
                                  std::string("when: [{if: \"8 / (tp - 4) < 9\", set: {micro_batch: 2}}]\n")}) {
    INFO(rule);
    const Output o = shardlab_program(scratch, "run " + scratch.write("s.yaml", head + rule) + " --out " + (scratch / "run"));
    CHECK(o.code == 2);
    CHECK(o.err.find("division by zero") != std::string::npos);
    CHECK_FALSE(std::filesystem::exists(scratch / "run"));
  }
}

TEST_CASE("an analytic sweep goes on where it ended") {
  const Scratch scratch;
  const std::string sweep = scratch.write(
      "s.yaml", "name: s\nresolution: analytic\nmodel: gpt2\nmachine: hgx-h100-ndr\naxes: {micro_batch: [1, 2, 4]}\n");
  REQUIRE(shardlab_program(scratch, "run " + sweep + " --out " + (scratch / "run")).code == 0);
  const std::string first = slurp(scratch / "run/results.csv");
  REQUIRE(shardlab_program(scratch, "run " + sweep + " --resume --out " + (scratch / "run")).code == 0);
  CHECK(slurp(scratch / "run/results.csv") == first);
}

TEST_CASE("halving and the goal find the fastest point of the whole grid, with fewer simulations") {
  const Scratch scratch;
  const std::string grid =
      "name: s\nmodel: gpt2\nmachine: {preset: hgx-h100-ndr, nodes: 1}\ntrain: {seq_len: 512, global_batch_tokens: 64Ki}\n"
      "axes: {tp: [1, 2, 4], pp: [1, 2], micro_batch: [1, 2, 4]}\n";
  const auto run = [&](const std::string& name, const std::string& search) {
    const std::string sweep = scratch.write(name + ".yaml", grid + search);
    const Output o = shardlab_program(scratch, "run " + sweep + " --mode simulate --out " + (scratch / name));
    REQUIRE(o.code == 0);
    int64_t simulated = 0;
    std::string best;
    double least = 0;
    for (const auto& [point, row] : rows_of(scratch / name)) {
      if (row.at("status") != "ok") continue;
      const double step = std::stod(row.at("predicted_step_s"));
      simulated += row.at("program_version").find("analytic") == std::string::npos ? 1 : 0;
      if (best.empty() || step < least) best = point, least = step;
    }
    // The table tells estimates and simulations apart where it has both, and the fastest is one that was simulated.
    CHECK((o.out.find("predicted by") != std::string::npos) == !search.empty());
    if (!search.empty()) {
      CHECK(joined(o.out).find(" timeline ") != std::string::npos);
      CHECK(joined(o.out).find(" analytic ") != std::string::npos);
      CHECK(o.out.find("Fastest: " + best) != std::string::npos);
    }
    return std::tuple(best, simulated, o.err);
  };
  const auto [whole, all, quiet] = run("whole", "");
  const auto [halved, half, said] = run("halved", "search: {kind: halving, keep: 0.25}\n");
  CHECK(halved == whole);
  CHECK(half == static_cast<int64_t>(std::ceil(0.25 * static_cast<double>(all))));
  CHECK(said.find(fmt::format("search halving: {} of {} points went on", half, all)) != std::string::npos);
  const auto [reached, few, why] = run("goal", "search: {kind: goal, margin: 0.02}\n");
  CHECK(reached == whole);
  CHECK(few < all);
  CHECK(why.find("search goal: the best of") != std::string::npos);
  CHECK(why.find("its estimate less 2 %") != std::string::npos);
}

TEST_CASE("a search that estimates first needs a calibrated machine") {
  const Scratch scratch;
  const std::string sweep =
      scratch.write("s.yaml",
                    "name: s\nmode: measure\nmodel: tiny-gpt\nmachine: {local: true}\ndata: {text: s.yaml}\n"
                    "train: {seq_len: 16, global_batch_tokens: 64, micro_batch: 1}\naxes: {dp: [1, 2]}\nsearch: goal\n");
  const Output o =
      shardlab_program(scratch, "run " + sweep + " --out " + (scratch / "none"), fmt::format("cd {0} && HOME={0}", scratch / "."));
  CHECK(o.code == 2);
  CHECK(o.err.find("not calibrated, and search goal, which estimates first, needs its speed") != std::string::npos);
}

TEST_CASE("a page of a framework's estimates says how far each step can be trusted, as memory does") {
  const Scratch scratch;
  const auto page = [&](const std::string& name, const std::string& profile) {
    const std::string sweep =
        scratch.write(name + ".yaml", "version: 1\nname: few\nresolution: analytic\nmode: simulate\nprofile: " + profile +
                                          "\nmodel: llama-3.1-8b\nmachine: {preset: hgx-h100-ndr, nodes: 1}\n"
                                          "train: {seq_len: 4096, micro_batch: 1, grad_accumulation: 4, precision: bf16}\n"
                                          "layout: {zero: 1}\naxes:\n  tp: [1, 8, 16]\n");
    REQUIRE(shardlab_program(scratch, "run " + sweep + " --out " + (scratch / name)).code == 0);
    const Output o = shardlab_program(scratch, fmt::format("report {0} --html {0}/r.html", scratch / name));
    INFO(o.err);
    REQUIRE(o.code == 0);
    return nlohmann::json::parse(data_of(slurp(scratch / (name + "/r.html"))));
  };
  const auto data = page("megatron", "megatron");
  const auto low = column_of(data, "step_low_s"), high = column_of(data, "step_high_s"), status = column_of(data, "status");
  REQUIRE(low.size() == 3);
  for (size_t i = 0; i < 3; ++i) {
    CHECK(low[i].is_null() == (status[i] != "ok"));
    CHECK(high[i].is_null() == low[i].is_null());
  }
  const Output memory = shardlab_program(
      scratch,
      "memory --format json --profile megatron --model llama-3.1-8b --machine hgx-h100-ndr --devices 8 --tp 8 --zero 1 "
      "--seq-len 4096 --micro-batch 1 --grad-accumulation 4 --precision bf16");
  INFO(memory.out << memory.err);
  REQUIRE(memory.code == 0);
  const auto told = nlohmann::json::parse(memory.out);
  const auto tp = column_of(data, "tp");
  const auto eight = static_cast<size_t>(std::ranges::find(tp, nlohmann::json(8)) - tp.begin());
  REQUIRE(eight < 3);
  REQUIRE(status[eight] == "ok");
  CHECK(std::abs(low[eight].get<double>() / told["interval"]["step_s"]["low"].get<double>() - 1) < 1e-9);
  CHECK(std::abs(high[eight].get<double>() / told["interval"]["step_s"]["high"].get<double>() - 1) < 1e-9);
  // The step of shardlab's own executor is that of its plan.
  CHECK(column_of(page("own", "shardlab"), "step_low_s").empty());
}

}  // namespace
}  // namespace shardlab::testing
