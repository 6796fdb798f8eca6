// What a file promises is bounded before there is room for it.
#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <sstream>

#include "plan/base/json_depth.h"
#include "plan/pipeline_schedule.h"
#include "profiler/gpu/activity.h"
#include "profiler/trace_reader.h"
#include "runtime/manifest.h"
#include "tests/namespaces.h"
#include "tests/test.h"

using namespace shardlab;
using namespace shardlab::testing;

namespace {

constexpr const char* kHeader =
    R"({{"version": 1, "producer": "cpu", "world_size": {}, "steps": {}, "streams": ["compute"], "dropped": 0, "recorder_overhead_s": 0}})";

std::string trace_refusal(const std::string& text) {
  std::istringstream lines(text);
  const auto trace = read_trace_lines(lines, "t");
  return trace.ok() ? "read" : to_string(trace.error());
}

std::string manifest_refusal(const std::string& entries) {
  const std::string text = "shardlab checkpoint 1\nsteps 2\n" + entries;
  const auto manifest = parse_manifest(text + manifest_end(text), "m");
  return manifest.ok() ? "read" : manifest.error().message;
}

}  // namespace

TEST_CASE("depth of JSON counts brackets outside strings") {
  CHECK(json_depth("") == 0);
  CHECK(json_depth("[{\"a\": [1]}, []]") == 3);
  CHECK(json_depth(R"({"a": "[[[[", "b": "\"[[", "c": "\\"})") == 1);
  CHECK(json_depth(std::string(200'000, '[')) == 200'000);
}

TEST_CASE("a trace has the ranks, steps and instructions that it can have") {
  const auto header = [](int64_t ranks, int64_t steps) { return fmt::format(fmt::runtime(kHeader), ranks, steps) + "\n"; };
  CHECK(trace_refusal(header(2, 3)) == "read");
  CHECK(trace_refusal(header(2'000'000'000, 2'000'000'000)).find("2000000000 ranks and 2000000000 steps, where a trace has") !=
        std::string::npos);
  CHECK(trace_refusal(header(-1, -1)).find("-1 ranks and -1 steps") != std::string::npos);
  const auto line = [&](int rank, int step, int instruction) {
    return header(2, 3) +
           fmt::format(
               R"({{"kind": "op", "rank": {}, "step": {}, "begin": 0, "end": 1, "instruction": {}, "op": "x", "stream": "compute", "peer_wait": 0, "sent_bytes": 0}})",
               rank, step, instruction);
  };
  CHECK(trace_refusal(line(2, 0, 0)).find("rank 2 and step 0 of a trace of 2 ranks and 3 steps") != std::string::npos);
  CHECK(trace_refusal(line(0, -1, 0)).find("rank 0 and step -1 of a trace") != std::string::npos);
  CHECK(trace_refusal(line(0, 0, -7)).find("instruction -7") != std::string::npos);
  const std::string one = line(0, 0, 0), said = "\"dropped\": 0";
  CHECK(trace_refusal(one) == "read");
  const auto promising = [&](const char* events) { return std::string(one).replace(one.find(said), said.size(), said + events); };
  CHECK(trace_refusal(promising(", \"events\": 1")) == "read");
  CHECK(trace_refusal(promising(", \"events\": 0")).find("the trace has more than 0 events") != std::string::npos);
  CHECK(trace_refusal(promising(", \"events\": 2")).find("it has 1 of 2 events") != std::string::npos);
  CHECK(trace_refusal(std::string(17 << 20, 'x')).find("this line has more than 16777216 bytes") != std::string::npos);
}

TEST_CASE("numbers of traces and of a GPU's records are whole and fit") {
  const std::string trace = fmt::format(fmt::runtime(kHeader), 2, 3) + "\n";
  const auto with = [](std::string text, const std::string& what, const std::string& by) {
    return text.replace(text.find(what), what.size(), by);
  };
  CHECK(trace_refusal(with(trace, "\"steps\": 3", "\"steps\": 4e85")).find("`4e+85`, where a whole number") != std::string::npos);
  CHECK(trace_refusal(with(trace, "\"world_size\": 2", "\"world_size\": 4294967298")).find("`4294967298`, where") != std::string::npos);
  const auto records = [](const char* release) {
    return fmt::format(R"({{"version":1,"dropped":0,"unknown":0,"unreadable":0,"names":[]}}{}{{"allocation":1,"release":{},"time":8,"address":18446744073709551615,"bytes":1,"device":0}})", "\n", release);
  };
  CHECK(parse_activity_lines(records("true")).ok());
  const auto refused = parse_activity_lines(with(records("true"), "\"device\":0", "\"device\":4e85"));
  REQUIRE_FALSE(refused.ok());
  CHECK(refused.error().message.find("`4e+85`, where a whole number of at most 32 bits") != std::string::npos);
}

TEST_CASE("a checkpoint's tensors lie in its file") {
  CHECK(manifest_refusal("data a\ntensor w value 2x3 0 24 0\n") == "read");
  CHECK(manifest_refusal("data a\ntensor w value 4294967296x4294967296x4 0 0 0\n").find("says no tensor") != std::string::npos);
  CHECK(manifest_refusal("data a\ntensor w value 2x3 -8 24 0\n").find("says no tensor") != std::string::npos);
  CHECK(manifest_refusal("data a\ntensor w value 2x3 0 23 0\n").find("says no tensor") != std::string::npos);
  CHECK(manifest_refusal("data ../a\n") == "checkpoint m: its file of tensors is `../a`, of another folder");
  // 4 TiB that the file does not have are not allocated.
  const int file = ::open("/dev/null", O_RDONLY);
  const auto tensor =
      read_tensor(file, "f", {"w", "value"}, {.shape = {1 << 20, 1 << 20}, .offset = 0, .bytes = int64_t{1} << 42, .checksum = 0});
  ::close(file);
  REQUIRE_FALSE(tensor.ok());
  CHECK(tensor.error().message == "checkpoint f: the file ends within `w` value");
}

TEST_CASE("a schedule is checked in time that grows with its slots, in whatever order its stages stand") {
  constexpr int kStages = 200'000;
  std::string text;  // each stage waits for the one below it
  for (int stage = 0; stage < kStages; ++stage) text += fmt::format("{0}F0,{0}B0\n", kStages - 1 - stage);
  alarm(60);  // the signal ends the test
  const auto schedule = from_csv(text, "s.csv");
  alarm(0);
  REQUIRE(schedule.ok());
  CHECK(schedule->stages == kStages);
  CHECK(schedule->placement == PartPlacement::kListed);
}
