#include "tests/verify/mutations.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "plan/base/hash.h"
#include "plan/named_kernels.h"
#include "plan/program.h"
#include "plan/verify.h"
#include "tests/namespaces.h"
#include "tests/verify/backward_mutations.h"
#include "tests/verify/structure_mutations.h"

namespace shardlab::testing {
namespace {

constexpr const char* kEquivalenceRules =
    "left out as equivalent: collectives over groups of one rank; another communicator that joins the same ranks; a gather or "
    "broadcast done "
    "twice, or any collective that leaves its source as it was; an exchange of two operands that are one buffer, or of the order "
    "of two "
    "updates of one parameter; a divisor of a loss that divides nothing (loss only); sum for maximum of what a "
    "kernel made whose "
    "name alone says what its parts are; another operand of a product that goes back through no forward op (a compression's own "
    "arithmetic, which only its author knows)";

/// Axes of a communicator along which there is more than one rank.
AxisSet real_axes(const Plan& plan, CommId id) {
  AxisSet set;
  for (size_t a = 0; a < plan.mesh.axes.size(); ++a)
    if (plan.comms[id.index()].axes.contains(static_cast<int>(a)) && plan.mesh.axes[a].size > 1)
      set = set | AxisSet::of(static_cast<int>(a));
  return set;
}

bool same_ranks(const Plan& plan, CommId a, CommId b) {
  const auto groups = [&](CommId id) {
    const Comm& comm = plan.comms[id.index()];
    return comm.groups.size() == 1 ? Groups{} : comm.groups;
  };
  return real_axes(plan, a) == real_axes(plan, b) && groups(a) == groups(b);
}

class Mutator {
 public:
  Mutator(const std::vector<Plan>& plans, uint64_t share) : plans_(plans), share_(share) {}

  std::vector<MutationTally> run() {
    for (const Plan& plan : plans_) {
      plan_ = &plan;
      mutate_segments();
      const Jury jury{[this](const std::string& kind, const std::string& place, const std::function<void(Plan&)>& change) {
                        judge(kind, place, change);
                      },
                      [this](const std::string& kind) { equivalent(kind); }};
      mutate_backward(plan, jury);
      mutate_structure(plan, jury);
      for (size_t r = 0; r < plan.roles.size(); ++r) mutate_role(r);
      for (size_t r = 0; r < plan.roles.size(); ++r) skip_waits(static_cast<int>(r));
    }
    return std::move(tallies_);
  }

 private:
  MutationTally& tally(const std::string& kind) {
    for (MutationTally& t : tallies_)
      if (t.kind == kind) return t;
    tallies_.push_back({kind, 0, 0, 0, {}});
    return tallies_.back();
  }

  /// Applies `change` to a copy and asks `verify`.
  void judge(const std::string& kind, const std::string& place, const std::function<void(Plan&)>& change) {
    if (mix(number_++) % share_ != 0) return;
    Plan mutant = *plan_;
    change(mutant);
    MutationTally& t = tally(kind);
    ++t.mutants;
    if (!find_faults(mutant, {.budget = {}, .max_findings = 1}).empty())
      ++t.killed;
    else
      t.survivors.push_back(plan_->name + ": " + place);
  }
  void equivalent(const std::string& kind) { ++tally(kind).equivalent; }

  bool is_called(size_t segment) const {
    for (const Role& role : plan_->roles)
      for (const Item& item : role.program)
        if (const Call* call = std::get_if<Call>(&item); call != nullptr && call->segment.index() == segment) return true;
    return false;
  }

  void mutate_segments() {
    for (size_t s = 0; s < plan_->segments.size(); ++s) {
      if (!is_called(s)) continue;
      const Segment& segment = plan_->segments[s];
      for (size_t i = 0; i < segment.steps.size(); ++i) {
        if (const Op* op = std::get_if<Op>(&segment.steps[i]))
          mutate_op(s, i, *op);
        else if (const auto* f = std::get_if<FreeSlot>(&segment.steps[i]))
          free_slot_early(s, i, f->slot);
      }
    }
  }

