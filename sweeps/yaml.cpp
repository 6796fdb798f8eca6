#include "sweeps/yaml.h"

#include <fmt/format.h>
#include <yaml-cpp/eventhandler.h>
#include <yaml-cpp/yaml.h>

#include <algorithm>
#include <array>
#include <limits>
#include <numeric>
#include <optional>
#include <sstream>
#include <unordered_map>

#include "plan/base/files.h"
#include "plan/base/limits.h"
#include "plan/base/utf8.h"

namespace shardlab::sweeps {

namespace {

constexpr size_t kSpelled = 64;    ///< a longer word is nobody's slip of the finger
constexpr size_t kMessage = 2000;  ///< bytes of a message about one place
constexpr const char* kNul = "a NUL character, where the name of a file or folder would end";
constexpr const char* kTakeOut = "take it out";
constexpr int64_t kOpenBrackets = 10'000;  ///< beyond any text that means something, and before the library's tokens fill memory

Mark mark_of(const YAML::Mark& m) { return m.is_null() ? Mark{} : Mark{m.line + 1, m.column + 1}; }

/// Ends the reading of a document: what is wrong is beyond the library's own errors.
struct Unreadable {
  Mark mark;
  std::string message, hint;
};

/// Builds our tree from the library's events, so that depth and nodes are bounded as they come and nothing is held twice.
class Builder : public YAML::EventHandler {
 public:
  explicit Builder(Problems& problems) : problems_(problems) {}

  /// Where the document began; set by its first event.
  const std::optional<YAML::Mark>& start() const { return start_; }
  YamlNode take() { return std::move(root_); }

  void OnDocumentStart(const YAML::Mark& mark) override { start_ = mark; }
  void OnDocumentEnd() override {}
  void OnNull(const YAML::Mark& mark, YAML::anchor_t anchor) override { leaf(YamlNode::Kind::kNull, mark, anchor, ""); }
  void OnScalar(const YAML::Mark& mark, const std::string&, YAML::anchor_t anchor, const std::string& value) override {
    leaf(YamlNode::Kind::kScalar, mark, anchor, value);
  }
  void OnSequenceStart(const YAML::Mark& mark, const std::string&, YAML::anchor_t anchor, YAML::EmitterStyle::value) override {
    open(YamlNode::Kind::kSequence, mark, anchor);
  }
  void OnMapStart(const YAML::Mark& mark, const std::string&, YAML::anchor_t anchor, YAML::EmitterStyle::value) override {
    open(YamlNode::Kind::kMap, mark, anchor);
  }
  void OnSequenceEnd() override { close(); }
  void OnMapEnd() override { close(); }

  void OnAlias(const YAML::Mark& mark, YAML::anchor_t anchor) override {
    const auto known = anchored_.find(anchor);
    if (known == anchored_.end())
      throw Unreadable{mark_of(mark), "an anchor that stands for what it is part of", "write anchors out"};
    count(known->second.nodes, mark_of(mark));
    place(YamlNode(known->second.node), known->second.nodes);
  }

 private:
  struct Frame {
    YamlNode node;
    YAML::anchor_t anchor = 0;
    int64_t nodes = 1;  ///< in the tree below, with the node itself
    // Of a map: the key whose value comes next; skipped where the key is a problem.
    bool has_key = false, skipped = false;
    std::string key;
    Mark key_mark;
    std::unordered_map<std::string, int> lines;  ///< of the keys so far
  };
  struct Anchored {
    YamlNode node;
    int64_t nodes = 0;
  };

  void count(int64_t nodes, Mark mark) {
    nodes_ += nodes;
    if (nodes_ > limits::kYamlNodes)
      throw Unreadable{mark, fmt::format("more than {} values, with what anchors unfold to", limits::kYamlNodes),
                       "write anchors out, or split the file"};
  }

