// State, in rules 3 and 4: a value that a period changes must come back to the place where it is kept, as it was last changed, and
// be of use.
//
//  - If a plan trains, every op makes something that another op reads, or that outlives the period. Every result of an update
//    must. Only the gradient of a model's input leads nowhere.
//  - A VALUE has a number, which copies, roundings and gathers carry along. An op that changes storage in place makes another
//    value and supersedes the old one. State that ends the period with a superseded value is out of date: an update was not
//    written back, or a copy was made too early.
//  - If a plan trains, every parameter and master copy that a role keeps is written in each period, and so are the numbers of a
//    run (plan/run_state.h). A moment is written or, if frozen, read. Other kept state is written if it is read.
//  - A kernel that changes storage in place runs again in a step only where something else that it reads has changed: a step counts once.
//  - The ops of a step that run under one predicate see it alike, and its forward ops read parameters after equally many updates,
//    and the numbers of a run as one op left them.
//  - State may become what it was when the period began, by a copy under a predicate. Then all state that the period changed does, last of all
//    and by the same word, which the run goes by (`kRolledBack`): what a run goes on from is the state before the period, or the state after it.
//  - A router's bias follows the load of its layer's experts in all micro-batches of the step.
#include <algorithm>

#include "plan/named_kernels.h"
#include "plan/run_state.h"
#include "plan/verify_replay.h"

