// Packing buffers into an arena. Every buffer has a size and a lifetime in issue order; two that live at the same time may not
// overlap. The best packing is NP-hard, so several cheap ones are made and the smallest is kept:
//
//   best fit      in issue order, each allocation takes the smallest free gap that holds it, as an allocator would. O(n log n).
//                 A buffer keeps its place from its first allocation to its last free.
//   two levels    the role's buffers by the best of these ways; then the locals of each call by best fit in the gaps that the
//                 buffers leave at that moment. O(n log n) in the number of locals, which are most of a large program.
//   greedy        buffers in a fixed order (large first; long-lived and large first; early first), each at the lowest offset
//                 that is free for its lifetime. O(n^2), so only for moderate n. A buffer that is freed and allocated again
//                 has one offset for all its lives, but others may use the place between them.
//
// No packing is smaller than the peak of the fold; the first that reaches it is taken.

#include <algorithm>
#include <compare>
#include <limits>
#include <map>
#include <optional>
#include <set>

#include "plan/expert_places.h"
#include "plan/memory.h"
#include "plan/rope_table.h"

namespace shardlab {
namespace {

constexpr size_t kGreedyLimit = 2048;  ///< buffers for which O(n^2) takes some milliseconds

/// Positions of an allocation and of its free, or past the program.
struct Life {
  int32_t begin = -1;
  int32_t end = -1;
};

/// Storage to be placed. `begin` is its first allocation, `end` its last free.
struct Resident {
  int64_t bytes = 0;
  int32_t begin = -1;
  int32_t end = -1;
  std::vector<Life> lives;  ///< ascending
  int32_t buffer = -1;      ///< role buffer, or ...
  int32_t local = -1;       ///< ... local of a call
};

struct Packing {
  int64_t bytes = std::numeric_limits<int64_t>::max();
  std::vector<int64_t> offsets;
};

/// Free gaps of an arena that grows at its end.
class Gaps {
 public:
  /// An arena whose first `bytes` are one gap.
  explicit Gaps(int64_t bytes = 0) : end_(bytes) {
    if (bytes > 0) insert(0, bytes);
  }

  int64_t take(int64_t bytes) {
    const auto fit = by_size_.lower_bound({bytes, 0});
    if (fit == by_size_.end()) return grow(bytes);
    const auto [size, offset] = *fit;
    remove(offset, size);
    if (size > bytes) insert(offset + bytes, size - bytes);
    return offset;
  }
  /// Takes [offset, offset + bytes), which must be free.
  void take_at(int64_t offset, int64_t bytes) {
    const auto gap = std::prev(by_offset_.upper_bound(offset));
    const auto [begin, size] = *gap;
    SHARDLAB_CHECK(begin + size >= offset + bytes, "bytes {} to {} of an arena are not free", offset, offset + bytes);
    remove(begin, size);
    if (offset > begin) insert(begin, offset - begin);
    if (begin + size > offset + bytes) insert(offset + bytes, begin + size - offset - bytes);
  }
  void give(int64_t offset, int64_t bytes) {
    auto next = by_offset_.lower_bound(offset);
    if (next != by_offset_.end() && next->first == offset + bytes) {
      bytes += next->second;
      remove(next->first, next->second);
    }
    next = by_offset_.lower_bound(offset);
    if (next != by_offset_.begin()) {
      const auto [before, size] = *std::prev(next);
      if (before + size == offset) {
        remove(before, size);
        offset = before;
        bytes += size;
      }
    }
    insert(offset, bytes);
  }
  int64_t end() const { return end_; }

 private:
  int64_t grow(int64_t bytes) {
    int64_t offset = end_;
    if (!by_offset_.empty()) {
      const auto [last, size] = *by_offset_.rbegin();
      if (last + size == end_) {
        offset = last;
        remove(last, size);
      }
    }
    end_ = offset + bytes;
    return offset;
  }
  void insert(int64_t offset, int64_t size) {
    by_offset_.emplace(offset, size);
    by_size_.emplace(size, offset);
  }
  void remove(int64_t offset, int64_t size) {
    by_offset_.erase(offset);
    by_size_.erase({size, offset});
  }

