// Optimizer offload (ZeRO-Offload): the optimizer's state lives in host memory and its update runs there. Gradients arrive as
// they are complete (offload_gradients.cpp); the host updates its fp32 copy of the parameters and its moments; the result is
// copied back to where the model computes, rounded first where that is narrower. Under ZeRO the gathers of the updated slices
// follow backward, as without.
//
// With `overlap` updates and copies back are on streams of their own ("cpu", "h2d") and go on behind backward, bucket by bucket.
// Without, after backward each bucket in turn is updated and copied back while the device waits. Where an update needs to know all
// gradients first (a factor that clips them by their norm, a word on whether the step updates at all) every update waits for the
// last gradient; factor and word are copied to the host.
//
// With `optimizer: nvme` (ZeRO-Infinity) the copies and moments are in a file. An update's state is read into host memory while
// the update before it runs, and written back while the next one does: three updates' worth of state and gradients is all that
// host memory holds.
//
// With `delayed_update` updates are by the gradients of the step before, which stay in host memory for it, with the factor
// that clips them. They begin when the step does and run beside its forward and backward; what they make of the parameters is
// copied back when backward has done with these. So a step computes with parameters that lack the gradient of the one before,
// and the first step updates nothing. The count of updates, by which bias correction and the learning rate's schedule go, is
// one behind the steps.
//
// The host runs the optimizer's own instructions on the same numbers, so no bit changes, but with a delay, whose bits are those of
// an emulation that updates with the gradients of the step before.
//
// Shapes   bucket[n], or slices [n/N] under ZeRO
// Adds     per step a copy of the parameters back: Psi elements, Psi/N under ZeRO
// Memory   device: parameters, and the buckets under way; host: 4 bytes a parameter of copy, 8 of moments (AdamW), the gradients
//          and, where the model computes in 16 bits, 2 for the rounded result; all 1/N under ZeRO
//          NVMe: 12 bytes a parameter (AdamW), 1/N under ZeRO; the host then holds three updates under way, one without overlap,
//          and the gradients of all where something reads them at once. With a delay gradients outlive the step: the same bytes
// Refuses  with a delay: no overlap, for it would hide nothing; states on NVMe, parameters outside the device (which updates would
//          change under the step); fp16 and guards, whose skipped steps would be another's; checkpoints (`check`)
// Paper    Ren et al., "ZeRO-Offload" (2021), sections 4 and 5, the delay 5.2; Rajbhandari et al., "ZeRO-Infinity" (2021), sections
//          5.2 and 6.3
#include "strategies/offload_optimizer.h"

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include "plan/named_kernels.h"
#include "plan/run_state.h"
#include "strategies/mixed_precision.h"
#include "strategies/offload_gradients.h"
#include "strategies/offload_parameters.h"
#include "strategies/optimizer.h"
#include "strategies/shards.h"
#include "strategies/skipped_update.h"

namespace shardlab::strategies {
namespace {

constexpr std::string_view kOffloadOptimizerName = "offload-optimizer";

/// One update: when its gradient is on the host, and what host memory it needs while it is under way.
struct Job {
  Update* update = nullptr;
  size_t first = 0;    ///< the event with which what becomes its gradient is first there
  size_t arrives = 0;  ///< that with which it is complete in host memory
  BufferId result;     ///< rounded to what the model computes in, or none
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
        numbers_(draft, stage, kOffloadOptimizerName),
        overlap_(draft.config.layout.overlap),
        states_(draft.config.layout.offload.optimizer),
        parameters_(draft.config.layout.offload.parameters),
        ring_(states_ == OffloadTo::kNvme || parameters_ == OffloadTo::kNvme),
        keeps_gradients_(keeps_host_gradients(draft.config)),
        delayed_(draft.config.layout.offload.delayed_update),
        waits_(!delayed_ && (stage.gradient_factor || stage.go)) {}

  void run() {
    const std::vector<Touched> touched = touched_storages(stage_);
    const std::vector<size_t> written = last_writes();
    for (Update& update : stage_.updates) jobs_.push_back(job_of(update, touched, written));
    std::ranges::stable_sort(jobs_, {}, &Job::arrives);
    for (Job& job : jobs_) declare(job);
    bring_words();
    if (delayed_)
      update_beside_step();
    else if (overlap_ && !waits_)
      update_behind_backward();
    finish();
  }

 private:
  /// Where events go.
  using Then = std::function<void(Event)>;

  Buffer& buffer(BufferId id) { return stage_.role.buffers[id.index()]; }
  StreamId stream(std::string_view name) { return overlap_ ? draft_.stream(name) : StreamId(0); }

