#include "cases/pipeline.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <numeric>
#include <span>
#include <tuple>

#include "cases/environment.h"
#include "cases/execution.h"
#include "cases/local_machine.h"
#include "cases/namespaces.h"
#include "cases/recorded_case.h"
#include "kernels/kernels.h"
#include "plan/base/files.h"
#include "plan/base/hash.h"
#include "plan/base/limits.h"
#include "plan/base/pending_file.h"
#include "plan/base/world_error.h"
#include "plan/expert_placement.h"
#include "plan/expert_rows.h"
#include "plan/period.h"
#include "plan/pipeline_case.h"
#include "plan/reasons.h"
#include "plan/routing.h"
#include "plan/runnable.h"
#include "plan/techniques.h"
#include "plan/text.h"
#include "plan/treatment.h"
#include "plan/verify.h"
#include "plan/work.h"
#include "reports/format.h"
#include "runtime/checkpoint.h"
#include "runtime/dataset.h"
#include "runtime/made_again.h"
#include "runtime/phases.h"
#include "simulator/interpreter/cost_model.h"
#include "simulator/interpreter/pipeline_choice.h"
#include "simulator/interpreter/recompute_budget.h"
#include "strategies/lower.h"
#include "strategies/warm_up.h"

namespace shardlab::cases {

namespace {

/// The case folder that the folder of a checkpoint is in.
std::string case_folder_of(const Checkpoint& checkpoint) {
  return std::filesystem::absolute(checkpoint.manifest()).lexically_normal().parent_path().parent_path().string();
}

/// Ranks that share the experts of a layer under a plan; 1 of a plan without experts.
int ranks_of_experts(const Plan& plan) {
  for (const Parameter& p : plan.parameters)
    if (layer_of_expert_weight(p.name)) return static_cast<int>(logical_shape(p.type, plan.mesh)[0] / p.type.shape[0]);
  return 1;
}

/// What the layers took in the run whose checkpoint the case goes on from: by the plan and the measured trace in that run's case folder,
/// which the folder of its checkpoints is in.
Result<MeasuredSeconds> resumed_seconds(const Case& config) {
  const auto checkpoint = Checkpoint::open(config.checkpoint.resume);
  if (!checkpoint.ok()) return checkpoint.error();
  const std::string folder = case_folder_of(*checkpoint);
  const auto refuse = [&](const std::string& why) {
    return refusal(
        fmt::format("stage_layers=measured: {}: {}", folder, why),
        "resume from the checkpoints in the case folder of a run that was measured with --traces measured or all, or set "
        "stage_layers: balanced",
        ErrorKind::kNotMeasured);
  };
  const RecordedCase recorded = read_recorded(CaseFiles{folder}, {}, "measured");
  if (!recorded.problems.empty()) return refuse(recorded.problems.front());
  if (!recorded.measured) return refuse("there is no measured trace");
  const auto seconds = measured_seconds(*recorded.plan, recorded.programs, *recorded.measured);
  if (!seconds.ok()) return refuse(seconds.error().message);
  if (std::ssize(seconds->layers) != config.model.layers)
    return refuse(fmt::format("the run has {} layers, and this case has {}", seconds->layers.size(), config.model.layers));
  return seconds;
}

/// The rows of experts in the measured steps of the run whose checkpoint the case goes on from, and its placement of experts: loads.txt and
/// plan.txt in that run's case folder.
Result<MeasuredLoads> resumed_loads(const Case& config) {
  const auto checkpoint = Checkpoint::open(config.checkpoint.resume);
  if (!checkpoint.ok()) return checkpoint.error();
  const CaseFiles files{case_folder_of(*checkpoint)};
  const auto refuse = [&](const std::string& why) {
    return refusal(fmt::format("expert_placement=measured: {}", why),
                   "resume from the checkpoints in the case folder of a run that was measured on processors, or set data.routes to "
                   "its loads.txt and expert_placement: balanced",
                   ErrorKind::kNotCounted);
  };
  Case loaded = config;
  loaded.data.routes = files.loads();
  auto routing = routing_of(loaded);
  if (!routing.ok()) return refuse(fmt::format("{}: {}", files.loads(), routing.error().message));
  const std::optional<Plan> plan = recorded_plan(files);
  if (!plan) return refuse(fmt::format("{} is no plan that has run", files.plan()));
  for (const ExpertPlacement& p : plan->expert_placement)
    if (std::ssize(p.experts) != config.model.experts.count)
      return refuse(fmt::format("{}: layer {} has {} experts, and the model has {}", files.plan(), p.layer, p.experts.size(),
                                config.model.experts.count));
  MeasuredLoads measured{std::move(routing->recorded), {}};
  if (ranks_of_experts(*plan) == config.layout.ep) measured.placements = plan->expert_placement;
  return measured;
}

}  // namespace

Surroundings surroundings() {
  return {.local_machine = [](const std::string& file) { return find_local_machine(file); },
          .resumed_seconds = resumed_seconds,
          .resumed_loads = resumed_loads,
          .tell = [](const std::string& remark) { fmt::print(stderr, "{}\n", remark); }};
}

Result<Case> decide(const Case& config) { return answers::decide(config, surroundings()); }

bool validates(const Case& config) { return config.measure.validate_sequences > 0 && config.backend != BackendKind::kDry; }

Result<void> check_validation(const Case& config, int64_t available) {
  if (!validates(config)) return {};
  const int64_t asked = config.measure.validate_sequences, per_step = config.sequences_per_step();
  const int64_t below = asked / per_step * per_step;
  if (asked != below)
    return Error{
        ExitCode::kUsage,
        fmt::format("measure.validate_sequences={} of case `{}`, whose steps take {} sequences each", asked, config.name, per_step),
        fmt::format("set measure.validate_sequences to {}{}, or to 0 for none", below > 0 ? fmt::format("{} or ", below) : "",
                    below + per_step),
        {}};
  if (asked <= available) return {};
  return Error{ExitCode::kUsage,
               fmt::format("measure.validate_sequences={} and the validation split of the data has {} sequences of {} tokens",
                           asked, available, config.train.seq_len),
               "give more text, shorten train.seq_len, or set measure.validate_sequences to 0",
               {}};
}

namespace {

/// The peaks of every role of the plans that take turns, where they are above those that are known.
void add_peaks_of(const PlacedRun& placed, Prediction& p) {
  for (const PlacedPlan* plan : placed.in_turn())
    for (int role = 0; role < static_cast<int>(plan->plan->roles.size()); ++role) add_peaks(memory_peak(*plan->plan, role), p);
}

}  // namespace

Result<Predicted> predict_case(const Case& config, const PlacedRun& placed) {
  SHARDLAB_TRY(check_runnable(*placed.plan));
  auto costs = cost_model_for(config);
  if (!costs.ok()) return costs.error();
  const auto routing = routing_of(config);
  if (!routing.ok()) return routing.error();
  Predicted predicted = predict(config, *placed.plan, placed.programs, largest_arena(placed), **costs, *routing);
  if (predicted.figures.expert_reruns.value_or(0) > 0)
    add_second_run(predict(second_run_of(config), *placed.in_step->plan, placed.in_step->programs, 0, **costs, *routing).figures,
                   predicted.figures);
  add_peaks_of(placed, predicted.figures);
  predicted.figures.stages = stage_memory(config, placed);
  return predicted;
}

Result<Prediction> predict_case_by_segments(const Case& config, const PlacedRun& placed) {
  SHARDLAB_TRY(check_runnable(*placed.plan));
  if (config.machine.local)
    return Error{ExitCode::kUsage,
                 "the ranks of a local machine share its cores, which the segments resolution does not know",
                 "use --resolution timeline",
                 {}};
  const auto costs = cost_model_for(config);
  if (!costs.ok()) return costs.error();
  const auto routing = routing_of(config);
  if (!routing.ok()) return routing.error();
  Prediction predicted = predict_by_segments(config, *placed.plan, placed.programs, largest_arena(placed), **costs, *routing);
  if (predicted.expert_reruns.value_or(0) > 0)
    add_second_run(
        predict_by_segments(second_run_of(config), *placed.in_step->plan, placed.in_step->programs, 0, **costs, *routing),
        predicted);
  add_peaks_of(placed, predicted);
  predicted.stages = stage_memory(config, placed);
  return predicted;
}

Result<Prediction> predict_bytes(const Case& config, const PlacedRun& placed) {
  const auto routing = routing_of(config);
  if (!routing.ok()) return routing.error();
  Prediction p;
  add_peaks_of(placed, p);
  p.arena_bytes = largest_arena(placed);
  p.stages = stage_memory(config, placed);
  add_wire(config, *placed.plan, placed.programs, *routing, p);
  return p;
}

Result<void> check_periods(const Case& config, int period) {
  for (const auto& [key, steps] : {std::pair{"warmup", config.measure.warmup}, {"steps", config.measure.steps}}) {
    if (steps % period == 0) continue;
    return Error{ExitCode::kUsage,
                 fmt::format("measure.{}={} with {}={}: a run ends where a period does", key, steps,
                             validates_later(config) ? "post_validation" : "diloco.steps", period),
                 fmt::format("set measure.{} to {}, or another multiple", key, (steps + period - 1) / period * period),
                 {}};
  }
  return {};
}

Result<void> check_timed_steps(const Case& config, int64_t first) {
  const int64_t steps = warm_up_steps(config), timed = first + config.measure.warmup;
  if (steps <= timed) return {};
  const std::string from = first == 0 ? "" : fmt::format(" from step {} on", first);
  return Error{
      ExitCode::kUsage,
      fmt::format("compression.warmup={} with measure.warmup={}{}: steps before the variance is frozen and after it would be "
                  "timed as if they were alike",
                  steps, config.measure.warmup, from),
      fmt::format("set measure.warmup to {} or more, or lower compression.warmup", steps - first),
      {}};
}

namespace {

double percentile(std::vector<double> values, double p) {
  if (values.empty()) return 0;
  std::ranges::sort(values);
  const double at = p * static_cast<double>(values.size() - 1);
  const size_t low = static_cast<size_t>(at);
  const size_t high = std::min(low + 1, values.size() - 1);
  return values[low] + (values[high] - values[low]) * (at - static_cast<double>(low));
}

double median(std::vector<double> values) { return percentile(std::move(values), 0.5); }

/// Room for every event of a stream: two for each of its instructions (the op and the wait before it) in each recorded step.
int64_t events_per_stream(const PlacedPlan& placed, int64_t steps) {
  size_t most = 0;
  for (const Program& p : placed.programs)
    for (const auto& stream : p.streams) most = std::max(most, stream.size());
  return (static_cast<int64_t>(most) * 2 + 4) * steps;
}

/// Refuses a recording that would take more than a quarter of the memory that is left.
Result<void> check_recording(const PlacedPlan& placed, int64_t steps) {
  const double streams = static_cast<double>(placed.plan->streams.size()) * placed.plan->mesh.world_size();
  const double bytes = streams * static_cast<double>(events_per_stream(placed, steps)) * sizeof(TraceEvent);
  if (bytes <= 0.25 * static_cast<double>(usable_memory())) return {};
  return Error{ExitCode::kUsage,
               fmt::format("the trace of {} measured steps would take {} of memory, more than a quarter of what is free", steps,
                           bytes_text(static_cast<int64_t>(std::min(bytes, 9e18)))),
               "lower measure.steps or measure.repeat",
               {}};
}

/// Adds `share` of each part.
void add(IdleBreakdown& sum, const IdleBreakdown& idle, double share) {
  for (double IdleBreakdown::*part :
       {&IdleBreakdown::idle_s, &IdleBreakdown::peer_s, &IdleBreakdown::dependency_s, &IdleBreakdown::host_s,
        &IdleBreakdown::latency_s, &IdleBreakdown::tail_s, &IdleBreakdown::other_s})
    sum.*part += share * idle.*part;
}

/// The parts of a step over the recorded steps (periods, of which a step has its share), on the rank whose step was longest:
/// medians, and means of the idle time's causes, so that these add up.
void add_breakdown(const PlacedPlan& placed, const Trace& trace, Measurement& m) {
  std::vector<double> compute, exposed, copies, bubble, unplanned;
  for (int step = 0; step < trace.steps; ++step) {
    const auto length = [&](int rank) {
      const auto& i =
          trace.step_interval[static_cast<size_t>(step) * static_cast<size_t>(trace.world_size) + static_cast<size_t>(rank)];
      return i[1] - i[0];
    };
    int longest = 0;
    for (int rank = 1; rank < trace.world_size; ++rank)
      if (length(rank) > length(longest)) longest = rank;
    const Breakdown b = analyse(*placed.plan, placed.programs, trace, longest, step);
    const int period = placed.plan->period;
    compute.push_back(b.compute_s / period);
    exposed.push_back(b.exposed_comm_s / period);
    copies.push_back(b.exposed_copy_s / period);
    bubble.push_back(b.bubble_fraction);
    unplanned.push_back(b.unplanned_s / period);
    const IdleBreakdown idle = idle_by_cause(*placed.plan, placed.programs, trace, longest, step);
    add(m.idle, idle_of_step(*placed.plan, idle), 1.0 / trace.steps);
    const StepParts parts = parts_of_step(*placed.plan, placed.programs, trace, longest, step);
    for (const StepPartField& part : kStepParts) m.parts.*part.seconds += parts.*part.seconds;
  }
  if (const double sum = m.parts.total(); sum > 0) m.parts = scaled(m.parts, m.step_s / sum);
  m.compute_s = median(compute);
  m.exposed_comm_s = median(exposed);
  m.exposed_copy_s = median(copies);
  m.bubble_fraction = median(bubble);
  m.unplanned_time_s = median(unplanned);
}

ExecutionOptions execution_options(const Case& config, int64_t events_per_stream, Control* control) {
  return {config.backend, config.transport,  config.canonical, config.threads_per_rank, config.attention,
          config.tf32,    events_per_stream, control,          config.measure.timeout_s};
}

/// Mean loss on the first `validate_sequences` sequences of the validation split: `placed`, a forward-only plan of the layout that
/// was trained, takes the parameters over.
Result<double> validation_loss(const Case& config, const PlacedPlan& placed, const Session& trained, const PlacedPlan& training,
                               const Dataset& data, const RunOptions& options) {
  auto source = data.validation();
  if (!source.ok()) return source.error();
  auto execution = Execution::create(placed, execution_options(config, 0, options.control));
  if (!execution.ok()) return execution.error();
  auto session = Session::create(placed, options, (*execution)->transport(), (*execution)->backends(), *source);
  if (!session.ok()) return session.error();
  (*session)->initialise_parameters();
  SHARDLAB_TRY(copy_parameters(trained, *training.plan, **session));
  const int64_t steps = config.measure.validate_sequences / config.sequences_per_step();
  double sum = 0;
  for (int64_t step = 0; step < steps; ++step) sum += (*session)->step(step).loss.value_or(0);
  return sum / static_cast<double>(steps);
}

/// The high-water marks of a session, where they are above those of the phase before.
void add_marks(const Session& session, int ranks, Measurement& m) {
  m.peak_by_rank.resize(static_cast<size_t>(ranks));
  for (int rank = 0; rank < ranks; ++rank) {
    const Ledger& ledger = session.ledger(rank);
    int64_t& peak = m.peak_by_rank[static_cast<size_t>(rank)];
    peak = std::max(peak, ledger.peak(Space::kDevice));
    m.peak_bytes = std::max(m.peak_bytes, peak);
    for (const auto& [highest, space] :
         {std::pair{&m.memory, Space::kDevice}, {&m.host_memory, Space::kHost}, {&m.nvme_memory, Space::kNvme}})
      if (ledger.peak(space) > highest->total()) *highest = ledger.at_peak(space);
    m.arena_bytes = std::max(m.arena_bytes, session.arena_bytes(rank, Space::kDevice));
  }
}

/// Bytes of the arenas of all ranks where `execution` reads memory.
int64_t arena_bytes(const Session& session, int ranks, const Execution& execution) {
  int64_t arenas = 0;
  for (int rank = 0; rank < ranks; ++rank) {
    arenas += session.arena_bytes(rank, Space::kDevice);
    if (execution.memory_is_host()) arenas += session.arena_bytes(rank, Space::kHost);
  }
  return arenas;
}

/// `beside`: the session of steps made again in arenas of their own, which are planned too, or none.
void add_memory(const PlacedPlan& placed, const Session& session, const Session* beside, const Execution& execution,
                Measurement& m) {
  const int ranks = placed.plan->mesh.world_size();
  add_marks(session, ranks, m);
  int64_t arenas = arena_bytes(session, ranks, execution);
  if (beside != nullptr) arenas += arena_bytes(*beside, ranks, execution);
  const MemoryReading before = execution.memory_before(), after = execution.memory();
  m.resident_bytes = after.peak;
  // A peak that lies before this case began (reading the data, say) is none of its own.
  const int64_t peak = after.peak > before.peak ? after.peak : after.now;
  m.unplanned_memory_bytes = peak - before.now - arenas;
  m.unplanned_memory = execution.unplanned(arenas);
}

/// Number of the first step: 0, or what the checkpoint that the case resumes has done, whose state `session` then has.
Result<int64_t> first_step(const Case& config, Session& session) {
  if (config.checkpoint.save_every > 0) SHARDLAB_TRY(prepare_checkpoints(session, config.checkpoint.folder));
  if (config.checkpoint.resume.empty()) return 0;
  const auto checkpoint = Checkpoint::open(config.checkpoint.resume);
  if (!checkpoint.ok()) return checkpoint.error();
  SHARDLAB_TRY(checkpoint->restore(config, session));
  return checkpoint->steps();
}

/// Saves after every `save_every` steps, counted from the seed, and after the run's last. Of the last `made` steps, a period, the state
/// is there after the last alone: a period that was resumed between two multiples of `save_every` ends behind one.
Result<void> save_where_due(const Case& config, const Session& session, int64_t steps, int64_t made, bool last) {
  const Checkpointing& c = config.checkpoint;
  if (c.save_every == 0 || (steps / c.save_every == (steps - made) / c.save_every && !last)) return {};
  const auto saved = save_checkpoint(session, config, steps, c.folder);
  if (!saved.ok()) return saved.error();
  return {};
}

/// Ends the run where its guard says so. The step's update was left out, so that what was saved last is what was trained last.
void stop_at(const Guard& guard, const StepResult& result, int64_t step) {
  if (!result.fault) return;
  const bool spike = result.fault->kind == Fault::Kind::kSpike;
  if ((spike ? guard.spike : guard.nonfinite) != GuardAction::kStop) return;
  throw WorldError(fmt::format("step {}: {}", step, result.fault->text),
                   spike ? "lower learning_rate.peak, raise guard.loss_factor or guard.norm_factor, or set guard.spike: skip"
                         : "lower learning_rate.peak, set clip_norm, or set guard.nonfinite: skip");
}

/// A file a server.
void write_arrivals(std::span<const ArrivalLog> logs, const CaseFiles& files) {
  for (const ArrivalLog& log : logs) { write_file_atomically(files.arrivals(log.server), print(log)); }
}

/// The logs that lie beside the case to be repeated; none: none are.
Result<std::vector<ArrivalLog>> read_replay(const Case& config, const CaseFiles& files) {
  std::vector<ArrivalLog> logs;
  for (int server = 0; server < config.layout.parameter_server.servers; ++server) {
    if (!is_there(files.replay(server))) continue;
    const auto text = read_file_within(files.replay(server), limits::kArrivalsBytes);
    if (!text.ok()) return text.error();
    auto log = parse_arrivals(*text);
    if (!log.ok()) return Error{log.error().code, log.error().message, log.error().hint, files.replay(server)};
    logs.push_back(std::move(*log));
  }
  return logs;
}

RunOptions run_options(const Case& config, const std::string& directory) {
  RunOptions options;
  options.seed = config.train.seed;
  options.learning_rate = config.train.learning_rate;
  options.timeout_s = config.measure.timeout_s;
  options.nvme_directory = directory;
  return options;
}

/// The data that a case trains on, by its size, the frequencies of its tokens and some sequences.
uint64_t fingerprint(const Dataset& data, const Case& config) {
  constexpr int64_t kSequences = 64;
  uint64_t hash = hash_text(
      fmt::format("{} {} {} {:a}", data.files(), data.train_tokens(), data.validation_sequences(), data.unigram_entropy()));
  const auto n = static_cast<size_t>(config.train.seq_len);
  std::vector<int32_t> tokens(config.data.packed ? 3 * n : n + 1);
  const std::span<int32_t> all(tokens);
  for (int64_t i = 0; i < kSequences; ++i) {
    const int64_t number = i * data.train_sequences() / kSequences;
    if (config.data.packed)
      data.train().packed(number, {all.subspan(0, n), all.subspan(n, n), all.subspan(2 * n, n)});
    else
      data.train().sequence(number, all);
    hash = hash_text({reinterpret_cast<const char*>(tokens.data()), tokens.size() * sizeof(int32_t)}, hash);
  }
  return hash;
}

/// What must be the same in every process of a run.
std::vector<std::pair<std::string, std::string>> identity(const PlacedRun& placed, const Dataset& data, const Case& config) {
  const auto hash_of = [](const PlacedPlan& p) { return fmt::format("{:016x}", hash_text(print(*p.plan))); };
  return {{"program", program_version()},
          {"plan", hash_of(placed)},
          {"plan of steps made again", placed.in_step ? hash_of(*placed.in_step) : ""},
          {"plan of the first phase", placed.warm_up ? hash_of(*placed.warm_up) : ""},
          {"variant of the kernels", kernels::description(kernels::kernels_for_this_processor())},
          {"data set", fmt::format("{:016x}", fingerprint(data, config))},
          {"seed", fmt::format("{}", config.train.seed)}};
}

/// How the rows of experts fell in the measured steps.
class LoadBalance {
 public:
  /// Layers of one step after another.
  void add(std::span<const ExpertRows> layers) {
    while (!layers.empty()) {
      const auto next = std::ranges::find_if(layers, [&](const ExpertRows& layer) { return layer.step != layers[0].step; });
      const auto step = layers.first(static_cast<size_t>(next - layers.begin()));
      layers = layers.subspan(step.size());
      last_.assign(step.begin(), step.end());
      const Imbalance one = imbalance_of(step);
      if (one.by_expert) experts_.push_back(*one.by_expert);
      if (one.by_rank) ranks_.push_back(*one.by_rank);
      if (one.by_rank_contiguous) contiguous_.push_back(*one.by_rank_contiguous);
      add_rows_of(step);
      const Drops drops = drops_of(step);
      all_.chosen += drops.chosen, all_.dropped += drops.dropped;
    }
  }
  /// Adds what a step asked for in room.
  void add_peak(const JudgedPeriod& period, const Case& config) {
    if (!period.first.overflowed || second_run_keeps_micro_batches(config))
      for (const StepResult& r : period.counted()) add_peak(r.experts, 0);
    else
      add_peak(period.first.experts, config.layout.expert_bound);
  }
  /// Into the figures; `tells`: and, layer by layer, to the log. `drops`: experts have a capacity.
  void note(Measurement& m, bool drops, bool tells) const {
    if (drops && all_.chosen > 0) m.expert_dropped = all_.share(), m.expert_dropped_last = drops_of(last_).share();
    if (drops && all_.chosen > 0 && tells)
      fmt::print(stderr, "rows that experts had no room for: {} of the {} that tokens chose in {} steps\n", all_.dropped,
                 all_.chosen, experts_.size());
    if (experts_.empty()) return;
    m.expert_imbalance = mean(experts_), m.expert_imbalance_last = experts_.back();
    if (!ranks_.empty()) m.expert_rank_imbalance = mean(ranks_), m.expert_rank_imbalance_last = ranks_.back();
    if (!contiguous_.empty()) m.expert_rank_imbalance_contiguous = mean(contiguous_);
    m.expert_rank_imbalance_peak = peak_;
    if (!tells) return;
    fmt::print(stderr, "rows of experts in the last of {} steps, and the most over the mean:\n", experts_.size());
    for (const ExpertRows& layer : last_) {
      fmt::print(stderr, "layer {}: by expert {} ({:.3f})", layer.layer, fmt::join(layer.by_expert, " "),
                 imbalance(layer.by_expert).value_or(1));
      if (!layer.by_rank.empty())
        fmt::print(stderr, "; by rank {} ({:.3f})", fmt::join(layer.by_rank, " "), imbalance(layer.by_rank).value_or(1));
      if (!layer.by_rank_contiguous.empty())
        fmt::print(stderr, ", contiguous {} ({:.3f})", fmt::join(layer.by_rank_contiguous, " "),
                   imbalance(layer.by_rank_contiguous).value_or(1));
      if (!layer.by_rank.empty())
        fmt::print(stderr, ", at most {:.3f} in a micro-batch; {} came from other ranks", layer.fullest, layer.from_others);
      if (drops) fmt::print(stderr, "; {} dropped", layer.dropped);
      fmt::print(stderr, "\n");
    }
  }

