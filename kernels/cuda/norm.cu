// LayerNorm and RMSNorm over rows: F and I. (W is a sum over tokens: token_sums.cu.)
//
// A row is read once: its team of threads holds it in registers over both sums and the result.
#include "kernels/cuda/launch.h"
#include "kernels/cuda/launches.h"
#include "kernels/cuda/sums.h"
#include "kernels/cuda/vectors.h"

namespace shardlab::gpu::SHARDLAB_GPU_VARIANT {
namespace {

using geometry::kRowVectors;

/// Elements p[0] .. p[n-1], the others 0. kWhole: n is N and p is aligned. Where elements lie changes how they are fetched, never
/// which thread adds them: alignment does not change bits.
template <int N, bool kWhole, class T>
SHARDLAB_DEVICE Values<N> some_at(const T* p, int n) {
  if constexpr (kWhole) {
    return values_at<N>(p);
  } else {
    Values<N> x{};
#pragma unroll
    for (int j = 0; j < N; ++j)
      if (j < n) x.at[j] = value_of(p[j]);
    return x;
  }
}
template <int N, bool kWhole>
SHARDLAB_DEVICE Values<N> some_at(const Input& a, int64_t i, int n) {
  if constexpr (kWhole) {
    return values_at<N>(a, i);
  } else {
    Values<N> x{};
#pragma unroll
    for (int j = 0; j < N; ++j)
      if (j < n) x.at[j] = values_at<1>(a, i + j).at[0];
    return x;
  }
}
template <bool kWhole, int N, class T>
SHARDLAB_DEVICE void put_some(T* p, const Values<N>& x, int n) {
  if constexpr (kWhole) {
    put(p, x);
  } else {
#pragma unroll
    for (int j = 0; j < N; ++j)
      if (j < n) p[j] = rounded<T>(x.at[j]);
  }
}

/// Where a thread of a team is in its row: vectors at columns first, first + step ...
struct Place {
  int64_t first, step, width;
  /// Elements of the row in the vector of N at a column.
  template <int N>
  SHARDLAB_DEVICE int count(int64_t column) const {
    return width - column < N ? static_cast<int>(width - column) : N;
  }
};

/// The part of a row that a thread holds: its first kRowVectors vectors, in registers, as they lie in memory.
template <class T, bool kWhole>
struct HeldRow {
  static constexpr int kVector = kVectorOf<T>;
  const T* row;
  Vector<T, kVector> held[kRowVectors];
};

template <class T, bool kWhole>
SHARDLAB_DEVICE HeldRow<T, kWhole> hold(const T* row, const Place& p) {
  constexpr int kVector = kVectorOf<T>;
  HeldRow<T, kWhole> h{row, {}};
#pragma unroll
  for (int i = 0; i < kRowVectors; ++i) {
    const int64_t c = p.first + i * p.step;
    if (c >= p.width) continue;
    if constexpr (kWhole) {
      h.held[i] = load<kVector>(row + c);
    } else {
#pragma unroll
      for (int j = 0; j < kVector; ++j)
        if (j < p.count<kVector>(c)) h.held[i].at[j] = row[c + j];
    }
  }
  return h;
}

/// f(column, elements, values of each row at it), for every vector of the thread's.
template <class F, class T, bool kWhole, class... Rows>
SHARDLAB_DEVICE void each_vector(const Place& p, const F& f, const HeldRow<T, kWhole>& row, const Rows&... rows) {
  constexpr int kVector = kVectorOf<T>;
#pragma unroll
  for (int i = 0; i < kRowVectors; ++i) {
    const int64_t c = p.first + i * p.step;
    if (c < p.width) f(c, kWhole ? kVector : p.count<kVector>(c), values_of(row.held[i]), values_of(rows.held[i])...);
  }
  for (int64_t c = p.first + kRowVectors * p.step; c < p.width; c += p.step) {
    const int n = kWhole ? kVector : p.count<kVector>(c);
    f(c, n, some_at<kVector, kWhole>(row.row + c, n), some_at<kVector, kWhole>(rows.row + c, n)...);
  }
}

/// The row of this thread's team, and the thread's place in it.
struct Team {
  int64_t row;
  Place place;
};
template <int kVector>
SHARDLAB_DEVICE Team team_of(const Thread& t, int team_threads, int64_t width) {
  const int64_t row = t.block_x() * (t.threads() / team_threads) + t.index() / team_threads;
  return {row, {int64_t{t.index() % team_threads} * kVector, int64_t{team_threads} * kVector, width}};
}
/// Sums over the team: a warp of several, or the whole block.
template <int kSums>
SHARDLAB_DEVICE void team_sums(const Thread& t, int team_threads, float (&x)[kSums], float* shared) {
  if (team_threads == t.threads()) return block_sums<kSums>(t, x, shared);
#pragma unroll
  for (int i = 0; i < kSums; ++i) x[i] = warp_sum(t, x[i]);
}

template <class T, bool kWhole>
struct NormForwardRows {
  static constexpr int kThreads = geometry::kMostRowThreads, kVector = kVectorOf<T>;
  struct Args {
    NormForward a;
    int team;  ///< threads of a row
  };

