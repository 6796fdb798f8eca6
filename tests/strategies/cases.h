// Tiny cases for tests of lowering.
#pragma once

#include "plan/case.h"
#include "tests/namespaces.h"

namespace shardlab::testing {

/// Two layers of width 32, 16 tokens, vocabulary 64; one rank, one micro-batch of one sequence, AdamW.
inline Case tiny_case(Family family = Family::kGpt) {
  Case c;
  c.name = "tiny";
  Model& m = c.model;
  m.name = "tiny";
  m.family = family;
  m.layers = 2;
  m.hidden = 32;
  m.heads = 4;
  m.kv_heads = family == Family::kLlama ? 2 : 4;
  m.head_dim = 8;
  m.ffn = 64;
  m.vocab = 64;
  m.max_positions = family == Family::kGpt ? 16 : 0;
  c.train.seq_len = 16;
  return c;
}

inline Case with_pipeline(Case c, int stages, Schedule schedule, int micro_batches) {
  c.layout.pp = stages;
  c.layout.schedule = schedule;
  c.train.grad_accumulation = micro_batches;
  return c;
}

}  // namespace shardlab::testing
