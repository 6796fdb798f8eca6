#include "simulator/estimator/analytic/schedule.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>

namespace shardlab::simulator::analytic {

namespace {

/// A pipeline as the closed forms see it.
struct Pipe {
  double p, m, v, behind;  ///< stages, micro-batches, parts of a looped stage, stages from this one on
  double group = p;        ///< micro-batches that a part takes before the next part does
};

/// One schedule: its most micro-batches in flight, and its idle seconds (schedule.h has the sources).
struct Form {
  Schedule schedule;
  double (*in_flight)(const Pipe& pipe);
  double (*bubble_s)(const Pipe& pipe, const StageTimes& t);
};

double all(const Pipe& pipe) { return pipe.m; }
double whole(const Pipe&, const StageTimes& t) { return t.sum - t.longest; }
double by_parts(const Pipe& pipe, const StageTimes& t) { return whole(pipe, t) / pipe.v; }
double without_weights(const Pipe& pipe, const StageTimes& t) { return (pipe.p - 1) * (t.forward + t.input - 2 * t.weight); }

constexpr Form kForms[] = {
    {Schedule::kAfab, all, whole},
    {Schedule::k1F1B, [](const Pipe& x) { return std::min(x.m, x.behind); }, whole},
    {Schedule::kInterleaved, [](const Pipe& x) { return std::min(x.m * x.v, 2 * (x.behind - 1) + (x.v - 1) * x.group + 1) / x.v; },
     by_parts},
    {Schedule::kBreadthFirst, all, by_parts},
    {Schedule::kZbH1, [](const Pipe& x) { return std::min(x.m, x.p); },
     [](const Pipe& x, const StageTimes& t) { return (x.p - 1) * (t.forward + t.input - t.weight); }},
    {Schedule::kZbH2, [](const Pipe& x) { return std::min(x.m, 2 * x.p - 1); }, without_weights},
    {Schedule::kZbV, [](const Pipe& x) { return std::min(x.m, x.p); }, without_weights},
    {Schedule::kVHalf, [](const Pipe& x) { return std::min(x.m, std::floor((x.p + 2) / 2)); },
     [](const Pipe& x, const StageTimes& t) { return whole(x, t) / 2; }},
    {Schedule::kVMin, [](const Pipe& x) { return std::min(x.m, std::floor((x.p + 4) / 3)); },
     [](const Pipe& x, const StageTimes& t) { return whole(x, t) * 2 / 3; }},
    {Schedule::kDualPipe, [](const Pipe& x) { return std::min(x.m, x.p + 1); },
     [](const Pipe& x, const StageTimes& t) { return (x.p / 2 - 1) * (t.forward + 2 * t.input - t.weight); }},
    {Schedule::kDualPipeV, [](const Pipe& x) { return std::min(x.m, x.p + 1); },
     [](const Pipe& x, const StageTimes& t) { return (x.p - 1) * (t.forward + 2 * t.input - t.weight) / 2; }},
};

constexpr auto kEstimated = [] {
  std::array<Schedule, std::size(kForms)> all{};
  for (size_t i = 0; i < all.size(); ++i) all[i] = kForms[i].schedule;
  return all;
}();

/// Rows stand in the order of `Schedule`, from the first of more than one stage on.
constexpr bool are_in_order() {
  for (size_t i = 0; i < std::size(kForms); ++i)
    if (static_cast<size_t>(kForms[i].schedule) != i + 1) return false;
  return true;
}
static_assert(are_in_order());

/// Null for one stage, and for a schedule that no point has.
const Form* form_of(Schedule schedule) {
  const size_t at = static_cast<size_t>(schedule) - 1;
  return at < std::size(kForms) ? &kForms[at] : nullptr;
}

}  // namespace

std::span<const Schedule> estimated_schedules() { return kEstimated; }

double in_flight(Schedule schedule, int64_t stages, int64_t stage, int64_t micro_batches, int64_t virtual_stages, int64_t group) {
  const Pipe pipe{.p = static_cast<double>(stages),
                  .m = static_cast<double>(micro_batches),
                  .v = static_cast<double>(virtual_stages),
                  .behind = static_cast<double>(stages - stage),
                  .group = static_cast<double>(group > 0 ? group : stages)};
  const Form* form = form_of(schedule);
  return form != nullptr ? form->in_flight(pipe) : schedule == Schedule::kNone ? 1 : pipe.m;
}

double in_flight_of_part(const Point& point, int64_t stage, int64_t part) {
  const auto all = std::llround(in_flight(point, stage) * point.vpp);
  const int64_t group = std::min(point.micro_batch_group > 0 ? point.micro_batch_group : point.pp, point.grad_accumulation);
  const int64_t round = group * point.vpp;
  return static_cast<double>(all / round * group + std::clamp<int64_t>(all % round - part * group, 0, group));
}

double bubble_s(Schedule schedule, int64_t stages, int64_t virtual_stages, const StageTimes& t) {
  const Form* form = form_of(schedule);
  if (form == nullptr) return 0;
  const Pipe pipe{.p = static_cast<double>(stages), .m = 0, .v = static_cast<double>(virtual_stages), .behind = 0, .group = 0};
  return std::max(0.0, form->bubble_s(pipe, t));
}

}  // namespace shardlab::simulator::analytic
