// The state of a stage is a sum over its parameters. The peak is looked for where it can be: the level of live bytes when a stage
// begins a slot (forward or backward of one micro-batch) depends on the micro-batches in flight and the messages under way, which
// follow one pattern between the corners of the schedule; what a slot adds to its level is the same in every slot of its kind.
#include "simulator/closed_form.h"

#include <algorithm>
#include <numeric>

#include "simulator/closed_form_parts.h"

namespace shardlab::simulator {

using namespace forms;  // its parts

namespace {

// When most is there.

/// Finds the peak, given what is live throughout the step. The receive for the next slot is posted before a slot begins, while two
/// messages sent may be under way; even so it never is the peak. Beyond what a slot of forward ends with there are at most those
/// two, as much as the slot's last projection and residual took; after a slot of backward one micro-batch less is in flight.
/// `again`: the period has further steps, which begin with what the step before still sends.
void find_peak(const Sizes& n, const Slots& slots, const Timetable& table, bool again, StageForm& form) {
  Live best;
  const auto consider = [&](Moment moment, const Live& live) {
    if (live.total() <= best.total()) return;
    best = live;
    form.moment = moment;
  };
  const auto visit = [&](int64_t slot, bool sent) {
    const int under_way = table.receives(slot) + table.receives(slot + 1) + sent;
    const Live level = table.in_flight(slot) * slots.kept + under_way * activation(n.x);
    const Rise& rise = table.backward(slot) ? slots.backward : slots.forward;
    consider(rise.moment, level + rise.live);
  };
  table.corners([&](int64_t slot) { visit(slot, table.sends(slot - 1)); });
  if (again) visit(1, table.sends(table.slots()));
  const auto at = [&](BufferClass c) -> int64_t& { return form.at_peak.bytes[static_cast<size_t>(c)]; };
  at(BufferClass::kActivation) = best.activation;
  at(BufferClass::kTemporary) = best.temporary;
  at(BufferClass::kInput) = best.input;
  form.peak = form.at_peak.total();
}

/// What is live throughout: the classes of what comes and goes are left to whoever finds the peak.
void set_whole_step(StageForm& form) {
  const auto at = [&](BufferClass c) -> int64_t& { return form.at_peak.bytes[static_cast<size_t>(c)]; };
  at(BufferClass::kParameter) = form.parameters;
  at(BufferClass::kMaster) = form.masters;
  at(BufferClass::kMoment) = form.moments;
  at(BufferClass::kGradient) = form.gradients;
  at(BufferClass::kMetric) = form.metrics;
  at(BufferClass::kWorkspace) = form.workspace;
  at(BufferClass::kBuffer) = form.buffers;
  at(BufferClass::kOther) = form.other;
}

/// What stands outside the device for the step: the optimizer's state in host memory or on NVMe, the gradients and results that the
/// host works with, the numbers that judge them, and blocks of what it widens or scales. With NVMe gradients and results pass
/// through host memory, but where something reads all gradients at once.
void set_outside(const Case& c, const State& state, StageForm& form) {
  if (!updates_on_host(c)) return;
  const bool nvme = c.layout.offload.optimizer == OffloadTo::kNvme;
  const auto at = [](SpaceForm& space, BufferClass cls) -> int64_t& { return space.at_peak.bytes[static_cast<size_t>(cls)]; };
  SpaceForm& states = nvme ? form.nvme : form.host;
  at(states, BufferClass::kMaster) = state.host_masters;
  at(states, BufferClass::kMoment) = state.host_moments;
  if (keeps_host_gradients(c)) at(form.host, BufferClass::kGradient) = state.host_gradients;
  if (!nvme && !parks_parameters(c)) at(form.host, BufferClass::kBuffer) = state.host_results;
  if (parks_parameters(c))
    at(c.layout.offload.parameters == OffloadTo::kNvme ? form.nvme : form.host, BufferClass::kParameter) = state.host_parameters;
  const bool scaled = c.train.clip_norm > 0 || c.train.precision == "fp16", narrow = Widths(c).gradient < 4;
  // A sum of 16-bit gradients widens both and its result.
  const int64_t blocks = narrow && parks_parameters(c) && c.train.grad_accumulation > 1 ? 3 : (narrow ? 1 : 0) + (scaled ? 1 : 0);
  at(form.host, BufferClass::kWorkspace) = blocks * held(kBlock);
  // What updates multiply by, and whether they run (with a delay: steps begun); sums of squares, of slices and of the rest;
  // which gradient is no number.
  at(form.host, BufferClass::kOther) = ((scaled ? 1 : 0) + (may_skip(c) || c.layout.offload.delayed_update ? 1 : 0)) * kScalar;
  at(form.host, BufferClass::kMetric) =
      ((has_norm(c) ? (c.layout.tp > 1 ? 2 : 1) : 0) + (c.train.guard.nonfinite != GuardAction::kNone ? 1 : 0)) * kScalar;
  form.nvme.peak = form.nvme.at_peak.total();
}

/// Whether what is live changes from unit to unit.
bool walks(const Case& c) { return c.layout.zero >= 2 || c.layout.offload.any() || has_variants(c); }

StageForm stage_form(const Case& c, const Sizes& sizes, const State& state, const Part& part, int64_t stage) {
  const Metrics metrics = metrics_of(c, part);
  const Slots slots = slots_of(c, sizes, part);
  StageForm form;
  form.layers = part.layers;
  form.parameters = state.parameters;
  form.masters = state.masters + state.started;
  form.moments = state.moments;
  form.gradients = state.gradients;
  form.metrics = metrics.step + metrics.persistent;
  const CompressionForm compression = compression_of(c, state, part);
  const bool plain = c.layout.zero_plus_plus == ZeroPlusPlus{};
  const ZeroPlusPlusForm less = plain ? ZeroPlusPlusForm{} : zero_plus_plus_of(c, state, part, stage);
  form.workspace = workspace_of(c, part, std::max(compression.workspace, less.scatter_workspace), less.gather_workspace);
  form.buffers = compression.messages + state.sums + less.messages;
  const Others others = others_of(c, part);
  form.other = others.step + others.persistent + compression.errors;
  form.persistent = state.parameters + state.masters + state.moments + metrics.persistent + form.workspace + others.persistent +
                    compression.errors + state.sums;
  form.in_flight = in_flight(c.layout.schedule, c.layout.pp, stage, c.train.grad_accumulation);
  form.bytes_in_flight = slots.kept.total();
  set_whole_step(form);
  set_outside(c, state, form);
  if (walks(c))
    walk_to_peak(c, sizes, state, part, stage, form);
  else
    find_peak(sizes, slots, Timetable(c, part, stage), c.layout.diloco.steps > 1, form);
  return form;
}

// What is sent.

/// Bytes that the ranks of a group of g together send. A part of the buffer takes g - 1 hops to be summed and g - 1 to be known to
/// all, whichever way it goes and however large it is.
constexpr int64_t reduced(int64_t bytes, int64_t g) { return (g - 1) * bytes; }
constexpr int64_t all_reduced(int64_t bytes, int64_t g) { return 2 * (g - 1) * bytes; }

class Wires {
 public:
  Wires(const Case& c, const Elements& n, const Sizes& s, ClosedForm& form)
      : c_(c),
        form_(form),
        dp_(c.layout.dp),
        shards_(c.layout.shard_ranks()),
        sets_(c.layout.replicas()),
        tp_(c.layout.tp),
        pp_(c.layout.pp),
        m_(c.train.grad_accumulation),
        table_(n.table),
        widths_(c),
        message_(widths_.value * s.tokens * n.hidden),
        token_(kElement * s.tokens) {}

