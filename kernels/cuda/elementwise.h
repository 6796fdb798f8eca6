// One pass over memory, a vector of elements a thread. An operation is a plain struct with `at<N>(i)`: elements i .. i+N-1, which
// it loads whole before it stores, so that an output may be one of its inputs.
#pragma once

#include "kernels/cuda/launch.h"
#include "kernels/cuda/vectors.h"

namespace shardlab::gpu::SHARDLAB_GPU_VARIANT {

template <class Operation, int kVector>
struct Elementwise {
  static constexpr int kThreads = geometry::kElementwiseThreads;
  struct Args {
    Operation operation;
    int64_t n;
  };
  SHARDLAB_DEVICE static void run(const Thread& t, const Args& a) {
    int64_t i = (t.block_x() * kThreads + t.index()) * kVector;
    if (i + kVector <= a.n) {
      a.operation.template at<kVector>(i);
    } else {
      for (; i < a.n; ++i) a.operation.template at<1>(i);
    }
  }
};

/// n elements, kVector at a time where `wide` says that all arrays are aligned for it.
template <int kVector, class Operation>
void elementwise(const char* name, const Operation& operation, int64_t n, bool wide, Stream s) {
  expect(n >= 0, "elementwise: an extent is not negative", n);
  with_vector<kVector>(wide, [&](auto vector) {
    launch<Elementwise<Operation, vector.value>>(name, geometry::elementwise(n, vector.value), {operation, n}, s);
  });
}

}  // namespace shardlab::gpu::SHARDLAB_GPU_VARIANT
