#include "simulator/estimator/validate/predictor.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <map>
#include <memory>

#include "plan/optimizers.h"
#include "simulator/estimator/analytic/analytic.h"
#include "simulator/estimator/memory/replay.h"

namespace shardlab::simulator::validation {
namespace {

using analytic::FrameworkProfile;
using analytic::ModelShape;
using analytic::Point;

/// Settings of a row that the model of its framework does not tell apart.
struct Notes {
  std::string text;
  void add(const std::string& note) { text += (text.empty() ? "" : "; ") + note; }
};

ModelShape shape_of(const Run& run) {
  const RunShape& r = run.shape;
  ModelShape s;
  s.layers = r.layers, s.hidden = r.hidden, s.heads = r.heads, s.kv_heads = r.kv_heads, s.head_dim = r.head_dim;
  s.ffn = r.ffn, s.vocab = r.vocab;
  s.tied_embeddings = r.tied_embeddings, s.swiglu = r.swiglu, s.rms_norm = r.rms_norm;
  // GPT-2's family: learned positions and biases go with LayerNorm and GELU.
  const bool gpt = !r.rms_norm && !r.swiglu;
  s.biases = r.biases.value_or(gpt);
  s.max_positions = r.learned_positions.value_or(gpt) ? run.layout.seq_len : 0;
  s.experts = r.experts, s.top_k = r.top_k, s.moe_ffn = r.moe_ffn, s.shared_experts = r.shared_experts,
  s.dense_layers = r.dense_layers;
  s.q_rank = r.q_lora_rank, s.kv_rank = r.kv_lora_rank, s.rope_dim = r.qk_rope_head_dim, s.v_dim = r.v_head_dim;
  return s;
}

bool is_of(const std::string& profile, std::string_view framework) {
  return profile == framework || profile.starts_with(std::string(framework) + "-");
}

/// Bytes of an element that is reduced or accumulated in this precision; absent where the row does not say.
std::optional<double> element_bytes(const std::string& precision) {
  if (precision.empty()) return std::nullopt;
  return bytes_of(*precision_named(precision));
}

void set_attention(bool fused, FrameworkProfile& p) {
  if (fused == p.attention.fused) return;
  p.attention.fused = fused;
  // Softmax output, dropout's mask and output: 2 + 1 + 2 bytes a score (Korthikanti et al. 2022, section 4.1).
  p.saved.scores = fused ? 0 : p.model.dropout ? 5 : 2;
  p.saved.log_sum_exp = fused ? 4 : 0;
}

void set_state(const RunLayout& l, FrameworkProfile& p) {
  if (const auto bytes = element_bytes(l.master_dtype)) p.state.master = *bytes > p.state.parameter ? *bytes : 0;
  if (const auto bytes = element_bytes(l.moment_dtype)) p.state.moments = 2 * *bytes;
  if (l.gradient_fusion) p.overlap.wgrad_fused = *l.gradient_fusion ? 1 : 0;
}

Result<FrameworkProfile> profile_of(const Run& run, Notes& notes) {
  const RunLayout& l = run.layout;
  auto found = analytic::profile_named(run.profile);
  if (!found.ok()) return found.error();
  if (l.compile == true) {
    auto compiled = analytic::profile_named(run.profile + "-compiled");
    if (compiled.ok())
      found = std::move(compiled);
    else
      notes.add("predicted without torch.compile");
  }
  if (l.fp8_scaling == "rowwise" || l.fp8_scaling == "blockwise") {
    auto scaled = analytic::profile_named(run.profile + "-rowwise");
    if (scaled.ok() && l.fp8_scaling == "rowwise")
      found = std::move(scaled);
    else
      notes.add(l.fp8_scaling + " scaling is predicted as tensorwise");
  }
  FrameworkProfile p = std::move(*found);
  if (l.dropout) {
    p.model.dropout = *l.dropout > 0;
    // A byte an element of each of the two dropouts of the residual stream: Korthikanti et al. 2022, section 4.1.
    if (p.model.dropout) p.saved.mask = std::max(p.saved.mask, 1.0);
  }
  if (l.expandable_segments) p.memory.expandable = *l.expandable_segments;
  if (l.fp8_gather) p.state.fp8_gather = *l.fp8_gather;
  if (l.fused_attention) set_attention(*l.fused_attention, p);
  if (const auto bytes = element_bytes(l.reduce_dtype)) p.state.gradient_wire = *bytes;
  if (const auto bytes = element_bytes(l.accumulate_dtype)) p.state.gradient = *bytes;
  if (l.bucket_bytes && *l.bucket_bytes > 0) p.overlap.bucket_bytes = static_cast<double>(*l.bucket_bytes);
  set_state(l, p);
  if (l.tf32) p.model.fp32_tensor_cores = *l.tf32;
  if (!l.cuda_graphs.empty()) p.host.graphs = l.cuda_graphs == "none" ? 0 : l.cuda_graphs == "layers" ? 1 : 2;
  if (l.head_chunks) p.saved.head_chunks = static_cast<double>(*l.head_chunks);
  if (const auto optimizer = optimizer_named(l.optimizer)) analytic::set_optimizer(*optimizer, p);
  return p;
}

Result<analytic::Medium> medium_of(const std::string& word) {
  analytic::Medium medium = analytic::Medium::kDevice;
  if (!read(word, &medium)) return Error{ExitCode::kUsage, fmt::format("offload to `{}` is unknown", word), "cpu or nvme", {}};
  return medium;
}

Result<void> set_offload(const RunLayout& l, Point& point) {
  int parts = 0;
  for (const auto& [what, where] : l.offload) {
    const auto medium = medium_of(where);
    if (!medium.ok()) return medium.error();
    const int part = what == "master" ? Point::kMaster : what == "m" ? Point::kFirstMoment : what == "v" ? Point::kSecondMoment : 0;
    (what == "activations"             ? point.offload_activations
     : what == "optimizer" || part > 0 ? point.offload_optimizer
                                       : point.offload_parameters) = *medium;
    parts |= what == "optimizer" ? Point::kWholeOptimizer : part;
  }
  if (parts > 0) point.offload_parts = static_cast<uint8_t>(parts);
  return {};
}

Result<void> set_words(const Run& run, Point& point) {
  const RunLayout& l = run.layout;
  const auto unknown = [](const char* key, const std::string& word) {
    return Error{ExitCode::kUsage, fmt::format("{} `{}` cannot be predicted", key, word), "leave the row out", {}};
  };
  if (!analytic::read(l.schedule, &point.schedule)) return unknown("schedule", l.schedule);
  if (!l.cp_kind.empty() && !read(l.cp_kind, &point.cp_kind)) return unknown("cp_kind", l.cp_kind);
  const std::string recompute = fmt::format("{}", fmt::join(l.recompute, "+"));
  if (!read(recompute, &point.recompute)) return unknown("recompute", recompute);
  point.precision = *precision_named(l.precision);
  return set_offload(l, point);
}

Result<Point> point_of(const Run& run) {
  const RunLayout& l = run.layout;
  const bool fsdp = is_of(run.profile, "torchtitan") || is_of(run.profile, "llm-foundry");
  Point p;
  const auto narrow = [](int64_t v) { return static_cast<int32_t>(v); };  // rows.cpp bounds each far below 2^31
  p.dp = narrow(l.dp), p.tp = narrow(l.tp), p.pp = narrow(l.pp), p.vpp = narrow(l.vpp), p.cp = narrow(l.cp), p.ep = narrow(l.ep);
  p.expert_tp = run.shape.experts > 0 ? narrow(l.expert_tp.value_or(l.tp)) : 1;
  p.embedding_as_layer = l.embedding_as_layer, p.head_as_layer = l.head_as_layer;
  p.first_layers = static_cast<int16_t>(l.first_stage_layers), p.last_layers = static_cast<int16_t>(l.last_stage_layers);
  p.offload_layers = narrow(l.offload_layers);
  p.micro_batch_group = narrow(l.micro_batch_group), p.expert_overlap = l.expert_overlap;
  p.hybrid_shard = narrow(l.hybrid_shard.value_or(0));
  p.zero = narrow(l.zero.value_or(fsdp ? 3 : 0));
  p.sequence_parallel = l.sequence_parallel.value_or(is_of(run.profile, "torchtitan")) && l.tp > 1;
  p.micro_batch = narrow(l.micro_batch), p.grad_accumulation = narrow(l.grad_accumulation), p.seq_len = l.seq_len;
  if (l.overlap) p.overlap = *l.overlap ? 1 : 0;
  p.tensor_overlap = l.async_tp.value_or(false) ? 1 : 0;
  SHARDLAB_TRY(set_words(run, p));
  return p;
}

/// The row gives GB/s, the fabric bytes/s.
MeasuredFabric fabric_of(const Run& run) {
  const RunFabric& r = run.fabric;
  const auto bytes_per_s = [](std::optional<double> gb) { return gb ? std::optional(*gb * 1e9) : std::nullopt; };
  MeasuredFabric m;
  m.all_reduce = bytes_per_s(r.all_reduce), m.all_gather = bytes_per_s(r.all_gather),
  m.reduce_scatter = bytes_per_s(r.reduce_scatter);
  m.intra_all_reduce = bytes_per_s(r.intra_all_reduce), m.intra_all_gather = bytes_per_s(r.intra_all_gather);
  m.intra_reduce_scatter = bytes_per_s(r.intra_reduce_scatter);
  m.bytes = r.bytes.value_or(m.bytes);
  m.nodes = static_cast<int>((run.devices + run.machine.devices_per_node - 1) / run.machine.devices_per_node);
  return m;
}

/// All numbers of a machine that predictions read: two machine files may share an id.
std::string machine_text(const Machine& m) {
  const Device& d = m.device;
  return fmt::format("{} {} {} {} {} {} {} {} {} {} {}\n", m.id, d.id, m.nodes, m.devices_per_node, m.inter_bytes_per_s,
                     d.memory_bytes, d.memory_bytes_per_s, d.link_bytes_per_s, d.peak_flops, d.constants, m.fabric);
}

/// Live, reserved and device bytes, each of the stage where they are the most, or of the stage `only`.
std::array<int64_t, kMemoryKinds> most_bytes(const analytic::Prepared& prepared, analytic::Estimator& estimator, const Point& point,
                                             const analytic::Estimate& e, int64_t capacity, int64_t only) {
  using analytic::MemoryPart;
  std::array<int64_t, kMemoryKinds> most{};
  for (int32_t stage = 0; stage < point.pp; ++stage) {
    const analytic::MemoryBytes m = estimator.stage_memory(point, stage);
    // What the allocator holds besides makes no stage the fullest that is far from it.
    const bool far = stage != e.worst_stage && static_cast<double>(m.live()) < 0.9 * static_cast<double>(e.memory.live());
    if (only >= 0 ? stage != only : far) continue;
    const int64_t reserved = m.live() + whatif::fragmented_bytes(prepared, point, stage, capacity);
    const std::array<int64_t, kMemoryKinds> now{m.live(), reserved, reserved + m[MemoryPart::kContext] + m[MemoryPart::kNccl]};
    for (size_t kind = 0; kind < now.size(); ++kind) most[kind] = std::max(most[kind], now[kind]);
  }
  return most;
}

Prediction prediction_of(const analytic::Estimate& e, const std::array<int64_t, kMemoryKinds>& bytes, const Machine& machine,
                         std::string note) {
  using analytic::TimePart;
  Prediction p;
  p.step_s = e.step_s;
  p.bytes = bytes;
  p.capacity_bytes = machine.device.memory_bytes;
  double exposed = 0;
  for (const TimePart part : {TimePart::kLaunch, TimePart::kTensorParallel, TimePart::kContextParallel, TimePart::kExpertParallel,
                              TimePart::kDataParallel, TimePart::kPipeline})
    exposed += e.part(part);
  p.exposed = e.step_s > 0 ? exposed / e.step_s : 0;
  for (size_t i = 0; i < analytic::kTimeParts; ++i) p.parts.emplace_back(name_of(static_cast<TimePart>(i)), e.parts[i]);
  p.parts.emplace_back("hidden", e.hidden_comm_s);
  p.transferred = e.transferred;
  p.note = std::move(note);
  return p;
}

void set_doubts(const analytic::Prepared& prepared, const Point& point, const analytic::Estimate& e,
                const analytic::HeldBytes& held, int unstated, Prediction& p) {
  analytic::MemoryBytes memory = e.memory;  // of the replayed allocator, as the bytes are
  memory[analytic::MemoryPart::kFragmented] = p.of(MemoryKind::kReserved) - p.of(MemoryKind::kLive);
  p.step_doubt = analytic::step_doubt(prepared, point, e);
  p.live_doubt = analytic::live_doubt(prepared, point, memory);
  p.reserved_doubt = analytic::memory_doubt(prepared, point, memory, held);
  for (analytic::Doubt* doubt : {&p.step_doubt, &p.live_doubt, &p.reserved_doubt}) doubt->unstated = unstated;
}

class AnalyticPredictor {
 public:
  Result<Prediction> operator()(const Run& run) {
    Notes notes;
    const auto profile = profile_of(run, notes);
    if (!profile.ok()) {
      Error error = profile.error();
      error.message = fmt::format("`profile`: no profile is named `{}`", run.profile);
      return error;
    }
    const auto point = point_of(run);
    if (!point.ok()) return point.error();
    const auto study = study_of(run, *profile);
    if (!study.ok()) return study.error();
    const analytic::Estimate e = (*study)->estimator(*point);
    if (!e.legal()) {
      const auto why = explain((*study)->prepared, *point);
      return why.ok() ? Error{ExitCode::kNo, std::string(name_of(e.refusal)), "", {}} : why.error();
    }
    auto bytes =
        most_bytes((*study)->prepared, (*study)->estimator, *point, e, run.machine.device.memory_bytes, run.measured.stage);
    const analytic::HeldBytes held = held_bytes((*study)->prepared, *point);
    Prediction p = prediction_of(e, bytes, run.machine, notes.text);
    p.held_bytes = held.most;
    set_doubts((*study)->prepared, *point, e, held, run.unstated, p);
    p.bytes[static_cast<size_t>(MemoryKind::kReserved)] += held.typical;
    return p;
  }

 private:
  /// The data shared by rows of one model, machine and framework.
  struct Study {
    RunFabric fabric;
    int64_t devices;  ///< over which it was measured
    analytic::Prepared prepared;
    analytic::Estimator estimator;
  };

  Result<Study*> study_of(const Run& run, const FrameworkProfile& profile) {
    const ModelShape shape = shape_of(run);
    auto& studies = studies_[machine_text(run.machine) + profile.name];
    for (const auto& study : studies)
      if (study->prepared.shape() == shape && study->prepared.profile() == profile && study->fabric == run.fabric &&
          study->devices == run.devices)
        return study.get();
    auto prepared = analytic::prepare(shape, run.machine, profile, fabric_of(run));
    if (!prepared.ok()) return prepared.error();
    studies.push_back(std::make_unique<Study>(Study{run.fabric, run.devices, *prepared, analytic::Estimator(*prepared)}));
    return studies.back().get();
  }

  std::map<std::string, std::vector<std::unique_ptr<Study>>> studies_;
};

}  // namespace

Predictor analytic_predictor() {
  return [predictor = std::make_shared<AnalyticPredictor>()](const Run& run) { return (*predictor)(run); };
}

}  // namespace shardlab::simulator::validation
