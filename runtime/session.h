// Executes a plan: every rank a set of threads, one for each stream, each running its instruction list.
//
//   ThreadTransport transport(kernels);
//   auto session = Session::create(plan, {.seed = 1}, transport, cpu_backend(kernels, {}), data);
//   (*session)->initialise_parameters();
//   for (int64_t i = 0; i < 10; ++i) report((*session)->step(i).loss);
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "plan/base/result.h"
#include "plan/case.h"
#include "plan/device_tracer.h"
#include "plan/expert_rows.h"
#include "plan/interfaces.h"
#include "plan/memory.h"
#include "plan/placed_plan.h"
#include "plan/plan.h"
#include "plan/program.h"
#include "runtime/arena.h"
#include "runtime/arrivals.h"
#include "runtime/backend.h"
#include "runtime/block_store.h"
#include "runtime/control.h"
#include "runtime/crew.h"
#include "runtime/transport.h"
#include "runtime/watch.h"

namespace shardlab::runtime {

class Session;

struct RunOptions {
  uint64_t seed = 1;
  LearningRate learning_rate;
  double timeout_s = 300;          ///< the longest that any one wait may last
  bool poison = false;             ///< fill storage with NaNs while it is dead
  Recorder* recorder = nullptr;    ///< receives an event per instruction; none: no clock is read
  const Clock* clock = nullptr;    ///< none: this machine's
  Scheduler* scheduler = nullptr;  ///< none: the operating system's, or a CoreScheduler where tasks outnumber the cores
  std::string nvme_directory;      ///< where ranks make their files for NVMe space; empty: the current directory
  BlockStores block_stores;        ///< what stands for those files; none: `open_file_store`
  int staleness = -1;              ///< of a parameter server: steps that a worker may be ahead of the slowest; below 0: in step
  std::vector<ArrivalLog> replay;  ///< by server: arrivals to be repeated; none: gradients are applied as they come
  DeviceTracer* tracer = nullptr;  ///< told which op the work handed to a device belongs to; none: nobody is
  Watch* watch = nullptr;          ///< may be asked what the tasks are at; none: nobody asks
  Control* control = nullptr;      ///< the processes that the ranks are shared out to; none: all are in this one
  /// A session in whose arenas the ranks lie and whose state they go on from, of a plan that shares its arenas (plan/placed_plan.h). The two take
  /// turns by `take_arena`, and the other one outlives this. None: arenas of its own.
  const Session* beside = nullptr;
  int rows_together = 1;  ///< micro-batches that are one where rows of experts are counted (`RowCounting`)
};

/// Why the guard (strategies/guard.cpp) left an update out.
struct Fault {
  enum class Kind : uint8_t { kNonfinite, kSpike } kind = Kind::kNonfinite;
  std::string text;  ///< "rank 3 has an infinity or a NaN in layers.1.mlp.wup.grad"
};

/// The results of one period of the plan: of one step, or of all steps of the period.
struct StepResult {
  double seconds = 0;                         ///< from the common start to the end of the last rank
  std::optional<double> loss;                 ///< of the buffer named "loss", where a role has it; of a period's last step
  std::vector<std::optional<double>> losses;  ///< by step of the plan's period
  std::optional<double> grad_norm2;           ///< of the buffer named "grad_norm2"; of a period's last step
  std::vector<std::optional<double>> loss_by_rank;
  std::vector<std::array<double, 2>> interval_by_rank;  ///< begin and end, seconds from the common start
  int64_t sent_bytes = 0;                               ///< over all ranks, counted where they were sent
  bool skipped = false;                                 ///< the plan may leave an update out (plan/run_state.h), and did
  bool rolled_back = false;                             ///< the plan took all steps of its period back (kRolledBack)
  bool overflowed = false;     ///< more rows came to experts than there is room for (kOverflowed): nothing that is kept has changed
  std::optional<Fault> fault;  ///< of a skipped step, where the guard found one
  std::vector<ExpertRows> experts;   ///< by step of the period and layer with experts; empty where workers run apart
  std::optional<double> loss_scale;  ///< after the step, where the plan has one that lives on
};

/// A logical tensor put together from the ranks that hold it, row-major.
struct LogicalTensor {
  Shape shape;
  std::vector<float> values;
};

/// The name of state that is kept from step to step; no layout changes it.
struct StateName {
  std::string parameter;  ///< "layers.3.attn.wqkv", or `kRunState`, or `kRankState`
  std::string part;       ///< "value"; what optimizers keep beside it: "master", "m", "v". Of the run or ranks: the buffer's name
  friend auto operator<=>(const StateName&, const StateName&) = default;
};

/// Stands for a parameter's name: numbers that belong to no parameter, the same on every rank (plan/run_state.h).
inline constexpr std::string_view kRunState = "run";

/// Stands for a parameter's name: state that each rank keeps for itself (errors that are fed back, bases), by buffer.
inline constexpr std::string_view kRankState = "ranks";

/// The ranks of one process of a group: as many in each, in order.
struct LocalRanks {
  int first = 0, count = 0;
};
/// Refuses a number of processes that does not divide the ranks. `control` null: all are here.
Result<LocalRanks> local_ranks(int world_size, const Control* control);

/// One plan in execution, from the first step to the last. Steps run one after another; the ranks' threads live as long as the
/// session. After a failure the session can only be destroyed.
///
/// Over several processes each has a session of its own with its ranks, and all make the same calls in the same order: what a call
/// gives, of whichever rank, it gives to every process.
class Session {
 public:
  /// Binds every instruction of every rank. Refuses what no interpreter does (plan/runnable.h), an op that the back end lacks and a
  /// collective that the transport cannot carry out. `placed`, `transport` and `source` must outlive the session. `source` may be
  /// null when no op reads a batch.
  static Result<std::unique_ptr<Session>> create(const PlacedPlan& placed, const RunOptions& options, Transport& transport,
                                                 const BackendFactory& backends, const BatchSource* source);
  virtual ~Session() = default;

