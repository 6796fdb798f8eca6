#include "cli/comm_measure.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>

#include "cases/execution.h"
#include "kernels/kernels.h"
#include "plan/automatic.h"
#include "plan/base/world_error.h"
#include "plan/collective_steps.h"
#include "runtime/core_scheduler.h"
#include "runtime/crew.h"
#include "runtime/session.h"

namespace shardlab::cli {
namespace {

constexpr int64_t kAligned = 4096;

/// What rank `rank` puts in element `i`: a small whole number, so that sums are exact in every order and type.
int64_t value_of(int rank, int64_t i) { return (rank * 5 + i * 7) % 11 + 1; }

/// A rank's memory: operand, result, and an element for the barrier.
struct Storage {
  std::byte* operand = nullptr;
  std::byte* result = nullptr;
  std::byte* flag = nullptr;
};

/// One rank's part of the measurement.
class RankMeasurement {
 public:
  RankMeasurement(const CommOptions& options, Communicator& comm, Task& task, Storage storage)
      : options_(options), comm_(comm), task_(task), storage_(storage) {}

  /// Rows with this rank's own seconds and wrong elements.
  std::vector<CommRow> run() {
    std::vector<CommRow> rows;
    for (const CollectiveKind kind : options_.kinds)
      for (double size = static_cast<double>(options_.min_bytes); size <= static_cast<double>(options_.max_bytes);
           size *= options_.factor)
        rows.push_back(row(kind, static_cast<int64_t>(std::llround(size))));
    return rows;
  }

 private:
  int64_t element_bytes() const { return bytes_of(options_.dtype, 1); }

  CommRow row(CollectiveKind kind, int64_t bytes) {
    CommRow row{kind, algorithm_among(options_.algorithm, kind, comm_.size())};
    row.elements = std::max<int64_t>(1, bytes / element_bytes());
    // As nccl-tests: every rank has as many elements of what is cut.
    if (kind != CollectiveKind::kAllReduce && kind != CollectiveKind::kBroadcast)
      row.elements = std::max<int64_t>(1, row.elements / comm_.size()) * comm_.size();
    row.bytes = row.elements * element_bytes();
    const bool scatters = kind == CollectiveKind::kReduceScatter && row.algorithm != Algorithm::kDirect;  // into its operand only
    if (!scatters) row.apart = time(row, call_of(row, true));
    if (kind != CollectiveKind::kAllToAll) row.in_place = time(row, call_of(row, false));
    return row;
  }

  CollectiveCall call_of(const CommRow& row, bool apart) const {
    CollectiveCall call{row.kind, options_.reduce, row.algorithm, options_.dtype, row.elements};
    call.per_node = options_.per_node;
    call.source = call.target = storage_.operand;
    const int64_t own = part_begin(row.elements, comm_.size(), comm_.index()) * element_bytes();
    if (row.kind == CollectiveKind::kReduceScatter) call.target = storage_.operand + own;
    if (row.kind == CollectiveKind::kAllGather) call.source = storage_.operand + own;
    if (apart) call.target = storage_.result;
    return call;
  }

  CommTime time(const CommRow& row, const CollectiveCall& call) {
    if (const auto able = comm_.prepare(call); !able.ok()) throw WorldError(able.error().message, able.error().hint);
    for (int i = 0; i < options_.warmup; ++i) comm_.collective(call, task_);
    barrier();
    const double begin = task_.now();
    for (int i = 0; i < options_.iterations; ++i) comm_.collective(call, task_);
    CommTime time{(task_.now() - begin) / options_.iterations, std::nullopt};
    if (!options_.check) return time;
    barrier();
    fill(row, comm_.index());
    barrier();
    comm_.collective(call, task_);
    barrier();  // nobody fills what another still reads
    time.wrong = wrong_of(row, static_cast<const std::byte*>(call.target));
    return time;
  }

  void barrier() {
    CollectiveCall call{CollectiveKind::kAllReduce, ReduceOp::kMax, Algorithm::kDirect, DType::i32, 1};
    call.source = call.target = storage_.flag;
    comm_.collective(call, task_);
  }

  template <class Visit>
  void with_type(const Visit& visit) const {
    switch (options_.dtype) {
      case DType::f64: return visit(double());
      case DType::i32: return visit(int32_t());
      case DType::i64: return visit(int64_t());
      default: return visit(float());
    }
  }

  void fill(const CommRow& row, int rank) {
    with_type([&](auto type) {
      auto* at = reinterpret_cast<decltype(type)*>(storage_.operand);
      for (int64_t i = 0; i < row.elements; ++i) at[i] = static_cast<decltype(type)>(value_of(rank, i));
    });
  }

  /// Elements of the result that are not what the collective means.
  int64_t wrong_of(const CommRow& row, const std::byte* result) const {
    const int n = comm_.size();
    const auto reduced = [&](int64_t i) {
      int64_t sum = 0, most = 0;
      for (int r = 0; r < n; ++r) sum += value_of(r, i), most = std::max(most, value_of(r, i));
      return options_.reduce == ReduceOp::kSum ? sum : most;
    };
    const int64_t part = row.elements / n, own = part_begin(row.elements, n, comm_.index());
    const auto expected = [&](int64_t i) {
      switch (row.kind) {
        case CollectiveKind::kAllReduce: return reduced(i);
        case CollectiveKind::kReduceScatter: return reduced(own + i);
        case CollectiveKind::kAllGather: return value_of(static_cast<int>(i / part), i);
        case CollectiveKind::kBroadcast: return value_of(0, i);
        case CollectiveKind::kAllToAll: return value_of(static_cast<int>(i / part), own + i % part);
      }
      return int64_t{0};
    };
    int64_t wrong = 0;
    const int64_t elements = row.kind == CollectiveKind::kReduceScatter ? part : row.elements;
    with_type([&](auto type) {
      const auto* at = reinterpret_cast<const decltype(type)*>(result);
      for (int64_t i = 0; i < elements; ++i) wrong += at[i] == static_cast<decltype(type)>(expected(i)) ? 0 : 1;
    });
    return wrong;
  }

