#include "simulator/interpreter/segments/condense.h"

#include <map>
#include <tuple>
#include <unordered_map>
#include <utility>

#include "plan/base/check.h"
#include "plan/program_order.h"
#include "plan/trace_internal.h"

namespace shardlab::simulator::segments {
namespace {

/// Condenses one stage after the other into what they share.
class Condenser {
 public:
  Condenser(const Plan& plan, Compute compute) : plan_(plan), compute_(compute), simulated_(plan.mesh, false) {}

  const std::vector<int>& ranks() const { return simulated_.ranks(); }
  int role_of(int rank) const { return simulated_.role_of(rank); }
  Condensed result() { return std::move(out_); }

  void add_stage(int rank, const Program& program) {
    program_ = &program;
    rank_ = rank;
    meetings_ = meetings_of(plan_, *program_, simulated_, rank);
    out_.instructions += static_cast<int64_t>(program_->instructions.size());
    known_ops_.clear();
    known_pieces_.clear();
    find_awaited();
    count_launches();
    stage_ = {};
    stage_.streams.resize(program_->streams.size());
    for (size_t s = 0; s < program_->streams.size(); ++s) s == 0 ? condense_control() : copy_stream(s);
    for (Wait& wait : stage_.waits)
      if (wait.stream == 0) wait.count = entry_of_[static_cast<size_t>(wait.count - 1)] + 1;
    out_.stages.push_back(std::move(stage_));
  }

 private:
  void find_awaited() {
    awaited_.assign(program_->streams.size(), {});
    for (size_t s = 0; s < awaited_.size(); ++s) awaited_[s].resize(program_->streams[s].size(), false);
    for (const Wait& wait : program_->waits) awaited_[static_cast<size_t>(wait.stream)][static_cast<size_t>(wait.count - 1)] = true;
  }

  void count_launches() {
    launches_.clear();
    int32_t launches = 0;
    for (const Instruction& i : program_->instructions) {
      launches_.push_back(launches);
      launches += i.kind == Instruction::Kind::kRun ? 1 : 0;
    }
  }

  const Instruction& at(int32_t id) const { return program_->instructions[static_cast<size_t>(id)]; }

  bool meets_stages(const Instruction& i) const {
    if (!communicates(i)) return false;
    const Meeting& m = meetings_[static_cast<size_t>(i.id)];
    return m.moves && m.parties > 1;
  }

  Entry opened(const Instruction& i) {
    Entry e;
    e.launches = launches_[static_cast<size_t>(i.id)];
    e.first_wait = static_cast<uint32_t>(stage_.waits.size());
    const auto waits = program_->waits_of(i);
    stage_.waits.insert(stage_.waits.end(), waits.begin(), waits.end());
    e.waits = static_cast<uint32_t>(waits.size());
    return e;
  }

  /// Streams beside the control stream stay as they are.
  void copy_stream(size_t s) {
    for (const int32_t id : program_->streams[s]) {
      Entry e = single(at(id));
      e.awaited = awaited_[s][static_cast<size_t>(at(id).sequence)];
      stage_.streams[s].push_back(e);
    }
  }

  Entry single(const Instruction& i) {
    Entry e = opened(i);
    e.op = op_of(i);
    if (!meets_stages(i)) return e;
    const Meeting& m = meetings_[static_cast<size_t>(i.id)];
    const auto [known, fresh] = meeting_of_.try_emplace(m.key, static_cast<int32_t>(out_.parties.size()));
    if (fresh) out_.parties.push_back(m.parties);
    e.meeting = known->second;
    e.sender = m.sender;
    return e;
  }

  void condense_control() {
    std::vector<Entry>& entries = stage_.streams[0];
    entry_of_.clear();
    open_ = false;
    for (const int32_t id : program_->streams[0]) {
      const Instruction& i = at(id);
      const bool op = i.kind == Instruction::Kind::kRun, alone = meets_stages(i);
      const bool next_launch = !op || last_launch_ < 0 || launches_[static_cast<size_t>(id)] == last_launch_ + 1;
      // What neither runs nor waits is over when what comes before it is.
      const bool nothing = !op && i.waits == 0 && !entries.empty();
      if (!nothing && (!open_ || i.waits > 0 || alone || !next_launch)) {
        close();
        entries.push_back(alone ? single(i) : opened(i));
        open_ = true;
      }
      if (op && !alone) {
        if (last_launch_ < 0) entries.back().launches = launches_[static_cast<size_t>(id)];
        last_launch_ = launches_[static_cast<size_t>(id)];
        take(i);
      }
      entry_of_.push_back(static_cast<int32_t>(entries.size()) - 1);
      if (awaited_[0][static_cast<size_t>(i.sequence)]) entries.back().awaited = true;
      if (alone || entries.back().awaited) close();
    }
    close();
  }

