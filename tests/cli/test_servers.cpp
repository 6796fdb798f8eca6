// Parameter servers through the program: what a run with a staleness leaves, and that a replay of it comes to the same.
#include <fmt/format.h>

#include <string>
#include <vector>

#include "reports/table.h"
#include "tests/cli/program.h"
#include "tests/namespaces.h"
#include "tests/test.h"

namespace shardlab::testing {
namespace {

using testing::cell;
using testing::Output;
using testing::Rows;
using testing::Scratch;
using testing::shardlab_program;
using testing::slurp;

constexpr const char* kSweep =
    "version: 1\nname: served\nmode: measure\n"
    "model: {inline: {family: gpt, layers: 2, hidden: 32, heads: 4, ffn: 64, vocab: 256, max_positions: 32}}\n"
    "machine: {local: true}\ndata: {text: text.txt}\nexecution: {canonical: true}\n"
    "train: {seq_len: 16, global_batch_tokens: 64}\n"
    "measure: {warmup: 1, steps: 3, repeat: 2, timeout: 1m, validate_sequences: 4}\n"
    "include: [{name: only, dp: 2, model.tied_embeddings: false, parameter_server.servers: 2}]\n";

}  // namespace

TEST_CASE("workers apart leave the order of arrivals, by which the run is repeated to the bit") {
  const Scratch scratch;
  std::string text;
  for (int i = 0; i < 200; ++i) text += fmt::format("line {} of a text that a small model can learn from\n", i % 17);
  scratch.write("text.txt", text);
  const std::string file = scratch.write("sweep.yaml", kSweep);
  const auto run = [&](const std::string& out, const std::string& flags, int code = 0) {
    const Output output = shardlab_program(scratch, fmt::format("run {} --machine-file {}/tests/cli/local.yaml --out {} {}", file,
                                                                testing::source_dir(), scratch / out, flags));
    INFO(output.err);
    REQUIRE(output.code == code);
    return parse_csv(slurp(scratch / (out + "/results.csv")));
  };
  const auto arrivals = [&](const std::string& out, const Rows& rows, int server) {
    return slurp(fmt::format("{}/{}/arrivals.{}.txt", scratch / out, cell(rows, 1, "case_id"), server));
  };

  const Rows in_step = run("in-step", "");
  CHECK(cell(in_step, 1, "parameter_server") == "servers=2 staleness=sync");
  CHECK(cell(in_step, 1, "staleness_worst").empty());
  CHECK(arrivals("in-step", in_step, 0).empty());

  const Rows zero = run("zero", "--set parameter_server.staleness=0");
  CHECK(cell(zero, 1, "staleness_worst") == "0");
  CHECK(cell(zero, 1, "val_loss") == cell(in_step, 1, "val_loss"));
  CHECK(cell(zero, 1, "measured_peak_bytes") != cell(in_step, 1, "measured_peak_bytes"));  // servers have copies of their own
  CHECK(std::stoll(cell(zero, 1, "measured_wire_bytes")) <
        std::stoll(cell(in_step, 1, "measured_wire_bytes")));  // the loss is not reduced

  const Rows apart = run("apart", "--set parameter_server.staleness=2");
  const Rows again = run("again", "--set parameter_server.staleness=2 --replay " + (scratch / "apart"));
  for (int server = 0; server < 2; ++server) {
    CHECK(arrivals("apart", apart, server)
              .starts_with(fmt::format("shardlab arrivals 1\nserver {} workers 2 staleness 2\n", server)));
    CHECK(arrivals("again", again, server) == arrivals("apart", apart, server));
  }
  for (const char* column : {"val_loss", "loss_first", "loss_last", "staleness_mean", "staleness_worst", "measured_wire_bytes"})
    CHECK(cell(again, 1, column) == cell(apart, 1, column));

  const Rows none = run("none", "--set parameter_server.staleness=2 --replay " + (scratch / "in-step"), 3);
  CHECK(cell(none, 1, "status") == "refused");
  CHECK(cell(none, 1, "reason").find("the arrivals to be replayed cannot be read") != std::string::npos);
}

}  // namespace shardlab::testing
