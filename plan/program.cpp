// Expansion of a role's program, and the edges between its streams.
//
// Storage is followed by byte range. The bytes of one owner (a buffer that is no view, or a local of a call) are cut into
// cells at the borders of the ranges that were touched; a cell remembers its last write and, by stream, the last read
// since. A read waits for the write; a write waits for the write and the reads, and becomes the only thing that the cell
// remembers, since whoever conflicts with the older accesses conflicts with it too.
//
// Each stream carries a vector clock: how many instructions of every other stream are known to be complete. A wait that the
// clock already covers is dropped, and so is one that another wait of the same instruction brings along.

#include "plan/program.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "plan/program_order.h"

namespace shardlab {
namespace {

/// Where a name's bytes lie within their owner.
struct Stretch {
  int32_t owner = -1;  ///< index of the owning buffer or slot
  int64_t offset = 0;
  int64_t bytes = 0;
  AxisSet shard_axes;
  int64_t shard_stride = 0;
};

/// Regions of all entries of a table in which views name their base by index.
template <class Entry>
std::vector<Stretch> resolve_views(const std::vector<Entry>& table) {
  std::vector<Stretch> places(table.size());
  for (size_t i = 0; i < table.size(); ++i) {
    Stretch& p = places[i];
    p.bytes = table[i].type.bytes();
    size_t at = i;
    for (size_t depth = 0; table[at].view; ++depth) {
      const View& view = *table[at].view;
      SHARDLAB_CHECK(depth < table.size() && view.base >= 0 && static_cast<size_t>(view.base) < table.size(),
                     "the base of view %{} does not exist or leads back to it", table[i].name);
      p.offset += bytes_of(table[at].type.dtype, view.offset);
      if (!view.shard_axes.empty()) {
        SHARDLAB_CHECK(p.shard_axes.empty(), "%{} is a shard of a shard", table[i].name);
        p.shard_axes = view.shard_axes;
        p.shard_stride = table[at].type.bytes();
      }
      at = static_cast<size_t>(view.base);
    }
    p.owner = static_cast<int32_t>(at);
  }
  return places;
}

/// Last accesses of the bytes [begin, end) of one owner. `count` of an access is its position in its stream plus one.
struct Cell {
  int64_t begin = 0;
  int64_t end = 0;
  int32_t write_stream = -1;
  int32_t write_count = 0;
  std::array<int32_t, kMaxStreams> reads{};  ///< by stream; 0 for none
};

/// The instructions that must be complete before an instruction: by stream, a count.
using Needs = std::array<int32_t, kMaxStreams>;

/// The cells of one owner, disjoint and ascending; bytes never touched have none.
class Cells {
 public:
  void clear() { cells_.clear(); }

  void read(int64_t begin, int64_t end, int stream, int32_t count, Needs& needs) {
    for (size_t i = cover(begin, end); i < cells_.size() && cells_[i].begin < end; ++i) {
      need_write(cells_[i], needs);
      cells_[i].reads[static_cast<size_t>(stream)] = count;
    }
  }

  void write(int64_t begin, int64_t end, int stream, int32_t count, int streams, Needs& needs) {
    const size_t first = cover(begin, end);
    size_t last = first;
    for (; last < cells_.size() && cells_[last].begin < end; ++last) {
      need_write(cells_[last], needs);
      for (int s = 0; s < streams; ++s) {
        int32_t& need = needs[static_cast<size_t>(s)];
        need = std::max(need, cells_[last].reads[static_cast<size_t>(s)]);
      }
    }
    Cell& cell = cells_[first];
    cell = Cell{.begin = begin, .end = end, .write_stream = stream, .write_count = count};
    cells_.erase(cells_.begin() + static_cast<std::ptrdiff_t>(first) + 1, cells_.begin() + static_cast<std::ptrdiff_t>(last));
  }

 private:
  static void need_write(const Cell& cell, Needs& needs) {
    if (cell.write_stream < 0) return;
    int32_t& need = needs[static_cast<size_t>(cell.write_stream)];
    need = std::max(need, cell.write_count);
  }

  /// Cuts cells at `begin` and `end` and adds empty ones where [begin, end) has none, so that cells tile it. Returns the first.
  size_t cover(int64_t begin, int64_t end) {
    if (cells_.size() == 1 && cells_[0].begin == begin && cells_[0].end == end) return 0;  // whole buffers: nearly always
    cut(begin);
    cut(end);
    const auto at = std::lower_bound(cells_.begin(), cells_.end(), begin, [](const Cell& c, int64_t v) { return c.begin < v; });
    const size_t first = static_cast<size_t>(at - cells_.begin());
    int64_t reached = begin;
    for (size_t i = first; reached < end; ++i) {
      const int64_t next = i < cells_.size() ? std::min(cells_[i].begin, end) : end;
      if (next > reached) cells_.insert(cells_.begin() + static_cast<std::ptrdiff_t>(i), Cell{.begin = reached, .end = next});
      reached = cells_[i].end;
    }
    return first;
  }

