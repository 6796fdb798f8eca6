// A case lowered, executed and read back: the other side of every comparison with the reference.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "plan/base/result.h"
#include "plan/case.h"
#include "plan/interfaces.h"
#include "tests/namespaces.h"

namespace shardlab::testing {

struct Trained {
  std::vector<float> losses;                             ///< by step
  std::vector<double> squared_norms;                     ///< of the gradient, by step, where the case asks for it
  std::map<std::string, std::vector<float>> parameters;  ///< logical values; every replica was compared bit for bit
  std::vector<bool> rolled_back;  ///< by period of the plan: whether its steps must not stand and were made again
  int skipped = 0;                ///< steps without an update
  float validation_loss = 0;      ///< of the trained parameters on the sequences of step 0, by the validation plan
};

/// Lowers `config`, trains it for `steps` steps (as many whole periods of its plan as they hold) on thread ranks of this process,
/// hands its parameters to the validation plan and runs that once. Refuses what `lower` and the session refuse, and replicas that differ.
Result<Trained> train_case(const Case& config, const BatchSource& source, int steps);

}  // namespace shardlab::testing