  std::map<int64_t, int64_t> by_offset_;
  std::set<std::pair<int64_t, int64_t>> by_size_;
  int64_t end_ = 0;
};

struct Event {
  int32_t at;
  bool alloc;
  size_t item;
  friend auto operator<=>(const Event&, const Event&) = default;  // by position; a free before an alloc
};

Packing pack_best_fit(const std::vector<Resident>& items) {
  std::vector<Event> events;
  for (size_t i = 0; i < items.size(); ++i) {
    events.push_back({items[i].begin, true, i});
    events.push_back({items[i].end, false, i});
  }
  std::sort(events.begin(), events.end());
  Packing packing{0, std::vector<int64_t>(items.size())};
  Gaps gaps;
  for (const Event& e : events) {
    if (e.alloc)
      packing.offsets[e.item] = gaps.take(items[e.item].bytes);
    else
      gaps.give(packing.offsets[e.item], items[e.item].bytes);
  }
  packing.bytes = gaps.end();
  return packing;
}

/// Whether two storages ever live at the same time.
bool meet(const Resident& a, const Resident& b) {
  if (a.end <= b.begin || b.end <= a.begin) return false;
  if (a.lives.size() == 1 && b.lives.size() == 1) return true;
  for (size_t i = 0, j = 0; i < a.lives.size() && j < b.lives.size();) {
    if (a.lives[i].end <= b.lives[j].begin)
      ++i;
    else if (b.lives[j].end <= a.lives[i].begin)
      ++j;
    else
      return true;
  }
  return false;
}

Packing pack_greedily(const std::vector<Resident>& items, const std::vector<size_t>& order) {
  Packing packing{0, std::vector<int64_t>(items.size())};
  struct Placed {
    int64_t offset;
    const Resident* item;
  };
  std::vector<Placed> placed;  // ascending offsets
  placed.reserve(items.size());
  for (const size_t i : order) {
    const Resident& item = items[i];
    int64_t offset = 0;
    for (const Placed& p : placed) {
      if (p.offset >= offset + item.bytes) break;
      if (p.offset + p.item->bytes > offset && meet(item, *p.item)) offset = p.offset + p.item->bytes;
    }
    const auto at = std::upper_bound(placed.begin(), placed.end(), offset, [](int64_t v, const Placed& p) { return v < p.offset; });
    placed.insert(at, {offset, &item});
    packing.offsets[i] = offset;
    packing.bytes = std::max(packing.bytes, offset + item.bytes);
  }
  return packing;
}

/// Storage numbers by descending key, equal ones in order of their begin.
template <class Key>
std::vector<size_t> order_by(const std::vector<Resident>& items, const Key& key) {
  std::vector<size_t> order(items.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return std::tuple(key(items[b]), items[a].begin) < std::tuple(key(items[a]), items[b].begin);
  });
  return order;
}

void keep_better(Packing& best, Packing other) {
  if (other.bytes < best.bytes) best = std::move(other);
}

/// The best of the greedy packings and best fit.
Packing pack_flat(const std::vector<Resident>& items, int64_t lower_bound) {
  Packing best = pack_best_fit(items);
  if (items.size() > kGreedyLimit) return best;
  const auto try_order = [&](const std::vector<size_t>& order) {
    if (best.bytes > lower_bound) keep_better(best, pack_greedily(items, order));
  };
  try_order(order_by(items, [](const Resident& i) { return i.bytes; }));
  try_order(order_by(items, [](const Resident& i) { return std::pair(i.end - i.begin, i.bytes); }));
  try_order(order_by(items, [](const Resident& i) { return static_cast<double>(i.end - i.begin) * static_cast<double>(i.bytes); }));
  try_order(order_by(items, [](const Resident& i) { return -i.begin; }));
  return best;
}

/// Largest sum of live bytes.
int64_t peak_of(const std::vector<Resident>& items) {
  std::vector<std::pair<int32_t, int64_t>> changes;  // a free sorts before an alloc at the same position
  for (const Resident& item : items)
    for (const Life& life : item.lives) changes.insert(changes.end(), {{life.begin, item.bytes}, {life.end, -item.bytes}});
  std::sort(changes.begin(), changes.end());
  int64_t live = 0, peak = 0;
  for (const auto& [at, bytes] : changes) peak = std::max(peak, live += bytes);
  return peak;
}

/// Buffers first, locals in the gaps. Nothing when a buffer is allocated while a local lives, whose place it might need.
std::optional<Packing> pack_in_two_levels(const std::vector<Resident>& items) {
  std::vector<Resident> buffers;
  std::vector<size_t> number;  // of each buffer among the items
  for (size_t i = 0; i < items.size(); ++i) {
    if (items[i].buffer < 0) continue;
    buffers.push_back(items[i]);
    number.push_back(i);
  }
  if (buffers.empty() || buffers.size() == items.size()) return std::nullopt;
  const Packing outer = pack_flat(buffers, peak_of(buffers));
  Packing packing{0, std::vector<int64_t>(items.size())};
  for (size_t b = 0; b < buffers.size(); ++b) packing.offsets[number[b]] = outer.offsets[b];

  std::vector<Event> events;
  for (size_t i = 0; i < items.size(); ++i)
    for (const Life& life : items[i].lives) events.insert(events.end(), {Event{life.begin, true, i}, Event{life.end, false, i}});
  std::sort(events.begin(), events.end());
  Gaps gaps(outer.bytes);
  int64_t live_locals = 0;
  for (const Event& e : events) {
    const Resident& item = items[e.item];
    const bool is_local = item.local >= 0;
    if (is_local) live_locals += e.alloc ? 1 : -1;
    if (e.alloc && is_local)
      packing.offsets[e.item] = gaps.take(item.bytes);
    else if (!e.alloc)
      gaps.give(packing.offsets[e.item], item.bytes);
    else if (live_locals > 0)
      return std::nullopt;
    else
      gaps.take_at(packing.offsets[e.item], item.bytes);
  }
  packing.bytes = gaps.end();
  return packing;
}

Packing pack(const std::vector<Resident>& items, int64_t lower_bound) {
  Packing best = pack_best_fit(items);
  if (best.bytes > lower_bound)
    if (auto p = pack_in_two_levels(items)) keep_better(best, std::move(*p));
  if (best.bytes > lower_bound) keep_better(best, pack_flat(items, lower_bound));
  return best;
}

/// Storage of the role's program in one space, from the first allocation to the last free of each.
std::vector<Resident> items_of(const Role& role, const Program& program, Space space) {
  const auto past = static_cast<int32_t>(program.instructions.size());
  std::vector<Resident> buffers(role.buffers.size()), locals(program.locals.size());
  for (const Instruction& i : program.instructions) {
    if (i.kind == Instruction::Kind::kRun) continue;
    Resident& item = i.local >= 0 ? locals[static_cast<size_t>(i.local)] : buffers[i.buffer.index()];
    if (i.kind == Instruction::Kind::kFree) {
      SHARDLAB_CHECK(!item.lives.empty(), "instruction {} frees what was not allocated", i.id);
      item.end = i.id;
      item.lives.back().end = i.id;
      continue;
    }
    if (item.begin < 0) item.begin = i.id;
    item.end = past;
    item.lives.push_back({i.id, past});
  }
  std::vector<Resident> items;
  for (size_t b = 0; b < buffers.size(); ++b) {
    if (role.buffers[b].persistent || role.buffers[b].view || role.buffers[b].space != space || buffers[b].begin < 0) continue;
    items.push_back(buffers[b]);
    items.back().bytes = grains(space, role.buffers[b].type.bytes());
    items.back().buffer = static_cast<int32_t>(b);
  }
  for (size_t l = 0; l < locals.size(); ++l) {
    if (program.locals[l].space != space || locals[l].begin < 0) continue;
    items.push_back(locals[l]);
    items.back().bytes = grains(space, program.locals[l].bytes);
    items.back().local = static_cast<int32_t>(l);
  }
  std::erase_if(items, [](const Resident& i) { return i.bytes == 0; });
  return items;
}

}  // namespace

