#include "simulator/interpreter/calibrate.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <set>
#include <utility>

#include "plan/base/moment_codes.h"
#include "plan/base/philox.h"
#include "plan/device_scratch.h"
#include "simulator/interpreter/bench.h"
#include "simulator/interpreter/calibrate_techniques.h"
#include "simulator/interpreter/cost_model.h"
#include "simulator/interpreter/peers.h"

namespace shardlab::simulator {
namespace {

constexpr int64_t kVocabulary = 256;

using Extents = std::vector<int64_t>;
using Write = Bench::Write;

// --- matrix multiplications --------------------------------------------------------------------------------------------

void add_linear_forward(Bench& b, int64_t rows, int64_t out, int64_t in, bool bias) {
  std::vector<BufferId> reads{b.warm(b.rows(rows, in)), b.cold(tensor({out, in}))};
  if (bias) reads.push_back(b.cold(tensor({out})));
  b.op(Linear{Phase::kF, bias}, reads, {{b.result(b.rows(rows, out))}});
}

void add_linear_input(Bench& b, int64_t rows, int64_t out, int64_t in) {
  b.op(Linear{Phase::kI}, {b.warm(b.rows(rows, out)), b.cold(tensor({out, in}))}, {{b.passing(b.rows(rows, in))}});
}

void add_linear_weight(Bench& b, int64_t rows, int64_t out, int64_t in, bool bias) {
  std::vector<Write> writes{{b.result(tensor({out, in}))}};
  if (bias) writes.push_back({b.result(tensor({out}))});
  b.op(Linear{Phase::kW, bias}, {b.cold(b.rows(rows, in)), b.warm(b.rows(rows, out))}, writes);
}

/// Pools for ops whose largest operand has more than kSmallOperand elements.
constexpr int64_t kSmallOperand = 512 << 10;
constexpr PoolSizes kLargePools{14 << 20, 7 << 20, 7 << 20};

Bench cpu_bench(std::string_view what, int ranks, bool large, DType dtype = DType::f32) {
  const std::string type = dtype == DType::f32 ? "" : fmt::format(" {}", name_of(dtype));
  return Bench(fmt::format("calibration {}{}{} x{}", what, type, large ? " large" : "", ranks), "rank", ranks,
               large ? kLargePools : PoolSizes{}, dtype);
}

Plan linear_plan(int ranks, bool large) {
  Bench b = cpu_bench("linear", ranks, large);
  for (const int64_t rows : {64, 128, 256, 512, 1024, 2048})
    for (const int64_t out : {32, 64, 128, 256, 512, 1024})
      for (const int64_t in : {32, 64, 128, 256, 512, 1024}) {
        if ((std::max({rows * in, rows * out, out * in}) > kSmallOperand) != large) continue;
        add_linear_forward(b, rows, out, in, false);
        add_linear_input(b, rows, out, in);
        add_linear_weight(b, rows, out, in, false);
        if (rows != 64 && rows != 256 && rows != 1024) continue;
        add_linear_forward(b, rows, out, in, true);
        add_linear_weight(b, rows, out, in, true);
      }
  return b.take();
}

/// Products of 16-bit operands, on a coarser grid: precision: bf16 and fp16.
Plan narrow_linear_plan(int ranks, DType dtype) {
  Bench b(fmt::format("calibration linear {} x{}", name_of(dtype), ranks), "rank", ranks, {}, dtype);
  for (const int64_t rows : {64, 256, 1024})
    for (const int64_t out : {64, 256, 512})
      for (const int64_t in : {64, 256, 512}) {
        const Type x = b.typed(b.rows(rows, in)), y = b.typed(b.rows(rows, out)), w = b.typed(tensor({out, in}));
        const Type bias = b.typed(tensor({out}));
        b.op(Linear{Phase::kF}, {b.warm(x), b.cold(w)}, {{b.result(y)}});
        b.op(Linear{Phase::kF, true}, {b.warm(x), b.cold(w), b.cold(bias)}, {{b.result(y)}});
        b.op(Linear{Phase::kI}, {b.warm(y), b.cold(w)}, {{b.passing(x)}});
        const Type dw = tensor({out, in}), dbias = tensor({out});
        b.op(Linear{Phase::kW}, {b.cold(x), b.warm(y)}, {{b.side_result(dw)}});
        b.op(Linear{Phase::kW, true}, {b.cold(x), b.warm(y)}, {{b.side_result(dw)}, {b.side_result(dbias)}});
      }
  return b.take();
}

// --- attention -----------------------------------------------------------------------------------------------------------

Plan attention_plan(int ranks, bool large, DType dtype = DType::f32) {
  Bench b = cpu_bench("attention", ranks, large, dtype);
  for (const int64_t tokens : {32, 64, 128, 256, 512})
    for (const int64_t width : {16, 32, 64, 128})
      for (const int64_t sequences : {1, 8}) {  // of one head, and of four
        const int heads = sequences == 1 ? 1 : 4, d = static_cast<int>(width);
        const Type qkv = b.typed(tensor({sequences, tokens, 3 * heads * width}));
        const Type o = b.typed(tensor({sequences, tokens, heads * width})), lse = tensor({sequences, heads, tokens});
        if ((qkv.shape.elements() > kSmallOperand) != large) continue;
        b.op(Attention{Phase::kF, heads, heads, d}, {b.warm(qkv)}, {{b.result(o)}, {b.side_result(lse)}});
        b.op(Attention{Phase::kI, heads, heads, d}, {b.warm(o), b.cold(o), b.side_operand(lse), b.cold(qkv)}, {{b.passing(qkv)}});
      }
  return b.take();
}

// --- ops by rows and width -----------------------------------------------------------------------------------------------

void add_norm(Bench& b, int64_t rows, int64_t width, bool rms) {
  const Type x = b.rows(rows, width), gamma = b.typed(tensor({width}));
  Type stats = b.rows(rows, rms ? 1 : 2);
  stats.dtype = DType::f32;
  std::vector<BufferId> forward{b.warm(x), b.cold(gamma)};
  if (!rms) forward.push_back(b.cold(gamma));
  b.op(Norm{Phase::kF, rms}, forward, {{b.result(x)}, {b.side_result(stats)}});
  const BufferId saved = b.cold(x), saved_stats = b.side_operand(stats), residual = b.warm(x), dy = b.warm(x);
  // In a step the weights' gradient comes first and fetches the saved input, which the input's gradient then finds in the cache.
  std::vector<Write> gradients{{b.side_result(tensor({width}))}};
  if (!rms) gradients.push_back({b.side_result(tensor({width}))});
  b.op(Norm{Phase::kW, rms}, {dy, saved, saved_stats}, gradients);
  b.op(Norm{Phase::kI, rms, 1e-5f, true}, {dy, saved, b.cold(gamma), saved_stats, residual}, {{b.passing(x)}});
}

void add_rope(Bench& b, int64_t rows, int64_t width) {
  constexpr int kHeadDim = 32;
  const int heads = static_cast<int>(width / kHeadDim);
  for (const Phase phase : {Phase::kF, Phase::kI})
    b.op(Rope{phase, heads, heads, kHeadDim}, {b.warm(b.rows(rows, 3 * width))}, {{{}, 0}});
}

void add_activation(Bench& b, int64_t rows, int64_t width, bool swiglu) {
  const Type u = b.rows(rows, swiglu ? 2 * width : width), a = b.rows(rows, width);
  b.op(Activation{Phase::kF, swiglu}, {b.warm(u)}, {{b.result(a)}});
  b.op(Activation{Phase::kI, swiglu}, {b.warm(a), b.cold(u)}, {{b.passing(u)}});
}

void add_residual(Bench& b, int64_t rows, int64_t width) {
  const Type x = b.rows(rows, width), bias = b.typed(tensor({width}));
  b.op(Residual{Phase::kF, true}, {b.warm(x), b.warm(x), b.cold(bias)}, {{b.result(x)}});
  b.op(Residual{Phase::kW, true}, {b.warm(x)}, {{b.side_result(tensor({width}))}});
  b.op(Dropout{Phase::kF, 0.1f}, {b.warm(x)}, {{{}, 0}});
  b.op(Dropout{Phase::kI, 0.1f}, {b.warm(x)}, {{{}, 0}});
}

void add_embeddings(Bench& b, BufferId tokens, int64_t rows, int64_t width) {
  const Type x = b.rows(rows, width), table = tensor({kVocabulary, width});
  const Type positions = tensor({b.sequence_tokens(rows), width});
  b.op(Embed{Phase::kF}, {tokens, b.cold(b.typed(table))}, {{b.result(x)}});
  b.op(Embed{Phase::kW}, {tokens, b.warm(x)}, {{b.side_result(table)}});
  b.op(Positions{Phase::kF}, {b.warm(x), b.cold(b.typed(positions))}, {{{}, 0}});
  b.op(Positions{Phase::kW}, {b.warm(x)}, {{b.side_result(positions)}});
}

void add_cross_entropy(Bench& b, BufferId targets, int64_t rows, int64_t vocabulary) {
  const int64_t tokens = b.sequence_tokens(rows);
  const Type logits = b.rows(rows, vocabulary), nll = tensor({rows / tokens}), max = tensor({rows / tokens, tokens}),
             sums = tensor({rows / tokens, tokens, 2});
  using Part = CrossEntropy::Part;
  b.op(CrossEntropy{Part::kFused, rows}, {b.warm(logits), targets}, {{b.side_result(nll)}, {{}, 0}});
  b.op(CrossEntropy{Part::kLossOnly, rows}, {b.warm(logits), targets}, {{b.side_result(nll)}});
  b.op(CrossEntropy{Part::kMax, rows}, {b.warm(logits)}, {{b.side_result(max)}});
  b.op(CrossEntropy{Part::kSum, rows}, {b.warm(logits), targets, b.side_operand(max)}, {{b.side_result(sums)}});
  b.op(CrossEntropy{Part::kGrad, rows}, {b.warm(logits), targets, b.side_operand(max), b.side_operand(sums)},
       {{b.side_result(nll)}, {{}, 0}});
}

Plan rows_plan(int ranks, bool large, DType dtype = DType::f32) {
  Bench b = cpu_bench("rows", ranks, large, dtype);
  for (const int64_t rows : {64, 256, 1024}) {
    const BufferId tokens = b.tokens(rows / b.sequence_tokens(rows), b.sequence_tokens(rows));
    for (const int64_t width : {32, 64, 256, 1024}) {
      if ((3 * rows * width > kSmallOperand) != large) continue;
      for (const bool variant : {false, true}) {
        add_norm(b, rows, width, variant);
        add_activation(b, rows, width, variant);
      }
      add_rope(b, rows, width);
      add_residual(b, rows, width);
      add_embeddings(b, tokens, rows, width);
    }
    for (const int64_t vocabulary : {64, 128, 256, 512, 1024})
      if ((rows * vocabulary > kSmallOperand) == large) add_cross_entropy(b, tokens, rows, vocabulary);
  }
  return b.take();
}

// --- ops by bytes ----------------------------------------------------------------------------------------------------------

/// Scalars that a step sums are losses of sequences: hundreds, not millions. A GPU adds them one by one.
constexpr int64_t kMostScalars = 1 << 14;

void add_flat(Bench& b, int64_t elements) {
  const Type x = tensor({elements});
  Type norm = tensor({1});
  norm.dtype = DType::f64;
  b.op(AdamW{}, {b.cold(x), b.cold(x), b.state(x), b.state(x)}, {{{}, 1}, {{}, 2}, {{}, 3}});
  b.op(Sgd{}, {b.cold(x), b.cold(x)}, {{{}, 1}});
  Type codes = x, scales = tensor({moment_blocks(elements)});
  codes.dtype = DType::u8;
  b.op(AdamW8bit{}, {b.cold(x), b.cold(x), b.state(codes), b.state(codes), b.state(scales), b.state(scales)},
       {{{}, 1}, {{}, 2}, {{}, 3}, {{}, 4}, {{}, 5}});
  b.op(Lion{}, {b.cold(x), b.cold(x), b.state(x)}, {{{}, 1}, {{}, 2}});
  b.op(Add{}, {b.cold(x), b.warm(x)}, {{{}, 0}});
  b.op(Copy{}, {b.warm(x)}, {{b.result(x)}});
  b.op(Fill{}, {}, {{b.result(x)}});
  if (elements <= kMostScalars) b.op(SumScalars{}, {b.cold(x)}, {{b.result(tensor({1}))}});
  b.op(SquaredNorm{}, {b.cold(x)}, {{b.state(norm)}});
}

Plan flat_plan(int ranks, bool large) {
  Bench b = cpu_bench("flat", ranks, large);
  for (const int64_t elements : {1, 16, 256, 4096, 16384, 65536, 262144, 1048576})
    if ((elements > kSmallOperand) == large) add_flat(b, elements);
  return b.take();
}

/// What 16-bit gradients and activations are added up with.
Plan narrow_flat_plan(int ranks, DType dtype) {
  Bench b = cpu_bench("flat", ranks, false, dtype);
  for (const int64_t elements : {256, 16384, 262144}) {
    const Type x = b.typed(tensor({elements}));
    Type norm = tensor({1});
    norm.dtype = DType::f64;
    b.op(Add{}, {b.cold(x), b.warm(x)}, {{{}, 0}});
    b.op(Copy{}, {b.warm(x)}, {{b.result(x)}});
    b.op(SquaredNorm{}, {b.cold(x)}, {{b.state(norm)}});
  }
  return b.take();
}

// --- between ranks -----------------------------------------------------------------------------------------------------------

void add_collective(Bench& b, CollectiveKind kind, Algorithm algorithm, CommId comm, int64_t elements, int ranks) {
  const Collective work{kind, ReduceOp::kSum, comm, algorithm};
  const Type full = b.typed(tensor({elements})), part = b.typed(tensor({std::max<int64_t>(1, elements / ranks)}));
  switch (kind) {
    case CollectiveKind::kAllReduce: return b.op(work, {b.warm(full)}, {{{}, 0}});
    case CollectiveKind::kReduceScatter: return b.op(work, {b.warm(full)}, {{{}, 0, true}});
    case CollectiveKind::kAllGather: return b.op(work, {b.warm(part)}, {{b.result(full)}});
    case CollectiveKind::kBroadcast: return b.op(work, {b.warm(full)}, {{{}, 0}});
    case CollectiveKind::kAllToAll: return b.op(work, {b.warm(full)}, {{b.result(full)}});
  }
}

Plan collective_plan(int ranks) {
  Bench b(fmt::format("calibration collectives x{}", ranks), "rank", ranks, {8 << 20, 4 << 20});
  const CommId comm = b.comm("all");
  for (const Algorithm algorithm : {Algorithm::kRing, Algorithm::kHalvingDoubling, Algorithm::kDirect})  // a loss
    add_collective(b, CollectiveKind::kAllReduce, algorithm, comm, 1, ranks);
  for (const int64_t elements : {256, 4096, 32768, 262144, 1048576, 4194304})
    for (const CollectiveKind kind : {CollectiveKind::kAllReduce, CollectiveKind::kReduceScatter, CollectiveKind::kAllGather})
      for (const Algorithm algorithm : {Algorithm::kRing, Algorithm::kHalvingDoubling, Algorithm::kDirect})
        add_collective(b, kind, algorithm, comm, elements, ranks);
  return b.take();
}

/// Sums of 16 bits, which each step widens and rounds; and rows that change places, which are only moved.
Plan narrow_collective_plan(int ranks, DType dtype) {
  Bench b(fmt::format("calibration collectives {} x{}", name_of(dtype), ranks), "rank", ranks, {8 << 20, 4 << 20}, dtype);
  const CommId comm = b.comm("all");
  for (const int64_t elements : {1024, 65536, 524288, 2097152}) {
    for (const CollectiveKind kind : {CollectiveKind::kAllReduce, CollectiveKind::kReduceScatter})
      for (const Algorithm algorithm : {Algorithm::kRing, Algorithm::kHalvingDoubling, Algorithm::kDirect})
        add_collective(b, kind, algorithm, comm, elements, ranks);
    for (const Algorithm algorithm : {Algorithm::kRing, Algorithm::kDirect})
      add_collective(b, CollectiveKind::kAllToAll, algorithm, comm, elements, ranks);
  }
  return b.take();
}

Plan point_to_point_plan() {
  Bench b("calibration p2p", "pp", 2);
  const CommId comm = b.comm("forward");
  for (const int64_t elements : {256, 4096, 32768, 262144, 1048576})
    for (int repeat = 0; repeat < 4; ++repeat) {
      b.op(Send{comm}, {b.warm(tensor({elements}))}, {}, 0, 0);
      b.op(Recv{comm}, {}, {{b.result(tensor({elements}))}}, 0, 1);
    }
  return b.take();
}

/// Two streams a rank that wait for one another, each long enough to fall asleep, and a chain of ops that do nothing to speak of.
/// Where ranks use all cores, the streams of a rank hand its core to and fro.
Plan overhead_plan(int ranks) {
  Bench b(fmt::format("calibration overhead x{}", ranks), "rank", ranks, {3 << 20, 3 << 20});
  const int other = b.add_stream("other");
  const Type nothing = tensor({16}), large = tensor({1 << 20});
  const BufferId there = b.result(large), back = b.result(large);
  for (int i = 0; i < 64; ++i) b.untested(Fill{}, {}, {{b.result(nothing)}});
  for (int i = 0; i < 8; ++i) {
    b.untested(Copy{}, {back}, {{there}});
    b.untested(Copy{}, {there}, {{back}}, other);
  }
  return b.take();
}

// --- on a GPU --------------------------------------------------------------------------------------------------------------

/// Products of a transformer's sizes, in one element type. Operands come from pools far larger than the caches.
Plan gpu_linear_plan(DType dtype) {
  const PoolSizes pools{192 << 20, 96 << 20, 96 << 20};
  Bench b(fmt::format("calibration gpu linear {}", name_of(dtype)), "rank", 1, pools, dtype);
  for (const int64_t rows : {1024, 4096, 16384})
    for (const int64_t out : {512, 1024, 2048, 4096, 8192})
      for (const int64_t in : {512, 1024, 2048, 4096, 8192}) {
        if (rows * std::max(in, out) > (64 << 20)) continue;
        const Type x = b.typed(b.rows(rows, in)), y = b.typed(b.rows(rows, out)), w = b.typed(tensor({out, in}));
        b.op(Linear{Phase::kF}, {b.warm(x), b.cold(w)}, {{b.result(y)}});
        b.op(Linear{Phase::kI}, {b.warm(y), b.cold(w)}, {{b.passing(x)}});
        b.op(Linear{Phase::kW}, {b.cold(x), b.warm(y)}, {{b.side_result(tensor({out, in}))}});
      }
  return b.take();
}

void add_gpu_attention(Bench& b, std::initializer_list<int64_t> lengths, std::initializer_list<int64_t> widths) {
  for (const int64_t tokens : lengths)
    for (const int64_t width : widths)
      for (const int heads : {4, 16, 64}) {
        if (tokens * heads * width > (16 << 20)) continue;
        const int d = static_cast<int>(width);
        const Type o = b.typed(tensor({1, tokens, heads * width})), lse = tensor({1, heads, tokens});
        for (const int kv_heads : {heads, heads / 4}) {  // a head of keys for each of queries, and for four
          const Type qkv = b.typed(tensor({1, tokens, (heads + 2 * kv_heads) * width}));
          b.op(Attention{Phase::kF, heads, kv_heads, d}, {b.warm(qkv)}, {{b.result(o)}, {b.side_result(lse)}});
          b.op(Attention{Phase::kI, heads, kv_heads, d}, {b.warm(o), b.cold(o), b.side_operand(lse), b.cold(qkv)},
               {{b.passing(qkv)}});
        }
      }
}

/// Own kernels of fixed order: products and attention as the small models of comparisons have them.
Plan gpu_canonical_plan() {
  Bench b("calibration gpu canonical", "rank", 1, {48 << 20, 24 << 20, 24 << 20});
  for (const int64_t rows : {128, 512, 2048})
    for (const int64_t out : {64, 128, 512, 2048})
      for (const int64_t in : {64, 128, 512, 2048}) {
        add_linear_forward(b, rows, out, in, false);
        add_linear_input(b, rows, out, in);
        add_linear_weight(b, rows, out, in, false);
        if (out > 512 || in > 512) continue;
        add_linear_forward(b, rows, out, in, true);
        add_linear_weight(b, rows, out, in, true);
      }
  add_gpu_attention(b, {64, 128, 256, 512}, {32, 64});
  return b.take();
}

Plan gpu_attention_plan(DType dtype) {
  Bench b(fmt::format("calibration gpu attention {}", name_of(dtype)), "rank", 1, {192 << 20, 96 << 20, 96 << 20}, dtype);
  add_gpu_attention(b, {64, 256, 512, 1024, 2048, 4096}, {64, 128});
  return b.take();
}

Plan gpu_rows_plan(DType dtype) {
  Bench b(fmt::format("calibration gpu rows {}", name_of(dtype)), "rank", 1, {192 << 20, 96 << 20, 96 << 20}, dtype);
  b.set_sequence_tokens(1024);
  for (const int64_t rows : {128, 1024, 4096, 16384}) {
    const BufferId tokens = b.tokens(rows / b.sequence_tokens(rows), b.sequence_tokens(rows));
    for (const int64_t width : {128, 512, 2048}) {
      for (const bool variant : {false, true}) {
        add_norm(b, rows, width, variant);
        add_activation(b, rows, width, variant);
      }
      add_rope(b, rows, width);
      add_residual(b, rows, width);
      if (dtype == DType::f32) add_embeddings(b, tokens, rows, width);
    }
    if (dtype == DType::f32)
      for (const int64_t vocabulary : {256, 1024, 4096}) add_cross_entropy(b, tokens, rows, vocabulary);
  }
  return b.take();
}

/// Memory-bound ops by size, from what a launch costs to what the memory gives.
Plan gpu_flat_plan() {
  Bench b("calibration gpu flat", "rank", 1, {384 << 20, 192 << 20});
  for (const int64_t elements : {1, 1 << 10, 1 << 14, 1 << 18, 1 << 21, 1 << 24, 1 << 26}) add_flat(b, elements);
  return b.take();
}

}  // namespace

std::vector<CalibrationPlan> calibration_plans(const CalibrationOptions& options) {
  std::vector<CalibrationPlan> plans;
  const auto add = [&](Plan plan, int concurrency, int steps, bool canonical = false) {
    const int scaled = std::max(1, static_cast<int>(std::lround(steps * options.scale)));
    if (options.target == CalibrationTarget::kGpu) add_device_workspaces(plan, {.canonical = canonical, .cudnn = !canonical});
    const int streams = plan.mesh.world_size() * static_cast<int>(plan.streams.size());
    const bool crowded = options.target == CalibrationTarget::kProcessor && streams > options.cores;
    plans.push_back({plan.name, std::move(plan), concurrency, crowded, canonical, 1, scaled});
  };
  if (options.target == CalibrationTarget::kGpu) {
    for (int round = 0; round < 2; ++round) {
      add(overhead_plan(1), 1, 3);
      add(gpu_flat_plan(), 1, 3);
      for (const DType dtype : {DType::bf16, DType::f32, DType::f16}) add(gpu_linear_plan(dtype), 1, 2);
      add(gpu_canonical_plan(), 1, 2, true);
      for (const DType dtype : {DType::bf16, DType::f32}) {
        add(gpu_attention_plan(dtype), 1, 2);
        add(gpu_rows_plan(dtype), 1, 2);
      }
      for (const int ranks : options.group_sizes) add(collective_plan(ranks), 1, 3);
      add(point_to_point_plan(), 1, 3);
    }
    return plans;
  }
  std::vector<int> concurrencies{1};
  if (options.cores > 1) concurrencies.push_back(options.cores);
  for (int round = 0; round < options.rounds; ++round) {
    for (const int ranks : concurrencies) {
      for (const bool large : {false, true}) {
        add(linear_plan(ranks, large), ranks, 2);
        add(attention_plan(ranks, large), ranks, 2);
        add(rows_plan(ranks, large), ranks, 3);
        add(flat_plan(ranks, large), ranks, 6);
      }
      // Where no product is taken fp16 goes by the points of bf16, which is reported as extrapolated.
      for (const bool large : {false, true}) {
        add(attention_plan(ranks, large, DType::bf16), ranks, 2);
        add(rows_plan(ranks, large, DType::bf16), ranks, 2);
      }
      add(narrow_flat_plan(ranks, DType::bf16), ranks, 3);
      for (const DType dtype : {DType::bf16, DType::f16}) add(narrow_linear_plan(ranks, dtype), ranks, 2);
      for (const DType dtype : {DType::f32, DType::bf16}) {
        add(experts_plan(ranks, dtype), ranks, 1);
        add(heads_plan(ranks, dtype), ranks, 2);
      }
      add(codes_plan(ranks), ranks, 2);
      add(float8_plan(ranks), ranks, 2);
    }
    for (const int ranks : options.group_sizes) {
      if (ranks > std::max(2, options.cores)) continue;
      add(collective_plan(ranks), 1, 3);
      add(narrow_collective_plan(ranks, DType::bf16), 1, 3);
    }
    add(point_to_point_plan(), 1, 3);
    for (const int ranks : concurrencies) add(overhead_plan(ranks), ranks, 3);
  }
  return plans;
}

std::vector<std::string> kernels_not_measured(const Calibration& calibration) {
  std::set<std::string> missing;
  for (const CalibrationPlan& bench : calibration_plans({.cores = 1, .group_sizes = {}, .rounds = 1}))
    for (const Segment& segment : bench.plan.segments)
      for (const Step& step : segment.steps)
        if (const Op* op = std::get_if<Op>(&step); op != nullptr && op->label != kPreparation && !communicates(*op))
          missing.insert(kernel_of(segment, *op));
  for (const RatePoint& point : calibration.points) missing.erase(point.kernel);
  return {missing.begin(), missing.end()};
}

void CalibrationTokens::sequence(int64_t sequence, std::span<int32_t> out) const {
  for (size_t i = 0; i < out.size(); ++i)
    out[i] = static_cast<int32_t>(random_bits({1, RandomUse::kShuffle, 0, 0}, static_cast<uint64_t>(sequence) * 4096 + i) % 32);
}

}  // namespace shardlab::simulator