  Job job_of(Update& update, const std::vector<Touched>& touched, const std::vector<size_t>& written) const {
    Job job{.update = &update, .arrives = written[storage_of(stage_, update.gradient).index()]};
    const BufferId from = storage_of(stage_, stage_.events[job.arrives].call.binding.front());
    job.first = std::min(touched[from.index()].first, stage_.events.size());
    return job;
  }

  /// The last event that writes each storage, by the index of the buffer that owns it. Events that judge gradients read them; events
  /// that complete them write.
  std::vector<size_t> last_writes() const {
    std::vector<size_t> written(stage_.role.buffers.size(), 0);
    for (size_t i = 0; i < stage_.events.size(); ++i) {
      const Event& event = stage_.events[i];
      if (event.kind != Event::Kind::kCall) continue;
      const Op& op = std::get<Op>(draft_.plan.segments[event.call.segment.index()].steps.front());
      for (const SlotId slot : op.writes)
        if (slot.index() < event.call.binding.size() && event.call.binding[slot.index()])
          written[storage_of(stage_, event.call.binding[slot.index()]).index()] = i;
    }
    return written;
  }

  // --- storage

  /// Declares the buffers of an update: the updated values (an fp32 copy, which mixed precision has made already; or, if they are
  /// outside the device and in fp32, the parameters themselves), the moments, and the staging buffers in host memory.
  void declare(Job& job) {
    Update& update = *job.update;
    if (!update.stored && parameters_ == OffloadTo::kNone) {
      update.stored = update.value;
      update.value = add_master(stage_, update.value);
    }
    if (buffer(update.value).packed_as < 0 && buffer(update.value).parameter < 0)
      buffer(update.value).packed_as = update.stored.value;
    std::vector<BufferId*> state{&update.value};
    for (const OptimizerState& kept : row_of(draft_.config.train.optimizer).state) {
      Buffer beside = state_buffer(buffer(update.value), kept);
      beside.space = Space::kHost;
      update.state.push_back(add_buffer(stage_, std::move(beside)));
    }
    for (BufferId& id : update.state) state.push_back(&id);
    for (BufferId* id : state) {
      Buffer& b = buffer(*id);
      b.persistent = true;
      if (b.kind != BufferClass::kParameter) b.space = states_ == OffloadTo::kNvme ? Space::kNvme : Space::kHost;
      if (b.space != Space::kNvme) continue;
      job.parked.push_back({*id, host_copy(stage_, *id, ".staged", b.kind)});
      *id = job.parked.back().host;
    }
    if (update.stored && buffer(update.stored).type.dtype != DType::f32 && buffer(update.stored).space != Space::kHost)
      job.result = host_copy(stage_, update.stored, ".host", BufferClass::kBuffer);
    if (!ring_ && job.result) stage_.whole_step.push_back(job.result);
  }

  /// Brings to host memory the numbers by which updates multiply gradients, and the flag whether they run. With a delay they stay
  /// until the next step's updates.
  void bring_words() {
    for (BufferId* word : {&stage_.gradient_factor, &stage_.go}) {
      if (!*word) continue;
      const BufferId there = host_copy(stage_, *word, ".host", buffer(*word).kind);
      buffer(there).packed_as = -1;
      if (delayed_)
        buffer(there).persistent = true;
      else
        stage_.whole_step.push_back(there);
      stage_.events.push_back(copy(buffer(*word).name, *word, there, StreamId(0)));
      *word = there;
    }
  }

  // --- what is done

  Event copy(const std::string& what, BufferId from, BufferId to, StreamId on) {
    return copy_event(draft_, stage_, what, from, to, on, kOffloadOptimizerName);
  }

  /// State from the drive.
  void fetch(const Job& job, const Then& then) {
    for (const Job::Parked& p : job.parked) {
      then(alloc_event(p.host));
      then(copy("read", p.drive, p.host, stream("nvme.read")));
    }
  }

  void work(const Job& job, const Then& then) {
    if (ring_ && job.result) then(alloc_event(job.result));
    update(job, then);
    give_back(job, then);
  }

  void update(const Job& job, const Then& then) {
    const StreamId host = draft_.stream("cpu");
    then(update_event(draft_, stage_, *job.update, host));
    if (job.result) then(copy("round", job.update->value, job.result, host));
  }

  /// The update's result to where the model computes or its parameters wait, and state to the drive.
  void give_back(const Job& job, const Then& then) {
    const Update& update = *job.update;
    if (update.stored) {
      const BufferId from = job.result ? job.result : update.value;
      switch (buffer(update.stored).space) {
        case Space::kDevice: then(copy("return", from, update.stored, stream("h2d"))); break;
        case Space::kHost: then(copy("round", from, update.stored, draft_.stream("cpu"))); break;
        case Space::kNvme: then(copy("write", from, update.stored, stream("nvme.write"))); break;
      }
    }
    for (const Job::Parked& p : job.parked) then(copy("write", p.host, p.drive, stream("nvme.write")));
  }

