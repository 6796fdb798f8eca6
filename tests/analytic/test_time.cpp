// Time: its parts, its limits, and what no point may do.
#include <array>
#include <cmath>
#include <numeric>
#include <random>

#include "simulator/estimator/analytic/goodput.h"
#include "simulator/estimator/analytic/inside.h"
#include "sweeps/machines.h"
#include "sweeps/models.h"
#include "tests/analytic/studies.h"
#include "tests/test.h"

namespace shardlab::simulator::analytic {
namespace {

using testing::gpt_175b;
using testing::llama_8b;
using testing::mixtral_8x7b;
using testing::study;

/// Points of every kind, most of them legal.
class Dealer {
 public:
  explicit Dealer(unsigned seed) : random_(seed) {}
  template <class T>
  T of(std::initializer_list<T> v) {
    return v.begin()[random_() % v.size()];
  }
  Point point() {
    Point p{.dp = of({1, 2, 8, 32}), .tp = of({1, 2, 8}), .pp = of({1, 1, 2, 8}), .cp = of({1, 1, 2, 4}), .ep = of({1, 1, 2, 8})};
    p.zero = of({0, 1, 2, 3});
    p.schedule = p.pp == 1 ? Schedule::kNone : static_cast<Schedule>(1 + random_() % 11);
    if (p.schedule == Schedule::kInterleaved || p.schedule == Schedule::kBreadthFirst) p.vpp = of({2, 4});
    p.sequence_parallel = of({false, true});
    p.cp_kind = static_cast<CpKind>(random_() % 5);
    p.precision = of({Precision::kFp32, Precision::kBf16, Precision::kFp16, Precision::kFp8});
    p.recompute.modules = of<uint16_t>({0, Recompute::kSelective, Recompute::kLayer, Recompute::kNorms | Recompute::kActivation});
    p.micro_batch = of({1, 2, 5}), p.grad_accumulation = of({1, 8, 16, 64});
    p.seq_len = of<int64_t>({512, 4096, 65536});
    p.overlap = static_cast<int8_t>(of({-1, 0, 1})), p.tensor_overlap = static_cast<int8_t>(of({0, 1}));
    p.reshard = static_cast<int8_t>(of({-1, 0, 1}));
    p.offload_optimizer = of({Medium::kDevice, Medium::kDevice, Medium::kCpu, Medium::kNvme});
    p.offload_activations = of({Medium::kDevice, Medium::kDevice, Medium::kCpu});
    if (p.zero == 3) p.offload_parameters = of({Medium::kDevice, Medium::kCpu}), p.hybrid_shard = of({0, 0, 2});
    if (p.zero < 2) p.compression = of({Compression::kNone, Compression::kPowerSgd, Compression::kOneBit, Compression::kInt8});
    p.compression_rank = 4;
    p.expert_skew = of({1.0, 1.5});
    p.bucket_bytes = of<int64_t>({-1, -1, 0, 1 << 16, 1 << 30});
    p.algorithm = of({AlgorithmChoice::kAuto, AlgorithmChoice::kAuto, AlgorithmChoice::kRing, AlgorithmChoice::kHalvingDoubling});
    return p;
  }

