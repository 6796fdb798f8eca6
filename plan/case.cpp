#include "plan/case.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <numbers>

#include "plan/base/documents.h"
#include "plan/kinds.h"
#include "plan/limits.h"
#include "plan/optimizers.h"
#include "plan/technique_settings.h"
#include "plan/techniques.h"

namespace shardlab {

using settings::kMostLayerRuns;

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
std::string_view name_of(Optimizer v) { return row_of(v).name; }

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
  constexpr std::string_view names[] = {"threads", "processes", "tcp", "one-gpu", "nccl", "gloo", "mpi"};
  return names[static_cast<int>(v)];
}
std::string_view name_of(AttentionBy v) { return v == AttentionBy::kAuto ? "auto" : v == AttentionBy::kOwn ? "own" : "cudnn"; }

std::string_view name_of(ExpertOverlap v) {
  static constexpr std::array<std::string_view, 3> kNames{"none", "layer", "micro-batches"};
  return kNames[static_cast<size_t>(v)];
}

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

TokenOrder token_order_of(const Layout& l) {
  switch (l.cp_kind) {
    case ContextKind::kAllGather:
    case ContextKind::kZigzag: return {TokenOrder::Kind::kZigzag, l.cp};
    case ContextKind::kStriped: return {TokenOrder::Kind::kStriped, l.cp};
    case ContextKind::kUsp: return {TokenOrder::Kind::kZigzag, l.ring_ranks()};
    default: return {};
  }
}

int64_t memory_per_rank(const Case& c) {
  const int64_t devices = std::max(1, c.machine.devices()), ranks = c.layout.world_size();
  if (!c.machine.local || ranks <= devices) return c.machine.device.memory_bytes;
  return static_cast<int64_t>(static_cast<double>(c.machine.device.memory_bytes) * static_cast<double>(devices) /
                              static_cast<double>(ranks));
}

