// The language exam: plans of strategies that are still to come, as text that `verify` accepts.
#pragma once

#include <string>
#include <vector>

#include "tests/namespaces.h"

namespace shardlab::testing {

/// Names of the files of tests/verify/exam, without ".plan": every subject of the exam.
const std::vector<std::string>& exam_subjects();

/// The text of one of them.
std::string exam_text(const std::string& subject);

}  // namespace shardlab::testing