  /// Whether this process writes the files that are of all ranks.
  virtual bool leads() const = 0;
  /// Before a step, where two sessions share arenas and the other had the last one: what steps of this one write anew may be written.
  virtual void take_arena() = 0;
  /// Draws every parameter from the seed by logical element; moments and other persistent state start at zero.
  virtual void initialise_parameters() = 0;
  /// Runs optimizer step number `step`, or the period of the plan that begins with it: each of its steps has the data, the random
  /// numbers and the learning rate of its own number. Throws WorldError when a rank fails, a wait times out or the session was
  /// cancelled.
  virtual StepResult step(int64_t step) = 0;
  /// Runs optimizer steps `first` to `first + count - 1`, whole periods of the plan, one result each. With a staleness workers run
  /// apart between the first and the last: a step's seconds are then the mean over all, and its interval by rank is that of the
  /// worker's own step.
  virtual std::vector<StepResult> run(int64_t first, int64_t count) = 0;
  /// By server, from the session's first step on; empty where ranks run in step.
  virtual std::span<const ArrivalLog> arrivals() const = 0;
  virtual std::optional<StalenessFigures> staleness() const = 0;
  /// Ends the session from another thread: the running step throws WorldError with this reason.
  virtual void cancel(const std::string& reason) = 0;

  /// Values of a persistent buffer of one rank, of a floating-point storage type, widened. Between steps.
  virtual Result<std::vector<float>> read_buffer(int rank, std::string_view buffer) const = 0;
  /// A persistent buffer put together over the ranks by its type: shards in place, replicas compared. Refuses when two replicas
  /// differ in one bit, or when no rank has such a buffer.
  virtual Result<LogicalTensor> gather_buffer(std::string_view buffer) const = 0;
  /// The value of a parameter by its stable name, likewise; stages that both hold it (tied embeddings) are compared.
  virtual Result<LogicalTensor> parameter(std::string_view name) const = 0;
  /// Gives every rank its part of a parameter's value: how a validation plan or another layout takes over a model.
  virtual Result<void> set_parameter(std::string_view name, const LogicalTensor& value) = 0;

  /// All that a run needs to go on from here, by parameter as the plan lists them and then by part; last what is the run's, and
  /// what each rank keeps for itself, which no other layout could take up. Refuses a plan that keeps anything else from step to
  /// step, metrics aside.
  virtual Result<std::vector<StateName>> states() const = 0;
  /// One of `states`, put together over the ranks as `parameter` is.
  virtual Result<LogicalTensor> state(const StateName& name) const = 0;
  /// Gives every rank its part, as `set_parameter` does.
  virtual Result<void> set_state(const StateName& name, const LogicalTensor& value) = 0;

  /// The high-water mark of live buffers as the instructions ran, and what was live then.
  virtual const Ledger& ledger(int rank) const = 0;
  virtual int64_t arena_bytes(int rank, Space space) const = 0;
  /// Whether NVMe space is reached past the page cache; nothing where no rank has any.
  virtual std::optional<bool> direct_storage() const = 0;
  /// Bytes the rank sent in the last step, by CommId.
  virtual std::span<const int64_t> sent_by_comm(int rank) const = 0;
};

/// Copies every parameter from one session into another, whatever their layouts.
Result<void> copy_parameters(const Session& from, const Plan& plan, Session& to);

}  // namespace shardlab::runtime
