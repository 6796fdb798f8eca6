// Models and points as the analytic forms see them: where what users write meets what predictions read.
#pragma once

#include "answers/namespaces.h"
#include "simulator/estimator/analytic/analytic.h"
#include "sweeps/models.h"
#include "sweeps/sweep.h"

namespace shardlab::answers {

/// Sizes for the analytic estimate, of every family that a config.json can name.
analytic::ModelShape model_shape(const ModelConfig& config);
/// The shape of a point's model, whether a case can hold it or not.
analytic::ModelShape model_shape(const sweeps::Point& point);

/// Which weights of the shape are trained, in one sentence; empty where all are.
std::string trained_text(const analytic::ModelShape& shape);

/// The layout of a point that is only estimated, with values that no case can hold. Refuses what estimates have no form for.
Result<analytic::Point> estimated_layout(const sweeps::Point& point);

/// Whose run is predicted where nobody says: on this machine shardlab's own, on one that is described a framework's.
std::string default_profile(const Machine& machine);

/// The profile of that name; refused with the nearest name where there is none.
Result<analytic::FrameworkProfile> profile_meant(const std::string& name);

}  // namespace shardlab::answers
