#include "runtime/post_validation.h"

namespace shardlab::runtime {

Result<ValidatedPeriod> run_validated(Session& session, int64_t step, const InStep& in_step,
                                      const std::function<void(const StepResult&, int64_t)>& stop) {
  ValidatedPeriod period{session.step(step), {}};
  if (!period.first.rolled_back) return period;
  const auto meeting = in_step();
  if (!meeting.ok()) return meeting.error();
  const auto state = take_state(session);
  if (!state.ok()) return state.error();
  SHARDLAB_TRY(give_state(*state, **meeting));
  const int64_t end = step + std::ssize(period.first.losses);
  for (int64_t i = step; i < end; ++i) {
    period.again.push_back((*meeting)->step(i));
    if (stop) stop(period.again.back(), i);
  }
  const auto made = take_state(**meeting);
  if (!made.ok()) return made.error();
  SHARDLAB_TRY(give_state(*made, session));
  return period;
}

}  // namespace shardlab::runtime
