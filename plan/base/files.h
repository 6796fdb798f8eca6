// Asking the file system without an exception.
#pragma once

#include <filesystem>
#include <system_error>

namespace shardlab {

/// Is there such a file or folder, as far as this process may see? A folder that may not be read holds nothing.
inline bool is_there(const std::filesystem::path& path) {
  std::error_code hidden;
  return std::filesystem::exists(path, hidden);
}

}  // namespace shardlab