  /// The last step's rows, by layer; none of a model without experts.
  std::span<const ExpertRows> last() const { return last_; }
  /// The rows of all steps by source and expert, and those that were dropped, layer by layer: what `print_routes` prints.
  std::span<const ExpertRows> all_rows() const { return rows_; }

 private:
  /// Adds what one run of a step asked for. Of one in which rows came beyond `bound`, layer after layer up to the first of which that
  /// is known: what lies behind it is routed by wrong rows. 0: all had room.
  void add_peak(std::span<const ExpertRows> layers, double bound) {
    const auto lacks = [&](const ExpertRows& layer) { return bound > 0 && layer.fullest > bound; };
    const auto first = std::ranges::find_if(layers, lacks);
    const auto told = layers.first(static_cast<size_t>(first - layers.begin()) + (first == layers.end() ? 0 : 1));
    if (const auto peak = imbalance_of(told).peak) peak_ = std::max(peak_.value_or(0), *peak);
  }
  void add_rows_of(std::span<const ExpertRows> step) {
    if (rows_.empty()) return rows_.assign(step.begin(), step.end());
    SHARDLAB_CHECK(rows_.size() == step.size(), "a step has rows of {} layers, and the step before of {}", step.size(),
                   rows_.size());
    for (size_t layer = 0; layer < step.size(); ++layer) {
      rows_[layer].dropped += step[layer].dropped;
      rows_[layer].fullest = std::max(rows_[layer].fullest, step[layer].fullest);
      for (size_t source = 0; source < step[layer].by_source.size(); ++source)
        std::ranges::transform(step[layer].by_source[source], rows_[layer].by_source[source],
                               rows_[layer].by_source[source].begin(), std::plus());
    }
  }
  static double mean(const std::vector<double>& of) {
    return std::accumulate(of.begin(), of.end(), 0.0) / static_cast<double>(of.size());
  }

