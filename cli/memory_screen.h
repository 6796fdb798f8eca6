// The screen of `memory --interactive`, without a terminal: fields, a cursor and keys go in, styled lines come out. Each key that
// changes a field asks the calculator again.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "cli/memory_report.h"
#include "cli/namespaces.h"
#include "plan/base/result.h"

namespace shardlab::cli {

/// How a run of characters is shown. Terminals without colour lose nothing that the characters do not say too.
enum class Style : uint8_t { kPlain, kDim, kTitle, kCursor, kChanged, kGood, kBad };

struct StyledText {
  std::string text;
  Style style = Style::kPlain;
};
using ScreenLine = std::vector<StyledText>;

/// A key as a terminal sends it. Characters are kCharacter with `character`.
struct ScreenKey {
  enum class Code : uint8_t { kCharacter, kUp, kDown, kLeft, kRight, kEnter, kEscape, kBackspace } code = Code::kCharacter;
  char character = 0;
};

class MemoryScreen {
 public:
  /// Begins at the layout of `flags`, which must have an answer; the caller reports a refusal at the start.
  static Result<MemoryScreen> create(CaseFlags flags);

  /// Acts on a key; false when the user leaves.
  bool press(ScreenKey key);
  /// At most `height` lines of at most `width` characters.
  std::vector<ScreenLine> draw(int width, int height) const;

  /// The last layout that had an answer.
  const ToldMemory& told() const { return told_; }
  /// "shardlab memory --model gpt2 ...": asks for that layout again.
  std::string command() const;

 private:
  struct Field {
    std::string key;                   ///< of the sweep file, or "devices"
    std::vector<std::string> choices;  ///< empty: powers of two
  };

  MemoryScreen(CaseFlags flags, ToldMemory told);
  std::string value(const Field& field) const;
  static std::string value_of(const ToldMemory& told, const CaseFlags& flags, const Field& field);
  void edit(ScreenKey key);
  void step(int direction);
  void take_change(size_t index);
  void set(const whatif::Words& words);
  void undo();
  ScreenLine field_line(size_t index) const;
  std::vector<ScreenLine> answer_lines(int width) const;
  std::vector<ScreenLine> change_lines(int width) const;

  std::vector<Field> fields_;
  CaseFlags flags_, told_flags_, base_flags_;
  ToldMemory told_, base_;
  std::optional<Error> refusal_;  ///< of `flags_`; `told_` is then of an earlier layout
  std::vector<CaseFlags> history_;
  size_t cursor_ = 0;
  std::optional<std::string> edited_;      ///< the text that is being typed into the field at the cursor
  std::optional<whatif::Advice> changes_;  ///< shown instead of the items
};

}  // namespace shardlab::cli
