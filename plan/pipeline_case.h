// The pipeline of a case: its slots, and the layers of each part of the model.
#pragma once

#include <string_view>
#include <vector>

#include "plan/case.h"

namespace shardlab {

/// Number of parts of the model under the case's schedule. kAuto: the smallest possible number. kTable: `check_pipeline` must accept the table.
int parts_of(const Case& c);

/// The first layer of each part, and then the number of layers of the model: parts + 1 values. The pipeline must be decided. The
/// embedding belongs to the first part and the head to the last. Without `stage_layers` parts are as even as can be, and the first
/// parts take the layers left over.
std::vector<int> first_layers(const Case& c);

/// The value of `stage_layers` that asks for layers to be dealt out by predicted time, and of `expert_placement` that asks for
/// experts to be placed by expected rows.
inline constexpr std::string_view kBalanced = "balanced";

/// The value of `stage_layers` that asks for layers to be dealt out by the time that they took in the run that is resumed, and of
/// `expert_placement` that asks for experts to be placed by the rows that they had in it.
inline constexpr std::string_view kMeasured = "measured";

/// Whether the pipeline is decided: neither `schedule: auto` nor `stage_layers: balanced` nor `stage_layers: measured` is left, which need
/// predicted or measured seconds.
bool is_pipeline_decided(const Case& c);

/// Whether the embedding and the head lie on one stage.
bool ends_share_stage(const Case& c);

/// The slots of the case's pipeline. The pipeline must be decided, and `check_pipeline` must accept it.
PipelineSchedule schedule_of(const Case& c);

/// Refuses stages, parts, layers, micro-batches and schedule that do not go together.
Result<void> check_pipeline(const Case& c);

}  // namespace shardlab
