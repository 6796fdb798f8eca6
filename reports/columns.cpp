#include "reports/columns.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <vector>

#include "plan/base/check.h"
#include "plan/base/error_entries.h"
#include "plan/base/values.h"
#include "plan/keys.h"
#include "plan/kinds.h"
#include "plan/pipeline_case.h"
#include "plan/precision.h"
#include "plan/reason_code.h"
#include "plan/techniques.h"

namespace shardlab::reports {

namespace {

using Outcome = const CaseOutcome&;
constexpr Value kNotApplicable = std::monostate{};

Value text(std::string_view v) { return v.empty() ? kNotApplicable : Value(std::string(v)); }
Value number(int64_t v) { return Value(v); }

std::string_view does_not_fit_code() { return entry_of(ErrorKind::kDoesNotFit)->code; }
Value number(double v) { return Value(v); }
template <class T>
Value maybe(const std::optional<T>& v) {
  return v ? Value(*v) : kNotApplicable;
}

/// Gradients accumulate and travel in one type.
Value gradient_dtype(Outcome o) {
  const DType type = element_types(o.config).gradient;
  return text(type == DType::bf16 ? "bf16" : type == DType::f16 ? "fp16" : "fp32");
}

/// "int8 bits=8", "top-k k=0.01": the technique with the option that it has.
/// "weights, secondary 8, gradients": those that are on.
Value zero_plus_plus(Outcome o) {
  const ZeroPlusPlus& z = o.config.layout.zero_plus_plus;
  std::string parts;
  const auto add = [&](std::string part) { parts += (parts.empty() ? "" : ", ") + std::move(part); };
  if (z.weights) add("weights");
  if (z.secondary > 0) add("secondary " + std::to_string(z.secondary));
  if (z.gradients) add("gradients");
  return text(parts.empty() ? "none" : parts);
}

Value compression(Outcome o) {
  const Compression& c = o.config.layout.compression;
  const std::string kind{name_of(c.kind)};
  switch (c.kind) {
    case CompressionKind::kInt8: return text(fmt::format("{} bits={}", kind, c.bits));
    case CompressionKind::kTopK:
    case CompressionKind::kRandomK: return text(fmt::format("{} k={}", kind, c.k));
    case CompressionKind::kPowerSgd: return text(fmt::format("{} rank={}", kind, c.rank));
    case CompressionKind::kOneBitAdam: return text(fmt::format("{} warmup={}", kind, c.warmup));
    default: return text(kind);
  }
}

Value parameter_server(Outcome o) {
  const ParameterServer& p = o.config.layout.parameter_server;
  if (p.servers == 0) return text("none");
  return text(fmt::format("servers={} staleness={}", p.servers, p.staleness < 0 ? "sync" : fmt::to_string(p.staleness)));
}

/// "8 lr=0.7 momentum=0.9": inner steps of a period and the outer optimizer.
Value diloco(Outcome o) {
  const Diloco& d = o.config.layout.diloco;
  if (d.steps == 0) return text("none");
  return text(fmt::format("{} lr={} momentum={}", d.steps, d.learning_rate, d.momentum));
}

Value fsdp(Outcome o) {
  const Fsdp& f = o.config.layout.fsdp;
  if (o.config.layout.zero < 3) return text("none");
  return text(fmt::format("unit={} prefetch={} reshard={}", f.unit, f.prefetch, f.reshard));
}

/// Tokens of one step of the whole job at `step_s` seconds a step.
Value tokens_per_s(Outcome o, double step_s) {
  return step_s > 0 ? number(static_cast<double>(o.config.train.global_batch_tokens) / step_s) : kNotApplicable;
}

/// Seconds until the stated loss, at `step_s` a step.
Value seconds_to_loss(Outcome o, double step_s) {
  const auto steps = steps_to_loss(o);
  return steps && step_s > 0 ? number(static_cast<double>(*steps) * step_s) : kNotApplicable;
}

// A column whose value is a figure of the prediction or of the measurement is empty where there is none.
#define PREDICTED(expression) [](Outcome o) { return o.predicted ? number(o.predicted->expression) : kNotApplicable; }
// A prediction of memory alone has no times.
#define PREDICTED_TIME(expression) \
  [](Outcome o) { return o.predicted && o.predicted->step_s > 0 ? number(o.predicted->expression) : kNotApplicable; }
#define MEASURED(expression) [](Outcome o) { return o.measured ? number(o.measured->expression) : kNotApplicable; }

/// A column of a key of the case, called by its short form unless `name` calls it otherwise.
CaseColumn of_key(std::string_view path, Unit unit = Unit::kNone, std::string_view heading = "", std::string_view name = "") {
  const CaseKey* key = find_key(path);
  SHARDLAB_CHECK(key != nullptr, "no key is called `{}`", path);
  return {name.empty() ? key->word() : name,
          unit,
          heading,
          key->help,
          [key](Outcome o) { return value_of(*key, key->get(o.config)); },
          true,
          key};
}

/// Classes as tables name them: what is neither state nor activation counts as buffers, so that the six add up.
enum class Held : uint8_t { kParameters, kGradients, kMaster, kMoments, kActivations, kBuffers };
int64_t held(const MemoryByClass& memory, Held what) {
  const auto of = [&](BufferClass c) { return memory.bytes[static_cast<size_t>(c)]; };
  switch (what) {
    case Held::kParameters: return of(BufferClass::kParameter);
    case Held::kGradients: return of(BufferClass::kGradient);
    case Held::kMaster: return of(BufferClass::kMaster);
    case Held::kMoments: return of(BufferClass::kMoment);
    case Held::kActivations: return of(BufferClass::kActivation) + of(BufferClass::kInput);
    case Held::kBuffers: break;
  }
  int64_t rest = memory.total();
  for (const Held other : {Held::kParameters, Held::kGradients, Held::kMaster, Held::kMoments, Held::kActivations})
    rest -= held(memory, other);
  return rest;
}

#define OF_CLASS(space, words, member, name, cls)                                                              \
  CaseColumn{"predicted_" space "_" name "_bytes", Unit::kBytes, "", name " in " words " at its peak",         \
             [](Outcome o) { return o.predicted ? number(held(o.predicted->member, cls)) : kNotApplicable; }}, \
      CaseColumn {                                                                                             \
    "measured_" space "_" name "_bytes", Unit::kBytes, "", name " in " words " at its peak, as the ops ran",   \
        [](Outcome o) { return o.measured ? number(held(o.measured->member, cls)) : kNotApplicable; }          \
  }
#define OF_SPACE(space, words, member)                                                                                        \
  CaseColumn{"predicted_" space "_bytes", Unit::kBytes, "", "peak of " words,                                                 \
             [](Outcome o) { return o.predicted ? number(o.predicted->member.total()) : kNotApplicable; }},                   \
      CaseColumn{"measured_" space "_bytes", Unit::kBytes, "", "peak of " words ", as the ops ran",                           \
                 [](Outcome o) { return o.measured ? number(o.measured->member.total()) : kNotApplicable; }},                 \
      OF_CLASS(space, words, member, "parameters", Held::kParameters),                                                        \
      OF_CLASS(space, words, member, "gradients", Held::kGradients), OF_CLASS(space, words, member, "master", Held::kMaster), \
      OF_CLASS(space, words, member, "moments", Held::kMoments),                                                              \
      OF_CLASS(space, words, member, "activations", Held::kActivations), OF_CLASS(space, words, member, "buffers", Held::kBuffers)

const std::vector<CaseColumn> kColumns = {
    // What the case is and what became of it.
    CaseColumn{"case_id", Unit::kNone, "case", "hash of the resolved case", [](Outcome o) { return text(o.case_id); }},
    of_key("name"),
    CaseColumn{"status", Unit::kNone, "", "ok, refused, oom, timeout or failed", [](Outcome o) { return text(name_of(o.status)); }},
    CaseColumn{"reason", Unit::kNone, "", "why it is not ok", [](Outcome o) { return text(o.reason); }},
    of_key("model.name", Unit::kNone, "", "model"),
    CaseColumn{"parameters", Unit::kCount, "", "parameters of the whole model", [](Outcome o) { return number(o.parameters); }},
    of_key("machine.id", Unit::kNone, "", "machine"),
    of_key("backend"),
    of_key("transport"),
    CaseColumn{"world_size", Unit::kNone, "ranks", "dp tp pp cp",
               [](Outcome o) { return number(int64_t{o.config.layout.world_size()}); }, true},
    // The layout.
    of_key("dp"),
    of_key("tp"),
    of_key("pp"),
    of_key("vpp"),
    of_key("cp"),
    of_key("ep"),
    of_key("zero"),
    CaseColumn{"schedule", Unit::kNone, "", "order of the pipeline's micro-batches",
               [](Outcome o) { return text(schedule_words(o.config)); }, true},
    of_key("sequence_parallel"),
    CaseColumn{"recompute", Unit::kNone, "", "what backward computes again",
               [](Outcome o) {
                 const Layout& l = o.config.layout;
                 return text(l.recompute == Recompute::kByLayer ? l.recompute_options.layers : name_of(l.recompute));
               },
               true},
    CaseColumn{"offload", Unit::kNone, "", "what lives outside device memory",
               [](Outcome o) { return text(offload_text(o.config.layout.offload)); }, true},
    of_key("precision"),
    // The batch.
    of_key("micro_batch"),
    of_key("grad_accumulation"),
    of_key("seq_len"),
    of_key("global_batch_tokens"),
    // Predicted beside measured.
    CaseColumn{"predicted_step_s", Unit::kSeconds, "predicted step", "one optimizer step", PREDICTED_TIME(step_s)},
    CaseColumn{"measured_step_s", Unit::kSeconds, "measured step", "one optimizer step, median over all samples", MEASURED(step_s)},
    CaseColumn{"step_error_pct", Unit::kPercent, "error",
               "(predicted - measured) / measured: positive where the prediction was too slow",
               [](Outcome o) { return maybe(step_error_pct(o)); }},
    CaseColumn{
        "predicted_tokens_per_s", Unit::kTokensPerSecond, "predicted rate", "of the whole job",
        [](Outcome o) { return o.predicted && o.predicted->step_s > 0 ? tokens_per_s(o, o.predicted->step_s) : kNotApplicable; }},
    CaseColumn{"measured_tokens_per_s", Unit::kTokensPerSecond, "measured rate", "of the whole job",
               [](Outcome o) { return o.measured ? tokens_per_s(o, o.measured->step_s) : kNotApplicable; }},
    CaseColumn{"predicted_mfu", Unit::kFraction, "predicted MFU",
               "model flops (no recompute) against the dense peak of the precision",
               [](Outcome o) { return o.predicted ? maybe(mfu(o, o.predicted->step_s)) : kNotApplicable; }},
    CaseColumn{"measured_mfu", Unit::kFraction, "measured MFU",
               "model flops (no recompute) against the dense peak of the precision",
               [](Outcome o) { return o.measured ? maybe(mfu(o, o.measured->step_s)) : kNotApplicable; }},
    CaseColumn{"predicted_peak_bytes", Unit::kBytes, "predicted peak", "largest sum of live bytes over ranks",
               PREDICTED(peak_bytes)},
    CaseColumn{"measured_peak_bytes", Unit::kBytes, "measured peak", "largest sum of live bytes over ranks, as the ops ran",
               MEASURED(peak_bytes)},
    CaseColumn{"predicted_wire_bytes", Unit::kBytes, "predicted wire",
               "payload sent in one step, summed over ranks; of a step that is made again (rolled_back_steps, expert_reruns) once",
               PREDICTED(wire_bytes)},
    CaseColumn{"measured_wire_bytes", Unit::kBytes, "measured wire",
               "payload sent in one step, summed over ranks, counted where it was sent; what a step that is made again "
               "(rolled_back_steps, expert_reruns) sends then is in no column",
               [](Outcome o) { return o.measured ? maybe(o.measured->wire_bytes) : kNotApplicable; }},
    CaseColumn{"predicted_compute_s", Unit::kSeconds, "predicted compute", "union of compute ops on the slowest rank",
               PREDICTED_TIME(compute_s)},
    CaseColumn{"measured_compute_s", Unit::kSeconds, "measured compute", "union of compute ops on the slowest rank",
               MEASURED(compute_s)},
    CaseColumn{"predicted_exposed_comm_s", Unit::kSeconds, "predicted exposed", "communication not covered by compute",
               PREDICTED_TIME(exposed_comm_s)},
    CaseColumn{"measured_exposed_comm_s", Unit::kSeconds, "measured exposed", "communication not covered by compute",
               MEASURED(exposed_comm_s)},
    CaseColumn{"predicted_bubble_fraction", Unit::kFraction, "predicted bubble",
               "share of the step that waits for a pipeline input", PREDICTED_TIME(bubble_fraction)},
    CaseColumn{"measured_bubble_fraction", Unit::kFraction, "measured bubble", "share of the step that waits for a pipeline input",
               MEASURED(bubble_fraction)},
    CaseColumn{"unplanned_time_s", Unit::kSeconds, "unplanned", "step less the union of its ops and waits",
               MEASURED(unplanned_time_s)},
    CaseColumn{"unplanned_memory_bytes", Unit::kBytes, "unplanned memory", "growth of the process beyond its arenas",
               MEASURED(unplanned_memory_bytes)},
    CaseColumn{
        "loss_first", Unit::kNats, "first loss", "mean loss of the first step",
        [](Outcome o) { return o.measured && !o.measured->losses.empty() ? number(o.measured->losses.front()) : kNotApplicable; }},
    CaseColumn{
        "loss_last", Unit::kNats, "last loss", "mean loss of the last step",
        [](Outcome o) { return o.measured && !o.measured->losses.empty() ? number(o.measured->losses.back()) : kNotApplicable; }},
    CaseColumn{"energy_j", Unit::kJoules, "energy", "of one step",
               [](Outcome o) { return o.measured ? maybe(o.measured->energy_j) : kNotApplicable; }},
    // How sure, and under which further keys.
    CaseColumn{"step_spread", Unit::kFraction, "spread", "(p90 - p10) / median of the measured steps", MEASURED(step_spread)},
    CaseColumn{"repeats", Unit::kNone, "", "runs of the case",
               [](Outcome o) { return o.measured ? number(int64_t{o.measured->repeats}) : kNotApplicable; }},
    CaseColumn{"samples", Unit::kNone, "", "measured steps of all repeats",
               [](Outcome o) { return o.measured ? number(int64_t{o.measured->samples}) : kNotApplicable; }},
    CaseColumn{"val_loss", Unit::kNats, "validation loss", "on text that was not trained on",
               [](Outcome o) { return o.measured ? maybe(o.measured->val_loss) : kNotApplicable; }},
    CaseColumn{"loss_unigram", Unit::kNats, "unigram loss", "entropy of the unigram model on the same text",
               [](Outcome o) { return o.measured ? maybe(o.measured->loss_unigram) : kNotApplicable; }},
    CaseColumn{"target_loss", Unit::kNats, "", "training loss whose time is asked for",
               [](Outcome o) { return o.loss_target.loss > 0 ? number(o.loss_target.loss) : kNotApplicable; }},
    CaseColumn{"steps_to_loss", Unit::kNone, "", "steps until the mean loss of the last few was at or below target_loss",
               [](Outcome o) { return maybe(steps_to_loss(o)); }},
    CaseColumn{"tokens_to_loss", Unit::kCount, "tokens to loss", "tokens of those steps",
               [](Outcome o) {
                 const auto steps = steps_to_loss(o);
                 return steps ? number(*steps * o.config.train.global_batch_tokens) : kNotApplicable;
               }},
    CaseColumn{"predicted_s_to_loss", Unit::kSeconds, "predicted time to loss",
               "those steps, which were measured, at the predicted step",
               [](Outcome o) { return o.predicted ? seconds_to_loss(o, o.predicted->step_s) : kNotApplicable; }},
    CaseColumn{"measured_s_to_loss", Unit::kSeconds, "time to loss", "those steps at the measured step",
               [](Outcome o) { return o.measured ? seconds_to_loss(o, o.measured->step_s) : kNotApplicable; }},
    CaseColumn{"skipped_steps", Unit::kNone, "skipped", "steps whose update was left out, warm-up included",
               MEASURED(skipped_steps)},
    CaseColumn{"rolled_back_steps", Unit::kNone, "taken back",
               "steps that were taken back and made again in step, warm-up included", MEASURED(rolled_back_steps)},
    CaseColumn{
        "expert_reruns", Unit::kNone, "",
        "steps that ran again since a rank had room for fewer rows of experts (expert_bound), warm-up included; their seconds are "
        "those of both runs",
        [](Outcome o) { return o.measured && bounds_experts(o.config) ? number(o.measured->expert_reruns) : kNotApplicable; }},
    CaseColumn{"staleness_mean", Unit::kNone, "", "updates made since a worker was given the values it used",
               [](Outcome o) { return o.measured ? maybe(o.measured->staleness_mean) : kNotApplicable; }},
    CaseColumn{"staleness_worst", Unit::kNone, "", "the most updates made since",
               [](Outcome o) { return o.measured ? maybe(o.measured->staleness_worst) : kNotApplicable; }},
    CaseColumn{"expert_imbalance", Unit::kNone, "",
               "rows of the fullest expert of a layer over the mean; mean over layers and measured steps",
               [](Outcome o) { return o.measured ? maybe(o.measured->expert_imbalance) : kNotApplicable; }},
    CaseColumn{"expert_imbalance_last", Unit::kNone, "", "the same, of the last step",
               [](Outcome o) { return o.measured ? maybe(o.measured->expert_imbalance_last) : kNotApplicable; }},
    CaseColumn{"expert_rank_imbalance", Unit::kNone, "",
               "rows of the fullest rank over the mean of the ranks that share experts; mean over layers and measured steps",
               [](Outcome o) { return o.measured ? maybe(o.measured->expert_rank_imbalance) : kNotApplicable; }},
    CaseColumn{"expert_rank_imbalance_last", Unit::kNone, "", "the same, of the last step",
               [](Outcome o) { return o.measured ? maybe(o.measured->expert_rank_imbalance_last) : kNotApplicable; }},
    CaseColumn{"expert_rank_imbalance_contiguous", Unit::kNone, "",
               "expert_rank_imbalance of the same rows if experts were contiguous, where expert_placement has them otherwise",
               [](Outcome o) { return o.measured ? maybe(o.measured->expert_rank_imbalance_contiguous) : kNotApplicable; }},
    CaseColumn{
        "expert_rank_imbalance_peak", Unit::kNone, "",
        "rows of the fullest rank in one layer and micro-batch over an even share; the largest of the measured steps. Of steps "
        "that "
        "ran again in canonical mode, where ep is not all data ranks, as far as the first run tells: up to the first layer without "
        "room",
        [](Outcome o) { return o.measured ? maybe(o.measured->expert_rank_imbalance_peak) : kNotApplicable; }},
    CaseColumn{"predicted_expert_imbalance", Unit::kNone, "",
               "rows of the fullest expert of a layer over the mean, by data.routing or data.routes; mean over layers",
               [](Outcome o) { return o.predicted ? maybe(o.predicted->expert_imbalance) : kNotApplicable; }},
    CaseColumn{"predicted_expert_rank_imbalance", Unit::kNone, "", "the same, of the fullest rank of those that share experts",
               [](Outcome o) { return o.predicted ? maybe(o.predicted->expert_rank_imbalance) : kNotApplicable; }},
    CaseColumn{"predicted_expert_rank_imbalance_contiguous", Unit::kNone, "",
               "the same, if experts were contiguous, where expert_placement has them otherwise",
               [](Outcome o) { return o.predicted ? maybe(o.predicted->expert_rank_imbalance_contiguous) : kNotApplicable; }},
    CaseColumn{
        "predicted_expert_rank_imbalance_peak", Unit::kNone, "",
        "the most rows that are drawn for a rank in one layer and micro-batch over an even share, by data.routing or data.routes",
        [](Outcome o) { return o.predicted ? maybe(o.predicted->expert_rank_imbalance_peak) : kNotApplicable; }},
    CaseColumn{"predicted_expert_reruns", Unit::kFraction, "",
               "share of the steps that run again: 1 where the rows that are drawn exceed expert_bound, and a step takes both runs",
               [](Outcome o) { return o.predicted ? maybe(o.predicted->expert_reruns) : kNotApplicable; }},
    CaseColumn{"predicted_expert_exchange_bytes", Unit::kBytes, "",
               "rows that ranks which share experts send each other in a step, over all ranks",
               [](Outcome o) { return o.predicted ? maybe(o.predicted->expert_exchange_bytes) : kNotApplicable; }},
    CaseColumn{"expert_dropped", Unit::kNone, "",
               "rows that experts of a capacity had no room for, over the rows that tokens chose; of the measured steps",
               [](Outcome o) { return o.measured ? maybe(o.measured->expert_dropped) : kNotApplicable; }},
    CaseColumn{"expert_dropped_last", Unit::kNone, "", "the same, of the last step",
               [](Outcome o) { return o.measured ? maybe(o.measured->expert_dropped_last) : kNotApplicable; }},
    CaseColumn{"loss_scale", Unit::kNone, "", "after the last step",
               [](Outcome o) { return o.measured ? maybe(o.measured->loss_scale) : kNotApplicable; }},
    CaseColumn{"seed", Unit::kNone, "", "of every random number",
               [](Outcome o) { return text(fmt::format("{}", o.config.train.seed)); }, true},
    CaseColumn{"program_version", Unit::kNone, "", "of shardlab", [](Outcome o) { return text(o.program_version); }},
    CaseColumn{"calibration_id", Unit::kNone, "", "measurements of the machine that the prediction used",
               [](Outcome o) { return o.predicted ? text(o.predicted->calibration_id) : kNotApplicable; }},
    CaseColumn{"extrapolated", Unit::kNone, "", "whether some op lies outside what the calibration measured",
               [](Outcome o) { return o.predicted ? Value(o.predicted->extrapolated) : kNotApplicable; }},
    CaseColumn{"kernel_variant", Unit::kNone, "", "kernels chosen for the processor",
               [](Outcome o) { return o.measured ? text(o.measured->kernel_variant) : kNotApplicable; }},
    of_key("profile"),
    of_key("optimizer"),
    of_key("learning_rate"),
    of_key("dropout"),
    of_key("bucket_bytes", Unit::kBytes, "bucket"),
    of_key("overlap"),
    of_key("delayed_update"),
    of_key("collective_algorithm"),
    of_key("canonical"),
    of_key("threads_per_rank"),
    CaseColumn{"fsdp", Unit::kNone, "", "of zero 3: layers a unit, units fetched ahead, whether backward gathers again", fsdp,
               true},
    CaseColumn{
        "hybrid_shard", Unit::kNone, "", "size of the shard group",
        [](Outcome o) { return o.config.layout.hybrid_shard > 0 ? number(int64_t{o.config.layout.hybrid_shard}) : text("none"); },
        true},
    CaseColumn{"zero_plus_plus", Unit::kNone, "", "quantised ZeRO-3", zero_plus_plus, true},
    CaseColumn{"parameter_server", Unit::kNone, "", "servers and staleness", parameter_server, true},
    CaseColumn{"compression", Unit::kNone, "", "of gradients", compression, true},
    CaseColumn{"diloco", Unit::kNone, "", "local steps and outer optimizer", diloco, true},
    of_key("cp_kind"),
    CaseColumn{"reduce_dtype", Unit::kNone, "", "element type of gradient reductions", gradient_dtype, true},
    CaseColumn{"accumulate_dtype", Unit::kNone, "", "element type of accumulated gradients", gradient_dtype, true},
    CaseColumn{"clip_norm", Unit::kNone, "", "bound on the gradient norm",
               [](Outcome o) { return o.config.train.clip_norm > 0 ? number(double{o.config.train.clip_norm}) : text("none"); },
               true},
    of_key("train.post_validation"),
    CaseColumn{"predicted_arena_bytes", Unit::kBytes, "predicted arena", "what packing makes of the peak", PREDICTED(arena_bytes)},
    CaseColumn{"measured_arena_bytes", Unit::kBytes, "measured arena", "storage that the executor took for its buffers",
               MEASURED(arena_bytes)},
    CaseColumn{"resident_bytes", Unit::kBytes, "resident", "physical memory of the whole process", MEASURED(resident_bytes)},
    CaseColumn{"recorder_overhead_s", Unit::kSeconds, "recorder", "cost of recording one event", MEASURED(recorder_overhead_s)},
    of_key("attention"),
    of_key("tf32", Unit::kNone, "", "tensor_float"),
    CaseColumn{"recompute_budget_bytes", Unit::kBytes, "recompute budget", "within which recompute was chosen layer by layer",
               [](Outcome o) {
                 const int64_t budget = o.config.layout.recompute_options.budget_bytes;
                 return budget > 0 ? number(budget) : kNotApplicable;
               },
               true},
    CaseColumn{"predicted_exposed_copy_s", Unit::kSeconds, "predicted exposed copies",
               "copies between memory spaces, covered by neither compute nor communication", PREDICTED_TIME(exposed_copy_s)},
    CaseColumn{"measured_exposed_copy_s", Unit::kSeconds, "measured exposed copies",
               "copies between memory spaces, covered by neither compute nor communication", MEASURED(exposed_copy_s)},
    of_key("cp_ulysses"),
    of_key("loss_chunks"),
    of_key("model.vocab_multiple", Unit::kNone, "", "vocab_multiple"),
    of_key("tensor_overlap"),
    of_key("expert_overlap"),
    of_key("expert_bound"),
    of_key("expert_tp"),
    CaseColumn{"code", Unit::kNone, "", "of the reason, where it has one: `shardlab explain CODE` says more",
               [](Outcome o) { return text(o.status == Status::kOom ? does_not_fit_code() : code_in(o.reason)); }},
    CaseColumn{"predicted_by", Unit::kNone, "predicted by",
               "timeline (every instruction), segments (the same figures, by stretches) or analytic (an estimate without a plan)",
               [](Outcome o) { return text(predicted_by(o)); }},
    // By memory space and class, each space at its own peak, of the rank with the highest.
    OF_SPACE("device", "device memory", memory),
    OF_SPACE("host", "host memory", host_memory),
    OF_SPACE("nvme", "NVMe", nvme_memory),
};

#undef OF_SPACE
#undef OF_CLASS
#undef PREDICTED
#undef MEASURED

constexpr std::array<std::string_view, 11> kSummary{"name",
                                                    "status",
                                                    "world_size",
                                                    "predicted_step_s",
                                                    "measured_step_s",
                                                    "step_error_pct",
                                                    "measured_tokens_per_s",
                                                    "predicted_peak_bytes",
                                                    "measured_peak_bytes",
                                                    "loss_last",
                                                    "reason"};

}  // namespace

Value value_of(const CaseKey& key, const std::string& written) {
  switch (key.form) {
    case Form::kInteger:
    case Form::kCount: return number(parse_count(written).value());
    case Form::kNumber: return number(parse_number(written).value());
    case Form::kBool: return Value(parse_bool(written).value());
    default: return text(written);
  }
}

std::span<const CaseColumn> case_columns() { return kColumns; }

const CaseColumn* find_column(std::string_view name) {
  const auto found = std::find_if(kColumns.begin(), kColumns.end(), [&](const CaseColumn& c) { return c.name == name; });
  return found == kColumns.end() ? nullptr : &*found;
}

std::span<const std::string_view> summary_columns() { return kSummary; }

Table case_table(std::span<const CaseOutcome> cases, std::span<const std::string_view> names) {
  std::vector<const CaseColumn*> columns;
  if (names.empty())
    for (const CaseColumn& c : kColumns) columns.push_back(&c);
  for (const std::string_view name : names) {
    columns.push_back(find_column(name));
    SHARDLAB_CHECK(columns.back() != nullptr, "no result column is called `{}`", name);
  }
  Table table;
  for (const CaseColumn* c : columns)
    table.columns.push_back({std::string(c->name), c->unit, std::string(c->heading), c->name == "name", c->name == "reason"});
  for (const CaseOutcome& o : cases) {
    auto& row = table.rows.emplace_back();
    for (const CaseColumn* c : columns) row.push_back(c->get(o));
  }
  return table;
}

std::string_view predicted_by(const CaseOutcome& outcome) {
  if (!outcome.predicted || outcome.program_version.empty()) return {};
  for (const std::string_view coarse : {"analytic", "segments"})
    if (outcome.program_version.ends_with(fmt::format(" {}", coarse))) return coarse;
  return "timeline";
}

bool mixes_predictions(std::span<const CaseOutcome> cases) {
  std::string_view first;
  for (const CaseOutcome& o : cases) {
    const std::string_view by = predicted_by(o);
    if (first.empty()) first = by;
    if (!by.empty() && by != first) return true;
  }
  return false;
}

std::string schedule_words(const Case& config) {
  const std::string first = config.layout.schedule_table.substr(0, config.layout.schedule_table.find('\n'));
  const bool is_file = config.layout.schedule == Schedule::kTable && first.ends_with(".csv");
  return is_file ? first : std::string(name_of(config.layout.schedule));
}

std::string layout_text(const Case& config) {
  const Layout& l = config.layout;
  std::string out;
  const auto add = [&](std::string_view part) { out += (out.empty() ? "" : " ") + std::string(part); };
  for (const auto& [key, size] : {std::pair{"dp", l.dp}, {"tp", l.tp}, {"pp", l.pp}, {"vpp", l.vpp}, {"cp", l.cp}, {"ep", l.ep}})
    if (size > 1) add(fmt::format("{}{}", key, size));
  if (l.folds_experts()) add(fmt::format("expert-tp{}", l.expert_tp));
  if (out.empty()) out = "1 rank";
  if (l.zero > 0) add(fmt::format("zero{}", l.zero));
  if (l.schedule != Schedule::kNone) add(schedule_words(config));
  if (l.sequence_parallel) add("sequence-parallel");
  if (l.tensor_overlap) add("tensor-overlap");
  if (!l.expert_placement.empty())
    add(l.expert_placement == kBalanced || l.expert_placement == kMeasured ? "experts-" + l.expert_placement : "experts-placed");
  if (l.expert_overlap != ExpertOverlap::kNone) add(fmt::format("expert-overlap-{}", name_of(l.expert_overlap)));
  if (l.expert_bound > 0) add(fmt::format("expert-bound-{}", l.expert_bound));
  if (l.recompute != Recompute::kNone) add(fmt::format("recompute-{}", name_of(l.recompute)));
  // This machine's cores train in fp32 unless a case says otherwise.
  if (config.train.precision != Precision::kFp32 || !config.machine.local) add(name_of(config.train.precision));
  return out;
}

std::string rerun_text(const Case& config, const Measurement& m) {
  const double bound = config.layout.expert_bound, peak = m.expert_rank_imbalance_peak.value_or(0),
               enough = std::ceil(10 * peak) / 10;
  std::string text = fmt::format("{} of {} steps ran again, one sequence at a time", m.expert_reruns, m.losses.size());
  if (peak <= bound) return text + fmt::format(": in the measured ones expert_bound={:g} had room for every row", bound);
  const bool knows = second_run_keeps_micro_batches(config);
  text += is_bound_tight(config, m) ? fmt::format(": expert_bound={:g} is too tight. A rank had up to ", bound) : ": a rank had ";
  text += fmt::format("{:.2f} times its even share of rows{}", peak, knows ? "" : ", or more");
  if (!is_bound_tight(config, m)) text += fmt::format(", and expert_bound is {:g}", bound);
  if (enough >= config.layout.ep) return text + "; expert_bound: 0 holds every row";
  text += knows ? "; expert_bound: " : "; try ";
  return text + fmt::format("{:g}{}", enough, knows ? " would have held every row of the measured steps" : "");
}

bool is_bound_tight(const Case& config, const Measurement& m) {
  return m.expert_rank_imbalance_peak.value_or(0) > static_cast<double>(config.layout.expert_bound) &&
         10 * m.expert_reruns > std::ssize(m.losses);
}

std::string case_title(const Case& config) {
  const std::string layout = layout_text(config);
  const auto spaced = [](std::string text) {
    std::replace(text.begin(), text.end(), '-', ' ');
    return text;
  };
  if (config.name.empty()) return layout;
  return spaced(config.name) == spaced(layout) ? config.name : fmt::format("{} ({})", config.name, layout);
}

std::optional<double> peak_flops(const Case& config) {
  const Machine& m = config.machine;
  if (m.is_mixed()) {  // each rank has the peak of its own kind
    double sum = 0;
    for (int rank = 0; rank < config.layout.world_size(); ++rank) {
      const Device& device = m.kinds[static_cast<size_t>(kinds_of_ranks(m, rank, rank).first)].device;
      const auto own = device.peak_flops.find(std::string(name_of(config.train.precision)));
      if (own == device.peak_flops.end() || own->second <= 0) return std::nullopt;
      sum += own->second;
    }
    return sum;
  }
  const auto peak = m.device.peak_flops.find(std::string(name_of(config.train.precision)));
  if (peak == m.device.peak_flops.end() || peak->second <= 0) return std::nullopt;
  int devices = config.layout.world_size();
  if (m.local) {
    devices *= std::max(1, config.threads_per_rank);
    if (m.cores > 0) devices = std::min(devices, m.cores);
  }
  return peak->second * devices;
}

std::optional<double> mfu(const CaseOutcome& o, double step_s) {
  const Case& config = o.config;
  if (o.predicted && o.predicted->model_flops) {
    const std::optional<double> peak = peak_flops(config);
    return peak && step_s > 0 ? std::optional(*o.predicted->model_flops / step_s / *peak) : std::nullopt;
  }
  // Of a model that no case can hold (a mixture of experts) the case has the body alone.
  if (config.profile != "shardlab" && o.parameters > 0 && o.parameters != parameter_count(config.model)) return std::nullopt;
  const std::optional<double> peak = peak_flops(config);
  if (!peak || step_s <= 0) return std::nullopt;
  const double tokens_per_s = static_cast<double>(config.train.global_batch_tokens) / step_s;
  const std::optional<double> flops = model_flops_per_token(config);
  return flops ? std::optional(*flops * tokens_per_s / *peak) : std::nullopt;
}

std::optional<int64_t> steps_to_loss(const CaseOutcome& o) {
  const double target = o.loss_target.loss;
  if (target <= 0 || !o.measured) return std::nullopt;
  const std::vector<double>& losses = o.measured->losses;
  const auto window = static_cast<size_t>(std::max<int64_t>(1, o.loss_target.mean_of));
  for (size_t end = window; end <= losses.size(); ++end) {
    double sum = 0;
    for (size_t i = end - window; i < end; ++i) sum += losses[i];
    if (sum / static_cast<double>(window) <= target) return static_cast<int64_t>(end);
  }
  return std::nullopt;
}

std::optional<double> step_error_pct(const CaseOutcome& o) {
  if (!o.predicted || !o.measured || o.measured->step_s <= 0 || o.predicted->step_s <= 0) return std::nullopt;
  return 100 * (o.predicted->step_s - o.measured->step_s) / o.measured->step_s;
}

}  // namespace shardlab::reports
