#include "plan/braids.h"

#include <algorithm>
#include <map>
#include <optional>
#include <utility>

#include "plan/base/check.h"
#include "plan/pipeline_case.h"

namespace shardlab {
namespace {

/// When each part's output, or the gradient of its input, is made for each micro-batch.
using Ends = std::map<std::pair<int, int>, double>;

class BraidedPlay {
 public:
  explicit BraidedPlay(const PipelineSchedule& schedule)
      : schedule_(schedule), costs_(SlotCosts::uniform(schedule.parts, 1, 1, 1)) {
    for (const auto& order : schedule.order) braids_.with_next.emplace_back(order.size(), false);
  }

  /// Runs the schedule with the braids that are chosen, but for those that would wait for each other.
  void run() {
    while (!plays()) leave_one_out();
  }

  /// Braids all slots that can be, or of a pipeline those whose forward can wait, by the times of a run without braids.
  void choose(bool all) {
    for (size_t stage = 0; stage < order().size(); ++stage)
      for (size_t i = 0; i + 1 < order()[stage].size(); ++i)
        if (fits(stage, i) && (all || can_wait(stage, i))) braids_.with_next[stage][i] = true, ++i;
  }

  Braids take() { return std::move(braids_); }

 private:
  const std::vector<std::vector<PipelineSlot>>& order() const { return schedule_.order; }
  SlotTime& time(size_t stage, size_t slot) { return braids_.times.slots[stage][slot]; }

  /// When what a slot needs is there; nothing where it is not made yet.
  std::optional<double> ready(const PipelineSlot& slot) const {
    const auto made = [](const Ends& ends, int part, int micro_batch) {
      const auto found = ends.find({part, micro_batch});
      return found == ends.end() ? std::nullopt : std::optional(found->second);
    };
    if (slot.work == SlotWork::kF) return slot.part == 0 ? 0 : made(outputs_, slot.part - 1, slot.micro_batch);
    if (!slot.goes_back() || slot.part + 1 == schedule_.parts) return 0;
    return made(gradients_, slot.part + 1, slot.micro_batch);
  }

  /// Whether every slot runs. `next_` says where each stage stands.
  bool plays() {
    outputs_.clear(), gradients_.clear();
    braids_.times = {};
    for (const auto& slots : order()) braids_.times.slots.emplace_back(slots.size());
    next_.assign(order().size(), 0);
    std::vector<double> now(order().size(), 0);
    for (bool moved = true; std::exchange(moved, false);)
      for (size_t stage = 0; stage < order().size(); ++stage)
        while (next_[stage] < order()[stage].size() && runs(stage, now[stage])) moved = true;
    for (const double end : now) braids_.times.end = std::max(braids_.times.end, end);
    for (size_t stage = 0; stage < order().size(); ++stage)
      if (next_[stage] < order()[stage].size()) return false;
    return true;
  }

  /// Runs the next slot of a stage, and the one that is braided with it, if both can.
  bool runs(size_t stage, double& now) {
    const size_t first = next_[stage], slots = braids_.with_next[stage][first] ? 2 : 1;
    double begin = now, lasts = 0;
    for (size_t i = first; i < first + slots; ++i) {
      const auto when = ready(order()[stage][i]);
      if (!when) return false;
      begin = std::max(begin, *when);
      lasts += costs_.of(order()[stage][i]);
    }
    now = begin + lasts;
    for (size_t i = first; i < first + slots; ++i) {
      const PipelineSlot& slot = order()[stage][i];
      time(stage, i) = {begin, now};
      if (slot.work == SlotWork::kF) outputs_[{slot.part, slot.micro_batch}] = now;
      if (slot.goes_back()) gradients_[{slot.part, slot.micro_batch}] = now;
    }
    next_[stage] += slots;
    return true;
  }

  /// Of the braids that stages stand at, one whose forward could run.
  void leave_one_out() {
    for (size_t stage = 0; stage < order().size(); ++stage) {
      const size_t i = next_[stage];
      if (i == order()[stage].size() || !braids_.with_next[stage][i] || !ready(order()[stage][i])) continue;
      braids_.with_next[stage][i] = false;
      return;
    }
    SHARDLAB_CHECK(false, "a schedule of {} stages waits forever; `check` must come before", schedule_.stages);
  }

  bool fits(size_t stage, size_t i) const {
    const PipelineSlot &a = order()[stage][i], &b = order()[stage][i + 1];
    const bool forward_first = a.work == SlotWork::kF && b.goes_back(), backward_first = a.goes_back() && b.work == SlotWork::kF;
    return a.micro_batch != b.micro_batch && (forward_first || (backward_first && schedule_.stages == 1));
  }
  bool can_wait(size_t stage, size_t i) {
    const PipelineSlot &a = order()[stage][i], &b = order()[stage][i + 1];
    const double ends = std::max(time(stage, i).begin, *ready(b)) + costs_.of(a) + costs_.of(b);
    return a.part + 1 == schedule_.parts || ends <= uses_output(a);
  }
  /// When the part behind a forward's begins with its output.
  double uses_output(const PipelineSlot& forward) {
    const size_t stage = static_cast<size_t>(schedule_.stage_of(forward.part + 1, forward.micro_batch));
    const PipelineSlot next{SlotWork::kF, forward.part + 1, forward.micro_batch};
    return time(stage, static_cast<size_t>(std::ranges::find(order()[stage], next) - order()[stage].begin())).begin;
  }

  const PipelineSchedule& schedule_;
  SlotCosts costs_;
  Braids braids_;
  Ends outputs_, gradients_;
  std::vector<size_t> next_;
};

}  // namespace

bool Braids::any() const {
  return std::ranges::any_of(with_next, [](const std::vector<bool>& row) { return std::ranges::find(row, true) != row.end(); });
}

Braids unbraided(const PipelineSchedule& schedule) {
  Braids none;
  for (const auto& order : schedule.order) none.with_next.emplace_back(order.size(), false);
  none.times = play(schedule, SlotCosts::uniform(schedule.parts, 1, 1, 1)).value();
  return none;
}

Braids braided(const PipelineSchedule& schedule) {
  const auto with = [&](bool all) {
    BraidedPlay play(schedule);
    play.run();
    play.choose(all);
    play.run();
    return play.take();
  };
  Braids everywhere = with(true);
  if (schedule.stages == 1) return everywhere;
  Braids where_it_waits = with(false);
  return everywhere.times.end <= where_it_waits.times.end ? std::move(everywhere) : std::move(where_it_waits);
}

bool has_braids(const Case& c) { return braided(schedule_of(c)).any(); }

}  // namespace shardlab
