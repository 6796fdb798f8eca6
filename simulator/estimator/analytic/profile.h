// A framework's way to run a step, as data: the tensors it keeps and their precision, the kernels it fuses, what it overlaps,
// and the memory of its allocator, driver context and communicators. One YAML file a framework (simulator/profiles), each entry
// with its source.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "plan/base/result.h"
#include "plan/case.h"
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

/// Numbers of one framework. A section of the file is a struct, a key its member: "saved: {logits: 4}" is `saved.logits`. Bytes are
/// per element of the named tensor. "Passes" are bytes that kernels move per element, read and written together. Where 16 bit is
/// said, fp32 runs take twice.
struct FrameworkProfile {
  std::string name;
  std::string describes;  ///< framework and version, one line

  /// Bytes a parameter of the state of training, in mixed precision.
  struct State {
    double parameter = 2;               ///< the copy that compute reads and all ranks hold (0: the master is gathered and cast)
    double gradient = 4;                ///< as accumulated
    double gradient_fresh = 0;          ///< as backward makes them, beside the accumulated ones, of one layer
    bool gradient_fresh_stage = false;  ///< they stay until the micro-batch's backward is over: of the whole stage
    double gradient_ends = 0;           ///< gradients of embedding and head as backward makes them, if not as a layer's
    double master = 4;                  ///< 0 where parameter is the master
    double moments = 8;
    double gradient_wire = 4;        ///< as reduced
    double weight_wire = 2;          ///< as gathered
    double fp8_weight = 0;           ///< extra bytes a matrix parameter of fp8 copies (with the transposed one)
    bool fp8_alone = false;          ///< under fp8, ranks hold narrow weights alone, and the master is what there is in 16 bit
    bool fp8_gather = false;         ///< fp8 weights are gathered as 1 byte
    bool fp8_exchange = false;       ///< under fp8, tensor-parallel gathers carry 1 byte an element
    bool fp8_shared = true;          ///< projections of one input share its quantised copy
    double context_gradient = 2;     ///< gradients of k and v on the wire of context parallelism that gathers
    bool gradient_with_step = true;  ///< gradients are allocated for the whole step, not made by backward and given back

    friend bool operator==(const State&, const State&) = default;
  };

  /// Bytes an element of what backward needs. 0: the tensor is shared with a neighbour.
  struct Saved {
    double input = 2;       ///< residual stream into the first norm
    double norm = 2;        ///< outputs of each of the two norms
    double statistics = 8;  ///< a token and norm
    double qkv = 2;
    double rotated = 0;      ///< of q and k after rotation, kept beside qkv
    double values = 0;       ///< of v alone, a tensor of its own, where `rotated` are beside it: then qkv is given back
    double repeated_kv = 0;  ///< of k and v repeated to all heads
    double scores = 0;       ///< a score: unfused softmax, mask and dropout
    double attention = 2;
    double log_sum_exp = 4;  ///< a token and head
    double residual = 2;     ///< residual stream into the second norm
    double up = 2;
    double gate = 0;  ///< an ffn element: output of silu kept beside gate and up
    double activated = 2;
    bool fp8_inputs = false;     ///< under fp8 and fp4, linears keep what they read as one byte an element
    double mask = 0;             ///< of each of the two dropouts of the residual stream
    double norm_fp32 = 0;        ///< of each norm: an fp32 copy that an unfused norm keeps
    double logits = 4;           ///< a logit, at the peak of the loss's backward, all copies
    double logits_kept = 4;      ///< a logit from the head's forward to its backward
    double logits_forward = 0;   ///< a logit, at the peak of its forward; 0: as logits
    double logits_gradient = 2;  ///< a logit, while the head's matmuls run backward
    double logits_output = 0;    ///< a logit that stays until the next forward is over: what a trainer holds for its metrics
    double logits_parallel = 0;  ///< a logit, as logits, where tp cuts the vocabulary; 0: as logits
    double head_input = 2;
    double head_chunks = 1;  ///< pieces of a micro-batch whose logits are made one after the other
    /// The result of the feed-forward, where every second matmul is computed again. 0: a compiler sees that nobody reads it.
    double result = 2;
    /// Inputs of column-parallel matmuls, whole on each rank under sequence parallelism; 0: gathered again.
    double gathered = 0;
    double permuted = 2;       ///< tokens after the exchange between experts, per routed copy
    double expert_output = 2;  ///< per routed copy
    double weighted = 0;       ///< an activation of an expert, before a kernel of its own multiplies it by the router's probability
    double router = 8;         ///< a token and expert: logits and probabilities

