// Turns a loaded sweep into points. Order: axes and zip, when, exclude, include, derived values, constraints, duplicates.
#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <map>
#include <set>
#include <unordered_map>

#include "plan/base/hash.h"
#include "plan/base/id_set.h"
#include "plan/base/limits.h"
#include "sweeps/document.h"
#include "sweeps/expression_keys.h"
#include "sweeps/resolve.h"

namespace shardlab::sweeps {

namespace {

/// Where `word` stands in `text` by itself; npos where it does not.
size_t word_in(std::string_view text, std::string_view word) {
  const auto part_of_word = [&](size_t at) {
    return at < text.size() && (std::isalnum(static_cast<unsigned char>(text[at])) != 0 || text[at] == '_');
  };
  size_t at = text.find(word);
  while (at != std::string_view::npos && ((at > 0 && part_of_word(at - 1)) || part_of_word(at + word.size())))
    at = text.find(word, at + 1);
  return at;
}

class Expander {
 public:
  Expander(const Sweep::Content& content, Resolution resolution, const std::function<bool(Point&&)>& visit)
      : content_(content), resolution_(resolution), problems_(content.file), visit_(visit) {
    for (const SweepAxis& axis : content_.axes) {
      auto& rows = words_.emplace_back();
      for (const std::vector<Setting>& row : axis.rows) {
        auto& words = rows.emplace_back();
        for (size_t k = 0; k < row.size(); ++k)
          words.push_back(fmt::format("{}={}", short_name(axis.paths[k]), value_in_name(axis, k, row[k])));
      }
    }
    axes_are_apart_ = are_apart(content_.axes);
  }

  Result<ExpansionCounts> run() {
    if (!count_combinations()) return problems_.take();
    // First, since their names are those of equal points of the axes too.
    std::vector<Point> inclusions;
    for (const SweepInclusion& inclusion : content_.inclusions) inclusions.push_back(included(inclusion));
    if (content_.search.kind == SearchKind::kRandom)
      add_sample();
    else
      add_all();
    for (Point& point : inclusions)
      if (problems_.empty() && !ended_) hand_over(std::move(point));
    if (!problems_.empty()) return problems_.take();
    return std::move(expansion_);
  }

 private:
  /// With `include` and no axes the file lists its points: then the bare base is none of them.
  bool count_combinations() {
    const bool listed = content_.axes.empty() && !content_.inclusions.empty();
    expansion_.combinations = listed ? 0 : 1;
    double product = 1;
    for (const SweepAxis& axis : content_.axes) {
      product *= static_cast<double>(axis.rows.size());
      if (product <= limits::kSweepPoints) expansion_.combinations *= static_cast<int64_t>(axis.rows.size());
    }
    if (product > limits::kSweepPoints) {
      problems_.add({}, fmt::format("the axes make {:.10g} points, more than {}", product, limits::kSweepPoints),
                    "shorten an axis, or split the sweep");
      return false;
    }
    return true;
  }

  void add_all() {
    std::vector<size_t> row(content_.axes.size(), 0);
    for (int64_t i = 0; i < expansion_.combinations && problems_.empty() && !ended_; ++i) {
      add_combination(row);
      advance(row);
    }
  }

  /// As many points as the search asks for, where there are as many.
  void add_sample() {
    for (int64_t at : shuffled(expansion_.combinations, content_.search.seed)) {
      if (!problems_.empty() || ended_ || expansion_.points >= content_.search.count) return;
      std::vector<size_t> row(content_.axes.size(), 0);
      for (size_t a = row.size(); a-- > 0;) {
        const auto size = static_cast<int64_t>(content_.axes[a].rows.size());
        row[a] = static_cast<size_t>(at % size);
        at /= size;
      }
      add_combination(row);
    }
  }

  /// The next combination: the last axis varies fastest.
  void advance(std::vector<size_t>& row) const {
    for (size_t a = row.size(); a-- > 0;) {
      if (++row[a] < content_.axes[a].rows.size()) return;
      row[a] = 0;
    }
  }

  /// A file of a model or machine by its stem, one of slots by its name, unless another value of the axis has the same; every other
  /// value as it is.
  static std::string value_in_name(const SweepAxis& axis, size_t k, const Setting& value) {
    if (!value.shown.empty()) {
      const auto file = [](const Setting& of) { return std::filesystem::path(of.shown).filename().string(); };
      const bool same = std::ranges::any_of(axis.rows, [&](const auto& row) {
        return row[k].shown != value.shown && !row[k].shown.empty() && file(row[k]) == file(value);
      });
      return same ? value.shown : file(value);
    }
    const std::string& text = value.text;
    if (source_group(axis.paths[k]).empty() || text.find('/') == std::string::npos) return text;
    const auto stem = [](const std::string& of) { return std::filesystem::path(of).stem().string(); };
    const auto alike = [&](const auto& row) { return row[k].text != text && stem(row[k].text) == stem(text); };
    return std::ranges::any_of(axis.rows, alike) ? text : stem(text);
  }

