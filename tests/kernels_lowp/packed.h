// What the tests of narrow storage share: packed tensors, and runs of mixed kernels in guarded scratch.
#pragma once

#include <vector>

#include "kernels/mixed.h"
#include "tests/kernels/support.h"
#include "tests/namespaces.h"

namespace shardlab::testing {

/// A tensor in some storage.
class Packed {
 public:
  Packed() = default;
  /// `values`, rounded to nearest even.
  Packed(DType type, const Floats& values) : Packed(type, static_cast<int64_t>(values.size())) {
    kernels::storage_kernels(kernels::kernels_for_this_processor()).narrow({values.data(), n_, type_, bytes_.data()});
  }
  /// n elements of all-ones bits, which is NaN in every format.
  Packed(DType type, int64_t n) : type_(type), n_(n), bytes_(static_cast<size_t>(bytes_of(type, n)), 0xff) {}

  kernels::Stored stored() { return {n_ == 0 ? nullptr : bytes_.data(), type_, {}}; }
  Floats values() const {
    Floats x(static_cast<size_t>(n_));
    kernels::storage_kernels(kernels::kernels_for_this_processor()).widen({bytes_.data(), type_, n_, x.data()});
    return x;
  }
  /// What `values` become when they are stored as this tensor is.
  Floats rounded(const Floats& values) const { return Packed(type_, values).values(); }

 private:
  DType type_ = DType::f32;
  int64_t n_ = 0;
  std::vector<uint8_t> bytes_;
};

/// A random tensor.
inline Packed random_packed(DType type, int64_t n, uint32_t seed, float scale = 1.0f) {
  return Packed(type, random_floats(n, seed, scale));
}

/// Calls `kernel(args, scratch)` twice, to count and to run in just as much scratch, behind which nothing may be written.
template <class Kernel, class Args>
void run_counted(const Kernel& kernel, const Args& args) {
  auto counter = kernels::Scratch::counter();
  kernel(args, counter);
  Scratch lent(counter.used());
  kernels::Scratch scratch(lent.data());
  kernel(args, scratch);
  REQUIRE(scratch.used() == counter.used());
  REQUIRE(lent.intact());
}
template <class Args>
void run_mixed(const kernels::Kernels& k, void (kernels::MixedKernels::*kernel)(const Args&, kernels::Scratch&) const, const Args& args) {
  const kernels::MixedKernels mixed(k);
  run_counted([&](const Args& a, kernels::Scratch& s) { (mixed.*kernel)(a, s); }, args);
}

}  // namespace shardlab::testing
