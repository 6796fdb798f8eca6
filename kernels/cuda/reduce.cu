// Scalar totals, the squared norm, and the sum over ranks that share a device.
#include "kernels/cuda/elementwise.h"
#include "kernels/cuda/launches.h"
#include "kernels/cuda/sums.h"

namespace shardlab::gpu::SHARDLAB_GPU_VARIANT {
namespace {

/// Arrays of one launch that collects small ones.
constexpr int kCollected = 64;

/// Copies up to kCollected arrays, one behind the other: block y is an array.
struct Collect {
  static constexpr int kThreads = geometry::kElementwiseThreads;
  struct Args {
    const float* from[kCollected];
    int64_t begin[kCollected + 1];  ///< offsets in `to`
    float* to;
  };
  SHARDLAB_DEVICE static void run(const Thread& t, const Args& a) {
    const int64_t part = t.block_y(), n = a.begin[part + 1] - a.begin[part];
    for (int64_t i = t.block_x() * kThreads + t.index(); i < n; i += t.blocks_x() * kThreads)
      a.to[a.begin[part] + i] = a.from[part][i];
  }
};

/// The tree over n numbers, times a factor, by one thread: losses are a few hundred. The block fetches them for it.
struct TreeTotal {
  static constexpr int kThreads = geometry::kElementwiseThreads;
  struct Args {
    const float* x;
    int64_t n;
    float factor;
    float* total;
  };
  SHARDLAB_DEVICE static void run(const Thread& t, const Args& a) {
    float* shared = reinterpret_cast<float*>(t.shared());
    TreeCounter<float, 32> sum;
    for (int64_t first = 0; first < a.n; first += kThreads) {
      if (first + t.index() < a.n) shared[t.index()] = a.x[first + t.index()];
      t.barrier();
      if (t.index() == 0)
        for (int64_t i = 0; i < kThreads && first + i < a.n; ++i) sum.push(shared[i]);
      t.barrier();
    }
    if (t.index() == 0) *a.total = sum.total(0.0f) * a.factor;
  }
};

/// A block's share of one array: the sum of squares in fp64.
template <class T, int kVector>
struct SquaredNormBlocks {
  static constexpr int kThreads = geometry::kNormThreads;
  struct Args {
    const T* x;
    int64_t n;
    double* partial;
  };
  SHARDLAB_DEVICE static void run(const Thread& t, const Args& a) {
    const int64_t begin = t.block_x() * geometry::kNormSpan;
    const int64_t end = begin + geometry::kNormSpan < a.n ? begin + geometry::kNormSpan : a.n;
    double sum[1] = {0};
    int64_t i = begin + int64_t{t.index()} * kVector;
#pragma unroll 4
    for (; i + kVector <= end; i += kThreads * kVector) add<kVector>(sum[0], a.x + i);
    for (; i < end; ++i) add<1>(sum[0], a.x + i);  // the one thread whose vector the end cuts
    block_sums(t, sum, reinterpret_cast<double*>(t.shared()));
    if (t.index() == 0) a.partial[t.block_x()] = sum[0];
  }

 private:
  template <int N>
  SHARDLAB_DEVICE static void add(double& sum, const T* p) {
    const Values<N> v = values_at<N>(p);
#pragma unroll
    for (float x : v.at) sum = sum + static_cast<double>(x) * static_cast<double>(x);
  }
};

/// Their total, by one block.
struct SquaredNormTotal {
  static constexpr int kThreads = geometry::kNormThreads;
  struct Args {
    const double* partial;
    int64_t n;
    double* total;
  };
  SHARDLAB_DEVICE static void run(const Thread& t, const Args& a) {
    double sum[1] = {0};
    for (int64_t i = t.index(); i < a.n; i += kThreads) sum[0] = sum[0] + a.partial[i];
    block_sums(t, sum, reinterpret_cast<double*>(t.shared()));
    if (t.index() == 0) *a.total = sum[0];
  }
};

/// fp32 of T; own value of f64 and integers.
template <class T>
using Arithmetic = decltype(value_of(T{}));

template <class T, bool kMaximum>
struct Combined {
  const T* parts[Combine::kMost];
  T* outs[Combine::kMost];
  int count, out_count;
  template <int N>
  SHARDLAB_DEVICE void at(int64_t i) const {
    using Number = Arithmetic<T>;
    constexpr int kLevels = 7;  // 64 parts and fewer
    Vector<T, N> result;
    Number most[N];
    TreeCounter<Number, kLevels> sum[N];
    for (int p = 0; p < count; ++p) {
      const Vector<T, N> v = load<N>(parts[p] + i);
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const Number x = value_of(v.at[j]);
        if constexpr (kMaximum)
          most[j] = p == 0 || x > most[j] ? x : most[j];
        else
          sum[j].push(x);
      }
    }
#pragma unroll
    for (int j = 0; j < N; ++j) {
      if constexpr (kMaximum)
        result.at[j] = rounded<T>(most[j]);
      else
        result.at[j] = rounded<T>(sum[j].total(Number{}));
    }
    for (int o = 0; o < out_count; ++o) store(outs[o] + i, result);
  }
};

template <class T>
void combine_as(const Combine& a, Stream s) {
  const auto run = [&](auto maximum) {
    Combined<T, maximum.value != 0> c{{}, {}, a.count, a.out_count};
    bool wide = true;
    for (int p = 0; p < a.count; ++p) {
      c.parts[p] = static_cast<const T*>(a.parts[p]);
      wide = wide && aligned({a.parts[p]});
    }
    for (int o = 0; o < a.out_count; ++o) {
      c.outs[o] = static_cast<T*>(a.outs[o]);
      wide = wide && aligned({a.outs[o]});
    }
    elementwise<kVectorOf<T>>("combine", c, a.n, wide, s);
  };
  a.maximum ? run(Constant<1>{}) : run(Constant<0>{});
}

}  // namespace

