// The contents of a loaded sweep file. load.cpp fills them in; expand.cpp turns them into points.
#pragma once

#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "plan/base/hashed_text.h"
#include "plan/key_texts.h"
#include "plan/outcome.h"
#include "sweeps/expression.h"
#include "sweeps/resolution.h"
#include "sweeps/search.h"
#include "sweeps/settings.h"
#include "sweeps/sweep.h"
#include "sweeps/traces.h"

namespace shardlab::sweeps {

/// One axis of the product: a key of `axes`, or a block of `zip`, whose keys change together.
struct SweepAxis {
  std::vector<std::string> paths;
  std::vector<std::vector<Setting>> rows;  ///< a row has one value for each path
  bool zipped = false;
};

struct SweepWhen {
  Expression condition;
  Mark mark;  ///< of the first character of the condition
  Settings set;
};

struct SweepConstraint {
  Expression expression;
  Mark mark;
  std::string why;
};

/// A point is excluded when every key has one of the values.
struct SweepExclusion {
  std::vector<std::pair<std::string, std::vector<Setting>>> keys;
};

struct SweepInclusion {
  std::string name;  ///< empty: named by its settings
  Mark mark;         ///< of the entry
  Settings settings;
};

struct Sweep::Content {
  std::string file;
  std::string name;
  std::string description;
  Mode mode = Mode::kSimulate;
  Resolution resolution = Resolution::kTimeline;
  Traces traces = Traces::kMeasured;
  Sources sources;
  Settings base;
  std::vector<SweepAxis> axes;
  std::vector<SweepWhen> whens;
  std::vector<SweepConstraint> constraints;
  std::vector<SweepExclusion> exclusions;
  std::vector<SweepInclusion> inclusions;
  std::vector<Claim> claims;
  LossTarget loss_target;
  Search search;
  Settings overrides;
};

/// Short form of a key in names of points: "tp" for layout.tp, "model" for model.preset.
std::string short_name(std::string_view path);

/// The machine of a case file. A described machine is written in full. A local one is written by what the user can set, since its
/// calibration changes from day to day and is no part of the question.
std::string machine_yaml(const Machine& machine);

/// Ids of cases, one after the other. Most points of a sweep have the same model and machine, whose text is hashed once, and a line that was
/// hashed behind some lines is hashed behind others with one product.
class CaseIds {
 public:
  CaseIds();
  /// `case_id` of a case whose machine has the text `machine`.
  std::string id(const Case& config, std::string_view machine);

 private:
  /// A key behind the machine, as a case file has it.
  struct Line {
    explicit Line(size_t written) : written(written) {}
    size_t written;              ///< its place among the keys that are written
    HashedText* text = nullptr;  ///< what the case says; null: nothing, and the line is left out
    HashedText opener{""};       ///< lines that open the sections of the key, where the line before is in others
    std::unordered_map<std::string, HashedText> known;  ///< lines by value
  };
  uint64_t hash_head(const Case& config, std::string_view machine);
  void take(Line& line, const std::string& value);
  void open_sections();

  std::vector<Line> lines_;
  KeyTexts values_;           ///< of `lines_`
  bool has_openers_ = false;  ///< which depend on the lines that are left out
  bool has_head_ = false;
  Model model_;          ///< of the last case
  std::string machine_;  ///< its text
  uint64_t head_hash_ = 0;
  std::string routes_;  ///< path of the last case's routes
  uint64_t routes_hash_ = 0;
};

}  // namespace shardlab::sweeps
