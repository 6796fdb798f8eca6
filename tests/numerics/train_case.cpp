#include "tests/numerics/train_case.h"

#include <fmt/format.h>

#include <memory>
#include <optional>
#include <utility>

#include "kernels/kernels.h"
#include "plan/model.h"
#include "plan/techniques.h"
#include "runtime/backend.h"
#include "runtime/made_again.h"
#include "runtime/session.h"
#include "runtime/thread_transport.h"
#include "strategies/lower.h"
#include "tests/namespaces.h"

namespace shardlab::testing {

namespace {

RunOptions run_options(const Case& config) {
  RunOptions options;
  options.seed = config.train.seed;
  options.learning_rate = config.train.learning_rate;
  options.timeout_s = 60;
  options.poison = true;  // what no op has written is not a number
  return options;
}

Error no_loss(std::string_view plan) {
  return {ExitCode::kBug, fmt::format("the {} plan gave no loss", plan), "It must write a metric named `loss`.", ""};
}

/// Loss of the trained parameters, by a plan of its own.
Result<float> validate(const Case& config, const BatchSource& source, const Session& trained, const Plan& plan) {
  auto lowered = lower_validation(config);
  if (!lowered) return lowered.error();
  const PlacedPlan placed = place(std::move(*lowered));
  const kernels::Kernels& kernels = kernels::kernels_for_this_processor();
  ThreadTransport transport(kernels);
  auto session = Session::create(placed, run_options(config), transport,
                                 cpu_backend(kernels, {config.canonical, config.threads_per_rank}), &source);
  if (!session) return session.error();
  SHARDLAB_TRY(copy_parameters(trained, plan, **session));
  const auto loss = (*session)->step(0).loss;
  if (!loss) return no_loss("validation");
  return static_cast<float>(*loss);
}

}  // namespace

Result<Trained> train_case(const Case& config, const BatchSource& source, int steps) {
  auto plan = lower(config);
  if (!plan) return plan.error();
  PlacedPlan placed = place(std::move(*plan));
  std::optional<PlacedPlan> meeting;  // of steps that are made again
  if (bounds_experts(config)) {
    auto lowered = lower_in_step(config);
    if (!lowered) return lowered.error();
    meeting.emplace(place(std::move(*lowered)));
    SHARDLAB_TRY(share_arenas(placed, *meeting));
  }
  const kernels::Kernels& kernels = kernels::kernels_for_this_processor();
  ThreadTransport transport(kernels);
  auto session = Session::create(placed, run_options(config), transport,
                                 cpu_backend(kernels, {config.canonical, config.threads_per_rank}), &source);
  if (!session) return session.error();
  (*session)->initialise_parameters();

  ThreadTransport meeting_transport(kernels);
  std::unique_ptr<Session> in_step;
  const auto make_in_step = [&]() -> Result<Session*> {
    if (in_step) return in_step.get();
    RunOptions options = run_options(config);
    if (meeting) {
      options.beside = session->get();
    } else {
      auto lowered = lower_in_step(config);
      if (!lowered) return lowered.error();
      meeting.emplace(place(std::move(*lowered)));
    }
    auto made = Session::create(*meeting, options, meeting_transport,
                                cpu_backend(kernels, {config.canonical, config.threads_per_rank}), &source);
    if (!made) return made.error();
    in_step = std::move(*made);
    if (options.beside == nullptr) in_step->initialise_parameters();
    return in_step.get();
  };

  Trained trained;
  const int period = placed.plan->period;
  for (int step = 0; step + period <= steps; step += period) {
    const auto done = run_judged(**session, step, make_in_step);
    if (!done) return done.error();
    trained.rolled_back.push_back(!done->again.empty());
    for (const StepResult& result : done->counted()) {
      trained.skipped += result.skipped ? 1 : 0;
      for (const auto& loss : result.losses) {
        if (!loss) return no_loss("training");
        trained.losses.push_back(static_cast<float>(*loss));
      }
      if (result.grad_norm2) trained.squared_norms.push_back(*result.grad_norm2);
    }
  }
  for (const ModelParameter& p : parameters_of(config.model)) {
    auto value = (*session)->parameter(p.name);
    if (!value) return value.error();
    trained.parameters[p.name] = std::move(value->values);
  }
  const auto loss = validate(config, source, **session, *placed.plan);
  if (!loss) return loss.error();
  trained.validation_loss = *loss;
  return trained;
}

}  // namespace shardlab::testing
