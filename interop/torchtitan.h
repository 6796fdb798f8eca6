// What torchtitan's files call models and schedules: read by the export and by the way back.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "plan/pipeline_schedule.h"

namespace shardlab::interop {

struct Flavour {
  std::string_view name;
  int64_t layers, hidden, heads, kv_heads, ffn, vocab;
};
std::span<const Flavour> titan_flavours();

struct ScheduleName {
  Schedule schedule;
  std::string_view torch;  ///< PyTorch's name
};
std::span<const ScheduleName> torch_schedules();

/// Of every flavour.
inline constexpr float kTitanTheta = 500000, kTitanEpsilon = 1e-5f;

}  // namespace shardlab::interop
