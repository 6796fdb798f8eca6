// Prices a layer's kernels one by one by the device and the fabric: what the files of `block_cost` share. Sizes are per rank; `e`
// is bytes of a 16-bit element, 4 in fp32.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <initializer_list>

#include "simulator/estimator/analytic/layer.h"

namespace shardlab::simulator::analytic {

/// Sizes of one layer on one rank, in elements.
struct Sizes {
  Sizes(const ModelShape& s, const LayerKey& k)
      : t(k.tp),
        c(k.cp),
        tokens(of(k.micro_batch) * of(k.seq_len) / c),
        h(of(s.hidden)),
        residual(tokens * h / (k.sequence_parallel ? t : 1)),
        q(of(s.heads) * of(s.qk_dim()) / t),
        kv_heads(std::max(of(s.kv_heads) / t, 1.0)),
        k_width(s.latent() ? q : kv_heads * of(s.head_dim)),
        v_width(s.latent() ? of(s.heads) * of(s.v_dim) / t : kv_heads * of(s.head_dim)),
        o(of(s.heads) * of(s.value_dim()) / t),
        heads(of(s.heads) / t) {}

  double t, c;
  double tokens, h;
  double residual;  ///< of the residual stream where norms, dropout and additions work
  double q, kv_heads, k_width, v_width, o, heads;
  double qkv() const { return q + k_width + v_width; }
};

/// Bytes a rank of g sends in a ring for `bytes` of full buffer.
inline double ring_bytes(double bytes, double g) { return bytes * (g - 1) / g; }

class Pricer {
 public:
  Pricer(const LayerStudy& study, const LayerKey& key)
      : shape_(study.shape),
        p_(study.profile),
        host_(study.host),
        device_(study.device),
        fabric_(study.fabric),
        attention_rate_(std::max(0.01, p_.attention.rate)),
        slowest_(device_.slowest_of(key.devices)),
        key_(key),
        n_(study.shape, key),
        fp32_(key.precision == Precision::kFp32),
        e_(fp32_ ? 4 : 2),
        wide_(fp32_ ? 2 : 1),
        low_(key.precision == Precision::kFp8 || key.precision == Precision::kFp4),
        tensor_group_(group_of(key.tp, 1, fabric_.devices_per_node())),
        context_group_(group_of(key.cp, key.tp, fabric_.devices_per_node())),
        expert_group_(group_of(key.ep, key.expert_tp, fabric_.devices_per_node())) {}

  LayerCost layer(bool moe) const {
    LayerCost cost;
    matmul_s_ = matmul_squares_ = late_s_ = attention_s_ = 0;
    add_state(moe, cost);
    add_norms(cost);
    add_attention(cost);
    moe ? add_experts(cost) : add_feed_forward(cost);
    cost.matmuls = std::min(1.0, matmul_s_ / cost.compute_s());
    cost.attention = std::min(1 - cost.matmuls, attention_s_ / cost.compute_s());
    cost.matmul_s = matmul_s_ > 0 ? matmul_squares_ / matmul_s_ : 0;
    cost.late_s = late_s_;
    add_tensor_exchange(moe, cost);
    add_host(moe, cost);
    add_kept(moe, cost);
    cost.shapes = feed_forward_shapes(moe);
    return cost;
  }
  KeptTensors kept(bool moe) const;
  EndCost embedding() const;
  EndCost head() const;
  /// Elements of one matrix of each shape of the projections of attention, of the feed-forward.
  double attention_shapes() const;
  double feed_forward_shapes(bool moe) const;
  EndCost loss() const;
  double logits() const { return e_ * n_.tokens * of(vocab_rows()); }
  bool scatters() const { return p_.overlap.scatter_gather && key_.tp > 1 && !key_.sequence_parallel; }
  double boundary() const { return e_ * n_.residual / (scatters() ? n_.t : 1); }
  double boundary_gather_s() const {
    return scatters() ? collective_s(CollectiveUse::kAllGather, e_ * n_.residual, tensor_group_) : 0;
  }

 private:
  double collective_s(CollectiveUse kind, double bytes, const Group& group) const {
    return fabric_.collective_seconds(kind, bytes, group, {p_.model.own_collectives, key_.algorithm});
  }

  // Kernels.
  /// The weight gradient is added into the accumulated one by the matmul itself where the profile fuses it.
  DeviceModel::Waited waited(double m, double n, double k, Product product, double batch = 1) const {
    Matmul x{.m = m, .n = n, .k = k, .batch = batch, .precision = key_.precision, .product = product, .slowest = slowest_};
    x.grouped = batch > 1;
    x.tf32 = p_.model.fp32_tensor_cores;
    x.out_bytes = product == Product::kWeight && p_.overlap.wgrad_fused > 0 ? p_.state.gradient : e_;
    x.accumulate = product == Product::kWeight && p_.overlap.wgrad_fused > 0;
    return device_.matmul_waited(x);
  }
  double matmul(double m, double n, double k, Product product) const { return waited(m, n, k, product).seconds; }
  double moved(double elements, double passes, double launches, MemoryKernel kind = MemoryKernel::kElementwise) const {
    return passes <= 0 ? 0 : device_.memory_bound_seconds(elements * passes * wide_, std::max(launches, 1.0), kind);
  }

