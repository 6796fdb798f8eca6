// Tier E3: workers that run apart come to the bits of an emulation in one process that is fed with the log of arrivals; so does a
// replay; staleness 0 is the synchronous parameter server, and that is data parallelism. Interleavings are drawn by a seeded
// scheduler under a virtual clock: no test depends on how fast a thread runs, and a deadlock is found without waiting.
#include <fmt/format.h>

#include <bit>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "kernels/kernels.h"
#include "plan/base/world_error.h"
#include "plan/memory.h"
#include "plan/wire.h"
#include "runtime/backend.h"
#include "runtime/crew.h"
#include "runtime/session.h"
#include "runtime/thread_transport.h"
#include "strategies/lower.h"
#include "tests/namespaces.h"
#include "tests/numerics/matrix.h"
#include "tests/numerics/running.h"
#include "tests/numerics/served.h"
#include "tests/numerics/train_case.h"
#include "tests/test.h"

namespace shardlab::testing {
namespace {

using testing::same_bits;
using testing::tokens_of;

constexpr int kSteps = 6;

Case served_case(const std::string& subject, int dp, int staleness) {
  for (const testing::Subject& s : testing::subjects()) {
    if (s.name != subject) continue;
    Case c;
    c.layout.dp = c.layout.parameter_server.servers = dp;
    c.layout.bucket_bytes = dp == 2 ? 0 : 20000;
    c.canonical = true;
    c = testing::rows_of(s, std::span(&c, 1)).at(0);
    c.train.grad_norm = false;
    if (c.train.optimizer == Optimizer::kSgd) c.train.learning_rate.peak = 0.25f;
    c.layout.parameter_server.staleness = staleness;
    c.name += fmt::format(" staleness {}", staleness);
    return c;
  }
  FAIL("no subject " << subject);
  return {};
}

/// Text that ends the world when a certain sequence is asked for.
class BrokenText final : public BatchSource {
 public:
  BrokenText(int64_t vocab, int64_t breaks_at) : text_(vocab), breaks_at_(breaks_at) {}
  void sequence(int64_t number, std::span<int32_t> out) const override {
    if (number == breaks_at_) throw WorldError("the text is gone", "");
    text_.sequence(number, out);
  }

 private:
  testing::RandomText text_;
  int64_t breaks_at_;
};

std::vector<ArrivalLog> copy_of(std::span<const ArrivalLog> logs) { return {logs.begin(), logs.end()}; }

/// A case in execution, its threads driven by a seed, or free with seed 0.
struct ServedRun {
  ServedRun(const Case& c, uint64_t seed, std::vector<ArrivalLog> replay = {}, int64_t breaks_at = -1)
      : config(c), source(c.model.vocab, breaks_at), transport(kernels::kernels_for_this_processor()), scheduler(seed) {
    auto plan = lower(config);
    INFO(config.name << (plan.ok() ? "" : to_string(plan.error())));
    REQUIRE(plan.ok());
    placed = place(std::move(*plan));
    RunOptions options;
    options.seed = config.train.seed;
    options.learning_rate = config.train.learning_rate;
    options.timeout_s = 60;
    options.poison = true;
    if (seed > 0) options.scheduler = &scheduler;
    options.staleness = config.layout.parameter_server.staleness;
    options.replay = std::move(replay);
    made = Session::create(placed, options, transport, cpu_backend(kernels::kernels_for_this_processor(), {config.canonical, 1}), &source);
    if (!made->ok()) return;
    session = std::move(**made);
    session->initialise_parameters();
  }

  std::map<std::string, std::vector<float>> parameters() const {
    std::map<std::string, std::vector<float>> values;
    for (const ModelParameter& p : parameters_of(config.model)) {
      auto value = session->parameter(p.name);
      REQUIRE(value.ok());
      values[p.name] = std::move(value->values);
    }
    return values;
  }

