// Rows cut in parts that lie one behind the other, so that what ranks exchange of them is one piece of memory (Regroup).
#pragma once

#include <cstdint>
#include <utility>

#include "plan/type.h"
#include "strategies/draft.h"

namespace shardlab::strategies {

/// `here` parts of `width` elements of each row of `row`[b,s,w], for `tokens` tokens: [here,tokens,b,width], as Regroup makes them. Along
/// `axes` the parts are placed `along`.
inline Type in_parts(const Type& row, int64_t here, int64_t tokens, int64_t width, AxisSet axes, Placement along) {
  Type type = row;
  type.shape = {here, tokens, row.shape[0], width};
  for (Placement& place : type.place)
    if (place.is_shard() && place.dim != 1) place = Placement::shard(place.dim == 0 ? 2 : 3);
  return placed(std::move(type), axes, along);
}

}  // namespace shardlab::strategies
