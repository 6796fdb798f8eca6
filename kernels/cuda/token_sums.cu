// Sums over tokens, a column each: gradients of gammas, betas and biases.
//
// Two launches. The first sums one leaf (a sixteenth of a sequence) a block, its eight rows of threads taking every eighth token;
// the second joins leaves and sequences by the tree, eight sequences at a time, one a row of threads. The partial sums, 4 bytes a leaf and column, are all the memory between.
#include "kernels/cuda/launch.h"
#include "kernels/cuda/launches.h"
#include "kernels/cuda/sums.h"
#include "kernels/cuda/vectors.h"

namespace shardlab::gpu::SHARDLAB_GPU_VARIANT {
namespace {

using geometry::kTokenColumns;
using geometry::kTokenRows;

/// The summand: dy; or dy * xhat (and dy) with a norm's x and stats.
enum class Summed { kPlain, kLayerNorm, kRmsNorm };

struct Leaves {
  const void* dy;
  const void* x;
  const float* stats;
  float* partial;  ///< [sequences, leaves, outputs, width]
  Tokens tokens;
  int64_t width;
};

template <class T, int kVector, Summed kSummed>
struct TokenLeaves {
  static constexpr int kThreads = geometry::kTokenThreads;
  static constexpr int kOutputs = kSummed == Summed::kLayerNorm ? 2 : 1;
  using Args = Leaves;

  SHARDLAB_DEVICE static void run(const Thread& t, const Args& a) {
    const kernels::PartLeaves leaves(a.tokens.part, a.tokens.tokens);
    const int leaf = static_cast<int>(t.block_y());
    const int64_t first_row = t.block_z() * a.tokens.tokens;
    const int64_t column = (t.block_x() * kTokenColumns + t.lane()) * kVector;
    float sum[kOutputs][kVector] = {};
    if (column < a.width)
#pragma unroll 4
      for (int64_t token = leaves.begin(leaf) + t.warp(); token < leaves.begin(leaf + 1); token += kTokenRows)
        add(a, first_row + token, column, sum);
    // A row of threads is a warp: its sums meet the others' in shared memory, in order of the rows.
    float* shared = reinterpret_cast<float*>(t.shared());
#pragma unroll
    for (int o = 0; o < kOutputs; ++o)
#pragma unroll
      for (int j = 0; j < kVector; ++j) shared[((t.warp() * kOutputs + o) * kVector + j) * kTokenColumns + t.lane()] = sum[o][j];
    t.barrier();
    constexpr int kColumns = kOutputs * kVector;  // of one thread
    for (int c = t.warp(); c < kColumns; c += kTokenRows) {
      float total = shared[c * kTokenColumns + t.lane()];
      for (int row = 1; row < kTokenRows; ++row) total = total + shared[(row * kColumns + c) * kTokenColumns + t.lane()];
      if (column < a.width)
        a.partial[((t.block_z() * leaves.count() + leaf) * kOutputs + c / kVector) * a.width + column + c % kVector] = total;
    }
  }

