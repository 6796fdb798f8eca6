#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "strategies/draft.h"

namespace shardlab::strategies {

/// The loss for even use of experts is of whole sequences: where ranks along `axes` route parts of them, how many of their tokens go to each
/// expert, b e numbers for a layer and micro-batch, is summed over the parts. Nothing without such a loss. `strategy` adds the ops.
void sum_loads(Draft& draft, AxisSet axes, std::string_view strategy);

/// The room of an expert is of whole sequences, in the order of the text: where ranks along `axes` route parts of them, what the tokens of all
/// parts choose, i32[b,s,top_k], is gathered before rows are dropped. Choices and not their counts, since the positions of two parts may
/// alternate (`TokenOrder`). Nothing without a capacity. `strategy` adds the ops.
void share_room(Draft& draft, AxisSet axes, std::string_view strategy);

/// The index of a segment's router among its steps. A bug if the segment has none.
size_t router_of(const DraftSegment& segment);
/// Says to a segment's router that its rank has a part of each sequence, which has so many tokens.
void cut_router(DraftSegment& segment, int64_t tokens);

}  // namespace shardlab::strategies
