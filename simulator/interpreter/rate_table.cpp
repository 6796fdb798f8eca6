#include "simulator/interpreter/rate_table.h"

#include <algorithm>
#include <cmath>

#include "plan/base/check.h"

namespace shardlab::simulator {
namespace {

/// How far outside the grid a shape may lie and still count as measured: log of 1 %.
constexpr double kTolerance = 0.01;

double log_of(int64_t extent) { return std::log(static_cast<double>(std::max<int64_t>(extent, 1))); }

}  // namespace

RateTable::RateTable(std::span<const std::vector<int64_t>> shapes, std::span<const double> seconds, double max_slope)
    : max_slope_(max_slope) {
  SHARDLAB_CHECK(!shapes.empty() && shapes.size() == seconds.size(), "{} shapes, {} times", shapes.size(), seconds.size());
  const size_t dims = shapes[0].size();
  axes_.resize(dims);
  for (size_t i = 0; i < shapes.size(); ++i) {
    SHARDLAB_CHECK(shapes[i].size() == dims && dims > 0, "a shape of {} extents among shapes of {}", shapes[i].size(), dims);
    SHARDLAB_CHECK(seconds[i] > 0, "a measured time of {} s", seconds[i]);
    points_.emplace_back();
    for (size_t d = 0; d < dims; ++d) {
      points_.back().push_back(log_of(shapes[i][d]));
      axes_[d].push_back(points_.back().back());
    }
    seconds_.push_back(std::log(seconds[i]));
  }
  size_t cells = 1;
  for (auto& axis : axes_) {
    std::sort(axis.begin(), axis.end());
    axis.erase(std::unique(axis.begin(), axis.end()), axis.end());
    cells *= axis.size();
  }
  std::vector<double> grid(cells, std::nan(""));
  for (size_t i = 0; i < points_.size(); ++i) {
    size_t at = 0;
    for (size_t d = 0; d < dims; ++d)
      at = at * axes_[d].size() +
           static_cast<size_t>(std::lower_bound(axes_[d].begin(), axes_[d].end(), points_[i][d]) - axes_[d].begin());
    grid[at] = seconds_[i];
  }
  if (std::none_of(grid.begin(), grid.end(), [](double v) { return std::isnan(v); })) grid_ = std::move(grid);
}

RateTable::Answer RateTable::at(std::span<const int64_t> shape) const {
  SHARDLAB_CHECK(!points_.empty() && shape.size() == axes_.size(), "a shape of {} extents for a table of {}", shape.size(),
                 axes_.size());
  if (grid_.empty()) return nearest(shape);

  // By extent: the cell's lower corner, and the position in the cell, within [0, 1]; what lies beyond goes into `beyond`.
  const size_t dims = axes_.size();
  std::vector<size_t> corner(dims, 0);
  std::vector<double> fraction(dims, 0), beyond(dims, 0);
  Answer answer;
  for (size_t d = 0; d < dims; ++d) {
    const std::vector<double>& axis = axes_[d];
    const double x = log_of(shape[d]), inside = std::clamp(x, axis.front(), axis.back());
    beyond[d] = x - inside;
    if (std::abs(beyond[d]) > kTolerance) answer.extrapolated = true;
    if (axis.size() == 1) continue;
    const auto above = std::upper_bound(axis.begin(), axis.end() - 1, inside);
    corner[d] = std::max<size_t>(1, static_cast<size_t>(above - axis.begin())) - 1;
    fraction[d] = (inside - axis[corner[d]]) / (axis[corner[d] + 1] - axis[corner[d]]);
  }
  // The value and its slope along each extent, summed over the 2^dims corners.
  double value = 0;
  std::vector<double> slope(dims, 0);
  for (size_t bits = 0; bits < size_t{1} << dims; ++bits) {
    size_t at = 0;
    double weight = 1;
    std::vector<double> without(dims, 1);  // the weight but for the factor of one extent
    for (size_t d = 0; d < dims; ++d) {
      const bool upper = (bits >> d) & 1;
      const bool exists = !upper || axes_[d].size() > 1;
      at = at * axes_[d].size() + corner[d] + (upper && exists ? 1 : 0);
      const double factor = upper ? fraction[d] : 1 - fraction[d];
      weight *= factor;
      for (size_t e = 0; e < dims; ++e)
        if (e != d) without[e] *= factor;
    }
    value += weight * grid_[at];
    for (size_t d = 0; d < dims; ++d)
      if (axes_[d].size() > 1)
        slope[d] += ((bits >> d) & 1 ? 1 : -1) * without[d] * grid_[at] / (axes_[d][corner[d] + 1] - axes_[d][corner[d]]);
  }
  for (size_t d = 0; d < dims; ++d) value += beyond[d] * (axes_[d].size() > 1 ? std::clamp(slope[d], 0.0, max_slope_) : 1.0);
  answer.seconds = std::exp(value);
  return answer;
}

RateTable::Answer RateTable::nearest(std::span<const int64_t> shape) const {
  size_t best = 0;
  double best_distance = 0, best_ratio = 0;
  for (size_t i = 0; i < points_.size(); ++i) {
    double distance = 0, ratio = 0;
    for (size_t d = 0; d < shape.size(); ++d) {
      const double gap = log_of(shape[d]) - points_[i][d];
      distance += gap * gap;
      ratio += gap;
    }
    if (i == 0 || distance < best_distance) {
      best = i;
      best_distance = distance;
      best_ratio = ratio;
    }
  }
  return {std::exp(seconds_[best] + best_ratio), best_distance > kTolerance * kTolerance};
}

}  // namespace shardlab::simulator
