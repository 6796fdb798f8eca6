// Memory against the formulas of the papers.
#include <algorithm>
#include <map>
#include <random>

#include "simulator/estimator/analytic/inside.h"
#include "tests/analytic/studies.h"
#include "tests/test.h"

namespace shardlab::simulator::analytic {
namespace {

using testing::gpt_175b;
using testing::llama_8b;
using testing::mixtral_8x7b;
using testing::study;

/// GPT-3 cut by tp alone; 8 divides the padded vocabulary.
constexpr int64_t kLayer175b = 12LL * 12288 * 12288 + 13LL * 12288;

TEST_CASE("ZeRO: 2 + 4 + 12 bytes a parameter, cut stage by stage") {
  // Rajbhandari et al. 2020, section 5, with fp32 gradients as Megatron accumulates them.
  Estimator estimator(study(llama_8b(), "megatron", 8));
  const double n = 64, psi = 8'030'261'248.0;
  const auto state = [&](int zero) {
    const MemoryBytes m = estimator.stage_memory({.dp = 64, .zero = zero, .micro_batch = 1, .grad_accumulation = 2}, 0);
    return static_cast<double>(m[MemoryPart::kParameters] + m[MemoryPart::kGradients] + m[MemoryPart::kMaster] +
                               m[MemoryPart::kMoments]);
  };
  CHECK(state(0) == Approx(18 * psi).epsilon(1e-9));
  CHECK(state(1) == Approx(6 * psi + 12 * psi / n).epsilon(1e-9));
  CHECK(state(2) == Approx(2 * psi + 16 * psi / n).epsilon(1e-9));
  CHECK(state(3) == Approx(18 * psi / n).epsilon(1e-9));
}

TEST_CASE("activations of a layer are s b h (34 + 5 a s / h) / t under sequence parallelism") {
  // Korthikanti et al. 2022, equation 4; statistics of the norms and labels, which it leaves out, are below a part in a thousand.
  const Prepared prepared = study(gpt_175b(), "megatron-2022", 1);
  for (const int tp : {2, 4, 8}) {
    const Point point{.tp = tp, .sequence_parallel = true, .precision = Precision::kFp16, .micro_batch = 1, .seq_len = 2048};
    double kept = 0;
    for (const ActivationItem& item : activations_by_kind(prepared, point)) kept += static_cast<double>(item.kept);
    const double s = 2048, h = 12288, a = 96;
    CHECK(kept == Approx(s * h / tp * (34 + 5 * a * s / h)).epsilon(1e-3));
    Point selective = point;
    selective.recompute.modules = Recompute::kSelective;
    kept = 0;
    for (const ActivationItem& item : activations_by_kind(prepared, selective)) kept += static_cast<double>(item.kept);
    CHECK(kept == Approx(s * h / tp * 34).epsilon(1e-3));
    Point full = point;
    full.recompute.modules = Recompute::kLayer;
    kept = 0;
    for (const ActivationItem& item : activations_by_kind(prepared, full)) kept += static_cast<double>(item.kept);
    CHECK(kept == Approx(2 * s * h / tp));
  }
}

TEST_CASE("parameters of a pipeline's stages add up to the model") {
  const Prepared prepared = study(gpt_175b(), "megatron", 96);
  Estimator estimator(prepared);
  for (const auto& [pp, vpp, schedule] : {std::tuple{8, 1, Schedule::k1F1B},
                                          {8, 3, Schedule::kInterleaved},
                                          {7, 1, Schedule::kAfab},
                                          {5, 1, Schedule::kZbH1},
                                          {96, 1, Schedule::k1F1B}}) {
    const Point point{.tp = 8, .pp = pp, .vpp = vpp, .schedule = schedule, .grad_accumulation = 16};
    int64_t bytes = 0;
    for (int32_t stage = 0; stage < pp; ++stage) bytes += estimator.stage_memory(point, stage)[MemoryPart::kParameters];
    // Whole on each of 8 ranks: norms, biases of row-parallel projections, positions. The head has a table of its own.
    const int64_t replicated = 96LL * 6 * 12288 + 2 * 12288 + 2048LL * 12288;
    const int64_t cut = 96 * (kLayer175b - 6LL * 12288) + 2LL * 51200 * 12288;
    CHECK(bytes == 2 * (cut / 8 + replicated));
  }
}

TEST_CASE("experts are cut by ep and gathered by no one") {
  Estimator estimator(study(mixtral_8x7b(), "megatron", 4));
  const Point whole{.dp = 32, .zero = 1};
  Point cut = whole;
  cut.ep = 8;
  const int64_t experts = 32LL * 8 * 3 * 4096 * 14336;
  CHECK(estimator.stage_memory(whole, 0)[MemoryPart::kParameters] - estimator.stage_memory(cut, 0)[MemoryPart::kParameters] ==
        2 * (experts - experts / 8));
  // Of 8 times fewer experts the state is cut 8 times fewer ways.
  CHECK(estimator.stage_memory(whole, 0)[MemoryPart::kMoments] == estimator.stage_memory(cut, 0)[MemoryPart::kMoments]);
}

TEST_CASE("offload moves bytes and loses none") {
  Estimator estimator(study(llama_8b(), "deepspeed", 1));
  const Point device{.dp = 8, .zero = 3, .recompute = {Recompute::kLayer}};
  Point cpu = device, nvme = device;
  cpu.offload_optimizer = Medium::kCpu;
  nvme.offload_optimizer = Medium::kNvme, nvme.offload_parameters = Medium::kCpu;
  const Estimate a = estimator(device), b = estimator(cpu), c = estimator(nvme);
  const int64_t optimizer = a.memory[MemoryPart::kMaster] + a.memory[MemoryPart::kMoments];
  CHECK(b.host_bytes == optimizer);
  CHECK(b.memory.live() == a.memory.live() - optimizer);
  CHECK(c.nvme_bytes == optimizer);
  CHECK(c.host_bytes == a.memory[MemoryPart::kParameters]);
  CHECK(b.step_s > a.step_s);
  CHECK(c.step_s > b.step_s);
}

TEST_CASE("a step's allocations peak where the estimate says and end where they began") {
  const Prepared prepared = study(gpt_175b(), "megatron", 64);
  for (const char* recompute : {"none", "selective", "full", "norms+activation"}) {
    Point point{.dp = 8, .tp = 8, .pp = 8, .zero = 1, .schedule = Schedule::k1F1B, .grad_accumulation = 16};
    REQUIRE(read(recompute, &point.recompute));
    Estimator estimator(prepared);
    for (const int32_t stage : {0, 3, 7}) {
      int64_t live = 0, peak = 0;
      std::map<int32_t, int64_t> tensors;
      int64_t state = 0;
      for (const AllocationEvent& e : allocation_events(prepared, point, stage)) {
        live += e.bytes, peak = std::max(peak, live);
        tensors[e.tensor] += e.bytes;
        REQUIRE(tensors[e.tensor] >= 0);
        if (e.part != MemoryPart::kActivations && e.part != MemoryPart::kTransient && e.part != MemoryPart::kLogits)
          state += e.bytes;
      }
      CHECK(live == state);
      const auto expected = static_cast<double>(estimator.stage_memory(point, stage).live());
      INFO(recompute << " stage " << stage);
      CHECK(static_cast<double>(peak) == Approx(expected).epsilon(0.03));
    }
  }
}

TEST_CASE("more of what saves memory never takes more") {
  Estimator estimator(study(llama_8b(), "megatron", 16));
  std::mt19937 random(11);
  const auto pick = [&](std::initializer_list<int32_t> v) { return v.begin()[random() % v.size()]; };
  for (int i = 0; i < 2000; ++i) {
    Point p{.dp = pick({1, 2, 4}), .tp = pick({1, 2, 4, 8}), .zero = pick({0, 1, 2, 3}), .micro_batch = pick({1, 2, 4})};
    p.grad_accumulation = pick({1, 4}), p.seq_len = pick({1024, 8192});
    const auto live = [&](const Point& q) { return estimator(q).memory.live(); };
    Point full = p, parallel = p, longer = p, wider = p;
    full.recompute.modules = Recompute::kLayer;
    parallel.sequence_parallel = true;
    longer.seq_len *= 2, wider.micro_batch *= 2;
    CHECK(live(full) <= live(p));
    CHECK(live(parallel) <= live(p));
    CHECK(live(longer) > live(p));
    CHECK(live(wider) == live(longer));  // flash attention: tokens alone count
    for (int zero = p.zero + 1; zero <= 2; ++zero) {
      Point cut = p;
      cut.zero = zero;
      CHECK(live(cut) <= live(p));
    }
  }
}

TEST_CASE("ends that count as layers take a layer from the stages that hold them") {
  ModelShape shape = llama_8b();
  shape.layers = 94;
  const Point even{.pp = 8, .vpp = 3, .schedule = Schedule::kInterleaved, .grad_accumulation = 8};
  Point ends = even;
  ends.embedding_as_layer = ends.head_as_layer = true;
  const StageLayers split(shape, ends);
  CHECK(split.layers(0) == 11);
  CHECK(split.layers(3) == 12);
  CHECK(split.layers(7) == 11);
  CHECK(split.before(7) == 83);
  CHECK(split.holder(83) == 7);
  CHECK(split.sound);
  // 8 x 12 parts of one layer: two of them are the ends.
  ends.vpp = 12;
  const Prepared prepared = study(shape, "megatron", 1);
  CHECK(refusal_of(prepared, ends) == Refusal::kNone);
  Point thirteen = ends;
  thirteen.vpp = 13;
  CHECK(refusal_of(prepared, thirteen) == Refusal::kSchedule);
}

TEST_CASE("stages at the ends may have layers of their own number") {
  ModelShape shape = llama_8b();
  shape.layers = 12;
  Point uneven{.pp = 4, .schedule = Schedule::k1F1B, .first_layers = 2, .last_layers = 2};
  const StageLayers split(shape, uneven);
  int64_t all = 0;
  for (int32_t stage = 0; stage < 4; ++stage) {
    CHECK(split.before(stage) == all);
    all += split.layers(stage);
  }
  CHECK(all == 12);
  CHECK(split.layers(1) == 4);
  uneven.first_layers = 13;
  CHECK(refusal_of(study(shape, "megatron", 1), uneven) == Refusal::kLayers);
}

TEST_CASE("under fp8 linears keep what they read in 8 bits, where the framework does") {
  const auto kept = [](const char* profile, Precision precision) {
    double bytes = 0;
    for (const ActivationItem& item : activations_by_kind(study(llama_8b(), profile, 1), {.precision = precision, .seq_len = 4096}))
      bytes += static_cast<double>(item.kept);
    return bytes;
  };
  // Both norms, the activated feed-forward and, beside attention's own output, the projection's input: one byte less or more each.
  const double tokens = 4096, saved = tokens * (2 * 4096 + 14336), more = tokens * 4096;
  CHECK(kept("megatron", Precision::kBf16) - kept("megatron", Precision::kFp8) == Approx(saved - more));
  CHECK(kept("torchtitan", Precision::kBf16) == kept("torchtitan", Precision::kFp8));
}

/// Bytes that one layer and micro-batch of 4,096 tokens keeps in the tensors of a name.
int64_t kept_of(const ModelShape& shape, const char* profile, std::string_view name, Precision precision = Precision::kBf16) {
  int64_t bytes = 0;
  for (const ActivationItem& item : activations_by_kind(study(shape, profile, 1), {.precision = precision, .seq_len = 4096}))
    if (item.name == name) bytes += item.kept;
  return bytes;
}

TEST_CASE("where q and k are rotated into tensors of their own, attention copies v and the projection's output goes") {
  const int64_t q = 4096, k = 1024;
  CHECK(kept_of(llama_8b(), "megatron", "rotated q, k") == 4096 * 2 * (q + k));
  CHECK(kept_of(llama_8b(), "megatron", "qkv") == 4096 * 2 * k);
  // Learned positions rotate nothing.
  CHECK(kept_of(gpt_175b(), "megatron", "qkv") == 4096 * 2 * 3 * 12288);
}

TEST_CASE("experts keep no results where probabilities weight the activation, and one product more where no kernel does both") {
  const int64_t copies = 2 * 4096;
  CHECK(kept_of(mixtral_8x7b(), "megatron", "expert results") == copies * 2 * 4096);
  CHECK(kept_of(mixtral_8x7b(), "megatron-2026", "expert results") == 0);
  CHECK(kept_of(mixtral_8x7b(), "megatron-2026", "activated, not weighted") == 0);
  CHECK(kept_of(mixtral_8x7b(), "megatron-functional", "activated, not weighted") == copies * 2 * 14336);
  // Grouped products keep what they read in 8 bits too.
  CHECK(kept_of(mixtral_8x7b(), "megatron", "permuted tokens") == copies * 2 * 4096);
  CHECK(kept_of(mixtral_8x7b(), "megatron", "permuted tokens", Precision::kFp8) == copies * 4096);
}

TEST_CASE(
    "instances of the optimizer share its state out among their own ranks, experts' among an instance's part of their replicas") {
  Estimator estimator(study(mixtral_8x7b(), "megatron", 4));
  Point whole{.dp = 32, .ep = 8, .zero = 1}, halves = whole;
  halves.hybrid_shard = 16;
  const LayerParameters layer = moe_layer_parameters(mixtral_8x7b());
  const double experts = 32.0 * static_cast<double>(layer.expert) / 8;
  const double dense = 32.0 * static_cast<double>(layer.matrix + layer.replicated) + 2.0 * 32000 * 4096 + 4096;
  const auto state = [&](const Point& p) {
    const MemoryBytes m = estimator.stage_memory(p, 0);
    return static_cast<double>(m[MemoryPart::kMaster] + m[MemoryPart::kMoments]);
  };
  CHECK(state(whole) == Approx(12 * (dense / 32 + experts / 4)));
  CHECK(state(halves) == Approx(12 * (dense / 16 + experts / 2)));
}

TEST_CASE("gradients that nobody reads are made where matmuls add the real ones") {
  FrameworkProfile apart = testing::profile("megatron-2026");
  apart.overlap.wgrad_fused = 0;
  Estimator fused(study(llama_8b(), "megatron-2026", 1)), own(*prepare(llama_8b(), testing::machine(1), apart));
  const int64_t shapes = 4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336;
  CHECK(fused.stage_memory({}, 0)[MemoryPart::kWorkspace] - own.stage_memory({}, 0)[MemoryPart::kWorkspace] == 2 * shapes);
}

TEST_CASE("a part of a looped stage that is an end of the model alone keeps no layer") {
  ModelShape shape = llama_8b();
  shape.layers = 6;
  Estimator estimator(study(shape, "megatron", 1));
  // Eight parts: the embedding, six layers, the head. The last stage has a layer and the head; its layer's part takes four
  // micro-batches before the head's takes one.
  const Point ends{.pp = 4,
                   .vpp = 2,
                   .schedule = Schedule::kInterleaved,
                   .grad_accumulation = 8,
                   .seq_len = 4096,
                   .embedding_as_layer = true,
                   .head_as_layer = true};
  CHECK(in_flight_of_part(ends, 3, 0) == 4);
  CHECK(in_flight_of_part(ends, 3, 1) == 1);
  double layer = 0;
  for (const ActivationItem& item : activations_by_kind(study(shape, "megatron", 1), ends)) layer += static_cast<double>(item.kept);
  const double norm = 4096.0 * 4096 * 2 * 2;  // the final norm's input and output, of one micro-batch
  CHECK(static_cast<double>(estimator.stage_memory(ends, 3)[MemoryPart::kActivations]) == Approx(4 * layer + norm).epsilon(1e-3));
}

TEST_CASE("bytes held for exchanges grow with tokens and width alone") {
  const Prepared prepared = study(llama_8b(), "nanotron", 8);
  const HeldBytes held = held_bytes(prepared, {.tp = 8, .micro_batch = 2, .seq_len = 4096});
  CHECK(held.typical == 40LL * 2 * 2 * 4096 * 4096);
  CHECK(held.most == 70LL * 2 * 2 * 4096 * 4096);
  CHECK(held_bytes(prepared, {.tp = 2, .micro_batch = 2, .seq_len = 4096}).typical == held.typical);
  CHECK(held_bytes(prepared, {.tp = 1, .micro_batch = 2, .seq_len = 4096}).most == 0);
  CHECK(held_bytes(study(llama_8b(), "megatron", 8), {.tp = 8, .seq_len = 4096}).most == 0);
}

TEST_CASE("parts of an optimizer are offloaded one by one, and layers of activations") {
  Estimator estimator(study(llama_8b(), "megatron", 1));
  Point point{.zero = 1, .offload_optimizer = Medium::kCpu};
  const auto optimizer = [&](uint8_t parts) {
    point.offload_parts = parts;
    const MemoryBytes m = estimator.stage_memory(point, 0);
    return m[MemoryPart::kMaster] + m[MemoryPart::kMoments];
  };
  const int64_t psi = 8'030'261'248;
  CHECK(optimizer(Point::kWholeOptimizer) == 0);
  CHECK(optimizer(Point::kMaster) == 8 * psi);
  CHECK(optimizer(Point::kFirstMoment) == 8 * psi);
  CHECK(optimizer(Point::kMaster | Point::kSecondMoment) == 4 * psi);
  Point half{.offload_activations = Medium::kCpu, .offload_layers = 16}, all = half, none;
  all.offload_layers = 0, none.micro_batch = half.micro_batch;
  const auto kept = [&](const Point& p) { return static_cast<double>(estimator.stage_memory(p, 0)[MemoryPart::kActivations]); };
  CHECK(kept(none) - kept(half) == Approx((kept(none) - kept(all)) / 2));
}

}  // namespace
}  // namespace shardlab::simulator::analytic
