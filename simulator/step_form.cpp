#include "simulator/step_form.h"

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>
#include <vector>

#include "simulator/closed_form_parts.h"
#include "simulator/step_kernels.h"

namespace shardlab {
namespace forms {
namespace {

/// Streams beside the control stream.
enum Stream : int32_t { kReducing, kGathering };

/// Writes what one stage does.
class StageWriter {
 public:
  StageWriter(const Case& c, const StepKernels& kernels, int stage)
      : c_(c),
        kernels_(kernels),
        stage_(stage),
        part_(part_of(c, stage)),
        table_(c, part_, stage),
        elements_(c),
        state_(state_of(c, elements_, part_, first_layer_of(c, stage))),
        units_(part_.layers + part_.first + part_.last),
        before_(static_cast<size_t>(table_.slots() * units_)),
        after_(before_.size()) {}

  StageText write() {
    number_slots();
    make_blocks();
    if (c_.train.precision == "fp16") trifles(c_.train.loss_scale == 0 ? 2 : 1);
    if (c_.layout.dp > 1) {
      if (c_.layout.zero < 2) reduce_when_complete();
      if (c_.layout.zero >= 2) scatter_every_micro_batch();
      if (c_.layout.zero == 3) gather_before_use();
    }
    pipeline();
    finish();
    for (Block& b : text_.blocks) b.close(kernels_.launch_s());
    return std::move(text_);
  }

 private:
  enum BlockName : int32_t { kEmbedF, kLayerF, kHeadF, kEmbedB, kLayerB, kHeadB, kEmbedAdds, kLayerAdds, kHeadAdds };

  void make_blocks() {
    const LayerTreatment treatment = common_treatment(c_);
    text_.blocks = {kernels_.embed_forward(), kernels_.layer_forward(), kernels_.head_forward()};
    for (const bool adds : {false, true})
      for (Block block : {kernels_.embed_backward(adds), kernels_.layer_backward(adds, treatment), kernels_.head_backward(adds)})
        text_.blocks.push_back(std::move(block));
  }

  // What surrounds the visits.

  struct Visit {
    bool backward;
    int64_t unit, micro_batch;
  };
  Visit visit(size_t v) const {
    const int64_t slot = static_cast<int64_t>(v) / units_ + 1, i = static_cast<int64_t>(v) % units_;
    const bool backward = table_.backward(slot);
    return {backward, backward ? units_ - 1 - i : i, micro_batches_[static_cast<size_t>(slot - 1)]};
  }
  /// The visit in which a unit goes backward.
  size_t backward_of(int64_t unit, int64_t micro_batch) const {
    return static_cast<size_t>(backward_slots_[static_cast<size_t>(micro_batch)] * units_ + units_ - 1 - unit);
  }

  void number_slots() {
    int64_t forwards = 0, backwards = 0;
    for (int64_t slot = 1; slot <= table_.slots(); ++slot) {
      const bool backward = table_.backward(slot);
      if (backward) backward_slots_.push_back(slot - 1);
      micro_batches_.push_back(backward ? backwards++ : forwards++);
    }
  }

  /// A collective or kernel on another stream; without overlap on the control stream.
  std::vector<Event> aside(const Task& task, Stream stream, int32_t* number) {
    *number = -1;
    if (!c_.layout.overlap) return {alone(task)};
    *number = next_number_++;
    text_.tasks.push_back(task);
    return {
        {.kind = Event::Kind::kAsync, .index = static_cast<int32_t>(text_.tasks.size()) - 1, .stream = stream, .number = *number}};
  }
  Event alone(const Task& task) {
    Block b;
    b.add(task);
    text_.blocks.push_back(std::move(b));
    return {.index = static_cast<int32_t>(text_.blocks.size()) - 1};
  }
  static void append(std::vector<Event>& to, const std::vector<Event>& events) {
    to.insert(to.end(), events.begin(), events.end());
  }
  static Event await(int32_t number) { return {.kind = Event::Kind::kAwait, .number = number}; }

  Task exchanged(CollectiveKind kind, const BucketForm& b, int64_t element) const {
    return kernels_.exchange({kind, c_.layout.shard_ranks(), b.elements, element}, kernels_.ways().data, Spent::kData);
  }
  /// Slices are summed over the sets of shards.
  void sum_replicas(const BucketForm& b, std::vector<Event>& events) {
    if (c_.layout.replicas() == 1) return;
    const int64_t elements = c_.layout.zero > 0 ? b.elements / c_.layout.shard_ranks() : b.elements;
    append(events, aside(kernels_.exchange({CollectiveKind::kAllReduce, c_.layout.replicas(), elements, Widths(c_).gradient},
                                           kernels_.ways().replicas, Spent::kData),
                         kReducing, &reduced_[index_of(b)]));
  }
  size_t index_of(const BucketForm& b) const { return static_cast<size_t>(&b - state_.buckets.data()); }

