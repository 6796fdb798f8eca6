// Texts that stand for quantities: counts with suffixes, numbers, durations.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace shardlab {

/// "8", "-1", "64k", "1Mi", "1e6", "2.5M" where the result is whole. k M G T are powers of 1000, Ki Mi Gi Ti of 1024.
std::optional<int64_t> parse_count(std::string_view text);

/// A finite decimal number, with the same suffixes: "0.1", "1e-3", "16k".
std::optional<double> parse_number(std::string_view text);

/// Seconds of "90", "90s", "1.5m", "2h", "250ms". Positive.
std::optional<double> parse_duration(std::string_view text);

/// true or false, in those words only.
std::optional<bool> parse_bool(std::string_view text);

/// The shortest text that reads back as the same value.
std::string to_text(int64_t value);
std::string to_text(double value);
std::string to_text(float value);

}  // namespace shardlab
