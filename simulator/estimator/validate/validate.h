// Predictions of measured runs: what predicts them, how sure it is, and the table that comes out.
#pragma once

#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "plan/base/result.h"
#include "simulator/estimator/analytic/doubt.h"
#include "simulator/estimator/validate/rows.h"

namespace shardlab::simulator::validation {

/// A predictor's figures for one run.
struct Prediction {
  double step_s = 0;
  std::array<int64_t, kMemoryKinds> bytes{};  ///< live, reserved, device: of the fullest rank, of the stage where each is largest
  int64_t capacity_bytes = 0;                 ///< that a program can use of the device; 0: not known
  /// Of the reserved bytes, the most that wait for another stream; device bytes have none of them, as an allocator gives them back before it fails.
  int64_t held_bytes = 0;
  /// Share of the step in which the device does not compute: exposed communication, bubbles, waiting for the host.
  double exposed = 0;
  analytic::Doubt step_doubt, live_doubt, reserved_doubt;  ///< what the figures rest on
  bool transferred = false;                                ///< built on a constant that nobody measured on this device
  std::string note;  ///< what else there is to say: a technique that was asked for and could not be told apart
  std::vector<std::pair<std::string, double>> parts;  ///< seconds of the step by use, in the predictor's words

  int64_t of(MemoryKind kind) const { return bytes[static_cast<size_t>(kind)]; }
  const analytic::Doubt& doubt_of(MemoryKind kind) const { return kind == MemoryKind::kLive ? live_doubt : reserved_doubt; }
  /// Does what the driver would report fit the device? Nothing where the capacity is not known.
  std::optional<bool> fits() const {
    if (capacity_bytes <= 0) return std::nullopt;
    return of(MemoryKind::kDevice) <= capacity_bytes;
  }
};

/// Predicts a run, or refuses it: an impossible layout, an unsupported combination.
using Predictor = std::function<Result<Prediction>(const Run&)>;

/// A row and what became of it.
struct ScoredRow {
  const RowTable* table = nullptr;
  size_t index = 0;  ///< into table->rows
  Result<Prediction> prediction = Error{};
  std::optional<analytic::Between> step;    ///< seconds that nine of ten runs like it lie between
  std::optional<analytic::Between> memory;  ///< bytes, of the kind that was measured

  const Row& row() const { return table->rows[index]; }
  const std::string& source() const { return row().source; }
  /// Field of a column of its table; empty where there is none.
  std::string field(std::string_view column) const;
  /// Predicted over measured step time, where both are known.
  std::optional<double> ratio() const;
  /// Predicted over measured bytes of the kind that was measured.
  std::optional<double> memory_ratio() const;
};

/// Predicts every row of the tables, in order. The tables must outlive the result.
std::vector<ScoredRow> predict_rows(std::span<const RowTable> tables, const Predictor& predict);

/// A table of text: the columns of all inputs in the order of their first appearance, then what was predicted. A column of an
/// earlier prediction is overwritten in its place, so that the table can be validated again.
struct TextTable {
  std::vector<std::string> columns;
  std::vector<std::vector<std::string>> rows;
};

/// `rows.csv`: predicted_step_s predicted_live_bytes predicted_reserved_bytes predicted_device_bytes predicted_low_s
/// predicted_high_s predicted_low_bytes predicted_high_bytes predicted_fits status reason, then step_error_pct, memory_error_pct (predicted over measured, less 100 %) and
/// note. `status` is ok or refused; a refused row has its reason and nothing else. With several tables, the first column is `set`.
TextTable rows_table(std::span<const ScoredRow> rows);

}  // namespace shardlab::simulator::validation
