// `compare`: two run directories as a user compares them, and the exit codes that CI reads.
#include "cli/run_directory.h"
#include "plan/base/files.h"
#include "reports/table.h"
#include "tests/cli/program.h"
#include "tests/namespaces.h"
#include "tests/test.h"

namespace shardlab::testing {
namespace {

/// A simulated sweep of two layouts with `more` settings, into `out`.
void simulate(const Scratch& scratch, const std::string& out, const std::string& more) {
  const std::string file = scratch.write(
      out + ".yaml",
      "mode: simulate\nmodel: tiny-gpt\nmachine: {preset: hgx-h100-ndr, nodes: 1}\nglobal_batch_tokens: 2Ki\nseq_len: 256\n" +
          more);
  const Output run = shardlab_program(scratch, "run " + file + " --out " + (scratch / out));
  INFO(run.err);
  REQUIRE(run.code == 0);
}

std::string include(const std::string& of_b) {
  return "include: [{name: a, dp: 1}, {name: b, dp: 2, bucket_bytes: 1Mi" + of_b + "}]\n";
}

TEST_CASE("a case's own name goes before an id that begins alike") {
  cli::NamedCases<int> named("b");
  named.offer("b15e782047fdf76f", "a", 1);
  named.offer("49d195938ab794cd", "b", 2);
  CHECK(named.found() == std::vector{2});
  cli::NamedCases<int> by_id("b1");
  by_id.offer("b15e782047fdf76f", "a", 1);
  by_id.offer("49d195938ab794cd", "b", 2);
  CHECK(by_id.found() == std::vector{1});
}

TEST_CASE("equal runs compare equal, changed settings are named, and bounds decide the exit code") {
  const Scratch scratch;
  simulate(scratch, "before", include(""));
  simulate(scratch, "after", include(", zero: 1"));
  const auto compare = [&](const std::string& words) { return shardlab_program(scratch, "compare " + words); };
  const std::string before = scratch / "before", after = scratch / "after";

  const Output same = compare(before + " " + before + " --fail-if step_s:0 --fail-if peak_bytes:0");
  INFO(same.out << same.err);
  REQUIRE(same.code == 0);
  REQUIRE(same.out.find("step_s: 2 same\n") != std::string::npos);
  REQUIRE(same.out.find("8 figures are the same") == std::string::npos);  // no losses were simulated
  REQUIRE(same.out.find("6 figures are the same or differ by noise alone") != std::string::npos);

  const Output changed = compare(before + " " + after);
  INFO(changed.out);
  REQUIRE(changed.code == 0);
  REQUIRE(changed.out.find("layout.zero 0 -> 1") != std::string::npos);
  REQUIRE(changed.out.find("peak_bytes: 1 better, 1 same") != std::string::npos);

  // The same as a page: both runs, and the pair that changed.
  const Output page = compare(before + " " + after + " --html " + (scratch / "page.html"));
  INFO(page.err);
  REQUIRE(page.code == 0);
  const std::string html = *read_file(scratch / "page.html");
  REQUIRE(html.find("after against before") != std::string::npos);
  REQUIRE(html.find("<li class=\"good\">peak_bytes: 1 better, 1 same") != std::string::npos);

  // ZeRO-1 spends more on the update's gather than it saves: the step is another one, whichever way.
  const Output rows = compare(before + " " + after + " --metric peak_bytes --format csv");
  const auto csv = parse_csv(rows.out);
  REQUIRE(csv.size() == 3);
  REQUIRE(cell(csv, 1, "verdict") == "same");
  REQUIRE(cell(csv, 2, "verdict") == "better");
  REQUIRE(std::stod(cell(csv, 2, "b")) < std::stod(cell(csv, 2, "a")));
  REQUIRE(cell(csv, 2, "metric") == "predicted_peak_bytes");

  const Output crossed = compare(after + " " + before + " --fail-if peak_bytes:+0%");
  REQUIRE(crossed.code == 5);
  REQUIRE(crossed.err.find("crosses peak_bytes:+0%") != std::string::npos);
  REQUIRE(compare(after + " " + before + " --fail-if peak_bytes:+1000%").code == 0);
  REQUIRE(compare(before + " " + after + " --fail-if peak_bytes:+0%").code == 0);
}

TEST_CASE("single cases are compared whatever their settings, with the op kinds that differ") {
  const Scratch scratch;
  simulate(scratch, "run", include(""));
  const Output o = shardlab_program(scratch, fmt::format("compare {0}/a {0}/b", scratch / "run"));
  INFO(o.out << o.err);
  REQUIRE(o.code == 0);
  REQUIRE(o.out.find("1 case compared") != std::string::npos);
  REQUIRE(o.out.find("layout.dp 1 -> 2") != std::string::npos);
  REQUIRE(o.out.find("Seconds by kind of op, predicted") != std::string::npos);
  REQUIRE(o.out.find("all_reduce") != std::string::npos);
}

TEST_CASE("a bound is crossed by a case that is gone, refused now, or without the figure") {
  const Scratch scratch;
  simulate(scratch, "before", include(""));
  simulate(scratch, "fewer", "include: [{name: a, dp: 1}]\n");
  simulate(scratch, "refused", include(", tp: 3"));
  const auto compare = [&](const std::string& words) {
    return shardlab_program(scratch, "compare " + (scratch / "before") + " " + words);
  };
  const Output gone = compare((scratch / "fewer") + " --fail-if step_s:+50%");
  REQUIRE(gone.code == 5);
  REQUIRE(gone.err.find("in A, and not in B") != std::string::npos);
  REQUIRE(gone.out.find("1 only in A") != std::string::npos);
  const Output refused = compare((scratch / "refused") + " --fail-if step_s:+50%");
  INFO(refused.out << refused.err);
  REQUIRE(refused.code == 5);
  REQUIRE(refused.err.find("ok -> refused") != std::string::npos);
  REQUIRE(compare(scratch / "refused").code == 0);  // nothing was bounded
  const Output none = compare((scratch / "before") + " --fail-if energy_j:+1%");
  REQUIRE(none.code == 5);
  REQUIRE(none.err.find("no case has energy_j on both sides") != std::string::npos);
}

TEST_CASE("what cannot be compared is refused with what to do") {
  const Scratch scratch;
  simulate(scratch, "run", include(""));
  simulate(scratch, "other", "include: [{name: c, dp: 4}]\n");
  const std::string run = scratch / "run";
  const auto refused = [&](const std::string& words) {
    const Output o = shardlab_program(scratch, "compare " + words);
    INFO(words << o.err);
    REQUIRE(o.code == 2);
    return o.err;
  };
  REQUIRE(refused(run + " " + (scratch / "other")).find("no case in common") != std::string::npos);
  REQUIRE(refused(run + " nowhere").find("there is no directory") != std::string::npos);
  REQUIRE(refused(run + " " + run + "/nobody").find("`nobody` names 0 cases") != std::string::npos);
  REQUIRE(refused(run + " " + run + " --metric speed").find("`speed` is not a figure") != std::string::npos);
  REQUIRE(refused(run + " " + run + " --fail-if step_s:fast").find("`fast` is no number") != std::string::npos);
}

}  // namespace
}  // namespace shardlab::testing
