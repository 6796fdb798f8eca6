// Interpolation between measured points on a grid of shapes.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace shardlab::simulator {

/// Seconds by shape, for the points of one kernel at one concurrency.
///
/// Formula: log seconds multilinear in the logs of the extents over the cell of the grid that holds the shape: exact for
///   every power law, hence for a kernel at a constant rate. Beyond the grid the outermost cell's slope goes on, kept within
///   [0, 1.25] an extent. Where the extent enters squared, the caller states a `max_slope` of 2.25. Where points do not fill a
///   grid, the nearest measured shape is scaled by the ratio of the products of extents.
/// Units: seconds; extents are positive counts.
class RateTable {
 public:
  struct Answer {
    double seconds = 0;
    bool extrapolated = false;  ///< the shape lies more than a hundredth outside the grid, and not on a measured shape
  };

  RateTable() = default;
  /// `shapes[i]` took `seconds[i]`; all shapes have the same number of extents, at least one.
  RateTable(std::span<const std::vector<int64_t>> shapes, std::span<const double> seconds, double max_slope = 1.25);

  Answer at(std::span<const int64_t> shape) const;

 private:
  Answer nearest(std::span<const int64_t> shape) const;

  double max_slope_ = 1.25;
  std::vector<std::vector<double>> axes_;    ///< logs of the distinct extents, ascending
  std::vector<double> grid_;                 ///< logs of seconds, last extent fastest; empty when points are missing
  std::vector<std::vector<double>> points_;  ///< logs of the shapes
  std::vector<double> seconds_;              ///< logs
};

}  // namespace shardlab::simulator
