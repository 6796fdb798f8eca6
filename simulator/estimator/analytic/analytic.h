// Time, memory and overlap of one training step by formulas: no plan, no event queue, no allocation.
//
//   auto prepared = prepare(shape, machine, profile, {});          // once a model, machine and framework
//   Estimator estimator(*prepared);                                // one a thread: remembers what layers cost under (tp, cp, ep,
//   ...) Estimate e = estimator(Point{.dp = 8, .tp = 8, .pp = 8, ...}); // below a microsecond when those are remembered
//
// An answer holds the step time, its ten parts, the worst stage's live peak by class, reserved and device bytes, wire bytes.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "plan/base/result.h"
#include "plan/case.h"
#include "plan/machine.h"
#include "plan/pipeline_schedule.h"
#include "simulator/estimator/analytic/profile.h"
#include "simulator/estimator/analytic/shape.h"
#include "simulator/interpreter/case_plan.h"
#include "simulator/interpreter/device_model.h"
#include "simulator/interpreter/fabric.h"

namespace shardlab::simulator::analytic {

/// The estimator knows the schedules that papers have formulas for: those up to kDualPipeV.
using shardlab::Schedule;
enum class CpKind : uint8_t { kRing, kZigzag, kStriped, kAllGather, kUlysses };
enum class Medium : uint8_t { kDevice, kCpu, kNvme };
enum class Compression : uint8_t { kNone, kPowerSgd, kTopK, kOneBit, kInt8 };

/// Words of the command line: "1f1b", "zb-h1", "all-gather", "cpu", "powersgd". Readers return false for an unknown word.
using shardlab::name_of;
std::string_view name_of(CpKind v);
std::string_view name_of(Medium v);
std::string_view name_of(Compression v);
bool read(std::string_view word, Schedule* v);
const std::vector<std::string_view>& schedule_words();  ///< those that `read` knows
bool read(std::string_view word, CpKind* v);
bool read(std::string_view word, Medium* v);
bool read(std::string_view word, Compression* v);

/// One layout and batch: what varies in a search. Same words as the command line.
struct Point {
  int32_t dp = 1, tp = 1, pp = 1, vpp = 1, cp = 1, ep = 1;
  int32_t expert_tp = 1;  ///< cuts each expert, as tp or less does; ep * expert_tp divides dp * cp * tp
  int32_t hybrid_shard =
      0;  ///< ranks that share one copy of the state under zero 1 to 3 (HSDP, instances of the optimizer); 0: all
  int32_t zero = 0;
  Schedule schedule = Schedule::kNone;  ///< kNone iff pp == 1
  bool sequence_parallel = false;
  CpKind cp_kind = CpKind::kZigzag;
  Precision precision = Precision::kBf16;
  Recompute recompute;  ///< profile.h: none, selective, full, or modules
  Medium offload_activations = Medium::kDevice, offload_optimizer = Medium::kDevice, offload_parameters = Medium::kDevice;
  int32_t micro_batch = 1;
  int32_t grad_accumulation = 1;  ///< micro-batches of a step on one rank
  int64_t seq_len = 2048;
  int8_t overlap = -1;        ///< of data-parallel communication with compute: 0, 1, or -1 as the profile has it
  int8_t tensor_overlap = 0;  ///< of tensor-parallel communication with matmuls (async TP)
  int8_t reshard = -1;        ///< zero 3: give weights back after forward; -1 as the profile has it
  int64_t bucket_bytes = -1;  ///< zero 0 to 2: gradients reduced together; 0: tensor by tensor; -1 as the profile has it
  /// Of shardlab's own collectives; of NCCL's auto, its own choice, and ring, its rings alone.
  AlgorithmChoice algorithm = AlgorithmChoice::kAuto;
  Compression compression = Compression::kNone;
  int32_t compression_rank = 0;  ///< of PowerSGD; entries of a thousand kept by top-k
  double expert_skew = 1;        ///< tokens of the busiest expert-parallel rank over the mean

  // Layers by stage. Embedding and head may count as a layer each, so that the stages that hold them have one layer less; the first
  // and the last stage may have layers of their own number (0: as the others).
  bool embedding_as_layer = false, head_as_layer = false;
  int16_t first_layers = 0, last_layers = 0;
  int32_t offload_layers = 0;  ///< whose activations are offloaded, of all stages; 0: all
  int32_t micro_batch_group =
      0;  ///< micro-batches that a part of a looped stage takes before the next part does; 0: as many as stages
  bool expert_overlap = false;  ///< dispatch and combine of one micro-batch run beside the compute of another
  /// What `offload_optimizer` moves: a sum of these.
  static constexpr uint8_t kMaster = 1, kFirstMoment = 2, kSecondMoment = 4, kWholeOptimizer = 7;
  uint8_t offload_parts = kWholeOptimizer;
  friend bool operator==(const Point&, const Point&) = default;

