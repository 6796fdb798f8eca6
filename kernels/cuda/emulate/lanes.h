// A grid run on the host: block after block; the threads of a block are fibers that change at synchronisations only.
//
// What it checks while it runs: every thread of a block meets the same barriers, every lane of a warp the same warp operations
// (else the program stops and says who waits where); shared memory is exactly as large as the launch says (sanitizers see the end
// of it) and holds NaNs at first; asynchronous copies land when they are waited for, not before.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/emulate/settings.h"

namespace shardlab::gpu::emulate {

class Block;

/// The kind of a warp operation; all lanes must agree.
enum class WarpOp : uint8_t { kShuffle, kBallot, kMatrixLoad, kMatrixProduct, kSync };

/// One thread of the grid.
class Lane {
 public:
  static constexpr int kWarp = 32;
  static constexpr size_t kSlot = 32;  ///< bytes a lane may give to a warp operation
  struct alignas(16) Slots {
    unsigned char bytes[kWarp][kSlot];
  };

  int thread() const { return thread_; }
  int threads() const { return geometry_->threads; }
  const Geometry& geometry() const { return *geometry_; }
  int64_t block_x() const { return x_; }
  int64_t block_y() const { return y_; }
  int64_t block_z() const { return z_; }
  unsigned char* shared() const { return shared_; }

  /// __syncthreads.
  void barrier();
  /// Gives `bytes` at `mine` to the warp and returns what all lanes gave, valid until this lane's next warp operation.
  const Slots& exchange(WarpOp op, const void* mine, size_t bytes);

  /// cp.async of 16 bytes, or 16 bytes of 0 where `from` is null; its commit and wait.
  void copy_later(void* to, const void* from);
  void commit_copies();
  void wait_copies(int groups_in_flight);

 private:
  friend class Block;
  Block* block_ = nullptr;
  const Geometry* geometry_ = nullptr;
  unsigned char* shared_ = nullptr;
  int64_t x_ = 0, y_ = 0, z_ = 0;
  int thread_ = 0;
};

/// Runs `body(args, lane)` for every thread of the grid.
void run_grid(const char* kernel, const Geometry& geometry, Settings* settings, void (*body)(const void* args, Lane& lane),
              const void* args);

}  // namespace shardlab::gpu::emulate
