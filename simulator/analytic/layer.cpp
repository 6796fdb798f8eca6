// A layer's kernels one by one, priced by the device and the fabric. Sizes are per rank; `e` is bytes of a 16-bit element, 4 in
// fp32.
#include "simulator/analytic/layer.h"

#include <algorithm>
#include <cmath>
#include <tuple>

namespace shardlab::analytic {
namespace {

double of(int64_t v) { return static_cast<double>(v); }

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
double ring_bytes(double bytes, double g) { return bytes * (g - 1) / g; }

class Pricer {
 public:
  Pricer(const LayerStudy& study, const LayerKey& key)
      : shape_(study.shape),
        p_(study.profile),
        device_(study.device),
        fabric_(study.fabric),
        attention_rate_(std::max(0.01, p_.attention_rate)),
        key_(key),
        n_(study.shape, key),
        crowd_(fabric_.contention(CollectiveUse::kAllGather, study.everyone)),
        fp32_(key.precision == Precision::kFp32),
        e_(fp32_ ? 4 : 2),
        wide_(fp32_ ? 2 : 1),
        low_(key.precision == Precision::kFp8 || key.precision == Precision::kFp4),
        tensor_group_(group_of(key.tp, 1, fabric_.devices_per_node())),
        context_group_(group_of(key.cp, key.tp, fabric_.devices_per_node())),
        expert_group_(group_of(key.ep, key.expert_tp, fabric_.devices_per_node())) {}

  LayerCost layer(bool moe) const {
    LayerCost cost;
    matmul_s_ = 0;
    add_state(moe, cost);
    add_norms(cost);
    add_attention(cost);
    moe ? add_experts(cost) : add_feed_forward(cost);
    cost.slowed = slowed_layer(cost);
    add_tensor_exchange(moe, cost);
    add_host(moe, cost);
    add_kept(moe, cost);
    return cost;
  }
  KeptTensors kept(bool moe) const;
  EndCost embedding() const;
  EndCost head() const;
  bool scatters() const { return p_.overlap_scatter_gather && key_.tp > 1 && !key_.sequence_parallel; }
  double boundary() const { return e_ * n_.residual / (scatters() ? n_.t : 1); }
  double slowed_communication() const { return std::max(1.0, crowd_.communication); }
  double boundary_gather_s() const {
    return scatters() ? fabric_.collective_seconds(CollectiveUse::kAllGather, e_ * n_.residual, tensor_group_) : 0;
  }

 private:
  // Kernels.
  /// The weight gradient is added into the accumulated one by the matmul itself where the profile fuses it.
  double matmul(double m, double n, double k, Product product, double batch = 1, double taken_sms = 0) const {
    Matmul x{.m = m, .n = n, .k = k, .batch = batch, .precision = key_.precision, .product = product};
    x.grouped = batch > 1;
    x.out_bytes = product == Product::kWeight && p_.overlap_wgrad_fused > 0 ? p_.state_gradient : e_;
    x.accumulate = product == Product::kWeight && p_.overlap_wgrad_fused > 0;
    x.taken_sms = taken_sms;
    return device_.matmul_seconds(x);
  }
  double moved(double elements, double passes, double launches, MemoryKernel kind = MemoryKernel::kElementwise) const {
    return passes <= 0 ? 0 : device_.memory_bound_seconds(elements * passes * wide_, std::max(launches, 1.0), kind);
  }

  /// y = x w^T for `tokens` rows; `batch` of them for experts. Adds the three matmuls, weight casts, quantisation.
  struct Linear {
    double rows, in, out;
    double batch = 1;
    bool remade = false;
    bool whole = false;  ///< not cut by tp: its weights are in 16 bit even where the others are narrower
  };
  void add_linear(const Linear& l, LayerCost& cost) const {
    const double quantise = low_ ? moved(l.rows * l.in * l.batch, p_.passes_quantise, 1) : 0;
    const double cast = moved(l.in * l.out * l.batch, p_.passes_cast + (low_ ? p_.passes_quantise_weight : 0), 1);
    const double rescale = low_ ? p_.passes_rescale : 0;
    const double forward = matmul(l.rows, l.out, l.in, Product::kForward, l.batch) + quantise + cast;
    cost.forward.compute_s += forward;
    if (l.remade) cost.recompute.compute_s += forward;
    matmul_s_ += (l.remade ? 4 : 3) * forward;
    const double quantise_gradient = low_ ? moved(l.rows * l.out * l.batch, p_.passes_quantise, 1) : 0;
    cost.input.compute_s +=
        matmul(l.rows, l.in, l.out, Product::kInput, l.batch) + quantise_gradient + moved(l.rows * l.in * l.batch, rescale, 1);
    cost.weight.compute_s += matmul(l.out, l.in, l.rows, Product::kWeight, l.batch) + moved(l.in * l.out * l.batch, rescale, 1);
    if (shape_.biases) cost.weight.compute_s += moved(l.rows * l.out * l.batch, p_.passes_bias, 1);
    if (p_.overlap_wgrad_fused <= 0)
      cost.weight.compute_s += device_.memory_bound_seconds(l.in * l.out * l.batch * (e_ + 2 * p_.state_gradient), 1);
  }
  bool remade(Recompute::Module m) const { return key_.recompute.has(m); }
  bool alternate() const { return key_.recompute.modules & Recompute::kAlternate; }

