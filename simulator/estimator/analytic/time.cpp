// Step time: the slowest stage's work for every micro-batch, the pipeline's idle time, and the exposed part of
// communication and update.
#include <algorithm>
#include <cmath>

#include "simulator/estimator/analytic/inside.h"

namespace shardlab::simulator::analytic {
namespace {

PhaseCost operator*(double n, const PhaseCost& c) {
  return {n * c.compute_s, n * c.tensor_s, n * c.context_s, n * c.expert_s, n * c.hidden_s, n * c.host_s};
}

/// One micro-batch on one stage.
struct StageWork {
  PhaseCost forward, recompute, input, weight;

  PhaseCost backward() const {
    PhaseCost b = recompute;
    b += input;
    return b += weight;
  }
  double compute_s() const { return forward.compute_s + recompute.compute_s + input.compute_s + weight.compute_s; }
};

/// Seconds of a step on one stage.
struct StageStep {
  StageWork work;
  double late_s = 0;         ///< a micro-batch: of the slowest of all devices beyond the typical one
  double wait_s = 0;         ///< a micro-batch: the device waits for the host
  double micro_batch_s = 0;  ///< all of one micro-batch, gathered weights included
  double data_each_s = 0;    ///< a micro-batch: exposed gathering and reducing (zero 3), slowed compute
  double data_once_s = 0;    ///< a step
  double hidden_s = 0;       ///< of data-parallel communication, a step
  double update_s = 0;
};

StageWork work_of(const Frame& f, const StageGroup& g) {
  const Block& b = f.block;
  StageWork w;
  const auto add = [](PhaseCost& to, double n, const PhaseCost& c) {
    if (n > 0) to += n * c;
  };
  for (const auto& [n, layer] : {std::pair{g.dense, &b.dense}, std::pair{g.moe, &b.moe}}) {
    add(w.forward, of(n), layer->forward), add(w.recompute, of(n), layer->recompute);
    add(w.input, of(n), layer->input), add(w.weight, of(n), layer->weight);
  }
  add(w.forward, g.embedding, b.embedding.forward), add(w.input, g.embedding, b.embedding.backward);
  add(w.forward, g.head, b.head.forward), add(w.input, g.head, b.head.backward);
  add(w.forward, g.loss, b.loss.forward), add(w.input, g.loss, b.loss.backward);
  if (f.point.schedule == Schedule::kDualPipe || f.point.schedule == Schedule::kDualPipeV) {
    // The exchanges of one micro-batch run beside the compute of another (DeepSeek-V3, section 3.2.1).
    for (PhaseCost* phase : {&w.forward, &w.input}) {
      const double hidden = std::min(phase->expert_s, phase->compute_s);
      phase->expert_s -= hidden, phase->hidden_s += hidden;
    }
  }
  return w;
}

/// Seconds by which a phase takes longer than its kernels where each is started when the one before is done. Of the host's time for
/// a kernel, `host_each` on the host of the profiles, the start itself hides behind nothing, the rest h behind the kernel before it
/// alone. Kernels whose times t are spread exponentially about their mean g make that max(h, t) = h + g exp(-h / g) each.
double serial_wait(const Frame& f, const PhaseCost& c, double host_each) {
  if (c.compute_s <= 0) return c.host_s;
  const double start = host_each > 0 ? std::min(1.0, f.in.device.constants().host_launch_s / host_each) : 1;
  return c.host_s - c.compute_s * (1 - std::exp(-c.host_s * (1 - start) / c.compute_s));
}

/// Pieces of the model on a device.
int32_t pieces_of(const Point& p) { return p.vpp * (is_folded(p.schedule) ? 2 : 1); }

/// Messages that a device of the pipeline sends and receives one way of a micro-batch: two for each piece of the model that it holds, but
/// the first piece receives no activations, the last sends none, and where a folded pipeline turns they stay on the device.
double messages_of(const Frame& f, const StageGroup& g) {
  const Point& p = f.point;
  if (p.pp == 1) return 0;
  const bool turns = is_folded(p.schedule) && g.first + g.count == p.pp;
  return 2 * pieces_of(p) - g.embedding - g.loss - (turns ? 2 : 0);
}

double wait_of(const Frame& f, const StageGroup& g, StageWork w) {
  const FrameworkProfile::Host& host = f.in.host;
  const double said = messages_of(f, g) * host.send_s;
  w.forward.host_s += said, w.input.host_s += said;
  if (host.serial) {
    const FrameworkProfile::Host& stated = f.in.profile.host;
    return serial_wait(f, w.forward, stated.forward_s) + serial_wait(f, w.backward(), stated.backward_s) + host.micro_batch_s;
  }
  PhaseCost both = w.backward();
  const double back = both.wait_s();
  both += w.forward;
  const double pause = host.micro_batch_s;
  // Two micro-batches beside one another keep the device busy while the host reads the counts of one.
  const bool counts = host.sync_experts && host.graphs < 2 && g.moe > 0 && !f.point.expert_overlap;
  if (host.sync || counts || (host.sync_sends && f.point.pp > 1)) return w.forward.wait_s() + back + pause;
  // The host runs ahead where the device is slower, and what it gains in one phase serves the other.
  return std::max(both.wait_s(), both.host_s + pause - both.device_s());
}

// Data parallel.

Group data_group(const Frame& f, int64_t ranks) {
  return group_of(static_cast<int>(ranks), f.point.tp, f.in.fabric.devices_per_node());
}
Group expert_group(const Frame& f, int64_t ranks) {
  return group_of(static_cast<int>(ranks), f.point.ep * f.point.expert_tp, f.in.fabric.devices_per_node());
}

/// The elements of gradients that are sent after compression.
double compressed(const Frame& f, double elements) {
  const Point& p = f.point;
  const double hidden = of(f.in.shape.hidden);
  if (p.compression == Compression::kPowerSgd) return elements * std::min(1.0, 2 * p.compression_rank / hidden);
  if (p.compression == Compression::kTopK)  // an index of 4 bytes and a value, gathered from all
    return elements * p.compression_rank / 1000.0 * (4 + f.bytes.gradient_wire) / f.bytes.gradient_wire * of(f.replicas.dense) / 2;
  return elements;
}

/// How much slower communication and compute get beside one another.
class Beside {
 public:
  Beside(const Frame& f, const Group& group) : device_(f.in.device) {
    if (group.ranks() <= 1) return;
    const Contention& c = f.collectives.contention(group, f.style);
    communication = std::max(1.0, c.communication), taken_ = c.taken_sms;
    attention_ = device_.held_beside(taken_), others_ = 1 - (1 - device_.share_of(taken_)) / std::max(1.0, c.compute);
  }
  double communication = 1;
  /// Seconds of a layer's compute lost for each second of collectives that take `seconds` each.
  double lost(const LayerCost& layer, double seconds) const {
    return layer.matmuls * device_.lost_beside(taken_, seconds, layer.matmul_s) + layer.attention * attention_ +
           (1 - layer.matmuls - layer.attention) * others_;
  }
  /// The compute that a stage's layers lose.
  double lost(const Frame& f, const StageGroup& g, double seconds) const {
    const double layers = of(g.dense + g.moe);
    if (layers <= 0) return 0;
    return (of(g.dense) * lost(f.block.dense, seconds) + of(g.moe) * lost(f.block.moe, seconds)) / layers;
  }

