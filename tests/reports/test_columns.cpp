#include <algorithm>
#include <set>
#include <sstream>

#include "plan/base/error_entries.h"
#include "plan/reasons.h"
#include "reports/columns.h"
#include "reports/nanotron.h"
#include "reports/summary.h"
#include "tests/namespaces.h"
#include "tests/reports/sample.h"
#include "tests/test.h"

using namespace shardlab;
using namespace shardlab::testing;

namespace {

// The contract of ARCHITECTURE.md, section 3, word for word.
constexpr const char* kContract =
    "case_id name status reason model parameters machine backend transport world_size "
    "dp tp pp vpp cp ep zero schedule sequence_parallel recompute offload precision "
    "micro_batch grad_accumulation seq_len global_batch_tokens "
    "predicted_step_s measured_step_s step_error_pct predicted_tokens_per_s measured_tokens_per_s "
    "predicted_mfu measured_mfu predicted_peak_bytes measured_peak_bytes predicted_wire_bytes measured_wire_bytes "
    "predicted_compute_s measured_compute_s predicted_exposed_comm_s measured_exposed_comm_s "
    "predicted_bubble_fraction measured_bubble_fraction unplanned_time_s unplanned_memory_bytes "
    "loss_first loss_last energy_j";

Value cell(const CaseOutcome& o, std::string_view name) { return find_column(name)->get(o); }

}  // namespace

TEST_CASE("the first columns are the contract's, in its order") {
  std::istringstream words(kContract);
  std::string word;
  size_t i = 0;
  for (; words >> word; ++i) CHECK(case_columns()[i].name == word);
  CHECK(i == 48);
}

TEST_CASE("a reason of a kind that has a code carries it, and its column says the code that explain takes") {
  CaseOutcome o = sweep_outcomes().front();
  o.status = Status::kRefused;
  for (const ErrorEntry& entry : error_entries()) {
    o.reason = reason_of({ExitCode::kUsage, "tp=[E9] is 3", "see [E0]", "s.yaml:1:2", entry.kind});
    CHECK(cell(o, "code") == Value(std::string(entry.code)));
    CHECK(entry_named(std::get<std::string>(cell(o, "code"))).ok());
  }
  o.reason = reason_of({ExitCode::kUsage, "tp is 3", "use 2", "", ErrorKind::kPlain});
  CHECK(cell(o, "code") == Value());
  o.reason = "tp [E999]";  // no code
  CHECK(cell(o, "code") == Value());
  o.status = Status::kOom;
  CHECK(cell(o, "code") == Value("E106"));
}

TEST_CASE("every column is one word, has a help text, and occurs once") {
  std::set<std::string_view> seen;
  for (const CaseColumn& c : case_columns()) {
    CHECK(std::all_of(c.name.begin(), c.name.end(), [](char x) { return (x >= 'a' && x <= 'z') || x == '_'; }));
    CHECK_FALSE(c.help.empty());
    CHECK(seen.insert(c.name).second);
  }
  for (const char* further : {"step_spread",      "repeats",        "samples",      "val_loss",         "seed",
                              "program_version",  "calibration_id", "bucket_bytes", "overlap",          "collective_algorithm",
                              "optimizer",        "dropout",        "canonical",    "threads_per_rank", "loss_unigram",
                              "extrapolated",     "kernel_variant", "fsdp",         "hybrid_shard",     "zero_plus_plus",
                              "parameter_server", "compression",    "diloco",       "delayed_update",   "reduce_dtype",
                              "accumulate_dtype", "clip_norm",      "cp_kind"})
    CHECK(find_column(further) != nullptr);
  CHECK(find_column("no_such") == nullptr);
}

TEST_CASE("figures that follow from others") {
  const CaseOutcome o = small_outcome();
  CHECK(std::get<double>(cell(o, "predicted_tokens_per_s")) == 4096 / 0.09);
  CHECK(std::get<double>(cell(o, "measured_tokens_per_s")) == 4096 / 0.1);
  CHECK(std::get<double>(cell(o, "step_error_pct")) == Approx(-10).epsilon(1e-12));
  CHECK(std::get<double>(cell(o, "loss_first")) == 5.5);
  CHECK(std::get<double>(cell(o, "loss_last")) == 2.75);
  // One rank on a machine of 250 Gflop/s a core: flops of a token * tokens/s / 250e9.
  CHECK(std::get<double>(cell(o, "measured_mfu")) == model_flops_per_token(o.config.model, 128) * (4096 / 0.1) / 250e9);
}

