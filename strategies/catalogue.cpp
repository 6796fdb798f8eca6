#include "strategies/catalogue.h"

#include <array>

#include "strategies/accumulation.h"
#include "strategies/chunked_loss.h"
#include "strategies/clip_norm.h"
#include "strategies/compression.h"
#include "strategies/context_parallel.h"
#include "strategies/data_parallel.h"
#include "strategies/diloco.h"
#include "strategies/draft.h"
#include "strategies/expert_bound.h"
#include "strategies/expert_overlap.h"
#include "strategies/expert_parallel.h"
#include "strategies/fp8.h"
#include "strategies/fsdp.h"
#include "strategies/guard.h"
#include "strategies/hybrid_shard.h"
#include "strategies/loss_scale.h"
#include "strategies/mixed_precision.h"
#include "strategies/offload_activations.h"
#include "strategies/offload_gradients.h"
#include "strategies/offload_optimizer.h"
#include "strategies/offload_parameters.h"
#include "strategies/optimizer.h"
#include "strategies/parameter_server.h"
#include "strategies/pipeline.h"
#include "strategies/post_validation.h"
#include "strategies/recompute.h"
#include "strategies/router_bias.h"
#include "strategies/sequence_parallel.h"
#include "strategies/skipped_update.h"
#include "strategies/state.h"
#include "strategies/tensor_overlap.h"
#include "strategies/tensor_parallel.h"
#include "strategies/tied_embeddings.h"
#include "strategies/weight_average.h"
#include "strategies/whole_experts.h"
#include "strategies/zero1.h"
#include "strategies/zero2.h"

