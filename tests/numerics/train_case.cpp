#include "tests/numerics/train_case.h"

#include <fmt/format.h>

#include <utility>

#include "kernels/kernels.h"
#include "plan/model.h"
#include "runtime/backend.h"
#include "runtime/session.h"
#include "runtime/thread_transport.h"
#include "strategies/lower.h"

namespace shardlab::testing {

Result<Trained> train_case(const Case& config, const BatchSource& source, int steps) {
  auto plan = lower(config);
  if (!plan) return plan.error();
  const PlacedPlan placed = place(std::move(*plan));
  const Kernels& kernels = kernels_for_this_processor();
  ThreadTransport transport(kernels);
  RunOptions options;
  options.seed = config.train.seed;
  options.learning_rate = config.train.learning_rate;
  options.timeout_s = 60;
  options.poison = true;
  auto session = Session::create(placed, options, transport, cpu_backend(kernels, {config.canonical, config.threads_per_rank}), &source);
  if (!session) return session.error();
  (*session)->initialise_parameters();

  Trained trained;
  for (int step = 0; step < steps; ++step) {
    const StepResult result = (*session)->step(step);
    if (!result.loss) return Error{ExitCode::kBug, fmt::format("step {} has no loss", step), "The plan must write a metric named `loss`.", ""};
    trained.losses.push_back(static_cast<float>(*result.loss));
  }
  for (const ModelParameter& p : parameters_of(config.model)) {
    auto value = (*session)->parameter(p.name);
    if (!value) return value.error();
    trained.parameters[p.name] = std::move(value->values);
  }
  return trained;
}

}  // namespace shardlab::testing
