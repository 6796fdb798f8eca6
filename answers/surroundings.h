// What an answer may need of the place where it is asked.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "answers/namespaces.h"
#include "plan/base/result.h"
#include "plan/case.h"
#include "plan/expert_placement.h"
#include "plan/expert_rows.h"
#include "simulator/interpreter/pipeline_choice.h"

namespace shardlab::answers {

/// Rows of experts in the measured steps of a run, and where its experts lay.
struct MeasuredLoads {
  std::vector<ExpertRows> layers;           ///< ascending
  std::vector<ExpertPlacement> placements;  ///< as the run had them; empty where it had another number of ranks that share experts
};

/// What only a program can say. A question that needs what is not set here is refused.
struct Surroundings {
  std::function<Result<Machine>(const std::string& file)>
      local_machine;  ///< of `machine: local`; `file`: its calibration, or empty
  std::function<Result<MeasuredSeconds>(const Case& config)> resumed_seconds;  ///< of `stage_layers: measured`
  /// Of `expert_placement: measured`.
  std::function<Result<MeasuredLoads>(const Case& config)> resumed_loads;
  std::function<void(const std::string& remark)> tell = [](const std::string&) {};  ///< a remark that is no part of the answer
};

}  // namespace shardlab::answers
