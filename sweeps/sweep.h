// The sweep file: one YAML file names many cases. README.md of this folder is its reference.
//
//   auto sweep = load_sweep("sweeps/quickstart.yaml", options);     every error of the file at once
//   auto expansion = expand(*sweep);                                its points, refused ones with their reason
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "plan/base/result.h"
#include "plan/case.h"
#include "plan/outcome.h"
#include "plan/reasons.h"
#include "sweeps/models.h"

namespace shardlab::sweeps {

enum class Mode : uint8_t { kSimulate, kMeasure, kBoth };
std::string_view name_of(Mode mode);  ///< "simulate", "measure", "both"
std::optional<Mode> mode_named(std::string_view name);

/// Settings of the command line that are added to a file.
struct LoadOptions {
  /// "key=value", in the words of the file ("tp=2", "model.layers=4"); an axis of that key is replaced.
  std::vector<std::string> overrides;
  std::optional<Mode> mode;  ///< instead of the file's
  /// This machine, with its calibration: what `machine: {local: true}` means. Absent: such a file is refused.
  std::function<Result<Machine>()> local_machine;
};

/// One point of a sweep.
struct Point {
  std::string id;    ///< 16 hex digits: `case_id` of the case; if the case cannot hold every value, a hash of those values too
  std::string name;  ///< given by `include`, or the values of the axes: "tp=2 pp=1"
  Case config;       ///< of a refused point: as far as it can be said
  std::optional<Error> refusal;
  /// Keys whose value no case of this version can hold ("layout.schedule" -> "zb-h1"): their point is refused, unless it
  /// is only estimated.
  std::vector<std::pair<std::string, std::string>> unheld;
  /// The model, where no case can hold all of it (mixtures of experts, ...): `config.model` has the sizes of its body.
  /// Null: it can.
  std::shared_ptr<const ModelConfig> model;
  bool derived = false;  ///< what was not given is filled in: `config` is whole, but for `unheld`
};

struct Expansion {
  std::vector<Point> points;  ///< in order, without duplicates
  int64_t combinations = 0;   ///< of axes and zip blocks
  int64_t excluded = 0;
  int64_t included = 0;
  int64_t duplicates = 0;

  int64_t refused() const;
  int64_t runnable() const { return static_cast<int64_t>(points.size()) - refused(); }
};

/// Why points are refused.
Reasons refusals(const Expansion& expansion);

/// A loaded sweep file: every key known, every value of the right form, every expression parsed. Cheap to copy.
class Sweep {
 public:
  const std::string& name() const;
  const std::string& description() const;
  const std::string& file() const;
  Mode mode() const;
  /// The claims that the sweep tests; the expression of each can be parsed.
  const std::vector<Claim>& claims() const;
  /// The loss that the sweep asks to reach.
  const LossTarget& loss_target() const;

  struct Content;  ///< sweeps/document.h
  explicit Sweep(std::shared_ptr<const Content> content) : content_(std::move(content)) {}
  const Content& content() const { return *content_; }

 private:
  std::shared_ptr<const Content> content_;
};

/// Reads a sweep file. The error holds all that is wrong with it, each with file:line:column, and what to write instead.
Result<Sweep> load_sweep(const std::string& path, const LoadOptions& options = {});

/// Loads a sweep from text; `file` is its name in messages, and paths in it are relative to the folder of `file`.
Result<Sweep> load_sweep_text(std::string_view text, const std::string& file, const LoadOptions& options = {});

/// All points. Order: axes and zip, when, exclude, include, derived values, constraints, removal of duplicates. The error is
/// an expression that cannot be evaluated, or more than a million points.
Result<Expansion> expand(const Sweep& sweep);

/// Reads a case file: the same keys with single values. Refuses what `check(const Case&)` refuses.
Result<Case> load_case(const std::string& path, const LoadOptions& options = {});
Result<Case> load_case_text(std::string_view text, const std::string& file, const LoadOptions& options = {});

/// A case from words alone ("model=gpt2", "machine=hgx-h100-ndr", "tp=8"), as verbs without a file need it.
Result<Case> case_from_words(const LoadOptions& options);

/// The point of the command line's words, for callers that need no plan. A point that is refused as a case keeps its reason and its
/// settings. The error is a word that means nothing.
Result<Point> point_from_words(const LoadOptions& options);

/// The resolved case as a case file: canonical and stable; loading it gives the same case. A local machine is written by name
/// and capacity, its calibration is not.
std::string to_yaml(const Case& config);

/// Hash of `to_yaml` without the name, and of what the file `data.routes` says: 16 hex digits.
std::string case_id(const Case& config);
}  // namespace shardlab::sweeps
