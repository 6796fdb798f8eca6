// Snapshots of memory, unpickled and replayed as PyTorch's memory_viz does.
#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "interop/memory_snapshot.h"
#include "tests/interop/traces.h"
#include "tests/test.h"

namespace shardlab::testing {
namespace {

struct Pickled;
using PickledList = std::vector<std::shared_ptr<Pickled>>;
using PickledObject = std::map<std::string, std::shared_ptr<Pickled>>;
struct Pickled {
  std::variant<int64_t, std::string, PickledList, PickledObject> value;
  const Pickled& operator[](const char* key) const { return *std::get<PickledObject>(value).at(key); }
  const PickledList& list() const { return std::get<PickledList>(value); }
  int64_t number() const { return std::get<int64_t>(value); }
  const std::string& text() const { return std::get<std::string>(value); }
};

/// The stack machine of a pickle, with the opcodes that the viewer's reader has and this format needs.
Pickled unpickled(std::string_view bytes) {
  std::vector<std::shared_ptr<Pickled>> stack;
  std::vector<size_t> marks;
  std::map<uint64_t, std::shared_ptr<Pickled>> memo;
  size_t at = 0;
  const auto little = [&](int size) {
    REQUIRE(at + static_cast<size_t>(size) <= bytes.size());
    uint64_t value = 0;
    for (int i = 0; i < size; ++i) value |= static_cast<uint64_t>(static_cast<unsigned char>(bytes[at++])) << 8 * i;
    return value;
  };
  const auto push = [&](auto value) { stack.push_back(std::make_shared<Pickled>(Pickled{std::move(value)})); };
  while (at < bytes.size()) {
    const auto opcode = static_cast<unsigned char>(bytes[at++]);
    switch (opcode) {
      case 0x80: CHECK(little(1) == 2); break;
      case '}': push(PickledObject{}); break;
      case ']': push(PickledList{}); break;
      case '(': marks.push_back(stack.size()); break;
      case 'K': push(static_cast<int64_t>(little(1))); break;
      case 'M': push(static_cast<int64_t>(little(2))); break;
      case 'J': push(static_cast<int64_t>(static_cast<int32_t>(little(4)))); break;
      case 0x8a:
        CHECK(little(1) == 8);
        push(static_cast<int64_t>(little(8)));
        break;
      case 'X': {
        const uint64_t size = little(4);
        REQUIRE(at + size <= bytes.size());
        push(std::string(bytes.substr(at, size))), at += size;
        break;
      }
      case 'q': memo[little(1)] = stack.back(); break;
      case 'r': memo[little(4)] = stack.back(); break;
      case 'h': stack.push_back(memo.at(little(1))); break;
      case 'j': stack.push_back(memo.at(little(4))); break;
      case 'e': {
        const size_t mark = marks.back();
        marks.pop_back();
        CHECK(stack.size() - mark <= 1000);  // the viewer's reader passes them as arguments of one call
        auto& list = std::get<PickledList>(stack[mark - 1]->value);
        list.insert(list.end(), stack.begin() + static_cast<std::ptrdiff_t>(mark), stack.end());
        stack.resize(mark);
        break;
      }
      case 'u': {
        const size_t mark = marks.back();
        marks.pop_back();
        REQUIRE((stack.size() - mark) % 2 == 0);
        auto& object = std::get<PickledObject>(stack[mark - 1]->value);
        for (size_t i = mark; i < stack.size(); i += 2) CHECK(object.emplace(stack[i]->text(), stack[i + 1]).second);
        stack.resize(mark);
        break;
      }
      case '.':
        REQUIRE(at == bytes.size());
        REQUIRE(stack.size() == 1);
        return *stack.back();
      default: FAIL("opcode " << static_cast<int>(opcode));
    }
  }
  FAIL("the pickle does not stop");
  return {};
}

TEST_CASE("a snapshot replayed reaches the plan's peak, and never has two buffers on one byte") {
  for (const char* name : {"pipeline-1f1b", "dp2-tp2-pp2-zero1-tied", "offload-activations", "full-recompute"}) {
    const TracedPlan t = golden_trace(name);
    for (int rank = 0; rank < t.trace.world_size; ++rank) {
      const auto role = static_cast<size_t>(t.plan.mesh.role_of(rank));
      INFO(name << " rank " << rank);
      const Pickled snapshot = unpickled(interop::to_memory_snapshot(t.plan, t.programs[role], t.arenas[role], t.trace, rank));
      const MemoryPeak peak = memory_peak(t.plan, static_cast<int>(role))[static_cast<size_t>(Space::kDevice)];

      REQUIRE(snapshot["segments"].list().size() == 1);
      const Pickled& segment = *snapshot["segments"].list()[0];
      const int64_t first = segment["address"].number(), total = segment["total_size"].number();
      CHECK(total == t.arenas[role].bytes[static_cast<size_t>(Space::kDevice)]);
      CHECK(segment["device"].number() == 0);
      std::map<int64_t, int64_t> live;  // bytes by address
      int64_t active = 0, covered = 0;
      for (const auto& block : segment["blocks"].list()) {
        CHECK((*block)["address"].number() == first + covered);  // the viewer counts them up from the segment's address
        covered += (*block)["size"].number();
        if ((*block)["state"].text() != "active_allocated") continue;
        live[(*block)["address"].number()] = (*block)["size"].number();
        active += (*block)["size"].number();
      }
      CHECK(covered == total);
      CHECK(active == peak.persistent_bytes);
      CHECK(segment["allocated_size"].number() == active);

      REQUIRE(snapshot["device_traces"].list().size() == 1);
      int64_t most = active, time = 0, allocations = 0;
      std::string requested;
      for (const auto& entry : snapshot["device_traces"].list()[0]->list()) {
        const Pickled& e = *entry;
        const std::string& action = e["action"].text();
        const int64_t address = e["addr"].number(), bytes = e["size"].number();
        CHECK(e["time_us"].number() >= time);
        time = e["time_us"].number();
        REQUIRE(e["frames"].list().size() == 1);
        CHECK((*e["frames"].list()[0])["filename"].text().find(action == "alloc" ? "alloc" : "free") != std::string::npos);
        if (action == "alloc") {
          CHECK(address >= first);
          CHECK(address + bytes <= first + total);
          const auto after = live.lower_bound(address);
          CHECK((after == live.end() || address + bytes <= after->first));
          CHECK((after == live.begin() || std::prev(after)->first + std::prev(after)->second <= address));
          live[address] = bytes, active += bytes, ++allocations;
          most = std::max(most, active);
        } else if (action == "free_requested") {
          requested = std::to_string(address);
        } else {
          REQUIRE(action == "free_completed");
          CHECK(requested == std::to_string(address));
          REQUIRE(live.contains(address));
          CHECK(live.at(address) == bytes);
          live.erase(address), active -= bytes;
        }
      }
      CHECK(allocations > 20);
      CHECK(most == peak.peak_bytes);
      CHECK(active == peak.persistent_bytes);
    }
  }
}

}  // namespace
}  // namespace shardlab::testing
