// Chakra execution traces, read back and held to the plan: ops, order, messages, groups.
#include <algorithm>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <tuple>

#include "interop/chakra.h"
#include "tests/interop/traces.h"
#include "tests/test.h"

namespace shardlab::testing {
namespace {

struct ChakraNode {
  std::string name;
  int type = 0;
  int64_t microseconds = 0;
  std::vector<uint64_t> after;
  std::map<std::string, int64_t> numbers;
  std::map<std::string, std::string> texts;
};

/// By id, in the order of the file.
std::vector<std::pair<uint64_t, ChakraNode>> read_chakra(const std::string& bytes) {
  const auto messages = delimited_messages(bytes);
  REQUIRE(messages.size() > 1);
  CHECK(only_field(wire_fields(messages[0]), 1).bytes == "0.0.4");
  std::vector<std::pair<uint64_t, ChakraNode>> nodes;
  for (size_t m = 1; m < messages.size(); ++m) {
    const auto fields = wire_fields(messages[m]);
    ChakraNode node;
    node.name = only_field(fields, 2).bytes, node.type = static_cast<int>(only_field(fields, 3).value);
    node.microseconds = static_cast<int64_t>(only_field(fields, 7).value);
    for (const WireField& f : fields) {
      if (f.number == 5) node.after.push_back(f.value);
      if (f.number != 10) continue;
      const auto attribute = wire_fields(f.bytes);
      REQUIRE(attribute.size() == 2);
      const std::string name(only_field(attribute, 1).bytes);
      // The kinds that the feeder takes them from: int32, int64, uint64, bool, string.
      const std::map<std::string, int> kinds = {{"is_cpu_op", 27}, {"num_ops", 9},   {"tensor_size", 13},
                                                {"comm_type", 9},  {"comm_size", 9}, {"comm_src", 7},
                                                {"comm_dst", 7},   {"comm_tag", 7},  {"pg_name", 29}};
      REQUIRE(kinds.contains(name));
      CHECK(attribute[1].number == kinds.at(name));
      if (name == "pg_name")
        node.texts[name] = attribute[1].bytes;
      else
        node.numbers[name] = static_cast<int64_t>(attribute[1].value);
    }
    nodes.emplace_back(only_field(fields, 1).value, std::move(node));
  }
  return nodes;
}

std::string written(const TracedPlan& t, int rank, int step = 1) {
  return interop::to_chakra(t.plan, t.programs[static_cast<size_t>(t.plan.mesh.role_of(rank))], interop::chakra_groups(t.plan),
                            t.trace, rank, rank, step);
}

/// Instructions that `program` orders before each op, through any others: by the order of streams and by waits.
std::vector<std::set<int32_t>> ordered_before(const Program& program) {
  std::vector<std::set<int32_t>> before(program.instructions.size());
  for (const Instruction& i : program.instructions) {
    auto& mine = before[static_cast<size_t>(i.id)];
    const auto add = [&](int stream, int count) {
      if (count <= 0) return;
      const int32_t last = program.streams[static_cast<size_t>(stream)][static_cast<size_t>(count - 1)];
      mine.insert(before[static_cast<size_t>(last)].begin(), before[static_cast<size_t>(last)].end());
      mine.insert(last);
    };
    add(i.stream, i.sequence);
    for (const Wait& w : program.waits_of(i)) add(w.stream, w.count);
  }
  return before;
}

TEST_CASE("Chakra has a node for every op, ordered as the program orders ops, with the seconds of the trace") {
  for (const char* name : {"pipeline-1f1b", "dp2-tp2-pp2-zero1-tied", "offload-activations"}) {
    const TracedPlan t = golden_trace(name);
    for (int rank = 0; rank < t.trace.world_size; ++rank) {
      const Program& program = t.programs[static_cast<size_t>(t.plan.mesh.role_of(rank))];
      const auto nodes = read_chakra(written(t, rank));
      const auto before = ordered_before(program);
      INFO(name << " rank " << rank);
      size_t ops = 0;
      for (const Instruction& i : program.instructions) ops += i.kind == Instruction::Kind::kRun ? 1 : 0;
      REQUIRE(nodes.size() == ops);
      std::map<uint64_t, std::set<int32_t>> reached;
      for (const auto& [id, node] : nodes) {
        const Instruction& i = program.instructions.at(id);
        REQUIRE(i.kind == Instruction::Kind::kRun);
        CHECK(node.name == describe(t.plan, i));
        const double length = 1.0 + i.id % 7;
        const bool communicates = node.type >= 5;
        CHECK(node.microseconds == std::llround(communicates && rank % 2 == 1 ? 0.4 * length : length));
        CHECK(node.numbers.at("is_cpu_op") == 0);
        std::set<int32_t>& mine = reached[id];
        for (const uint64_t parent : node.after) {
          REQUIRE(reached.contains(parent));  // written before: no cycle
          CHECK(parent != id);
          mine.insert(reached[parent].begin(), reached[parent].end());
          mine.insert(static_cast<int32_t>(parent));
        }
        std::set<int32_t> expected;
        for (const int32_t other : before[static_cast<size_t>(i.id)])
          if (program.instructions[static_cast<size_t>(other)].kind == Instruction::Kind::kRun) expected.insert(other);
        CHECK(mine == expected);
      }
    }
  }
}

TEST_CASE("Chakra: every message that is sent is received, and all of a group call the same collectives in the same order") {
  for (const char* name : {"pipeline-interleaved", "dp2-tp2-pp2-zero1-tied", "context-parallel-zigzag"}) {
    const TracedPlan t = golden_trace(name);
    INFO(name);
    std::map<std::tuple<int64_t, int64_t, int64_t>, int64_t> sent, received;                // bytes by source, destination and tag
    std::map<std::string, std::map<int, std::vector<std::pair<int64_t, int64_t>>>> called;  // (type, bytes) by group and rank
    for (int rank = 0; rank < t.trace.world_size; ++rank)
      for (const auto& [id, node] : read_chakra(written(t, rank))) {
        if (node.type == 5 || node.type == 6) {
          CHECK(node.numbers.at(node.type == 5 ? "comm_src" : "comm_dst") == rank);
          CHECK((node.type == 5 ? sent : received)
                    .emplace(std::tuple(node.numbers.at("comm_src"), node.numbers.at("comm_dst"), node.numbers.at("comm_tag")),
                             node.numbers.at("comm_size"))
                    .second);
          CHECK(node.numbers.at("comm_size") > 0);
        } else if (node.type == 7) {
          called[node.texts.at("pg_name")][rank].emplace_back(node.numbers.at("comm_type"), node.numbers.at("comm_size"));
          CHECK(node.numbers.at("comm_size") > 0);
        } else {
          CHECK((node.type == 2 || node.type == 3 || node.type == 4));
          CHECK(node.numbers.at("tensor_size") > 0);
        }
      }
    CHECK(sent == received);
    CHECK(sent.size() + called.size() > 0);
    const auto groups = nlohmann::json::parse(interop::chakra_groups_json(interop::chakra_groups(t.plan)));
    for (const auto& [group, calls] : called) {
      INFO("group " << group);
      CHECK(std::stoi(group) > 0);  // 0 is everybody to ASTRA-sim
      std::vector<int> ranks = groups.at(group);
      std::ranges::sort(ranks);
      std::vector<int> callers;
      for (const auto& [rank, list] : calls) {
        callers.push_back(rank);
        CHECK(list == calls.begin()->second);
      }
      CHECK(callers == ranks);
    }
  }
}

TEST_CASE("Chakra names the bytes that a rank puts into a collective, and copies by where they go") {
  const TracedPlan zero = golden_trace("dp2-tp2-pp2-zero1-tied");
  std::map<int64_t, int> kinds;
  for (const auto& [id, node] : read_chakra(written(zero, 0))) {
    if (node.type != 7) continue;
    const Instruction& i = zero.programs[0].instructions.at(id);
    const CollectiveKind kind = std::get<Collective>(i.op->work).kind;
    const std::map<CollectiveKind, int64_t> types = {{CollectiveKind::kAllReduce, 0},
                                                     {CollectiveKind::kAllGather, 2},
                                                     {CollectiveKind::kBroadcast, 5},
                                                     {CollectiveKind::kAllToAll, 6},
                                                     {CollectiveKind::kReduceScatter, 7}};
    CHECK(node.numbers.at("comm_type") == types.at(kind));
    CHECK(node.numbers.at("comm_size") == i.segment->slots[i.op->reads[0].index()].type.bytes());
    ++kinds[node.numbers.at("comm_type")];
  }
  CHECK(kinds[0] > 0);
  CHECK(kinds[2] > 0);
  CHECK(kinds[7] > 0);
  const TracedPlan offload = golden_trace("offload-activations");
  int loads = 0, stores = 0;
  for (const auto& [id, node] : read_chakra(written(offload, 0))) loads += node.type == 2 ? 1 : 0, stores += node.type == 3 ? 1 : 0;
  CHECK(loads > 0);
  CHECK(loads == stores);
}

}  // namespace
}  // namespace shardlab::testing
