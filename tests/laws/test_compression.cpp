// Compressed gradients with their folds replayed: the grid's data-parallel layouts, dealt over techniques; and what the literature
// says of bytes.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <map>
#include <string>
#include <vector>

#include "plan/memory.h"
#include "plan/text.h"
#include "plan/wire.h"
#include "strategies/lower.h"
#include "strategies/warm_up.h"
#include "tests/deal.h"
#include "tests/laws/equal.h"
#include "tests/laws/grid.h"
#include "tests/laws/refusals.h"
#include "tests/namespaces.h"
#include "tests/test.h"

namespace shardlab::testing {
namespace {

using testing::plan_of;

constexpr Compression kKinds[] = {
    {.kind = CompressionKind::kInt8},
    {.kind = CompressionKind::kBf16},
    {.kind = CompressionKind::kTopK, .k = 0.05},
    {.kind = CompressionKind::kInt8, .bits = 4},
    {.kind = CompressionKind::kRandomK, .k = 0.3},
    {.kind = CompressionKind::kTopK, .k = 1.0},
    {.kind = CompressionKind::kPowerSgd, .rank = 2},
    {.kind = CompressionKind::kPowerSgd, .rank = 100},
    {.kind = CompressionKind::kOneBitAdam, .warmup = 3},
};

/// What the technique of a case refuses is taken back.
void suit(Case& c) {
  const CompressionKind kind = c.layout.compression.kind;
  if (kind != CompressionKind::kPowerSgd && kind != CompressionKind::kOneBitAdam) return;
  c.layout.tp = 1;
  if (c.layout.pp > 1 || (kind == CompressionKind::kOneBitAdam && c.canonical)) c.model.tied_embeddings = false;
  if (kind == CompressionKind::kPowerSgd) return;
  c.train.optimizer = Optimizer::kAdamW;
  c.train.grad_norm = false;
  c.train.clip_norm = 0;
  c.layout.offload.optimizer = OffloadTo::kNone;
}

/// Every layout of the grid that reduces whole gradients, each under one technique; a third with 16-bit parameters or clipping.
std::vector<Case> compressed_cases() {
  std::vector<Case> all;
  for (Case c : testing::legal_cases()) {
    if (c.layout.dp == 1 || c.layout.zero > 0) continue;
    const size_t i = all.size();
    c.layout.compression = kKinds[i % std::size(kKinds)];
    if (i / 2 % 3 == 1) c.train.precision = Precision::kBf16;
    if (i / 2 % 3 == 2) c.train.clip_norm = 1;
    suit(c);
    if (!check(c).ok()) c.layout.collective_algorithm = AlgorithmChoice::kRing;
    c.name += " " + std::string(name_of(c.layout.compression.kind)) + " " + std::string(name_of(c.train.precision));
    all.push_back(std::move(c));
  }
  return all;
}

TEST_CASE("compressed: peak, classes and wire bytes of the plan equal its replay") {
  const std::vector<Case> cases = compressed_cases();
  CHECK(cases.size() == 1512);
  for (const Case& c : testing::sample_of(cases, 3)) testing::require_equal(c);
}

/// The grid's ZeRO-1 and ZeRO-2 layouts, hybrid ones too, under the codes that are scattered.
std::vector<Case> scattered_cases() {
  std::vector<Case> all;
  size_t number = 0;
  for (Case c : testing::legal_cases()) {
    if (c.layout.zero != 1 && c.layout.zero != 2) continue;
    const size_t i = number++;
    if (i % 2 == 1) continue;
    c.layout.compression = kKinds[std::array{0, 1, 3}[i / 2 % 3]];
    if (i / 2 % 4 == 1) c.train.precision = Precision::kBf16;
    if (i / 2 % 4 == 2) c.train.clip_norm = 1;
    if (!check(c).ok()) c.layout.collective_algorithm = AlgorithmChoice::kRing;
    c.name += " " + std::string(name_of(c.layout.compression.kind)) + " " + std::string(name_of(c.train.precision));
    all.push_back(std::move(c));
  }
  return all;
}

TEST_CASE("compressed and sharded: peak, classes and wire bytes of the plan equal its replay") {
  const std::vector<Case> all = scattered_cases();
  CHECK(all.size() == 2016);
  for (size_t i = 0; i < all.size(); i += dealt(1, 5)) testing::require_equal(all[i], i % 97 == 0);
}

TEST_CASE("nothing but fp32 is added on the wire, where integers would overflow and narrow floats round at every hop") {
  for (const Compression& kind : kKinds) {
    Case c = compressed_cases().front();
    c.layout.compression = kind;
    suit(c);
    int64_t moved = 0;
    const Plan plan = plan_of(c);
    for (const Segment& segment : plan.segments)
      for (const Step& step : segment.steps) {
        const Op* op = std::get_if<Op>(&step);
        const Collective* collective = op == nullptr ? nullptr : std::get_if<Collective>(&op->work);
        if (collective == nullptr) continue;
        const bool adds = collective->kind == CollectiveKind::kAllReduce || collective->kind == CollectiveKind::kReduceScatter;
        const DType dtype = segment.slots[op->reads[0].index()].type.dtype;
        CHECK((!adds || dtype == DType::f32 || dtype == DType::f64));
        moved += dtype != DType::f32 && dtype != DType::f64;
      }
    const bool codes = kind.kind == CompressionKind::kInt8 || kind.kind == CompressionKind::kBf16 ||
                       kind.kind == CompressionKind::kTopK || kind.kind == CompressionKind::kOneBitAdam;
    CHECK((moved > 0) == codes);
  }
}

/// Bytes that four ranks send of the gradients of a model whose extents are multiples of 2048, so that nothing is padded.
int64_t sent(const Compression& compression) {
  Case c;
  Model& m = c.model;
  m.family = Family::kLlama;
  m.layers = 1;
  m.hidden = 2048;
  m.heads = m.kv_heads = 16;
  m.head_dim = 128;
  m.ffn = 4096;
  m.vocab = 2048;
  c.train.seq_len = 8;
  c.layout.dp = 4;
  c.layout.compression = compression;
  return total_wire_bytes(plan_of(c)).at("dp.grads");
}

TEST_CASE("what is sent is the plain volume by the width of an element, scales counted") {
  const int64_t plain = sent({});
  CHECK(2 * sent({.kind = CompressionKind::kBf16}) == plain);
  // 8 bits and a scale of 32 for each 256 elements: 8.125 of 32 bits.
  CHECK(sent({.kind = CompressionKind::kInt8}) * 32 * 8 == plain * 65);
  CHECK(sent({.kind = CompressionKind::kInt8, .bits = 4}) * 32 * 8 == plain * 33);
  // 8 bytes an element that every rank sends to N - 1 others, where a reduction sends 4 (N - 1) / N twice: N k of the plain volume.
  CHECK(sent({.kind = CompressionKind::kTopK, .k = 1.0 / 64}) * 16 == plain);
  CHECK(sent({.kind = CompressionKind::kRandomK, .k = 1.0 / 64}) * 64 == plain);
  // One bit of 32, and 4 scales of 4 bytes for each of 9 parameters, twice to 3 others.
  CHECK(sent({.kind = CompressionKind::kOneBitAdam, .warmup = 1}) * 32 == plain + 32 * 2 * 3 * 4 * 4 * 9);
  // r (R + C) elements for each R C, rank 4: [6144 and 8192 and 2048, 2048] and [2048, 4096 and 2048], and two tables of [2048,
  // 2048]. The three norms travel plain.
  const int64_t thin = 4 * (6144 + 2048 + 8192 + 2048 + 2048 + 2048 + 2048 + 4096 + 2 * 4096), norms = 3 * 2048;
  CHECK(sent({.kind = CompressionKind::kPowerSgd, .rank = 4}) == 2 * 3 * 4 * (thin + norms));
}

/// What a plan's ranks keep from step to step: stage, name and type. Scratch is nothing to keep.
std::vector<std::string> kept(const Plan& plan) {
  std::vector<std::string> all;
  for (const Role& role : plan.roles)
    for (const Buffer& b : role.buffers)
      if (b.persistent && !b.view && b.kind != BufferClass::kWorkspace)
        all.push_back(fmt::format("{} {} {}", role.stage, print(b.type, plan.mesh), b.name));
  std::ranges::sort(all);
  return all;
}

TEST_CASE("both phases of 1-bit Adam keep the same state; the first sends 32 times the signs and needs no more memory") {
  int checked = 0;
  for (const Case& c : compressed_cases()) {
    if (c.layout.compression.kind != CompressionKind::kOneBitAdam || checked++ % 4 != 0) continue;
    INFO(c.name);
    const auto lowered = lower_warm_up(c);
    REQUIRE((lowered.ok() ? "" : to_string(lowered.error())) == "");
    const Plan &first = *lowered, second = plan_of(c);
    const std::vector<std::string> state = kept(second);
    REQUIRE(kept(first) == state);
    const int64_t n = c.layout.dp,
                  buckets = std::ranges::count_if(state, [](const std::string&k) { return k.ends_with(".error"); });
    const bool doubling = c.layout.collective_algorithm == AlgorithmChoice::kHalvingDoubling && !c.canonical;
    if (!doubling)  // whose all-to-all sends parts several times
      CHECK(total_wire_bytes(first).at("dp.grads") ==
            32 * (total_wire_bytes(second).at("dp.grads") - 2 * (n - 1) * n * 4 * buckets));
    for (int role = 0; role < static_cast<int>(second.roles.size()); ++role)
      CHECK(memory_peak(first, role)[0].peak_bytes <= memory_peak(second, role)[0].peak_bytes);
  }
  CHECK(checked > 100);
}

TEST_CASE("1-bit Adam is refused where it has no meaning, with what to do instead") {
  Case plain = compressed_cases().front();
  plain.layout.compression = {.kind = CompressionKind::kOneBitAdam, .warmup = 2};
  suit(plain);
  REQUIRE(check(plain).ok());
  testing::Refusals r(plain);
  r.c.layout.compression.warmup = 0;
  r.refused("compression.warmup=0: the variance that it freezes would be 0");
  r.c.train.optimizer = Optimizer::kSgd;
  r.refused("with optimizer=sgd: what it sends is Adam's momentum");
  r.c.layout.tp = 2;
  r.refused("one-bit-adam with tp=2");
  r.c.layout.zero = 1;
  r.refused("one-bit-adam with zero=1");
  r.c.train.clip_norm = 1;
  r.refused("no rank has the gradient whose norm that is");
  r.c.train.grad_norm = true;
  r.refused("one-bit-adam with grad_norm");
  r.c.layout.offload.optimizer = OffloadTo::kCpu;
  r.refused("one-bit-adam with offload.optimizer=cpu");
  r.c.model.tied_embeddings = true;
  r.c.canonical = true;
  r.refused("one-bit-adam with canonical and tied embeddings");
}

TEST_CASE("compression is refused where it has no meaning, with what to do instead") {
  testing::Refusals r(compressed_cases().front());
  r.c.layout.dp = 1;
  r.refused("compression.kind=int8 with dp=1");
  r.c.layout.zero = 3;
  r.c.layout.bucket_bytes = 0;
  r.refused("compression.kind=int8 with zero=3");
  r.c.layout.zero = 1;
  r.c.layout.compression.kind = CompressionKind::kRandomK;
  r.refused("compression.kind=random-k with zero=1");
  r.c.layout.compression.bits = 5;
  r.refused("compression.bits=5");
  r.c.train.precision = Precision::kBf16;
  r.c.train.reduce_dtype = "bf16";
  r.refused("reduce_dtype=bf16: errors are kept of fp32 gradients");
  r.c.layout.compression = {.kind = CompressionKind::kTopK, .k = 0};
  r.refused("compression.k=0");
  r.c.layout.compression = {.kind = CompressionKind::kRandomK, .k = 1.5};
  r.refused("compression.k=1.5");
  r.c.layout.compression = {.kind = CompressionKind::kPowerSgd, .rank = 0};
  r.refused("compression.rank=0");
  r.c.layout.compression = {.kind = CompressionKind::kPowerSgd};
  r.c.layout.tp = 2;
  r.refused("powersgd with tp=2");
  r.c.layout.compression = {.kind = CompressionKind::kPowerSgd};
  r.c.layout.pp = 2;
  r.c.layout.schedule = Schedule::k1F1B;
  r.c.model.layers = 2;
  r.c.model.tied_embeddings = true;
  r.refused("powersgd with pp=2 and tied embeddings");
  r.c.layout.compression = {.kind = CompressionKind::kTopK};
  r.c.model.vocab = int64_t{1} << 30;
  r.refused("an index of 32 bits");
}

}  // namespace
}  // namespace shardlab::testing
