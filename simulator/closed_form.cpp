// The state of a stage is a sum over its parameters. The peak is looked for where it can be: the level of live bytes when a stage
// begins a slot (forward or backward of one micro-batch) depends on the micro-batches in flight and the messages under way, which
// follow one pattern between the corners of the schedule; what a slot adds to its level is the same in every slot of its kind.
#include "simulator/closed_form.h"

#include <algorithm>
#include <bit>
#include <initializer_list>
#include <numeric>

namespace shardlab {
namespace {

constexpr int64_t kElement = 4;  // fp32, and i32 for tokens
constexpr int64_t kScalar = aligned(1);

/// Bytes that a buffer of `elements` takes.
constexpr int64_t held(int64_t elements) { return aligned(kElement * elements); }

/// Live bytes of the classes that come and go within a step.
struct Live {
  int64_t activation = 0, temporary = 0, input = 0;

  int64_t total() const { return activation + temporary + input; }
  friend Live operator+(Live a, Live b) { return {a.activation + b.activation, a.temporary + b.temporary, a.input + b.input}; }
  friend Live operator-(Live a, Live b) { return {a.activation - b.activation, a.temporary - b.temporary, a.input - b.input}; }
  friend Live operator*(int64_t n, Live a) { return {n * a.activation, n * a.temporary, n * a.input}; }
};

constexpr Live activation(int64_t bytes) { return {.activation = bytes}; }
constexpr Live temporary(int64_t bytes) { return {.temporary = bytes}; }
constexpr Live input(int64_t bytes) { return {.input = bytes}; }

/// What is live at a moment of a slot beyond what was live when the slot began.
struct Rise {
  Moment moment = Moment::kForwardLayer;
  Live live;
};

/// The first of the highest.
Rise highest(std::initializer_list<Rise> rises) {
  Rise best = *rises.begin();
  for (const Rise& r : rises)
    if (r.live.total() > best.live.total()) best = r;
  return best;
}

/// Which part of the model a stage holds.
struct Part {
  int64_t layers = 0;
  bool first = false, last = false;
  friend bool operator==(const Part&, const Part&) = default;
};

Part part_of(const Case& c, int64_t stage) {
  const int64_t stages = c.layout.pp;
  return {c.model.layers / stages + (stage < c.model.layers % stages ? 1 : 0), stage == 0, stage == stages - 1};
}

// What a stage holds for the whole step.

/// Sums over the buckets of a stage.
struct BucketSums {
  int64_t elements = 0;  ///< padding included
  int64_t bytes = 0;
  int64_t slice_bytes = 0;  ///< of one rank's slices
};

/// One kind of bucket as it fills: closed once it has `bucket_bytes`, padded to a multiple of the ranks that slice it.
class Filling {
 public:
  Filling(int64_t bucket_bytes, int64_t slices) : bucket_bytes_(bucket_bytes), slices_(slices) {}

  void add(int64_t elements) {
    open_ += elements;
    if (open_ * kElement >= bucket_bytes_) close();
  }
  BucketSums finish() {
    if (open_ > 0) close();
    return sums_;
  }

 private:
  void close() {
    const int64_t padded = (open_ + slices_ - 1) / slices_ * slices_;
    sums_.elements += padded;
    sums_.bytes += held(padded);
    sums_.slice_bytes += held(padded / slices_);
    open_ = 0;
  }

  int64_t bucket_bytes_;
  int64_t slices_;
  int64_t open_ = 0;
  BucketSums sums_;
};

/// Elements of each parameter on one rank. Projections into and out of a layer are cut t ways; norms, positions and the biases that
/// are added to whole sums are not.
struct Elements {
  explicit Elements(const Case& c)
      : gpt(!c.model.is_llama()),
        hidden(c.model.hidden),
        wqkv(c.model.qkv_rows() / c.layout.tp * hidden),
        bqkv(c.model.qkv_rows() / c.layout.tp),
        wo(hidden * (c.model.heads * c.model.head_dim / c.layout.tp)),
        wup(c.model.up_rows() / c.layout.tp * hidden),
        bup(c.model.up_rows() / c.layout.tp),
        wdown(hidden * (c.model.ffn / c.layout.tp)),
        table(c.model.vocab / c.layout.tp * hidden),
        positions(gpt ? c.model.max_positions * hidden : 0) {}

