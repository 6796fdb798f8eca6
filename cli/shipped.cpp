#include "cli/shipped.h"

#include <algorithm>
#include <filesystem>
#include <string_view>

#include "cli/namespaces.h"
#include "plan/base/files.h"

namespace shardlab::cli {

namespace fs = std::filesystem;

std::string shipped_folder() {
  std::error_code none;
  const fs::path folder = fs::read_symlink("/proc/self/exe", none).parent_path().parent_path() / "share/shardlab";
  return fs::is_directory(folder / "sweeps", none) ? folder.string() : "";
}

std::string shipped_or_here(const std::string& path, const std::string& folder) {
  if (folder.empty() || is_there(path) || fs::path(path).is_absolute()) return path;
  const std::string shipped = (fs::path(folder) / path).string();
  return is_there(shipped) ? shipped : path;
}

std::string with_shipped_paths(const std::string& text, const std::string& folder) {
  constexpr std::string_view kOfPaths = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-./";
  if (folder.empty()) return text;
  std::string out;
  for (size_t begin = 0; begin < text.size();) {
    const size_t word = std::min(text.find_first_of(kOfPaths, begin), text.size());
    const size_t end = std::min(text.find_first_not_of(kOfPaths, word), text.size());
    out.append(text, begin, word - begin);
    const std::string name = text.substr(word, end - word);
    // A sentence may end behind a name.
    const std::string path = name.substr(0, name.find_last_not_of('.') + 1);
    const bool named = path.find('/') != std::string::npos && path.front() != '/' && path.front() != '.' && !is_there(path);
    out += named && is_there(fs::path(folder) / path) ? folder + "/" + name : name;
    begin = end;
  }
  return out;
}

}  // namespace shardlab::cli