  int64_t world_size() const { return int64_t{dp} * tp * pp * cp; }
  int64_t tokens_per_step() const { return int64_t{dp} * micro_batch * grad_accumulation * seq_len; }
  /// Whether fewer ranks cut experts, which ranks share, than cut all else of a layer.
  bool cuts_experts_apart() const { return ep > 1 && expert_tp != tp; }
};

/// Why a point is no legal layout. `explain` says it with values.
enum class Refusal : uint8_t {
  kNone,
  kSize,        ///< a size below one or absurdly large
  kDevices,     ///< more ranks than devices
  kAbility,     ///< something that the profile's framework does not have
  kHeads,       ///< heads or kv heads not divisible
  kWidth,       ///< ffn or hidden not divisible by tp
  kLayers,      ///< fewer layers than stages
  kSchedule,    ///< schedule and pp, vpp or micro-batches at odds
  kSequence,    ///< seq_len not divisible by cp, tp under sequence parallelism, 2 cp under zigzag
  kExperts,     ///< experts, ep and expert_tp at odds
  kZero,        ///< a stage of ZeRO that the schedule cannot have
  kPrecision,   ///< a precision that the device has not
  kAlgorithm,   ///< a collective algorithm that the framework or a group has not
  kCombination  ///< two techniques that exclude each other
};
inline constexpr size_t kRefusals = 14;
std::string_view name_of(Refusal v);
/// The reason of a refusal, as a sentence's end: "tp does not divide the attention heads".
std::string_view sentence_of(Refusal v);

/// The parts of a step's seconds, on the slowest stage.
enum class TimePart : uint8_t {
  kForward,
  kBackward,
  kRecompute,
  kLaunch,           ///< the device waits for the host
  kTensorParallel,   ///< exposed, as are the three below
  kContextParallel,  //
  kExpertParallel,
  kDataParallel,  ///< gradients, gathered weights and, under zero 1 and 2, updated weights
  kPipeline,      ///< bubble and exposed sends between stages
  kUpdate         ///< optimizer, clipping, casts, exposed offload
};
inline constexpr size_t kTimeParts = 10;
std::string_view name_of(TimePart v);
/// Why a layout with more of it is slower: "longer pipeline bubbles".
std::string_view sentence_of(TimePart v);

/// The uses of device bytes.
enum class MemoryPart : uint8_t {
  kParameters,
  kGradients,
  kMaster,
  kMoments,
  kActivations,  ///< kept from forward to backward
  kTransient,    ///< of the one layer that runs
  kLogits,
  kBuckets,     ///< communication buffers of gradients
  kGathered,    ///< unsharded weights under zero 3
  kWorkspace,   ///< of libraries, within the allocator
  kFragmented,  ///< reserved by the caching allocator and not live
  kContext,     ///< of the driver and loaded kernels
  kNccl
};
inline constexpr size_t kMemoryParts = 13;
std::string_view name_of(MemoryPart v);
/// "gathered weights", "the layer that runs".
std::string_view words_of(MemoryPart v);

struct MemoryBytes {
  std::array<int64_t, kMemoryParts> bytes{};
  int64_t& operator[](MemoryPart p) { return bytes[static_cast<size_t>(p)]; }
  int64_t operator[](MemoryPart p) const { return bytes[static_cast<size_t>(p)]; }
  int64_t live() const;      ///< sum without fragmentation, context and nccl
  int64_t reserved() const;  ///< what the caching allocator holds: live and fragmented
  int64_t device() const;    ///< what the driver reports: reserved, context and nccl
};

/// Bytes sent in a step, over all ranks, by use.
enum class WireUse : uint8_t { kTensor, kContext, kExpert, kGradients, kWeights, kPipeline, kEnds, kMetrics };
inline constexpr size_t kWireUses = 8;

struct Estimate {
  Refusal refusal = Refusal::kNone;  ///< if any, nothing else is set
  double step_s = 0;
  std::array<double, kTimeParts> parts{};  ///< their sum is `step_s`
  int32_t worst_stage = 0;                 ///< with the highest live peak
  MemoryBytes memory;                      ///< of that stage, at its peak
  int64_t host_bytes = 0;                  ///< pinned memory of one rank, offloaded state
  int64_t nvme_bytes = 0;
  std::array<double, kWireUses> wire{};
  double model_flops = 0;  ///< of the step, all ranks, no recompute
  double hidden_comm_s = 0;
  double sends_s = 0;        ///< of `kPipeline`, the exposed sends between stages; the rest is bubble
  bool transferred = false;  ///< built on a constant that nobody measured on this device

