// A case that lost a process goes on from its newest checkpoint: what the next attempt is, with fewer data-parallel ranks if asked.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>

#include "cases/case_process.h"
#include "cases/namespaces.h"
#include "plan/base/result.h"
#include "plan/case.h"

namespace shardlab::cases {

/// The next attempt at a case.
struct Attempt {
  Case config;
  ProcessShare share;
  std::string from;  ///< in words: "from step 12", "from the beginning", and the layout where it is another
};

/// The case with fewer data-parallel ranks: the most that `ranks` in all leave, in processes of `ranks_each`, at least `least`, of which
/// the micro-batches of a step give each as many. grad_accumulation rises so that the global batch stays; one rank alone has zero 0,
/// and the same state. Refuses where there is none, with what each number of ranks lacks.
Result<Case> with_fewer_ranks(const Case& config, int ranks, int ranks_each, int least);

/// The measure block of a run of `left` steps, at least one, that ends where `whole` ended: blocks are timed from the end on, and what is
/// no whole block is warm-up. Where less than a block is left, all of it is timed.
Measure with_steps_left(Measure whole, int64_t left);

/// Plans the attempts at one case. Checkpoints that its folder had before the first attempt do not count: they may be of another run.
class Restarter {
 public:
  /// `config` is the first attempt, which saves in `folder` where it saves at all. A relative `folder` begins at the working directory;
  /// attempts name checkpoints by absolute paths, since the file of a case reads relative ones from its own folder.
  Restarter(const Case& config, const std::string& folder);

  /// The attempt after `last`, which lost `lost` of `processes` processes. It begins from the newest whole checkpoint that an attempt has
  /// written and that leaves a step to train, or where the first attempt began. `restarts` says whether ranks of lost processes are missed:
  /// a case in one process has as many as before. Refuses what `with_fewer_ranks` refuses, and fewer ranks for compressed gradients, whose
  /// errors each rank keeps for itself.
  Result<Attempt> next(const Case& last, const ProcessShare& share, int processes, int lost, const Restarts& restarts) const;

 private:
  using Written = std::map<std::string, std::filesystem::file_time_type>;
  static Written manifests_in(const std::string& folder);

  Case first_;
  std::string folder_;
  Written before_;     ///< manifests that were there, with their times
  int64_t begin_ = 0;  ///< optimizer steps that are done when the first attempt begins
};

}  // namespace shardlab::cases