  void add_stage(int64_t stage, const Part& part, const State& state) {
    if (tp_ > 1) {
      int64_t again = 0;  // layers whose forward, less its last all-reduce, runs twice
      const Treatments treatments(c_);
      for (int64_t layer = 0; layer < part.layers; ++layer) again += treatments.of(first_layer_of(c_, stage) + layer).full ? 1 : 0;
      const int64_t whole = part.layers * 4 + again + (part.first ? 1 : 0) + (part.last ? 1 : 0);
      at(Channel::kTp) += dp_ * m_ * all_reduced(whole * message_ + (part.last ? 3 * token_ : 0), tp_);
      // The largest size of every slice: 4 weights, 2 inputs, 2 gradients.
      if (multiplies_in_fp8(c_) && c_.train.fp8_scaling == "current")
        at(Channel::kTp) += dp_ * m_ * part.layers * 8 * all_reduced(4, tp_);
    }
    if (remembers_amax(c_)) at(Channel::kAmax) += all_reduced(4 * 12 * part.layers, dp_ * tp_);
    const bool sliced = updates_slices(c_);
    const bool compressed = c_.layout.compression.kind != CompressionKind::kNone;
    const ZeroPlusPlusForm less = zero_plus_plus_of(c_, state, part, stage);
    const int64_t gradients = compressed                           ? compression_of(c_, state, part).sent
                              : c_.layout.zero_plus_plus.gradients ? sets_ * less.scattered
                              : sliced                             ? sets_ * reduced(widths_.gradient * state.reduced, shards_)
                                                                   : all_reduced(widths_.gradient * state.reduced, dp_);
    at(Channel::kDpGradients) += tp_ * gradients * (c_.layout.zero >= 2 ? m_ : 1);
    at(Channel::kDpGradientsNode) += tp_ * m_ * less.scattered_in_node;
    at(Channel::kDpGradientsCross) += tp_ * m_ * less.scattered_across;
    at(Channel::kDpReplicas) += tp_ * all_reduced(widths_.gradient * state.reduced, sets_);
    at(Channel::kDpParameters) +=
        tp_ * (sets_ * (c_.layout.zero == 3 ? less.gathered : reduced(widths_.value * state.gathered, shards_)) +
               all_reduced(4 * state.moved, dp_));
    at(Channel::kDpSecondary) += tp_ * less.gathered_in_node;
    if (!part.last) {
      const bool even = stage % 2 == 0;
      for (const Channel channel :
           {even ? Channel::kForwardEven : Channel::kForwardOdd, even ? Channel::kBackwardEven : Channel::kBackwardOdd})
        at(channel) += dp_ * tp_ * m_ * message_;
    }
    if (part.last && !runs_apart(c_)) {  // the loss, in fp32: its sum, or every sequence's
      at(Channel::kMetricsDp) += tp_ * sets_ *
                                 (shares_micro_batches_out(c_) ? m_ * reduced(4 * c_.train.micro_batch * shards_, shards_)
                                                               : all_reduced(4 * std::max(1, c_.layout.diloco.steps), shards_));
      at(Channel::kMetricsReplica) += tp_ * shards_ * all_reduced(4, sets_);
    }
    if (has_norm(c_)) {  // the squared norm, in fp64
      at(Channel::kMetricsTp) += dp_ * all_reduced(8, tp_);
      if (sliced) at(Channel::kMetricsDp) += tp_ * sets_ * all_reduced(8, shards_);
    }
    if (finds_inf(c_)) {  // a flag of 4 bytes
      at(Channel::kMetricsTp) += dp_ * all_reduced(4, tp_);
      if (sliced) at(Channel::kMetricsDp) += tp_ * sets_ * all_reduced(4, shards_);
    }
  }

