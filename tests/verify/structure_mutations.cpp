#include "tests/verify/structure_mutations.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <ranges>
#include <set>
#include <utility>

#include "plan/expert_placement.h"
#include "tests/namespaces.h"

namespace shardlab::testing {
namespace {

class StructureMutator {
 public:
  StructureMutator(const Plan& plan, const Jury& jury) : plan_(plan), jury_(jury) {}

  void run() {
    std::set<size_t> called;
    for (const Role& role : plan_.roles)
      for (const Item& item : role.program)
        if (const Call* call = std::get_if<Call>(&item)) {
          called.insert(call->segment.index());
          layers_ = std::max(layers_, call->layer + 1);
        }
    for (const size_t s : called)
      for (size_t i = 0; i < plan_.segments[s].steps.size(); ++i)
        if (const Op* op = std::get_if<Op>(&plan_.segments[s].steps[i])) mutate_op(s, i, *op);
    for (size_t c = 0; c < plan_.comms.size(); ++c) regroup(c, called);
    for (size_t r = 0; r < plan_.roles.size(); ++r) mutate_role(r);
    for (size_t i = 0; i < plan_.expert_placement.size(); ++i) mutate_placement(i);
  }

 private:
  static Op& op_at(Plan& p, size_t s, size_t i) { return std::get<Op>(p.segments[s].steps[i]); }
  static Call& call_at(Plan& p, size_t r, size_t i) { return std::get<Call>(p.roles[r].program[i]); }
  const Segment& segment_of(const Call& call) const { return plan_.segments[call.segment.index()]; }

  template <class F>
  static bool any_op(const Segment& segment, F f) {
    return std::ranges::any_of(segment.steps, [&](const Step& step) {
      const Op* op = std::get_if<Op>(&step);
      return op != nullptr && f(*op);
    });
  }
  static bool of_model(const Op& op) { return phase_of(op.work) != Phase::kNone; }
  static bool is_message(const Op& op) { return std::holds_alternative<Send>(op.work) || std::holds_alternative<Recv>(op.work); }

  void mutate_op(size_t s, size_t i, const Op& op) {
    const std::string place = plan_.segments[s].name + " " + op.label;
    const auto change_hop = [&](CommId comm, int hop, bool cyclic) {
      const int size = group_size(plan_.mesh, plan_.comms[comm.index()]);
      for (const int other : {-hop, 2 * hop, hop + 1}) {
        if (other == 0 || other == hop) continue;
        if (cyclic && (other - hop) % size == 0)
          jury_.equivalent("another hop");
        else
          jury_.judge("another hop", fmt::format("{} hop {}", place, other), [=](Plan& p) {
            std::visit(
                [&](auto& w) {
                  if constexpr (requires { w.hop; }) w.hop = other;
                },
                op_at(p, s, i).work);
          });
      }
    };
    if (const auto* send = std::get_if<Send>(&op.work)) change_hop(send->comm, send->hop, send->cyclic);
    if (const auto* recv = std::get_if<Recv>(&op.work)) change_hop(recv->comm, recv->hop, recv->cyclic);
    if (const auto* gather = std::get_if<Collective>(&op.work); gather != nullptr && gather->kind == CollectiveKind::kAllGather)
      exchange_gathers(s, i, op, place);
  }

  /// Two gathers one after the other, each over the other's axes.
  void exchange_gathers(size_t s, size_t i, const Op& first, const std::string& place) {
    const auto& steps = plan_.segments[s].steps;
    for (size_t j = i + 1; j < steps.size(); ++j) {
      const Op* op = std::get_if<Op>(&steps[j]);
      const auto* second = op != nullptr ? std::get_if<Collective>(&op->work) : nullptr;
      if (second == nullptr || second->kind != CollectiveKind::kAllGather || op->reads[0] != first.writes[0]) continue;
      jury_.judge("gathers exchanged", place, [=](Plan& p) {
        std::swap(std::get<Collective>(op_at(p, s, i).work).comm, std::get<Collective>(op_at(p, s, j).work).comm);
      });
    }
  }

