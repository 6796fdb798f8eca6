// Gradients compressed on the wire of data parallelism: what the techniques share. Each has a file of its own:
// quantised_gradients.cpp, sparse_gradients.cpp, powersgd.cpp, one_bit_adam.cpp.
//
// Error feedback (Seide et al. 2014; Karimireddy et al. 2019): what compression loses of a step's gradient stays on the rank, in
// fp32, and is added to the next step's. The sum m = gradient + error takes the error's storage, under a type of its own, so that
// a plan which forgets to add the one to the other is a type error; after sending, what was not sent of m stays there.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "strategies/buckets.h"

namespace shardlab::strategies {

void quantised_gradients(Draft& draft);
void sparse_gradients(Draft& draft);
void powersgd(Draft& draft);
void one_bit_adam(Draft& draft);

/// Whether what updates read as gradients is the direction of the step already, made of moments that the updates do not touch: the
/// compressed phase of 1-bit Adam.
bool steps_by_direction(const Draft& draft);

/// The form of elements on the wire: floats of 16 bits, integers of 8 or 4 bits with a scale for each block, or signs with a scale
/// for each slice.
struct WireCode {
  DType dtype = DType::bf16;
  int bits = 16;
  constexpr bool scaled() const { return bits < 16; }
  constexpr int64_t of(int64_t elements) const { return bits < 8 ? elements * bits / 8 : elements; }  ///< storage elements
  constexpr int64_t scales_of(int64_t slice) const;                                                   ///< of a slice
  /// The kernel that goes one way ("quantise") or the other ("dequantise"), and the one that adds parts up.
  std::string kernel(std::string_view verb) const;
  std::string sum_kernel() const;
};
/// The code of `compression.kind` bf16 or int8.
WireCode code_of(const Compression& compression);
/// Elements that share a scale, at most: a slice of so many is cut in `blocks_of` equal blocks.
inline constexpr int64_t kScaleBlock = 256;
constexpr int64_t blocks_of(int64_t slice) { return (slice + kScaleBlock - 1) / kScaleBlock; }
constexpr int64_t WireCode::scales_of(int64_t slice) const { return bits == 1 ? 1 : blocks_of(slice); }

/// A segment of several ops on one stream over buffers of a stage, written op by op.
class Compressing {
 public:
  /// On the stream that reduces gradients, or another.
  Compressing(Draft& draft, StageDraft& stage, std::string name, std::string_view strategy, std::optional<StreamId> stream = {});

  /// A slot bound to `buffer`, of its type.
  SlotId bound(std::string name, BufferId buffer);
  /// Another name for the storage of `base`: all of it, or with `slice` this data-parallel rank's part.
  SlotId view(std::string name, SlotId base, Type type, bool slice = false);
  /// A kernel of plan/named_kernels.h.
  void kernel(std::string_view name, std::vector<SlotId> reads, std::vector<SlotId> writes, std::string label);
  /// Over the data-parallel ranks, or the ranks of `comm`.
  void collective(CollectiveKind kind, SlotId from, SlotId to, std::string label);
  void collective(CollectiveKind kind, CommId comm, SlotId from, SlotId to, std::string label);
  void op(Work work, std::vector<SlotId> reads, std::vector<SlotId> writes, std::string label);
  /// The slot called so; a bug if there is none.
  SlotId find(std::string_view name) const;
  const Type& type(SlotId slot) const { return segment_.slots[slot.index()].type; }

  /// The call of it. Segments of one name are alike: the first is kept.
  Call call();
  /// The same call as an event of a unit's backward; of the last micro-batch if none is given.
  Event event(int unit, std::optional<int> micro_batch = {});

 private:
  Draft& draft_;
  StageDraft& stage_;
  std::string_view strategy_;
  StreamId stream_;
  Segment segment_;
  std::vector<BufferId> binding_;
};

/// Ops of a technique around the two legs of a quantised reduction (quantised_gradients.cpp).
struct AroundLegs {
  std::string_view strategy;
  std::function<std::string(const Bucket&)> name;  ///< of the bucket's segment: alike where its ops and their operands are
  std::function<void(Compressing&, const Bucket&, SlotId gradient)> before = {};  ///< to the rank's summand, in place
  std::function<void(Compressing&, const Bucket&, SlotId sum)> after = {};        ///< to the sum, in place
};
/// Fills buckets, and reduces them by an all-to-all and an all-gather of codes, with error feedback on both legs.
void reduce_in_codes(Draft& draft, StageDraft& stage, const WireCode& code, const AroundLegs& around);
/// Fills the buckets of `reduce_in_codes`, padded as the code asks.
void fill_coded_buckets(Draft& draft, StageDraft& stage, const WireCode& code);
/// The errors that each rank keeps of a bucket's two legs: of its summand (`whole`), and of its slice of the sum (`slice`).
struct LegErrors {
  BufferId whole, slice;
};
LegErrors add_leg_errors(const Draft& draft, StageDraft& stage, const Bucket& bucket);

/// A buffer that a rank keeps from one step to the next: fp32, zero at first. `like` is the type of the value to which it is added.
BufferId add_error(StageDraft& stage, std::string name, Type like);
/// A buffer for messages that lives for the step.
BufferId add_message(StageDraft& stage, std::string name, Type type);
/// A part of `base`, from its first element on, as a message of `type`.
BufferId add_message_view(StageDraft& stage, std::string name, Type type, BufferId base);

/// `type` with other elements: element type, extents on this rank, placement along dp, and whether it is a sum over micro-batches.
/// Along the other axes it is a summand no more.
Type message_type(const Draft& draft, Type type, DType dtype, Shape shape, Placement place, Micro micro);

}  // namespace shardlab::strategies
