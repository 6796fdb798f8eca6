#include "runtime/manifest.h"

#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <optional>
#include <sstream>

#include "plan/base/hash.h"

namespace shardlab::runtime {
namespace {

template <class T>
std::optional<T> number(std::string_view text, int base = 10) {
  T value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value, base);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

/// "2x3" or "scalar"; nothing where the bytes of the tensor cannot be counted.
std::optional<Shape> parse_shape(std::string_view text) {
  Shape shape;
  if (text == "scalar") return shape;
  int64_t bytes = sizeof(float);
  while (!text.empty()) {
    const size_t end = std::min(text.find('x'), text.size());
    const auto extent = number<int64_t>(text.substr(0, end));
    if (!extent || *extent < 0 || shape.rank == 4 || __builtin_mul_overflow(bytes, *extent, &bytes)) return std::nullopt;
    shape.extent[static_cast<size_t>(shape.rank++)] = *extent;
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return shape;
}

/// `words` stands behind "tensor NAME".
std::optional<std::pair<std::string, Manifest::Entry>> parse_entry(std::istringstream& words) {
  std::string part, shape, offset, bytes, checksum;
  words >> part >> shape >> offset >> bytes >> checksum;
  const auto extents = parse_shape(shape);
  const auto from = number<int64_t>(offset), length = number<int64_t>(bytes);
  const auto sum = number<uint64_t>(checksum, 16);
  if (!extents || !from || !length || !sum || *from < 0) return std::nullopt;
  if (*length != extents->elements() * static_cast<int64_t>(sizeof(float))) return std::nullopt;
  return std::pair{part, Manifest::Entry{*extents, *from, *length, *sum}};
}

}  // namespace

std::optional<int64_t> manifest_number(std::string_view text) { return number<int64_t>(text); }

Error unreadable_checkpoint(std::string_view path, std::string_view why, std::string_view hint) {
  return {ExitCode::kUsage,
          fmt::format("checkpoint {}: {}", path, why),
          hint.empty() ? "resume from another manifest: set checkpoint.resume to its path" : std::string(hint),
          {}};
}

std::string manifest_end(std::string_view text) { return fmt::format("end {:016x}\n", hash_text(text)); }

uint64_t checksum_of(const LogicalTensor& tensor) {
  return hash_text({reinterpret_cast<const char*>(tensor.values.data()), tensor.values.size() * sizeof(float)});
}

Result<Manifest> parse_manifest(std::string_view text, const std::string& path) {
  if (!text.starts_with(kManifestFirstLine))
    return unreadable_checkpoint(path, fmt::format("it does not begin with `{}`", kManifestFirstLine),
                                 "name a manifest that this version wrote");
  const size_t end = text.rfind("end ");
  if (end == std::string::npos || text.substr(end) != manifest_end(text.substr(0, end)))
    return unreadable_checkpoint(path, "the manifest is cut short or was changed: its checksum is not that of its text");
  Manifest manifest;
  std::istringstream lines{std::string(text.substr(0, end))};
  std::string line;
  std::getline(lines, line);
  while (std::getline(lines, line)) {
    std::istringstream words(line);
    std::string key, value;
    words >> key >> value;
    if (key == "steps") {
      manifest.steps = number<int64_t>(value).value_or(-1);
    } else if (key == "data") {
      manifest.data = value;
    } else if (key == "tensor") {
      const auto entry = parse_entry(words);
      if (!entry) return unreadable_checkpoint(path, fmt::format("`{}` says no tensor", line.substr(0, 200)));
      manifest.entries[{value, entry->first}] = entry->second;
    } else {
      manifest.recipe[key] = value;
    }
  }
  if (manifest.steps < 0 || manifest.data.empty())
    return unreadable_checkpoint(path, "it lacks the number of steps or the file of tensors");
  if (manifest.data.find('/') != std::string::npos)
    return unreadable_checkpoint(path, fmt::format("its file of tensors is `{}`, of another folder", manifest.data.substr(0, 200)));
  return manifest;
}

Result<LogicalTensor> read_tensor(int file, const std::string& path, const StateName& name, const Manifest::Entry& entry) {
  const auto at = [&](const std::string& why) {
    return unreadable_checkpoint(path, fmt::format("{} `{}` {}", why, name.parameter, name.part));
  };
  struct stat status {};
  if (::fstat(file, &status) != 0) return at(fmt::format("{} at", std::strerror(errno)));
  if (entry.offset > status.st_size || entry.bytes > status.st_size - entry.offset) return at("the file ends within");
  LogicalTensor tensor;
  tensor.shape = entry.shape;
  tensor.values.resize(static_cast<size_t>(entry.shape.elements()));
  auto* bytes = reinterpret_cast<char*>(tensor.values.data());
  for (int64_t done = 0; done < entry.bytes;) {
    const ssize_t n = ::pread(file, bytes + done, static_cast<size_t>(entry.bytes - done), entry.offset + done);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return at(fmt::format("{} at", std::strerror(errno)));
    if (n == 0) return at("the file ends within");
    done += n;
  }
  if (checksum_of(tensor) != entry.checksum)
    return unreadable_checkpoint(path,
                                 fmt::format("`{}` {} is damaged: its checksum is not the manifest's", name.parameter, name.part));
  return tensor;
}

}  // namespace shardlab::runtime