  void cut(int64_t at) {
    const auto after = std::upper_bound(cells_.begin(), cells_.end(), at, [](int64_t v, const Cell& c) { return v < c.begin; });
    if (after == cells_.begin()) return;
    const auto cell = after - 1;
    if (cell->begin == at || cell->end <= at) return;
    Cell right = *cell;
    right.begin = at;
    cell->end = at;
    cells_.insert(after, right);
  }

  std::vector<Cell> cells_;
};

class Expander {
 public:
  Expander(const Plan& plan, int role_index, bool all_operands)
      : plan_(plan),
        role_(plan.roles[static_cast<size_t>(role_index)]),
        streams_(static_cast<int>(plan.streams.size())),
        all_operands_(all_operands) {
    SHARDLAB_CHECK(streams_ >= 1 && streams_ <= kMaxStreams, "a plan has 1 to {} streams, not {}", kMaxStreams, streams_);
    program_.role = role_index;
    program_.streams.resize(static_cast<size_t>(streams_));
    buffers_ = resolve_views(role_.buffers);
    for (const Segment& segment : plan.segments) slots_.push_back(resolve_views(segment.slots));
    buffer_cells_.resize(role_.buffers.size());
    comm_last_.resize(plan.comms.size() * 2, {-1, 0});
    known_.resize(static_cast<size_t>(streams_), Needs{});
    reserve();
  }

  Program run() {
    for (const Item& item : role_.program) {
      ++item_;
      std::visit(Overload{
                     [&](const Call& call) { expand(call); },
                     [&](const Alloc& a) { control(Instruction::Kind::kAlloc, a.buffer); },
                     [&](const Free& f) { control(Instruction::Kind::kFree, f.buffer); },
                 },
                 item);
    }
    return std::move(program_);
  }

 private:
  /// The call being expanded.
  struct Frame {
    const Call* call = nullptr;
    const Segment* segment = nullptr;
    const std::vector<Stretch>* places = nullptr;
    int32_t index = -1;
  };

  void reserve() {
    size_t instructions = 0, operands = 0;
    for (const Item& item : role_.program) {
      const Call* call = std::get_if<Call>(&item);
      if (!call) {
        ++instructions;
        continue;
      }
      const Segment& segment = plan_.segments[call->segment.index()];
      instructions += segment.steps.size();
      for (const Step& step : segment.steps)
        if (const Op* op = std::get_if<Op>(&step)) operands += op->reads.size() + op->writes.size() + (op->when ? 1 : 0);
    }
    program_.instructions.reserve(instructions);
    if (all_operands_) program_.operands.reserve(operands);
    clocks_.reserve(instructions * static_cast<size_t>(streams_));
  }

  void expand(const Call& call) {
    Frame frame{&call, &plan_.segments[call.segment.index()], &slots_[call.segment.index()], item_};
    const auto& slots = frame.segment->slots;
    SHARDLAB_CHECK(call.binding.size() == slots.size(), "call {} of `{}` binds {} slots of {}", frame.index, frame.segment->name,
                   call.binding.size(), slots.size());
    local_of_slot_.assign(slots.size(), -1);
    if (local_cells_.size() < slots.size()) local_cells_.resize(slots.size());
    for (size_t s = 0; s < slots.size(); ++s) {
      if (slots[s].kind != SlotKind::kLocal || slots[s].view) continue;
      local_of_slot_[s] = static_cast<int32_t>(program_.locals.size());
      local_cells_[s].clear();
      program_.locals.push_back(
          {frame.index, SlotId(static_cast<int32_t>(s)), aligned(slots[s].type.bytes()), slots[s].space, slots[s].cls});
    }
    for (const Step& step : frame.segment->steps)
      std::visit(Overload{
                     [&](const Op& op) { run_op(frame, op); },
                     [&](const AllocSlot& a) { slot_control(frame, Instruction::Kind::kAlloc, a.slot); },
                     [&](const FreeSlot& f) { slot_control(frame, Instruction::Kind::kFree, f.slot); },
                 },
                 step);
  }

  /// Opens the next instruction on `stream`; `finish` closes it.
  Instruction& begin(Instruction::Kind kind, int stream) {
    Instruction& i = program_.instructions.emplace_back();
    i.kind = kind;
    i.role = program_.role;
    i.id = static_cast<int32_t>(program_.instructions.size()) - 1;
    i.stream = stream;
    auto& list = program_.streams[static_cast<size_t>(stream)];
    i.sequence = static_cast<int32_t>(list.size());
    list.push_back(i.id);
    i.first_operand = static_cast<uint32_t>(program_.operands.size());
    needs_ = Needs{};
    return i;
  }

