// The result of a search as a report's page.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "answers/search_space.h"
#include "cli/namespaces.h"
#include "reports/html.h"

namespace shardlab::cli {

/// The ranked layouts, then those of the front that are not among them, as cases: in the order of results.csv.
std::vector<CaseOutcome> search_outcomes(const SearchTask& task, const search::Found& found);

/// Makes `report`, whose cases are those of a search, the page of it: its ranks and verdicts, how the others lost, and what was looked
/// for, from the object of `search --format json`. Refuses an object that is no search's.
Result<void> add_search(const nlohmann::ordered_json& search, Report& report);

}  // namespace shardlab::cli
