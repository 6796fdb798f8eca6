// YAML as a tree of texts with a position on every node, and the problems found while reading it.
//
// Scalars stay text: what a text means (a count with a suffix, a word, a duration) is for the key it is given to, so `on`, `no`
// and `1e3` hold no surprises. Duplicate keys and merge keys are problems here, before anyone looks at the content.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "plan/base/limits.h"
#include "plan/base/nearest.h"
#include "plan/base/result.h"

namespace shardlab::sweeps {

/// A position in a file, counted from 1. Line 0: nowhere (a value that was given on the command line).
struct Mark {
  int line = 0;
  int column = 0;
};

struct YamlEntry;

struct YamlNode {
  enum class Kind : uint8_t { kNull, kScalar, kSequence, kMap };
  Kind kind = Kind::kNull;
  std::string text;  ///< of a scalar
  Mark mark;
  std::vector<YamlNode> items;     ///< of a sequence
  std::vector<YamlEntry> entries;  ///< of a map, in the order of the file

  bool is_null() const { return kind == Kind::kNull; }
  bool is_scalar() const { return kind == Kind::kScalar; }
  bool is_sequence() const { return kind == Kind::kSequence; }
  bool is_map() const { return kind == Kind::kMap; }
  /// The value of `key` in a map, or null.
  const YamlNode* find(std::string_view key) const;
};

struct YamlEntry {
  std::string key;
  Mark mark;  ///< of the key
  YamlNode value;
};

/// "a map", "a list", "a single value" or "nothing".
std::string_view name_of(YamlNode::Kind kind);

/// "is a list", "is `text`" or "has no value".
std::string is_what(const YamlNode& node);

/// One line of YAML that reads back as the node: `{a: 1, b: [x, y]}`.
std::string to_flow(const YamlNode& node);

/// Whether `text` is a YAML scalar as it stands.
bool is_plain_scalar(std::string_view text);

/// `text` as a YAML scalar, in double quotes where it needs them.
std::string yaml_scalar(std::string_view text);

/// Everything wrong with one file, collected so that all of it is reported at once. Beyond `limits::kProblems` they
/// are only counted.
class Problems {
 public:
  explicit Problems(std::string file) : file_(std::move(file)) {}

  void add(Mark mark, std::string message, std::string hint = {});
  /// A problem that another reader found elsewhere.
  void add(Error error);
  /// Forgets what was said of this place.
  void take_back(Mark mark);
  bool empty() const { return found_.empty(); }
  /// Whether a further problem is only counted.
  bool is_full() const { return found_.size() >= limits::kProblems; }
  /// Errors in the order of the file; errors of other files come last.
  std::vector<Error> errors() const;
  const std::string& file() const { return file_; }
  /// "file:line:column", or the file alone where the mark is nowhere.
  std::string where(Mark mark) const;
  /// The one error, or all of them in one message that ends with their count and "Nothing was run.". Precondition: not empty.
  Error take() const;

 private:
  struct Found {
    Mark mark;
    Error error;
  };
  std::string file_;
  std::vector<Found> found_;
  int64_t untold_ = 0;
};

/// Reads one YAML document. Text that is no YAML, values beyond a bound of plan/base/limits.h, duplicate keys, merge keys and keys
/// that are not scalars become problems. The tree holds the readable rest.
YamlNode parse_yaml(std::string_view text, Problems& problems);

/// The bytes of a file that holds YAML or JSON, or why it cannot be read.
Result<std::string> read_text_file(const std::string& path);

/// The candidate that the table of synonyms gives for `word`; else `nearest` (plan/base/nearest.h).
std::string nearest_word(std::string_view word, const std::vector<std::string>& candidates);

/// ", did you mean `nearest_word`?"; nothing where there is none, or where the word is a number.
std::string did_you_mean(std::string_view word, const std::vector<std::string>& candidates);

/// Says that `key` is not known under `section`: the nearest spelling, among `allowed` and `also`, and the allowed keys.
void add_unknown_key(Problems& problems, Mark mark, std::string_view key, std::string_view section,
                     const std::vector<std::string>& allowed, const std::vector<std::string>& also = {});

}  // namespace shardlab::sweeps
