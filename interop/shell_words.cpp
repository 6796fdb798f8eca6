#include "interop/shell_words.h"

#include <algorithm>
#include <cctype>
#include <cstdint>

namespace shardlab::interop {

namespace {

/// A word of a script with its variables filled in: longer ones are left as they are.
constexpr size_t kWordBytes = 4096;

/// Parentheses of the word that are not closed yet.
int64_t open_parentheses(std::string_view word) { return std::ranges::count(word, '(') - std::ranges::count(word, ')'); }

}  // namespace

std::vector<std::string> shell_words(std::string_view text) {
  std::vector<std::string> words;
  std::map<std::string, std::string> variables;
  std::string word;
  bool in_word = false;
  char quote = 0;
  const auto value_of = [&](const std::string& w) {  // one pass: a value that names another variable stays as it is
    std::string out;
    for (size_t i = 0; i < w.size(); ++i) {
      if (w[i] != '$') {
        out += w[i];
        continue;
      }
      const bool braces = i + 1 < w.size() && w[i + 1] == '{';
      size_t end = i + (braces ? 2 : 1);
      const size_t begin = end;
      while (end < w.size() && (std::isalnum(static_cast<unsigned char>(w[end])) || w[end] == '_')) ++end;
      const auto found = variables.find(w.substr(begin, end - begin));
      const bool closed = !braces || (end < w.size() && w[end] == '}');
      if (found == variables.end() || !closed) {
        out += w[i];
        continue;
      }
      out += found->second;
      i = end - (braces ? 0 : 1);
      if (out.size() > kWordBytes) return w;  // values that name each other grow without end
    }
    return out;
  };
  const auto end_word = [&] {
    if (!in_word) return;
    in_word = false;
    const size_t equals = word.find('=');
    const bool assigns = equals != std::string::npos && equals > 0 && std::ranges::all_of(word.substr(0, equals), [](char c) {
                           return std::isalnum(static_cast<unsigned char>(c)) || c == '_';
                         });
    if (assigns)
      variables.insert_or_assign(word.substr(0, equals), value_of(word.substr(equals + 1)));
    else if (!word.empty())
      words.push_back(value_of(word));
    word.clear();
  };
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (quote != 0) {
      if (c == quote)
        quote = 0;
      else
        word += c;
    } else if (c == '\'' || c == '"') {
      quote = c;
      in_word = true;
    } else if (c == '\\' && i + 1 < text.size() && (text[i + 1] == '\n' || text[i + 1] == '\r')) {
      end_word();
      ++i;
    } else if (c == '#' && !in_word) {
      while (i < text.size() && text[i] != '\n') ++i;
    } else if (c == '(' && word.ends_with('$')) {  // a command's output or arithmetic, up to its own end
      int depth = 0;
      do {
        word += text[i];
        depth += text[i] == '(' ? 1 : text[i] == ')' ? -1 : 0;
      } while (depth > 0 && i + 1 < text.size() && text[++i] != '\n');
    } else if (c == '(' && word.ends_with('=')) {  // an array begins
      end_word();
    } else if (c == ')' && open_parentheses(word) == 0) {  // and ends
      end_word();
    } else if (c == ' ' || c == '\t' || c == '\n' || c == '\r' || c == ';') {
      end_word();
    } else {
      word += c;
      in_word = true;
    }
  }
  end_word();
  return words;
}

Options options_of(const std::vector<std::string>& words) {
  Options options;
  for (size_t i = 0; i < words.size(); ++i) {
    if (!words[i].starts_with("--") || words[i].size() == 2) continue;
    std::string name = words[i].substr(2);
    std::vector<std::string> values;
    if (const size_t equals = name.find('='); equals != std::string::npos) {
      values.push_back(name.substr(equals + 1));
      name.resize(equals);
    } else {
      while (i + 1 < words.size() && !words[i + 1].starts_with("--")) values.push_back(words[++i]);
    }
    options.insert_or_assign(std::move(name), std::move(values));  // the last one counts, as argparse has it
  }
  return options;
}

}  // namespace shardlab::interop