  std::vector<double> experts_, ranks_, contiguous_;  ///< by step
  std::optional<double> peak_;                        ///< of the steps
  Drops all_;                                         ///< of the steps
  std::vector<ExpertRows> last_, rows_;
};

/// Where the first phase of a run has left it.
struct WarmedUp {
  int64_t first = 0;  ///< the run's first step
  RunState state;     ///< none where the back end holds no values
};

/// The steps of the first phase, in a session that is gone when the next needs its memory. Steps and peaks are noted in `m`.
Result<WarmedUp> warm_up(const Case& config, const PlacedPlan& placed, const RunOptions& options, const Dataset& data,
                         Measurement& m) {
  auto execution = Execution::create(placed, execution_options(config, 0, options.control));
  if (!execution.ok()) return execution.error();
  auto session = Session::create(placed, options, (*execution)->transport(), (*execution)->backends(), &data.train());
  if (!session.ok()) return session.error();
  (*session)->initialise_parameters();
  const auto first = first_step(config, **session);
  if (!first.ok()) return first.error();
  SHARDLAB_TRY(check_timed_steps(config, *first));
  for (int64_t step = *first; step < warm_up_steps(config);) {
    const StepResult result = (*session)->step(step++);
    if (result.loss) m.losses.push_back(*result.loss);
    SHARDLAB_TRY(save_where_due(config, **session, step, 1, false));
  }
  add_marks(**session, placed.plan->mesh.world_size(), m);
  WarmedUp left{*first, {}};
  if (config.backend == BackendKind::kDry) return left;
  auto state = take_state(**session);
  if (!state.ok()) return state.error();
  left.state = std::move(*state);
  return left;
}

/// Steps that must not stand, made again under the plan for that. Its session lives from the first of them on.
class MadeAgain {
 public:
  /// `first`: what the run's own session is executed on.
  MadeAgain(const Case& config, const PlacedRun& placed, const RunOptions& options, const Dataset& data, Execution& first)
      : config_(config),
        placed_(placed.in_step.get()),
        shares_arenas_(placed.shares_arenas),
        options_(options),
        data_(data),
        first_(first) {}