  void leaf(YamlNode::Kind kind, const YAML::Mark& mark, YAML::anchor_t anchor, const std::string& text) {
    YamlNode node{kind, to_utf8(text), mark_of(mark), {}, {}};  // the library writes "\_" and "\N" as bytes of Latin-1
    if (text.find('\0') != std::string::npos) problems_.add(node.mark, kNul, kTakeOut);
    count(1, node.mark);
    remember(anchor, node, 1);
    place(std::move(node), 1);
  }

  void open(YamlNode::Kind kind, const YAML::Mark& mark, YAML::anchor_t anchor) {
    count(1, mark_of(mark));
    if (stack_.size() > limits::kYamlDepth)
      throw Unreadable{mark_of(mark), fmt::format("nested more than {} levels deep", limits::kYamlDepth), "a sweep needs five"};
    stack_.emplace_back();
    stack_.back().node = {kind, "", mark_of(mark), {}, {}};
    stack_.back().anchor = anchor;
  }

  void close() {
    Frame done = std::move(stack_.back());
    stack_.pop_back();
    remember(done.anchor, done.node, done.nodes);
    place(std::move(done.node), done.nodes);
  }

  void remember(YAML::anchor_t anchor, const YamlNode& node, int64_t nodes) {
    if (anchor == 0) return;
    count(nodes, node.mark);
    anchored_[anchor] = {node, nodes};
  }

  void place(YamlNode node, int64_t nodes) {
    if (stack_.empty()) {
      root_ = std::move(node);
      return;
    }
    Frame& top = stack_.back();
    top.nodes += nodes;
    if (top.node.is_sequence()) {
      top.node.items.push_back(std::move(node));
    } else if (!top.has_key) {
      top.has_key = true;
      top.skipped = !begin_entry(top, node);
    } else {
      top.has_key = false;
      if (!top.skipped) top.node.entries.push_back({std::move(top.key), top.key_mark, std::move(node)});
    }
  }

  /// Whether the node is a key that the map can have.
  bool begin_entry(Frame& map, YamlNode& key) {
    if (!key.is_scalar()) {
      problems_.add(key.mark, "a key must be a single word");
      return false;
    }
    if (key.text == "<<") {
      problems_.add(key.mark, "merge keys (<<) are not supported", "write the keys out");
      return false;
    }
    if (const auto [first, fresh] = map.lines.emplace(key.text, key.mark.line); !fresh) {
      problems_.add(key.mark, fmt::format("duplicate key `{}`, first given on line {}", key.text, first->second),
                    "keep one of the two");
      return false;
    }
    map.key = std::move(key.text);
    map.key_mark = key.mark;
    return true;
  }

