// Writes the pages that the browser tests and the benchmark of the page open: sample_pages DIR [CASES].
#include <fmt/format.h>

#include <array>
#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "plan/base/hash.h"
#include "reports/html.h"
#include "tests/namespaces.h"
#include "tests/reports/sample.h"

using namespace shardlab;
using namespace shardlab::testing;

namespace {

void write(const std::filesystem::path& path, const Report& report, const char* revision = "") {
  std::ofstream(path, std::ios::binary) << render_html(report, revision);
}

/// A simulated grid: every combination once more for each of its repetitions, with figures of many digits.
Report grid_report(int cases) {
  Report report;
  report.title = "a large grid";
  const CaseOutcome first = sweep_outcomes()[0];
  for (int i = 0; i < cases; ++i) {
    CaseOutcome o = first;
    o.measured.reset(), o.ops.clear();
    o.config.layout.tp = 1 << i % 4, o.config.layout.pp = 1 << i / 4 % 5, o.config.layout.dp = 1 << i / 20 % 8;
    o.config.train.micro_batch = 1 << i / 160 % 4, o.config.train.seq_len = 1024 * (1 + i / 640 % 40);
    const Layout& l = o.config.layout;
    o.config.name = fmt::format("tp={} pp={} dp={} micro_batch={} seq_len={} recompute=none overlap=true repetition={}", l.tp, l.pp,
                                l.dp, o.config.train.micro_batch, o.config.train.seq_len, i);
    o.case_id = fmt::format("{:016x}", hash_text(o.config.name));
    const double noise = static_cast<double>(hash_text(o.case_id) % 1'000'003) / 1e6;
    o.predicted->step_s *= 1 + noise, o.predicted->compute_s *= 1 + noise * noise, o.predicted->bubble_fraction = noise / 7;
    o.predicted->peak_bytes += static_cast<int64_t>(2e8 * noise);
    if (i % 5 == 0)
      o.status = Status::kOom, o.reason = fmt::format("does not fit: a rank needs {:.4f} GiB and may use 80 GiB", 80 + 100 * noise);
    report.cases.push_back(std::move(o));
  }
  return report;
}

/// Three layouts of eight ranks, of which pure data parallelism is the fastest.
Report data_parallel_report() {
  Report report;
  report.title = "data parallelism";
  for (const int dp : {2, 4, 8}) {
    CaseOutcome o = sweep_outcomes()[0];
    o.measured.reset(), o.ops.clear();
    o.config.layout.dp = dp, o.config.layout.tp = 8 / dp;
    o.config.name = fmt::format("dp={}", dp);
    o.case_id = fmt::format("{:016x}", hash_text(o.config.name));
    o.predicted->step_s /= dp;
    report.cases.push_back(std::move(o));
  }
  return report;
}

/// Two runs of the same cases: of three pairs one is slower in B, one differs by noise, one is the same.
Report comparison_report() {
  Report report;
  report.kind = Report::Kind::kComparison;
  report.title = "after against before";
  report.verdicts = {{Statement::Mood::kAnswer, "3 cases compared."}, {Statement::Mood::kBad, "step_s: 1 worse, 1 noise, 1 same"}};
  ExtraColumn run{.name = "run", .heading = "run", .help = "A: the run before; B: the run after", .values = {}, .is_setting = true};
  const std::vector<CaseOutcome> outcomes = sweep_outcomes();
  constexpr std::array kTimes{1.25, 1.01, 1.0};
  for (size_t i = 0; i < kTimes.size(); ++i) {
    const double step = outcomes[i].predicted->step_s;
    for (const bool after : {false, true}) {
      CaseOutcome o = outcomes[i];
      o.config.name = fmt::format("{}: {}", after ? "B" : "A", o.config.name);
      if (after) o.predicted->step_s *= kTimes[i];
      run.values.emplace_back(std::string(after ? "B" : "A"));
      report.cases.push_back(std::move(o));
    }
    const Verdict verdict = i == 0 ? Verdict::kWorse : i == 1 ? Verdict::kNoise : Verdict::kSame;
    report.changes.push_back(
        {2 * i, 2 * i + 1, "step_s",
         Change{"predicted_step_s", Unit::kSeconds, step, step * kTimes[i], i < 2 ? 0.02 * step : 0, verdict}});
    report.changes.push_back(
        {2 * i, 2 * i + 1, "peak_bytes", Change{"predicted_peak_bytes", Unit::kBytes, 1024, 1024, 0, Verdict::kSame}});
  }
  report.extra.push_back(std::move(run));
  return report;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) return fmt::print(stderr, "usage: {} DIR [CASES]\n", argv[0]), 2;
  const std::filesystem::path folder = argv[1];
  std::filesystem::create_directories(folder);
  if (argc > 2) return write(folder / "grid.html", grid_report(std::atoi(argv[2]))), 0;
  Report empty, hostile = sweep_report();
  empty.title = "nothing";
  hostile.title = hostile.cases[0].config.name = hostile.cases[15].reason = hostile.timelines[0].ops[0].label =
      "</script><img src=x onerror=alert(1)>\" onload=\"alert(2)";
  hostile.timelines[0].left_out = 7, hostile.timelines[0].shown_s = 1e-3;
  write(folder / "sample.html", sweep_report());
  write(folder / "followed.html", sweep_report(), "first");
  write(folder / "empty.html", empty);
  write(folder / "comparison.html", comparison_report());
  write(folder / "hostile.html", hostile);
  write(folder / "grid.html", grid_report(3000));
  write(folder / "data-parallel.html", data_parallel_report());
  write(folder / "simulated.html", simulated_report());
  return 0;
}
