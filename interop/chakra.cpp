#include "interop/chakra.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <tuple>

#include "interop/traced.h"
#include "interop/wire_format.h"
#include "plan/trace_internal.h"
#include "plan/work.h"

namespace shardlab::interop {
namespace {

enum class NodeType : uint8_t { kLoad = 2, kStore = 3, kCompute = 4, kSend = 5, kReceive = 6, kCollective = 7 };

/// CollectiveCommType.
int64_t collective_type(CollectiveKind kind) {
  switch (kind) {
    case CollectiveKind::kAllReduce: return 0;
    case CollectiveKind::kAllGather: return 2;
    case CollectiveKind::kBroadcast: return 5;
    case CollectiveKind::kAllToAll: return 6;
    case CollectiveKind::kReduceScatter: return 7;
  }
  SHARDLAB_CHECK(false, "collective {} is none", static_cast<int>(kind));
  return 0;
}

class ChakraFile {
 public:
  ChakraFile(const Plan& plan, const Program& program, const std::vector<ChakraGroup>& groups, const Trace& trace, int rank,
             int like, int step)
      : plan_(plan), program_(program), rank_(rank), coordinates_(plan.mesh.coordinates(rank)), numbers_(plan.comms.size(), 0) {
    for (size_t k = 0; k < groups.size(); ++k)
      if (std::ranges::find(groups[k].ranks, rank) != groups[k].ranks.end()) numbers_[groups[k].comm] = k + 1;
    seconds_.assign(program.instructions.size(), 0);
    for (const TraceEvent& e : events_of(trace, like))
      if (e.step == step && e.kind == TraceEvent::Kind::kOp)
        seconds_[static_cast<size_t>(e.instruction)] += e.end - e.begin - e.peer_wait;
  }

  std::string bytes() {
    out_ = WireMessage().text(1, "0.0.4").delimited();
    after_.resize(program_.instructions.size());
    for (const Instruction& i : program_.instructions) {
      std::vector<int32_t> before = dependencies(i);
      if (i.kind == Instruction::Kind::kRun) {
        add(i, before);
        before = {i.id};
      }
      after_[static_cast<size_t>(i.id)] = std::move(before);
    }
    return std::move(out_);
  }

 private:
  /// Ops, by instruction, that `i` comes after: through instructions that are no ops the ones that these come after.
  std::vector<int32_t> dependencies(const Instruction& i) const {
    std::vector<int32_t> before;
    const auto add = [&](int stream, int count) {
      if (count <= 0) return;
      const auto last = static_cast<size_t>(program_.streams[static_cast<size_t>(stream)][static_cast<size_t>(count - 1)]);
      before.insert(before.end(), after_[last].begin(), after_[last].end());
    };
    add(i.stream, i.sequence);
    for (const Wait& wait : program_.waits_of(i)) add(wait.stream, wait.count);
    std::ranges::sort(before);
    before.erase(std::unique(before.begin(), before.end()), before.end());
    return before;
  }

  static WireMessage named(const char* name) { return WireMessage().text(1, name); }
  static void integer(WireMessage& node, const char* name, int64_t value) { node.message(10, named(name).whole(9, value)); }
  static void small(WireMessage& node, const char* name, int64_t value) { node.message(10, named(name).whole(7, value)); }
  static void size(WireMessage& node, const char* name, int64_t value) {
    node.message(10, named(name).number(13, static_cast<uint64_t>(value)));
  }

  void add(const Instruction& i, const std::vector<int32_t>& before) {
    WireMessage node;
    node.number(1, static_cast<uint64_t>(i.id)).text(2, describe(plan_, i)).number(3, static_cast<uint64_t>(type_of(i)));
    for (const int32_t id : before) node.number(5, static_cast<uint64_t>(id));
    node.number(7, static_cast<uint64_t>(std::max<int64_t>(0, std::llround(1e6 * seconds_[static_cast<size_t>(i.id)]))));
    node.message(10, named("is_cpu_op").number(27, 0));
    if (const auto* collective = std::get_if<Collective>(&i.op->work);
        collective != nullptr && numbers_[collective->comm.index()] > 0)
      add_collective(node, i, *collective);
    else if (const auto* send = std::get_if<Send>(&i.op->work))
      add_message(node, i, send->comm, send->hop, send->cyclic, true);
    else if (const auto* receive = std::get_if<Recv>(&i.op->work))
      add_message(node, i, receive->comm, receive->hop, receive->cyclic, false);
    else
      add_work(node, i);
    out_ += node.delimited();
  }