  /// The next op of the open stretch: of the call before, or of another one.
  void take(const Instruction& i) {
    if (!calls_.empty() && calls_.back().call == i.call) {
      calls_.back().last = i.id;
      return;
    }
    calls_.push_back({i.call, i.id, i.id});
  }

  /// Ends the open entry: its calls become pieces.
  void close() {
    if (open_ && !calls_.empty()) {
      Stretch stretch;
      for (const PartOfCall& part : calls_) {
        const int32_t piece = piece_of(part);
        if (!stretch.pieces.empty() && stretch.pieces.back().piece == piece)
          ++stretch.pieces.back().times;
        else
          stretch.pieces.push_back({piece, 1});
      }
      const auto [known, fresh] = stretch_of_.try_emplace(stretch.pieces, static_cast<int32_t>(out_.stretches.size()));
      if (fresh) out_.stretches.push_back(std::move(stretch));
      stage_.streams[0].back().stretch = known->second;
    }
    calls_.clear();
    open_ = false;
    last_launch_ = -1;
  }

  struct PartOfCall {
    int32_t call = -1, first = -1, last = -1;  ///< instructions
  };

  /// Launched one after the other, the ops between the same first and last of a segment are the same.
  int32_t piece_of(const PartOfCall& part) {
    const auto [known, fresh] = known_pieces_.try_emplace({at(part.first).op, at(part.last).op}, -1);
    if (!fresh) return known->second;
    Piece piece;
    for (int32_t id = part.first; id <= part.last; ++id)
      if (at(id).kind == Instruction::Kind::kRun) piece.ops.push_back(op_of(at(id)));
    const auto [same, unknown] = piece_of_.try_emplace(piece.ops, static_cast<int32_t>(out_.pieces.size()));
    if (unknown) out_.pieces.push_back(std::move(piece));
    return known->second = same->second;
  }

  int32_t op_of(const Instruction& i) {
    const auto [here, unseen] = known_ops_.try_emplace(i.op, -1);
    if (!unseen) return here->second;
    const bool apart = communicates(i) || compute_ == Compute::kByStage;
    const auto [known, fresh] = op_of_.try_emplace({i.op, apart ? rank_ : -1}, static_cast<int32_t>(out_.ops.size()));
    if (fresh) out_.ops.push_back(asked(i));
    return here->second = known->second;
  }

  AskedOp asked(const Instruction& i) const {
    AskedOp a;
    a.example = i;
    if (is_transfer(i)) a.spent = Spent::kCopy;
    if (!communicates(i)) return a;
    a.spent = Spent::kCommunication;
    a.comm = CommId(static_cast<int32_t>(&comm_of(plan_, *i.op) - plan_.comms.data()));
    a.receives = is_receive(i);
    a.moves = meetings_[static_cast<size_t>(i.id)].moves;
    if (a.moves) a.communication = communication_of(plan_, i, who_meet(plan_, *i.op, simulated_, rank_));
    return a;
  }

  const Plan& plan_;
  const Compute compute_;
  const SimulatedRanks simulated_;
  Condensed out_;
  std::map<std::pair<const Op*, int>, int32_t> op_of_;
  std::map<std::vector<int32_t>, int32_t> piece_of_;
  std::map<std::vector<Repeated>, int32_t> stretch_of_;
  std::map<Meeting::Key, int32_t> meeting_of_;

  // Of the stage that is being condensed.
  const Program* program_ = nullptr;
  int rank_ = 0;
  std::vector<Meeting> meetings_;
  std::vector<std::vector<bool>> awaited_;  ///< by stream and sequence
  std::vector<int32_t> launches_;           ///< by instruction: ops launched before it
  std::unordered_map<const Op*, int32_t> known_ops_;
  std::map<std::pair<const Op*, const Op*>, int32_t> known_pieces_;
  std::vector<int32_t> entry_of_;  ///< by sequence in the control stream
  StageEntries stage_;
  std::vector<PartOfCall> calls_;  ///< of the open entry
  bool open_ = false;
  int32_t last_launch_ = -1;
};

}  // namespace

int64_t Condensed::entries() const {
  int64_t n = 0;
  for (const StageEntries& stage : stages)
    for (const auto& stream : stage.streams) n += static_cast<int64_t>(stream.size());
  return n;
}

Condensed condense(const Plan& plan, std::span<const Program> programs, Compute compute) {
  SHARDLAB_CHECK(programs.size() == plan.roles.size(), "{} programs for {} roles", programs.size(), plan.roles.size());
  Condenser condenser(plan, compute);
  for (const int rank : condenser.ranks()) condenser.add_stage(rank, programs[static_cast<size_t>(condenser.role_of(rank))]);
  return condenser.result();
}

Condensed condense(const Plan& plan, Compute compute) {
  Condenser condenser(plan, compute);
  for (const int rank : condenser.ranks()) condenser.add_stage(rank, expand_order(plan, condenser.role_of(rank)));
  return condenser.result();
}

}  // namespace shardlab::simulator::segments
