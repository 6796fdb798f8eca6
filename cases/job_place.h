// This process's place in a job that torchrun, Slurm, Open MPI or a shell has started: which process of how many, where, and where
// the first one can be reached.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "cases/namespaces.h"
#include "plan/base/result.h"
#include "runtime/socket.h"

namespace shardlab::cases {

struct JobPlace {
  int rank = 0, world_size = 1;  ///< of processes; each may hold several ranks of a case
  int local_rank = -1;           ///< on its node; -1: not known
  int node = -1;                 ///< -1: not known
  int nodes = -1;                ///< -1: not known
  bool together = false;         ///< all processes are known to be on one node
  Endpoint master;               ///< where the first process listens
  std::string token;             ///< what a process must know to join; of a job that has no secret: its name
  std::string by;                ///< "Slurm (SLURM_PROCID)"
};
/// "process 2 of 4, local rank 0, node 1 of 2, first process at node-1:29500, by Slurm (SLURM_PROCID)".
std::string to_string(const JobPlace& placement);

/// The same from the command line; what is not given is below 0 or empty.
struct JobPlaceFlags {
  int rank = -1, world_size = -1, local_rank = -1, node = -1, master_port = -1;
  std::string master_addr;
  bool any() const { return rank >= 0 || world_size >= 0; }
};
/// The flags that say the same as `placement`.
std::vector<std::string> words_of(const JobPlace& placement);

/// The value of an environment variable; null where it is not set.
using Environment = std::function<const char*(const char*)>;
/// This process's own.
Environment process_environment();

/// What flags say, else the environment: torchrun's variables, then Open MPI's, Slurm's (of a step, not of a batch script), and those
/// of PMI and PMIx. Nothing where no one says a rank and a world size. Refuses (ExitCode::kUsage) what is no number, a rank that is
/// not below the world size, and several processes of which nobody says where the first one is.
Result<std::optional<JobPlace>> find_job_place(const JobPlaceFlags& flags, const Environment& environment);

}  // namespace shardlab::cases
