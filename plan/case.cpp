#include "plan/case.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <numbers>

#include "plan/automatic.h"
#include "plan/base/tree.h"
#include "plan/limits.h"
#include "plan/pipeline_case.h"
#include "plan/treatment.h"

namespace shardlab {

std::string_view name_of(Family v) { return v == Family::kGpt ? "gpt" : "llama"; }

std::string_view name_of(Recompute v) {
  switch (v) {
    case Recompute::kNone: return "none";
    case Recompute::kSelective: return "selective";
    case Recompute::kFull: return "full";
    case Recompute::kByLayer: return "by-layer";
  }
  return "?";
}
std::string_view name_of(Optimizer v) { return v == Optimizer::kAdamW ? "adamw" : "sgd"; }

std::string_view name_of(AlgorithmChoice v) {
  switch (v) {
    case AlgorithmChoice::kAuto: return "auto";
    case AlgorithmChoice::kRing: return "ring";
    case AlgorithmChoice::kHalvingDoubling: return "halving-doubling";
    case AlgorithmChoice::kDirect: return "direct";
    case AlgorithmChoice::kTree: return "tree";
    case AlgorithmChoice::kHierarchical: return "hierarchical";
  }
  return "?";
}

std::string_view name_of(Precision v) {
  constexpr std::string_view names[kPrecisions] = {"fp32", "bf16", "fp16", "fp8", "fp4"};
  return names[static_cast<int>(v)];
}

std::optional<Precision> precision_named(std::string_view name) {
  for (int i = 0; i < kPrecisions; ++i)
    if (name_of(static_cast<Precision>(i)) == name) return static_cast<Precision>(i);
  return std::nullopt;
}

std::string_view name_of(Fp8Scaling v) {
  return v == Fp8Scaling::kBlock ? "block" : v == Fp8Scaling::kDelayed ? "delayed" : "current";
}
std::string_view name_of(BackendKind v) { return v == BackendKind::kCpu ? "cpu" : v == BackendKind::kCuda ? "cuda" : "dry"; }
std::string_view name_of(TransportKind v) {
  constexpr std::string_view names[] = {"threads", "processes", "tcp", "one-gpu", "nccl"};
  return names[static_cast<int>(v)];
}
std::string_view name_of(AttentionBy v) { return v == AttentionBy::kAuto ? "auto" : v == AttentionBy::kOwn ? "own" : "cudnn"; }

std::string_view name_of(ContextKind v) {
  static constexpr std::array<std::string_view, 7> kNames{"none", "ring", "zigzag", "striped", "all-gather", "ulysses", "usp"};
  return kNames[static_cast<size_t>(v)];
}

std::string_view name_of(OffloadTo v) {
  static constexpr std::array<std::string_view, 3> kNames{"none", "cpu", "nvme"};
  return kNames[static_cast<size_t>(v)];
}

std::string_view name_of(GuardAction v) {
  static constexpr std::array<std::string_view, 3> kNames{"none", "stop", "skip"};
  return kNames[static_cast<size_t>(v)];
}

std::string_view name_of(CompressionKind v) {
  static constexpr std::array<std::string_view, 7> kNames{"none", "bf16", "int8", "top-k", "random-k", "powersgd", "one-bit-adam"};
  return kNames[static_cast<size_t>(v)];
}

std::string_view name_of(LearningRate::Kind v) {
  static constexpr std::array<std::string_view, 4> kNames{"constant", "cosine", "linear", "wsd"};
  return kNames[static_cast<size_t>(v)];
}

std::string offload_text(const Offload& offload) {
  std::string text;
  for (const auto& [part, where] :
       {std::pair{"activations", offload.activations}, {"optimizer", offload.optimizer}, {"parameters", offload.parameters}})
    if (where != OffloadTo::kNone) text += fmt::format("{}{}={}", text.empty() ? "" : ",", part, name_of(where));
  return text.empty() ? "none" : text;
}

float learning_rate_at(const LearningRate& lr, int64_t step) {
  const double warm =
      lr.warmup_steps > 0 ? std::min(1.0, static_cast<double>(step + 1) / static_cast<double>(lr.warmup_steps)) : 1.0;
  if (lr.kind == LearningRate::Kind::kConstant || warm < 1.0) return static_cast<float>(lr.peak * warm);
  const int64_t begin = lr.kind == LearningRate::Kind::kWsd ? lr.total_steps - lr.decay_steps : lr.warmup_steps;
  const int64_t span = std::max<int64_t>(1, lr.total_steps - begin);
  const double progress = std::clamp(static_cast<double>(step - begin) / static_cast<double>(span), 0.0, 1.0);
  const double left = lr.kind == LearningRate::Kind::kCosine ? 0.5 * (1.0 + std::cos(std::numbers::pi * progress)) : 1.0 - progress;
  return static_cast<float>(lr.floor + (lr.peak - lr.floor) * left);
}

int64_t memory_per_rank(const Case& c) {
  const int64_t devices = std::max(1, c.machine.devices()), ranks = c.layout.world_size();
  if (!c.machine.local || ranks <= devices) return c.machine.device.memory_bytes;
  return static_cast<int64_t>(static_cast<double>(c.machine.device.memory_bytes) * static_cast<double>(devices) /
                              static_cast<double>(ranks));
}

namespace {

/// `whole` must be a positive multiple of `parts`.
Result<void> divides(std::string_view what, int64_t whole, std::string_view key, int64_t parts) {
  if (whole % parts == 0) return {};
  std::string fitting;
  for (int64_t p = 1; p <= std::min<int64_t>(whole, 64); ++p)
    if (whole % p == 0) fitting += fmt::format("{}{}", fitting.empty() ? "" : " ", p);
  return refusal(fmt::format("{} {} is not divisible by {}={}", what, whole, key, parts),
                 fmt::format("choose {} among {}, or another model", key, fitting));
}

Result<void> check_sizes(const Case& c) {
  const Layout& l = c.layout;
  for (const auto& [key, value] : {std::pair{"dp", int64_t{l.dp}},
                                   {"tp", int64_t{l.tp}},
                                   {"pp", int64_t{l.pp}},
                                   {"vpp", int64_t{l.vpp}},
                                   {"cp", int64_t{l.cp}},
                                   {"ep", int64_t{l.ep}},
                                   {"seq_len", c.train.seq_len},
                                   {"micro_batch", c.train.micro_batch},
                                   {"grad_accumulation", c.train.grad_accumulation},
                                   {"threads_per_rank", int64_t{c.threads_per_rank}}}) {
    if (value < 1) return refusal(fmt::format("{}={} is not positive", key, value), fmt::format("set {} to 1 or more", key));
    if (value > (int64_t{1} << 30))
      return refusal(fmt::format("{}={} is absurdly large", key, value), fmt::format("set {} below 2^30", key));
  }
  if (c.machine.device.memory_bytes < 0)
    return refusal(fmt::format("machine.device.memory={} is negative", c.machine.device.memory_bytes),
                   "set it to what a program can use");
  if (l.bucket_bytes < 0)
    return refusal(fmt::format("bucket_bytes={} is negative", l.bucket_bytes), "use 0 for one bucket per parameter");
  const double ranks = static_cast<double>(l.dp) * l.tp * l.pp * l.cp;
  if (ranks > 1 << 20) return refusal(fmt::format("dp*tp*pp*cp = {:.0f} ranks", ranks), "at most 1048576 ranks are planned");
  return {};
}

/// Instances of a layer that a step's plan may hold: each has calls, buffers and instructions of its own.
constexpr double kMostLayerRuns = 1 << 17;
/// Bytes and flops are counted in 64-bit integers; sums of them stay below.
constexpr double kMostCounted = 4e18;

/// Sizes that are each fine may have products that overflow a count, or a plan that exhausts memory. Upper bounds, in doubles.
Result<void> check_products(const Case& c) {
  const Model& m = c.model;
  const Train& t = c.train;
  const double tokens = static_cast<double>(t.seq_len) * static_cast<double>(t.micro_batch);
  const double runs = static_cast<double>(m.layers) * static_cast<double>(t.grad_accumulation);
  if (runs > kMostLayerRuns)
    return refusal(
        fmt::format("layers {} * grad_accumulation {} = {:.0f} runs of a layer in one step", m.layers, t.grad_accumulation, runs),
        fmt::format("at most {:.0f} are planned: raise micro_batch or dp, or lower global_batch_tokens", kMostLayerRuns));
  const double hidden = static_cast<double>(m.hidden), vocab = static_cast<double>(m.vocab);
  const double attention = static_cast<double>(m.heads) * static_cast<double>(m.head_dim);
  const double widest = std::max({static_cast<double>(m.qkv_rows()), static_cast<double>(m.up_rows()), attention, vocab});
  const double op_flops = 2 * tokens * std::max(hidden * widest, 2 * static_cast<double>(t.seq_len) * attention);
  if (m.heads > kMaxHeads || m.kv_heads > kMaxHeads || m.head_dim > kMaxHeads)
    return refusal(fmt::format("model.heads={}, kv_heads={}, head_dim={}: one is absurdly large", m.heads, m.kv_heads, m.head_dim),
                   fmt::format("set each to {} or less", kMaxHeads));
  const double rows = std::max({tokens, hidden, static_cast<double>(m.max_positions)});
  const double elements = std::max(rows * std::max(widest, hidden), static_cast<double>(parameter_count(m)));
  if (elements > static_cast<double>(kMaxElements))
    return refusal(
        fmt::format("a tensor or bucket of {:.3g} elements: seq_len {} * micro_batch {}, and a model of {:.3g} parameters",
                    elements, t.seq_len, t.micro_batch, static_cast<double>(parameter_count(m))),
        fmt::format("at most {} are planned in one buffer: lower seq_len, micro_batch or the model", kMaxElements));
  const double layer_widths =
      16 * hidden + 4 * static_cast<double>(m.qkv_rows()) + 4 * attention + 4 * static_cast<double>(m.up_rows());
  const double activations =
      4 * tokens * (runs * layer_widths + static_cast<double>(t.grad_accumulation) * (16 * hidden + 4 * vocab));
  const double state = 32 * static_cast<double>(parameter_count(m));
  const double ranks = static_cast<double>(c.layout.dp) * c.layout.tp * c.layout.pp * c.layout.cp;
  if (op_flops > kMostCounted || (activations + state) * ranks > kMostCounted)
    return refusal(
        fmt::format("seq_len {} * micro_batch {} tokens of a model of this size on {:.0f} ranks come to more than can be counted",
                    t.seq_len, t.micro_batch, ranks),
        "lower seq_len, micro_batch or grad_accumulation");
  return {};
}

/// Which of a GPU's libraries may be asked for.
Result<void> check_device_libraries(const Case& c) {
  if (c.attention == AttentionBy::kCudnn &&
      (c.backend != BackendKind::kCuda || c.canonical || c.train.precision == Precision::kFp32))
    return refusal(
        fmt::format("attention=cudnn with backend={}, canonical={}, precision={}: cuDNN runs on GPUs, in an order of its own, "
                    "on 2-byte elements",
                    name_of(c.backend), c.canonical, name_of(c.train.precision)),
        "use attention: auto, or backend: cuda with precision: bf16 and canonical: false");
  constexpr int64_t kMostHeadDim = 256;  // kernels/cuda/geometry.cpp
  if (c.backend == BackendKind::kCuda && (c.model.head_dim > kMostHeadDim || c.model.head_dim % 2 != 0))
    return refusal(
        fmt::format("head_dim={} with backend=cuda: attention on a GPU takes even ones up to {}", c.model.head_dim, kMostHeadDim),
        "use backend: cpu, or a model with other heads");
  constexpr int kMostOnOneGpu = 64;  // kernels/cuda/kernels.h, Combine
  if (const int most = std::max({c.layout.dp, c.layout.tp, c.layout.pp});
      c.transport == TransportKind::kOneGpu && most > kMostOnOneGpu)
    return refusal(
        fmt::format("a group of {} ranks with transport=one-gpu, which adds up to {} parts at once", most, kMostOnOneGpu),
        "use fewer ranks, or transport: nccl");
  if (c.tf32 && (c.backend != BackendKind::kCuda || c.canonical || c.train.precision != Precision::kFp32))
    return refusal(
        fmt::format("tf32 with backend={}, canonical={}, precision={}: it is a way of the GPU's library to multiply fp32",
                    name_of(c.backend), c.canonical, name_of(c.train.precision)),
        "set tf32: false, or use backend: cuda with precision: fp32 and canonical: false");
  return {};
}

/// Which transports a back end can use.
Result<void> check_execution(const Case& c) {
  const bool on_device = c.transport == TransportKind::kOneGpu || c.transport == TransportKind::kNccl;
  if ((c.backend == BackendKind::kCuda) != on_device)
    return refusal(fmt::format("backend={} with transport={}", name_of(c.backend), name_of(c.transport)),
                   c.backend == BackendKind::kCuda ? "use transport: one-gpu (every rank on one device) or nccl (a device each)"
                                                   : "use transport: threads, processes or tcp, or backend: cuda");
  if (c.canonical && c.transport == TransportKind::kNccl)
    return refusal("canonical with transport=nccl: NCCL sums in an order of its own",
                   "use transport: one-gpu, or canonical: false");
  if (on_device && c.layout.collective_algorithm != AlgorithmChoice::kAuto)
    return refusal(fmt::format("collective_algorithm={} with transport={}, which moves data by a way of its own",
                               name_of(c.layout.collective_algorithm), name_of(c.transport)),
                   "leave collective_algorithm out, or use transport: threads");
  return check_device_libraries(c);
}

/// Gradients have one storage: what they accumulate in is what travels.
Result<void> check_gradient_dtypes(const Train& t) {
  for (const auto& [key, dtype] : {std::pair{"reduce_dtype", &t.reduce_dtype}, {"accumulate_dtype", &t.accumulate_dtype}}) {
    if (dtype->empty() || *dtype == "fp32") continue;
    if (t.precision == Precision::kFp32)
      return refusal(
          fmt::format("{}={} with precision=fp32: gradients would be narrower than what they are computed from", key, *dtype),
          fmt::format("set {}: fp32, or precision: bf16, or compression.kind: bf16, which keeps what rounding loses", key));
    const std::string_view computed =
        name_of(t.precision == Precision::kFp8 ? Precision::kBf16 : t.precision);  // what matrix products leave
    if (*dtype != computed)
      return refusal(fmt::format("{}={} with precision={}", key, *dtype, name_of(t.precision)),
                     fmt::format("use fp32, or what gradients are computed in: {}: {}", key, computed));
  }
  if (!t.reduce_dtype.empty() && !t.accumulate_dtype.empty() && t.reduce_dtype != t.accumulate_dtype)
    return refusal(fmt::format("reduce_dtype={} with accumulate_dtype={}: gradients are reduced where they accumulate, in one type",
                               t.reduce_dtype, t.accumulate_dtype),
                   "set one of the two, and leave the other out");
  return {};
}

/// Parameters outside the device come to it unit by unit, as ZeRO-3 gathers them.
Result<void> check_parked_parameters(const Case& c) {
  const Layout& l = c.layout;
  const std::string what = fmt::format("offload.parameters={}", name_of(l.offload.parameters));
  if (l.zero != 3)
    return refusal(fmt::format("{} with zero={}: only zero 3 brings parameters unit by unit to where they compute", what, l.zero),
                   "set zero: 3 (with dp: 1 too), or offload.parameters: none");
  if (l.offload.optimizer == OffloadTo::kNone)
    return refusal(what + " with offload.optimizer=none: every parameter would come to the device once more to be updated",
                   "set offload.optimizer: cpu or nvme, or offload.parameters: none");
  if (l.hybrid_shard > 0)
    return refusal(fmt::format("{} with hybrid_shard={}: sets of shards add their gradients on the device, and these have left it",
                               what, l.hybrid_shard),
                   "set hybrid_shard: 0, or offload.parameters: none");
  return {};
}

/// While the host updates with the gradients of the step before, the step computes with parameters of its own.
Result<void> check_delayed_update(const Case& c) {
  const Offload& o = c.layout.offload;
  const auto not_with = [](std::string what, std::string_view why, std::string_view remedy) {
    return refusal(fmt::format("delayed_update with {}: {}", what, why), fmt::format("{}, or set delayed_update: false", remedy));
  };
  if (o.optimizer == OffloadTo::kNvme)
    return not_with("offload.optimizer=nvme", "the state of an update is in host memory for the time of three buckets only",
                    "set offload.optimizer: cpu");
  if (o.parameters != OffloadTo::kNone)
    return not_with(fmt::format("offload.parameters={}", name_of(o.parameters)),
                    "the step would fetch parameters from where they are being updated", "set offload.parameters: none");
  if (!c.layout.overlap) return not_with("overlap=false", "updates are delayed so as to run beside the step", "set overlap: true");
  if (c.train.precision == Precision::kFp16 || c.train.guard.any())
    return not_with(c.train.precision == Precision::kFp16 ? "precision=fp16" : "guard",
                    "what gives a step up is known when its gradients are, and the update by them is another step's",
                    c.train.precision == Precision::kFp16 ? "use precision: bf16" : "leave guard out");
  if (!(c.checkpoint == Checkpointing{}))
    return not_with("checkpoint", "the gradients that wait for the next step belong to buckets of this layout",
                    "leave checkpoint out");
  return {};
}

Result<void> check_offload(const Case& c) {
  const Offload& o = c.layout.offload;
  if (!o.any()) return {};
  if (o.parameters != OffloadTo::kNone) SHARDLAB_TRY(check_parked_parameters(c));
  if (o.delayed_update && o.optimizer != OffloadTo::kNone) SHARDLAB_TRY(check_delayed_update(c));
  if (o.activations != OffloadTo::kNone && c.layout.recompute_options.every > 1)
    return refusal(fmt::format("offload.activations={} with recompute_options.every={}: every layer is parked alike",
                               name_of(o.activations), c.layout.recompute_options.every),
                   "set recompute_options.every: 1, or offload.activations: none");
  return {};
}

/// Each part on two stages: half of the micro-batches find half of its gradient on either.
Result<void> check_mirrored(const Case& c) {
  const Layout& l = c.layout;
  if (!is_mirrored(l.schedule)) return {};
  const int64_t m = c.train.grad_accumulation;
  const auto not_with = [&](std::string what, std::string_view why) {
    return refusal(fmt::format("schedule={} with {}: {}", name_of(l.schedule), what, why), "use schedule: dualpipe-v");
  };
  if (m < 2)
    return not_with(fmt::format("grad_accumulation={}", m), "one half of the micro-batches goes down the stages, the other up");
  if (c.canonical && !std::has_single_bit(static_cast<uint64_t>(m)))
    return not_with(fmt::format("canonical and grad_accumulation={}", m),
                    "two halves are subtrees of the canonical sum of a power of two");
  constexpr std::string_view kEarly = "gradients would be taken before those of the two stages of a part are added up";
  if (l.compression.kind != CompressionKind::kNone)
    return not_with(fmt::format("compression={}", name_of(l.compression.kind)), kEarly);
  if (l.parameter_server.servers > 0) return not_with("parameter_server", kEarly);
  if (l.diloco.steps > 0) return not_with("diloco", kEarly);
  if (l.offload.parameters != OffloadTo::kNone)
    return not_with(fmt::format("offload.parameters={}", name_of(l.offload.parameters)), kEarly);
  return {};
}

/// Parts of sequences, and who attends to them.
Result<void> check_context(const Case& c) {
  const Layout& l = c.layout;
  const std::string what = fmt::format("cp={} with ", l.cp);
  const auto missing = [&](std::string_view key, std::string_view neutral) {
    return refusal(fmt::format("{}{} is not implemented in this version", what, key), fmt::format("set cp: 1, or {}", neutral));
  };
  if (l.cp_kind == ContextKind::kNone)
    return refusal(what + "cp_kind=none: nobody would attend to the tokens of other ranks",
                   "set cp_kind: zigzag, ring, striped, all-gather or ulysses, or cp: 1");
  if (l.cp_kind == ContextKind::kUsp) return missing("cp_kind=usp", "cp_kind: zigzag or ulysses");
  if (l.sequence_parallel && l.tp > 1) return missing("sequence_parallel", "sequence_parallel: false");
  if (l.compression.kind != CompressionKind::kNone)
    return missing(fmt::format("compression={}", name_of(l.compression.kind)), "compression.kind: none");
  if (l.parameter_server.servers > 0) return missing("parameter_server", "parameter_server.servers: 0");
  if (l.diloco.steps > 0) return missing("diloco", "diloco.steps: 0");
  if (!(l.zero_plus_plus == ZeroPlusPlus{})) return missing("zero_plus_plus", "leave zero_plus_plus out");
  if (c.train.precision == Precision::kFp8) return missing("precision=fp8", "precision: bf16");
  const bool ring = l.cp_kind == ContextKind::kRing || l.cp_kind == ContextKind::kZigzag || l.cp_kind == ContextKind::kStriped;
  if (ring && c.transport == TransportKind::kNccl)
    return refusal(
        fmt::format("cp_kind={} with transport=nccl: a hop's two halves run on two streams, and NCCL takes them as one call",
                    name_of(l.cp_kind)),
        "use cp_kind: all-gather or ulysses, or transport: one-gpu");
  const bool halves = l.cp_kind == ContextKind::kZigzag || l.cp_kind == ContextKind::kAllGather;  // a rank's part is of two chunks
  if (const int64_t parts = (halves ? 2 : 1) * int64_t{l.cp}; c.train.seq_len % parts != 0)
    return refusal(fmt::format("cp_kind={} with cp={} and seq_len={}, which is not divisible by {}", name_of(l.cp_kind), l.cp,
                               c.train.seq_len, parts),
                   fmt::format("choose a multiple of {}, or another cp", parts));
  const int64_t heads = c.model.heads / l.tp, kv_heads = c.model.kv_heads / l.tp;  // of a tensor-parallel rank
  if (l.cp_kind == ContextKind::kUlysses) {
    if (heads % l.cp != 0)
      return refusal(
          fmt::format("cp_kind=ulysses with cp={}, tp={} and {} heads: each rank takes whole heads", l.cp, l.tp, c.model.heads),
          "lower cp or tp until cp * tp divides the heads, or use another cp_kind");
    const int64_t copies = kv_heads >= l.cp ? 1 : l.cp / std::max<int64_t>(1, kv_heads);
    if (kv_heads % l.cp != 0 && l.cp % std::max<int64_t>(1, kv_heads) != 0)
      return refusal(
          fmt::format("cp_kind=ulysses with cp={}, tp={} and {} kv heads: a rank takes whole kv heads, or several share one", l.cp,
                      l.tp, c.model.kv_heads),
          "choose a cp that divides the kv heads of a tensor-parallel rank, or is a multiple of them");
    if (copies > kContractionLeaves)
      return refusal(fmt::format("cp_kind=ulysses with cp={} and {} kv heads: {} copies of each", l.cp, c.model.kv_heads, copies),
                     fmt::format("at most {} are made: lower cp", kContractionLeaves));
    if (c.canonical && copies > 1 && !std::has_single_bit(static_cast<uint64_t>(heads / l.cp)))
      return refusal(fmt::format("canonical with cp_kind=ulysses, and {} query heads a rank for one of {} copies of a kv head",
                                 heads / l.cp, copies),
                     "what a rank sums over query heads must be an aligned block of the tree: a power of two of them");
  }
  return {};
}

/// What this version has no strategy for is refused by name, never ignored.
Result<void> check_implemented(const Case& c) {
  const Layout& l = c.layout;
  const auto missing = [](std::string what, std::string have) {
    return refusal(fmt::format("{} is not implemented in this version", what), fmt::format("use {}", have));
  };
  SHARDLAB_TRY(check_mirrored(c));
  if (l.ep != 1) return missing(fmt::format("ep={} (expert parallel)", l.ep), "ep: 1");
  if (l.zero < 0 || l.zero > 3) return refusal(fmt::format("zero={}", l.zero), "use 0 to 3");
  SHARDLAB_TRY(check_offload(c));
  if (c.train.precision == Precision::kFp4)
    return missing(fmt::format("precision={}", name_of(c.train.precision)), "precision: fp32, bf16, fp16 or fp8");
  if (c.profile != "shardlab") return missing(fmt::format("profile={}", c.profile), "profile: shardlab");
  SHARDLAB_TRY(check_gradient_dtypes(c.train));
  return check_execution(c);
}

/// A list by layer says all there is to say, and a budget chooses all there is to choose.
Result<void> check_by_layer(const Case& c) {
  const Layout& l = c.layout;
  const bool by_layer = l.recompute == Recompute::kByLayer;
  const std::string what =
      by_layer ? "recompute layer by layer" : fmt::format("recompute_options.budget_bytes={}", l.recompute_options.budget_bytes);
  if (!by_layer && l.recompute != Recompute::kNone)
    return refusal(fmt::format("{} with recompute={}", what, name_of(l.recompute)),
                   "leave recompute out: what each layer makes again is chosen within the budget");
  if (!by_layer && (l.schedule > Schedule::k1F1B || !l.stage_layers.empty()))
    return refusal(fmt::format("{} with {}", what,
                               l.stage_layers.empty() ? fmt::format("schedule={}", name_of(l.schedule))
                                                      : fmt::format("stage_layers={}", l.stage_layers)),
                   "list what each layer makes again under recompute, as 3*full 5*none; or use schedule: 1f1b and even stages");
  if (l.offload.activations != OffloadTo::kNone)
    return refusal(fmt::format("{} with offload.activations={}", what, name_of(l.offload.activations)),
                   by_layer ? "write @cpu after the treatment of each layer that is to wait in host memory"
                            : "leave offload.activations out: which layers wait in host memory is chosen within the budget");
  if (c.train.precision == Precision::kFp8)
    return refusal(what + " with precision=fp8: what layers keep in 8 bits has not been told apart layer by layer",
                   "use precision: bf16, or one recompute for all layers");
  if (l.parameter_server.servers > 0 || l.diloco.steps > 0)
    return refusal(fmt::format("{} with {}: no test has yet told such layers apart there", what,
                               l.diloco.steps > 0 ? "diloco" : "parameter_server"),
                   "use one recompute for all layers");
  if (l.recompute_options.budget_bytes < 0) return refusal(what + " is negative", "set the bytes that a rank may use");
  if (!by_layer) return {};
  const auto treatments = parse_treatments(l.recompute_options.layers, c.model.layers);
  if (!treatments.ok()) return treatments.error();
  return {};
}

Result<void> check_recompute(const Case& c) {
  const Layout& l = c.layout;
  const std::string& modules = l.recompute_options.modules;
  if (!modules.empty() && l.recompute != Recompute::kSelective)
    return refusal(fmt::format("sub-layers `{}` with recompute={}", modules, name_of(l.recompute)),
                   "name them under recompute alone");
  const int every = l.recompute_options.every;
  if (every < 1) return refusal(fmt::format("recompute_options.every={}", every), "use 1 for every layer, or more");
  if (every > 1 && l.recompute != Recompute::kFull)
    return refusal(fmt::format("recompute_options.every={} with recompute={}", every, name_of(l.recompute)),
                   "set recompute: full, of which every k-th layer is made again");
  if (l.recompute == Recompute::kByLayer || l.recompute_options.budget_bytes != 0) SHARDLAB_TRY(check_by_layer(c));
  const auto named = sub_layers_named(modules, ' ');
  if (!named.ok()) return named.error();
  return {};
}

Result<void> check_zero_plus_plus(const Case& c) {
  const Layout& l = c.layout;
  const ZeroPlusPlus& z = l.zero_plus_plus;
  if (z == ZeroPlusPlus{}) return {};
  if (l.zero != 3)
    return refusal(
        fmt::format("zero_plus_plus with zero={}: it changes how sharded parameters are gathered and their gradients scattered",
                    l.zero),
        "set zero: 3, or leave zero_plus_plus out");
  if (l.offload.parameters != OffloadTo::kNone)
    return refusal(
        fmt::format("zero_plus_plus with offload.parameters={}: shards that wait outside the device are fetched as they are",
                    name_of(l.offload.parameters)),
        "set offload.parameters: none, or leave zero_plus_plus out");
  const int g = z.secondary;
  if (g != 0 && (g < 2 || g >= l.dp || l.dp % g != 0))
    return refusal(fmt::format("zero_plus_plus.secondary={} with dp={}", g, l.dp),
                   "it is the number of ranks that share a second copy of the parameters: a divisor of dp above 1 and below dp, "
                   "or 0 for none");
  if (g != 0 && l.hybrid_shard != 0)
    return refusal(
        fmt::format("zero_plus_plus.secondary={} with hybrid_shard={}: each set of shards is whole within its ranks as it is", g,
                    l.hybrid_shard),
        "set one of the two to 0");
  if (g != 0 && !l.fsdp.reshard)
    return refusal(fmt::format("zero_plus_plus.secondary={} with fsdp.reshard=false: backward gathers nothing", g),
                   "set fsdp.reshard: true, or zero_plus_plus.secondary: 0");
  for (const auto& [key, dtype] :
       {std::pair{"reduce_dtype", &c.train.reduce_dtype}, {"accumulate_dtype", &c.train.accumulate_dtype}})
    if (z.gradients && !dtype->empty() && *dtype != "fp32")
      return refusal(
          fmt::format("zero_plus_plus.gradients with {}={}: they travel in 4 bits, and are added up in fp32", key, *dtype),
          fmt::format("leave {} out", key));
  return {};
}

/// The momentum that travels is known to no rank before it has travelled, and is no gradient.
Result<void> check_one_bit_adam(const Case& c, const std::string& what) {
  const Layout& l = c.layout;
  if (c.train.optimizer != Optimizer::kAdamW)
    return refusal(fmt::format("{} with optimizer={}: what it sends is Adam's momentum", what, name_of(c.train.optimizer)),
                   "set optimizer: adamw, or compression.kind: int8");
  if (l.compression.warmup < 1)
    return refusal(
        fmt::format("{} with compression.warmup={}: the variance that it freezes would be 0", what, l.compression.warmup),
        "set compression.warmup to the steps of plain Adam before that, 1 or more");
  if (l.tp > 1)
    return refusal(fmt::format("{} with tp={}: slices of a bucket would share scales each by itself", what, l.tp),
                   "set tp: 1, or compression.kind: int8");
  if (c.model.tied_embeddings && (l.pp > 1 || c.canonical))
    return refusal(
        fmt::format("{} with {} and tied embeddings: the table's two gradients are added after each has been reduced, and "
                    "steps do not add up",
                    what, l.pp > 1 ? fmt::format("pp={}", l.pp) : "canonical"),
        "set tied_embeddings: false, or compression.kind: int8");
  if (c.train.clip_norm > 0 || c.train.grad_norm)
    return refusal(fmt::format("{} with {}: no rank has the gradient whose norm that is", what,
                               c.train.clip_norm > 0 ? fmt::format("clip_norm={}", c.train.clip_norm) : "grad_norm"),
                   "set clip_norm: 0 and grad_norm: false, or compression.kind: int8");
  if (l.offload.optimizer != OffloadTo::kNone)
    return refusal(
        fmt::format("{} with offload.optimizer={}: momenta are compressed where they are kept, and travel between devices", what,
                    name_of(l.offload.optimizer)),
        "set offload.optimizer: none, or compression.kind: int8");
  return {};
}

Result<void> check_compression(const Case& c) {
  const Compression& k = c.layout.compression;
  if (k.kind == CompressionKind::kNone) return {};
  const std::string what = fmt::format("compression.kind={}", name_of(k.kind));
  if (c.layout.dp == 1) return refusal(what + " with dp=1: no gradient travels", "set dp above 1, or compression.kind: none");
  const bool quantises = k.kind == CompressionKind::kBf16 || k.kind == CompressionKind::kInt8;
  if (c.layout.zero > 0 && !quantises)
    return refusal(
        fmt::format("{} with zero={}: it leaves every rank a whole gradient, where each is to have a slice", what, c.layout.zero),
        "set zero: 0, or compression.kind: bf16 or int8, which scatter slices");
  if (c.layout.zero == 3)
    return refusal(what + " with zero=3: what a rank owes of whole gradients would be as large as what it gives up",
                   "set zero_plus_plus.gradients: true, which keeps no errors, or zero: 2");
  for (const auto& [key, dtype] :
       {std::pair{"reduce_dtype", &c.train.reduce_dtype}, {"accumulate_dtype", &c.train.accumulate_dtype}})
    if (!dtype->empty() && *dtype != "fp32")
      return refusal(fmt::format("{} with {}={}: errors are kept of fp32 gradients", what, key, *dtype),
                     fmt::format("leave {} out", key));
  if (c.train.precision == Precision::kFp16 || c.train.guard.any())
    return refusal(fmt::format("{} with {}: what a skipped step leaves in the errors would come back in the next", what,
                               c.train.precision == Precision::kFp16 ? "precision=fp16" : "guard"),
                   "use precision: fp32 or bf16 and no guard, or compression.kind: none");
  if (k.kind == CompressionKind::kOneBitAdam) SHARDLAB_TRY(check_one_bit_adam(c, what));
  if (k.kind == CompressionKind::kInt8 && k.bits != 8 && k.bits != 4)
    return refusal(fmt::format("{} with compression.bits={}", what, k.bits), "use 8 or 4");
  if (k.kind == CompressionKind::kPowerSgd && k.rank < 1)
    return refusal(fmt::format("{} with compression.rank={}", what, k.rank), "set compression.rank to 1 or more");
  if (k.kind == CompressionKind::kPowerSgd && c.layout.pp > 1 && c.model.tied_embeddings)
    return refusal(
        fmt::format("{} with pp={} and tied embeddings: the two stages' parts of the table's gradient would be approximated "
                    "each by itself",
                    what, c.layout.pp),
        "set tied_embeddings: false, or compression.kind: int8");
  if (k.kind == CompressionKind::kPowerSgd && c.layout.tp > 1)
    return refusal(fmt::format("{} with tp={}: slices of a matrix would be approximated each by itself", what, c.layout.tp),
                   "set tp: 1, or compression.kind: int8");
  const bool selects = k.kind == CompressionKind::kTopK || k.kind == CompressionKind::kRandomK;
  if (selects && !(k.k > 0 && k.k <= 1))
    return refusal(fmt::format("{} with compression.k={}", what, k.k),
                   "set the share of elements that is sent, above 0 and up to 1");
  const Model& m = c.model;
  const int64_t largest = m.hidden * std::max({m.vocab, m.up_rows(), m.qkv_rows()});
  if (selects && largest + c.layout.bucket_bytes / 4 >= (int64_t{1} << 31))
    return refusal(fmt::format("{} with bucket_bytes={} and a parameter of {} elements: an index of 32 bits numbers 2^31", what,
                               c.layout.bucket_bytes, largest),
                   "lower bucket_bytes, or use compression.kind: int8");
  return {};
}

/// Workers that are steps apart: no op may be of all of them at once.
Result<void> check_staleness(const Case& c) {
  const Layout& l = c.layout;
  if (l.parameter_server.staleness < 0) return {};
  const std::string what = fmt::format("parameter_server.staleness={}", l.parameter_server.staleness);
  constexpr std::string_view kInStep = "parameter_server.staleness: sync";
  if (c.transport != TransportKind::kThreads)
    return refusal(fmt::format("{} with transport={}: servers that apply what comes first meet their workers on the processor",
                               what, name_of(c.transport)),
                   fmt::format("use transport: threads with backend: cpu, or {}", kInStep));
  for (const auto& [key, size] : {std::pair{"tp", l.tp}, {"pp", l.pp}})
    if (size > 1)
      return refusal(fmt::format("{} with {}={}: a worker of several ranks would pull values of several versions", what, key, size),
                     fmt::format("set {}: 1, or {}", key, kInStep));
  const Train& t = c.train;
  if (t.clip_norm > 0 || t.grad_norm || t.guard.any() || t.precision == Precision::kFp16)
    return refusal(fmt::format("{} with {}: it is found from all gradients of a step, and servers apply them as they arrive", what,
                               t.clip_norm > 0                   ? "clip_norm"
                               : t.grad_norm                     ? "grad_norm"
                               : t.precision == Precision::kFp16 ? "precision=fp16"
                                                                 : "guard"),
                   fmt::format("leave it out, or set {}", kInStep));
  if (c.model.tied_embeddings)
    return refusal(what + " with tied embeddings: the table's gradient is a sum of two",
                   fmt::format("set tied_embeddings: false, or {}", kInStep));
  if (l.offload.any())
    return refusal(fmt::format("{} with offload={}: what moves is timed by the steps of one rank", what, offload_text(l.offload)),
                   fmt::format("set offload: none, or {}", kInStep));
  if (!l.overlap)
    return refusal(what + " with overlap=false: a push never waits", fmt::format("leave overlap out, or set {}", kInStep));
  if (t.precision == Precision::kFp8 && t.fp8_scaling == Fp8Scaling::kDelayed)
    return refusal(what + " with fp8_scaling=delayed: all workers agree on every step's sizes, and these are not in step",
                   fmt::format("use fp8_scaling: current or block, or {}", kInStep));
  if (!(c.checkpoint == Checkpointing{}))
    return refusal(what + " with checkpoint: there is no moment at which all ranks have made the same steps",
                   fmt::format("leave checkpoint out, or set {}", kInStep));
  return {};
}

/// Every data-parallel rank serves one slice.
Result<void> check_parameter_server(const Case& c) {
  const Layout& l = c.layout;
  const ParameterServer& p = l.parameter_server;
  if (p.servers < 0 || p.staleness < -1)
    return refusal(fmt::format("parameter_server.servers={} parameter_server.staleness={}", p.servers, p.staleness),
                   "set servers to dp, or 0 for none, and staleness to 0 or more, or -1 for workers in step");
  if (p.servers == 0) return {};
  const std::string what = fmt::format("parameter_server.servers={}", p.servers);
  if (l.dp == 1) return refusal(what + " with dp=1: there is one worker", "set dp above 1, or parameter_server.servers: 0");
  if (p.servers != l.dp)
    return refusal(fmt::format("{} with dp={}: each worker's rank serves a slice, so that all have one program", what, l.dp),
                   fmt::format("set parameter_server.servers: {}", l.dp));
  if (l.zero > 0)
    return refusal(fmt::format("{} with zero={}: servers own the optimizer's state already", what, l.zero),
                   "set zero: 0, or parameter_server.servers: 0");
  if (l.compression.kind != CompressionKind::kNone)
    return refusal(
        fmt::format("{} with compression.kind={}: what is compressed is an all-reduce", what, name_of(l.compression.kind)),
        "set compression.kind: none, or parameter_server.servers: 0");
  if (l.diloco.steps > 0)
    return refusal(fmt::format("{} with diloco.steps={}: servers update at every step", what, l.diloco.steps),
                   "set diloco.steps: 0, or parameter_server.servers: 0");
  if (c.transport == TransportKind::kNccl)
    return refusal(fmt::format("{} with transport={}, which moves data by a way of its own", what, name_of(c.transport)),
                   "use transport: one-gpu or threads, or zero: 1, which shards the optimizer alike");
  return check_staleness(c);
}

/// Most inner steps that a period is planned of: its program is as long as all of them.
constexpr int kMostInnerSteps = 4096;

Result<void> check_diloco(const Case& c) {
  const Diloco& d = c.layout.diloco;
  if (d.steps == 0) return {};
  const Layout& l = c.layout;
  const std::string what = fmt::format("diloco.steps={}", d.steps);
  if (d.steps < 0 || d.steps > kMostInnerSteps)
    return refusal(what + " is no number of inner steps that can be planned", fmt::format("use 1 to {}", kMostInnerSteps));
  const double runs = static_cast<double>(d.steps) * static_cast<double>(c.model.layers * c.train.grad_accumulation);
  if (runs > kMostLayerRuns)
    return refusal(fmt::format("{} with layers {} and grad_accumulation {} = {:.0f} runs of a layer in one period", what,
                               c.model.layers, c.train.grad_accumulation, runs),
                   fmt::format("at most {:.0f} are planned: lower diloco.steps", kMostLayerRuns));
  if (!(d.learning_rate > 0) || std::isinf(d.learning_rate))
    return refusal(fmt::format("diloco.learning_rate={} moves nothing, or everything", d.learning_rate),
                   "use a number above 0; 1 without momentum averages");
  if (!(d.momentum >= 0 && d.momentum < 1))
    return refusal(fmt::format("diloco.momentum={} is outside [0, 1)", d.momentum), "set diloco.momentum between 0 and 1");
  if (l.dp == 1) return refusal(what + " with dp=1: one worker has nobody to average with", "set dp above 1, or diloco.steps: 0");
  const auto apart = [&](const std::string& with, std::string_view why, std::string_view remedy) {
    return refusal(fmt::format("{} with {}: {}", what, with, why), fmt::format("{}, or diloco.steps: 0", remedy));
  };
  if (l.zero > 0)
    return apart(fmt::format("zero={}", l.zero), "workers have parameters and moments of their own, and nothing to share out",
                 "set zero: 0");
  if (l.compression.kind != CompressionKind::kNone)
    return apart(fmt::format("compression.kind={}", name_of(l.compression.kind)), "no gradient travels",
                 "set compression.kind: none");
  if (l.offload.optimizer != OffloadTo::kNone)
    return apart(fmt::format("offload.optimizer={}", name_of(l.offload.optimizer)),
                 "the outer step moves what the optimizer updates, and that on the device", "set offload.optimizer: none");
  if (l.bucket_bytes != 0)
    return apart(fmt::format("bucket_bytes={}", l.bucket_bytes), "parameters are averaged where they are, one by one",
                 "leave bucket_bytes out");
  if (c.train.precision == Precision::kFp16 || c.train.guard.any())
    return apart(c.train.precision == Precision::kFp16 ? "precision=fp16" : "guard",
                 "whether a step is skipped all ranks must agree on, and workers do not talk within a period",
                 "use precision: fp32 or bf16 and no guard");
  if (c.train.precision == Precision::kFp8 && c.train.fp8_scaling == Fp8Scaling::kDelayed)
    return apart("fp8_scaling=delayed", "all ranks agree on every step's sizes, and workers do not talk within a period",
                 "use fp8_scaling: current or block");
  if (c.train.grad_norm)
    return apart("grad_norm", "each worker's gradient has a norm of its own, and none is the step's", "set grad_norm: false");
  if (!(c.checkpoint == Checkpointing{}))
    return apart("checkpoint", "the moments belong to workers, and no other layout could take them up", "leave checkpoint out");
  return {};
}

Result<void> check_layout(const Case& c) {
  const Model& m = c.model;
  const Layout& l = c.layout;
  SHARDLAB_TRY(divides("heads", m.heads, "tp", l.tp));
  SHARDLAB_TRY(divides("kv_heads", m.kv_heads, "tp", l.tp));
  SHARDLAB_TRY(divides("ffn", m.ffn, "tp", l.tp));
  if (l.sequence_parallel && c.train.seq_len % l.tp != 0)
    return refusal(fmt::format("sequence_parallel with seq_len {}, which is not divisible by tp={}", c.train.seq_len, l.tp),
                   fmt::format("set sequence_parallel: false, or seq_len: {}", (c.train.seq_len + l.tp - 1) / l.tp * l.tp));
  if (const AlgorithmChoice a = l.collective_algorithm;
      l.sequence_parallel && l.tp > 1 && (a == AlgorithmChoice::kRing || a == AlgorithmChoice::kHalvingDoubling))
    return refusal(
        fmt::format("sequence_parallel with collective_algorithm={}, which keeps partial sums in its source: sums of tokens "
                    "are scattered to storage of their own",
                    name_of(a)),
        "use collective_algorithm: auto or direct, which send as much");
  if (m.vocab % l.tp != 0)
    return refusal(
        fmt::format("vocab {} is not divisible by tp={}", m.vocab, l.tp),
        fmt::format("pad the vocabulary: set model.vocab to {}", (m.vocab + 128 * l.tp - 1) / (128 * l.tp) * (128 * l.tp)));
  SHARDLAB_TRY(check_pipeline(c));
  if (l.hybrid_shard != 0) {
    if (l.zero == 0)
      return refusal(fmt::format("hybrid_shard={} with zero=0: nothing is sharded", l.hybrid_shard), "set zero: 1, 2 or 3");
    if (l.hybrid_shard < 2 || l.hybrid_shard >= l.dp || l.dp % l.hybrid_shard != 0)
      return refusal(
          fmt::format("hybrid_shard={} with dp={}", l.hybrid_shard, l.dp),
          "it is the number of ranks that share one set of shards: a divisor of dp above 1 and below dp, or 0 for all of them");
  }
  if (l.zero != 3 && !(l.fsdp == Fsdp{}))
    return refusal(fmt::format("fsdp options with zero={}: only zero 3 gathers parameters", l.zero),
                   "set zero: 3, or leave fsdp out");
  if (l.fsdp.unit < 1 || l.fsdp.prefetch < 0)
    return refusal(fmt::format("fsdp.unit={} fsdp.prefetch={}", l.fsdp.unit, l.fsdp.prefetch),
                   "a unit has at least one layer, and nothing can be fetched after its use");
  if (l.zero == 3 && l.bucket_bytes != 0)
    return refusal(fmt::format("bucket_bytes={} with zero=3: what travels together is the unit", l.bucket_bytes),
                   "set fsdp.unit, and leave bucket_bytes out");
  const bool streams = l.zero == 3 && l.offload.parameters != OffloadTo::kNone;  // from outside the device, not from other ranks
  if (l.zero > 0 && l.data_ranks() == 1 && !streams)
    return refusal(fmt::format("zero={} with dp=1: there is nothing to shard over", l.zero), "set zero: 0, or dp above 1");
  if (l.collective_algorithm == AlgorithmChoice::kHalvingDoubling)
    for (const auto& [key, size] :
         {std::pair{"dp", l.replicas()},
          {l.hybrid_shard > 0 ? "hybrid_shard" : "dp", l.shard_ranks()},
          {"cp", l.cp},
          {"tp", l.tp},
          {"pp", c.train.grad_norm || c.train.clip_norm > 0 || c.train.guard.any() || c.train.precision == Precision::kFp16
                     ? l.pp
                     : 1}})  // stages add their norms
      if (!std::has_single_bit(static_cast<unsigned>(size)))
        return refusal(fmt::format("collective_algorithm=halving-doubling with {}={}, no power of two", key, size), "use ring");
  if (l.collective_algorithm == AlgorithmChoice::kHierarchical) {
    // Groups are even over nodes where the ranks of a node are whole blocks of every axis, or the blocks whole nodes.
    const int node = ranks_per_node(c);
    int64_t block = 1;
    for (const auto& [key, size] : {std::pair{"tp", l.tp}, {"cp", l.cp}, {"hybrid_shard", l.shard_ranks()}, {"dp", l.replicas()}, {"pp", l.pp}}) {
      block *= size;
      if (size > 1 && block % node != 0 && node % block != 0)
        return refusal(fmt::format("collective_algorithm=hierarchical with {}={}: blocks of {} ranks on nodes of {}", key, size, block, node),
                       "use sizes that divide a node or that nodes divide, or ring");
    }
  }
  return {};
}

/// More threads than any processor has: a library that is asked for them fails in its own words.
constexpr int kMostThreads = 1024;

/// What would train to nothing but nonsense.
Result<void> check_optimizer(const Train& t) {
  if (!(t.learning_rate.peak >= 0))
    return refusal(fmt::format("learning_rate={} is negative", t.learning_rate.peak), "use 0 or more");
  for (const auto& [key, beta] : {std::pair{"beta1", t.beta1}, {"beta2", t.beta2}})
    if (!(beta >= 0 && beta < 1))
      return refusal(fmt::format("{}={} is outside [0, 1)", key, beta), fmt::format("set {} between 0 and 1", key));
  if (!(t.epsilon > 0)) return refusal(fmt::format("epsilon={} is not positive", t.epsilon), "use a small number above 0, as 1e-8");
  return {};
}

Result<void> check_loss_scale(const Train& t) {
  const bool dynamic = t.loss_scale == 0, set = t.loss_scale != 0 || t.loss_scale_start != Train{}.loss_scale_start ||
                                                t.loss_scale_interval != Train{}.loss_scale_interval;
  if (t.precision != Precision::kFp16) {
    if (!set) return {};
    return refusal(fmt::format("loss_scale with precision={}: only fp16 gradients need a scale", name_of(t.precision)),
                   "set precision: fp16, or leave the keys of the loss scale out");
  }
  constexpr float kLeast = 1, kMost = 16777216;  // of the rule, kernels/loss_scale.h
  if (!dynamic && !(t.loss_scale >= kLeast && t.loss_scale <= kMost))
    return refusal(fmt::format("loss_scale={} is outside [{}, {:.0f}]", t.loss_scale, kLeast, kMost),
                   "use a power of two between, or dynamic");
  if (dynamic && !(t.loss_scale_start >= kLeast && t.loss_scale_start <= kMost))
    return refusal(fmt::format("loss_scale_start={} is outside [{}, {:.0f}]", t.loss_scale_start, kLeast, kMost),
                   "use a power of two between");
  if (t.loss_scale_interval < 1 || t.loss_scale_interval > kMost)
    return refusal(fmt::format("loss_scale_interval={}", t.loss_scale_interval), "use 1 step or more, and at most 2^24");
  return {};
}

/// Blocks of a slice are blocks of the whole, so that the scales do not depend on the layout.
Result<void> check_fp8(const Case& c) {
  const Train& t = c.train;
  if (t.precision != Precision::kFp8) return {};
  if (c.backend == BackendKind::kCuda)
    return refusal("precision=fp8 with backend=cuda, which has no kernels of it", "use precision: bf16, or backend: cpu");
  if (t.fp8_scaling != Fp8Scaling::kBlock || c.layout.tp == 1) return {};
  constexpr int64_t kBlock = 128;
  const Model& m = c.model;
  for (const auto& [what, width] : {std::pair{"rows of q, k and v", m.qkv_rows()},
                                    {"heads * head_dim", m.heads * m.head_dim},
                                    {"rows of the feed-forward", m.up_rows()},
                                    {"ffn", m.ffn}})
    if (width / c.layout.tp % kBlock != 0)
      return refusal(fmt::format("fp8_scaling=block with tp={}: a rank's {} of the {} {} are no whole blocks of {}", c.layout.tp,
                                 width / c.layout.tp, width, what, kBlock),
                     "lower tp, or use fp8_scaling: current or delayed");
  return {};
}

/// A setting of a technique that is off would change the case's id and nothing else: what is asked for and not done is refused.
Result<void> check_unused(const Case& c) {
  const Layout& l = c.layout;
  const auto unused = [](std::string_view settings, std::string_view without, std::string_view remedy) {
    return refusal(fmt::format("{} without {}: they would change nothing", settings, without),
                   fmt::format("{}, or leave them out (in a sweep `when` sets them where they count)", remedy));
  };
  Compression compression = l.compression;
  compression.kind = CompressionKind::kNone;
  if (l.compression.kind == CompressionKind::kNone && !(compression == Compression{}))
    return unused("settings of compression", "compression.kind", "name a compression.kind");
  if (l.diloco.steps == 0 && !(l.diloco == Diloco{})) return unused("settings of diloco", "diloco.steps", "set diloco.steps");
  if (l.parameter_server.servers == 0 && !(l.parameter_server == ParameterServer{}))
    return unused("settings of parameter_server", "parameter_server.servers", "set parameter_server.servers");
  if (l.offload.delayed_update && l.offload.optimizer == OffloadTo::kNone)
    return unused("offload.delayed_update", "offload.optimizer", "set offload.optimizer: cpu");
  if (c.train.precision != Precision::kFp8 && c.train.fp8_scaling != Train{}.fp8_scaling)
    return unused("fp8_scaling", "precision: fp8", "set precision: fp8");
  if (!c.train.guard.any() && !(c.train.guard == Guard{}))
    return unused("settings of guard", "guard.nonfinite and guard.spike", "set one of them to skip or stop");
  return {};
}

Result<void> check_guard(const Case& c) {
  const Guard& g = c.train.guard;
  if (!g.any()) return {};
  if (g.nonfinite != GuardAction::kNone && c.train.precision == Precision::kFp16)
    return refusal(fmt::format("guard.nonfinite={} with precision=fp16, whose loss scale overflows on purpose and skips such steps",
                               name_of(g.nonfinite)),
                   "leave guard.nonfinite out, or use precision: bf16");
  for (const auto& [key, factor] : {std::pair{"loss_factor", g.loss_factor}, {"norm_factor", g.norm_factor}})
    if (!(factor == 0 || factor > 1) || std::isinf(factor))
      return refusal(fmt::format("guard.{}={}: a spike is above the mean", key, factor),
                     "use a number above 1, or 0 to judge it not");
  if (g.spike != GuardAction::kNone && g.loss_factor == 0 && g.norm_factor == 0)
    return refusal(fmt::format("guard.spike={} with neither guard.loss_factor nor guard.norm_factor", name_of(g.spike)),
                   "set one of them above 1");
  if (g.window < 1 || g.window > 16777216) return refusal(fmt::format("guard.window={}", g.window), "use 1 step or more");
  return {};
}

Result<void> check_batch(const Case& c) {
  const Train& t = c.train;
  const int64_t tokens = t.seq_len * t.micro_batch * t.grad_accumulation * c.layout.dp;
  if (t.global_batch_tokens != 0 && t.global_batch_tokens != tokens)
    return refusal(fmt::format("global_batch_tokens={} is not seq_len {} * micro_batch {} * grad_accumulation {} * dp {} = {}",
                               t.global_batch_tokens, t.seq_len, t.micro_batch, t.grad_accumulation, c.layout.dp, tokens),
                   fmt::format("make global_batch_tokens a multiple of seq_len * micro_batch * dp = {}",
                               t.seq_len * t.micro_batch * c.layout.dp));
  if (!(t.clip_norm >= 0) || std::isinf(t.clip_norm))
    return refusal(fmt::format("clip_norm={} bounds no norm", t.clip_norm), "set clip_norm above 0, or to 0 for no clipping");
  if (c.model.max_positions > 0 && t.seq_len > c.model.max_positions)
    return refusal(fmt::format("seq_len={} exceeds the model's max_positions={}", t.seq_len, c.model.max_positions),
                   fmt::format("set seq_len to {} or less", c.model.max_positions));
  if (c.threads_per_rank > kMostThreads)
    return refusal(fmt::format("threads_per_rank={} is absurdly large", c.threads_per_rank),
                   fmt::format("set threads_per_rank to {} or less", kMostThreads));
  if (!(t.dropout >= 0 && t.dropout < 1))
    return refusal(fmt::format("dropout={} is outside [0, 1)", t.dropout), "set dropout between 0 and 1");
  return {};
}

Result<void> check_canonical(const Case& c) {
  if (!c.canonical) return {};
  const Train& t = c.train;
  const auto power_of_two = [](int64_t n) { return std::has_single_bit(static_cast<uint64_t>(n)); };
  if (!power_of_two(t.micro_batch))
    return refusal(fmt::format("canonical with micro_batch={}, no power of two", t.micro_batch),
                   "canonical sums are binary trees over sequences");
  const bool scattered = c.layout.zero >= 2 && t.grad_accumulation > 1;  // each micro-batch is summed over the ranks by itself
  if (scattered && !power_of_two(t.micro_batch * c.layout.shard_ranks()))
    return refusal(fmt::format("canonical with zero={} and micro_batch*{}={}, no power of two", c.layout.zero,
                               c.layout.hybrid_shard > 0 ? "hybrid_shard" : "dp", t.micro_batch * c.layout.shard_ranks()),
                   "every micro-batch must be an aligned block of the tree over sequences");
  if (scattered && c.layout.replicas() > 1 && !power_of_two(t.micro_batch * t.grad_accumulation))
    return refusal(fmt::format("canonical with {} sets of shards and micro_batch*grad_accumulation={}, no power of two",
                               c.layout.replicas(), t.micro_batch * t.grad_accumulation),
                   "what one set of shards sums must be an aligned block of the tree over sequences");
  if (c.layout.dp > 1 && !scattered && !power_of_two(t.micro_batch * t.grad_accumulation))
    return refusal(fmt::format("canonical with dp={} and micro_batch*grad_accumulation={}, no power of two", c.layout.dp,
                               t.micro_batch * t.grad_accumulation),
                   "every data-parallel rank must hold an aligned block of the tree over sequences");
  if (c.layout.cp > 1) {
    if (t.micro_batch != 1)
      return refusal(
          fmt::format("canonical with cp={} and micro_batch={}", c.layout.cp, t.micro_batch),
          "the tree over sequences stands above that over parts of each: set micro_batch: 1 and raise grad_accumulation");
    if (kContractionLeaves % c.layout.cp != 0)
      return refusal(fmt::format("canonical with cp={}, which does not divide {}", c.layout.cp, kContractionLeaves),
                     "use cp 1, 2, 4, 8 or 16");
    if (c.layout.zero == 1 && t.grad_accumulation > 1)
      return refusal(fmt::format("canonical with cp={}, zero=1 and grad_accumulation={}", c.layout.cp, t.grad_accumulation),
                     "each micro-batch is summed over the parts of its sequences by itself: set zero: 0, 2 or 3");
  }
  if (kContractionLeaves % c.layout.tp != 0)
    return refusal(fmt::format("canonical with tp={}, which does not divide {}", c.layout.tp, kContractionLeaves),
                   "use tp 1, 2, 4, 8 or 16");
  if (c.layout.collective_algorithm != AlgorithmChoice::kAuto && c.layout.collective_algorithm != AlgorithmChoice::kDirect)
    return refusal(fmt::format("canonical with collective_algorithm={}", name_of(c.layout.collective_algorithm)),
                   "only direct sums in canonical order");
  return {};
}

Result<void> check_checkpoint(const Case& c) {
  if (c.checkpoint.save_every < 0)
    return refusal(fmt::format("checkpoint.save_every={} is negative", c.checkpoint.save_every), "use 0 to save nothing");
  if (c.backend == BackendKind::kDry && !(c.checkpoint == Checkpointing{}))
    return refusal("checkpoint with backend=dry, which holds no values", "use backend: cpu, or leave checkpoint out");
  if (!c.checkpoint.folder.empty() && c.checkpoint.save_every == 0)
    return refusal("checkpoint.folder with checkpoint.save_every=0: nothing is saved", "set checkpoint.save_every");
  return {};
}

}  // namespace

Result<void> check(const Case& c) {
  SHARDLAB_TRY(check(c.model));
  SHARDLAB_TRY(check_sizes(c));
  SHARDLAB_TRY(check_products(c));
  SHARDLAB_TRY(check_implemented(c));
  SHARDLAB_TRY(check_layout(c));
  if (c.layout.cp > 1) SHARDLAB_TRY(check_context(c));
  SHARDLAB_TRY(check_recompute(c));
  SHARDLAB_TRY(check_zero_plus_plus(c));
  SHARDLAB_TRY(check_compression(c));
  SHARDLAB_TRY(check_parameter_server(c));
  SHARDLAB_TRY(check_diloco(c));
  SHARDLAB_TRY(check_batch(c));
  SHARDLAB_TRY(check_optimizer(c.train));
  SHARDLAB_TRY(check_loss_scale(c.train));
  SHARDLAB_TRY(check_fp8(c));
  SHARDLAB_TRY(check_guard(c));
  SHARDLAB_TRY(check_unused(c));
  SHARDLAB_TRY(check_checkpoint(c));
  return check_canonical(c);
}

}  // namespace shardlab
