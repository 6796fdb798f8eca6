// Reads sweep and case files into `Sweep::Content`. Nothing is expanded here, and every problem of the file is found.
#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <set>

#include "plan/base/files.h"
#include "plan/base/limits.h"
#include "plan/base/values.h"
#include "sweeps/document.h"
#include "sweeps/expression_keys.h"

namespace shardlab::sweeps {

namespace {

/// The keys that an unknown key at the top of a file is answered with; short forms are too many to list.
const std::vector<std::string>& top_keys() {
  static const std::vector<std::string> keys = {
      "version",    "name",        "description",  "mode",    "model",
      "machine",    "profile",     "data",         "layout",  "train",
      "execution",  "measure",     "checkpoint",   "axes",    "zip",
      "when",       "constraints", "exclude",      "include", "claims",
      "resolution", "traces",      "time_to_loss", "search",  "and the short forms of case keys (tp, seq_len, ...)"};
  return keys;
}

const std::vector<std::string> kSweepOnly = {"description", "mode",         "axes",    "zip",    "when",
                                             "constraints", "exclude",      "include", "claims", "resolution",
                                             "traces",      "time_to_loss", "search"};

/// Those of them that make more than one case. What the others say (how a case is run, what is claimed of it) is no part of a case: a file
/// of one case may have them.
constexpr std::array<const char*, 6> kOfSeveral = {"axes", "zip", "when", "constraints", "exclude", "include"};

/// `{pow2: [a, b]}` and `{range: [a, b]}` or `{range: [a, b, step]}`, both ends included: at most `room` values.
std::optional<std::vector<std::string>> generated(const YamlNode& map, int64_t room, Problems& problems) {
  const auto refuse = [&](Mark mark, std::string message, std::string hint = "write a list, {pow2: [1, 8]} or {range: [1, 9, 2]}") {
    problems.add(mark, std::move(message), std::move(hint));
    return std::nullopt;
  };
  if (map.entries.size() != 1 || (map.entries[0].key != "pow2" && map.entries[0].key != "range"))
    return refuse(map.mark, fmt::format("`{}` is not an axis", to_flow(map)));
  const YamlEntry& entry = map.entries[0];
  const bool pow2 = entry.key == "pow2";
  std::vector<int64_t> bounds;
  for (const YamlNode& item : entry.value.items) {
    const auto n = item.is_scalar() ? parse_count(item.text) : std::nullopt;
    if (!n) return refuse(item.mark, fmt::format("`{}` is not a whole number", to_flow(item)));
    bounds.push_back(*n);
  }
  if (bounds.size() != 2 && !(bounds.size() == 3 && !pow2))
    return refuse(entry.value.mark, fmt::format("{} takes [first, last]{}", entry.key, pow2 ? "" : " or [first, last, step]"));
  const int64_t first = bounds[0], last = bounds[1], step = bounds.size() == 3 ? bounds[2] : 1;
  if (step < 1)
    return refuse(entry.value.mark, fmt::format("the step of `{}` is {}", to_flow(map), step),
                  "write a step of 1 or more: {range: [1, 9, 2]}");
  if (first > last)
    return refuse(entry.value.mark, fmt::format("`{}` is empty, as {} is above {}", to_flow(map), first, last),
                  "write the smaller number first, or a list for another order");
  if (pow2 && (first < 1 || (first & (first - 1)) != 0))
    return refuse(entry.value.mark, fmt::format("pow2 begins at {}, which is not a power of two", first));
  const uint64_t steps = (static_cast<uint64_t>(last) - static_cast<uint64_t>(first)) / static_cast<uint64_t>(step);
  if (!pow2 && steps >= static_cast<uint64_t>(room))
    return refuse(entry.value.mark,
                  fmt::format("range from {} to {} by {} takes {} steps, and the axes of a sweep have at most {} values", first,
                              last, step, steps, limits::kSweepPoints));
  std::vector<std::string> values;
  for (int64_t v = first; v <= last; v = pow2 ? v * 2 : v + step) {
    values.push_back(fmt::format("{}", v));
    if (v > last - (pow2 ? v : step)) break;  // the next one would pass the end, or overflow
  }
  return values;
}

/// A map as the command line writes it, "optimizer=cpu,activations=cpu"; other texts stay what they are.
YamlNode from_pairs(YamlNode value) {
  const std::string text = value.text;
  if (text.find('=') == std::string::npos) return value;
  value = {YamlNode::Kind::kMap, "", value.mark, {}, {}};
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find(',', begin), text.size());
    const std::string pair = text.substr(begin, end - begin);
    const size_t equals = std::min(pair.find('='), pair.size());
    const std::string right = equals < pair.size() ? pair.substr(equals + 1) : "";
    value.entries.push_back({pair.substr(0, equals), value.mark, {YamlNode::Kind::kScalar, right, value.mark, {}, {}}});
    begin = end + 1;
  }
  return value;
}

