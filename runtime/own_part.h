// What a Copy takes where its result is the rank's part of what every rank has.
#pragma once

#include <vector>

#include "runtime/backend.h"

namespace shardlab::runtime {

/// Bytes that lie together in the whole and in the part.
struct OwnPiece {
  size_t from = 0, to = 0, bytes = 0;
};

/// The rank's part of read 0, as write 0 has it: of dims that the op cuts, the slices that are the rank's. In order, as few pieces as there
/// can be.
inline std::vector<OwnPiece> own_pieces(const BoundOp& op) {
  const Type &whole = *op.reads[0].type, &part = *op.writes[0].type;
  const Shape here = logical_origin(part, op.mesh(), op.at), from = logical_origin(whole, op.mesh(), op.at);
  const auto width = static_cast<size_t>(bytes_of(part.dtype, part.shape.last()));
  const int last = part.shape.rank - 1;
  std::vector<OwnPiece> pieces;
  for (int64_t row = 0; row < part.shape.elements() / part.shape.last(); ++row) {  // rows of the last dim
    int64_t at = 0, rest = row, stride = 1;
    for (int d = last - 1; d >= 0; --d) {
      at += (rest % part.shape[d] + here[d] - from[d]) * stride;
      rest /= part.shape[d];
      stride *= whole.shape[d];
    }
    const auto begin = static_cast<size_t>(bytes_of(part.dtype, at * whole.shape.last() + here[last] - from[last]));
    if (!pieces.empty() && pieces.back().from + pieces.back().bytes == begin)
      pieces.back().bytes += width;
    else
      pieces.push_back({begin, static_cast<size_t>(row) * width, width});
  }
  return pieces;
}

}  // namespace shardlab::runtime