 private:
  const DeviceModel& device_;
  double taken_ = 0, attention_ = 0, others_ = 0;
};

/// Exchanges among experts of one micro-batch run beside the compute of another, one's forward beside the other's backward
/// (TransformerLayerSchedulePlan::run of Megatron-LM core/models/common/model_chunk_schedule_plan.py). While a pipeline fills and
/// drains there is no other.
void overlap_experts(const Frame& f, const StageGroup& g, StageWork& w) {
  const Point& p = f.point;
  const std::array<PhaseCost*, 3> phases{&w.forward, &w.recompute, &w.input};
  double exchanges = 0;
  for (const PhaseCost* phase : phases) exchanges += phase->expert_s;
  if (!p.expert_overlap || exchanges <= 0) return;
  const Beside beside(f, group_of(p.ep, p.expert_tp, f.in.fabric.devices_per_node()));
  const double slow = exchanges * beside.communication, hidden = std::min(slow, w.compute_s());
  const double each = exchanges / (4 * of(g.moe));  // dispatch and combine, forward and backward
  const double lost = hidden * beside.lost(f, g, each);
  constexpr int64_t kMany = int64_t{1} << 30;  // micro-batches, that there are enough to fill the pipeline
  const double alone = p.pp > 1 ? in_flight(p.schedule, p.pp, 0, kMany, p.vpp, p.micro_batch_group) - 1 : 1,
               paired = std::max(0.0, 1 - alone / p.grad_accumulation);
  const double open = paired * (slow - hidden + lost) + (1 - paired) * exchanges;
  for (PhaseCost* phase : phases) {
    const double share = phase->expert_s / exchanges;
    phase->expert_s = share * open, phase->hidden_s += share * paired * hidden;
  }
}

/// How often zero 3 gathers a layer's weights of a micro-batch: for forward, unless they are kept for backward, and, tensor by tensor,
/// for a layer that is computed again. Of that layer backward finds the matrices whose next use comes before `reuse_elements` elements of
/// others: from the last matrix back, each is used again after twice the matrices behind it, which are taken to be of one size.
double gathers_of(const Frame& f, const LayerCost& layer) {
  const FrameworkProfile::Overlap& o = f.in.profile.overlap;
  if (f.keeps_gathered) return 1;
  if (!o.by_tensor || !f.point.recompute.full()) return 2;
  const double matrices = f.in.shape.swiglu ? 7 : 4, each = of(layer.dense_held() - layer.frozen) / matrices;
  const double kept = each > 0 ? std::min(matrices, std::ceil(o.reuse_elements / (2 * each))) : matrices;
  return 3 - kept / matrices;
}

/// Host seconds of a collective that takes a list with a part for each rank: a view of each part, and a copy of each part by itself.
struct PartsHost {
  double views_s = 0, copies_s = 0;
};
PartsHost parts_host(const Frame& f, const Group& group) {
  if (f.in.host.view_s <= 0 || group.ranks() <= 1) return {};
  const DeviceConstants& c = f.in.device.constants();
  return {group.ranks() * f.in.host.view_s, group.ranks() * c.host_launch_s / c.host_speed};
}

/// Zero 3, one micro-batch: the weights of each unit are gathered beside the compute of the unit before, and its gradients reduced
/// beside the compute of the next.
void add_gathering(const Frame& f, const StageGroup& g, StageStep& s) {
  const Replicas& r = f.replicas;
  const Group shard = data_group(f, r.shard), expert_shard = expert_group(f, r.expert_shard);
  const Beside beside(f, shard);
  const auto seconds = [&](CollectiveUse kind, double elements, double bytes, const Group& group) {
    return f.collective_s(kind, elements * bytes, group);
  };
  const auto gather = [&](double dense, double expert) {
    return seconds(CollectiveUse::kAllGather, dense, f.bytes.weight_wire, shard) +
           seconds(CollectiveUse::kAllGather, expert, f.bytes.expert_weight_wire, expert_shard);
  };
  const auto scatter = [&](double dense, double expert) {
    return seconds(CollectiveUse::kReduceScatter, dense, f.bytes.gradient_wire, shard) +
           seconds(CollectiveUse::kReduceScatter, expert, f.bytes.gradient_wire, expert_shard);
  };
  const bool by_tensor = f.in.profile.overlap.by_tensor, overlaps = f.overlap_gradients || f.overlap_weights;
  double exposed = 0, hidden = 0;
  // A unit's collectives, a gather and a scatter, beside the compute of its neighbour.
  const auto pass = [&](double gathering, double scattering, const LayerCost& layer, double compute, double units) {
    const double communication = gathering + scattering;
    if (!overlaps) {
      exposed += units * communication;
      return;
    }
    const double slow = communication * beside.communication, open = std::max(0.0, slow - compute);
    exposed += units * open + std::min(communication, compute);  // the first has nobody beside it
    hidden += units * (slow - open);
    if (communication <= 0) return;
    const double lost = gathering * beside.lost(layer, gathering * beside.communication) +
                        scattering * beside.lost(layer, scattering * beside.communication);
    exposed += units * (slow - open) * lost / communication;
  };
  const auto layers = [&](double n, const LayerCost& c) {
    if (n <= 0) return;
    const double size = std::max(1.0, f.in.profile.overlap.unit_layers), units = n / size;
    const double dense = size * of(c.dense_held() - c.frozen), expert = size * of(c.expert_held() - c.frozen_expert);
    PhaseCost back = c.recompute;
    (back += c.input) += c.weight;
    // Frozen weights of experts are cut among those that share the experts, as trained ones are.
    const double frozen_gather = seconds(CollectiveUse::kAllGather, size * of(c.frozen), f.bytes.frozen, shard) +
                                 seconds(CollectiveUse::kAllGather, size * of(c.frozen_expert), f.bytes.frozen, expert_shard);
    if (by_tensor) {
      // The device waits for the host before and after each gather. So nothing runs beside a collective, and the host's work on a gather
      // has the copies alone to hide behind it, that on reductions the backward of the layer. Vectors are never cut, only reduced.
      const double matrices = f.in.shape.swiglu ? 7 : 4, vectors = f.in.shape.biases ? 8 : 2;
      const PartsHost host = parts_host(f, shard);
      const double gathering = matrices * (host.views_s + std::max(host.copies_s, gather(dense / matrices, expert / matrices)));
      const double scattering =
          matrices * scatter(dense / matrices, expert / matrices) + vectors * scatter(of(f.in.shape.hidden), 0);
      const double reducing = (matrices + vectors) * (host.views_s + host.copies_s),
                   behind = size * (c.input.total_s() + c.weight.total_s());
      exposed += units * (gathers_of(f, c) * (gathering + frozen_gather) + scattering + std::max(0.0, reducing - behind));
      return;
    }
    const double forward_gather = gather(dense, expert) + frozen_gather, back_gather = f.keeps_gathered ? 0 : forward_gather;
    pass(forward_gather, 0, c, size * c.forward.total_s(), units);
    pass(back_gather, scatter(dense, expert), c, size * back.total_s(), units);
  };
  layers(of(g.dense), f.block.dense);
  layers(of(g.moe), f.block.moe);
  // Copies out of the buffers of all-gathers and into those of reduce-scatters run between the kernels of compute.
  const LayerCost& layer = g.moe > g.dense ? f.block.moe : f.block.dense;
  const double gathers = f.in.profile.passes.gathered * gathers_of(f, layer);
  const double trained = of(f.trained_dense(g) + f.trained_experts(g)), held = of(f.dense_parameters(g) + f.expert_parameters(g));
  exposed += f.in.device.memory_bound_seconds((gathers + f.in.profile.passes.reduced) * trained + gathers * (held - trained), 0,
                                              MemoryKernel::kBuffer);
  // The root unit (embedding, norm, head) is gathered before everything and reduced after it.
  const double ends = of(f.trained_ends(g)), still_ends = of(f.end_parameters(g)) - ends;
  if (ends > 0) exposed += gather(ends, 0) + scatter(ends, 0);
  if (still_ends > 0) exposed += seconds(CollectiveUse::kAllGather, still_ends, f.bytes.frozen_ends, shard);
  // Copies of the ranks that share a shard are summed at the end of the step.
  if (r.dense > r.shard) {
    const Group copies =
        group_of(static_cast<int>(r.dense / r.shard), static_cast<int>(f.point.tp * r.shard), f.in.fabric.devices_per_node());
    const double all =
        f.collective_s(CollectiveUse::kAllReduce, of(f.trained_dense(g)) / of(r.shard) * f.bytes.gradient_wire, copies);
    PhaseCost back = s.work.backward();
    s.data_once_s += overlaps ? std::max(all / std::max(1.0, of(g.dense + g.moe)), all - back.total_s()) : all;
  }
  const bool once = f.point.pp > 1 && f.in.profile.overlap.keeps_gathered;
  (once ? s.data_once_s : s.data_each_s) += exposed;
  s.hidden_s += hidden * (once ? 1 : f.point.grad_accumulation);
}

/// Whether a rank receives only the gradients that it updates with.
bool scatters(const Frame& f) { return f.point.zero > (f.in.profile.overlap.zero_scatters ? 0 : 1); }

/// Buckets into which `bytes` of gradients of a stage go: of the size asked for, but a tensor is in one alone.
double buckets_of(const Frame& f, const StageGroup& g, double bytes) {
  const ModelShape& s = f.in.shape;
  const bool split = f.in.profile.model.split_projections;
  const double attention = split ? 4 : 2, mlp = s.swiglu && split ? 3 : 2, vectors = s.biases ? 8 : 2;
  const double experts = s.moe() ? of(s.experts) / f.point.ep + of(s.shared_experts) : 0;
  const double ends = (g.holds_embedding ? 1 : 0) + (g.holds_head ? 1 : 0);
  const double matrices = of(g.dense) * (attention + mlp) + of(g.moe) * (attention + mlp * experts) + ends;
  // Without DDP the gradients are one buffer.
  if (f.point.zero > 0 && !f.in.profile.overlap.zero && f.point.bucket_bytes < 0) return 1;
  if (f.bucket_bytes <= 0) return matrices + vectors * of(g.dense + g.moe);
  return std::clamp(bytes / f.bucket_bytes, 1.0, std::max(1.0, matrices));
}

/// Seconds of a backward pass that data-parallel communication hides behind. Exchanges that wait for the network between nodes are none
/// of them: a reduction that crosses nodes too needs the same interfaces.
double backward_window(const Frame& f, const Group& data, const PhaseCost& back) {
  const Point& p = f.point;
  const int per_node = f.in.fabric.devices_per_node();
  double window = back.total_s();
  if (data.nodes <= 1) return window;
  if (group_of(p.tp, 1, per_node).nodes > 1) window -= back.tensor_s;
  if (group_of(p.cp, p.tp, per_node).nodes > 1) window -= back.context_s;
  if (group_of(p.ep, p.expert_tp, per_node).nodes > 1) window -= back.expert_s;
  return window;
}

/// Zero 0 to 2: buckets of gradients are reduced while the last backward runs, updated weights gathered while the
/// first forward does.
void add_reducing(const Frame& f, const StageGroup& g, StageStep& s) {
  const Replicas& r = f.replicas;
  const Group all = data_group(f, r.shard), experts = expert_group(f, r.expert_shard);
  if (r.dense <= 1 && r.expert <= 1) return;
  // Instances of the optimizer, each with a copy of the state, sum the parts that their ranks have scattered.
  const Group copies =
      group_of(static_cast<int>(r.dense / r.shard), static_cast<int>(f.point.tp * r.shard), f.in.fabric.devices_per_node());
  const Group expert_copies =
      group_of(static_cast<int>(r.expert / r.expert_shard), static_cast<int>(f.point.ep * f.point.expert_tp * r.expert_shard),
               f.in.fabric.devices_per_node());
  const double dense = compressed(f, of(f.trained_dense(g))), expert = compressed(f, of(f.trained_experts(g)));
  const double buckets = buckets_of(f, g, (dense + expert) * f.bytes.gradient_wire);
  // The host starts them one by one, whatever they take.
  const auto each = [&](CollectiveUse kind, double bytes, const Group& group) {
    const double seconds = f.collective_s(kind, bytes / buckets, group);
    return seconds > 0 ? std::max(seconds, f.in.host.collective_s) : 0;
  };
  const auto seconds = [&](CollectiveUse kind, double bytes_each) {
    return buckets * (each(kind, dense * bytes_each, all) + each(kind, expert * bytes_each, experts));
  };
  const double summed =
      buckets * (each(CollectiveUse::kAllReduce, dense / of(r.shard) * f.bytes.gradient_wire, copies) +
                 each(CollectiveUse::kAllReduce, expert / of(r.expert_shard) * f.bytes.gradient_wire, expert_copies));
  const Beside beside(f, all);
  // The parts of a looped stage are done with their last micro-batch one after the other, with as many micro-batches of the next part in
  // between as there are stages.
  const double pieces = f.point.schedule == Schedule::kInterleaved ? f.point.vpp : 1;
  const double looped = 1 + (std::min(f.point.pp, f.point.grad_accumulation) - 1) * (1 - 1 / pieces);
  // `idle`: seconds of the window in which the device waits for the host, and has time to spare for what its products lose.
  const auto place = [&](double total, double window, double idle, bool overlaps, double times) {
    window *= looped;
    if (!overlaps || buckets <= 1) {
      s.data_once_s += times * total;
      return;
    }
    const double slow = total * beside.communication;
    // The last bucket is complete only when backward is.
    const double exposed = std::max(total / buckets, slow - window * (1 - 1 / buckets));
    const double hidden = std::max(0.0, slow - exposed);
    s.data_once_s += times * (exposed + std::max(0.0, hidden * beside.lost(f, g, slow / buckets) - looped * idle));
    s.hidden_s += times * hidden;
  };
  const double back = backward_window(f, all, s.work.backward());
  const double idle_back = std::min(s.wait_s, s.work.backward().wait_s()),
               idle_forward = std::min(s.wait_s, s.work.forward.wait_s());
  const bool cut = f.point.zero > 0;
  place(summed + seconds(scatters(f) ? CollectiveUse::kReduceScatter : CollectiveUse::kAllReduce, f.bytes.gradient_wire), back,
        idle_back, f.overlap_gradients, f.point.zero == 2 ? f.point.grad_accumulation : 1);
  const double reduced = (r.dense > 1 ? dense : 0) + (r.expert > 1 ? expert : 0);
  s.data_once_s += f.in.device.memory_bound_seconds(reduced * f.in.profile.passes.bucketed, 0, MemoryKernel::kBuffer);
  if (!cut) return;
  place(seconds(CollectiveUse::kAllGather, f.bytes.weight_wire), s.work.forward.total_s(), idle_forward, f.overlap_weights, 1);
  // Weights are gathered in buffers, from which they are copied tensor by tensor and rank by rank.
  const FrameworkProfile& p = f.in.profile;
  if (p.update.gather_passes <= 0) return;
  const double tensors = p.update.tensors_per_layer * of(g.dense + g.moe) + (g.holds_embedding ? 1 : 0) + (g.holds_head ? 2 : 0);
  const double parts = tensors * of(r.dense);
  s.data_once_s += std::max(parts * p.update.gather_host_s / f.in.device.constants().host_speed,
                            f.in.device.memory_bound_seconds((dense + expert) * p.update.gather_passes, parts));
}

// Update and offload.

double update_of(const Frame& f, const StageGroup& g) {
  const FrameworkProfile& p = f.in.profile;
  const Replicas& r = f.replicas;
  const double dense = of(f.trained_dense(g)), expert = of(f.trained_experts(g));
  const bool cut = f.point.zero > 0;
  const double own = cut ? dense / of(r.shard) + expert / of(r.expert_shard) : dense + expert;
  const double held = f.point.zero >= 2 ? own : dense + expert;
  const DeviceModel& d = f.in.device;
  const double launches = p.update.launches + p.update.launches_per_layer * of(g.dense + g.moe);
  const double wide = f.point.precision == Precision::kFp32 ? 28.0 / 30 : 1;
  double device = d.memory_bound_seconds(own * p.update.passes * wide, launches, MemoryKernel::kOptimizer) +
                  d.memory_bound_seconds(own * p.update.norm_passes + held * p.update.zero_passes, 1, MemoryKernel::kElementwise);
  if (f.point.offload_optimizer != Medium::kDevice) {
    // Gradients go to the host, weights come back. Adam moves its state through host memory; a device's share of host memory's rate
    // is taken to be the rate of its copy engine. With NVMe the state is also read and written there.
    const int parts = f.point.offload_parts;
    const int moments = (parts & Point::kFirstMoment ? 1 : 0) + (parts & Point::kSecondMoment ? 1 : 0);
    const double state = (parts & Point::kMaster ? f.bytes.master : 0) + f.bytes.moments * moments / 2;
    device = d.host_copy_seconds(own * f.bytes.gradient, HostCopy::kToHost) + d.host_copy_seconds(own * 2, HostCopy::kToDevice) +
             d.host_copy_seconds(own * 2 * state, HostCopy::kToHost);
    if (f.point.offload_optimizer == Medium::kNvme) {
      const double sharing = f.in.machine.devices_per_node;
      device = std::max(device, d.nvme_seconds(own * state, false, sharing) + d.nvme_seconds(own * state, true, sharing));
    }
  }
  return std::max(device, launches * f.in.host.backward_s);
}

/// Copies of activations and weights that the compute of a micro-batch does not hide.
double exposed_copies(const Frame& f, const StageGroup& g, const StageWork& w) {
  const DeviceModel& d = f.in.device;
  double exposed = 0;
  const double layers = of(g.dense + g.moe);
  const auto hide = [&](double seconds, double compute) { exposed += std::max(0.0, seconds - compute); };
  if (f.point.offload_activations != Medium::kDevice) {
    const double share = f.point.offload_layers > 0 ? std::min(1.0, f.point.offload_layers / of(f.in.shape.layers)) : 1;
    const double kept = of(g.dense) * f.block.dense.kept + of(g.moe) * f.block.moe.kept;
    const double bytes = f.in.profile.overlap.offload_residual ? layers * f.block.boundary : share * kept;
    const double out = d.host_copy_seconds(bytes, HostCopy::kToHost), back = d.host_copy_seconds(bytes, HostCopy::kToDevice);
    const double sharing = f.in.machine.devices_per_node;
    const bool nvme = f.point.offload_activations == Medium::kNvme;
    hide(nvme ? std::max(out, d.nvme_seconds(bytes, true, sharing)) : out, w.forward.compute_s);
    hide(nvme ? std::max(back, d.nvme_seconds(bytes, false, sharing)) : back, w.backward().compute_s);
  }
  if (f.point.offload_parameters != Medium::kDevice) {
    const double own = of(f.trained_dense(g)) / of(f.replicas.shard) + of(f.trained_experts(g)) / of(f.replicas.expert_shard);
    const FrozenBytes frozen = frozen_of(f, g);
    const double still = frozen.dense() / of(f.replicas.shard) + frozen.expert / of(f.replicas.expert_shard);
    const double bytes = own * f.bytes.weight_wire + still, sharing = f.in.machine.devices_per_node;
    double in = d.host_copy_seconds(bytes, HostCopy::kToDevice);
    if (f.point.offload_parameters == Medium::kNvme) in = std::max(in, d.nvme_seconds(bytes, false, sharing));
    hide(in, w.forward.compute_s), hide(in, w.backward().compute_s);
    exposed += layers > 0 ? 2 * in / layers : 0;  // the first layer's has nothing to hide behind
  }
  return exposed;
}

StageStep step_of(const Frame& f, const StageGroup& g) {
  StageStep s;
  s.work = work_of(f, g);
  overlap_experts(f, g, s.work);
  s.late_s = late_of(f.block, of(g.dense), of(g.moe), g.head);
  s.wait_s = wait_of(f, g, s.work);
  f.gathers ? add_gathering(f, g, s) : add_reducing(f, g, s);
  s.update_s = update_of(f, g);
  const double copies = exposed_copies(f, g, s.work);
  s.update_s += copies * f.point.grad_accumulation;
  s.micro_batch_s = s.work.forward.device_s() + s.work.backward().device_s() + s.wait_s + s.data_each_s;
  return s;
}

}  // namespace

// Steps that are remembered.

struct StepMemo::Steps {
  struct Entry {
    StageGroup group;
    Schedule schedule;
    int32_t pieces;   ///< of an interleaved stage
    double messages;  ///< of `messages_of`, where they cost time
    StageStep step;
  };
  std::array<Entry, 32> entries;
  size_t count = 0;
  double model_flops = 0;  ///< of the step; 0: not worked out
};

StepMemo::StepMemo() : steps_(std::make_unique<Steps>()) {}
StepMemo::~StepMemo() = default;

void StepMemo::begin(const Point& point) {
  Point same = point;
  same.schedule = Schedule::kNone, same.vpp = 1;
  // Entries stay where they are while a point is in work.
  const bool room = steps_->count + StageGroups::kMost <= steps_->entries.size();
  if (same == last_ && room) return;
  if (!(same == last_)) steps_->model_flops = 0;
  last_ = same;
  steps_->count = 0;
}

namespace {

/// The remembered result of `step_of`, which asks of the schedule only whether it runs two micro-batches at once, and for the pieces of
/// a looped stage; where the host says every message, for their number; and, where exchanges among experts overlap, how long it fills.
const StageStep& remembered_step(const Frame& f, const StageGroup& g) {
  StepMemo::Steps& steps = f.steps.steps();
  const bool pair = f.point.schedule == Schedule::kDualPipe || f.point.schedule == Schedule::kDualPipeV;
  const Schedule schedule = pair || f.point.expert_overlap ? f.point.schedule : Schedule::kNone;
  const int32_t pieces = f.point.schedule == Schedule::kInterleaved ? f.point.vpp : 1;
  const double messages = f.in.host.send_s > 0 ? messages_of(f, g) : 0;
  for (size_t i = 0; i < steps.count; ++i) {
    const StepMemo::Steps::Entry& e = steps.entries[i];
    if (e.schedule == schedule && e.pieces == pieces && e.messages == messages && e.group.same_work(g)) return e.step;
  }
  steps.entries[steps.count] = {g, schedule, pieces, messages, step_of(f, g)};
  return steps.entries[steps.count++].step;
}

// The pipeline.

/// Exposed sends between stages: twice a micro-batch (activations there, gradients back) where nothing hides them, else while the
/// pipeline fills and drains. Stages over which logits travel have no layers: their messages set the pace only where they take longer
/// than `slowest_s`, a micro-batch of the slowest stage.
double sends_of(const Frame& f, double slowest_s) {
  const Point& p = f.point;
  if (p.pp == 1) return 0;
  const int64_t stride = int64_t{p.tp} * p.cp * p.dp;
  const int per_node = f.in.fabric.devices_per_node();
  const bool remote = stride * p.pp > per_node;
  const double sharing = static_cast<double>(std::min<int64_t>(per_node, stride));
  const double host = f.in.host.collective_s;
  const auto seconds = [&](double bytes) { return std::max(host, f.in.fabric.send_seconds(bytes, remote, remote ? sharing : 1)); };
  const double send = seconds(f.block.boundary) + f.block.boundary_gather_s;
  const double looped = pieces_of(p);
  // Logits travel in 16 bit, and once they are cast in 32.
  double fill = 2 * (p.pp - 1) * (send + f.in.host.send_s), longest = send;
  for (int32_t hop = 0; hop < f.groups.logit_hops(); ++hop) {
    longest = seconds((hop + 1) * f.block.logits);
    fill += 2 * (longest - send);
  }
  if (f.in.profile.overlap.pipeline) return fill;
  return fill + std::max(2 * send, 2 * longest - slowest_s) * looped * (p.grad_accumulation - 1);
}

/// A pipeline's kinds of stages, and what sets its pace.
class Stages {
 public:
  void add(const StageStep& step, int32_t count) { kinds_[size_++] = {&step, count}; }
  struct Pace {
    const StageStep* step = nullptr;
    double micro_batch_s = 0;
    double kept = 1;  ///< part of its seconds of compute
  };
  /// The k slowest stages take at least the time of the last of them on the slowest of their devices.
  Pace pace(const Spared& spared, int64_t devices_per_stage) const {
    Pace pace;
    double late = 0;
    for (size_t i = 0; i < size_; ++i) {
      const StageStep& s = *kinds_[i].step;
      int64_t as_slow = 0;
      for (size_t j = 0; j < size_; ++j) as_slow += kinds_[j].step->micro_batch_s >= s.micro_batch_s ? kinds_[j].count : 0;
      const double less = spared.among(as_slow * devices_per_stage) * s.late_s;
      if (pace.step == nullptr || s.micro_batch_s - less > pace.micro_batch_s)
        pace = {.step = &s, .micro_batch_s = s.micro_batch_s - less}, late = less;
    }
    if (late > 0) pace.kept = 1 - late / pace.step->work.compute_s();
    return pace;
  }

