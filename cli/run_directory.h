// The run directories and cases that words of the command line name.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cli/namespaces.h"
#include "plan/base/result.h"
#include "reports/store.h"

namespace shardlab::cli {

/// The store of a run directory; a usage error where there is none.
Result<Store> open_store(const std::string& directory);

/// The directory and, if the path goes on, the case in it.
std::pair<std::string, std::string> split_case(const std::string& where);

/// The cases that a user means by `said`: those of that very name, else those whose id begins with it.
template <class Case>
class NamedCases {
 public:
  explicit NamedCases(std::string_view said) : said_(said) {}
  void offer(std::string_view id, std::string_view name, Case c) {
    if (name == said_)
      by_name_.push_back(std::move(c));
    else if (id.starts_with(said_))
      by_id_.push_back(std::move(c));
  }
  std::vector<Case>& found() { return by_name_.empty() ? by_id_ : by_name_; }

 private:
  std::string said_;
  std::vector<Case> by_name_, by_id_;
};

/// The folder that the run gave the case.
std::string case_folder(const std::string& directory, const CaseOutcome& outcome);

/// The file that the words name: one as it is; `case.yaml` of a case, by id or name, in a run directory (RUN/CASE); or another file
/// of the case (RUN/CASE/plan.txt). Words that name none of these are given back for the reader of files to refuse. A usage error
/// where the directory has no such case, or several, and where a run is named without a case.
Result<std::string> case_file(const std::string& where);

}  // namespace shardlab::cli