    friend bool operator==(const Saved&, const Saved&) = default;
  };

  /// Bytes while one layer runs, beyond the kept ones.
  struct Transient {
    double backward = 4;  ///< an element of the residual stream: gradients under way
    double ffn = 4;       ///< an element of the feed-forward's inner width: its gradients
    double gathered = 2;  ///< an element of the residual stream gathered over tp under sequence parallelism

    friend bool operator==(const Transient&, const Transient&) = default;
  };

  /// Bytes moved an element by kernels that compute nothing.
  struct Passes {
    double norm = 4, norm_backward = 8;
    bool norm_persistent = false;  ///< the backward kernel of a norm keeps rows on the multiprocessor, as the forward one does
    double residual = 6, residual_backward = 4;      ///< bias, dropout and addition, each of the two
    double rotation = 4, rotation_backward = 4;      ///< an element of q and k
    double layout = 0, layout_backward = 0;          ///< an element of q, k, v: transposes and copies
    double activation = 4, activation_backward = 6;  ///< an element read by the non-linearity
    double bias = 2;                       ///< an output element of a matmul with bias: the sum of its gradient over tokens
    double merge = 0, merge_backward = 0;  ///< an output element of attention and block of a gathered context: 0 for
                                           ///< one call over all that was gathered
    double exchanged = 0;      ///< an element exchanged under sequence parallelism: copies that turn its pieces into rows
    double gathered = 0;       ///< a gathered parameter, a pass: copies out of the buffer of the collective
    double bucketed = 0;       ///< a gradient that is reduced otherwise: copies into a flat bucket, scaling, copies out of it
    double reduced = 0;        ///< a parameter whose gradient is reduced under zero 3: casts and copies into the buffer
    double summed = 0;         ///< an input element of each projection after the first that reads it: their gradients are added
    double summed_sent = 0;    ///< an input element once more, where the sum is exchanged over tp
    double loss = 12;          ///< a logit, forward and backward
    double loss_parallel = 0;  ///< the same, in kernels one by one, where tp cuts the vocabulary or loss is 0
    double table = 0;          ///< an element of the embedding and micro-batch: its gradient is dense; it is cleared, and
                               ///< added to the accumulated one
    double cast = 0;           ///< a matrix parameter and micro-batch: weights cast under autocast
    // Under fp8:
    double quantise = 4;                       ///< an input of a matmul, whenever forward runs: amax and cast
    double quantise_columns = 0;               ///< the same input, as the weight gradient reads it
    double quantise_gradient = 4;              ///< a result's gradient, for both matmuls of backward
    double quantise_weight = 0;                ///< a matrix parameter and micro-batch: copies of what was gathered
    double quantise_gathered = 0;              ///< and where that was in 16 bit: amax and casts
    double rescale = 0;                        ///< a result of a backward matmul: scales that its kernel does not apply
    double permute = 8, permute_backward = 8;  ///< an element of each routed copy

    friend bool operator==(const Passes&, const Passes&) = default;
  };

  /// Kernels that the host starts, a layer.
  struct Launch {
    double norm = 1, norm_backward = 2;
    double residual = 1, residual_backward = 1;
    double rotation = 2, rotation_backward = 2;
    double layout = 0, layout_backward = 0;
    double activation = 1, activation_backward = 1;
    double core = 1, core_backward = 2;              ///< of attention between the projections
    double matmul_extra = 0;                         ///< beside each matmul: bias, transposes
    double experts = 20;                             ///< of routing, permutation and grouped matmuls
    double expert = 0, expert_backward = 0;          ///< for each expert of a rank, whose products are started one by one
    double expert_low = 0, expert_low_backward = 0;  ///< beside them under fp8 and fp4: the expert's rows are rounded

