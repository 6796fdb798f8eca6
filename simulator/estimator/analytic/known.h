// Which keys of a case the analytic estimate takes over.
#pragma once

#include "plan/base/result.h"
#include "plan/case.h"

namespace shardlab::simulator::analytic {

/// Refuses, by its name, a layout or training key that is set and that neither a point nor a study takes over.
Result<void> check_known(const Case& config);

/// Puts the layout, training and data keys that no estimate has a form for back to their defaults.
void clear_unknown(Case& config);

/// Puts the numbers that change neither memory nor time (seed, learning rate, betas, ...) back to their defaults: cases that differ
/// in these alone share their estimate.
void clear_unpriced(Train& train);

}  // namespace shardlab::simulator::analytic
