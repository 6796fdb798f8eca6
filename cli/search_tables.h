// The result of a search, as tables and JSON.
#pragma once

#include "answers/search_json.h"
#include "answers/search_space.h"
#include "cli/namespaces.h"
#include "reports/table.h"

namespace shardlab::cli {

/// The id of a layout in results.csv: a hash of model, machine and the words of the layout.
std::string case_id_of(const SearchTask& task, const search::Candidate& candidate);

/// The ranked layouts (or the front), one a row: layout keys, then figures by the names of results.csv.
Table layout_table(const SearchTask& task, std::span<const search::Candidate> layouts);

/// Layouts for people: the words that all rows share, and a table with the deciding figures.
struct AnswerTable {
  std::string shared;  ///< "sp mb1 x128"; empty where rows share nothing
  Table table;
};
/// `ranked`: with a first column of ranks, "=2" where `equal_to_first`.
AnswerTable answer_table(const SearchTask& task, std::span<const search::Candidate> layouts, bool ranked);

/// "dp2 tp2 pp4 cp4, 55.1 s a step, 54 % MFU, 78.0 of 79.1 GiB (may not fit), 152 days, $584k".
std::string answer_sentence(const SearchTask& task, const search::Candidate& candidate);

/// The reasons by which others lost: reason, points, nearest example, and the figures of that example.
Table loser_table(const search::Found& found);
/// The reasons for people: layouts that lose by time or memory are one row for each of the commonest causes, and one for the rest.
Table loser_summary(const search::Found& found);

/// results.csv of the ranked layouts and of the front: the columns of every results.csv, then `rank` and `pareto`.
Table results_table(const SearchTask& task, const search::Found& found);

}  // namespace shardlab::cli
