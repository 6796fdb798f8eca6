#include "cases/analytic_case.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <utility>

#include "answers/model_shape.h"
#include "cases/namespaces.h"
#include "cases/pipeline.h"
#include "plan/routing.h"
#include "plan/runnable.h"
#include "plan/same_machine.h"
#include "plan/stage_memory.h"
#include "reports/format.h"
#include "simulator/estimator/analytic/known.h"
#include "simulator/interpreter/case_plan.h"

namespace shardlab::cases {
namespace {

using analytic::MemoryPart;
using analytic::TimePart;

/// What of a case its point does not say (analytic::point_of), the machine apart.
struct Rest {
  explicit Rest(const Case& c)
      : profile(c.profile),
        backend(c.backend),
        attention(c.attention),
        canonical(c.canonical),
        model(c.model),
        layout(c.layout),
        train(c.train) {
    const Layout plain;
    layout.dp = layout.tp = layout.pp = layout.vpp = layout.cp = layout.ep = 1;
    layout.expert_tp = 0;
    layout.zero = layout.hybrid_shard = 0;
    layout.schedule = plain.schedule, layout.sequence_parallel = layout.tensor_overlap = false;
    layout.recompute = plain.recompute, layout.recompute_options = {}, layout.offload = {};
    layout.overlap = plain.overlap, layout.bucket_bytes = 0, layout.collective_algorithm = plain.collective_algorithm;
    train.seq_len = train.global_batch_tokens = 0;
    train.micro_batch = train.grad_accumulation = 1;
    train.precision = Train().precision;
    analytic::clear_unpriced(train);
  }
  std::string profile;
  BackendKind backend;
  AttentionBy attention;
  bool canonical;
  Model model;
  Layout layout;
  Train train;
  friend bool operator==(const Rest&, const Rest&) = default;
};

}  // namespace

struct AnalyticCaseRunner::Study {
  Rest rest;  ///< of its cases
  Machine machine;
  analytic::Prepared prepared;
  analytic::Estimator estimator;
};

AnalyticCaseRunner::AnalyticCaseRunner() = default;
AnalyticCaseRunner::~AnalyticCaseRunner() = default;

Prediction prediction_of(const analytic::Estimate& e) {
  Prediction p;
  p.step_s = e.step_s;
  p.compute_s = e.part(TimePart::kForward) + e.part(TimePart::kBackward) + e.part(TimePart::kRecompute) + e.part(TimePart::kUpdate);
  p.exposed_comm_s = e.part(TimePart::kTensorParallel) + e.part(TimePart::kContextParallel) + e.part(TimePart::kExpertParallel) +
                     e.part(TimePart::kDataParallel) + e.sends_s;
  p.bubble_fraction = e.step_s > 0 ? e.bubble_s() / e.step_s : 0;
  p.parts.compute_s = e.part(TimePart::kForward) + e.part(TimePart::kBackward);
  p.parts.recompute_s = e.part(TimePart::kRecompute), p.parts.update_s = e.part(TimePart::kUpdate);
  p.parts.tensor_s = e.part(TimePart::kTensorParallel), p.parts.context_s = e.part(TimePart::kContextParallel);
  p.parts.expert_s = e.part(TimePart::kExpertParallel), p.parts.data_s = e.part(TimePart::kDataParallel);
  p.parts.pipeline_s = e.sends_s, p.parts.bubble_s = e.bubble_s(), p.parts.launch_s = e.part(TimePart::kLaunch);
  p.peak_bytes = e.memory.live();
  p.arena_bytes = e.memory.reserved();
  p.wire_bytes = std::llround(e.wire_total());
  const auto at = [&](BufferClass c) -> int64_t& { return p.memory.bytes[static_cast<size_t>(c)]; };
  at(BufferClass::kParameter) = e.memory[MemoryPart::kParameters];
  at(BufferClass::kGradient) = e.memory[MemoryPart::kGradients];
  at(BufferClass::kMaster) = e.memory[MemoryPart::kMaster];
  at(BufferClass::kMoment) = e.memory[MemoryPart::kMoments];
  at(BufferClass::kActivation) = e.memory[MemoryPart::kActivations];
  at(BufferClass::kTemporary) = e.memory[MemoryPart::kTransient] + e.memory[MemoryPart::kLogits];
  at(BufferClass::kBuffer) = e.memory[MemoryPart::kBuckets] + e.memory[MemoryPart::kGathered];
  at(BufferClass::kWorkspace) = e.memory[MemoryPart::kWorkspace];
  p.extrapolated = e.transferred;
  return p;
}

Result<AnalyticCaseRunner::Study*> AnalyticCaseRunner::study_of(const Case& config, const analytic::ModelShape& shape) {
  Rest rest(config);
  for (size_t i = studies_.size(); i-- > 0;) {  // the last is the likeliest
    Study& study = *studies_[i];
    if (study.prepared.shape() != shape || study.rest != rest || !same(study.machine, config.machine)) continue;
    std::rotate(studies_.begin() + static_cast<std::ptrdiff_t>(i), studies_.begin() + static_cast<std::ptrdiff_t>(i) + 1,
                studies_.end());
    return studies_.back().get();
  }
  auto prepared = analytic::prepare(config, shape);
  if (!prepared.ok()) return prepared.error();
  if (studies_.size() == kMostStudies) studies_.erase(studies_.begin());
  studies_.push_back(std::make_unique<Study>(Study{std::move(rest), config.machine, *prepared, analytic::Estimator(*prepared)}));
  return studies_.back().get();
}

Result<AnalyticCaseRunner::Estimated> AnalyticCaseRunner::estimate_of(const sweeps::Point& said,
                                                                      const analytic::ModelShape& shape) {
  const auto study = study_of(said.config, shape);
  if (!study.ok()) return study.error();
  const auto point = estimated_layout(said);
  if (!point.ok()) return point.error();
  if (const auto legal = explain((*study)->prepared, *point); !legal.ok()) return legal.error();
  return Estimated{*study, *point, (*study)->estimator(*point)};
}

Result<AnalyticCaseRunner::Predicted> AnalyticCaseRunner::estimated(const sweeps::Point& said, const analytic::ModelShape& shape) {
  const auto made = estimate_of(said, shape);
  if (!made.ok()) return made.error();
  const analytic::Estimate& estimate = made->estimate;
  Predicted predicted{prediction_of(estimate), estimate.memory.device()};
  if (shape != analytic::shape_of(said.config.model)) predicted.figures.model_flops = estimate.model_flops;
  const auto routing = routing_of(said.config);
  if (!routing.ok()) return routing.error();
  add_routing(said.config, *routing, predicted.figures);
  return predicted;
}

Result<AnalyticCaseRunner::Predicted> AnalyticCaseRunner::planned(const sweeps::Point& said, const analytic::ModelShape& shape) {
  const auto config = decide(said.config);
  if (!config.ok()) return config.error();
  const auto routing = routing_of(*config);
  if (!routing.ok()) return routing.error();
  const auto plan = CasePlan::of(*config, lower_unverified);
  if (!plan.ok()) return plan.error();
  if (config->machine.local) {  // its ranks share cores, which segments do not know
    sweeps::Point placed = said;
    placed.config.layout.expert_placement = config->layout.expert_placement;
    auto p = estimated(placed, shape);
    if (!p.ok()) return p.error();
    const Prediction bytes = plan->bytes();
    Prediction& figures = p->figures;
    figures.peak_bytes = figures.arena_bytes = p->device_bytes = bytes.peak_bytes, figures.wire_bytes = bytes.wire_bytes;
    figures.memory = bytes.memory, figures.host_memory = bytes.host_memory, figures.nvme_memory = bytes.nvme_memory;
    return p;
  }
  SHARDLAB_TRY(check_runnable(plan->plan()));
  const auto costs = cost_model_for(*config);
  if (!costs.ok()) return costs.error();
  const auto profile = analytic::profile_named(config->profile);
  if (!profile.ok()) return profile.error();
  Predicted p{plan->predict(*config, **costs, *routing)};
  p.figures.arena_bytes = p.figures.peak_bytes;
  p.device_bytes = p.figures.peak_bytes + static_cast<int64_t>(profile->memory.context);
  // A mixed machine holds each stage to its own device: what it allocates there is the peak and the context.
  for (StageNeed& stage : p.figures.stages) stage.arena_bytes = stage.peak_bytes + static_cast<int64_t>(profile->memory.context);
  return p;
}

std::optional<analytic::Between> AnalyticCaseRunner::step_between(const sweeps::Point& said, double step_s) {
  constexpr double kSame = 1e-9;  // of the step
  const analytic::ModelShape shape = model_shape(said);
  if (said.config.profile == "shardlab" || !check(shape).ok()) return std::nullopt;
  const std::lock_guard lock(mutex_);
  const auto made = estimate_of(said, shape);
  if (!made.ok() || std::abs(made->estimate.step_s - step_s) > kSame * step_s) return std::nullopt;
  return analytic::step_between(made->study->prepared, made->point, made->estimate);
}

CaseOutcome AnalyticCaseRunner::run(const sweeps::Point& said, Mode) {
  const Case& config = said.config;
  const analytic::ModelShape shape = model_shape(said);
  const std::lock_guard lock(mutex_);
  CaseOutcome outcome;
  outcome.config = config;
  if (const auto checked = check(shape); !checked.ok()) return refused(std::move(outcome), checked.error());
  outcome.parameters = parameter_count(shape);
  const bool own = config.profile == "shardlab" && shape == analytic::shape_of(config.model);
  const auto predicted = own ? planned(said, shape) : estimated(said, shape);
  if (!predicted.ok()) return refused(std::move(outcome), predicted.error());
  outcome.predicted = predicted->figures;
  int64_t need = predicted->device_bytes, have = memory_per_rank(config);
  std::string whose = "a rank", device = config.machine.id;
  if (const std::vector<StageNeed>& stages = predicted->figures.stages; !stages.empty()) {
    const auto lacking = stage_that_lacks(stages);
    if (!lacking) return outcome;
    const StageNeed& stage = stages[static_cast<size_t>(*lacking)];
    need = stage.arena_bytes, have = stage.capacity_bytes, device = stage.device;
    whose = fmt::format("a rank of stage {}", *lacking);
  }
  if (have <= 0 || need <= have) return outcome;
  outcome.status = Status::kOom;
  const std::string live = bytes_text(predicted->figures.peak_bytes), all = bytes_text(need);
  outcome.reason =
      fmt::format("does not fit: {} needs {}{} and may use {} of {}", whose, all,
                  live == all || !predicted->figures.stages.empty() ? "" : fmt::format(", of which {} are live,", live),
                  bytes_text(have), device);
  outcome.reason += fmt::format("; `shardlab memory --profile {}` with this layout says what to change", config.profile);
  return outcome;
}

BatchSink::BatchSink(RunDirectory& directory, std::string version)
    : directory_(directory),
      version_(std::move(version)),
      maker_(directory.store().defaults()),
      is_large_(directory.is_large()),
      writer_([this] { work(); }) {}

BatchSink::~BatchSink() {
  {
    const std::lock_guard lock(mutex_);
    ended_ = true;
  }
  changed_.notify_all();
  writer_.join();
}

std::optional<CaseOutcome> BatchSink::recorded(std::string_view id, std::string_view version) const {
  const std::lock_guard lock(of_directory_);
  return directory_.store().recorded(id, version);
}

void BatchSink::append(const CaseOutcome& outcome) {
  constexpr size_t kMost = 2048;
  if (outcome.program_version.empty()) {
    CaseOutcome named = outcome;
    named.program_version = version_;
    return append(named);
  }
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return waiting_.size() < kMost || failed_; });
  tell_failure();
  if (is_large_)
    maker_.add(outcome, waiting_.rows);
  else
    waiting_.outcomes.push_back(outcome);
  if (waiting_.size() == kBatch) changed_.notify_all();
}

