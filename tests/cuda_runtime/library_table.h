// Kernels on a fake device whose products a LibraryMatmul asks of a fake cuBLASLt.
#pragma once

#include <functional>
#include <memory>

#include "tests/cuda_runtime/fake_cublaslt.h"
#include "tests/cuda_runtime/queued_kernels.h"
#include "tests/namespaces.h"

namespace shardlab::testing {

/// The table of `behind` with products of its own. What makes a Matmul has no state, so that there is one of these at a time.
class LibraryTable {
 public:
  /// `when_made`: runs as a Matmul is made.
  explicit LibraryTable(Behind behind, std::function<void()> when_made = {});
  ~LibraryTable();
  LibraryTable(const LibraryTable&) = delete;
  const gpu::Kernels& kernels() const { return kernels_; }
  FakeCublasLt& fake() { return *fake_; }

 private:
  std::shared_ptr<FakeCublasLt> fake_ = std::make_shared<FakeCublasLt>();
  std::function<void()> when_made_;
  gpu::Kernels kernels_;
};

}  // namespace shardlab::testing
