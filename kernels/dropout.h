// Dropout whose mask is a function of the logical element: nothing is saved, and no layout changes it.
// Source: Srivastava et al. 2014; Salmon et al. 2011 (Philox4x32-10).
#pragma once

#include <cstdint>

#include "plan/base/philox.h"

namespace shardlab::kernels {

/// F and I. z[sequences,tokens,width] in place: kept elements times 1/(1-p), the others +0.
/// The mask of (sequence b, token t, column c) is random_bits(key, e) >= p * 2^32 with the logical element
/// e = ((sequence_begin + b) * tokens_total + token_begin + t) * width_total + width_begin + c.
/// A total of 0 means the extent held. Flops: one an element besides the random numbers. Bytes: 8 an element.
struct Dropout {
  float* z = nullptr;
  int64_t sequences = 1, tokens = 0, width = 0;
  int64_t sequence_begin = 0;  ///< of the step's sequences, over all ranks and micro-batches
  int64_t token_begin = 0, tokens_total = 0;
  int64_t width_begin = 0, width_total = 0;
  float p = 0;  ///< in [0, 1)
  RandomKey key;
};

}  // namespace shardlab::kernels
