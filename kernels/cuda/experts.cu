// Mixtures of experts: routers, the rows of experts, their weighted sum, gates. (Products with the weights of experts: product.cu.)
//
// No kernel adds with atomics: rows are counted in spans of tokens, a warp's lane an expert, and the place of a row is its expert's begin, the
// rows of the spans before, and those of the tokens before in its own. Half a warp has a token where its sums are `lanes` of
// docs/canonical-order.md; numbers are the CPU's but for the device's exp and log.
#include "kernels/cuda/experts.h"

#include <cmath>

#include "kernels/cuda/elementwise.h"
#include "kernels/cuda/launches.h"
#include "kernels/cuda/sums.h"
#include "plan/base/tree.h"

namespace shardlab::gpu::SHARDLAB_GPU_VARIANT {
namespace {

using geometry::kCountWarps;
using geometry::kSpanTokens;
using kernels::ChosenByAll;
using kernels::RouteShape;

/// What a sum of no scores would be divided by (as DeepSeek-V3's router does).
constexpr float kLeastSum = 1e-20f;

SHARDLAB_DEVICE int32_t place_of(int32_t choice) { return choice < 0 ? ~choice : choice; }
SHARDLAB_DEVICE float lanes_max(const Thread& t, float x) {
#pragma unroll
  for (int mask = 1; mask < kLanes; mask *= 2) {
    const float other = t.shuffle_xor(x, mask);
    x = other > x ? other : x;
  }
  return x;
}

// ---- counting

/// What is counted of the choices, and where the counts go.
enum class Counted { kRows, kLoad, kSpans };

struct CountArgs {
  const int32_t* choice;
  int64_t sequences, tokens, top_k, experts;
  int64_t ranks = 1, leaves = 1;      ///< kRows: counts[ranks, leaves, experts / ranks]
  int32_t* counts = nullptr;          ///< of kRows; kSpans: [spans, experts]
  float* load = nullptr;              ///< kLoad: [sequences, experts]
  bool accumulate = false;            ///< load[experts] is of all sequences
  const int32_t* by_place = nullptr;  ///< of kLoad
};

template <Counted kCounted>
struct CountChoices {
  static constexpr int kThreads = kCountWarps * 32;
  using Args = CountArgs;

