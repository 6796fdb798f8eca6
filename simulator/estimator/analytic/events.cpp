// Two steps of one stage as its allocator sees them, tensor by tensor, and the table of activations.
#include <algorithm>
#include <cmath>
#include <deque>
#include <utility>

#include "simulator/estimator/analytic/inside.h"

namespace shardlab::simulator::analytic {
namespace {

constexpr int8_t kComputes = 0, kGathers = 1, kReduces = 2;

/// Writes events; a handle gives back what it stands for.
class Writer {
 public:
  Writer() { events_.reserve(kUsual), tensors_.reserve(kUsual / 2); }
  int32_t take(double bytes, MemoryPart part, int8_t stream = kComputes) {
    const auto tensor = static_cast<int32_t>(tensors_.size());
    tensors_.push_back({whole(bytes), tensor, part, stream});
    if (tensors_.back().bytes > 0) events_.push_back(tensors_.back());
    return tensor;
  }
  void give(int32_t tensor) {
    AllocationEvent& taken = tensors_[static_cast<size_t>(tensor)];
    if (taken.bytes <= 0) return;
    taken.bytes = -taken.bytes;
    events_.push_back(taken);
  }
  void give(std::vector<int32_t>& tensors) {
    for (const int32_t t : tensors) give(t);
    tensors.clear();
  }
  std::vector<AllocationEvent> done() { return std::move(events_); }

 private:
  static constexpr size_t kUsual = 1 << 14;  ///< events

  std::vector<AllocationEvent> tensors_;  ///< what was taken, negative once it was given back
  std::vector<AllocationEvent> events_;
};

/// The tensors that one micro-batch holds between its forward and its backward: layer by layer, and of the head.
struct Held {
  std::vector<std::vector<int32_t>> layers;
  std::vector<int32_t> inputs, logits;
  bool head_done = false;
};

/// A tensor of a layer, in the order in which forward makes them.
struct LayerTensor {
  enum Kind : uint8_t {
    kKept,    ///< stays until backward
    kRemade,  ///< backward makes it again
    kPasses   ///< forward alone needs it
  };
  double bytes;
  Kind kind;
};
struct LayerTensors {
  std::vector<LayerTensor> made;
  std::vector<double> transient;
  double passing = 0;
};

/// Sizes of the transient tensors that live beside the kept ones: gradients of the residual stream and of the feed-forward, each of
/// the size of such a tensor.
std::vector<double> transients_of(const FrameworkProfile& p, const LayerCost& cost, double residual, bool swiglu) {
  std::vector<double> pieces;
  double left = cost.transient;
  const auto take = [&](double bytes) {
    if (bytes <= 0 || left <= 0) return;
    pieces.push_back(std::min(bytes, left));
    left -= pieces.back();
  };
  for (double e = p.transient.backward; e > 0; e -= 2) take(residual);
  const double inner = std::max(1.0, std::round(p.transient.ffn / 2 * (swiglu ? 2 : 1)));
  const double each = left / inner;
  while (left > 1) take(each);  // takes from `left`
  return pieces;
}

/// Bytes of the residual stream of a micro-batch, whole.
double block_input(const Prepared::Inside& in, const LayerKey& key) {
  const double element = key.precision == Precision::kFp32 ? 4 : 2;
  return element * key.micro_batch * static_cast<double>(key.seq_len) / key.cp * static_cast<double>(in.shape.hidden);
}

LayerTensors tensors_of(const Prepared::Inside& in, const LayerKey& key, const LayerCost& cost, bool moe) {
  LayerTensors t{.made = {}, .transient = {}, .passing = cost.passing};
  double residual = 0;
  const KeptTensors tensors = kept_tensors(in.layers(), key, moe);
  for (const KeptTensor& k : tensors.all()) {
    if (residual == 0) residual = k.kept + k.remade;  // the layer's input
    // Row-parallel projections make whole rows, which are reduced to what is added to the residual stream; what is gathered or
    // scattered may be there in two orders.
    const bool joins = k.name == "residual" && key.tp > 1, twice = copies_rows(in.profile, key);
    if (joins || (twice && k.name == "gathered norm output")) t.made.push_back({block_input(in, key), LayerTensor::kPasses});
    if (joins && twice) t.made.push_back({block_input(in, key), LayerTensor::kPasses});
    if (k.kept > 0) t.made.push_back({k.kept, LayerTensor::kKept});
    if (k.remade > 0) t.made.push_back({k.remade, LayerTensor::kRemade});
  }
  t.transient = transients_of(in.profile, cost, residual, in.shape.swiglu);
  return t;
}

/// Whether gradients that stay are made with each step, by the reductions.
bool made_by_reductions(const Frame& f) { return f.gathers && !f.in.profile.state.gradient_with_step; }

/// Gradients as backward makes them, in pieces as a layer has matrices of like size.
constexpr int kPieces = 4;

class Replay {
 public:
  Replay(const Frame& f, const StageGroup& g, const LayerKey& key, Writer& writer)
      : f_(f),
        g_(g),
        writer_(writer),
        gathered_(gathered_of(f, g)),
        reduced_(gradient_bytes(f, g)),
        layers_(static_cast<size_t>(g.dense + g.moe)),
        copies_(copies_rows(f.in.profile, key)),
        dense_(tensors_of(f.in, key, f.block.dense, false)),
        moe_(f.in.shape.moe() ? tensors_of(f.in, key, f.block.moe, true) : LayerTensors{}) {}

