// Token embedding.
//
// W without atomics or a sort: the first token of an id in the micro-batch owns the id's row. Its block looks for the later ones,
// in order, and sums; every other token's block finds an earlier one and ends. Tokens^2 / 2 comparisons of 4 bytes in all, which
// are few beside the sums: 8192 tokens make 34 million.
#include "kernels/cuda/elementwise.h"
#include "kernels/cuda/launches.h"
#include "kernels/cuda/sums.h"

namespace shardlab::gpu::SHARDLAB_GPU_VARIANT {
namespace {

template <class T>
struct EmbeddedRows {
  EmbedForward a;
  template <int N>
  SHARDLAB_DEVICE void at(int64_t i) const {
    const int64_t held = a.ids[i / a.width] - a.row_begin;
    Values<N> x{};
    if (held >= 0 && held < a.table_rows) x = values_at<N>(a.table, held * a.width + i % a.width);
    put(static_cast<T*>(a.x.data) + i, x);
  }
};

template <class T, int kVector>
struct EmbedWeightRows {
  static constexpr int kThreads = geometry::kEmbedThreads;
  static constexpr int kWarps = kThreads / kWarp;
  using Args = EmbedWeight;

  /// Shared memory: places of the owner's tokens, how many each warp found, and whether an earlier token was found.
  struct Shared {
    int32_t list[kThreads];
    int32_t found[2][kWarps];
    int32_t earlier[2];
  };

  SHARDLAB_DEVICE static void run(const Thread& t, const Args& a) {
    Shared& shared = *reinterpret_cast<Shared*>(t.shared());
    const int64_t place = t.block_x();
    const int32_t id = id_at(a, place);
    const int64_t held = id - a.row_begin;
    if (held < 0 || held >= a.table_rows || exists_earlier(t, a, place, id, shared)) return;
    const int64_t column = (t.block_y() * kThreads + t.index()) * kVector;
    const kernels::PartLeaves leaves(a.part, a.tokens);
    TreeCounter<Values<kVector>, kSequenceLevels> sequences;
    for (int64_t b = 0; b < a.sequences; ++b) {
      TreeCounter<Values<kVector>, kLeafLevels> sequence;
      for (int leaf = 0; leaf < leaves.count(); ++leaf)
        sequence.push(
            leaf_sum(t, a, b * a.tokens + leaves.begin(leaf), b * a.tokens + leaves.begin(leaf + 1), place, id, column, shared));
      sequences.push(sequence.total({}));
    }
    if (column >= a.width) return;
    Values<kVector> total = sequences.total({});
    if (a.accumulate) total = values_at<kVector>(a.dtable, held * a.width + column) + total;
    put(a.dtable, held * a.width + column, total);
  }

 private:
  /// The id of token i of [sequences, tokens].
  SHARDLAB_DEVICE static int32_t id_at(const Args& a, int64_t i) {
    return a.ids_stride == 0 ? a.ids[i] : a.ids[i / a.tokens * a.ids_stride + i % a.tokens];
  }

  /// Whether a token before `place` has the id; the same answer for the whole block.
  SHARDLAB_DEVICE static bool exists_earlier(const Thread& t, const Args& a, int64_t place, int32_t id, Shared& shared) {
    if (t.index() < 2) shared.earlier[t.index()] = 0;
    t.barrier();
    constexpr int kEach = 8;  // comparisons of a thread between two barriers
    int step = 0;
    for (int64_t first = 0; first < place; first += kEach * kThreads, ++step) {
      bool found = false;
#pragma unroll
      for (int k = 0; k < kEach; ++k) {
        const int64_t i = first + k * kThreads + t.index();
        found = found || (i < place && id_at(a, i) == id);
      }
      // Two flags in turn: a fast thread's next answer must not reach a slow one that still reads this one.
      if (found) shared.earlier[step % 2] = 1;
      t.barrier();
      if (shared.earlier[step % 2] != 0) return true;
    }
    return false;
  }

  /// The sum over the tokens [begin, end) with the id, in token order from +0.
  SHARDLAB_DEVICE static Values<kVector> leaf_sum(const Thread& t, const Args& a, int64_t begin, int64_t end, int64_t place,
                                                  int32_t id, int64_t column, Shared& shared) {
    Values<kVector> sum{};
    if (end <= place) return sum;
    for (int64_t first = begin, step = 0; first < end; first += kThreads, ++step) {
      const int64_t i = first + t.index();
      const bool match = i < end && id_at(a, i) == id;
      const uint32_t matches = t.ballot(match);
      int32_t* found = shared.found[step % 2];
      if (t.lane() == 0) found[t.warp()] = Thread::ones(matches);
      t.barrier();
      int before = Thread::ones(matches & ((uint32_t{1} << t.lane()) - 1)), count = 0;
      for (int w = 0; w < kWarps; ++w) {
        if (w < t.warp()) before += found[w];
        count += found[w];
      }
      if (match) shared.list[before] = static_cast<int32_t>(i);
      t.barrier();
      if (column < a.width) {
#pragma unroll 4
        for (int k = 0; k < count; ++k)
          sum = sum + values_at<kVector>(static_cast<const T*>(a.dx.data) + int64_t{shared.list[k]} * a.width + column);
      }
      t.barrier();
    }
    return sum;
  }
};

}  // namespace

void embed_forward(const EmbedForward& a, Stream s) {
  expect_type(a.table.dtype, a.x.dtype, true, "embed: table is f32 or of x's type");
  with_type(a.x.dtype, "embed: x is f32, bf16 or f16", [&]<class T>(Named<T>) {
    const bool wide = aligned({a.table.data, a.x.data}) && a.width % kVectorOf<T> == 0;
    elementwise<kVectorOf<T>>("embed_forward", EmbeddedRows<T>{a}, a.rows * a.width, wide, s);
  });
}

void embed_weight(const EmbedWeight& a, Stream s) {
  expect(a.sequences >= 1 && a.sequences <= kMostSequences, "embed: 1 <= sequences < 32768", a.sequences);
  expect(a.sequences * a.tokens < (int64_t{1} << 31), "embed: fewer than 2^31 tokens", a.sequences * a.tokens);
  expect_type(a.dtable.dtype, a.dx.dtype, true, "embed: dtable is f32 or of dx's type");
  if (!a.accumulate) fill({a.dtable, a.table_rows * a.width, 0.0f}, s);
  with_type(a.dx.dtype, "embed: dx is f32, bf16 or f16", [&]<class T>(Named<T>) {
    constexpr int kVector = 4;
    const bool wide = aligned({a.dx.data, a.dtable.data}) && a.width % kVector == 0;
    with_vector<kVector>(wide, [&](auto vector) {
      using Kernel = EmbedWeightRows<T, vector.value>;
      Geometry g = geometry::embed_weight(a.sequences * a.tokens, a.width, vector.value);
      g.shared = sizeof(typename Kernel::Shared);
      launch<Kernel>("embed_weight", g, a, s);
    });
  });
}

}  // namespace shardlab::gpu::SHARDLAB_GPU_VARIANT
