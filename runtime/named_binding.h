// Helpers for the binders of named kernels: checks of operands that refuse with the op's text, and matrices of operands.
#pragma once

#include <fmt/format.h>

#include <span>
#include <string>
#include <string_view>

#include "runtime/named_kernels.h"

namespace shardlab::runtime::named {

/// Collects the first thing that is wrong with an op's operands.
class Operands {
 public:
  explicit Operands(const BoundOp& op) : op_(op) {}

  Operands& count(size_t reads, size_t writes) {
    return that(op_.reads.size() == reads && op_.writes.size() == writes,
                fmt::format("takes {} reads and {} writes, not {} and {}", reads, writes, op_.reads.size(), op_.writes.size()));
  }
  Operands& type(const Tensor& t, DType wanted) {
    return that(t.type->dtype == wanted,
                fmt::format("has an operand of {} where it takes {}", name_of(t.type->dtype), name_of(wanted)));
  }
  /// A floating-point storage type.
  Operands& floating(const Tensor& t) {
    return that(kernels::is_float_storage(t.type->dtype),
                fmt::format("has an operand of {} where it takes f32, bf16, f16, f8e4m3 or f8e5m2", name_of(t.type->dtype)));
  }
  Operands& elements(const Tensor& t, int64_t n) {
    return that(t.shape().elements() == n, fmt::format("has an operand of {} elements where it takes {}", t.shape().elements(), n));
  }
  /// A number: one element of the type.
  Operands& number(const Tensor& t, DType wanted = DType::f32) { return elements(t, 1).type(t, wanted); }
  Operands& same_size(const Tensor& a, const Tensor& b) { return elements(b, a.shape().elements()); }
  /// The write lies where the read does.
  Operands& in_place(const Tensor& write, const Tensor& read) {
    return that(write.data == read.data && write.type->dtype == read.type->dtype, "writes beside what it updates in place");
  }
  Operands& that(bool good, std::string_view problem) {
    if (!good && problem_.empty()) problem_ = problem;
    return *this;
  }
  bool good() const { return problem_.empty(); }
  Error refusal() const {
    return {ExitCode::kUsage, fmt::format("`{}` {}", describe(*op_.plan, *op_.instruction), problem_),
            "kernels/README.md lists the operands of every named kernel", ""};
  }

 private:
  const BoundOp& op_;
  std::string problem_;
};

/// Rows and columns of an operand: the last dim are the columns.
struct Matrix {
  int64_t rows = 0, columns = 0;
};
inline Matrix matrix_of(const Tensor& t) { return {t.shape().elements() / t.shape().last(), t.shape().last()}; }

inline int64_t elements_of(const Tensor& t) { return t.shape().elements(); }

/// One over the ranks over which `summand` is partial and `whole` is not: the share of the whole that each of them takes.
float share_of(const BoundOp& op, const Tensor& summand, const Tensor& whole);

/// Random numbers of an op: by seed, label, layer and parameter, so the same on every layout. `step` is set before each run.
RandomKey key_of(const BoundOp& op, RandomUse use);

/// A launch without scratch.
template <class Run>
ScratchLaunch plain(Run run) {
  return {0, [run](const StepState&, void*) { run(); }};
}

// Binders, by the file that holds them.
std::span<const KernelBinder> precision_kernels();
std::span<const KernelBinder> fp8_kernels();
std::span<const KernelBinder> compression_kernels();
std::span<const KernelBinder> optimizer_kernels();

}  // namespace shardlab::runtime::named