  SHARDLAB_DEVICE static void run(const Thread& t, const Args& a) {
    auto* shared = reinterpret_cast<int32_t*>(t.shared());
    const int64_t place = t.block_x() * kWarp + t.lane(), segment = t.block_y(), all = a.sequences * a.tokens;
    int64_t first = 0, end = all;
    if constexpr (kCounted == Counted::kSpans) {
      first = segment * kSpanTokens;
      end = first + kSpanTokens < all ? first + kSpanTokens : all;
    } else if constexpr (kCounted == Counted::kLoad) {
      if (!a.accumulate) first = segment * a.tokens, end = first + a.tokens;
    } else if (a.leaves > 1) {
      const int each = static_cast<int>(a.leaves / a.sequences), leaf = static_cast<int>(segment % each);
      const int64_t sequence = segment / each * a.tokens;
      first = sequence + leaf_begin(a.tokens, leaf, each);
      end = sequence + leaf_begin(a.tokens, leaf + 1, each);
    }
    int32_t n = 0;
    for (int64_t token = first + t.warp(); token < end; token += kCountWarps)
      for (int64_t j = 0; j < a.top_k; ++j) {
        const int32_t c = a.choice[token * a.top_k + j];
        n += (kCounted == Counted::kLoad ? place_of(c) : c) == place ? 1 : 0;
      }
    shared[t.index()] = n;
    t.barrier();
    if (t.warp() != 0 || place >= a.experts) return;
    for (int w = 1; w < kCountWarps; ++w) n += shared[w * kWarp + t.lane()];
    if constexpr (kCounted == Counted::kSpans) {
      a.counts[segment * a.experts + place] = n;
    } else if constexpr (kCounted == Counted::kLoad) {
      float& load = a.load[segment * a.experts + (a.by_place != nullptr ? a.by_place[place] : place)];
      load = (a.accumulate ? load : 0.0f) + static_cast<float>(n);
    } else {
      const int64_t each = a.experts / a.ranks;
      a.counts[(place / each * a.leaves + segment) * each + place % each] = n;
    }
  }
};

/// Marks the rows of an expert beyond the capacity: a thread an expert of a sequence, its tokens in order. No thread changes what another
/// counts.
struct DroppedRows {
  RouteForward a;
  template <int N>
  SHARDLAB_DEVICE void at(int64_t i) const {
    static_assert(N == 1);
    const RouteShape& s = a.shape;
    const int32_t place = static_cast<int32_t>(i % s.experts);
    const int64_t sequence = i / s.experts;
    int32_t* choice = a.choice + sequence * s.tokens * s.top_k;
    int64_t rows = 0;
    if (a.chosen.choice == nullptr) {
      for (int64_t m = 0; m < s.tokens * s.top_k; ++m)
        if (choice[m] == place && rows++ >= a.capacity) choice[m] = ~place;
      return;
    }
    // Rows of other ranks take room too, in the order of the text.
    const ChosenByAll& all = a.chosen;
    for (int64_t position = 0; position < all.tokens; ++position) {
      const int64_t at = all.order.place(position, all.tokens), t = at - all.first;
      const int32_t* chosen = all.choice + (sequence * all.tokens + at) * s.top_k;
      for (int64_t j = 0; j < s.top_k; ++j)
        if (chosen[j] == place && rows++ >= a.capacity && t >= 0 && t < s.tokens) choice[t * s.top_k + j] = ~place;
    }
  }
};

/// Counts of spans become the rows of the spans before; begins[e]: the first row of expert e. One block.
struct SpanSums {
  static constexpr int kThreads = geometry::kCountWarps * 32;
  struct Args {
    int32_t* counts;
    int32_t* begins;
    int64_t spans, experts;
  };
  SHARDLAB_DEVICE static void run(const Thread& t, const Args& a) {
    auto* rows = reinterpret_cast<int32_t*>(t.shared());
    for (int64_t e = t.index(); e < a.experts; e += t.threads()) {
      int32_t before = 0;
      for (int64_t span = 0; span < a.spans; ++span) {
        const int32_t n = a.counts[span * a.experts + e];
        a.counts[span * a.experts + e] = before;
        before += n;
      }
      rows[e] = before;
    }
    t.barrier();
    for (int64_t e = t.index(); e < a.experts; e += t.threads()) {
      int32_t begin = 0;
      for (int64_t before = 0; before < e; ++before) begin += rows[before];
      a.begins[e] = begin;
    }
  }
};

struct ChoicePlaces {
  const int32_t *choice, *counts, *begins;
  int32_t* places;
  int64_t top_k, experts;
  template <int N>
  SHARDLAB_DEVICE void at(int64_t i) const {
    static_assert(N == 1);
    const int32_t c = choice[i];
    const int64_t span = i / (kSpanTokens * top_k);
    int32_t n = c < 0 ? -1 : begins[c] + counts[span * experts + c];
    for (int64_t before = span * kSpanTokens * top_k; before < i && c >= 0; ++before) n += choice[before] == c ? 1 : 0;
    places[i] = n;
  }
};

Geometry counted(int64_t experts, int64_t segments) { return geometry::expert_counts(experts, segments); }

/// places[tokens * top_k]: the row of each choice, in scratch; -1 of a dropped row.
template <class Args>
const int32_t* places_in_scratch(const Args& a, Stream s) {
  expect(a.scratch.bytes >= scratch_bytes(a), "experts: scratch is large enough", a.scratch.bytes);
  expect(a.experts >= 1 && a.experts <= geometry::kMostExperts, "experts: 1 to 1024 of them", a.experts);
  auto* places = static_cast<int32_t*>(a.scratch.data);
  int32_t *begins = places + a.tokens * a.top_k, *counts = begins + a.experts;
  const int64_t spans = divided_up(a.tokens, kSpanTokens);
  launch<CountChoices<Counted::kSpans>>(
      "expert_spans", counted(a.experts, spans),
      {.choice = a.choice, .sequences = 1, .tokens = a.tokens, .top_k = a.top_k, .experts = a.experts, .counts = counts}, s);
  launch<SpanSums>("expert_spans", geometry::expert_sums(a.experts), {counts, begins, spans, a.experts}, s);
  elementwise<1>("expert_places", ChoicePlaces{a.choice, counts, begins, places, a.top_k, a.experts}, a.tokens * a.top_k, false, s);
  return places;
}

// ---- routers

/// A token's scores, in shared memory of its half of a warp: softmax, or a sigmoid each. Gives the largest logit.
SHARDLAB_DEVICE float scores(const Thread& t, const RouteShape& s, const float* logits, int lane, float* p) {
  float most = -INFINITY;
  for (int64_t e = lane; e < s.experts; e += kLanes) most = logits[e] > most ? logits[e] : most;
  most = lanes_max(t, most);
  float sum = 0;
  for (int64_t e = lane; e < s.experts; e += kLanes) {
    p[e] = s.sigmoid ? 1.0f / (1.0f + ::expf(-logits[e])) : ::expf(logits[e] - most);
    sum = sum + p[e];
  }
  const float inverse = 1.0f / lanes_sum(t, sum);
  for (int64_t e = lane; e < s.experts && !s.sigmoid; e += kLanes) p[e] = p[e] * inverse;
  t.sync_warp();
  return most;
}

/// What numbers are compared by: no number is below every one.
SHARDLAB_DEVICE float rank_of(float x) { return x == x ? x : -INFINITY; }

struct RouteRows {
  static constexpr int kThreads = geometry::kRouteThreads;
  using Args = RouteForward;
  static constexpr int32_t kFree = 0, kTaken = 1, kOutside = 2;

