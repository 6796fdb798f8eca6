#include "runtime/expert_rows.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <set>
#include <tuple>

#include "plan/period.h"

namespace shardlab::runtime {

RowCounting::RowCounting(const Plan& plan, const Role& role, const Program& program) {
  const std::vector<int32_t> steps = steps_of_calls(plan, role);
  std::set<std::tuple<int32_t, int32_t, int32_t>> seen;  // step, layer and micro-batch: two weights of an expert see the same rows
  std::map<std::pair<int32_t, int32_t>, CountedLayer> layers;  // by step and layer
  std::vector<std::pair<int32_t, const CountedLayer*>> counted;
  std::map<int, int64_t> chosen;  // by layer, of a micro-batch
  for (const Instruction& i : program.instructions) {
    if (i.kind != Instruction::Kind::kRun || i.call < 0) continue;
    if (const auto* route = std::get_if<Route>(&i.op->work); route != nullptr && route->phase == Phase::kF)
      chosen[i.layer] = program.writes(i)[1].type->shape.elements();
    const auto* w = std::get_if<GroupedLinear>(&i.op->work);
    if (w == nullptr || w->phase != Phase::kW) continue;
    const int32_t step = steps[static_cast<size_t>(i.call)];
    if (!seen.emplace(step, i.layer, i.micro_batch).second) continue;
    const CountedLayer layer{
        .step = step, .layer = i.layer, .counts = program.reads(i)[2].type, .sources = w->sources, .chosen = chosen[i.layer]};
    counted.emplace_back(i.id, &layers.try_emplace({step, i.layer}, layer).first->second);
  }
  std::map<const CountedLayer*, int32_t> index;
  for (auto& [key, layer] : layers) {
    layer.first = numbers_;
    numbers_ += layer.numbers();
    index[&layer] = static_cast<int32_t>(layers_.size());
    layers_.push_back(layer);
  }
  for (const auto& [id, layer] : counted) counted_.emplace_back(id, index.at(layer));
}

int RowCounting::of(const Instruction& instruction) const {
  const auto found = std::ranges::lower_bound(counted_, instruction.id, {}, &std::pair<int32_t, int32_t>::first);
  return found != counted_.end() && found->first == instruction.id ? found->second : -1;
}

void add_rows(const int32_t* counts, const CountedLayer& layer, int64_t own, std::span<int64_t> numbers) {
  const Shape& shape = layer.counts->shape;
  const int64_t parts = shape[1] / layer.sources, experts = shape.last();
  int64_t &from_others = numbers[static_cast<size_t>(experts)], &chosen = numbers[static_cast<size_t>(experts) + 1];
  chosen += layer.chosen;
  for (int64_t part = 0; part < shape[1]; ++part)
    for (int64_t e = 0; e < experts; ++e, ++counts) {
      numbers[static_cast<size_t>(e)] += *counts;
      if (layer.sources > 1 && part / parts != own) from_others += *counts;
    }
}

std::vector<ExpertRows> expert_rows(const Mesh& mesh, std::span<const RankRows> ranks) {
  std::map<std::pair<int, int>, ExpertRows> layers;  // by step and layer
  const auto pipeline = mesh.find(kPipelineAxis);
  for (const RankRows& r : ranks) {
    const Type& counts = *r.layer.counts;
    bool again = false, shared = false;  // the same rows as of another rank; experts are cut among ranks
    for (size_t a = 0; a < mesh.axes.size(); ++a) {
      const Placement& place = counts.place[a];
      again |= place.kind == Place::kReplicate && static_cast<int>(a) != pipeline.value_or(-1) && r.at[a] != 0;
      shared |= mesh.axes[a].size > 1 && place == Placement::shard(0);
    }
    if (again) continue;
    ExpertRows& layer = layers[{r.layer.step, r.layer.layer}];
    layer.step = r.layer.step, layer.layer = r.layer.layer;
    const int64_t each = counts.shape.last(), first = logical_origin(counts, mesh, r.at)[0] * each;
    layer.by_expert.resize(static_cast<size_t>(logical_shape(counts, mesh)[0] * each));
    const std::span<const int64_t> rows = r.numbers.first(static_cast<size_t>(each));
    for (size_t e = 0; e < rows.size(); ++e) layer.by_expert[static_cast<size_t>(first) + e] += rows[e];
    layer.from_others += r.numbers[rows.size()];
    layer.dropped += r.numbers[rows.size() + 1];  // all that were chosen; those that were worked at are taken off below
    if (shared) layer.by_rank.push_back(std::accumulate(rows.begin(), rows.end(), int64_t{0}));
  }
  std::vector<ExpertRows> all;
  for (auto& [key, layer] : layers) {
    layer.dropped -= std::accumulate(layer.by_expert.begin(), layer.by_expert.end(), int64_t{0});
    all.push_back(std::move(layer));
  }
  return all;
}

std::optional<double> imbalance(std::span<const int64_t> rows) {
  const int64_t all = std::accumulate(rows.begin(), rows.end(), int64_t{0});
  if (all == 0) return std::nullopt;
  return static_cast<double>(std::ranges::max(rows)) * static_cast<double>(rows.size()) / static_cast<double>(all);
}

Imbalance imbalance_of(std::span<const ExpertRows> layers) {
  const auto mean = [&](std::vector<int64_t> ExpertRows::*rows) -> std::optional<double> {
    double sum = 0;
    int64_t n = 0;
    for (const ExpertRows& layer : layers)
      if (const auto one = imbalance(layer.*rows)) sum += *one, ++n;
    if (n == 0) return std::nullopt;
    return sum / static_cast<double>(n);
  };
  return {mean(&ExpertRows::by_expert), mean(&ExpertRows::by_rank)};
}

Drops drops_of(std::span<const ExpertRows> layers) {
  Drops all;
  for (const ExpertRows& layer : layers) {
    all.dropped += layer.dropped;
    all.chosen += layer.dropped + std::accumulate(layer.by_expert.begin(), layer.by_expert.end(), int64_t{0});
  }
  return all;
}

}  // namespace shardlab::runtime
