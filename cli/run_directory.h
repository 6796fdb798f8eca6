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

/// The folder that the run gave the case.
std::string case_folder(const std::string& directory, const CaseOutcome& outcome);

/// The case file that the words name: a file as it is, or `case.yaml` of a case, by id or name, in a run directory. Words that name
/// neither are given back for the reader of files to refuse. A usage error where the directory has no such case, or several.
Result<std::string> case_file(const std::string& where);

}  // namespace shardlab::cli
