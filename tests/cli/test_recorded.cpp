// Reports speak of what ran: the plan and the traces that a case left, joined by the text of ops. Nothing is lowered again.
#include <fmt/format.h>

#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "profiler/trace_file.h"
#include "tests/cli/program.h"
#include "tests/namespaces.h"
#include "tests/reports/page.h"
#include "tests/test.h"

namespace shardlab::testing {
namespace {

namespace fs = std::filesystem;

const std::string kTrace = "/predicted.trace.jsonl";

void write(const std::string& path, const std::string& text) { std::ofstream(path, std::ios::binary) << text; }

std::string replaced(std::string text, const std::string& from, const std::string& to) {
  size_t count = 0;
  for (size_t at = 0; (at = text.find(from, at)) != std::string::npos; at += to.size(), ++count) text.replace(at, from.size(), to);
  INFO(from);
  REQUIRE(count > 0);
  return text;
}

/// A run directory of two simulated cases with their traces, unpacked.
class Run {
 public:
  Run() {
    const std::string sweep =
        scratch.write("two.yaml",
                      "version: 1\nname: two\nmodel: tiny-llama\nmachine: {preset: hgx-h100-ndr, nodes: 1}\ntraces: all\n"
                      "train: {seq_len: 128, global_batch_tokens: 8Ki}\naxes:\n  dp: [1, 2]\n");
    const Output run = shardlab_program(scratch, fmt::format("run {} --out {}", sweep, scratch / "run"));
    INFO(run.err);
    REQUIRE(run.code == 0);
    CHECK(run.err.find("traces: 2 files, ") != std::string::npos);
    for (const auto& entry : fs::directory_iterator(scratch / "run"))
      if (entry.is_directory()) folders.push_back(entry.path().string());
    REQUIRE(folders.size() == 2);
    for (const std::string& folder : folders) REQUIRE(std::system(fmt::format("gunzip {}{}.gz", folder, kTrace).c_str()) == 0);
  }
  /// The page of a report, and its data as text behind it.
  std::string page() const {
    const Output report = shardlab_program(scratch, fmt::format("report {0} --html {0}/r.html", scratch / "run"));
    INFO(report.err);
    REQUIRE(report.code == 0);
    const std::string page = slurp(scratch / "run/r.html");
    return page + data_of(page);
  }
  /// What `explain` says of a case.
  std::string explained(const std::string& folder) const {
    const Output explain = shardlab_program(scratch, "explain " + folder);
    REQUIRE(explain.code == 0);
    return explain.out;
  }
  const Scratch scratch;
  std::vector<std::string> folders;
};

size_t timelines_in(const std::string& page) {
  size_t n = 0;
  for (size_t at = 0; (at = page.find("\"shown_s\":", at)) != std::string::npos; ++at) ++n;
  return n;
}

bool has(const std::string& text, const std::string& word) { return text.find(word) != std::string::npos; }

}  // namespace

TEST_CASE("a report shows the plan that ran, not the one that this program would lower") {
  const Run run;
  const std::string before = run.page();
  CHECK(timelines_in(before) == 2);
  CHECK_FALSE(has(before, "attn.joint"));
  // As another version would have lowered it: an op of another name, in the plan and in the trace of it.
  for (const std::string& folder : run.folders) {
    const std::string plan = slurp(folder + "/plan.txt"), named = replaced(plan, " attn.qkv ", " attn.joint ");
    write(folder + "/plan.txt", named);
    const std::string trace = replaced(slurp(folder + kTrace), " attn.qkv ", " attn.joint ");
    write(folder + kTrace, replaced(trace, plan_digest(plan), plan_digest(named)));
  }
  const std::string after = run.page();
  CHECK(timelines_in(after) == 2);
  CHECK(has(after, "[\"attn.joint linear.F\""));
  CHECK_FALSE(has(after, "[\"attn.qkv linear.F\""));
  CHECK_FALSE(has(after, "class=\"bad\""));
}

TEST_CASE("report and explain name the algorithm of each collective of the plan that ran") {
  const Run run;
  CHECK(has(run.page(), "\"collectives\":[[\""));
  int with = 0;
  for (const std::string& folder : run.folders) {
    const std::string explained = run.explained(folder);
    INFO(explained);
    if (!has(slurp(folder + "/case.yaml"), "dp: 2")) {
      CHECK_FALSE(has(explained, "Algorithms of collectives"));
      continue;
    }
    ++with;
    CHECK(has(explained, "Algorithms of collectives"));
    CHECK(has(explained, " among 2 ranks (dp.grads), once a step: "));
    CHECK(has(explained, " (least predicted time), "));
    // As the plan's text has it; and nothing is said of a plan that did not run.
    const std::string plan = slurp(folder + "/plan.txt");
    write(folder + "/plan.txt", replaced(plan, " attn.qkv ", " attn.joint "));
    CHECK_FALSE(has(run.explained(folder), "Algorithms of collectives"));
  }
  CHECK(with == 1);
}

TEST_CASE("what a report cannot join it names, and it shows the rest") {
  const Run run;
  const std::string& folder = run.folders[0];
  const std::string plan = slurp(folder + "/plan.txt"), trace = slurp(folder + kTrace);
  REQUIRE(timelines_in(run.page()) == 2);
  const auto says = [&](const std::string& what) {
    INFO(what);
    const std::string page = run.page(), explained = run.explained(folder);
    INFO(explained);
    CHECK(has(page, what));
    CHECK(has(page, "class=\"bad\""));
    CHECK(has(explained, what));
    CHECK(has(explained, "attn.qkv"));  // the rows by op are those that the run recorded
    return timelines_in(page);
  };
  SECTION("an edited plan") {
    write(folder + "/plan.txt", replaced(plan, " attn.qkv ", " attn.joint "));
    CHECK(says(fmt::format("predicted.trace.jsonl is of plan {}, and plan.txt is plan", plan_digest(plan))) == 1);
  }
  SECTION("a plan that is gone") {
    fs::remove(folder + "/plan.txt");
    CHECK(says("plan.txt is missing") == 1);
  }
  SECTION("a trace that is gone") {
    fs::remove(folder + kTrace);
    CHECK(says("predicted.trace.jsonl.gz is missing") == 1);
  }
  SECTION("a trace of another plan") {
    write(folder + kTrace, slurp(run.folders[1] + kTrace));
    CHECK(says("one of them was changed after the run, or is of another") == 1);
  }
  SECTION("a trace cut off between two lines") {
    write(folder + kTrace, trace.substr(0, trace.rfind('\n', trace.size() / 2) + 1));
    CHECK(says("the trace is cut off: it has ") == 1);
  }
  SECTION("a trace cut off within a line") {
    write(folder + kTrace, trace.substr(0, trace.size() - 10));
    CHECK(says("this line is no JSON") == 1);
  }
  SECTION("an op that the plan does not have") {
    write(folder + kTrace, replaced(trace, "layers.0 m0 layer.F attn.qkv ", "layers.0 m0 layer.F attn.joint "));
    CHECK(says("events are of ops that plan.txt does not have, and are left out: layers.0 m0 layer.F attn.joint linear.F") == 2);
  }
}

TEST_CASE("simulated sweeps keep no traces until they are asked to, and the report says so") {
  const Scratch scratch;
  const std::string sweep = scratch.write("one.yaml",
                                          "model: tiny-llama\nmachine: {preset: hgx-h100-ndr, nodes: 1}\ntrain: {seq_len: 128, "
                                          "global_batch_tokens: 8Ki}\n");
  REQUIRE(shardlab_program(scratch, fmt::format("run {} --out {}", sweep, scratch / "run")).code == 0);
  for (const auto& entry : fs::recursive_directory_iterator(scratch / "run"))
    CHECK(entry.path().string().find("trace") == std::string::npos);
  const Output report = shardlab_program(scratch, fmt::format("report {0} --html {0}/r.html", scratch / "run"));
  CHECK(report.err.find("warning") == std::string::npos);
  CHECK(has(slurp(scratch / "run/r.html"),
            "Timelines of 1 of 1 cases, simulated again for this page: the run kept no traces of them; keep them with `shardlab "
            "run --traces all`."));
  const Output refused = shardlab_program(scratch, fmt::format("run {} --traces some", sweep));
  CHECK(refused.code == 2);
  CHECK(has(refused.err, "use none, measured or all"));
}

TEST_CASE("a served report is there before its run, follows it, answers this machine alone, and ends with Ctrl-C") {
  const Scratch scratch;
  scratch.write("one.yaml",
                "model: tiny-llama\nmachine: {preset: hgx-h100-ndr, nodes: 1}\ntrain: {seq_len: 128, global_batch_tokens: 8Ki}\n");
  scratch.write("watch.sh", R"(cd "$1"
"$2" report run --serve --port 0 > address 2> said & server=$!
until [ -s address ]; do sleep 0.02; done
port=$(sed 's/[^:]*:[^:]*:\([0-9]*\).*/\1/' address)
get() {
  exec 3<> "/dev/tcp/127.0.0.1/$port"
  printf 'GET %s HTTP/1.1\r\nHost: %s\r\nConnection: close\r\n\r\n' "$1" "$2" >&3
  cat <&3
  exec 3>&-
}
get / "localhost:$port" > before
"$2" run one.yaml --out run > /dev/null 2>&1
get / "127.0.0.1:$port" > after
get /state "localhost:$port" > state
( exec 9< run/run.lock; flock 9; get /state "localhost:$port" ) > busy
get / "rebound.example:$port" > foreign
"$2" report run --serve --port "$port" 2> taken; echo "exit $?" >> taken
kill -INT $server; wait $server; echo "exit $?" > end
)");
  REQUIRE(std::system(fmt::format("bash {0}/watch.sh {0} {1}", scratch / ".", testing::program_path()).c_str()) == 0);
  const auto said = [&](const char* file) { return slurp(scratch / file); };
  CHECK(has(said("before"), " 503 "));
  CHECK(has(said("before"), "there is no directory run"));
  const std::string page = said("after");
  CHECK(has(page, " 200 OK"));
  CHECK(has(page, "connect-src 'self'"));
  const size_t begin = page.find("data-revision=\"");
  REQUIRE(begin != std::string::npos);
  const std::string revision = page.substr(begin + 15, page.find('"', begin + 15) - begin - 15);
  CHECK(has(said("state"), fmt::format("{{\"live\":false,\"revision\":\"{}\"}}", revision)));
  CHECK(has(said("busy"), "{\"live\":true,"));
  CHECK(has(said("foreign"), " 403 "));
  CHECK(said("foreign").find("<html") == std::string::npos);
  CHECK(has(said("taken"), "the port cannot be had"));
  CHECK(has(said("taken"), "exit 2"));
  CHECK(said("end") == "exit 0\n");
  CHECK(said("said").empty());
}

}  // namespace shardlab::testing
