// Rules 5 and 7, order and memory.
//
// Order is proved on the expanded program, not on the plan: issue order is itself an order in which every edge of the text can be
// kept, so a plan cannot contain a cycle; what can go wrong is an expansion that lost an edge. `find_unordered` looks for
// accesses that touch the same bytes, at least one of them writing, with no chain of stream order and waits between them. It shares
// nothing with `expand_program` but the instructions: clocks are rebuilt from the waits that are really there.
#include <algorithm>
#include <array>

#include "plan/memory.h"
#include "plan/program.h"
#include "plan/verify_internal.h"

namespace shardlab {
namespace {

using Clock = std::array<int32_t, kMaxStreams>;

struct Access {
  int64_t begin = 0, end = 0;
  int32_t instruction = -1;
  int32_t stream = 0;
  int32_t count = 0;  ///< instructions that its stream has completed with it
  bool write = false;
};

class RaceFinder {
 public:
  RaceFinder(const Plan& plan, const Program& program) : plan_(plan), program_(program) {
    const auto n = plan.roles[static_cast<size_t>(program.role)].buffers.size();
    roots_.resize(n);
    locals_.resize(program.locals.size());
    tails_.resize(plan.streams.size());
    last_of_order_.assign(2 * plan.comms.size(), -1);
    finished_.resize(plan.streams.size());
  }

  std::vector<Finding> run() {
    for (const Instruction& i : program_.instructions) {
      if (findings_.size() >= kLimit) break;
      step(i);
    }
    return std::move(findings_);
  }

 private:
  static constexpr size_t kLimit = 20;

  void step(const Instruction& i) {
    const auto stream = static_cast<size_t>(i.stream);
    Clock clock = tails_[stream];
    for (const Wait& w : program_.waits_of(i)) {
      clock[static_cast<size_t>(w.stream)] = std::max(clock[static_cast<size_t>(w.stream)], w.count);
      const auto& history = finished_[static_cast<size_t>(w.stream)];
      if (w.count < 1) continue;
      if (static_cast<size_t>(w.count) > history.size()) {
        add(i, fmt::format("it waits for instruction {} of stream {}, which is issued after it", w.count,
                           plan_.streams[static_cast<size_t>(w.stream)]));
        continue;
      }
      for (size_t s = 0; s < clock.size(); ++s) clock[s] = std::max(clock[s], history[static_cast<size_t>(w.count) - 1][s]);
    }
    access(i, clock);
    keep_order(i, clock);
    clock[stream] = i.sequence + 1;
    tails_[stream] = clock;
    finished_[stream].push_back(clock);
  }

  /// Ops of one communicator run one after the other.
  void keep_order(const Instruction& i, const Clock& clock) {
    const int order = i.op == nullptr ? -1 : verifying::order_of(*i.op);
    if (order < 0) return;
    int32_t& last = last_of_order_[static_cast<size_t>(order)];
    if (last >= 0) {
      const Instruction& before = program_.instructions[static_cast<size_t>(last)];
      if (before.stream != i.stream && clock[static_cast<size_t>(before.stream)] <= before.sequence)
        add(i, fmt::format("it shares a communicator with {} on stream {}, and nothing makes it wait", describe(plan_, before),
                           plan_.streams[static_cast<size_t>(before.stream)]));
    }
    last = i.id;
  }

  void access(const Instruction& i, const Clock& clock) {
    if (i.kind != Instruction::Kind::kRun) {  // an alloc and a free are writes of the whole storage
      const bool local = i.local >= 0;
      touch(i, clock, local ? locals_[static_cast<size_t>(i.local)] : roots_[i.buffer.index()], 0, INT64_MAX, true);
      return;
    }
    const auto operand = [&](const Operand& o, bool write) {
      auto& list = o.local >= 0 ? locals_[static_cast<size_t>(o.local)] : roots_[o.root.index()];
      const int64_t parts = plan_.mesh.size(o.shard_axes);
      touch(i, clock, list, o.offset, o.offset + o.bytes + (parts - 1) * (o.shard_axes.empty() ? o.bytes : o.shard_stride), write);
    };
    for (const Operand& o : program_.reads(i)) operand(o, false);
    if (i.predicate) operand(program_.operands[i.first_operand + i.reads + i.writes], false);
    for (const Operand& o : program_.writes(i)) operand(o, true);
  }

  void touch(const Instruction& i, const Clock& clock, std::vector<Access>& list, int64_t begin, int64_t end, bool write) {
    for (const Access& a : list) {
      const bool conflict = a.begin < end && begin < a.end && (a.write || write) && a.instruction != i.id;
      if (!conflict || a.stream == i.stream || clock[static_cast<size_t>(a.stream)] >= a.count) continue;
      add(i, fmt::format("it {} bytes that {} {} on stream {}, and nothing makes it wait", write ? "writes" : "reads",
                         describe(plan_, program_.instructions[static_cast<size_t>(a.instruction)]), a.write ? "writes" : "reads",
                         plan_.streams[static_cast<size_t>(a.stream)]));
      break;
    }
    // Whoever conflicts with an access that this write covers conflicts with this write too.
    if (write)
      std::erase_if(list, [&](const Access& a) { return begin <= a.begin && a.end <= end; });
    else
      std::erase_if(list, [&](const Access& a) { return !a.write && a.stream == i.stream && begin <= a.begin && a.end <= end; });
    list.push_back({begin, end, i.id, i.stream, i.sequence + 1, write});
  }

  void add(const Instruction& i, std::string message) {
    findings_.push_back({Rule::kOrder, program_.role, describe(plan_, i), std::move(message)});
  }

  const Plan& plan_;
  const Program& program_;
  std::vector<std::vector<Access>> roots_, locals_;
  std::vector<Clock> tails_;
  std::vector<int32_t> last_of_order_;        ///< by order of a communicator: its last instruction
  std::vector<std::vector<Clock>> finished_;  ///< by stream: what is known complete when its n-th instruction is
  std::vector<Finding> findings_;
};

}  // namespace

std::vector<Finding> find_unordered(const Plan& plan, const Program& program) { return RaceFinder(plan, program).run(); }

namespace verifying {

void check_memory(const Plan& plan, const std::array<int64_t, kSpaces>& budget, Report& report) {
  for (size_t r = 0; r < plan.roles.size() && !report.full(); ++r) {
    const auto peaks = memory_peak(plan, static_cast<int>(r));
    for (size_t s = 0; s < kSpaces; ++s)
      if (peaks[s].peak_bytes > budget[s])
        report.add(
            Rule::kMemory, static_cast<int>(r), "",
            fmt::format("it needs {} bytes of {} memory, {} more than the {} there are; the peak is at {}", peaks[s].peak_bytes,
                        shardlab::name_of(static_cast<Space>(s)), peaks[s].peak_bytes - budget[s], budget[s], peaks[s].moment));
  }
}

}  // namespace verifying
}  // namespace shardlab
