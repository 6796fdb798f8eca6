// The canonical tree over the rows of a coded tensor: it adds up the parts that ranks exchanged.
#pragma once

#include <algorithm>

#include "kernels/window.h"

namespace shardlab::kernels {

/// y[columns] = tree over rows; read(row, first, n, to) gives a run of a row.
template <class Read>
void tree_of_rows(const MixedKernels& k, int64_t rows, int64_t columns, const Stored& y, Scratch& scratch, const Read& read) {
  // A multiple of two elements, so that runs of 4-bit codes begin at bytes.
  const int64_t block = std::max<int64_t>(2, kBlockElements / std::max<int64_t>(1, rows) / 2 * 2);
  auto* parts = scratch.take<float>(rows * block);
  auto* pointers = static_cast<const float**>(scratch.take_bytes(rows * static_cast<int64_t>(sizeof(float*))));
  Window sum(k.storage(), y, block, scratch);
  if (scratch.counting()) return;
  for (int64_t r = 0; r < rows; ++r) pointers[r] = parts + r * block;
  for_blocks(columns, block, [&](int64_t first, int64_t n) {
    for (int64_t r = 0; r < rows; ++r) read(r, first, n, parts + r * block);
    k.fp32().tree_combine({pointers, static_cast<int>(rows), sum.place(first, n), n});
    sum.write();
  });
}

}  // namespace shardlab::kernels
