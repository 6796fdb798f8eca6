// The first half of optimizer offload: a bucket's gradients, or this rank's slice of their sum, are copied to the host as soon as
// they are complete. Whatever judges gradients from here on (their norm, a search for infinities) reads them in host memory, each
// element once, under every sharding; the second half (offload_optimizer.cpp) updates with them there.
//
// A bucket of gradients is on the device from the first backward that writes to it until it has been copied out: with one
// micro-batch that is a few units of backward. Further micro-batches are added to it there, so that every sum is the one that would
// be formed without offload. With `overlap` copies out have a stream of their own ("d2h") and go on behind backward. Without, they
// leave on the compute stream as they are complete. Where parameters are parked too, sums are formed on the host and need not
// leave. (Data parallelism without overlap reduces after backward, so there all wait for that.)
//
// Shapes   bucket[n], or slices [n/N] under ZeRO
// Adds     per step a copy of the gradients to the host: Psi elements, Psi/N under ZeRO
// Memory   device: the buckets under way; host: the gradients (those of three updates with states on NVMe, unless something reads
//          all of them at once; for good where the next step updates with them)
// Refuses  nothing
// Paper    Ren et al., "ZeRO-Offload" (2021), section 4.1
#include "strategies/offload_gradients.h"

#include <algorithm>
#include <map>
#include <string>
#include <unordered_map>
#include <vector>

#include "plan/techniques.h"
#include "plan/text.h"
#include "strategies/offload_parameters.h"
#include "strategies/optimizer.h"

namespace shardlab::strategies {
namespace {

constexpr std::string_view kOffloadGradientsName = "offload-gradients";

/// Whether an event gives up what activations took of host memory.
bool gives_back(const Event& e) { return e.kind == Event::Kind::kForget || e.kind == Event::Kind::kUnstage; }

/// One update's gradient on the device, and where in the timetable it is first and last touched.
struct Leaving {
  Update* update = nullptr;
  size_t first = SIZE_MAX, last = 0;
};

class Leave {
 public:
  Leave(Draft& draft, StageDraft& stage)
      : draft_(draft),
        stage_(stage),
        overlap_(draft.config.layout.overlap),
        keeps_(keeps_host_gradients(draft.config)),
        stays_(draft.config.layout.zero >= 2) {}

  void run() {
    declare_updates(draft_, stage_);
    move_padding();
    find_next_computing();
    const std::vector<Touched> touched = touched_storages(stage_);
    std::vector<Leaving> all;
    for (Update& update : stage_.updates)
      if (stage_.role.buffers[update.gradient.index()].space == Space::kDevice) all.push_back(span_of(update, touched));
    std::ranges::stable_sort(all, {}, &Leaving::last);
    is_gone_.assign(stage_.role.buffers.size(), false);
    for (const Leaving& leaving : all) leave(leaving);
    std::erase_if(stage_.whole_step, [&](BufferId id) { return id.index() < is_gone_.size() && is_gone_[id.index()]; });
    insertions_.apply(stage_.events);
  }

 private:
  /// Zeros for a bucket's tail are written where its first gradient is, not when the step begins.
  void move_padding() {
    if (stays_) return;
    std::unordered_map<int32_t, size_t> tails;  // by buffer: the bucket whose tail it is
    for (size_t b = 0; b < stage_.buckets.size(); ++b)
      if (const BufferId padding = stage_.buckets[b].padding) tails[padding.value] = b;
    if (tails.empty()) return;
    std::map<size_t, Event> zeros;  // by bucket
    std::vector<Event> others;
    for (Event& e : stage_.events) {
      const bool of_one = e.kind == Event::Kind::kCall && e.call.binding.size() == 1;
      const auto tail = of_one ? tails.find(e.call.binding.front().value) : tails.end();
      if (tail == tails.end() || !zeros.try_emplace(tail->second, std::move(e)).second) others.push_back(std::move(e));
    }
    stage_.events = std::move(others);
    const std::vector<Touched> touched = touched_storages(stage_);
    Insertions insertions;
    for (auto& [bucket, event] : zeros) {
      const BufferId storage = storage_of(stage_, stage_.buckets[bucket].gradient);
      const Touched& here = touched[storage.index()];
      SHARDLAB_CHECK(here.any(), "no event makes the bucket {}", stage_.role.buffers[storage.index()].name);
      insertions.before(here.first, std::move(event));
    }
    insertions.apply(stage_.events);
  }

  void find_next_computing() {
    next_computing_.assign(stage_.events.size(), SIZE_MAX);
    size_t following = SIZE_MAX;
    for (size_t i = stage_.events.size(); i-- > 0;) {
      next_computing_[i] = following;
      if (stage_.events[i].computes()) following = i;
    }
  }

  Leaving span_of(Update& update, const std::vector<Touched>& touched) const {
    const Touched& here = touched[storage_of(stage_, update.gradient).index()];
    SHARDLAB_CHECK(here.any(), "no event makes the gradient {}", stage_.role.buffers[update.gradient.index()].name);
    Leaving leaving{.update = &update, .first = here.first, .last = here.last};
    // Activations that this backward gave back leave host memory before anything new is put there.
    while (leaving.last + 1 < stage_.events.size() && gives_back(stage_.events[leaving.last + 1])) ++leaving.last;
    return leaving;
  }

