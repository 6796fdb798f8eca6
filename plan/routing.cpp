#include "plan/routing.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <numeric>

#include "plan/base/check.h"
#include "plan/base/files.h"
#include "plan/base/hash.h"
#include "plan/base/limits.h"
#include "plan/base/values.h"
#include "plan/pipeline_case.h"

namespace shardlab {
namespace {

constexpr std::string_view kFirstLine = "shardlab routes 1";
constexpr double kMostExponent = 100;
constexpr int64_t kMostRows = int64_t{1} << 40;  ///< of one number: a sum over any file's numbers fits

/// min(1, c w_e) with the sum k: experts that would be above 1 are 1, and the others share what is left.
std::vector<double> bounded_shares(const std::vector<double>& weights, double k) {
  std::vector<double> shares(weights.size());
  std::vector<bool> full(weights.size());
  for (bool again = true; again;) {
    again = false;
    double left = k, sum = 0;
    for (size_t e = 0; e < weights.size(); ++e) full[e] ? left -= 1 : sum += weights[e];
    for (size_t e = 0; e < weights.size(); ++e) {
      shares[e] = full[e] ? 1 : sum > 0 ? left * weights[e] / sum : 0;
      if (!full[e] && shares[e] >= 1) full[e] = true, again = true;
    }
  }
  return shares;
}

/// By expert, its place in the layer's order of popularity, from 0.
std::vector<size_t> places_of(size_t experts, int64_t layer) {
  std::vector<size_t> order(experts), places(experts);
  std::iota(order.begin(), order.end(), size_t{0});
  const auto key = [&](size_t e) { return mix(mix(static_cast<uint64_t>(layer)) ^ e); };
  std::ranges::sort(order, [&](size_t a, size_t b) { return std::pair(key(a), a) < std::pair(key(b), b); });
  for (size_t place = 0; place < experts; ++place) places[order[place]] = place;
  return places;
}

Error not_routes(const std::string& path, size_t line, std::string_view why) {
  return {ExitCode::kUsage, fmt::format("line {}: {}", line, why),
          "name the routes.txt or loads.txt that a measured case keeps in its folder", path};
}

/// Words of a line that are numbers, and words before them.
class Line {
 public:
  explicit Line(std::string_view text) : rest_(text) {}
  bool word(std::string_view wanted) { return next() == wanted; }
  std::optional<int64_t> number() {
    const std::string_view text = next();
    int64_t n = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), n);
    if (text.empty() || error != std::errc() || end != text.data() + text.size() || n < 0 || n > kMostRows) return std::nullopt;
    return n;
  }
  bool done() const { return rest_.empty(); }
  std::string_view next() {
    const size_t end = std::min(rest_.find(' '), rest_.size());
    const std::string_view word = rest_.substr(0, end);
    rest_.remove_prefix(std::min(end + 1, rest_.size()));
    return word;
  }

 private:
  std::string_view rest_;
};

}  // namespace

std::optional<Routing> routing_named(std::string_view text) {
  Routing r;
  if (text.empty() || text == "balanced") return r;
  const size_t colon = text.find(':');
  if (colon == std::string_view::npos) return std::nullopt;
  const std::string_view kind = text.substr(0, colon);
  const std::string value(text.substr(colon + 1));
  if (kind == "zipf") {
    const auto exponent = parse_number(value);
    if (!exponent || !(*exponent > 0) || *exponent > kMostExponent) return std::nullopt;
    r.kind = Routing::Kind::kZipf, r.exponent = *exponent;
    return r;
  }
  if (kind != "forced") return std::nullopt;
  const auto experts = parse_count(value);
  if (!experts || *experts < 1) return std::nullopt;
  r.kind = Routing::Kind::kForced, r.experts = *experts;
  return r;
}

