// Room for fewer rows of experts than may come (`fit_rows`): a step in which more come is wrong from there on, and must leave no trace.
//
//  - Whether more came is a flag of the step: 0 at its begin, then a maximum over every `fit_rows` of the role. Nobody reads it before the last.
//  - The flag is made known to all ranks: a maximum over every axis along which ranks count other rows, and over the stages, each of which
//    brings the flag of all its layers to it.
//  - What is kept stays what it was, unless an op changes it under a predicate that is not 0 only where that flag is 0. Copies, casts,
//    gathers and broadcasts carry what is kept along; what any other op makes is of the step, wherever it lies, and may not be kept.
//  - The metric by which the run makes the step again (`kOverflowed`) is that flag and no more, and outlives the step.
//
// Rules 3 and 4 prove the rest: that every exchange with less room is judged by a `fit_rows` of its rows and counts, and that experts go by
// the counts that it makes (plan/verify_backward.cpp). A flag is followed through `any`, `not`, copies and all-reduces of a maximum.
// Metrics are written anew in each step (rule 3), and a step that runs again writes them again.
#include <algorithm>
#include <map>
#include <optional>
#include <set>

#include "plan/named_kernels.h"
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

/// Item of the program and step of its segment.
using OpPlace = std::pair<size_t, size_t>;

/// A number made of the flag of overflow.
struct Flag {
  std::set<OpPlace> judged;  ///< each `fit_rows` that it knows of
  AxisSet reduced;           ///< axes over which it is the maximum
  bool negated = false;      ///< 0 where there is an overflow
  bool exact = true;         ///< it speaks of nothing else
};

/// A collective that joins stages.
struct FlagMeeting {
  bool whole = true;  ///< every stage brings the flag of all its layers
  bool exact = true;  ///< none of these flags speaks of anything else
};
/// By communicator and number there.
using FlagMeetings = std::map<std::pair<int32_t, int>, FlagMeeting>;

/// Where storage holds what was kept when the step began, or what an op made of it under the flag. All does at first.
class Kept {
 public:
  explicit Kept(const Mesh& mesh) : mesh_(mesh) {}

  /// The window is written, with what is kept or with what is of the step.
  void write(const Window& at, bool kept) {
    const int64_t end = end_of(at);
    std::vector<Write>& writes = writes_[at.root];
    std::erase_if(writes, [&](const Write& w) {
      return at.begin <= w.begin && w.end <= end && (w.shard.mask & at.shard.mask) == at.shard.mask;
    });
    writes.push_back({at.begin, end, at.shard, kept});
  }

  bool holds(const Window& at) const {
    const auto found = writes_.find(at.root);
    if (found == writes_.end()) return true;
    std::vector<std::pair<int64_t, int64_t>> others;  // parts that are of the step
    for (const Write& w : found->second) {
      const int64_t begin = std::max(w.begin, at.begin), end = std::min(w.end, end_of(at));
      if (begin >= end) continue;
      if (!w.kept) {
        others.emplace_back(begin, end);
      } else if ((w.shard.mask & ~at.shard.mask) == 0) {  // of all that the window means there
        others = without(others, begin, end);
      }
    }
    return others.empty();
  }

  void forget_locals() {
    std::erase_if(writes_, [](const auto& entry) { return entry.first < 0; });
  }

 private:
  struct Write {
    int64_t begin = 0, end = 0;
    AxisSet shard;
    bool kept = true;
  };

  int64_t end_of(const Window& at) const { return at.begin + at.length * mesh_.size(at.shard); }

  static std::vector<std::pair<int64_t, int64_t>> without(const std::vector<std::pair<int64_t, int64_t>>& parts, int64_t begin,
                                                          int64_t end) {
    std::vector<std::pair<int64_t, int64_t>> left;
    for (const auto& [from, to] : parts) {
      if (from < std::min(to, begin)) left.emplace_back(from, std::min(to, begin));
      if (std::max(from, end) < to) left.emplace_back(std::max(from, end), to);
    }
    return left;
  }

