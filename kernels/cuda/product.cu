// Linear in canonical order: every output is a tree over leaves of the contraction, each leaf one chain of fma. In fp32 these are
// the bits of the CPU's canonical product.
//
// A block makes a 64 x 64 tile of C from slices of A and B, 16 deep, in shared memory; a thread holds 4 x 4 outputs, spread 16
// apart so that a warp reads neighbouring columns, and the next slice is on its way from memory while one is worked on.
#include "kernels/cuda/launch.h"
#include "kernels/cuda/launches.h"
#include "kernels/cuda/sums.h"
#include "kernels/cuda/vectors.h"

namespace shardlab::gpu::SHARDLAB_GPU_VARIANT {
namespace {

using geometry::kTile;
using geometry::kTileDepth;

constexpr int kSide = 16;                ///< threads along each side of a tile
constexpr int kOutputs = kTile / kSide;  ///< outputs of a thread along each side
constexpr int kFewLevels = 10;           ///< of a tree over the leaves of 64 sequences: more memory of each thread is wanted by few
constexpr int kPadded = kTile + 1;       ///< a row of a slice in shared memory: writes along the depth meet different banks

/// A strided matrix: element (i, k) at data[i * row + k * step]; one of row and step is 1.
struct Operand {
  const void* data;
  int64_t row, step;
};

struct Product {
  Operand a, b;  ///< A(m, k), B(n, k)
  int64_t rows, columns;
  int64_t runs, length;  ///< the contraction: so many runs, each with the leaves of `part`
  kernels::Part part;
  Input bias;
  Output c;  ///< [rows, columns]
  bool accumulate;
};

/// The outputs of a thread.
struct Tile {
  float at[kOutputs][kOutputs];
  friend SHARDLAB_DEVICE Tile operator+(const Tile& x, const Tile& y) {
    Tile z;
#pragma unroll
    for (int i = 0; i < kOutputs; ++i)
#pragma unroll
      for (int j = 0; j < kOutputs; ++j) z.at[i][j] = x.at[i][j] + y.at[i][j];
    return z;
  }
};

/// kLevels: of the tree over leaves; sums of fewer than 2^kLevels leaves.
template <class T, int kLevels>
struct FixedProduct {
  static constexpr int kThreads = geometry::kTileThreads;
  static constexpr int kEach = kTile * kTileDepth / kThreads;  ///< elements of a slice that a thread fetches
  using Args = Product;

  SHARDLAB_DEVICE static void run(const Thread& t, const Args& p) {
    float* slice_a = reinterpret_cast<float*>(t.shared());
    float* slice_b = slice_a + kTileDepth * kPadded;
    const int64_t first_row = t.block_y() * kTile, first_column = t.block_x() * kTile;
    const kernels::PartLeaves part(p.part, p.length);
    TreeCounter<Tile, kLevels> tree;
    for (int64_t run = 0; run < p.runs; ++run)
      for (int leaf = 0; leaf < part.count(); ++leaf)
        tree.push(leaf_tile(t, p, first_row, first_column, run * p.length + part.begin(leaf), run * p.length + part.begin(leaf + 1),
                            slice_a, slice_b));
    write(t, p, first_row, first_column, tree.total(Tile{}));
  }

 private:
  SHARDLAB_DEVICE static Tile leaf_tile(const Thread& t, const Args& p, int64_t first_row, int64_t first_column, int64_t begin,
                                        int64_t end, float* slice_a, float* slice_b) {
    Tile sum{};
    float next_a[kEach], next_b[kEach];
    fetch(t, p.a, first_row, p.rows, begin, end, next_a);
    fetch(t, p.b, first_column, p.columns, begin, end, next_b);
    for (int64_t k = begin; k < end; k += kTileDepth) {
      t.barrier();  // the slices before have been read
      keep(t, p.a, next_a, slice_a);
      keep(t, p.b, next_b, slice_b);
      t.barrier();
      fetch(t, p.a, first_row, p.rows, k + kTileDepth, end, next_a);
      fetch(t, p.b, first_column, p.columns, k + kTileDepth, end, next_b);
      if (end - k >= kTileDepth) {
#pragma unroll
        for (int d = 0; d < kTileDepth; ++d) chain(t, slice_a + d * kPadded, slice_b + d * kPadded, sum);
      } else {
        for (int d = 0; d < end - k; ++d) chain(t, slice_a + d * kPadded, slice_b + d * kPadded, sum);
      }
    }
    return sum;
  }

  SHARDLAB_DEVICE static void chain(const Thread& t, const float* a, const float* b, Tile& sum) {
    float x[kOutputs], y[kOutputs];
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) {
      x[i] = a[t.index() / kSide + i * kSide];
      y[i] = b[t.index() % kSide + i * kSide];
    }
#pragma unroll
    for (int i = 0; i < kOutputs; ++i)
#pragma unroll
      for (int j = 0; j < kOutputs; ++j) sum.at[i][j] = ::fmaf(x[i], y[j], sum.at[i][j]);
  }

