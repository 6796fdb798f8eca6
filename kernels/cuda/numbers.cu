// Rules on single numbers, and the largest size of many arrays: what decides about updates.
#include <cmath>

#include "kernels/cuda/launch.h"
#include "kernels/cuda/launches.h"
#include "kernels/cuda/sums.h"
#include "kernels/cuda/vectors.h"

namespace shardlab::gpu::SHARDLAB_GPU_VARIANT {
namespace {

using Rule = gpu::Numbers::Rule;

struct OneNumber {
  static constexpr int kThreads = kWarp;
  using Args = gpu::Numbers;

  SHARDLAB_DEVICE static float real(const Args& a, int i) { return *static_cast<const float*>(a.in[i]); }
  SHARDLAB_DEVICE static double wide(const Args& a, int i) { return *static_cast<const double*>(a.in[i]); }
  SHARDLAB_DEVICE static int32_t whole(const Args& a, int i) { return *static_cast<const int32_t*>(a.in[i]); }
  template <class T>
  SHARDLAB_DEVICE static T& to(const Args& a, int i) {
    return *static_cast<T*>(a.out[i]);
  }
  /// A loss, or a norm by its square.
  SHARDLAB_DEVICE static double level(const Args& a) { return a.wide ? ::sqrt(wide(a, 0)) : static_cast<double>(real(a, 0)); }

  SHARDLAB_DEVICE static void run(const Thread& t, const Args& a) {
    if (t.index() != 0) return;
    switch (a.rule) {
      case Rule::kAny: {
        int32_t any = 0;
        for (int i = 0; i < a.count; ++i) any = whole(a, i) != 0 ? 1 : any;
        to<int32_t>(a, 0) = any;
        return;
      }
      case Rule::kNot: to<int32_t>(a, 0) = whole(a, 0) == 0 ? 1 : 0; return;
      case Rule::kCount: to<int32_t>(a, 0) = to<int32_t>(a, 0) + 1; return;
      case Rule::kStartScale:
        if (to<float>(a, 0) == 0) to<float>(a, 0) = real(a, 0);  // persistent state begins at 0, which no scale is
        return;
      case Rule::kAdjustScale: return adjust_scale(a);
      case Rule::kUnscaleFactor: to<float>(a, 0) = 1.0f / real(a, 0); return;
      case Rule::kUnscaleNorm: {
        const double factor = static_cast<double>(real(a, 1));
        to<double>(a, 0) = wide(a, 0) * (factor * factor);
        return;
      }
      case Rule::kClipFactor: {
        const double factor = static_cast<double>(real(a, 1)) / (::sqrt(wide(a, 0)) + 1e-6);
        to<float>(a, 0) = factor >= 1 ? 1.0f : static_cast<float>(factor);  // a NaN stays one
        return;
      }
      case Rule::kNotOne: to<int32_t>(a, 0) = real(a, 0) == 1.0f ? 0 : 1; return;
      case Rule::kJudgeSpike: {
        const bool judged = static_cast<float>(whole(a, 2)) >= real(a, 4);
        const double most = static_cast<double>(real(a, 3)) * static_cast<double>(real(a, 1));
        to<int32_t>(a, 0) = judged && !(level(a) <= most) ? 1 : 0;
        return;
      }
      case Rule::kRunningMean: {
        const int32_t window = static_cast<int32_t>(real(a, 1)), next = to<int32_t>(a, 1) + 1, seen = next < window ? next : window;
        const float mean = to<float>(a, 0);
        to<int32_t>(a, 1) = seen;
        to<float>(a, 0) = mean + static_cast<float>((level(a) - static_cast<double>(mean)) / static_cast<double>(seen));
        return;
      }
      case Rule::kBiasCorrection:
        to<float>(a, 0) = static_cast<float>(1.0 - ::pow(static_cast<double>(real(a, 0)), static_cast<double>(a.step + 1)));
        return;
    }
  }