/// Fills one `Content` from one document.
class Loader {
 public:
  Loader(Sweep::Content& content, Problems& problems, std::string_view text, const LoadOptions& options, const std::string& folder)
      : content_(content),
        problems_(problems),
        text_(text),
        options_(options),
        reader_(problems, content.sources, folder, options.local_machine) {
    for (size_t end = text.find('\n'); end != std::string_view::npos; end = text.find('\n', end + 1)) lines_.push_back(end + 1);
  }

  void load_sweep(const YamlNode& root) {
    read_version(root);
    read_assumption(root);
    std::vector<std::string> skip = kSweepOnly;
    skip.emplace_back("version");
    reader_.read(root, content_.base, skip, top_keys());
    if (const YamlNode* d = root.find("description")) content_.description = d->text;
    read_mode(root.find("mode"));
    read_resolution(root.find("resolution"));
    read_traces(root.find("traces"));
    if (const YamlNode* axes = root.find("axes")) read_axes(*axes);
    each(root.find("zip"), "zip", "{dp: [1, 2], tp: [2, 1]}", [&](const YamlNode& n) { read_zip(n); });
    each(root.find("when"), "when", "{if: tp == 1, set: {zero: 1}}", [&](const YamlNode& n) { read_when(n); });
    each(root.find("constraints"), "constraints", "{expr: tp <= 8, why: TEXT}", [&](const YamlNode& n) { read_constraint(n); });
    each(root.find("exclude"), "exclude", "{dp: 2}", [&](const YamlNode& n) { read_exclusion(n); });
    each(root.find("include"), "include", "{name: NAME, dp: 2}", [&](const YamlNode& n) { read_inclusion(n); });
    each(root.find("claims"), "claims", "{says: TEXT, source: TEXT, check: EXPRESSION}", [&](const YamlNode& n) { read_claim(n); });
    if (const YamlNode* target = root.find("time_to_loss")) read_loss_target(*target);
    if (const YamlNode* search = root.find("search")) read_search(*search);
    finish(root.mark);
  }

  void load_case(const YamlNode& root) {
    read_version(root);
    read_assumption(root);
    for (const char* key : kOfSeveral)
      if (const YamlNode* value = root.find(key)) {  // one of them tells what the file is
        problems_.add(
            value->mark, fmt::format("`{}` makes several cases of one, and one is read here", key),
            "run the sweep with `shardlab run`, and name a case of the run as DIR/CASE; in a file of one case leave it out");
        break;
      }
    std::vector<std::string> skip = kSweepOnly;
    skip.emplace_back("version");
    std::vector<std::string> listed = top_keys();
    std::erase_if(listed,
                  [](const std::string& k) { return std::find(kSweepOnly.begin(), kSweepOnly.end(), k) != kSweepOnly.end(); });
    reader_.read(root, content_.base, skip, listed);
    content_.mode = options_.mode.value_or(Mode::kSimulate);
    finish(root.mark);
  }

 private:
  void read_version(const YamlNode& root) {
    const YamlNode* version = root.find("version");
    if (version && version->text != "1")
      problems_.add(version->mark, fmt::format("`version` is `{}`, which this program does not read", to_flow(*version)),
                    "write `version: 1`");
  }

