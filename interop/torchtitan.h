// What torchtitan's files call models and schedules: read by the export and by the way back.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "plan/model.h"
#include "plan/pipeline_schedule.h"

namespace shardlab::interop {

/// A model of torchtitan as its registry has it.
struct Flavour {
  std::string_view model, name;  ///< [model] name and flavor
  Model shape;                   ///< without a name, and with `init_deviation` of shardlab
  std::string_view assets;       ///< where its tokenizer lies: hf_assets_path
  bool has_pipeline = true;      ///< whether torchtitan cuts it into stages
  bool attends_by_flex = false;  ///< FlexAttention, which goes with no context parallelism there
};
std::span<const Flavour> titan_flavours();

/// "llama3: 8B 70B; qwen3: 0.6B": the flavours of each model.
std::string flavour_list();

/// Tokens beyond which deepseek_v3 scales its rotary frequencies (`original_seq_len`).
inline constexpr int64_t kTitanPlainTokens = 4096;

struct ScheduleName {
  Schedule schedule;
  std::string_view torch;  ///< PyTorch's name
};
std::span<const ScheduleName> torch_schedules();

}  // namespace shardlab::interop
