// The ends of the model: the embedding; the final norm, head and loss.
#include <algorithm>

#include "simulator/estimator/analytic/pricer.h"

namespace shardlab::simulator::analytic {

EndCost Pricer::embedding() const {
  EndCost cost;
  cost.matrix = vocab_rows() * shape_.hidden;
  cost.replicated = shape_.max_positions * shape_.hidden;
  cost.frozen = shape_.trained.freezes(Trained::kEmbedding);
  cost.forward.compute_s = moved(n_.tokens * n_.h, 4, 1, MemoryKernel::kEmbedding) + moved(n_.residual, p_.passes.residual, 1);
  if (!cost.frozen)
    cost.backward.compute_s = moved(n_.tokens * n_.h, 6, 2, MemoryKernel::kEmbedding) + moved(of(cost.matrix), p_.passes.table, 2);
  cost.forward.host_s = 4 * host_.forward_s, cost.backward.host_s = 4 * host_.backward_s;
  cost.kept = 8 * n_.tokens + p_.saved.mask * n_.residual;
  if (key_.tp > 1 && p_.model.vocab_parallel) {
    const double bytes = e_ * n_.tokens * n_.h;
    cost.forward.tensor_s =
        collective_s(key_.sequence_parallel ? CollectiveUse::kReduceScatter : CollectiveUse::kAllReduce, bytes, tensor_group_);
    if (key_.sequence_parallel) cost.backward.tensor_s = collective_s(CollectiveUse::kAllGather, bytes, tensor_group_);
    cost.wire.tensor = 2 * ring_bytes(bytes, n_.t);
  }
  return cost;
}

EndCost Pricer::head() const {
  EndCost cost;
  const double rows = of(vocab_rows()), logits = n_.tokens * rows / std::max(1.0, p_.saved.head_chunks);
  cost.matrix = vocab_rows() * shape_.hidden;
  cost.replicated = (shape_.rms_norm ? 1 : 2) * shape_.hidden;
  cost.frozen = shape_.trained.freezes(Trained::kHead);
  const Precision precision = fp32_ || p_.model.fp32_head ? Precision::kFp32 : Precision::kBf16;
  const auto product = [&](double m, double n, double k, Product kind) {
    const DeviceModel::Waited x = device_.matmul_waited(
        {.m = m, .n = n, .k = k, .precision = precision, .product = kind, .slowest = slowest_, .tf32 = p_.model.fp32_tensor_cores});
    cost.late_s += x.late;
    return x.seconds;
  };
  const double norm = moved(n_.residual, p_.passes.norm, p_.launch.norm, MemoryKernel::kNorm);
  cost.forward.compute_s = norm + product(n_.tokens, rows, n_.h, Product::kForward);
  cost.backward.compute_s = norm_backward() + product(n_.tokens, n_.h, rows, Product::kInput);
  if (!cost.frozen) cost.backward.compute_s += product(rows, n_.h, n_.tokens, Product::kWeight);
  if (!cost.frozen) cost.backward.compute_s += accumulated(of(cost.matrix));
  cost.forward.host_s = 4 * host_.forward_s, cost.backward.host_s = 5 * host_.backward_s;
  const double read = cost.frozen ? 0 : p_.saved.head_input;  // by the weight gradient
  cost.kept = ((p_.saved.input + read) * wide_ + p_.saved.norm_fp32) * n_.residual + p_.saved.logits_kept * logits;
  const bool cut = key_.tp > 1 && p_.model.vocab_parallel;
  if (cut && key_.sequence_parallel && !cost.frozen) cost.kept += p_.saved.gathered * wide_ * n_.tokens * n_.h;
  const double at_peak = cut && p_.saved.logits_parallel > 0 ? p_.saved.logits_parallel : p_.saved.logits;
  const double at_forward = p_.saved.logits_forward > 0 ? p_.saved.logits_forward : at_peak;
  cost.at_loss = std::max(0.0, std::max(at_peak, at_forward) - p_.saved.logits_kept) * logits;
  cost.logits = p_.saved.logits_kept * logits + cost.at_loss;
  cost.logits_once = e_ * logits;
  cost.logits_forward = at_forward * logits;
  cost.logits_backward = at_peak * logits;
  cost.logits_gradient = p_.saved.logits_gradient * wide_ * logits;
  cost.logits_output = p_.saved.logits_output * wide_ * logits;
  cost.input_gradient = e_ * n_.tokens * n_.h;
  if (cut) {
    const double bytes = e_ * n_.tokens * n_.h;
    const auto seconds = [&](CollectiveUse kind) { return collective_s(kind, bytes, tensor_group_); };
    if (key_.sequence_parallel) cost.forward.tensor_s = seconds(CollectiveUse::kAllGather);
    cost.backward.tensor_s = seconds(key_.sequence_parallel ? CollectiveUse::kReduceScatter : CollectiveUse::kAllReduce);
    cost.wire.tensor = 2 * bytes * (n_.t - 1) / n_.t;
    cost.forward.host_s += host_.collective_s;
  }
  return cost;
}

EndCost Pricer::loss() const {
  EndCost cost;
  const double logits = n_.tokens * of(vocab_rows());
  const bool one_by_one = p_.passes.loss_parallel > 0 && ((key_.tp > 1 && p_.model.vocab_parallel) || p_.passes.loss <= 0);
  cost.forward.compute_s = cost.backward.compute_s =
      one_by_one ? moved(logits, p_.passes.loss_parallel / 2, 6) : moved(logits, p_.passes.loss / 2, 3, MemoryKernel::kSoftmax);
  cost.forward.host_s = 8 * host_.forward_s, cost.backward.host_s = 5 * host_.backward_s;
  if (key_.tp > 1 && p_.model.vocab_parallel) {
    // The greatest logit, that of the target, the sum of exponentials.
    const double token = 4 * n_.tokens;
    cost.forward.tensor_s = 3 * collective_s(CollectiveUse::kAllReduce, token, tensor_group_);
    cost.wire.tensor = 6 * token * (n_.t - 1) / n_.t;
    cost.forward.host_s += 3 * host_.collective_s;
  }
  return cost;
}

}  // namespace shardlab::simulator::analytic
