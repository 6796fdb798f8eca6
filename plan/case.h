// One fully resolved experiment: a point of a sweep after every axis, default and derived value is set.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "plan/base/result.h"
#include "plan/base/token_order.h"
#include "plan/machine.h"
#include "plan/model.h"
#include "plan/pipeline_schedule.h"

namespace shardlab {

enum class Recompute : uint8_t { kNone, kSelective, kFull, kByLayer };
enum class Optimizer : uint8_t { kAdamW, kSgd, kLion, kAdamW8bit };
enum class OffloadTo : uint8_t { kNone, kCpu, kNvme };
enum class CompressionKind : uint8_t { kNone, kBf16, kInt8, kTopK, kRandomK, kPowerSgd, kOneBitAdam };
enum class GuardAction : uint8_t { kNone, kStop, kSkip };
enum class AlgorithmChoice : uint8_t { kAuto, kRing, kHalvingDoubling, kDirect, kTree, kHierarchical };
enum class Precision : uint8_t { kFp32, kBf16, kFp16, kFp8, kFp4 };
enum class Fp8Scaling : uint8_t { kCurrent, kDelayed, kBlock };
enum class BackendKind : uint8_t { kCpu, kCuda, kDry };
enum class TransportKind : uint8_t { kThreads, kProcesses, kTcp, kOneGpu, kNccl, kGloo, kMpi };
enum class AttentionBy : uint8_t { kAuto, kOwn, kCudnn };
/// What runs beside the exchanges of experts (`ep`): nothing; other compute of the same layer; or that compute and another micro-batch.
enum class ExpertOverlap : uint8_t { kNone, kLayer, kMicroBatches };
/// How the ranks of a context-parallel group attend to tokens that they do not hold.
enum class ContextKind : uint8_t { kNone, kRing, kZigzag, kStriped, kAllGather, kUlysses, kUsp };
inline constexpr int kPrecisions = 5;

std::string_view name_of(Family v);
std::string_view name_of(Recompute v);        ///< "none", "selective", "full", "by-layer"
std::string_view name_of(Optimizer v);        ///< "adamw", "sgd", "lion", "adamw8bit" (plan/optimizers.h)
std::string_view name_of(AlgorithmChoice v);  ///< "auto", "ring", "halving-doubling", "direct", "tree", "hierarchical"
std::string_view name_of(Precision v);        ///< "fp32", "bf16", "fp16", "fp8", "fp4"
std::string_view name_of(Fp8Scaling v);       ///< "current", "delayed", "block"
std::string_view name_of(BackendKind v);      ///< "cpu", "cuda", "dry"
std::string_view name_of(TransportKind v);    ///< "threads", "processes", "tcp", "one-gpu", "nccl", "gloo", "mpi"
std::string_view name_of(AttentionBy v);      ///< "auto", "own", "cudnn"
std::string_view name_of(ExpertOverlap v);    ///< "none", "layer", "micro-batches"
std::string_view name_of(ContextKind v);      ///< "none", "ring", "zigzag", "striped", "all-gather", "ulysses", "usp"
std::string_view name_of(OffloadTo v);        ///< "none", "cpu", "nvme"
std::string_view name_of(GuardAction v);      ///< "none", "stop", "skip"
std::string_view name_of(CompressionKind v);  ///< "none", "bf16", "int8", "top-k", "random-k", "powersgd", "one-bit-adam"

/// The precision of that name; nothing for an unknown word.
std::optional<Precision> precision_named(std::string_view name);

/// Which activations backward makes again: details of `Recompute`.
struct RecomputeOptions {
  std::string modules;  ///< of kSelective: sub-layers by label, separated by spaces ("attn.core mlp.act"); empty: "attn.core"
  int every = 1;        ///< of kFull: every k-th layer of the model, the first included
  /// Above 0: each tensor is kept, made again or offloaded, such that the predicted time is least within these bytes.
  int64_t budget_bytes = 0;
  std::string layers;  ///< of kByLayer, layer by layer (plan/treatment.h): "3*full@cpu 2*attn.core+mlp.act 5*none"
  friend bool operator==(const RecomputeOptions&, const RecomputeOptions&) = default;
};

/// Where state is parked between uses.
struct Offload {
  OffloadTo activations = OffloadTo::kNone, optimizer = OffloadTo::kNone, parameters = OffloadTo::kNone;
  bool delayed_update = false;  ///< ZeRO-Offload's one-step-delayed parameter update
  friend bool operator==(const Offload&, const Offload&) = default;

