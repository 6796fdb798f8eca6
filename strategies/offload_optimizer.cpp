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
// With `optimizer: nvme` (ZeRO-Infinity) the copies and moments are in a file. An update's state is read into host memory while the
// update before it runs, and written back while the next one does: three updates' worth of state and gradients is all that host
// memory holds.
//
// The host runs the optimizer's own instructions on the same numbers, so no bit changes.
//
// Shapes   bucket[n], or slices [n/N] under ZeRO
// Adds     per step a copy of the gradients to the host and of the parameters back: Psi elements each, Psi/N under ZeRO
// Memory   device: parameters, and the buckets under way; host: 4 bytes a parameter of copy, 8 of moments (AdamW), the gradients
//          and, where the model computes in 16 bits, 2 for the rounded result; all 1/N under ZeRO
//          NVMe: 12 bytes a parameter (AdamW), 1/N under ZeRO; the host then holds three updates under way, one without overlap
// Refuses  clipping and the norm of gradients, which need every gradient before the first update (`check`)
// Paper    Ren et al., "ZeRO-Offload" (2021), sections 4 and 5; Rajbhandari et al., "ZeRO-Infinity" (2021), sections 5.2 and 6.3
#include "strategies/offload_optimizer.h"

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

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

/// One update: when its gradient is there, and what host memory it needs while it is under way.
struct Job {
  Update* update = nullptr;
  Span span;          ///< of the gradient on the device
  BufferId gradient;  ///< on the device
  BufferId arrived;   ///< on the host
  BufferId result;    ///< rounded to what the model computes in, or none
  struct Parked {
    BufferId drive, host;
  };
  std::vector<Parked> parked;  ///< state on NVMe, and where it is in host memory meanwhile
};

class HostUpdates {
 public:
  HostUpdates(Draft& draft, StageDraft& stage)
      : draft_(draft),
        stage_(stage),
        overlap_(draft.config.layout.overlap),
        nvme_(draft.config.layout.offload.optimizer == OffloadTo::kNvme),
        stays_(draft.config.layout.zero >= 2) {}

  void run() {
    declare_updates(draft_, stage_);
    move_padding();
    find_next_computing();
    for (Update& update : stage_.updates) jobs_.push_back({.update = &update, .span = span_of(update.gradient)});
    std::ranges::stable_sort(jobs_, {}, [](const Job& job) { return job.span.last; });
    for (Job& job : jobs_) declare(job);
    if (overlap_ && nvme_) fetch(jobs_.front(), [&](Event e) { insertions_.before(jobs_.front().span.first, std::move(e)); });
    for (size_t k = 0; k < jobs_.size(); ++k) {
      const auto then = [&](Event e) { insertions_.after(jobs_[k].span.last, std::move(e)); };
      if (overlap_ && nvme_) turn_ring(k, then);
      leave_device(jobs_[k], then);
      if (overlap_) work(jobs_[k], then);
    }
    insertions_.apply(stage_.events);
    finish();
  }

 private:
  /// Where events go.
  using Then = std::function<void(Event)>;

  Buffer& buffer(BufferId id) { return stage_.role.buffers[id.index()]; }

  BufferId root_of(BufferId id) {
    while (id && buffer(id).view) id = BufferId(buffer(id).view->base);
    return id;
  }

  StreamId stream(std::string_view name) { return overlap_ ? draft_.stream(name) : StreamId(0); }

  // --- storage

  /// A buffer like `id` in host memory, with storage of its own.
  BufferId host_copy(BufferId id, const std::string& suffix, BufferClass kind) {
    Buffer copy = buffer(id);
    if (copy.packed_as < 0 && copy.parameter < 0) copy.packed_as = root_of(id).value;
    copy.name += suffix;
    copy.kind = kind;
    copy.space = Space::kHost;
    copy.view.reset();
    copy.persistent = false;
    return add_buffer(stage_, std::move(copy));
  }

  /// The copy that is updated (mixed precision has made it already), the moments, and what passes through host memory. Gradients
  /// that live for the step until now come and go from here on; the slices of ZeRO-2 and 3, sums over micro-batches, stay.
  void declare(Job& job) {
    Update& update = *job.update;
    if (!update.stored) {
      update.stored = update.value;
      update.value = add_master(stage_, update.value);
    }
    if (buffer(update.value).packed_as < 0 && buffer(update.value).parameter < 0)
      buffer(update.value).packed_as = update.stored.value;
    std::vector<BufferId*> state{&update.value};
    if (draft_.config.train.optimizer == Optimizer::kAdamW) {
      update.m = host_copy(update.value, ".m", BufferClass::kMoment);
      update.v = host_copy(update.value, ".v", BufferClass::kMoment);
      state.insert(state.end(), {&update.m, &update.v});
    }
    for (BufferId* id : state) {
      buffer(*id).persistent = true;
      buffer(*id).space = nvme_ ? Space::kNvme : Space::kHost;
      if (!nvme_) continue;
      job.parked.push_back({*id, host_copy(*id, ".staged", buffer(*id).kind)});
      *id = job.parked.back().host;
    }
    job.gradient = update.gradient;
    job.arrived = update.gradient = host_copy(update.gradient, ".host", BufferClass::kGradient);
    if (buffer(update.stored).type.dtype != DType::f32) job.result = host_copy(update.stored, ".host", BufferClass::kBuffer);
    if (!nvme_) stage_.whole_step.push_back(job.arrived);
    if (!nvme_ && job.result) stage_.whole_step.push_back(job.result);
    if (!stays_) std::erase(stage_.whole_step, root_of(job.gradient));
  }

