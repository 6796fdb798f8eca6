// The NVMe space of one rank: bytes outside memory, read and written in place by the threads of the rank's streams.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>

namespace shardlab::runtime {

/// Alignment of direct transfers: of offsets, lengths and addresses.
inline constexpr int64_t kBlockBytes = 4096;
constexpr int64_t whole_blocks(int64_t bytes) { return (bytes + kBlockBytes - 1) / kBlockBytes * kBlockBytes; }

/// Bytes by offset, zero until they are written. Calls of several threads at once are safe where their ranges do not meet.
class BlockStore {
 public:
  virtual ~BlockStore() = default;
  /// Moves all of the bytes, or throws WorldError. Both return when the bytes have arrived.
  virtual void read(int64_t offset, std::span<std::byte> to) = 0;
  virtual void write(int64_t offset, std::span<const std::byte> from) = 0;
  /// Whether transfers pass by the page cache; else a read may be served from memory, and times say little of the drive.
  virtual bool direct() const = 0;
};

/// Makes the store of a rank that needs `bytes`.
using BlockStores = std::function<std::unique_ptr<BlockStore>(int rank, int64_t bytes)>;

/// A file without a name in `directory`, gone when the store is, however the process ends. Its place on the disk is reserved at
/// once, so that a full disk is met before the first step. Direct (O_DIRECT) where the file system allows it. Transfers of whole
/// blocks between block-aligned addresses and offsets go as they are; others by way of an aligned copy.
/// Throws WorldError: no such directory, no right to write, no room.
std::unique_ptr<BlockStore> open_file_store(const std::string& directory, int64_t bytes);

}  // namespace shardlab::runtime
