// Quantities as people read them. The one place where units are chosen; files keep exact numbers (`number_text`).
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace shardlab::reports {

/// The shortest decimal text that reads back as the same double; "nan", "inf", "-inf".
std::string number_text(double value);

/// "512 B", "1.500 KiB", "12.31 MiB": powers of 1024, four significant digits.
std::string bytes_text(int64_t bytes);

/// "1.234 s", "41.20 ms", "3.100 us", "25.00 ns": four significant digits.
std::string seconds_text(double seconds);

/// "124.4 M", "8.030 G", "512": powers of 1000, four significant digits; counts below 1000 stay whole numbers.
std::string count_text(double count);

/// "3.210 Gflop", "12 flop".
std::string flops_text(double flops);

/// "12.35 k tok/s".
std::string tokens_per_second_text(double tokens_per_s);

/// "450.0 GB/s": powers of 1000, as data sheets and nccl-tests give rates.
std::string bytes_per_second_text(double bytes_per_s);

/// `fraction` 0.0312 is "3.12 %".
std::string percent_text(double fraction);

/// `percent` -2.5 is "-2.50 %", 2.5 "+2.50 %": a residual has its sign, unless it reads "0.00 %".
std::string signed_percent_text(double percent);

/// Quantities as in a sentence or a narrow table, with three significant digits: "78.0 GiB", "55.1 s", "1.19 k".
std::string brief_bytes(int64_t bytes);
std::string brief_seconds(double seconds);
std::string brief_count(double count);
/// A large count in words: "70.6 billion", "4.19 million", "512".
std::string count_words(double count);
/// "$584k", "$1.20M", "$47".
std::string money_text(double usd);
/// `fraction` 0.542 is "54 %".
std::string brief_percent(double fraction);

/// Columns that `text` (UTF-8) takes in a terminal: one for every code point, none for the marks of `visible_line`.
int display_width(std::string_view text);

/// `text` with lines of at most `width` columns, broken at blanks, though not between a number and its unit; lines after the first
/// begin with `indent` blanks. A word that is longer stays whole, and so does every line where `width` is 0.
std::string wrapped(std::string_view text, int width, int indent = 0);

/// `text` cut to at most `width` columns, the last one "…" when something is missing.
std::string shortened(std::string_view text, int width);

}  // namespace shardlab::reports
