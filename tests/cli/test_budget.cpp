// Recompute layer by layer through the program: what each layer does is in the case file by which a case is executed, whether
// its user wrote it or a budget chose it.
#include <fmt/format.h>

#include <string>

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
    "version: 1\nname: budget\nmode: both\n"
    "model: {inline: {family: gpt, layers: 4, hidden: 32, heads: 4, ffn: 64, vocab: 256, max_positions: 64}}\n"
    "machine: {local: true}\ndata: {text: text.txt}\nexecution: {canonical: true}\n"
    "train: {seq_len: 64, global_batch_tokens: 128}\n"
    "measure: {warmup: 1, steps: 2, repeat: 1, timeout: 1m}\n"
    "include:\n"
    "  - {name: keep}\n"
    "  - {name: by-layer, recompute: 1*full@cpu 1*attn.core+mlp.act 2*none}\n";

}  // namespace

TEST_CASE("layers that differ, and a budget's choice, are executed as they are predicted") {
  const Scratch scratch;
  std::string text;
  for (int i = 0; i < 200; ++i) text += fmt::format("line {} of a text that a small model can learn from\n", i % 17);
  scratch.write("text.txt", text);
  const auto run = [&](const std::string& sweep, const std::string& out) {
    const Output output =
        shardlab_program(scratch, fmt::format("run {} --machine-file {}/tests/cli/calibrated.yaml --out {}",
                                              scratch.write(out + ".yaml", sweep), testing::source_dir(), scratch / out));
    INFO(output.err);
    const Rows rows = parse_csv(slurp(scratch / (out + "/results.csv")));
    for (size_t row = 1; row < rows.size(); ++row) UNSCOPED_INFO(cell(rows, row, "reason"));
    REQUIRE(output.code == 0);
    return rows;
  };
  const auto exact = [](const Rows& rows, size_t row) {
    CHECK(cell(rows, row, "status") == "ok");
    CHECK(cell(rows, row, "measured_peak_bytes") == cell(rows, row, "predicted_peak_bytes"));
    CHECK(cell(rows, row, "measured_wire_bytes") == cell(rows, row, "predicted_wire_bytes"));
  };

  const Rows both = run(kSweep, "both");
  const int64_t keep = std::stoll(cell(both, 1, "predicted_peak_bytes"));
  exact(both, 1);
  exact(both, 2);
  CHECK(cell(both, 2, "recompute") == "1*full@cpu 1*attn.core+mlp.act 2*none");
  CHECK(cell(both, 2, "loss_last") == cell(both, 1, "loss_last"));
  CHECK(std::stoll(cell(both, 2, "predicted_peak_bytes")) < keep);

  const int64_t budget = keep - keep / 8;
  const Rows chosen =
      run(fmt::format("{}  - {{name: budget, recompute_options: {{budget_bytes: {}}}}}\n", kSweep, budget), "chosen");
  exact(chosen, 3);
  CHECK(cell(chosen, 3, "recompute").find('*') != std::string::npos);
  CHECK(cell(chosen, 3, "loss_last") == cell(both, 1, "loss_last"));
  CHECK(std::stoll(cell(chosen, 3, "measured_peak_bytes")) <= budget);
}

}  // namespace shardlab::testing
