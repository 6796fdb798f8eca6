// The replayed allocator against the rules that PyTorch's own test states (test/test_cuda.py, allocator of segments and pools).
#include <algorithm>
#include <map>
#include <random>

#include "simulator/estimator/memory/caching_allocator.h"
#include "simulator/estimator/memory/replay.h"
#include "tests/test.h"

namespace shardlab::simulator::whatif {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;

TEST_CASE("requests are served from segments of 2 MiB, of 20 MiB, and of their own size in steps of 2 MiB") {
  struct Row {
    int64_t bytes;
    int times;
    int64_t reserved;
  };
  const int64_t own = 10 * kMiB + 512;
  for (const Row& row :
       {Row{1, 1, 2 * kMiB}, Row{512, 1, 2 * kMiB}, Row{kMiB, 2, 2 * kMiB}, Row{kMiB, 3, 4 * kMiB}, Row{kMiB + 512, 1, 20 * kMiB},
        Row{own - 1024, 1, 20 * kMiB}, Row{own - 1024, 2, 20 * kMiB}, Row{own - 1024, 3, 40 * kMiB}, Row{10 * kMiB, 1, 10 * kMiB},
        Row{own, 1, 12 * kMiB}, Row{own, 3, 36 * kMiB}}) {
    CachingAllocator allocator;
    for (int i = 0; i < row.times; ++i) allocator.allocate(row.bytes);
    INFO(row.bytes << " times " << row.times);
    CHECK(allocator.reserved() == row.reserved);
    // A rest that is no block of its own is counted with the block that it stays in.
    CHECK(allocator.allocated() >= row.times * ((row.bytes + 511) / 512 * 512));
    if (row.times == 1) CHECK(allocator.allocated() == (row.bytes + 511) / 512 * 512);
  }
}

TEST_CASE("the smallest free block that is large enough is taken, and a rest of more than 1 MiB is split off") {
  CachingAllocator allocator;
  const int32_t large = allocator.allocate(64 * kMiB), fence = allocator.allocate(20 * kMiB),
                middle = allocator.allocate(40 * kMiB);
  CHECK(allocator.reserved() == 124 * kMiB);
  allocator.release(large), allocator.release(middle);
  allocator.allocate(38 * kMiB);  // from the 40: a rest of 2
  allocator.allocate(2 * kMiB);   // that rest
  CHECK(allocator.reserved() == 124 * kMiB);
  allocator.allocate(63 * kMiB);  // from the 64: the rest of 1 MiB is no block of its own
  CHECK(allocator.reserved() == 124 * kMiB);
  CHECK(allocator.allocated() == (20 + 38 + 2 + 64) * kMiB);
  allocator.allocate(kMiB + 512);
  CHECK(allocator.reserved() == 144 * kMiB);
  allocator.release(fence);
}

TEST_CASE("a released block joins its free neighbours, and streams share nothing") {
  CachingAllocator allocator;
  std::vector<int32_t> parts;
  const int32_t whole = allocator.allocate(64 * kMiB);
  allocator.release(whole);
  for (int i = 0; i < 4; ++i) parts.push_back(allocator.allocate(16 * kMiB));
  CHECK(allocator.reserved() == 64 * kMiB);
  for (const int i : {1, 3, 0, 2}) allocator.release(parts[static_cast<size_t>(i)]);
  const int32_t again = allocator.allocate(64 * kMiB);
  CHECK(allocator.reserved() == 64 * kMiB);
  allocator.release(again);
  allocator.allocate(64 * kMiB, 1);
  CHECK(allocator.reserved() == 128 * kMiB);
}

TEST_CASE("pieces that do not fit together are what fragmentation is, and expandable segments have little of it") {
  // Alternating live and free blocks of 30 MiB, then requests of 40: none of the holes serves.
  for (const bool expandable : {false, true}) {
    CachingAllocator allocator({.expandable_segments = expandable});
    std::vector<int32_t> blocks;
    for (int i = 0; i < 10; ++i) blocks.push_back(allocator.allocate(30 * kMiB));
    CHECK(allocator.reserved() == 300 * kMiB);
    for (size_t i = 0; i < blocks.size(); i += 2) allocator.release(blocks[i]);
    allocator.allocate(40 * kMiB);
    CHECK(allocator.reserved() == 340 * kMiB);
    // All free: apart, no segment holds 100; grown at its end, the one segment does.
    for (size_t i = 1; i < blocks.size(); i += 2) allocator.release(blocks[i]);
    allocator.allocate(100 * kMiB);
    CHECK(allocator.reserved() == (expandable ? 340 : 440) * kMiB);
  }
}

TEST_CASE("where the driver has no more, free segments are given back first") {
  CachingAllocator allocator({.capacity = 100 * kMiB});
  const int32_t a = allocator.allocate(60 * kMiB);
  allocator.release(a);
  const int32_t b = allocator.allocate(80 * kMiB);
  CHECK(allocator.reserved() == 80 * kMiB);
  CHECK(allocator.peak_reserved() == 80 * kMiB);
  CHECK(allocator.retries() == 1);
  CHECK_FALSE(allocator.out_of_memory());
  allocator.allocate(30 * kMiB);
  CHECK(allocator.out_of_memory());
  allocator.release(b);
}

TEST_CASE("whatever the order, nothing is lost: live is within reserved, and all that is released serves again") {
  std::mt19937 random(5);
  for (const bool expandable : {false, true}) {
    constexpr int64_t kEnd = int64_t{1} << 42;
    CachingAllocator allocator({.expandable_segments = expandable, .capacity = kEnd});
    std::map<int32_t, int64_t> live;
    int64_t bytes = 0;
    for (int i = 0; i < 20000; ++i) {
      if (live.empty() || random() % 100 < 55) {
        const int64_t size = 1 + static_cast<int64_t>(random() % (uint64_t{1} << (random() % 27)));
        const int32_t block = allocator.allocate(size, static_cast<int>(random() % 3));
        REQUIRE(live.emplace(block, size).second);
        bytes += size;
      } else {
        const auto it = std::next(live.begin(), static_cast<int64_t>(random() % live.size()));
        allocator.release(it->first);
        bytes -= it->second;
        live.erase(it);
      }
      REQUIRE(allocator.allocated() >= bytes);
      REQUIRE(allocator.allocated() <= allocator.reserved());
    }
    for (const auto& [block, size] : live) allocator.release(block);
    CHECK(allocator.allocated() == 0);
    // Every segment is whole again: all are given back for a request that leaves no room for one of them.
    allocator.allocate(kEnd - 24 * kMiB);  // a multiple of 20 MiB
    CHECK(allocator.reserved() == kEnd - 24 * kMiB);
    CHECK(allocator.retries() == 1);
    CHECK_FALSE(allocator.out_of_memory());
  }
}

TEST_CASE("a replay counts what events say") {
  using analytic::AllocationEvent;
  using analytic::MemoryPart;
  const std::vector<AllocationEvent> events{{30 * kMiB, 0, MemoryPart::kParameters, 0},
                                            {15 * kMiB, 1, MemoryPart::kActivations, 0},
                                            {-15 * kMiB, 1, MemoryPart::kActivations, 0},
                                            {11 * kMiB, 2, MemoryPart::kGathered, 1}};
  const Replayed r = replay(events, {});
  CHECK(r.live == 46 * kMiB);  // a block of 16: 1 MiB is no block of its own
  CHECK(r.reserved == (30 + 16 + 12) * kMiB);
  CHECK_FALSE(r.retried);
  const Replayed tight = replay(events, {.capacity = 50 * kMiB});
  CHECK(tight.retried);
  CHECK(tight.reserved == 46 * kMiB);
  CHECK_FALSE(tight.out_of_memory);
}

}  // namespace
}  // namespace shardlab::simulator::whatif
