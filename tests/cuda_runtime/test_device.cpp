// What goes wrong with a device: who is named, what is released, what is refused.
#include <fmt/format.h>

#include <map>
#include <set>

#include "plan/device_tracer.h"
#include "plan/named_kernels.h"
#include "plan/text.h"
#include "runtime/cuda/named.h"
#include "runtime/host_counts.h"
#include "strategies/lower.h"
#include "tests/cuda_runtime/queued_kernels.h"
#include "tests/cuda_runtime/rig.h"
#include "tests/namespaces.h"
#include "tests/runtime/rig.h"
#include "tests/strategies/cases.h"
#include "tests/test.h"

namespace shardlab::testing {

namespace {

Case two_ranks() {
  Case c = tiny_case(Family::kLlama);
  c.layout.dp = 2;
  c.layout.bucket_bytes = 16384;
  return c;
}

RunOptions run_options(double timeout_s = 60) {
  RunOptions options;
  options.timeout_s = timeout_s;
  return options;
}

/// Trains one step after `prepare` and says how that failed.
std::string failure(const Case& config, FakeApi& api, const RunOptions& options, const std::function<void()>& prepare) {
  const PlacedPlan placed = lowered(config);
  return world_error([&] {
    FakeRun fake(placed, api, options);
    REQUIRE(fake.session.ok());
    (*fake.session)->initialise_parameters();
    prepare();
    (*fake.session)->step(0);
  });
}

/// Keeps what a back end tells it.
class TracerFake final : public DeviceTracer {
 public:
  bool wants_events() const override { return events; }
  void begin_step(int32_t step, double, double) override { steps.push_back(step); }
  void begin_op(const OpKey& op, double) override {
    const std::lock_guard lock(mutex_);
    ++open[op];
  }
  void end_op(const OpKey& op) override {
    const std::lock_guard lock(mutex_);
    ++closed[op];
  }
  void begin_aside(const OpKey& op) override {
    const std::lock_guard lock(mutex_);
    ++aside[op];
  }
  void op_carried(const OpKey& op, const OpKey& by, double) override {
    const std::lock_guard lock(mutex_);
    carried[op] = by;
  }
  void op_timed(const OpKey& op, double begin_ms, double end_ms) override { timed[op] = {begin_ms, end_ms}; }

  bool events = true;
  std::vector<int32_t> steps;
  std::map<OpKey, int> open, closed, aside;
  std::map<OpKey, OpKey> carried;
  std::map<OpKey, std::array<double, 2>> timed;

