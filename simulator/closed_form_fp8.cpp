// A layer whose products take factors of 8 bits, op by op: what is rounded, kept rounded, and made again.
//
// Beside what a layer makes there are the factors, each with its scales, for as long as some product reads them, and under current
// scaling the largest size while a scale is found. Which of the moments is the highest depends on all of them, so the tensors are
// followed through the ops, each from the op that makes it to the last that reads it, under every kind of recompute.
#include <array>
#include <string>
#include <string_view>
#include <vector>

#include "simulator/closed_form_parts.h"

namespace shardlab::simulator::forms {
namespace {

constexpr int64_t kBlockWidth = 128;

constexpr int64_t blocks(int64_t n) { return (n + kBlockWidth - 1) / kBlockWidth; }

struct Tensor {
  int64_t bytes = 0;
  bool kept = false;     ///< from forward to backward
  bool crosses = false;  ///< the residual stream or its gradient, at the layer's ends
};

/// One op: what it reads and what it makes.
struct Work {
  std::string_view label;  ///< of a sub-layer; of rounding, the sub-layer that made what is rounded
  Moment moment;
  std::vector<int> reads, makes;
};

/// One product and its factors.
struct Factors {
  int x = -1, y = -1;    ///< the input and the result
  int dy = -1, dx = -1;  ///< their gradients
  int64_t in = 0, out = 0;
  bool bias = false;
  int qx = -1, sx = -1, qw = -1, sw = -1;  ///< what is rounded, and scales where a layer holds them
};

class LayerWalk {
 public:
  LayerWalk(const Case& c, const Sizes& n, bool full)
      : c_(c), n_(n), full_(full), block_(c.train.fp8_scaling == "block"), current_(c.train.fp8_scaling == "current") {
    build();
    const bool selective = c.layout.recompute == Recompute::kSelective;
    const std::string& named = c.layout.recompute_options.modules;
    if (selective) labels_ = " " + (named.empty() ? "attn.core" : named) + " ";
    for (const Work& w : forward_)
      for (const int t : w.makes)
        if (!is_scale_[static_cast<size_t>(t)] && (full_ || is_named(w.label))) tensors_[static_cast<size_t>(t)].kept = false;
  }

  LayerForm form() const {
    LayerForm form;
    for (const Tensor& t : tensors_)
      if (t.kept) form.kept += t.bytes;
    form.forward = highest_of(forward_, true);
    form.backward = highest_of(full_ ? all_again() : with_again(), false);
    return form;
  }

 private:
  bool is_named(std::string_view label) const {
    return !label.empty() && labels_.find(" " + std::string(label) + " ") != std::string::npos;
  }

  int add(int64_t bytes, bool kept = false, bool crosses = false, bool scale = false) {
    tensors_.push_back({bytes, kept, crosses});
    is_scale_.push_back(scale);
    return static_cast<int>(tensors_.size()) - 1;
  }
  int stream() { return add(n_.x, false, true); }

  /// Rounds an activation or a gradient [tokens, columns] after `work`: a scale and the values, or the values with their scales.
  struct Rounded {
    int values, scales;
  };
  Rounded round(std::vector<Work>& ops, Moment moment, std::string_view label, int from, int64_t elements, int64_t scales,
                bool keep, bool keep_scale) {
    const int values = add(held(elements, 1), keep);
    int scale = -1;
    if (block_) {
      scale = add(held(scales), keep);
      ops.push_back({label, moment, reads_of({from}), {values, scale}});
      return {values, scale};
    }
    if (current_) {
      const int amax = add(kScalar);
      scale = add(kScalar, keep_scale, false, keep_scale);
      ops.push_back({"", moment, reads_of({from}), {amax}});
      ops.push_back({"", moment, {amax}, {scale}});
    }
    ops.push_back({label, moment, reads_of({from, scale}), {values}});
    return {values, scale};
  }
  static std::vector<int> reads_of(std::initializer_list<int> tensors) {
    std::vector<int> reads;
    for (const int t : tensors)
      if (t >= 0) reads.push_back(t);
    return reads;
  }

