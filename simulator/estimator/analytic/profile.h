// A framework's way to run a step, as data: the tensors it keeps and their precision, the kernels it fuses, what it overlaps,
// and the memory of its allocator, driver context and communicators. One YAML file a framework (simulator/profiles), each entry
// with its source.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "plan/base/result.h"
#include "simulator/estimator/analytic/abilities.h"

namespace shardlab::simulator::analytic {

/// The modules of a layer that backward computes again.
struct Recompute {
  enum Module : uint16_t {
    kNorms = 1,          ///< outputs of the norms
    kAttentionCore = 2,  ///< scores, softmax, context: all that flash attention never keeps
    kQkv = 4,            ///< the q, k, v projection and rotation
    kAttentionOut = 8,   ///< the attention's output projection
    kActivation = 16,    ///< the feed-forward's non-linearity
    kUp = 32,            ///< the feed-forward's first projection
    kExperts = 64,       ///< of a mixture: routing, exchange, experts
    kAlternate = 128,    ///< every second matmul (torchtitan's operator-wise selective checkpointing)
    kLayer = 256,        ///< all: the layer's input alone is kept
    kSelective = 512     ///< what the profile means by "selective"; replaced by its modules
  };
  uint16_t modules = 0;

  bool full() const { return modules & kLayer; }
  bool has(Module m) const { return modules & (m | kLayer); }
  friend bool operator==(Recompute, Recompute) = default;
};
/// "none", "selective", "full", or a list of modules: "norms+activation". Names: norms attention-core qkv attention-out activation
/// up experts alternate.
std::string name_of(Recompute v);
bool read(std::string_view word, Recompute* v);

/// Numbers of one framework. A key of the file is "section: {member: value}". Bytes are per element of the named tensor. "Passes"
/// are bytes that kernels move per element, read and written together. Where 16 bit is said, fp32 runs take twice.
struct FrameworkProfile {
  std::string name;
  std::string describes;  ///< framework and version, one line

  // state: bytes a parameter, in mixed precision
  double state_parameter = 2;               ///< the copy that compute reads and all ranks hold (0: the master is gathered and cast)
  double state_gradient = 4;                ///< as accumulated
  double state_gradient_fresh = 0;          ///< as backward makes them, beside the accumulated ones, of one layer
  bool state_gradient_fresh_stage = false;  ///< they stay until the micro-batch's backward is over: of the whole stage
  double state_gradient_ends = 0;           ///< gradients of embedding and head as backward makes them, if not as a layer's
  double state_master = 4;                  ///< 0 where state_parameter is the master
  double state_moments = 8;
  double state_gradient_wire = 4;        ///< as reduced
  double state_weight_wire = 2;          ///< as gathered
  double state_fp8_weight = 0;           ///< extra bytes a matrix parameter of fp8 copies (with the transposed one)
  bool state_fp8_alone = false;          ///< under fp8, ranks hold narrow weights alone, and the master is what there is in 16 bit
  bool state_fp8_gather = false;         ///< fp8 weights are gathered as 1 byte
  bool state_fp8_exchange = false;       ///< under fp8, tensor-parallel gathers carry 1 byte an element
  bool state_fp8_shared = true;          ///< projections of one input share its quantised copy
  double state_context_gradient = 2;     ///< gradients of k and v on the wire of context parallelism that gathers
  bool state_gradient_with_step = true;  ///< gradients are allocated for the whole step, not made by backward and given back