  /// Element e of the thread's of a slice: neighbours in memory go to neighbouring threads.
  struct Place {
    int i, k;
  };
  SHARDLAB_DEVICE static Place place(const Thread& t, const Operand& x, int e) {
    const int n = e * kThreads + t.index();
    if (x.step == 1) return {n / kTileDepth, n % kTileDepth};
    return {n % kTile, n / kTile};
  }
  SHARDLAB_DEVICE static void fetch(const Thread& t, const Operand& x, int64_t first, int64_t count, int64_t k, int64_t end,
                                    float (&to)[kEach]) {
    const T* data = static_cast<const T*>(x.data);
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      const Place at = place(t, x, e);
      const bool inside = first + at.i < count && k + at.k < end;
      to[e] = inside ? value_of(data[(first + at.i) * x.row + (k + at.k) * x.step]) : 0.0f;
    }
  }
  SHARDLAB_DEVICE static void keep(const Thread& t, const Operand& x, const float (&from)[kEach], float* slice) {
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      const Place at = place(t, x, e);
      slice[at.k * kPadded + at.i] = from[e];
    }
  }

  SHARDLAB_DEVICE static void write(const Thread& t, const Args& p, int64_t first_row, int64_t first_column, const Tile& tile) {
#pragma unroll
    for (int i = 0; i < kOutputs; ++i)
#pragma unroll
      for (int j = 0; j < kOutputs; ++j) {
        const int64_t row = first_row + t.index() / kSide + i * kSide, column = first_column + t.index() % kSide + j * kSide;
        if (row >= p.rows || column >= p.columns) continue;
        const int64_t at = row * p.columns + column;
        Values<1> y{{tile.at[i][j]}};
        if (p.bias.data != nullptr) y.at[0] = y.at[0] + values_at<1>(p.bias, column).at[0];
        if (p.accumulate) y.at[0] = values_at<1>(p.c, at).at[0] + y.at[0];
        put<1>(p.c, at, y);
      }
  }
};

void multiply(const char* name, const Product& p, DType type, Stream s) {
  const Geometry g = geometry::fixed_product(p.rows, p.columns);
  with_type(type, "linear: factors are f32, bf16 or f16", [&]<class T>(Named<T>) {
    const int64_t leaves = p.runs * kernels::PartLeaves(p.part, p.length).count();
    if (leaves < int64_t{1} << kLeafLevels) return launch<FixedProduct<T, kLeafLevels>>(name, g, p, s);
    if (leaves < int64_t{1} << kFewLevels) return launch<FixedProduct<T, kFewLevels>>(name, g, p, s);
    launch<FixedProduct<T, kTokenLevels>>(name, g, p, s);
  });
}

}  // namespace

void linear_forward(const LinearForward& a, Stream s) {
  expect_type(a.w.dtype, a.x.dtype, false, "linear: x and w are of one type");
  expect_type(a.y.dtype, a.x.dtype, true, "linear: y is f32 or of x's type");
  if (a.bias.data != nullptr) expect_type(a.bias.dtype, a.x.dtype, true, "linear: bias is f32 or of x's type");
  multiply("linear_forward",
           {.a = {a.x.data, a.in, 1},
            .b = {a.w.data, a.in, 1},
            .rows = a.rows,
            .columns = a.out,
            .runs = 1,
            .length = a.in,
            .part = a.in_part,
            .bias = a.bias,
            .c = a.y,
            .accumulate = false},
           a.x.dtype, s);
}

void linear_input(const LinearInput& a, Stream s) {
  expect_type(a.w.dtype, a.dy.dtype, false, "linear: dy and w are of one type");
  expect_type(a.dx.dtype, a.dy.dtype, true, "linear: dx is f32 or of dy's type");
  multiply("linear_input",
           {.a = {a.dy.data, a.out, 1},
            .b = {a.w.data, 1, a.in},
            .rows = a.rows,
            .columns = a.in,
            .runs = 1,
            .length = a.out,
            .part = a.out_part,
            .bias = {},
            .c = a.dx,
            .accumulate = false},
           a.dy.dtype, s);
}

void linear_weight(const LinearWeight& a, Stream s) {
  expect(a.tokens.sequences >= 1 && a.tokens.sequences <= kMostSequences, "linear: 1 <= sequences < 32768", a.tokens.sequences);
  expect_type(a.dy.dtype, a.x.dtype, false, "linear: x and dy are of one type");
  expect_type(a.dw.dtype, a.x.dtype, true, "linear: dw is f32 or of x's type");
  multiply("linear_weight",
           {.a = {a.dy.data, 1, a.out},
            .b = {a.x.data, 1, a.in},
            .rows = a.out,
            .columns = a.in,
            .runs = a.tokens.sequences,
            .length = a.tokens.tokens,
            .part = a.tokens.part,
            .bias = {},
            .c = a.dw,
            .accumulate = a.accumulate},
           a.x.dtype, s);
}

}  // namespace shardlab::gpu::SHARDLAB_GPU_VARIANT