  /// The argument of a linear that sequence parallelism gathers: the input of a column-parallel one, else the gradient
  /// of the result.
  enum class Gathered { kNothing, kInput, kGradient };
  /// y = x w^T for `tokens` rows; `batch` of them for experts. Adds the three matmuls, weight casts, quantisation.
  struct Linear {
    double rows, in, out;
    double batch = 1;
    bool remade = false;
    bool frozen = false;
    bool shares_input = false;  ///< with the projection before it
    Gathered gathered = Gathered::kNothing;
  };
  void add_linear(const Linear& l, LayerCost& cost) const {
    const double input = l.rows * l.in * l.batch, result = l.rows * l.out * l.batch, weight = l.in * l.out * l.batch;
    const Quantised quantised = quantise(l, input, result, weight);
    const double whole = l.frozen ? made_whole(weight) : 0;
    const double cast = (l.frozen ? 0 : moved(weight, p_.passes.cast, 1)) + quantised.weight_s + whole;
    const double forward =
        counted(waited(l.rows, l.out, l.in, Product::kForward, l.batch), l.remade ? 2 : 1) + quantised.input_s + cast;
    cost.forward.compute_s += forward;
    cost.forward.tensor_s += quantised.agreed_s;
    if (l.remade) cost.recompute.compute_s += forward, cost.recompute.tensor_s += quantised.agreed_s;
    cost.input.tensor_s += quantised.gradient_agreed_s;
    cost.input.compute_s += counted(waited(l.rows, l.in, l.out, Product::kInput, l.batch)) + quantised.gradient_s +
                            (low_ ? moved(input, p_.passes.rescale, 1) : 0) + whole;
    if (l.frozen) return;
    cost.weight.compute_s += counted(waited(l.out, l.in, l.rows, Product::kWeight, l.batch)) + quantised.columns_s +
                             (low_ ? moved(weight, p_.passes.rescale, 1) : 0);
    if (shape_.biases) cost.weight.compute_s += moved(result, p_.passes.bias, 1);
    cost.weight.compute_s += accumulated(weight);
  }
  /// A frozen weight of few bits becomes one of 16 for each product that reads it.
  double made_whole(double elements) const {
    const Trained& t = shape_.trained;
    return t.frozen_bits < 16 ? device_.memory_bound_seconds(elements * (t.frozen_bytes() + e_), 1) : 0;
  }
  /// The adapter of a projection of `in` by `out`, where it has one: two products of rank r forward, four backward, and two sums.
  void add_adapter(int projection, const Linear& l, LayerCost& cost) const {
    if (!shape_.trained.adapts(projection)) return;
    const double r = of(shape_.trained.rank);
    const auto seconds = [&](double m, double n, double k, Product product) { return counted(waited(m, n, k, product, l.batch)); };
    const double sum = moved(l.rows * l.out * l.batch, 3, 1), sum_back = moved(l.rows * l.in * l.batch, 3, 1);
    const double forward = seconds(l.rows, r, l.in, Product::kForward) + seconds(l.rows, l.out, r, Product::kForward) + sum;
    cost.forward.compute_s += forward;
    if (l.remade) cost.recompute.compute_s += forward;
    cost.input.compute_s += seconds(l.rows, r, l.out, Product::kInput) + seconds(l.rows, l.in, r, Product::kInput) + sum_back;
    cost.weight.compute_s += seconds(l.out, r, l.rows, Product::kWeight) + seconds(r, l.in, l.rows, Product::kWeight);
  }
  /// Whether the weight gradient of one of the projections of a module, or of an adapter beside it, reads the projection's input.
  bool reads_input(Trained::Module m, int projections) const {
    return !shape_.trained.freezes(m) || shape_.trained.adapts(projections);
  }
  /// The cost of narrow arguments of one linear's matmuls: kernels that make them, and the ranks' agreement on a scale.
  struct Quantised {
    double input_s = 0;     ///< whenever forward runs
    double weight_s = 0;    ///< the same
    double columns_s = 0;   ///< of the input, for the weight gradient
    double gradient_s = 0;  ///< of the result's gradient, for both matmuls of backward
    double agreed_s = 0;    ///< on the scales of input and weight
    double gradient_agreed_s = 0;
  };
  Quantised quantise(const Linear& l, double input, double result, double weight) const;
  /// A weight gradient that no matmul adds to the accumulated one: it is read, the other read and written.
  double accumulated(double elements) const {
    if (p_.overlap.wgrad_fused > 0 || !p_.overlap.wgrad_added) return 0;
    return device_.memory_bound_seconds(elements * (e_ + 2 * p_.state.gradient), 1);
  }
  /// Projections of one input: one product, or one each where the profile splits them, whose input gradients are then added.
  void add_linears(Linear l, std::initializer_list<double> widths, LayerCost& cost) const {
    if (!p_.model.split_projections) {
      l.out = 0;
      for (const double width : widths) l.out += width;
      return add_linear(l, cost);
    }
    for (const double width : widths) {
      l.out = width;
      add_linear(l, cost);
      l.shares_input = true;
    }
    const double passes =
        p_.passes.summed * of(static_cast<int64_t>(widths.size()) - 1) + (key_.tp > 1 ? p_.passes.summed_sent : 0);
    cost.input.compute_s += moved(l.rows * l.in * l.batch, passes, 1);
  }
  /// Whether linears keep what they read in 8 bits.
  bool narrow_inputs() const { return low_ && p_.saved.fp8_inputs; }
  /// Whether attention is unfused and no kernel does its whole softmax at once.
  bool softmax_apart() const {
    if (p_.attention.fused) return false;
    const auto batch = static_cast<int64_t>(std::llround(n_.heads)) * key_.micro_batch;
    return (p_.attention.softmax_keys > 0 && key_.seq_len > p_.attention.softmax_keys) ||
           batch % std::max<int64_t>(1, p_.attention.softmax_multiple) != 0;
  }
  bool remade(Recompute::Module m) const { return key_.recompute.has(m); }
  bool alternate() const { return key_.recompute.modules & Recompute::kAlternate; }

