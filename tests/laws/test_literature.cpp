// The laws of the literature, each as its paper states it, on plans. Sizes are chosen so that everything divides; then the formulas
// hold to the byte. e = 4 bytes an element, Psi parameters, N data-parallel ranks, t tensor-parallel ranks, m micro-batches, p
// stages.
#include <map>
#include <string>

#include "plan/memory.h"
#include "plan/wire.h"
#include "strategies/lower.h"
#include "tests/laws/equal.h"
#include "tests/namespaces.h"
#include "tests/test.h"

namespace shardlab::testing {
namespace {

constexpr int64_t kElement = 4;

/// Every extent a multiple of 64, so that nothing is padded or rounded.
Case case_of(Family family, int64_t layers) {
  Case c;
  c.name = "law";
  Model& m = c.model;
  m.family = family;
  m.layers = layers;
  m.hidden = 64;
  m.heads = 16;
  m.kv_heads = family == Family::kLlama ? 8 : 16;
  m.head_dim = 4;
  m.ffn = 256;
  m.vocab = 128;
  m.max_positions = family == Family::kLlama ? 0 : 64;
  c.train.seq_len = 64;
  c.train.micro_batch = 2;
  c.layout.bucket_bytes = int64_t{1} << 40;
  return c;
}

Case with_pipeline(Case c, int stages, Schedule schedule, int64_t micro_batches) {
  c.layout.pp = stages;
  c.layout.schedule = schedule;
  c.train.grad_accumulation = micro_batches;
  return c;
}

/// Bytes that the first rank sends on a communicator in one step.
int64_t sent(const Plan& plan, const std::string& comm) {
  const auto bytes = wire_bytes(plan, plan.mesh.coordinates(0));
  const auto found = bytes.find(comm);
  return found == bytes.end() ? 0 : found->second;
}

int64_t persistent_bytes(const Plan& plan, BufferClass cls) {
  int64_t bytes = 0;
  for (const Buffer& b : plan.roles.at(0).buffers)
    if (b.persistent && !b.view && b.kind == cls) bytes += b.type.bytes();
  return bytes;
}

MemoryPeak peak_of(const Plan& plan, int stage = 0) { return memory_peak(plan, stage)[static_cast<size_t>(Space::kDevice)]; }

int64_t activations(const MemoryPeak& peak) { return peak.at_peak.bytes[static_cast<size_t>(BufferClass::kActivation)]; }

TEST_CASE("data parallelism: each rank sends 2 Psi (N-1)/N elements a step, however often it accumulates") {
  // "the communication volume of DP is 2 Psi": a reduce-scatter and an all-gather of Psi each. ZeRO (2020), section 7.1.
  for (const Family family : {Family::kGpt, Family::kLlama})
    for (const int ranks : {2, 4})
      for (const int64_t micro_batches : {1, 8})
        for (const AlgorithmChoice algorithm :
             {AlgorithmChoice::kRing, AlgorithmChoice::kHalvingDoubling, AlgorithmChoice::kDirect}) {
          Case c = case_of(family, 2);
          c.layout.dp = ranks;
          c.layout.collective_algorithm = algorithm;
          c.train.grad_accumulation = micro_batches;
          const int64_t psi = parameter_count(c.model);
          CHECK(sent(plan_of(c), "dp.grads") == kElement * 2 * psi * (ranks - 1) / ranks);
        }
}

TEST_CASE("ZeRO-1: the volume of data parallelism, and moments of 1/N") {
  // "P_os ... 4x memory reduction, same communication volume as DP". ZeRO (2020), sections 5.1 and 7.2.
  for (const Family family : {Family::kGpt, Family::kLlama})
    for (const int ranks : {2, 4}) {
      Case c = case_of(family, 2);
      const int64_t psi = parameter_count(c.model);
      c.layout.dp = ranks;
      const Plan replicated = plan_of(c);
      c.layout.zero = 1;
      const Plan sharded = plan_of(c);
      CHECK(sent(sharded, "dp.grads") == kElement * psi * (ranks - 1) / ranks);
      CHECK(sent(sharded, "dp.parameters") == kElement * psi * (ranks - 1) / ranks);
      CHECK(sent(sharded, "dp.grads") + sent(sharded, "dp.parameters") == sent(replicated, "dp.grads"));
      CHECK(persistent_bytes(replicated, BufferClass::kMoment) == 2 * kElement * psi);
      CHECK(persistent_bytes(sharded, BufferClass::kMoment) == 2 * kElement * psi / ranks);
      CHECK(persistent_bytes(sharded, BufferClass::kParameter) == kElement * psi);
    }
}

TEST_CASE("tensor parallelism: 8 b s h (t-1)/t elements a layer, rank and micro-batch") {
  // Four all-reduces of b s h a layer, two forward and two backward, at 2 (t-1)/t each. Megatron-LM (2019), section 3.
  for (const Family family : {Family::kGpt, Family::kLlama})
    for (const int ranks : {2, 4, 8})
      for (const int64_t micro_batches : {1, 3}) {
        const auto sent_with_layers = [&](int64_t layers) {
          Case c = case_of(family, layers);
          c.layout.tp = ranks;
          c.train.grad_accumulation = micro_batches;
          return sent(plan_of(c), "tp");
        };
        const int64_t bsh = 2 * 64 * 64;
        CHECK(sent_with_layers(3) - sent_with_layers(2) == kElement * micro_batches * 8 * bsh * (ranks - 1) / ranks);
      }
}

TEST_CASE("tensor parallelism: matrices, their gradients and moments are 1/t") {
  for (const int ranks : {2, 4}) {
    Case c = case_of(Family::kLlama, 2);  // without biases only the norms are whole
    const int64_t norms = (2 * 2 + 1) * 64, psi = parameter_count(c.model);
    c.layout.tp = ranks;
    const Plan plan = plan_of(c);
    CHECK(persistent_bytes(plan, BufferClass::kParameter) == kElement * ((psi - norms) / ranks + norms));
    CHECK(persistent_bytes(plan, BufferClass::kMoment) == 2 * kElement * ((psi - norms) / ranks + norms));
  }
}

TEST_CASE("pipeline: each boundary carries b s h each way for every micro-batch") {
  // Narayanan et al. (2021), section 3.2: b s h for each consecutive pair of devices, either direction, for each micro-batch.
  for (const Schedule schedule : {Schedule::kAfab, Schedule::k1F1B}) {
    const Plan plan = plan_of(with_pipeline(case_of(Family::kGpt, 4), 4, schedule, 6));
    const int64_t boundary = kElement * 6 * 2 * 64 * 64;
    const std::map<std::string, int64_t> bytes = total_wire_bytes(plan);
    CHECK(bytes ==
          std::map<std::string, int64_t>{
              {"pp.fwd.even", 2 * boundary}, {"pp.fwd.odd", boundary}, {"pp.bwd.even", 2 * boundary}, {"pp.bwd.odd", boundary}});
  }
}

TEST_CASE("1F1B: a stage keeps min(m, p - stage) micro-batches, GPipe all m") {
  // "PipeDream-Flush ... the number of in-flight microbatches is at most the pipeline depth". Narayanan et al. (2021),
  // section 2.2.1. What is kept grows by one micro-batch's share until m reaches p - stage, and then no more.
  const int stages = 4;
  for (int stage = 0; stage < stages; ++stage) {
    const auto peak = [&](Schedule schedule, int64_t m) {
      return peak_of(plan_of(with_pipeline(case_of(Family::kGpt, 4), stages, schedule, m)), stage);
    };
    const int64_t kept = activations(peak(Schedule::kAfab, 12)) - activations(peak(Schedule::kAfab, 11));
    CHECK(kept > 0);
    for (const int64_t m : {12, 24}) {
      CHECK(activations(peak(Schedule::kAfab, m)) == activations(peak(Schedule::kAfab, 11)) + (m - 11) * kept);
      CHECK(activations(peak(Schedule::k1F1B, m)) == activations(peak(Schedule::k1F1B, 8)));
    }
    if (stage < stages - 1)  // the last stage keeps one whatever m is
      CHECK(activations(peak(Schedule::k1F1B, 8)) > activations(peak(Schedule::k1F1B, stages - stage - 1)));
  }
}

TEST_CASE("activations: 16 b s h + b s (a + 4) elements a layer, b s h under full recompute") {
  // Korthikanti et al. (2022), section 4.1, counted in elements, without the scores and masks, which are made again:
  // input, two norms, residual: 4 b s h; q, k, v: 3; attention: 1; feed-forward 4 + 4; two norms' statistics 2 b s each; a log sum
  // a head. Full recompute keeps "the input of each layer". Chen et al. (2016).
  const auto grown = [](Recompute recompute) {
    const auto peak = [&](int64_t layers) {
      Case c = case_of(Family::kGpt, layers);
      c.layout.recompute = recompute;
      return peak_of(plan_of(c));
    };
    return activations(peak(4)) - activations(peak(3));
  };
  const int64_t bs = 2 * 64, h = 64, a = 16;
  CHECK(grown(Recompute::kNone) == kElement * (16 * bs * h + bs * (a + 4)));
  CHECK(grown(Recompute::kFull) == kElement * bs * h);
}

TEST_CASE("full recompute repeats one all-reduce of each layer's forward") {
  // The second one follows the last projection, whose result backward does not need.
  Case c = case_of(Family::kGpt, 2);
  c.layout.tp = 2;
  const int64_t without = sent(plan_of(c), "tp");
  c.layout.recompute = Recompute::kFull;
  CHECK(sent(plan_of(c), "tp") - without == 2 * kElement * 2 * 64 * 64);  // two layers, 2 (t-1)/t = 1
}

TEST_CASE("accumulation: activations of one micro-batch, whatever their number") {
  Case c = case_of(Family::kLlama, 2);
  const MemoryPeak one = peak_of(plan_of(c));
  c.train.grad_accumulation = 8;
  const MemoryPeak eight = peak_of(plan_of(c));
  CHECK(activations(one) == activations(eight));
  CHECK(eight.peak_bytes - one.peak_bytes == 7 * kAlignment);  // the losses of seven more micro-batches
}

}  // namespace
}  // namespace shardlab::testing
