#include "simulator/estimator/validate/own_runs.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>
#include <utility>

#include "simulator/interpreter/device_constants.h"
#include "simulator/interpreter/fabric.h"

namespace shardlab::simulator::validation {
namespace {

using analytic::DoubtTerm;
using Parameters = std::array<double, kMachineParts>;

constexpr double kNoise = 0.03;  ///< of one run against the next
constexpr size_t kFitted = 3, kFewestRows = 5;
constexpr double kWithin = 1.645;  ///< deviations of a normal that nine of ten values lie within
/// Of the variance of a part's error, the share that runs of one machine have in common. The rest is each layout's own.
constexpr double kCommon = 0.5;
/// Degrees of freedom of the t distribution that residuals and factors are taken to have.
constexpr double kTail = 4;

/// Rates of kernels are shares of a data sheet's.
bool is_rate(const DeviceConstant& c) {
  if (c.name.ends_with(".rate")) return c.name != "matmul.input.rate" && c.name != "matmul.weight.rate";
  return c.name.starts_with("memory.");
}

struct FabricRate {
  std::string_view name;
  double FabricConstants::*value;
  MachinePart part;
};
constexpr FabricRate kFabricRates[] = {
    {"ring_efficiency", &FabricConstants::ring_efficiency, MachinePart::kLinks},
    {"nvls_efficiency", &FabricConstants::nvls_efficiency, MachinePart::kLinks},
    {"send_efficiency", &FabricConstants::send_efficiency, MachinePart::kLinks},
    {"all_to_all_efficiency", &FabricConstants::all_to_all_efficiency, MachinePart::kLinks},
    {"inter_efficiency", &FabricConstants::inter_efficiency, MachinePart::kNetwork},
    {"remote_send_efficiency", &FabricConstants::remote_send_efficiency, MachinePart::kNetwork},
};

/// Latencies are longer as rates are lower: one part of a machine has one factor.
constexpr FabricRate kFabricLatencies[] = {
    {"intra_latency", &FabricConstants::intra_latency, MachinePart::kLinks},
    {"send_latency_s", &FabricConstants::send_latency_s, MachinePart::kLinks},
    {"all_to_all_latency_s", &FabricConstants::all_to_all_latency_s, MachinePart::kLinks},
    {"inter_latency", &FabricConstants::inter_latency, MachinePart::kNetwork},
    {"remote_latency_s", &FabricConstants::remote_latency_s, MachinePart::kNetwork},
    {"rank_latency_s", &FabricConstants::rank_latency_s, MachinePart::kNetwork},
};

double stated(const ByName<double>& constants, std::string_view name, double unstated) {
  const auto found = constants.find(std::string(name));
  return found == constants.end() ? unstated : found->second;
}

void scale(ByName<double>& constants, std::string_view name, double unstated, double factor) {
  constants[std::string(name)] = std::min(1.0, stated(constants, name, unstated) * factor);
}

Correction correction_of(const Parameters& x) {
  Correction c;
  for (size_t i = 0; i < x.size(); ++i) c.factors[i] = std::exp(x[i]);
  return c;
}

/// ln measured - ln predicted of each run; nothing for a run without one of the two.
std::vector<std::optional<double>> residuals(std::span<const Run> runs, const Parameters& x, const Predictor& predict) {
  std::vector<std::optional<double>> list;
  const Correction correction = correction_of(x);
  for (Run run : runs) {
    run.machine = corrected(std::move(run.machine), correction);
    const auto p = predict(run);
    const bool both = p.ok() && p->step_s > 0 && run.measured.step_s;
    list.push_back(both ? std::optional(std::log(*run.measured.step_s / p->step_s)) : std::nullopt);
  }
  return list;
}

/// Solves the symmetric positive system a y = b.
Parameters solve(std::array<Parameters, kMachineParts> a, Parameters b) {
  for (size_t i = 0; i < kMachineParts; ++i)
    for (size_t row = i + 1; row < kMachineParts; ++row) {
      const double share = a[row][i] / a[i][i];
      for (size_t k = i; k < kMachineParts; ++k) a[row][k] -= share * a[i][k];
      b[row] -= share * b[i];
    }
  for (size_t i = kMachineParts; i-- > 0;) {
    for (size_t k = i + 1; k < kMachineParts; ++k) b[i] -= a[i][k] * b[k];
    b[i] /= a[i][i];
  }
  return b;
}

/// The terms of a step's doubt that are shares of its time.
constexpr std::array kShares{DoubtTerm::kCompute,   DoubtTerm::kLaunch,   DoubtTerm::kExchange, DoubtTerm::kExperts,
                             DoubtTerm::kReduction, DoubtTerm::kPipeline, DoubtTerm::kHidden};

/// Standard deviation of ln measured / predicted of a step that is all of one kind, by what published runs taught.
double deviation(const analytic::LearntFigure& learnt, DoubtTerm term) {
  return std::max(0.01, learnt.spread.multiplier * learnt.spread.scales[static_cast<size_t>(term)] / kWithin);
}

/// What a residual of each run weighs: one over the variance of what no rate of the machine explains.
std::vector<double> weights_of(std::span<const Run> runs, const Predictor& predict, const analytic::LearntFigure& learnt) {
  std::vector<double> weights;
  for (const Run& run : runs) {
    double variance = kNoise * kNoise;
    if (const auto p = predict(run); p.ok())
      for (const DoubtTerm term : kShares) {
        const double own = deviation(learnt, term) * p->step_doubt[term];
        variance += (1 - kCommon) * own * own;
      }
    weights.push_back(1 / variance);
  }
  return weights;
}

/// One step of Gauss and Newton from `x`.
Parameters improved(std::span<const Run> runs, const Parameters& x, const Parameters& prior, std::span<const double> weights,
                    const std::function<Predictor()>& predictor) {
  constexpr double kStep = 0.05;
  const auto here = residuals(runs, x, predictor());
  std::array<std::vector<std::optional<double>>, kMachineParts> beside;
  for (size_t i = 0; i < kMachineParts; ++i) {
    Parameters moved = x;
    moved[i] += kStep;
    beside[i] = residuals(runs, moved, predictor());
  }
  std::array<Parameters, kMachineParts> a{};
  Parameters b{};
  for (size_t i = 0; i < kMachineParts; ++i) {
    const double far = x[i] / prior[i];
    a[i][i] = (kTail + 1) / (kTail + far * far) / (prior[i] * prior[i]), b[i] = -x[i] * a[i][i];
  }
  for (size_t r = 0; r < runs.size(); ++r) {
    if (!here[r]) continue;
    Parameters slope{};
    for (size_t i = 0; i < kMachineParts; ++i) slope[i] = beside[i][r] ? (*beside[i][r] - *here[r]) / kStep : 0;
    const double weight = weights[r] * (kTail + 1) / (kTail + weights[r] * *here[r] * *here[r]);
    for (size_t i = 0; i < kMachineParts; ++i) {
      for (size_t k = 0; k < kMachineParts; ++k) a[i][k] += weight * slope[i] * slope[k];
      b[i] -= weight * slope[i] * *here[r];
    }
  }
  Parameters next = solve(a, b);
  const double most = -std::log(kLeastFactor);
  for (size_t i = 0; i < kMachineParts; ++i) next[i] = std::clamp(x[i] + next[i], -most, most);
  return next;
}

std::string family_of(const Run& run) {
  const RunShape& s = run.shape;
  return fmt::format("{} {} {} {} {} {} {} {}", run.profile, s.layers, s.hidden, s.heads, s.ffn, s.vocab, s.experts,
                     run.machine.id);
}

/// The places of the rows to fit on, in a family that is in order.
std::array<size_t, kFitted> fitted_places(size_t rows) { return {rows / 6, rows / 2, rows - 1 - rows / 6}; }

}  // namespace

std::string_view name_of(MachinePart part) {
  constexpr std::array<std::string_view, kMachineParts> kNames{"kernels", "links", "network", "host"};
  return kNames[static_cast<size_t>(part)];
}

Machine corrected(Machine machine, const Correction& correction) {
  const auto factor = [&](MachinePart part) { return correction.factors[static_cast<size_t>(part)]; };
  const DeviceConstants defaults;
  for (const DeviceConstant& c : device_constants()) {
    if (!is_rate(c)) continue;
    scale(machine.device.constants, c.name, defaults.*c.value, factor(MachinePart::kKernels));
    machine.device.provenance[std::string(c.name)] = Provenance::kFitted;
  }
  const double speed = stated(machine.device.constants, "host.speed", defaults.host_speed);
  machine.device.constants["host.speed"] = speed * factor(MachinePart::kHost);
  machine.device.provenance["host.speed"] = Provenance::kFitted;
  const FabricConstants fabric;
  const auto fitted = [&](std::string_view name) {
    machine.device.provenance[fmt::format("fabric.{}", name)] = Provenance::kFitted;
  };
  for (const FabricRate& rate : kFabricRates) {
    scale(machine.fabric, rate.name, fabric.*rate.value, factor(rate.part));
    fitted(rate.name);
  }
  for (const FabricRate& latency : kFabricLatencies) {
    const double seconds = stated(machine.fabric, latency.name, fabric.*latency.value) / factor(latency.part);
    if (seconds <= 0) continue;
    machine.fabric[std::string(latency.name)] = seconds;
    fitted(latency.name);
  }
  return machine;
}

Correction fit_correction(std::span<const Run> runs, const std::function<Predictor()>& predictor,
                          const analytic::LearntFigure& learnt) {
  const auto prior = [&](DoubtTerm term) { return std::sqrt(kCommon) * deviation(learnt, term); };
  const std::vector<double> weights = weights_of(runs, predictor(), learnt);
  const Parameters priors{prior(DoubtTerm::kCompute), prior(DoubtTerm::kExchange), prior(DoubtTerm::kExchange),
                          prior(DoubtTerm::kLaunch)};
  Parameters x{};
  constexpr int kRounds = 10;
  for (int round = 0; round < kRounds; ++round) x = improved(runs, x, priors, weights, predictor);
  return correction_of(x);
}

std::vector<SelfCalibration> self_calibrate(std::span<const ScoredRow> rows, const std::function<Predictor()>& predictor,
                                            const analytic::LearntFigure& learnt) {
  std::vector<std::string> sets;
  std::map<std::string, std::map<std::string, std::vector<const ScoredRow*>>> families;  // of each set
  for (const ScoredRow& row : rows) {
    if (!row.ratio()) continue;
    if (!families.contains(row.table->name)) sets.push_back(row.table->name);
    families[row.table->name][family_of(*row.row().run)].push_back(&row);
  }
  std::vector<SelfCalibration> list;
  for (const std::string& set : sets) {
    SelfCalibration score{.set = set};
    for (auto& [family, members] : families[set]) {
      if (members.size() < kFewestRows) continue;
      std::ranges::stable_sort(members, {}, [](const ScoredRow* row) { return row->prediction->exposed; });
      const auto places = fitted_places(members.size());
      std::vector<Run> fitted;
      for (const size_t at : places) fitted.push_back(*members[at]->row().run);
      const Correction correction = fit_correction(fitted, predictor, learnt);
      const Predictor predict = predictor();
      ++score.jobs;
      for (size_t i = 0; i < members.size(); ++i) {
        if (std::ranges::find(places, i) != places.end()) continue;
        Run run = *members[i]->row().run;
        run.machine = corrected(std::move(run.machine), correction);
        const auto p = predict(run);
        if (!p.ok()) continue;
        const double before = std::fabs(*members[i]->ratio() - 1), after = std::fabs(p->step_s / *run.measured.step_s - 1);
        ++score.rows;
        score.before += before, score.after += after;
        score.worst_before = std::max(score.worst_before, before), score.worst_after = std::max(score.worst_after, after);
      }
    }
    if (score.rows == 0) continue;
    score.before /= static_cast<double>(score.rows), score.after /= static_cast<double>(score.rows);
    list.push_back(std::move(score));
  }
  return list;
}

}  // namespace shardlab::simulator::validation
