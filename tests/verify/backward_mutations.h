// Mutations of what goes back: values exchanged between calls, operands exchanged for others of their type, paths that end,
// settings that differ between an op and its counterpart.
#pragma once

#include <functional>
#include <string>

#include "plan/plan.h"
#include "tests/namespaces.h"

namespace shardlab::testing {

/// Where mutants go.
struct Jury {
  std::function<void(const std::string& kind, const std::string& place, const std::function<void(Plan&)>& change)> judge;
  std::function<void(const std::string& kind)> equivalent;  ///< one was left out
};

/// Breaks `plan` in every such way, one mutant for each call.
void mutate_backward(const Plan& plan, const Jury& jury);

}  // namespace shardlab::testing
