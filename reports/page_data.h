// What the report's page is told: one JSON document, its columns held once.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "reports/html.h"
#include "reports/summary.h"

namespace shardlab::reports {

/// The page's word for a mood: "answer", "good", "note", "bad".
std::string_view word_of(Statement::Mood mood);

/// The document, as reports/web/src/data.ts declares it. Of up to `kExact` cases numbers are exact; of more, six digits, so that
/// 25,000 cases stay below 3 MB once packed.
std::string page_data(const Report& report, const Summary& summary, const std::vector<Statement>& statements);

}  // namespace shardlab::reports
