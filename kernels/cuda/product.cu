// Linear and GroupedLinear in canonical order: every output is a tree over leaves of the contraction, each leaf one chain of fma. In fp32 these are
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

/// kLevels: of the tree over leaves; sums of fewer than 2^kLevels leaves. A is of type First, B of T.
template <class T, int kLevels, class First = T>
struct FixedProduct {
  static constexpr int kThreads = geometry::kTileThreads;
  static constexpr int kEach = kTile * kTileDepth / kThreads;  ///< elements of a slice that a thread fetches
  using Args = Product;

  SHARDLAB_DEVICE static void run(const Thread& t, const Args& p) { make_tile(t, p, t.block_y() * kTile, t.block_x() * kTile); }

  /// The tile that begins at a row and a column.
  SHARDLAB_DEVICE static void make_tile(const Thread& t, const Args& p, int64_t first_row, int64_t first_column) {
    const kernels::PartLeaves part(p.part, p.length);
    TreeCounter<Tile, kLevels> tree;
    for (int64_t run = 0; run < p.runs; ++run)
      for (int leaf = 0; leaf < part.count(); ++leaf)
        tree.push(
            leaf_tile(t, p, first_row, first_column, run * p.length + part.begin(leaf), run * p.length + part.begin(leaf + 1)));
    write(t, p, first_row, first_column, tree.total(Tile{}));
  }