  /// `model: {hf: FILE, assume: llama}`, or model.assume=llama on the command line.
  void read_assumption(const YamlNode& root) {
    const YamlNode* model = root.find("model");
    if (const YamlNode* assume = model && model->is_map() ? model->find("assume") : nullptr) assume_ = assume->text;
    for (const std::string& text : options_.overrides)
      if (text.starts_with(kAssume)) assume_ = text.substr(kAssume.size());
    reader_.assume(assume_);
  }

  /// Says that `value` is none of the words that `key` may be.
  void unknown_word(std::string_view key, const YamlNode& value, const std::vector<std::string>& words) {
    problems_.add(value.mark, fmt::format("`{}` is `{}`{}", key, to_flow(value), did_you_mean(value.text, words)),
                  fmt::format("expected one of: {}", fmt::join(words, " ")));
  }

  void read_mode(const YamlNode* mode) {
    if (mode) {
      mode_mark_ = mode->mark;
      if (const auto named = mode_named(mode->text))
        content_.mode = *named;
      else
        unknown_word("mode", *mode, {"simulate", "measure", "both"});
    }
    if (options_.mode) content_.mode = *options_.mode, mode_mark_ = {};
  }

  void read_resolution(const YamlNode* resolution) {
    if (!resolution) return;
    if (const auto named = resolution_named(resolution->text))
      content_.resolution = *named;
    else
      unknown_word("resolution", *resolution, {"timeline", "segments", "analytic"});
  }

  void read_traces(const YamlNode* traces) {
    if (!traces) return;
    if (const auto named = traces_named(traces->text))
      content_.traces = *named;
    else
      unknown_word("traces", *traces, {"none", "measured", "all"});
  }

  /// Calls `read` for every item of a list, a map as `example` is; anything else is a problem.
  template <class Read>
  void each(const YamlNode* list, std::string_view key, std::string_view example, const Read& read) {
    if (!list || list->is_null()) return;
    if (!list->is_sequence())
      return problems_.add(list->mark, fmt::format("`{}` {}", key, is_what(*list)),
                           "a list is expected: start each entry with `-`");
    for (const YamlNode& item : list->items) {
      if (item.is_map())
        read(item);
      else
        problems_.add(item.mark, fmt::format("an entry of `{}` {}", key, is_what(item)),
                      fmt::format("a map is expected: {}", example));
    }
  }

  /// Says which keys of `map` are not allowed; whether there are any.
  bool unknown_in(const YamlNode& map, std::string_view section, const std::vector<std::string>& allowed) {
    bool any = false;
    for (const YamlEntry& e : map.entries) {
      if (std::find(allowed.begin(), allowed.end(), e.key) != allowed.end()) continue;
      add_unknown_key(problems_, e.mark, e.key, section, allowed);
      any = true;
    }
    return any;
  }

  // ---- axes and zip --------------------------------------------------------------------------------------------------------

  void read_axes(const YamlNode& axes) {
    if (axes.is_null()) return;
    if (!axes.is_map())
      return problems_.add(axes.mark, fmt::format("`axes` {}", is_what(axes)), "a map from key to list is expected: {dp: [1, 2]}");
    for (const YamlEntry& entry : axes.entries) {
      const auto values = axis_values(entry);
      const std::string path = reader_.path_of(entry.key, values.empty() ? "" : values.front().text, entry.mark);
      if (path.empty()) continue;
      SweepAxis axis{{path}, {}, false};
      for (const YamlNode& value : values)
        if (auto setting = value_in_axis(path, entry.key, value)) axis.rows.push_back({*setting});
      if (values.empty() && !entry.value.is_map())
        problems_.add(entry.value.mark, fmt::format("axis `{}` has no values", entry.key),
                      fmt::format("give at least one: `{}: [...]`", entry.key));
      add_axis(std::move(axis), entry.mark);
    }
  }

