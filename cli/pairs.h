// Which strategies go together: every pair of choices on a small model that each can be used on, put before `check`.
#pragma once

#include <string>
#include <vector>

#include "cli/namespaces.h"
#include "plan/case.h"
#include "reports/table.h"

namespace shardlab::cli {

/// Two choices that go together, as they are on the small model.
struct LegalPair {
  std::string first, second;
  Case config;
};

/// The pairs to which `pair_matrix` says yes.
std::vector<LegalPair> legal_pairs();

/// One row and one column a choice: "yes" where the two go together, and where not the number of the reason in `refused_pairs`.
Table pair_matrix();

/// The pairs that are refused: number, the two choices, why, and what to do instead.
Table refused_pairs();

/// Every pair once: the two choices, whether they go together, why not, what to do instead. For programs.
Table pair_list();

}  // namespace shardlab::cli
