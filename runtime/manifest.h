// The manifest of a checkpoint: what was saved, where it lies and how it is known to be whole (runtime/checkpoint.h).
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>

#include "plan/base/result.h"
#include "plan/type.h"
#include "runtime/session.h"

namespace shardlab::runtime {

inline constexpr std::string_view kManifestFirstLine = "shardlab checkpoint 1";

struct Manifest {
  /// One tensor in the file of tensors: row-major fp32.
  struct Entry {
    Shape shape;
    int64_t offset = 0, bytes = 0;
    uint64_t checksum = 0;  ///< of the bytes
  };

  int64_t steps = -1;
  std::string data;                           ///< name of the file of tensors, beside the manifest
  std::map<std::string, std::string> recipe;  ///< what the next run must have in common with the saved one
  std::map<StateName, Entry> entries;
};

/// The last line of a manifest: the checksum of the text before it.
std::string manifest_end(std::string_view text);

/// Reads a manifest that is whole and says what can be: extents that multiply to the bytes, no name of another folder. `path`
/// stands in messages.
Result<Manifest> parse_manifest(std::string_view text, const std::string& path);

/// One tensor from an open file, checked against its checksum. Refuses an entry that reaches beyond the file before anything is
/// allocated. `path` stands in messages.
Result<LogicalTensor> read_tensor(int file, const std::string& path, const StateName& name, const Manifest::Entry& entry);

/// The checksum of a tensor's bytes.
uint64_t checksum_of(const LogicalTensor& tensor);

/// "checkpoint PATH: WHY", with what to do where nothing better is known.
Error unreadable_checkpoint(std::string_view path, std::string_view why, std::string_view hint = {});

/// Digits of one number and nothing else.
std::optional<int64_t> manifest_number(std::string_view text);

}  // namespace shardlab::runtime