TEST_CASE("ranks that share cores share their peak; a data-sheet machine has one device a rank") {
  Case c = small_outcome().config;
  c.layout.dp = 8;
  CHECK(peak_flops(c) == 2 * 250e9);
  c.machine.local = false;
  CHECK(peak_flops(c) == 8 * 250e9);
  c.train.precision = Precision::kFp8;
  CHECK_FALSE(peak_flops(c));
}

TEST_CASE("time to a loss: the first step whose window of losses has a mean at or below the target") {
  CaseOutcome o = small_outcome();
  o.measured->losses = {5, 4, 3, 1, 3, 1, 1};
  CHECK(cell(o, "steps_to_loss").index() == 0);  // nothing was asked for
  CHECK(cell(o, "target_loss").index() == 0);
  o.loss_target.loss = 2;
  o.loss_target.mean_of = 2;
  CHECK(std::get<double>(cell(o, "target_loss")) == 2);
  CHECK(std::get<int64_t>(cell(o, "steps_to_loss")) == 4);  // (3 + 1) / 2
  CHECK(std::get<int64_t>(cell(o, "tokens_to_loss")) == 4 * 4096);
  CHECK(std::get<double>(cell(o, "measured_s_to_loss")) == 4 * 0.1);
  CHECK(std::get<double>(cell(o, "predicted_s_to_loss")) == 4 * 0.09);
  o.loss_target.mean_of = 1;
  CHECK(std::get<int64_t>(cell(o, "steps_to_loss")) == 4);
  o.loss_target.mean_of = 3;
  CHECK(std::get<int64_t>(cell(o, "steps_to_loss")) == 6);  // (1 + 3 + 1) / 3
  o.loss_target.loss = 1.5;
  CHECK(cell(o, "steps_to_loss").index() == 0);  // never so low
  CHECK(cell(o, "measured_s_to_loss").index() == 0);
  o.loss_target.mean_of = 8;
  CHECK(cell(o, "tokens_to_loss").index() == 0);  // fewer losses than a window
}

TEST_CASE("what does not apply is empty") {
  CaseOutcome o = small_outcome();
  o.measured.reset();
  o.status = Status::kRefused;
  for (const char* name :
       {"measured_step_s", "step_error_pct", "measured_mfu", "loss_first", "energy_j", "val_loss", "kernel_variant"})
    CHECK(cell(o, name).index() == 0);
  CHECK(std::get<double>(cell(o, "predicted_step_s")) == 0.09);
  o = small_outcome();
  o.measured->losses.clear();
  CHECK(cell(o, "loss_last").index() == 0);
}

TEST_CASE("what a case shards, and how, is in its row") {
  CaseOutcome o = small_outcome();
  CHECK(std::get<std::string>(cell(o, "fsdp")) == "none");
  CHECK(std::get<std::string>(cell(o, "hybrid_shard")) == "none");
  o.config.layout.zero = 3;
  o.config.layout.fsdp = {.unit = 2, .prefetch = 0, .reshard = false};
  o.config.layout.hybrid_shard = 4;
  CHECK(std::get<std::string>(cell(o, "fsdp")) == "unit=2 prefetch=0 reshard=false");
  CHECK(std::get<int64_t>(cell(o, "hybrid_shard")) == 4);
}

TEST_CASE("results.csv of the sample sweep") { REQUIRE_GOLDEN("reports/results.csv", print_csv(case_table(sweep_outcomes()))); }

TEST_CASE("the console summary of the sample sweep at 160 columns") {
  REQUIRE_GOLDEN("reports/summary.txt", print_aligned(case_table(sweep_outcomes(), summary_columns()), 160));
}

