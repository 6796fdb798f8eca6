// ZeRO++ with their folds replayed: the grid's ZeRO-3 layouts, dealt over its parts; what the paper says of bytes; and what is
// refused.
#include <fmt/format.h>

#include <string>

#include "plan/memory.h"
#include "plan/wire.h"
#include "tests/laws/equal.h"
#include "tests/laws/grid.h"
#include "tests/laws/refusals.h"
#include "tests/namespaces.h"
#include "tests/test.h"

namespace shardlab::testing {
namespace {

using testing::plan_of;

/// Every ZeRO-3 layout of the grid under some parts of ZeRO++; a set of shards in one half of the hybrid ones becomes a node.
std::vector<Case> cases() {
  std::vector<Case> all;
  size_t number = 0;
  for (Case c : testing::legal_cases()) {
    if (c.layout.zero != 3) continue;
    const size_t i = number++;
    ZeroPlusPlus& z = c.layout.zero_plus_plus;
    z = {.weights = i % 2 == 0, .gradients = i / 2 % 2 == 0};
    if (c.layout.dp == 4 && i % 3 != 0) z.secondary = 2;
    if (c.layout.hybrid_shard > 0 && i % 4 < 3) std::swap(z.secondary, c.layout.hybrid_shard);
    if (z.secondary > 0) c.layout.fsdp.reshard = true;
    if (i / 3 % 4 == 1) c.train.precision = Precision::kBf16;
    if (i / 3 % 4 == 2) c.train.precision = Precision::kFp16;
    if (i / 3 % 4 == 3) c.train.clip_norm = 1;
    if (c.layout.dp == 6 && c.layout.collective_algorithm == AlgorithmChoice::kHalvingDoubling)
      c.layout.collective_algorithm = AlgorithmChoice::kRing;
    if (i % 12 == 4) c.layout.offload.activations = OffloadTo::kCpu;
    if (i % 12 == 8 && c.train.precision != Precision::kFp16 && c.train.clip_norm == 0) {
      c.layout.offload.optimizer = OffloadTo::kCpu;
      c.train.grad_norm = false;
    }
    if (!check(c).ok()) c.train.grad_accumulation = 1;  // canonical over six ranks
    if (z == ZeroPlusPlus{} || !check(c).ok()) continue;
    c.name +=
        fmt::format(" weights {} secondary {} gradients {} {}", z.weights, z.secondary, z.gradients, name_of(c.train.precision));
    all.push_back(std::move(c));
  }
  return all;
}

TEST_CASE("ZeRO++: peak, classes and wire bytes of the plan equal its replay, channel by channel") {
  const std::vector<Case> all = cases();
  size_t secondary = 0, both = 0;
  for (const Case& c : all) {
    testing::require_equal(c);
    secondary += c.layout.zero_plus_plus.secondary > 0;
    both += c.layout.zero_plus_plus.secondary > 0 && c.layout.zero_plus_plus.gradients;
  }
  CHECK(all.size() == 1957);
  CHECK(secondary > 800);
  CHECK(both > 400);
}

TEST_CASE("ZeRO++: plans of the grid verify") {
  const std::vector<Case> all = cases();
  for (size_t i = 0; i < all.size(); i += 41) testing::require_equal(all[i], true);
}

/// Four ranks and a model whose extents are multiples of 2048, so that nothing is padded; 16-bit parameters.
Case even_case(const ZeroPlusPlus& z, bool reshard = true) {
  Case c;
  Model& m = c.model;
  m.family = Family::kLlama;
  m.layers = 6;
  m.hidden = 2048;
  m.heads = m.kv_heads = 16;
  m.head_dim = 128;
  m.ffn = 4096;
  m.vocab = 2048;
  c.train.seq_len = 8;
  c.train.precision = Precision::kBf16;
  c.layout.dp = 4;
  c.layout.zero = 3;
  c.layout.fsdp.reshard = reshard;
  c.layout.zero_plus_plus = z;
  return c;
}
Plan plan_under(const ZeroPlusPlus& z, bool reshard = true) {
  Plan plan = plan_of(even_case(z, reshard), true);
  REQUIRE(difference_from_replay(plan) == "");
  return plan;
}
int64_t wire(const Plan& plan, const std::string& comm) {
  const auto bytes = total_wire_bytes(plan);
  return bytes.contains(comm) ? bytes.at(comm) : 0;
}

TEST_CASE("what ZeRO++ sends is what ZeRO-3 sends by the width of an element, scales counted, over the ranks that it says") {
  const Plan plain = plan_under({}), kept = plan_under({}, false);
  const int64_t gathers = wire(plain, "dp.parameters"), forward = wire(kept, "dp.parameters");
  const int64_t scatters = wire(plain, "dp.grads");
  SECTION("8 bits and a scale of 32 for each 256 elements: 65 / 128 of 16 bits") {
    const Plan form = plan_under({.weights = true});
    CHECK(wire(form, "dp.parameters") * 128 == gathers * 65);
    CHECK(wire(form, "dp.grads") == scatters);
  }
  SECTION("backward gathers over 2 of 4 ranks: 2 groups of 1 hop in place of 3") {
    const Plan form = plan_under({.secondary = 2});
    CHECK(wire(form, "dp.parameters") == forward);
    CHECK(wire(form, "dp.secondary") * 3 == (gathers - forward) * 2);
    CHECK(wire(form, "dp.grads") == scatters);
  }
  SECTION("4 bits and a scale for each 256: 33 / 256 of the fp32 that is scattered") {
    const Plan form = plan_under({.gradients = true});
    CHECK(wire(form, "dp.grads") * 256 == scatters * 33);
    CHECK(wire(form, "dp.parameters") == gathers);
  }
  SECTION("in two hops: all of it within nodes, 2 groups of 1 hop; a half of it between, by 2 groups") {
    const Plan form = plan_under({.secondary = 2, .gradients = true});
    CHECK(wire(form, "dp.grads") == 0);
    CHECK(wire(form, "dp.grads.node") * 256 * 3 == scatters * 33 * 2);
    CHECK(wire(form, "dp.grads.cross") * 256 * 3 == scatters * 33);
  }
}

TEST_CASE("a secondary shard holds 1/G of what backward gathers, padding included") {
  const Plan plain = plan_under({}), form = plan_under({.secondary = 2});
  const int64_t forward = wire(plan_under({}, false), "dp.parameters");
  const int64_t regathered = (wire(plain, "dp.parameters") - forward) / 3;  // bytes, by 3 hops
  CHECK(standing_bytes(form, 0, BufferClass::kBuffer) - standing_bytes(plain, 0, BufferClass::kBuffer) == regathered / 2);
}

TEST_CASE("ZeRO++ is refused where it has no meaning, with what to do instead") {
  testing::Refusals r(even_case({.weights = true, .secondary = 2, .gradients = true}));
  r.c.layout.zero = 2;
  r.c.layout.fsdp = {};
  r.refused("zero_plus_plus with zero=2");
  for (const int g : {1, 3, 4, 8}) {
    r.c.layout.zero_plus_plus.secondary = g;
    r.refused(fmt::format("zero_plus_plus.secondary={} with dp=4", g));
  }
  r.c.layout.hybrid_shard = 2;
  r.refused("zero_plus_plus.secondary=2 with hybrid_shard=2");
  r.c.layout.fsdp.reshard = false;
  r.refused("backward gathers nothing");
  r.c.train.reduce_dtype = "bf16";
  r.refused("zero_plus_plus.gradients with reduce_dtype=bf16");
}

}  // namespace
}  // namespace shardlab::testing