  /// From where the bucket's last gradient is complete; behind what left the stream before it.
  void put_within(size_t v, const BucketForm& b, const std::vector<Event>& events) {
    if (!c_.layout.overlap) return append(after_[v], events);
    std::vector<Aside>& there = within_[v];
    const int32_t done = text_.blocks[static_cast<size_t>(block_of(v))].done[static_cast<size_t>(b.last)];
    const int32_t tasks = there.empty() ? done : std::max(done, there.back().tasks);
    for (const Event& e : events) there.push_back({tasks, e});
  }

  /// Zero 0 and 1: a bucket is reduced once a step, when its last gradient is there.
  void reduce_when_complete() {
    const CollectiveKind kind = c_.layout.zero == 0 ? CollectiveKind::kAllReduce : CollectiveKind::kReduceScatter;
    reduced_.resize(state_.buckets.size(), -1);
    for (const BucketForm& b : state_.buckets) {
      const size_t last = backward_of(b.lowest, c_.train.grad_accumulation - 1);
      std::vector<Event> events = aside(exchanged(kind, b, Widths(c_).gradient), kReducing, &reduced_[index_of(b)]);
      sum_replicas(b, events);
      if (!c_.layout.overlap || (part_.first && b.lowest == 0 && meets_early()))
        append(at_end_, events);
      else
        put_within(last, b, events);
    }
  }

  /// Zero 2 and 3: every micro-batch is scattered, and its slice kept or added to those before. A bucket's storage is given up one
  /// unit later, which waits for it.
  void scatter_every_micro_batch() {
    const int64_t g = Widths(c_).gradient, m = c_.train.grad_accumulation;
    reduced_.resize(state_.buckets.size(), -1);
    for (const BucketForm& b : state_.buckets)
      for (int64_t j = 0; j < m; ++j) {
        const size_t last = backward_of(b.lowest, j), next = std::min(last + 1, next_compute(last));
        std::vector<Event> there;
        int32_t scattered = -1, kept = -1;
        append(there, aside(exchanged(CollectiveKind::kReduceScatter, b, g), kReducing, &scattered));
        const double slice = static_cast<double>(b.elements / b.ranks);
        const double bytes = (j == 0 ? 2 : 3) * slice * static_cast<double>(g);
        append(there, aside(kernels_.kernel({j == 0 ? 0 : slice, bytes}, Spent::kData), kReducing, &kept));
        reduced_[index_of(b)] = kept;
        if (j == m - 1) sum_replicas(b, there);
        put_within(last, b, there);
        if (kept < 0) continue;
        const size_t again = j + 1 < m ? backward_of(b.highest, j + 1) : before_.size();
        if (next >= again)
          before_[again].push_back(await(kept));
        else if (next == last)
          after_[last].push_back(await(kept));
        else
          released_[next].push_back(await(kept));
      }
  }
  /// The visit after, or the last.
  size_t next_compute(size_t v) const { return std::min(v + 1, before_.size() - 1); }

  void gather_before_use() {
    for (const GatherStay& stay : gather_stays(c_, state_, part_, stage_)) {
      int32_t gathered = -1;
      append(before_[stay.issued],
             aside(exchanged(CollectiveKind::kAllGather, state_.buckets[stay.bucket], Widths(c_).value), kGathering, &gathered));
      if (gathered >= 0) needed_[stay.first].push_back(await(gathered));
    }
  }

  // The timetable.

  void emit(const Event& e) { text_.events.push_back(e); }
  void emit_all(const std::vector<Event>& events) { append(text_.events, events); }

  /// Messages between this stage and the next have edges 2 s (forward) and 2 s + 1 (backward).
  int32_t edge_of(bool backward, bool receives) const {
    const int lower = backward == receives ? stage_ : stage_ - 1;
    return 2 * lower + (backward ? 1 : 0);
  }
  void receive(int64_t slot) {
    if (table_.receives(slot)) emit({.kind = Event::Kind::kReceive, .edge = edge_of(table_.backward(slot), true)});
  }

  void pipeline() {
    if (remembers_amax(c_)) kernels_.add_scales(part_.layers, tail());
    receive(1);
    for (int64_t slot = 1; slot <= table_.slots(); ++slot) {
      receive(slot + 1);
      compute(slot);
    }
  }

