// Asking the file system without an exception.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <system_error>

#include "plan/base/result.h"

namespace shardlab {

/// Is there such a file or folder, as far as this process may see? A folder that may not be read holds nothing.
inline bool is_there(const std::filesystem::path& path) {
  std::error_code hidden;
  return std::filesystem::exists(path, hidden);
}

/// The bytes of a file or pipe, or why they cannot be had. Refuses more than `most` bytes (plan/base/limits.h), and reads no
/// further; and a pipe that nobody opens for writing within two seconds. For one who writes it waits.
Result<std::string> read_file_within(const std::string& path, int64_t most);

/// All bytes of a file of the user's own, however many. Refuses (ExitCode::kUsage) a file that cannot be read.
Result<std::string> read_file(const std::string& path);

}  // namespace shardlab
