// Rule 6, messages: sends meet receives, collectives meet on every role, and nothing deadlocks.
//
// The machine has one representative rank per role. Its streams are FIFOs of COMM OPS: sends, receives, and collectives that
// join several roles (a collective within a role is issued by the same text on every rank of its group, so it always meets).
// Everything else only orders them: a vector clock says, by stream, how many comm ops must be complete before an op may start.
// Clocks follow the same storage as the edges of plan/program.h; a segment without comm ops counts as one op on all of its streams,
// which is how the strictest back end launches it.
//
// Rules of the strictest back end: a send completes with its receive, and the ops of one communicator run one after the other in
// issue order, but that a ring's sends and receives are two orders. A rank in a ring within its role meets its own image: its send
// needs its own receive to be under way at the same time.
#include <algorithm>
#include <array>
#include <map>
#include <numeric>
#include <tuple>

#include "plan/program.h"
#include "plan/verify_internal.h"

namespace shardlab::verifying {
namespace {

using Clock = std::array<int32_t, kMaxStreams>;

void join(Clock& a, const Clock& b) {
  for (size_t i = 0; i < a.size(); ++i) a[i] = std::max(a[i], b[i]);
}

/// Operands of an op, or of a whole segment without comm ops.
struct Footprint {
  std::vector<int32_t> streams;
  std::vector<int32_t> reads, writes;  ///< slots
  std::vector<int32_t> allocs, frees;  ///< slots, of atomic segments
  std::vector<int32_t> orders;         ///< of communicators, see `order_of`
  const Op* op = nullptr;              ///< the comm op, if it is one
};

/// A segment as the machine sees it: one footprint an op where it holds comm ops, else one for all.
struct Outline {
  std::vector<Window> windows;
  std::vector<bool> bound;
  std::vector<Footprint> parts;
};

struct CommOp {
  enum class Kind : uint8_t { kSend, kRecv, kCollective } kind = Kind::kSend;
  int role = 0;
  int peer = -1;  ///< role, of a send or receive
  int hop = 0;    ///< of a send, or of the send that a receive waits for
  int32_t stream = 0;
  int32_t order = 0;  ///< position in its stream, from 0
  const Segment* segment = nullptr;
  const Op* op = nullptr;
  const Call* call = nullptr;
  CommId comm;
  SlotId slot;
  Clock needs{};
  bool done = false;
  int32_t meeting = -1;  ///< index into meetings
};

/// Comm ops that complete together.
struct Meeting {
  std::vector<int32_t> ops;
  std::vector<int32_t> after;  ///< the meeting before it on the same communicator and pair, if any
};

struct Cell {
  int64_t begin = 0, end = 0;
  Clock written{}, touched{};
};

class MessageChecker {
 public:
  MessageChecker(const Plan& plan, Report& report) : plan_(plan), report_(report) {}

  void run() {
    bool any = false;
    for (const Segment& s : plan_.segments) {
      outlines_.push_back(outline(s));
      any |= std::ranges::any_of(outlines_.back().parts, [](const Footprint& f) { return f.op != nullptr; });
    }
    if (!any) return;
    for (size_t r = 0; r < plan_.roles.size(); ++r) walk(static_cast<int>(r));
    if (report_.full()) return;
    const size_t before = report_.count();
    match();
    if (report_.count() == before) play();
  }

 private:
  template <class... T>
  void fault(const CommOp& c, fmt::format_string<T...> format, T&&... values) {
    report_.add(Rule::kMessages, c.role, op_name(*c.segment, *c.op, *c.call), fmt::format(format, std::forward<T>(values)...));
  }

  bool is_comm(const Op& op) const {
    if (std::holds_alternative<Send>(op.work) || std::holds_alternative<Recv>(op.work)) return true;
    const auto* c = std::get_if<Collective>(&op.work);
    return c != nullptr && joins_roles(plan_, plan_.comms[c->comm.index()]) &&
           group_size(plan_.mesh, plan_.comms[c->comm.index()]) > 1;
  }

