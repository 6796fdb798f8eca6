#include "plan/intervals.h"

#include <algorithm>

namespace shardlab {

Intervals unite(Intervals all, Interval bounds) {
  for (Interval& i : all) i = {std::max(i[0], bounds[0]), std::min(i[1], bounds[1])};
  std::erase_if(all, [](const Interval& i) { return i[0] >= i[1]; });
  std::sort(all.begin(), all.end());
  Intervals united;
  for (const Interval& i : all) {
    if (!united.empty() && i[0] <= united.back()[1])
      united.back()[1] = std::max(united.back()[1], i[1]);
    else
      united.push_back(i);
  }
  return united;
}

double length(const Intervals& intervals) {
  double sum = 0;
  for (const Interval& i : intervals) sum += i[1] - i[0];
  return sum;
}

double common(const Intervals& a, const Intervals& b) {
  double sum = 0;
  for (size_t i = 0, j = 0; i < a.size() && j < b.size();) {
    sum += std::max(0.0, std::min(a[i][1], b[j][1]) - std::max(a[i][0], b[j][0]));
    if (a[i][1] < b[j][1])
      ++i;
    else
      ++j;
  }
  return sum;
}

Intervals without(const Intervals& a, const Intervals& b) {
  Intervals rest;
  size_t j = 0;
  for (Interval i : a) {
    while (j < b.size() && b[j][1] <= i[0]) ++j;
    for (size_t k = j; k < b.size() && b[k][0] < i[1]; ++k) {
      if (b[k][0] > i[0]) rest.push_back({i[0], b[k][0]});
      i[0] = b[k][1];
    }
    if (i[0] < i[1]) rest.push_back(i);
  }
  return rest;
}

Intervals joined(Intervals a, const Intervals& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

}  // namespace shardlab
