// The one exception of shardlab: the world failed (a dead rank, a full disk, a missing driver).
// Thrown in runtime and profiler, caught once at the boundary of a case.
#pragma once

#include <stdexcept>
#include <string>
#include <utility>

namespace shardlab {

class WorldError : public std::runtime_error {
 public:
  /// `message` says what failed on which rank at which op; `hint` says what to try next.
  explicit WorldError(std::string message, std::string hint = {})
      : std::runtime_error(std::move(message)), hint_(std::move(hint)) {}
  const std::string& hint() const { return hint_; }

 private:
  std::string hint_;
};

}  // namespace shardlab
