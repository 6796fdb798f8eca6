// Rows, machines and predictions by hand.
#pragma once

#include <set>
#include <string>
#include <vector>

#include "simulator/estimator/validate/validate.h"

namespace shardlab::simulator::validation::testing {

/// Knows the preset "tiny-llama" (8 layers) and the machines "node" (8 devices of 80 GB) and "box" (1 device); refuses all else.
Resolver resolver();

/// Presets, and the machines that ship with the published runs.
Resolver published_resolver();

/// Names of the published sets whose layouts nobody picked.
std::set<std::string> untuned_sets();

/// Every published set.
std::vector<RowTable> published_tables();

/// A table of runs that are alike but for the given columns. `header` and `rows` are CSV, appended to the common columns.
RowTable table_of(const std::string& header, const std::vector<std::string>& rows, const std::string& name = "hand");

/// Predicts what the columns `p_step`, `p_bytes` and `p_device` of the rows say; refuses rows where `p_step` is empty.
std::vector<ScoredRow> predicted(const std::vector<RowTable>& tables);

}  // namespace shardlab::simulator::validation::testing
