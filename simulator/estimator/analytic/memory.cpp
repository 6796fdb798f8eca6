// Live bytes of a stage at its peak, by use; and the bytes that the allocator, the driver and the communicators add.
#include <algorithm>
#include <array>

#include "simulator/estimator/analytic/inside.h"

namespace shardlab::simulator::analytic {
namespace {

/// Bytes that live for the whole step.
struct Standing {
  double parameters = 0, gradients = 0, master = 0, moments = 0;
};

Standing standing_of(const Frame& f, const StageGroup& g) {
  const double dense = of(f.trained_dense(g)), expert = of(f.trained_experts(g));
  const int zero = f.point.zero;
  const auto part = [&](bool cut, double dense_bytes, double expert_bytes) {
    return cut ? dense_bytes / of(f.replicas.shard) + expert_bytes / of(f.replicas.expert_shard) : dense_bytes + expert_bytes;
  };
  const auto held = [&](bool cut, double bytes) { return bytes * part(cut, dense, expert); };
  const FrozenBytes frozen = frozen_of(f, g);
  return {.parameters = held(zero >= 3, f.bytes.parameter) + part(zero >= 3, frozen.dense(), frozen.expert),
          .gradients = held(zero >= 2, f.bytes.gradient),
          .master = held(zero >= 1, f.bytes.master),
          .moments = held(zero >= 1, f.bytes.moments)};
}

/// Bytes of one micro-batch on a stage.
struct Kept {
  double layers = 0;  ///< from forward to backward, embedding included
  double head = 0;    ///< of the head, logits not
  double logits = 0;  ///< of the head, from its forward to its backward
  double offloaded = 0;
};

/// The part of the layers whose activations are offloaded.
double offloaded_share(const Frame& f) {
  return f.point.offload_layers > 0 ? std::min(1.0, f.point.offload_layers / of(f.in.shape.layers)) : 1;
}

/// With `flying` micro-batches between forward and backward.
Kept kept_of(const Frame& f, const StageGroup& g, double flying) {
  const Block& b = f.block;
  Kept k;
  k.layers = of(g.dense) * b.dense.kept + of(g.moe) * b.moe.kept + (g.holds_embedding ? b.embedding.kept : 0);
  if (f.point.offload_activations != Medium::kDevice) {
    // Two layers stay: the one that runs and the one that is copied.
    const double layers = of(g.dense + g.moe), waits = f.in.profile.overlap.offload_waits ? flying : 1;
    const double stays = std::min(1.0, 2 / layers) / waits;
    const double all = f.in.profile.overlap.offload_residual ? layers * b.boundary : k.layers;
    k.offloaded = all * (1 - stays) * offloaded_share(f);
    k.layers -= k.offloaded;
  }
  const double logits = b.head.logits - b.head.at_loss;
  if (g.holds_loss) k.logits = logits;
  if (g.holds_head) k.head = b.head.kept - logits;
  return k;
}

/// A moment that may be the peak.
struct Moment {
  PeakMoment name = PeakMoment::kForward;
  double gradients = 0, activations = 0, transient = 0, logits = 0;
  double gathered = 0;  ///< weights
  double made = 0;      ///< gradients as backward makes them
  double total() const { return gradients + activations + transient + logits + gathered + made; }
};

/// Whether the layer that runs at the peak is one with experts: the one whose backward needs more.
bool mixture_runs(const Frame& f, const StageGroup& g) {
  const Block& b = f.block;
  return g.moe > 0 && (g.dense == 0 || b.moe.transient + b.moe.remade > b.dense.transient + b.dense.remade);
}

/// The highest of moments: one that is no higher than those before is not it.
class Highest {
 public:
  void offer(const Moment& m) {
    const double total = m.total();
    if (total > most_) most_ = total, highest_ = m;
  }
  const Moment& get() const { return highest_; }

