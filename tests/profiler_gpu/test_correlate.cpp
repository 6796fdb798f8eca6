// From records to ops, and nothing lost on the way without being counted.
#include "tests/namespaces.h"
#include "tests/profiler_gpu/hand_made.h"
#include "tests/test.h"

namespace shardlab::testing::of_correlate {

namespace {

constexpr int64_t kMs = 1'000'000;

/// Steps 4 and 5 of two ranks: 10 ms each, at 1 s and 1.02 s of the session's clock, which here is the tracer's.
HostSide two_steps() {
  HostSide host;
  host.world_size = 2;
  host.steps = {host_step(4, 1.0, 0.010, 2), host_step(5, 1.02, 0.010, 2)};
  return host;
}

Correlated correlated(const LogWriter& writer, const HostSide& host) {
  const Expanded e = reduce_plan();
  const std::vector<ClockPair> same{{0, 0, 0}};
  return correlate(*e.plan, e.programs, host, writer.log, ClockAlignment(same, {}));
}

}  // namespace

TEST_CASE("an op's interval is the hull of its device work, found by id alone", "[profiler_gpu]") {
  LogWriter w{.origin_ns = 1000 * kMs};
  // Names say nothing: a reduction called "fill" and a fill called "nccl".
  w.kernel({4, 0, 0}, "ncclDevKernel_AllReduce", 1 * kMs, 2 * kMs, 3 * kMs);
  w.kernel({4, 0, 0}, "second half", 1 * kMs, 3 * kMs + 500'000, 4 * kMs);
  w.kernel({4, 1, 1}, "fill", 1 * kMs, 5 * kMs, 6 * kMs, 8);
  const Correlated c = correlated(w, two_steps());
  REQUIRE(c.ops.size() == 2);
  CHECK(c.ops[0].op == OpKey{4, 0, 0});
  CHECK(c.ops[0].begin == Approx(1.002).epsilon(1e-12));
  CHECK(c.ops[0].end == Approx(1.004).epsilon(1e-12));
  CHECK(c.ops[1].op == OpKey{4, 1, 1});
  CHECK(c.accounting.launches == 3);
  CHECK(c.accounting.recorded == 3);
  CHECK(c.accounting.timed == 3);
  CHECK(balanced(c.accounting));
  CHECK(unexplained(c.accounting).empty());
  REQUIRE(c.details.size() == 3);
  CHECK(c.lanes == std::vector<std::string>{"gpu 0 stream 7", "gpu 0 stream 8"});
  CHECK(c.details[2].instruction == 1);
  CHECK(c.details[2].begin == Approx(0.005));
}

TEST_CASE("every record that is no op's time is counted as what it is", "[profiler_gpu]") {
  LogWriter w{.origin_ns = 1000 * kMs};
  w.kernel({4, 0, 0}, "good", 1 * kMs, 2 * kMs, 3 * kMs);
  w.kernel({4, 0, 2}, "no times", 1 * kMs, -w.origin_ns, -w.origin_ns);
  w.stray("between the steps", 11 * kMs, 12 * kMs, 13 * kMs);
  w.kernel({4, 0, 2}, "of step 4 but in step 5", 9 * kMs, 22 * kMs, 23 * kMs);
  w.kernel({3, 0, 0}, "of a step that was not kept", 1 * kMs, 4 * kMs, 5 * kMs);
  w.stray("of no op", 1 * kMs, 6 * kMs, 7 * kMs);
  w.kernel({4, 0, 99}, "of an op that the plan lacks", 1 * kMs, 7 * kMs, 8 * kMs);
  w.stray("before everything", -50 * kMs, -49 * kMs, -48 * kMs);
  const TraceAccounting a = correlated(w, two_steps()).accounting;
  CHECK(a.device_records == 8);
  CHECK(a.timed == 1);
  CHECK(a.zero_timestamp == 1);
  CHECK(a.out_of_range == 4);
  CHECK(a.unclaimed == 2);
  CHECK(a.launches == 8);
  CHECK(a.lost == 0);
  CHECK(balanced(a));
  const auto sentences = unexplained(a);
  REQUIRE(sentences.size() == 2);
  CHECK(sentences[0] == "1 of 8 records have lost their times");
  CHECK(sentences[1] == "2 of 8 records belong to no op");
}

TEST_CASE("an op that ends after the host thought the step over belongs to it all the same", "[profiler_gpu]") {
  LogWriter w{.origin_ns = 1000 * kMs};
  w.kernel({4, 0, 2}, "late", 9 * kMs, 9 * kMs, 14 * kMs);
  const HostSide host = two_steps();
  Correlated c = correlated(w, host);
  CHECK(c.accounting.timed == 1);
  HostSide launched = host;
  launched.launches = {{{4, 0, 2}, 1.009}};
  const Expanded e = reduce_plan();
  const Trace t = assemble(*e.plan, e.programs, launched, c.ops, c.accounting);
  CHECK(t.step_interval[0][1] == Approx(0.014));
  CHECK(t.step_interval[1][1] == Approx(0.010));  // the other rank's
}

TEST_CASE("launches are records and drops; what neither explains is said", "[profiler_gpu]") {
  LogWriter w{.origin_ns = 1000 * kMs};
  for (int i = 0; i < 5; ++i) w.kernel({4, 0, 0}, "k", i, 2 * kMs + i, 2 * kMs + i + 1);
  w.log.work.erase(w.log.work.begin() + 1, w.log.work.begin() + 3);
  w.log.dropped = 2;
  TraceAccounting a = correlated(w, two_steps()).accounting;
  CHECK(a.launches == 5);
  CHECK(a.recorded == 3);
  CHECK(a.lost == 2);
  CHECK(balanced(a));
  REQUIRE(unexplained(a).size() == 1);
  CHECK(unexplained(a)[0] == "the tracer dropped 2 records: trace fewer steps");

  w.log.dropped = 0;
  a = correlated(w, two_steps()).accounting;
  REQUIRE(unexplained(a).size() == 1);
  CHECK(unexplained(a)[0] == "2 of 5 launches have no record, and only 0 records were dropped");

  w.log.unreadable = 1;
  REQUIRE(unexplained(correlated(w, two_steps()).accounting).size() == 2);
  CHECK(unexplained(correlated(w, two_steps()).accounting)[1] == "1 buffers of records could not be read to their end");
}

TEST_CASE("a driver call within a runtime call is the same launch, whichever id the device's record has", "[profiler_gpu]") {
  for (const bool inner_id : {false, true}) {
    LogWriter w{.origin_ns = 1000 * kMs};
    const uint32_t outer = w.kernel({4, 0, 0}, "k", 10, 2 * kMs, 3 * kMs);
    HostCall inner = w.log.calls.back();
    inner.begin_ns += 1, inner.end_ns -= 1, inner.correlation = 77, inner.name = w.log.names.number("cuLaunchKernel");
    w.log.calls.insert(w.log.calls.begin(), inner);
    w.log.calls.push_back({w.origin_ns + 10, w.origin_ns + 12, 78, 2, inner.name});  // another thread's at the same time
    w.log.calls.push_back({w.origin_ns + 20, w.origin_ns + 22, 79, 1, w.log.names.number("cudaEventRecord_v3020")});
    if (inner_id) w.log.work[0].correlation = 77;
    const TraceAccounting a = correlated(w, two_steps()).accounting;
    CHECK(outer == 1);
    CHECK(a.launches == 2);
    CHECK(a.recorded == 1);
    CHECK(a.lost == 1);
    CHECK(balanced(a));
  }
}

TEST_CASE("only calls that hand work over are launches", "[profiler_gpu]") {
  for (const char* name : {"cudaLaunchKernel_v7000", "cudaLaunchKernelExC_v11060", "cuLaunchKernelEx", "cudaMemcpyAsync_v3020",
                           "cuMemcpyDtoHAsync_v2", "cudaMemsetAsync_ptsz_v7000", "cuLaunchCooperativeKernel"})
    CHECK(hands_work_over(name));
  for (const char* name :
       {"cudaGraphLaunch_v10000", "cudaMalloc_v3020", "cuStreamSynchronize", "cudaFree_v3020", "cudaLaunchHostFunc_v10000", ""})
    CHECK_FALSE(hands_work_over(name));
}

TEST_CASE("synchronisations and overheads stand beside the ops, in their step", "[profiler_gpu]") {
  LogWriter w{.origin_ns = 1000 * kMs};
  w.log.synchronisations.push_back({w.origin_ns + 9 * kMs, w.origin_ns + 10 * kMs, 1, SynchronisationRecord::kNoStream,
                                    w.log.names.number("context synchronize")});
  w.log.overheads.push_back({w.origin_ns + 21 * kMs, w.origin_ns + 22 * kMs, w.log.names.number("buffer flush")});
  w.log.overheads.push_back({w.origin_ns + 15 * kMs, w.origin_ns + 16 * kMs, w.log.names.number("buffer flush")});
  const Correlated c = correlated(w, two_steps());
  REQUIRE(c.details.size() == 2);  // the last lies between the steps
  CHECK(c.details[0].rank == -1);
  CHECK(c.details[0].step == 0);
  CHECK(c.names[static_cast<size_t>(c.details[1].name)] == "buffer flush");
  CHECK(c.details[1].step == 1);
  CHECK(c.details[1].begin == Approx(0.001));
}

TEST_CASE("peaks of allocated memory, by space", "[profiler_gpu]") {
  using Space = AllocationRecord::Space;
  const std::vector<AllocationRecord> records{{Space::kDevice, false, 30, 0xb, 50, 0},  {Space::kDevice, false, 10, 0xa, 100, 0},
                                              {Space::kPinned, false, 15, 0x1, 7, 0},   {Space::kDevice, true, 20, 0xa, 0, 0},
                                              {Space::kDevice, true, 25, 0xdead, 9, 0}, {Space::kDevice, false, 40, 0xb, 60, 0}};
  const auto peak = peak_allocated(records);
  CHECK(peak[static_cast<size_t>(Space::kDevice)] == 100);
  CHECK(peak[static_cast<size_t>(Space::kPinned)] == 7);
  CHECK(peak[static_cast<size_t>(Space::kManaged)] == 0);
}

TEST_CASE("a log survives its text, and damaged text is refused by line", "[profiler_gpu]") {
  LogWriter w{.origin_ns = 1'763'700'000'000'000'000};
  w.kernel({4, 1, 2}, "kernel \"quoted\"", 1, 2, 3);
  w.log.work[0].grid = {4, 5, 6};
  w.log.allocations.push_back({AllocationRecord::Space::kManaged, true, 9, 0xffff'ffff'ffff'0000, 12, 1});
  w.log.synchronisations.push_back({1, 2, 3, SynchronisationRecord::kNoStream, 0});
  w.log.overheads.push_back({1, 2, 1});
  w.log.dropped = 3, w.log.unknown = 2, w.log.unreadable = 1;
  const std::string text = to_lines(w.log);
  const auto read = parse_activity_lines(text);
  REQUIRE(read.ok());
  CHECK(to_lines(*read) == text);
  CHECK(read->links[0].id == op_id({4, 1, 2}));

  const auto refusal = [&](const std::string& damaged) { return to_string(parse_activity_lines(damaged).error()); };
  CHECK(contains(refusal(text + "{\"work\":7}\n"), "line 8: these device records are damaged: no kind of this number"));
  CHECK(contains(refusal(text + "{\"overhead\":99,\"begin\":1,\"end\":2}\n"), "no name of this number"));
  CHECK(contains(refusal(text.substr(0, text.size() - 4)), "line 7"));
  CHECK(contains(refusal(""), "there are no device records"));
}

}  // namespace shardlab::testing::of_correlate