  void add_across_stages() {
    if (pp_ == 1) return;
    if (has_norm(c_)) at(Channel::kMetricsPp) += dp_ * tp_ * all_reduced(8, pp_);
    if (finds_inf(c_)) at(Channel::kMetricsPp) += dp_ * tp_ * all_reduced(4, pp_);
    if (judges_loss(c_)) at(Channel::kMetricsPp) += dp_ * tp_ * all_reduced(4, pp_);
    if (!c_.model.tied_embeddings) return;
    const int64_t slices = updates_slices(c_) ? shards_ : 1;
    int64_t slice = (table_ + slices - 1) / slices;
    const int64_t multiple = slices > 1 && in_blocks(c_) ? 2 * ((slice + kScaleBlock - 1) / kScaleBlock) : 1;
    slice = (slice + multiple - 1) / multiple * multiple;
    at(Channel::kEnds) += dp_ * tp_ * all_reduced(widths_.gradient * slice, 2);
  }

  /// Everything again in each step of a period, but what workers that train apart exchange when it ends.
  void repeat(int64_t steps) {
    for (size_t i = 0; i < kChannels; ++i)
      if (i != static_cast<size_t>(Channel::kDpParameters) && i != static_cast<size_t>(Channel::kMetricsDp)) form_.wire[i] *= steps;
  }