  /// Bytes of one layer's parameters, each in a buffer of its own.
  int64_t layer_bytes() const {
    const int64_t matrices = held(wqkv) + held(wo) + held(wup) + held(wdown);
    return matrices + (gpt ? 6 * held(hidden) + held(bqkv) + held(bup) : 2 * held(hidden));
  }
  int64_t final_norm_bytes() const { return (gpt ? 2 : 1) * held(hidden); }

  bool gpt;
  int64_t hidden, wqkv, bqkv, wo, wup, bup, wdown, table, positions;
};

/// Fills a stage's buckets in the order in which backward finishes gradients: from the head to the embedding, a unit's parameters
/// from the last to the first. Parameters with weight decay and without have buckets of their own, and so have slices and whole
/// copies.
BucketSums fill_buckets(const Case& c, const Elements& n, const Part& part, bool head_table) {
  const int64_t slices = c.layout.zero > 0 ? c.layout.dp : 1;
  const bool tied = c.model.tied_embeddings, cut = c.layout.tp > 1;
  const Filling empty(c.layout.bucket_bytes, slices);
  Filling matrices = empty, vectors = empty, cut_vectors = empty, positions = empty;
  Filling tables(0, slices);  // a tied table is alone
  const auto add_bias = [&](int64_t elements) { (cut ? cut_vectors : vectors).add(elements); };
  const auto add_norm = [&] {
    for (int i = n.gpt ? 2 : 1; i > 0; --i) vectors.add(n.hidden);
  };
  if (part.last) {
    if (head_table) (tied ? tables : matrices).add(n.table);
    add_norm();
  }
  for (int64_t layer = 0; layer < part.layers; ++layer) {
    for (const int64_t elements : {n.wdown, n.wup, n.wo, n.wqkv}) matrices.add(elements);
    if (n.gpt) vectors.add(n.hidden), add_bias(n.bup);
    add_norm();
    if (n.gpt) vectors.add(n.hidden), add_bias(n.bqkv);
    add_norm();
  }
  if (part.first) {
    if (n.gpt) (cut ? positions : matrices).add(n.positions);
    (tied ? tables : matrices).add(n.table);
  }
  BucketSums all;
  for (Filling* f : {&matrices, &vectors, &cut_vectors, &positions, &tables}) {
    const BucketSums s = f->finish();
    all.elements += s.elements, all.bytes += s.bytes, all.slice_bytes += s.slice_bytes;
  }
  return all;
}

/// What a stage holds for the whole step, and what of it the data-parallel ranks exchange.
struct State {
  int64_t parameters = 0, moments = 0, gradients = 0;
  int64_t reduced = 0;   ///< elements of gradients that are reduced over dp
  int64_t gathered = 0;  ///< elements of parameters that are gathered over dp
};

State state_of(const Case& c, const Elements& n, const Part& part) {
  const bool tied = c.model.tied_embeddings, zero = c.layout.zero > 0, both_ends = part.first && part.last;
  // A table tied on one stage is stored and updated once. Its two gradients are added before they are reduced unless canonical.
  const bool shares_table = tied && both_ends;
  const bool added_early = shares_table && !c.canonical;
  int64_t separate = part.layers * n.layer_bytes();  // every parameter in a buffer of its own
  if (part.first) separate += held(n.table) + (n.gpt ? held(n.positions) : 0);
  if (part.last) separate += n.final_norm_bytes() + held(n.table);
  const int64_t values = separate - (shares_table ? held(n.table) : 0);
  const int64_t moments = c.train.optimizer == Optimizer::kAdamW ? 2 : 0;

  State state{.parameters = values, .moments = moments * values, .gradients = separate};
  if (c.layout.dp > 1) {
    BucketSums buckets = fill_buckets(c, n, part, !added_early);
    state.gradients = buckets.bytes + (added_early ? held(n.table) : 0);
    state.reduced = buckets.elements;
    if (zero) {
      if (shares_table && !added_early) {
        Filling head(0, c.layout.dp);
        head.add(n.table);
        const BucketSums second = head.finish();
        buckets.elements -= second.elements, buckets.bytes -= second.bytes, buckets.slice_bytes -= second.slice_bytes;
      }
      state.parameters = buckets.bytes;
      state.moments = moments * buckets.slice_bytes;
      state.gathered = buckets.elements;
    }
  }
  // Canonical accumulation counts in binary: a partial sum for each bit of the number of micro-batches.
  if (c.canonical) state.gradients += (std::bit_width(static_cast<uint64_t>(c.train.grad_accumulation)) - 1) * separate;
  return state;
}

/// Scalars and losses; those that outlive the step apart.
struct Metrics {
  int64_t step = 0, persistent = 0;
};

Metrics metrics_of(const Case& c, const Part& part) {
  Metrics m;
  if (part.last) m = {c.train.grad_accumulation * held(c.train.micro_batch) + kScalar, kScalar};
  if (c.train.grad_norm) {
    m.step += (c.layout.tp > 1 ? 3 : 1) * kScalar;  // of slices, of whole gradients, and their sum
    m.persistent += kScalar;
  }
  return m;
}

// What comes and goes.

/// Sizes of one micro-batch's activations on one rank.
struct Sizes {
  explicit Sizes(const Case& c)
      : tokens(c.train.micro_batch * c.train.seq_len),
        x(held(tokens * c.model.hidden)),
        statistics(held(tokens * (c.model.is_llama() ? 1 : 2))),
        qkv(held(tokens * (c.model.qkv_rows() / c.layout.tp))),
        o(held(tokens * (c.model.heads * c.model.head_dim / c.layout.tp))),
        log_sum_exp(held(tokens * (c.model.heads / c.layout.tp))),
        u(held(tokens * (c.model.up_rows() / c.layout.tp))),
        a(held(tokens * (c.model.ffn / c.layout.tp))),
        logits(held(tokens * (c.model.vocab / c.layout.tp))),
        ids(held(tokens)),
        loss_parts(c.layout.tp > 1 ? held(tokens) + held(2 * tokens) : 0),
        mask(c.train.dropout > 0 ? x : 0) {}

