#include "plan/row_levels.h"

#include <algorithm>

namespace shardlab {
namespace {

const Type& type_of(const Segment& segment, SlotId slot) { return segment.slots[slot.index()].type; }

}  // namespace

std::optional<RowLevels> row_levels(const Segment& segment, const Op& op) {
  if (!moves_packed_rows(op)) return std::nullopt;
  const auto& c = std::get<Collective>(op.work);
  if (c.algorithm != Algorithm::kHierarchical || c.per_node < 2) return std::nullopt;
  const int64_t from = type_of(segment, op.reads[0]).shape[0], groups = std::max(from, type_of(segment, op.writes[0]).shape[0]);
  if (groups <= c.per_node || groups % c.per_node != 0) return std::nullopt;
  return RowLevels{static_cast<int>(groups / c.per_node), c.per_node, from == groups};
}

int64_t row_stage_bytes(const Segment& segment, const Op& op) {
  const auto levels = row_levels(segment, op);
  if (!levels) return 0;
  const Type& home = type_of(segment, levels->goes ? op.reads[0] : op.writes[0]);
  const int64_t room = std::get<Collective>(op.work).room, rows = home.shape[0] * home.shape[1];
  const int64_t most = room > 0 ? std::min(rows, room * levels->per_node) : rows;
  return levels->stage_bytes(most, bytes_of(home.dtype, home.shape.last()));
}

}  // namespace shardlab