  /// Whether no key, and no source of the model or the machine, is set by two of the axes.
  static bool are_apart(const std::vector<SweepAxis>& axes) {
    std::set<std::string_view> set;
    for (const SweepAxis& axis : axes) {
      std::set<std::string_view> by_axis;
      for (const std::string& path : axis.paths) by_axis.insert(source_group(path).empty() ? path : source_group(path));
      for (const std::string_view key : by_axis)
        if (!set.insert(key).second) return false;
    }
    return true;
  }

  /// Brings `combined_` from the combination before to this one. Where no two axes set one key, only axes with another row are merged: what
  /// the last row of an axis set or left out, its next row sets or leaves out, too.
  void combine(const std::vector<size_t>& row) {
    const bool anew = combined_row_.empty() || !axes_are_apart_;
    if (anew) combined_ = content_.base;
    for (size_t a = 0; a < row.size(); ++a) {
      if (!anew && combined_row_[a] == row[a]) continue;
      const std::vector<Setting>& values = content_.axes[a].rows[row[a]];
      for (size_t k = 0; k < values.size(); ++k) merge(combined_, content_.axes[a].paths[k], values[k]);
    }
    combined_row_ = row;
  }

  std::string name_of(const std::vector<size_t>& row) const {
    std::string name;
    for (size_t a = 0; a < row.size(); ++a)
      for (const std::string& word : words_[a][row[a]]) {
        if (!name.empty()) name += ' ';
        name += word;
      }
    return name.empty() ? content_.name : name;
  }

  void add_combination(const std::vector<size_t>& row) {
    combine(row);
    const Settings* settings = &combined_;
    Settings own;  // where rules or the command line say more than the axes
    const auto add = [&](const Settings& more) {
      if (settings != &own) own = combined_, settings = &own;
      merge(own, more);
    };
    for (const SweepWhen& when : content_.whens)
      if (holds(when.condition, when.mark, draft_of(*settings, content_.sources), settings)) add(when.set);
    if (is_excluded(*settings)) return void(++expansion_.excluded);
    if (!content_.overrides.empty()) add(content_.overrides);
    if (visit_)
      hand_over(resolved(name_of(row), *settings));
    else
      check_constraints(*settings);
  }

  void check_constraints(const Settings& settings) {
    ++expansion_.points;
    if (content_.constraints.empty()) return;
    Draft draft = draft_of(settings, content_.sources);
    if (derive(draft.config, settings).ok()) (void)broken_constraint(draft);
  }

  Point included(const SweepInclusion& inclusion) {
    Settings settings = content_.base;
    merge(settings, inclusion.settings);
    std::string name = inclusion.name;
    if (name.empty())
      for (const auto& [path, setting] : inclusion.settings)
        name +=
            fmt::format("{}{}={}", name.empty() ? "" : " ", short_name(path), setting.shown.empty() ? setting.text : setting.shown);
    ++expansion_.included;
    merge(settings, content_.overrides);
    Point point = resolved(std::move(name), settings);
    if (!inclusion.name.empty() && !content_.overrides.contains("name")) take_name(point, inclusion.mark);
    return point;
  }

  bool holds(const Expression& expression, Mark mark, const Draft& draft, const Settings* given) {
    const auto value = expression.holds([&](std::string_view key) { return draft.lookup(key, given); });
    if (const bool* truth = std::get_if<bool>(&value)) return *truth;
    const auto& error = std::get<ExpressionError>(value);
    if (problems_.empty())  // the same fault would be found for every point
      problems_.add({mark.line, mark.column + error.column - 1}, error.message,
                    fmt::format("in the expression `{}`", expression.text()));
    return false;
  }

  bool is_excluded(const Settings& settings) {
    if (content_.exclusions.empty()) return false;
    const Draft draft = draft_of(settings, content_.sources);
    const auto equals = [&](const std::string& path, const Setting& wanted) {
      if (!source_group(path).empty()) {
        const auto it = settings.find(path);
        return it != settings.end() && it->second.text == wanted.text;
      }
      const CaseKey* key = find_key(path);
      if (key->get == nullptr) {
        const auto it = settings.find(path);
        return it != settings.end() && it->second.text == wanted.text;
      }
      return draft.lookup(path, &settings) == expression_value(*key, wanted.text);
    };
    return std::any_of(content_.exclusions.begin(), content_.exclusions.end(), [&](const SweepExclusion& exclusion) {
      return std::all_of(exclusion.keys.begin(), exclusion.keys.end(), [&](const auto& key) {
        return std::any_of(key.second.begin(), key.second.end(), [&](const Setting& wanted) { return equals(key.first, wanted); });
      });
    });
  }

