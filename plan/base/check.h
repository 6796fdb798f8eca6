// Assertions that stay on in every build: a bug of ours stops at once and prints the values.
#pragma once

#include <fmt/core.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <utility>

namespace shardlab {

[[noreturn]] inline void fail_check(const char* file, int line, const char* condition, const std::string& message) {
  fmt::print(stderr, "shardlab: bug at {}:{}: `{}` does not hold: {}\nPlease report this with the command you ran.\n", file, line,
             condition, message);
  std::fflush(nullptr);
  std::abort();
}

}  // namespace shardlab

/// SHARDLAB_CHECK(condition, "format {}", values...): always on.
#define SHARDLAB_CHECK(condition, ...)                                                  \
  do {                                                                                  \
    if (!(condition)) [[unlikely]]                                                      \
      ::shardlab::fail_check(__FILE__, __LINE__, #condition, fmt::format(__VA_ARGS__)); \
  } while (false)
