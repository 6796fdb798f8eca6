// The end of a step: one update of every parameter by its whole gradient, and the metrics.
//
// Updates read what the strategies before made of the gradients: a parameter's own, its reduced sum, or a ZeRO-1 slice of a bucket.
// Moments have the shape and placement of what is updated. A strategy that shards the updated values brings a call that gathers
// them.
//
// Shapes   as the parameters, or slices of buckets
// Adds     nothing; the loss travels as one scalar over data-parallel ranks
// Memory   what the optimizer keeps beside a parameter (plan/optimizers.h)
// Refuses  nothing
// Paper    Loshchilov & Hutter, "Decoupled Weight Decay Regularization" (2019); Chen et al., "Symbolic Discovery of Optimization
//          Algorithms" (2023): Lion; Dettmers et al., "8-bit Optimizers via Block-wise Quantization" (2022)
#include "strategies/optimizer.h"

#include <algorithm>
#include <iterator>

#include "plan/named_kernels.h"
#include "plan/techniques.h"
#include "plan/text.h"
#include "strategies/compression.h"
#include "strategies/diloco.h"
#include "strategies/draft.h"
#include "strategies/mirrored_stages.h"
#include "strategies/offload_optimizer.h"
#include "strategies/parameter_server.h"
#include "strategies/post_validation.h"
#include "strategies/shards.h"
#include "strategies/state.h"

