// An answer of `memory` as JSON.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include "answers/memory_question.h"
#include "answers/namespaces.h"

namespace shardlab::answers {

/// The layout of the question, defaults included.
nlohmann::ordered_json layout_json(const MemoryQuestion& question);

/// The object of the contract.
nlohmann::ordered_json memory_json(const ToldMemory& told);

}  // namespace shardlab::answers
