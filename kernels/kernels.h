// The kernels of one processor variant, as an immutable table. The runtime holds a `const Kernels&`.
//
// Every function is pure over the pointers in its arguments: no globals, no allocation, no plan, no ranks; one thread each, but
// that fast Linear calls oneDNN, which uses as many OpenMP threads as the calling thread has set. Pointers need the alignment of
// their element only (scratch: 64 bytes). Outputs are overwritten whatever they held, unless `accumulate` says otherwise; they may
// overlap inputs only where the argument's docstring says so. A wrong argument stops the program (a bug of the caller). All
// variants give the same bits, fast Linear apart.
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "kernels/activation.h"
#include "kernels/attention.h"
#include "kernels/cross_entropy.h"
#include "kernels/dropout.h"
#include "kernels/embedding.h"
#include "kernels/initialise.h"
#include "kernels/linear.h"
#include "kernels/norm.h"
#include "kernels/optimizer.h"
#include "kernels/reduce.h"
#include "kernels/residual.h"
#include "kernels/rope.h"

namespace shardlab::kernels {

struct Kernels {
  std::string_view name;  ///< "x86-64-v4": what the variant was compiled for

  void (*linear_forward)(const LinearForward&);
  void (*linear_input)(const LinearInput&);
  void (*linear_weight)(const LinearWeight&);
  void (*norm_forward)(const NormForward&);
  void (*norm_input)(const NormInput&);
  void (*norm_weight)(const NormWeight&);
  void (*rope)(const Rope&);
  void (*attention_forward)(const AttentionForward&);
  void (*attention_input)(const AttentionInput&);
  void (*attention_block_forward)(const AttentionBlockForward&);
  void (*attention_block_input)(const AttentionBlockInput&);
  void (*attention_merge_forward)(const AttentionMergeForward&);
  void (*attention_merge_input)(const AttentionMergeInput&);
  void (*activation_forward)(const ActivationForward&);
  void (*activation_input)(const ActivationInput&);
  void (*residual_forward)(const ResidualForward&);
  void (*bias_weight)(const BiasWeight&);
  void (*dropout)(const Dropout&);
  void (*embed_forward)(const EmbedForward&);
  void (*embed_weight)(const EmbedWeight&);
  void (*positions_forward)(const PositionsForward&);
  void (*positions_weight)(const PositionsWeight&);
  void (*cross_entropy_fused)(const CrossEntropy&);
  void (*cross_entropy_loss_only)(const CrossEntropy&);
  void (*cross_entropy_max)(const CrossEntropy&);
  void (*cross_entropy_sum)(const CrossEntropy&);
  void (*cross_entropy_grad)(const CrossEntropy&);
  void (*sgd)(const Sgd&);
  void (*adamw)(const AdamW&);
  void (*lion)(const Lion&);
  void (*adamw8bit)(const AdamW8bit&);
  void (*add)(const Add&);
  void (*maximum)(const Add&);  ///< c = max(a, b), elementwise
  void (*tree_combine)(const TreeCombine&);
  void (*sum_scalars)(const SumScalars&);
  void (*fill)(float* x, int64_t n, float value);
  /// Sum of squares in fp64, of one buffer; not order-exact (a metric), yet the same for one buffer on every variant.
  double (*squared_norm)(const float* x, int64_t n);
  /// y[i] = elementary function of x[i]; the vector forms, for tests and for whoever needs them. y may be x.
  void (*exp)(const float* x, int64_t n, float* y);
  void (*log)(const float* x, int64_t n, float* y);
  void (*tanh)(const float* x, int64_t n, float* y);
};

/// The variants compiled in, most capable first; the last runs on every x86-64 (or, elsewhere, is the only one).
std::span<const Kernels* const> all_variants();
/// Whether this processor and operating system can run `k`.
bool runs_here(const Kernels& k);
/// The most capable variant that runs here.
const Kernels& kernels_for_this_processor();
/// The name of the variant in results: "x86-64-v4 + oneDNN 2.6.3".
std::string description(const Kernels& k);

}  // namespace shardlab::kernels