void BatchSink::flush() {
  std::unique_lock lock(mutex_);
  asked_ = true;
  changed_.notify_all();
  changed_.wait(lock, [&] { return !asked_ || failed_; });
  tell_failure();
}

void BatchSink::tell_failure() {
  if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
}

void BatchSink::work() {
  constexpr std::chrono::milliseconds kPeriod(500);
  Batch batch;
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait_for(lock, kPeriod, [&] { return asked_ || ended_ || waiting_.size() >= kBatch; });
    batch.outcomes.clear(), batch.rows.clear();
    std::swap(batch, waiting_);
    const bool all = asked_ || ended_ || batch.size() < kBatch, last = ended_;
    const bool asked = asked_;
    changed_.notify_all();
    lock.unlock();
    std::exception_ptr failure;
    try {
      save(batch, all);
    } catch (...) { failure = std::current_exception(); }
    lock.lock();
    if (failure) failure_ = failure, failed_ = true;
    is_large_ = directory_.is_large();  // only this thread lets the directory grow
    if (asked) asked_ = false;
    changed_.notify_all();
    if (failed_ || last) return;
  }
}

void BatchSink::save(const Batch& batch, bool all) {
  const std::lock_guard lock(of_directory_);
  if (!batch.outcomes.empty()) directory_.append(batch.outcomes);
  if (batch.rows.size() > 0) directory_.add(batch.rows);
  if (all) directory_.save();
}

void SparseProgress::finished(const CaseOutcome&, const Progress& p) {
  constexpr double kPeriod = 2;
  if (p.elapsed_s - told_ < kPeriod) return;
  told_ = p.elapsed_s;
  fmt::print(stderr, "[{}/{}] {} ok, {} refused, {} do not fit{}\n", p.done, p.total, p.ok, p.refused, p.oom,
             p.remaining_s ? fmt::format(", {} left", seconds_text(*p.remaining_s)) : "");
}

}  // namespace shardlab::cases
