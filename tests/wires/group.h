// Groups of real processes in a test: forked, joined by a control plane, their ends collected.
#pragma once

#include <sys/types.h>

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "plan/case.h"
#include "runtime/control.h"
#include "runtime/session.h"
#include "tests/namespaces.h"

namespace shardlab::testing {

class Hosts;

/// How a group ended.
struct GroupEnd {
  std::vector<std::string> texts;  ///< by process: what its body returned; of one that failed, "failed: " and the message
  std::vector<int> statuses;       ///< by process, as waitpid(2) has them
  std::optional<GroupFailure> failure;
  double seconds = 0;   ///< from the moment when `meanwhile` returned to the last process's end
  int left_behind = 0;  ///< processes that the group's processes had started and that were still there after them
};

/// Runs `body` in each of `processes` forked processes, with `meanwhile` in this one. A process that has not ended after
/// `most_s` is killed, and its status says so. This process runs no kernels: their threads would not outlive a fork. With `hosts` each
/// process is on a host of its own, and the group's server on the first.
GroupEnd run_group(int processes, const std::function<std::string(Control&)>& body, double timeout_s = 60, double most_s = 120,
                   const std::function<void(const std::vector<pid_t>&)>& meanwhile = nullptr, Hosts* hosts = nullptr);

/// Whether a child of this process has ended; it stays to be waited for.
bool has_ended(pid_t child);

/// Jobs that a test has under way at once: their processes wait for one another and for time-outs most of their time.
inline constexpr int kAtOnce = 4;

/// What `job` returns for each of `jobs`, by job: each runs in a forked process of its own, `at_once` at a time. A process that ends
/// otherwise than by returning gives "ended by status S".
std::vector<std::string> in_processes(size_t jobs, int at_once, const std::function<std::string(size_t)>& job);

/// Whether this build knows Gloo.
bool gloo_is_built();

/// "threads", "processes", "tcp", "gloo" or, in a process that a launcher of MPI has started, "mpi" under one session's ranks.
std::unique_ptr<Transport> wire_named(const std::string& name, const kernels::Kernels& kernels, const PlacedPlan& placed,
                                      Control* control, double timeout_s);

}  // namespace shardlab::testing
