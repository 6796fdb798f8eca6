// The order in which the tokens of a sequence lie in memory. A sequence is stored once as a whole in this order, whether one rank
// holds it or several hold a part each: part r is the r-th equal run of the storage. Rotary positions, learned positions and the
// causal mask follow a token's position in the text; sums follow its place in the storage.
#pragma once

#include <cstdint>

namespace shardlab {

// Inlined always: see kernels/cpu/vector.h on what may be left in a variant's objects.
#define SHARDLAB_ORDER inline __attribute__((always_inline)) constexpr

/// Place in the storage <-> position in the text, of a sequence of `tokens` tokens in `parts` parts.
/// contiguous: the place is the position. zigzag: part r holds chunks r and 2 parts - 1 - r of 2 parts equal ones (Llama 3, 2024; the
/// causal work of all parts is equal). striped: part r holds positions r, r + parts, r + 2 parts ... (Brandon et al. 2023).
/// Within a part positions ascend in every order, so that the keys of a run that a query sees are the first ones of the run.
struct TokenOrder {
  enum class Kind : uint8_t { kContiguous, kZigzag, kStriped } kind = Kind::kContiguous;
  int parts = 1;  ///< runs of the storage within which positions ascend; contiguous: 1

  /// What the tokens of a sequence must be a multiple of.
  SHARDLAB_ORDER int64_t granule() const { return kind == Kind::kZigzag ? 2 * int64_t{parts} : kind == Kind::kStriped ? parts : 1; }

  SHARDLAB_ORDER int64_t position(int64_t place, int64_t tokens) const {
    if (kind == Kind::kContiguous) return place;
    const int64_t length = tokens / parts, part = place / length, at = place % length;
    if (kind == Kind::kStriped) return at * parts + part;
    const int64_t half = length / 2;
    return at < half ? part * half + at : (2 * parts - 1 - part) * half + at - half;
  }
  SHARDLAB_ORDER int64_t place(int64_t position, int64_t tokens) const {
    if (kind == Kind::kContiguous) return position;
    const int64_t length = tokens / parts;
    if (kind == Kind::kStriped) return position % parts * length + position / parts;
    const int64_t half = length / 2, chunk = position / half, at = position % half;
    return chunk < parts ? chunk * length + at : (2 * parts - 1 - chunk) * length + half + at;
  }

  /// The end of the run of ascending positions that holds `place`.
  SHARDLAB_ORDER int64_t run_end(int64_t place, int64_t tokens) const {
    if (kind == Kind::kContiguous) return tokens;
    const int64_t length = tokens / parts;
    return (place / length + 1) * length;
  }
  /// How many of the places [begin, end), which lie in one run, hold a position <= `position`: the first so many.
  SHARDLAB_ORDER int64_t seen(int64_t begin, int64_t end, int64_t position, int64_t tokens) const {
    int64_t last = position;  // the last place of the run that is seen
    if (kind != Kind::kContiguous) {
      const int64_t length = tokens / parts, part = begin / length, first = part * length;
      if (kind == Kind::kStriped) {
        last = position < part ? first - 1 : first + (position - part) / parts;
      } else {
        const int64_t half = length / 2, low = part * half, high = (2 * parts - 1 - part) * half;
        last = position >= high         ? first + half + position - high
               : position >= low + half ? first + half - 1
                                        : first + position - low;
      }
    }
    const int64_t n = last + 1 - begin;
    return n < 0 ? 0 : n > end - begin ? end - begin : n;
  }

  friend constexpr bool operator==(const TokenOrder&, const TokenOrder&) = default;
};

/// Pairs of i in [first, first + n) and j in [other, other + m) with j <= i.
constexpr int64_t pairs_up_to(int64_t first, int64_t n, int64_t other, int64_t m) {
  // The first i's meet none, the next one more each, the last all m.
  const int64_t none = other - first, all = none + m - 1;
  const int64_t from = none < 0 ? 0 : none > n ? n : none, to = all < from ? from : all > n ? n : all;
  const int64_t rising = to - from, least = from + 1 - none;
  return rising * least + rising * (rising - 1) / 2 + (n - to) * m;
}

/// Pairs of a query among the places [first_query, first_query + queries) and a key among [first_key, first_key + keys) whose position is
/// not after the query's less `behind`.
constexpr int64_t pairs_behind(const TokenOrder& order, int64_t tokens, int64_t behind, int64_t first_query, int64_t queries,
                               int64_t first_key, int64_t keys) {
  if (order.kind == TokenOrder::Kind::kContiguous) return pairs_up_to(first_query - behind, queries, first_key, keys);
  // Places whose positions are `step` apart: in zigzag half a part, in striped a part.
  const bool striped = order.kind == TokenOrder::Kind::kStriped;
  const int64_t length = striped ? tokens / order.parts : tokens / order.parts / 2;
  const auto end_of = [&](int64_t place, int64_t end) {
    const int64_t next = (place / length + 1) * length;
    return next < end ? next : end;
  };
  int64_t pairs = 0;
  for (int64_t q = first_query; q < first_query + queries; q = end_of(q, first_query + queries))
    for (int64_t k = first_key; k < first_key + keys; k = end_of(k, first_key + keys)) {
      const int64_t n = end_of(q, first_query + queries) - q, m = end_of(k, first_key + keys) - k;
      if (striped) {  // position p = part + parts * at: k's at is up to q's plus (q's part - k's part - behind) / parts, rounded down
        const int64_t ahead = q / length - k / length - behind;
        const int64_t places = ahead >= 0 ? ahead / order.parts : -((order.parts - 1 - ahead) / order.parts);
        pairs += pairs_up_to(q % length + places, n, k % length, m);
      } else {
        pairs += pairs_up_to(order.position(q, tokens) - behind, n, order.position(k, tokens), m);
      }
    }
  return pairs;
}

/// Pairs of a query among the places [first_query, first_query + queries) and a key among [first_key, first_key + keys) that it sees: the
/// keys that are not after it and, with a window w > 0, less than w before it.
constexpr int64_t seen_pairs(const TokenOrder& order, int64_t tokens, int64_t first_query, int64_t queries, int64_t first_key,
                             int64_t keys, int64_t window = 0) {
  const int64_t before = pairs_behind(order, tokens, 0, first_query, queries, first_key, keys);
  return window == 0 ? before : before - pairs_behind(order, tokens, window, first_query, queries, first_key, keys);
}

#undef SHARDLAB_ORDER

}  // namespace shardlab
