#include "tests/verify/call_mutations.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <utility>

#include "plan/base/hash.h"
#include "plan/program.h"
#include "plan/text.h"
#include "plan/verify.h"
#include "tests/namespaces.h"

namespace shardlab::testing {
namespace {

/// Bytes [begin, end) of a storage hold the bytes of a value from `shift` on.
struct Extent {
  int64_t begin = 0, end = 0;
  uint64_t value = 0;
  int64_t shift = 0;
};

/// One storage: extents that do not overlap, in order. What no op has written holds what the period began with.
class Contents {
 public:
  explicit Contents(uint64_t initial) : initial_(initial) {}

  uint64_t read(int64_t begin, int64_t end) const {
    uint64_t h = mix(static_cast<uint64_t>(end - begin));
    const auto take = [&](int64_t from, int64_t to, uint64_t value, int64_t shift) {
      h = mix(mix(h ^ value) + mix(static_cast<uint64_t>(from - begin)) + static_cast<uint64_t>(shift) * 3 +
              static_cast<uint64_t>(to - from));
    };
    int64_t done = begin;
    for (const Extent& e : extents_) {
      if (e.end <= begin || end <= e.begin) continue;
      const int64_t from = std::max(begin, e.begin), to = std::min(end, e.end);
      if (done < from) take(done, from, initial_, done);
      take(from, to, e.value, e.shift + from - e.begin);
      done = to;
    }
    if (done < end) take(done, end, initial_, done);
    return h;
  }

  void write(int64_t begin, int64_t end, uint64_t value) {
    std::vector<Extent> kept;
    for (const Extent& e : extents_) {
      if (e.begin < begin) kept.push_back({e.begin, std::min(e.end, begin), e.value, e.shift});
      if (e.end > end) kept.push_back({std::max(e.begin, end), e.end, e.value, e.shift + std::max(e.begin, end) - e.begin});
    }
    kept.push_back({begin, end, value, 0});
    std::ranges::sort(kept, {}, &Extent::begin);
    extents_ = std::move(kept);
  }

  /// The value that fills [begin, end) whole, or 0.
  uint64_t whole(int64_t begin, int64_t end) const {
    for (const Extent& e : extents_)
      if (e.begin == begin && e.end == end && e.shift == 0) return e.value;
    return 0;
  }

 private:
  uint64_t initial_;
  std::vector<Extent> extents_;
};

class Evaluation {
 public:
  Evaluation(const Plan& plan, int role)
      : plan_(plan), role_(plan.roles[static_cast<size_t>(role)]), program_(expand_program(plan, role)) {
    for (size_t b = 0; b < role_.buffers.size(); ++b) buffers_.emplace_back(mix(b + 1));
    for (size_t l = 0; l < program_.locals.size(); ++l) locals_.emplace_back(mix(~l));
  }

  uint64_t run() {
    for (const Instruction& i : program_.instructions) {
      if (i.kind == Instruction::Kind::kRun)
        play(i);
      else if (i.local < 0)
        buffers_[i.buffer.index()] = Contents(0);  // what is allocated holds nothing
    }
    uint64_t h = sent_;
    for (size_t b = 0; b < role_.buffers.size(); ++b)
      if (role_.buffers[b].persistent && !role_.buffers[b].view && role_.buffers[b].kind != BufferClass::kWorkspace)
        h = mix(h ^ buffers_[b].read(0, role_.buffers[b].type.bytes()));
    return h;
  }

 private:
  Contents& contents(const Operand& o) { return o.root ? buffers_[o.root.index()] : locals_[static_cast<size_t>(o.local)]; }
  /// The bytes that the group of the rank touches: of a shard, those of every rank's.
  std::pair<int64_t, int64_t> bytes(const Operand& o) const {
    const int64_t ranks = o.shard_axes.empty() ? 1 : plan_.mesh.size(o.shard_axes);
    return {o.offset, o.offset + o.bytes + (ranks - 1) * o.shard_stride};
  }
  uint64_t read(const Operand& o) {
    const auto [begin, end] = bytes(o);
    return mix(contents(o).read(begin, end) + o.shard_axes.mask);
  }

  void play(const Instruction& i) {
    const Op& op = *i.op;
    uint64_t h = mix(text_of(*i.segment, op));
    if (std::holds_alternative<LoadBatch>(op.work) || std::holds_alternative<Dropout>(op.work) ||
        std::holds_alternative<Kernel>(op.work))
      h = mix(h ^ mix(static_cast<uint64_t>(i.layer + 1) << 32 | static_cast<uint64_t>(i.micro_batch + 1)));
    for (const Operand& o : program_.reads(i)) h = mix(h ^ read(o));
    if (i.predicate) h = mix(h ^ read(program_.operands[i.first_operand + i.reads + i.writes]));
    h = meet(op, h);
    size_t n = 0;
    for (const Operand& o : program_.writes(i)) {
      const auto [begin, end] = bytes(o);
      uint64_t result = mix(h + ++n);
      if (i.predicate) {  // where it does not run, what was there stays
        const auto before = predicated_.find(contents(o).whole(begin, end));
        if (before != predicated_.end() && before->second == result) continue;
        const uint64_t either = mix(result ^ contents(o).read(begin, end));
        predicated_[either] = result;
        result = either;
      }
      if (stays(i, o, begin, end)) continue;
      contents(o).write(begin, end, result);
      if (is_idempotent(op)) gathered_[result] = key(i, o);
    }
  }

  uint64_t text_of(const Segment& segment, const Op& op) {
    const auto [at, fresh] = texts_.try_emplace(&op, 0);
    if (fresh) at->second = hash_text(print(plan_, segment, op));
    return at->second;
  }

