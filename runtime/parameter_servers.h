// Workers that run apart: a parameter server with bounded staleness, carried out on the ranks of a plan.
//
// The plan says what a step is; how far the ranks may be from one another is said at run time (`RunOptions::staleness`), as the
// seed and the learning rate are. Of each rank two threads take part. The worker's runs the program in issue order, all but what is
// on stream "server". The server's runs what is on that stream, the update of its slice of each bucket, whenever gradients are due:
//
//   push   the worker offers every server its part of the bucket and goes on; the part stays where it is
//   due    with `clock` the number of steps that all workers have pushed: a gradient of step t is due once t < clock + s
//   update what is due is added up in the order of steps and workers, by the canonical tree, and is one update
//   pull   the worker waits until each server has applied its gradient, and takes the slice that this very update left
//
// So no worker begins a step more than s steps after the slowest has begun its own, and with s = 0 an update is always the
// gradients of one step of all workers: the synchronous parameter server, bit for bit. With s > 0 a gradient is applied as it
// arrives, together with what else has arrived by then; only those of a worker that is s steps ahead are held back. What the values
// of a worker are follows from which gradients each update applied and nothing else: the log.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "runtime/arrivals.h"
#include "runtime/counter.h"
#include "runtime/rank.h"
#include "runtime/session.h"

namespace shardlab::runtime {

/// The servers and workers of one session, one of each a rank.
class ParameterServers {
 public:
  /// Finds pushes, updates and pulls in the ranks' programs. Refuses a plan without them, and a log to be replayed that is another
  /// plan's. `ranks` must outlive it and be bound.
  static Result<std::unique_ptr<ParameterServers>> create(const PlacedPlan& placed, std::span<const std::unique_ptr<Rank>> ranks,
                                                          const RunOptions& options);

  /// Begins a round before the threads run: steps `first` to `first + count - 1`. `number` is the number of the first
  /// one in traces.
  void begin(int64_t first, int64_t count, int32_t number);
  /// One thread's part of these steps.
  void run(Rank& rank, int stream, Task& task);

  /// The results of a worker's step.
  struct WorkerStep {
    double seconds = 0;
    std::optional<double> loss;  ///< this worker's part of the mean over all targets
  };
  /// After the threads have run: by worker, then by step of the round.
  const std::vector<std::vector<WorkerStep>>& steps() const { return results_; }
  std::span<const ArrivalLog> log() const { return log_; }  ///< by server
  StalenessFigures staleness() const;

 private:
  /// The instructions of a bucket's push, update and pull in the program, which is the same on every rank.
  struct Bucket {
    int32_t push = -1, pull = -1;       ///< ids of instructions
    std::vector<size_t> update;         ///< on the server's stream: the update, and its rounding where it is rounded
    BufferId sum, served, pulled_from;  ///< roots of the buffers that are added up, updated and pulled
  };
  /// The state of one bucket on one server. Counts are of steps since the session began.
  struct Service {
    explicit Service(size_t workers) : offered(workers), released(workers), taken(workers), seen(workers) {}
    int64_t clock() const;          ///< steps that all workers have pushed
    std::vector<Counter> offered;   ///< by worker: gradients that wait for the server or have been applied
    std::vector<Counter> released;  ///< by worker: gradients that were applied
    std::vector<Counter> taken;     ///< by worker: values that it has taken since
    std::vector<int64_t> seen;      ///< by worker: updates made when it was last released
    int64_t gradients = 0;          ///< applied
    StalenessFigures figures;
  };
  /// The step that a worker is at, for the events of the server beside it.
  struct Progress {
    std::vector<double> begins;     ///< by step of the round
    std::atomic<int64_t> step{-1};  ///< of the round; -1 before and after
  };

  ParameterServers(const PlacedPlan& placed, std::span<const std::unique_ptr<Rank>> ranks, const RunOptions& options);
  Result<void> find_buckets();
  Result<void> check_replay() const;

  Service& service(int server, size_t bucket) { return *services_[static_cast<size_t>(server) * buckets_.size() + bucket]; }
  const Instruction& instruction(int32_t id) const { return program_.instructions[static_cast<size_t>(id)]; }
  const BoundInstruction& bound(int rank, int32_t id) const;

  void work(Rank& rank, Task& task);
  void push(Rank& rank, size_t bucket, const StepFrame& frame, Task& task);
  void pull(Rank& rank, size_t bucket, int64_t released, const StepFrame& frame, Task& task);
  void serve(Rank& rank, Task& task);
  bool all_taken(int server, size_t bucket);
  std::vector<Arrival> due(int server, size_t bucket);
  std::vector<Arrival> next_of_replay(int server, size_t bucket);
  void apply(Rank& rank, size_t bucket, const std::vector<Arrival>& arrivals, Task& task);
  StepFrame frame_of_server(int server) const;

  const PlacedPlan& placed_;
  const Program& program_;
  const std::span<const std::unique_ptr<Rank>> ranks_;
  const RunOptions options_;
  int stream_ = -1;  ///< "server"
  std::vector<Bucket> buckets_;
  std::vector<int> pushes_, pulls_;                 ///< by instruction id: which bucket's, or -1
  std::vector<std::unique_ptr<Service>> services_;  ///< by server, then bucket
  std::vector<Counter> news_;                       ///< by server: parts offered to it and taken from it
  std::vector<std::unique_ptr<Progress>> progress_;
  std::vector<ArrivalLog> log_;
  std::vector<std::vector<WorkerStep>> results_;
  int64_t first_ = 0, count_ = 0, done_ = 0;  ///< steps of the round; steps of the rounds before
  int32_t number_ = 0;
};

}  // namespace shardlab::runtime