  Problems& problems_;
  std::optional<YAML::Mark> start_;
  YamlNode root_;
  std::vector<Frame> stack_;
  std::unordered_map<YAML::anchor_t, Anchored> anchored_;
  int64_t nodes_ = 0;
};

/// The library holds every token since a bracket was opened until it is closed or its line ends, whatever we bound in the tree.
std::optional<Mark> opened_too_deeply(std::string_view text) {
  int64_t depth = 0;
  Mark mark{1, 1};
  for (const char c : text) {
    if (c == '[' || c == '{') ++depth;
    if ((c == ']' || c == '}') && depth > 0) --depth;
    if (depth > kOpenBrackets) return mark;
    ++mark.column;
    if (c == '\n') mark = {mark.line + 1, 1};
  }
  return std::nullopt;
}

/// The first NUL of the text: the library takes one in a plain value for its sign of an escape. In UTF-16 every ASCII
/// character has a byte that is zero, and a NUL two.
std::optional<Mark> first_nul(std::string_view text, bool wide) {
  Mark mark{1, 1};
  const size_t unit = wide ? 2 : 1;
  for (size_t i = 0; i + unit <= text.size(); i += unit) {
    if (text[i] == '\0' && text[i + unit - 1] == '\0') return mark;
    ++mark.column;
    if (text[i] == '\n' || (wide && text[i + 1] == '\n')) mark = {mark.line + 1, 1};
  }
  return std::nullopt;
}

bool is_plain(char c) {
  return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_' || c == '.' || c == '/' ||
         c == '+' || c == '-';
}

/// Whether a tab stands before the first sign of a line, counted from 0.
bool indented_by_tab(std::string_view text, int line) {
  for (; line > 0; --line) {
    const size_t end = text.find('\n');
    if (end == std::string_view::npos) return false;
    text.remove_prefix(end + 1);
  }
  const std::string_view indent = text.substr(0, std::min(text.find_first_not_of(" \t"), text.size()));
  return indent.find('\t') != std::string_view::npos;
}

/// A message or hint without most of a value that is longer than anybody reads.
std::string shown(std::string message) {
  if (message.size() <= kMessage) return message;
  const std::string rest = fmt::format(" ... ({} bytes more) ... ", message.size() - kMessage);
  return message.substr(0, kMessage / 2) + rest + message.substr(message.size() - kMessage / 2);
}

/// Edits (insert, delete, replace, swap of neighbours) from a to b: the restricted Damerau-Levenshtein distance, or `most` where it
/// is no less. `a` has at most kSpelled characters.
int edits(std::string_view a, std::string_view b, int most) {
  const size_t longer = std::max(a.size(), b.size()), shorter = std::min(a.size(), b.size());
  if (longer - shorter >= static_cast<size_t>(most)) return most;
  std::array<std::array<int, kSpelled + 1>, 3>
      rows{};  // of a prefix of `b` and the two shorter ones, with a column for each prefix of `a`
  std::iota(rows[0].begin(), rows[0].end(), 0);
  for (size_t j = 1; j <= b.size(); ++j) {
    auto &row = rows[j % 3], &previous = rows[(j + 2) % 3], &before = rows[(j + 1) % 3];
    int least = row[0] = static_cast<int>(j);
    for (size_t i = 1; i <= a.size(); ++i) {
      row[i] = std::min({previous[i] + 1, row[i - 1] + 1, previous[i - 1] + (a[i - 1] == b[j - 1] ? 0 : 1)});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) row[i] = std::min(row[i], before[i - 2] + 1);
      least = std::min(least, row[i]);
    }
    if (least >= most) return most;  // the least of a row never falls
  }
  return std::min(rows[b.size() % 3][a.size()], most);
}

}  // namespace

const YamlNode* YamlNode::find(std::string_view key) const {
  for (const YamlEntry& e : entries)
    if (e.key == key) return &e.value;
  return nullptr;
}

std::string_view name_of(YamlNode::Kind kind) {
  switch (kind) {
    case YamlNode::Kind::kNull: return "nothing";
    case YamlNode::Kind::kScalar: return "a single value";
    case YamlNode::Kind::kSequence: return "a list";
    case YamlNode::Kind::kMap: return "a map";
  }
  return "?";
}

bool is_plain_scalar(std::string_view text) {
  return !text.empty() && std::all_of(text.begin(), text.end(), is_plain) && text != "null" && text != "Null" && text != "NULL" &&
         text != "-" && text != "---" && text != "...";
}

std::string yaml_scalar(std::string_view text) {
  if (is_plain_scalar(text)) return std::string(text);
  std::string out = "\"";
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (byte < 0x20 || byte == 0x7f) {
      out += fmt::format("\\x{:02x}", byte);
    } else {
      out += c;
    }
  }
  return out + '"';
}

std::string to_flow(const YamlNode& node) {
  std::string out;
  switch (node.kind) {
    case YamlNode::Kind::kNull: return "null";
    case YamlNode::Kind::kScalar: return yaml_scalar(node.text);
    case YamlNode::Kind::kSequence:
      for (const YamlNode& item : node.items) out += (out.empty() ? "" : ", ") + to_flow(item);
      return "[" + out + "]";
    case YamlNode::Kind::kMap:
      for (const YamlEntry& e : node.entries) out += (out.empty() ? "" : ", ") + yaml_scalar(e.key) + ": " + to_flow(e.value);
      return "{" + out + "}";
  }
  return out;
}

