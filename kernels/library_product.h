// A matrix product of bf16 operands by oneDNN, which uses the processor's bf16 instructions and matrix units.
#pragma once

#include <cstdint>
#include <memory>

#include "plan/base/dtype.h"

namespace shardlab::kernels {

/// c[rows,columns] = a * b (+ bias[columns]), sums in fp32, rounded to c's type once. Prepared for one shape; one caller at a time.
/// Flops: 2 rows columns depth. Order: the library's own, not reproducible across shapes and processors.
/// Threads: the OpenMP setting of the thread that calls `create`; the thread that calls `run` must have the same setting.
class LibraryProduct {
 public:
  struct Spec {
    int64_t rows = 0, columns = 0, depth = 0;
    bool a_transposed = false;   ///< a is stored [depth,rows], not [rows,depth]
    bool b_transposed = false;   ///< b is stored [columns,depth], not [depth,columns]
    DType result = DType::bf16;  ///< bf16 or f32
    bool bias = false;           ///< a bias of type `bias_type`, added before the rounding
    DType bias_type = DType::bf16;
    bool accumulate = false;  ///< adds to what c holds
  };
  struct Operands {
    const void* a = nullptr;
    const void* b = nullptr;
    const void* bias = nullptr;
    void* c = nullptr;
  };

  /// Whether this processor multiplies bf16 natively (avx512_bf16 or amx): elsewhere fp32 on widened blocks is as fast.
  static bool runs_here();
  /// Null where the library has no implementation for the spec, or the processor no instructions.
  static std::unique_ptr<LibraryProduct> create(const Spec& spec);
  ~LibraryProduct();

  /// The library's choice: "brg:avx512_core_bf16". For the results.
  const char* implementation() const;
  void run(const Operands& x) const;

 private:
  struct Parts;
  explicit LibraryProduct(std::unique_ptr<Parts> parts);
  std::unique_ptr<Parts> parts_;
};

}  // namespace shardlab::kernels
