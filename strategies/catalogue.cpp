#include "strategies/catalogue.h"

#include <algorithm>
#include <array>
#include <initializer_list>

#include "plan/precision.h"
#include "strategies/accumulation.h"
#include "strategies/clip_norm.h"
#include "strategies/compression.h"
#include "strategies/data_parallel.h"
#include "strategies/diloco.h"
#include "strategies/draft.h"
#include "strategies/fsdp.h"
#include "strategies/guard.h"
#include "strategies/loss_scale.h"
#include "strategies/mixed_precision.h"
#include "strategies/offload_activations.h"
#include "strategies/offload_optimizer.h"
#include "strategies/optimizer.h"
#include "strategies/pipeline.h"
#include "strategies/recompute.h"
#include "strategies/skipped_update.h"
#include "strategies/state.h"
#include "strategies/tensor_parallel.h"
#include "strategies/tied_embeddings.h"
#include "strategies/zero1.h"
#include "strategies/zero2.h"

namespace shardlab {

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

bool always(const Case&) { return true; }
bool narrows(const Case& c) { return precision_of(c).has_master(); }
bool updates_on_host(const Case& c) { return c.layout.offload.optimizer != OffloadTo::kNone; }
bool compresses(const Case& c, std::initializer_list<CompressionKind> kinds) {
  return std::ranges::find(kinds, c.layout.compression.kind) != kinds.end();
}
bool scales_loss(const Case& c) { return c.train.precision == "fp16"; }
bool may_skip(const Case& c) { return scales_loss(c) || c.train.guard.any(); }
bool works_apart(const Case& c) { return c.layout.diloco.steps > 0; }
bool ties(const Case& c) { return c.model.tied_embeddings; }

constexpr std::array kCatalogue{
    Strategy{"mixed-precision", "16-bit parameters and activations, fp32 sums", Tier::kE2,
             "precision: bf16 or fp16, accumulate_dtype", "nothing; half the bytes on the wire", "parameters and activations 1/2",
             "Micikevicius et al. 2018", narrows, mixed_precision, true},
    Strategy{"tensor-parallel", "Tensor parallel: columns, rows, heads, vocabulary", Tier::kE1, "tp",
             "per layer and micro-batch 4 all-reduces of b*s*h; 3 numbers a token for the loss",
             "matrices, states, inner activations 1/t", "Shoeybi et al. 2019", [](const Case& c) { return c.layout.tp > 1; },
             tensor_parallel, true},
    Strategy{"scaled-loss", "fp16 gradients of a scaled loss", Tier::kE2, "precision: fp16, loss_scale", "nothing", "none",
             "Micikevicius et al. 2018", scales_loss, scale_loss},
    Strategy{"full-recompute", "Full recompute of each layer", Tier::kE0, "recompute: full",
             "one more forward less its last matmul", "b*s*h a layer and micro-batch", "Chen et al. 2016",
             [](const Case& c) { return c.layout.recompute == Recompute::kFull; }, full_recompute},
    Strategy{"selective-recompute", "Selective recompute of named sub-layers", Tier::kE0, "recompute: selective, or a list",
             "the sub-layers' ops again", "attn.core: b*s*(h + a)/t less a layer", "Korthikanti et al. 2022",
             [](const Case& c) { return c.layout.recompute == Recompute::kSelective; }, selective_recompute},
    Strategy{"pipeline", "Pipeline stages: none, AFAB, 1F1B", Tier::kE0, "pp, schedule",
             "b*s*h each way per boundary and micro-batch",
             "layers and states 1/p; activations of min(m, p - stage) micro-batches (1f1b) or m (afab)",
             "Huang et al. 2019; Narayanan et al. 2021", always, pipeline, true},
    Strategy{"state", "One value and one gradient a parameter", Tier::kE0, "", "nothing", "2 Psi", "", always, declare_state, true},
    Strategy{"local-workers", "Workers with parameters of their own", Tier::kE3, "diloco: steps", "nothing", "none", "Stich 2019",
             works_apart, local_workers},
    Strategy{"accumulation", "Gradient accumulation", Tier::kE1, "grad_accumulation", "nothing",
             "none; canonical: floor(log2 m) copies of gradients", "Ott et al. 2018",
             [](const Case& c) { return c.train.grad_accumulation > 1; }, accumulate},
    Strategy{"tied-embeddings-early", "Tied embeddings on one stage", Tier::kE2, "pp: 1", "nothing",
             "a second gradient of the table", "Press & Wolf 2017",
             [](const Case& c) { return ties(c) && tied_gradients_meet_early(c); }, tie_before_reduction},
    Strategy{"data-parallel", "Data parallel, bucketed and overlapped or naive", Tier::kE1, "dp, bucket_bytes, overlap",
             "all-reduce: 2 Psi (N-1)/N", "none", "Li et al. 2020",
             [](const Case& c) {
               return c.layout.dp > 1 && c.layout.zero == 0 && compresses(c, {CompressionKind::kNone}) && !works_apart(c);
             },
             data_parallel},
    Strategy{"quantised-gradients", "Gradients in 16, 8 or 4 bits on the wire", Tier::kE3, "compression: bf16, int8 (bits)",
             "all-to-all and all-gather of codes and scales: 2 Psi (b + 1/8)/32 (N-1)/N, b = 8, 4; Psi (N-1)/N for bf16",
             "errors Psi (1 + 1/N); codes of a bucket", "Seide et al. 2014; Wang et al. 2023",
             [](const Case& c) {
               return compresses(c, {CompressionKind::kBf16, CompressionKind::kInt8});
             },
             quantised_gradients},
    Strategy{"sparse-gradients", "The largest elements of gradients, or some by chance", Tier::kE3,
             "compression: top-k, random-k (k)",
             "top-k: all-gather of values and indices, 2 k Psi (N-1); random-k: all-reduce of values, 2 k Psi (N-1)/N",
             "errors Psi; values of a bucket, indices", "Stich et al. 2018; Lin et al. 2018",
             [](const Case& c) {
               return compresses(c, {CompressionKind::kTopK, CompressionKind::kRandomK});
             },
             sparse_gradients},
    Strategy{"powersgd", "PowerSGD: low-rank gradients of matrices", Tier::kE3, "compression: powersgd (rank)",
             "two all-reduces a matrix: 2 r (R + C) (N-1)/N; vectors plain", "errors Psi, bases r C; P and Q of a matrix",
             "Vogels et al. 2019", [](const Case& c) { return compresses(c, {CompressionKind::kPowerSgd}); }, powersgd},
    Strategy{"zero-1", "ZeRO-1: sharded optimizer states", Tier::kE1, "zero: 1", "reduce-scatter and all-gather: Psi (N-1)/N each",
             "moments 1/N", "Rajbhandari et al. 2020", [](const Case& c) { return c.layout.zero == 1; }, zero1},
    Strategy{"zero-2", "ZeRO-2: sharded gradients", Tier::kE1, "zero: 2",
             "per micro-batch a reduce-scatter, per step an all-gather: Psi (N-1)/N each",
             "moments and gradients 1/N; open buckets", "Rajbhandari et al. 2020", [](const Case& c) { return c.layout.zero == 2; },
             zero2},
    Strategy{"zero-3", "ZeRO-3, FSDP: sharded parameters", Tier::kE1, "zero: 3, fsdp",
             "per micro-batch two all-gathers (one without reshard) and a reduce-scatter: Psi (N-1)/N each",
             "parameters, gradients, moments 1/N; 1 + prefetch units", "Rajbhandari et al. 2020; Zhao et al. 2023",
             [](const Case& c) { return c.layout.zero == 3; }, fsdp, true},
    Strategy{"hybrid-shard", "Hybrid sharding: sets of shards", Tier::kE1, "hybrid_shard: n",
             "per step an all-reduce of the slices over the dp/n sets: 2 Psi/n (sets-1)/sets", "ZeRO's 1/N with N = n",
             "Zhao et al. 2023", [](const Case& c) { return c.layout.hybrid_shard > 0; }, [](Draft&) {}, true},
    Strategy{"tied-embeddings", "Tied embeddings, added last", Tier::kE1, "pp, canonical",
             "across stages an all-reduce of V*h between the ends", "a second gradient of the table", "Press & Wolf 2017",
             [](const Case& c) { return ties(c) && !tied_gradients_meet_early(c); }, tie_after_reduction},
    Strategy{"offload-activations", "Activations to host memory and back", Tier::kE0, "offload: activations",
             "per layer and micro-batch what it keeps, out and in", "activations of two or three layers; the rest on the host",
             "Rhu et al. 2016", [](const Case& c) { return c.layout.offload.activations != OffloadTo::kNone; },
             offload_activations},
    Strategy{"loss-scale", "Dynamic or fixed loss scale, overflowing steps skipped", Tier::kE2, "precision: fp16, loss_scale",
             "one i32 (maximum) over tp, dp (ZeRO) and pp", "a few bytes", "Micikevicius et al. 2018", scales_loss, loss_scaling},
    Strategy{"clip-norm", "Clipping by the global norm", Tier::kE1, "clip_norm", "one fp64 over tp, dp (ZeRO) and pp",
             "a few bytes", "Pascanu et al. 2013", [](const Case& c) { return c.train.clip_norm > 0; }, clip_norm},
    Strategy{"guard", "NaN guard; spikes of loss and gradient norm", Tier::kE0, "guard",
             "one i32 (maximum) over tp, dp (ZeRO) and pp", "a few bytes", "Chowdhery et al. 2022",
             [](const Case& c) { return c.train.guard.any(); }, guard},
    Strategy{"skipped-update", "Steps without an update, agreed by all ranks", Tier::kE0, "precision: fp16, guard", "nothing",
             "a few bytes", "Micikevicius et al. 2018", may_skip, skip_updates},
    Strategy{"master-weights", "fp32 copies of 16-bit parameters", Tier::kE2, "precision: bf16 or fp16", "nothing",
             "4 bytes a parameter, cut as moments are", "Micikevicius et al. 2018", narrows, master_weights},
    Strategy{"optimizer", "AdamW or SGD", Tier::kE0, "optimizer", "nothing", "2 Psi (AdamW), 0 (SGD)", "Loshchilov & Hutter 2019",
             [](const Case& c) { return !updates_on_host(c); }, optimizer},
    Strategy{"offload-optimizer", "Optimizer on the host, its states there or on NVMe", Tier::kE0, "offload: optimizer",
             "gradients out, parameters back: Psi each, Psi/N under ZeRO; NVMe: states in and out",
             "device: parameters and open buckets; host or NVMe: states", "Ren et al. 2021; Rajbhandari et al. 2021",
             updates_on_host, offload_optimizer},
    Strategy{"metrics", "Loss and gradient norm", Tier::kE1, "grad_norm", "one scalar", "a few bytes", "", always, metrics, true},
    Strategy{"diloco", "Local SGD and DiLoCo: an outer step every H steps", Tier::kE3, "diloco: steps, learning_rate, momentum",
             "every H steps an all-reduce of the parameters: 2 Psi (N-1)/(N H) a step",
             "Psi as the period began; Psi of outer momentum", "Stich 2019; Douillard et al. 2023", works_apart, outer_step},
};

}  // namespace

std::span<const Strategy> catalogue() { return kCatalogue; }

}  // namespace shardlab
