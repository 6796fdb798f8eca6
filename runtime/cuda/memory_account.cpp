#include "runtime/cuda/memory_account.h"

#include <algorithm>
#include <numeric>

#include "plan/device_words.h"

namespace shardlab::runtime::cuda {

std::string_view name_of(MemoryUse use) {
  switch (use) {
    case MemoryUse::kContext: return device_words::kContext;
    case MemoryUse::kStreams: return device_words::kStreams;
    case MemoryUse::kArenas: return device_words::kRounding;
    case MemoryUse::kMatmul: return device_words::kMatmul;
    case MemoryUse::kCudnn: return device_words::kCudnn;
    case MemoryUse::kCommunicators: return device_words::kNccl;
    case MemoryUse::kRecorder: return device_words::kRecorder;
    case MemoryUse::kKernels: return device_words::kKernels;
    case MemoryUse::kRest: break;
  }
  return device_words::kRest;
}

MemoryAccount::MemoryAccount(Api& api, std::set<int> devices, Meter meter) : api_(api), meter_(std::move(meter)) {
  if (meter_ != nullptr && std::ranges::any_of(devices, [&](int device) { return !meter_(device); })) meter_ = nullptr;
  for (const int device : devices) last_[device] = read(device).value_or(0);
  if (meter_ == nullptr) return;
  for (const int device : devices) {
    int64_t free = 0, total = 0;
    if (api_.set_device(device) == kSuccess) api_.memory(&free, &total);
  }
  book(MemoryUse::kContext);
}

std::optional<int64_t> MemoryAccount::read(int device) {
  if (meter_ != nullptr) return meter_(device);
  int64_t free = 0, total = 0;
  if (api_.set_device(device) != kSuccess || api_.memory(&free, &total) != kSuccess) return std::nullopt;
  return total - free;
}

/// A reading that fails leaves what it would have shown to the next.
void MemoryAccount::book(MemoryUse use, int device) {
  const auto found = last_.find(device);
  if (found == last_.end()) return;
  const auto now = read(device);
  if (!now) return;
  booked_[static_cast<size_t>(use)] += *now - found->second;
  found->second = *now;
}

void MemoryAccount::book(MemoryUse use) {
  const std::lock_guard lock(mutex_);
  for (const auto& [device, bytes] : last_) book(use, device);
}

int64_t MemoryAccount::taken() const {
  const std::lock_guard lock(mutex_);
  return std::accumulate(booked_.begin(), booked_.end(), int64_t{0});
}

std::vector<std::pair<MemoryUse, int64_t>> MemoryAccount::unplanned(int64_t planned) const {
  const std::lock_guard lock(mutex_);
  std::vector<std::pair<MemoryUse, int64_t>> items;
  for (size_t i = 0; i < kMemoryUses; ++i) {
    const MemoryUse use = static_cast<MemoryUse>(i);
    const int64_t bytes = booked_[i] - (use == MemoryUse::kArenas ? planned : 0);
    if (bytes != 0) items.emplace_back(use, bytes);
  }
  return items;
}

MemoryAccount::Taking::Taking(MemoryAccount* account, MemoryUse use, std::span<const int> devices) : account_(account) {
  if (account_ == nullptr) return;
  devices_.assign(devices.begin(), devices.end());
  account_->mutex_.lock();
  const MemoryUse before = account_->open_.empty() ? MemoryUse::kRest : account_->open_.back();
  for (const int device : devices_) account_->book(before, device);
  account_->open_.push_back(use);
}

MemoryAccount::Taking::~Taking() {
  if (account_ == nullptr) return;
  for (const int device : devices_) account_->book(account_->open_.back(), device);
  account_->open_.pop_back();
  account_->mutex_.unlock();
}

}  // namespace shardlab::runtime::cuda
