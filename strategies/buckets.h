// Buckets: gradients that travel together, shared by every strategy that reduces over data-parallel ranks.
#pragma once

#include <functional>

#include "strategies/draft.h"

namespace shardlab {

/// Fills `stage.buckets` in the order in which backward finishes gradients, which become views of them. Each bucket's size is
/// padded to a multiple of `multiple` elements; a padded tail is filled with zeros at the start of the step.
///
/// A bucket holds parameters of one kind: with weight decay or without, sliced by tensor parallelism or whole, a tied table alone.
/// It is closed once it has `bucket_bytes` (0: one parameter each).
void fill_buckets(Draft& draft, StageDraft& stage, int64_t multiple);

/// Inserts one event a bucket into the timetable: with `overlap` right after the last event that touches its gradients, else after
/// all of backward.
void insert_when_complete(Draft& draft, StageDraft& stage, const std::function<Event(const Bucket&)>& make_event);

/// "1024.sliced": what tells the segments of two buckets apart.
std::string signature(const Draft& draft, const StageDraft& stage, const Bucket& bucket);

/// The stream on which gradients are reduced: its own with `overlap`, else the compute stream.
StreamId reduction_stream(Draft& draft);

}  // namespace shardlab