  /// A chain over [begin, end) of the contraction.
  SHARDLAB_DEVICE static Tile leaf_tile(const Thread& t, const Args& p, int64_t first_row, int64_t first_column, int64_t begin,
                                        int64_t end) {
    float* slice_a = reinterpret_cast<float*>(t.shared());
    float* slice_b = slice_a + kTileDepth * kPadded;
    Tile sum{};
    float next_a[kEach], next_b[kEach];
    fetch<First>(t, p.a, first_row, p.rows, begin, end, next_a);
    fetch<T>(t, p.b, first_column, p.columns, begin, end, next_b);
    for (int64_t k = begin; k < end; k += kTileDepth) {
      t.barrier();  // the slices before have been read
      keep(t, p.a, next_a, slice_a);
      keep(t, p.b, next_b, slice_b);
      t.barrier();
      fetch<First>(t, p.a, first_row, p.rows, k + kTileDepth, end, next_a);
      fetch<T>(t, p.b, first_column, p.columns, k + kTileDepth, end, next_b);
      if (end - k >= kTileDepth) {
#pragma unroll
        for (int d = 0; d < kTileDepth; ++d) chain(t, slice_a + d * kPadded, slice_b + d * kPadded, sum);
      } else {
        for (int d = 0; d < end - k; ++d) chain(t, slice_a + d * kPadded, slice_b + d * kPadded, sum);
      }
    }
    return sum;
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

 private:
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
  template <class Element>
  SHARDLAB_DEVICE static void fetch(const Thread& t, const Operand& x, int64_t first, int64_t count, int64_t k, int64_t end,
                                    float (&to)[kEach]) {
    const Element* data = static_cast<const Element*>(x.data);
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
};

template <class T, class First>
void launch_product(const char* name, const Product& p, Stream s) {
  const Geometry g = geometry::fixed_product(p.rows, p.columns);
  const int64_t leaves = p.runs * kernels::PartLeaves(p.part, p.length).count();
  if (leaves < int64_t{1} << kLeafLevels) return launch<FixedProduct<T, kLeafLevels, First>>(name, g, p, s);
  if (leaves < int64_t{1} << kFewLevels) return launch<FixedProduct<T, kFewLevels, First>>(name, g, p, s);
  launch<FixedProduct<T, kTokenLevels, First>>(name, g, p, s);
}

/// `type` of B; A is of it too, or f32.
void multiply(const char* name, const Product& p, DType first, DType type, Stream s) {
  with_type(type, "linear: factors are f32, bf16 or f16", [&]<class T>(Named<T>) {
    if (first == type) return launch_product<T, T>(name, p, s);
    launch_product<T, float>(name, p, s);
  });
}

/// Where the rows of each source and expert begin, and the tiles of rows that they take.
struct GroupTable {
  int64_t *rows, *tiles;  ///< [groups + 1], by source and then by expert
  int64_t groups;
};

int64_t groups_of(const RowCounts& r) { return r.sources * r.experts; }
GroupTable group_table(const RowCounts& r, const Scratch& scratch) {
  auto* rows = static_cast<int64_t*>(scratch.data);
  return {rows, rows + groups_of(r) + 1, groups_of(r)};
}

/// Fills a GroupTable. One block. Rows beyond the buffer's room are none.
struct GroupRows {
  static constexpr int kThreads = geometry::kTileThreads;
  struct Args {
    RowCounts r;
    GroupTable table;
  };
  SHARDLAB_DEVICE static void run(const Thread& t, const Args& a) {
    const int64_t parts = a.r.leaves / a.r.sources;
    for (int64_t g = t.index(); g < a.table.groups; g += t.threads()) {
      int64_t rows = 0;
      for (int64_t leaf = g / a.r.experts * parts; leaf < (g / a.r.experts + 1) * parts; ++leaf)
        rows += a.r.counts[leaf * a.r.experts + g % a.r.experts];
      a.table.rows[g + 1] = rows;
    }
    t.barrier();
    if (t.index() != 0) return;
    int64_t row = 0, tile = 0;
    a.table.rows[0] = a.table.tiles[0] = 0;
    for (int64_t g = 0; g < a.table.groups; ++g) {
      const int64_t room = a.r.capacity - row, rows = a.table.rows[g + 1] < room ? a.table.rows[g + 1] : room;
      row += rows;
      tile += (rows + kTile - 1) / kTile;
      a.table.rows[g + 1] = row;
      a.table.tiles[g + 1] = tile;
    }
  }
};

/// A product whose rows are those of experts, each with a matrix of its own.
struct GroupedProduct {
  Product p;  ///< of all rows, and of the first expert's matrix
  GroupTable table;
  int64_t experts;
};

/// A tile of the rows of one source and expert.
template <class T, int kLevels>
struct GroupedTiles {
  static constexpr int kThreads = geometry::kTileThreads;
  using Args = GroupedProduct;
  SHARDLAB_DEVICE static void run(const Thread& t, const Args& a) {
    const int64_t tile = t.block_y();
    if (tile >= a.table.tiles[a.table.groups]) return;
    int64_t group = 0, end = a.table.groups;  // the last group whose tiles begin at or before this one
    while (end - group > 1) {
      const int64_t middle = (group + end) / 2;
      if (a.table.tiles[middle] <= tile)
        group = middle;
      else
        end = middle;
    }
    const int64_t first = a.table.rows[group];
    Product p = a.p;
    p.rows = a.table.rows[group + 1] - first;
    p.a.data = static_cast<const T*>(p.a.data) + first * p.a.row;
    p.b.data = static_cast<const T*>(p.b.data) + group % a.experts * p.columns * p.length;
    p.c.data = static_cast<unsigned char*>(p.c.data) + first * p.columns * (p.c.dtype == DType::f32 ? 4 : 2);
    FixedProduct<T, kLevels>::make_tile(t, p, (tile - a.table.tiles[group]) * kTile, t.block_x() * kTile);
  }
};

struct GroupedWeight {
  Product p;  ///< of the first expert's gradient; its contraction is over all rows
  RowCounts r;
  const int64_t* rows;  ///< of the GroupTable
};

/// A tile of the gradient of one expert: the tree over the parts of tokens by which rows are counted, a chain over the rows of each.
template <class T, int kLevels>
struct GroupedWeightTiles {
  static constexpr int kThreads = geometry::kTileThreads;
  using Args = GroupedWeight;
  SHARDLAB_DEVICE static void run(const Thread& t, const Args& a) {
    using Fixed = FixedProduct<T, kLevels>;
    const int64_t first_row = t.block_y() * kTile, first_column = t.block_x() * kTile, expert = t.block_z();
    const int64_t parts = a.r.leaves / a.r.sources;
    Product p = a.p;
    p.c.data = static_cast<unsigned char*>(p.c.data) + expert * p.rows * p.columns * (p.c.dtype == DType::f32 ? 4 : 2);
    TreeCounter<Tile, kLevels> tree;
    for (int64_t source = 0; source < a.r.sources; ++source) {
      int64_t at = a.rows[source * a.r.experts + expert];
      for (int64_t leaf = source * parts; leaf < (source + 1) * parts; ++leaf) {
        const int64_t rows = a.r.counts[leaf * a.r.experts + expert], end = at + rows < a.r.capacity ? at + rows : a.r.capacity;
        tree.push(Fixed::leaf_tile(t, p, first_row, first_column, at, end));
        at = end;
      }
    }
    Fixed::write(t, p, first_row, first_column, tree.total(Tile{}));
  }
};

void check(const RowCounts& r) {
  expect(r.sources >= 1 && r.leaves % r.sources == 0, "grouped linear: sources share the leaves; leaves", r.leaves);
  expect(r.capacity >= 1 && r.experts >= 1, "grouped linear: there is room for a row; capacity", r.capacity);
}

GroupTable fill_table(const char* name, const RowCounts& rows, const Scratch& scratch, Stream s) {
  check(rows);
  expect(scratch.bytes >= geometry::group_table_bytes(rows), "grouped linear: scratch is large enough", scratch.bytes);
  const GroupTable table = group_table(rows, scratch);
  launch<GroupRows>(name, geometry::group_rows(), {rows, table}, s);
  return table;
}

}  // namespace

void grouped_linear(const GroupedLinear& a, Stream s) {
  expect_type(a.w.dtype, a.x.dtype, false, "grouped linear: x and w are of one type");
  expect_type(a.y.dtype, a.x.dtype, true, "grouped linear: y is f32 or of x's type");
  const GroupTable table = fill_table("grouped_linear", a.rows, a.scratch, s);
  const int64_t length = a.back ? a.out : a.in, columns = a.back ? a.in : a.out;
  const Product p{.a = {a.x.data, length, 1},
                  .b = {a.w.data, a.back ? 1 : a.in, a.back ? a.in : 1},
                  .rows = 0,
                  .columns = columns,
                  .runs = 1,
                  .length = length,
                  .part = a.part,
                  .bias = {},
                  .c = a.y,
                  .accumulate = false};
  const Geometry g = geometry::grouped_product(a.rows, columns);
  with_type(a.x.dtype, "grouped linear: factors are f32, bf16 or f16", [&]<class T>(Named<T>) {
    launch<GroupedTiles<T, kLeafLevels>>("grouped_linear", g, {p, table, a.rows.experts}, s);
  });
}

void grouped_linear_weight(const GroupedLinearWeight& a, Stream s) {
  expect_type(a.dy.dtype, a.x.dtype, false, "grouped linear: x and dy are of one type");
  expect_type(a.dw.dtype, a.x.dtype, true, "grouped linear: dw is f32 or of x's type");
  const GroupTable table = fill_table("grouped_linear_weight", a.rows, a.scratch, s);
  const Product p{.a = {a.dy.data, 1, a.out},
                  .b = {a.x.data, 1, a.in},
                  .rows = a.out,
                  .columns = a.in,
                  .runs = 1,
                  .length = a.rows.capacity,
                  .part = {},
                  .bias = {},
                  .c = a.dw,
                  .accumulate = a.accumulate};
  const Geometry g = geometry::grouped_weight(a.rows.experts, a.out, a.in);
  with_type(a.x.dtype, "grouped linear: factors are f32, bf16 or f16", [&]<class T>(Named<T>) {
    const GroupedWeight args{p, a.rows, table.rows};
    const char* name = "grouped_linear_weight";
    if (a.rows.leaves < int64_t{1} << kLeafLevels) return launch<GroupedWeightTiles<T, kLeafLevels>>(name, g, args, s);
    if (a.rows.leaves < int64_t{1} << kFewLevels) return launch<GroupedWeightTiles<T, kFewLevels>>(name, g, args, s);
    launch<GroupedWeightTiles<T, kTokenLevels>>(name, g, args, s);
  });
}

const int64_t* count_rows(const RowCounts& rows, const Scratch& scratch, Stream s) {
  return fill_table("expert_rows", rows, scratch, s).rows + groups_of(rows);
}

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
           a.x.dtype, a.x.dtype, s);
}

void linear_input(const LinearInput& a, Stream s) {
  expect_type(a.dy.dtype, a.w.dtype, true, "linear: dy is f32 or of w's type");
  expect_type(a.dx.dtype, a.w.dtype, true, "linear: dx is f32 or of w's type");
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
           a.dy.dtype, a.w.dtype, s);
}

void linear_weight(const LinearWeight& a, Stream s) {
  expect(a.tokens.sequences >= 1 && a.tokens.sequences <= kMostSequences, "linear: 1 <= sequences < 32768", a.tokens.sequences);
  expect_type(a.dy.dtype, a.x.dtype, true, "linear: dy is f32 or of x's type");
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
           a.dy.dtype, a.x.dtype, s);
}

}  // namespace shardlab::gpu::SHARDLAB_GPU_VARIANT
