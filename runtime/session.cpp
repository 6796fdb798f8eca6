#include "runtime/session.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <functional>
#include <new>
#include <set>
#include <thread>

#include "kernels/initialise.h"
#include "plan/base/check.h"
#include "plan/named_kernels.h"
#include "plan/optimizers.h"
#include "plan/run_state.h"
#include "plan/runnable.h"
#include "runtime/core_scheduler.h"
#include "runtime/parameter_servers.h"
#include "runtime/rank.h"
#include "runtime/shared_memory.h"
#include "runtime/values.h"

namespace shardlab::runtime {

namespace {

constexpr const char* kValue = "value";
constexpr const char* kMaster = "master";

/// The ranks of this process, a thread for each of their streams. The caller's thread only starts rounds and waits for them: a
/// round is something that every task does once, of which a step is the most frequent.
class ThreadSession final : public Session {
 public:
  ThreadSession(const PlacedPlan& placed, const RunOptions& options) : placed_(placed), plan_(*placed.plan), options_(options) {
    if (options_.clock == nullptr) options_.clock = options_.scheduler != nullptr ? &options_.scheduler->clock() : &steady_clock_;
  }
  ~ThreadSession() override;

  Result<void> build(Transport& transport, const BackendFactory& backends, const BatchSource* source);

  bool leads() const override { return options_.control == nullptr || options_.control->process() == 0; }
  void take_arena() override {
    run_round([](Rank& rank, int stream, Task&) {
      if (stream == 0) rank.take_arena();
    });
  }
  void initialise_parameters() override;
  StepResult step(int64_t step) override;
  std::vector<StepResult> run(int64_t first, int64_t count) override;
  std::span<const ArrivalLog> arrivals() const override {
    return servers_ == nullptr ? std::span<const ArrivalLog>() : servers_->log();
  }
  std::optional<StalenessFigures> staleness() const override {
    return servers_ == nullptr ? std::nullopt : std::optional(servers_->staleness());
  }
  void cancel(const std::string& reason) override { crew_->fail(reason); }
  Result<std::vector<float>> read_buffer(int rank, std::string_view buffer) const override;
  Result<LogicalTensor> gather_buffer(std::string_view buffer) const override;
  Result<LogicalTensor> parameter(std::string_view name) const override;
  Result<void> set_parameter(std::string_view name, const LogicalTensor& value) override;
  Result<std::vector<StateName>> states() const override;
  Result<LogicalTensor> state(const StateName& name) const override;
  Result<void> set_state(const StateName& name, const LogicalTensor& value) override;
  const Ledger& ledger(int rank) const override {
    const Member& member = members_[static_cast<size_t>(rank)];
    return member.local != nullptr ? member.local->ledger() : reports_[static_cast<size_t>(rank)].ledger;
  }
  int64_t arena_bytes(int rank, Space space) const override {
    const int role = plan_.mesh.role_of(members_[static_cast<size_t>(rank)].at);
    return placed_.arenas[static_cast<size_t>(role)].bytes[static_cast<size_t>(space)];
  }
  std::optional<bool> direct_storage() const override {
    std::optional<bool> direct;
    for (const auto& rank : ranks_)
      if (const BlockStore* store = rank->store()) direct = direct.value_or(true) && store->direct();
    return direct;
  }
  std::span<const int64_t> sent_by_comm(int rank) const override {
    const Member& member = members_[static_cast<size_t>(rank)];
    return member.local != nullptr ? member.local->sent_by_comm() : reports_[static_cast<size_t>(rank)].sent_by_comm;
  }

 private:
  /// A rank of the plan, wherever it runs.
  struct Member {
    int number = 0;
    const Role* role = nullptr;
    Coordinates at;
    Rank* local = nullptr;  ///< none: of another process
  };
  /// What a rank tells of a step.
  struct Report {
    double end = 0;  ///< seconds from the common start
    std::vector<std::optional<double>> losses;
    std::optional<double> grad_norm2;
    std::vector<int64_t> sent_by_comm;
    std::vector<int64_t> expert_rows;  ///< as Rank::expert_rows
    Ledger ledger;
  };
  using Round = std::function<void(Rank&, int stream, Task&)>;
  /// A run of elements of a tensor's local part, and where a rank keeps them.
  struct Piece {
    BufferId buffer;
    int64_t at = 0;            ///< in the buffer
    int64_t begin = 0, n = 0;  ///< in the local part
  };
  /// What one rank holds of a tensor: all of its local part, or, of a bucket's shard, some.
  struct Holding {
    const Type* type = nullptr;  ///< of the local part
    std::vector<Piece> pieces;
    const ExpertPlacement* placement = nullptr;  ///< of the experts that dim 0 counts; null: in order, or no experts
  };
  using Pick = std::function<Holding(const Member&)>;
  class PieceReader;

  std::unique_ptr<Scheduler> make_scheduler() const;
  void start_crew();
  void share_seats();
  Control::Known on_failure(const GroupFailure& failure);
  std::vector<std::string> gather_texts(std::string_view own) const;
  void collect_reports();
  std::vector<ExpertRows> rows_of_experts() const;
  std::vector<StepResult> run_apart(int64_t first, int64_t count);
  void run_round(const Round& round);
  std::string describe_seat(const TaskSeat& seat) const;
  Holding holding_of(const Member& rank, int32_t parameter, std::string_view part) const;
  /// The copy that the optimizer updates, where there is one: all bits of the value.
  Holding best_of(const Member& rank, int32_t parameter) const {
    Holding master = holding_of(rank, parameter, kMaster);
    return master.type != nullptr ? master : holding_of(rank, parameter, kValue);
  }
  Result<void> give(int32_t parameter, std::string_view part, const LogicalTensor& value);
  Result<void> give_run_state(std::string_view buffer, const LogicalTensor& value);
  Result<LogicalTensor> rank_state(std::string_view buffer) const;
  Result<void> give_rank_state(std::string_view buffer, const LogicalTensor& value);
  std::optional<double> run_number(std::string_view buffer) const { return number_of(*ranks_.front(), buffer); }
  std::optional<double> number_of(const Rank& rank, std::string_view buffer) const;
  std::optional<Fault> find_fault(const StepResult& step) const;
  std::optional<Fault> find_local_fault(const StepResult& step) const;
  std::string bad_gradient(const Rank& rank, int number) const;
  const Member& member_of(const Rank& rank) const { return members_[static_cast<size_t>(rank.number())]; }
  bool has_storage() const { return ranks_.front()->backend().has_storage(); }
  std::vector<float> read_piece(const Rank& rank, const Piece& piece) const;
  void write_piece(Rank& rank, const Piece& piece, const float* values) const;
  Result<int32_t> parameter_named(std::string_view name) const;
  Result<LogicalTensor> gather(std::string_view what, const Pick& pick) const;

