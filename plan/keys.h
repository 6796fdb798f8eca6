// The keys of a case: ONE table. Sweep files, axes, flags, expressions, `case.yaml`, the store of results, columns of tables, the
// estimator's refusals and docs/keys.md take their words from it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "plan/case.h"

namespace shardlab {

/// The form a value must have.
enum class Form : uint8_t {
  kInteger,   ///< a count that an int holds
  kCount,     ///< a count, with suffixes
  kNumber,    ///< a decimal number, with suffixes
  kBool,      ///< true or false
  kWord,      ///< one of `CaseKey::words`
  kText,      ///< any text
  kPath,      ///< a path, relative to the folder of the file that says it
  kDuration,  ///< seconds, or 5m, 2h, 250ms
  kMap,       ///< a word, or a map from the key's parts to words (`map_form`)
  kAny,       ///< whatever `CaseKey::set` takes: a word, a number, a list
};

/// The values of a numeric key that mean something, ends included unless open.
struct Range {
  double least = 0, most = 0;
  bool above = false;  ///< `least` itself is outside
  bool below = false;  ///< `most` itself is outside
};

/// Who has the key as a flag of its own: the verbs that ask about one case, and `search`, which varies it too.
enum class Flag : uint8_t { kNone, kCase, kAxis };

/// One key. `set` is called with a text of the right form and says whether a case of this version can hold that value;
/// where it cannot, the case is left alone and the point is refused.
struct CaseKey {
  std::string_view path;     ///< canonical: "layout.tp", "train.learning_rate.peak"
  std::string_view aliases;  ///< short forms, separated by spaces
  Form form;
  std::string_view words;  ///< of kWord: its values; of kMap and kAny: those that are words
  std::string_view holds;  ///< what this version can hold, for the message; empty: every value of the form
  bool (*set)(Case& c, const std::string& text);
  std::string (*get)(const Case& c);  ///< null: a case has no field for it (its only value is the neutral one)
  std::string_view help;              ///< what the value is, with its unit
  Range range = {0, -1};  ///< of a numeric key; the default: any value that is not negative and fits the field (`range_of`)
  Flag has_flag = Flag::kNone;
  bool is_estimated = false;  ///< the analytic estimator has a form for it, or it changes neither memory nor time

  std::string_view texts;  ///< of kAny: a regular expression for the values that are not among `words`; empty: numbers

  // The functions below return the key with one more property. A row of the table calls them after its braces, for the properties it has.
  /// With `least` as the smallest value.
  constexpr CaseKey from(double least) const {
    CaseKey key = *this;
    key.range.least = least;
    return key;
  }
  constexpr CaseKey above(double least) const {
    CaseKey key = from(least);
    key.range.above = true;
    return key;
  }
  constexpr CaseKey up_to(double most) const {
    CaseKey key = *this;
    key.range.most = most;
    return key;
  }
  constexpr CaseKey below(double most) const {
    CaseKey key = up_to(most);
    key.range.below = true;
    return key;
  }
  constexpr CaseKey text(std::string_view pattern) const {
    CaseKey key = *this;
    key.texts = pattern;
    return key;
  }
  constexpr CaseKey flag() const {
    CaseKey key = *this;
    key.has_flag = Flag::kCase;
    return key;
  }
  constexpr CaseKey axis() const {
    CaseKey key = *this;
    key.has_flag = Flag::kAxis;
    return key;
  }
  constexpr CaseKey estimated() const {
    CaseKey key = *this;
    key.is_estimated = true;
    return key;
  }

  /// The short form by which people say it: "tp", "fsdp.unit"; of a key without one its path.
  constexpr std::string_view word() const { return aliases.empty() ? path : aliases.substr(0, aliases.find(' ')); }
};

/// Calls `use` with each word of a list separated by spaces: of `CaseKey::aliases` and `CaseKey::words`.
template <class Use>
void for_each_word(std::string_view list, const Use& use) {
  while (!list.empty()) {
    const size_t end = std::min(list.find(' '), list.size());
    use(list.substr(0, end));
    list.remove_prefix(std::min(end + 1, list.size()));
  }
}

/// The range of a numeric key.
Range range_of(const CaseKey& key);

/// All keys, in the order in which they are set and written.
std::span<const CaseKey> case_keys();

/// The key with this canonical path or alias; null if there is none.
const CaseKey* find_key(std::string_view word);

/// True where keys begin with "path.".
bool is_section(std::string_view path);

/// The words that may follow `section`, a path or a short form ("" for the top: short forms, and whole keys without a section).
std::vector<std::string> keys_under(std::string_view section);

/// What a map under a key of form kMap may say; empty for other keys.
struct MapForm {
  std::vector<std::string> parts;  ///< its keys
  std::vector<std::string> words;  ///< what each may be
};
MapForm map_form(const CaseKey& key);

/// `CaseKey::words`, one by one.
std::vector<std::string> words_of(const CaseKey& key);

/// What a text must look like, for messages: "a whole number from 1 to 1024, for example 8", "one of: none afab 1f1b".
std::string expected(const CaseKey& key);

/// True when `text` has the key's form, and a number is in the key's range.
bool has_form(const CaseKey& key, const std::string& text);

/// Sets `key` to a text that `get` wrote for another case, also outside the key's range: a refused case is kept as it was asked for.
bool restore(const CaseKey& key, Case& c, const std::string& text);

}  // namespace shardlab
