// What a step would cost if some of its ops were faster, or free: a cost model with changed prices.
//
//   "linear=2"         all matrix products twice as fast
//   "all_reduce=free"  all-reduces take no time
//   "launch=4"         the host launches ops four times as fast
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "plan/base/result.h"
#include "plan/program.h"
#include "simulator/interpreter/scaled_costs.h"

namespace shardlab::simulator {

/// The ops that a word names, and what becomes of their time.
struct PriceChange {
  std::string what;   ///< a word of `words_of_prices`
  double factor = 1;  ///< of their seconds: 0.5 is twice as fast, 0 is free
};

/// A word that names ops of a plan, and what sort of word it is.
struct PriceWord {
  enum class Sort : uint8_t {
    kClass,     ///< "compute", "communication", "copies": every op is of exactly one class
    kHost,      ///< "launch": the host's time for every instruction
    kKind,      ///< "linear", or with the phase "linear.F", as kernels are named
    kStrategy,  ///< what a pass put into the step: "tensor-parallel"
    kLabel,     ///< "attn.qkv", or its beginning "attn"
  } sort = Sort::kKind;
  std::string word;
  friend bool operator==(const PriceWord&, const PriceWord&) = default;
};
std::string_view name_of(PriceWord::Sort sort);

/// The words that name something in the plan: classes, the host, kinds, strategies, labels, each sort in alphabetical order. A word
/// of an earlier sort is not repeated under a later one.
std::vector<PriceWord> words_of_prices(const Plan& plan);

/// The prices of another model, changed.
///
/// Formula: seconds and demands of an op times the factors of all changes that name it; the host's launch times the factors of
///   "launch". Everything else is the other model's: what an op waits for, and what it shares with others, follows from the
///   simulation.
/// Units: seconds. Source: the other model. Valid when: the change leaves the plan as it is.
class RepricedCostModel final : public ScaledCostModel {
 public:
  /// `base` and `plan` must outlive this; only instructions of `plan` are asked for. A word that names nothing changes nothing.
  RepricedCostModel(const PlacedCostModel& base, const Plan& plan, std::span<const PriceChange> changes);

  Seconds dispatch() const override { return Seconds(base().dispatch().value * launch_); }

 private:
  double factor_of(const Instruction& instruction) const override;

  std::unordered_map<const Op*, double> factors_;  ///< of ops whose price is changed
  double launch_ = 1;
};

/// Seconds for which the busiest stream of a rank is occupied by the ops that a word names, each alone on the machine: no step is
/// shorter than that, however well they hide behind others. `programs` are indexed by role.
double occupied_by(const Plan& plan, std::span<const Program> programs, const PlacedCostModel& costs, std::string_view word);

}  // namespace shardlab::simulator
