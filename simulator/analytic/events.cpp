// One step of one stage as its allocator sees it, tensor by tensor, and the table of activations.
#include <algorithm>
#include <cmath>
#include <deque>

#include "simulator/analytic/inside.h"

namespace shardlab::analytic {
namespace {

int64_t whole(double bytes) { return static_cast<int64_t>(std::llround(bytes)); }

/// Writes events; a handle gives back what it stands for.
class Writer {
 public:
  int32_t take(double bytes, MemoryPart part) {
    sizes_.push_back({whole(bytes), part});
    const auto tensor = static_cast<int32_t>(sizes_.size() - 1);
    if (whole(bytes) > 0) events_.push_back({whole(bytes), tensor, part});
    return tensor;
  }
  void give(int32_t tensor) {
    auto& [bytes, part] = sizes_[static_cast<size_t>(tensor)];
    if (bytes > 0) events_.push_back({-bytes, tensor, part});
    bytes = 0;
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
  };
  std::vector<Size> sizes_;
  std::vector<AllocationEvent> events_;
};

/// What one micro-batch holds between its forward and its backward, layer by layer.
using Held = std::vector<std::vector<int32_t>>;

struct LayerTensors {
  std::vector<double> kept, remade;
  double passing = 0, transient = 0;
};

LayerTensors tensors_of(const Prepared::Inside& in, const LayerKey& key, const LayerCost& cost, bool moe) {
  LayerTensors t{.kept = {}, .remade = {}, .passing = cost.passing, .transient = cost.transient};
  for (const KeptTensor& k : kept_tensors(in.layers(), key, moe).all()) {
    if (k.kept > 0) t.kept.push_back(k.kept);
    if (k.remade > 0) t.remade.push_back(k.remade);
  }
  return t;
}

class Replay {
 public:
  Replay(const Frame& f, const StageGroup& g, const LayerKey& key, Writer& writer)
      : f_(f),
        g_(g),
        writer_(writer),
        dense_(tensors_of(f.in, key, f.block.dense, false)),
        moe_(f.in.shape.moe() ? tensors_of(f.in, key, f.block.moe, true) : LayerTensors{}) {}

  Held forward() {
    Held held(static_cast<size_t>(g_.dense + g_.moe));
    for (size_t i = 0; i < held.size(); ++i) {
      const LayerTensors& t = layer(i);
      for (const double bytes : t.remade) held[i].push_back(writer_.take(bytes, MemoryPart::kTransient));
      std::vector<int32_t> passing = std::move(held[i]);
      held[i].clear();
      for (const double bytes : t.kept) held[i].push_back(writer_.take(bytes, MemoryPart::kActivations));
      const int32_t last = writer_.take(t.passing, MemoryPart::kTransient);
      writer_.give(passing);
      writer_.give(last);
    }
    return held;
  }

  void head() {
    if (!g_.holds_head) return;
    const EndCost& h = f_.block.head;
    const double kept = h.logits - h.at_loss;
    const int32_t input = writer_.take(h.kept - kept, MemoryPart::kActivations);
    const int32_t logits = writer_.take(kept, MemoryPart::kLogits);
    const int32_t gradient = writer_.take(h.at_loss, MemoryPart::kLogits);
    writer_.give(gradient), writer_.give(logits), writer_.give(input);
  }

  void backward(Held held) {
    for (size_t i = held.size(); i-- > 0;) {
      const LayerTensors& t = layer(i);
      std::vector<int32_t> again;
      for (const double bytes : t.remade) again.push_back(writer_.take(bytes, MemoryPart::kTransient));
      const int32_t gradients = writer_.take(t.transient, MemoryPart::kTransient);
      writer_.give(gradients), writer_.give(again), writer_.give(held[i]);
    }
  }

 private:
  const LayerTensors& layer(size_t i) const { return i < static_cast<size_t>(g_.dense) ? dense_ : moe_; }
  const Frame& f_;
  const StageGroup& g_;
  Writer& writer_;
  LayerTensors dense_, moe_;
};

}  // namespace

std::vector<AllocationEvent> events_of(const Frame& f, const StageGroup& g, int32_t stage, const LayerKey& key) {
  Writer writer;
  const MemoryBytes peak = memory_of(f, g, stage, nullptr, nullptr);
  for (const MemoryPart part : {MemoryPart::kParameters, MemoryPart::kGradients, MemoryPart::kMaster, MemoryPart::kMoments,
                                MemoryPart::kBuckets, MemoryPart::kGathered, MemoryPart::kWorkspace})
    writer.take(static_cast<double>(peak[part]), part);
  Replay replay(f, g, key, writer);
  const double flying = in_flight(f.point.schedule, f.point.pp, stage, f.point.grad_accumulation, f.point.vpp);
  const auto most = static_cast<size_t>(std::max(1.0, std::ceil(flying)));
  std::deque<Held> held;
  const auto m = static_cast<size_t>(f.point.grad_accumulation);
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
  return writer.done();
}

std::vector<ActivationItem> items_of(const Frame& f, const LayerKey& key) {
  std::vector<ActivationItem> items;
  for (const bool moe : {false, true}) {
    if (moe ? f.in.shape.moe_layers() == 0 : f.in.shape.moe_layers() == f.in.shape.layers) continue;
    for (const KeptTensor& t : kept_tensors(f.in.layers(), key, moe).all()) {
      const auto same =
          std::find_if(items.begin(), items.end(), [&](const ActivationItem& i) { return i.name == t.name && i.moe == moe; });
      ActivationItem& item = same != items.end() ? *same : items.emplace_back(ActivationItem{t.name, moe, 0, 0});
      item.kept += whole(t.kept), item.remade += whole(t.remade);
    }
  }
  return items;
}

}  // namespace shardlab::analytic
