#include "sweeps/expression_keys.h"

#include <algorithm>

#include "plan/base/values.h"

namespace shardlab::sweeps {

const Vocabulary& expression_vocabulary() {
  static const Vocabulary vocabulary = [] {
    Vocabulary v;
    const auto add = [](std::vector<std::string>& list, std::string_view word) {
      if (std::ranges::find(list, word) == list.end()) list.emplace_back(word);
    };
    for (const CaseKey& key : case_keys()) {
      if (key.get == nullptr) continue;
      add(v.keys, key.path);
      for_each_word(key.aliases, [&](std::string_view w) { add(v.keys, w); });
      for (const std::string& w : words_of(key)) add(v.values, w);
    }
    return v;
  }();
  return vocabulary;
}

ExpressionValue expression_value(const CaseKey& key, const std::string& text) {
  if (key.form == Form::kDuration) return parse_duration(text).value();
  if (key.form == Form::kBool) return parse_bool(text).value();
  if (key.form == Form::kText || key.form == Form::kPath) return text;
  if (const auto number = parse_number(text)) return *number;
  return text;
}

}  // namespace shardlab::sweeps
