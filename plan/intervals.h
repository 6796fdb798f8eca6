// Sets of time as sorted lists of disjoint intervals: what every analysis of a trace is made of.
#pragma once

#include <array>
#include <vector>

namespace shardlab {

using Interval = std::array<double, 2>;
/// Disjoint, ascending.
using Intervals = std::vector<Interval>;

/// The union of `all`, clipped to `bounds`. `all` may overlap and be in any order; what is empty or reversed counts as nothing.
Intervals unite(Intervals all, Interval bounds);

double length(const Intervals& intervals);

/// Length of what lies in both.
double common(const Intervals& a, const Intervals& b);

/// What of `a` does not lie in `b`.
Intervals without(const Intervals& a, const Intervals& b);

/// Both lists, one after the other: to be united.
Intervals joined(Intervals a, const Intervals& b);

}  // namespace shardlab
