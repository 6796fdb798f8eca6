// Room for fewer rows of experts than may come (`fit_rows`): a step in which more come is wrong from there on, and must leave no trace.
//
//  - Whether more came is a flag of the step: 0 at its begin, then a maximum over every `fit_rows` of the role. Nobody reads it before the last.
//  - The flag is made known to all ranks: a maximum over every axis along which ranks count other rows, and over the stages.
//  - An optimizer, and a kernel that changes kept state in place, runs under a predicate that is not 0 only where that flag is 0.
//  - The metric by which the run makes the step again (`kOverflowed`) is that flag.
//
// Rules 3 and 4 prove the rest: that every exchange with less room is judged by a `fit_rows` of its rows and counts, and that experts go by
// the counts that it makes (plan/verify_backward.cpp). A flag is followed through `any`, `not`, copies and all-reduces of a maximum. What
// collectives and copies write where state is kept is a value that lies elsewhere already, and rule 4 says which.
#include <algorithm>
#include <map>
#include <optional>
#include <set>

#include "plan/named_kernels.h"
#include "plan/optimizers.h"
#include "plan/run_state.h"
#include "plan/verify_internal.h"

namespace shardlab::verifying {
namespace {

KernelMeaning meaning_of(const Op& op) {
  const auto* kernel = std::get_if<Kernel>(&op.work);
  return kernel == nullptr ? KernelMeaning::kNone : shardlab::meaning_of(*kernel);
}
bool is_named(const Op& op, std::string_view name) {
  const auto* kernel = std::get_if<Kernel>(&op.work);
  return kernel != nullptr && kernel->name == name;
}

/// A number made of the flag of overflow.
struct Flag {
  std::set<std::pair<int32_t, int32_t>> judged;  ///< layer and micro-batch of each `fit_rows` that it knows of
  AxisSet reduced;                               ///< axes over which it is the maximum
  bool negated = false;                          ///< 0 where there is an overflow
};

/// Axes along which ranks, or stages, have flags of their own; none where no op cuts off counts.
std::optional<AxisSet> axes_of_flags(const Plan& plan) {
  std::optional<AxisSet> axes;
  for (const Segment& segment : plan.segments)
    for (const Step& step : segment.steps)
      if (const Op* op = std::get_if<Op>(&step); op != nullptr && meaning_of(*op) == KernelMeaning::kFit)
        axes = axes.value_or(AxisSet{}) | axes_placed(segment.slots[op->reads[2].index()].type, plan.mesh, Place::kPartial);
  if (!axes) return std::nullopt;
  if (const auto stages = role_axis(plan)) *axes = *axes | AxisSet::of(*stages);
  AxisSet split;
  for (size_t axis = 0; axis < plan.mesh.axes.size(); ++axis)
    if (axes->contains(static_cast<int>(axis)) && plan.mesh.axes[axis].size > 1)
      split = split | AxisSet::of(static_cast<int>(axis));
  return split;
}

/// One role's program, with nothing known of its storage but where flags lie.
class FlagReplay {
 public:
  FlagReplay(const Plan& plan, int role, AxisSet axes, Report& report)
      : plan_(plan), role_(plan.roles[static_cast<size_t>(role)]), number_(role), axes_(axes), report_(report) {
    for (size_t b = 0; b < role_.buffers.size(); ++b) buffers_.push_back(window_of(role_, BufferId(static_cast<int32_t>(b))));
  }

  void run() {
    for_ops([&](const Op& op) {
      if (meaning_of(op) != KernelMeaning::kFit) return;
      all_.insert({call_->layer, call_->micro_batch});
      if (const auto place = at(op.reads[2])) of_fits_.insert(place->first);
    });
    for_ops([&](const Op& op) { play(op); });
    finish();
  }

 private:
  using At = std::pair<int32_t, int64_t>;  ///< storage, and the first element there

