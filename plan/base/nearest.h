// What a word that is not known may have been meant to be.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace shardlab {

/// The candidate with the fewest edits from `word`, if they are few enough to be a slip of the finger; else the shortest that
/// begins with it; else empty.
std::string nearest(std::string_view word, const std::vector<std::string>& candidates);

}  // namespace shardlab
