// What the tests of GPU kernels share: device arrays of any element type with a guard behind them, runs in both orders,
// comparisons.
#pragma once

#include "kernels/cuda/number.h"
#include "tests/cuda_kernels/device.h"
#include "tests/kernels/support.h"
#include "tests/namespaces.h"

namespace shardlab::testing {

inline constexpr DType kActivationTypes[] = {DType::f32, DType::bf16, DType::f16};

/// Half a unit in the last place of the type, relative; twice that and a little for what is rounded on the way is what results may
/// be off by, relative to the largest element.
inline double rounding(DType t) { return t == DType::f32 ? 6e-8 : t == DType::bf16 ? 1.0 / 512 : 1.0 / 4096; }
inline double tolerance(DType t) { return t == DType::f32 ? kTolerance : 2.2 * rounding(t); }

/// x rounded to the type and back.
inline float as_stored(float x, DType t) {
  namespace host = gpu::emulated;
  switch (t) {
    case DType::bf16: return host::value_of(host::rounded<host::bf16>(x));
    case DType::f16: return host::value_of(host::rounded<host::f16>(x));
    default: return x;
  }
}
inline Floats as_stored(Floats x, DType t) {
  for (float& v : x) v = as_stored(v, t);
  return x;
}

/// A device array of f32, bf16 or f16. `shift` elements of space before it make it unaligned.
class Array {
 public:
  Array(const Floats& values, DType t, int shift = 0) : n_(static_cast<int64_t>(values.size())), type_(t), shift_(shift) {
    std::vector<unsigned char> bytes(static_cast<size_t>(bytes_of(t, n_ + shift)) + kGuard, kMark);
    for (int64_t i = 0; i < n_; ++i) encode(values[static_cast<size_t>(i)], bytes.data() + bytes_of(t, i + shift));
    base_ = device().allocate(static_cast<int64_t>(bytes.size()));
    device().copy_in(base_, bytes.data(), static_cast<int64_t>(bytes.size()));
  }
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;
  ~Array() { device().release(base_); }

  /// NaNs: what an output holds before a kernel overwrites it.
  static Floats poison(int64_t n) { return poisoned(n); }

  void* data() const { return static_cast<unsigned char*>(base_) + bytes_of(type_, shift_); }
  float* floats() const { return static_cast<float*>(data()); }
  gpu::Input in() const { return {data(), type_}; }
  gpu::Output out() const { return {data(), type_}; }

  /// Its elements; fails where something was written behind it.
  Floats read() const {
    std::vector<unsigned char> bytes(static_cast<size_t>(bytes_of(type_, n_ + shift_)) + kGuard);
    device().copy_out(bytes.data(), base_, static_cast<int64_t>(bytes.size()));
    for (size_t i = bytes.size() - kGuard; i < bytes.size(); ++i) REQUIRE(bytes[i] == kMark);
    Floats values(static_cast<size_t>(n_));
    for (int64_t i = 0; i < n_; ++i) values[static_cast<size_t>(i)] = decode(bytes.data() + bytes_of(type_, i + shift_));
    return values;
  }

 private:
#if defined(__SANITIZE_ADDRESS__)
  static constexpr size_t kGuard = 0;  // the sanitizer's own is better
#else
  static constexpr size_t kGuard = 64;
#endif
  static constexpr unsigned char kMark = 0xa5;

  void encode(float x, unsigned char* to) const {
    namespace host = gpu::emulated;
    if (type_ == DType::f32) {
      std::memcpy(to, &x, 4);
      return;
    }
    const uint16_t bits = type_ == DType::bf16 ? host::rounded<host::bf16>(x).bits : host::rounded<host::f16>(x).bits;
    std::memcpy(to, &bits, 2);
  }
  float decode(const unsigned char* from) const {
    namespace host = gpu::emulated;
    float x;
    uint16_t bits;
    if (type_ == DType::f32) {
      std::memcpy(&x, from, 4);
      return x;
    }
    std::memcpy(&bits, from, 2);
    return type_ == DType::bf16 ? host::value_of(host::bf16{bits}) : host::value_of(host::f16{bits});
  }

  int64_t n_;
  DType type_;
  int shift_;
  void* base_ = nullptr;
};

/// Device memory of plain numbers: ids, lists, doubles.
template <class T>
class Numbers {
 public:
  explicit Numbers(const std::vector<T>& values) : n_(values.size()) {
    data_ = static_cast<T*>(device().allocate(static_cast<int64_t>(n_ * sizeof(T))));
    device().copy_in(data_, values.data(), static_cast<int64_t>(n_ * sizeof(T)));
  }
  Numbers(const Numbers&) = delete;
  Numbers& operator=(const Numbers&) = delete;
  ~Numbers() { device().release(data_); }
  T* data() const { return data_; }
  std::vector<T> read() const {
    std::vector<T> values(n_);
    device().copy_out(values.data(), data_, static_cast<int64_t>(n_ * sizeof(T)));
    return values;
  }

 private:
  size_t n_;
  T* data_;
};

/// Scratch of exactly the bytes asked for, filled with NaNs.
class Lent {
 public:
  explicit Lent(int64_t bytes) : bytes_(std::vector<unsigned char>(static_cast<size_t>(bytes), 0xff)), n_(bytes) {}
  operator gpu::Scratch() const { return {bytes_.data(), n_}; }

 private:
  Numbers<unsigned char> bytes_;
  int64_t n_;
};

/// Runs `compute` in both orders of blocks and threads, requires equal bits, and returns them.
inline Floats in_both_orders(const std::function<Floats()>& compute) {
  device().reverse(false);
  const Floats first = compute();
  device().reverse(true);
  const Floats second = compute();
  device().reverse(false);
  REQUIRE(bit_difference(second, first) == "");
  return first;
}

inline const gpu::Kernels& table() { return device().kernels(); }
inline gpu::Stream stream() { return device().stream(); }

}  // namespace shardlab::testing
