// Sets of time as sorted lists of disjoint intervals: what every analysis of a trace is made of.
#pragma once

#include <array>
#include <vector>

namespace shardlab {

using Interval = std::array<double, 2>;
/// Disjoint, ascending.
using Intervals = std::vector<Interval>;

/// The union of `all`, clipped to `bounds`. `all` may overlap and be in any order; empty and reversed intervals count as nothing.
Intervals unite(Intervals all, Interval bounds);

double length(const Intervals& intervals);

/// Length of the intersection.
double common(const Intervals& a, const Intervals& b);

/// The part of `a` outside `b`.
Intervals without(const Intervals& a, const Intervals& b);

/// Both lists, one after the other: to be united.
Intervals joined(Intervals a, const Intervals& b);

}  // namespace shardlab
