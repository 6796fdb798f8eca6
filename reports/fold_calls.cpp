#include "reports/fold_calls.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "plan/work.h"

namespace shardlab::reports {
namespace {

bool is_wait(const TraceEvent& e) { return e.kind == TraceEvent::Kind::kWait; }
int64_t nanoseconds(double s) { return std::llround(s * 1e9); }
bool is_close(double a, double b) { return std::abs(a - b) < 0.5e-9; }

}  // namespace

TimelineOp timeline_op(const Plan& plan, const Instruction& i, std::string label) {
  TimelineOp op;
  op.label = std::move(label);
  op.kind = i.kind == Instruction::Kind::kAlloc ? "alloc" : i.kind == Instruction::Kind::kFree ? "free" : "";
  if (i.op == nullptr || i.segment == nullptr) return op;
  const WorkAmount work = work_of(*i.segment, *i.op, plan.mesh, plan.token_order);
  constexpr std::string_view kPhases[] = {"", ".F", ".I", ".W"};
  op.kind = fmt::format("{}{}", kind_of(i.op->work), kPhases[static_cast<size_t>(phase_of(i.op->work))]);
  op.flops = static_cast<double>(work.flops.value);
  op.memory_bytes = static_cast<double>(work.memory.value);
  op.payload_bytes = static_cast<double>(work.payload.value);
  return op;
}

bool are_alike(std::span<const TraceEvent* const> a, std::span<const TraceEvent* const> b) {
  if (a.data() == b.data()) return true;
  return std::ranges::equal(a, b, [](const TraceEvent* x, const TraceEvent* y) {
    return x->instruction == y->instruction && x->kind == y->kind && x->stream == y->stream && is_close(x->begin, y->begin) &&
           is_close(x->end, y->end) && is_close(x->peer_wait, y->peer_wait);
  });
}

std::vector<TimelineCall> CallFolder::fold(const Program& program, std::span<const TraceEvent* const> events, double origin) {
  const auto call_of = [&](const TraceEvent* e) { return program.instructions[static_cast<size_t>(e->instruction)].call; };
  std::vector<TimelineCall> calls;
  for (size_t first = 0, last = 0; first < events.size(); first = last) {
    while (last < events.size() && call_of(events[last]) == call_of(events[first])) ++last;
    calls.push_back(fold_one(program, events.subspan(first, last - first), origin));
  }
  return calls;
}

TimelineCall CallFolder::fold_one(const Program& program, std::span<const TraceEvent* const> events, double origin) {
  const Instruction& i = program.instructions[static_cast<size_t>(events.front()->instruction)];
  const auto first_op = std::ranges::find_if(events, [](const TraceEvent* e) { return !is_wait(*e); });
  const bool works = first_op != events.end();
  const double first = works ? (*first_op)->begin : events.front()->end;
  TimelineCall call{.layer = i.layer, .micro_batch = i.micro_batch};
  if (is_wait(*events.front())) call.wait_ns = nanoseconds(events.front()->end - events.front()->begin);
  if (works) call.peer_wait_ns = nanoseconds((*first_op)->peer_wait);
  const double zero = works ? first + (*first_op)->peer_wait : first;
  call.origin_ns = nanoseconds(zero - origin);

  CallShape shape{.segment = segment_of(i.call < 0 ? nullptr : i.segment)};
  for (size_t k = 0; k < events.size(); ++k) {
    const TraceEvent& e = *events[k];
    const bool of_call = k == 0 && is_wait(e), before = k < static_cast<size_t>(first_op - events.begin());
    ShapeOp op{.op = op_of(program.instructions[static_cast<size_t>(e.instruction)]), .wait = is_wait(e)};
    if (works && &e == *first_op) {
      op.lasts_ns = nanoseconds(e.end - zero);
    } else {
      op.begin_ns = nanoseconds((of_call ? e.end : e.begin) - (before ? first : zero));
      op.lasts_ns = of_call ? 0 : nanoseconds(e.end - e.begin);
      op.peer_wait_ns = nanoseconds(e.peer_wait);
    }
    if (of_call) shape.lead_ns = -op.begin_ns;
    if (!op.wait) {
      ++shape.count;
      shape.busy_ns += op.lasts_ns - op.peer_wait_ns;
      shape.end_ns = std::max(shape.end_ns, op.begin_ns + op.lasts_ns);
    }
    shape.ops.push_back(op);
  }
  call.shape = shape_of(std::move(shape));
  return call;
}

int32_t CallFolder::segment_of(const Segment* segment) {
  if (segment == nullptr) return -1;
  const auto [found, fresh] = segments_.try_emplace(segment, static_cast<int32_t>(out_.segments.size()));
  if (fresh) out_.segments.push_back(segment->name);
  return found->second;
}

/// Calls of a segment share its ops, allocations and frees; outside of calls each instruction is one of its own.
int32_t CallFolder::op_of(const Instruction& i) {
  const bool in_call = i.segment != nullptr;
  const auto key = i.op != nullptr ? std::tuple<const void*, int, int>(i.op, 0, 0)
                   : in_call
                       ? std::tuple<const void*, int, int>(i.segment, static_cast<int>(i.kind), static_cast<int>(i.slot.index()))
                       : std::tuple<const void*, int, int>(nullptr, i.role, i.id);
  const auto [found, fresh] = numbers_.try_emplace(key, static_cast<int32_t>(ops_.size()));
  if (!fresh) return found->second;
  Instruction bare = i;
  bare.layer = bare.micro_batch = -1;
  const std::string label = describe(plan_, bare);
  ops_.push_back(timeline_op(plan_, i, in_call ? label.substr(i.segment->name.size() + 1) : label));
  return found->second;
}

int32_t CallFolder::shape_of(CallShape shape) {
  const auto [found, fresh] = shapes_.try_emplace({shape.segment, shape.ops}, static_cast<int32_t>(out_.shapes.size()));
  if (fresh) {
    events_.push_back(static_cast<int32_t>(shape.ops.size()));
    out_.shapes.push_back(std::move(shape));
  }
  return found->second;
}

TimelineCalls CallFolder::take(const std::vector<TimelineLane>& lanes, int64_t max_ops) {
  std::vector<int64_t> uses(out_.shapes.size(), 0);
  for (const TimelineLane& lane : lanes)
    for (const TimelineCall& call : lane.calls) ++uses[static_cast<size_t>(call.shape)];
  std::vector<size_t> order(uses.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::ranges::stable_sort(order, std::greater(), [&](size_t k) { return uses[k]; });
  int64_t placed = 0;
  for (const size_t k : order) {
    std::vector<ShapeOp>& ops = out_.shapes[k].ops;
    placed += static_cast<int64_t>(ops.size());
    if (placed > max_ops || uses[k] == 0) ops.clear();
  }
  return std::move(out_);
}

}  // namespace shardlab::reports
