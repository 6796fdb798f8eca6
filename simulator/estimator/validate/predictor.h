// The analytic estimate as predictor of measured runs.
#pragma once

#include "simulator/estimator/validate/validate.h"

namespace shardlab::simulator::validation {

/// Predicts by simulator/estimator/analytic under the row's framework profile. Columns that a row leaves open get the framework's
/// defaults: FSDP frameworks shard everything (zero 3), torchtitan runs sequence parallelism wherever it runs tensor parallelism, a
/// mixture's experts are cut by tp as the layer is. The predictor remembers its preparations, so rows of one model and machine are
/// cheap. Not for several threads at once.
Predictor analytic_predictor();

}  // namespace shardlab::simulator::validation