  bool legal() const { return refusal == Refusal::kNone; }
  double part(TimePart p) const { return parts[static_cast<size_t>(p)]; }
  double wire_total() const;
  double bubble_s() const { return part(TimePart::kPipeline) - sends_s; }
  double tokens_per_s(const Point& point) const { return static_cast<double>(point.tokens_per_step()) / step_s; }
};

/// When in the step a stage holds most.
enum class PeakMoment : uint8_t {
  kForward,   ///< the newest micro-batch's forward, in the last layer of the stage
  kLoss,      ///< logits and their gradient, on the stage that has the head
  kBackward,  ///< the oldest micro-batch's backward begins, in the last layer
  kEnd,       ///< the last backward ends, in the first layer, when all gradients are there
  kUpdate     ///< updated weights are gathered
};
std::string_view name_of(PeakMoment v);  ///< "forward", "loss", "backward", "end", "update"

/// Bytes of one tensor of the layers, or of the ends, on a stage at its peak.
struct KeptBytes {
  std::string_view name;
  bool moe = false;  ///< of the layers with experts
  int64_t bytes = 0;
};

/// A stage at its peak, with what a table for people says beside the bytes.
struct StagePeak {
  MemoryBytes memory;
  PeakMoment moment = PeakMoment::kForward;
  bool moe = false;      ///< the layer that runs is one with experts
  double in_flight = 1;  ///< micro-batches between their forward and their backward
  int64_t host_bytes = 0, nvme_bytes = 0;
  /// MemoryPart::kActivations by tensor; adds up to it.
  std::vector<KeptBytes> activations;
};

/// The data that all points of a study share. Immutable; copies share.
class Prepared {
 public:
  const ModelShape& shape() const;
  const Machine& machine() const;
  const FrameworkProfile& profile() const;
  struct Inside;
  explicit Prepared(std::shared_ptr<const Inside> inside) : inside_(std::move(inside)) {}
  const Inside& inside() const { return *inside_; }

 private:
  std::shared_ptr<const Inside> inside_;
};

/// Refuses a shape that `check` refuses and a machine without rates. `rest`: of a study of shardlab's own executor, what its cases
/// have that points do not say; none: the defaults of a case.
Result<Prepared> prepare(const ModelShape& shape, const Machine& machine, const FrameworkProfile& profile,
                         const MeasuredFabric& measured = {}, std::shared_ptr<const Case> rest = nullptr);

/// The study and the point of a resolved case. Refuses a case whose words this engine does not know.
Result<Prepared> prepare(const Case& config, const MeasuredFabric& measured = {});
/// The study and the point of a model that no case can hold: `shape` replaces the case's model. Refuses the profile "shardlab",
/// whose executor has no plan of it.
Result<Prepared> prepare(const Case& config, const ModelShape& shape, const MeasuredFabric& measured = {});
Result<Point> point_of(const Case& config);
/// `Point::expert_tp` of a layout: tp where it does not say. 1 of a model without experts, or what is refused for it.
int32_t expert_slices_of(const Layout& layout, bool moe);

/// Estimates points of one study. Not thread-safe: one a thread. Remembers the cost of a layer by (tp, cp, ep, micro_batch, ...),
/// so that the first point of a kind takes tens of microseconds and those after it below one; only a new kind may allocate.
class Estimator {
 public:
  explicit Estimator(Prepared prepared);
  ~Estimator();
  Estimator(Estimator&&) noexcept;
  Estimator& operator=(Estimator&&) noexcept;

  Estimate operator()(const Point& point);

  /// Memory of one stage at its peak.
  MemoryBytes stage_memory(const Point& point, int32_t stage);

  /// The peak of a stage with its moment and with the activations by tensor, by the profile's forms alone. Empty for
  /// a refused point.
  StagePeak stage_peak(const Point& point, int32_t stage);