  // saved: bytes an element that backward needs, and which are shared with a neighbour (0)
  double saved_input = 2;       ///< residual stream into the first norm
  double saved_norm = 2;        ///< outputs of each of the two norms
  double saved_statistics = 8;  ///< a token and norm
  double saved_qkv = 2;
  double saved_rotated = 0;      ///< of q and k after rotation, kept beside qkv
  double saved_repeated_kv = 0;  ///< of k and v repeated to all heads
  double saved_scores = 0;       ///< a score: unfused softmax, mask and dropout
  double saved_attention = 2;
  double saved_log_sum_exp = 4;  ///< a token and head
  double saved_residual = 2;     ///< residual stream into the second norm
  double saved_up = 2;
  double saved_gate = 0;  ///< an ffn element: output of silu kept beside gate and up
  double saved_activated = 2;
  bool saved_fp8_inputs = false;     ///< under fp8 and fp4, linears keep what they read as one byte an element
  double saved_mask = 0;             ///< of each of the two dropouts of the residual stream
  double saved_norm_fp32 = 0;        ///< of each norm: an fp32 copy that an unfused norm keeps
  double saved_logits = 4;           ///< a logit, at the peak of the loss's backward, all copies
  double saved_logits_kept = 4;      ///< a logit from the head's forward to its backward
  double saved_logits_forward = 0;   ///< a logit, at the peak of its forward; 0: as saved_logits
  double saved_logits_gradient = 2;  ///< a logit, while the head's matmuls run backward
  double saved_logits_output = 0;    ///< a logit that stays until the next forward is over: what a trainer holds for its metrics
  double saved_logits_parallel = 0;  ///< a logit, as saved_logits, where tp cuts the vocabulary; 0: as saved_logits
  double saved_head_input = 2;
  double saved_head_chunks = 1;  ///< pieces of a micro-batch whose logits are made one after the other
  /// The result of the feed-forward, where every second matmul is computed again. 0: a compiler sees that nobody reads it.
  double saved_result = 2;
  /// Inputs of column-parallel matmuls, whole on each rank under sequence parallelism; 0: gathered again.
  double saved_gathered = 0;
  double saved_permuted = 2;       ///< tokens after the exchange between experts, per routed copy
  double saved_expert_output = 2;  ///< per routed copy
  double saved_router = 8;         ///< a token and expert: logits and probabilities

  // transient: bytes while one layer runs, beyond the kept ones
  double transient_backward = 4;  ///< an element of the residual stream: gradients under way
  double transient_ffn = 4;       ///< an element of the feed-forward's inner width: its gradients
  double transient_gathered = 2;  ///< an element of the residual stream gathered over tp under sequence parallelism

  // passes: bytes moved an element by kernels that compute nothing
  double passes_norm = 4, passes_norm_backward = 8;
  bool passes_norm_persistent = false;  ///< the backward kernel of a norm keeps rows on the multiprocessor, as the forward one does
  double passes_residual = 6, passes_residual_backward = 4;      ///< bias, dropout and addition, each of the two
  double passes_rotation = 4, passes_rotation_backward = 4;      ///< an element of q and k
  double passes_layout = 0, passes_layout_backward = 0;          ///< an element of q, k, v: transposes and copies
  double passes_activation = 4, passes_activation_backward = 6;  ///< an element read by the non-linearity
  double passes_bias = 2;  ///< an output element of a matmul with bias: the sum of its gradient over tokens
  double passes_merge = 0, passes_merge_backward = 0;  ///< an output element of attention and block of a gathered context: 0 for
                                                       ///< one call over all that was gathered
  double passes_exchanged = 0;    ///< an element exchanged under sequence parallelism: copies that turn its pieces into rows
  double passes_gathered = 0;     ///< a gathered parameter, a pass: copies out of the buffer of the collective
  double passes_bucketed = 0;     ///< a gradient that is reduced otherwise: copies into a flat bucket, scaling, copies out of it
  double passes_reduced = 0;      ///< a parameter whose gradient is reduced under zero 3: casts and copies into the buffer
  double passes_summed = 0;       ///< an input element of each projection after the first that reads it: their gradients are added
  double passes_summed_sent = 0;  ///< an input element once more, where the sum is exchanged over tp
  double passes_loss = 12;        ///< a logit, forward and backward
  double passes_loss_parallel = 0;  ///< the same, in kernels one by one, where tp cuts the vocabulary or passes_loss is 0
  double passes_table = 0;          ///< an element of the embedding and micro-batch: its gradient is dense; it is cleared, and
                                    ///< added to the accumulated one
  double passes_cast = 0;           ///< a matrix parameter and micro-batch: weights cast under autocast
  // Under fp8:
  double passes_quantise = 4;                              ///< an input of a matmul, whenever forward runs: amax and cast
  double passes_quantise_columns = 0;                      ///< the same input, as the weight gradient reads it
  double passes_quantise_gradient = 4;                     ///< a result's gradient, for both matmuls of backward
  double passes_quantise_weight = 0;                       ///< a matrix parameter and micro-batch: copies of what was gathered
  double passes_quantise_gathered = 0;                     ///< and where that was in 16 bit: amax and casts
  double passes_rescale = 0;                               ///< a result of a backward matmul: scales that its kernel does not apply
  double passes_permute = 8, passes_permute_backward = 8;  ///< an element of each routed copy