  SHARDLAB_DEVICE static void run(const Thread& t, const Args& a) {
    const RouteShape& s = a.shape;
    const int team = t.index() / kLanes, lane = t.index() % kLanes;
    const int64_t row = t.block_x() * geometry::kRouteRows + team, rows = s.sequences * s.tokens, n = s.experts;
    const bool inside = row < rows;
    const float* logits = a.logits + (inside ? row : rows - 1) * n;
    float* p = reinterpret_cast<float*>(t.shared()) + team * 4 * n;
    float *values = p + n, *groups = values + n;
    auto* state = reinterpret_cast<int32_t*>(groups + n);
    scores(t, s, logits, lane, p);
    for (int64_t e = lane; e < n; e += kLanes) {
      values[e] = a.bias != nullptr ? p[e] + a.bias[e] : logits[e];
      state[e] = kFree;
    }
    t.sync_warp();
    if (a.chosen.choice != nullptr) {
      take_chosen(a, inside ? row : rows - 1, lane, state);
    } else {
      if (s.groups_chosen < s.groups) leave_groups_out(t, s, a.bias != nullptr ? values : p, lane, groups, state);
      for (int64_t j = 0; j < s.top_k; ++j) take_largest(t, values, n, lane, state);
    }
    t.sync_warp();
    float sum = 0;
    for (int64_t e = 0; e < n; ++e)
      if (state[e] == kTaken) sum = sum + p[e];
    sum = sum + kLeastSum;
    for (int64_t e = lane; e < n && inside; e += kLanes) {
      if (state[e] != kTaken) continue;
      int64_t j = row * s.top_k;
      for (int64_t before = 0; before < e; ++before) j += state[before] == kTaken ? 1 : 0;
      if (a.weights != nullptr) a.weights[j] = s.normalise ? (p[e] / sum) * s.factor : p[e] * s.factor;
      a.choice[j] = a.places != nullptr ? a.places[e] : static_cast<int32_t>(e);
    }
  }

