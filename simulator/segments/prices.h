// Seconds of a condensed plan's ops, pieces and stretches on one machine.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "simulator/cost_model.h"
#include "simulator/segments/beside.h"
#include "simulator/segments/condense.h"

namespace shardlab::segments {

/// A stretch that has the device for itself. With n ops that take d_0 .. d_(n-1), begun at t as launch number l + 1 of its host, it
/// ends at
///
///   max(t + alone, l * dispatch + launched),   alone = sum d,   launched = max over j of (j + 1) * dispatch + sum over k >= j of
///   d_k
///
/// since op j begins when the one before has ended and when it was launched.
struct StretchCost {
  double alone = 0;
  double launched = 0;
};

class Prices {
 public:
  Prices(const Plan& plan, const Condensed& text, const PlacedCostModel& costs);

  double dispatch() const { return dispatch_; }
  double wake() const { return wake_; }
  const Cost& of(int32_t op) const { return ops_[static_cast<size_t>(op)]; }
  /// The kind of an op that moves in the time of its meeting's mover.
  int32_t kind_within(int32_t op, double seconds);
  const StretchCost& stretch(int32_t s) const { return stretches_[static_cast<size_t>(s)]; }

  Beside& beside() { return beside_; }
  const Profile& profile(int32_t piece, int32_t set) {
    const int32_t same = same_as_[static_cast<size_t>(piece)];
    return beside_.profile(same, costs_[static_cast<size_t>(same)], set);
  }

 private:
  void price_ops(const Plan& plan, const Condensed& text, const PlacedCostModel& costs);
  void price_pieces(const Condensed& text);
  void price_stretches(const Condensed& text);

  double dispatch_ = 0, wake_ = 0;
  Beside beside_;
  std::vector<Cost> ops_;
  std::vector<Demand> demands_;           ///< by op
  std::vector<std::vector<Cost>> costs_;  ///< by piece
  std::vector<int32_t> same_as_;          ///< by piece: the first that costs the same (stages whose groups lie alike)
  std::vector<StretchCost> pieces_;
  std::vector<StretchCost> stretches_;
};

}  // namespace shardlab::segments
