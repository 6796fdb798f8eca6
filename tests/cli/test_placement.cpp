// Experts placed by the rows of an earlier run: a run, its checkpoint and loads.txt, and the run that goes on with the experts placed by them.
#include <fmt/format.h>

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>
#include <numeric>
#include <sstream>

#include "cases/pipeline.h"
#include "plan/expert_placement.h"
#include "plan/routing.h"
#include "reports/table.h"
#include "tests/cli/program.h"
#include "tests/namespaces.h"
#include "tests/test.h"

namespace shardlab::testing {
namespace {

constexpr int64_t kSteps = 2, kTokens = 64, kTopK = 2;  ///< measured steps of a run, tokens of a step, experts of a token

std::string expert_case() {
  return "version: 1\nname: placed\nmode: measure\n"
         "model: {inline: {family: llama, layers: 3, hidden: 32, heads: 4, ffn: 64, vocab: 256, max_positions: 32, experts: 8, "
         "top_k: 2, moe_ffn: 16, dense_layers: 1}}\n"
         "machine: {local: true}\ndata: {text: text.txt}\n"
         "train: {seq_len: 16, micro_batch: 1, global_batch_tokens: 64}\nlayout: {dp: 2, ep: 2}\nexecution: {canonical: true}\n"
         "measure: {warmup: 1, steps: 2, repeat: 1, timeout: 1m}\n";
}

std::string local_machine() { return fmt::format(" --machine-file {}/tests/cli/local.yaml", source_dir()); }

/// Runs of the case in a folder of their own.
class Runs {
 public:
  Runs() {
    std::string text;
    for (int i = 0; i < 200; ++i) text += fmt::format("line {} of a text that a small model can learn from\n", i % 17);
    scratch_.write("text.txt", text);
    sweep_ = scratch_.write("sweep.yaml", expert_case());
  }
  Output program(const std::string& arguments) const { return shardlab_program(scratch_, arguments); }
  /// The run's row; `name` is its folder.
  Rows run(const std::string& name, const std::string& flags, int code = 0) const {
    const Output output = program("run " + sweep_ + local_machine() + " --out " + (scratch_ / name) + flags);
    INFO(output.err);
    REQUIRE(output.code == code);
    return parse_csv(slurp(scratch_ / (name + "/results.csv")));
  }
  CaseFiles files(const std::string& name, const Rows& rows) const {
    return CaseFiles{(scratch_ / name) + "/" + cell(rows, 1, "case_id")};
  }
  /// Rows of the experts in all measured steps, by layer.
  static std::vector<ExpertRows> loads(const CaseFiles& of) {
    const auto read = parse_routes(slurp(of.loads()), of.loads());
    INFO((read.ok() ? "" : to_string(read.error())));
    REQUIRE(read.ok());
    return *read;
  }

