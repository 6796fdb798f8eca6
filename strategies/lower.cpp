#include "strategies/lower.h"

#include <fmt/format.h>

#include <algorithm>

#include "plan/automatic.h"
#include "plan/base/check.h"
#include "plan/named_kernels.h"
#include "plan/pipeline_case.h"
#include "plan/routing.h"
#include "plan/techniques.h"
#include "plan/treatment.h"
#include "plan/verify.h"
#include "strategies/build_step.h"
#include "strategies/catalogue.h"
#include "strategies/draft.h"
#include "strategies/warm_up.h"

namespace shardlab::strategies {
namespace {

/// Passes without which there is no program to look at: they run even after the pass that `--after` names.
bool is_structure(std::string_view name) { return name == "pipeline" || name == "state" || name == "metrics"; }

Result<void> check_pass_name(std::string_view after) {
  if (after.empty() || std::ranges::find(catalogue(), after, &Strategy::name) != catalogue().end()) return {};
  std::string names;
  for (const Strategy& s : catalogue()) names += fmt::format("{}{}", names.empty() ? "" : ", ", s.name);
  return Error{ExitCode::kUsage, fmt::format("there is no pass called `{}`", after), "passes, in order: " + names, {}};
}

/// Refuses a case with an open choice. A budget in bytes and the least time in seconds need costs, and a placement of experts needs their
/// loads, which a plan does not know: the choice is made before, by whoever knows them.
Result<void> check_decided(const Case& config) {
  if (!is_pipeline_decided(config))
    return Error{
        ExitCode::kUsage,
        fmt::format("{} has not been decided: a plan knows no seconds",
                    config.layout.schedule == Schedule::kAuto ? "schedule=auto" : "stage_layers=" + config.layout.stage_layers),
        "name a schedule, and write the layers of each part under stage_layers",
        {}};
  if (!is_placement_decided(config))
    return Error{ExitCode::kUsage,
                 fmt::format("expert_placement={} has not been decided: a plan knows no loads", config.layout.expert_placement),
                 "write the experts by place of each layer under expert_placement, as 1:2,0,3,1",
                 {}};
  if (is_decided(config)) return {};
  return Error{ExitCode::kUsage,
               fmt::format("recompute within {} bytes has not been decided: a plan knows no seconds",
                           config.layout.recompute_options.budget_bytes),
               "write what each layer makes again under recompute, as in 3*full 5*none",
               {}};
}

VerifyOptions verify_options(const Case& config, const LowerOptions& options) {
  VerifyOptions v;
  int64_t device = config.layout.recompute_options.budget_bytes > 0 ? config.layout.recompute_options.budget_bytes : INT64_MAX;
  // Of a mixed machine no one number is every stage's: whoever places the plan holds each stage to its own device.
  if (options.budget && !config.machine.is_mixed() && config.machine.device.memory_bytes > 0)
    device = std::min(device, memory_per_rank(config));
  if (device != INT64_MAX) v.budget = {device, INT64_MAX, INT64_MAX};
  return v;
}

/// `collective_algorithm: auto` by kind and group of each collective, where strategies left a ring. A parameter server's exchanges
/// are direct, whatever the key says. Of `hierarchical` the ranks of each group on a node.
void choose_algorithms(const Case& config, Plan& plan) {
  const AlgorithmChoice choice = config.layout.collective_algorithm;
  if (config.canonical || (choice != AlgorithmChoice::kAuto && choice != AlgorithmChoice::kHierarchical)) return;
  for (Segment& segment : plan.segments)
    for (Step& step : segment.steps) {
      Op* op = std::get_if<Op>(&step);
      auto* c = op != nullptr ? std::get_if<Collective>(&op->work) : nullptr;
      if (c == nullptr) continue;
      if (c->algorithm == Algorithm::kHierarchical)
        c->per_node = group_per_node(plan.mesh, plan.comms[c->comm.index()], ranks_per_node(config));
      if (choice == AlgorithmChoice::kAuto && c->algorithm == Algorithm::kRing)
        c->algorithm = automatic_algorithm(c->kind, group_size(plan.mesh, plan.comms[c->comm.index()]));
    }
}

/// A strategy takes its kernels from the table: a name of its own would be believed as it says.
void check_kernels(const Plan& plan) {
  for (const Segment& segment : plan.segments)
    for (const Step& step : segment.steps) {
      const Op* op = std::get_if<Op>(&step);
      const auto* kernel = op != nullptr ? std::get_if<Kernel>(&op->work) : nullptr;
      SHARDLAB_CHECK(kernel == nullptr || find_kernel(kernel->name) != nullptr,
                     "`{}` of strategy `{}` calls the kernel `{}`, of which plan/named_kernels.cpp has no row", op->label,
                     op->strategy, kernel->name);
    }
}

/// Gives slots whose buffers a pass brings that was left out buffers of their own, so that there is a program to look at.
void stand_in_for_passes(Draft& draft) {
  for (StageDraft& stage : draft.stages)
    for (const int unit : stage.units)
      for (const DraftSegment* segment : {&draft.of_unit(unit).forward, &draft.of_unit(unit).backward})
        for (size_t s = 0; s < segment->uses.size(); ++s) {
          const Slot& slot = segment->segment.slots[s];
          const auto brings = [&](const auto& named) { return named.first == slot.name || named.first.ends_with("." + slot.name); };
          if (segment->uses[s].use != Use::kNamed || std::ranges::any_of(stage.named, brings)) continue;
          Buffer buffer;
          buffer.name = slot.name;
          buffer.type = slot.type;
          buffer.kind = slot.cls;
          stage.whole_step.push_back(stage.named[slot.name] = add_buffer(stage, std::move(buffer)));
        }
}

Result<Plan> lower_step(const Case& config, const LowerOptions& options, bool training) {
  SHARDLAB_TRY(check(config));
  SHARDLAB_TRY(check_decided(config));
  SHARDLAB_TRY(check_pass_name(options.after));
  Draft draft = build_step(config, training);
  bool passed = false;  // the pass that `after` names
  for (const Strategy& strategy : catalogue()) {
    if (strategy.applies(config) && (training || strategy.shapes_forward) && (!passed || is_structure(strategy.name))) {
      strategy.pass(draft);
      draft.plan.strategies.emplace_back(strategy.name);
    }
    passed = passed || strategy.name == options.after;
  }
  if (passed && !options.after.empty()) stand_in_for_passes(draft);
  Plan plan = emit(std::move(draft));
  choose_algorithms(config, plan);
  check_kernels(plan);
  if (options.verify && options.after.empty()) SHARDLAB_TRY(verify(plan, verify_options(config, options)));
  return plan;
}

}  // namespace

int64_t warm_up_steps(const Case& config) {
  const Compression& compression = config.layout.compression;
  return compression.kind == CompressionKind::kOneBitAdam ? compression.warmup : 0;
}

Result<Plan> lower_warm_up(const Case& config) {
  SHARDLAB_CHECK(warm_up_steps(config) > 0, "the steps of `{}` all have one plan", config.name);
  Case first = config;
  first.layout.compression.warmup = kNeverFrozen;
  return lower(first);
}

Result<Plan> lower(const Case& config, const LowerOptions& options) { return lower_step(config, options, true); }

Result<Plan> lower_in_step(const Case& config) {
  Case meeting = bounds_experts(config) ? second_run_of(config) : config;
  meeting.train.post_validation = 0;
  return lower(meeting);
}

Result<Plan> lower_validation(const Case& config, const LowerOptions& options) { return lower_step(config, options, false); }

}  // namespace shardlab::strategies