  template <class Use>
  void for_ops(const Use& use) {
    for (const Item& item : role_.program) {
      call_ = std::get_if<Call>(&item);
      if (call_ == nullptr) continue;
      segment_ = &plan_.segments[call_->segment.index()];
      for (const Step& step : segment_->steps) {
        if (report_.full()) return;
        if (const Op* op = std::get_if<Op>(&step)) use(*op);
      }
    }
  }

  const Slot& slot(SlotId id) const { return segment_->slots[id.index()]; }
  bool is_flag(SlotId id) const { return slot(id).type.dtype == DType::i32 && slot(id).type.shape.elements() == 1; }
  /// Where a slot lies in a buffer of the role; nothing of a segment's own.
  std::optional<At> at(SlotId id) const {
    const Window w = window_of(*segment_, id);
    if (segment_->slots[static_cast<size_t>(w.root)].kind != SlotKind::kBound) return std::nullopt;
    const Window& buffer = buffers_[call_->binding[static_cast<size_t>(w.root)].index()];
    return At{buffer.root, buffer.begin + w.begin};
  }
  const Flag* known(SlotId id) const {
    const auto place = at(id);
    const auto found = place ? flags_.find(*place) : flags_.end();
    return found == flags_.end() ? nullptr : &found->second;
  }

  void play(const Op& op) {
    if (changes_state(op)) check_predicate(op);
    std::optional<Flag> made = made_by(op);
    if (op.when) made.reset();  // perhaps it is written, and perhaps not
    for (const SlotId w : op.writes) {
      const auto place = at(w);
      if (!place || !is_flag(w)) continue;
      if (made && w == op.writes.back())
        flags_[*place] = *made;
      else
        flags_.erase(*place);
    }
  }

  /// What an op leaves in its last result, where that is a flag.
  std::optional<Flag> made_by(const Op& op) {
    if (op.writes.empty() || !is_flag(op.writes.back())) return std::nullopt;
    if (const auto* fill = std::get_if<Fill>(&op.work)) return fill->value == 0 ? std::optional(Flag{}) : std::nullopt;
    if (meaning_of(op) == KernelMeaning::kFit) return judge(op);
    if (is_named(op, "any")) return joined(op);
    const Flag* read = op.reads.empty() ? nullptr : known(op.reads[0]);
    if (read == nullptr) return std::nullopt;
    Flag flag = *read;
    if (is_named(op, "not")) {
      flag.negated = !flag.negated;
      return flag;
    }
    if (std::holds_alternative<Copy>(op.work)) return flag;
    const auto* reduce = std::get_if<Collective>(&op.work);
    if (reduce == nullptr || reduce->kind != CollectiveKind::kAllReduce || reduce->reduce != ReduceOp::kMax || flag.negated)
      return std::nullopt;
    if (flag.judged != all_ && is_overflow(op.reads[0]))
      fault(op, "reduces %{} before the last layer and micro-batch of the step have been judged: {} of {} have",
            slot(op.reads[0]).name, flag.judged.size(), all_.size());
    flag.reduced = flag.reduced | plan_.comms[reduce->comm.index()].axes;
    return flag;
  }

  /// Whether a `fit_rows` of the role writes it.
  bool is_overflow(SlotId id) const {
    const auto place = at(id);
    return place && of_fits_.contains(place->first);
  }

  std::optional<Flag> judge(const Op& op) {
    const Flag* before = known(op.reads[2]);
    if (before == nullptr || before->negated || !before->reduced.empty()) {
      fault(op, "goes on from %{}, which has not begun at 0 in this step, or is the maximum over ranks already",
            slot(op.reads[2]).name);
      return std::nullopt;
    }
    Flag flag = *before;
    flag.judged.insert({call_->layer, call_->micro_batch});
    return flag;
  }

  /// Some flag is not 0: what is known of those that are of overflow.
  std::optional<Flag> joined(const Op& op) const {
    std::optional<Flag> all;
    for (const SlotId r : op.reads) {
      const Flag* flag = known(r);
      const bool is_other = flag != nullptr && flag->judged.empty() && (!all_.empty() || flag->reduced.empty());
      if (flag == nullptr || flag->negated || is_other) continue;
      if (!all) {
        all = *flag;
        continue;
      }
      all->judged.insert(flag->judged.begin(), flag->judged.end());
      all->reduced = AxisSet{static_cast<uint8_t>(all->reduced.mask & flag->reduced.mask)};
    }
    return all;
  }