  /// Periods of `session` from step `first` to `first + count - 1`, as they count in the end.
  Result<std::vector<JudgedPeriod>> run(Session& session, int64_t first, int64_t count) {
    std::vector<JudgedPeriod> periods;
    if (placed_ == nullptr) {
      for (StepResult& result : session.run(first, count)) periods.push_back({std::move(result), {}});
      return periods;
    }
    auto period = run_judged(
        session, first, [this, &session] { return in_step(session); },
        [this](const StepResult& result, int64_t step) { stop_at(config_.train.guard, result, step); });
    if (!period.ok()) return period.error();
    periods.push_back(std::move(*period));
    return periods;
  }

  /// The session with arenas of its own; none as long as no step was made again in one.
  const Session* session() const { return shares_arenas_ ? nullptr : session_.get(); }
  /// The high-water marks of its session, if there was one.
  void add_marks_to(Measurement& m) const {
    if (session_ != nullptr) add_marks(*session_, placed_->plan->mesh.world_size(), m);
  }

 private:
  Result<Session*> in_step(const Session& first) {
    if (session_ != nullptr) return session_.get();
    ExecutionOptions of_execution = execution_options(config_, 0, options_.control);
    RunOptions options = options_;
    if (shares_arenas_) {
      of_execution.beside = &first_.transport(), options.beside = &first;
      options.rows_together = static_cast<int>(config_.train.micro_batch);  // sequences of the first run's micro-batch
    }
    auto execution = Execution::create(*placed_, of_execution);
    if (!execution.ok()) return execution.error();
    execution_ = std::move(*execution);
    auto session = Session::create(*placed_, options, execution_->transport(), execution_->backends(), &data_.train());
    if (!session.ok()) return session.error();
    session_ = std::move(*session);
    if (!shares_arenas_) session_->initialise_parameters();
    return session_.get();
  }