 private:
  std::mt19937 random_;
};

TEST_CASE("every legal point has finite parts that add up; every other a reason") {
  Dealer dealer(3);
  for (const ModelShape& shape : {gpt_175b(), llama_8b(), mixtral_8x7b()})
    for (const std::string_view name : profile_names()) {
      const Prepared prepared = study(shape, name, 2048);
      Estimator estimator(prepared);
      int legal = 0;
      for (int i = 0; i < 400; ++i) {
        const Point p = dealer.point();
        const Estimate e = estimator(p);
        const Result<void> why = explain(prepared, p);
        REQUIRE(e.legal() == why.ok());
        if (!e.legal()) {
          REQUIRE(e.step_s == 0);
          REQUIRE(why.error().code == ExitCode::kNo);
          continue;
        }
        ++legal;
        double sum = 0;
        for (const double part : e.parts) {
          REQUIRE(std::isfinite(part));
          REQUIRE(part >= 0);
          sum += part;
        }
        REQUIRE(e.step_s > 0);
        REQUIRE(sum == Approx(e.step_s).epsilon(1e-12));
        for (const int64_t bytes : e.memory.bytes) REQUIRE(bytes >= 0);
        for (const double bytes : e.wire) REQUIRE((std::isfinite(bytes) && bytes >= 0));
        // No machine computes the model's flops above its peak.
        REQUIRE(e.model_flops / (e.step_s * static_cast<double>(p.world_size())) < 624e12);
      }
      CHECK(legal > 40);
    }
}

TEST_CASE("an estimator remembers nothing that changes an answer") {
  const Prepared prepared = study(mixtral_8x7b(), "megatron", 2048);
  Estimator one(prepared);
  Dealer dealer(5);
  for (int i = 0; i < 500; ++i) {
    const Point p = dealer.point();
    const Estimate a = one(p), b = estimate(prepared, p);
    REQUIRE(a.parts == b.parts);
    REQUIRE(a.memory.bytes == b.memory.bytes);
    REQUIRE(a.wire == b.wire);
  }
}

TEST_CASE("impossible points are refused, each for its reason") {
  const Prepared prepared = study(mixtral_8x7b(), "megatron", 4);
  const auto refusal = [&](auto change) {
    Point p{.dp = 4, .tp = 2, .pp = 2, .schedule = Schedule::k1F1B, .grad_accumulation = 4};
    change(p);
    const Estimate e = estimate(prepared, p);
    if (!e.legal()) CHECK(!to_string(explain(prepared, p).error()).empty());
    return e.refusal;
  };
  CHECK(refusal([](Point&) {}) == Refusal::kNone);
  CHECK(refusal([](Point& p) { p.dp = 0; }) == Refusal::kSize);
  CHECK(refusal([](Point& p) { p.micro_batch = -1; }) == Refusal::kSize);
  CHECK(refusal([](Point& p) { p.seq_len = int64_t{1} << 60; }) == Refusal::kSize);
  CHECK(refusal([](Point& p) { p.expert_skew = std::nan(""); }) == Refusal::kSize);
  CHECK(refusal([](Point& p) { p.dp = p.tp = p.pp = 1 << 20; }) == Refusal::kSize);
  CHECK(refusal([](Point& p) { p.zero = 4; }) == Refusal::kSize);
  CHECK(refusal([](Point& p) { p.dp = 9; }) == Refusal::kDevices);
  CHECK(refusal([](Point& p) { p.tp = 3; }) == Refusal::kHeads);
  CHECK(refusal([](Point& p) { p.dp = 1, p.tp = 1, p.pp = 32, p.schedule = Schedule::kNone; }) == Refusal::kSchedule);
  CHECK(refusal([](Point& p) { p.vpp = 2; }) == Refusal::kSchedule);
  CHECK(refusal([](Point& p) { p.schedule = Schedule::kInterleaved, p.vpp = 2, p.grad_accumulation = p.pp - 1; }) ==
        Refusal::kSchedule);
  CHECK(refusal([](Point& p) { p.cp = 2, p.seq_len = 2050; }) == Refusal::kSequence);
  CHECK(refusal([](Point& p) { p.ep = 3; }) == Refusal::kExperts);
  CHECK(refusal([](Point& p) { p.precision = Precision::kFp4; }) == Refusal::kPrecision);
  CHECK(refusal([](Point& p) { p.precision = Precision::kFp8; }) == Refusal::kNone);
  CHECK(refusal([](Point& p) { p.hybrid_shard = 2; }) == Refusal::kZero);
  CHECK(refusal([](Point& p) { p.offload_parameters = Medium::kCpu; }) == Refusal::kCombination);
  CHECK(refusal([](Point& p) { p.compression = Compression::kPowerSgd; }) == Refusal::kCombination);
}

TEST_CASE("smaller buckets cost a collective's latency each and leave less open; larger ones wait for backward") {
  const auto prepared = prepare(llama_8b(), testing::machine(8), testing::profile("shardlab"));
  REQUIRE(prepared.ok());
  const auto part = [&](int64_t bucket, int8_t overlap, AlgorithmChoice algorithm = AlgorithmChoice::kAuto) {
    const Estimate e = estimate(*prepared, {.dp = 64, .overlap = overlap, .bucket_bytes = bucket, .algorithm = algorithm});
    REQUIRE(e.legal());
    return e.part(TimePart::kDataParallel);
  };
  // 8.03 G gradients of 4 bytes: of 1 GiB 29.9 buckets, of 1 TiB one, by tensors 32 (4 matrices and 2 norms) and the two ends.
  const double bytes = 4 * static_cast<double>(parameter_count(llama_8b()));
  const double by_gib = bytes / static_cast<double>(1 << 30), tensors = 32 * 6 + 2;
  // A step waits 8 us over several nodes and 2 us within one (simulator/interpreter/efficiency.h). A ring has 126 of the first kind;
  // halving-doubling has 6 of either, as its distances 8, 16 and 32 cross nodes of eight.
  using enum AlgorithmChoice;
  for (const auto& [algorithm, waits] : {std::pair{kRing, 126 * 8e-6}, {kHalvingDoubling, 6 * 8e-6 + 6 * 2e-6}}) {
    CHECK(part(1 << 30, 0, algorithm) - part(int64_t{1} << 40, 0, algorithm) == Approx((by_gib - 1) * waits).epsilon(1e-6));
    CHECK(part(0, 0, algorithm) - part(int64_t{1} << 40, 0, algorithm) == Approx((tensors - 1) * waits).epsilon(1e-6));
    for (const int64_t bucket : {int64_t{0}, int64_t{1} << 30, int64_t{1} << 40})
      CHECK(part(bucket, 0) <= part(bucket, 0, algorithm));
  }
  // Beside backward the last bucket is open, which is complete only when backward is.
  CHECK(part(int64_t{1} << 40, 1) == Approx(part(int64_t{1} << 40, 0)));
  CHECK(part(1 << 30, 1) < part(int64_t{1} << 40, 1));
  // A tensor is in one bucket alone: there are no more buckets than tensors, however small.
  CHECK(part(1 << 20, 0) == part(1 << 10, 0));
}

TEST_CASE("a size of buckets or an algorithm that a framework or a group has not is refused") {
  const auto refusal = [&](std::string_view profile, const Point& p) {
    const auto prepared = prepare(llama_8b(), testing::machine(8), *profile_named(profile));
    REQUIRE(prepared.ok());
    const Refusal r = refusal_of(*prepared, p);
    if (r != Refusal::kNone) CHECK(!explain(*prepared, p).error().hint.empty());
    return r;
  };
  using enum AlgorithmChoice;
  CHECK(refusal("megatron", {.dp = 8, .zero = 1, .bucket_bytes = 1 << 26, .algorithm = kRing}) == Refusal::kNone);
  CHECK(refusal("megatron", {.dp = 8, .algorithm = kHalvingDoubling}) == Refusal::kAlgorithm);
  CHECK(refusal("megatron", {.dp = 8, .zero = 3, .bucket_bytes = 1 << 26}) == Refusal::kAbility);
  CHECK(refusal("torchtitan", {.dp = 8, .bucket_bytes = 1 << 26}) == Refusal::kAbility);
  CHECK(refusal("shardlab", {.dp = 8, .bucket_bytes = 0, .algorithm = kDirect}) == Refusal::kNone);
  CHECK(refusal("shardlab", {.dp = 6, .algorithm = kHalvingDoubling}) == Refusal::kAlgorithm);
  CHECK(refusal("shardlab", {.dp = 6, .algorithm = kRing}) == Refusal::kNone);
}

TEST_CASE("what a framework does not have is refused by name, with what it has and who has the rest") {
  struct Case {
    std::string_view profile, says;
    Point point;
  };
  const Point pipeline{.dp = 2, .pp = 2, .schedule = Schedule::k1F1B, .grad_accumulation = 4};
  const auto with = [&](auto change) {
    Point p = pipeline;
    change(p);
    return p;
  };
  const Case cases[] = {
      {"megatron", "megatron has no zb-h1 among its schedules: 1f1b, interleaved",
       with([](Point& p) { p.schedule = Schedule::kZbH1; })},
      {"deepspeed", "deepspeed has no 2 among its stages of ZeRO in a pipeline: 0, 1", with([](Point& p) { p.zero = 2; })},
      {"nanotron", "nanotron has no optimizer=cpu among its offloads: none",
       with([](Point& p) { p.offload_optimizer = Medium::kCpu; })},
      {"nanotron", "nanotron has no cp among its axes: tp, sequence_parallel, pp, ep", with([](Point& p) { p.dp = 1, p.cp = 2; })},
      {"torchtitan", "torchtitan has no fp16 among its precisions: fp32, bf16, fp8",
       with([](Point& p) { p.precision = Precision::kFp16; })},
      {"llm.c", "llm.c has no pp among its axes: none", pipeline},
      {"shardlab", "shardlab has no fp4 among its precisions: fp32, bf16, fp16, fp8",
       with([](Point& p) { p.precision = Precision::kFp4; })}};
  for (const Case& c : cases) {
    const auto prepared = prepare(llama_8b(), testing::machine(1), *profile_named(c.profile));
    REQUIRE(prepared.ok());
    INFO(c.says);
    CHECK(refusal_of(*prepared, c.point) == Refusal::kAbility);
    CHECK(estimate(*prepared, c.point).refusal == Refusal::kAbility);
    const auto said = explain(*prepared, c.point);
    REQUIRE(!said.ok());
    CHECK(said.error().message == c.says);
    CHECK(!said.error().hint.empty());
  }
  const auto zero_bubble = prepare(llama_8b(), testing::machine(1), *profile_named("megatron-zero-bubble"));
  CHECK(refusal_of(*zero_bubble, cases[0].point) == Refusal::kNone);
  CHECK(explain(*prepare(llama_8b(), testing::machine(1), *profile_named("megatron")), cases[0].point)
            .error()
            .hint.find("megatron-zero-bubble") != std::string::npos);
}

TEST_CASE("of a model that shardlab runs, a layout is legal exactly where its executor runs it") {
  const auto prepared = prepare(llama_8b(), testing::machine(1), *profile_named("shardlab"));
  REQUIRE(prepared.ok());
  Estimator estimator(*prepared);
  int legal = 0, refused = 0;
  for (const int tp : {1, 2})
    for (const int zero : {0, 1, 3})
      for (const Medium parameters : {Medium::kDevice, Medium::kCpu})
        for (const Medium activations : {Medium::kDevice, Medium::kNvme})
          for (const bool sequence_parallel : {false, true}) {
            Point p{.dp = 4, .tp = tp, .zero = zero, .sequence_parallel = sequence_parallel, .grad_accumulation = 4};
            p.offload_parameters = parameters, p.offload_activations = activations;
            const Estimate e = estimator(p);
            CHECK(e.legal() == (estimator.executed(p) != nullptr));
            CHECK(e.legal() == explain(*prepared, p).ok());
            ++(e.legal() ? legal : refused);
          }
  CHECK(legal > 0);
  CHECK(refused > 0);
}

TEST_CASE("the bubble's share is (p - 1) / (m + p - 1) of the pipeline's work") {
  // Narayanan et al. 2021, section 2.2, for equal stages: a model whose ends weigh next to nothing.
  ModelShape shape = gpt_175b();
  shape.vocab = 8, shape.max_positions = 1;
  FrameworkProfile profile = testing::profile("megatron");
  profile.model.vocab_multiple = 1, profile.host.step_s = 0, profile.host.collective_s = 0;
  Machine machine = testing::machine(8);
  machine.inter_bytes_per_s = 25e12;  // sends between stages, which are apart of the bubble, take next to no time
  const auto prepared = prepare(shape, machine, profile);
  REQUIRE(prepared.ok());
  for (const int32_t m : {8, 64}) {
    const Estimate e = estimate(*prepared, {.tp = 8, .pp = 8, .schedule = Schedule::k1F1B, .grad_accumulation = m});
    const double work = e.step_s - e.part(TimePart::kPipeline) - e.part(TimePart::kUpdate) - e.part(TimePart::kDataParallel);
    CHECK((e.part(TimePart::kPipeline) + work) / work == Approx((m + 7.0) / m).epsilon(0.02));
  }
}

TEST_CASE("overlap hides, and hides no more than there is") {
  const Prepared prepared = study(llama_8b(), "megatron", 8);
  Point open{.dp = 64, .zero = 1, .grad_accumulation = 4, .seq_len = 4096, .overlap = 0};
  Point hidden = open;
  hidden.overlap = 1;
  const Estimate a = estimate(prepared, open), b = estimate(prepared, hidden);
  CHECK(b.step_s < a.step_s);
  CHECK(b.part(TimePart::kDataParallel) < a.part(TimePart::kDataParallel));
  CHECK(b.part(TimePart::kDataParallel) > 0);  // the last bucket
  CHECK(a.hidden_comm_s == 0);
  CHECK(b.hidden_comm_s > 0);
  CHECK(a.wire == b.wire);
}

TEST_CASE("wire bytes by the formulas of the papers") {
  const ModelShape shape = llama_8b();
  const Prepared prepared = study(shape, "megatron", 8);
  const double psi = static_cast<double>(parameter_count(shape));
  const auto sent = [&](const Point& p, WireUse use) { return estimate(prepared, p).wire[static_cast<size_t>(use)]; };
  // Of n ranks that cut x bytes all together send (n - 1) x.
  CHECK(sent({.dp = 64, .zero = 0}, WireUse::kGradients) == Approx(2 * 63 * 4 * psi).epsilon(1e-9));
  CHECK(sent({.dp = 64, .zero = 1}, WireUse::kGradients) == Approx(63 * 4 * psi).epsilon(1e-9));
  CHECK(sent({.dp = 64, .zero = 1}, WireUse::kWeights) == Approx(63 * 2 * psi).epsilon(1e-9));
  CHECK(sent({.dp = 64, .zero = 3, .grad_accumulation = 3}, WireUse::kWeights) == Approx(3 * 2 * 63 * 2 * psi).epsilon(1e-9));
  CHECK(sent({.dp = 64, .zero = 3, .grad_accumulation = 3, .reshard = 0}, WireUse::kWeights) ==
        Approx(3 * 63 * 2 * psi).epsilon(1e-9));
  // 4 all-reduces of b s h a layer, one at each end, and 3 numbers a token for the loss.
  const double message = 2.0 * 4096 * 2048, token = 4.0 * 2048;
  CHECK(sent({.tp = 8, .seq_len = 2048}, WireUse::kTensor) == Approx(7 * 2 * ((32 * 4 + 2) * message + 3 * token)).epsilon(1e-9));
  const Point pipeline{.tp = 2, .pp = 4, .schedule = Schedule::k1F1B, .grad_accumulation = 5, .seq_len = 2048};
  CHECK(sent(pipeline, WireUse::kPipeline) == Approx(2 * 5 * 2 * 3 * message).epsilon(1e-9));
}

TEST_CASE("a training run's bill") {
  const Prepared prepared = study(llama_8b(), "megatron", 8);
  const Point p{.dp = 64, .zero = 1, .grad_accumulation = 2, .seq_len = 8192};
  const Estimate e = estimate(prepared, p);
  const double tokens = 1e12;
  const RunBill b = bill(prepared, p, e, tokens, {.device_hour_usd = 2, .power_w = 500, .overhead = 1.2, .kg_co2_per_kwh = 0.3});
  const double seconds = tokens / (64.0 * 2 * 8192) * e.step_s;
  CHECK(b.days == Approx(seconds / 86400));
  CHECK(b.device_hours == Approx(64 * seconds / 3600));
  CHECK(b.usd == Approx(2 * b.device_hours));
  CHECK(b.kwh == Approx(b.device_hours * 0.5 * 1.2));
  CHECK(b.kg_co2 == Approx(0.3 * b.kwh));
  CHECK(bill(prepared, p, Estimate{.refusal = Refusal::kHeads}, tokens, {}).days == 0);
}

TEST_CASE("skewed routing costs time and memory") {
  const Prepared prepared = study(mixtral_8x7b(), "megatron", 4);
  Point even{.dp = 32, .ep = 8, .zero = 1, .grad_accumulation = 2, .seq_len = 4096};
  Point skewed = even;
  skewed.expert_skew = 1.5;
  const Estimate a = estimate(prepared, even), b = estimate(prepared, skewed);
  CHECK(b.step_s > a.step_s);
  CHECK(b.part(TimePart::kExpertParallel) == Approx(1.5 * a.part(TimePart::kExpertParallel)));
  CHECK(b.memory.live() > a.memory.live());
}

TEST_CASE("where products wait for the host, skewed routes are never faster than even ones") {
  const ModelShape shape = shape_of(sweeps::load_model("qwen3-30b-a3b").value());
  const Prepared prepared = prepare(shape, sweeps::load_machine("hgx-h100-ndr").value(), testing::profile("megatron")).value();
  double last = 0;
  for (int i = 0; i <= 20; ++i) {
    const double skew = 1 + 0.02 * i;
    CAPTURE(skew);
    const Estimate e = estimate(prepared, {.dp = 8, .ep = 4, .seq_len = 4096, .expert_skew = skew});
    REQUIRE(e.legal());
    CHECK(e.part(TimePart::kLaunch) > 0);
    CHECK(e.step_s >= last);
    last = e.step_s;
  }
}

TEST_CASE("what products lose beside a reduction fills the backward pass's waits for the host, and costs the step what is left") {
  // Backward alone waits for the host, `launch_s` a kernel. `beside`: how much longer a product takes beside a collective.
  const auto step = [](double launch_s, double beside) {
    FrameworkProfile p = testing::profile("megatron");
    p.host = {.forward_s = 0, .backward_s = launch_s, .collective_s = 0, .sync = true};
    Machine m = testing::machine(1);
    m.device.constants["matmul.beside"] = beside;
    return estimate(prepare(llama_8b(), m, p).value(), {.dp = 8, .seq_len = 8192});  // backward hides all buckets but the last
  };
  const auto wait = [](const Estimate& e) { return e.part(TimePart::kLaunch); };
  const auto reducing = [](const Estimate& e) { return e.part(TimePart::kDataParallel); };
  const Estimate busy = step(0, 1.76), idle = step(10e-3, 1.76);
  REQUIRE(wait(busy) == 0);
  REQUIRE(wait(idle) > busy.step_s);
  const double last_bucket = reducing(idle), lost = reducing(busy) - last_bucket;
  CHECK(lost > 0.05 * busy.step_s);
  CHECK(reducing(step(0, 1)) < 0.1 * reducing(busy));  // most of it are products
  int left = 0, filled = 0;
  for (int i = 0; i <= 50; ++i) {
    const Estimate e = step(i * 50e-6, 1.76);
    CAPTURE(i, wait(e));
    CHECK(e.hidden_comm_s == Approx(busy.hidden_comm_s).epsilon(1e-12));
    CHECK(reducing(e) - last_bucket == Approx(std::max(0.0, lost - wait(e))).margin(1e-12));
    left += wait(e) > 0 && wait(e) < lost ? 1 : 0, filled += wait(e) > lost ? 1 : 0;
  }
  CHECK(left > 0);
  CHECK(filled > 0);
}

TEST_CASE("a capacity bounds what skewed routing costs, and below the even share rows are dropped") {
  const auto with = [](double factor, double skew) {
    ModelShape shape = mixtral_8x7b();
    shape.capacity_factor = factor;
    return estimate(study(shape, "megatron", 4),
                    {.dp = 32, .ep = 8, .zero = 1, .grad_accumulation = 2, .seq_len = 4096, .expert_skew = skew});
  };
  const Estimate even = with(0, 1), room = with(1.25, 1.5), half = with(0.5, 1.5);
  CHECK(room.part(TimePart::kExpertParallel) == Approx(1.25 * even.part(TimePart::kExpertParallel)));
  CHECK(room.memory.live() < with(0, 1.5).memory.live());
  CHECK(room.memory.live() == with(1.25, 1.25).memory.live());
  CHECK(with(2, 1.5).step_s == with(0, 1.5).step_s);
  CHECK(half.wire[static_cast<size_t>(WireUse::kExpert)] == Approx(0.5 * even.wire[static_cast<size_t>(WireUse::kExpert)]));
  CHECK(half.memory.live() < even.memory.live());
}

double wire_of(const Prepared& prepared, const Point& point, WireUse use) {
  const Estimate e = estimate(prepared, point);
  REQUIRE(e.legal());
  return e.wire[static_cast<size_t>(use)];
}

TEST_CASE("under fp8 gathers of sequence parallelism carry a byte an element where the framework casts first") {
  Point p{
      .dp = 8, .tp = 8, .zero = 3, .sequence_parallel = true, .recompute = {Recompute::kLayer}, .micro_batch = 2, .seq_len = 4096};
  const Prepared compiled = study(llama_8b(), "torchtitan-compiled", 8), rows = study(llama_8b(), "torchtitan-rowwise", 8);
  const double wide = wire_of(compiled, p, WireUse::kTensor);
  p.precision = Precision::kFp8;
  // A layer gathers six times: two inputs, forward and again, and two gradients. Half of 2 bytes is saved on 7 of 8 parts.
  const double saved = 32.0 * 6 * 2 * 4096 * 4096 * 7 / 8 * 64;
  CHECK(wide - wire_of(compiled, p, WireUse::kTensor) == Approx(saved));
  CHECK(wire_of(rows, p, WireUse::kTensor) == Approx(wide));
  CHECK(estimate(rows, p).step_s > estimate(compiled, p).step_s);
}

TEST_CASE("a pipeline goes at the pace of its slowest stages' devices, and is idle for those of one micro-batch") {
  ModelShape shape = gpt_175b();
  const auto part = [&](TimePart which, double spread, int dp) {
    Machine m = testing::machine(64);
    m.device.constants["matmul.spread"] = spread;
    const Point p{
        .dp = dp, .tp = 8, .pp = 8, .schedule = Schedule::k1F1B, .micro_batch = 2, .grad_accumulation = 16, .seq_len = 2048};
    const Estimate e = estimate(*prepare(shape, m, testing::profile("megatron-2022"), {}), p);
    REQUIRE(e.legal());
    return e.part(which);
  };
  const auto longer = [&](TimePart which, int dp) { return part(which, 0.015, dp) - part(which, 1e-300, dp); };
  CHECK(longer(TimePart::kPipeline, 8) > 0);
  CHECK(longer(TimePart::kPipeline, 8) == Approx(longer(TimePart::kPipeline, 1)).epsilon(1e-3));
  // One stage of eight is by far the slowest, that of a large head: its devices set the pace alone.
  shape.vocab *= 20;
  Machine m = testing::machine(64);
  m.device.constants["matmul.spread"] = 0.015;
  const DeviceModel device = *DeviceModel::of(m.device);
  const auto deviations = [&](int64_t devices) { return device.slowest_of(devices) - 1; };
  const double pace = longer(TimePart::kForward, 8) / longer(TimePart::kForward, 1);
  CHECK(pace == Approx(deviations(64) / deviations(8)).epsilon(0.01));  // some matmuls are at the limit on slow devices alone
}

TEST_CASE("a fused softmax takes rows of some lengths, and so many at once") {
  FrameworkProfile any = testing::profile("megatron-2022");
  REQUIRE(any.attention.softmax_multiple == 4);
  REQUIRE(any.attention.softmax_keys == 4096);
  const FrameworkProfile some = any;
  any.attention.softmax_multiple = 1, any.attention.softmax_keys = 0;
  const auto forward = [&](const FrameworkProfile& profile, int tp, int micro_batch, int64_t seq_len) {
    const Point p{.tp = tp, .micro_batch = micro_batch, .seq_len = seq_len};
    return estimate(*prepare(gpt_175b(), testing::machine(4), profile, {}), p).part(TimePart::kForward);
  };
  // Of 96 heads 32 ranks have three each: four sequences make a multiple of four, two do not.
  CHECK(forward(some, 32, 4, 2048) == forward(any, 32, 4, 2048));
  CHECK(forward(some, 32, 2, 2048) > forward(any, 32, 2, 2048));
  CHECK(forward(some, 8, 2, 2048) == forward(any, 8, 2, 2048));
  CHECK(forward(some, 8, 1, 8192) > forward(any, 8, 1, 8192));
  // What it keeps is in fp32 besides.
  const auto kept = [&](const FrameworkProfile& profile) {
    const Prepared prepared = *prepare(gpt_175b(), testing::machine(4), profile, {});
    return estimate(prepared, {.tp = 32, .micro_batch = 2, .seq_len = 2048}).memory[MemoryPart::kActivations];
  };
  CHECK(kept(some) - kept(any) == 96 * int64_t{4} * 3 * 2 * 2048 * 2048);
}

TEST_CASE("gradients pass a bucket where the framework flattens them") {
  FrameworkProfile flat = testing::profile("megatron-deepspeed"), none = flat;
  REQUIRE(flat.passes.bucketed == 12);
  none.passes.bucketed = 0;
  const auto data = [&](const FrameworkProfile& profile, int dp) {
    const Point p{.dp = dp, .tp = 8, .micro_batch = 2, .seq_len = 2048};
    return estimate(*prepare(llama_8b(), testing::machine(8), profile, {}), p).part(TimePart::kDataParallel);
  };
  const DeviceModel device = *DeviceModel::of(testing::machine(8).device);
  const double parameters = static_cast<double>(parameter_count(llama_8b()));
  const double copied = device.memory_bound_seconds(parameters / 8 * 12, 0, MemoryKernel::kBuffer);
  CHECK(data(flat, 8) - data(none, 8) == Approx(copied).epsilon(0.01));  // norms are whole on each rank, the table is padded
  CHECK(data(flat, 1) == data(none, 1));
}

TEST_CASE("what is gathered in a byte was rounded by its part, what is not by each rank whole") {
  const FrameworkProfile before = testing::profile("torchtitan-compiled");
  FrameworkProfile after = before, shared = before, wide = before;
  after.state.fp8_exchange = false, shared.state.fp8_shared = true, wide.state.fp8_gather = false;
  REQUIRE(before.state.fp8_exchange);
  REQUIRE_FALSE(before.state.fp8_shared);
  Point p{.dp = 8, .tp = 8, .zero = 3, .sequence_parallel = true, .micro_batch = 2, .seq_len = 4096};
  p.precision = Precision::kFp8;
  const DeviceModel device = *DeviceModel::of(testing::machine(8).device);
  const auto part = [&](const FrameworkProfile& profile, TimePart which) {
    return estimate(*prepare(llama_8b(), testing::machine(8), profile, {}), p).part(which);
  };
  const auto moved = [&](double bytes) { return device.memory_bound_seconds(bytes); };
  const double rows = 2.0 * 4096 * 4096, cast = before.passes.quantise, columns = before.passes.quantise_columns;
  // Two inputs a layer, each rounded once for all that read it; or by each of q, k, v and of gate and up.
  CHECK(part(after, TimePart::kForward) - part(before, TimePart::kForward) ==
        Approx(32 * (5 * moved(rows * cast) - 2 * moved(rows / 8 * cast))));
  // The columns that the weight gradients read are made of what was gathered, three times and twice, or once each.
  CHECK(part(before, TimePart::kBackward) - part(shared, TimePart::kBackward) == Approx(32 * 3 * moved(rows * columns)));
  CHECK(part(before, TimePart::kForward) == part(shared, TimePart::kForward));
  // Weights that come in 16 bits are rounded by each rank, and their scales agreed on.
  const double copies = before.passes.quantise_weight;
  double made = 0;
  for (const double out : {4096.0, 1024.0, 1024.0, 4096.0, 14336.0, 14336.0, 14336.0})
    made += moved(4096 * out / 8 * (copies + before.passes.quantise_gathered)) - moved(4096 * out / 8 * copies);
  CHECK(part(wide, TimePart::kForward) - part(before, TimePart::kForward) == Approx(32 * made));
  const double agreed = Fabric::of(testing::machine(8))->collective_seconds(CollectiveUse::kAllReduce, 4, {8, 1, 1});
  CHECK(part(wide, TimePart::kTensorParallel) - part(before, TimePart::kTensorParallel) == Approx(32 * 7 * agreed));
}

TEST_CASE("operator-wise recompute runs a product again whose scattered sum was kept, where nothing finds it unread") {
  FrameworkProfile compiled = testing::profile("torchtitan-compiled"), all = compiled;
  all.model.remakes_unread = true;
  REQUIRE_FALSE(compiled.model.remakes_unread);
  Point p{.dp = 8, .tp = 8, .zero = 3, .sequence_parallel = true, .micro_batch = 2, .seq_len = 4096};
  p.recompute = {Recompute::kSelective};
  const auto again = [&](const FrameworkProfile& profile) {
    return estimate(*prepare(llama_8b(), testing::machine(8), profile, {}), p).part(TimePart::kRecompute);
  };
  const DeviceModel device = *DeviceModel::of(testing::machine(8).device);
  const double product = device.matmul_seconds({.m = 2 * 4096, .n = 4096, .k = 512, .slowest = device.slowest_of(64)});
  CHECK(again(all) - again(compiled) == Approx(32 * product));
  // Without a scatter the product itself is what comes next.
  p.tp = 1, p.sequence_parallel = false;
  CHECK(again(all) == again(compiled));
}

TEST_CASE("a context gathered for one call a part sends keys and values whole, their gradients around in fp32") {
  const Point p{.dp = 2, .cp = 4, .zero = 3, .cp_kind = CpKind::kAllGather, .micro_batch = 1, .seq_len = 65536};
  const Prepared prepared = study(llama_8b(), "torchtitan", 1);
  const double kv = 2.0 * (65536 / 4) * 2 * 4096;  // bytes of a rank, repeated to all heads
  CHECK(wire_of(prepared, p, WireUse::kContext) == Approx(8 * 32 * (2 * 3 * kv + 4 * 2 * kv)));
  // The first part of a long context takes longer than gathering the others, that of a short one does not.
  CHECK(estimate(prepared, p).part(TimePart::kContextParallel) == 0);
  Point brief = p;
  brief.seq_len = 2048;
  CHECK(estimate(prepared, brief).part(TimePart::kContextParallel) > 0);
}

TEST_CASE("weights gathered tensor by tensor cost a latency each, the more so the more ranks there are") {
  FrameworkProfile by_tensor = testing::profile("deepspeed-2021"), by_unit = by_tensor;
  by_unit.overlap.by_tensor = false;
  const auto lost = [&](int nodes) {
    const Point p{.dp = 8 * nodes, .zero = 3, .precision = Precision::kFp16, .micro_batch = 4, .seq_len = 2048};
    const auto seconds = [&](const FrameworkProfile& profile) {
      return estimate(*prepare(gpt_175b(), testing::machine(nodes), profile, {}), p).part(TimePart::kDataParallel);
    };
    return seconds(by_tensor) - seconds(by_unit);
  };
  CHECK(lost(16) > 0);
  CHECK(lost(128) > 2 * lost(16));
}

TEST_CASE("of a collective that takes a list, the host makes a view of each rank's part, matrix by matrix") {
  FrameworkProfile once = testing::profile("deepspeed-2021"), twice = once;
  twice.host.view_s = 2 * once.host.view_s;
  constexpr int kNodes = 96, kRanks = 8 * kNodes, kLayers = 96, kMatrices = 4;
  // Of 32 sequences the backward of a layer takes longer than the host takes for its reductions.
  Point p{.dp = kRanks, .zero = 3, .precision = Precision::kFp16, .micro_batch = 32, .seq_len = 2048};
  const auto of = [&](const FrameworkProfile& profile) {
    return estimate(*prepare(gpt_175b(), testing::machine(kNodes), profile, {}), p);
  };
  const auto more = [&] { return of(twice).part(TimePart::kDataParallel) - of(once).part(TimePart::kDataParallel); };
  const auto weights = [&] { return of(once).wire[static_cast<size_t>(WireUse::kWeights)]; };
  const double view = kLayers * kMatrices * kRanks * once.host.view_s, sent = weights();
  CHECK(more() == Approx(2 * view));
  // A layer that is computed again keeps the last two of its matrices for backward: before the next use of the third from last, 1.8e9
  // elements of others are used, which is over 1e9.
  p.recompute = {Recompute::kLayer};
  CHECK(more() == Approx(2.5 * view));
  CHECK(weights() == Approx(1.25 * sent));
  once.overlap.reuse_elements = twice.overlap.reuse_elements = 0;
  CHECK(more() == Approx(3 * view));
  once.overlap.reuse_elements = twice.overlap.reuse_elements = 1e12;
  CHECK(more() == Approx(2 * view));
  // With little compute the host's reductions of 4 matrices and 8 vectors are open too.
  p.micro_batch = 1, p.seq_len = 128;
  CHECK(more() == Approx(2 * view + 3 * view));
}

TEST_CASE("a framework that reduces whole under zero 1 sends twice as much, after the last backward") {
  FrameworkProfile whole = testing::profile("nanotron"), parts = whole;
  parts.overlap.zero = parts.overlap.zero_scatters = true;
  const auto of = [&](const FrameworkProfile& profile, int zero, int8_t overlap) {
    return estimate(*prepare(llama_8b(), testing::machine(4), profile, {}),
                    Point{.dp = 32, .zero = zero, .micro_batch = 2, .grad_accumulation = 4, .seq_len = 4096, .overlap = overlap});
  };
  const auto gradients = [](const Estimate& e) { return e.wire[static_cast<size_t>(WireUse::kGradients)]; };
  CHECK(gradients(of(whole, 1, -1)) == 2 * gradients(of(parts, 1, -1)));
  CHECK(gradients(of(whole, 2, -1)) == gradients(of(parts, 2, -1)));
  CHECK(gradients(of(whole, 0, -1)) == gradients(of(whole, 1, -1)));
  const auto open = [](const Estimate& e) { return e.part(TimePart::kDataParallel); };
  CHECK(open(of(whole, 1, -1)) == open(of(whole, 1, 0)));
  CHECK(open(of(whole, 0, -1)) < open(of(whole, 0, 0)));
  CHECK(open(of(parts, 1, -1)) < open(of(whole, 1, -1)));
}

TEST_CASE("gathered weights are copied tensor by tensor and rank by rank, sends wait for the host") {
  FrameworkProfile slow = testing::profile("nanotron"), quick = slow;
  slow.update.gather_host_s = 1e-3, quick.update.gather_passes = 0;
  const auto of = [&](const FrameworkProfile& profile, const Point& p) {
    return estimate(*prepare(llama_8b(), testing::machine(4), profile, {}), p);
  };
  const Point flat{.dp = 32, .zero = 1, .micro_batch = 1, .seq_len = 4096};
  // Six tensors of each of 32 layers, the embedding, the last norm and the head, of 32 ranks.
  const double more = of(slow, flat).part(TimePart::kDataParallel) - of(quick, flat).part(TimePart::kDataParallel);
  CHECK(more == Approx((6 * 32 + 3) * 32 * 1e-3));
  const Point staged{.dp = 4, .pp = 8, .schedule = Schedule::k1F1B, .micro_batch = 1, .grad_accumulation = 16, .seq_len = 4096};
  FrameworkProfile talks = quick;
  talks.host.send_s += 1e-3;
  // Seven hops there and back while the pipeline fills and drains; after that the host says it while the device computes.
  CHECK(of(talks, staged).part(TimePart::kPipeline) - of(quick, staged).part(TimePart::kPipeline) == Approx(2 * 7 * 1e-3));
}

TEST_CASE("the host says what a stage sends and receives: the first stage receives no activations, the last sends none") {
  // The host needs a second for a message, and nothing for anything else.
  FrameworkProfile p = testing::profile("nanotron");
  p.host = {.forward_s = 0, .backward_s = 0, .collective_s = 0, .sync = true, .send_s = 1};
  p.model.balanced_stages = false;
  ModelShape shape = llama_8b();
  shape.layers = 12;
  const Prepared prepared = prepare(shape, testing::machine(1), p).value();
  Estimator estimator(prepared);  // one for all, which remembers the stages of the point before
  const auto seconds = [&](int stages, int pieces, Schedule schedule) {
    const Estimate e = estimator({.pp = stages, .vpp = pieces, .schedule = schedule, .grad_accumulation = 8, .seq_len = 128});
    REQUIRE(e.legal());
    return std::round(10 * e.part(TimePart::kLaunch) / 8) /
           10;  // of a micro-batch; the device computes for some milliseconds of them
  };
  CHECK(seconds(1, 1, Schedule::kNone) == 0);
  CHECK(seconds(3, 1, Schedule::k1F1B) == 4);         // the stage between receives and sends both ways
  CHECK(seconds(2, 1, Schedule::k1F1B) == 2);         // one message forward, one back
  CHECK(seconds(2, 2, Schedule::kInterleaved) == 6);  // each device has two pieces and an end of each of three messages one way
  CHECK(seconds(2, 3, Schedule::kBreadthFirst) == 10);
  CHECK(seconds(2, 1, Schedule::kZbV) == 4);       // pieces 0 and 3, or 1 and 2, between which nothing is sent
  CHECK(seconds(2, 1, Schedule::kDualPipe) == 2);  // first for half of the micro-batches, last for the others
}

TEST_CASE("the embedding's gradient is as large as its table, and the head's is accumulated where no matmul does it") {
  FrameworkProfile dense = testing::profile("nanotron"), sparse = dense, fused = dense;
  sparse.passes.table = 0, fused.overlap.wgrad_fused = 1;
  const Point p{.micro_batch = 1, .seq_len = 1024};
  const auto backward = [&](const FrameworkProfile& profile) {
    return estimate(*prepare(llama_8b(), testing::machine(1), profile, {}), p).part(TimePart::kBackward);
  };
  const double table = 128256.0 * 4096, elementwise = DeviceConstants{}.memory_elementwise * 2.039e12;
  CHECK(backward(dense) - backward(sparse) == Approx(table * 12 / elementwise).epsilon(2e-3));
  CHECK(backward(dense) - backward(fused) > table * 10 / elementwise);
}

TEST_CASE("stages balanced by cost: a stage takes blocks until its share is exceeded, logits travel where the head exceeds it") {
  // A head as large as four of 24 layers.
  const ModelShape shape{.layers = 24, .hidden = 2048, .heads = 16, .kv_heads = 16, .head_dim = 128, .ffn = 8192, .vocab = 131072};
  const auto layers = [&](int32_t stages) {
    const StageGroups groups(shape, Point{.pp = stages, .schedule = Schedule::k1F1B}, true);
    std::string text;
    for (int32_t s = 0; s < stages; ++s) {
      const StageGroup& g = groups.of(s);
      text += std::to_string(g.dense) + (g.holds_embedding ? "e" : "") + (g.holds_head ? "h" : "") + (g.holds_loss ? "l " : " ");
    }
    int32_t count = 0;
    for (const StageGroup& g : groups.all()) count += g.count;
    CHECK(count == stages);
    return text + std::to_string(groups.logit_hops());
  };
  CHECK(layers(2) == "15e 9hl 0");
  CHECK(layers(4) == "8e 7 7 2hl 0");
  CHECK(layers(8) == "4e 4 3 4 3 4 2h 0l 1");
  CHECK(layers(16) == "2e 2 2 2 1 2 2 2 1 2 2 2 1 1h 0 0l 2");
  // Evenly, where the schedule has several chunks of a stage, and in all other frameworks.
  CHECK(StageGroups(shape, Point{.pp = 8, .vpp = 3, .schedule = Schedule::kInterleaved}, true).of(7).dense == 3);
  CHECK(StageGroups(shape, Point{.pp = 8, .schedule = Schedule::k1F1B}, false).of(7).dense == 3);

  const Point p{.pp = 8, .schedule = Schedule::k1F1B, .micro_batch = 1, .grad_accumulation = 16, .seq_len = 4096};
  const auto sent = [&](bool balanced) {
    FrameworkProfile profile = testing::profile("nanotron");
    profile.model.balanced_stages = balanced;
    return estimate(*prepare(shape, testing::machine(1), profile, {}), p).wire[static_cast<size_t>(WireUse::kPipeline)];
  };
  CHECK(sent(true) - sent(false) == 16 * 2 * 2.0 * 4096 * (131072 - 2048));
}

TEST_CASE("projections of one input are products of their own where the framework has them apart, and their gradients are added") {
  FrameworkProfile apart = testing::profile("torchtitan"), whole = apart, unsummed = apart;
  whole.model.split_projections = false, unsummed.passes.summed = 0;
  REQUIRE(apart.model.split_projections);
  const Point p{.dp = 8, .zero = 3, .micro_batch = 2, .seq_len = 4096};
  const auto part = [&](const FrameworkProfile& profile, TimePart which) {
    return estimate(*prepare(llama_8b(), testing::machine(1), profile, {}), p).part(which);
  };
  const DeviceModel device = *DeviceModel::of(testing::machine(1).device);
  const double tokens = 2 * 4096;
  const auto product = [&](double out) {
    return device.matmul_seconds({.m = tokens, .n = out, .k = 4096, .slowest = device.slowest_of(8)});
  };
  const double longer = product(4096) + 2 * product(1024) - product(6144) + 2 * product(14336) - product(28672);
  CHECK(part(apart, TimePart::kForward) - part(whole, TimePart::kForward) == Approx(32 * longer).margin(1e-9));
  // Of q, k, v two additions, of gate and up one; 6 bytes an element each.
  const double added = device.memory_bound_seconds(tokens * 4096 * 12) + device.memory_bound_seconds(tokens * 4096 * 6);
  CHECK(part(apart, TimePart::kBackward) - part(unsummed, TimePart::kBackward) == Approx(32 * added));
}

TEST_CASE("asynchronous tensor parallelism scatters no sum of products piece by piece") {
  FrameworkProfile apart = testing::profile("torchtitan-compiled"), whole = apart;
  whole.model.split_projections = false;
  Point p{.dp = 8, .tp = 8, .zero = 3, .sequence_parallel = true, .micro_batch = 8, .seq_len = 8192};
  const auto exposed = [&](const FrameworkProfile& profile) {
    return estimate(*prepare(llama_8b(), testing::machine(8), profile, {}), p).part(TimePart::kTensorParallel);
  };
  CHECK(exposed(apart) == Approx(exposed(whole)));
  const double alone = exposed(apart);
  p.tensor_overlap = 1;
  CHECK(exposed(whole) < exposed(apart));
  CHECK(exposed(apart) < alone);
}

TEST_CASE("where tp cuts the vocabulary the loss is made of the kernels that the framework has for that") {
  FrameworkProfile fewer = testing::profile("torchtitan");
  REQUIRE(fewer.passes.loss_parallel > fewer.passes.loss);
  const FrameworkProfile as_it_is = fewer;
  fewer.passes.loss_parallel /= 2;
  const auto forward = [&](const FrameworkProfile& profile, int tp) {
    const Point p{.dp = 8, .tp = tp, .zero = 3, .sequence_parallel = tp > 1, .micro_batch = 2, .seq_len = 4096};
    return estimate(*prepare(llama_8b(), testing::machine(8), profile, {}), p).part(TimePart::kForward);
  };
  CHECK(forward(as_it_is, 1) == forward(fewer, 1));
  const DeviceModel device = *DeviceModel::of(testing::machine(8).device);
  const double logits = 2 * 4096 * 128256.0 / 8;
  const double halved = device.memory_bound_seconds(logits * 38) - device.memory_bound_seconds(logits * 19);
  CHECK(forward(as_it_is, 8) - forward(fewer, 8) == Approx(halved));
}

TEST_CASE("compute loses to a collective beside it what its group takes, not what one of all devices would") {
  FrameworkProfile megatron = testing::profile("megatron");
  megatron.overlap.tensor = false;  // so that all that is hidden is gradients and weights
  const Fabric fabric = *Fabric::of(testing::machine(8));
  const auto lost = [&](int dp, int tp, const Group& group) {
    const Point p{.dp = dp, .tp = tp, .zero = 0, .micro_batch = 4, .grad_accumulation = 8, .seq_len = 8192};
    const Estimate e = estimate(*prepare(llama_8b(), testing::machine(8), megatron, {}), p);
    REQUIRE(e.hidden_comm_s > 0);
    // Of buckets that all but the last hide: hidden = total * communication - total / buckets.
    const double gradients = 4.0 * (static_cast<double>(parameter_count(llama_8b())) / tp);
    const double buckets = gradients / megatron.overlap.bucket_bytes;
    const double total = e.hidden_comm_s / (fabric.contention(CollectiveUse::kAllGather, group).communication - 1 / buckets);
    return (e.part(TimePart::kDataParallel) - total / buckets) / e.hidden_comm_s;
  };
  // Matmuls wait for multiprocessors, other kernels for memory too.
  const DeviceModel device = *DeviceModel::of(testing::machine(8).device);
  const auto check = [&](int dp, int tp, const Group& group) {
    const Contention c = fabric.contention(CollectiveUse::kAllGather, group);
    const double tiled = device.held_beside(c.taken_sms), others = 1 - (1 - device.share_of(c.taken_sms)) / c.compute;
    const double part = lost(dp, tp, group);
    CHECK(part > std::min(tiled, others));
    CHECK(part < std::max(tiled, others));
  };
  check(64, 1, {8, 8, 1});
  check(8, 8, {1, 8, 8});
  CHECK(lost(8, 8, {1, 8, 8}) < lost(64, 1, {8, 8, 1}));
}

TEST_CASE("a reduction across nodes hides behind compute and exchanges within a node, behind no exchange across nodes") {
  FrameworkProfile megatron = testing::profile("megatron");
  megatron.overlap.tensor = false;  // so that all that is hidden is gradients
  const auto hidden = [&](int tp, const char* latency, double value) {
    Machine m = testing::machine(8);
    m.inter_bytes_per_s = 1e9;  // gradients take longer than all of backward
    m.fabric[latency] = value;
    const Point p{.dp = 64 / tp, .tp = tp, .zero = 0, .micro_batch = 4, .seq_len = 8192};
    return estimate(*prepare(llama_8b(), m, megatron, {}), p).hidden_comm_s;
  };
  REQUIRE(hidden(16, "inter_latency", 1.5) > 0);
  CHECK(hidden(16, "inter_latency", 100) == Approx(hidden(16, "inter_latency", 1.5)));
  CHECK(hidden(8, "intra_latency", 100) > 1.01 * hidden(8, "intra_latency", 2));
}

TEST_CASE("where blocks stay, zero 3 loses all of a gather that is shorter than a matmul, nothing to one that fits beside") {
  const FrameworkProfile titan = testing::profile("torchtitan");
  const auto data = [&](double resident, double micro_batch) {
    Machine m = testing::machine(1);
    m.device.constants["matmul.resident"] = resident;
    const Point p{.dp = 8, .zero = 3, .micro_batch = static_cast<int32_t>(micro_batch), .seq_len = 8192};
    const Estimate e = estimate(*prepare(llama_8b(), m, titan, {}), p);
    REQUIRE(e.hidden_comm_s > 0);
    return std::pair{e.part(TimePart::kDataParallel), e.hidden_comm_s};
  };
  // Half of the multiprocessors are free: the collective fits.
  const auto [beside, hidden] = data(0.5, 4);
  const auto [waiting, same] = data(1, 4);
  CHECK(same == Approx(hidden));
  const Fabric fabric = *Fabric::of(testing::machine(1));
  const Contention c = fabric.contention(CollectiveUse::kAllGather, {8, 1, 1});
  // Attention waits for its half too; what is left are the kernels that memory binds.
  CHECK(waiting - beside > 0.5 * hidden);
  CHECK(waiting - beside < hidden);
  CHECK(c.taken_sms > 0);
}

TEST_CASE("an exchange in backward hides beside the weight gradient of its own linear") {
  const Point p{.tp = 8, .micro_batch = 2, .seq_len = 4096};
  const Estimate e = estimate(study(llama_8b(), "megatron", 1), p);
  const Fabric fabric = *Fabric::of(testing::machine(1));
  const DeviceModel device = *DeviceModel::of(testing::machine(1).device);
  const double tokens = 2 * 4096, reduce = fabric.collective_seconds(CollectiveUse::kAllReduce, 2 * tokens * 4096, {8, 1, 1});
  const auto weight_gradient = [&](double out) {
    return device.matmul_seconds({.m = out,
                                  .n = 4096,
                                  .k = tokens,
                                  .product = Product::kWeight,
                                  .out_bytes = 4,
                                  .accumulate = true,
                                  .slowest = device.slowest_of(8)});
  };
  // That of q, k and v is shorter than the exchange, that of gate and up longer.
  REQUIRE(weight_gradient(6144 / 8) < reduce);
  REQUIRE(weight_gradient(28672 / 8) > reduce);
  CHECK(e.hidden_comm_s == Approx(32 * (weight_gradient(6144 / 8) + reduce)));
}

TEST_CASE("exchanges among experts hide beside another micro-batch, but while a pipeline fills") {
  const Prepared prepared = study(mixtral_8x7b(), "megatron", 8);
  Estimator estimator(prepared);
  Point apart{.dp = 8, .pp = 8, .ep = 8, .zero = 1, .schedule = Schedule::k1F1B, .grad_accumulation = 64, .seq_len = 4096};
  Point beside = apart;
  beside.expert_overlap = true;
  const auto experts = [&](const Point& p) { return estimator(p).part(TimePart::kExpertParallel); };
  CHECK(experts(beside) < experts(apart));
  // Seven of 64 micro-batches run forward, and seven backward, with nothing beside them.
  CHECK(experts(beside) > experts(apart) * 7 / 64);
  apart.grad_accumulation = beside.grad_accumulation = 7;
  CHECK(experts(beside) == Approx(experts(apart)));
  // Compute loses to what runs beside it: what is hidden is not free.
  CHECK(estimator(beside).hidden_comm_s >= 0);
  Point dense = beside;
  dense.expert_overlap = false;
  CHECK(estimator(dense).part(TimePart::kForward) == estimator(beside).part(TimePart::kForward));
}

TEST_CASE("rows of experts by node: as many tokens cross as are expected to have experts on other nodes") {
  ModelShape shape = mixtral_8x7b();
  shape.layers = 2, shape.experts = 64, shape.top_k = 8, shape.moe_ffn = 512;
  const Point ring{.dp = 64, .ep = 64, .grad_accumulation = 1, .seq_len = 2048, .algorithm = AlgorithmChoice::kRing};
  Point by_node = ring;
  by_node.algorithm = AlgorithmChoice::kHierarchical;
  const auto of = [](const ModelShape& model, const Point& p) {
    Estimator estimator(study(model, "shardlab", 8));
    return estimator(p);
  };
  const auto bytes = [&](const ModelShape& model, const Point& p) {
    return of(model, p).wire[static_cast<size_t>(WireUse::kExpert)];
  };
  // Of 2,048 tokens with 8 experts each 2,048 * 7 (1 - C(56, 8) / C(64, 8)) cross to 7 nodes, of 16,384 rows 14,336 come back. 2 bytes an element.
  constexpr double kRow = 2 * 4096, kTokens = 9735, kRows = 14336, kMessages = 2 * (4 * 8 * 7 + 8 * 8 * 7);
  CHECK(bytes(shape, ring) == Approx(64 * 2 * 4 * 16384 * kRow * 63 / 64));
  CHECK(bytes(shape, by_node) == Approx(64 * 2 * ((2 * kTokens + 6 * kRows) * kRow + (4 + 8) * kRows + kMessages)).epsilon(1e-12));
  // Experts in two groups of a node each: two nodes at most.
  ModelShape groups = shape;
  groups.router_groups = 8, groups.router_groups_chosen = 2;
  CHECK(bytes(shape, by_node) - bytes(groups, by_node) == Approx(64 * 2 * 2 * (kTokens - 3584) * kRow));
  const auto seconds = [&](const ModelShape& model) { return of(model, by_node).part(TimePart::kExpertParallel); };
  CHECK(seconds(groups) < seconds(shape));
  // On one node there are no levels.
  Point one = by_node;
  one.dp = one.ep = 8;
  CHECK(bytes(shape, one) == Approx(8 * 2 * 4 * 16384 * kRow * 7 / 8));
}

TEST_CASE("instances of the optimizer sum their parts with one another") {
  Estimator estimator(study(llama_8b(), "megatron", 8));
  const Point one{.dp = 8, .zero = 1, .grad_accumulation = 1, .seq_len = 512, .overlap = 0};
  Point eight = one;
  eight.dp = 64, eight.hybrid_shard = 8;
  // Within a node each does what one does alone; an eighth of the gradients, in fp32, is then summed across nodes.
  CHECK(estimator(eight).part(TimePart::kDataParallel) > estimator(one).part(TimePart::kDataParallel));
  const double psi = 8'030'261'248;
  const auto gradients = [&](const Point& p) { return estimator(p).wire[static_cast<size_t>(WireUse::kGradients)]; };
  CHECK(gradients(one) == Approx(8 * 7.0 / 8 * 4 * psi));
  CHECK(gradients(eight) == Approx(64 * (7.0 / 8 * 4 * psi + 2 * 7.0 / 8 * 4 * psi / 8)));
}

TEST_CASE("a graph of the step leaves the host nothing to start, graphs of layers one launch a phase") {
  FrameworkProfile p = testing::profile("megatron");
  p.host.forward_s = p.host.backward_s = 1e-3;  // a host so slow that all wait for it
  const auto waits = [&](int64_t graphs) {
    p.host.graphs = graphs;
    return estimate(prepare(llama_8b(), testing::machine(1), p).value(), {.seq_len = 1024}).part(TimePart::kLaunch);
  };
  CHECK(waits(1) < 0.2 * waits(0));
  CHECK(waits(2) <= waits(1));
}

TEST_CASE("a host of twice the speed takes half of every second of the host") {
  FrameworkProfile p = testing::profile("nanotron"), half = p;
  using H = FrameworkProfile::Host;
  for (double H::*seconds :
       {&H::forward_s, &H::backward_s, &H::layer_s, &H::collective_s, &H::exchange_s, &H::step_s, &H::micro_batch_s, &H::send_s})
    half.host.*seconds /= 2;
  half.update.gather_host_s /= 2;
  Machine fast = testing::machine(2);
  fast.device.constants["host.speed"] = 2;
  const Point point{.dp = 4, .tp = 2, .pp = 2, .zero = 1, .schedule = Schedule::k1F1B, .grad_accumulation = 4, .seq_len = 128};
  const double quick = estimate(prepare(llama_8b(), fast, p).value(), point).step_s;
  CHECK(quick == Approx(estimate(prepare(llama_8b(), testing::machine(2), half).value(), point).step_s));
  CHECK(quick < 0.8 * estimate(prepare(llama_8b(), testing::machine(2), p).value(), point).step_s);
}

TEST_CASE("each expert of a rank costs the host launches of its own, and more where its rows are rounded") {
  FrameworkProfile p = testing::profile("megatron");
  p.host.forward_s = p.host.backward_s = 1e-3;  // a host so slow that all wait for it
  const auto step = [&](double forward, double backward, double low, const Point& point) {
    p.launch.expert = forward, p.launch.expert_backward = backward, p.launch.expert_low = p.launch.expert_low_backward = low;
    return estimate(prepare(mixtral_8x7b(), testing::machine(1), p).value(), point).step_s;
  };
  const Point whole{.grad_accumulation = 1, .seq_len = 128}, cut{.dp = 4, .ep = 4, .grad_accumulation = 1, .seq_len = 128};
  Point rounded = whole;
  rounded.precision = Precision::kFp8;
  CHECK(step(2, 6, 0, whole) - step(0, 0, 0, whole) == Approx(32 * 8 * (2 + 6) * 1e-3));
  CHECK(step(2, 6, 0, cut) - step(0, 0, 0, cut) == Approx(32 * 2 * (2 + 6) * 1e-3));
  CHECK(step(2, 6, 2, whole) == step(2, 6, 0, whole));
  CHECK(step(2, 6, 2, rounded) - step(2, 6, 0, rounded) == Approx(32 * 8 * (2 + 2) * 1e-3));
}

TEST_CASE("a host that reads the counts of experts carries no lead from one phase to the other") {
  FrameworkProfile p = testing::profile("megatron");
  p.host.backward_s = 0;  // the host is slow forward alone
  const auto waits = [&](double forward, bool reads, int64_t graphs) {
    p.host.forward_s = forward, p.host.sync_experts = reads, p.host.graphs = graphs;
    return estimate(prepare(mixtral_8x7b(), testing::machine(1), p).value(), {.seq_len = 4096}).part(TimePart::kLaunch);
  };
  // Longer than forward on the device, shorter than both phases.
  const Estimate device = estimate(prepare(mixtral_8x7b(), testing::machine(1), p).value(), {.seq_len = 4096});
  const double both = device.part(TimePart::kForward) + device.part(TimePart::kBackward);
  double forward = 1e-6;
  while (waits(forward, true, 0) < 0.1 * both) forward *= 1.1;
  CHECK(waits(forward, false, 0) < 0.5 * waits(forward, true, 0));
  CHECK(waits(forward, true, 2) == waits(forward, false, 2));
  // A dense model has no counts to read.
  const auto dense = [&](bool reads) {
    p.host.sync_experts = reads, p.host.graphs = 0;
    return estimate(prepare(llama_8b(), testing::machine(1), p).value(), {.seq_len = 4096}).step_s;
  };
  CHECK(dense(true) == dense(false));
}

TEST_CASE("where layers are graphs, the host starts no attention of a layer of experts") {
  FrameworkProfile p = testing::profile("megatron");
  p.host.forward_s = p.host.backward_s = 1e-3;
  const auto step = [&](int64_t graphs, double core) {
    p.host.graphs = graphs, p.launch.core = core;
    return estimate(prepare(mixtral_8x7b(), testing::machine(1), p).value(), {.grad_accumulation = 1, .seq_len = 128}).step_s;
  };
  CHECK(step(1, 1) < step(0, 1));
  CHECK(step(1, 100) == step(1, 1));
  CHECK(step(1, 1) > 3 * step(2, 1));  // experts are started one by one still
}

TEST_CASE("the host's time for tensor-parallel exchanges is waited for where layers are short") {
  FrameworkProfile p = testing::profile("nanotron");
  const auto step = [&](double exchange, int tp) {
    p.host.exchange_s = exchange;
    return estimate(prepare(llama_8b(), testing::machine(1), p).value(),
                    {.tp = tp, .sequence_parallel = tp > 1, .grad_accumulation = 1, .seq_len = 128})
        .step_s;
  };
  // Four exchanges forward, and six backward, where inputs are gathered again.
  CHECK(step(2e-3, 8) - step(1e-3, 8) == Approx(32 * 10 * 1e-3).epsilon(1e-6));
  CHECK(step(2e-3, 1) == step(1e-3, 1));
}

TEST_CASE("without DDP gradients are one buffer, and chunks of a looped stage reduce theirs one after the other") {
  FrameworkProfile p = testing::profile("nanotron");
  const auto data = [&](double bucket) {
    p.overlap.bucket_bytes = bucket;
    return estimate(prepare(llama_8b(), testing::machine(8), p).value(), {.dp = 64, .zero = 1, .seq_len = 1024})
        .part(TimePart::kDataParallel);
  };
  CHECK(data(1e6) == data(1e9));
  ModelShape shape = gpt_175b();
  shape.tied_embeddings = false;
  Estimator estimator(study(shape, "megatron", 96));
  Point flat{.dp = 12, .tp = 8, .pp = 8, .zero = 1, .schedule = Schedule::k1F1B, .grad_accumulation = 8, .seq_len = 128};
  Point looped = flat;
  looped.schedule = Schedule::kInterleaved, looped.vpp = 12;
  CHECK(estimator(looped).part(TimePart::kDataParallel) < estimator(flat).part(TimePart::kDataParallel));
}

TEST_CASE("goodput: the published interval, the best one, and failures simulated one by one") {
  // Young 1974: for checkpoints that are short beside the time between failures, sqrt(2 C M).
  const Interruptions rare{.device_mtbf_s = 1e9, .checkpoint_s = 10, .restart_s = 0};
  CHECK(goodput(rare, 100).job_mtbf_s == Approx(1e7));
  CHECK(goodput(rare, 100).interval_s == Approx(std::sqrt(2 * 10 * 1e7)).epsilon(1e-3));
  CHECK(goodput(rare, 100).share == Approx(1 - std::sqrt(2 * 10 / 1e7)).epsilon(1e-4));
  CHECK(goodput(rare, 100).failures_a_day == Approx(86400 / 1e7));

  // No other interval is better, and the three shares are the whole.
  const Interruptions often{.device_mtbf_s = 4e6, .checkpoint_s = 60, .restart_s = 300};
  const Goodput best = goodput(often, 1000);
  CHECK(best.share + best.checkpoints + best.lost == Approx(1));
  for (const double times : {0.5, 0.9, 1.1, 2.0}) {
    Interruptions other = often;
    other.interval_s = best.interval_s * times;
    CHECK(goodput(other, 1000).share < best.share);
    CHECK(goodput(other, 1000).interval_s == other.interval_s);
  }
  CHECK(goodput({.device_mtbf_s = 1e6, .checkpoint_s = 0, .restart_s = 1000}, 100).share == Approx(std::exp(-0.1)));

  // A run of 100,000 intervals, failure by failure: an attempt at interval and checkpoint, or at a restart, begins anew where it fails.
  std::mt19937_64 random(1);
  std::exponential_distribution<double> failure(1 / best.job_mtbf_s);
  double spent = 0;
  const auto attempt = [&](double seconds) {
    const double after = failure(random);
    spent += std::min(after, seconds);
    return after >= seconds;
  };
  for (int i = 0; i < 100000; ++i)
    while (!attempt(best.interval_s + often.checkpoint_s))
      while (!attempt(often.restart_s)) {}
  CHECK(100000 * best.interval_s / spent == Approx(best.share).epsilon(0.01));
}

}  // namespace
}  // namespace shardlab::simulator::analytic
