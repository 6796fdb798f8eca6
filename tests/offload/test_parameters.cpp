// Parameters in host memory and on NVMe: bytes of every space to the replay, as measured and as planned; the bits of ZeRO-3,
// and with one rank those of a run without anything outside the device.
#include <algorithm>
#include <string>

#include "plan/memory.h"
#include "plan/model.h"
#include "strategies/lower.h"
#include "tests/deal.h"
#include "tests/namespaces.h"
#include "tests/offload/cases.h"
#include "tests/test.h"

namespace shardlab::testing::of_parameters {
namespace {

using namespace testing;

constexpr Offload kPlaces[] = {
    {.optimizer = OffloadTo::kCpu, .parameters = OffloadTo::kCpu},
    {.optimizer = OffloadTo::kNvme, .parameters = OffloadTo::kCpu},
    {.optimizer = OffloadTo::kCpu, .parameters = OffloadTo::kNvme},
    {.optimizer = OffloadTo::kNvme, .parameters = OffloadTo::kNvme},
    {.activations = OffloadTo::kNvme, .optimizer = OffloadTo::kNvme, .parameters = OffloadTo::kNvme},
};

constexpr Ranks kRanks[] = {
    {.zero = 3},
    {.zero = 3, .accumulation = 3},
    {.dp = 2, .zero = 3},
    {.dp = 2, .zero = 3, .accumulation = 4},
    {.dp = 3, .zero = 3, .accumulation = 2},
    {.dp = 2, .zero = 3, .tp = 2, .accumulation = 2},
    {.zero = 3, .pp = 2, .schedule = Schedule::k1F1B, .accumulation = 4},
    {.dp = 2, .zero = 3, .pp = 2, .schedule = Schedule::kAfab, .accumulation = 2},
};

constexpr Fsdp kUnits[] = {{1, 1, true}, {2, 2, true}, {1, 0, true}, {2, 1, false}};

/// Calls `visit` with a case for every family, layout, tie, precision, unit and overlap; nothing is outside the device yet.
template <class Visit>
void for_each_case(const Visit& visit) {
  for (const Family family : {Family::kGpt, Family::kLlama})
    for (const Ranks& ranks : kRanks)
      for (const bool tied : {false, true})
        for (const char* precision : {"fp32", "bf16", "bf16 gradients"})
          for (const Fsdp& unit : kUnits)
            for (const bool overlap : {false, true}) {
              Case c = small_case(family, 5);
              set(c, ranks);
              c.model.tied_embeddings = tied;
              c.train.precision = precision[0] == 'b' ? Precision::kBf16 : Precision::kFp32;
              if (precision == std::string("bf16 gradients")) c.train.accumulate_dtype = "bf16";
              c.layout.fsdp = unit;
              c.layout.overlap = overlap;
              visit(std::move(c));
            }
}

Case offloaded(Case c, const Offload& offload) {
  c.layout.offload = offload;
  return c;
}

/// The same on one rank without ZeRO, where there is one; micro-batches are then added up in canonical order on both sides.
Case kept(Case c) {
  if (c.layout.dp == 1) c.layout.zero = 0, c.layout.fsdp = {};
  return c;
}

MemoryPeak peak(const Case& c, Space space) { return memory_peak(plan_of(c), 0)[static_cast<size_t>(space)]; }
int64_t of(const MemoryPeak& p, BufferClass cls) { return p.peak_by_class.bytes[static_cast<size_t>(cls)]; }

}  // namespace

TEST_CASE("parameters outside the device: the plan's bytes are its replay's in every space") {
  size_t number = 0;
  for_each_case([&](Case c) {
    const size_t i = number++;
    if (i % dealt(1, 17) != 0) return;
    c.canonical = i % 3 == 1 && c.layout.dp != 3;
    c.train.optimizer = i % 4 == 3 ? Optimizer::kSgd : Optimizer::kAdamW;
    c.train.clip_norm = i % 5 == 2 ? 0.1f : 0;
    c.layout.recompute = i % 7 == 3 ? Recompute::kFull : Recompute::kNone;
    for (size_t place = 0; place < std::size(kPlaces); ++place)
      if ((i + place) % 2 == 0) require_replayed(offloaded(c, kPlaces[place]));
  });
}

TEST_CASE("parameters outside the device: what is measured is what was planned") {
  size_t number = 0;
  for_each_case([&](const Case& c) {
    if (number++ % dealt(31, 191) == 0) require_measured_as_planned(offloaded(c, kPlaces[number / 31 % std::size(kPlaces)]));
  });
}

TEST_CASE("parameters outside the device: the same bits as without") {
  size_t number = 0;
  for_each_case([&](Case c) {
    if (number++ % dealt(17, 149) != 0) return;
    c.train.optimizer = number % 3 == 0 ? Optimizer::kSgd : Optimizer::kAdamW;
    c.train.clip_norm = number % 4 == 1 ? 0.1f : 0;
    c.train.dropout = number % 2 == 0 ? 0.1f : 0;
    c.canonical = c.layout.dp != 3 && (c.layout.dp == 1 || number % 2 == 0);
    c.layout.recompute = number % 5 < 2 ? Recompute::kFull : Recompute::kNone;
    require_same_bits(kept(c), offloaded(c, kPlaces[number / 17 % std::size(kPlaces)]));
  });
}

TEST_CASE("with parameters outside nothing of the model's state stays on the device") {
  for (const int dp : {1, 2}) {
    Case c = small_case(Family::kGpt, 12);
    set(c, {.dp = dp, .zero = 3});
    for (const Offload& place : kPlaces) {
      const Case away = offloaded(c, place);
      const MemoryPeak device = peak(away, Space::kDevice);
      CHECK(of(device, BufferClass::kParameter) + of(device, BufferClass::kMaster) + of(device, BufferClass::kMoment) == 0);
      CHECK(of(device, BufferClass::kBuffer) < 4 * parameter_count(c.model) / 3);    // units under way
      CHECK(of(device, BufferClass::kGradient) < 4 * parameter_count(c.model) / 3);  // buckets
      const MemoryPeak waits = peak(away, place.parameters == OffloadTo::kNvme ? Space::kNvme : Space::kHost);
      CHECK(of(waits, BufferClass::kParameter) >= 4 * parameter_count(c.model) / dp);
    }
  }
}

TEST_CASE("parameters of a deeper model take no more of the device") {
  const auto device = [](int64_t layers) {
    Case c = small_case(Family::kGpt, layers);
    set(c, {.zero = 3});
    return peak(offloaded(c, kPlaces[4]), Space::kDevice).peak_bytes;
  };
  CHECK(device(24) == device(12));
}

TEST_CASE("parameters outside the device are refused by name where ZeRO-3 does not bring them") {
  const auto refused = [](Case c, const Offload& offload, const std::string& what) {
    const auto checked = check(offloaded(std::move(c), offload));
    REQUIRE_FALSE(checked.ok());
    INFO(checked.error().message);
    CHECK(checked.error().message.find(what) != std::string::npos);
    CHECK_FALSE(checked.error().hint.empty());
  };
  Case c = small_case(Family::kGpt);
  refused(c, kPlaces[0], "offload.parameters=cpu with zero=0");
  set(c, {.dp = 2, .zero = 2});
  refused(c, kPlaces[3], "offload.parameters=nvme with zero=2");
  set(c, {.dp = 4, .zero = 3});
  refused(c, {.parameters = OffloadTo::kCpu}, "offload.parameters=cpu with offload.optimizer=none");
  c.layout.hybrid_shard = 2;
  refused(c, kPlaces[0], "offload.parameters=cpu with hybrid_shard=2");
  c = small_case(Family::kGpt);
  set(c, {.zero = 3});
  CHECK_FALSE(check(c).ok());
  CHECK(check(offloaded(c, kPlaces[0])).ok());
}

}  // namespace shardlab::testing::of_parameters