  int64_t tokens;
  int64_t x;  ///< the residual stream
  int64_t statistics, qkv, o, log_sum_exp, u, a, logits;
  int64_t ids;         ///< tokens, and targets
  int64_t loss_parts;  ///< maximum and sums of the vocabulary-parallel loss
  int64_t mask;        ///< the copy of a residual gradient that dropout masks
};

LayerActivations layer_of(const Sizes& n) {
  return {.input = n.x,
          .norms = 2 * n.x,
          .statistics = 2 * n.statistics,
          .qkv = n.qkv,
          .attention = n.o,
          .log_sum_exp = n.log_sum_exp,
          .residual = n.x,
          .up = n.u,
          .activated = n.a};
}

/// The end of a layer's forward beyond its input: what is kept grows to the end, where the last projection and the output stand
/// beside it. Under recompute nothing is kept, and the moments before may be higher; none of them is the step's, since backward
/// makes again all that forward had and then adds to it.
Rise layer_forward(const Sizes& n, bool recompute) {
  const int64_t kept = recompute ? 0 : layer_of(n).inner();
  const int64_t passing = recompute ? 2 * n.x : n.x;  // the projection, and the residual stream after attention
  return {Moment::kForwardLayer, activation(kept + n.x) + temporary(passing)};
}

/// A layer's backward beyond what its forward kept (under recompute: made again) and the gradient of its output. `inner` is that of
/// `layer_of`, in the class that it has there.
Rise layer_backward(const Sizes& n, bool recompute) {
  const auto inner = [&](int64_t bytes) { return recompute ? temporary(bytes) : activation(bytes); };
  // In the middle the feed-forward has given back what it kept and the gradient of the layer's output, and left its own result. The
  // moment between, attention's output at `middle + mask + o`, is never the highest: it is above attention's only where the
  // residual stream is wider than q, k and v, and there the feed-forward's first is higher.
  const Live middle = Live{} - inner(n.a + n.u + n.statistics + 2 * n.x) - activation(n.x) + temporary(n.x);
  return highest({{Moment::kBackwardDown, temporary(n.mask + n.a)},
                  {Moment::kBackwardActivation, temporary(n.a + n.u) - inner(n.a)},
                  {Moment::kBackwardUp, temporary(n.u + n.x) - inner(n.a + n.u)},
                  {Moment::kBackwardAttention, middle + temporary(n.o + n.qkv)}});
}

/// What one slot of each kind adds to its level, and what a micro-batch keeps between the two.
struct Slots {
  Rise forward, backward;
  Live kept;
};

Slots slots_of(const Case& c, const Sizes& n, const Part& part) {
  const bool recompute = c.layout.recompute == Recompute::kFull;
  const Live inner = activation(layer_of(n).inner());
  const Live kept_inside = recompute ? Live{} : inner;
  const Live embedded = part.first ? input(n.ids) + activation(n.x) : Live{};
  const Live head_kept = activation(n.x + n.statistics + n.logits);

  // Forward: the last layer stands on what the others kept; the head on all of them and its own input.
  Slots s;
  const Rise layer = layer_forward(n, recompute);
  const Live before = embedded + (part.layers - 1) * (kept_inside + activation(n.x));
  s.forward = {layer.moment, before + layer.live};
  if (part.last) {
    const Live head = before + kept_inside + activation(n.x) + head_kept + input(n.ids) + temporary(n.loss_parts);
    s.forward = highest({s.forward, {Moment::kForwardHead, head}});
  }

  // Backward: the last layer is the first to run, when most is live; under recompute all that it keeps inside is there again. On
  // the last stage the head has run before it, and left the gradient of its input in place of the input.
  s.backward = layer_backward(n, recompute);
  if (recompute) s.backward.live = s.backward.live + temporary(inner.total());
  if (part.last) s.backward = highest({{Moment::kBackwardHead, temporary(n.x)}, {s.backward.moment, s.backward.live - head_kept}});

  s.kept = embedded + part.layers * kept_inside + (part.layers - (part.first ? 1 : 0)) * activation(n.x);
  if (part.last) s.kept = s.kept + activation(n.x) + head_kept;
  return s;
}

// When most is there.

/// The order in which a stage works: `warm_up` forwards, then one forward and one backward in turn, then the backwards that are
/// left.
class Timetable {
 public:
  Timetable(const Case& c, const Part& part, int64_t stage)
      : micro_batches_(c.train.grad_accumulation),
        warm_up_(c.layout.schedule == Schedule::kAfab ? micro_batches_ : std::min(micro_batches_, c.layout.pp - 1 - stage)),
        part_(part) {}

