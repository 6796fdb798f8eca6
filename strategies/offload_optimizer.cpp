// Optimizer offload (ZeRO-Offload): the optimizer's state lives in host memory and its update runs there. A bucket's gradients, or
// this rank's slice of their sum, are copied to the host as soon as they are complete; the host updates its fp32 copy of the
// parameters and its moments; the result is copied back to where the model computes, rounded first where that is narrower. Under
// ZeRO the gathers of the updated slices follow backward, as without.
//
// A bucket of gradients is on the device from the first backward that writes to it until it has been copied out: with one
// micro-batch that is a few units of backward. Further micro-batches are added to it there, so that every sum is the one that would
// be formed without offload.
//
// With `overlap` copies out, updates and copies back are on streams of their own ("d2h", "cpu", "h2d") and go on behind backward,
// bucket by bucket. Without, gradients leave on the compute stream as they are complete, and after backward each bucket in turn is
// updated and copied back while the device waits. (Data parallelism without overlap reduces after backward, so there all wait for
// that.)
//
// The host runs the optimizer's own instructions on the same numbers, so no bit changes.
//
// Shapes   bucket[n], or slices [n/N] under ZeRO
// Adds     per step a copy of the gradients to the host and of the parameters back: Psi elements each, Psi/N under ZeRO
// Memory   device: parameters, and the buckets under way; host: 4 bytes a parameter of copy, 8 of moments (AdamW), the gradients
//          and, where the model computes in 16 bits, 2 for the rounded result; all 1/N under ZeRO
// Refuses  clipping and the norm of gradients, which need every gradient before the first update (`check`)
// Paper    Ren et al., "ZeRO-Offload" (2021), sections 4 and 5
#include "strategies/offload_optimizer.h"

#include <algorithm>
#include <set>
#include <string>

#include "plan/text.h"
#include "strategies/mixed_precision.h"
#include "strategies/optimizer.h"
#include "strategies/shards.h"

namespace shardlab {
namespace {

constexpr std::string_view kName = "offload-optimizer";

/// Where in a timetable something is first and last touched.
struct Span {
  size_t first = SIZE_MAX, last = 0;
};

class HostUpdates {
 public:
  HostUpdates(Draft& draft, StageDraft& stage) : draft_(draft), stage_(stage), overlap_(draft.config.layout.overlap) {}

  void run() {
    declare_updates(draft_, stage_);
    move_padding();
    find_next_computing();
    std::vector<Event> after_backward;
    for (Update& update : stage_.updates) {
      declare_host(update);
      const Span span = span_of(update.gradient);
      const BufferId arrived = host_copy(update.gradient, ".host", BufferClass::kGradient);
      if (!stays_) insertions_.before(span.first, alloc_event(root_of(update.gradient)));
      insertions_.after(span.last, copy("offload ", update.gradient, arrived, device_to_host()));
      if (!stays_) release(root_of(update.gradient), span);
      update.gradient = arrived;
      for (Event& event : update_and_return(update))
        if (overlap_)
          insertions_.after(span.last, std::move(event));
        else
          after_backward.push_back(std::move(event));
    }
    insertions_.apply(stage_.events);
    for (Event& event : after_backward) stage_.events.push_back(std::move(event));
    for (Update& update : stage_.updates)
      if (update.after) stage_.events.push_back(call_event(*update.after));
  }

 private:
  Buffer& buffer(BufferId id) { return stage_.role.buffers[id.index()]; }

  BufferId root_of(BufferId id) {
    while (id && buffer(id).view) id = BufferId(buffer(id).view->base);
    return id;
  }

  StreamId device_to_host() { return overlap_ ? draft_.stream("d2h") : StreamId(0); }
  StreamId host_to_device() { return overlap_ ? draft_.stream("h2d") : StreamId(0); }

  // --- storage

  /// A buffer like `id` in host memory, with storage of its own.
  BufferId host_copy(BufferId id, const std::string& suffix, BufferClass kind) {
    Buffer copy = buffer(id);
    if (copy.packed_as < 0 && copy.parameter < 0) copy.packed_as = root_of(id).value;
    copy.name += suffix;
    copy.kind = kind;
    copy.space = Space::kHost;
    copy.view.reset();
    copy.persistent = kind == BufferClass::kMoment;
    const BufferId made = add_buffer(stage_, std::move(copy));
    if (!buffer(made).persistent) stage_.whole_step.push_back(made);
    return made;
  }

  /// The copy that is updated (mixed precision has made it already) and the moments. Gradients that live for the step until now
  /// come and go from here on; the slices of ZeRO-2, which are sums over micro-batches, stay.
  void declare_host(Update& update) {
    if (!update.stored) {
      update.stored = update.value;
      update.value = add_master(stage_, update.value);
    }
    Buffer& master = buffer(update.value);
    master.space = Space::kHost;
    if (master.packed_as < 0 && master.parameter < 0) master.packed_as = update.stored.value;
    if (draft_.config.train.optimizer == Optimizer::kAdamW) {
      update.m = host_copy(update.value, ".m", BufferClass::kMoment);
      update.v = host_copy(update.value, ".v", BufferClass::kMoment);
    }
    stays_ = draft_.config.layout.zero >= 2;
    if (!stays_) std::erase(stage_.whole_step, root_of(update.gradient));
  }

