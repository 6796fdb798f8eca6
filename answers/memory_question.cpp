#include "answers/memory_question.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <functional>
#include <map>
#include <memory>

#include "answers/model_shape.h"
#include "answers/namespaces.h"
#include "answers/planned.h"
#include "answers/search_space.h"
#include "answers/words.h"
#include "plan/automatic.h"
#include "plan/base/values.h"
#include "plan/device_words.h"
#include "plan/kinds.h"
#include "plan/memory.h"
#include "plan/pipeline_case.h"
#include "plan/reasons.h"
#include "plan/routing.h"
#include "plan/runnable.h"
#include "plan/treatment.h"
#include "simulator/estimator/analytic/known.h"
#include "simulator/interpreter/case_plan.h"
#include "sweeps/machines.h"

namespace shardlab::answers {
namespace {

using analytic::FrameworkProfile;
using whatif::ItemGroup;
using whatif::StageAnswer;

bool is_of(const std::string& profile, std::string_view framework) {
  return profile == framework || profile.starts_with(std::string(framework) + "-");
}

// ---- a framework's run ---------------------------------------------------------------------------------------------------------

/// Compression is in points, and in the time of a step, but no profile has its buffers. What points do not have `point_of` refuses.
Result<void> check_told(const Case& c) {
  if (c.layout.compression.kind == CompressionKind::kNone) return {};
  return refusal(fmt::format("compression={} is not estimated by the profile {}", name_of(c.layout.compression.kind), c.profile),
                 "leave it out");
}

analytic::Medium medium_of(OffloadTo to) {
  return to == OffloadTo::kCpu    ? analytic::Medium::kCpu
         : to == OffloadTo::kNvme ? analytic::Medium::kNvme
                                  : analytic::Medium::kDevice;
}

/// What the framework does where no flag says otherwise.
void apply_defaults(const CaseFlags& flags, const Case& c, analytic::Point& p, std::vector<std::string>& notes) {
  const auto assume = [&](std::string what) { notes.push_back(what + ", as the profile's framework does by default"); };
  if (!given(flags, "precision")) p.precision = Precision::kBf16, assume("precision bf16");
  const bool fsdp = is_of(c.profile, "torchtitan") || is_of(c.profile, "llm-foundry");
  if (!given(flags, "zero") && fsdp && p.dp > 1) p.zero = 3, assume("zero 3");
  if (!given(flags, "zero") && !fsdp && p.dp > 1)
    notes.push_back(fmt::format("zero 0: every rank keeps the whole optimizer state; --zero 1 shards it over dp{}",
                                is_of(c.profile, "megatron") ? ", as Megatron-LM's distributed optimizer does" : ""));
  if (!given(flags, "sequence_parallel") && is_of(c.profile, "torchtitan") && p.tp > 1)
    p.sequence_parallel = true, assume("sequence parallelism");
  if (!given(flags, "schedule") && p.pp > 1 && p.vpp > 1)
    p.schedule = analytic::Schedule::kInterleaved, assume("interleaved stages");
  if (c.layout.overlap) p.overlap = -1;  // the sweep file's default: as the framework has it
  if (c.layout.fsdp.reshard) p.reshard = -1;
}

Result<FrameworkProfile> profile_for(const Case& c) {
  auto found = profile_meant(c.profile);
  if (!found.ok()) return found.error();
  FrameworkProfile p = std::move(*found);
  const auto bytes = [](const std::string& dtype) { return dtype == "bf16" || dtype == "fp16" ? 2.0 : 4.0; };
  if (!c.train.reduce_dtype.empty()) p.state.gradient_wire = bytes(c.train.reduce_dtype);
  if (!c.train.accumulate_dtype.empty()) p.state.gradient = bytes(c.train.accumulate_dtype);
  analytic::set_optimizer(c.train.optimizer, p);
  if (c.train.dropout > 0) p.model.dropout = true;
  if (c.layout.bucket_bytes > 0) p.overlap.bucket_bytes = static_cast<double>(c.layout.bucket_bytes);
  if (c.layout.fsdp.unit > 1) p.overlap.unit_layers = c.layout.fsdp.unit;
  return p;
}

/// Sizes of which each is below 2^30, as `check_sizes` of a case has them.
Result<void> check_sizes(const Case& c) {
  for (const auto& [key, value] : {std::pair{"seq_len", c.train.seq_len},
                                   {"micro_batch", c.train.micro_batch},
                                   {"grad_accumulation", c.train.grad_accumulation}})
    if (value < 1 || value > (int64_t{1} << 30))
      return refusal(fmt::format("{}={} is out of range", key, value), fmt::format("set {} from 1 to 2^30", key));
  const Train& t = c.train;
  const double tokens = static_cast<double>(t.seq_len) * static_cast<double>(t.micro_batch) *
                        static_cast<double>(t.grad_accumulation) * static_cast<double>(c.layout.dp);
  if (t.global_batch_tokens != 0 && tokens != static_cast<double>(t.global_batch_tokens))
    return refusal(fmt::format("global_batch_tokens={} is not seq_len {} * micro_batch {} * grad_accumulation {} * dp {}",
                               t.global_batch_tokens, t.seq_len, t.micro_batch, t.grad_accumulation, c.layout.dp),
                   "leave out one of them");
  if (c.model.max_positions > 0 && t.seq_len > c.model.max_positions)
    return refusal(fmt::format("seq_len={} exceeds the model's max_positions={}", t.seq_len, c.model.max_positions),
                   fmt::format("set seq_len to {} or less", c.model.max_positions));
  return {};
}

Result<MemoryQuestion> framework_question(const CaseFlags& flags, const sweeps::Point& said) {
  MemoryQuestion q;
  q.config = said.config;
  q.shape = model_shape(said);
  if (const std::string trained = trained_text(q.shape); !trained.empty()) q.notes.push_back(trained);
  if (!said.derived) return *said.refusal;
  const auto profile = profile_for(q.config);
  if (!profile.ok()) return profile.error();
  SHARDLAB_TRY(check_told(q.config));
  SHARDLAB_TRY(check_sizes(q.config));
  auto point = estimated_layout(said);
  if (!point.ok()) return point.error();
  q.point = *point;
  for (const auto& [what, to] : {std::pair{&analytic::Point::offload_activations, q.config.layout.offload.activations},
                                 {&analytic::Point::offload_optimizer, q.config.layout.offload.optimizer},
                                 {&analytic::Point::offload_parameters, q.config.layout.offload.parameters}})
    q.point.*what = medium_of(to);
  apply_defaults(flags, q.config, q.point, q.notes);
  q.config.train.precision = q.point.precision;
  auto prepared = analytic::prepare(q.shape, q.config.machine, *profile);
  if (!prepared.ok()) return prepared.error();
  if (auto legal = explain(*prepared, q.point); !legal.ok()) {
    Error error = legal.error();
    error.code = ExitCode::kUsage;
    return error;
  }
  q.prepared = std::move(*prepared);
  q.capacity = q.config.machine.device.memory_bytes;
  return q;
}

// ---- shardlab's own run --------------------------------------------------------------------------------------------------------

std::string chosen_text(const Case& c) {
  return fmt::format("recompute within {} bytes was chosen so that a step takes the least time by this machine's costs: {}",
                     c.layout.recompute_options.budget_bytes, c.layout.recompute_options.layers);
}

/// The case without techniques that points do not tell apart: what is left is its layout in words.
Case without_unsayable(Case c) {
  if (analytic::point_of(c).ok()) return c;
  analytic::clear_unknown(c);
  c.layout.recompute = Recompute::kNone, c.layout.recompute_options = {};
  c.layout.offload.delayed_update = c.layout.tensor_overlap = false;
  c.layout.stage_layers.clear(), c.layout.schedule_table.clear();
  if (c.layout.schedule >= Schedule::kNaive) c.layout.schedule = Schedule::k1F1B;
  c.layout.compression = {}, c.layout.zero_plus_plus = {}, c.layout.parameter_server = {}, c.layout.diloco = {};
  if (c.layout.cp_kind == ContextKind::kUsp) c.layout.cp_kind = ContextKind::kZigzag, c.layout.cp_ulysses = 0;
  c.model.experts.every = 1;
  return c;
}

Result<MemoryQuestion> executor_question(const CaseFlags& flags) {
  auto config = case_from_flags(flags);
  if (!config.ok()) {
    Error error = config.error();
    if (error.kind == ErrorKind::kMissing) error.hint += ", or name a framework that has it: --profile megatron";
    return error;
  }
  const bool chosen = !is_decided(*config);
  const std::string layers_asked = config->layout.stage_layers;
  config = decide(*config, flags.around);
  if (!config.ok()) return config.error();
  MemoryQuestion q;
  q.config = std::move(*config);
  q.shape = analytic::shape_of(q.config.model);
  q.exact = true;
  q.capacity = memory_per_rank(q.config);
  if (chosen) q.notes.push_back(chosen_text(q.config));
  if (q.config.layout.stage_layers != layers_asked)
    q.notes.push_back(fmt::format("layers were dealt to stages by predicted time{}: {}",
                                  q.config.machine.is_mixed() ? ", within the memory of each stage's device" : "",
                                  q.config.layout.stage_layers));
  const auto point = analytic::point_of(q.config), plain = analytic::point_of(without_unsayable(q.config));
  if (!plain.ok()) return plain.error();
  q.point = *plain;
  const auto prepared = analytic::prepare(q.config);
  if (!point.ok())
    q.untimed = point.error().message + ": layouts like it cannot be weighed; ask `shardlab run --mode simulate` for its time";
  else if (prepared.ok())
    q.prepared = *prepared;
  else if (q.config.machine.local)
    q.untimed =
        q.config.machine.calibration
            ? "this machine is known by its calibration and not by rates; `shardlab run --mode simulate` predicts its steps"
            : "this machine is not calibrated: run `shardlab calibrate` (about a minute), and `shardlab run --mode simulate` "
              "predicts its steps";
  else
    q.untimed = reason_of(prepared.error());
  return q;
}

/// Tensors of a layer in words. Others are of the ends of the model and of the boundaries between stages.
constexpr std::pair<std::string_view, const char*> kTensorWords[] = {{"y", "layer input"},
                                                                     {"x", "layer input"},
                                                                     {"attn.norm.y", "norm outputs"},
                                                                     {"mlp.norm.y", "norm outputs"},
                                                                     {"attn.norm.stats", "norm statistics"},
                                                                     {"mlp.norm.stats", "norm statistics"},
                                                                     {"attn.qk_norm.stats", "norm statistics"},
                                                                     {"qkv.raw", "qkv before norms of heads"},
                                                                     {"qkv", "qkv"},
                                                                     {"o", "attention"},
                                                                     {"lse", "log-sum-exp"},
                                                                     {"x1", "residual"},
                                                                     {"u", "up"},
                                                                     {"a", "activated"},
                                                                     {"moe.logits", "routers"},
                                                                     {"moe.weights", "routers"},
                                                                     {"moe.choice", "routers"},
                                                                     {"rows.counts", "routers"},
                                                                     {"rows.counts.there", "routers"},
                                                                     {"rows.counts.fit", "routers"},
                                                                     {"rows.in", "rows for experts"},
                                                                     {"rows.in.there", "rows for experts"},
                                                                     {"rows.u", "up of experts"},
                                                                     {"rows.a", "activated of experts"},
                                                                     {"rows.out", "rows of experts"},
                                                                     {"shared.u", "up of shared experts"},
                                                                     {"shared.a", "activated of shared experts"},
                                                                     {"shared.z", "shared experts before the gate"},
                                                                     {"shared.gate", "shared experts before the gate"}};

/// Activations of a stage at its peak by tensor.
void add_activations(const Plan& plan, int32_t stage, const MemoryByClass& at_peak, StageAnswer& s) {
  int64_t left = at_peak.bytes[static_cast<size_t>(BufferClass::kActivation)];
  std::map<std::string_view, int64_t> bytes;
  for (const HeldTensor& held : held_at_peak(plan, stage))
    if (held.cls == BufferClass::kActivation && held.of_layer)
      for (const auto& [tensor, words] : kTensorWords)
        if (held.name == tensor) bytes[words] += held.bytes, left -= held.bytes;
  for (const auto& [tensor, words] : kTensorWords) {
    s.add(ItemGroup::kActivations, words, bytes[words]);
    bytes[words] = 0;
  }
  s.add(ItemGroup::kActivations, "embedding, head and stage boundary", left);
}

/// What stands in host memory or on NVMe, by class.
std::vector<whatif::Item> outside_items(const MemoryByClass& memory) {
  std::vector<whatif::Item> items;
  const auto add = [&](ItemGroup group, const char* name, BufferClass cls) {
    if (const int64_t bytes = memory.bytes[static_cast<size_t>(cls)]; bytes != 0) items.push_back({group, name, bytes});
  };
  add(ItemGroup::kParameters, "parameters", BufferClass::kParameter);
  add(ItemGroup::kGradients, "gradients", BufferClass::kGradient);
  add(ItemGroup::kOptimizer, "master weights", BufferClass::kMaster);
  add(ItemGroup::kOptimizer, "optimizer moments", BufferClass::kMoment);
  add(ItemGroup::kActivations, "activations", BufferClass::kActivation);
  add(ItemGroup::kBuffers, "results and messages", BufferClass::kBuffer);
  add(ItemGroup::kBuffers, "counters and scales", BufferClass::kOther);
  add(ItemGroup::kWorkspace, "kernel workspace", BufferClass::kWorkspace);
  return items;
}

StageAnswer exact_stage(const Case& c, const CasePlan& plan, int32_t stage) {
  StageAnswer s;
  s.stage = stage;
  const auto peak = [&](Space space) -> const MemoryPeak& {
    return plan.stages()[static_cast<size_t>(stage)][static_cast<size_t>(space)];
  };
  const MemoryByClass& at_peak = peak(Space::kDevice).at_peak;
  const auto of = [&](BufferClass b) { return at_peak.bytes[static_cast<size_t>(b)]; };
  s.add(ItemGroup::kParameters, "parameters", of(BufferClass::kParameter));
  s.add(ItemGroup::kGradients, "gradients", of(BufferClass::kGradient));
  s.add(ItemGroup::kOptimizer, "master weights", of(BufferClass::kMaster));
  s.add(ItemGroup::kOptimizer, "optimizer moments", of(BufferClass::kMoment));
  add_activations(plan.plan_at_peak(stage), stage, at_peak, s);
  s.add(ItemGroup::kActivations, "token ids and targets", of(BufferClass::kInput));
  s.add(ItemGroup::kBuffers, c.layout.zero == 3 ? "gathered parameters" : "buckets and messages", of(BufferClass::kBuffer));
  s.add(ItemGroup::kBuffers, "losses and norms", of(BufferClass::kMetric));
  s.add(ItemGroup::kBuffers, "counters and scales", of(BufferClass::kOther));
  s.add(ItemGroup::kWorkspace, "the layer that runs", of(BufferClass::kTemporary));
  s.add(ItemGroup::kWorkspace, "kernel workspace", of(BufferClass::kWorkspace));
  s.host_bytes = peak(Space::kHost).peak_bytes, s.nvme_bytes = peak(Space::kNvme).peak_bytes;
  s.host_items = outside_items(peak(Space::kHost).at_peak), s.nvme_items = outside_items(peak(Space::kNvme).at_peak);
  s.moment = s.op = peak(Space::kDevice).moment;
  // On a described machine a driver's context takes its part; ranks on this machine's cores have none.
  if (!c.machine.local)
    if (const auto profile = analytic::profile_named("shardlab"); profile.ok())
      s.add(ItemGroup::kDevice, std::string(device_words::kContextAndKernels), static_cast<int64_t>(profile->memory.context));
  return s;
}

/// Seconds of a step of a case by its plan; nothing where the machine's speed is not known or its ranks share cores.
std::function<double(const Case&, const CasePlan&)> seconds_on(const Case& config) {
  if (config.machine.local) return {};
  auto costs = cost_model_for(config);
  auto routing = routing_of(config);
  if (!costs.ok() || !routing.ok()) return {};
  return [shared = std::shared_ptr<const PlacedCostModel>(std::move(*costs)), precision = config.train.precision,
          routing = std::move(*routing)](const Case& c, const CasePlan& plan) {
    return c.train.precision == precision ? plan.predict(c, *shared, routing).step_s
                                          : plan.predict(c, **cost_model_for(c), routing).step_s;
  };
}

/// Folds of the case's plan.
Result<whatif::Answer> from_plan(const MemoryQuestion& q) {
  if (const auto routing = routing_of(q.config); !routing.ok()) return routing.error();
  const auto plan = CasePlan::of(q.config, lower_unverified);
  if (!plan.ok()) return plan.error();
  whatif::Answer answer;
  answer.exact = true, answer.capacity = q.capacity;
  answer.host_capacity = capacity_per_rank(q.config, Space::kHost),
  answer.nvme_capacity = capacity_per_rank(q.config, Space::kNvme);
  for (size_t i = 0; i < plan->stages().size(); ++i) {
    StageAnswer& stage = answer.stages.emplace_back(exact_stage(q.config, *plan, static_cast<int32_t>(i)));
    if (!q.config.machine.is_mixed()) continue;
    stage.device_id = device_of_stage(q.config, stage.stage), stage.capacity = memory_of_stage(q.config, stage.stage);
  }
  if (q.config.machine.is_mixed()) answer.capacity = answer.worst().capacity;
  const auto seconds = check_runnable(plan->plan()).ok() ? seconds_on(q.config) : nullptr;
  if (seconds) answer.step_s = seconds(q.config, *plan);
  return answer;
}

/// What packing makes of the peaks of the plan, proven and whole.
Result<void> add_plan(const MemoryQuestion& q, whatif::Answer& answer) {
  const auto placed = prepare(q.config);
  if (!placed.ok()) return placed.error();
  answer.packed = true;
  for (StageAnswer& s : answer.stages) {
    auto peaks = memory_peak(*placed->plan, s.stage);
    for (const PlacedPlan* plan : placed->in_turn()) {
      const auto others = memory_peak(*plan->plan, s.stage);
      for (size_t space = 0; space < kSpaces; ++space)
        if (others[space].peak_bytes > peaks[space].peak_bytes) peaks[space] = others[space];
    }
    const MemoryPeak& peak = peaks[static_cast<size_t>(Space::kDevice)];
    SHARDLAB_CHECK(peak.peak_bytes == s.live() && peaks[static_cast<size_t>(Space::kHost)].peak_bytes == s.host_bytes &&
                       peaks[static_cast<size_t>(Space::kNvme)].peak_bytes == s.nvme_bytes,
                   "stage {}: the whole plan's peak is {}, the short one's {}", s.stage, peak.peak_bytes, s.live());
    s.moment = s.op = peak.moment;
    s.add(ItemGroup::kReserved, "gaps of the arena",
          placed->arenas[static_cast<size_t>(s.stage)].bytes[static_cast<size_t>(Space::kDevice)] - s.live());
  }
  return {};
}

Result<whatif::Answer> exact_answer(const MemoryQuestion& q, const MemoryAnswerOptions& options) {
  auto told = from_plan(q);
  if (!told.ok()) return told.error();
  whatif::Answer answer = std::move(*told);
  const bool small = q.config.model.layers * q.config.train.grad_accumulation <= options.planned_layer_runs;
  const double device = static_cast<double>(answer.worst().device()), capacity = static_cast<double>(answer.capacity);
  const bool close = capacity > 0 && device <= capacity && device * (1 + whatif::kPacking) > capacity;
  if (small || close || options.always_plan) SHARDLAB_TRY(add_plan(q, answer));
  if (q.config.machine.is_mixed()) answer.capacity = answer.worst().capacity;  // gaps may have made another stage the worst
  if (q.prepared) {
    const analytic::Estimate estimate = analytic::estimate(*q.prepared, q.point);
    if (estimate.legal()) answer.transferred = estimate.transferred;
    if (estimate.legal() && answer.step_s == 0) answer.step_s = estimate.step_s;
  }
  return answer;
}

}  // namespace

namespace {

/// Where nobody named a framework and the machine has not all rates that a framework's profile asks for: the bytes of our own
/// executor, which need none. Nothing where it has them.
std::optional<Result<MemoryQuestion>> untimed_question(const CaseFlags& flags, const Case& config) {
  const auto profile = analytic::profile_named(config.profile);
  if (!profile.ok() || !check(config.model).ok()) return std::nullopt;
  const auto prepared = analytic::prepare(analytic::shape_of(config.model), config.machine, *profile);
  if (prepared.ok()) return std::nullopt;
  auto own = executor_question(flags);
  if (own.ok())
    own->notes.insert(
        own->notes.begin(),
        config.machine.is_mixed()
            ? fmt::format("no --profile: our own executor (shardlab), as {}", prepared.error().message)
            : fmt::format("no --profile: our own executor (shardlab), as rates that the profile {} needs are not known: {}",
                          config.profile, prepared.error().message));
  return own;
}

}  // namespace

Result<MemoryQuestion> memory_question(const CaseFlags& flags) {
  auto words = words_from_flags(flags);
  if (!words.ok()) return words.error();
  auto said = point_from_words(options_around(flags.around, flags.machine_file, std::move(*words)));
  if (!said.ok()) return said.error();
  const bool assumed = !given(flags, "profile");
  if (assumed) said->config.profile = default_profile(said->config.machine);
  if (assumed && !given(flags, "bucket_bytes")) said->config.layout.bucket_bytes = automatic_bucket_bytes(said->config);
  if (assumed && !said->config.machine.local && !said->model)
    if (auto own = untimed_question(flags, said->config)) return *own;
  if (said->config.profile == "shardlab") return executor_question(flags);
  auto question = framework_question(flags, *said);
  if (question.ok() && assumed)
    question->notes.insert(
        question->notes.begin(),
        fmt::format("no --profile: {}, as {} is described and not this machine (--profile shardlab: our own executor)",
                    said->config.profile, said->config.machine.id));
  if (question.ok() && flags.devices > 0 && question->point.world_size() != flags.devices)
    return refusal(fmt::format("--devices {} and a layout of dp*tp*pp*cp = {} ranks", flags.devices, question->point.world_size()),
                   "leave out --devices, or --dp, which then follows from it");
  return question;
}

Result<whatif::Answer> memory_answer(const MemoryQuestion& q, const MemoryAnswerOptions& options) {
  if (q.exact) return exact_answer(q, options);
  analytic::Estimator estimator(*q.prepared);
  return whatif::analytic_answer(*q.prepared, estimator, q.point, q.capacity);
}

whatif::Advice memory_advice(const MemoryQuestion& q) {
  if (!q.prepared || q.capacity <= 0) return {};
  analytic::Estimator estimator(*q.prepared);
  return whatif::advise(estimator, q.prepared->profile(), q.point,
                        {.capacity = q.capacity,
                         .lower = q.exact ? Lower(lower_unverified) : Lower(),
                         .seconds = q.exact ? seconds_on(q.config) : nullptr,
                         .bf16 = q.config.machine.device.peak_flops.contains("bf16")});
}

std::string why_not_ranked(const MemoryQuestion& q) {
  if (!q.untimed.empty()) return q.untimed;
  if (q.capacity <= 0) return fmt::format("the memory of {} is not known; set machine.device.memory", q.config.machine.id);
  return "no other layout of these devices is legal; take more devices";
}

std::vector<std::string> memory_assumptions(const MemoryQuestion& q, const whatif::Answer& answer) {
  std::vector<std::string> list;
  if (q.exact) {
    list.emplace_back(
        "the live peak is that of the plan that `shardlab run` executes: every buffer rounded up to 64 bytes, summed over what is "
        "live at the peak");
    list.emplace_back(answer.packed
                          ? "what the allocator holds is the peak as it is packed: one arena a rank, buffers at fixed offsets"
                          : "what the allocator holds is the live peak: gaps of packing are not counted where the plan is large "
                            "(--plan counts them)");
    list.emplace_back(q.config.train.precision == Precision::kFp32
                          ? "fp32 everywhere: parameters, gradients, optimizer state and activations have 4 bytes an element"
                          : fmt::format("{} parameters and activations of 2 bytes an element, fp32 master weights and moments",
                                        name_of(q.config.train.precision)));
    list.emplace_back("attention keeps no S x S matrix; its output and one log-sum-exp a row are saved");
    list.emplace_back(q.config.machine.local ? "memory of the process itself, the driver and libraries is not included"
                                             : "of the driver and libraries a context of 500 MB is counted, nothing else");
  } else {
    const FrameworkProfile& p = q.prepared->profile();
    list.push_back(fmt::format("as {} runs it (profile {})", p.describes, p.name));
    list.push_back(
        fmt::format("nine of ten runs like it lie within {:.0f} % of the live peak and {:.0f} % of what the allocator holds",
                    100 * answer.live_error, 100 * answer.reserved_error));
  }
  const DataSource& data = q.config.data;
  if (const auto routing = routing_of(q.config); routing.ok() && !routing->is_even() && q.point.ep > 1) {
    const auto placements = placements_of(q.config, *routing, q.point.ep);
    const double contiguous = expected_imbalance(*routing, q.config.model, q.point.ep);
    list.push_back(
        fmt::format("tokens go to experts by {}: the fullest of {} ranks that share them has {:.2f} times the mean of rows{}",
                    data.routes.empty() ? "data.routing=" + data.routing : "data.routes=" + data.routes, q.point.ep,
                    placements.empty() ? contiguous : expected_imbalance(*routing, q.config.model, q.point.ep, placements),
                    placements.empty() ? "" : fmt::format(", and {:.2f} times if experts were contiguous", contiguous)));
  }
  list.insert(list.end(), q.notes.begin(), q.notes.end());
  if (answer.step_s <= 0 && !q.untimed.empty()) list.push_back("no step time, and so no days and no price: " + q.untimed);
  if (answer.step_s > 0 && answer.transferred)
    list.push_back(
        fmt::format("some rates behind the step time were measured on other devices; `shardlab machine show {}` marks them "
                    "`transferred`",
                    q.config.machine.id));
  if (q.capacity <= 0)
    list.push_back(fmt::format("the memory of {} is not known: whether this fits is not said; set machine.device.memory",
                               q.config.machine.id));
  return list;
}

namespace {

/// Watts of a device of a mixed machine, the mean over the case's ranks.
double mean_power(const Case& config) {
  double sum = 0;
  for (int rank = 0; rank < config.layout.world_size(); ++rank) {
    const KindRange on = kinds_of_ranks(config.machine, rank, rank);
    sum += config.machine.kinds[static_cast<size_t>(on.first)].device.power_w;
  }
  return sum / config.layout.world_size();
}

std::optional<MemoryRun> run_of(const ToldMemory& told, const Price& listed, const MemoryAnswerOptions& options) {
  const Case& config = told.question.config;
  if (options.tokens <= 0 || told.answer.step_s <= 0 || (!told.question.prepared && !config.machine.is_mixed()))
    return std::nullopt;
  analytic::Estimate estimate;
  estimate.step_s = told.answer.step_s;
  const analytic::RunPrice price{.device_hour_usd = options.price_usd > 0 ? options.price_usd : listed.usd_per_hour};
  MemoryRun run{options.tokens,
                told.question.prepared
                    ? analytic::bill(*told.question.prepared, told.question.point, estimate, options.tokens, price)
                    : analytic::bill(mean_power(config), told.question.point, estimate, options.tokens, price),
                {},
                price_note(options.price_usd, listed)};
  if (options.interruptions.device_mtbf_s <= 0) return run;
  run.goodput = analytic::goodput(options.interruptions, told.question.point.world_size());
  for (double analytic::RunBill::*figure : {&analytic::RunBill::days, &analytic::RunBill::device_hours, &analytic::RunBill::usd,
                                            &analytic::RunBill::kwh, &analytic::RunBill::kg_co2})
    run.bill.*figure /= run.goodput->share;
  return run;
}

}  // namespace

Result<ToldMemory> tell_memory(const CaseFlags& flags, const MemoryAnswerOptions& options, bool advise) {
  auto question = memory_question(flags);
  if (!question.ok()) return question.error();
  auto answer = memory_answer(*question, options);
  if (!answer.ok()) return answer.error();
  ToldMemory told{std::move(*question), std::move(*answer), {}, {}};
  if (options.tokens > 0) {
    const auto listed = flags.machine == "local" ? Result<Price>(Price{}) : load_price(flags.machine);
    if (!listed.ok()) return listed.error();
    told.run = run_of(told, *listed, options);
  }
  if (advise && !told.answer.fits()) told.advice = memory_advice(told.question);
  return told;
}

void set_word(CaseFlags& flags, const std::string& key, const std::string& value) {
  for (auto& [k, v] : flags.layout)
    if (k == key) {
      v = value;
      return;
    }
  std::erase_if(flags.set, [&](const std::string& word) { return word.starts_with(key + "="); });
  flags.set.push_back(key + "=" + value);
}

namespace {

std::array<std::pair<const char*, std::string>, 4> interruption_flags(const MemoryWords& words) {
  return {{{"--device-mtbf", words.mtbf},
           {"--checkpoint-time", words.checkpoint},
           {"--restart-time", words.restart},
           {"--checkpoint-every", words.interval}}};
}

/// What interrupts the run. Failures and what they cost are stated together: nobody knows them for somebody else's machine.
Result<analytic::Interruptions> interruptions_of(const MemoryWords& words) {
  analytic::Interruptions i;
  const std::array<double*, 4> into{&i.device_mtbf_s, &i.checkpoint_s, &i.restart_s, &i.interval_s};
  const auto stated = interruption_flags(words);
  if (std::ranges::all_of(stated, [](const auto& f) { return f.second.empty(); })) return i;
  for (size_t k = 0; k < stated.size(); ++k) {
    const auto& [flag, text] = stated[k];
    if (text.empty() && k == 3) continue;  // the best interval
    if (text.empty())
      return Error{ExitCode::kUsage,
                   fmt::format("{} is missing: what failures cost needs it", flag),
                   "for example --device-mtbf 50000h --checkpoint-time 40s --restart-time 10m",
                   {}};
    if (parse_number(text))  // hours are as likely meant as seconds
      return Error{
          ExitCode::kUsage, fmt::format("{} {} has no unit", flag, text), fmt::format("for example {0}h, {0}m or {0}s", text), {}};
    const auto seconds = parse_duration(text);
    if (!seconds)
      return Error{ExitCode::kUsage, fmt::format("{} {} is not a time", flag, text), "for example 40s, 10m or 50000h", {}};
    *into[k] = *seconds;
  }
  return i;
}

}  // namespace

Result<MemoryAnswerOptions> memory_options(const MemoryWords& words) {
  MemoryAnswerOptions options{.always_plan = words.plan, .price_usd = words.price_usd};
  if (words.tokens.empty()) {
    for (const auto& [flag, text] : interruption_flags(words))
      if (!text.empty())
        return Error{ExitCode::kUsage,
                     fmt::format("{} speaks of a whole training run, and none is asked for", flag),
                     "add --tokens, as 1.4T",
                     {}};
    return options;
  }
  const auto tokens = parse_tokens(words.tokens);
  if (!tokens)
    return Error{
        ExitCode::kUsage, fmt::format("--tokens {} is not a number of tokens", words.tokens), "for example 1.4T, or 300B", {}};
  options.tokens = *tokens;
  const auto interruptions = interruptions_of(words);
  if (!interruptions.ok()) return interruptions.error();
  options.interruptions = *interruptions;
  return options;
}

}  // namespace shardlab::answers