  const PlacedPlan& placed_;
  const Plan& plan_;
  RunOptions options_;
  SteadyClock steady_clock_;
  std::unique_ptr<Scheduler> own_scheduler_;
  Transport* transport_ = nullptr;
  std::vector<std::unique_ptr<Rank>> ranks_;  ///< of this process
  std::vector<Member> members_;               ///< by rank
  std::vector<Report> reports_;               ///< by rank, of the last step
  std::vector<RowCounting> counting_;         ///< by role
  std::optional<SharedMemory> seats_;         ///< of the tasks, where there are several processes: those here, and what others show
  std::optional<int> listener_;
  std::unique_ptr<ParameterServers> servers_;  ///< of workers that run apart; else none
  std::unique_ptr<Crew> crew_;
  Counter start_, done_;  ///< rounds started; rounds completed, over all tasks
  uint64_t rounds_ = 0;
  const Round* round_ = nullptr;  ///< the one under way; none ends the tasks
  StepFrame frame_;
};

/// A buffer that lies where the operand does, by name.
std::string gradient_name(const Role& role, const Operand& operand) {
  for (const Buffer& b : role.buffers) {
    if (b.kind != BufferClass::kGradient || !(b.type.shape == operand.type->shape)) continue;
    int64_t offset = 0;
    const Buffer* root = &b;
    for (; root->view; root = &role.buffers[static_cast<size_t>(root->view->base)])
      offset += bytes_of(root->type.dtype, root->view->offset);
    if (root == &role.buffers[operand.root.index()] && offset == operand.offset) return b.name;
  }
  return role.buffers[operand.root.index()].name;
}

// ---- tasks and rounds

Result<void> ThreadSession::build(Transport& transport, const BackendFactory& backends, const BatchSource* source) {
  transport_ = &transport;
  RunOptions of_ranks = options_;
  of_ranks.replay.clear();  // theirs is a copy each
  const auto here = local_ranks(plan_.mesh.world_size(), options_.control);
  if (!here.ok()) return here.error();
  const auto* beside = dynamic_cast<const ThreadSession*>(options_.beside);
  SHARDLAB_CHECK(options_.beside == nullptr || beside != nullptr, "a session beside one that is not of this kind");
  for (int r = 0; r < plan_.mesh.world_size(); ++r) {
    const Coordinates at = plan_.mesh.coordinates(r);
    members_.push_back({r, &plan_.roles[static_cast<size_t>(plan_.mesh.role_of(at))], at, nullptr});
    if (r < here->first || r >= here->first + here->count) continue;
    const Rank* other = beside == nullptr ? nullptr : beside->members_[static_cast<size_t>(r)].local;
    std::array<std::byte*, kSpaces> storage{};
    for (size_t s = 0; s < storage.size(); ++s) {
      const auto space = static_cast<Space>(s);
      storage[s] = other != nullptr ? other->arena().at(space, 0) : transport.storage(r, space);
    }
    ranks_.push_back(std::make_unique<Rank>(placed_, r, of_ranks, backends(r), storage, other));
    members_.back().local = ranks_.back().get();
  }
  reports_.resize(members_.size());
  for (size_t i = 0; i < plan_.roles.size(); ++i)
    counting_.emplace_back(plan_, plan_.roles[i], placed_.programs[i], options_.rows_together);
  for (const auto& rank : ranks_) SHARDLAB_TRY(rank->bind(transport, source));
  if (options_.staleness >= 0 && options_.control != nullptr && options_.control->processes() > 1)
    return Error{ExitCode::kUsage,
                 "workers that run apart in several processes: their servers take gradients as they come, within one",
                 "use transport: threads", ""};
  if (options_.staleness >= 0) {
    auto servers = ParameterServers::create(placed_, ranks_, options_);
    if (!servers.ok()) return servers.error();
    servers_ = std::move(*servers);
  }
  start_crew();
  run_round([](Rank& rank, int stream, Task&) { rank.enter(stream); });
  if (options_.control != nullptr) options_.control->barrier();
  return {};
}

/// Cores are handed from task to task where there are too few of them. Not so where the tasks only issue work to a device, nor
/// where a launch has threads of its own, which would be bound to the core of the task that made them.
std::unique_ptr<Scheduler> ThreadSession::make_scheduler() const {
  int tasks = 0;
  bool has_cores = true;
  for (const auto& rank : ranks_) {
    tasks += static_cast<int>(rank->streams().size());
    has_cores = has_cores && rank->backend().device() == nullptr && rank->backend().threads() == 1;
  }
  std::vector<int> processors = usable_processors();
  // Counters that processes share wake whoever sleeps on them, and nobody else: there the operating system hands out the cores.
  const bool alone = options_.control == nullptr || options_.control->processes() == 1;
  if (!alone) tasks *= options_.control->processes();
  if (has_cores && alone && tasks > std::ssize(processors))
    return std::make_unique<CoreScheduler>(*options_.clock, std::move(processors));
  return std::make_unique<ThreadScheduler>(*options_.clock, tasks, static_cast<int>(processors.size()));
}

void ThreadSession::start_crew() {
  Scheduler* scheduler = options_.scheduler;
  if (scheduler == nullptr) {
    own_scheduler_ = make_scheduler();
    scheduler = own_scheduler_.get();
  }
  crew_ = std::make_unique<Crew>(*scheduler, options_.timeout_s, [this](const TaskSeat& seat) { return describe_seat(seat); });
  if (options_.control != nullptr)
    share_seats();
  else
    for (const auto& rank : ranks_)
      for (const int stream : rank->streams()) crew_->add(rank->number(), stream);
  crew_->start([this](Task& task) {
    Rank& rank = *members_[static_cast<size_t>(task.rank())].local;
    for (uint64_t round = 1;; ++round) {
      task.wait(start_, round, {WaitCause::Kind::kStart});
      const Round* work = round_;  // read once: it belongs to the next round as soon as `done_` advances
      if (work != nullptr) (*work)(rank, task.stream(), task);
      done_.advance();
      if (work == nullptr) return;
    }
  });
  if (options_.watch != nullptr) options_.watch->enter(*crew_);
  if (options_.control != nullptr)
    listener_ = options_.control->listen([this](const GroupFailure& failure) { return on_failure(failure); });
}

/// Takes seats where the other processes of this machine see them, and looks at theirs. A block is a number of seats and the seats.
void ThreadSession::share_seats() {
  constexpr size_t kHead = 64;
  static_assert(alignof(TaskSeat) <= kHead);
  int64_t tasks = 0;
  for (const auto& rank : ranks_) tasks += std::ssize(rank->streams());
  seats_.emplace(static_cast<int64_t>(kHead + static_cast<size_t>(tasks) * sizeof(TaskSeat)));
  std::memcpy(seats_->own().data(), &tasks, sizeof tasks);
  std::byte* at = seats_->own().data() + kHead;
  for (const auto& rank : ranks_)
    for (const int stream : rank->streams()) {
      crew_->add(*new (at) TaskSeat(rank->number(), stream));
      at += sizeof(TaskSeat);
    }
  seats_->exchange(*options_.control);
  std::vector<const TaskSeat*> others;
  for (int p = 0; p < options_.control->processes(); ++p) {
    const std::span<std::byte> block = seats_->of(p);
    if (p == options_.control->process() || block.empty()) continue;
    int64_t n = 0;
    std::memcpy(&n, block.data(), sizeof n);
    for (int64_t i = 0; i < n; ++i)
      others.push_back(
          std::launder(reinterpret_cast<const TaskSeat*>(block.data() + kHead + static_cast<size_t>(i) * sizeof(TaskSeat))));
  }
  crew_->observe(others);
}

/// Ends the round under way. Of what no process has said, the text says who was at what. Ranks out of reach cannot be looked at: of them
/// it says where the ranks here wait for them.
Control::Known ThreadSession::on_failure(const GroupFailure& failure) {
  using Kind = GroupFailure::Kind;
  if (failure.kind == Kind::kSaid) {
    crew_->fail(failure.message, failure.hint);
    return {};
  }
  const bool seen = failure.kind == Kind::kSilent || (failure.kind == Kind::kGone && !seats_->of(failure.process).empty());
  const int ranks_of_process = static_cast<int>(std::ssize(ranks_));
  Control::Known known;
  if (seen) {
    int32_t gone = 0;
    if (failure.kind == Kind::kGone)
      for (const TaskSeat* seat : crew_->seats())
        if (seat->rank() / ranks_of_process == failure.process) gone = seat->process();
    const std::vector<Crew::Place> before = crew_->places();
    constexpr std::chrono::milliseconds kLook(300);
    if (failure.kind == Kind::kSilent) std::this_thread::sleep_for(kLook);
    known.text = crew_->standstill(before, gone);
    if (known.text.starts_with("rank ")) known.knows = GroupFailure::Knows::kOp;
  } else {
    const int first = failure.process * ranks_of_process;
    known.text = crew_->awaited(first, ranks_of_process);
    if (!known.text.empty()) {
      known.knows = GroupFailure::Knows::kOp;
    } else if (std::ranges::all_of(crew_->tasks(),
                                   [](const auto& task) { return task->cause().kind == WaitCause::Kind::kStart; })) {
      known.text = ranks_of_process == 1
                       ? fmt::format("rank {} is waited for between steps", first)
                       : fmt::format("ranks {}-{} are waited for between steps", first, first + ranks_of_process - 1);
      known.knows = GroupFailure::Knows::kRank;
    } else {
      known.text = crew_->standstill(crew_->places());
    }
  }
  crew_->fail(known.text.empty() ? failure.message : failure.message + ": " + known.text, failure.hint);
  return known;
}

void ThreadSession::run_round(const Round& round) {
  crew_->throw_if_failed();
  round_ = &round;
  ++rounds_;
  start_.advance();
  crew_->scheduler().drive(*crew_, done_, rounds_ * crew_->tasks().size());
  if (crew_->failed()) {
    transport_->abort();
    crew_->join();  // `round` must outlive its users
    try {
      crew_->throw_if_failed();
    } catch (const WorldError& failure) {
      if (options_.control != nullptr) options_.control->fail(failure.what(), failure.hint());
      throw;
    }
  }
  SHARDLAB_CHECK(done_.value() == rounds_ * crew_->tasks().size(), "a round ended with {} of {} tasks done",
                 done_.value() - (rounds_ - 1) * crew_->tasks().size(), crew_->tasks().size());
}

ThreadSession::~ThreadSession() {
  if (crew_ == nullptr) return;
  if (listener_) options_.control->leave(*listener_);
  if (!crew_->failed()) {
    round_ = nullptr;
    start_.advance();
    crew_->scheduler().drive(*crew_, done_, (rounds_ + 1) * crew_->tasks().size());
  }
  crew_->join();
  if (options_.watch != nullptr) options_.watch->leave(*crew_);
}

std::string ThreadSession::describe_seat(const TaskSeat& seat) const {
  const std::string& stream = plan_.streams[static_cast<size_t>(seat.stream())];
  const int32_t id = seat.instruction();
  if (id < 0) return fmt::format("stream {} between instructions", stream);
  const auto role = static_cast<size_t>(plan_.mesh.role_of(plan_.mesh.coordinates(seat.rank())));
  return fmt::format("stream {} op #{} `{}`", stream, id,
                     describe(plan_, placed_.programs[role].instructions[static_cast<size_t>(id)]));
}

std::vector<StepResult> ThreadSession::run(int64_t first, int64_t count) {
  if (servers_ != nullptr) return run_apart(first, count);
  std::vector<StepResult> results;
  for (int64_t step = first; step < first + count; step += plan_.period) results.push_back(this->step(step));
  return results;
}

/// Losses are parts of the mean over all targets, one a worker.
std::vector<StepResult> ThreadSession::run_apart(int64_t first, int64_t count) {
  crew_->throw_if_failed();
  for (const auto& rank : ranks_) rank->reset();
  servers_->begin(first, count, frame_.number);
  const double begin = options_.clock->now();
  run_round([this](Rank& rank, int stream, Task& task) { servers_->run(rank, stream, task); });
  const double seconds = (options_.clock->now() - begin) / static_cast<double>(count);
  int64_t sent = 0;  // every step sends the same
  for (const auto& rank : ranks_)
    for (const int64_t bytes : rank->sent_by_comm()) sent += bytes;
  std::vector<StepResult> results(static_cast<size_t>(count));
  for (size_t k = 0; k < results.size(); ++k) {
    StepResult& result = results[k];
    result.seconds = seconds;
    result.sent_bytes = sent / count;
    for (size_t r = 0; r < ranks_.size(); ++r) {
      const ParameterServers::WorkerStep& own = servers_->steps()[r][k];
      result.loss_by_rank.push_back(own.loss);
      if (own.loss) result.loss = result.loss.value_or(0) + *own.loss;
      result.interval_by_rank.push_back({0, own.seconds});
      if (options_.recorder != nullptr)
        options_.recorder->record_step(frame_.number + static_cast<int32_t>(k), static_cast<int>(r), 0, own.seconds);
    }
    result.losses = {result.loss};
  }
  frame_.number += static_cast<int32_t>(count);
  return results;
}

StepResult ThreadSession::step(int64_t step) {
  if (servers_ != nullptr) return run_apart(step, 1).front();
  crew_->throw_if_failed();
  for (const auto& rank : ranks_) rank->reset();
  const int64_t applied = static_cast<int64_t>(run_number(kAppliedSteps).value_or(static_cast<double>(step)));
  frame_.states.clear();
  for (int64_t i = 0; i < plan_.period; ++i)
    frame_.states.push_back({step + i, applied + i, learning_rate_at(options_.learning_rate, applied + i)});
  frame_.begin = options_.clock->now();
  for (const auto& rank : ranks_) rank->mark_begin();
  if (options_.tracer != nullptr) options_.tracer->begin_step(frame_.number, frame_.begin, options_.clock->now() - frame_.begin);
  run_round([this](Rank& rank, int stream, Task& task) { rank.run(stream, frame_, task); });
  for (const auto& rank : ranks_) {
    rank->report_times(frame_.number);
    rank->count_rows_of_step();
  }

  collect_reports();

  StepResult result;
  result.losses.resize(frame_.states.size());
  for (size_t r = 0; r < reports_.size(); ++r) {
    const Report& report = reports_[r];
    result.loss_by_rank.push_back(report.losses.back());
    if (!result.loss) result.loss = result.loss_by_rank.back();
    for (size_t i = 0; i < result.losses.size(); ++i)
      if (auto& loss = result.losses[i]; !loss) loss = report.losses[i];
    if (!result.grad_norm2) result.grad_norm2 = report.grad_norm2;
    result.interval_by_rank.push_back({0, report.end});
    result.seconds = std::max(result.seconds, report.end);
    for (const int64_t bytes : report.sent_by_comm) result.sent_bytes += bytes;
    if (options_.recorder != nullptr) options_.recorder->record_step(frame_.number, static_cast<int>(r), 0, report.end);
  }
  result.rolled_back = run_number(kRolledBack).value_or(0) != 0;
  result.overflowed = run_number(kOverflowed).value_or(0) != 0;
  result.skipped = !result.rolled_back && run_number(kAppliedSteps) == static_cast<double>(applied);
  if (result.skipped) result.fault = find_fault(result);
  result.experts = rows_of_experts();
  result.loss_scale = run_number(kLossScaleBuffer);
  ++frame_.number;
  return result;
}

std::vector<std::string> ThreadSession::gather_texts(std::string_view own) const {
  if (options_.control == nullptr) return {std::string(own)};
  return options_.control->gather(own);
}

/// What every rank tells of the step, in every process.
void ThreadSession::collect_reports() {
  static_assert(std::is_trivially_copyable_v<Ledger>);
  std::string own;
  for (const auto& rank : ranks_) {
    put(own, rank->end_of_step());
    for (int i = 0; i < plan_.period; ++i) put(own, rank->metric(Rank::kLoss, i));
    put(own, rank->metric(Rank::kGradNorm2, plan_.period - 1));
    for (const int64_t bytes : rank->sent_by_comm()) put(own, bytes);
    put(own, static_cast<int64_t>(rank->expert_rows().size()));
    for (const int64_t rows : rank->expert_rows()) put(own, rows);
    put(own, rank->ledger());
  }
  auto report = reports_.begin();
  for (const std::string& said : gather_texts(own))
    for (Taking from(said); !from.done(); ++report) {
      SHARDLAB_CHECK(report != reports_.end(), "more ranks have told of a step than there are");
      report->end = from.take<double>();
      report->losses.resize(static_cast<size_t>(plan_.period));
      for (auto& loss : report->losses) loss = from.take<std::optional<double>>();
      report->grad_norm2 = from.take<std::optional<double>>();
      report->sent_by_comm.resize(plan_.comms.size());
      for (int64_t& bytes : report->sent_by_comm) bytes = from.take<int64_t>();
      report->expert_rows.resize(static_cast<size_t>(from.take<int64_t>()));
      for (int64_t& rows : report->expert_rows) rows = from.take<int64_t>();
      report->ledger = from.take<Ledger>();
    }
}

std::vector<ExpertRows> ThreadSession::rows_of_experts() const {
  std::vector<RankRows> ranks;
  for (const Member& member : members_) {
    const std::span<const int64_t> rows = reports_[static_cast<size_t>(member.number)].expert_rows;
    if (rows.empty()) continue;
    for (const CountedLayer& layer : counting_[static_cast<size_t>(plan_.mesh.role_of(member.at))].layers())
      ranks.push_back({member.at, layer, rows.subspan(layer.first, layer.numbers())});
  }
  return expert_rows(plan_.mesh, ranks);
}

/// A number that lives on, of one rank; none where the plan keeps no such number or the back end no values. Those of the run are
/// the same on every rank.
std::optional<double> ThreadSession::number_of(const Rank& rank, std::string_view buffer) const {
  const auto id = rank.find(buffer);
  if (!id || !rank.persistent(*id) || !rank.backend().has_storage()) return std::nullopt;
  return read_piece(rank, {*id, 0, 0, 1}).front();
}

/// What the guard's verdicts, which live on from the step, say of why it was skipped.
/// Those of an infinity or a NaN come first, as they do within a process.
std::optional<Fault> ThreadSession::find_fault(const StepResult& step) const {
  const auto own = find_local_fault(step);
  std::string text;
  if (own) put(text, own->kind), text += own->text;
  std::optional<Fault> first;
  for (const std::string& said : gather_texts(text)) {
    if (said.empty()) continue;
    Taking from(said);
    const auto kind = from.take<Fault::Kind>();
    if (!first || (kind == Fault::Kind::kNonfinite && first->kind != kind)) first = Fault{kind, said.substr(sizeof kind)};
  }
  return first;
}

std::optional<Fault> ThreadSession::find_local_fault(const StepResult& step) const {
  for (const auto& rank : ranks_)
    if (const double where = number_of(*rank, "guard.where").value_or(0); where > 0)
      return Fault{Fault::Kind::kNonfinite, fmt::format("rank {} has an infinity or a NaN in {}", rank->number(),
                                                        bad_gradient(*rank, static_cast<int>(where)))};
  for (const auto& [what, value] : {std::pair{"loss", step.loss.value_or(0)}, {"norm", std::sqrt(step.grad_norm2.value_or(0))}})
    for (const auto& rank : ranks_) {
      const std::string name = fmt::format("guard.{}", what);
      if (number_of(*rank, name + ".spike").value_or(0) == 0) continue;
      const bool is_loss = what == std::string_view("loss");
      return Fault{Fault::Kind::kSpike, fmt::format("rank {}: the {} is {:.6g}, and its running mean {:.6g}", rank->number(),
                                                    is_loss ? "loss" : "gradient norm", value, *number_of(*rank, name + ".mean"))};
    }
  return std::nullopt;
}

/// The gradient that is the `number`-th (from 1) that the rank's guard reads.
std::string ThreadSession::bad_gradient(const Rank& rank, int number) const {
  const size_t role = static_cast<size_t>(&rank.role() - plan_.roles.data());
  const Program& program = placed_.programs[role];
  for (const Instruction& i : program.instructions) {
    if (i.kind != Instruction::Kind::kRun) continue;
    const auto* kernel = std::get_if<Kernel>(&i.op->work);
    if (kernel == nullptr || meaning_of(*kernel) != KernelMeaning::kOverflow || program.writes(i).size() != 2) continue;
    const Operand& bad = program.reads(i)[static_cast<size_t>(number - 1)];
    return gradient_name(rank.role(), bad);
  }
  return "a gradient";
}

// ---- state

/// Which part of its parameters' state a buffer holds; empty for buffers of other classes.
std::string_view part_of(const Buffer& buffer) {
  if (buffer.kind == BufferClass::kParameter) return kValue;
  if (buffer.kind == BufferClass::kMaster) return kMaster;
  if (buffer.kind != BufferClass::kMoment) return {};
  const std::string_view name = buffer.name;  // "layer3.attn.wqkv.m", "bucket2.value.shard.v"
  return name.substr(name.rfind('.') + 1);
}

/// The placement of the experts that dim 0 of a parameter counts; null: they lie in order, or it counts none.
const ExpertPlacement* placement_of_parameter(const Plan& plan, int32_t parameter) {
  if (parameter < 0) return nullptr;
  const auto layer = layer_of_expert_weight(plan.parameters[static_cast<size_t>(parameter)].name);
  return layer ? placement_of(plan.expert_placement, *layer) : nullptr;
}

/// A rank's part of a parameter's state: the buffer that is all of it, or what its slices of packed buffers hold of it.
ThreadSession::Holding ThreadSession::holding_of(const Member& rank, int32_t parameter, std::string_view part) const {
  const Shape logical = logical_shape(plan_.parameters[static_cast<size_t>(parameter)].type, plan_.mesh);
  const auto& buffers = rank.role->buffers;
  const ExpertPlacement* placement = placement_of_parameter(plan_, parameter);
  const auto is_whole = [&](const Buffer& b) {
    return b.parameter == parameter && b.type.shape.rank == logical.rank && logical_shape(b.type, plan_.mesh) == logical;
  };
  for (size_t i = 0; i < buffers.size(); ++i) {
    const BufferId id(static_cast<int32_t>(i));
    if (part_of(buffers[i]) == part && is_whole(buffers[i]) && outlives_step(*rank.role, id))
      return {&buffers[i].type, {{id, 0, 0, buffers[i].type.shape.elements()}}, placement};
  }
  Holding holding{.placement = placement};
  for (size_t i = 0; i < buffers.size(); ++i) {
    const Buffer& slice = buffers[i];
    if (part_of(slice) != part || slice.packed_as < 0 || !slice.persistent || slice.view) continue;
    const int64_t n = slice.type.shape.elements(), begin = logical_origin(slice.type, plan_.mesh, rank.at)[0];
    for (const Buffer& value : buffers) {
      const bool holds_values = value.kind == BufferClass::kParameter || value.kind == BufferClass::kBuffer;
      if (!holds_values || !value.view || value.view->base != slice.packed_as || !is_whole(value)) continue;
      holding.type = &value.type;
      const int64_t offset = value.view->offset, from = std::max(begin, offset),
                    to = std::min(begin + n, offset + value.type.shape.elements());
      if (from < to) holding.pieces.push_back({BufferId(static_cast<int32_t>(i)), from - begin, from - offset, to - from});
    }
  }
  return holding;
}

/// The elements of a piece, widened.
std::vector<float> ThreadSession::read_piece(const Rank& rank, const Piece& piece) const {
  const DType dtype = rank.role().buffers[piece.buffer.index()].type.dtype;
  std::vector<std::byte> raw(static_cast<size_t>(bytes_of(dtype, piece.n)));
  rank.read(piece.buffer, bytes_of(dtype, piece.at), raw);
  return read_values(raw.data(), dtype, piece.n);
}

/// Stores values in a piece, rounded to nearest even where its type is narrower.
void ThreadSession::write_piece(Rank& rank, const Piece& piece, const float* values) const {
  const DType dtype = rank.role().buffers[piece.buffer.index()].type.dtype;
  std::vector<std::byte> raw(static_cast<size_t>(bytes_of(dtype, piece.n)));
  write_values({values, static_cast<size_t>(piece.n)}, dtype, raw.data());
  rank.write(piece.buffer, bytes_of(dtype, piece.at), raw);
}

void ThreadSession::initialise_parameters() {
  run_round([this](Rank& rank, int stream, Task&) {
    if (stream != 0 || !rank.backend().has_storage()) return;
    // The thread of a rank on the processor is bound to a core; those of ranks on a GPU may use all of them.
    const int threads = std::max(1, static_cast<int>(usable_processors().size() / ranks_.size()));
    for (size_t p = 0; p < plan_.parameters.size(); ++p)
      for (const char* part : {kValue, kMaster}) {
        const Holding holding = holding_of(member_of(rank), static_cast<int32_t>(p), part);
        if (holding.pieces.empty()) continue;
        const Parameter& parameter = plan_.parameters[p];
        const Type& type = *holding.type;
        std::vector<float> values(static_cast<size_t>(type.shape.elements()), parameter.initial == Initial::kOnes ? 1.0f : 0.0f);
        if (parameter.initial != Initial::kNormal) {
          for (const Piece& piece : holding.pieces) write_piece(rank, piece, values.data() + piece.begin);
          continue;
        }
        const Shape shape = logical_shape(type, plan_.mesh), origin = logical_origin(type, plan_.mesh, rank.coordinates());
        const auto dims = [&](const Shape& s) { return std::span(s.extent).first(static_cast<size_t>(s.rank)); };
        const auto draw = [&](const Shape& from, const Shape& extent, float* to) {
          kernels::initialise_normal({.shape = dims(shape),
                                      .origin = std::span(from.extent).first(static_cast<size_t>(shape.rank)),
                                      .extent = dims(extent),
                                      .deviation = parameter.deviation,
                                      .key = {options_.seed, RandomUse::kInitialise, parameter.tensor, 0},
                                      .values = to,
                                      .threads = threads});
        };
        if (holding.placement == nullptr) {
          draw(origin, type.shape, values.data());
        } else {  // expert by expert
          Shape from = origin, one = type.shape;
          one.extent[0] = 1;
          for (int64_t place = 0; place < type.shape[0]; ++place) {
            from.extent[0] = holding.placement->experts[static_cast<size_t>(origin[0] + place)];
            draw(from, one, values.data() + place * one.elements());
          }
        }
        for (const Piece& piece : holding.pieces) write_piece(rank, piece, values.data() + piece.begin);
      }
  });
}

/// Calls `visit(logical index, local index, run length)` for each contiguous run of a rank's part of a logical tensor, of which
/// only the local elements in [begin, end) are looked at. Dim 0 has experts by `placement` (null: in order).
template <class Visit>
void for_each_run(const Type& type, const ExpertPlacement* placement, const Mesh& mesh, const Coordinates& at, int64_t begin,
                  int64_t end, const Visit& visit) {
  const Shape shape = logical_shape(type, mesh), origin = logical_origin(type, mesh, at);
  const int rank = shape.rank;
  const int64_t run = rank == 0 ? 1 : type.shape.last();
  std::array<int64_t, 4> index{};
  for (int64_t local = 0; local < type.shape.elements(); local += run) {
    int64_t logical = 0;
    for (int d = 0; d < rank; ++d) {
      const int64_t place = origin[d] + index[static_cast<size_t>(d)];
      logical = logical * shape[d] + (d == 0 && placement != nullptr ? placement->experts[static_cast<size_t>(place)] : place);
    }
    const int64_t from = std::max(local, begin), to = std::min(local + run, end);
    if (from < to) visit(logical + from - local, from, to - from);
    for (int d = rank - 2; d >= 0 && ++index[static_cast<size_t>(d)] == type.shape[d]; --d) index[static_cast<size_t>(d)] = 0;
  }
}

Error no_storage(std::string_view what) {
  return {ExitCode::kUsage, fmt::format("the dry back end holds no values, so `{}` has none", what), "use the cpu back end", ""};
}

/// Reads pieces of every rank in order, which every process does alike: those of its own where they lie, and of others what these
/// have sent.
class ThreadSession::PieceReader {
 public:
  PieceReader(const ThreadSession& session, const Pick& pick) : session_(session) {
    const Control* control = session.options_.control;
    if (control == nullptr || control->processes() == 1 || !session.has_storage()) return;
    std::string own;
    for (const auto& rank : session.ranks_)
      for (const Piece& piece : pick(session.member_of(*rank)).pieces) {
        const std::vector<float> values = session.read_piece(*rank, piece);
        own.append(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float));
      }
    texts_ = session.gather_texts(own);
    for (const std::string& text : texts_) of_processes_.emplace_back(text);
  }