TEST_CASE("layouts in words") {
  Case c = small_outcome().config;
  CHECK(layout_text(c) == "1 rank");
  c.layout.dp = 2;
  c.layout.pp = 2;
  c.layout.zero = 1;
  c.layout.schedule = Schedule::k1F1B;
  c.layout.recompute = Recompute::kFull;
  CHECK(layout_text(c) == "dp2 pp2 zero1 1f1b recompute-full");
  Case described = c;
  described.machine.local = false;
  CHECK(layout_text(described) == "dp2 pp2 zero1 1f1b recompute-full fp32");
  CHECK(case_title(c) == "one (dp2 pp2 zero1 1f1b recompute-full)");
  c.name = "dp2-pp2-zero1-1f1b-recompute-full";
  CHECK(case_title(c) == c.name);
}

TEST_CASE("nanotron's columns have its names and order, and the figures of the case") {
  const std::vector<CaseOutcome> cases = sweep_outcomes();
  const auto csv = parse_csv(print_csv(nanotron_table(cases)));
  REQUIRE(csv.size() == cases.size() + 1);
  const std::vector<std::string> first{"job_id",  "name",    "nodes",     "seq_len",        "mbs",          "batch_accum", "gbs",
                                       "mTFLOPs", "hTFLOPs", "tok/s/gpu", "Mem Alloc (GB)", "Mem Res (GB)", "dp",          "pp",
                                       "tp",      "cp",      "ep"};
  REQUIRE(csv[0].size() == 35);
  CHECK(std::equal(first.begin(), first.end(), csv[0].begin()));
  CHECK(csv[0].back() == "Local Params");
  const auto at = [&](size_t row, std::string_view name) {
    return csv[row + 1][static_cast<size_t>(std::ranges::find(csv[0], name) - csv[0].begin())];
  };
  for (size_t i = 0; i < cases.size(); ++i) {
    const Case& c = cases[i].config;
    CHECK(at(i, "dp") == std::to_string(c.layout.dp));
    CHECK(at(i, "batch_accum") == std::to_string(c.train.grad_accumulation));
    CHECK(std::stoll(at(i, "gbs")) * c.train.seq_len == c.train.global_batch_tokens);
    CHECK(at(i, "tie_word_embeddings") == (c.model.tied_embeddings ? "True" : "False"));
    if (cases[i].status != Status::kOk) {
      CHECK(at(i, "tok/s/gpu").empty());
      continue;
    }
    const double step = cases[i].measured ? cases[i].measured->step_s : cases[i].predicted->step_s;
    CHECK(std::stod(at(i, "tok/s/gpu")) * c.layout.world_size() * step == Approx(static_cast<double>(c.train.global_batch_tokens)));
  }
}

TEST_CASE("a schedule from a file is called by it, in the layout and in its column") {
  CaseOutcome o = sweep_outcomes().front();
  o.config.layout.pp = 2, o.config.layout.schedule = Schedule::kTable;
  o.config.layout.schedule_table = "mine.csv\n0F0,0B0\n1F0,1B0\n";
  CHECK(cell(o, "schedule") == Value(std::string("mine.csv")));
  CHECK(layout_text(o.config).find(" mine.csv") != std::string::npos);
  o.config.layout.schedule_table = "0F0,0B0\n1F0,1B0\n";
  CHECK(cell(o, "schedule") == Value(std::string("table")));
}

TEST_CASE("what predicted a case is told by the version that its result has, and the finest prediction answers") {
  std::vector<CaseOutcome> cases(3, sweep_outcomes().front());
  for (CaseOutcome& o : cases) o.status = Status::kOk, o.measured.reset(), o.predicted.emplace(), o.program_version = "1.0 abc";
  CHECK(predicted_by(cases[0]) == "timeline");
  CHECK_FALSE(mixes_predictions(cases));
  cases[1].program_version = "1.0 abc analytic", cases[2].program_version = "1.0 abc segments";
  CHECK(cell(cases[1], "predicted_by") == Value(std::string("analytic")));
  CHECK(predicted_by(cases[2]) == "segments");
  CHECK(mixes_predictions(cases));
  cases[0].predicted->step_s = 3, cases[1].predicted->step_s = 1, cases[2].predicted->step_s = 2;
  CHECK(summarise(cases).fastest == 0);
  cases[0].predicted.reset();
  CHECK(predicted_by(cases[0]).empty());
}
