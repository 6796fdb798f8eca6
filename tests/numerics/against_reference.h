// What a case trains to, held against the separately written single-rank reference.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "tests/namespaces.h"
#include "tests/numerics/matrix.h"
#include "tests/numerics/reference/trainer.h"
#include "tests/numerics/train_case.h"

namespace shardlab::testing {

inline constexpr int kSteps = 5;

/// What the reference came to after `kSteps` steps, and where it began.
template <class T>
struct Expected {
  std::vector<T> losses;
  std::vector<double> squared_norms;  ///< of the gradients, in fp64
  std::map<std::string, std::vector<T>> initial, parameters;
  T validation_loss = 0;
};

/// Trains the reference on the subject's recipe, in fp32 or fp64. `blocks`: of moments in 8 bits; empty: of each parameter by itself.
template <class T>
Expected<T> expect(const Subject& subject, const TokenOrder& order = {}, bool packed = false,
                   std::vector<typename reference::Trainer<T>::Block> blocks = {});

/// Everything that differs in a bit, or is no number, one a line; squared norms, which add in another order, by more than 1e-12.
std::string differences(const Case& config, const Expected<float>& want, const Trained& have);

/// Distance of all parameters from the fp64 reference, relative to how far that one has moved from its start.
double error_of(const Expected<double>& want, const Trained& have);

}  // namespace shardlab::testing
