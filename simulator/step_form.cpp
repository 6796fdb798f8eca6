#include "simulator/step_form.h"

#include <vector>

#include "simulator/closed_form_parts.h"
#include "simulator/step_kernels.h"
#include "simulator/step_stage.h"

namespace shardlab::simulator {

bool has_step_form(const Case& c) {
  const Layout& l = c.layout;
  const bool plain = l.zero_plus_plus == ZeroPlusPlus{} && l.parameter_server == ParameterServer{} && l.diloco == Diloco{};
  return plain && is_decided(c) && !c.machine.local && c.machine.calibration == nullptr;
}

std::optional<forms::Walked> step_form(const Case& c, const DatasheetRates& rates) {
  if (!has_step_form(c)) return std::nullopt;
  const forms::StepKernels kernels(c, rates);
  std::vector<forms::StageText> stages;
  for (int s = 0; s < c.layout.pp; ++s) { stages.push_back(forms::StageWriter(c, kernels, s).write()); }
  forms::WalkCosts costs{.launch_s = rates.efficiency().launch_s, .wake_s = rates.efficiency().wake_s, .messages = {}};
  for (const auto& hop : kernels.ways().hops)
    costs.messages.insert(costs.messages.end(), 2, kernels.message(hop));  // there and back
  return forms::walk(stages, costs);
}

}  // namespace shardlab::simulator