 private:
  double most_ = -1;
  Moment highest_;
};

/// How often a stage's layers are in flight: as often as its micro-batches, but where ends count as layers the part of a looped stage
/// that holds one has a layer less than the other parts, and parts are not in flight alike.
double layers_in_flight(const Frame& f, const StageGroup& g, int32_t stage, double flying) {
  const Point& p = f.point;
  const bool first = g.holds_embedding && p.embedding_as_layer, last = g.holds_head && p.head_as_layer;
  const double layers = of(g.dense + g.moe);
  if (p.schedule != Schedule::kInterleaved || !(first || last) || layers == 0) return flying;
  const double missing = (first ? in_flight_of_part(p, stage, 0) : 0) + (last ? in_flight_of_part(p, stage, p.vpp - 1) : 0);
  return ((layers + (first ? 1 : 0) + (last ? 1 : 0)) * flying - missing) / layers;
}

/// `flying`: micro-batches between their forward and their backward; `flying_layers`: the same of the stage's layers.
Moment peak_of(const Frame& f, const StageGroup& g, const Kept& kept, double flying, double flying_layers,
               const Standing& standing) {
  const Point& p = f.point;
  const Block& b = f.block;
  const GatheredBytes gathered = gathered_of(f, g);
  // The head's forward is followed by its backward at once, but where all forwards come first.
  const double heads = forwards_first(p.schedule) ? flying : 1;
  // Gradients that backward makes are there from the second micro-batch on.
  const bool early = f.in.profile.state.gradient_with_step || p.grad_accumulation > 1;
  const double before = early ? standing.gradients : 0;
  const double sends = p.pp > 1 ? 2 * b.boundary : 0;
  const double layers = flying_layers * kept.layers, others = std::max(0.0, layers - kept.layers);
  const LayerCost& running = mixture_runs(f, g) ? b.moe : b.dense;
  const double held = g.holds_loss ? b.head.logits_output : 0;
  const double while_backward = running.remade + running.transient + sends;
  const double other_heads = layers + (heads - 1) * kept.head, other_logits = (heads - 1) * kept.logits;

  Highest highest;
  highest.offer({.name = PeakMoment::kForward,
                 .gradients = before,
                 .activations = other_heads,
                 .transient = running.passing + sends,
                 .logits = other_logits + held,
                 .gathered = gathered.forward(),
                 .made = gathered.gradient_stays});
  if (g.holds_head || g.holds_loss) {
    Moment loss{.name = PeakMoment::kLoss,
                .gradients = before,
                .activations = layers + heads * kept.head,
                .transient = sends,
                .logits = heads * kept.logits + (g.holds_loss ? b.head.at_loss : b.head.logits_once),
                .gathered = gathered.loss(),
                .made = gathered.gradient_stays};
    highest.offer(loss);
    loss.logits = other_logits + held;  // the head's matmuls run backward
    if (g.holds_head) loss.logits += b.head.logits_gradient, loss.transient += b.head.input_gradient;
    loss.made += gathered.head_gradient;
    highest.offer(loss);
  }
  highest.offer({.name = PeakMoment::kBackward,
                 .gradients = before,
                 .activations = other_heads,
                 .transient = while_backward,
                 .logits = other_logits + held,
                 .gathered = gathered.backward(),
                 .made = gathered.made()});
  highest.offer({.name = PeakMoment::kEnd,
                 .gradients = standing.gradients,
                 .activations = others + running.kept,
                 .transient = while_backward,
                 .logits = held,
                 .gathered = gathered.backward(),
                 .made = gathered.made() + gathered.layers_gradient});
  highest.offer({.name = PeakMoment::kEnd,  // the embedding's gradient is made
                 .gradients = standing.gradients,
                 .activations = others,
                 .transient = sends,
                 .logits = held,
                 .gathered = gathered.standing,
                 .made = gathered.gradient_stays + gathered.layers_gradient + gathered.last_gradient});
  highest.offer({.name = PeakMoment::kUpdate, .gradients = standing.gradients, .logits = held, .gathered = gathered.updated});
  return highest.get();
}

/// Communicators that a rank opens.
double communicators(const Point& p) {
  return (p.tp > 1) + (p.cp > 1) + (p.dp * p.cp > 1 ? 1 : 0) + (p.pp > 1 ? 2 : 0) + (p.ep > 1 ? 2 : 0);
}

double buckets_of(const Frame& f, const StageGroup& g) {
  if (f.replicas.dense <= 1 || f.gathers) return 0;
  const FrameworkProfile& p = f.in.profile;
  const bool reduces = f.point.zero == 0 && p.memory.reducer > 0;
  const double reducer = reduces ? p.memory.reducer * of(f.trained_dense(g) + f.trained_experts(g)) : 0;
  return p.memory.buckets * f.bucket_bytes + reducer;
}

/// Values and gradients that stages exchange, where they stay for each micro-batch of the step: a rank's virtual stages
/// receive and send two tensors each way, the first of all nothing before, the last nothing after it but its logits. Inputs
/// in flight are activations.
double boundaries_of(const Frame& f, const StageGroup& g, int32_t stage) {
  const Point& p = f.point;
  if (p.pp <= 1 || !f.in.profile.memory.pipeline_buffers) return 0;
  const double tensors = 4.0 * p.vpp - (g.holds_embedding ? 2 : 0) - (g.holds_head ? 2 : 0);
  const double flying = g.holds_embedding ? 0 : in_flight(p, stage);
  const double logits = g.holds_loss ? of(p.grad_accumulation - 1) * f.block.head.logits_once : 0;
  return (tensors * of(p.grad_accumulation) - flying) * f.block.boundary + logits;
}

/// Buffers of gathered rows that outlive the matmul that reads them.
double rows_of(const Frame& f) {
  const bool cut = f.point.sequence_parallel && f.point.tp > 1;
  return cut ? f.in.profile.memory.rows / 2 * f.block.head.input_gradient : 0;
}

/// Gradients that nobody reads: one of each shape.
double dummies_of(const Frame& f, const StageGroup& g) {
  const Block& b = f.block;
  if (f.in.profile.overlap.wgrad_fused <= 0) return 0;  // autograd has the real ones
  const auto read = [&](Trained::Module m, double elements) { return f.in.shape.trained.freezes(m) ? 0 : elements; };
  return f.in.profile.memory.dummy_gradients *
         (read(Trained::kAttention, b.attention_shapes) + read(Trained::kFeedForward, g.dense > 0 ? b.dense.shapes : 0) +
          read(Trained::kExperts, g.moe > 0 ? b.moe.shapes : 0));
}

/// A stage's bytes, and at which moment they are the most.
struct Peaked {
  MemoryBytes memory;
  PeakMoment moment;
};

Peaked peaked_of(const Frame& f, const StageGroup& g, int32_t stage, int64_t* host, int64_t* nvme) {
  const FrameworkProfile& p = f.in.profile;
  const Point& point = f.point;
  Standing standing = standing_of(f, g);
  double host_bytes = 0, nvme_bytes = 0;
  const auto move_out = [&](Medium to, double& bytes) {
    if (to == Medium::kDevice) return;
    (to == Medium::kCpu ? host_bytes : nvme_bytes) += bytes;
    bytes = 0;
  };
  if (point.offload_parts & Point::kMaster) move_out(point.offload_optimizer, standing.master);
  const int moments = (point.offload_parts & Point::kFirstMoment ? 1 : 0) + (point.offload_parts & Point::kSecondMoment ? 1 : 0);
  double moved = standing.moments * moments / 2;
  const double unmoved = standing.moments - moved;
  move_out(point.offload_optimizer, moved);
  standing.moments = unmoved + moved;
  move_out(point.offload_parameters, standing.parameters);
  const double flying = in_flight(point, stage);
  const Kept kept = kept_of(f, g, flying);
  double offloaded = flying * kept.offloaded;
  move_out(point.offload_activations, offloaded);
  const Moment peak = peak_of(f, g, kept, flying, layers_in_flight(f, g, stage, flying), standing);

  MemoryBytes m;
  m[MemoryPart::kParameters] = whole(standing.parameters);
  // What backward makes is the running layer's, unless it stays.
  const bool stays = p.state.gradient_fresh_stage && !f.gathers, passes = !stays && !f.gathers;
  m[MemoryPart::kGradients] = whole(peak.gradients + (stays ? peak.made : 0));
  m[MemoryPart::kMaster] = whole(standing.master);
  m[MemoryPart::kMoments] = whole(standing.moments);
  m[MemoryPart::kActivations] = whole(peak.activations);
  m[MemoryPart::kTransient] = whole(peak.transient + (passes ? peak.made : 0));
  m[MemoryPart::kLogits] = whole(peak.logits);
  m[MemoryPart::kGathered] = whole(peak.gathered + (f.gathers ? peak.made : 0));
  m[MemoryPart::kBuckets] = whole(buckets_of(f, g) + boundaries_of(f, g, stage) + rows_of(f));
  m[MemoryPart::kWorkspace] = whole(p.memory.workspace + (f.in.hopper ? p.memory.workspace_hopper : 0) + dummies_of(f, g));
  if (p.memory.caching)
    m[MemoryPart::kFragmented] =
        whole(p.memory.fragmentation_base +
              p.memory.fragmentation * (peak.activations + peak.transient + peak.logits + peak.gathered + (stays ? 0 : peak.made)));
  m[MemoryPart::kContext] = whole(p.memory.context);
  m[MemoryPart::kNccl] = whole(p.memory.nccl_channel * communicators(point));
  if (host != nullptr) *host = whole(host_bytes);
  if (nvme != nullptr) *nvme = whole(nvme_bytes);
  return {m, peak.name};
}

/// Shares `activations` out by tensor, in proportion to what all layers in flight keep; the rest is of the ends of the model.
std::vector<KeptBytes> activations_of(const Frame& f, const StageGroup& g, const LayerKey& key, double flying,
                                      int64_t activations) {
  std::vector<KeptBytes> list;
  double all = 0;
  for (const bool moe : {false, true}) {
    const int64_t layers = moe ? g.moe : g.dense;
    if (layers == 0) continue;
    const KeptTensors tensors = kept_tensors(f.in.layers(), key, moe);
    for (const KeptTensor& t : tensors.all()) {
      const double bytes = t.kept * of(layers) * flying;
      if (bytes < 0.5) continue;
      const auto same = std::ranges::find_if(list, [&](const KeptBytes& k) { return k.name == t.name && k.moe == moe; });
      KeptBytes& item = same != list.end() ? *same : list.emplace_back(KeptBytes{t.name, moe, 0});
      item.bytes += whole(bytes), all += bytes;
    }
  }
  // At the end of the step, and where activations are offloaded, part of this is no longer there.
  const double share = all > of(activations) ? of(activations) / all : 1;
  int64_t rest = activations;
  for (KeptBytes& item : list) {
    item.bytes = std::min(rest, whole(of(item.bytes) * share));
    rest -= item.bytes;
  }
  if (rest > 0) list.push_back({"embedding, head and stage boundary", false, rest});
  return list;
}

}  // namespace

FrozenBytes frozen_of(const Frame& f, const StageGroup& g) {
  const int64_t ends = f.end_parameters(g) - f.trained_ends(g);
  return {.layers = f.bytes.frozen * of(f.dense_parameters(g) - f.trained_dense(g) - ends),
          .expert = f.bytes.frozen * of(f.expert_parameters(g) - f.trained_experts(g)),
          .ends = f.bytes.frozen_ends * of(ends)};
}

GatheredBytes gathered_of(const Frame& f, const StageGroup& g) {
  GatheredBytes bytes;
  const FrameworkProfile& p = f.in.profile;
  const LayerCost none;
  const LayerCost &dense_layer = g.dense > 0 ? f.block.dense : none, &moe_layer = g.moe > 0 ? f.block.moe : none;
  const LayerCost& larger = dense_layer.parameters() > moe_layer.parameters() ? dense_layer : moe_layer;
  const double dense = of(dense_layer.trained()), moe = of(moe_layer.trained());
  const double embedding = g.holds_embedding ? of(f.block.embedding.trained()) : 0;
  const double head = g.holds_head ? of(f.block.head.trained()) : 0;
  const double all = of(f.trained_dense(g) + f.trained_experts(g));
  const double ends = of(f.trained_ends(g));
  bytes.head_gradient = f.bytes.ends * head;
  bytes.last_gradient = f.bytes.ends * embedding;
  if (!f.gathers) {
    if (f.point.zero > 0 && f.replicas.dense > 1) bytes.updated = p.update.gathered * all;
    if (!p.state.gradient_fresh_stage) {
      bytes.gradient = std::max(dense, moe) * f.bytes.fresh;
      return bytes;
    }
    bytes.head_stays = true;
    bytes.layers_gradient = f.bytes.fresh * (all - ends);
    bytes.last_gradient = f.bytes.ends * ends;
    return bytes;
  }
  // Tensor by tensor, a matrix of the feed-forward is the largest.
  const double matrices = f.in.shape.swiglu ? 3 : 2;
  const double layer =
      p.overlap.by_tensor ? std::max(f.block.dense.shapes, f.block.moe.shapes) / matrices : of(larger.parameters());
  const double gathered_unit = layer * std::max(1.0, p.overlap.unit_layers);
  const FrozenBytes frozen = frozen_of(f, g);
  bytes.standing = f.bytes.ends_wire * ends + frozen.ends +
                   (f.keeps_gathered ? f.bytes.weight_wire * (all - ends) + frozen.layers + frozen.expert : 0);
  // What of a unit is trained, and the bytes of its weights, frozen ones as they are held.
  const double still = of(larger.frozen + larger.frozen_expert),
               share = still > 0 ? of(larger.trained()) / of(larger.parameters()) : 1;
  const double unit = share * gathered_unit;
  if (!f.keeps_gathered && gathered_unit > 0) {
    const double all_layers = of(f.dense_parameters(g) + f.expert_parameters(g) - f.end_parameters(g));
    const double most = all_layers / gathered_unit, ahead = of(p.overlap.prefetch);
    bytes.unit = f.bytes.weight_wire * unit + f.bytes.frozen * (gathered_unit - unit);
    // Forward keeps the buffer of the unit before until that of the next has been copied from; backward has one under way.
    bytes.units = std::min(most, 1 + ahead) + (p.overlap.gather_copies ? std::min(most, 1.0) : 0);
    bytes.backward_units = std::min(most, 1 + ahead);
  }
  // The gradient of a unit as backward makes it, and as it is reduced where that is wider.
  const double cast = f.bytes.gradient_wire > f.bytes.fresh ? f.bytes.gradient_wire : 0;
  const bool whole_stage = f.point.pp > 1 && p.overlap.keeps_gathered;
  if (!whole_stage) {
    bytes.gradient = unit * (f.bytes.fresh + cast);
    bytes.head_stays = p.overlap.ends_last;
    if (p.overlap.ends_last) bytes.last_gradient = ends * (f.bytes.ends + cast);
    return bytes;
  }
  // Reduced once a step: until then they are added up in the dtype of the reduction
  // (FSDPParam.to_accumulated_grad_if_needed of torch/distributed/fsdp/_fully_shard/_fsdp_param.py).
  bytes.gradient_stays = all * std::max(f.bytes.fresh, f.bytes.gradient_wire);
  bytes.gradient = f.bytes.gradient_wire > f.bytes.fresh ? unit * f.bytes.fresh : 0;
  return bytes;
}

double gradient_bytes(const Frame& f, const StageGroup& g) { return standing_of(f, g).gradients; }

MemoryBytes memory_of(const Frame& f, const StageGroup& g, int32_t stage, int64_t* host, int64_t* nvme) {
  return peaked_of(f, g, stage, host, nvme).memory;
}

StagePeak stage_peak_of(const Frame& f, const StageGroup& g, int32_t stage, const LayerKey& key) {
  StagePeak peak;
  const Peaked p = peaked_of(f, g, stage, &peak.host_bytes, &peak.nvme_bytes);
  peak.memory = p.memory, peak.moment = p.moment, peak.moe = mixture_runs(f, g);
  peak.in_flight = in_flight(f.point, stage);
  peak.activations = activations_of(f, g, key, peak.in_flight, peak.memory[MemoryPart::kActivations]);
  return peak;
}

void estimate_memory(const Frame& f, Estimate& e) {
  int64_t worst = -1;
  for (const StageGroup& g : f.groups.all()) {
    int64_t host = 0, nvme = 0;
    const MemoryBytes m = memory_of(f, g, g.first, &host, &nvme);  // of equal stages the first has most in flight
    if (m.live() <= worst) continue;
    worst = m.live();
    e.memory = m;
    e.worst_stage = g.first;
    e.host_bytes = host, e.nvme_bytes = nvme;
  }
}

}  // namespace shardlab::simulator::analytic