  /// The point of these settings, those of the command line among them. A refused point keeps the first reason in the order: derived values,
  /// constraints, what this version and the machine can do, what a plan can be made of.
  Point resolved(std::string name, const Settings& settings) {
    if (const auto said = content_.overrides.find("name"); said != content_.overrides.end()) name = said->second.text;
    Draft draft = draft_of(settings, content_.sources);
    draft.config.name = name;
    Point point;
    point.name = std::move(name);
    if (auto derived = derive(draft.config, settings); !derived.ok()) point.refusal = derived.error();
    point.derived = !point.refusal;
    if (!point.refusal) point.refusal = broken_constraint(draft);
    if (!point.refusal)
      if (auto possible = check_point(draft, content_.mode, resolution_); !possible.ok()) point.refusal = possible.error();
    if (!point.refusal && resolution_ != Resolution::kAnalytic)
      if (auto checked = check(draft.config); !checked.ok()) point.refusal = checked.error();
    if (point.refusal && point.refusal->where.empty()) point.refusal->where = place_of(*point.refusal, settings);
    point.id = id_of(draft, settings);
    point.config = std::move(draft.config);
    point.unheld = std::move(draft.unheld);
    point.model = std::move(draft.model);
    return point;
  }

  /// Of points equal but for their names the first stays, under the name that the file gives one of them.
  void hand_over(Point&& point) {
    if (!visit_) return void(++expansion_.points);
    if (!seen_.insert(std::strtoull(point.id.c_str(), nullptr, 16))) {
      ++expansion_.duplicates;
      return;
    }
    if (const auto given = names_.find(point.id); given != names_.end()) point.name = point.config.name = given->second;
    ++expansion_.points;
    expansion_.refused += point.refusal ? 1 : 0;
    ended_ = !visit_(std::move(point));
  }

  /// A name that the file gives replaces one made of values. Of two that the file gives one would be lost without a word.
  void take_name(const Point& point, Mark mark) {
    const auto [first, fresh] = names_.emplace(point.id, point.name);
    if (!fresh && first->second != point.name)
      problems_.add(mark, fmt::format("`{}` and `{}` are the same case under two names", first->second, point.name),
                    "a case is run once and has one name: change a key of one of the two, or remove one");
  }

  /// Where the file (or the command line) says what a refusal is about: the setting that its message names first, else the file.
  std::string place_of(const Error& refusal, const Settings& settings) const {
    const std::string text = refusal.message + " " + refusal.hint;
    size_t first = std::string::npos;
    const Setting* blamed = nullptr;
    bool typed = false;
    for (const auto& [path, setting] : settings) {
      const size_t at = word_in(text, short_name(path));
      if (at >= first) continue;
      first = at;
      blamed = &setting;
      typed = content_.overrides.contains(path);
    }
    if (typed) return "command line";
    return problems_.where(blamed == nullptr ? Mark{} : blamed->mark);
  }

  std::optional<Error> broken_constraint(const Draft& draft) {
    for (const SweepConstraint& constraint : content_.constraints)
      if (!holds(constraint.expression, constraint.mark, draft, nullptr))
        return Error{ExitCode::kUsage,
                     constraint.why.empty() ? fmt::format("constraint `{}`", constraint.expression.text()) : constraint.why,
                     fmt::format("the constraint `{}` does not hold", constraint.expression.text()),
                     {}};
    return std::nullopt;
  }

  /// The machine's text is a function of the settings under "machine.": it is written once for each of the last of them.
  std::string id_of(const Draft& draft, const Settings& settings) {
    std::string said;
    for (auto it = settings.lower_bound("machine."); it != settings.end() && it->first.starts_with("machine."); ++it)
      said.append(it->first).append("=").append(it->second.text).append("\n");
    constexpr size_t kRemembered = 64;
    if (machines_.size() >= kRemembered && !machines_.contains(said)) machines_.clear();
    const auto [machine, fresh] = machines_.try_emplace(std::move(said));
    if (fresh) machine->second = machine_yaml(draft.config.machine);
    const std::string id = case_ids_.id(draft.config, machine->second);
    if (draft.unheld.empty() && !draft.model) return id;
    std::string text = id;
    if (draft.model) text += "\n" + describe(*draft.model);
    for (const auto& [path, value] : draft.unheld) text += fmt::format("\n{}={}", path, value);
    return fmt::format("{:016x}", hash_text(text));
  }