  /// An optimizer, or a kernel that writes kept state over what it reads there.
  bool changes_state(const Op& op) const {
    const bool updates = update_of(op.work) != nullptr;
    if (!updates && !std::holds_alternative<Kernel>(op.work)) return false;
    return std::ranges::any_of(op.writes, [&](SlotId w) {
      const auto place = at(w);
      if (!place) return false;
      const Buffer& b = role_.buffers[static_cast<size_t>(place->first)];
      if (!b.persistent || b.kind == BufferClass::kMetric || b.kind == BufferClass::kWorkspace) return false;
      return updates || std::ranges::any_of(op.reads, [&](SlotId r) { return at(r) == place; });
    });
  }

  /// Why a flag does not say of the whole step and of all ranks whether there was an overflow; empty: it does.
  std::string lacks(const Flag* flag) const {
    if (flag == nullptr) return "is not made of the flag of overflow";
    if (flag->judged != all_)
      return fmt::format("knows of {} of the {} layers and micro-batches with experts", flag->judged.size(), all_.size());
    const AxisSet missing{static_cast<uint8_t>(axes_.mask & ~flag->reduced.mask)};
    return missing.empty() ? "" : fmt::format("along {} is one rank's word", axes_text(plan_, missing));
  }

  void check_predicate(const Op& op) {
    if (!op.when)
      return fault(op, "changes %{} in a step that has an overflow too: it runs under no predicate", slot(op.writes[0]).name);
    const Flag* flag = known(op.when);
    if (const std::string why = lacks(flag); !why.empty())
      return fault(op, "changes %{} where %{} says so, which {}", slot(op.writes[0]).name, slot(op.when).name, why);
    if (!flag->negated)
      fault(op, "changes %{} where %{} says so, which is not 0 in a step that has an overflow", slot(op.writes[0]).name,
            slot(op.when).name);
  }

  /// The run goes by the word of each rank.
  void finish() {
    for (size_t b = 0; b < role_.buffers.size(); ++b) {
      if (role_.buffers[b].name != kOverflowed) continue;
      const auto found = flags_.find({buffers_[b].root, buffers_[b].begin});
      const Flag* flag = found == flags_.end() ? nullptr : &found->second;
      std::string why = lacks(flag);
      if (why.empty() && flag->negated) why = "is 0 in a step that has an overflow";
      if (why.empty() && role_.buffers[b].kind != BufferClass::kMetric) why = "is no metric";
      if (!why.empty())
        report_.add(Rule::kValues, number_, "", fmt::format("the run makes steps again by %{}, which {}", kOverflowed, why));
      return;
    }
    report_.add(Rule::kValues, number_, "",
                fmt::format("counts of rows are cut off, and no %{} says whether the step stands", kOverflowed));
  }

  template <class... T>
  void fault(const Op& op, fmt::format_string<T...> format, T&&... values) {
    report_.add(Rule::kValues, number_, op_name(*segment_, op, *call_), fmt::format(format, std::forward<T>(values)...));
  }

  const Plan& plan_;
  const Role& role_;
  const int number_;
  const AxisSet axes_;
  Report& report_;
  std::vector<Window> buffers_;
  std::set<std::pair<int32_t, int32_t>> all_;  ///< layer and micro-batch of every `fit_rows` of the role
  std::set<int32_t> of_fits_;                  ///< storage that a `fit_rows` writes
  std::map<At, Flag> flags_;
  const Call* call_ = nullptr;
  const Segment* segment_ = nullptr;
};

}  // namespace

void check_overflow(const Plan& plan, Report& report) {
  const auto axes = axes_of_flags(plan);
  if (!axes) return;
  for (size_t role = 0; role < plan.roles.size() && !report.full(); ++role)
    FlagReplay(plan, static_cast<int>(role), *axes, report).run();
}

}  // namespace shardlab::verifying