  void add_norms(LayerCost& cost) const {
    const double forward = moved(n_.residual, p_.passes_norm, p_.launch_norm, MemoryKernel::kNorm);
    const double back = moved(n_.residual, p_.passes_norm_backward, p_.launch_norm_backward, MemoryKernel::kNormBackward);
    const double add = moved(n_.residual, p_.passes_residual, p_.launch_residual);
    const double add_back = moved(n_.residual, p_.passes_residual_backward, p_.launch_residual_backward);
    cost.forward.compute_s += 2 * (forward + add);
    cost.input.compute_s += 2 * (back + add_back);
    if (remade(Recompute::kNorms) || alternate()) cost.recompute.compute_s += 2 * forward;
    if (key_.recompute.full()) cost.recompute.compute_s += 2 * add;
    if (alternate()) cost.recompute.compute_s += add;
  }

  void add_attention(LayerCost& cost) const;
  void add_projections(LayerCost& cost) const;
  void add_core(LayerCost& cost) const;
  void add_context_exchange(double core_forward, double core_backward, LayerCost& cost) const;
  void add_feed_forward(LayerCost& cost) const;
  void add_mlp(double rows, double width, double batch, bool remade_up, bool remade_all, LayerCost& cost) const;
  void add_experts(LayerCost& cost) const;
  double cut_matmuls() const;
  /// How much longer matmuls take while a collective holds multiprocessors: fewer are left for each wave of tiles.
  double slowed_matmuls(double taken_sms) const;
  double slowed_layer(const LayerCost& cost) const;
  /// Compute lost while `seconds` of tensor-parallel exchange run beside matmuls.
  double slowed(double seconds) const {
    return seconds * (1 - 1 / slowed_matmuls(fabric_.contention(CollectiveUse::kAllReduce, tensor_group_).taken_sms));
  }
  void add_tensor_exchange(bool moe, LayerCost& cost) const;
  void add_host(bool moe, LayerCost& cost) const;
  void add_kept(bool moe, LayerCost& cost) const;
  void add_state(bool moe, LayerCost& cost) const;
  /// Rows of the table on one rank, padding included.
  int64_t vocab_rows() const {
    const int64_t cut = p_.vocab_parallel ? key_.tp : 1;
    const int64_t unit = std::max<int64_t>(1, static_cast<int64_t>(p_.vocab_multiple)) * cut;
    return (shape_.vocab + unit - 1) / unit * unit / cut;
  }
  void kept_by_attention(KeptTensors& kept) const;
  void kept_by_feed_forward(bool moe, KeptTensors& kept) const;

