// Blocks of operands in fp32: what the kernels on narrow storage are put together from.
#pragma once

#include <algorithm>

#include "kernels/mixed.h"
#include "plan/base/check.h"

namespace shardlab::kernels {

/// Elements of a block that is widened at a time: 16 KiB of fp32, so that a few operands' blocks stay in the first cache.
inline constexpr int64_t kBlockElements = 4096;

/// Rows of `width` elements in a block, at least one.
inline int64_t rows_per_block(int64_t width) { return std::max<int64_t>(1, kBlockElements / std::max<int64_t>(1, width)); }

inline int64_t bytes_per_element(DType t) { return bits_of(t) / 8; }

/// x[n], elements [first, first + n) of a matrix, times their scales.
inline void apply_scales(const StorageKernels& s, const BlockScales& scales, int64_t first, int64_t n, float* x) {
  if (scales.values == nullptr) return;
  const int64_t across = (scales.columns + scales.block_columns - 1) / scales.block_columns;
  for (int64_t i = 0; i < n;) {
    const int64_t row = (first + i) / scales.columns, column = (first + i) % scales.columns;
    const int64_t block = column / scales.block_columns;
    const int64_t run = std::min({n - i, (block + 1) * scales.block_columns - column, scales.columns - column});
    s.scale({x + i, run, scales.values[row / scales.block_rows * across + block], x + i});
    i += run;
  }
}

/// Runs of consecutive elements of an operand as fp32: where they are if they are f32, else widened to scratch, and narrowed back
/// by `write`. One run at a time.
class Window {
 public:
  /// Takes scratch for runs of up to `most` elements.
  Window(const StorageKernels& s, const Stored& x, int64_t most, Scratch& scratch) : s_(s), x_(x) {
    if (x.data == nullptr || direct()) return;
    SHARDLAB_CHECK(is_float_storage(x.dtype), "{} is no floating-point storage", name_of(x.dtype));
    most_ = most;
    copy_ = scratch.take<float>(most);
  }
  bool present() const { return x_.data != nullptr; }
  /// Elements [first, first + n), widened; null where there is no operand.
  float* read(int64_t first, int64_t n) {
    float* to = place(first, n);
    if (to == nullptr || direct()) return to;
    s_.widen({at(first), x_.dtype, n, to});
    apply_scales(s_, x_.scales, first, n, to);
    return to;
  }
  /// The place where elements [first, first + n) are to be written; `write` follows.
  float* place(int64_t first, int64_t n) {
    if (!present()) return nullptr;
    if (direct()) return static_cast<float*>(x_.data) + first;
    SHARDLAB_CHECK(n <= most_, "a run of {} elements in a window of {}", n, most_);
    first_ = first;
    n_ = n;
    return copy_;
  }
  /// Narrows the run that was placed or read last.
  void write() {
    SHARDLAB_CHECK(x_.scales.values == nullptr, "an operand with scales of {} columns is written", x_.scales.columns);
    if (present() && !direct()) s_.narrow({copy_, n_, x_.dtype, at(first_)});
  }

 private:
  bool direct() const { return x_.dtype == DType::f32 && x_.scales.values == nullptr; }
  void* at(int64_t element) const { return static_cast<char*>(x_.data) + element * bytes_per_element(x_.dtype); }

  const StorageKernels& s_;
  Stored x_;
  float* copy_ = nullptr;
  int64_t most_ = 0, first_ = 0, n_ = 0;
};

/// Rectangles of a row-major matrix as dense fp32 [rows, columns] in scratch. One at a time.
class Panel {
 public:
  struct Size {
    int64_t rows = 0, columns = 0;
  };
  /// Element (r, c) of the matrix is at r * stride + c. Takes scratch for rectangles of up to `most`.
  Panel(const StorageKernels& s, const Stored& x, int64_t stride, Size most, Scratch& scratch) : s_(s), x_(x), stride_(stride) {
    if (x.data == nullptr) return;
    SHARDLAB_CHECK(is_float_storage(x.dtype), "{} is no floating-point storage", name_of(x.dtype));
    copy_ = scratch.take<float>(most.rows * most.columns);
  }
  bool present() const { return x_.data != nullptr; }
  /// The rectangle whose first element is `first`, widened.
  float* read(int64_t first, Size size) {
    read_at(0, first, size);
    return copy_;
  }
  /// The same, kept behind `held` elements of rectangles that were read before.
  void read_at(int64_t held, int64_t first, Size size) {
    place(first, size);
    for (int64_t r = 0; r < size.rows && present(); ++r) widen_row(r, copy_ + held + r * size.columns);
  }
  float* place(int64_t first, Size size) {
    first_ = first;
    size_ = size;
    return copy_;
  }
  /// Narrows the rectangle placed or read last.
  void write() {
    SHARDLAB_CHECK(x_.scales.values == nullptr, "an operand with scales of {} columns is written", x_.scales.columns);
    for (int64_t r = 0; r < size_.rows && present(); ++r) s_.narrow({copy_ + r * size_.columns, size_.columns, x_.dtype, row(r)});
  }

 private:
  void widen_row(int64_t r, float* to) {
    s_.widen({row(r), x_.dtype, size_.columns, to});
    apply_scales(s_, x_.scales, first_ + r * stride_, size_.columns, to);
  }
  void* row(int64_t r) const { return static_cast<char*>(x_.data) + (first_ + r * stride_) * bytes_per_element(x_.dtype); }

  const StorageKernels& s_;
  Stored x_;
  int64_t stride_;
  float* copy_ = nullptr;
  int64_t first_ = 0;
  Size size_;
};

/// Calls body(first, n) for blocks of `block` out of `count`.
template <class Body>
void for_blocks(int64_t count, int64_t block, const Body& body) {
  for (int64_t first = 0; first < count; first += block) body(first, std::min(block, count - first));
}

}  // namespace shardlab::kernels
