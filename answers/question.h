// Questions as JSON objects, read as the flags of the command line are.
#pragma once

#include <string>
#include <string_view>

#include "answers/case_flags.h"
#include "answers/memory_question.h"
#include "answers/namespaces.h"
#include "answers/search_space.h"
#include "plan/base/result.h"

namespace shardlab::answers {

struct MemoryAsked {
  CaseFlags flags;
  MemoryWords words;
};

/// The object's keys are flags of `memory` with underscores, or keys of a sweep file with a dot. Refuses what is no JSON object, a key
/// that is unknown or missing, and a value of another form.
Result<MemoryAsked> memory_asked(std::string_view json);

/// The same of `search`.
Result<SearchFlags> search_asked(std::string_view json);

}  // namespace shardlab::answers