bool outlives_steps(const Buffer& buffer) {
  return buffer.persistent && !buffer.view && buffer.kind != BufferClass::kMetric &&
         (buffer.kind != BufferClass::kWorkspace || buffer.name.starts_with(kRopeTable) || buffer.name == kExpertPlaces);
}

ArenaLayout place_arena(const Plan& plan, const Program& program) {
  const Role& role = plan.roles[static_cast<size_t>(program.role)];
  const auto peaks = memory_peak(plan, program.role);
  ArenaLayout layout;
  for (const Buffer& b : role.buffers) layout.buffers.push_back(b.view ? -1 : 0);
  for (const bool outlives : {true, false})
    for (size_t i = 0; i < role.buffers.size(); ++i) {
      const Buffer& b = role.buffers[i];
      if (!b.persistent || b.view || outlives_steps(b) != outlives) continue;
      int64_t& end = layout.bytes[static_cast<size_t>(b.space)];
      layout.buffers[i] = end;
      end += grains(b.space, b.type.bytes());
    }
  for (const LocalBuffer& local : program.locals) layout.locals.push_back(layout.bytes[static_cast<size_t>(local.space)]);
  for (size_t s = 0; s < kSpaces; ++s) {
    const std::vector<Resident> items = items_of(role, program, static_cast<Space>(s));
    if (items.empty()) continue;
    const int64_t base = layout.bytes[s];
    const Packing packing = pack(items, peaks[s].peak_bytes - peaks[s].persistent_bytes);
    for (size_t i = 0; i < items.size(); ++i) {
      int64_t& offset = items[i].local >= 0 ? layout.locals[static_cast<size_t>(items[i].local)]
                                            : layout.buffers[static_cast<size_t>(items[i].buffer)];
      offset = base + packing.offsets[i];
    }
    layout.bytes[s] = base + packing.bytes;
  }
  return layout;
}

}  // namespace shardlab
