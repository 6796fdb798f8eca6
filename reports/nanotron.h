// Results under the column names of nanotron's benchmark table, which readers of the Ultra-Scale Playbook's data know.
#pragma once

#include <span>

#include "plan/outcome.h"
#include "reports/table.h"

namespace shardlab::reports {

/// One row a case, with nanotron's columns in nanotron's order, measured where the case was measured and else predicted. Empty is
/// what is not known here: `job_id`, options of nanotron that a case does not have, `hTFLOPs` where layers are recomputed, and all
/// figures of a case without a step. TFLOPs are of one GPU. Gigabytes are of 2^30 bytes, as nanotron's are.
/// Source: create_table_log in nanotron's src/nanotron/helpers.py.
Table nanotron_table(std::span<const CaseOutcome> cases);

}  // namespace shardlab::reports
