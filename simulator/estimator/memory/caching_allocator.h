// PyTorch's caching allocator, replayed: what it takes from the driver for a sequence of allocations and releases.
//
// Rules. A request is rounded up to 512 bytes. Up to 1 MiB it is served from segments of 2 MiB ("small"), else from "large" ones:
// of 20 MiB for requests below 10 MiB, of the request rounded up to 2 MiB above. A free block of the same stream and pool that is
// large enough is taken, the smallest first, of equal ones that at the lowest address; what is left of it becomes a free block of
// its own where it is at least 512 bytes (small) or more than 1 MiB (large). A released block joins its free neighbours in the
// segment. Where the driver has no more, segments that are free as a whole are given back, and the request is tried again.
// With expandable segments each stream and pool has one segment that grows at its end, by pages of 2 MiB (small) or 20 MiB
// (large), and every rest of 512 bytes and more is split off.
// Source: PyTorch, c10/cuda/CUDACachingAllocator.cpp (kMinBlockSize, kSmallSize, kSmallBuffer, kLargeBuffer, kMinLargeAlloc,
// kRoundLarge, should_split, get_free_block, ExpandableSegment) and test/test_cuda.py; not told: round-up to powers of two, maximal
// split size and garbage collection, which are off by default.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace shardlab::simulator::whatif {

struct AllocatorOptions {
  bool expandable_segments = false;
  int64_t capacity = 0;  ///< bytes that the driver can give; 0: no end
};

class CachingAllocator {
 public:
  static constexpr int64_t kRound = 512;
  static constexpr int64_t kSmall = int64_t{1} << 20;  ///< the largest small request
  static constexpr int64_t kSmallSegment = int64_t{2} << 20;
  static constexpr int64_t kLargeSegment = int64_t{20} << 20;
  static constexpr int64_t kOwnSegment = int64_t{10} << 20;  ///< from here a request has a segment of its own size
  static constexpr int64_t kOwnRound = int64_t{2} << 20;

  explicit CachingAllocator(AllocatorOptions options = {}) : options_(options) {}

  /// Allocates a block of `bytes` (above 0) on a stream (0 and up) and returns its handle. If neither the driver nor the cache has room, the
  /// block is given all the same and `out_of_memory` stays true.
  int32_t allocate(int64_t bytes, int stream = 0);
  void release(int32_t block);

  int64_t reserved() const { return reserved_; }
  int64_t peak_reserved() const { return peak_reserved_; }
  int64_t allocated() const { return allocated_; }  ///< rounded, as torch.cuda.memory_allocated counts
  int64_t peak_allocated() const { return peak_allocated_; }
  int64_t retries() const { return retries_; }  ///< times that cached segments were given back to make room
  bool out_of_memory() const { return out_of_memory_; }

 private:
  struct Block {
    int64_t size = 0, address = 0;
    int32_t before = -1, after = -1;  ///< neighbours in the segment
    int32_t pool = 0;
    bool free = true;
  };
  struct Place {
    int64_t address;
    int32_t block;
    auto operator<=>(const Place&) const = default;
  };
  struct Size {
    int64_t bytes;
    std::vector<Place> places;  ///< of the free blocks of this size, by address
  };
  struct Pool {
    bool small = false;
    std::vector<Size> free;  ///< by size, some without a place: a step has many blocks of few sizes
    int32_t last = -1;       ///< of the expandable segment
  };

  static constexpr size_t kEmptySizes = 16;  ///< sizes without a place are dropped where a pool has more sizes than these

  int32_t pool_of(int stream, bool small);
  static std::vector<Size>::iterator from(Pool& pool, int64_t bytes);
  int32_t new_block(int64_t size, int64_t address, int32_t pool);
  int32_t new_segment(int64_t bytes, int32_t pool);
  int32_t grown(int64_t bytes, int32_t pool);
  bool room_for(int64_t bytes);
  void give_back_free_segments();
  void split(int32_t block, int64_t bytes);
  void insert(int32_t block);
  void erase(int32_t block);
  void forget(int32_t block);

  AllocatorOptions options_;
  std::vector<Block> blocks_;
  std::vector<int32_t> spare_;  ///< handles of blocks that are no more
  std::vector<Pool> pools_;
  std::vector<int32_t> pool_by_stream_;  ///< at 2 * stream, and of small requests behind it; -1: none yet
  int64_t next_address_ = 0;
  int64_t reserved_ = 0, peak_reserved_ = 0, allocated_ = 0, peak_allocated_ = 0, retries_ = 0;
  bool out_of_memory_ = false;
};

}  // namespace shardlab::simulator::whatif
