// Outcomes, machines and run metadata as JSON, both ways: what the store keeps.
#pragma once

#include <algorithm>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "plan/base/result.h"
#include "plan/keys.h"
#include "plan/outcome.h"
#include "reports/metadata.h"

namespace shardlab::reports {

/// What a stored case leaves out: each key at the text that it has here. Texts are kept beside the cases, so that a build whose default
/// of a key is another reads the cases as they were.
class CaseDefaults {
 public:
  using Text = std::pair<std::string, std::string>;  ///< of a key: its path, and what it is

  /// Those of this build.
  static const CaseDefaults& of_build();
  /// Those that were kept. A key of this build without a text is always written. Refuses a text that its key cannot have; a key that
  /// this build does not know is left out of no case that this build can read.
  static Result<CaseDefaults> of(std::span<const Text> texts);

  /// Whether each key of this build has a text.
  bool complete() const { return std::ranges::all_of(keys_, &Key::has_text); }
  std::vector<Text> texts() const;
  /// Writes the keys of `config` that are not at their text.
  template <class F>
  void for_each_said(const Case& config, F&& visit) const {
    for (size_t k = 0; k < keys_.size(); ++k)
      if (std::string said = keys_[k].key->get(config); !leaves_out(k, said)) visit(keys_[k].key->path, said);
  }
  /// The keys that cases are stored by.
  std::vector<const CaseKey*> keys() const;
  /// Whether a stored case leaves out the key at this place of `keys` where it has the text `said`.
  bool leaves_out(size_t key, std::string_view said) const { return keys_[key].has_text && said == keys_[key].text; }
  /// The case where nothing is said.
  const Case& unsaid() const { return unsaid_; }

 private:
  struct Key {
    const CaseKey* key;
    std::string text;
    bool has_text;
  };
  std::vector<Key> keys_;
  Case unsaid_;
};

/// Everything but the losses, the ops and the machine, which the store keeps in tables of their own.
std::string outcome_to_json(const CaseOutcome& outcome);
/// Adds the same to `text`. `config`: JSON of the outcome's case, an object of the texts of its keys.
void add_outcome_json(const CaseOutcome& outcome, std::string_view config, std::string& text);
/// A member of such an object: `"layout.tp":"4"`.
std::string json_member(std::string_view key, std::string_view said);
/// A machine with its calibration.
std::string machine_to_json(const Machine& machine);
std::string run_to_json(const RunMetadata& run);

/// The inverse: numbers come back bit for bit. Unknown figures are ignored and missing ones keep their defaults, so that older stores can
/// be read. Refuses what is no JSON object, has a value of a wrong kind, or has a key of a case that this build does not know.
Result<CaseOutcome> outcome_from_json(std::string_view text, const CaseDefaults& defaults = CaseDefaults::of_build());
Result<Machine> machine_from_json(std::string_view text);
Result<RunMetadata> run_from_json(std::string_view text);

}  // namespace shardlab::reports