 private:
  int64_t& at(Channel channel) { return form_.wire[static_cast<size_t>(channel)]; }

  const Case& c_;
  ClosedForm& form_;
  int64_t dp_, shards_, sets_, tp_, pp_, m_, table_;
  Widths widths_;
  int64_t message_;  ///< bytes of the residual stream of one micro-batch
  int64_t token_;    ///< bytes of one number a token
};

}  // namespace

std::string_view name_of(Moment moment) {
  switch (moment) {
    case Moment::kForwardLayer: return "layer forward";
    case Moment::kForwardHead: return "head forward";
    case Moment::kBackwardHead: return "head backward";
    case Moment::kBackwardDown: return "layer backward: down";
    case Moment::kBackwardActivation: return "layer backward: activation";
    case Moment::kBackwardUp: return "layer backward: up";
    case Moment::kBackwardAttention: return "layer backward: attention";
    case Moment::kBetween: return "between units";
  }
  return "?";
}

std::string_view name_of(Channel channel) {
  static constexpr std::array<std::string_view, kChannels> kNames{
      "tp",          "dp.grads",   "dp.parameters", "dp.replicas", "dp.secondary", "dp.grads.node", "dp.grads.cross",
      "pp.fwd.even", "pp.fwd.odd", "pp.bwd.even",   "pp.bwd.odd",  "pp.ends",      "metrics.dp",    "metrics.replica",
      "metrics.tp",  "metrics.pp", "amax"};
  return kNames[static_cast<size_t>(channel)];
}

int64_t ClosedForm::peak() const {
  int64_t highest_peak = 0;
  for (const StageForm& stage : stages) highest_peak = std::max(highest_peak, stage.peak);
  return highest_peak;
}

int64_t ClosedForm::wire_total() const { return std::accumulate(wire.begin(), wire.end(), int64_t{0}); }

int64_t in_flight(Schedule schedule, int64_t stages, int64_t stage, int64_t micro_batches) {
  switch (schedule) {
    case Schedule::kNone: return 1;
    case Schedule::kAfab: return micro_batches;
    case Schedule::k1F1B: return std::min(micro_batches, stages - stage);
  }
  return micro_batches;
}

StageForm closed_form_of_stage(const Case& config, int64_t stage) {
  const Part part = part_of(config, stage);
  return stage_form(config, Sizes(config), state_of(config, Elements(config), part, first_layer_of(config, stage)), part, stage);
}

ClosedForm closed_form(const Case& config) {
  SHARDLAB_CHECK(is_decided(config), "the closed form of a case whose recompute by budget has not been decided");
  const Elements elements(config);
  const Sizes sizes(config);
  ClosedForm form;
  form.layer = layer_of(sizes);
  form.stages.reserve(static_cast<size_t>(config.layout.pp));
  Wires wires(config, elements, sizes, form);
  Part part;
  State state;
  int64_t first_layer = 0;
  for (int64_t stage = 0; stage < config.layout.pp; ++stage) {
    // Stages of equal parts hold the same, unless units of several layers are counted through the model.
    if (const Part next = part_of(config, stage); next != part || config.layout.fsdp.unit > 1) {
      part = next;
      state = state_of(config, elements, part, first_layer);
    }
    first_layer += part.layers;
    form.stages.push_back(stage_form(config, sizes, state, part, stage));
    wires.add_stage(stage, part, state);
  }
  wires.add_across_stages();
  if (config.layout.diloco.steps > 0) wires.repeat(config.layout.diloco.steps);
  return form;
}

}  // namespace shardlab::simulator
