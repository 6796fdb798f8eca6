// The rows of the equality matrix: every legal layout of the values below, each on a tiny model.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>
#include <vector>

#include "plan/case.h"
#include "plan/interfaces.h"
#include "tests/namespaces.h"

namespace shardlab::testing {

/// One model with one recipe: everything that the reference depends on. Rows of one subject are compared with one reference run.
struct Subject {
  std::string name;
  Model model;
  Train train;
  int64_t sequences = 8;  ///< of one step, over all ranks
};

/// Both families, tied and untied, grouped queries, uneven stages, odd leaf sizes, dropout; each with SGD at lr 1 and with AdamW.
std::vector<Subject> subjects();
/// The one of that name; without one a bug.
Subject subject_named(std::string_view name);

/// Every layout of at most 8 ranks that some subject can be trained with: the product of the values of every layout key.
std::vector<Case> layouts();

/// Three stages, which the product above has not.
std::vector<Case> deep_layouts();

/// Sub-layers made again, alone and under other strategies.
std::vector<Case> selective_layouts();

/// State in host memory, alone and under other strategies.
std::vector<Case> offload_layouts();

/// Sequence parallelism with every ZeRO stage, pipelines, recompute and offload.
std::vector<Case> sequence_layouts();

/// Head and loss in pieces, of sequences and of parts of them, alone and under other strategies.
std::vector<Case> chunked_layouts();

/// A server on every worker's rank, under accumulation, tensor and pipeline parallelism, recompute and offload.
std::vector<Case> served_layouts();

/// Pipelines that learn at the end of the five steps whether one was to be clipped; for the subjects that are clipped.
std::vector<Case> validated_layouts();

/// Parts of each sequence on several ranks, alone and under other strategies, by the kinds of context parallelism in `kinds`. Canonical
/// rows have one sequence a micro-batch.
std::vector<Case> context_layouts(std::initializer_list<ContextKind> kinds);

/// Four and five axes at once, on 8 and 16 ranks: dp and ZeRO, tp and sequence parallelism, cp, pp and its schedules, and, of mixtures, ep; with
/// recompute, offload, overlap and chunks of the loss. Canonical rows have one sequence a micro-batch.
std::vector<Case> composed_layouts();

/// Mixtures of experts, with either optimizer.
std::vector<Subject> mixture_subjects();

/// Experts on one rank and shared among ranks, alone and under other strategies, for `mixture_subjects`.
std::vector<Case> expert_layouts();

/// Ranks along dp and tp that are no powers of two, which canonical mode refuses: for `uneven_subjects` in fast mode.
std::vector<Case> uneven_layouts();

/// A model whose heads, widths and batch three and six divide, its learning rate along a cosine with warm-up.
std::vector<Subject> uneven_subjects();

/// `layout` with the subject's model and recipe, its batch cut to fit; nothing when that is not legal.
std::vector<Case> rows_of(const Subject& subject, std::span<const Case> layouts);

/// "dp2 tp2 pp2 1f1b ga2 b2 zero1 bucket4096 overlap recompute".
std::string layout_name(const Case& config);

/// Distinct random tokens for every sequence of a run; packed, a sequence is random documents of five tokens on average.
class RandomText final : public BatchSource {
 public:
  explicit RandomText(int64_t vocab) : vocab_(vocab) {}
  void sequence(int64_t number, std::span<int32_t> out) const override;
  void packed(int64_t number, const PackedSequence& out) const override;

 private:
  int64_t vocab_;
};

}  // namespace shardlab::testing
