// Memory and wire bytes of one step from the configuration alone: no plan is built, nothing is simulated.
//
// This is the independent witness of the plan. `memory_peak` and `total_wire_bytes` fold what lowering wrote; the closed forms are
// the formulas of the literature with the padding, the rounding and the messages under way put back in, so that the two can be held
// equal to the byte (tests/laws). About a tenth of a microsecond a stage and one allocation: they serve grids of millions of
// points.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>
#include <vector>

#include "plan/case.h"
#include "plan/memory.h"

namespace shardlab::simulator {

/// What one layer keeps of one micro-batch from forward to backward on one rank: bytes by kind, each rounded up to the alignment.
///
/// Formula: with b sequences of s tokens, t = tp, a heads and k kv heads of width d, f = ffn, e bytes an element:
///   input, norms, residual   e b s h each (two norms): what the residual stream holds is whole on every rank
///   statistics               e b s 2 (mean and 1/std), or e b s 1 (rms), for each norm
///   qkv                      e b s (a + 2k) d / t
///   attention, log_sum_exp   e b s a d / t and e b s a / t: the s x s scores are never kept
///   up, activated            e b s f / t (twice that for gate and up) and e b s f / t
///   In elements, for GPT-2 with a d = h, f = 4 h and t = 1: 16 b s h, and b s (a + 4) for the statistics.
/// Units: bytes.
/// Source: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2022), section 4: s b h (34 + 5 a s
/// / h)
///   in 16 bit with the scores and dropout masks that they keep and this step does not (flash attention; masks are drawn again).
/// Valid when: recompute is none. Under full recompute `input` alone is kept, and the rest lives during one layer's backward; under
///   selective recompute what the named sub-layers make (attn.core: `attention` and `log_sum_exp`) is not kept.
struct LayerActivations {
  int64_t input = 0;
  int64_t norms = 0;
  int64_t statistics = 0;
  int64_t qkv = 0;
  int64_t attention = 0;
  int64_t log_sum_exp = 0;
  int64_t residual = 0;
  int64_t up = 0;
  int64_t activated = 0;

  /// All but the input.
  int64_t inner() const { return norms + statistics + qkv + attention + log_sum_exp + residual + up + activated; }
};

/// Where in the step the peak is. No other moment can be it: each is below one of these, as the comments in closed_form.cpp derive.
enum class Moment : uint8_t {
  kForwardLayer,        ///< the end of a layer's forward
  kForwardHead,         ///< the loss
  kBackwardHead,        ///< the gradient of the head's input
  kBackwardDown,        ///< the gradient of the feed-forward's activation
  kBackwardActivation,  ///< the gradient of the feed-forward's hidden layer
  kBackwardUp,          ///< the gradient of the feed-forward's input
  kBackwardAttention,   ///< the gradient of q, k and v
  kBetween,             ///< between two units: parameters gathered ahead, slices to be added (ZeRO-2 and 3)
};
inline constexpr size_t kPeakMoments = 8;
std::string_view name_of(Moment moment);

/// What a rank holds outside its device, in one space.
struct SpaceForm {
  int64_t peak = 0;       ///< largest sum of live bytes
  MemoryByClass at_peak;  ///< what is live when it is first reached
};

/// One pipeline stage: what each of its ranks holds, in device bytes, each buffer rounded up to the alignment.
struct StageForm {
  int64_t layers = 0;
  int64_t parameters = 0;
  int64_t masters = 0;  ///< fp32 copies of 16-bit parameters; what a period of diloco began with
  int64_t moments = 0;
  int64_t gradients = 0;                  ///< for the whole step: buckets padded, copies of canonical accumulation included
  int64_t metrics = 0;                    ///< losses, norms and their sums
  int64_t workspace = 0;                  ///< of kernels
  int64_t buffers = 0;                    ///< compressed gradients on their way
  int64_t other = 0;                      ///< factors of gradients; what compression owes them
  int64_t persistent = 0;                 ///< what lives across steps
  int64_t in_flight = 0;                  ///< most micro-batches between their forward and their backward
  int64_t bytes_in_flight = 0;            ///< activations that each of them keeps, messages under way not counted
  int64_t peak = 0;                       ///< largest sum of live bytes
  Moment moment = Moment::kForwardLayer;  ///< when it is first reached
  MemoryByClass at_peak;                  ///< what is live then
  SpaceForm host, nvme;                   ///< where state is offloaded
};

/// The communicators of a step.
enum class Channel : uint8_t {
  kTp,
  kDpGradients,
  kDpParameters,
  kDpReplicas,        ///< between sets of shards
  kDpSecondary,       ///< within nodes: backward's gathers from a secondary shard (ZeRO++) ...
  kDpGradientsNode,   ///< ... the first hop of quantised gradients ...
  kDpGradientsCross,  ///< ... and the second, between nodes
  kForwardEven,       ///< pipeline edges from an even stage forward ...
  kForwardOdd,
  kBackwardEven,  ///< ... and back to one
  kBackwardOdd,
  kEnds,
  kMetricsDp,
  kMetricsReplica,
  kMetricsTp,
  kMetricsPp,
  kAmax,  ///< largest sizes of a step, for delayed scales
};
inline constexpr size_t kChannels = 17;
/// As plans name the communicator: "tp", "dp.grads", "pp.fwd.even".
std::string_view name_of(Channel channel);

struct ClosedForm {
  LayerActivations layer;
  std::vector<StageForm> stages;
  /// Bytes sent in one step (under diloco in one period), summed over all ranks.
  std::array<int64_t, kChannels> wire{};

  int64_t peak() const;        ///< of the stage with the highest
  int64_t wire_total() const;  ///< over all channels
};

/// Micro-batches in flight at once on a stage.
/// Formula: none 1; afab m; 1f1b min(m, p - stage).
/// Source: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters" (2021), section 2.2.
int64_t in_flight(Schedule schedule, int64_t stages, int64_t stage, int64_t micro_batches);

/// Memory and wire bytes of one training step.
///
/// Formula, memory (Psi elements of a stage's parameters on one rank, N = dp, e = 4 bytes):
///   parameters e Psi, gradients e Psi (a tied table has two), moments 2 e Psi under AdamW and 2 e Psi / N under ZeRO-1;
///   activations: micro-batches in flight times what each keeps; then the greatest of what the moments of one forward and one
///   backward add, at the first slots after each corner of the schedule (the first slot, the ends of warm-up and of the steady
///   phase).
/// Formula, wire, over the g ranks of a group, whatever the algorithm and however uneven the parts: an all-reduce of n bytes sends
///   2 (g - 1) n, a reduce-scatter or an all-gather (g - 1) n.
///   tp: 4 all-reduces of e b s h a layer and micro-batch (5 with recompute), 1 at each end of the model, 3 e b s for the loss
///   dp: e Psi all-reduced (under diloco 4 Psi a period); ZeRO-1: e Psi reduce-scattered and e Psi all-gathered
///   pp: e b s h each way per boundary and micro-batch; a tied table e V h / t all-reduced between the ends (1/N of it under
///   ZeRO-1)
/// Units: bytes.
/// Source: Rajbhandari et al., "ZeRO" (2020), section 7; Shoeybi et al., "Megatron-LM" (2019), section 3; Korthikanti et al.
/// (2022);
///   Narayanan et al. (2021).
/// Valid when: `check(config)` accepts the case.
/// Recompute by budget must have been decided (plan/treatment.h).
ClosedForm closed_form(const Case& config);

/// Memory of one stage alone: the same figures.
StageForm closed_form_of_stage(const Case& config, int64_t stage);

}  // namespace shardlab::simulator