 private:
  /// Takes what the token of `row` has chosen.
  SHARDLAB_DEVICE static void take_chosen(const Args& a, int64_t row, int lane, int32_t* state) {
    const RouteShape& s = a.shape;
    const int32_t* chosen = a.chosen.choice + (row / s.tokens * a.chosen.tokens + a.chosen.first + row % s.tokens) * s.top_k;
    for (int64_t j = lane; j < s.top_k; j += kLanes) state[a.by_place != nullptr ? a.by_place[chosen[j]] : chosen[j]] = kTaken;
  }
  /// A group's largest score, or, of sigmoids, the sum of its two largest. Experts of groups that are not among the best are left out.
  SHARDLAB_DEVICE static void leave_groups_out(const Thread& t, const RouteShape& s, const float* p, int lane, float* groups,
                                               int32_t* state) {
    const int64_t each = s.experts / s.groups;
    for (int64_t g = lane; g < s.groups; g += kLanes) {
      const float* own = p + g * each;
      float first = own[0], second = each > 1 ? -INFINITY : 0.0f;
      for (int64_t e = 1; e < each; ++e) {
        const float least = own[e] < first ? own[e] : first;
        second = least > second ? least : second;
        first = own[e] > first ? own[e] : first;
      }
      groups[g] = rank_of(s.sigmoid ? first + second : first);
    }
    t.sync_warp();
    for (int64_t g = lane; g < s.groups; g += kLanes) {
      int64_t better = 0;
      for (int64_t other = 0; other < s.groups; ++other)
        better += groups[other] > groups[g] || (groups[other] == groups[g] && other < g) ? 1 : 0;
      for (int64_t e = g * each; e < (g + 1) * each && better >= s.groups_chosen; ++e) state[e] = kOutside;
    }
    t.sync_warp();
  }
  /// Takes the largest value that is free, of equal ones the first.
  SHARDLAB_DEVICE static void take_largest(const Thread& t, const float* values, int64_t n, int lane, int32_t* state) {
    float best = -INFINITY;
    int32_t at = -1;
    for (int64_t e = lane; e < n; e += kLanes)
      if (state[e] == kFree && (at < 0 || rank_of(values[e]) > best)) best = rank_of(values[e]), at = static_cast<int32_t>(e);
#pragma unroll
    for (int mask = 1; mask < kLanes; mask *= 2) {
      const float other = t.shuffle_xor(best, mask);
      const int32_t other_at = t.shuffle_xor(at, mask);
      if (other_at >= 0 && (at < 0 || other > best || (other == best && other_at < at))) best = other, at = other_at;
    }
    if (at >= 0 && at % kLanes == lane) state[at] = kTaken;
  }
};

struct RouteInputRows {
  static constexpr int kThreads = geometry::kRouteThreads;
  struct Args {
    RouteInput a;
    const float* load;    ///< [sequences, experts]; null: no loss for even use
    int64_t load_tokens;  ///< of a sequence, which it counts
  };