  /// As soon as the slot's last unit has made it, whatever the control stream then waits for.
  void send(int64_t slot) {
    if (!table_.sends(slot)) return;
    emit({.kind = Event::Kind::kSend, .edge = edge_of(table_.backward(slot), false)});
    sent_.push_back(slot);
  }

  /// What was sent two slots ago is given up.
  void give_up_sent(int64_t slot) {
    for (; given_up_ < sent_.size() && sent_[given_up_] + 2 <= slot; ++given_up_) {
      const int64_t s = sent_[given_up_];
      emit({.kind = Event::Kind::kSent,
            .edge = edge_of(table_.backward(s), false),
            .number = static_cast<int32_t>(micro_batches_[static_cast<size_t>(s - 1)])});
    }
  }

  void compute(int64_t slot) {
    const bool backward = table_.backward(slot);
    const size_t first = static_cast<size_t>((slot - 1) * units_);
    for (size_t v = first; v < first + static_cast<size_t>(units_); ++v) {
      emit_all(before_[v]);
      if (v == first) give_up_sent(slot);
      if (const auto found = needed_.find(v); found != needed_.end()) emit_all(found->second);
      const Event arrived{.kind = Event::Kind::kArrived,
                          .edge = edge_of(backward, true),
                          .number = static_cast<int32_t>(micro_batches_[static_cast<size_t>(slot - 1)])};
      work(v, v == first && table_.receives(slot) ? &arrived : nullptr);
      if (v == first + static_cast<size_t>(units_) - 1) send(slot);
      if (const auto found = released_.find(v); found != released_.end()) emit_all(found->second);
      emit_all(after_[v]);
    }
  }

  int32_t block_of(size_t v) const {
    const Visit at = visit(v);
    const bool embeds = part_.first && at.unit == 0, head = part_.last && at.unit == units_ - 1;
    const bool adds = at.backward && at.micro_batch > 0 && (c_.layout.zero < 2 || c_.layout.dp == 1);
    const int32_t kind = embeds ? kEmbedF : head ? kHeadF : kLayerF;
    return kind + (!at.backward ? 0 : adds ? 6 : 3);
  }

  /// A visit in one piece; else cut where it waits for a message after its first tasks, and where something leaves the stream.
  void work(size_t v, const Event* arrived) {
    const int32_t block = block_of(v);
    const auto found = within_.find(v);
    if (arrived && text_.blocks[static_cast<size_t>(block)].apart == 0) emit(*std::exchange(arrived, nullptr));
    if (found == within_.end() && !arrived) {
      Event* last = text_.events.empty() ? nullptr : &text_.events.back();
      if (last && last->kind == Event::Kind::kWork && last->index == block)
        ++last->times;
      else
        emit({.index = block});
      return;
    }
    const int32_t all = static_cast<int32_t>(text_.blocks[static_cast<size_t>(block)].tasks.size());
    int32_t at = 0, asides = 0;
    const auto go_to = [&](int32_t task) {
      if (task > at) emit({.index = part_of_block(block, at, task)});
      at = std::max(at, task);
    };
    if (arrived) {
      go_to(text_.blocks[static_cast<size_t>(block)].apart);
      emit(*arrived);
    }
    if (found != within_.end())
      for (const Aside& a : found->second) {
        go_to(a.tasks);
        emit(a.event);
        ++asides;
        text_.events.back().ahead = all - at + asides;
      }
    go_to(all);
    if (asides > 0) emit({.kind = Event::Kind::kLaunched, .times = asides});
  }

  /// Visits that are alike are cut alike.
  int32_t part_of_block(int32_t block, int32_t first, int32_t last) {
    const auto [found, is_new] = parts_.try_emplace({block, first, last}, static_cast<int32_t>(text_.blocks.size()));
    if (is_new)
      text_.blocks.push_back(text_.blocks[static_cast<size_t>(block)].part(static_cast<size_t>(first), static_cast<size_t>(last),
                                                                           kernels_.launch_s()));
    return found->second;
  }

  // The end of the step.

  bool meets_early() const { return c_.model.tied_embeddings && c_.layout.pp == 1 && c_.layout.zero < 2; }

  Block& tail() {
    const bool open =
        !text_.events.empty() && text_.events.back().kind == Event::Kind::kWork && text_.events.back().index == tail_ && tail_ >= 0;
    if (!open) {
      text_.blocks.emplace_back();
      tail_ = static_cast<int32_t>(text_.blocks.size()) - 1;
      emit({.index = tail_});
    }
    return text_.blocks[static_cast<size_t>(tail_)];
  }
  void trifles(int n) {
    for (int i = 0; i < n; ++i) tail().add(kernels_.trifle());
  }
  void add(double flops, double bytes) { tail().add(kernels_.kernel({flops, bytes}, Spent::kUpdate)); }

