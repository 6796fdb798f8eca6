// How good predictions are: figures of a group of rows.
#pragma once

#include <array>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "simulator/estimator/validate/validate.h"

namespace shardlab::simulator::validation {

/// Spearman's rank correlation, ties at their mean rank. Nothing for fewer than two values or where either side is constant.
std::optional<double> rank_correlation(std::span<const double> a, std::span<const double> b);

/// Errors are predicted over measured, less one: 0.05 is 5 % too slow or too much.
struct ErrorFigures {
  int64_t rows = 0;
  double bias = 0;           ///< mean
  double mean_absolute = 0;  ///< mean of the absolute values
  double median_absolute = 0;
  double worst = 0;       ///< the one of largest absolute value, with its sign
  std::string worst_row;  ///< "set:line"
};

/// Verdicts on whether a run fits its devices, against what happened.
struct FitFigures {
  int64_t fits_right = 0, fits_wrong = 0;  ///< predicted to fit: ran, ran out of memory
  int64_t oom_right = 0, oom_wrong = 0;    ///< predicted not to fit: ran out of memory, ran

  int64_t rows() const { return fits_right + fits_wrong + oom_right + oom_wrong; }
  std::optional<double> precision_fits() const;  ///< of those predicted to fit, the share that ran
  std::optional<double> precision_oom() const;   ///< of those predicted not to fit, the share that did not
  std::optional<double> accuracy() const;
};

struct Score {
  std::string group;
  int64_t rows = 0;     ///< of the group
  int64_t refused = 0;  ///< rows without a prediction
  ErrorFigures step;
  /// Rank correlation of tokens a second and device, over all rows of the group with a step time.
  std::optional<double> rank;
  /// Among layouts of one job (the same model, machine, devices, sequence and batch; three at least): the mean rank correlation,
  /// and the loss of taking the layout that is predicted fastest instead of the fastest. Each is weighted by the job's rows.
  std::optional<double> layout_rank, layout_loss;
  int64_t jobs = 0;
  std::array<ErrorFigures, kMemoryKinds> memory;
  FitFigures fit;
  struct Coverage {
    int64_t rows = 0;     ///< with an interval and a measurement
    int64_t covered = 0;  ///< measured within the interval
    double width = 0;     ///< mean half width, as a factor less one: 0.1 is 10 % either way
    std::optional<double> share() const {
      return rows > 0 ? std::optional(static_cast<double>(covered) / static_cast<double>(rows)) : std::nullopt;
    }
  };
  Coverage step_interval, memory_interval;
};

/// Rows whose fields in the columns of `by` are equal are one group, in the order of their first appearance; without columns, a
/// group is a table. The name of a group is its fields, joined by blanks.
std::vector<Score> score_groups(std::span<const ScoredRow> rows, std::span<const std::string> by = {});

/// All rows as one group.
Score score_all(std::span<const ScoredRow> rows, const std::string& name);

}  // namespace shardlab::simulator::validation