  SHARDLAB_DEVICE static void run(const Thread& t, const Args& args) {
    const NormForward& a = args.a;
    const Team team = team_of<kVector>(t, args.team, a.width);
    if (team.row >= a.rows) return;
    float* shared = reinterpret_cast<float*>(t.shared());
    const auto row = hold<T, kWhole>(static_cast<const T*>(a.x.data) + team.row * a.width, team.place);
    const float h = static_cast<float>(a.width);
    float mean = 0;
    if (!a.rms) {
      float sum[1] = {0};
      each_vector(
          team.place, [&](int64_t, int n, const Values<kVector>& x) { add_all(sum[0], x, n); }, row);
      team_sums(t, args.team, sum, shared);
      mean = sum[0] / h;
    }
    float square[1] = {0};
    each_vector(
        team.place, [&](int64_t, int n, const Values<kVector>& x) { add_squares(square[0], x, n, mean); }, row);
    team_sums(t, args.team, square, shared + kWarp);
    const float rstd = 1.0f / sqrtf(square[0] / h + a.epsilon);
    T* y = static_cast<T*>(a.y.data) + team.row * a.width;
    each_vector(
        team.place,
        [&](int64_t c, int n, Values<kVector> x) {
          const Values<kVector> gamma = some_at<kVector, kWhole>(a.gamma, c, n);
          Values<kVector> beta{};
          if (!a.rms) beta = some_at<kVector, kWhole>(a.beta, c, n);
#pragma unroll
          for (int j = 0; j < kVector; ++j)
            x.at[j] = a.rms ? (x.at[j] * rstd) * gamma.at[j] : ((x.at[j] - mean) * rstd) * gamma.at[j] + beta.at[j];
          put_some<kWhole>(y + c, x, n);
        },
        row);
    if (team.place.first == 0) {
      if (a.rms) {
        a.stats[team.row] = rstd;
      } else {
        a.stats[2 * team.row] = mean;
        a.stats[2 * team.row + 1] = rstd;
      }
    }
  }

 private:
  SHARDLAB_DEVICE static void add_all(float& sum, const Values<kVector>& x, int n) {
#pragma unroll
    for (int j = 0; j < kVector; ++j)
      if (kWhole || j < n) sum = sum + x.at[j];
  }
  SHARDLAB_DEVICE static void add_squares(float& sum, const Values<kVector>& x, int n, float mean) {
#pragma unroll
    for (int j = 0; j < kVector; ++j)
      if (kWhole || j < n) sum = sum + (x.at[j] - mean) * (x.at[j] - mean);
  }
};

template <class T, bool kWhole>
struct NormInputRows {
  static constexpr int kThreads = geometry::kMostRowThreads, kVector = kVectorOf<T>;
  struct Args {
    NormInput a;
    int team;
  };