  bool any() const { return *this != Offload{}; }
};

/// How ZeRO-3 gathers parameters.
struct Fsdp {
  int unit = 1;         ///< layers that are gathered together; the embedding and the head are units of their own
  int prefetch = 1;     ///< units gathered ahead of the one that computes; 0: none
  bool reshard = true;  ///< after forward; false: parameters stay until the micro-batch's backward has used them
  friend bool operator==(const Fsdp&, const Fsdp&) = default;
};

/// Quantised communication of ZeRO-3 (Wang et al. 2023).
struct ZeroPlusPlus {
  bool weights = false;    ///< int8 blocks on the wire of the weight gather
  int secondary = 0;       ///< ranks that share a secondary copy of the weights for backward's gather; 0: none
  bool gradients = false;  ///< int4/int8 all-to-all reduce-scatter of gradients
  friend bool operator==(const ZeroPlusPlus&, const ZeroPlusPlus&) = default;
};

struct ParameterServer {
  int servers = 0;     ///< 0: none
  int staleness = -1;  ///< -1: synchronous; else steps that a worker may be ahead
  friend bool operator==(const ParameterServer&, const ParameterServer&) = default;
};

/// What gradients look like on the wire.
struct Compression {
  CompressionKind kind = CompressionKind::kNone;
  int rank = 4;     ///< of PowerSGD
  double k = 0.01;  ///< share of the elements that top-k and random-k send
  int bits = 8;     ///< of int8: 8 or 4
  int warmup = 0;   ///< steps of plain Adam before 1-bit Adam freezes the variance
  friend bool operator==(const Compression&, const Compression&) = default;
};

/// Local SGD and DiLoCo (Douillard et al. 2023): ranks train apart for `steps` steps, then an outer optimizer moves the shared
/// weights.
struct Diloco {
  int steps = 0;               ///< 0: off
  float learning_rate = 1.0f;  ///< of the outer step; 1 with momentum 0 averages (local SGD)
  float momentum = 0.0f;       ///< Nesterov
  friend bool operator==(const Diloco&, const Diloco&) = default;
};

/// Where ranks go and how state is kept: the keys of the section `layout` of a sweep file.
struct Layout {
  int dp = 1, tp = 1, pp = 1, vpp = 1, cp = 1, ep = 1;
  /// Ranks of tp that cut each expert: tp (0 too), or fewer. Groups of so many neighbours then route their own tokens, and share the experts
  /// with the other groups; 1: experts are whole.
  int expert_tp = 0;
  int zero = 0;
  Schedule schedule = Schedule::kNone;  ///< kNone iff pp == 1
  std::string schedule_table;           ///< of kTable: the slots, as `from_csv` reads them
  std::string stage_layers;             ///< layers of each part of the model, in order: "3,4,4,1"; empty: as even as can be
  bool sequence_parallel = false;
  bool tensor_overlap = false;  ///< of sequence_parallel: products in strips, beside the messages that bring or take them
  ExpertOverlap expert_overlap = ExpertOverlap::kNone;
  /// Room with the experts of a rank, in even shares of rows: what the tokens of one rank choose in a micro-batch. A step in which more rows
  /// come is made again, one sequence at a time. 0: room for the rows of all ranks.
  float expert_bound = 0;
  /// Experts by place (plan/expert_placement.h): "1:2,0,3,1"; "balanced" by the expected loads of the case's routing, "measured" by the
  /// loads of the run that is resumed; empty: contiguous, expert i at place i.
  std::string expert_placement;
  ContextKind cp_kind = ContextKind::kNone;  ///< kNone iff cp == 1
  int cp_ulysses = 0;                        ///< of kUsp: ranks of cp that exchange heads; cp/cp_ulysses ranks form a ring. 0: none
  Recompute recompute = Recompute::kNone;
  RecomputeOptions recompute_options;
  int loss_chunks = 1;  ///< pieces of a micro-batch whose logits are made one after another
  Offload offload;
  Fsdp fsdp;             ///< of zero 3
  int hybrid_shard = 0;  ///< ranks of dp that share one set of shards; the others are replicas. 0: all of dp
  ZeroPlusPlus zero_plus_plus;
  ParameterServer parameter_server;
  Compression compression;
  Diloco diloco;
  bool overlap = true;       ///< reduce each bucket as soon as its last gradient is there, on its own stream
  int64_t bucket_bytes = 0;  ///< gradients reduced together; 0: one bucket per parameter
  AlgorithmChoice collective_algorithm = AlgorithmChoice::kAuto;
  friend bool operator==(const Layout&, const Layout&) = default;

