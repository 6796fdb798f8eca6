// Launching a kernel: a struct K with `Args` (plain data, passed by value), `kThreads` (the most threads of a block) and a static
// `run(const Thread&, const Args&)`.
#pragma once

#include "kernels/checks.h"
#include "kernels/cuda/geometry.h"
#include "kernels/cuda/thread.h"

#ifdef __CUDACC__
#include <cuda_runtime_api.h>
#endif

namespace shardlab::gpu::SHARDLAB_GPU_VARIANT {

using kernels::expect;

#ifdef __CUDACC__

/// The one __global__ function: profiles show it as run_kernel<NormForwardRows<bf16, 8>>.
template <class K>
__global__ void __launch_bounds__(K::kThreads) run_kernel(const __grid_constant__ typename K::Args args) {
  K::run(Thread{}, args);
}

inline void report(const char* kernel, cudaError_t error, Stream s) {
  if (error != cudaSuccess) s.check->failed(kernel, "cuda", error, cudaGetErrorString(error));
}

template <class K>
void launch(const char* name, const Geometry& g, const typename K::Args& args, Stream s) {
  expect(g.threads <= K::kThreads, name, g.threads);
  if (g.blocks() == 0) return;
  constexpr int64_t kWithoutAsking = 48 * 1024;
  if (g.shared > kWithoutAsking)
    report(name, cudaFuncSetAttribute(run_kernel<K>, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(g.shared)), s);
  const dim3 grid(static_cast<unsigned>(g.x), static_cast<unsigned>(g.y), static_cast<unsigned>(g.z));
  run_kernel<K>
      <<<grid, static_cast<unsigned>(g.threads), static_cast<size_t>(g.shared), static_cast<cudaStream_t>(s.handle)>>>(args);
  report(name, cudaGetLastError(), s);
}

#else

template <class K>
void launch(const char* name, const Geometry& g, const typename K::Args& args, Stream s) {
  expect(g.threads <= K::kThreads, name, g.threads);
  if (g.blocks() == 0) return;
  emulate::run_grid(
      name, g, static_cast<emulate::Settings*>(s.handle),
      [](const void* a, emulate::Lane& lane) { K::run(Thread(lane), *static_cast<const typename K::Args*>(a)); }, &args);
}

#endif

/// Names a type in a call of a generic function.
template <class T>
struct Named {
  using type = T;
};
template <int kValue>
struct Constant {
  static constexpr int value = kValue;
};

/// Calls f with the activation type. rule: "norm: x is f32, bf16 or f16".
template <class F>
void with_type(DType t, const char* rule, const F& f) {
  switch (t) {
    case DType::f32: return f(Named<float>{});
    case DType::bf16: return f(Named<bf16>{});
    case DType::f16: return f(Named<f16>{});
    default: kernels::argument_refused(rule, static_cast<int64_t>(t));
  }
}

/// Whether every array begins on a 16-byte boundary. Null counts as aligned.
inline bool aligned(std::initializer_list<const void*> arrays) {
  for (const void* p : arrays)
    if (reinterpret_cast<uintptr_t>(p) % 16 != 0) return false;
  return true;
}

/// Calls f with the elements of one access: kVector where `wide`, else one.
template <int kVector, class F>
void with_vector(bool wide, const F& f) {
  if (wide) return f(Constant<kVector>{});
  f(Constant<1>{});
}
/// Elements of 16 bytes.
template <class T>
inline constexpr int kVectorOf = 16 / static_cast<int>(sizeof(T));

/// Checks that an array is of T, or of f32 where `or_f32`.
inline void expect_type(DType got, DType want, bool or_f32, const char* rule) {
  expect(got == want || (or_f32 && got == DType::f32), rule, static_cast<int64_t>(got));
}
inline void expect_present(const void* p, const char* rule) { expect(p != nullptr, rule, 0); }

}  // namespace shardlab::gpu::SHARDLAB_GPU_VARIANT
