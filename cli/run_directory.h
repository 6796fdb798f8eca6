// The run directories and cases that words of the command line name.
#pragma once

#include <string>
#include <utility>

#include "cli/namespaces.h"
#include "plan/base/result.h"
#include "reports/store.h"

namespace shardlab::cli {

/// The store of a run directory; a usage error where there is none.
Result<Store> open_store(const std::string& directory);

/// The directory and, if the path goes on, the case in it.
std::pair<std::string, std::string> split_case(const std::string& where);

}  // namespace shardlab::cli
