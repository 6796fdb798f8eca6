// The environment block of every report: place, time and program of the results.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "plan/outcome.h"

namespace shardlab::reports {

/// Place, time and program of the results of a run directory. One per call of `run` on the directory.
struct RunMetadata {
  std::string program_version;  ///< version and build, as outcomes carry it: the key of --resume
  std::string commit;           ///< of shardlab's own source, "-dirty" when changed, empty when unknown
  std::string compiler;
  std::string libraries;  ///< "oneDNN 2.7, fmt 9.1"
  std::string command;    ///< as typed
  std::string sweep;      ///< name of the sweep
  std::string date;       ///< ISO 8601, UTC
  std::string host;       ///< name of the machine
  std::string processor;
  std::string system;  ///< kernel and distribution
  int cores = 0;
  int64_t memory_bytes = 0;
  std::string calibration_id;
  double recorder_overhead_s = 0;
  int64_t dropped_events = 0;
  std::string traces;         ///< which cases keep their traces: "none", "measured", "all"; empty where an older run does not say
  std::vector<Claim> claims;  ///< what the sweep tests
  LossTarget loss_target;     ///< the loss that the sweep asks for
  friend bool operator==(const RunMetadata&, const RunMetadata&) = default;
};

}  // namespace shardlab::reports
