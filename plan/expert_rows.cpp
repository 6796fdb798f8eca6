#include "plan/expert_rows.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <set>
#include <tuple>

#include "plan/named_kernels.h"
#include "plan/period.h"

namespace shardlab {

namespace {

/// Whether an op cuts counts off where there is no more room: it reads all that have come.
bool cuts_counts(const Instruction& instruction) {
  const auto* kernel = std::get_if<Kernel>(&instruction.op->work);
  return kernel != nullptr && meaning_of(*kernel) == KernelMeaning::kFit;
}

}  // namespace

size_t RowCounting::read_of(const Instruction& instruction) { return cuts_counts(instruction) ? 1 : 2; }

RowCounting::RowCounting(const Plan& plan, const Role& role, const Program& program, int together) {
  const std::vector<int32_t> steps = steps_of_calls(plan, role);
  std::set<std::tuple<int32_t, int32_t, int32_t>> seen;  // step, layer and micro-batch: two weights of an expert see the same rows
  std::map<std::pair<int32_t, int32_t>, CountedLayer> layers;  // by step and layer
  std::vector<std::pair<int32_t, const CountedLayer*>> counted;
  std::map<int, CountedLayer> routed;  // by layer: what its router says
  std::map<std::tuple<int32_t, int32_t, int32_t>, int32_t>
      fitted;  // where experts go by counts that are cut off: the op that has all of them
  for (const Instruction& i : program.instructions) {
    if (i.kind != Instruction::Kind::kRun || i.call < 0) continue;
    if (const auto* route = std::get_if<Route>(&i.op->work); route != nullptr && route->phase == Phase::kF) {
      const Type* type = program.writes(i)[1].type;
      const Shape& choice = type->shape;
      routed[i.layer] = {
          .chosen = choice.elements(), .sequences = choice[0], .top_k = choice.last(), .capacity = route->capacity, .choice = type};
    }
    const int32_t step = steps[static_cast<size_t>(i.call)];
    if (cuts_counts(i)) fitted.try_emplace({step, i.layer, i.micro_batch}, i.id);
    const auto* w = std::get_if<GroupedLinear>(&i.op->work);
    if (w == nullptr || w->phase != Phase::kW) continue;
    if (!seen.emplace(step, i.layer, i.micro_batch).second) continue;
    CountedLayer layer = routed[i.layer];
    layer.step = step, layer.layer = i.layer, layer.counts = program.reads(i)[2].type, layer.sources = w->sources;
    layer.together = together;
    layer.expected = w->rows, layer.placement = placement_of(plan.expert_placement, i.layer);
    CountedLayer& counts = layers.try_emplace({step, i.layer}, layer).first->second;
    ++counts.micro_batches;
    const auto all = fitted.find({step, i.layer, i.micro_batch});
    counted.emplace_back(all != fitted.end() ? all->second : i.id, &counts);
  }
  std::map<const CountedLayer*, int32_t> index;
  for (auto& [key, layer] : layers) {
    layer.first = numbers_;
    numbers_ += layer.numbers();
    index[&layer] = static_cast<int32_t>(layers_.size());
    layers_.push_back(layer);
  }
  for (const auto& [id, layer] : counted) counted_.emplace_back(id, index.at(layer));
  std::ranges::sort(counted_);
}

int RowCounting::of(const Instruction& instruction) const {
  const auto found = std::ranges::lower_bound(counted_, instruction.id, {}, &std::pair<int32_t, int32_t>::first);
  return found != counted_.end() && found->first == instruction.id ? found->second : -1;
}

RowOwners::RowOwners(const Type& counts, const Mesh& mesh, int stage) {
  const auto pipeline = mesh.find(kPipelineAxis);
  const auto is_pipeline = [&](size_t axis) { return pipeline && static_cast<int>(axis) == *pipeline; };
  owner.assign(static_cast<size_t>(mesh.world_size()), -1);
  std::map<int, std::vector<int>> groups;  // by first rank: owners whose ranks share experts, by place
  std::vector<int> group_of;               // by owner
  int members = 0;
  for (int rank = 0; rank < mesh.world_size(); ++rank) {
    const Coordinates at = mesh.coordinates(rank);
    if (mesh.role_of(at) != stage) continue;
    ++members;
    Coordinates first = at, group = at;  // of the ranks with the same tokens, and of those that share experts
    for (size_t a = 0; a < mesh.axes.size(); ++a) {
      const Placement& place = counts.place[a];
      if (place.kind == Place::kReplicate && !is_pipeline(a)) first[a] = group[a] = 0;
      if (place == Placement::shard(0)) group[a] = 0, shares |= mesh.axes[a].size > 1;
    }
    if (first != at) {
      owner[static_cast<size_t>(rank)] = owner[static_cast<size_t>(mesh.rank(first))];
      continue;
    }
    const int number = static_cast<int>(ranks.size());
    owner[static_cast<size_t>(rank)] = number;
    ranks.push_back(rank);
    part.push_back(static_cast<int>(logical_origin(counts, mesh, at)[0]));
    group_of.push_back(mesh.rank(group));
    std::vector<int>& places = groups[group_of.back()];
    places.resize(std::max(places.size(), static_cast<size_t>(part.back()) + 1), -1);
    places[static_cast<size_t>(part.back())] = number;
  }
  for (const int group : group_of) sources.push_back(groups[group]);
  copies = ranks.empty() ? 1 : members / static_cast<int>(ranks.size());
}

void add_rows(const int32_t* counts, const CountedLayer& layer, int micro_batch, std::span<int64_t> numbers) {
  const Shape& shape = layer.counts->shape;
  const int64_t parts = shape[1] / layer.sources, experts = shape.last();
  int64_t& worked = numbers[layer.worked_at() + static_cast<size_t>(micro_batch % layer.micro_batches / layer.together)];
  for (int64_t part = 0; part < shape[1]; ++part)
    for (int64_t e = 0; e < experts; ++e, ++counts) {
      numbers[static_cast<size_t>(part / parts * experts + e)] += *counts;
      worked += *counts;
    }
  numbers[layer.chosen_at()] += layer.chosen;
}

namespace {

/// By owner: the rows of a layer that its rank would work at if experts were contiguous.
std::vector<int64_t> contiguous_rows(const ExpertRows& layer, const RowOwners& owners) {
  std::vector<int64_t> rows;
  for (size_t o = 0; o < owners.ranks.size(); ++o) {
    const size_t each = layer.by_expert.size() / owners.sources[o].size(), first = static_cast<size_t>(owners.part[o]) * each;
    int64_t& own = rows.emplace_back();
    for (const int source : owners.sources[o])
      for (size_t e = first; e < first + each; ++e) own += layer.by_source[static_cast<size_t>(source)][e];
  }
  return rows;
}

}  // namespace

std::vector<ExpertRows> expert_rows(const Mesh& mesh, std::span<const RankRows> ranks) {
  std::map<std::pair<int, int>, ExpertRows> layers;        // by step and layer
  std::map<int, RowOwners> owners;                         // by stage: its layers have counts of one placement
  std::map<std::pair<int, int>, const RowOwners*> placed;  // of layers whose experts do not lie in order
  for (const RankRows& r : ranks) {
    const Type& counts = *r.layer.counts;
    const int stage = mesh.role_of(r.at), rank = mesh.rank(r.at);
    const RowOwners& of = owners.try_emplace(stage, counts, mesh, stage).first->second;
    const auto number = static_cast<size_t>(of.owner[static_cast<size_t>(rank)]);
    if (of.ranks[number] != rank) continue;  // the same rows as of another rank
    ExpertRows& layer = layers[{r.layer.step, r.layer.layer}];
    layer.step = r.layer.step, layer.layer = r.layer.layer;
    const auto each = static_cast<size_t>(counts.shape.last()), first = static_cast<size_t>(of.part[number]) * each;
    const auto experts = static_cast<size_t>(logical_shape(counts, mesh)[0]) * each;
    layer.by_expert.resize(experts);
    layer.by_source.resize(of.ranks.size(), std::vector<int64_t>(experts));
    int64_t worked = 0;
    for (size_t source = 0; source < static_cast<size_t>(r.layer.sources); ++source) {
      const auto sender = static_cast<size_t>(of.sources[number][source]);
      for (size_t e = 0; e < each; ++e) {
        const int64_t rows = r.numbers[source * each + e];
        const size_t expert = r.layer.expert_at(first + e);
        layer.by_expert[expert] += rows;
        layer.by_source[sender][expert] += rows;
        worked += rows;
        if (sender != number) layer.from_others += rows;
      }
    }
    layer.dropped += r.numbers[r.layer.chosen_at()];  // all that were chosen; those that were worked at are taken off below
    if (of.shares) {
      layer.by_rank.resize(of.ranks.size());
      layer.by_rank[number] += worked;  // mirrored stages have the layer twice, each for its own micro-batches
      const auto even = static_cast<double>(r.layer.chosen * r.layer.together);
      for (const int64_t rows : r.numbers.subspan(r.layer.worked_at()))
        layer.fullest = std::max(layer.fullest, static_cast<double>(rows) / even);
    }
    if (of.shares && r.layer.placement != nullptr) placed[{r.layer.step, r.layer.layer}] = &of;
  }
  for (const auto& [key, of] : placed) layers.at(key).by_rank_contiguous = contiguous_rows(layers.at(key), *of);
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
  Imbalance all{mean(&ExpertRows::by_expert), mean(&ExpertRows::by_rank), std::nullopt, std::nullopt};
  for (const ExpertRows& layer : layers)
    if (!layer.by_rank.empty()) all.peak = std::max(all.peak.value_or(0), layer.fullest);
  if (std::ranges::all_of(layers, [](const ExpertRows& layer) { return layer.by_rank_contiguous.empty(); })) return all;
  double sum = 0;
  int64_t n = 0;
  for (const ExpertRows& layer : layers)
    if (const auto one = imbalance(layer.by_rank_contiguous.empty() ? layer.by_rank : layer.by_rank_contiguous)) sum += *one, ++n;
  if (n > 0) all.by_rank_contiguous = sum / static_cast<double>(n);
  return all;
}

Drops drops_of(std::span<const ExpertRows> layers) {
  Drops all;
  for (const ExpertRows& layer : layers) {
    all.dropped += layer.dropped;
    all.chosen += layer.dropped + std::accumulate(layer.by_expert.begin(), layer.by_expert.end(), int64_t{0});
  }
  return all;
}

}  // namespace shardlab