  /// The case that shardlab's executor runs for the point; its plan tells its bytes (`tell_bytes`). nullptr if the executor runs
  /// none. Valid until the estimator is asked about another point.
  const Case* executed(const Point& point);

  /// No legal point that shares with `point` the cut of a layer (tp cp ep expert_tp micro_batch seq_len precision recompute
  /// sequence_parallel cp_kind tensor_overlap algorithm), dp, pp and grad_accumulation has a shorter step, whatever its zero,
  /// schedule, vpp, offload, overlap, bucket_bytes and compression. `point` itself is legal.
  double least_step_s(const Point& point);
  /// No legal point that differs from `point` in schedule, vpp, overlap, bucket_bytes and reshard alone needs fewer device bytes; 0
  /// where nothing is known. `point` itself is legal, its schedule none or 1f1b.
  double least_device_bytes(const Point& point);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// Why `point` is no legal layout; kNone when it is.
Refusal refusal_of(const Prepared& prepared, const Point& point);

/// How much larger than a device an estimate under the profile "shardlab" may be for its plan to be asked whether it fits.
/// Estimates of 120 layouts of two models were 13 % below their plans at worst, 1 % above in the median; above by more than this
/// are those that offload nearly all, which are far below the capacity of a device.
inline constexpr double kPlanEstimateError = 0.15;

/// Replaces the estimate's memory and wire bytes by those of a plan. They are exact for runs of shardlab's executor.
void tell_bytes(const FrameworkProfile& profile, const CasePlan& plan, Estimate& estimate);

/// One point. For many, keep an `Estimator`.
Estimate estimate(const Prepared& prepared, const Point& point);

/// Why the point is refused, with the values and what to change; ok when it is legal.
Result<void> explain(const Prepared& prepared, const Point& point);

/// Refuses a point that asks for something that the framework does not have. The message says what the framework has instead, and
/// which profiles have all of it.
Result<void> explain_ability(const FrameworkProfile& profile, const Point& point);

/// Bytes that the allocator has reserved for inputs of tensor-parallel exchanges, which it may not hand out again before the stream of
/// the exchange has passed them (record_stream). The host runs ahead by as many as the queue of launches lets it, or not at all. They
/// are in no estimate: an allocator that has nothing else left waits for them.
struct HeldBytes {
  int64_t typical = 0, most = 0;
};
HeldBytes held_bytes(const Prepared& prepared, const Point& point);

/// One line of a table of activations: what a layer of one kind keeps of one micro-batch.
struct ActivationItem {
  std::string_view name;
  bool moe = false;
  int64_t kept = 0, remade = 0;  ///< bytes a layer
};
std::vector<ActivationItem> activations_by_kind(const Prepared& prepared, const Point& point);

/// Allocation or release of one tensor in the order in which the framework makes them.
struct AllocationEvent {
  int64_t bytes = 0;  ///< negative: given back
  int32_t tensor = 0;
  MemoryPart part = MemoryPart::kActivations;
  int8_t stream = 0;  ///< the stream whose pool it comes from: 0 computes, 1 gathers weights, 2 reduces gradients
};
/// Two steps of one stage as its allocator sees them. First come parameters and the buffers made with them. Optimizer moments come
/// at the end of the first step, where frameworks make them. Then a step with all state. Tensors of a layer come one by one,
/// weights under zero 3 unit by unit from the stream that gathers. The steady phase counts as one micro-batch, since more of them
/// make no difference. The largest running sum equals the live bytes of `stage_memory` within 3 %, unless the layout offloads
/// activations. Empty for a refused point.
std::vector<AllocationEvent> allocation_events(const Prepared& prepared, const Point& point, int32_t stage);

/// Money, energy and time of a whole training run.
struct RunPrice {
  double device_hour_usd = 0;
  double power_w = 0;     ///< of a device under this load; 0: as the machine states
  double overhead = 1.5;  ///< energy of the whole site over the energy of its devices (hosts, fans, power usage effectiveness)
  double kg_co2_per_kwh = 0.4;
};
struct RunBill {
  double days = 0, device_hours = 0, usd = 0, kwh = 0, kg_co2 = 0;
};
RunBill bill(const Prepared& prepared, const Point& point, const Estimate& estimate, double tokens, const RunPrice& price);
/// The same where no study says what a device draws: `device_power_w`, the mean over the devices. Units: watts.
RunBill bill(double device_power_w, const Point& point, const Estimate& estimate, double tokens, const RunPrice& price);

}  // namespace shardlab::simulator::analytic
