// What shardlab's own executor holds and sends, by the closed forms that its plans are held to; in plain numbers, so that whoever
// estimates need not know the language of plans.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "plan/case.h"

namespace shardlab::simulator::analytic {

/// Bytes of one stage at its peak.
struct ExecutorStage {
  int64_t parameters = 0, masters = 0, gradients = 0, moments = 0, activations = 0, temporaries = 0;
  int64_t gathered = 0;        ///< whole parameters under zero 3
  int64_t rest = 0;            ///< inputs, metrics, the workspace of kernels
  int64_t peak = 0;            ///< the sum of these
  int64_t host = 0, nvme = 0;  ///< at their own peaks
};

/// Bytes sent in a step over all ranks.
struct ExecutorWire {
  int64_t tensor = 0, gradients = 0, weights = 0, pipeline = 0, ends = 0, metrics = 0;
};

struct ExecutorBytes {
  std::vector<ExecutorStage> stages;
  ExecutorWire wire;
};

/// Nothing where `check` refuses the case. Source: simulator/closed_form.h.
std::optional<ExecutorBytes> executor_bytes(const Case& config);

/// Whether the time of a case has a closed form, whatever its model and machine say. Source: simulator/step_form.h.
bool has_executor_time(const Case& config);

/// Seconds of a step on the stage that ends last.
struct ExecutorTime {
  double forward = 0, backward = 0, recompute = 0, update = 0;
  double launch = 0, tensor = 0, data = 0, pipeline = 0;  ///< waits, and collectives that nothing hides
  double hidden = 0;                                      ///< collectives beside kernels; not of the sum
};

/// Nothing where the case has no closed form of time, or the machine no rates for it. Source: simulator/step_form.h.
std::optional<ExecutorTime> executor_time(const Case& config);

}  // namespace shardlab::simulator::analytic
