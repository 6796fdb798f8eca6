// A layer's exchanges over tensor and context parallelism, the work that they slow, and the host's cost to start them all.
#include <algorithm>
#include <tuple>

#include "simulator/estimator/analytic/pricer.h"

namespace shardlab::simulator::analytic {
namespace {

constexpr double kSoftmaxSteps = 4;  // casts, scale and mask, where no kernel does them with the softmax

}  // namespace

void Pricer::add_context_exchange(double core_forward, double core_backward, LayerCost& cost) const {
  const double kv = e_ * n_.tokens * (n_.k_width + n_.v_width);  // of this rank's part of the sequence
  const bool again = remade(Recompute::kAttentionCore);
  const auto add = [&](PhaseCost& phase, double exposed, double hidden) { phase.context_s += exposed, phase.hidden_s += hidden; };
  if (key_.cp_kind == CpKind::kUlysses) {
    const auto exchange = [&](double bytes) { return collective_s(CollectiveUse::kAllToAll, bytes, context_group_); };
    const double seconds = exchange(e_ * n_.tokens * n_.qkv()) + exchange(e_ * n_.tokens * n_.o);
    add(cost.forward, seconds, 0), add(cost.input, seconds, 0);
    if (again) add(cost.recompute, seconds, 0);
    cost.wire.context += (again ? 3 : 2) * ring_bytes(e_ * n_.tokens * (n_.qkv() + n_.o), n_.c);
    return;
  }
  if (key_.cp_kind == CpKind::kAllGather) return add_context_gather(core_forward, core_backward, cost);
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

/// Keys and values are gathered. One call then attends to all of them; or one to each rank's part, merged with what came before, so
/// that the first part is computed meanwhile and gradients travel around beside the others.
void Pricer::add_context_gather(double core_forward, double core_backward, LayerCost& cost) const {
  const double elements = n_.tokens * (p_.attention.repeats_kv ? 2 * n_.o : n_.k_width + n_.v_width), kv = e_ * elements;
  const double gather = collective_s(CollectiveUse::kAllGather, kv * n_.c, context_group_);
  const double gathers = remade(Recompute::kAttentionCore) ? 3 : 2;
  const auto add = [&](PhaseCost& phase, double seconds, double beside, double merged) {
    const double hidden = p_.overlap.context ? std::min(seconds, beside) : 0;
    phase.context_s += seconds - hidden;
    phase.hidden_s += hidden;
    phase.compute_s += moved(n_.c * n_.tokens * n_.o, merged, 4 * n_.c);
  };
  if (p_.passes.merge <= 0) {
    const double scatter = collective_s(CollectiveUse::kReduceScatter, kv * n_.c, context_group_);
    add(cost.forward, gather, 0, 0), add(cost.input, gather + scatter, 0, 0);
    if (gathers > 2) add(cost.recompute, gather, 0, 0);
    cost.wire.context += (gathers + 1) * ring_bytes(kv * n_.c, n_.c);
    return;
  }
  const double block = core_forward / n_.c, block_back = core_backward / n_.c;
  const double gradients = elements * p_.state.context_gradient * (fp32_ ? 2 : 1);
  const double hop = fabric_.send_seconds(gradients, context_group_.nodes > 1, context_group_.groups_per_node);
  add(cost.forward, gather, block, p_.passes.merge);
  if (gathers > 2) add(cost.recompute, gather, block, p_.passes.merge);
  add(cost.input, gather, block_back, p_.passes.merge_backward);
  add(cost.input, n_.c * hop, n_.c * block_back, 0);
  cost.wire.context += gathers * ring_bytes(kv * n_.c, n_.c) + n_.c * gradients;
}

/// Extra seconds of a layer's matmuls when their rows are cut in tp parts.
Pricer::CutMatmuls Pricer::cut_matmuls() const {
  const double ffn = of(shape_.ffn > 0 ? shape_.ffn : shape_.moe_ffn * shape_.top_k) / n_.t;
  const auto extra = [&](double out, double in) {
    return std::max(0.0,
                    n_.t * matmul(n_.tokens / n_.t, out, in, Product::kForward) - matmul(n_.tokens, out, in, Product::kForward));
  };
  return {.gathered = extra(n_.qkv(), n_.h) + extra((shape_.swiglu ? 2 : 1) * ffn, n_.h),
          .scattered = extra(n_.h, n_.o) + extra(n_.h, ffn)};
}

/// The work that runs beside an exchange in backward: the products of the column-parallel linear whose input is exchanged.
Pricer::Shelter Pricer::shelter(int pair, bool moe) const {
  if (!p_.overlap.tensor) return {};
  const double ffn = moe ? of(shape_.shared_experts * shape_.moe_ffn) : of(shape_.ffn);
  const double out = pair == 0 ? n_.qkv() : (shape_.swiglu ? 2 : 1) * ffn / n_.t;
  const Trained::Module module = pair == 0 ? Trained::kAttention : moe ? Trained::kExperts : Trained::kFeedForward;
  const double weight = shape_.trained.freezes(module) ? 0 : matmul(out, n_.h, n_.tokens, Product::kWeight);
  return {.input_s = matmul(n_.tokens, n_.h, out, Product::kInput), .weight_s = weight};
}

void Pricer::add_tensor_exchange(bool moe, LayerCost& cost) const {
  if (key_.tp == 1) return;
  // A layer of experts exchanges among them what a dense one exchanges over tp; its shared experts still do, and slices that take all tokens.
  const double pairs = moe && shape_.shared_experts == 0 && !slices_take_all_tokens() ? 1 : 2;
  if (key_.sequence_parallel) return add_sequence_exchange(pairs, moe, cost);
  const double bytes = e_ * n_.tokens * n_.h;
  const double all_again = key_.recompute.full() ? pairs : alternate() ? 1 : 0;
  const double reduce = collective_s(CollectiveUse::kAllReduce, bytes, tensor_group_);
  cost.forward.tensor_s += pairs * reduce;
  cost.recompute.tensor_s += all_again * reduce;
  for (int i = 0; i < static_cast<int>(pairs); ++i) {
    const double weight = shelter(i, moe).weight_s, hidden = std::min(reduce, weight);
    cost.input.tensor_s += reduce - hidden + lost(hidden, reduce, weight);
    cost.input.hidden_s += hidden;
  }
  cost.wire.tensor += (2 * pairs + all_again) * 2 * ring_bytes(bytes, n_.t);
}

/// Asynchronous tensor parallelism cuts each exchange in tp parts that run beside parts of the matmul that feeds or needs them: one
/// part is exposed, of the rest what copies between parts leave open, and matmuls of fewer rows are slower.
void Pricer::add_sequence_exchange(double pairs, bool moe, LayerCost& cost) const {
  const double bytes = e_ * n_.tokens * n_.h;
  const double narrow = low_ && p_.state.fp8_exchange ? 1 / e_ : 1;  // of gathers: sums stay in 16 bit
  // Copies beside a collective go with it; those of an exchange that a matmul does piece by piece are not made.
  const auto copied = [&](double part, double hidden) {
    return key_.tensor_overlap && hidden > 0 ? 0 : moved(part * n_.tokens * n_.h, p_.passes.exchanged, 1);
  };
  const double gather =
      collective_s(CollectiveUse::kAllGather, narrow * bytes, tensor_group_) + copied(narrow, p_.overlap.gather_hidden);
  const double scatter = collective_s(CollectiveUse::kReduceScatter, bytes, tensor_group_) + copied(1, p_.overlap.tensor_hidden);
  const double scatter_whole =
      collective_s(CollectiveUse::kReduceScatter, bytes, tensor_group_) + moved(n_.tokens * n_.h, p_.passes.exchanged, 1);
  const CutMatmuls cut = key_.tensor_overlap ? cut_matmuls() : CutMatmuls{};
  const double beside = cost.forward.compute_s / 4;
  const auto exposed = [&](double exchange, double hidden) {
    if (!key_.tensor_overlap) return exchange;
    const double rest = hidden * exchange * (n_.t - 1) / n_.t;
    return exchange - rest + std::max(0.0, rest - beside);
  };
  const double gather_open = exposed(gather, p_.overlap.gather_hidden), scatter_open = exposed(scatter, p_.overlap.tensor_hidden);
  const double forward = pairs * (gather_open + scatter_open) + cut.gathered + cut.scattered;
  cost.forward.tensor_s += forward;
  cost.forward.hidden_s += std::max(0.0, pairs * (gather + scatter) - forward);
  // Operator-wise checkpointing keeps what was scattered and gathers again.
  const double scatters_again = key_.recompute.full() ? pairs : 0, gathers_again = alternate() ? pairs : scatters_again;
  cost.recompute.tensor_s += key_.recompute.full() ? forward : gathers_again * gather_open;
  // Backward: the gradient of a row-parallel result is gathered (exposed); the input of a column-parallel one, where it was kept
  // cut, is gathered again beside the input gradient, and its gradient scattered beside the weight gradient.
  // The gradient of an input of several products is their sum, which is no matmul to be done piece by piece.
  const double scatter_back = p_.model.split_projections ? scatter_whole : scatter_open;
  const double cut_back = cut.scattered + (p_.model.split_projections ? 0 : cut.gathered);
  const double regathers = p_.overlap.regathers ? 1 : 0, all = pairs * ((1 + regathers) * gather + scatter);
  double back = pairs * gather_open + cut_back, slowed = 0;
  for (int i = 0; i < static_cast<int>(pairs); ++i) {
    const Shelter beside_it = shelter(i, moe);
    if (key_.tensor_overlap) {
      back += regathers * gather_open + scatter_back;
      continue;
    }
    const double gathered = std::min(gather, beside_it.input_s), scattered = std::min(scatter, beside_it.weight_s);
    back += regathers * (gather - gathered) + scatter - scattered;
    slowed += regathers * lost(gathered, gather, beside_it.input_s) + lost(scattered, scatter, beside_it.weight_s);
  }
  cost.input.tensor_s += back + slowed;
  cost.input.hidden_s += std::max(0.0, all - back);
  cost.wire.tensor += ((pairs * (2 + regathers) + gathers_again) * narrow + 2 * pairs + scatters_again) * ring_bytes(bytes, n_.t);
}

/// Adapters of a layer; those of experts run together.
double Pricer::adapters(bool moe) const {
  const Trained& t = shape_.trained;
  double count = 0;
  for (const auto p : {Trained::kQ, Trained::kK, Trained::kV, Trained::kO}) count += t.adapts(p) ? 1 : 0;
  const double feed_forwards = moe && shape_.shared_experts > 0 ? 2 : 1;
  if (shape_.swiglu && t.adapts(Trained::kGate)) count += feed_forwards;
  for (const auto p : {Trained::kUp, Trained::kDown}) count += t.adapts(p) ? feed_forwards : 0;
  return count;
}

void Pricer::add_host(bool moe, LayerCost& cost) const {
  const double gate = p_.model.split_projections && shape_.swiglu ? 1 : 0;
  const double matmuls = shape_.latent() ? 5 : p_.model.split_projections ? 4 : 2;
  const double inner = moe ? 1 + (2 + gate) * (shape_.shared_experts > 0 ? 2 : 1) : 2 + gate;
  const double rotation = shape_.max_positions > 0 ? 0 : 1;
  const double apart = softmax_apart() ? kSoftmaxSteps : 0;
  const double norms = shape_.post_norms ? 4 : 2;
  const double adapted = adapters(moe);
  const double unread = (shape_.trained.freezes(Trained::kAttention) ? matmuls : 0) +
                        (shape_.trained.freezes(moe ? Trained::kExperts : Trained::kFeedForward) ? inner : 0);
  // Experts of a rank, each of which has its products and their roundings started by itself.
  const double own = moe ? std::max(1.0, of(shape_.experts) / of(key_.ep)) : 0;
  const double of_experts = moe ? p_.launch.experts + own * (p_.launch.expert + (low_ ? p_.launch.expert_low : 0)) : 0;
  const double of_experts_back =
      moe ? p_.launch.experts + own * (p_.launch.expert_backward + (low_ ? p_.launch.expert_low_backward : 0)) : 0;
  const double forward = apart + norms * p_.launch.norm + 2 * p_.launch.residual + rotation * p_.launch.rotation +
                         p_.launch.layout + p_.launch.activation + p_.launch.core +
                         (matmuls + inner) * (1 + p_.launch.matmul_extra) + of_experts + 3 * adapted;
  const double back = apart + norms * p_.launch.norm_backward + 2 * p_.launch.residual_backward +
                      rotation * p_.launch.rotation_backward + p_.launch.layout_backward + p_.launch.activation_backward +
                      p_.launch.core_backward + (matmuls + inner) * (2 + p_.launch.matmul_extra) + of_experts_back + 5 * adapted -
                      unread;
  const double tensor = key_.tp > 1 ? (key_.sequence_parallel ? 4 : 2) : 0;
  const double again = key_.tp > 1 && key_.sequence_parallel && p_.overlap.regathers ? 2 : 0;
  const double others = (key_.cp > 1 ? n_.c : 0) + (moe && key_.ep > 1 ? 2 : 0) + (moe && key_.expert_tp > 1 ? 2 : 0);
  const double exchange = host_.exchange_s > 0 ? host_.exchange_s : host_.collective_s;
  const double once = host_.layer_s + tensor * exchange + others * host_.collective_s;
  const double once_back = once + (host_.exchange_s > 0 ? again * exchange : 0);
  cost.forward.host_s = forward * host_.forward_s + once;
  const double weights = matmuls + inner - unread + 2 * adapted;
  cost.weight.host_s = weights * host_.backward_s;
  cost.input.host_s = (back - weights) * host_.backward_s + once_back;
  if (host_.graphs > 0 && (!moe || host_.graphs > 1)) {
    // A graph is one launch; a step's replays everything without the host.
    const double replay = host_.graphs > 1 ? 0 : host_.forward_s;
    cost.forward.host_s = replay, cost.weight.host_s = 0, cost.input.host_s = replay;
  } else if (host_.graphs > 0) {
    // Of a layer of experts its attention is a graph.
    const double exchanged = others * host_.collective_s;
    cost.forward.host_s = (1 + of_experts + inner * (1 + p_.launch.matmul_extra)) * host_.forward_s + exchanged;
    cost.weight.host_s = inner * host_.backward_s;
    cost.input.host_s = (1 + of_experts_back + inner * (1 + p_.launch.matmul_extra)) * host_.backward_s + exchanged;
  }
  if (key_.recompute.modules == 0) return;
  cost.recompute.host_s =
      key_.recompute.full()
          ? cost.forward.host_s
          : cost.forward.host_s * std::min(1.0, cost.recompute.compute_s / std::max(cost.forward.compute_s, 1e-12));
}

}  // namespace shardlab::simulator::analytic
