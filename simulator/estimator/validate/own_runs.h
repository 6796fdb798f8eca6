// A machine corrected by a user's own few runs.
//
// Formula: the rates of a machine are multiplied by factors e^x, one for each part of it, and latencies divided. x minimises
//   sum over runs of rho((ln measured - ln predicted(x))^2 / noise^2) + sum over parts of rho(x^2 / prior^2)
// Prior, noise: a part's error has the variance that predictions of other people's runs had (analytic/doubt.h). One half of it is the
//   machine's, which the factor explains: the prior. The other half is each run's own: the noise, with what one run differs from the next.
// rho: of a t distribution. One run that no factor explains moves little, and what all runs agree on is believed, however far it is.
//   A part that the runs say nothing about keeps its factor of 1.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "simulator/estimator/analytic/doubt.h"
#include "simulator/estimator/validate/validate.h"

namespace shardlab::simulator::validation {

/// What is corrected: rates of kernels; of the links within a node; of the network between nodes; the speed of the host.
enum class MachinePart : uint8_t { kKernels, kLinks, kNetwork, kHost };
inline constexpr size_t kMachineParts = 4;
std::string_view name_of(MachinePart part);  ///< "kernels", "links", "network", "host"

/// Factors of rates, each within kLeastFactor and its inverse: below 1 the machine is slower than described.
inline constexpr double kLeastFactor = 0.5;
struct Correction {
  std::array<double, kMachineParts> factors{1, 1, 1, 1};
};

/// The machine with its rates and the speed of its host multiplied, its latencies divided; constants that it does not state are stated
/// then, all of them tagged fitted. A share of a data sheet's rate stays at most 1.
Machine corrected(Machine machine, const Correction& correction);

/// The correction that the runs with a measured step suggest. Runs that cannot be predicted are left out. `predictor` makes a fresh
/// predictor, for each remembers what it prepared.
Correction fit_correction(std::span<const Run> runs, const std::function<Predictor()>& predictor,
                          const analytic::LearntFigure& learnt);

/// Errors of one set before and after each of its jobs was corrected by three of its own runs, which are not scored.
struct SelfCalibration {
  std::string set;
  int64_t jobs = 0, rows = 0;    ///< scored
  double before = 0, after = 0;  ///< mean of the absolute relative errors
  double worst_before = 0, worst_after = 0;
};
/// A job family is what shares profile, model and machine; five timed rows at least. The three rows to fit on are those at a sixth,
/// the middle and five sixths of the family in the order of the share that is predicted to be no compute: no measurement chooses them.
std::vector<SelfCalibration> self_calibrate(std::span<const ScoredRow> rows, const std::function<Predictor()>& predictor,
                                            const analytic::LearntFigure& learnt);

}  // namespace shardlab::simulator::validation