  void read_zip(const YamlNode& block) {
    SweepAxis axis;
    axis.zipped = true;
    size_t rows = 0;
    std::string_view first;
    for (const YamlEntry& entry : block.entries) {
      const auto values = axis_values(entry);
      const std::string path = reader_.path_of(entry.key, values.empty() ? "" : values.front().text, entry.mark);
      if (path.empty()) continue;
      if (axis.paths.empty()) rows = values.size(), first = entry.key;
      if (values.size() != rows)
        problems_.add(entry.value.mark,
                      fmt::format("`{}` has {} value{}, but `{}` of the same zip block has {}", entry.key, values.size(),
                                  values.size() == 1 ? "" : "s", first, rows),
                      "give the lists of one block the same length");
      if (std::find(axis.paths.begin(), axis.paths.end(), path) != axis.paths.end())
        problems_.add(entry.mark, fmt::format("`{}` is twice in this zip block", entry.key), "keep one of the two");
      axis.paths.push_back(path);
      axis.rows.resize(std::max(axis.rows.size(), values.size()));
      for (size_t i = 0; i < values.size(); ++i)
        if (auto setting = value_in_axis(path, entry.key, values[i])) axis.rows[i].push_back(*setting);
    }
    if (!axis.paths.empty()) add_axis(std::move(axis), block.mark);
  }

  /// The values of one axis as nodes: a list's items, a single value, or those a generator makes.
  std::vector<YamlNode> axis_values(const YamlEntry& entry) {
    if (entry.value.is_sequence()) return entry.value.items;
    if (!entry.value.is_map()) return {entry.value};
    std::vector<YamlNode> nodes;
    if (const auto texts = generated(entry.value, limits::kSweepPoints - generated_, problems_)) {
      generated_ += static_cast<int64_t>(texts->size());
      for (const std::string& text : *texts) nodes.push_back({YamlNode::Kind::kScalar, text, entry.value.mark, {}, {}});
    }
    return nodes;
  }

  /// A value of `model` or `machine` may come from another source than the first of its axis; the axis must then name it.
  std::optional<Setting> value_in_axis(const std::string& path, const std::string& word, const YamlNode& value) {
    if ((word == "model" || word == "machine") && value.is_scalar() && reader_.path_of(word, value.text, value.mark) != path) {
      problems_.add(value.mark, fmt::format("`{}` and the first value of this axis are not both presets or both files", value.text),
                    "use one of the two in an axis, or `include` the point");
      return std::nullopt;
    }
    return reader_.value_of(path, word, value);
  }

  void add_axis(SweepAxis axis, Mark mark) {
    if (problems_.is_full()) return;
    for (const std::string& path : axis.paths)
      for (const SweepAxis& other : content_.axes)
        if (std::find(other.paths.begin(), other.paths.end(), path) != other.paths.end())
          problems_.add(mark, fmt::format("`{}` is in two axes", short_name(path)), "keep one of the two");
    content_.axes.push_back(std::move(axis));
  }

  // ---- rules ---------------------------------------------------------------------------------------------------------------

  /// `what` calls the rule: "the constraint".
  std::optional<Expression> read_expression(const YamlNode& rule, const char* what, const char* key, Mark& mark) {
    return read_expression(rule, what, key, mark, expression_vocabulary(), "tp <= 8");
  }
  std::optional<Expression> read_expression(const YamlNode& rule, const char* what, const char* key, Mark& mark,
                                            const Vocabulary& vocabulary, std::string_view example) {
    const YamlNode* node = rule.find(key);
    if (!node || !node->is_scalar() || node->text.find_first_not_of(" \t\n") == std::string::npos) {
      problems_.add(node ? node->mark : rule.mark,
                    !node               ? fmt::format("{} has no `{}`", what, key)
                    : node->is_scalar() ? fmt::format("`{}` is empty", key)
                                        : fmt::format("`{}` {}, and an expression is expected", key, is_what(*node)),
                    fmt::format("write `{}: \"{}\"`", key, example));
      return std::nullopt;
    }
    mark = first_character(node->mark);
    auto parsed = Expression::parse(node->text, vocabulary);
    if (const auto* error = std::get_if<ExpressionError>(&parsed)) {
      problems_.add({mark.line, mark.column + error->column - 1}, error->message,
                    fmt::format("in the expression `{}`", node->text));
      return std::nullopt;
    }
    return std::get<Expression>(std::move(parsed));
  }