  /// A product in forward, after what rounds its factors. `made_by` made its input.
  void multiply(Factors& f, std::string_view made_by) {
    constexpr Moment m = Moment::kForwardLayer;
    const Rounded x = round(forward_, m, made_by, f.x, n_.tokens * f.in, n_.tokens * blocks(f.in), true, true);
    const Rounded w = round(forward_, m, "", -1, f.in * f.out, blocks(f.in) * blocks(f.out), false, true);
    f.qx = x.values, f.sx = x.scales, f.qw = w.values, f.sw = w.scales;
    forward_.push_back({"", m, reads_of({f.qx, f.qw, f.sx, f.sw}), {f.y}});
  }

  /// Its backward: of the input, then of the weight, which makes nothing here.
  void multiply_back(const Factors& f, Moment moment) {
    const Rounded dy = round(backward_, moment, "", f.dy, n_.tokens * f.out, n_.tokens * blocks(f.out), false, false);
    backward_.push_back({"again", moment, block_ ? std::vector<int>{} : reads_of({f.sw}),
                         block_ ? std::vector<int>{f.qw, f.sw} : std::vector<int>{f.qw}});
    backward_.push_back({"", moment, reads_of({dy.values, f.qw, dy.scales, f.sw}), {f.dx}});
    backward_.push_back({"", moment, reads_of({f.qx, dy.values, f.sx, dy.scales, f.bias ? f.dy : -1}), {}});
  }

  void build() {
    const Model& m = c_.model;
    const int64_t t = c_.layout.tp, h = m.hidden;
    const bool gpt = !m.is_llama(), dropout = c_.train.dropout > 0;
    constexpr Moment f = Moment::kForwardLayer;
    const int x = stream(), y = stream();
    const int n1 = add(n_.x), st1 = add(n_.statistics, true), qkv = add(n_.qkv, true), o = add(n_.o, true),
              lse = add(n_.log_sum_exp, true), z1 = add(n_.x), x1 = add(n_.x, true), n2 = add(n_.x), st2 = add(n_.statistics, true),
              u = add(n_.u, true), a = add(n_.a), z2 = add(n_.x);
    const int dy = stream(), dx = stream(), da = add(n_.a), du = add(n_.u), dn2 = add(n_.x), dx1 = add(n_.x), d_o = add(n_.o),
              dqkv = add(n_.qkv), dn1 = add(n_.x);
    const int dz2 = dropout ? add(n_.x) : dy, dz1 = dropout ? add(n_.x) : dx1;
    const int64_t rows = m.qkv_rows() / t, heads = m.heads * m.head_dim / t, up = m.up_rows() / t, ffn = m.ffn / t;
    Factors in{.x = n1, .y = qkv, .dy = dqkv, .dx = dn1, .in = h, .out = rows, .bias = gpt},
        out{.x = o, .y = z1, .dy = dz1, .dx = d_o, .in = heads, .out = h},
        raise{.x = n2, .y = u, .dy = du, .dx = dn2, .in = h, .out = up, .bias = gpt},
        lower{.x = a, .y = z2, .dy = dz2, .dx = da, .in = ffn, .out = h};

    forward_.push_back({"attn.norm", f, {x}, {n1, st1}});
    multiply(in, "attn.norm");
    forward_.push_back({"attn.core", f, {qkv}, {o, lse}});
    multiply(out, "attn.core");
    forward_.push_back({"", f, {x, z1}, {x1}});
    forward_.push_back({"mlp.norm", f, {x1}, {n2, st2}});
    multiply(raise, "mlp.norm");
    forward_.push_back({"mlp.act", f, {u}, {a}});
    multiply(lower, "mlp.act");
    forward_.push_back({"", f, {x1, z2}, {y}});

    if (dropout) backward_.push_back({"", Moment::kBackwardDown, {dy}, {dz2}});
    multiply_back(lower, Moment::kBackwardDown);
    backward_.push_back({"", Moment::kBackwardActivation, {da, u}, {du}});
    multiply_back(raise, Moment::kBackwardUp);
    backward_.push_back({"", Moment::kBackwardUp, {dn2, x1, st2, dy}, {dx1}});
    if (dropout) backward_.push_back({"", Moment::kBackwardAttention, {dx1}, {dz1}});
    multiply_back(out, Moment::kBackwardAttention);
    backward_.push_back({"", Moment::kBackwardAttention, {d_o, o, lse, qkv}, {dqkv}});
    multiply_back(in, Moment::kBackwardAttention);
    backward_.push_back({"", Moment::kBackwardAttention, {dn1, x, st1, dx1}, {dx}});
    input_ = x, result_ = dx;
  }

