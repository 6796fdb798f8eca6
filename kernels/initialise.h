// Initial parameter values as functions of the logical element.
#pragma once

#include <cstdint>
#include <span>

#include "plan/base/philox.h"

namespace shardlab::kernels {

/// Fills the local block [origin, origin + extent) of a logical tensor of `shape` with normal values of mean 0: the same on every
/// layout. values: row-major over `extent`. shape, origin and extent have one length (1 to 8); extent 0 fills nothing.
///
/// Box-Muller in fp64 on pairs of logical elements (row-major index e over `shape`): with the 32-bit words w_e = random_bits(key,
/// e), elements 2p and 2p+1 share u1 = (w_2p + 0.5) / 2^32, u2 = (w_(2p+1) + 0.5) / 2^32, r = sqrt(-2 log u1), a = (2 pi) u2;
/// element 2p is (float)(deviation * (r * cos a)), element 2p+1 is (float)(deviation * (r * sin a)). Source: Box & Muller 1958.
struct InitialiseNormal {
  std::span<const int64_t> shape, origin, extent;
  double deviation = 0.02;
  RandomKey key;
  float* values = nullptr;
  int threads = 1;  ///< that share out rows of the block; of a block of fewer than 2^18 elements one does all
};
void initialise_normal(const InitialiseNormal& a);

}  // namespace shardlab::kernels
