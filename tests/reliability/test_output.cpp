// What reaches the user: all of an answer or exit code 6, and of names nothing that a terminal, a page or a spreadsheet obeys.
#include <fmt/format.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>

#include "plan/base/files.h"
#include "plan/base/utf8.h"
#include "reports/escape.h"
#include "reports/format.h"
#include "reports/table.h"
#include "tests/cli/program.h"
#include "tests/namespaces.h"
#include "tests/test.h"

namespace shardlab::testing {
namespace {

namespace fs = std::filesystem;

std::string simulated(const std::string& more, const std::string& name = "tiny") {
  return "version: 1\nname: " + name +
         "\nmode: simulate\nmodel: {preset: tiny-gpt, layers: 2}\nmachine: h100-sxm5-80gb\n"
         "train: {seq_len: 64, global_batch_tokens: 512}\n" +
         more;
}

/// `shardlab ARGUMENTS`, with redirections of the shell among them; its exit code.
int exit_code(const std::string& arguments) {
  const int status = std::system((testing::program_path() + " " + arguments).c_str());
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

TEST_CASE("bytes of a text are read as code points, or told to be none") {
  CHECK(first_code_point("a").value == 'a');
  CHECK(first_code_point("é").value == 0xE9);
  CHECK(first_code_point("\u202E").value == 0x202E);
  CHECK(first_code_point("\U0001F600").bytes == 4);
  CHECK(first_code_point("\xE2\x80").bytes == 0);  // its end is missing
  CHECK(first_code_point("").bytes == 0);
  for (const char* wrong : {"\xFFx", "\x80x", "\xC0\x80", "\xE0\x80\x80", "\xED\xA0\x80", "\xF5\x80\x80\x80", "\xC3x"}) {
    CHECK(first_code_point(wrong).value == -1);
    CHECK(first_code_point(wrong).bytes == 1);
  }
  CHECK(to_utf8("s\xFF\xFE") == "sÿþ");
  CHECK(to_utf8("schön \xE9") == "schön é");
}

TEST_CASE("what a terminal obeys is shown and not obeyed") {
  CHECK(visible("\x1b[31mred\x1b[0m") == "\\u001b[31mred\\u001b[0m");
  CHECK(visible("\x1b]0;title\a") == "\\u001b]0;title\\u0007");
  CHECK(visible("a\u202Eb\u2066c\u200Fd") == "a\\u202eb\\u2066c\\u200fd");
  CHECK(visible("\u009b31m\x7f\r") == "\\u009b31m\\u007f\\u000d");
  CHECK(visible("\xFF") == "\\u00ff");
  CHECK(visible("two\nlines\tand ünïcödé") == "two\nlines\tand ünïcödé");
  CHECK(visible_line("two\nlines\t") == "two lines ");
  CHECK(visible_line("שלום") == "\u2068שלום\u2069");
  CHECK(display_width(visible_line("שלום")) == 4);
  CHECK(shortened(visible_line("שלום"), 3) == "\u2068של…\u2069");
}

TEST_CASE("a name is a name in every format") {
  CHECK(csv_field("=cmd|' /C calc'!A0") == "'=cmd|' /C calc'!A0");
  CHECK(csv_field("+1+1") == "'+1+1");
  CHECK(csv_field("-2+3") == "'-2+3");
  CHECK(csv_field("@SUM(1)") == "'@SUM(1)");
  for (const char* number : {"-2.5", "-1e-300", "-inf", "-9223372036854775808"}) CHECK(csv_field(number) == number);
  CHECK(csv_field("a\x1b,b") == "\"a\\u001b,b\"");
  CHECK(markdown_text("<script>alert(1)</script>") == "&lt;script&gt;alert(1)&lt;/script&gt;");
  CHECK(markdown_text("[x](javascript:alert(5)) | `a` *b*\n") == "\\[x\\](javascript:alert(5)) \\| `a` \\*b\\* ");
  CHECK(markdown_text("Press & Wolf &lt; &#60;") == "Press & Wolf &amp;lt; &amp;#60;");
  CHECK(markdown_code("a `b` ``c``") == "``` a `b` ``c`` ```");
  CHECK(markdown_code("plain <b>") == "`plain <b>`");
  CHECK(html_escaped("<img src='x' onerror=\"\u202E\">") == "&lt;img src=&#39;x&#39; onerror=&quot;\\u202e&quot;&gt;");
  CHECK(script_safe("{\"a\":\"</script>\u202E\"}") == "{\"a\":\"\\u003c/script>\\u202e\"}");
}

TEST_CASE("hostile names script no page, drive no terminal, and are no formula") {
  const Scratch scratch;
  const std::string file = scratch.write("hostile.yaml", simulated("include:\n"
                                                                   "  - {name: \"<script>alert(1)</script>\", seed: 0}\n"
                                                                   "  - {name: \"=cmd|' /C calc'!A0\", seed: 1}\n"
                                                                   "  - {name: \"[x](javascript:alert(5))\", seed: 2}\n"
                                                                   "  - {name: \"\\u001b]0;title\\u0007\", seed: 3}\n"
                                                                   "  - {name: \"a \\u202etxt.exe\", seed: 4}\n"));
  const std::string out = scratch / "out";
  const auto harmless = [](const std::string& text) {
    for (const char* command : {"\x1b", "\a", "\u202E", "\u009b"})
      if (text.find(command) != std::string::npos) return false;
    return true;
  };
  const Output run = shardlab_program(scratch, "run " + file + " --out " + out);
  REQUIRE(run.code == 0);
  CHECK(harmless(run.out));
  CHECK(harmless(run.err));
  CHECK(run.err.find("\\u001b]0;title\\u0007: ok") != std::string::npos);
  for (const char* format : {"table", "csv", "json", "markdown"}) {
    const Output report = shardlab_program(scratch, "report " + out + " --format " + format);
    INFO(report.out);
    CHECK(report.code == 0);
    CHECK(harmless(report.out));
  }
  for (const char* verb : {"explain ", "plan "}) {
    const Output output = shardlab_program(scratch, verb + out + "/nothing\x1b[31m");
    CHECK(output.code == 2);
    CHECK(harmless(output.err));
  }
  CHECK(harmless(slurp(out + "/results.csv")));
  const Rows rows = parse_csv(slurp(out + "/results.csv"));
  CHECK(cell(rows, 2, "name") == "'=cmd|' /C calc'!A0");
  REQUIRE(
      shardlab_program(scratch, "report " + out + " --markdown " + (scratch / "r.md") + " --html " + (scratch / "r.html")).code ==
      0);
  const std::string markdown = slurp(scratch / "r.md"), page = slurp(scratch / "r.html");
  for (const std::string& text : {markdown, page}) {
    CHECK(harmless(text));
    CHECK(text.find("<script>alert") == std::string::npos);
  }
  CHECK(markdown.find("[x](") == std::string::npos);
}

TEST_CASE("an answer that does not reach a full disk is exit code 6, of every verb") {
  const Scratch scratch;
  const std::string out = scratch / "out";
  REQUIRE(shardlab_program(scratch, "run " + scratch.write("s.yaml", simulated("")) + " --out " + out).code == 0);
  const std::string config = scratch.write("case.yaml", "model: tiny-gpt\nmachine: hgx-h100-ndr\ndp: 2\nseq_len: 32\n");
  for (const std::string& verb :
       {"report " + out, "report " + out + " --format json", "explain " + out, std::string("model list"),
        std::string("machine list"), std::string("model show tiny-gpt"), std::string("strategies"), std::string("doctor"),
        std::string("--help"), std::string("--version"), "plan " + config, "diff " + config + " " + config,
        std::string("memory --model tiny-gpt --machine h100-sxm5-80gb"), "run " + (scratch / "s.yaml") + " --dry-run"}) {
    INFO(verb);
    CHECK(exit_code(verb + " >/dev/full 2>" + (scratch / "err")) == 6);
    CHECK(slurp(scratch / "err").find("standard output: No space left on device") != std::string::npos);
    CHECK(exit_code(verb + " >&- 2>/dev/null") == 6);
  }
  CHECK(exit_code("report " + out + " --csv /dev/full 2>/dev/null") == 6);
  CHECK(fs::is_character_file("/dev/full"));
}

TEST_CASE("estimates that find no room on the disk end the sweep with exit code 6, and the next run goes on") {
  const Scratch scratch;
  const std::string file = scratch.write("s.yaml",
                                         "name: s\nresolution: analytic\nmodel: gpt2\nmachine: hgx-h100-ndr\n"
                                         "profile: megatron\ntrain: {global_batch_tokens: 4Mi}\naxes: {seed: {range: [1, 8000]}}\n");
  const std::string out = scratch / "out", err = scratch / "err", run = testing::program_path() + " run " + file + " --out " + out;
  // Files of at most 2 MiB: writing beyond that fails as on a full disk.
  const std::string bounded = "bash -c \"trap '' XFSZ; ulimit -f 2048; exec " + run + " >/dev/null 2>" + err + "\"";
  CHECK(WEXITSTATUS(std::system(bounded.c_str())) == 6);
  CHECK(slurp(err).find("results.sqlite") != std::string::npos);
  REQUIRE(exit_code("run " + file + " --resume --out " + out + " >/dev/null 2>&1") == 0);
  CHECK(parse_csv(slurp(out + "/results.csv")).size() == 8001);
}

TEST_CASE("progress that nobody can read ends no run") {
  const Scratch scratch;
  const std::string file = scratch.write("s.yaml", simulated("axes: {seed: {range: [1, 5]}}\n"));
  for (const char* progress : {">/dev/null 2>/dev/full", ">/dev/null 2>&-", "2>&1 >/dev/null | true"}) {
    const std::string out = scratch / fmt::format("out{}", std::string(progress).size());
    INFO(progress);
    CHECK(exit_code("run " + file + " --out " + out + " " + progress) == 0);
    for (int i = 0; i < 600 && parse_csv(slurp(out + "/results.csv")).size() < 6; ++i) usleep(100'000);  // behind a pipe it runs on
    CHECK(parse_csv(slurp(out + "/results.csv")).size() == 6);
  }
}

TEST_CASE("a sweep whose name is not UTF-8 runs and goes on; a name with a NUL is refused and makes no folder") {
  const Scratch scratch;
  const std::string file = scratch.write("latin1.yaml", simulated("", "\"s\xFF\xFE\""));
  const std::string in = "cd " + (scratch / "") + " && ";
  const auto run = [&](const std::string& more) {
    return std::system((in + testing::program_path() + " run " + more + " >/dev/null 2>&1").c_str());
  };
  CHECK(run("latin1.yaml") == 0);
  CHECK(is_there(scratch / "runs/sÿþ/results.csv"));
  CHECK(run("latin1.yaml --resume") == 0);
  CHECK(run("latin1.yaml --resume --out runs/sÿþ/") == 0);

  scratch.write("nul.yaml", simulated("", "\"q\\0zz\""));
  const int status = run("nul.yaml");
  CHECK(WEXITSTATUS(status) == 2);
  scratch.write("escape.yaml", simulated("", "\"q\\u001bzz\""));
  CHECK(WEXITSTATUS(run("escape.yaml")) == 2);
  CHECK(std::distance(fs::directory_iterator(scratch / "runs"), fs::directory_iterator()) == 1);
}

TEST_CASE("updates that were left out are said, in the row and in the answer") {
  const Scratch scratch;
  std::string text;
  for (int i = 0; i < 200; ++i) text += fmt::format("line {} of a text that a small model can learn from\n", i % 17);
  scratch.write("text.txt", text);
  const std::string file =
      scratch.write("diverge.yaml",
                    "version: 1\nname: diverge\nmode: measure\nmodel: tiny-gpt\nmachine: {local: true}\ndata: {text: text.txt}\n"
                    "train: {seq_len: 64, global_batch_tokens: 512, micro_batch: 2, optimizer: sgd, learning_rate: 1e2, seed: 1}\n"
                    "layout: {dp: 1}\nmeasure: {warmup: 2, steps: 10, repeat: 1, timeout: 5m}\n"
                    "include: [{name: skip, guard.nonfinite: skip}]\n");
  const std::string machine = fmt::format(" --machine-file {}/tests/cli/local.yaml ", testing::source_dir());
  const Output run = shardlab_program(scratch, "run " + file + machine + " --out " + (scratch / "out"));
  INFO(run.err << run.out);
  const Rows rows = parse_csv(slurp(scratch / "out/results.csv"));
  const int skipped = std::stoi(cell(rows, 1, "skipped_steps"));
  REQUIRE(skipped > 0);
  const std::string said = fmt::format("{} of 12 updates were left out, the first at step", skipped);
  CHECK(cell(rows, 1, "reason").find(said) != std::string::npos);
  CHECK(run.err.find(said) != std::string::npos);
  // How soon the loss itself is no number depends on the processor's kernels: then the row has failed, and says both.
  if (cell(rows, 1, "status") == "ok") CHECK(run.out.find("Updates were left out.") != std::string::npos);
}

}  // namespace
}  // namespace shardlab::testing