void Problems::add(Mark mark, std::string message, std::string hint) {
  if (is_full()) {
    ++untold_;
    return;
  }
  found_.push_back({mark, {ExitCode::kUsage, shown(std::move(message)), shown(std::move(hint)), where(mark)}});
}

void Problems::add(Error error) {
  if (is_full())
    ++untold_;
  else
    found_.push_back({Mark{std::numeric_limits<int>::max(), 0}, std::move(error)});
}

std::string Problems::where(Mark mark) const {
  return mark.line > 0 ? fmt::format("{}:{}:{}", file_, mark.line, mark.column) : file_;
}

std::vector<Error> Problems::errors() const {
  std::vector<Found> sorted = found_;
  const auto before = [](const Found& a, const Found& b) {
    return std::pair(a.mark.line, a.mark.column) < std::pair(b.mark.line, b.mark.column);
  };
  std::stable_sort(sorted.begin(), sorted.end(), before);
  std::vector<Error> errors;
  for (Found& f : sorted) errors.push_back(std::move(f.error));
  return errors;
}

Error Problems::take() const {
  SHARDLAB_CHECK(!found_.empty(), "no problem to report in {}", file_);
  if (found_.size() == 1) return found_.front().error;
  std::string text;
  for (const Error& e : errors()) text += to_string(e) + "\n";
  if (untold_ > 0) text += fmt::format("... and {} more\n", untold_);
  text += fmt::format("{} errors. Nothing was run.", static_cast<int64_t>(found_.size()) + untold_);
  return {found_.front().error.code, std::move(text), {}, {}};
}

namespace {

/// Reads to the end, for what is wrong on the way.
class EventSink final : public YAML::EventHandler {
 public:
  void OnDocumentStart(const YAML::Mark&) override {}
  void OnDocumentEnd() override {}
  void OnNull(const YAML::Mark&, YAML::anchor_t) override {}
  void OnAlias(const YAML::Mark&, YAML::anchor_t) override {}
  void OnScalar(const YAML::Mark&, const std::string&, YAML::anchor_t, const std::string&) override {}
  void OnSequenceStart(const YAML::Mark&, const std::string&, YAML::anchor_t, YAML::EmitterStyle::value) override {}
  void OnSequenceEnd() override {}
  void OnMapStart(const YAML::Mark&, const std::string&, YAML::anchor_t, YAML::EmitterStyle::value) override {}
  void OnMapEnd() override {}
};

/// Throws where a quote is never closed. The library takes the line end at the end of a file for its end, and refuses it without one.
void check_last_quote(const std::string& text) {
  const size_t last = text.find_last_not_of("\r\n");
  if (last == std::string::npos || last + 1 == text.size() || text.find_first_of("\"'") == std::string::npos) return;
  std::istringstream stream{text.substr(0, last + 1)};
  YAML::Parser parser(stream);
  EventSink sink;
  try {
    parser.HandleNextDocument(sink);
  } catch (const YAML::Exception& e) {  // whatever else is wrong is told with what comes before it
    if (e.msg == YAML::ErrorMsg::EOF_IN_SCALAR) throw;
  }
}

}  // namespace