namespace {

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
  const double hidden = static_cast<double>(m.hidden), vocab = static_cast<double>(m.vocab_rows());
  const double attention = static_cast<double>(m.heads) * static_cast<double>(std::max(m.head_dim, m.value_dim()));
  // Of a mixture, the rows that tokens make for all the experts that they go to, of all ranks that share experts.
  const int64_t shares = std::max(1, c.layout.ep);
  const int64_t of_sequence = shares * m.experts.most_rows(t.seq_len, m.experts.count / shares);
  const double expert = static_cast<double>(m.experts.ffn),
               choices = static_cast<double>(of_sequence) / static_cast<double>(t.seq_len);
  const double widest = std::max({static_cast<double>(m.qkv_rows()), static_cast<double>(m.up_rows()), attention, vocab,
                                  static_cast<double>(m.experts.count), choices * std::max(2 * expert, hidden),
                                  2 * static_cast<double>(m.experts.shared) * expert});
  const double op_flops = 2 * tokens * std::max(hidden * widest, 2 * static_cast<double>(t.seq_len) * attention);
  if (m.heads > kMaxHeads || m.kv_heads > kMaxHeads || m.head_dim > kMaxHeads || m.value_dim() > kMaxHeads)
    return refusal(fmt::format("model.heads={}, kv_heads={}, head_dim={}{}: one is absurdly large", m.heads, m.kv_heads, m.head_dim,
                               m.is_latent() ? fmt::format(", v_head_dim={}", m.value_dim()) : ""),
                   fmt::format("set each to {} or less", kMaxHeads));
  const double rows = std::max({tokens, hidden, static_cast<double>(m.max_positions)});
  const double elements = std::max(rows * std::max(widest, hidden), static_cast<double>(parameter_count(m)));
  if (elements > static_cast<double>(kMaxElements))
    return refusal(
        fmt::format("a tensor or bucket of {:.3g} elements: seq_len {} * micro_batch {}, and a model of {:.3g} parameters",
                    elements, t.seq_len, t.micro_batch, static_cast<double>(parameter_count(m))),
        fmt::format("at most {} are planned in one buffer: lower seq_len, micro_batch or the model", kMaxElements));
  const double layer_widths = 16 * hidden + 4 * static_cast<double>(m.qkv_rows()) + 4 * attention +
                              4 * static_cast<double>(m.up_rows()) + 4 * choices * (hidden + 2 * expert) +
                              (m.qk_norm ? 4 * static_cast<double>(m.qkv_rows()) : 0) +
                              4 * static_cast<double>(2 * (m.latent.q_rank + m.latent.kv_rank) + m.latent.rope) +
                              (m.experts.shared > 0 ? 4 * (hidden + 3 * static_cast<double>(m.experts.shared) * expert) : 0) +
                              (m.experts.shared_gate ? 8 * (hidden + 1) : 0) + 4 * static_cast<double>(m.experts.count);
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

/// What this version has no strategy for is refused by name, never ignored.
Result<void> check_missing(const Case& c) {
  const auto missing = [](std::string what, std::string have) {
    return refusal(fmt::format("{} is not implemented in this version", what), fmt::format("use {}", have), ErrorKind::kMissing);
  };
  if (c.train.precision == Precision::kFp4)
    return missing(fmt::format("precision={}", name_of(c.train.precision)), "precision: fp32, bf16, fp16 or fp8");
  if (c.profile != "shardlab")
    return refusal(fmt::format("profile={}: frameworks other than shardlab are only estimated", c.profile),
                   "set profile: shardlab, whose plans run here (--set profile=shardlab), or estimate it: `shardlab run` with "
                   "resolution: analytic",
                   ErrorKind::kMissing);
  return {};
}

/// A setting of what the case does not have is refused, whatever the sizes.
Result<void> check_idle_settings(const Layout& l) {
  if (l.cp_kind != ContextKind::kUsp && l.cp_ulysses != 0)
    return refusal(
        fmt::format("cp_ulysses={} with cp_kind={}: it says which ranks of usp exchange heads", l.cp_ulysses, name_of(l.cp_kind)),
        "set cp_kind: usp, or leave cp_ulysses out");
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

Result<void> check_batch(const Case& c) {
  const Train& t = c.train;
  const int64_t tokens = t.seq_len * t.micro_batch * t.grad_accumulation * c.layout.dp;
  if (t.global_batch_tokens != 0 && t.global_batch_tokens != tokens)
    return refusal(fmt::format("global_batch_tokens={} is not seq_len {} * micro_batch {} * grad_accumulation {} * dp {} = {}",
                               t.global_batch_tokens, t.seq_len, t.micro_batch, t.grad_accumulation, c.layout.dp, tokens),
                   fmt::format("make global_batch_tokens a multiple of seq_len * micro_batch * dp = {}",
                               t.seq_len * t.micro_batch * c.layout.dp),
                   ErrorKind::kBatch);
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

}  // namespace

std::optional<double> model_flops_per_token(const Case& c) {
  const int64_t s = c.train.seq_len;
  if (!c.data.packed) return model_flops_per_token(c.model, s);
  if (c.data.document_tokens == 0) return std::nullopt;
  const auto seen = [&](int64_t window) {
    return expected_pairs({}, s, c.data.document_tokens, 0, s, 0, s, window) / static_cast<double>(s);
  };
  return model_flops_per_token(c.model, seen(0), seen(c.model.window.tokens));
}

namespace {

/// A step that runs again takes its sequences one at a time, which not every schedule and sum can.
Result<void> check_second_run(const Case& c) {
  if (!bounds_experts(c)) return {};
  auto again = check(second_run_of(c));
  if (again.ok()) return {};
  Error error = again.error();
  error.message =
      fmt::format("expert_bound={}: the second run of a step, one sequence at a time: {}", c.layout.expert_bound, error.message);
  error.hint += error.hint.empty() ? "set expert_bound: 0" : ", or expert_bound: 0";
  return error;
}

}  // namespace

Result<void> check(const Case& c) {
  SHARDLAB_TRY(check(c.model));
  SHARDLAB_TRY(check_sizes(c));
  SHARDLAB_TRY(check_kinds(c));
  SHARDLAB_TRY(check_products(c));
  SHARDLAB_TRY(check_missing(c));
  SHARDLAB_TRY(check_idle_settings(c.layout));
  SHARDLAB_TRY(check_techniques(c));
  SHARDLAB_TRY(check_batch(c));
  SHARDLAB_TRY(check_optimizer(c.train));
  return check_second_run(c);
}

}  // namespace shardlab