  Case config;
  BrokenText source;
  ThreadTransport transport;
  SeededScheduler scheduler;
  PlacedPlan placed;
  std::optional<Result<std::unique_ptr<Session>>> made;
  std::unique_ptr<Session> session;
};

/// Every gradient once and in its worker's order, and none applied that was further ahead of the slowest than it may be.
void require_bounded(std::span<const ArrivalLog> logs, const Case& c, int64_t steps) {
  for (const ArrivalLog& log : logs)
    for (const BucketArrivals& bucket : log.buckets) {
      std::vector<int64_t> applied(static_cast<size_t>(c.layout.dp));
      for (const auto& update : bucket.updates)
        for (const Arrival& a : update) REQUIRE(a.step == applied[static_cast<size_t>(a.worker)]++);
      for (const int64_t n : applied) REQUIRE(n == steps);
    }
}

}  // namespace

TEST_CASE("workers apart: the bits of the emulation that is fed with the log, and of the replay") {
  int64_t older = 0;
  uint64_t seed = 1;
  for (const char* subject : {"llama sgd", "llama adamw"})
    for (const int dp : {2, 4})
      for (const int staleness : {0, 1, 3}) {
        const Case config = served_case(subject, dp, staleness);
        INFO(config.name);
        ServedRun run(config, ++seed);
        REQUIRE(run.made->ok());
        std::vector<StepResult> results = run.session->run(0, kSteps - 2);  // two rounds: logs and counts go on
        for (StepResult& r : run.session->run(kSteps - 2, 2)) results.push_back(std::move(r));
        const std::vector<ArrivalLog> logs = copy_of(run.session->arrivals());
        require_bounded(logs, config, kSteps);

        testing::ServedEmulation emulation(config, [&](int64_t step) { return tokens_of(config, step); });
        REQUIRE(emulation.run(logs, kSteps));
        const auto parameters = run.parameters();
        for (size_t p = 0; p < emulation.parameters().size(); ++p) {
          INFO(emulation.parameters()[p].name);
          REQUIRE(same_bits(parameters.at(emulation.parameters()[p].name), emulation.value(p)));
        }
        for (int step = 0; step < kSteps; ++step)
          for (int w = 0; w < dp; ++w)
            REQUIRE(static_cast<float>(*results[static_cast<size_t>(step)].loss_by_rank[static_cast<size_t>(w)]) ==
                    emulation.loss(w, step));
        REQUIRE(results.front().loss != results.back().loss);

        const StalenessFigures figures = *run.session->staleness();
        CHECK(figures.gradients == static_cast<int64_t>(dp * dp * kSteps) * static_cast<int64_t>(logs.front().buckets.size()));
        CHECK(figures.ahead <= std::max(0, staleness - 1));
        if (staleness == 0) CHECK(figures.worst == 0);
        older += figures.worst;

        ServedRun again(config, 1000 + seed, logs);
        REQUIRE(again.made->ok());
        again.session->run(0, kSteps);
        CHECK(copy_of(again.session->arrivals()) == logs);
        CHECK(again.parameters() == parameters);
      }
  CHECK(older > 0);  // workers were apart
}

TEST_CASE("staleness 0 is the synchronous parameter server, and that is data parallelism, bit for bit") {
  for (const char* subject : {"llama sgd", "llama adamw"}) {
    const Case apart = served_case(subject, 4, 0);
    Case in_step = apart, plain = apart;
    in_step.layout.parameter_server.staleness = -1;
    plain.layout.parameter_server = {};
    const testing::RandomText text(apart.model.vocab);
    const auto expected = testing::train_case(plain, text, kSteps), served = testing::train_case(in_step, text, kSteps);
    REQUIRE(expected.ok());
    REQUIRE(served.ok());
    CHECK(same_bits(served->losses, expected->losses));
    CHECK(served->parameters == expected->parameters);
    ServedRun run(apart, 7);
    REQUIRE(run.made->ok());
    run.session->run(0, kSteps);
    CHECK(run.parameters() == expected->parameters);
  }
}

TEST_CASE("interleavings differ, and each is replayed to the same bits") {
  std::set<std::string> logs;
  for (uint64_t seed = 1; seed <= 5; ++seed) {
    ServedRun run(served_case("llama adamw", 4, 2), seed);
    REQUIRE(run.made->ok());
    run.session->run(0, 4);
    logs.insert(print(run.session->arrivals().front()));
  }
  CHECK(logs.size() > 2);
}

TEST_CASE("what synchronous servers keep goes on under data parallelism, and the other way") {
  const Case served = served_case("llama adamw", 4, -1);
  Case plain = served;
  plain.layout.parameter_server = {};
  ServedRun whole(plain, 0);
  whole.session->run(0, 4);
  for (const auto& [first, second] : {std::pair{served, plain}, {plain, served}}) {
    ServedRun before(first, 0), after(second, 0);
    before.session->run(0, 2);
    const auto states = before.session->states();
    REQUIRE(states.ok());
    for (const StateName& name : *states) {
      INFO(name.parameter << " " << name.part);
      const auto state = before.session->state(name);
      REQUIRE(state.ok());
      REQUIRE(after.session->set_state(name, *state).ok());
    }
    after.session->run(2, 2);
    CHECK(after.parameters() == whole.parameters());
  }
}

TEST_CASE("threads that run freely leave logs that are replayed to the same bits") {
  const Case config = served_case("llama adamw", 4, 2);
  ServedRun run(config, 0);
  REQUIRE(run.made->ok());
  run.session->run(0, 3);
  const std::vector<ArrivalLog> logs = copy_of(run.session->arrivals());
  require_bounded(logs, config, 3);
  ServedRun again(config, 0, logs);
  REQUIRE(again.made->ok());
  again.session->run(0, 3);
  CHECK(copy_of(again.session->arrivals()) == logs);
  CHECK(again.parameters() == run.parameters());
}

TEST_CASE("memory and wire of workers apart are the plan's, to the byte") {
  for (const char* subject : {"llama adamw", "llama bf16 sgd"}) {
    Case config = served_case(subject, 4, 2);
    config.train.dropout = 0;
    INFO(config.name);
    ServedRun run(config, 3);
    REQUIRE(run.made->ok());
    for (const StepResult& r : run.session->run(0, 3)) {
      REQUIRE(std::isfinite(*r.loss));
      CHECK(r.sent_bytes ==
            total_wire_bytes(*run.placed.plan).at("dp.grads") + total_wire_bytes(*run.placed.plan).at("dp.parameters"));
    }
    for (int rank = 0; rank < 4; ++rank) {
      const MemoryPeak peak = memory_peak(*run.placed.plan, 0)[static_cast<size_t>(Space::kDevice)];
      CHECK(run.session->ledger(rank).peak(Space::kDevice) == peak.peak_bytes);
      auto planned = wire_bytes(*run.placed.plan, run.placed.plan->mesh.coordinates(rank));
      for (size_t c = 0; c < run.placed.plan->comms.size(); ++c)
        CHECK(run.session->sent_by_comm(rank)[c] == 3 * planned[run.placed.plan->comms[c].name]);
    }
    const std::vector<ArrivalLog> logs = copy_of(run.session->arrivals());
    ServedRun again(config, 99, logs);
    again.session->run(0, 3);
    CHECK(again.parameters() == run.parameters());
  }
}

TEST_CASE("a worker that is lost ends the run with its rank and op, and leaves nobody waiting") {
  const Case config = served_case("llama sgd", 4, 1);
  const int64_t lost = 2 * config.sequences_per_step() + config.sequences_per_step() / 2;  // step 2, worker 2
  for (uint64_t seed = 1; seed <= 3; ++seed) {
    ServedRun run(config, seed, {}, lost);
    REQUIRE(run.made->ok());
    std::string message;
    try {
      run.session->run(0, kSteps);
    } catch (const WorldError& e) { message = e.what(); }
    INFO(message);
    CHECK(message.find("the text is gone") != std::string::npos);
    CHECK(message.find("rank 2") != std::string::npos);
    CHECK(message.find("load") != std::string::npos);
  }
}

TEST_CASE("logs are read back as they are printed, and those of another run are refused") {
  const Case config = served_case("llama sgd", 2, 1);
  ServedRun run(config, 5);
  REQUIRE(run.made->ok());
  run.session->run(0, 2);
  std::vector<ArrivalLog> logs = copy_of(run.session->arrivals());
  for (const ArrivalLog& log : logs) {
    const auto read = parse_arrivals(print(log));
    REQUIRE(read.ok());
    CHECK(*read == log);
  }
  for (const char* bad : {"", "shardlab arrivals 2\n", "shardlab arrivals 1\nserver 0 workers 2\n",
                          "shardlab arrivals 1\nserver 0 workers 2 staleness 1\nbucket0.sum 0:\n",
                          "shardlab arrivals 1\nserver 0 workers 2 staleness 1\nbucket0.sum 0:-1\n"})
    CHECK_FALSE(parse_arrivals(bad).ok());

  ServedRun longer(config, 6, logs);
  REQUIRE(longer.made->ok());
  CHECK_THROWS_AS(longer.session->run(0, 3), WorldError);  // the log ends
  logs.front().buckets.front().updates.front().front().worker = 7;
  CHECK_FALSE(ServedRun(config, 6, logs).made->ok());
  logs.pop_back();
  CHECK_FALSE(ServedRun(config, 6, logs).made->ok());
}

}  // namespace shardlab::testing
