// What failures and checkpoints leave of a training run's time.
#pragma once

#include <cstdint>

namespace shardlab::simulator::analytic {

/// What interrupts a run. A device here stands for all that fails with it: its part of the host, links and network.
struct Interruptions {
  double device_mtbf_s = 0;  ///< mean seconds between failures of one device; the run ends with each
  double checkpoint_s = 0;  ///< seconds for which a checkpoint holds up training; of one written aside, the copy that is waited for
  double restart_s = 0;     ///< from a failure to the first step after it: noticed, replaced, loaded, warmed up
  double interval_s = 0;    ///< of training between checkpoints; 0: the best
};

struct Goodput {
  double job_mtbf_s = 0;   ///< of all devices together
  double interval_s = 0;   ///< of training between checkpoints
  double share = 1;        ///< seconds of training that is kept, of all seconds
  double checkpoints = 0;  ///< share of the time in which training waits for checkpoints
  double lost = 0;         ///< share of the time in which work is done again or nothing runs
  double failures_a_day = 0;
};

/// The expected share of a run's time that is training which is kept.
///
/// Formula: failures are a Poisson process of rate 1/M, M = device_mtbf_s / devices; they strike in checkpoints and restarts too, and
///   all training since the last checkpoint is done again. Kept seconds T take M e^(R/M) (e^((I + C)/M) - 1) T / I with interval I,
///   checkpoint C, restart R. The best interval solves (1 - I/M) e^((I + C)/M) = 1; for C far below M that is Young's sqrt(2 C M).
/// Units: seconds. Source: J. T. Daly, A higher order estimate of the optimum checkpoint interval for restart dumps (2006), eq. 20
///   and 22. Valid when: failures are independent and equally likely at any time, and a spare takes a failed device's place.
Goodput goodput(const Interruptions& interruptions, int64_t devices);

}  // namespace shardlab::simulator::analytic
