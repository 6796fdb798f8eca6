// Whole numbers of JSON from outside. `get` of the library turns whatever number stands there into the type that is asked for,
// which of a number beyond it is undefined.
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <utility>

namespace shardlab::profiler {

/// The number as T. Throws std::out_of_range, which names the value, where it is no whole number or does not fit.
template <class T>
T json_integer(const nlohmann::json& value) {
  const bool fits = value.is_number_unsigned() ? std::in_range<T>(value.get<uint64_t>())
                                               : value.is_number_integer() && std::in_range<T>(value.get<int64_t>());
  if (!fits)
    throw std::out_of_range(
        fmt::format("`{}`, where a whole number of at most {} bits is expected", value.dump().substr(0, 60), 8 * sizeof(T)));
  return value.get<T>();
}

}  // namespace shardlab::profiler
