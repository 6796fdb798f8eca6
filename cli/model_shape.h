// A model file as the analytic forms see it: where what users write meets what predictions read.
#pragma once

#include "cli/namespaces.h"
#include "simulator/analytic/shape.h"
#include "sweeps/models.h"

namespace shardlab::cli {

/// Sizes for the analytic estimate, of every family that a config.json can name.
analytic::ModelShape model_shape(const ModelConfig& config);

}  // namespace shardlab::cli
