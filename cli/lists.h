// The catalogue of strategies as a table: printed by `strategies`, pasted in the README and held to it by a test.
#pragma once

#include "cli/namespaces.h"
#include "reports/table.h"

namespace shardlab::cli {

Table strategy_table();

}  // namespace shardlab::cli
