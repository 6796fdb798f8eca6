// Shards: what every form of ZeRO and FSDP does with buckets. A bucket is a flat buffer padded to a multiple of the ranks that
// share it; each of them owns one slice, in which it keeps what the strategy shards: moments, then gradients, then values.
#pragma once

#include "strategies/buckets.h"

namespace shardlab::strategies {

/// Whether each data-parallel rank updates a slice of every bucket: under ZeRO, and where it serves the slice.
bool updates_slices(const Layout& layout);

/// The slices of one stage's buckets over the ranks of "dp".
class Shards {
 public:
  Shards(Draft& draft, StageDraft& stage, std::string_view strategy);

  int ranks() const { return ranks_; }
  /// This rank's slice of a flat buffer, as a view of it.
  BufferId slice_of(BufferId flat, std::string name);
  /// A slice with storage of its own, which holds what `slice_of` would.
  BufferId slice_apart(BufferId flat, std::string name);
  /// The flat buffer of a bucket's values; its parameters become views of the buffer.
  BufferId flat_values(const Bucket& bucket, bool persistent);
  /// Every slice to every rank: `slice` -> `flat`, on `stream`.
  Call gather(const Bucket& bucket, BufferId slice, BufferId flat, StreamId stream);
  /// Whether another bucket of the stage holds the values of `bucket`: true for the head's bucket of a tied table on
  /// the embedding's stage.
  bool shares_values(const Bucket& bucket) const;

  /// The axes along which a flat buffer is cut: those along which ranks hold summands, or copies, of the whole of it.
  AxisSet axes_of(const Type& flat) const;

 private:
  Draft& draft_;
  StageDraft& stage_;
  std::string strategy_;
  AxisSet axes_;
  int ranks_;
};

/// ZeRO-2's and ZeRO-3's way with gradients: a bucket lives from the first backward that writes to it until it has been
/// reduce-scattered, once a micro-batch; each rank adds up its slices. Sets `Bucket::reduced` and inserts the events. `scatter`
/// makes the event that leaves the sum over the ranks in `slice`, in place of a reduce-scatter.
using ScatterEvent = std::function<Event(const Bucket&, BufferId slice, int micro_batch)>;
void scatter_every_micro_batch(Draft& draft, StageDraft& stage, Shards& shards, std::string_view strategy,
                               const ScatterEvent& scatter = {});

}  // namespace shardlab::strategies
