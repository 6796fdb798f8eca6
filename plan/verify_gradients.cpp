// Rule 4, gradients: each parameter is updated over all of its elements, once, with a gradient to which every use of the parameter
// gave every micro-batch of the step exactly once.
//
// A USE is a forward op that reads the parameter; the op of phase W with the same label and layer gives its contribution, the n-th
// result to the n-th parameter. A tied table
// has two uses, so its gradient needs two sources, wherever they ran. Sums over roles are looked up on the other side, so
// a gradient that never met its other end lacks a source and is found.
#include <algorithm>

#include "plan/base/hash.h"
#include "plan/verify_values.h"

namespace shardlab::verifying {

uint64_t GradientLedger::fingerprint_of(int micro_batch) { return mix(static_cast<uint64_t>(micro_batch) + 1); }

void Contributions::add(const Source& s) {
  for (Source& mine : sources)
    if (mine.id == s.id) {
      mine.count += s.count;
      mine.fingerprint += s.fingerprint;
      return;
    }
  sources.push_back(s);
}

void Contributions::add(const Contributions& other) {
  for (const Source& s : other.sources) add(s);
  for (const auto& [parameter, elements] : other.normed) normed[parameter] += elements;
  for (const CrossRole& key : other.merged) merged.push_back(key);
  mixed = mixed || other.mixed;
}

void GradientLedger::use(int32_t parameter, const Source& source) {
  auto& uses = uses_[static_cast<size_t>(parameter)];
  for (const Source& known : uses)
    if (known.id == source.id) return;
  uses.push_back(source);
}

Contributions GradientLedger::total(const Demand& d) const {
  Contributions sum;
  const auto take = [&](const Contributions& part) {
    for (const Source& s : part.sources) sum.add(s);
    for (const auto& [parameter, elements] : part.normed) sum.normed[parameter] += elements;
    sum.mixed = sum.mixed || part.mixed;
  };
  take(d.sum);
  for_given(d, [&](const Given& g, const std::vector<Given>&) {
    if (g.parameter == d.parameter) take(g.sum);
  });
  return sum;
}

/// Calls f(what another role gave, all that was given there) for each sum over roles that the demanded one went through.
template <class F>
void GradientLedger::for_given(const Demand& d, F f) const {
  std::vector<std::pair<CrossRole, int>> open;  // sums over roles to look up, and the role that looks
  for (const CrossRole& key : d.sum.merged) open.emplace_back(key, d.role);
  while (!open.empty()) {
    const auto [key, from] = open.back();
    open.pop_back();
    const auto found = given_.find(key);
    if (found == given_.end()) continue;
    for (const Given& g : found->second) {
      if (g.role == from) continue;
      f(g, found->second);
      if (g.parameter != d.parameter) continue;
      for (const CrossRole& further : g.sum.merged) open.emplace_back(further, g.role);
    }
  }
}

const GradientLedger::Given* GradientLedger::stranger(const Demand& d) const {
  const Given* found = nullptr;
  for_given(d, [&](const Given& g, const std::vector<Given>& all) {
    const bool gave =
        std::ranges::any_of(all, [&](const Given& other) { return other.role == g.role && other.parameter == d.parameter; });
    if (g.parameter >= 0 && !gave) found = &g;
  });
  return found;
}

/// A squared norm counts whole parameters, each once: not an element twice, and none of a parameter that it counts left out.
void GradientLedger::settle_norm(const Demand& d) {
  const Contributions sum = total(d);
  for (size_t p = 0; p < plan_.parameters.size(); ++p) {
    const int64_t elements = logical_shape(plan_.parameters[p].type, plan_.mesh).elements();
    const auto found = sum.normed.find(static_cast<int32_t>(p));
    const int64_t counted = found == sum.normed.end() ? 0 : found->second;
    if (counted == elements || (counted == 0 && !d.complete)) continue;
    return report_.add(Rule::kGradients, d.role, d.op == nullptr ? "" : op_name(*d.segment, *d.op, *d.call),
                       fmt::format("the squared norm counts {} elements of the gradient of {}, which has {}", counted,
                                   plan_.parameters[p].name, elements));
  }
}

/// What is reported holds every micro-batch once, whichever stages ran them.
void GradientLedger::settle_metric(const Demand& d, const std::string& name) {
  for (const Source& s : total(d).sources) {
    if (is_complete(s)) continue;
    const bool twice = s.count >= plan_.micro_batches;
    return report_.add(Rule::kValues, d.role, "",
                       fmt::format("%{} holds {} of the step's {} micro-batches{}", name, s.count, plan_.micro_batches,
                                   twice ? ", some of them more than once" : ""));
  }
}

bool GradientLedger::is_load(const Contributions& sum, int layer) const {
  return sum.sources.size() == 1 && is_complete(sum.sources[0]) && sum.sources[0].layer == layer &&
         std::holds_alternative<ExpertLoad>(sum.sources[0].op->work);
}

void GradientLedger::settle(const Demand& d) {
  if (d.parameter < 0) return settle_norm(d);
  const std::string& name = plan_.parameters[static_cast<size_t>(d.parameter)].name;
  const Contributions sum = total(d);
  const auto fault = [&](std::string message) {
    report_.add(Rule::kGradients, d.role, op_name(*d.segment, *d.op, *d.call), std::move(message));
  };
  if (const Given* other = sum.mixed ? nullptr : stranger(d))
    return fault(fmt::format("the gradient of {} is added up with that of {} from stage {}", name,
                             plan_.parameters[static_cast<size_t>(other->parameter)].name, other->role));
  const auto& uses = uses_[static_cast<size_t>(d.parameter)];
  for (const Source& use : uses) {
    if (!d.complete) break;
    const auto given = std::ranges::find(sum.sources, use.id, &Source::id);
    if (given == sum.sources.end()) {
      if (d.before_tie && uses.size() > 1 && !sum.sources.empty()) continue;
      fault(fmt::format("the gradient of {} lacks the contribution of {}{}", name,
                        use.layer >= 0 ? fmt::format("layers.{} ", use.layer) : "", use.op->label));
      continue;
    }
    if (is_complete(*given)) continue;
    if (given->count < plan_.micro_batches)
      fault(fmt::format("the gradient of {} has {} of the step's {} micro-batches from {}", name, given->count, plan_.micro_batches,
                        use.op->label));
    else if (given->count > plan_.micro_batches)
      fault(fmt::format("the gradient of {} has {} contributions from {}, more than the step's {} micro-batches", name,
                        given->count, use.op->label, plan_.micro_batches));
    else
      fault(fmt::format("the gradient of {} has some micro-batch twice and lacks another, from {}", name, use.op->label));
  }
  if (sum.mixed) return;
  for (const Source& s : sum.sources)
    if (std::ranges::find(uses, s.id, &Source::id) == uses.end())
      fault(fmt::format("the gradient of {} contains {}{}, which is no use of it", name,
                        s.layer >= 0 ? fmt::format("layers.{} ", s.layer) : "", s.op->label));
}

void GradientLedger::settle() {
  for (const auto& [d, name] : metrics_) settle_metric(d, name);
  for (const auto& [d, layer, message] : loads_)
    if (!is_load(total(d), layer)) report_.add(Rule::kValues, d.role, op_name(*d.segment, *d.op, *d.call), message);
  for (const Demand& d : demands_) {
    if (report_.full()) return;
    settle(d);
  }
  if (!trains_) return;
  for (size_t p = 0; p < plan_.parameters.size(); ++p) {
    const Parameter& parameter = plan_.parameters[p];
    const int64_t elements = logical_shape(parameter.type, plan_.mesh).elements();
    for (const int role : parameter.stages) {
      const auto found = updated_.find({role, static_cast<int32_t>(p)});
      const int64_t done = found == updated_.end() ? 0 : found->second;
      const std::string steps = plan_.period > 1 ? fmt::format(", and it has {} steps", plan_.period) : "";
      if (done != elements * plan_.period)
        report_.add(Rule::kGradients, role, "",
                    fmt::format("{} of the {} elements of {} are updated in a period{}", done, elements, parameter.name, steps));
    }
  }
  for (const Lost& l : lost_) report_.add(Rule::kValues, l.role, l.op, l.message);
}

}  // namespace shardlab::verifying
