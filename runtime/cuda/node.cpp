#include "runtime/cuda/node.h"

#include <fmt/format.h>

#include <numeric>

#include "plan/base/check.h"
#include "plan/base/world_error.h"

namespace shardlab::runtime::cuda {

void check(Api& api, Status status, std::string_view call) {
  if (status == kSuccess) return;
  if (status == kOutOfMemory)
    throw WorldError(fmt::format("{}: {}", call, api.describe(status)),
                     "use a smaller micro_batch, recompute: full, more tp or pp, or end what else uses the device (nvidia-smi)");
  throw WorldError(fmt::format("{}: {} (the cause may be an op issued earlier)", call, api.describe(status)),
                   "run the case alone under compute-sanitizer to find the op");
}

void ThrowingCheck::failed(std::string_view kernel, std::string_view library, int code, std::string_view text) {
  api_->last_error();  // cleared, so that teardown does not meet it again
  const std::string what = fmt::format("kernel {}: {} error {}: {}", kernel, library, code, text);
  if (library != "cuda") throw WorldError(what, "see `shardlab doctor` for the library's state; canonical: true does without it");
  throw WorldError(what + " (the cause may be an op issued earlier)", "run the case alone under compute-sanitizer to find the op");
}

RankDevice::~RankDevice() {
  // What fails while everything is torn down has no one left to tell.
  api_.set_device(device_);
  for (const EventHandle e : events_) api_.destroy_event(e);
  for (const EventHandle e : marks_) api_.destroy_event(e);
  for (const EventHandle e : transport_events_) api_.destroy_event(e);
  for (const StreamHandle s : streams_) api_.destroy_stream(s);
  for (const auto& [space, at] : storage_) {
    if (space == Space::kDevice)
      api_.release(at);
    else
      api_.release_host(at);
  }
}

void RankDevice::attach_thread() { check(api_.set_device(device_), "cudaSetDevice"); }

void RankDevice::prepare(const Needs& needs) {
  attach_thread();
  const MemoryAccount::Taking taking(account_, MemoryUse::kStreams, device_);
  for (int i = 0; i < needs.streams; ++i) check(api_.create_stream(&streams_.emplace_back()), "cudaStreamCreate");
  for (int i = 0; i < needs.events; ++i) check(api_.create_event(&events_.emplace_back(), false), "cudaEventCreate");
  for (int i = 0; i < needs.marks; ++i) check(api_.create_event(&marks_.emplace_back(), true), "cudaEventCreate");
}

std::byte* RankDevice::reserve(Space space, int64_t bytes) {
  attach_thread();
  void* at = nullptr;
  SHARDLAB_CHECK(space != Space::kNvme, "a device reserves no drive");
  const bool device = space == Space::kDevice;
  const MemoryAccount::Taking taking(device ? account_ : nullptr, MemoryUse::kArenas, device_);
  const Status status = device ? api_.allocate(&at, bytes) : api_.allocate_host(&at, bytes);
  if (status == kOutOfMemory) {
    int64_t free = 0, total = 0;
    api_.memory(&free, &total);
    api_.last_error();
    throw WorldError(fmt::format("rank {} asks for {} bytes of {} memory; device {} has {} of {} free", rank_, bytes,
                                 name_of(space), device_, free, total),
                     "use fewer ranks on the device, a smaller micro_batch, recompute: full, or more tp or pp");
  }
  check(status, device ? "cudaMalloc" : "cudaMallocHost");
  const std::lock_guard lock(mutex_);
  storage_.emplace_back(space, at);
  reserved_[static_cast<size_t>(space)] += bytes;
  return static_cast<std::byte*>(at);
}

void RankDevice::fill(void* at, uint8_t value, int64_t bytes, int stream) {
  if (bytes > 0) check(api_.fill(at, value, bytes, this->stream(stream)), "cudaMemsetAsync");
}

void RankDevice::copy(void* to, const void* from, int64_t bytes, int stream) {
  if (bytes > 0 && to != from) check(api_.copy(to, from, bytes, this->stream(stream)), "cudaMemcpyAsync");
}

void RankDevice::record(int event, int stream) {
  check(api_.record_event(events_[static_cast<size_t>(event)], this->stream(stream)), "cudaEventRecord");
}

void RankDevice::wait(int event, int stream) {
  check(api_.wait_event(this->stream(stream), events_[static_cast<size_t>(event)]), "cudaStreamWaitEvent");
}

bool RankDevice::reached(int event) {
  const Status status = api_.query_event(events_[static_cast<size_t>(event)]);
  if (status == kNotReady) return false;
  check(status, "cudaEventQuery");
  return true;
}

bool RankDevice::idle(int stream) {
  const Status status = api_.query_stream(this->stream(stream));
  if (status == kNotReady) return false;
  check(status, "cudaStreamQuery");
  return true;
}

void RankDevice::synchronise() {
  for (const StreamHandle s : streams_) check(api_.synchronise_stream(s), "cudaStreamSynchronize");
}

void RankDevice::mark(int mark, int stream) {
  check(api_.record_event(marks_[static_cast<size_t>(mark)], this->stream(stream)), "cudaEventRecord");
}

double RankDevice::milliseconds(int from, int to) {
  float ms = 0;
  check(api_.milliseconds(&ms, marks_[static_cast<size_t>(from)], marks_[static_cast<size_t>(to)]), "cudaEventElapsedTime");
  return ms;
}

EventHandle RankDevice::create_event() {
  attach_thread();
  const std::lock_guard lock(mutex_);
  check(api_.create_event(&transport_events_.emplace_back(), false), "cudaEventCreate");
  return transport_events_.back();
}

Node::Node(Api& api, const gpu::Kernels& kernels, const std::vector<int>& devices, MemoryAccount* account)
    : api_(api), kernels_(kernels), account_(account) {
  for (size_t r = 0; r < devices.size(); ++r)
    ranks_.push_back(std::make_unique<RankDevice>(api, static_cast<int>(r), devices[r], account));
}

Result<std::vector<int>> devices_for(TransportKind transport, int world_size, const Presence& presence) {
  if (!presence.usable()) return Error{ExitCode::kEnvironment, presence.reason, presence.remedy, ""};
  std::vector<int> devices(static_cast<size_t>(world_size), 0);
  if (transport != TransportKind::kNccl) return devices;
  if (world_size > presence.devices)
    return Error{
        ExitCode::kEnvironment,
        fmt::format("transport nccl gives each of {} ranks a device, and this machine has {}", world_size, presence.devices),
        "use transport: one-gpu, which puts every rank on one device, or fewer ranks", ""};
  std::iota(devices.begin(), devices.end(), 0);
  return devices;
}

}  // namespace shardlab::runtime::cuda
