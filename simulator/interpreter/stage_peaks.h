// Peaks of stages for any assignment of treatments to layers (plan/treatment.h), from one plan a treatment.
//
// Plans of one case that differ in the treatment of a layer differ in two things: the allocations of the layer's own calls, and the
// copies that park it. So the effect of a treatment on live bytes is read once, from a plan all of whose layers have the treatment.
// An assignment is then folded from the effects of its layers; a lowering of its own takes a thousand times as long.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "plan/base/result.h"
#include "plan/treatment.h"
#include "simulator/interpreter/case_plan.h"

namespace shardlab::simulator {

/// Device and host memory.
inline constexpr size_t kTreatedSpaces = 2;

/// The effect of a stretch of a program on live bytes, by space.
struct Rise {
  std::array<int64_t, kTreatedSpaces> highest{}, net{};
  void then(const Rise& next);
};

class StagePeaks {
 public:
  /// Lowers the case once for each treatment; recompute and offload of its own are not looked at. Refuses what `lower` does.
  static Result<StagePeaks> of(const Case& config, std::vector<LayerTreatment> treatments, const Lower& lower);

  struct Peak {
    int64_t device = 0, host = 0;
  };
  /// `assigned`: by layer of the stage, indices of treatments. Units: bytes of one rank. Under zero 3 an assignment that parks a
  /// layer is lowered: what gathers weights beside the copies depends on the neighbours.
  Peak peak(int64_t stage, std::span<const size_t> assigned) const;

  /// Layers of the model that the stage has, ascending; under looped and folded schedules they are no one run.
  std::span<const int32_t> layers(int64_t stage) const { return stages_[static_cast<size_t>(stage)].layers; }
  int64_t in_flight(int64_t stage) const { return stages_[static_cast<size_t>(stage)].in_flight; }
  /// Device bytes that live for the whole step.
  int64_t whole_step(int64_t stage) const { return stages_[static_cast<size_t>(stage)].whole_step; }
  /// Bytes that a layer's forward leaves on the device for one micro-batch, its output included; 0 if they are parked.
  int64_t kept(size_t treatment) const { return kept_[treatment]; }
  /// The rise of a layer's forward and of its backward above the bytes that are live when forward begins.
  int64_t forward(size_t treatment) const { return forward_[treatment]; }
  int64_t backward(size_t treatment) const { return backward_[treatment]; }

 private:
  /// A stretch of the program: of nobody in particular (`layer` -1), or what treatment t does in it, `by_treatment[first + t]`.
  struct Part {
    int32_t layer = -1;  ///< of the stage
    int32_t first = 0;
    Rise rise;
  };
  struct Stage {
    std::vector<int32_t> layers;  ///< of the model
    int64_t in_flight = 0, whole_step = 0;
    std::array<int64_t, kTreatedSpaces> persistent{};
    std::array<int64_t, kTreatedSpaces> longer{};  ///< what the case has beyond the plans, which are of fewer micro-batches
    std::vector<Part> parts;
    std::vector<Rise> by_treatment;
  };

  Peak lowered(int64_t stage, std::span<const size_t> assigned) const;

  Case few_;  ///< of as many micro-batches as the plans
  Lower lower_;
  std::vector<LayerTreatment> treatments_;
  std::vector<Stage> stages_;
  std::vector<int64_t> kept_, forward_, backward_;
};

}  // namespace shardlab::simulator
