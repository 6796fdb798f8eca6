#include "cases/restart.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "cases/execution.h"
#include "plan/automatic.h"
#include "runtime/checkpoint.h"

namespace shardlab::cases {
namespace {

namespace fs = std::filesystem;

/// Optimizer steps of a run by its measure block.
int64_t steps_of(const Measure& m) { return m.warmup + m.steps * m.repeat; }

}  // namespace

Result<Case> with_fewer_ranks(const Case& config, int ranks, int ranks_each, int least) {
  const int others = config.layout.world_size() / config.layout.dp;  // of tp, pp and cp: ranks of one data-parallel rank
  const int64_t micro_batches = config.train.grad_accumulation * config.layout.dp;
  std::string why;
  for (int dp = std::min(config.layout.dp - 1, ranks / others); dp >= std::max(least, 1); --dp) {
    Case fewer = config;
    fewer.layout.dp = dp;
    fewer.train.grad_accumulation = micro_batches / dp;
    if (fewer.layout.data_ranks() == 1) fewer.layout.zero = 0;  // nothing is left to shard over
    if (config.layout.bucket_bytes == automatic_bucket_bytes(config)) fewer.layout.bucket_bytes = automatic_bucket_bytes(fewer);
    std::string lacks;
    if (micro_batches % dp != 0)
      lacks = fmt::format("does not divide the {} micro-batches of a step", micro_batches);
    else if (dp * others % ranks_each != 0)
      lacks = fmt::format("has {} ranks, which are no whole processes of {}", dp * others, ranks_each);
    else if (const auto legal = check(fewer); !legal.ok())
      lacks = legal.error().message;
    if (lacks.empty()) return fewer;
    why += fmt::format("{}dp {} {}", why.empty() ? "" : ", ", dp, lacks);
  }
  if (why.empty())
    why = others > ranks ? fmt::format("tp * pp * cp takes {} ranks", others)
                         : fmt::format("dp may not be below {}", std::max(least, 1));
  return Error{
      ExitCode::kUsage,
      fmt::format("no fewer than {} data-parallel ranks can go on with {} ranks: {}", config.layout.dp, ranks, why),
      "choose grad_accumulation so that its product with dp has more divisors, lower --least-dp, or restart without --elastic",
      {}};
}

Measure with_steps_left(Measure whole, int64_t left) {
  const int64_t timed = whole.steps * whole.repeat;
  if (left >= timed) {
    whole.warmup = left - timed;
  } else if (left >= whole.steps) {
    whole.repeat = left / whole.steps;
    whole.warmup = left % whole.steps;
  } else {
    whole.warmup = 0, whole.repeat = 1, whole.steps = left;
  }
  return whole;
}

Restarter::Written Restarter::manifests_in(const std::string& folder) {
  Written found;
  std::error_code error;
  for (auto it = fs::directory_iterator(folder, error); !error && it != fs::directory_iterator(); it.increment(error)) {
    if (it->path().extension() != ".manifest") continue;
    std::error_code gone;
    const auto time = fs::last_write_time(it->path(), gone);
    if (!gone) found[it->path().string()] = time;
  }
  return found;
}

Restarter::Restarter(const Case& config, const std::string& folder)
    : first_(config), folder_(fs::absolute(folder).lexically_normal()), before_(manifests_in(folder_)) {
  if (config.checkpoint.resume.empty()) return;
  if (const auto from = Checkpoint::open(config.checkpoint.resume); from.ok())
    begin_ = from->steps();  // else the attempt is refused
}

Result<Attempt> Restarter::next(const Case& last, const ProcessShare& share, int processes, int lost,
                                const Restarts& restarts) const {
  const int64_t end = begin_ + steps_of(first_.measure);
  std::optional<Checkpoint> newest;
  for (const auto& [path, time] : manifests_in(folder_)) {
    const auto old = before_.find(path);
    if (old != before_.end() && old->second == time) continue;
    auto saved = Checkpoint::open(path);
    if (saved.ok() && saved->steps() < end && (!newest || saved->steps() > newest->steps())) newest = std::move(*saved);
  }
  Attempt attempt{last, share, newest ? fmt::format("from step {}", newest->steps()) : "from the beginning"};
  if (restarts.elastic && is_between_processes(last.transport)) {
    if (newest && last.layout.compression.kind != CompressionKind::kNone)
      return Error{ExitCode::kUsage,
                   "compressed gradients keep errors for each rank, and fewer ranks have no place for them",
                   "restart without --elastic, or set compression.kind: none",
                   {}};
    const int each = last.layout.world_size() / processes;
    auto fewer = with_fewer_ranks(last, (processes - lost) * each, each, restarts.least_dp);
    if (!fewer.ok()) return fewer.error();
    attempt.config = std::move(*fewer);
    attempt.share.processes = attempt.config.layout.world_size() / each;
    attempt.share.ranks_per_process = 0;
    attempt.from += fmt::format(" with dp {} and grad_accumulation {} in place of {} and {}", attempt.config.layout.dp,
                                attempt.config.train.grad_accumulation, last.layout.dp, last.train.grad_accumulation);
  }
  attempt.config.checkpoint.resume = newest ? newest->manifest() : first_.checkpoint.resume;
  attempt.config.measure = newest ? with_steps_left(first_.measure, end - newest->steps()) : first_.measure;
  return attempt;
}

}  // namespace shardlab::cases
