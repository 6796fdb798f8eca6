// Two steps of one stage as its allocator sees them, tensor by tensor, and the table of activations.
#include <algorithm>
#include <cmath>
#include <deque>

#include "simulator/analytic/inside.h"

namespace shardlab::analytic {
namespace {

int64_t whole(double bytes) { return static_cast<int64_t>(std::llround(bytes)); }

constexpr int8_t kComputes = 0, kGathers = 1, kReduces = 2;

/// Writes events; a handle gives back what it stands for.
class Writer {
 public:
  int32_t take(double bytes, MemoryPart part, int8_t stream = kComputes) {
    sizes_.push_back({whole(bytes), part, stream});
    const auto tensor = static_cast<int32_t>(sizes_.size() - 1);
    if (whole(bytes) > 0) events_.push_back({whole(bytes), tensor, part, stream});
    return tensor;
  }
  void give(int32_t tensor) {
    Size& s = sizes_[static_cast<size_t>(tensor)];
    if (s.bytes > 0) events_.push_back({-s.bytes, tensor, s.part, s.stream});
    s.bytes = 0;
  }
  void give(std::vector<int32_t>& tensors) {
    for (const int32_t t : tensors) give(t);
    tensors.clear();
  }
  std::vector<AllocationEvent> done() { return std::move(events_); }

 private:
  struct Size {
    int64_t bytes;
    MemoryPart part;
    int8_t stream;
  };
  std::vector<Size> sizes_;
  std::vector<AllocationEvent> events_;
};

/// What one micro-batch holds between its forward and its backward, layer by layer.
using Held = std::vector<std::vector<int32_t>>;

struct LayerTensors {
  std::vector<double> kept, remade, transient;
  double passing = 0;
};

/// What runs beside what is kept is no one tensor: gradients of the residual stream and of the feed-forward, each of the size that
/// such a tensor has.
std::vector<double> transients_of(const FrameworkProfile& p, const LayerCost& cost, double residual, bool swiglu) {
  std::vector<double> pieces;
  double left = cost.transient;
  const auto take = [&](double bytes) {
    if (bytes <= 0 || left <= 0) return;
    pieces.push_back(std::min(bytes, left));
    left -= pieces.back();
  };
  for (double e = p.transient_backward; e > 0; e -= 2) take(residual);
  const double inner = std::max(1.0, std::round(p.transient_ffn / 2 * (swiglu ? 2 : 1)));
  const double each = left / inner;
  while (left > 1) take(each);  // takes from `left`
  return pieces;
}

LayerTensors tensors_of(const Prepared::Inside& in, const LayerKey& key, const LayerCost& cost, bool moe) {
  LayerTensors t{.kept = {}, .remade = {}, .transient = {}, .passing = cost.passing};
  double residual = 0;
  const KeptTensors tensors = kept_tensors(in.layers(), key, moe);
  for (const KeptTensor& k : tensors.all()) {
    if (residual == 0) residual = k.kept + k.remade;  // the layer's input
    if (k.kept > 0) t.kept.push_back(k.kept);
    if (k.remade > 0) t.remade.push_back(k.remade);
  }
  t.transient = transients_of(in.profile, cost, residual, in.shape.swiglu);
  return t;
}

class Replay {
 public:
  Replay(const Frame& f, const StageGroup& g, const LayerKey& key, Writer& writer)
      : f_(f),
        g_(g),
        writer_(writer),
        gathered_(gathered_of(f, g)),
        dense_(tensors_of(f.in, key, f.block.dense, false)),
        moe_(f.in.shape.moe() ? tensors_of(f.in, key, f.block.moe, true) : LayerTensors{}) {}

  Held forward() {
    Held held(static_cast<size_t>(g_.dense + g_.moe));
    std::deque<int32_t> units;
    for (size_t i = 0; i < held.size(); ++i) {
      gather(units);
      const LayerTensors& t = layer(i);
      std::vector<int32_t> passing;
      for (const double bytes : t.remade) passing.push_back(writer_.take(bytes, MemoryPart::kTransient));
      for (const double bytes : t.kept) held[i].push_back(writer_.take(bytes, MemoryPart::kActivations));
      passing.push_back(writer_.take(t.passing, MemoryPart::kTransient));
      writer_.give(passing);
    }
    give_all(units);
    return held;
  }