  // launches: kernels that the host starts, a layer
  double launch_norm = 1, launch_norm_backward = 2;
  double launch_residual = 1, launch_residual_backward = 1;
  double launch_rotation = 2, launch_rotation_backward = 2;
  double launch_layout = 0, launch_layout_backward = 0;
  double launch_activation = 1, launch_activation_backward = 1;
  double launch_core = 1, launch_core_backward = 2;  ///< of attention between the projections
  double launch_matmul_extra = 0;                    ///< beside each matmul: bias, transposes
  double launch_experts = 20;                        ///< of routing, permutation and grouped matmuls
  double host_forward_s = 6e-6;                      ///< host time of one launch in forward: Python, dispatch, autograd recording
  double host_backward_s = 4e-6;                     ///< in backward
  double host_layer_s = 0;                           ///< a layer and phase beyond its launches: hooks, contexts, Python
  double host_collective_s = 20e-6;                  ///< host time of one collective
  double host_exchange_s =
      0;                   ///< of one exchange of tensor parallelism, with the function of autograd around it; 0: as any collective
  double host_step_s = 0;  ///< a step: data loading, logging, scheduler, synchronisations
  double host_micro_batch_s = 0;  ///< a micro-batch
  bool host_sync = false;         ///< the host waits for the device between forward and backward
  bool host_sync_sends = false;   ///< it does so where it sends to another stage
  bool host_serial = false;       ///< kernels are started one when the other is done, as under a profiler
  int64_t host_graphs = 0;        ///< CUDA graphs replay what the host would start: 1 attention and dense layers, 2 the whole step
  double host_send_s = 0;  ///< host time of a tensor that comes from another stage or goes there: what is said about it first

  // attention
  bool attention_fused = true;  ///< flash attention; else matmul, softmax, matmul
  /// Limits of the one kernel for scale, mask and softmax of unfused attention: its longest row (0: any), and the number by which
  /// heads times sequences on a rank must be divisible. Beyond these limits each step is a kernel of its own, in fp32.
  int64_t attention_softmax_keys = 0, attention_softmax_multiple = 1;
  bool attention_causal_half = true;  ///< the fused kernel skips what the mask hides
  bool attention_flash2 = false;      ///< fused by FlashAttention-2, which newer devices do not run at their best
  double attention_rate = 1;          ///< of that kernel's rate, where an older one is used
  bool attention_repeats_kv = false;  ///< k and v are repeated to all heads in memory

  // overlap
  bool overlap_gradients = false;       ///< buckets are reduced while backward runs
  bool overlap_zero = true;             ///< so they are under zero 1 and 2 too
  bool overlap_zero_scatters = true;    ///< zero 1 reduces by reduce-scatter; false: by all-reduce, and each rank takes its part
  bool overlap_weights = false;         ///< zero 1: updated weights are gathered while the next forward runs
  bool overlap_pipeline = false;        ///< sends run beside compute
  bool overlap_scatter_gather = false;  ///< of equal tensors on tensor-parallel ranks, each sends its part to the next stage
  double overlap_bucket_bytes = 40e6;   ///< of gradients reduced together, each tensor in one bucket
  bool overlap_tensor = false;          ///< tensor-parallel all-reduce of backward runs beside the weight gradient
  double overlap_tensor_hidden = 0.5;   ///< the share that asynchronous tensor parallelism hides of what it could hide
  double overlap_gather_hidden = 0.5;   ///< the same of gathers, which a framework may fail to fuse
  bool overlap_regathers = true;        ///< sequence parallelism: backward gathers the inputs of matmuls again, which were kept cut
  bool overlap_context = true;          ///< what context parallelism gathers and sends around runs beside its blocks of attention
  bool overlap_by_tensor = false;       ///< zero 3 gathers tensor by tensor, none of a matrix before it is needed
  double overlap_unit_layers = 1;       ///< layers of one FSDP unit
  int64_t overlap_prefetch = 1;         ///< units gathered ahead
  bool overlap_keeps_gathered = true;   ///< zero 3 in a pipeline: gathered and reduced once a step, whole in between
  bool overlap_offload_residual = false;  ///< of activations the residual stream alone is offloaded
  bool overlap_offload_waits = false;  ///< offloaded activations: only the micro-batch that runs has its two layers on the device
  bool overlap_reshard = true;         ///< zero 3: weights are given back after forward
  bool overlap_gather_copies = false;  ///< zero 3: a unit is gathered into a buffer of its own, then copied to what compute reads
  bool overlap_ends_last = false;      ///< zero 3: embedding and head are one unit, reduced when the whole backward is over
  double overlap_wgrad_fused = 1;  ///< 1: the weight gradient is added into the accumulated one by the matmul; 0: a pass of its own
  /// Where weight gradients are not fused: whether they are added up whole. False: backward sends gradients off whole and adds the
  /// slices that come back.
  bool overlap_wgrad_added = true;