  /// Of each rank each piece that its holding has, once.
  std::vector<float> next(const Member& rank, const Piece& piece) {
    if (of_processes_.empty()) return session_.read_piece(*rank.local, piece);
    std::vector<float> values(static_cast<size_t>(piece.n));
    Taking& from = of_processes_[static_cast<size_t>(rank.number) / session_.ranks_.size()];
    const std::string_view bytes = from.take_bytes(values.size() * sizeof(float));
    std::memcpy(values.data(), bytes.data(), bytes.size());
    return values;
  }

 private:
  const ThreadSession& session_;
  std::vector<std::string> texts_;
  std::vector<Taking> of_processes_;
};

Result<LogicalTensor> ThreadSession::gather(std::string_view what, const Pick& pick) const {
  LogicalTensor tensor;
  std::vector<int> writer;  ///< by logical element: the rank it was first taken from
  PieceReader reader(*this, pick);
  for (const Member& rank : members_) {
    const Holding holding = pick(rank);
    if (holding.type == nullptr) continue;
    if (!has_storage()) return no_storage(what);
    const Type& type = *holding.type;
    if ((!kernels::is_float_storage(type.dtype) && type.dtype != DType::i32 && type.dtype != DType::u8) ||
        !axes_placed(type, plan_.mesh, Place::kPartial).empty())
      return Error{ExitCode::kUsage, fmt::format("`{}` is no complete floating-point tensor", what), "read it by rank", ""};
    if (writer.empty()) {
      tensor.shape = logical_shape(type, plan_.mesh);
      tensor.values.resize(static_cast<size_t>(tensor.shape.elements()));
      writer.resize(tensor.values.size(), -1);
    }
    int differs_from = -1;
    for (const Piece& piece : holding.pieces) {
      const std::vector<float> values = reader.next(rank, piece);
      const float* local = values.data() - piece.begin;
      const auto take = [&](int64_t to, int64_t from, int64_t n) {
        for (int64_t i = 0; i < n; ++i) {
          const size_t e = static_cast<size_t>(to + i);
          if (writer[e] < 0) {
            tensor.values[e] = local[from + i];
            writer[e] = rank.number;
          } else if (std::memcmp(&tensor.values[e], &local[from + i], sizeof(float)) != 0) {
            differs_from = writer[e];
          }
        }
      };
      for_each_run(type, holding.placement, plan_.mesh, rank.at, piece.begin, piece.begin + piece.n, take);
    }
    if (differs_from >= 0)
      return Error{ExitCode::kBug,
                   fmt::format("`{}` differs between its replicas on ranks {} and {}", what, differs_from, rank.number),
                   "report this with the case", ""};
  }
  if (writer.empty()) return Error{ExitCode::kUsage, fmt::format("no rank has a persistent buffer for `{}`", what), "", ""};
  if (std::ranges::find(writer, -1) != writer.end())
    return Error{ExitCode::kBug, fmt::format("no rank holds some elements of `{}`", what), "report this with the case", ""};
  return tensor;
}

Result<std::vector<float>> ThreadSession::read_buffer(int rank, std::string_view name) const {
  const Member& r = members_[static_cast<size_t>(rank)];
  const auto id = find_buffer(*r.role, name);
  if (!id || !outlives_step(*r.role, *id))
    return Error{ExitCode::kUsage, fmt::format("rank {} has no persistent buffer called `{}`", rank, name), "", ""};
  if (!has_storage()) return no_storage(name);
  const Type& type = r.role->buffers[id->index()].type;
  if (!kernels::is_float_storage(type.dtype))
    return Error{ExitCode::kUsage, fmt::format("`{}` is {}, which is no floating-point type", name, name_of(type.dtype)), "", ""};
  const Piece all{*id, 0, 0, type.shape.elements()};
  return PieceReader(*this,
                     [&](const Member& m) {
                       return m.number == rank ? Holding{&type, {all}, nullptr} : Holding{};
                     })
      .next(r, all);
}

Result<LogicalTensor> ThreadSession::gather_buffer(std::string_view buffer) const {
  return gather(buffer, [&](const Member& rank) -> Holding {
    const auto id = find_buffer(*rank.role, buffer);
    if (!id || !outlives_step(*rank.role, *id)) return {};
    const Type& type = rank.role->buffers[id->index()].type;
    return {&type, {{*id, 0, 0, type.shape.elements()}}, placement_of_parameter(plan_, rank.role->buffers[id->index()].parameter)};
  });
}

Result<int32_t> ThreadSession::parameter_named(std::string_view name) const {
  const auto found = std::ranges::find(plan_.parameters, name, &Parameter::name);
  if (found == plan_.parameters.end())
    return Error{ExitCode::kUsage, fmt::format("the plan has no parameter called `{}`", name), "", ""};
  return static_cast<int32_t>(found - plan_.parameters.begin());
}

/// Whether a buffer is of the run: numbers that outlive the step and are the same on every rank.
bool is_run_state(const Buffer& buffer, const Mesh& mesh) {
  if (!buffer.persistent || buffer.view || buffer.kind != BufferClass::kOther || !names_run_state(buffer.name)) return false;
  return axes_placed(buffer.type, mesh, Place::kReplicate).size() == static_cast<int>(mesh.axes.size());
}

/// Whether a buffer outlives the step without being a parameter's state, the run's, or what each step writes anew.
bool is_other_state(const Buffer& buffer, const Mesh& mesh) {
  if (!buffer.persistent || buffer.view || is_run_state(buffer, mesh)) return false;
  if (buffer.kind == BufferClass::kMetric || buffer.kind == BufferClass::kWorkspace) return false;
  if (buffer.kind == BufferClass::kParameter) return false;  // its own, a slice, or the flat buffer that parameters are views of
  return part_of(buffer).empty() || (buffer.parameter < 0 && buffer.packed_as < 0);
}

/// Whether a buffer is what a rank keeps for itself: of no parameter, and of no other rank.
bool is_rank_state(const Buffer& buffer, const Mesh& mesh) {
  return (buffer.kind == BufferClass::kOther || is_block_state(buffer)) && is_other_state(buffer, mesh);
}

Result<std::vector<StateName>> ThreadSession::states() const {
  std::set<std::string, std::less<>> parts, of_run, of_ranks;
  for (const Role& role : plan_.roles)
    for (const Buffer& buffer : role.buffers) {
      if (is_run_state(buffer, plan_.mesh)) of_run.insert(buffer.name);
      if (is_rank_state(buffer, plan_.mesh)) of_ranks.insert(buffer.name);
      if (is_other_state(buffer, plan_.mesh) && !is_rank_state(buffer, plan_.mesh))
        return Error{
            ExitCode::kUsage,
            fmt::format("`{}` ({}) lives from step to step but belongs to no parameter", buffer.name, name_of(buffer.kind)),
            "what this strategy keeps cannot be saved: leave checkpoint out", ""};
      if (buffer.persistent && !part_of(buffer).empty()) parts.emplace(part_of(buffer));
    }
  std::vector<StateName> names;
  for (size_t p = 0; p < plan_.parameters.size(); ++p)
    for (const std::string& part : parts)
      if (std::ranges::any_of(members_,
                              [&](const Member& rank) { return holding_of(rank, static_cast<int32_t>(p), part).type != nullptr; }))
        names.push_back({plan_.parameters[p].name, part});
  for (const std::string& name : of_run) names.push_back({std::string(kRunState), name});
  for (const std::string& name : of_ranks) names.push_back({std::string(kRankState), name});
  return names;
}

Result<LogicalTensor> ThreadSession::state(const StateName& name) const {
  if (name.parameter == kRunState) return gather_buffer(name.part);
  if (name.parameter == kRankState) return rank_state(name.part);
  const auto p = parameter_named(name.parameter);
  if (!p.ok()) return p.error();
  return gather(name.part == kValue ? name.parameter : name.parameter + "." + name.part,
                [&](const Member& rank) { return holding_of(rank, *p, name.part); });
}

Result<LogicalTensor> ThreadSession::parameter(std::string_view name) const {
  const auto p = parameter_named(name);
  if (!p.ok()) return p.error();
  return gather(name, [&](const Member& rank) { return best_of(rank, *p); });
}

Result<void> ThreadSession::set_parameter(std::string_view name, const LogicalTensor& value) {
  const auto p = parameter_named(name);
  if (!p.ok()) return p.error();
  SHARDLAB_TRY(give(*p, kValue, value));
  return give(*p, kMaster, value);
}

Result<void> ThreadSession::set_state(const StateName& name, const LogicalTensor& value) {
  if (name.parameter == kRunState) return give_run_state(name.part, value);
  if (name.parameter == kRankState) return give_rank_state(name.part, value);
  const auto p = parameter_named(name.parameter);
  if (!p.ok()) return p.error();
  return give(*p, name.part, value);
}

Result<void> ThreadSession::give_run_state(std::string_view buffer, const LogicalTensor& value) {
  for (const auto& rank : ranks_) {
    const auto id = rank->find(buffer);
    if (!id) continue;
    const Type& type = rank->role().buffers[id->index()].type;
    if (!rank->backend().has_storage()) return no_storage(buffer);
    if (!(type.shape == value.shape))
      return Error{ExitCode::kUsage,
                   fmt::format("`{}` has {} elements in this plan, not {}", buffer, type.shape.elements(), value.shape.elements()),
                   "", ""};
    write_piece(*rank, {*id, 0, 0, type.shape.elements()}, value.values.data());
  }
  return {};
}

/// What each rank has in its buffer of that name, one rank after another.
Result<LogicalTensor> ThreadSession::rank_state(std::string_view buffer) const {
  const auto holding = [&](const Member& rank) -> Holding {
    const auto id = find_buffer(*rank.role, buffer);
    if (!id) return {};
    const Type& type = rank.role->buffers[id->index()].type;
    return {&type, {{*id, 0, 0, type.shape.elements()}}, nullptr};
  };
  LogicalTensor all;
  PieceReader reader(*this, holding);
  for (const Member& rank : members_)
    for (const Piece& piece : holding(rank).pieces) {
      if (!has_storage()) return no_storage(buffer);
      const auto values = reader.next(rank, piece);
      all.values.insert(all.values.end(), values.begin(), values.end());
    }
  all.shape = {std::ssize(all.values)};
  return all;
}

Result<void> ThreadSession::give_rank_state(std::string_view buffer, const LogicalTensor& value) {
  int64_t there = 0;
  for (const Member& rank : members_)
    if (const auto id = find_buffer(*rank.role, buffer)) there += rank.role->buffers[id->index()].type.shape.elements();
  if (there != std::ssize(value.values))
    return Error{ExitCode::kUsage,
                 fmt::format("`{}` has {} elements over the ranks of this plan, not {}", buffer, there, value.values.size()),
                 "resume under the layout that was saved: what each rank keeps for itself is not resharded", ""};
  const float* from = value.values.data();
  for (const Member& rank : members_) {
    const auto id = find_buffer(*rank.role, buffer);
    if (!id) continue;
    if (!has_storage()) return no_storage(buffer);
    const int64_t n = rank.role->buffers[id->index()].type.shape.elements();
    if (rank.local != nullptr) write_piece(*rank.local, {*id, 0, 0, n}, from);
    from += n;
  }
  return {};
}

/// Ranks that hold nothing of the part are left as they are.
Result<void> ThreadSession::give(int32_t parameter, std::string_view part, const LogicalTensor& value) {
  const Parameter& p = plan_.parameters[static_cast<size_t>(parameter)];
  const Shape want = logical_shape(p.type, plan_.mesh);
  if (!(want == value.shape))
    return Error{ExitCode::kUsage,
                 fmt::format("`{}` has {} elements in this plan, not {}", p.name, want.elements(), value.shape.elements()), "", ""};
  for (const auto& rank : ranks_) {
    const Holding holding = holding_of(member_of(*rank), parameter, part);
    if (holding.type == nullptr) continue;
    if (!rank->backend().has_storage()) return no_storage(p.name);
    for (const Piece& piece : holding.pieces) {
      std::vector<float> values(static_cast<size_t>(piece.n));
      for_each_run(*holding.type, holding.placement, plan_.mesh, rank->coordinates(), piece.begin, piece.begin + piece.n,
                   [&](int64_t from, int64_t to, int64_t n) {
                     std::copy_n(value.values.begin() + from, n, values.begin() + to - piece.begin);
                   });
      write_piece(*rank, piece, values.data());
    }
  }
  return {};
}

}  // namespace