  /// Under zero 3, gradients of the step before are dropped and the weights that stay are gathered.
  void begin() {
    writer_.give(sharded_);
    if (gathered_.standing <= 0) return;
    const size_t pieces = f_.keeps_gathered ? std::max<size_t>(1, layers_) : 1;
    for (size_t i = 0; i < pieces; ++i) {
      const int32_t buffer = copies() ? writer_.take(gathered_.standing / pieces, MemoryPart::kGathered, kGathers) : -1;
      const int8_t stream = copies() ? kComputes : kGathers;
      standing_.push_back(writer_.take(gathered_.standing / pieces, MemoryPart::kGathered, stream));
      // The buffer of what was gathered last stays until the next is there.
      if (buffer >= 0) buffers_.push_back(buffer);
      if (buffers_.size() > 1) writer_.give(buffers_.front()), buffers_.pop_front();
    }
    if (f_.keeps_gathered) drop_units();
  }
  void end() { writer_.give(standing_); }

  /// The updated values of each rank come in flat, then into a list of equal pieces.
  void update() {
    if (gathered_.updated <= 0) return;
    std::vector<int32_t> gathered;
    const int64_t ranks = std::clamp<int64_t>(f_.replicas.dense, 1, 1024);
    for (int64_t rank = 0; rank < ranks; ++rank)
      gathered.push_back(writer_.take(gathered_.updated / static_cast<double>(2 * ranks), MemoryPart::kGathered));
    gathered.push_back(writer_.take(gathered_.updated / 2, MemoryPart::kGathered));
    writer_.give(gathered);
  }

  Held forward() {
    Held held;
    held.layers.resize(layers_);
    for (size_t i = 0; i < layers_; ++i) {
      gather(true);
      const LayerTensors& t = layer(i);
      held.layers[i].reserve(t.made.size());
      for (const LayerTensor& tensor : t.made) {
        if (tensor.kind == LayerTensor::kKept)
          held.layers[i].push_back(writer_.take(tensor.bytes, MemoryPart::kActivations));
        else
          pass(writer_.take(tensor.bytes, MemoryPart::kTransient));
      }
      pass(writer_.take(t.passing, MemoryPart::kTransient));
    }
    writer_.give(passing_);
    drop_units();
    head_forward(held);
    return held;
  }