  /// A quoted scalar's mark is its quote.
  Mark first_character(Mark mark) const {
    if (mark.line < 1 || static_cast<size_t>(mark.line) > lines_.size()) return mark;
    const size_t at = lines_[static_cast<size_t>(mark.line - 1)] + static_cast<size_t>(mark.column - 1);
    if (at < text_.size() && (text_[at] == '"' || text_[at] == '\'')) ++mark.column;
    return mark;
  }

  void read_when(const YamlNode& rule) {
    if (unknown_in(rule, "when", {"if", "set"})) return;  // what is missing may be what is misspelt
    Mark mark;
    auto condition = read_expression(rule, "the rule of `when`", "if", mark);
    Settings set;
    if (const YamlNode* values = rule.find("set"))
      reader_.read(*values, set);
    else
      problems_.add(rule.mark, "the rule of `when` has no `set`", "write `set: {key: value}`");
    if (condition) content_.whens.push_back({*std::move(condition), mark, std::move(set)});
  }

  void read_constraint(const YamlNode& rule) {
    if (unknown_in(rule, "constraints", {"expr", "why"})) return;
    Mark mark;
    auto expression = read_expression(rule, "the constraint", "expr", mark);
    const YamlNode* why = rule.find("why");
    if (expression) content_.constraints.push_back({*std::move(expression), mark, why ? why->text : ""});
  }

  /// `check` is read again when the results are there: what it says of cases can only be known then.
  void read_claim(const YamlNode& rule) {
    if (unknown_in(rule, "claims", {"says", "source", "check", "why"})) return;
    Claim claim;
    for (const auto& [key, field] : {std::pair{"says", &claim.says}, {"source", &claim.source}}) {
      const YamlNode* node = rule.find(key);
      if (node && node->is_scalar() && !node->text.empty())
        *field = node->text;
      else
        problems_.add(rule.mark, fmt::format("the claim has no `{}`", key),
                      "a claim has the sentence (says), who says it (source) and a check");
    }
    Mark mark;
    Vocabulary vocabulary;
    vocabulary.figures = true;
    const auto check =
        read_expression(rule, "the claim", "check", mark, vocabulary, "zero1.predicted_peak_bytes < zero0.predicted_peak_bytes");
    if (!check) return;
    claim.check = check->text();
    if (const YamlNode* why = rule.find("why")) claim.why = why->text;
    content_.claims.push_back(std::move(claim));
  }

  /// `search: halving`, or `{kind: random, count: 100, seed: 7}`.
  void read_search(const YamlNode& node) {
    static constexpr std::pair<std::string_view, SearchKind> kParts[] = {{"count", SearchKind::kRandom},
                                                                         {"seed", SearchKind::kRandom},
                                                                         {"keep", SearchKind::kHalving},
                                                                         {"margin", SearchKind::kGoal}};
    if (node.is_map()) unknown_in(node, "search", {"kind", "count", "seed", "keep", "margin"});
    const YamlNode* kind = node.is_map() ? node.find("kind") : &node;
    const auto named = kind && kind->is_scalar() ? search_kind_named(kind->text) : std::nullopt;
    if (!kind)
      return problems_.add(node.mark, "the search has no `kind`",
                           "write `search: {kind: K}`, with one of: grid random halving goal");
    if (!named) return unknown_word(node.is_map() ? "kind" : "search", *kind, {"grid", "random", "halving", "goal"});
    Search& search = content_.search;
    search.kind = *named;
    search.mark = node.mark;
    for (const auto& [part, of] : kParts) {
      const YamlNode* value = node.is_map() ? node.find(part) : nullptr;
      if (value == nullptr) continue;
      if (of != *named) {
        problems_.add(value->mark, fmt::format("`{}` has no effect on a search of kind {}", part, name_of(*named)),
                      fmt::format("remove it, or use kind: {}", name_of(of)));
        continue;
      }
      const bool whole = of == SearchKind::kRandom;
      const auto count = whole && value->is_scalar() ? parse_count(value->text) : std::nullopt;
      const auto share = !whole && value->is_scalar() ? parse_number(value->text) : std::nullopt;
      const bool good = part == "count"  ? count && *count >= 1 && *count <= static_cast<int64_t>(limits::kSweepPoints)
                        : part == "seed" ? count && *count >= 0
                        : part == "keep" ? share && *share > 0 && *share <= 1
                                         : share && *share >= 0 && *share < 1;
      if (!good) {
        problems_.add(value->mark, fmt::format("`{}` of the search is `{}`", part, to_flow(*value)),
                      part == "count"  ? "expected a whole number of points, 1 or more"
                      : part == "seed" ? "expected a whole number of 0 or more"
                      : part == "keep" ? "expected a fraction of the points, above 0 and up to 1, for example 0.25"
                                       : "expected a fraction of the step time, from 0 to below 1, for example 0.05 for 5 %");
        continue;
      }
      if (part == "count") search.count = *count;
      if (part == "seed") search.seed = *count;
      if (part == "keep") search.keep = *share;
      if (part == "margin") search.margin = *share;
    }
    if (*named == SearchKind::kRandom && !(node.is_map() && node.find("count")))
      problems_.add(node.mark, "a random search needs `count`, the number of its points",
                    "write `search: {kind: random, count: 100}`");
  }

