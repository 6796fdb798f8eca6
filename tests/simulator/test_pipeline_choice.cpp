// What of a pipeline is chosen where costs are known.
#include <algorithm>

#include "simulator/interpreter/pipeline_choice.h"
#include "tests/namespaces.h"
#include "tests/test.h"

namespace shardlab::testing {
namespace {

using simulator::balanced_layers;
using simulator::pipeline_candidates;
using simulator::PipelineCandidate;
using simulator::slot_costs;
using simulator::UnitSeconds;

UnitSeconds units(double embedding, double layer, double head) {
  const auto slots = [](double all) { return simulator::SlotSeconds{all / 4, all / 2, all / 4}; };
  return {slots(embedding), slots(layer), slots(head), 0};
}

double longest(const std::vector<int>& layers, const UnitSeconds& seconds) {
  const SlotCosts costs = slot_costs(layers, seconds);
  double most = 0;
  for (size_t part = 0; part < layers.size(); ++part) most = std::max(most, costs.forward[part] + costs.input[part] + costs.weight[part]);
  return most;
}

/// The least that any deal of the layers makes of the longest part.
double best(int part, int parts, int left, std::vector<int>& layers, const UnitSeconds& seconds) {
  if (part == parts - 1) {
    layers[static_cast<size_t>(part)] = left;
    return longest(layers, seconds);
  }
  double least = 1e300;
  for (int n = part == 0 ? 0 : 1; n <= left - (parts - 2 - part); ++n) {
    layers[static_cast<size_t>(part)] = n;
    least = std::min(least, best(part + 1, parts, left - n, layers, seconds));
  }
  return least;
}

TEST_CASE("layers are dealt so that no deal has a shorter longest part") {
  for (const auto& [embedding, head] : {std::pair{0.0, 0.0}, {0.0, 2.5}, {1.0, 6.0}, {8.0, 1.0}, {0.5, 20.0}})
    for (int parts = 2; parts <= 5; ++parts)
      for (int layers = parts; layers <= 11; ++layers) {
        const UnitSeconds seconds = units(embedding, 1, head);
        const std::vector<int> dealt = balanced_layers(parts, layers, seconds);
        INFO("parts " << parts << " layers " << layers << " embedding " << embedding << " head " << head);
        int sum = 0;
        for (const int n : dealt) sum += n;
        REQUIRE(sum == layers);
        REQUIRE(*std::min_element(dealt.begin() + 1, dealt.end() - 1 + (parts == 2)) >= (parts == 2 ? 0 : 1));
        std::vector<int> scratch(static_cast<size_t>(parts));
        REQUIRE(longest(dealt, seconds) == Approx(best(0, parts, layers, scratch, seconds)).epsilon(1e-12));
      }
  REQUIRE(balanced_layers(4, 12, units(0, 1, 3)) == std::vector{3, 4, 4, 1});
}

TEST_CASE("candidates of a pipeline are ranked by what their slots take") {
  Case c;
  c.model.layers = 16;
  c.layout.pp = 4;
  c.train.grad_accumulation = 8;
  const std::vector<PipelineCandidate> all = pipeline_candidates(c, units(0, 1, 0));
  REQUIRE(all.size() > 12);
  REQUIRE(std::ranges::is_sorted(all, {}, &PipelineCandidate::seconds));
  for (const PipelineCandidate& candidate : all) {
    REQUIRE(check(candidate.schedule).ok());
    REQUIRE(candidate.seconds == play(candidate.schedule, slot_costs(candidate.layers, units(0, 1, 0)))->end);
    // No stage computes less than its share of the layers.
    REQUIRE(candidate.seconds >= 8 * 4);
  }
  const auto seconds_of = [&](Schedule schedule) { return std::ranges::find(all, schedule, &PipelineCandidate::named)->seconds; };
  REQUIRE(seconds_of(Schedule::k1F1B) == 8 * 4 + 3 * 4);
  REQUIRE(seconds_of(Schedule::kZbH1) < seconds_of(Schedule::k1F1B));
}

}  // namespace
}  // namespace shardlab::testing
