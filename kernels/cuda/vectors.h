// Neighbouring elements: loaded and stored up to 16 bytes at a time, worked on as fp32.
#pragma once

#include "kernels/cuda/kernels.h"
#include "kernels/cuda/number.h"
#ifndef __CUDACC__
#include "plan/base/check.h"
#endif

namespace shardlab::gpu::SHARDLAB_GPU_VARIANT {

/// N elements as they lie in memory.
template <class T, int N>
struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) Vector {
  T at[N];
};
/// N fp32 values.
template <int N>
struct Values {
  float at[N];
};

template <int N>
SHARDLAB_DEVICE Values<N> operator+(const Values<N>& a, const Values<N>& b) {
  Values<N> c;
#pragma unroll
  for (int j = 0; j < N; ++j) c.at[j] = a.at[j] + b.at[j];
  return c;
}

template <int N, class T>
SHARDLAB_DEVICE Vector<T, N> load(const T* p) {
#ifdef __CUDACC__
  return *reinterpret_cast<const Vector<T, N>*>(p);
#else
  SHARDLAB_CHECK(reinterpret_cast<uintptr_t>(p) % alignof(Vector<T, N>) == 0, "a load of {} elements is not aligned", N);
  Vector<T, N> v;
  std::memcpy(v.at, p, sizeof(T) * N);
  return v;
#endif
}
template <int N, class T>
SHARDLAB_DEVICE void store(T* p, const Vector<T, N>& v) {
#ifdef __CUDACC__
  *reinterpret_cast<Vector<T, N>*>(p) = v;
#else
  SHARDLAB_CHECK(reinterpret_cast<uintptr_t>(p) % alignof(Vector<T, N>) == 0, "a store of {} elements is not aligned", N);
  std::memcpy(p, v.at, sizeof(T) * N);
#endif
}

template <class T, int N>
SHARDLAB_DEVICE Values<N> values_of(const Vector<T, N>& v) {
  Values<N> x;
#pragma unroll
  for (int j = 0; j < N; ++j) x.at[j] = value_of(v.at[j]);
  return x;
}
template <int N, class T>
SHARDLAB_DEVICE Values<N> values_at(const T* p) {
  return values_of(load<N>(p));
}
template <int N, class T>
SHARDLAB_DEVICE void put(T* p, const Values<N>& x) {
  Vector<T, N> v;
#pragma unroll
  for (int j = 0; j < N; ++j) v.at[j] = rounded<T>(x.at[j]);
  store<N>(p, v);
}

/// The same of an array whose type is known at run time only (and is the same for all threads): parameters and their gradients.
template <int N>
SHARDLAB_DEVICE Values<N> values_at(const Input& a, int64_t i) {
  switch (a.dtype) {
    case DType::bf16: return values_at<N>(static_cast<const bf16*>(a.data) + i);
    case DType::f16: return values_at<N>(static_cast<const f16*>(a.data) + i);
    default: return values_at<N>(static_cast<const float*>(a.data) + i);
  }
}
template <int N>
SHARDLAB_DEVICE void put(const Output& a, int64_t i, const Values<N>& x) {
  switch (a.dtype) {
    case DType::bf16: return put<N>(static_cast<bf16*>(a.data) + i, x);
    case DType::f16: return put<N>(static_cast<f16*>(a.data) + i, x);
    default: return put<N>(static_cast<float*>(a.data) + i, x);
  }
}

}  // namespace shardlab::gpu::SHARDLAB_GPU_VARIANT