  int world_size() const { return dp * tp * pp * cp; }
  /// Ranks that hold the same parameters and other tokens: what gradients are summed over.
  int data_ranks() const { return dp * cp; }
  /// Context-parallel ranks that exchange heads for tokens, and those that pass keys and values around.
  int head_ranks() const { return cp_kind == ContextKind::kUlysses ? cp : cp_kind == ContextKind::kUsp ? cp_ulysses : 1; }
  int ring_ranks() const { return cp / std::max(1, head_ranks()); }
  /// Data-parallel ranks that share one set of shards, and how many such sets there are.
  int shard_ranks() const { return hybrid_shard > 0 ? hybrid_shard : dp; }
  int replicas() const { return dp / shard_ranks(); }
  /// Ranks that cut each expert.
  int expert_slices() const { return expert_tp == 0 ? tp : expert_tp; }
  /// Groups of ranks of tp that share the experts and have tokens of their own, where all else is cut by all ranks of tp. 1: no such groups.
  int expert_groups() const { return std::max(1, tp / std::max(1, expert_slices())); }
  bool folds_experts() const { return expert_groups() > 1; }
  /// Ranks, or groups of those that cut each expert, among which the tokens of each sequence are divided when they are routed.
  int routed_parts() const { return cp * expert_groups(); }
  /// Data-parallel ranks among the `ep` that share experts: ranks with parts of the same sequences, their neighbours, come first.
  int expert_shards_of_dp() const { return ep > 1 ? ep / routed_parts() : 1; }
};

struct LearningRate {
  enum class Kind : uint8_t { kConstant, kCosine, kLinear, kWsd } kind = Kind::kConstant;
  float peak = 1e-3f;
  int64_t warmup_steps = 0;
  int64_t total_steps = 0;  ///< of all but kConstant
  int64_t decay_steps = 0;  ///< of kWsd (warm-up, stable, decay): the last steps, in which it falls to the floor linearly
  float floor = 0;          ///< where it ends
  friend bool operator==(const LearningRate&, const LearningRate&) = default;
};

std::string_view name_of(LearningRate::Kind v);  ///< "constant", "cosine", "linear", "wsd"

/// "none", or "optimizer=cpu,activations=nvme": as the command line and the tables say it.
std::string offload_text(const Offload& offload);

/// Learning rate of optimizer step `step`, counted from 0.
float learning_rate_at(const LearningRate& lr, int64_t step);

/// What happens to a step whose loss or gradient cannot be trusted: nothing, the run ends, or the update is skipped.
struct Guard {
  GuardAction nonfinite = GuardAction::kNone;  ///< of a gradient that is infinite or no number
  GuardAction spike = GuardAction::kNone;      ///< of a loss or a gradient norm far above its running mean
  float loss_factor = 2;                       ///< times the mean beyond which a loss is a spike; 0: losses are not judged
  float norm_factor = 10;                      ///< times the mean beyond which a gradient norm is a spike; 0: not judged
  int64_t window = 20;                         ///< steps that the running mean remembers; the first so many are not judged
  friend bool operator==(const Guard&, const Guard&) = default;

