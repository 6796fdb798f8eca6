// A sweep whose cases run on processes of a job that something else has started (cli/placement.h): the first process drives the sweep,
// the others start their part of each case when it says so.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cases/job_place.h"
#include "cases/namespaces.h"
#include "runtime/control.h"

namespace shardlab::cases {

/// A case as the first process describes it to the others, who may not see its files.
struct CaseOrder {
  std::string case_id, config, machine;  ///< texts of case.yaml and machine.yaml
  std::string server, token;             ///< where the processes of the case meet
  double timeout_s = 0;
  bool traces = false;
};

/// How one process's part of a case ended.
struct SeatEnd {
  int status = 0;   ///< as waitpid(2) has it
  std::string log;  ///< the end of what it printed
};

/// The other processes, as the first one sees them. One thread calls.
class Seats {
 public:
  /// Listens at the placement's master, whose rank is 0, and waits for the others to join, each at most `join_s`. Throws WorldError
  /// where they do not come, or later where one is lost.
  Seats(const JobPlace& placement, double join_s);
  /// Lets the others end.
  ~Seats();

  int processes() const { return control_->processes(); }
  /// The host at which the others reach this process.
  const std::string& host() const { return host_; }
  /// Every other process starts its part; each start is followed by one `collect`. `group` is the case's: it is told where a process
  /// of the job is lost meanwhile.
  void start(const CaseOrder& order, ControlServer& group);
  /// How each part has ended, by process; nothing of the first. Waits.
  std::vector<SeatEnd> collect();

 private:
  const std::string host_;
  ControlServer server_;
  std::unique_ptr<Control> control_;
  std::optional<int> listener_;
};

/// The life of another process of the job: starts its part of every case that the first process orders, in a folder of its own under
/// the system's temporary one, until that ends. `program` is this executable. Throws WorldError where the first process is lost.
Result<ExitCode> follow(const JobPlace& placement, const std::string& program, double join_s);

/// How long processes of a job wait for one another to begin, seconds.
inline constexpr double kJoin_s = 300;

}  // namespace shardlab::cases
