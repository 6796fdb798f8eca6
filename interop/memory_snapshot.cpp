#include "interop/memory_snapshot.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <string_view>
#include <vector>

#include "interop/held_buffers.h"
#include "interop/traced.h"
#include "plan/base/check.h"

namespace shardlab::interop {
namespace {

constexpr int64_t kFirstAddress = int64_t{0x7f}
                                  << 40;  ///< where devices' memory lies in a process; no block is at 0, which is no address
constexpr int kStream = 0;

/// Values as pickle's stack machine takes them. Texts are written once and fetched by number after.
class Pickle {
 public:
  Pickle() : bytes_("\x80\x02") {}

  void number(int64_t value) {
    if (value >= 0 && value < 256) return little('K', value, 1);
    if (value >= 0 && value < 65536) return little('M', value, 2);
    if (value >= INT32_MIN && value <= INT32_MAX) return little('J', value, 4);
    bytes_ += "\x8a";  // LONG1: a length, then so many bytes
    little(8, value, 8);
  }
  void text(const std::string& value) {
    const auto [at, is_new] = numbers_.try_emplace(value, numbers_.size());
    const auto place = static_cast<int64_t>(at->second);
    if (!is_new) return place < 256 ? little('h', place, 1) : little('j', place, 4);
    little('X', static_cast<int64_t>(value.size()), 4);
    bytes_ += value;
    place < 256 ? little('q', place, 1) : little('r', place, 4);
  }
  void key(const std::string& name) { text(name); }
  template <class Fill>
  void object(const Fill& fill) {
    bytes_ += "}(";
    fill();
    bytes_ += "u";
  }
  /// A list whose elements `each` writes. Readers take the elements between a mark and its end at once, hence not too many of them.
  template <class Each>
  void list(size_t size, const Each& each) {
    constexpr size_t kAtOnce = 1000;
    bytes_ += "]";
    for (size_t begin = 0; begin < size; begin += kAtOnce) {
      bytes_ += "(";
      for (size_t i = begin; i < std::min(size, begin + kAtOnce); ++i) each(i);
      bytes_ += "e";
    }
  }
  std::string take() { return std::move(bytes_) + "."; }

 private:
  void little(char opcode, int64_t value, int size) {
    bytes_ += opcode;
    for (int i = 0; i < size; ++i) bytes_ += static_cast<char>(value >> 8 * i & 0xff);
  }

  std::string bytes_;
  std::map<std::string, size_t> numbers_;
};

class Snapshot {
 public:
  Snapshot(const Plan& plan, const Program& program, const ArenaLayout& arena, const Trace& trace, int rank)
      : size_(arena.bytes[static_cast<size_t>(Space::kDevice)]), kept_(persistent_buffers(plan, program, arena)) {
    const std::vector<double> starts = step_starts(trace);
    for (int step = 0; step < trace.steps; ++step)
      for (BufferChange& c : buffer_changes(plan, program, arena, trace, rank, step)) {
        c.at_s += starts[static_cast<size_t>(step)];
        changes_.push_back(std::move(c));
      }
  }

  std::string pickled() {
    out_.object([&] {
      out_.key("segments"), out_.list(size_ > 0 ? 1 : 0, [&](size_t) { segment(); });
      out_.key("device_traces"), out_.list(1, [&](size_t) { events(); });
      out_.key("allocator_settings"), out_.object([] {});
      out_.key("external_annotations"), out_.list(0, [](size_t) {});
    });
    return out_.take();
  }

 private:
  void field(const std::string& name, int64_t value) { out_.key(name), out_.number(value); }
  void field(const std::string& name, const std::string& value) { out_.key(name), out_.text(value); }

  void frame(const HeldBuffer& buffer, const std::string& where, int64_t line) {
    out_.key("frames");
    out_.list(1, [&](size_t) {
      out_.object([&] {
        field("name", buffer.name + " (" + std::string(buffer.kind) + ")");
        field("filename", where);
        field("line", line);
      });
    });
  }

  /// Blocks from the first byte to the last: what lives throughout, and gaps between.
  void segment() {
    struct Block {
      int64_t offset, bytes;
      const HeldBuffer* buffer;  ///< null: a gap
    };
    std::vector<Block> blocks;
    int64_t at = 0, active = 0;
    for (const HeldBuffer& b : kept_) {
      SHARDLAB_CHECK(b.offset >= at && b.offset + b.bytes <= size_, "%{} lies at {} to {} of an arena of {} that is taken up to {}",
                     b.name, b.offset, b.offset + b.bytes, size_, at);
      if (b.offset > at) blocks.push_back({at, b.offset - at, nullptr});
      if (b.bytes > 0) blocks.push_back({b.offset, b.bytes, &b});
      at = b.offset + b.bytes, active += b.bytes;
    }
    if (at < size_) blocks.push_back({at, size_ - at, nullptr});
    out_.object([&] {
      field("device", 0), field("address", kFirstAddress), field("total_size", size_), field("stream", kStream);
      field("allocated_size", active), field("active_size", active), field("requested_size", active);
      field("segment_type", std::string("large"));
      out_.key("frames"), out_.list(0, [](size_t) {});
      out_.key("blocks");
      out_.list(blocks.size(), [&](size_t i) {
        const Block& block = blocks[i];
        out_.object([&] {
          field("address", kFirstAddress + block.offset), field("size", block.bytes);
          field("requested_size", block.buffer != nullptr ? block.bytes : 0);
          field("state", std::string(block.buffer != nullptr ? "active_allocated" : "inactive"));
          if (block.buffer != nullptr)
            frame(*block.buffer, "lives throughout", 0);
          else
            out_.key("frames"), out_.list(0, [](size_t) {});
        });
      });
    });
  }

  void events() {
    // A free is two events: the viewer joins them where they follow one another.
    std::vector<std::pair<const BufferChange*, const char*>> list;
    for (const BufferChange& c : changes_) {
      if (!c.freed) list.emplace_back(&c, "alloc");
      if (c.freed) list.emplace_back(&c, "free_requested"), list.emplace_back(&c, "free_completed");
    }
    out_.list(list.size(), [&](size_t i) {
      const auto& [change, action] = list[i];
      out_.object([&, change = change, action = action] {
        field("action", std::string(action));
        field("addr", kFirstAddress + change->buffer.offset), field("size", change->buffer.bytes), field("stream", kStream);
        field("time_us", std::llround(1e6 * change->at_s));
        frame(change->buffer, change->where, change->instruction);
      });
    });
  }

  const int64_t size_;
  const std::vector<HeldBuffer> kept_;
  std::vector<BufferChange> changes_;
  Pickle out_;
};

}  // namespace

std::string to_memory_snapshot(const Plan& plan, const Program& program, const ArenaLayout& arena, const Trace& trace, int rank) {
  return Snapshot(plan, program, arena, trace, rank).pickled();
}

}  // namespace shardlab::interop
