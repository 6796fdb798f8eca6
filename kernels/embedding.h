// Token embedding and learned positions.
#pragma once

#include <cstdint>

#include "kernels/leaves.h"
#include "plan/base/token_order.h"

namespace shardlab::kernels {

/// F. Shapes: ids i32[rows], table[table_rows,width] -> x[rows,width]. The table holds rows row_begin .. of the vocabulary; an id
/// outside of it gives a row of +0. Bytes: 8 rows width.
struct EmbedForward {
  const int32_t* ids = nullptr;
  const float* table = nullptr;
  float* x = nullptr;
  int64_t rows = 0, width = 0;
  int64_t row_begin = 0, table_rows = 0;
};

/// W. Shapes: ids i32[sequences,tokens], dx[sequences,tokens,width] -> dtable[table_rows,width], rows without a token +0; with
/// `accumulate` the new sum is added to the rows that have one.
struct EmbedWeight {
  const int32_t* ids = nullptr;
  const float* dx = nullptr;
  float* dtable = nullptr;
  int64_t sequences = 1, tokens = 0, width = 0;
  int64_t row_begin = 0, table_rows = 0;
  bool accumulate = false;
  void* scratch = nullptr;  ///< embed_scratch_bytes(...) bytes, aligned to 64
  Part part{};              ///< which tokens of a sequence they are, where it is cut
};

/// Scratch in bytes: 16 a token.
int64_t embed_scratch_bytes(const EmbedWeight& a);

/// F. Shapes: x[sequences,tokens,width], table[tokens,width] (the rows of these tokens) -> y = x + table; y may be x.
struct PositionsForward {
  const float* x = nullptr;
  const float* table = nullptr;
  float* y = nullptr;
  int64_t sequences = 1, tokens = 0, width = 0;
};

/// W. Shapes: dx[sequences,tokens,width] -> dtable[tokens,width]: `tree` over the sequences, plus +0. With `accumulate`: old + new.
struct PositionsWeight {
  const float* dx = nullptr;
  float* dtable = nullptr;
  int64_t sequences = 1, tokens = 0, width = 0;
  bool accumulate = false;
  int64_t stride = 0;  ///< elements from one sequence of dx to the next, where they lie apart; 0: tokens * width
};

}  // namespace shardlab::kernels
