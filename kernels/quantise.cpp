#include "kernels/quantise.h"

#include <cmath>
#include <vector>

#include "kernels/tree_of_rows.h"
#include "kernels/window.h"

namespace shardlab::kernels {

namespace {

/// Calls body(row, begin, n, scale) for the blocks of a row.
template <class Body>
void for_row_blocks(const BlockShape& s, int64_t row, const Body& body) {
  SHARDLAB_CHECK(s.bits == 8 || s.bits == 4, "quantised to {} bits", s.bits);
  for (int64_t b = 0; b < s.blocks; ++b) {
    const int64_t begin = std::min(s.columns, b * s.block()), end = std::min(s.columns, begin + s.block());
    body(begin, end - begin, row * s.blocks + b);
  }
}

/// Where element (row, column) lies; column is even for 4 bits.
template <class Byte>
Byte* code_at(Byte* q, const BlockShape& s, int64_t row, int64_t column) {
  return q + row * s.row_bytes() + column * s.bits / 8;
}

}  // namespace

void block_quantise(const MixedKernels& k, const BlockQuantise& a, Scratch& scratch) {
  Window x(k.storage(), a.x, kBlockElements, scratch);
  if (scratch.counting()) return;
  const BlockShape& s = a.shape;
  auto* q = static_cast<uint8_t*>(a.q);
  for (int64_t row = 0; row < s.rows; ++row)
    for_row_blocks(s, row, [&](int64_t begin, int64_t count, int64_t scale) {
      float most = 0;
      for_blocks(count, kBlockElements, [&](int64_t first, int64_t n) {
        const float here = k.storage().amax(x.read(row * s.columns + begin + first, n), n);
        if (std::isnan(here) || here > most) most = here;
      });
      a.scales[scale] = most / (s.bits == 8 ? 127.0f : 7.0f);
      for_blocks(count, kBlockElements, [&](int64_t first, int64_t n) {
        k.storage().quantise_int(
            {x.read(row * s.columns + begin + first, n), n, a.scales[scale], s.bits, code_at(q, s, row, begin + first)});
      });
    });
}

void block_dequantise(const MixedKernels& k, const BlockDequantise& a, Scratch& scratch) {
  Window y(k.storage(), a.y, kBlockElements, scratch);
  if (scratch.counting()) return;
  const BlockShape& s = a.shape;
  const auto* q = static_cast<const uint8_t*>(a.q);
  for (int64_t row = 0; row < s.rows; ++row)
    for_row_blocks(s, row, [&](int64_t begin, int64_t count, int64_t scale) {
      for_blocks(count, kBlockElements, [&](int64_t first, int64_t n) {
        k.storage().dequantise_int(
            {code_at(q, s, row, begin + first), n, a.scales[scale], s.bits, y.place(row * s.columns + begin + first, n)});
        y.write();
      });
    });
}

void block_dequantise_sum(const MixedKernels& k, const BlockDequantiseSum& a, Scratch& scratch) {
  const BlockShape& s = a.shape;
  const auto* q = static_cast<const uint8_t*>(a.q);
  tree_of_rows(k, s.rows, s.columns, a.y, scratch, [&](int64_t row, int64_t first, int64_t n, float* to) {
    for (int64_t i = 0; i < n;) {  // a run may touch several blocks
      const int64_t block = (first + i) / s.block();
      const int64_t run = std::min(n - i, (block + 1) * s.block() - (first + i));
      k.storage().dequantise_int({code_at(q, s, row, first + i), run, a.scales[row * s.blocks + block], s.bits, to + i});
      i += run;
    }
  });
}

void sum_rows(const MixedKernels& k, const SumRows& a, Scratch& scratch) {
  const char* x = static_cast<const char*>(a.x.data);
  tree_of_rows(k, a.rows, a.columns, a.y, scratch, [&](int64_t row, int64_t first, int64_t n, float* to) {
    const int64_t at = row * a.columns + first;
    k.storage().widen({x + at * bytes_per_element(a.x.dtype), a.x.dtype, n, to});
    apply_scales(k.storage(), a.x.scales, at, n, to);
  });
}

}  // namespace shardlab::kernels