  void attach(Instruction& i, const Frame& frame) {
    i.segment = frame.segment;
    i.call = frame.index;
    i.layer = frame.call->layer;
    i.micro_batch = frame.call->micro_batch;
  }

  void run_op(const Frame& frame, const Op& op) {
    Instruction& i = begin(Instruction::Kind::kRun, op.stream.value);
    attach(i, frame);
    i.op = &op;
    i.reads = static_cast<uint16_t>(op.reads.size());
    i.writes = static_cast<uint16_t>(op.writes.size());
    i.predicate = static_cast<bool>(op.when);
    for (const SlotId s : op.reads) touch(i, frame, s, false);
    for (const SlotId s : op.writes) touch(i, frame, s, true);
    if (op.when) touch(i, frame, op.when, false);
    const CommId comm = comm_of(op.work);
    if (!comm && !all_operands_) {
      program_.operands.resize(i.first_operand);
      i.reads = i.writes = 0;
      i.predicate = false;
    }
    if (comm) {
      const auto* recv = std::get_if<Recv>(&op.work);
      auto& [stream, count] = comm_last_[comm.index() * 2 + (recv != nullptr && recv->cyclic ? 1 : 0)];
      if (stream >= 0) needs_[static_cast<size_t>(stream)] = std::max(needs_[static_cast<size_t>(stream)], count);
      stream = i.stream;
      count = i.sequence + 1;
    }
    finish(i);
  }

  static CommId comm_of(const Work& work) {
    if (const auto* c = std::get_if<Collective>(&work)) return c->comm;
    if (const auto* s = std::get_if<Send>(&work)) return s->comm;
    if (const auto* r = std::get_if<Recv>(&work)) return r->comm;
    return CommId();
  }

  /// Adds the operand of slot `s` and what its access needs.
  void touch(const Instruction& i, const Frame& frame, SlotId s, bool write) {
    Operand& operand = program_.operands.emplace_back();
    const Stretch& place = (*frame.places)[s.index()];
    operand.type = &frame.segment->slots[s.index()].type;
    operand.offset = place.offset;
    operand.bytes = place.bytes;
    operand.shard_axes = place.shard_axes;
    operand.shard_stride = place.shard_stride;
    const size_t base = static_cast<size_t>(place.owner);
    Cells* cells = &local_cells_[base];
    operand.local = local_of_slot_[base];
    if (operand.local < 0) {
      const BufferId bound = frame.call->binding[base];
      SHARDLAB_CHECK(bound && bound.index() < buffers_.size(), "slot %{} of call {} of `{}` is bound to no buffer",
                     frame.segment->slots[base].name, frame.index, frame.segment->name);
      const Stretch& outer = buffers_[bound.index()];
      operand.root = BufferId(outer.owner);
      operand.offset += outer.offset;
      if (!outer.shard_axes.empty()) {
        SHARDLAB_CHECK(operand.shard_axes.empty(), "slot %{} of `{}` is a shard of a shard", frame.segment->slots[s.index()].name,
                       frame.segment->name);
        operand.shard_axes = outer.shard_axes;
        operand.shard_stride = outer.shard_stride;
      }
      cells = &buffer_cells_[operand.root.index()];
    }
    const int64_t reach =
        operand.bytes + (operand.shard_axes.empty() ? 0 : operand.shard_stride * (plan_.mesh.size(operand.shard_axes) - 1));
    if (reach > 0) access(*cells, i, operand.offset, operand.offset + reach, write);
  }

  void access(Cells& cells, const Instruction& i, int64_t begin, int64_t end, bool write) {
    if (write)
      cells.write(begin, end, i.stream, i.sequence + 1, streams_, needs_);
    else
      cells.read(begin, end, i.stream, i.sequence + 1, needs_);
  }

  void slot_control(const Frame& frame, Instruction::Kind kind, SlotId s) {
    const int32_t local = local_of_slot_[s.index()];
    if (local < 0) return control(kind, frame.call->binding[s.index()], &frame, s);
    Instruction& i = begin(kind, 0);
    attach(i, frame);
    i.slot = s;
    i.local = local;
    if (const int64_t bytes = frame.segment->slots[s.index()].type.bytes(); bytes > 0)
      access(local_cells_[s.index()], i, 0, bytes, true);
    finish(i);
  }

