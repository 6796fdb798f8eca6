#include "tests/cuda_runtime/fake_api.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "plan/base/hash.h"
#include "tests/namespaces.h"

namespace shardlab::testing {

using cuda::EventHandle;
using cuda::Status;
using cuda::StreamHandle;

namespace {
constexpr Status kLaunchFailure = 719;
constexpr size_t kAlign = 256;
}  // namespace

void FakeStream::push(std::function<void()> work, std::function<bool()> ready) {
  const std::lock_guard lock(api->mutex_);
  api->push(*api->streams_.at(this), {std::move(work), nullptr, 0, std::move(ready)});
}

FakeApi::~FakeApi() {
  for (const auto& [at, block] : blocks_) std::free(at);
}

std::string FakeApi::describe(Status status) {
  switch (status) {
    case cuda::kOutOfMemory: return "cudaErrorMemoryAllocation: out of memory";
    case cuda::kNoDevice: return "cudaErrorNoDevice: no CUDA-capable device is detected";
    case kLaunchFailure: return "cudaErrorLaunchFailure: unspecified launch failure";
    default: return "cudaError " + std::to_string(status);
  }
}

/// Counts a call, and says how it ends.
Status FakeApi::note(const std::string& call) {
  const int number = ++calls_[call];
  const auto found = failures_.find({call, number});
  return found == failures_.end() ? cuda::kSuccess : found->second;
}

void FakeApi::fail(const std::string& call, int number, Status status) {
  const std::lock_guard lock(mutex_);
  failures_[{call, calls_[call] + number}] = status;
}

int FakeApi::calls(const std::string& call) {
  const std::lock_guard lock(mutex_);
  return calls_[call];
}

Status FakeApi::device_count(int* count) {
  if (count_status == cuda::kSuccess) *count = devices_;
  return count_status;
}

Status FakeApi::properties(int, cuda::Properties* p) {
  *p = {"Fake 100", 9, 0, 132, capacity, 50 << 20};
  return cuda::kSuccess;
}

Status FakeApi::set_device(int device) {
  const std::lock_guard lock(mutex_);
  current_[std::this_thread::get_id()] = device;
  current();
  return note("cudaSetDevice");
}

int FakeApi::current() {
  const int device = current_[std::this_thread::get_id()];
  if (contexts_.insert(device).second) used_[device] += context_bytes;
  return device;
}

void FakeApi::take(int64_t bytes) {
  const std::lock_guard lock(mutex_);
  used_[current()] += bytes;
}

int64_t FakeApi::used(int device) {
  const std::lock_guard lock(mutex_);
  return used_[device] + others;
}

Status FakeApi::memory(int64_t* free, int64_t* total) {
  const std::lock_guard lock(mutex_);
  *free = capacity - others - used_[current()];
  *total = capacity;
  return cuda::kSuccess;
}

Status FakeApi::allocate_block(void** at, int64_t bytes, int device) {
  const size_t size = (static_cast<size_t>(bytes) + kAlign - 1) / kAlign * kAlign;
  *at = std::aligned_alloc(kAlign, size);
  std::memset(*at, 0xff, size);
  blocks_[*at] = {bytes, device};
  return cuda::kSuccess;
}

Status FakeApi::allocate(void** at, int64_t bytes) {
  const std::lock_guard lock(mutex_);
  if (const Status status = note("cudaMalloc"); status != cuda::kSuccess) return status;
  const int64_t taken = (bytes + granule - 1) / granule * granule;
  const int device = current();
  if (others + used_[device] + taken > capacity) return cuda::kOutOfMemory;
  used_[device] += taken;
  return allocate_block(at, taken, device);
}

Status FakeApi::release(void* at) {
  const std::lock_guard lock(mutex_);
  const auto found = blocks_.find(at);
  if (found == blocks_.end()) return 1;
  // As cudaFree does, wait for what may still use the memory.
  while (!hung_ && run_one()) {}
  if (found->second.device >= 0) used_[found->second.device] -= found->second.bytes;
  blocks_.erase(found);
  std::free(at);
  return cuda::kSuccess;
}

Status FakeApi::allocate_host(void** at, int64_t bytes) {
  const std::lock_guard lock(mutex_);
  return allocate_block(at, bytes, -1);
}
Status FakeApi::release_host(void* at) { return release(at); }

Status FakeApi::fill(void* at, uint8_t value, int64_t bytes, StreamHandle stream) {
  const std::lock_guard lock(mutex_);
  const Status status = note("cudaMemsetAsync");
  if (status == cuda::kSuccess)
    push(queue(stream), {[=] { std::memset(at, value, static_cast<size_t>(bytes)); }, nullptr, 0, nullptr});
  return status;
}

Status FakeApi::copy(void* to, const void* from, int64_t bytes, StreamHandle stream) {
  const std::lock_guard lock(mutex_);
  const Status status = note("cudaMemcpyAsync");
  if (status == cuda::kSuccess)
    push(queue(stream), {[=] { std::memmove(to, from, static_cast<size_t>(bytes)); }, nullptr, 0, nullptr});
  return status;
}

Status FakeApi::create_stream(StreamHandle* stream) {
  const std::lock_guard lock(mutex_);
  auto made = std::make_unique<Queue>();
  made->handle = {this, static_cast<int>(streams_.size())};
  made->priority = draw();
  used_[current()] += stream_bytes;
  stream->value = &made->handle;
  streams_[&made->handle] = std::move(made);
  return note("cudaStreamCreate");
}

Status FakeApi::destroy_stream(StreamHandle stream) {
  const std::lock_guard lock(mutex_);
  while (!hung_ && !queue(stream).work.empty() && run_one()) {}
  pending_ -= queue(stream).work.size();
  streams_.erase(stream.value);
  return cuda::kSuccess;
}

Status FakeApi::create_event(EventHandle* event, bool timed) {
  const std::lock_guard lock(mutex_);
  auto made = std::make_unique<Event>();
  made->timed = timed;
  event->value = made.get();
  events_[made.get()] = std::move(made);
  return note("cudaEventCreate");
}

Status FakeApi::destroy_event(EventHandle event) {
  const std::lock_guard lock(mutex_);
  while (!hung_ && run_one()) {}
  events_.erase(event.value);
  return cuda::kSuccess;
}

Status FakeApi::record_event(EventHandle event, StreamHandle stream) {
  const std::lock_guard lock(mutex_);
  const Status status = note("cudaEventRecord");
  if (status != cuda::kSuccess) return status;
  Event* e = events_.at(event.value).get();
  const uint64_t version = ++e->recorded;
  push(queue(stream), {[this, e, version] {
                         e->reached = std::max(e->reached, version);
                         e->at = clock_;
                       },
                       nullptr, 0, nullptr});
  return cuda::kSuccess;
}

/// Waits for the record that is the last at the moment of the call, and for nothing before the first: as CUDA has it.
Status FakeApi::wait_event(StreamHandle stream, EventHandle event) {
  const std::lock_guard lock(mutex_);
  const Status status = note("cudaStreamWaitEvent");
  if (status != cuda::kSuccess) return status;
  Event* e = events_.at(event.value).get();
  if (e->recorded > 0 && !forget_waits) push(queue(stream), {nullptr, e, e->recorded, nullptr});
  return cuda::kSuccess;
}

Status FakeApi::query_event(EventHandle event) {
  const std::lock_guard lock(mutex_);
  if (const Status status = note("cudaEventQuery"); status != cuda::kSuccess) return status;
  run_some();
  const Event& e = *events_.at(event.value);
  return e.reached == e.recorded ? cuda::kSuccess : cuda::kNotReady;
}

Status FakeApi::milliseconds(float* out, EventHandle from, EventHandle to) {
  const std::lock_guard lock(mutex_);
  const Event &a = *events_.at(from.value), &b = *events_.at(to.value);
  if (!a.timed || !b.timed || a.recorded == 0 || b.recorded == 0) return 400;
  if (a.reached != a.recorded || b.reached != b.recorded) return cuda::kNotReady;
  *out = static_cast<float>(b.at - a.at);
  return cuda::kSuccess;
}

FakeApi::Queue& FakeApi::queue(StreamHandle stream) { return *streams_.at(stream.value); }

void FakeApi::push(Queue& queue, Work work) {
  queue.work.push_back(std::move(work));
  most_pending_ = std::max(most_pending_, ++pending_);
}

bool FakeApi::runnable(const Queue& queue) const {
  if (queue.work.empty()) return false;
  const Work& next = queue.work.front();
  return (next.waits == nullptr || next.waits->reached >= next.target) && (!next.ready || next.ready());
}

/// Runs the next piece of work of the stream that is ahead, among those that can go on. Now and then the order is drawn anew.
bool FakeApi::run_one() {
  if (draw() % 16 == 0)
    for (auto& [handle, q] : streams_) q->priority = draw();
  Queue* chosen = nullptr;
  for (auto& [handle, q] : streams_)
    if (runnable(*q) && (chosen == nullptr || q->priority < chosen->priority)) chosen = q.get();
  if (chosen == nullptr) return false;
  Work work = std::move(chosen->work.front());
  chosen->work.pop_front();
  --pending_;
  clock_ += 1;
  if (work.run) work.run();
  return true;
}

/// Some work of some streams; with everything issued and nothing able to run, the device would hang.
void FakeApi::run_some() {
  if (hung_) return;
  for (uint64_t n = draw() % 64; n > 0 && run_one(); --n) {}
}

uint64_t FakeApi::draw() { return random_ = mix(random_ + 1); }

Status FakeApi::query_stream(StreamHandle stream) {
  const std::lock_guard lock(mutex_);
  if (const Status status = note("cudaStreamQuery"); status != cuda::kSuccess) return status;
  run_some();
  return queue(stream).work.empty() ? cuda::kSuccess : cuda::kNotReady;
}

Status FakeApi::synchronise_stream(StreamHandle stream) {
  const std::lock_guard lock(mutex_);
  if (const Status status = note("cudaStreamSynchronize"); status != cuda::kSuccess) return status;
  while (!queue(stream).work.empty() && !hung_)
    if (!run_one()) {
      deadlocked_ = true;
      return kLaunchFailure;
    }
  return cuda::kSuccess;
}

Status FakeApi::synchronise_device() {
  const std::lock_guard lock(mutex_);
  while (!hung_ && run_one()) {}
  return note("cudaDeviceSynchronize");
}

}  // namespace shardlab::testing