  double norm_backward() const {
    const MemoryKernel kind = p_.passes.norm_persistent ? MemoryKernel::kNorm : MemoryKernel::kNormBackward;
    return moved(n_.residual, p_.passes.norm_backward, p_.launch.norm_backward, kind);
  }
  void add_norms(LayerCost& cost) const {
    const double forward = moved(n_.residual, p_.passes.norm, p_.launch.norm, MemoryKernel::kNorm);
    const double back = norm_backward();
    const double add = moved(n_.residual, p_.passes.residual, p_.launch.residual);
    const double add_back = moved(n_.residual, p_.passes.residual_backward, p_.launch.residual_backward);
    const double norms = shape_.post_norms ? 4 : 2;
    cost.forward.compute_s += norms * forward + 2 * add;
    cost.input.compute_s += norms * back + 2 * add_back;
    if (remade(Recompute::kNorms) || alternate()) cost.recompute.compute_s += norms * forward;
    if (key_.recompute.full()) cost.recompute.compute_s += 2 * add;
    if (alternate()) cost.recompute.compute_s += add;
  }

  void add_attention(LayerCost& cost) const;
  void add_projections(LayerCost& cost) const;
  void add_core(LayerCost& cost) const;
  void add_context_exchange(double core_forward, double core_backward, LayerCost& cost) const;
  void add_context_gather(double core_forward, double core_backward, LayerCost& cost) const;
  void add_feed_forward(LayerCost& cost) const;
  /// Adds the dense feed-forward if `experts` is 0, else that many experts of this rank, with `rows` rows each.
  void add_mlp(Trained::Module module, double rows, double width, double experts, bool remade_up, bool remade_all,
               LayerCost& cost) const;
  void add_experts(LayerCost& cost) const;
  /// Rows of an exchange among experts: copies of tokens, tokens times weights, rows that are neither, or rows that come back.
  enum class Rows : uint8_t { kCopies, kWeighed, kGo, kReturn };
  /// Seconds of an exchange, and bytes that a rank sends in it.
  struct Exchanged {
    double seconds = 0, bytes = 0;
  };
  Exchanged exchanged(double tokens, double rows, Rows what) const;
  /// Rows that tokens make for routed experts, of what the router chose: where experts have a capacity, at most what it lets in.
  double rows_of(double tokens) const {
    const double taken = shape_.capacity_factor > 0 ? std::min(1.0, shape_.capacity_factor) : 1;
    return tokens * static_cast<double>(shape_.top_k) * taken;
  }
  /// Whether the ranks that cut an expert route the same tokens, those of all of them, and have their slice's rows of these. shardlab's executor
  /// does so; others gather the rows that ranks received for a part of the tokens each.
  bool slices_route_alike() const { return p_.model.own_collectives && key_.expert_tp > 1; }
  /// Whether these are the tokens of all ranks of tp, which a feed-forward takes too: experts are cut as it is.
  bool slices_take_all_tokens() const { return slices_route_alike() && key_.expert_tp == key_.tp; }
  /// Of a rank, a layer and a micro-batch: tokens that it routes, rows that they make, and rows that its experts work at.
  struct Routed {
    double tokens = 0, sent = 0, received = 0;
  };
  Routed routed() const {
    const double own = key_.sequence_parallel ? n_.tokens / n_.t : n_.tokens, whole = std::min(n_.tokens, own * key_.expert_tp);
    const double tokens = slices_route_alike() ? whole : own, sent = rows_of(tokens);
    return {tokens, sent, sent * skew() * (slices_route_alike() ? 1 : key_.expert_tp)};
  }
  /// Rows that a rank's experts have room for, of a layer and a micro-batch. Frameworks allocate what comes. Buffers of shardlab's plans have
  /// room for all rows of all ranks that share the experts, or for what a capacity lets in (docs/experts.md, "Room for rows").
  double room() const {
    if (!p_.model.own_collectives || key_.ep == 1) return routed().received;
    if (shape_.capacity_factor <= 0) return static_cast<double>(key_.ep) * routed().sent;
    const int64_t here = std::max<int64_t>(1, shape_.experts / key_.ep);
    const Experts experts{
        .count = shape_.experts, .top_k = shape_.top_k, .capacity_factor = static_cast<float>(shape_.capacity_factor)};
    const double parts = n_.c * static_cast<double>(key_.tp / key_.expert_tp);  // of a sequence, one with each rank or group
    return static_cast<double>(key_.ep) / parts * static_cast<double>(key_.micro_batch) *
           static_cast<double>(experts.most_rows(key_.seq_len, here));
  }
  /// Rows of the busiest expert-parallel rank over the mean: its experts take no more than their capacity.
  double skew() const {
    return shape_.capacity_factor > 0 ? std::min(key_.expert_skew, std::max(1.0, shape_.capacity_factor)) : key_.expert_skew;
  }
  /// Seconds of the matmuls that read a gathered input, and of the matmuls whose results are scattered.
  struct CutMatmuls {
    double gathered = 0, scattered = 0;
  };
  CutMatmuls cut_matmuls() const;
  /// A matmul that the layer runs `times`.
  double counted(const DeviceModel::Waited& x, double times = 1) const {
    matmul_s_ += times * x.seconds, matmul_squares_ += times * x.seconds * x.seconds, late_s_ += times * x.late;
    return x.seconds;
  }
  /// Compute lost while `hidden` seconds of an exchange of `exchange` run beside a matmul that alone takes `matmul`.
  double lost(double hidden, double exchange, double matmul) const {
    const double taken = fabric_.contention(CollectiveUse::kAllReduce, tensor_group_).taken_sms;
    return hidden * device_.lost_beside(taken, exchange, matmul);
  }
  void add_tensor_exchange(bool moe, LayerCost& cost) const;
  void add_sequence_exchange(double pairs, bool moe, LayerCost& cost) const;
  /// Seconds of the input gradient and the weight gradient of one linear.
  struct Shelter {
    double input_s = 0, weight_s = 0;
  };
  Shelter shelter(int pair, bool moe) const;
  double adapters(bool moe) const;
  void add_host(bool moe, LayerCost& cost) const;
  void add_kept(bool moe, LayerCost& cost) const;
  void add_state(bool moe, LayerCost& cost) const;
  /// Rows of the table on one rank, padding included.
  int64_t vocab_rows() const {
    const int64_t cut = p_.model.vocab_parallel ? key_.tp : 1;
    const int64_t unit = std::max<int64_t>(1, static_cast<int64_t>(p_.model.vocab_multiple)) * cut;
    return (shape_.vocab + unit - 1) / unit * unit / cut;
  }
  /// Bytes that a column-parallel matmul keeps of its gathered input, if the input is not gathered again in backward.
  double gathered_input() const { return key_.sequence_parallel && key_.tp > 1 ? p_.saved.gathered * wide_ * n_.tokens * n_.h : 0; }
  void kept_by_attention(KeptTensors& kept) const;
  void kept_by_feed_forward(bool moe, KeptTensors& kept) const;

  const ModelShape& shape_;
  const FrameworkProfile& p_;
  const FrameworkProfile::Host& host_;
  const DeviceModel& device_;
  const Fabric& fabric_;
  double attention_rate_;
  double slowest_;  ///< time of a matmul on the slowest of all devices, relative to the typical device
  const LayerKey& key_;
  Sizes n_;
  /// Of the layer in work: seconds of matmuls, the sum of their squares, seconds that they are late, seconds of fused attention.
  mutable double matmul_s_ = 0, matmul_squares_ = 0, late_s_ = 0, attention_s_ = 0;
  bool fp32_;
  double e_, wide_;
  bool low_;
  Group tensor_group_, context_group_, expert_group_;
};

}  // namespace shardlab::simulator::analytic
