#include "simulator/estimator/validate/own_runs.h"

#include <fmt/format.h>

#include <cmath>
#include <map>
#include <string>
#include <vector>

#include "simulator/interpreter/fabric.h"
#include "tests/test.h"
#include "tests/validate/support.h"

namespace shardlab::simulator::validation {
namespace {

using analytic::DoubtTerm;

/// Nine of ten predictions were within 16 % of compute, and 50 % of what is communicated.
analytic::LearntFigure learnt() {
  analytic::LearntFigure figure;
  figure.spread.scales[static_cast<size_t>(DoubtTerm::kCompute)] = 0.15;
  figure.spread.scales[static_cast<size_t>(DoubtTerm::kExchange)] = 0.5;
  figure.spread.scales[static_cast<size_t>(DoubtTerm::kReduction)] = 0.5;
  figure.spread.scales[static_cast<size_t>(DoubtTerm::kLaunch)] = 0.5;
  figure.spread.scales[static_cast<size_t>(DoubtTerm::kPipeline)] = 0.5;
  return figure;
}

double stated(const ByName<double>& constants, const char* name) {
  const auto found = constants.find(name);
  return found == constants.end() ? 0.8 : found->second;
}

/// A step of `1 - link` seconds of matmuls and `link` seconds within the node, at rates of 0.8 of the data sheet's.
Predictor hand_made(double link) {
  return [link](const Run& run) {
    Prediction p;
    p.step_s = (1 - link) * 0.8 / stated(run.machine.device.constants, "matmul.bf16.rate") +
               link * 0.8 / stated(run.machine.fabric, "ring_efficiency");
    return p;
  };
}

std::vector<Run> runs(double step_s, int count) {
  std::vector<std::string> rows;
  for (int i = 0; i < count; ++i) rows.push_back(fmt::format("8,1,{}", step_s));
  const RowTable table = testing::table_of("devices,micro_batch,measured_step_s", rows);
  std::vector<Run> list;
  for (const Row& row : table.rows) {
    list.push_back(*row.run);
    list.back().machine.device.constants["matmul.bf16.rate"] = 0.8;
    list.back().machine.fabric["ring_efficiency"] = 0.8;
  }
  return list;
}

TEST_CASE("a correction multiplies the rates of a machine, states those that it left open, and exceeds no data sheet") {
  const Machine machine = runs(1, 1)[0].machine;
  const Machine slower = corrected(machine, {{0.5, 0.75, 0.5, 0.8}});
  CHECK(slower.device.constants.at("matmul.bf16.rate") == Approx(0.4));
  CHECK(slower.device.constants.contains("memory.norm"));
  CHECK(slower.fabric.at("ring_efficiency") == Approx(0.6));
  CHECK(slower.device.provenance.at("fabric.ring_efficiency") == Provenance::kFitted);
  CHECK(!slower.device.constants.contains("matmul.input.rate"));  // relative to another rate
  CHECK(corrected(machine, {{2, 1, 1, 1}}).device.constants.at("matmul.bf16.rate") == 1);
  // Latencies are longer as rates are lower; a host may be faster than the one that profiles speak of.
  CHECK(slower.fabric.at("intra_latency") == Approx(FabricConstants{}.intra_latency / 0.75));
  CHECK(slower.fabric.at("all_to_all_latency_s") == Approx(FabricConstants{}.all_to_all_latency_s / 0.75));
  CHECK(slower.fabric.at("inter_latency") == Approx(FabricConstants{}.inter_latency / 0.5));
  CHECK(!slower.fabric.contains("rank_latency_s"));  // a network without any
  CHECK(slower.device.constants.at("host.speed") == Approx(0.8));
  CHECK(corrected(corrected(machine, {{1, 1, 1, 1.5}}), {{1, 1, 1, 1.2}}).device.constants.at("host.speed") == Approx(1.8));
}

TEST_CASE("runs that take longer correct the part that they consist of, drawn towards no correction") {
  const auto fit = [](double link, double step_s, int count) {
    return fit_correction(
               runs(step_s, count), [link] { return hand_made(link); }, learnt())
        .factors;
  };
  const auto one = fit(0, 1.2, 1), three = fit(0, 1.2, 3);
  CHECK(three[0] < one[0]);
  CHECK(one[0] < 1);
  CHECK(three[0] == Approx(1 / 1.2).epsilon(0.02));
  CHECK(three[0] > 1 / 1.2);
  CHECK(three[1] == Approx(1));  // nothing of the runs crosses a link
  CHECK(three[2] == Approx(1));
  // Where both could explain it, the part that predictions are surer of moves less.
  const auto both = fit(0.5, 1.2, 3);
  CHECK(std::log(both[1]) < 2 * std::log(both[0]));
  CHECK(fit(0, 50, 3)[0] >= kLeastFactor * (1 - 1e-9));
}

TEST_CASE("runs that wait for the host correct the host alone") {
  const auto waiting = [](const Run& run) {
    Prediction p;
    const auto found = run.machine.device.constants.find("host.speed");
    p.step_s = 1 / (found == run.machine.device.constants.end() ? 1 : found->second);
    return p;
  };
  const auto factors = fit_correction(
                           runs(1.25, 3), [&] { return Predictor(waiting); }, learnt())
                           .factors;
  CHECK(factors[3] == Approx(0.8).epsilon(0.02));
  for (const size_t part : {0, 1, 2}) CHECK(factors[part] == Approx(1));
}

TEST_CASE("a run that no factor explains moves little, and so does a run whose prediction is in doubt for other reasons") {
  const auto kernels = [](const std::vector<Run>& list, double bubble) {
    const auto predictor = [bubble] {
      return Predictor([bubble, inner = hand_made(0)](const Run& run) {
        auto p = inner(run);
        p->step_doubt[DoubtTerm::kPipeline] = bubble;
        return p;
      });
    };
    return fit_correction(list, predictor, learnt()).factors[0];
  };
  std::vector<Run> list = runs(1.02, 2);
  const double without = kernels(list, 0);
  list.push_back(runs(3, 1)[0]);
  CHECK(std::fabs(std::log(kernels(list, 0) / without)) < 0.03);
  CHECK(kernels(runs(1.2, 3), 0.5) > kernels(runs(1.2, 3), 0) + 0.03);
}

TEST_CASE("runs as predicted leave a machine as it is") {
  for (const double factor : fit_correction(
                                 runs(1, 3), [] { return hand_made(0.3); }, learnt())
                                 .factors)
    CHECK(factor == Approx(1));
}

}  // namespace
}  // namespace shardlab::simulator::validation
