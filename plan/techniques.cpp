#include "plan/techniques.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <vector>

#include "plan/base/check.h"
#include "plan/braids.h"
#include "plan/pipeline_case.h"
#include "plan/precision.h"
#include "plan/technique_settings.h"
#include "plan/treatment.h"

namespace shardlab {
namespace {

using namespace settings;
using Kind = CompressionKind;

// --- facts -------------------------------------------------------------------------------------------------------------------

bool always(const Case&) { return true; }
template <auto Key>
bool is_narrow(const Case& c) {
  const std::string& dtype = c.train.*Key;
  return !dtype.empty() && dtype != "fp32";
}
bool compresses(const Case& c) { return c.layout.compression.kind != Kind::kNone; }
template <Kind... kinds>
bool is_compression(const Case& c) {
  return ((c.layout.compression.kind == kinds) || ...);
}
bool has_servers(const Case& c) { return c.layout.parameter_server.servers > 0; }
bool trains_apart(const Case& c) { return c.layout.diloco.steps > 0; }
bool updates_on_host(const Case& c) { return c.layout.offload.optimizer != OffloadTo::kNone; }
bool narrows(const Case& c) { return element_types(c).has_master(); }
bool scales_loss(const Case& c) { return c.train.precision == Precision::kFp16; }
bool delays_scales(const Case& c) { return multiplies_in_fp8(c) && c.train.fp8_scaling == Fp8Scaling::kDelayed; }
bool cuts_tokens(const Case& c) { return c.layout.sequence_parallel && c.layout.tp > 1; }
bool cuts_sequences(const Case& c) { return c.layout.cp > 1; }
bool sends_in_rings(const Case& c) {
  return cuts_sequences(c) && (c.layout.cp_kind == ContextKind::kRing || c.layout.cp_kind == ContextKind::kZigzag ||
                               c.layout.cp_kind == ContextKind::kStriped || c.layout.cp_kind == ContextKind::kUsp);
}
bool judges_spikes(const Case& c) { return c.train.guard.spike != GuardAction::kNone; }
bool has_budget(const Case& c) { return c.layout.recompute_options.budget_bytes != 0 && c.layout.recompute != Recompute::kByLayer; }
bool is_by_layer(const Case& c) { return c.layout.recompute == Recompute::kByLayer; }

std::string zero_text(const Case& c) { return fmt::format("zero={}", c.layout.zero); }
std::string compression_text(const Case& c) { return fmt::format("compression.kind={}", name_of(c.layout.compression.kind)); }
std::string precision_text(const Case& c) { return fmt::format("precision={}", name_of(c.train.precision)); }
std::string transport_text(const Case& c) { return fmt::format("transport={}", name_of(c.transport)); }
std::string parameters_text(const Case& c) { return fmt::format("offload.parameters={}", name_of(c.layout.offload.parameters)); }
std::string servers_text(const Case& c) { return fmt::format("parameter_server.servers={}", c.layout.parameter_server.servers); }
std::string staleness_text(const Case& c) {
  return fmt::format("parameter_server.staleness={}", c.layout.parameter_server.staleness);
}
std::string diloco_text(const Case& c) { return fmt::format("diloco.steps={}", c.layout.diloco.steps); }
std::string secondary_text(const Case& c) { return fmt::format("zero_plus_plus.secondary={}", c.layout.zero_plus_plus.secondary); }
std::string schedule_text(const Case& c) { return fmt::format("schedule={}", name_of(c.layout.schedule)); }
std::string context_text(const Case& c) { return fmt::format("cp_kind={}", name_of(c.layout.cp_kind)); }
std::string budget_text(const Case& c) {
  return fmt::format("recompute_options.budget_bytes={}", c.layout.recompute_options.budget_bytes);
}

constexpr Fact kOneDp{[](const Case& c) { return c.layout.dp == 1; }, [](const Case&) { return std::string("dp=1"); }};
constexpr Fact kTp{[](const Case& c) { return c.layout.tp > 1; }, [](const Case& c) { return fmt::format("tp={}", c.layout.tp); }};
constexpr Fact kPp{[](const Case& c) { return c.layout.pp > 1; }, [](const Case& c) { return fmt::format("pp={}", c.layout.pp); }};
constexpr Fact kAnyZero{[](const Case& c) { return c.layout.zero > 0; }, zero_text};
constexpr Fact kNoZero{[](const Case& c) { return c.layout.zero == 0; }, zero_text};
constexpr Fact kZero3{[](const Case& c) { return c.layout.zero == 3; }, zero_text};
constexpr Fact kNotZero3{[](const Case& c) { return c.layout.zero != 3; }, zero_text};
constexpr Fact kHybridShard{[](const Case& c) { return c.layout.hybrid_shard > 0; },
                            [](const Case& c) { return fmt::format("hybrid_shard={}", c.layout.hybrid_shard); }};
constexpr Fact kNoReshard{[](const Case& c) { return !c.layout.fsdp.reshard; },
                          [](const Case&) { return std::string("fsdp.reshard=false"); }};
constexpr Fact kBuckets{[](const Case& c) { return c.layout.bucket_bytes != 0; },
                        [](const Case& c) { return fmt::format("bucket_bytes={}", c.layout.bucket_bytes); }};
constexpr Fact kNoOverlap{[](const Case& c) { return !c.layout.overlap; },
                          [](const Case&) { return std::string("overlap=false"); }};
constexpr Fact kCompression{compresses, compression_text};
constexpr Fact kServers{has_servers, [](const Case&) { return std::string("parameter_server"); }};
constexpr Fact kDiloco{trains_apart, diloco_text};
constexpr Fact kDilocoAtAll{trains_apart, [](const Case&) { return std::string("diloco"); }};
constexpr Fact kReduceDtype{is_narrow<&Train::reduce_dtype>, [](const Case& c) { return "reduce_dtype=" + c.train.reduce_dtype; }};
constexpr Fact kAccumulateDtype{is_narrow<&Train::accumulate_dtype>,
                                [](const Case& c) { return "accumulate_dtype=" + c.train.accumulate_dtype; }};
constexpr Fact kFp16{scales_loss, precision_text};
constexpr Fact kNotFp16{[](const Case& c) { return !scales_loss(c); }, precision_text};
/// A loss of the router itself, under a loss scale.
constexpr Fact kScaledRouterLoss{
    [](const Case& c) { return scales_loss(c) && (c.model.experts.balance != 0 || c.model.experts.z_loss != 0); },
    [](const Case& c) {
      const Experts& e = c.model.experts;
      return fmt::format("{} and {}", precision_text(c),
                         e.balance != 0 ? fmt::format("balance_loss={}", e.balance) : fmt::format("z_loss={}", e.z_loss));
    }};
constexpr Fact kFp8{multiplies_in_fp8, precision_text};
constexpr Fact kDelayedScales{delays_scales, [](const Case&) { return std::string("fp8_scaling=delayed"); }};
/// One scale a tensor, in place of one a block.
constexpr Fact kWholeScales{[](const Case& c) { return multiplies_in_fp8(c) && c.train.fp8_scaling != Fp8Scaling::kBlock; },
                            [](const Case& c) { return fmt::format("fp8_scaling={}", name_of(c.train.fp8_scaling)); }};
constexpr Fact kGuard{[](const Case& c) { return c.train.guard.any(); }, [](const Case&) { return std::string("guard"); }};
constexpr Fact kClipNorm{[](const Case& c) { return c.train.clip_norm > 0; },
                         [](const Case& c) { return fmt::format("clip_norm={}", c.train.clip_norm); }};
constexpr Fact kGradNorm{[](const Case& c) { return c.train.grad_norm; }, [](const Case&) { return std::string("grad_norm"); }};
constexpr Fact kTied{[](const Case& c) { return c.model.tied_embeddings; },
                     [](const Case&) { return std::string("tied embeddings"); }};
constexpr Fact kTiedStages{[](const Case& c) { return c.model.tied_embeddings && c.layout.pp > 1; },
                           [](const Case& c) { return fmt::format("pp={} and tied embeddings", c.layout.pp); }};
constexpr Fact kTiedCanonical{[](const Case& c) { return c.model.tied_embeddings && c.canonical; },
                              [](const Case&) { return std::string("canonical and tied embeddings"); }};
constexpr Fact kAnyOffload{[](const Case& c) { return c.layout.offload.any(); },
                           [](const Case& c) { return "offload=" + offload_text(c.layout.offload); }};
constexpr Fact kActivationsAway{
    [](const Case& c) { return c.layout.offload.activations != OffloadTo::kNone; },
    [](const Case& c) { return fmt::format("offload.activations={}", name_of(c.layout.offload.activations)); }};
constexpr Fact kOptimizerAway{
    updates_on_host, [](const Case& c) { return fmt::format("offload.optimizer={}", name_of(c.layout.offload.optimizer)); }};
constexpr Fact kOptimizerHere{[](const Case& c) { return !updates_on_host(c); },
                              [](const Case&) { return std::string("offload.optimizer=none"); }};
constexpr Fact kOptimizerOnNvme{[](const Case& c) { return c.layout.offload.optimizer == OffloadTo::kNvme; }, kOptimizerAway.text};
constexpr Fact kParametersAway{parks_parameters, parameters_text};
constexpr Fact kCheckpoint{[](const Case& c) { return !(c.checkpoint == Checkpointing{}); },
                           [](const Case&) { return std::string("checkpoint"); }};
constexpr Fact kNccl{[](const Case& c) { return c.transport == TransportKind::kNccl; }, transport_text};
constexpr Fact kNotThreads{[](const Case& c) { return c.transport != TransportKind::kThreads; }, transport_text};
constexpr Fact kOnDevice{[](const Case& c) { return c.transport == TransportKind::kOneGpu || c.transport == TransportKind::kNccl; },
                         transport_text};
constexpr Fact kCuda{[](const Case& c) { return c.backend == BackendKind::kCuda; },
                     [](const Case&) { return std::string("backend=cuda"); }};
constexpr Fact kCudnn{[](const Case& c) { return c.attention == AttentionBy::kCudnn; },
                      [](const Case&) { return std::string("attention=cudnn"); }};
constexpr Fact kDry{[](const Case& c) { return c.backend == BackendKind::kDry; },
                    [](const Case&) { return std::string("backend=dry"); }};
constexpr Fact kNotAdam{[](const Case& c) { return c.train.optimizer != Optimizer::kAdamW; },
                        [](const Case& c) { return fmt::format("optimizer={}", name_of(c.train.optimizer)); }};
constexpr Fact kSomeRecompute{[](const Case& c) { return c.layout.recompute != Recompute::kNone; },
                              [](const Case& c) { return fmt::format("recompute={}", name_of(c.layout.recompute)); }};
constexpr Fact kLateSchedule{[](const Case& c) { return c.layout.stage_layers.empty() && c.layout.schedule > Schedule::k1F1B; },
                             schedule_text};
constexpr Fact kStageLayers{[](const Case& c) { return !c.layout.stage_layers.empty(); },
                            [](const Case& c) { return "stage_layers=" + c.layout.stage_layers; }};
constexpr Fact kEveryLayer{
    [](const Case& c) { return c.layout.recompute_options.every > 1; },
    [](const Case& c) { return fmt::format("recompute_options.every={}", c.layout.recompute_options.every); }};
constexpr Fact kOwnAlgorithm{
    [](const Case& c) {
      return c.layout.collective_algorithm != AlgorithmChoice::kAuto && c.layout.collective_algorithm != AlgorithmChoice::kDirect;
    },
    [](const Case& c) { return fmt::format("collective_algorithm={}", name_of(c.layout.collective_algorithm)); }};
constexpr Fact kInPlaceAlgorithm{[](const Case& c) {
                                   return c.layout.collective_algorithm == AlgorithmChoice::kRing ||
                                          c.layout.collective_algorithm == AlgorithmChoice::kHalvingDoubling;
                                 },
                                 kOwnAlgorithm.text};
bool shares_experts(const Case& c) { return c.layout.ep > 1; }
constexpr Fact kLatent{[](const Case& c) { return c.model.is_latent(); },
                       [](const Case& c) { return fmt::format("model.kv_lora_rank={}", c.model.latent.kv_rank); }};
constexpr Fact kCapacity{[](const Case& c) { return c.model.experts.drops(); },
                         [](const Case& c) { return fmt::format("model.capacity_factor={}", c.model.experts.capacity_factor); }};
constexpr Fact kPowerSgd{is_compression<Kind::kPowerSgd>, compression_text};
constexpr Fact kMirrored{[](const Case& c) { return is_mirrored(c.layout.schedule); }, schedule_text};
constexpr Fact kDense{[](const Case& c) { return !c.model.is_mixture(); },
                      [](const Case&) { return std::string("a dense model"); }};
constexpr Fact kMixture{[](const Case& c) { return c.model.is_mixture(); },
                        [](const Case&) { return std::string("a mixture of experts"); }};
constexpr Fact kMixedLayers{
    [](const Case& c) { return c.model.is_mixture() && c.model.mixture_layers() < c.model.layers; },
    [](const Case& c) { return fmt::format("{} of {} layers with experts", c.model.mixture_layers(), c.model.layers); }};
constexpr Fact kSomeLocal{
    [](const Case& c) { return c.model.has_windows() && c.model.local_layers() < c.model.layers; },
    [](const Case& c) { return fmt::format("{} of {} layers with a window", c.model.local_layers(), c.model.layers); }};
constexpr Fact kCanonicalSlices{
    [](const Case& c) { return c.canonical && c.layout.zero == 1 && c.train.grad_accumulation > 1; },
    [](const Case& c) { return fmt::format("canonical, zero=1 and grad_accumulation={}", c.train.grad_accumulation); }};

constexpr Fact kCutTokens{cuts_tokens, [](const Case&) { return std::string("sequence_parallel"); }};
constexpr Fact kSecondary{[](const Case& c) { return c.layout.zero_plus_plus.secondary != 0; }, secondary_text};
constexpr Fact kNoCpKind{[](const Case& c) { return c.layout.cp_kind == ContextKind::kNone; }, context_text};
constexpr Fact kZeroPlusPlus{[](const Case& c) { return !(c.layout.zero_plus_plus == ZeroPlusPlus{}); },
                             [](const Case&) { return std::string("zero_plus_plus"); }};
/// Compression that leaves every rank the whole gradient.
constexpr Fact kSlices{[](const Case& c) { return c.layout.zero > 0 && !is_compression<Kind::kBf16, Kind::kInt8>(c); }, zero_text};
constexpr Fact kNothingToShard{
    [](const Case& c) { return c.layout.data_ranks() == 1 && c.layout.zero <= 3 && !(c.layout.zero == 3 && parks_parameters(c)); },
    kOneDp.text};

// --- what cannot be combined ---------------------------------------------------------------------------------------------------

constexpr std::string_view kEarly = "gradients would be taken before those of the two stages of a part are added up";
constexpr Apart kMirroredApart[] = {
    {{compresses, [](const Case& c) { return fmt::format("compression={}", name_of(c.layout.compression.kind)); }},
     kEarly,
     "use schedule: dualpipe-v"},
    {kServers, kEarly, "use schedule: dualpipe-v"},
    {kDilocoAtAll, kEarly, "use schedule: dualpipe-v"},
    {kParametersAway, kEarly, "use schedule: dualpipe-v"},
};

constexpr Apart kParametersApart[] = {
    {kNotZero3, "only zero 3 brings parameters unit by unit to where they compute",
     "set zero: 3 (with dp: 1 too), or offload.parameters: none"},
    {kOptimizerHere, "every parameter would come to the device once more to be updated",
     "set offload.optimizer: cpu or nvme, or offload.parameters: none"},
    {kHybridShard, "sets of shards add their gradients on the device, and these have left it",
     "set hybrid_shard: 0, or offload.parameters: none"},
};

constexpr std::string_view kGivenUp =
    "what gives a step up is known when its gradients are, and the update by them is another step's";
constexpr Apart kDelayedApart[] = {
    {kOptimizerOnNvme, "the state of an update is in host memory for the time of three buckets only", "set offload.optimizer: cpu"},
    {kParametersAway, "the step would fetch parameters from where they are being updated", "set offload.parameters: none"},
    {kNoOverlap, "updates are delayed so as to run beside the step", "set overlap: true"},
    {kFp16, kGivenUp, "use precision: bf16"},
    {kGuard, kGivenUp, "leave guard out"},
    {kCheckpoint, "the gradients that wait for the next step belong to buckets of this layout", "leave checkpoint out"},
};

constexpr Apart kActivationsApart[] = {
    {kEveryLayer, "every layer is parked alike", "set recompute_options.every: 1, or offload.activations: none"},
};

constexpr std::string_view kOwnWay = ", which moves data by a way of its own";
constexpr Apart kAlgorithmApart[] = {
    {kOnDevice, kOwnWay, "leave collective_algorithm out, or use transport: threads"},
};

constexpr Apart kFsdpApart[] = {{kNotZero3, "only zero 3 gathers parameters", "set zero: 3, or leave fsdp out"}};
constexpr Apart kBucketApart[] = {{kZero3, "what travels together is the unit", "set fsdp.unit, and leave bucket_bytes out"}};
constexpr Apart kZeroApart[] = {{kNothingToShard, "there is nothing to shard over", "set zero: 0, or dp above 1"}};
constexpr Apart kHybridApart[] = {{kNoZero, "nothing is sharded", "set zero: 1, 2 or 3"}};

constexpr Apart kSequenceApart[] = {
    {kInPlaceAlgorithm, ", which keeps partial sums in its source: sums of tokens are scattered to storage of their own",
     "use collective_algorithm: auto or direct, which send as much"},
};
constexpr std::string_view kMissing = " is not implemented in this version";
constexpr std::string_view kHalves = "a hop's two halves run on two streams, and NCCL takes them as one call";
constexpr Fact kAllTokens{[](const Case& c) { return !c.layout.sequence_parallel; },
                          [](const Case&) { return std::string("sequence_parallel=false"); }};
constexpr Apart kTensorOverlapApart[] = {
    {kAllTokens, "nobody gathers or scatters tokens", "set sequence_parallel: true, or tensor_overlap: false"},
    {kFp8, kMissing, "set tensor_overlap: false, or precision: bf16"},
    {kMixture, "a layer's router and its experts take all tokens at once", "set tensor_overlap: false"},
    {kLatent, "every rank narrows all tokens at once", "set tensor_overlap: false"},
    {kNccl, kHalves, "set tensor_overlap: false, or transport: one-gpu"},
};
constexpr Apart kContextApart[] = {
    {kNoCpKind, "nobody would attend to the tokens of other ranks",
     "set cp_kind: zigzag, ring, striped, all-gather, ulysses or usp, or cp: 1"},
    {kCompression, kMissing, "set cp: 1, or compression.kind: none"},
    {kServers, kMissing, "set cp: 1, or parameter_server.servers: 0"},
    {kDilocoAtAll, kMissing, "set cp: 1, or diloco.steps: 0"},
    {kZeroPlusPlus, kMissing, "set cp: 1, or leave zero_plus_plus out"},
    {kFp8, kMissing, "set cp: 1, or precision: bf16"},
};
constexpr Apart kChunksApart[] = {
    {kSecondary, ": it copies what forward gathers, and head and loss in pieces gather their weight in backward alone",
     "leave zero_plus_plus.secondary out, or set loss_chunks: 1"},
};
constexpr Apart kDocumentsApart[] = {
    {kCudnn, ", which is asked for whole sequences", "use attention: auto or own"},
};
constexpr Apart kExpertsApart[] = {
    {kWholeScales, "rows go to experts on other ranks, and the scale of a whole tensor is known to nobody before they have come",
     "use fp8_scaling: block"},
    {kScaledRouterLoss, "the loss scale does not reach the router's own losses",
     "use precision: bf16, or even the load with model.bias_update_rate and no such loss"},
    {kPowerSgd, "weights of experts are stacks of matrices", "use compression.kind: int8"},
};
constexpr Apart kLatentApart[] = {
    {kFp8, "its products have no scales yet", "use precision: bf16 or fp32"},
    {kCudnn, ", whose graphs here have one width of heads", "use attention: auto or own"},
};
constexpr Apart kWindowApart[] = {
    {kCudnn, ", whose graphs here know no windows", "use attention: auto or own"},
};
constexpr Apart kRouterBiasApart[] = {
    {kServers, kMissing, "set parameter_server.servers: 0, or model.bias_update_rate: 0"},
    {kDilocoAtAll, kMissing, "set diloco.steps: 0, or model.bias_update_rate: 0"},
};
constexpr Apart kAverageApart[] = {
    {kOptimizerAway, "weights are averaged where they are updated, and that on the device", "set offload.optimizer: none"},
    {kServers, "the servers have the weights, and the workers average what they have pulled", "set parameter_server.servers: 0"},
    {kDilocoAtAll, "each worker has weights of its own until the outer step", "set diloco.steps: 0"},
};
constexpr Apart kExpertParallelApart[] = {
    {kDense, "there are no experts to share", "set ep: 1, or model.experts"},
    {kHybridShard, kMissing, "set hybrid_shard: 0"},
    {kZeroPlusPlus, kMissing, "leave zero_plus_plus out"},
    {kCompression, kMissing, "set compression.kind: none"},
    {kServers, kMissing, "set parameter_server.servers: 0"},
    {kDilocoAtAll, kMissing, "set diloco.steps: 0"},
    {kCanonicalSlices, "each micro-batch is summed over the ranks by itself", "set zero: 0 or 2"},
};
constexpr Fact kNoExpertParallel{[](const Case& c) { return !shares_experts(c); }, [](const Case&) { return std::string("ep=1"); }};
constexpr Apart kWholeExpertsApart[] = {
    {kAllTokens, "every rank of tp would route all tokens, and send each row as often as there are ranks",
     "set sequence_parallel: true, so that a rank routes its own part of each sequence, or expert_tp: 0"},
    {kNoExpertParallel, "every rank of tp would have all experts whole, and the same",
     "set ep to a multiple of tp, so that ranks of tp share the experts, or expert_tp: 0"},
};
constexpr Apart kExpertBoundApart[] = {
    {kNoExpertParallel, "a rank has the rows of its own tokens, and room for all of them", "set ep, or expert_bound: 0"},
    {kCapacity, "the capacity bounds the rows that come, and the others are dropped",
     "set model.capacity_factor: 0, or expert_bound: 0"},
    {{validates_later, [](const Case& c) { return fmt::format("post_validation={}", c.train.post_validation); }},
     "two plans would make steps again, each its own",
     "set post_validation: 0, or expert_bound: 0"},
    {kFp16, "a loss scale starts and moves in a step that is made again too", "use precision: bf16, or expert_bound: 0"},
    {{[](const Case& c) { return c.layout.offload.delayed_update; }, [](const Case&) { return std::string("delayed_update"); }},
     "an update that is made beside the step cannot wait for the word that the step runs again",
     "set delayed_update: false, or expert_bound: 0"},
};
bool braids(const Case& c) { return c.layout.expert_overlap == ExpertOverlap::kMicroBatches; }
std::string braid_text(const Case&) { return "expert_overlap=micro-batches"; }
constexpr Apart kExpertOverlapApart[] = {
    {kNoExpertParallel, "no rows are exchanged", "set ep, or expert_overlap: none"},
};
constexpr Apart kBraidApart[] = {
    {{[](const Case& c) { return c.train.grad_accumulation < 2; }, [](const Case&) { return std::string("grad_accumulation=1"); }},
     "there is no other micro-batch",
     "set grad_accumulation: 2 or more, or expert_overlap: layer"},
    {{[](const Case& c) {
        return c.layout.pp > 1 && c.train.grad_accumulation > 1 && is_pipeline_decided(c) && check_pipeline(c).ok() &&
               !has_braids(c);
      },
      [](const Case& c) { return fmt::format("schedule={}", name_of(c.layout.schedule)); }},
     "no stage has the gradients of one micro-batch when it begins the forward of another",
     "use schedule: eager-1f1b, interleaved or dualpipe-v with more micro-batches than stages, or expert_overlap: layer"},
    {kZero3, "a unit's parameters are given up between the pieces of two micro-batches", "use expert_overlap: layer, or zero: 2"},
    {kActivationsAway, "what leaves after a forward would leave between its pieces",
     "use expert_overlap: layer, or offload.activations: none"},
    {{[](const Case& c) { return is_by_layer(c) && c.layout.recompute_options.layers.find("@cpu") != std::string::npos; },
      [](const Case&) { return std::string("a layer whose activations wait in host memory (@cpu)"); }},
     "what leaves after a forward would leave between its pieces",
     "use expert_overlap: layer, or leave @cpu out of recompute"},
};
constexpr Apart kRingApart[] = {
    {kNccl, kHalves, "use cp_kind: all-gather or ulysses, or transport: one-gpu"},
};

constexpr std::string_view kEightBits = "what layers keep in 8 bits has not been told apart layer by layer";
constexpr std::string_view kUntested = "no test has yet told such layers apart there";
constexpr std::string_view kOneForAll = "use one recompute for all layers";
constexpr Apart kBudgetApart[] = {
    {kMixedLayers, "layers are taken to be alike", "list what each layer makes again under recompute, as 3*full 5*none"},
    {kSomeLocal, "layers are taken to be alike", "list what each layer makes again under recompute, as 3*full 5*none"},
    {kSomeRecompute, "", "leave recompute out: what each layer makes again is chosen within the budget"},
    {kLateSchedule, "",
     "list what each layer makes again under recompute, as 3*full 5*none; or use schedule: 1f1b and even stages"},
    {kStageLayers, "", "list what each layer makes again under recompute, as 3*full 5*none; or use schedule: 1f1b and even stages"},
    {kActivationsAway, "", "leave offload.activations out: which layers wait in host memory is chosen within the budget"},
    {kFp8, kEightBits, "use precision: bf16, or one recompute for all layers"},
    {kDilocoAtAll, kUntested, kOneForAll},
    {kServers, kUntested, kOneForAll},
};
constexpr Apart kByLayerApart[] = {
    {kActivationsAway, "", "write @cpu after the treatment of each layer that is to wait in host memory"},
    {kFp8, kEightBits, "use precision: bf16, or one recompute for all layers"},
    {kDilocoAtAll, kUntested, kOneForAll},
    {kServers, kUntested, kOneForAll},
};

constexpr Apart kZeroPlusPlusApart[] = {
    {kNotZero3, "it changes how sharded parameters are gathered and their gradients scattered",
     "set zero: 3, or leave zero_plus_plus out"},
    {kParametersAway, "shards that wait outside the device are fetched as they are",
     "set offload.parameters: none, or leave zero_plus_plus out"},
};
constexpr Apart kSecondaryApart[] = {
    {kHybridShard, "each set of shards is whole within its ranks as it is", "set one of the two to 0"},
    {kNoReshard, "backward gathers nothing", "set fsdp.reshard: true, or zero_plus_plus.secondary: 0"},
};
constexpr std::string_view kFourBits = "they travel in 4 bits, and are added up in fp32";
constexpr Apart kScatterApart[] = {
    {kReduceDtype, kFourBits, "leave reduce_dtype out"},
    {kAccumulateDtype, kFourBits, "leave accumulate_dtype out"},
};

constexpr std::string_view kErrors = "errors are kept of fp32 gradients";
constexpr std::string_view kComesBack = "what a skipped step leaves in the errors would come back in the next";
constexpr std::string_view kNoSkips = "use precision: fp32 or bf16 and no guard, or compression.kind: none";
constexpr Apart kCompressionApart[] = {
    {kOneDp, "no gradient travels", "set dp above 1, or compression.kind: none"},
    {kSlices, "it leaves every rank a whole gradient, where each is to have a slice",
     "set zero: 0, or compression.kind: bf16 or int8, which scatter slices"},
    {kZero3, "what a rank owes of whole gradients would be as large as what it gives up",
     "set zero_plus_plus.gradients: true, which keeps no errors, or zero: 2"},
    {kReduceDtype, kErrors, "leave reduce_dtype out"},
    {kAccumulateDtype, kErrors, "leave accumulate_dtype out"},
    {kFp16, kComesBack, kNoSkips},
    {kGuard, kComesBack, kNoSkips},
};
constexpr Apart kPowerSgdApart[] = {
    {kTiedStages, "the two stages' parts of the table's gradient would be approximated each by itself",
     "set tied_embeddings: false, or compression.kind: int8"},
    {kTp, "slices of a matrix would be approximated each by itself", "set tp: 1, or compression.kind: int8"},
};
constexpr std::string_view kTwoGradients =
    "the table's two gradients are added after each has been reduced, and steps do not add up";
constexpr std::string_view kNoNorm = "no rank has the gradient whose norm that is";
constexpr Apart kOneBitApart[] = {
    {kNotAdam, "what it sends is Adam's momentum", "set optimizer: adamw, or compression.kind: int8"},
    {kTp, "slices of a bucket would share scales each by itself", "set tp: 1, or compression.kind: int8"},
    {kTiedStages, kTwoGradients, "set tied_embeddings: false, or compression.kind: int8"},
    {kTiedCanonical, kTwoGradients, "set tied_embeddings: false, or compression.kind: int8"},
    {kClipNorm, kNoNorm, "set clip_norm: 0 and grad_norm: false, or compression.kind: int8"},
    {kGradNorm, kNoNorm, "set clip_norm: 0 and grad_norm: false, or compression.kind: int8"},
    {kOptimizerAway, "momenta are compressed where they are kept, and travel between devices",
     "set offload.optimizer: none, or compression.kind: int8"},
};

constexpr Apart kServersApart[] = {
    {kOneDp, "there is one worker", "set dp above 1, or parameter_server.servers: 0"},
    {kAnyZero, "servers own the optimizer's state already", "set zero: 0, or parameter_server.servers: 0"},
    {kCompression, "what is compressed is an all-reduce", "set compression.kind: none, or parameter_server.servers: 0"},
    {kDiloco, "servers update at every step", "set diloco.steps: 0, or parameter_server.servers: 0"},
    {kNccl, kOwnWay, "use transport: one-gpu or threads, or zero: 1, which shards the optimizer alike"},
};
constexpr std::string_view kVersions = "a worker of several ranks would pull values of several versions";
constexpr std::string_view kAllGradients = "it is found from all gradients of a step, and servers apply them as they arrive";
constexpr Apart kStalenessApart[] = {
    {kNotThreads, "servers that apply what comes first meet their workers on the processor",
     "use transport: threads with backend: cpu"},
    {kTp, kVersions, "set tp: 1"},
    {kPp, kVersions, "set pp: 1"},
    {{kClipNorm.holds, [](const Case&) { return std::string("clip_norm"); }}, kAllGradients, "leave it out"},
    {kGradNorm, kAllGradients, "leave it out"},
    {kFp16, kAllGradients, "leave it out"},
    {kGuard, kAllGradients, "leave it out"},
    {kTied, "the table's gradient is a sum of two", "set tied_embeddings: false"},
    {kAnyOffload, "what moves is timed by the steps of one rank", "set offload: none"},
    {kNoOverlap, "a push never waits", "leave overlap out"},
    {kDelayedScales, "all workers agree on every step's sizes, and these are not in step", "use fp8_scaling: current or block"},
    {kCheckpoint, "there is no moment at which all ranks have made the same steps", "leave checkpoint out"},
};

constexpr std::string_view kAgree = "whether a step is skipped all ranks must agree on, and workers do not talk within a period";
constexpr Apart kDilocoApart[] = {
    {kOneDp, "one worker has nobody to average with", "set dp above 1"},
    {kAnyZero, "workers have parameters and moments of their own, and nothing to share out", "set zero: 0"},
    {kCompression, "no gradient travels", "set compression.kind: none"},
    {kOptimizerAway, "the outer step moves what the optimizer updates, and that on the device", "set offload.optimizer: none"},
    {kBuckets, "parameters are averaged where they are, one by one", "leave bucket_bytes out"},
    {kFp16, kAgree, "use precision: fp32 or bf16 and no guard"},
    {kGuard, kAgree, "use precision: fp32 or bf16 and no guard"},
    {kDelayedScales, "all ranks agree on every step's sizes, and workers do not talk within a period",
     "use fp8_scaling: current or block"},
    {kGradNorm, "each worker's gradient has a norm of its own, and none is the step's", "set grad_norm: false"},
    {kCheckpoint, "the moments belong to workers, and no other layout could take them up", "leave checkpoint out"},
};

constexpr Apart kPostValidationApart[] = {
    {{[](const Case& c) { return c.layout.pp == 1; }, [](const Case&) { return std::string("pp=1"); }},
     "there is no other stage to wait for",
     "set pp above 1"},
    {{[](const Case& c) { return c.train.clip_norm == 0 && c.train.guard.nonfinite == GuardAction::kNone; },
      [](const Case&) { return std::string("clip_norm=0 and guard.nonfinite=none"); }},
     "no stage waits for another before its update",
     "set clip_norm or guard.nonfinite"},
    {{judges_spikes, [](const Case& c) { return fmt::format("guard.spike={}", name_of(c.train.guard.spike)); }},
     "each step is judged by the mean of those before it, which are not yet valid",
     "set guard.spike: none"},
    {kFp16, "the loss scale of a step goes by the overflows of those before it", "use precision: bf16"},
    {kDilocoAtAll, "both repeat the step within a period", "set diloco.steps: 0"},
    {kServers, kMissing, "use zero: 1, which shards the optimizer alike"},
    {{is_compression<Kind::kOneBitAdam>, compression_text},
     "a run has one second plan, and both need it",
     "use compression.kind: int8"},
    {kOptimizerAway, "states wait outside the device, and what is kept of them would too", "set offload.optimizer: none"},
};

constexpr Apart kLossScaleApart[] = {
    {kNotFp16, "only fp16 gradients need a scale", "set precision: fp16, or leave the keys of the loss scale out"},
};
constexpr Apart kFp8Apart[] = {{kCuda, ", which has no kernels of it", "use precision: bf16, or backend: cpu"}};
constexpr Apart kNonfiniteApart[] = {
    {kFp16, ", whose loss scale overflows on purpose and skips such steps", "leave guard.nonfinite out, or use precision: bf16"},
};
constexpr Apart kCheckpointApart[] = {{kDry, ", which holds no values", "use backend: cpu, or leave checkpoint out"}};
constexpr Apart kCanonicalApart[] = {
    {kNccl, "NCCL sums in an order of its own", "use transport: one-gpu, or canonical: false"},
    {kOwnAlgorithm, "", "only direct sums in canonical order"},
};

// --- values dealt to the tests of pairs -------------------------------------------------------------------------------------------

void two_workers(Case& c) {
  if (c.layout.dp == 1) c.layout.dp = 2;
}

template <Schedule schedule>
void stages(Case& c) {
  c.layout.pp = 2;
  c.layout.schedule = schedule;
  c.layout.vpp = is_looped(schedule) ? 2 : 1;
}

template <int zero>
void shard(Case& c) {
  c.layout.zero = zero;
  two_workers(c);
}

/// Beside what is set of it already.
void plus_plus(Case& c, const ZeroPlusPlus& part) {
  ZeroPlusPlus& z = c.layout.zero_plus_plus;
  z = {.weights = z.weights || part.weights,
       .secondary = std::max(z.secondary, part.secondary),
       .gradients = z.gradients || part.gradients};
  if (c.layout.dp == 1) c.layout.dp = 4;
  if (z.secondary > 0) c.layout.dp = std::max(c.layout.dp, 2 * z.secondary);
  if (c.layout.zero == 0) c.layout.zero = 3;
}

template <Kind kind>
void compress(Case& c) {
  c.layout.compression.kind = kind;
  if constexpr (kind == Kind::kOneBitAdam) c.layout.compression.warmup = 1;
  two_workers(c);
}

void serve(Case& c) {
  c.layout.parameter_server.servers = 2;
  two_workers(c);
}

void narrow(Case& c, Precision precision) {
  if (c.train.precision == Precision::kFp32) c.train.precision = precision;
}

template <OffloadTo where>
void stream_parameters(Case& c) {
  c.layout.offload.parameters = where;
  if (c.layout.offload.optimizer == OffloadTo::kNone) c.layout.offload.optimizer = where;
  if (c.layout.zero == 0) c.layout.zero = 3;
}

constexpr Choice kDpChoices[] = {{"dp: 2", [](Case& c) { c.layout.dp = std::max(c.layout.dp, 2); }}};
constexpr Choice kTpChoices[] = {{"tp: 2", [](Case& c) { c.layout.tp = 2; }}};
constexpr Choice kSequenceChoices[] = {{"sequence_parallel", [](Case& c) {
                                          c.layout.tp = std::max(c.layout.tp, 2);
                                          c.layout.sequence_parallel = true;
                                        }}};
constexpr Choice kOverlapChoices[] = {{"tensor_overlap", [](Case& c) {
                                         kSequenceChoices[0].set(c);
                                         c.layout.tensor_overlap = true;
                                       }}};
template <ContextKind kind>
void cut_sequences(Case& c) {
  c.layout.cp = 2;
  c.layout.cp_kind = kind;
  c.train.micro_batch = 1;  // canonical sums over the parts of one sequence
}
constexpr Choice kContextChoices[] = {{"cp_kind: all-gather", cut_sequences<ContextKind::kAllGather>},
                                      {"cp_kind: ring", cut_sequences<ContextKind::kRing>},
                                      {"cp_kind: zigzag", cut_sequences<ContextKind::kZigzag>},
                                      {"cp_kind: striped", cut_sequences<ContextKind::kStriped>},
                                      {"cp_kind: ulysses", cut_sequences<ContextKind::kUlysses>},
                                      {"cp_kind: usp", [](Case& c) {
                                         cut_sequences<ContextKind::kUsp>(c);
                                         c.layout.cp = 4;
                                         c.layout.cp_ulysses = 2;
                                       }}};
void mix_experts(Case& c) {
  c.model.family = Family::kLlama;
  const Experts& said = c.model.experts;
  c.model.experts = {
      .count = 4, .top_k = 2, .ffn = 64, .bias_update_rate = said.bias_update_rate, .capacity_factor = said.capacity_factor};
}
constexpr Choice kExpertChoices[] = {{"ep: 2", [](Case& c) {
                                        mix_experts(c);
                                        c.layout.dp = std::max(c.layout.dp, 2);
                                        c.layout.ep = 2;
                                      }}};
constexpr Choice kWholeExpertChoices[] = {{"expert_tp: 1", [](Case& c) {
                                             mix_experts(c);
                                             c.layout.tp = std::max(c.layout.tp, 2);
                                             c.layout.sequence_parallel = true;
                                             c.layout.ep = c.layout.tp * c.layout.cp;
                                             c.layout.expert_tp = 1;
                                           }}};
template <ExpertOverlap overlap>
void hide_exchanges(Case& c) {
  mix_experts(c);
  c.layout.dp = std::max(c.layout.dp, 2);
  c.layout.ep = 2;
  c.layout.expert_overlap = overlap;
  if (overlap == ExpertOverlap::kMicroBatches) c.train.grad_accumulation = std::max<int64_t>(c.train.grad_accumulation, 2);
}
constexpr Choice kExpertOverlapChoices[] = {{"expert_overlap: layer", hide_exchanges<ExpertOverlap::kLayer>},
                                            {"expert_overlap: micro-batches", hide_exchanges<ExpertOverlap::kMicroBatches>}};
constexpr Choice kExpertBoundChoices[] = {{"expert_bound: 1.5", [](Case& c) {
                                             mix_experts(c);
                                             c.layout.dp = std::max(c.layout.dp, 2);
                                             c.layout.ep = 2;
                                             c.layout.expert_bound = 1.5f;
                                             c.train.micro_batch = std::max<int64_t>(c.train.micro_batch, 2);
                                           }}};
constexpr Choice kBiasChoices[] = {{"model.bias_update_rate: 0.01", [](Case& c) {
                                      mix_experts(c);
                                      c.model.experts.bias_update_rate = 0.01f;
                                    }}};
constexpr Choice kLatentChoices[] = {{"model.kv_lora_rank: 24", [](Case& c) {
                                        c.model.family = Family::kLlama;
                                        c.model.latent = {.q_rank = 32, .kv_rank = 24, .nope = 12, .rope = 8, .v = 16};
                                        c.model.head_dim = 20;
                                      }}};
constexpr Choice kWindowChoices[] = {{"model.window: 5", [](Case& c) { c.model.window = {.tokens = 5, .global_every = 2}; }}};
constexpr Choice kCapacityChoices[] = {{"model.capacity_factor: 1.25", [](Case& c) {
                                          mix_experts(c);
                                          c.model.experts.capacity_factor = 1.25f;
                                        }}};
constexpr Choice kChunkChoices[] = {{"loss_chunks: 4", [](Case& c) { c.layout.loss_chunks = 4; }}};
constexpr Choice kDocumentChoices[] = {{"data.packed: true", [](Case& c) { c.data.packed = true; }}};
constexpr Choice kPpChoices[] = {{"pp: 2, afab", stages<Schedule::kAfab>},
                                 {"pp: 2, 1f1b", stages<Schedule::k1F1B>},
                                 {"pp: 2, interleaved", stages<Schedule::kInterleaved>},
                                 {"pp: 2, zb-h1", stages<Schedule::kZbH1>},
                                 {"pp: 2, zb-v", stages<Schedule::kZbV>}};
constexpr Choice kAccumulationChoices[] = {{"grad_accumulation: 4", [](Case& c) { c.train.grad_accumulation = 4; }}};
constexpr Choice kBucketChoices[] = {{"bucket_bytes: 1Mi", [](Case& c) { c.layout.bucket_bytes = 1 << 20; }}};
constexpr Choice kZeroChoices[] = {{"zero: 1", shard<1>}, {"zero: 2", shard<2>}, {"zero: 3", shard<3>}};
constexpr Choice kHybridChoices[] = {{"hybrid_shard: 2", [](Case& c) {
                                        c.layout.dp = 4;
                                        c.layout.hybrid_shard = 2;
                                        if (c.layout.zero == 0) c.layout.zero = 3;
                                      }}};
constexpr Choice kWeightChoices[] = {{"zero_plus_plus.weights", [](Case& c) { plus_plus(c, {.weights = true}); }}};
constexpr Choice kSecondaryChoices[] = {{"zero_plus_plus.secondary: 2", [](Case& c) { plus_plus(c, {.secondary = 2}); }}};
constexpr Choice kScatterChoices[] = {{"zero_plus_plus.gradients", [](Case& c) { plus_plus(c, {.gradients = true}); }}};
constexpr Choice kFullChoices[] = {{"recompute: full", [](Case& c) { c.layout.recompute = Recompute::kFull; }},
                                   {"recompute_options.every: 2", [](Case& c) {
                                      c.layout.recompute_options.every = 2;
                                      if (c.layout.recompute == Recompute::kNone) c.layout.recompute = Recompute::kFull;
                                    }}};
constexpr Choice kSelectiveChoices[] = {{"recompute: selective", [](Case& c) { c.layout.recompute = Recompute::kSelective; }}};
constexpr Choice kByLayerChoices[] = {{"recompute: layer by layer", [](Case& c) {
                                         std::vector<LayerTreatment> layers(static_cast<size_t>(c.model.layers));
                                         layers.front() = {.full = true, .parked = true};
                                         c.layout.recompute = Recompute::kByLayer;
                                         c.layout.recompute_options.layers = treatments_text(layers);
                                       }}};
constexpr Choice kActivationsChoices[] = {
    {"offload.activations: cpu", [](Case& c) { c.layout.offload.activations = OffloadTo::kCpu; }},
    {"offload.activations: nvme", [](Case& c) { c.layout.offload.activations = OffloadTo::kNvme; }}};
constexpr Choice kOptimizerChoices[] = {
    {"offload.optimizer: cpu", [](Case& c) { c.layout.offload.optimizer = OffloadTo::kCpu; }},
    {"offload.optimizer: nvme", [](Case& c) { c.layout.offload.optimizer = OffloadTo::kNvme; }}};
constexpr Choice kServersChoices[] = {{"parameter_server.servers: 2", serve}};
constexpr Choice kStalenessChoices[] = {{"parameter_server.staleness: 1", [](Case& c) {
                                           serve(c);
                                           c.layout.parameter_server.staleness = 1;
                                         }}};
constexpr Choice kDelayedChoices[] = {{"delayed_update", [](Case& c) {
                                         c.layout.offload.delayed_update = true;
                                         if (c.layout.offload.optimizer == OffloadTo::kNone)
                                           c.layout.offload.optimizer = OffloadTo::kCpu;
                                       }}};
constexpr Choice kParametersChoices[] = {{"offload.parameters: cpu", stream_parameters<OffloadTo::kCpu>},
                                         {"offload.parameters: nvme", stream_parameters<OffloadTo::kNvme>}};
constexpr Choice kQuantisedChoices[] = {{"compression: bf16", compress<Kind::kBf16>}, {"compression: int8", compress<Kind::kInt8>}};
constexpr Choice kSparseChoices[] = {{"compression: top-k", compress<Kind::kTopK>},
                                     {"compression: random-k", compress<Kind::kRandomK>}};
constexpr Choice kPowerSgdChoices[] = {{"compression: powersgd", compress<Kind::kPowerSgd>}};
constexpr Choice kOneBitChoices[] = {{"compression: one-bit-adam", compress<Kind::kOneBitAdam>}};
constexpr Choice kDilocoChoices[] = {{"diloco.steps: 4", [](Case& c) {
                                        c.layout.diloco.steps = 4;
                                        two_workers(c);
                                      }}};
constexpr Choice kPrecisionChoices[] = {{"precision: bf16", [](Case& c) { c.train.precision = Precision::kBf16; }},
                                        {"precision: fp16", [](Case& c) { c.train.precision = Precision::kFp16; }},
                                        {"precision: fp8", [](Case& c) { c.train.precision = Precision::kFp8; }},
                                        {"accumulate_dtype: bf16", [](Case& c) {
                                           c.train.accumulate_dtype = "bf16";
                                           narrow(c, Precision::kBf16);
                                         }}};
template <Fp8Scaling scaling>
void scale_fp8(Case& c) {
  c.train.fp8_scaling = scaling;
  narrow(c, Precision::kFp8);
}
constexpr Choice kFp8Choices[] = {{"fp8_scaling: delayed", scale_fp8<Fp8Scaling::kDelayed>},
                                  {"fp8_scaling: block", scale_fp8<Fp8Scaling::kBlock>}};
constexpr Choice kLossScaleChoices[] = {{"loss_scale: 1024", [](Case& c) {
                                           c.train.loss_scale = 1024;
                                           narrow(c, Precision::kFp16);
                                         }}};
constexpr Choice kTiedChoices[] = {{"tied_embeddings", [](Case& c) { c.model.tied_embeddings = true; }}};
constexpr Choice kDropoutChoices[] = {{"dropout: 0.1", [](Case& c) { c.train.dropout = 0.1f; }}};
constexpr Choice kClipChoices[] = {{"clip_norm: 1", [](Case& c) { c.train.clip_norm = 1; }}};
constexpr Choice kAverageChoices[] = {{"ema_decay: 0.9", [](Case& c) { c.train.ema_decay = 0.9f; }}};
constexpr Choice kGuardChoices[] = {{"guard.nonfinite: skip", [](Case& c) { c.train.guard.nonfinite = GuardAction::kSkip; }},
                                    {"guard.spike: skip", [](Case& c) { c.train.guard.spike = GuardAction::kSkip; }}};
constexpr Choice kPostValidationChoices[] = {{"post_validation: 5", [](Case& c) {
                                                if (c.layout.pp == 1) stages<Schedule::k1F1B>(c);
                                                if (c.train.clip_norm == 0) c.train.clip_norm = 1;
                                                c.train.post_validation = 5;
                                              }}};
template <Optimizer optimizer>
void update_by(Case& c) {
  c.train.optimizer = optimizer;
}
constexpr Choice kUpdateChoices[] = {{"optimizer: lion", update_by<Optimizer::kLion>},
                                     {"optimizer: adamw8bit", update_by<Optimizer::kAdamW8bit>}};
constexpr Choice kCanonicalChoices[] = {{"canonical", [](Case& c) { c.canonical = true; }}};
constexpr Choice kAlgorithmChoices[] = {
    {"collective_algorithm: ring", [](Case& c) { c.layout.collective_algorithm = AlgorithmChoice::kRing; }}};
constexpr Choice kCheckpointChoices[] = {{"checkpoint.save_every: 10", [](Case& c) { c.checkpoint.save_every = 10; }}};
constexpr Choice kExecutionChoices[] = {{"backend: cuda",
                                         [](Case& c) {
                                           c.backend = BackendKind::kCuda;
                                           if (c.transport == TransportKind::kThreads) c.transport = TransportKind::kOneGpu;
                                         }},
                                        {"transport: nccl",
                                         [](Case& c) {
                                           c.backend = BackendKind::kCuda;
                                           c.transport = TransportKind::kNccl;
                                         }},
                                        {"transport: processes", [](Case& c) { c.transport = TransportKind::kProcesses; }},
                                        {"transport: tcp", [](Case& c) { c.transport = TransportKind::kTcp; }}};

// --- the table -----------------------------------------------------------------------------------------------------------------------

template <int stage>
bool is_zero(const Case& c) {
  return c.layout.zero == stage;
}

constexpr std::array kTable{
    // Axes, stages and how gradients travel.
    Technique{.id = "mirrored-stages",
              .on = [](const Case& c) { return is_mirrored(c.layout.schedule); },
              .text = schedule_text,
              .apart = kMirroredApart,
              .check = check_mirrored},
    Technique{.id = "zero",
              .on = [](const Case& c) { return c.layout.zero != 0; },
              .text = zero_text,
              .apart = kZeroApart,
              .check = check_zero,
              .choices = kZeroChoices},
    Technique{.id = "offload-parameters",
              .on = parks_parameters,
              .text = parameters_text,
              .apart = kParametersApart,
              .choices = kParametersChoices},
    Technique{.id = "delayed-update",
              .on = [](const Case& c) { return c.layout.offload.delayed_update; },
              .text = [](const Case&) { return std::string("delayed_update"); },
              .apart = kDelayedApart,
              .or_else = "or set delayed_update: false",
              .choices = kDelayedChoices},
    Technique{.id = "narrow-gradients",
              .on = [](const Case& c) { return kReduceDtype.holds(c) || kAccumulateDtype.holds(c); },
              .check = check_gradient_dtypes},
    Technique{.id = "execution", .on = always, .check = check_execution, .choices = kExecutionChoices},
    Technique{.id = "collective-algorithm",
              .on = [](const Case& c) { return c.layout.collective_algorithm != AlgorithmChoice::kAuto; },
              .text = kOwnAlgorithm.text,
              .apart = kAlgorithmApart,
              .choices = kAlgorithmChoices},
    Technique{.id = "device-libraries", .on = always, .check = check_device_libraries},
    Technique{.id = "tensor-parallel", .on = kTp.holds, .check = check_tensor_parallel, .choices = kTpChoices},
    Technique{.id = "sequence-parallel",
              .on = cuts_tokens,
              .text = kCutTokens.text,
              .apart = kSequenceApart,
              .check = check_sequence_parallel,
              .choices = kSequenceChoices},
    Technique{.id = "tensor-overlap",
              .on = [](const Case& c) { return c.layout.tensor_overlap && c.layout.tp > 1; },
              .text = [](const Case&) { return std::string("tensor_overlap"); },
              .apart = kTensorOverlapApart,
              .check = check_tensor_overlap,
              .choices = kOverlapChoices},
    Technique{.id = "pipeline", .on = always, .check = check_pipeline, .choices = kPpChoices},
    Technique{
        .id = "accumulation", .on = [](const Case& c) { return c.train.grad_accumulation > 1; }, .choices = kAccumulationChoices},
    Technique{.id = "data-parallel",
              .on =
                  [](const Case& c) {
                    return (c.layout.data_ranks() > 1 || is_mirrored(c.layout.schedule)) && c.layout.zero == 0 && !has_servers(c) &&
                           !trains_apart(c) && !compresses(c);
                  },
              .choices = kDpChoices},
    Technique{.id = "hybrid-shard",
              .on = [](const Case& c) { return c.layout.hybrid_shard != 0; },
              .text = kHybridShard.text,
              .apart = kHybridApart,
              .check = check_hybrid_shard,
              .choices = kHybridChoices},
    Technique{.id = "fsdp-options",
              .on = [](const Case& c) { return !(c.layout.fsdp == Fsdp{}); },
              .text = [](const Case&) { return std::string("fsdp options"); },
              .apart = kFsdpApart,
              .check = check_fsdp},
    Technique{.id = "buckets", .on = kBuckets.holds, .text = kBuckets.text, .apart = kBucketApart, .choices = kBucketChoices},
    Technique{.id = "zero-1", .on = is_zero<1>},
    Technique{.id = "zero-2", .on = is_zero<2>},
    Technique{.id = "zero-3", .on = is_zero<3>},
    Technique{.id = "halving-doubling",
              .on = [](const Case& c) { return c.layout.collective_algorithm == AlgorithmChoice::kHalvingDoubling; },
              .check = check_halving_doubling},
    Technique{.id = "hierarchical",
              .on = [](const Case& c) { return c.layout.collective_algorithm == AlgorithmChoice::kHierarchical; },
              .check = check_hierarchical},
    // Parts of sequences.
    Technique{.id = "context-parallel",
              .on = cuts_sequences,
              .text = [](const Case& c) { return fmt::format("cp={}", c.layout.cp); },
              .apart = kContextApart,
              .check = check_context_parallel,
              .choices = kContextChoices},
    Technique{.id = "experts",
              .on = [](const Case& c) { return c.model.is_mixture(); },
              .text = [](const Case& c) { return fmt::format("model.experts={}", c.model.experts.count); },
              .apart = kExpertsApart},
    Technique{.id = "router-bias",
              .on = [](const Case& c) { return c.model.experts.has_bias(); },
              .text = [](const Case& c) { return fmt::format("model.bias_update_rate={}", c.model.experts.bias_update_rate); },
              .apart = kRouterBiasApart,
              .choices = kBiasChoices},
    Technique{.id = "expert-capacity", .on = kCapacity.holds, .text = kCapacity.text, .choices = kCapacityChoices},
    Technique{.id = "head-norm",
              .on = [](const Case& c) { return c.model.qk_norm; },
              .text = [](const Case&) { return std::string("model.qk_norm=true"); },
              .check = check_head_norm},
    Technique{.id = "latent-attention",
              .on = kLatent.holds,
              .text = kLatent.text,
              .apart = kLatentApart,
              .check = check_latent_attention,
              .choices = kLatentChoices},
    Technique{.id = "sliding-window",
              .on = [](const Case& c) { return c.model.has_windows(); },
              .text = [](const Case& c) { return fmt::format("model.window={}", c.model.window.tokens); },
              .apart = kWindowApart,
              .choices = kWindowChoices},
    Technique{.id = "expert-slices", .on = [](const Case& c) { return c.layout.expert_tp != 0; }, .check = check_expert_slices},
    Technique{.id = "whole-experts",
              .on = [](const Case& c) { return c.layout.folds_experts(); },
              .text = [](const Case& c) { return fmt::format("expert_tp={}", c.layout.expert_tp); },
              .apart = kWholeExpertsApart,
              .choices = kWholeExpertChoices},
    Technique{.id = "expert-parallel",
              .on = shares_experts,
              .text = [](const Case& c) { return fmt::format("ep={}", c.layout.ep); },
              .apart = kExpertParallelApart,
              .or_else = "or ep: 1",
              .check = check_expert_parallel,
              .choices = kExpertChoices},
    Technique{.id = "expert-bound",
              .on = bounds_experts,
              .text = [](const Case& c) { return fmt::format("expert_bound={}", c.layout.expert_bound); },
              .apart = kExpertBoundApart,
              .check = check_expert_bound,
              .choices = kExpertBoundChoices},
    Technique{.id = "expert-overlap",
              .on = [](const Case& c) { return c.layout.expert_overlap != ExpertOverlap::kNone; },
              .text = [](const Case& c) { return fmt::format("expert_overlap={}", name_of(c.layout.expert_overlap)); },
              .apart = kExpertOverlapApart,
              .choices = kExpertOverlapChoices},
    Technique{
        .id = "expert-placement", .on = [](const Case& c) { return !c.layout.expert_placement.empty(); }, .check = check_placement},
    Technique{.id = "braided-micro-batches", .on = braids, .text = braid_text, .apart = kBraidApart},
    Technique{.id = "ring-attention", .on = sends_in_rings, .text = context_text, .apart = kRingApart},
    Technique{.id = "head-exchange",
              .on = [](const Case& c) { return c.layout.cp > 1 && c.layout.head_ranks() > 1; },
              .check = check_head_exchange},
    Technique{.id = "chunked-loss",
              .on = [](const Case& c) { return c.layout.loss_chunks > 1; },
              .text = [](const Case& c) { return fmt::format("loss_chunks={}", c.layout.loss_chunks); },
              .apart = kChunksApart,
              .check = check_loss_chunks,
              .choices = kChunkChoices},
    Technique{.id = "document-settings", .on = always, .check = check_documents},
    Technique{.id = "routing-settings", .on = always, .check = check_routing},
    Technique{.id = "packed-documents",
              .on = [](const Case& c) { return c.data.packed; },
              .text = [](const Case&) { return std::string("data.packed=true"); },
              .apart = kDocumentsApart,
              .choices = kDocumentChoices},
    // What is made again, and what waits elsewhere.
    Technique{.id = "recompute", .on = always, .check = check_recompute},
    Technique{.id = "recompute-budget", .on = has_budget, .text = budget_text, .apart = kBudgetApart, .check = check_budget},
    Technique{.id = "full-recompute",
              .on = [](const Case& c) { return c.layout.recompute == Recompute::kFull; },
              .choices = kFullChoices},
    Technique{.id = "selective-recompute",
              .on = [](const Case& c) { return c.layout.recompute == Recompute::kSelective; },
              .choices = kSelectiveChoices},
    Technique{.id = "recompute-by-layer",
              .on = is_by_layer,
              .text = [](const Case&) { return std::string("recompute layer by layer"); },
              .apart = kByLayerApart,
              .check = check_by_layer,
              .choices = kByLayerChoices},
    Technique{.id = "offload-activations",
              .on = parks_activations,
              .text = kActivationsAway.text,
              .apart = kActivationsApart,
              .choices = kActivationsChoices},
    Technique{.id = "offload-gradients", .on = updates_on_host},
    Technique{.id = "offload-optimizer", .on = updates_on_host, .choices = kOptimizerChoices},
    // Gradients and parameters on the wire.
    Technique{.id = "zero-plus-plus", .on = kZeroPlusPlus.holds, .text = kZeroPlusPlus.text, .apart = kZeroPlusPlusApart},
    Technique{
        .id = "quantised-weights", .on = [](const Case& c) { return c.layout.zero_plus_plus.weights; }, .choices = kWeightChoices},
    Technique{.id = "secondary-shard",
              .on = [](const Case& c) { return c.layout.zero_plus_plus.secondary != 0; },
              .text = secondary_text,
              .apart = kSecondaryApart,
              .check = check_secondary,
              .choices = kSecondaryChoices},
    Technique{.id = "quantised-scatter",
              .on = [](const Case& c) { return c.layout.zero_plus_plus.gradients; },
              .text = [](const Case&) { return std::string("zero_plus_plus.gradients"); },
              .apart = kScatterApart,
              .choices = kScatterChoices},
    Technique{.id = "compression", .on = compresses, .text = compression_text, .apart = kCompressionApart},
    Technique{.id = "quantised-gradients",
              .on = [](const Case& c) { return c.layout.zero == 0 && is_compression<Kind::kBf16, Kind::kInt8>(c); },
              .choices = kQuantisedChoices},
    Technique{.id = "compressed-scatter",
              .on = [](const Case& c) { return c.layout.zero > 0 && is_compression<Kind::kBf16, Kind::kInt8>(c); }},
    Technique{.id = "one-bit-adam",
              .on = is_compression<Kind::kOneBitAdam>,
              .text = compression_text,
              .apart = kOneBitApart,
              .check = check_one_bit_adam,
              .choices = kOneBitChoices},
    Technique{.id = "integer-codes", .on = is_compression<Kind::kInt8>, .check = check_codes},
    Technique{.id = "powersgd",
              .on = is_compression<Kind::kPowerSgd>,
              .text = compression_text,
              .apart = kPowerSgdApart,
              .check = check_powersgd,
              .choices = kPowerSgdChoices},
    Technique{.id = "sparse-gradients",
              .on = is_compression<Kind::kTopK, Kind::kRandomK>,
              .text = compression_text,
              .check = check_selection,
              .choices = kSparseChoices},
    // Who updates, and when.
    Technique{.id = "parameter-server-settings", .on = always, .check = check_server_settings},
    Technique{.id = "parameter-server",
              .on = has_servers,
              .text = servers_text,
              .apart = kServersApart,
              .check = check_servers,
              .choices = kServersChoices},
    Technique{.id = "bounded-staleness",
              .on = [](const Case& c) { return has_servers(c) && runs_apart(c); },
              .text = staleness_text,
              .apart = kStalenessApart,
              .or_else = "or set parameter_server.staleness: sync",
              .choices = kStalenessChoices},
    Technique{.id = "diloco",
              .on = [](const Case& c) { return c.layout.diloco.steps != 0; },
              .text = diloco_text,
              .apart = kDilocoApart,
              .or_else = "or diloco.steps: 0",
              .check = check_diloco,
              .choices = kDilocoChoices},
    Technique{.id = "local-workers", .on = trains_apart},
    // Numbers.
    Technique{.id = "mixed-precision", .on = narrows, .choices = kPrecisionChoices},
    Technique{.id = "master-weights", .on = narrows},
    Technique{.id = "loss-scale-settings",
              .on = sets_loss_scale,
              .text = [](const Case&) { return std::string("loss_scale"); },
              .apart = kLossScaleApart},
    Technique{.id = "loss-scale", .on = scales_loss, .check = check_loss_scale, .choices = kLossScaleChoices},
    Technique{.id = "scaled-loss", .on = scales_loss},
    Technique{.id = "fp8",
              .on = multiplies_in_fp8,
              .text = precision_text,
              .apart = kFp8Apart,
              .check = check_fp8_blocks,
              .choices = kFp8Choices},
    Technique{.id = "amax-history", .on = delays_scales},
    Technique{.id = "tied-embeddings-early",
              .on = [](const Case& c) { return c.model.tied_embeddings && tied_gradients_meet_early(c); }},
    Technique{.id = "tied-embeddings",
              .on = [](const Case& c) { return c.model.tied_embeddings && !tied_gradients_meet_early(c); },
              .choices = kTiedChoices},
    Technique{.id = "dropout", .on = [](const Case& c) { return c.train.dropout > 0; }, .choices = kDropoutChoices},
    Technique{.id = "clip-norm", .on = kClipNorm.holds, .choices = kClipChoices},
    Technique{.id = "nonfinite-guard",
              .on = [](const Case& c) { return c.train.guard.nonfinite != GuardAction::kNone; },
              .text = [](const Case& c) { return fmt::format("guard.nonfinite={}", name_of(c.train.guard.nonfinite)); },
              .apart = kNonfiniteApart},
    Technique{.id = "guard", .on = kGuard.holds, .check = check_guard, .choices = kGuardChoices},
    Technique{.id = "skipped-update", .on = [](const Case& c) { return may_skip(c) || bounds_experts(c); }},
    Technique{.id = "weight-average",
              .on = [](const Case& c) { return c.train.ema_decay > 0; },
              .text = [](const Case& c) { return fmt::format("ema_decay={}", c.train.ema_decay); },
              .apart = kAverageApart,
              .or_else = "or ema_decay: 0",
              .choices = kAverageChoices},
    Technique{.id = "post-validation",
              .on = validates_later,
              .text = [](const Case& c) { return fmt::format("post_validation={}", c.train.post_validation); },
              .apart = kPostValidationApart,
              .or_else = "or post_validation: 0",
              .check = check_post_validation,
              .choices = kPostValidationChoices},
    Technique{.id = "optimizer", .on = [](const Case& c) { return !updates_on_host(c); }, .choices = kUpdateChoices},
    Technique{.id = "state", .on = always},
    Technique{.id = "metrics", .on = always},
    Technique{.id = "unused-settings", .on = always, .check = check_unused},
    Technique{.id = "checkpoint",
              .on = kCheckpoint.holds,
              .text = kCheckpoint.text,
              .apart = kCheckpointApart,
              .check = check_checkpoint,
              .choices = kCheckpointChoices},
    Technique{.id = "canonical",
              .on = [](const Case& c) { return c.canonical; },
              .text = [](const Case&) { return std::string("canonical"); },
              .apart = kCanonicalApart,
              .check = check_canonical,
              .choices = kCanonicalChoices},
};

constexpr bool are_unique() {
  for (size_t i = 0; i < kTable.size(); ++i)
    for (size_t j = 0; j < i; ++j)
      if (kTable[i].id == kTable[j].id) return false;
  return true;
}
static_assert(are_unique());

Error refusal_by(const Technique& technique, const Apart& row, const Case& c) {
  std::string message = fmt::format("{} with {}", technique.text(c), row.from.text(c));
  if (!row.because.empty())
    message += (row.because.front() == ',' || row.because.front() == ' ' ? "" : ": ") + std::string(row.because);
  std::string instead(row.instead);
  if (!technique.or_else.empty()) instead += ", " + std::string(technique.or_else);
  return refusal(std::move(message), std::move(instead), row.because == kMissing ? ErrorKind::kMissing : ErrorKind::kApart);
}

}  // namespace

std::span<const Technique> techniques() { return kTable; }

const Technique& technique(std::string_view id) {
  const auto found = std::ranges::find(kTable, id, &Technique::id);
  SHARDLAB_CHECK(found != kTable.end(), "no row of plan/techniques.cpp is called `{}`", id);
  return *found;
}

bool tied_gradients_meet_early(const Case& c) { return !c.canonical && c.layout.zero < 2 && ends_share_stage(c); }

Result<void> check_techniques(const Case& c) {
  for (const Technique& t : kTable) {
    if (!t.on(c)) continue;
    for (const Apart& row : t.apart)
      if (row.from.holds(c)) return refusal_by(t, row, c);
    if (t.check != nullptr) SHARDLAB_TRY(t.check(c));
  }
  return {};
}

Case second_run_of(Case c) {
  c.train.grad_accumulation *= c.train.micro_batch;
  c.train.micro_batch = 1;
  c.layout.expert_bound = 0;
  return c;
}

}  // namespace shardlab