namespace shardlab::strategies {

std::string_view name_of(Tier tier) {
  switch (tier) {
    case Tier::kE0: return "E0";
    case Tier::kE1: return "E1";
    case Tier::kE2: return "E2";
    case Tier::kE3: return "E3";
  }
  return "?";
}

namespace {

/// The pass of a technique that changes how other passes gather, scatter or update, and has its place in theirs: FSDP's, ZeRO's
/// and the host's optimizer ask for it where they act.
void within_other_passes(Draft&) {}

constexpr std::array kCatalogue{
    Strategy{"mixed-precision", "16-bit parameters and activations, fp32 sums", Tier::kE2,
             "precision: bf16, fp16 or fp8, accumulate_dtype", "nothing; half the bytes on the wire",
             "parameters and activations 1/2", "Micikevicius et al. 2018", mixed_precision, true},
    Strategy{"tensor-parallel", "Tensor parallel: columns, rows, heads, vocabulary", Tier::kE1, "tp",
             "per layer and micro-batch 4 all-reduces of b*s*h; 3 numbers a token for the loss",
             "matrices, states, inner activations 1/t", "Shoeybi et al. 2019", tensor_parallel, true},
    Strategy{
        "whole-experts", "Whole experts on tensor-parallel ranks, each of which routes its own tokens", Tier::kE1,
        "expert_tp: 1 (tp, sequence_parallel, ep)",
        "per layer and micro-batch an all-reduce of e*h; without shared experts 3 all-gathers and 2 reduce-scatters of b*s*h fewer",
        "experts of 1/ep in place of slices; rows 1/t, times ep", "Liu et al. 2025", whole_experts, true},
    Strategy{"sequence-parallel", "Sequence parallel: norms, dropout and residuals on 1/t of the tokens", Tier::kE1,
             "sequence_parallel (tp)",
             "per layer and micro-batch 4 reduce-scatters and 6 all-gathers of b*s*h in place of 4 all-reduces; b*h a norm or bias",
             "activations between the products 1/t", "Korthikanti et al. 2022", sequence_parallel, true},
    Strategy{"tensor-overlap", "Collective matmul: products in strips, beside the messages of sequence parallelism", Tier::kE1,
             "tensor_overlap (sequence_parallel, tp)",
             "messages of strips in place of a layer's gathers and scatters: as many bytes; full recompute 2 gathers of b*s*h more",
             "strips in place of gathered inputs and partial sums: 2/t and 1 + 2/t of each",
             "Wang et al. 2023; PyTorch async TP 2024", tensor_overlap, true},
    Strategy{"context-parallel", "Context parallel: parts of sequences", Tier::kE1, "cp, cp_kind, cp_ulysses",
             "per layer and micro-batch, n = k and v of a rank's tokens: all-gather 3 n (c-1); ring, zigzag, striped n (3c-2); "
             "ulysses 4 all-to-alls of q, k, v and o; usp both, of groups",
             "activations 1/c; k and v of the whole (all-gather) or of two more ranks (rings)",
             "Liu et al. 2023; Brandon et al. 2023; Jacobs et al. 2023; Llama Team 2024; Fang & Zhao 2024", context_parallel, true},
    Strategy{"expert-parallel", "Expert parallel: each data rank has some of the experts", Tier::kE1, "ep (model.experts)",
             "per layer and micro-batch 4 all-to-alls of b*s*k*h, and 1 of counts",
             "experts and their states 1/n; rows of experts times n", "Lepikhin et al. 2020; Gale et al. 2022", expert_parallel,
             true},
    Strategy{"expert-bound", "Room for some even shares of rows of experts; a step that needs more runs again", Tier::kE1,
             "expert_bound: F (ep)",
             "two i32 (maximum) a step, over dp and cp and over pp; a step that runs again, all of it again",
             "rows with the experts F b s k in place of n b s k; of the second run n s k", "", bound_experts},
    Strategy{"expert-overlap", "Exchanges of experts beside what else the layer computes, or beside another micro-batch", Tier::kE1,
             "expert_overlap: layer, micro-batches (ep)", "nothing: the same exchanges, on a stream of their own",
             "layer: the rows that are sent, longer; micro-batches: two micro-batches in flight on one stage",
             "DeepSeek-AI 2024, section 3.2.1", expert_overlap, true},
    Strategy{"fp8", "Matrix products of 8-bit factors", Tier::kE2, "precision: fp8, fp8_scaling: current, delayed, block",
             "current: per layer and micro-batch 8 f32 (maximum) over tp; rows of experts go to them at 33/64 of the bytes",
             "inputs of products in 8 bits: b*s*(2h + f/t) less; b*s*h/t more", "Micikevicius et al. 2022; DeepSeek-AI 2024",
             multiply_in_fp8, true},
    Strategy{"scaled-loss", "fp16 gradients of a scaled loss", Tier::kE2, "precision: fp16, loss_scale", "nothing", "none",
             "Micikevicius et al. 2018", scale_loss},
    Strategy{"chunked-loss", "Head and loss in pieces: logits are never whole", Tier::kE1, "loss_chunks", "nothing",
             "logits 1/k, none kept from forward to backward; canonical: copies of the head's gradient",
             "Hsu et al. 2024; Luo et al. 2024", chunk_loss, true},
    Strategy{"full-recompute", "Full recompute of each layer", Tier::kE0, "recompute: full",
             "one more forward less its last matmul", "b*s*h a layer and micro-batch", "Chen et al. 2016", full_recompute},
    Strategy{"selective-recompute", "Selective recompute of named sub-layers", Tier::kE0, "recompute: selective, or a list",
             "the sub-layers' ops again", "attn.core: b*s*(h + a)/t less a layer", "Korthikanti et al. 2022", selective_recompute},
    Strategy{"recompute-by-layer", "Recompute layer by layer, as listed or within a byte budget", Tier::kE0,
             "recompute: a list by layer, recompute_options.budget_bytes", "what each layer's treatment adds",
             "what each layer's treatment keeps: at most the budget", "Chen et al. 2016; Korthikanti et al. 2022",
             recompute_by_layer},
    Strategy{"pipeline", "Pipeline stages, in the order of a schedule: 1F1B, interleaved, zero-bubble, V, any table of slots",
             Tier::kE0, "pp, schedule, vpp, stage_layers", "b*s*h each way per boundary between stages and micro-batch",
             "layers and states 1/p; activations of min(m, p - stage) micro-batches (1f1b), m (afab), p/2 + 1 (v-half), ...",
             "Huang et al. 2019; Narayanan et al. 2021; Qi et al. 2023, 2024", pipeline, true},
    Strategy{"state", "One value and one gradient a parameter", Tier::kE0, "", "nothing", "2 Psi", "", declare_state, true},
    Strategy{"local-workers", "Workers with parameters of their own", Tier::kE3, "diloco: steps", "nothing", "none", "Stich 2019",
             local_workers},
    Strategy{"accumulation", "Gradient accumulation", Tier::kE1, "grad_accumulation", "nothing",
             "none; canonical: floor(log2 m) copies of gradients", "Ott et al. 2018", accumulate},
    Strategy{"tied-embeddings-early", "Tied embeddings on one stage", Tier::kE2, "pp: 1", "nothing",
             "a second gradient of the table", "Press & Wolf 2017", tie_before_reduction},
    Strategy{"data-parallel", "Data parallel, bucketed and overlapped or naive", Tier::kE1, "dp, bucket_bytes, overlap",
             "all-reduce: 2 Psi (N-1)/N", "none", "Li et al. 2020", data_parallel},
    Strategy{"quantised-gradients", "Gradients in 16, 8 or 4 bits on the wire", Tier::kE3, "compression: bf16, int8 (bits)",
             "all-to-all and all-gather of codes and scales: 2 Psi (b + 1/8)/32 (N-1)/N, b = 8, 4; Psi (N-1)/N for bf16",
             "errors Psi (1 + 1/N); codes of a bucket", "Seide et al. 2014; Wang et al. 2023", quantised_gradients},
    Strategy{"compressed-scatter", "Gradients in 16, 8 or 4 bits on their way to shards", Tier::kE3,
             "compression: bf16, int8 (bits); zero: 1, 2",
             "all-to-all of codes and scales in place of a reduce-scatter: Psi (b + 1/8)/32 (N-1)/N, b = 8, 4; 1/2 for bf16",
             "errors Psi; codes of a bucket", "Seide et al. 2014; Wang et al. 2023", within_other_passes},
    Strategy{"sparse-gradients", "The largest elements of gradients, or some by chance", Tier::kE3,
             "compression: top-k, random-k (k)",
             "top-k: all-gather of values and indices, 2 k Psi (N-1); random-k: all-reduce of values, 2 k Psi (N-1)/N",
             "errors Psi; values of a bucket, indices", "Stich et al. 2018; Lin et al. 2018", sparse_gradients},
    Strategy{"powersgd", "PowerSGD: low-rank gradients of matrices", Tier::kE3, "compression: powersgd (rank)",
             "two all-reduces a matrix: 2 r (R + C) (N-1)/N; vectors plain", "errors Psi, bases r C; P and Q of a matrix",
             "Vogels et al. 2019", powersgd},
    Strategy{"one-bit-adam", "1-bit Adam: signs of the momentum once the variance is frozen", Tier::kE3,
             "compression: one-bit-adam (warmup)",
             "after warmup steps of all-reduce: all-to-all and all-gather of signs and scales, 2 Psi/32 (N-1)/N",
             "errors Psi (1 + 1/N); signs of a bucket", "Tang et al. 2021", one_bit_adam},
    Strategy{"parameter-server", "Parameter server on the workers' ranks", Tier::kE1, "parameter_server: servers",
             "push and pull: Psi (N-1)/N each, in direct messages", "moments 1/N", "Li et al. 2014; Jiang et al. 2020",
             parameter_server},
    Strategy{"bounded-staleness", "Workers apart by at most s steps", Tier::kE3, "parameter_server: staleness", "nothing",
             "what is served and its gradients: Psi/N each", "Ho et al. 2013", within_other_passes},
    Strategy{"zero-1", "ZeRO-1: sharded optimizer states", Tier::kE1, "zero: 1", "reduce-scatter and all-gather: Psi (N-1)/N each",
             "moments 1/N", "Rajbhandari et al. 2020", zero1},
    Strategy{"zero-2", "ZeRO-2: sharded gradients", Tier::kE1, "zero: 2",
             "per micro-batch a reduce-scatter, per step an all-gather: Psi (N-1)/N each",
             "moments and gradients 1/N; open buckets", "Rajbhandari et al. 2020", zero2},
    Strategy{"zero-3", "ZeRO-3, FSDP: sharded parameters", Tier::kE1, "zero: 3, fsdp",
             "per micro-batch two all-gathers (one without reshard) and a reduce-scatter: Psi (N-1)/N each",
             "parameters, gradients, moments 1/N; 1 + prefetch units", "Rajbhandari et al. 2020; Zhao et al. 2023", fsdp, true},
    Strategy{"hybrid-shard", "Hybrid sharding: sets of shards", Tier::kE1, "hybrid_shard: n",
             "per step an all-reduce of the slices over the dp/n sets: 2 Psi/n (sets-1)/sets", "ZeRO's 1/N with N = n",
             "Zhao et al. 2023", hybrid_shard, true},
    Strategy{"quantised-weights", "ZeRO++ qwZ: parameters gathered in 8 bits", Tier::kE3, "zero_plus_plus.weights",
             "all-gather of codes and scales in place of parameters: 65/256 of its fp32 bytes", "codes of a bucket",
             "Wang et al. 2023", within_other_passes, true},
    Strategy{"secondary-shard", "ZeRO++ hpZ: backward gathers within a node", Tier::kE1, "zero_plus_plus.secondary: g",
             "backward's all-gathers over g ranks in place of dp", "Psi/g", "Wang et al. 2023", within_other_passes, true},
    Strategy{
        "quantised-scatter", "ZeRO++ qgZ: gradients scattered in 4 bits", Tier::kE3, "zero_plus_plus.gradients",
        "per micro-batch all-to-alls of codes and scales: 33/256 of a reduce-scatter's fp32 bytes; with a secondary shard in two "
        "hops",
        "codes of a bucket", "Wang et al. 2023", within_other_passes},
    Strategy{
        "offload-parameters", "Parameters on the host or on NVMe, fetched unit by unit", Tier::kE1, "zero: 3, offload: parameters",
        "parameters in: 2 Psi/N, gradients out: Psi/N a micro-batch; NVMe: reads and a write of as much",
        "device: units under way; host or NVMe: parameters, gradients 1/N", "Rajbhandari et al. 2021", within_other_passes, true},
    Strategy{"tied-embeddings", "Tied embeddings, added last", Tier::kE1, "pp, canonical",
             "across stages an all-reduce of V*h between the ends", "a second gradient of the table", "Press & Wolf 2017",
             tie_after_reduction},
    Strategy{"offload-activations", "Activations to host memory or NVMe, and back", Tier::kE0, "offload: activations",
             "per layer and micro-batch what it keeps, out and in",
             "activations of two or three layers; the rest on the host or NVMe", "Rhu et al. 2016", offload_activations},
    Strategy{"offload-gradients", "Gradients to the host, where the optimizer is", Tier::kE0, "offload: optimizer",
             "gradients out: Psi, Psi/N under ZeRO", "device: the buckets under way; host: gradients", "Ren et al. 2021",
             offload_gradients},
    Strategy{"loss-scale", "Dynamic or fixed loss scale, overflowing steps skipped", Tier::kE2, "precision: fp16, loss_scale",
             "one i32 (maximum) over tp, dp (ZeRO) and pp", "a few bytes", "Micikevicius et al. 2018", loss_scaling},
    Strategy{"clip-norm", "Clipping by the global norm", Tier::kE1, "clip_norm", "one fp64 over tp, dp (ZeRO) and pp",
             "a few bytes", "Pascanu et al. 2013", clip_norm},
    Strategy{"guard", "NaN guard; spikes of loss and gradient norm", Tier::kE0, "guard",
             "one i32 (maximum) over tp, dp (ZeRO) and pp", "a few bytes", "Chowdhery et al. 2022", guard},
    Strategy{"skipped-update", "Steps without an update, agreed by all ranks", Tier::kE0, "precision: fp16, guard, expert_bound",
             "nothing", "a few bytes", "Micikevicius et al. 2018", skip_updates},
    Strategy{"master-weights", "fp32 copies of 16-bit parameters", Tier::kE2, "precision: bf16, fp16 or fp8", "nothing",
             "4 bytes a parameter, cut as moments are", "Micikevicius et al. 2018", master_weights},
    Strategy{"optimizer", "AdamW, SGD, Lion, AdamW in 8 bits", Tier::kE0, "optimizer", "nothing",
             "2 Psi (AdamW), 0 (SGD), Psi (Lion), Psi/2 and 8 bytes a block (8 bits)",
             "Loshchilov & Hutter 2019; Chen et al. 2023; Dettmers et al. 2022", optimizer},
    Strategy{"offload-optimizer", "Optimizer on the host, its states there or on NVMe", Tier::kE0, "offload: optimizer",
             "parameters back: Psi, Psi/N under ZeRO; NVMe: states in and out", "device: parameters; host or NVMe: states",
             "Ren et al. 2021; Rajbhandari et al. 2021", offload_optimizer},
    Strategy{"delayed-update", "Updates by the gradients of the step before, beside the step", Tier::kE3,
             "offload: optimizer, delayed_update", "nothing", "host: gradients from step to step", "Ren et al. 2021",
             within_other_passes},
    Strategy{"weight-average", "A running average of the weights (EMA)", Tier::kE0, "ema_decay", "nothing",
             "4 bytes a parameter, cut as moments are", "Polyak & Juditsky 1992", average_weights},
    Strategy{"amax-history", "Scales from the sizes of past steps", Tier::kE2, "precision: fp8, fp8_scaling: delayed",
             "per step 12 f32 a layer (maximum) over dp and tp", "12 * 18 f32 a layer", "Micikevicius et al. 2022", remember_amax,
             true},
    Strategy{"router-bias", "Biases of routers that follow the load of experts", Tier::kE1, "model.bias_update_rate",
             "per step e f32 a layer over dp and cp", "2 e f32 a layer", "Wang et al. 2024", balance_by_bias, true},
    Strategy{"metrics", "Loss and gradient norm", Tier::kE1, "grad_norm", "one scalar", "a few bytes", "", metrics, true},
    Strategy{"diloco", "Local SGD and DiLoCo: an outer step every H steps", Tier::kE3, "diloco: steps, learning_rate, momentum",
             "every H steps an all-reduce of the parameters: 2 Psi (N-1)/(N H) a step",
             "Psi as the period began; Psi of outer momentum", "Stich 2019; Douillard et al. 2023", outer_step},
    Strategy{"post-validation", "Updates before the stages meet, taken back where one was to be clipped or skipped", Tier::kE1,
             "post_validation: K (pp, clip_norm or guard.nonfinite)", "nothing",
             "a copy of parameters and moments as the period began", "Qi et al. 2023", post_validation},
};

}  // namespace

std::span<const Strategy> catalogue() { return kCatalogue; }

}  // namespace shardlab::strategies