Result<LocalRanks> local_ranks(int world_size, const Control* control) {
  if (control == nullptr) return LocalRanks{0, world_size};
  const int processes = control->processes();
  if (world_size % processes != 0)
    return Error{ExitCode::kUsage, fmt::format("{} ranks in {} processes, which cannot have as many each", world_size, processes),
                 "start a number of processes that divides dp * tp * pp * cp", ""};
  return LocalRanks{control->process() * (world_size / processes), world_size / processes};
}

Result<std::unique_ptr<Session>> Session::create(const PlacedPlan& placed, const RunOptions& options, Transport& transport,
                                                 const BackendFactory& backends, const BatchSource* source) {
  SHARDLAB_TRY(check_runnable(*placed.plan));
  auto session = std::make_unique<ThreadSession>(placed, options);
  SHARDLAB_TRY(session->build(transport, backends, source));
  return std::unique_ptr<Session>(std::move(session));
}

Result<void> copy_parameters(const Session& from, const Plan& plan, Session& to) {
  for (const Parameter& parameter : plan.parameters) {
    const auto value = from.parameter(parameter.name);
    if (!value.ok()) return value.error();
    SHARDLAB_TRY(to.set_parameter(parameter.name, *value));
  }
  // What forward reads beside them: the sizes by which factors of 8 bits are scaled.
  const auto names = to.states();
  if (!names.ok()) return {};
  for (const StateName& name : *names) {
    if (name.parameter != kRunState) continue;
    const auto value = from.state(name);
    if (!value.ok()) return value.error();
    SHARDLAB_TRY(to.set_state(name, *value));
  }
  return {};
}

}  // namespace shardlab::runtime