  void head_backward(Held& held) {
    if (std::exchange(held.head_done, true)) return;
    const EndCost& h = f_.block.head;
    std::vector<int32_t> gradient;
    if (g_.holds_loss)
      gradient = loss_backward(held);
    else if (g_.holds_head)
      gradient.push_back(writer_.take(h.logits_gradient, MemoryPart::kLogits));
    if (g_.holds_head) {
      const int32_t input = writer_.take(h.input_gradient, MemoryPart::kTransient);
      std::vector<int32_t> made{writer_.take(gathered_.head_gradient, part_of_made())};
      if (gathered_.head_stays)
        fresh_.push_back(made[0]);
      else
        writer_.give(made);
      writer_.give(input);
    }
    writer_.give(gradient), writer_.give(held.inputs);
  }

  /// `first`: gradients are made, not added to those that are there.
  void backward(Held held, bool first) {
    head_backward(held);
    for (size_t i = layers_; i-- > 0;) {
      gather(false);
      const LayerTensors& t = layer(i);
      for (const LayerTensor& tensor : t.made)
        if (tensor.kind == LayerTensor::kRemade) again_.push_back(writer_.take(tensor.bytes, MemoryPart::kTransient));
      for (const double bytes : t.transient) again_.push_back(writer_.take(bytes, MemoryPart::kTransient));
      const double fresh = gathered_.layers_gradient > 0 ? gathered_.layers_gradient / layers_ : fresh_unit();
      for (int piece = 0; piece < kPieces; ++piece) made_.push_back(writer_.take(fresh / kPieces, part_of_made()));
      writer_.give(again_), writer_.give(held.layers[i]);
      if (gathered_.layers_gradient > 0)
        fresh_.insert(fresh_.end(), made_.begin(), made_.end()), made_.clear();
      else
        reduce(made_, cast_unit(), reduced_ / static_cast<double>(layers_ + 1), first);
    }
    drop_units();
    fresh_.push_back(
        writer_.take(std::max(0.0, gathered_.last_gradient - last_cast() - (gathered_.head_stays ? gathered_.head_gradient : 0)),
                     part_of_made()));
    reduce(fresh_, last_cast(), reduced_ / static_cast<double>(layers_ + 1), first);
    writer_.give(casts_);
  }

 private:
  bool copies() const { return f_.in.profile.overlap.gather_copies; }
  MemoryPart part_of_made() const {
    if (f_.gathers) return MemoryPart::kGathered;
    return f_.in.profile.state.gradient_fresh_stage ? MemoryPart::kGradients : MemoryPart::kTransient;
  }
  double kept_logits() const { return f_.block.head.logits - f_.block.head.at_loss; }
  /// Bytes of a unit's gradient beyond the accumulated ones: the part that backward makes and the reduction reads.
  double fresh_unit() const { return std::min(gathered_.gradient, gathered_.gradient * share_of_fresh()); }
  double cast_unit() const { return gathered_.gradient - fresh_unit(); }
  double share_of_fresh() const {
    const double cast = f_.bytes.gradient_wire > f_.bytes.fresh ? f_.bytes.gradient_wire : 0;
    const bool casts = f_.gathers && gathered_.gradient_stays <= 0;
    return f_.bytes.fresh > 0 ? f_.bytes.fresh / (f_.bytes.fresh + (casts ? cast : 0)) : 1;
  }
  double last_cast() const {
    if (!f_.gathers || f_.bytes.gradient_wire <= f_.bytes.ends || f_.bytes.ends <= 0) return 0;
    return gathered_.last_gradient * f_.bytes.gradient_wire / (f_.bytes.ends + f_.bytes.gradient_wire);
  }

  /// Gradients of a unit are copied into the reduction's input, which stays until the next unit's is made, and come out cut.
  void reduce(std::vector<int32_t>& made, double cast, double share, bool first) {
    writer_.give(casts_);
    if (cast > 0) casts_.push_back(writer_.take(cast, MemoryPart::kGathered));
    if (made_by_reductions(f_)) {
      const int32_t cut = writer_.take(share, MemoryPart::kGradients, kReduces);
      if (first)
        sharded_.push_back(cut);
      else
        writer_.give(cut);
    }
    writer_.give(made);
  }