  NodeType type_of(const Instruction& i) const {
    if (const auto* collective = std::get_if<Collective>(&i.op->work))
      return numbers_[collective->comm.index()] > 0 ? NodeType::kCollective : NodeType::kCompute;
    if (std::holds_alternative<Send>(i.op->work)) return NodeType::kSend;
    if (std::holds_alternative<Recv>(i.op->work)) return NodeType::kReceive;
    if (!is_transfer(i)) return NodeType::kCompute;
    return copy_name(i) == "Memcpy HtoD" ? NodeType::kLoad : NodeType::kStore;
  }

  void add_collective(WireMessage& node, const Instruction& i, const Collective& collective) const {
    integer(node, "comm_type", collective_type(collective.kind));
    integer(node, "comm_size", (i.reads > 0 ? program_.reads(i)[0] : program_.writes(i)[0]).bytes);
    node.message(10, named("pg_name").text(29, fmt::to_string(numbers_[collective.comm.index()])));
  }

  void add_message(WireMessage& node, const Instruction& i, CommId comm, int hop, bool cyclic, bool sends) {
    const std::vector<int> group = group_of(plan_.mesh, plan_.comms[comm.index()], rank_);
    const int count = static_cast<int>(group.size());
    const int index = static_cast<int>(std::ranges::find(group, rank_) - group.begin());
    const int place = cyclic ? ((index + hop) % count + count) % count : index + hop;
    const int peer = group[static_cast<size_t>(place)];
    const int from = sends ? rank_ : peer, to = sends ? peer : rank_;
    small(node, "comm_src", from), small(node, "comm_dst", to);
    // Messages of one communicator between two ranks arrive in the order in which they are sent.
    const int64_t number = messages_[{comm.index(), from, to}]++;
    small(node, "comm_tag", number * static_cast<int64_t>(plan_.comms.size()) + static_cast<int64_t>(comm.index()));
    integer(node, "comm_size", (sends ? program_.reads(i)[0] : program_.writes(i)[0]).bytes);
  }

  void add_work(WireMessage& node, const Instruction& i) const {
    const WorkAmount work = work_of(*i.segment, *i.op, plan_.mesh, plan_.token_order, &coordinates_);
    integer(node, "num_ops", static_cast<int64_t>(work.flops.value));
    size(node, "tensor_size", is_transfer(i) ? program_.reads(i)[0].bytes : static_cast<int64_t>(work.memory.value));
  }

  const Plan& plan_;
  const Program& program_;
  const int rank_;
  const Coordinates coordinates_;
  std::vector<size_t> numbers_;                               ///< by communicator: the number of the rank's group; 0: it is alone
  std::vector<double> seconds_;                               ///< by instruction
  std::vector<std::vector<int32_t>> after_;                   ///< by instruction: ops that are done when it is
  std::map<std::tuple<size_t, int, int>, int64_t> messages_;  ///< so far, by communicator, sender and receiver
  std::string out_;
};

}  // namespace

std::vector<ChakraGroup> chakra_groups(const Plan& plan) {
  std::vector<ChakraGroup> groups;
  for (size_t c = 0; c < plan.comms.size(); ++c)
    for (int rank = 0; rank < plan.mesh.world_size(); ++rank)
      if (std::vector<int> ranks = group_of(plan.mesh, plan.comms[c], rank);
          ranks.size() > 1 && *std::ranges::min_element(ranks) == rank)
        groups.push_back({c, std::move(ranks)});
  return groups;
}

std::string chakra_groups_json(const std::vector<ChakraGroup>& groups) {
  std::string text = "{";
  for (size_t k = 0; k < groups.size(); ++k)
    text += fmt::format("{}\n  \"{}\": [{}]", k == 0 ? "" : ",", k + 1, fmt::join(groups[k].ranks, ", "));
  return text + "\n}\n";
}

std::string to_chakra(const Plan& plan, const Program& program, const std::vector<ChakraGroup>& groups, const Trace& durations,
                      int rank, int like, int step) {
  return ChakraFile(plan, program, groups, durations, rank, like, step).bytes();
}

}  // namespace shardlab::interop
