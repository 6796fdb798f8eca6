#include "sweeps/yaml.h"

#include <fmt/format.h>
#include <yaml-cpp/yaml.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <numeric>
#include <sstream>

namespace shardlab::sweeps {

namespace {

/// Bounds of what a person or a calibration writes; anchors could otherwise unfold without end.
constexpr int kMaxDepth = 64;
constexpr int64_t kMaxNodes = 4'000'000;

Mark mark_of(const YAML::Mark& m) { return m.is_null() ? Mark{} : Mark{m.line + 1, m.column + 1}; }

/// Turns the library's nodes into ours, unfolding aliases.
class Reader {
 public:
  explicit Reader(Problems& problems) : problems_(problems) {}

  YamlNode read(const YAML::Node& node, int depth) {
    YamlNode out;
    out.mark = mark_of(node.Mark());
    if (depth > kMaxDepth || ++nodes_ > kMaxNodes) {
      if (!overflow_) problems_.add(out.mark, "nested too deeply, or unfolding without end", "write anchors out");
      overflow_ = true;
      return out;
    }
    switch (node.Type()) {
      case YAML::NodeType::Scalar:
        out.kind = YamlNode::Kind::kScalar;
        out.text = node.Scalar();
        break;
      case YAML::NodeType::Sequence:
        out.kind = YamlNode::Kind::kSequence;
        for (const YAML::Node& item : node) {
          if (overflow_) break;
          out.items.push_back(read(item, depth + 1));
        }
        break;
      case YAML::NodeType::Map:
        out.kind = YamlNode::Kind::kMap;
        read_entries(node, depth, out);
        break;
      case YAML::NodeType::Null:
      case YAML::NodeType::Undefined: break;
    }
    return out;
  }

 private:
  void read_entries(const YAML::Node& node, int depth, YamlNode& out) {
    for (const auto& entry : node) {
      if (overflow_) return;
      const Mark mark = mark_of(entry.first.Mark());
      if (!entry.first.IsScalar()) {
        problems_.add(mark, "a key must be a single word");
        continue;
      }
      const std::string key = entry.first.Scalar();
      if (key == "<<") {
        problems_.add(mark, "merge keys (<<) are not supported", "write the keys out");
        continue;
      }
      const auto same = [&](const YamlEntry& e) { return e.key == key; };
      if (const auto first = std::find_if(out.entries.begin(), out.entries.end(), same); first != out.entries.end()) {
        problems_.add(mark, fmt::format("duplicate key `{}`, first given on line {}", key, first->mark.line),
                      "keep one of the two");
        continue;
      }
      out.entries.push_back({key, mark, read(entry.second, depth + 1)});
    }
  }

  Problems& problems_;
  int64_t nodes_ = 0;
  bool overflow_ = false;
};

bool is_plain(char c) {
  return std::isalnum(static_cast<unsigned char>(c)) || c == '_' || c == '.' || c == '/' || c == '+' || c == '-';
}

/// Edits (insert, delete, replace, swap of neighbours) from a to b: the restricted Damerau-Levenshtein distance.
int edits(std::string_view a, std::string_view b) {
  std::vector<int> before(b.size() + 1), previous(b.size() + 1), row(b.size() + 1);
  std::iota(previous.begin(), previous.end(), 0);
  for (size_t i = 1; i <= a.size(); ++i) {
    row[0] = static_cast<int>(i);
    for (size_t j = 1; j <= b.size(); ++j) {
      row[j] = std::min({previous[j] + 1, row[j - 1] + 1, previous[j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1)});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) row[j] = std::min(row[j], before[j - 2] + 1);
    }
    std::swap(before, previous);
    std::swap(previous, row);
  }
  return previous[b.size()];
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

std::string yaml_scalar(std::string_view text) {
  const bool plain = !text.empty() && std::all_of(text.begin(), text.end(), is_plain) && text != "null" && text != "Null" &&
                     text != "NULL" && text != "-" && text != "---" && text != "...";
  if (plain) return std::string(text);
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
  found_.push_back({mark, {ExitCode::kUsage, std::move(message), std::move(hint), where(mark)}});
}

void Problems::add(Error error) { found_.push_back({Mark{std::numeric_limits<int>::max(), 0}, std::move(error)}); }

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
  text += fmt::format("{} errors. Nothing was run.", found_.size());
  return {found_.front().error.code, std::move(text), {}, {}};
}

YamlNode parse_yaml(std::string_view text, Problems& problems) {
  // The library reports with exceptions: they end here.
  try {
    const std::vector<YAML::Node> documents = YAML::LoadAll(std::string(text));
    if (documents.empty()) return {};
    if (documents.size() > 1)
      problems.add(mark_of(documents[1].Mark()), "a second YAML document in one file",
                   "one file holds one document: remove the `---`");
    return Reader(problems).read(documents.front(), 0);
  } catch (const YAML::Exception& e) {
    problems.add(mark_of(e.mark), fmt::format("not YAML: {}", e.msg),
                 "look at the brackets, quotes and indentation just before this place");
  }
  return {};
}

Result<std::string> read_text_file(const std::string& path) {
  std::error_code ignored;
  if (std::filesystem::is_directory(path, ignored))
    return Error{ExitCode::kUsage, "is a folder, not a file", "name a file in it", path};
  errno = 0;
  std::ifstream file(path, std::ios::binary);
  if (!file)
    return Error{ExitCode::kUsage, fmt::format("cannot be opened: {}", std::strerror(errno ? errno : ENOENT)), "check the path",
                 path};
  std::ostringstream text;
  text << file.rdbuf();
  if (file.bad()) return Error{ExitCode::kUsage, "cannot be read", "check the file", path};
  return text.str();
}

std::string nearest(std::string_view word, const std::vector<std::string>& candidates) {
  std::string best;
  int fewest = std::max<int>(1, static_cast<int>(word.size()) / 3) + 1;
  for (const std::string& candidate : candidates) {
    const int distance = edits(word, candidate);
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
  std::vector<std::string> candidates = allowed;
  candidates.insert(candidates.end(), also.begin(), also.end());
  const std::string close = nearest(key, candidates);
  const std::string place = section.empty() ? "here" : fmt::format("under `{}`", section);
  problems.add(mark, fmt::format("unknown key `{}`{}", key, close.empty() ? "" : fmt::format(", did you mean `{}`?", close)),
               fmt::format("allowed {}: {}", place, fmt::join(allowed, " ")));
}

}  // namespace shardlab::sweeps