void sum_scalars(const SumScalars& a, Stream s) {
  expect(a.scratch.bytes >= scratch_bytes(a), "sum_scalars: scratch is large enough", a.scratch.bytes);
  auto* all = static_cast<float*>(a.scratch.data);
  int64_t n = 0;
  for (int first = 0; first < a.parts.count; first += kCollected) {
    const int count = a.parts.count - first < kCollected ? a.parts.count - first : kCollected;
    Collect::Args c{{}, {}, all};
    int64_t largest = 0;
    for (int p = 0; p < count; ++p) {
      c.from[p] = static_cast<const float*>(a.parts.data[first + p]);
      c.begin[p] = n;
      n += a.parts.sizes[first + p];
      c.begin[p + 1] = n;
      largest = a.parts.sizes[first + p] > largest ? a.parts.sizes[first + p] : largest;
    }
    Geometry g = geometry::elementwise(largest, 1);
    g.y = count;
    launch<Collect>("sum_scalars", g, c, s);
  }
  expect(n < (int64_t{1} << 31), "sum_scalars: fewer than 2^31 elements", n);
  const float factor = static_cast<float>(static_cast<double>(a.factor_num) / static_cast<double>(a.factor_den));
  launch<TreeTotal>("sum_scalars", {.threads = TreeTotal::kThreads, .shared = TreeTotal::kThreads * 4}, {all, n, factor, a.total},
                    s);
}

void squared_norm(const SquaredNorm& a, Stream s) {
  expect(a.scratch.bytes >= scratch_bytes(a), "squared_norm: scratch is large enough", a.scratch.bytes);
  auto* partial = static_cast<double*>(a.scratch.data);
  int64_t blocks = 0;
  for (int p = 0; p < a.parts.count; ++p) {
    const Geometry g = geometry::squared_norm(a.parts.sizes[p]);
    with_type(a.dtype, "squared_norm: f32, bf16 or f16", [&]<class T>(Named<T>) {
      const auto* x = static_cast<const T*>(a.parts.data[p]);
      with_vector<kVectorOf<T>>(aligned({x}), [&](auto vector) {
        launch<SquaredNormBlocks<T, vector.value>>("squared_norm", g, {x, a.parts.sizes[p], partial + blocks}, s);
      });
    });
    blocks += g.x;
  }
  launch<SquaredNormTotal>("squared_norm",
                           {.threads = SquaredNormTotal::kThreads, .shared = SquaredNormTotal::kThreads / kWarp * 8},
                           {partial, blocks, a.total}, s);
}

void combine(const Combine& a, Stream s) {
  expect(a.count >= 1 && a.count <= Combine::kMost, "combine: one to 64 parts", a.count);
  expect(a.out_count >= 1 && a.out_count <= Combine::kMost, "combine: one to 64 results", a.out_count);
  switch (a.dtype) {
    case DType::f32: return combine_as<float>(a, s);
    case DType::bf16: return combine_as<bf16>(a, s);
    case DType::f16: return combine_as<f16>(a, s);
    case DType::f64: return combine_as<double>(a, s);
    case DType::i32: return combine_as<int32_t>(a, s);
    case DType::i64: return combine_as<int64_t>(a, s);
    default: kernels::argument_refused("combine: f32, bf16, f16, f64, i32 or i64", static_cast<int64_t>(a.dtype));
  }
}

}  // namespace shardlab::gpu::SHARDLAB_GPU_VARIANT