  const CommOptions& options_;
  Communicator& comm_;
  Task& task_;
  const Storage storage_;
};

/// A plan with one communicator over all ranks and an arena that holds an operand, a result and a flag: what transports ask of one.
PlacedPlan plan_of(const CommOptions& options, int64_t buffer) {
  Plan plan;
  plan.name = "comm";
  plan.mesh.axes = {{"rank", options.ranks}};
  plan.comms = {{"all", AxisSet::of(0), {}}};
  plan.roles.resize(1);
  PlacedPlan placed;
  placed.plan = std::make_unique<const Plan>(std::move(plan));
  placed.arenas.resize(1);
  placed.arenas[0].bytes[static_cast<size_t>(Space::kDevice)] = 2 * buffer + kAligned;
  return placed;
}

/// Means over all ranks of what each has measured; sums of what was wrong.
std::vector<CommRow> together(std::vector<std::vector<CommRow>> by_rank, const CommOptions& options, Control* control) {
  std::vector<CommRow> rows = by_rank.front();
  const auto times = [](CommRow& row) { return std::array{&row.apart, &row.in_place}; };
  for (size_t r = 1; r < by_rank.size(); ++r)
    for (size_t i = 0; i < rows.size(); ++i)
      for (size_t k = 0; k < 2; ++k) {
        std::optional<CommTime>&sum = *times(rows[i])[k], &more = *times(by_rank[r][i])[k];
        if (!sum) continue;
        sum->seconds += more->seconds;
        if (sum->wrong) *sum->wrong += *more->wrong;
      }
  std::string own;
  for (CommRow& row : rows)
    for (std::optional<CommTime>* time : times(row))
      if (*time) put(own, (*time)->seconds), put(own, (*time)->wrong.value_or(0));
  const std::vector<std::string> all = control == nullptr ? std::vector{own} : control->gather(own);
  std::vector<Taking> from(all.begin(), all.end());
  for (CommRow& row : rows)
    for (std::optional<CommTime>* time : times(row)) {
      if (!*time) continue;
      double seconds = 0;
      int64_t wrong = 0;
      for (Taking& said : from) seconds += said.take<double>(), wrong += said.take<int64_t>();
      (*time)->seconds = seconds / options.ranks;
      if ((*time)->wrong) (*time)->wrong = wrong;
    }
  return rows;
}

}  // namespace

double algbw(int64_t bytes, double seconds) { return seconds > 0 ? static_cast<double>(bytes) / seconds : 0; }

double busbw(CollectiveKind kind, int ranks, int64_t bytes, double seconds) {
  const double others = static_cast<double>(ranks - 1) / ranks;
  const double factor = kind == CollectiveKind::kAllReduce ? 2 * others : kind == CollectiveKind::kBroadcast ? 1 : others;
  return algbw(bytes, seconds) * factor;
}

Result<std::vector<CommRow>> measure_comm(const CommOptions& options, Control* control) {
  const auto here = local_ranks(options.ranks, control);
  if (!here.ok()) return here.error();
  // A reduce_scatter or all_gather of a few bytes has an element of each rank all the same.
  const int64_t least = options.ranks * bytes_of(options.dtype, 1);
  const int64_t buffer = (std::max(options.max_bytes, least) + kAligned - 1) / kAligned * kAligned;
  const PlacedPlan placed = plan_of(options, buffer);
  ExecutionOptions wanted;
  wanted.transport = options.transport;
  wanted.control = control;
  wanted.timeout_s = options.timeout_s;
  auto execution = Execution::create(placed, wanted);
  if (!execution.ok()) return execution.error();
  Transport& transport = (*execution)->transport();

  const SteadyClock clock;
  ThreadScheduler scheduler(clock, options.ranks, static_cast<int>(usable_processors().size()));
  Crew crew(scheduler, options.timeout_s, [](const TaskSeat& seat) { return fmt::format("rank {}'s collective", seat.rank()); });
  for (int r = here->first; r < here->first + here->count; ++r) crew.add(r, 0);
  std::optional<int> listener;
  if (control != nullptr) {
    listener = control->listen([&](const GroupFailure& failure) {
      crew.fail(failure.message, failure.hint);
      return Control::Known{crew.situation()};
    });
    control->barrier();
  }
  std::vector<int> members(static_cast<size_t>(options.ranks));
  std::iota(members.begin(), members.end(), 0);
  std::vector<std::vector<CommRow>> by_rank(static_cast<size_t>(here->count));
  crew.start([&](Task& task) {
    std::vector<std::byte> own;
    std::byte* at = transport.storage(task.rank(), Space::kDevice);
    if (at == nullptr) {
      own.resize(static_cast<size_t>(2 * buffer + 2 * kAligned));
      at = own.data() + (kAligned - reinterpret_cast<intptr_t>(own.data()) % kAligned);
    }
    std::memset(at, 0, static_cast<size_t>(2 * buffer + kAligned));
    const auto comm = transport.join(task.rank(), CommId(0), members);
    by_rank[static_cast<size_t>(task.rank() - here->first)] =
        RankMeasurement(options, *comm, task, {at, at + buffer, at + 2 * buffer}).run();
  });
  crew.join();
  if (listener) control->leave(*listener);
  crew.throw_if_failed();
  return together(std::move(by_rank), options, control);
}

}  // namespace shardlab::cli
