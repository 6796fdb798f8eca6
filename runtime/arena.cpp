#include "runtime/arena.h"

#include <fmt/format.h>
#include <sys/mman.h>

#include <cstring>

#include "plan/base/check.h"
#include "plan/base/world_error.h"
#include "runtime/block_store.h"

#if defined(__SANITIZE_ADDRESS__)
#define SHARDLAB_ADDRESS_SANITIZER 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define SHARDLAB_ADDRESS_SANITIZER 1
#endif
#endif
#ifdef SHARDLAB_ADDRESS_SANITIZER
#include <sanitizer/asan_interface.h>
#endif

namespace shardlab::runtime {

namespace {

size_t index_of(Space space) { return static_cast<size_t>(space); }

void forbid([[maybe_unused]] std::byte* at, [[maybe_unused]] int64_t bytes) {
#ifdef SHARDLAB_ADDRESS_SANITIZER
  __asan_poison_memory_region(at, static_cast<size_t>(bytes));
#endif
}

void permit([[maybe_unused]] std::byte* at, [[maybe_unused]] int64_t bytes) {
#ifdef SHARDLAB_ADDRESS_SANITIZER
  __asan_unpoison_memory_region(at, static_cast<size_t>(bytes));
#endif
}

void fill_with_poison(std::byte* at, int64_t bytes) {
  for (int64_t i = 0; i + 4 <= bytes; i += 4) std::memcpy(at + i, &kPoison, 4);
}

}  // namespace

void Ledger::allocate(Space space, BufferClass cls, int64_t bytes) {
  const size_t s = index_of(space);
  live_[s] += aligned(bytes);
  by_class_[s].bytes[static_cast<size_t>(cls)] += aligned(bytes);
  if (live_[s] <= peak_[s]) return;
  peak_[s] = live_[s];
  at_peak_[s] = by_class_[s];
}

void Ledger::free(Space space, BufferClass cls, int64_t bytes) {
  const size_t s = index_of(space);
  live_[s] -= aligned(bytes);
  by_class_[s].bytes[static_cast<size_t>(cls)] -= aligned(bytes);
  SHARDLAB_CHECK(live_[s] >= 0 && by_class_[s].bytes[static_cast<size_t>(cls)] >= 0,
                 "{} bytes of {} are freed that were never allocated", bytes, name_of(cls));
}

Arena::Arena(const std::array<int64_t, kSpaces>& bytes, const Options& options) : options_(options), bytes_(bytes) {
  for (size_t s = 0; s < static_cast<size_t>(kSpaces); ++s) {
    if (!options_.reserve || bytes_[s] == 0) continue;
    if (static_cast<Space>(s) == Space::kNvme) continue;  // a file of the rank's
    const size_t n = static_cast<size_t>(bytes_[s]);
    if (options_.device != nullptr) {
      std::byte* const lent = options_.storage[s];
      storage_[s] = {lent != nullptr ? lent : options_.device->reserve(static_cast<Space>(s), bytes_[s]), Unmap{}};
      continue;
    }
    if (options_.storage[s] != nullptr) {
      storage_[s] = {options_.storage[s], Unmap{n, true}};
      continue;
    }
    void* p = mmap(nullptr, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED)
      throw WorldError(
          fmt::format("this machine gives no {} bytes for the {} memory of one rank", n, name_of(static_cast<Space>(s))),
          "use fewer ranks, a smaller micro_batch, or a smaller model");
#ifdef MADV_HUGEPAGE
    madvise(p, n, MADV_HUGEPAGE);  // refused on some systems, where pages stay small
#endif
    storage_[s] = {static_cast<std::byte*>(p), Unmap{n}};
  }
}

void Arena::Unmap::operator()(std::byte* p) const {
  if (size == 0) return;
  permit(p, static_cast<int64_t>(size));
  if (!lent) munmap(p, size);
}

std::byte* Arena::at(Space space, int64_t offset) const {
  const auto& storage = storage_[index_of(space)];
  return storage ? storage.get() + offset : nullptr;
}

int64_t Arena::extent(Space space, int64_t offset, int64_t bytes) const {
  const int64_t whole = whole_blocks(bytes);
  const bool has_blocks = space == Space::kHost && offset % kBlockBytes == 0 && offset + whole <= this->bytes(space);
  return has_blocks ? whole : bytes;
}

void Arena::allocate(Space space, int64_t offset, int64_t bytes) {
  std::byte* p = at(space, offset);
  if (p == nullptr) return;
  bytes = extent(space, offset, bytes);
  SHARDLAB_CHECK(offset >= 0 && offset + bytes <= bytes_[index_of(space)], "a buffer at {} of {} bytes lies outside an arena of {}",
                 offset, bytes, bytes_[index_of(space)]);
  if (!own(space)) {
    if (options_.poison) options_.device->fill(p, kPoisonByte, bytes, 0);
    return;
  }
  permit(p, bytes);
  if (options_.poison) fill_with_poison(p, bytes);
}

void Arena::free(Space space, int64_t offset, int64_t bytes) {
  std::byte* p = at(space, offset);
  if (p == nullptr) return;
  bytes = extent(space, offset, bytes);
  if (!own(space)) {
    if (options_.poison) options_.device->fill(p, kPoisonByte, bytes, 0);
    return;
  }
  if (options_.poison) fill_with_poison(p, bytes);
  forbid(p, bytes);
}

void Arena::touch() {
  for (size_t s = 0; s < static_cast<size_t>(kSpaces); ++s) {
    if (!storage_[s]) continue;
    std::byte* p = storage_[s].get();
    if (!own(static_cast<Space>(s))) {
      options_.device->fill(p, options_.poison ? kPoisonByte : 0, bytes_[s], 0);
      continue;
    }
    if (options_.poison)
      fill_with_poison(p, bytes_[s]);
    else
      std::memset(p, 0, static_cast<size_t>(bytes_[s]));
    forbid(p, bytes_[s]);
  }
}

}  // namespace shardlab::runtime