  static SlotId root_slot(const Segment& segment, SlotId slot) {
    while (segment.slots[slot.index()].view) slot = SlotId(segment.slots[slot.index()].view->base);
    return slot;
  }

  /// The collective has storage of its own for its result, in every call.
  bool keeps_source(size_t s, const Op& op) const {
    const Segment& segment = plan_->segments[s];
    const SlotId in = root_slot(segment, op.reads[0]), out = root_slot(segment, op.writes[0]);
    if (in == out) return false;
    for (size_t r = 0; r < plan_->roles.size(); ++r)
      for (const Item& item : plan_->roles[r].program) {
        const Call* call = std::get_if<Call>(&item);
        if (call == nullptr || call->segment.index() != s) continue;
        const BufferId a = call->binding[in.index()], b = call->binding[out.index()];
        if (a && b && root_of(r, a) == root_of(r, b)) return false;
      }
    return true;
  }

  /// A kernel that the core does not know writes the slot, or, in another segment, the storage that it is bound to.
  bool made_by_unknown_kernel(size_t s, SlotId slot) const {
    if (kernel_writes(plan_->segments[s], [&](SlotId w) { return w == slot; })) return true;
    const SlotId own = root_slot(plan_->segments[s], slot);
    for (size_t r = 0; r < plan_->roles.size(); ++r)
      for (const Item& item : plan_->roles[r].program) {
        const Call* call = std::get_if<Call>(&item);
        if (call == nullptr || call->segment.index() != s || !call->binding[own.index()]) continue;
        if (kernel_writes_buffer(r, root_of(r, call->binding[own.index()]))) return true;
      }
    return false;
  }

  bool kernel_writes_buffer(size_t r, int32_t buffer) const {
    return std::ranges::any_of(plan_->roles[r].program, [&](const Item& item) {
      const Call* call = std::get_if<Call>(&item);
      if (call == nullptr) return false;
      const Segment& segment = plan_->segments[call->segment.index()];
      return kernel_writes(segment, [&](SlotId w) {
        const BufferId bound = call->binding[root_slot(segment, w).index()];
        return bound && root_of(r, bound) == buffer;
      });
    });
  }

  template <class F>
  static bool kernel_writes(const Segment& segment, const F& is_it) {
    return std::ranges::any_of(segment.steps, [&](const Step& step) {
      const Op* op = std::get_if<Op>(&step);
      const Kernel* kernel = op == nullptr ? nullptr : std::get_if<Kernel>(&op->work);
      if (kernel == nullptr || !is_believed(*kernel)) return false;
      return std::ranges::any_of(op->writes, is_it);
    });
  }