  void forget(const Job& job, const Then& then) {
    if (!ring_) return;
    for (const Job::Parked& p : job.parked) then(free_event(p.host));
    if (!keeps_gradients_) then(free_event(job.update->gradient));
    if (job.result) then(free_event(job.result));
  }

  /// Three jobs share host memory: one whose state is being written, one that is updated, one whose state is being read.
  void turn_ring(size_t k, const Then& then) {
    if (k >= 2) forget(jobs_[k - 2], then);
    if (k + 1 < jobs_.size()) fetch(jobs_[k + 1], then);
  }
  void empty_ring(const Then& then) {
    for (size_t k = jobs_.size() < 2 ? 0 : jobs_.size() - 2; k < jobs_.size(); ++k) forget(jobs_[k], then);
  }

  /// Each update as its gradient arrives. The ring turns before room is made for the gradient.
  void update_behind_backward() {
    Insertions insertions;
    const size_t first = jobs_.front().first;
    if (ring_) fetch(jobs_.front(), [&](Event e) { insertions.before(first, std::move(e)); });
    for (size_t k = 0; k < jobs_.size(); ++k) {
      const size_t room = jobs_[k].arrives - (keeps_gradients_ ? 0 : 1);
      if (ring_) turn_ring(k, [&](Event e) { insertions.before(room, std::move(e)); });
      size_t last = jobs_[k].arrives;
      while (last + 1 < stage_.events.size() && stage_.events[last + 1].kind == Event::Kind::kFree) ++last;
      work(jobs_[k], [&](Event e) { insertions.after(last, std::move(e)); });
    }
    insertions.apply(stage_.events);
  }

  /// All updates before the step, in the order in which their gradients will be overwritten by its own.
  void update_beside_step() {
    stage_.go = begun_ = numbers_.number("steps.begun", DType::i32, true);
    buffer(begun_).space = Space::kHost;
    Insertions insertions;
    for (const Job& job : jobs_) update(job, [&](Event e) { insertions.before(0, std::move(e)); });
    insertions.apply(stage_.events);
  }

  /// The first step leaves gradients and updates nothing; every later one makes an update.
  void count_steps() {
    const BufferId applied = numbers_.number(std::string(kAppliedSteps), DType::i32, true);
    numbers_.append("count", {applied}, named("count"), {0}, {0}, begun_);
    numbers_.append("begin", {begun_}, named("count"), {0}, {0});
  }

  /// Adds the work that is left after backward, and the gathers.
  void finish() {
    const Then then = [&](Event e) { stage_.events.push_back(std::move(e)); };
    if (overlap_ && waits_ && ring_) fetch(jobs_.front(), then);
    for (size_t k = 0; k < jobs_.size(); ++k) {
      if (delayed_) {
        give_back(jobs_[k], then);
      } else if (!overlap_) {
        fetch(jobs_[k], then);
        work(jobs_[k], then);
        forget(jobs_[k], then);
      } else if (waits_) {
        if (ring_) turn_ring(k, then);
        work(jobs_[k], then);
      }
    }
    for (const Update& update : stage_.updates)
      if (update.after) then(call_event(*update.after));
    if (delayed_) count_steps();
    if (overlap_) empty_ring(then);
  }

  Draft& draft_;
  StageDraft& stage_;
  const StageNumbers numbers_;
  const bool overlap_;
  const OffloadTo states_, parameters_;
  const bool ring_;  ///< whether anything that an update needs is on NVMe, and passes through host memory
  const bool keeps_gradients_;
  const bool delayed_;     ///< whether updates are by the gradients of the step before
  const bool waits_;       ///< whether no update may begin before all gradients are there
  std::vector<Job> jobs_;  ///< as their gradients arrive
  BufferId begun_;         ///< i32[1] in host memory: the steps before this one, where updates are delayed
};

}  // namespace

void update_every_bucket(Draft& draft, StageDraft& stage) {
  if (draft.config.layout.data_ranks() == 1 && stage.buckets.empty()) {  // mirrored stages have filled them
    fill_buckets(draft, stage, {.bytes = draft.config.layout.bucket_bytes});
    for (Bucket& bucket : stage.buckets) bucket.reduced = bucket.gradient;
  }
  Shards shards(draft, stage, kOffloadOptimizerName);
  for (const Bucket& bucket : stage.buckets) {
    if (shards.shares_values(bucket)) continue;
    Update update;
    update.unit = bucket.last_unit;
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

}  // namespace shardlab::strategies
