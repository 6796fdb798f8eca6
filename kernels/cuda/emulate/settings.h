// Settings of launches on the host, and a record of them. A Stream's handle may point to one.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "kernels/cuda/geometry.h"

namespace shardlab::gpu::emulate {

/// One launch, as it was made.
struct Launched {
  std::string kernel;
  Geometry geometry;
};

/// Memory that launches of one stream use in turn: stacks are large, and new ones cost a page fault each.
struct Stacks {
  std::unique_ptr<unsigned char[]> bytes;
  size_t size = 0;
};

struct Settings {
  /// Blocks, and threads between two synchronisations, run in descending order: what depends on the order is a race.
  bool reversed = false;
  std::vector<Launched> launches;  ///< appended to
  Stacks stacks;
};

}  // namespace shardlab::gpu::emulate
