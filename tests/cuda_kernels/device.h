// The device that a test program runs on: the host's emulation, or a GPU. One source of tests, two programs.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kernels/cuda/kernels.h"
#include "tests/namespaces.h"

namespace shardlab::testing {

/// Memory and the table of kernels of one device.
class Device {
 public:
  virtual ~Device() = default;
  virtual const gpu::Kernels& kernels() const = 0;
  virtual gpu::Stream stream() = 0;
  /// Runs later launches with blocks and threads in the other order, where the device has an order (the emulation's).
  virtual void reverse(bool reversed) = 0;
  virtual void* allocate(int64_t bytes) = 0;
  virtual void release(void* p) = 0;
  virtual void copy_in(void* to, const void* from, int64_t bytes) = 0;
  /// Waits for everything launched.
  virtual void copy_out(void* to, const void* from, int64_t bytes) = 0;
};

/// The one device of this program.
Device& device();

}  // namespace shardlab::testing