  SHARDLAB_DEVICE static void run(const Thread& t, const Args& args) {
    const RouteInput& a = args.a;
    const RouteShape& s = a.shape;
    const int team = t.index() / kLanes, lane = t.index() % kLanes;
    const int64_t row = t.block_x() * geometry::kRouteRows + team, rows = s.sequences * s.tokens, n = s.experts;
    const bool inside = row < rows;
    const int64_t at = inside ? row : rows - 1;
    const float *logits = a.logits + at * n, *dweights = a.dweights + at * s.top_k;
    const int32_t* choice = a.choice + at * s.top_k;
    float *p = reinterpret_cast<float*>(t.shared()) + team * 4 * n, *dp = p + n;
    const float most = scores(t, s, logits, lane, p);
    const auto expert = [&](int64_t j) { return a.by_place != nullptr ? a.by_place[place_of(choice[j])] : place_of(choice[j]); };
    float sum = 0, along = 0;
    for (int64_t j = 0; j < s.top_k; ++j) sum = sum + p[expert(j)];
    sum = sum + kLeastSum;
    for (int64_t j = 0; j < s.top_k; ++j) along = along + dweights[j] * ((p[expert(j)] / sum) * s.factor);
    for (int64_t e = lane; e < n; e += kLanes) dp[e] = 0;
    t.sync_warp();
    for (int64_t j = lane; j < s.top_k; j += kLanes)
      dp[expert(j)] = s.normalise ? (s.factor * dweights[j] - along) / sum : s.factor * dweights[j];
    t.sync_warp();
    const float per_token = 1.0f / static_cast<float>(s.step_tokens);
    if (args.load != nullptr) even_use(t, args, at / s.tokens, per_token, lane, p, dp);
    float mean = 0;
    for (int64_t e = lane; e < n; e += kLanes) mean = mean + dp[e] * p[e];
    mean = lanes_sum(t, mean);
    for (int64_t e = lane; e < n; e += kLanes) dp[e] = s.sigmoid ? dp[e] * (p[e] * (1.0f - p[e])) : p[e] * (dp[e] - mean);
    if (s.z_loss != 0) {
      float all = 0;
      for (int64_t e = lane; e < n; e += kLanes) all = all + (p[e] = ::expf(logits[e] - most));
      all = lanes_sum(t, all);
      const float slope = ((2.0f * s.z_loss) * (::logf(all) + most)) * per_token, inverse = 1.0f / all;
      for (int64_t e = lane; e < n; e += kLanes) dp[e] = dp[e] + slope * (p[e] * inverse);
    }
    for (int64_t e = lane; e < n && inside; e += kLanes) a.dlogits[row * n + e] = dp[e];
  }