  /// Collectives among stages: every stage alone, and partners exchanged between two groups.
  void regroup(size_t c, const std::set<size_t>& called) {
    const Comm& comm = plan_.comms[c];
    const auto pipeline = plan_.mesh.find(kPipelineAxis);
    if (!pipeline || comm.axes != AxisSet::of(*pipeline) || group_size(plan_.mesh, comm) == 1) return;
    const auto collects = [&](const Op& op) {
      const auto* collective = std::get_if<Collective>(&op.work);
      return collective != nullptr && collective->comm.index() == c;
    };
    if (std::ranges::none_of(called, [&](size_t s) { return any_op(plan_.segments[s], collects); })) return;
    Groups alone;
    for (int stage = 0; stage < static_cast<int>(plan_.roles.size()); ++stage) alone.push_back({stage});
    jury_.judge("another group", comm.name + " alone", [=](Plan& p) { p.comms[c].groups = alone; });
    for (size_t a = 0; a < comm.groups.size(); ++a)
      for (size_t b = a + 1; b < comm.groups.size(); ++b)
        if (comm.groups[a].size() > 1 && comm.groups[b].size() > 1)
          jury_.judge("another group", fmt::format("{} groups {} and {}", comm.name, a, b),
                      [=](Plan& p) { std::swap(p.comms[c].groups[a].back(), p.comms[c].groups[b].back()); });
  }

  void mutate_role(size_t r) {
    const auto& program = plan_.roles[r].program;
    size_t last_send = program.size();
    for (size_t i = 0; i < program.size(); ++i) {
      const Call* call = std::get_if<Call>(&program[i]);
      if (call == nullptr) continue;
      const Segment& segment = segment_of(*call);
      const std::string place = fmt::format("stage {} item {} {}", r, i, segment.name);
      const bool model = any_op(segment, of_model), message = any_op(segment, is_message);
      if (model && call->layer >= 0 && layers_ > 1)
        jury_.judge("another layer", place, [=, this](Plan& p) {
          int& layer = call_at(p, r, i).layer;
          layer = (layer + 1) % layers_;
        });
      const auto goes_by_placement = [](const Op& op) {
        return std::holds_alternative<Route>(op.work) || std::holds_alternative<ExpertLoad>(op.work) ||
               std::holds_alternative<ChooseExperts>(op.work);
      };
      if (!plan_.expert_placement.empty() && call->layer >= 0 && any_op(segment, goes_by_placement))
        jury_.judge("experts of no layer", place, [=](Plan& p) { call_at(p, r, i).layer = -1; });
      if ((model || message) && call->micro_batch >= 0 && plan_.micro_batches > 1)
        jury_.judge("another micro-batch", place, [=, this](Plan& p) {
          int& micro_batch = call_at(p, r, i).micro_batch;
          micro_batch = (micro_batch + 1) % plan_.micro_batches;
        });
      if (model && call->layer >= 0) exchange_parts(r, i, *call, place);
      if (any_op(segment, [](const Op& op) { return phase_of(op.work) == Phase::kW; })) {
        free_before(r, i, *call, place);
        if (call->layer >= 0 && !any_op(segment, [](const Op& op) { return of_model(op) && phase_of(op.work) != Phase::kW; }))
          exchange_pieces(r, i, *call, place);
      }
      if (segment.steps.size() != 1 || !any_op(segment, [](const Op& op) { return std::holds_alternative<Send>(op.work); }))
        continue;
      exchange_boundaries(r, last_send, i, place);
      last_send = i;
    }
  }

  /// Two experts exchanged for the ranks that hold their weights, and not for the tokens that go to them; an expert at two places; a place
  /// too few; a layer without experts.
  void mutate_placement(size_t i) {
    const ExpertPlacement& placement = plan_.expert_placement[i];
    const std::string place = fmt::format("layer {}", placement.layer);
    const auto change = [&](const std::string& what, const std::function<void(ExpertPlacement&)>& damage) {
      jury_.judge("another placement of experts", place + " " + what, [=](Plan& p) { damage(p.expert_placement[i]); });
    };
    for (size_t a = 0; a + 1 < placement.experts.size(); ++a) {
      const std::string both = fmt::format("places {} and {}", a, a + 1);
      change(both + " exchanged", [=](ExpertPlacement& p) { std::swap(p.experts[a], p.experts[a + 1]); });
      change(both + " with one expert", [=](ExpertPlacement& p) {
        p.experts[a] = p.experts[a + 1];
        p = place_experts(p.layer, p.experts);
      });
    }
    change("without the last place", [](ExpertPlacement& p) {
      p.experts.pop_back();
      p = place_experts(p.layer, p.experts);
    });
    change("of no layer", [this](ExpertPlacement& p) { p.layer = layers_; });
  }

