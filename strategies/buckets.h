// Buckets: parameters that travel together, shared by every strategy that reduces or shards over data-parallel ranks.
#pragma once

#include <functional>

#include "strategies/draft.h"

namespace shardlab::strategies {

/// A rule for which parameters share a bucket, and how long its gradients live.
struct BucketRule {
  int64_t multiple = 1;  ///< sizes are padded to a multiple of so many elements
  int64_t block = 0;     ///< above 0: until each of `multiple` slices is cut in equal blocks of an even number, at most so many
  int64_t bytes = 0;     ///< a bucket is closed once it has so many; 0: one parameter each
  int layers = 0;  ///< above 0, instead: closed where a unit of so many layers ends, the embedding and the head being their own
  std::function<bool(int unit, int parameter)> alone = {};  ///< which parameters have a bucket of their own; empty: none
  bool whole_step = true;  ///< gradients live for the step; otherwise whoever fills buckets allocates, pads and frees them
};

/// Fills `stage.buckets` in the order in which backward finishes gradients, which become views of them. A bucket holds parameters
/// of one kind: with weight decay or without, sliced by tensor parallelism or whole, a tied table alone.
void fill_buckets(Draft& draft, StageDraft& stage, const BucketRule& rule);

/// Zeros for the tail of a bucket that has one.
std::optional<Event> padding_event(Draft& draft, const StageDraft& stage, const Bucket& bucket);

/// For a unit and a micro-batch: the event of a stage's timetable at which backward begins, and the event after which all
/// its gradients are made (canonical additions of copies included). Indices of events. Built once, for a timetable that
/// does not change meanwhile.
class BackwardTimes {
 public:
  BackwardTimes(const Draft& draft, const StageDraft& stage);
  /// Micro-batches in the order in which the bucket's gradients are made.
  std::vector<int> order(const Bucket& bucket) const;
  /// The bucket's first backward of a micro-batch.
  size_t first(const Bucket& bucket, int micro_batch) const;
  /// The bucket's last backward of a micro-batch: the bucket then has all gradients of that micro-batch.
  size_t last(const Bucket& bucket, int micro_batch) const { return at(bucket.last_unit, micro_batch).last; }
  /// The event after which the bucket has the gradients of all micro-batches.
  size_t complete(const Bucket& bucket) const;
  /// The next event that computes after `index`, or `index` itself if there is none.
  size_t next_compute(size_t index) const { return next_[index]; }

 private:
  struct Times {
    size_t first = 0, last = 0;
    bool any = false;  ///< whether the unit goes back for the micro-batch on this stage
  };
  const Times& at(int unit, int micro_batch) const {
    return times_[stage_.index_of(unit) * micro_batches_ + static_cast<size_t>(micro_batch)];
  }
  const StageDraft& stage_;
  size_t micro_batches_;
  std::vector<Times> times_;
  std::vector<size_t> next_;
};

/// `make` a bucket's event once a step, where its gradients are complete: with `overlap` right after the last event that touches
/// them, else after all of backward.
/// The axes over which a bucket's gradients are still to be summed. Experts that ranks share are summed over the others alone.
AxisSet reduction_axes(const Draft& draft, const StageDraft& stage, const Bucket& bucket);

void when_complete(Draft& draft, StageDraft& stage, const std::function<Event(Bucket&)>& make);

/// The reduction of a bucket's gradients over data-parallel ranks into `target`: an all-reduce, or a reduce-scatter.
Event reduce_event(Draft& draft, const StageDraft& stage, const Bucket& bucket, BufferId target, CollectiveKind kind,
                   int micro_batch, std::string_view strategy);

/// One reduction a bucket and step: with `overlap` right after the last event that touches its gradients, else after
/// all of backward.
void reduce_when_complete(Draft& draft, StageDraft& stage, CollectiveKind kind, std::string_view strategy);

/// Slices of several dims lie side by side in a flat buffer: along tp, or the axes that share experts, the buffer as a whole is nobody's
/// shard.
Type nobodys_shard(const Draft& draft, Type type);

/// Whether a parameter of this type is of experts that ranks share.
bool is_of_shared_experts(const Draft& draft, const Type& type);

/// "1024.sliced": what tells the segments of two buckets apart.
std::string signature(const Draft& draft, const StageDraft& stage, const Bucket& bucket);

/// The stream on which gradients are reduced: its own with `overlap`, else the compute stream.
StreamId reduction_stream(Draft& draft);

}  // namespace shardlab::strategies
