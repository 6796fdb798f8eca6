// Asking the file system without an exception.
#pragma once

#include <fmt/format.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <memory>
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
/// further.
inline Result<std::string> read_file_within(const std::string& path, int64_t most) {
  const auto refusal = [&](std::string message, std::string hint) {
    return Error{ExitCode::kUsage, std::move(message), std::move(hint), path};
  };
  std::error_code ignored;
  if (std::filesystem::is_directory(path, ignored)) return refusal("is a folder, not a file", "name a file in it");
  errno = 0;
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(
      std::fopen(path.c_str(), "rbe"), +[](std::FILE* f) { return std::fclose(f); });
  if (!file) return refusal(fmt::format("cannot be opened: {}", std::strerror(errno ? errno : ENOENT)), "check the path");
  std::string text;
  char part[1 << 16];
  for (size_t n; (n = std::fread(part, 1, sizeof part, file.get())) > 0;) {
    if (static_cast<int64_t>(text.size() + n) > most)
      return refusal(fmt::format("has more than {} bytes, the most that is read of such a file", most),
                     "check that it is the file you mean");
    text.append(part, n);
  }
  if (std::ferror(file.get()) != 0) return refusal(fmt::format("cannot be read: {}", std::strerror(errno)), "check the file");
  return text;
}

}  // namespace shardlab
