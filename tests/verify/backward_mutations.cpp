#include "tests/verify/backward_mutations.h"
#include "tests/namespaces.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <set>
#include <utility>

namespace shardlab::testing {
namespace {

class BackwardMutator {
 public:
  BackwardMutator(const Plan& plan, const Jury& jury) : plan_(plan), jury_(jury) {}

  void run() {
    std::set<size_t> called;
    for (size_t r = 0; r < plan_.roles.size(); ++r)
      for (size_t i = 0; i < plan_.roles[r].program.size(); ++i)
        if (const Call* call = std::get_if<Call>(&plan_.roles[r].program[i])) {
          called.insert(call->segment.index());
          exchange_inputs(r, i, *call);
        }
    for (const size_t s : called)
      for (size_t i = 0; i < plan_.segments[s].steps.size(); ++i)
        if (const Op* op = std::get_if<Op>(&plan_.segments[s].steps[i])) mutate(s, i, *op);
  }

 private:
  static Op& op_at(Plan& p, size_t s, size_t i) { return std::get<Op>(p.segments[s].steps[i]); }

  void mutate(size_t s, size_t i, const Op& op) {
    const std::string place = fmt::format("{} {}", plan_.segments[s].name, op.label);
    const bool known = !std::holds_alternative<Kernel>(op.work);
    const Phase phase = phase_of(op.work);
    if (known && phase == Phase::kI)
      jury_.judge("dropped input gradient", place,
                  [=](Plan& p) { p.segments[s].steps.erase(p.segments[s].steps.begin() + static_cast<std::ptrdiff_t>(i)); });
    if (known && (phase != Phase::kNone || std::holds_alternative<CrossEntropy>(op.work))) {
      if (phase == Phase::kNone || has_forward(op.label))
        replace_operands(s, i, op, place);
      else
        jury_.equivalent("another operand");
    }
    if (std::holds_alternative<LoadBatch>(op.work))
      jury_.judge("tokens for targets", place, [=](Plan& p) {
        bool& targets = std::get<LoadBatch>(op_at(p, s, i).work).targets;
        targets = !targets;
      });
    if (std::holds_alternative<SquaredNorm>(op.work)) change_norm(s, i, op, place);
    if (const auto* kernel = std::get_if<Kernel>(&op.work); kernel != nullptr && kernel->name == "clip_factor")
      for (const size_t from : {0, 1})
        jury_.judge("clipped by another number", place, [=](Plan& p) { op_at(p, s, i).reads[1 - from] = op.reads[from]; });
    change_settings(s, i, op, place);
  }

  bool has_forward(std::string_view label) const {
    if (label.ends_with(".again")) label.remove_suffix(6);
    return std::ranges::any_of(plan_.segments, [&](const Segment& segment) {
      return std::ranges::any_of(segment.steps, [&](const Step& step) {
        const Op* op = std::get_if<Op>(&step);
        return op != nullptr && op->label == label && phase_of(op->work) == Phase::kF;
      });
    });
  }

  /// Two names of one place in a storage: an operand under either is the same.
  static bool is_same_place(const std::vector<Slot>& slots, size_t a, size_t b) {
    const auto place = [&](size_t s) {
      const std::optional<View>& view = slots[s].view;
      return view ? *view : View{static_cast<int32_t>(s), 0, {}};
    };
    return place(a) == place(b);
  }

  /// Each operand that belongs to one micro-batch or is a parameter, for the next slot of its type.
  void replace_operands(size_t s, size_t i, const Op& op, const std::string& place) {
    const auto& slots = plan_.segments[s].slots;
    for (size_t r = 0; r < op.reads.size(); ++r) {
      const size_t own = op.reads[r].index();
      if (slots[own].type.micro == Micro::kSum) continue;
      for (size_t step = 1; step < slots.size(); ++step) {
        const size_t other = (own + step) % slots.size();
        if (slots[other].type != slots[own].type || slots[other].cls != slots[own].cls) continue;
        if (is_same_place(slots, own, other)) continue;
        jury_.judge("another operand", fmt::format("{} %{} for %{}", place, slots[other].name, slots[own].name),
                    [=](Plan& p) { op_at(p, s, i).reads[r] = SlotId(static_cast<int32_t>(other)); });
        break;
      }
    }
  }

