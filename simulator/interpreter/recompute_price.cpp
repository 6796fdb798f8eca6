// Prices of a layer's treatments in time: probes on the timeline.
#include <algorithm>

#include "plan/program.h"
#include "plan/techniques.h"
#include "simulator/interpreter/recompute_budget.h"
#include "simulator/interpreter/timeline.h"

namespace shardlab::simulator {
namespace {

constexpr int64_t kProbeLayers = 4;

/// Nothing of the case's layout but what shapes a layer's ops.
Case probe_of(const Case& config, const LayerTreatment& treatment) {
  Case probe = config;
  probe.layout = Layout{};
  probe.layout.tp = config.layout.tp;
  probe.layout.sequence_parallel = config.layout.sequence_parallel;
  probe.layout.overlap = config.layout.overlap;
  probe.layout.collective_algorithm = config.layout.collective_algorithm;
  probe.model.layers = kProbeLayers;
  probe.train.grad_accumulation = 1;
  probe.train.global_batch_tokens = 0;
  probe.train.reduce_dtype.clear();
  probe.train.accumulate_dtype.clear();
  probe.train.post_validation = 0;  // one stage waits for no other
  probe.checkpoint = {};
  return decided(std::move(probe), std::vector(static_cast<size_t>(kProbeLayers), treatment));
}

Result<double> probe_seconds(const Case& probe, const Lower& lower, const PlacedCostModel& costs) {
  const auto plan = lower(probe);
  if (!plan.ok()) return plan.error();
  std::vector<Program> programs;
  for (size_t role = 0; role < plan->roles.size(); ++role) programs.push_back(expand_program(*plan, static_cast<int>(role)));
  return step_seconds(simulate(*plan, programs, probe.machine, costs));
}

}  // namespace

std::vector<LayerTreatment> candidate_treatments(const Case& config) {
  const std::vector parked_layers(static_cast<size_t>(config.model.layers), LayerTreatment{.full = true, .parked = true});
  const bool parks = check_techniques(decided(config, parked_layers)).ok();
  std::vector<LayerTreatment> all;
  for (const bool parked : {false, true}) {
    if (parked && !parks) continue;
    for (unsigned again = 0; again < kSubLayerSets; ++again) all.push_back({false, again, parked});
    all.push_back({true, 0, parked});
  }
  return all;
}

Result<std::vector<PricedTreatment>> price_treatments(const Case& config, std::span<const LayerTreatment> treatments,
                                                      const Lower& lower, const PlacedCostModel& costs) {
  const auto seconds = [&](const LayerTreatment& t) { return probe_seconds(probe_of(config, t), lower, costs); };
  const auto none = seconds({});
  if (!none.ok()) return none.error();
  std::vector<PricedTreatment> priced;
  for (const LayerTreatment& t : treatments) {
    LayerTreatment stays = t;
    stays.parked = false;
    const auto there = seconds(stays), away = t.parked ? seconds(t) : there;
    if (!there.ok()) return there.error();
    if (!away.ok()) return away.error();
    const double again = (*there - *none) / kProbeLayers, copies = (*away - *there) / (kProbeLayers - 1);
    priced.push_back({t, std::max(0.0, again) + std::max(0.0, copies)});
  }
  return priced;
}

}  // namespace shardlab::simulator