  void mutate_op(size_t s, size_t i, const Op& op) {
    const std::string place = plan_->segments[s].name + " " + op.label;
    const auto drop = [=](Plan& p) { p.segments[s].steps.erase(p.segments[s].steps.begin() + static_cast<std::ptrdiff_t>(i)); };
    const auto edit = [=](Plan& p) -> Op& { return std::get<Op>(p.segments[s].steps[i]); };
    if (const auto* c = std::get_if<Collective>(&op.work)) {
      if (group_size(plan_->mesh, plan_->comms[c->comm.index()]) == 1) return equivalent("dropped collective");
      judge("dropped collective", place, drop);
      const bool idempotent = c->kind == CollectiveKind::kAllGather || c->kind == CollectiveKind::kBroadcast || keeps_source(s, op);
      if (idempotent)
        equivalent("repeated collective");
      else
        judge("repeated collective", place, [=](Plan& p) {
          auto& steps = p.segments[s].steps;
          steps.insert(steps.begin() + static_cast<std::ptrdiff_t>(i), steps[i]);
        });
      for (size_t other = 0; other < plan_->comms.size(); ++other) {
        const CommId id(static_cast<int32_t>(other));
        if (same_ranks(*plan_, c->comm, id))
          equivalent("wrong axis");
        else
          judge("wrong axis", place + " over " + plan_->comms[other].name,
                [&](Plan& p) { std::get<Collective>(edit(p).work).comm = id; });
      }
      if (c->kind == CollectiveKind::kAllReduce && made_by_unknown_kernel(s, op.reads[0]))
        equivalent("sum for maximum");
      else if (c->kind == CollectiveKind::kAllReduce)
        judge("sum for maximum", place, [&](Plan& p) {
          auto& reduce = std::get<Collective>(edit(p).work).reduce;
          reduce = reduce == ReduceOp::kSum ? ReduceOp::kMax : ReduceOp::kSum;
        });
    }
    if (std::holds_alternative<Send>(op.work)) judge("dropped send", place, drop);
    if (std::holds_alternative<Recv>(op.work)) judge("dropped receive", place, drop);
    if (phase_of(op.work) == Phase::kW) judge("dropped weight gradient", place, drop);
    if (std::holds_alternative<Sgd>(op.work) || std::holds_alternative<AdamW>(op.work)) judge("dropped update", place, drop);
    if (std::holds_alternative<Add>(op.work)) judge("dropped add", place, drop);
    mutate_in_place(s, i, op, place);
    if (std::holds_alternative<SumScalars>(op.work)) {
      for (const int64_t factor : {0, 2, 3})
        judge("wrong sum factor", place, [&](Plan& p) {
          Rational& f = std::get<SumScalars>(edit(p).work).factor;
          f = f * Rational(factor);
        });
      judge("dropped sum", place, drop);
    }
    if (const auto* loss = std::get_if<CrossEntropy>(&op.work)) {
      const bool divides = loss->part != CrossEntropy::Part::kLossOnly;
      if (!divides) return equivalent("wrong loss divisor");
      for (const int64_t factor : {2, 3})
        judge("wrong loss divisor", place, [&](Plan& p) { std::get<CrossEntropy>(edit(p).work).tokens *= factor; });
    }
    drop_accumulate(s, i, op, place);
    for (const SlotId w : op.writes)
      if (plan_->segments[s].slots[w.index()].cls == BufferClass::kGradient) scale_everywhere(s, w, place);
  }

  /// Rope, dropout and positions: dropped, done twice, and with other settings. The rotation of latent attention: with another angle.
  /// Attention: within another window, or none.
  void mutate_in_place(size_t s, size_t i, const Op& op, const std::string& place) {
    if (std::holds_alternative<LatentHeads>(op.work))
      judge("wrong rotation", place, [=](Plan& p) { std::get<LatentHeads>(std::get<Op>(p.segments[s].steps[i]).work).theta *= 2; });
    const auto narrow = [&](auto& w) {
      judge("wrong window", place,
            [&](Plan& p) { std::get<std::decay_t<decltype(w)>>(std::get<Op>(p.segments[s].steps[i]).work).window += 1; });
      if (w.window == 0) return;
      judge("dropped window", place,
            [&](Plan& p) { std::get<std::decay_t<decltype(w)>>(std::get<Op>(p.segments[s].steps[i]).work).window = 0; });
    };
    if (const auto* attention = std::get_if<Attention>(&op.work)) narrow(*attention);
    if (const auto* block = std::get_if<AttentionBlock>(&op.work)) narrow(*block);
    const auto* rope = std::get_if<Rope>(&op.work);
    const auto* dropout = std::get_if<Dropout>(&op.work);
    if (rope == nullptr && dropout == nullptr && !std::holds_alternative<Positions>(op.work)) return;
    judge("dropped in-place op", place,
          [=](Plan& p) { p.segments[s].steps.erase(p.segments[s].steps.begin() + static_cast<std::ptrdiff_t>(i)); });
    if (rope == nullptr && dropout == nullptr) return;
    judge("wrong in-place op", place, [=](Plan& p) {
      Work& work = std::get<Op>(p.segments[s].steps[i]).work;
      if (rope != nullptr)
        std::get<Rope>(work).theta *= 2;
      else
        std::get<Dropout>(work).site += 7;
    });
  }

  void drop_accumulate(size_t s, size_t i, const Op& op, const std::string& place) {
    const bool on = std::visit(
        [](const auto& w) {
          if constexpr (requires { w.accumulate; })
            return w.accumulate;
          else
            return false;
        },
        op.work);
    if (!on) return;
    judge("dropped accumulate", place, [=](Plan& p) {
      Op& mutant = std::get<Op>(p.segments[s].steps[i]);
      std::visit(
          [](auto& w) {
            if constexpr (requires { w.accumulate; }) w.accumulate = false;
          },
          mutant.work);
      mutant.reads.resize(mutant.reads.size() - mutant.writes.size());
    });
  }

