// Rule 4, in-place ops: what rotates, drops or adds positions going forward does so going back.
//
// Such an op leaves the type of its value as it was, so types and values look right without it. Its label says what belongs
// together: an op of phase I (rope, dropout) or W (positions) needs the forward op of its label, and a forward op whose segment is
// gone back through needs its counterpart. An op that is missing on both ways makes another model, which is no fault of a plan.
#include <algorithm>
#include <map>
#include <string_view>

#include "plan/verify_internal.h"

namespace shardlab::verifying {
namespace {

constexpr std::string_view kAgain = ".again";

bool is_in_place(const Work& work) {
  return std::holds_alternative<Rope>(work) || std::holds_alternative<Dropout>(work) || std::holds_alternative<Positions>(work);
}

/// All that two ops of one label must agree on, as text; the phase and what accumulates are apart.
std::string settings_of(const Work& work) {
  if (const auto* r = std::get_if<Rope>(&work))
    return fmt::format("heads={} kv_heads={} head_dim={} theta={}", r->heads, r->kv_heads, r->head_dim, r->theta);
  if (const auto* d = std::get_if<Dropout>(&work)) return fmt::format("p={} site={}", d->p, d->site);
  return {};
}

struct Place {
  size_t segment = 0;
  const Op* op = nullptr;
};

/// Ops of one label, by the way they go.
struct Ways {
  std::vector<Place> forward, again, back;
};

class Pairs {
 public:
  Pairs(const Plan& plan, Report& report) : plan_(plan), report_(report), called_(plan.segments.size()) {
    for (const Role& role : plan.roles)
      for (const Item& item : role.program)
        if (const Call* call = std::get_if<Call>(&item)) called_[call->segment.index()] = true;
  }

  void check() {
    collect();
    for (const auto& [label, ways] : in_place_) check(ways);
  }

 private:
  void collect() {
    for (size_t s = 0; s < plan_.segments.size(); ++s) {
      if (!called_[s]) continue;
      for (const Step& step : plan_.segments[s].steps)
        if (const Op* op = std::get_if<Op>(&step)) collect(s, *op);
    }
  }

  void collect(size_t s, const Op& op) {
    std::string_view label = op.label;
    const bool again = label.ends_with(kAgain);
    if (again) label.remove_suffix(kAgain.size());
    const Phase phase = phase_of(op.work);
    if (phase == Phase::kNone) return;
    if (!is_in_place(op.work)) {
      if (phase != Phase::kF) went_back_.emplace(label, true);
      return;
    }
    Ways& ways = in_place_[label];
    (phase != Phase::kF ? ways.back : again ? ways.again : ways.forward).push_back({s, &op});
  }

  /// Does some op of the segment that is not in place have a counterpart that goes back?
  bool is_gone_back_through(size_t segment) const {
    return std::ranges::any_of(plan_.segments[segment].steps, [&](const Step& step) {
      const Op* op = std::get_if<Op>(&step);
      return op != nullptr && phase_of(op->work) == Phase::kF && went_back_.contains(op->label);
    });
  }

  void check(const Ways& ways) {
    for (const Place& p : ways.back)
      if (ways.forward.empty()) fault(p, "goes back through what no forward op of this label did");
    for (const Place& p : ways.forward)
      if (ways.back.empty() && is_gone_back_through(p.segment))
        fault(p, "has no counterpart of this label in the backward pass, which goes through its segment");
    const Place* first = !ways.forward.empty() ? &ways.forward.front() : nullptr;
    if (first == nullptr) return;
    for (const auto* others : {&ways.again, &ways.back})
      for (const Place& p : *others)
        if (p.op->work.index() != first->op->work.index() || settings_of(p.op->work) != settings_of(first->op->work))
          fault(p,
                fmt::format("{} where the forward op of this label has {}", settings_of(p.op->work), settings_of(first->op->work)));
  }

  void fault(const Place& p, std::string message) {
    report_.add(Rule::kGradients, -1, op_name(plan_.segments[p.segment], *p.op), std::move(message));
  }

  const Plan& plan_;
  Report& report_;
  std::vector<bool> called_;
  std::map<std::string_view, Ways> in_place_;
  std::map<std::string_view, bool> went_back_;  ///< labels of other ops that a backward op has
};

}  // namespace

void check_pairs(const Plan& plan, Report& report) { Pairs(plan, report).check(); }

}  // namespace shardlab::verifying
