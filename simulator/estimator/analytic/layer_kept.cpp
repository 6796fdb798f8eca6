// The tensors that a layer keeps from forward to backward, one by one, and the bytes that it needs besides while it runs.
#include <algorithm>

#include "simulator/estimator/analytic/pricer.h"

namespace shardlab::simulator::analytic {

void Pricer::kept_by_attention(KeptTensors& kept) const {
  const double t = n_.tokens, norm = p_.saved.norm * (narrow_inputs() ? 0.5 : wide_);
  kept.add("layer input", p_.saved.input * wide_ * n_.residual, 0, 1);
  // Inputs of frozen projections are read by no weight gradient, unless an adapter reads them too.
  const bool reads = reads_input(Trained::kAttention, Trained::kQ | Trained::kK | Trained::kV);
  const bool reads_out = reads_input(Trained::kAttention, Trained::kO);
  if (reads) kept.add("norm output", norm * n_.residual, Recompute::kNorms);
  kept.add("norm in fp32", p_.saved.norm_fp32 * n_.residual, Recompute::kNorms);
  kept.add("norm statistics", p_.saved.statistics * n_.residual / n_.h, Recompute::kNorms);
  if (reads) kept.add("gathered norm output", gathered_input(), 0);
  const double adapted = n_.tokens * of(shape_.trained.rank) * e_;
  for (const auto p : {Trained::kQ, Trained::kK, Trained::kV})
    if (shape_.trained.adapts(p)) kept.add("adapters", adapted, Recompute::kQkv);
  if (shape_.trained.adapts(Trained::kO)) kept.add("adapters", adapted, Recompute::kAttentionOut);
  if (shape_.latent())  // compressed, before and after their norms
    kept.add("latents", 2 * norm * t * of(shape_.q_rank + shape_.kv_rank) + norm * t * of(shape_.rope_dim), Recompute::kQkv);
  const bool apart = shape_.max_positions == 0 && p_.saved.rotated > 0 && p_.saved.values > 0;
  kept.add("qkv", wide_ * t * (apart ? p_.saved.values * n_.v_width : p_.saved.qkv * n_.qkv()), Recompute::kQkv,
           (n_.q + n_.v_width) / n_.qkv());
  if (shape_.max_positions == 0) kept.add("rotated q, k", p_.saved.rotated * wide_ * t * (n_.q + n_.k_width), Recompute::kQkv);
  if (shape_.kv_heads < shape_.heads) kept.add("repeated k, v", p_.saved.repeated_kv * t * 2 * n_.o, Recompute::kQkv);
  if (!p_.attention.fused) {
    const double scores = n_.heads * of(key_.micro_batch) * of(key_.seq_len) * of(key_.seq_len) / n_.c;
    const double softmax = softmax_apart() ? 4 : 0;  // in fp32, beside what is cast back
    kept.add("scores", (p_.saved.scores * wide_ + softmax) * scores, Recompute::kAttentionCore);
  }
  if (p_.attention.fused || reads_out)
    kept.add("attention", p_.saved.attention * wide_ * t * n_.o, p_.attention.fused ? Recompute::kAttentionCore : 0, 1);
  // The projection reads a narrow copy, fused attention its own output.
  if (narrow_inputs() && reads_out) kept.add("attention in 8 bits", t * n_.o, 0, 1);
  kept.add("log-sum-exp", p_.saved.log_sum_exp * t * n_.heads, Recompute::kAttentionCore, 1);
  kept.add("dropout mask", p_.saved.mask * n_.residual, 0);
}

void Pricer::kept_by_feed_forward(bool moe, KeptTensors& kept) const {
  const double t = n_.tokens;
  if (shape_.post_norms) {  // what they read, and their statistics
    kept.add("inputs of norms after", 2 * p_.saved.norm * wide_ * n_.residual, 0);
    kept.add("norm in fp32", 2 * p_.saved.norm_fp32 * n_.residual, Recompute::kNorms);
    kept.add("norm statistics", 2 * p_.saved.statistics * n_.residual / n_.h, Recompute::kNorms);
  }
  const uint16_t whole = moe ? Recompute::kExperts : 0;
  kept.add("residual", p_.saved.residual * wide_ * n_.residual, 0);
  const Trained::Module module = moe ? Trained::kExperts : Trained::kFeedForward;
  const bool reads = reads_input(module, Trained::kGate | Trained::kUp), reads_inner = reads_input(module, Trained::kDown);
  const bool reads_norm = reads || (moe && reads_input(Trained::kRouter, 0));
  if (reads_norm) kept.add("norm output", p_.saved.norm * (narrow_inputs() && !moe ? 0.5 : wide_) * n_.residual, Recompute::kNorms);
  kept.add("norm in fp32", p_.saved.norm_fp32 * n_.residual, Recompute::kNorms);
  kept.add("norm statistics", p_.saved.statistics * n_.residual / n_.h, Recompute::kNorms);
  if (!moe && reads) kept.add("gathered norm output", gathered_input(), 0);
  kept.add("dropout mask", p_.saved.mask * n_.residual, 0);
  const auto inner = [&](double rows, double width, double weighted = 0) {
    const double elements = rows * width * wide_;
    const uint16_t up = Recompute::kUp | whole, activation = Recompute::kActivation | Recompute::kUp | whole;
    kept.add("up", (shape_.swiglu ? 2 : 1) * p_.saved.up * elements, up, 0.5);
    kept.add("gate", p_.saved.gate * elements, activation);
    kept.add("activated, not weighted", weighted * elements, activation);
    if (reads_inner) kept.add("activated", p_.saved.activated * (narrow_inputs() ? 0.5 : 1) * elements, activation);
    for (const auto p : {Trained::kGate, Trained::kUp, Trained::kDown})
      if (shape_.trained.adapts(p) && (p != Trained::kGate || shape_.swiglu))
        kept.add("adapters", rows * of(shape_.trained.rank) * e_, p == Trained::kDown ? whole : up);
  };
  // Operator-wise checkpointing keeps the result of the last projection besides.
  if (alternate()) kept.add("feed-forward result", p_.saved.result * wide_ * n_.residual, 0, 1);
  if (!moe) return inner(t, of(shape_.ffn) / n_.t);
  const double own = routed().tokens, sent = routed().sent, received = room();
  kept.add("router", p_.saved.router * own * of(shape_.experts), Recompute::kExperts);
  if (reads)
    kept.add("permuted tokens", received * n_.h * (narrow_inputs() ? 0.5 : wide_) * p_.saved.permuted, Recompute::kExperts);
  kept.add("expert results", sent * n_.h * wide_ * p_.saved.expert_output, Recompute::kExperts);
  inner(received, of(shape_.moe_ffn) / key_.expert_tp, p_.saved.weighted);
  if (shape_.shared_experts > 0) inner(t, of(shape_.shared_experts * shape_.moe_ffn) / n_.t);
}

KeptTensors Pricer::kept(bool moe) const {
  KeptTensors kept(key_.recompute);
  kept_by_attention(kept);
  kept_by_feed_forward(moe, kept);
  return kept;
}

bool copies_rows(const FrameworkProfile& profile, const LayerKey& key) {
  return key.sequence_parallel && key.tp > 1 && profile.passes.exchanged > 0 && (!key.tensor_overlap || key.micro_batch > 1);
}

void Pricer::add_kept(bool moe, LayerCost& cost) const {
  const KeptTensors tensors = kept(moe);
  for (const KeptTensor& t : tensors.all()) cost.kept += t.kept, cost.remade += t.remade;
  const double wider = moe && p_.model.own_collectives ? room() / routed().received : 1;  // of the rows that are expected
  const double inner_width =
      moe ? wider * rows_of(1) * of(shape_.moe_ffn) / (key_.sequence_parallel ? n_.t : 1) : of(shape_.ffn) / n_.t;
  const double whole = n_.tokens * n_.h;
  cost.transient =
      wide_ * (p_.transient.backward * n_.residual + p_.transient.ffn * (shape_.swiglu ? 2 : 1) * n_.tokens * inner_width);
  const double rows = key_.sequence_parallel && key_.tp > 1 ? (p_.transient.gathered + (copies_rows(p_, key_) ? 2 : 0)) * whole : 0;
  cost.transient += wide_ * rows;
  // A gathered context: k and v of the whole sequence in one buffer.
  const double context =
      key_.cp > 1 && key_.cp_kind == CpKind::kAllGather
          ? e_ * n_.tokens * n_.c * (p_.attention.repeats_kv && shape_.kv_heads < shape_.heads ? 2 * n_.o : n_.k_width + n_.v_width)
          : 0;
  cost.transient += context;
  cost.passing = context + wide_ * (2 * n_.residual + rows);
  // One frozen weight of few bits at a time is there whole: the largest.
  const Trained& trained = shape_.trained;
  if (trained.frozen != 0 && trained.frozen_bits < 16) {
    const double matrices = shape_.swiglu ? 3 : 2;
    const double weight = e_ * std::max(feed_forward_shapes(moe) / matrices, n_.h * n_.q);
    cost.transient += weight, cost.passing += weight;
  }
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

}  // namespace shardlab::simulator::analytic
