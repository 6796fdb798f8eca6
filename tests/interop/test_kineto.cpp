// Traces as PyTorch's profiler writes them, held to the figures that HolisticTraceAnalysis makes of such a file.
#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "interop/kineto.h"
#include "plan/text.h"
#include "tests/namespaces.h"
#include "tests/test.h"

namespace shardlab::testing {
namespace {

using Json = nlohmann::json;

/// Compute, a copy to the host, and a sum over ranks on a stream of its own.
constexpr const char* kPlan = R"(shardlab plan 1
name "of two"
mesh dp=2
streams compute comm
comm grads axes dp

segment s
  bound %x activation f32[16]
  bound %g gradient f32[16] dp:P
  bound %z activation f32[16]
  bound %h activation f32[16] host
  local %sum gradient f32[16] view %g

  copy a (%x) -> (%g)
  all_reduce reduce (%g) -> (%sum) comm=grads @comm
  copy b (%x) -> (%z)
  copy out (%z) -> (%h)

role 0
  %x activation f32[16] persistent
  %g gradient f32[16] dp:P persistent
  %z activation f32[16] persistent
  %h activation f32[16] host persistent
  call s (x=%x, g=%g, z=%z, h=%h)
)";

struct Traced {
  Plan plan;
  std::vector<Program> programs;
  Trace trace;
};

/// Two steps of each rank. Of the second the launches are known.
Traced hand_made() {
  auto plan = parse_plan(kPlan, "hand.plan");
  INFO((plan.ok() ? std::string() : to_string(plan.error())));
  REQUIRE(plan.ok());
  Traced t{std::move(*plan), {}, {}};
  t.programs.push_back(expand_program(t.plan, 0));
  t.trace.producer = "hand";
  t.trace.world_size = 2, t.trace.steps = 2;
  t.trace.streams = {"compute", "comm"};
  t.trace.step_interval = {{0, 0.010}, {0, 0.010}, {0, 0.012}, {0, 0.011}};
  std::map<std::string, int32_t> id;
  for (const Instruction& i : t.programs[0].instructions)
    if (i.op != nullptr) id[i.op->label] = i.id;
  for (int rank = 0; rank < 2; ++rank)
    for (int step = 0; step < 2; ++step) {
      const double queued = step == 0 ? -1 : 0.0005;
      const auto add = [&](const std::string& label, int32_t stream, double begin, double end, double peer_wait = 0) {
        t.trace.events.push_back({TraceEvent::Kind::kOp, rank, id.at(label), stream, step, begin, end, peer_wait, 0, queued});
      };
      add("a", 0, 0.001, 0.003);
      t.trace.events.push_back({TraceEvent::Kind::kWait, rank, id.at("reduce"), 1, step, 0, 0.003, 0, 0, -1});
      add("b", 0, 0.0030004, 0.0050004);
      add("reduce", 1, 0.0035, 0.0075, rank == 0 ? 0.001 : 0);
      add("out", 0, 0.008, 0.009);
    }
  return t;
}

Json parsed(const Traced& t, int rank) { return Json::parse(interop::to_kineto_json(t.plan, t.programs, t.trace, rank)); }

using Spans = std::vector<std::pair<int64_t, int64_t>>;

int64_t covered(Spans spans) {
  std::ranges::sort(spans);
  int64_t sum = 0, until = INT64_MIN;
  for (const auto& [begin, end] : spans) {
    if (end > until) sum += end - std::max(begin, until);
    until = std::max(until, end);
  }
  return sum;
}

TEST_CASE("a file a rank: kernels by stream with their launches, and steps") {
  const Traced t = hand_made();
  CHECK(interop::traced_ranks(t.trace) == std::vector<int>{0, 1});
  for (const int rank : interop::traced_ranks(t.trace)) {
    const Json file = parsed(t, rank);
    CHECK(file["distributedInfo"]["rank"] == rank);
    CHECK(file["distributedInfo"]["world_size"] == 2);
    CHECK(file["plan"] == "of two");
    std::map<int64_t, int64_t> launched;  // by correlation
    Spans steps;
    size_t kernels = 0;
    for (const Json& e : file["traceEvents"]) {
      REQUIRE(e["ts"].is_number_integer());  // fractions would be rounded away from each kernel
      if (e["ph"] == "M") continue;
      REQUIRE(e["dur"].is_number_integer());
      CHECK(e["dur"] >= 0);
      if (e["cat"] == "user_annotation") steps.push_back({e["ts"], e["ts"].get<int64_t>() + e["dur"].get<int64_t>()});
      if (e["cat"] == "cuda_runtime") launched[e["args"]["correlation"]] = e["ts"];
      if (e["cat"] == "kernel" || e["cat"] == "gpu_memcpy") {
        ++kernels;
        CHECK(e["args"]["stream"] == e["tid"]);
        CHECK(e["args"]["stream"] >= 7);
      }
    }
    CHECK(steps == Spans{{0, 10000}, {10000, 22000}});
    CHECK(kernels == 8);
    for (const Json& e : file["traceEvents"]) {
      if (e["ph"] == "M" || (e["cat"] != "kernel" && e["cat"] != "gpu_memcpy")) continue;
      const int64_t begin = e["ts"], launch = launched.at(e["args"]["correlation"]);
      if (begin < 10000)
        CHECK(launch == 0);  // not known: the begin of the step
      else
        CHECK(launch == begin - 500);
    }
  }
}

TEST_CASE("HolisticTraceAnalysis' breakdown of the file is that of the trace") {
  const Traced t = hand_made();
  for (const int rank : {0, 1}) {
    Spans all, compute;
    std::map<std::string, int> names;
    const Json file = parsed(t, rank);
    for (const Json& e : file["traceEvents"]) {
      if (e["ph"] == "M" || !e.contains("args") || !e["args"].contains("stream")) continue;
      const std::string name = e["name"];
      ++names[name];
      const int64_t begin = e["ts"], end = begin + e["dur"].get<int64_t>();
      all.emplace_back(begin, end);
      if (name.find("ncclKernel") == std::string::npos && name.find("Memcpy") == std::string::npos)
        compute.emplace_back(begin, end);
    }
    CHECK(names ==
          std::map<std::string, int>{{"copy a", 2}, {"copy b", 2}, {"ncclKernel_all_reduce reduce", 2}, {"Memcpy DtoH (out)", 2}});
    // Their words: kernel time from the first begin to the last end, compute the union of compute kernels, idle what no kernel covers.
    double ours = 0, busy = 0;
    for (int step = 0; step < 2; ++step) {
      const Breakdown b = analyse(t.plan, t.programs, t.trace, rank, step);
      ours += b.compute_s;
      busy += b.compute_s + b.exposed_comm_s + b.exposed_copy_s;
    }
    CHECK(static_cast<double>(covered(compute)) == Approx(1e6 * ours).margin(4));
    CHECK(static_cast<double>(covered(all)) == Approx(1e6 * busy).margin(8));
    CHECK(covered(compute) == 8000);  // a and b touch, and go on touching
    CHECK(covered(all) == 2 * (6500 + 1000));
  }
}

TEST_CASE("what an executor does between ops is named as it is in other forms of traces") {
  auto plan = parse_plan(R"(shardlab plan 1
name "of one"
streams compute

segment s
  bound %x activation f32[16]
  local %t activation f32[16]

  alloc %t
  copy a (%x) -> (%t)
  copy b (%t) -> (%x)
  free %t

role 0
  %x activation f32[16] persistent
  call s (x=%x)
)",
                         "one.plan");
  INFO((plan.ok() ? std::string() : to_string(plan.error())));
  REQUIRE(plan.ok());
  Traced t{std::move(*plan), {}, {}};
  t.programs.push_back(expand_program(t.plan, 0));
  t.trace.world_size = t.trace.steps = 1;
  t.trace.streams = {"compute"};
  t.trace.step_interval = {{0, 0.010}};
  double at = 0;
  for (const Instruction& i : t.programs[0].instructions) {
    t.trace.events.push_back({TraceEvent::Kind::kOp, 0, i.id, 0, 0, at, at + 0.001, 0, 0, -1});
    at += 0.001;
  }
  std::vector<std::string> kernels;
  const Json file = parsed(t, 0);
  for (const Json& e : file["traceEvents"])
    if (e["ph"] == "X" && e["cat"] == "kernel") kernels.push_back(e["name"]);
  CHECK(kernels == std::vector<std::string>{"alloc", "copy a", "copy b", "free"});
}

}  // namespace
}  // namespace shardlab::testing