  /// The result is declared N times what it is, in every slot and buffer of its name: only the op that makes it can tell.
  void scale_everywhere(size_t s, SlotId slot, const std::string& place) {
    judge("scaled by N", place, [=](Plan& p) { p.segments[s].slots[slot.index()].type.scale.factor = Rational(1, 2); });
    judge("all gradients scaled by N", place, [](Plan& p) {
      for (Segment& segment : p.segments)
        for (Slot& x : segment.slots)
          if (x.cls == BufferClass::kGradient) x.type.scale.factor = Rational(1, 2);
      for (Role& role : p.roles)
        for (Buffer& x : role.buffers)
          if (x.kind == BufferClass::kGradient) x.type.scale.factor = Rational(1, 2);
    });
  }

  /// Moves a free before the last step that uses the storage.
  void free_slot_early(size_t s, size_t i, SlotId slot) {
    const Segment& segment = plan_->segments[s];
    const auto root = [&](SlotId x) { return root_slot(segment, x); };
    for (size_t at = i; at-- > 0;) {
      const Op* op = std::get_if<Op>(&segment.steps[at]);
      if (op == nullptr) continue;
      const auto uses = [&](const std::vector<SlotId>& list) {
        return std::ranges::any_of(list, [&](SlotId x) { return root(x) == slot; });
      };
      if (!uses(op->reads) && !uses(op->writes)) continue;
      return judge("early free", segment.name + " %" + segment.slots[slot.index()].name, [=](Plan& p) {
        auto& steps = p.segments[s].steps;
        const Step moved = steps[i];
        steps.erase(steps.begin() + static_cast<std::ptrdiff_t>(i));
        steps.insert(steps.begin() + static_cast<std::ptrdiff_t>(at), moved);
      });
    }
  }

  static void move_item(Plan& p, size_t r, size_t from, size_t to) {
    auto& program = p.roles[r].program;
    const Item item = program[from];
    program.erase(program.begin() + static_cast<std::ptrdiff_t>(from));
    program.insert(program.begin() + static_cast<std::ptrdiff_t>(to), item);
  }

  template <class Work_>
  const Work_* only_work(const Call& call) const {
    for (const Step& step : plan_->segments[call.segment.index()].steps)
      if (const Op* op = std::get_if<Op>(&step))
        if (const auto* w = std::get_if<Work_>(&op->work)) return w;
    return nullptr;
  }

  bool updates(const Call& call) const { return only_work<Sgd>(call) != nullptr || only_work<AdamW>(call) != nullptr; }

  int32_t root_of(size_t r, BufferId b) const {
    const Role& role = plan_->roles[r];
    int32_t at = b.value;
    while (role.buffers[static_cast<size_t>(at)].view) at = role.buffers[static_cast<size_t>(at)].view->base;
    return at;
  }

  void mutate_role(size_t r) {
    const auto& program = plan_->roles[r].program;
    size_t last_send = program.size();
    for (size_t i = 0; i < program.size(); ++i) {
      if (const auto* f = std::get_if<Free>(&program[i])) free_buffer_early(r, i, f->buffer);
      const Call* call = std::get_if<Call>(&program[i]);
      if (call == nullptr) continue;
      if (const Send* send = only_work<Send>(*call)) {
        if (last_send < program.size() && only_work<Send>(std::get<Call>(program[last_send]))->comm == send->comm)
          judge("swapped sends", fmt::format("stage {} item {}", r, i), [=](Plan& p) { move_item(p, r, last_send, i); });
        last_send = i;
      }
      if (updates(*call)) stale_parameter(r, i);
      swap_with_next(r, i, *call);
      swap_gradients(r, i, *call);
    }
  }

