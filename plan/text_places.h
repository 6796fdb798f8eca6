// Where the parts of a plan stand in its text, for whoever says what is wrong with them.
#pragma once

#include <string>
#include <string_view>
#include <unordered_map>

#include "plan/base/result.h"
#include "plan/plan.h"

namespace shardlab {

/// "layer.F attn.qkv linear.F": an op of a segment, as findings name it.
std::string op_name(const Segment& segment, const Op& op);

/// Line and column of a text, both from 1; line 0: nowhere in the text.
struct TextPlace {
  int line = 0, column = 0;
};

/// Places of a plan's parts. Of several parts with one name the first counts.
struct PlanPlaces {
  std::unordered_map<std::string, TextPlace> ops;       ///< by `op_name`
  std::unordered_map<std::string, TextPlace> segments;  ///< by name
  std::unordered_map<std::string, TextPlace> entries;   ///< slots ("layer.F %x"), buffers ("0 %x", of role 0), parameters ("%x")
  std::unordered_map<int, TextPlace> roles;             ///< by stage
};

/// `parse_plan` (plan/text.h) that fills `places` too.
Result<Plan> parse_plan(std::string_view text, std::string_view file, PlanPlaces& places);

}  // namespace shardlab