 private:
  struct Kind {
    const StageStep* step;
    int32_t count;
  };
  std::array<Kind, StageGroups::kMost> kinds_;
  size_t size_ = 0;
};

void add_wires(const Frame& f, Estimate& e) {
  const Point& p = f.point;
  const Block& b = f.block;
  const auto wire = [&](WireUse use) -> double& { return e.wire[static_cast<size_t>(use)]; };
  const double m = p.grad_accumulation, ranks = static_cast<double>(p.dp) * p.tp * p.cp;
  const double dense = of(f.in.shape.layers - f.in.shape.moe_layers()), moe = of(f.in.shape.moe_layers());
  const auto ends = [&](double LayerWire::*w) { return b.embedding.wire.*w + b.head.wire.*w + b.loss.wire.*w; };
  wire(WireUse::kTensor) = ranks * m * (dense * b.dense.wire.tensor + moe * b.moe.wire.tensor + ends(&LayerWire::tensor));
  wire(WireUse::kContext) = ranks * m * (dense * b.dense.wire.context + moe * b.moe.wire.context);
  wire(WireUse::kExpert) = ranks * m * moe * b.moe.wire.expert;
  const double hops = f.groups.logit_hops();
  wire(WireUse::kPipeline) = ranks * m * 2 * ((p.pp - 1) * p.vpp * b.boundary + hops * ((hops + 1) / 2 * b.logits - b.boundary));
  double elements = 0, expert_elements = 0, frozen = 0, frozen_expert = 0;
  for (const StageGroup& g : f.groups.all()) {
    elements += g.count * compressed(f, of(f.trained_dense(g)));
    expert_elements += g.count * compressed(f, of(f.trained_experts(g)));
    const FrozenBytes still = frozen_of(f, g);
    frozen += g.count * still.dense(), frozen_expert += g.count * still.expert;
  }
  // In a group of n ranks that cut or sum x bytes, (n - 1) x are sent in all; ranks / n groups.
  const auto sent = [&](int64_t n, double x) { return (of(n) - 1) / of(n) * ranks * x; };
  const auto both = [&](double bytes) {
    return sent(f.replicas.shard, elements * bytes) + sent(f.replicas.expert_shard, expert_elements * bytes);
  };
  const bool once = p.pp > 1 && f.in.profile.overlap.keeps_gathered;
  const double each = f.gathers && !once ? m : p.zero == 2 ? m : 1;
  wire(WireUse::kGradients) = each * (scatters(f) ? 1 : 2) * both(f.bytes.gradient_wire);
  if (p.zero == 1 || p.zero == 2) {  // instances of the optimizer
    const auto summed = [&](int64_t n, int64_t shard, double x) {
      return 2 * sent(n / shard, x / of(shard) * f.bytes.gradient_wire);
    };
    wire(WireUse::kGradients) += each * (summed(f.replicas.dense, f.replicas.shard, elements) +
                                         summed(f.replicas.expert, f.replicas.expert_shard, expert_elements));
  }
  const double still = sent(f.replicas.shard, frozen) + sent(f.replicas.expert_shard, frozen_expert);
  if (p.zero == 3)
    wire(WireUse::kWeights) = each * gathers_of(f, dense > 0 ? b.dense : b.moe) * (both(f.bytes.weight_wire) + still);
  if (p.zero == 1 || p.zero == 2) wire(WireUse::kWeights) = both(f.bytes.weight_wire);
  if (p.pp > 1 && f.in.shape.tied_embeddings && !b.head.frozen)
    wire(WireUse::kEnds) = ranks * 2 * of(b.head.matrix) * f.bytes.gradient_wire / (p.zero > 0 ? of(f.replicas.shard) : 1);
}

}  // namespace

void estimate_time(Frame& f, Estimate& e) {
  const Point& p = f.point;
  const double m = p.grad_accumulation;
  StageTimes times;
  double late = 0;
  Stages stages;
  f.steps.begin(p);
  double data_once = 0, update = 0;
  for (const StageGroup& g : f.groups.all()) {
    const StageStep& s = remembered_step(f, g);
    const double n = g.count;
    stages.add(s, g.count);
    times.sum += n * s.micro_batch_s, late += n * s.late_s;
    times.forward += n * s.work.forward.total_s();
    times.input += n * (s.work.recompute.total_s() + s.work.input.total_s());
    times.weight += n * s.work.weight.total_s();
    // A stage behind the first is done with its last backward earlier by a backward of each stage before it.
    const double early = g.first * (s.work.backward().total_s()) / std::max(1, p.vpp);
    data_once = std::max(data_once, s.data_once_s - early);
    update = std::max(update, s.update_s);
    e.hidden_comm_s = std::max(e.hidden_comm_s, s.hidden_s);
  }
  const Spared spared(f);
  const Stages::Pace pace = stages.pace(spared, p.world_size() / p.pp);
  const StageStep* slowest = pace.step;
  const StageWork& w = slowest->work;
  const auto part = [&](TimePart t) -> double& { return e.parts[static_cast<size_t>(t)]; };
  const PhaseCost back = w.backward();
  part(TimePart::kForward) = m * pace.kept * w.forward.compute_s;
  part(TimePart::kRecompute) = m * pace.kept * w.recompute.compute_s;
  part(TimePart::kBackward) = m * pace.kept * (w.input.compute_s + w.weight.compute_s);
  part(TimePart::kLaunch) = m * slowest->wait_s + f.in.host.step_s;
  part(TimePart::kTensorParallel) = m * (w.forward.tensor_s + back.tensor_s);
  part(TimePart::kContextParallel) = m * (w.forward.context_s + back.context_s);
  part(TimePart::kExpertParallel) = m * (w.forward.expert_s + back.expert_s);
  part(TimePart::kDataParallel) = m * slowest->data_each_s + std::max(0.0, data_once);
  if (p.pp > 1) {
    // What is idle while a pipeline fills waits for the devices of its own micro-batch.
    const double alone = spared.among(std::max(p.tp * p.cp, p.ep * p.expert_tp)), left = 1 - alone * late / times.sum;
    const double each = left / p.pp;
    times.sum *= left, times.forward *= each, times.input *= each, times.weight *= each;
    times.longest = slowest->micro_batch_s - alone * slowest->late_s;
    e.sends_s = sends_of(f, slowest->micro_batch_s);
    part(TimePart::kPipeline) = bubble_s(p.schedule, p.pp, p.vpp, times) + e.sends_s;
  }
  part(TimePart::kUpdate) = update;
  if (p.pp > 1 && f.in.shape.tied_embeddings && !f.block.head.frozen) {
    const int64_t stride = int64_t{p.tp} * p.cp * p.dp;
    const Group ends = group_of(2, static_cast<int>(stride * (p.pp - 1)), f.in.fabric.devices_per_node());
    part(TimePart::kDataParallel) +=
        f.collective_s(CollectiveUse::kAllReduce, of(f.block.head.matrix) * f.bytes.gradient_wire, ends);
  }
  e.hidden_comm_s += m * (w.forward.hidden_s + back.hidden_s);
  e.step_s = 0;
  for (const double s : e.parts) e.step_s += s;
  double& model_flops = f.steps.steps().model_flops;
  if (model_flops == 0) model_flops = model_flops_per_token(f.in.shape, p.seq_len) * of(p.tokens_per_step());
  e.model_flops = model_flops;
  add_wires(f, e);
}

}  // namespace shardlab::simulator::analytic
