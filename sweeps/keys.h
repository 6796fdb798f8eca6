// The keys of a case: ONE table from which files, axes, command-line words, expressions, `case.yaml` and README.md take their
// words.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "plan/case.h"
#include "sweeps/expression.h"

namespace shardlab::sweeps {

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
};

/// The values of a numeric key that mean something, ends included unless open.
struct Range {
  double least = 0, most = 0;
  bool above = false;  ///< `least` itself is outside
  bool below = false;  ///< `most` itself is outside
};

/// The range of a numeric key; a key without one of its own takes what is not negative and fits its field.
Range range_of(const CaseKey& key);

/// In the order in which they are set and written.
std::span<const CaseKey> case_keys();

/// By canonical path or alias; null when there is none.
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

/// Every path and alias, and every word of a kWord key: what expressions are made of.
const Vocabulary& expression_vocabulary();

/// What a text must look like, for messages: "a whole number from 1 to 1024 (8, 64k, 1Mi)", "one of: none afab 1f1b".
std::string expected(const CaseKey& key);

/// True when `text` has the key's form, and a number is in the key's range.
bool has_form(const CaseKey& key, const std::string& text);

/// The key's value in an expression: a number, a bool, or text.
ExpressionValue expression_value(const CaseKey& key, const std::string& text);

}  // namespace shardlab::sweeps