  void free_buffer_early(size_t r, size_t i, BufferId buffer) {
    const auto& program = plan_->roles[r].program;
    for (size_t at = i; at-- > 0;) {
      const Call* call = std::get_if<Call>(&program[at]);
      if (call == nullptr) continue;
      const bool uses = std::ranges::any_of(call->binding, [&](BufferId b) { return b && root_of(r, b) == buffer.value; });
      if (uses)
        return judge("early free", fmt::format("stage {} %{}", r, plan_->roles[r].buffers[buffer.index()].name),
                     [=](Plan& p) { move_item(p, r, i, at); });
    }
  }

  /// The update before the last call that writes its gradient, and the gather of the new value before the update.
  void stale_parameter(size_t r, size_t i) {
    const auto& program = plan_->roles[r].program;
    const Call& update = std::get<Call>(program[i]);
    const Segment& segment = plan_->segments[update.segment.index()];
    for (const Step& step : segment.steps) {
      const Op* op = std::get_if<Op>(&step);
      if (op == nullptr || (!std::holds_alternative<Sgd>(op->work) && !std::holds_alternative<AdamW>(op->work))) continue;
      const auto bound = [&](SlotId slot) { return update.binding[root_slot(segment, slot).index()]; };
      const BufferId gradient = bound(op->reads[0]), value = bound(op->reads[1]);
      if (!gradient || !value) continue;
      const bool waits = op->when || op->reads.size() > (std::holds_alternative<AdamW>(op->work) ? 4u : 2u);
      for (size_t at = i; at-- > 0;) {
        const Call* call = std::get_if<Call>(&program[at]);
        if (call == nullptr || updates(*call)) continue;    // another update of the same bucket may come first
        if (!waits && looks_at_gradients(*call)) continue;  // and what the update does not wait for may come later
        if (std::ranges::none_of(call->binding, [&](BufferId b) { return b && root_of(r, b) == root_of(r, gradient); })) continue;
        judge("update before its gradient", fmt::format("stage {} item {}", r, i), [=](Plan& p) { move_item(p, r, i, at); });
        break;
      }
      for (size_t at = i + 1; at < program.size(); ++at) {
        const Call* call = std::get_if<Call>(&program[at]);
        const Collective* c = call == nullptr ? nullptr : only_work<Collective>(*call);
        if (c == nullptr || c->kind != CollectiveKind::kAllGather) continue;
        if (std::ranges::none_of(call->binding, [&](BufferId b) { return b && root_of(r, b) == root_of(r, value); })) continue;
        judge("stale parameter", fmt::format("stage {} item {}", r, i), [=](Plan& p) { move_item(p, r, at, i); });
        break;
      }
    }
  }

  /// A norm, or a search for an infinity.
  bool looks_at_gradients(const Call& call) const {
    const Kernel* kernel = only_work<Kernel>(call);
    return only_work<SquaredNorm>(call) != nullptr || (kernel != nullptr && kernel->name == "found_inf");
  }

  /// Exchanges the first gradient operand between two calls of one segment (bucket for bucket, update for update).
  void swap_with_next(size_t r, size_t i, const Call& call) {
    const auto& program = plan_->roles[r].program;
    const Segment& segment = plan_->segments[call.segment.index()];
    const bool state = updates(call) || only_work<Collective>(call) != nullptr;
    if (!state) return;
    for (size_t at = i + 1; at < program.size(); ++at) {
      const Call* other = std::get_if<Call>(&program[at]);
      if (other == nullptr || other->segment != call.segment) continue;
      for (size_t slot = 0; slot < segment.slots.size(); ++slot) {
        if (!call.binding[slot] || segment.slots[slot].cls != BufferClass::kGradient) continue;
        if (call.binding[slot] == other->binding[slot] || updates_same(call, *other))
          equivalent("swapped buckets");
        else if (segment.slots.size() > 1 && bound_slots(segment) > 1)
          judge("swapped buckets", fmt::format("stage {} items {} and {}", r, i, at), [=](Plan& p) {
            std::swap(std::get<Call>(p.roles[r].program[i]).binding[slot], std::get<Call>(p.roles[r].program[at]).binding[slot]);
          });
        break;
      }
      return;
    }
  }