 private:
  Scratch scratch_;
  std::string sweep_;
};

/// The placement by the loads of a run whose experts lie by `present`, as a case lists it.
std::string placed_by(const std::vector<ExpertRows>& loads, std::span<const ExpertPlacement> present) {
  std::vector<ExpertPlacement> placements;
  for (const ExpertRows& layer : loads) {
    const std::vector<double> rows(layer.by_expert.begin(), layer.by_expert.end());
    if (auto p = placement_after(layer.layer, rows, 2, placement_of(present, layer.layer))) placements.push_back(std::move(*p));
  }
  return print_placements(placements);
}

/// The lines of a plan that place experts.
std::string placement_lines(const std::string& plan) {
  std::string lines;
  std::istringstream text(plan);
  for (std::string line; std::getline(text, line);)
    if (line.starts_with("expert_placement ")) lines += line + "\n";
  return lines;
}

}  // namespace

TEST_CASE("a resumed run places its experts by the rows that they had, evens its ranks, and has every bit of contiguous experts") {
  const Runs runs;
  const Rows first = runs.run("first", " --set checkpoint.save_every=3");
  const CaseFiles before = runs.files("first", first);
  const std::vector<ExpertRows> loads = Runs::loads(before);
  REQUIRE(loads.size() == 2);
  for (const ExpertRows& layer : loads)
    CHECK(std::accumulate(layer.by_expert.begin(), layer.by_expert.end(), int64_t{0}) == kSteps * kTokens * kTopK);
  CHECK(cell(first, 1, "expert_rank_imbalance_contiguous").empty());

  const std::string resume = " --set checkpoint.resume=" + before.checkpoints(), measured = " --set expert_placement=measured";
  const Rows plain = runs.run("plain", resume), placed = runs.run("placed", resume + measured + " --set checkpoint.save_every=3");
  const std::string listed = placed_by(loads, {});
  REQUIRE_FALSE(listed.empty());
  const CaseFiles after = runs.files("placed", placed);
  CHECK(slurp(after.config()).find(listed) != std::string::npos);

  // Before and after, of the same rows.
  CHECK(std::stod(cell(placed, 1, "expert_rank_imbalance")) < std::stod(cell(plain, 1, "expert_rank_imbalance")));
  CHECK(cell(placed, 1, "expert_rank_imbalance_contiguous") == cell(plain, 1, "expert_rank_imbalance"));
  CHECK(cell(plain, 1, "expert_rank_imbalance_contiguous").empty());
  for (const char* column : {"loss_first", "loss_last", "expert_imbalance", "expert_imbalance_last"}) {
    INFO(column);
    CHECK(cell(placed, 1, column) == cell(plain, 1, column));
  }
  CHECK(slurp(after.loads()) == slurp(runs.files("plain", plain).loads()));
  const Output explained = runs.program("explain " + after.directory);
  CHECK(explained.out.find("contiguous experts would have given it ") != std::string::npos);

  // Other verbs read the run too, and list the same experts.
  const Output plan = runs.program("plan " + before.config() + local_machine() + resume + measured);
  INFO(plan.err);
  CHECK_FALSE(placement_lines(plan.out).empty());
  CHECK(placement_lines(plan.out) == placement_lines(slurp(after.plan())));

  // A run that goes on from this one begins at its placement.
  const Rows third = runs.run("third", " --set checkpoint.resume=" + after.checkpoints() + measured);
  const std::string next = placed_by(Runs::loads(after), *read_placements(listed));
  REQUIRE_FALSE(next.empty());
  CHECK(slurp(runs.files("third", third).config()).find(next) != std::string::npos);
}

TEST_CASE("experts are placed by no rows that are missing, of another model, or of a plan that nobody knows") {
  const std::string kEnd =
      " [E108]; resume from the checkpoints in the case folder of a run that was measured on processors, or set data.routes to its "
      "loads.txt and expert_placement: balanced";
  const Runs runs;
  const Rows first = runs.run("first", " --set checkpoint.save_every=3");
  const CaseFiles before = runs.files("first", first);
  const std::string resume = " --set expert_placement=measured --set checkpoint.resume=" + before.checkpoints();
  const auto refused = [&](const std::string& name, const std::string& more) {
    const Rows rows = runs.run(name, resume + more, 3);
    CHECK(cell(rows, 1, "code") == "E108");
    return cell(rows, 1, "reason");
  };
  CHECK(refused("other", " --set model.experts=4") ==
        "expert_placement=measured: " + before.loads() + ": layer 1 has 8 experts, and the model has 4" + kEnd);
  const std::string plan = slurp(before.plan());
  fs::remove(before.plan());
  CHECK(refused("planless", "") == "expert_placement=measured: " + before.plan() + " is no plan that has run" + kEnd);
  std::ofstream(before.plan()) << plan;
  fs::remove(before.loads());
  CHECK(refused("rowless", "") == "expert_placement=measured: " + before.loads() + ": there is no such file" + kEnd);
  const Output unresumed = runs.program("plan " + before.config() + local_machine() + " --set expert_placement=measured");
  CHECK(unresumed.code == 2);
  CHECK(unresumed.err.ends_with("more: shardlab explain E108\n"));
}

TEST_CASE("loads of experts of a capacity say all rows that were chosen, those without room too") {
  const Runs runs;
  const Rows rows = runs.run("tight", " --set model.capacity_factor=1");
  REQUIRE(std::stod(cell(rows, 1, "expert_dropped")) > 0);
  const std::vector<ExpertRows> loads = Runs::loads(runs.files("tight", rows));
  for (const ExpertRows& layer : loads) CHECK(drops_of({&layer, 1}).chosen == kSteps * kTokens * kTopK);
  const Drops all = drops_of(loads);
  CHECK(std::stod(cell(rows, 1, "expert_dropped")) == Approx(static_cast<double>(all.dropped) / static_cast<double>(all.chosen)));
}

TEST_CASE("estimates and searches balance experts for each ep, under every profile, and refuse by name what they cannot place") {
  const Scratch scratch;
  const auto memory = [&](const std::string& flags) {
    return shardlab_program(scratch, "memory --model qwen3-30b-a3b --machine hgx-h100-ndr --dp 8 --seq-len 4096 " + flags);
  };
  for (const std::string profile : {"--profile megatron ", "--profile shardlab --precision fp32 "}) {
    const std::string zipf = profile + "--set data.routing=zipf:0.5 ";
    const auto json = [&](const std::string& flags) {
      const Output output = memory(zipf + flags + "--format json");
      INFO(output.err);
      REQUIRE((output.code == 0 || output.code == 3));
      return nlohmann::json::parse(output.out);
    };
    for (const char* ep : {"--ep 8 ", "--ep 4 "}) {
      const auto plain = json(ep), balanced = json(std::string(ep) + "--expert-placement balanced ");
      CHECK_FALSE(plain.contains("expert_rank_imbalance_contiguous"));
      CHECK(balanced["expert_rank_imbalance_contiguous"] == plain["expert_rank_imbalance"]);
      CHECK(balanced["expert_rank_imbalance"] < plain["expert_rank_imbalance"]);
    }
    CHECK(json("--ep 8 --expert-placement balanced ")["predicted_step_s"] < json("--ep 8 ")["predicted_step_s"]);
    const auto refused = [&](const std::string& flags, const std::string& says) {
      const Output output = memory(flags);
      INFO(output.err);
      CHECK(output.code == 2);
      CHECK(output.err.find(says) != std::string::npos);
    };
    refused(zipf + "--ep 8 --expert-placement measured", "explain E108");
    refused(zipf + "--ep 8 --expert-placement first", "expert_placement=first: no experts by place");
    refused(zipf + "--ep 8 --expert-placement 1:0", "expert_placement of layer 1: 1 places for 128 experts");
    refused(zipf + "--expert-placement balanced", "expert_placement=balanced with ep=1: every rank has all experts");
    refused(profile + "--ep 8 --expert-placement balanced", "all experts are expected to have as many rows");
  }
  const auto search = [&](const std::string& flags) {
    const Output output = shardlab_program(scratch,
                                           "search --machine hgx-h100-ndr --devices 8 --global-batch-tokens 65536 --top 1 "
                                           "--set layout.expert_placement=balanced " +
                                               flags);
    CHECK(output.code == 2);
    return output.err;
  };
  CHECK(search("--model qwen3-30b-a3b").find("all experts are expected to have as many rows") != std::string::npos);
  CHECK(search("--model llama-3.1-8b --set data.routing=zipf:1").find("of a model without experts") != std::string::npos);
}

}  // namespace shardlab::testing
