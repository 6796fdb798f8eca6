#include "runtime/made_again.h"

namespace shardlab::runtime {

Result<JudgedPeriod> run_judged(Session& session, int64_t step, const InStep& in_step,
                                const std::function<void(const StepResult&, int64_t)>& stop) {
  JudgedPeriod period{session.step(step), {}};
  if (!period.first.rolled_back && !period.first.overflowed) return period;
  const auto meeting = in_step();
  if (!meeting.ok()) return meeting.error();
  if (period.first.overflowed) {  // whose state is where it was
    (*meeting)->take_arena();
    period.again.push_back((*meeting)->step(step));
    if (stop) stop(period.again.back(), step);
    session.take_arena();
    return period;
  }
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