Result<Routing> routing_of(const Case& c) {
  if (c.data.routes.empty()) {
    const auto named = routing_named(c.data.routing);
    SHARDLAB_CHECK(named, "data.routing={} is no routing", c.data.routing);
    return *named;
  }
  const auto text = read_file_within(c.data.routes, limits::kRowsBytes);
  if (!text.ok()) return text.error();
  auto layers = parse_routes(*text, c.data.routes);
  if (!layers.ok()) return layers.error();
  const auto unlike = [&](std::string why) {
    return Error{ExitCode::kUsage, std::move(why), "name the routes of a run of this model", c.data.routes};
  };
  size_t at = 0;
  for (int64_t layer = 0; layer < c.model.layers; ++layer) {
    if (!c.model.is_mixture(layer)) continue;
    if (at == layers->size() || (*layers)[at].layer != layer) return unlike(fmt::format("it has no layer {}", layer));
    const ExpertRows& rows = (*layers)[at++];
    if (static_cast<int64_t>(rows.by_expert.size()) != c.model.experts.count)
      return unlike(
          fmt::format("layer {} has {} experts, and the model has {}", layer, rows.by_expert.size(), c.model.experts.count));
    if (std::accumulate(rows.by_expert.begin(), rows.by_expert.end(), int64_t{0}) == 0)
      return unlike(fmt::format("layer {} has no rows", layer));
    // A token chooses top_k experts once each, so that an expert has a row of each token at most.
    const int64_t tokens = drops_of({&rows, 1}).chosen / c.model.experts.top_k;
    const auto fullest = std::ranges::max_element(rows.by_expert);
    if (*fullest > tokens)
      return unlike(fmt::format("layer {} has {} rows of expert {}, and tokens that choose {} experts each are {}", layer, *fullest,
                                fullest - rows.by_expert.begin(), c.model.experts.top_k, tokens));
  }
  if (at != layers->size()) return unlike(fmt::format("the model has no experts in layer {}", (*layers)[at].layer));
  return Routing{.kind = Routing::Kind::kRecorded, .recorded = std::move(*layers)};
}

std::vector<double> shares_of_experts(const Routing& routing, const Experts& experts, int64_t layer) {
  const auto count = static_cast<size_t>(experts.count);
  const auto k = static_cast<double>(experts.top_k);
  std::vector<double> weights(count, 1.0);
  switch (routing.kind) {
    case Routing::Kind::kBalanced: break;
    case Routing::Kind::kZipf: {
      const std::vector<size_t> places = places_of(count, layer);
      for (size_t e = 0; e < count; ++e) weights[e] = std::pow(static_cast<double>(places[e] + 1), -routing.exponent);
      break;
    }
    case Routing::Kind::kForced:
      for (size_t e = 0; e < count; ++e) weights[e] = static_cast<int64_t>(e) < routing.experts ? 1 : 0;
      break;
    case Routing::Kind::kRecorded: {
      const auto found = std::ranges::find(routing.recorded, static_cast<int>(layer), &ExpertRows::layer);
      SHARDLAB_CHECK(found != routing.recorded.end() && found->by_expert.size() == count, "no routes of layer {} are recorded",
                     layer);
      for (size_t e = 0; e < count; ++e) weights[e] = static_cast<double>(found->by_expert[e]);
      break;
    }
  }
  return bounded_shares(weights, k);
}

namespace {

/// `shares_of_experts`, of each expert no more than it has room for.
std::vector<double> taken_shares(const Routing& routing, const Experts& e, int64_t layer) {
  std::vector<double> shares = shares_of_experts(routing, e, layer);
  // An expert takes capacity_factor times the even share at most.
  const double most = e.drops() ? e.capacity_factor * static_cast<double>(e.top_k) / static_cast<double>(e.count) : 1;
  for (double& share : shares) share = std::min(share, std::min(most, 1.0));
  return shares;
}

}  // namespace

bool is_placement_decided(const Case& c) {
  return c.layout.expert_placement != kBalanced && c.layout.expert_placement != kMeasured;
}

