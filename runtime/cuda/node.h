// The ranks of this process and the devices they use.
#pragma once

#include <array>
#include <memory>
#include <mutex>
#include <string_view>
#include <vector>

#include "kernels/cuda/kernels.h"
#include "plan/case.h"
#include "runtime/accelerator.h"
#include "runtime/cuda/api.h"
#include "runtime/cuda/memory_account.h"

namespace shardlab::runtime::cuda {

/// Throws WorldError unless `status` is success: "cudaMalloc: cudaErrorMemoryAllocation: out of memory".
void check(Api& api, Status status, std::string_view call);

/// Makes a WorldError of what a launch leaves behind.
class ThrowingCheck final : public gpu::LaunchCheck {
 public:
  explicit ThrowingCheck(Api& api) : api_(&api) {}
  void failed(std::string_view kernel, std::string_view library, int code, std::string_view text) override;

 private:
  Api* api_;
};

/// One rank's share of a device: streams, events and memory of its own.
class RankDevice final : public Accelerator {
 public:
  /// `account`: told what is taken, or null.
  RankDevice(Api& api, int rank, int device, MemoryAccount* account = nullptr)
      : api_(api), rank_(rank), device_(device), account_(account) {}
  ~RankDevice() override;
  RankDevice(const RankDevice&) = delete;

  void prepare(const Needs& needs) override;
  void attach_thread() override;
  std::byte* reserve(Space space, int64_t bytes) override;
  void fill(void* at, uint8_t value, int64_t bytes, int stream) override;
  void copy(void* to, const void* from, int64_t bytes, int stream) override;
  void record(int event, int stream) override;
  void wait(int event, int stream) override;
  bool reached(int event) override;
  bool idle(int stream) override;
  void synchronise() override;
  void mark(int mark, int stream) override;
  double milliseconds(int from, int to) override;

  int device() const { return device_; }
  Api& api() { return api_; }
  MemoryAccount* account() { return account_; }
  StreamHandle stream(int stream) const { return streams_[static_cast<size_t>(stream)]; }
  /// An event of the transport's, without timing; lives as long as the device.
  EventHandle create_event();
  /// Bytes reserved in a space.
  int64_t reserved(Space space) const { return reserved_[static_cast<size_t>(space)]; }

 private:
  void check(Status status, std::string_view call) const { cuda::check(api_, status, call); }

  Api& api_;
  const int rank_;
  const int device_;
  MemoryAccount* const account_;
  std::vector<StreamHandle> streams_;
  std::vector<EventHandle> events_, marks_;
  std::mutex mutex_;  ///< guards the three below
  std::vector<EventHandle> transport_events_;
  std::vector<std::pair<Space, void*>> storage_;
  std::array<int64_t, kSpaces> reserved_{};
};

/// Every rank of the process with its device. Made before the session and ended after it.
class Node {
 public:
  /// `devices`: by rank, the number of its device. `account`: of these devices, or null. All must outlive the node.
  Node(Api& api, const gpu::Kernels& kernels, const std::vector<int>& devices, MemoryAccount* account = nullptr);

  Api& api() { return api_; }
  const gpu::Kernels& kernels() const { return kernels_; }
  MemoryAccount* account() { return account_; }
  int ranks() const { return static_cast<int>(ranks_.size()); }
  RankDevice& rank(int rank) { return *ranks_[static_cast<size_t>(rank)]; }

 private:
  Api& api_;
  const gpu::Kernels& kernels_;
  MemoryAccount* const account_;
  std::vector<std::unique_ptr<RankDevice>> ranks_;
};

/// Device numbers by rank: all on device 0 (one-gpu), or one each (nccl). Refuses (ExitCode::kEnvironment) where there are fewer
/// devices than that takes.
Result<std::vector<int>> devices_for(TransportKind transport, int world_size, const Presence& presence);

}  // namespace shardlab::runtime::cuda