  /// The head's forward, the loss and the head's backward. Logits are there in 16 bit, then in fp32 by copies, as many as are
  /// counted.
  void head() {
    if (!g_.holds_head) return;
    const EndCost& h = f_.block.head;
    const double kept = h.logits - h.at_loss;
    const int32_t input = writer_.take(h.kept - kept, MemoryPart::kActivations);
    std::vector<int32_t> logits;
    const double per = f_.in.profile.saved_logits_kept;
    const double first = per > 2 ? kept * 2 / per : kept, copy = 2 * first;
    const auto take = [&](double bytes, double piece) {
      for (; bytes > 1; bytes -= piece) logits.push_back(writer_.take(std::min(bytes, piece), MemoryPart::kLogits));
    };
    take(first, first), take(kept - first, copy), take(h.at_loss, copy > 0 ? copy : h.at_loss);
    writer_.give(logits), writer_.give(input);
  }

  void backward(Held held) {
    std::deque<int32_t> units;
    std::vector<int32_t> gradients;
    for (size_t i = held.size(); i-- > 0;) {
      gather(units);
      const LayerTensors& t = layer(i);
      std::vector<int32_t> again;
      for (const double bytes : t.remade) again.push_back(writer_.take(bytes, MemoryPart::kTransient));
      for (const double bytes : t.transient) again.push_back(writer_.take(bytes, MemoryPart::kTransient));
      writer_.give(gradients);  // of the unit before this one: reduced by now
      gradients.push_back(writer_.take(gathered_.gradient, MemoryPart::kGathered, f_.gathers ? kReduces : kComputes));
      writer_.give(again), writer_.give(held[i]);
    }
    writer_.give(gradients);
    give_all(units);
  }

 private:
  /// The next unit's weights are asked for; of the units before it as many stay as are there at once.
  void gather(std::deque<int32_t>& units) {
    if (gathered_.unit <= 0) return;
    while (static_cast<double>(units.size() + 1) > std::max(1.0, gathered_.units)) writer_.give(units.front()), units.pop_front();
    units.push_back(writer_.take(gathered_.unit, MemoryPart::kGathered, kGathers));
  }
  void give_all(std::deque<int32_t>& units) {
    for (const int32_t t : units) writer_.give(t);
    units.clear();
  }
  const LayerTensors& layer(size_t i) const { return i < static_cast<size_t>(g_.dense) ? dense_ : moe_; }
  const Frame& f_;
  const StageGroup& g_;
  Writer& writer_;
  GatheredBytes gathered_;
  LayerTensors dense_, moe_;
};

/// All micro-batches of a step that the replay looks at: those in flight, one of the steady phase, and the drain.
void one_step(const Frame& f, int32_t stage, Replay& replay) {
  const double flying = in_flight(f.point.schedule, f.point.pp, stage, f.point.grad_accumulation, f.point.vpp);
  const auto most = static_cast<size_t>(std::max(1.0, std::ceil(flying)));
  std::deque<Held> held;
  const auto m = std::min(static_cast<size_t>(f.point.grad_accumulation), most + 1);
  for (size_t i = 0; i < m; ++i) {
    held.push_back(replay.forward());
    replay.head();
    if (held.size() < most && i + 1 < m) continue;
    replay.backward(std::move(held.front()));
    held.pop_front();
  }
  while (!held.empty()) {
    replay.backward(std::move(held.front()));
    held.pop_front();
  }
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
  state(MemoryPart::kParameters, 2), state(MemoryPart::kMaster, 2), state(MemoryPart::kGradients, 2);
  stand(static_cast<double>(peak[MemoryPart::kBuckets]), MemoryPart::kBuckets, 1);
  stand(static_cast<double>(peak[MemoryPart::kWorkspace]), MemoryPart::kWorkspace, 1);
  stand(gathered.standing + gathered.gradient_stays, MemoryPart::kGathered, f.gathers ? layers : 1);
  Replay replay(f, g, key, writer);
  one_step(f, stage, replay);
  state(MemoryPart::kMoments, 4);
  one_step(f, stage, replay);
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

}  // namespace shardlab::analytic
