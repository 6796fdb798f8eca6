#include "strategies/state.h"

namespace shardlab::strategies {

namespace {

bool is_tied_head(const Draft& draft, int unit, int parameter) {
  const Unit& u = draft.units[static_cast<size_t>(unit)];
  return u.kind == UnitKind::kHead &&
         draft.plan.parameters[u.parameters[static_cast<size_t>(parameter)].index()].name == "embed.tokens";
}

}  // namespace

std::string state_name(const Draft& draft, int unit, int parameter) {
  const ParameterId id = draft.units[static_cast<size_t>(unit)].parameters[static_cast<size_t>(parameter)];
  return draft.plan.parameters[id.index()].name + (is_tied_head(draft, unit, parameter) ? ".head" : "");
}

Type gradient_type(Draft& draft, int unit, int parameter) {
  const UnitTemplate& t = draft.of_unit(unit);
  for (size_t s = 0; s < t.backward.uses.size(); ++s)
    if (t.backward.uses[s].use == Use::kGradient && t.backward.uses[s].parameter == parameter)
      return t.backward.segment.slots[s].type;
  SHARDLAB_CHECK(false, "{} has no gradient", state_name(draft, unit, parameter));
}

void declare_state(Draft& draft) {
  for (StageDraft& stage : draft.stages)
    for (const int unit : stage.units) {
      const Unit& u = draft.units[static_cast<size_t>(unit)];
      auto& states = stage.state.emplace_back();
      for (int p = 0; p < static_cast<int>(u.parameters.size()); ++p) {
        const ParameterId id = u.parameters[static_cast<size_t>(p)];
        const std::string name = state_name(draft, unit, p);
        ParameterState state;
        if (is_tied_head(draft, unit, p) && stage.holds(0)) {
          state.value = stage.at(0, 0).value;
        } else {
          Buffer value;
          value.name = draft.plan.parameters[id.index()].name;
          value.type = draft.plan.parameters[id.index()].type;
          value.kind = BufferClass::kParameter;
          value.persistent = true;
          value.parameter = id.value;
          state.value = add_buffer(stage, std::move(value));
        }
        if (draft.training) {
          Buffer gradient;
          gradient.name = name + ".grad";
          gradient.type = gradient_type(draft, unit, p);
          gradient.kind = BufferClass::kGradient;
          gradient.parameter = id.value;
          state.gradient = state.reduced = add_buffer(stage, std::move(gradient));
          stage.whole_step.push_back(state.gradient);
        }
        states.push_back(state);
      }
    }
}

}  // namespace shardlab::strategies