  int64_t slots() const { return 2 * micro_batches_; }
  bool backward(int64_t slot) const {
    if (slot <= warm_up_) return false;
    return slot > slots() - warm_up_ || (slot - warm_up_) % 2 == 0;
  }
  /// Micro-batches between forward and backward when slot number `slot` (from 1) begins.
  int64_t in_flight(int64_t slot) const {
    if (slot <= warm_up_) return slot - 1;
    if (slot > slots() - warm_up_) return slots() - slot + 1;
    return warm_up_ + (backward(slot) ? 1 : 0);
  }
  /// Whether the slot works on a message, and whether it makes one. There are no slots before the first and after the last.
  bool receives(int64_t slot) const { return exists(slot) && (backward(slot) ? !part_.last : !part_.first); }
  bool sends(int64_t slot) const { return exists(slot) && (backward(slot) ? !part_.first : !part_.last); }

  /// Calls `visit` with each slot in which the peak can first be, in order. What is live changes its pattern two slots after a
  /// corner at the latest: what one slot sends goes when the next but one begins, and each receives for the next.
  template <class Visit>
  void corners(const Visit& visit) const {
    int64_t next = 1;
    for (const int64_t corner : {int64_t{0}, warm_up_, slots() - warm_up_})
      for (next = std::max(next, corner - 1); next <= std::min(slots(), corner + 2); ++next) visit(next);
  }

 private:
  bool exists(int64_t slot) const { return slot >= 1 && slot <= slots(); }

