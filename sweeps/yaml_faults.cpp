#include "sweeps/yaml_faults.h"

#include <fmt/format.h>
#include <yaml-cpp/exceptions.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <tuple>
#include <utility>

namespace shardlab::sweeps {
namespace {

namespace Term = YAML::ErrorMsg;

constexpr Mark kEnd{std::numeric_limits<int>::max(), 1};

/// A bracket or a quote that is not closed.
struct Opened {
  Mark mark;
  char sign;
};

/// A line, counted from 1, without its end.
std::string_view line_of(std::string_view text, int line) {
  for (; line > 1; --line) {
    const size_t end = text.find('\n');
    if (end == std::string_view::npos) return {};
    text.remove_prefix(end + 1);
  }
  return text.substr(0, std::min(text.find_first_of("\r\n"), text.size()));
}

std::string_view rest_of_line(std::string_view text, Mark mark) {
  const std::string_view line = line_of(text, mark.line);
  return line.substr(std::min(static_cast<size_t>(std::max(mark.column - 1, 0)), line.size()));
}

size_t indentation(std::string_view line) { return std::min(line.find_first_not_of(' '), line.size()); }

/// Follows brackets and quotes from the beginning of a text. Outside brackets one counts only where a value begins.
class Scanner {
 public:
  /// What is open before `end`, the innermost last.
  static std::vector<Opened> open_before(std::string_view text, Mark end) {
    Scanner scanner(text);
    while (scanner.at_ < text.size() && std::tie(scanner.mark_.line, scanner.mark_.column) < std::tie(end.line, end.column))
      scanner.step();
    return scanner.open_;
  }

 private:
  explicit Scanner(std::string_view text) : text_(text) {}

  char peek(size_t ahead) const { return at_ + ahead < text_.size() ? text_[at_ + ahead] : '\n'; }
  bool is_blank(size_t ahead) const { return std::string_view(" \t\r\n").find(peek(ahead)) != std::string_view::npos; }
  bool in_quotes() const { return !open_.empty() && (open_.back().sign == '"' || open_.back().sign == '\''); }

  void advance() {
    ++mark_.column;
    if (text_[at_++] == '\n') mark_ = {mark_.line + 1, 1};
  }

  void step() {
    const char c = peek(0);
    if (in_quotes())
      quoted(c);
    else if (c == '#' && (at_ == 0 || std::string_view(" \t\n").find(text_[at_ - 1]) != std::string_view::npos))
      while (at_ + 1 < text_.size() && peek(1) != '\n') advance();
    else
      plain(c);
    if (at_ < text_.size()) advance();
  }

  void quoted(char c) {
    const char quote = open_.back().sign;
    const bool escape = (quote == '"' && c == '\\') || (quote == '\'' && c == '\'' && peek(1) == '\'');
    if (escape && at_ + 1 < text_.size())
      advance();
    else if (c == quote)
      open_.pop_back();
  }

  void plain(char c) {
    const bool flow = !open_.empty();
    if ((c == '[' || c == '{') && (flow || begins_)) {
      open_.push_back({mark_, c});
      begins_ = true;
    } else if ((c == '"' || c == '\'') && begins_) {
      open_.push_back({mark_, c});
      begins_ = false;
    } else if (flow && open_.back().sign == (c == ']' ? '[' : c == '}' ? '{' : '\0')) {
      open_.pop_back();
      begins_ = false;
    } else if (c == '\n' || (c == ',' && flow) || (c == ':' && (is_blank(1) || flow))) {
      begins_ = true;
    } else if (begins_ && (c == '&' || c == '!')) {  // an anchor or a tag stands before its value
      while (!is_blank(1)) advance();
    } else if (!is_blank(0) && !(begins_ && c == '-' && is_blank(1))) {
      begins_ = false;
    }
  }