  SHARDLAB_DEVICE static void run(const Thread& t, const Args& args) {
    const NormInput& a = args.a;
    const Team team = team_of<kVector>(t, args.team, a.width);
    if (team.row >= a.rows) return;
    const int64_t at = team.row * a.width;
    const auto dy = hold<T, kWhole>(static_cast<const T*>(a.dy.data) + at, team.place);
    const auto x = hold<T, kWhole>(static_cast<const T*>(a.x.data) + at, team.place);
    const float mean = a.rms ? 0.0f : a.stats[2 * team.row], rstd = a.rms ? a.stats[team.row] : a.stats[2 * team.row + 1];
    float sums[2] = {0, 0};  // of g, of g xhat
    each_vector(
        team.place,
        [&](int64_t c, int n, const Values<kVector>& d, const Values<kVector>& v) {
          const Values<kVector> gamma = some_at<kVector, kWhole>(a.gamma, c, n);
#pragma unroll
          for (int j = 0; j < kVector; ++j) {
            if (!kWhole && j >= n) continue;
            const float g = d.at[j] * gamma.at[j];
            sums[0] = sums[0] + g;
            sums[1] = sums[1] + g * ((v.at[j] - mean) * rstd);
          }
        },
        dy, x);
    team_sums(t, args.team, sums, reinterpret_cast<float*>(t.shared()));
    const float h = static_cast<float>(a.width), mean_g = a.rms ? 0.0f : sums[0] / h, mean_gx = sums[1] / h;
    const T* residual = a.residual.data == nullptr ? nullptr : static_cast<const T*>(a.residual.data) + at;
    T* dx = static_cast<T*>(a.dx.data) + at;
    each_vector(
        team.place,
        [&](int64_t c, int n, const Values<kVector>& d, const Values<kVector>& v) {
          const Values<kVector> gamma = some_at<kVector, kWhole>(a.gamma, c, n);
          Values<kVector> result;
#pragma unroll
          for (int j = 0; j < kVector; ++j) {
            const float xhat = (v.at[j] - mean) * rstd;
            result.at[j] = ((d.at[j] * gamma.at[j] - mean_g) - xhat * mean_gx) * rstd;
          }
          if (residual != nullptr) result = some_at<kVector, kWhole>(residual + c, n) + result;
          put_some<kWhole>(dx + c, result, n);
        },
        dy, x);
  }
};

}  // namespace

void norm_forward(const NormForward& a, Stream s) {
  expect(a.width >= 1, "norm: a row has an element", a.width);
  expect_type(a.y.dtype, a.x.dtype, false, "norm: x and y are of one type");
  expect_type(a.gamma.dtype, a.x.dtype, true, "norm: gamma is f32 or of x's type");
  if (!a.rms) expect_type(a.beta.dtype, a.x.dtype, true, "norm: beta is f32 or of x's type");
  with_type(a.x.dtype, "norm: x is f32, bf16 or f16", [&]<class T>(Named<T>) {
    const bool wide = a.width % kVectorOf<T> == 0 && aligned({a.x.data, a.y.data, a.gamma.data, a.rms ? nullptr : a.beta.data});
    const Geometry g = geometry::rows(a.rows, a.width, kVectorOf<T>);
    const int team = geometry::row_team(a.width, kVectorOf<T>).threads;
    wide ? launch<NormForwardRows<T, true>>("norm_forward", g, {a, team}, s)
         : launch<NormForwardRows<T, false>>("norm_forward", g, {a, team}, s);
  });
}

void norm_input(const NormInput& a, Stream s) {
  expect(a.width >= 1, "norm: a row has an element", a.width);
  expect_type(a.x.dtype, a.dy.dtype, false, "norm: dy and x are of one type");
  expect_type(a.dx.dtype, a.dy.dtype, false, "norm: dy and dx are of one type");
  if (a.residual.data != nullptr) expect_type(a.residual.dtype, a.dy.dtype, false, "norm: dy and residual are of one type");
  expect_type(a.gamma.dtype, a.dy.dtype, true, "norm: gamma is f32 or of dy's type");
  with_type(a.dy.dtype, "norm: dy is f32, bf16 or f16", [&]<class T>(Named<T>) {
    const bool wide = a.width % kVectorOf<T> == 0 && aligned({a.dy.data, a.x.data, a.gamma.data, a.residual.data, a.dx.data});
    const Geometry g = geometry::rows(a.rows, a.width, kVectorOf<T>);
    const int team = geometry::row_team(a.width, kVectorOf<T>).threads;
    wide ? launch<NormInputRows<T, true>>("norm_input", g, {a, team}, s)
         : launch<NormInputRows<T, false>>("norm_input", g, {a, team}, s);
  });
}

}  // namespace shardlab::gpu::SHARDLAB_GPU_VARIANT
