#include "simulator/analytic/executor_form.h"

#include <initializer_list>

#include "simulator/closed_form.h"
#include "simulator/step_form.h"

namespace shardlab::simulator::analytic {
namespace {

ExecutorStage stage_of(const StageForm& form) {
  const auto at = [&](BufferClass c) { return form.at_peak.bytes[static_cast<size_t>(c)]; };
  ExecutorStage s{
      .parameters = at(BufferClass::kParameter),
      .masters = at(BufferClass::kMaster),
      .gradients = at(BufferClass::kGradient),
      .moments = at(BufferClass::kMoment),
      .activations = at(BufferClass::kActivation),
      .temporaries = at(BufferClass::kTemporary),
      .gathered = at(BufferClass::kBuffer),
      .rest = at(BufferClass::kInput) + at(BufferClass::kMetric) + at(BufferClass::kWorkspace) + at(BufferClass::kOther),
      .peak = form.peak,
      .host = form.host.at_peak.total(),
      .nvme = form.nvme.at_peak.total()};
  return s;
}

ExecutorWire wire_of(const ClosedForm& form) {
  const auto sent = [&](std::initializer_list<Channel> channels) {
    int64_t bytes = 0;
    for (const Channel c : channels) bytes += form.wire[static_cast<size_t>(c)];
    return bytes;
  };
  return {
      .tensor = sent({Channel::kTp}),
      .gradients = sent({Channel::kDpGradients, Channel::kDpReplicas}),
      .weights = sent({Channel::kDpParameters}),
      .pipeline = sent({Channel::kForwardEven, Channel::kForwardOdd, Channel::kBackwardEven, Channel::kBackwardOdd}),
      .ends = sent({Channel::kEnds}),
      .metrics = sent({Channel::kMetricsDp, Channel::kMetricsReplica, Channel::kMetricsTp, Channel::kMetricsPp, Channel::kAmax})};
}

}  // namespace

std::optional<ExecutorBytes> executor_bytes(const Case& config) {
  if (!check(config).ok()) return std::nullopt;
  const ClosedForm form = closed_form(config);
  ExecutorBytes bytes;
  bytes.stages.reserve(form.stages.size());
  for (const StageForm& stage : form.stages) bytes.stages.push_back(stage_of(stage));
  bytes.wire = wire_of(form);
  return bytes;
}

bool has_executor_time(const Case& config) { return has_step_form(config); }

std::optional<ExecutorTime> executor_time(const Case& config) {
  if (!has_step_form(config) || dense_peak(config.machine.device, config.train.precision) <= 0) return std::nullopt;
  const auto walked = step_form(config, DatasheetRates(config.machine, config.train.precision));
  if (!walked) return std::nullopt;
  const auto at = [&](forms::Spent s) { return walked->spent[static_cast<size_t>(s)]; };
  using forms::Spent;
  return ExecutorTime{.forward = at(Spent::kForward),
                      .backward = at(Spent::kBackward),
                      .recompute = at(Spent::kRecompute),
                      .update = at(Spent::kUpdate),
                      .launch = at(Spent::kLaunch),
                      .tensor = at(Spent::kTensor),
                      .data = at(Spent::kData),
                      .pipeline = at(Spent::kPipeline),
                      .hidden = walked->hidden_s};
}

}  // namespace shardlab::simulator::analytic
