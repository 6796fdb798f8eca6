#include "simulator/step_stage.h"

#include <algorithm>

namespace shardlab::simulator::forms {

StageWriter::StageWriter(const Case& c, const StepKernels& kernels, int stage)
    : c_(c),
      kernels_(kernels),
      stage_(stage),
      part_(part_of(c, stage)),
      table_(c, part_, stage),
      elements_(c),
      state_(state_of(c, elements_, part_, first_layer_of(c, stage))),
      treatments_(c),
      units_(part_.layers + part_.first + part_.last),
      around_(static_cast<size_t>(table_.slots() * units_)) {}

StageText StageWriter::write() {
  number_slots();
  make_blocks();
  if (c_.train.precision == "fp16") trifles(c_.train.loss_scale == 0 ? 2 : 1);
  if (remembers_amax(c_)) kernels_.add_scales(part_.layers, tail());
  if (sends_signs(c_)) trifles(3);  // beta1, the frozen variance's correction, epsilon
  clear_padding();
  if (adds_copies(c_)) count_in_binary();
  if (parks_activations(c_)) park_activations();
  if (updates_on_host(c_)) list_host_updates();
  if (c_.layout.zero >= 2)
    scatter_every_micro_batch();
  else if (c_.layout.dp > 1)
    reduce_when_complete();
  else if (updates_on_host(c_))
    leave_when_complete();
  if (c_.layout.zero == 3) parks_parameters(c_) ? fetch_before_use() : gather_before_use();
  pipeline();
  finish();
  for (Block& b : text_.blocks) b.close(kernels_.launch_s());
  return std::move(text_);
}

// --- visits

void StageWriter::number_slots() {
  for (int64_t slot = 1; slot <= table_.slots(); ++slot) {
    std::vector<int64_t>& slots = table_.backward(slot) ? backward_slots_ : forward_slots_;
    micro_batches_.push_back(static_cast<int64_t>(slots.size()));
    slots.push_back(slot - 1);
  }
}

StageWriter::Visit StageWriter::visit(size_t v) const {
  const int64_t slot = static_cast<int64_t>(v) / units_ + 1, i = static_cast<int64_t>(v) % units_;
  const bool backward = table_.backward(slot);
  return {backward, backward ? units_ - 1 - i : i, micro_batches_[static_cast<size_t>(slot - 1)]};
}

size_t StageWriter::forward_of(int64_t unit, int64_t micro_batch) const {
  return static_cast<size_t>(forward_slots_[static_cast<size_t>(micro_batch)] * units_ + unit);
}

size_t StageWriter::backward_of(int64_t unit, int64_t micro_batch) const {
  return static_cast<size_t>(backward_slots_[static_cast<size_t>(micro_batch)] * units_ + units_ - 1 - unit);
}

/// One of each kind. Layers differ in what their backward makes again.
void StageWriter::make_blocks() {
  const auto add = [&](Block b) {
    text_.blocks.push_back(std::move(b));
    return static_cast<int32_t>(text_.blocks.size()) - 1;
  };
  embed_forward_ = add(kernels_.embed_forward());
  layer_forward_ = add(kernels_.layer_forward());
  head_forward_ = add(kernels_.head_forward());
  embed_backward_ = {add(kernels_.embed_backward(false)), add(kernels_.embed_backward(true))};
  head_backward_ = {add(kernels_.head_backward(false)), add(kernels_.head_backward(true))};
  for (int64_t layer = first_layer_of(c_, stage_); layer < first_layer_of(c_, stage_) + part_.layers; ++layer) {
    LayerTreatment t = treatments_.of(layer);
    t.parked = false;  // which changes no kernel
    if (std::ranges::find(layer_backward_, t, &decltype(layer_backward_)::value_type::first) != layer_backward_.end()) continue;
    layer_backward_.push_back({t, {add(kernels_.layer_backward(false, t)), add(kernels_.layer_backward(true, t))}});
  }
}

int32_t StageWriter::block_of(size_t v) const {
  const Visit at = visit(v);
  const size_t adds = at.backward && at.micro_batch > 0 && c_.layout.zero < 2 && !c_.canonical ? 1 : 0;
  if (is_layer(at.unit)) {
    if (!at.backward) return layer_forward_;
    LayerTreatment t = treatments_.of(layer_of_unit(at.unit));
    t.parked = false;
    return std::ranges::find(layer_backward_, t, &decltype(layer_backward_)::value_type::first)->second[adds];
  }
  const bool embeds = part_.first && at.unit == 0;
  if (!at.backward) return embeds ? embed_forward_ : head_forward_;
  return (embeds ? embed_backward_ : head_backward_)[adds];
}

// --- words

Event StageWriter::alone(const Task& task) {
  Block b;
  b.add(task);
  text_.blocks.push_back(std::move(b));
  return {.index = static_cast<int32_t>(text_.blocks.size()) - 1};
}

int32_t StageWriter::start(Events& to, const Task& task, Stream stream, After after) {
  if (!c_.layout.overlap && stream != kHost) {
    for (const int32_t number : after) await(to, number);
    to.push_back(alone(task));
    return -1;
  }
  text_.tasks.push_back(task);
  Event e{.kind = Event::Kind::kAsync,
          .index = static_cast<int32_t>(text_.tasks.size()) - 1,
          .stream = stream,
          .number = next_number_++};
  std::ranges::copy(after, e.after.begin());
  to.push_back(e);
  return e.number;
}

// --- the timetable

/// Messages between this stage and the next have edges 2 s (forward) and 2 s + 1 (backward).
int32_t StageWriter::edge_of(bool backward, bool receives) const {
  const int lower = backward == receives ? stage_ : stage_ - 1;
  return 2 * lower + (backward ? 1 : 0);
}

void StageWriter::receive(int64_t slot) {
  if (table_.receives(slot)) emit({.kind = Event::Kind::kReceive, .edge = edge_of(table_.backward(slot), true)});
}

void StageWriter::pipeline() {
  receive(1);
  for (int64_t slot = 1; slot <= table_.slots(); ++slot) {
    receive(slot + 1);
    compute(slot);
  }
}

/// As soon as the slot's last unit has made it, whatever the control stream then waits for; the host launches it behind `others`.
void StageWriter::send(int64_t slot, int32_t others) {
  if (!table_.sends(slot)) return;
  emit({.kind = Event::Kind::kSend, .edge = edge_of(table_.backward(slot), false), .ahead = others > 0 ? others + 1 : 0});
  sent_.push_back(slot);
}

/// How many launches the host makes for these.
int32_t StageWriter::launches_of(const Events& events) const {
  size_t n = 0;
  for (const Event& e : events) {
    if (e.kind == Event::Kind::kAsync) ++n;
    if (e.kind == Event::Kind::kWork) n += text_.blocks[static_cast<size_t>(e.index)].tasks.size() * static_cast<size_t>(e.times);
  }
  return static_cast<int32_t>(n);
}

/// What was sent two slots ago is given up.
void StageWriter::give_up_sent(int64_t slot) {
  for (; given_up_ < sent_.size() && sent_[given_up_] + 2 <= slot; ++given_up_) {
    const int64_t s = sent_[given_up_];
    emit({.kind = Event::Kind::kSent,
          .edge = edge_of(table_.backward(s), false),
          .number = static_cast<int32_t>(micro_batches_[static_cast<size_t>(s - 1)])});
  }
}

void StageWriter::compute(int64_t slot) {
  const size_t first = static_cast<size_t>((slot - 1) * units_), end = first + static_cast<size_t>(units_);
  for (size_t v = first; v < end; ++v) {
    const Around& around = around_[v];
    emit_all(around.before);
    if (v == first) give_up_sent(slot);
    emit_all(around.needed);
    const Event arrived{.kind = Event::Kind::kArrived,
                        .edge = edge_of(table_.backward(slot), true),
                        .number = static_cast<int32_t>(micro_batches_[static_cast<size_t>(slot - 1)])};
    work(v, v == first && table_.receives(slot) ? &arrived : nullptr);
    const int32_t others = v == end - 1 ? launches_of(around.after) : 0;
    if (v == end - 1) send(slot, others);
    emit_all(around.released);
    emit_all(around.after);
    if (others > 0 && table_.sends(slot)) emit({.kind = Event::Kind::kLaunched});
  }
}

/// A visit in one piece; else cut where it waits for what arrives after its first tasks, and where something leaves the stream.
void StageWriter::work(size_t v, const Event* arrived) {
  const int32_t whole = block_of(v);
  std::vector<Cut> cuts = around_[v].arrivals;
  if (arrived) cuts.push_back({block(whole).apart, *arrived});
  const std::vector<Cut>& within = around_[v].within;
  cuts.insert(cuts.end(), within.begin(), within.end());
  std::ranges::stable_sort(cuts, {}, &Cut::tasks);
  const int32_t all = static_cast<int32_t>(block(whole).tasks.size());
  int32_t at = 0, asides = 0;
  const auto go_to = [&](int32_t task) {
    if (task > at) emit({.index = at == 0 && task == all ? whole : part_of_block(whole, at, task)});
    at = std::max(at, task);
  };
  Event* last = text_.events.empty() ? nullptr : &text_.events.back();
  if (cuts.empty() && last && last->kind == Event::Kind::kWork && last->index == whole) {
    ++last->times;
    return;
  }
  for (const Cut& cut : cuts) {
    go_to(cut.tasks);
    emit(cut.event);
    if (cut.event.kind == Event::Kind::kAsync) text_.events.back().ahead = all - at + ++asides;
  }
  go_to(all);
  if (asides > 0) emit({.kind = Event::Kind::kLaunched, .times = asides});
}

/// Visits that are alike are cut alike.
int32_t StageWriter::part_of_block(int32_t index, int32_t first, int32_t last) {
  const auto [found, is_new] = parts_.try_emplace({index, first, last}, static_cast<int32_t>(text_.blocks.size()));
  if (is_new) text_.blocks.push_back(block(index).part(static_cast<size_t>(first), static_cast<size_t>(last), kernels_.launch_s()));
  return found->second;
}

}  // namespace shardlab::simulator::forms
