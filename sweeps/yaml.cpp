#include "sweeps/yaml.h"

#include <fmt/format.h>
#include <yaml-cpp/eventhandler.h>
#include <yaml-cpp/yaml.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <sstream>
#include <unordered_map>

#include "plan/base/files.h"
#include "plan/base/limits.h"
#include "plan/base/nearest.h"
#include "plan/base/utf8.h"
#include "plan/keys.h"
#include "sweeps/synonyms.h"
#include "sweeps/yaml_faults.h"

namespace shardlab::sweeps {

namespace {

constexpr size_t kMessage = 2000;  ///< bytes of a message about one place
constexpr const char* kNul = "a NUL character (byte 0) stands here, and no text may contain one";
constexpr const char* kRemove = "remove it";
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
    if (text.find('\0') != std::string::npos) problems_.add(node.mark, kNul, kRemove);
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
      problems_.add(key.mark, fmt::format("this key {}, but a key is a single word", is_what(key)), "write `key: value`");
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

/// A message or hint without most of a value that is longer than anybody reads.
std::string shown(std::string message) {
  if (message.size() <= kMessage) return message;
  const std::string rest = fmt::format(" ... ({} bytes more) ... ", message.size() - kMessage);
  return message.substr(0, kMessage / 2) + rest + message.substr(message.size() - kMessage / 2);
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

std::string is_what(const YamlNode& node) {
  if (node.is_null()) return "has no value";
  return node.is_scalar() ? fmt::format("is `{}`", node.text) : fmt::format("is {}", name_of(node.kind));
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

void Problems::take_back(Mark mark) {
  std::erase_if(found_, [&](const Found& f) { return f.mark.line == mark.line && f.mark.column == mark.column; });
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
    problems.add(*mark, kNul, kRemove);
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
      problems.add(place, "the file contains a second YAML document", "one file holds one document: remove the `---`");
    return first.take();
  } catch (const YAML::Exception& e) {
    const Mark mark = mark_of(e.mark);
    YamlFault fault = yaml_fault(wide ? std::string_view() : text, e.msg, mark);
    problems.take_back(mark);  // what was read there is part of the fault
    problems.add(fault.mark, std::move(fault.message), std::move(fault.hint));
  } catch (const Unreadable& e) { problems.add(e.mark, e.message, e.hint); }
  return {};
}

Result<std::string> read_text_file(const std::string& path) { return read_file_within(path, limits::kYamlBytes); }

std::string nearest_word(std::string_view word, const std::vector<std::string>& candidates) {
  if (const std::string_view meant = meant_by(word); !meant.empty()) {
    const CaseKey* const key = find_key(meant);
    const auto is_meant = [&](const std::string& candidate) {
      return candidate == meant || (key != nullptr && (find_key(candidate) == key || key->path.ends_with("." + candidate)));
    };
    if (const auto found = std::ranges::find_if(candidates, is_meant); found != candidates.end()) return *found;
  }
  return nearest(word, candidates);
}

std::string did_you_mean(std::string_view word, const std::vector<std::string>& candidates) {
  if (word.find_first_not_of("0123456789.-") == std::string::npos) return "";  // a number has no near spelling
  const std::string close = nearest_word(word, candidates);
  return close.empty() ? "" : fmt::format(", did you mean `{}`?", close);
}

void add_unknown_key(Problems& problems, Mark mark, std::string_view key, std::string_view section,
                     const std::vector<std::string>& allowed, const std::vector<std::string>& also) {
  if (problems.is_full()) return problems.add(mark, {});  // only counted: spellings take time
  std::vector<std::string> candidates = allowed;
  candidates.insert(candidates.end(), also.begin(), also.end());
  const std::string close = nearest_word(key, candidates);
  const std::string place = section.empty() ? "here" : fmt::format("under `{}`", section);
  constexpr size_t kShort = 16;  // a longer list is no help where a spelling is near
  problems.add(mark, fmt::format("unknown key `{}`{}", key, close.empty() ? "" : fmt::format(", did you mean `{}`?", close)),
               close.empty() || allowed.size() <= kShort
                   ? fmt::format("allowed {}: {}", place, fmt::join(allowed, " "))
                   : std::string("`shardlab keys` and `shardlab schema sweep` list what is allowed"));
}

}  // namespace shardlab::sweeps
