#include "simulator/interpreter/segments/prices.h"

#include <algorithm>
#include <bit>
#include <unordered_map>

namespace shardlab::simulator::segments {
namespace {

/// The cost of `first` and then `second`. `launches_s`: the time in which the host launches `first`.
StretchCost followed_by(const StretchCost& first, const StretchCost& second, double launches_s) {
  return {first.alone + second.alone, std::max(first.launched + second.alone, launches_s + second.launched)};
}

}  // namespace

Prices::Prices(const Plan& plan, const Condensed& text, const PlacedCostModel& costs)
    : text_(text), dispatch_(costs.dispatch().value), wake_(costs.wake().value), tracks_(text.stretches.size()) {
  price_ops(plan, costs);
  price_pieces();
  price_stretches();
}

void Prices::price_ops(const Plan& plan, const PlacedCostModel& costs) {
  ops_.reserve(text_.ops.size());
  demands_.reserve(text_.ops.size());
  for (const AskedOp& op : text_.ops) {
    Cost& cost = ops_.emplace_back();
    Demand& demand = demands_.emplace_back();
    cost.spent = op.spent;
    if (op.spent == Spent::kCommunication) {
      if (!op.moves) continue;
      const PlacedCostModel::Slowest slowest = costs.slowest_of(plan, op.example, op.communication);
      cost.seconds = slowest.seconds.value;
      demand = slowest.demand;
    } else {
      cost.seconds = costs.compute(plan, op.example, 1).value;
      demand = costs.demand(plan, op.example, {}, Seconds(cost.seconds));
    }
    if (cost.seconds > 0) cost.kind = beside_.kind_of(shares_of(demand, cost.seconds));
  }
}

int32_t Prices::kind_within(int32_t op, double seconds) {
  if (of(op).seconds == seconds) return of(op).kind;
  return beside_.kind_of(shares_of(demands_[static_cast<size_t>(op)], seconds));
}

void Prices::price_pieces() {
  std::unordered_map<uint64_t, std::vector<int32_t>> by_hash;
  for (const Piece& piece : text_.pieces) {
    const int32_t number = static_cast<int32_t>(costs_.size());
    std::vector<Cost>& costs = costs_.emplace_back();
    StretchCost& sum = pieces_.emplace_back();
    costs.reserve(piece.ops.size());
    uint64_t hash = piece.ops.size();
    for (const int32_t op : piece.ops) {
      const Cost& c = of(op);
      costs.push_back(c);
      hash = (hash ^ std::bit_cast<uint64_t>(c.seconds) ^ static_cast<uint64_t>(c.kind)) * 0x9e3779b97f4a7c15ull;
    }
    for (size_t j = costs.size(); j-- > 0;) {
      sum.alone += costs[j].seconds;
      sum.launched = std::max(sum.launched, dispatch_ * static_cast<double>(j + 1) + sum.alone);
    }
    std::vector<int32_t>& alike = by_hash[hash];
    const auto same = std::ranges::find_if(alike, [&](int32_t other) { return costs_[static_cast<size_t>(other)] == costs; });
    same_as_.push_back(same != alike.end() ? *same : number);
    if (same == alike.end()) alike.push_back(number);
  }
}

void Prices::price_stretches() {
  stretches_.reserve(text_.stretches.size());
  for (const Stretch& stretch : text_.stretches) {
    StretchCost sum;
    double launches_s = 0;
    for (const Repeated& r : stretch.pieces) {
      const StretchCost& once = pieces_[static_cast<size_t>(r.piece)];
      const double ops = static_cast<double>(text_.pieces[static_cast<size_t>(r.piece)].ops.size()), again = r.times - 1;
      // Linear in the repetition: the slowest launch is one of the first or of the last time.
      const StretchCost repeated{r.times * once.alone, once.launched + again * std::max(once.alone, dispatch_ * ops)};
      sum = followed_by(sum, repeated, launches_s);
      launches_s += dispatch_ * ops * r.times;
    }
    stretches_.push_back(sum);
  }
}

const Track& Prices::add_track(int32_t stretch, Beside::Set& set) {
  std::vector<const Track*>& known = tracks_[static_cast<size_t>(stretch)];
  const size_t number = static_cast<size_t>(set.number);
  if (number >= known.size()) known.resize(number + 1, nullptr);
  Track& track = all_tracks_.emplace_back();
  known[number] = &track;
  const std::span<const Repeated> pieces = pieces_of(stretch);
  track.rest.resize(pieces.size());
  for (const Repeated& r : pieces) {
    const size_t same = static_cast<size_t>(same_as_[static_cast<size_t>(r.piece)]);
    track.profiles.push_back(&beside_.profile(static_cast<int32_t>(same), costs_[same], set));
  }
  double rest = 0;
  for (size_t r = pieces.size(); r-- > 0;) track.rest[r] = rest += pieces[r].times * track.profiles[r]->total(0);
  return track;
}

}  // namespace shardlab::simulator::segments