YamlNode parse_yaml(std::string_view text, Problems& problems) {
  if (static_cast<int64_t>(text.size()) > limits::kYamlBytes) {
    problems.add({}, fmt::format("has {} bytes, more than the {} that are read", text.size(), limits::kYamlBytes),
                 "split the file");
    return {};
  }
  if (const auto mark = opened_too_deeply(text)) {
    problems.add(*mark, fmt::format("more than {} brackets are open", kOpenBrackets), "close them");
    return {};
  }
  const bool wide = text.starts_with("\xff\xfe") || text.starts_with("\xfe\xff");
  if (const auto mark = first_nul(text, wide)) {
    problems.add(*mark, kNul, kTakeOut);
    return {};
  }
  // The library reports with exceptions: they end here.
  try {
    // Names go into files, databases and JSON, which hold UTF-8.
    const std::string utf8 = wide ? std::string(text) : to_utf8(text);
    check_last_quote(utf8);
    std::istringstream stream{utf8};
    YAML::Parser parser(stream);
    Builder first(problems), second(problems), third(problems);
    if (!parser.HandleNextDocument(first)) return {};
    if (!parser.HandleNextDocument(second)) return first.take();
    // What nothing can begin with (a lone comma) is left unread, and would begin one document after another.
    const Mark place = mark_of(*second.start());
    if (parser.HandleNextDocument(third) && third.start()->pos == second.start()->pos)
      problems.add(place, "not YAML: nothing can begin with this sign",
                   "look at the brackets, quotes and commas just before this place");
    else
      problems.add(place, "a second YAML document in one file", "one file holds one document: remove the `---`");
    return first.take();
  } catch (const YAML::Exception& e) {
    if (indented_by_tab(text, e.mark.line))
      problems.add(mark_of(e.mark), "not YAML: a tab in the indentation of this line",
                   "indent with blanks: write two in place of each tab");
    else if (e.msg == YAML::ErrorMsg::EOF_IN_SCALAR)
      problems.add(mark_of(e.mark), "not YAML: the file ends within quotes",
                   "close the quote: from its sign on, every line was taken for its text");
    else if (e.msg == YAML::ErrorMsg::UNKNOWN_ANCHOR)
      problems.add(mark_of(e.mark), fmt::format("not YAML: {}", e.msg),
                   "mark a value above this place with &NAME, or write the value here");
    else
      problems.add(mark_of(e.mark), fmt::format("not YAML: {}", e.msg),
                   "look at the brackets, quotes and indentation just before this place");
  } catch (const Unreadable& e) { problems.add(e.mark, e.message, e.hint); }
  return {};
}

Result<std::string> read_text_file(const std::string& path) { return read_file_within(path, limits::kYamlBytes); }

std::string nearest(std::string_view word, const std::vector<std::string>& candidates) {
  if (word.size() > kSpelled) return {};
  std::string best;
  int fewest = std::max<int>(1, static_cast<int>(word.size()) / 3) + 1;
  for (const std::string& candidate : candidates) {
    const int distance = edits(word, candidate, fewest);
    if (distance < fewest) {
      fewest = distance;
      best = candidate;
    }
  }
  if (!best.empty() || word.size() < 3) return best;
  // No slip, but perhaps only the beginning of a name: the shortest that goes on from it.
  for (const std::string& candidate : candidates)
    if (candidate.starts_with(word) && (best.empty() || candidate.size() < best.size())) best = candidate;
  return best;
}

void add_unknown_key(Problems& problems, Mark mark, std::string_view key, std::string_view section,
                     const std::vector<std::string>& allowed, const std::vector<std::string>& also) {
  if (problems.is_full()) return problems.add(mark, {});  // only counted: spellings take time
  std::vector<std::string> candidates = allowed;
  candidates.insert(candidates.end(), also.begin(), also.end());
  const std::string close = nearest(key, candidates);
  const std::string place = section.empty() ? "here" : fmt::format("under `{}`", section);
  constexpr size_t kShort = 16;  // a longer list is no help where a spelling is near
  problems.add(mark, fmt::format("unknown key `{}`{}", key, close.empty() ? "" : fmt::format(", did you mean `{}`?", close)),
               close.empty() || allowed.size() <= kShort
                   ? fmt::format("allowed {}: {}", place, fmt::join(allowed, " "))
                   : std::string("`shardlab keys` and `shardlab schema sweep` list what is allowed"));
}

}  // namespace shardlab::sweeps
