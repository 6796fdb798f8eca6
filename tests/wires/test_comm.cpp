// `comm`: figures as nccl-tests defines them, its output read, and what it says of a fabric believed.
#include <fmt/format.h>

#include <string>

#include "cli/comm_measure.h"
#include "reports/table.h"
#include "simulator/interpreter/fabric.h"
#include "sweeps/machines.h"
#include "sweeps/nccl_tests.h"
#include "tests/cli/program.h"
#include "tests/namespaces.h"
#include "tests/test.h"

namespace shardlab::testing {
namespace {

/// Output in the form of nccl-tests, with round figures: 8 ranks on `hosts`.
std::string text_of(const std::string& program, bool has_root, const std::vector<std::string>& hosts) {
  std::string text =
      "# nThread 1 nGpus 8 minBytes 8 maxBytes 268435456 step: 2(factor) warmup iters: 5 iters: 20\n#\n# Using devices\n";
  for (size_t r = 0; r < 8 * hosts.size(); ++r)
    text +=
        fmt::format("#  Rank {:2} Group  0 Pid {:6} on {:>10} device {:2} [0x07] NVIDIA H100\n", r, 100 + r, hosts[r / 8], r % 8);
  text +=
      has_root
          ? "#\n#                                                              out-of-place                       in-place         "
            " \n"
            "#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong\n"
            "#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)       \n"
            "           8             2     float     sum      -1    40.00    0.00    0.00      0    40.00    0.00    0.00      0\n"
            "     1048576        262144     float     sum      -1    50.00   20.97   36.70      0    51.00   20.56   35.98      0\n"
            "   268435456      67108864     float     sum      -1   1000.0  268.44  469.76      0   1100.0  244.03  427.06    N/A\n"
          : "#       size         count    type   redop     time   algbw   busbw  error     time   algbw   busbw  error\n"
            "   268435456      67108864   float     sum   1000.0  268.44  469.76  4e-07   1100.0  244.03  427.06  4e-07\n";
  return text + "# Out of bounds values : 0 OK\n# Avg bus bandwidth    : 145.0\n#\n" +
         (program.empty() ? "" : "# Collective test concluded: " + program + "\n");
}

}  // namespace

TEST_CASE("algbw and busbw are those of nccl-tests") {
  CHECK(algbw(1000, 0.5) == 2000);
  CHECK(busbw(CollectiveKind::kAllReduce, 4, 1000, 0.5) == 3000);
  CHECK(busbw(CollectiveKind::kAllGather, 4, 1000, 0.5) == 1500);
  CHECK(busbw(CollectiveKind::kReduceScatter, 4, 1000, 0.5) == 1500);
  CHECK(busbw(CollectiveKind::kAllToAll, 4, 1000, 0.5) == 1500);
  CHECK(busbw(CollectiveKind::kBroadcast, 4, 1000, 0.5) == 2000);
}

TEST_CASE("nccl-tests' text is read: with and without roots and names, several runs one after the other") {
  const auto one = parse_nccl_tests(text_of("all_reduce_perf", true, {"n0", "n1"}), "log.txt");
  REQUIRE(one.ok());
  REQUIRE(one->size() == 1);
  CHECK(one->front().collective == "all_reduce");
  CHECK(one->front().ranks == 16);
  CHECK(one->front().nodes == 2);
  REQUIRE(one->front().rows.size() == 2);  // of the smallest size the rate is 0.00
  CHECK(one->front().rows[1].bytes == 268435456);
  CHECK(one->front().rows[1].seconds == Approx(1e-3));
  CHECK(one->front().rows[1].bus_bytes_per_s == Approx(469.76e9));
  const auto old = parse_nccl_tests(text_of("", false, {"n0"}), "runs/all_gather_perf.log");
  REQUIRE(old.ok());
  CHECK(old->front().collective == "all_gather");
  CHECK(old->front().rows.at(0).bus_bytes_per_s == Approx(469.76e9));
  const auto both =
      parse_nccl_tests(text_of("all_reduce_perf", true, {"n0"}) + text_of("reduce_scatter_perf", true, {"n0"}), "log.txt");
  REQUIRE(both.ok());
  REQUIRE(both->size() == 2);
  CHECK(both->at(1).collective == "reduce_scatter");
  CHECK(both->at(1).ranks == 8);
  const auto nameless = parse_nccl_tests(text_of("", true, {"n0"}), "log.txt");
  REQUIRE_FALSE(nameless.ok());
  CHECK(nameless.error().message == "does not say which collective it measured");
  CHECK_FALSE(parse_nccl_tests("no results", "log.txt").ok());
  CHECK_FALSE(parse_nccl_tests("{\"results\": [", "log.json").ok());
}

TEST_CASE("what nccl-tests measured of a fabric is what the machine's model then says") {
  const std::string preset = *machine_text("hgx-h100-ndr");
  const auto machine = *parse_machine(preset, "preset");
  REQUIRE(machine.devices_per_node == 8);
  auto tests = *parse_nccl_tests(text_of("all_reduce_perf", true, {"n0"}), "a");
  const auto wide = *parse_nccl_tests(text_of("all_reduce_perf", true, {"n0", "n1"}), "b");
  tests.insert(tests.end(), wide.begin(), wide.end());
  const auto text = with_measured_fabric(preset, 8, tests);
  REQUIRE(text.ok());
  auto measured = parse_machine(*text, "measured");
  REQUIRE(measured.ok());
  measured->nodes = 2;
  const auto fabric = Fabric::of(*measured);
  REQUIRE(fabric.ok());
  for (const Group& group : {Group{8, 1}, Group{8, 2}})
    CHECK(fabric->prepare(CollectiveUse::kAllReduce, group).bus_bytes_per_s(268435456) == Approx(469.76e9).epsilon(1e-6));
  CHECK(fabric->provenance(true) == Provenance::kMeasured);
  CHECK(with_measured_fabric(*text, 8, tests).value() == *text);  // again: the same
  const auto four = with_measured_fabric(preset, 4, tests);
  REQUIRE_FALSE(four.ok());
  CHECK(four.error().message == "8 ranks on 1 nodes, where a node of the machine has 4 devices");
}

TEST_CASE("comm measures on every wire, finds nothing wrong, and writes what its import reads") {
  const Scratch scratch;
  for (const std::string transport : {"threads", "processes", "tcp"})
    for (const std::string algorithm : {"auto", "direct", "tree", "hierarchical --per-node 2"}) {
      const std::string file = scratch / "out.json";
      const Output output =
          shardlab_program(scratch, fmt::format("comm --transport {} --ranks 4 {}--algorithm {} -b 64 -e 64Ki -f 32 "
                                                "--iterations 2 --warmup 1 --format csv -o {}",
                                                transport, transport == "threads" ? "" : "-n 2 ", algorithm, file));
      INFO(transport << " " << algorithm << ": " << output.err);
      REQUIRE(output.code == 0);
      const Rows rows = parse_csv(output.out);
      REQUIRE(rows.size() == 1 + 5 * 3);
      int64_t calls = 0;
      for (size_t r = 1; r < rows.size(); ++r)
        for (const char* wrong : {"wrong", "in_place_wrong"}) {
          if (cell(rows, r, wrong).empty()) continue;
          CHECK(cell(rows, r, wrong) == "0");
          ++calls;
        }
      CHECK(calls == (algorithm == "direct" ? 5 + 4 : 4 + 4) * 3);
      const auto read = parse_nccl_tests(slurp(file), file);
      REQUIRE(read.ok());
      CHECK(read->size() == 5);
      CHECK(read->front().collective == "all_reduce");
      CHECK(read->front().ranks == 4);
      CHECK(read->front().nodes == 1);
    }
  const std::string people =
      shardlab_program(scratch, "comm --ranks 2 -b 64 -e 64 --iterations 1 --collectives all_reduce --wide").out;
  CHECK(people.find("wrong elements: those of") != std::string::npos);
  CHECK(people.find("  wrong elements  ") != std::string::npos);
  CHECK(shardlab_program(scratch, "comm --transport tcp --ranks 3 -n 2").code == 2);
  CHECK(shardlab_program(scratch, "comm --transport pigeons").err.find("use threads, processes, tcp") != std::string::npos);
}

TEST_CASE("messages of many pieces, whose ends are not those of a piece, are read whole while they come") {
  const Scratch scratch;
  for (const char* algorithm : {"ring", "direct", "hierarchical --per-node 2"}) {
    const bool levels = std::string_view(algorithm).starts_with("hierarchical");
    const Output output = shardlab_program(scratch, fmt::format("comm --transport tcp --ranks {} -n {} --algorithm {} -b 2000004 "
                                                                "-e 8000016 -f 4 --iterations 1 --warmup 1 --format csv",
                                                                levels ? 4 : 2, 2, algorithm));
    INFO(algorithm << ": " << output.err);
    REQUIRE(output.code == 0);
    const Rows rows = parse_csv(output.out);
    REQUIRE(rows.size() > 2);
    for (size_t r = 1; r < rows.size(); ++r)
      for (const char* wrong : {"wrong", "in_place_wrong"}) CHECK((cell(rows, r, wrong).empty() || cell(rows, r, wrong) == "0"));
  }
}

TEST_CASE("shards of a sweep put together are the sweep") {
  const Scratch scratch;
  const std::string file = scratch.write("sweep.yaml",
                                         "version: 1\nname: parts\nmode: simulate\nmodel: gpt2\nmachine: hgx-h100-ndr\ntrain: "
                                         "{seq_len: 256, global_batch_tokens: 4Ki}\n"
                                         "axes: {layout.dp: [1, 2, 3, 4], layout.zero: [0, 1]}\n");
  const auto run = [&](const std::string& words) { return shardlab_program(scratch, "run " + file + " " + words); };
  REQUIRE(run("--out " + (scratch / "whole")).code == 0);
  std::string parts;
  for (int i = 1; i <= 3; ++i) {
    const std::string part = scratch / fmt::format("part{}", i);
    const Output output = run(fmt::format("--shard {}/3 --out {}", i, part));
    INFO(output.err);
    CHECK((output.code == 0 || output.code == 3));
    parts += part + " ";
  }
  for (int again = 0; again < 2; ++again) {
    const Output merged = shardlab_program(scratch, "merge " + parts + "-o " + (scratch / "merged"));
    INFO(merged.err);
    REQUIRE(merged.code == 0);
    CHECK(slurp(scratch / "merged/results.csv") == slurp(scratch / "whole/results.csv"));
  }
  const Rows rows = parse_csv(slurp(scratch / "merged/results.csv"));
  REQUIRE(rows.size() == 9);
  for (size_t r = 1; r < rows.size(); ++r)
    if (cell(rows, r, "status") == "ok") CHECK(fs::exists(scratch / ("merged/" + cell(rows, r, "case_id") + "/plan.txt")));
  const std::string part1 = scratch / "part1";
  CHECK(
      shardlab_program(scratch, "merge " + part1 + " " + (scratch / "whole") + " -o " + (scratch / "other")).err.find(" is in ") !=
      std::string::npos);
  CHECK(shardlab_program(scratch, "merge " + part1 + " -o " + part1).code == 2);
  CHECK(run("--shard 4/3 --out " + (scratch / "none")).code == 2);
}

}  // namespace shardlab::testing
