#include "plan/stage_memory.h"

#include <fmt/format.h>

#include <algorithm>

#include "plan/kinds.h"
#include "plan/pipeline_case.h"

namespace shardlab {

std::vector<StageNeed> memory_by_stage(const Case& config, const std::function<int64_t(int stage)>& peak_of) {
  const PipelineSchedule schedule = schedule_of(config);
  const std::vector<int> first = first_layers(config);
  std::vector<StageNeed> stages;
  for (int stage = 0; stage < config.layout.pp; ++stage) {
    int64_t layers = 0;
    for (const int part : schedule.parts_of(stage))
      layers += first[static_cast<size_t>(part) + 1] - first[static_cast<size_t>(part)];
    const int64_t peak = peak_of(stage);
    stages.push_back({device_of_stage(config, stage), layers, peak, peak, memory_of_stage(config, stage)});
  }
  return stages;
}

std::optional<int> stage_that_lacks(const std::vector<StageNeed>& stages) {
  std::optional<int> worst;
  int64_t most = 0;
  for (size_t i = 0; i < stages.size(); ++i) {
    const StageNeed& s = stages[i];
    if (s.fits()) continue;
    if (const int64_t lacking = std::max(s.peak_bytes, s.arena_bytes) - s.capacity_bytes; !worst || lacking > most)
      worst = static_cast<int>(i), most = lacking;
  }
  return worst;
}

std::string stages_text(const std::vector<StageNeed>& stages, const std::function<std::string(int64_t bytes)>& bytes_text) {
  std::string text;
  for (size_t i = 0; i < stages.size(); ++i) {
    const StageNeed& s = stages[i];
    text += fmt::format("{}stage {}: {} {} on {}, {}", text.empty() ? "" : "; ", i, s.layers, s.layers == 1 ? "layer" : "layers",
                        s.device, bytes_text(std::max(s.peak_bytes, s.arena_bytes)));
    if (s.capacity_bytes > 0) text += " of " + bytes_text(s.capacity_bytes);
  }
  return text;
}

}  // namespace shardlab