  Outline outline(const Segment& segment) const;
  void walk(int role);
  void run_part(int role, const Call& call, const Segment& segment, const Outline& o, const Footprint& part);
  void record(int role, const Call& call, const Segment& segment, const Footprint& part, const Clock& clock);
  std::vector<Cell>& cells_of(const Call& call, const Outline& outline, int32_t slot, int64_t& begin, int64_t& end);
  static size_t cut(std::vector<Cell>& cells, int64_t begin, int64_t end);
  void match();
  void match_pair(const std::vector<int32_t>& sends, const std::vector<int32_t>& receives);
  void match_collectives(CommId comm, const std::map<int, std::vector<int32_t>>& by_role);
  void match_group(const Comm& c, const std::vector<int>& group, const std::map<int, std::vector<int32_t>>& by_role);
  void compare(const CommOp& send, const CommOp& receive);
  std::string difference(const CommOp& first, const CommOp& other) const;
  const Type& type(const CommOp& c) const { return c.segment->slots[c.slot.index()].type; }
  void play();
  bool ready(const CommOp& c) const;
  void report_deadlock();
  std::string cell_text(const CommOp& c) const;

  const Plan& plan_;
  Report& report_;
  std::vector<Outline> outlines_;
  std::vector<CommOp> ops_;
  std::vector<Meeting> meetings_;
  std::vector<std::vector<std::vector<int32_t>>> queues_;  ///< by role and stream: comm ops in order
  std::vector<std::vector<int32_t>> done_;                 ///< by role and stream: how many are complete
  // Of the role being walked.
  std::vector<Clock> stream_clock_, order_clock_;
  std::vector<Window> buffer_windows_;
  std::vector<std::vector<Cell>> buffer_cells_, local_cells_;
};

Outline MessageChecker::outline(const Segment& segment) const {
  Outline o;
  for (size_t s = 0; s < segment.slots.size(); ++s) {
    o.windows.push_back(window_of(segment, SlotId(static_cast<int32_t>(s))));
    o.bound.push_back(segment.slots[static_cast<size_t>(o.windows.back().root)].kind == SlotKind::kBound);
  }
  const bool comm = std::ranges::any_of(segment.steps, [&](const Step& s) {
    const Op* op = std::get_if<Op>(&s);
    return op != nullptr && is_comm(*op);
  });
  const auto add = [](std::vector<int32_t>& list, int32_t value) {
    if (std::ranges::find(list, value) == list.end()) list.push_back(value);
  };
  Footprint all;
  for (const Step& step : segment.steps) {
    Footprint part;
    Footprint& f = comm ? part : all;
    if (const Op* op = std::get_if<Op>(&step)) {
      add(f.streams, op->stream.value);
      for (const SlotId s : reads_with_predicate(*op))
        if (comm || o.bound[s.index()]) add(f.reads, s.value);
      for (const SlotId s : op->writes)
        if (comm || o.bound[s.index()]) add(f.writes, s.value);
      if (is_comm(*op)) f.op = op;
      if (order_of(*op) >= 0) add(f.orders, order_of(*op));
    } else if (const auto* a = std::get_if<AllocSlot>(&step)) {
      add(f.streams, 0);
      if (comm || o.bound[a->slot.index()]) f.allocs.push_back(a->slot.value);
    } else {
      const SlotId slot = std::get<FreeSlot>(step).slot;
      add(f.streams, 0);
      if (comm || o.bound[slot.index()]) f.frees.push_back(slot.value);
    }
    if (comm) o.parts.push_back(std::move(part));
  }
  if (!comm) o.parts.push_back(std::move(all));
  return o;
}

void MessageChecker::walk(int r) {
  const Role& role = plan_.roles[static_cast<size_t>(r)];
  stream_clock_.assign(plan_.streams.size(), Clock{});
  order_clock_.assign(2 * plan_.comms.size(), Clock{});
  buffer_windows_.clear();
  for (size_t b = 0; b < role.buffers.size(); ++b) buffer_windows_.push_back(window_of(role, BufferId(static_cast<int32_t>(b))));
  buffer_cells_.assign(role.buffers.size(), {});
  queues_.emplace_back(plan_.streams.size());
  done_.emplace_back(plan_.streams.size(), 0);
  for (const Item& item : role.program) {
    if (report_.full()) return;
    if (const Call* call = std::get_if<Call>(&item)) {
      const Segment& segment = plan_.segments[call->segment.index()];
      const Outline& o = outlines_[call->segment.index()];
      local_cells_.assign(segment.slots.size(), {});
      for (const Footprint& part : o.parts) run_part(r, *call, segment, o, part);
    } else if (const auto* alloc = std::get_if<Alloc>(&item)) {
      auto& cells = buffer_cells_[alloc->buffer.index()];
      cells.assign(1, Cell{0, role.buffers[alloc->buffer.index()].type.shape.elements(), stream_clock_[0], stream_clock_[0]});
    } else {
      for (const Cell& c : buffer_cells_[std::get<Free>(item).buffer.index()]) join(stream_clock_[0], c.touched);
    }
  }
}

std::vector<Cell>& MessageChecker::cells_of(const Call& call, const Outline& o, int32_t slot, int64_t& begin, int64_t& end) {
  const Window& w = o.windows[static_cast<size_t>(slot)];
  begin = w.begin;
  AxisSet shard = w.shard;
  std::vector<Cell>* cells = &local_cells_[static_cast<size_t>(w.root)];
  if (o.bound[static_cast<size_t>(slot)]) {
    const Window& b = buffer_windows_[call.binding[static_cast<size_t>(w.root)].index()];
    begin += b.begin;
    shard = shard | b.shard;
    cells = &buffer_cells_[static_cast<size_t>(b.root)];
  }
  end = begin + w.length * plan_.mesh.size(shard);
  return *cells;
}

/// Makes [begin, end) a run of cells; the index of the first.
size_t MessageChecker::cut(std::vector<Cell>& cells, int64_t begin, int64_t end) {
  if (cells.size() == 1 && cells[0].begin == begin && cells[0].end == end) return 0;
  if (cells.empty()) {
    cells.push_back({begin, end, {}, {}});
    return 0;
  }
  for (const int64_t border : {begin, end})
    for (size_t i = 0; i < cells.size(); ++i)
      if (cells[i].begin < border && border < cells[i].end) {
        Cell right = cells[i];
        right.begin = cells[i].end = border;
        cells.insert(cells.begin() + static_cast<std::ptrdiff_t>(i) + 1, right);
        break;
      }
  int64_t covered = begin;  // persistent storage has no cells until it is touched
  for (size_t i = 0; covered < end; ++i) {
    if (i < cells.size() && cells[i].end <= covered) continue;
    const int64_t next = i < cells.size() ? std::min(end, cells[i].begin) : end;
    if (next > covered) cells.insert(cells.begin() + static_cast<std::ptrdiff_t>(i), Cell{covered, next, {}, {}});
    covered = cells[i].end;
  }
  return static_cast<size_t>(std::ranges::find(cells, begin, &Cell::begin) - cells.begin());
}

void MessageChecker::run_part(int role, const Call& call, const Segment& segment, const Outline& o, const Footprint& part) {
  Clock clock{};
  for (const int32_t s : part.streams) join(clock, stream_clock_[static_cast<size_t>(s)]);
  for (const int32_t o : part.orders) join(clock, order_clock_[static_cast<size_t>(o)]);
  int64_t begin = 0, end = 0;
  for (const int32_t slot : part.allocs) {
    auto& cells = cells_of(call, o, slot, begin, end);
    cells.assign(1, Cell{begin, end, stream_clock_[0], stream_clock_[0]});
  }
  for (const int32_t slot : part.reads) {
    auto& cells = cells_of(call, o, slot, begin, end);
    for (size_t i = cut(cells, begin, end); i < cells.size() && cells[i].begin < end; ++i) join(clock, cells[i].written);
  }
  for (const int32_t slot : part.writes) {
    auto& cells = cells_of(call, o, slot, begin, end);
    for (size_t i = cut(cells, begin, end); i < cells.size() && cells[i].begin < end; ++i) join(clock, cells[i].touched);
  }
  for (const int32_t slot : part.frees)
    for (const Cell& c : cells_of(call, o, slot, begin, end)) join(clock, c.touched);
  if (part.op != nullptr) {
    record(role, call, segment, part, clock);
    const auto stream = static_cast<size_t>(part.op->stream.index());
    clock[stream] = static_cast<int32_t>(queues_[static_cast<size_t>(role)][stream].size());
  }
  for (const int32_t s : part.streams) stream_clock_[static_cast<size_t>(s)] = clock;
  for (const int32_t o : part.orders) order_clock_[static_cast<size_t>(o)] = clock;
  for (const int32_t slot : part.reads) {
    auto& cells = cells_of(call, o, slot, begin, end);
    for (size_t i = cut(cells, begin, end); i < cells.size() && cells[i].begin < end; ++i) join(cells[i].touched, clock);
  }
  for (const int32_t slot : part.writes) {
    auto& cells = cells_of(call, o, slot, begin, end);
    for (size_t i = cut(cells, begin, end); i < cells.size() && cells[i].begin < end; ++i)
      cells[i].written = cells[i].touched = clock;
  }
}

void MessageChecker::record(int role, const Call& call, const Segment& segment, const Footprint& part, const Clock& clock) {
  CommOp c;
  c.role = role;
  c.segment = &segment;
  c.op = part.op;
  c.call = &call;
  c.needs = clock;
  c.stream = part.op->stream.value;
  auto& queue = queues_[static_cast<size_t>(role)][part.op->stream.index()];
  c.order = static_cast<int32_t>(queue.size());
  if (const auto* s = std::get_if<Send>(&part.op->work)) {
    c.comm = s->comm;
    c.hop = s->hop;
    c.peer = peer_of(plan_, role, plan_.comms[s->comm.index()], s->hop, s->cyclic);
    c.slot = part.op->reads[0];
  } else if (const auto* r = std::get_if<Recv>(&part.op->work)) {
    c.kind = CommOp::Kind::kRecv;
    c.comm = r->comm;
    c.hop = -r->hop;
    c.peer = peer_of(plan_, role, plan_.comms[r->comm.index()], r->hop, r->cyclic);
    c.slot = part.op->writes[0];
  } else {
    c.kind = CommOp::Kind::kCollective;
    c.comm = std::get<Collective>(part.op->work).comm;
    c.slot = part.op->reads[0];
  }
  const Comm& comm = plan_.comms[c.comm.index()];
  if (c.kind != CommOp::Kind::kCollective) {
    if (comm.axes.size() != 1)
      fault(c, "`{}` has {} axes: a hop needs exactly one", comm.name, comm.axes.size());
    else if (c.hop == 0)
      fault(c, "a hop of 0 leads to the rank itself");
    else if (c.peer < 0 && !joins_roles(plan_, comm))
      fault(c, "every rank along `{}` issues it, so the last has no peer: the hop must be cyclic", comm.name);
    else if (c.peer < 0)
      fault(c, "stage {} has no peer {} hops along `{}`", role, c.kind == CommOp::Kind::kSend ? c.hop : -c.hop, comm.name);
  }
  queue.push_back(static_cast<int32_t>(ops_.size()));
  ops_.push_back(c);
}

/// Sends and receives by communicator and pair, in order; collectives by communicator.
void MessageChecker::match() {
  std::map<std::tuple<int32_t, int, int, int>, std::pair<std::vector<int32_t>, std::vector<int32_t>>> pairs;
  std::map<int32_t, std::map<int, std::vector<int32_t>>> collectives;
  for (size_t i = 0; i < ops_.size(); ++i) {
    const CommOp& c = ops_[i];
    const int line = c.kind == CommOp::Kind::kCollective ? 0 : line_of(plan_, plan_.comms[c.comm.index()], c.hop);
    if (c.kind == CommOp::Kind::kSend)
      pairs[{c.comm.value, c.role, c.peer, line}].first.push_back(static_cast<int32_t>(i));
    else if (c.kind == CommOp::Kind::kRecv)
      pairs[{c.comm.value, c.peer, c.role, line}].second.push_back(static_cast<int32_t>(i));
    else
      collectives[c.comm.value][c.role].push_back(static_cast<int32_t>(i));
  }
  for (const auto& [key, both] : pairs) match_pair(both.first, both.second);
  for (const auto& [comm, by_role] : collectives) match_collectives(CommId(comm), by_role);
}

void MessageChecker::match_pair(const std::vector<int32_t>& sends, const std::vector<int32_t>& receives) {
  const size_t both = std::min(sends.size(), receives.size());
  for (size_t i = 0; i < both && !report_.full(); ++i) {
    compare(ops_[static_cast<size_t>(sends[i])], ops_[static_cast<size_t>(receives[i])]);
    const auto id = static_cast<int32_t>(meetings_.size());
    ops_[static_cast<size_t>(sends[i])].meeting = ops_[static_cast<size_t>(receives[i])].meeting = id;
    meetings_.push_back({{sends[i], receives[i]}, {}});
    if (i > 0) meetings_.back().after.push_back(id - 1);
  }
  for (size_t i = both; i < sends.size() && !report_.full(); ++i) {
    const CommOp& c = ops_[static_cast<size_t>(sends[i])];
    fault(c, "stage {} never receives it: {} sends meet {} receives on `{}`", c.peer, sends.size(), receives.size(),
          plan_.comms[c.comm.index()].name);
  }
  for (size_t i = both; i < receives.size() && !report_.full(); ++i) {
    const CommOp& c = ops_[static_cast<size_t>(receives[i])];
    fault(c, "stage {} never sends it: {} sends meet {} receives on `{}`", c.peer, sends.size(), receives.size(),
          plan_.comms[c.comm.index()].name);
  }
}

std::string_view message_name(std::string_view label) {
  for (const std::string_view prefix : {"send", "receive", "recv"})
    if (label.starts_with(prefix)) {
      label.remove_prefix(prefix.size());
      return label.starts_with('.') ? label.substr(1) : label;
    }
  return label;
}

/// Both sides of a message agree on what it is. Along a cyclic hop a block travels, so a shard may arrive as local and come home as
/// a shard; that it makes the whole round is up to the kernels between.
void MessageChecker::compare(const CommOp& send, const CommOp& receive) {
  const Type &s = type(send), &r = type(receive);
  const AxisSet along = plan_.comms[send.comm.index()].axes;
  const bool round = send.role == send.peer;
  if (s.dtype != r.dtype || s.shape != r.shape)
    return fault(receive, "%{} is a message of {} bytes, but stage {} sends {} (another shape or element type)",
                 receive.segment->slots[receive.slot.index()].name, r.bytes(), send.role, s.bytes());
  for (size_t a = 0; a < plan_.mesh.axes.size(); ++a) {
    if (plan_.mesh.axes[a].size == 1 || s.place[a] == r.place[a]) continue;
    const bool travels = round && along.contains(static_cast<int>(a)) && !s.place[a].is_partial() && !r.place[a].is_partial();
    if (!travels)
      return fault(receive, "along {}: it is {}, but stage {} sends {}", plan_.mesh.axes[a].name, placement_name(r.place[a]),
                   send.role, placement_name(s.place[a]));
  }
  if (s.scale != r.scale)
    return fault(receive, "its scale is {}, but stage {} sends scale {}", scale_name(r.scale), send.role, scale_name(s.scale));
  if (s.micro != r.micro)
    return fault(receive, "it is micro:{}, but stage {} sends micro:{}", name_of(r.micro), send.role, name_of(s.micro));
  if (s.micro == Micro::kSlice && send.call->micro_batch != receive.call->micro_batch)
    return fault(receive, "it waits for micro-batch {}, but what stage {} sends then is of micro-batch {}",
                 receive.call->micro_batch, send.role, send.call->micro_batch);
  if (message_name(send.op->label) != message_name(receive.op->label))
    fault(receive, "it waits for `{}`, but what stage {} sends then is `{}`", message_name(receive.op->label), send.role,
          message_name(send.op->label));
}

/// The difference between two stages' sides of one collective: both must hold the same kind of buffers. Empty if they agree.
std::string MessageChecker::difference(const CommOp& first, const CommOp& other) const {
  const auto differ = [&](std::span<const SlotId> a, std::span<const SlotId> b) -> std::string {
    for (size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
      const Type &s = first.segment->slots[a[i].index()].type, &t = other.segment->slots[b[i].index()].type;
      if (s.dtype != t.dtype || s.shape != t.shape) return "the shape or element type is another";
      if (s.scale != t.scale) return fmt::format("the scale is {} and not {}", scale_name(s.scale), scale_name(t.scale));
      if (s.micro != t.micro) return fmt::format("it is micro:{} and not micro:{}", name_of(s.micro), name_of(t.micro));
      for (size_t axis = 0; axis < plan_.mesh.axes.size(); ++axis)
        if (plan_.mesh.axes[axis].size > 1 && s.place[axis] != t.place[axis])
          return fmt::format("along {} it is {} and not {}", plan_.mesh.axes[axis].name, placement_name(s.place[axis]),
                             placement_name(t.place[axis]));
      if (s.micro == Micro::kSlice && first.call->micro_batch != other.call->micro_batch)
        return fmt::format("it is of micro-batch {} and not {}", first.call->micro_batch, other.call->micro_batch);
    }
    return a.size() == b.size() ? "" : "there are other operands";
  };
  const std::string reads = differ(first.op->reads, other.op->reads);
  return reads.empty() ? differ(first.op->writes, other.op->writes) : reads;
}

void MessageChecker::match_collectives(CommId comm, const std::map<int, std::vector<int32_t>>& by_role) {
  const Comm& c = plan_.comms[comm.index()];
  if (!c.groups.empty()) {
    for (const std::vector<int>& group : c.groups) match_group(c, group, by_role);
    return;
  }
  std::vector<int> all(plan_.roles.size());
  std::iota(all.begin(), all.end(), 0);
  match_group(c, all, by_role);
}

/// The n-th collective of each role of a group is the n-th of every other.
void MessageChecker::match_group(const Comm& c, const std::vector<int>& group, const std::map<int, std::vector<int32_t>>& by_role) {
  size_t most = 0;
  for (const int role : group)
    if (const auto found = by_role.find(role); found != by_role.end()) most = std::max(most, found->second.size());
  if (most > 0 && group.size() == 1)
    return fault(ops_[static_cast<size_t>(by_role.at(group[0])[0])], "stage {} stands alone in `{}`", group[0], c.name);
  for (size_t i = 0; i < most && !report_.full(); ++i) {
    Meeting m;
    const CommOp* first = nullptr;
    for (const int role : group) {
      const auto found = by_role.find(role);
      if (found == by_role.end() || i >= found->second.size()) {
        const auto present = std::ranges::find_if(by_role, [&](const auto& entry) {
          return i < entry.second.size() && std::ranges::find(group, entry.first) != group.end();
        });
        return fault(ops_[static_cast<size_t>(present->second[i])], "stage {} never joins it: its collective number {} on `{}`",
                     role, i + 1, c.name);
      }
      CommOp& op = ops_[static_cast<size_t>(found->second[i])];
      op.meeting = static_cast<int32_t>(meetings_.size());
      m.ops.push_back(found->second[i]);
      if (first == nullptr) first = &op;
      const auto &a = std::get<Collective>(first->op->work), &b = std::get<Collective>(op.op->work);
      if (a.kind != b.kind || a.reduce != b.reduce || a.algorithm != b.algorithm || a.root != b.root || a.per_node != b.per_node ||
          a.room != b.room || a.across != b.across || first->op->label != op.op->label)
        return fault(op, "it meets {} on stage {}, which is another collective", op_name(*first->segment, *first->op, *first->call),
                     first->role);
      if (const std::string other = difference(*first, op); !other.empty())
        return fault(op, "it meets {} on stage {}, where {}", op_name(*first->segment, *first->op, *first->call), first->role,
                     other);
    }
    if (i > 0) m.after.push_back(static_cast<int32_t>(meetings_.size()) - 1);
    meetings_.push_back(std::move(m));
  }
}

bool MessageChecker::ready(const CommOp& c) const {
  const auto& done = done_[static_cast<size_t>(c.role)];
  if (done[static_cast<size_t>(c.stream)] != c.order) return false;
  for (size_t s = 0; s < done.size(); ++s)
    if (done[s] < c.needs[s]) return false;
  return true;
}

/// Runs meetings until nothing moves. A completed meeting can only enable the next ops of its own roles, so those are tried again.
void MessageChecker::play() {
  std::vector<bool> met(meetings_.size());
  std::vector<int> roles;
  for (int r = static_cast<int>(plan_.roles.size()); r-- > 0;) roles.push_back(r);
  while (!roles.empty()) {
    const int r = roles.back();
    roles.pop_back();
    for (size_t s = 0; s < plan_.streams.size(); ++s) {
      const auto& queue = queues_[static_cast<size_t>(r)][s];
      const auto at = static_cast<size_t>(done_[static_cast<size_t>(r)][s]);
      if (at >= queue.size()) continue;
      const auto m = static_cast<size_t>(ops_[static_cast<size_t>(queue[at])].meeting);
      const Meeting& meeting = meetings_[m];
      const bool in_order = std::ranges::all_of(meeting.after, [&](int32_t before) { return met[static_cast<size_t>(before)]; });
      if (!in_order || !std::ranges::all_of(meeting.ops, [&](int32_t op) { return ready(ops_[static_cast<size_t>(op)]); }))
        continue;
      met[m] = true;
      for (const int32_t op : meeting.ops) {
        CommOp& c = ops_[static_cast<size_t>(op)];
        c.done = true;
        ++done_[static_cast<size_t>(c.role)][static_cast<size_t>(c.stream)];
        roles.push_back(c.role);
      }
    }
  }
  if (!std::ranges::all_of(met, [](bool b) { return b; })) report_deadlock();
}

std::string MessageChecker::cell_text(const CommOp& c) const {
  std::string text = fmt::format("{} {}",
                                 c.kind == CommOp::Kind::kSend   ? "send"
                                 : c.kind == CommOp::Kind::kRecv ? "recv"
                                                                 : kind_of(c.op->work),
                                 plan_.comms[c.comm.index()].name);
  if (c.call->micro_batch >= 0) text += fmt::format(" m{}", c.call->micro_batch);
  return text;
}

/// The grid of steps by stages around where each stands still: `ok` is done, `>>` waits, the rest is behind it. Of many stages it
/// shows those around the first that waits.
void MessageChecker::report_deadlock() {
  constexpr size_t kBefore = 2, kAfter = 4, kMaxStages = 8;
  const CommOp* culprit = nullptr;
  for (const CommOp& c : ops_)
    if (!c.done && (culprit == nullptr || c.role < culprit->role)) culprit = &c;
  const size_t stages = std::min(plan_.roles.size(), kMaxStages);
  const size_t first = std::min(static_cast<size_t>(culprit->role) - std::min(static_cast<size_t>(culprit->role), kBefore),
                                plan_.roles.size() - stages);
  std::vector<std::vector<std::string>> columns(stages);
  for (size_t column = 0; column < stages; ++column) {
    const size_t r = first + column;
    std::vector<const CommOp*> mine;
    for (const CommOp& c : ops_)
      if (c.role == static_cast<int>(r)) mine.push_back(&c);
    const auto waits = std::ranges::find_if(mine, [](const CommOp* c) { return !c->done; });
    const size_t at = static_cast<size_t>(waits - mine.begin());
    for (size_t i = at - std::min(at, kBefore); i < std::min(mine.size(), at + kAfter); ++i) {
      const bool head = !mine[i]->done && done_[r][static_cast<size_t>(mine[i]->stream)] == mine[i]->order;
      columns[column].push_back(fmt::format("{} {}", mine[i]->done ? "ok" : head ? ">>" : "  ", cell_text(*mine[i])));
    }
  }
  std::string grid;
  size_t rows = 0, width = 10;
  for (const auto& column : columns) {
    rows = std::max(rows, column.size());
    for (const std::string& cell : column) width = std::max(width, cell.size());
  }
  grid += "deadlock: every rank waits.";
  grid += "\n    step";
  for (size_t column = 0; column < stages; ++column)
    grid += fmt::format("  {:<{}}", fmt::format("stage {}", first + column), width);
  while (grid.ends_with(' ')) grid.pop_back();
  for (size_t row = 0; row < rows; ++row) {
    grid += fmt::format("\n    {:>4}", row);
    for (const auto& column : columns) grid += fmt::format("  {:<{}}", row < column.size() ? column[row] : "", width);
    while (grid.ends_with(' ')) grid.pop_back();
  }
  for (size_t r = first; r < first + stages; ++r)
    for (size_t s = 0; s < plan_.streams.size(); ++s) {
      const auto at = static_cast<size_t>(done_[r][s]);
      if (at >= queues_[r][s].size()) continue;
      const CommOp& head = ops_[static_cast<size_t>(queues_[r][s][at])];
      std::string why = head.kind == CommOp::Kind::kCollective ? "its group" : fmt::format("stage {}", head.peer);
      for (size_t other = 0; other < plan_.streams.size(); ++other)
        if (done_[r][other] < head.needs[other])
          why = "its own " + cell_text(ops_[static_cast<size_t>(queues_[r][other][static_cast<size_t>(head.needs[other]) - 1])]);
      grid += fmt::format("\n    stage {} stream {}: {} waits for {}", r, plan_.streams[s], cell_text(head), why);
    }
  if (stages < plan_.roles.size()) grid += fmt::format("\n    {} more stages are not shown", plan_.roles.size() - stages);
  fault(*culprit, "{}", grid);
}

}  // namespace

void check_messages(const Plan& plan, Report& report) { MessageChecker(plan, report).run(); }

}  // namespace shardlab::verifying
