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

/// Pairs of a query among the places [first_query, first_query + queries) and a key among [first_key, first_key + keys) that it sees.
constexpr int64_t seen_pairs(const TokenOrder& order, int64_t tokens, int64_t first_query, int64_t queries, int64_t first_key,
                             int64_t keys) {
  int64_t pairs = 0;
  if (order.kind == TokenOrder::Kind::kContiguous) {                  // the query at i sees min(keys, i + 1 - first_key)
    const int64_t none = first_key - first_query, all = none + keys;  // queries before `none` see nothing, from `all` - 1 on all
    const int64_t from = none < 0         ? 0
                         : none > queries ? queries
                                          : none,
                  to = all - 1 < from      ? from
                       : all - 1 > queries ? queries
                                           : all - 1;
    const int64_t n = to - from, first = from + 1 - none;
    return n * first + n * (n - 1) / 2 + (queries - to) * keys;
  }
  for (int64_t q = first_query; q < first_query + queries; ++q)
    for (int64_t key = first_key; key < first_key + keys;) {
      const int64_t run = order.run_end(key, tokens), end = run < first_key + keys ? run : first_key + keys;
      pairs += order.seen(key, end, order.position(q, tokens), tokens);
      key = end;
    }
  return pairs;
}

#undef SHARDLAB_ORDER

}  // namespace shardlab