  /// A layer computes with what the same slots of another layer's call are bound to, of one class of buffers: parameters of another
  /// part.
  void exchange_parts(size_t r, size_t i, const Call& call, const std::string& place) {
    const auto& program = plan_.roles[r].program;
    for (size_t j = i + 1; j < program.size(); ++j) {
      const Call* other = std::get_if<Call>(&program[j]);
      if (other == nullptr || other->segment != call.segment || other->layer == call.layer ||
          other->micro_batch != call.micro_batch)
        continue;
      const auto is_state = [&](BufferId id) { return id && plan_.roles[r].buffers[id.index()].parameter >= 0; };
      const auto same = [&](size_t s) { return !is_state(call.binding[s]) || call.binding[s] == other->binding[s]; };
      if (std::ranges::all_of(std::views::iota(size_t{0}, call.binding.size()), same)) return jury_.equivalent("another part");
      jury_.judge("another part", place, [=](Plan& p) {
        Call &a = call_at(p, r, i), &b = call_at(p, r, j);
        for (size_t s = 0; s < a.binding.size(); ++s)
          if (is_state(a.binding[s])) std::swap(a.binding[s], b.binding[s]);
      });
      return;
    }
  }

  /// The gradients of weights of two micro-batches, each from what the gradient of the input left of the other. Of calls that go
  /// back in one piece that is two backwards in the other order: the same sum.
  void exchange_pieces(size_t r, size_t i, const Call& call, const std::string& place) {
    const auto& program = plan_.roles[r].program;
    for (size_t j = i + 1; j < program.size(); ++j) {
      const Call* other = std::get_if<Call>(&program[j]);
      if (other == nullptr || other->segment != call.segment || other->layer != call.layer) continue;
      if (other->binding == call.binding) return jury_.equivalent("a piece of another micro-batch");
      jury_.judge("a piece of another micro-batch", place,
                  [=](Plan& p) { std::swap(call_at(p, r, i).binding, call_at(p, r, j).binding); });
      return;
    }
  }

  /// What a call with weight gradients reads is freed before it.
  void free_before(size_t r, size_t i, const Call& call, const std::string& place) {
    const auto& program = plan_.roles[r].program;
    for (size_t j = i + 1; j < program.size(); ++j) {
      const auto* free = std::get_if<Free>(&program[j]);
      if (free == nullptr || plan_.roles[r].buffers[free->buffer.index()].kind != BufferClass::kActivation) continue;
      if (std::ranges::find(call.binding, free->buffer) == call.binding.end()) continue;
      jury_.judge("freed before W", place, [=](Plan& p) {
        auto& items = p.roles[r].program;
        std::rotate(items.begin() + static_cast<std::ptrdiff_t>(i), items.begin() + static_cast<std::ptrdiff_t>(j),
                    items.begin() + static_cast<std::ptrdiff_t>(j) + 1);
      });
    }
  }

  /// Two sends of one kind, each with what the other should send.
  void exchange_boundaries(size_t r, size_t last, size_t i, const std::string& place) {
    const auto& program = plan_.roles[r].program;
    if (last >= program.size() || std::get<Call>(program[last]).segment != std::get<Call>(program[i]).segment) return;
    if (std::get<Call>(program[last]).binding == std::get<Call>(program[i]).binding) return jury_.equivalent("another boundary");
    jury_.judge("another boundary", place, [=](Plan& p) { std::swap(call_at(p, r, last).binding, call_at(p, r, i).binding); });
  }

  const Plan& plan_;
  const Jury& jury_;
  int layers_ = 0;
};

}  // namespace

void mutate_structure(const Plan& plan, const Jury& jury) { StructureMutator(plan, jury).run(); }

}  // namespace shardlab::testing
