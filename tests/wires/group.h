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

/// How a group ended.
struct GroupEnd {
  std::vector<std::string> texts;  ///< by process: what its body returned; of one that failed, "failed: " and the message
  std::vector<int> statuses;       ///< by process, as waitpid(2) has them
  std::optional<GroupFailure> failure;
  double seconds = 0;  ///< from the moment when `meanwhile` returned to the last process's end
};

/// Runs `body` in each of `processes` forked processes, with `meanwhile` in this one. A process that has not ended after
/// `most_s` is killed, and its status says so. This process runs no kernels: their threads would not outlive a fork.
GroupEnd run_group(int processes, const std::function<std::string(Control&)>& body, double timeout_s = 60, double most_s = 120,
                   const std::function<void(const std::vector<pid_t>&)>& meanwhile = nullptr);

/// Whether this build knows Gloo.
bool gloo_is_built();

/// "threads", "processes", "tcp", "gloo" or, in a process that a launcher of MPI has started, "mpi" under one session's ranks.
std::unique_ptr<Transport> wire_named(const std::string& name, const kernels::Kernels& kernels, const PlacedPlan& placed,
                                      Control* control, double timeout_s);

}  // namespace shardlab::testing
