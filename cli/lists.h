// Tables of what the program knows by name: printed by a verb, pasted in a document and held to it by a test.
#pragma once

#include <string_view>

#include "cli/namespaces.h"
#include "reports/table.h"

namespace shardlab::cli {

/// The catalogue of strategies: `strategies` and the docs/strategies.md.
Table strategy_table();

/// The keys of a case that have `part` in a name or in their meaning: `keys` and docs/keys.md, which have them all.
Table key_table(std::string_view part = {});

}  // namespace shardlab::cli