  bool makes_any(const Work& w, const std::vector<bool>& wanted) const {
    return std::ranges::any_of(w.makes, [&](int t) { return wanted[static_cast<size_t>(t)]; });
  }

  /// Forward ops, in order, that make what is wanted of what is not there.
  std::vector<Work> again(std::vector<bool> wanted, const std::vector<bool>& there) const {
    std::vector<Work> ops;
    for (auto w = forward_.rbegin(); w != forward_.rend(); ++w) {
      std::vector<bool> missing = wanted;
      for (size_t t = 0; t < missing.size(); ++t) missing[t] = missing[t] && !there[t];
      if (!makes_any(*w, missing)) continue;
      for (const int t : w->reads) wanted[static_cast<size_t>(t)] = true;
      ops.insert(ops.begin(), *w);
    }
    return ops;
  }
  std::vector<bool> kept() const {
    std::vector<bool> there(tensors_.size());
    for (size_t t = 0; t < there.size(); ++t) there[t] = tensors_[t].kept || tensors_[t].crosses;
    return there;
  }

  /// Backward of a layer that is made again as a whole, first: a weight that forward rounds again need not be rounded later.
  std::vector<Work> all_again() const {
    std::vector<bool> wanted(tensors_.size()), made(tensors_.size());
    for (const Work& w : backward_)
      if (w.label != "again")
        for (const int t : w.reads) wanted[static_cast<size_t>(t)] = true;
    for (const Work& w : backward_)
      if (w.label == "again")
        for (const int t : w.makes) wanted[static_cast<size_t>(t)] = false;
    std::vector<Work> ops = again(wanted, kept());
    for (const Work& w : ops)
      for (const int t : w.makes) made[static_cast<size_t>(t)] = true;
    for (Work& w : ops) w.moment = Moment::kBackwardDown;
    for (const Work& w : backward_)
      if (w.label != "again" || !makes_any(w, made)) ops.push_back(w);
    return ops;
  }

  /// What was given up, before the first op that reads it.
  std::vector<Work> with_again() const {
    std::vector<Work> ops;
    std::vector<bool> there = kept();
    for (const Work& w : backward_)
      for (const int t : w.makes) there[static_cast<size_t>(t)] = true;  // in time
    for (const Work& w : backward_) {
      std::vector<bool> wanted(tensors_.size());
      for (const int t : w.reads) wanted[static_cast<size_t>(t)] = true;
      for (Work& f : again(wanted, there)) {
        for (const int t : f.makes) there[static_cast<size_t>(t)] = true;
        f.moment = w.moment;
        ops.push_back(std::move(f));
      }
      ops.push_back(w);
    }
    return ops;
  }

  Live live(size_t t) const {
    return tensors_[t].kept || tensors_[t].crosses ? activation(tensors_[t].bytes) : temporary(tensors_[t].bytes);
  }

  /// The highest moment of a row of ops beyond what was there before them. Forward leaves what is kept and its output; backward
  /// gives everything back but its result.
  Rise highest_of(const std::vector<Work>& ops, bool forward) const {
    std::vector<size_t> last(tensors_.size(), ops.size());
    for (size_t i = 0; i < ops.size(); ++i)
      for (const auto* tensors : {&ops[i].reads, &ops[i].makes})
        for (const int t : *tensors) last[static_cast<size_t>(t)] = i;
    std::vector<bool> there(tensors_.size());
    Rise best{ops.front().moment, {}};
    Live now;
    for (size_t i = 0; i < ops.size(); ++i) {
      for (const int t : ops[i].makes) now = now + live(static_cast<size_t>(t));
      best = highest({best, {ops[i].moment, now}});
      for (size_t t = 0; t < tensors_.size(); ++t) {
        const bool stays = forward ? tensors_[t].kept || tensors_[t].crosses : static_cast<int>(t) == result_;
        if (last[t] == i && !stays) now = now - live(t);
      }
    }
    return best;
  }

  const Case& c_;
  const Sizes& n_;
  bool full_, block_, current_;
  std::string labels_;
  std::vector<Tensor> tensors_;
  std::vector<bool> is_scale_;  ///< one number, kept whatever is made again
  std::vector<Work> forward_, backward_;
  int input_ = -1, result_ = -1;
};

}  // namespace

LayerForm fp8_layer(const Case& c, const Sizes& n, bool full) { return LayerWalk(c, n, full).form(); }

}  // namespace shardlab::simulator::forms
