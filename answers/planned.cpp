#include "answers/planned.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "answers/namespaces.h"
#include "plan/kinds.h"
#include "plan/memory.h"
#include "plan/pipeline_case.h"
#include "plan/routing.h"
#include "plan/stage_memory.h"
#include "plan/techniques.h"
#include "plan/treatment.h"
#include "plan/verify.h"
#include "reports/format.h"
#include "simulator/estimator/analytic/profile.h"
#include "simulator/interpreter/case_plan.h"
#include "simulator/interpreter/collective_choice.h"
#include "simulator/interpreter/cost_model.h"
#include "simulator/interpreter/pipeline_choice.h"
#include "simulator/interpreter/recompute_budget.h"
#include "strategies/lower.h"
#include "strategies/warm_up.h"

namespace shardlab::answers {

namespace {

/// Rules 5 and 7 of `verify` on what will run: its waits and its arenas are derived from the plan that was verified.
Result<void> check_placed(const PlacedPlan& placed) {
  for (size_t r = 0; r < placed.programs.size(); ++r) {
    const Program& program = placed.programs[r];
    const auto refuse = [&](const std::vector<Finding>& found, const char* why) -> Result<void> {
      if (found.empty()) return {};
      return Error{
          ExitCode::kBug,
          fmt::format("plan `{}`: stage {}: {}: {}", placed.plan->name, program.role, found.front().op, found.front().message),
          fmt::format("this plan was not run: {}, which is a bug of shardlab's", why),
          {}};
    };
    SHARDLAB_TRY(refuse(find_unordered(*placed.plan, program), "its streams do not wait for one another as they must"));
    SHARDLAB_TRY(refuse(find_overlaps(*placed.plan, program, placed.arenas[r]), "two of its buffers share bytes while both live"));
  }
  return {};
}

}  // namespace

int64_t capacity_per_rank(const Case& config, Space space) {
  if (space == Space::kDevice) return memory_per_rank(config);
  const Machine& m = config.machine;
  const auto stated = m.device.constants.find(space == Space::kHost ? "host.memory_bytes" : "nvme.capacity_bytes");
  if (stated == m.device.constants.end()) return 0;
  const int ranks = config.layout.world_size(), of_node = m.local ? ranks : std::min(ranks, std::max(1, m.devices_per_node));
  return static_cast<int64_t>(stated->second / of_node);
}

namespace {

/// The case with experts listed by place in the place of `expert_placement: balanced`. Contiguous experts are not listed.
Result<Case> with_balanced_experts(const Case& config) {
  if (config.layout.expert_placement != kBalanced) return config;
  SHARDLAB_TRY(check(config));
  const auto routing = routing_of(config);
  if (!routing.ok()) return routing.error();
  Case placed = config;
  placed.layout.expert_placement = print_placements(placements_of(config, *routing, config.layout.ep));
  return placed;
}

}  // namespace

Result<Plan> lower_unverified(const Case& given) {
  const auto config = with_balanced_experts(given);
  if (!config.ok()) return config.error();
  return with_chosen_collectives(*config, lower(*config, {.after = {}, .verify = false}), false);
}

namespace {

std::string listed(const std::vector<int>& layers) { return fmt::format("{}", fmt::join(layers, ",")); }

/// Device bytes beside the arena of a rank on a described machine: a driver's context.
int64_t context_bytes() {
  const auto profile = analytic::profile_named("shardlab");
  return profile.ok() ? static_cast<int64_t>(profile->memory.context) : 0;
}

/// Layers of each part by predicted time, on a mixed machine within the memory of each stage's device: a stage whose live peak exceeds its
/// device gives up layers, one at a time, to the parts that are then the shortest. Where all stages are full the deal by time
/// stands, and the case does not fit.
Result<std::vector<int>> dealt_layers(const Case& config, const std::vector<UnitSeconds>& by_stage) {
  Case chosen = config;
  const int layers = static_cast<int>(config.model.layers), parts = parts_of(config);
  const PipelineSchedule schedule = schedule_of(config);
  const std::vector<UnitSeconds> seconds = part_unit_seconds(schedule, by_stage);
  const std::vector<int> by_time = balanced_layers(layers, seconds);
  if (!config.machine.is_mixed()) return by_time;
  std::vector<int> dealt = by_time, most(static_cast<size_t>(parts), layers);
  while (true) {
    chosen.layout.stage_layers = listed(dealt);
    const auto plan = CasePlan::of(chosen, lower_unverified);
    if (!plan.ok()) return plan.error();
    bool full = false;
    for (int stage = 0; stage < config.layout.pp; ++stage) {
      const int64_t have = memory_of_stage(config, stage);
      const int64_t live = plan->stages()[static_cast<size_t>(stage)][static_cast<size_t>(Space::kDevice)].peak_bytes;
      if (have <= 0 || live + context_bytes() <= have) continue;
      int fullest = -1;
      for (const int part : schedule.parts_of(stage))
        if (fullest < 0 || dealt[static_cast<size_t>(part)] > dealt[static_cast<size_t>(fullest)]) fullest = part;
      const bool end = fullest == 0 || fullest == parts - 1;  // an end does without layers
      if (dealt[static_cast<size_t>(fullest)] <= (end ? 0 : 1)) return by_time;
      most[static_cast<size_t>(fullest)] = dealt[static_cast<size_t>(fullest)] - 1;
      full = true;
    }
    if (!full) return dealt;
    if (std::accumulate(most.begin(), most.end(), 0) < layers) return by_time;
    dealt = balanced_layers(layers, seconds, most);
  }
}

/// The layers of parts in place of `stage_layers`, and for `schedule: auto` the first candidate whose plan fits; where none does
/// the one that holds least.
Result<Case> decide_pipeline(const Case& config, const Surroundings& around) {
  SHARDLAB_TRY(check(config));
  Case chosen = config;
  if (config.layout.stage_layers == kMeasured) {
    if (!around.resumed_seconds)
      return refusal("stage_layers=measured: the run that is resumed is not read here", "set stage_layers: balanced",
                     ErrorKind::kNotMeasured);
    const auto seconds = around.resumed_seconds(config);
    if (!seconds.ok()) return seconds.error();
    chosen.layout.stage_layers = listed(balanced_layers(parts_of(config), *seconds));
    return chosen;
  }
  const auto seconds = stage_unit_seconds(config, lower_unverified);
  if (!seconds.ok()) return seconds.error();
  if (config.layout.schedule != Schedule::kAuto) {
    const auto layers = dealt_layers(config, *seconds);
    if (!layers.ok()) return layers.error();
    chosen.layout.stage_layers = listed(*layers);
    return chosen;
  }
  std::vector<PipelineCandidate> candidates = pipeline_candidates(config, *seconds);
  const auto take = [&](const PipelineCandidate& c) {
    chosen.layout.schedule = c.named;
    chosen.layout.schedule_table = c.named == Schedule::kTable ? to_csv(c.schedule) : "";
    chosen.layout.vpp = c.virtual_stages;
    chosen.layout.stage_layers = listed(c.layers);
  };
  for (const PipelineCandidate& c : candidates) {
    take(c);
    if (!check(chosen).ok()) continue;
    auto plan = lower_unverified(chosen);
    if (!plan.ok()) continue;
    PlacedRun placed{place(std::move(*plan)), nullptr};
    if (fits(chosen, placed).ok()) return chosen;
  }
  std::erase_if(candidates, [&](const PipelineCandidate& c) { return take(c), !check(chosen).ok(); });
  if (candidates.empty())
    return Error{ExitCode::kUsage,
                 fmt::format("schedule=auto with pp={}: no schedule goes with the rest of the case", config.layout.pp),
                 "name a schedule, to see what it does not go with",
                 {}};
  take(*std::ranges::min_element(candidates, {}, &PipelineCandidate::held));
  return chosen;
}

}  // namespace

namespace {

/// Experts listed by place in the place of `expert_placement: balanced` and `measured`. Contiguous experts are not listed.
Result<Case> decide_placement(const Case& config, const Surroundings& around) {
  if (config.layout.expert_placement != kMeasured) return with_balanced_experts(config);
  SHARDLAB_TRY(check(config));
  if (!around.resumed_loads)
    return refusal("expert_placement=measured: the run that is resumed is not read here",
                   "set data.routes to its loads.txt, and expert_placement: balanced", ErrorKind::kNotCounted);
  const auto measured = around.resumed_loads(config);
  if (!measured.ok()) return measured.error();
  std::vector<ExpertPlacement> placements;
  for (const ExpertRows& layer : measured->layers) {
    const std::vector<double> loads(layer.by_expert.begin(), layer.by_expert.end());
    auto placement = placement_after(layer.layer, loads, config.layout.ep, placement_of(measured->placements, layer.layer));
    if (placement) placements.push_back(std::move(*placement));
  }
  Case decided = config;
  decided.layout.expert_placement = print_placements(placements);
  return decided;
}

}  // namespace

Result<Case> decide(const Case& given, const Surroundings& around) {
  auto placed = decide_placement(given, around);
  if (!placed.ok()) return placed.error();
  Case config = std::move(*placed);
  if (!is_pipeline_decided(config)) {
    const auto chosen = decide_pipeline(config, around);
    if (!chosen.ok()) return chosen.error();
    config = *chosen;
  }
  if (is_decided(config)) return config;
  SHARDLAB_TRY(check(config));
  auto costs = cost_model_for(config);
  if (!costs.ok()) return costs.error();
  const auto priced = price_treatments(config, candidate_treatments(config), lower_unverified, **costs);
  if (!priced.ok()) return priced.error();
  const int64_t host = capacity_per_rank(config, Space::kHost);
  const auto choice =
      choose_within(config, {config.layout.recompute_options.budget_bytes, host > 0 ? host : INT64_MAX}, *priced, lower_unverified);
  if (!choice.ok()) return choice.error();
  if (!choice->proven)
    around.tell(fmt::format("recompute within {}: the best of {} assignments of layers; another may take a little less",
                            bytes_text(config.layout.recompute_options.budget_bytes), choice->looked_at));
  return decided(config, choice->layers);
}

namespace {

Result<PlacedPlan> checked(Result<Plan> plan) {
  if (!plan.ok()) return plan.error();
  PlacedPlan placed = place(std::move(*plan));
  SHARDLAB_TRY(check_placed(placed));
  return placed;
}

}  // namespace

Result<PlacedRun> prepare(const Case& config) {
  auto placed = checked(with_chosen_collectives(config, lower(config), true));
  if (!placed.ok()) return placed.error();
  PlacedRun run{std::move(*placed), nullptr, nullptr, false};
  if (validates_later(config) || bounds_experts(config)) {
    auto again = checked(with_chosen_collectives(config, lower_in_step(config), true));
    if (!again.ok()) return again.error();
    run.shares_arenas = bounds_experts(config);
    if (run.shares_arenas) SHARDLAB_TRY(share_arenas(run, *again));
    run.in_step = std::make_unique<const PlacedPlan>(std::move(*again));
  }
  if (warm_up_steps(config) == 0) return run;
  auto first = checked(with_chosen_collectives(config, lower_warm_up(config), true));
  if (!first.ok()) return first.error();
  run.warm_up = std::make_unique<const PlacedPlan>(std::move(*first));
  return run;
}

Result<PlacedPlan> prepare_validation(const Case& config) {
  return checked(with_chosen_collectives(config, lower_validation(config), true));
}

namespace {

/// Arena bytes in `space` of a rank of the stage, in the phase that needs more.
int64_t arena_of_stage(const PlacedRun& placed, size_t stage, Space space) {
  const auto of = [&](const PlacedPlan& phase) { return phase.arenas[stage].bytes[static_cast<size_t>(space)]; };
  return std::max(of(placed), placed.warm_up ? of(*placed.warm_up) : 0);
}

/// Arena bytes in `space` of a rank of the stage, with the arenas of further plans of the same rank beside its own: of `beside`, where there
/// is one, and of steps that are made again in arenas of their own. A phase that is over by then may need more.
int64_t arenas_of_stage(const PlacedRun& placed, const PlacedPlan* beside, size_t stage, Space space) {
  const auto of = [&](const PlacedPlan& plan) { return plan.arenas[stage].bytes[static_cast<size_t>(space)]; };
  int64_t bytes = of(placed);
  for (const PlacedPlan* other : {beside, placed.shares_arenas ? nullptr : static_cast<const PlacedPlan*>(placed.in_step.get())}) {
    if (other == nullptr) continue;
    SHARDLAB_CHECK(placed.arenas.size() == other->arenas.size(), "{} roles train and {} beside them", placed.arenas.size(),
                   other->arenas.size());
    bytes += of(*other);
  }
  return std::max(bytes, arena_of_stage(placed, stage, space));
}

/// The same of the rank that needs most.
int64_t largest_arena(const PlacedRun& placed, const PlacedPlan* beside, Space space) {
  int64_t most = 0;
  for (size_t stage = 0; stage < placed.arenas.size(); ++stage)
    most = std::max(most, arenas_of_stage(placed, beside, stage, space));
  return most;
}

}  // namespace

int64_t largest_arena(const PlacedRun& placed, Space space) {
  int64_t most = 0;
  for (size_t stage = 0; stage < placed.arenas.size(); ++stage) most = std::max(most, arena_of_stage(placed, stage, space));
  return most;
}

std::vector<StageNeed> stage_memory(const Case& config, const PlacedRun& placed) {
  if (!config.machine.is_mixed()) return {};
  std::vector<StageNeed> stages = memory_by_stage(config, [&](int stage) {
    int64_t peak = 0;
    for (const PlacedPlan* plan : placed.in_turn())
      peak = std::max(peak, memory_peak(*plan->plan, stage)[static_cast<size_t>(Space::kDevice)].peak_bytes);
    return peak;
  });
  for (size_t stage = 0; stage < stages.size(); ++stage)
    stages[stage].arena_bytes = arenas_of_stage(placed, nullptr, stage, Space::kDevice);
  return stages;
}

namespace {

/// What this case has not yet done to need less, the cheapest in time first.
std::string what_saves_memory(const Case& c) {
  const Layout& l = c.layout;
  std::vector<std::string> ways;
  if (l.dp > 1 && l.zero < 3) ways.push_back(fmt::format("zero: {}", l.zero + 1));
  if (l.recompute == Recompute::kNone) ways.push_back("recompute: selective");
  if (c.train.micro_batch > 1) ways.push_back("a smaller micro_batch");
  if (l.recompute != Recompute::kFull) ways.push_back("recompute: full");
  ways.push_back("more tp or pp");
  std::string text = ways.front();
  for (size_t i = 1; i < ways.size(); ++i) text += (i + 1 == ways.size() ? " or " : ", ") + ways[i];
  return text;
}

}  // namespace

Result<void> fits(const Case& config, const PlacedRun& placed, const PlacedPlan* validation) {
  // The rank that lacks most: the one that needs most, where all devices are alike.
  const auto need_of = [&](size_t stage) { return arenas_of_stage(placed, validation, stage, Space::kDevice); };
  const auto have_of = [&](size_t stage) { return memory_of_stage(config, static_cast<int>(stage)); };
  size_t worst = 0;
  for (size_t stage = 1; stage < placed.arenas.size(); ++stage)
    if (need_of(stage) - have_of(stage) > need_of(worst) - have_of(worst)) worst = stage;
  const int64_t need = need_of(worst), have = have_of(worst);
  for (const Space space : {Space::kHost, Space::kNvme}) {
    const int64_t outside = largest_arena(placed, validation, space), there = capacity_per_rank(config, space);
    if (there > 0 && outside > there)
      return Error{ExitCode::kNo,
                   fmt::format("does not fit: a rank needs {} of {} and may use {} of {}", bytes_text(outside),
                               space == Space::kHost ? "host memory" : "NVMe", bytes_text(there), config.machine.id),
                   space == Space::kHost ? "offload less, or offload.optimizer: nvme" : "offload less, or more zero, tp or pp",
                   {},
                   ErrorKind::kDoesNotFit};
  }
  if (have <= 0 || need <= have) return {};
  // Only what lies beside the arena of training may be too much.
  const bool trains = arena_of_stage(placed, worst, Space::kDevice) <= have, validates = trains && validation != nullptr,
             repeats = trains && placed.in_step != nullptr && !placed.shares_arenas;
  return Error{
      ExitCode::kNo,
      fmt::format("does not fit: a rank{} needs {}{} and may use {} of {}",
                  config.machine.is_mixed() ? fmt::format(" of stage {}", worst) : "", bytes_text(need),
                  validates && repeats ? " with the arenas of the validation step and of steps made again beside that of training"
                  : validates          ? " with the validation step's arena beside that of training"
                  : repeats            ? " with the arena of steps made again beside that of training"
                                       : "",
                  bytes_text(have),
                  config.machine.is_mixed() ? device_of_stage(config, static_cast<int>(worst)) : config.machine.id),
      (validates ? "try measure.validate_sequences: 0, " : "try ") + std::string(repeats ? "post_validation: 0, " : "") +
          std::string(config.machine.is_mixed() && config.layout.pp > 1 && config.layout.stage_layers.empty()
                          ? "stage_layers: balanced, "
                          : "") +
          what_saves_memory(config),
      {},
      ErrorKind::kDoesNotFit};
}

}  // namespace shardlab::answers