  const ModelShape& shape_;
  const FrameworkProfile& p_;
  const DeviceModel& device_;
  const Fabric& fabric_;
  double attention_rate_;
  const LayerKey& key_;
  Sizes n_;
  Contention crowd_;             ///< beside a collective over all devices
  mutable double matmul_s_ = 0;  ///< of the layer in work
  bool fp32_;
  double e_, wide_;
  bool low_;
  Group tensor_group_, context_group_, expert_group_;
};

void Pricer::add_state(bool moe, LayerCost& cost) const {
  const LayerParameters all = moe ? moe_layer_parameters(shape_) : dense_layer_parameters(shape_);
  cost.matrix = (all.matrix + key_.tp - 1) / key_.tp;
  cost.replicated = all.replicated;
  const int64_t cut = int64_t{key_.ep} * key_.expert_tp;
  cost.expert = (all.expert + cut - 1) / cut;
}

void Pricer::add_attention(LayerCost& cost) const {
  add_projections(cost);
  const double turned = n_.q + n_.k_width;
  const double rotation = shape_.max_positions > 0 ? 0 : moved(n_.tokens * turned, p_.passes_rotation, p_.launch_rotation);
  const double rotation_back =
      shape_.max_positions > 0 ? 0 : moved(n_.tokens * turned, p_.passes_rotation_backward, p_.launch_rotation_backward);
  const double layout = moved(n_.tokens * n_.qkv(), p_.passes_layout, p_.launch_layout);
  const double layout_back = moved(n_.tokens * n_.qkv(), p_.passes_layout_backward, p_.launch_layout_backward);
  cost.forward.compute_s += rotation + layout;
  cost.input.compute_s += rotation_back + layout_back;
  if (remade(Recompute::kQkv) || alternate()) cost.recompute.compute_s += rotation + layout;
  add_core(cost);
}

void Pricer::add_projections(LayerCost& cost) const {
  const bool again = remade(Recompute::kQkv);
  if (shape_.latent()) {
    // Down-projections are whole on each tensor-parallel rank.
    const double down = of(shape_.kv_rank + shape_.rope_dim);
    const double query_in = shape_.q_rank > 0 ? of(shape_.q_rank) : n_.h;
    if (shape_.q_rank > 0) add_linear({.rows = n_.tokens, .in = n_.h, .out = query_in, .remade = again}, cost);
    add_linear({.rows = n_.tokens, .in = query_in, .out = n_.q, .remade = again}, cost);
    add_linear({.rows = n_.tokens, .in = n_.h, .out = down, .remade = again}, cost);
    const double up = of(shape_.heads) * of(shape_.head_dim + shape_.v_dim) / n_.t;
    add_linear({.rows = n_.tokens, .in = of(shape_.kv_rank), .out = up, .remade = again}, cost);
  } else {
    add_linear({.rows = n_.tokens, .in = n_.h, .out = n_.qkv(), .remade = again}, cost);
    if (alternate()) cost.recompute.compute_s += matmul(n_.tokens, n_.k_width, n_.h, Product::kForward);
  }
  add_linear({.rows = n_.tokens, .in = n_.o, .out = n_.h, .remade = remade(Recompute::kAttentionOut) || alternate()}, cost);
}

void Pricer::add_core(LayerCost& cost) const {
  AttentionShape a{.batch = of(key_.micro_batch),
                   .heads = n_.heads,
                   .kv_heads = p_.attention_repeats_kv ? n_.heads
                               : shape_.latent()       ? n_.heads
                                                       : n_.kv_heads,
                   .queries = of(key_.seq_len) / n_.c,
                   .keys = of(key_.seq_len),
                   .head_dim = of(shape_.qk_dim()),
                   .value_dim = of(shape_.value_dim()),
                   .causal = p_.attention_causal_half,
                   .dropout = p_.dropout,
                   .kernel = !p_.attention_fused   ? AttentionKernel::kUnfused
                             : p_.attention_flash2 ? AttentionKernel::kFlash2
                                                   : AttentionKernel::kFused,
                   .pass = Pass::kForward,
                   .precision = fp32_ ? Precision::kFp32 : Precision::kBf16};
  if (key_.cp_kind == CpKind::kUlysses)
    a.queries = of(key_.seq_len), a.heads /= n_.c, a.kv_heads = std::max(a.kv_heads / n_.c, 1.0);
  // The last rank of a contiguous ring masks half of one block of c: it does (c - 1/2) / (c/2) of the mean.
  const double uneven = key_.cp > 1 && key_.cp_kind == CpKind::kRing && a.causal ? (2 * n_.c - 1) / n_.c : 1;
  const double slower = uneven / (p_.attention_fused ? attention_rate_ : 1);
  const double forward = slower * device_.attention_seconds(a);
  a.pass = Pass::kBackward;
  const double back = slower * device_.attention_seconds(a);
  cost.forward.compute_s += forward;
  cost.input.compute_s += back;
  if (remade(Recompute::kAttentionCore)) cost.recompute.compute_s += forward;
  if (key_.cp > 1) add_context_exchange(forward, back, cost);
}

void Pricer::add_context_exchange(double core_forward, double core_backward, LayerCost& cost) const {
  const double kv = e_ * n_.tokens * (n_.k_width + n_.v_width);  // of this rank's part of the sequence
  const bool again = remade(Recompute::kAttentionCore);
  const auto add = [&](PhaseCost& phase, double exposed, double hidden) { phase.context_s += exposed, phase.hidden_s += hidden; };
  if (key_.cp_kind == CpKind::kUlysses) {
    const auto exchange = [&](double bytes) { return fabric_.collective_seconds(CollectiveUse::kAllToAll, bytes, context_group_); };
    const double seconds = exchange(e_ * n_.tokens * n_.qkv()) + exchange(e_ * n_.tokens * n_.o);
    add(cost.forward, seconds, 0), add(cost.input, seconds, 0);
    if (again) add(cost.recompute, seconds, 0);
    cost.wire.context += (again ? 3 : 2) * ring_bytes(e_ * n_.tokens * (n_.qkv() + n_.o), n_.c);
    return;
  }
  if (key_.cp_kind == CpKind::kAllGather) {
    const double gather = fabric_.collective_seconds(CollectiveUse::kAllGather, kv * n_.c, context_group_);
    const double scatter = fabric_.collective_seconds(CollectiveUse::kReduceScatter, kv * n_.c, context_group_);
    add(cost.forward, gather, 0), add(cost.input, gather + scatter, 0);
    if (again) add(cost.recompute, gather, 0);
    cost.wire.context += (again ? 4 : 3) * ring_bytes(kv * n_.c, n_.c);
    return;
  }
  // A ring of c - 1 hops beside c blocks of attention; backward carries the gradients of k and v too, and brings them home.
  const bool remote = context_group_.nodes > 1;
  const double sharing = context_group_.groups_per_node;
  const double hop = fabric_.send_seconds(kv, remote, sharing), hop_back = fabric_.send_seconds(2 * kv, remote, sharing);
  const double block = core_forward / n_.c, block_back = core_backward / n_.c, hops = n_.c - 1;
  add(cost.forward, hops * std::max(0.0, hop - block), hops * std::min(hop, block));
  add(cost.input, hops * std::max(0.0, hop_back - block_back) + hop, hops * std::min(hop_back, block_back));
  if (again) add(cost.recompute, hops * std::max(0.0, hop - block), hops * std::min(hop, block));
  cost.wire.context += hops * kv * (again ? 2 : 1) + hops * 2 * kv + kv;
}

void Pricer::add_mlp(double rows, double width, double batch, bool remade_up, bool remade_all, LayerCost& cost) const {
  const double up = shape_.swiglu ? 2 * width : width;
  add_linear({.rows = rows, .in = n_.h, .out = up, .batch = batch, .remade = remade_up}, cost);
  if (alternate() && batch == 1) cost.recompute.compute_s += matmul(rows, width, n_.h, Product::kForward);
  const double act = moved(rows * batch * up, p_.passes_activation, p_.launch_activation);
  cost.forward.compute_s += act;
  cost.input.compute_s += moved(rows * batch * up, p_.passes_activation_backward, p_.launch_activation_backward);
  if (remade(Recompute::kActivation) || remade_up || alternate()) cost.recompute.compute_s += act;
  // Under full recompute the last projection's result is not needed again by its own backward, but frameworks run it all.
  add_linear({.rows = rows, .in = width, .out = n_.h, .batch = batch, .remade = remade_all}, cost);
}

void Pricer::add_feed_forward(LayerCost& cost) const {
  add_mlp(n_.tokens, of(shape_.ffn) / n_.t, 1, remade(Recompute::kUp), key_.recompute.full(), cost);
}

void Pricer::add_experts(LayerCost& cost) const {
  const bool again = remade(Recompute::kExperts);
  const double routed = n_.tokens * of(shape_.top_k);  // copies that leave this rank, and on average those that come
  const double own_tokens = key_.sequence_parallel ? n_.tokens / n_.t : n_.tokens;
  add_linear({.rows = own_tokens, .in = n_.h, .out = of(shape_.experts), .remade = again}, cost);
  // With sequence parallelism a rank routes its own part of the sequence; experts cut by tp gather what each other received.
  const double sent = key_.sequence_parallel ? routed / n_.t : routed;
  const double received = sent * key_.expert_skew * key_.expert_tp;
  const double local = std::max(of(shape_.experts) / key_.ep, 1.0);
  add_mlp(std::max(received / local, 1.0), of(shape_.moe_ffn) / key_.expert_tp, local, again, again, cost);
  if (shape_.shared_experts > 0) add_mlp(n_.tokens, of(shape_.shared_experts * shape_.moe_ffn) / n_.t, 1, again, again, cost);

  const double permute = moved(sent * n_.h, p_.passes_permute, 2);
  const double permute_back = moved(sent * n_.h, p_.passes_permute_backward, 2);
  cost.forward.compute_s += 2 * permute;
  cost.input.compute_s += 2 * permute_back;
  if (again) cost.recompute.compute_s += 2 * permute;
  if (key_.ep > 1) {
    const double bytes = e_ * sent * n_.h;
    const double exchange = key_.expert_skew * fabric_.collective_seconds(CollectiveUse::kAllToAll, bytes, expert_group_);
    cost.forward.expert_s += 2 * exchange;
    cost.input.expert_s += 2 * exchange;
    if (again) cost.recompute.expert_s += 2 * exchange;
    cost.wire.expert += (again ? 6 : 4) * ring_bytes(bytes, key_.ep);
  }
  if (key_.expert_tp > 1) {
    const Group group = group_of(key_.expert_tp, 1, fabric_.devices_per_node());
    const double bytes = e_ * received * n_.h;
    const double gather = fabric_.collective_seconds(CollectiveUse::kAllGather, bytes, group);
    const double scatter = fabric_.collective_seconds(CollectiveUse::kReduceScatter, bytes, group);
    cost.forward.expert_s += gather + scatter;
    cost.input.expert_s += gather + scatter;
    if (again) cost.recompute.expert_s += gather + scatter;
    cost.wire.expert += (again ? 6 : 4) * ring_bytes(bytes, key_.expert_tp);
  }
}

double Pricer::slowed_matmuls(double taken_sms) const {
  const double ffn = of(shape_.ffn > 0 ? shape_.ffn : shape_.moe_ffn) / n_.t;
  double alone = 0, beside = 0;
  const auto add = [&](double out, double in) {
    for (const auto& [m, n, k, product] : {std::tuple{n_.tokens, out, in, Product::kForward},
                                           {n_.tokens, in, out, Product::kInput},
                                           {out, in, n_.tokens, Product::kWeight}}) {
      alone += matmul(m, n, k, product);
      beside += matmul(m, n, k, product, 1, taken_sms);
    }
  };
  add(n_.qkv(), n_.h), add((shape_.swiglu ? 2 : 1) * ffn, n_.h), add(n_.h, ffn);
  return std::max(1.0, beside / alone);
}

/// Of a layer's kernels matmuls lose multiprocessors, all others memory bandwidth.
double Pricer::slowed_layer(const LayerCost& cost) const {
  const double all = cost.forward.compute_s + cost.recompute.compute_s + cost.input.compute_s + cost.weight.compute_s;
  const double matmuls = std::min(all, matmul_s_);
  const Contention c = crowd_;
  return (matmuls * slowed_matmuls(c.taken_sms) + (all - matmuls) * std::max(1.0, c.compute)) / all;
}

/// What the four matmuls of a layer take longer when their rows are cut in tp parts.
double Pricer::cut_matmuls() const {
  const double ffn = of(shape_.ffn > 0 ? shape_.ffn : shape_.moe_ffn * shape_.top_k) / n_.t;
  double extra = 0;
  const auto add = [&](double out, double in) {
    extra +=
        std::max(0.0, n_.t * matmul(n_.tokens / n_.t, out, in, Product::kForward) - matmul(n_.tokens, out, in, Product::kForward));
  };
  add(n_.qkv(), n_.h), add(n_.h, n_.o), add((shape_.swiglu ? 2 : 1) * ffn, n_.h), add(n_.h, ffn);
  return extra;
}

void Pricer::add_tensor_exchange(bool moe, LayerCost& cost) const {
  if (key_.tp == 1) return;
  const double bytes = e_ * n_.tokens * n_.h;
  // A layer of experts exchanges among them what a dense one exchanges over tp; its shared experts still do.
  const double pairs = moe && shape_.shared_experts == 0 ? 1 : 2;
  const double all_again = key_.recompute.full() ? pairs : alternate() ? 1 : 0;
  const double ring = ring_bytes(bytes, n_.t);
  if (!key_.sequence_parallel) {
    const double reduce = fabric_.collective_seconds(CollectiveUse::kAllReduce, bytes, tensor_group_);
    cost.forward.tensor_s += pairs * reduce;
    cost.recompute.tensor_s += all_again * reduce;
    const double shelter = p_.overlap_tensor ? cost.weight.compute_s / 2 : 0;
    const double exposed = std::max(0.0, reduce - shelter);
    cost.input.tensor_s += pairs * exposed;
    cost.input.hidden_s += pairs * (reduce - exposed);
    cost.input.tensor_s += slowed(pairs * (reduce - exposed));
    cost.wire.tensor += (2 * pairs + all_again) * 2 * ring;
    return;
  }
  const double narrow = low_ && p_.state_fp8_exchange ? 1 / e_ : 1;  // of gathers: sums stay in 16 bit
  // Copies beside a collective go with it; those of an exchange that a matmul does piece by piece are not made.
  const auto copied = [&](double part, double hidden) {
    return key_.tensor_overlap && hidden > 0 ? 0 : moved(part * n_.tokens * n_.h, p_.passes_exchanged, 1);
  };
  const double gather = fabric_.collective_seconds(CollectiveUse::kAllGather, narrow * bytes, tensor_group_) +
                        copied(narrow, p_.overlap_gather_hidden);
  const double scatter =
      fabric_.collective_seconds(CollectiveUse::kReduceScatter, bytes, tensor_group_) + copied(1, p_.overlap_tensor_hidden);
  // Asynchronous tensor parallelism cuts each exchange in tp parts that run beside parts of the matmul that feeds or needs them:
  // one part is exposed, of the rest what copies between parts leave open, and matmuls of fewer rows are slower.
  const double cut = key_.tensor_overlap ? cut_matmuls() : 0;
  const double beside = cost.forward.compute_s / 4;
  const auto exposed = [&](double exchange, double hidden) {
    if (!key_.tensor_overlap) return exchange;
    const double rest = hidden * exchange * (n_.t - 1) / n_.t;
    return exchange - rest + std::max(0.0, rest - beside);
  };
  const double gather_open = exposed(gather, p_.overlap_gather_hidden), scatter_open = exposed(scatter, p_.overlap_tensor_hidden);
  const double forward = pairs * (gather_open + scatter_open) + cut;
  cost.forward.tensor_s += forward;
  cost.forward.hidden_s += std::max(0.0, pairs * (gather + scatter) - forward);
  // Operator-wise checkpointing keeps what was scattered and gathers again.
  const double scatters_again = key_.recompute.full() ? pairs : 0, gathers_again = alternate() ? pairs : scatters_again;
  cost.recompute.tensor_s += key_.recompute.full() ? forward : gathers_again * gather_open;
  // Backward: the gradient of a row-parallel result is gathered (exposed); the input of a column-parallel one, where it was kept
  // cut, is gathered again beside the input gradient, and its gradient scattered beside the weight gradient.
  const double shelter = p_.overlap_tensor ? cost.weight.compute_s / 4 : 0;
  const auto sheltered = [&](double exchange, double open) {
    return key_.tensor_overlap ? open : std::max(0.0, exchange - shelter);
  };
  const double regathers = p_.overlap_regathers ? 1 : 0;
  const double all = pairs * ((1 + regathers) * gather + scatter);
  const double back = pairs * (gather_open + regathers * sheltered(gather, gather_open) + sheltered(scatter, scatter_open)) + cut;
  cost.input.tensor_s += back;
  cost.input.hidden_s += std::max(0.0, all - back);
  if (!key_.tensor_overlap) cost.input.tensor_s += slowed(std::max(0.0, all - back));
  cost.wire.tensor += ((pairs * (2 + regathers) + gathers_again) * narrow + 2 * pairs + scatters_again) * ring;
}

void Pricer::add_host(bool moe, LayerCost& cost) const {
  const double matmuls = shape_.latent() ? 5 : 2;
  const double inner = moe ? 1 + 2 + (shape_.shared_experts > 0 ? 2 : 0) : 2;
  const double rotation = shape_.max_positions > 0 ? 0 : 1;
  const double forward = 2 * (p_.launch_norm + p_.launch_residual) + rotation * p_.launch_rotation + p_.launch_layout +
                         p_.launch_activation + p_.launch_core + (matmuls + inner) * (1 + p_.launch_matmul_extra) +
                         (moe ? p_.launch_experts : 0);
  const double back = 2 * (p_.launch_norm_backward + p_.launch_residual_backward) + rotation * p_.launch_rotation_backward +
                      p_.launch_layout_backward + p_.launch_activation_backward + p_.launch_core_backward +
                      (matmuls + inner) * (2 + p_.launch_matmul_extra) + (moe ? p_.launch_experts : 0);
  const double exchanges = (key_.tp > 1 ? (key_.sequence_parallel ? 4 : 2) : 0) + (key_.cp > 1 ? n_.c : 0) +
                           (moe && key_.ep > 1 ? 2 : 0) + (moe && key_.expert_tp > 1 ? 2 : 0);
  const double once = p_.host_layer_s + exchanges * p_.host_collective_s;
  cost.forward.host_s = forward * p_.host_forward_s + once;
  cost.weight.host_s = (matmuls + inner) * p_.host_backward_s;
  cost.input.host_s = (back - matmuls - inner) * p_.host_backward_s + once;
  if (key_.recompute.modules == 0) return;
  cost.recompute.host_s =
      key_.recompute.full()
          ? cost.forward.host_s
          : cost.forward.host_s * std::min(1.0, cost.recompute.compute_s / std::max(cost.forward.compute_s, 1e-12));
}

void Pricer::kept_by_attention(KeptTensors& kept) const {
  const double t = n_.tokens, norm = p_.saved_norm * wide_;
  kept.add("layer input", p_.saved_input * wide_ * n_.residual, 0, 1);
  kept.add("norm output", norm * n_.residual, Recompute::kNorms);
  kept.add("norm in fp32", p_.saved_norm_fp32 * n_.residual, Recompute::kNorms);
  kept.add("norm statistics", p_.saved_statistics * n_.residual / n_.h, Recompute::kNorms);
  if (shape_.latent())  // compressed, before and after their norms
    kept.add("latents", 2 * norm * t * of(shape_.q_rank + shape_.kv_rank) + norm * t * of(shape_.rope_dim), Recompute::kQkv);
  kept.add("qkv", p_.saved_qkv * wide_ * t * n_.qkv(), Recompute::kQkv, (n_.q + n_.v_width) / n_.qkv());
  if (shape_.max_positions == 0) kept.add("rotated q, k", p_.saved_rotated * wide_ * t * (n_.q + n_.k_width), Recompute::kQkv);
  if (shape_.kv_heads < shape_.heads) kept.add("repeated k, v", p_.saved_repeated_kv * t * 2 * n_.o, Recompute::kQkv);
  if (!p_.attention_fused) {
    const double scores = n_.heads * of(key_.micro_batch) * of(key_.seq_len) * of(key_.seq_len) / n_.c;
    kept.add("scores", p_.saved_scores * wide_ * scores, Recompute::kAttentionCore);
  }
  kept.add("attention", p_.saved_attention * wide_ * t * n_.o, p_.attention_fused ? Recompute::kAttentionCore : 0, 1);
  kept.add("log-sum-exp", p_.saved_log_sum_exp * t * n_.heads, Recompute::kAttentionCore, 1);
  kept.add("dropout mask", p_.saved_mask * n_.residual, 0);
}

void Pricer::kept_by_feed_forward(bool moe, KeptTensors& kept) const {
  const double t = n_.tokens;
  const uint16_t whole = moe ? Recompute::kExperts : 0;
  kept.add("residual", p_.saved_residual * wide_ * n_.residual, 0);
  kept.add("norm output", p_.saved_norm * wide_ * n_.residual, Recompute::kNorms);
  kept.add("norm in fp32", p_.saved_norm_fp32 * n_.residual, Recompute::kNorms);
  kept.add("norm statistics", p_.saved_statistics * n_.residual / n_.h, Recompute::kNorms);
  kept.add("dropout mask", p_.saved_mask * n_.residual, 0);
  const auto inner = [&](double rows, double width) {
    const double elements = rows * width * wide_;
    const uint16_t up = Recompute::kUp | whole, activation = Recompute::kActivation | Recompute::kUp | whole;
    kept.add("up", (shape_.swiglu ? 2 : 1) * p_.saved_up * elements, up, 0.5);
    kept.add("gate", p_.saved_gate * elements, activation);
    kept.add("activated", p_.saved_activated * elements, activation);
  };
  // Operator-wise checkpointing keeps the result of the last projection besides.
  if (alternate()) kept.add("feed-forward result", e_ * n_.residual, 0, 1);
  if (!moe) return inner(t, of(shape_.ffn) / n_.t);
  const double own = key_.sequence_parallel ? t / n_.t : t;
  const double sent = own * of(shape_.top_k), received = sent * key_.expert_skew * key_.expert_tp;
  kept.add("router", p_.saved_router * own * of(shape_.experts), Recompute::kExperts);
  kept.add("permuted tokens", received * n_.h * wide_ * p_.saved_permuted, Recompute::kExperts);
  kept.add("expert results", sent * n_.h * wide_ * p_.saved_expert_output, Recompute::kExperts);
  inner(received, of(shape_.moe_ffn) / key_.expert_tp);
  if (shape_.shared_experts > 0) inner(t, of(shape_.shared_experts * shape_.moe_ffn) / n_.t);
}

KeptTensors Pricer::kept(bool moe) const {
  KeptTensors kept(key_.recompute);
  kept_by_attention(kept);
  kept_by_feed_forward(moe, kept);
  return kept;
}

void Pricer::add_kept(bool moe, LayerCost& cost) const {
  for (const KeptTensor& t : kept(moe).all()) cost.kept += t.kept, cost.remade += t.remade;
  const double inner_width =
      moe ? of(shape_.top_k) * of(shape_.moe_ffn) / (key_.sequence_parallel ? n_.t : 1) : of(shape_.ffn) / n_.t;
  const double whole = n_.tokens * n_.h;
  cost.transient =
      wide_ * (p_.transient_backward * n_.residual + p_.transient_ffn * (shape_.swiglu ? 2 : 1) * n_.tokens * inner_width);
  if (key_.sequence_parallel && key_.tp > 1) cost.transient += wide_ * p_.transient_gathered * whole;
  cost.passing = wide_ * (2 * n_.residual + (key_.sequence_parallel && key_.tp > 1 ? p_.transient_gathered * whole : 0));
}

EndCost Pricer::embedding() const {
  EndCost cost;
  cost.matrix = vocab_rows() * shape_.hidden;
  cost.replicated = shape_.max_positions * shape_.hidden;
  cost.forward.compute_s = moved(n_.tokens * n_.h, 4, 1, MemoryKernel::kEmbedding) + moved(n_.residual, p_.passes_residual, 1);
  cost.backward.compute_s = moved(n_.tokens * n_.h, 6, 2, MemoryKernel::kEmbedding);
  cost.forward.host_s = 4 * p_.host_forward_s, cost.backward.host_s = 4 * p_.host_backward_s;
  cost.kept = 8 * n_.tokens + p_.saved_mask * n_.residual;
  if (key_.tp > 1 && p_.vocab_parallel) {
    const double bytes = e_ * n_.tokens * n_.h;
    cost.forward.tensor_s = fabric_.collective_seconds(
        key_.sequence_parallel ? CollectiveUse::kReduceScatter : CollectiveUse::kAllReduce, bytes, tensor_group_);
    if (key_.sequence_parallel)
      cost.backward.tensor_s = fabric_.collective_seconds(CollectiveUse::kAllGather, bytes, tensor_group_);
    cost.wire.tensor = 2 * ring_bytes(bytes, n_.t);
  }
  return cost;
}

EndCost Pricer::head() const {
  EndCost cost;
  const double rows = of(vocab_rows()), logits = n_.tokens * rows;
  cost.matrix = vocab_rows() * shape_.hidden;
  cost.replicated = (shape_.rms_norm ? 1 : 2) * shape_.hidden;
  const Precision precision = fp32_ || p_.fp32_head ? Precision::kFp32 : Precision::kBf16;
  const auto product = [&](double m, double n, double k, Product kind) {
    return device_.matmul_seconds({.m = m, .n = n, .k = k, .precision = precision, .product = kind});
  };
  const double norm = moved(n_.residual, p_.passes_norm, p_.launch_norm, MemoryKernel::kNorm);
  const double norm_back = moved(n_.residual, p_.passes_norm_backward, p_.launch_norm_backward, MemoryKernel::kNormBackward);
  const double loss = moved(logits, p_.passes_loss / 2, 3, MemoryKernel::kSoftmax);
  cost.forward.compute_s = norm + product(n_.tokens, rows, n_.h, Product::kForward) + loss;
  cost.backward.compute_s =
      norm_back + loss + product(n_.tokens, n_.h, rows, Product::kInput) + product(rows, n_.h, n_.tokens, Product::kWeight);
  cost.forward.host_s = 12 * p_.host_forward_s, cost.backward.host_s = 10 * p_.host_backward_s;
  cost.kept = (p_.saved_input + p_.saved_head_input) * wide_ * n_.residual + p_.saved_logits_kept * logits;
  cost.at_loss = std::max(0.0, p_.saved_logits - p_.saved_logits_kept) * logits;
  cost.logits = p_.saved_logits_kept * logits + cost.at_loss;
  if (key_.tp > 1 && p_.vocab_parallel) {
    const double bytes = e_ * n_.tokens * n_.h, token = 4 * n_.tokens;
    const auto seconds = [&](CollectiveUse kind, double b) { return fabric_.collective_seconds(kind, b, tensor_group_); };
    cost.forward.tensor_s = 3 * seconds(CollectiveUse::kAllReduce, token);
    if (key_.sequence_parallel) cost.forward.tensor_s += seconds(CollectiveUse::kAllGather, bytes);
    cost.backward.tensor_s = seconds(key_.sequence_parallel ? CollectiveUse::kReduceScatter : CollectiveUse::kAllReduce, bytes);
    cost.wire.tensor = (2 * bytes + 6 * token) * (n_.t - 1) / n_.t;
    cost.forward.host_s += 4 * p_.host_collective_s;
  }
  return cost;
}

}  // namespace

LayerKey layer_key(const Point& point, const FrameworkProfile& profile) {
  LayerKey key{.tp = point.tp,
               .cp = point.cp,
               .ep = point.ep,
               .expert_tp = point.expert_tp,
               .micro_batch = point.micro_batch,
               .seq_len = point.seq_len,
               .expert_skew = point.expert_skew,
               .precision = point.precision,
               .recompute = point.recompute,
               .cp_kind = point.cp_kind,
               .sequence_parallel = point.sequence_parallel && point.tp > 1,
               .tensor_overlap = point.tensor_overlap != 0};
  if (key.recompute.modules & Recompute::kSelective)
    key.recompute.modules = static_cast<uint16_t>((key.recompute.modules & ~Recompute::kSelective) | profile.selective.modules);
  return key;
}

void KeptTensors::add(std::string_view name, double bytes, uint16_t modules, double alternate) {
  if (bytes <= 0) return;
  // The whole layer is made again but for its input; operator-wise checkpointing keeps the results of every second matmul.
  double kept = 1;
  if (recompute_.full())
    kept = count_ == 0 ? 1 : 0;
  else if (recompute_.modules & Recompute::kAlternate)
    kept = alternate;
  else if (recompute_.modules & modules)
    kept = 0;
  tensors_[static_cast<size_t>(count_++)] = {name, kept * bytes, (1 - kept) * bytes};
}

KeptTensors kept_tensors(const LayerStudy& study, const LayerKey& key, bool moe) { return Pricer(study, key).kept(moe); }

Block block_cost(const LayerStudy& study, const LayerKey& key) {
  const ModelShape& shape = study.shape;
  const Pricer pricer(study, key);
  Block block;
  if (shape.moe_layers() < shape.layers) block.dense = pricer.layer(false);
  if (shape.moe_layers() > 0) block.moe = pricer.layer(true);
  block.embedding = pricer.embedding();
  block.head = pricer.head();
  block.slowed_communication = pricer.slowed_communication();
  block.boundary = pricer.boundary();
  block.boundary_gather_s = pricer.boundary_gather_s();
  return block;
}

}  // namespace shardlab::analytic