  void meet(const Exchange& exchange, const Ways::Way& way, int stages, int32_t number) {
    text_.tasks.push_back(kernels_.exchange(exchange, way, Spent::kPipeline));
    emit({.kind = Event::Kind::kMeet, .index = static_cast<int32_t>(text_.tasks.size()) - 1, .times = stages, .number = number});
  }
  /// A number that all ranks of an axis agree on.
  void agree_tp(int64_t element = 4) {
    if (c_.layout.tp > 1)
      tail().add(kernels_.exchange({CollectiveKind::kAllReduce, c_.layout.tp, 1, element}, kernels_.ways().tp, Spent::kTensor));
  }
  void agree_dp(int64_t element = 4) {
    if (c_.layout.shard_ranks() > 1)
      tail().add(
          kernels_.exchange({CollectiveKind::kAllReduce, c_.layout.shard_ranks(), 1, element}, kernels_.ways().data, Spent::kData));
  }
  void agree_pp(int64_t element = 4) {
    if (c_.layout.pp > 1)
      meet({CollectiveKind::kAllReduce, c_.layout.pp, 1, element}, kernels_.ways().all_stages, c_.layout.pp, ++meetings_);
  }

  /// Elements of gradients that the rank updates with.
  int64_t own_gradients() const {
    if (c_.layout.zero == 0)
      return elements_.of(part_) - (part_.first && part_.last && c_.model.tied_embeddings ? elements_.table : 0);
    int64_t n = 0;
    for (const BucketForm& b : state_.buckets)
      if (!is_shared(b, part_)) n += b.elements / b.ranks;
    return n;
  }

  void await_all() {
    for (int32_t& number : reduced_) {
      if (number >= 0) emit(await(number));
      number = -1;
    }
  }

  void finish() {
    const double g = static_cast<double>(Widths(c_).gradient);
    if (meets_early()) add(static_cast<double>(elements_.table), 3 * static_cast<double>(elements_.table) * g);
    emit_all(at_end_);
    tie();
    const bool scales = c_.train.precision == "fp16", guards = c_.train.guard.nonfinite != GuardAction::kNone;
    if (scales) {
      find_infinities();
      trifles(c_.train.loss_scale == 0 ? 3 : 1);
    }
    if (c_.train.clip_norm > 0) {
      square_gradients();
      trifles(scales ? 3 : 2);
    }
    if (guards) find_infinities();
    if (scales || guards) trifles(scales && guards ? 3 : 2);
    c_.layout.zero == 0 ? update_parameters() : update_slices();
    if (remembers_amax(c_)) kernels_.add_remembering(part_.layers, tail());
    metrics();
    give_up_sent(table_.slots() + 2);
  }

  /// A tied table's two gradients, where they are added after they were reduced.
  void tie() {
    if (!c_.model.tied_embeddings || meets_early() || !(part_.first || part_.last)) return;
    const int64_t slices = c_.layout.zero > 0 ? c_.layout.shard_ranks() : 1;
    int64_t elements = elements_.table;
    for (const BucketForm& b : state_.buckets)
      if (b.tied) elements = b.elements / slices;
    for (size_t b = 0; b < reduced_.size(); ++b)
      if (state_.buckets[b].tied && reduced_[b] >= 0) emit(await(reduced_[b]));
    const int64_t g = Widths(c_).gradient;
    if (c_.layout.pp > 1)
      meet({CollectiveKind::kAllReduce, 2, elements, g}, kernels_.ways().ends, 2, 0);
    else
      add(static_cast<double>(elements), 3.0 * static_cast<double>(elements * g));
  }

  void find_infinities() {
    await_all();
    add(0, static_cast<double>(own_gradients() * Widths(c_).gradient));
    agree_tp();
    if (c_.layout.zero > 0) agree_dp();
    agree_pp();
  }

  void square_gradients() {
    if (std::exchange(squared_, true)) return;
    await_all();
    const double n = static_cast<double>(own_gradients());
    add(2 * n, n * static_cast<double>(Widths(c_).gradient));
    if (c_.layout.tp > 1) {
      agree_tp(8);
      trifles(2);
    }
    if (c_.layout.zero > 0) agree_dp(8);
    agree_pp(8);
    trifles(1);
  }

