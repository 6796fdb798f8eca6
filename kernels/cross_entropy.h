// Next-token cross-entropy, whole or over a part of the vocabulary.
// Source: Shoeybi et al. 2019 (vocabulary-parallel cross-entropy).
//
// Reductions between the vocabulary-parallel parts: after Max, the maximum of `max` over ranks; after Sum, the sum of `sums` over
// ranks (in canonical order a tree over the shards, which then equals the fused form bit for bit).
#pragma once

#include "kernels/leaves.h"

namespace shardlab::kernels {

/// One struct for all five parts. rows = sequences * tokens; vocab columns are held, of which `vocab_part` says where they lie.
///   fused:     logits, targets -> nll, logits overwritten by dlogits
///   loss_only: logits, targets -> nll
///   max:       logits -> max[rows]
///   sum:       logits, targets, max -> sums[rows,2]: sum of exp(x - max), the target's logit or +0 where it is not held
///   grad:      targets, max, sums -> nll, logits overwritten by dlogits
/// Targets are logical ids in [0, vocab_total), below `words`. dlogits is divided by `loss_tokens` and multiplied by `loss_scale`, nll[sequences] is a plain sum over tokens.
/// Bytes: fused 16 rows vocab (the logits are read and written twice).
struct CrossEntropy {
  float* logits = nullptr;
  const int32_t* targets = nullptr;
  float* nll = nullptr;
  float* max = nullptr;   ///< written by max, read by sum and grad
  float* sums = nullptr;  ///< written by sum, read by grad
  Tokens tokens;
  int64_t vocab = 0;
  Part vocab_part;
  int64_t words = 0;  ///< of the whole vocabulary; columns beyond take no part, and their dlogits are +0. 0: all are words
  int64_t loss_tokens = 1;
  float loss_scale = 1;  ///< dlogits are multiplied by this; with a power of two exactly so
};

}  // namespace shardlab::kernels