 private:
  SHARDLAB_DEVICE static void add(const Args& a, int64_t row, int64_t column, float (&sum)[kOutputs][kVector]) {
    const Values<kVector> dy = values_at<kVector>(static_cast<const T*>(a.dy) + row * a.width + column);
    if constexpr (kSummed == Summed::kPlain) {
#pragma unroll
      for (int j = 0; j < kVector; ++j) sum[0][j] = sum[0][j] + dy.at[j];
    } else {
      const Values<kVector> x = values_at<kVector>(static_cast<const T*>(a.x) + row * a.width + column);
      constexpr bool kRms = kSummed == Summed::kRmsNorm;
      const float mean = kRms ? 0.0f : a.stats[2 * row], rstd = kRms ? a.stats[row] : a.stats[2 * row + 1];
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        sum[0][j] = sum[0][j] + dy.at[j] * ((x.at[j] - mean) * rstd);
        if constexpr (kOutputs == 2) sum[1][j] = sum[1][j] + dy.at[j];
      }
    }
  }
};

struct TokenTotals {
  static constexpr int kThreads = geometry::kTokenThreads;
  struct Args {
    const float* partial;
    Output out[2];
    int outputs;
    int leaves;
    int64_t sequences, width;
    bool accumulate;
  };
  SHARDLAB_DEVICE static void run(const Thread& t, const Args& a) {
    float* shared = reinterpret_cast<float*>(t.shared());
    const int64_t column = t.block_x() * kTokenColumns + t.lane();
    const bool inside = column < a.width;
    for (int o = 0; o < a.outputs; ++o) {
      TreeCounter<float, kSequenceLevels> total;  // of the first row of threads
      for (int64_t first = 0; first < a.sequences; first += kTokenRows) {
        const int64_t b = first + t.warp();
        if (inside && b < a.sequences) {
          TreeCounter<float, kLeafLevels> sequence;
#pragma unroll 4
          for (int leaf = 0; leaf < a.leaves; ++leaf)
            sequence.push(a.partial[((b * a.leaves + leaf) * a.outputs + o) * a.width + column]);
          shared[t.warp() * kTokenColumns + t.lane()] = sequence.total(0.0f);
        }
        t.barrier();
        if (inside && t.warp() == 0)
          for (int row = 0; row < kTokenRows && first + row < a.sequences; ++row)
            total.push(shared[row * kTokenColumns + t.lane()]);
        t.barrier();
      }
      if (!inside || t.warp() != 0) continue;
      Values<1> sum{{total.total(0.0f)}};
      if (a.accumulate) sum.at[0] = values_at<1>(a.out[o], column).at[0] + sum.at[0];
      put<1>(a.out[o], column, sum);
    }
  }
};

/// Both launches.
template <Summed kSummed>
void token_sums(const char* name, DType type, const Leaves& leaves, Output first, Output second, bool accumulate,
                const Scratch& scratch, Stream s) {
  constexpr int kOutputs = kSummed == Summed::kLayerNorm ? 2 : 1;
  const Tokens& tokens = leaves.tokens;
  expect(tokens.sequences >= 1 && tokens.sequences <= kMostSequences, "a sum over tokens: 1 <= sequences < 32768",
         tokens.sequences);
  expect(tokens.tokens >= 1, "a sum over tokens: a sequence has a token", tokens.tokens);
  const int count = kernels::PartLeaves(tokens.part, tokens.tokens).count();
  expect(scratch.bytes >= tokens.sequences * count * kOutputs * leaves.width * 4, "a sum over tokens: scratch is large enough",
         scratch.bytes);
  with_type(type, "a sum over tokens: dy is f32, bf16 or f16", [&]<class T>(Named<T>) {
    const bool wide = leaves.width % kVectorOf<T> == 0 && aligned({leaves.dy, leaves.x});
    with_vector<kVectorOf<T>>(wide, [&](auto vector) {
      launch<TokenLeaves<T, vector.value, kSummed>>(
          name, geometry::token_leaves(tokens.sequences, count, leaves.width, vector.value, kOutputs), leaves, s);
    });
  });
  launch<TokenTotals>(name, geometry::token_total(leaves.width),
                      {leaves.partial, {first, second}, kOutputs, count, tokens.sequences, leaves.width, accumulate}, s);
}

}  // namespace

void norm_weight(const NormWeight& a, Stream s) {
  expect_type(a.x.dtype, a.dy.dtype, false, "norm: dy and x are of one type");
  expect_type(a.dgamma.dtype, a.dy.dtype, true, "norm: dgamma is f32 or of dy's type");
  const Leaves leaves{a.dy.data, a.x.data, a.stats, static_cast<float*>(a.scratch.data), a.tokens, a.width};
  if (a.rms) return token_sums<Summed::kRmsNorm>("norm_weight", a.dy.dtype, leaves, a.dgamma, {}, a.accumulate, a.scratch, s);
  expect_type(a.dbeta.dtype, a.dy.dtype, true, "norm: dbeta is f32 or of dy's type");
  token_sums<Summed::kLayerNorm>("norm_weight", a.dy.dtype, leaves, a.dgamma, a.dbeta, a.accumulate, a.scratch, s);
}

void bias_weight(const BiasWeight& a, Stream s) {
  expect_type(a.dbias.dtype, a.dy.dtype, true, "bias: dbias is f32 or of dy's type");
  const Leaves leaves{a.dy.data, nullptr, nullptr, static_cast<float*>(a.scratch.data), a.tokens, a.width};
  token_sums<Summed::kPlain>("bias_weight", a.dy.dtype, leaves, a.dbias, {}, a.accumulate, a.scratch, s);
}

}  // namespace shardlab::gpu::SHARDLAB_GPU_VARIANT
