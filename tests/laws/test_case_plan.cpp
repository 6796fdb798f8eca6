// A case of many micro-batches, read from two plans of a few: the same figures as the plan of the whole, to the byte.
#include "simulator/interpreter/case_plan.h"

#include <map>
#include <string>

#include "plan/base/hash.h"
#include "plan/machine.h"
#include "plan/memory.h"
#include "plan/wire.h"
#include "simulator/interpreter/cost_model.h"
#include "simulator/interpreter/segments/segments.h"
#include "strategies/lower.h"
#include "tests/deal.h"
#include "tests/laws/grid.h"
#include "tests/namespaces.h"
#include "tests/test.h"

namespace shardlab::testing {
namespace {

Result<Plan> lowered(const Case& c) { return lower(c, {.after = {}, .verify = false}); }

void require_same(const Case& c, const CasePlan& folded) {
  INFO(c.name);
  const auto whole = lowered(c);
  REQUIRE(whole.ok());
  REQUIRE(folded.stages().size() == whole->roles.size());
  for (size_t stage = 0; stage < whole->roles.size(); ++stage) {
    const auto peaks = memory_peak(*whole, static_cast<int>(stage));
    for (size_t space = 0; space < kSpaces; ++space) {
      const MemoryPeak& said = folded.stages()[stage][space];
      REQUIRE(said.peak_bytes == peaks[space].peak_bytes);
      REQUIRE(said.persistent_bytes == peaks[space].persistent_bytes);
      REQUIRE(said.at_peak.bytes == peaks[space].at_peak.bytes);
      REQUIRE(said.peak_by_class.bytes == peaks[space].peak_by_class.bytes);
    }
  }
  REQUIRE(folded.wire() == total_wire_bytes(*whole));
}

}  // namespace

TEST_CASE("a case of many micro-batches has the bytes of its whole plan") {
  int shortened = 0, whole = 0;
  size_t number = 0;
  for (Case c : legal_cases()) {
    if (number++ % dealt(5, 19) != 0) continue;
    c.train.grad_accumulation = c.canonical ? 32 : 8 * c.layout.pp + c.train.grad_accumulation;
    c.name += " m" + std::to_string(c.train.grad_accumulation);
    if (number % 3 == 0) c.train.precision = Precision::kBf16;
    if (number % 4 == 0) c.layout.offload.activations = number % 8 == 0 ? OffloadTo::kCpu : OffloadTo::kNvme;
    if (number % 7 == 0) c.layout.offload.optimizer = OffloadTo::kCpu;
    if (number % 6 == 0 && c.layout.recompute == Recompute::kNone) c.layout.recompute = Recompute::kSelective;
    if (!check(c).ok()) continue;
    const auto folded = CasePlan::of(c, lowered);
    REQUIRE(folded.ok());
    ++(folded->shortened() ? shortened : whole);
    require_same(c, *folded);
  }
  CHECK(shortened > (thorough() ? 300 : 100));
  CHECK(whole > (thorough() ? 300 : 100));
}

TEST_CASE("of every schedule a case of many micro-batches has the bytes of its whole plan") {
  std::map<std::string, int> shortened;
  uint64_t counted = 0;
  for (int number = 0; number < named_schedules(); ++number)
    for (const int stages : {2, 3, 4, 8})
      for (const int zero : {0, 2, 3})
        for (const int more : {0, 1, 5}) {
          if (mix(counted++) % dealt(1, 2) != 0) continue;
          Case c = legal_cases().front();
          c.canonical = false, c.model.layers = 18;
          c.layout.pp = stages, c.layout.schedule = Schedule(number), c.layout.vpp = is_looped(c.layout.schedule) ? 2 : 1;
          c.layout.dp = zero == 0 ? 1 : 2, c.layout.zero = zero, c.layout.overlap = more != 1;
          if (more == 5) c.layout.offload.activations = OffloadTo::kCpu;
          if (more == 1) c.layout.recompute = Recompute::kSelective;
          c.train.grad_accumulation = 8 * stages + 12 + more;
          c.name = std::string(name_of(c.layout.schedule)) + " pp" + std::to_string(stages) + " zero" + std::to_string(zero) +
                   " m" + std::to_string(c.train.grad_accumulation);
          if (!check(c).ok()) continue;
          const auto folded = CasePlan::of(c, lowered);
          REQUIRE(folded.ok());
          shortened[std::string(name_of(c.layout.schedule))] += folded->shortened();
          require_same(c, *folded);
        }
  for (const auto& [name, count] : shortened) {
    INFO(name);
    CHECK((count > 0) == (name != "afab" && name != "breadth-first"));
  }
}

TEST_CASE("every micro-batch that afab keeps is counted, and canonical mode is never shortened") {
  for (const Case& grid : sample_of(legal_cases(), 8)) {
    if (grid.layout.pp == 1 || grid.layout.zero == 3) continue;
    Case c = grid;
    c.train.grad_accumulation = 64;
    if (!check(c).ok()) continue;
    const auto folded = CasePlan::of(c, lowered);
    REQUIRE(folded.ok());
    CHECK((!folded->shortened() || (c.layout.schedule == Schedule::k1F1B && !c.canonical)));
    if (c.layout.dp == 2 && c.layout.tp == 2) require_same(c, *folded);
  }
}

TEST_CASE("what is held at a peak adds up to it") {
  size_t number = 0;
  for (const Case& c : legal_cases()) {
    if (number++ % 29 != 0) continue;
    INFO(c.name);
    const auto plan = lowered(c);
    REQUIRE(plan.ok());
    for (int stage = 0; stage < c.layout.pp; ++stage) {
      MemoryByClass held;
      for (const HeldTensor& tensor : held_at_peak(*plan, stage)) held.bytes[static_cast<size_t>(tensor.cls)] += tensor.bytes;
      REQUIRE(held.bytes == memory_peak(*plan, stage)[static_cast<size_t>(Space::kDevice)].at_peak.bytes);
    }
  }
}

TEST_CASE("the step of many micro-batches takes what its whole plan takes by segments") {
  Machine machine;
  machine.id = "nodes", machine.devices_per_node = 8, machine.inter_bytes_per_s = 50e9;
  machine.device.architecture = "hopper", machine.device.memory_bytes_per_s = 3.35e12, machine.device.link_bytes_per_s = 450e9;
  machine.device.peak_flops = {{"fp32", 67e12}, {"bf16", 989e12}};
  int compared = 0;
  size_t number = 0;
  for (Case c : legal_cases()) {
    if (number++ % 23 != 0 || c.canonical) continue;
    c.model.hidden = 512, c.model.heads = c.model.kv_heads = 8, c.model.head_dim = 64, c.model.ffn = 2048, c.model.vocab = 4096;
    c.train.seq_len = 256, c.model.max_positions = c.model.is_llama() ? 0 : 256;
    c.train.grad_accumulation = 8 * c.layout.pp + c.train.grad_accumulation % 5;
    c.machine = machine;
    c.machine.nodes = (c.layout.world_size() + 7) / 8;
    if (!check(c).ok()) continue;
    INFO(c.name);
    const auto costs = cost_model_for(c.machine, Precision::kFp32);
    const auto folded = CasePlan::of(c, lowered);
    const auto whole = lowered(c);
    REQUIRE((costs.ok() && folded.ok() && whole.ok()));
    if (!folded->shortened()) continue;
    const double seconds = SegmentTimeline(*whole).step(c.machine, **costs).seconds;
    CHECK(folded->predict(c, **costs).step_s == seconds);
    ++compared;
  }
  CHECK(compared > 30);
}

}  // namespace shardlab::testing
