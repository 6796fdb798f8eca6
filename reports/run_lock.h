// One writer a run directory.
#pragma once

#include <string>
#include <string_view>
#include <utility>

#include "plan/base/result.h"

namespace shardlab::reports {

/// The right to write into a run directory: a lock of the operating system on `<directory>/run.lock`, which ends with the process
/// however that ends. The file says who holds it; it stays behind and means nothing then.
class RunLock {
 public:
  /// Makes the directory where there is none. Refuses (usage) while another process has the lock, and names that process by its
  /// number and command. `command` is what others are told of this one. Throws WorldError when the directory cannot be written.
  static Result<RunLock> take(const std::string& directory, std::string_view command);
  /// Whether a process writes into the directory.
  static bool is_taken(const std::string& directory);
  RunLock(RunLock&& other) noexcept : directory_(std::move(other.directory_)), file_(std::exchange(other.file_, -1)) {}
  RunLock& operator=(RunLock&&) = delete;
  ~RunLock();

  const std::string& directory() const { return directory_; }

 private:
  RunLock(std::string directory, int file) : directory_(std::move(directory)), file_(file) {}
  std::string directory_;
  int file_;
};

}  // namespace shardlab::reports
