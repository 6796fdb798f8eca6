// A set of 64-bit hashes: ids of the points of a sweep, of which there may be a million.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "plan/base/hash.h"

namespace shardlab {

/// A set of ids in one block of memory, at most two thirds full: 12 to 24 bytes an id.
class IdSet {
 public:
  /// Whether `id` is new.
  bool insert(uint64_t id) {
    if (id == 0) return !std::exchange(has_zero_, true);  // 0 marks a free slot
    if (3 * (size_ + 1) > 2 * slots_.size()) grow();
    uint64_t& slot = slot_of(id);
    if (slot == id) return false;
    slot = id;
    ++size_;
    return true;
  }
  size_t size() const { return size_ + (has_zero_ ? 1 : 0); }

 private:
  /// The slot of the id, or the free one where it belongs.
  uint64_t& slot_of(uint64_t id) {
    const size_t mask = slots_.size() - 1;
    size_t at = static_cast<size_t>(mix(id)) & mask;
    while (slots_[at] != 0 && slots_[at] != id) at = (at + 1) & mask;
    return slots_[at];
  }
  void grow() {
    std::vector<uint64_t> before(std::max<size_t>(64, 2 * slots_.size()));
    before.swap(slots_);
    for (const uint64_t id : before)
      if (id != 0) slot_of(id) = id;
  }

  std::vector<uint64_t> slots_;  ///< a power of two of them; 0: free
  size_t size_ = 0;
  bool has_zero_ = false;
};

}  // namespace shardlab