 private:
  std::mutex mutex_;
};

}  // namespace

TEST_CASE("what CUDA says of this machine becomes a reason and a remedy") {
  FakeApi none;
  none.driver = 0;
  none.count_status = cuda::kInsufficientDriver;
  REQUIRE(cuda::presence(none).reason == "this machine has no NVIDIA driver");
  REQUIRE(contains(cuda::presence(none).remedy, "--backend cpu"));
  FakeApi old;
  old.driver = 12020;
  old.count_status = cuda::kInsufficientDriver;
  REQUIRE(cuda::presence(old).reason == "the NVIDIA driver is for CUDA 12.2 and this program needs 13.0");
  FakeApi hidden;
  hidden.count_status = cuda::kNoDevice;
  REQUIRE(contains(cuda::presence(hidden).remedy, "CUDA_VISIBLE_DEVICES"));
  FakeApi broken;
  broken.count_status = 719;
  REQUIRE(contains(cuda::presence(broken).reason, "cudaErrorLaunchFailure"));
  FakeApi good(1, 2);
  REQUIRE(cuda::presence(good).usable());

  const auto four = cuda::devices_for(TransportKind::kNccl, 4, cuda::presence(good));
  REQUIRE(four.error().code == ExitCode::kEnvironment);
  REQUIRE(contains(four.error().message, "each of 4 ranks a device, and this machine has 2"));
  REQUIRE(*cuda::devices_for(TransportKind::kNccl, 2, cuda::presence(good)) == std::vector<int>{0, 1});
  REQUIRE(*cuda::devices_for(TransportKind::kOneGpu, 3, cuda::presence(good)) == std::vector<int>{0, 0, 0});
  REQUIRE(cuda::devices_for(TransportKind::kOneGpu, 1, cuda::presence(none)).error().code == ExitCode::kEnvironment);
}

TEST_CASE("a call that fails names the rank, the op and the call, and everything is released") {
  for (const std::string call : {"cudaMemcpyAsync", "cudaEventRecord", "cudaStreamWaitEvent", "cudaStreamQuery"}) {
    INFO(call);
    FakeApi api;
    const std::string text = failure(two_ranks(), api, run_options(), [&] { api.fail(call, 2, 719); });
    INFO(text);
    REQUIRE(contains(text, call + ": cudaErrorLaunchFailure"));
    REQUIRE(contains(text, "rank "));
    if (call != "cudaStreamQuery") REQUIRE(contains(text, " op #"));
    REQUIRE(api.live_allocations() == 0);
    REQUIRE(api.live_streams() == 0);
    REQUIRE(api.live_events() == 0);
  }
}

TEST_CASE("a device without room says what was asked for and what is free") {
  FakeApi api;
  api.capacity = 100'000;
  const std::string text = failure(two_ranks(), api, run_options(), [] {});
  INFO(text);
  REQUIRE(contains(text, "bytes of device memory; device 0 has"));
  REQUIRE(contains(text, "of 100000 free"));
  REQUIRE(api.live_allocations() == 0);
}

TEST_CASE("a kernel that never ends is found by the watchdog, which says how far the stream has come") {
  FakeApi api;
  const std::string text = failure(two_ranks(), api, run_options(3), [&] { api.hang(); });
  INFO(text);
  REQUIRE(contains(text, "the device has worked for "));
  REQUIRE(contains(text, "stream compute has"));
}

TEST_CASE("ops without a kernel are refused when they are bound") {
  const auto refusal = [](const std::string& body) {
    auto parsed = parse_plan(plan_head(1, 1, 1) + body);
    INFO((parsed.ok() ? std::string() : to_string(parsed.error())));
    REQUIRE(parsed.ok());
    const PlacedPlan placed = place(std::move(*parsed));
    FakeApi api;
    FakeRun fake(placed, api, run_options());
    REQUIRE_FALSE(fake.session.ok());
    REQUIRE(fake.session.error().code == ExitCode::kUsage);
    return fake.session.error().message;
  };
  REQUIRE(contains(refusal(R"(
segment s
  bound %x temporary f8e4m3[5]
  bound %y temporary f8e4m3[5]
  add sum (%x, %x) -> (%y)
role 0
  %x temporary f8e4m3[5] persistent
  %y temporary f8e4m3[5] persistent

  call s (x=%x, y=%y)
)"),
                   "has an operand of f8e4m3"));
  REQUIRE(contains(refusal(R"(
segment s
  bound %x temporary f64[5]
  bound %z temporary bf16[5]
  bound %y temporary f32[5]
  add sum (%x, %z) -> (%y)
role 0
  %x temporary f64[5] persistent
  %z temporary bf16[5] persistent
  %y temporary f32[5] persistent

  call s (x=%x, z=%z, y=%y)
)"),
                   "mixes element types"));
  REQUIRE(contains(refusal(R"(
segment s
  bound %x temporary f32[5]
  bound %y temporary i8[5]
  copy cast (%x) -> (%y)
role 0
  %x temporary f32[5] persistent
  %y temporary i8[5] persistent

  call s (x=%x, y=%y)
)"),
                   "converts f32 to i8"));
  REQUIRE(contains(refusal(R"(
segment s
  bound %x temporary f32[5]
  kernel route (%x) -> (%x) name=nonesuch
role 0
  %x temporary f32[5] persistent

  call s (x=%x)
)"),
                   "`s route kernel` asks for the kernel `nonesuch`, which the CUDA back end lacks"));
}

TEST_CASE("a plan that was lowered for the processor has too little workspace for a GPU's kernels, and is refused") {
  auto plan = lower(two_ranks());
  REQUIRE(plan.ok());
  const PlacedPlan placed = place(std::move(*plan));
  FakeApi api;
  FakeRun fake(placed, api, run_options());
  REQUIRE_FALSE(fake.session.ok());
  REQUIRE(contains(fake.session.error().message, "needs 33554688 bytes of workspace on a GPU, and its stream has "));
  REQUIRE(fake.session.error().hint == "lower the case with backend: cuda");
}

TEST_CASE("a tracer hears of every op that works, by its key; carried ones of who carried them") {
  for (const bool events : {true, false}) {
    const PlacedPlan placed = lowered(two_ranks());
    FakeApi api;
    TracerFake tracer;
    tracer.events = events;
    RunOptions options = run_options();
    options.tracer = &tracer;
    constexpr int kSteps = 2;
    {
      FakeRun fake(placed, api, options);
      REQUIRE(fake.session.ok());
      (*fake.session)->initialise_parameters();
      for (int step = 0; step < kSteps; ++step) (*fake.session)->step(step);
    }
    REQUIRE(tracer.steps == std::vector<int32_t>{0, 1});
    size_t ops = 0, collectives = 0;
    for (const Instruction& i : placed.programs[0].instructions) {
      if (i.kind != Instruction::Kind::kRun) continue;
      for (int step = 0; step < kSteps; ++step)
        for (int rank = 0; rank < 2; ++rank) {
          const OpKey key{step, rank, i.id};
          const bool carried = rank == 1 && std::holds_alternative<Collective>(i.op->work);
          INFO(describe(*placed.plan, i));
          REQUIRE(tracer.open[key] == (carried ? 0 : 1));
          REQUIRE(tracer.closed[key] == (carried ? 0 : 1));
          REQUIRE(tracer.timed.count(key) == (carried || !events ? 0u : 1u));
          if (tracer.timed.count(key) > 0) REQUIRE(tracer.timed[key][0] < tracer.timed[key][1]);
          if (carried) REQUIRE(tracer.carried.at(key) == OpKey{step, 0, i.id});
          ops += 1;
          collectives += carried;
        }
    }
    REQUIRE(ops > 0);
    REQUIRE(tracer.carried.size() == collectives);
    REQUIRE(collectives > 0);
  }
}

TEST_CASE("copies of counts to the host are told apart from the op, which another rank may carry") {
  Case c = tiny_case(Family::kLlama);
  c.model.experts = {.count = 4, .top_k = 2, .ffn = 24};
  c.layout.dp = c.layout.ep = 2;
  const PlacedPlan placed = lowered(c);
  const auto counts =
      host_counts(*placed.plan, placed.programs[0], RowCounting(*placed.plan, placed.plan->roles[0], placed.programs[0]));
  REQUIRE(counts.ok());
  FakeApi api;
  TracerFake tracer;
  RunOptions options = run_options();
  options.tracer = &tracer;
  FakeRun fake(placed, api, options);
  REQUIRE(fake.session.ok());
  (*fake.session)->initialise_parameters();
  (*fake.session)->step(0);
  std::map<OpKey, int> want;
  int carried = 0;
  for (const int rank : {0, 1})
    for (const CountCopy& copy : counts->copies) {
      const OpKey key{0, rank, copy.instruction};
      want[key] = 1;
      REQUIRE(tracer.closed[key] == tracer.open[key] + 1);
      carried += static_cast<int>(tracer.carried.count(key));
    }
  REQUIRE(tracer.aside == want);
  REQUIRE(carried == 2);  // of two layers, on the rank that does not lead
}

TEST_CASE("kernels by name: the CUDA back end binds those that the table says it has") {
  std::set<std::string_view> bound, listed;
  for (const std::string_view name : runtime::cuda::named_on_device()) bound.insert(name);
  for (const NamedKernel& row : named_kernels())
    if (row.on_gpu) listed.insert(row.name);
  REQUIRE(bound == listed);
}

}  // namespace shardlab::testing
