#include "tests/analytic/expected.h"

#include "simulator/closed_form.h"

namespace shardlab::simulator::analytic::testing {

Expected expected_of(const Case& config) {
  const ClosedForm form = closed_form(config);
  Expected e;
  for (const StageForm& s : form.stages) {
    const auto at = [&](BufferClass c) { return s.at_peak.bytes[static_cast<size_t>(c)]; };
    e.stages.push_back(
        {s.peak, at(BufferClass::kParameter), at(BufferClass::kGradient), at(BufferClass::kMoment), at(BufferClass::kActivation)});
  }
  e.wire_total = form.wire_total();
  e.tensor_wire = form.wire[static_cast<size_t>(Channel::kTp)];
  e.gradient_wire = form.wire[static_cast<size_t>(Channel::kDpGradients)] + form.wire[static_cast<size_t>(Channel::kDpReplicas)];
  return e;
}

}  // namespace shardlab::simulator::analytic::testing
