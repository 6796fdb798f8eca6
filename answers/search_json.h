// The result of a search as figures and JSON.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include <string>
#include <vector>

#include "answers/namespaces.h"
#include "answers/search_space.h"
#include "reports/table.h"

namespace shardlab::answers {

/// A figure of a layout under the name that it has in results.csv.
struct Figure {
  std::string name;
  Unit unit;
  std::string heading;
  Value value;
};

/// Figures of a layout: times, bytes, and where a whole run was asked for its days and its price.
std::vector<Figure> figures_of(const SearchTask& task, const search::Candidate& candidate);

/// Model flops over the peak of the devices in the layout's precision; nothing where that is not known.
Value mfu(const SearchTask& task, const search::Candidate& candidate);

/// Whole numbers and truths of `words_of` as such.
Value typed(const std::string& word);

/// Whether the prediction cannot tell the layout from the first: it is slower by less than what the two differ in is uncertain by.
bool equal_to_first(const SearchTask& task, const search::Candidate& first, const search::Candidate& candidate);

/// The object of `search --format json` (ARCHITECTURE.md, section 3).
nlohmann::ordered_json to_json(const SearchTask& task, const search::Found& found, double seconds);

}  // namespace shardlab::answers