  /// A tensor that forward needs no longer after the next two.
  void pass(int32_t tensor) {
    passing_.push_back(tensor);
    if (passing_.size() <= 3) return;
    writer_.give(passing_.front());
    passing_.erase(passing_.begin());
  }

  void head_forward(Held& held) {
    const EndCost& h = f_.block.head;
    if (g_.holds_head) {
      std::vector<int32_t> pieces;
      if (copies_) pieces.push_back(writer_.take(h.input_gradient, MemoryPart::kTransient));
      held.inputs.push_back(writer_.take(h.kept - kept_logits(), MemoryPart::kActivations));
      writer_.give(pieces);
    }
    if (g_.holds_loss)
      loss_forward(held);
    else if (g_.holds_head)
      writer_.give(writer_.take(h.logits_once, MemoryPart::kLogits));  // sent to who computes the loss
  }

  /// Logits are there in 16 bit, then in fp32 by copies, as many as are counted; the last ones stay.
  void loss_forward(Held& held) {
    const EndCost& h = f_.block.head;
    std::vector<std::pair<int32_t, double>> logits;
    double there = 0;
    for (const double most = std::max(h.logits_forward, kept_logits()); there + 1 < most;) {
      if (logits.size() > 1 && most - there + 1 < 2 * h.logits_once) {  // those in 16 bit are gone by then
        writer_.give(logits.front().first);
        there -= logits.front().second;
        logits.erase(logits.begin());
      }
      const double bytes = std::min(most - there, there == 0 ? h.logits_once : 2 * h.logits_once);
      logits.emplace_back(writer_.take(bytes, MemoryPart::kLogits), bytes);
      there += bytes;
      writer_.give(stale_);
    }
    for (const auto& [tensor, bytes] : logits) {
      if (there - bytes + 1 < kept_logits()) {
        held.logits.push_back(tensor);
        continue;
      }
      writer_.give(tensor);
      there -= bytes;
    }
  }

  /// The gradient that the head's matmuls read: the last that the loss's backward makes, or what was kept, written over.
  std::vector<int32_t> loss_backward(Held& held) {
    const EndCost& h = f_.block.head;
    std::vector<int32_t> more, gradient;
    double last = kept_logits();
    for (double left = h.logits_backward - kept_logits(); left > 1; left -= last)
      more.push_back(writer_.take(last = std::min(left, 2 * h.logits_once), MemoryPart::kLogits));
    if (more.empty())
      gradient.swap(held.logits);
    else
      gradient.push_back(more.back()), more.pop_back();
    writer_.give(more);
    if (h.logits_output > 0)
      stale_.swap(held.logits);
    else
      writer_.give(held.logits);
    if (last > h.logits_gradient + 1) {
      const int32_t cast = writer_.take(h.logits_gradient, MemoryPart::kLogits);
      writer_.give(gradient);
      gradient.push_back(cast);
    }
    return gradient;
  }

  /// The next unit's weights are asked for; of the units before it as many stay as are there at once.
  void gather(bool forward) {
    if (gathered_.unit <= 0) return;
    const double most = std::max(1.0, (forward ? gathered_.units : gathered_.backward_units) - (copies() ? 1 : 0));
    while (static_cast<double>(buffers_.size() + 1) > most) writer_.give(buffers_.front()), buffers_.pop_front();
    buffers_.push_back(writer_.take(gathered_.unit, MemoryPart::kGathered, kGathers));
    if (!copies()) return;
    writer_.give(unit_);
    unit_.push_back(writer_.take(gathered_.unit, MemoryPart::kGathered));
  }
  void drop_units() {
    for (const int32_t t : buffers_) writer_.give(t);
    buffers_.clear();
    writer_.give(unit_);
  }
  const LayerTensors& layer(size_t i) const { return i < static_cast<size_t>(g_.dense) ? dense_ : moe_; }