  /// kernels/loss_scale.h's rule; without a count of good steps the scale is only halved.
  SHARDLAB_DEVICE static void adjust_scale(const Args& a) {
    constexpr float kLeast = 1, kMost = 16777216;
    const bool counts = a.out[1] != nullptr;
    float& scale = to<float>(a, 0);
    if (whole(a, 0) != 0) {
      scale = held(scale * 0.5f, kLeast, kMost);
      if (counts) to<int32_t>(a, 1) = 0;
      return;
    }
    if (!counts) return;
    const int64_t interval = a.count > 1 ? static_cast<int64_t>(real(a, 1)) : 2000;
    const int32_t good = to<int32_t>(a, 1) + 1;
    to<int32_t>(a, 1) = good < interval ? good : 0;
    if (good >= interval) scale = held(scale * 2.0f, kLeast, kMost);
  }
  SHARDLAB_DEVICE static float held(float x, float least, float most) { return x < least ? least : x > most ? most : x; }
};

// ---- the largest size

/// Sizes compare as their bits do; NaNs lie above infinity.
SHARDLAB_DEVICE uint32_t larger(uint32_t a, uint32_t b) { return a > b ? a : b; }
constexpr uint32_t kInfinity = 0x7f800000u;

/// The largest of the numbers of a block's threads; every thread gets it. `shared`: a number a warp, free again after the
/// block's next barrier.
SHARDLAB_DEVICE uint32_t block_largest(const Thread& t, uint32_t x, uint32_t* shared) {
#pragma unroll
  for (int mask = kWarp / 2; mask >= 1; mask /= 2) x = larger(x, t.shuffle_xor(x, mask));
  if (t.lane() == 0) shared[t.warp()] = x;
  t.barrier();
  for (int w = 0; w < t.threads() / kWarp; ++w) x = larger(x, shared[w]);
  t.barrier();
  return x;
}

/// A block's span of one array.
template <int kVector>
struct LargestOfSpan {
  static constexpr int kThreads = geometry::kNormThreads;
  struct Args {
    Input x;
    int64_t n;
    uint32_t* partial;
  };
  SHARDLAB_DEVICE static void run(const Thread& t, const Args& a) {
    const int64_t begin = t.block_x() * geometry::kNormSpan;
    const int64_t end = begin + geometry::kNormSpan < a.n ? begin + geometry::kNormSpan : a.n;
    uint32_t most = 0;
    int64_t i = begin + int64_t{t.index()} * kVector;
    for (; i + kVector <= end; i += kThreads * kVector) {
      const Values<kVector> v = values_at<kVector>(a.x, i);
#pragma unroll
      for (float x : v.at) most = larger(most, bits_of(x) & 0x7fffffffu);
    }
    for (; i < end; ++i) most = larger(most, bits_of(values_at<1>(a.x, i).at[0]) & 0x7fffffffu);
    most = block_largest(t, most, reinterpret_cast<uint32_t*>(t.shared()));
    if (t.index() == 0) a.partial[t.block_x()] = most;
  }
};

/// Folds the spans of up to kParts arrays into the state {largest, first array that is none}, by one block.
struct LargestTotal {
  static constexpr int kThreads = geometry::kNormThreads;
  static constexpr int kParts = 64;
  struct Args {
    const uint32_t* partial;
    int64_t begin[kParts + 1];
    int count;
    int before;  ///< arrays of earlier launches; 0: the state is new
    uint32_t* state;
    float* amax;
    int32_t* bad;
    int32_t* where;
  };
  SHARDLAB_DEVICE static void run(const Thread& t, const Args& a) {
    uint32_t most = 0, where = 0;
    if (a.before > 0) {
      most = a.state[0];
      where = a.state[1];
    }
    for (int part = 0; part < a.count; ++part) {
      uint32_t here = 0;
      for (int64_t i = a.begin[part] + t.index(); i < a.begin[part + 1]; i += kThreads) here = larger(here, a.partial[i]);
      here = block_largest(t, here, reinterpret_cast<uint32_t*>(t.shared()));
      most = larger(most, here);
      if (where == 0 && here >= kInfinity) where = static_cast<uint32_t>(a.before + part + 1);
    }
    t.barrier();  // every thread has read the state
    if (t.index() != 0) return;
    a.state[0] = most;
    a.state[1] = where;
    if (a.amax != nullptr) *a.amax = most > kInfinity ? NAN : float_of(most);
    if (a.bad != nullptr) *a.bad = most >= kInfinity ? 1 : 0;
    if (a.where != nullptr) *a.where = static_cast<int32_t>(where);
  }
};

}  // namespace

void numbers(const gpu::Numbers& a, Stream s) {
  expect(a.count >= 0 && a.count <= gpu::Numbers::kMost, "numbers: at most 32 operands", a.count);
  launch<OneNumber>("numbers", {.threads = OneNumber::kThreads}, a, s);
}

void amax(const gpu::Amax& a, Stream s) {
  expect(a.scratch.bytes >= scratch_bytes(a), "amax: scratch is large enough", a.scratch.bytes);
  auto* state = static_cast<uint32_t*>(a.scratch.data);
  uint32_t* partial = state + 2;
  for (int first = 0; first < a.count; first += LargestTotal::kParts) {
    const int count = a.count - first < LargestTotal::kParts ? a.count - first : LargestTotal::kParts;
    LargestTotal::Args total{partial, {}, count, first, state, a.amax, a.bad, a.where};
    int64_t blocks = 0;
    for (int p = 0; p < count; ++p) {
      const Input& x = a.parts[first + p];
      const int64_t n = a.sizes[first + p];
      expect(is_activation_type(x.dtype), "amax: f32, bf16 or f16", static_cast<int64_t>(x.dtype));
      total.begin[p] = blocks;
      const Geometry g = geometry::squared_norm(n);
      with_vector<4>(aligned({x.data}), [&](auto vector) {
        launch<LargestOfSpan<vector.value>>("amax", g, {x, n, partial + blocks}, s);
      });
      blocks += g.x;
      total.begin[p + 1] = blocks;
    }
    // The spans of the next arrays are written after these have been folded: launches of one stream come one after another.
    launch<LargestTotal>("amax", {.threads = LargestTotal::kThreads, .shared = LargestTotal::kThreads / kWarp * 4}, total, s);
  }
}

}  // namespace shardlab::gpu::SHARDLAB_GPU_VARIANT