  /// `time_to_loss: 2.6`, or `{loss: 2.6, mean_of: 20}`.
  void read_loss_target(const YamlNode& node) {
    constexpr const char* kForms =
        "write `time_to_loss: 2.6`, or `{loss: 2.6, mean_of: 10}`: nats a token, and steps whose mean loss counts";
    constexpr int64_t kMostSteps = 1'000'000;
    if (node.is_map()) unknown_in(node, "time_to_loss", {"loss", "mean_of"});
    const YamlNode* loss = node.is_map() ? node.find("loss") : &node;
    const YamlNode* mean_of = node.is_map() ? node.find("mean_of") : nullptr;
    const auto value = loss && loss->is_scalar() ? parse_number(loss->text) : std::nullopt;
    const auto steps = !mean_of ? LossTarget{}.mean_of : mean_of->is_scalar() ? parse_count(mean_of->text) : std::nullopt;
    if (!value || !(*value > 0) || !steps || *steps < 1 || *steps > kMostSteps)
      return problems_.add(
          node.mark,
          fmt::format("`time_to_loss` is `{}`, and a loss above 0 with 1 to {} steps is expected", to_flow(node), kMostSteps),
          kForms);
    content_.loss_target = {*value, *steps};
  }

  void read_exclusion(const YamlNode& rule) {
    SweepExclusion exclusion;
    for (const YamlEntry& entry : rule.entries) {
      const std::vector<YamlNode> values = entry.value.is_sequence() ? entry.value.items : std::vector<YamlNode>{entry.value};
      const std::string path = reader_.path_of(entry.key, values.empty() ? "" : values.front().text, entry.mark);
      if (path.empty()) continue;
      exclusion.keys.push_back({path, {}});
      for (const YamlNode& value : values)
        if (auto setting = reader_.value_of(path, entry.key, value)) exclusion.keys.back().second.push_back(*setting);
    }
    if (rule.entries.empty()) problems_.add(rule.mark, "an empty exclusion would exclude every point", "give at least one key");
    if (!exclusion.keys.empty()) content_.exclusions.push_back(std::move(exclusion));
  }

  void read_inclusion(const YamlNode& rule) {
    SweepInclusion inclusion;
    inclusion.mark = rule.mark;
    reader_.read(rule, inclusion.settings);
    if (const auto name = inclusion.settings.find("name"); name != inclusion.settings.end()) {
      inclusion.name = name->second.text;
      inclusion.settings.erase(name);
    }
    if (!inclusion.name.empty() && !included_names_.insert(inclusion.name).second)
      problems_.add(rule.mark, fmt::format("a second point has the name `{}`", inclusion.name),
                    "give each point a name of its own");
    content_.inclusions.push_back(std::move(inclusion));
  }

  // ---- the command line, and what must be there ------------------------------------------------------------------------------

