#include "kernels/experts.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <utility>

#include "kernels/checks.h"
#include "kernels/expert_rows.h"
#include "kernels/linear_runs.h"
#include "plan/base/tree.h"

namespace shardlab::kernels {
namespace {

/// What a sum of no scores would be divided by (as DeepSeek-V3's router does).
constexpr float kLeastSum = 1e-20f;

/// 16 running sums of value(i), joined by the tree.
template <class Value>
float lanes(int64_t n, const Value& value) {
  std::array<float, 16> lane{};
  for (int64_t i = 0; i < n; ++i) lane[static_cast<size_t>(i % 16)] += value(i);
  return tree_sum(
      0, 16, [&](int64_t j) { return lane[static_cast<size_t>(j)]; }, [](float a, float b) { return a + b; });
}

/// to = e^(x - max of x); returns the largest x.
float exponentials(const Kernels& k, const float* x, int64_t n, float* to) {
  const float max = *std::max_element(x, x + n);
  for (int64_t i = 0; i < n; ++i) to[i] = x[i] - max;
  k.exp(to, n, to);
  return max;
}

float sigmoid(const Kernels& k, float x) {
  float e = -x;
  k.exp(&e, 1, &e);
  return 1.0f / (1.0f + e);
}

/// Scores of one token: softmax, or a sigmoid each.
void scores(const Kernels& k, const RouteShape& s, const float* logits, float* p) {
  if (s.sigmoid) {
    for (int64_t i = 0; i < s.experts; ++i) p[i] = -logits[i];
    k.exp(p, s.experts, p);
    for (int64_t i = 0; i < s.experts; ++i) p[i] = 1.0f / (1.0f + p[i]);
    return;
  }
  exponentials(k, logits, s.experts, p);
  const float inverse = 1.0f / lanes(s.experts, [&](int64_t i) { return p[i]; });
  for (int64_t i = 0; i < s.experts; ++i) p[i] = p[i] * inverse;
}

/// The expert that was chosen, whether the row was dropped or not.
int32_t expert_of(int32_t choice, const int32_t* by_place) {
  const int32_t place = is_dropped(choice) ? ~choice : choice;
  return by_place != nullptr ? by_place[place] : place;
}

/// The sum of a token's scores by which its weights are divided.
float sum_of_chosen(const RouteShape& s, const float* p, const int32_t* chosen, const int32_t* by_place) {
  float sum = 0;
  for (int64_t j = 0; j < s.top_k; ++j) sum = sum + p[expert_of(chosen[j], by_place)];
  return sum + kLeastSum;
}

void weigh(const RouteShape& s, const float* p, const int32_t* chosen, const int32_t* by_place, float* weights) {
  const float sum = s.normalise ? sum_of_chosen(s, p, chosen, by_place) : 1.0f;
  for (int64_t j = 0; j < s.top_k; ++j) {
    const float own = p[expert_of(chosen[j], by_place)];
    weights[j] = s.normalise ? (own / sum) * s.factor : own * s.factor;
  }
}

/// Marks in `taken` by 1 the n largest that are not marked, of equal ones the first.
void take_largest(const float* x, int64_t count, int64_t n, int32_t* taken) {
  for (int64_t j = 0; j < n; ++j) {
    int64_t best = -1;
    for (int64_t i = 0; i < count; ++i)
      if (!taken[i] && (best < 0 || x[i] > x[best])) best = i;
    taken[best] = 1;
  }
}

/// What a group of experts is chosen by: its largest score, or, of sigmoids, the sum of the two largest.
float score_of_group(const RouteShape& s, const float* p, int64_t experts) {
  float first = p[0], second = experts > 1 ? -std::numeric_limits<float>::infinity() : 0;
  for (int64_t e = 1; e < experts; ++e) {
    second = std::max(second, std::min(first, p[e]));
    first = std::max(first, p[e]);
  }
  return s.sigmoid ? first + second : first;
}

/// The top_k largest of `values` in the best groups by `p`, of equal ones the first, in ascending order of their numbers. `groups` and `taken` have room for a number
/// an expert.
void choose(const RouteShape& s, const float* values, const float* p, float* groups, int32_t* taken, int32_t* chosen) {
  constexpr int32_t kOutside = 2;
  const int64_t each = s.experts / s.groups;
  std::fill(taken, taken + s.experts, 0);
  if (s.groups_chosen < s.groups) {
    for (int64_t g = 0; g < s.groups; ++g) groups[g] = score_of_group(s, p + g * each, each);
    take_largest(groups, s.groups, s.groups_chosen, taken);
    for (int64_t g = s.groups - 1; g >= 0; --g) std::fill_n(taken + g * each, each, taken[g] == 1 ? 0 : kOutside);
  }
  take_largest(values, s.experts, s.top_k, taken);
  for (int64_t e = 0, j = 0; e < s.experts; ++e)
    if (taken[e] == 1) chosen[j++] = static_cast<int32_t>(e);
}

/// The part of the tokens that token t of a sequence belongs to.
int64_t leaf_of(int64_t sequence, int64_t t, int64_t tokens, int64_t sequences, int64_t leaves) {
  if (leaves == 1) return 0;
  const int each = static_cast<int>(leaves / sequences);
  int leaf = static_cast<int>(t * each / tokens);
  while (t >= leaf_begin(tokens, leaf + 1, each)) ++leaf;
  while (t < leaf_begin(tokens, leaf, each)) --leaf;
  return sequence * each + leaf;
}

/// Counts the rows that experts take, and marks those that they drop. In the order of the text an expert takes the rows of the first
/// tokens that chose it, those of other ranks among them. full[experts]: rows that chose each expert so far; null: experts take all.
void take_rows(const RouteForward& a, int32_t* full) {
  const RouteShape& s = a.shape;
  const bool whole = a.chosen.choice == nullptr;
  const int64_t each = s.experts / a.ranks, tokens = whole ? s.tokens : a.chosen.tokens;
  std::fill(a.counts, a.counts + a.leaves * s.experts, 0);
  for (int64_t q = 0; q < s.sequences; ++q) {
    if (full != nullptr) std::fill(full, full + s.experts, 0);
    for (int64_t position = 0; position < tokens; ++position) {
      const int64_t place = whole ? position : a.chosen.order.place(position, tokens);
      const int64_t t = place - (whole ? 0 : a.chosen.first);
      if (t < 0 || t >= s.tokens) {
        const int32_t* chosen = a.chosen.choice + (q * tokens + place) * s.top_k;
        for (int64_t j = 0; j < s.top_k; ++j) ++full[chosen[j]];
        continue;
      }
      int32_t* chosen = a.choice + (q * s.tokens + t) * s.top_k;
      const int64_t leaf = leaf_of(q, t, s.tokens, s.sequences, a.leaves);
      for (int64_t j = 0; j < s.top_k; ++j) {
        const int64_t e = chosen[j];
        if (full != nullptr && full[e]++ >= a.capacity)
          chosen[j] = ~chosen[j];
        else
          ++a.counts[(e / each * a.leaves + leaf) * each + e % each];
      }
    }
  }
}

}  // namespace

void route_forward(const Kernels& k, const RouteForward& a) {
  const RouteShape& s = a.shape;
  expect(s.top_k >= 1 && s.top_k <= s.experts, "route: 1 <= top_k <= experts", s.top_k);
  void* scratch = a.scratch;
  float* p = take<float>(scratch, s.experts);
  int32_t* taken = take<int32_t>(scratch, s.experts);
  float* groups = take<float>(scratch, s.experts);
  float* biased = take<float>(scratch, s.experts);
  for (int64_t row = 0; row < s.sequences * s.tokens; ++row) {
    const float* logits = a.logits + row * s.experts;
    int32_t* chosen = a.choice + row * s.top_k;
    scores(k, s, logits, p);
    const bool chooses = a.chosen.choice == nullptr;
    for (int64_t e = 0; e < s.experts && chooses && a.bias != nullptr; ++e) biased[e] = p[e] + a.bias[e];
    if (!chooses)
      std::copy_n(a.chosen.choice + (row / s.tokens * a.chosen.tokens + a.chosen.first + row % s.tokens) * s.top_k, s.top_k,
                  chosen);
    else if (a.bias != nullptr)
      choose(s, biased, biased, groups, taken, chosen);
    else
      choose(s, logits, p, groups, taken, chosen);
    if (a.weights != nullptr) weigh(s, p, chosen, chooses ? nullptr : a.by_place, a.weights + row * s.top_k);
    for (int64_t j = 0; j < s.top_k && chooses && a.places != nullptr; ++j) chosen[j] = a.places[chosen[j]];
  }
  if (a.counts != nullptr) take_rows(a, a.capacity > 0 ? take<int32_t>(scratch, s.experts) : nullptr);
}

void route_input(const Kernels& k, const RouteInput& a) {
  const RouteShape& s = a.shape;
  void* scratch = a.scratch;
  float* p = take<float>(scratch, s.experts);
  float* dp = take<float>(scratch, s.experts);
  float* even = take<float>(scratch, s.experts);  // the derivative of the loss for even use, by mean score
  float* soft = take<float>(scratch, s.experts);
  const float per_token = 1.0f / static_cast<float>(s.step_tokens);
  const bool balances = s.balance != 0;
  for (int64_t q = 0; q < s.sequences; ++q) {
    if (balances) {
      const int64_t tokens = a.load != nullptr ? a.whole_tokens : s.tokens;
      if (a.load != nullptr)
        std::copy_n(a.load + q * s.experts, s.experts, even);
      else
        expert_load({.choice = a.choice + q * s.tokens * s.top_k,
                     .load = even,
                     .tokens = s.tokens,
                     .top_k = s.top_k,
                     .experts = s.experts,
                     .by_place = a.by_place});
      for (int64_t e = 0; e < s.experts; ++e)
        even[e] = (s.balance * ((static_cast<float>(s.experts) * even[e]) / static_cast<float>(s.top_k * tokens))) * per_token;
    }
    for (int64_t row = q * s.tokens; row < (q + 1) * s.tokens; ++row) {
      const float* logits = a.logits + row * s.experts;
      const float* dweights = a.dweights + row * s.top_k;
      const int32_t* chosen = a.choice + row * s.top_k;
      float* dlogits = a.dlogits + row * s.experts;
      scores(k, s, logits, p);
      std::fill(dp, dp + s.experts, 0.0f);
      const float sum = s.normalise ? sum_of_chosen(s, p, chosen, a.by_place) : 1.0f;
      float along = 0;  // dweights . weights
      for (int64_t j = 0; j < s.top_k && s.normalise; ++j)
        along = along + dweights[j] * ((p[expert_of(chosen[j], a.by_place)] / sum) * s.factor);
      for (int64_t j = 0; j < s.top_k; ++j)
        dp[expert_of(chosen[j], a.by_place)] = s.normalise ? (s.factor * dweights[j] - along) / sum : s.factor * dweights[j];
      if (balances && s.sigmoid) {
        const float all = lanes(s.experts, [&](int64_t e) { return p[e]; });
        const float mean = lanes(s.experts, [&](int64_t e) { return even[e] * (p[e] / all); });
        for (int64_t e = 0; e < s.experts; ++e) dp[e] = dp[e] + (even[e] - mean) / all;
      } else if (balances) {
        for (int64_t e = 0; e < s.experts; ++e) dp[e] = dp[e] + even[e];
      }
      if (s.sigmoid) {
        for (int64_t e = 0; e < s.experts; ++e) dlogits[e] = dp[e] * (p[e] * (1.0f - p[e]));
      } else {
        const float mean = lanes(s.experts, [&](int64_t e) { return dp[e] * p[e]; });
        for (int64_t e = 0; e < s.experts; ++e) dlogits[e] = p[e] * (dp[e] - mean);
      }
      if (s.z_loss == 0) continue;
      const float max = exponentials(k, logits, s.experts, soft);
      const float all = lanes(s.experts, [&](int64_t e) { return soft[e]; });
      float log_sum = all;
      k.log(&log_sum, 1, &log_sum);
      const float slope = ((2.0f * s.z_loss) * (log_sum + max)) * per_token;
      const float inverse = 1.0f / all;
      for (int64_t e = 0; e < s.experts; ++e) dlogits[e] = dlogits[e] + slope * (soft[e] * inverse);
    }
  }
}

void expert_load(const ExpertLoad& a) {
  const int64_t stride = a.accumulate ? 0 : a.experts;
  if (!a.accumulate) std::fill(a.load, a.load + a.sequences * a.experts, 0.0f);
  for (int64_t q = 0; q < a.sequences; ++q)
    for (int64_t i = q * a.tokens * a.top_k; i < (q + 1) * a.tokens * a.top_k; ++i)
      a.load[q * stride + expert_of(a.choice[i], a.by_place)] += 1.0f;
}

void update_router_bias(const UpdateRouterBias& a) {
  double sum = 0;  // whole numbers: exact
  for (int64_t e = 0; e < a.experts; ++e) sum += static_cast<double>(a.load[e]);
  for (int64_t e = 0; e < a.experts; ++e) {
    const double own = static_cast<double>(a.load[e]) * static_cast<double>(a.experts);
    if (own < sum) a.bias[e] += a.rate;
    if (own > sum) a.bias[e] -= a.rate;
  }
}

bool fit_rows(std::span<const int32_t> counts, int64_t room, std::span<int32_t> fitted) {
  bool cut = false;
  for (size_t i = 0; i < counts.size(); ++i) {
    const int64_t fits = std::min<int64_t>(counts[i], room);
    cut = cut || fits < counts[i];
    fitted[i] = static_cast<int32_t>(fits);
    room -= fits;
  }
  return cut;
}

void dispatch(const Dispatch& a) {
  const int32_t* places = places_of(a.choice, a.tokens, a.top_k, a.experts, a.scratch);
  for (int64_t t = 0; t < a.tokens; ++t) {
    bool first = true;
    for (int64_t j = 0; j < a.top_k; ++j) {
      if (places[t * a.top_k + j] < 0) continue;
      const int64_t row = places[t * a.top_k + j] * a.width, token = t * a.width;
      const float* from = a.from + (a.back ? row : token);
      float* to = a.to + (a.back ? token : row);
      if (!a.back || first)
        std::copy(from, from + a.width, to);
      else
        for (int64_t i = 0; i < a.width; ++i) to[i] = to[i] + from[i];
      first = false;
    }
    if (a.back && first) std::fill_n(a.to + t * a.width, a.width, 0.0f);
  }
}

void combine_forward(const CombineForward& a) {
  const int32_t* places = places_of(a.choice, a.tokens, a.top_k, a.experts, a.scratch);
  for (int64_t t = 0; t < a.tokens; ++t) {
    float* y = a.y + t * a.width;
    bool first = true;
    for (int64_t j = 0; j < a.top_k; ++j) {
      if (places[t * a.top_k + j] < 0) continue;
      const float* row = a.rows + places[t * a.top_k + j] * a.width;
      const float weight = a.weights[t * a.top_k + j];
      if (first)
        for (int64_t i = 0; i < a.width; ++i) y[i] = weight * row[i];
      else
        for (int64_t i = 0; i < a.width; ++i) y[i] = y[i] + weight * row[i];
      first = false;
    }
    if (first) std::fill_n(y, a.width, 0.0f);
  }
}

void combine_input(const CombineInput& a) {
  const int32_t* places = places_of(a.choice, a.tokens, a.top_k, a.experts, a.scratch);
  for (int64_t t = 0; t < a.tokens; ++t)
    for (int64_t j = 0; j < a.top_k; ++j) {
      const int64_t at = t * a.top_k + j, first = places[at] * a.width;
      const float* dy = a.dy + t * a.width;
      if (places[at] < 0) {
        a.dweights[at] = 0;
        continue;
      }
      a.dweights[at] = lanes(a.width, [&](int64_t i) { return dy[i] * a.rows[first + i]; });
      for (int64_t i = 0; i < a.width; ++i) a.drows[first + i] = a.weights[at] * dy[i];
    }
}

void gate_forward(const Kernels& k, const GateForward& a) {
  for (int64_t t = 0; t < a.tokens; ++t) {
    const float p = sigmoid(k, a.gate[t]);
    for (int64_t i = t * a.width; i < (t + 1) * a.width; ++i) a.y[i] = p * a.x[i];
  }
}

void gate_input(const Kernels& k, const GateInput& a) {
  for (int64_t t = 0; t < a.tokens; ++t) {
    const float p = sigmoid(k, a.gate[t]);
    const float *dy = a.dy + t * a.width, *x = a.x + t * a.width;
    a.dgate[t] = lanes(a.width, [&](int64_t i) { return dy[i] * x[i]; }) * (p * (1.0f - p));
    for (int64_t i = 0; i < a.width; ++i) a.dx[t * a.width + i] = p * dy[i];
  }
}

void grouped_linear(const Kernels& k, const GroupedLinear& a) {
  for_groups(a.rows, [&](int64_t e, int64_t first, int64_t rows) {
    const float* w = a.w + e * a.out * a.in;
    if (a.back)
      k.linear_input({.dy = a.x + first * a.out,
                      .w = w,
                      .dx = a.y + first * a.in,
                      .rows = rows,
                      .in = a.in,
                      .out = a.out,
                      .out_part = a.part,
                      .canonical = a.canonical,
                      .scratch = a.scratch});
    else
      k.linear_forward({.x = a.x + first * a.in,
                        .w = w,
                        .y = a.y + first * a.out,
                        .rows = rows,
                        .in = a.in,
                        .out = a.out,
                        .in_part = a.part,
                        .canonical = a.canonical,
                        .scratch = a.scratch});
  });
}

void grouped_linear_weight(const Kernels& k, const GroupedLinearWeight& a) {
  expect(!a.accumulate || !a.canonical, "grouped linear: canonical mode does not accumulate; plan Add ops", a.accumulate);
  const RowCounts& r = a.rows;
  void* scratch = a.scratch;
  const ExpertRuns all(r, take<char>(scratch, ExpertRuns::bytes(r)));
  RowRun* runs = a.canonical ? take<RowRun>(scratch, r.sources) : nullptr;
  int64_t* ends = a.canonical ? take<int64_t>(scratch, r.leaves + 1) : nullptr;
  for (int64_t e = 0; e < r.experts; ++e) {
    float* dw = a.dw + e * a.out * a.in;
    if (all.rows(e) == 0) {
      if (!a.accumulate) k.fill(dw, a.out * a.in, 0.0f);
      continue;
    }
    if (a.canonical) {
      for (int source = 0; source < r.sources; ++source) runs[source] = {all.begin(source, e), all.rows(source, e)};
      all.leaf_ends(e, ends);
      linear_weight_runs(k, {.x = a.x,
                             .dy = a.dy,
                             .dw = dw,
                             .runs = runs,
                             .run_count = r.sources,
                             .leaf_ends = ends,
                             .leaves = r.leaves,
                             .in = a.in,
                             .out = a.out,
                             .scratch = scratch});
      continue;
    }
    bool more = a.accumulate;
    for (int source = 0; source < r.sources; ++source) {
      if (all.rows(source, e) == 0) continue;
      const int64_t first = all.begin(source, e);
      k.linear_weight({.x = a.x + first * a.in,
                       .dy = a.dy + first * a.out,
                       .dw = dw,
                       .tokens = {1, all.rows(source, e), {}},
                       .in = a.in,
                       .out = a.out,
                       .accumulate = more});
      more = true;
    }
  }
}

void grouped_activation(const Kernels& k, const GroupedActivation& a) {
  const RowCounts& r = a.rows;
  int64_t rows = 0;
  for (int64_t i = 0; i < r.leaves * r.experts; ++i) rows += r.counts[i];
  expect(rows <= r.capacity, "activation: rows that are counted fit the buffer; rows", rows);
  if (a.da == nullptr)
    k.activation_forward({a.u, a.to, rows * a.width, a.swiglu});
  else
    k.activation_input({a.da, a.u, a.to, rows * a.width, a.swiglu});
}

int64_t route_scratch_bytes(int64_t experts, bool capacity) { return (capacity ? 5 : 4) * rounded(4 * experts); }
int64_t places_scratch_bytes(int64_t tokens, int64_t top_k, int64_t experts) {
  return rounded(4 * tokens * top_k) + rounded(4 * experts);
}
int64_t grouped_scratch_bytes(const GroupedLinear& a) { return a.canonical ? product_bytes(a.back ? a.out : a.in) : 0; }
int64_t grouped_scratch_bytes(const GroupedLinearWeight& a) {
  const int64_t begins = ExpertRuns::bytes(a.rows);
  if (!a.canonical) return begins;
  return begins + rounded(16 * a.rows.sources) + rounded(8 * (a.rows.leaves + 1)) + product_bytes_up_to(a.rows.capacity);
}

}  // namespace shardlab::kernels
