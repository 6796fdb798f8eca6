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

/// What a thread holds of a row: vectors at columns first, first + step ...; the first kRowVectors of them in registers.
template <class T, int kVector>
struct HeldRow {
  const T* row;
  Vector<T, kVector> held[kRowVectors];
};

/// Where a thread of a team is in its row.
struct Place {
  int64_t first, step, width;  ///< columns
};

template <class T, int kVector>
SHARDLAB_DEVICE HeldRow<T, kVector> hold(const T* row, const Place& p) {
  HeldRow<T, kVector> h{row, {}};
#pragma unroll
  for (int i = 0; i < kRowVectors; ++i)
    if (p.first + i * p.step < p.width) h.held[i] = load<kVector>(row + p.first + i * p.step);
  return h;
}

/// f(column, values of each row at it), for every vector of the thread's.
template <class F, class T, int kVector, class... Rows>
SHARDLAB_DEVICE void each_vector(const Place& p, const F& f, const HeldRow<T, kVector>& row, const Rows&... rows) {
#pragma unroll
  for (int i = 0; i < kRowVectors; ++i)
    if (p.first + i * p.step < p.width) f(p.first + i * p.step, values_of(row.held[i]), values_of(rows.held[i])...);
  for (int64_t c = p.first + kRowVectors * p.step; c < p.width; c += p.step)
    f(c, values_at<kVector>(row.row + c), values_at<kVector>(rows.row + c)...);
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

template <class T, int kVector>
struct NormForwardRows {
  static constexpr int kThreads = kMostThreads;
  struct Args {
    NormForward a;
    int team;  ///< threads of a row
  };

  SHARDLAB_DEVICE static void run(const Thread& t, const Args& args) {
    const NormForward& a = args.a;
    const Team team = team_of<kVector>(t, args.team, a.width);
    if (team.row >= a.rows) return;
    float* shared = reinterpret_cast<float*>(t.shared());
    const auto row = hold<T, kVector>(static_cast<const T*>(a.x.data) + team.row * a.width, team.place);
    const float h = static_cast<float>(a.width);
    float mean = 0;
    if (!a.rms) {
      float sum[1] = {0};
      each_vector(
          team.place, [&](int64_t, const Values<kVector>& x) { add_all(sum[0], x); }, row);
      team_sums(t, args.team, sum, shared);
      mean = sum[0] / h;
    }
    float square[1] = {0};
    each_vector(
        team.place, [&](int64_t, const Values<kVector>& x) { add_squares(square[0], x, mean); }, row);
    team_sums(t, args.team, square, shared + kWarp);
    const float rstd = 1.0f / sqrtf(square[0] / h + a.epsilon);
    T* y = static_cast<T*>(a.y.data) + team.row * a.width;
    each_vector(
        team.place,
        [&](int64_t c, Values<kVector> x) {
          const Values<kVector> gamma = values_at<kVector>(a.gamma, c);
          Values<kVector> beta{};
          if (!a.rms) beta = values_at<kVector>(a.beta, c);
#pragma unroll
          for (int j = 0; j < kVector; ++j)
            x.at[j] = a.rms ? (x.at[j] * rstd) * gamma.at[j] : ((x.at[j] - mean) * rstd) * gamma.at[j] + beta.at[j];
          put(y + c, x);
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
  SHARDLAB_DEVICE static void add_all(float& sum, const Values<kVector>& x) {
#pragma unroll
    for (float v : x.at) sum = sum + v;
  }
  SHARDLAB_DEVICE static void add_squares(float& sum, const Values<kVector>& x, float mean) {
#pragma unroll
    for (float v : x.at) sum = sum + (v - mean) * (v - mean);
  }
};

template <class T, int kVector>
struct NormInputRows {
  static constexpr int kThreads = kMostThreads;
  struct Args {
    NormInput a;
    int team;
  };

  SHARDLAB_DEVICE static void run(const Thread& t, const Args& args) {
    const NormInput& a = args.a;
    const Team team = team_of<kVector>(t, args.team, a.width);
    if (team.row >= a.rows) return;
    const int64_t at = team.row * a.width;
    const auto dy = hold<T, kVector>(static_cast<const T*>(a.dy.data) + at, team.place);
    const auto x = hold<T, kVector>(static_cast<const T*>(a.x.data) + at, team.place);
    const float mean = a.rms ? 0.0f : a.stats[2 * team.row], rstd = a.rms ? a.stats[team.row] : a.stats[2 * team.row + 1];
    float sums[2] = {0, 0};  // of g, of g xhat
    each_vector(
        team.place,
        [&](int64_t c, const Values<kVector>& d, const Values<kVector>& v) {
          const Values<kVector> gamma = values_at<kVector>(a.gamma, c);
#pragma unroll
          for (int j = 0; j < kVector; ++j) {
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
        [&](int64_t c, const Values<kVector>& d, const Values<kVector>& v) {
          const Values<kVector> gamma = values_at<kVector>(a.gamma, c);
          Values<kVector> result;
#pragma unroll
          for (int j = 0; j < kVector; ++j) {
            const float xhat = (v.at[j] - mean) * rstd;
            result.at[j] = ((d.at[j] * gamma.at[j] - mean_g) - xhat * mean_gx) * rstd;
          }
          if (residual != nullptr) result = values_at<kVector>(residual + c) + result;
          put(dx + c, result);
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
    with_vector<kVectorOf<T>>(wide, [&](auto vector) {
      launch<NormForwardRows<T, vector.value>>("norm_forward", geometry::rows(a.rows, a.width, vector.value),
                                               {a, geometry::row_team(a.width, vector.value).threads}, s);
    });
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
    with_vector<kVectorOf<T>>(wide, [&](auto vector) {
      launch<NormInputRows<T, vector.value>>("norm_input", geometry::rows(a.rows, a.width, vector.value),
                                             {a, geometry::row_team(a.width, vector.value).threads}, s);
    });
  });
}

}  // namespace shardlab::gpu::SHARDLAB_GPU_VARIANT
