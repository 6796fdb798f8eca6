#include "simulator/search/replayed.h"

#include <algorithm>

#include "simulator/memory/replay.h"

namespace shardlab::simulator::search {
namespace {

void replay(Candidate& c, const analytic::Prepared& prepared, analytic::Estimator& estimator, int64_t capacity_bytes) {
  if (!prepared.profile().memory_caching || estimator.exact(c.point)) return;
  analytic::MemoryBytes worst;
  for (int32_t stage = 0; stage < c.point.pp; ++stage) {
    analytic::MemoryBytes memory = estimator.stage_memory(c.point, stage);
    memory[analytic::MemoryPart::kFragmented] = whatif::fragmented_bytes(prepared, c.point, stage, capacity_bytes);
    if (stage > 0 && memory.device() <= worst.device()) continue;
    worst = memory;
    c.estimate.worst_stage = stage;
  }
  c.estimate.memory = worst;
}

}  // namespace

std::vector<Candidate> replay_allocations(std::vector<Candidate>& candidates, std::span<const Study> studies,
                                          int64_t capacity_bytes) {
  for (const Study& study : studies) {
    analytic::Estimator estimator(study.prepared);
    for (Candidate& c : candidates)
      if (c.point.world_size() == study.devices) replay(c, study.prepared, estimator, capacity_bytes);
  }
  const auto misfits = std::ranges::stable_partition(
      candidates, [&](const Candidate& c) { return capacity_bytes <= 0 || c.bytes() <= capacity_bytes; });
  std::vector<Candidate> out(misfits.begin(), misfits.end());
  candidates.erase(misfits.begin(), misfits.end());
  return out;
}

}  // namespace shardlab::simulator::search
