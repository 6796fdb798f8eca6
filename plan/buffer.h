// Buffers: named, typed storage of one role, in one memory space, perhaps a view of another buffer's storage.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "plan/type.h"

namespace shardlab {

/// Where bytes live. On the CPU back end "device" is a rank's arena and "host" a second one.
enum class Space : uint8_t { kDevice, kHost, kNvme };
inline constexpr int kSpaces = 3;

/// What a buffer is for: the classes of every memory table.
enum class BufferClass : uint8_t {
  kParameter,
  kGradient,
  kMaster,      ///< high-precision copy of a parameter
  kMoment,      ///< optimizer state
  kActivation,  ///< saved from forward to backward, or at a layer's boundary
  kTemporary,   ///< lives inside one segment
  kBuffer,      ///< buckets, gather and scatter buffers, messages in flight
  kInput,       ///< token ids and targets
  kMetric,      ///< losses, norms
  kWorkspace,   ///< what kernels need beside their operands: one a stream, `scratch_bytes` in plan/work.h
  kOther,       ///< counters, error feedback, scales
};
inline constexpr int kBufferClasses = 11;

std::string_view name_of(Space space);
std::string_view name_of(BufferClass c);

/// Storage is aligned to this many bytes; sizes in every ledger are rounded up to it.
inline constexpr int64_t kAlignment = 64;
constexpr int64_t aligned(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

/// A window on another buffer's storage: `offset` elements (of the view's own dtype) in, plus, where `shard_axes` is not empty,
/// the rank's index along them times the view's own element count. An operation in place writes a view of what it overwrites,
/// with the new type; the old name is dead from then on.
struct View {
  int32_t base = -1;  ///< BufferId of a role, or SlotId of a segment, where the view is declared
  int64_t offset = 0;
  AxisSet shard_axes;
  friend bool operator==(const View&, const View&) = default;
};

/// One buffer of a role. Only a buffer that is no view owns storage.
struct Buffer {
  std::string name;  ///< unique in the role: "layer3.attn.wqkv", "layer3.qkv@m2"
  Type type;
  BufferClass kind = BufferClass::kTemporary;
  Space space = Space::kDevice;
  bool persistent = false;  ///< lives across steps: never allocated or freed by the program
  std::optional<View> view;
  int32_t parameter = -1;  ///< ParameterId whose value, gradient or state this is (whole or part), or -1
  int32_t count = -1;      ///< BufferId of the scalar that says how many rows are used at run time, or -1 for all
  /// BufferId of the flat buffer whose elements these are, place by place (this rank's slice of it, where the type is sharded), or
  /// -1: how a bucket's shard and its moments tell which parameters they hold, since the flat buffer's views name them.
  int32_t packed_as = -1;
  friend bool operator==(const Buffer&, const Buffer&) = default;
};

}  // namespace shardlab
