// How the host table runs its launches, and what it remembers of them. A Stream's handle may point to one.
#pragma once

#include <string>
#include <vector>

#include "kernels/cuda/geometry.h"

namespace shardlab::gpu::emulate {

/// One launch, as it was made.
struct Launched {
  std::string kernel;
  Geometry geometry;
};

struct Settings {
  /// Blocks, and threads between two synchronisations, run in descending order: what depends on the order is a race.
  bool reversed = false;
  std::vector<Launched> launches;  ///< appended to
};

}  // namespace shardlab::gpu::emulate