  const Mesh& mesh_;
  std::map<int32_t, std::vector<Write>> writes_;  ///< by root, in order
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

/// One role's program, with nothing known of its storage but where flags lie, and what is kept.
class FlagReplay {
 public:
  FlagReplay(const Plan& plan, int role, AxisSet axes, Report& report)
      : plan_(plan), role_(plan.roles[static_cast<size_t>(role)]), number_(role), axes_(axes), report_(report), kept_(plan.mesh) {
    for (size_t b = 0; b < role_.buffers.size(); ++b) buffers_.push_back(window_of(role_, BufferId(static_cast<int32_t>(b))));
  }

  /// `meetings` must hold those of every stage where the plan has several (`note_meetings`).
  void run(const FlagMeetings& meetings) {
    meetings_ = &meetings;
    find_fits();
    play_all();
    finish();
  }

  /// Adds what the role brings to collectives that join stages.
  void note_meetings(FlagMeetings& meetings) {
    noted_ = &meetings;
    find_fits();
    play_all();
  }

 private:
  using At = std::pair<int32_t, int64_t>;  ///< storage, and the first element there

  template <class Use>
  void for_steps(const Use& use) {
    for (step_ = 0; step_ < segment_->steps.size() && !report_.full(); ++step_) use(segment_->steps[step_]);
  }

  template <class UseCall, class UseAlloc>
  void for_items(const UseCall& use_call, const UseAlloc& use_alloc) {
    for (item_ = 0; item_ < role_.program.size() && !report_.full(); ++item_) {
      const Item& item = role_.program[item_];
      if (const auto* alloc = std::get_if<Alloc>(&item)) use_alloc(alloc->buffer);
      call_ = std::get_if<Call>(&item);
      if (call_ == nullptr) continue;
      segment_ = &plan_.segments[call_->segment.index()];
      use_call();
    }
  }

  void find_fits() {
    const auto note = [&](const Step& step) {
      const Op* op = std::get_if<Op>(&step);
      if (op == nullptr || meaning_of(*op) != KernelMeaning::kFit) return;
      all_.insert({item_, step_});
      if (const auto place = at(op->reads[2])) of_fits_.insert(place->first);
    };
    for_items([&] { for_steps(note); }, [](BufferId) {});
  }

  void play_all() {
    const auto play_step = [&](const Step& step) {
      if (const Op* op = std::get_if<Op>(&step))
        play(*op);
      else if (const auto* alloc = std::get_if<AllocSlot>(&step))
        kept_.write(window(alloc->slot), false);
    };
    const auto play_call = [&] {
      for_steps(play_step);
      kept_.forget_locals();
    };
    for_items(play_call, [&](BufferId buffer) { kept_.write(buffers_[buffer.index()], false); });
  }

  const Slot& slot(SlotId id) const { return segment_->slots[id.index()]; }
  bool is_flag(SlotId id) const { return slot(id).type.dtype == DType::i32 && slot(id).type.shape.elements() == 1; }
  /// Where a slot lies: in a buffer of the role, or, with a root below 0, in a slot of the segment's own.
  Window window(SlotId id) const {
    Window w = window_of(*segment_, id);
    if (segment_->slots[static_cast<size_t>(w.root)].kind != SlotKind::kBound) {
      w.root = -1 - w.root;
      return w;
    }
    const Window& buffer = buffers_[call_->binding[static_cast<size_t>(w.root)].index()];
    w.root = buffer.root;
    w.begin += buffer.begin;
    w.shard = w.shard | buffer.shard;
    return w;
  }
  /// Likewise of slots that lie in buffers of the role.
  std::optional<At> at(SlotId id) const {
    const Window w = window(id);
    return w.root < 0 ? std::nullopt : std::optional(At{w.root, w.begin});
  }
  const Flag* known(SlotId id) const {
    const auto place = at(id);
    const auto found = place ? flags_.find(*place) : flags_.end();
    return found == flags_.end() ? nullptr : &found->second;
  }