  /// In the order of the model, of which the first was reduced last.
  void update_parameters() {
    await_all();
    Block& b = tail();
    const Elements& n = elements_;
    const auto update = [&](std::initializer_list<int64_t> sizes) {
      for (const int64_t s : sizes) kernels_.add_update(s, b);
    };
    const bool shared = part_.first && part_.last && c_.model.tied_embeddings;
    if (part_.first) update({n.table});
    if (part_.first && n.gpt) update({n.positions});
    for (int64_t l = 0; l < part_.layers; ++l) {
      if (n.gpt)
        update({n.hidden, n.hidden, n.wqkv, n.bqkv, n.wo, n.hidden, n.hidden, n.hidden, n.wup, n.bup, n.wdown, n.hidden});
      else
        update({n.hidden, n.wqkv, n.wo, n.hidden, n.wup, n.wdown});
    }
    if (!part_.last) return;
    update({n.hidden});
    if (n.gpt) update({n.hidden});
    if (!shared) update({n.table});
  }

  /// Bucket by bucket; under zero 1 and 2 the whole values are gathered behind.
  void update_slices() {
    for (const BucketForm& b : state_.buckets) {
      if (is_shared(b, part_)) continue;
      const int32_t number = index_of(b) < reduced_.size() ? std::exchange(reduced_[index_of(b)], -1) : -1;
      if (number >= 0) emit(await(number));
      kernels_.add_update(b.elements / b.ranks, tail());
      if (c_.layout.zero == 3) continue;
      int32_t gathered = -1;
      emit_all(aside(exchanged(CollectiveKind::kAllGather, b, Widths(c_).value), kReducing, &gathered));
    }
  }

  void metrics() {
    if (part_.last) {
      trifles(1);
      agree_dp();
      if (c_.layout.replicas() > 1)
        tail().add(
            kernels_.exchange({CollectiveKind::kAllReduce, c_.layout.replicas(), 1, 4}, kernels_.ways().replicas, Spent::kData));
      trifles(1);
    }
    if (c_.train.grad_norm) square_gradients();
  }

  const Case& c_;
  const StepKernels& kernels_;
  int stage_;
  Part part_;
  Timetable table_;
  Elements elements_;
  State state_;
  int64_t units_;
  StageText text_;
  /// What leaves the control stream within a visit, after so many of its tasks.
  struct Aside {
    int32_t tasks;
    Event event;
  };
  std::vector<std::vector<Event>> before_, after_;  ///< by visit
  std::map<size_t, std::vector<Aside>> within_;
  std::map<size_t, std::vector<Event>> needed_, released_;
  std::map<std::tuple<int32_t, int32_t, int32_t>, int32_t> parts_;
  std::vector<Event> at_end_;
  std::vector<int64_t> micro_batches_, backward_slots_;  ///< by slot; by micro-batch
  std::vector<int32_t> reduced_;                         ///< by bucket: what its sum waits for, -1 for nothing
  std::vector<int64_t> sent_;
  size_t given_up_ = 0;
  int32_t next_number_ = 0, tail_ = -1, meetings_ = 0;  // meeting 0 is that of the two ends
  bool squared_ = false;
};

}  // namespace
}  // namespace forms

bool has_step_form(const Case& c) {
  const Layout& l = c.layout;
  const bool plain = !l.offload.any() && l.compression == Compression{} && l.zero_plus_plus == ZeroPlusPlus{} &&
                     l.parameter_server == ParameterServer{} && l.diloco == Diloco{};
  const bool recompute = !forms::has_variants(c) && l.recompute_options.budget_bytes == 0;
  return plain && recompute && !c.canonical && c.train.guard.spike == GuardAction::kNone && !c.machine.local &&
         c.machine.calibration == nullptr;
}

std::optional<forms::Walked> step_form(const Case& c, const DatasheetRates& rates) {
  if (!has_step_form(c)) return std::nullopt;
  const forms::StepKernels kernels(c, rates);
  std::vector<forms::StageText> stages;
  for (int s = 0; s < c.layout.pp; ++s) { stages.push_back(forms::StageWriter(c, kernels, s).write()); }
  forms::WalkCosts costs{.launch_s = rates.efficiency().launch_s, .wake_s = rates.efficiency().wake_s, .edges = 0, .messages = {}};
  for (const auto& hop : kernels.ways().hops)
    for (int direction = 0; direction < 2; ++direction) {
      costs.messages.push_back(kernels.message(hop));
      ++costs.edges;
    }
  return forms::walk(stages, costs);
}

}  // namespace shardlab
