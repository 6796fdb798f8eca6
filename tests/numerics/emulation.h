// Data parallelism with compressed gradients in one process: N ranks are a loop, a wire is a copy. Written apart from strategies
// and kernels, on top of the reference trainer; canonical order throughout.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "plan/case.h"
#include "tests/namespaces.h"
#include "tests/numerics/reference/trainer.h"

namespace shardlab::testing {

/// What travels together, and what each rank still owes of it.
struct EmulatedBucket {
  std::vector<size_t> parameters;             ///< by index in the model, in the order in which they lie
  int64_t elements = 0;                       ///< padding included
  std::vector<std::vector<float>> errors;     ///< by rank
  std::vector<std::vector<float>> of_slices;  ///< by rank: what the sum of its slice still owes (bf16, int8)
  std::vector<float> basis;                   ///< of a matrix under PowerSGD: Q[r, columns] of the step before
};

/// Ranks that share a step's sequences out in order, each with the gradient of its own. Dropout and tied embeddings are not
/// emulated.
class Emulation {
 public:
  explicit Emulation(const Case& config);

  /// One step on the tokens of all ranks, `sequences` rows of seq_len + 1. Returns the loss before it.
  float step(std::span<const int32_t> tokens);

  const reference::Trainer<float>& trainer() const { return trainer_; }
  const std::vector<EmulatedBucket>& buckets() const { return buckets_; }
  /// Whether every element of every gradient and error so far was, exactly, what was sent and what is owed.
  bool conserved() const { return conserved_; }
  /// Of PowerSGD, whose errors round: the largest |sent + errors - gradients| so far, over the largest element of m.
  double largest_loss() const { return largest_loss_; }

 private:
  using Vector = std::vector<float>;
  void fill_buckets();
  Vector reduce(EmulatedBucket& bucket, size_t number, std::vector<Vector> gradients);
  Vector reduce_quantised(EmulatedBucket& bucket, const std::vector<Vector>& m);
  Vector reduce_selected(EmulatedBucket& bucket, size_t number, const std::vector<Vector>& m);
  Vector reduce_low_rank(EmulatedBucket& bucket, const std::vector<Vector>& m);
  /// What is left of x once it was coded, block by block: the code's meaning is left in x, its error returned.
  Vector code(Vector& x, int64_t blocks);
  void check_conserved(const Vector& m, const Vector& sent, const Vector& error);

  Case config_;
  int64_t ranks_;
  int64_t parts_;  ///< reductions of a step: under ZeRO-2 one a micro-batch
  int64_t sequences_;
  reference::Trainer<float> trainer_;  ///< of the step's sequences
  reference::Trainer<float> part_;     ///< of one rank's in a part, whose mean is over fewer: its gradients are that much too large
  std::vector<EmulatedBucket> buckets_;
  bool conserved_ = true;
  double largest_loss_ = 0;
};

}  // namespace shardlab::testing