  std::string_view text_;
  size_t at_ = 0;
  Mark mark_{1, 1};
  bool begins_ = true;  ///< a value may begin here
  std::vector<Opened> open_;
};

std::optional<Opened> innermost(const std::vector<Opened>& open) {
  return open.empty() ? std::nullopt : std::optional<Opened>(open.back());
}

char closing(char opening) { return opening == '{' ? '}' : opening == '[' ? ']' : opening; }

/// A tab stands before the first sign of the line.
bool indented_by_tab(std::string_view line) {
  return line.substr(0, std::min(line.find_first_not_of(" \t"), line.size())).find('\t') != std::string_view::npos;
}

/// The last line above `line` that is not blank, and its indentation; 0 where there is none.
std::pair<int, size_t> line_above(std::string_view text, int line) {
  std::pair<int, size_t> above{0, 0};
  for (int at = 1; at < line; ++at) {
    const std::string_view words = line_of(text, 1);
    if (indentation(words) < words.size()) above = {at, indentation(words)};
    text.remove_prefix(std::min(text.find('\n'), text.size() - 1) + 1);
  }
  return above;
}

/// Of a line that is indented otherwise than the line above it.
YamlFault wrong_indentation(int line, size_t spaces, int above, size_t before) {
  const auto count = [](size_t n) { return n == 0 ? std::string("no space") : fmt::format("{} space{}", n, n == 1 ? "" : "s"); };
  return {{line, static_cast<int>(spaces) + 1},
          fmt::format("not YAML: this line is indented by {}, which fits no key above it", count(spaces)),
          fmt::format("indent it like the keys that it belongs to; line {} is indented by {}", above, count(before))};
}

/// Of an entry that the block around it cannot have: its indentation or the line above it may be to blame.
std::optional<YamlFault> misplaced(std::string_view text, std::string_view said, Mark mark) {
  const std::string_view line = line_of(text, mark.line);
  const size_t spaces = indentation(line);
  const auto [above, before] = line_above(text, mark.line);
  if (said != Term::MAP_VALUE)
    return above != 0 && before != spaces && spaces == static_cast<size_t>(mark.column - 1)
               ? std::optional(wrong_indentation(mark.line, spaces, above, before))
               : std::nullopt;
  if (line.substr(0, static_cast<size_t>(mark.column - 1)).find(": ") != std::string_view::npos)
    return YamlFault{mark, "not YAML: a second `:` stands where the value is", "put a text that contains `: ` in quotes"};
  if (above == 0) return std::nullopt;
  if (spaces > before) return wrong_indentation(mark.line, spaces, above, before);
  const std::string_view words = line_of(text, above);
  if (words.find(": ") != std::string_view::npos || words.ends_with(':')) return std::nullopt;
  return YamlFault{{above, static_cast<int>(before) + 1},
                   "not YAML: this line is not an entry `key: value`",
                   "write a colon and a space between its key and its value"};
}

/// A term of the library's, in our words.
struct Translation {
  std::string_view said;
  const char *message, *hint;
};
constexpr const char* kLook = "look at the brackets, quotes and indentation just before this place";
YamlFault translated(std::string_view said, Mark mark) {
  static const Translation kTranslations[] = {
      {Term::END_OF_MAP, "an entry `key: value` is expected here", kLook},
      {Term::END_OF_SEQ, "an entry `- value` of the list is expected here", kLook},
      {Term::END_OF_MAP_FLOW, "a `{` before this place is not closed", "add `}`"},
      {Term::END_OF_SEQ_FLOW, "a `[` before this place is not closed", "add `]`"},
      {Term::FLOW_END, "a bracket is closed that was not opened", "remove it, or open it before"},
      {Term::BLOCK_ENTRY, "an entry `- value` cannot stand here",
       "write the list as [a, b], or begin each entry on a line of its own"},
      {Term::MAP_KEY, "a key cannot stand here", kLook},
      {Term::MAP_VALUE, "a `:` cannot stand here", "put a text that contains `: ` in quotes"},
      {Term::UNKNOWN_TOKEN, "no value begins with this sign", "put a text that begins with it in quotes"},
      {Term::DOC_IN_SCALAR, "`---` or `...` begins a line within quotes", "close the quote before it"},
      {Term::ALIAS_NOT_FOUND, "`*` without the name of an anchor", "put a text that begins with `*` in quotes"},
      {Term::ANCHOR_NOT_FOUND, "`&` without a name", "put a text that begins with `&` in quotes"},
      {Term::CHAR_IN_ALIAS, "a sign that the name of an anchor cannot contain", "use letters, digits, - and _"},
      {Term::CHAR_IN_ANCHOR, "a sign that the name of an anchor cannot contain", "use letters, digits, - and _"},
      {Term::CHAR_IN_BLOCK, "text follows `|` or `>` on its line", "begin the text on the next line"},
      {Term::INVALID_HEX, "an escape in double quotes has a sign that is no hexadecimal digit",
       "use single quotes for text without escapes"},
      {Term::EOF_IN_SCALAR, "the file ends within quotes", "add the closing quote"},
  };
  for (const Translation& t : kTranslations)
    if (t.said == said) return {mark, fmt::format("not YAML: {}", t.message), t.hint};
  return {mark, fmt::format("not YAML: {}", said), kLook};
}

}  // namespace

YamlFault yaml_fault(std::string_view text, std::string_view said, Mark mark) {
  const std::string_view rest = rest_of_line(text, mark);
  const char sign = rest.empty() ? '\0' : rest.front();
  if (indented_by_tab(line_of(text, mark.line)))
    return {mark, "not YAML: this line is indented with a tab", "indent with spaces: replace each tab by two"};
  if (rest.starts_with("//") || rest.starts_with("/*"))
    return {mark, fmt::format("not YAML: a comment begins with `#`, not with `{}`", rest.substr(0, 2)),
            "write `# ...` to the end of the line, or remove the comment"};
  if (said == Term::UNKNOWN_ANCHOR && sign == '*') {
    const std::string_view name = rest.substr(1, rest.find_first_of(" \t,]}", 1) - 1);
    return {mark, fmt::format("not YAML: `*{}` refers to an anchor that is not defined above", name),
            fmt::format("mark a value above this place with &{}, or write the value here", name)};
  }
  if (said == Term::EOF_IN_SCALAR) {
    const auto open = innermost(Scanner::open_before(text, kEnd));
    if (open && closing(open->sign) == open->sign)
      return {open->mark, "not YAML: the quote that begins here is never closed",
              fmt::format("add the closing {}", open->sign == '"' ? "`\"`" : "`'`")};
  }
  if (said == Term::FLOW_END || said == Term::END_OF_MAP_FLOW || said == Term::END_OF_SEQ_FLOW) {
    const auto open = innermost(Scanner::open_before(text, mark));
    const bool bracket = open && closing(open->sign) != open->sign;
    if (bracket && (sign == ']' || sign == '}'))
      return {mark,
              fmt::format("not YAML: `{}` stands here, but the `{}` of {}:{} is still open", sign, open->sign, open->mark.line,
                          open->mark.column),
              fmt::format("add `{}` before it", closing(open->sign))};
    if (bracket)
      return {mark,
              fmt::format("not YAML: the `{}` of {}:{} is not closed before this place", open->sign, open->mark.line,
                          open->mark.column),
              fmt::format("add `{}`, or a comma between two entries", closing(open->sign))};
    const auto last = innermost(Scanner::open_before(text, kEnd));  // the library may name a place before the bracket
    if (last && said != Term::FLOW_END && closing(last->sign) != last->sign)
      return {last->mark, fmt::format("not YAML: the `{}` that opens here is never closed", last->sign),
              fmt::format("add `{}`", closing(last->sign))};
  }
  if (said == Term::END_OF_MAP || said == Term::END_OF_SEQ || said == Term::MAP_VALUE)
    if (auto fault = misplaced(text, said, mark)) return *std::move(fault);
  if (said.starts_with(Term::INVALID_ESCAPE))
    return {
        mark,
        fmt::format("not YAML: `\\{}` is no escape in double quotes", said.substr(std::string_view(Term::INVALID_ESCAPE).size())),
        "write `\\\\` for a backslash, or use single quotes"};
  return translated(said, mark);
}

}  // namespace shardlab::sweeps
