// The code in a reason: "... [E104]".
#pragma once

#include <string_view>

namespace shardlab {

/// The code that `reason_of` wrote into a reason of a kind that has one, "E104"; empty where there is none.
std::string_view code_in(std::string_view reason);

}  // namespace shardlab