  const Sweep::Content& content_;
  const Resolution resolution_;
  Problems problems_;
  const std::function<bool(Point&&)>& visit_;                 ///< empty: rules are checked, and no points are made
  std::vector<std::vector<std::vector<std::string>>> words_;  ///< of a point's name: by axis, row and path
  bool axes_are_apart_ = false;                               ///< no two of them set one key
  Settings combined_;                                         ///< base and axes, of the last combination
  std::vector<size_t> combined_row_;                          ///< of each axis in it
  ExpansionCounts expansion_;
  CaseIds case_ids_;
  std::map<std::string, std::string> machines_;         ///< texts of machines by the settings that made them
  bool ended_ = false;                                  ///< the visitor wants no more
  IdSet seen_;                                          ///< ids, which are 16 hex digits
  std::unordered_map<std::string, std::string> names_;  ///< that the file gives, by id
};

}  // namespace

std::string_view name_of(Mode mode) {
  switch (mode) {
    case Mode::kSimulate: return "simulate";
    case Mode::kMeasure: return "measure";
    case Mode::kBoth: return "both";
  }
  return "?";
}

std::optional<Mode> mode_named(std::string_view name) {
  for (const Mode mode : {Mode::kSimulate, Mode::kMeasure, Mode::kBoth})
    if (name_of(mode) == name) return mode;
  return std::nullopt;
}

std::string_view name_of(Resolution resolution) {
  switch (resolution) {
    case Resolution::kTimeline: return "timeline";
    case Resolution::kSegments: return "segments";
    case Resolution::kAnalytic: return "analytic";
  }
  return "?";
}

std::optional<Resolution> resolution_named(std::string_view name) {
  for (const Resolution resolution : {Resolution::kTimeline, Resolution::kSegments, Resolution::kAnalytic})
    if (name_of(resolution) == name) return resolution;
  return std::nullopt;
}

std::string_view name_of(Traces traces) {
  switch (traces) {
    case Traces::kNone: return "none";
    case Traces::kMeasured: return "measured";
    case Traces::kAll: return "all";
  }
  return "?";
}

std::optional<Traces> traces_named(std::string_view name) {
  for (const Traces traces : {Traces::kNone, Traces::kMeasured, Traces::kAll})
    if (name_of(traces) == name) return traces;
  return std::nullopt;
}

std::string short_name(std::string_view path) {
  if (const std::string_view group = source_group(path); !group.empty()) return std::string(group);
  const CaseKey* key = find_key(path);
  if (!key || key->aliases.empty()) return std::string(path);
  return std::string(key->aliases.substr(0, key->aliases.find(' ')));
}

int64_t Expansion::refused() const {
  return std::count_if(points.begin(), points.end(), [](const Point& p) { return p.refusal.has_value(); });
}

Reasons refusals(const Expansion& expansion) {
  Reasons reasons;
  for (const Point& point : expansion.points)
    if (point.refusal) reasons.add(point.refusal->message, point.name);
  return reasons;
}

const std::string& Sweep::name() const { return content_->name; }
const std::string& Sweep::description() const { return content_->description; }
const std::vector<Claim>& Sweep::claims() const { return content_->claims; }
const LossTarget& Sweep::loss_target() const { return content_->loss_target; }
const std::string& Sweep::file() const { return content_->file; }
Mode Sweep::mode() const { return content_->mode; }

Resolution resolution_of(const Sweep& sweep) { return sweep.content().resolution; }
bool has_rules(const Sweep& sweep) { return !sweep.content().whens.empty() || !sweep.content().constraints.empty(); }
bool says(const Sweep& sweep, std::string_view path) {
  const Sweep::Content& c = sweep.content();
  const auto in = [&](const Settings& settings) { return settings.contains(path); };
  return in(c.base) || in(c.overrides) || std::ranges::any_of(c.whens, in, &SweepWhen::set) ||
         std::ranges::any_of(c.inclusions, in, &SweepInclusion::settings) ||
         std::ranges::any_of(c.axes,
                             [&](const SweepAxis& axis) { return std::ranges::find(axis.paths, path) != axis.paths.end(); });
}
Traces traces_of(const Sweep& sweep) { return sweep.content().traces; }

Result<Expansion> expand(const Sweep& sweep) { return expand(sweep, resolution_of(sweep)); }

Result<Expansion> expand(const Sweep& sweep, Resolution resolution) {
  Expansion expansion;
  const auto counts = expand_each(sweep, resolution, [&](Point point) {
    expansion.points.push_back(std::move(point));
    return true;
  });
  if (!counts.ok()) return counts.error();
  expansion.combinations = counts->combinations, expansion.excluded = counts->excluded;
  expansion.included = counts->included, expansion.duplicates = counts->duplicates;
  return expansion;
}

Result<ExpansionCounts> expand_each(const Sweep& sweep, Resolution resolution, const std::function<bool(Point&&)>& visit) {
  return Expander(sweep.content(), resolution, visit).run();
}

Result<ExpansionCounts> check_rules(const Sweep& sweep) {
  const std::function<bool(Point &&)> nobody;
  return Expander(sweep.content(), resolution_of(sweep), nobody).run();
}

}  // namespace shardlab::sweeps