  /// Gradients that live for the step until now come and go from here on; the slices of ZeRO-2 and 3, sums over micro-batches,
  /// stay.
  void leave(const Leaving& leaving) {
    const BufferId gradient = leaving.update->gradient, storage = storage_of(stage_, gradient);
    const BufferId arrived = host_copy(stage_, gradient, ".host", BufferClass::kGradient);
    leaving.update->gradient = arrived;
    if (stage_.counted_elsewhere == gradient) stage_.counted_elsewhere = arrived;
    if (draft_.config.layout.offload.delayed_update)
      stage_.role.buffers[arrived.index()].persistent = true;
    else if (keeps_)
      stage_.whole_step.push_back(arrived);
    else
      insertions_.after(leaving.last, alloc_event(arrived));
    const StreamId out = overlap_ ? draft_.stream("d2h") : StreamId(0);
    insertions_.after(leaving.last, copy_event(draft_, stage_, "offload", gradient, arrived, out, kOffloadGradientsName));
    if (stays_) return;
    is_gone_[storage.index()] = true;
    insertions_.before(leaving.first, alloc_event(storage));
    release(storage, leaving.last);
  }

  /// With overlap device storage is given up one unit later, so that no free waits for a copy that has just begun.
  void release(BufferId storage, size_t last) {
    const size_t next = overlap_ ? next_computing_[last] : SIZE_MAX;
    if (next == SIZE_MAX)
      insertions_.after(last, free_event(storage));
    else
      insertions_.release_after(next, free_event(storage));
  }

  Draft& draft_;
  StageDraft& stage_;
  const bool overlap_;
  const bool keeps_;
  const bool stays_;                    ///< whether the gradients of updates live on the device for the step
  std::vector<size_t> next_computing_;  ///< by event: the next that computes, or SIZE_MAX
  std::vector<bool> is_gone_;           ///< by buffer: a gradient that no longer lives for the step
  Insertions insertions_;
};

}  // namespace

bool keeps_host_gradients(const Case& config) {
  const Train& t = config.train;
  return config.layout.offload.optimizer != OffloadTo::kNvme || parks_parameters(config) || t.grad_norm || t.clip_norm > 0 ||
         t.guard.any() || t.precision == Precision::kFp16;
}

BufferId storage_of(const StageDraft& stage, BufferId id) {
  while (id && stage.role.buffers[id.index()].view) id = BufferId(stage.role.buffers[id.index()].view->base);
  return id;
}

std::vector<Touched> touched_storages(const StageDraft& stage) {
  std::vector<Touched> touched(stage.role.buffers.size());
  for (size_t i = 0; i < stage.events.size(); ++i) {
    const Event& event = stage.events[i];
    const auto touch = [&](BufferId id) {
      if (!id) return;
      Touched& here = touched[storage_of(stage, id).index()];
      here.first = std::min(here.first, i);
      here.last = i;
    };
    if (event.kind == Event::Kind::kAlloc) {
      touch(event.buffer);
    } else if (event.kind == Event::Kind::kCall) {
      for (const BufferId id : event.call.binding) touch(id);
    } else if (event.makes_gradients() && event.storage == 0) {
      for (const ParameterState& state : stage.state[stage.index_of(event.unit)]) touch(state.gradient);
    }
  }
  return touched;
}

BufferId host_copy(StageDraft& stage, BufferId id, const std::string& suffix, BufferClass kind) {
  Buffer copy = stage.role.buffers[id.index()];
  if (copy.packed_as < 0 && copy.parameter < 0) copy.packed_as = storage_of(stage, id).value;
  copy.name += suffix;
  copy.kind = kind;
  copy.space = Space::kHost;
  copy.view.reset();
  copy.persistent = false;
  return add_buffer(stage, std::move(copy));
}

Event copy_event(Draft& draft, StageDraft& stage, const std::string& what, BufferId from, BufferId to, StreamId on,
                 std::string_view strategy) {
  const Buffer& b = stage.role.buffers[from.index()];
  const Buffer& target = stage.role.buffers[to.index()];
  const std::string name = what + " " + std::string(name_of(b.kind)) + " " + print(b.type, draft.plan.mesh) + " " +
                           std::string(name_of(target.kind)) + " " + std::string(name_of(target.space));
  const SegmentId segment = draft.cached(name, [&] {
    Op op;
    op.work = Copy{};
    op.stream = on;
    op.label = what;
    op.strategy = strategy;
    return one_op_segment(what + std::to_string(draft.segment_cache.size()), stage, {from, to}, std::move(op), {0}, {1});
  });
  return call_event(bind(segment, {from, to}));
}

void offload_gradients(Draft& draft) {
  for (StageDraft& stage : draft.stages) Leave(draft, stage).run();
}

}  // namespace shardlab::strategies
