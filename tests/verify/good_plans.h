// Small hand-written plans that verify, and the means to break them in one place.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "plan/plan.h"
#include "plan/verify.h"
#include "tests/namespaces.h"

namespace shardlab::testing {

/// Parses `text`, which must be well formed.
Plan parse_or_fail(std::string_view text);

/// `text` with the only occurrence of `from` replaced by `to`. Fails the test when there is none, or more than one.
std::string replaced(std::string text, std::string_view from, std::string_view to);

/// The findings as text, one a line: "rule | op | message".
std::string findings_text(const std::vector<Finding>& findings);

/// A step of an embedding and a head on dp=2 x tp=2, with two micro-batches: the table is sharded over tp, the head is not.
std::string training_text();

/// The same with both gradients in one flat bucket and the optimizer sharded over dp (ZeRO-1).
std::string zero1_text();

/// Two stages that pass two micro-batches forward and their gradients back, on a stream per direction and side.
std::string pipeline_text();

}  // namespace shardlab::testing