  void play(const Op& op) {
    std::optional<Flag> made = made_by(op);
    check_kept(op);
    if (op.when) made.reset();  // perhaps it is written, and perhaps not
    for (const SlotId w : op.writes) {
      const Window written = window(w);
      if (written.root < 0) continue;
      const At end{written.root, written.begin + written.length * plan_.mesh.size(written.shard)};
      flags_.erase(flags_.lower_bound({written.root, written.begin}), flags_.lower_bound(end));
      if (made && w == op.writes.back()) flags_[{written.root, written.begin}] = *made;
    }
  }

  /// What an op leaves in its last result, where that is a flag.
  std::optional<Flag> made_by(const Op& op) {
    const auto* reduce = std::get_if<Collective>(&op.work);
    const bool joins = reduce != nullptr && joins_roles(plan_, plan_.comms[reduce->comm.index()]);
    const FlagMeeting meeting = joins ? meet(op, *reduce) : FlagMeeting{};
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
    if (reduce == nullptr || reduce->kind != CollectiveKind::kAllReduce || reduce->reduce != ReduceOp::kMax || flag.negated)
      return std::nullopt;
    if (flag.judged != all_ && is_overflow(op.reads[0]))
      fault(op, "reduces %{} before the last fit_rows of the step: {} of {} have judged their rows", slot(op.reads[0]).name,
            flag.judged.size(), all_.size());
    const Comm& comm = plan_.comms[reduce->comm.index()];
    if (meeting.whole) flag.reduced = flag.reduced | comm.axes;
    flag.exact = flag.exact && meeting.exact;
    return flag;
  }

  /// What all stages bring to a collective. The n-th of each stage on a communicator is the n-th of every other.
  FlagMeeting meet(const Op& op, const Collective& collective) {
    const std::pair key{collective.comm.value, met_[collective.comm.value]++};
    if (noted_ == nullptr) return meetings_->at(key);
    const Flag* flag = known(op.reads[0]);
    FlagMeeting& meeting = (*noted_)[key];
    meeting.whole = meeting.whole && flag != nullptr && !flag->negated && flag->judged == all_;
    meeting.exact = meeting.exact && flag != nullptr && flag->exact;
    return meeting;
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
    flag.judged.insert({item_, step_});
    return flag;
  }

  /// Some flag is not 0: what is known of those that are of overflow.
  std::optional<Flag> joined(const Op& op) const {
    std::optional<Flag> all;
    bool exact = true;
    for (const SlotId r : op.reads) {
      const Flag* flag = known(r);
      const bool is_other = flag != nullptr && flag->judged.empty() && (!all_.empty() || flag->reduced.empty());
      if (flag == nullptr || flag->negated || is_other) {
        exact = exact && is_other && !flag->negated;  // one that is 0 adds nothing
        continue;
      }
      exact = exact && flag->exact;
      if (!all) {
        all = *flag;
        continue;
      }
      all->judged.insert(flag->judged.begin(), flag->judged.end());
      all->reduced = AxisSet{static_cast<uint8_t>(all->reduced.mask & flag->reduced.mask)};
    }
    if (all) all->exact = exact;
    return all;
  }

  /// State that a step goes on from. What a step reports it writes anew.
  bool is_kept(const Window& at) const {
    if (at.root < 0) return false;
    const Buffer& b = role_.buffers[static_cast<size_t>(at.root)];
    return b.persistent && b.kind != BufferClass::kMetric;
  }

  /// The op leaves what it reads what that was.
  static bool carries(const Op& op) {
    if (std::holds_alternative<Copy>(op.work) || rounds(op.work) || is_named(op, "cast")) return true;
    const auto* collective = std::get_if<Collective>(&op.work);
    return collective != nullptr && collective->kind != CollectiveKind::kAllReduce &&
           collective->kind != CollectiveKind::kReduceScatter;
  }

