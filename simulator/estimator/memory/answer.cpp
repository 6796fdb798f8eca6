#include "simulator/estimator/memory/answer.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>

#include "plan/base/check.h"
#include "plan/device_words.h"
#include "simulator/estimator/memory/replay.h"

namespace shardlab::simulator::whatif {
namespace {

using analytic::Estimator;
using analytic::MemoryPart;
using analytic::PeakMoment;
using analytic::Point;
using analytic::StagePeak;

int64_t scaled(int64_t bytes, double factor) { return static_cast<int64_t>(std::min(static_cast<double>(bytes) * factor, 9e18)); }

/// Micro-batches between forward and backward, in words.
std::string flying_text(double in_flight) {
  return in_flight > 1 ? fmt::format(" with {:.3g} micro-batches in flight", in_flight) : "";
}

void say_moment(const StagePeak& peak, StageAnswer& answer) {
  const char* feed_forward = peak.moe ? "experts" : "feed-forward";
  switch (peak.moment) {
    case PeakMoment::kForward:
      answer.moment = "the forward of the last layer" + flying_text(peak.in_flight);
      answer.op = fmt::format("{}, forward", feed_forward);
      return;
    case PeakMoment::kLoss:
      answer.moment = "the loss" + flying_text(peak.in_flight);
      answer.op = "cross-entropy, gradient of the logits";
      return;
    case PeakMoment::kBackward:
      answer.moment = "the backward of the last layer" + flying_text(peak.in_flight);
      answer.op = fmt::format("{}, backward", feed_forward);
      return;
    case PeakMoment::kEnd:
      answer.moment = "the end of the last backward, when all gradients are there";
      answer.op = fmt::format("{} of the first layer, backward", feed_forward);
      return;
    case PeakMoment::kUpdate:
      answer.moment = "the end of the update, when updated weights are gathered";
      answer.op = "all-gather of weights";
      return;
  }
}

StageAnswer stage_answer(const StagePeak& peak, int64_t fragmented, int32_t stage) {
  StageAnswer s{.stage = stage};
  const auto of = [&](MemoryPart part) { return peak.memory[part]; };
  s.add(ItemGroup::kParameters, "parameters", of(MemoryPart::kParameters));
  s.add(ItemGroup::kGradients, "gradients", of(MemoryPart::kGradients));
  s.add(ItemGroup::kOptimizer, "master weights", of(MemoryPart::kMaster));
  s.add(ItemGroup::kOptimizer, "optimizer moments", of(MemoryPart::kMoments));
  for (const analytic::KeptBytes& kept : peak.activations)
    s.add(ItemGroup::kActivations, fmt::format("{}{}", kept.name, kept.moe ? " (experts' layers)" : ""), kept.bytes);
  s.add(ItemGroup::kActivations, "logits", of(MemoryPart::kLogits));
  s.add(ItemGroup::kBuffers, "gradient buckets", of(MemoryPart::kBuckets));
  s.add(ItemGroup::kBuffers, "gathered weights and gradients", of(MemoryPart::kGathered));
  s.add(ItemGroup::kWorkspace, "the layer that runs", of(MemoryPart::kTransient));
  s.add(ItemGroup::kWorkspace, "library workspace", of(MemoryPart::kWorkspace));
  s.add(ItemGroup::kReserved, "held by the allocator, not live", fragmented);
  s.add(ItemGroup::kDevice, std::string(device_words::kContextAndKernels), of(MemoryPart::kContext));
  s.add(ItemGroup::kDevice, std::string(device_words::kNccl), of(MemoryPart::kNccl));
  s.host_bytes = peak.host_bytes, s.nvme_bytes = peak.nvme_bytes;
  say_moment(peak, s);
  return s;
}

/// Relative error of live bytes that nine of ten runs like it stay within.
double doubtful_share(const analytic::Prepared& prepared, const Point& point, const analytic::MemoryBytes& memory) {
  return std::expm1(analytic::published_learnt().memory.spread_of(analytic::live_doubt(prepared, point, memory)));
}

}  // namespace

std::string_view name_of(ItemGroup group) {
  static constexpr std::array<std::string_view, kGroups> kNames{"parameters", "gradients", "optimizer", "activations",
                                                                "buffers",    "workspace", "reserved",  "device"};
  return kNames[static_cast<size_t>(group)];
}

std::string_view name_of(Verdict verdict) {
  static constexpr std::array<std::string_view, 5> kNames{"unknown", "fits", "tight", "unlikely", "no"};
  return kNames[static_cast<size_t>(verdict)];
}

Interval device_interval(int64_t reserved, int64_t beside, double error) {
  return {scaled(reserved, 1 - error) + beside, scaled(reserved, 1 + error) + beside};
}

Verdict verdict_of(int64_t device, Interval range, int64_t capacity) {
  if (capacity <= 0) return Verdict::kUnknown;
  if (device <= capacity) return range.high <= capacity ? Verdict::kFits : Verdict::kTight;
  return range.low <= capacity ? Verdict::kUnlikely : Verdict::kNo;
}

double reserved_error_of(const analytic::FrameworkProfile& profile) {
  if (profile.name == "shardlab") return kPacking;
  return profile.memory.caching ? kReservedError : kLiveError;
}

double reserved_error_of(const analytic::Prepared& prepared, Precision precision) {
  if (prepared.profile().name == "shardlab") return kPacking;
  analytic::MemoryBytes halves;
  halves[MemoryPart::kParameters] = halves[MemoryPart::kActivations] = 1;
  const Point plain{.dp = static_cast<int32_t>(prepared.machine().devices()), .precision = precision};
  return std::max(reserved_error_of(prepared.profile()), doubtful_share(prepared, plain, halves));
}

int64_t StageAnswer::of(ItemGroup group) const {
  int64_t bytes = 0;
  for (const Item& item : items)
    if (item.group == group) bytes += item.bytes;
  return bytes;
}

int64_t StageAnswer::live() const {
  int64_t bytes = 0;
  for (const Item& item : items)
    if (static_cast<size_t>(item.group) < kLiveGroups) bytes += item.bytes;
  return bytes;
}

int64_t StageAnswer::reserved() const { return live() + of(ItemGroup::kReserved); }
int64_t StageAnswer::device() const { return reserved() + of(ItemGroup::kDevice); }

void StageAnswer::add(ItemGroup group, std::string name, int64_t bytes) {
  if (bytes != 0) items.push_back({group, std::move(name), bytes});
}

const StageAnswer& Answer::worst() const {
  SHARDLAB_CHECK(!stages.empty(), "an answer without stages");
  return *std::ranges::max_element(stages, {}, [](const StageAnswer& s) {
    const auto bytes = static_cast<double>(s.device());
    return s.capacity > 0 ? bytes / static_cast<double>(s.capacity) : bytes;  // all stages have a capacity of their own, or none
  });
}

Interval Answer::live() const {
  const int64_t bytes = worst().live();
  return {scaled(bytes, 1 - live_error), scaled(bytes, 1 + live_error)};
}

Interval Answer::device() const {
  const StageAnswer& stage = worst();
  return device_interval(stage.reserved(), stage.of(ItemGroup::kDevice), reserved_error);
}

bool Answer::fits_outside() const {
  return std::ranges::all_of(stages, [&](const StageAnswer& s) {
    return (host_capacity <= 0 || s.host_bytes <= host_capacity) && (nvme_capacity <= 0 || s.nvme_bytes <= nvme_capacity);
  });
}

Verdict Answer::verdict() const { return fits_outside() ? verdict_of(worst().device(), device(), capacity) : Verdict::kNo; }

Answer analytic_answer(const analytic::Prepared& prepared, Estimator& estimator, const Point& point, int64_t capacity) {
  Answer answer;
  answer.capacity = capacity;
  for (int32_t stage = 0; stage < point.pp; ++stage)
    answer.stages.push_back(
        stage_answer(estimator.stage_peak(point, stage), fragmented_bytes(prepared, point, stage, capacity), stage));
  const analytic::Estimate estimate = estimator(point);
  const double doubtful = doubtful_share(prepared, point, estimate.memory);
  answer.live_error = std::max(kLiveError, doubtful);
  answer.reserved_error = std::max(reserved_error_of(prepared.profile()), doubtful);
  answer.step_s = estimate.step_s, answer.transferred = estimate.transferred;
  answer.step = analytic::step_between(prepared, point, estimate);
  return answer;
}

std::vector<Difference> differences(const Answer& before, const Answer& after) {
  std::vector<Difference> list;
  const auto line_of = [&](const std::string& name) -> Difference& {
    const auto found = std::ranges::find(list, name, &Difference::name);
    return found != list.end() ? *found : list.emplace_back(Difference{name, 0, 0});
  };
  for (const Item& item : before.worst().items) line_of(item.name).before += item.bytes;
  for (const Item& item : after.worst().items) line_of(item.name).after += item.bytes;
  std::ranges::stable_sort(list, std::greater(), [](const Difference& d) { return d.before - d.after; });
  return list;
}

}  // namespace shardlab::simulator::whatif