  // --- where things are in the timetable

  /// Zeros for a bucket's tail are written where its first gradient is, not when the step begins.
  void move_padding() {
    for (const Bucket& bucket : stage_.buckets) {
      if (!bucket.padding || draft_.config.layout.zero >= 2) continue;
      const auto zeros = std::ranges::find_if(stage_.events, [&](const Event& e) {
        return e.kind == Event::Kind::kCall && e.call.binding == std::vector{bucket.padding};
      });
      Event event = std::move(*zeros);
      stage_.events.erase(zeros);
      const size_t first = span_of(bucket.gradient).first;
      stage_.events.insert(stage_.events.begin() + static_cast<std::ptrdiff_t>(first), std::move(event));
    }
  }

  void find_next_computing() {
    next_computing_.assign(stage_.events.size(), SIZE_MAX);
    size_t following = SIZE_MAX;
    for (size_t i = stage_.events.size(); i-- > 0;) {
      next_computing_[i] = following;
      if (stage_.events[i].computes()) following = i;
    }
  }

  /// The events that touch the storage of a gradient.
  Span span_of(BufferId gradient) {
    const BufferId root = root_of(gradient);
    Span span;
    for (size_t i = 0; i < stage_.events.size(); ++i) {
      if (!touches(stage_.events[i], root)) continue;
      span.first = std::min(span.first, i);
      span.last = i;
    }
    SHARDLAB_CHECK(span.first != SIZE_MAX, "no event makes the gradient {}", buffer(gradient).name);
    return span;
  }

  bool touches(const Event& event, BufferId root) {
    if (event.kind == Event::Kind::kCall)
      return std::ranges::any_of(event.call.binding, [&](BufferId id) { return root_of(id) == root; });
    if (event.kind != Event::Kind::kBackward || event.storage != 0) return false;
    const auto& states = stage_.state[static_cast<size_t>(event.unit - stage_.first_unit)];
    return std::ranges::any_of(states, [&](const ParameterState& s) { return root_of(s.gradient) == root; });
  }

  /// With overlap storage is given up one unit later, so that no free waits for a copy that has just begun.
  void release(BufferId storage, const Span& span) {
    const size_t next = overlap_ ? next_computing_[span.last] : SIZE_MAX;
    if (next == SIZE_MAX)
      insertions_.after(span.last, free_event(storage));
    else
      insertions_.release_after(next, free_event(storage));
  }

  // --- what is done

  Event copy(const std::string& what, BufferId from, BufferId to, StreamId stream) {
    const std::string name = what + print(buffer(from).type, draft_.plan.mesh) + (buffer(from).view ? " view" : "");
    const SegmentId segment = draft_.cached(name, [&] {
      Op op;
      op.work = Copy{};
      op.stream = stream;
      op.label = what.substr(0, what.find(' '));
      op.strategy = kName;
      return one_op_segment(op.label + std::to_string(draft_.segment_cache.size()), stage_, {from, to}, std::move(op), {0}, {1});
    });
    return call_event(bind(segment, {from, to}));
  }

  /// The host's update, and its result on the way to where the model computes.
  std::vector<Event> update_and_return(const Update& update) {
    const StreamId host = draft_.stream("cpu");
    std::vector<Event> events{update_event(draft_, stage_, update, host)};
    BufferId result = update.value;
    if (buffer(update.stored).type.dtype != buffer(update.value).type.dtype) {
      result = host_copy(update.stored, ".host", BufferClass::kBuffer);
      events.push_back(copy("round ", update.value, result, host));
    }
    events.push_back(copy("return ", result, update.stored, host_to_device()));
    return events;
  }

  Draft& draft_;
  StageDraft& stage_;
  const bool overlap_;
  bool stays_ = false;                  ///< whether the gradients of updates live for the step
  std::vector<size_t> next_computing_;  ///< by event: the next that computes, or SIZE_MAX
  Insertions insertions_;
};

}  // namespace

void update_every_bucket(Draft& draft, StageDraft& stage) {
  if (draft.config.layout.dp == 1) {
    fill_buckets(draft, stage, {.bytes = draft.config.layout.bucket_bytes});
    for (Bucket& bucket : stage.buckets) bucket.reduced = bucket.gradient;
  }
  Shards shards(draft, stage, kName);
  for (const Bucket& bucket : stage.buckets) {
    if (shards.shares_values(bucket)) continue;
    Update update;
    update.decay = bucket.decay;
    if (bucket.tied) {  // alone in its bucket, and perhaps reduced once more, between the two ends
      const ParameterState& table = stage.at(bucket.members.front().unit, bucket.members.front().parameter);
      update.gradient = table.reduced;
      update.value = table.value;
    } else {
      update.gradient = bucket.reduced;
      update.value = shards.flat_values(bucket, true);
    }
    stage.updates.push_back(std::move(update));
  }
}

void offload_optimizer(Draft& draft) {
  for (StageDraft& stage : draft.stages) HostUpdates(draft, stage).run();
}

}  // namespace shardlab
