// A single-rank trainer with no plan, no ranks, no micro-batches and no kernels: the witness that every layout is compared with.
// It follows docs/canonical-order.md literally. Micro-batches change nothing there: a step is a tree over its sequences.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "plan/case.h"
#include "plan/model.h"
#include "tests/numerics/reference/experts.h"
#include "tests/numerics/reference/ops.h"

namespace shardlab::reference {

/// One value per parameter of `parameters_of`, in its order. Gradients of a tied model have one tensor more at the end: the
/// head's own, before it is added to the embedding's.
template <class T>
using Tensors = std::vector<Tensor<T>>;

/// What one sequence contributes to a step.
template <class T>
struct Contribution {
  T nll = 0;
  Tensors<T> gradients;
  std::vector<std::vector<int64_t>> load;  ///< by layer and expert: tokens that went there. Empty without biases of routers
};

/// Trains `model` as `train` says: G = `sequences` sequences a step, of which `micro_batch` and `grad_accumulation` say nothing
/// here.
template <class T>
class Trainer {
 public:
  /// Parameters start as docs/canonical-order.md and plan/model.h say; both types start from the same fp32 values.
  /// Sequences lie in memory in `order`. `packed`: they are of several documents.
  Trainer(const Model& model, const Train& train, int64_t sequences, const TokenOrder& order = {}, bool packed = false);

  /// One optimizer step on `tokens`, G rows of seq_len + 1 ids. Returns the mean loss before the update. A packed row is seq_len ids, the
  /// targets of each, and the place of each in its document.
  T step(std::span<const int32_t> tokens);

  /// Elements whose moments share a scale where the optimizer keeps them in 8 bits, each by parameter and place in it.
  using Block = std::vector<std::pair<size_t, size_t>>;
  /// Before the first step. Until then blocks are of one parameter each, of 2048 elements in order, the last of what is left.
  void set_blocks(std::vector<Block> blocks) { blocks_ = std::move(blocks); }

  /// The optimizer's part of a step: `gradients` in the order of the parameters.
  void update(const Tensors<T>& gradients);
  /// The routers' part of a step: biases follow the tokens that went to each expert.
  void follow(const std::vector<std::vector<int64_t>>& load);

  /// Loss and summed gradients of the step to come; with a tied head the two gradients are added and the tensor at the end dropped.
  Contribution<T> gradients(std::span<const int32_t> tokens) const;
  /// Mean loss of the step to come, dropout included.
  T loss(std::span<const int32_t> tokens) const;
  /// What the gradients are of: the mean loss, and the losses of the routers, which nothing reports.
  T objective(std::span<const int32_t> tokens) const;
  /// logits[seq_len, vocab_rows] of one row, sequence `sequence` of the step to come.
  Tensor<T> logits(std::span<const int32_t> row, int64_t sequence) const;
  /// Mean loss without dropout.
  T validation_loss(std::span<const int32_t> tokens) const;

  const std::vector<ModelParameter>& parameters() const { return parameters_; }
  const Tensors<T>& values() const { return values_; }
  Tensors<T>& values() { return values_; }
  const Tensor<T>& value(const std::string& name) const { return values_[index(name)]; }
  int64_t steps() const { return step_; }
  /// What is added to the scores of a layer's experts for the choice; null: nothing.
  const Tensor<T>* router_bias(int64_t layer) const;
  /// The same, of all layers; none without biases of routers.
  Tensors<T>& router_biases() { return router_biases_; }

 private:
  struct LayerState;
  ExpertWeights<T> experts(int64_t layer) const;
  struct SequenceState;
  size_t index(const std::string& name) const;
  std::string in_layer(int64_t layer, const char* name) const;
  const Tensor<T>* bias(const std::string& name) const;
  void drop(Tensor<T>& z, int64_t layer, int site, int64_t sequence) const;
  Normed<T> normed(const Tensor<T>& x, const std::string& name) const;
  /// Numbers of a row.
  size_t length() const { return static_cast<size_t>(packed_ ? 3 * train_.seq_len : train_.seq_len + 1); }
  std::span<const int32_t> row(std::span<const int32_t> tokens, int64_t sequence) const {
    return tokens.subspan(static_cast<size_t>(sequence) * length(), length());
  }
  /// The ids of a row `ahead` behind each token of the storage.
  std::vector<int32_t> stored(std::span<const int32_t> row, size_t ahead) const;
  std::vector<int32_t> targets(std::span<const int32_t> row) const {
    return stored(row, packed_ ? static_cast<size_t>(train_.seq_len) : 1);
  }
  Text text_of(std::span<const int32_t> row) const;
  /// The text as the queries of a layer see it, and the base of the layer's rotary embedding.
  Text seen_in(int64_t layer, Text text) const;
  float theta(int64_t layer) const;
  SequenceState forward(std::span<const int32_t> row, int64_t sequence) const;
  void project_latents(LayerState& l, int64_t layer, const Text& text) const;
  LayerState forward_layer(const Tensor<T>& x, int64_t layer, int64_t sequence, const Text& text) const;
  Tensor<T> backward_layer(const LayerState& saved, Tensor<T> dy, int64_t layer, int64_t sequence, const Text& text,
                           Tensors<T>& gradients) const;
  Tensor<T> backward_norm(const Tensor<T>& dy, const Tensor<T>& x, const Normed<T>& saved, const std::string& name,
                          Tensors<T>& gradients) const;
  Contribution<T> contribution(std::span<const int32_t> row, int64_t sequence) const;
  Tensors<T> clipped(Tensors<T> gradients) const;
  void update_one(size_t parameter, const Tensor<T>& gradient);
  void store_moments();

  Model model_;
  Train train_;
  int64_t sequences_;
  TokenOrder order_;
  bool packed_;
  Heads heads_;
  std::vector<ModelParameter> parameters_;
  std::map<std::string, size_t> index_;
  Tensors<T> values_, first_moment_, second_moment_;
  std::vector<Block> blocks_;
  Tensors<T> router_biases_;  ///< by layer
  int64_t step_ = 0;
};

extern template class Trainer<float>;
extern template class Trainer<double>;

}  // namespace shardlab::reference