  void finish(Mark root) {
    read_overrides();
    Settings given;  // `auto` gives nothing
    merge(given, content_.base);
    content_.base = std::move(given);
    if (const auto name = content_.base.find("name"); name != content_.base.end()) content_.name = name->second.text;
    if (content_.name.empty()) content_.name = std::filesystem::path(content_.file).stem().string();
    if (!problems_.empty()) return;  // what is missing may be what could not be read
    if (!any_source("model") && content_.sources.inline_model.empty() && !any_key("model.layers"))
      problems_.add(
          root, "no model is given",
          "add `model: NAME` (`shardlab model list` prints the names), `model: {hf: config.json}` or `model: {inline: {...}}`");
    if (!any_source("machine"))
      problems_.add(
          root, "no machine is given",
          "add `machine: NAME` (`shardlab machine list` prints the names), `machine: {file: PATH}` or `machine: {local: true}`");
    if (content_.mode != Mode::kSimulate) check_data();
  }

  void check_data() {
    if (!any_key("data.text") && !any_key("data.tokens")) {
      if (const Machine* other = only_other_machines())
        return problems_.add(
            mode_mark_, fmt::format("`mode` is `{}`, but the machine {} is not this machine", name_of(content_.mode), other->id),
            "write `machine: {local: true}`, or `mode: simulate`");
      problems_.add(mode_mark_,
                    fmt::format("`mode` is `{}`, which trains on real text, but no `data` is given", name_of(content_.mode)),
                    "add `data: {text: FILE-OR-FOLDER}` or `data: {tokens: FILE.bin}`");
    }
    each_layer([&](const Settings& layer) {
      for (const char* path : {"data.text", "data.tokens"})
        if (const auto it = layer.find(path); it != layer.end() && !is_there(it->second.text))
          problems_.add(it->second.mark, fmt::format("{} does not exist", it->second.text),
                        "check the path; a relative path begins in the folder of the file that has it");
    });
  }

  /// The first machine that is named, where none of them can be measured here; else null.
  const Machine* only_other_machines() const {
    const Sources& sources = content_.sources;
    const Machine* first = sources.inline_machine ? &*sources.inline_machine : nullptr;
    if (first != nullptr && first->local) return nullptr;
    for (const auto& [text, machine] : sources.machines) {
      if (machine.local) return nullptr;
      if (first == nullptr) first = &machine;
    }
    return first;
  }

  void read_overrides() {
    Problems here("command line");
    SettingsReader reader(here, content_.sources, std::filesystem::current_path().string(), options_.local_machine);
    reader.assume(assume_);
    for (const std::string& text : options_.overrides) {
      if (text.starts_with(kAssume)) continue;
      const size_t equals = text.find('=');
      std::string word = text.substr(0, equals);
      std::replace(word.begin(), word.end(), '-', '_');
      if (equals == std::string::npos || equals == 0) {
        here.add({}, fmt::format("`{}` is not of the form key=value", text), "write for example tp=2");
        continue;
      }
      YamlNode value{YamlNode::Kind::kScalar, text.substr(equals + 1), {}, {}, {}};
      const std::string path = word == "name" ? word : reader.path_of(word, value.text, {});
      if (path.empty()) continue;
      if (const CaseKey* key = find_key(path); key && key->form == Form::kMap) value = from_pairs(std::move(value));
      if (auto setting = reader.value_of(path, word, value)) {
        put(content_.overrides, path, *setting);
        drop_axis(path, here);
      }
    }
    for (const Error& e : here.errors()) problems_.add(e);
  }

  /// A key that the command line fixes is no axis any more.
  void drop_axis(const std::string& path, Problems& here) {
    const std::string_view group = source_group(path);
    const auto same = [&](const std::string& other) { return other == path || (!group.empty() && source_group(other) == group); };
    for (const SweepAxis& axis : content_.axes)
      if (axis.zipped && std::any_of(axis.paths.begin(), axis.paths.end(), same))
        here.add({}, fmt::format("`{}` is part of a zip block of the file", short_name(path)),
                 "its keys change together: edit the file instead");
    std::erase_if(content_.axes, [&](const SweepAxis& axis) { return !axis.zipped && same(axis.paths.front()); });
  }

