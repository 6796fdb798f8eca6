// A layer whose backward makes some sub-layers again (selective recompute), op by op.
//
// What stands at once depends on which sub-layers are given up: a score or a mask is gone before the next is made. So the moments
// are not named in advance: the sixteen tensors of a layer are followed through its ops, each from the op that makes it to the last
// that reads it, and the highest moment is taken.
#include <array>
#include <string>
#include <string_view>

#include "simulator/closed_form_parts.h"

namespace shardlab::simulator::forms {
namespace {

enum Tensor : uint8_t {
  kX,
  kNorm1,
  kStats1,
  kQkv,
  kO,
  kLse,
  kZ1,
  kX1,
  kNorm2,
  kStats2,
  kU,
  kA,
  kZ2,
  kY,  // forward
  kDy,
  kDz2,
  kDa,
  kDu,
  kDNorm2,
  kDx1,
  kDz1,
  kDo,
  kDqkv,
  kDNorm1,
  kDx,  // backward
  kTensors,
};

/// One op: what it reads and what it makes.
struct Work {
  std::string_view label;
  Moment moment;
  std::vector<Tensor> reads, makes;
};

std::vector<Work> forward_of_layer() {
  constexpr Moment f = Moment::kForwardLayer;
  return {{"attn.norm", f, {kX}, {kNorm1, kStats1}},
          {"attn.qkv", f, {kNorm1}, {kQkv}},
          {"attn.core", f, {kQkv}, {kO, kLse}},
          {"attn.out", f, {kO}, {kZ1}},
          {"attn.residual", f, {kX, kZ1}, {kX1}},
          {"mlp.norm", f, {kX1}, {kNorm2, kStats2}},
          {"mlp.up", f, {kNorm2}, {kU}},
          {"mlp.act", f, {kU}, {kA}},
          {"mlp.down", f, {kA}, {kZ2}},
          {"mlp.residual", f, {kX1, kZ2}, {kY}}};
}

/// Gradients of weights make nothing here. With dropout the gradient of a branch is a masked copy of the residual stream's.
std::vector<Work> backward_of_layer(bool dropout) {
  using enum Moment;
  const Tensor dz2 = dropout ? kDz2 : kDy, dz1 = dropout ? kDz1 : kDx1;
  std::vector<Work> ops;
  if (dropout) ops.push_back({"mask", kBackwardDown, {kDy}, {kDz2}});
  for (Work w : std::vector<Work>{{"mlp.down", kBackwardDown, {dz2}, {kDa}},
                                  {"mlp.down", kBackwardDown, {kA, dz2}, {}},
                                  {"mlp.act", kBackwardActivation, {kDa, kU}, {kDu}},
                                  {"mlp.up", kBackwardUp, {kDu}, {kDNorm2}},
                                  {"mlp.up", kBackwardUp, {kNorm2, kDu}, {}},
                                  {"mlp.norm", kBackwardUp, {kDNorm2, kX1, kStats2}, {}},
                                  {"mlp.norm", kBackwardUp, {kDNorm2, kX1, kStats2, kDy}, {kDx1}}})
    ops.push_back(std::move(w));
  if (dropout) ops.push_back({"mask", kBackwardAttention, {kDx1}, {kDz1}});
  for (Work w : std::vector<Work>{{"attn.out", kBackwardAttention, {dz1}, {kDo}},
                                  {"attn.out", kBackwardAttention, {kO, dz1}, {}},
                                  {"attn.core", kBackwardAttention, {kDo, kO, kLse, kQkv}, {kDqkv}},
                                  {"attn.qkv", kBackwardAttention, {kDqkv}, {kDNorm1}},
                                  {"attn.qkv", kBackwardAttention, {kNorm1, kDqkv}, {}},
                                  {"attn.norm", kBackwardAttention, {kDNorm1, kX, kStats1}, {}},
                                  {"attn.norm", kBackwardAttention, {kDNorm1, kX, kStats1, kDx1}, {kDx}}})
    ops.push_back(std::move(w));
  return ops;
}

class LayerWalk {
 public:
  LayerWalk(const Case& c, const Sizes& n, unsigned sub_layers) : dropout_(c.train.dropout > 0) {
    bytes_ = {n.x, n.x, n.statistics, n.qkv, n.o, n.log_sum_exp, n.x, n.x, n.x, n.statistics, n.u, n.a, n.x,
              n.x, n.x, n.x,          n.a,   n.u, n.x,           n.x, n.x, n.o, n.qkv,        n.x, n.x};
    const std::string labels = " " + modules_of(sub_layers) + " ";
    kept_.fill(false);
    for (const Work& w : forward_of_layer()) {
      const bool again = labels.find(" " + std::string(w.label) + " ") != std::string::npos;
      for (const Tensor t : w.makes) kept_[t] = !again;
    }
    kept_[kZ1] = kept_[kZ2] = kept_[kY] = false;
  }

  LayerForm form() const {
    LayerForm form;
    for (size_t t = 0; t < kTensors; ++t)
      if (kept_[t]) form.kept += bytes_[t];
    form.forward = highest_of(forward_of_layer(), true);
    form.backward = highest_of(with_again(backward_of_layer(dropout_)), false);
    return form;
  }

 private:
  /// Each sub-layer that was given up, before the first op that reads what it makes.
  std::vector<Work> with_again(const std::vector<Work>& backward) const {
    std::vector<Work> ops;
    std::array<bool, kTensors> there = kept_;
    for (const Work& w : backward) {
      for (const Work& f : forward_of_layer()) {
        const bool missing = std::ranges::any_of(
            f.makes, [&](Tensor t) { return t < kDy && !there[t] && std::ranges::find(w.reads, t) != w.reads.end(); });
        if (!missing) continue;
        ops.push_back({f.label, w.moment, f.reads, f.makes});
        for (const Tensor t : f.makes) there[t] = true;
      }
      ops.push_back(w);
    }
    return ops;
  }

  /// In which class a tensor counts: what crosses segments is an activation.
  Live live(size_t t) const {
    return kept_[t] || t == kX || t == kY || t == kDy || t == kDx ? activation(bytes_[t]) : temporary(bytes_[t]);
  }

  /// The highest moment of a row of ops beyond what was there before them. Forward leaves what is kept and its output; backward
  /// gives everything back but its result.
  Rise highest_of(const std::vector<Work>& ops, bool forward) const {
    std::array<size_t, kTensors> last{};
    for (size_t i = 0; i < ops.size(); ++i)
      for (const auto* tensors : {&ops[i].reads, &ops[i].makes})
        for (const Tensor t : *tensors) last[t] = i;
    Rise best{ops.front().moment, {}};
    Live now;
    for (size_t i = 0; i < ops.size(); ++i) {
      for (const Tensor t : ops[i].makes) now = now + live(t);
      best = highest({best, {ops[i].moment, now}});
      for (size_t t = 0; t < kTensors; ++t) {
        const bool stays = forward ? kept_[t] || t == kX || t == kY : t == kDx;
        if (last[t] == i && used(ops[i], t) && !stays) now = now - live(t);
      }
    }
    return best;
  }

  static bool used(const Work& op, size_t t) {
    return std::ranges::find(op.reads, t) != op.reads.end() || std::ranges::find(op.makes, t) != op.makes.end();
  }

  bool dropout_;
  std::array<int64_t, kTensors> bytes_{};
  std::array<bool, kTensors> kept_{};
};

}  // namespace

LayerForm selective_layer(const Case& c, const Sizes& n, unsigned again) { return LayerWalk(c, n, again).form(); }

}  // namespace shardlab::simulator::forms
