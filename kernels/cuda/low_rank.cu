// Bases of a few columns, by one block: what PowerSGD projects on. Matrices are tall and have a handful of columns.
#include "kernels/cuda/launch.h"
#include "kernels/cuda/launches.h"
#include "kernels/cuda/sums.h"

namespace shardlab::gpu::SHARDLAB_GPU_VARIANT {
namespace {

constexpr int kBasisThreads = 256;
constexpr int64_t kBasisShared = 2 * kBasisThreads / kWarp * 8;  ///< two rounds of sums in fp64

/// Gram-Schmidt from the left, in fp64, each column twice; columns lie one after another in scratch.
struct Orthogonal {
  static constexpr int kThreads = kBasisThreads;
  struct Args {
    gpu::Orthogonalise a;
    double* q;
  };
  SHARDLAB_DEVICE static double dot(const Thread& t, const double* x, const double* y, int64_t n) {
    double sum[1] = {0};
    for (int64_t i = t.index(); i < n; i += kThreads) sum[0] = sum[0] + x[i] * y[i];
    t.barrier();  // nobody still reads the sums of the time before
    block_sums(t, sum, reinterpret_cast<double*>(t.shared()));
    return sum[0];
  }
  /// Takes the span of the columns before c out of column c; returns the rest's norm. A thread reads and writes its own elements.
  SHARDLAB_DEVICE static double take_out(const Thread& t, double* q, int64_t rows, int64_t c) {
    double* column = q + c * rows;
    for (int pass = 0; pass < 2; ++pass)
      for (int64_t b = 0; b < c; ++b) {
        const double* other = q + b * rows;
        const double share = dot(t, other, column, rows);
        for (int64_t i = t.index(); i < rows; i += kThreads) column[i] = column[i] - share * other[i];
      }
    return ::sqrt(dot(t, column, column, rows));
  }
  SHARDLAB_DEVICE static void run(const Thread& t, const Args& args) {
    const gpu::Orthogonalise& a = args.a;
    double* q = args.q;
    const int64_t rows = a.rows;
    for (int64_t r = t.index(); r < rows; r += kThreads)
      for (int64_t c = 0; c < a.columns; ++c) q[c * rows + r] = static_cast<double>(a.p[r * a.columns + c]);
    for (int64_t c = 0; c < a.columns; ++c) {
      double* column = q + c * rows;
      if (c >= rows) {
        for (int64_t i = t.index(); i < rows; i += kThreads) column[i] = 0;
        continue;
      }
      const double before = ::sqrt(dot(t, column, column, rows));
      double rest = take_out(t, q, rows, c);
      if (rest <= 1e-6 * before) {
        // Of the unit vectors' rests one has at least the mean squared norm, (rows - c) / rows.
        const double enough = ::sqrt(0.5 * static_cast<double>(rows - c) / static_cast<double>(rows));
        for (int64_t unit = 0; unit < rows; ++unit) {
          for (int64_t i = t.index(); i < rows; i += kThreads) column[i] = i == unit ? 1 : 0;
          rest = take_out(t, q, rows, c);
          if (rest >= enough) break;
        }
      }
      for (int64_t i = t.index(); i < rows; i += kThreads) column[i] = column[i] / rest;  // a NaN stays one
    }
    for (int64_t r = t.index(); r < rows; r += kThreads)
      for (int64_t c = 0; c < a.columns; ++c) a.q[r * a.columns + c] = static_cast<float>(q[c * rows + r]);
  }
};

struct FirstBasis {
  static constexpr int kThreads = kBasisThreads;
  using Args = gpu::StartBasis;
  SHARDLAB_DEVICE static void run(const Thread& t, const Args& a) {
    int32_t set[1] = {0};
    for (int64_t i = t.index(); i < a.rows * a.columns; i += kThreads) set[0] = a.basis[i] != 0 ? 1 : set[0];
    block_sums(t, set, reinterpret_cast<int32_t*>(t.shared()));
    if (set[0] != 0) return;
    const int64_t most = a.rows < a.columns ? a.rows : a.columns;
    for (int64_t i = t.index(); i < most; i += kThreads) a.basis[i * a.columns + i] = 1;
  }
};

}  // namespace

void orthogonalise(const gpu::Orthogonalise& a, Stream s) {
  expect(a.scratch.bytes >= scratch_bytes(a), "orthogonalise: scratch is large enough", a.scratch.bytes);
  launch<Orthogonal>("orthogonalise", {.threads = kBasisThreads, .shared = kBasisShared}, {a, static_cast<double*>(a.scratch.data)},
                     s);
}

void start_basis(const gpu::StartBasis& a, Stream s) {
  launch<FirstBasis>("start_basis", {.threads = kBasisThreads, .shared = kBasisShared}, a, s);
}

}  // namespace shardlab::gpu::SHARDLAB_GPU_VARIANT