  int64_t micro_batches_;
  int64_t warm_up_;
  Part part_;
};

/// Finds the peak, given what is live throughout the step. The receive for the next slot is posted before a slot begins, while two
/// messages sent may be under way; even so it never is the peak. Beyond what a slot of forward ends with there are at most those
/// two, as much as the slot's last projection and residual took; after a slot of backward one micro-batch less is in flight.
void find_peak(const Sizes& n, const Slots& slots, const Timetable& table, StageForm& form) {
  Live best;
  const auto consider = [&](Moment moment, const Live& live) {
    if (live.total() <= best.total()) return;
    best = live;
    form.moment = moment;
  };
  table.corners([&](int64_t slot) {
    const int under_way = table.receives(slot) + table.receives(slot + 1) + table.sends(slot - 1);
    const Live level = table.in_flight(slot) * slots.kept + under_way * activation(n.x);
    const Rise& rise = table.backward(slot) ? slots.backward : slots.forward;
    consider(rise.moment, level + rise.live);
  });
  const auto at = [&](BufferClass c) -> int64_t& { return form.at_peak.bytes[static_cast<size_t>(c)]; };
  at(BufferClass::kParameter) = form.parameters;
  at(BufferClass::kMoment) = form.moments;
  at(BufferClass::kGradient) = form.gradients;
  at(BufferClass::kMetric) = form.metrics;
  at(BufferClass::kActivation) = best.activation;
  at(BufferClass::kTemporary) = best.temporary;
  at(BufferClass::kInput) = best.input;
  form.peak = form.at_peak.total();
}

StageForm stage_form(const Case& c, const Sizes& sizes, const State& state, const Part& part, int64_t stage) {
  const Metrics metrics = metrics_of(c, part);
  const Slots slots = slots_of(c, sizes, part);
  StageForm form;
  form.layers = part.layers;
  form.parameters = state.parameters;
  form.moments = state.moments;
  form.gradients = state.gradients;
  form.metrics = metrics.step + metrics.persistent;
  form.persistent = state.parameters + state.moments + metrics.persistent;
  form.in_flight = in_flight(c.layout.schedule, c.layout.pp, stage, c.train.grad_accumulation);
  form.bytes_in_flight = slots.kept.total();
  find_peak(sizes, slots, Timetable(c, part, stage), form);
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
        tp_(c.layout.tp),
        pp_(c.layout.pp),
        m_(c.train.grad_accumulation),
        table_(n.table),
        message_(kElement * s.tokens * n.hidden),
        token_(kElement * s.tokens) {}

  void add_stage(int64_t stage, const Part& part, const State& state) {
    if (tp_ > 1) {
      const int64_t per_layer = c_.layout.recompute == Recompute::kFull ? 5 : 4;
      const int64_t whole = part.layers * per_layer + (part.first ? 1 : 0) + (part.last ? 1 : 0);
      at(Channel::kTp) += dp_ * m_ * all_reduced(whole * message_ + (part.last ? 3 * token_ : 0), tp_);
    }
    const bool zero = c_.layout.zero > 0;
    at(Channel::kDpGradients) += tp_ * (zero ? reduced(kElement * state.reduced, dp_) : all_reduced(kElement * state.reduced, dp_));
    at(Channel::kDpParameters) += tp_ * reduced(kElement * state.gathered, dp_);
    if (!part.last) {
      const bool even = stage % 2 == 0;
      for (const Channel channel :
           {even ? Channel::kForwardEven : Channel::kForwardOdd, even ? Channel::kBackwardEven : Channel::kBackwardOdd})
        at(channel) += dp_ * tp_ * m_ * message_;
    }
    if (part.last) at(Channel::kMetricsDp) += tp_ * all_reduced(4, dp_);  // the loss, in fp32
    if (c_.train.grad_norm) {                                             // the squared norm, in fp64
      at(Channel::kMetricsTp) += dp_ * all_reduced(8, tp_);
      if (zero) at(Channel::kMetricsDp) += tp_ * all_reduced(8, dp_);
    }
  }

  void add_across_stages() {
    if (pp_ == 1) return;
    if (c_.train.grad_norm) at(Channel::kMetricsPp) += dp_ * tp_ * all_reduced(8, pp_);
    if (!c_.model.tied_embeddings) return;
    const int64_t slices = c_.layout.zero > 0 ? dp_ : 1;
    at(Channel::kEnds) += dp_ * tp_ * all_reduced(kElement * ((table_ + slices - 1) / slices), 2);
  }

 private:
  int64_t& at(Channel channel) { return form_.wire[static_cast<size_t>(channel)]; }

  const Case& c_;
  ClosedForm& form_;
  int64_t dp_, tp_, pp_, m_, table_;
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
  }
  return "?";
}

std::string_view name_of(Channel channel) {
  static constexpr std::array<std::string_view, kChannels> kNames{"tp",         "dp.grads",    "dp.parameters", "pp.fwd.even",
                                                                  "pp.fwd.odd", "pp.bwd.even", "pp.bwd.odd",    "pp.ends",
                                                                  "metrics.dp", "metrics.tp",  "metrics.pp"};
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

ClosedForm closed_form(const Case& config) {
  const Elements elements(config);
  const Sizes sizes(config);
  ClosedForm form;
  form.layer = layer_of(sizes);
  form.stages.reserve(static_cast<size_t>(config.layout.pp));
  Wires wires(config, elements, sizes, form);
  Part part;
  State state;
  for (int64_t stage = 0; stage < config.layout.pp; ++stage) {
    if (const Part next = part_of(config, stage); next != part) {  // stages of equal parts hold the same
      part = next;
      state = state_of(config, elements, part);
    }
    form.stages.push_back(stage_form(config, sizes, state, part, stage));
    wires.add_stage(stage, part, state);
  }
  wires.add_across_stages();
  return form;
}

}  // namespace shardlab
