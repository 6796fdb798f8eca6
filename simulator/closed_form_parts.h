// The parts of the closed forms, shared by the two ways of finding the peak. Internal to the folder.
#pragma once

#include <algorithm>
#include <bit>
#include <functional>
#include <initializer_list>
#include <vector>

#include "plan/precision.h"
#include "plan/treatment.h"
#include "simulator/closed_form.h"

namespace shardlab::simulator::forms {

constexpr int64_t kElement = 4;  // fp32, and i32 for tokens
constexpr int64_t kScalar = aligned(1);
constexpr int64_t kBlock = 4096;  // elements that a kernel widens or scales at a time

/// Bytes that a buffer of `elements` takes.
constexpr int64_t held(int64_t elements, int64_t element = kElement) { return aligned(element * elements); }

/// Bytes of one element. Statistics, losses, moments and the optimizer's copies are fp32 in every precision.
struct Widths {
  explicit Widths(const Case& c)
      : value(bytes_of(precision_of(c).compute, 1)),
        gradient(bytes_of(precision_of(c).gradient, 1)),
        master(precision_of(c).has_master()) {}

  int64_t value;     ///< of a parameter as it computes, and of activations
  int64_t gradient;  ///< of a parameter's gradient
  bool master;       ///< an fp32 copy is kept
};

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
inline Rise highest(std::initializer_list<Rise> rises) {
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

inline Part part_of(const Case& c, int64_t stage) {
  const int64_t stages = c.layout.pp;
  return {c.model.layers / stages + (stage < c.model.layers % stages ? 1 : 0), stage == 0, stage == stages - 1};
}

// What a stage holds for the whole step.

/// Gradients of a layer in the order in which backward makes them; of the head its table's and its norm's.
enum GradientOrder : int {
  kDownBias,
  kDown,
  kUp,
  kMlpNorm,
  kOutBias,
  kOut,
  kQkv,
  kAttentionNorm,
  kGradientOrders,
  kTable = kDown,
  kFinalNorm = kMlpNorm
};

/// One bucket: the units whose parameters it holds, from the highest (whose backward is first) to the lowest. Units of a stage are
/// numbered from its first: the embedding where it has it, layers, the head.
struct BucketForm {
  int64_t highest = 0, lowest = 0;
  int64_t elements = 0;  ///< padding included
  int64_t ranks = 1;     ///< that slice it
  bool tied = false;
  bool biases = false;  ///< of columns, under tensor parallelism: forward reads them, backward does not
  int last = 0;         ///< which of the lowest unit's gradients completes it (GradientOrder)
  int64_t padding = 0;  ///< of its elements

  int64_t bytes(int64_t element) const { return held(elements, element); }
  int64_t slice_bytes(int64_t element) const { return held(elements / ranks, element); }
};

/// Sums over the buckets of a stage.
struct BucketSums {
  int64_t element = kElement;
  int64_t elements = 0;
  int64_t bytes = 0;
  int64_t slice_bytes = 0;

  void add(const BucketForm& b, int64_t sign = 1) {
    elements += sign * b.elements, bytes += sign * b.bytes(element), slice_bytes += sign * b.slice_bytes(element);
  }
};

/// One kind of bucket as it fills: closed once it has `bucket_bytes`, or by whoever fills it; padded to a multiple of the ranks
/// that slice it, and where slices are cut in blocks of at most `block`, to equal blocks of an even size.
class Filling {
 public:
  Filling(int64_t bucket_bytes, int64_t element, int64_t ranks, std::vector<BucketForm>& out, bool tied = false,
          bool biases = false, int64_t block = 0)
      : bucket_bytes_(bucket_bytes), element_(element), ranks_(ranks), block_(block), tied_(tied), biases_(biases), out_(&out) {}

  void add(int64_t unit, int64_t elements, int gradient) {
    if (open_ == 0) highest_ = unit;
    open_ += elements;
    lowest_ = unit, last_ = gradient;
    if (bucket_bytes_ >= 0 && open_ * element_ >= bucket_bytes_) close();
  }
  void close() {
    if (open_ == 0) return;
    const auto rounded_up = [](int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; };
    const int64_t slice = (open_ + ranks_ - 1) / ranks_;
    const int64_t blocks = block_ > 0 ? 2 * ((slice + block_ - 1) / block_) : 1;
    const int64_t elements = rounded_up(open_, ranks_ * blocks);
    out_->push_back({highest_, lowest_, elements, ranks_, tied_, biases_, last_, elements - open_});
    open_ = 0;
  }

 private:
  int64_t bucket_bytes_;  ///< below 0: closed from outside only
  int64_t element_, ranks_, block_;
  bool tied_, biases_;
  std::vector<BucketForm>* out_;
  int64_t open_ = 0, highest_ = 0, lowest_ = 0;
  int last_ = 0;
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
  int64_t layer_bytes(int64_t e) const {
    const int64_t matrices = held(wqkv, e) + held(wo, e) + held(wup, e) + held(wdown, e);
    return matrices + (gpt ? 6 * held(hidden, e) + held(bqkv, e) + held(bup, e) : 2 * held(hidden, e));
  }
  /// Elements of the parameters of a stage; a table that both its ends have counts twice.
  int64_t of(const Part& part) const {
    const int64_t layer = wqkv + wo + wup + wdown + (gpt ? 6 * hidden + bqkv + bup : 2 * hidden);
    return part.layers * layer + (part.first ? table + positions : 0) + (part.last ? (gpt ? 2 : 1) * hidden + table : 0);
  }
  int64_t final_norm_bytes(int64_t e) const { return (gpt ? 2 : 1) * held(hidden, e); }

  bool gpt;
  int64_t hidden, wqkv, bqkv, wo, wup, bup, wdown, table, positions;
};

constexpr int64_t kScaleBlock = 256;  // elements that share a scale on the wire, at most

/// Whether each rank adds up, and so owns, a slice of every bucket.
inline bool quantises(const Case& c) {
  return c.layout.compression.kind == CompressionKind::kBf16 || c.layout.compression.kind == CompressionKind::kInt8;
}

/// Whether signs travel, of slices of whole bytes.
inline bool sends_signs(const Case& c) { return c.layout.compression.kind == CompressionKind::kOneBitAdam; }

/// Whether each data-parallel rank updates a slice of every bucket: under ZeRO, and where it serves the slice (a parameter server).
inline bool updates_slices(const Case& c) { return c.layout.zero > 0 || c.layout.parameter_server.servers > 0; }

/// Whether workers may be steps apart, so that servers have copies of their own.
inline bool runs_apart(const Case& c) { return c.layout.parameter_server.staleness >= 0; }
/// Whether slices are cut in blocks that share a scale.
inline bool in_blocks(const Case& c) {
  const ZeroPlusPlus& z = c.layout.zero_plus_plus;
  return c.layout.compression.kind == CompressionKind::kInt8 || z.weights || z.gradients;
}

/// A stage's buckets in the order in which backward finishes gradients: from the head to the embedding, a unit's parameters from
/// the last to the first. Parameters with weight decay and without have buckets of their own, and so have slices and whole copies.
/// Under ZeRO-3 they end where a unit of `fsdp.unit` layers of the model ends (`first_layer` is the stage's first); else when they
/// are full.
inline std::vector<BucketForm> buckets_of(const Case& c, const Elements& n, const Part& part, int64_t first_layer,
                                          bool head_table) {
  std::vector<BucketForm> all;
  const bool by_unit = c.layout.zero == 3;
  const int64_t ranks = sends_signs(c) ? 8 * c.layout.dp : updates_slices(c) || quantises(c) ? c.layout.shard_ranks() : 1;
  const int64_t bytes = by_unit ? -1 : c.layout.bucket_bytes;
  const int64_t block = in_blocks(c) ? kScaleBlock : 0;
  const bool tied = c.model.tied_embeddings, cut = c.layout.tp > 1;
  const int64_t element = Widths(c).gradient;
  const Filling empty(bytes, element, ranks, all, false, false, block);
  // Under PowerSGD matrices are approximated one by one.
  const bool alone = c.layout.compression.kind == CompressionKind::kPowerSgd;
  Filling matrices = alone ? Filling(0, element, ranks, all) : empty;
  Filling vectors = empty, cut_vectors(bytes, element, ranks, all, false, true, block), positions = empty;
  Filling tables(0, element, ranks, all, true, false, block);  // a tied table is alone
  int64_t unit = (part.first ? 1 : 0) + part.layers;
  const auto add_bias = [&](int64_t elements, int gradient) { (cut ? cut_vectors : vectors).add(unit, elements, gradient); };
  const auto add_norm = [&](int gradient) {
    for (int i = n.gpt ? 2 : 1; i > 0; --i) vectors.add(unit, n.hidden, gradient);
  };
  const auto close_all = [&] {
    for (Filling* f : {&vectors, &cut_vectors, &positions, &matrices}) f->close();
  };
  if (part.last) {
    if (head_table) (tied ? tables : matrices).add(unit, n.table, kTable);
    add_norm(kFinalNorm);
    if (by_unit) close_all();
  }
  for (int64_t layer = first_layer + part.layers - 1; layer >= first_layer; --layer) {
    --unit;
    if (n.gpt) vectors.add(unit, n.hidden, kDownBias);
    matrices.add(unit, n.wdown, kDown);
    if (n.gpt) add_bias(n.bup, kUp);
    matrices.add(unit, n.wup, kUp);
    add_norm(kMlpNorm);
    if (n.gpt) vectors.add(unit, n.hidden, kOutBias);
    matrices.add(unit, n.wo, kOut);
    if (n.gpt) add_bias(n.bqkv, kQkv);
    matrices.add(unit, n.wqkv, kQkv);
    add_norm(kAttentionNorm);
    if (by_unit && layer % c.layout.fsdp.unit == 0) close_all();
  }
  if (part.first) {
    if (by_unit) close_all();  // a unit that begins on the stage before
    unit = 0;
    if (n.gpt) (cut ? positions : matrices).add(unit, n.positions, kAttentionNorm);
    (tied ? tables : matrices).add(unit, n.table, kAttentionNorm);
  }
  close_all();
  std::ranges::stable_sort(all, std::greater(), &BucketForm::lowest);  // as they are complete
  return all;
}

/// What a stage holds for the whole step, and what of it the data-parallel ranks exchange.
struct State {
  int64_t parameters = 0, masters = 0, moments = 0, gradients = 0;
  int64_t reduced = 0;   ///< elements of gradients that are reduced over dp
  int64_t gathered = 0;  ///< elements of parameters that are gathered over dp
  int64_t sums = 0;      ///< gradients that a server adds up apart from its worker's
  int64_t started = 0;   ///< what workers that train apart began the period with
  int64_t moved = 0;     ///< elements of parameters that the outer step moves
  std::vector<BucketForm> buckets;
  /// In host memory, where the optimizer works there: its copies, moments and the gradients that it reads, what it rounds its
  /// result into, and parameters that wait there.
  int64_t host_masters = 0, host_moments = 0, host_gradients = 0, host_results = 0, host_parameters = 0;
};

/// Whether parameters wait outside the device.
inline bool parks_parameters(const Case& c) { return c.layout.offload.parameters != OffloadTo::kNone; }

/// Whether the optimizer works on the host.
inline bool updates_on_host(const Case& c) { return c.layout.offload.optimizer != OffloadTo::kNone; }

/// Whether a bucket's values are another's: the head's share of a table that is tied on one stage.
inline bool is_shared(const BucketForm& b, const Part& part) { return b.tied && b.lowest != 0 && part.first; }

inline State state_of(const Case& c, const Elements& n, const Part& part, int64_t first_layer) {
  const int zero = c.layout.zero;
  const bool sliced = updates_slices(c);
  const bool tied = c.model.tied_embeddings, both_ends = part.first && part.last;
  // A table tied on one stage is stored and updated once. Its two gradients are added before they are reduced unless canonical, or
  // scattered as they are made.
  const bool shares_table = tied && both_ends;
  const bool added_early = shares_table && !c.canonical && zero < 2, away = updates_on_host(c);
  const Widths widths(c);
  const auto separate = [&](int64_t e) {  // every parameter in a buffer of its own
    int64_t bytes = part.layers * n.layer_bytes(e);
    if (part.first) bytes += held(n.table, e) + (n.gpt ? held(n.positions, e) : 0);
    if (part.last) bytes += n.final_norm_bytes(e) + held(n.table, e);
    return bytes;
  };
  const auto values = [&](int64_t e) { return separate(e) - (shares_table ? held(n.table, e) : 0); };
  // Workers that train apart keep what they began with for the period, and the outer momentum beyond it.
  const bool apart = c.layout.diloco.steps > 0;
  const int64_t moments = (c.train.optimizer == Optimizer::kAdamW ? 2 : 0) + (apart && c.layout.diloco.momentum != 0 ? 1 : 0),
                masters = widths.master ? 1 : 0;

  State state{.parameters = values(widths.value),
              .masters = masters * values(4),
              .moments = moments * values(4),
              .gradients = separate(widths.gradient),
              .started = apart ? values(4) : 0,
              .moved = apart ? n.of(part) - (shares_table ? n.table : 0) : 0,
              .buckets = {}};
  if ((c.layout.dp > 1 && !apart) || away) {
    state.buckets = buckets_of(c, n, part, first_layer, !added_early);
    BucketSums of_gradients{widths.gradient}, of_values{widths.value}, of_states{4}, of_updates{widths.gradient};
    for (const BucketForm& b : state.buckets) {
      of_gradients.add(b);
      if (is_shared(b, part)) continue;
      for (BucketSums* sums : {&of_values, &of_states, &of_updates}) sums->add(b);
    }
    state.gradients =
        zero >= 2 ? of_gradients.slice_bytes : of_gradients.bytes + (added_early ? held(n.table, widths.gradient) : 0);
    state.reduced = of_gradients.elements;
    const auto updated = [&](const BucketSums& sums) { return sliced ? sums.slice_bytes : sums.bytes; };
    if (sliced || away) {
      state.parameters = zero == 3 ? of_values.slice_bytes : of_values.bytes;
      state.masters = masters * updated(of_states);
      state.moments = moments * updated(of_states);
    }
    if (runs_apart(c)) {  // what is served, rounded where that computes, and its gradients
      state.masters = of_states.slice_bytes;
      state.parameters += masters * of_values.slice_bytes;
      state.sums = of_gradients.slice_bytes;
    }
    if (sliced) state.gathered = of_values.elements;
    if (away) {
      if (zero < 2) state.gradients -= of_updates.bytes;  // come and go
      state.host_masters = parks_parameters(c) && !widths.master ? 0 : updated(of_states);
      state.host_moments = moments * updated(of_states);
      state.host_gradients = updated(of_updates);
      state.host_results = masters * updated(of_values);
      state.masters = state.moments = 0;
    }
    if (parks_parameters(c)) {  // on the device are the gradients of a tied table, until they are added
      state.host_parameters = of_values.slice_bytes;
      state.parameters = state.gradients = 0;
      for (const BucketForm& b : state.buckets)
        if (b.tied) state.gradients += b.slice_bytes(widths.gradient);
    }
  }
  // Canonical accumulation counts in binary: a partial sum for each bit of the number of micro-batches. Slices come and go.
  if (c.canonical && zero < 2)
    state.gradients += (std::bit_width(static_cast<uint64_t>(c.train.grad_accumulation)) - 1) * separate(widths.gradient);
  return state;
}

/// Whether the ranks share each micro-batch out in the order of sequences, so that losses are gathered before they are added.
inline bool shares_micro_batches_out(const Case& c) {
  return c.canonical && c.layout.zero >= 2 && c.layout.shard_ranks() > 1 && c.train.grad_accumulation > 1;
}

/// Whether each micro-batch's gradients are written to a copy of their own, and copies added.
inline bool adds_copies(const Case& c) { return c.canonical && c.layout.zero < 2 && c.train.grad_accumulation > 1; }

/// Whether the norm of the gradients is computed.
inline bool judges_norm(const Case& c) { return c.train.guard.spike != GuardAction::kNone && c.train.guard.norm_factor > 0; }
inline bool judges_loss(const Case& c) { return c.train.guard.spike != GuardAction::kNone && c.train.guard.loss_factor > 0; }
inline bool has_norm(const Case& c) { return c.train.grad_norm || c.train.clip_norm > 0 || judges_norm(c); }

/// Scalars and losses; those that outlive the step apart.
struct Metrics {
  int64_t step = 0, persistent = 0;
};

inline Metrics metrics_of(const Case& c, const Part& part) {
  Metrics m;
  const int64_t losses = held(std::max(1, c.layout.diloco.steps));  // of every step of a period
  if (part.last) m = {c.train.grad_accumulation * held(c.train.micro_batch) + losses, losses};
  if (part.last && shares_micro_batches_out(c))
    m.step += c.train.grad_accumulation * held(c.train.micro_batch * c.layout.shard_ranks());
  if (has_norm(c)) {
    m.step += (c.layout.tp > 1 ? 3 : 1) * kScalar;                   // of slices, of whole gradients, and their sum
    (c.layout.diloco.steps > 0 ? m.step : m.persistent) += kScalar;  // a worker's own is no figure of the step
  }
  if (c.train.guard.nonfinite != GuardAction::kNone && !updates_on_host(c)) m.persistent += kScalar;  // which gradient it was
  if (judges_norm(c)) m.persistent += kScalar;                                                        // the verdicts
  if (judges_loss(c) && part.last) m.persistent += kScalar;
  return m;
}

/// Numbers beside the state.
struct Others {
  int64_t step = 0, persistent = 0;
};

/// Whether ranks look for infinities and agree on what they found.
inline bool finds_inf(const Case& c) { return c.train.precision == "fp16" || c.train.guard.nonfinite != GuardAction::kNone; }

/// Whether scales are for what past steps saw.
inline bool remembers_amax(const Case& c) { return multiplies_in_fp8(c) && c.train.fp8_scaling == "delayed"; }

/// Whether a step may make no update.
inline bool may_skip(const Case& c) { return c.train.precision == "fp16" || c.train.guard.any(); }

/// Whether gradients stay in host memory for the step: where the optimizer's states are there too, or something reads all of them.
inline bool keeps_host_gradients(const Case& c) {
  return c.layout.offload.optimizer == OffloadTo::kCpu || parks_parameters(c) || has_norm(c) || may_skip(c);
}

inline Others others_of(const Case& c, const Part& part) {
  const bool clips = c.train.clip_norm > 0, scales = c.train.precision == "fp16", dynamic = scales && c.train.loss_scale == 0;
  int64_t step = 0, persistent = 0;
  if (clips) step += 2;  // the bound and the factor
  // What updates multiply by, and that with clipping; the scale, and of a dynamic one its begin, its interval and its good steps.
  if (scales) step += (clips ? 2 : 1) + (dynamic ? 2 : 1);
  if (dynamic) persistent += 2;
  if (sends_signs(c)) step += 3;                                                 // beta1, the frozen variance's correction, epsilon
  if (c.layout.diloco.steps > 0) step += c.layout.diloco.momentum != 0 ? 3 : 2;  // of the outer step: share, rate, momentum
  if (c.layout.offload.delayed_update) persistent += 1;                          // updates made
  int64_t flags = finds_inf(c) ? 1 : 0;
  step += flags;
  const bool losses_here = judges_loss(c) && part.last;
  for (const bool judged : {judges_norm(c), losses_here})  // factor and window; mean and count. Flags are metrics
    if (judged) step += 2, persistent += 2;
  if (judges_loss(c) && c.layout.pp > 1) step += 1;  // the last stage's word
  flags += (judges_norm(c) ? 1 : 0) + (judges_loss(c) ? 1 : 0);
  if (flags > 0) step += 1 + (flags > 1 ? 1 : 0), persistent += 1;  // some flag, no flag; the count of updates
  Others others{step * kScalar, persistent * kScalar};
  if (remembers_amax(c)) {  // of x, w and dy of each product: the stage's sizes, and by layer scales and histories
    others.step += held(12 * part.layers) + part.layers * (held(8) + held(4));
    others.persistent += part.layers * (held(8 * kFp8Window) + held(4 * kFp8Window));
  }
  return others;
}

// What comes and goes.

/// Sizes of one micro-batch's activations on one rank.
struct Sizes {
  explicit Sizes(const Case& c)
      : tokens(c.train.micro_batch * c.train.seq_len),
        x(held(tokens * c.model.hidden, Widths(c).value)),
        statistics(held(tokens * (c.model.is_llama() ? 1 : 2))),
        qkv(held(tokens * (c.model.qkv_rows() / c.layout.tp), Widths(c).value)),
        o(held(tokens * (c.model.heads * c.model.head_dim / c.layout.tp), Widths(c).value)),
        log_sum_exp(held(tokens * (c.model.heads / c.layout.tp))),
        u(held(tokens * (c.model.up_rows() / c.layout.tp), Widths(c).value)),
        a(held(tokens * (c.model.ffn / c.layout.tp), Widths(c).value)),
        logits(held(tokens * (c.model.vocab / c.layout.tp), Widths(c).value)),
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

inline LayerActivations layer_of(const Sizes& n) {
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
inline Rise layer_forward(const Sizes& n, bool recompute) {
  const int64_t kept = recompute ? 0 : layer_of(n).inner();
  const int64_t passing = recompute ? 2 * n.x : n.x;  // the projection, and the residual stream after attention
  return {Moment::kForwardLayer, activation(kept + n.x) + temporary(passing)};
}

/// A layer's backward beyond what its forward kept (under recompute: made again) and the gradient of its output. `inner` is that of
/// `layer_of`, in the class that it has there.
inline Rise layer_backward(const Sizes& n, bool recompute) {
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

/// One layer: what its forward and its backward add while they work, and what it keeps between the two, its input apart.
struct LayerForm {
  Rise forward, backward;
  int64_t kept = 0;
};

/// Under selective recompute (closed_form_layer.cpp): `again` as in LayerTreatment.
LayerForm selective_layer(const Case& c, const Sizes& n, unsigned again);

/// With products of 8-bit factors (closed_form_fp8.cpp); `full` where it is made again as a whole.
LayerForm fp8_layer(const Case& c, const Sizes& n, bool full);

/// Whether layers are treated differently: then the peak is found by going through the step.
inline bool has_variants(const Case& c) {
  return c.layout.recompute == Recompute::kByLayer ||
         (c.layout.recompute == Recompute::kFull && c.layout.recompute_options.every > 1);
}

/// What becomes of each layer's activations.
class Treatments {
 public:
  explicit Treatments(const Case& c) {
    if (has_variants(c))
      by_layer_ = treatments_of(c);
    else
      common_ = common_treatment(c);
  }
  /// Of a layer of the model.
  const LayerTreatment& of(int64_t layer) const { return by_layer_.empty() ? common_ : by_layer_[static_cast<size_t>(layer)]; }

 private:
  LayerTreatment common_;
  std::vector<LayerTreatment> by_layer_;
};

inline int64_t first_layer_of(const Case& c, int64_t stage) {
  return stage * (c.model.layers / c.layout.pp) + std::min(stage, c.model.layers % c.layout.pp);
}

inline LayerForm layer_form(const Case& c, const Sizes& n, const LayerTreatment& treatment) {
  const bool full = treatment.full;
  if (multiplies_in_fp8(c)) return fp8_layer(c, n, full);
  if (!full && treatment.again != 0) return selective_layer(c, n, treatment.again);
  const int64_t inner = layer_of(n).inner();
  LayerForm form{layer_forward(n, full), layer_backward(n, full), full ? 0 : inner};
  if (full) form.backward.live = form.backward.live + temporary(inner);  // all that it keeps inside is there again
  return form;
}

/// What one slot of each kind adds to its level, and what a micro-batch keeps between the two.
struct Slots {
  Rise forward, backward;
  Live kept;
};

/// Where every layer is treated alike.
inline Slots slots_of(const Case& c, const Sizes& n, const Part& part) {
  const LayerForm layer = layer_form(c, n, common_treatment(c));
  const Live kept_inside = activation(layer.kept);
  const Live embedded = part.first ? input(n.ids) + activation(n.x) : Live{};
  const Live head_kept = activation(n.x + n.statistics + n.logits);

  // Forward: the last layer stands on what the others kept; the head on all of them and its own input.
  Slots s;
  const Live before = embedded + (part.layers - 1) * (kept_inside + activation(n.x));
  s.forward = {layer.forward.moment, before + layer.forward.live};
  if (part.last) {
    const Live head = before + kept_inside + activation(n.x) + head_kept + input(n.ids) + temporary(n.loss_parts);
    s.forward = highest({s.forward, {Moment::kForwardHead, head}});
  }

  // Backward: the last layer is the first to run, when most is live. On the last stage the head has run before it, and left the
  // gradient of its input in place of the input.
  s.backward = layer.backward;
  if (part.last) s.backward = highest({{Moment::kBackwardHead, temporary(n.x)}, {s.backward.moment, s.backward.live - head_kept}});

  s.kept = embedded + part.layers * kept_inside + (part.layers - (part.first ? 1 : 0)) * activation(n.x);
  if (part.last) s.kept = s.kept + activation(n.x) + head_kept;
  return s;
}

/// What attention needs beside its operands: backward is the larger.
inline int64_t attention_workspace(const Case& c) {
  const int64_t s = c.train.seq_len, d = c.model.head_dim;
  const auto padded = [](int64_t n) { return (n + 15) / 16 * 16; };
  return 2 * held(d * padded(s)) + 3 * held(s * padded(d)) + 2 * held(4 * padded(s)) + 2 * held(4 * padded(d));
}

/// What a canonical product over k elements packs.
inline int64_t product_workspace(const Case& c, int64_t k) {
  return c.canonical ? held(8 * k) + held(std::clamp<int64_t>((int64_t{1} << 18) / k / 64 * 64, 64, 512) * k) : 0;
}

/// A Linear of a layer or the head on one rank.
struct Product {
  int64_t in, out;
  bool bias;
  bool scaled = false;  ///< factors of 8 bits
};
inline std::vector<Product> products_of(const Case& c, const Part& part) {
  const Model& m = c.model;
  const int64_t t = c.layout.tp, h = m.hidden;
  const bool bias = !m.is_llama();
  std::vector<Product> all{
      {h, m.qkv_rows() / t, bias}, {m.heads * m.head_dim / t, h, false}, {h, m.up_rows() / t, bias}, {m.ffn / t, h, false}};
  for (Product& p : all) p.scaled = multiplies_in_fp8(c);
  if (part.last) all.push_back({h, m.vocab / t, false});
  return all;
}

/// Operands narrower than fp32 are widened in blocks of 4096 elements or of whole rows; those of a sum over tokens 64 columns at a
/// time, those of a product 128 rows and 64 columns, attention's a head's group at a time. The greatest of what ops so hold;
/// elementwise ones hold three blocks at the most, as the backward of an activation does (five for gate and up).
inline int64_t narrow_workspace(const Case& c, const Part& part) {
  const Model& m = c.model;
  const int64_t b = c.train.micro_batch, s = c.train.seq_len, tokens = b * s, h = m.hidden, t = c.layout.tp;
  const bool gpt = !m.is_llama(), narrow_gradient = Widths(c).gradient < 4;
  const auto gradient = [&](int64_t n) { return narrow_gradient ? held(n) : 0; };
  const auto rows = [](int64_t width) { return held(std::max<int64_t>(1, kBlock / width) * width); };
  const int64_t queries = m.heads / m.kv_heads * m.head_dim;
  int64_t most = (gpt ? 3 : 5) * held(kBlock);
  const auto consider = [&](int64_t bytes) { most = std::max(most, bytes); };
  consider(4 * rows(h) + held(h));                                 // a norm's backward
  consider(2 * held(64 * tokens) + (gpt ? 2 : 1) * gradient(64));  // its weight's
  if (!gpt) consider(rows(m.qkv_rows() / t));                      // rotation
  consider(2 * (held(s * (queries + 2 * m.head_dim)) + held(s * queries)) + attention_workspace(c));
  for (const Product& p : products_of(c, part)) {
    const int64_t n = std::min<int64_t>(tokens, 128), out = std::min<int64_t>(p.out, 64), in = std::min<int64_t>(p.in, 64),
                  ins = std::min<int64_t>(p.in, 128);
    consider(held(n * p.in) + held(out * p.in) + (p.bias ? held(out) : 0) + held(n * out) + product_workspace(c, p.in));
    consider(held(n * p.out) + held(p.out * in) + held(n * in) + product_workspace(c, p.out));
    // The bias: with the product, or by itself; after a product of rounded factors, of which it is no sum.
    const int64_t factors = held(tokens * out) + held(tokens * ins) + held(out * ins) + product_workspace(c, tokens);
    const int64_t alone = p.bias ? held(64 * tokens) + gradient(64) : 0;
    consider(p.scaled ? factors + alone : std::max(factors + (p.bias ? gradient(out) : 0), alone));
  }
  if (part.first) consider(2 * held(tokens) + 2 * held(tokens * std::min<int64_t>(h, 64)) + 2 * aligned(8 * tokens));
  if (part.last) consider(rows(m.vocab / t) + held(tokens));
  return most;
}

/// What compressing gradients costs (closed_form_compression.cpp).
struct CompressionForm {
  int64_t errors = 0;     ///< bytes kept from step to step
  int64_t messages = 0;   ///< bytes of what is sent and received, for the whole step
  int64_t workspace = 0;  ///< of its kernels
  int64_t sent = 0;       ///< bytes that the data-parallel ranks of one group send together
};
CompressionForm compression_of(const Case& c, const State& state, const Part& part);

/// What ZeRO-3 gathers and scatters, plain or by the ways of ZeRO++ (closed_form_zero_plus_plus.cpp). Nothing under other stages.
struct ZeroPlusPlusForm {
  int64_t messages = 0;           ///< bytes for the whole step: secondary shards, codes and scales on their way
  int64_t scatter_workspace = 0;  ///< of the kernels that scatter, and ...
  int64_t gather_workspace = 0;   ///< ... of those that gather
  // Bytes that the ranks of one set of shards send together: of a step's gathers from all of them, and within nodes ...
  int64_t gathered = 0, gathered_in_node = 0;
  // ... and of a micro-batch's quantised gradients, in one hop, or in two.
  int64_t scattered = 0, scattered_in_node = 0, scattered_across = 0;
};
ZeroPlusPlusForm zero_plus_plus_of(const Case& c, const State& state, const Part& part, int64_t stage);

/// A kernel's or a library's bytes on a GPU, with room to align their address.
constexpr int64_t lent(int64_t bytes) { return (bytes + 255) / 256 * 256 + 256; }

/// What the kernels of a GPU and its libraries are lent on the stream that computes; each with 256 bytes to align its address. Sums
/// over tokens begin with 16 partial ones of each sequence, a norm's of gamma and beta at once. The partial sums of a gradient's
/// norm (a thousandth of its bytes) are taken to be less: they are, but in canonical mode on models of more than a billion
/// parameters.
inline int64_t device_workspace(const Case& c, const Part& part) {
  const Model& m = c.model;
  const int64_t b = c.train.micro_batch, s = c.train.seq_len, t = c.layout.tp, sums = 16 * b, heads = m.heads / t;
  const bool gpt = !m.is_llama();
  int64_t most = c.canonical ? 0 : lent(int64_t{32} << 20);
  const auto consider = [&](int64_t bytes) { most = std::max(most, bytes); };
  consider(lent(4 * sums * (gpt ? 2 : 1) * m.hidden));
  for (const Product& p : products_of(c, part))
    if (p.bias) consider(lent(4 * sums * p.out));
  consider(lent(4 * b * s * heads));  // a number a row of attention's backward
  if (part.last) consider(lent(4 * b * s));
  if (part.last) consider(lent(4 * b * c.train.grad_accumulation));  // the losses
  if (c.canonical || c.attention == "own" || Widths(c).value != 2) return most;
  // cuDNN's backward: dq in fp32 and a sum a row, of as many sequences as a call takes; 32 MiB; and, where query heads share a key,
  // each one's gradients of keys and values.
  const int64_t groups = m.kv_heads / t, sequences = groups == 1 || groups == heads ? b : 1, rows = sequences * heads * s;
  const int64_t shared = heads > groups ? 4 * rows * m.head_dim : 0;
  consider(lent(4 * rows * m.head_dim) + lent(4 * rows) + lent((int64_t{32} << 20) + shared));
  return most;
}

/// What kernels need beside their operands: as much as the op that needs most, and the table of a rotation. `reducing` is what
/// compressing gradients needs, on the stream that reduces them, `gathering` what quantised parameters need on theirs.
inline int64_t workspace_of(const Case& c, const Part& part, int64_t reducing, int64_t gathering) {
  const int64_t apart = c.layout.overlap ? reducing + gathering : 0, shared = c.layout.overlap ? 0 : std::max(reducing, gathering);
  const int64_t tokens = c.train.micro_batch * c.train.seq_len;
  const int64_t table = c.model.is_llama() ? held(c.train.seq_len * c.model.head_dim) : 0;
  const Widths widths(c);
  if (c.backend == "cuda") return std::max(device_workspace(c, part), shared) + apart + table;
  if (widths.master) {
    // Slices of 16-bit gradients are added on the stream that reduces them.
    const bool adds_here = !parks_parameters(c) || (c.model.tied_embeddings && (part.first || part.last));
    const bool adds_apart =
        c.layout.zero >= 2 && c.layout.overlap && c.train.grad_accumulation > 1 && widths.gradient < 4 && adds_here;
    return std::max(narrow_workspace(c, part), shared) + apart + table + (adds_apart ? 3 * held(kBlock) : 0);
  }
  const bool scales = c.train.clip_norm > 0 && !updates_on_host(c);  // updates scale gradients block by block
  int64_t most = std::max(shared, scales ? held(kBlock) : 0);
  most = std::max(most, attention_workspace(c));
  if (part.first) most = std::max(most, 2 * aligned(8 * tokens));
  for (const Product& p : products_of(c, part))
    for (const int64_t k : {p.in, p.out, tokens}) most = std::max(most, product_workspace(c, k));
  return most + apart + table;
}

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

/// Finds the peak of a stage under ZeRO-2 and 3, where gradients and gathered parameters come and go within a slot, by going
/// through the step event by event. `form` has everything that lives for the step.
void walk_to_peak(const Case& c, const Sizes& sizes, const State& state, const Part& part, int64_t stage, StageForm& form);

/// How often the parameters of each bucket are gathered in a step: in all, and of that for a use that begins in backward.
struct GatherTimes {
  int64_t all = 0, backward = 0;
};
std::vector<GatherTimes> gathers_of(const Case& c, const State& state, const Part& part, int64_t stage);

/// One stay of a bucket's whole parameters under ZeRO-3: gathered before visit `issued` computes, used from visit `first` on, freed
/// after visit `last`. From NVMe it is read before visit `read`; what it took on its way is given up after visit `passed`. Visits are
/// forwards and backwards of one unit, numbered through the stage's step.
struct GatherStay {
  size_t bucket = 0, issued = 0, first = 0, last = 0, read = 0, passed = 0;
};
/// In the order in which they are issued.
std::vector<GatherStay> gather_stays(const Case& c, const State& state, const Part& part, int64_t stage);

}  // namespace shardlab::simulator::forms
