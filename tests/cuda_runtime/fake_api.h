// A CUDA runtime of this process: streams are queues that run when somebody asks, in an order drawn from a seed, so that a missing
// event shows as a wrong result. Records the calls, and fails where it is told to.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "runtime/cuda/api.h"
#include "tests/namespaces.h"

namespace shardlab::testing {

class FakeApi;

/// What a StreamHandle of the fake points to.
struct FakeStream {
  FakeApi* api = nullptr;
  int number = 0;
  /// Appends work: what a kernel's launch does. `ready`: the stream stands still before it until this holds, which other streams' work brings about.
  void push(std::function<void()> work, std::function<bool()> ready = nullptr);
};

class FakeApi final : public cuda::Api {
 public:
  explicit FakeApi(uint64_t seed = 1, int devices = 1) : devices_(devices), random_(seed) {}
  ~FakeApi() override;

  std::string describe(cuda::Status status) override;
  cuda::Status driver_version(int* version) override { return *version = driver, cuda::kSuccess; }
  cuda::Status runtime_version(int* version) override { return *version = 13000, cuda::kSuccess; }
  cuda::Status device_count(int* count) override;
  cuda::Status properties(int device, cuda::Properties* properties) override;
  cuda::Status pci_bus_id(int, std::string* id) override { return *id = "0000:00:00.0", cuda::kSuccess; }
  cuda::Status set_device(int device) override;
  cuda::Status memory(int64_t* free, int64_t* total) override;
  cuda::Status synchronise_device() override;
  cuda::Status last_error() override { return cuda::kSuccess; }
  cuda::Status allocate(void** at, int64_t bytes) override;
  cuda::Status release(void* at) override;
  cuda::Status allocate_host(void** at, int64_t bytes) override;
  cuda::Status release_host(void* at) override;
  cuda::Status fill(void* at, uint8_t value, int64_t bytes, cuda::StreamHandle stream) override;
  cuda::Status copy(void* to, const void* from, int64_t bytes, cuda::StreamHandle stream) override;
  cuda::Status create_stream(cuda::StreamHandle* stream) override;
  cuda::Status destroy_stream(cuda::StreamHandle stream) override;
  cuda::Status synchronise_stream(cuda::StreamHandle stream) override;
  cuda::Status query_stream(cuda::StreamHandle stream) override;
  cuda::Status wait_event(cuda::StreamHandle stream, cuda::EventHandle event) override;
  cuda::Status create_event(cuda::EventHandle* event, bool timed) override;
  cuda::Status destroy_event(cuda::EventHandle event) override;
  cuda::Status record_event(cuda::EventHandle event, cuda::StreamHandle stream) override;
  cuda::Status query_event(cuda::EventHandle event) override;
  cuda::Status milliseconds(float* out, cuda::EventHandle from, cuda::EventHandle to) override;

  /// From now on the `number`th call (from 1) named as CUDA names it ("cudaMemcpyAsync") fails with `status`.
  void fail(const std::string& call, int number, cuda::Status status);
  /// Streams whose next work is never run: a kernel that hangs.
  void hang() { hung_ = true; }
  /// How often a call was made.
  int calls(const std::string& call);
  int64_t live_allocations() const { return static_cast<int64_t>(blocks_.size()); }
  int64_t live_streams() const { return static_cast<int64_t>(streams_.size()); }
  int64_t live_events() const { return static_cast<int64_t>(events_.size()); }
  /// Events are waited for without work in between, so nothing can ever run again.
  bool deadlocked() const { return deadlocked_; }
  /// Most pieces of work that waited at the same time: how far the host ran ahead.
  size_t most_pending() const { return most_pending_; }

  /// Takes memory of the calling thread's device as a library or the driver does: nobody is told, and it is never given back.
  void take(int64_t bytes);
  /// Bytes in use on a device, as its driver would tell.
  int64_t used(int device);

  /// What the driver takes: for the first call on a device, for a stream, and of what multiple an allocation is.
  int64_t context_bytes = 0, stream_bytes = 0, granule = 1;
  int64_t others = 0;  ///< bytes that other processes have on each device
  int driver = 13000;
  cuda::Status count_status = cuda::kSuccess;
  int64_t capacity = int64_t{4} << 30;
  bool forget_waits = false;

 private:
  friend struct FakeStream;
  struct Event {
    bool timed = false;
    uint64_t recorded = 0;  ///< records issued
    uint64_t reached = 0;   ///< records run
    double at = 0;          ///< of the last record run, in pieces of work
  };
  struct Work {
    std::function<void()> run;
    Event* waits = nullptr;
    uint64_t target = 0;
    std::function<bool()> ready;  ///< none: at once
  };
  struct Queue {
    FakeStream handle;
    std::deque<Work> work;
    uint64_t priority = 0;
  };

  struct Block {
    int64_t bytes = 0;
    int device = -1;  ///< -1: host memory
  };
  cuda::Status note(const std::string& call);
  /// The calling thread's device, with its context.
  int current();
  cuda::Status allocate_block(void** at, int64_t bytes, int device);
  Queue& queue(cuda::StreamHandle stream);
  void push(Queue& queue, Work work);
  bool runnable(const Queue& queue) const;
  bool run_one();
  void run_some();
  uint64_t draw();

  const int devices_;
  std::recursive_mutex mutex_;
  uint64_t random_;
  std::map<void*, std::unique_ptr<Queue>> streams_;
  std::map<void*, std::unique_ptr<Event>> events_;
  std::map<void*, Block> blocks_;
  std::map<std::string, int> calls_;
  std::map<std::pair<std::string, int>, cuda::Status> failures_;
  std::map<int, int64_t> used_;  ///< by device
  std::map<std::thread::id, int> current_;
  std::set<int> contexts_;
  double clock_ = 0;
  size_t pending_ = 0, most_pending_ = 0;
  bool hung_ = false, deadlocked_ = false;
};

}  // namespace shardlab::testing
