#include "plan/row_levels.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "plan/named_kernels.h"
#include "plan/node_reach.h"

namespace shardlab {
namespace {

const Type& type_of(const Segment& segment, SlotId slot) { return segment.slots[slot.index()].type; }

/// What `rows` are made of, as an exchange in which a token crosses once reads it: the choice that laid them out, and weights and tokens of
/// gradients. Nothing where neither a dispatch nor a combine of the segment made them.
std::vector<SlotId> made_of(const Segment& segment, SlotId rows) {
  for (const Step& step : segment.steps) {
    const Op* op = std::get_if<Op>(&step);
    if (op == nullptr || std::ranges::find(op->writes, rows) == op->writes.end()) continue;
    if (const auto* dispatch = std::get_if<Dispatch>(&op->work); dispatch != nullptr && dispatch->phase == Phase::kF)
      return {op->reads[1]};
    if (const auto* combine = std::get_if<Combine>(&op->work); combine != nullptr && combine->phase == Phase::kI)
      return type_of(segment, op->reads[0]).dtype == type_of(segment, rows).dtype
                 ? std::vector{op->reads[3], op->reads[2], op->reads[0]}
                 : std::vector<SlotId>();
    if (const auto* kernel = std::get_if<Kernel>(&op->work); kernel != nullptr && meaning_of(*kernel) == KernelMeaning::kRounding) {
      const std::vector<SlotId> rounded = made_of(segment, op->reads[0]);
      return rounded.size() == 1 ? rounded : std::vector<SlotId>();  // a product is rounded otherwise than its factors
    }
    return {};
  }
  return {};
}

/// Rows that a rank with `tokens` tokens sends to other nodes, a token once to each, where routes are even. Rows that a capacity drops are
/// in no message: no more cross than there are.
int64_t even_tokens_across(const Experts& experts, int64_t tokens, const RowLevels& levels) {
  const double chance = even_chance_of_node(experts, levels.nodes);
  const int64_t across = std::llround(static_cast<double>(tokens) * chance * (levels.nodes - 1));
  return std::min(across, levels.rows / levels.nodes * (levels.nodes - 1));
}

}  // namespace

std::optional<RowLevels> row_levels(const Segment& segment, const Op& op) {
  if (!moves_packed_rows(op)) return std::nullopt;
  const auto& c = std::get<Collective>(op.work);
  if (c.algorithm != Algorithm::kHierarchical || c.per_node < 2) return std::nullopt;
  const int64_t from = type_of(segment, op.reads[0]).shape[0], groups = std::max(from, type_of(segment, op.writes[0]).shape[0]);
  if (groups <= c.per_node || groups % c.per_node != 0) return std::nullopt;
  RowLevels levels{static_cast<int>(groups / c.per_node), c.per_node, from == groups, crosses_once(op), crosses_weighed(op)};
  const Type& home = type_of(segment, levels.goes ? op.reads[0] : op.writes[0]);
  levels.rows = home.shape[0] * home.shape[1];
  levels.most_rows = c.room > 0 ? std::min(levels.rows, c.room * levels.per_node) : levels.rows;
  levels.row_bytes = bytes_of(home.dtype, home.shape.last());
  levels.even_across = levels.once ? c.across : levels.rows / levels.nodes * (levels.nodes - 1);
  return levels;
}

int64_t row_stage_bytes(const Segment& segment, const Op& op) {
  const auto levels = row_levels(segment, op);
  return levels ? levels->stage_bytes() : 0;
}

bool cross_once(const Segment& segment, const Experts& experts, Op& op) {
  if (!moves_packed_rows(op)) return false;
  const bool before = crosses_once(op);
  op.reads.resize(3);
  auto& c = std::get<Collective>(op.work);
  c.across = 0;
  const auto levels = row_levels(segment, op);
  const std::vector<SlotId> of = levels && levels->goes ? made_of(segment, op.reads[0]) : std::vector<SlotId>();
  if (of.empty()) return before;
  const Shape& chosen = type_of(segment, of[0]).shape;
  c.across = even_tokens_across(experts, chosen[0] * chosen[1], *levels);
  op.reads.insert(op.reads.end(), of.begin(), of.end());
  return !before;
}

void free_behind(Segment& segment, size_t at) {
  const std::vector<SlotId> reads = std::get<Op>(segment.steps[at]).reads;
  const auto step = [&](size_t i) { return segment.steps.begin() + static_cast<std::ptrdiff_t>(i); };
  for (size_t i = at; i-- > 0;)
    if (const auto* free = std::get_if<FreeSlot>(&segment.steps[i]);
        free != nullptr && std::ranges::find(reads, free->slot) != reads.end())
      std::rotate(step(i), step(i + 1), step(1 + at--));
}

}  // namespace shardlab
