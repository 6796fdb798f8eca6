// What of a pipeline is chosen where costs are known.
#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <numeric>

#include "simulator/interpreter/pipeline_choice.h"
#include "tests/namespaces.h"
#include "tests/simulator/plans.h"
#include "tests/test.h"

namespace shardlab::testing {
namespace {

using simulator::balanced_layers;
using simulator::measured_seconds;
using simulator::MeasuredSeconds;
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

double seconds_of(int part, int parts, size_t begin, size_t end, const MeasuredSeconds& s) {
  double sum = (part == 0 ? s.embedding : 0) + (part == parts - 1 ? s.head : 0);
  for (size_t layer = begin; layer < end; ++layer) sum += s.layers[layer];
  return sum;
}

/// The longest part, and the sum of squares of all.
using Cost = std::pair<double, double>;

Cost cost_of(const std::vector<int>& dealt, const MeasuredSeconds& s) {
  Cost cost{0, 0};
  size_t begin = 0;
  for (size_t part = 0; part < dealt.size(); begin += static_cast<size_t>(dealt[part++])) {
    const size_t end = begin + static_cast<size_t>(dealt[part]);
    const double seconds = seconds_of(static_cast<int>(part), static_cast<int>(dealt.size()), begin, end, s);
    cost.first = std::max(cost.first, seconds), cost.second += seconds * seconds;
  }
  return cost;
}

/// The least cost of all deals that begin with `dealt`.
Cost least_cost(std::vector<int> dealt, int parts, int left, const MeasuredSeconds& s) {
  const int part = static_cast<int>(dealt.size());
  dealt.push_back(left);
  if (part == parts - 1) return cost_of(dealt, s);
  Cost least{1e300, 0};
  for (int n = part == 0 ? 0 : 1; n <= left - (parts - 2 - part); ++n) {
    dealt.back() = n;
    least = std::min(least, least_cost(dealt, parts, left - n, s));
  }
  return least;
}

TEST_CASE("layers that are not alike are dealt so that the longest part is as short, and the others as even, as can be") {
  const std::vector<double> uneven{3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5};
  for (const auto& [embedding, head] : {std::pair{0.0, 0.0}, {0.0, 2.5}, {1.0, 6.0}, {20.0, 1.0}, {0.5, 20.0}})
    for (int parts = 1; parts <= 5; ++parts)
      for (int layers = parts; layers <= 11; ++layers) {
        INFO("parts " << parts << " layers " << layers << " embedding " << embedding << " head " << head);
        const MeasuredSeconds seconds{embedding, {uneven.begin(), uneven.begin() + layers}, head};
        const std::vector<int> dealt = balanced_layers(parts, seconds);
        REQUIRE(std::accumulate(dealt.begin(), dealt.end(), 0) == layers);
        for (int part = 1; part < parts - 1; ++part) REQUIRE(dealt[static_cast<size_t>(part)] >= 1);
        REQUIRE(cost_of(dealt, seconds) == least_cost({}, parts, layers, seconds));
        // Layers that are alike are dealt as by their predicted time.
        const MeasuredSeconds alike{embedding, std::vector<double>(static_cast<size_t>(layers), 1), head};
        REQUIRE(balanced_layers(parts, alike) == balanced_layers(parts, layers, units(embedding, 1, head)));
      }
  REQUIRE(balanced_layers(2, MeasuredSeconds{0, {1, 1, 1, 4}, 0}) == std::vector{3, 1});
  REQUIRE(balanced_layers(2, MeasuredSeconds{0, {4, 1, 1, 1}, 0}) == std::vector{1, 3});
  REQUIRE(balanced_layers(3, MeasuredSeconds{0, {1, 1, 1, 1, 1, 1}, 6}) == std::vector{3, 3, 0});
}

/// Two stages of two layers each and two data-parallel ranks, two micro-batches. Layers have two ops forward and one backward.
Expanded layered() {
  std::string text =
      "shardlab plan 1\nname layered\nmesh pp=2 dp=2\nstreams compute out in\ncomm fwd axes pp\n"
      "segment layer.F\n  bound %x activation f32[16]\n  copy a (%x) -> (%x)\n  copy b (%x) -> (%x)\n"
      "segment layer.B\n  bound %x activation f32[16]\n  copy c (%x) -> (%x)\n"
      "segment embed.F\n  bound %x activation f32[16]\n  copy d (%x) -> (%x)\n"
      "segment head.F\n  bound %x activation f32[16]\n  copy e (%x) -> (%x)\n"
      "segment update\n  bound %x activation f32[16]\n  copy f (%x) -> (%x)\n"
      "segment park.layer\n  bound %x activation f32[16]\n  bound %h activation f32[16] host\n  copy g (%x) -> (%h) @out\n"
      "segment send.fwd\n  bound %x activation f32[16]\n  send s (%x) -> () comm=fwd @out\n"
      "segment recv.fwd\n  bound %x activation f32[16]\n  recv r () -> (%x) comm=fwd @in\n";
  for (int stage = 0; stage < 2; ++stage) {
    text += fmt::format("role {}\n  %x activation f32[16] persistent\n  %h activation f32[16] host persistent\n", stage);
    for (int m = 0; m < 2; ++m) {
      text += fmt::format("  call {} m={} (x=%x)\n", stage == 0 ? "embed.F" : "recv.fwd", m);
      for (const char* call : {"layer.F", "layer.B"})
        for (int layer = 2 * stage; layer < 2 * stage + 2; ++layer)
          text += fmt::format("  call {} l={} m={} (x=%x)\n", call, layer, m);
      text += fmt::format("  call park.layer l={} m={} (x=%x, h=%h)\n", 2 * stage, m);
      text += fmt::format("  call {} m={} (x=%x)\n", stage == 0 ? "send.fwd" : "head.F", m);
    }
    text += "  call update (x=%x)\n";
  }
  return expanded(text);
}

/// Three steps in which each op takes `seconds(op's instruction, rank)` and waits a second for its peers besides; the last step is
/// disturbed.
Trace trace_of(const Expanded& e, const std::function<double(const Instruction&, int)>& seconds) {
  Trace trace;
  trace.world_size = e.plan->mesh.world_size(), trace.steps = 3;
  trace.streams = e.plan->streams;
  for (int rank = 0; rank < trace.world_size; ++rank)
    for (int step = 0; step < trace.steps; ++step)
      for (const Instruction& i : e.programs[static_cast<size_t>(e.plan->mesh.role_of(rank))].instructions) {
        const double took = seconds(i, rank);
        if (i.kind != Instruction::Kind::kRun || took == 0) continue;
        trace.events.push_back({.rank = rank,
                                .instruction = i.id,
                                .stream = i.stream,
                                .step = step,
                                .begin = 0,
                                .end = 1 + (step == 2 ? 100 : took),
                                .peer_wait = 1});
      }
  return trace;
}

TEST_CASE("a layer that a trace shows to be slow has its stage to itself") {
  const Expanded e = layered();
  // Layer 0 takes four times as long as the others. Of two data-parallel ranks the second is slower: their mean counts.
  const Trace trace = trace_of(e, [](const Instruction& i, int rank) {
    const double unit = i.layer == 0 ? 4 : 1;
    return rank % 2 == 0 ? unit : 3 * unit;
  });
  const auto seconds = measured_seconds(*e.plan, e.programs, trace);
  REQUIRE(seconds.ok());
  // Two micro-batches, three ops a layer, and a mean of twice the first rank's time. Messages, the update and the copy to the host, which
  // the call of a layer makes, are in nobody's time.
  CHECK(seconds->layers == std::vector<double>{48, 12, 12, 12});
  CHECK(seconds->embedding == 4);
  CHECK(seconds->head == 4);
  CHECK(balanced_layers(2, *seconds) == std::vector{1, 3});

  const Trace without = trace_of(e, [](const Instruction& i, int) { return i.layer == 2 ? 0 : 1; });
  const auto refused = measured_seconds(*e.plan, e.programs, without);
  REQUIRE_FALSE(refused.ok());
  CHECK(to_string(refused.error()) == "the trace has no time of layer 2\n  measure the run again, or set stage_layers: balanced");
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