  // update: bytes moved a parameter on the rank that updates it
  double update_passes = 30;             ///< Adam: gradient, master, moments read; master, moments, weight written
  double update_norm_passes = 8;         ///< norm of the gradient, clipping, unscaling, on the same parameters
  double update_zero_passes = 4;         ///< zeroing of the gradients held
  double update_gathered = 0;            ///< bytes a parameter of buffers into which zero 1 gathers updated weights
  double update_launches = 60;           ///< kernels a step
  double update_launches_per_layer = 0;  ///< kernels a layer, where updates go tensor by tensor
  double update_gather_passes = 0;       ///< zero 1: bytes moved a parameter, into and out of buffers of gathered weights
  double update_gather_host_s = 0;       ///< zero 1: host time of one tensor's part of one rank
  double update_tensors_per_layer = 0;   ///< of parameters, as the two above count

  // allocator and what no allocator sees
  double memory_context = 500e6;
  double memory_nccl_channel = 4e6;  ///< one communicator and peer connection: buffers of a channel set
  double memory_workspace = 32e6;    ///< of cuBLAS and such, within the allocator
  double memory_buckets = 0;         ///< buckets that stand beside the gradients
  double memory_reducer = 0;         ///< bytes a parameter of buckets that stand beside the gradients, under zero 0
  /// Bytes an element of the residual stream, whole: buffers of gathered rows that stay, under sequence parallelism.
  double memory_rows = 0;
  bool memory_pipeline_buffers = false;  ///< what a stage receives and sends stays for each micro-batch of the step, gradients too
  double memory_dummy_gradients = 0;   ///< bytes an element of one gradient that nobody reads, for each shape of a layer's matrices
  double memory_workspace_hopper = 0;  ///< beyond memory_workspace, on Hopper and later
  /// Inputs of exchanges, in tensors of a micro-batch whole rows by the width of the model, that wait for the stream that sends them: without
  /// a pipeline, in one, and at most. PyTorch's allocator has them back before it fails.
  double memory_held = 0, memory_held_pipeline = 0, memory_held_most = 0;
  double memory_fragmentation = 0.04;    ///< reserved beyond live, of activations and transients, where no replay is asked for
  double memory_fragmentation_base = 0;  ///< bytes
  bool memory_caching = true;            ///< false: an arena, reserved equals live
  bool memory_expandable = false;        ///< the caching allocator has expandable segments

  Recompute selective;         ///< what this framework calls selective
  bool remakes_unread = true;  ///< recompute also runs products whose results only feed tensors that were kept
  /// Stages of a pipeline are balanced by the matmuls of their blocks, the head one of them: a stage takes blocks until its share
  /// is exceeded, and where the head exceeds it the loss is the next stage's. false: as many layers each as can be.
  bool balanced_stages = false;
  bool split_projections = false;  ///< q, k, v and gate, up are products of their own
  bool vocab_parallel = true;      ///< embedding and head are cut by tp
  double vocab_multiple = 128;     ///< the vocabulary is padded to a multiple of this times tp
  bool dropout = false;
  bool fp32_head = false;          ///< the matmul of the head runs in fp32
  bool fp32_tensor_cores = false;  ///< matmuls in fp32 run as tf32
  bool own_collectives = false;    ///< collectives are shardlab's, step by step (plan/collective_steps.h); else NCCL's

  Abilities can;

  friend bool operator==(const FrameworkProfile&, const FrameworkProfile&) = default;
};

/// Reads a profile. `where` names the file in messages. Unknown and duplicate keys, values of the wrong kind,
/// negative and non-finite numbers are refused. `based_on: NAME` starts from a shipped profile. `can` lists what the
/// framework has (abilities.h).
Result<FrameworkProfile> read_profile(std::string_view yaml, const std::string& where);

/// Names of the shipped profiles, sorted: frameworks ("megatron") and versions of them ("megatron-2022").
std::vector<std::string_view> profile_names();
Result<FrameworkProfile> profile_named(std::string_view name);

}  // namespace shardlab::simulator::analytic
