#include "tests/agreement/compare.h"

#include <fmt/format.h>

#include <cmath>
#include <stdexcept>

#include "plan/memory.h"
#include "plan/program.h"
#include "plan/wire.h"
#include "simulator/estimator/analytic/analytic.h"
#include "simulator/interpreter/case_plan.h"
#include "simulator/interpreter/cost_model.h"
#include "simulator/interpreter/timeline.h"
#include "strategies/lower.h"
#include "tests/namespaces.h"

namespace shardlab::testing {
namespace {

template <class T>
T must(Result<T> r) {
  if (!r.ok()) throw std::runtime_error(to_string(r.error()));
  return std::move(r).value();
}

}  // namespace

Compared compare(const Case& c, bool verified) {
  Compared out;
  const Plan plan = must(lower(c, {.after = {}, .verify = verified}));
  std::vector<Program> programs;
  for (size_t role = 0; role < plan.roles.size(); ++role) programs.push_back(expand_program(plan, static_cast<int>(role)));
  const auto costs = must(cost_model_for(c.machine, c.train.precision));
  const Trace trace = simulate(plan, programs, c.machine, *costs, {.max_individual_ranks = 1});
  out.timeline_s = step_seconds(trace) / plan.period;
  for (size_t role = 0; role < plan.roles.size(); ++role)
    out.timeline_peak =
        std::max(out.timeline_peak, memory_peak(plan, static_cast<int>(role))[static_cast<size_t>(Space::kDevice)].peak_bytes);
  for (const auto& [comm, bytes] : total_wire_bytes(plan)) out.timeline_wire += bytes;

  const CasePlan folded = must(CasePlan::of(c, [](const Case& few) { return lower(few, {.after = {}, .verify = false}); }));
  const Prediction predicted = folded.predict(c, *costs);
  out.analytic_s = predicted.step_s;
  out.analytic_peak = predicted.peak_bytes;
  for (const auto& [comm, bytes] : folded.wire()) out.analytic_wire += bytes;

  const auto point = analytic::point_of(c);
  if (!point.ok() || c.layout.cp > 1) return out;  // of which the estimate knows no plan of ours
  analytic::Estimator estimator(must(analytic::prepare(c)));
  const analytic::Estimate e = estimator(*point);
  if (!e.legal() || estimator.executed(*point) == nullptr)
    throw std::runtime_error("the estimate refuses it: " + std::string(name_of(e.refusal)));
  out.estimated_s = e.step_s;
  out.estimated_peak = e.memory.live();
  return out;
}

std::string line_of_case(const Case& c) {
  const Model& m = c.model;
  const Layout& l = c.layout;
  const Train& t = c.train;
  std::string s = fmt::format("{}{} L{} h{} a{}/{} d{} f{} V{} s{} | dp{} tp{} pp{} {} zero{} {} | m{} b{} {}", name_of(m.family),
                              m.tied_embeddings ? " tied" : "", m.layers, m.hidden, m.heads, m.kv_heads, m.head_dim, m.ffn, m.vocab,
                              t.seq_len, l.dp, l.tp, l.pp, name_of(l.schedule), l.zero, c.machine.device.id, t.grad_accumulation,
                              t.micro_batch, name_of(t.precision));
  const auto add = [&](bool there, std::string word) {
    if (there) s += " " + std::move(word);
  };
  add(l.zero == 3, fmt::format("fsdp {}/{}{}", l.fsdp.unit, l.fsdp.prefetch, l.fsdp.reshard ? "" : " kept"));
  add(l.hybrid_shard > 0, fmt::format("hybrid{}", l.hybrid_shard));
  add(l.sequence_parallel, "sequence-parallel");
  add(l.tensor_overlap, "in-strips");
  add(l.cp > 1, fmt::format("cp{} {}", l.cp, name_of(l.cp_kind)));
  add(l.loss_chunks > 1, fmt::format("loss-chunks{}", l.loss_chunks));
  add(!l.overlap, "no-overlap");
  add(l.bucket_bytes > 0, fmt::format("bucket{}", l.bucket_bytes >> 20));
  add(l.recompute != Recompute::kNone,
      fmt::format("recompute={}({}{})", name_of(l.recompute), l.recompute_options.modules, l.recompute_options.layers));
  add(l.recompute_options.every > 1, fmt::format("every{}", l.recompute_options.every));
  add(c.canonical, "canonical");
  add(l.collective_algorithm != AlgorithmChoice::kAuto, std::string(name_of(l.collective_algorithm)));
  add(t.precision == Precision::kFp8, std::string(name_of(t.fp8_scaling)));
  add(!t.reduce_dtype.empty(), "reduce=" + t.reduce_dtype);
  add(t.optimizer != Optimizer::kAdamW, std::string(name_of(t.optimizer)));
  add(t.dropout > 0, "dropout");
  add(t.clip_norm > 0, "clip");
  add(t.grad_norm, "norm");
  add(t.guard.any(), "guard");
  add(t.guard.spike != GuardAction::kNone, fmt::format("spike({}/{})", t.guard.loss_factor, t.guard.norm_factor));
  add(t.weight_decay > 0, "decay");
  add(t.loss_scale > 0, "fixed-scale");
  add(l.offload.any(), "offload " + offload_text(l.offload));
  add(l.compression.kind != CompressionKind::kNone, fmt::format("{} {}", name_of(l.compression.kind), l.compression.bits));
  add(l.offload.delayed_update, "delayed-update");
  return s;
}

}  // namespace shardlab::testing
