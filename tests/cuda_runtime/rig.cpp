#include "tests/cuda_runtime/rig.h"

#include "kernels/kernels.h"
#include "plan/base/philox.h"
#include "runtime/cuda/one_gpu_transport.h"
#include "runtime/thread_transport.h"
#include "strategies/lower.h"
#include "tests/test.h"

namespace shardlab::testing {

namespace {

RunOptions options_for(const Case& config, RunOptions options) {
  options.seed = config.train.seed;
  options.learning_rate = config.train.learning_rate;
  options.timeout_s = 120;
  options.poison = true;
  return options;
}

Run train(Session& session, const Case& config, const PlacedPlan& placed, int steps) {
  Run run;
  session.initialise_parameters();
  for (int step = 0; step < steps; ++step) {
    const StepResult result = session.step(step);
    REQUIRE(result.loss.has_value());
    run.losses.push_back(*result.loss);
    if (result.grad_norm2) run.norms.push_back(*result.grad_norm2);
    run.sent_bytes = result.sent_bytes;
  }
  for (const ModelParameter& p : parameters_of(config.model)) {
    auto value = session.parameter(p.name);
    if (value.ok())
      run.parameters[p.name] = std::move(value->values);
    else
      run.replicas_agree = false;
  }
  for (int rank = 0; rank < placed.plan->mesh.world_size(); ++rank) run.peaks.push_back(session.ledger(rank).peak(Space::kDevice));
  return run;
}

}  // namespace

void Tokens64::sequence(int64_t number, std::span<int32_t> out) const {
  for (size_t i = 0; i < out.size(); ++i)
    out[i] = static_cast<int32_t>(random_bits({7, RandomUse::kShuffle, 1, 0}, static_cast<uint64_t>(number) * 1024 + i) % 64);
}

PlacedPlan lowered(const Case& config) {
  auto plan = lower(config);
  INFO((plan.ok() ? std::string() : to_string(plan.error())));
  REQUIRE(plan.ok());
  return place(std::move(*plan));
}

FakeRun::FakeRun(const PlacedPlan& placed, FakeApi& api, const RunOptions& options, const cuda::CudaOptions& cuda, Behind kernels)
    : node(api, queued_kernels(kernels), std::vector<int>(static_cast<size_t>(placed.plan->mesh.world_size()), 0)),
      transport(std::make_unique<cuda::OneGpuTransport>(node)),
      session(Session::create(placed, options, *transport, cuda::cuda_backend(node, cuda), &tokens)) {}

Run train_on_fake(const Case& config, const RunSettings& settings) {
  const PlacedPlan placed = lowered(config);
  FakeApi api(settings.seed);
  api.forget_waits = settings.forget_waits;
  Run run;
  {
    FakeRun fake(placed, api, options_for(config, settings.options), {.canonical = config.canonical, .workspace_bytes = 4096},
                 settings.kernels);
    INFO((fake.session.ok() ? std::string() : to_string(fake.session.error())));
    REQUIRE(fake.session.ok());
    run = train(**fake.session, config, placed, settings.steps);
  }
  if (!settings.forget_waits) REQUIRE(run.replicas_agree);
  REQUIRE_FALSE(api.deadlocked());
  REQUIRE(api.live_allocations() == 0);
  REQUIRE(api.live_streams() == 0);
  REQUIRE(api.live_events() == 0);
  run.most_pending = api.most_pending();
  return run;
}

Run train_on_cpu(const Case& config, const RunSettings& settings) {
  const PlacedPlan placed = lowered(config);
  const Kernels& kernels = kernels_for_this_processor();
  ThreadTransport transport(kernels);
  const Tokens64 tokens;
  auto session = Session::create(placed, options_for(config, settings.options), transport,
                                 cpu_backend(kernels, {config.canonical, 1}), &tokens);
  REQUIRE(session.ok());
  return train(**session, config, placed, settings.steps);
}

}  // namespace shardlab::testing
