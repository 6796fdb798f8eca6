// Seconds of a condensed plan's ops, pieces and stretches on one machine.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <span>
#include <vector>

#include "simulator/interpreter/cost_model.h"
#include "simulator/interpreter/segments/beside.h"
#include "simulator/interpreter/segments/condense.h"

namespace shardlab::simulator::segments {

/// A stretch that has the device for itself. With n ops that take d_0 .. d_(n-1), begun at t as launch number l + 1 of its host,
/// it ends at
///
///   max(t + alone, l * dispatch + launched),   alone = sum d,
///   launched = max over j of (j + 1) * dispatch + sum over k >= j of d_k
///
/// since op j begins when the one before has ended and when it was launched.
struct StretchCost {
  double alone = 0;
  double launched = 0;
};

/// A stretch beside a set of other ops, piece by piece.
struct Track {
  std::vector<const Profile*> profiles;
  std::vector<double> rest;  ///< seconds from the begin of each run of repeated pieces to the end of the last
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
  std::span<const Repeated> pieces_of(int32_t stretch) const { return text_.stretches[static_cast<size_t>(stretch)].pieces; }
  const Track& track(int32_t stretch, Beside::Set& set) {
    const std::vector<const Track*>& known = tracks_[static_cast<size_t>(stretch)];
    const size_t number = static_cast<size_t>(set.number);
    return number < known.size() && known[number] != nullptr ? *known[number] : add_track(stretch, set);
  }

 private:
  void price_ops(const Plan& plan, const PlacedCostModel& costs);
  void price_pieces();
  void price_stretches();
  const Track& add_track(int32_t stretch, Beside::Set& set);

  const Condensed& text_;
  double dispatch_ = 0, wake_ = 0;
  Beside beside_;
  std::vector<Cost> ops_;
  std::vector<Demand> demands_;           ///< by op
  std::vector<std::vector<Cost>> costs_;  ///< by piece
  std::vector<int32_t> same_as_;          ///< by piece: the first piece of equal cost (stages whose groups lie alike)
  std::vector<StretchCost> pieces_;
  std::vector<StretchCost> stretches_;
  std::deque<Track> all_tracks_;
  std::vector<std::vector<const Track*>> tracks_;  ///< by stretch and set; null: not asked for
};

}  // namespace shardlab::simulator::segments