 private:
  /// Adds the derivative of the loss for even use.
  SHARDLAB_DEVICE static void even_use(const Thread& t, const Args& args, int64_t sequence, float per_token, int lane,
                                       const float* p, float* dp) {
    const RouteShape& s = args.a.shape;
    const auto even = [&](int64_t e) {
      const float load = args.load[sequence * s.experts + e];
      return (s.balance * ((static_cast<float>(s.experts) * load) / static_cast<float>(s.top_k * args.load_tokens))) * per_token;
    };
    float all = 0, mean = 0;
    for (int64_t e = lane; e < s.experts; e += kLanes) all = all + p[e];
    all = lanes_sum(t, all);
    for (int64_t e = lane; e < s.experts; e += kLanes) mean = mean + even(e) * (p[e] / all);
    mean = lanes_sum(t, mean);
    for (int64_t e = lane; e < s.experts; e += kLanes) dp[e] = dp[e] + (s.sigmoid ? (even(e) - mean) / all : even(e));
  }
};

struct MovedBias {
  UpdateRouterBias a;
  template <int N>
  SHARDLAB_DEVICE void at(int64_t i) const {
    static_assert(N == 1);
    double sum = 0;  // whole numbers: exact
    for (int64_t e = 0; e < a.experts; ++e) sum += static_cast<double>(a.load[e]);
    const double own = static_cast<double>(a.load[i]) * static_cast<double>(a.experts);
    if (own < sum) a.bias[i] = a.bias[i] + *a.rate;
    if (own > sum) a.bias[i] = a.bias[i] - *a.rate;
  }
};

/// Counts in order, cut off where the room ends. One block, whose threads have as many neighbouring counts each.
struct FittedCounts {
  static constexpr int kThreads = geometry::kFitThreads;
  using Args = FitRows;
  SHARDLAB_DEVICE static void run(const Thread& t, const Args& a) {
    auto* sums = reinterpret_cast<int64_t*>(t.shared());
    const int64_t each = divided_up(a.n, kThreads), first = t.index() * each, end = first + each < a.n ? first + each : a.n;
    int64_t sum = 0;
    for (int64_t i = first; i < end; ++i) sum += a.counts[i];
    sums[t.index()] = sum;
    t.barrier();
    int64_t room = a.room;
    for (int before = 0; before < t.index(); ++before) room -= sums[before];
    if (room >= 0 && sum > room) *a.overflow = 1;  // the one thread among whose counts the room ends
    for (int64_t i = first; i < end; ++i) {
      const int64_t left = room > 0 ? room : 0, fits = a.counts[i] < left ? a.counts[i] : left;
      a.fitted[i] = static_cast<int32_t>(fits);
      room -= fits;
    }
  }
};

// ---- rows of tokens

template <class T>
struct DispatchedRows {
  const T* from;
  T* to;
  const int32_t* places;
  int64_t top_k, width;
  template <int N>
  SHARDLAB_DEVICE void at(int64_t i) const {
    const int64_t choice = i / width, column = i % width;
    if (places[choice] < 0) return;
    store<N>(to + places[choice] * width + column, load<N>(from + choice / top_k * width + column));
  }
};

/// The sum of a token's rows, weighted where there are weights, by expert; 0 where all were dropped.
template <class T>
struct SummedRows {
  const T* rows;
  const float* weights;
  T* to;
  const int32_t* places;
  int64_t top_k, width;
  template <int N>
  SHARDLAB_DEVICE void at(int64_t i) const {
    const int64_t token = i / width, column = i % width;
    Values<N> sum{};
    bool first = true;
    for (int64_t choice = token * top_k; choice < (token + 1) * top_k; ++choice) {
      if (places[choice] < 0) continue;
      Values<N> row = values_at<N>(rows + places[choice] * width + column);
#pragma unroll
      for (int j = 0; j < N; ++j) {
        if (weights != nullptr) row.at[j] = weights[choice] * row.at[j];
        sum.at[j] = first ? row.at[j] : sum.at[j] + row.at[j];
      }
      first = false;
    }
    put(to + i, sum);
  }
};

template <class T>
struct CombineInputRows {
  static constexpr int kThreads = geometry::kHalfWarpThreads;
  struct Args {
    CombineInput a;
    const int32_t* places;
  };
  SHARDLAB_DEVICE static void run(const Thread& t, const Args& args) {
    const CombineInput& a = args.a;
    const int64_t choice = t.block_x() * geometry::kHalfWarpRows + t.index() / kLanes, lane = t.index() % kLanes;
    const bool inside = choice < a.tokens * a.top_k;
    const int64_t place = inside ? args.places[choice] : -1;
    const T* dy = static_cast<const T*>(a.dy.data) + (inside ? choice / a.top_k * a.width : 0);
    const int64_t at = (place < 0 ? 0 : place) * a.width;
    const T* row = static_cast<const T*>(a.rows.data) + at;
    T* drow = static_cast<T*>(a.drows.data) + at;
    float sum = 0;
    if (place >= 0)
#pragma unroll 4
      for (int64_t i = lane; i < a.width; i += kLanes) {
        sum = sum + value_of(dy[i]) * value_of(row[i]);
        drow[i] = rounded<T>(a.weights[choice] * value_of(dy[i]));
      }
    sum = lanes_sum(t, sum);
    if (inside && lane == 0) a.dweights[choice] = sum;
  }
};

SHARDLAB_DEVICE float sigmoid(float x) { return 1.0f / (1.0f + ::expf(-x)); }

template <class T>
struct GatedRows {
  GateForward a;
  template <int N>
  SHARDLAB_DEVICE void at(int64_t i) const {
    const float p = sigmoid(values_at<1>(a.gate, i / a.width).at[0]);
    Values<N> x = values_at<N>(static_cast<const T*>(a.x.data) + i);
#pragma unroll
    for (int j = 0; j < N; ++j) x.at[j] = p * x.at[j];
    put(static_cast<T*>(a.y.data) + i, x);
  }
};

template <class T>
struct GateInputRows {
  static constexpr int kThreads = geometry::kHalfWarpThreads;
  using Args = GateInput;
  SHARDLAB_DEVICE static void run(const Thread& t, const Args& a) {
    const int64_t row = t.block_x() * geometry::kHalfWarpRows + t.index() / kLanes, lane = t.index() % kLanes;
    const bool inside = row < a.tokens;
    const int64_t at = (inside ? row : 0) * a.width;
    const T *dy = static_cast<const T*>(a.dy.data) + at, *x = static_cast<const T*>(a.x.data) + at;
    T* dx = static_cast<T*>(a.dx.data) + at;
    const float p = sigmoid(values_at<1>(a.gate, inside ? row : 0).at[0]);
    float sum = 0;
    for (int64_t i = lane; i < a.width && inside; i += kLanes) {
      sum = sum + value_of(dy[i]) * value_of(x[i]);
      dx[i] = rounded<T>(p * value_of(dy[i]));
    }
    sum = lanes_sum(t, sum) * (p * (1.0f - p));
    if (inside && lane == 0) put<1>(a.dgate, row, Values<1>{{sum}});
  }
};

void check(const RouteShape& s) {
  expect(s.experts >= 1 && s.experts <= geometry::kMostExperts, "route: 1 to 1024 experts", s.experts);
  expect(s.top_k >= 1 && s.top_k <= s.experts, "route: 1 <= top_k <= experts", s.top_k);
  expect(s.groups >= 1 && s.experts % s.groups == 0, "route: groups divide the experts; groups", s.groups);
}

}  // namespace

void route_forward(const RouteForward& a, Stream s) {
  const RouteShape& r = a.shape;
  check(r);
  launch<RouteRows>("route_forward", geometry::route(r.sequences * r.tokens, r.experts), a, s);
  if (a.counts == nullptr) return;
  if (a.capacity > 0) elementwise<1>("route_capacity", DroppedRows{a}, r.sequences * r.experts, false, s);
  launch<CountChoices<Counted::kRows>>("route_counts", counted(r.experts, a.leaves),
                                       {.choice = a.choice,
                                        .sequences = r.sequences,
                                        .tokens = r.tokens,
                                        .top_k = r.top_k,
                                        .experts = r.experts,
                                        .ranks = a.ranks,
                                        .leaves = a.leaves,
                                        .counts = a.counts},
                                       s);
}

void route_input(const RouteInput& a, Stream s) {
  const RouteShape& r = a.shape;
  check(r);
  const float* load = a.load;
  if (r.balance != 0 && load == nullptr) {
    auto* own = static_cast<float*>(a.scratch);
    expert_load({.choice = a.choice,
                 .load = own,
                 .sequences = r.sequences,
                 .tokens = r.tokens,
                 .top_k = r.top_k,
                 .experts = r.experts,
                 .by_place = a.by_place},
                s);
    load = own;
  }
  launch<RouteInputRows>("route_input", geometry::route(r.sequences * r.tokens, r.experts),
                         {a, r.balance != 0 ? load : nullptr, a.load != nullptr ? a.whole_tokens : r.tokens}, s);
}

void expert_load(const ExpertLoad& a, Stream s) {
  launch<CountChoices<Counted::kLoad>>("expert_load", counted(a.experts, a.accumulate ? 1 : a.sequences),
                                       {.choice = a.choice,
                                        .sequences = a.sequences,
                                        .tokens = a.tokens,
                                        .top_k = a.top_k,
                                        .experts = a.experts,
                                        .load = a.load,
                                        .accumulate = a.accumulate,
                                        .by_place = a.by_place},
                                       s);
}

void update_router_bias(const UpdateRouterBias& a, Stream s) {
  elementwise<1>("update_router_bias", MovedBias{a}, a.experts, false, s);
}

void fit_rows(const FitRows& a, Stream s) { launch<FittedCounts>("fit_rows", geometry::fit_rows(), a, s); }

void dispatch(const Dispatch& a, Stream s) {
  expect_type(a.to.dtype, a.from.dtype, false, "dispatch: tokens and rows are of one type");
  const int32_t* places = places_in_scratch(a, s);
  with_type(a.from.dtype, "dispatch: tokens are f32, bf16 or f16", [&]<class T>(Named<T>) {
    const auto* from = static_cast<const T*>(a.from.data);
    auto* to = static_cast<T*>(a.to.data);
    const bool wide = a.width % kVectorOf<T> == 0 && aligned({from, to});
    if (a.back)
      elementwise<kVectorOf<T>>("dispatch_input", SummedRows<T>{from, nullptr, to, places, a.top_k, a.width}, a.tokens * a.width,
                                wide, s);
    else
      elementwise<kVectorOf<T>>("dispatch", DispatchedRows<T>{from, to, places, a.top_k, a.width}, a.tokens * a.top_k * a.width,
                                wide, s);
  });
}

void combine_forward(const CombineForward& a, Stream s) {
  expect_type(a.y.dtype, a.rows.dtype, false, "combine: rows and y are of one type");
  const int32_t* places = places_in_scratch(a, s);
  with_type(a.rows.dtype, "combine: rows are f32, bf16 or f16", [&]<class T>(Named<T>) {
    const auto* rows = static_cast<const T*>(a.rows.data);
    auto* y = static_cast<T*>(a.y.data);
    const bool wide = a.width % kVectorOf<T> == 0 && aligned({rows, y});
    elementwise<kVectorOf<T>>("combine_rows", SummedRows<T>{rows, a.weights, y, places, a.top_k, a.width}, a.tokens * a.width, wide,
                              s);
  });
}

void combine_input(const CombineInput& a, Stream s) {
  expect_type(a.rows.dtype, a.dy.dtype, false, "combine: dy and rows are of one type");
  expect_type(a.drows.dtype, a.dy.dtype, false, "combine: dy and drows are of one type");
  const int32_t* places = places_in_scratch(a, s);
  with_type(a.dy.dtype, "combine: dy is f32, bf16 or f16", [&]<class T>(Named<T>) {
    launch<CombineInputRows<T>>("combine_rows_input", geometry::half_warps(a.tokens * a.top_k), {a, places}, s);
  });
}

void gate_forward(const GateForward& a, Stream s) {
  expect_type(a.y.dtype, a.x.dtype, false, "gate: x and y are of one type");
  expect_type(a.gate.dtype, a.x.dtype, true, "gate: a gate is f32 or of x's type");
  with_type(a.x.dtype, "gate: x is f32, bf16 or f16", [&]<class T>(Named<T>) {
    const bool wide = a.width % kVectorOf<T> == 0 && aligned({a.x.data, a.y.data});
    elementwise<kVectorOf<T>>("gate_forward", GatedRows<T>{a}, a.tokens * a.width, wide, s);
  });
}

void gate_input(const GateInput& a, Stream s) {
  expect_type(a.x.dtype, a.dy.dtype, false, "gate: dy and x are of one type");
  expect_type(a.dx.dtype, a.dy.dtype, false, "gate: dy and dx are of one type");
  expect_type(a.dgate.dtype, a.dy.dtype, true, "gate: dgate is f32 or of dy's type");
  with_type(a.dy.dtype, "gate: dy is f32, bf16 or f16",
            [&]<class T>(Named<T>) { launch<GateInputRows<T>>("gate_input", geometry::half_warps(a.tokens), a, s); });
}

}  // namespace shardlab::gpu::SHARDLAB_GPU_VARIANT
