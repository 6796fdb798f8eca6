// Device memory that a process takes, item by item: measured, not computed.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "runtime/cuda/api.h"

namespace shardlab::runtime::cuda {

/// The items that take device memory, in the order in which a case meets them.
enum class MemoryUse : uint8_t {
  kContext,        ///< of the driver, with what a recorder that was there before it keeps in it
  kStreams,        ///< streams and events
  kArenas,         ///< storage that ranks reserve. The plan's bytes in it are planned, the rounding is not
  kMatmul,         ///< cuBLASLt's handles; its workspace is the plan's
  kCudnn,          ///< cuDNN's handles and execution plans; its workspace is the plan's
  kCommunicators,  ///< NCCL's
  kRecorder,       ///< what the recorder takes when it begins
  kKernels,        ///< code and stacks, which CUDA loads when a kernel is first launched: in the steps of the warm-up
  kRest,
};
inline constexpr size_t kMemoryUses = 9;
/// The name by which results list the unplanned part of an item: "context", "rounding of allocations" (plan/device_words.h).
std::string_view name_of(MemoryUse use);

/// Reads the memory that devices have in use after each thing that takes some, and books the growth since the last reading. The
/// booked bytes add up to the bytes taken, whoever took them: another process on the device shows in them too.
///
/// Any thread. A `Taking` holds back every other one, so that things that run at the same time are told apart. Readings without a
/// meter leave the calling thread on the device that was read last.
/// meter leave the calling thread on the device that was read last.
class MemoryAccount {
 public:
  /// Bytes that a device has in use, by whomever, told without a context on it; none where that cannot be told.
  using Meter = std::function<std::optional<int64_t>(int device)>;

  /// Makes the devices' contexts. Where `meter` is null or tells nothing of some device, readings are the CUDA runtime's own, which
  /// begin when there is a context, so that this one is in none of them.
  MemoryAccount(Api& api, std::set<int> devices, Meter meter);
  MemoryAccount(const MemoryAccount&) = delete;

  /// Whether the booked bytes include contexts.
  bool knows_context() const { return meter_ != nullptr; }

  /// Books what has come since the last reading.
  void book(MemoryUse use);
  /// Bytes taken since the account began, as last read.
  int64_t taken() const;
  /// Bytes taken by item, without the items that are 0 and without the `planned` bytes of the arenas. They add up to
  /// taken() - planned.
  std::vector<std::pair<MemoryUse, int64_t>> unplanned(int64_t planned) const;

  /// From here to its end, what `devices` give is taken by `use`. Nested, the inner one has what comes while it lasts. An account
  /// of null takes no notice.
  class Taking {
   public:
    Taking(MemoryAccount* account, MemoryUse use, std::span<const int> devices);
    Taking(MemoryAccount* account, MemoryUse use, int device) : Taking(account, use, std::span(&device, 1)) {}
    ~Taking();
    Taking(const Taking&) = delete;

   private:
    MemoryAccount* const account_;
    std::vector<int> devices_;
  };

 private:
  std::optional<int64_t> read(int device);
  void book(MemoryUse use, int device);

  Api& api_;
  Meter meter_;
  mutable std::recursive_mutex mutex_;
  std::vector<MemoryUse> open_;
  std::map<int, int64_t> last_;  ///< by device
  std::array<int64_t, kMemoryUses> booked_{};
};

}  // namespace shardlab::runtime::cuda
