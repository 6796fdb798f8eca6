// Tables of measured runs: the published ones, and a user's files.
#pragma once

#include <string>
#include <vector>

#include "plan/base/result.h"
#include "simulator/estimator/validate/rows.h"

namespace shardlab::cli {

Result<std::vector<simulator::validation::RowTable>> published_tables();
/// Refuses what no table is; columns that are carried through are told on stderr.
Result<std::vector<simulator::validation::RowTable>> tables_of(const std::vector<std::string>& files);

}  // namespace shardlab::cli