  void control(Instruction::Kind kind, BufferId buffer, const Frame* frame = nullptr, SlotId slot = SlotId()) {
    SHARDLAB_CHECK(buffer && buffer.index() < role_.buffers.size() && !role_.buffers[buffer.index()].view,
                   "item {} of stage {} allocates or frees a buffer that does not exist or is a view", item_, role_.stage);
    Instruction& i = begin(kind, 0);
    if (frame) attach(i, *frame);
    i.slot = slot;
    i.buffer = buffer;
    if (const int64_t bytes = role_.buffers[buffer.index()].type.bytes(); bytes > 0)
      access(buffer_cells_[buffer.index()], i, 0, bytes, true);
    finish(i);
  }

  const int32_t* clock_of(int stream, int32_t count) const {
    const int32_t id = program_.streams[static_cast<size_t>(stream)][static_cast<size_t>(count - 1)];
    return clocks_.data() + static_cast<size_t>(id) * static_cast<size_t>(streams_);
  }

  /// Turns what the instruction needs into waits, leaving out those that other knowledge implies, and records its clock.
  void finish(Instruction& i) {
    Needs& known = known_[static_cast<size_t>(i.stream)];
    needs_[static_cast<size_t>(i.stream)] = 0;
    i.first_wait = static_cast<uint32_t>(program_.waits.size());
    for (int s = 0; s < streams_; ++s)
      if (needs_[static_cast<size_t>(s)] <= known[static_cast<size_t>(s)]) needs_[static_cast<size_t>(s)] = 0;
    for (int s = 0; s < streams_; ++s)
      if (needs_[static_cast<size_t>(s)] > 0 && !implied(s)) program_.waits.push_back({s, needs_[static_cast<size_t>(s)]});
    i.waits = static_cast<uint32_t>(program_.waits.size()) - i.first_wait;
    for (const Wait& wait : program_.waits_of(i)) {
      const int32_t* clock = clock_of(wait.stream, wait.count);
      for (int s = 0; s < streams_; ++s) known[static_cast<size_t>(s)] = std::max(known[static_cast<size_t>(s)], clock[s]);
    }
    known[static_cast<size_t>(i.stream)] = i.sequence + 1;
    clocks_.insert(clocks_.end(), known.begin(), known.begin() + streams_);
  }

  /// Whether another wait of this instruction already brings what it needs of stream `s`.
  bool implied(int s) const {
    for (int other = 0; other < streams_; ++other)
      if (other != s && needs_[static_cast<size_t>(other)] > 0 &&
          clock_of(other, needs_[static_cast<size_t>(other)])[s] >= needs_[static_cast<size_t>(s)])
        return true;
    return false;
  }

  const Plan& plan_;
  const Role& role_;
  const int streams_;
  const bool all_operands_;  ///< or those of communication
  Program program_;
  std::vector<Stretch> buffers_;
  std::vector<std::vector<Stretch>> slots_;  ///< by segment
  std::vector<Cells> buffer_cells_;          ///< by owning buffer
  std::vector<Cells> local_cells_;           ///< by slot of the call being expanded
  std::vector<int32_t> local_of_slot_;       ///< likewise, into Program::locals
  /// By communicator (a ring's receives apart): stream and count of its last op.
  std::vector<std::pair<int32_t, int32_t>> comm_last_;
  std::vector<Needs> known_;     ///< by stream: the clock of its last instruction
  std::vector<int32_t> clocks_;  ///< by instruction and stream: complete once the instruction is
  Needs needs_{};
  int32_t item_ = -1;
};

std::string call_text(const Segment& segment, int layer, int micro_batch) {
  std::string out;
  if (layer >= 0) out += fmt::format("layers.{} ", layer);
  if (micro_batch >= 0) out += fmt::format("m{} ", micro_batch);
  return out + segment.name;
}

Program expand(const Plan& plan, int role, bool all_operands) {
  SHARDLAB_CHECK(role >= 0 && static_cast<size_t>(role) < plan.roles.size(), "role {} of {}", role, plan.roles.size());
  return Expander(plan, role, all_operands).run();
}

}  // namespace

Program expand_program(const Plan& plan, int role) { return expand(plan, role, true); }
Program expand_order(const Plan& plan, int role) { return expand(plan, role, false); }

std::string describe(const Plan& plan, const Instruction& i) {
  std::string out = i.segment ? call_text(*i.segment, i.layer, i.micro_batch) + " " : "";
  if (i.kind == Instruction::Kind::kRun) {
    static constexpr std::array<std::string_view, 4> kPhases{"", ".F", ".I", ".W"};
    return out + fmt::format("{} {}{}", i.op->label, kind_of(i.op->work), kPhases[static_cast<size_t>(phase_of(i.op->work))]);
  }
  const std::string& name =
      i.slot ? i.segment->slots[i.slot.index()].name : plan.roles[static_cast<size_t>(i.role)].buffers[i.buffer.index()].name;
  return out + (i.kind == Instruction::Kind::kAlloc ? "alloc %" : "free %") + name;
}

}  // namespace shardlab
