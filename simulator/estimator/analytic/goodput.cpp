#include "simulator/estimator/analytic/goodput.h"

#include <algorithm>
#include <cmath>

namespace shardlab::simulator::analytic {

Goodput goodput(const Interruptions& i, int64_t devices) {
  Goodput g;
  g.job_mtbf_s = i.device_mtbf_s / static_cast<double>(std::max<int64_t>(1, devices));
  const double m = g.job_mtbf_s;
  if (i.interval_s > 0) {
    g.interval_s = i.interval_s;
  } else {
    // With x = I/M and c = C/M: log(1 - x) + x + c falls from c at 0, and is below 0 before 1.
    double low = 0, high = 1;
    for (int step = 0; step < 200; ++step) {
      const double x = 0.5 * (low + high);
      (std::log1p(-x) + x + i.checkpoint_s / m > 0 ? low : high) = x;
    }
    g.interval_s = m * 0.5 * (low + high);
  }
  // Of free checkpoints the best interval is none at all: nothing but restarts is lost.
  const double tried = g.interval_s > 0 ? m * std::expm1((g.interval_s + i.checkpoint_s) / m) / g.interval_s : 1;
  g.share = std::exp(-i.restart_s / m) / tried;
  g.checkpoints = g.interval_s > 0 ? g.share * i.checkpoint_s / g.interval_s : 0;
  g.lost = 1 - g.share - g.checkpoints;
  g.failures_a_day = 86400 / m;
  return g;
}

}  // namespace shardlab::simulator::analytic
