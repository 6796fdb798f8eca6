// The memory of one rank: one allocation a space, laid out by the plan; and the ledger of the bytes that really were live.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "plan/buffer.h"
#include "plan/memory.h"
#include "runtime/accelerator.h"

namespace shardlab::runtime {

/// Live bytes as the program really allocates and frees: the measured side of `memory_peak`.
class Ledger {
 public:
  /// `bytes` is what the buffer holds; it is rounded up to kAlignment.
  void allocate(Space space, BufferClass cls, int64_t bytes);
  void free(Space space, BufferClass cls, int64_t bytes);

  int64_t live(Space space) const { return live_[static_cast<size_t>(space)]; }
  int64_t peak(Space space) const { return peak_[static_cast<size_t>(space)]; }
  /// Bytes by class that were live when the peak was first reached.
  const MemoryByClass& at_peak(Space space) const { return at_peak_[static_cast<size_t>(space)]; }

 private:
  std::array<int64_t, kSpaces> live_{}, peak_{};
  std::array<MemoryByClass, kSpaces> by_class_{}, at_peak_{};
};

/// Storage of one rank: of the process, or of the rank's device, whose memory is then poisoned in the order of stream 0. NVMe space
/// has no addresses: it is the rank's BlockStore. Not thread-safe: alloc and free happen on the rank's stream 0.
class Arena {
 public:
  struct Options {
    bool poison = false;                        ///< fill freed and fresh storage with signalling NaNs
    bool reserve = true;                        ///< false: no memory at all, every address is null (rehearsals)
    Accelerator* device = nullptr;              ///< none: memory of this process
    std::array<std::byte*, kSpaces> storage{};  ///< of others, to lie in; null: the arena takes its own
  };
  Arena(const std::array<int64_t, kSpaces>& bytes, const Options& options);

  /// Address of byte `offset` of a space; null when nothing is reserved.
  std::byte* at(Space space, int64_t offset) const;
  /// Begins and ends the life of `bytes` at `offset`: poisons them on request and, in builds with the address sanitizer, marks
  /// them inaccessible while dead.
  void allocate(Space space, int64_t offset, int64_t bytes);
  void free(Space space, int64_t offset, int64_t bytes);

  /// Writes every page once, from the thread that will use it, so that no step pays for page faults. Before the first `allocate`.
  void touch();
  int64_t bytes(Space space) const { return bytes_[static_cast<size_t>(space)]; }

 private:
  /// What a buffer takes: in host memory, where it was placed by blocks, whole ones, which travel to a drive as they are.
  int64_t extent(Space space, int64_t offset, int64_t bytes) const;
  /// Whether the space is this process's own, to be filled and guarded by hand.
  bool own(Space space) const { return options_.device == nullptr && storage_[static_cast<size_t>(space)] != nullptr; }

  struct Unmap {
    size_t size;  ///< 0: the device's, which keeps it
    bool lent;    ///< of others, which keep it
    Unmap() : size(0), lent(false) {}
    explicit Unmap(size_t n, bool of_others = false) : size(n), lent(of_others) {}
    void operator()(std::byte* p) const;
  };
  Options options_;
  std::array<int64_t, kSpaces> bytes_{};
  std::array<std::unique_ptr<std::byte, Unmap>, kSpaces> storage_;
};

/// The 32-bit pattern of poisoned storage: a signalling NaN in fp32, an impossible token id.
inline constexpr uint32_t kPoison = 0xffa5a5a5u;
/// The byte of poisoned storage on a device, which fills by bytes: NaNs in every float type, -1 in every integer.
inline constexpr uint8_t kPoisonByte = 0xff;

}  // namespace shardlab::runtime