  const Case& config_;
  const PlacedPlan* placed_;
  const bool shares_arenas_;
  const RunOptions& options_;
  const Dataset& data_;
  Execution& first_;
  std::unique_ptr<Execution> execution_;
  std::unique_ptr<Session> session_;
};

/// The run's first step, and the first of the phase that `session` is of, whose state it then has.
struct Begun {
  int64_t first = 0, step = 0;
};
Result<Begun> begin(const Case& config, const std::optional<WarmedUp>& warmed, Session& session) {
  session.initialise_parameters();
  if (!warmed) {
    const auto first = first_step(config, session);
    if (!first.ok()) return first.error();
    return Begun{*first, *first};
  }
  if (config.backend != BackendKind::kDry) SHARDLAB_TRY(give_state(warmed->state, session));
  return Begun{warmed->first, std::max(warmed->first, warm_up_steps(config))};
}

}  // namespace

Result<Executed> execute_case(const Case& config, const PlacedRun& placed, const std::string& directory, Watch* watch,
                              Control* control) {
  const int period = placed.plan->period;
  SHARDLAB_TRY(check_periods(config, period));
  auto data = open_dataset(config.data, {config.train.seq_len, config.model.vocab, kValidationFraction, config.train.seed});
  if (!data.ok()) return data.error();
  SHARDLAB_TRY(check_validation(config, data->validation_sequences()));
  std::optional<PlacedPlan> validation;  // before anything is trained, so that nothing is lost where there is none
  if (validates(config)) {
    auto prepared = prepare_validation(config);
    if (!prepared.ok()) return prepared.error();
    validation = std::move(*prepared);
  }
  const int64_t measured_steps = config.measure.steps * config.measure.repeat;
  SHARDLAB_TRY(check_recording(placed, measured_steps / period));
  RunOptions options = run_options(config, directory);
  options.watch = watch;
  options.control = control;
  if (control != nullptr) SHARDLAB_TRY(check_alike(*control, identity(placed, *data, config)));
  Executed result;
  Measurement& m = result.figures;
  std::optional<WarmedUp> warmed;
  if (placed.warm_up) {
    auto left = warm_up(config, *placed.warm_up, options, *data, m);
    if (!left.ok()) return left.error();
    warmed = std::move(*left);
  }
  auto execution =
      Execution::create(placed, execution_options(config, events_per_stream(placed, measured_steps / period), control));
  if (!execution.ok()) return execution.error();
  const CaseFiles files{directory.empty() ? "." : directory};
  RunOptions recorded = options;
  if (config.layout.parameter_server.servers > 0) recorded.staleness = config.layout.parameter_server.staleness;
  auto replay = read_replay(config, files);
  if (!replay.ok()) return replay.error();
  recorded.replay = std::move(*replay);
  (*execution)->attach(recorded);
  auto session = Session::create(placed, recorded, (*execution)->transport(), (*execution)->backends(), &data->train());
  if (!session.ok()) return session.error();
  if (!(*session)->direct_storage().value_or(true))
    fmt::print(stderr, "{}: the files of what is offloaded to NVMe go by way of the page cache: times say little of the drive\n",
               directory);
  const auto begun = begin(config, warmed, **session);
  if (!begun.ok()) return begun.error();
  warmed.reset();

  std::vector<double> seconds;
  LoadBalance balance;
  const int64_t warm = begun->first + config.measure.warmup, end = warm + measured_steps;
  // Workers that may run apart do so through the warm-up and through each repeat.
  const bool apart = recorded.staleness >= 0;
  MadeAgain again(config, placed, options, *data, **execution);
  for (int64_t at = begun->step; at < end;) {
    if (at == warm) (*execution)->set_recording(true);
    const int64_t count = !apart ? period : at < warm ? warm - at : config.measure.steps;
    int64_t step = at;
    if (watch != nullptr) watch->begin_step(at, end);
    auto periods = again.run(**session, at, count);
    if (!periods.ok()) return periods.error();
    for (const JudgedPeriod& p : *periods) {
      int64_t counted = step;
      for (const StepResult& r : p.counted()) {
        for (const auto& loss : r.losses)
          if (loss) m.losses.push_back(*loss);
        m.skipped_steps += r.skipped ? 1 : 0;
        if (r.fault && result.first_fault.empty()) result.first_fault = fmt::format("step {}: {}", counted, r.fault->text);
        stop_at(config.train.guard, r, counted);
        m.loss_scale = r.loss_scale;
        counted += std::ssize(r.losses);
      }
      if (p.first.overflowed)
        ++m.expert_reruns;
      else
        m.rolled_back_steps += std::ssize(p.again);
      step += period;
      SHARDLAB_TRY(save_where_due(config, **session, step, period, step == end));
      if (step <= warm) continue;
      seconds.push_back(p.seconds() / period);
      for (const StepResult& r : p.counted()) balance.add(r.experts);
      balance.add_peak(p, config);
      if ((*execution)->transport().counts_wire()) m.wire_bytes = bytes_of_step(*placed.plan, p.first.sent_bytes);
    }
    at = step;
  }
  write_arrivals((*session)->arrivals(), files);
  if (const auto staleness = (*session)->staleness()) m.staleness_mean = staleness->mean(), m.staleness_worst = staleness->worst;
  if (const auto joules = (*execution)->joules()) m.energy_j = *joules / static_cast<double>(std::max<int64_t>(1, measured_steps));
  balance.note(m, config.model.experts.drops(), (*session)->leads());
  if (!balance.last().empty() && (*session)->leads()) {
    write_file_atomically(files.routes(), print_routes(balance.last()));
    write_file_atomically(files.loads(), print_routes(balance.all_rows()));
  }
  m.samples = static_cast<int>(seconds.size());
  m.repeats = static_cast<int>(config.measure.repeat);
  m.step_s = median(seconds);
  m.step_spread = m.step_s > 0 ? (percentile(seconds, 0.9) - percentile(seconds, 0.1)) / m.step_s : 0;
  m.loss_unigram = data->unigram_entropy();
  m.kernel_variant = (*execution)->description();
  again.add_marks_to(m);
  add_memory(placed, **session, again.session(), **execution, m);
  result.trace = (*execution)->take();
  m.recorder_overhead_s = result.trace.recorder_overhead_s;
  m.trace_gaps = unexplained(result.trace.accounting);
  add_breakdown(placed, result.trace, m);
  if (validation) {
    auto loss = validation_loss(config, *validation, **session, placed, *data, options);
    if (!loss.ok()) return loss.error();
    m.val_loss = *loss;
  }
  return result;
}

std::vector<OpComparison> compare_ops(const PlacedPlan& placed, const Trace* predicted, const Trace* measured) {
  const Plan& plan = *placed.plan;
  const Trace none;
  std::map<std::tuple<int, std::string, std::string>, OpComparison> by_label;
  // Of one step: a plan of several has the mean of its period.
  const double ranks = static_cast<double>(plan.mesh.world_size()) / static_cast<double>(plan.roles.size()),
               steps = static_cast<double>(plan.period);
  for (const JoinedOp& joined : join(plan, placed.programs, predicted ? *predicted : none, measured ? *measured : none)) {
    const Instruction& i = placed.programs[static_cast<size_t>(joined.role)].instructions[static_cast<size_t>(joined.instruction)];
    if (i.kind != Instruction::Kind::kRun) continue;
    const Phase phase = phase_of(i.op->work);
    std::string kind(kind_of(i.op->work));
    if (phase != Phase::kNone) kind += phase == Phase::kF ? ".F" : phase == Phase::kI ? ".I" : ".W";
    std::string label = i.segment->name + " " + i.op->label;
    OpComparison& c = by_label[{joined.role, label, kind}];
    const WorkAmount work = work_of(*i.segment, *i.op, plan.mesh, plan.token_order);
    c.stage = joined.role;
    c.label = std::move(label);
    c.kind = std::move(kind);
    c.count += 1;
    c.flops += static_cast<double>(work.flops.value) / steps;
    c.memory_bytes += static_cast<double>(work.memory.value) / steps;
    c.payload_bytes += static_cast<double>(work.payload.value) / steps;
    c.predicted_s += joined.predicted_s / ranks / steps;
    c.measured_s += joined.measured_s / ranks / steps;
  }
  std::vector<OpComparison> ops;
  for (auto& [key, c] : by_label) {
    c.count = (c.count + plan.period - 1) / plan.period;
    ops.push_back(std::move(c));
  }
  std::ranges::stable_sort(ops, std::greater(), [](const OpComparison& c) { return std::max(c.measured_s, c.predicted_s); });
  return ops;
}

CaseOutcome refused(CaseOutcome outcome, const Error& error, Status status) {
  outcome.status = status;
  outcome.reason = reason_of(error);
  return outcome;
}

}  // namespace shardlab::cases
