#include "tests/runtime/rig.h"
#include "plan/work.h"

#include <fmt/format.h>

#include <cstring>
#include <thread>

#include "plan/base/philox.h"
#include "plan/text.h"
#include "tests/namespaces.h"
#include "tests/test.h"

namespace shardlab::testing {

void run_tasks(Scheduler& scheduler, double timeout_s, int ranks, int streams, const std::function<void(Task&)>& body) {
  Counter done;
  Crew crew(scheduler, timeout_s, [](const TaskSeat& seat) { return fmt::format("stream {}", seat.stream()); });
  for (int r = 0; r < ranks; ++r)
    for (int s = 0; s < streams; ++s) crew.add(r, s);
  crew.start([&](Task& task) {
    body(task);
    done.advance();
  });
  scheduler.drive(crew, done, static_cast<uint64_t>(ranks * streams));
  crew.join();
  crew.throw_if_failed();
}

void run_tasks(int ranks, int streams, const std::function<void(Task&)>& body) {
  const SteadyClock clock;
  ThreadScheduler scheduler(clock, ranks * streams, static_cast<int>(std::thread::hardware_concurrency()));
  run_tasks(scheduler, 60, ranks, streams, body);
}

std::string world_error(const std::function<void()>& body) {
  try {
    body();
  } catch (const WorldError& e) { return e.what(); }
  return "";
}

Rig::Rig(const std::string& text, RunOptions options, const BatchSource* source, bool dry) {
  auto parsed = parse_plan(text);
  INFO((parsed.ok() ? std::string() : to_string(parsed.error())));
  REQUIRE(parsed.ok());
  add_workspaces(*parsed, true);
  placed = place(std::move(parsed).value());
  const kernels::Kernels& kernels = kernels::kernels_for_this_processor();
  transport = std::make_unique<ThreadTransport>(kernels);
  auto made = Session::create(placed, options, *transport, dry ? dry_backend() : cpu_backend(kernels, {.canonical = true}), source);
  INFO((made.ok() ? std::string() : to_string(made.error())));
  REQUIRE(made.ok());
  session = std::move(made).value();
}

std::string plan_head(int pp, int dp, int tp, const std::string& streams) {
  return fmt::format(
      "shardlab plan 1\nname test\nmesh pp={} dp={} cp=1 tp={}\nmicro_batches 1\nsequences_per_micro_batch 1\nperiod 1\nstreams "
      "{}\nstrategies test\n",
      pp, dp, tp, streams);
}

std::vector<float> noise(uint64_t seed, uint32_t tensor, int64_t n) {
  std::vector<float> values(static_cast<size_t>(n));
  for (size_t i = 0; i < values.size(); ++i)
    values[i] = static_cast<float>(static_cast<int32_t>(random_bits({seed, RandomUse::kShuffle, tensor, 0}, i))) * 0x1p-31f;
  return values;
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}

}  // namespace shardlab::testing
