// Linear: oneDNN in fast mode; in canonical mode a matrix product whose every output is a tree over leaves, each leaf a
// chain of fma.
//
// The canonical product, C[m,n] = tree over leaves of chain over p of A(m,p) * B(p,n), is cut in tiles of kTileRows x 16
// kTileVectors outputs that stay in registers over a whole leaf. B's columns are packed [p][column] for a block of columns, A's
// rows [p][row] for a tile. Vectors lie along n: no order depends on their width, so tiles may differ between variants and the
// bits may not.
#include <dnnl.h>

#include "kernels/cpu/panels.h"
#include "kernels/cpu/sums.h"
#include "kernels/cpu/variant.h"
#include "kernels/linear_runs.h"

namespace shardlab::kernels::SHARDLAB_VARIANT {
namespace {

#if defined(__AVX512F__)
inline constexpr int kTileRows = 8, kTileVectors = 2;  // 16 of 32 registers hold sums
#elif defined(__AVX2__)
inline constexpr int kTileRows = 6, kTileVectors = 1;  // 12 of 16
#else
inline constexpr int kTileRows = 2, kTileVectors = 1;  // 8 of 16
#endif
inline constexpr int kTileColumns = kTileVectors * kLanes;
static_assert(kTileRows <= kMostTileRows && 64 % kTileColumns == 0, "scratch is stated for all variants in kernels/cpu/panels.h");

/// A strided matrix operand: element (i, p) at data[i * row + p * step]; of runs, p counts along them.
struct Operand {
  const float* data;
  int64_t row;
  int64_t step;
  const RowRun* runs = nullptr;
  int64_t run_count = 0;
};

/// Leaves of the contraction: those of `part`, in each of `parts` equal runs of `length`. Leaf i ends where leaf i + 1 begins.
struct ContractionLeaves {
  const PartLeaves* part;
  int64_t parts, length;
  SHARDLAB_INLINE int64_t count() const { return parts * part->count(); }
  SHARDLAB_INLINE int64_t extent() const { return parts * length; }
  SHARDLAB_INLINE int64_t begin(int64_t i) const {
    const int64_t n = part->count();
    return i / n * length + part->begin(static_cast<int>(i % n));
  }
};
/// Leaves that end where a list says.
struct ListedLeaves {
  const int64_t* ends;
  int64_t leaves;
  SHARDLAB_INLINE int64_t count() const { return leaves; }
  SHARDLAB_INLINE int64_t extent() const { return ends[leaves]; }
  SHARDLAB_INLINE int64_t begin(int64_t i) const { return ends[i]; }
};
/// Levels of a counter over the leaves of all sequences.
inline constexpr int kTokenLevels = kSequenceLevels + 4;

struct Tile {
  Floats sum[kTileRows][kTileVectors];
};
SHARDLAB_INLINE Tile operator+(const Tile& a, const Tile& b) {
  Tile r;
  for (int i = 0; i < kTileRows; ++i)
    for (int j = 0; j < kTileVectors; ++j) r.sum[i][j] = a.sum[i][j] + b.sum[i][j];
  return r;
}

/// One leaf of one tile: a chain of fma over its extent.
SHARDLAB_INLINE Tile leaf_tile(const float* a, const float* b, int64_t extent) {
  Floats sum[kTileRows][kTileVectors];
#pragma GCC unroll 8
  for (int i = 0; i < kTileRows; ++i)
#pragma GCC unroll 2
    for (int j = 0; j < kTileVectors; ++j) sum[i][j] = zeros();
  for (int64_t p = 0; p < extent; ++p, a += kTileRows, b += kTileColumns) {
    Floats column[kTileVectors];
#pragma GCC unroll 2
    for (int j = 0; j < kTileVectors; ++j) column[j] = load(b + j * kLanes);
#pragma GCC unroll 8
    for (int i = 0; i < kTileRows; ++i) {
      const Floats row = floats(a[i]);
#pragma GCC unroll 2
      for (int j = 0; j < kTileVectors; ++j) sum[i][j] = fma(row, column[j], sum[i][j]);
    }
  }
  Tile tile;
#pragma GCC unroll 8
  for (int i = 0; i < kTileRows; ++i)
#pragma GCC unroll 2
    for (int j = 0; j < kTileVectors; ++j) tile.sum[i][j] = sum[i][j];
  return tile;
}

/// to[p][i] = x(first + i, p) for i < count, +0 for the others up to `padded`.
void pack(const Operand& x, int64_t first, int64_t count, int padded, int64_t extent, float* to) {
  if (x.runs != nullptr) {
    for (int64_t r = 0; r < x.run_count; ++r) {
      pack({x.data + x.runs[r].begin * x.step, x.row, x.step}, first, count, padded, x.runs[r].rows, to);
      to += x.runs[r].rows * padded;
    }
    return;
  }
  const float* from = x.data + first * x.row;
  if (x.row == 1) {
    for (int64_t p = 0; p < extent; ++p)
      for (int i = 0; i < padded; ++i) to[p * padded + i] = i < count ? from[p * x.step + i] : 0.0f;
    return;
  }
  for (int i = 0; i < padded; ++i)
    for (int64_t p = 0; p < extent; ++p) to[p * padded + i] = i < count ? from[i * x.row + p * x.step] : 0.0f;
}

/// C[rows, columns] = tree of chains (+ bias), C row-major with rows of `columns`.
template <class Leaves>
void canonical_product(const Operand& a, const Operand& b, int64_t rows, int64_t columns, const Leaves& leaves, const float* bias,
                       float* c, void* scratch) {
  const int64_t extent = leaves.extent(), count = leaves.count(), block = block_columns(extent);
  float* packed_a = take<float>(scratch, extent * kTileRows);
  float* packed_b = take<float>(scratch, extent * block);
  for (int64_t begin = 0; begin < columns; begin += block) {
    const int64_t end = columns < begin + block ? columns : begin + block;
    for (int64_t n = begin; n < end; n += kTileColumns)
      pack(b, n, end - n < kTileColumns ? end - n : kTileColumns, kTileColumns, extent, packed_b + (n - begin) * extent);
    for (int64_t m = 0; m < rows; m += kTileRows) {
      const int64_t tile_rows = rows - m < kTileRows ? rows - m : kTileRows;
      pack(a, m, tile_rows, kTileRows, extent, packed_a);
      for (int64_t n = begin; n < end; n += kTileColumns) {
        const float* columns_b = packed_b + (n - begin) * extent;
        TreeCounter<Tile, kTokenLevels> tree;
        int64_t p = 0;
        for (int64_t leaf = 1; leaf <= count; ++leaf) {
          const int64_t end = leaves.begin(leaf);
          tree.push(leaf_tile(packed_a + p * kTileRows, columns_b + p * kTileColumns, end - p));
          p = end;
        }
        const Tile tile = tree.total();
        for (int64_t i = 0; i < tile_rows; ++i)
          for (int j = 0; j < kTileVectors && n + j * kLanes < end; ++j) {
            const int64_t column = n + j * kLanes;
            const int width = static_cast<int>(end - column < kLanes ? end - column : kLanes);
            const Floats sum = tile.sum[i][j];
            store_some(c + (m + i) * columns + column, bias == nullptr ? sum : sum + load_some(bias + column, width), width);
          }
      }
    }
  }
}

void fast_product(char transposed_a, char transposed_b, int64_t m, int64_t n, int64_t k, const float* a, const float* b, float beta,
                  float* c) {
  if (m == 0 || n == 0) return;
  const dnnl_status_t status = dnnl_sgemm(transposed_a, transposed_b, m, n, k, 1.0f, a, transposed_a == 'N' ? k : m, b,
                                          transposed_b == 'N' ? n : k, beta, c, n);
  expect(status == dnnl_success, "linear: dnnl_sgemm succeeds; this is its status", status);
}

}  // namespace

void linear_forward(const LinearForward& a) {
  if (a.canonical) {
    const PartLeaves part(a.in_part, a.in);
    canonical_product({a.x, a.in, 1}, {a.w, a.in, 1}, a.rows, a.out, ContractionLeaves{&part, 1, a.in}, a.bias, a.y, a.scratch);
    return;
  }
  fast_product('N', 'T', a.rows, a.out, a.in, a.x, a.w, 0.0f, a.y);
  if (a.bias == nullptr) return;
  for (int64_t row = 0; row < a.rows; ++row)
    for_vectors(a.out, [y = a.y + row * a.out, bias = a.bias](int64_t i, int n) {
      store_some(y + i, load_some(y + i, n) + load_some(bias + i, n), n);
    });
}

void linear_input(const LinearInput& a) {
  if (a.canonical) {
    const PartLeaves part(a.out_part, a.out);
    canonical_product({a.dy, a.out, 1}, {a.w, 1, a.in}, a.rows, a.in, ContractionLeaves{&part, 1, a.out}, nullptr, a.dx, a.scratch);
    return;
  }
  fast_product('N', 'N', a.rows, a.in, a.out, a.dy, a.w, 0.0f, a.dx);
}

void linear_weight(const LinearWeight& a) {
  const int64_t rows = a.tokens.rows();
  if (a.canonical) {
    expect(!a.accumulate, "linear: canonical mode does not accumulate; plan Add ops", a.accumulate);
    expect(a.tokens.sequences >= 1 && a.tokens.sequences < (1 << (kSequenceLevels - 1)), "linear: 1 <= sequences < 32768",
           a.tokens.sequences);
    const PartLeaves part(a.tokens.part, a.tokens.tokens);
    expect(part.count() <= kContractionLeaves, "linear: in canonical mode a rank's tokens are whole leaves of the sequence",
           part.count());
    canonical_product({a.dy, 1, a.out}, {a.x, 1, a.in}, a.out, a.in, ContractionLeaves{&part, a.tokens.sequences, a.tokens.tokens},
                      nullptr, a.dw, a.scratch);
  } else {
    fast_product('T', 'N', a.out, a.in, rows, a.dy, a.x, a.accumulate ? 1.0f : 0.0f, a.dw);
  }
  if (a.dbias != nullptr)
    token_sums(a.tokens, a.out, a.accumulate, a.dbias,
               [&](int64_t row, int64_t column, int n) { return load_some(a.dy + row * a.out + column, n); });
}

void linear_weight_runs(const LinearWeightRuns& a);  // kernels/dispatch.cpp finds it
void linear_weight_runs(const LinearWeightRuns& a) {
  expect(a.leaves >= 1 && a.leaves < (int64_t{1} << (kTokenLevels - 1)), "linear: 1 <= leaves < 2^19", a.leaves);
  canonical_product({a.dy, 1, a.out, a.runs, a.run_count}, {a.x, 1, a.in, a.runs, a.run_count}, a.out, a.in,
                    ListedLeaves{a.leaf_ends, a.leaves}, nullptr, a.dw, a.scratch);
}

}  // namespace shardlab::kernels::SHARDLAB_VARIANT
