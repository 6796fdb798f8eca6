// Both resolutions of prediction, over random legal cases: memory and wire bytes are the same, step times are near.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <map>
#include <set>
#include <vector>

#include "tests/agreement/cases.h"
#include "tests/agreement/compare.h"
#include "tests/deal.h"
#include "tests/namespaces.h"
#include "tests/test.h"

namespace shardlab::testing {
namespace {

using testing::CaseDealer;
using testing::compare;
using testing::Compared;
using testing::line_of_case;

struct Row {
  Case config;
  Compared both;
};

double quantile(std::vector<double> v, double q) {
  if (v.empty()) return 0;
  std::sort(v.begin(), v.end());
  return v[std::min(v.size() - 1, static_cast<size_t>(q * static_cast<double>(v.size())))];
}

/// What a case has, for the table.
std::vector<std::string> words_of(const Row& row) {
  const Case& c = row.config;
  const Layout& l = c.layout;
  std::vector<std::string> w{"all",
                             fmt::format("zero {}{}", l.zero, l.dp == 1 ? " dp 1" : ""),
                             l.pp > 1 ? std::string(name_of(l.schedule)) : "pp 1",
                             l.sequence_parallel ? "tp, sequence parallel"
                             : l.tp > 1          ? "tp"
                                                 : "tp 1",
                             std::string(name_of(c.train.precision)),
                             std::string(name_of(c.model.family)),
                             "recompute " + std::string(name_of(l.recompute))};
  const auto add = [&](bool there, std::string word) {
    if (there) w.push_back(std::move(word));
  };
  add(l.dp > 1, l.overlap ? "overlap" : "no overlap");
  add(l.hybrid_shard > 0, "hybrid");
  add(l.tensor_overlap, "tp, in strips");
  add(l.cp > 1, "cp " + std::string(name_of(l.cp_kind)));
  add(l.loss_chunks > 1, "loss in pieces");
  add(l.offload.activations != OffloadTo::kNone, "offload activations");
  add(l.offload.optimizer != OffloadTo::kNone, "offload optimizer");
  add(l.offload.parameters != OffloadTo::kNone, "offload parameters");
  add(l.compression.kind != CompressionKind::kNone, "compression " + std::string(name_of(l.compression.kind)));
  add(c.model.tied_embeddings, "tied");
  add(c.train.clip_norm > 0, "clip");
  add(c.train.guard.any(), "guard");
  add(c.canonical, "canonical");
  add(c.train.dropout > 0, "dropout");
  return w;
}

void print(const std::vector<Row>& rows) {
  std::map<std::string, std::vector<double>> errors;
  std::map<std::string, std::array<int, 2>> bytes;
  for (const Row& r : rows)
    for (const std::string& w : words_of(r)) {
      errors[w].push_back(std::abs(r.both.error()));
      auto& b = bytes[w];
      b[0] += r.both.timeline_peak == r.both.analytic_peak, b[1] += r.both.timeline_wire == r.both.analytic_wire;
    }
  fmt::print("{:<28} {:>7} {:>9} {:>9} {:>9}   {:>7} {:>7}\n", "", "cases", "median %", "p99 %", "worst %", "memory", "wire");
  for (const auto& [w, e] : errors)
    fmt::print("{:<28} {:>7} {:>9.3f} {:>9.3f} {:>9.3f}   {:>7} {:>7}\n", w, e.size(), 100 * quantile(e, 0.5),
               100 * quantile(e, 0.99), 100 * quantile(e, 1), bytes[w][0], bytes[w][1]);
}

struct Dealt {
  std::vector<Row> rows;
  std::map<std::string, int> failures;     ///< cases that one of the resolutions refused or broke on, by what it said
  std::map<std::string, int64_t> refused;  ///< cases that were drawn and are none, by reason
  int64_t thrown_away() const {
    int64_t sum = 0;
    for (const auto& [why, n] : refused) sum += n;
    return sum;
  }
};

Dealt compare_cases(uint64_t seed, int cases) {
  CaseDealer dealer(seed, true);
  Dealt dealt;
  for (int i = 0; i < cases; ++i) {
    const Case c = dealer.next();
    try {
      dealt.rows.push_back({c, compare(c, static_cast<uint64_t>(i) % testing::dealt(1, 4) == 0)});
    } catch (const std::exception& e) {
      if (dealt.failures[e.what()]++ == 0) fmt::print("{}\n  {}\n", e.what(), line_of_case(c));
    }
  }
  dealt.refused = dealer.refused();
  for (const auto& [what, n] : dealt.failures) fmt::print("{} x {}\n", n, what);
  fmt::print("{} drawn cases thrown away for {} compared:\n", dealt.thrown_away(), cases);
  for (const auto& [why, n] : dealt.refused) fmt::print("{:>7} {}\n", n, why);
  return dealt;
}

/// What of the agreement in time has been reached, over all cases: a figure may fall, and then is lowered here.
/// The worst is a plan of fp8 with tp above the kv heads, whose rows of q, k and v are gathered.
constexpr double kMedian = 1e-5, kP99 = 0.0003, kWorst = 0.0066;

/// What is thrown away for each case that is compared, at most, and for how many reasons: what nobody compares may hide anything. A
/// figure may fall, and then is lowered here.
constexpr int kCases = 6000;
constexpr double kThrownAway = 0.41;
constexpr size_t kReasons = 58;  // 1-bit Adam refuses each other optimizer by its name

/// What the estimate that ranks layouts is off by: a figure may fall, and then is lowered here.
constexpr double kEstimatedBytes = 0.05, kEstimatedMedian = 0.22;

void hold_estimates(const std::vector<Row>& rows) {
  std::vector<double> bytes, seconds;
  for (const Row& r : rows) {
    if (r.both.estimated_s == 0) continue;
    bytes.push_back(std::abs(static_cast<double>(r.both.estimated_peak) / static_cast<double>(r.both.timeline_peak) - 1));
    seconds.push_back(std::abs(r.both.estimated_s / r.both.timeline_s - 1));
  }
  fmt::print("{} estimated: bytes median {:.1f} %, 90th percentile {:.1f} %, worst {:.1f} %; time median {:.1f} %\n", bytes.size(),
             100 * quantile(bytes, 0.5), 100 * quantile(bytes, 0.9), 100 * quantile(bytes, 1), 100 * quantile(seconds, 0.5));
  CHECK(bytes.size() > rows.size() / 2);
  CHECK(quantile(bytes, 0.5) <= kEstimatedBytes);
  CHECK(quantile(seconds, 0.5) <= kEstimatedMedian);
}

TEST_CASE("in every case memory and wire bytes are the same, and step times agree") {
  std::vector<double> errors;
  std::string worst;
  const Dealt dealt = compare_cases(13, kCases);
  for (const auto& [what, n] : dealt.failures) FAIL_CHECK(n << " cases of " << kCases << " were not compared: " << what);
  REQUIRE(dealt.rows.size() == static_cast<size_t>(kCases));
  CHECK(static_cast<double>(dealt.thrown_away()) / kCases <= kThrownAway);
  CHECK(dealt.refused.size() <= kReasons);
  for (const Row& r : dealt.rows) {
    INFO(line_of_case(r.config));
    REQUIRE(r.both.analytic_peak == r.both.timeline_peak);
    REQUIRE(r.both.analytic_wire == r.both.timeline_wire);
    const double error = std::abs(r.both.error());
    if (errors.empty() || error > *std::ranges::max_element(errors)) worst = line_of_case(r.config);
    errors.push_back(error);
  }
  fmt::print("{} cases: median {:.3f} %, 99th percentile {:.2f} %, worst {:.2f} %: {}\n", errors.size(),
             100 * quantile(errors, 0.5), 100 * quantile(errors, 0.99), 100 * quantile(errors, 1), worst);
  INFO("worst: " << worst);
  hold_estimates(dealt.rows);
  CHECK(quantile(errors, 0.5) <= kMedian);
  CHECK(quantile(errors, 0.99) <= kP99);
  CHECK(quantile(errors, 1) <= kWorst);
}

TEST_CASE("report", "[.]") {
  const char* n = std::getenv("CASES");
  const auto begin = std::chrono::steady_clock::now();
  std::vector<Row> rows = compare_cases(7, n ? std::atoi(n) : 2000).rows;
  fmt::print("{:.1f} s\n", std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
  print(rows);
  for (const Row& r : rows)
    if (r.both.timeline_peak != r.both.analytic_peak || r.both.timeline_wire != r.both.analytic_wire)
      fmt::print("memory {:+} wire {:+}  {}\n", r.both.analytic_peak - r.both.timeline_peak,
                 r.both.analytic_wire - r.both.timeline_wire, line_of_case(r.config));
  std::ranges::sort(rows, std::greater(), [](const Row& r) { return std::abs(r.both.error()); });
  for (size_t i = 0; i < std::min<size_t>(rows.size(), 15); ++i)
    fmt::print("{:+7.2f} % {:.6f} s against {:.6f} s  {}\n", 100 * rows[i].both.error(), rows[i].both.analytic_s,
               rows[i].both.timeline_s, line_of_case(rows[i].config));
}

}  // namespace
}  // namespace shardlab::testing
