// Several documents in one sequence: who attends to whom, and how many pairs that makes.
//
// A document is a run of positions of the text. A token's position in its document counts from 0, so that the document of the token at
// position p of the text begins at p less that position. A query sees the keys of its document that are not after it.
#pragma once

#include <cmath>
#include <cstdint>
#include <span>

#include "plan/base/token_order.h"

namespace shardlab {

/// Pairs of a query among the places [first_query, first_query + queries) and a key among [first_key, first_key + keys) that it sees.
/// `positions`: by place, of each token of the sequence in its document. With a window w > 0 keys are less than w before the query.
inline int64_t seen_pairs(const TokenOrder& order, std::span<const int32_t> positions, int64_t first_query, int64_t queries,
                          int64_t first_key, int64_t keys, int64_t window = 0) {
  const auto tokens = static_cast<int64_t>(positions.size()), last = first_key + keys;
  int64_t pairs = 0;
  for (int64_t q = first_query; q < first_query + queries; ++q) {
    const int64_t position = order.position(q, tokens), document = positions[static_cast<size_t>(q)];
    const int64_t before = position - (window > 0 && window <= document ? window : document + 1);  // the last position not seen
    for (int64_t k = first_key; k < last;) {
      const int64_t run = order.run_end(k, tokens), end = run < last ? run : last;
      pairs += order.seen(k, end, position, tokens) - (before < 0 ? 0 : order.seen(k, end, before, tokens));
      k = end;
    }
  }
  return pairs;
}

/// The same as is expected where every token but the first begins a document with probability 1/document: a key d positions before a
/// query is of its document with probability (1 - 1/document)^d. `document` is at least 1. With a window w > 0 keys are less than w before
/// the query.
inline double expected_pairs(const TokenOrder& order, int64_t tokens, int64_t document, int64_t first_query, int64_t queries,
                             int64_t first_key, int64_t keys, int64_t window = 0) {
  const double stays = 1 - 1 / static_cast<double>(document);
  if (stays == 0) {  // each token sees itself alone
    const int64_t begin = first_query > first_key ? first_query : first_key;
    const int64_t end = first_query + queries < first_key + keys ? first_query + queries : first_key + keys;
    return end > begin ? static_cast<double>(end - begin) : 0;
  }
  double pairs = 0;
  for (int64_t k = first_key; k < first_key + keys;) {
    // Keys [k, end) whose positions are `step` apart.
    int64_t end = k + 1;
    const int64_t first = order.position(k, tokens);
    const int64_t step = end < first_key + keys ? order.position(end, tokens) - first : 1;
    if (step > 0)
      while (end < first_key + keys && order.position(end, tokens) - order.position(end - 1, tokens) == step) ++end;
    const int64_t length = end - k, apart = step > 0 ? step : 1;
    const double ratio = std::pow(stays, static_cast<double>(apart));
    for (int64_t q = first_query; q < first_query + queries; ++q) {
      const int64_t distance = order.position(q, tokens) - first;  // from the first key
      if (distance < 0) continue;
      const int64_t end_of_seen = distance / apart + 1 < length ? distance / apart + 1 : length;
      // Keys t with distance - t apart < window.
      const int64_t hidden = window > 0 && distance >= window ? (distance - window) / apart + 1 : 0;
      const int64_t seen = end_of_seen - hidden;
      if (seen <= 0) continue;
      const double nearest = std::pow(stays, static_cast<double>(distance - (end_of_seen - 1) * apart));
      pairs += ratio == 1 ? static_cast<double>(seen) : nearest * (1 - std::pow(ratio, static_cast<double>(seen))) / (1 - ratio);
    }
    k = end;
  }
  return pairs;
}

}  // namespace shardlab