namespace shardlab::strategies {
namespace {

constexpr std::string_view kOptimizerName = "optimizer";

Work update_work(const Train& t, float weight_decay) {
  switch (t.optimizer) {
    case Optimizer::kAdamW: return AdamW{t.beta1, t.beta2, t.epsilon, weight_decay};
    case Optimizer::kSgd: return Sgd{weight_decay};
    case Optimizer::kLion: return Lion{t.beta1, t.beta2, weight_decay};
    case Optimizer::kAdamW8bit: return AdamW8bit{t.beta1, t.beta2, t.epsilon, weight_decay};
  }
  SHARDLAB_CHECK(false, "optimizer {} has no update", static_cast<int>(t.optimizer));
}

Op update_op(const Draft& draft, bool decay) {
  const Train& t = draft.config.train;
  const float weight_decay = decay ? t.weight_decay : 0;
  Op op;
  op.work = steps_by_direction(draft) ? Work(Sgd{weight_decay}) : update_work(t, weight_decay);
  op.label = "update";
  op.strategy = kOptimizerName;
  return op;
}

/// State on the device. That of the host is there already.
void add_state(Draft& draft, StageDraft& stage, Update& update) {
  if (!update.state.empty() || steps_by_direction(draft)) return;
  for (const OptimizerState& state : row_of(draft.config.train.optimizer).state) {
    Buffer buffer = state_buffer(stage.role.buffers[update.value.index()], state);
    buffer.persistent = true;
    update.state.push_back(add_buffer(stage, std::move(buffer)));
  }
}

}  // namespace

Buffer state_buffer(const Buffer& value, const OptimizerState& state) {
  Buffer buffer;
  buffer.name = value.name + "." + std::string(state.name);
  buffer.type = value.type;
  buffer.type.dtype = state.dtype;
  buffer.kind = BufferClass::kMoment;
  if (state.by_block) {
    buffer.type.shape = Shape{state.elements(value.type.shape.elements())};
    for (Placement& along : buffer.type.place) along = block_placement(along);
    return buffer;  // no part of a parameter, and of no other layout
  }
  buffer.packed_as = value.packed_as;
  buffer.parameter = value.parameter;
  return buffer;
}

Event update_event(Draft& draft, StageDraft& stage, const Update& update, StreamId stream) {
  std::vector<BufferId> buffers{update.gradient, update.value};
  std::ranges::copy(update.state, std::back_inserter(buffers));
  if (stage.gradient_factor) buffers.push_back(stage.gradient_factor);
  if (stage.go) buffers.push_back(stage.go);
  const Buffer& value = stage.role.buffers[update.value.index()];
  const Buffer& gradient = stage.role.buffers[update.gradient.index()];
  const std::string name =
      "update " + print(value.type, draft.plan.mesh) + (update.decay ? " decay" : "") + (gradient.view ? " view" : "");
  const SegmentId segment = draft.cached(name, [&] {
    std::vector<int> reads{0, 1}, writes{1};
    for (int i = 0; i < std::ssize(update.state); ++i) reads.push_back(2 + i), writes.push_back(2 + i);
    if (stage.gradient_factor) reads.push_back(static_cast<int>(reads.size()));
    Op op = update_op(draft, update.decay);
    op.stream = stream;
    if (stage.go) op.when = SlotId(static_cast<int32_t>(buffers.size()) - 1);
    return one_op_segment("update" + std::to_string(draft.segment_cache.size()), stage, buffers, std::move(op), reads, writes);
  });
  Event event;
  event.call = bind(segment, std::move(buffers));
  return event;
}

namespace {

/// The updated copy, rounded into the parameter.
Event round_event(Draft& draft, StageDraft& stage, const Update& update) {
  const std::string name = "round " + print(stage.role.buffers[update.stored.index()].type, draft.plan.mesh);
  std::vector<BufferId> buffers{update.value, update.stored};
  if (stage.go) buffers.push_back(stage.go);
  const SegmentId segment = draft.cached(name, [&] {
    Op op;
    op.work = Copy{};
    op.label = "round";
    op.stream = update_stream(draft);
    op.strategy = "master-weights";
    if (stage.go) op.when = SlotId(2);
    return one_op_segment("round" + std::to_string(draft.segment_cache.size()), stage, buffers, std::move(op), {0}, {1});
  });
  return call_event(bind(segment, std::move(buffers)));
}

/// One update a parameter.
void update_every_parameter(Draft& draft, StageDraft& stage) {
  for (const int unit : stage.units)
    for (int p = 0; p < static_cast<int>(draft.of_unit(unit).parameters.size()); ++p) {
      const ParameterState& state = stage.at(unit, p);
      if (state.merged) continue;
      const ParameterId id = draft.units[static_cast<size_t>(unit)].parameters[static_cast<size_t>(p)];
      Update update;
      update.unit = unit;
      update.gradient = state.reduced;
      update.value = state.value;
      update.state = state.optimizer_state;
      update.decay = draft.plan.parameters[id.index()].decay;
      stage.updates.push_back(std::move(update));
    }
}

Type scalar(const Draft& draft, DType dtype) {
  Type t;
  t.dtype = dtype;
  t.shape = {1};
  t.micro = Micro::kSum;
  if (draft.config.layout.pp > 1) t.place[static_cast<size_t>(draft.plan.mesh.axis("pp"))] = Placement::local();
  return t;
}

BufferId metric(StageDraft& stage, std::string name, Type type, bool persistent) {
  Buffer b;
  b.name = std::move(name);
  b.type = std::move(type);
  b.kind = BufferClass::kMetric;
  b.persistent = persistent;
  const BufferId id = add_buffer(stage, std::move(b));
  if (!persistent) stage.whole_step.push_back(id);
  return id;
}

/// Appends a call of a segment of its own over `buffers`.
void append(Draft& draft, StageDraft& stage, std::string name, const std::vector<BufferId>& buffers, Work work,
            std::vector<int> reads, std::vector<int> writes, StreamId stream = StreamId(0)) {
  Op op;
  op.stream = stream;
  op.work = std::move(work);
  op.label = name;
  op.strategy = "metrics";
  Event event;
  const std::string key = name + "." + std::to_string(stage.role.stage);
  event.call = bind(draft.cached(key, [&] { return one_op_segment(name, stage, buffers, std::move(op), reads, writes); }), buffers);
  stage.events.push_back(std::move(event));
}

/// The losses of whole sequences, of which context-parallel ranks have parts: a sum over these ranks last would be another tree.
std::vector<BufferId> sum_losses(Draft& draft, StageDraft& stage) {
  const AxisSet cp = context_axes(draft.plan.mesh);
  std::vector<BufferId> all;
  for (const BufferId part : stage.losses) {
    if (!part) continue;  // of the mirrored stage
    Buffer whole = stage.role.buffers[part.index()];
    whole.name += ".whole";
    whole.type = placed(whole.type, cp, Placement::replicate());
    whole.view = View{part.value, 0, {}};
    const std::string name = whole.name;
    all.push_back(add_buffer(stage, std::move(whole)));
    append(draft, stage, name, {part, all.back()},
           Collective{CollectiveKind::kAllReduce, ReduceOp::kSum, draft.comm("metrics.cp", cp), draft.algorithm()}, {0}, {1});
  }
  return all;
}

/// The losses of every sequence, in the order of sequences: where the ranks share each micro-batch out, a sum over ranks last would
/// be another tree.
std::vector<BufferId> gather_losses(Draft& draft, StageDraft& stage, const std::vector<BufferId>& losses) {
  const AxisSet dp = sequence_axes(draft.plan.mesh);
  std::vector<BufferId> all;
  for (const BufferId part : losses) {
    const Buffer& b = stage.role.buffers[part.index()];
    Type type = placed(b.type, dp, Placement::replicate());
    type.shape[0] *= draft.plan.mesh.size(dp);
    const std::string name = b.name + ".all";
    const BufferId gathered = metric(stage, name, type, false);
    append(draft, stage, name, {part, gathered},
           Collective{CollectiveKind::kAllGather, ReduceOp::kSum,
                      draft.comm(dp == data_axes(draft.plan.mesh) ? "metrics.dp" : "metrics.sequences", dp), draft.algorithm()},
           {0}, {1});
    all.push_back(gathered);
  }
  return all;
}

BufferId loss_metric(Draft& draft, StageDraft& stage) {
  const Case& c = draft.config;
  const int64_t targets = c.sequences_per_step() * c.train.seq_len;
  Type whole = scalar(draft, DType::f32);
  Type part_type = whole;
  if (has_mirrored_stages(draft)) {  // each of the two stages with a head has the losses of half of the micro-batches
    whole = placed(whole, draft.plan.mesh.axis("pp"), Placement::replicate());
    part_type = placed(part_type, draft.plan.mesh.axis("pp"), Placement::partial());
  }
  for (const std::string_view name : {"replica", "dp", "node", "ep"})
    if (draft.plan.mesh.size(name) > 1) part_type.place[static_cast<size_t>(draft.plan.mesh.axis(name))] = Placement::partial();
  const bool dealt_together = !draft.plan.together.empty(), apart = draft.training && runs_apart(c);
  const bool cut = c.layout.cp > 1 && !c.canonical;  // whether parts of sequences are added up with the rest
  if (cut) part_type = placed(part_type, context_axes(draft.plan.mesh), Placement::partial());
  std::vector<BufferId> buffers = c.layout.cp > 1 && c.canonical ? sum_losses(draft, stage) : stage.losses;
  std::erase(buffers, BufferId());
  if (dealt_together) buffers = gather_losses(draft, stage, buffers);
  if (dealt_together) part_type = placed(part_type, sequence_axes(draft.plan.mesh), Placement::replicate());
  std::vector<int> reads(buffers.size());
  for (size_t i = 0; i < reads.size(); ++i) reads[i] = static_cast<int>(i);
  buffers.push_back(metric(stage, "loss.sum", part_type, false));
  append(draft, stage, "loss.sum", buffers, SumScalars{}, reads, {static_cast<int>(reads.size())});
  BufferId sum = buffers.back();
  if (has_mirrored_stages(draft)) sum = sum_scalar_over_mirrors(draft, stage, sum);
  if (const std::string_view over = c.layout.cp > 1 && c.canonical ? "sequences" : "dp";
      draft.plan.mesh.size(axes_of(draft.plan.mesh, over)) > 1 && !dealt_together && !apart)
    sum = all_reduce_scalar(draft, stage, sum, over);
  if (draft.plan.mesh.size("replica") > 1) sum = all_reduce_scalar(draft, stage, sum, "replica");
  const BufferId mean = metric(stage, "loss", apart ? part_type : whole, true);  // or a worker's part of it
  append(draft, stage, "loss.mean", {sum, mean}, SumScalars{Rational(1, targets)}, {0}, {1});
  return mean;
}

/// The parameters' gradients within a bucket in host memory, as views of it: each cut along tp by itself, as the bucket is not.
std::vector<BufferId> members_of(const Draft& draft, StageDraft& stage, BufferId bucket) {
  const AxisSet tp = tensor_axes(draft.plan.mesh);
  const Buffer whole = stage.role.buffers[bucket.index()];
  std::vector<Buffer> members;
  for (const Buffer& b : stage.role.buffers) {
    if (b.parameter < 0 || b.kind != BufferClass::kGradient || !b.view || b.view->base != whole.packed_as) continue;
    // A gradient that ranks reduce is there as a partial sum and as what comes of it.
    if (std::ranges::any_of(members, [&](const Buffer& m) { return m.view->offset == b.view->offset; })) continue;
    Buffer member = b;
    member.name += ".host";
    member.space = whole.space;
    member.view->base = bucket.value;
    member.type = whole.type;
    member.type.shape = b.type.shape;
    for (size_t axis = 0; axis < kMaxAxes; ++axis)
      if (tp.contains(static_cast<int>(axis))) member.type.place[axis] = b.type.place[axis];
    members.push_back(std::move(member));
  }
  std::vector<BufferId> ids;
  for (Buffer& member : members) ids.push_back(add_buffer(stage, std::move(member)));
  return ids;
}

/// What a norm reads of gradients that tp cuts: buckets and slices, or, where a tied table is a shard by itself, shards alone.
std::vector<BufferId> alike(const Draft& draft, StageDraft& stage, const std::vector<BufferId>& gradients) {
  const size_t tp = static_cast<size_t>(draft.plan.mesh.axis("tp"));
  const auto is_shard = [&](BufferId id) { return stage.role.buffers[id.index()].type.place[tp].is_shard(); };
  if (std::ranges::none_of(gradients, is_shard)) return gradients;
  std::vector<BufferId> shards;
  for (const BufferId id : gradients) {
    if (is_shard(id))
      shards.push_back(id);
    else
      std::ranges::copy(members_of(draft, stage, id), std::back_inserter(shards));
  }
  return shards;
}

/// Gradients that are in host memory are squared there, and the sum comes to the device.
BufferId sum_of_squares(Draft& draft, StageDraft& stage, const std::string& name, std::vector<BufferId> gradients,
                        const Type& type) {
  const bool away = stage.role.buffers[gradients.front().index()].space == Space::kHost;
  std::vector<int> reads(gradients.size());
  for (size_t i = 0; i < reads.size(); ++i) reads[i] = static_cast<int>(i);
  const BufferId part = metric(stage, name, type, false), sum = away ? metric(stage, name + ".host", type, false) : part;
  if (away) stage.role.buffers[sum.index()].space = Space::kHost;
  gradients.push_back(sum);
  append(draft, stage, stage.role.buffers[sum.index()].name, gradients, SquaredNorm{}, reads, {static_cast<int>(reads.size())});
  if (away) append(draft, stage, name, {sum, part}, Copy{}, {0}, {1});
  return part;
}

/// Gradients that a norm counts, by what they are cut along: those of shared experts, slices of tensor parallelism, and the others.
struct Counted {
  std::vector<BufferId> experts, sliced, whole;
};

Counted counted_gradients(const Draft& draft, const StageDraft& stage, bool sliced_over_dp) {
  const AxisSet sharing = expert_axes(draft);
  const size_t tp = static_cast<size_t>(draft.plan.mesh.axis("tp"));
  Counted all;
  for (const Update& u : stage.updates) {
    if (u.gradient == stage.counted_elsewhere || !counts_in_norm(draft, stage, u.unit)) continue;
    const Type& type = stage.role.buffers[u.gradient.index()].type;
    bool shared = false;
    for (int axis = 0; axis < kMaxAxes; ++axis) {
      const Placement along = type.place[static_cast<size_t>(axis)];
      if (sharing.contains(axis)) shared |= sliced_over_dp ? along.kind == Place::kLocal : along.kind != Place::kReplicate;
    }
    const bool sliced = type.place[tp].kind != Place::kReplicate;
    (shared ? all.experts : sliced ? all.sliced : all.whole).push_back(u.gradient);
  }
  return all;
}

/// Slices are summed over the axes that cut them, copies are counted once.
BufferId gradient_norm(Draft& draft, StageDraft& stage) {
  const AxisSet sharing = expert_axes(draft), tp = tensor_axes(draft.plan.mesh);
  const size_t pp = static_cast<size_t>(draft.plan.mesh.axis("pp"));
  const bool sliced_over_dp = updates_slices(draft.config.layout) && draft.plan.mesh.size(data_axes(draft.plan.mesh)) > 1;
  const Counted counted = counted_gradients(draft, stage, sliced_over_dp);
  Type type = scalar(draft, DType::f64);
  type.scale.denominator = stage.role.buffers[stage.updates.front().gradient.index()].type.scale.denominator;
  if (sliced_over_dp) type = placed(type, data_axes(draft.plan.mesh), Placement::partial());
  const bool apart = trains_apart(draft);  // each worker's own
  if (apart) type = placed(type, draft.plan.mesh.axis("dp"), Placement::local());
  if (draft.config.layout.pp > 1) type.place[pp] = Placement::partial();
  std::vector<BufferId> parts;
  const auto count = [&](const char* name, const std::vector<BufferId>& list, AxisSet cut, std::string_view over) {
    if (list.empty()) return;
    const BufferId part =
        sum_of_squares(draft, stage, name, cut == tp ? alike(draft, stage, list) : list, placed(type, cut, Placement::partial()));
    parts.push_back(cut.empty() ? part : all_reduce_scalar(draft, stage, part, over, cut));
  };
  // Under ZeRO experts are summed over the ranks that share them with the slices of everything else.
  const AxisSet slicing = draft.config.layout.tp > 1 ? tp : AxisSet{}, of_experts = sliced_over_dp ? slicing : sharing | slicing;
  count("grad_norm2.experts", counted.experts, of_experts, "experts");
  count("grad_norm2.sliced", counted.sliced, tp, "tp");
  // A stage without experts has one part, and meets the others under one name.
  const bool alone = !sharing.empty() && parts.empty();
  count(alone ? "grad_norm2.sum" : "grad_norm2.whole", counted.whole, {}, "");
  BufferId total = parts.front();
  for (size_t i = 1; i < parts.size(); ++i) {
    const std::string name = i + 1 < parts.size() ? "grad_norm2.cut" : "grad_norm2.sum";
    const BufferId sum = metric(stage, name, type, false);
    append(draft, stage, name, {total, parts[i], sum}, Add{}, {0, 1}, {2});
    total = sum;
  }
  if (sliced_over_dp) total = all_reduce_scalar(draft, stage, total, "dp");
  if (draft.config.layout.pp > 1) total = all_reduce_scalar(draft, stage, total, "pp");
  if (validates_later(draft.config)) return total;  // who asks for it now would wait for it
  Type whole_type = stage.role.buffers[total.index()].type;
  const bool scaled = !whole_type.scale.denominator.empty();
  whole_type.scale = {};
  const BufferId result = metric(stage, apart ? "grad_norm2.worker" : "grad_norm2", whole_type, !apart);
  if (!scaled) {
    append(draft, stage, "grad_norm2", {total, result}, Copy{}, {0}, {1});
    return result;
  }
  append(draft, stage, "grad_norm2", {total, stage.unscale, result}, named("unscale_norm"), {0, 1}, {2});
  return result;
}

}  // namespace

void declare_updates(Draft& draft, StageDraft& stage) {
  if (!stage.updates.empty()) return;
  if (draft.config.layout.offload.optimizer != OffloadTo::kNone)
    update_every_bucket(draft, stage);
  else
    update_every_parameter(draft, stage);
}

BufferId all_reduce_scalar(Draft& draft, StageDraft& stage, BufferId part, std::string_view axis_name, ReduceOp reduce) {
  return all_reduce_scalar(draft, stage, part, axis_name, axes_of(draft.plan.mesh, axis_name), reduce);
}

BufferId all_reduce_scalar(Draft& draft, StageDraft& stage, BufferId part, std::string_view axis_name, AxisSet axes,
                           ReduceOp reduce) {
  Buffer sum = stage.role.buffers[part.index()];
  sum.name += "." + std::string(axis_name);
  sum.type = placed(sum.type, axes, Placement::replicate());
  if (!sum.view) sum.view = View{part.value, 0, {}};
  const std::string name = sum.name;
  const BufferId whole = add_buffer(stage, std::move(sum));
  append(draft, stage, name, {part, whole},
         Collective{CollectiveKind::kAllReduce, reduce, draft.comm("metrics." + std::string(axis_name), axes), draft.algorithm()},
         {0}, {1}, axis_name == "pp" ? meeting_stream(draft) : StreamId(0));
  return whole;
}

BufferId squared_gradient_norm(Draft& draft, StageDraft& stage) {
  const auto found = stage.named.find("grad_norm2");
  if (found != stage.named.end()) return found->second;
  return stage.named["grad_norm2"] = gradient_norm(draft, stage);
}

BufferId step_loss(Draft& draft, StageDraft& last) {
  const auto found = last.named.find("loss");
  if (found != last.named.end()) return found->second;
  const UnitTemplate& unit = draft.of(UnitKind::kHead);
  const DraftSegment& head = unit.forward.find_if("loss") ? unit.forward : unit.backward;  // where it is judged (chunked_loss.cpp)
  const Type by_sequence = head.segment.slots[head.find("loss").index()].type;
  const auto runs = [&](int j) {
    return std::ranges::any_of(last.events, [&](const Event& e) {
      return e.kind == Event::Kind::kForward && e.unit == draft.unit_count() - 1 && e.micro_batch == j;
    });
  };
  for (int j = 0; j < draft.micro_batches(); ++j)
    last.losses.push_back(!has_mirrored_stages(draft) || runs(j)
                              ? metric(last, "loss.sequences@" + std::to_string(j), by_sequence, false)
                              : BufferId());
  return last.named["loss"] = trains_apart(draft) ? worker_loss(draft, last) : loss_metric(draft, last);
}

void optimizer(Draft& draft) {
  if (!draft.training) return;
  for (StageDraft& stage : draft.stages) {
    declare_updates(draft, stage);
    for (Update& update : stage.updates) {
      add_state(draft, stage, update);
      stage.events.push_back(update_event(draft, stage, update, update_stream(draft)));
      if (update.stored) stage.events.push_back(round_event(draft, stage, update));
      if (!update.after) continue;
      Event gather;
      gather.call = *update.after;
      stage.events.push_back(std::move(gather));
    }
  }
}

void metrics(Draft& draft) {
  for (StageDraft& stage : draft.stages)
    if (stage.holds(draft.unit_count() - 1)) step_loss(draft, stage);
  if (draft.training && draft.config.train.grad_norm)
    for (StageDraft& stage : draft.stages) squared_gradient_norm(draft, stage);
}

}  // namespace shardlab::strategies
