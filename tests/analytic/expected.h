// The closed forms that plans are held to, as plain numbers.
#pragma once

#include <cstdint>
#include <vector>

#include "plan/case.h"

namespace shardlab::simulator::analytic::testing {

struct ExpectedStage {
  int64_t peak = 0, parameters = 0, gradients = 0, moments = 0, activations = 0;
};
struct Expected {
  std::vector<ExpectedStage> stages;
  int64_t wire_total = 0, tensor_wire = 0, gradient_wire = 0;
};
Expected expected_of(const Case& config);

}  // namespace shardlab::simulator::analytic::testing
