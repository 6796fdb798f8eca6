#include "cli/pairs.h"

#include <algorithm>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cli/namespaces.h"
#include "plan/case.h"
#include "plan/techniques.h"

namespace shardlab::cli {
namespace {

/// The values that techniques deal, in the order of the table.
const std::vector<Choice>& choices() {
  static const std::vector<Choice> all = [] {
    std::vector<Choice> list;
    for (const Technique& t : techniques()) list.insert(list.end(), t.choices.begin(), t.choices.end());
    return list;
  }();
  return all;
}

/// Sizes that no choice by itself is refused for.
Case base_case() {
  Case c;
  c.model = {.name = "small",
             .family = Family::kGpt,
             .layers = 4,
             .hidden = 64,
             .heads = 4,
             .kv_heads = 4,
             .head_dim = 16,
             .ffn = 256,
             .vocab = 128,
             .max_positions = 64};
  c.train.seq_len = 64;
  c.train.micro_batch = 2;
  return c;
}

/// Both choices on one case; or why they do not go together, in neither order: what one brings along may give way to the other.
Result<Case> judge(const Choice& a, const Choice& b) {
  Case c = base_case();
  a.set(c);
  b.set(c);
  if (check(c).ok()) return c;
  Case other = base_case();
  b.set(other);
  a.set(other);
  const Result<void> verdict = check(other);
  if (!verdict.ok()) return verdict.error();
  return other;
}

/// Choices of one key exclude one another.
std::string_view key_of(const Choice& choice) {
  const std::string_view name = choice.name;
  return name.substr(0, std::min(name.find(':'), name.size()));
}

template <class Visit>
void for_each_pair(const Visit& visit) {
  for (size_t a = 0; a < choices().size(); ++a)
    for (size_t b = a + 1; b < choices().size(); ++b)
      if (key_of(choices()[a]) != key_of(choices()[b])) visit(a, b, judge(choices()[a], choices()[b]));
}

}  // namespace

std::vector<LegalPair> legal_pairs() {
  std::vector<LegalPair> pairs;
  for_each_pair([&](size_t a, size_t b, const Result<Case>& verdict) {
    if (verdict.ok()) pairs.push_back({std::string(choices()[a].name), std::string(choices()[b].name), *verdict});
  });
  return pairs;
}

Table pair_matrix() {
  Table table{{{"with"}}, {}};
  for (size_t i = 0; i < choices().size(); ++i) table.columns.push_back({std::to_string(i + 1)});
  for (size_t i = 0; i < choices().size(); ++i) {
    std::vector<Value> row(choices().size() + 1);
    row[0] = std::to_string(i + 1) + " `" + std::string(choices()[i].name) + "`";
    table.rows.push_back(std::move(row));
  }
  int number = 0;
  for_each_pair([&](size_t a, size_t b, const Result<Case>& verdict) {
    const std::string word = verdict.ok() ? "yes" : "(" + std::to_string(++number) + ")";
    table.rows[a][b + 1] = table.rows[b][a + 1] = word;
  });
  return table;
}

Table refused_pairs() {
  Table table{{{"number"}, {"choice"}, {"with"}, {"why"}, {"instead"}}, {}};
  int64_t number = 0;
  for_each_pair([&](size_t a, size_t b, const Result<Case>& verdict) {
    if (verdict.ok()) return;
    table.rows.push_back(
        {++number, std::string(choices()[a].name), std::string(choices()[b].name), verdict.error().message, verdict.error().hint});
  });
  return table;
}

Table pair_list() {
  Table table{{{"choice"}, {"with"}, {"legal"}, {"why"}, {"instead"}}, {}};
  for_each_pair([&](size_t a, size_t b, const Result<Case>& verdict) {
    table.rows.push_back({std::string(choices()[a].name), std::string(choices()[b].name), verdict.ok(),
                          verdict.ok() ? Value() : Value(verdict.error().message),
                          verdict.ok() ? Value() : Value(verdict.error().hint)});
  });
  return table;
}

}  // namespace shardlab::cli