std::vector<ExpertPlacement> placements_of(const Case& c, const Routing& routing, int ranks) {
  const std::string& said = c.layout.expert_placement;
  std::vector<ExpertPlacement> placements;
  if (said.empty() || said == kMeasured) return placements;
  if (said != kBalanced) {
    auto listed = read_placements(said);
    SHARDLAB_CHECK(listed, "expert_placement={} of `{}` is no placement", said, c.name);
    return std::move(*listed);
  }
  for (int64_t layer = 0; layer < c.model.layers; ++layer) {
    if (!c.model.is_mixture(layer)) continue;
    auto placement = placement_after(static_cast<int>(layer), taken_shares(routing, c.model.experts, layer), ranks, nullptr);
    if (placement) placements.push_back(std::move(*placement));
  }
  return placements;
}

double expected_imbalance(const Routing& routing, const Model& model, int64_t parts, std::span<const ExpertPlacement> placements) {
  const Experts& e = model.experts;
  if (!model.is_mixture() || routing.is_even() || parts <= 1) return 1;
  double sum = 0;
  int64_t layers = 0;
  for (int64_t layer = 0; layer < model.layers; ++layer) {
    if (!model.is_mixture(layer)) continue;
    const std::vector<double> shares = taken_shares(routing, e, layer);
    sum += imbalance_under(placement_of(placements, static_cast<int>(layer)), shares, static_cast<int>(parts)), ++layers;
  }
  return layers > 0 ? sum / static_cast<double>(layers) : 1;
}

std::string print_routes(std::span<const ExpertRows> layers) {
  std::string text = fmt::format("{}\n", kFirstLine);
  for (const ExpertRows& layer : layers) {
    for (size_t source = 0; source < layer.by_source.size(); ++source)
      text += fmt::format("layer {} source {} rows {}\n", layer.layer, source, fmt::join(layer.by_source[source], " "));
    if (layer.dropped > 0) text += fmt::format("layer {} dropped {}\n", layer.layer, layer.dropped);
  }
  return text;
}

Result<std::vector<ExpertRows>> parse_routes(std::string_view text, const std::string& path) {
  std::vector<ExpertRows> layers;
  for (size_t number = 1; !text.empty(); ++number) {
    const size_t end = std::min(text.find('\n'), text.size());
    const std::string_view said = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    if (number == 1) {
      if (said != kFirstLine) return not_routes(path, number, fmt::format("`{}` is expected", kFirstLine));
      continue;
    }
    Line line(said);
    const auto layer = line.word("layer") ? line.number() : std::nullopt;
    const std::string_view what = line.next();
    if (layer && what == "dropped") {
      const auto dropped = line.number();
      const bool behind = !layers.empty() && layers.back().layer == *layer && layers.back().dropped == 0;
      if (!dropped || !line.done() || !behind)
        return not_routes(path, number, "`layer L dropped N` is expected behind the rows of layer L");
      layers.back().dropped = *dropped;
      continue;
    }
    const auto source = layer && what == "source" ? line.number() : std::nullopt;
    if (!source || *layer > (1 << 20) || !line.word("rows"))
      return not_routes(path, number, "`layer L source S rows N N ...` is expected");
    if (layers.empty() || layers.back().layer != *layer) {
      if (!layers.empty() && layers.back().layer > *layer)
        return not_routes(path, number, fmt::format("layer {} is out of order", *layer));
      layers.emplace_back().layer = static_cast<int>(*layer);
    }
    ExpertRows& rows = layers.back();
    if (*source != std::ssize(rows.by_source))
      return not_routes(path, number, fmt::format("source {} of layer {} is expected", rows.by_source.size(), *layer));
    std::vector<int64_t>& own = rows.by_source.emplace_back();
    while (!line.done()) {
      const auto n = line.number();
      if (!n) return not_routes(path, number, "a number of rows is expected");
      own.push_back(*n);
    }
    if (own.empty() || own.size() != rows.by_source.front().size())
      return not_routes(path, number, "every source has a number for each expert");
    rows.by_expert.resize(own.size());
    for (size_t e = 0; e < own.size(); ++e) rows.by_expert[e] += own[e];
  }
  if (layers.empty()) return not_routes(path, 1, "no layer has rows");
  return layers;
}

}  // namespace shardlab
