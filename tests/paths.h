// Where the tests find the source tree and the program. The values are compiled into one generated file, so that every other object of
// the tests is the same in each checkout and a compiler cache serves them all.
#pragma once

#include <string>

namespace shardlab::testing {

/// The root of the source tree.
const std::string& source_dir();

/// The built program `shardlab`.
const std::string& program_path();

}  // namespace shardlab::testing
