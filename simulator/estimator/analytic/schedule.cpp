#include "simulator/estimator/analytic/schedule.h"

#include <algorithm>
#include <cmath>

namespace shardlab::simulator::analytic {

double in_flight(Schedule schedule, int64_t stages, int64_t stage, int64_t micro_batches, int64_t virtual_stages) {
  const auto p = static_cast<double>(stages), m = static_cast<double>(micro_batches), v = static_cast<double>(virtual_stages);
  const auto behind = static_cast<double>(stages - stage);
  switch (schedule) {
    case Schedule::kNone: return 1;
    case Schedule::kAfab:
    case Schedule::kBreadthFirst: return m;
    case Schedule::k1F1B: return std::min(m, behind);
    case Schedule::kInterleaved: return std::min(m * v, 2 * (behind - 1) + (v - 1) * p + 1) / v;
    case Schedule::kZbH1:
    case Schedule::kZbV: return std::min(m, p);
    case Schedule::kZbH2: return std::min(m, 2 * p - 1);
    case Schedule::kVHalf: return std::min(m, std::floor((p + 2) / 2));
    case Schedule::kVMin: return std::min(m, std::floor((p + 4) / 3));
    case Schedule::kDualPipe:
    case Schedule::kDualPipeV: return std::min(m, p + 1);
    default: return m;  // no point has another
  }
}

double bubble_s(Schedule schedule, int64_t stages, int64_t virtual_stages, const StageTimes& t) {
  const auto others = static_cast<double>(stages - 1);
  const double whole = t.sum - t.longest;
  double seconds = 0;
  switch (schedule) {
    case Schedule::kNone: return 0;
    case Schedule::kAfab:
    case Schedule::k1F1B: seconds = whole; break;
    case Schedule::kInterleaved:
    case Schedule::kBreadthFirst: seconds = whole / static_cast<double>(virtual_stages); break;
    case Schedule::kZbH1: seconds = others * (t.forward + t.input - t.weight); break;
    case Schedule::kZbH2:
    case Schedule::kZbV: seconds = others * (t.forward + t.input - 2 * t.weight); break;
    case Schedule::kVHalf: seconds = whole / 2; break;
    case Schedule::kVMin: seconds = whole * 2 / 3; break;
    case Schedule::kDualPipe: seconds = (static_cast<double>(stages) / 2 - 1) * (t.forward + 2 * t.input - t.weight); break;
    case Schedule::kDualPipeV: seconds = others * (t.forward + 2 * t.input - t.weight) / 2; break;
    default: break;  // no point has another
  }
  return std::max(0.0, seconds);
}

}  // namespace shardlab::simulator::analytic
