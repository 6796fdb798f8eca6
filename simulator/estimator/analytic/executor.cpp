// Points of shardlab's own executor: the case that a point stands for, and its bytes by the case's plan.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <utility>

#include "plan/pipeline_case.h"
#include "plan/routing.h"
#include "plan/technique_settings.h"
#include "simulator/estimator/analytic/inside.h"
#include "simulator/estimator/analytic/known.h"

namespace shardlab::simulator::analytic {
namespace {

/// The model of a shape, where it is one that is executed. What a shape does not say is as in any model.
std::optional<Model> model_of(const ModelShape& s) {
  const bool llama = s.swiglu && s.rms_norm && !s.biases && s.max_positions == 0;
  const bool gpt = !s.swiglu && !s.rms_norm && s.biases && s.max_positions > 0;
  if ((!llama && !gpt) || (s.latent() && !llama) || (!llama && s.qkv_biases) || s.qk_norm_whole || s.post_norms || s.router_bias ||
      s.out_bias || s.expert_biases || s.sinks || (!llama && (s.moe() || s.qk_norm)))
    return std::nullopt;
  Model m{
      .name = "shape", .family = llama ? Family::kLlama : Family::kGpt, .layers = s.layers, .hidden = s.hidden, .heads = s.heads};
  m.kv_heads = s.kv_heads, m.head_dim = s.head_dim, m.ffn = s.ffn, m.vocab = s.vocab, m.max_positions = s.max_positions;
  m.tied_embeddings = s.tied_embeddings, m.qk_norm = s.qk_norm, m.qkv_biases = s.qkv_biases;
  if (s.latent()) {
    m.latent = {.q_rank = s.q_rank, .kv_rank = s.kv_rank, .nope = s.head_dim, .rope = s.rope_dim, .v = s.v_dim};
    m.head_dim = s.qk_dim(), m.kv_heads = s.heads;
  }
  // Which layers have the window moves no byte. The second rotary table of layers with a window (docs/sliding-window.md) does: a shape does
  // not say it, and seq_len * head_dim fp32 of a rank are left out.
  if (s.windowed_layers > 0) m.window = {.tokens = s.window, .global_layers = s.layers - s.windowed_layers};
  if (s.moe())
    m.experts = {.count = s.experts,
                 .top_k = s.top_k,
                 .ffn = s.moe_ffn,
                 .shared = s.shared_experts,
                 .shared_gate = s.shared_gate,
                 .dense_layers = s.dense_layers,
                 .groups = s.router_groups,
                 .groups_chosen = s.router_groups_chosen,
                 .capacity_factor = static_cast<float>(s.capacity_factor)};
  return m;
}

/// Whether a case can say the point at all; `check` of the case then refuses what is not executed.
bool sayable(const Point& p) {
  constexpr uint16_t kNamed = Recompute::kAttentionCore | Recompute::kActivation;
  const bool recompute = p.recompute.full() || p.recompute.modules == Recompute::kSelective || (p.recompute.modules & ~kNamed) == 0;
  return recompute && p.tp % p.expert_tp == 0 && p.tensor_overlap == 0 && p.precision != Precision::kFp4;
}

OffloadTo place_of(Medium m) {
  return m == Medium::kDevice ? OffloadTo::kNone : m == Medium::kCpu ? OffloadTo::kCpu : OffloadTo::kNvme;
}

/// What a case calls each kind that a point has.
constexpr std::pair<CpKind, ContextKind> kContextKinds[] = {{CpKind::kRing, ContextKind::kRing},
                                                            {CpKind::kZigzag, ContextKind::kZigzag},
                                                            {CpKind::kStriped, ContextKind::kStriped},
                                                            {CpKind::kAllGather, ContextKind::kAllGather},
                                                            {CpKind::kUlysses, ContextKind::kUlysses}};

void set_layout(const Point& p, Case& c) {
  c.layout.dp = p.dp, c.layout.tp = p.tp, c.layout.pp = p.pp, c.layout.zero = p.zero, c.layout.hybrid_shard = p.hybrid_shard;
  c.layout.cp = p.cp, c.layout.ep = p.ep;
  c.layout.expert_tp = c.model.is_mixture() && p.expert_tp != p.tp ? p.expert_tp : 0;
  c.layout.cp_kind =
      p.cp > 1 ? std::ranges::find(kContextKinds, p.cp_kind, &std::pair<CpKind, ContextKind>::first)->second : ContextKind::kNone;
  c.layout.overlap = p.overlap != 0;
  c.layout.sequence_parallel = p.sequence_parallel;
  if (p.reshard >= 0) c.layout.fsdp.reshard = p.reshard != 0;
  if (p.zero != 3) c.layout.fsdp = {};
  c.layout.schedule = p.schedule, c.layout.vpp = p.vpp;
  c.train.precision = p.precision;
  c.train.seq_len = p.seq_len, c.train.micro_batch = p.micro_batch, c.train.grad_accumulation = p.grad_accumulation;
  c.train.global_batch_tokens = p.tokens_per_step();
}

}  // namespace

ExecutorCases::ExecutorCases(const Prepared::Inside& in) {
  const std::optional<Model> model = in.profile.name == "shardlab" ? model_of(in.shape) : std::nullopt;
  if (!model) return;
  possible_ = true, held_ = in.profile.can != Abilities{};
  if (in.rest) rest_ = *in.rest;
  case_ = rest_;
  // Losses of experts, their biases and the layers that have them take bytes, and no shape says them.
  if (shape_of(rest_.model) != in.shape) case_.model = *model;
  case_.machine = in.machine;
}

void ExecutorCases::set_offload(const Point& p) {
  Offload& o = case_.layout.offload;
  o.activations = place_of(p.offload_activations), o.optimizer = place_of(p.offload_optimizer),
  o.parameters = place_of(p.offload_parameters);
}

/// Kinds that a point tells apart, with what the study's case says of them. A point has no bits: 8 in the study, or nothing.
bool ExecutorCases::set_compression(const Point& p) {
  using Kind = CompressionKind;
  constexpr Kind kinds[] = {Kind::kNone, Kind::kPowerSgd, Kind::kTopK, Kind::kOneBitAdam, Kind::kInt8};
  const Kind kind = kinds[static_cast<size_t>(p.compression)];
  const shardlab::Compression& said = rest_.layout.compression;
  shardlab::Compression& c = case_.layout.compression;
  c = kind == said.kind ? said : shardlab::Compression{.kind = kind};
  if (kind == Kind::kPowerSgd) c.rank = p.compression_rank;
  if (kind == Kind::kTopK && std::lround(1000 * c.k) != p.compression_rank) c.k = p.compression_rank / 1000.0;
  return kind != Kind::kInt8 || c.bits == 8;
}

void ExecutorCases::set_recompute(const Point& p) {
  Layout& l = case_.layout;
  l.recompute = p.recompute.full()         ? shardlab::Recompute::kFull
                : p.recompute.modules != 0 ? shardlab::Recompute::kSelective
                                           : shardlab::Recompute::kNone;
  l.recompute_options = {};
  if (l.recompute != shardlab::Recompute::kSelective || p.recompute.modules == Recompute::kSelective) return;
  if (p.recompute.modules & Recompute::kAttentionCore) l.recompute_options.modules = "attn.core";
  if (p.recompute.modules & Recompute::kActivation)
    l.recompute_options.modules += l.recompute_options.modules.empty() ? "mlp.act" : " mlp.act";
}

const Case* ExecutorCases::of(const Point& point) {
  if (!possible_ || !sayable(point)) return nullptr;
  if (have_last_ && last_ == point) return runs_ ? &case_ : nullptr;
  last_ = point, have_last_ = true;
  case_.layout.fsdp = rest_.layout.fsdp;
  const bool apart = point.zero == 3 || point.dp == 1;  // no bucket travels: plan/automatic.h
  case_.layout.bucket_bytes = point.bucket_bytes >= 0 ? point.bucket_bytes : apart ? 0 : rest_.layout.bucket_bytes;
  case_.layout.collective_algorithm = point.algorithm;
  case_.train.fp8_scaling = point.precision == Precision::kFp8 ? rest_.train.fp8_scaling : Train{}.fp8_scaling;
  case_.train.loss_scale = point.precision == Precision::kFp16 ? rest_.train.loss_scale : 0;
  set_layout(point, case_);
  set_offload(point);
  set_recompute(point);
  runs_ = set_compression(point) && check(case_).ok();
  return runs_ ? &case_ : nullptr;
}

Error ExecutorCases::refusal(const Point& point) {
  of(point);
  const auto said = sayable(point) ? shardlab::check(case_) : Result<void>();
  if (!said.ok()) return said.error();
  return {.code = ExitCode::kNo,
          .message = "shardlab's executor does not run this layout",
          .hint = "name another --profile",
          .where = {}};
}

namespace {

MemoryBytes memory_of(const FrameworkProfile& profile, const MemoryByClass& at_peak) {
  const auto of = [&](BufferClass c) { return at_peak.bytes[static_cast<size_t>(c)]; };
  MemoryBytes m;
  m[MemoryPart::kParameters] = of(BufferClass::kParameter);
  m[MemoryPart::kMaster] = of(BufferClass::kMaster);
  m[MemoryPart::kGradients] = of(BufferClass::kGradient);
  m[MemoryPart::kMoments] = of(BufferClass::kMoment);
  m[MemoryPart::kActivations] = of(BufferClass::kActivation);
  m[MemoryPart::kTransient] = of(BufferClass::kTemporary);
  m[MemoryPart::kGathered] = of(BufferClass::kBuffer);
  m[MemoryPart::kWorkspace] =
      of(BufferClass::kInput) + of(BufferClass::kMetric) + of(BufferClass::kWorkspace) + of(BufferClass::kOther);
  m[MemoryPart::kContext] = static_cast<int64_t>(profile.memory.context);
  return m;
}

/// What a communicator of a plan is for, by its name.
WireUse use_of(std::string_view comm) {
  if (comm.starts_with("tp")) return WireUse::kTensor;
  if (comm == "ep" || comm.starts_with("etp")) return WireUse::kExpert;
  if (comm == "cp.grads") return WireUse::kGradients;
  if (comm.starts_with("cp")) return WireUse::kContext;
  if (comm == "dp.parameters" || comm == "dp.secondary") return WireUse::kWeights;
  if (comm.starts_with("dp.")) return WireUse::kGradients;
  if (comm == "pp.ends") return WireUse::kEnds;
  return comm.starts_with("pp.") ? WireUse::kPipeline : WireUse::kMetrics;
}

}  // namespace

void tell_bytes(const FrameworkProfile& profile, const CasePlan& plan, Estimate& e) {
  const auto peak = [&](size_t stage, Space space) -> const MemoryPeak& {
    return plan.stages()[stage][static_cast<size_t>(space)];
  };
  size_t worst = 0;
  e.host_bytes = e.nvme_bytes = 0;
  for (size_t i = 0; i < plan.stages().size(); ++i) {
    if (peak(i, Space::kDevice).peak_bytes > peak(worst, Space::kDevice).peak_bytes) worst = i;
    e.host_bytes = std::max(e.host_bytes, peak(i, Space::kHost).peak_bytes);
    e.nvme_bytes = std::max(e.nvme_bytes, peak(i, Space::kNvme).peak_bytes);
  }
  e.worst_stage = static_cast<int32_t>(worst);
  e.memory = memory_of(profile, peak(worst, Space::kDevice).at_peak);
  e.wire = {};
  for (const auto& [comm, bytes] : plan.wire()) e.wire[static_cast<size_t>(use_of(comm))] += static_cast<double>(bytes);
}

namespace {

Error no_form(std::string what, std::string hint) {
  return {.code = ExitCode::kUsage, .message = std::move(what) + " has no closed form", .hint = std::move(hint), .where = {}};
}

Result<void> read_context(const Case& c, Point& p) {
  if (c.model.is_mixture() && c.model.experts.every > 1 && c.layout.pp > 1)
    return no_form("a pipeline of layers with experts among layers without", "resolution: timeline, moe_every: 1, or pp: 1");
  if (c.layout.cp == 1 || c.layout.cp_kind == ContextKind::kNone) return {};  // as the framework has it
  const auto kind = std::ranges::find(kContextKinds, c.layout.cp_kind, &std::pair<CpKind, ContextKind>::second);
  if (kind == std::end(kContextKinds)) return no_form("cp_kind usp", "resolution: timeline, or cp_kind: zigzag or ulysses");
  p.cp_kind = kind->first;
  return {};
}

/// The fullest of the ranks that share experts, as they are placed.
Result<void> read_routing(const Case& c, Point& p) {
  const std::string& placed = c.layout.expert_placement;
  if (!placed.empty() && !c.model.is_mixture())
    return no_form("a placement of experts of a model whose experts no case holds", "leave expert_placement out");
  SHARDLAB_TRY(settings::check_placement(c));
  if (placed == kMeasured)
    return refusal("expert_placement=measured in an estimate: the run that is resumed is not read",
                   "set data.routes to its loads.txt, and expert_placement: balanced", ErrorKind::kNotCounted);
  if (c.data.routing.empty() && c.data.routes.empty()) return {};
  if (!c.model.is_mixture())
    return no_form("a routing of a model whose experts no case holds", "leave data.routing and data.routes out");
  const auto routing = routing_of(c);
  if (!routing.ok()) return routing.error();
  if (c.layout.ep > 1 && c.model.experts.count % c.layout.ep == 0)
    p.expert_skew = expected_imbalance(*routing, c.model, c.layout.ep, placements_of(c, *routing, c.layout.ep));
  return {};
}

/// Sub-layers by their labels in plans.
Result<void> read_recompute(const Case& c, Point& p) {
  const RecomputeOptions& options = c.layout.recompute_options;
  if (c.layout.recompute == shardlab::Recompute::kByLayer)
    return no_form("recompute layer by layer", "resolution: timeline, or all layers alike");
  if (options.budget_bytes > 0) return no_form("recompute within a budget", "resolution: timeline, or recompute without budget");
  if (options.every > 1) return no_form("recompute of every k-th layer", "resolution: timeline, or all layers");
  if (c.layout.recompute == shardlab::Recompute::kNone) return {};
  p.recompute.modules = c.layout.recompute == shardlab::Recompute::kFull ? Recompute::kLayer : Recompute::kSelective;
  if (p.recompute.full() || options.modules.empty()) return {};
  p.recompute.modules = 0;
  for (size_t begin = 0; begin < options.modules.size();) {
    const size_t end = std::min(options.modules.find(' ', begin), options.modules.size());
    const std::string_view word = std::string_view(options.modules).substr(begin, end - begin);
    begin = end + 1;
    if (word == "attn.core")
      p.recompute.modules |= Recompute::kAttentionCore;
    else if (word == "mlp.act")
      p.recompute.modules |= Recompute::kActivation;
    else if (!word.empty())
      return no_form(fmt::format("recompute of {}", word), "resolution: timeline, or attn.core and mlp.act");
  }
  return {};
}

Result<void> read_offload(const Offload& o, Point& p) {
  if (o.delayed_update) return no_form("a delayed update", "offload without delay");
  const auto medium = [](OffloadTo to) {
    return to == OffloadTo::kNone ? Medium::kDevice : to == OffloadTo::kCpu ? Medium::kCpu : Medium::kNvme;
  };
  p.offload_activations = medium(o.activations), p.offload_optimizer = medium(o.optimizer),
  p.offload_parameters = medium(o.parameters);
  return {};
}

Result<void> read_compression(const shardlab::Compression& given, Point& p) {
  switch (given.kind) {
    case CompressionKind::kNone: return {};
    case CompressionKind::kInt8:
      if (given.bits == 8) return p.compression = Compression::kInt8, Result<void>();
      break;
    case CompressionKind::kPowerSgd: p.compression = Compression::kPowerSgd, p.compression_rank = given.rank; return {};
    case CompressionKind::kTopK:
      p.compression = Compression::kTopK, p.compression_rank = static_cast<int32_t>(std::lround(1000 * given.k));
      return {};
    case CompressionKind::kOneBitAdam: return p.compression = Compression::kOneBit, Result<void>();
    case CompressionKind::kBf16:
    case CompressionKind::kRandomK: break;
  }
  return no_form(fmt::format("compression {}", name_of(given.kind)), "none, int8 of 8 bits, top-k, powersgd or one-bit-adam");
}

}  // namespace

int32_t expert_slices_of(const Layout& layout, bool moe) { return moe ? layout.expert_slices() : std::max(1, layout.expert_tp); }

Result<Point> point_of(const Case& c) {
  SHARDLAB_TRY(check_known(c));
  Point p{.dp = c.layout.dp, .tp = c.layout.tp, .pp = c.layout.pp, .vpp = c.layout.vpp, .cp = c.layout.cp, .ep = c.layout.ep};
  p.expert_tp = expert_slices_of(c.layout, c.model.is_mixture());
  p.zero = c.layout.zero;
  p.hybrid_shard = c.layout.hybrid_shard;
  // What a sweep file has where it does not say is, of another framework, as that has it.
  const int8_t by_default = c.profile == "shardlab" ? 1 : -1;
  if (c.layout.zero == 3) p.reshard = c.layout.fsdp.reshard ? by_default : 0;
  p.schedule = c.layout.schedule;
  if (p.schedule > Schedule::kDualPipeV) return no_form(fmt::format("schedule {}", name_of(c.layout.schedule)), "another schedule");
  p.sequence_parallel = c.layout.sequence_parallel;
  if (c.layout.tensor_overlap && c.profile == "shardlab")
    return no_form("tensor_overlap on shardlab's executor", "resolution: timeline or segments, or tensor_overlap: false");
  p.tensor_overlap = c.layout.tensor_overlap ? 1 : 0;
  SHARDLAB_TRY(read_context(c, p));
  SHARDLAB_TRY(read_routing(c, p));
  SHARDLAB_TRY(read_recompute(c, p));
  SHARDLAB_TRY(read_offload(c.layout.offload, p));
  SHARDLAB_TRY(read_compression(c.layout.compression, p));
  p.overlap = c.layout.overlap ? by_default : 0;
  // 0 is tensor by tensor, and what a case has where nothing is reduced in buckets or a framework's own size is meant.
  const bool in_buckets = c.profile == "shardlab" && c.layout.zero < 3 && c.layout.dp > 1;
  if (c.layout.bucket_bytes > 0 || in_buckets) p.bucket_bytes = c.layout.bucket_bytes;
  p.algorithm = c.layout.collective_algorithm;
  p.precision = c.train.precision;
  constexpr int64_t kMost = int64_t{1} << 30;
  if (c.train.micro_batch > kMost || c.train.grad_accumulation > kMost)
    return Error{.message = fmt::format("micro_batch {} and grad_accumulation {}", c.train.micro_batch, c.train.grad_accumulation),
                 .hint = "each at most 2^30",
                 .where = {}};
  p.micro_batch = static_cast<int32_t>(c.train.micro_batch);
  p.grad_accumulation = static_cast<int32_t>(c.train.grad_accumulation);
  p.seq_len = c.train.seq_len;
  return p;
}

namespace {

/// The profile with what the case says beside it.
Result<FrameworkProfile> profile_for(const Case& c) {
  Result<FrameworkProfile> profile = profile_named(c.profile);
  if (!profile) return profile.error();
  const auto bytes = [](const std::string& dtype) { return dtype == "fp32" ? 4.0 : 2.0; };
  if (!c.train.reduce_dtype.empty()) profile->state.gradient_wire = bytes(c.train.reduce_dtype);
  if (!c.train.accumulate_dtype.empty()) profile->state.gradient = bytes(c.train.accumulate_dtype);
  set_optimizer(c.train.optimizer, *profile);
  if (c.layout.loss_chunks > 1) profile->saved.head_chunks = c.layout.loss_chunks;
  if (c.profile != "shardlab") {  // whose executor has these keys itself
    if (c.train.dropout > 0) profile->model.dropout = true;
    if (c.layout.fsdp.unit > 1) profile->overlap.unit_layers = c.layout.fsdp.unit;
  }
  return profile;
}

}  // namespace

Result<Prepared> prepare(const Case& c, const ModelShape& shape, const MeasuredFabric& measured) {
  if (c.profile == "shardlab" && shape != shape_of(c.model))
    return Error{.code = ExitCode::kUsage,
                 .message = fmt::format("shardlab's executor has no plan of {}", c.model.name),
                 .hint = "name a framework that runs it: profile: megatron (--profile megatron)",
                 .where = {}};
  const Result<FrameworkProfile> profile = profile_for(c);
  if (!profile) return profile.error();
  if (shape != shape_of(c.model)) return prepare(shape, c.machine, *profile, measured);
  return prepare(c, measured);
}

Result<Prepared> prepare(const Case& c, const MeasuredFabric& measured) {
  const Result<FrameworkProfile> profile = profile_for(c);
  if (!profile) return profile.error();
  return prepare(shape_of(c.model), c.machine, *profile, measured, std::make_shared<const Case>(c));
}

}  // namespace shardlab::simulator::analytic