    friend bool operator==(const Launch&, const Launch&) = default;
  };

  /// Seconds of the host, and when it waits.
  struct Host {
    double forward_s = 6e-6;      ///< host time of one launch in forward: Python, dispatch, autograd recording
    double backward_s = 4e-6;     ///< in backward
    double layer_s = 0;           ///< a layer and phase beyond its launches: hooks, contexts, Python
    double collective_s = 20e-6;  ///< host time of one collective
    double exchange_s =
        0;              ///< of one exchange of tensor parallelism, with the function of autograd around it; 0: as any collective
    double step_s = 0;  ///< a step: data loading, logging, scheduler, synchronisations
    double micro_batch_s = 0;  ///< a micro-batch
    bool sync = false;         ///< the host waits for the device between forward and backward
    bool sync_sends = false;   ///< it does so where it sends to another stage
    bool sync_experts =
        false;  ///< it does so in each layer of experts, whose counts of tokens it reads; graphs of the step have none of it
    bool serial = false;  ///< kernels are started one when the other is done, as under a profiler
    int64_t graphs = 0;   ///< CUDA graphs replay what the host would start: 1 attention and dense layers, 2 the whole step
    double send_s = 0;    ///< host time of a tensor that comes from another stage or goes there: what is said about it first
    double view_s =
        0;  ///< of a view of one rank's part, where a collective takes a list of parts; each part is then copied by itself

    friend bool operator==(const Host&, const Host&) = default;
  };

  /// The attention's kernels.
  struct Attention {
    bool fused = true;  ///< flash attention; else matmul, softmax, matmul
    /// Limits of the one kernel for scale, mask and softmax of unfused attention: its longest row (0: any), and the number by which
    /// heads times sequences on a rank must be divisible. Beyond these limits each step is a kernel of its own, in fp32.
    int64_t softmax_keys = 0, softmax_multiple = 1;
    bool causal_half = true;  ///< the fused kernel skips what the mask hides
    bool flash2 = false;      ///< fused by FlashAttention-2, which newer devices do not run at their best
    double rate = 1;          ///< of that kernel's rate, where an older one is used
    bool repeats_kv = false;  ///< k and v are repeated to all heads in memory

    friend bool operator==(const Attention&, const Attention&) = default;
  };

  /// What runs beside what, and the units of collectives.
  struct Overlap {
    bool gradients = false;         ///< buckets are reduced while backward runs
    bool zero = true;               ///< so they are under zero 1 and 2 too
    bool zero_scatters = true;      ///< zero 1 reduces by reduce-scatter; false: by all-reduce, and each rank takes its part
    bool weights = false;           ///< zero 1: updated weights are gathered while the next forward runs
    bool pipeline = false;          ///< sends run beside compute
    bool scatter_gather = false;    ///< of equal tensors on tensor-parallel ranks, each sends its part to the next stage
    double bucket_bytes = 40e6;     ///< of gradients reduced together, each tensor in one bucket
    bool tensor = false;            ///< tensor-parallel all-reduce of backward runs beside the weight gradient
    double tensor_hidden = 0.5;     ///< the share that asynchronous tensor parallelism hides of what it could hide
    double gather_hidden = 0.5;     ///< the same of gathers, which a framework may fail to fuse
    bool regathers = true;          ///< sequence parallelism: backward gathers the inputs of matmuls again, which were kept cut
    bool context = true;            ///< what context parallelism gathers and sends around runs beside its blocks of attention
    bool by_tensor = false;         ///< zero 3 gathers matrix by matrix, none before it is needed, and nothing runs beside it
    double reuse_elements = 0;      ///< by_tensor: a matrix is kept for a next use that fewer elements of weights are used before
    double unit_layers = 1;         ///< layers of one FSDP unit
    int64_t prefetch = 1;           ///< units gathered ahead
    bool keeps_gathered = true;     ///< zero 3 in a pipeline: gathered and reduced once a step, whole in between
    bool offload_residual = false;  ///< of activations the residual stream alone is offloaded
    bool offload_waits = false;     ///< offloaded activations: only the micro-batch that runs has its two layers on the device
    bool reshard = true;            ///< zero 3: weights are given back after forward
    bool gather_copies = false;     ///< zero 3: a unit is gathered into a buffer of its own, then copied to what compute reads
    bool ends_last = false;         ///< zero 3: embedding and head are one unit, reduced when the whole backward is over
    double wgrad_fused = 1;  ///< 1: the weight gradient is added into the accumulated one by the matmul; 0: a pass of its own
    /// Where weight gradients are not fused: whether they are added up whole. False: backward sends gradients off whole and adds the
    /// slices that come back.
    bool wgrad_added = true;

