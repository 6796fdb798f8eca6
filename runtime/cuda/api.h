// The calls of the CUDA runtime that shardlab makes, as an interface: the real one forwards each to libcudart, a test's keeps
// queues of its own, records the sequence and fails where it is told to.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "kernels/cuda/kernels.h"
#include "plan/base/result.h"

namespace shardlab::runtime::cuda {

/// Handles of the runtime, opaque here: a cudaStream_t and a cudaEvent_t.
struct StreamHandle {
  void* value = nullptr;
  friend bool operator==(const StreamHandle&, const StreamHandle&) = default;
};
struct EventHandle {
  void* value = nullptr;
  friend bool operator==(const EventHandle&, const EventHandle&) = default;
};

/// The byte `offset` behind `base`; nothing lies behind nothing.
inline const std::byte* bytes_at(const void* base, int64_t offset) {
  return base == nullptr ? nullptr : static_cast<const std::byte*>(base) + offset;
}
inline std::byte* bytes_at(void* base, int64_t offset) {
  return base == nullptr ? nullptr : static_cast<std::byte*>(base) + offset;
}

/// A cudaError_t. 0 is success.
using Status = int;
inline constexpr Status kSuccess = 0;
inline constexpr Status kOutOfMemory = 2;          ///< cudaErrorMemoryAllocation
inline constexpr Status kInsufficientDriver = 35;  ///< cudaErrorInsufficientDriver: also where there is no driver at all
inline constexpr Status kNoDevice = 100;           ///< cudaErrorNoDevice
inline constexpr Status kNotReady = 600;           ///< cudaErrorNotReady: no error, work is still under way

struct Properties {
  std::string name;
  int major = 0, minor = 0;  ///< compute capability
  int multiprocessors = 0;
  int64_t memory_bytes = 0;
  int64_t l2_bytes = 0;
};

/// Every call returns what the runtime returned. Calls but those on devices and versions act on the calling thread's device.
class Api {
 public:
  virtual ~Api() = default;

  virtual std::string describe(Status status) = 0;  ///< "cudaErrorNoDevice: no CUDA-capable device is detected"
  virtual Status driver_version(int* version) = 0;  ///< 0: no driver
  virtual Status runtime_version(int* version) = 0;
  virtual Status device_count(int* count) = 0;  ///< leaves `count` alone where it fails
  virtual Status properties(int device, Properties* properties) = 0;
  virtual Status pci_bus_id(int device, std::string* id) = 0;  ///< "0000:17:00.0"
  virtual Status set_device(int device) = 0;
  virtual Status memory(int64_t* free, int64_t* total) = 0;
  virtual Status synchronise_device() = 0;
  /// The last error of the thread, cleared: what a launch left behind.
  virtual Status last_error() = 0;

  virtual Status allocate(void** at, int64_t bytes) = 0;
  virtual Status release(void* at) = 0;
  virtual Status allocate_host(void** at, int64_t bytes) = 0;  ///< pinned
  virtual Status release_host(void* at) = 0;
  virtual Status fill(void* at, uint8_t value, int64_t bytes, StreamHandle stream) = 0;
  virtual Status copy(void* to, const void* from, int64_t bytes, StreamHandle stream) = 0;  ///< between any two spaces

  virtual Status create_stream(StreamHandle* stream) = 0;  ///< does not wait for the default stream
  virtual Status destroy_stream(StreamHandle stream) = 0;
  virtual Status synchronise_stream(StreamHandle stream) = 0;
  virtual Status query_stream(StreamHandle stream) = 0;  ///< kNotReady while work is under way
  virtual Status wait_event(StreamHandle stream, EventHandle event) = 0;

  virtual Status create_event(EventHandle* event, bool timed) = 0;
  virtual Status destroy_event(EventHandle event) = 0;
  virtual Status record_event(EventHandle event, StreamHandle stream) = 0;
  virtual Status query_event(EventHandle event) = 0;
  virtual Status milliseconds(float* out, EventHandle from, EventHandle to) = 0;
};

/// The kernels of this build, or null: it was made without the toolkit.
const gpu::Kernels* built_kernels();
/// The real runtime. Refuses (ExitCode::kEnvironment, with the remedy) where this build has none; says nothing of drivers.
Result<std::unique_ptr<Api>> real_api();

/// The parts of CUDA that can be used. Found by questions in the order that is safe without a driver: driver version, then the
/// count of devices.
struct Presence {
  bool built = false;           ///< this build has CUDA
  int driver = 0, runtime = 0;  ///< versions as CUDA writes them, 13000 for 13.0; 0: none
  int devices = 0;
  std::string reason;  ///< empty: usable
  std::string remedy;

  bool usable() const { return reason.empty(); }
};
Presence presence(Api& api);
/// Presence of the real runtime, whether this build has CUDA or not.
Presence presence();

/// "13.0" of 13000.
std::string version_text(int version);

}  // namespace shardlab::runtime::cuda
