#include "simulator/estimator/memory/caching_allocator.h"

#include <algorithm>

#include "plan/base/check.h"

namespace shardlab::simulator::whatif {
namespace {

int64_t rounded(int64_t bytes, int64_t unit) { return (bytes + unit - 1) / unit * unit; }

/// Beyond this no request and no address is made: sums stay in 64 bits.
constexpr int64_t kMost = int64_t{1} << 56;

}  // namespace

int32_t CachingAllocator::pool_of(int stream, bool small) {
  const auto at = 2 * static_cast<size_t>(stream) + (small ? 1 : 0);
  if (pool_by_stream_.size() <= at) pool_by_stream_.resize(at + 1, -1);
  if (pool_by_stream_[at] < 0) {
    pool_by_stream_[at] = static_cast<int32_t>(pools_.size());
    pools_.push_back({.small = small, .free = {}});
  }
  return pool_by_stream_[at];
}

/// The first of the pool's sizes that is not below `bytes`.
std::vector<CachingAllocator::Size>::iterator CachingAllocator::from(Pool& pool, int64_t bytes) {
  return std::ranges::lower_bound(pool.free, bytes, {}, &Size::bytes);
}

int32_t CachingAllocator::new_block(int64_t size, int64_t address, int32_t pool) {
  int32_t handle = static_cast<int32_t>(blocks_.size());
  if (spare_.empty())
    blocks_.emplace_back();
  else
    handle = spare_.back(), spare_.pop_back();
  blocks_[static_cast<size_t>(handle)] = {.size = size, .address = address, .pool = pool};
  return handle;
}

void CachingAllocator::insert(int32_t block) {
  const Block& b = blocks_[static_cast<size_t>(block)];
  Pool& pool = pools_[static_cast<size_t>(b.pool)];
  auto size = from(pool, b.size);
  if (size == pool.free.end() || size->bytes != b.size) {
    if (pool.free.size() > kEmptySizes) {
      std::erase_if(pool.free, [](const Size& s) { return s.places.empty(); });
      size = from(pool, b.size);
    }
    size = pool.free.insert(size, {.bytes = b.size, .places = {}});
  }
  const Place place{b.address, block};
  size->places.insert(std::ranges::lower_bound(size->places, place), place);
}

void CachingAllocator::erase(int32_t block) {
  const Block& b = blocks_[static_cast<size_t>(block)];
  std::vector<Place>& places = from(pools_[static_cast<size_t>(b.pool)], b.size)->places;
  places.erase(std::ranges::lower_bound(places, Place{b.address, block}));
}

void CachingAllocator::forget(int32_t block) { spare_.push_back(block); }

void CachingAllocator::give_back_free_segments() {
  ++retries_;
  for (Pool& pool : pools_)
    for (Size& size : pool.free)
      std::erase_if(size.places, [&](const Place& place) {
        const Block& b = blocks_[static_cast<size_t>(place.block)];
        if (b.before >= 0 || b.after >= 0) return false;
        reserved_ -= b.size;
        if (pool.last == place.block) pool.last = -1;
        forget(place.block);
        return true;
      });
}

bool CachingAllocator::room_for(int64_t bytes) {
  const auto fits = [&] { return options_.capacity <= 0 || reserved_ + bytes <= options_.capacity; };
  if (fits()) return true;
  give_back_free_segments();
  return fits();
}

int32_t CachingAllocator::new_segment(int64_t bytes, int32_t pool) {
  const bool small = pools_[static_cast<size_t>(pool)].small;
  const int64_t size = small ? kSmallSegment : bytes < kOwnSegment ? kLargeSegment : rounded(bytes, kOwnRound);
  if (!room_for(size)) out_of_memory_ = true;
  const int32_t block = new_block(size, next_address_, pool);
  next_address_ += size;
  reserved_ += size;
  return block;
}

/// A block at the end of the pool's one segment: the free one that is there, or a new one, made long enough.
int32_t CachingAllocator::grown(int64_t bytes, int32_t pool) {
  Pool& p = pools_[static_cast<size_t>(pool)];
  const int64_t page = p.small ? kSmallSegment : kLargeSegment;
  const auto missing = [&] {
    const int64_t have = p.last >= 0 && blocks_[static_cast<size_t>(p.last)].free ? blocks_[static_cast<size_t>(p.last)].size : 0;
    return rounded(bytes - have, page);
  };
  if (!room_for(missing())) out_of_memory_ = true;
  const int64_t more = missing();  // giving back may have taken the end away
  reserved_ += more;
  if (p.last >= 0 && blocks_[static_cast<size_t>(p.last)].free) {
    erase(p.last);
    blocks_[static_cast<size_t>(p.last)].size += more;
    return p.last;
  }
  // Segments grow at addresses of their own, far from one another.
  const int64_t address = p.last >= 0 ? blocks_[static_cast<size_t>(p.last)].address + blocks_[static_cast<size_t>(p.last)].size
                                      : kMost / 64 * (pool + 1);
  const int32_t block = new_block(more, address, pool);
  if (p.last >= 0) blocks_[static_cast<size_t>(p.last)].after = block, blocks_[static_cast<size_t>(block)].before = p.last;
  p.last = block;
  return block;
}

void CachingAllocator::split(int32_t block, int64_t bytes) {
  const Block whole = blocks_[static_cast<size_t>(block)];
  Pool& pool = pools_[static_cast<size_t>(whole.pool)];
  const int64_t rest = whole.size - bytes;
  if (pool.small || options_.expandable_segments ? rest < kRound : rest <= kSmall) return;
  const int32_t tail = new_block(rest, whole.address + bytes, whole.pool);
  Block& t = blocks_[static_cast<size_t>(tail)];
  t.before = block, t.after = whole.after;
  if (whole.after >= 0) blocks_[static_cast<size_t>(whole.after)].before = tail;
  blocks_[static_cast<size_t>(block)].size = bytes;
  blocks_[static_cast<size_t>(block)].after = tail;
  if (pool.last == block) pool.last = tail;
  insert(tail);
}

int32_t CachingAllocator::allocate(int64_t bytes, int stream) {
  SHARDLAB_CHECK(bytes > 0 && bytes < kMost, "a request of {} bytes", bytes);
  SHARDLAB_CHECK(stream >= 0, "stream {}", stream);
  const int64_t size = rounded(bytes, kRound);
  const int32_t pool = pool_of(stream, size <= kSmall);
  std::vector<Size>& free = pools_[static_cast<size_t>(pool)].free;
  auto found = from(pools_[static_cast<size_t>(pool)], size);
  while (found != free.end() && found->places.empty()) ++found;
  int32_t block = -1;
  if (found != free.end()) {
    block = found->places.front().block;
    found->places.erase(found->places.begin());
  } else {
    block = options_.expandable_segments ? grown(size, pool) : new_segment(size, pool);
  }
  blocks_[static_cast<size_t>(block)].free = false;
  split(block, size);
  allocated_ += blocks_[static_cast<size_t>(block)].size;
  peak_allocated_ = std::max(peak_allocated_, allocated_);
  peak_reserved_ = std::max(peak_reserved_, reserved_);
  return block;
}

void CachingAllocator::release(int32_t block) {
  Block& b = blocks_[static_cast<size_t>(block)];
  SHARDLAB_CHECK(!b.free, "block {} is released twice", block);
  allocated_ -= b.size;
  b.free = true;
  Pool& pool = pools_[static_cast<size_t>(b.pool)];
  if (const int32_t before = b.before; before >= 0 && blocks_[static_cast<size_t>(before)].free) {
    erase(before);
    const Block joined = blocks_[static_cast<size_t>(before)];
    b.size += joined.size, b.address = joined.address, b.before = joined.before;
    if (joined.before >= 0) blocks_[static_cast<size_t>(joined.before)].after = block;
    forget(before);
  }
  if (const int32_t after = b.after; after >= 0 && blocks_[static_cast<size_t>(after)].free) {
    erase(after);
    const Block joined = blocks_[static_cast<size_t>(after)];
    b.size += joined.size, b.after = joined.after;
    if (joined.after >= 0) blocks_[static_cast<size_t>(joined.after)].before = block;
    if (pool.last == after) pool.last = block;
    forget(after);
  }
  insert(block);
}

}  // namespace shardlab::simulator::whatif
