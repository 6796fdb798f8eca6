// A TOML file as flat keys: "parallelism.tensor_parallel_degree" and its value. As much of TOML 1.0 as configuration files use: tables,
// dotted and quoted keys, strings, numbers, booleans, arrays; no dates, no multi-line strings, no arrays of tables, no inline tables.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "plan/base/result.h"

namespace shardlab::interop {

struct TomlValue {
  using List = std::vector<TomlValue>;
  std::variant<std::string, int64_t, double, bool, List> value;
};

struct TomlEntry {
  std::string path;
  TomlValue value;
  int line = 0;
};

/// The entries in their order. Refuses what is no TOML, a key that is set twice, lists nested deeper than 16, and what this reader does
/// not have, each with its line. `name` stands in messages.
Result<std::vector<TomlEntry>> parse_toml(std::string_view text, const std::string& name);

}  // namespace shardlab::interop
