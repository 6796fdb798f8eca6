// Cases for the tests of exports and imports.
#pragma once

#include <string>

#include "plan/case.h"
#include "tests/namespaces.h"

namespace shardlab::testing {

/// The one point of a sweep text, whether or not shardlab itself could run it.
Case point_of(const std::string& yaml);

/// Llama-3.1-8B on two nodes of eight H100 under the profile, with `more` lines.
Case llama(const std::string& profile, const std::string& more);

}  // namespace shardlab::testing
