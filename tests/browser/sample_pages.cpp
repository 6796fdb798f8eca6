// Writes the pages that the browser tests and the benchmark of the page open: sample_pages DIR [CASES].
#include <fmt/format.h>

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
    o.config.name = fmt::format("case {}", i);
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
  write(folder / "sample.html", sweep_report());
  write(folder / "followed.html", sweep_report(), "first");
  write(folder / "empty.html", empty);
  write(folder / "hostile.html", hostile);
  write(folder / "grid.html", grid_report(3000));
  return 0;
}