  const Frame& f_;
  const StageGroup& g_;
  Writer& writer_;
  GatheredBytes gathered_;
  double reduced_;  ///< bytes of the gradients that stay
  size_t layers_;
  bool copies_;  ///< of rows that are gathered
  LayerTensors dense_, moe_;
  std::deque<int32_t> buffers_;
  std::vector<int32_t> again_, made_;  ///< of the layer whose backward runs
  std::vector<int32_t> unit_, standing_, sharded_, casts_, fresh_, passing_, stale_;
};

/// All micro-batches of a step that the replay looks at: those in flight, one of the steady phase, and the drain.
void one_step(const Frame& f, int32_t stage, Replay& replay) {
  const double flying = in_flight(f.point, stage);
  const auto most = static_cast<size_t>(std::max(1.0, std::ceil(flying)));
  std::deque<Held> held;
  bool first = true;
  const auto backward = [&] {
    replay.backward(std::move(held.front()), std::exchange(first, false));
    held.pop_front();
  };
  const auto m = std::min(static_cast<size_t>(f.point.grad_accumulation), most + 1);
  replay.begin();
  for (size_t i = 0; i < m; ++i) {
    held.push_back(replay.forward());
    // The head's backward follows at once, but where all forwards come first.
    if (!forwards_first(f.point.schedule)) replay.head_backward(held.back());
    if (held.size() >= most || i + 1 == m) backward();
  }
  while (!held.empty()) backward();
  replay.end();
}

}  // namespace

std::vector<AllocationEvent> events_of(const Frame& f, const StageGroup& g, int32_t stage, const LayerKey& key) {
  Writer writer;
  const MemoryBytes peak = memory_of(f, g, stage, nullptr, nullptr);
  const GatheredBytes gathered = gathered_of(f, g);
  // State is a tensor a matrix or vector; a layer's share stands for them.
  const double layers = std::max(1.0, static_cast<double>(g.dense + g.moe));
  const auto stand = [&](double bytes, MemoryPart part, double pieces) {
    for (double i = 0; i < pieces; ++i) writer.take(bytes / pieces, part);
  };
  const auto state = [&](MemoryPart part, double tensors) { stand(static_cast<double>(peak[part]), part, tensors * layers); };
  state(MemoryPart::kParameters, 2), state(MemoryPart::kMaster, 2);
  if (!made_by_reductions(f)) stand(gradient_bytes(f, g), MemoryPart::kGradients, 2 * layers);
  stand(static_cast<double>(peak[MemoryPart::kBuckets]), MemoryPart::kBuckets, 1);
  stand(static_cast<double>(peak[MemoryPart::kWorkspace]), MemoryPart::kWorkspace, 1);
  stand(gathered.gradient_stays, MemoryPart::kGathered, f.gathers ? layers : 1);
  Replay replay(f, g, key, writer);
  one_step(f, stage, replay);
  state(MemoryPart::kMoments, 4);
  replay.update();
  one_step(f, stage, replay);
  replay.update();
  return writer.done();
}

std::vector<ActivationItem> items_of(const Frame& f, const LayerKey& key) {
  std::vector<ActivationItem> items;
  for (const bool moe : {false, true}) {
    if (moe ? f.in.shape.moe_layers() == 0 : f.in.shape.moe_layers() == f.in.shape.layers) continue;
    const KeptTensors tensors = kept_tensors(f.in.layers(), key, moe);
    for (const KeptTensor& t : tensors.all()) {
      const auto same =
          std::find_if(items.begin(), items.end(), [&](const ActivationItem& i) { return i.name == t.name && i.moe == moe; });
      ActivationItem& item = same != items.end() ? *same : items.emplace_back(ActivationItem{t.name, moe, 0, 0});
      item.kept += whole(t.kept), item.remade += whole(t.remade);
    }
  }
  return items;
}

}  // namespace shardlab::simulator::analytic