    friend bool operator==(const Overlap&, const Overlap&) = default;
  };

  /// Bytes moved a parameter on the rank that updates it.
  struct Update {
    double passes = 30;             ///< Adam: gradient, master, moments read; master, moments, weight written
    double norm_passes = 8;         ///< norm of the gradient, clipping, unscaling, on the same parameters
    double zero_passes = 4;         ///< zeroing of the gradients held
    double gathered = 0;            ///< bytes a parameter of buffers into which zero 1 gathers updated weights
    double launches = 60;           ///< kernels a step
    double launches_per_layer = 0;  ///< kernels a layer, where updates go tensor by tensor
    double gather_passes = 0;       ///< zero 1: bytes moved a parameter, into and out of buffers of gathered weights
    double gather_host_s = 0;       ///< zero 1: host time of one tensor's part of one rank
    double tensors_per_layer = 0;   ///< of parameters, as the two above count

    friend bool operator==(const Update&, const Update&) = default;
  };

  /// Bytes of the allocator, and of what no allocator sees.
  struct Memory {
    double context = 500e6;
    double nccl_channel = 4e6;  ///< one communicator and peer connection: buffers of a channel set
    double workspace = 32e6;    ///< of cuBLAS and such, within the allocator
    double buckets = 0;         ///< buckets that stand beside the gradients
    double reducer = 0;         ///< bytes a parameter of buckets that stand beside the gradients, under zero 0
    /// Bytes an element of the residual stream, whole: buffers of gathered rows that stay, under sequence parallelism.
    double rows = 0;
    bool pipeline_buffers = false;  ///< what a stage receives and sends stays for each micro-batch of the step, gradients too
    double dummy_gradients = 0;     ///< bytes an element of one gradient that nobody reads, for each shape of a layer's matrices
    double workspace_hopper = 0;    ///< beyond workspace, on Hopper and later
    /// Inputs of exchanges, in tensors of a micro-batch whole rows by the width of the model, that wait for the stream that sends
    /// them: without a pipeline, in one, and at most. PyTorch's allocator has them back before it fails.
    double held = 0, held_pipeline = 0, held_most = 0;
    double fragmentation = 0.04;    ///< reserved beyond live, of activations and transients, where no replay is asked for
    double fragmentation_base = 0;  ///< bytes
    bool caching = true;            ///< false: an arena, reserved equals live
    bool expandable = false;        ///< the caching allocator has expandable segments

    friend bool operator==(const Memory&, const Memory&) = default;
  };

  /// How the framework builds the model and cuts it.
  struct Model {
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

    friend bool operator==(const Model&, const Model&) = default;
  };

  State state;
  Saved saved;
  Transient transient;
  Passes passes;
  Launch launch;
  Host host;
  Attention attention;
  Overlap overlap;
  Update update;
  Memory memory;
  Model model;
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

/// Profiles are written for two moments (AdamW). Sets the bytes that another optimizer keeps and moves in their place: moments of the
/// width that the profile has, or the 8 bits of the optimizer's own. What an update computes beside that takes no time of its own.
void set_optimizer(Optimizer optimizer, FrameworkProfile& profile);

}  // namespace shardlab::simulator::analytic