  template <class Use>
  void each_layer(const Use& use) const {
    use(content_.base);
    use(content_.overrides);
    for (const SweepWhen& w : content_.whens) use(w.set);
    for (const SweepInclusion& i : content_.inclusions) use(i.settings);
  }
  template <class Matches>
  bool anywhere(const Matches& matches) const {
    bool found = false;
    each_layer([&](const Settings& layer) {
      found = found || std::any_of(layer.begin(), layer.end(), [&](const auto& entry) { return matches(entry.first); });
    });
    for (const SweepAxis& axis : content_.axes) found = found || std::any_of(axis.paths.begin(), axis.paths.end(), matches);
    return found;
  }
  bool any_source(std::string_view group) const {
    return anywhere([&](const std::string& path) { return source_group(path) == group; });
  }
  bool any_key(std::string_view key) const {
    return anywhere([&](const std::string& path) { return path == key; });
  }

  Sweep::Content& content_;
  Problems& problems_;
  std::string_view text_;
  std::vector<size_t> lines_{0};  ///< where each line begins
  int64_t generated_ = 0;         ///< values of axes made by pow2 and range
  const LoadOptions& options_;
  static constexpr std::string_view kAssume = "model.assume=";
  std::string assume_;
  Mark mode_mark_;
  SettingsReader reader_;
  std::set<std::string> included_names_;
};

enum class Document : uint8_t { kSweep, kCase };

Result<Sweep> load(std::string_view text, const std::string& file, const LoadOptions& options, Document kind) {
  Problems problems(file);
  const YamlNode root = parse_yaml(text, problems);
  if (!problems.empty() && root.is_null()) return problems.take();
  if (!root.is_map() && !root.is_null()) {
    problems.add(root.mark,
                 root.is_scalar() ? fmt::format("the file holds only `{}`", root.text) : fmt::format("the file {}", is_what(root)),
                 "a map is expected: `model: ...`, `machine: ...`");
    return problems.take();
  }
  auto content = std::make_shared<Sweep::Content>();
  content->file = file;
  Loader loader(*content, problems, text, options, std::filesystem::path(file).parent_path().string());
  if (kind == Document::kSweep)
    loader.load_sweep(root);
  else
    loader.load_case(root);
  if (!problems.empty()) return problems.take();
  return Sweep(std::move(content));
}

/// The one point of a case file, refused or not.
Result<Point> single_point(const Result<Sweep>& loaded) {
  if (!loaded.ok()) return loaded.error();
  auto expansion = expand(*loaded);
  if (!expansion.ok()) return expansion.error();
  SHARDLAB_CHECK(expansion->points.size() == 1, "a case file made {} points", expansion->points.size());
  Point& point = expansion->points.front();
  return std::move(point);
}

/// The one case of a case file.
Result<Case> single(const Result<Sweep>& loaded) {
  auto point = single_point(loaded);
  if (!point.ok()) return point.error();
  if (point->refusal) return *point->refusal;
  return std::move(point->config);
}

}  // namespace

Result<Sweep> load_sweep_text(std::string_view text, const std::string& file, const LoadOptions& options) {
  return load(text, file, options, Document::kSweep);
}

Result<Sweep> load_sweep(const std::string& path, const LoadOptions& options) {
  auto text = read_text_file(path);
  if (!text.ok()) return text.error();
  return load_sweep_text(*text, path, options);
}

Result<Case> load_case_text(std::string_view text, const std::string& file, const LoadOptions& options) {
  return single(load(text, file, options, Document::kCase));
}

Result<Case> load_case(const std::string& path, const LoadOptions& options) {
  auto text = read_text_file(path);
  if (!text.ok()) return text.error();
  return load_case_text(*text, path, options);
}

Result<Case> case_from_words(const LoadOptions& options) { return single(load("", "command line", options, Document::kCase)); }

Result<Point> point_from_words(const LoadOptions& options) {
  return single_point(load("", "command line", options, Document::kCase));
}

}  // namespace shardlab::sweeps
