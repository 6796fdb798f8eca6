// The summary of a set of outcomes: the answer first. The HTML report, the markdown report and the end of `run` show it.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "plan/outcome.h"

namespace shardlab::reports {

/// Fewer cases have no order to speak of.
constexpr int kFewestOrdered = 5;

/// How good the predictions were over some cases. A case counts where it is ok and has both sides.
struct Accuracy {
  int cases = 0;
  double median_abs_pct = 0;  ///< of |step_error_pct|
  double worst_abs_pct = 0;
  int within_10 = 0;            ///< cases with |step_error_pct| <= 10
  int worst_case = -1;          ///< index into the outcomes
  double median_unplanned = 0;  ///< unplanned_time / measured step
  double median_spread = 0;     ///< `step_spread` of the measured side
  /// Kendall's tau-b of the predicted and the measured step times: 1 where both order the cases alike. None below `kFewestOrdered` cases,
  /// or where one side has one time for all.
  std::optional<double> order;
  int peak_exact = 0;  ///< predicted peak equals measured peak to the byte
  /// Cases with expert_bound whose predicted peak is larger, and no step of which made the second run, of which that may be.
  int peak_unseen = 0;
  int wire_cases = 0;  ///< cases whose transport counts the bytes that it sends
  int wire_exact = 0;
  int64_t peak_largest_miss = 0;  ///< largest |predicted - measured|, bytes
  int64_t wire_largest_miss = 0;
};

/// The promise about a case's losses (ARCHITECTURE.md, "How equal is equal").
enum class LossPromise : uint8_t {
  kExact,    ///< canonical mode in fp32: the same bits in every layout
  kRounded,  ///< sums in another order, or fewer bits: near, and no bound is promised
  kBlocks,   ///< moments in 8 bits, in other blocks and so with other scales than one rank has: no bound is promised
  kDesigned  ///< another method by design: compression, staleness, diloco, delayed updates, quantised weights or gradients
};
constexpr std::array kLossPromises{LossPromise::kExact, LossPromise::kRounded, LossPromise::kBlocks, LossPromise::kDesigned};
LossPromise loss_promise(const Case& config);

/// How far apart losses lie: the most over steps of (largest - smallest).
struct LossSpread {
  int cases = 0;
  double largest = 0;
  int at_step = -1;
};

/// Cases that train the same: same model, data, batch, optimizer and seed.
struct LossGroup {
  std::string label;             ///< "quick-gpt, 4096 tokens a step, adamw, seed 1"
  std::vector<int> cases;        ///< indices into the outcomes
  double largest_deviation = 0;  ///< max over steps of (max - min) over cases, on the steps that all have
  int at_step = -1;
  int steps = 0;  ///< steps that all have
  /// By LossPromise: spread among the cases of one promise; for kBlocks, among all cases but those of kDesigned; for kDesigned, among all cases.
  std::array<LossSpread, kLossPromises.size()> spread;
  Precision precision = Precision::kFp32;
  bool finite = true;             ///< no loss is nan or infinite
  std::optional<double> unigram;  ///< the largest of the cases' unigram losses
  double last = 0;                ///< median of the last losses
};

/// The best cases of one model. Tokens per second of different models say nothing of their layouts.
struct ModelBest {
  std::string model;
  int fastest = -1;   ///< most tokens/s among the model's ok cases, index
  int smallest = -1;  ///< least peak bytes of a rank, index
};

struct Summary {
  int64_t total = 0;
  std::array<int64_t, 5> by_status{};  ///< by Status
  bool by_measurement = false;         ///< fastest and smallest are measured; else predicted
  int fastest = -1;                    ///< most tokens/s among the ok cases, index or -1
  int smallest = -1;                   ///< least peak bytes of a rank
  std::vector<ModelBest> by_model;     ///< in the order of the cases
  Accuracy all;
  std::vector<std::pair<int, Accuracy>> by_world_size;  ///< ascending
  std::vector<LossGroup> losses;
};

/// `left_out` counts cases, by Status, that `cases` stand for without being among them (`Selection`).
Summary summarise(std::span<const CaseOutcome> cases, const std::array<int64_t, 5>& left_out = {});

/// A sentence of the answer with what kind of news it is.
struct Statement {
  enum class Mood : uint8_t { kAnswer, kGood, kNote, kBad } mood = Mood::kNote;
  std::string text;
};

/// The answer in sentences, most important first: fastest, smallest, how good the predictions were, whether memory and wire bytes
/// were exact, whether the losses agree, what failed. Complete sentences with figures and the names of the cases.
std::vector<Statement> statements(std::span<const CaseOutcome> cases, const Summary& summary);

}  // namespace shardlab::reports
