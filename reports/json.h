// Values of tables and reports as JSON, which has no infinity and no NaN: those are null.
#pragma once

#include <cmath>
#include <nlohmann/json.hpp>

#include "plan/op.h"
#include "reports/table.h"

namespace shardlab::reports {

inline nlohmann::ordered_json json_of(double v) {
  return std::isfinite(v) ? nlohmann::ordered_json(v) : nlohmann::ordered_json(nullptr);
}

inline nlohmann::ordered_json json_of(const Value& value) {
  return std::visit(Overload{[](std::monostate) { return nlohmann::ordered_json(nullptr); }, [](double v) { return json_of(v); },
                             [](const auto& v) { return nlohmann::ordered_json(v); }},
                    value);
}

}  // namespace shardlab::reports