  /// What other roles see or bring: sends and collectives with them, in the order of each communicator.
  uint64_t meet(const Op& op, uint64_t h) {
    const CommId comm = std::visit(
        [](const auto& w) {
          if constexpr (requires { w.comm; })
            return w.comm;
          else
            return CommId();
        },
        op.work);
    const auto pipeline = plan_.mesh.find(kPipelineAxis);
    const bool joins = comm && pipeline && plan_.roles.size() > 1 && plan_.comms[comm.index()].axes.contains(*pipeline);
    if (!joins) return h;
    uint64_t& line = lines_[comm.value];
    line = mix(line ^ h);
    sent_ += mix(line ^ static_cast<uint64_t>(comm.value + 1));
    return line;
  }

  /// A gather or broadcast, which leaves what an equal one has left as it is.
  static bool is_idempotent(const Op& op) {
    const auto* c = std::get_if<Collective>(&op.work);
    return c != nullptr && (c->kind == CollectiveKind::kAllGather || c->kind == CollectiveKind::kBroadcast);
  }
  uint64_t key(const Instruction& i, const Operand& to) const {
    const Operand& from = program_.reads(i)[0];
    const auto& c = std::get<Collective>(i.op->work);
    uint64_t h = mix(static_cast<uint64_t>(c.comm.value) * 64 + static_cast<uint64_t>(c.root) + from.shard_axes.mask);
    for (const Operand* o : {&from, &to})
      h = mix(h ^ mix(static_cast<uint64_t>(o->root.value * 3 + o->local) + mix(static_cast<uint64_t>(o->offset)) +
                      static_cast<uint64_t>(o->bytes)));
    return h;
  }
  bool stays(const Instruction& i, const Operand& to, int64_t begin, int64_t end) {
    if (!is_idempotent(*i.op) || program_.reads(i)[0].root != to.root || !to.root) return false;
    const auto found = gathered_.find(contents(to).whole(begin, end));
    return found != gathered_.end() && found->second == key(i, to);
  }

  const Plan& plan_;
  const Role& role_;
  const Program program_;
  std::vector<Contents> buffers_, locals_;
  std::map<const Op*, uint64_t> texts_;
  std::map<int32_t, uint64_t> lines_;        ///< by communicator
  std::map<uint64_t, uint64_t> gathered_;    ///< by value: which gather left it
  std::map<uint64_t, uint64_t> predicated_;  ///< by value: what is there if the op ran
  uint64_t sent_ = 0;
};

/// Every two calls that are at most so many apart are exchanged.
constexpr size_t kNear = 4;

class CallMutator {
 public:
  CallMutator(const Plan& plan, int role, CallScore& score)
      : plan_(plan), role_(role), score_(score), effect_(effect_of(plan, role)) {
    const auto& items = program(plan_);
    for (size_t i = 0; i < items.size(); ++i)
      if (std::holds_alternative<Call>(items[i])) calls_.push_back(i);
  }

  void run(const CallDeal& deal) {
    for (size_t x = 0; x < calls_.size(); ++x) {
      const auto at = static_cast<std::ptrdiff_t>(calls_[x]);
      Plan mutant = plan_;
      program(mutant).erase(program(mutant).begin() + at);
      judge(score_.dropped, mutant, "drop " + name(x));
      program(mutant).insert(program(mutant).begin() + at, 2, program(plan_)[calls_[x]]);
      judge(score_.doubled, mutant, "double " + name(x));
      for (size_t y = x + 1; y < calls_.size(); ++y) {
        const std::string place = "exchange " + name(x) + " with " + name(y);
        const bool dealt = y <= x + kNear || mix(effect_ ^ (x << 32 | y)) % deal.one_of == 0;
        if (!dealt && !deal.always.contains(mutant_name(place))) continue;
        Plan exchanged = plan_;
        std::swap(program(exchanged)[calls_[x]], program(exchanged)[calls_[y]]);
        judge(score_.exchanged, exchanged, place);
      }
    }
  }

 private:
  std::vector<Item>& program(Plan& plan) const { return plan.roles[static_cast<size_t>(role_)].program; }
  const std::vector<Item>& program(const Plan& plan) const { return plan.roles[static_cast<size_t>(role_)].program; }
  std::string name(size_t x) const {
    const Call& call = std::get<Call>(program(plan_)[calls_[x]]);
    std::string text = fmt::format("{} (call {}", plan_.segments[call.segment.index()].name, x);
    if (call.layer >= 0) text += fmt::format(", layer {}", call.layer);
    if (call.micro_batch >= 0) text += fmt::format(", micro-batch {}", call.micro_batch);
    return text + ")";
  }

  void judge(CallTally& tally, const Plan& mutant, const std::string& place) {
    ++tally.mutants;
    if (!find_faults(mutant, {.budget = {}, .max_findings = 1}).empty())
      ++tally.refused;
    else if (effect_of(mutant, role_) == effect_)
      ++tally.equivalent;
    else
      score_.survivors.push_back(mutant_name(place));
  }

  std::string mutant_name(const std::string& place) const { return fmt::format("{} | stage {} | {}", plan_.name, role_, place); }

  const Plan& plan_;
  const int role_;
  CallScore& score_;
  const uint64_t effect_;
  std::vector<size_t> calls_;
};

}  // namespace

uint64_t effect_of(const Plan& plan, int role) { return Evaluation(plan, role).run(); }

CallScore mutate_calls(const Plan& plan, const CallDeal& deal) {
  CallScore score;
  for (size_t r = 0; r < plan.roles.size(); ++r) CallMutator(plan, static_cast<int>(r), score).run(deal);
  return score;
}

}  // namespace shardlab::testing
