// Lower bounds over many points at once: what a search need not look at.
#include <algorithm>

#include "simulator/estimator/analytic/inside.h"

namespace shardlab::simulator::analytic {
namespace {

/// Sums of a bound and of an estimate are rounded in different orders.
constexpr double kRounding = 1 - 1e-9;

/// Seconds of one micro-batch on `dense` and `moe` layers and shares of the ends, idle time left out. Exchanges between experts may
/// be hidden where a schedule runs two micro-batches beside one another.
double micro_batch_s(const Frame& f, int64_t dense, int64_t moe, double embedding, double head, double loss) {
  const Block& b = f.block;
  const bool may_hide = f.point.pp > 1 || f.point.expert_overlap;
  double device = 0, host = f.in.host.micro_batch_s;
  const auto add = [&](double n, const PhaseCost& c) {
    if (n <= 0) return;
    device += n * (c.compute_s + c.tensor_s + c.context_s + (may_hide ? 0 : c.expert_s));
    host += n * c.host_s;
  };
  for (const auto& [n, layer] : {std::pair{dense, &b.dense}, std::pair{moe, &b.moe}})
    for (const PhaseCost* phase : {&layer->forward, &layer->recompute, &layer->input, &layer->weight}) add(of(n), *phase);
  add(embedding, b.embedding.forward), add(embedding, b.embedding.backward);
  add(head, b.head.forward), add(head, b.head.backward);
  add(loss, b.loss.forward), add(loss, b.loss.backward);
  if (f.point.pp > 1) device -= Spared(f).among(f.point.world_size() / f.point.pp) * late_of(b, of(dense), of(moe), head);
  return std::max(device, host);
}

/// Fewest micro-batches that the first stage of any schedule holds.
double least_in_flight(const Point& p) {
  if (p.pp == 1) return 1;
  double least = of(p.grad_accumulation);
  for (const Schedule s : estimated_schedules()) least = std::min(least, in_flight(s, p.pp, 0, p.grad_accumulation, 1));
  return least;
}

/// The ways in which the schedules of a cut deal out its layers: evenly, or balanced where the framework does and the
/// schedule lets it.
template <class Bound>
double least_over_splits(const Frame& f, const Bound& bound) {
  const double even = bound(StageGroups(f.in.shape, f.point, false));
  if (!f.in.profile.model.balanced_stages || f.point.pp == 1) return even;
  Point plain = f.point;
  plain.schedule = Schedule::k1F1B, plain.vpp = 1;
  return std::min(even, bound(StageGroups(f.in.shape, plain, true)));
}

double slowest_stage_s(const Frame& f, const StageGroups& groups) {
  // Every schedule has a stage of the most layers, and one at an end of the pipeline with at least half of the head.
  double most = 0, end = 0;
  for (const StageGroup& g : groups.all()) {
    if (groups.balanced()) {
      most = std::max(most, micro_batch_s(f, g.dense, g.moe, g.embedding, g.head, g.loss));
      continue;
    }
    most = std::max(most, micro_batch_s(f, g.dense, g.moe, 0, 0, 0));
    if (g.first != 0 && g.first + g.count != f.point.pp) continue;
    const double with_head = micro_batch_s(f, g.dense, g.moe, 0, 0.5, 0.5);
    end = end == 0 ? with_head : std::min(end, with_head);
  }
  return std::max(most, end);
}

double first_stage_bytes(const Frame& f, const StageGroup& g) {
  const Point& p = f.point;
  const FrameworkProfile& profile = f.in.profile;
  const double dense = of(f.trained_dense(g)), expert = of(f.trained_experts(g));
  const auto held = [&](bool cut, double bytes) {
    return bytes * (cut ? dense / of(f.replicas.shard) + expert / of(f.replicas.expert_shard) : dense + expert);
  };
  const FrozenBytes still = frozen_of(f, g);
  const double frozen =
      p.zero >= 3 ? still.dense() / of(f.replicas.shard) + still.expert / of(f.replicas.expert_shard) : still.total();
  const double parameters = p.offload_parameters == Medium::kDevice ? held(p.zero >= 3, f.bytes.parameter) + frozen : 0;
  const double optimizer = p.offload_optimizer == Medium::kDevice ? held(p.zero >= 1, f.bytes.master + f.bytes.moments) : 0;
  const double gradients = held(p.zero >= 2, f.bytes.gradient);
  const double kept = of(g.dense) * f.block.dense.kept + of(g.moe) * f.block.moe.kept;
  const double activations = p.offload_activations == Medium::kDevice ? least_in_flight(p) * kept : 0;
  // While activations are at their most, gradients are there only where they live through the step; at its end they are alone.
  const bool whole_step = profile.state.gradient_with_step || p.grad_accumulation > 1;
  const double highest = whole_step ? gradients + activations : std::max(gradients, activations);
  return parameters + optimizer + highest + profile.memory.workspace + profile.memory.context;
}

}  // namespace

double least_step_s(const Frame& f) {
  const double m = f.point.grad_accumulation, once = f.in.host.step_s;
  if (f.point.pp == 1) {
    const StageGroup& g = f.groups.all()[0];
    return kRounding * (m * micro_batch_s(f, g.dense, g.moe, 1, 1, 1) + once);
  }
  return kRounding * (m * least_over_splits(f, [&](const StageGroups& groups) { return slowest_stage_s(f, groups); }) + once);
}

double least_device_bytes(const Frame& f) {
  const double least = least_over_splits(f, [&](const StageGroups& groups) { return first_stage_bytes(f, groups.all()[0]); });
  return std::max(0.0, kRounding * least - 16);
}

}  // namespace shardlab::simulator::analytic
