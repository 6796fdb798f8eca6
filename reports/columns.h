// The one table of result columns: results.csv, the store's schema, console tables, JSON, markdown and the HTML report all follow
// it.
#pragma once

#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "plan/keys.h"
#include "plan/outcome.h"
#include "reports/table.h"

namespace shardlab::reports {

/// One figure of a case.
struct CaseColumn {
  std::string_view name;  ///< "predicted_step_s": a word without dots, stable
  Unit unit;
  std::string_view heading;  ///< of people's tables; the name when empty
  std::string_view help;     ///< one line: what it is and how it is defined
  std::function<Value(const CaseOutcome&)> get;
  bool is_setting = false;       ///< it says what the case is, not what came of it
  const CaseKey* key = nullptr;  ///< the key whose `value_of` the column is; null: of none
};

/// What a key is worth whose text in a case is `written`: a number, a truth, or a word.
Value value_of(const CaseKey& key, const std::string& written);

/// Every column, in the order of results.csv. The first 48 are the fixed contract of ARCHITECTURE.md, section 3.
std::span<const CaseColumn> case_columns();

/// The column called `name`, or null.
const CaseColumn* find_column(std::string_view name);

/// Columns of a console summary: what a case is, what became of it, predicted beside measured.
std::span<const std::string_view> summary_columns();

/// One row a case, with the named columns, in that order; every column when `names` is empty. An unknown name is a bug.
Table case_table(std::span<const CaseOutcome> cases, std::span<const std::string_view> names = {});

/// "dp2 tp2 zero1": the layout in words, keys of value 1 left out; "1 rank" for a single rank.
std::string layout_text(const Case& config);

/// What people call the case's schedule: its name, or of a table of slots its first line where this is the name of a file ("my.csv").
std::string schedule_words(const Case& config);

/// "tp2-final (tp2)", or the name alone where it says what the layout says.
std::string case_title(const Case& config);
/// "2 of 40 steps ran again: ...": of a run with expert_bound, and a bound to try instead.
std::string rerun_text(const Case& config, const Measurement& m);
/// Whether the measured steps had too little room, and more than one step in ten ran again: a run with expert_bound that costs more than it
/// saves.
bool is_bound_tight(const Case& config, const Measurement& m);

/// Dense peak flop/s of the devices that the case can keep busy, at its precision: the denominator of MFU. On the local machine a
/// device is a core, and ranks that outnumber the cores share them. Nothing where the machine states no peak for the precision.
std::optional<double> peak_flops(const Case& config);

/// Model flop utilisation at `step_s` seconds a step: model_flops_per_token * tokens/s / peak_flops. No recompute counted.
std::optional<double> mfu(const CaseOutcome& outcome, double step_s);

/// Optimizer steps of the run, its warm-up included, until the training loss reached `loss_target`. Nothing where no loss is asked
/// for, nothing was trained, or the run ended before.
std::optional<int64_t> steps_to_loss(const CaseOutcome& outcome);

/// What predicted the case, by the version that its result was saved under: "timeline", "segments", or "analytic" for an estimate without
/// a plan. Empty where nothing did, or the version is not known.
std::string_view predicted_by(const CaseOutcome& outcome);

/// Whether some of the cases were predicted by another resolution than others: the estimates of a search beside the points that it ran.
bool mixes_predictions(std::span<const CaseOutcome> cases);

/// (predicted - measured) / measured, in percent; positive where the prediction was too slow. Nothing unless both are there.
std::optional<double> step_error_pct(const CaseOutcome& outcome);

}  // namespace shardlab::reports
