// What a search found, as tables and JSON.
#pragma once

#include <nlohmann/json.hpp>

#include "cli/namespaces.h"
#include "cli/search_space.h"
#include "reports/table.h"

namespace shardlab::cli {

/// The ranked layouts (or the front), one a row: layout keys, then figures by the names of results.csv.
Table layout_table(const SearchTask& task, std::span<const search::Candidate> layouts);
/// The same without columns in which every row has what is usual.
Table without_usual_columns(const Table& table);

/// Why others lost: reason, points, nearest example, what it would have been.
Table loser_table(const search::Found& found);

/// The object of `search --format json` (ARCHITECTURE.md, section 3).
nlohmann::ordered_json to_json(const SearchTask& task, const search::Found& found, double seconds);

/// results.csv of the ranked layouts and of the front: the columns of every results.csv, then `rank` and `pareto`.
Table results_table(const SearchTask& task, const search::Found& found);

}  // namespace shardlab::cli