  bool any() const { return nonfinite != GuardAction::kNone || spike != GuardAction::kNone; }
};

struct Train {
  int64_t seq_len = 0;
  int64_t global_batch_tokens = 0;         ///< seq_len * micro_batch * grad_accumulation * dp
  int64_t micro_batch = 1;                 ///< sequences of one micro-batch on one rank
  int64_t grad_accumulation = 1;           ///< micro-batches of one step on one rank
  Precision precision = Precision::kFp32;  ///< of the matrix products
  std::string reduce_dtype;                ///< of gradients on the wire: fp32, bf16 or fp16; empty: fp32
  std::string accumulate_dtype;            ///< of gradients summed over micro-batches; empty: fp32
  float loss_scale = 0;                    ///< of fp16: fixed above 0, dynamic at 0
  float loss_scale_start = 65536;          ///< where a dynamic scale begins
  int64_t loss_scale_interval = 2000;      ///< applied steps in a row after which a dynamic scale doubles
  Fp8Scaling fp8_scaling = Fp8Scaling::kCurrent;
  Optimizer optimizer = Optimizer::kAdamW;
  LearningRate learning_rate;
  float weight_decay = 0;
  float beta1 = 0.9f, beta2 = 0.95f, epsilon = 1e-8f;
  float dropout = 0;
  bool grad_norm = false;  ///< the squared norm of the gradient is computed each step
  float clip_norm = 0;     ///< gradients are scaled down to this global norm; 0: never
  float ema_decay = 0;     ///< of a running average of the weights; 0: none is kept
  Guard guard;
  int64_t post_validation = 0;  ///< steps that pipeline stages make before they learn whether to take them back; 0: none, they wait
  uint64_t seed = 1;
  friend bool operator==(const Train&, const Train&) = default;
};

/// Real input: a text file or folder (byte-level) or a file of uint16 tokens.
struct DataSource {
  std::string text;    ///< path of a file or folder, or empty
  std::string tokens;  ///< path of a .bin of uint16, or empty
  /// A sequence is several documents, one behind the other: a token attends within its own, in which its position counts.
  bool packed = false;
  int64_t document_end = -1;    ///< id of the last token of each document of `tokens`; of `text` each file is a document
  int64_t document_tokens = 0;  ///< expected of a document of packed data, for predictions of attention's work; 0: not known
  std::string routing;          ///< of tokens to experts, for predictions (plan/routing.h): "zipf:1.2"; empty: balanced
  std::string routes;           ///< path of the routes that a run recorded, for predictions; or empty
  friend bool operator==(const DataSource&, const DataSource&) = default;
};

struct Measure {
  int64_t warmup = 3;
  int64_t steps = 10;
  int64_t repeat = 3;
  double timeout_s = 300;
  int64_t validate_sequences = 0;  ///< sequences of the validation split scored after training, 0 for none
  friend bool operator==(const Measure&, const Measure&) = default;
};

/// Where the run keeps the state of its training, and where it takes it from.
struct Checkpointing {
  int64_t save_every = 0;  ///< optimizer steps between two saves; the end of the run is saved too. 0: never
  std::string folder;      ///< where checkpoints are saved; empty: "checkpoints" in the case's folder of the run directory
  std::string resume;      ///< a folder, whose newest checkpoint is taken, or a manifest; empty: the run starts from the seed
  friend bool operator==(const Checkpointing&, const Checkpointing&) = default;
};

struct Case {
  std::string name;
  Model model;
  Layout layout;
  Train train;
  DataSource data;
  Measure measure;
  Checkpointing checkpoint;
  Machine machine;
  std::string profile = "shardlab";
  BackendKind backend = BackendKind::kCpu;
  TransportKind transport = TransportKind::kThreads;
  bool canonical = false;  ///< own fixed-order matmul and direct collectives: bitwise across layouts
  int threads_per_rank = 1;
  AttentionBy attention = AttentionBy::kAuto;  ///< of backend cuda; kAuto: cuDNN where it takes the shape, else own kernels
  bool tf32 = false;                           ///< of backend cuda: fp32 products of the library may round their factors to tf32

  /// Micro-batches of one step over all data-parallel ranks.
  int64_t sequences_per_step() const { return train.micro_batch * train.grad_accumulation * layout.dp; }
};

/// The order in which a layout keeps the tokens of every sequence. Sums over tokens follow it: runs of one order have equal bits in
/// canonical mode.
TokenOrder token_order_of(const Layout& layout);

/// `model_flops_per_token` for the case's sequences. With packed documents attention counts the expected pairs of a query and a key; none if the
/// expected length of documents is not known.
std::optional<double> model_flops_per_token(const Case& c);

/// Device-space bytes that one rank may use: the device's memory or, where the ranks of a local machine outnumber its devices,
/// their equal part of what all devices have. On a mixed machine: the least over its kinds (`memory_of_stage` tells them apart).
int64_t memory_per_rank(const Case& c);

/// Refuses what cannot be lowered: heads not divisible by tp, layers fewer than stages, batch not divisible, a value that
/// no strategy of this version implements. Every message states the values and what to change.
Result<void> check(const Case& c);

}  // namespace shardlab
