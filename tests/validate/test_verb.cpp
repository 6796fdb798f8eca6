// `shardlab validate` as a user meets it.
#include <fmt/format.h>
#include <sys/wait.h>

#include <array>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "reports/table.h"
#include "tests/cli/program.h"
#include "tests/namespaces.h"
#include "tests/test.h"

namespace shardlab::testing {
namespace {

using testing::Output;
using testing::Scratch;
using testing::slurp;
namespace fs = std::filesystem;

Output validate(const Scratch& scratch, const std::string& arguments) {
  return testing::shardlab_program(scratch, "validate " + arguments);
}

/// Cell of a CSV text by row (from 0) and column name.
std::string cell(const std::string& csv, size_t row, const std::string& column) {
  const auto records = parse_csv(csv);
  for (size_t c = 0; c < records.at(0).size(); ++c)
    if (records[0][c] == column) return records.at(row + 1).at(c);
  return "no column " + column;
}

const std::string kHeader =
    "profile,model,machine,devices,tp,zero,recompute,precision,micro_batch,seq_len,global_batch_tokens,measured_step_s,"
    "measured_bytes,measured_memory_kind,measured_status,cluster\n";

TEST_CASE("a user's rows are predicted and scored, bad ones refused one by one") {
  const Scratch scratch;
  const std::string rows = scratch.write(
      "mine.csv", kHeader +
                      "megatron,llama-3.1-8b,hgx-h100-ndr,16,2,1,none,bf16,1,8192,1048576,9.5,6e10,reserved,ok,\"east, 2\"\n"
                      "torchtitan,llama-3.1-8b,hgx-h100-ndr,8,1,3,full,bf16,1,8192,524288,,,,oom,west\n"
                      "megatron,llama-3.1-8b,hgx-h100-ndr,16,3,1,none,bf16,1,8192,1048576,9.5,,,ok,west\n"
                      "megatron,llama-9b,hgx-h100-ndr,16,2,1,none,bf16,1,8192,1048576,9.5,,,ok,west\n"
                      "megatron,llama-3.1-8b,hgx-h100-ndr,16,2,1,none,bf16,nan,8192,1048576,9.5,,,ok,west\n");
  const Output run = validate(scratch, fmt::format("{} --out {} --format csv", rows, scratch / "out"));
  INFO(run.err);
  CHECK(run.code == 0);
  CHECK(run.err.find("1 column is not used: cluster") != std::string::npos);
  CHECK(run.err.find("3 of 5 rows were refused") != std::string::npos);
  CHECK(cell(run.out, 0, "group") == "mine");
  CHECK(cell(run.out, 0, "rows") == "5");
  CHECK(cell(run.out, 0, "refused") == "3");
  CHECK(cell(run.out, 0, "step_rows") == "1");
  CHECK(cell(run.out, 0, "reserved_rows") == "1");

  const std::string out = slurp(scratch / "out/rows.csv");
  CHECK(out.starts_with(kHeader.substr(0, kHeader.size() - 1) +
                        ",predicted_step_s,predicted_live_bytes,predicted_reserved_bytes,predicted_device_bytes,predicted_low_s,"
                        "predicted_high_s,predicted_low_bytes,predicted_high_bytes,predicted_fits,status,reason,"));
  CHECK(cell(out, 0, "cluster") == "east, 2");
  CHECK(cell(out, 0, "status") == "ok");
  const double step = std::stod(cell(out, 0, "predicted_step_s"));
  CHECK(step > 1);
  CHECK(step < 60);
  CHECK(std::stod(cell(out, 0, "predicted_low_s")) < step);
  CHECK(std::stod(cell(out, 0, "predicted_high_s")) > step);
  CHECK(std::stod(cell(out, 0, "predicted_low_bytes")) < std::stod(cell(out, 0, "predicted_reserved_bytes")));
  CHECK(std::stod(cell(out, 0, "predicted_high_bytes")) > std::stod(cell(out, 0, "predicted_reserved_bytes")));
  double parts = 0;
  for (const char* part : {"forward", "backward", "recompute", "launch", "tensor_parallel", "context_parallel", "expert_parallel",
                           "data_parallel", "pipeline", "update"})
    parts += std::stod(cell(out, 0, fmt::format("predicted_{}_s", part)));
  CHECK(parts == Approx(step).epsilon(1e-4));
  CHECK(std::stod(cell(out, 0, "predicted_hidden_s")) >= 0);
  CHECK(cell(out, 2, "predicted_forward_s").empty());
  const auto bytes = [&](const char* kind) { return std::stoll(cell(out, 0, fmt::format("predicted_{}_bytes", kind))); };
  CHECK(bytes("live") < bytes("reserved"));
  CHECK(bytes("reserved") < bytes("device"));
  CHECK((cell(out, 1, "predicted_fits") == "true" || cell(out, 1, "predicted_fits") == "false"));
  for (const size_t row : {2, 3, 4}) {
    CHECK(cell(out, row, "status") == "refused");
    CHECK(cell(out, row, "predicted_step_s").empty());
    CHECK(cell(out, row, "reason").find(fmt::format("mine.csv:{}:", row + 2)) != std::string::npos);
  }
  CHECK(cell(out, 3, "reason").find("no model is named `llama-9b`") != std::string::npos);

  // The table that came out goes in again and says the same.
  const Output again = validate(scratch, fmt::format("{} --format csv", scratch / "out/rows.csv"));
  CHECK(cell(again.out, 0, "bias_pct") == cell(run.out, 0, "bias_pct"));
}

TEST_CASE("a table that is none ends in a usage error, a table of impossible rows in the answer no") {
  const Scratch scratch;
  const Output broken = validate(scratch, scratch.write("broken.csv", "machine,seq_len,model,devices\nhgx-h100-ndr,4096\n"));
  CHECK(broken.code == 2);
  CHECK(broken.err.find("broken.csv:2:14: the row has 2 fields, the header has 4") != std::string::npos);
  CHECK(broken.out.empty());
  CHECK(validate(scratch, scratch / "absent.csv").code == 2);
  CHECK(validate(scratch, scratch.write("a.csv", "model,machine,seq_len,devices\ngpt2,hgx-h100-ndr,1024,8\n") + " --format xml")
            .code == 2);
  const Output none = validate(
      scratch, scratch.write("none.csv", kHeader + "megatron,gpt2,hgx-h100-ndr,0,2,1,none,bf16,1,8192,1048576,9.5,,,ok,x\n"));
  CHECK(none.code == 3);
  CHECK(none.err.find("1 of 1 row was refused") != std::string::npos);
}

TEST_CASE("names in a row lead to files beside the table") {
  const Scratch scratch;
  scratch.write("two.yaml", "id: two\ndevices_per_node: 2\nnodes: 1\ndevice: {preset: h100-sxm5-80gb}\n");
  const std::string rows = scratch.write(
      "files.csv", "machine,seq_len,model,devices,micro_batch\n./two.yaml,1024,gpt2,2,1\nnowhere.yaml,1024,gpt2,2,1\n");
  const Output run = validate(scratch, rows + " --format csv");
  CHECK(run.code == 0);
  CHECK(cell(run.out, 0, "refused") == "1");
}

TEST_CASE("three runs of one's own correct their machine, and its file predicts the next ones") {
  const Scratch scratch;
  const std::string header = "profile,model,machine,devices,tp,micro_batch,seq_len,global_batch_tokens,measured_step_s\n";
  std::string unmeasured = header;
  for (const int tp : {1, 2, 4}) unmeasured += fmt::format("megatron,llama-3.1-8b,hgx-h100-ndr,16,{},1,8192,1048576,\n", tp);
  // The runs are made a fifth slower than what is predicted of each.
  const Output plain = validate(scratch, scratch.write("plain.csv", unmeasured) + " --out " + (scratch / "plain"));
  REQUIRE(plain.code == 0);
  const std::string predicted = slurp(scratch / "plain/rows.csv");
  const auto measured = [&](const std::string& machine) {
    std::string text = header;
    for (size_t row = 0; row < 3; ++row)
      text += fmt::format("megatron,llama-3.1-8b,{},16,{},1,8192,1048576,{}\n", machine, 1 << row,
                          1.2 * std::stod(cell(predicted, row, "predicted_step_s")));
    return text;
  };
  const std::string own = scratch.write("own.csv", measured("hgx-h100-ndr"));
  const Output run = testing::shardlab_program(scratch, "calibrate --from " + own + " -o " + (scratch / "mine.yaml"));
  INFO(run.err);
  REQUIRE(run.code == 0);
  CHECK(run.err.find("rates of hgx-h100-ndr times: kernels 0.8") != std::string::npos);
  CHECK(run.err.find("16.7 % off in the mean") != std::string::npos);
  CHECK(run.err.find(", host ") != std::string::npos);
  const auto error = [&](const std::string& rows) {
    return std::stod(cell(validate(scratch, rows + " --format csv").out, 0, "mean_absolute_error_pct"));
  };
  CHECK(error(scratch.write("again.csv", measured("./mine.yaml"))) < 4);
  // A memory question reads the file too.
  CHECK(testing::shardlab_program(
            scratch, "memory --profile megatron --model llama-3.1-8b --devices 16 --tp 4 --machine " + (scratch / "mine.yaml"))
            .code == 0);
  CHECK(testing::shardlab_program(scratch, "calibrate --from " + own).code == 2);
  CHECK(run.err.find("\nthe 3 runs were predicted 16.7 % off in the mean, and are ") != std::string::npos);
  std::string first = measured("hgx-h100-ndr");
  first.resize(first.find('\n', first.find('\n') + 1) + 1);
  const Output one =
      testing::shardlab_program(scratch, "calibrate --from " + scratch.write("one.csv", first) + " -o " + (scratch / "one.yaml"));
  CHECK(one.code == 0);
  CHECK(one.err.find("\nthe run was predicted 16.7 % off in the mean, and is ") != std::string::npos);
  const std::string untimed = scratch.write("untimed.csv", header + "megatron,llama-3.1-8b,hgx-h100-ndr,16,1,1,8192,1048576,\n");
  CHECK(testing::shardlab_program(scratch, "calibrate --from " + untimed + " -o " + (scratch / "x.yaml")).code == 2);
}

TEST_CASE("without a file every published set is scored") {
  const Scratch scratch;
  const Output run = validate(scratch, "--format csv --out " + (scratch / "all"));
  CHECK(run.code == 0);
  const auto records = parse_csv(run.out);
  REQUIRE(records.size() == 15);  // header, eight sets, five untuned ones, all of them
  CHECK(cell(run.out, 13, "group") == "all");
  CHECK(cell(run.out, 13, "rows") == "3762");
  CHECK(cell(run.out, 13, "step_rows") == "2277");
  CHECK(parse_csv(slurp(scratch / "all/rows.csv")).size() == 3763);
  const Output by = validate(scratch, "--by profile,zero --format csv");
  CHECK(cell(by.out, 0, "group").find("profile=") == 0);
}

}  // namespace
}  // namespace shardlab::testing
