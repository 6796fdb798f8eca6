// Calibration plans of what techniques add to a dense step: experts, parts of sequences, latent attention, codes of gradients, factors of 8 bits.
// For a processor; `calibration_plans` takes them in.
#pragma once

#include "plan/plan.h"
#include "plan/type.h"

namespace shardlab::simulator {

/// A mixture's ops on `ranks` ranks that are independent of one another: routers, rows to and from experts, products by expert, gates, loads. Routes are of random
/// logits. Rows and weights are of `dtype`; routers, and gradients of weights, are of fp32.
Plan experts_plan(int ranks, DType dtype);

/// Ops that rearrange or norm heads, [tokens, width of a row]: parts of qkv (context parallelism), rows cut in parts (Ulysses), latent heads, norms of heads.
Plan heads_plan(int ranks, DType dtype);

/// Kernels that code gradients and weights in fewer bits or elements, and take codes apart, by bytes.
Plan codes_plan(int ranks);

/// Kernels that round bf16 to 8 bits, by bytes.
Plan float8_plan(int ranks);

}  // namespace shardlab::simulator