  /// Settings of this op alone, and, of heads, in all ops at once: what a tensor parallel would do that forgot to divide them.
  void change_settings(size_t s, size_t i, const Op& op, const std::string& place) {
    if (const auto* norm = std::get_if<Norm>(&op.work)) {
      jury_.judge("other settings", place, [=](Plan& p) { std::get<Norm>(op_at(p, s, i).work).epsilon *= 10; });
      if (norm->residual)
        jury_.judge("dropped residual path", place, [=](Plan& p) {
          Op& mutant = op_at(p, s, i);
          std::get<Norm>(mutant.work).residual = false;
          mutant.reads.pop_back();
        });
    }
    if (std::holds_alternative<Activation>(op.work))
      jury_.judge("other settings", place, [=](Plan& p) {
        bool& swiglu = std::get<Activation>(op_at(p, s, i).work).swiglu;
        swiglu = !swiglu;
      });
    const auto heads = [&](auto tag) {
      using W = decltype(tag);
      if (!std::holds_alternative<W>(op.work)) return;
      jury_.judge("other heads", place, [=](Plan& p) { std::get<W>(op_at(p, s, i).work).heads *= 2; });
      jury_.judge("other heads", place, [=](Plan& p) { std::get<W>(op_at(p, s, i).work).head_dim *= 2; });
      jury_.judge("other heads", place, [=](Plan& p) {
        W& w = std::get<W>(op_at(p, s, i).work);
        w.heads *= 2;
        w.kv_heads *= 2;
        w.head_dim /= 2;
      });
      jury_.judge("heads not divided", place, [](Plan& p) {
        for (Segment& segment : p.segments)
          for (Step& step : segment.steps)
            if (Op* each = std::get_if<Op>(&step))
              std::visit(
                  [](auto& w) {
                    if constexpr (requires { w.heads, w.kv_heads; }) w.heads *= 2, w.kv_heads *= 2;
                  },
                  each->work);
      });
    };
    heads(Rope{});
    heads(Attention{});
  }

  void change_norm(size_t s, size_t i, const Op& op, const std::string& place) {
    if (op.reads.size() > 1) jury_.judge("norm without a gradient", place, [=](Plan& p) { op_at(p, s, i).reads.pop_back(); });
    jury_.judge("norm with one twice", place, [=](Plan& p) {
      Op& mutant = op_at(p, s, i);
      mutant.reads.push_back(mutant.reads[0]);
    });
  }

  /// What the segment reads and does not allocate.
  bool is_input(const Segment& segment, size_t slot) const {
    bool read = false, made = false;
    for (const Step& step : segment.steps) {
      if (const auto* alloc = std::get_if<AllocSlot>(&step)) made |= alloc->slot.index() == slot;
      const Op* op = std::get_if<Op>(&step);
      if (op == nullptr) continue;
      read |= !made && std::ranges::any_of(op->reads, [&](SlotId x) { return x.index() == slot; });
    }
    return read && !made;
  }

  /// One input between this call and the next of its segment (both ways), and of the next in this one alone.
  void exchange_inputs(size_t r, size_t i, const Call& call) {
    const auto& program = plan_.roles[r].program;
    const Segment& segment = plan_.segments[call.segment.index()];
    const bool forward_or_back = std::ranges::any_of(segment.steps, [](const Step& step) {
      const Op* op = std::get_if<Op>(&step);
      return op != nullptr && phase_of(op->work) != Phase::kNone && !std::holds_alternative<Kernel>(op->work);
    });
    // A compression's products run once a step, each call on state of its own: exchanged, that is another name for the same.
    if (!forward_or_back || call.micro_batch < 0) return;
    for (size_t at = i + 1; at < program.size(); ++at) {
      const Call* other = std::get_if<Call>(&program[at]);
      if (other == nullptr || other->segment != call.segment) continue;
      for (size_t slot = 0; slot < segment.slots.size(); ++slot) {
        // A compression's own state between steps (errors, bases) is what its kernels make of it.
        const bool followed = segment.slots[slot].type.micro == Micro::kSlice || segment.slots[slot].cls == BufferClass::kParameter;
        if (!call.binding[slot] || !followed || !is_input(segment, slot)) continue;
        const char* kind = segment.slots[slot].cls == BufferClass::kParameter ? "exchanged parameter" : "exchanged value";
        if (call.binding[slot] == other->binding[slot]) {
          jury_.equivalent(kind);
          continue;
        }
        const std::string place = fmt::format("stage {} {} items {} and {} %{}", r, segment.name, i, at, segment.slots[slot].name);
        const auto binding = [=](Plan& p, size_t item) -> BufferId& {
          return std::get<Call>(p.roles[r].program[item]).binding[slot];
        };
        jury_.judge(kind, place, [=](Plan& p) { std::swap(binding(p, i), binding(p, at)); });
        jury_.judge(kind, place + " alone", [=](Plan& p) { binding(p, i) = binding(p, at); });
      }
      return;
    }
  }

  const Plan& plan_;
  const Jury& jury_;
};

}  // namespace

void mutate_backward(const Plan& plan, const Jury& jury) { BackwardMutator(plan, jury).run(); }

}  // namespace shardlab::testing
