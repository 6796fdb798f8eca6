// Mixtures of experts: which experts a token goes to, its rows by expert, products with the weights of experts, and their weighted sum.
// Source: Shazeer et al. 2017; Fedus et al. 2021 (the loss for even use, here by sequence as in DeepSeek-V3, section 2.1.2);
// Zoph et al. 2022 (z-loss). Orders of sums: docs/canonical-order.md.
//
// Rows of b s tokens that go to k experts each are packed by expert and then by token; so the row of a token and an expert follows from
// the choice alone, and is found by counting. A choice below 0 is ~expert of a row that was dropped: the expert had no room (Lepikhin
// et al. 2020). There is no such row.
#pragma once

#include <cstdint>
#include <span>

#include "kernels/kernels.h"
#include "plan/base/token_order.h"

namespace shardlab::kernels {

/// logits[sequences,tokens,experts] and the choice of top_k experts a token, in ascending order.
struct RouteShape {
  int64_t sequences = 1, tokens = 0, experts = 1, top_k = 1;
  bool sigmoid = false, normalise = false;
  float factor = 1, balance = 0, z_loss = 0;
  int64_t groups = 1, groups_chosen = 1;  ///< experts are chosen within the best of so many groups
  int64_t step_tokens = 1;                ///< tokens of the step, by which the two losses are divided
};

/// The tokens of all ranks that have parts of each sequence: what they chose, [sequences,tokens,top_k] in `order`, and where the rank's own
/// tokens begin.
struct ChosenByAll {
  const int32_t* choice = nullptr;
  int64_t tokens = 0, first = 0;
  TokenOrder order;
};

/// F. logits -> weights[sequences,tokens,top_k], choice of that shape, counts[ranks,leaves,experts / ranks]. leaves: 1, or a multiple of
/// sequences. Flops: (5 + top_k) a logit. `capacity`: an expert takes the rows of so many tokens of each sequence, of the first that chose
/// it; 0: of all. Without weights and counts experts are chosen, and that is all; with `chosen` they have been.
struct RouteForward {
  RouteShape shape;
  const float* logits = nullptr;
  const float* bias = nullptr;      ///< [experts], added to scores for the choice; null: none
  const int32_t* places = nullptr;  ///< [experts]: the place of each, by which choice and counts go; null: the number of the expert
  float* weights = nullptr;
  int32_t* choice = nullptr;
  int32_t* counts = nullptr;
  int64_t ranks = 1, leaves = 1;
  int64_t capacity = 0;
  ChosenByAll chosen;                 ///< null: the rank has whole sequences
  const int32_t* by_place = nullptr;  ///< of `chosen`, as ExpertLoad
  void* scratch = nullptr;            ///< route_scratch_bytes(...) bytes, aligned to 64
};
/// I. dweights, logits, choice -> dlogits, the gradients of the two losses included. Where the tokens are a part of each sequence,
/// `load`[sequences,experts] is of the whole, which has `whole_tokens`.
struct RouteInput {
  RouteShape shape;
  const float* dweights = nullptr;
  const float* logits = nullptr;
  const int32_t* choice = nullptr;
  const int32_t* by_place = nullptr;  ///< as ExpertLoad
  const float* load = nullptr;
  int64_t whole_tokens = 0;
  float* dlogits = nullptr;
  void* scratch = nullptr;  ///< as RouteForward
};

/// choice[sequences,tokens,top_k] -> load[sequences,experts]: tokens that chose each expert, dropped or not, whole numbers, exact in fp32 up to 2^24.
struct ExpertLoad {
  const int32_t* choice = nullptr;
  float* load = nullptr;
  int64_t sequences = 1, tokens = 0, top_k = 1, experts = 1;
  bool accumulate = false;            ///< load[experts] is of all sequences, and is added to
  const int32_t* by_place = nullptr;  ///< [experts]: the expert at each place, where choice has places; null: choice has experts
};

/// bias[experts] moves by `rate`: up where an expert's load is below the mean, down where it is above.
struct UpdateRouterBias {
  const float* load = nullptr;
  float* bias = nullptr;
  int64_t experts = 1;
  float rate = 0;
};

/// F: from[tokens,width] (x) -> to[tokens * top_k,width] (rows). I: from rows, to[tokens,width]: dx, the sum of a token's rows by expert.
struct Dispatch {
  const float* from = nullptr;
  float* to = nullptr;
  const int32_t* choice = nullptr;
  int64_t tokens = 0, top_k = 1, experts = 1, width = 0;
  bool back = false;
  void* scratch = nullptr;  ///< places_scratch_bytes(...) bytes, aligned to 64
};

/// F. rows[tokens * top_k,width], weights[tokens,top_k] -> y[tokens,width]: tree-free, by expert: ((w0 r0) + (w1 r1)) + ...
struct CombineForward {
  const float* rows = nullptr;
  const float* weights = nullptr;
  const int32_t* choice = nullptr;
  float* y = nullptr;
  int64_t tokens = 0, top_k = 1, experts = 1, width = 0;
  void* scratch = nullptr;  ///< as Dispatch
};
/// I. dy, rows, weights -> drows = weight * dy, dweights = lanes(dy * row).
struct CombineInput {
  const float* dy = nullptr;
  const float* rows = nullptr;
  const float* weights = nullptr;
  const int32_t* choice = nullptr;
  float* drows = nullptr;
  float* dweights = nullptr;
  int64_t tokens = 0, top_k = 1, experts = 1, width = 0;
  void* scratch = nullptr;  ///< as Dispatch
};

/// F. y = x * 1 / (1 + e^-gate): x[tokens,width], gate[tokens]. Source: Qwen2MoeSparseMoeBlock of transformers.
struct GateForward {
  const float* x = nullptr;
  const float* gate = nullptr;
  float* y = nullptr;
  int64_t tokens = 0, width = 0;
};
/// I. dy, x, gate -> dx = p * dy, dgate = lanes(dy * x) * (p * (1 - p)), p the sigmoid.
struct GateInput {
  const float* dy = nullptr;
  const float* x = nullptr;
  const float* gate = nullptr;
  float* dx = nullptr;
  float* dgate = nullptr;
  int64_t tokens = 0, width = 0;
};

/// How many rows of each expert there are, and where: those of `sources` ranks one after the other, each by expert, each expert's by the
/// part of the tokens. counts[leaves,experts], leaves / sources of each source.
struct RowCounts {
  const int32_t* counts = nullptr;
  int64_t leaves = 1, experts = 1;
  int sources = 1;
  int64_t capacity = 0;  ///< rows that the buffers hold; more is a bug of whoever counted
};

/// F: y = x w^T by rows: x[rows,in], w[experts,out,in] -> y[rows,out]. I: dx = dy w. The order is that of Linear.
struct GroupedLinear {
  RowCounts rows;
  const float* x = nullptr;  ///< dy in I
  const float* w = nullptr;
  float* y = nullptr;  ///< dx in I
  int64_t in = 0, out = 0;
  Part part;  ///< which part of the logical contraction extent `in`, or `out` in I, is (canonical mode)
  bool back = false;
  bool canonical = false;
  void* scratch = nullptr;  ///< grouped_scratch_bytes(...) bytes, aligned to 64
};
/// W: dw[experts,out,in]: of each expert the sum over its rows, whose leaves in canonical mode are the parts of tokens by which they are
/// counted. `accumulate` adds to what dw holds; canonical mode refuses it, as LinearWeight does.
struct GroupedLinearWeight {
  RowCounts rows;
  const float* x = nullptr;
  const float* dy = nullptr;
  float* dw = nullptr;
  int64_t in = 0, out = 0;
  bool accumulate = false;
  bool canonical = false;
  void* scratch = nullptr;  ///< as GroupedLinear
};

/// The activation of the rows that are counted: a[n] of u, or du of da and u (kernels/activation.h).
struct GroupedActivation {
  RowCounts rows;
  const float* u = nullptr;
  const float* da = nullptr;  ///< null: forward
  float* to = nullptr;
  int64_t width = 0;  ///< of a
  bool swiglu = false;
};

void route_forward(const Kernels& k, const RouteForward& a);
void route_input(const Kernels& k, const RouteInput& a);
void expert_load(const ExpertLoad& a);
void update_router_bias(const UpdateRouterBias& a);

/// counts[n] -> fitted[n]: in order, cut off where `room` rows end. True where some are cut off. Bytes: 8 n.
bool fit_rows(std::span<const int32_t> counts, int64_t room, std::span<int32_t> fitted);
void dispatch(const Dispatch& a);
void combine_forward(const CombineForward& a);
void combine_input(const CombineInput& a);
void gate_forward(const Kernels& k, const GateForward& a);
void gate_input(const Kernels& k, const GateInput& a);
void grouped_linear(const Kernels& k, const GroupedLinear& a);
void grouped_linear_weight(const Kernels& k, const GroupedLinearWeight& a);
void grouped_activation(const Kernels& k, const GroupedActivation& a);

int64_t route_scratch_bytes(int64_t experts, bool capacity = false);
int64_t places_scratch_bytes(int64_t tokens, int64_t top_k, int64_t experts);
int64_t grouped_scratch_bytes(const GroupedLinear& a);
int64_t grouped_scratch_bytes(const GroupedLinearWeight& a);

}  // namespace shardlab::kernels
