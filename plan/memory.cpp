// The peak is folded in two levels: the allocations within a segment once, giving its largest rise and its net change, and then
// the calls of a role. Packing an arena is plan/arena.cpp.

#include "plan/memory.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>

namespace shardlab {
namespace {

/// The effect of one call of a segment on live bytes in one space, relative to the bytes live when it begins.
struct Profile {
  bool touched = false;
  int64_t highest = 0;        ///< largest rise of the total
  int32_t highest_step = -1;  ///< the first step that reaches it
  MemoryByClass at_highest;
  MemoryByClass class_highest;  ///< each class's largest rise
  MemoryByClass net;
};

using Profiles = std::array<Profile, kSpaces>;

/// The slot that a step allocates or frees, with the sign of its change; none for an op.
std::pair<SlotId, int> change_of(const Step& step) {
  if (const auto* a = std::get_if<AllocSlot>(&step)) return {a->slot, 1};
  if (const auto* f = std::get_if<FreeSlot>(&step)) return {f->slot, -1};
  return {SlotId(), 0};
}

Profiles profile_of(const Segment& segment) {
  Profiles profiles;
  for (size_t i = 0; i < segment.steps.size(); ++i) {
    const auto [id, sign] = change_of(segment.steps[i]);
    if (sign == 0) continue;
    const Slot& slot = segment.slots[id.index()];
    Profile& p = profiles[static_cast<size_t>(slot.space)];
    const auto cls = static_cast<size_t>(slot.cls);
    p.touched = true;
    p.net.bytes[cls] += sign * aligned(slot.type.bytes());
    p.class_highest.bytes[cls] = std::max(p.class_highest.bytes[cls], p.net.bytes[cls]);
    if (const int64_t total = p.net.total(); total > p.highest) {
      p.highest = total;
      p.highest_step = static_cast<int32_t>(i);
      p.at_highest = p.net;
    }
  }
  return profiles;
}

MemoryByClass sum(const MemoryByClass& a, const MemoryByClass& b) {
  MemoryByClass out = a;
  for (size_t c = 0; c < kBufferClasses; ++c) out.bytes[c] += b.bytes[c];
  return out;
}

/// The running state of one space, and where the peak was: an item of the program and, within a call, a step.
struct Fold {
  MemoryByClass live;
  int64_t total = 0;
  MemoryPeak peak;
  int32_t item = -1;
  int32_t step = -1;

  void change(int32_t at, size_t cls, int64_t bytes) {
    live.bytes[cls] += bytes;
    total += bytes;
    peak.peak_by_class.bytes[cls] = std::max(peak.peak_by_class.bytes[cls], live.bytes[cls]);
    if (total <= peak.peak_bytes) return;
    peak.peak_bytes = total;
    peak.at_peak = live;
    item = at;
  }

  void call(int32_t at, const Profile& p) {
    for (size_t c = 0; c < kBufferClasses; ++c)
      peak.peak_by_class.bytes[c] = std::max(peak.peak_by_class.bytes[c], live.bytes[c] + p.class_highest.bytes[c]);
    if (total + p.highest > peak.peak_bytes) {
      peak.peak_bytes = total + p.highest;
      peak.at_peak = sum(live, p.at_highest);
      item = at;
      step = p.highest_step;
    }
    live = sum(live, p.net);
    total += p.net.total();
  }
};

/// Names the item and step as `describe` names their instruction.
std::string moment_of(const Plan& plan, const Role& role, const Fold& fold) {
  if (fold.item < 0) return "the start of the step";
  const Item& item = role.program[static_cast<size_t>(fold.item)];
  Instruction i;
  i.kind = Instruction::Kind::kAlloc;
  i.role = static_cast<int32_t>(&role - plan.roles.data());
  if (const Call* call = std::get_if<Call>(&item)) {
    i.segment = &plan.segments[call->segment.index()];
    i.layer = call->layer;
    i.micro_batch = call->micro_batch;
    i.slot = change_of(i.segment->steps[static_cast<size_t>(fold.step)]).first;
  } else {
    i.buffer = std::get<Alloc>(item).buffer;
  }
  return describe(plan, i);
}

}  // namespace

int64_t MemoryByClass::total() const { return std::accumulate(bytes.begin(), bytes.end(), int64_t{0}); }

std::array<MemoryPeak, kSpaces> memory_peak(const Plan& plan, int role_index) {
  SHARDLAB_CHECK(role_index >= 0 && static_cast<size_t>(role_index) < plan.roles.size(), "role {} of {}", role_index,
                 plan.roles.size());
  const Role& role = plan.roles[static_cast<size_t>(role_index)];
  std::vector<Profiles> profiles;
  for (const Segment& segment : plan.segments) profiles.push_back(profile_of(segment));

  std::array<Fold, kSpaces> folds;
  const auto change = [&](int32_t at, const Buffer& b, int sign) {
    folds[static_cast<size_t>(b.space)].change(at, static_cast<size_t>(b.kind), sign * aligned(b.type.bytes()));
  };
  for (const Buffer& b : role.buffers)
    if (b.persistent && !b.view) change(-1, b, 1);
  for (Fold& fold : folds) fold.peak.persistent_bytes = fold.total;
  for (size_t i = 0; i < role.program.size(); ++i) {
    const auto at = static_cast<int32_t>(i);
    std::visit(Overload{
                   [&](const Call& call) {
                     const Profiles& of_segment = profiles[call.segment.index()];
                     for (size_t s = 0; s < kSpaces; ++s)
                       if (of_segment[s].touched) folds[s].call(at, of_segment[s]);
                   },
                   [&](const Alloc& a) { change(at, role.buffers[a.buffer.index()], 1); },
                   [&](const Free& f) { change(at, role.buffers[f.buffer.index()], -1); },
               },
               role.program[i]);
  }
  std::array<MemoryPeak, kSpaces> peaks;
  for (size_t s = 0; s < kSpaces; ++s) {
    folds[s].peak.moment = moment_of(plan, role, folds[s]);
    peaks[s] = std::move(folds[s].peak);
  }
  return peaks;
}

}  // namespace shardlab
