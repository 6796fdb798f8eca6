// Selections without atomics: the k-th largest key is found digit by digit, by counting; the chosen are then written in the order
// of their indices. Every count is of whole numbers, so that no order of blocks or threads shows in a result.
#include "kernels/cuda/elementwise.h"
#include "kernels/cuda/launches.h"
#include "kernels/cuda/sums.h"

namespace shardlab::gpu::SHARDLAB_GPU_VARIANT {
namespace {

constexpr int kDigitBits = 4, kDigits = 1 << kDigitBits;
constexpr int kSelectThreads = geometry::kNormThreads;
constexpr int kWarps = kSelectThreads / kWarp;

/// State that the launches of one selection hand on.
struct State {
  uint32_t threshold;  ///< the k-th largest key, from the top digit on
  int32_t ties;        ///< how many of those equal to it are taken
};

/// The key by which an element is chosen: its size, whose bits order as sizes do, or its random word, the smallest first.
struct Key {
  Input x;
  bool by_chance;
  RandomKey random;
  SHARDLAB_DEVICE uint32_t of(int64_t i) const {
    if (by_chance) return ~random_bits(random, static_cast<uint64_t>(i));
    return bits_of(values_at<1>(x, i).at[0]) & 0x7fffffffu;
  }
};

/// The bits of a key above a digit.
SHARDLAB_DEVICE uint32_t above(uint32_t key, int shift) {
  return static_cast<uint32_t>(static_cast<uint64_t>(key) >> (shift + kDigitBits));
}

/// How often each digit comes in a block's span, among the keys that agree with the threshold so far.
struct CountDigits {
  static constexpr int kThreads = kSelectThreads;
  struct Args {
    Key key;
    int64_t n;
    int shift;
    const State* state;
    int32_t* counts;  ///< [blocks, kDigits]
  };
  SHARDLAB_DEVICE static void run(const Thread& t, const Args& a) {
    const int64_t begin = t.block_x() * geometry::kNormSpan;
    const int64_t end = begin + geometry::kNormSpan < a.n ? begin + geometry::kNormSpan : a.n;
    const uint32_t known = a.shift + kDigitBits >= 32 ? 0 : above(a.state->threshold, a.shift);
    int32_t counts[kDigits] = {};
    for (int64_t i = begin + t.index(); i < end; i += kThreads) {
      const uint32_t key = a.key.of(i), digit = key >> a.shift & (kDigits - 1);
      const bool among = above(key, a.shift) == known;
#pragma unroll
      for (uint32_t d = 0; d < kDigits; ++d) counts[d] += among && digit == d ? 1 : 0;
    }
    block_sums(t, counts, reinterpret_cast<int32_t*>(t.shared()));
    if (t.index() == 0)
#pragma unroll
      for (int d = 0; d < kDigits; ++d) a.counts[t.block_x() * kDigits + d] = counts[d];
  }
};

/// Takes the digit in which the k-th largest key lies, by one block: a digit has kThreads / kDigits threads.
struct TakeDigit {
  static constexpr int kThreads = kSelectThreads;
  struct Args {
    const int32_t* counts;
    int64_t blocks;
    int shift;
    int32_t k;
    State* state;
  };
  SHARDLAB_DEVICE static void run(const Thread& t, const Args& a) {
    const int digit = t.index() % kDigits, team = t.index() / kDigits;
    int32_t sum = 0;
    for (int64_t b = team; b < a.blocks; b += kThreads / kDigits) sum += a.counts[b * kDigits + digit];
    int32_t* shared = reinterpret_cast<int32_t*>(t.shared());
    shared[t.index()] = sum;
    t.barrier();
    if (t.index() != 0) return;
    const bool first = a.shift + kDigitBits >= 32;
    int32_t ties = first ? a.k : a.state->ties;
    uint32_t threshold = first ? 0 : a.state->threshold, chosen = kDigits - 1;
    for (;; --chosen) {
      int32_t count = 0;
      for (int i = 0; i < kThreads / kDigits; ++i) count += shared[i * kDigits + static_cast<int>(chosen)];
      if (count >= ties || chosen == 0) break;
      ties -= count;
    }
    a.state->threshold = threshold | chosen << a.shift;
    a.state->ties = ties;
  }
};

/// Keys of a block's span above the threshold, and equal to it.
struct CountChosen {
  static constexpr int kThreads = kSelectThreads;
  struct Args {
    Key key;
    int64_t n;
    const State* state;
    int32_t* counts;  ///< [blocks, 2]
  };
  SHARDLAB_DEVICE static void run(const Thread& t, const Args& a) {
    const int64_t begin = t.block_x() * geometry::kNormSpan;
    const int64_t end = begin + geometry::kNormSpan < a.n ? begin + geometry::kNormSpan : a.n;
    const uint32_t threshold = a.state->threshold;
    int32_t counts[2] = {0, 0};
    for (int64_t i = begin + t.index(); i < end; i += kThreads) {
      const uint32_t key = a.key.of(i);
      counts[0] += key > threshold ? 1 : 0;
      counts[1] += key == threshold ? 1 : 0;
    }
    block_sums(t, counts, reinterpret_cast<int32_t*>(t.shared()));
    if (t.index() != 0) return;
    a.counts[2 * t.block_x()] = counts[0];
    a.counts[2 * t.block_x() + 1] = counts[1];
  }
};

/// Counts become the counts of all blocks before, by one block, each of whose threads takes a run of them.
struct SumBefore {
  static constexpr int kThreads = kSelectThreads;
  struct Args {
    int32_t* counts;
    int64_t blocks;
  };
  SHARDLAB_DEVICE static void run(const Thread& t, const Args& a) {
    const int64_t run = (a.blocks + kThreads - 1) / kThreads, from = t.index() * run;
    const int64_t begin = from < a.blocks ? from : a.blocks, end = begin + run < a.blocks ? begin + run : a.blocks;
    int32_t* shared = reinterpret_cast<int32_t*>(t.shared());
    for (int which = 0; which < 2; ++which) {
      int32_t sum = 0;
      for (int64_t b = begin; b < end; ++b) sum += a.counts[2 * b + which];
      shared[t.index()] = sum;
      t.barrier();
      int32_t before = 0;
      for (int i = 0; i < t.index(); ++i) before += shared[i];
      for (int64_t b = begin; b < end; ++b) {
        const int32_t own = a.counts[2 * b + which];
        a.counts[2 * b + which] = before;
        before += own;
      }
      t.barrier();
    }
  }
};

/// Writes the chosen of a span at their places: those above the threshold and the first `ties` equal to it, by their order.
struct WriteChosen {
  static constexpr int kThreads = kSelectThreads;
  struct Args {
    Key key;
    int64_t n, k;
    const State* state;
    const int32_t* counts;  ///< [blocks, 2], of all blocks before
    float* values;
    int32_t* indices;
  };
  SHARDLAB_DEVICE static void run(const Thread& t, const Args& a) {
    const int64_t begin = t.block_x() * geometry::kNormSpan;
    const int64_t end = begin + geometry::kNormSpan < a.n ? begin + geometry::kNormSpan : a.n;
    const uint32_t threshold = a.state->threshold;
    const int32_t ties = a.state->ties;
    int32_t larger = a.counts[2 * t.block_x()], equal = a.counts[2 * t.block_x() + 1];
    int32_t* shared = reinterpret_cast<int32_t*>(t.shared());  // [kWarps, 2]
    for (int64_t first = begin; first < end; first += kThreads) {
      const int64_t i = first + t.index();
      const uint32_t key = i < end ? a.key.of(i) : 0;
      const bool is_larger = i < end && key > threshold, is_equal = i < end && key == threshold;
      const uint32_t larger_lanes = t.ballot(is_larger), equal_lanes = t.ballot(is_equal);
      if (t.lane() == 0) {
        shared[2 * t.warp()] = Thread::ones(larger_lanes);
        shared[2 * t.warp() + 1] = Thread::ones(equal_lanes);
      }
      t.barrier();
      const uint32_t below = (1u << t.lane()) - 1;
      int32_t larger_before = larger + Thread::ones(larger_lanes & below), equal_before = equal + Thread::ones(equal_lanes & below);
      for (int w = 0; w < kWarps; ++w) {
        if (w < t.warp()) {
          larger_before += shared[2 * w];
          equal_before += shared[2 * w + 1];
        }
        larger += shared[2 * w];
        equal += shared[2 * w + 1];
      }
      if (is_larger || (is_equal && equal_before < ties)) {
        const int32_t place = larger_before + (equal_before < ties ? equal_before : ties);
        a.values[place] = values_at<1>(a.key.x, i).at[0];
        a.indices[place] = static_cast<int32_t>(i);
      }
      t.barrier();
    }
  }
};

// ---- what was selected, put back

/// The tree over parts; each thread looks its element up among the ascending indices of each part.
struct Scattered {
  gpu::Scatter a;
  template <int N>
  SHARDLAB_DEVICE void at(int64_t i) const {
    static_assert(N == 1);
    TreeCounter<float, 16> sum;
    for (int64_t part = 0; part < a.parts; ++part) {
      const int32_t* indices = a.indices + part * a.k;
      int64_t low = 0, high = a.k;  // the first index that is not below i lies in [low, high]
      while (low < high) {
        const int64_t middle = (low + high) / 2;
        if (indices[middle] < i)
          low = middle + 1;
        else
          high = middle;
      }
      sum.push(low < a.k && indices[low] == i ? a.values[part * a.k + low] : 0.0f);
    }
    put(a.y, i, Values<1>{{sum.total(0.0f)}});
  }
};

struct Zeroed {
  float* x;
  const int32_t* indices;
  template <int N>
  SHARDLAB_DEVICE void at(int64_t i) const {
    static_assert(N == 1);
    x[indices[i]] = 0.0f;
  }
};

}  // namespace

void select(const gpu::Select& a, Stream s) {
  expect(a.k >= 0 && a.k <= a.n && a.n < (int64_t{1} << 31), "select: k of n elements, fewer than 2^31; this is k", a.k);
  expect(is_activation_type(a.x.dtype), "select: x is f32, bf16 or f16", static_cast<int64_t>(a.x.dtype));
  expect(a.scratch.bytes >= scratch_bytes(a), "select: scratch is large enough", a.scratch.bytes);
  if (a.k == 0) return;
  auto* state = static_cast<State*>(a.scratch.data);
  auto* counts = reinterpret_cast<int32_t*>(static_cast<unsigned char*>(a.scratch.data) + 256);
  const Key key{a.x, a.by_chance, a.key};
  const int64_t spans = divided_up(a.n, geometry::kNormSpan);
  const Geometry all{.x = spans, .threads = kSelectThreads, .shared = kDigits * kWarps * 4};
  const Geometry one{.threads = kSelectThreads, .shared = kSelectThreads * 4};
  for (int shift = 32 - kDigitBits; shift >= 0; shift -= kDigitBits) {
    launch<CountDigits>("select", all, {key, a.n, shift, state, counts}, s);
    launch<TakeDigit>("select", one, {counts, spans, shift, static_cast<int32_t>(a.k), state}, s);
  }
  launch<CountChosen>("select", all, {key, a.n, state, counts}, s);
  launch<SumBefore>("select", one, {counts, spans}, s);
  launch<WriteChosen>("select", all, {key, a.n, a.k, state, counts, a.values, a.indices}, s);
}

void scatter(const gpu::Scatter& a, Stream s) {
  expect(is_activation_type(a.y.dtype), "scatter: y is f32, bf16 or f16", static_cast<int64_t>(a.y.dtype));
  expect(a.parts < (1 << 16), "scatter: fewer than 2^16 parts", a.parts);
  elementwise<1>("scatter", Scattered{a}, a.n, false, s);
}

void zero_selected(const gpu::ZeroSelected& a, Stream s) {
  if (a.error != a.x) cast({{a.x, DType::f32}, {a.error, DType::f32}, a.n}, s);
  elementwise<1>("zero_selected", Zeroed{a.error, a.indices}, a.k, false, s);
}

}  // namespace shardlab::gpu::SHARDLAB_GPU_VARIANT
