// Rows of experts as kernels find them: the places of a token's rows, and the rows of each expert among those of several ranks.
#pragma once

#include <algorithm>
#include <utility>

#include "kernels/checks.h"
#include "kernels/cpu/panels.h"
#include "kernels/experts.h"

namespace shardlab::kernels {

inline int64_t rounded(int64_t bytes) { return (bytes + 63) / 64 * 64; }

template <class T>
T* take(void*& scratch, int64_t n) {
  T* taken = static_cast<T*>(scratch);
  scratch = static_cast<char*>(scratch) + rounded(n * static_cast<int64_t>(sizeof(T)));
  return taken;
}

inline bool is_dropped(int32_t choice) { return choice < 0; }

/// places[t * top_k + j]: the row of token t and its expert j, rows by expert and then by token; -1 of a dropped row.
inline int32_t* places_of(const int32_t* choice, int64_t tokens, int64_t top_k, int64_t experts, void* scratch) {
  int32_t* places = take<int32_t>(scratch, tokens * top_k);
  int32_t* next = take<int32_t>(scratch, experts);
  std::fill(next, next + experts, 0);
  for (int64_t i = 0; i < tokens * top_k; ++i)
    if (!is_dropped(choice[i])) ++next[choice[i]];
  int32_t begin = 0;
  for (int64_t e = 0; e < experts; ++e) begin += std::exchange(next[e], begin);
  for (int64_t i = 0; i < tokens * top_k; ++i) places[i] = is_dropped(choice[i]) ? -1 : next[choice[i]]++;
  return places;
}

/// Calls body(expert, first row, rows) for each source and expert with rows.
template <class Body>
void for_groups(const RowCounts& r, const Body& body) {
  const int64_t parts = r.leaves / r.sources;
  int64_t at = 0;
  for (int source = 0; source < r.sources; ++source)
    for (int64_t e = 0; e < r.experts; ++e) {
      int64_t rows = 0;
      for (int64_t l = source * parts; l < (source + 1) * parts; ++l) rows += r.counts[l * r.experts + e];
      expect(at + rows <= r.capacity, "grouped linear: rows that are counted fit the buffer; rows", at + rows);
      if (rows > 0) body(e, at, rows);
      at += rows;
    }
}

/// Where the rows of each expert begin, those of each source apart.
class ExpertRuns {
 public:
  static int64_t bytes(const RowCounts& r) { return rounded(8 * r.sources * (r.experts + 1)); }
  /// `begins`: `bytes` of scratch.
  ExpertRuns(const RowCounts& r, void* begins) : r_(r), begins_(static_cast<int64_t*>(begins)) {
    const int64_t parts = r.leaves / r.sources;
    int64_t at = 0;
    for (int source = 0; source < r.sources; ++source) {
      for (int64_t e = 0; e < r.experts; ++e) {
        begins_[place(source, e)] = at;
        for (int64_t l = source * parts; l < (source + 1) * parts; ++l) at += r.counts[l * r.experts + e];
      }
      begins_[place(source, r.experts)] = at;
    }
    expect(at <= r.capacity, "grouped linear: rows that are counted fit the buffer; rows", at);
  }
  int64_t begin(int source, int64_t expert) const { return begins_[place(source, expert)]; }
  int64_t rows(int source, int64_t expert) const { return begins_[place(source, expert) + 1] - begin(source, expert); }
  int64_t rows(int64_t expert) const {
    int64_t all = 0;
    for (int source = 0; source < r_.sources; ++source) all += rows(source, expert);
    return all;
  }
  /// Where the leaves of an expert's rows end: ends[leaves + 1].
  void leaf_ends(int64_t expert, int64_t* ends) const {
    ends[0] = 0;
    for (int64_t l = 0; l < r_.leaves; ++l) ends[l + 1] = ends[l] + r_.counts[l * r_.experts + expert];
  }

 private:
  int64_t place(int source, int64_t expert) const { return source * (r_.experts + 1) + expert; }

  const RowCounts& r_;
  int64_t* begins_;
};

inline int64_t product_bytes(int64_t extent) {
  return rounded(4 * extent * kMostTileRows) + rounded(4 * extent * block_columns(extent));
}
/// The most that a product of `extent` or fewer needs.
inline int64_t product_bytes_up_to(int64_t extent) {
  const int64_t packed = std::min<int64_t>(512 * extent, std::max<int64_t>(int64_t{1} << 18, 64 * extent));
  return rounded(4 * extent * kMostTileRows) + rounded(4 * packed);
}

}  // namespace shardlab::kernels
