// The ratchet: scores of the published sets are kept in a file, and none worsens unless the file says why.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "plan/base/result.h"
#include "simulator/estimator/validate/score.h"

namespace shardlab::simulator::validation {

/// One figure of one group. Of all figures, less is better.
struct Figure {
  std::string group;
  std::string name;
  double value = 0;
};

/// refused_rows, step_error_pct (mean absolute), step_bias_pct (absolute), step_worst_pct (absolute), rank_missing (1 less the rank
/// correlation over the group), layout_loss_pct, live_error_pct, reserved_error_pct, device_error_pct (mean absolute),
/// fit_wrong_pct, step_uncovered_pct and memory_uncovered_pct (measured outside of the 90 % interval), step_interval_pct and
/// memory_interval_pct (its mean half width): those that the group has.
std::vector<Figure> figures_of(const Score& score);

/// One line of the file: `group,figure,value,best,tolerance,reason`. `best` is the least value ever recorded; a `value` that lies
/// above it by more than `tolerance` has a reason.
struct Recorded {
  Figure figure;
  double best = 0;
  double tolerance = 0;
  std::string reason;
};

Result<std::vector<Recorded>> read_scores(std::string_view text, const std::string& file);
std::string write_scores(std::span<const Recorded> scores);

/// Faults, one sentence each: a figure above its recorded value by more than the tolerance, a figure that is not recorded, a
/// recorded figure that is gone, a worsening without its reason. Empty if there is none.
std::vector<std::string> compare_scores(std::span<const Recorded> recorded, std::span<const Figure> now);

/// The file after this run: values as they are now, bests improved, tolerances and reasons kept. A new figure is given a tolerance:
/// none for counts, 0.01 for rank correlations, for percentages a twentieth of the value and at least 0.5.
std::vector<Recorded> update_scores(std::span<const Recorded> recorded, std::span<const Figure> now);

}  // namespace shardlab::simulator::validation