namespace shardlab::verifying {
namespace {

bool is_optimizer(const Act& act) { return act.kind == Act::Kind::kOptimizer; }

/// A later call of a segment is replayed without what is alike in every call.
bool is_whole(const Act& act) {
  return act.reads.size() == reads_with_predicate(*act.op).size() && act.writes.size() == act.op->writes.size();
}

}  // namespace

std::string Replay::run_name(int32_t run) const {
  if (run < 0) return "the last period";
  const Run& r = runs_[static_cast<size_t>(run)];
  return op_name(*r.segment, *r.act->op, *r.call);
}

/// Enters the op that is about to run.
void Replay::begin_run(const Act& act) {
  check_predicate(act);
  check_repeated(act);
  check_load(act);
  first_run_ = static_cast<int32_t>(runs_.size());
  const size_t results = is_optimizer(act) ? act.writes.size() : 1;
  // What a trimmed act writes beside is judged in the first call.
  // A copy to where state is kept may be renewed before anybody reads it.
  const bool renewed =
      std::holds_alternative<Copy>(act.op->work) && !act.writes.empty() && region(act.writes[0]).storage->persistent;
  const bool exempt =
      renewed || act.op->writes.empty() || act.writes.size() != act.op->writes.size() || phase_of(act.op->work) == Phase::kI;
  for (size_t i = 0; i < results; ++i) runs_.push_back({segment_, &act, call_, exempt});
}

/// An op that writes over what it reads. A collective leaves what it moves the value that it is.
bool Replay::changes_in_place(const Act& act, const Region& at) {
  return std::ranges::any_of(act.reads, [&](int32_t slot) {
    const Region read = region(slot);
    return read.storage == at.storage && read.begin < at.end && at.begin < read.end;
  });
}

/// The values that lie in the region are changed by the op in play.
void Replay::supersede(const Region& at) {
  for_pieces(at, [&](const Piece& p) {
    if (p.state < 0) return;
    superseded_[static_cast<size_t>(p.state)].push_back(
        {std::max(p.begin, at.begin) - p.state_origin, std::min(p.end, at.end) - p.state_origin, first_run_});
  });
}

/// A moment after an update: in the place of the old one, and otherwise what that was.
void Replay::change(const Region& at, size_t result) {
  if (!at.storage->alive) return;
  supersede(at);
  at.storage->change();
  const int32_t state = new_state();
  std::vector<Piece> fresh;
  for_pieces(at, [&](const Piece& p) {
    Piece q = p;
    q.begin = std::max(p.begin, at.begin);
    q.end = std::min(p.end, at.end);
    q.initial = false;
    q.run = first_run_ + static_cast<int32_t>(result);
    q.state = state;
    q.state_origin = at.begin;
    q.sum = copy_sum(p.sum);
    fresh.push_back(q);
  });
  if (!fresh.empty()) put(*at.storage, at.begin, at.end, fresh);
}

/// Twice the same change of the same thing: a counter that counts a step twice, an average that takes a value in twice.
void Replay::check_repeated(const Act& act) {
  const auto* kernel = std::get_if<Kernel>(&act.op->work);
  if (kernel == nullptr || rounds(act.op->work) || takes_maximum(*kernel) || !is_whole(act)) return;
  bool in_place = false;
  std::pair<const Op*, std::vector<int64_t>> key{act.op, {steps_begun_[item_]}};
  for (const int32_t slot : act.writes) {
    const Region at = region(slot);
    in_place = in_place || changes_in_place(act, at);
    key.second.push_back(at.root);
    key.second.push_back(at.begin);
    if (at.root >= 0 && changes_in_place(act, at) && names_run_state(role_.buffers[static_cast<size_t>(at.root)].name))
      counted_[at.root].insert(steps_begun_[item_]);
  }
  if (!in_place || std::ranges::any_of(act.writes, [&](int32_t slot) { return region(slot).root < 0; })) return;
  int32_t newest = -1;
  for (const int32_t slot : act.reads)
    for_pieces(region(slot), [&](const Piece& p) {
      if (p.run >= 0 && runs_[static_cast<size_t>(p.run)].act->op != act.op) newest = std::max(newest, p.run);
    });
  const auto [last, first] = last_.try_emplace(std::move(key), static_cast<int32_t>(runs_.size()));
  if (!first && newest <= last->second)
    fault(Rule::kValues, "changes %{} again, and nothing else that it reads has changed since it did", slot_name(act.writes[0]));
  last->second = static_cast<int32_t>(runs_.size());
}

/// State of the run that a kernel changes in place (a count, a mean) it changes in each step of the period.
void Replay::check_counted() {
  for (const auto& [root, steps] : counted_)
    if (std::ssize(steps) != plan_.period)
      return fault(Rule::kValues, "changes %{} in {} of the period's {} steps", role_.buffers[static_cast<size_t>(root)].name,
                   steps.size(), plan_.period);
}

/// All ops that one predicate lets run, or keeps from running, belong together: an update and its count.
void Replay::check_predicate(const Act& act) {
  if (!act.op->when || plan_.period > 1 || act.reads.empty()) return;
  const Region at = region(act.op->when.value);
  if (at.root < 0 || !at.storage->alive) return;
  int32_t written = -1;
  for_pieces(at, [&](const Piece& p) { written = std::max(written, p.run); });
  const auto [known, first] = predicates_.try_emplace(at.root, std::pair{written, static_cast<int32_t>(runs_.size())});
  if (first || known->second.first == written) return;
  fault(Rule::kValues, "runs where %{} says so, and {} has changed it since {} ran by its word", slot_name(act.op->when.value),
        run_name(written), run_name(known->second.second));
  known->second.first = written;
}

/// A forward op reads this piece of a parameter.
void Replay::check_age(const Piece& p, int32_t slot) {
  const auto [age, first] = ages_.try_emplace(steps_[item_], std::pair{p.version, p.parameter});
  if (first || age->second.first == p.version || report_.full()) return;
  fault(Rule::kValues, "reads %{} after {} updates of the period, and {} was read after {} in the same step", slot_name(slot),
        p.version, plan_.parameters[static_cast<size_t>(age->second.second)].name, age->second.first);
}

/// A forward op reads state of the run. All forward ops of a step, also those that run again, read what one op left; a router has a bias of
/// its own.
void Replay::check_run_state(const Piece& p, const Region& at, int32_t slot) {
  if (at.root < 0 || !at.storage->persistent || !names_run_state(role_.buffers[static_cast<size_t>(at.root)].name)) return;
  const auto [known, first] = run_state_.try_emplace({steps_[item_], at.root}, p.run);
  if (!first && known->second != p.run && !report_.full())
    fault(Rule::kValues, "reads %{} as {} left it, and forward ops of the same step have read what {} left", slot_name(slot),
          run_name(p.run), run_name(known->second));
  if (!std::holds_alternative<Route>(act_->op->work) && !std::holds_alternative<ChooseExperts>(act_->op->work)) return;
  const auto [layer, alone] = biased_.try_emplace(at.root, call_->layer);
  if (!alone && layer->second != call_->layer && !report_.full())
    fault(Rule::kValues, "chooses by %{}, the bias of layer {}", slot_name(slot), layer->second);
}

/// A bias follows the tokens that the router which chooses by it sent to each expert, in every micro-batch of the step.
void Replay::check_load(const Act& act) {
  const auto* kernel = std::get_if<Kernel>(&act.op->work);
  if (kernel == nullptr || meaning_of(*kernel) != KernelMeaning::kFollowLoad || !is_whole(act)) return;
  const auto layer = biased_.find(region(act.reads[1]).root);
  if (layer == biased_.end()) return fault(Rule::kValues, "moves %{}, and no router chooses by it", slot_name(act.reads[1]));
  for_pieces(region(act.reads[0]), [&](const Piece& p) {
    std::string message = fmt::format("moves %{} by %{}, which is not the load of layer {} in each micro-batch of the step",
                                      slot_name(act.reads[1]), slot_name(act.reads[0]), layer->second);
    const Contributions* sum = p.sum < 0 ? nullptr : &sums_[static_cast<size_t>(p.sum)];
    if (sum != nullptr && !sum->merged.empty())  // over stages that have the layer too
      return ledger_.demand_load({role_index_, -1, true, segment_, act.op, call_, *sum, false}, layer->second, std::move(message));
    if ((sum == nullptr || !ledger_.is_load(*sum, layer->second)) && !report_.full()) fault(Rule::kValues, "{}", message);
  });
}

/// Of a copy from all of one buffer to all of another: where from and where to.
std::optional<std::pair<Region, Region>> Replay::whole_copy(const Act& act) {
  if (!std::holds_alternative<Copy>(act.op->work) || act.reads.empty() || act.writes.size() != 1) return std::nullopt;
  const Region from = region(act.reads[0]), to = region(act.writes[0]);
  const auto is_whole = [](const Region& at) { return at.root >= 0 && at.name == at.root && at.storage->alive; };
  if (!is_whole(from) || !is_whole(to)) return std::nullopt;
  return std::pair{from, to};
}

/// A copy of state that the period has not changed yet.
void Replay::note_copy(const Act& act) {
  const auto copy = whole_copy(act);
  if (!copy || act.op->when || !copy->first.storage->persistent || copy->first.storage->changed) return;
  copy->second.storage->copy_of = copy->first.root;
}

/// Where a predicate says so, state becomes again what it was when the period began. In either case it is state that was there: what
/// is known of it stays known.
bool Replay::takes_back(const Act& act) {
  const auto* work = std::get_if<Copy>(&act.op->work);
  if (work == nullptr || !work->restores) return false;
  const auto copy = whole_copy(act);
  if (!copy || !copy->second.storage->persistent || copy->first.storage->copy_of != copy->second.root) {
    fault(Rule::kValues, "restores %{} from %{}, which is no whole copy of what %{} was when the period began",
          slot_name(act.writes[0]), slot_name(act.reads[0]), slot_name(act.writes[0]));
    return true;
  }
  const Region by = region(act.op->when.value);
  if (!read_all(act)) return true;
  if (by.root < 0 || role_.buffers[static_cast<size_t>(by.root)].name != kRolledBack)
    fault(Rule::kValues, "takes %{} back by %{}, where the run makes steps again by %{}", slot_name(act.writes[0]),
          slot_name(act.op->when.value), kRolledBack);
  int32_t written = -1;
  for_pieces(by, [&](const Piece& p) { written = std::max(written, p.run); });
  if (written < 0)
    fault(Rule::kValues, "takes %{} back by %{}, which the period has not written", slot_name(act.writes[0]),
          slot_name(act.op->when.value));
  else
    copy->second.storage->taken_back = written;
  return true;
}

/// What a period takes back it takes back as a whole.
void Replay::check_taken_back() {
  int32_t by = -1;
  for (const Storage& s : storages_) by = std::max(by, s.taken_back);
  if (by < 0) return;
  for (size_t i = 0; i < storages_.size(); ++i) {
    const Buffer& b = role_.buffers[i];
    if (b.view || !storages_[i].persistent || !storages_[i].changed || storages_[i].taken_back == by) continue;
    if (b.kind == BufferClass::kMetric || b.kind == BufferClass::kWorkspace) continue;
    return fault(Rule::kValues, "%{} ends the period as a step has changed it, where {} takes other state back", b.name,
                 run_name(by));
  }
}

/// Judges the state that a role keeps when the period ends.
void Replay::finish_state(size_t root) {
  const Buffer& buffer = role_.buffers[root];
  const Storage& storage = storages_[root];
  if (buffer.kind == BufferClass::kMetric || buffer.kind == BufferClass::kWorkspace) return;
  for (const Piece& p : storage.pieces)
    if (p.run >= 0) runs_[static_cast<size_t>(p.run)].used = true;
  const bool moment = buffer.kind == BufferClass::kMoment;  // one that is read alone is frozen
  const bool of_parameter = buffer.kind == BufferClass::kParameter || buffer.kind == BufferClass::kMaster || moment;
  const bool frozen = moment && storage.read_initial;
  if (!storage.changed && !frozen && (of_parameter || names_run_state(buffer.name)))
    ledger_.lost(role_index_, "", fmt::format("%{} is kept from step to step, and nothing in a step updates it", buffer.name));
  else if (!storage.changed && !frozen && storage.read_initial)
    ledger_.lost(role_index_, "",
                 fmt::format("%{} is read as the step before left it, and nothing in a step writes it: a fill makes a constant",
                             buffer.name));
  for (const Piece& p : storage.pieces) {
    if (p.state < 0) continue;
    for (const Superseded& s : superseded_[static_cast<size_t>(p.state)])
      if (s.begin < p.end - p.state_origin && p.begin - p.state_origin < s.end)
        return fault(Rule::kValues,
                     "%{} ends the period with what {} has changed elsewhere since: write the change back, or copy it after that",
                     buffer.name, run_name(s.run));
  }
}

/// Work that leads nowhere is work that another op lacks.
void Replay::finish_runs() {
  for (size_t i = 0; i < storages_.size(); ++i)
    if (storages_[i].persistent)
      for (const Piece& p : storages_[i].pieces)
        if (p.run >= 0) runs_[static_cast<size_t>(p.run)].used = true;
  for (size_t i = 0; i < runs_.size() && !report_.full(); ++i) {
    const Run& run = runs_[i];
    if (run.used) continue;
    size_t result = 0;
    while (is_optimizer(*run.act) && i > result && runs_[i - result - 1].act == run.act && runs_[i - result - 1].call == run.call)
      ++result;
    const int order = order_of(*run.act->op);  // of a message or a collective
    const std::string source =
        order < 0 ? "it makes" : "comes along " + axes_text(plan_, plan_.comms[static_cast<size_t>(order / 2)].axes);
    ledger_.lost(role_index_, op_name(*run.segment, *run.act->op, *run.call),
                 fmt::format("nothing reads the %{} that {}, and it is not kept",
                             run.segment->slots[static_cast<size_t>(run.act->writes[result])].name, source));
  }
}

}  // namespace shardlab::verifying