  /// What an op writes where state is kept is kept already, or the op runs where the flag says so.
  void check_kept(const Op& op) {
    const bool stays = op.when && lacks(known(op.when)).empty() && known(op.when)->negated;
    const bool carried = carries(op) && std::ranges::all_of(op.reads, [&](SlotId r) { return kept_.holds(window(r)); });
    bool faulted = false;
    for (const SlotId w : op.writes) {
      const Window at = window(w);
      if (!carried && !stays && !faulted && is_kept(at)) {
        faulted = true;
        report_change(op, w);
      }
      if (!stays) kept_.write(at, carried || is_kept(at));  // reported once
    }
  }

  /// Why a flag does not say of the whole step and of all ranks whether there was an overflow; empty: it does.
  std::string lacks(const Flag* flag) const {
    if (flag == nullptr) return "is not made of the flag of overflow";
    if (flag->judged != all_) return fmt::format("knows of {} of the {} fit_rows of the step", flag->judged.size(), all_.size());
    const AxisSet missing{static_cast<uint8_t>(axes_.mask & ~flag->reduced.mask)};
    return missing.empty() ? "" : fmt::format("along {} is not the word of all ranks", axes_text(plan_, missing));
  }

  void report_change(const Op& op, SlotId w) {
    const std::string& name = slot(w).name;
    if (!op.when) {
      if (!carries(op)) return fault(op, "changes %{} in a step that has an overflow too: it runs under no predicate", name);
      const auto made = std::ranges::find_if(op.reads, [&](SlotId r) { return !kept_.holds(window(r)); });
      return fault(op, "keeps %{} in a step that has an overflow too: the step has made it, and {} runs under no predicate",
                   slot(*made).name, op.label);
    }
    const Flag* flag = known(op.when);
    if (const std::string why = lacks(flag); !why.empty())
      return fault(op, "changes %{} where %{} says so, which {}", name, slot(op.when).name, why);
    fault(op, "changes %{} where %{} says so, which is not 0 in a step that has an overflow", name, slot(op.when).name);
  }

  /// The run goes by the word of each rank.
  void finish() {
    for (size_t b = 0; b < role_.buffers.size(); ++b) {
      if (role_.buffers[b].name != kOverflowed) continue;
      const auto found = flags_.find({buffers_[b].root, buffers_[b].begin});
      const Flag* flag = found == flags_.end() ? nullptr : &found->second;
      std::string why = lacks(flag);
      if (why.empty() && flag->negated) why = "is 0 in a step that has an overflow";
      if (why.empty() && !flag->exact) why = "may be another number than 0 in a step that stands";
      if (why.empty() && role_.buffers[b].kind != BufferClass::kMetric) why = "is no metric";
      if (why.empty() && !role_.buffers[static_cast<size_t>(buffers_[b].root)].persistent) why = "does not outlive the step";
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
  std::set<OpPlace> all_;      ///< every `fit_rows` of the role
  std::set<int32_t> of_fits_;  ///< storage that a `fit_rows` writes
  std::map<At, Flag> flags_;
  Kept kept_;
  std::map<int32_t, int> met_;  ///< by communicator that joins stages: collectives so far
  const FlagMeetings* meetings_ = nullptr;
  FlagMeetings* noted_ = nullptr;
  size_t item_ = 0, step_ = 0;
  const Call* call_ = nullptr;
  const Segment* segment_ = nullptr;
};

}  // namespace

void check_overflow(const Plan& plan, Report& report) {
  const auto axes = axes_of_flags(plan);
  if (!axes) return;
  FlagMeetings meetings;
  Report unsaid(1 << 20);  // what is wrong with a role is reported once
  for (size_t role = 0; role < plan.roles.size(); ++role)
    FlagReplay(plan, static_cast<int>(role), *axes, unsaid).note_meetings(meetings);
  for (size_t role = 0; role < plan.roles.size() && !report.full(); ++role)
    FlagReplay(plan, static_cast<int>(role), *axes, report).run(meetings);
}

}  // namespace shardlab::verifying
