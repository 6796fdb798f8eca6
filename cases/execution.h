// What a plan is executed on: back end, transport and recorder, and whatever these stand on.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cases/namespaces.h"
#include "plan/base/result.h"
#include "plan/case.h"
#include "plan/outcome.h"
#include "plan/trace.h"
#include "runtime/session.h"

namespace shardlab::cases {

/// What the words of a case ask for.
struct ExecutionOptions {
  BackendKind backend = BackendKind::kCpu;
  TransportKind transport = TransportKind::kThreads;
  bool canonical = false;
  int threads_per_rank = 1;
  AttentionBy attention = AttentionBy::kOwn;  ///< of a GPU
  bool tf32 = false;                          ///< of a GPU
  int64_t events_per_stream = 0;              ///< room for the recorder of a CPU run; 0: nothing is recorded
  Control* control = nullptr;                 ///< the processes that the ranks are shared out to; none: this one has all
  double timeout_s = 300;                     ///< the longest that processes wait for one another
  Transport* beside = nullptr;  ///< of a session in whose arenas the ranks lie, and which outlives this; none: it has its own
};

/// Are the ranks in several processes?
constexpr bool is_between_processes(TransportKind transport) {
  return transport == TransportKind::kProcesses || transport == TransportKind::kTcp || transport == TransportKind::kGloo ||
         transport == TransportKind::kMpi;
}

/// The file that knows Gloo: what SHARDLAB_GLOO names, else beside the program or, of an installed one, in PREFIX/libexec/shardlab.
std::string gloo_file();
/// The files of MPI to be tried: of the library whose launcher has started this process first, or what SHARDLAB_MPI names alone.
std::vector<std::string> mpi_files();

/// What holds memory: this process, or the devices.
struct MemoryReading {
  int64_t now = 0, peak = 0;
};

/// Outlives the session that runs on it. Over several processes each has one; all make the same calls in the same order, and what
/// they give is of all processes.
class Execution {
 public:
  /// Refuses (ExitCode::kEnvironment, with the remedy) what this machine lacks.
  static Result<std::unique_ptr<Execution>> create(const PlacedPlan& placed, const ExecutionOptions& options);
  virtual ~Execution() = default;

  /// Names the recorder, and on a device the tracer, to the session.
  virtual void attach(RunOptions& options) = 0;
  virtual Transport& transport() = 0;
  virtual BackendFactory backends() = 0;

  /// Nothing is recorded while off. Off at first.
  virtual void set_recording(bool on) = 0;
  /// What was recorded.
  virtual Trace take() = 0;
  /// Joules since `set_recording(true)`, where they can be read.
  virtual std::optional<double> joules() = 0;
  virtual MemoryReading memory() const = 0;
  /// `memory` before this execution took any.
  virtual MemoryReading memory_before() const = 0;
  /// What was taken beyond the `planned` bytes of the arenas, by what takes it, where that can be told apart: then it adds up to
  /// what `memory` has grown by, less `planned`. As of the last `memory`.
  virtual std::vector<MemoryItem> unplanned(int64_t planned) const = 0;
  /// Whether `memory` has the arenas of host space in it.
  virtual bool memory_is_host() const = 0;
  /// The kernels, and on a GPU the device, as results name them; and how times were taken, where that needs saying.
  virtual std::string description() const = 0;
};

/// Whether a case with this back end can be executed on this machine at all: says why not, and what to do.
Result<void> check_backend(BackendKind backend);

}  // namespace shardlab::cases
