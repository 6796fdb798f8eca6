// The ends of the model: the embedding; the final norm, head and loss.
#include <algorithm>

#include "simulator/analytic/pricer.h"

namespace shardlab::analytic {

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
    return device_.matmul_seconds({.m = m, .n = n, .k = k, .precision = precision, .product = kind, .slowest = slowest_});
  };
  const double norm = moved(n_.residual, p_.passes_norm, p_.launch_norm, MemoryKernel::kNorm);
  const double norm_back = moved(n_.residual, p_.passes_norm_backward, p_.launch_norm_backward, MemoryKernel::kNormBackward);
  const bool cut = key_.tp > 1 && p_.vocab_parallel;
  const double loss = cut && p_.passes_loss_parallel > 0 ? moved(logits, p_.passes_loss_parallel / 2, 6)
                                                         : moved(logits, p_.passes_loss / 2, 3, MemoryKernel::kSoftmax);
  cost.forward.compute_s = norm + product(n_.tokens, rows, n_.h, Product::kForward) + loss;
  cost.backward.compute_s =
      norm_back + loss + product(n_.tokens, n_.h, rows, Product::kInput) + product(rows, n_.h, n_.tokens, Product::kWeight);
  cost.forward.host_s = 12 * p_.host_forward_s, cost.backward.host_s = 10 * p_.host_backward_s;
  cost.kept = (p_.saved_input + p_.saved_head_input) * wide_ * n_.residual + p_.saved_logits_kept * logits;
  if (cut && key_.sequence_parallel) cost.kept += p_.saved_gathered * wide_ * n_.tokens * n_.h;
  const double at_peak = cut && p_.saved_logits_parallel > 0 ? p_.saved_logits_parallel : p_.saved_logits;
  cost.at_loss = std::max(0.0, at_peak - p_.saved_logits_kept) * logits;
  cost.logits = p_.saved_logits_kept * logits + cost.at_loss;
  if (cut) {
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

}  // namespace shardlab::analytic