  /// Both calls update the same parameter (an asynchronous server): either gradient may come first.
  bool updates_same(const Call& a, const Call& b) const {
    const Segment& segment = plan_->segments[a.segment.index()];
    if (!updates(a)) return false;
    for (size_t slot = 0; slot < segment.slots.size(); ++slot)
      if (segment.slots[slot].cls == BufferClass::kParameter && a.binding[slot] != b.binding[slot]) return false;
    return true;
  }

  static int bound_slots(const Segment& segment) {
    return static_cast<int>(
        std::ranges::count_if(segment.slots, [](const Slot& s) { return s.kind == SlotKind::kBound && !s.view; }));
  }

  /// Exchanges two gradients of equal type within one backward call.
  void swap_gradients(size_t r, size_t i, const Call& call) {
    const Segment& segment = plan_->segments[call.segment.index()];
    if (updates(call) || only_work<Collective>(call) != nullptr) return;
    const bool backward = std::ranges::any_of(segment.steps, [](const Step& s) {
      const Op* op = std::get_if<Op>(&s);
      return op != nullptr && phase_of(op->work) == Phase::kW;
    });
    if (!backward) return;
    for (size_t a = 0; a < segment.slots.size(); ++a)
      for (size_t b = a + 1; b < segment.slots.size(); ++b) {
        const Slot &x = segment.slots[a], &y = segment.slots[b];
        if (x.cls != BufferClass::kGradient || y.cls != BufferClass::kGradient || x.type != y.type || !call.binding[a] ||
            !call.binding[b])
          continue;
        if (call.binding[a] == call.binding[b])
          equivalent("swapped gradients");
        else
          judge("swapped gradients", fmt::format("stage {} item {} %{} %{}", r, i, x.name, y.name), [=](Plan& p) {
            auto& binding = std::get<Call>(p.roles[r].program[i]).binding;
            std::swap(binding[a], binding[b]);
          });
      }
  }

  void skip_waits(int r) {
    const Program program = expand_program(*plan_, r);
    MutationTally& t = tally("skipped wait");
    for (const Instruction& i : program.instructions)
      for (uint32_t w = 0; w < i.waits; ++w) {
        Program mutant = program;
        Instruction& m = mutant.instructions[static_cast<size_t>(i.id)];
        std::swap(mutant.waits[m.first_wait + w], mutant.waits[m.first_wait + m.waits - 1]);
        --m.waits;
        ++t.mutants;
        if (!find_unordered(*plan_, mutant).empty())
          ++t.killed;
        else
          t.survivors.push_back(plan_->name + ": " + describe(*plan_, i));
      }
  }

  const std::vector<Plan>& plans_;
  uint64_t share_, number_ = 0;
  const Plan* plan_ = nullptr;
  std::vector<MutationTally> tallies_;
};

}  // namespace

std::vector<MutationTally> mutate_all(const std::vector<Plan>& plans, uint64_t share) { return Mutator(plans, share).run(); }

int score_percent(const std::vector<MutationTally>& tallies) {
  int64_t mutants = 0, killed = 0;
  for (const MutationTally& t : tallies) mutants += t.mutants, killed += t.killed;
  return mutants == 0 ? 0 : static_cast<int>(100 * killed / mutants);
}

std::string score_table(const std::vector<MutationTally>& tallies) {
  std::string text = fmt::format("{:<28} {:>8} {:>8} {:>12}\n", "mutation", "mutants", "killed", "equivalent");
  int mutants = 0, killed = 0, equivalent = 0;
  for (const MutationTally& t : tallies) {
    text += fmt::format("{:<28} {:>8} {:>8} {:>12}\n", t.kind, t.mutants, t.killed, t.equivalent);
    for (size_t i = 0; i < std::min<size_t>(t.survivors.size(), 5); ++i) text += "    survived: " + t.survivors[i] + "\n";
    mutants += t.mutants, killed += t.killed, equivalent += t.equivalent;
  }
  text += fmt::format("{:<28} {:>8} {:>8} {:>12}   score {} %\n{}\n", "all", mutants, killed, equivalent, score_percent(tallies),
                      kEquivalenceRules);
  return text;
}

}  // namespace shardlab::testing