  // --- where things are in the timetable

  /// Zeros for a bucket's tail are written where its first gradient is, not when the step begins.
  void move_padding() {
    for (const Bucket& bucket : stage_.buckets) {
      if (!bucket.padding || stays_) continue;
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
    // Activations that this backward gave back leave host memory before anything new is put there.
    while (span.last + 1 < stage_.events.size() && stage_.events[span.last + 1].kind == Event::Kind::kForget) ++span.last;
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

  /// With overlap device storage is given up one unit later, so that no free waits for a copy that has just begun.
  void release(BufferId storage, const Span& span) {
    const size_t next = overlap_ ? next_computing_[span.last] : SIZE_MAX;
    if (next == SIZE_MAX)
      insertions_.after(span.last, free_event(storage));
    else
      insertions_.release_after(next, free_event(storage));
  }

  // --- what is done

  Event copy(const std::string& what, BufferId from, BufferId to, StreamId on) {
    const Buffer& b = buffer(from);
    const std::string name = what + " " + std::string(name_of(b.kind)) + " " + print(b.type, draft_.plan.mesh);
    const SegmentId segment = draft_.cached(name, [&] {
      Op op;
      op.work = Copy{};
      op.stream = on;
      op.label = what;
      op.strategy = kName;
      return one_op_segment(what + std::to_string(draft_.segment_cache.size()), stage_, {from, to}, std::move(op), {0}, {1});
    });
    return call_event(bind(segment, {from, to}));
  }

  void leave_device(const Job& job, const Then& then) {
    if (!stays_) insertions_.before(job.span.first, alloc_event(root_of(job.gradient)));
    if (nvme_) then(alloc_event(job.arrived));
    then(copy("offload", job.gradient, job.arrived, stream("d2h")));
    if (!stays_) release(root_of(job.gradient), job.span);
  }

  /// State from the drive.
  void fetch(const Job& job, const Then& then) {
    for (const Job::Parked& p : job.parked) {
      then(alloc_event(p.host));
      then(copy("read", p.drive, p.host, stream("nvme.read")));
    }
  }

  /// The update, its result on the way to where the model computes, and state back to the drive.
  void work(const Job& job, const Then& then) {
    const StreamId host = draft_.stream("cpu");
    if (nvme_ && job.result) then(alloc_event(job.result));
    then(update_event(draft_, stage_, *job.update, host));
    if (job.result) then(copy("round", job.update->value, job.result, host));
    then(copy("return", job.result ? job.result : job.update->value, job.update->stored, stream("h2d")));
    for (const Job::Parked& p : job.parked) then(copy("write", p.host, p.drive, stream("nvme.write")));
  }

  void forget(const Job& job, const Then& then) {
    if (!nvme_) return;
    for (const Job::Parked& p : job.parked) then(free_event(p.host));
    then(free_event(job.arrived));
    if (job.result) then(free_event(job.result));
  }

  /// Three jobs share host memory: one whose state is being written, one that is updated, one whose state is being read.
  void turn_ring(size_t k, const Then& then) {
    if (k >= 2) forget(jobs_[k - 2], then);
    if (k + 1 < jobs_.size()) fetch(jobs_[k + 1], then);
  }

  /// What is left to do after backward, and the gathers.
  void finish() {
    const Then then = [&](Event e) { stage_.events.push_back(std::move(e)); };
    if (!overlap_)
      for (const Job& job : jobs_) {
        fetch(job, then);
        work(job, then);
        forget(job, then);
      }
    for (const Update& update : stage_.updates)
      if (update.after) then(call_event(*update.after));
    if (overlap_)
      for (size_t k = jobs_.size() < 2 ? 0 : jobs_.size() - 2; k < jobs_.size(); ++k) forget(jobs_[k], then);
  }

  Draft& draft_;
  StageDraft& stage_;
  const bool overlap_;
  const bool nvme_;
  const bool stays_;                    ///< whether the gradients of updates live for the step
  std::vector<Job> jobs_;               ///< as their gradients are complete
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
